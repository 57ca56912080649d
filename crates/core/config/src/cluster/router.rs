//! `[router]`: the routing policy and its parameters.

use super::TIME_S_MAX;
use crate::doc::{choice, section, value};

/// Routing policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouterPolicy {
    /// Round robin.
    RoundRobin,
    /// Uniformly at random.
    Random,
    /// The less loaded of two random workers.
    PowerOfTwo,
    /// Fewest requests in flight.
    LeastRequests,
    /// Fewest tokens to prefill and in decode.
    LeastTokens,
    /// Cost in blocks: prefill left after overlap, plus active blocks.
    #[default]
    Kv,
    /// The client names the worker (`x-slipstream-worker`).
    Direct,
}

/// Values of `[router] policy`.
pub const POLICIES: &[(&str, RouterPolicy)] = &[
    ("round_robin", RouterPolicy::RoundRobin),
    ("random", RouterPolicy::Random),
    ("power_of_two", RouterPolicy::PowerOfTwo),
    ("least_requests", RouterPolicy::LeastRequests),
    ("least_tokens", RouterPolicy::LeastTokens),
    ("kv", RouterPolicy::Kv),
    ("direct", RouterPolicy::Direct),
];

section! {
    /// `[router]`.
    pub struct RouterConfig, keys RouterKeys of "router", read in order {
        /// Routing policy. `direct`: the client names the worker (`x-slipstream-worker`).
        ///
        /// Policies that ignore prefixes spread a conversation over all workers.
        policy: RouterPolicy = choice(POLICIES, RouterPolicy::Kv);
        /// Weight of blocks left to prefill against active blocks in the cost of `kv`.
        ///
        /// Low: only load counts. High: popular prefixes overload one worker.
        prefill_weight: f64 = value(4.0).within(0.0..=1e6);
        /// `kv`: 0 selects the cheapest worker; above 0, a softmax over normalized costs.
        ///
        /// High: almost random.
        temperature: f64 = value(0.0).within(0.0..=1e6);
        /// Follow the engines' KV events; false: an approximate index of routed prompts.
        ///
        /// false: evictions are not visible until `approximate_ttl_s`.
        kv_events: bool = value(true);
        /// Time that the approximate index counts a block as cached.
        ///
        /// High: predicted hits that were evicted. Low: predicted misses that would hit.
        approximate_ttl_s: f64 = value(120.0).within(0.001..=TIME_S_MAX).unit("s");
        /// Keep a session (`x-session-id`) on its worker for this long after its last request; 0: no affinity.
        ///
        /// High: long-lived sessions cannot leave a busy worker.
        affinity_ttl_s: f64 = value(0.0).within(0.0..=TIME_S_MAX).unit("s");
        /// A worker whose active blocks exceed this share of its cache is busy; if all are busy: 503. 1 or more:
        /// never.
        ///
        /// Low: requests are refused although they could wait.
        busy_kv_share: f64 = value(1.0).within(0.01..=1e6).unit("share");
        /// A worker with more prompt tokens to prefill is busy; if all are busy: 503. 0: never.
        ///
        /// Low: one long prompt makes a worker busy.
        busy_prefill_tokens: u64 = value(0).unit("tokens");
        /// Limit of requests that wait in the frontend, first come first served, while every ready worker is busy.
        /// Further ones get 503.
        ///
        /// High: under overload every request waits. Low: bursts are refused.
        queue_max: u32 = value(0).within(0..=1_048_576).unit("requests");
        /// Times that another worker continues an answer whose worker is lost after its first token: the prompt and
        /// the tokens so far become its prompt. A request with `x-slipstream-resume: off` is excepted. For modelled
        /// engines; `upstream.resume` is that of real ones.
        ///
        /// High: a request that makes its workers fail reaches as many. 0: the stream ends with an error event.
        resumes_max: u32 = value(3).within(0..=255).unit("count");
        /// Interval between refreshes of the router's view of loads. Decisions use the view of the previous interval
        /// plus the router's own routing since, so it is up to two intervals old, as between routers that exchange
        /// loads. 0: always the current loads.
        ///
        /// High: requests go to workers that are no longer idle.
        view_interval_ms: f64 = value(0.0).within(0.0..=3.6e6).unit("ms");
        /// Simulation only: delay from the end of a pass until the router's index has its blocks.
        ///
        /// Low: the router finds hits that are not yet visible to a live router.
        kv_lag_ms: f64 = value(0.0).within(0.0..=3.6e6).unit("ms");
        /// With prefill pools: a prompt with fewer tokens to compute, after reuse, is computed by its decode worker.
        ///
        /// High: long prompts delay decodes. Low: short prompts pay for a KV transfer.
        remote_prefill_tokens_min: u32 = value(0).unit("tokens");
        /// With prefill pools: if the chosen prefill rank already has more prompt tokens to compute, the prompt is
        /// computed by its decode worker. 0: never.
        ///
        /// Low: prefill pools are idle while decodes are delayed.
        remote_prefill_queue_max: u64 = value(0).unit("tokens");
        /// Seed of random policies.
        seed: u64 = value(0).with_description("integer, 0 to 2^63 - 1");
    }
}
