//! A network as flows: each transfer takes a fair share of every link on its path.
//!
//! No packets, queues or losses. A transfer is a fluid that crosses all links of its path at one rate.
//! Rates are *max-min fair*: no flow could have more without taking from one that has no more than it.
//! Long transfers under a good congestion control approach these rates. Slow start, losses and incast
//! are left out; `slipstream-netsim` models them packet by packet.
//!
//! Cost: a transfer that begins or ends changes rates only among flows that share links with it,
//! directly or through others. Only those are examined, and only those whose rate changed are updated.
//!
//! Source: Bertsekas and Gallager, "Data Networks", 2nd ed., section 6.5.2 (max-min flow control,
//! and the progressive filling that computes it).
#![forbid(unsafe_code)]

mod cluster;
mod fabric;
mod share;

pub use fabric::{Fabric, FabricConfig};

use slipstream_base::SimTime;

/// Something with a network interface: a place where transfers begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(pub u32);

/// A transfer under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// A network that carries transfers between endpoints. It reads no clock: `now` never runs back
/// from call to call.
pub trait Network: Send {
    /// Begins to send `bytes`.
    fn send(&mut self, now: SimTime, from: Endpoint, to: Endpoint, bytes: u64) -> TransferId;

    /// Forgets a transfer that is under way. False if it has arrived, or was never.
    fn cancel(&mut self, now: SimTime, transfer: TransferId) -> bool;

    /// An endpoint's links have `share` (0 to 1) of their rate from now on. At 0 its transfers stand
    /// still.
    fn set_share(&mut self, now: SimTime, endpoint: Endpoint, share: f64);

    /// When something happens next, if nothing is asked of the network before; `None` if nothing
    /// ever will.
    fn next_time(&mut self) -> Option<SimTime>;

    /// Runs to `now`, and appends messages that have arrived by then to `out`, in order of arrival.
    fn advance(&mut self, now: SimTime, out: &mut Vec<TransferId>);

    /// Time of a message of no bytes, ns.
    fn latency_ns(&self, from: Endpoint, to: Endpoint) -> u64;

    /// Transfers that have not arrived.
    fn under_way(&self) -> usize;
}
