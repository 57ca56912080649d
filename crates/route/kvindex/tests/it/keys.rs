//! Sets, mirrors and the index of peers against a naive model, under lost and repeated messages.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use slipstream_base::SimTime;
use slipstream_kvindex::{
    Change, KeyError, KeyMessage, KeyMirror, KeySet, Knowledge, PeerIndex, digest,
};

const KEYS: u8 = 24;

fn key(n: u8) -> Vec<u8> {
    let mut key = vec![7; 36];
    key[..2].copy_from_slice(&[n, n ^ 0x5a]);
    key
}

fn followed() -> (KeySet, KeyMirror) {
    let (mut set, mut mirror) = (KeySet::new(0, 1), KeyMirror::default());
    set.set_consumed(true);
    mirror
        .apply(&set.message(8).expect("an empty snapshot"))
        .unwrap();
    assert_eq!(mirror.knowledge(), Knowledge::All);
    (set, mirror)
}

#[test]
fn nothing_is_built_while_nobody_consumes() {
    let mut set = KeySet::new(0, 1);
    for n in 0..100 {
        set.change(&key(n), Change::Add(1)).unwrap();
        assert_eq!(set.message(8), None);
        set.change(&key(n), Change::Remove(1)).unwrap();
    }
    set.set_consumed(true);
    let bytes = set.message(8).unwrap();
    let message = KeyMessage::read(&bytes).unwrap();
    assert_eq!((message.added().len(), message.removed().len()), (0, 0));
    assert!(message.begins && message.ends);
}

#[test]
fn what_comes_and_goes_between_two_messages_is_not_told() {
    let (mut set, mut mirror) = followed();
    set.change(&key(1), Change::Add(1)).unwrap();
    set.change(&key(1), Change::Remove(1)).unwrap();
    assert_eq!(set.message(8), None);
    set.change(&key(2), Change::Add(1)).unwrap();
    mirror.apply(&set.message(8).unwrap()).unwrap();
    set.change(&key(2), Change::Remove(1)).unwrap();
    set.change(&key(2), Change::Add(9)).unwrap();
    assert_eq!(set.message(8), None);
    assert!(mirror.keys().contains(&key(2)));
}

#[test]
fn changes_that_undo_each_other_hold_up_no_others() {
    let (mut set, mut mirror) = followed();
    for n in 0..8 {
        set.change(&key(n), Change::Add(1)).unwrap();
    }
    while let Some(message) = set.message(2) {
        mirror.apply(&message).unwrap();
    }
    for n in 0..8 {
        set.change(&key(n), Change::Remove(1)).unwrap();
        set.change(&key(n), Change::Add(1)).unwrap();
    }
    set.change(&key(9), Change::Add(1)).unwrap();
    assert!(set.unpublished() > 2);
    mirror
        .apply(&set.message(2).expect("a key was added"))
        .unwrap();
    assert!(mirror.keys().contains(&key(9)));
    assert_eq!((set.message(2), set.unpublished()), (None, 0));
}

#[test]
fn a_key_is_gone_with_its_last_holder() {
    let (mut set, mut mirror) = followed();
    for holder in [1, 2, 2, 3] {
        set.change(&key(1), Change::Add(holder)).unwrap();
    }
    for (holder, holds) in [(1, true), (9, true), (1, true), (3, true), (2, false)] {
        set.change(&key(1), Change::Remove(holder)).unwrap();
        if let Some(message) = set.message(8) {
            mirror.apply(&message).unwrap();
        }
        assert_eq!(set.contains(&key(1)), holds, "after {holder}");
        assert_eq!(mirror.keys().contains(&key(1)), holds, "after {holder}");
    }
    assert!(set.is_empty() && mirror.keys().is_empty());
}

#[test]
fn bad_keys_and_bad_messages_are_refused() {
    let (mut set, mut mirror) = followed();
    let size = set.change(&[], Change::Add(1));
    assert_eq!(size, Err(KeyError::Size { got: 0 }));
    let size = set.change(&vec![0; 70_000], Change::Add(1));
    assert_eq!(size, Err(KeyError::Size { got: 70_000 }));
    set.change(&key(1), Change::Add(1)).unwrap();
    for change in [Change::Add(1), Change::Remove(1)] {
        let other = set.change(&[1; 20], change);
        assert_eq!(other, Err(KeyError::Length { want: 36, got: 20 }));
    }
    let message = set.message(8).unwrap();
    for cut in 0..message.len() {
        let error = KeyMirror::default().apply(&message[..cut]).unwrap_err();
        assert!(
            matches!(error, KeyError::Truncated { .. }),
            "{cut}: {error}"
        );
    }
    // Every bit counts.
    for at in 0..message.len() * 8 {
        let mut damaged = message.clone();
        damaged[at / 8] ^= 1 << (at % 8);
        assert!(KeyMessage::read(&damaged).is_err(), "bit {at}");
    }
    let mut other = message.clone();
    other[0] = 9;
    let error = mirror.apply(&other).unwrap_err();
    assert!(error.to_string().contains("version 9"), "{error}");
    assert_eq!(mirror.knowledge(), Knowledge::None);
    assert!(mirror.apply(&message).is_err(), "missed keys are unknown");
    set.request_snapshot();
    mirror.apply(&set.message(8).unwrap()).unwrap();
    assert!(mirror.knowledge() == Knowledge::All && mirror.keys().contains(&key(1)));
}

#[test]
fn no_message_has_more_keys_than_asked_for() {
    let mut set = KeySet::new(0, 1);
    for n in 0..100 {
        set.change(&key(n), Change::Add(n.into())).unwrap();
    }
    set.set_consumed(true);
    let mut messages = 0;
    let mut mirror = KeyMirror::default();
    let mut fresh = 100..;
    while let Some(message) = set.message(8) {
        // The first messages contain as many changes as allowed.
        if messages < 5 {
            for n in fresh.by_ref().take(16) {
                set.change(&key(n), Change::Add(0)).unwrap();
            }
        }
        let read = KeyMessage::read(&message).unwrap();
        assert!(read.added().len() + read.removed().len() <= 16);
        mirror.apply(&message).unwrap();
        messages += 1;
    }
    assert!(messages >= 13);
    assert_eq!(mirror.keys().len(), 180);
}

#[test]
fn a_flush_is_an_empty_snapshot() {
    let (mut set, mut mirror) = followed();
    for n in 0..50 {
        set.change(&key(n), Change::Add(0)).unwrap();
    }
    mirror.apply(&set.message(64).unwrap()).unwrap();
    set.clear();
    set.change(&key(3), Change::Add(0)).unwrap();
    mirror.apply(&set.message(64).unwrap()).unwrap();
    assert_eq!(mirror.keys().iter().collect::<Vec<_>>(), [&key(3)[..]]);
}

#[derive(Clone, Debug)]
enum Op {
    Clear,
    Snapshot,
    Consumed(bool),
    Message(usize),
    Add(u8, u32),
    Remove(u8, u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        1 => Just(Op::Clear),
        2 => Just(Op::Snapshot),
        1 => any::<bool>().prop_map(Op::Consumed),
        12 => (0usize..5).prop_map(Op::Message),
        30 => (0..KEYS, 0u32..4).prop_map(|(key, holder)| Op::Add(key, holder)),
        40 => (0..KEYS, 0u32..4).prop_map(|(key, holder)| Op::Remove(key, holder)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Set, mirror and index match the model; the index is queried for a prefix.
    #[test]
    fn all_follow_a_model(ops in prop::collection::vec(op(), 0..300)) {
        let mut set = KeySet::new(0, 1);
        let mut mirror = KeyMirror::default();
        // A follower that misses some messages, and requests snapshots.
        let mut lossy = KeyMirror::default();
        let mut sent = 0;
        let index = PeerIndex::new(3, 3 * usize::from(KEYS), 1_000);
        index.connect(SimTime(0), 1);
        let mut model: BTreeMap<Vec<u8>, BTreeSet<u32>> = BTreeMap::new();
        let mut publish = |set: &mut KeySet, max: usize| {
            let Some(message) = set.message(max) else { return false };
            mirror.apply(&message).unwrap();
            sent += 1;
            if sent % 5 != 0 && lossy.apply(&message).is_err() {
                set.request_snapshot();
            }
            assert_eq!(index.apply(SimTime(1), 1, &message).unwrap().dropped, 0);
            true
        };
        for op in ops {
            match op {
                Op::Clear => { set.clear(); model.clear(); }
                Op::Snapshot => set.request_snapshot(),
                Op::Consumed(consumed) => set.set_consumed(consumed),
                Op::Message(max) => { publish(&mut set, max); }
                Op::Add(n, holder) => {
                    set.change(&key(n), Change::Add(holder)).unwrap();
                    model.entry(key(n)).or_default().insert(holder);
                }
                Op::Remove(n, holder) => {
                    set.change(&key(n), Change::Remove(holder)).unwrap();
                    if let Some(holders) = model.get_mut(&key(n)) {
                        holders.remove(&holder);
                        if holders.is_empty() { model.remove(&key(n)); }
                    }
                }
            }
            prop_assert_eq!(set.len(), model.len());
        }
        set.set_consumed(true);
        // From here on no message is lost. The last one may have been: only a later one shows it.
        set.request_snapshot();
        while let Some(message) = set.message(3) {
            mirror.apply(&message).unwrap();
            lossy.apply(&message).unwrap();
            index.apply(SimTime(1), 1, &message).unwrap();
        }
        while index.tick(SimTime(1), 3) {}
        let want: BTreeSet<&[u8]> = model.keys().map(Vec::as_slice).collect();
        prop_assert_eq!(&set.iter().collect::<BTreeSet<_>>(), &want);
        prop_assert_eq!(mirror.knowledge(), Knowledge::All);
        prop_assert_eq!(&mirror.keys().iter().collect::<BTreeSet<_>>(), &want);
        prop_assert_eq!(&lossy.keys().iter().collect::<BTreeSet<_>>(), &want);
        prop_assert!(index.is_known(1));
        let mut out = [9; 3];
        for start in 0..KEYS {
            let prompt: Vec<_> = (start..KEYS).map(|n| digest(&key(n))).collect();
            index.overlap(&prompt, &mut out);
            let run = (start..KEYS).take_while(|&n| want.contains(&key(n)[..])).count();
            prop_assert_eq!(out, [0, run as u32, 0]);
        }
    }

    /// Messages are lost, repeated and reordered: no false key stays, and a snapshot requested after an
    /// error restores all keys.
    #[test]
    fn a_lossy_way_is_mended_by_snapshots(
        steps in prop::collection::vec((0..KEYS, any::<bool>(), 0u8..8), 0..200)
    ) {
        let (mut set, mut mirror) = followed();
        let mut late: Option<Vec<u8>> = None;
        for (n, add, fate) in steps {
            let change = if add { Change::Add(0) } else { Change::Remove(0) };
            set.change(&key(n), change).unwrap();
            let Some(message) = set.message(4) else { continue };
            let mut deliver = |message: &[u8]| {
                if mirror.apply(message).is_err_and(|error| error.loses_trust()) {
                    assert!(mirror.keys().is_empty(), "nothing is believed after a loss");
                    set.request_snapshot();
                }
            };
            match fate {
                0 => late = Some(message),
                1 => { deliver(&message); deliver(&message); }
                2 => { let at = message.len() / 2; deliver(&message[..at]); }
                _ => {
                    deliver(&message);
                    if let Some(late) = late.take() { deliver(&late); }
                }
            }
        }
        set.request_snapshot();
        while let Some(message) = set.message(4) { mirror.apply(&message).unwrap(); }
        let want: BTreeSet<_> = set.iter().collect();
        prop_assert_eq!(mirror.keys().iter().collect::<BTreeSet<_>>(), want);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(KeyMessage::read(&bytes).is_err());
        let index = PeerIndex::new(1, 10, 10);
        prop_assert!(index.apply(SimTime(0), 0, &bytes).is_err());
    }
}

/// Readers run during resyncs of one peer. They may see fewer of its blocks, never more, and always see
/// all blocks of another peer.
#[test]
fn readers_beside_a_resync_never_see_too_much_and_find_what_stays() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let index = PeerIndex::new(2, 2_000, u64::MAX);
    let keys: Vec<[u8; 36]> = (0..500u64)
        .map(|n| {
            let mut key = [0; 36];
            key[..8].copy_from_slice(&slipstream_base::mix::draw(3, n).to_le_bytes());
            key
        })
        .collect();
    let mut prompt: Vec<_> = keys.iter().map(|key| digest(key)).collect();
    prompt.extend((0..20u64).map(|n| digest(&n.to_le_bytes()))); // no peer holds these
    let mut sets = [KeySet::new(0, 1), KeySet::new(0, 1)];
    for (peer, set) in sets.iter_mut().enumerate() {
        index.connect(SimTime(0), peer);
        set.set_consumed(true);
        let changes = keys.iter().map(|key| (&key[..], Change::Add(0)));
        set.apply(changes).unwrap();
        while let Some(message) = set.message(64) {
            index.apply(SimTime(0), peer, &message).unwrap();
        }
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut out = [0; 2];
            let mut looks = 0u64;
            while !done.load(Ordering::Relaxed) || looks < 100 {
                index.overlap(&prompt, &mut out);
                assert!(out[0] <= 500, "{out:?}");
                assert_eq!(out[1], 500, "the other peer stays");
                looks += 1;
            }
        });
        for _ in 0..50 {
            sets[0].request_snapshot();
            while let Some(message) = sets[0].message(64) {
                index.apply(SimTime(0), 0, &message).unwrap();
            }
            while index.tick(SimTime(0), 64) {}
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
}

/// The messages in `docs/kv-keys.md`, by their names there.
fn golden() -> Vec<(&'static str, Vec<u8>)> {
    let mut set = KeySet::new(0, 0x1122_3344_5566_7788);
    let mut messages = Vec::new();
    let mut say = |set: &mut KeySet, name, max| {
        messages.push((name, set.message(max).expect("something to say")));
    };
    set.set_consumed(true);
    say(&mut set, "empty snapshot", 8);
    set.change(b"\x0a\x0a\x0a\x0a", Change::Add(1)).unwrap();
    set.change(b"\x0b\x0b\x0b\x0b", Change::Add(2)).unwrap();
    say(&mut set, "delta", 8);
    set.change(b"\x0a\x0a\x0a\x0a", Change::Remove(1)).unwrap();
    set.change(b"\x0c\x0c\x0c\x0c", Change::Add(1)).unwrap();
    say(&mut set, "delta with removal", 8);
    set.request_snapshot();
    set.change(b"\x0d\x0d\x0d\x0d", Change::Add(3)).unwrap();
    set.change(b"\x0d\x0d\x0d\x0d", Change::Remove(3)).unwrap();
    // Slots of two removed keys are empty, and are skipped.
    say(&mut set, "first of two", 2);
    say(&mut set, "second of two", 2);
    messages
}

#[test]
fn golden_messages_are_as_documented() {
    let text = include_str!("../../../../../docs/kv-keys.md");
    let mut mirror = KeyMirror::default();
    for (name, message) in golden() {
        mirror.apply(&message).unwrap();
        let shown = text
            .split_once(&format!("```hex {name}\n"))
            .and_then(|(_, rest)| rest.split_once("```"))
            .map(|(block, _)| block)
            .unwrap_or_default();
        let shown: Vec<u8> = shown
            .lines()
            .flat_map(|line| {
                line.split('#')
                    .next()
                    .unwrap_or_default()
                    .split_whitespace()
            })
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        let hex = |bytes: &[u8]| {
            let bytes = bytes.iter().map(|byte| format!("{byte:02x}"));
            bytes.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            hex(&shown),
            hex(&message),
            "docs/kv-keys.md does not show {name} as it is"
        );
    }
    assert_eq!(mirror.keys().len(), 2);
}
