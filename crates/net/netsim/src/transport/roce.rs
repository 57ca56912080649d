//! RoCE queue pairs: one reliable stream of packets per flow, go-back-N, with or without DCQCN.
//!
//! The receiver accepts packets only in order. It answers the first packet of a gap by a single
//! NACK with the missing number, and the sender goes back to that (InfiniBand Architecture
//! Specification volume 1, section 9.7: PSN sequence error).

use slipstream_base::width::{floor_u64, low_u32, to_u32};

use crate::event::{CE, ECT, EventKind, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};
use crate::scenario::Roce;
use crate::step::Step;
use crate::transport::dcqcn::ReactionPoint;
use crate::transport::{Received, ReceiverState, SendCount, SenderState};

/// `seq` of a timer event: the next packet may be sent, or the retry timer expired.
const SEND: u32 = 0;
const RETRY: u32 = 1;

#[derive(Clone, Debug)]
pub(crate) struct QpSender {
    pub(crate) flow: u32,
    me: Step,
    row: u32,
    rows: u32,
    header: u32,
    mtu: u64,
    flags: u32,
    /// Bytes to send, acknowledged, next, and end of all data sent so far.
    pub(crate) total: u64,
    pub(crate) una: u64,
    nxt: u64,
    max: u64,
    window: u64,
    /// Whether packets take turns at the host's port.
    has_port: bool,
    next_send: u64,
    /// A send timer is scheduled, or the host's port will send one.
    waiting: bool,
    started: bool,
    retry_ns: u64,
    /// When the retry timer expires (`u64::MAX`: no data is unacknowledged), and when its event
    /// fires (0: none is scheduled).
    deadline: u64,
    retry_at: u64,
    line_bits_per_s: f64,
    pub(crate) control: Option<Box<ReactionPoint>>,
    pub(crate) count: SendCount,
    pub(crate) nacks: u64,
    pub(crate) notifications: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Properties of a sender when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpSetup {
    pub(crate) flow: u32,
    pub(crate) me: Step,
    pub(crate) row: u32,
    pub(crate) rows: u32,
    pub(crate) header: u32,
    pub(crate) mtu: u32,
    pub(crate) total: u64,
    pub(crate) has_port: bool,
    pub(crate) line_bits_per_s: u64,
    pub(crate) retry_ns: u64,
    pub(crate) roce: Roce,
}

impl QpSender {
    pub(crate) fn new(s: QpSetup) -> Self {
        let line = s.line_bits_per_s as f64;
        QpSender {
            flow: s.flow,
            me: s.me,
            row: s.row,
            rows: s.rows,
            header: s.header,
            mtu: u64::from(s.mtu),
            flags: if s.roce.dcqcn.is_some() { ECT } else { 0 },
            total: s.total,
            una: 0,
            nxt: 0,
            max: 0,
            window: if s.roce.window_bytes == 0 {
                u64::MAX
            } else {
                // A window below one packet would never send.
                s.roce.window_bytes.max(u64::from(s.mtu))
            },
            has_port: s.has_port,
            next_send: 0,
            waiting: false,
            started: false,
            retry_ns: s.retry_ns,
            deadline: u64::MAX,
            retry_at: 0,
            line_bits_per_s: line,
            control: s.roce.dcqcn.map(|p| Box::new(ReactionPoint::new(p, line))),
            count: SendCount::default(),
            nacks: 0,
            notifications: 0,
            start: 0,
            end: 0,
        }
    }

    /// Starts the flow. True if it is complete at once (no bytes).
    pub(crate) fn on_start(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool {
        self.started = true;
        self.start = now;
        self.pump(now, fabric, net);
        self.check_end(now)
    }

    /// Sends `bytes` more.
    pub(crate) fn extend(&mut self, now: u64, bytes: u64, fabric: &mut ShardPorts, net: &Net) {
        self.total += bytes;
        self.end = 0;
        self.on_start(now, fabric, net);
    }

    /// Sends nothing more. Returns the end of what was sent.
    pub(crate) fn stop(&mut self) -> u64 {
        self.total = self.max;
        self.total
    }

    /// Handles an ACK, a NACK or a congestion notification. True if it completes the flow.
    pub(crate) fn on_packet(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        match event.kind() {
            EventKind::Cnp => {
                self.notifications += 1;
                if let Some(control) = &mut self.control {
                    control.on_notification(now);
                }
            }
            kind => {
                let upto = widen(event.seq, self.una);
                if upto > self.una {
                    self.una = upto;
                    self.nxt = self.nxt.max(upto);
                    self.deadline = if self.nxt > upto {
                        now.saturating_add(self.retry_ns)
                    } else {
                        u64::MAX
                    };
                }
                if kind == EventKind::Nack {
                    self.nacks += 1;
                    if upto == self.una {
                        // The timer restarts with the requested packet.
                        self.nxt = self.una;
                        self.deadline = u64::MAX;
                    }
                } else {
                    self.count.acks += 1;
                }
                self.pump(now, fabric, net);
            }
        }
        self.check_end(now)
    }

    pub(crate) fn on_timer(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        if event.seq == SEND {
            self.waiting = false;
            self.pump(now, fabric, net);
            if self.has_port {
                let port = net.steps[self.row as usize * net.stride];
                fabric.pass_turn(now, port, self.me);
            }
            return;
        }
        if now != self.retry_at {
            return;
        }
        self.retry_at = 0;
        if self.una == self.total {
            return;
        }
        if self.deadline <= now {
            self.count.timeouts += 1;
            self.nxt = self.una;
            self.deadline = u64::MAX;
            self.pump(now, fabric, net);
        }
        self.arm(fabric);
    }

    /// Sends as much as rate, window and the host's port allow.
    fn pump(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        while !self.waiting && self.nxt < self.total && self.nxt - self.una < self.window {
            if self.next_send > now {
                self.waiting = true;
                fabric.schedule(self.next_send, EventKind::Timer, self.me.0, SEND);
                break;
            }
            let row = self.row + low_u32(self.count.packets % u64::from(self.rows));
            let port = net.steps[row as usize * net.stride];
            if self.has_port && !fabric.take_turn(port, self.me) {
                self.waiting = true;
                break;
            }
            let size = self.mtu.min(self.total - self.nxt);
            let wire = size + u64::from(self.header);
            let retransmission = self.nxt < self.max;
            let event = NetEvent::packet(
                EventKind::Data,
                row,
                low_u32(self.nxt),
                to_u32(wire),
                self.flags,
            );
            self.count.packets += 1;
            self.count.bytes += size;
            self.count.retransmitted += u64::from(retransmission);
            self.count.time_sum = self.count.time_sum.wrapping_add(now);
            fabric.emit(net, now, event);
            self.nxt += size;
            self.max = self.max.max(self.nxt);
            let rate = match &mut self.control {
                Some(control) => {
                    control.advance(now);
                    control.on_sent(wire);
                    control.current
                }
                None => self.line_bits_per_s,
            };
            // Rounded up, so that no packet is early.
            self.next_send = now + floor_u64((wire as f64 * 8e9 / rate).ceil());
            if self.deadline == u64::MAX {
                self.deadline = now.saturating_add(self.retry_ns);
            }
            self.arm(fabric);
        }
    }

    fn arm(&mut self, fabric: &mut ShardPorts) {
        if self.retry_at == 0 && self.deadline != u64::MAX {
            self.retry_at = self.deadline;
            fabric.schedule(self.deadline, EventKind::Timer, self.me.0, RETRY);
        }
    }

    fn check_end(&mut self, now: u64) -> bool {
        let done = self.started && self.una == self.total && self.end == 0;
        if done {
            self.end = now;
        }
        done
    }

    /// Rate at the end, bits/s.
    fn rate(&self) -> f64 {
        self.control
            .as_ref()
            .map_or(self.line_bits_per_s, |c| c.current)
    }
}

impl SenderState for QpSender {
    fn reroute(&mut self, rows: Rows) {
        (self.row, self.rows) = (rows.first, rows.count);
    }

    fn count(&self) -> &SendCount {
        &self.count
    }

    fn report(&self, result: &mut FlowResult) {
        result.timer_ns = (self.deadline != u64::MAX).then_some(self.deadline);
        result.start_ns = self.start;
        result.acked_ns = (self.end != 0).then_some(self.end);
        result.bytes = self.total;
        result.bytes_acked = self.una;
        result.nacks = self.nacks;
        result.notifications = self.notifications;
        result.rate_bits_per_s = Some(self.rate());
    }
}

#[derive(Clone, Debug)]
pub(crate) struct QpReceiver {
    pub(crate) flow: u32,
    row: u32,
    rows: u32,
    header: u32,
    answer_bytes: u32,
    total: u64,
    pub(crate) next: u64,
    /// Whether the missing packet was requested.
    asked: bool,
    ack_every: u32,
    unacked: u32,
    cnp_interval_ns: Option<u64>,
    cnp_next: u64,
    answers: u64,
    pub(crate) received: Received,
}

impl QpReceiver {
    pub(crate) fn new(
        flow: u32,
        (row, rows): (u32, u32),
        header: u32,
        answer_bytes: u32,
        total: u64,
        roce: Roce,
    ) -> Self {
        QpReceiver {
            flow,
            row,
            rows,
            header,
            answer_bytes,
            total,
            next: 0,
            asked: false,
            ack_every: roce.ack_every.max(1),
            unacked: 0,
            cnp_interval_ns: roce.dcqcn.map(|d| d.cnp_interval_ns),
            cnp_next: 0,
            answers: 0,
            received: Received::default(),
        }
    }

    /// Bytes that have not arrived.
    pub(crate) fn left(&self) -> u64 {
        self.total.saturating_sub(self.next)
    }

    /// Expects `bytes` more.
    pub(crate) fn extend(&mut self, bytes: u64) {
        self.total += bytes;
        self.received.done_at = 0;
    }

    /// Expects nothing after `total`. True if nothing is left.
    pub(crate) fn stop_at(&mut self, total: u64) -> bool {
        self.total = total;
        self.left() == 0
    }

    /// Handles a packet and answers it. True if it completes the flow.
    pub(crate) fn on_data(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        let from = widen(event.seq, self.next);
        let size = u64::from(event.size() - self.header);
        self.received.note(now, size);
        if let Some(interval) = self.cnp_interval_ns
            && event.has(CE)
            && now >= self.cnp_next
        {
            self.cnp_next = now + interval;
            self.answer(now, EventKind::Cnp, fabric, net);
        }
        if from > self.next {
            if !self.asked {
                self.asked = true;
                self.answer(now, EventKind::Nack, fabric, net);
            }
            return false;
        }
        if from == self.next {
            self.next += size;
            self.asked = false;
        }
        self.unacked += 1;
        let done = self.next >= self.total;
        if self.unacked >= self.ack_every || done || from < self.next - size {
            self.unacked = 0;
            self.answer(now, EventKind::Ack, fabric, net);
        }
        if done && self.received.done_at == 0 {
            self.received.done_at = now;
            return true;
        }
        false
    }

    fn answer(&mut self, now: u64, kind: EventKind, fabric: &mut ShardPorts, net: &Net) {
        let row = self.row + low_u32(self.answers % u64::from(self.rows));
        self.answers += 1;
        let event = NetEvent::packet(kind, row, low_u32(self.next), self.answer_bytes, 0);
        fabric.emit(net, now, event);
    }
}

impl ReceiverState for QpReceiver {
    fn reroute(&mut self, rows: Rows) {
        (self.row, self.rows) = (rows.first, rows.count);
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn in_order(&self) -> u64 {
        self.next
    }
}
