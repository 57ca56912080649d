//! How processes find each other: a directory with a file for each, renewed while it lives.
//!
//! A process publishes a [`Record`] and renews it by a heartbeat: it writes a new file beside the
//! old one and renames it over, so that a reader sees one or the other, never half of one. Readers
//! look at the directory now and then.
//!
//! A lease is judged by the reader's own clock: it is over when the record's `beat` has not
//! changed for as long as the record says. Clocks of two hosts need not agree, and a file left by
//! a process that was killed counts for one lease at most. Files that nobody renews for ten leases
//! are removed by whoever sees them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest record that is read, bytes; one of 256 shards takes 6 KiB.
const RECORD_BYTES_MAX: u64 = 256 << 10;

/// Files that are looked at in one directory. More are counted as bad: somebody else writes here.
const FILES_MAX: usize = 4096;

/// A file that was not renewed for so many leases is removed.
const LEASES_TO_REMOVAL: u64 = 10;

/// What a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It serves clients, and is dialed by workers.
    Frontend,
    /// It runs engines.
    Worker,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Frontend => "frontend",
            Role::Worker => "worker",
        }
    }
}

/// What a process says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// What it is.
    pub role: Role,
    /// Drawn at its start: another run is another instance.
    pub instance: u64,
    /// For people: host and process.
    pub name: String,
    /// Of the cluster as it knows it.
    pub fingerprint: u64,
    /// Frontends: where its shards listen for workers, by shard.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<String>,
    /// Workers: which ones it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<u32>,
    /// The record counts for so long after its last renewal, ms.
    pub lease_ms: u64,
    /// Renewals so far.
    pub beat: u64,
}

/// Why a record could not be published or the directory not be read. Retrying may help.
#[derive(Debug, thiserror::Error)]
#[error("the discovery directory {}: {source}; {hint}", path.display())]
pub struct DiscoveryError {
    /// Where.
    pub path: PathBuf,
    hint: &'static str,
    /// What the system said.
    pub source: io::Error,
}

fn problem(path: &Path, hint: &'static str) -> impl FnOnce(io::Error) -> DiscoveryError {
    let path = path.to_owned();
    move |source| DiscoveryError { path, hint, source }
}

/// A record that this process keeps in a directory. Dropping it removes the file.
#[derive(Debug)]
pub struct Published {
    record: Record,
    path: PathBuf,
}

impl Published {
    /// Publishes `record` in `directory`, which is made if it is not there.
    ///
    /// # Errors
    /// [`DiscoveryError`].
    pub fn new(directory: &Path, record: Record) -> Result<Published, DiscoveryError> {
        make_directory(directory)?;
        let path = directory.join(file_name(&record));
        let mut published = Published { record, path };
        published.renew()?;
        Ok(published)
    }

    /// Says that the process still lives.
    ///
    /// # Errors
    /// [`DiscoveryError`]; the last record stays, and its lease runs out unless a later renewal
    /// works.
    pub fn renew(&mut self) -> Result<(), DiscoveryError> {
        self.record.beat += 1;
        let text = serde_json::to_string(&self.record).expect("a record is plain data");
        let fresh = self.path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(text.as_bytes())?;
            // Not synced: after a crash of the host its processes are gone too.
            drop(file);
            fs::rename(&fresh, &self.path)
        };
        write().map_err(problem(
            &self.path,
            "see that it can be written, or name another with --discovery",
        ))
    }

    /// Where the record is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The record, as last written.
    pub fn record(&self) -> &Record {
        &self.record
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // If it cannot be removed its lease ends it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Renews a record until it is dropped, which also takes the record away.
#[derive(Debug)]
pub struct Heartbeat {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Renews `published` three times in its lease, from a thread of its own. `on_error` hears of
    /// renewals that fail.
    ///
    /// # Errors
    /// If the thread cannot be made.
    pub fn start(
        mut published: Published,
        on_error: impl Fn(&DiscoveryError) + Send + 'static,
    ) -> io::Result<Heartbeat> {
        let (stop, stopped) = mpsc::channel();
        let pause = Duration::from_millis((published.record.lease_ms / 3).max(1));
        let thread = std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || {
                while stopped.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Timeout) {
                    if let Err(error) = published.renew() {
                        on_error(&error);
                    }
                }
            })?;
        Ok(Heartbeat {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

fn file_name(record: &Record) -> String {
    format!("{}-{:016x}.json", record.role.name(), record.instance)
}

#[cfg(unix)]
fn make_directory(directory: &Path) -> Result<(), DiscoveryError> {
    use std::os::unix::fs::DirBuilderExt;
    // Who may write here may send workers to a frontend of their own: nobody but us.
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(directory).map_err(problem(
        directory,
        "name a directory that can be made with --discovery",
    ))
}

#[cfg(not(unix))]
fn make_directory(directory: &Path) -> Result<(), DiscoveryError> {
    fs::create_dir_all(directory).map_err(problem(
        directory,
        "name a directory that can be made with --discovery",
    ))
}

/// What a look at the directory found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A process is there.
    Appeared(Record),
    /// Its lease is over, or it took its record away.
    Vanished(Record),
}

/// What a watch has seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchCounts {
    /// Looks at a file that held no record: cut short, or not ours.
    pub bad: u64,
    /// Leases that ran out.
    pub expired: u64,
    /// Files removed because nobody had renewed them for long.
    pub removed: u64,
}

/// Watches a directory. It reads no clock: who looks says what time it is.
#[derive(Debug)]
pub struct Watch {
    directory: PathBuf,
    /// By file name.
    known: BTreeMap<String, Known>,
    counts: WatchCounts,
}

#[derive(Debug)]
struct Known {
    record: Record,
    renewed_ns: u64,
    alive: bool,
}

impl Watch {
    /// A watch of `directory`, which need not exist yet.
    pub fn new(directory: &Path) -> Watch {
        Watch {
            directory: directory.to_owned(),
            known: BTreeMap::new(),
            counts: WatchCounts::default(),
        }
    }

    /// Looks at the directory at `now_ns` (of any clock that does not run back), and adds what has
    /// changed to `changes`, by file name.
    ///
    /// A file that holds no record is counted, and its process judged by its last good one.
    ///
    /// # Errors
    /// [`DiscoveryError`] if the directory cannot be read; leases run on all the same.
    pub fn look(&mut self, now_ns: u64, changes: &mut Vec<Change>) -> Result<(), DiscoveryError> {
        let found = self.read_all();
        if let Ok(found) = &found {
            self.forget_missing(found, changes);
            for (name, record) in found {
                if let Some(record) = record {
                    self.note(name, record, now_ns, changes);
                }
            }
        }
        self.expire(now_ns, changes);
        found.map(|_| ())
    }

    /// What the watch has seen so far.
    pub fn counts(&self) -> WatchCounts {
        self.counts
    }

    /// Records by file name; `None` for a file that holds none.
    fn read_all(&mut self) -> Result<BTreeMap<String, Option<Record>>, DiscoveryError> {
        let unreadable = "see that it can be read, or name another with --discovery";
        let mut found = BTreeMap::new();
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(problem(&self.directory, unreadable)(error)),
        };
        for entry in entries {
            let entry = entry.map_err(problem(&self.directory, unreadable))?;
            let name = entry.file_name();
            let Some(name) = name.to_str() else { continue };
            if Path::new(name).extension().is_none_or(|ext| ext != "json") {
                continue;
            }
            if found.len() == FILES_MAX {
                self.counts.bad += 1;
                break;
            }
            let record = read_record(&entry.path()).filter(|record| file_name(record) == name);
            if record.is_none() {
                self.counts.bad += 1;
            }
            found.insert(name.to_owned(), record);
        }
        Ok(found)
    }

    fn forget_missing(
        &mut self,
        found: &BTreeMap<String, Option<Record>>,
        changes: &mut Vec<Change>,
    ) {
        self.known.retain(|name, known| {
            let there = found.contains_key(name);
            if !there && known.alive {
                changes.push(Change::Vanished(known.record.clone()));
            }
            there
        });
    }

    fn note(&mut self, name: &str, record: &Record, now_ns: u64, changes: &mut Vec<Change>) {
        match self.known.get_mut(name) {
            Some(known) if known.record.beat == record.beat => {}
            Some(known) => {
                known.record.clone_from(record);
                known.renewed_ns = now_ns;
                if !known.alive {
                    known.alive = true;
                    changes.push(Change::Appeared(record.clone()));
                }
            }
            None => {
                let known = Known {
                    record: record.clone(),
                    renewed_ns: now_ns,
                    alive: true,
                };
                self.known.insert(name.to_owned(), known);
                changes.push(Change::Appeared(record.clone()));
            }
        }
    }

    fn expire(&mut self, now_ns: u64, changes: &mut Vec<Change>) {
        let counts = &mut self.counts;
        let directory = &self.directory;
        self.known.retain(|name, known| {
            let silent_ms = now_ns.saturating_sub(known.renewed_ns) / 1_000_000;
            if silent_ms > known.record.lease_ms && known.alive {
                known.alive = false;
                counts.expired += 1;
                changes.push(Change::Vanished(known.record.clone()));
            }
            let old = known.record.lease_ms.saturating_mul(LEASES_TO_REMOVAL);
            let remove = silent_ms > old;
            if remove && fs::remove_file(directory.join(name)).is_ok() {
                counts.removed += 1;
            }
            !remove
        });
    }
}

fn read_record(path: &Path) -> Option<Record> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
    let record: Record = serde_json::from_str(&text).ok()?;
    (record.lease_ms > 0).then_some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn record(role: Role, instance: u64) -> Record {
        Record {
            role,
            instance,
            name: "host:1".into(),
            fingerprint: 7,
            shards: vec!["127.0.0.1:1".into()],
            workers: vec![],
            lease_ms: 100,
            beat: 0,
        }
    }

    fn looked(watch: &mut Watch, now_ms: u64) -> Vec<Change> {
        let mut changes = Vec::new();
        watch.look(now_ms * MS, &mut changes).unwrap();
        changes
    }

    fn ids(changes: &[Change]) -> Vec<(bool, u64)> {
        changes
            .iter()
            .map(|change| match change {
                Change::Appeared(record) => (true, record.instance),
                Change::Vanished(record) => (false, record.instance),
            })
            .collect()
    }

    #[test]
    fn processes_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("not/yet/there");
        let mut watch = Watch::new(&place);
        assert_eq!(looked(&mut watch, 0), []);
        let a = Published::new(&place, record(Role::Frontend, 1)).unwrap();
        let b = Published::new(&place, record(Role::Worker, 2)).unwrap();
        assert_eq!(ids(&looked(&mut watch, 1)), [(true, 1), (true, 2)]);
        assert_eq!(looked(&mut watch, 2), [], "no news");
        drop(a);
        assert_eq!(ids(&looked(&mut watch, 3)), [(false, 1)]);
        drop(b);
        assert_eq!(ids(&looked(&mut watch, 4)), [(false, 2)]);
        assert_eq!(fs::read_dir(&place).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_lease_ends_unless_it_is_renewed_and_begins_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(dir.path());
        let mut a = Published::new(dir.path(), record(Role::Worker, 1)).unwrap();
        assert_eq!(ids(&looked(&mut watch, 0)), [(true, 1)]);
        for now in [90, 180, 270] {
            a.renew().unwrap();
            assert_eq!(looked(&mut watch, now), []);
        }
        assert_eq!(
            looked(&mut watch, 370),
            [],
            "a lease is over after its time"
        );
        assert_eq!(ids(&looked(&mut watch, 371)), [(false, 1)]);
        assert_eq!(looked(&mut watch, 400), [], "said once");
        assert_eq!(watch.counts().expired, 1);
        a.renew().unwrap();
        assert_eq!(ids(&looked(&mut watch, 500)), [(true, 1)]);
    }

    #[test]
    fn a_file_that_nobody_renews_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let a = Published::new(dir.path(), record(Role::Worker, 1)).unwrap();
        let path = a.path().to_owned();
        std::mem::forget(a); // killed
        let mut watch = Watch::new(dir.path());
        assert_eq!(ids(&looked(&mut watch, 0)), [(true, 1)]);
        assert_eq!(ids(&looked(&mut watch, 1000)), [(false, 1)]);
        assert!(path.exists());
        assert_eq!(looked(&mut watch, 1001), []);
        assert!(!path.exists());
        assert_eq!(watch.counts().removed, 1);
    }

    #[test]
    fn a_file_cut_short_is_counted_and_the_last_good_one_stands_for_its_lease() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(dir.path());
        let a = Published::new(dir.path(), record(Role::Frontend, 1)).unwrap();
        let whole = fs::read(a.path()).unwrap();
        assert_eq!(ids(&looked(&mut watch, 0)), [(true, 1)]);
        for cut in 0..whole.len() {
            fs::write(a.path(), &whole[..cut]).unwrap();
            assert_eq!(looked(&mut watch, 50), []);
        }
        assert_eq!(watch.counts().bad, whole.len() as u64);
        assert_eq!(ids(&looked(&mut watch, 101)), [(false, 1)]);
        let mut fresh = Watch::new(dir.path());
        assert_eq!(looked(&mut fresh, 0), [], "half a record is none");
    }

    #[test]
    fn files_that_are_not_ours_are_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let a = Published::new(dir.path(), record(Role::Frontend, 1)).unwrap();
        let text = fs::read_to_string(a.path()).unwrap();
        drop(a);
        // A record under another's name, one without a lease, and one with a field of its own.
        let strange = |name: &str, text: String| fs::write(dir.path().join(name), text).unwrap();
        strange("frontend-0000000000000002.json", text.clone());
        strange(
            "frontend-0000000000000001.json",
            text.replace("\"lease_ms\":100", "\"lease_ms\":0"),
        );
        strange(
            "worker-0000000000000001.json",
            text.replace("\"beat\":1", "\"beat\":1,\"x\":2"),
        );
        strange("notes.txt", text);
        let mut watch = Watch::new(dir.path());
        assert_eq!(looked(&mut watch, 0), []);
        assert_eq!(watch.counts().bad, 3);
    }
}
