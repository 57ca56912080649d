//! The set of cached keys, what changed in it, and the packed form in which that travels.
//!
//! A key is a block hash with its cache group, as vLLM writes it (32 bytes of SHA-256 and 4 of
//! group id); any length does, as long as all keys of a set share it. The set is fed by batches of
//! "block B now holds key K" and "no longer". One key may be held by several blocks, and is gone
//! only when the last of them let go.
//!
//! A message is `version u8, kind u8, key_len u16, seq u64, added u32, removed u32`, little
//! endian, then the added keys, then the removed ones, with nothing between them.

use std::hash::{BuildHasherDefault, Hasher};

use indexmap::{IndexMap, IndexSet, map::Entry};

/// Version of the packed messages.
pub const WIRE_VERSION: u8 = 1;
/// Bytes before the first key of a message.
pub const HEADER_BYTES: usize = 20;

/// A key, or a message about keys, that cannot be used. The set is as it was before the call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Keys of one set share a length; retrying does not help.
    #[error(
        "a key has {got} bytes, but the keys of this set have {want}; give all engines that share \
         blocks the same --prefix-caching-hash-algo"
    )]
    Length {
        /// Bytes of the set's keys.
        want: usize,
        /// Bytes of this one.
        got: usize,
    },
    /// The message is cut short, or longer than its header says.
    #[error("a key message has {got} bytes where its header asks for {want}; ask for a snapshot")]
    Truncated {
        /// Bytes that the header asks for.
        want: usize,
        /// Bytes there are.
        got: usize,
    },
    /// The sender speaks another version.
    #[error(
        "a key message is of version {got}, this side reads {WIRE_VERSION}; run one release of slipstream on all engines"
    )]
    Version {
        /// The sender's.
        got: u8,
    },
    /// A message is missing, came twice, or came out of order; a snapshot mends it.
    #[error("key message {got} came where {want} was due; ask for a snapshot")]
    Gap {
        /// Sequence number that was due.
        want: u64,
        /// Sequence number that came.
        got: u64,
    },
}

/// Takes the first eight bytes, for block hashes are uniform already, and mixes in the rest's end.
///
/// Keys come from the engine's own hash function, not from a client, who would have to break
/// SHA-256 to choose them; with vLLM's xxhash a client can build collisions, which also break the
/// prefix cache itself.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        let end = |b: &[u8]| {
            let mut word = [0; 8];
            word[..b.len()].copy_from_slice(b);
            u64::from_le_bytes(word)
        };
        let head = end(&bytes[..bytes.len().min(8)]);
        let tail = end(&bytes[bytes.len().saturating_sub(8)..]);
        // The odd constant is 2^64 divided by the golden ratio (Knuth, TAOCP 3, section 6.4).
        self.0 = (self.0 ^ head ^ tail.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }

    // A slice's length comes before its bytes and says nothing here.
    fn write_usize(&mut self, _len: usize) {}
}

type Build = BuildHasherDefault<KeyHasher>;

/// Blocks that hold one key: nearly always one.
#[derive(Debug)]
enum Holders {
    One(u32),
    Many(Vec<u32>),
}

/// What to do with one key. The block is vLLM's block id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The block holds the key from now on.
    Add(u32),
    /// The block no longer holds the key.
    Remove(u32),
}

/// Whether messages are wanted, and how far a snapshot under way has come.
#[derive(Debug)]
enum Consumer {
    None,
    /// Keys below this place of the map have not been sent yet.
    Snapshot {
        unsent: usize,
        begin: bool,
    },
    Following,
}

/// Keys that are cached now. Applying a batch costs O(batch), never O(keys held).
#[derive(Debug)]
pub struct KeySet {
    held: IndexMap<Box<[u8]>, Holders, Build>,
    key_bytes: Option<usize>,
    /// Keys touched since the last message, with whether they were held at that time.
    touched: IndexMap<Box<[u8]>, bool, Build>,
    consumer: Consumer,
    seq: u64,
}

impl Default for KeySet {
    fn default() -> Self {
        KeySet {
            held: IndexMap::default(),
            key_bytes: None,
            touched: IndexMap::default(),
            consumer: Consumer::None,
            seq: 0,
        }
    }
}

impl KeySet {
    /// Keys held, however many blocks hold each.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no key is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether some block holds the key.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.held.contains_key(key)
    }

    /// The keys held, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.held.keys().map(AsRef::as_ref)
    }

    /// Takes one change. Adding what is held and removing what is not are no changes.
    ///
    /// # Errors
    ///
    /// [`KeyError::Length`] if the key is not as long as the others.
    pub fn change(&mut self, key: &[u8], change: Change) -> Result<(), KeyError> {
        let want = *self.key_bytes.get_or_insert(key.len());
        if want != key.len() {
            return Err(KeyError::Length {
                want,
                got: key.len(),
            });
        }
        let was_held = match change {
            Change::Add(block) => {
                if let Some(holders) = self.held.get_mut(key) {
                    match holders {
                        Holders::One(one) if *one != block => {
                            *holders = Holders::Many(vec![*one, block]);
                        }
                        Holders::Many(many) if !many.contains(&block) => many.push(block),
                        _ => {}
                    }
                    return Ok(());
                }
                self.held.insert(key.into(), Holders::One(block));
                false
            }
            Change::Remove(block) => {
                let Some(holders) = self.held.get_mut(key) else {
                    return Ok(());
                };
                match holders {
                    Holders::One(one) if *one == block => {}
                    Holders::One(_) => return Ok(()),
                    Holders::Many(many) => {
                        many.retain(|b| *b != block);
                        if !many.is_empty() {
                            return Ok(());
                        }
                    }
                }
                // The last key moves into the gap. Where that one had been sent already and the
                // gap had not, it is sent twice, which the receiver takes as no change.
                self.held.swap_remove(key);
                true
            }
        };
        if !matches!(self.consumer, Consumer::None)
            && let Entry::Vacant(first) = self.touched.entry(key.into())
        {
            first.insert(was_held);
        }
        Ok(())
    }

    /// Forgets all keys: the pool was flushed. A consumer is told by a new snapshot, an empty one.
    pub fn clear(&mut self) {
        self.held.clear();
        self.touched.clear();
        self.request_snapshot();
    }

    /// Starts or ends the making of messages; the first ones are a snapshot.
    pub fn set_consumed(&mut self, consumed: bool) {
        match (consumed, &self.consumer) {
            (true, Consumer::None) => self.begin_snapshot(),
            (false, _) => {
                self.consumer = Consumer::None;
                self.touched = IndexMap::default();
            }
            _ => {}
        }
    }

    /// Starts over with a snapshot: a receiver saw a gap. Nothing happens without a consumer.
    pub fn request_snapshot(&mut self) {
        if !matches!(self.consumer, Consumer::None) {
            self.begin_snapshot();
        }
    }

    fn begin_snapshot(&mut self) {
        self.touched.clear();
        self.consumer = Consumer::Snapshot {
            unsent: self.held.len(),
            begin: true,
        };
    }

    /// The next message: what changed since the last one, and while a snapshot is under way up to
    /// `snapshot_keys_max` keys of it. `None` if there is nothing to say or nobody to say it to.
    pub fn take_message(&mut self, snapshot_keys_max: usize) -> Option<Vec<u8>> {
        let (mut from, mut to, mut kind) = (0, 0, Kind::Delta);
        let in_snapshot = matches!(self.consumer, Consumer::Snapshot { .. });
        match &mut self.consumer {
            Consumer::None => return None,
            Consumer::Following => {}
            Consumer::Snapshot { unsent, begin } => {
                // New keys are put at the end, beyond `unsent`; they travel as changes. Going
                // down keeps that so when keys are removed, too.
                to = (*unsent).min(self.held.len());
                from = to - to.min(snapshot_keys_max.max(1));
                if *begin {
                    kind = Kind::SnapshotBegin;
                }
                (*unsent, *begin) = (from, false);
                if from == 0 {
                    self.consumer = Consumer::Following;
                }
            }
        }
        let mut added: Vec<&[u8]> = (from..to)
            .map(|i| {
                self.held
                    .get_index(i)
                    .expect("to is at most len")
                    .0
                    .as_ref()
            })
            .collect();
        let mut removed: Vec<&[u8]> = Vec::new();
        for (key, was_held) in &self.touched {
            match (was_held, self.held.contains_key(key)) {
                (false, true) => added.push(key),
                (true, false) => removed.push(key),
                // Removed and added again, which moved it beyond what the snapshot will send.
                (true, true) if in_snapshot => added.push(key),
                // Added and removed again, or the other way round.
                _ => {}
            }
        }
        if kind == Kind::Delta && added.is_empty() && removed.is_empty() {
            self.touched.clear();
            return None;
        }
        self.seq += 1;
        let key_bytes = self.key_bytes.unwrap_or(0);
        let mut out = Vec::with_capacity(HEADER_BYTES + (added.len() + removed.len()) * key_bytes);
        out.extend([WIRE_VERSION, kind as u8]);
        out.extend((key_bytes as u16).to_le_bytes());
        out.extend(self.seq.to_le_bytes());
        out.extend((added.len() as u32).to_le_bytes());
        out.extend((removed.len() as u32).to_le_bytes());
        added
            .iter()
            .chain(&removed)
            .for_each(|key| out.extend_from_slice(key));
        self.touched.clear();
        Some(out)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Delta = 0,
    /// Forget everything, then take what follows.
    SnapshotBegin = 1,
}

/// Another engine's keys, followed through its messages.
#[derive(Debug, Default)]
pub struct KeyMirror {
    held: IndexSet<Box<[u8]>, Build>,
    key_bytes: usize,
    /// `None` until a snapshot began, and again after a gap: then nothing is held.
    seq: Option<u64>,
}

impl KeyMirror {
    /// Keys believed to be held; none while [`KeyMirror::is_trusted`] is false.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no key is believed to be held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whether every message since a snapshot's begin has come, once and in order.
    pub fn is_trusted(&self) -> bool {
        self.seq.is_some()
    }

    /// Whether the other engine holds the key, as far as is known.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.held.contains(key)
    }

    /// The keys believed to be held, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.held.iter().map(AsRef::as_ref)
    }

    /// Takes one message.
    ///
    /// # Errors
    ///
    /// Whatever the error, nothing is believed afterwards until the next snapshot begins.
    pub fn apply(&mut self, message: &[u8]) -> Result<(), KeyError> {
        let result = self.try_apply(message);
        if result.is_err() {
            self.held.clear();
            self.seq = None;
        }
        result
    }

    fn try_apply(&mut self, message: &[u8]) -> Result<(), KeyError> {
        let got = message.len();
        let Some((header, body)) = message.split_at_checked(HEADER_BYTES) else {
            return Err(KeyError::Truncated {
                want: HEADER_BYTES,
                got,
            });
        };
        if header[0] != WIRE_VERSION {
            return Err(KeyError::Version { got: header[0] });
        }
        let u32_at = |i: usize| {
            u32::from_le_bytes(header[i..i + 4].try_into().expect("four bytes")) as usize
        };
        let begins = header[1] == Kind::SnapshotBegin as u8;
        let key_bytes = u16::from_le_bytes(header[2..4].try_into().expect("two bytes")) as usize;
        let seq = u64::from_le_bytes(header[4..12].try_into().expect("eight bytes"));
        let (added, removed) = (u32_at(12), u32_at(16));
        let want = (added + removed).saturating_mul(key_bytes);
        // Keys of no bytes would be taken as many times as a hostile header says.
        if body.len() != want || (key_bytes == 0 && added + removed > 0) {
            return Err(KeyError::Truncated {
                want: HEADER_BYTES + want,
                got,
            });
        }
        if begins {
            self.held.clear();
            self.key_bytes = key_bytes;
        } else {
            let due = self.seq.map_or(0, |s| s + 1);
            if seq != due {
                return Err(KeyError::Gap {
                    want: due,
                    got: seq,
                });
            }
            if self.key_bytes == 0 {
                self.key_bytes = key_bytes;
            } else if self.key_bytes != key_bytes {
                return Err(KeyError::Length {
                    want: self.key_bytes,
                    got: key_bytes,
                });
            }
        }
        self.seq = Some(seq);
        if key_bytes == 0 {
            return Ok(());
        }
        for (i, key) in body.chunks_exact(key_bytes).enumerate() {
            if i < added {
                self.held.insert(key.into());
            } else {
                self.held.swap_remove(key);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn key(n: u8) -> [u8; 36] {
        let mut key = [7; 36];
        key[..2].copy_from_slice(&[n, n ^ 0x5a]);
        key
    }

    fn following() -> (KeySet, KeyMirror) {
        let (mut set, mut mirror) = (KeySet::default(), KeyMirror::default());
        set.set_consumed(true);
        mirror
            .apply(&set.take_message(8).expect("an empty snapshot"))
            .unwrap();
        (set, mirror)
    }

    #[test]
    fn nothing_is_built_while_nobody_consumes() {
        let mut set = KeySet::default();
        set.change(&key(1), Change::Add(1)).unwrap();
        assert_eq!((set.take_message(8), set.touched.len()), (None, 0));
    }

    #[test]
    fn add_then_remove_is_no_message() {
        let (mut set, _) = following();
        set.change(&key(1), Change::Add(1)).unwrap();
        set.change(&key(1), Change::Remove(1)).unwrap();
        assert_eq!(set.take_message(8), None);
    }

    #[test]
    fn key_is_gone_with_its_last_block() {
        let (mut set, mut mirror) = following();
        for change in [
            Change::Add(1),
            Change::Add(2),
            Change::Add(2),
            Change::Remove(1),
        ] {
            set.change(&key(1), change).unwrap();
        }
        mirror.apply(&set.take_message(8).unwrap()).unwrap();
        assert!(set.contains(&key(1)) && mirror.contains(&key(1)));
        set.change(&key(1), Change::Remove(9)).unwrap();
        assert!(set.contains(&key(1)), "block 9 never held it");
        set.change(&key(1), Change::Remove(2)).unwrap();
        mirror.apply(&set.take_message(8).unwrap()).unwrap();
        assert!(set.is_empty() && mirror.is_empty());
    }

    #[test]
    fn other_lengths_gaps_versions_and_cuts_are_refused() {
        let (mut set, mut mirror) = following();
        set.change(&key(1), Change::Add(1)).unwrap();
        assert_eq!(
            set.change(&[1; 20], Change::Add(1)),
            Err(KeyError::Length { want: 36, got: 20 })
        );
        let message = set.take_message(8).unwrap();
        for cut in 0..message.len() {
            assert!(matches!(
                KeyMirror::default().apply(&message[..cut]),
                Err(KeyError::Truncated { .. })
            ));
        }
        let mut other = message.clone();
        other[0] = 9;
        assert_eq!(
            KeyMirror::default().apply(&other),
            Err(KeyError::Version { got: 9 })
        );
        mirror.apply(&message).unwrap();
        assert_eq!(
            mirror.apply(&message),
            Err(KeyError::Gap { want: 3, got: 2 })
        );
        assert!(
            !mirror.is_trusted() && mirror.is_empty(),
            "nothing is believed after a gap"
        );
        set.request_snapshot();
        mirror.apply(&set.take_message(8).unwrap()).unwrap();
        assert!(mirror.is_trusted() && mirror.contains(&key(1)));
    }

    #[test]
    fn snapshot_gives_at_most_so_many_keys_a_step() {
        let mut set = KeySet::default();
        for n in 0..100 {
            set.change(&key(n), Change::Add(n.into())).unwrap();
        }
        set.set_consumed(true);
        let messages: Vec<_> = std::iter::from_fn(|| set.take_message(8)).collect();
        assert_eq!(messages.len(), 13);
        assert!(messages.iter().all(|m| m.len() <= HEADER_BYTES + 8 * 36));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        // Whatever comes between the chunks of a snapshot, set and mirror end equal to a model.
        #[test]
        fn set_and_mirror_follow_a_model(
            ops in prop::collection::vec((0u8..24, 0u8..20, 0u32..4), 0..300)
        ) {
            let (mut set, mut mirror) = following();
            let mut model: BTreeMap<[u8; 36], BTreeSet<u32>> = BTreeMap::new();
            for (op, k, block) in ops {
                match op {
                    0 => { set.clear(); model.clear(); }
                    1 => set.request_snapshot(),
                    2..6 => if let Some(m) = set.take_message(3) { mirror.apply(&m).unwrap(); },
                    6..16 => {
                        set.change(&key(k), Change::Add(block)).unwrap();
                        model.entry(key(k)).or_default().insert(block);
                    }
                    _ => {
                        set.change(&key(k), Change::Remove(block)).unwrap();
                        if let Some(blocks) = model.get_mut(&key(k)) {
                            blocks.remove(&block);
                            if blocks.is_empty() { model.remove(&key(k)); }
                        }
                    }
                }
            }
            while let Some(m) = set.take_message(3) { mirror.apply(&m).unwrap(); }
            let want: BTreeSet<&[u8]> = model.keys().map(<[u8; 36]>::as_slice).collect();
            prop_assert_eq!(&set.iter().collect::<BTreeSet<_>>(), &want);
            prop_assert_eq!(&mirror.iter().collect::<BTreeSet<_>>(), &want);
        }

        #[test]
        fn no_bytes_make_a_mirror_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut mirror = KeyMirror::default();
            if mirror.apply(&bytes).is_err() { prop_assert!(mirror.is_empty()); }
        }
    }
}
