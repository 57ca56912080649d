//! GPUs: peaks from their vendors' data sheets.

use std::borrow::Cow;

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
    /// Source of the numbers.
    pub source: &'static str,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// All GPUs.
///
/// Vendors print memory sizes as "80 GB" for power-of-two stacks: here they are GiB, rounded down
/// to the size that a driver reports (H100 80GB: 81,559 MiB; RTX 4090: 23.52 GiB for programs).
/// GPUs with ECC inside GDDR6 (L4, L40S) lose 1/16 of it to check bits.
pub const GPUS: &[Gpu] = &[
    Gpu {
        name: Cow::Borrowed("a100-sxm-80gb"),
        like: None,
        title: "NVIDIA A100 SXM 80GB",
        bf16_flops: 312.0 * TERA,
        fp8_flops: None,
        fp4_flops: None,
        memory_bytes: 80 * GIB,
        memory_bytes_per_s: 2_039.0 * GIGA,
        link_bytes_per_s: 300.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA A100 data sheet: 312 TFLOPS BF16, 2,039 GB/s, NVLink 600 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("h100-sxm"),
        like: None,
        title: "NVIDIA H100 SXM 80GB",
        bf16_flops: 989.5 * TERA,
        fp8_flops: Some(1_979.0 * TERA),
        fp4_flops: None,
        memory_bytes: 81_559 * MIB,
        memory_bytes_per_s: 3_350.0 * GIGA,
        link_bytes_per_s: 450.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA H100 data sheet: 1,979 TFLOPS BF16 and 3,958 FP8 with sparsity, 3.35 TB/s, \
                 NVLink 900 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("h200-sxm"),
        like: None,
        title: "NVIDIA H200 SXM 141GB",
        bf16_flops: 989.5 * TERA,
        fp8_flops: Some(1_979.0 * TERA),
        fp4_flops: None,
        memory_bytes: 140 * GIB,
        memory_bytes_per_s: 4_800.0 * GIGA,
        link_bytes_per_s: 450.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA H200 data sheet: compute as H100, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("b200-sxm"),
        like: None,
        title: "NVIDIA B200 SXM 180GB",
        bf16_flops: 2_250.0 * TERA,
        fp8_flops: Some(4_500.0 * TERA),
        fp4_flops: Some(9_000.0 * TERA),
        memory_bytes: 179 * GIB,
        memory_bytes_per_s: 7_700.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA HGX B200 data sheet: 36 PFLOPS BF16, 72 FP8 and 144 FP4 with sparsity for 8 GPUs, \
                 1.4 TB and 62 TB/s (7.7 TB/s each), NVLink 1.8 TB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("gb200"),
        like: None,
        title: "NVIDIA GB200 (one GPU of NVL72)",
        bf16_flops: 2_500.0 * TERA,
        fp8_flops: Some(5_000.0 * TERA),
        fp4_flops: Some(10_000.0 * TERA),
        memory_bytes: 185 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS BF16 and 720 FP8 with sparsity, 13.4 TB, \
                 576 TB/s and NVLink 130 TB/s for 72 GPUs",
    },
    Gpu {
        name: Cow::Borrowed("l40s"),
        like: None,
        title: "NVIDIA L40S 48GB",
        bf16_flops: 362.05 * TERA,
        fp8_flops: Some(733.0 * TERA),
        fp4_flops: None,
        memory_bytes: 45 * GIB,
        memory_bytes_per_s: 864.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA L40S data sheet: 362.05 TFLOPS BF16, 733 FP8, 864 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("l4"),
        like: None,
        title: "NVIDIA L4 24GB",
        bf16_flops: 121.0 * TERA,
        fp8_flops: Some(242.5 * TERA),
        fp4_flops: None,
        memory_bytes: 45 * GIB / 2,
        memory_bytes_per_s: 300.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA L4 data sheet: 242 TFLOPS BF16 and 485 FP8 with sparsity, 300 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("rtx-4090"),
        like: None,
        title: "NVIDIA GeForce RTX 4090 24GB",
        bf16_flops: 165.2 * TERA,
        fp8_flops: Some(330.3 * TERA),
        fp4_flops: None,
        memory_bytes: 24_084 * MIB,
        memory_bytes_per_s: 1_008.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA Ada architecture white paper, appendix A: 165.2 TFLOPS BF16 and 330.3 FP8 with \
                 FP32 accumulation, 1,008 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("rtx-pro-6000"),
        like: None,
        title: "NVIDIA RTX PRO 6000 Blackwell Server Edition 96GB",
        bf16_flops: 503.8 * TERA,
        fp8_flops: Some(1_007.6 * TERA),
        fp4_flops: Some(2_015.2 * TERA),
        memory_bytes: 95 * GIB,
        memory_bytes_per_s: 1_597.0 * GIGA,
        link_bytes_per_s: 64.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA RTX PRO 6000 Blackwell data sheet: 4 PFLOPS FP4 with sparsity, an eighth of it \
                 dense BF16; server edition 1,597 GB/s, PCIe 5.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("mi300x"),
        like: None,
        title: "AMD Instinct MI300X 192GB",
        bf16_flops: 1_307.4 * TERA,
        fp8_flops: Some(2_614.9 * TERA),
        fp4_flops: None,
        memory_bytes: 192 * GIB,
        memory_bytes_per_s: 5_300.0 * GIGA,
        link_bytes_per_s: 448.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS BF16, 2,614.9 FP8, 5.3 TB/s, 7 Infinity \
                 Fabric links of 128 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("a100-sxm-40gb"),
        like: None,
        title: "NVIDIA A100 SXM 40GB",
        bf16_flops: 312.0 * TERA,
        fp8_flops: None,
        fp4_flops: None,
        memory_bytes: 40 * GIB,
        memory_bytes_per_s: 1_555.0 * GIGA,
        link_bytes_per_s: 300.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA A100 data sheet: 312 TFLOPS BF16, 1,555 GB/s, NVLink 600 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("a100-pcie-80gb"),
        like: None,
        title: "NVIDIA A100 PCIe 80GB",
        bf16_flops: 312.0 * TERA,
        fp8_flops: None,
        fp4_flops: None,
        memory_bytes: 80 * GIB,
        memory_bytes_per_s: 1_935.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA A100 data sheet: 312 TFLOPS BF16, 1,935 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("h100-pcie"),
        like: None,
        title: "NVIDIA H100 PCIe 80GB",
        bf16_flops: 756.0 * TERA,
        fp8_flops: Some(1_513.0 * TERA),
        fp4_flops: None,
        memory_bytes: 81_559 * MIB,
        memory_bytes_per_s: 2_000.0 * GIGA,
        link_bytes_per_s: 64.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA H100 PCIe product brief: 756 TFLOPS BF16 and 1,513 FP8, 2.0 TB/s, PCIe 5.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("h100-nvl"),
        like: None,
        title: "NVIDIA H100 NVL 94GB",
        bf16_flops: 835.5 * TERA,
        fp8_flops: Some(1_671.0 * TERA),
        fp4_flops: None,
        memory_bytes: 93 * GIB,
        memory_bytes_per_s: 3_900.0 * GIGA,
        link_bytes_per_s: 300.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA H100 data sheet: 1,671 TFLOPS BF16 and 3,341 FP8 with sparsity, 94 GB, 3.9 TB/s, NVLink bridge 600 GB/s both ways (pairs)",
    },
    Gpu {
        name: Cow::Borrowed("h20"),
        like: None,
        title: "NVIDIA H20 96GB",
        bf16_flops: 148.0 * TERA,
        fp8_flops: Some(296.0 * TERA),
        fp4_flops: None,
        memory_bytes: 95 * GIB,
        memory_bytes_per_s: 4_000.0 * GIGA,
        link_bytes_per_s: 450.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA H20 data sheet: 148 TFLOPS BF16, 296 FP8, 96 GB, 4.0 TB/s, NVLink 900 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("b300-sxm"),
        like: None,
        title: "NVIDIA B300 SXM 288GB",
        bf16_flops: 2_250.0 * TERA,
        fp8_flops: Some(4_500.0 * TERA),
        fp4_flops: Some(13_500.0 * TERA),
        memory_bytes: 268 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA HGX B300 data sheet: 36 PFLOPS BF16 and 72 FP8 with sparsity, 108 FP4 dense for 8 GPUs, 2.1 TB, 8 TB/s each, NVLink 1.8 TB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("gb300"),
        like: None,
        title: "NVIDIA GB300 (one GPU of NVL72)",
        bf16_flops: 2_500.0 * TERA,
        fp8_flops: Some(5_000.0 * TERA),
        fp4_flops: Some(15_000.0 * TERA),
        memory_bytes: 277 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "NVIDIA GB300 NVL72 data sheet: 360 PFLOPS BF16 and 720 FP8 with sparsity, 1,080 FP4 dense, 20 TB, 576 TB/s and NVLink 130 TB/s for 72 GPUs",
    },
    Gpu {
        name: Cow::Borrowed("a10"),
        like: None,
        title: "NVIDIA A10 24GB",
        bf16_flops: 125.0 * TERA,
        fp8_flops: None,
        fp4_flops: None,
        memory_bytes: 22 * GIB,
        memory_bytes_per_s: 600.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA A10 data sheet: 125 TFLOPS BF16, 24 GB, 600 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("t4"),
        like: None,
        title: "NVIDIA T4 16GB",
        bf16_flops: 65.0 * TERA,
        fp8_flops: None,
        fp4_flops: None,
        memory_bytes: 15 * GIB,
        memory_bytes_per_s: 320.0 * GIGA,
        link_bytes_per_s: 16.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA T4 data sheet: 65 TFLOPS FP16 (no BF16 units), 16 GB, 320 GB/s, PCIe 3.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("rtx-5090"),
        like: None,
        title: "NVIDIA GeForce RTX 5090 32GB",
        bf16_flops: 209.5 * TERA,
        fp8_flops: Some(419.0 * TERA),
        fp4_flops: Some(1_676.0 * TERA),
        memory_bytes: 31 * GIB,
        memory_bytes_per_s: 1_792.0 * GIGA,
        link_bytes_per_s: 64.0 * GIGA,
        link: Link::Pcie,
        reduce_us: None,
        source: "NVIDIA RTX Blackwell architecture white paper, appendix A: 209.5 TFLOPS BF16 and 419 FP8 with FP32 accumulation, 1,676 FP4, 1,792 GB/s, PCIe 5.0 x16",
    },
    Gpu {
        name: Cow::Borrowed("mi325x"),
        like: None,
        title: "AMD Instinct MI325X 256GB",
        bf16_flops: 1_307.4 * TERA,
        fp8_flops: Some(2_614.9 * TERA),
        fp4_flops: None,
        memory_bytes: 255 * GIB,
        memory_bytes_per_s: 6_000.0 * GIGA,
        link_bytes_per_s: 448.0 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "AMD Instinct MI325X data sheet: 1,307.4 TFLOPS BF16, 2,614.9 FP8, 256 GB, 6 TB/s, 7 Infinity Fabric links of 128 GB/s both ways",
    },
    Gpu {
        name: Cow::Borrowed("mi355x"),
        like: None,
        title: "AMD Instinct MI355X 288GB",
        bf16_flops: 2_516.6 * TERA,
        fp8_flops: Some(5_033.2 * TERA),
        fp4_flops: Some(10_066.3 * TERA),
        memory_bytes: 287 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 537.6 * GIGA,
        link: Link::Fabric,
        reduce_us: None,
        source: "AMD Instinct MI355X data sheet: 2.5 PFLOPS BF16, 5 FP8, 10.1 MXFP4, 288 GB, 8 TB/s, 7 Infinity Fabric links of 153.6 GB/s both ways",
    },
];

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
            bf16_flops,
            fp8_flops,
            fp4_flops,
            memory_bytes,
            memory_bytes_per_s,
            link_bytes_per_s,
            link,
            reduce_us,
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
}
