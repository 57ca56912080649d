//! A stateless random-number generator, for draws that must not depend on the order in which they
//! are made.

use crate::width::to_usize;

/// Mixes `x` into 64 well-spread bits: the finaliser of SplitMix64.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014
/// (variant 13 of Stafford's constants, as in `java.util.SplittableRandom`).
#[inline]
pub fn mix64(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Draw number `index` of the stream named `seed`.
///
/// A pure function: draw 7 is the same whether or not draws 0 to 6 were made.
#[inline]
pub fn draw(seed: u64, index: u64) -> u64 {
    // The golden-ratio increment of SplitMix64; index + 1 keeps draw(0, 0) off the fixed point 0.
    mix64(seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Maps 64 random bits to `0..n` without division (Lemire's multiply-shift; bias below n/2^64).
///
/// Returns 0 for `n == 0`.
#[inline]
pub fn below(bits: u64, n: u64) -> u64 {
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

/// Maps 64 random bits to an index into a slice of `len` elements.
///
/// Returns 0 for `len == 0`.
#[inline]
pub fn index(bits: u64, len: usize) -> usize {
    to_usize(below(bits, len as u64))
}

/// Maps 64 random bits to `[0, 1)` with 53 bits of resolution.
#[inline]
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answer_of_splitmix64() {
        // First outputs of SplitMix64 seeded with 1234567, as its reference program prints them.
        assert_eq!(draw(1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(draw(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn below_stays_below_and_reaches_the_ends() {
        assert_eq!(below(u64::MAX, 10), 9);
        assert_eq!(below(0, 10), 0);
        assert_eq!(below(u64::MAX, 0), 0);
        assert_eq!((index(u64::MAX, 3), index(0, 3), index(7, 0)), (2, 0, 0));
        assert!(unit(u64::MAX) < 1.0);
    }
}
