//! The host's cgroups (version 2): the class of each, kept up to date as they are created and removed, and
//! their CPU limits and weights.
//!
//! [`Tracker`] watches the tree with inotify, so a new cgroup has its class within milliseconds and an
//! idle host costs nothing. Removing a cgroup frees its table entry. Work and memory
//! are bounded by [`TRACKED_MAX`]; a full table is reported and retried, and is never an error.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use serde::Serialize;

use crate::classes::Classes;

/// Maximum tracked cgroups; further ones keep the default class and are counted.
pub const TRACKED_MAX: usize = 65_536;
/// Maximum events per [`Tracker::update`]; the next call handles the rest.
const EVENTS_MAX: usize = 4_096;
/// Files whose change may add a setting, see [`settings`].
const SETTING_FILES: [&str; 6] = [
    "cpu.max",
    "cpu.weight",
    "cpu.weight.nice",
    "cpu.idle",
    "cpu.uclamp.min",
    "cpu.uclamp.max",
];

/// Storage for the classes of cgroups: the BPF program's map, or a test's.
pub trait ClassTable {
    /// Sets the class of the cgroup with this id. `Ok(false)` if the table is full.
    ///
    /// # Errors
    /// If the table cannot be written at all.
    fn put(&mut self, cgroup: u64, class: u32) -> io::Result<bool>;
    /// Removes a cgroup; an absent one is no error.
    ///
    /// # Errors
    /// If the table cannot be written at all.
    fn remove(&mut self, cgroup: u64) -> io::Result<()>;
}

/// A CPU control of a cgroup that differs from its default.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    /// `cpu.max`: quota and period, us.
    Max {
        /// CPU time per period, us.
        quota_us: u64,
        /// The period, us.
        period_us: u64,
    },
    /// `cpu.weight`, other than 100.
    Weight(u32),
    /// `cpu.idle` is 1.
    Idle,
    /// `cpu.uclamp.min` or `.max`: the file's suffix, and its value.
    Uclamp(&'static str, String),
}

impl Setting {
    /// The control's file.
    pub fn file(&self) -> &'static str {
        match self {
            Setting::Max { .. } => "cpu.max",
            Setting::Weight(_) => "cpu.weight",
            Setting::Idle => "cpu.idle",
            Setting::Uclamp(file, _) => file,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Setting::Max {
                quota_us,
                period_us,
            } => write!(
                f,
                "cpu.max {quota_us} {period_us} ({:.2} CPUs)",
                *quota_us as f64 / *period_us as f64
            ),
            Setting::Weight(w) => write!(f, "cpu.weight {w}"),
            Setting::Idle => write!(f, "cpu.idle 1"),
            Setting::Uclamp(file, value) => write!(f, "{file} {value}"),
        }
    }
}

/// The settings that the loaded scheduler enforces. The header of the BPF program declares them
/// by lines such as `#define SLIP_HONORS_CPU_MAX 1`. A setting without a line is not enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Honors {
    /// `cpu.max`.
    pub cpu_max: bool,
    /// `cpu.weight`.
    pub cpu_weight: bool,
    /// `cpu.idle`.
    pub cpu_idle: bool,
}

impl Honors {
    /// The settings that our BPF program enforces.
    pub fn ours() -> Honors {
        Honors::declared(include_str!("../../cpusched/bpf/intf.h"))
    }

    /// The settings declared in a C header.
    pub fn declared(header: &str) -> Honors {
        let is_set = |name: &str| {
            header.lines().any(|line| {
                let mut words = line.split_whitespace();
                words.next() == Some("#define")
                    && words.next() == Some(name)
                    && words.next().is_some_and(|v| v.trim_end_matches('u') != "0")
            })
        };
        Honors {
            cpu_max: is_set("SLIP_HONORS_CPU_MAX"),
            cpu_weight: is_set("SLIP_HONORS_CPU_WEIGHT"),
            cpu_idle: is_set("SLIP_HONORS_CPU_IDLE"),
        }
    }

    /// Whether the scheduler enforces this setting.
    pub fn enforces(self, setting: &Setting) -> bool {
        match setting {
            Setting::Max { .. } => self.cpu_max,
            Setting::Weight(_) => self.cpu_weight,
            Setting::Idle => self.cpu_idle,
            Setting::Uclamp(..) => false,
        }
    }
}

/// The CPU controls of the cgroup in `dir` that differ from their defaults. A file that is absent or
/// cannot be read (the controller is off) counts as default.
pub fn settings(dir: &Path) -> Vec<Setting> {
    let read = |file: &str| {
        std::fs::read_to_string(dir.join(file))
            .ok()
            .map(|s| s.trim().to_owned())
    };
    let mut found = Vec::new();
    if let Some(text) = read("cpu.max") {
        let mut words = text.split_whitespace().map(str::parse);
        if let (Some(Ok(quota_us)), Some(Ok(period_us @ 1..))) = (words.next(), words.next()) {
            found.push(Setting::Max {
                quota_us,
                period_us,
            });
        }
    }
    match read("cpu.idle").as_deref() {
        // The kernel shows the weight of an idle group as 0.
        Some("1") => found.push(Setting::Idle),
        _ => {
            if let Some(w) = read("cpu.weight").and_then(|t| t.parse().ok())
                && w != 100
            {
                found.push(Setting::Weight(w));
            }
        }
    }
    for (file, default) in [("cpu.uclamp.min", "0.00"), ("cpu.uclamp.max", "max")] {
        if let Some(value) = read(file)
            && value != default
        {
            found.push(Setting::Uclamp(file, value));
        }
    }
    found
}

/// A cgroup and one of its settings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct InUse {
    /// Path below the root of the hierarchy, without the first slash.
    pub cgroup: String,
    /// The setting.
    pub setting: Setting,
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.cgroup, self.setting)
    }
}

/// Settings of the cgroups of a hierarchy, ordered by path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Of cgroups that hold processes.
    pub in_use: Vec<InUse>,
    /// Of cgroups without a process: they apply to tasks that start there later.
    pub empty: Vec<InUse>,
}

/// Reads the settings of all cgroups below a root, but for the root itself.
pub fn all_settings(root: &Path) -> Settings {
    let mut found = Settings::default();
    walk(root, "", TRACKED_MAX, &mut |path| {
        if path.is_empty() {
            return;
        }
        let dir = root.join(path);
        let of_path = settings(&dir).into_iter().map(|setting| InUse {
            cgroup: path.to_owned(),
            setting,
        });
        if is_populated(&dir) {
            found.in_use.extend(of_path);
        } else {
            found.empty.extend(of_path);
        }
    });
    found.in_use.sort();
    found.empty.sort();
    found
}

fn is_populated(dir: &Path) -> bool {
    // Without the file (a test's folder, a root) the group counts as in use.
    std::fs::read_to_string(dir.join("cgroup.events"))
        .map_or(true, |t| !t.lines().any(|l| l == "populated 0"))
}

/// The mount point of the version 2 hierarchy: `/sys/fs/cgroup`, or `unified` below it on hosts that
/// have both versions.
pub fn mount_point(sysfs: &Path) -> Option<PathBuf> {
    let root = sysfs.join("fs/cgroup");
    [root.clone(), root.join("unified")]
        .into_iter()
        .find(|dir| dir.join("cgroup.controllers").exists())
}

/// Calls `visit` for `path` and every directory below it, at most `most`. Returns the number of calls.
fn walk(root: &Path, path: &str, most: usize, visit: &mut impl FnMut(&str)) -> usize {
    let mut left = vec![path.to_owned()];
    let mut seen = 0;
    while let Some(path) = left.pop() {
        if seen == most {
            break;
        }
        seen += 1;
        visit(&path);
        left.extend(children(root, &path));
    }
    seen
}

fn children(root: &Path, path: &str) -> Vec<String> {
    // A cgroup may be removed at any time.
    let Ok(entries) = std::fs::read_dir(root.join(path)) else {
        return Vec::new();
    };
    entries
        .filter_map(Result::ok)
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .filter_map(|e| e.file_name().into_string().ok())
        .map(|name| join(path, &name))
        .collect()
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}/{name}")
    }
}

#[derive(Debug)]
struct Node {
    watch: Option<i32>,
    id: u64,
    class: Option<u32>,
    /// Whether the table holds its class.
    stored: bool,
}

/// The watch, the event flags, and the file name.
type WatchEvent = (i32, ReadFlags, String);

/// The result of [`Tracker::update`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Cgroups that were added or removed, or whose settings changed.
    pub changed: usize,
    /// Settings that were written since the last call, or belong to a new cgroup.
    pub settings: Vec<InUse>,
    /// Whether more events are pending: call again.
    pub more: bool,
}

/// Tracks the cgroups below a root and updates a [`ClassTable`].
#[derive(Debug)]
pub struct Tracker {
    root: PathBuf,
    inotify: OwnedFd,
    nodes: BTreeMap<String, Node>,
    by_watch: HashMap<i32, String>,
    unstored: usize,
    untracked: u64,
    unwatched: usize,
}

impl Tracker {
    /// Tracks the tree below `root`, and fills `table` with the classes of existing cgroups.
    ///
    /// # Errors
    /// If inotify is not available, or the table cannot be written.
    pub fn new(root: &Path, classes: &Classes, table: &mut impl ClassTable) -> io::Result<Tracker> {
        let mut tracker = Tracker {
            root: root.to_owned(),
            inotify: inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
            nodes: BTreeMap::new(),
            by_watch: HashMap::new(),
            unstored: 0,
            untracked: 0,
            unwatched: 0,
        };
        tracker.add_tree("", classes, table, &mut Update::default())?;
        Ok(tracker)
    }

    /// Readable if [`Tracker::update`] has events to handle.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Cgroups tracked, the root included.
    pub fn tracked(&self) -> usize {
        self.nodes.len()
    }

    /// Cgroups with a class that the full table could not store; they are retried whenever an
    /// entry becomes free.
    pub fn unstored(&self) -> usize {
        self.unstored
    }

    /// Cgroups not tracked because [`TRACKED_MAX`] was reached, counted at each attempt.
    pub fn untracked(&self) -> u64 {
        self.untracked
    }

    /// Cgroups that could not be watched (`fs.inotify.max_user_watches`): only [`Tracker::rescan`] finds
    /// new cgroups below them.
    pub fn unwatched(&self) -> usize {
        self.unwatched
    }

    /// Handles pending events, a bounded number; never blocks.
    ///
    /// # Errors
    /// If the table cannot be written, or inotify fails.
    pub fn update(&mut self, classes: &Classes, table: &mut impl ClassTable) -> io::Result<Update> {
        let mut out = Update::default();
        let (events, overflowed) = self.read_events(&mut out)?;
        if overflowed {
            self.rescan_into(classes, table, &mut out)?;
        }
        for (watch, flags, name) in events {
            let Some(parent) = self.by_watch.get(&watch).cloned() else {
                continue;
            };
            if flags.contains(ReadFlags::IGNORED) {
                self.remove_tree(&parent, table, &mut out)?;
                continue;
            }
            let path = join(&parent, &name);
            if flags.contains(ReadFlags::ISDIR) {
                // The directory's current state counts, whatever the order of creation and removal.
                if self.root.join(&path).is_dir() {
                    self.add_tree(&path, classes, table, &mut out)?;
                } else {
                    self.remove_tree(&path, table, &mut out)?;
                }
            } else if SETTING_FILES.contains(&name.as_str()) {
                self.note_settings(&parent, &mut out);
            }
        }
        self.retry(table)?;
        // One write to a file can cause two events.
        out.settings.sort();
        out.settings.dedup();
        Ok(out)
    }

    /// Walks the whole tree, to find cgroups below those that could not be watched.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn rescan(&mut self, classes: &Classes, table: &mut impl ClassTable) -> io::Result<Update> {
        let mut out = Update::default();
        self.rescan_into(classes, table, &mut out)?;
        self.retry(table)?;
        Ok(out)
    }

    fn rescan_into(
        &mut self,
        classes: &Classes,
        table: &mut impl ClassTable,
        out: &mut Update,
    ) -> io::Result<()> {
        let gone: Vec<String> = self
            .nodes
            .keys()
            .filter(|path| !self.root.join(path).is_dir())
            .cloned()
            .collect();
        for path in gone {
            self.remove_tree(&path, table, out)?;
        }
        self.add_tree("", classes, table, out)
    }

    /// Reads pending events; returns also whether the kernel's queue overflowed.
    fn read_events(&self, out: &mut Update) -> io::Result<(Vec<WatchEvent>, bool)> {
        let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let (mut events, mut overflowed) = (Vec::new(), false);
        while events.len() < EVENTS_MAX || !reader.is_buffer_empty() {
            match reader.next() {
                Ok(e) => {
                    overflowed |= e.events().contains(ReadFlags::QUEUE_OVERFLOW);
                    let name = e.file_name().map(|n| n.to_string_lossy().into_owned());
                    events.push((e.wd(), e.events(), name.unwrap_or_default()));
                }
                Err(Errno::AGAIN) => return Ok((events, overflowed)),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        out.more = true;
        Ok((events, overflowed))
    }

    fn add_tree(
        &mut self,
        path: &str,
        classes: &Classes,
        table: &mut impl ClassTable,
        out: &mut Update,
    ) -> io::Result<()> {
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            let dir = self.root.join(&path);
            let Ok(meta) = std::fs::metadata(&dir) else {
                continue;
            };
            // The inode number of a cgroup's directory is its id.
            let id = std::os::unix::fs::MetadataExt::ino(&meta);
            if self.nodes.get(&path).is_some_and(|n| n.id != id) {
                self.remove_tree(&path, table, out)?;
            }
            if !self.nodes.contains_key(&path) {
                if self.nodes.len() >= TRACKED_MAX {
                    self.untracked += 1;
                    continue;
                }
                self.add(&path, id, classes, table)?;
                out.changed += 1;
                self.note_settings(&path, out);
            }
            // After the watch was added, so that no child is missed.
            left.extend(children(&self.root, &path));
        }
        Ok(())
    }

    fn add(
        &mut self,
        path: &str,
        id: u64,
        classes: &Classes,
        table: &mut impl ClassTable,
    ) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ONLYDIR
            | WatchFlags::DONT_FOLLOW;
        let watch = match inotify::add_watch(&self.inotify, self.root.join(path), flags) {
            Ok(watch) => Some(watch),
            // Already removed again.
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(_) => None,
        };
        match watch {
            Some(watch) => drop(self.by_watch.insert(watch, path.to_owned())),
            None => self.unwatched += 1,
        }
        let class = classes.class_of_cgroup(path);
        // A file has at most `CLASSES_MAX` of them.
        let class = class.and_then(|class| u32::try_from(class).ok());
        let stored = match class {
            Some(class) => table.put(id, class)?,
            None => false,
        };
        self.unstored += usize::from(class.is_some() && !stored);
        let node = Node {
            watch,
            id,
            class,
            stored,
        };
        self.nodes.insert(path.to_owned(), node);
        Ok(())
    }

    fn remove_tree(
        &mut self,
        path: &str,
        table: &mut impl ClassTable,
        out: &mut Update,
    ) -> io::Result<()> {
        let below = format!("{path}/");
        let gone: Vec<String> = self
            .nodes
            .range(path.to_owned()..)
            .map(|(p, _)| p.clone())
            .take_while(|p| p.starts_with(path))
            .filter(|p| p == path || p.starts_with(&below))
            .collect();
        for path in gone {
            let Some(node) = self.nodes.remove(&path) else {
                continue;
            };
            out.changed += 1;
            match node.watch {
                // Fails if the kernel has removed the watch with the directory.
                Some(watch) => {
                    self.by_watch.remove(&watch);
                    let _ = inotify::remove_watch(&self.inotify, watch);
                }
                None => self.unwatched -= 1,
            }
            if node.stored {
                table.remove(node.id)?;
            } else if node.class.is_some() {
                self.unstored -= 1;
            }
        }
        Ok(())
    }

    /// Stores the classes that were rejected while the table was full.
    fn retry(&mut self, table: &mut impl ClassTable) -> io::Result<()> {
        if self.unstored == 0 {
            return Ok(());
        }
        for node in self.nodes.values_mut() {
            let Some(class) = node.class.filter(|_| !node.stored) else {
                continue;
            };
            if !table.put(node.id, class)? {
                break;
            }
            node.stored = true;
            self.unstored -= 1;
        }
        Ok(())
    }

    fn note_settings(&self, path: &str, out: &mut Update) {
        if !path.is_empty() {
            let found = settings(&self.root.join(path)).into_iter();
            out.settings.extend(found.map(|setting| InUse {
                cgroup: path.to_owned(),
                setting,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, create_dir_all, remove_dir, write};

    use super::*;
    use crate::topology::Topology;

    /// A table with room for `most` entries.
    struct Map {
        most: usize,
        entries: HashMap<u64, u32>,
        /// The maximum number of entries so far.
        peak: usize,
    }

    impl Map {
        fn with_room_for(most: usize) -> Map {
            Map {
                most,
                entries: HashMap::new(),
                peak: 0,
            }
        }
    }

    impl ClassTable for Map {
        fn put(&mut self, cgroup: u64, class: u32) -> io::Result<bool> {
            if self.entries.len() >= self.most && !self.entries.contains_key(&cgroup) {
                return Ok(false);
            }
            self.entries.insert(cgroup, class);
            self.peak = self.peak.max(self.entries.len());
            Ok(true)
        }

        fn remove(&mut self, cgroup: u64) -> io::Result<()> {
            self.entries.remove(&cgroup);
            Ok(())
        }
    }

    fn classes() -> Classes {
        let text = "[class.pods]\ncgroup = [\"pods/*\"]\nweight = 10\n\
                    [class.web]\ncgroup = [\"web\"]\n";
        let host = Topology {
            cpus: BTreeMap::new(),
            llcs: Vec::new(),
        };
        Classes::parse(text, &host).unwrap()
    }

    fn drain(tracker: &mut Tracker, classes: &Classes, map: &mut Map) -> Update {
        let mut all = Update::default();
        loop {
            let u = tracker.update(classes, map).unwrap();
            all.changed += u.changed;
            all.settings.extend(u.settings);
            if !u.more {
                return all;
            }
        }
    }

    fn id(dir: &Path) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(dir).unwrap())
    }

    #[test]
    fn classes_follow_cgroups_that_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        create_dir_all(root.join("pods/old")).unwrap();
        let (classes, mut map) = (classes(), Map::with_room_for(8));
        let mut tracker = Tracker::new(root, &classes, &mut map).unwrap();
        assert_eq!(map.entries, [(id(&root.join("pods/old")), 0)].into());

        create_dir_all(root.join("pods/new/container")).unwrap();
        create_dir(root.join("web")).unwrap();
        create_dir(root.join("website")).unwrap();
        drain(&mut tracker, &classes, &mut map);
        let expected = [
            (id(&root.join("pods/old")), 0),
            (id(&root.join("pods/new")), 0),
            (id(&root.join("pods/new/container")), 0),
            (id(&root.join("web")), 1),
        ];
        assert_eq!(map.entries, expected.into());

        remove_dir(root.join("pods/new/container")).unwrap();
        remove_dir(root.join("pods/new")).unwrap();
        drain(&mut tracker, &classes, &mut map);
        assert_eq!(map.entries, [expected[0], expected[3]].into());
        assert_eq!(tracker.tracked(), 5, "root, pods, old, web, website");
    }

    /// More cgroups in total than the BPF program's map holds, and more at once than inotify queues events for.
    #[test]
    fn churn_leaves_nothing_behind() {
        // In memory if possible: the test makes 20,000 directories.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let dir = dir.unwrap();
        let root = dir.path();
        create_dir(root.join("pods")).unwrap();
        let (classes, mut map) = (classes(), Map::with_room_for(8192));
        let mut tracker = Tracker::new(root, &classes, &mut map).unwrap();
        let pod = |i: u32| root.join(format!("pods/p{i}"));
        for round in 0..22u32 {
            (0..400).for_each(|i| create_dir(pod(round * 400 + i)).unwrap());
            drain(&mut tracker, &classes, &mut map);
            assert_eq!(map.entries.len(), 400, "round {round}");
            (0..400).for_each(|i| remove_dir(pod(round * 400 + i)).unwrap());
            drain(&mut tracker, &classes, &mut map);
            assert_eq!((map.entries.len(), tracker.tracked()), (0, 2));
        }
        // Overflows the kernel's queue (16,384 events by default) without a read in between.
        for i in 0..10_000 {
            create_dir(pod(i)).unwrap();
            if i % 2 == 1 {
                remove_dir(pod(i)).unwrap();
                remove_dir(pod(i - 1)).unwrap();
            }
        }
        create_dir(pod(1)).unwrap();
        drain(&mut tracker, &classes, &mut map);
        assert_eq!(map.entries, [(id(&pod(1)), 0)].into());
        assert_eq!(tracker.tracked(), 3);
    }

    #[test]
    fn full_table_is_counted_and_filled_up_later() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for i in 0..5 {
            create_dir_all(root.join(format!("pods/p{i}"))).unwrap();
        }
        let (classes, mut map) = (classes(), Map::with_room_for(3));
        let mut tracker = Tracker::new(root, &classes, &mut map).unwrap();
        assert_eq!((map.entries.len(), tracker.unstored()), (3, 2));
        for i in 0..5 {
            remove_dir(root.join(format!("pods/p{i}"))).unwrap();
            drain(&mut tracker, &classes, &mut map);
            let left = 4 - i;
            assert_eq!(map.entries.len() + tracker.unstored(), left);
            assert_eq!(map.entries.len(), left.min(3), "room is used at once");
        }
        assert_eq!(map.peak, 3);
    }

    #[test]
    fn directory_that_was_replaced_has_its_new_id() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        create_dir_all(root.join("pods/a")).unwrap();
        let (classes, mut map) = (classes(), Map::with_room_for(8));
        let mut tracker = Tracker::new(root, &classes, &mut map).unwrap();
        // A directory is created in between, so that the new one cannot have the same inode number.
        create_dir(root.join("other")).unwrap();
        remove_dir(root.join("pods/a")).unwrap();
        create_dir(root.join("keep")).unwrap();
        create_dir(root.join("pods/a")).unwrap();
        drain(&mut tracker, &classes, &mut map);
        assert_eq!(map.entries, [(id(&root.join("pods/a")), 0)].into());
    }

    #[test]
    fn settings_are_those_that_differ_from_the_kernels_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for (path, file, text) in [
            ("plain", "cpu.max", "max 100000\n"),
            ("plain", "cpu.weight", "100\n"),
            ("plain", "cpu.idle", "0\n"),
            ("plain", "cpu.uclamp.min", "0.00\n"),
            ("plain", "cpu.uclamp.max", "max\n"),
            ("pods/limited", "cpu.max", "50000 100000\n"),
            ("pods/limited", "cpu.weight", "900\n"),
            ("pods/empty", "cpu.max", "1000 100000\n"),
            ("pods/empty", "cgroup.events", "populated 0\nfrozen 0\n"),
            ("idle", "cpu.idle", "1\n"),
            ("idle", "cpu.weight", "0\n"),
            ("clamped", "cpu.uclamp.max", "50.00\n"),
            ("torn", "cpu.max", "10"),
        ] {
            create_dir_all(root.join(path)).unwrap();
            write(root.join(path).join(file), text).unwrap();
        }
        let found = all_settings(root);
        let texts = |all: &[InUse]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            texts(&found.empty),
            ["pods/empty: cpu.max 1000 100000 (0.01 CPUs)"]
        );
        assert_eq!(
            texts(&found.in_use),
            [
                "clamped: cpu.uclamp.max 50.00",
                "idle: cpu.idle 1",
                "pods/limited: cpu.max 50000 100000 (0.50 CPUs)",
                "pods/limited: cpu.weight 900",
            ]
        );
    }

    #[test]
    fn setting_written_later_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        create_dir(root.join("pod")).unwrap();
        let (classes, mut map) = (classes(), Map::with_room_for(8));
        let mut tracker = Tracker::new(root, &classes, &mut map).unwrap();
        write(root.join("pod/cpu.max"), "50000 100000\n").unwrap();
        write(root.join("pod/cgroup.procs"), "1\n").unwrap();
        let found = drain(&mut tracker, &classes, &mut map).settings;
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].cgroup.as_str(), found[0].setting.file()),
            ("pod", "cpu.max")
        );
    }

    #[test]
    fn capability_is_what_the_header_defines() {
        let max = Setting::Max {
            quota_us: 1,
            period_us: 1,
        };
        let none = Honors::declared("#define SLIP_OTHER 1\n// SLIP_HONORS_CPU_MAX 1\n");
        assert_eq!(none, Honors::default());
        assert!(!none.enforces(&max));
        let some = Honors::declared(
            "#define SLIP_HONORS_CPU_MAX\t1u /* token bucket */\n#define SLIP_HONORS_CPU_WEIGHT 0\n",
        );
        assert!(some.enforces(&max) && !some.enforces(&Setting::Weight(50)));
    }

    /// The kernel's own tree, whose events come from kernfs.
    #[test]
    fn real_cgroups_are_followed() {
        struct Group(PathBuf);
        impl Drop for Group {
            fn drop(&mut self) {
                for below in ["pods/a", "pods", ""] {
                    let _ = remove_dir(self.0.join(below));
                }
            }
        }
        let Some(mount) = mount_point(Path::new("/sys")) else {
            eprintln!("SKIPPED: no cgroup v2 hierarchy");
            return;
        };
        let root = mount.join(format!("slipstream-test-{}", std::process::id()));
        if let Err(e) = create_dir(&root) {
            eprintln!("SKIPPED: {}: {e}", root.display());
            return;
        }
        let group = Group(root.clone());
        let (classes, mut map) = (classes(), Map::with_room_for(8));
        let mut tracker = Tracker::new(&root, &classes, &mut map).unwrap();
        create_dir_all(root.join("pods/a")).unwrap();
        drain(&mut tracker, &classes, &mut map);
        assert_eq!(map.entries, [(id(&root.join("pods/a")), 0)].into());
        remove_dir(root.join("pods/a")).unwrap();
        drain(&mut tracker, &classes, &mut map);
        assert!(map.entries.is_empty());
        drop(group);
    }
}
