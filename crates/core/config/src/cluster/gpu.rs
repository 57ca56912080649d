//! `[gpu.NAME]` and `[link.NAME]`: custom GPUs and their links, described by figures.

use std::ops::RangeInclusive;

use crate::doc::{Key, NoDefault, Origin, Table, choice, optional, required, section};
use crate::preset::{self, Gpu, Link};
use slipstream_base::width::floor_u64;

const KINDS: &[(&str, Link)] = &[("fabric", Link::Fabric), ("pcie", Link::Pcie)];
const LINK_REMEDY: &str = "set the bandwidth between two GPUs in one direction, such as `bytes_per_s = 64e9` for PCIe 5.0 x16";
/// Numbers of a GPU.
const FIGURE: RangeInclusive<f64> = 1e3..=1e18;

section! {
    keys GpuKeys of "gpu.NAME" {
        /// Preset whose numbers apply where this table has none, and whose kernels the GPU is taken to have.
        ///
        /// Without it the overheads of a generation that was not measured apply.
        key like?: String = optional().with_description("string");
        /// Peak of BF16 matrix products.
        ///
        /// A figure "with sparsity" is twice the dense one: prefill comes out twice as fast.
        key bf16_flops?: f64 = optional().within(FIGURE)
            .with_description("FLOP/s, dense; needed without `like`").with_default_text("that of `like`");
        /// Peak of FP8 matrix products; without it FP8 weights are unpacked.
        ///
        /// As `bf16_flops`.
        key fp8_flops?: f64 = optional().within(FIGURE)
            .with_description("FLOP/s, dense").with_default_text("that of `like`");
        /// Peak of FP4 matrix products; without it FP4 weights are unpacked.
        ///
        /// As `bf16_flops`.
        key fp4_flops?: f64 = optional().within(FIGURE)
            .with_description("FLOP/s, dense").with_default_text("that of `like`");
        /// Memory that programs can use, as the driver reports it.
        ///
        /// High: more KV blocks than fit.
        key memory_bytes?: f64 = optional().within(FIGURE)
            .with_description("bytes; needed without `like`").with_default_text("that of `like`");
        /// Memory bandwidth.
        ///
        /// High: decode comes out too fast.
        key memory_bytes_per_s?: f64 = optional().within(FIGURE)
            .with_description("bytes/s; needed without `like`").with_default_text("that of `like`");
        /// NAME of the `[link.NAME]` that joins the GPUs of a worker.
        ///
        /// Used with `tensor_parallel_size` above 1 only.
        key link?: String = optional()
            .with_description("string").with_default_text("that of `like`; otherwise 32e9 bytes/s of PCIe");
    }
}

section! {
    keys LinkKeys of "link.NAME" {
        /// NVLink, Infinity Fabric and the like; or PCI Express.
        ///
        /// Sets the latency of an all-reduce and the share of the bandwidth that it reaches.
        key kind: Link = choice(KINDS, Link::Pcie);
        /// Bandwidth of one GPU in one direction.
        ///
        /// Data sheets state both directions together, twice this.
        key bytes_per_s: f64 = required(LINK_REMEDY, 64e9).within(1e6..=1e15)
            .with_description("bytes/s; needed");
        /// Latency of a small all-reduce.
        ///
        /// High: decode with a large `tensor_parallel_size` is slow.
        key reduce_us?: f64 = optional().within(0.1..=1e6)
            .with_description("us").with_default_text("the profile's for that kind");
    }
}

/// The link called `NAME` in `[link.NAME]`: kind, bytes/s, latency of an all-reduce.
pub(super) type NamedLink = (String, Link, f64, Option<f64>);

pub(super) fn read_link(name: &str, t: &Table<'_>) -> NamedLink {
    let kind = LinkKeys::kind().read(t);
    let bytes_per_s = LinkKeys::bytes_per_s().read(t);
    let reduce_us = LinkKeys::reduce_us().read(t);
    (name.to_owned(), kind, bytes_per_s, reduce_us)
}

/// `[gpu.NAME]`: a GPU by its numbers, or a preset with other ones.
pub(super) fn read_gpu(name: &str, t: &Table<'_>, links: &[NamedLink]) -> Gpu {
    if preset::gpu(name).is_some() {
        t.error(
            "",
            format!("`{name}` is a preset"),
            format!("call it otherwise, with `like = \"{name}\"` for a preset with other numbers"),
        );
    }
    let presets: Vec<(&str, &'static Gpu)> =
        preset::GPUS.iter().map(|gpu| (&*gpu.name, gpu)).collect();
    let like: Option<&'static Gpu> = GpuKeys::like().choice_field(t, &presets).optional();
    let number = |key: &Key<f64, NoDefault>, of: fn(&Gpu) -> Option<f64>, remedy: &str| {
        let field = key.field(t);
        match like.and_then(of) {
            Some(default) => {
                field.or_from(Origin::Preset(like.map_or("", |g| &g.name).into()), default)
            }
            None => field.required(remedy, 1e12),
        }
    };
    let optional = |key: &Key<f64, NoDefault>, of: fn(&Gpu) -> Option<f64>| {
        let found = key.read(t);
        found.or_else(|| like.and_then(of))
    };
    let bf16_flops = number(
        &GpuKeys::bf16_flops(),
        |g| Some(g.bf16_flops),
        "set the dense BF16 throughput in FLOP/s, such as `bf16_flops = 989e12`, or a preset in `like`",
    );
    let memory_bytes = number(
        &GpuKeys::memory_bytes(),
        |g| Some(g.memory_bytes as f64),
        "set the memory that programs can use, such as `memory_bytes = 85e9`, or a preset in `like`",
    );
    let memory_bytes_per_s = number(
        &GpuKeys::memory_bytes_per_s(),
        |g| Some(g.memory_bytes_per_s),
        "set the memory bandwidth, such as `memory_bytes_per_s = 3350e9`, or a preset in `like`",
    );
    let wanted: Option<String> = GpuKeys::link().read(t);
    let link = wanted.as_ref().and_then(|wanted| {
        let found = links.iter().find(|(name, ..)| name == wanted);
        if found.is_none() {
            t.error(
                "link",
                format!("`link` is \"{wanted}\", but there is no table `[link.{wanted}]`"),
                "add the table, or remove the key",
            );
        }
        found
    });
    let (link, link_bytes_per_s, reduce_us) = match (link, like) {
        (Some((_, kind, bytes_per_s, reduce_us)), _) => (*kind, *bytes_per_s, *reduce_us),
        (None, Some(like)) => (like.link, like.link_bytes_per_s, like.reduce_us),
        // PCIe 4.0 x16, which the slowest servers have.
        (None, None) => (Link::Pcie, 32e9, None),
    };
    Gpu {
        name: name.to_owned().into(),
        like: like.map(|gpu| &*gpu.name),
        title: "a GPU of the cluster file",
        generation: like.map_or("older", |gpu| gpu.generation),
        bf16_flops,
        fp8_flops: optional(&GpuKeys::fp8_flops(), |g| g.fp8_flops),
        fp4_flops: optional(&GpuKeys::fp4_flops(), |g| g.fp4_flops),
        memory_bytes: floor_u64(memory_bytes),
        memory_bytes_per_s,
        link_bytes_per_s,
        link,
        reduce_us,
        gemm_compute: like.and_then(|gpu| gpu.gemm_compute),
        reads_per_head: like.map_or(0.0, |gpu| gpu.reads_per_head),
        board_power_w: None,
        source: "cluster file",
    }
}
