//! Memory of this host and of this process.

use crate::cgroup_memory;

/// Half of the memory that this process may have, bytes: the host's, or the least limit of its control groups.
/// 1 GiB if neither is known.
pub fn half_of_host() -> u64 {
    let host = proc_bytes("/proc/meminfo", "MemTotal:");
    let group = cgroup_memory::limit(&|path| std::fs::read_to_string(path).ok());
    let least = host.into_iter().chain(group).min();
    (least.unwrap_or(2 << 30) / 2).max(16 << 20)
}

/// A field of a file in `/proc` that counts in kilobytes, such as `MemAvailable:`, in bytes.
pub fn proc_bytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}
