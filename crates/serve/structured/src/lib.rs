//! Modelled text that keeps to a form: JSON by a schema, one of some choices, a match of a pattern.
//!
//! A modelled engine draws words. Where a client asks for JSON by a schema, for a call of a tool, or for one of
//! some choices, the answer's text is made here instead, from the request and a seed. No I/O; work and size are
//! bounded by [`STEPS_MAX`], [`DEPTH_MAX`] and [`OUT_BYTES_MAX`].
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

mod check;
mod equality;
mod error;
mod judge;
mod keywords;
mod make;
mod merge;
mod number;
mod pattern;
mod scalars;
mod tree;

use slipstream_base::mix;
use slipstream_base::width::to_usize;

pub use check::check_schema;
pub use error::FormError;
pub use make::json_by_schema;
pub use number::Number;
pub use tree::{Tree, write_text};

/// Values and subschemas that one text takes at most.
pub const STEPS_MAX: u32 = 4096;
/// Depth of a schema, and of JSON that is made, at most.
pub const DEPTH_MAX: u32 = 32;
/// Values of schemas that are copied for one text, at most: some hundreds of µs.
pub(crate) const WORK_MAX: u32 = 16 << 10;
/// Bytes of a text at most.
pub const OUT_BYTES_MAX: usize = 16 << 10;

/// Pseudo-random numbers: the same seed gives the same numbers.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    index: u64,
    spent: u32,
}

impl Rng {
    /// A generator with `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng {
            seed,
            index: 0,
            spent: 0,
        }
    }

    /// Work that was done with it, in values made or copied: some 100 ns each.
    pub fn spent(&self) -> u32 {
        self.spent
    }

    fn spend(&mut self, work: u32) {
        self.spent = self.spent.saturating_add(work);
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.index += 1;
        mix::below(mix::draw(self.seed, self.index), n)
    }

    /// An index into a slice of `len` elements, which is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        to_usize(self.below(len as u64))
    }

    /// A number from 0, below 1.
    fn unit(&mut self) -> f64 {
        self.index += 1;
        mix::unit(mix::draw(self.seed, self.index))
    }
}

/// Work that is counted for `steps`.
fn work(steps: usize) -> u32 {
    u32::try_from(steps).unwrap_or(u32::MAX)
}

/// A text that matches the regular expression `pattern`.
///
/// # Errors
/// The reason, as the end of a sentence that begins with the pattern's name.
pub fn text_by_pattern(pattern: &str, rng: &mut Rng) -> Result<String, String> {
    rng.spend(work(32 + pattern.len()));
    let found = pattern::matching(pattern, rng)?;
    rng.spend(work(found.len()));
    Ok(found)
}
