//! A fuzz target: key messages, in any order and damaged in any way, against a
//! simple model of the rules in `docs/kv-keys.md`.
//!
//! An input is a list of messages. The first byte of each selects its form. Below 128, it is the length
//! of a raw message that follows. Otherwise a message is made from the eight bytes after
//! it (see `made`), with correct lengths and checksum, so that the code behind those checks
//! is reached.

use std::collections::BTreeSet;

use slipstream_base::SimTime;

use crate::key_message::{KeyMessage, Knowledge, Writer};
use crate::{KeyMirror, PeerIndex, digest};

/// Feeds the messages of `input` to a mirror, an index of peers and the model.
///
/// # Panics
///
/// If they disagree, or a message is not written as it was read.
pub fn check(input: &[u8]) {
    let (mut mirror, mut model) = (KeyMirror::default(), Model::default());
    let index = PeerIndex::new(1, 4_096, u64::MAX);
    index.connect(SimTime::ZERO, 0);
    let mut rest = input;
    while let Some((&first, after)) = rest.split_first() {
        let message;
        (message, rest) = if first < 128 {
            let (message, rest) = after.split_at(after.len().min(usize::from(first)));
            (message.to_vec(), rest)
        } else {
            made(after)
        };
        let _ = mirror.apply(&message);
        let _ = index.apply(SimTime::ZERO, 0, &message);
        model.apply(&message);
        // A snapshot's end is trusted when the keys that it did not repeat are swept.
        while index.tick(SimTime::ZERO, 64) {}

        let known: BTreeSet<Vec<u8>> = mirror.keys().iter().map(<[u8]>::to_vec).collect();
        assert_eq!(known.len(), mirror.keys().len());
        assert_eq!(
            (mirror.knowledge(), &known),
            (model.knowledge, &model.keys),
            "after {message:02x?}"
        );
        assert_eq!(index.is_known(0), model.knowledge == Knowledge::All);
        if model.knowledge == Knowledge::All {
            for key in &model.keys {
                let mut held = [0];
                index.overlap(&[digest(key)], &mut held);
                assert_eq!(held, [1], "the index lacks {key:02x?}");
            }
        }
    }
}

/// A message from eight bytes, and keys from one byte each: flags, bytes per key, keys added, keys
/// removed, stream, number, two unused. Also returns the rest of `bytes`.
fn made(bytes: &[u8]) -> (Vec<u8>, &[u8]) {
    let at = |place: usize| bytes.get(place).copied().unwrap_or(0);
    let keys = bytes.get(8..).unwrap_or_default();
    let key_bytes = usize::from(at(1) % 12);
    let (added, removed) = (u32::from(at(2) % 9), u32::from(at(3) % 9));
    let (added, removed) = if key_bytes == 0 {
        (0, 0)
    } else {
        (added, removed)
    };
    let taken = keys.len().min((added + removed) as usize);
    let (stream, number) = (u64::from(at(4) % 4), u64::from(at(5) % 16));
    let mut message = KeyMessage::without_keys(stream, number, key_bytes);
    (message.begins, message.ends, message.repeats) =
        (at(0) & 1 != 0, at(0) & 2 != 0, at(0) & 4 != 0);
    let mut out = Vec::new();
    let mut writer = Writer::new(&mut out);
    for n in 0..(added + removed) as usize {
        writer.key(&vec![keys.get(n).copied().unwrap_or(0); key_bytes]);
    }
    writer.finish(&message, added, removed);
    (out, &keys[taken..])
}

/// Writes a message that was read; the bytes must be the same.
fn check_round_trip(message: &KeyMessage<'_>, bytes: &[u8]) {
    let mut back = Vec::new();
    let mut writer = Writer::new(&mut back);
    for key in message.added().chain(message.removed()) {
        writer.key(key);
    }
    let count = |keys: usize| u32::try_from(keys).expect("a count of the message");
    let (added, removed) = (message.added().len(), message.removed().len());
    writer.finish(message, count(added), count(removed));
    assert_eq!(back, bytes);
}

/// A follower that implements the document's rules.
#[derive(Default)]
struct Model {
    /// Stream and number of the last accepted message.
    last: Option<(u64, u64)>,
    knowledge: Knowledge,
    key_bytes: usize,
    keys: BTreeSet<Vec<u8>>,
}

impl Model {
    fn apply(&mut self, bytes: &[u8]) {
        let Ok(message) = KeyMessage::read(bytes) else {
            return self.distrust();
        };
        check_round_trip(&message, bytes);
        let this = (message.stream, message.sequence);
        if self.last.is_some_and(|last| this <= last) {
            return; // stale
        }
        let next = self.knowledge != Knowledge::None
            && self
                .last
                .is_some_and(|last| last.0 == this.0 && last.1.checked_add(1) == Some(this.1));
        let void = message.begins && !(message.repeats && next);
        let other = ![0, message.key_bytes].contains(&self.key_bytes) && message.key_bytes != 0;
        if !void && (!next || other) {
            return self.distrust();
        }
        if void {
            self.distrust();
            self.knowledge = Knowledge::Part;
        }
        self.last = Some(this);
        if message.ends {
            self.knowledge = Knowledge::All;
        }
        if self.key_bytes == 0 {
            self.key_bytes = message.key_bytes;
        }
        self.keys.extend(message.added().map(<[u8]>::to_vec));
        for key in message.removed() {
            self.keys.remove(key);
        }
    }

    fn distrust(&mut self) {
        self.knowledge = Knowledge::None;
        self.key_bytes = 0;
        self.keys.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The committed corpus, on every compiler.
    #[test]
    fn the_corpus_does_no_harm() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../../fuzz/corpus/key_message"
        );
        let mut files = 0;
        // Miri takes seconds per input.
        let step = if cfg!(miri) { 40 } else { 1 };
        for entry in std::fs::read_dir(folder)
            .expect("the corpus is committed")
            .step_by(step)
        {
            check(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files >= 5);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]

        /// Streams of many messages, which random bytes seldom produce.
        #[test]
        fn followers_agree_with_the_document(
            messages in prop::collection::vec((0u8..8, 0u8..3, 0u8..9, 0u8..9, 0u8..3, 0u8..2, any::<u64>()), 0..20)
        ) {
            let (mut input, mut number) = (Vec::new(), 0);
            for (flags, key_bytes, added, removed, stream, skip, keys) in messages {
                number += 1 + u8::from(skip == 0 && keys % 4 == 0);
                // The first messages begin a snapshot, most of the rest continue it.
                let flags = if number > 2 && keys % 3 != 0 { flags & 6 } else { flags | 1 };
                let stream = 1 + u8::from(stream == 2 && keys % 5 == 0);
                input.extend([128, flags, 8 + key_bytes / 2, added, removed, stream, number, 0, 0]);
                input.extend(keys.to_le_bytes().iter().cycle().take(usize::from(added % 9 + removed % 9)));
            }
            check(&input);
        }
    }
}
