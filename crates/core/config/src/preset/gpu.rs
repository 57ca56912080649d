//! GPUs: peaks from their vendors' data sheets.

use std::borrow::Cow;
use std::sync::LazyLock;

use crate::doc::{Doc, Table};

/// The interconnect between the GPUs of one tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// NVLink through NVSwitch, or AMD's Infinity Fabric.
    Fabric,
    /// PCI Express.
    Pcie,
}

impl Link {
    /// Name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Link::Fabric => "fabric",
            Link::Pcie => "pcie",
        }
    }
}

/// A GPU's peak figures. The timing model decides how much of them a kernel reaches.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Name in a cluster file.
    pub name: Cow<'static, str>,
    /// For a GPU of the cluster file: the preset of the same generation, whose kernels and
    /// framework overheads it has.
    pub like: Option<&'static str>,
    /// Product name.
    pub title: &'static str,
    /// Its generation: kernels and frameworks' overheads are shared within one.
    pub generation: &'static str,
    /// Dense (no sparsity) BF16 tensor throughput with FP32 accumulation, FLOP/s.
    pub bf16_flops: f64,
    /// Dense FP8 tensor throughput, FLOP/s; `None`: no FP8 units.
    pub fp8_flops: Option<f64>,
    /// Dense FP4 tensor throughput, FLOP/s; `None`: no FP4 units.
    pub fp4_flops: Option<f64>,
    /// Memory that programs can use, bytes.
    pub memory_bytes: u64,
    /// Memory bandwidth, bytes/s.
    pub memory_bytes_per_s: f64,
    /// Bandwidth to the other GPUs of the group, bytes/s per direction. Data sheets usually state
    /// the sum of both directions, twice this.
    pub link_bytes_per_s: f64,
    /// Kind of that link.
    pub link: Link,
    /// Latency of an all-reduce over the link, us; `None`: the default of its kind.
    pub reduce_us: Option<f64>,
    /// Share of the peak that large matrix products reach, where it was measured.
    pub gemm_compute: Option<f64>,
    /// Reads of keys and values by each query head beyond the first of a group, in a pass with a prefill, over those of
    /// the first.
    pub reads_per_head: f64,
    /// Power limit of the board (TDP), W; `None`: there is no separate figure.
    pub board_power_w: Option<f64>,
    /// Source of the numbers.
    pub source: &'static str,
}

/// All GPUs: those of `gpus.toml`, in its order.
pub static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| {
    let doc = Doc::parse("gpus.toml", include_bytes!("gpus.toml"));
    let read = doc.read(|root| root.tables("gpu", read_preset));
    read.expect("gpus.toml has the keys of GPUs").0
});

fn read_preset(name: &str, t: &Table<'_>) -> Gpu {
    const LINKS: &[(&str, Link)] = &[("fabric", Link::Fabric), ("pcie", Link::Pcie)];
    const GENERATIONS: &[(&str, &str)] = &[
        ("hopper", "hopper"),
        ("blackwell", "blackwell"),
        ("blackwell-gddr", "blackwell-gddr"),
        ("ada", "ada"),
        ("cdna", "cdna"),
        ("older", "older"),
    ];
    let text = |key: &str| -> &'static str {
        let text: String = t.get(key).required("add it", String::new());
        text.leak() // once per process
    };
    let figure = |key: &str| t.get(key).within(1.0..=1e18);
    let needed = |key: &str| figure(key).required("add it", 1.0);
    let memory_mib: u64 = t.get("memory_mib").required("add it", 1);
    let board_power_w = figure("board_power_w").optional();
    if board_power_w.is_some() {
        text("power_source");
    }
    Gpu {
        name: name.to_owned().into(),
        like: None,
        title: text("title"),
        generation: t
            .choice("generation", GENERATIONS)
            .required("add it", "older"),
        bf16_flops: needed("bf16_flops"),
        fp8_flops: figure("fp8_flops").optional(),
        fp4_flops: figure("fp4_flops").optional(),
        memory_bytes: memory_mib << 20,
        memory_bytes_per_s: needed("memory_bytes_per_s"),
        link_bytes_per_s: needed("link_bytes_per_s"),
        link: t.choice("link", LINKS).required("add it", Link::Pcie),
        reduce_us: figure("reduce_us").optional(),
        gemm_compute: t.get("gemm_compute").within(0.0..=1.0).optional(),
        reads_per_head: t.get("reads_per_head").within(0.0..=1.0).or(0.0),
        board_power_w,
        source: text("source"),
    }
}

impl Gpu {
    /// The preset whose kernels are assumed: itself, unless the cluster file sets another.
    pub fn kin(&self) -> &str {
        self.like.unwrap_or(&self.name)
    }

    /// Its name among measured GPUs: that of the preset it is like, if no number differs from it.
    pub fn measured_name(&self) -> &str {
        let like = self.like.and_then(gpu);
        match like {
            Some(like) if self.has_numbers_of(like) => &like.name,
            _ => &self.name,
        }
    }

    fn has_numbers_of(&self, other: &Gpu) -> bool {
        // Every field is named, so that a new number is not forgotten here.
        let Gpu {
            name: _,
            like: _,
            title: _,
            generation: _,
            bf16_flops,
            fp8_flops,
            fp4_flops,
            memory_bytes,
            memory_bytes_per_s,
            link_bytes_per_s,
            link,
            reduce_us,
            // Those of the GPU that it is like.
            gemm_compute: _,
            reads_per_head: _,
            board_power_w: _,
            source: _,
        } = self;
        *bf16_flops == other.bf16_flops
            && *fp8_flops == other.fp8_flops
            && *fp4_flops == other.fp4_flops
            && *memory_bytes == other.memory_bytes
            && *memory_bytes_per_s == other.memory_bytes_per_s
            && *link_bytes_per_s == other.link_bytes_per_s
            && *link == other.link
            && *reduce_us == other.reduce_us
    }
}

/// The GPU with this name.
pub fn gpu(name: &str) -> Option<&'static Gpu> {
    GPUS.iter().find(|gpu| gpu.name == name)
}

/// Power limit of the GPU with the preset `gpu`, W, if it has one of its own.
pub fn board_power_w(gpu: &str) -> Option<f64> {
    self::gpu(gpu)?.board_power_w
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_of_one_order_and_names_unique() {
        for (i, a) in GPUS.iter().enumerate() {
            assert!(
                GPUS[..i].iter().all(|b| b.name != a.name),
                "{} twice",
                a.name
            );
            // FLOPs per byte at the ridge: between 100 and 450 for all GPUs of these generations. A
            // wrong digit or a sparse figure would be outside. The H20 has reduced compute by
            // design.
            let ridge = a.bf16_flops / a.memory_bytes_per_s;
            let least = if a.name == "h20" { 30.0 } else { 100.0 };
            assert!((least..450.0).contains(&ridge), "{}: {ridge}", a.name);
            if let (Some(fp8), Some(fp4)) = (a.fp8_flops, a.fp4_flops) {
                // Blackwell Ultra and GeForce have three to four times as much.
                assert!((1.9..4.1).contains(&(fp4 / fp8)), "{}", a.name);
            }
            if let Some(fp8) = a.fp8_flops {
                assert!((1.9..2.1).contains(&(fp8 / a.bf16_flops)), "{}", a.name);
            }
        }
    }

    #[test]
    fn power_is_in_proportion_to_arithmetic() {
        for gpu in GPUS.iter() {
            // BF16 FLOP/s per W: 0.36e12 (RTX 4090) to 2.3e12 (B200); a wrong digit would be
            // outside.
            if let Some(watt) = gpu.board_power_w {
                let efficiency = gpu.bf16_flops / watt / 1e12;
                assert!(
                    (0.3..3.0).contains(&efficiency),
                    "{}: {efficiency}",
                    gpu.name
                );
            }
        }
        assert_eq!(board_power_w("gb200"), None);
    }
}
