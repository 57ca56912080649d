//! Power limits of GPUs.

/// Power limit of a board (TDP) from its vendor's data sheet, W; the maximum of configurable ones.
/// GPUs without a separate figure, such as those of a rack, are absent.
///
/// Sources: the data sheets and white papers of the presets ("Max thermal design power", "Total
/// graphics power", "Typical board power").
const BOARD_POWER_W: &[(&str, f64)] = &[
    ("a100-sxm-80gb", 400.0),
    ("h100-sxm", 700.0),
    ("h200-sxm", 700.0),
    ("b200-sxm", 1_000.0),
    ("l40s", 350.0),
    ("l4", 72.0),
    ("rtx-4090", 450.0),
    ("rtx-pro-6000", 600.0),
    ("mi300x", 750.0),
    ("a100-sxm-40gb", 400.0),
    ("a100-pcie-80gb", 300.0),
    ("h100-pcie", 350.0),
    ("h100-nvl", 400.0),
    ("a10", 150.0),
    ("t4", 70.0),
    ("rtx-5090", 575.0),
    ("mi325x", 1_000.0),
    ("mi355x", 1_400.0),
];

/// Power limit of the GPU with the preset `gpu`, W, if its data sheet has one.
pub fn board_power_w(gpu: &str) -> Option<f64> {
    let entry = BOARD_POWER_W.iter().find(|(name, _)| *name == gpu)?;
    Some(entry.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preset;

    #[test]
    fn power_is_in_proportion_to_arithmetic() {
        for (at, (name, watt)) in BOARD_POWER_W.iter().enumerate() {
            let gpu = preset::gpu(name).unwrap_or_else(|| panic!("{name} is a preset"));
            assert!(BOARD_POWER_W[..at].iter().all(|other| other.0 != *name));
            // BF16 FLOP/s per W: 0.36e12 (RTX 4090) to 2.3e12 (B200); a wrong digit would be
            // outside.
            let efficiency = gpu.bf16_flops / watt / 1e12;
            assert!((0.3..3.0).contains(&efficiency), "{name}: {efficiency}");
        }
        assert_eq!(board_power_w("gb200"), None);
    }
}
