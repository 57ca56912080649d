//! Checks that a cluster's block pools fit into this host's memory.

use slipstream_base::text::counted;
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::{Arrival, Workload};
use slipstream_os::memory::proc_bytes;

/// Lower bound of the bytes per block in a pool, its hash index and the router's block index. 64
/// engines of 6,150 blocks add 45 MiB to the RSS of `slipstream simulate`, which is 120 per block.
const BLOCK_BYTES: u64 = 96;

/// Returns an error with the numbers if `cluster`'s engines, all in this process, cannot fit into
/// memory. Without a figure for the host's memory, nothing is checked.
///
/// # Errors
/// If it does not fit.
pub fn check(cluster: &Cluster) -> anyhow::Result<()> {
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
        "{} with a total of {} need {:.1} GiB or more to model, and this host has \
         {:.1} GiB free; use fewer `workers`, a larger `block_size`, or a smaller `num_gpu_blocks`",
        counted(cluster.pools.iter().map(ranks).sum(), "engine"),
        counted(blocks, "KV block"),
        gib(needed),
        gib(free)
    );
    Ok(())
}

/// Bytes of a simulated request under way, at the least: 3,000,000 of them, with prompts of 1,024
/// tokens, added 1.9 GB to the RSS of `slipstream simulate`.
const REQUEST_BYTES: u64 = 600;

/// An error with the numbers if the requests that `workload` has under way at a time cannot fit into
/// memory.
///
/// # Errors
/// If they do not fit.
pub fn check_concurrency(workload: &Workload) -> anyhow::Result<()> {
    let (Arrival::Closed { concurrency }, Some(free)) = (
        &workload.arrival,
        proc_bytes("/proc/meminfo", "MemAvailable:"),
    ) else {
        return Ok(());
    };
    let sessions = workload
        .requests
        .map_or(u64::from(*concurrency), |n| n.min(u64::from(*concurrency)));
    let needed = sessions * REQUEST_BYTES;
    let mib = |bytes: u64| bytes >> 20;
    anyhow::ensure!(
        needed <= free,
        "{} at a time take {} MiB or more to model, and this host has {} MiB free; take a smaller \
         `concurrency`",
        counted(sessions, "request"),
        mib(needed),
        mib(free)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_requests_at_a_time_than_memory_holds_are_refused() {
        let workload = |concurrency, requests| Workload {
            arrival: Arrival::Closed { concurrency },
            requests,
            ..Workload::default()
        };
        assert!(check_concurrency(&workload(1000, None)).is_ok());
        assert!(check_concurrency(&workload(u32::MAX, Some(1000))).is_ok());
        if let Err(error) = check_concurrency(&workload(u32::MAX, None)) {
            assert!(
                error.to_string().contains("4,294,967,295 requests"),
                "{error}"
            );
        } else {
            let free = proc_bytes("/proc/meminfo", "MemAvailable:");
            assert!(free.is_none_or(|free| free > 2 << 40), "{free:?}");
        }
    }

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
