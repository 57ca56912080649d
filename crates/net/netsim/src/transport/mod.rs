//! Endpoints: senders of packets and receivers that answer them.
//!
//! TCP, RoCE queue pairs, NDP and plain packets have their own variants of [`crate::step::Place`],
//! and their shard calls them directly. Any other transport is a file with a [`Protocol`], a
//! [`Sender`] and a [`Receiver`], and a line of [`PROTOCOLS`]. Those are called through pointers,
//! and share two variants.

pub(crate) mod congestion;
pub(crate) mod dcqcn;
pub(crate) mod ndp;
pub(crate) mod raw;
pub(crate) mod roce;
pub(crate) mod rtt;
#[cfg(test)]
mod stop_and_wait;
pub(crate) mod tcp;

use std::fmt;

use slipstream_base::mix;
use slipstream_base::width::{floor_u64, round_u64};
use slipstream_config::doc::Table;

use crate::event::NetEvent;
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};
use crate::scenario::{Arrivals, Dist, Transport};
use crate::step::Step;

/// Transports other than the four that are called directly.
pub(crate) const PROTOCOLS: &[&Protocol] = &[
    #[cfg(test)]
    &stop_and_wait::PROTOCOL,
];

/// A transport in files and outputs. Its flows have a known size.
///
/// An end keeps state for the packets under way. The limit of memory counts a TCP flow's two ends for each flow; a
/// transport with state for every packet of a flow adds it to `check_memory` in `layout.rs`, as NDP does.
pub(crate) struct Protocol {
    /// Value of `flow_type`.
    pub(crate) word: &'static str,
    /// Name in outputs.
    pub(crate) label: &'static str,
    /// Whether flows have several paths by default, `routing.spray_paths` of them. The ends choose a path per packet
    /// (`EndSetup::rows`), as [`ndp`] does by its `Spray`.
    pub(crate) sprays: bool,
    /// Reads its keys from `[traffic]`.
    pub(crate) read: fn(&Table<'_>) -> [f64; 8],
    /// Creates the two ends of a flow from the result of `read`.
    pub(crate) sender: fn(&EndSetup, &[f64; 8]) -> Box<dyn Sender>,
    /// As `sender`.
    pub(crate) receiver: fn(&EndSetup, &[f64; 8]) -> Box<dyn Receiver>,
}

/// The properties of one end of a flow when it is created.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "transports that are added read what they need")]
pub(crate) struct EndSetup {
    /// Index of the flow.
    pub(crate) flow: u32,
    /// The step at which timers of this end are scheduled.
    pub(crate) me: Step,
    /// Paths of the packets that this end sends. With one path that is `rows.first`.
    pub(crate) rows: Rows,
    /// Payload of a full packet, and the header of each packet, bytes.
    pub(crate) packet_bytes: u32,
    pub(crate) header_bytes: u32,
    /// Size of an answer on the wire, bytes.
    pub(crate) answer_bytes: u32,
    /// Bytes of the flow.
    pub(crate) total: u64,
    /// Seed of the flow.
    pub(crate) seed: u64,
    /// Rate of a host's link, bits/s.
    pub(crate) line_bits_per_s: u64,
}

/// A transport other than the four that are called directly, with its parameters.
#[derive(Clone, Copy)]
pub struct OtherTransport {
    pub(crate) protocol: &'static Protocol,
    pub(crate) parameters: [f64; 8],
}

impl fmt::Debug for OtherTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.protocol.word, self.parameters)
    }
}

impl PartialEq for OtherTransport {
    fn eq(&self, other: &OtherTransport) -> bool {
        (self.protocol.word, self.parameters) == (other.protocol.word, other.parameters)
    }
}

/// Name of a transport in outputs.
pub(crate) fn label(transport: &Transport) -> &'static str {
    match transport {
        Transport::Tcp(tcp) => congestion::label(&tcp.congestion),
        Transport::Roce(roce) if roce.dcqcn.is_some() => "RoCE DCQCN",
        Transport::Roce(_) => "RoCE",
        Transport::Ndp(_) => "NDP",
        Transport::Packets => "packets",
        Transport::Other(other) => other.protocol.label,
    }
}

/// State that every sender reports.
pub(crate) trait SenderState {
    /// Moves its packets to other paths.
    fn reroute(&mut self, rows: Rows);

    /// Counts of sent packets.
    fn count(&self) -> &SendCount;

    /// Sets `start_ns`, `acked_ns`, `bytes`, `bytes_acked` and the fields of this transport.
    fn report(&self, result: &mut FlowResult);
}

/// State that every receiver reports.
pub(crate) trait ReceiverState {
    /// Moves its answers to other paths.
    fn reroute(&mut self, rows: Rows);

    /// Counts of received packets.
    fn received(&self) -> &Received;

    /// Bytes that arrived, each counted once. Only those in order, if the transport keeps an order.
    fn in_order(&self) -> u64;
}

/// The sender of a transport of [`PROTOCOLS`]. Methods return true when the sender has completed
/// the flow.
pub(crate) trait Sender: SenderState + Send + fmt::Debug {
    /// Index of its flow.
    fn flow(&self) -> u32;

    /// Starts the flow.
    fn on_start(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool;

    /// Handles an answer.
    fn on_packet(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool;

    /// Handles a timer that it scheduled (`EventKind::Timer`).
    fn on_timer(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool;
}

/// The receiver of a transport of [`PROTOCOLS`].
pub(crate) trait Receiver: ReceiverState + Send + fmt::Debug {
    /// Index of its flow.
    fn flow(&self) -> u32;

    /// Handles a packet. True if it completes the flow.
    fn on_data(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool;
}

/// Counts of a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendCount {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) retransmitted: u64,
    pub(crate) acks: u64,
    pub(crate) fast_retransmits: u32,
    pub(crate) timeouts: u32,
    /// Sum of departure times from the sender, for mean delays, ns.
    pub(crate) time_sum: u64,
}

/// Counts of a receiver.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Received {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// Arrival times of the first and last packet, ns.
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Sum of arrival times, for mean delays, ns.
    pub(crate) time_sum: u64,
    /// When the flow was complete; 0: not yet.
    pub(crate) done_at: u64,
}

impl Received {
    /// Counts a packet with `bytes` of data.
    #[inline]
    pub(crate) fn note(&mut self, now: u64, bytes: u64) {
        if self.packets == 0 {
            self.first = now;
        }
        self.packets += 1;
        self.bytes += bytes;
        self.last = now;
        self.time_sum = self.time_sum.wrapping_add(now);
    }
}

/// Sample number `index` of a distribution.
pub(crate) fn sample(dist: &Dist, seed: u64, index: u64) -> f64 {
    if let Dist::Constant(value) = *dist {
        return value;
    }
    let u = mix::unit(mix::draw(seed, index));
    match *dist {
        Dist::Constant(value) => value,
        Dist::Uniform { low, high } => low + (high - low) * u,
        Dist::DiscreteUniform { low, high } => (low + (high - low + 1.0) * u).floor().min(high),
        // Inverse transform; 1 − u is in (0, 1].
        Dist::Exp { lambda } => -libm::log(1.0 - u) / lambda,
    }
}

/// An application that submits data in chunks.
#[derive(Clone, Debug)]
pub(crate) struct Paced {
    arrivals: Arrivals,
    seed: u64,
    index: u64,
    /// When the next chunk arrives, ns.
    pub(crate) next: u64,
    end: u64,
    /// Bytes left to submit; `u64::MAX` if only time bounds them.
    left: u64,
}

impl Paced {
    pub(crate) fn new(arrivals: Arrivals, seed: u64) -> Self {
        Paced {
            left: arrivals.bytes.unwrap_or(u64::MAX),
            seed,
            index: 0,
            next: 0,
            end: u64::MAX,
            arrivals,
        }
    }

    /// Makes the first chunk due now.
    pub(crate) fn begin(&mut self, now: u64) {
        self.next = now;
        if let Some(duration) = self.arrivals.duration_ns {
            self.end = now.saturating_add(duration);
        }
    }

    /// Size of the chunk that is due by `now`; `None` if none is due (see `next`) or left.
    pub(crate) fn take(&mut self, now: u64) -> Option<u64> {
        if self.next > now || self.is_over() {
            return None;
        }
        let size = sample(&self.arrivals.size, self.seed, 2 * self.index).round();
        let gap_s = sample(&self.arrivals.gap_s, self.seed, 2 * self.index + 1);
        self.index += 1;
        // Repeated gaps of 0 ns would stop time.
        self.next = self.next.saturating_add(round_u64(gap_s * 1e9).max(1));
        let size = floor_u64(size.max(1.0)).min(self.left);
        if self.left != u64::MAX {
            self.left -= size;
        }
        Some(size)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.next >= self.end || self.left == 0
    }
}
