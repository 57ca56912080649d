//! Tiers below the GPUs' KV cache: host memory, disks, and other workers.

use super::kv_cache::KvCache;
use super::parallel::Parallel;
use crate::doc::{Origin, Table, optional, required, section, value};
use crate::preset::ModelShape;
use slipstream_base::text::several;
use slipstream_base::width::{floor_u64, round_u64};

/// Host memory of one rank for KV blocks that its GPUs evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTierConfig {
    /// Blocks that fit.
    pub blocks: u64,
    /// Time to copy one of them to the GPUs, ns.
    pub load_ns_per_block: u64,
    /// Time from the decision to load until the first byte, ns.
    pub latency_ns: u64,
}

/// Disk of one rank for KV blocks that its host memory evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskTierConfig {
    /// Blocks that fit.
    pub blocks: u64,
    /// Time to read one of them into host memory, ns.
    pub load_ns_per_block: u64,
    /// Time to write one, ns.
    pub store_ns_per_block: u64,
    /// Time from the decision to read until the first byte, ns.
    pub latency_ns: u64,
}

/// How a rank fetches KV blocks that other ranks of its pool have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerTierConfig {
    /// Time from the decision to fetch until the other rank begins to send, ns.
    pub latency_ns: u64,
}

const HOST_REMEDY: &str =
    "set what a copy from pinned host memory to one GPU reaches; PCIe 5.0 x16 carries at most 63e9";
const DISK_REMEDY: &str = "set the rate of sequential reads that the disk reaches; an NVMe drive on PCIe 5.0 x4 carries at \
     most 15.8e9";

section! {
    keys HostTierKeys of "engine.host_tier" {
        /// Host memory per rank for KV blocks. Each block that the GPUs cache is copied to it; prompts load from it
        /// what the GPUs evicted (`docs/engine-model.md`). 0: none.
        ///
        /// High: on a real host, memory that the engine and the page cache lack.
        key gib: f64 = value(0.0).within(0.0..=1e6).unit("GiB");
        /// Rate at which one GPU loads its part of the blocks. Loads of a rank take turns.
        ///
        /// Low: loading a prefix takes longer than computing it.
        key bytes_per_s: f64 = required(HOST_REMEDY, 50e9).within(1e6..=1e13)
            .unit("bytes per second per GPU").note("needed if `gib` is not 0");
        /// Time from the decision to load until the first byte moves.
        ///
        /// High: short prefixes are not worth their load.
        key latency_us: f64 = value(0.0).within(0.0..=1e6).unit("µs");
    }
}

section! {
    keys DiskTierKeys of "engine.disk_tier" {
        /// Disk per rank for KV blocks, below `engine.host_tier`, which it needs. Blocks that host memory evicts are
        /// written to it (`docs/engine-model.md`). 0: none.
        ///
        /// High: on a real host, writes wear the disk.
        key gib: f64 = value(0.0).within(0.0..=1e6).unit("GiB");
        /// Rate at which a rank reads blocks from its disk into host memory.
        ///
        /// Low: loading a prefix takes longer than computing it.
        key bytes_per_s: f64 = required(DISK_REMEDY, 5e9).within(1e6..=1e13)
            .unit("bytes per second").note("needed if `gib` is not 0");
        /// Rate at which a rank writes blocks to its disk.
        ///
        /// Low: blocks that host memory evicts meanwhile are dropped.
        key write_bytes_per_s?: f64 = optional().within(1e6..=1e13)
            .unit("bytes per second").with_default_text("`bytes_per_s`");
        /// Time from the decision to read until the first byte moves.
        ///
        /// High: short prefixes are not worth their load.
        key latency_us: f64 = value(0.0).within(0.0..=1e6).unit("µs");
    }
}

section! {
    keys PeerTierKeys of "engine.peer_tier" {
        /// Ranks of a pool fetch blocks that they lack from another one that has them, over the network
        /// (`docs/twin.md`); simulation only.
        ///
        /// On: with a slow network, fetching a prefix takes longer than computing it.
        key enabled: bool = value(false);
        /// Time from the decision to fetch until the other rank begins to send.
        ///
        /// High: short prefixes are not worth their transfer, and blocks may be gone by then.
        key latency_us: f64 = value(0.0).within(0.0..=1e6).unit("µs");
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

pub(super) fn read_host_tier(
    t: &Table<'_>,
    shape: &ModelShape,
    kv: &KvCache,
    parallel: &Parallel,
) -> Option<HostTierConfig> {
    let gib = HostTierKeys::gib().read(t);
    if gib == 0.0 {
        for key in ["bytes_per_s", "latency_us"] {
            t.unused(key, "gib", "`gib` is 0");
        }
        return None;
    }
    let bytes_per_s = HostTierKeys::bytes_per_s().read(t);
    let latency_us = HostTierKeys::latency_us().read(t);
    if !parallel.splits {
        return None; // reported already
    }
    // Each GPU of the rank has its own copy of its part, over its own link.
    let of_all =
        shape.kv_bytes_per_token_per_gpu(parallel.tensor, kv.dtype) * u64::from(kv.block_size);
    let of_gpu = parallel.of_stage(of_all);
    let blocks = gib * GIB / (of_all as f64 * f64::from(parallel.tensor));
    if blocks < 1.0 {
        t.error(
            "gib",
            format!(
                "`gib` is {gib}, which is less than one block of {} {} takes",
                kv.block_size,
                several(kv.block_size.into(), "token"),
            ),
            "set more, or 0 for no host tier",
        );
        return None;
    }
    Some(HostTierConfig {
        blocks: floor_u64(blocks),
        load_ns_per_block: round_u64(of_gpu as f64 / bytes_per_s * 1e9),
        latency_ns: round_u64(latency_us * 1e3),
    })
}

pub(super) fn read_disk_tier(
    t: &Table<'_>,
    shape: &ModelShape,
    kv: &KvCache,
    parallel: &Parallel,
    has_host_tier: bool,
) -> Option<DiskTierConfig> {
    let gib = DiskTierKeys::gib().read(t);
    if gib == 0.0 {
        for key in ["bytes_per_s", "write_bytes_per_s", "latency_us"] {
            t.unused(key, "gib", "`gib` is 0");
        }
        return None;
    }
    let bytes_per_s = DiskTierKeys::bytes_per_s().read(t);
    let write_bytes_per_s = DiskTierKeys::write_bytes_per_s()
        .field(t)
        .or_from(Origin::Derived("`bytes_per_s`".into()), bytes_per_s);
    let latency_us = DiskTierKeys::latency_us().read(t);
    if !parallel.splits {
        return None; // reported already
    }
    if !has_host_tier {
        t.error(
            "gib",
            "`disk_tier` takes the blocks that host memory evicts, and there is no `host_tier`"
                .to_owned(),
            "set `gib` and `bytes_per_s` of [engine.host_tier], or remove [engine.disk_tier]",
        );
        return None;
    }
    let of_gpu =
        shape.kv_bytes_per_token_per_gpu(parallel.tensor, kv.dtype) * u64::from(kv.block_size);
    let bytes = of_gpu as f64 * f64::from(parallel.tensor);
    let blocks = gib * GIB / bytes;
    if blocks < 1.0 {
        t.error(
            "gib",
            format!("`gib` is {gib}, which is less than one block takes"),
            "set more, or 0 for no disk tier",
        );
        return None;
    }
    let ns = |bytes_per_s: f64| round_u64(bytes / bytes_per_s * 1e9);
    Some(DiskTierConfig {
        blocks: floor_u64(blocks),
        load_ns_per_block: ns(bytes_per_s),
        store_ns_per_block: ns(write_bytes_per_s),
        latency_ns: round_u64(latency_us * 1e3),
    })
}

pub(super) fn read_peer_tier(t: &Table<'_>) -> Option<PeerTierConfig> {
    if !PeerTierKeys::enabled().read(t) {
        t.unused("latency_us", "enabled", "`enabled` is false");
        return None;
    }
    let latency_us = PeerTierKeys::latency_us().read(t);
    Some(PeerTierConfig {
        latency_ns: round_u64(latency_us * 1e3),
    })
}
