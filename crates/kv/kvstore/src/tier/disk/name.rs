//! Names of block files: the key, and what a tier must know of a block before it reads the file.
//!
//! ```text
//!   KEY-LEN-UNTIL-WRITTEN.kv      all in hexadecimal digits; LEN: bytes of the block; times: ns since 1970
//!   hHASH-LEN-UNTIL-WRITTEN.kv    of a key that is too long for a name
//! ```

use std::ffi::OsString;
use std::fmt::Write as _;

use xxhash_rust::xxh3::xxh3_128;

/// Longer keys are named by their hash: a file name has at most 255 bytes.
pub(super) const NAMED_KEY_BYTES_MAX: usize = 100;

/// A stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// Bytes of the block.
    pub(super) len: u64,
    /// `u64::MAX`: no expiry.
    pub(super) until_unix_ns: u64,
    pub(super) written_unix_ns: u64,
}

/// The name of the file of a block.
pub(super) fn name_of(key: &[u8], stored: Stored) -> OsString {
    let mut name = stem_of(key);
    let Stored {
        len,
        until_unix_ns,
        written_unix_ns,
    } = stored;
    let _ = write!(name, "-{len:x}-{until_unix_ns:x}-{written_unix_ns:x}.kv");
    name.into()
}

/// The name that version 0.2 gave to the file of a block.
pub(super) fn old_name_of(key: &[u8]) -> OsString {
    let mut name = stem_of(key);
    name.push_str(".kv");
    name.into()
}

fn stem_of(key: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut name = String::with_capacity(2 * key.len().min(NAMED_KEY_BYTES_MAX) + 54);
    if key.len() > NAMED_KEY_BYTES_MAX {
        let _ = write!(name, "h{:032x}", xxh3_128(key));
        return name;
    }
    for byte in key {
        name.push(char::from(DIGITS[usize::from(byte >> 4)]));
        name.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    name
}

/// Reads the [name](name_of) of a file: its key, or `None` for one that is named by its hash, and its block.
pub(super) fn parse_name(name: &[u8]) -> Option<(Option<Box<[u8]>>, Stored)> {
    let mut parts = name.strip_suffix(b".kv")?.split(|&byte| byte == b'-');
    let stem = parts.next()?;
    let mut number = || number(parts.next()?);
    let stored = Stored {
        len: number()?,
        until_unix_ns: number()?,
        written_unix_ns: number()?,
    };
    if parts.next().is_some() {
        return None;
    }
    if stem.first() == Some(&b'h') {
        return Some((None, stored));
    }
    let (pairs, []) = stem.as_chunks::<2>() else {
        return None;
    };
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    let key: Option<Box<[u8]>> = pairs.iter().map(byte).collect();
    Some((Some(key?), stored))
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

/// A number as [`name_of`] writes it.
fn number(digits: &[u8]) -> Option<u64> {
    let is_written_so =
        !digits.is_empty() && digits.len() <= 16 && (digits[0] != b'0' || digits.len() == 1);
    let add = |sum: u64, byte: &u8| Some(sum << 4 | u64::from(digit(*byte)?));
    is_written_so.then(|| digits.iter().try_fold(0, add))?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A name says what it was made of, and is that of no other block.
        #[test]
        fn names_are_read_as_they_are_written(
            key in prop::collection::vec(any::<u8>(), 0..140),
            len in prop_oneof![any::<u64>(), Just(0), Just(u64::MAX)],
            until_unix_ns in prop_oneof![any::<u64>(), Just(u64::MAX)],
            written_unix_ns in any::<u64>(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let stored = Stored { len, until_unix_ns, written_unix_ns };
            let name = name_of(&key, stored);
            prop_assert!(name.len() <= 255);
            let is_named = key.len() <= NAMED_KEY_BYTES_MAX;
            let parsed = parse_name(name.as_encoded_bytes());
            prop_assert_eq!(parsed, Some((is_named.then(|| key.clone().into()), stored)));
            prop_assert_eq!(parse_name(old_name_of(&key).as_encoded_bytes()), None);
            // Whatever else is there is read as what it is the name of, or not at all.
            let mut other = name.as_encoded_bytes().to_vec();
            let at = at.index(other.len());
            other[at] = byte;
            if let Some((Some(key), stored)) = parse_name(&other) {
                let written = name_of(&key, stored);
                prop_assert!(written.as_encoded_bytes() == other || key.len() > NAMED_KEY_BYTES_MAX);
            }
            other.truncate(at);
            parse_name(&other);
        }
    }
}
