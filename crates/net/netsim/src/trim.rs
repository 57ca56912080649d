//! Ports that trim packets to their headers instead of dropping them, as NDP's switches do (Handley
//! et al., "Re-architecting datacenter networks and stacks for low latency and high performance",
//! SIGCOMM 2017).
//!
//! A short queue holds data, a second one headers and control packets, which have priority. A busy
//! port has an additional event for each packet that waited.

use crate::queueing::Trim;
use std::collections::VecDeque;

use slipstream_base::mix;
use slipstream_base::width::low_u32;

use crate::event::{EventKind, NetEvent, TRIMMABLE, TRIMMED};
use crate::fabric::{PortSpec, ShardPorts};
use crate::net::Net;
use crate::step::{Place, Step};

/// A trimming port. Waiting packets keep their time of arrival in `NetEvent::t`.
#[derive(Clone, Debug)]
pub(crate) struct TrimPort {
    pub(crate) busy: u64,
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    delay_ns: u32,
    class: u8,
    waking: bool,
    /// Headers sent since the last data packet.
    run: u32,
    data_max: u32,
    headers_max: u32,
    pub(crate) drops: u32,
    pub(crate) trims: u32,
    pub(crate) wait_ns_max: u32,
    pub(crate) waiting_bytes: u64,
    pub(crate) waiting_bytes_max: u64,
    data: VecDeque<NetEvent>,
    headers: VecDeque<NetEvent>,
}

impl TrimPort {
    pub(crate) fn new(spec: PortSpec, rule: Trim, from_host: bool) -> Self {
        // A host's own queue is its memory, so it never trims.
        let limit = |n: u32| if from_host { u32::MAX } else { n };
        TrimPort {
            busy: 0,
            bytes: 0,
            packets: 0,
            delay_ns: spec.delay_ns,
            class: spec.class,
            waking: false,
            run: 0,
            data_max: limit(rule.data_packets),
            headers_max: limit(rule.header_packets),
            drops: 0,
            trims: 0,
            wait_ns_max: 0,
            waiting_bytes: 0,
            waiting_bytes_max: 0,
            data: VecDeque::new(),
            headers: VecDeque::new(),
        }
    }

    pub(crate) fn class(&self) -> u8 {
        self.class
    }

    /// Packets that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.data.len() + self.headers.len()
    }
}

impl ShardPorts {
    /// A packet arrives at the trimming port at `steps[at]`.
    #[inline]
    pub(crate) fn enter_trim(&mut self, net: &Net, now: u64, mut event: NetEvent, at: usize) {
        let step = net.steps[at];
        if self.loss > 0.0 && self.is_lost(step, now, event) {
            return;
        }
        let port = &mut self.trim_ports[step.index()];
        if port.busy <= now && !port.waking {
            self.pass(net, now, event, at, step);
            return;
        }
        event.t = low_u32(now);
        if event.kind() == EventKind::Data && !event.has(TRIMMED) {
            if port.data.len() < port.data_max as usize {
                port.waiting_bytes += u64::from(event.size());
                port.data.push_back(event);
            } else {
                if !event.has(TRIMMABLE) {
                    port.drops += 1;
                    self.count_drop(event);
                    return;
                }
                // Section 3.1: this packet or the last one in the queue, at random, so that
                // synchronized flows do not always lose the same one.
                let key = self.seed ^ u64::from(self.trim_ids[step.index()]);
                let draw = mix::draw(key, port.packets + u64::from(port.trims));
                if draw & 1 == 1
                    && let Some(last) = port.data.back_mut()
                    && last.has(TRIMMABLE)
                {
                    port.waiting_bytes -= u64::from(last.size());
                    port.waiting_bytes += u64::from(event.size());
                    std::mem::swap(last, &mut event);
                }
                event.trim(net.trim.header_bytes);
                port.trims += 1;
                self.tally.trims += 1;
                if !self.queue_header(net, now, step, event) {
                    return;
                }
            }
        } else if !self.queue_header(net, now, step, event) {
            return;
        }
        let port = &mut self.trim_ports[step.index()];
        port.waiting_bytes_max = port.waiting_bytes_max.max(port.waiting_bytes);
        if !port.waking {
            port.waking = true;
            let busy = port.busy;
            self.schedule(busy, EventKind::Wake, step.0, 0);
        }
    }

    fn queue_header(&mut self, net: &Net, now: u64, step: Step, event: NetEvent) -> bool {
        let port = &mut self.trim_ports[step.index()];
        if port.headers.len() >= port.headers_max as usize {
            if event.kind() == EventKind::Data && !net.back.is_empty() {
                self.send_back(net, now, event);
                return false;
            }
            port.drops += 1;
            self.count_drop(event);
            return false;
        }
        port.waiting_bytes += u64::from(event.size());
        port.headers.push_back(event);
        true
    }

    /// Returns a header to its sender, over the link on which it arrived.
    #[cold]
    fn send_back(&mut self, net: &Net, now: u64, mut event: NetEvent) {
        let (row, ports) = net.back[event.what as usize];
        // Hop h of a path leaves the switch that hop n - h of the reverse path leaves.
        event.turn(row, ports as usize - event.hop());
        self.tally.returns += 1;
        let at = row as usize * net.stride + event.hop();
        self.enter(net, now, event, at);
    }

    /// Serves the next packet of a free port, and schedules a wake-up if more wait.
    pub(crate) fn serve_trim(&mut self, net: &Net, now: u64, step: Step) {
        debug_assert_eq!(step.place(), Place::Trim);
        let port = &mut self.trim_ports[step.index()];
        let data_turn = port.run >= net.trim.headers_per_data && !port.data.is_empty();
        let next = if port.headers.is_empty() || data_turn {
            port.run = 0;
            port.data.pop_front()
        } else {
            port.run += 1;
            port.headers.pop_front()
        };
        let event = next.expect("a port wakes only for a packet");
        port.waiting_bytes -= u64::from(event.size());
        let waited = low_u32(now).wrapping_sub(event.t);
        port.wait_ns_max = port.wait_ns_max.max(waited);
        port.waking = port.waiting() > 0;
        let more = port.waking;
        let at = event.what as usize * net.stride + event.hop();
        self.pass(net, now, event, at, step);
        if more {
            let busy = self.trim_ports[step.index()].busy;
            self.schedule(busy, EventKind::Wake, step.0, 0);
        }
    }

    /// Transmits a packet.
    #[inline]
    fn pass(&mut self, net: &Net, now: u64, event: NetEvent, at: usize, step: Step) {
        let port = &mut self.trim_ports[step.index()];
        let size = event.size();
        port.busy = now + net.serialization(u16::from(port.class), size);
        port.bytes += u64::from(size);
        port.packets += 1;
        let arrival = port.busy + u64::from(port.delay_ns);
        self.tally.hops += 1;
        self.send_on(net, arrival, event, at);
    }

    /// Loss injection at a trimming port.
    #[cold]
    fn is_lost(&mut self, step: Step, _now: u64, event: NetEvent) -> bool {
        let port = &mut self.trim_ports[step.index()];
        if port.headers_max == u32::MAX {
            return false;
        }
        let key = self.seed ^ mix::mix64(u64::from(self.trim_ids[step.index()]));
        let arrivals = port.packets + port.waiting() as u64 + u64::from(port.drops);
        if mix::unit(mix::draw(key, arrivals)) >= self.loss {
            return false;
        }
        port.drops += 1;
        self.tally.fault_drops += 1;
        self.count_drop(event);
        true
    }
}
