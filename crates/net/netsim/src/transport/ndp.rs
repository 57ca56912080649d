//! A receiver-driven transport, similar to NDP (Handley et al., "Re-architecting datacenter
//! networks and stacks for low latency and high performance", SIGCOMM 2017).
//!
//! A sender pushes a first window at line rate, and then sends one packet per pull. The receiver
//! answers each packet, full or trimmed, at once by an ACK or a NACK. The receiving host paces the
//! pulls of all its flows at the rate of its link (section 3.2). Packets take all paths, in a new
//! random order per round (section 3.1.1).

use std::collections::VecDeque;

use slipstream_base::mix;
use slipstream_base::width::{low_u32, to_u32};

use crate::event::{EventKind, NetEvent, TRIMMABLE, TRIMMED};
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};
use crate::scenario::{Ndp, Scenario, Transport};
use crate::step::Step;
use crate::transport::{Received, ReceiverState, SendCount, SenderState};

/// A warning about NDP flows in a network that drops whole packets; `None` if there are none.
pub(crate) fn without_trimming(scenario: &Scenario) -> Option<String> {
    let queue = &scenario.queue;
    let drops = queue.trim.is_none()
        && queue.pfc.is_none()
        && (queue.capacity_packets > 0 || queue.capacity_bytes > 0 || queue.shared.is_some());
    let flows = scenario.flows.iter();
    let count = flows
        .filter(|f| matches!(f.transport, Transport::Ndp(_)))
        .count();
    (drops && count > 0).then(|| {
        format!(
            "{count} NDP flows cross switches that drop whole packets, which receivers cannot \
             detect: only the sender's timer retransmits them; set `switch.drop = \"Trim\"`, or use \
             another flow type"
        )
    })
}

/// The paths of one direction of a flow, in a new order per round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spray {
    row: u32,
    rows: u32,
    seed: u64,
    at: u32,
    round: u32,
    /// This round's order: position p takes path (p · stride + offset) mod rows.
    stride: u32,
    offset: u32,
}

impl Spray {
    pub(crate) fn new(row: u32, rows: u32, seed: u64) -> Self {
        let mut spray = Spray {
            row,
            rows,
            seed,
            at: 0,
            round: 0,
            stride: 1,
            offset: 0,
        };
        spray.shuffle();
        spray
    }

    /// Moves packets to other paths.
    pub(crate) fn reroute(&mut self, rows: Rows) {
        *self = Spray::new(rows.first, rows.count, self.seed);
    }

    fn shuffle(&mut self) {
        let draw = mix::draw(self.seed, u64::from(self.round));
        self.offset = low_u32(mix::below(draw, u64::from(self.rows)));
        // Any stride coprime to the number of paths visits each path once.
        let mut stride = (low_u32(draw) | 1) % self.rows.max(1);
        while gcd(stride, self.rows) != 1 {
            stride = (stride + 1) % self.rows.max(2);
        }
        self.stride = stride;
    }

    /// The row of the next packet.
    #[inline]
    pub(crate) fn take(&mut self) -> u32 {
        if self.rows == 1 {
            return self.row;
        }
        let row = self.row + self.offset;
        self.offset += self.stride;
        if self.offset >= self.rows {
            self.offset -= self.rows;
        }
        self.at += 1;
        if self.at == self.rows {
            self.at = 0;
            self.round = self.round.wrapping_add(1);
            self.shuffle();
        }
        row
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A set of packet numbers.
#[derive(Clone, Debug)]
struct Bits {
    words: Vec<u64>,
    count: u32,
}

impl Bits {
    fn new(n: u32) -> Self {
        Bits {
            words: vec![0; n.div_ceil(64) as usize],
            count: 0,
        }
    }

    fn has(&self, i: u32) -> bool {
        self.words[(i / 64) as usize] >> (i % 64) & 1 == 1
    }

    /// Adds `i`; true if it was not in the set.
    fn add(&mut self, i: u32) -> bool {
        let (at, bit) = ((i / 64) as usize, 1u64 << (i % 64));
        let word = self.words[at];
        if word & bit != 0 {
            return false;
        }
        self.words[at] = word | bit;
        self.count += 1;
        true
    }

    /// Bytes of these packets, of a flow of `total` bytes in packets of `mtu` and a shorter last one.
    fn bytes(&self, mtu: u32, total: u64) -> u64 {
        let (mtu, packets) = (u64::from(mtu), total.div_ceil(mtu.into()));
        let last = packets
            .checked_sub(1)
            .is_some_and(|last| self.has(to_u32(last)));
        let missing = if last { packets * mtu - total } else { 0 };
        u64::from(self.count) * mtu - missing
    }

    fn first_missing(&self) -> u32 {
        let full = self.words.iter().take_while(|&&w| w == u64::MAX).count();
        let rest = self.words.get(full).map_or(0, |w| w.trailing_ones());
        to_u32(full * 64) + rest
    }
}

/// Properties of a flow, for either end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NdpSetup {
    pub(crate) flow: u32,
    pub(crate) me: Step,
    pub(crate) row: u32,
    pub(crate) rows: u32,
    pub(crate) seed: u64,
    pub(crate) header: u32,
    pub(crate) mtu: u32,
    pub(crate) control_bytes: u32,
    pub(crate) total: u64,
    pub(crate) retry_ns: u64,
    pub(crate) ndp: Ndp,
}

impl NdpSetup {
    fn packets(&self) -> u32 {
        to_u32(self.total.div_ceil(u64::from(self.mtu)))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NdpSender {
    pub(crate) flow: u32,
    me: Step,
    pub(crate) spray: Spray,
    header: u32,
    mtu: u32,
    pub(crate) total: u64,
    packets: u32,
    next: u32,
    window: u32,
    acked: Bits,
    /// Packets to retransmit, in order.
    retransmit: VecDeque<u32>,
    /// Pulls received, and pulls for which there was nothing to send.
    pulled: u32,
    credit: u32,
    retry_ns: u64,
    deadline: u64,
    retry_at: u64,
    started: bool,
    pub(crate) count: SendCount,
    pub(crate) nacks: u64,
    /// Headers that switches returned.
    returned: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl NdpSender {
    pub(crate) fn new(s: NdpSetup) -> Self {
        NdpSender {
            flow: s.flow,
            me: s.me,
            spray: Spray::new(s.row, s.rows, s.seed),
            header: s.header,
            mtu: s.mtu,
            total: s.total,
            packets: s.packets(),
            next: 0,
            window: s.ndp.window_packets,
            acked: Bits::new(s.packets()),
            retransmit: VecDeque::new(),
            pulled: 0,
            credit: 0,
            retry_ns: s.retry_ns,
            deadline: u64::MAX,
            retry_at: 0,
            started: false,
            count: SendCount::default(),
            nacks: 0,
            returned: 0,
            start: 0,
            end: 0,
        }
    }

    /// Reads a word of each cache line that a pull needs.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        u64::from(self.next) ^ self.deadline ^ self.count.packets
    }

    /// Starts the flow. True if it is complete at once (no bytes).
    pub(crate) fn on_start(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool {
        self.started = true;
        self.start = now;
        let first = self.window.min(self.packets);
        while self.next < first {
            self.send(now, self.next, false, fabric, net);
            self.next += 1;
        }
        if self.packets > 0 {
            self.deadline = now.saturating_add(self.retry_ns);
            self.arm(fabric);
        }
        self.check_end(now)
    }

    /// Handles an ACK, a NACK or a pull. True if it completes the flow.
    #[inline]
    pub(crate) fn on_packet(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        match event.kind() {
            EventKind::Ack => {
                self.count.acks += 1;
                self.acked.add(event.seq);
                self.deadline = now.saturating_add(self.retry_ns);
                if self.returned > 0 {
                    self.resend_without_pull(now, fabric, net);
                }
                return self.check_end(now);
            }
            EventKind::Nack => {
                self.nacks += 1;
                self.deadline = now.saturating_add(self.retry_ns);
                if !self.acked.has(event.seq) {
                    self.retransmit.push_back(event.seq);
                }
            }
            EventKind::Return => {
                self.returned += 1;
                self.deadline = now.saturating_add(self.retry_ns);
                if !self.acked.has(event.seq) {
                    self.retransmit.push_back(event.seq);
                }
            }
            _ => {
                // Pulls are numbered, so one that arrives includes those lost before it.
                let new = event.seq.wrapping_sub(self.pulled);
                if new.cast_signed() > 0 {
                    self.pulled = event.seq;
                    self.credit += new;
                }
            }
        }
        while self.credit > 0 {
            // Trimmed packets go first (section 3.2).
            let seq = loop {
                match self.retransmit.pop_front() {
                    Some(seq) if self.acked.has(seq) => {}
                    Some(seq) => break Some(seq),
                    None => break None,
                }
            };
            let (seq, retransmission) = match seq {
                Some(seq) => (seq, true),
                None if self.next < self.packets => {
                    self.next += 1;
                    (self.next - 1, false)
                }
                None => break,
            };
            self.credit -= 1;
            self.send(now, seq, retransmission, fabric, net);
        }
        if self.returned > 0 {
            self.resend_without_pull(now, fabric, net);
        }
        false
    }

    /// Retransmits a returned packet without a pull. The receiver did not receive its header, so it
    /// sends no pull for it. The packet is sent when no more pulls are expected, one at a time, as
    /// more would repeat the incast (Handley et al. 2017, return-to-sender: no resending while
    /// PULLs are still expected).
    #[cold]
    fn resend_without_pull(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        let answered = self.count.acks + self.nacks;
        let out = self.count.packets - (answered + self.returned).min(self.count.packets);
        // The number of pulls that the receiver requests: see `NdpReceiver::on_data`.
        let window = u64::from(self.window.min(self.packets));
        let asked = (u64::from(self.packets) + self.nacks - window).min(answered);
        if out > 0 || u64::from(self.pulled) < asked {
            return;
        }
        while let Some(seq) = self.retransmit.pop_front() {
            if !self.acked.has(seq) {
                self.send(now, seq, true, fabric, net);
                break;
            }
        }
    }

    /// Handles a timeout: retransmits packets that may be lost, a first window of them without
    /// pulls.
    pub(crate) fn on_timer(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        if now != self.retry_at {
            return;
        }
        self.retry_at = 0;
        if self.end != 0 {
            return;
        }
        if self.deadline <= now {
            self.count.timeouts += 1;
            self.retransmit.clear();
            let lost = (self.acked.first_missing()..self.next).filter(|&i| !self.acked.has(i));
            self.retransmit.extend(lost);
            for _ in 0..self.window {
                // As pulls were lost, packets that were never sent are due too.
                let (seq, retransmission) = match self.retransmit.pop_front() {
                    Some(seq) => (seq, true),
                    None if self.next < self.packets => {
                        self.next += 1;
                        (self.next - 1, false)
                    }
                    None => break,
                };
                self.send(now, seq, retransmission, fabric, net);
            }
            self.deadline = now.saturating_add(self.retry_ns);
        }
        self.arm(fabric);
    }

    #[inline]
    fn send(
        &mut self,
        now: u64,
        seq: u32,
        retransmission: bool,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        let from = u64::from(seq) * u64::from(self.mtu);
        let size = u64::from(self.mtu).min(self.total - from);
        self.count.packets += 1;
        self.count.bytes += size;
        self.count.retransmitted += u64::from(retransmission);
        self.count.time_sum = self.count.time_sum.wrapping_add(now);
        let wire = to_u32(size) + self.header;
        let event = NetEvent::packet(EventKind::Data, self.spray.take(), seq, wire, TRIMMABLE);
        fabric.emit(net, now, event);
    }

    fn arm(&mut self, fabric: &mut ShardPorts) {
        if self.retry_at == 0 {
            self.retry_at = self.deadline;
            fabric.schedule(self.deadline, EventKind::Timer, self.me.0, 0);
        }
    }

    fn check_end(&mut self, now: u64) -> bool {
        let done = self.started && self.acked.count == self.packets && self.end == 0;
        if done {
            self.end = now;
        }
        done
    }

    /// Bytes acknowledged so far.
    fn acked_bytes(&self) -> u64 {
        self.acked.bytes(self.mtu, self.total)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct NdpReceiver {
    pub(crate) flow: u32,
    me: Step,
    /// The host's pacer of pulls.
    host: u32,
    pub(crate) spray: Spray,
    header: u32,
    mtu: u32,
    control_bytes: u32,
    total: u64,
    expected: u32,
    /// Packets that the sender may send without a pull.
    window: u32,
    got: Bits,
    trimmed: u32,
    /// Pulls requested of the host, and sent.
    asked: u32,
    pulls: u32,
    pub(crate) received: Received,
}

impl NdpReceiver {
    pub(crate) fn new(s: NdpSetup, host: u32) -> Self {
        NdpReceiver {
            flow: s.flow,
            me: s.me,
            host,
            spray: Spray::new(s.row, s.rows, s.seed),
            header: s.header,
            mtu: s.mtu,
            control_bytes: s.control_bytes,
            total: s.total,
            expected: s.packets(),
            window: s.ndp.window_packets.min(s.packets()),
            got: Bits::new(s.packets()),
            trimmed: 0,
            asked: 0,
            pulls: 0,
            received: Received::default(),
        }
    }

    /// Reads a word of each cache line that a packet needs.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        u64::from(self.asked) ^ self.received.packets ^ self.received.done_at
    }

    /// Handles a packet or its header, and answers it. True if it completes the flow.
    #[inline]
    pub(crate) fn on_data(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
        pacer: &mut Pacer,
    ) -> bool {
        self.received.note(now, 0);
        let mut done = false;
        let kind = if event.has(TRIMMED) {
            self.trimmed += 1;
            EventKind::Nack
        } else {
            self.received.bytes += u64::from(event.size() - self.header);
            if self.got.add(event.seq) && self.got.count == self.expected {
                self.received.done_at = now;
                done = true;
            }
            EventKind::Ack
        };
        let row = self.spray.take();
        let answer = NetEvent::packet(kind, row, event.seq, self.control_bytes, 0);
        fabric.emit(net, now, answer);
        // The sender needs a pull for each packet after its first window, and another one if it was
        // trimmed.
        if self.window + self.asked < self.expected + self.trimmed && self.received.done_at == 0 {
            self.asked += 1;
            if pacer.queue.is_empty() && pacer.next <= now {
                pacer.next = now + pacer.gap_ns;
                self.pull(now, fabric, net);
            } else {
                if self.asked - self.pulls == 1 {
                    pacer.queue.push_back(to_u32(self.me.index()));
                }
                if !pacer.waiting {
                    pacer.waiting = true;
                    fabric.schedule(pacer.next, EventKind::Timer, pacer.me.0, 0);
                }
            }
        }
        done
    }

    /// Sends a pull.
    fn pull(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        self.pulls += 1;
        let row = self.spray.take();
        let event = NetEvent::packet(EventKind::Pull, row, self.pulls, self.control_bytes, 0);
        fabric.emit(net, now, event);
    }

    /// Index of the host's pacer.
    pub(crate) fn host(&self) -> usize {
        self.host as usize
    }
}

/// A host's pacer: pulls of all its flows in turn, at the rate of its link.
#[derive(Clone, Debug)]
pub(crate) struct Pacer {
    me: Step,
    /// Time of a full packet on the host's link, ns.
    gap_ns: u64,
    next: u64,
    waiting: bool,
    /// Receivers that have pulls to send, in turn.
    queue: VecDeque<u32>,
}

impl Pacer {
    pub(crate) fn new(me: Step, gap_ns: u64) -> Self {
        Pacer {
            me,
            gap_ns,
            next: 0,
            waiting: false,
            queue: VecDeque::new(),
        }
    }

    /// Sends the next pull.
    pub(crate) fn on_due(
        &mut self,
        now: u64,
        receivers: &mut [NdpReceiver],
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        self.waiting = false;
        while let Some(index) = self.queue.pop_front() {
            let receiver = &mut receivers[index as usize];
            if receiver.received.done_at != 0 {
                // Section 3.2: a complete flow needs no more pulls.
                continue;
            }
            receiver.pull(now, fabric, net);
            if receiver.asked > receiver.pulls {
                self.queue.push_back(index);
            }
            self.next = now + self.gap_ns;
            break;
        }
        if !self.queue.is_empty() {
            self.waiting = true;
            fabric.schedule(self.next, EventKind::Timer, self.me.0, 0);
        }
    }
}

impl SenderState for NdpSender {
    fn reroute(&mut self, rows: Rows) {
        self.spray.reroute(rows);
    }

    fn count(&self) -> &SendCount {
        &self.count
    }

    fn report(&self, result: &mut FlowResult) {
        result.timer_ns = (self.deadline != u64::MAX).then_some(self.deadline);
        result.start_ns = self.start;
        result.acked_ns = (self.end != 0).then_some(self.end);
        result.bytes = self.total;
        result.bytes_acked = self.acked_bytes();
        result.nacks = self.nacks;
    }
}

impl ReceiverState for NdpReceiver {
    fn reroute(&mut self, rows: Rows) {
        self.spray.reroute(rows);
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn in_order(&self) -> u64 {
        self.got.bytes(self.mtu, self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_of_spraying_uses_each_path_once() {
        for rows in [1, 2, 3, 6, 16, 64, 100] {
            let mut spray = Spray::new(10, rows, 7);
            let mut orders = std::collections::BTreeSet::new();
            for _ in 0..20 {
                let mut round: Vec<u32> = (0..rows).map(|_| spray.take()).collect();
                orders.insert(round.clone());
                round.sort_unstable();
                assert_eq!(round, (10..10 + rows).collect::<Vec<_>>());
            }
            assert!(rows < 16 || orders.len() > 15, "{rows}: {}", orders.len());
        }
    }

    #[test]
    fn the_first_gap_of_a_set_is_found() {
        let mut bits = Bits::new(130);
        for i in 0..128 {
            assert!(bits.add(i));
        }
        assert!(!bits.add(5));
        assert_eq!((bits.first_missing(), bits.count), (128, 128));
        bits.add(128);
        bits.add(129);
        assert_eq!(bits.first_missing(), 130);
    }
}
