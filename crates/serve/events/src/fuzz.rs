//! Fuzz targets: bytes from ZeroMQ peers, and MessagePack from engines.

use bytes::BytesMut;

use crate::zmtp::{
    SMALL_FRAME_MAX, check_greeting, pong, put_frame, socket_type, split_command, take_frame,
};
use crate::{FpmMessage, KvEventBatch};

/// Reads `input` as a peer's connection: a greeting, if it is long enough, and frames.
///
/// # Panics
///
/// If a frame depends on how it was cut, or does not survive a round trip.
pub fn check_zmtp(input: &[u8]) {
    if let Some(greeting) = input.first_chunk() {
        let _ = check_greeting(greeting);
    }
    let (&cut, bytes) = input.split_first().unwrap_or((&0, &[]));
    let mut whole = BytesMut::from(bytes);
    let mut parts = BytesMut::from(&bytes[..bytes.len().min(usize::from(cut))]);
    let mut rest = &bytes[parts.len()..];
    loop {
        let expected = take_frame(&mut whole, SMALL_FRAME_MAX);
        let mut found = take_frame(&mut parts, SMALL_FRAME_MAX);
        while matches!(found, Ok(None)) && !rest.is_empty() {
            parts.extend_from_slice(&rest[..1]);
            rest = &rest[1..];
            found = take_frame(&mut parts, SMALL_FRAME_MAX);
        }
        let (Ok(Some(expected)), Ok(Some(found))) = (&expected, &found) else {
            assert_eq!(expected.is_err(), found.is_err());
            return;
        };
        let of = |frame: &crate::zmtp::Frame| (frame.command, frame.more, frame.body.clone());
        assert_eq!(of(expected), of(found));
        assert!(found.body.len() <= SMALL_FRAME_MAX);
        if found.command {
            if let Some((name, data)) = split_command(&found.body) {
                assert!(name.len() + data.len() < found.body.len());
                let _ = socket_type(data);
                assert!(pong(data).len() <= 2 + 5 + 16);
            }
        } else {
            let mut again = Vec::new();
            put_frame(&mut again, &found.body, found.more);
            let again = take_frame(&mut BytesMut::from(&*again), SMALL_FRAME_MAX);
            let again = again.expect("a frame that we wrote").expect("all of it");
            assert_eq!(of(&again), of(found));
        }
    }
}

/// Decodes `input` as a batch of KV events, and as forward-pass metrics.
///
/// # Panics
///
/// If a rejection has no reason.
pub fn check_messages(input: &[u8]) {
    if let Err(error) = KvEventBatch::decode(input) {
        assert!(!error.to_string().is_empty());
    }
    if let Err(error) = FpmMessage::decode(input) {
        assert!(!error.to_string().is_empty());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn arbitrary_bytes_pass(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            super::check_zmtp(&bytes);
            super::check_messages(&bytes);
        }
    }
}
