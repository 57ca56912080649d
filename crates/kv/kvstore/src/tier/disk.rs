//! Blocks in files, one file per block, that survive their process.
//!
//! ```text
//!   FOLDER/lock               held by the process that uses the folder
//!   FOLDER/blocks/NAME.kv     header (64 bytes): magic, lengths, expiry, checksums │ key │ block
//!   FOLDER/old-N/             cleared blocks, whose files are removed later
//! ```
//!
//! A file's name has the key, and what a tier must know of its block: a tier that opens a folder lists it,
//! and opens no file. A name proves nothing: a block is read only if its file's header and checksums say the same.
//!
//! A file is written under a temporary name and then renamed, so under its final name it is complete.
//! Only a power failure can leave torn files, among the last [`DiskOptions::dirty_bytes`] written.
//! Their checksums detect them when they are read.
//!
//! Paths are relative to an open folder. So a write that is in progress during a clear ends in the
//! folder of cleared blocks.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use slipstream_base::SimTime;
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::width::{nanos, to_u16, to_usize};
use xxhash_rust::xxh3::xxh3_64;

use self::name::{NAMED_KEY_BYTES_MAX, Stored, name_of, old_name_of, parse_name};
use super::{Medium, Settings, Tier, TierChange, TierError, TierStats};
use crate::ledger::{Cleared, Ledger, Removal};
use crate::{checksum, clock};

mod name;

const MAGIC: [u8; 8] = *b"SLIPKVB1";
const HEADER_BYTES: usize = 64;
/// The folder of blocks, and the prefix of folders of dropped blocks.
const BLOCKS: &str = "blocks";
const OLD: &str = "old-";
/// Evictions that one write may cause on a full disk before it fails.
const FULL_RETRIES: usize = 8;

/// Location and size of a disk tier.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// A folder for this tier only; created if it does not exist.
    pub path: PathBuf,
    /// Maximum bytes of all files together, including those of `others`.
    pub bytes: u64,
    /// How long a block is kept, ns; `None`: until it is evicted.
    pub ttl_ns: Option<u64>,
    /// Whether a block is on the disk, not only in the page cache, before it counts as stored.
    /// Without it, stored blocks survive the end of the process, but not a power failure.
    pub sync: bool,
    /// Maximum bytes in the page cache only, without `sync`. Writers that would exceed it wait for
    /// the disk; a sync begins at half of it. `u64::MAX`: the system decides.
    pub dirty_bytes: u64,
    /// Folders of other tiers, least recently used first. Blocks in those that no process uses are
    /// evicted before any in this one.
    pub others: Vec<PathBuf>,
}

impl DiskOptions {
    /// A tier of `bytes` in a folder, without a time to live or syncs.
    pub fn new(path: &Path, bytes: u64) -> DiskOptions {
        DiskOptions {
            path: path.to_path_buf(),
            bytes,
            ttl_ns: None,
            sync: false,
            dirty_bytes: u64::MAX,
            others: Vec::new(),
        }
    }
}

/// Opens the disk tier that `settings` ask for: `dir`, `bytes`, `dirty_bytes`, and `others` of [`DiskOptions`].
pub(super) fn open_with(
    settings: &mut Settings,
    ttl_ns: Option<u64>,
) -> Result<Option<Arc<dyn Tier>>, TierError> {
    let (folder, bytes) = (settings.path("dir")?, settings.count("bytes", 0)?);
    let dirty_bytes = settings.count("dirty_bytes", 1 << 30)?;
    let others = settings.paths("others")?;
    let Some(folder) = folder else {
        return Ok(None);
    };
    let options = DiskOptions {
        ttl_ns,
        dirty_bytes,
        others,
        ..DiskOptions::new(&folder, bytes)
    };
    Ok(Some(DiskTier::open(
        clock::now(),
        clock::unix_ns(),
        options,
    )?))
}

/// Blocks in files of a folder. All calls except [`Tier::clear`] do disk I/O and may be slow. None
/// holds a lock during I/O on blocks.
pub struct DiskTier {
    options: DiskOptions,
    state: Mutex<State>,
    dirty: Mutex<Dirty>,
    synced: Condvar,
    /// Whether there are folders of dropped blocks.
    has_old: AtomicBool,
    /// Held while the tier lives, so that no other process opens the folder.
    lock: File,
}

struct State {
    ledger: Ledger<Stored>,
    temporary: u64,
    blocks: Arc<OwnedFd>,
    epoch: u64,
    /// Bytes of files that are being written.
    reserved: u64,
    others: Others,
    cleared: Vec<Cleared<Stored>>,
    /// When the last file was written: no two files of a key have one name.
    written_unix_ns: u64,
}

impl State {
    fn bytes(&self) -> u64 {
        self.ledger.stats.bytes + self.reserved + self.others.bytes
    }
}

/// Bytes that are not on the disk yet.
#[derive(Default)]
struct Dirty {
    bytes: u64,
    is_syncing: bool,
}

impl DiskTier {
    /// Opens a folder and finds the blocks of an earlier process. A truncated file is found when it
    /// is read. `unix_ns` is [`crate::clock::unix_ns`].
    ///
    /// # Errors
    ///
    /// [`TierError::Disk`] if the folder cannot be used, [`TierError::InUse`] if another process
    /// uses it.
    pub fn open(
        now: SimTime,
        unix_ns: u64,
        options: DiskOptions,
    ) -> Result<Arc<DiskTier>, TierError> {
        let root = &options.path;
        let disk = |what, path: &Path, source| TierError::Disk {
            path: path.to_path_buf(),
            what,
            source,
        };
        let folder = root.join(BLOCKS);
        fs::create_dir_all(&folder).map_err(|error| disk("creating the folder", root, error))?;
        let lock_path = root.join("lock");
        let lock = open_lock(&lock_path).map_err(|error| disk("creating", &lock_path, error))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(TierError::InUse { path: root.clone() });
            }
            Err(error) => return Err(disk("locking", &lock_path, error.into())),
        }
        let blocks = open_folder(&folder).map_err(|error| disk("opening", &folder, error))?;
        let mut ledger = Ledger::new(options.ttl_ns);
        let mut found = Vec::new();
        let entries = fs::read_dir(&folder).map_err(|error| disk("reading", &folder, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| disk("reading", &folder, error))?;
            match find(&blocks, &entry) {
                Ok(Some(file)) => found.push(file),
                Ok(None) => {}
                Err(why) => {
                    let path = entry.path();
                    tracing::warn!("removing block file {}: {why}", path.display());
                    ledger.stats.corrupt_total += 1;
                    remove_file(&path);
                }
            }
        }
        // Times of use are unknown, so the order of writing stands in for them.
        found.sort_unstable_by_key(|(_, stored)| stored.written_unix_ns);
        let written_unix_ns = found.last().map_or(0, |(_, last)| last.written_unix_ns);
        let mut all_bytes = 0_u64;
        for (key, stored) in found {
            let bytes = file_bytes(key.len(), stored.len);
            // A name may state any length.
            let sum = all_bytes.checked_add(bytes);
            let Some(sum) = sum.filter(|_| bytes <= options.bytes) else {
                ledger.stats.evicted_total += 1;
                remove_file(&folder.join(name_of(&key, stored)));
                continue;
            };
            all_bytes = sum;
            // A file written with another time to live, or by another clock, expires no later than
            // the current one.
            let mut left = stored.until_unix_ns.saturating_sub(unix_ns);
            if let Some(ttl) = options.ttl_ns {
                let age = unix_ns.saturating_sub(stored.written_unix_ns);
                left = left.min(ttl.saturating_sub(age));
            }
            let until = match (stored.until_unix_ns, options.ttl_ns) {
                (u64::MAX, None) => SimTime::MAX,
                _ => now + left,
            };
            // Its process died between writing a block again and removing the file before. A file that was renamed while
            // the folder was listed may be listed twice.
            if let Some(before) = ledger.remove(&key, Removal::Removed)
                && before != stored
            {
                remove_file(&folder.join(name_of(&key, before)));
            }
            ledger.insert(&key, stored, bytes, until);
        }
        ledger.stats.stored_total = 0; // stored by an earlier process
        let others = Others::find(&options.others);
        let tier = DiskTier {
            options,
            state: Mutex::new(State {
                ledger,
                temporary: 0,
                blocks: Arc::new(blocks),
                epoch: 0,
                reserved: 0,
                others,
                cleared: Vec::new(),
                written_unix_ns,
            }),
            dirty: Mutex::default(),
            synced: Condvar::new(),
            has_old: AtomicBool::new(true),
            lock,
        };
        tier.expire(now, usize::MAX);
        tier.make_room(0);
        Ok(Arc::new(tier))
    }

    /// Waits until all stored blocks are on the disk.
    ///
    /// # Errors
    ///
    /// [`TierError::Disk`] if a sync fails.
    pub fn flush(&self) -> Result<(), TierError> {
        rustix::fs::syncfs(&self.lock).map_err(|error| TierError::Disk {
            path: self.options.path.clone(),
            what: "syncing",
            source: error.into(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn path_of(&self, key: &[u8], stored: Stored) -> PathBuf {
        self.options.path.join(BLOCKS).join(name_of(key, stored))
    }

    /// Evicts one block, of other folders first. `false` if there is none.
    fn evict(&self, mut state: MutexGuard<'_, State>) -> bool {
        if state.others.bytes > 0 {
            // Files are removed without the lock, as the disk may be slow.
            let file = state.others.pop();
            drop(state);
            if let Some(file) = file {
                file.remove();
            }
            return true;
        }
        let Some(key) = state.ledger.oldest(|_| true) else {
            return false;
        };
        let stored = state.ledger.remove(&key, Removal::Evicted);
        let blocks = Arc::clone(&state.blocks);
        drop(state);
        if let Some(stored) = stored {
            self.unlink(&blocks, &key, stored);
        }
        true
    }

    /// Evicts until `bytes` more fit, and reserves that room.
    fn make_room(&self, bytes: u64) {
        loop {
            let mut state = self.state();
            if state.bytes() + bytes <= self.options.bytes {
                state.reserved += bytes;
                return;
            }
            if !self.evict(state) {
                // Only files that are being written are left; together they may exceed the
                // capacity.
                self.state().reserved += bytes;
                return;
            }
        }
    }

    fn unlink(&self, blocks: &OwnedFd, key: &[u8], stored: Stored) {
        match rustix::fs::unlinkat(blocks, name_of(key, stored), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => tracing::warn!(
                "{} cannot be removed: {}",
                self.path_of(key, stored).display(),
                io::Error::from(error)
            ),
        }
    }

    fn forget(&self, key: &[u8], why: Removal) -> bool {
        let mut state = self.state();
        let held = state.ledger.remove(key, why);
        let blocks = Arc::clone(&state.blocks);
        drop(state);
        if let Some(stored) = held {
            self.unlink(&blocks, key, stored);
        }
        held.is_some()
    }

    /// Drops a block whose file could not be read, unless it was stored again since.
    fn forget_unreadable(&self, key: &[u8], stored: Stored, why: Removal) {
        let mut state = self.state();
        if state.ledger.peek(SimTime::ZERO, key) == Some(stored) {
            state.ledger.remove(key, why);
            let blocks = Arc::clone(&state.blocks);
            drop(state);
            self.unlink(&blocks, key, stored);
        }
    }

    /// Writes a block's file into `blocks`.
    fn write(
        &self,
        blocks: &OwnedFd,
        part: &str,
        key: &[u8],
        bytes: &[u8],
        stored: Stored,
    ) -> Result<(), TierError> {
        let head = Head {
            key: key.into(),
            len: stored.len,
            checksum: checksum(bytes),
            until_unix_ns: stored.until_unix_ns,
        };
        let head = head.bytes();
        let mut retries = 0;
        loop {
            let written = write_file(blocks, part, &head, bytes, self.options.sync);
            let (what, error) = match written {
                Ok(()) => break,
                Err(why) => why,
            };
            let _ = rustix::fs::unlinkat(blocks, part, AtFlags::empty());
            // Other programs fill the disk too: then the capacity is the space that is left.
            if is_full(&error) && retries < FULL_RETRIES && self.evict(self.state()) {
                retries += 1;
                continue;
            }
            return Err(TierError::Disk {
                path: self.options.path.join(BLOCKS).join(part),
                what,
                source: error,
            });
        }
        let name = name_of(key, stored);
        rustix::fs::renameat(blocks, part, blocks, name).map_err(|error| {
            let _ = rustix::fs::unlinkat(blocks, part, AtFlags::empty());
            TierError::Disk {
                path: self.path_of(key, stored),
                what: "renaming",
                source: error.into(),
            }
        })
    }

    /// Counts bytes that are not on the disk; waits for a sync if they are too many.
    fn note_dirty(&self, bytes: u64) {
        let max = self.options.dirty_bytes;
        if self.options.sync || max == u64::MAX {
            return;
        }
        let mut dirty = lock(&self.dirty);
        dirty.bytes += bytes;
        loop {
            if dirty.bytes > max / 2 && !dirty.is_syncing {
                // Bytes written during the sync may not be on the disk after it.
                let begun = dirty.bytes;
                dirty.is_syncing = true;
                drop(dirty);
                if let Err(error) = self.flush() {
                    tracing::warn!("{error}: blocks may be lost in a power failure");
                }
                dirty = lock(&self.dirty);
                dirty.bytes -= begun;
                dirty.is_syncing = false;
                self.synced.notify_all();
            } else if dirty.bytes > max {
                dirty = unpoisoned(self.synced.wait(dirty));
            } else {
                return;
            }
        }
    }
}

impl Tier for DiskTier {
    fn medium(&self) -> Medium {
        Medium::Disk
    }

    fn epoch(&self) -> u64 {
        self.state().epoch
    }

    fn put_in(
        &self,
        epoch: u64,
        now: SimTime,
        key: &[u8],
        bytes: &[u8],
    ) -> Result<bool, TierError> {
        let size = file_bytes(key.len(), bytes.len() as u64);
        if size > self.options.bytes || key.len() > usize::from(u16::MAX) {
            self.state().ledger.stats.failed_total += 1;
            return Err(TierError::TooLarge {
                bytes: bytes.len(),
                max: usize::try_from(self.options.bytes).unwrap_or(usize::MAX),
            });
        }
        let unix_ns = crate::clock::unix_ns();
        let until_unix_ns = self
            .options
            .ttl_ns
            .map_or(u64::MAX, |ttl| unix_ns.saturating_add(ttl));
        let (number, blocks, stored) = {
            let mut state = self.state();
            if state.epoch != epoch || state.ledger.touch(now, key).is_some() {
                return Ok(false);
            }
            state.temporary += 1;
            state.written_unix_ns = unix_ns.max(state.written_unix_ns.saturating_add(1));
            let stored = Stored {
                len: bytes.len() as u64,
                until_unix_ns,
                written_unix_ns: state.written_unix_ns,
            };
            (state.temporary, Arc::clone(&state.blocks), stored)
        };
        // Expired blocks are removed before live ones are evicted.
        self.expire(now, 16);
        self.make_room(size);
        let part = format!("{number}.part");
        let written = self.write(&blocks, &part, key, bytes, stored);
        let mut state = self.state();
        state.reserved -= size;
        // A clear has renamed the folder, so the new file is among the cleared ones.
        if state.epoch != epoch {
            return Ok(false);
        }
        if let Err(error) = written {
            state.ledger.stats.failed_total += 1;
            return Err(error);
        }
        // Another thread stored the block first, or it has expired: the new file is as good.
        let before = state.ledger.remove(key, Removal::Expired);
        let until = state.ledger.until(now);
        state.ledger.insert(key, stored, size, until);
        drop(state);
        if let Some(before) = before {
            self.unlink(&blocks, key, before);
        }
        self.note_dirty(size);
        Ok(true)
    }

    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError> {
        let (stored, blocks, epoch) = {
            let mut state = self.state();
            let Some(stored) = state.ledger.touch(now, key) else {
                state.ledger.stats.misses_total += 1;
                return Ok(false);
            };
            (stored, Arc::clone(&state.blocks), state.epoch)
        };
        if stored.len != out.len() as u64 {
            return Err(TierError::Length {
                want: out.len(),
                got: to_usize(stored.len),
            });
        }
        let read = read_block(&blocks, key, stored, out);
        let mut state = self.state();
        if let Ok(true) = read {
            state.ledger.stats.hits_total += 1;
            return Ok(true);
        }
        state.ledger.stats.misses_total += 1;
        let is_current = state.epoch == epoch;
        drop(state);
        // Cleared during the read: the ledger no longer has the block.
        if !is_current {
            return Ok(false);
        }
        match read {
            // Evicted or removed in between: a miss.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.forget_unreadable(key, stored, Removal::Removed);
            }
            Err(error) => {
                let path = self.path_of(key, stored);
                tracing::warn!("{} cannot be read: {error}", path.display());
                self.forget_unreadable(key, stored, Removal::Corrupt);
            }
            Ok(_) => {
                tracing::warn!(
                    "{} is corrupt; it is removed, and its block will be recomputed",
                    self.path_of(key, stored).display()
                );
                self.forget_unreadable(key, stored, Removal::Corrupt);
            }
        }
        Ok(false)
    }

    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize> {
        let stored = self.state().ledger.peek(now, key)?;
        usize::try_from(stored.len).ok()
    }

    fn remove(&self, key: &[u8]) -> bool {
        self.forget(key, Removal::Removed)
    }

    fn expire(&self, now: SimTime, count_max: usize) -> usize {
        let mut count = 0;
        while count < count_max {
            let Some(key) = self.state().ledger.pop_due(now) else {
                break;
            };
            self.forget(&key, Removal::Expired);
            count += 1;
        }
        count
    }

    fn sweep(&self, count_max: usize) -> usize {
        let cleared = self.state().cleared.pop();
        drop(cleared); // slow, so not under the lock
        if !self.has_old.swap(false, Ordering::AcqRel) {
            return 0;
        }
        let mut count = 0;
        let Ok(entries) = fs::read_dir(&self.options.path) else {
            return 0;
        };
        for entry in entries.flatten() {
            if !entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(OLD.as_bytes())
            {
                continue;
            }
            let folder = entry.path();
            for file in fs::read_dir(&folder).into_iter().flatten().flatten() {
                if count == count_max {
                    self.has_old.store(true, Ordering::Release);
                    return count;
                }
                remove_file(&file.path());
                count += 1;
            }
            // A write in progress may still add a file.
            if fs::remove_dir(&folder).is_err() {
                self.has_old.store(true, Ordering::Release);
            }
        }
        count
    }

    fn take_changes(&self, out: &mut Vec<TierChange>) -> bool {
        self.state().ledger.take_changes(out)
    }

    fn keys(&self) -> Vec<Box<[u8]>> {
        self.state().ledger.keys()
    }

    fn stats(&self) -> TierStats {
        self.state().ledger.stats
    }

    fn clear(&self) {
        let root = &self.options.path;
        let mut state = self.state();
        let cleared = state.ledger.clear();
        state.cleared.push(cleared);
        state.epoch += 1;
        // After the rename, no start finds the blocks again.
        let moved = (|| {
            let old = format!("{OLD}{}", crate::clock::unix_ns());
            fs::rename(root.join(BLOCKS), root.join(old))?;
            fs::create_dir(root.join(BLOCKS))?;
            open_folder(&root.join(BLOCKS))
        })();
        match moved {
            Ok(blocks) => state.blocks = Arc::new(blocks),
            Err(error) => {
                tracing::warn!(
                    "{} cannot be emptied: {error}; stop the engine and delete it",
                    root.display()
                );
            }
        }
        self.has_old.store(true, Ordering::Release);
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        // Marks the folder as used last, so that it is evicted last.
        let _ = self.lock.set_modified(SystemTime::now());
        // Closing is not enough: a child process that another thread is starting has the file open
        // until its exec.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// Files of folders that no process uses.
#[derive(Default)]
struct Others {
    folders: VecDeque<Other>,
    bytes: u64,
}

struct Other {
    path: PathBuf,
    /// Oldest first, with their bytes.
    files: VecDeque<(PathBuf, u64)>,
}

/// A file of another folder that is to be evicted.
struct OtherFile {
    folder: PathBuf,
    path: PathBuf,
    is_last: bool,
}

impl Others {
    fn find(folders: &[PathBuf]) -> Others {
        let mut others = Others::default();
        for path in folders {
            if use_other(path).is_none() {
                continue;
            }
            let mut files = Vec::new();
            list_files(path, &mut files, 0);
            files.sort();
            let files: VecDeque<_> = files
                .into_iter()
                .map(|(_, path, len)| (path, len))
                .collect();
            let bytes = files.iter().map(|(_, len)| *len);
            others.bytes = bytes.fold(others.bytes, u64::saturating_add);
            if !files.is_empty() {
                others.folders.push_back(Other {
                    path: path.clone(),
                    files,
                });
            }
        }
        others
    }

    fn pop(&mut self) -> Option<OtherFile> {
        let folder = self.folders.front_mut()?;
        let popped = folder.files.pop_front().map(|(path, len)| {
            self.bytes = self.bytes.saturating_sub(len);
            OtherFile {
                folder: folder.path.clone(),
                path,
                is_last: folder.files.is_empty(),
            }
        });
        if folder.files.is_empty() {
            self.folders.pop_front();
        }
        if self.folders.is_empty() {
            self.bytes = 0;
        }
        popped
    }
}

impl OtherFile {
    /// Removes it, unless a process has started to use its folder.
    fn remove(&self) {
        let Some(_lock) = use_other(&self.folder) else {
            return;
        };
        remove_file(&self.path);
        if self.is_last {
            let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
            for entry in entries {
                let _ = fs::remove_dir(entry.path());
            }
            remove_file(&self.folder.join("lock"));
            if fs::remove_dir(&self.folder).is_ok() {
                remove_file(&self.folder.with_extension("json"));
            }
        }
    }
}

/// The lock of another folder; `None` if a process holds it.
fn use_other(folder: &Path) -> Option<File> {
    let lock = open_regular(&folder.join("lock")).or_else(|_| open_folder(folder).map(File::from));
    let lock = lock.ok()?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .ok()
        .map(|()| lock)
}

/// Files of blocks in a folder and its subfolders, with the times of their writing and their sizes.
fn list_files(folder: &Path, out: &mut Vec<(SystemTime, PathBuf, u64)>, depth: usize) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if depth == 0 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list_files(&path, out, depth + 1);
        } else if let Some((key, stored)) = parse_name(entry.file_name().as_encoded_bytes()) {
            let written = UNIX_EPOCH + Duration::from_nanos(stored.written_unix_ns);
            // Of a long key the name does not tell the length.
            let key_bytes = key.map_or(NAMED_KEY_BYTES_MAX, |key| key.len());
            out.push((written, path, file_bytes(key_bytes, stored.len)));
        } else if path.extension().is_some_and(|e| e == "kv" || e == "part") {
            let Ok(meta) = entry.metadata() else { continue };
            let written = meta.modified().unwrap_or(UNIX_EPOCH);
            out.push((written, path, meta.len()));
        }
    }
}

/// Opens an existing file if it is regular: a FIFO would block, and a link may lead anywhere.
fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    checked_regular(rustix::fs::open(path, flags, Mode::empty())?.into())
}

/// Opens or creates the lock file, and keeps its contents.
fn open_lock(path: &Path) -> io::Result<File> {
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    checked_regular(rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?.into())
}

fn checked_regular(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::other("it is not a regular file"))
}

fn open_folder(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Writes a new file. An error names the operation.
fn write_file(
    folder: &OwnedFd,
    name: &str,
    head: &[u8],
    block: &[u8],
    sync: bool,
) -> Result<(), (&'static str, io::Error)> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o644))
        .map_err(|error| ("creating", error.into()))?;
    let mut file = File::from(file);
    let mut slices = [IoSlice::new(head), IoSlice::new(block)];
    let mut slices = &mut slices[..];
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(("writing", io::ErrorKind::WriteZero.into())),
            Ok(count) => IoSlice::advance_slices(&mut slices, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(("writing", error)),
        }
    }
    if sync {
        file.sync_data().map_err(|error| ("syncing", error))?;
    }
    Ok(())
}

/// The contents of a file before its block.
struct Head {
    key: Box<[u8]>,
    len: u64,
    checksum: u64,
    /// `u64::MAX`: no expiry.
    until_unix_ns: u64,
}

impl Head {
    /// Header and key. Fields: magic 8, key length 2, zero 6, block length 8, block checksum 8,
    /// expiry 8, zero 16, checksum of all these and the key 8.
    fn bytes(&self) -> Vec<u8> {
        let mut head = Vec::with_capacity(HEADER_BYTES + self.key.len());
        head.extend(MAGIC);
        head.extend(to_u16(self.key.len()).to_le_bytes());
        head.extend([0; 6]);
        head.extend(self.len.to_le_bytes());
        head.extend(self.checksum.to_le_bytes());
        head.extend(self.until_unix_ns.to_le_bytes());
        head.extend([0; 24]);
        head.extend(&self.key);
        let sum = xxh3_64(&head);
        head[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
        head
    }

    fn read(file: &mut impl Read) -> io::Result<Option<Head>> {
        let mut head = vec![0; HEADER_BYTES];
        file.read_exact(&mut head)?;
        let u64_at = |head: &[u8], at: usize| {
            u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"))
        };
        let key_bytes = usize::from(u16::from_le_bytes([head[8], head[9]]));
        if head[..8] != MAGIC {
            return Ok(None);
        }
        head.resize(HEADER_BYTES + key_bytes, 0);
        file.read_exact(&mut head[HEADER_BYTES..])?;
        let sum = u64_at(&head, HEADER_BYTES - 8);
        head[HEADER_BYTES - 8..HEADER_BYTES].fill(0);
        Ok((xxh3_64(&head) == sum).then(|| Head {
            key: head[HEADER_BYTES..].into(),
            len: u64_at(&head, 16),
            checksum: u64_at(&head, 24),
            until_unix_ns: u64_at(&head, 32),
        }))
    }
}

fn file_bytes(key_bytes: usize, len: u64) -> u64 {
    // A file or its name may state any length.
    ((HEADER_BYTES + key_bytes) as u64).saturating_add(len)
}

/// Reads `bytes` as a file's head: as they are, and with the checksum that they should have.
///
/// # Panics
/// If a head is not written as it was read.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_head(bytes: &[u8]) {
    let _ = Head::read(&mut &*bytes);
    if bytes.len() < HEADER_BYTES {
        assert!(Head::read(&mut &*bytes).is_err(), "a whole head");
        return;
    }
    let mut file = bytes.to_vec();
    file[..8].copy_from_slice(&MAGIC);
    let key_bytes = usize::from(u16::from_le_bytes([file[8], file[9]]));
    let end = HEADER_BYTES + key_bytes;
    let sum = HEADER_BYTES - 8;
    if file.len() < end {
        assert!(Head::read(&mut &*file).is_err(), "a whole key");
        return;
    }
    file[sum..HEADER_BYTES].fill(0);
    let right = xxh3_64(&file[..end]).to_le_bytes();
    file[sum..HEADER_BYTES].copy_from_slice(&right);
    let head = Head::read(&mut &*file).expect("it is complete");
    let head = head.expect("its checksum is right");
    let _ = file_bytes(head.key.len(), head.len);
    let again = Head::read(&mut &*head.bytes()).expect("it is complete");
    let again = again.expect("its checksum is right");
    assert_eq!(again.key, head.key);
    assert_eq!(
        (again.len, again.checksum, again.until_unix_ns),
        (head.len, head.checksum, head.until_unix_ns)
    );
    file[sum] ^= 1;
    assert!(Head::read(&mut &*file).expect("it is complete").is_none());
}

/// Reads the head of a file that has the length it states, and the time of its writing. The block is verified only when
/// it is read.
fn read_head(path: &Path) -> io::Result<(Head, u64)> {
    let mut file = open_regular(path)?;
    let head = Head::read(&mut file)?;
    let meta = file.metadata()?;
    let written = meta.modified().unwrap_or(UNIX_EPOCH);
    let head = head.filter(|head| file_bytes(head.key.len(), head.len) == meta.len());
    let head = head.ok_or_else(|| io::Error::other("it is truncated"))?;
    Ok((head, since_1970_ns(written)))
}

/// Reads a file's block into `out`. `false` if the file has another key or fails verification.
fn read_block(folder: &OwnedFd, key: &[u8], stored: Stored, out: &mut [u8]) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        folder,
        name_of(key, stored),
        flags,
        Mode::empty(),
    )?);
    let whole: io::Result<bool> = (|| {
        let Some(head) = Head::read(&mut file)? else {
            return Ok(false);
        };
        if *head.key != *key || head.len != out.len() as u64 {
            return Ok(false);
        }
        file.read_exact(out)?;
        Ok(file.read(&mut [0])? == 0 && checksum(out) == head.checksum)
    })();
    match whole {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        whole => whole,
    }
}

/// Finds the block of a file in the folder of blocks; `None` if it has none. Removes what a process left that died as it
/// wrote.
///
/// # Errors
/// It cannot be a block's file.
fn find(blocks: &OwnedFd, entry: &fs::DirEntry) -> io::Result<Option<(Box<[u8]>, Stored)>> {
    let name = entry.file_name();
    let bytes = name.as_encoded_bytes();
    if bytes.ends_with(b".part") {
        remove_file(&entry.path());
    }
    if !bytes.ends_with(b".kv") {
        return Ok(None);
    }
    // Without a call for each file, on most file systems.
    if !entry.file_type()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if let Some((Some(key), stored)) = parse_name(bytes) {
        return Ok(Some((key, stored)));
    }
    let (head, written_unix_ns) = read_head(&entry.path())?;
    let stored = Stored {
        len: head.len,
        until_unix_ns: head.until_unix_ns,
        written_unix_ns,
    };
    // Of a long key, or of a version before 0.3.
    let stored = match parse_name(bytes) {
        Some((_, named)) => named,
        None => stored,
    };
    let wanted = name_of(&head.key, stored);
    if wanted != name {
        if name != old_name_of(&head.key) {
            return Err(io::Error::other("it is the file of another block"));
        }
        rustix::fs::renameat(blocks, &*name, blocks, wanted)?;
    }
    Ok(Some((head.key, stored)))
}

fn since_1970_ns(time: std::time::SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH);
    since.map_or(0, nanos)
}

fn remove_file(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{} cannot be removed: {error}", path.display());
    }
}
