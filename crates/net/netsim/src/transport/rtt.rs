//! Round-trip times and the retransmission timeout of a TCP sender (RFC 6298).

/// Maximum timeout (RFC 6298 section 2.5 allows a limit of at least 60 s).
pub(crate) const RTO_NS_MAX: u64 = 60_000_000_000;
/// Clock granularity G of RFC 6298 section 2.3: 1 ms.
const GRANULARITY_NS: u64 = 1_000_000;

/// Times one segment at a time.
#[derive(Debug)]
pub(super) struct RttEstimator {
    /// End of the segment being timed (0: none), and when it was sent.
    timed: u64,
    timed_at: u64,
    /// Smoothed round-trip time, ns; 0: not measured yet.
    pub(super) srtt: u64,
    rttvar: u64,
    /// The current timeout, ns.
    pub(super) rto: u64,
    rto_min: u64,
    /// The timeout before the first measurement.
    rto_initial: u64,
    /// The segment that the timer retransmitted last, plus one; 0: none.
    timed_out: u64,
}

impl RttEstimator {
    pub(super) fn new(rto_min: u64, rto_initial: u64) -> Self {
        RttEstimator {
            timed: 0,
            timed_at: 0,
            srtt: 0,
            rttvar: 0,
            rto: rto_initial,
            rto_min,
            rto_initial,
            timed_out: 0,
        }
    }

    /// A word of its cache line.
    #[inline]
    pub(super) fn touch(&self) -> u64 {
        self.timed
    }

    /// Times the segment that ends at `end`, unless another is being timed.
    #[inline]
    pub(super) fn on_sent(&mut self, now: u64, end: u64) {
        if self.timed == 0 {
            self.timed = end;
            self.timed_at = now;
        }
    }

    /// Karn's algorithm (RFC 6298 section 3): no sample from retransmitted data.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.timed = 0;
    }

    /// Takes an ACK of new data up to `ack`.
    #[inline]
    pub(super) fn on_ack(&mut self, now: u64, ack: u64) {
        if self.timed != 0 && ack >= self.timed {
            self.sample(now - self.timed_at);
            self.timed = 0;
        } else {
            self.on_unmeasured();
        }
    }

    /// An ACK of new data without a measurement.
    #[inline]
    pub(super) fn on_unmeasured(&mut self) {
        if self.timed_out != 0 {
            // As with timestamps, which headers here have only if `header_bytes` counts them: an ACK of
            // a retransmission is a measurement too (RFC 7323 section 4.1), and a measurement ends
            // the back-off (RFC 6298 section 5). Without, the timeouts of a window of losses double.
            self.end_back_off();
        }
    }

    /// The timer retransmits the segment that begins at `una` (RFC 6298 section 5.5). Returns
    /// whether it did so before.
    pub(super) fn back_off(&mut self, una: u64) -> bool {
        let repeated = self.timed_out == una + 1;
        self.timed_out = una + 1;
        self.timed = 0;
        self.rto = (self.rto * 2).min(RTO_NS_MAX);
        repeated
    }

    /// RFC 6298 section 2.
    pub(super) fn sample(&mut self, rtt: u64) {
        if self.srtt == 0 {
            self.srtt = rtt;
            self.rttvar = rtt / 2;
        } else {
            self.rttvar = (3 * self.rttvar + self.srtt.abs_diff(rtt)) / 4;
            self.srtt = (7 * self.srtt + rtt) / 8;
        }
        self.end_back_off();
    }

    /// Sets the timeout from the measurements so far.
    fn end_back_off(&mut self) {
        self.timed_out = 0;
        self.rto = if self.srtt == 0 {
            self.rto_initial
        } else {
            timeout_ns(self.srtt, self.rttvar, self.rto_min)
        };
    }
}

/// RFC 6298 sections 2.3 to 2.5.
fn timeout_ns(srtt: u64, rttvar: u64, rto_min: u64) -> u64 {
    (srtt + (4 * rttvar).max(GRANULARITY_NS)).clamp(rto_min, RTO_NS_MAX)
}

/// The timeout after a handshake that took `rtt` ns (RFC 6298 section 2.2).
pub(crate) fn initial_timeout_ns(rtt: u64, rto_min: u64) -> u64 {
    timeout_ns(rtt, rtt / 2, rto_min)
}
