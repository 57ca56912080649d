//! Settings of queues: order of service, trimming, shared memory, and priority flow control (PFC).

use slipstream_base::width::to_u64;

/// Classes of PFC (IEEE 802.1Qbb: eight priorities).
pub const PFC_CLASSES: usize = 8;
/// A pause frame on the wire, bytes (IEEE 802.3 clause 31B: a MAC control frame of minimum size).
pub(crate) const PAUSE_BYTES: u64 = 64;
/// No ingress: the packet did not come over a link that can be paused.
pub(crate) const NO_INGRESS: u32 = u32::MAX;

/// Memory shared by all ports of a switch, split by dynamic thresholds: a queue may hold α times
/// the free bytes (Choudhury, Hahne, "Dynamic queue length thresholds for shared-memory packet
/// switches", IEEE/ACM ToN 1998, equation 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedBuffer {
    /// Bytes per switch, without PFC headroom.
    pub bytes: u64,
    /// α.
    pub alpha: f64,
}

/// Priority flow control (IEEE 802.1Qbb). A pause lasts until it is revoked or, with `quanta`, at
/// most that long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pfc {
    /// Waiting bytes of a class from one link at which the link is paused. `None`: `alpha` times
    /// the free bytes of the shared buffer (Zhu et al., "Congestion control for large-scale RDMA
    /// deployments", SIGCOMM 2015, section 4: t_PFC).
    pub xoff_bytes: Option<u64>,
    /// α of the dynamic threshold.
    pub alpha: f64,
    /// A link resumes when its class has fallen this far below the threshold, bytes.
    pub xon_gap_bytes: u64,
    /// Bytes reserved for packets that arrive after the pause was sent. `None`: the bytes in flight
    /// on the link (see [`headroom_bytes`]).
    pub headroom_bytes: Option<u64>,
    /// Bit c: class c is lossless.
    pub classes: u8,
    /// Duration of a pause, in times of 512 bits on its link (IEEE 802.3 annex 31B.2: pause_quanta,
    /// 16 bits); `None`: until it is revoked.
    pub quanta: Option<u16>,
    /// Quanta after which a pause that still holds is sent again. 0: only when a packet of its
    /// class arrives after it has expired.
    pub refresh: u16,
    /// Thresholds per priority on all its bytes that wait behind a link. They replace `xoff_bytes`,
    /// `alpha`, `xon_gap_bytes` and `headroom_bytes`.
    pub by_priority: Option<[Thresholds; PFC_CLASSES]>,
    /// Whether switches also pause the links of hosts.
    pub host_links: bool,
}

/// When a priority of a link is paused, by its bytes that wait behind that link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Paused at and above, bytes.
    pub xoff_bytes: u64,
    /// Resumed at and below, bytes.
    pub xon_bytes: u64,
    /// A packet that would exceed this is dropped, bytes.
    pub capacity_bytes: u64,
}

impl Pfc {
    /// Whether a pause lasts until its switch revokes it.
    pub(crate) fn is_lasting(&self) -> bool {
        self.quanta
            .is_none_or(|quanta| self.refresh > 0 && self.refresh <= quanta)
    }
}

/// Bytes of a class that may arrive after its pause is decided: the packet in transmission, the
/// link's bandwidth-delay product in both directions, and the pause frame's transmission time (Zhu
/// et al. 2015, section 4, t_flight: these parts, without the interface's response time).
pub fn headroom_bytes(bits_per_s: u64, delay_ns: u64, packet_bytes: u64) -> u64 {
    let in_flight = u128::from(bits_per_s) * u128::from(2 * delay_ns);
    to_u64(in_flight.div_ceil(8_000_000_000)) + 2 * packet_bytes + PAUSE_BYTES
}

/// The rules of all switches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    pub(crate) shared: Option<SharedBuffer>,
    pub(crate) pfc: Option<Pfc>,
    /// Bytes of headroom by class of link.
    pub(crate) headroom: Vec<u64>,
}

impl Rules {
    pub(crate) fn is_lossless(&self, class: usize) -> bool {
        class < PFC_CLASSES && self.pfc.is_some_and(|p| p.classes >> class & 1 == 1)
    }
}

/// The order in which classes are served.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Discipline {
    /// One queue; the port costs one event per packet.
    #[default]
    Fifo,
    /// The class with the highest priority that has a packet; by class.
    StrictPriority(Vec<u32>),
    /// Deficit round robin (Shreedhar, Varghese, "Efficient fair queuing using deficit round
    /// robin", IEEE/ACM ToN 1996): a class may send quantum × weight bytes per round.
    Drr(Vec<u32>),
    /// Weighted round robin: the weight is the packets per round.
    Wrr(Vec<u32>),
    /// Weighted fair queueing by self-clocked finish tags (Golestani, "A self-clocked fair
    /// queueing scheme for broadband applications", INFOCOM 1994).
    Wfq(Vec<u32>),
    /// Virtual clock (Zhang, SIGCOMM 1990): stamps advance by vtick ns per packet.
    VirtualClock(Vec<u64>),
    /// Virtual clock whose stamps advance with a packet's size: seconds per bit, by class.
    VirtualClockBits(Vec<f64>),
    /// Arrival order over this many priorities, each of which PFC may pause separately.
    PriorityFifo(u8),
}

impl Discipline {
    /// Classes; flows of a higher class join the last one.
    pub fn classes(&self) -> usize {
        match self {
            Discipline::Fifo => 1,
            Discipline::StrictPriority(v)
            | Discipline::Drr(v)
            | Discipline::Wrr(v)
            | Discipline::Wfq(v) => v.len(),
            Discipline::VirtualClock(v) => v.len(),
            Discipline::VirtualClockBits(v) => v.len(),
            Discipline::PriorityFifo(n) => usize::from(*n),
        }
    }
}

/// Trimming at every switch port.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trim {
    /// Data packets that may wait. Section 3.1: eight.
    pub data_packets: u32,
    /// Headers and control packets that may wait. Section 3.1 gives them as much memory as data:
    /// 1,125 headers of 64 bytes for eight packets of 9,000.
    pub header_packets: u32,
    /// A trimmed packet on the wire, bytes. Section 3.1: 64.
    pub header_bytes: u32,
    /// Headers sent per waiting data packet, so that headers alone cannot fill a link. Section 3.1:
    /// ten to one.
    pub headers_per_data: u32,
    /// A header that finds no room is returned to its sender (the paper's return-to-sender).
    pub return_to_sender: bool,
}

impl Default for Trim {
    fn default() -> Self {
        Trim {
            data_packets: 8,
            header_packets: 1_125,
            header_bytes: 64,
            headers_per_data: 10,
            return_to_sender: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headroom_is_the_link_both_ways_two_packets_and_the_frame() {
        // 40 Gb/s and 1.5 us (300 m): 2 · 1,500 ns · 5 bytes/ns = 15,000; + 2 · 1,500 + 64.
        assert_eq!(headroom_bytes(40_000_000_000, 1_500, 1_500), 18_064);
        assert_eq!(headroom_bytes(100_000_000_000, 0, 1_000), 2_064);
    }
}
