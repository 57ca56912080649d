//! Modelled time of a rank as wall time.

use slipstream_base::SimTime;
use slipstream_base::width::floor_u64;

/// How late a rank may run before its model gives up catching up, ns.
///
/// Below it, passes whose end is past follow each other without a wait until the rank is on time
/// again, so that the error of a sleep does not add up. Above it, catching up would show clients a
/// burst that no GPU makes. Source: the peer's live driver uses the same 5 ms.
pub const LATE_NS_MAX: u64 = 5_000_000;

/// An affine map from an engine's modelled time to `CLOCK_MONOTONIC`.
///
/// `wall(m) = anchor_wall + (m - anchor_model) / speedup`, always worked out from the anchor, so
/// that rounding does not add up either: an f64 holds 104 days of ns exactly.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    anchor_model: SimTime,
    anchor_wall_ns: u64,
    /// Wall ns per modelled ns; 0 where nothing is waited for.
    slowness: f64,
}

impl Timeline {
    /// Modelled time that starts at 0 now and runs `speedup` times as fast as the wall clock
    /// (0: modelled time takes none).
    pub fn new(speedup: f64, now_ns: u64) -> Timeline {
        Timeline {
            anchor_model: SimTime::ZERO,
            anchor_wall_ns: now_ns,
            slowness: if speedup > 0.0 { 1.0 / speedup } else { 0.0 },
        }
    }

    /// When modelled time `model` is on the wall clock, ns.
    #[inline]
    pub fn wall_ns(&self, model: SimTime) -> u64 {
        if model >= self.anchor_model {
            let ahead = model.since(self.anchor_model) as f64 * self.slowness;
            self.anchor_wall_ns.saturating_add(floor_u64(ahead))
        } else {
            let behind = self.anchor_model.since(model) as f64 * self.slowness;
            self.anchor_wall_ns.saturating_sub(floor_u64(behind))
        }
    }

    /// From here on, `model` is at `wall_ns`.
    pub fn anchor(&mut self, model: SimTime, wall_ns: u64) {
        self.anchor_model = model;
        self.anchor_wall_ns = wall_ns;
    }

    /// A pass starts at `model`, and the clock says `now_ns`. Moves the anchor if that is too
    /// late to catch up, and returns whether it was. Where nothing is waited for, modelled time is
    /// pinned to the clock pass by pass, and nothing is ever late.
    pub fn begin(&mut self, model: SimTime, now_ns: u64) -> bool {
        if self.slowness == 0.0 {
            self.anchor(model, now_ns);
            return false;
        }
        let late = now_ns.saturating_sub(self.wall_ns(model)) > LATE_NS_MAX;
        if late {
            self.anchor(model, now_ns);
        }
        late
    }

    /// Modelled time at wall time `now_ns`, between `from` and `to`.
    pub fn model_between(&self, now_ns: u64, from: SimTime, to: SimTime) -> SimTime {
        if self.slowness == 0.0 {
            return from;
        }
        let ahead = now_ns.saturating_sub(self.anchor_wall_ns) as f64 / self.slowness;
        (self.anchor_model + floor_u64(ahead)).clamp(from, to.max(from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelled_time_is_divided_by_the_speedup() {
        let line = Timeline::new(10.0, 1_000);
        assert_eq!(line.wall_ns(SimTime(0)), 1_000);
        assert_eq!(line.wall_ns(SimTime(50_000)), 6_000);
        assert_eq!(
            line.model_between(6_000, SimTime(0), SimTime::MAX),
            SimTime(50_000)
        );
        assert_eq!(
            line.model_between(6_000, SimTime(0), SimTime(7)),
            SimTime(7)
        );
    }

    #[test]
    fn a_small_delay_is_caught_up_and_a_large_one_is_not() {
        let mut line = Timeline::new(1.0, 0);
        let start = SimTime(20_000_000);
        assert!(!line.begin(start, 20_000_000 + LATE_NS_MAX));
        assert_eq!(line.wall_ns(start), 20_000_000, "on schedule still");
        assert!(line.begin(start, 20_000_001 + LATE_NS_MAX));
        assert_eq!(line.wall_ns(start), 25_000_001, "starts now");
    }

    #[test]
    fn times_before_an_anchor_stay_where_they_were_apart_from_the_delay() {
        let mut line = Timeline::new(2.0, 0);
        line.anchor(SimTime(1_000), 10_000);
        assert_eq!(line.wall_ns(SimTime(600)), 9_800);
    }

    #[test]
    fn without_waiting_a_pass_starts_and_ends_now() {
        let mut line = Timeline::new(0.0, 5);
        assert!(!line.begin(SimTime(1 << 60), 77_000_000));
        assert_eq!(line.wall_ns(SimTime(u64::MAX)), 77_000_000);
        assert_eq!(
            line.model_between(90_000_000, SimTime(3), SimTime(9)),
            SimTime(3)
        );
    }

    #[test]
    fn a_year_at_a_million_times_does_not_overflow() {
        let line = Timeline::new(1e6, u64::MAX / 2);
        assert!(line.wall_ns(SimTime::MAX) > u64::MAX / 2);
        let slow = Timeline::new(1e-9, 0);
        assert_eq!(
            slow.wall_ns(SimTime::MAX),
            u64::MAX,
            "never, rather than a panic"
        );
    }
}
