//! Draws of a seed.

use slipstream_base::mix;
use slipstream_base::width::{to_u32, to_usize};

/// A sequence of draws. The same seed gives the same sequence on every machine.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    drawn: u64,
}

impl Rng {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng { seed, drawn: 0 }
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        mix::draw(self.seed, self.drawn)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        mix::below(self.bits(), end)
    }

    /// An index into `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        mix::index(self.bits(), len)
    }

    /// As [`between`](Self::between), for counts.
    pub fn size(&mut self, low: usize, high: usize) -> usize {
        to_usize(self.between(low as u64, high as u64))
    }

    /// As [`between`](Self::between), in 32 bits.
    pub fn between_u32(&mut self, low: u32, high: u32) -> u32 {
        to_u32(self.between(low.into(), high.into()))
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of `of`.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.index(of.len())]
    }
}
