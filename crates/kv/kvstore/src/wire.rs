//! The messages between two stores, as bytes. `docs/kvstore.md` describes the frames.

use slipstream_base::width::{low_u32, to_u16, to_u32};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Version of the frames and of their order.
pub(crate) const VERSION: u8 = 2;
pub(crate) const HEADER_BYTES: usize = 12;
/// Maximum length of a frame's body. Blocks that follow a frame do not count.
pub(crate) const BODY_BYTES_MAX: usize = 64 << 20;

/// Why bytes are not a frame. The connection ends, as the start of the next frame is unknown.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    /// The peer uses another version.
    #[error(
        "the peer uses version {got} of the protocol, this side {VERSION}; run one release of slipstream on both"
    )]
    Version {
        /// The peer's version.
        got: u8,
    },
    /// Damaged, or not from a store.
    #[error("a frame is damaged or not from a slipstream store: {what}; check what listens there")]
    Malformed {
        /// The reason.
        what: &'static str,
    },
}

fn malformed(what: &'static str) -> WireError {
    WireError::Malformed { what }
}

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    Hello = 1,
    Refused = 2,
    Get = 3,
    Blocks = 4,
    Release = 5,
    Keys = 6,
    Resync = 7,
    Ping = 8,
    Introduction = 9,
    Memory = 10,
}

impl FrameKind {
    pub(crate) fn of(byte: u8) -> Option<FrameKind> {
        use FrameKind::{
            Blocks, Get, Hello, Introduction, Keys, Memory, Ping, Refused, Release, Resync,
        };
        let all = [
            Hello,
            Refused,
            Get,
            Blocks,
            Release,
            Keys,
            Resync,
            Ping,
            Introduction,
            Memory,
        ];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Builds a frame with `body`.
pub(crate) fn frame(kind: FrameKind, body: &[u8]) -> Vec<u8> {
    assert!(body.len() <= BODY_BYTES_MAX, "callers bound the length");
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend(to_u32(body.len()).to_le_bytes());
    out.extend([VERSION, kind as u8, 0, 0]);
    out.extend(frame_checksum(&out, body).to_le_bytes());
    out.extend(body);
    out
}

/// The low half of the XXH3 of the body, seeded with the first eight bytes of the header.
fn frame_checksum(header: &[u8], body: &[u8]) -> u32 {
    let seed = u64::from_le_bytes(header.try_into().expect("eight bytes"));
    low_u32(xxh3_64_with_seed(body, seed))
}

/// A frame's kind, body and total length.
type Frame<'a> = (FrameKind, &'a [u8], usize);

/// Returns the first frame of `bytes`, or `None` if it is incomplete.
pub(crate) fn read_frame(bytes: &[u8]) -> Result<Option<Frame<'_>>, WireError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        // Checked before the frame is complete, so that a peer of another version is refused at
        // once.
        if bytes.len() > 4 && bytes[4] != VERSION {
            return Err(WireError::Version { got: bytes[4] });
        }
        return Ok(None);
    };
    if header[4] != VERSION {
        return Err(WireError::Version { got: header[4] });
    }
    let kind = FrameKind::of(header[5]).ok_or_else(|| malformed("its kind is unknown"))?;
    let len = u32::from_le_bytes(header[..4].try_into().expect("four bytes")) as usize;
    if header[6..8] != [0, 0] {
        return Err(malformed("its reserved bytes are not zero"));
    }
    if len > BODY_BYTES_MAX {
        return Err(malformed("it exceeds the maximum length"));
    }
    let Some(body) = rest.get(..len) else {
        return Ok(None);
    };
    let sum = u32::from_le_bytes(header[8..].try_into().expect("four bytes"));
    if frame_checksum(&header[..8], body) != sum {
        return Err(malformed("its checksum is wrong"));
    }
    Ok(Some((kind, body, HEADER_BYTES + len)))
}

/// Reads numbers and texts from a body.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| malformed("it is shorter than its fields"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(
            self.take(2)?.try_into().expect("two bytes"),
        ))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(
            self.take(4)?.try_into().expect("four bytes"),
        ))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(
            self.take(8)?.try_into().expect("eight bytes"),
        ))
    }

    pub(crate) fn text(&mut self) -> Result<String, WireError> {
        let len = usize::from(self.u16()?);
        let text = std::str::from_utf8(self.take(len)?);
        Ok(text
            .map_err(|_| malformed("a text is not UTF-8"))?
            .to_owned())
    }

    pub(crate) fn end(&self) -> Result<(), WireError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(malformed("it is longer than its fields"))
        }
    }
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    let ends = (0..=text.len().min(usize::from(u16::MAX))).rev();
    let len = ends
        .into_iter()
        .find(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    out.extend(to_u16(len).to_le_bytes());
    out.extend(&text.as_bytes()[..len]);
}

/// How to read a side's memory by NIXL. Over `nixl://`, this is the second frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Introduction {
    /// The address of its blocks in its process, and their bytes.
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    /// The agent's metadata. Empty: the side follows keys and reads no blocks.
    pub(crate) agent: Vec<u8>,
}

impl Introduction {
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(16 + self.agent.len());
        body.extend(self.base.to_le_bytes());
        body.extend(self.bytes.to_le_bytes());
        body.extend(&self.agent);
        frame(FrameKind::Introduction, &body)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Introduction, WireError> {
        let mut body = Reader(body);
        let (base, bytes) = (body.u64()?, body.u64()?);
        if base.checked_add(bytes).is_none() {
            return Err(malformed("its memory exceeds the address space"));
        }
        Ok(Introduction {
            base,
            bytes,
            agent: body.0.to_vec(),
        })
    }
}

/// A requested block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) key: Box<[u8]>,
    pub(crate) len: u32,
}

/// A request for blocks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Get {
    pub(crate) request: u64,
    pub(crate) deadline_ms: u32,
    pub(crate) blocks: Vec<Wanted>,
}

impl Get {
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(16 + self.blocks.len() * 48);
        body.extend(self.request.to_le_bytes());
        body.extend(self.deadline_ms.to_le_bytes());
        body.extend(to_u32(self.blocks.len()).to_le_bytes());
        for block in &self.blocks {
            body.extend(block.len.to_le_bytes());
            body.extend(to_u16(block.key.len()).to_le_bytes());
            body.extend(&block.key);
        }
        frame(FrameKind::Get, &body)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Get, WireError> {
        let mut body = Reader(body);
        let (request, deadline_ms, count) = (body.u64()?, body.u32()?, body.u32()?);
        // A forged count allocates no more memory than was received.
        let mut blocks = Vec::with_capacity(body.0.len() / 6);
        for _ in 0..count {
            let len = body.u32()?;
            let key_len = usize::from(body.u16()?);
            let key = body.take(key_len)?.into();
            blocks.push(Wanted { key, len });
        }
        body.end()?;
        Ok(Get {
            request,
            deadline_ms,
            blocks,
        })
    }
}

/// The answer for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The block follows the frame, or is at `offset` in the sender's memory.
    Here {
        checksum: u64,
        offset: u64,
        len: u32,
    },
    Absent,
    /// The block has another length.
    Length(u32),
}

/// The answers to a [`Get`], one per block. The blocks follow the frame unless they are in shared
/// memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) request: u64,
    pub(crate) answers: Vec<Answer>,
}

impl Blocks {
    const ANSWER_BYTES: usize = 21;

    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(12 + self.answers.len() * Blocks::ANSWER_BYTES);
        body.extend(self.request.to_le_bytes());
        body.extend(to_u32(self.answers.len()).to_le_bytes());
        for answer in &self.answers {
            let (status, checksum, offset, len) = match *answer {
                Answer::Here {
                    checksum,
                    offset,
                    len,
                } => (0, checksum, offset, len),
                Answer::Absent => (1, 0, 0, 0),
                Answer::Length(len) => (2, 0, 0, len),
            };
            body.push(status);
            body.extend(checksum.to_le_bytes());
            body.extend(offset.to_le_bytes());
            body.extend(len.to_le_bytes());
        }
        frame(FrameKind::Blocks, &body)
    }

    pub(crate) fn read(body: &[u8]) -> Result<Blocks, WireError> {
        let mut body = Reader(body);
        let (request, count) = (body.u64()?, body.u32()? as usize);
        if body.0.len() != count.saturating_mul(Blocks::ANSWER_BYTES) {
            return Err(malformed("its count of answers is wrong"));
        }
        let mut answers = Vec::with_capacity(count);
        for _ in 0..count {
            let status = body.u8()?;
            let (checksum, offset, len) = (body.u64()?, body.u64()?, body.u32()?);
            answers.push(match status {
                0 => Answer::Here {
                    checksum,
                    offset,
                    len,
                },
                1 => Answer::Absent,
                2 => Answer::Length(len),
                _ => return Err(malformed("the kind of an answer is unknown")),
            });
        }
        Ok(Blocks { request, answers })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn get() -> impl Strategy<Value = Get> {
        let block = (prop::collection::vec(any::<u8>(), 0..50), any::<u32>());
        let blocks = prop::collection::vec(block, 0..20);
        (any::<u64>(), any::<u32>(), blocks).prop_map(|(request, deadline_ms, blocks)| Get {
            request,
            deadline_ms,
            blocks: blocks
                .into_iter()
                .map(|(key, len)| Wanted {
                    key: key.into(),
                    len,
                })
                .collect(),
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn frames_survive_a_round_trip_and_partial_frames_yield_nothing(get in get()) {
            let bytes = get.frame();
            let (kind, body, len) = read_frame(&bytes).unwrap().unwrap();
            prop_assert_eq!((kind, len), (FrameKind::Get, bytes.len()));
            prop_assert_eq!(Get::read(body).unwrap(), get);
            for cut in 0..bytes.len() {
                prop_assert_eq!(read_frame(&bytes[..cut]), Ok(None));
            }
        }

        #[test]
        fn a_flipped_bit_is_detected(get in get(), at in any::<prop::sample::Index>()) {
            let mut bytes = get.frame();
            let at = at.index(bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            // A larger length only waits for more bytes, until the deadline.
            prop_assert!(!matches!(read_frame(&bytes), Ok(Some(_))));
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = read_frame(&bytes);
            let _ = Get::read(&bytes);
            let _ = Blocks::read(&bytes);
            let _ = Introduction::read(&bytes);
        }
    }
}
