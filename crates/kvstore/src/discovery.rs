//! How engines find each other: a folder with a file for each rank, renewed while it lives.
//!
//! A rank publishes a [`Record`] and renews it: it writes a new file beside the old one and renames
//! it over, so that a reader sees one or the other, never half of one. Readers look now and then.
//!
//! A lease is judged by the reader's own clock: it is over when the record's `beat` has not changed
//! for as long as the record says, so the clocks of two hosts need not agree. What nobody renews for
//! ten leases is removed by whoever sees it. `docs/kvstore.md` has the file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use slipstream_base::SimTime;

/// Longest record that is read, bytes. A layout of many groups of layers takes some KiB.
const RECORD_BYTES_MAX: u64 = 256 << 10;
/// Records that are followed. More are named once, and not followed.
const RECORDS_MAX: usize = 4_096;
/// A record that was not renewed for so many leases is removed.
const LEASES_TO_REMOVAL: u64 = 10;
/// Files that hold no record and are kept in mind, so that each is named once.
const BAD_MAX: usize = 1_024;

/// What a rank of an engine says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// One for all ranks of an engine, and no other engine.
    pub engine: String,
    /// Which rank it is.
    pub rank: u32,
    /// For people: host, process and rank.
    pub name: String,
    /// Where it listens, as [`crate::Address`] writes it; at least one.
    pub addresses: Vec<String>,
    /// The start of its host: `unix:` addresses are for peers that say the same.
    pub host: String,
    /// What its blocks depend on; peers whose fields differ do not share blocks with it.
    pub identity: BTreeMap<String, String>,
    /// The record counts for so long after its last renewal, ms.
    pub lease_ms: u64,
    /// Renewals so far.
    pub beat: u64,
}

/// The folder cannot be used now. A retry may help.
#[derive(Debug, thiserror::Error)]
#[error(
    "the folder of peers: {what} {path} failed ({source}); see that every engine can read and \
     write it, or name another as peers_dir"
)]
pub struct DiscoveryError {
    /// The folder, or a file in it.
    pub path: PathBuf,
    what: &'static str,
    source: io::Error,
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> DiscoveryError {
    let path = path.to_owned();
    move |source| DiscoveryError { path, what, source }
}

/// A record that this rank keeps in a folder. Dropping it takes the file away.
#[derive(Debug)]
pub struct Published {
    record: Record,
    path: PathBuf,
}

impl Published {
    /// Publishes `record` in `folder`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError`].
    pub fn new(folder: &Path, record: Record) -> Result<Published, DiscoveryError> {
        fs::create_dir_all(folder).map_err(failed(folder, "making"))?;
        let path = folder.join(file_name(&record));
        let mut published = Published { record, path };
        published.renew()?;
        Ok(published)
    }

    /// Says that the rank still lives.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError`]; the last record stays, and its lease runs out unless a later renewal
    /// works.
    pub fn renew(&mut self) -> Result<(), DiscoveryError> {
        self.record.beat += 1;
        let text = serde_json::to_string_pretty(&self.record).expect("a record is plain data");
        let fresh = self.path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(text.as_bytes())?;
            // Not synced: after a crash of the host its engines are gone, too.
            drop(file);
            fs::rename(&fresh, &self.path)
        };
        write().map_err(failed(&self.path, "writing"))
    }

    /// Where the record is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // If it cannot be removed, its lease ends it.
        let _ = fs::remove_file(&self.path);
    }
}

/// Engine names come from outside, so a file's name has a digest of it.
fn file_name(record: &Record) -> String {
    let digest = crate::checksum(record.engine.as_bytes());
    format!("kv-{digest:016x}-{}.json", record.rank)
}

/// What a look at the folder found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A rank is there, or listens elsewhere than before.
    Appeared(Record),
    /// Its lease is over, or it took its record away.
    Vanished(Record),
    /// A file that holds no record, and why; said once a file. It is ignored.
    Bad(PathBuf, String),
}

/// Watches a folder. It reads no clock: who looks says what time it is.
#[derive(Debug)]
pub struct Watch {
    folder: PathBuf,
    /// By file name.
    known: BTreeMap<String, Known>,
    bad: BTreeSet<String>,
}

#[derive(Debug)]
struct Known {
    record: Record,
    renewed: SimTime,
    alive: bool,
}

impl Watch {
    /// A watch of `folder`, which need not exist yet.
    pub fn new(folder: &Path) -> Watch {
        Watch {
            folder: folder.to_owned(),
            known: BTreeMap::new(),
            bad: BTreeSet::new(),
        }
    }

    /// Looks at the folder at `now`, and adds what has changed to `changes`, by file name.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError`] if the folder cannot be read; leases run on all the same.
    pub fn look(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<(), DiscoveryError> {
        let found = self.read_all(changes);
        if let Ok(found) = &found {
            self.known.retain(|name, known| {
                let there = found.contains_key(name);
                if !there && known.alive {
                    changes.push(Change::Vanished(known.record.clone()));
                }
                there
            });
            self.bad.retain(|name| found.contains_key(name));
            for (name, record) in found {
                if let Some(record) = record {
                    self.bad.remove(name);
                    self.note(name, record, now, changes);
                }
            }
        }
        self.expire(now, changes);
        found.map(|_| ())
    }

    /// Records by file name; `None` for a file that holds none.
    fn read_all(
        &mut self,
        changes: &mut Vec<Change>,
    ) -> Result<BTreeMap<String, Option<Record>>, DiscoveryError> {
        let mut found = BTreeMap::new();
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(failed(&self.folder, "reading")(error)),
        };
        for entry in entries {
            let entry = entry.map_err(failed(&self.folder, "reading"))?;
            let file = entry.file_name();
            let name = file.to_string_lossy();
            if Path::new(&file).extension().is_some_and(|ext| ext == "new") {
                continue; // about to be a record
            }
            let record = if found.len() == RECORDS_MAX {
                Err(format!("more than {RECORDS_MAX} files are there"))
            } else {
                read_record(&entry.path(), &name)
            };
            let record = match record {
                Ok(record) => Some(record),
                // It was taken away since the folder was read.
                Err(why) if why.is_empty() => continue,
                Err(why) => {
                    if self.bad.len() < BAD_MAX && self.bad.insert(name.to_string()) {
                        changes.push(Change::Bad(entry.path(), why));
                    }
                    None
                }
            };
            found.insert(name.into_owned(), record);
            if found.len() > RECORDS_MAX {
                break;
            }
        }
        Ok(found)
    }

    fn note(&mut self, name: &str, record: &Record, now: SimTime, changes: &mut Vec<Change>) {
        let Some(known) = self.known.get_mut(name) else {
            let known = Known {
                record: record.clone(),
                renewed: now,
                alive: true,
            };
            self.known.insert(name.to_owned(), known);
            changes.push(Change::Appeared(record.clone()));
            return;
        };
        if known.record.beat == record.beat {
            return;
        }
        let moved = known.record.addresses != record.addresses;
        if known.alive && moved {
            changes.push(Change::Vanished(known.record.clone()));
        }
        if !known.alive || moved {
            changes.push(Change::Appeared(record.clone()));
        }
        *known = Known {
            record: record.clone(),
            renewed: now,
            alive: true,
        };
    }

    fn expire(&mut self, now: SimTime, changes: &mut Vec<Change>) {
        let folder = &self.folder;
        self.known.retain(|name, known| {
            let silent_ms = now.since(known.renewed) / 1_000_000;
            if silent_ms > known.record.lease_ms && known.alive {
                known.alive = false;
                changes.push(Change::Vanished(known.record.clone()));
            }
            let old = known.record.lease_ms.saturating_mul(LEASES_TO_REMOVAL);
            // If it cannot be removed it is looked at again.
            !(silent_ms > old && fs::remove_file(folder.join(name)).is_ok())
        });
    }
}

/// The record of a file; an empty error if the file is gone.
fn read_record(path: &Path, name: &str) -> Result<Record, String> {
    let mut text = String::new();
    let mut read = || -> io::Result<()> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        file.take(RECORD_BYTES_MAX).read_to_string(&mut text)?;
        Ok(())
    };
    match read() {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(String::new()),
        Err(error) => return Err(error.to_string()),
    }
    let record: Record = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    if record.lease_ms == 0 {
        return Err("`lease_ms` is 0".into());
    }
    for address in &record.addresses {
        if let Err(error) = address.parse::<crate::Address>() {
            return Err(error.to_string());
        }
    }
    if record.addresses.is_empty() {
        return Err("`addresses` is empty".into());
    }
    if file_name(&record) != name {
        return Err(format!(
            "a record of this rank is named {}",
            file_name(&record)
        ));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(engine: &str, rank: u32) -> Record {
        Record {
            engine: engine.into(),
            rank,
            name: "host, process 1".into(),
            addresses: vec!["tcp://127.0.0.1:7300".into()],
            host: "boot".into(),
            identity: [("model".to_owned(), "m".to_owned())].into(),
            lease_ms: 100,
            beat: 0,
        }
    }

    fn looked(watch: &mut Watch, now_ms: u64) -> Vec<Change> {
        let mut changes = Vec::new();
        watch
            .look(SimTime(now_ms * 1_000_000), &mut changes)
            .unwrap();
        changes
    }

    /// Whether each came, of which engine and rank.
    fn brief(changes: &[Change]) -> Vec<(bool, &str, u32)> {
        let mut all: Vec<_> = changes
            .iter()
            .map(|change| match change {
                Change::Appeared(record) => (true, &*record.engine, record.rank),
                Change::Vanished(record) => (false, &*record.engine, record.rank),
                Change::Bad(path, why) => panic!("{}: {why}", path.display()),
            })
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn ranks_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("not/yet/there");
        let mut watch = Watch::new(&folder);
        assert_eq!(looked(&mut watch, 0), []);
        let a = Published::new(&folder, record("a", 0)).unwrap();
        let b = Published::new(&folder, record("a", 1)).unwrap();
        let c = Published::new(&folder, record("c", 0)).unwrap();
        let changes = looked(&mut watch, 1);
        assert_eq!(
            brief(&changes),
            [(true, "a", 0), (true, "a", 1), (true, "c", 0)]
        );
        assert_eq!(looked(&mut watch, 2), [], "no news");
        drop((a, b));
        let changes = looked(&mut watch, 3);
        assert_eq!(brief(&changes), [(false, "a", 0), (false, "a", 1)]);
        drop(c);
        assert_eq!(brief(&looked(&mut watch, 4)), [(false, "c", 0)]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_lease_ends_unless_it_is_renewed_and_a_dead_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(dir.path());
        let mut a = Published::new(dir.path(), record("a", 0)).unwrap();
        assert_eq!(brief(&looked(&mut watch, 0)), [(true, "a", 0)]);
        for now in [90, 180, 270] {
            a.renew().unwrap();
            assert_eq!(looked(&mut watch, now), []);
        }
        assert_eq!(looked(&mut watch, 370), [], "over after its time");
        assert_eq!(brief(&looked(&mut watch, 371)), [(false, "a", 0)]);
        assert_eq!(looked(&mut watch, 400), [], "said once");
        a.renew().unwrap();
        assert_eq!(brief(&looked(&mut watch, 500)), [(true, "a", 0)]);
        let path = a.path().to_owned();
        std::mem::forget(a); // killed
        assert_eq!(brief(&looked(&mut watch, 1_500)), [(false, "a", 0)]);
        assert!(path.exists());
        assert_eq!(looked(&mut watch, 1_501), []);
        assert!(!path.exists(), "nobody renewed it for ten leases");
    }

    #[test]
    fn who_listens_elsewhere_went_and_came() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(dir.path());
        let mut a = Published::new(dir.path(), record("a", 0)).unwrap();
        looked(&mut watch, 0);
        a.record.addresses = vec!["tcp://127.0.0.1:1".into(), "unix:///run/a".into()];
        a.renew().unwrap();
        let changes = looked(&mut watch, 1);
        assert!(
            matches!(&changes[..], [Change::Vanished(old), Change::Appeared(new)]
                if old.addresses != new.addresses && new.addresses.len() == 2),
            "{changes:?}"
        );
    }

    #[test]
    fn what_is_no_record_is_named_once_and_the_last_good_one_stands_for_its_lease() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new(dir.path());
        let a = Published::new(dir.path(), record("a", 0)).unwrap();
        let whole = fs::read_to_string(a.path()).unwrap();
        assert_eq!(looked(&mut watch, 0).len(), 1);
        fs::write(a.path(), &whole[..40]).unwrap();
        let changes = looked(&mut watch, 1);
        assert!(
            matches!(&changes[..], [Change::Bad(path, why)] if path == a.path() && why.contains("EOF")),
            "{changes:?}"
        );
        assert_eq!(looked(&mut watch, 2), [], "said once");
        assert_eq!(brief(&looked(&mut watch, 101)), [(false, "a", 0)]);

        let good = a.path().file_name().unwrap().to_str().unwrap().to_owned();
        let cases = [
            ("notes.txt".to_owned(), "hello".to_owned(), "expected"),
            (
                good.clone(),
                whole.replace("\"lease_ms\": 100", "\"lease_ms\": 0"),
                "`lease_ms` is 0",
            ),
            (
                good.clone(),
                whole.replace("tcp://", "http://"),
                "is no address",
            ),
            (
                good.clone(),
                whole.replace("\"rank\": 0", "\"rank\": 0, \"x\": 1"),
                "unknown field `x`",
            ),
            (
                good.clone(),
                whole.replace("\"tcp://127.0.0.1:7300\"", ""),
                "`addresses` is empty",
            ),
            (
                "kv-0000000000000000-0.json".into(),
                whole.clone(),
                "is named kv-",
            ),
        ];
        for (name, text, why) in cases {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(&name), text).unwrap();
            let changes = looked(&mut Watch::new(dir.path()), 0);
            assert!(
                matches!(&changes[..], [Change::Bad(path, said)]
                    if path.ends_with(&name) && said.contains(why)),
                "{why}: {changes:?}"
            );
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("folder")).unwrap();
        assert!(matches!(
            &looked(&mut Watch::new(dir.path()), 0)[..],
            [Change::Bad(..)]
        ));
    }

    #[test]
    fn a_folder_that_cannot_be_used_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        let error = Published::new(&file, record("a", 0))
            .unwrap_err()
            .to_string();
        assert!(error.contains("name another as peers_dir"), "{error}");
        let error = Watch::new(&file)
            .look(SimTime::ZERO, &mut Vec::new())
            .unwrap_err();
        assert!(error.to_string().contains("reading"), "{error}");
    }
}
