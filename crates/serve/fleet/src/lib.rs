//! The control plane of a router in front of real engines: which engines there are, what they cache, and how many
//! there should be.
//!
//! - [`membership`]: engines that DNS or Kubernetes list ([`endpoint_slices`]).
//! - [`engine_kv`]: the engines' KV events, followed into the router's index.
//! - [`autoscale`]: the number of workers that each pool should have, as metrics, a file and a webhook.
//! - [`metrics`]: the router's fleet on `/metrics`.
//! - [`server`] and [`socket`]: parts that servers of modelled engines have as well.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod access_log;
pub mod autoscale;
pub mod endpoint_slices;
pub mod engine_kv;
mod keys;
pub mod membership;
pub mod metrics;
pub mod reload;
pub mod router;
pub mod server;
pub mod shadow;
pub mod socket;
pub mod spans;
