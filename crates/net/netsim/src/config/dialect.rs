//! Dialects: keys that Days and this simulator define differently have the meaning of the file's
//! dialect.
//!
//! All keys of both can be used in either dialect. The dialect decides the numbering of hosts, the
//! class of a flow, the pairing of a collective's `sources` and `sinks`, and the unit of
//! `ecn_threshold`.

use slipstream_config::doc::{Table, Value};

use super::EXECUTION;

/// The definitions that apply to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Ours, as documented in `docs/netsim.md`.
    Slipstream,
    /// The definitions of Days.
    Days,
}

impl Dialect {
    /// Values of the key `dialect`.
    pub const WORDS: &[(&str, Dialect)] =
        &[("slipstream", Dialect::Slipstream), ("days", Dialect::Days)];

    /// Its value in a file.
    pub fn word(self) -> &'static str {
        match self {
            Dialect::Slipstream => "slipstream",
            Dialect::Days => "days",
        }
    }
}

/// The dialect of a file, and why.
pub(super) struct DialectChoice {
    pub(super) dialect: Dialect,
    pub(super) because: String,
    /// A note for the user about the choice.
    pub(super) note: Option<String>,
}

/// Tables of traffic that both dialects have.
const TRAFFIC: [&str; 4] = ["flow", "flow_set", "collective", "collective_set"];

/// Keys of Days that were not ours: a file with one is a file of Days.
const DAYS: &[&str] = &[
    "app_source",
    "csv_logging",
    "legacy_e5_metrics",
    "model_host_attachment",
    "workload",
    "compute",
    "topology.spectrum_x",
    "topology.dragonfly.routers_per_group",
    "topology.dragonfly.global_ports_per_router",
    "topology.dragonfly.hosts_per_router",
    "link.mode",
    "link.pfc",
    "link.propagation_tiers",
    "switch.run_batch_size",
    "switch.ecn",
    "switch.ecn_by_rate",
    "switch.ecn_capacity_bytes",
];

/// As [`DAYS`], in the table of a flow, a set of flows or a collective.
const DAYS_TRAFFIC: &[&str] = &[
    "priority",
    "traffic.dcqcn",
    "traffic.roce.ack_every_packets",
    "traffic.roce.duplicate_ack",
];

/// Keys for chains of flows. Files of both dialects have them, so they decide only if all keys outside of traffic
/// that Days requires are there, and none of ours.
const CHAINS: &[&str] = &["after", "name"];

/// Keys outside of traffic that Days requires.
const REQUIRED: [&str; 4] = [
    "seed",
    "switch.capacity",
    "switch.discipline",
    "switch.drop",
];

/// Keys that only our dialect has.
const OURS: &[&str] = &[
    "failure",
    "flow_list",
    "host_nodes",
    "topology.model_host_attachment",
    "topology.leaf_spine",
    "topology.fat_tree.oversubscription",
    "topology.dragonfly.p",
    "topology.dragonfly.a",
    "topology.dragonfly.h",
    "link.host_links",
    "link.host",
    "link.edge",
    "link.core",
    "routing.spray_paths",
    "routing.convergence",
    "switch.red",
    "switch.ecn_ramp",
    "switch.capacity_bytes",
    "switch.shared",
    "switch.pfc",
    "switch.trim",
    "switch.loss",
];

/// As [`OURS`], in the table of a flow, a set of flows or a collective.
const OURS_TRAFFIC: &[&str] = &[
    "header_bytes",
    "ack_bytes",
    "class",
    "answer_class",
    "load",
    "span",
    "sink",
    "skew",
    "compute_s",
    "traffic.ndp",
    "traffic.size_dist",
    "traffic.size_csv",
    "traffic.tcp.initial_window",
    "traffic.tcp.ssthresh",
    "traffic.tcp.rto_min",
    "traffic.tcp.rto_initial",
    "traffic.tcp.gain",
    "traffic.tcp.sack",
    "traffic.tcp.rack",
    "traffic.roce.dcqcn",
    "traffic.roce.window",
    "traffic.roce.rto",
    "traffic.roce.ack_every",
];

/// Keys with numbers of hosts.
const NAMES_HOSTS: &[&str] = &[
    "flow.graph",
    "flow_set.sink",
    "flow_list",
    "failure.host",
    "collective.graph",
    "collective.sources",
    "collective.sinks",
    "collective_set.graph",
    "collective_set.sources",
    "collective_set.sinks",
];

/// Chooses the dialect of the document; an error if it is ambiguous and changes results.
pub(super) fn choose(root: &Table<'_>) -> DialectChoice {
    let named = root.choice("dialect", Dialect::WORDS).optional();
    if let Some(dialect) = named {
        return DialectChoice {
            dialect,
            because: "set explicitly".into(),
            note: None,
        };
    }
    let ours = OURS
        .iter()
        .find(|key| root.any(key, |_| true))
        .map(|key| (*key).to_owned())
        .or_else(|| traffic_key(root, OURS_TRAFFIC));
    let days = days_key(root).or_else(|| {
        let required = REQUIRED.iter().all(|key| root.any(key, |_| true));
        (ours.is_none() && required).then(|| traffic_key(root, CHAINS))?
    });
    match (days, ours) {
        (Some(days), Some(ours)) => {
            if let Some(what) = differs(root) {
                root.error(
                    "dialect",
                    format!(
                        "`{days}` is a key of Days and `{ours}` one of ours, and {what}"
                    ),
                    "write dialect = \"days\" or dialect = \"slipstream\" at the top of the file, or \
                     give --dialect",
                );
            }
            days_because(format!("`{days}` is a key of Days"))
        }
        (Some(days), None) => days_because(format!("`{days}` is a key of Days")),
        (None, Some(ours)) => DialectChoice {
            dialect: Dialect::Slipstream,
            because: format!("`{ours}` is a key of ours"),
            note: None,
        },
        (None, None) if is_complete(root) => DialectChoice {
            note: differs(root).map(|what| {
                format!(
                    "read in the dialect of Days, as all keys belong to Days and none that it \
                     requires is missing; {what}: dialect = \"slipstream\" reads it as ours"
                )
            }),
            ..days_because("it has all keys that Days requires, and no others".into())
        },
        (None, None) => DialectChoice {
            dialect: Dialect::Slipstream,
            because: "it lacks keys that Days requires".into(),
            note: differs(root).map(|what| {
                format!(
                    "read in our own dialect, as keys are missing that Days requires; {what}: \
                     dialect = \"days\" reads it as Days"
                )
            }),
        },
    }
}

fn days_because(because: String) -> DialectChoice {
    DialectChoice {
        dialect: Dialect::Days,
        because,
        note: None,
    }
}

/// A key of `keys` that some table of traffic has.
fn traffic_key(root: &Table<'_>, keys: &[&str]) -> Option<String> {
    TRAFFIC
        .iter()
        .flat_map(|table| keys.iter().map(move |key| format!("{table}.{key}")))
        .find(|path| root.any(path, |_| true))
}

/// A key, or a value, that only Days has.
fn days_key(root: &Table<'_>) -> Option<String> {
    let key = DAYS
        .iter()
        .chain(EXECUTION)
        .find(|key| root.any(key, |_| true));
    if let Some(key) = key {
        return Some((*key).to_owned());
    }
    if let Some(key) = traffic_key(root, DAYS_TRAFFIC) {
        return Some(key);
    }
    let is = |word: &'static str| move |v: &Value<'_>| matches!(v, Value::String(s) if *s == word);
    let flat = |v: &Value<'_>| matches!(v, Value::List(items) if matches!(items.first(), Some(Value::Integer(_) | Value::Float(_))));
    let share = |v: &Value<'_>| matches!(v, Value::Float(f) if *f <= 1.0);
    [
        (
            "switch.discipline",
            root.any("switch.discipline", is("VirtualClock")),
        ),
        ("switch.priorities", root.any("switch.priorities", flat)),
        ("switch.vticks", root.any("switch.vticks", flat)),
        (
            "switch.ecn_threshold",
            root.any("switch.ecn_threshold", share),
        ),
    ]
    .into_iter()
    .find(|(_, found)| *found)
    .map(|(key, _)| key.to_owned())
}

/// Whether the document has a key or a type of flow that only Days' newer engine has. (Its older one
/// has packets and TCP on switches without pauses.)
pub(super) fn is_of_present_days(root: &Table<'_>) -> bool {
    let queue_pair = |v: &Value<'_>| matches!(v, Value::String("RoCE" | "DCQCN"));
    let traffic = ["priority", "after", "name", "traffic.dcqcn", "traffic.roce"];
    [
        "compute",
        "workload",
        "topology.spectrum_x",
        "link.mode",
        "link.pfc",
    ]
    .iter()
    .any(|key| root.any(key, |_| true))
        || traffic_key(root, &traffic).is_some()
        || TRAFFIC
            .iter()
            .any(|table| root.any(&format!("{table}.flow_type"), queue_pair))
}

/// Whether the document has every key that Days requires.
fn is_complete(root: &Table<'_>) -> bool {
    let given = |key: &str| root.any(key, |_| true);
    let each = [
        "flow_type",
        "traffic",
        "traffic.arr_dist",
        "traffic.pkt_size_dist",
    ];
    REQUIRED.iter().all(|key| given(key))
        && TRAFFIC.iter().any(|table| given(table))
        && TRAFFIC.iter().all(|table| {
            each.iter()
                .all(|key| !root.any_lacks(&format!("{table}.{key}")))
        })
}

/// The difference that the choice makes to this document, if any.
fn differs(root: &Table<'_>) -> Option<&'static str> {
    let several = |v: &Value<'_>| matches!(v, Value::Integer(n) if *n > 1);
    let list = |v: &Value<'_>| matches!(v, Value::List(items) if items.len() > 1);
    let classed = |v: &Value<'_>| matches!(v, Value::String(s) if *s != "FIFO");
    let threshold =
        |v: &Value<'_>| matches!(v, Value::String("ECN" | "ECN_THRESHOLD" | "ECNThreshold"));
    let structural =
        |v: &Value<'_>| matches!(v, Value::String("SwitchOffsetHalf" | "SameSwitchNext"));
    let names_hosts = NAMES_HOSTS.iter().any(|key| root.any(key, |_| true))
        || root.any("flow_set.pairing", structural);
    if names_hosts
        && (root.any("topology.fat_tree.hosts_per_edge", several)
            || root.any("topology.fat_tree.oversubscription", |_| true))
    {
        return Some("the two number the hosts of a fat-tree differently");
    }
    if root.any("switch.discipline", classed)
        && ["weights", "priorities", "vticks"]
            .iter()
            .any(|key| root.any(&format!("switch.{key}"), list))
    {
        return Some("the two give flows different classes");
    }
    if root.any("switch.drop", threshold) {
        return Some("the two count `ecn_threshold` differently");
    }
    let fans = |v: &Value<'_>| matches!(v, Value::String("AllReduce" | "Broadcast" | "Gather"));
    let kinds = [
        "collective.collective_type",
        "collective_set.collective_type",
    ];
    if kinds.iter().any(|key| root.any(key, fans)) {
        return Some("the two pair the sources and sinks of a collective differently");
    }
    None
}
