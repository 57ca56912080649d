//! Power limits of GPUs.

/// Pages that state the same figure.
const HF: &str = "huggingface.co/hardware";
const HF_CATALOG: &str = "gpu_catalog.json of huggingface.co/RajBhope/gpu-runtime-predictor";
const TOMS: &str =
    "tomshardware.com, AMD's Instinct MI355X accelerator will consume 1,400 watts, 2025";
const ONE_STOP: &str = "onestopsystems.com, blog on 600 W cards";
const METERPRETER: &str = "meterpreter.org, AMD confirms Instinct MI300X power consumption";
const HMC: &str = "hmc-tech.com, NVIDIA B200 vs NVIDIA L4";
/// From the vendor's data sheet as remembered.
const NOT_CHECKED: &str = "not checked";

/// Power limit of a board (TDP), W; for configurable ones the maximum; and the public page that has the same figure,
/// or [`NOT_CHECKED`]. GPUs without a separate figure, such as those of a rack, are absent.
const BOARD_POWER_W: &[(&str, f64, &str)] = &[
    ("a100-sxm-80gb", 400.0, NOT_CHECKED),
    ("h100-sxm", 700.0, HF),
    ("h200-sxm", 700.0, HF),
    ("b200-sxm", 1_000.0, HMC),
    ("l40s", 350.0, HF),
    ("l4", 72.0, HMC),
    (
        "rtx-4090",
        450.0,
        "hothardware.com, Nvidia's GeForce RTX 5090 600W GPU? Not so fast",
    ),
    (
        "rtx-pro-6000",
        600.0,
        "gpu.name, NVIDIA unveils RTX Pro 6000 Blackwell GPU",
    ),
    ("mi300x", 750.0, METERPRETER),
    ("a100-sxm-40gb", 400.0, HF_CATALOG),
    ("a100-pcie-80gb", 300.0, NOT_CHECKED),
    ("h100-pcie", 350.0, METERPRETER),
    ("h100-nvl", 400.0, ONE_STOP),
    ("a10", 150.0, NOT_CHECKED),
    ("t4", 70.0, HF_CATALOG),
    ("rtx-5090", 575.0, "pcgamer.com, report before the release"),
    ("mi325x", 1_000.0, NOT_CHECKED),
    ("mi355x", 1_400.0, TOMS),
];

/// Power limit of the GPU with the preset `gpu`, W, if it has one of its own.
pub fn board_power_w(gpu: &str) -> Option<f64> {
    let entry = BOARD_POWER_W.iter().find(|(name, ..)| *name == gpu)?;
    Some(entry.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preset;

    #[test]
    fn power_is_in_proportion_to_arithmetic() {
        for (at, (name, watt, source)) in BOARD_POWER_W.iter().enumerate() {
            let gpu = preset::gpu(name).unwrap_or_else(|| panic!("{name} is a preset"));
            assert!(!source.is_empty());
            assert!(BOARD_POWER_W[..at].iter().all(|other| other.0 != *name));
            // BF16 FLOP/s per W: 0.36e12 (RTX 4090) to 2.3e12 (B200); a wrong digit would be
            // outside.
            let efficiency = gpu.bf16_flops / watt / 1e12;
            assert!((0.3..3.0).contains(&efficiency), "{name}: {efficiency}");
        }
        assert_eq!(board_power_w("gb200"), None);
    }
}
