//! `[upstream]` of the cluster file, as the code uses it.

use std::time::Duration;

use slipstream_base::width::to_usize;
use slipstream_config::cluster::{OutlierConfig, Resume, UpstreamConfig};

/// `[upstream]` in the units that it is used in.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(super) connect_timeout: Duration,
    pub(super) first_byte_timeout: Duration,
    pub(super) idle_timeout: Duration,
    pub(super) keep_alive: Duration,
    pub(super) connections_idle_max: usize,
    pub(super) health_interval: Duration,
    pub(super) health_timeout: Duration,
    pub(super) models_interval: Duration,
    pub(super) failures_max: u32,
    pub(super) ejection: Duration,
    pub(super) ejection_max: Duration,
    pub(super) outlier: OutlierConfig,
    pub(super) retry_budget: f64,
    pub(super) resume: Resume,
    pub(super) resume_bytes_max: usize,
    pub(super) forward: Vec<String>,
    pub(super) drain_timeout: Duration,
}

impl Settings {
    pub(super) fn new(config: &UpstreamConfig) -> Settings {
        let seconds = Duration::from_secs_f64;
        Settings {
            connect_timeout: seconds(config.connect_timeout_s),
            first_byte_timeout: seconds(config.first_byte_timeout_s),
            idle_timeout: seconds(config.idle_timeout_s),
            keep_alive: seconds(config.keep_alive_s),
            connections_idle_max: config.connections_idle_max as usize,
            health_interval: seconds(config.health_interval_s),
            health_timeout: seconds(config.health_timeout_s),
            models_interval: seconds(config.models_interval_s),
            failures_max: config.failures_max,
            ejection: seconds(config.ejection_s),
            ejection_max: seconds(config.ejection_s_max),
            outlier: config.outlier,
            retry_budget: config.retry_budget,
            resume: config.resume,
            resume_bytes_max: to_usize(config.resume_bytes_max),
            forward: config.forward.clone(),
            drain_timeout: seconds(config.drain_timeout_s),
        }
    }
}
