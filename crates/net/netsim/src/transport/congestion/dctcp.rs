//! DCTCP, RFC 8257.

use slipstream_base::width::floor_u64;

use super::newreno::NewReno;
use super::{AckInfo, Algorithm, Window};
use crate::scenario::Congestion;

pub(super) const ALGORITHM: Algorithm = Algorithm {
    ecn: true,
    ..Algorithm::new(&["DCTCP"], "TCP DCTCP", &["gain"], |t| Congestion::Dctcp {
        // RFC 8257 section 4.2.
        gain: t.get("gain").within(1e-6..=1.0).or(1.0 / 16.0),
    })
};

/// DCTCP, RFC 8257: the window shrinks with the share of marked bytes.
#[derive(Clone, Debug)]
pub(crate) struct Dctcp {
    /// Estimate of the marked share, section 3.3.
    pub(crate) alpha: f64,
    gain: f64,
    acked: u64,
    marked: u64,
    /// End of the window whose bytes are counted.
    window_end: u64,
    pub(super) growth: NewReno,
}

impl Dctcp {
    /// `gain` is g; section 4.2 suggests 1/16. Alpha starts at 1 (section 3.3).
    pub(crate) fn new(gain: f64) -> Self {
        Dctcp {
            alpha: 1.0,
            gain,
            acked: 0,
            marked: 0,
            window_end: 0,
            growth: NewReno::default(),
        }
    }

    pub(super) fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        self.acked += ack.acked;
        if ack.marked {
            self.marked += ack.acked;
        }
        if ack.una >= self.window_end {
            if self.acked > 0 {
                let share = self.marked as f64 / self.acked as f64;
                self.alpha = self.alpha * (1.0 - self.gain) + self.gain * share;
            }
            (self.acked, self.marked, self.window_end) = (0, 0, ack.nxt);
        }
        if !ack.marked {
            self.growth.on_ack(w, ack);
        }
    }

    /// Section 3.4: cwnd × (1 − alpha / 2).
    pub(super) fn on_mark(&mut self, w: &mut Window) {
        let cut = floor_u64(w.cwnd as f64 * (1.0 - self.alpha / 2.0));
        w.cwnd = cut.max(2 * w.mss);
        w.ssthresh = w.cwnd;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::congestion::tests::{MSS, ack};

    #[test]
    fn dctcp_alpha_moves_by_a_sixteenth_of_the_marked_share() {
        let mut c = Dctcp::new(1.0 / 16.0);
        c.alpha = 0.0;
        let mut w = Window {
            cwnd: 10 * MSS,
            ssthresh: 0,
            mss: MSS,
        };
        // A window of ten packets, four of them marked.
        c.window_end = 10 * MSS;
        for i in 1..=10 {
            let info = AckInfo {
                una: i * MSS,
                nxt: 20 * MSS,
                marked: i <= 4,
                ..ack(0.0, MSS)
            };
            c.on_ack(&mut w, info);
        }
        assert!((c.alpha - 0.4 / 16.0).abs() < 1e-12, "{}", c.alpha);
        c.on_mark(&mut w);
        assert_eq!(w.cwnd, (10_000.0 * (1.0 - 0.0125)) as u64);
    }
}
