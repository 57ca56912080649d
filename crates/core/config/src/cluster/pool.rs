//! `[pool.NAME]`: a pool of identical workers, and checks between the pools of a cluster.

use std::io;
use std::path::Path;

use super::autoscale::read_autoscale;
use super::engine::read_engine;
use super::model::read_pool_model;
use super::upstream::{KvProtocol, read_engines};
use super::{AutoscaleConfig, EngineConfig, HttpEngines, ModelConfig, RouterConfig, WORKERS_MAX};
use crate::doc::{Table, choice, section, subtable, value};
use crate::preset::Gpu;
use slipstream_base::EngineKind;
use slipstream_base::Role;
use slipstream_base::width::to_u32;

/// `[pool.NAME]`: a number of equal workers.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolConfig {
    /// The NAME of `[pool.NAME]`.
    pub name: String,
    /// The role of its engines.
    pub role: Role,
    /// Number of workers. Default 1; with `engines`, their number.
    pub workers: u32,
    /// Real engines, reached by HTTP; `None`: the workers are modelled.
    pub engines: Option<HttpEngines>,
    /// `[model]` with this pool's overrides applied.
    pub model: ModelConfig,
    /// `[engine]` with this pool's overrides applied.
    pub engine: EngineConfig,
    /// `[autoscale]` with this pool's overrides applied; `None`: all workers run from the start.
    pub autoscale: Option<AutoscaleConfig>,
}

const ROLES: &[(&str, Role)] = &[
    ("both", Role::Both),
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
];

section! {
    keys PoolKeys of "pool.NAME" {
        /// Role of its engines: whole requests; only prompts, followed by a KV transfer; or answers to such prompts.
        /// A decode worker computes a prompt itself if `router.remote_prefill_…` says so. With `engines`:
        /// [disaggregated prefill](engines.md#disaggregated-prefill), for every kind but "llamacpp".
        ///
        /// Prefill pools need a pool of another role, decode pools need a prefill pool.
        key role: Role = choice(ROLES, Role::Both);
        /// Number of equal workers in this pool.
        ///
        /// High: cached prefixes are spread over many workers, and each worker needs memory for its block pool.
        key workers: u32 = value(1).within(1..=WORKERS_MAX)
            .with_description("workers, 1 to 65,535 (all pools together as well)");
        /// Any key of `[engine]`, for this pool only: `[pool.big.engine]`, `[pool.big.engine.timing]`.
        ///
        /// A pool's own key overrides `[engine]`. A flag or variable for a key of `[engine]` that the pool has is
        /// refused, as it would have no effect there: set `pool.NAME.engine.…`.
        key engine?: () = subtable().with_default_text("as in `[engine]`");
        /// Any key of `[model]`, for this pool only: `[pool.big.model]`. Pools may serve several models, each by its
        /// `name`; a request goes to the pools of its model ([several models](twin.md#several-models)).
        ///
        /// For simulation: live, a server has one model. A name is one model: pools with the same `name` need the
        /// same model.
        key model?: () = subtable().with_default_text("as in `[model]`");
    }
}

/// The tables that every pool starts from.
pub(super) struct BaseTables<'a> {
    pub(super) engine: Table<'a>,
    pub(super) autoscale: Table<'a>,
    pub(super) model: Table<'a>,
}

pub(super) fn read_pool(
    name: &str,
    t: &Table<'_>,
    bases: &BaseTables<'_>,
    (model, gpus): (&ModelConfig, &[Gpu]),
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> PoolConfig {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        t.error(
            "",
            format!("`{name}` cannot name a pool"),
            "use up to 64 letters, digits, `-` and `_`: it becomes a label of metrics",
        );
    }
    let role = PoolKeys::role().read(t);
    let engines = read_engines(t, role);
    let kind = engines.as_ref().map(|engines| engines.kind);
    if kind == Some(EngineKind::LlamaCpp) && role != Role::Both {
        t.error(
            "role",
            "engines of kind \"llamacpp\" pass no keys and values to others, so a pool of them has the role \"both\"",
            "remove `role`; disaggregated prefill needs vLLM or SGLang",
        );
    }
    let traffic = engines.as_ref().map(|engines| engines.traffic);
    let key = traffic.and_then(|of| {
        let weight = of.weight.map(|_| "weight");
        weight.or(of.mirror.map(|_| "mirror"))
    });
    if let Some(key) = key.filter(|_| role != Role::Both) {
        t.error(
            key,
            format!("`{key}` needs a pool with the role \"both\": a request has engines of two pools otherwise"),
            "remove `role`, or the share of traffic",
        );
    }
    let workers = match &engines {
        // Reported if the list is bad.
        Some(engines) => (to_u32(engines.urls.len())).max(1),
        None => PoolKeys::workers().read(t),
    };
    let model = read_pool_model(t, &bases.model, model, load);
    let engine = t.table_over("engine", &bases.engine, |engine| {
        read_engine(engine, &model, gpus, load)
    });
    PoolConfig {
        name: name.to_owned(),
        role,
        workers,
        model,
        autoscale: t.table_over("autoscale", &bases.autoscale, |t| {
            read_autoscale(t, workers, engine.startup_s, engines.is_some())
        }),
        engines,
        engine,
    }
}

/// A name is one model.
pub(super) fn check_models(root: &Table<'_>, pools: &[PoolConfig]) {
    for (at, pool) in pools.iter().enumerate() {
        let name = &pool.model.name;
        let first = pools[..at].iter().find(|other| other.model.name == *name);
        if let Some(first) = first.filter(|first| first.model != pool.model) {
            let message = format!(
                "pools `{}` and `{}` both serve `{name}`, with other values in `[model]` each: a request for it may \
                 go to either",
                first.name, pool.name
            );
            let hint = format!(
                "set `pool.{}.model.name`, if that is another model",
                pool.name
            );
            root.error("pool", message, hint);
        }
    }
}

/// Parts that are modelled for one model alone.
pub(super) fn check_several_models(root: &Table<'_>, pools: &[PoolConfig], has_events: bool) {
    let first = &pools[0].model.name;
    let Some(other) = pools.iter().find(|pool| pool.model.name != *first) else {
        return;
    };
    let models = format!("the pools serve `{first}` and `{}`", other.model.name);
    let hint = "remove it, or write a file for each model";
    if has_events {
        let message =
            format!("{models}, and events of clusters with several models are not modelled");
        root.error("event", message, hint);
    }
    for pool in pools {
        let refuse = |what: &str| {
            let message = format!(
                "{models}, and {what} of pool `{}` is not modelled for several models",
                pool.name
            );
            root.error("pool", message, hint);
        };
        if pool.autoscale.is_some() {
            refuse("[autoscale]");
        }
        if pool.engine.peer_tier.is_some() {
            refuse("[engine.peer_tier]");
        }
    }
}

/// Some pool must compute prompts, and some must compute answers; so for each model.
pub(super) fn check_roles(root: &Table<'_>, pools: &[PoolConfig]) {
    let mirrors = |pool: &PoolConfig| {
        pool.engines
            .as_ref()
            .is_some_and(|of| of.traffic.mirror.is_some())
    };
    if !pools.is_empty() && pools.iter().all(mirrors) {
        root.error(
            "pool",
            "every pool has `mirror`, so no pool answers clients",
            "remove `mirror` from a pool",
        );
    }
    let mut models: Vec<&str> = pools.iter().map(|pool| &*pool.model.name).collect();
    models.sort_unstable();
    models.dedup();
    for model in &models {
        let of_model = if models.len() > 1 {
            format!(" of model `{model}`")
        } else {
            String::new()
        };
        let has = |role| {
            let mut own = pools.iter().filter(|pool| pool.model.name == *model);
            own.any(|pool| pool.role == role)
        };
        if has(Role::Prefill) && !has(Role::Decode) && !has(Role::Both) {
            root.error(
                "pool",
                format!(
                    "every pool's `role`{of_model} is \"prefill\", so no pool generates answers"
                ),
                "add a pool with `role = \"decode\"`",
            );
        }
        if has(Role::Decode) && !has(Role::Prefill) {
            root.error(
                "pool",
                format!(
                    "a pool's `role`{of_model} is \"decode\", but no pool's is \"prefill\" to compute its prompts"
                ),
                "add a pool with `role = \"prefill\"`, or use \"both\"",
            );
        }
    }
}

/// SGLang's engines are started for one role, and speak a protocol of their own: all that take part must be theirs.
pub(super) fn check_kv_protocols(root: &Table<'_>, pools: &[PoolConfig], router: &RouterConfig) {
    let is_sglang = |pool: &&PoolConfig| {
        let protocol = |of: &HttpEngines| of.kv_protocol.of_kind(of.kind);
        pool.engines.as_ref().map(protocol) == Some(KvProtocol::Sglang)
    };
    // Engines of kind "auto" may turn out to be SGLang's.
    let is_other = |pool: &&PoolConfig| {
        let says_auto =
            |of: &HttpEngines| of.kind == EngineKind::Auto && of.kv_protocol == KvProtocol::Auto;
        !is_sglang(pool) && !pool.engines.as_ref().is_some_and(says_auto)
    };
    let apart = || pools.iter().filter(|pool| pool.role != Role::Both);
    let Some(sglang) = apart().find(is_sglang) else {
        return;
    };
    let name = &sglang.name;
    if let Some(other) = apart().find(is_other) {
        let text = format!(
            "pool `{name}` has SGLang's protocol, and pool `{}` another",
            other.name
        );
        let hint = "give all pools with a role one kind of engine, or serve them with two routers";
        root.error("pool", text, hint);
    }
    if let Some(both) = pools.iter().find(|pool| pool.role == Role::Both) {
        let text = format!(
            "pool `{name}` has SGLang's protocol, and pool `{}` the role \"both\": engines of SGLang either compute \
             prompts for others, or answer such prompts",
            both.name
        );
        let hint = "set `role = \"decode\"`, or serve them with two routers";
        root.error("pool", text, hint);
    }
    if router.remote_prefill_tokens_min > 0 || router.remote_prefill_queue_max > 0 {
        let text = format!(
            "pool `{name}` has SGLang's protocol, so its decode engines cannot compute the prompts that \
             `remote_prefill_tokens_min` and `remote_prefill_queue_max` leave to them"
        );
        root.error("router", text, "remove both keys");
    }
}

/// Real engines answer in bytes and modelled ones in tokens: one server has one of the two.
pub(super) fn check_engines(root: &Table<'_>, pools: &[PoolConfig]) {
    let real = pools.iter().find(|pool| pool.engines.is_some());
    let modelled = pools.iter().find(|pool| pool.engines.is_none());
    if let (Some(real), Some(modelled)) = (real, modelled) {
        root.error(
            "pool",
            format!(
                "pool `{}` has real engines and pool `{}` modelled ones, and one server cannot have both",
                real.name, modelled.name
            ),
            "run `slipstream serve` with the modelled pool on another port, and list its address among \
             `engines`",
        );
    }
    let mut seen = std::collections::BTreeMap::new();
    for pool in pools {
        for url in pool.engines.iter().flat_map(|engines| &engines.urls) {
            if let Some(other) = seen.insert(url.to_string(), &pool.name)
                && *other != pool.name
            {
                root.error(
                    "pool",
                    format!("`{url}` is in pool `{other}` and in pool `{}`", pool.name),
                    "list each engine once",
                );
            }
        }
    }
}
