//! Active queue management: drops or marks of arriving packets before the queue is full.

use slipstream_base::mix;
use slipstream_base::width::nearest_f32;

/// The rule that drops or marks at a port before the queue is full.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Aqm {
    /// A packet is dropped only when the queue is full.
    #[default]
    TailDrop,
    /// Random early detection (Floyd, Jacobson, "Random early detection gateways for congestion
    /// avoidance", IEEE/ACM ToN 1993) on the average of waiting packets.
    Red {
        /// No drop below this average, as a share of the capacity.
        min: f64,
        /// Every packet is dropped at or above this average.
        max: f64,
        /// Probability just below `max`.
        probability: f64,
        /// Weight of a new sample in the average.
        weight: f64,
        /// Mark ECN-capable packets between the thresholds instead of dropping them.
        ecn: bool,
        /// With `ecn`: also mark them at and above `max`, as Days does, instead of dropping them.
        ecn_above: bool,
    },
    /// Marks ECN-capable packets that find more than `packets` waiting (DCTCP's K; RFC 8257
    /// section 3.1); others pass until the queue is full.
    EcnThreshold {
        /// Threshold, packets.
        packets: u32,
    },
    /// Marks ECN-capable packets that would be number `packets` + 1 or later to wait, and drops
    /// others there (Days' `ECN_THRESHOLD`).
    EcnLimit {
        /// Packets that may wait unmarked.
        packets: u32,
    },
    /// Marks ECN-capable packets with a probability that rises from 0 at `min_bytes` to
    /// `probability` at `max_bytes` of backlog, and to 1 above (DCQCN's Kmin, Kmax, Pmax: Zhu et
    /// al., "Congestion control for large-scale RDMA deployments", SIGCOMM 2015, section 3.1).
    EcnRamp {
        /// Kmin, bytes.
        min_bytes: u64,
        /// Kmax, bytes.
        max_bytes: u64,
        /// Pmax.
        probability: f64,
    },
}

/// State of a queue when a packet arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) waiting: u32,
    pub(crate) backlog_bytes: u64,
    pub(crate) size: u32,
    /// How long the port has been idle, ns.
    pub(crate) idle_ns: u64,
    pub(crate) capacity: u32,
    /// Serialization of a packet of this size, ns.
    pub(crate) packet_ns: u64,
    pub(crate) draw: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Pass,
    Mark,
    Drop,
}

impl Aqm {
    pub(crate) fn on_arrival(&self, at: Arrival, average: &mut f32, ect: bool) -> Verdict {
        match *self {
            Aqm::TailDrop => Verdict::Pass,
            Aqm::Red {
                min,
                max,
                probability,
                weight,
                ecn,
                ecn_above,
            } => {
                if at.idle_ns > 0 && *average < 1e-3 {
                    *average = 0.0;
                } else if at.idle_ns > 0 && at.waiting == 0 {
                    // The average decays as if this many packets had found the queue empty (the
                    // paper's m, section 4, with this packet's size).
                    let m = at.idle_ns / at.packet_ns.max(1);
                    *average = nearest_f32(f64::from(*average) * power(1.0 - weight, m));
                }
                let old = f64::from(*average);
                let average_now = old + weight * (f64::from(at.waiting) - old);
                *average = nearest_f32(average_now);
                let share = average_now / f64::from(at.capacity.max(1));
                if share < min {
                    return Verdict::Pass;
                }
                if share >= max {
                    let mark = ecn && ecn_above && ect;
                    return if mark { Verdict::Mark } else { Verdict::Drop };
                }
                let p = probability * (share - min) / (max - min);
                if mix::unit(at.draw) >= p {
                    Verdict::Pass
                } else if ecn && ect {
                    Verdict::Mark
                } else {
                    Verdict::Drop
                }
            }
            Aqm::EcnThreshold { packets } => {
                if ect && at.waiting > packets {
                    Verdict::Mark
                } else {
                    Verdict::Pass
                }
            }
            Aqm::EcnLimit { packets } => {
                if at.waiting < packets {
                    Verdict::Pass
                } else if ect {
                    Verdict::Mark
                } else {
                    Verdict::Drop
                }
            }
            Aqm::EcnRamp {
                min_bytes,
                max_bytes,
                probability,
            } => {
                let queue = at.backlog_bytes + u64::from(at.size);
                if !ect || queue <= min_bytes {
                    return Verdict::Pass;
                }
                let p = if queue > max_bytes {
                    1.0
                } else {
                    probability * (queue - min_bytes) as f64 / (max_bytes - min_bytes).max(1) as f64
                };
                if mix::unit(at.draw) < p {
                    Verdict::Mark
                } else {
                    Verdict::Pass
                }
            }
        }
    }
}

/// `base` to the power `n`, by squaring, which gives the same bits on every machine.
fn power(mut base: f64, mut n: u64) -> f64 {
    let mut result = 1.0;
    while n > 0 && result > 0.0 {
        if n & 1 == 1 {
            result *= base;
        }
        base *= base;
        n >>= 1;
    }
    result
}
