//! Endpoints: what sends packets and what answers them.

pub(crate) mod congestion;
pub(crate) mod dcqcn;
pub(crate) mod ndp;
pub(crate) mod raw;
pub(crate) mod roce;
pub(crate) mod tcp;

use slipstream_base::mix;

use crate::scenario::{Arrivals, Dist};

/// Draws number `index` of a distribution.
pub(crate) fn sample(dist: &Dist, seed: u64, index: u64) -> f64 {
    if let Dist::Constant(value) = *dist {
        return value;
    }
    let u = mix::unit(mix::draw(seed, index));
    match *dist {
        Dist::Constant(value) => value,
        Dist::Uniform { low, high } => low + (high - low) * u,
        Dist::DiscreteUniform { low, high } => (low + (high - low + 1.0) * u).floor().min(high),
        // Inverse transform; 1 − u lies in (0, 1].
        Dist::Exp { lambda } => -libm::log(1.0 - u) / lambda,
    }
}

/// An application that hands data over piece by piece.
#[derive(Clone, Debug)]
pub(crate) struct Paced {
    arrivals: Arrivals,
    seed: u64,
    index: u64,
    /// When the next piece arrives, ns.
    pub(crate) next: u64,
    end: u64,
    /// Bytes yet to hand over; `u64::MAX` if only time bounds them.
    left: u64,
}

impl Paced {
    pub(crate) fn new(arrivals: Arrivals, seed: u64) -> Self {
        Paced {
            left: arrivals.bytes.unwrap_or(u64::MAX),
            seed,
            index: 0,
            next: 0,
            end: u64::MAX,
            arrivals,
        }
    }

    /// The first piece is due now.
    pub(crate) fn begin(&mut self, now: u64) {
        self.next = now;
        if let Some(duration) = self.arrivals.duration_ns {
            self.end = now.saturating_add(duration);
        }
    }

    /// Size of the piece that is due by `now`; `None` if none is (see `next`) or ever will be.
    pub(crate) fn take(&mut self, now: u64) -> Option<u64> {
        if self.next > now || self.is_over() {
            return None;
        }
        let size = sample(&self.arrivals.size, self.seed, 2 * self.index).round();
        let gap_s = sample(&self.arrivals.gap_s, self.seed, 2 * self.index + 1);
        self.index += 1;
        // A gap of 0 ns for ever would stop time.
        self.next = self
            .next
            .saturating_add(((gap_s * 1e9).round() as u64).max(1));
        let size = (size.max(1.0) as u64).min(self.left);
        if self.left != u64::MAX {
            self.left -= size;
        }
        Some(size)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.next >= self.end || self.left == 0
    }
}
