//! Flags for prices of GPUs.

use std::path::PathBuf;

use anyhow::Context;
use slipstream_config::cluster::{Cluster, TimingConfig};
use slipstream_config::doc::Doc;
use slipstream_config::prices::Prices;

/// Prices, by flags over a file. Nothing has a default price.
#[derive(clap::Args)]
pub(crate) struct PriceArgs {
    /// Price of a GPU-hour, such as h100-sxm=2.5; may be repeated
    #[arg(long, value_name = "GPU=PRICE", help_heading = "Cost")]
    price: Vec<String>,
    /// File with `[prices]` and `[power]` (docs/plan.md)
    #[arg(long, value_name = "FILE", help_heading = "Cost")]
    prices: Option<PathBuf>,
}

impl PriceArgs {
    /// Prices of presets and of `own`, the GPUs of the cluster file.
    pub(crate) fn read(&self, own: &[String]) -> anyhow::Result<Prices> {
        let mut doc = match &self.prices {
            None => Doc::empty(),
            Some(path) => {
                let name = path.display().to_string();
                let text = super::files::read(path).with_context(|| format!("reading {name}"))?;
                Doc::parse(&name, &text)
            }
        };
        for price in &self.price {
            doc.set(&format!("prices.{price}"));
        }
        Prices::read(doc, own).map_err(|mistakes| anyhow::anyhow!("{mistakes}"))
    }
}

/// Cost of a cluster per hour.
///
/// # Errors
/// A pool's GPU has no price, or is not known.
pub(crate) fn per_hour(cluster: &Cluster, prices: &Prices) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for pool in &cluster.pools {
        let (TimingConfig::Calibrated { gpu, .. } | TimingConfig::Roofline { gpu, .. }) =
            &pool.engine.timing
        else {
            anyhow::bail!(
                "[pool.{}] names no GPU, so it has no price; prices need `engine.timing.kind` \"calibrated\" \
                 or \"roofline\"",
                pool.name
            );
        };
        let gpu = &*gpu.name;
        let price = prices.per_gpu_hour(gpu).with_context(|| {
            format!("{gpu} has no price, or no power for that of energy; give --price {gpu}=PRICE")
        })?;
        let gpus = u64::from(pool.workers)
            * u64::from(pool.engine.tensor_parallel_size)
            * u64::from(pool.engine.data_parallel_size);
        sum += price * gpus as f64;
    }
    Ok(sum)
}

/// `99%`, `99.9 %` or `0.99`, as a share.
pub(crate) fn percent(text: &str) -> Result<f64, String> {
    let wrong = || format!("`{text}` is no share; write 99% or 0.99");
    let share = match text.trim().strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map_err(|_| wrong())? / 100.0,
        None => text.trim().parse::<f64>().map_err(|_| wrong())?,
    };
    if text.contains('%') || share <= 1.0 {
        Ok(share)
    } else {
        Err(format!("`{text}` is above 1; write {text}% for percent"))
    }
}
