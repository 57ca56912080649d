//! One suite for every tier, and tests of disks: torn files, killed writers, a full disk.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use proptest::prelude::*;
use slipstream_base::SimTime;
use slipstream_base::mix::draw;
use slipstream_kvstore::{
    DiskOptions, DiskTier, MemoryOptions, MemoryTier, Tier, TierChange, TierError, clock,
};

pub(crate) const BLOCK: usize = 1000;

pub(crate) fn key(n: u64) -> Vec<u8> {
    let mut key = vec![9; 36];
    key[..8].copy_from_slice(&n.to_be_bytes());
    key
}

/// The content of block `n`.
pub(crate) fn block(n: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| draw(n, word).to_le_bytes())
        .collect()
}

fn memory(blocks: usize, ttl_ns: Option<u64>) -> Arc<MemoryTier> {
    MemoryTier::new(MemoryOptions {
        bytes: blocks * BLOCK,
        block_bytes: BLOCK,
        ttl_ns,
    })
    .unwrap()
}

fn disk_options(path: &Path, blocks: u64, ttl_ns: Option<u64>) -> DiskOptions {
    DiskOptions {
        ttl_ns,
        ..DiskOptions::new(path, blocks * (BLOCK as u64 + 100)) // 64 of header, 36 of key
    }
}

fn open(now: u64, unix_ns: u64, options: DiskOptions) -> Arc<DiskTier> {
    DiskTier::open(SimTime(now), unix_ns, options).unwrap()
}

fn disk(path: &Path, blocks: u64, ttl_ns: Option<u64>) -> Arc<DiskTier> {
    open(0, clock::unix_ns(), disk_options(path, blocks, ttl_ns))
}

fn put(tier: &dyn Tier, now: u64, n: u64) -> bool {
    tier.put(SimTime(now), &key(n), &block(n)).unwrap()
}

/// Whether block `n` is present; if so, checks its content.
fn get(tier: &dyn Tier, now: u64, n: u64) -> bool {
    let mut out = vec![0; BLOCK];
    let hit = tier.get(SimTime(now), &key(n), &mut out).unwrap();
    assert!(!hit || out == block(n), "wrong data for block {n}");
    hit
}

/// Runs `check` on a tier of each kind with room for `blocks` blocks.
fn on_each(blocks: usize, ttl_ns: Option<u64>, check: impl Fn(&dyn Tier)) {
    check(&*memory(blocks, ttl_ns));
    let folder = tempfile::tempdir().unwrap();
    check(&*disk(folder.path(), blocks as u64, ttl_ns));
}

#[test]
fn the_least_recently_used_is_evicted() {
    on_each(3, None, |tier| {
        for n in 0..3 {
            assert!(put(tier, 0, n));
        }
        assert!(!put(tier, 0, 0), "the block is held already");
        assert!(get(tier, 0, 1));
        put(tier, 0, 3); // 2 is the oldest: 0 was put again, 1 was read
        assert_eq!(
            [0, 1, 2, 3].map(|n| get(tier, 0, n)),
            [true, true, false, true]
        );
        let stats = tier.stats();
        assert_eq!(
            (stats.blocks, stats.evicted_total, stats.stored_total),
            (3, 1, 4)
        );
        assert_eq!((stats.hits_total, stats.misses_total), (4, 1));
        let mut changes = Vec::new();
        assert!(tier.take_changes(&mut changes));
        let stored = |n| TierChange::Stored(key(n).into());
        let removed = TierChange::Removed(key(2).into());
        assert_eq!(
            changes,
            [stored(0), stored(1), stored(2), removed, stored(3)]
        );
        tier.clear();
        assert_eq!((tier.stats().blocks, tier.stats().bytes), (0, 0));
    });
}

#[test]
fn a_block_expires_after_its_time_to_live() {
    on_each(10, Some(100), |tier| {
        put(tier, 0, 1);
        put(tier, 50, 2);
        assert!(get(tier, 99, 1));
        assert!(!get(tier, 100, 1), "reading does not prolong it");
        assert!(get(tier, 100, 2));
        assert_eq!(tier.expire(SimTime(100), 10), 1);
        assert!(put(tier, 100, 1), "it can be stored again");
        assert_eq!(tier.expire(SimTime(150), 10), 1);
        assert_eq!(tier.expire(SimTime(199), 10), 0);
        assert!(get(tier, 199, 1));
        assert_eq!(tier.expire(SimTime(200), 10), 1);
        assert_eq!((tier.stats().blocks, tier.stats().expired_total), (0, 3));
    });
}

#[test]
fn blocks_of_another_length_and_blocks_too_large_are_refused() {
    on_each(2, None, |tier| {
        put(tier, 0, 1);
        let error = tier.get(SimTime(0), &key(1), &mut [0; 10]).unwrap_err();
        let TierError::Length {
            want: 10,
            got: BLOCK,
        } = error
        else {
            panic!("{error}")
        };
        let error = tier
            .put(SimTime(0), &key(2), &vec![0; 10 * BLOCK])
            .unwrap_err();
        assert!(matches!(error, TierError::TooLarge { .. }), "{error}");
        assert_eq!(tier.stats().failed_total, 1);
        assert!(get(tier, 0, 1));
    });
}

#[test]
fn discarded_changes_are_reported() {
    let tier = memory(1, None);
    for n in 0..40_000 {
        put(&*tier, 0, n); // each evicts the one before
    }
    let mut changes = Vec::new();
    assert!(!tier.take_changes(&mut changes), "the beginning is missing");
    assert_eq!(tier.keys(), [key(39_999).into()]);
    changes.clear();
    assert!(tier.take_changes(&mut changes) && changes.is_empty());
}

#[derive(Clone, Debug)]
enum Op {
    Put(u64),
    Get(u64),
    Remove(u64),
    Pass(u64),
    Expire,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u64..12).prop_map(Op::Put),
        4 => (0u64..12).prop_map(Op::Get),
        1 => (0u64..12).prop_map(Op::Remove),
        1 => (0u64..30).prop_map(Op::Pass),
        1 => Just(Op::Expire),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// LRU and time to live, modelled by a plain list. Keys that have expired and were not swept
    /// still take room, as the oldest do.
    #[test]
    fn tiers_match_a_plain_list(ops in prop::collection::vec(op(), 0..80)) {
        on_each(4, Some(100), |tier| {
            let mut list: Vec<(u64, u64)> = Vec::new(); // key, until; last used last
            let mut held = BTreeSet::new();
            let mut now = 0;
            for op in &ops {
                let live = |list: &[(u64, u64)], n: u64| {
                    list.iter().any(|&(other, until)| other == n && until > now)
                };
                match *op {
                    Op::Put(n) => {
                        // Expired blocks are evicted first, so that live ones stay.
                        tier.expire(SimTime(now), usize::MAX);
                        list.retain(|&(_, until)| until > now);
                        let fresh = !live(&list, n);
                        assert_eq!(put(tier, now, n), fresh);
                        if fresh && list.len() == 4 { list.remove(0); }
                        let until = list.iter().find(|entry| entry.0 == n);
                        let until = until.map_or(now + 100, |entry| entry.1);
                        list.retain(|entry| entry.0 != n);
                        list.push((n, until));
                    }
                    Op::Get(n) => {
                        assert_eq!(get(tier, now, n), live(&list, n));
                        if let Some(at) = list.iter().position(|entry| entry.0 == n) {
                            let entry = list.remove(at);
                            list.push(entry);
                        }
                    }
                    Op::Remove(n) => {
                        assert_eq!(tier.remove(&key(n)), list.iter().any(|entry| entry.0 == n));
                        list.retain(|entry| entry.0 != n);
                    }
                    Op::Pass(ns) => now += ns,
                    Op::Expire => {
                        tier.expire(SimTime(now), usize::MAX);
                        list.retain(|&(_, until)| until > now);
                    }
                }
                let mut changes = Vec::new();
                assert!(tier.take_changes(&mut changes));
                for change in changes {
                    match change {
                        TierChange::Stored(key) => assert!(held.insert(key)),
                        TierChange::Removed(key) => assert!(held.remove(&key)),
                    }
                }
                assert_eq!(held.len() as u64, tier.stats().blocks);
                assert_eq!(held.len(), list.len());
            }
        });
    }
}

#[test]
fn files_are_found_again_with_their_expiry() {
    let folder = tempfile::tempdir().unwrap();
    let options = disk_options(folder.path(), 10, Some(1_000_000_000_000));
    let began = clock::unix_ns();
    let tier = open(0, began, options.clone());
    for n in 0..5 {
        put(&*tier, 0, n);
    }
    let error = DiskTier::open(SimTime(0), began, options.clone())
        .err()
        .unwrap();
    assert!(error.to_string().contains("its own folder"), "{error}");
    drop(tier);
    let tier = open(7, began, options.clone());
    assert!((0..5).all(|n| get(&*tier, 7, n)));
    drop(tier);
    // 2,000 s later, with the clock of another boot.
    let tier = open(7, began + 2_000_000_000_000, options);
    assert!((0..5).all(|n| !get(&*tier, 7, n)));
    assert_eq!(tier.stats().expired_total, 5);
    assert_eq!(block_files(folder.path()).len(), 0);
}

#[test]
fn files_expire_no_later_than_the_current_time_to_live() {
    const S: u64 = 1_000_000_000;
    let folder = tempfile::tempdir().unwrap();
    let began = clock::unix_ns();
    let options = |ttl_s: u64| disk_options(folder.path(), 10, Some(ttl_s * S));
    put(&*disk(folder.path(), 10, None), 0, 1);
    let tier = open(0, began + 2_000 * S, options(10_000));
    assert!(get(&*tier, 0, 1));
    drop(tier);
    let tier = open(0, began + 2_000 * S, options(1_000));
    assert!(!get(&*tier, 0, 1), "it was written without an expiry");
    put(&*tier, 0, 2);
    drop(tier);
    // The clock was set back by a day.
    let tier = open(7, began - 86_400 * S, options(1_000));
    assert!(get(&*tier, 999 * S, 2));
    assert!(!get(&*tier, 1_001 * S, 2));
}

#[test]
fn a_smaller_cap_holds_from_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let tier = disk(folder.path(), 10, None);
    for n in 0..10 {
        put(&*tier, 0, n);
    }
    drop(tier);
    let tier = disk(folder.path(), 3, None);
    assert_eq!(tier.stats().blocks, 3);
    assert_eq!(block_files(folder.path()).len(), 3);
}

fn block_files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder.join("blocks"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.extension().is_some_and(|e| e == "kv"))
        .collect()
}

type Damage = &'static dyn Fn(&mut Vec<u8>);

/// Damage of any kind is a miss, before a restart and after.
#[test]
fn a_torn_or_damaged_file_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let damages: [Damage; 8] = [
        &|bytes| bytes.truncate(0),
        &|bytes| bytes.truncate(63),
        &|bytes| bytes.truncate(80),
        &|bytes| bytes.truncate(bytes.len() - 1),
        &|bytes| bytes.push(0),
        &|bytes| bytes[0] ^= 1,
        &|bytes| bytes[70] ^= 1,
        &|bytes| *bytes.last_mut().unwrap() ^= 1,
    ];
    for restart in [false, true] {
        for (at, damage) in damages.iter().enumerate() {
            let mut tier = disk(folder.path(), 10, None);
            tier.clear();
            let before = tier.stats().corrupt_total;
            put(&*tier, 0, 1);
            let path = block_files(folder.path()).remove(0);
            let mut bytes = fs::read(&path).unwrap();
            damage(&mut bytes);
            fs::write(&path, bytes).unwrap();
            if restart {
                drop(tier);
                tier = disk(folder.path(), 10, None);
            }
            assert!(!get(&*tier, 0, 1), "damage {at}");
            assert!(tier.stats().corrupt_total > before || restart && at >= 7);
            assert_eq!(block_files(folder.path()).len(), 0, "damage {at}");
            assert!(put(&*tier, 0, 1) && get(&*tier, 0, 1));
        }
    }
    // Another block's file under this block's name.
    let tier = disk(folder.path(), 10, None);
    tier.clear();
    put(&*tier, 0, 1);
    put(&*tier, 0, 2);
    let [one, two] = [1, 2].map(|n| {
        let files = block_files(folder.path());
        let name = format!("{n:016x}");
        files
            .into_iter()
            .find(|f| f.to_str().unwrap().contains(&name))
            .unwrap()
    });
    fs::copy(two, one).unwrap();
    assert!(!get(&*tier, 0, 1) && get(&*tier, 0, 2));
    fs::remove_file(block_files(folder.path()).remove(0)).unwrap();
    assert!(!get(&*tier, 0, 2), "the file was removed");
}

/// A start lists the folder and opens no file: what names say is known, and no block is given that its file does not prove.
#[test]
fn a_start_reads_names_and_a_name_proves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = folder.path().join("blocks");
    let tier = disk(folder.path(), 1_000_000, None);
    put(&*tier, 0, 1);
    put(&*tier, 0, 2);
    drop(tier);
    let names = || {
        let files = block_files(folder.path());
        let names = files
            .iter()
            .map(|of| of.file_name().unwrap().to_str().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    };
    let of = |n: u64| {
        let names = names();
        names
            .into_iter()
            .find(|name| name.contains(&format!("{n:016x}")))
            .unwrap()
    };
    // One is written again, and its process died before it removed the file before.
    let (one, two) = (of(1), of(2));
    let older = format!("{}-1.kv", one.rsplit_once('-').unwrap().0);
    fs::copy(blocks.join(&two), blocks.join(&older)).unwrap();
    // Names of blocks that are not there, with any contents, and of a file that would fill the disk.
    let tail = two.split_once('-').unwrap().1;
    for n in 1_000..2_000_u32 {
        fs::write(blocks.join(format!("{n:08x}-{tail}")), b"").unwrap();
    }
    fs::copy(blocks.join(&two), blocks.join(format!("aa-{tail}"))).unwrap();
    fs::write(
        blocks.join("bb-ffffffffffffffff-ffffffffffffffff-1.kv"),
        b"",
    )
    .unwrap();
    let tier = disk(folder.path(), 1_000_000, None);
    assert_eq!(
        (tier.stats().blocks, names().len()),
        (1_003, 1_003),
        "no file is opened"
    );
    assert!(get(&*tier, 0, 1) && get(&*tier, 0, 2));
    let mut out = vec![0; BLOCK];
    for key in [&b"\xaa"[..], &1_500_u32.to_be_bytes()] {
        assert!(!tier.get(SimTime(0), key, &mut out).unwrap(), "{key:x?}");
    }
    assert_eq!(tier.stats().corrupt_total, 2);
    // What is not the name of a block is no block.
    drop(tier);
    for name in [
        "x-1-1-1.kv",
        "0-1-1-1.kv",
        "00-01-1-1.kv",
        "00-1-1.kv",
        "00-1-1-1-1.kv",
        "-.kv",
    ] {
        fs::write(blocks.join(name), b"").unwrap();
    }
    let tier = disk(folder.path(), 1_000_000, None);
    assert_eq!(
        (tier.stats().blocks, tier.stats().corrupt_total),
        (1_001, 6)
    );
}

/// Files of version 0.2, whose names have the key alone, are found and renamed; so are those of keys that are too long for
/// a name.
#[test]
fn files_without_a_name_that_says_all_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let tier = disk(folder.path(), 10, None);
    put(&*tier, 0, 1);
    let long = [7; 300];
    tier.put(SimTime(0), &long, &block(2)).unwrap();
    drop(tier);
    for file in block_files(folder.path()) {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        let old = format!("{}.kv", name.split_once('-').unwrap().0);
        fs::rename(&file, file.with_file_name(old)).unwrap();
    }
    for _ in 0..2 {
        let tier = disk(folder.path(), 10, None);
        assert_eq!((tier.stats().blocks, tier.stats().corrupt_total), (2, 0));
        let mut out = vec![0; BLOCK];
        assert!(get(&*tier, 0, 1) && tier.get(SimTime(0), &long, &mut out).unwrap());
        assert_eq!(out, block(2));
        let files = block_files(folder.path());
        assert!(
            files.iter().all(|of| of.to_str().unwrap().contains('-')),
            "{files:?}"
        );
    }
}

/// Runs this test binary again, with the role in its environment. There, writing beyond a limit of
/// file sizes is an error instead of a signal.
pub(crate) fn child(test: &str, role: &str, folder: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("SLIPSTREAM_KV_ROLE", role)
        .env("SLIPSTREAM_KV_FOLDER", folder);
    command
}

/// Writes a line for the parent.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
}

pub(crate) fn role(role: &str) -> Option<std::path::PathBuf> {
    let here = std::env::var("SLIPSTREAM_KV_ROLE").ok()?;
    (here == role).then(|| std::env::var_os("SLIPSTREAM_KV_FOLDER").unwrap().into())
}

/// A writer is killed at an arbitrary moment. The next process finds only complete blocks, and all
/// that were reported as stored.
#[test]
fn blocks_survive_kill_9_at_any_moment() {
    if let Some(folder) = role("killed") {
        let tier = disk(&folder, 40, None);
        for n in 0.. {
            put(&*tier, 0, n % 200);
            say(&format!("stored {}", n % 200));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    for turn in 0..12 {
        let mut writer = child(
            "tiers::blocks_survive_kill_9_at_any_moment",
            "killed",
            folder.path(),
        )
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        // Killed after a different number of blocks each time, during one of the next writes.
        let stored = lines
            .map_while(Result::ok)
            .filter(|line| line.starts_with("stored"));
        assert_eq!(stored.take(60 + 37 * turn).count(), 60 + 37 * turn);
        writer.kill().unwrap();
        assert_eq!(writer.wait().unwrap().signal(), Some(9));
        let tier = disk(folder.path(), 40, None);
        assert_eq!(
            tier.stats().corrupt_total,
            0,
            "only complete files have a final name"
        );
        // One less if it was killed between an eviction and the write.
        let found = (0..200).filter(|&n| get(&*tier, 0, n)).count();
        assert!((39..=40).contains(&found), "{found} of 40 blocks are there");
        let parts = fs::read_dir(folder.path().join("blocks")).unwrap();
        assert!(
            parts
                .map(|e| e.unwrap().path())
                .all(|p| p.extension().is_none_or(|e| e != "part"))
        );
    }
}

#[test]
fn links_and_fifos_in_a_disk_folder_are_not_opened() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("tier");
    let open = || {
        let options = DiskOptions::new(&root, 1 << 30);
        DiskTier::open(clock::now(), clock::unix_ns(), options)
    };
    let tier = open().unwrap();
    tier.put(clock::now(), &key(1), &block(1)).unwrap();
    drop(tier);
    let target = dir.path().join("precious");
    fs::write(&target, "precious").unwrap();
    let fifo = |name: &str| {
        let made = Command::new("mkfifo").arg(root.join(name)).status();
        assert!(made.unwrap().success());
    };
    fifo("blocks/00.kv");
    std::os::unix::fs::symlink(&target, root.join("blocks/01.kv")).unwrap();
    let tier = open().unwrap();
    assert_eq!((tier.stats().blocks, tier.stats().corrupt_total), (1, 2));
    drop(tier);
    fs::remove_file(root.join("lock")).unwrap();
    std::os::unix::fs::symlink(&target, root.join("lock")).unwrap();
    let error = open().err().unwrap().to_string();
    assert!(error.contains("lock: creating failed"), "{error}");
    fs::remove_file(root.join("lock")).unwrap();
    fifo("lock");
    assert!(open().is_err());
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
}

/// Files may not exceed some bytes, as on a full disk: the block is not stored, no file is left
/// behind, and stored blocks can be read.
#[test]
fn a_full_disk_is_reported_and_harms_no_other_block() {
    if let Some(folder) = role("full") {
        let tier = disk(&folder, 1_000, None);
        put(&*tier, 0, 1);
        let limit = rustix::process::Rlimit {
            current: Some(600),
            maximum: Some(600),
        };
        rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        let error = tier.put(SimTime(0), &key(2), &block(2)).unwrap_err();
        assert!(error.to_string().contains("free some space"), "{error}");
        assert_eq!(tier.stats().failed_total, 1);
        assert!(get(&*tier, 0, 1) && !get(&*tier, 0, 2));
        assert_eq!(
            fs::read_dir(folder.join("blocks")).unwrap().count(),
            1,
            "a block"
        );
        let memory = MemoryTier::new(MemoryOptions {
            bytes: 1 << 20,
            block_bytes: 4096,
            ttl_ns: None,
        });
        let error = memory.err().unwrap().to_string();
        assert!(
            error.contains("only 600 available") && error.contains("ulimit -f"),
            "{error}"
        );
        say("full disk survived");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = child(
        "tiers::a_full_disk_is_reported_and_harms_no_other_block",
        "full",
        folder.path(),
    )
    .output()
    .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("full disk survived"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Clearing touches no file of a block, and no start finds one again.
#[test]
fn clear_takes_one_rename_and_lasts() {
    let folder = tempfile::tempdir().unwrap();
    let tier = disk(folder.path(), 1_000, None);
    for n in 0..500 {
        put(&*tier, 0, n);
    }
    let mut changes = Vec::new();
    assert!(tier.take_changes(&mut changes));
    tier.clear();
    assert!(!tier.take_changes(&mut changes) && tier.keys().is_empty());
    assert_eq!((tier.stats().blocks, tier.stats().bytes), (0, 0));
    assert!((0..500).all(|n| !get(&*tier, 0, n)));
    let old: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("old-")
        })
        .collect();
    assert_eq!(old.len(), 1);
    assert_eq!(fs::read_dir(&old[0]).unwrap().count(), 500);
    assert!(put(&*tier, 0, 7));
    drop(tier);
    let tier = disk(folder.path(), 1_000, None);
    assert_eq!(tier.keys(), [key(7).into()]);
    assert_eq!(tier.sweep(300), 300);
    assert_eq!(tier.sweep(300), 200);
    assert_eq!(tier.sweep(300), 0);
    assert!(!old[0].exists() && get(&*tier, 0, 7));
}

#[test]
fn a_block_read_before_a_clear_is_not_stored_after_it() {
    on_each(3, None, |tier| {
        for n in 0..3 {
            put(tier, 0, n);
        }
        let before = tier.epoch();
        tier.clear();
        assert!(!tier.put_in(before, SimTime(0), &key(3), &block(3)).unwrap());
        assert!(!get(tier, 0, 3) && tier.stats().blocks == 0);
        // The slots of dropped blocks are free.
        for n in 10..13 {
            assert!(put(tier, 0, n));
        }
        assert!((10..13).all(|n| get(tier, 0, n)));
        assert_eq!((tier.stats().evicted_total, tier.stats().blocks), (0, 3));
    });
}

/// Files of all tiers below a folder, in bytes.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| match entry.metadata().unwrap() {
            meta if meta.is_dir() => bytes_below(&entry.path()),
            meta => meta.len(),
        })
        .sum()
}

#[test]
fn unused_folders_are_evicted_first_in_order_of_last_use() {
    let root = tempfile::tempdir().unwrap();
    let [oldest, newer, used, own] = ["a", "b", "c", "d"].map(|name| root.path().join(name));
    for folder in [&oldest, &newer] {
        let tier = disk(folder, 10, None);
        for n in 0..4 {
            put(&*tier, 0, n);
        }
        fs::write(folder.with_extension("json"), "{}").unwrap();
    }
    let in_use = disk(&used, 10, None);
    for n in 0..4 {
        put(&*in_use, 0, n);
    }
    let options = DiskOptions {
        others: vec![oldest.clone(), newer.clone(), used.clone()],
        ..disk_options(&own, 10, None)
    };
    let tier = open(0, clock::unix_ns(), options.clone());
    for n in 0..2 {
        put(&*tier, 0, n);
    }
    assert_eq!(block_files(&oldest).len(), 4, "ten blocks fit");
    for n in 2..4 {
        put(&*tier, 0, n);
    }
    assert_eq!(
        (block_files(&oldest).len(), block_files(&newer).len()),
        (2, 4)
    );
    for n in 4..8 {
        put(&*tier, 0, n);
    }
    assert!(!oldest.exists() && !oldest.with_extension("json").exists());
    assert_eq!(block_files(&newer).len(), 2);
    // A folder that a process starts to use is left alone from then on.
    let newer_tier = disk(&newer, 10, None);
    for n in 8..20 {
        put(&*tier, 0, n);
    }
    assert_eq!(newer_tier.stats().blocks, 2);
    assert!(
        (2..4).all(|n| get(&*newer_tier, 0, n)),
        "the oldest went first"
    );
    assert!((0..4).all(|n| get(&*in_use, 0, n)), "the folder is in use");
    assert!(bytes_below(&own) <= options.bytes);
    assert_eq!(tier.stats().blocks, 10);
    drop(newer_tier);
    // A smaller capacity holds for all from the start.
    drop(tier);
    let tier = open(
        0,
        clock::unix_ns(),
        DiskOptions {
            bytes: 3 * (BLOCK as u64 + 100),
            ..options
        },
    );
    assert_eq!(tier.stats().blocks, 3);
    assert!(!newer.exists());
}

#[test]
fn many_writers_keep_the_capacity_and_lose_no_block() {
    let folder = tempfile::tempdir().unwrap();
    let options = DiskOptions {
        // So small that each writer reaches the bound on unsynced bytes.
        dirty_bytes: 4 * BLOCK as u64,
        ..disk_options(folder.path(), 60, None)
    };
    let tier = open(0, clock::unix_ns(), options.clone());
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let tier = &tier;
            scope.spawn(move || {
                for n in 0..40 {
                    put(&**tier, 0, (thread * 20 + n) % 120);
                }
            });
        }
    });
    assert_eq!(tier.stats().blocks, 60);
    assert!(bytes_below(folder.path()) <= options.bytes);
    assert_eq!(block_files(folder.path()).len(), 60);
    drop(tier);
    let tier = open(0, clock::unix_ns(), options);
    assert_eq!((tier.stats().blocks, tier.stats().corrupt_total), (60, 0));
}

/// Other files fill the disk: older blocks are evicted below the configured capacity.
#[test]
fn on_a_full_disk_older_blocks_are_evicted() {
    if let Some(folder) = role("tmpfs") {
        let tier = disk(&folder, 1_000_000, None);
        for n in 0..500 {
            put(&*tier, 0, n);
        }
        let stats = tier.stats();
        assert_eq!(stats.failed_total, 0);
        assert!(stats.blocks > 20 && stats.evicted_total > 100, "{stats:?}");
        assert!(get(&*tier, 0, 499) && !get(&*tier, 0, 0));
        say("room was made");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // A separate small file system; a user may be given one in a namespace.
    let test = child(
        "tiers::on_a_full_disk_older_blocks_are_evicted",
        "tmpfs",
        folder.path(),
    );
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg("mount -t tmpfs -o size=512k none \"$SLIPSTREAM_KV_FOLDER\" || exit 77; exec \"$@\"")
        .arg("sh")
        .arg(test.get_program())
        .args(test.get_args());
    for (name, value) in test.get_envs() {
        command.env(name, value.unwrap());
    }
    let output = match command.output() {
        Ok(output) if output.status.code() != Some(77) && output.status.code() != Some(1) => output,
        _ => {
            eprintln!("skipped: no mount namespace (unshare --user --mount)");
            return;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("room was made"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
