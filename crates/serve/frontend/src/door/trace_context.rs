//! W3C trace context: `traceparent` of requests (<https://www.w3.org/TR/trace-context/>).

use std::hash::{BuildHasher, Hasher, RandomState};

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
        TraceContext::of(headers).map(|context| context.trace)
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

/// A request's place in a trace, as its client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace: TraceId,
    /// The client's span, 16 hexadecimal digits.
    pub(crate) parent: String,
    /// The client records its part of the trace.
    pub(crate) is_sampled: bool,
}

impl TraceContext {
    /// That of a request; `None`: it has no usable one, or several.
    pub(crate) fn of(headers: &HeaderMap) -> Option<TraceContext> {
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
        let text = |part: &[u8]| String::from_utf8_lossy(part).into_owned();
        // The last digit of the flags: bit 0 is `sampled`.
        let is_sampled = matches!(
            flags[1],
            b'1' | b'3' | b'5' | b'7' | b'9' | b'b' | b'd' | b'f'
        );
        (valid && ends).then(|| TraceContext {
            trace: TraceId(text(trace)),
            parent: text(parent),
            is_sampled,
        })
    }
}

/// The span of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) trace: TraceId,
    /// Its own id, 16 hexadecimal digits.
    pub(crate) id: String,
    /// The client's span; `None`: the trace begins here.
    pub(crate) parent: Option<String>,
}

impl Span {
    /// The span of a request with these headers, if its trace is sampled: by its client, or if it has none by `share` of
    /// requests.
    pub(crate) fn begin(headers: &HeaderMap, share: f64, draw: impl Fn() -> u64) -> Option<Span> {
        let id = || format!("{:016x}", draw() | 1); // not zero
        match TraceContext::of(headers) {
            Some(context) => context.is_sampled.then(|| Span {
                trace: context.trace,
                id: id(),
                parent: Some(context.parent),
            }),
            None => is_drawn(share, draw()).then(|| Span {
                trace: TraceId::drawn([draw(), draw()]),
                id: id(),
                parent: None,
            }),
        }
    }

    /// The header for engines: what they do belongs to this span.
    pub(crate) fn header(&self) -> String {
        format!("00-{}-{}-01", self.trace.0, self.id)
    }

    #[cfg(test)]
    pub(crate) fn example() -> Span {
        Span {
            trace: TraceId("4bf92f3577b34da6a3ce929d0e0e4736".into()),
            id: "b7ad6b7169203331".into(),
            parent: Some("00f067aa0ba902b7".into()),
        }
    }
}

/// Whether a draw is among `share` of all draws.
pub(crate) fn is_drawn(share: f64, draw: u64) -> bool {
    share > 0.0 && (draw >> 11) as f64 / (1_u64 << 53) as f64 <= share
}

/// An id for a request that has none: 128 random bits.
pub(crate) fn fresh_request_id() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", draw(), draw())
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
    fn a_span_is_begun_if_its_trace_is_sampled() {
        const ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        let begin = |header: Option<String>, share: f64, draws: u64| {
            let mut headers = HeaderMap::new();
            if let Some(header) = header {
                headers.insert(TRACEPARENT, HeaderValue::from_str(&header).unwrap());
            }
            Span::begin(&headers, share, || draws)
        };
        for (flags, sampled) in [("00", false), ("01", true), ("02", false), ("ff", true)] {
            let span = begin(Some(format!("00-{ID}-00f067aa0ba902b7-{flags}")), 0.0, 5);
            assert_eq!(span.is_some(), sampled, "{flags}");
            let Some(span) = span else { continue };
            assert_eq!((span.trace.as_str(), &*span.id), (ID, "0000000000000005"));
            assert_eq!(span.parent.as_deref(), Some("00f067aa0ba902b7"));
            assert_eq!(of(&[&span.header()]).as_deref(), Some(ID));
        }
        // A client that does not record its part is not asked again.
        assert_eq!(
            begin(Some(format!("00-{ID}-00f067aa0ba902b7-00")), 1.0, 0),
            None
        );
        assert_eq!(begin(None, 0.0, 0), None);
        assert_eq!(begin(None, 0.5, u64::MAX), None);
        for header in [None, Some("00-junk".to_owned())] {
            let root = begin(header, 1.0, u64::MAX).unwrap();
            assert_eq!((root.parent.as_deref(), root.id.len()), (None, 16));
        }
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
