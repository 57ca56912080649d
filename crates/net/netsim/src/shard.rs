//! A partition of the network with its own event queue: ports, and the endpoints of its hosts.

use std::collections::HashMap;

use crate::event::{EventKind, NetEvent};
use crate::fabric::ShardPorts;
use crate::net::Net;
use crate::scenario::Finished;
use crate::step::{Place, Step};
use crate::transport::ndp::{NdpReceiver, NdpSender, Pacer};
use crate::transport::raw::{RawReceiver, RawSender};
use crate::transport::roce::{QpReceiver, QpSender};
use crate::transport::tcp::{TcpReceiver, TcpSender};
use crate::transport::{Receiver, ReceiverState, Sender, SenderState};

/// Events whose data is prefetched together; 8 to 32 were equally good on E5.
const PREFETCHED: usize = 16;

/// If paths, ports and endpoints are smaller than this, they stay in a core's caches.
const SMALL_BYTES: usize = 128 << 10;

/// Flows that start when a flow finishes: the sender, and the delay, ns.
type Successors = Vec<(Step, u64)>;

pub(crate) struct Shard {
    pub(crate) fabric: ShardPorts,
    pub(crate) tcp_senders: Vec<TcpSender>,
    pub(crate) tcp_receivers: Vec<TcpReceiver>,
    pub(crate) qp_senders: Vec<QpSender>,
    pub(crate) qp_receivers: Vec<QpReceiver>,
    pub(crate) ndp_senders: Vec<NdpSender>,
    pub(crate) ndp_receivers: Vec<NdpReceiver>,
    pub(crate) pacers: Vec<Pacer>,
    pub(crate) raw_senders: Vec<RawSender>,
    pub(crate) raw_receivers: Vec<RawReceiver>,
    /// Endpoints of transports without a field of their own.
    pub(crate) other_senders: Vec<Box<dyn Sender>>,
    pub(crate) other_receivers: Vec<Box<dyn Receiver>>,
    /// By flow and its event; empty in runs without dependencies.
    pub(crate) successors: HashMap<(u32, Finished), Successors>,
    /// Unfinished predecessors of a sender, and its earliest start.
    pub(crate) waiting: HashMap<u32, (u32, u64)>,
    /// Flows whose last byte has arrived, with the time, for [`crate::open`]; `None`: not listed.
    pub(crate) arrived: Option<Vec<(u64, u32)>>,
    pub(crate) now: u64,
    pub(crate) events: u64,
}

impl Shard {
    /// A shard without endpoints.
    pub(crate) fn new(fabric: ShardPorts) -> Self {
        Shard {
            fabric,
            tcp_senders: Vec::new(),
            tcp_receivers: Vec::new(),
            qp_senders: Vec::new(),
            qp_receivers: Vec::new(),
            ndp_senders: Vec::new(),
            ndp_receivers: Vec::new(),
            pacers: Vec::new(),
            raw_senders: Vec::new(),
            raw_receivers: Vec::new(),
            other_senders: Vec::new(),
            other_receivers: Vec::new(),
            successors: HashMap::new(),
            waiting: HashMap::new(),
            arrived: None,
            now: 0,
            events: 0,
        }
    }

    /// Runs every event before `until`.
    pub(crate) fn run(&mut self, net: &Net, until: u64) {
        // Data that fits into the caches needs no prefetch.
        let mut ahead = if self.is_small(net) { u64::MAX } else { 0 };
        while let Some((now, event)) = self.fabric.wheel.pop_ref(until) {
            let event = *event;
            debug_assert!(now >= self.now, "time went backwards");
            if ahead == 0 {
                ahead = self.prefetch(net) as u64;
            } else {
                ahead -= 1;
            }
            self.now = now;
            self.events += 1;
            if event.is_packet() {
                self.on_packet(net, now, event);
            } else {
                self.on_local(net, now, event);
            }
        }
    }

    fn is_small(&self, net: &Net) -> bool {
        let f = &self.fabric;
        let bytes = size_of_val(&net.steps[..])
            + size_of_val(&f.ports[..])
            + size_of_val(&f.trim_ports[..])
            + size_of_val(&self.tcp_senders[..])
            + size_of_val(&self.tcp_receivers[..])
            + size_of_val(&self.ndp_senders[..])
            + size_of_val(&self.ndp_receivers[..]);
        bytes <= SMALL_BYTES
    }

    /// Reads the data of the next events, so that their cache misses overlap instead of being
    /// sequential. Returns the number of events covered.
    #[inline]
    fn prefetch(&self, net: &Net) -> usize {
        let upcoming = self.fabric.wheel.upcoming();
        // Too few misses to overlap.
        if upcoming.len() < 4 {
            return 0;
        }
        let upcoming = &upcoming[..upcoming.len().min(PREFETCHED)];
        let mut steps = [Step::NONE; PREFETCHED];
        for (step, event) in steps.iter_mut().zip(upcoming) {
            if event.is_packet() {
                *step = net.steps[event.what as usize * net.stride + event.hop()];
            }
        }
        let mut touched = 0;
        for step in &steps[..upcoming.len()] {
            touched ^= match step.place() {
                Place::Fifo => self.fabric.ports[step.index()].busy,
                Place::Trim => self.fabric.trim_ports[step.index()].busy,
                Place::NdpSender => self.ndp_senders[step.index()].touch(),
                Place::NdpReceiver => self.ndp_receivers[step.index()].touch(),
                Place::TcpSender => self.tcp_senders[step.index()].touch(),
                Place::TcpReceiver => self.tcp_receivers[step.index()].touch(),
                _ => 0,
            };
        }
        // The reads have no other use.
        std::hint::black_box(touched);
        upcoming.len()
    }

    /// The earliest time of its events and of its outgoing mail.
    pub(crate) fn next_time(&self) -> u64 {
        let own = self.fabric.wheel.next_bucket_start().unwrap_or(u64::MAX);
        own.min(self.fabric.mail_first)
    }

    #[inline]
    fn on_packet(&mut self, net: &Net, now: u64, event: NetEvent) {
        let at = event.what as usize * net.stride + event.hop();
        let step = net.steps[at];
        if !net.outages.is_empty() && event.hop() > 0 && net.is_lost_before(at, now, event.size()) {
            self.fabric.tally.fault_drops += 1;
            self.fabric.count_drop(event);
            return;
        }
        match step.place() {
            Place::Fifo => self.fabric.enter_fifo(net, now, event, at),
            Place::Scheduled => self.fabric.enter_scheduled(net, now, event, at),
            Place::Trim => self.fabric.enter_trim(net, now, event, at),
            Place::NdpReceiver => {
                self.fabric.tally.delivered += 1;
                let receiver = &mut self.ndp_receivers[step.index()];
                let pacer = &mut self.pacers[receiver.host()];
                if receiver.on_data(now, event, &mut self.fabric, net, pacer) {
                    let flow = receiver.flow;
                    self.on_finished(now, flow, Finished::Delivered);
                }
            }
            Place::NdpSender => {
                self.fabric.tally.delivered += 1;
                let sender = &mut self.ndp_senders[step.index()];
                if sender.on_packet(now, event, &mut self.fabric, net) {
                    let flow = sender.flow;
                    self.on_finished(now, flow, Finished::Acknowledged);
                }
            }
            Place::TcpReceiver => {
                self.fabric.tally.delivered += 1;
                let receiver = &mut self.tcp_receivers[step.index()];
                if receiver.on_data(now, event, &mut self.fabric, net) {
                    let flow = receiver.flow;
                    self.on_finished(now, flow, Finished::Delivered);
                }
            }
            Place::TcpSender => {
                self.fabric.tally.delivered += 1;
                let sender = &mut self.tcp_senders[step.index()];
                if sender.on_ack(now, event, &mut self.fabric, net) {
                    let flow = sender.flow;
                    self.on_finished(now, flow, Finished::Acknowledged);
                }
            }
            Place::QpReceiver => {
                self.fabric.tally.delivered += 1;
                let receiver = &mut self.qp_receivers[step.index()];
                if receiver.on_data(now, event, &mut self.fabric, net) {
                    let flow = receiver.flow;
                    self.on_finished(now, flow, Finished::Delivered);
                }
            }
            Place::QpSender => {
                self.fabric.tally.delivered += 1;
                let sender = &mut self.qp_senders[step.index()];
                if sender.on_packet(now, event, &mut self.fabric, net) {
                    let flow = sender.flow;
                    self.on_finished(now, flow, Finished::Acknowledged);
                }
            }
            Place::RawReceiver => {
                self.fabric.tally.delivered += 1;
                let receiver = &mut self.raw_receivers[step.index()];
                if receiver.on_data(now, event) {
                    let flow = receiver.flow;
                    self.on_finished(now, flow, Finished::Delivered);
                }
            }
            Place::OtherReceiver => {
                self.fabric.tally.delivered += 1;
                let receiver = &mut self.other_receivers[step.index()];
                if receiver.on_data(now, event, &mut self.fabric, net) {
                    let flow = receiver.flow();
                    self.on_finished(now, flow, Finished::Delivered);
                }
            }
            Place::OtherSender => {
                self.fabric.tally.delivered += 1;
                let sender = &mut self.other_senders[step.index()];
                if sender.on_packet(now, event, &mut self.fabric, net) {
                    let flow = sender.flow();
                    self.on_finished(now, flow, Finished::Acknowledged);
                }
            }
            place => unreachable!("no packet is sent to {place:?}"),
        }
    }

    /// The sender at `step`.
    pub(crate) fn sender(&self, step: Step) -> &dyn SenderState {
        let index = step.index();
        match step.place() {
            Place::TcpSender => &self.tcp_senders[index],
            Place::QpSender => &self.qp_senders[index],
            Place::NdpSender => &self.ndp_senders[index],
            Place::RawSender => &self.raw_senders[index],
            Place::OtherSender => &*self.other_senders[index],
            place => unreachable!("{place:?} sends no flow"),
        }
    }

    pub(crate) fn sender_mut(&mut self, step: Step) -> &mut dyn SenderState {
        let index = step.index();
        match step.place() {
            Place::TcpSender => &mut self.tcp_senders[index],
            Place::QpSender => &mut self.qp_senders[index],
            Place::NdpSender => &mut self.ndp_senders[index],
            Place::RawSender => &mut self.raw_senders[index],
            Place::OtherSender => &mut *self.other_senders[index],
            place => unreachable!("{place:?} sends no flow"),
        }
    }

    /// The receiver at `step`.
    pub(crate) fn receiver(&self, step: Step) -> &dyn ReceiverState {
        let index = step.index();
        match step.place() {
            Place::TcpReceiver => &self.tcp_receivers[index],
            Place::QpReceiver => &self.qp_receivers[index],
            Place::NdpReceiver => &self.ndp_receivers[index],
            Place::RawReceiver => &self.raw_receivers[index],
            Place::OtherReceiver => &*self.other_receivers[index],
            place => unreachable!("{place:?} receives no flow"),
        }
    }

    pub(crate) fn receiver_mut(&mut self, step: Step) -> &mut dyn ReceiverState {
        let index = step.index();
        match step.place() {
            Place::TcpReceiver => &mut self.tcp_receivers[index],
            Place::QpReceiver => &mut self.qp_receivers[index],
            Place::NdpReceiver => &mut self.ndp_receivers[index],
            Place::RawReceiver => &mut self.raw_receivers[index],
            Place::OtherReceiver => &mut *self.other_receivers[index],
            place => unreachable!("{place:?} receives no flow"),
        }
    }

    fn on_local(&mut self, net: &Net, now: u64, event: NetEvent) {
        let step = Step(event.what);
        let fabric = &mut self.fabric;
        let finished = match (step.place(), event.kind()) {
            (Place::TcpSender, kind) => {
                let sender = &mut self.tcp_senders[step.index()];
                let done = match kind {
                    EventKind::Start => sender.on_start(now, fabric, net),
                    EventKind::Tick => sender.on_tick(now, fabric, net),
                    _ => {
                        sender.on_timer(now, event, fabric, net);
                        false
                    }
                };
                done.then_some(sender.flow)
            }
            (Place::Scheduled, EventKind::Pause) => {
                fabric.on_pause(net, now, event);
                None
            }
            (Place::Ingress, _) => {
                fabric.on_refresh(net, now, event);
                None
            }
            (Place::Scheduled, _) => {
                fabric.serve(net, now, step, false);
                None
            }
            (Place::Trim, _) => {
                fabric.serve_trim(net, now, step);
                None
            }
            (Place::Host, _) => {
                let pacer = &mut self.pacers[step.index()];
                pacer.on_due(now, &mut self.ndp_receivers, fabric, net);
                None
            }
            (Place::NdpSender, kind) => {
                let sender = &mut self.ndp_senders[step.index()];
                let done = if kind == EventKind::Start {
                    sender.on_start(now, fabric, net)
                } else {
                    sender.on_timer(now, fabric, net);
                    false
                };
                done.then_some(sender.flow)
            }
            (Place::QpSender, kind) => {
                let sender = &mut self.qp_senders[step.index()];
                let done = if kind == EventKind::Start {
                    sender.on_start(now, fabric, net)
                } else {
                    sender.on_timer(now, event, fabric, net);
                    false
                };
                done.then_some(sender.flow)
            }
            (Place::RawSender, kind) => {
                let sender = &mut self.raw_senders[step.index()];
                let done = sender.on_due(now, kind == EventKind::Start, fabric, net);
                done.then_some(sender.flow)
            }
            (Place::OtherSender, kind) => {
                let sender = &mut self.other_senders[step.index()];
                let done = if kind == EventKind::Start {
                    sender.on_start(now, fabric, net)
                } else {
                    sender.on_timer(now, event, fabric, net)
                };
                done.then_some(sender.flow())
            }
            (place, kind) => unreachable!("no {kind:?} is scheduled for {place:?}"),
        };
        if let Some(flow) = finished {
            self.on_finished(now, flow, Finished::Acknowledged);
        }
    }

    /// Starts the flows that depended on a flow.
    #[cold]
    fn on_finished(&mut self, now: u64, flow: u32, what: Finished) {
        if let (Some(arrived), Finished::Delivered) = (&mut self.arrived, what) {
            arrived.push((now, flow));
        }
        let Some(successors) = self.successors.remove(&(flow, what)) else {
            return;
        };
        for (sender, delay) in successors {
            let (left, earliest) = self
                .waiting
                .get_mut(&sender.0)
                .expect("a successor waits for its predecessors");
            *left -= 1;
            *earliest = (*earliest).max(now + delay);
            if *left == 0 {
                let start = *earliest;
                self.fabric.schedule(start, EventKind::Start, sender.0, 0);
            }
        }
    }
}
