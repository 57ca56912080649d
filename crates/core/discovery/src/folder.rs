//! Entries as files of a folder that all processes can read and write.
//!
//! ```text
//!   FOLDER/KEY.json    {"lease_ms": 3000, "record": VALUE}; its modification time is the last renewal
//!   FOLDER/KEY.new     about to be renamed to KEY.json, so that no reader sees half a file
//! ```
//!
//! **Renewing** sets the file's modification time: two system calls, without opening the file, that
//! work on a full disk. On NFS the server sets it, so no two clocks are compared: an entry is alive as
//! long as its time *differs* from the last one that was seen, whatever its value.
//!
//! **Judging** is shared out, as every process watching every other would cost the square of their
//! number. Entries form a ring in the order of their keys, and each process checks the one after its
//! own: one `statx` per half lease. Only if that one was not renewed does it check the next, and so on up to
//! one that was. An entry whose time has not changed for a lease is removed, which all others see. So
//! the entry of a killed process is removed after one to two leases, even if other processes die with
//! it, and `n` processes make some `5 n` calls per lease. A process that was removed by mistake (it, or
//! its host, stood still) puts its entry again with its next renewal.
//!
//! **Watching** is inotify, which names the file that changed. Shared file systems do not report changes
//! that another host makes; there the folder's own modification time is read every
//! [`FolderOptions::poll`], and files are listed only if it changed. Of the listed files, only those
//! with a new inode are opened: replacing a file by renaming makes one. A process that finds nothing
//! changed opens no file.
//!
//! Only regular files are opened, without following links and without blocking, so a FIFO or a device
//! in the folder stops no process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Bound::{Excluded, Unbounded};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use slipstream_base::SimTime;
use slipstream_base::width::{low_u8, nanos};

use crate::notify::Notify;
use crate::{Backend, BackendError, Change, VALUE_BYTES_MAX, Waker, is_key};

/// Files that are followed. Beyond that the folder is not only ours.
const FILES_MAX: usize = 4_096;
/// Invalid files whose names are kept, so that each is reported once.
const INVALID_MAX: usize = 1_024;
/// Bytes of a file in addition to its value.
const ENVELOPE_BYTES: usize = 256;
/// Longest lease. A file with a longer one is invalid.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 3_600);
/// How often the folder's time is read although the system reports its changes.
const SLOW_POLL_NS: u64 = 5_000_000_000;
/// Modification times are as coarse as 2 s (FAT; NFS of old servers: 1 s): a folder that changed is
/// listed for so long, as a second change may leave its time as it is.
const SETTLED_NS: u64 = 2_000_000_000;
/// Shortest time between two rounds of checks, so that no lease in a file makes this process busy.
const ROUND_MIN_NS: u64 = 10_000_000;

/// Where a folder is, and how it is watched.
#[derive(Clone, Debug)]
pub struct FolderOptions {
    /// The folder; made, for this user alone, if it is not there.
    pub path: PathBuf,
    /// How often its time is read where the system does not report changes. Lower: newcomers are
    /// found sooner. Default 500 ms.
    pub poll: Duration,
    /// Advice that errors give, such as which option names another folder.
    pub hint: &'static str,
    /// Whether files are for this user alone. Default: others may read them.
    pub is_private: bool,
}

impl FolderOptions {
    /// A folder that is polled every 500 ms where it has to be.
    pub fn new(path: &Path) -> FolderOptions {
        FolderOptions {
            path: path.to_owned(),
            poll: Duration::from_millis(500),
            hint: "check that every process can read and write it",
            is_private: false,
        }
    }
}

/// Entries as files of a folder; see the module's documentation for the protocol.
#[derive(Debug)]
pub struct Folder {
    options: FolderOptions,
    notify: Notify,
    /// Entries that this process has put: text of the file, and lease.
    own: BTreeMap<String, String>,
    /// All entries that were found, by key.
    entries: BTreeMap<String, Entry>,
    /// Names of files that hold no entry.
    invalid: BTreeSet<String>,
    /// Where this process is in the ring.
    position: String,
    listed: Option<Listed>,
    next_look: SimTime,
    next_round: SimTime,
}

#[derive(Debug)]
struct Entry {
    lease_ns: u64,
    inode: u64,
    modified: (i64, i64),
    /// When `modified` was last seen to change, and last looked at.
    changed_at: SimTime,
    checked_at: SimTime,
    /// Its lease ended, and its file could not be removed.
    is_expired: bool,
}

/// The folder when it was last listed.
#[derive(Clone, Copy, Debug)]
struct Listed {
    inode: u64,
    modified: (i64, i64),
    changed_at: SimTime,
    /// The system reports all changes.
    is_reported: bool,
}

fn place(path: &Path) -> String {
    format!("discovery folder {}", path.display())
}

/// Contents of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    lease_ms: u64,
    #[serde(borrow)]
    record: &'a RawValue,
}

impl Folder {
    /// Does not touch the folder yet.
    ///
    /// # Errors
    ///
    /// [`BackendError`] if the process has no file descriptor left.
    pub fn new(options: FolderOptions) -> Result<Folder, BackendError> {
        let notify = Notify::new().map_err(|source| BackendError {
            place: place(&options.path),
            operation: "preparing to watch",
            hint: "raise ulimit -n",
            source,
        })?;
        Ok(Folder {
            options,
            notify,
            own: BTreeMap::new(),
            entries: BTreeMap::new(),
            invalid: BTreeSet::new(),
            position: random_position(),
            listed: None,
            next_look: SimTime::ZERO,
            next_round: SimTime::MAX,
        })
    }

    /// The file of an entry.
    pub fn file(&self, key: &str) -> PathBuf {
        self.options.path.join(format!("{key}.json"))
    }

    fn failed(&self, path: &Path, operation: &'static str, source: io::Error) -> BackendError {
        BackendError {
            place: place(path),
            operation,
            hint: self.options.hint,
            source,
        }
    }

    fn write(&self, key: &str, text: &str) -> Result<(), BackendError> {
        let (path, fresh) = (self.file(key), self.file(key).with_extension("new"));
        let write = || -> io::Result<()> {
            // A folder may be removed under its processes.
            make_folder(&self.options.path)?;
            // Of a process that died while it wrote. A new file: no link is followed.
            remove(&fresh)?;
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mode = if self.options.is_private {
                0o600
            } else {
                0o644
            };
            let file = rustix::fs::open(&fresh, flags, Mode::from_raw_mode(mode))?;
            // Not synced: after a crash of the host its processes are gone, too.
            File::from(file).write_all(text.as_bytes())?;
            fs::rename(&fresh, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&fresh);
            self.failed(&path, "writing", error)
        })
    }

    /// Reads the folder's time, and lists it if that has changed or `is_due`.
    fn look(
        &mut self,
        now: SimTime,
        is_due: bool,
        changes: &mut Vec<Change>,
    ) -> Result<(), BackendError> {
        let poll_ns = nanos(self.options.poll);
        self.next_look = now + poll_ns;
        let path = self.options.path.clone();
        let found = match stat(&path) {
            Ok(found) => found,
            Err(Errno::NOENT) => {
                self.listed = None;
                let keys: Vec<String> = self.entries.keys().cloned().collect();
                for key in &keys {
                    self.forget(key, changes);
                }
                return Ok(());
            }
            Err(error) => return Err(self.failed(&path, "reading", error.into())),
        };
        let before = self
            .listed
            .filter(|listed| !is_due && listed.inode == found.inode);
        let (changed_at, is_reported) = match before {
            Some(listed) if listed.modified == found.modified => {
                (listed.changed_at, listed.is_reported)
            }
            Some(listed) => (now, listed.is_reported),
            // Before the list: what changes from here on is reported or listed.
            None => (now, self.notify.watch(&path) && is_local(&path)),
        };
        let is_settled = is_reported || now.since(changed_at) > SETTLED_NS;
        if changed_at == now || !is_settled {
            self.list(now, changes)?;
        }
        self.listed = Some(Listed {
            inode: found.inode,
            modified: found.modified,
            changed_at,
            is_reported,
        });
        if is_reported {
            self.next_look = now + SLOW_POLL_NS.max(poll_ns);
        }
        Ok(())
    }

    fn list(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<(), BackendError> {
        use std::os::unix::fs::DirEntryExt;
        let path = self.options.path.clone();
        let entries = fs::read_dir(&path).map_err(|error| self.failed(&path, "listing", error))?;
        let mut found = BTreeSet::new();
        for entry in entries {
            let entry = entry.map_err(|error| self.failed(&path, "listing", error))?;
            let name = entry.file_name();
            let Some(key) = name.to_str().and_then(key_of) else {
                continue;
            };
            if found.len() == FILES_MAX {
                let reason = format!("more than {FILES_MAX} files are there");
                self.report_invalid(key, reason, changes);
                break;
            }
            found.insert(key.to_owned());
            let is_known = |known: &Entry| known.inode == entry.ino();
            if !self.entries.get(key).is_some_and(is_known) && !self.invalid.contains(key) {
                self.read(key, now, changes);
            }
        }
        let gone: Vec<String> = self
            .entries
            .keys()
            .filter(|key| !found.contains(*key))
            .cloned()
            .collect();
        for key in &gone {
            self.forget(key, changes);
        }
        self.invalid.retain(|key| found.contains(key));
        Ok(())
    }

    /// Reads a file that is new or was replaced.
    fn read(&mut self, key: &str, now: SimTime, changes: &mut Vec<Change>) {
        match read_file(&self.file(key)) {
            Ok(read) => {
                self.invalid.remove(key);
                let entry = Entry {
                    lease_ns: nanos(read.lease),
                    inode: read.inode,
                    modified: read.modified,
                    changed_at: now,
                    checked_at: now,
                    is_expired: false,
                };
                self.next_round = self.next_round.min(now + entry.lease_ns / 2);
                self.entries.insert(key.to_owned(), entry);
                changes.push(Change::Put {
                    key: key.to_owned(),
                    value: read.value,
                });
            }
            Err(Unreadable::Gone) => {
                self.invalid.remove(key);
                self.forget(key, changes);
            }
            Err(Unreadable::Invalid(reason)) => self.report_invalid(key, reason, changes),
        }
    }

    fn report_invalid(&mut self, key: &str, reason: String, changes: &mut Vec<Change>) {
        if self.invalid.len() < INVALID_MAX && self.invalid.insert(key.to_owned()) {
            let name = self.file(key).display().to_string();
            changes.push(Change::Invalid { name, reason });
        }
    }

    fn forget(&mut self, key: &str, changes: &mut Vec<Change>) {
        if let Some(entry) = self.entries.remove(key)
            && !entry.is_expired
        {
            changes.push(Change::Deleted {
                key: key.to_owned(),
            });
        }
    }

    /// Checks the entries that follow this process's in the ring, up to one that was renewed.
    fn round(&mut self, now: SimTime, changes: &mut Vec<Change>) {
        let ring: Vec<String> = {
            let from = (Excluded(self.position.as_str()), Unbounded);
            let to = (Unbounded, Excluded(self.position.as_str()));
            let after = self.entries.range::<str, _>(from);
            let before = self.entries.range::<str, _>(to);
            let all = after.chain(before).map(|(key, _)| key);
            all.filter(|key| !self.own.contains_key(*key))
                .cloned()
                .collect()
        };
        let Some(pause_ns) = ring.first().map(|key| self.entries[key].lease_ns / 2) else {
            self.next_round = SimTime::MAX;
            return;
        };
        if now.since(self.next_round) > pause_ns {
            // This process stood still, and perhaps its host with all others: no entry counts as silent.
            for entry in self.entries.values_mut() {
                entry.changed_at = now;
            }
        }
        let mut next = now + pause_ns;
        for key in &ring {
            match self.check(key, now, changes) {
                Checked::Renewed => break,
                Checked::Gone => {}
                Checked::Silent { until } => next = next.min(until),
            }
        }
        self.next_round = next.max(now + ROUND_MIN_NS);
    }

    fn check(&mut self, key: &str, now: SimTime, changes: &mut Vec<Change>) -> Checked {
        let path = self.file(key);
        let found = match stat(&path) {
            Ok(found) => found,
            Err(Errno::NOENT) => {
                self.forget(key, changes);
                return Checked::Gone;
            }
            // It cannot be judged now.
            Err(_) => return Checked::Gone,
        };
        let Some(entry) = self.entries.get_mut(key) else {
            return Checked::Gone;
        };
        let since_check = now.since(entry.checked_at);
        entry.checked_at = now;
        if entry.modified != found.modified {
            entry.modified = found.modified;
            entry.changed_at = now;
            if entry.is_expired {
                self.read(key, now, changes);
                return Checked::Renewed;
            }
            if since_check <= entry.lease_ns {
                return Checked::Renewed;
            }
            // Last checked long ago, it may have been renewed long ago as well.
            return Checked::Silent {
                until: now + entry.lease_ns + 1,
            };
        }
        let silent_ns = now.since(entry.changed_at);
        if entry.is_expired {
            return Checked::Silent {
                until: SimTime::MAX,
            };
        }
        if silent_ns < entry.lease_ns / 2 {
            return Checked::Renewed;
        }
        if silent_ns <= entry.lease_ns {
            return Checked::Silent {
                until: entry.changed_at + entry.lease_ns + 1,
            };
        }
        if remove(&path).is_ok() {
            self.forget(key, changes);
        } else {
            // Of another user, in a folder where each may remove only its own files.
            entry.is_expired = true;
            changes.push(Change::Deleted {
                key: key.to_owned(),
            });
        }
        Checked::Gone
    }
}

/// Whether an entry was renewed lately.
enum Checked {
    Renewed,
    /// Not, or it is not known; its lease ends then.
    Silent {
        until: SimTime,
    },
    Gone,
}

impl Backend for Folder {
    fn put(
        &mut self,
        _now: SimTime,
        key: &str,
        value: &str,
        lease: Duration,
    ) -> Result<(), BackendError> {
        assert!(is_key(key), "keys are made by this program: {key}");
        assert!(value.len() <= VALUE_BYTES_MAX, "values are, too");
        let record: &RawValue = serde_json::from_str(value).expect("values are JSON");
        let envelope = Envelope {
            lease_ms: nanos(lease) / 1_000_000,
            record,
        };
        let text = serde_json::to_string(&envelope).expect("it is plain data");
        make_folder(&self.options.path).map_err(|error| {
            let path = self.options.path.clone();
            self.failed(&path, "creating", error)
        })?;
        self.write(key, &text)?;
        key.clone_into(&mut self.position);
        self.own.insert(key.to_owned(), text);
        Ok(())
    }

    fn renew(&mut self, _now: SimTime, key: &str) -> Result<(), BackendError> {
        let instant = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let times = Timestamps {
            last_access: instant,
            last_modification: instant,
        };
        let path = self.file(key);
        let is_there = stat(&path).is_ok_and(|found| found.is_file);
        if is_there && rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW).is_ok()
        {
            return Ok(());
        }
        // Removed, replaced by something that no watcher reads, or on a file system that does not set
        // times (some object stores).
        match self.own.get(key) {
            Some(text) => self.write(key, text),
            None => Ok(()),
        }
    }

    fn delete(&mut self, key: &str) -> Result<(), BackendError> {
        self.own.remove(key);
        let path = self.file(key);
        remove(&path).map_err(|error| self.failed(&path, "removing", error))
    }

    fn poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError> {
        let reports = self.notify.take();
        let mut looked = Ok(());
        if reports.is_incomplete || now >= self.next_look {
            looked = self.look(now, reports.is_incomplete, changes);
        }
        for key in reports.names.iter().filter_map(|name| key_of(name)) {
            if self.entries.contains_key(key) || self.entries.len() < FILES_MAX {
                self.read(key, now, changes);
            }
        }
        if now >= self.next_round {
            self.round(now, changes);
        }
        looked.map(|()| self.next_look.min(self.next_round))
    }

    fn wait(&mut self, timeout: Duration) {
        self.notify.wait(timeout);
    }

    fn waker(&self) -> Waker {
        self.notify.waker()
    }
}

/// Why a file is no entry.
enum Unreadable {
    Gone,
    Invalid(String),
}

impl From<io::Error> for Unreadable {
    fn from(error: io::Error) -> Unreadable {
        match error.kind() {
            io::ErrorKind::NotFound => Unreadable::Gone,
            _ => Unreadable::Invalid(error.to_string()),
        }
    }
}

impl From<Errno> for Unreadable {
    fn from(error: Errno) -> Unreadable {
        match error {
            Errno::LOOP => Unreadable::Invalid("it is a symbolic link".into()),
            Errno::NXIO => Unreadable::Invalid("it is not a regular file".into()),
            error => io::Error::from(error).into(),
        }
    }
}

/// An entry as read from its file.
struct ReadEntry {
    value: String,
    lease: Duration,
    inode: u64,
    modified: (i64, i64),
}

fn read_file(path: &Path) -> Result<ReadEntry, Unreadable> {
    use std::os::unix::fs::MetadataExt;
    // Before it is opened: another kind of file is an invalid record, not a failing folder.
    if !stat(path)?.is_file {
        return Err(Unreadable::Invalid("it is not a regular file".into()));
    }
    let file = slipstream_os::files::open_regular(path, OFlags::NOFOLLOW)?;
    let meta = file.metadata()?;
    let bytes_max = VALUE_BYTES_MAX + ENVELOPE_BYTES;
    if !meta.is_file() || meta.len() > bytes_max as u64 {
        let reason = format!("it is not a regular file of at most {bytes_max} bytes");
        return Err(Unreadable::Invalid(reason));
    }
    let mut text = String::new();
    (&file).take(bytes_max as u64).read_to_string(&mut text)?;
    let envelope: Envelope<'_> =
        serde_json::from_str(&text).map_err(|error| Unreadable::Invalid(error.to_string()))?;
    let lease = Duration::from_millis(envelope.lease_ms);
    if lease.is_zero() || lease > LEASE_MAX {
        let reason = format!("`lease_ms` is {}", envelope.lease_ms);
        return Err(Unreadable::Invalid(reason));
    }
    Ok(ReadEntry {
        value: envelope.record.get().to_owned(),
        lease,
        inode: meta.ino(),
        modified: (meta.mtime(), meta.mtime_nsec()),
    })
}

/// Metadata of a file, read without opening it.
struct Stat {
    inode: u64,
    modified: (i64, i64),
    is_file: bool,
}

/// Asks the server of a shared file system, not this host's cache of it.
#[cfg(target_os = "linux")]
fn stat(path: &Path) -> rustix::io::Result<Stat> {
    use rustix::fs::{FileType, StatxFlags, statx};
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MTIME;
    let found = statx(CWD, path, flags, wanted)?;
    Ok(Stat {
        inode: found.stx_ino,
        modified: (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec.into()),
        is_file: FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile,
    })
}

#[cfg(not(target_os = "linux"))]
fn stat(path: &Path) -> rustix::io::Result<Stat> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::symlink_metadata(path)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(Stat {
        inode: found.ino(),
        modified: (found.mtime(), found.mtime_nsec()),
        is_file: found.is_file(),
    })
}

/// Whether all changes of a folder are made on this host, so that inotify reports them.
#[cfg(target_os = "linux")]
fn is_local(path: &Path) -> bool {
    // `linux/magic.h`: ext2 to ext4, tmpfs, XFS, Btrfs, overlayfs, F2FS; and ZFS's.
    const LOCAL: [u32; 7] = [
        0xef53,
        0x0102_1994,
        0x5846_5342,
        0x9123_683e,
        0x794c_7630,
        0xf2f5_2010,
        0x2fc1_2fc1,
    ];
    rustix::fs::statfs(path)
        .is_ok_and(|found| u32::try_from(found.f_type).is_ok_and(|kind| LOCAL.contains(&kind)))
}

#[cfg(not(target_os = "linux"))]
fn is_local(_path: &Path) -> bool {
    false
}

fn make_folder(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    // A user with write access here can direct other processes to an address of their own.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The key of a file; `None` if entries are not named so.
fn key_of(name: &str) -> Option<&str> {
    name.strip_suffix(".json").filter(|key| is_key(key))
}

/// Where a process is in the ring that has put no entry; spread evenly.
fn random_position() -> String {
    use std::hash::{BuildHasher, Hasher};
    let hasher = std::collections::hash_map::RandomState::new().build_hasher();
    // After a letter, as keys begin with one.
    let bits = hasher.finish();
    let letter = char::from(b'a' + low_u8(bits % 26));
    format!("{letter}{bits:x}")
}

#[cfg(test)]
mod tests;
