//! W3C trace context: `traceparent` of requests (<https://www.w3.org/TR/trace-context/>).

use hyper::header::{HeaderMap, HeaderName};

pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(crate) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Length of a `traceparent` of version 00.
const LEN: usize = 55;

/// The identity of a trace, as in the header: 32 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceId(String);

impl TraceId {
    /// That of a request; `None`: it has no usable one, or several.
    pub(crate) fn of(headers: &HeaderMap) -> Option<TraceId> {
        let mut all = headers.get_all(TRACEPARENT).iter();
        let value = all.next()?.as_bytes();
        if all.next().is_some() {
            return None;
        }
        let head = value.get(..LEN)?;
        let hex = |part: &[u8]| {
            let digit = |&b: &u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
            part.iter().all(digit)
        };
        let zero = |part: &[u8]| part.iter().all(|&b| b == b'0');
        let (version, trace, parent, flags) =
            (&head[..2], &head[3..35], &head[36..52], &head[53..]);
        let joined = [2, 35, 52].iter().all(|&at| head[at] == b'-');
        let valid = joined
            && [version, trace, parent, flags].into_iter().all(hex)
            && version != b"ff"
            && !zero(trace)
            && !zero(parent);
        // Later versions may append members.
        let rest = &value[LEN..];
        let ends = rest.is_empty() || version != b"00" && rest[0] == b'-';
        (valid && ends).then(|| TraceId(String::from_utf8_lossy(trace).into_owned()))
    }

    /// One that is made of `draws`.
    pub(crate) fn drawn(draws: [u64; 2]) -> TraceId {
        TraceId(format!("{:016x}{:016x}", draws[0], draws[1] | 1)) // not all zero
    }

    /// The header for a request that has none.
    pub(crate) fn header(&self, span: u64, sampled: bool) -> String {
        format!("00-{}-{:016x}-{:02x}", self.0, span | 1, u8::from(sampled))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn of(values: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).unwrap());
        }
        TraceId::of(&headers).map(|id| id.0)
    }

    /// The first is the example of the specification.
    #[test]
    fn headers_are_read_as_specified() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let good = format!("00-{ID}-00f067aa0ba902b7-01");
        assert_eq!(of(&[&good]).as_deref(), Some(ID));
        let later = format!("cc-{ID}-00f067aa0ba902b7-01-what-ever");
        assert_eq!(of(&[&later]).as_deref(), Some(ID));
        let huge = format!("{good}-{}", "a".repeat(10_000));
        for bad in [
            "",
            "00",
            &good.to_uppercase(),
            &good.replace("00-", "ff-"),
            &good.replace("-01", "-0g"),
            &good.replace("-01", "-01-x"),
            &good.replace('-', "_"),
            &good.replace(ID, &"0".repeat(32)),
            &good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &huge,
            &"é".repeat(40),
        ] {
            assert_eq!(of(&[bad]), None, "{bad}");
        }
        assert_eq!(of(&[&good, &good]), None, "two of them");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn what_is_made_is_valid() {
        for draws in [[0, 0], [7, u64::MAX]] {
            let id = TraceId::drawn(draws);
            let header = id.header(draws[0], true);
            assert_eq!(of(&[&header]).as_deref(), Some(id.as_str()));
        }
    }
}
