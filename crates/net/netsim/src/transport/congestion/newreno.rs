//! NewReno: RFC 5681 with byte counting (RFC 3465). The sender does the recovery (RFC 6582).

use super::{AckInfo, Algorithm, Window};
use crate::scenario::Congestion;

pub(super) const ALGORITHM: Algorithm = Algorithm {
    // Days also starts with two segments.
    initial_window: 2,
    // Days' Reno fills the rest of a window with a short segment.
    short_segments_in_days: true,
    ..Algorithm::new(&["NewReno", "TCPReno", "Reno"], "TCP NewReno", &[], |_| {
        Congestion::NewReno
    })
};

/// RFC 5681 with byte counting (RFC 3465, section 2.1: one segment per window).
#[derive(Clone, Debug, Default)]
pub(crate) struct NewReno {
    pub(super) acked: u64,
}

impl NewReno {
    #[inline]
    pub(super) fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        if w.cwnd < w.ssthresh {
            // Slow start: RFC 5681 equation (2), which ends at ssthresh.
            w.cwnd = (w.cwnd + ack.acked.min(w.mss)).min(w.ssthresh);
        } else {
            self.acked += ack.acked;
            if self.acked >= w.cwnd {
                self.acked -= w.cwnd;
                w.cwnd += w.mss;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::congestion::tests::{MSS, ack};

    #[test]
    fn new_reno_doubles_then_adds_one_segment_per_window() {
        let mut c = NewReno::default();
        let mut w = Window {
            cwnd: 2 * MSS,
            ssthresh: 4 * MSS,
            mss: MSS,
        };
        c.on_ack(&mut w, ack(0.0, MSS));
        c.on_ack(&mut w, ack(0.0, MSS));
        assert_eq!(w.cwnd, 4 * MSS);
        for _ in 0..4 {
            assert_eq!(w.cwnd, 4 * MSS);
            c.on_ack(&mut w, ack(0.0, MSS));
        }
        assert_eq!(w.cwnd, 5 * MSS);
    }
}
