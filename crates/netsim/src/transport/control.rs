//! Congestion control: how a TCP window answers ACKs, losses and marks.

use crate::scenario::CubicParams;
use crate::transport::bbr::Bbr;

/// A window and its threshold, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) cwnd: u64,
    pub(crate) ssthresh: u64,
    pub(crate) mss: u64,
}

/// What an ACK of new data says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckInfo {
    pub(crate) now: u64,
    /// Newly acknowledged bytes.
    pub(crate) acked: u64,
    /// Smoothed round-trip time, ns; 0 before the first sample.
    pub(crate) srtt: u64,
    /// Everything below is acknowledged.
    pub(crate) una: u64,
    /// The next new byte.
    pub(crate) nxt: u64,
    /// The acknowledged packet carried a congestion mark.
    pub(crate) marked: bool,
    /// Bytes that were unacknowledged before.
    pub(crate) flight: u64,
}

impl AckInfo {
    /// Whether the window is what kept the sender from sending more. In slow start a window below
    /// twice what was in flight counts as well, as it doubles in a round trip.
    fn window_limits(&self, w: &Window) -> bool {
        self.flight + w.mss > w.cwnd || w.cwnd < w.ssthresh && w.cwnd < 2 * self.flight
    }
}

/// The algorithm of a sender.
#[derive(Clone, Debug)]
pub(crate) enum Control {
    NewReno(NewReno),
    Cubic(Box<Cubic>),
    Dctcp(Box<Dctcp>),
    Bbr(Box<Bbr>),
}

impl Control {
    /// An ACK of new data outside recovery.
    #[inline]
    pub(crate) fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        match self {
            Control::NewReno(c) => c.on_ack(w, ack),
            Control::Cubic(c) => c.on_ack(w, ack),
            Control::Dctcp(c) => c.on_ack(w, ack),
            // Hears of every ACK, in recovery too: see the sender.
            Control::Bbr(_) => {}
        }
    }

    /// Nothing was in flight, and the application has data again.
    pub(crate) fn on_idle_end(&mut self, now: u64) {
        if let Control::Cubic(c) = self {
            c.leave_out(now);
        }
    }

    /// A loss was found by duplicate ACKs: sets the threshold (the caller sets the window).
    pub(crate) fn on_loss(&mut self, w: &mut Window, flight: u64) {
        match self {
            // RFC 8257 section 3.5: DCTCP answers losses as standard TCP does.
            Control::NewReno(_) | Control::Dctcp(_) => halve(w, flight),
            Control::Cubic(c) => c.reduce(w, flight),
            // Sets the window itself.
            Control::Bbr(_) => {}
        }
    }

    /// The timer ran out, `again` if it did for this segment before: the caller sets the window to
    /// one segment.
    pub(crate) fn on_timeout(&mut self, w: &mut Window, flight: u64, again: bool) {
        // RFC 5681 section 3.1: the threshold is held when the timer sends a segment once more.
        if !again {
            self.on_loss(w, flight);
        }
        match self {
            Control::NewReno(c) => c.acked = 0,
            Control::Cubic(c) => {
                // RFC 9438 section 4.8: the plateau is the window at the start of what follows.
                c.epoch = None;
                c.w_max = 0.0;
            }
            Control::Dctcp(c) => c.growth.acked = 0,
            Control::Bbr(c) => c.on_timeout(w),
        }
    }

    /// ECN echo, at most once a window of data.
    pub(crate) fn on_congestion_mark(&mut self, w: &mut Window, flight: u64) {
        match self {
            // RFC 3168 section 6.1.2: as for a loss.
            Control::NewReno(_) | Control::Cubic(_) => {
                self.on_loss(w, flight);
                w.cwnd = w.ssthresh;
            }
            Control::Dctcp(c) => c.on_mark(w),
            // Version 1 does not use marks.
            Control::Bbr(_) => {}
        }
    }
}

/// RFC 5681 equation (4): half of what is in flight, at least two segments.
fn halve(w: &mut Window, flight: u64) {
    w.ssthresh = (flight / 2).max(2 * w.mss);
}

/// RFC 5681 with bytes counted (RFC 3465, section 2.1: one segment a window).
#[derive(Clone, Debug, Default)]
pub(crate) struct NewReno {
    acked: u64,
}

impl NewReno {
    #[inline]
    fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
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

/// CUBIC, RFC 9438. Windows in segments, times in seconds, as there.
#[derive(Clone, Debug)]
pub(crate) struct Cubic {
    params: CubicParams,
    /// The window, with its fraction.
    cwnd: f64,
    w_max: f64,
    /// cwnd_prior: the window just before the last reduction; 0 before the first.
    prior: f64,
    epoch: Option<Epoch>,
    /// Time of the last ACK, ns.
    seen: u64,
}

#[derive(Clone, Copy, Debug)]
struct Epoch {
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
    fn leave_out(&mut self, now: u64) {
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

    fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        let mss = w.mss as f64;
        if !ack.window_limits(w) {
            // Section 5.8: no increase while the application limits the flow.
            self.leave_out(ack.now);
            return;
        }
        self.seen = ack.now;
        if w.cwnd < w.ssthresh {
            w.cwnd = (w.cwnd + ack.acked.min(w.mss)).min(w.ssthresh);
            return;
        }
        // The fraction below a byte is kept between ACKs; anything else means that the window was
        // set elsewhere (slow start, recovery).
        if (self.cwnd * mss) as u64 != w.cwnd {
            self.cwnd = w.cwnd as f64 / mss;
        }
        let cwnd = self.cwnd;
        let epoch = self.epoch.unwrap_or_else(|| {
            // Section 4.2: K from the window at the start of the epoch; without an earlier
            // loss (section 4.10) the plateau is here.
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
        // Section 4.3: α makes the Reno-friendly region's average that of Reno; 1 once the window
        // before the last reduction has been reached again. (That is not W_max, which fast
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
            // Sections 4.4 and 4.5: towards W_cubic one round trip ahead, by at most a half.
            let ahead = self.w_cubic(&epoch, t + ack.srtt as f64 / 1e9);
            let target = ahead.clamp(cwnd, 1.5 * cwnd);
            cwnd + (target - cwnd) / cwnd * segments
        };
        self.cwnd = next;
        w.cwnd = (next * mss) as u64;
    }

    /// Sections 4.6 and 4.7: multiplicative decrease and fast convergence.
    fn reduce(&mut self, w: &mut Window, flight: u64) {
        let cwnd = w.cwnd as f64 / w.mss as f64;
        let beta = self.params.beta;
        self.prior = cwnd;
        self.w_max = if self.params.fast_convergence && cwnd < self.w_max {
            cwnd * f64::midpoint(1.0, beta)
        } else {
            cwnd
        };
        w.ssthresh = ((flight as f64 * beta) as u64).max(2 * w.mss);
        self.epoch = None;
    }
}

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
    growth: NewReno,
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

    fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
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
    fn on_mark(&mut self, w: &mut Window) {
        let cut = (w.cwnd as f64 * (1.0 - self.alpha / 2.0)) as u64;
        w.cwnd = cut.max(2 * w.mss);
        w.ssthresh = w.cwnd;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u64 = 1000;

    fn ack(now_s: f64, acked: u64) -> AckInfo {
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
    fn cubic_follows_its_curve_through_the_plateau() {
        let mut c = Cubic::new(CubicParams {
            c: 0.4,
            beta: 0.7,
            fast_convergence: true,
        });
        // A loss at 1,000 segments: K = cbrt(1000 · 0.3 / 0.4) = 9.0856 s. So large a window keeps
        // the Reno-friendly region out of the way (no bytes are acknowledged in between).
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
    fn cubic_remembers_less_after_a_second_loss() {
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
        // So small a C keeps to the Reno-friendly region.
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
            // A window of ACKs.
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

    #[test]
    fn new_reno_doubles_then_adds_one_segment_a_window() {
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
