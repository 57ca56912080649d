//! The result of a flow.

use crate::topology::Host;

/// Result of a flow. Times are ns of simulated time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlowResult {
    /// Its number in the file.
    pub id: u64,
    /// Sender.
    pub src: Host,
    /// Receiver.
    pub dst: Host,
    /// Whether it started before the run ended.
    pub started: bool,
    /// Start time; 0 if it did not start.
    pub start_ns: u64,
    /// When the last byte had arrived in order; `None`: bytes are missing.
    pub delivered_ns: Option<u64>,
    /// When the sender received the last acknowledgment.
    pub acked_ns: Option<u64>,
    /// Bytes that the application submitted.
    pub bytes: u64,
    /// Bytes acknowledged.
    pub bytes_acked: u64,
    /// Data packets sent, including retransmissions.
    pub packets_sent: u64,
    /// Payload of those, bytes.
    pub bytes_sent: u64,
    /// Data packets retransmitted.
    pub retransmitted: u64,
    /// ACKs received.
    pub acks: u64,
    /// Losses detected by duplicate ACKs.
    pub fast_retransmits: u32,
    /// Losses detected by the timer.
    pub timeouts: u32,
    /// NACKs received: go-back-N, or trimmed packets.
    pub nacks: u64,
    /// DCQCN's congestion notifications received.
    pub notifications: u64,
    /// When the sender's retransmission timer expires; `None`: it is off.
    pub timer_ns: Option<u64>,
    /// Last sending rate of a rate-controlled flow, bits/s.
    pub rate_bits_per_s: Option<f64>,
    /// Last congestion window, bytes.
    pub cwnd: u64,
    /// Last slow-start threshold, bytes.
    pub ssthresh: u64,
    /// Data packets received, duplicates included.
    pub packets_received: u64,
    /// Payload of those, bytes.
    pub bytes_received: u64,
    /// Bytes received in order.
    pub bytes_in_order: u64,
    /// First arrival.
    pub first_ns: u64,
    /// Last arrival.
    pub last_ns: u64,
    /// Mean time from sender to receiver, ns. `None` if packets were lost or are in flight, as
    /// packets do not carry their departure times.
    pub one_way_delay_ns_mean: Option<f64>,
}

impl FlowResult {
    pub(crate) fn broken_law(&self) -> Option<String> {
        let in_order = self.bytes_in_order;
        let laws = [
            (
                self.packets_received <= self.packets_sent,
                "packets received",
            ),
            (self.bytes_received <= self.bytes_sent, "bytes received"),
            (
                in_order <= self.bytes.min(self.bytes_received),
                "bytes in order",
            ),
            (self.bytes_acked <= in_order, "bytes acknowledged"),
            (
                self.retransmitted <= self.packets_sent,
                "packets sent again",
            ),
            (
                self.retransmitted > 0 || self.bytes_sent <= self.bytes,
                "bytes sent without retransmission",
            ),
            (
                self.acked_ns.is_none() || self.bytes_acked == self.bytes,
                "end without every byte",
            ),
            (
                self.delivered_ns.is_none_or(|at| at >= self.start_ns),
                "arrival before the start",
            ),
        ];
        let broken = laws.iter().find(|law| !law.0)?;
        Some(format!("flow {}: {}: {self:?}", self.id, broken.1))
    }
}
