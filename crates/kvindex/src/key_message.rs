//! What a set of keys says to those who follow it: packed messages, and the order they come in.
//!
//! Byte by byte, with golden examples: `docs/kv-keys.md`.

use slipstream_base::BlockHash;
use xxhash_rust::xxh3::Xxh3;

/// Version of the packed messages.
pub const WIRE_VERSION: u8 = 1;
/// Bytes before the first key of a message.
pub const HEADER_BYTES: usize = 32;

/// Flag: forget everything that was said before.
const BEGIN: u8 = 1;
/// Flag: from here on the receiver knows all keys.
const END: u8 = 2;
/// Flag, beside [`BEGIN`]: who knows what was said before need not forget it.
const REPEAT: u8 = 4;

/// A key, or a message about keys, that cannot be used.
///
/// Each variant says in [`KeyError::loses_trust`] whether a follower still knows what it knew.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Keys of one set share a length. The key is not taken; the set is as it was.
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
    /// No key has no bytes, or more than 65,535.
    #[error("key length {got} outside 1..=65535")]
    Size {
        /// Bytes of the key.
        got: usize,
    },
    /// The message is cut short, or longer than its header says.
    #[error("a key message has {got} bytes where its header asks for {want}; ask for a snapshot")]
    Truncated {
        /// Bytes that the header asks for.
        want: u64,
        /// Bytes there are.
        got: usize,
    },
    /// The message was damaged on its way.
    #[error(
        "a key message has checksum {got:08x}, its header says {want:08x}; it was damaged on its \
         way: ask for a snapshot"
    )]
    Checksum {
        /// What the header says.
        want: u32,
        /// What its bytes give.
        got: u32,
    },
    /// The sender speaks another version, or sets flags that this one does not know.
    #[error(
        "a key message is of version {version} with flags {flags:#x}, this side reads version \
         {WIRE_VERSION}; run one release of slipstream on all engines"
    )]
    Version {
        /// The sender's version.
        version: u8,
        /// The sender's flags.
        flags: u8,
    },
    /// Messages are missing. Nothing is believed until the next snapshot.
    #[error("out-of-order key message: got {got}, expected {want}; request a snapshot")]
    Gap {
        /// Sequence number that was due; 0 where no snapshot has begun.
        want: u64,
        /// Sequence number that came.
        got: u64,
    },
    /// A message that came before, or one that a later life of its sender has made void. It is
    /// ignored, and what is known stays known.
    #[error(
        "key message {got} of stream {stream} is stale: {seen} of stream {seen_stream} came \
         before; it is ignored"
    )]
    Stale {
        /// Sender's life that the message is of.
        stream: u64,
        /// Its number.
        got: u64,
        /// Sender's life that is followed.
        seen_stream: u64,
        /// Last number that came.
        seen: u64,
    },
}

impl KeyError {
    /// Whether a follower that met this error knows nothing from now on, and needs a snapshot.
    pub fn loses_trust(&self) -> bool {
        !matches!(self, KeyError::Stale { .. })
    }
}

/// 64 bits that stand for a key in tables.
///
/// Takes the key's first and last eight bytes, as block hashes are uniform already, and the group
/// id is at the end. Keys come from the engine's own hash function: to make two alike, a client
/// has to break SHA-256. With vLLM's xxhash that can be done, and breaks its prefix cache as well.
/// Nothing is served by digest alone: blocks are fetched by their whole key.
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

/// A message that has been looked at: its lengths and checksum are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyMessage<'a> {
    /// Forget everything before; a snapshot begins.
    pub begins: bool,
    /// With `begins`: nothing was flushed, the snapshot is for who does not know. To others it is a
    /// delta like any.
    pub repeats: bool,
    /// The snapshot is complete with this message. Also set in messages after that.
    pub ends: bool,
    /// Life of the sender; a later life has a larger number.
    pub stream: u64,
    /// Counts the messages of a stream, from 1.
    pub sequence: u64,
    /// Bytes of each key; 0 where the sender has never had one.
    pub key_bytes: usize,
    added: &'a [u8],
    removed: &'a [u8],
}

impl<'a> KeyMessage<'a> {
    /// Reads one message, which is all of `bytes`.
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
        let u32_at = |at: usize| {
            u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes")) as u64
        };
        let u64_at =
            |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let key_bytes = u64::from(u16::from_le_bytes([header[2], header[3]]));
        let (added, removed) = (u32_at(4), u32_at(8));
        let want = (added + removed) * key_bytes; // below 2^49
        // Keys of no bytes would be taken as many times as a hostile header says.
        if keys.len() as u64 != want || (key_bytes == 0 && added + removed > 0) {
            return Err(KeyError::Truncated {
                want: HEADER_BYTES as u64 + want,
                got: bytes.len(),
            });
        }
        let (want, got) = (u32_at(12) as u32, checksum(header, keys));
        if want != got {
            return Err(KeyError::Checksum { want, got });
        }
        let (added, removed) = keys.split_at((added * key_bytes) as usize);
        Ok(KeyMessage {
            begins: flags & BEGIN != 0,
            repeats: flags & REPEAT != 0,
            ends: flags & END != 0,
            stream: u64_at(16),
            sequence: u64_at(24),
            key_bytes: key_bytes as usize,
            added,
            removed,
        })
    }

    /// Keys that are held from now on.
    pub fn added(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.added.chunks_exact(self.key_bytes.max(1))
    }

    /// Keys that no longer are.
    pub fn removed(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.removed.chunks_exact(self.key_bytes.max(1))
    }
}

/// Of everything but the four bytes where it is written: the low half of XXH3's 64 bits.
fn checksum(header: &[u8; HEADER_BYTES], keys: &[u8]) -> u32 {
    let mut hash = Xxh3::new();
    hash.update(&header[..12]);
    hash.update(&header[16..]);
    hash.update(keys);
    hash.digest() as u32
}

/// A message that is being written, at the end of a buffer.
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

    /// Writes the header. `message` has no keys: those are in the buffer, the added ones first.
    pub(crate) fn finish(self, message: &KeyMessage<'_>, added: u32, removed: u32) {
        let (header, keys) = self.out[self.start..]
            .split_first_chunk_mut::<HEADER_BYTES>()
            .expect("written by new()");
        header[0] = WIRE_VERSION;
        header[1] = (u8::from(message.begins) * BEGIN)
            | (u8::from(message.ends) * END)
            | (u8::from(message.repeats) * REPEAT);
        header[2..4].copy_from_slice(&(message.key_bytes as u16).to_le_bytes());
        header[4..8].copy_from_slice(&added.to_le_bytes());
        header[8..12].copy_from_slice(&removed.to_le_bytes());
        header[16..24].copy_from_slice(&message.stream.to_le_bytes());
        header[24..32].copy_from_slice(&message.sequence.to_le_bytes());
        let sum = checksum(header, keys);
        header[12..16].copy_from_slice(&sum.to_le_bytes());
    }
}

impl KeyMessage<'_> {
    /// One without keys, to say the rest with.
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

/// How much a follower knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Knowledge {
    /// Nothing: no snapshot has begun, or messages are missing.
    #[default]
    None,
    /// Some keys: a snapshot is under way.
    Part,
    /// All keys.
    All,
}

/// The order of one sender's messages, without their keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Stream and number of the last message that was taken.
    last: Option<(u64, u64)>,
    knowledge: Knowledge,
    key_bytes: usize,
}

impl Order {
    pub(crate) fn knowledge(&self) -> Knowledge {
        self.knowledge
    }

    /// Whether the message comes next; if so, whether what was known before is void. An error that
    /// loses trust leaves [`Knowledge::None`].
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

    /// A message could not be read. Its number is not known, so the next one shows a gap.
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
        // None where only a snapshot may come: numbers begin with 1, but who knows what came.
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

    /// Feeds `(stream, sequence, begins)`; expects what each leaves known.
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

    /// Found by the fuzzer: number 0 is nobody's next one.
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
        // After a gap, what would have been next is not believed either.
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
        // 36 and 20 bytes of one value are alike in both ends; sets hold keys of one length.
        assert_eq!(digests.len(), count - 1);
    }
}
