//! CUBIC, RFC 9438, without HyStart.

use slipstream_base::width::floor_u64;

use super::{AckInfo, Algorithm, Window};
use crate::scenario::{Congestion, CubicParams};

pub(super) const ALGORITHM: Algorithm = Algorithm {
    // As in Days.
    initial_window: 1,
    ..Algorithm::new(&["CUBIC", "TCPCubic"], "TCP CUBIC", &["cubic"], |t| {
        let usual = CubicParams::default();
        Congestion::Cubic(t.table("cubic", |t| CubicParams {
            beta: t.get("beta").within(0.01..=0.99).or(usual.beta),
            c: t.get("c").within(1e-6..=1e6).or(usual.c),
            fast_convergence: t.get("fast_convergence").or(usual.fast_convergence),
        }))
    })
};

/// CUBIC, RFC 9438. Windows in segments, times in seconds, as in the RFC.
#[derive(Clone, Debug)]
pub(crate) struct Cubic {
    params: CubicParams,
    /// The window, including its fraction.
    cwnd: f64,
    pub(super) w_max: f64,
    /// cwnd_prior: the window just before the last reduction; 0 before the first.
    prior: f64,
    pub(super) epoch: Option<Epoch>,
    /// Time of the last ACK, ns.
    seen: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Epoch {
    start: u64,
    k: f64,
    w_est: f64,
}

impl Cubic {
    pub(crate) fn new(params: CubicParams) -> Self {
        Cubic {
            params,
            cwnd: 0.0,
            w_max: 0.0,
            prior: 0.0,
            epoch: None,
            seen: 0,
        }
    }

    /// Section 5.8: t does not include times in which the window was not used.
    pub(super) fn exclude_until(&mut self, now: u64) {
        if let Some(epoch) = &mut self.epoch {
            epoch.start += now - self.seen;
        }
        self.seen = now;
    }

    /// W_cubic(t), equation (1).
    fn w_cubic(&self, epoch: &Epoch, t: f64) -> f64 {
        let d = t - epoch.k;
        self.params.c * d * d * d + self.w_max
    }

    pub(super) fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        let mss = w.mss as f64;
        if !ack.window_limits(w) {
            // Section 5.8: no increase while the application limits the flow.
            self.exclude_until(ack.now);
            return;
        }
        self.seen = ack.now;
        if w.cwnd < w.ssthresh {
            w.cwnd = (w.cwnd + ack.acked.min(w.mss)).min(w.ssthresh);
            return;
        }
        // The fraction below a byte is kept between ACKs. Any other difference means that the
        // window was set elsewhere (slow start, recovery).
        if floor_u64(self.cwnd * mss) != w.cwnd {
            self.cwnd = w.cwnd as f64 / mss;
        }
        let cwnd = self.cwnd;
        let epoch = self.epoch.unwrap_or_else(|| {
            // Section 4.2: K from the window at the start of the epoch; without an earlier loss
            // (section 4.10) the plateau is here.
            if self.w_max < cwnd {
                self.w_max = cwnd;
            }
            Epoch {
                start: ack.now,
                k: libm::cbrt((self.w_max - cwnd) / self.params.c),
                w_est: cwnd,
            }
        });
        let t = (ack.now - epoch.start) as f64 / 1e9;
        let segments = ack.acked as f64 / mss;
        // Section 4.3: α gives the Reno-friendly region the average of Reno. It is 1 once the
        // window before the last reduction is reached again. (That is not W_max, which fast
        // convergence lowers further.)
        let beta = self.params.beta;
        let alpha = if epoch.w_est >= self.prior {
            1.0
        } else {
            3.0 * (1.0 - beta) / (1.0 + beta)
        };
        let w_est = epoch.w_est + alpha * segments / cwnd;
        self.epoch = Some(Epoch { w_est, ..epoch });
        let next = if self.w_cubic(&epoch, t) < w_est {
            w_est.max(cwnd)
        } else {
            // Sections 4.4 and 4.5: the window approaches W_cubic one round trip ahead, by at most
            // a half.
            let ahead = self.w_cubic(&epoch, t + ack.srtt as f64 / 1e9);
            let target = ahead.clamp(cwnd, 1.5 * cwnd);
            cwnd + (target - cwnd) / cwnd * segments
        };
        self.cwnd = next;
        w.cwnd = floor_u64(next * mss);
    }

    /// Sections 4.6 and 4.7: multiplicative decrease and fast convergence.
    pub(super) fn reduce(&mut self, w: &mut Window, flight: u64) {
        let cwnd = w.cwnd as f64 / w.mss as f64;
        let beta = self.params.beta;
        self.prior = cwnd;
        self.w_max = if self.params.fast_convergence && cwnd < self.w_max {
            cwnd * f64::midpoint(1.0, beta)
        } else {
            cwnd
        };
        w.ssthresh = floor_u64(flight as f64 * beta).max(2 * w.mss);
        self.epoch = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::congestion::tests::{MSS, ack};

    #[test]
    fn cubic_follows_its_curve_through_the_plateau() {
        let mut c = Cubic::new(CubicParams {
            c: 0.4,
            beta: 0.7,
            fast_convergence: true,
        });
        // A loss at 1,000 segments: K = cbrt(1000 · 0.3 / 0.4) = 9.0856 s. The window is so large
        // that the Reno-friendly region has no effect (no bytes are acknowledged in between).
        let mut w = Window {
            cwnd: 1000 * MSS,
            ssthresh: u64::MAX,
            mss: MSS,
        };
        c.reduce(&mut w, 1000 * MSS);
        w.cwnd = w.ssthresh;
        assert_eq!(w.cwnd, 700 * MSS);
        c.on_ack(&mut w, ack(1.0, 0));
        let epoch = c.epoch.unwrap();
        assert!((epoch.k - 9.0856).abs() < 1e-4, "{}", epoch.k);
        for (t, segments) in [
            (0.0, 700.0),
            (5.0, 972.68),
            (9.0856, 1000.0),
            (14.0, 1047.47),
        ] {
            let got = c.w_cubic(&epoch, t);
            assert!((got - segments).abs() < 0.05, "W({t}) = {got}");
        }
    }

    #[test]
    fn cubic_lowers_the_plateau_after_a_second_loss() {
        let params = CubicParams {
            c: 0.4,
            beta: 0.7,
            fast_convergence: true,
        };
        let mut c = Cubic::new(params);
        let mut w = Window {
            cwnd: 100 * MSS,
            ssthresh: u64::MAX,
            mss: MSS,
        };
        c.reduce(&mut w, 100 * MSS);
        assert_eq!(c.w_max, 100.0);
        w.cwnd = 80 * MSS;
        c.reduce(&mut w, 80 * MSS);
        // 80 · (1 + 0.7) / 2
        assert!((c.w_max - 68.0).abs() < 1e-9);
        assert_eq!(w.ssthresh, 56 * MSS);
    }

    #[test]
    fn cubic_is_slower_than_reno_up_to_the_window_before_the_loss() {
        // C is so small that the window stays in the Reno-friendly region.
        let params = CubicParams {
            c: 1e-9,
            beta: 0.7,
            fast_convergence: true,
        };
        let mut c = Cubic::new(params);
        let mut w = Window {
            cwnd: 100 * MSS,
            ssthresh: 0,
            mss: MSS,
        };
        c.reduce(&mut w, 100 * MSS);
        w.cwnd = 80 * MSS;
        // Fast convergence: W_max is 68 segments, the window before the loss 80.
        c.reduce(&mut w, 80 * MSS);
        w.cwnd = w.ssthresh;
        let mut growth = |w: &mut Window| {
            // One window of ACKs.
            let before = w.cwnd;
            for _ in 0..before / MSS {
                c.on_ack(w, ack(1.0, MSS));
            }
            (w.cwnd - before) as f64 / MSS as f64
        };
        // Section 4.3: 3 · 0.3 / 1.7 = 0.529 segments per round trip.
        while w.cwnd < 79 * MSS {
            let grown = growth(&mut w);
            assert!((0.5..0.54).contains(&grown), "{grown} at {}", w.cwnd);
        }
        while w.cwnd < 82 * MSS {
            growth(&mut w);
        }
        let grown = growth(&mut w);
        assert!(
            (0.97..1.01).contains(&grown),
            "{grown} above the old window"
        );
    }
}
