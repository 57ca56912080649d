//! A run as plain values, made by hand or by a configuration reader.

use crate::aqm::Aqm;
use crate::buffer::{PFC_CLASSES, Pfc, SharedBuffer};
use crate::failure::Failure;
use crate::route::Routing;
use crate::scheduled::Discipline;
use crate::topology::{Host, Node, Topology};
pub use crate::transport::OtherTransport;
pub use crate::transport::congestion::OtherCongestion;
pub use crate::transport::dcqcn::Dcqcn;
use crate::trim::Trim;

/// Rate and delay of the links of one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Rate, bits/s; from 1 to 10^15.
    pub bits_per_s: u64,
    /// Propagation delay, ns.
    pub delay_ns: u64,
}

/// Links by tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Between hosts and their switches; `None`: not modeled, a host sends at its switch.
    pub host: Option<Link>,
    /// Between switches.
    pub edge: Link,
    /// To and from core switches; global links of a dragonfly.
    pub core: Link,
}

/// The queues of every switch port.
#[derive(Clone, Debug, PartialEq)]
pub struct Queue {
    /// Packets that may wait, the one in service not counted; 0: no limit.
    pub capacity_packets: u32,
    /// Bytes that may wait, the packet in service not counted; 0: no limit.
    pub capacity_bytes: u64,
    /// Which class is served next.
    pub discipline: Discipline,
    /// Drops or marks before the queue is full.
    pub aqm: Aqm,
    /// Probability that a packet is lost on its way into a port, for fault injection.
    pub loss: f64,
    /// Memory shared by the ports of a switch.
    pub shared: Option<SharedBuffer>,
    /// Lossless classes.
    pub pfc: Option<Pfc>,
    /// Ports trim instead of dropping; discipline and capacity have no effect then.
    pub trim: Option<Trim>,
    /// PFC's priority of each of the first classes; usually its own number.
    pub priorities: [u8; PFC_CLASSES],
}

/// A distribution, drawn from by number, so that draws do not depend on the order of events.
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

/// Data that an application hands over piece by piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Size of a piece, bytes.
    pub size: Dist,
    /// Gap between pieces, s.
    pub gap_s: Dist,
    /// No piece arrives this long after the start or later, ns.
    pub duration_ns: Option<u64>,
    /// Bytes in all.
    pub bytes: Option<u64>,
}

/// Data that a flow has to send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// So many bytes, there from the start.
    Bytes(u64),
    /// Piece by piece.
    Paced(Arrivals),
}

impl Demand {
    /// Bytes in all, where that is known.
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
    /// Another one of the crate's table, called through a pointer.
    Other(OtherCongestion),
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
    /// Packets are ECN-capable.
    pub ecn: bool,
    /// No segment shorter than the MSS while more data waits (RFC 9293 section 3.8.6.2.1). `false`:
    /// each segment is min(MSS, window left, data left), as Days' Reno sends them.
    pub sws_avoidance: bool,
}

impl Tcp {
    /// Days' defaults: NewReno, first window 2 segments, threshold 65,535 bytes, RTO at least 1 s.
    pub fn new_reno() -> Self {
        Tcp {
            congestion: Congestion::NewReno,
            initial_window: 2,
            ssthresh: 65_535,
            rto_ns_min: 1_000_000_000,
            ecn: false,
            sws_avoidance: true,
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
    /// Without progress for so long the sender goes back to the first unacknowledged packet, ns.
    /// `None`: longer than packets and answers take while nothing is lost, by the path's links and
    /// buffers.
    pub retry_ns: Option<u64>,
    /// Packets that one ACK covers; the last packet of a flow always has its own. A window of fewer
    /// packets counts instead.
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

/// A receiver-driven flow in the manner of NDP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ndp {
    /// Packets sent without being asked for.
    pub window_packets: u32,
    /// Without an answer for so long lost packets go again, ns. `None`: 1 ms, or longer where packets
    /// and answers take longer while nothing is lost.
    pub retry_ns: Option<u64>,
}

impl Ndp {
    /// Handley et al. 2017, section 3.2.3: headers are hardly ever lost, so 1 ms is safe.
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

/// How a flow's packets are sent and answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Transport {
    /// TCP.
    Tcp(Tcp),
    /// A RoCE queue pair.
    Roce(Roce),
    /// Receiver-driven, in the manner of NDP.
    Ndp(Ndp),
    /// Packets that nothing answers.
    Packets,
    /// Another one of the crate's table, called through pointers.
    Other(OtherTransport),
}

/// Which paths a flow may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Paths {
    /// Chosen by the network.
    By(Routing),
    /// These switches, first to last; ACKs return the same way.
    Explicit(Vec<Node>),
}

/// When a predecessor counts as finished.
///
/// The receiver of a flow without a size cannot know which byte is the last, and that of a flow of 0
/// bytes gets none: those two finish when their sender does, either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finished {
    /// Its last byte has arrived.
    Delivered,
    /// Its sender has the last ACK. Plain packets have none: their sender has sent the last packet.
    Acknowledged,
}

impl Finished {
    /// The event of `flow` that can be waited for.
    pub(crate) fn of(self, flow: &Flow) -> Finished {
        match flow.demand.bytes() {
            None | Some(0) => Finished::Acknowledged,
            Some(_) => self,
        }
    }
}

/// A flow waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// Index of the other flow in [`Scenario::flows`].
    pub flow: u32,
    /// The event to wait for.
    pub until: Finished,
    /// Time between the two, such as computation, ns.
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
    /// Seed of everything drawn.
    pub seed: u64,
    /// Simulated time after which nothing happens, ns.
    pub duration_ns: u64,
    /// Switches and hosts.
    pub topology: Topology,
    /// Rates and delays.
    pub links: Links,
    /// Switch queues.
    pub queue: Queue,
    /// The traffic.
    pub flows: Vec<Flow>,
    /// Paths of a sprayed flow, per direction, at most.
    pub spray_paths: u32,
    /// Time between samples of all ports, ns; `None`: no samples.
    pub sample_ns: Option<u64>,
    /// Links and switches that fail.
    pub failures: Vec<Failure>,
    /// Time from a failure or repair until flows take other paths, ns.
    pub notice_ns: u64,
}
