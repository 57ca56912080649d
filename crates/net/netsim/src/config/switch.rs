//! `[switch]`: rates, limits, and what queues drop or mark.

use slipstream_base::width::floor_u32;
use slipstream_config::doc::Table;

use super::units::read_rate;
use super::{Dialect, discipline, pfc};
use crate::aqm::Aqm;
use crate::queueing::{Discipline, SharedBuffer, Trim};
use crate::scenario::Queue;
use crate::scheduled::OWN_PRIORITIES;

#[derive(Clone, Copy, PartialEq)]
enum Drop {
    Tail,
    Red,
    RedEcn,
    Threshold,
    Ramp,
    Trim,
}

const DROPS: &[(&str, Drop)] = &[
    ("TailDrop", Drop::Tail),
    ("RED", Drop::Red),
    ("RED_ECN", Drop::RedEcn),
    ("ECN", Drop::Threshold),
    ("ECN_THRESHOLD", Drop::Threshold),
    ("ECNThreshold", Drop::Threshold),
    ("ECN_RAMP", Drop::Ramp),
    ("EcnRamp", Drop::Ramp),
    ("Trim", Drop::Trim),
];

/// Which rule of the two dialects, or of Days' two engines, applies to `ecn_threshold`.
#[derive(Clone, Copy)]
pub(super) struct ThresholdRule {
    pub(super) dialect: Dialect,
    /// Packets that cannot be marked pass, as in Days' newer engine.
    pub(super) only_marks: bool,
}

pub(super) fn read(
    t: &Table<'_>,
    rule: ThresholdRule,
    rails_rate: Option<u64>,
    notes: &mut Vec<String>,
) -> (u64, Queue) {
    if t.has("run_batch_size") {
        let _: Option<f64> = t.get("run_batch_size").optional();
        notes.push(
            "`switch.run_batch_size` does not change results: it steers the execution of Days"
                .into(),
        );
    }
    if rails_rate.is_some() {
        t.refuse(
            "port_rate",
            "cannot be combined with a SpectrumX topology",
            "use its nic_rate_bps and uplink_rate_bps",
        );
    }
    let given = rails_rate.or_else(|| read_rate(t, "port_rate"));
    let rate = given.unwrap_or_else(|| {
        if !t.has("port_rate") {
            t.error(
                "port_rate",
                "`switch.port_rate` is missing",
                "give the rate of a port in bit/s, such as port_rate = 1e10",
            );
        }
        1_000_000_000
    });
    let capacity = t.get("capacity").within(0..=1_000_000u32).or(0);
    let discipline = discipline::read(t, rule.dialect, notes);
    let drop = t.choice("drop", DROPS).or(Drop::Tail);
    let ramp = read_days_ramp(t, drop);
    let trim = (drop == Drop::Trim).then(|| t.table("trim", read_trim));
    let aqm = read_aqm(t, drop, rule, capacity, notes);
    let loss = t.get("loss").within(0.0..=1.0).or(0.0);
    let capacity_bytes = t.get("capacity_bytes").within(0..=1u64 << 40).or(0);
    let (aqm, capacity, capacity_bytes) = match ramp {
        // A queue with a ramp is limited only in bytes.
        Some((ramp, bytes)) => (ramp, 0, bytes),
        None => (aqm, capacity, capacity_bytes),
    };
    let shared = t.has("shared").then(|| t.table("shared", read_shared));
    let pfc = t
        .has("pfc")
        .then(|| t.table("pfc", |t| pfc::read(t, shared.is_some())));
    if trim.is_some() && (shared.is_some() || pfc.is_some() || discipline != Discipline::Fifo) {
        t.error(
            "drop",
            "trimming ports have two queues of their own, so `discipline`, `shared` and `pfc` \
             cannot be used",
            "remove those keys, or choose another `drop`",
        );
    }
    (
        rate,
        Queue {
            capacity_packets: capacity,
            capacity_bytes,
            discipline,
            aqm,
            loss,
            shared,
            pfc,
            trim,
            priorities: OWN_PRIORITIES,
        },
    )
}

/// `ecn_ramp`: a probability that rises with the waiting bytes.
/// What `drop` does to packets that arrive.
fn read_aqm(
    t: &Table<'_>,
    drop: Drop,
    rule: ThresholdRule,
    capacity: u32,
    notes: &mut Vec<String>,
) -> Aqm {
    let aqm = match drop {
        Drop::Tail | Drop::Trim => Aqm::TailDrop,
        Drop::Red => read_red(t, false, rule.dialect),
        Drop::RedEcn => read_red(t, true, rule.dialect),
        Drop::Threshold => read_ecn_threshold(t, rule, capacity),
        Drop::Ramp => t.table("ecn_ramp", read_ramp),
    };
    let kinds: [(&str, &[Drop]); 4] = [
        ("red", &[Drop::Red, Drop::RedEcn]),
        ("ecn_threshold", &[Drop::Threshold]),
        ("ecn_ramp", &[Drop::Ramp]),
        ("trim", &[Drop::Trim]),
    ];
    for (key, kinds) in kinds {
        if t.has(key) && !kinds.contains(&drop) {
            notes.push(format!("`switch.{key}` has no effect with this `drop`"));
        }
    }
    if matches!(aqm, Aqm::Red { .. }) && capacity == 0 {
        t.error(
            "drop",
            "`switch.drop` is RED, whose thresholds are shares of the capacity, but that is 0",
            "give `switch.capacity` in packets",
        );
    }
    aqm
}

fn read_ramp(t: &Table<'_>) -> Aqm {
    let min_bytes: u64 = t.get("kmin").required("give Kmin in bytes", 5_000);
    let max_bytes: u64 = t.get("kmax").required("give Kmax in bytes", 200_000);
    if min_bytes > max_bytes {
        t.error(
            "kmin",
            format!("`kmin` ({min_bytes} bytes) is above `kmax` ({max_bytes} bytes)"),
            "swap them",
        );
    }
    Aqm::EcnRamp {
        min_bytes,
        max_bytes,
        probability: t.get("pmax").within(0.0..=1.0).or(0.01),
    }
}

/// `ecn_threshold`: a share of the capacity (Days), or packets (ours).
fn read_ecn_threshold(t: &Table<'_>, rule: ThresholdRule, capacity: u32) -> Aqm {
    let dialect = rule.dialect;
    let value: Option<f64> = t
        .get("ecn_threshold")
        .check(
            |&v: &f64| v > 0.0 && (v <= 1.0 || v.fract() == 0.0 && v <= 1e6),
            "a share of the capacity, above 0 and at most 1, or a whole number of packets",
        )
        .optional();
    // 1 is the entire capacity in Days, and one packet here.
    let share = match (dialect, value) {
        (Dialect::Days, None) => Some(0.8),
        (Dialect::Days, Some(v)) if v <= 1.0 => Some(v),
        (Dialect::Slipstream, Some(v)) if v < 1.0 => Some(v),
        _ => None,
    };
    if let Some(share) = share {
        if capacity == 0 {
            t.error(
                "ecn_threshold",
                "`switch.ecn_threshold` is a share of the capacity, but that is 0",
                "give `switch.capacity` in packets",
            );
        }
        let packets = floor_u32(share * f64::from(capacity));
        return if rule.only_marks {
            // The packet that would be number `packets` + 1 to wait is the first with a mark.
            Aqm::EcnThreshold {
                packets: packets.saturating_sub(1),
            }
        } else {
            Aqm::EcnLimit { packets }
        };
    }
    if value.is_none() && !t.has("ecn_threshold") {
        t.error(
            "ecn_threshold",
            "`switch.ecn_threshold` is missing",
            "give the packets above which arrivals are marked, such as ecn_threshold = 65",
        );
    }
    Aqm::EcnThreshold {
        packets: floor_u32(value.unwrap_or(65.0)),
    }
}

/// `ecn = { kmin_bytes, kmax_bytes, pmax }` and `ecn_capacity_bytes` of Days: a ramp, and the
/// capacity of its queues.
fn read_days_ramp(t: &Table<'_>, drop: Drop) -> Option<(Aqm, u64)> {
    t.refuse(
        "ecn_by_rate",
        "is not supported: one marking rule applies to all ports",
        "give `ecn` with the row of the links that matter",
    );
    let bytes: Option<u64> = t
        .get("ecn_capacity_bytes")
        .within(1..=1u64 << 40)
        .optional();
    if !t.has("ecn") {
        if bytes.is_some() && !t.has("ecn_by_rate") {
            t.error(
                "ecn_capacity_bytes",
                "`switch.ecn_capacity_bytes` limits queues with a ramp, which is missing",
                "add ecn = { kmin_bytes, kmax_bytes, pmax }, or use `capacity_bytes`",
            );
        }
        return None;
    }
    if drop != Drop::Tail {
        t.error(
            "ecn",
            "`switch.ecn` and `switch.drop` both mark packets",
            "write drop = \"TailDrop\", or remove `ecn`",
        );
    }
    if bytes.is_none() && !t.has("ecn_capacity_bytes") {
        t.error(
            "ecn",
            "`switch.ecn` needs `ecn_capacity_bytes`",
            "give the bytes at which such a queue drops",
        );
    }
    let bytes = bytes.unwrap_or(1 << 20);
    let aqm = t.table("ecn", |t| {
        let min = t.get("kmin_bytes").required("give Kmin in bytes", 1u64);
        let max = t.get("kmax_bytes").required("give Kmax in bytes", 2u64);
        let probability = t
            .get("pmax")
            .check(|&p: &f64| p > 0.0 && p <= 1.0, "above 0 and at most 1")
            .required("give the probability at Kmax", 1.0);
        if min == 0 || min > max || max > bytes {
            t.error(
                "kmin_bytes",
                format!("kmin_bytes is {min}, kmax_bytes {max} and ecn_capacity_bytes {bytes}"),
                "they must rise, from at least 1",
            );
        }
        // Days marks all packets at Kmax and above, our ramp only above its end, so the end is one
        // byte lower.
        Aqm::EcnRamp {
            min_bytes: min.max(1) - 1,
            max_bytes: max.max(1) - 1,
            probability,
        }
    });
    Some((aqm, bytes))
}

fn read_trim(t: &Table<'_>) -> Trim {
    let usual = Trim::default();
    Trim {
        data_packets: t
            .get("data")
            .within(1..=1_000_000u32)
            .or(usual.data_packets),
        header_packets: t
            .get("headers")
            .within(1..=1_000_000u32)
            .or(usual.header_packets),
        header_bytes: t
            .get("header_bytes")
            .within(1..=9_000u32)
            .or(usual.header_bytes),
        headers_per_data: t
            .get("headers_per_data")
            .within(1..=1_000_000u32)
            .or(usual.headers_per_data),
        return_to_sender: t.get("return_to_sender").or(usual.return_to_sender),
    }
}

fn read_shared(t: &Table<'_>) -> SharedBuffer {
    SharedBuffer {
        bytes: t
            .get("bytes")
            .within(1_000..=1u64 << 40)
            .required("give the memory of a switch in bytes", 1 << 24),
        alpha: t.get("alpha").within(1e-3..=1e3).or(1.0),
    }
}

/// Days' constants: 70 % and 90 % of the capacity, probability 0.8, weight 2^-9.
fn read_red(t: &Table<'_>, ecn: bool, dialect: Dialect) -> Aqm {
    t.table("red", |t| {
        let min = t.get("min").within(0.0..=1.0).or(0.7);
        let max = t.get("max").within(0.0..=1.0).or(0.9);
        if min >= max {
            t.error(
                "min",
                format!("`min` ({min}) is not below `max` ({max})"),
                "swap them",
            );
        }
        Aqm::Red {
            min,
            max,
            probability: t.get("probability").within(0.0..=1.0).or(0.8),
            weight: t.get("weight").within(1e-9..=1.0).or(1.0 / 512.0),
            ecn,
            ecn_above: dialect == Dialect::Days,
        }
    })
}
