//! Fuzz targets: answers of engines, and the streams that are continued from them.

use bytes::BytesMut;
use hyper::Method;
use serde_json::Value;

use super::api::StreamKind;
use super::peek::peek;
use super::resume::{self, Lost};
use crate::wire::{BodyDecoder, Decoded, WireError, take_head};

/// Reads an answer whose bytes come in portions of `step`. Returns its status and its body so far.
fn answer(bytes: &[u8], step: usize) -> Result<Option<(u16, Vec<u8>)>, WireError> {
    let mut buf = BytesMut::new();
    let mut portions = bytes.chunks(step.max(1));
    let head = loop {
        if let Some(head) = take_head(&mut buf, &Method::POST)? {
            break head;
        }
        let Some(portion) = portions.next() else {
            return Ok(None);
        };
        buf.extend_from_slice(portion);
    };
    let mut decoder = BodyDecoder::new(head.framing);
    let mut body = Vec::new();
    loop {
        match decoder.decode(&mut buf)? {
            Decoded::Data(data) => {
                assert!(!data.is_empty(), "a piece is not empty");
                body.extend_from_slice(&data);
            }
            Decoded::End => break,
            Decoded::NeedMore => match portions.next() {
                Some(portion) => buf.extend_from_slice(portion),
                None => break,
            },
        }
    }
    Ok(Some((head.status.as_u16(), body)))
}

/// Reads `input` as an engine's answer, and as a request with the begin of a stream (after a zero byte).
///
/// # Panics
///
/// If an answer depends on how it was cut, or a stream continues with a request that is no object.
pub fn check(input: &[u8]) {
    let (&step, bytes) = input.split_first().unwrap_or((&0, &[]));
    let (whole, parts) = (answer(bytes, bytes.len()), answer(bytes, usize::from(step)));
    // The limit of a head counts the bytes read before it was known to be invalid.
    if let (Ok(whole), Ok(parts)) = (&whole, &parts) {
        assert_eq!(whole, parts);
    }
    let mut halves = bytes.splitn(2, |&byte| byte == 0);
    let body = halves.next().unwrap_or_default();
    let sent = halves.next().unwrap_or_default();
    if let Some(peek) = peek(body) {
        let _ = (peek.has_prompt(), peek.stays_whole());
    }
    for kind in [StreamKind::Completion, StreamKind::Chat] {
        let plans = resume::plans(&Lost {
            kind,
            body,
            sent,
            seams: &[],
            prompt: None,
            by_tokens: true,
            by_params: true,
            model_len: Some(4096),
        });
        match plans {
            Err(why) => assert!(!why.is_empty()),
            Ok(plans) => {
                for mut plan in plans {
                    let request: Value = serde_json::from_slice(&plan.body).expect("valid JSON");
                    assert!(request.is_object());
                    let _ = plan.seam.map(|mut seam| seam.judge_all(sent));
                    let _ = plan.rewriter.rewrite_all(sent, true);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_pass(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            super::check(&bytes);
        }

        #[test]
        fn cut_answers_pass(step in 0u8..9, body in "[0-9a-f\r\n;]{0,40}", framing in 0usize..3) {
            let framing = ["content-length: 7", "transfer-encoding: chunked", "x: y"][framing];
            let mut input = vec![step];
            input.extend(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n{body}").bytes());
            super::check(&input);
        }
    }
}
