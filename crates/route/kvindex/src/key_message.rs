//! The messages of a key set to its followers: packed format and order.
//!
//! Byte by byte, with golden examples: `docs/kv-keys.md`.

use slipstream_base::BlockHash;
use slipstream_base::width::{low_u32, to_u16, to_usize};
use xxhash_rust::xxh3::Xxh3;

/// Version of the packed messages.
pub const WIRE_VERSION: u8 = 1;
/// Bytes before the first key of a message.
pub const HEADER_BYTES: usize = 32;

/// Flag: void all earlier messages.
const BEGIN: u8 = 1;
/// Flag: with this message the receiver has all keys.
const END: u8 = 2;
/// Flag, in addition to [`BEGIN`]: a receiver that has applied all earlier messages keeps its keys.
const REPEAT: u8 = 4;

/// A key, or a message about keys, that cannot be used.
///
/// [`KeyError::loses_trust`] returns whether a follower must discard its keys after an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Keys of one set share a length. The key is rejected; the set is unchanged.
    #[error(
        "a key has {got} bytes, but the keys of this set have {want}; start all engines that \
         share blocks with the same --prefix-caching-hash-algo"
    )]
    Length {
        /// Bytes of the set's keys.
        want: usize,
        /// Bytes of this one.
        got: usize,
    },
    /// Keys are 1 to 65,535 bytes long.
    #[error("key length {got} outside 1..=65535")]
    Size {
        /// Bytes of the key.
        got: usize,
    },
    /// The message is cut short, or longer than its header declares.
    #[error("key message has {got} bytes, its header declares {want}; request a snapshot")]
    Truncated {
        /// Bytes that the header declares.
        want: u64,
        /// Bytes received.
        got: usize,
    },
    /// The message was damaged in transit.
    #[error(
        "key message has checksum {got:08x}, its header declares {want:08x}: damaged in transit; \
         request a snapshot"
    )]
    Checksum {
        /// The checksum in the header.
        want: u32,
        /// The checksum of the received bytes.
        got: u32,
    },
    /// The sender uses another version, or sets flags that this version does not define.
    #[error(
        "key message of version {version} with flags {flags:#x} is not supported, expected version \
         {WIRE_VERSION}; run the same release of slipstream on all engines"
    )]
    Version {
        /// The sender's version.
        version: u8,
        /// The sender's flags.
        flags: u8,
    },
    /// Messages are missing. Nothing is trusted until the next snapshot.
    #[error("out-of-order key message: got {got}, expected {want}; request a snapshot")]
    Gap {
        /// Expected sequence number; 0 if no snapshot has begun.
        want: u64,
        /// Received sequence number.
        got: u64,
    },
    /// A message that was applied before, or one from before a restart of its sender. It is ignored; the
    /// keys stay valid.
    #[error(
        "ignoring stale key message {got} of stream {stream}: already at message {seen} of stream \
         {seen_stream}"
    )]
    Stale {
        /// Stream of the message.
        stream: u64,
        /// Its sequence number.
        got: u64,
        /// Stream that is followed.
        seen_stream: u64,
        /// Last sequence number received.
        seen: u64,
    },
}

impl KeyError {
    /// Whether a follower must discard its keys after this error, and needs a snapshot.
    pub fn loses_trust(&self) -> bool {
        !matches!(self, KeyError::Stale { .. })
    }
}

/// A 64-bit digest of a key, for tables.
///
/// Uses the key's first and last eight bytes: block hashes are uniform already, and the group
/// id is at the end. Keys come from the engine's own hash function. For two keys with one digest, a
/// client has to break SHA-256. With vLLM's xxhash that can be done, and breaks its prefix cache as
/// well. No block is served by digest alone: blocks are fetched by their whole key.
#[inline]
pub fn digest(key: &[u8]) -> BlockHash {
    // The odd constant is 2^64 divided by the golden ratio (Knuth, TAOCP 3, section 6.4).
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = if let (Some(head), Some(tail)) = (key.first_chunk::<8>(), key.last_chunk::<8>()) {
        // The head is multiplied first: keys of eight bytes are head and tail at once.
        let head = u64::from_le_bytes(*head).wrapping_mul(GOLDEN);
        head.rotate_left(32) ^ u64::from_le_bytes(*tail)
    } else {
        let mut word = [0; 8];
        word[..key.len()].copy_from_slice(key);
        u64::from_le_bytes(word)
    };
    let mixed = mixed.wrapping_mul(GOLDEN);
    BlockHash(mixed ^ mixed >> 32)
}

/// A message whose lengths and checksum are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMessage<'a> {
    /// All earlier keys are void; a snapshot begins.
    pub begins: bool,
    /// With `begins`: nothing was flushed, and the snapshot is for receivers that lack keys. For the
    /// others it is a delta.
    pub repeats: bool,
    /// The snapshot is complete with this message. Also set in later messages.
    pub ends: bool,
    /// Number of the sender's life; larger after a restart.
    pub stream: u64,
    /// Number of the message in its stream, from 1.
    pub sequence: u64,
    /// Length of each key, bytes; 0 if the sender has never had a key.
    pub key_bytes: usize,
    added: &'a [u8],
    removed: &'a [u8],
}

impl<'a> KeyMessage<'a> {
    /// Reads one message, which takes up all of `bytes`.
    ///
    /// # Errors
    ///
    /// [`KeyError::Version`], [`KeyError::Truncated`] or [`KeyError::Checksum`].
    pub fn read(bytes: &'a [u8]) -> Result<KeyMessage<'a>, KeyError> {
        let Some((header, keys)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(KeyError::Truncated {
                want: HEADER_BYTES as u64,
                got: bytes.len(),
            });
        };
        let [version, flags] = [header[0], header[1]];
        if version != WIRE_VERSION || flags & !(BEGIN | END | REPEAT) != 0 {
            return Err(KeyError::Version { version, flags });
        }
        let u32_at =
            |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let u64_at =
            |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let key_bytes = u64::from(u16::from_le_bytes([header[2], header[3]]));
        let (added, removed) = (u64::from(u32_at(4)), u64::from(u32_at(8)));
        let want = (added + removed) * key_bytes; // below 2^49
        // Without this check, keys of no bytes would be read as often as a hostile header asks.
        if keys.len() as u64 != want || (key_bytes == 0 && added + removed > 0) {
            return Err(KeyError::Truncated {
                want: HEADER_BYTES as u64 + want,
                got: bytes.len(),
            });
        }
        let (want, got) = (u32_at(12), checksum(header, keys));
        if want != got {
            return Err(KeyError::Checksum { want, got });
        }
        let (added, removed) = keys.split_at(to_usize(added * key_bytes));
        Ok(KeyMessage {
            begins: flags & BEGIN != 0,
            repeats: flags & REPEAT != 0,
            ends: flags & END != 0,
            stream: u64_at(16),
            sequence: u64_at(24),
            key_bytes: to_usize(key_bytes),
            added,
            removed,
        })
    }

    /// Keys that the sender newly holds.
    pub fn added(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.added.chunks_exact(self.key_bytes.max(1))
    }

    /// Keys that the sender no longer holds.
    pub fn removed(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.removed.chunks_exact(self.key_bytes.max(1))
    }
}

/// The low half of the 64-bit XXH3 of the whole message except the checksum field.
fn checksum(header: &[u8; HEADER_BYTES], keys: &[u8]) -> u32 {
    let mut hash = Xxh3::new();
    hash.update(&header[..12]);
    hash.update(&header[16..]);
    hash.update(keys);
    low_u32(hash.digest())
}

/// A message under construction, at the end of a buffer.
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Writer<'a> {
        let start = out.len();
        out.extend([0; HEADER_BYTES]);
        Writer { out, start }
    }

    pub(crate) fn key(&mut self, key: &[u8]) {
        self.out.extend_from_slice(key);
    }

    pub(crate) fn cancel(self) {
        self.out.truncate(self.start);
    }

    /// Writes the header. `message` has no keys: they are in the buffer, the added ones first.
    pub(crate) fn finish(self, message: &KeyMessage<'_>, added: u32, removed: u32) {
        let (header, keys) = self.out[self.start..]
            .split_first_chunk_mut::<HEADER_BYTES>()
            .expect("written by new()");
        header[0] = WIRE_VERSION;
        header[1] = (u8::from(message.begins) * BEGIN)
            | (u8::from(message.ends) * END)
            | (u8::from(message.repeats) * REPEAT);
        header[2..4].copy_from_slice(&to_u16(message.key_bytes).to_le_bytes());
        header[4..8].copy_from_slice(&added.to_le_bytes());
        header[8..12].copy_from_slice(&removed.to_le_bytes());
        header[16..24].copy_from_slice(&message.stream.to_le_bytes());
        header[24..32].copy_from_slice(&message.sequence.to_le_bytes());
        let sum = checksum(header, keys);
        header[12..16].copy_from_slice(&sum.to_le_bytes());
    }
}

impl KeyMessage<'_> {
    /// A message without keys, as a template.
    pub(crate) fn without_keys(
        stream: u64,
        sequence: u64,
        key_bytes: usize,
    ) -> KeyMessage<'static> {
        KeyMessage {
            begins: false,
            repeats: false,
            ends: false,
            stream,
            sequence,
            key_bytes,
            added: &[],
            removed: &[],
        }
    }
}

/// How many of the sender's keys a follower has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Knowledge {
    /// None: no snapshot has begun, or messages are missing.
    #[default]
    None,
    /// Some keys: a snapshot is in progress.
    Part,
    /// All keys.
    All,
}

/// Sequence state of one sender's messages, without their keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Stream and number of the last accepted message.
    last: Option<(u64, u64)>,
    knowledge: Knowledge,
    key_bytes: usize,
}

impl Order {
    pub(crate) fn knowledge(&self) -> Knowledge {
        self.knowledge
    }

    /// Checks that the message is the next one; if so, returns whether all earlier keys are void. An
    /// error that loses trust leaves [`Knowledge::None`].
    pub(crate) fn take(&mut self, message: &KeyMessage<'_>) -> Result<bool, KeyError> {
        let checked = self.check(message);
        match &checked {
            &Ok(begins) => {
                self.last = Some((message.stream, message.sequence));
                if begins {
                    self.knowledge = Knowledge::Part;
                    self.key_bytes = 0;
                }
                if message.ends {
                    self.knowledge = Knowledge::All;
                }
                if self.key_bytes == 0 {
                    self.key_bytes = message.key_bytes;
                }
            }
            Err(error) if error.loses_trust() => self.distrust(),
            Err(_) => {}
        }
        checked
    }

    /// Records a message that could not be read. Its number is unknown, so the next one shows a gap.
    pub(crate) fn distrust(&mut self) {
        self.knowledge = Knowledge::None;
    }

    fn check(&self, message: &KeyMessage<'_>) -> Result<bool, KeyError> {
        let &KeyMessage {
            stream,
            sequence: got,
            ..
        } = message;
        if let Some((seen_stream, seen)) = self.last
            && (stream < seen_stream || (stream == seen_stream && got <= seen))
        {
            return Err(KeyError::Stale {
                stream,
                got,
                seen_stream,
                seen,
            });
        }
        // None if only a snapshot is acceptable: numbers begin with 1, but the last one is unknown.
        let want = match self.last {
            Some((seen_stream, seen))
                if self.knowledge != Knowledge::None && seen_stream == stream =>
            {
                seen.checked_add(1)
            }
            _ => None,
        };
        let next = want == Some(got);
        if message.begins && !(message.repeats && next) {
            return Ok(true);
        }
        if !next {
            let want = want.unwrap_or(0);
            return Err(KeyError::Gap { want, got });
        }
        if self.key_bytes != 0 && message.key_bytes != 0 && message.key_bytes != self.key_bytes {
            return Err(KeyError::Length {
                want: self.key_bytes,
                got: message.key_bytes,
            });
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(stream: u64, sequence: u64, begins: bool) -> KeyMessage<'static> {
        KeyMessage {
            begins,
            ..KeyMessage::without_keys(stream, sequence, 4)
        }
    }

    /// Feeds `(stream, sequence, begins)`; checks the knowledge after each.
    fn check_order(messages: &[(u64, u64, bool)], known: &[Knowledge]) {
        let mut order = Order::default();
        let seen: Vec<_> = messages
            .iter()
            .map(|&(stream, sequence, begins)| {
                let mut message = message(stream, sequence, begins);
                message.ends = true;
                let _ = order.take(&message);
                order.knowledge()
            })
            .collect();
        assert_eq!(seen, known, "{messages:?}");
    }

    /// Found by the fuzzer: number 0 follows no message.
    #[test]
    fn a_delta_before_any_snapshot_is_a_gap_whatever_its_number() {
        use Knowledge::None;
        check_order(&[(1, 0, false), (1, 0, false), (2, 0, false)], &[None; 3]);
    }

    #[test]
    fn order_is_kept_gaps_and_later_lives_need_a_snapshot_and_stale_messages_change_nothing() {
        use Knowledge::{All, None};
        check_order(&[(1, 1, false)], &[None]);
        check_order(&[(1, 1, true), (1, 2, false)], &[All, All]);
        check_order(&[(1, 5, true), (1, 7, false)], &[All, None]);
        // After a gap, the message that would have been next is not accepted either.
        check_order(
            &[(1, 5, true), (1, 7, false), (1, 8, false), (1, 9, true)],
            &[All, None, None, All],
        );
        check_order(&[(1, 5, true), (1, 5, false), (1, 6, false)], &[All; 3]);
        // A stale snapshot, of this life or an earlier one.
        check_order(&[(2, 5, true), (2, 3, true), (1, 9, true)], &[All; 3]);
        check_order(&[(2, 5, true), (3, 6, false)], &[All, None]);
        check_order(&[(2, 5, true), (3, 1, true), (2, 6, false)], &[All; 3]);
    }

    #[test]
    fn a_repeated_snapshot_begins_only_for_who_missed_something() {
        let repeat = |sequence| KeyMessage {
            repeats: true,
            ..message(1, sequence, true)
        };
        let mut order = Order::default();
        assert_eq!(order.take(&repeat(5)), Ok(true), "it knew nothing");
        assert_eq!(order.take(&repeat(6)), Ok(false));
        assert_eq!(order.take(&repeat(8)), Ok(true), "7 was lost");
        assert!(
            order
                .take(&repeat(8))
                .is_err_and(|error| !error.loses_trust())
        );
        assert_eq!(
            order.take(&message(1, 9, true)),
            Ok(true),
            "a flush is for all"
        );
        order.distrust();
        assert_eq!(order.take(&repeat(10)), Ok(true));
    }

    #[test]
    fn a_snapshot_under_way_is_part_of_the_truth() {
        let mut order = Order::default();
        order.take(&message(1, 1, true)).unwrap();
        assert_eq!(order.knowledge(), Knowledge::Part);
        let mut end = message(1, 2, false);
        end.ends = true;
        order.take(&end).unwrap();
        assert_eq!(order.knowledge(), Knowledge::All);
    }

    #[test]
    fn keys_of_another_length_are_refused_until_a_snapshot() {
        let mut order = Order::default();
        order.take(&message(1, 1, true)).unwrap();
        let mut other = message(1, 2, false);
        other.key_bytes = 36;
        let error = order.take(&other).unwrap_err();
        assert_eq!(error, KeyError::Length { want: 4, got: 36 });
        assert_eq!(order.knowledge(), Knowledge::None);
        (other.begins, other.sequence) = (true, 3);
        order.take(&other).unwrap();
    }

    #[test]
    fn digests_tell_keys_of_any_length_apart() {
        let keys: [&[u8]; 9] = [
            b"a",
            b"ab",
            b"abcdefg",
            b"abcdefgh",
            b"abcdefghi",
            b"abcdefgh\0",
            &[7; 36],
            &[8; 36],
            &[7; 20],
        ];
        let group = |n: u8| {
            let mut key = [7; 36];
            key[35] = n;
            key
        };
        let mut digests: Vec<u64> = keys.iter().map(|key| digest(key).0).collect();
        digests.extend((0..=255).filter(|&n| n != 7).map(|n| digest(&group(n)).0));
        let count = digests.len();
        digests.sort_unstable();
        digests.dedup();
        // 36 and 20 bytes of one value have the same ends; keys of one set have one length.
        assert_eq!(digests.len(), count - 1);
    }
}
