//! A run as plain values, built in code or by a configuration reader.

use crate::aqm::Aqm;
use crate::failure::Failure;
use crate::link::Links;
use crate::queueing::{Discipline, PFC_CLASSES, Pfc, SharedBuffer, Trim};
use crate::route::Routing;
use crate::topology::{Host, Node, Topology};
pub use crate::transport::OtherTransport;
use crate::transport::congestion;
pub use crate::transport::congestion::OtherCongestion;
pub use crate::transport::dcqcn::Dcqcn;

/// The queues of every switch port.
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    /// Packets that may wait, without the one in service; 0: no limit.
    pub capacity_packets: u32,
    /// Bytes that may wait, without the packet in service; 0: no limit.
    pub capacity_bytes: u64,
    /// The order in which classes are served.
    pub discipline: Discipline,
    /// Drops or marks before the queue is full.
    pub aqm: Aqm,
    /// Probability that a packet is lost on its way into a port, for fault injection.
    pub loss: f64,
    /// Memory shared by the ports of a switch.
    pub shared: Option<SharedBuffer>,
    /// Lossless classes.
    pub pfc: Option<Pfc>,
    /// Ports trim instead of dropping; `discipline` and the capacities have no effect then.
    pub trim: Option<Trim>,
    /// PFC's priority of each of the first classes; by default its own number.
    pub priorities: [u8; PFC_CLASSES],
}

/// A distribution, sampled by index, so that samples do not depend on the order of events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Dist {
    /// Always the same.
    Constant(f64),
    /// Continuous.
    Uniform {
        /// Lower end.
        low: f64,
        /// Upper end.
        high: f64,
    },
    /// Whole numbers, both ends included.
    DiscreteUniform {
        /// Lower end.
        low: f64,
        /// Upper end.
        high: f64,
    },
    /// Exponential with mean 1/lambda.
    Exp {
        /// Rate.
        lambda: f64,
    },
}

impl Dist {
    /// Mean.
    pub fn mean(&self) -> f64 {
        match *self {
            Dist::Constant(value) => value,
            Dist::Uniform { low, high } | Dist::DiscreteUniform { low, high } => {
                f64::midpoint(low, high)
            }
            Dist::Exp { lambda } => 1.0 / lambda,
        }
    }
}

/// Data that an application submits in chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Size of a chunk, bytes.
    pub size: Dist,
    /// Gap between chunks, s.
    pub gap_s: Dist,
    /// No chunk arrives this long after the start or later, ns.
    pub duration_ns: Option<u64>,
    /// Total bytes.
    pub bytes: Option<u64>,
}

/// The data that a flow has to send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// This many bytes, available from the start.
    Bytes(u64),
    /// In chunks over time.
    Paced(Arrivals),
}

impl Demand {
    /// Total bytes, if known.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Demand::Bytes(bytes) => Some(*bytes),
            Demand::Paced(a) => a.bytes,
        }
    }
}

/// Parameters of CUBIC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CubicParams {
    /// C, segments/s³. RFC 9438 section 5.1: 0.4.
    pub c: f64,
    /// Multiplicative decrease. RFC 9438 section 4.6: 0.7.
    pub beta: f64,
    /// RFC 9438 section 4.7.
    pub fast_convergence: bool,
}

impl Default for CubicParams {
    fn default() -> Self {
        CubicParams {
            c: 0.4,
            beta: 0.7,
            fast_convergence: true,
        }
    }
}

/// Congestion control of TCP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Congestion {
    /// RFC 5681, RFC 6582.
    NewReno,
    /// RFC 9438.
    Cubic(CubicParams),
    /// RFC 8257, with gain g.
    Dctcp {
        /// Gain of the estimate; RFC 8257 suggests 1/16.
        gain: f64,
    },
    /// Version 1, draft-cardwell-iccrg-bbr-congestion-control-00.
    Bbr,
    /// Another entry of the crate's table, called through a pointer.
    Other(OtherCongestion),
}

impl Congestion {
    /// All congestion controls: the first value of `cc_algorithm` that names each, and its label.
    pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
        congestion::ALGORITHMS
            .iter()
            .map(|algorithm| (algorithm.words[0], algorithm.label))
    }

    /// Name in outputs.
    pub fn label(&self) -> &'static str {
        congestion::label(self)
    }
}

/// TCP of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tcp {
    /// Congestion control.
    pub congestion: Congestion,
    /// First window, segments.
    pub initial_window: u32,
    /// First slow-start threshold, bytes.
    pub ssthresh: u64,
    /// Shortest retransmission timeout, ns. RFC 6298 section 2.4: 1 s.
    pub rto_ns_min: u64,
    /// Retransmission timeout before the first measurement, ns. `None`: from the round trip of a
    /// handshake over the idle path (RFC 6298 section 2.2).
    pub rto_ns_initial: Option<u64>,
    /// Packets are ECN-capable.
    pub ecn: bool,
    /// Avoids segments shorter than the MSS while more data waits (RFC 9293 section 3.8.6.2.1).
    /// `false`: each segment is min(MSS, window left, data left), as Days' Reno sends them.
    pub sws_avoidance: bool,
    /// Selective acknowledgments (RFC 2018, 6675); `false`: duplicate ACKs and go-back-N.
    pub sack: bool,
    /// RACK-TLP (RFC 8985), with `sack` only.
    pub rack: bool,
}

impl Tcp {
    /// Days' defaults: NewReno, first window 2 segments, threshold 65,535 bytes, RTO at least 1 s.
    pub fn new_reno() -> Self {
        Tcp {
            congestion: Congestion::NewReno,
            initial_window: 2,
            ssthresh: 65_535,
            rto_ns_min: 1_000_000_000,
            rto_ns_initial: None,
            ecn: false,
            sws_avoidance: true,
            sack: false,
            rack: false,
        }
    }
}

/// A RoCE queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roce {
    /// Rate control; `None`: line rate.
    pub dcqcn: Option<Dcqcn>,
    /// Bytes that may be unacknowledged; 0: no limit.
    pub window_bytes: u64,
    /// Without progress for this long, the sender goes back to the first unacknowledged packet, ns.
    /// `None`: derived from the path's links and buffers, longer than the round trip without loss.
    pub retry_ns: Option<u64>,
    /// Packets per ACK; the last packet of a flow always has its own. A smaller window limits it.
    pub ack_every: u32,
}

impl Default for Roce {
    fn default() -> Self {
        Roce {
            dcqcn: Some(Dcqcn::default()),
            window_bytes: 0,
            retry_ns: None,
            ack_every: 1,
        }
    }
}

/// A receiver-driven flow, similar to NDP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ndp {
    /// Packets sent before the receiver's first pull.
    pub window_packets: u32,
    /// Without an answer for this long, lost packets are retransmitted, ns. `None`: 1 ms, or longer
    /// if the round trip without loss is longer.
    pub retry_ns: Option<u64>,
}

impl Ndp {
    /// Handley et al. 2017, section 3.2.3: headers are rarely lost, so 1 ms is safe.
    pub(crate) const RETRY_NS_MIN: u64 = 1_000_000;
}

impl Default for Ndp {
    fn default() -> Self {
        Ndp {
            // Handley et al. 2017, section 3.2: about a bandwidth-delay product; 30 packets in its
            // section 6.
            window_packets: 30,
            retry_ns: None,
        }
    }
}

/// The transport protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transport {
    /// TCP.
    Tcp(Tcp),
    /// A RoCE queue pair.
    Roce(Roce),
    /// Receiver-driven, similar to NDP.
    Ndp(Ndp),
    /// Packets without acknowledgments.
    Packets,
    /// Another entry of the crate's table, called through pointers.
    Other(OtherTransport),
}

/// The paths that a flow may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Paths {
    /// Chosen by the network.
    By(Routing),
    /// These switches, first to last; ACKs return over the same links.
    Explicit(Vec<Node>),
}

/// When a predecessor counts as finished.
///
/// The receiver of a flow without a size cannot know its last byte, and that of a flow of 0 bytes
/// receives none. Both finish when their sender does, with either value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finished {
    /// Its last byte has arrived.
    Delivered,
    /// Its sender has received the last ACK. Plain packets have none: their sender has sent the
    /// last packet.
    Acknowledged,
}

impl Finished {
    /// The event of `flow` that dependents wait for.
    pub(crate) fn of(self, flow: &Flow) -> Finished {
        match flow.demand.bytes() {
            None | Some(0) => Finished::Acknowledged,
            Some(_) => self,
        }
    }
}

/// A dependency on another flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// Index of that flow in [`Scenario::flows`].
    pub flow: u32,
    /// The event to wait for.
    pub until: Finished,
    /// Delay after the event, such as computation, ns.
    pub delay_ns: u64,
}

/// A flow.
#[derive(Clone, Debug, PartialEq)]
pub struct Flow {
    /// Its number in the file.
    pub id: u64,
    /// Sender.
    pub src: Host,
    /// Receiver; not the sender.
    pub dst: Host,
    /// Earliest start, ns.
    pub start_ns: u64,
    /// Its data.
    pub demand: Demand,
    /// Its transport.
    pub transport: Transport,
    /// Its paths.
    pub paths: Paths,
    /// Payload of a full packet, bytes.
    pub packet_bytes: u32,
    /// Added to each data packet on the wire, bytes. Days: 0.
    pub header_bytes: u32,
    /// An ACK on the wire, bytes. Days: 40.
    pub ack_bytes: u32,
    /// Traffic class, for queues that have several.
    pub class: u8,
    /// Traffic class of its acknowledgments and other answers.
    pub answer_class: u8,
    /// Flows that must finish first.
    pub after: Vec<After>,
    /// Index of the collective that it belongs to.
    pub collective: Option<u32>,
}

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Seed of all random numbers.
    pub seed: u64,
    /// End of simulated time, ns.
    pub duration_ns: u64,
    /// Switches and hosts.
    pub topology: Topology,
    /// Rates and delays.
    pub links: Links,
    /// Switch queues.
    pub queue: Queue,
    /// The traffic.
    pub flows: Vec<Flow>,
    /// Maximum paths of a sprayed flow, per direction.
    pub spray_paths: u32,
    /// Time between samples of all ports, ns; `None`: no samples.
    pub sample_ns: Option<u64>,
    /// Links and switches that fail.
    pub failures: Vec<Failure>,
    /// Convergence time: from a failure or repair until flows take other paths, ns.
    pub convergence_ns: u64,
}
