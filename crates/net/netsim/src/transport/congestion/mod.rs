//! Congestion control: the reaction of a TCP window to ACKs, losses and marks.
//!
//! Each algorithm is a file with an [`Algorithm`] and a line of [`ALGORITHMS`], where reader,
//! sender and outputs find it. NewReno, CUBIC, DCTCP and BBR are called directly, as runs of a
//! million flows spend their time there. Any other one implements [`CongestionControl`] and is
//! called through a pointer.

mod bbr;
mod cubic;
mod dctcp;
mod newreno;
#[cfg(test)]
mod scalable;

use std::fmt;

use slipstream_config::doc::Table;

pub(crate) use bbr::{Bbr, Delivery, Phase, Recovery, Sent};
use cubic::Cubic;
use dctcp::Dctcp;
use newreno::NewReno;

use crate::scenario::Congestion;

/// All congestion controls for files. The first is the default.
pub(crate) const ALGORITHMS: &[&Algorithm] = &[
    &newreno::ALGORITHM,
    &cubic::ALGORITHM,
    &dctcp::ALGORITHM,
    &bbr::ALGORITHM,
    #[cfg(test)]
    &scalable::ALGORITHM,
];

/// A congestion control in files and outputs.
pub(crate) struct Algorithm {
    /// Values of `cc_algorithm`.
    pub(crate) words: &'static [&'static str],
    /// Name in outputs.
    pub(crate) label: &'static str,
    /// Keys of `[traffic.tcp]` that belong to it only.
    pub(crate) keys: &'static [&'static str],
    /// Default of the initial window, segments.
    pub(crate) initial_window: u32,
    /// Whether packets are ECN-capable by default.
    pub(crate) ecn: bool,
    /// Whether, in the dialect of Days, segments may be shorter than the MSS while more data waits.
    pub(crate) short_segments_in_days: bool,
    /// Reads its keys from `[traffic.tcp]`.
    pub(crate) read: fn(&Table<'_>) -> Congestion,
}

impl Algorithm {
    /// Has an initial window of ten segments (RFC 6928), without ECN.
    pub(crate) const fn new(
        words: &'static [&'static str],
        label: &'static str,
        keys: &'static [&'static str],
        read: fn(&Table<'_>) -> Congestion,
    ) -> Algorithm {
        Algorithm {
            words,
            label,
            keys,
            initial_window: 10,
            ecn: false,
            short_segments_in_days: false,
            read,
        }
    }
}

/// Name of a congestion control in outputs.
pub(crate) fn label(congestion: &Congestion) -> &'static str {
    match congestion {
        Congestion::NewReno => newreno::ALGORITHM.label,
        Congestion::Cubic(_) => cubic::ALGORITHM.label,
        Congestion::Dctcp { .. } => dctcp::ALGORITHM.label,
        Congestion::Bbr => bbr::ALGORITHM.label,
        Congestion::Other(other) => other.label,
    }
}

/// A congestion control other than the four that are called directly, with its parameters.
#[derive(Clone, Copy)]
pub struct OtherCongestion {
    label: &'static str,
    parameters: [f64; 4],
    make: fn([f64; 4]) -> Box<dyn CongestionControl>,
}

impl OtherCongestion {
    /// `label` is that of the [`Algorithm`]; `make` creates a sender's state from the parameters.
    // No `expect`: the first algorithm that is added would leave it unfulfilled.
    #[cfg_attr(not(test), allow(dead_code, reason = "for algorithms that are added"))]
    pub(crate) fn new(
        label: &'static str,
        parameters: [f64; 4],
        make: fn([f64; 4]) -> Box<dyn CongestionControl>,
    ) -> OtherCongestion {
        OtherCongestion {
            label,
            parameters,
            make,
        }
    }
}

impl fmt::Debug for OtherCongestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.label, self.parameters)
    }
}

impl PartialEq for OtherCongestion {
    fn eq(&self, other: &OtherCongestion) -> bool {
        (self.label, self.parameters) == (other.label, other.parameters)
    }
}

/// A congestion control sets a sender's window. The sender detects losses, retransmits and
/// inflates the window during recovery (RFC 6582).
pub(crate) trait CongestionControl: Send + Sync + fmt::Debug {
    /// Handles an ACK of new data outside recovery.
    fn on_ack(&mut self, w: &mut Window, ack: AckInfo);

    /// Handles a loss detected by duplicate ACKs, or by the first timeout of a segment: sets the
    /// threshold.
    fn on_loss(&mut self, w: &mut Window, flight: u64) {
        halve(w, flight);
    }

    /// Handles a timeout; the caller sets the window to one segment.
    fn on_timeout(&mut self) {}

    /// Handles an ECN echo, at most once per window of data. RFC 3168 section 6.1.2: as for a loss.
    fn on_mark(&mut self, w: &mut Window, flight: u64) {
        self.on_loss(w, flight);
        w.cwnd = w.ssthresh;
    }

    /// Handles new data of the application after no data was in flight.
    fn on_idle_end(&mut self, _now: u64) {}
}

/// A window and its threshold, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) cwnd: u64,
    pub(crate) ssthresh: u64,
    pub(crate) mss: u64,
}

/// An ACK of new data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckInfo {
    pub(crate) now: u64,
    /// Newly acknowledged bytes.
    pub(crate) acked: u64,
    /// Smoothed round-trip time, ns; 0 before the first sample.
    pub(crate) srtt: u64,
    /// All bytes below are acknowledged.
    pub(crate) una: u64,
    /// The next new byte.
    pub(crate) nxt: u64,
    /// Whether the acknowledged packet carried a congestion mark.
    pub(crate) marked: bool,
    /// Bytes that were unacknowledged before.
    pub(crate) flight: u64,
}

impl AckInfo {
    /// Whether the window limited the sender. In slow start, a window below twice the data in
    /// flight counts as well, as it doubles per round trip.
    fn window_limits(&self, w: &Window) -> bool {
        self.flight + w.mss > w.cwnd || w.cwnd < w.ssthresh && w.cwnd < 2 * self.flight
    }
}

/// The algorithm of a sender.
#[derive(Debug)]
pub(crate) enum Control {
    NewReno(NewReno),
    Cubic(Box<Cubic>),
    Dctcp(Box<Dctcp>),
    Bbr(Box<Bbr>),
    Other(Box<dyn CongestionControl>),
}

impl Control {
    /// The state of a sender; `seed` is that of its flow.
    pub(crate) fn new(congestion: &Congestion, seed: u64) -> Control {
        match *congestion {
            Congestion::NewReno => Control::NewReno(NewReno::default()),
            Congestion::Cubic(params) => Control::Cubic(Box::new(Cubic::new(params))),
            Congestion::Dctcp { gain } => Control::Dctcp(Box::new(Dctcp::new(gain))),
            Congestion::Bbr => Control::Bbr(Box::new(Bbr::new(seed))),
            Congestion::Other(other) => Control::Other((other.make)(other.parameters)),
        }
    }

    /// Handles an ACK of new data outside recovery.
    #[inline]
    pub(crate) fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        match self {
            Control::NewReno(c) => c.on_ack(w, ack),
            Control::Cubic(c) => c.on_ack(w, ack),
            Control::Dctcp(c) => c.on_ack(w, ack),
            // The sender calls BBR for every ACK, in recovery too.
            Control::Bbr(_) => {}
            Control::Other(c) => c.on_ack(w, ack),
        }
    }

    /// Handles new data of the application after no data was in flight.
    pub(crate) fn on_idle_end(&mut self, now: u64) {
        match self {
            Control::Cubic(c) => c.exclude_until(now),
            Control::Other(c) => c.on_idle_end(now),
            Control::NewReno(_) | Control::Dctcp(_) | Control::Bbr(_) => {}
        }
    }

    /// Handles a loss detected by duplicate ACKs: sets the threshold (the caller sets the window).
    pub(crate) fn on_loss(&mut self, w: &mut Window, flight: u64) {
        match self {
            // RFC 8257 section 3.5: DCTCP reacts to losses as standard TCP does.
            Control::NewReno(_) | Control::Dctcp(_) => halve(w, flight),
            Control::Cubic(c) => c.reduce(w, flight),
            // BBR sets the window itself.
            Control::Bbr(_) => {}
            Control::Other(c) => c.on_loss(w, flight),
        }
    }

    /// Handles a timeout, `repeated` if it is not the first for this segment; the caller sets the
    /// window to one segment.
    pub(crate) fn on_timeout(&mut self, w: &mut Window, flight: u64, repeated: bool) {
        // RFC 5681 section 3.1: the threshold is kept when the timer retransmits a segment again.
        if !repeated {
            self.on_loss(w, flight);
        }
        match self {
            Control::NewReno(c) => c.acked = 0,
            Control::Cubic(c) => {
                // RFC 9438 section 4.8: the plateau is the window at the start of the next epoch.
                c.epoch = None;
                c.w_max = 0.0;
            }
            Control::Dctcp(c) => c.growth.acked = 0,
            Control::Bbr(c) => c.on_timeout(w),
            Control::Other(c) => c.on_timeout(),
        }
    }

    /// Handles an ECN echo, at most once per window of data.
    pub(crate) fn on_congestion_mark(&mut self, w: &mut Window, flight: u64) {
        match self {
            // RFC 3168 section 6.1.2: as for a loss.
            Control::NewReno(_) | Control::Cubic(_) => {
                self.on_loss(w, flight);
                w.cwnd = w.ssthresh;
            }
            Control::Dctcp(c) => c.on_mark(w),
            // Version 1 ignores marks.
            Control::Bbr(_) => {}
            Control::Other(c) => c.on_mark(w, flight),
        }
    }
}

/// RFC 5681 equation (4): half of the data in flight, at least two segments.
fn halve(w: &mut Window, flight: u64) {
    w.ssthresh = (flight / 2).max(2 * w.mss);
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const MSS: u64 = 1000;

    pub(super) fn ack(now_s: f64, acked: u64) -> AckInfo {
        AckInfo {
            now: (now_s * 1e9) as u64,
            acked,
            srtt: 0,
            una: 0,
            nxt: 0,
            marked: false,
            flight: 1 << 40,
        }
    }

    #[test]
    fn words_and_keys_name_one_algorithm_each() {
        let all = |of: fn(&Algorithm) -> &'static [&'static str]| {
            let mut all: Vec<_> = ALGORITHMS.iter().flat_map(|a| of(a)).collect();
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{all:?}");
        };
        all(|a| a.words);
        all(|a| a.keys);
    }
}
