//! `[traffic.roce]` and `[traffic.dcqcn]`, of Days and ours.

use slipstream_base::width::{round_u64, to_u8};
use slipstream_config::doc::Table;

use super::ns;
use super::units::read_timeout;
use crate::scenario::{Dcqcn, Roce};

/// Takes a note for people.
type Note<'a> = dyn Fn(String) + 'a;

/// Priority and size of a queue pair's answers, if the file gives them.
#[derive(Default)]
pub(super) struct Answers {
    pub(super) priority: Option<u8>,
    pub(super) bytes: Option<u32>,
}

/// A timeout beyond the end of any run.
const NEVER_NS: u64 = 1_000_000_000_000_000_000;

/// `roce`, and `dcqcn` of Days: a queue pair and its answers.
pub(super) fn read_queue_pair(t: &Table<'_>, note: &Note<'_>) -> (Roce, Answers) {
    let (mut roce, mut answers) = t.table("roce", |t| {
        let mut roce = read_roce(t);
        let answers = read_days_roce(t, &mut roce, note);
        (roce, answers)
    });
    if t.has("dcqcn") {
        if t.any("roce.dcqcn", |_| true) {
            t.error(
                "dcqcn",
                "`traffic.dcqcn` and `traffic.roce.dcqcn` both give constants",
                "remove one of them",
            );
        }
        let cnp;
        (roce.dcqcn, cnp) = t.table("dcqcn", |t| read_days_dcqcn(t, note));
        answers.priority = answers.priority.or(cnp);
    }
    (roce, answers)
}

/// Keys of `[traffic.roce]` that Days has.
fn read_days_roce(t: &Table<'_>, roce: &mut Roce, note: &Note<'_>) -> Answers {
    if let Some(timeout) = t
        .get::<u64>("retransmit_timeout_ns")
        .within(0..=NEVER_NS)
        .optional()
    {
        // 0: only a NACK triggers retransmission.
        roce.retry_ns = Some(if timeout == 0 {
            NEVER_NS
        } else {
            timeout.max(1_000)
        });
    }
    let window: Option<u64> = t.get("window_bytes").within(0..=1u64 << 40).optional();
    roce.window_bytes = window.unwrap_or(roce.window_bytes);
    if t.get("variable_window").or(false) {
        t.refuse(
            "variable_window",
            "is not modeled: a window that shrinks with the rate",
            "write variable_window = false, or leave it out",
        );
    }
    if let Some(packets) = t.get("ack_every_packets").within(1..=1_000u32).optional() {
        t.refuse(
            "ack_every",
            "conflicts with `ack_every_packets` of Days: both set the packets per ACK",
            "keep one of the two",
        );
        roce.ack_every = packets;
    }
    if !t.get("duplicate_ack").or(true) {
        t.refuse(
            "duplicate_ack",
            "is not modeled: a packet that arrives again is always answered at once, as the ACK \
             of the first one may be lost",
            "write duplicate_ack = true, or leave it out",
        );
    }
    if t.has("nack_interval_ns") {
        let _: Option<u64> = t.get("nack_interval_ns").optional();
        note("`traffic.roce.nack_interval_ns` has no effect: a gap causes one NACK".into());
    }
    Answers {
        priority: t
            .get::<u32>("feedback_priority")
            .within(0..=7u32)
            .optional()
            .map(to_u8),
        bytes: t.get("ack_size_bytes").within(1..=9_000u32).optional(),
    }
}

/// `[traffic.dcqcn]` of Days, and the priority of notifications.
fn read_days_dcqcn(t: &Table<'_>, note: &Note<'_>) -> (Option<Dcqcn>, Option<u8>) {
    let usual = Dcqcn::default();
    let gbit = |key: &str| {
        t.get::<f64>(key)
            .check(|&g| g > 0.0 && g <= 1e6, "above 0 and at most 1e6 Gb/s")
            .optional()
            .map(|g| g * 1e9)
    };
    let (first, min, max) = (
        gbit("rate_gbps"),
        gbit("min_rate_gbps"),
        gbit("max_rate_gbps"),
    );
    let least = min.unwrap_or(usual.rate_bits_per_s_min);
    if [first, max].into_iter().flatten().any(|rate| rate < least)
        || first.zip(max).is_some_and(|(first, max)| first > max)
    {
        t.error(
            "rate_gbps",
            "the rates of `traffic.dcqcn` do not rise",
            "give min_rate_gbps <= rate_gbps <= max_rate_gbps",
        );
    }
    let time = |key: &str, usual: u64| {
        t.get::<f64>(key)
            .within(0.0..=1e18)
            .optional()
            .map_or(usual, |time| round_u64(time).max(1_000))
    };
    let cut: f64 = t.get("mi_factor").or(0.5);
    if cut != 0.5 {
        t.refuse(
            "mi_factor",
            "is not modeled: a notification cuts the rate by half of alpha",
            "write mi_factor = 0.5",
        );
    }
    for key in ["alpha_resume_interval_ns", "rate_decrease_interval_ns"] {
        t.refuse(
            key,
            "is not modeled: in Mellanox's form alpha and the rate change at the ends of such \
             intervals, here with each notification (Zhu et al. 2015)",
            "leave it out, and give `alpha_timer_ns` and `cnp_interval_ns`",
        );
    }
    if !t.get("clamp_target_rate").or(true) {
        t.refuse(
            "clamp_target_rate",
            "is not modeled: each notification sets the target rate to the current rate",
            "write clamp_target_rate = true, or leave it out",
        );
    }
    for key in ["pacing_interval_ns", "rtt_ns"] {
        if t.has(key) {
            let _: Option<f64> = t.get(key).optional();
            note(format!(
                "`traffic.dcqcn.{key}` has no effect: packets are paced at the rate itself"
            ));
        }
    }
    let dcqcn = Dcqcn {
        gain: t.get("g").within(1e-9..=1.0).or(usual.gain),
        timer_ns: time("rp_timer_ns", usual.timer_ns),
        alpha_timer_ns: time("alpha_timer_ns", usual.alpha_timer_ns),
        byte_counter: t
            .get("increase_byte_threshold")
            .within(1_000..=1u64 << 40)
            .or(usual.byte_counter),
        fast_steps: t
            .get("fast_recovery_times")
            .within(1..=1_000u32)
            .or(usual.fast_steps),
        additive_bits_per_s: gbit("ai_rate_gbps").unwrap_or(usual.additive_bits_per_s),
        hyper_bits_per_s: gbit("hai_rate_gbps").unwrap_or(usual.hyper_bits_per_s),
        cnp_interval_ns: time("cnp_interval_ns", usual.cnp_interval_ns),
        rate_bits_per_s_min: min.unwrap_or(usual.rate_bits_per_s_min),
        rate_bits_per_s_max: max,
        rate_bits_per_s_first: first,
    };
    let priority = t.get::<u32>("cnp_priority").within(0..=7u32).optional();
    (Some(dcqcn), priority.map(to_u8))
}

fn read_roce(t: &Table<'_>) -> Roce {
    let dcqcn = if t.holds_table("dcqcn") || !t.has("dcqcn") {
        Some(t.table("dcqcn", read_dcqcn))
    } else {
        t.get("dcqcn").or(true).then(Dcqcn::default)
    };
    Roce {
        dcqcn,
        window_bytes: t.get("window").within(0..=1u64 << 40).or(0),
        retry_ns: read_timeout(t, "rto"),
        ack_every: t.get("ack_every").within(1..=1_000u32).or(1),
    }
}

fn read_dcqcn(t: &Table<'_>) -> Dcqcn {
    let usual = Dcqcn::default();
    let time = |key: &str, usual: u64| {
        let time = t.get::<f64>(key).within(1e-6..=1e9).optional();
        time.map_or(usual, ns)
    };
    let rate = |key: &str, usual: f64| t.get::<f64>(key).within(1e3..=1e15).or(usual);
    Dcqcn {
        gain: t.get("gain").within(1e-6..=1.0).or(usual.gain),
        timer_ns: time("timer", usual.timer_ns),
        alpha_timer_ns: time("alpha_timer", usual.alpha_timer_ns),
        byte_counter: t
            .get("byte_counter")
            .within(1_000..=1u64 << 40)
            .or(usual.byte_counter),
        fast_steps: t
            .get("fast_steps")
            .within(1..=1_000u32)
            .or(usual.fast_steps),
        additive_bits_per_s: rate("rate_ai", usual.additive_bits_per_s),
        hyper_bits_per_s: rate("rate_hai", usual.hyper_bits_per_s),
        cnp_interval_ns: time("cnp_interval", usual.cnp_interval_ns),
        rate_bits_per_s_min: rate("rate_min", usual.rate_bits_per_s_min),
        ..usual
    }
}
