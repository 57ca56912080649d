//! Blocks in files, one each, that survive their process.
//!
//! ```text
//!   header (64 bytes): magic, version, lengths, time to live, checksums │ key │ block
//! ```
//!
//! A file is written under a name that nobody looks for, synced, and renamed: under its own name it
//! is whole, or it is not there. A machine that loses power may lose the rename, which is a miss.
//! Whatever else happens to a file, its checksums tell.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::FlockOperation;
use slipstream_base::SimTime;
use xxhash_rust::xxh3::xxh3_64;

use super::{Medium, Tier, TierChange, TierError, TierStats};
use crate::checksum;
use crate::ledger::{Ledger, Why};

const MAGIC: [u8; 8] = *b"SLIPKVB1";
const HEADER_BYTES: usize = 64;
/// Longer keys than this are named by their hash: a file's name has at most 255 bytes.
const NAMED_KEY_BYTES_MAX: usize = 100;

/// Where a disk tier is, and how large.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// A folder of its own; made if it is not there.
    pub path: PathBuf,
    /// Bytes of all files together.
    pub bytes: u64,
    /// How long a block is kept, ns; `None`: until it is evicted.
    pub ttl_ns: Option<u64>,
    /// Whether a block is on the disk, and not only in the system's memory, before it counts as
    /// stored. Without it a process may die at any moment, but not the machine.
    pub sync: bool,
}

/// Files in a folder. All calls do disk I/O and take their time; none holds a lock meanwhile.
pub struct DiskTier {
    options: DiskOptions,
    state: Mutex<State>,
    /// Held while the tier lives, so that nobody else opens the folder.
    lock: File,
}

struct State {
    ledger: Ledger<Len>,
    temporary: u64,
}

/// Bytes of the block.
type Len = u64;

impl DiskTier {
    /// Opens a folder and finds what an earlier process has left there. Files that are torn are
    /// removed, and counted as corrupt. `unix_ns` is [`crate::clock::unix_ns`].
    ///
    /// # Errors
    ///
    /// [`TierError::Disk`] if the folder cannot be used, [`TierError::InUse`] if somebody does.
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
        fs::create_dir_all(root).map_err(|error| disk("creating the folder", root, error))?;
        let lock_path = root.join("lock");
        let lock = File::create(&lock_path).map_err(|error| disk("creating", &lock_path, error))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(TierError::InUse { path: root.clone() });
            }
            Err(error) => return Err(disk("locking", &lock_path, error.into())),
        }
        let mut ledger = Ledger::new(options.ttl_ns);
        let mut found = Vec::new();
        let entries = fs::read_dir(root).map_err(|error| disk("reading", root, error))?;
        for entry in entries {
            let path = entry.map_err(|error| disk("reading", root, error))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                // Of a process that died while it wrote.
                Some("part") => remove_file(&path),
                Some("kv") => match read_head(&path) {
                    Ok(head) if name_of(&head.key) == path.file_name().unwrap_or_default() => {
                        found.push((modified(&path), head));
                    }
                    _ => {
                        tracing::warn!("{} is no whole block and is removed", path.display());
                        ledger.stats.corrupt_total += 1;
                        remove_file(&path);
                    }
                },
                _ => {} // not ours
            }
        }
        found.sort_by_key(|(modified, _)| *modified); // the last used is not known, the last written is
        for (written, head) in found {
            // Told to another time to live, or by another clock, a file lives no longer than told
            // now.
            let mut left = head.until_unix_ns.saturating_sub(unix_ns);
            if let Some(ttl) = options.ttl_ns {
                let age = unix_ns.saturating_sub(since_1970_ns(written));
                left = left.min(ttl.saturating_sub(age));
            }
            let until = match (head.until_unix_ns, options.ttl_ns) {
                (u64::MAX, None) => SimTime::MAX,
                _ => now + left,
            };
            ledger.enter(
                &head.key,
                head.len,
                file_bytes(head.key.len(), head.len),
                until,
            );
        }
        ledger.stats.stored_total = 0; // not by this process
        let tier = DiskTier {
            options,
            state: Mutex::new(State {
                ledger,
                temporary: 0,
            }),
            lock,
        };
        tier.expire(now, usize::MAX);
        tier.make_room(0);
        Ok(Arc::new(tier))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path_of(&self, key: &[u8]) -> PathBuf {
        self.options.path.join(name_of(key))
    }

    /// Evicts until `bytes` more fit.
    fn make_room(&self, bytes: u64) {
        loop {
            let evicted = {
                let mut state = self.state();
                if state.ledger.stats.bytes + bytes <= self.options.bytes {
                    return;
                }
                let Some(key) = state.ledger.oldest(|_| true) else {
                    return;
                };
                state.ledger.remove(&key, Why::Evicted);
                key
            };
            remove_file(&self.path_of(&evicted));
        }
    }

    fn forget(&self, key: &[u8], why: Why) -> bool {
        let was_held = self.state().ledger.remove(key, why).is_some();
        if was_held {
            remove_file(&self.path_of(key));
        }
        was_held
    }

    fn write(&self, part: &Path, path: &Path, key: &[u8], bytes: &[u8]) -> Result<(), TierError> {
        let disk = |what| {
            let path = part.to_path_buf();
            move |source| TierError::Disk { path, what, source }
        };
        let until_unix_ns = self
            .options
            .ttl_ns
            .map_or(u64::MAX, |ttl| crate::clock::unix_ns().saturating_add(ttl));
        let head = Head {
            key: key.into(),
            len: bytes.len() as u64,
            checksum: checksum(bytes),
            until_unix_ns,
        };
        let mut file = File::create_new(part).map_err(disk("creating"))?;
        file.write_all(&head.bytes()).map_err(disk("writing"))?;
        file.write_all(bytes).map_err(disk("writing"))?;
        if self.options.sync {
            file.sync_data().map_err(disk("syncing"))?;
        }
        fs::rename(part, path).map_err(disk("renaming"))
    }
}

impl Tier for DiskTier {
    fn medium(&self) -> Medium {
        Medium::Disk
    }

    fn put(&self, now: SimTime, key: &[u8], bytes: &[u8]) -> Result<bool, TierError> {
        let size = file_bytes(key.len(), bytes.len() as u64);
        if size > self.options.bytes || key.len() > usize::from(u16::MAX) {
            self.state().ledger.stats.failed_total += 1;
            return Err(TierError::TooLarge {
                bytes: bytes.len(),
                max: usize::try_from(self.options.bytes).unwrap_or(usize::MAX),
            });
        }
        let number = {
            let mut state = self.state();
            if state.ledger.touch(now, key).is_some() {
                return Ok(false);
            }
            state.temporary += 1;
            state.temporary
        };
        self.expire(now, 16);
        self.make_room(size);
        let part = self.options.path.join(format!("{number}.part"));
        if let Err(error) = self.write(&part, &self.path_of(key), key, bytes) {
            remove_file(&part);
            self.state().ledger.stats.failed_total += 1;
            return Err(error);
        }
        let mut state = self.state();
        if state.ledger.peek(SimTime::ZERO, key).is_some() {
            // Another thread was faster, or its time has come: the file is ours either way.
            state.ledger.remove(key, Why::Expired);
        }
        let until = state.ledger.until(now);
        state.ledger.enter(key, bytes.len() as u64, size, until);
        Ok(true)
    }

    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError> {
        let len = {
            let mut state = self.state();
            let Some(len) = state.ledger.touch(now, key) else {
                state.ledger.stats.misses_total += 1;
                return Ok(false);
            };
            len
        };
        if len != out.len() as u64 {
            return Err(TierError::Length {
                want: out.len(),
                got: len as usize,
            });
        }
        match read_block(&self.path_of(key), key, out) {
            Ok(true) => {
                self.state().ledger.stats.hits_total += 1;
                return Ok(true);
            }
            // Evicted or removed meanwhile: no harm done.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.forget(key, Why::Removed);
            }
            Ok(false) => {
                tracing::warn!(
                    "{} is not what was stored; it is removed, and its block computed again",
                    self.path_of(key).display()
                );
                self.forget(key, Why::Corrupt);
            }
            Err(error) => {
                tracing::warn!("{} cannot be read: {error}", self.path_of(key).display());
                self.forget(key, Why::Corrupt);
            }
        }
        self.state().ledger.stats.misses_total += 1;
        Ok(false)
    }

    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize> {
        let len = self.state().ledger.peek(now, key)?;
        usize::try_from(len).ok()
    }

    fn remove(&self, key: &[u8]) -> bool {
        self.forget(key, Why::Removed)
    }

    fn expire(&self, now: SimTime, count_max: usize) -> usize {
        let mut count = 0;
        while count < count_max {
            let Some(key) = self.state().ledger.pop_due(now) else {
                break;
            };
            self.forget(&key, Why::Expired);
            count += 1;
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
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        // Closing is not enough: a child that another thread is about to start has the file open
        // as well until it begins.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// What a file says before its block.
struct Head {
    key: Box<[u8]>,
    len: u64,
    checksum: u64,
    /// `u64::MAX`: for ever.
    until_unix_ns: u64,
}

impl Head {
    /// Header and key. Fields: magic 8, key length 2, zero 6, block length 8, block checksum 8,
    /// end of life 8, zero 16, checksum of all this with the key 8.
    fn bytes(&self) -> Vec<u8> {
        let mut head = Vec::with_capacity(HEADER_BYTES + self.key.len());
        head.extend(MAGIC);
        head.extend((self.key.len() as u16).to_le_bytes());
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

    fn read(file: &mut File) -> io::Result<Option<Head>> {
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
    (HEADER_BYTES + key_bytes) as u64 + len
}

/// The head of a file that is as long as it says. Its block is not looked at before it is read.
fn read_head(path: &Path) -> io::Result<Head> {
    let mut file = File::open(path)?;
    let head = Head::read(&mut file)?;
    let bytes = file.metadata()?.len();
    head.filter(|head| file_bytes(head.key.len(), head.len) == bytes)
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether the file has this very block, whole; it is in `out` then.
fn read_block(path: &Path, key: &[u8], out: &mut [u8]) -> io::Result<bool> {
    let mut file = File::open(path)?;
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

fn name_of(key: &[u8]) -> std::ffi::OsString {
    use std::fmt::Write as _;
    let mut name = String::with_capacity(2 * key.len() + 3);
    if key.len() <= NAMED_KEY_BYTES_MAX {
        for byte in key {
            let _ = write!(name, "{byte:02x}");
        }
    } else {
        let _ = write!(name, "h{:032x}", xxhash_rust::xxh3::xxh3_128(key));
    }
    name.push_str(".kv");
    name.into()
}

fn modified(path: &Path) -> std::time::SystemTime {
    let meta = fs::metadata(path).and_then(|meta| meta.modified());
    meta.unwrap_or(std::time::UNIX_EPOCH)
}

fn since_1970_ns(time: std::time::SystemTime) -> u64 {
    let since = time.duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

fn remove_file(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{} cannot be removed: {error}", path.display());
    }
}
