//! Worker processes under a simulator (feature `sim`).

pub use crate::callhome::sim::{Connect, Connecting, SimConfig, SimWorker};
pub use crate::thread::sim::Checked;
