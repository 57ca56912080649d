//! GPUs: peaks from their vendors' data sheets.

/// What joins the GPUs of one tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// NVLink through NVSwitch, or AMD's Infinity Fabric.
    Fabric,
    /// PCI Express.
    Pcie,
}

impl Link {
    /// Word for tables.
    pub fn name(self) -> &'static str {
        match self {
            Link::Fabric => "fabric",
            Link::Pcie => "pcie",
        }
    }
}

/// A GPU's peaks. What of them a kernel reaches is the timing model's matter.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Name in a cluster file.
    pub name: &'static str,
    /// Name on the box.
    pub title: &'static str,
    /// Dense (no sparsity) BF16 tensor throughput with FP32 accumulation, FLOP/s.
    pub bf16_flops: f64,
    /// Dense FP8 tensor throughput, FLOP/s; `None`: no FP8 units.
    pub fp8_flops: Option<f64>,
    /// Memory that programs can use, bytes.
    pub memory_bytes: u64,
    /// Memory bandwidth, bytes/s.
    pub memory_bytes_per_s: f64,
    /// Bandwidth to the other GPUs of the group, bytes/s in one direction. Data sheets usually
    /// state both directions together, twice this.
    pub link_bytes_per_s: f64,
    /// Kind of that link.
    pub link: Link,
    /// Where the numbers stand.
    pub source: &'static str,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const GIB: u64 = 1 << 30;

/// All GPUs.
///
/// Vendors print memory sizes as "80 GB" for what is built from power-of-two stacks: here they are
/// GiB, rounded down to what a driver reports. GPUs with ECC inside GDDR6 (L4, L40S) lose 1/16 of
/// it to check bits.
pub const GPUS: &[Gpu] = &[
    Gpu {
        name: "a100-sxm-80gb",
        title: "NVIDIA A100 SXM 80GB",
        bf16_flops: 312.0 * TERA,
        fp8_flops: None,
        memory_bytes: 80 * GIB,
        memory_bytes_per_s: 2_039.0 * GIGA,
        link_bytes_per_s: 300.0 * GIGA,
        link: Link::Fabric,
        source: "NVIDIA A100 data sheet: 312 TFLOPS BF16, 2,039 GB/s, NVLink 600 GB/s both ways",
    },
    Gpu {
        name: "h100-sxm",
        title: "NVIDIA H100 SXM 80GB",
        bf16_flops: 989.5 * TERA,
        fp8_flops: Some(1_979.0 * TERA),
        memory_bytes: 80 * GIB,
        memory_bytes_per_s: 3_350.0 * GIGA,
        link_bytes_per_s: 450.0 * GIGA,
        link: Link::Fabric,
        source: "NVIDIA H100 data sheet: 1,979 TFLOPS BF16 and 3,958 FP8 with sparsity, 3.35 TB/s, \
                 NVLink 900 GB/s both ways",
    },
    Gpu {
        name: "h200-sxm",
        title: "NVIDIA H200 SXM 141GB",
        bf16_flops: 989.5 * TERA,
        fp8_flops: Some(1_979.0 * TERA),
        memory_bytes: 140 * GIB,
        memory_bytes_per_s: 4_800.0 * GIGA,
        link_bytes_per_s: 450.0 * GIGA,
        link: Link::Fabric,
        source: "NVIDIA H200 data sheet: compute as H100, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways",
    },
    Gpu {
        name: "b200-sxm",
        title: "NVIDIA B200 SXM 180GB",
        bf16_flops: 2_250.0 * TERA,
        fp8_flops: Some(4_500.0 * TERA),
        memory_bytes: 179 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        source: "NVIDIA HGX B200: 36 PFLOPS BF16 and 72 FP8 with sparsity for 8 GPUs, 8 TB/s, \
                 NVLink 1.8 TB/s both ways",
    },
    Gpu {
        name: "gb200",
        title: "NVIDIA GB200 (one GPU of NVL72)",
        bf16_flops: 2_500.0 * TERA,
        fp8_flops: Some(5_000.0 * TERA),
        memory_bytes: 185 * GIB,
        memory_bytes_per_s: 8_000.0 * GIGA,
        link_bytes_per_s: 900.0 * GIGA,
        link: Link::Fabric,
        source: "NVIDIA GB200 NVL72 data sheet: 360 PFLOPS BF16 and 720 FP8 with sparsity, 13.4 TB, \
                 576 TB/s and NVLink 130 TB/s for 72 GPUs",
    },
    Gpu {
        name: "l40s",
        title: "NVIDIA L40S 48GB",
        bf16_flops: 362.05 * TERA,
        fp8_flops: Some(733.0 * TERA),
        memory_bytes: 45 * GIB,
        memory_bytes_per_s: 864.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        source: "NVIDIA L40S data sheet: 362.05 TFLOPS BF16, 733 FP8, 864 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: "l4",
        title: "NVIDIA L4 24GB",
        bf16_flops: 121.0 * TERA,
        fp8_flops: Some(242.5 * TERA),
        memory_bytes: 45 * GIB / 2,
        memory_bytes_per_s: 300.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        source: "NVIDIA L4 data sheet: 242 TFLOPS BF16 and 485 FP8 with sparsity, 300 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: "rtx-4090",
        title: "NVIDIA GeForce RTX 4090 24GB",
        bf16_flops: 165.2 * TERA,
        fp8_flops: Some(330.3 * TERA),
        memory_bytes: 24 * GIB,
        memory_bytes_per_s: 1_008.0 * GIGA,
        link_bytes_per_s: 32.0 * GIGA,
        link: Link::Pcie,
        source: "NVIDIA Ada architecture white paper, appendix A: 165.2 TFLOPS BF16 and 330.3 FP8 with \
                 FP32 accumulation, 1,008 GB/s, PCIe 4.0 x16",
    },
    Gpu {
        name: "rtx-pro-6000",
        title: "NVIDIA RTX PRO 6000 Blackwell Server Edition 96GB",
        bf16_flops: 503.8 * TERA,
        fp8_flops: Some(1_007.6 * TERA),
        memory_bytes: 95 * GIB,
        memory_bytes_per_s: 1_597.0 * GIGA,
        link_bytes_per_s: 64.0 * GIGA,
        link: Link::Pcie,
        source: "NVIDIA RTX PRO 6000 Blackwell data sheet: 4 PFLOPS FP4 with sparsity, an eighth of it \
                 dense BF16; server edition 1,597 GB/s, PCIe 5.0 x16",
    },
    Gpu {
        name: "mi300x",
        title: "AMD Instinct MI300X 192GB",
        bf16_flops: 1_307.4 * TERA,
        fp8_flops: Some(2_614.9 * TERA),
        memory_bytes: 192 * GIB,
        memory_bytes_per_s: 5_300.0 * GIGA,
        link_bytes_per_s: 448.0 * GIGA,
        link: Link::Fabric,
        source: "AMD Instinct MI300X data sheet: 1,307.4 TFLOPS BF16, 2,614.9 FP8, 5.3 TB/s, 7 Infinity \
                 Fabric links of 128 GB/s both ways",
    },
];

/// The GPU named `name`.
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
            // FLOPs per byte at the ridge: all GPUs of these generations lie between 100 and 450;
            // a slipped digit or a sparse figure would not.
            let ridge = a.bf16_flops / a.memory_bytes_per_s;
            assert!((100.0..450.0).contains(&ridge), "{}: {ridge}", a.name);
            if let Some(fp8) = a.fp8_flops {
                assert!((1.9..2.1).contains(&(fp8 / a.bf16_flops)), "{}", a.name);
            }
        }
    }
}
