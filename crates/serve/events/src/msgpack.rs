//! The subset of MessagePack that events need: writing into a reused buffer, and reading with byte
//! offsets in errors.
//!
//! Source of the format: the MessagePack specification (`spec.md` of the msgpack project). Numbers
//! are written in their shortest form, as `rmp-serde` and `msgspec` do.

use slipstream_base::width::{low_u8, low_u16, low_u32, to_u8, to_u16, to_u32, to_usize};

/// Appends a map header.
pub(crate) fn map(out: &mut Vec<u8>, len: u32) {
    match len {
        0..=15 => out.push(0x80 | to_u8(len)),
        16..=0xffff => tagged(out, 0xde, &to_u16(len).to_be_bytes()),
        _ => tagged(out, 0xdf, &len.to_be_bytes()),
    }
}

/// Appends a map header with a length of 16 bits, however short the map.
#[inline]
pub(crate) fn map16(out: &mut Vec<u8>, len: u16) {
    tagged(out, 0xde, &len.to_be_bytes());
}

/// Appends an array header.
pub(crate) fn array(out: &mut Vec<u8>, len: u32) {
    match len {
        0..=15 => out.push(0x90 | to_u8(len)),
        16..=0xffff => tagged(out, 0xdc, &to_u16(len).to_be_bytes()),
        _ => tagged(out, 0xdd, &len.to_be_bytes()),
    }
}

/// Appends a string, truncated at 4 GiB; names and topics are shorter.
#[inline]
pub(crate) fn string(out: &mut Vec<u8>, text: &str) {
    let len = text.len();
    match len {
        0..=31 => out.push(0xa0 | to_u8(len)),
        32..=0xff => tagged(out, 0xd9, &[to_u8(len)]),
        0x100..=0xffff => tagged(out, 0xda, &to_u16(len).to_be_bytes()),
        _ => tagged(out, 0xdb, &to_u32(len).to_be_bytes()),
    }
    out.extend_from_slice(text.as_bytes());
}

/// Appends a byte string.
pub(crate) fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    let len = bytes.len();
    match len {
        0..=0xff => tagged(out, 0xc4, &[to_u8(len)]),
        0x100..=0xffff => tagged(out, 0xc5, &to_u16(len).to_be_bytes()),
        _ => tagged(out, 0xc6, &to_u32(len).to_be_bytes()),
    }
    out.extend_from_slice(bytes);
}

/// Appends an unsigned number.
#[inline(always)]
#[allow(clippy::inline_always)] // 20 calls a message, most of them one byte
pub(crate) fn uint(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => out.push(to_u8(value)),
        0x80..=0xff => tagged(out, 0xcc, &[to_u8(value)]),
        0x100..=0xffff => tagged(out, 0xcd, &to_u16(value).to_be_bytes()),
        0x1_0000..=0xffff_ffff => tagged(out, 0xce, &to_u32(value).to_be_bytes()),
        _ => tagged(out, 0xcf, &value.to_be_bytes()),
    }
}

/// Appends a floating-point number.
#[inline]
pub(crate) fn float(out: &mut Vec<u8>, value: f64) {
    tagged(out, 0xcb, &value.to_be_bytes());
}

/// Appends a signed number.
pub(crate) fn int(out: &mut Vec<u8>, value: i64) {
    match value {
        0.. => uint(out, value.cast_unsigned()),
        -0x20..=-1 => out.push(low_u8(value.cast_unsigned())),
        -0x80..=-0x21 => tagged(out, 0xd0, &[low_u8(value.cast_unsigned())]),
        -0x8000..=-0x81 => tagged(out, 0xd1, &low_u16(value.cast_unsigned()).to_be_bytes()),
        -0x8000_0000..=-0x8001 => tagged(out, 0xd2, &low_u32(value.cast_unsigned()).to_be_bytes()),
        _ => tagged(out, 0xd3, &value.to_be_bytes()),
    }
}

/// The nil value.
pub(crate) const NIL: u8 = 0xc0;

/// Appends [`NIL`].
#[inline]
pub(crate) fn nil(out: &mut Vec<u8>) {
    out.push(NIL);
}

#[inline]
fn tagged<const N: usize>(out: &mut Vec<u8>, tag: u8, rest: &[u8; N]) {
    out.push(tag);
    out.extend_from_slice(rest);
}

/// An error in a message, with its byte offset. The message is unusable; the next one may be valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message is truncated.
    #[error("byte {at}: the message ends in the middle of {what}")]
    Truncated {
        /// Offset from the message's start.
        at: usize,
        /// The value that was being read.
        what: &'static str,
    },
    /// A value of another type.
    #[error("byte {at}: {what} expected, but the value has type byte 0x{tag:02x}")]
    Type {
        /// Offset from the message's start.
        at: usize,
        /// The expected value.
        what: &'static str,
        /// MessagePack's type byte.
        tag: u8,
    },
    /// An invalid value of the right type.
    #[error("byte {at}: {what}")]
    Value {
        /// Offset from the message's start.
        at: usize,
        /// The error.
        what: String,
    },
    /// Bytes after the message.
    #[error("byte {at}: {extra} more bytes follow the message")]
    Trailing {
        /// Where the message ends.
        at: usize,
        /// Bytes after it.
        extra: usize,
    },
}

/// Reads values one by one.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    pub(crate) fn new(bytes: &'b [u8]) -> Reader<'b> {
        Reader { bytes, at: 0 }
    }

    /// Offset of the next value.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Number of unread bytes.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error about the value at `at`.
    pub(crate) fn value_error(at: usize, what: impl Into<String>) -> DecodeError {
        DecodeError::Value {
            at,
            what: what.into(),
        }
    }

    /// Checks that everything was read.
    pub(crate) fn end(&self) -> Result<(), DecodeError> {
        match self.left() {
            0 => Ok(()),
            extra => Err(DecodeError::Trailing { at: self.at, extra }),
        }
    }

    /// The type byte of the next value.
    pub(crate) fn peek(&self, what: &'static str) -> Result<u8, DecodeError> {
        self.bytes
            .get(self.at)
            .copied()
            .ok_or(DecodeError::Truncated { at: self.at, what })
    }

    fn take(&mut self, len: usize, what: &'static str) -> Result<&'b [u8], DecodeError> {
        let at = self.at;
        let taken = self.bytes[at..]
            .get(..len)
            .ok_or(DecodeError::Truncated { at, what })?;
        self.at += len;
        Ok(taken)
    }

    fn be(&mut self, len: usize, what: &'static str) -> Result<u64, DecodeError> {
        let bytes = self.take(len, what)?;
        Ok(bytes.iter().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    /// Length of the map that begins here.
    pub(crate) fn map(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        self.collection(what, 0x80, 0xde, 2)
    }

    /// Length of the array that begins here.
    pub(crate) fn array(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        self.collection(what, 0x90, 0xdc, 1)
    }

    /// Whether the next value is nil.
    pub(crate) fn nil_ahead(&self) -> bool {
        self.bytes.get(self.at) == Some(&NIL)
    }

    /// Whether the next value is a map.
    pub(crate) fn is_map(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0x80..=0x8f | 0xde | 0xdf))
    }

    /// Whether the next value is a string.
    pub(crate) fn is_str(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0xa0..=0xbf | 0xd9..=0xdb))
    }

    /// Whether the next value is an array.
    pub(crate) fn is_array(&self) -> bool {
        matches!(self.bytes.get(self.at), Some(0x90..=0x9f | 0xdc | 0xdd))
    }

    fn collection(
        &mut self,
        what: &'static str,
        fix: u8,
        tag16: u8,
        per_item: usize,
    ) -> Result<usize, DecodeError> {
        let at = self.at;
        let tag = self.peek(what)?;
        self.at += 1;
        let len = match tag {
            _ if tag & 0xf0 == fix => usize::from(tag & 0x0f),
            _ if tag == tag16 => to_usize(self.be(2, what)?),
            _ if tag == tag16 + 1 => to_usize(self.be(4, what)?),
            _ => {
                self.at = at;
                return Err(DecodeError::Type { at, what, tag });
            }
        };
        // Each item takes at least a byte, so a false length reserves no memory.
        if len.saturating_mul(per_item) > self.left() {
            return Err(DecodeError::Truncated { at, what });
        }
        Ok(len)
    }

    /// A string.
    pub(crate) fn str(&mut self, what: &'static str) -> Result<&'b str, DecodeError> {
        let at = self.at;
        let tag = self.peek(what)?;
        self.at += 1;
        let len = match tag {
            0xa0..=0xbf => usize::from(tag & 0x1f),
            0xd9 => to_usize(self.be(1, what)?),
            0xda => to_usize(self.be(2, what)?),
            0xdb => to_usize(self.be(4, what)?),
            _ => {
                self.at = at;
                return Err(DecodeError::Type { at, what, tag });
            }
        };
        std::str::from_utf8(self.take(len, what)?)
            .map_err(|_| Reader::value_error(at, format!("{what} is not UTF-8")))
    }

    /// A byte string, if one begins here.
    pub(crate) fn bytes(&mut self, what: &'static str) -> Result<Option<&'b [u8]>, DecodeError> {
        let tag = self.peek(what)?;
        let width = match tag {
            0xc4 => 1,
            0xc5 => 2,
            0xc6 => 4,
            _ => return Ok(None),
        };
        self.at += 1;
        let len = to_usize(self.be(width, what)?);
        self.take(len, what).map(Some)
    }

    /// A whole number; negative ones in two's complement.
    pub(crate) fn uint(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let at = self.at;
        let tag = self.peek(what)?;
        self.at += 1;
        match tag {
            0x00..=0x7f => Ok(u64::from(tag)),
            0xe0..=0xff => Ok(i64::from(tag.cast_signed()).cast_unsigned()),
            0xcc => self.be(1, what),
            0xcd => self.be(2, what),
            0xce => self.be(4, what),
            0xcf | 0xd3 => self.be(8, what),
            0xd0 => Ok(i64::from(low_u8(self.be(1, what)?).cast_signed()).cast_unsigned()),
            0xd1 => Ok(i64::from(low_u16(self.be(2, what)?).cast_signed()).cast_unsigned()),
            0xd2 => Ok(i64::from(low_u32(self.be(4, what)?).cast_signed()).cast_unsigned()),
            _ => {
                self.at = at;
                Err(DecodeError::Type { at, what, tag })
            }
        }
    }

    /// A whole number of 32 bits.
    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        let at = self.at;
        let value = self.uint(what)?;
        u32::try_from(value)
            .map_err(|_| Reader::value_error(at, format!("{what} does not fit into 32 bits")))
    }

    /// A number, including whole ones, because Python writes 0 for 0.0.
    pub(crate) fn float(&mut self, what: &'static str) -> Result<f64, DecodeError> {
        match self.peek(what)? {
            0xcb => {
                self.at += 1;
                Ok(f64::from_bits(self.be(8, what)?))
            }
            0xca => {
                self.at += 1;
                Ok(f64::from(f32::from_bits(to_u32(self.be(4, what)?))))
            }
            0xe0..=0xff | 0xd0..=0xd3 => Ok(self.uint(what)?.cast_signed() as f64),
            _ => Ok(self.uint(what)? as f64),
        }
    }

    /// Skips a nil, if it is next.
    pub(crate) fn nil(&mut self) -> bool {
        let is_nil = self.bytes.get(self.at) == Some(&0xc0);
        self.at += usize::from(is_nil);
        is_nil
    }

    /// Skips a value of any type.
    pub(crate) fn skip(&mut self, what: &'static str) -> Result<(), DecodeError> {
        // Iterative: a stranger decides how deep a message nests.
        let mut values = 1_usize;
        while values > 0 {
            values = (values - 1).saturating_add(self.skip_head(what)?);
        }
        Ok(())
    }

    /// Skips a value without the values in it. Returns their number.
    fn skip_head(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        let at = self.at;
        let tag = self.peek(what)?;
        match tag {
            0x80..=0x8f | 0xde | 0xdf => return Ok(2 * self.map(what)?),
            0x90..=0x9f | 0xdc | 0xdd => return self.array(what),
            0xa0..=0xbf | 0xd9..=0xdb => {
                // Not `str`: skipped values need not be UTF-8.
                self.at += 1;
                let len = match tag {
                    0xd9 => to_usize(self.be(1, what)?),
                    0xda => to_usize(self.be(2, what)?),
                    0xdb => to_usize(self.be(4, what)?),
                    _ => usize::from(tag & 0x1f),
                };
                self.take(len, what)?;
            }
            0xc4..=0xc6 => {
                self.bytes(what)?;
            }
            0xc7..=0xc9 => {
                self.at += 1;
                let len = to_usize(self.be(1 << (tag - 0xc7), what)?);
                self.take(len.saturating_add(1), what)?;
            }
            _ => {
                let len = match tag {
                    0xcc | 0xd0 => 1,
                    0xcd | 0xd1 | 0xd4 => 2,
                    0xd5 => 3,
                    0xca | 0xce | 0xd2 => 4,
                    0xd6 => 5,
                    0xcb | 0xcf | 0xd3 => 8,
                    0xd7 => 9,
                    0xd8 => 17,
                    0xc1 => return Err(DecodeError::Type { at, what, tag }),
                    _ => 0, // small numbers, nil, booleans
                };
                self.at += 1;
                self.take(len, what)?;
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_and_strings_are_written_as_rmp_serde_does(
            shift in 0u32..64, n in any::<u64>(), x in any::<f64>(), text in "\\PC{0,300}",
        ) {
            let (signed, n, mut out) = (n as i64 >> shift, n >> shift, Vec::new());
            int(&mut out, signed);
            prop_assert_eq!(&out, &rmp_serde::to_vec(&signed).unwrap());
            out.clear();
            uint(&mut out, n);
            float(&mut out, x);
            string(&mut out, &text);
            let expected = [
                rmp_serde::to_vec(&n).unwrap(),
                rmp_serde::to_vec(&x).unwrap(),
                rmp_serde::to_vec(&text).unwrap(),
            ];
            prop_assert_eq!(&out, &expected.concat());
            let mut reader = Reader::new(&out);
            prop_assert_eq!(reader.uint("n").unwrap(), n);
            prop_assert_eq!(reader.float("x").unwrap().to_bits(), x.to_bits());
            prop_assert_eq!(reader.str("text").unwrap(), text);
            prop_assert_eq!(reader.end(), Ok(()));
        }

        #[test]
        fn skipping_arbitrary_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reader = Reader::new(&bytes);
            while reader.skip("anything").is_ok() {
                prop_assert!(reader.at() <= bytes.len());
            }
        }
    }

    #[test]
    fn lengths_of_collections_are_read_back() {
        for len in [0u32, 15, 16, 0xffff, 0x1_0000] {
            let mut out = Vec::new();
            array(&mut out, len);
            out.resize(out.len() + len as usize, 0xc0);
            assert_eq!(Reader::new(&out).array("it"), Ok(len as usize));
            let mut out = Vec::new();
            map(&mut out, len);
            out.resize(out.len() + 2 * len as usize, 0xc0);
            assert_eq!(Reader::new(&out).map("it"), Ok(len as usize));
        }
    }

    #[test]
    fn a_length_that_lies_is_refused_and_reserves_nothing() {
        let lie = [0xdd, 0xff, 0xff, 0xff, 0xff, 0x00];
        let found = Reader::new(&lie).array("a list");
        let what = "a list";
        assert_eq!(found, Err(DecodeError::Truncated { at: 0, what }));
    }

    #[test]
    fn deep_nests_are_skipped_without_recursion() {
        let mut deep = vec![0x91; 1_000_000];
        assert!(Reader::new(&deep).skip("a value").is_err(), "it has no end");
        deep.push(NIL);
        let mut reader = Reader::new(&deep);
        assert_eq!((reader.skip("a value"), reader.left()), (Ok(()), 0));
    }
}
