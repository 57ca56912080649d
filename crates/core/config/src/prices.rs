//! The price file: prices of GPUs and of energy, and the power of GPUs.
//!
//! ```toml
//! [prices]            # per GPU-hour, in any one currency
//! h100-sxm = 2.5
//! l40s = 0.9
//! kwh = 0.12          # of energy, if GPU-hours do not include it
//! host-gib = 0.004    # of a GiB of host memory for an hour, if GPU-hours do not include it
//!
//! [power]             # W per GPU, instead of the preset's
//! h100-sxm = 650
//! ```

use std::collections::BTreeMap;

use crate::doc::{Diagnostics, Doc};
use crate::preset::{self, GPUS};

/// Prices and power. Nothing has a default price.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prices {
    /// Per GPU-hour, by name of the GPU.
    pub gpu_hour: BTreeMap<String, f64>,
    /// Per kWh; `None`: included in the GPU-hours.
    pub kwh: Option<f64>,
    /// Per hour of a GiB of host memory; `None`: included in the GPU-hours.
    pub host_gib: Option<f64>,
    /// W per GPU, by name of the GPU; others have their preset's.
    pub power_w: BTreeMap<String, f64>,
}

/// Highest price, and highest power: beyond it is an error in the unit.
const MOST: f64 = 1e6;

impl Prices {
    /// Reads a price file for presets and for `own`, the GPUs of a cluster file.
    ///
    /// # Errors
    /// All mistakes together, such as unknown GPUs and negative prices.
    pub fn read(doc: Doc, own: &[String]) -> Result<Prices, Diagnostics> {
        let (prices, _) = doc.read(|root| {
            let by_gpu = |t: &crate::doc::Table<'_>| {
                let presets = GPUS.iter().map(|gpu| &*gpu.name);
                let names = presets.chain(own.iter().map(String::as_str));
                let each = names.filter_map(|name| {
                    let value = t.get(name).within(0.0..=MOST).optional()?;
                    Some((name.to_owned(), value))
                });
                each.collect()
            };
            let (gpu_hour, kwh, host_gib) = root.table("prices", |t| {
                let optional = |key| t.get(key).within(0.0..=MOST).optional();
                (by_gpu(t), optional("kwh"), optional("host-gib"))
            });
            let power_w = root.table("power", by_gpu);
            Prices {
                gpu_hour,
                kwh,
                host_gib,
                power_w,
            }
        })?;
        Ok(prices)
    }

    /// Power of one GPU, W: the file's, or the data sheet's. `None` if neither is known.
    pub fn power_w(&self, gpu: &str) -> Option<f64> {
        let own = self.power_w.get(gpu).copied();
        own.or_else(|| preset::board_power_w(gpu))
    }

    /// Price of one GPU for an hour, energy included. `None` if it has no price, or if energy has
    /// one and the power is not known.
    pub fn per_gpu_hour(&self, gpu: &str) -> Option<f64> {
        let hour = *self.gpu_hour.get(gpu)?;
        match self.kwh {
            None => Some(hour),
            Some(kwh) => Some(hour + kwh * self.power_w(gpu)? / 1000.0),
        }
    }

    /// Whether anything has a price.
    pub fn are_stated(&self) -> bool {
        !self.gpu_hour.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Prices, String> {
        let own = ["ours".to_owned()];
        Prices::read(Doc::parse("p.toml", text.as_bytes()), &own).map_err(|e| e.to_string())
    }

    #[test]
    fn energy_is_added_to_the_hour() {
        let prices = read("[prices]\nh100-sxm = 2.5\nkwh = 0.1\n[power]\nh100-sxm = 500\n");
        let prices = prices.unwrap();
        assert_eq!(prices.per_gpu_hour("h100-sxm"), Some(2.5 + 0.05));
        assert_eq!(prices.per_gpu_hour("l40s"), None);
        // Without a price of energy, no power is needed.
        let plain = read("[prices]\nh100-sxm = 2.5\n").unwrap();
        assert_eq!(plain.per_gpu_hour("h100-sxm"), Some(2.5));
        assert_eq!(plain.power_w("h100-sxm"), Some(700.0));
        assert!(!read("").unwrap().are_stated());
        let ours = read("[prices]\nours = 4\nkwh = 0.1\n[power]\nours = 1000\n").unwrap();
        assert_eq!(ours.per_gpu_hour("ours"), Some(4.1));
        assert_eq!(ours.host_gib, None);
        let memory = read("[prices]\nours = 4\nhost-gib = 0.01\n").unwrap();
        assert_eq!(memory.host_gib, Some(0.01));
    }

    #[test]
    fn mistakes_name_the_line() {
        let error = read("[prices]\nh100-smx = 2.5\nl40s = -1\n").unwrap_err();
        for part in ["p.toml:2", "`h100-sxm`", "p.toml:3"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
