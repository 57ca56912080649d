//! Writing JSON by hand: the few shapes of the API, without a serializer on the token path.

use bytes::BytesMut;

/// Where answers are rendered to.
pub trait Out {
    /// Makes room for `bytes` more, so that the pieces that follow need not grow it one by one.
    fn reserve(&mut self, bytes: usize);
    /// Appends.
    fn put(&mut self, bytes: &[u8]);
}

impl Out for Vec<u8> {
    #[inline]
    fn reserve(&mut self, bytes: usize) {
        Vec::reserve(self, bytes);
    }
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Out for BytesMut {
    #[inline]
    fn reserve(&mut self, bytes: usize) {
        BytesMut::reserve(self, bytes);
    }
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Appends `text` as a JSON string, with its quotes.
pub(crate) fn string(out: &mut impl Out, text: &str) {
    out.put(b"\"");
    escape(out, text);
    out.put(b"\"");
}

/// Appends `text` as a JSON string, or `null`.
pub(crate) fn string_or_null(out: &mut impl Out, text: Option<&str>) {
    match text {
        Some(text) => string(out, text),
        None => out.put(b"null"),
    }
}

/// Appends `text` with what JSON forbids in a string escaped (RFC 8259, section 7).
#[inline]
pub(crate) fn escape(out: &mut impl Out, text: &str) {
    let bytes = text.as_bytes();
    let mut start = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if !NEEDS_ESCAPE[byte as usize] {
            continue;
        }
        out.put(&bytes[start..at]);
        start = at + 1;
        match byte {
            b'"' => out.put(b"\\\""),
            b'\\' => out.put(b"\\\\"),
            b'\n' => out.put(b"\\n"),
            b'\r' => out.put(b"\\r"),
            b'\t' => out.put(b"\\t"),
            0x08 => out.put(b"\\b"),
            0x0c => out.put(b"\\f"),
            _ => {
                let hex = |nibble: u8| b"0123456789abcdef"[nibble as usize];
                out.put(&[b'\\', b'u', b'0', b'0', hex(byte >> 4), hex(byte & 15)]);
            }
        }
    }
    out.put(&bytes[start..]);
}

static NEEDS_ESCAPE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 0x20 {
        table[byte] = true;
        byte += 1;
    }
    table[b'"' as usize] = true;
    table[b'\\' as usize] = true;
    table
};

/// Appends `number` in decimal.
pub(crate) fn integer(out: &mut impl Out, number: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut left = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
        if left == 0 {
            break;
        }
    }
    out.put(&digits[at..]);
}

/// Appends a finite `number` in the shortest form that reads back the same.
///
/// # Panics
/// If it is not finite: JSON has no such number, and none is modelled.
pub(crate) fn float(out: &mut impl Out, number: f64) {
    assert!(number.is_finite(), "JSON has no {number}");
    out.put(format!("{number:?}").as_bytes());
}

/// Appends an array of whole numbers.
pub(crate) fn integers(out: &mut impl Out, numbers: &[u32]) {
    out.put(b"[");
    for (at, &number) in numbers.iter().enumerate() {
        if at > 0 {
            out.put(b",");
        }
        integer(out, u64::from(number));
    }
    out.put(b"]");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn strings_read_back(text in any::<String>()) {
            let mut out = Vec::new();
            string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }

        #[test]
        fn numbers_read_back(whole in any::<u64>(), real in -1e300..1e300f64) {
            let mut out = Vec::new();
            integer(&mut out, whole);
            prop_assert_eq!(serde_json::from_slice::<u64>(&out).unwrap(), whole);
            out.clear();
            float(&mut out, real);
            prop_assert!(serde_json::from_slice::<f64>(&out).is_ok());
            // `serde_json` may be off by the last bit; the text is exact.
            prop_assert_eq!(std::str::from_utf8(&out).unwrap().parse::<f64>().unwrap(), real);
        }
    }

    #[test]
    fn every_ascii_character_is_escaped_as_json_wants() {
        for byte in 0..0x80u8 {
            let text = char::from(byte).to_string();
            let mut out = Vec::new();
            string(&mut out, &text);
            assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }
    }
}
