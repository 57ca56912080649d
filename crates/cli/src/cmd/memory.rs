//! Whether a cluster's block pools fit into this host's memory.

use slipstream_base::text::counted;
use slipstream_config::cluster::Cluster;

/// Bytes that a block takes in a pool, its hash index and the router's block index, at the least:
/// what 64 engines of 6,150 blocks added to the RSS of `slipstream simulate`, 45 MiB, comes to 120.
const BLOCK_BYTES: u64 = 96;

/// An error with the numbers if `cluster`'s engines, all in this process, cannot fit into memory.
/// Where the host does not say how much it has, nothing is checked.
pub(crate) fn check(cluster: &Cluster) -> anyhow::Result<()> {
    let Some(free) = proc_bytes("/proc/meminfo", "MemAvailable:") else {
        return Ok(());
    };
    let ranks = |pool: &slipstream_config::cluster::PoolConfig| {
        u64::from(pool.workers) * u64::from(pool.engine.data_parallel_size)
    };
    let blocks: u64 = cluster
        .pools
        .iter()
        .map(|pool| ranks(pool).saturating_mul(u64::from(pool.engine.num_gpu_blocks)))
        .fold(0, u64::saturating_add);
    let needed = blocks.saturating_mul(BLOCK_BYTES);
    let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
    anyhow::ensure!(
        needed <= free,
        "{} with {} in all take {:.1} GiB or more to model, and this host has \
         {:.1} GiB free; take fewer `workers`, a larger `block_size`, or a smaller `num_gpu_blocks`",
        counted(cluster.pools.iter().map(ranks).sum(), "engine"),
        counted(blocks, "KV block"),
        gib(needed),
        gib(free)
    );
    Ok(())
}

/// A field of a file in `/proc` that counts in kilobytes, such as `MemAvailable:`, in bytes.
pub(crate) fn proc_bytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_host_can_hold_is_refused_with_the_numbers() {
        let mut cluster = Cluster::default();
        assert!(check(&cluster).is_ok());
        cluster.pools[0].workers = 65_536;
        cluster.pools[0].engine.num_gpu_blocks = 1 << 30;
        let said = check(&cluster).unwrap_err().to_string();
        assert!(said.contains("65,536 engines"), "{said}");
        assert!(said.contains("GiB free"), "{said}");
    }
}
