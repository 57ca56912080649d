//! `[[event]]`: faults, each with its times and workers.

use super::{PoolConfig, TIME_S_MAX, WORKERS_MAX};
use crate::doc::{Table, optional, required, required_choice, section, value};

/// A fault of a worker, of the frontend, or of what connects them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// It stops and loses its state; at the end it starts again.
    Crash,
    /// It takes no more requests, and finishes those in progress; at the end it takes requests
    /// again.
    Drain,
    /// Its passes take `factor` times as long.
    Slow {
        /// Above 0.
        factor: f64,
    },
    /// The rate of its network interface is multiplied by this share; 0: it is down.
    Link {
        /// 0 to 1.
        share: f64,
    },
    /// The link between a leaf switch and a spine switch is down.
    Uplink {
        /// The leaf switch: workers `leaf * workers_per_leaf` and following.
        leaf: u32,
        /// The spine switch, from 0.
        spine: u32,
    },
    /// One of its GPUs is gone: no pass ends any more. After `detect_s` the worker ends as in a crash. It starts
    /// again at the end, or at once if the event has none.
    Gpu {
        /// Until the worker ends, s.
        detect_s: f64,
    },
    /// Some of its KV events do not reach the router.
    KvLoss {
        /// Share that is lost, above 0 to 1.
        share: f64,
    },
    /// Its KV events reach the router later.
    KvLate {
        /// Additional delay, ms.
        delay_ms: f64,
    },
    /// The frontend stops and loses its state and its connections; at the end another one takes its place.
    Frontend,
    /// Nothing crosses the network between the event's workers and all others, the frontend included.
    Partition {
        /// Silence after which a connection is closed, s.
        peer_deadline_s: f64,
    },
    /// The workers are replaced one after another: each drains, restarts without its cache, and takes requests again.
    Upgrade {
        /// Time for the open requests of a worker to end, s; `None`: `live.drain_timeout_s`.
        drain_timeout_s: Option<f64>,
    },
}

impl Fault {
    /// Its name in a cluster file.
    pub fn name(&self) -> &'static str {
        match self {
            Fault::Crash => "crash",
            Fault::Drain => "drain",
            Fault::Slow { .. } => "slow",
            Fault::Link { .. } => "link",
            Fault::Uplink { .. } => "uplink",
            Fault::Gpu { .. } => "gpu",
            Fault::KvLoss { .. } => "kv_loss",
            Fault::KvLate { .. } => "kv_late",
            Fault::Frontend => "frontend",
            Fault::Partition { .. } => "partition",
            Fault::Upgrade { .. } => "upgrade",
        }
    }
}

/// An `[[event]]`: a fault at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct FaultEvent {
    /// Start, s.
    pub at_s: f64,
    /// End, s; `None`: never.
    pub until_s: Option<f64>,
    /// Numbers of its workers, over all pools in file order, rising. One for faults of a worker, none for
    /// [`Fault::Frontend`] and [`Fault::Uplink`].
    pub workers: Vec<u32>,
    /// The fault.
    pub fault: Fault,
}

const KINDS: &[(&str, Fault)] = &[
    ("crash", Fault::Crash),
    ("drain", Fault::Drain),
    ("slow", Fault::Slow { factor: 1.0 }),
    ("link", Fault::Link { share: 1.0 }),
    ("uplink", Fault::Uplink { leaf: 0, spine: 0 }),
    ("gpu", Fault::Gpu { detect_s: 0.0 }),
    ("kv_loss", Fault::KvLoss { share: 1.0 }),
    ("kv_late", Fault::KvLate { delay_ms: 0.0 }),
    ("frontend", Fault::Frontend),
    (
        "partition",
        Fault::Partition {
            peer_deadline_s: 0.0,
        },
    ),
    (
        "upgrade",
        Fault::Upgrade {
            drain_timeout_s: None,
        },
    ),
];

/// Default of `--peer-deadline`, s.
const PEER_DEADLINE_S: f64 = 5.0;

section! {
    keys EventKeys of "event" {
        /// `[[event]]`: a fault (`docs/twin.md` has the rules). Of a worker: crash: it stops and loses its state;
        /// drain: it takes no new requests; slow: its passes take `factor` times as long; link: its interface has
        /// `share` of its rate; gpu: its passes do not end, until it is lost `detect_s` later; kv_loss, kv_late: its
        /// KV events do not reach the router, or `delay_ms` later. Of others: uplink: the link between `leaf` and
        /// `spine` is down; frontend: it stops, and loses its streams; partition: `workers` and all others, the
        /// frontend included, do not reach each other; upgrade: the workers of `pool` drain and restart, one after
        /// another. Simulation only.
        key kind: Fault = required_choice(
            KINDS,
            "set it to crash, drain, slow, link, uplink, gpu, kv_loss, kv_late, frontend, partition or upgrade",
            Fault::Crash,
        )
            .note("needed");
        /// When.
        key at_s: f64 = required("set the time, in seconds from the start", 0.0).within(0.0..=TIME_S_MAX)
            .unit("s").note("needed");
        /// End of the fault. A crashed worker restarts then, and is ready `startup_s` later.
        key until_s?: f64 = optional().within(0.0..=TIME_S_MAX)
            .with_description("s, above `at_s`").with_default_text("none: it never ends; gpu: the worker restarts at once");
        /// The worker, numbered over all pools in file order from 0.
        key worker: u32 = required("set the worker, by its number over all pools", 0)
            .with_description("number; needed for faults of a worker");
        /// The workers on one side. The frontend and all other workers are on the other.
        key workers: Vec<u32> =
            required("set the workers that are cut off, by their numbers over all pools", Vec::new())
            .with_description("numbers; needed for \"partition\"");
        /// The pool whose workers are replaced.
        key pool?: String = optional()
            .with_description("name of a pool; for \"upgrade\"").with_default_text("none: all pools");
        /// Factor on the duration of its passes.
        key factor: f64 = required("set the factor by which passes take longer", 1.0).within(0.001..=1e6)
            .note("needed for \"slow\"");
        /// link: remaining share of its interface's rate; 0: it is down. kv_loss: share of its KV events that is
        /// lost.
        key share: f64 = required("set the remaining share of its rate; 0: it is down", 1.0).within(0.0..=1.0)
            .note("needed for \"link\"; for \"kv_loss\" 1.0 if not set");
        /// The leaf switch whose link is down: that of worker `leaf * network.workers_per_leaf`.
        key leaf: u32 = required("set the leaf switch", 0).with_description("number; needed for \"uplink\"");
        /// The spine switch at the other end of the link.
        key spine: u32 = value(0).with_description("number below `network.spines`; for \"uplink\"");
        /// Additional delay of its KV events.
        key delay_ms: f64 = required("set the additional delay of its KV events, in ms", 0.0).within(0.0..=3.6e6)
            .unit("ms").note("needed for \"kv_late\"");
        /// From the loss of the GPU until the worker ends. Until then its requests stand still, and it gets new ones.
        ///
        /// High: as with a collective that waits for its own timeout.
        key detect_s: f64 = value(0.0).within(0.0..=TIME_S_MAX).unit("s").note("for \"gpu\"");
        /// Silence after which the frontend counts a worker as lost: `--peer-deadline` of live processes.
        ///
        /// Low: short partitions make prompts be computed again. High: streams stand still for longer.
        key peer_deadline_s: f64 = value(PEER_DEADLINE_S).within(0.0..=TIME_S_MAX)
            .unit("s").note("for \"partition\"");
        /// Time for a worker's open requests to end. Then they continue on other workers.
        key drain_timeout_s?: f64 = optional().within(0.0..=TIME_S_MAX)
            .unit("s").note("for \"upgrade\"").with_default_text("`live.drain_timeout_s`");
    }
}

/// `[[event]]`, sorted by time.
pub(super) fn read_event_list(root: &Table<'_>, pools: &[PoolConfig]) -> Vec<FaultEvent> {
    let mut events = root.array("event", |_, t| read_event(t, pools));
    events.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    events
}

fn read_event(t: &Table<'_>, pools: &[PoolConfig]) -> FaultEvent {
    let kind = EventKeys::kind().read(t);
    let at_s = EventKeys::at_s().read(t);
    let until_s: Option<f64> = if matches!(kind, Fault::Upgrade { .. }) {
        t.unused("until_s", "kind", "it ends when the last worker is back");
        None
    } else {
        EventKeys::until_s().read(t)
    };
    if let Some(until_s) = until_s.filter(|&until_s| until_s <= at_s) {
        t.error(
            "until_s",
            format!("`until_s` is {until_s}, but it begins at {at_s}"),
            "set a later time, or remove it for an event without end",
        );
    }
    let fault = read_fault(t, kind, at_s, until_s);
    FaultEvent {
        at_s,
        until_s,
        workers: read_event_workers(t, kind, pools),
        fault,
    }
}

/// The fault of `kind`, with its parameters.
fn read_fault(t: &Table<'_>, kind: Fault, at_s: f64, until_s: Option<f64>) -> Fault {
    let only = |key: &str, used: bool, by: &str| {
        if !used {
            t.unused(key, "kind", &format!("only {by} it"));
        }
    };
    only(
        "factor",
        matches!(kind, Fault::Slow { .. }),
        "\"slow\" uses",
    );
    let shares = matches!(kind, Fault::Link { .. } | Fault::KvLoss { .. });
    only("share", shares, "\"link\" and \"kv_loss\" use");
    let uplink = matches!(kind, Fault::Uplink { .. });
    only("leaf", uplink, "\"uplink\" uses");
    only("spine", uplink, "\"uplink\" uses");
    only(
        "detect_s",
        matches!(kind, Fault::Gpu { .. }),
        "\"gpu\" uses",
    );
    let late = matches!(kind, Fault::KvLate { .. });
    only("delay_ms", late, "\"kv_late\" uses");
    let parts = matches!(kind, Fault::Partition { .. });
    only("peer_deadline_s", parts, "\"partition\" uses");
    let upgrades = matches!(kind, Fault::Upgrade { .. });
    only("drain_timeout_s", upgrades, "\"upgrade\" uses");
    match kind {
        Fault::Crash | Fault::Drain | Fault::Frontend => kind,
        Fault::Slow { .. } => Fault::Slow {
            factor: EventKeys::factor().read(t),
        },
        Fault::Link { .. } => Fault::Link {
            share: EventKeys::share().read(t),
        },
        Fault::Uplink { .. } => Fault::Uplink {
            leaf: EventKeys::leaf().read(t),
            spine: EventKeys::spine().read(t),
        },
        Fault::KvLoss { .. } => Fault::KvLoss {
            share: EventKeys::share().field(t).or(1.0),
        },
        Fault::KvLate { .. } => Fault::KvLate {
            delay_ms: EventKeys::delay_ms().read(t),
        },
        Fault::Gpu { .. } => {
            let detect_s = EventKeys::detect_s().read(t);
            if let Some(until_s) = until_s.filter(|&until_s| until_s <= at_s + detect_s) {
                t.error(
                    "until_s",
                    format!(
                        "`until_s` is {until_s}, but the worker ends at {} (`at_s` and `detect_s`)",
                        at_s + detect_s
                    ),
                    "set a later time, or remove it for a worker that starts again at once",
                );
            }
            Fault::Gpu { detect_s }
        }
        Fault::Partition { .. } => Fault::Partition {
            peer_deadline_s: EventKeys::peer_deadline_s().read(t),
        },
        Fault::Upgrade { .. } => Fault::Upgrade {
            drain_timeout_s: EventKeys::drain_timeout_s().read(t),
        },
    }
}

/// The workers of an event.
fn read_event_workers(t: &Table<'_>, kind: Fault, pools: &[PoolConfig]) -> Vec<u32> {
    let total = (pools.iter()).fold(0u32, |total, pool| total.saturating_add(pool.workers));
    let last = total.saturating_sub(1);
    let group = matches!(kind, Fault::Partition { .. });
    let upgrades = matches!(kind, Fault::Upgrade { .. });
    if !group {
        t.unused("workers", "kind", "only \"partition\" uses it");
    }
    if !upgrades {
        t.unused("pool", "kind", "only \"upgrade\" uses it");
    }
    if group {
        let every = |workers: &Vec<u32>| {
            !workers.is_empty() && workers.iter().all(|&worker| worker < total)
        };
        let must = format!("numbers of workers, each 0 to {last}");
        let mut workers = EventKeys::workers().read_if(t, every, &must);
        workers.sort_unstable();
        workers.dedup();
        t.unused("worker", "kind", "\"partition\" has `workers`");
        return workers;
    }
    if upgrades {
        t.unused("worker", "kind", "\"upgrade\" has `pool`");
        let names: Vec<&str> = pools.iter().map(|pool| &*pool.name).collect();
        let of: Option<String> = EventKeys::pool()
            .field(t)
            .check(
                |name: &String| names.contains(&name.as_str()),
                &format!("the name of a pool: {}", names.join(", ")),
            )
            .optional();
        if total > WORKERS_MAX {
            return Vec::new(); // that is an error already
        }
        let (mut first, mut workers) = (0, Vec::new());
        for pool in pools {
            if of.as_ref().is_none_or(|of| *of == pool.name) {
                workers.extend(first..first + pool.workers);
            }
            first += pool.workers;
        }
        return workers;
    }
    if kind == Fault::Frontend {
        t.unused("worker", "kind", "it is a fault of the frontend");
        return Vec::new();
    }
    if matches!(kind, Fault::Uplink { .. }) {
        t.unused("worker", "kind", "\"uplink\" has `leaf` and `spine`");
        return Vec::new();
    }
    let must = format!("the number of a worker, 0 to {last}");
    vec![EventKeys::worker().read_if(t, |&worker| worker < total, &must)]
}
