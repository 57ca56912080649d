//! The generator of a run's random numbers.

use slipstream_base::mix::{mix64, unit};
use slipstream_base::width::floor_u64;

use crate::workload::Span;

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix64(self.0)
    }

    /// Uniform over [0, 1).
    pub fn unit(&mut self) -> f64 {
        unit(self.word())
    }

    pub(crate) fn span(&mut self, span: Span) -> u64 {
        match span {
            Span::Fixed(ns) => ns,
            // libm, not the system's, whose results differ between machines.
            Span::Exp(mean) => floor_u64(-libm::log(1.0 - self.unit()) * mean as f64),
            Span::Uniform(a, b) => a + floor_u64(self.unit() * (b.saturating_sub(a)) as f64),
            Span::Either(a, b, p) => {
                if self.unit() < p {
                    b
                } else {
                    a
                }
            }
        }
    }
}
