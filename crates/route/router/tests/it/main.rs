//! A fleet and its routers, through their public interface.
#![allow(clippy::disallowed_methods)] // it tests the router itself

mod busy;
mod lifecycle;
mod order;
mod views;

use std::sync::Arc;

use slipstream_base::{BlockHash, KvDelta, KvOp, Prompt, RankId, SimTime, Tail, WorkerId};
use slipstream_config::cluster::{RouterConfig, RouterPolicy};
use slipstream_router::{Fleet, RouteError, RouteRequest, Routed, Router, TargetConfig};

const BLOCK_SIZE: u32 = 16;
const KV_BLOCKS: u32 = 1_000;
const SECOND: u64 = 1_000_000_000;

const POLICIES: [RouterPolicy; 6] = [
    RouterPolicy::RoundRobin,
    RouterPolicy::Random,
    RouterPolicy::PowerOfTwo,
    RouterPolicy::LeastRequests,
    RouterPolicy::LeastTokens,
    RouterPolicy::Kv,
];

/// `workers` with `ranks` ranks each, none ready.
fn fleet(workers: u32, ranks: u16, config: RouterConfig) -> Arc<Fleet> {
    let rank = |worker, dp_rank| RankId {
        worker: WorkerId(worker),
        dp_rank,
    };
    let targets = (0..workers)
        .flat_map(|worker| (0..ranks).map(move |dp_rank| rank(worker, dp_rank)))
        .map(|rank| TargetConfig {
            rank,
            kv_blocks: KV_BLOCKS,
            prefix_caching: true,
        })
        .collect();
    Arc::new(Fleet::new(config, BLOCK_SIZE, targets).unwrap())
}

/// A fleet of ready workers of one rank, and a router.
fn ready(workers: u32, config: RouterConfig) -> (Arc<Fleet>, Router) {
    let fleet = fleet(workers, 1, config);
    (0..workers).for_each(|worker| fleet.set_ready(WorkerId(worker), true));
    let router = Router::new(Arc::clone(&fleet), 0);
    (fleet, router)
}

/// A prompt of `len` tokens; prompts of one `seed` are prefixes of each other.
fn prompt(seed: u64, len: u32) -> Prompt {
    let mut parent = BlockHash(seed);
    let blocks = (0..u64::from(len / BLOCK_SIZE)).map(|n| {
        parent = parent.child_of_id(seed, n);
        parent
    });
    Prompt::from_parts(len, BLOCK_SIZE, blocks.collect(), Tail::Opaque { id: seed }).unwrap()
}

fn request(prompt: &Prompt) -> RouteRequest<'_> {
    RouteRequest {
        prompt,
        max_tokens: 16,
        session: None,
        direct: None,
        only: None,
        exclude: &[],
    }
}

fn route(router: &mut Router, prompt: &Prompt) -> Routed {
    router.route(SimTime(0), &request(prompt), None).unwrap()
}

/// All that a load counts of live sequences, summed over the fleet.
fn charged(fleet: &Fleet) -> u64 {
    let loads = fleet.loads();
    loads
        .iter()
        .map(|l| l.requests + l.prefill_tokens + l.decode_tokens + l.active_blocks)
        .sum()
}

/// The delta that an engine publishes when it has stored `prompt`.
fn stored(worker: u32, sequence: u64, prompt: &Prompt) -> KvDelta {
    let parents = std::iter::once(BlockHash(0)).chain(prompt.blocks().iter().copied());
    let ops = prompt.blocks().iter().zip(parents);
    KvDelta {
        rank: RankId {
            worker: WorkerId(worker),
            dp_rank: 0,
        },
        sequence,
        ops: ops
            .map(|(&hash, parent)| KvOp::Stored { hash, parent })
            .collect(),
    }
}

fn config(policy: RouterPolicy) -> RouterConfig {
    RouterConfig {
        policy,
        ..RouterConfig::default()
    }
}

fn error(router: &mut Router, request: &RouteRequest<'_>) -> RouteError {
    router.route(SimTime(0), request, None).err().unwrap()
}
