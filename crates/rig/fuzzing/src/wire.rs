//! Bytes from the request plane: either rejected, or frames that can be read to their end and
//! written back unchanged.

use slipstream_base::KvDelta;
use slipstream_planes::wire::{self, FrameKind, Hello, RawFrame, Reject, Welcome, WireError};
use slipstream_planes::{PassFrame, ToWorker};

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok(Some(frame)) = wire::split(rest) {
        rest = &rest[frame.len..];
        let mut back = Vec::new();
        let Ok(whole) = read(&frame, &mut back) else {
            continue;
        };
        if whole {
            let again = wire::split(&back).unwrap().expect("a whole frame");
            assert_eq!(again.kind, frame.kind);
            assert_eq!(again.body, frame.body, "{:?}", frame.kind);
        }
    }
}

/// Reads a frame and writes it to `back`. Returns whether the bytes must be equal: KV runs may
/// be split differently by the sender.
fn read(frame: &RawFrame<'_>, back: &mut Vec<u8>) -> Result<bool, WireError> {
    let (kind, body) = (frame.kind, frame.body);
    match kind {
        FrameKind::Hello => Hello::decode(body)?.encode(back),
        FrameKind::Welcome => Welcome::decode(body)?.encode(back),
        FrameKind::Reject => Reject::decode(body)?.encode(back),
        FrameKind::Ping | FrameKind::Bye => return Ok(false),
        FrameKind::Start
        | FrameKind::Stop
        | FrameKind::Kill
        | FrameKind::Resync
        | FrameKind::Receive
        | FrameKind::Release
        | FrameKind::Credit
        | FrameKind::Input => {
            let message: ToWorker = wire::decode_to_worker(kind, body, 7)?;
            wire::encode_to_worker(&message, back);
        }
        FrameKind::Pass => {
            let mut pass = PassFrame::new();
            wire::decode_pass(body, &mut pass)?;
            assert_eq!(pass.entries().count(), pass.len() as usize);
            wire::encode_pass(&pass, back);
        }
        FrameKind::Kv | FrameKind::KvSnapshot => {
            let mut delta = KvDelta::default();
            let snapshot = wire::decode_kv(kind, body, &mut delta)?;
            wire::encode_kv(&delta, snapshot, back);
            let mut again = KvDelta::default();
            let frame = wire::split(back).unwrap().expect("a whole frame");
            wire::decode_kv(frame.kind, frame.body, &mut again)
                .expect("a frame that we wrote is readable");
            // Clearing twice is clearing once.
            assert!(again.ops.len() <= delta.ops.len());
            return Ok(false);
        }
        FrameKind::Ready => {
            let (worker, ready) = wire::decode_ready(body)?;
            wire::encode_ready(worker, ready, back);
        }
        FrameKind::Load => {
            let mut loads = Vec::new();
            wire::decode_loads(body, |load| loads.push(load))?;
            wire::encode_loads(&loads, back);
        }
    }
    Ok(true)
}
