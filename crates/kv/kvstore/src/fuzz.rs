//! The fuzz target: bytes as a peer may send them.
//!
//! An input is a list of frames. The first byte of each selects how it is built. 0: the rest of the
//! input is used as it is. Otherwise the byte is the frame's kind, and the next two bytes are the
//! length of its body. Such a frame gets a correct checksum, so that the code behind that check is
//! reached.

use slipstream_kvindex::KeyMessage;

use crate::handshake::{Hello, Profile};
use crate::wire::{Blocks, FrameKind, Get, Introduction, Reader, WireError, frame, read_frame};

/// Reads `input` as the head of a block's file on disk.
///
/// # Panics
///
/// If a head does not survive a round trip.
pub fn check_block_file(input: &[u8]) {
    crate::tier::disk::check_head(input);
}

/// Reads the frames of `input` as a connection does.
///
/// # Panics
///
/// If a frame does not survive a round trip.
pub fn check(input: &[u8]) {
    let mut rest = input;
    while let Some((&first, after)) = rest.split_first() {
        let Some(kind) = FrameKind::of(first) else {
            return check_stream(after);
        };
        let (len, after) = after.split_at(after.len().min(2));
        let len = len
            .iter()
            .rev()
            .fold(0, |n, &byte| n << 8 | usize::from(byte));
        let (body, after) = after.split_at(after.len().min(len));
        rest = after;
        let bytes = frame(kind, body);
        let read = read_frame(&bytes)
            .expect("a whole frame")
            .expect("the entire frame");
        assert_eq!(read, (kind, body, bytes.len()));
        for cut in [0, 4, 5, 11, 12, bytes.len() - 1] {
            let read = read_frame(&bytes[..cut.min(bytes.len() - 1)]);
            assert_eq!(read, Ok(None), "a partial frame yields nothing");
        }
        let _ = read_body(kind, body);
    }
}

fn check_stream(mut bytes: &[u8]) {
    while let Ok(Some((kind, body, len))) = read_frame(bytes) {
        assert_eq!(frame(kind, body), &bytes[..len]);
        let _ = read_body(kind, body);
        bytes = &bytes[len..];
    }
}

/// Checks that a frame written from a parsed body parses to the same. Unused fields may differ.
fn read_body(kind: FrameKind, body: &[u8]) -> Result<(), WireError> {
    match kind {
        FrameKind::Hello => {
            let hello = Hello::read(body)?;
            assert_eq!(read_again(&hello.frame(), Hello::read), hello);
            let ours = Hello::new("ours", 1, 0, &Profile::default(), "tcp");
            if let Err(mismatch) = ours.check(&hello) {
                assert_ne!(mismatch.ours, mismatch.theirs);
            }
            assert_eq!(hello.check(&hello), Ok(()));
        }
        FrameKind::Get => {
            let get = Get::read(body)?;
            assert_eq!(read_again(&get.frame(), Get::read), get);
        }
        FrameKind::Blocks => {
            let blocks = Blocks::read(body)?;
            assert_eq!(read_again(&blocks.frame(), Blocks::read), blocks);
        }
        FrameKind::Introduction => {
            let introduction = Introduction::read(body)?;
            let again = read_again(&introduction.frame(), Introduction::read);
            assert_eq!(again, introduction);
        }
        FrameKind::Refused => {
            Reader(body).text()?;
        }
        FrameKind::Release => {
            Reader(body).u64()?;
        }
        FrameKind::Keys => {
            let _ = KeyMessage::read(body);
        }
        FrameKind::Resync | FrameKind::Ping | FrameKind::Memory => {}
    }
    Ok(())
}

fn read_again<T>(bytes: &[u8], read: impl Fn(&[u8]) -> Result<T, WireError>) -> T {
    let (_, body, _) = read_frame(bytes)
        .expect("a written frame is complete")
        .expect("the entire frame");
    read(body).expect("a written body can be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the committed fuzz corpus, with every compiler.
    #[test]
    fn the_corpus_does_not_panic() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fuzz/corpus/kv_wire");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("the corpus is committed") {
            check(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files >= 5);
    }
}
