//! Creates the senders and receivers of flows.

use std::collections::HashMap;

use slipstream_base::mix;
use slipstream_base::width::to_u32;

use crate::net::{Net, Rows};
use crate::scenario::{Arrivals, Demand, Dist, Flow, Ndp, Roce, Scenario, Tcp, Transport};
use crate::shard::Shard;
use crate::step::{Place, Step};
use crate::transport::congestion::Control;
use crate::transport::ndp::{NdpReceiver, NdpSender, NdpSetup, Pacer};
use crate::transport::raw::{RawReceiver, RawSender};
use crate::transport::roce::{QpReceiver, QpSender, QpSetup};
use crate::transport::tcp::{TcpReceiver, TcpSender, TcpSetup};
use crate::transport::{EndSetup, OtherTransport, Paced};

/// Kinds of the sender and the receiver of a flow.
pub(super) fn places(transport: &Transport) -> (Place, Place) {
    match transport {
        Transport::Tcp(_) => (Place::TcpSender, Place::TcpReceiver),
        Transport::Roce(_) => (Place::QpSender, Place::QpReceiver),
        Transport::Ndp(_) => (Place::NdpSender, Place::NdpReceiver),
        Transport::Packets => (Place::RawSender, Place::RawReceiver),
        Transport::Other(_) => (Place::OtherSender, Place::OtherReceiver),
    }
}

/// A flow and its place in the run.
#[derive(Clone, Copy)]
pub(super) struct LaidFlow<'a> {
    pub(super) index: u32,
    pub(super) flow: &'a Flow,
    pub(super) sender: Step,
    pub(super) receiver: Step,
    pub(super) data: Rows,
    pub(super) ack: Rows,
}

impl LaidFlow<'_> {
    /// Bytes of the flow; of one that only time bounds, a number that it does not reach.
    fn total(&self) -> u64 {
        self.flow.demand.bytes().unwrap_or(u64::MAX)
    }
}

pub(super) struct EndpointMaker<'a> {
    scenario: &'a Scenario,
    net: &'a Net,
    /// By flow, ns: its default or first timeout.
    timeouts: &'a [u64],
    /// The pacer of a host's pulls, by host.
    pacer_of: HashMap<u32, usize>,
}

impl<'a> EndpointMaker<'a> {
    pub(super) fn new(scenario: &'a Scenario, net: &'a Net, timeouts: &'a [u64]) -> Self {
        EndpointMaker {
            scenario,
            net,
            timeouts,
            pacer_of: HashMap::new(),
        }
    }

    pub(super) fn add(&mut self, shards: &mut [Shard], laid: LaidFlow<'_>) {
        let seed = mix::draw(self.scenario.seed, laid.flow.id);
        match laid.flow.transport {
            Transport::Tcp(tcp) => self.add_tcp(shards, laid, tcp, seed),
            Transport::Roce(roce) => self.add_queue_pair(shards, laid, roce),
            Transport::Ndp(ndp) => self.add_ndp(shards, laid, ndp, seed),
            Transport::Packets => add_packets(shards, laid, seed),
            Transport::Other(other) => self.add_other(shards, laid, other, seed),
        }
    }

    fn add_tcp(&self, shards: &mut [Shard], laid: LaidFlow<'_>, tcp: Tcp, seed: u64) {
        let flow = laid.flow;
        let app = match flow.demand {
            Demand::Bytes(_) => None,
            Demand::Paced(a) => Some(Paced::new(a, seed)),
        };
        let setup = TcpSetup {
            flow: laid.index,
            me: laid.sender,
            row: laid.data.first,
            rows: laid.data.count,
            mss: flow.packet_bytes,
            header: flow.header_bytes,
            ecn: tcp.ecn,
            initial_window: tcp.initial_window,
            ssthresh: tcp.ssthresh,
            rto_min_ns: tcp.rto_ns_min,
            rto_initial_ns: self.timeouts[laid.index as usize],
            sws_avoidance: tcp.sws_avoidance,
            sack: tcp.sack,
            rack: tcp.rack,
            control: Control::new(&tcp.congestion, seed),
            bytes: flow.demand.bytes(),
            app,
        };
        let receiver = TcpReceiver::new(
            laid.index,
            laid.ack.first,
            laid.ack.count,
            flow.header_bytes,
            flow.ack_bytes,
            laid.total(),
            tcp.sack.then(Box::default),
        );
        shards[laid.sender.shard()]
            .tcp_senders
            .push(TcpSender::new(setup));
        shards[laid.receiver.shard()].tcp_receivers.push(receiver);
    }

    fn add_queue_pair(&self, shards: &mut [Shard], laid: LaidFlow<'_>, mut roce: Roce) {
        let flow = laid.flow;
        if roce.window_bytes > 0 {
            // The sender stops at its window, so an ACK must come before its end.
            let packets = roce.window_bytes.div_ceil(u64::from(flow.packet_bytes));
            let packets = u32::try_from(packets).unwrap_or(u32::MAX);
            roce.ack_every = roce.ack_every.min(packets);
        }
        let retry_ns = roce
            .retry_ns
            .unwrap_or_else(|| self.timeouts[laid.index as usize]);
        let sender = QpSender::new(QpSetup {
            flow: laid.index,
            me: laid.sender,
            row: laid.data.first,
            rows: laid.data.count,
            header: flow.header_bytes,
            mtu: flow.packet_bytes,
            total: laid.total(),
            has_port: self.scenario.links.host.is_some(),
            line_bits_per_s: self.line_bits_per_s(),
            retry_ns,
            roce,
        });
        let receiver = QpReceiver::new(
            laid.index,
            (laid.ack.first, laid.ack.count),
            flow.header_bytes,
            flow.ack_bytes,
            laid.total(),
            roce,
        );
        shards[laid.sender.shard()].qp_senders.push(sender);
        shards[laid.receiver.shard()].qp_receivers.push(receiver);
    }

    fn add_ndp(&mut self, shards: &mut [Shard], laid: LaidFlow<'_>, ndp: Ndp, seed: u64) {
        let flow = laid.flow;
        let setup = NdpSetup {
            flow: laid.index,
            me: laid.sender,
            row: laid.data.first,
            rows: laid.data.count,
            seed,
            header: flow.header_bytes,
            mtu: flow.packet_bytes,
            control_bytes: flow.ack_bytes,
            total: laid.total(),
            retry_ns: ndp
                .retry_ns
                .unwrap_or_else(|| self.timeouts[laid.index as usize]),
            ndp,
        };
        shards[laid.sender.shard()]
            .ndp_senders
            .push(NdpSender::new(setup));
        let setup = NdpSetup {
            me: laid.receiver,
            row: laid.ack.first,
            rows: laid.ack.count,
            seed: mix::mix64(seed),
            ..setup
        };
        let shard = &mut shards[laid.receiver.shard()];
        let (pacers, net) = (&mut shard.pacers, self.net);
        let pacer = *self.pacer_of.entry(flow.dst).or_insert_with(|| {
            let me = Step::new(to_u32(laid.receiver.shard()), Place::Host, pacers.len());
            let packet = flow.packet_bytes + flow.header_bytes;
            pacers.push(Pacer::new(me, net.serialization(0, packet)));
            pacers.len() - 1
        });
        shard
            .ndp_receivers
            .push(NdpReceiver::new(setup, to_u32(pacer)));
    }

    fn add_other(
        &self,
        shards: &mut [Shard],
        laid: LaidFlow<'_>,
        other: OtherTransport,
        seed: u64,
    ) {
        let flow = laid.flow;
        let setup = EndSetup {
            flow: laid.index,
            me: laid.sender,
            rows: laid.data,
            packet_bytes: flow.packet_bytes,
            header_bytes: flow.header_bytes,
            answer_bytes: flow.ack_bytes,
            total: laid.total(),
            seed,
            line_bits_per_s: self.line_bits_per_s(),
        };
        let made = (other.protocol.sender)(&setup, &other.parameters);
        shards[laid.sender.shard()].other_senders.push(made);
        let setup = EndSetup {
            me: laid.receiver,
            rows: laid.ack,
            ..setup
        };
        let made = (other.protocol.receiver)(&setup, &other.parameters);
        shards[laid.receiver.shard()].other_receivers.push(made);
    }

    /// The rate of a host's own link.
    fn line_bits_per_s(&self) -> u64 {
        let links = &self.scenario.links;
        links.host.unwrap_or(links.edge).bits_per_s
    }
}

fn add_packets(shards: &mut [Shard], laid: LaidFlow<'_>, seed: u64) {
    let flow = laid.flow;
    let arrivals = match flow.demand {
        Demand::Paced(a) => a,
        Demand::Bytes(bytes) => Arrivals {
            size: Dist::Constant(bytes as f64),
            gap_s: Dist::Constant(0.0),
            duration_ns: None,
            bytes: Some(bytes),
        },
    };
    let sender = RawSender::new(
        laid.index,
        laid.sender,
        (laid.data.first, laid.data.count),
        flow.header_bytes,
        flow.packet_bytes,
        Paced::new(arrivals, seed),
    );
    let receiver = RawReceiver::new(laid.index, flow.header_bytes, laid.total());
    shards[laid.sender.shard()].raw_senders.push(sender);
    shards[laid.receiver.shard()].raw_receivers.push(receiver);
}
