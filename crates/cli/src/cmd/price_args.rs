//! Flags for prices of GPUs.

use std::path::PathBuf;

use slipstream_study::source::PriceSource;

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
    /// The prices of these flags, for a question.
    pub(crate) fn source(&self) -> PriceSource {
        PriceSource {
            prices: self.price.clone(),
            file: self.prices.clone(),
            text: None,
        }
    }
}
