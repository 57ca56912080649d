//! CPUs, last-level caches and NUMA nodes, read from sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Maximum CPUs of a group: the policy keeps one bit for each. `SLIP_LLC_CPUS`.
pub const LLC_CPUS_MAX: usize = 64;

/// One CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its number.
    pub id: u32,
    /// Lowest-numbered hardware thread of its core.
    pub core: u32,
    /// Index into [`Topology::llcs`].
    pub llc: usize,
    /// Its NUMA node.
    pub node: u32,
}

/// The host's CPUs that are online, in groups that share a last-level cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Online CPUs by number.
    pub cpus: BTreeMap<u32, Cpu>,
    /// CPU numbers of each group, ascending. A cache shared by more than [`LLC_CPUS_MAX`] CPUs is
    /// split, between cores.
    pub llcs: Vec<Vec<u32>>,
}

/// Why the topology could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// A file could not be read.
    #[error("reading {path}; is sysfs mounted?")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Not a list of CPUs.
    #[error("{place}: `{text}` is not a list of CPUs such as `0-3,8`")]
    List {
        /// The place of the text.
        place: String,
        /// The text.
        text: String,
    },
}

/// Parses the kernel's list format: `0-3,8`. The empty list is allowed.
///
/// # Errors
/// With `place`, if `text` is not a list or names a CPU above 65535.
pub fn parse_cpu_list(text: &str, place: &str) -> Result<Vec<u32>, TopologyError> {
    let bad = || TopologyError::List {
        place: place.to_owned(),
        text: text.trim().to_owned(),
    };
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u32 = first.trim().parse().map_err(|_| bad())?;
        let last: u32 = last.trim().parse().map_err(|_| bad())?;
        if first > last || last > 65_535 {
            return Err(bad());
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

impl Topology {
    /// Reads `<sysfs>/devices/system`; `sysfs` is `/sys` outside of tests.
    ///
    /// # Errors
    /// If the list of online CPUs cannot be read or is not one. A CPU without cache or node
    /// entries (some virtual machines) is assumed to share the cache of its package.
    pub fn read(sysfs: &Path) -> Result<Topology, TopologyError> {
        let system = sysfs.join("devices/system");
        let read = |path: PathBuf| match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text),
            Err(source) => Err(TopologyError::Read { path, source }),
        };
        let list = |path: PathBuf| {
            let place = path.display().to_string();
            read(path).and_then(|text| parse_cpu_list(&text, &place))
        };
        let online = list(system.join("cpu/online"))?;
        let mut groups: BTreeMap<Vec<u32>, Vec<u32>> = BTreeMap::new();
        let mut cores = BTreeMap::new();
        for &id in &online {
            let cpu = system.join(format!("cpu/cpu{id}"));
            let siblings = list(cpu.join("topology/thread_siblings_list")).unwrap_or(vec![id]);
            cores.insert(id, siblings.first().copied().unwrap_or(id));
            let shared = last_level(&cpu)
                .and_then(|index| list(index.join("shared_cpu_list")).ok())
                .or_else(|| list(cpu.join("topology/package_cpus_list")).ok())
                .unwrap_or(vec![id]);
            groups.entry(shared).or_default().push(id);
        }
        let mut nodes = BTreeMap::new();
        for node in list(system.join("node/online")).unwrap_or_default() {
            for cpu in list(system.join(format!("node/node{node}/cpulist"))).unwrap_or_default() {
                nodes.insert(cpu, node);
            }
        }
        let llcs: Vec<Vec<u32>> = groups
            .into_values()
            .flat_map(|g| split(g, &cores))
            .collect();
        let mut cpus = BTreeMap::new();
        for (llc, group) in llcs.iter().enumerate() {
            for &id in group {
                let node = nodes.get(&id).copied().unwrap_or(0);
                cpus.insert(
                    id,
                    Cpu {
                        id,
                        core: cores[&id],
                        llc,
                        node,
                    },
                );
            }
        }
        Ok(Topology { cpus, llcs })
    }

    /// Groups per NUMA node, if there are several nodes of as many groups each, with consecutive numbers; else 0.
    pub fn llcs_per_node(&self) -> u32 {
        let node = |llc: &Vec<u32>| {
            let mut nodes = llc.iter().filter_map(|id| Some(self.cpus.get(id)?.node));
            let first = nodes.next()?;
            nodes.all(|n| n == first).then_some(first)
        };
        let Some(nodes) = self.llcs.iter().map(node).collect::<Option<Vec<u32>>>() else {
            return 0; // a cache of several nodes
        };
        let runs: Vec<&[u32]> = nodes.chunk_by(|a, b| a == b).collect();
        let distinct: BTreeSet<u32> = nodes.iter().copied().collect();
        let size = runs.first().map_or(0, |r| r.len());
        if runs.len() < 2 || distinct.len() != runs.len() || runs.iter().any(|r| r.len() != size) {
            return 0;
        }
        u32::try_from(size).unwrap_or(0)
    }
}

/// The cache directory of the highest level that holds data.
fn last_level(cpu: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(cpu.join("cache")).ok()?;
    entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("index"))
        })
        .filter(|p| {
            std::fs::read_to_string(p.join("type")).is_ok_and(|t| t.trim() != "Instruction")
        })
        .filter_map(|p| {
            let level: u32 = std::fs::read_to_string(p.join("level"))
                .ok()?
                .trim()
                .parse()
                .ok()?;
            Some((level, p))
        })
        .max()
        .map(|(_, p)| p)
}

/// Splits a group that is too large into the minimum number of even parts, keeping cores together.
fn split(mut group: Vec<u32>, cores: &BTreeMap<u32, u32>) -> Vec<Vec<u32>> {
    group.sort_by_key(|cpu| (cores[cpu], *cpu));
    let parts = group.len().div_ceil(LLC_CPUS_MAX);
    let mut size = group.len().div_ceil(parts);
    // With two threads per core, an odd part would split a core.
    if parts > 1 && size % 2 == 1 {
        size += 1;
    }
    group
        .chunks(size)
        .map(|c| {
            let mut c = c.to_vec();
            c.sort_unstable();
            c
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn host(cpus: u32, threads: u32, per_llc: u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        write(
            root,
            "devices/system/cpu/online",
            &format!("0-{}\n", cpus - 1),
        );
        write(root, "devices/system/node/online", "0-1\n");
        write(
            root,
            "devices/system/node/node0/cpulist",
            &format!("0-{}\n", cpus / 2 - 1),
        );
        write(
            root,
            "devices/system/node/node1/cpulist",
            &format!("{}-{}\n", cpus / 2, cpus - 1),
        );
        for id in 0..cpus {
            let at = format!("devices/system/cpu/cpu{id}");
            let core = id / threads * threads;
            let siblings = format!("{core}-{}\n", core + threads - 1);
            write(
                root,
                &format!("{at}/topology/thread_siblings_list"),
                &siblings,
            );
            let first = id / per_llc * per_llc;
            let shared = format!("{first}-{}\n", first + per_llc - 1);
            for (index, level, kind) in [(0, 1, "Data"), (1, 1, "Instruction"), (2, 3, "Unified")] {
                let cache = format!("{at}/cache/index{index}");
                write(root, &format!("{cache}/level"), &format!("{level}\n"));
                write(root, &format!("{cache}/type"), &format!("{kind}\n"));
                let cpus = if level == 3 { &shared } else { &siblings };
                write(root, &format!("{cache}/shared_cpu_list"), cpus);
            }
        }
        dir
    }

    #[test]
    fn llcs_cores_and_nodes_are_found() {
        let t = Topology::read(host(16, 2, 8).path()).unwrap();
        assert_eq!(t.llcs, [(0..8).collect::<Vec<_>>(), (8..16).collect()]);
        assert_eq!(
            t.cpus[&13],
            Cpu {
                id: 13,
                core: 12,
                llc: 1,
                node: 1
            }
        );
    }

    #[test]
    fn nodes_of_as_many_llcs_each_are_found() {
        let of = |cpus, per_llc| Topology::read(host(cpus, 2, per_llc).path()).unwrap();
        assert_eq!(of(32, 4).llcs_per_node(), 4);
        assert_eq!(of(16, 8).llcs_per_node(), 1);
        // A cache of both nodes, and one node.
        assert_eq!(of(24, 8).llcs_per_node(), 0);
        let mut t = of(32, 4);
        t.cpus.values_mut().for_each(|c| c.node = 0);
        assert_eq!(t.llcs_per_node(), 0);
        // Nodes of unlike size, and one whose LLCs have other numbers in between.
        for odd in [4, 28] {
            let mut t = of(32, 4);
            (odd..odd + 4).for_each(|id| t.cpus.get_mut(&id).unwrap().node ^= 1);
            assert_eq!(t.llcs_per_node(), 0);
        }
    }

    #[test]
    fn large_llc_is_split_between_cores() {
        let t = Topology::read(host(132, 2, 132).path()).unwrap();
        assert_eq!(
            t.llcs.iter().map(Vec::len).collect::<Vec<_>>(),
            [44, 44, 44]
        );
        for cpu in t.cpus.values() {
            assert_eq!(
                cpu.llc, t.cpus[&cpu.core].llc,
                "threads of a core stay together"
            );
        }
    }

    #[test]
    fn host_without_cache_entries_is_one_group_a_package() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "devices/system/cpu/online", "0-1,3\n");
        for id in [0, 1, 3] {
            let at = format!("devices/system/cpu/cpu{id}/topology/package_cpus_list");
            write(dir.path(), &at, "0-3\n");
        }
        assert_eq!(Topology::read(dir.path()).unwrap().llcs, [[0, 1, 3]]);
    }

    #[test]
    fn cpu_lists_are_read_or_refused() {
        assert_eq!(parse_cpu_list("0-2,5,4-5\n", "x").unwrap(), [0, 1, 2, 4, 5]);
        assert_eq!(parse_cpu_list("", "x").unwrap(), [0u32; 0]);
        for text in ["a", "3-1", "1-", "-1", "0-99999999"] {
            let e = parse_cpu_list(text, "place").unwrap_err().to_string();
            assert!(e.contains("place") && e.contains(text), "{e}");
        }
    }
}
