//! DCQCN: rate control of RoCE queue pairs (Zhu et al., "Congestion control for large-scale RDMA
//! deployments", SIGCOMM 2015).
//!
//! Timers cost no events. Expirations since the last packet or notification are applied when the
//! rate is next read, in the same order and with the same result.

/// Parameters. The defaults are those that the paper deploys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dcqcn {
    /// Gain of α. Section 4.3 (Figure 12): 1/256.
    pub gain: f64,
    /// T, time between rate increases, ns. Section 5.2: 55 µs.
    pub timer_ns: u64,
    /// Time without a notification after which α decays, ns. Section 3.1: K, 55 µs.
    pub alpha_timer_ns: u64,
    /// B, bytes between rate increases. Section 5.2: 10 MB.
    pub byte_counter: u64,
    /// F, steps of fast recovery. Section 3.1: 5.
    pub fast_steps: u32,
    /// R_AI, additive increase, bits/s. Section 3.1: 40 Mb/s.
    pub additive_bits_per_s: f64,
    /// R_HAI, hyper increase, bits/s. The paper gives no value; in QCN it is ten times R_AI
    /// (Alizadeh et al., "Data center transport mechanisms", Allerton 2008): 400 Mb/s.
    pub hyper_bits_per_s: f64,
    /// Minimum interval between notifications of a receiver to one flow, ns. Section 3.1: 50 µs.
    pub cnp_interval_ns: u64,
    /// Minimum rate, bits/s. Not in the paper: 10 Mb/s keeps a flow alive.
    pub rate_bits_per_s_min: f64,
    /// Maximum rate, bits/s; `None`: that of the link.
    pub rate_bits_per_s_max: Option<f64>,
    /// Rate until the first notification, bits/s; `None`: the maximum.
    pub rate_bits_per_s_first: Option<f64>,
}

impl Default for Dcqcn {
    fn default() -> Self {
        Dcqcn {
            gain: 1.0 / 256.0,
            timer_ns: 55_000,
            alpha_timer_ns: 55_000,
            byte_counter: 10_000_000,
            fast_steps: 5,
            additive_bits_per_s: 40e6,
            hyper_bits_per_s: 400e6,
            cnp_interval_ns: 50_000,
            rate_bits_per_s_min: 10e6,
            rate_bits_per_s_max: None,
            rate_bits_per_s_first: None,
        }
    }
}

/// The reaction point: a sender's rate.
#[derive(Clone, Debug)]
pub(crate) struct ReactionPoint {
    p: Dcqcn,
    /// R_C and R_T, bits/s.
    pub(crate) current: f64,
    target: f64,
    line: f64,
    pub(crate) alpha: f64,
    /// Increases by timer and by bytes since the last cut.
    by_timer: u32,
    by_bytes: u32,
    bytes: u64,
    timer_at: u64,
    alpha_at: u64,
}

impl ReactionPoint {
    /// A flow starts at line rate with α = 1 (section 3.1).
    pub(crate) fn new(p: Dcqcn, line_bits_per_s: f64) -> Self {
        let line = p.rate_bits_per_s_max.unwrap_or(f64::INFINITY);
        let line = line.min(line_bits_per_s);
        let first = p.rate_bits_per_s_first.unwrap_or(line).min(line);
        ReactionPoint {
            p,
            current: first,
            target: first,
            line,
            alpha: 1.0,
            by_timer: 0,
            by_bytes: 0,
            bytes: 0,
            // There is no recovery before the first cut.
            timer_at: u64::MAX,
            alpha_at: u64::MAX,
        }
    }

    /// Applies all expirations up to `now`.
    pub(crate) fn advance(&mut self, now: u64) {
        while self.timer_at <= now {
            self.timer_at += self.p.timer_ns;
            self.by_timer = self.by_timer.saturating_add(1);
            self.increase();
            if self.current >= self.line && self.timer_at <= now {
                // At line rate, further steps change only the count.
                let steps = (now - self.timer_at) / self.p.timer_ns + 1;
                self.timer_at += steps * self.p.timer_ns;
                let steps = u32::try_from(steps).unwrap_or(u32::MAX);
                self.by_timer = self.by_timer.saturating_add(steps);
            }
        }
        while self.alpha_at <= now {
            self.alpha_at += self.p.alpha_timer_ns;
            // Equation (2).
            self.alpha *= 1.0 - self.p.gain;
            if self.alpha < 1e-9 && self.alpha_at <= now {
                let steps = (now - self.alpha_at) / self.p.alpha_timer_ns + 1;
                self.alpha_at += steps * self.p.alpha_timer_ns;
            }
        }
    }

    /// Counts sent bytes.
    pub(crate) fn on_sent(&mut self, bytes: u64) {
        if self.timer_at == u64::MAX {
            return;
        }
        self.bytes += bytes;
        while self.bytes >= self.p.byte_counter {
            self.bytes -= self.p.byte_counter;
            self.by_bytes = self.by_bytes.saturating_add(1);
            self.increase();
        }
    }

    /// Handles a congestion notification.
    pub(crate) fn on_notification(&mut self, now: u64) {
        self.advance(now);
        // Equation (1).
        self.target = self.current;
        self.current = (self.current * (1.0 - self.alpha / 2.0)).max(self.p.rate_bits_per_s_min);
        self.alpha = (1.0 - self.p.gain) * self.alpha + self.p.gain;
        (self.by_timer, self.by_bytes, self.bytes) = (0, 0, 0);
        self.timer_at = now + self.p.timer_ns;
        self.alpha_at = now + self.p.alpha_timer_ns;
    }

    /// Section 3.1, Algorithm 1 and equations (3) and (4): fast recovery for F steps, then additive
    /// increase, and hyper increase once both the timer and the bytes have passed F.
    fn increase(&mut self) {
        let f = self.p.fast_steps;
        if self.by_timer.max(self.by_bytes) > f {
            let both = self.by_timer.min(self.by_bytes);
            self.target += if both > f {
                f64::from(both - f) * self.p.hyper_bits_per_s
            } else {
                self.p.additive_bits_per_s
            };
            self.target = self.target.min(self.line);
        }
        self.current = f64::midpoint(self.target, self.current);
        // The mean of two numbers reaches the larger one only in the limit, so a difference below 1
        // kb/s is closed.
        if self.target - self.current < 1e3 {
            self.current = self.target;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: f64 = 1e9;

    fn near(got: f64, expected: f64) {
        assert!((got - expected).abs() < 2e3, "{got} is not {expected}");
    }

    #[test]
    fn rate_steps_by_hand() {
        let mut r = ReactionPoint::new(Dcqcn::default(), 40.0 * GBIT);
        r.advance(1_000_000);
        near(r.current, 40.0 * GBIT);
        // First cut at 1 ms with α = 1: half the rate; α stays (1 − g) + g = 1.
        r.on_notification(1_000_000);
        near(r.current, 20.0 * GBIT);
        assert!((r.alpha - 1.0).abs() < 1e-12);
        // Fast recovery towards 40 Gb/s, every 55 µs: 30, 35, 37.5, 38.75, 39.375.
        for (step, gbit) in [30.0, 35.0, 37.5, 38.75, 39.375].into_iter().enumerate() {
            r.advance(1_000_000 + 55_000 * (step as u64 + 1) - 1);
            assert!(r.current < gbit * GBIT);
            r.advance(1_000_000 + 55_000 * (step as u64 + 1));
            near(r.current, gbit * GBIT);
        }
        // α decayed five times: (255/256)^5.
        assert!((r.alpha - (255.0f64 / 256.0).powi(5)).abs() < 1e-12);
        // The target is already at line rate, so the sixth step halves the distance again.
        r.advance(1_000_000 + 6 * 55_000);
        near(r.current, 39.6875 * GBIT);
    }

    #[test]
    fn additive_then_hyper_increase() {
        let p = Dcqcn::default();
        let mut r = ReactionPoint::new(p, 40.0 * GBIT);
        r.on_notification(0);
        r.on_notification(1);
        // Two cuts with α = 1: target 20, current 10 Gb/s.
        near(r.current, 10.0 * GBIT);
        near(r.target, 20.0 * GBIT);
        r.advance(1 + 5 * 55_000);
        near(r.target, 20.0 * GBIT);
        r.advance(1 + 6 * 55_000);
        near(r.target, 20.04 * GBIT);
        // Five increases by bytes: max(6, n) > F, min(6, n) <= F: additive each time.
        for _ in 0..5 {
            r.on_sent(10_000_000);
        }
        near(r.target, 20.24 * GBIT);
        // The sixth: both above F by 1, then by 2 with the seventh of the timer (i = min − F = 1).
        r.on_sent(10_000_000);
        near(r.target, 20.64 * GBIT);
        r.advance(1 + 7 * 55_000);
        near(r.target, 21.04 * GBIT);
    }

    #[test]
    fn more_timer_steps_than_32_bits_count_as_the_largest_number() {
        let p = Dcqcn {
            timer_ns: 1_000,
            ..Dcqcn::default()
        };
        let mut r = ReactionPoint::new(p, 40.0 * GBIT);
        r.on_notification(0);
        // 2^32 steps of 1 us and 1,000 more: 72 minutes.
        r.advance(((1 << 32) + 1_000) * 1_000);
        assert_eq!(r.by_timer, u32::MAX);
    }

    #[test]
    fn a_long_rest_ends_at_line_rate() {
        let mut r = ReactionPoint::new(Dcqcn::default(), 40.0 * GBIT);
        r.on_notification(0);
        r.advance(3_600_000_000_000);
        near(r.current, 40.0 * GBIT);
        assert!(r.alpha < 1e-9);
        assert!(r.timer_at > 3_600_000_000_000);
    }
}
