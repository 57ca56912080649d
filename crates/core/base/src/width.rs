//! Conversions between widths of numbers, checked.
//!
//! `as` drops high bits silently, and a length that has outgrown its field then describes other bytes.
//! Crates that write bytes or narrow indices enable `clippy::cast_possible_truncation` and its kin, and
//! narrow with these functions: one per width. They panic on a number that does not fit, because its bound
//! is an invariant of the caller. Numbers from outside go through `TryFrom` and an error instead.

use std::time::Duration;

macro_rules! narrow {
    ($($name:ident $width:ident),*) => {$(
        #[doc = concat!("`n` as a `", stringify!($width), "`.")]
        ///
        /// # Panics
        /// If it does not fit.
        #[inline]
        #[track_caller]
        pub fn $name<N: TryInto<$width>>(n: N) -> $width {
            match n.try_into() {
                Ok(n) => n,
                Err(_) => does_not_fit(stringify!($width)),
            }
        }
    )*};
}

narrow!(to_u8 u8, to_u16 u16, to_u32 u32, to_u64 u64, to_usize usize, to_i64 i64, to_i32 i32);

#[cold]
#[inline(never)]
#[track_caller]
fn does_not_fit(width: &str) -> ! {
    panic!("a number does not fit into {width}, although its bound says so")
}

/// The low 8 bits of `n`.
#[inline]
pub fn low_u8(n: u64) -> u8 {
    (n & 0xff) as u8
}

/// The low 16 bits of `n`.
#[inline]
pub fn low_u16(n: u64) -> u16 {
    (n & 0xffff) as u16
}

/// The low 32 bits of `n`.
#[inline]
pub fn low_u32(n: u64) -> u32 {
    (n & 0xffff_ffff) as u32
}

/// The low half of `n`.
#[inline]
pub fn low_u64(n: u128) -> u64 {
    (n & 0xffff_ffff_ffff_ffff) as u64
}

/// The high half of `n`.
#[inline]
pub fn high_u64(n: u128) -> u64 {
    (n >> 64) as u64
}

/// `x` rounded to an integer; 0 if it is negative or NaN, and the maximum if it is more.
#[inline]
pub fn round_u64(x: f64) -> u64 {
    // As `x.round()`, which is a call of a function on some processors. From 2^52 on all are whole.
    let whole = floor_u64(x);
    whole + u64::from(whole < 1 << 52 && x - whole as f64 >= 0.5)
}

/// `x` without its fraction; 0 if it is negative or NaN, and the maximum if it is more.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates for floats, which is what this function promises"
)]
pub fn floor_u64(x: f64) -> u64 {
    x as u64
}

/// `x` rounded to an integer; 0 if it is NaN, and the nearest end of the range if it is beyond.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "`as` saturates for floats, which is what this function promises"
)]
pub fn round_i64(x: f64) -> i64 {
    x.round() as i64
}

/// As [`floor_u64`], in 32 bits.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates for floats, which is what this function promises"
)]
pub fn floor_u32(x: f64) -> u32 {
    x as u32
}

/// The `f32` nearest to `x`; infinite if it is beyond their range.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the caller asks for fewer digits"
)]
pub fn nearest_f32(x: f64) -> f32 {
    x as f32
}

/// Nanoseconds of `duration`; the maximum, 584 years, if it is longer.
#[inline]
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_kept_and_the_rest_panics() {
        assert_eq!((to_u8(255_usize), to_u16(65_535_u32)), (255, 65_535));
        assert_eq!(to_u32(u64::from(u32::MAX)), u32::MAX);
        assert_eq!((to_usize(7_u64), to_u64(7_i32), to_i64(7_u64)), (7, 7, 7));
        let panics = |f: fn()| std::panic::catch_unwind(f).is_err();
        assert!(panics(|| _ = to_u8(256_usize)));
        assert!(panics(|| _ = to_u16(65_536_usize)));
        assert!(panics(|| _ = to_u32(1_u64 << 32)));
        assert!(panics(|| _ = to_u64(-1_i64)));
        assert!(panics(|| _ = to_i64(u64::MAX)));
        assert_eq!(to_i32(i32::MAX.cast_unsigned()), i32::MAX);
        assert!(panics(|| _ = to_i32(1_u32 << 31)));
    }

    #[test]
    fn halves_are_rounded_away_from_zero() {
        let half = 0.5_f64;
        let big = (1_u64 << 52) as f64;
        for x in [
            0.0,
            -0.4,
            -7.0,
            half,
            half.next_down(),
            1.5,
            2.5,
            2.5_f64.next_down(),
            big / 2.0 - 0.5,
            big / 2.0 + 0.5,
            big - 0.5,
            big,
            big + 1.0,
            4.0 * big,
            1e300,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
        ] {
            assert_eq!(round_u64(x), floor_u64(x.round()), "{x}");
        }
    }

    #[test]
    fn low_bits_are_cut_and_floats_saturate() {
        let n = 0x1234_5678_9abc_def0;
        assert_eq!(
            (low_u8(n), low_u16(n), low_u32(n)),
            (0xf0, 0xdef0, 0x9abc_def0)
        );
        let wide = 5 << 64 | u128::from(n);
        assert_eq!((high_u64(wide), low_u64(wide)), (5, n));
        assert_eq!((round_u64(1.5), floor_u64(1.9)), (2, 1));
        assert_eq!((round_u64(-1.0), round_u64(f64::NAN)), (0, 0));
        assert_eq!((round_u64(1e30), floor_u32(1e10)), (u64::MAX, u32::MAX));
        assert_eq!((round_i64(-1.5), round_i64(f64::NAN)), (-2, 0));
        assert_eq!((round_i64(-1e30), round_i64(1e30)), (i64::MIN, i64::MAX));
        assert_eq!((nearest_f32(0.5), nearest_f32(1e300)), (0.5, f32::INFINITY));
        assert_eq!(nanos(Duration::MAX), u64::MAX);
        assert_eq!(nanos(Duration::from_micros(3)), 3_000);
    }
}
