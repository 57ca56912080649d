//! The network between frontend and workers: transfers, and the actions at their arrival.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io;
use std::path::Path;
use std::sync::Arc;

use slipstream_base::width::{round_u64, to_u32};
use slipstream_base::{RequestId, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, NetworkMode};
use slipstream_engine::{Finished, PassOutput};
use slipstream_flows::{Endpoint, Fabric, FabricConfig, Network, TransferId};

use crate::collectives::{Crossings, StepTraffic};
use crate::event::Event;
use crate::node::Watched;
use crate::packets::{PacketNetwork, TooLarge, background};
use crate::run::TwinError;

/// The network, if one is modelled; otherwise transfers take no time.
pub(crate) struct Wire {
    network: Option<Box<dyn Network>>,
    /// Whether requests and answers use it too.
    messages: bool,
    frontend: Endpoint,
    /// Bytes per token in a request, in a frame, and of KV (by worker).
    request_token_bytes: u64,
    answer_token_bytes: u64,
    kv_token_bytes: Vec<u64>,
    carried: HashMap<TransferId, Carried>,
    connections: HashMap<Connection, Waiting>,
    /// Messages that have not arrived.
    messages_under_way: usize,
    arrived: Vec<TransferId>,
    inside: InsideHosts,
    /// Transfers during collectives, if workers are on several hosts.
    crossings: Option<Crossings>,
    /// Tokens in transit to the clients.
    pub(crate) frames: Frames,
}

/// Transfers between workers of one host: they use its own links, and meet no others.
#[derive(Default)]
struct InsideHosts {
    /// By worker: its host if it is on one, and the rate of its GPUs' links. Empty if each worker has a host of its own.
    workers: Vec<Option<(u32, f64)>>,
    ends: BinaryHeap<Reverse<(SimTime, TransferId)>>,
    next: u64,
}

/// Identifies transfers inside of hosts; those of the network are numbered from 0.
const INSIDE: u64 = 1 << 63;

impl InsideHosts {
    fn new(cluster: &Cluster, speedup: f64) -> InsideHosts {
        let network = &cluster.network;
        if network.gpus_per_host == 0 || network.mode == NetworkMode::None {
            return InsideHosts::default();
        }
        let each = cluster.hosts().into_iter().zip(cluster.workers());
        let workers = each.map(|(host, (_, pool))| {
            let gpus = pool.engine.gpus();
            let rate = network.host_bits_per_s * f64::from(gpus) * speedup;
            network.hosts_of(gpus).is_none().then_some((host, rate))
        });
        InsideHosts {
            workers: workers.collect(),
            ..InsideHosts::default()
        }
    }

    /// Sends `bytes`, if both workers are on one host.
    fn send(
        &mut self,
        now: SimTime,
        from: WorkerId,
        to: WorkerId,
        bytes: u64,
    ) -> Option<TransferId> {
        let host = |of: WorkerId| self.workers.get(of.index()).copied().flatten();
        let ((host_from, rate), (host_to, other)) = (host(from)?, host(to)?);
        if host_from != host_to {
            return None;
        }
        let id = TransferId(INSIDE | self.next);
        self.next += 1;
        let ns = round_u64(bytes as f64 * 8e9 / rate.min(other));
        self.ends.push(Reverse((now + ns, id)));
        Some(id)
    }
}

/// Sender and receiver of messages. They share one flow, in order, as over one TCP connection:
/// messages that arrive while the flow is busy wait, and then leave together. An overloaded network
/// so has one flow per connection instead of one per message, whose shares would have to be
/// recomputed whenever one begins or ends.
type Connection = (Endpoint, Endpoint);

/// Messages that wait for a connection's flow to end.
#[derive(Default)]
struct Waiting {
    messages: Vec<Message>,
    bytes: u64,
}

enum Carried {
    /// A KV transfer, with its own flow.
    Then(Event),
    Messages(Connection, Vec<Message>),
}

enum Message {
    Then(Event),
    Frame(u32),
}

/// What has arrived.
pub(crate) enum Arrival {
    /// All bytes of a KV transfer, which leads to this event.
    Kv(Event),
    /// A request.
    Request(Event),
    /// Tokens, by their frame.
    Frame(u32),
}

impl Wire {
    /// `speedup` divides the time of all transfers, as it does that of passes.
    ///
    /// # Errors
    /// [`TwinError::Network`], [`TwinError::Background`].
    pub(crate) fn new(
        cluster: &Cluster,
        speedup: f64,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Wire, TwinError> {
        let network: Option<Box<dyn Network>> = match FabricConfig::of_cluster(cluster, speedup) {
            Some(config) if cluster.network.mode == NetworkMode::Packets => {
                let background = background::read(cluster, read)?;
                let packets = PacketNetwork::new(cluster, config, speedup, background);
                let packets = packets.map_err(|TooLarge(cause)| TwinError::Network { cause })?;
                Some(Box::new(packets))
            }
            Some(config) => Some(Box::new(Fabric::new(config))),
            None => None,
        };
        Ok(Wire {
            messages: network.is_some() && cluster.network.messages,
            network,
            frontend: Endpoint::of_frontend(cluster),
            request_token_bytes: cluster.network.request_token_bytes.into(),
            answer_token_bytes: cluster.network.answer_token_bytes.into(),
            kv_token_bytes: cluster.kv_bytes_per_token(),
            carried: HashMap::new(),
            connections: HashMap::new(),
            messages_under_way: 0,
            arrived: Vec::new(),
            inside: InsideHosts::new(cluster, speedup),
            crossings: None,
            frames: Frames::default(),
        })
    }

    pub(crate) fn carries_messages(&self) -> bool {
        self.messages
    }

    pub(crate) fn messages_under_way(&self) -> usize {
        self.messages_under_way
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.carried.is_empty()
    }

    /// Time of the next arrival that somebody waits for, or before it.
    pub(crate) fn next_time(&mut self) -> Option<SimTime> {
        // What is left of cancelled transfers is delivered whenever the network next runs.
        let network = self.network.as_mut().filter(|_| !self.carried.is_empty());
        let next = network?.next_time();
        let inside = self.inside.ends.peek().map(|Reverse((at, _))| *at);
        let late = self.crossings.as_ref().and_then(Crossings::next_time);
        next.into_iter().chain(inside).chain(late).min()
    }

    /// Steps of engines meet transfers on the way from now on. `traffic` by node, with its worker.
    pub(crate) fn set_traffic(&mut self, traffic: Vec<(WorkerId, Option<Arc<StepTraffic>>)>) {
        self.crossings = Crossings::new(traffic);
    }

    /// Whether the length of a step depends on the transfers that are under way when it begins.
    pub(crate) fn slows_steps(&self) -> bool {
        self.crossings.is_some()
    }

    /// A step of `node` is about to begin.
    pub(crate) fn before_step(&self, node: u32, worker: WorkerId) {
        if let Some(crossings) = &self.crossings {
            crossings.before_step(node, worker);
        }
    }

    /// It has begun, and takes until `end`.
    pub(crate) fn step_began(&mut self, node: u32, now: SimTime, end: SimTime) {
        if let Some(crossings) = &mut self.crossings {
            crossings.step_began(node, now, end);
        }
    }

    /// Duration of an empty message between two workers, through the frontend or not, ns.
    pub(crate) fn latency_ns(&self, from: WorkerId, to: WorkerId, by_frontend: bool) -> u64 {
        let Some(network) = &self.network else {
            return 0;
        };
        let (from, to) = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        if by_frontend {
            network.latency_ns(from, self.frontend) + network.latency_ns(self.frontend, to)
        } else {
            network.latency_ns(from, to)
        }
    }

    pub(crate) fn send_request(&mut self, now: SimTime, to: WorkerId, tokens: u32, then: Event) {
        let bytes = u64::from(tokens) * self.request_token_bytes;
        let from = self.frontend;
        self.send_message(
            now,
            (from, Endpoint::of_worker(to)),
            bytes,
            Message::Then(then),
        );
    }

    /// Sends a frame to the frontend.
    pub(crate) fn send_frame(&mut self, now: SimTime, from: WorkerId, tokens: u32, frame: u32) {
        let bytes = u64::from(tokens) * self.answer_token_bytes;
        let to = self.frontend;
        self.send_message(
            now,
            (Endpoint::of_worker(from), to),
            bytes,
            Message::Frame(frame),
        );
    }

    fn send_message(&mut self, now: SimTime, on: Connection, bytes: u64, message: Message) {
        self.messages_under_way += 1;
        if let Some(waiting) = self.connections.get_mut(&on) {
            waiting.messages.push(message);
            waiting.bytes += bytes;
        } else {
            self.connections.insert(on, Waiting::default());
            let carried = Carried::Messages(on, vec![message]);
            self.send(now, on.0, on.1, bytes, carried);
        }
    }

    /// The flow of a connection has ended: waiting messages leave.
    fn send_waiting(&mut self, now: SimTime, on: Connection) {
        let waiting = self.connections.get_mut(&on).expect("its flow ended");
        if waiting.messages.is_empty() {
            self.connections.remove(&on);
        } else {
            let Waiting { messages, bytes } = std::mem::take(waiting);
            self.send(now, on.0, on.1, bytes, Carried::Messages(on, messages));
        }
    }

    /// Starts the KV transfer of `tokens`; returns its bytes, and its id unless it takes no time.
    pub(crate) fn send_kv(
        &mut self,
        now: SimTime,
        from: WorkerId,
        to: WorkerId,
        tokens: u32,
        then: Event,
    ) -> (u64, Option<TransferId>) {
        let bytes = u64::from(tokens) * self.kv_token_bytes[from.index()];
        if let Some(id) = self.inside.send(now, from, to, bytes) {
            self.carried.insert(id, Carried::Then(then));
            return (bytes, Some(id));
        }
        let ends = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        let id = self.send(now, ends.0, ends.1, bytes, Carried::Then(then));
        if let (Some(crossings), Some(id)) = (&mut self.crossings, id) {
            crossings.began(id, now, from, to);
        }
        (bytes, id)
    }

    fn send(
        &mut self,
        now: SimTime,
        from: Endpoint,
        to: Endpoint,
        bytes: u64,
        carried: Carried,
    ) -> Option<TransferId> {
        let id = self.network.as_mut()?.send(now, from, to, bytes);
        self.carried.insert(id, carried);
        Some(id)
    }

    /// Takes what has arrived by now, in order, into `out`.
    pub(crate) fn take_arrived(&mut self, now: SimTime, out: &mut Vec<Arrival>) {
        let Some(network) = &mut self.network else {
            return;
        };
        if self.carried.is_empty() {
            return;
        }
        let mut arrived = std::mem::take(&mut self.arrived);
        network.advance(now, &mut arrived);
        if let Some(crossings) = &mut self.crossings {
            arrived.retain(|&id| crossings.arrives(id, now));
            crossings.advance(now, &mut arrived);
        }
        while let Some(&Reverse((at, id))) = self.inside.ends.peek()
            && at <= now
        {
            self.inside.ends.pop();
            arrived.push(id);
        }
        for id in arrived.drain(..) {
            match self.carried.remove(&id) {
                Some(Carried::Then(event)) => out.push(Arrival::Kv(event)),
                Some(Carried::Messages(on, messages)) => {
                    self.messages_under_way -= messages.len();
                    self.send_waiting(now, on);
                    out.extend(messages.into_iter().map(|message| match message {
                        Message::Then(event) => Arrival::Request(event),
                        Message::Frame(frame) => Arrival::Frame(frame),
                    }));
                }
                None => {}
            }
        }
        self.arrived = arrived;
    }

    pub(crate) fn cancel(&mut self, now: SimTime, transfer: TransferId) {
        if let Some(network) = &mut self.network
            && self.carried.remove(&transfer).is_some()
        {
            if let Some(crossings) = &mut self.crossings {
                crossings.cancelled(transfer);
            }
            network.cancel(now, transfer);
        }
    }

    pub(crate) fn set_share(&mut self, now: SimTime, worker: WorkerId, share: f64) {
        if let Some(network) = &mut self.network {
            network.set_share(now, Endpoint::of_worker(worker), share);
        }
    }

    pub(crate) fn set_uplink_share(&mut self, now: SimTime, leaf: u32, share: f64) {
        if let Some(network) = &mut self.network {
            network.set_uplink_share(now, leaf, share);
        }
    }
}

/// Tokens of a pass, in transit to the clients.
pub(crate) struct Frame {
    pub(crate) node: u32,
    /// The node's number of restarts at the time of sending.
    pub(crate) life: u32,
    pub(crate) out: Box<PassOutput>,
    pub(crate) watched: Watched,
}

/// Frames in transit.
#[derive(Default)]
pub(crate) struct Frames {
    slots: Vec<Option<Frame>>,
    free: Vec<u32>,
}

impl Frames {
    pub(crate) fn insert(&mut self, frame: Frame) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(frame);
            slot
        } else {
            self.slots.push(Some(frame));
            to_u32(self.slots.len()) - 1
        }
    }

    /// Tokens in transit for a request on a node since its last restart, and whether its end is.
    pub(crate) fn under_way(
        &self,
        node: u32,
        life: u32,
        id: RequestId,
    ) -> (u32, Option<&Finished>) {
        let (mut tokens, mut end) = (0, None);
        for frame in self.slots.iter().flatten() {
            if frame.node == node && frame.life == life {
                let out = &frame.out;
                let of_id = out.tokens.iter().find(|&(of, _)| of == id);
                tokens += of_id.map_or(0, |(_, tokens)| to_u32(tokens.len()));
                end = end.or(out.finished.iter().find(|done| done.id == id));
            }
        }
        (tokens, end)
    }

    pub(crate) fn get(&self, frame: u32) -> Option<&Frame> {
        self.slots[frame as usize].as_ref()
    }

    pub(crate) fn take(&mut self, frame: u32) -> Option<Frame> {
        let taken = self.slots[frame as usize].take()?;
        self.free.push(frame);
        Some(taken)
    }
}
