//! Finds the memory limit of this process's control groups, versions 1 and 2.
//!
//! A process may be deep in a tree of groups, and each level may have a limit: systemd's
//! `MemoryMax=` and `MemoryHigh=` are at `/sys/fs/cgroup/system.slice/NAME.service`, Kubernetes' at
//! the pod and the container. `/proc/self/cgroup` names the group, `/proc/self/mountinfo` where its
//! tree is mounted, which inside a container may show a part of it alone.
//!
//! Sources: `cgroups(7)`, `cgroup_namespaces(7)`, and `Documentation/admin-guide/cgroup-v2.rst` and
//! `cgroup-v1/memory.rst` of Linux.

use std::path::{Component, Path, PathBuf};

/// Returns the lowest limit of the process's groups, bytes; `None` if there is none, or it cannot be found.
/// `read` returns the text of a file.
pub(crate) fn limit(read: &dyn Fn(&Path) -> Option<String>) -> Option<u64> {
    let groups = groups(&read(Path::new("/proc/self/cgroup")).unwrap_or_default());
    let mounts = mounts(&read(Path::new("/proc/self/mountinfo")).unwrap_or_default());
    let mut limits = Vec::new();
    for group in &groups {
        let of_version: Vec<&Mount> = mounts
            .iter()
            .filter(|m| m.version == group.version)
            .collect();
        let places = of_version
            .iter()
            .filter_map(|mount| mount.place(&group.path));
        let mut places: Vec<Place> = places.collect();
        if of_version.is_empty() {
            // Without a list of mounts: where systemd and container runtimes mount them.
            let top = group.version.usual_mount();
            let dir = join(top, &group.path);
            places.extend(dir.map(|dir| Place {
                top: top.into(),
                dir,
            }));
        }
        for place in places {
            limits.extend(place.limits(group.version, read));
        }
    }
    limits.into_iter().min()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    fn usual_mount(self) -> &'static Path {
        Path::new(match self {
            Version::V1 => "/sys/fs/cgroup/memory",
            Version::V2 => "/sys/fs/cgroup",
        })
    }
}

/// A group of this process that may limit its memory.
struct Group {
    version: Version,
    path: PathBuf,
}

/// The lines of `/proc/self/cgroup`: `NUMBER:CONTROLLERS:PATH`, of version 2 `0::PATH`.
fn groups(text: &str) -> Vec<Group> {
    let group = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let version = match controllers {
            "" => Version::V2,
            _ if controllers.split(',').any(|name| name == "memory") => Version::V1,
            _ => return None,
        };
        // Of a removed group.
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        Some(Group {
            version,
            path: path.into(),
        })
    };
    text.lines().filter_map(group).collect()
}

/// A mounted tree of groups, or a part of one.
struct Mount {
    version: Version,
    /// The group that is mounted, as a path from the top that this process sees.
    root: PathBuf,
    at: PathBuf,
}

/// Groups in the file system, from the process's own up to `top`.
struct Place {
    top: PathBuf,
    dir: PathBuf,
}

/// The lines of `/proc/self/mountinfo` (`proc_pid_mountinfo(5)`).
fn mounts(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (of_mount, of_system) = line.split_once(" - ")?;
        let mut of_mount = of_mount.split(' ').skip(3);
        let (root, at) = (unescape(of_mount.next()?), unescape(of_mount.next()?));
        let mut of_system = of_system.split(' ');
        let version = match (of_system.next()?, of_system.nth(1)) {
            ("cgroup2", _) => Version::V2,
            ("cgroup", Some(options)) if options.split(',').any(|of| of == "memory") => Version::V1,
            _ => return None,
        };
        Some(Mount {
            version,
            root: root.into(),
            at: at.into(),
        })
    };
    text.lines().filter_map(mount).collect()
}

/// A path in which spaces and other characters are `\ooo`.
fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let byte = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(byte.unwrap_or(bytes[at]));
        at += if byte.is_some() { 4 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// `top` and the group `path` under it; `None` if the group is not under it.
fn join(top: &Path, path: &Path) -> Option<PathBuf> {
    let mut dir = top.to_path_buf();
    for part in path.components() {
        match part {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => dir.push(name),
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(dir)
}

impl Mount {
    /// Where the group `path` of this process is; `None` if this mount does not show it.
    fn place(&self, path: &Path) -> Option<Place> {
        let top = self.at.clone();
        // A mount from outside of the namespace, whose root is above what the process sees as `/`: the
        // names in between are not known, but its limit holds for all below.
        if self.root.components().nth(1) == Some(Component::ParentDir) {
            let dir = top.clone();
            return Some(Place { top, dir });
        }
        let below = path.strip_prefix(&self.root).ok()?;
        let dir = join(&self.at, below)?;
        Some(Place { top, dir })
    }
}

impl Place {
    /// The limits of the groups from the process's own up to the top.
    fn limits(&self, version: Version, read: &dyn Fn(&Path) -> Option<String>) -> Vec<u64> {
        let number = |path: PathBuf| read(&path)?.trim().parse::<u64>().ok();
        let mut limits = Vec::new();
        for (up, dir) in self.dir.ancestors().enumerate() {
            match version {
                // `max` is not a number. Above `memory.high` the process is throttled.
                Version::V2 => {
                    limits.extend(number(dir.join("memory.max")));
                    limits.extend(number(dir.join("memory.high")));
                }
                Version::V1 => {
                    // Without hierarchy, the limit of a parent does not hold for its children.
                    let flat = read(&dir.join("memory.use_hierarchy"));
                    if up == 0 || flat.is_none_or(|flag| flag.trim() != "0") {
                        limits.extend(number(dir.join("memory.limit_in_bytes")));
                    }
                    // Also that of parents which are not mounted here.
                    if up == 0 {
                        limits.extend(read(&dir.join("memory.stat")).and_then(|text| {
                            let mut lines = text.lines();
                            let line =
                                lines.find_map(|l| l.strip_prefix("hierarchical_memory_limit "))?;
                            line.trim().parse::<u64>().ok()
                        }));
                    }
                }
            }
            if dir == self.top {
                break;
            }
        }
        limits
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A host: the texts of its files.
    type Files = BTreeMap<PathBuf, String>;

    fn find(files: &Files) -> Option<u64> {
        limit(&|path| files.get(path).cloned())
    }

    /// How a process sees the tree of its groups.
    #[derive(Clone, Copy, Debug)]
    enum View {
        /// The host's tree, from its top.
        Host,
        /// A container with a namespace of its own: its group is `/`, and mounted.
        Namespace(usize),
        /// A container without one: names from the host's top, its group mounted (Docker on version 1).
        Bound(usize),
        /// A namespace, with a mount that was made outside of it.
        Above(usize),
        /// No list of mounts.
        NoMounts,
    }

    /// Limits of one group.
    #[derive(Clone, Debug)]
    struct Level {
        name: String,
        max: Option<u64>,
        high: Option<u64>,
    }

    fn level() -> impl Strategy<Value = Level> {
        let name = prop_oneof![
            Just("system.slice".to_owned()),
            Just("kubepods-burstable.slice".to_owned()),
            Just("with space".to_owned()),
            Just("back\\slash".to_owned()),
            "[a-z0-9_:.]{1,12}".prop_filter("a name", |name| !name.starts_with('.')),
        ];
        let number = || prop::option::weighted(0.5, 1u64..1 << 45);
        (name, number(), number()).prop_map(|(name, max, high)| Level { name, max, high })
    }

    fn escape(path: &Path) -> String {
        let text = path.to_str().unwrap();
        text.replace('\\', "\\134").replace(' ', "\\040")
    }

    /// Writes a host's files. Returns them with the limit that holds for the process, as far as it can see.
    fn host(
        version: Version,
        levels: &[Level],
        view: View,
        hybrid: bool,
        at: &str,
    ) -> (Files, Option<u64>) {
        let mut files = Files::new();
        let depth = levels.len();
        let path_of = |from: usize, to: usize| {
            let names = levels[from..to].iter().map(|l| l.name.as_str());
            names.fold(PathBuf::from("/"), |path, name| path.join(name))
        };
        // The groups that the mount shows: from level `top` on.
        let (top, own, root) = match view {
            View::Host | View::NoMounts => (0, path_of(0, depth), PathBuf::from("/")),
            View::Namespace(n) => (n, path_of(n, depth), PathBuf::from("/")),
            View::Bound(n) => (n, path_of(0, depth), path_of(0, n)),
            View::Above(n) => (n, path_of(depth, depth), "/..".into()),
        };
        let at = match view {
            View::NoMounts => version.usual_mount().to_path_buf(),
            _ => PathBuf::from(at),
        };
        // The mounted group has index `top`: 0 is the tree's own top, which has no limit files.
        let shown = if matches!(view, View::Above(_)) {
            top
        } else {
            depth
        };
        let mut least = None::<u64>;
        let mut note = |limit: u64| least = Some(least.map_or(limit, |l| l.min(limit)));
        for index in top..=shown {
            let dir = levels[top..index]
                .iter()
                .fold(at.clone(), |dir, l| dir.join(&l.name));
            let Some(level) = index.checked_sub(1).map(|index| &levels[index]) else {
                continue;
            };
            let text = |limit: Option<u64>, none: &str| {
                limit.map_or(none.to_owned(), |l| l.to_string()) + "\n"
            };
            match version {
                Version::V2 => {
                    files.insert(dir.join("memory.max"), text(level.max, "max"));
                    files.insert(dir.join("memory.high"), text(level.high, "max"));
                    level.max.into_iter().chain(level.high).for_each(&mut note);
                }
                Version::V1 => {
                    let none = "9223372036854771712";
                    files.insert(dir.join("memory.limit_in_bytes"), text(level.max, none));
                    note(level.max.unwrap_or(9_223_372_036_854_771_712));
                }
            }
        }
        let of_group = match version {
            Version::V1 => format!(
                "12:cpu,cpuacct:/else\n4:memory:{}\n1:name=systemd:/init.scope\n",
                own.display()
            ),
            Version::V2 => format!("0::{}\n", own.display()),
        };
        let of_mount = match version {
            Version::V1 => "cgroup cgroup rw,memory",
            Version::V2 => "cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot",
        };
        let mut mounts = "22 27 0:21 / /proc rw,relatime shared:14 - proc proc rw\n\
             30 23 0:26 / /sys/fs/cgroup/cpu rw shared:9 master:1 - cgroup cgroup rw,cpu,cpuacct\n\
             garbage\n31 23 0:27 / /sys/fs/memory rw - tmpfs memory rw,memory\n"
            .to_owned();
        mounts.extend([format!(
            "35 31 0:30 {} {} rw,nosuid - {of_mount}\n",
            escape(&root),
            escape(&at)
        )]);
        let mut group = of_group;
        if hybrid {
            // The other version is there, without the memory controller.
            match version {
                Version::V1 => {
                    group.push_str("0::/user.slice\n");
                    mounts
                        .push_str("36 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
                }
                Version::V2 => group.push_str("5:devices:/user.slice\n"),
            }
        }
        files.insert("/proc/self/cgroup".into(), group);
        if !matches!(view, View::NoMounts) {
            files.insert("/proc/self/mountinfo".into(), mounts);
        }
        (files, least)
    }

    proptest! {
        #[test]
        fn the_least_limit_that_the_process_can_see_is_found(
            v2 in any::<bool>(),
            levels in prop::collection::vec(level(), 0..6),
            view in 0..5usize,
            at in any::<prop::sample::Index>(),
            hybrid in any::<bool>(),
            mount in prop_oneof![
                Just("/sys/fs/cgroup"), Just("/sys/fs/cgroup/memory"), Just("/run/my groups"), Just("/"),
            ],
        ) {
            let version = if v2 { Version::V2 } else { Version::V1 };
            let n = at.index(levels.len() + 1);
            let view = match view {
                0 => View::Host,
                1 => View::Namespace(n),
                2 => View::Bound(n),
                3 => View::Above(n),
                _ => View::NoMounts,
            };
            let (files, expected) = host(version, &levels, view, hybrid, mount);
            prop_assert_eq!(find(&files), expected, "{:?}", files);
            // Any file may be missing or unreadable: never a smaller limit, and no panic.
            for gone in files.keys() {
                let mut fewer = files.clone();
                fewer.insert(gone.clone(), "\u{0}::: - \n max".into());
                let found = find(&fewer);
                prop_assert!(found.is_none() || found >= expected, "{gone:?}: {found:?}");
                fewer.remove(gone);
                prop_assert!(find(&fewer).is_none() || find(&fewer) >= expected);
            }
        }

        #[test]
        fn any_texts_are_read(cgroup in ".{0,80}", info in ".{0,200}", max in ".{0,20}") {
            let _ = limit(&|path| Some(match path.to_str()? {
                "/proc/self/cgroup" => format!("0::/a\n4:memory:/b\n{cgroup}"),
                "/proc/self/mountinfo" => format!("1 2 0:3 / /m rw - cgroup2 c rw\n{info}"),
                _ => max.clone(),
            }));
        }
    }

    #[test]
    fn known_hosts() {
        let files = |texts: &[(&str, &str)]| {
            let texts = texts
                .iter()
                .map(|(path, text)| (path.into(), (*text).to_owned()));
            texts.collect::<Files>()
        };
        // systemd's MemoryMax= of a service, and a smaller MemoryHigh= of its slice.
        let systemd = files(&[
            ("/proc/self/cgroup", "0::/system.slice/slipstream.service\n"),
            (
                "/proc/self/mountinfo",
                "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
            ),
            (
                "/sys/fs/cgroup/system.slice/slipstream.service/memory.max",
                "314572800\n",
            ),
            (
                "/sys/fs/cgroup/system.slice/slipstream.service/memory.high",
                "max\n",
            ),
            ("/sys/fs/cgroup/system.slice/memory.high", "209715200\n"),
        ]);
        assert_eq!(find(&systemd), Some(200 << 20));
        // Version 1: the parents' limit is in `memory.stat`, also if they are not mounted.
        let docker = files(&[
            ("/proc/self/cgroup", "9:memory:/docker/ab\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "9 8 0:7 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            ),
            (
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "/sys/fs/cgroup/memory/memory.stat",
                "cache 0\nhierarchical_memory_limit 314572800\n",
            ),
        ]);
        assert_eq!(find(&docker), Some(300 << 20));
        // A parent without hierarchy does not limit its children.
        let flat = files(&[
            ("/proc/self/cgroup", "9:memory:/a/b\n"),
            (
                "/proc/self/mountinfo",
                "9 8 0:7 / /m ro - cgroup cgroup rw,memory\n",
            ),
            ("/m/a/b/memory.limit_in_bytes", "500\n"),
            ("/m/a/memory.limit_in_bytes", "400\n"),
            ("/m/a/memory.use_hierarchy", "0\n"),
        ]);
        assert_eq!(find(&flat), Some(500));
        // A group outside of the namespace, or of another part of the tree, limits nothing here.
        let outside = files(&[
            ("/proc/self/cgroup", "0::/../other\n"),
            (
                "/proc/self/mountinfo",
                "9 8 0:7 / /m ro - cgroup2 cgroup2 rw\n1 8 0:7 /x /n ro - cgroup2 cgroup2 rw\n",
            ),
            ("/m/memory.max", "500\n"),
            ("/n/memory.max", "400\n"),
        ]);
        assert_eq!(find(&outside), None);
        assert_eq!(find(&Files::new()), None);
    }
}
