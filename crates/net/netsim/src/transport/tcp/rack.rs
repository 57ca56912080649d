//! RACK-TLP (RFC 8985): a segment is lost if one sent later arrived, and the reordering window has passed since. A probe
//! replaces the timeout at the end of a flow.

use super::scoreboard::{Delivered, TimeLimit, Transmission};

/// Recoveries for which a reordering window stays enlarged (section 6.2 step 4).
const PERSIST: u32 = 16;
/// Segments that arrived beyond a hole, with which the window is 0 (section 3.2: DupThresh).
const DUPLICATES: usize = 3;

#[derive(Clone, Debug)]
pub(super) struct Rack {
    /// The segment sent last among those that arrived (RACK.segment), and its round trip, ns.
    newest: Transmission,
    rtt: u64,
    /// ns; `u64::MAX`: not measured yet.
    rtt_min: u64,
    reordering_seen: bool,
    /// The window, in quarters of the minimum round trip, and the recoveries until it is one again.
    quarters: u64,
    persist: u32,
    /// A D-SACK counts again when this byte is acknowledged.
    duplicate_until: u64,
    probe: Option<Probe>,
    /// A round trip was measured since the last probe.
    measured: bool,
}

/// A tail loss probe under way (section 7).
#[derive(Clone, Copy, Debug)]
struct Probe {
    /// TLP.end_seq
    end: u64,
    resent: bool,
}

impl Rack {
    pub(super) fn new() -> Self {
        Rack {
            newest: Transmission::default(),
            rtt: 0,
            rtt_min: u64::MAX,
            reordering_seen: false,
            quarters: 1,
            persist: PERSIST,
            duplicate_until: 0,
            probe: None,
            measured: true,
        }
    }

    /// Minimum round trip, ns; `u64::MAX` before the first.
    pub(super) fn rtt_min(&self) -> u64 {
        self.rtt_min
    }

    /// Section 6.2 steps 1 to 3: takes what an ACK delivered.
    pub(super) fn on_delivery(&mut self, now: u64, delivered: &Delivered) {
        self.reordering_seen |= delivered.reordered;
        if let Some(original) = delivered.newest_original {
            self.rtt_min = self.rtt_min.min(now - original.at);
            self.measured = true;
        }
        let Some((newest, resent)) = delivered.newest else {
            return;
        };
        // An ACK that returns sooner than possible is one of the original.
        let newest = if resent && now - newest.at < self.rtt_min {
            delivered.newest_original
        } else {
            Some(newest)
        };
        if let Some(newest) = newest.filter(|&newest| newest >= self.newest) {
            self.rtt = now - newest.at;
            self.newest = newest;
        }
    }

    /// Section 6.2 step 4: a D-SACK widens the window, at most once per round trip.
    pub(super) fn on_duplicate(&mut self, una: u64, nxt: u64) {
        if una >= self.duplicate_until {
            self.duplicate_until = nxt;
            self.quarters += 1;
            self.persist = PERSIST;
        }
    }

    /// The end of a recovery.
    pub(super) fn on_recovered(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.quarters = 1;
        }
    }

    /// Section 6.2 step 4: the reordering window, ns.
    fn window(&self, recovering: bool, sacked_segments: usize, srtt: u64) -> u64 {
        if !self.reordering_seen && (recovering || sacked_segments >= DUPLICATES) {
            return 0;
        }
        (self.quarters * (self.rtt_min / 4)).min(srtt)
    }

    /// The limit of step 5; `None` if nothing has arrived yet.
    pub(super) fn limit(
        &self,
        recovering: bool,
        sacked_segments: usize,
        srtt: u64,
    ) -> Option<TimeLimit> {
        (self.rtt > 0).then(|| TimeLimit {
            newest: self.newest,
            wait_ns: self.rtt + self.window(recovering, sacked_segments, srtt),
        })
    }

    /// Section 7.2: the time until a probe, ns, if one may be sent. `single`: one segment is in flight, and its ACK may
    /// be delayed by `ack_delay` ns.
    pub(super) fn probe_timeout(&self, srtt: u64, single: bool, ack_delay: u64) -> Option<u64> {
        (self.probe.is_none() && self.measured && srtt > 0)
            .then(|| 2 * srtt + if single { ack_delay } else { 0 })
    }

    /// Section 7.3: a probe was sent, a new segment or a retransmission; data up to `end` is sent.
    pub(super) fn on_probe(&mut self, end: u64, resent: bool) {
        self.probe = Some(Probe { end, resent });
        self.measured = false;
    }

    pub(super) fn forget_probe(&mut self) {
        self.probe = None;
    }

    /// Section 7.4: whether an ACK shows that the probe repaired a loss, to which the congestion control must react.
    /// `duplicate`: it has a D-SACK; `alone`: it acknowledges nothing new and has no option.
    pub(super) fn probe_repaired(&mut self, ack: u64, duplicate: bool, alone: bool) -> bool {
        let Some(probe) = self.probe.filter(|probe| ack >= probe.end) else {
            return false;
        };
        if !probe.resent || duplicate {
            self.probe = None;
            return false;
        }
        if ack > probe.end {
            self.probe = None;
            return true;
        }
        if alone {
            self.probe = None;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivered(at: u64, end: u64, resent: bool) -> Delivered {
        let sent = Transmission { at, end };
        Delivered {
            bytes: 1,
            newest: Some((sent, resent)),
            newest_original: (!resent).then_some(sent),
            ..Delivered::default()
        }
    }

    fn wait(rack: &Rack, recovering: bool, sacked: usize) -> u64 {
        rack.limit(recovering, sacked, 1_000)
            .expect("measured")
            .wait_ns
    }

    /// RFC 8985 section 6.2 step 4.
    #[test]
    fn the_window_is_a_quarter_of_the_minimum_round_trip() {
        let mut rack = Rack::new();
        assert!(rack.limit(false, 0, 0).is_none());
        rack.on_delivery(400, &delivered(0, 1, false));
        assert_eq!(wait(&rack, false, 2), 400 + 100);
        // Without reordering, losses need no patience.
        assert_eq!((wait(&rack, false, 3), wait(&rack, true, 0)), (400, 400));
        rack.on_delivery(
            1_500,
            &Delivered {
                reordered: true,
                ..delivered(1_000, 2, false)
            },
        );
        assert_eq!(wait(&rack, true, 9), 500 + 100);
        // Each D-SACK adds a quarter, once per round trip; at most the smoothed round trip.
        rack.on_duplicate(10, 20);
        rack.on_duplicate(15, 25);
        assert_eq!(wait(&rack, true, 9), 500 + 200);
        for una in 2..20 {
            rack.on_duplicate(10 * una, 10 * una + 10);
        }
        assert_eq!(wait(&rack, true, 9), 500 + 1_000);
        for _ in 0..PERSIST {
            rack.on_recovered();
        }
        assert_eq!(wait(&rack, true, 9), 500 + 100);
    }

    /// Section 6.2 step 2: an ACK sooner than possible is one of the original.
    #[test]
    fn early_acks_of_retransmissions_are_ignored() {
        let mut rack = Rack::new();
        rack.on_delivery(400, &delivered(0, 1, false));
        rack.on_delivery(700, &delivered(600, 2, true));
        assert_eq!(rack.newest, Transmission { at: 0, end: 1 });
        rack.on_delivery(1_000, &delivered(600, 2, true));
        assert_eq!(
            (rack.newest, rack.rtt),
            (Transmission { at: 600, end: 2 }, 400)
        );
    }

    /// Section 7.4.
    #[test]
    fn a_probe_that_repaired_a_loss_is_told_from_a_spurious_one() {
        let mut rack = Rack::new();
        rack.on_delivery(400, &delivered(0, 1, false));
        assert_eq!(rack.probe_timeout(400, false, 7), Some(800));
        assert_eq!(rack.probe_timeout(400, true, 7), Some(807));
        rack.on_probe(50, true);
        assert_eq!(rack.probe_timeout(400, false, 0), None, "one at a time");
        assert!(!rack.probe_repaired(49, false, false));
        assert!(!rack.probe_repaired(50, false, false));
        assert!(rack.probe_repaired(60, false, false));
        // A D-SACK shows that the original had arrived.
        rack.on_delivery(900, &delivered(500, 60, false));
        rack.on_probe(60, true);
        assert!(!rack.probe_repaired(60, true, false));
        assert!(!rack.probe_repaired(70, false, false));
        // New data repairs nothing.
        rack.on_delivery(1_900, &delivered(1_500, 70, false));
        rack.on_probe(80, false);
        assert!(!rack.probe_repaired(90, false, false));
    }
}
