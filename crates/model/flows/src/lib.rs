//! A network as flows: each transfer takes a fair share of every link on its path.
//!
//! No packets, queues or losses. A transfer is a fluid that crosses all links of its path at one rate.
//! Rates are *max-min fair*: a flow's rate could only increase at the expense of a flow that has no higher
//! rate. Long transfers under a good congestion control approach these rates. Slow start, losses and incast
//! are not modelled; `slipstream-netsim` models them packet by packet.
//!
//! Cost: a transfer that begins or ends changes rates only among flows that share links with it,
//! directly or through others. Only those are examined, and only those whose rate changed are updated.
//!
//! Source: Bertsekas and Gallager, "Data Networks", 2nd ed., section 6.5.2 (max-min flow control,
//! and the progressive filling that computes it).
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

mod cluster;
mod fabric;
mod share;

pub use fabric::{Fabric, FabricConfig};

use slipstream_base::SimTime;

/// A network interface: a place where transfers begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(pub u32);

/// A transfer in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// A network that carries transfers between endpoints. It reads no clock: `now` never decreases
/// from call to call.
pub trait Network: Send {
    /// Starts to send `bytes`.
    fn send(&mut self, now: SimTime, from: Endpoint, to: Endpoint, bytes: u64) -> TransferId;

    /// Cancels a transfer in progress. Returns false if it has arrived, or never existed.
    fn cancel(&mut self, now: SimTime, transfer: TransferId) -> bool;

    /// Sets an endpoint's links to `share` (0 to 1) of their rate. At 0 its transfers stand
    /// still.
    fn set_share(&mut self, now: SimTime, endpoint: Endpoint, share: f64);

    /// Sets the links between a leaf switch and the spine to `share` (0 to 1) of their rate, if it is limited.
    fn set_uplink_share(&mut self, now: SimTime, leaf: u32, share: f64);

    /// Time of the next event, if the network is not called before; `None` if there is no
    /// further event.
    fn next_time(&mut self) -> Option<SimTime>;

    /// Runs to `now`, and appends messages that have arrived by then to `out`, in order of arrival.
    fn advance(&mut self, now: SimTime, out: &mut Vec<TransferId>);

    /// Latency of an empty message, ns.
    fn latency_ns(&self, from: Endpoint, to: Endpoint) -> u64;

    /// Transfers that have not arrived.
    fn under_way(&self) -> usize;
}
