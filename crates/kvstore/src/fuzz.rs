//! What a fuzzer drives: bytes as a peer may send them.
//!
//! An input is a list of frames. The first byte of each says what it is: 0, bytes that are taken as
//! they came, to the end of the input; otherwise the frame's kind, and the number of bytes of its
//! body that follow in two bytes. Those are put into a frame whose checksum is right, so that what
//! comes behind that check is reached.

use slipstream_kvindex::KeyMessage;

use crate::handshake::{Hello, Profile};
use crate::wire::{Blocks, Get, Introduction, Kind, Reader, WireError, frame, read_frame};

/// Reads the frames of `input` as a connection does.
///
/// # Panics
///
/// If a frame is read otherwise than it was written.
pub fn check(input: &[u8]) {
    let mut rest = input;
    while let Some((&first, after)) = rest.split_first() {
        let Some(kind) = Kind::of(first) else {
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
            .expect("all of it");
        assert_eq!(read, (kind, body, bytes.len()));
        for cut in [0, 4, 5, 11, 12, bytes.len() - 1] {
            let read = read_frame(&bytes[..cut.min(bytes.len() - 1)]);
            assert_eq!(read, Ok(None), "half a frame is none");
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

/// What is read and written anew is read as the same: fields that mean nothing may differ.
fn read_body(kind: Kind, body: &[u8]) -> Result<(), WireError> {
    match kind {
        Kind::Hello => {
            let hello = Hello::read(body)?;
            assert_eq!(read_again(&hello.frame(), Hello::read), hello);
            let ours = Hello::new("ours", 1, 0, &Profile::default(), "tcp");
            if let Err(mismatch) = ours.check(&hello) {
                assert_ne!(mismatch.ours, mismatch.theirs);
            }
            assert_eq!(hello.check(&hello), Ok(()));
        }
        Kind::Get => {
            let get = Get::read(body)?;
            assert_eq!(read_again(&get.frame(), Get::read), get);
        }
        Kind::Blocks => {
            let blocks = Blocks::read(body)?;
            assert_eq!(read_again(&blocks.frame(), Blocks::read), blocks);
        }
        Kind::Introduction => {
            let introduction = Introduction::read(body)?;
            let again = read_again(&introduction.frame(), Introduction::read);
            assert_eq!(again, introduction);
        }
        Kind::Refused => {
            Reader(body).text()?;
        }
        Kind::Release => {
            Reader(body).u64()?;
        }
        Kind::Keys => {
            let _ = KeyMessage::read(body);
        }
        Kind::Resync | Kind::Ping | Kind::Memory => {}
    }
    Ok(())
}

fn read_again<T>(bytes: &[u8], read: impl Fn(&[u8]) -> Result<T, WireError>) -> T {
    let (_, body, _) = read_frame(bytes)
        .expect("what is written is a frame")
        .expect("all of it");
    read(body).expect("what is written can be read")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs that the fuzzer has kept, on every compiler.
    #[test]
    fn the_corpus_does_no_harm() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/kv_wire");
        let mut files = 0;
        for entry in std::fs::read_dir(folder).expect("the corpus is committed") {
            check(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files >= 5);
    }
}
