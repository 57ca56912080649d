//! Collectives of workers on several hosts (`network.gpus_per_host`), over the network.
//!
//! A step time model has a term for the bytes that collectives move, over the links inside of a host. For a worker on
//! several hosts the network's time replaces it. Simulating each collective of each step would cost seconds, so one
//! collective of each kind and size is measured, in a copy of the network that has no other traffic or that has as many
//! transfers as the worker has when its step begins. Steps then look the time up. The other way about, a transfer
//! takes longer by the share of its rate that the same measurement found missing.

mod measure;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use slipstream_base::width::{floor_u64, round_u64};
use slipstream_base::{Role, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, EngineConfig, NetworkMode, PoolConfig, TimingConfig};
use slipstream_engine::timing::{StepLoad, StepTime};
use slipstream_flows::TransferId;

use crate::packets::HEADER_BYTES;
use measure::Shape;

/// Activations of one number: 16 bits; those sent to experts: 8 bits.
const ACTIVATION_BYTES: f64 = 2.0;
const DISPATCH_BYTES: f64 = 1.0;
/// A transfer that lacks less than this has arrived, ns.
const LACKS_NS_MIN: u64 = 1_000;
/// Sizes are measured at powers of four, up to about so many bytes in all, or of a message.
const MEASURED_BYTES_MAX: u64 = 16 << 20;
const MESSAGE_BYTES_MAX: u64 = 16 << 10;

/// Other transfers that share the interfaces of a worker, in each direction: 0, 1, 2, 4 or 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Beside {
    pub(crate) into: u32,
    pub(crate) out: u32,
}

impl Beside {
    fn of(into: u32, out: u32) -> Beside {
        let class = |transfers: u32| transfers.checked_ilog2().map_or(0, |log| 1 << log.min(3));
        Beside {
            into: class(into),
            out: class(out),
        }
    }
}

/// A collective during some transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    /// From its start to its end, ns.
    pub(crate) ns: f64,
    /// The part of that time for which transfers into and out of the worker stand still, ns.
    pub(crate) stalls: [f64; 2],
}

impl Measured {
    fn plus(self, factor: f64, other: Measured) -> Measured {
        Measured {
            ns: self.ns + factor * other.ns,
            stalls: [0, 1].map(|at| self.stalls[at] + factor * other.stalls[at]),
        }
    }
}

/// The GPUs of a collective, and its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Reduced inside of hosts, then around a ring of hosts, each GPU with those of its number in other hosts.
    Ring,
    /// Each GPU to each one in another host.
    AllToAll,
}

/// One kind of collectives of a step.
#[derive(Clone, Copy, Debug)]
struct Collective {
    kind: Kind,
    shape: Shape,
    /// Per step.
    count: f64,
    /// Bytes of a message per token of the step.
    message_bytes: f64,
}

/// The collectives that the workers of a pool send over the network, and their times.
pub(crate) struct Templates {
    collectives: Vec<Collective>,
    /// Of the model's time for bytes of all-reduces and exchanges, the part that stays inside of hosts.
    inside: [f64; 2],
    network: NetworkMode,
    /// In which directions there may be transfers.
    transfers: Beside,
    link: measure::Interface,
    times: Mutex<BTreeMap<(Kind, u32, Beside), Measured>>,
}

/// The transfers that a pool's steps usually meet.
fn usual_transfers(cluster: &Cluster, pool: &PoolConfig) -> Beside {
    let fetches = pool.engine.peer_tier.is_some();
    let hands_over = cluster.hands_over();
    Beside {
        into: u32::from(fetches || hands_over && pool.role != Role::Prefill),
        out: u32::from(fetches || hands_over && pool.role == Role::Prefill),
    }
}

impl Templates {
    /// Those of `pool`; `None` if each of its workers is on one host.
    pub(crate) fn new(cluster: &Cluster, pool: &PoolConfig, speedup: f64) -> Option<Templates> {
        let (network, engine) = (&cluster.network, &pool.engine);
        let hosts = network.hosts_of(engine.gpus())?;
        if network.mode == NetworkMode::None {
            return None;
        }
        let model = &pool.model.shape;
        let local = network.gpus_per_host;
        let (layers, hidden) = (f64::from(model.layers), f64::from(model.hidden_size));
        let expert_layers = f64::from(model.expert_layers());
        let tensor = engine.tensor_parallel_size.max(1);
        let ranks = match model.experts {
            Some(_) => engine.data_parallel_size.max(1),
            None => 1,
        };
        let exchanges = ranks > 1 && engine.enable_expert_parallel;
        let shape = |hosts| Shape {
            hosts,
            gpus: local,
            gpus_per_nic: network.gpus_per_nic(),
        };
        let (mut collectives, mut inside) = (Vec::new(), [1.0; 2]);
        if tensor > local {
            let (all, of) = (f64::from(tensor), f64::from(local));
            let hosts = tensor / local;
            let reduces = match engine.timing {
                TimingConfig::Roofline { .. } => 2.0 * layers + 1.0,
                _ => 2.0 * layers - if exchanges { expert_layers } else { 0.0 },
            };
            collectives.push(Collective {
                kind: Kind::Ring,
                shape: shape(hosts),
                count: reduces,
                message_bytes: hidden * ACTIVATION_BYTES / (of * f64::from(hosts)),
            });
            inside[0] = (of - 1.0) / of / ((all - 1.0) / all);
        }
        if exchanges && tensor * ranks > local {
            let reach = f64::from(tensor * ranks);
            let per_token = model.experts.map_or(0.0, |e| f64::from(e.per_token));
            let each = per_token.min(reach) * hidden / reach;
            for bytes in [DISPATCH_BYTES, ACTIVATION_BYTES] {
                collectives.push(Collective {
                    kind: Kind::AllToAll,
                    shape: shape(hosts),
                    count: expert_layers,
                    message_bytes: each * bytes,
                });
            }
            // The faster links inside of a host carry their part in the meantime.
            inside[1] = 0.0;
        }
        Some(Templates {
            collectives,
            inside,
            network: network.mode,
            transfers: usual_transfers(cluster, pool),
            link: measure::Interface {
                bits_per_s: network.nic_bits_per_s * speedup,
                delay_ns: round_u64(network.hop_latency_us * 1e3 / speedup),
                packet_bytes: network.packet_bytes,
                seed: cluster.router.seed,
            },
            times: Mutex::default(),
        })
    }

    /// All collectives of a step of `tokens`.
    fn of_step(&self, tokens: u64, beside: Beside) -> Measured {
        let mut all = Measured::default();
        for collective in &self.collectives {
            let bytes = collective.message_bytes * tokens as f64;
            all = all.plus(collective.count, self.one(collective, bytes, beside));
        }
        all
    }

    fn one(&self, of: &Collective, bytes: f64, beside: Beside) -> Measured {
        if self.network == NetworkMode::Flows {
            return measure::fluid(of.kind, of.shape, self.link, bytes, beside);
        }
        // On the line between the times of two powers of four, or of the largest two.
        let each = MEASURED_BYTES_MAX / of.shape.messages(of.kind);
        let most = each.max(MESSAGE_BYTES_MAX).ilog2() / 2 * 2;
        let log = (floor_u64(bytes).max(1).ilog2() / 2 * 2).min(most);
        let below = (1_u64 << log) as f64;
        let at = |log| self.measured(of, log, beside);
        let share = ((bytes / below - 1.0) / 3.0).max(0.0);
        let line = |low: Measured, high: Measured, share: f64| {
            let from = Measured::default().plus(1.0 - share, low);
            from.plus(share, high)
        };
        if log == most {
            // One step of a power of four below is a quarter of one above.
            return line(at(log - 2), at(log), 1.0 + 4.0 * share);
        }
        line(at(log), at(log + 2), share)
    }

    fn measured(&self, of: &Collective, log: u32, beside: Beside) -> Measured {
        let key = (of.kind, log, beside);
        let times = || self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = times().get(&key) {
            return *known;
        }
        // Others may measure the same: all find the same.
        let found = measure::packets(of.kind, of.shape, self.link, 1 << log, beside);
        times().insert(key, found);
        found
    }
}

/// `engine` with the sends between its stages over the network, as far as these are on different hosts: at the rate of
/// an interface, without other traffic.
pub(crate) fn stages_on_hosts<'a>(
    cluster: &Cluster,
    pool: &'a PoolConfig,
) -> Cow<'a, EngineConfig> {
    let (network, engine) = (&cluster.network, &pool.engine);
    let Some(mut pipeline) = engine.pipeline.clone() else {
        return Cow::Borrowed(engine);
    };
    if network.mode == NetworkMode::None || network.hosts_of(engine.gpus()).is_none() {
        return Cow::Borrowed(engine);
    }
    let (tensor, stages) = (engine.tensor_parallel_size, pipeline.stages());
    let ranks = 0..engine.data_parallel_size;
    let first =
        ranks.flat_map(|rank| (1..stages).map(move |stage| (rank * stages + stage) * tensor));
    let first: Vec<u32> = first.collect();
    let across = first
        .iter()
        .filter(|gpu| gpu.is_multiple_of(network.gpus_per_host));
    let share = across.count() as f64 / first.len().max(1) as f64;
    let headers = match network.mode {
        NetworkMode::Packets => f64::from(HEADER_BYTES) / f64::from(network.packet_bytes),
        _ => 0.0,
    };
    let rate = network.nic_bits_per_s / f64::from(network.gpus_per_nic());
    let bytes = f64::from(pool.model.shape.hidden_size) * ACTIVATION_BYTES * (1.0 + headers);
    let (send_ns, latency_ns) = (bytes * 8e9 / rate, 2e3 * network.hop_latency_us);
    pipeline.send_ns_per_token = pipeline.send_ns_per_token * (1.0 - share) + send_ns * share;
    pipeline.latency_ns += share * latency_ns;
    Cow::Owned(EngineConfig {
        pipeline: Some(pipeline),
        ..engine.clone()
    })
}

/// Data that an engine on several hosts and the network exchange about its steps.
#[derive(Default)]
pub(crate) struct StepTraffic {
    into: AtomicU32,
    out: AtomicU32,
    /// Time of the last step for which transfers into and out of the worker stand still, ns.
    stalls: [AtomicU64; 2],
}

/// Steps whose collectives use the network.
pub(crate) struct OverNetwork {
    timing: Box<dyn StepTime>,
    templates: Arc<Templates>,
    traffic: Arc<StepTraffic>,
}

impl OverNetwork {
    pub(crate) fn new(
        timing: Box<dyn StepTime>,
        templates: Arc<Templates>,
    ) -> (OverNetwork, Arc<StepTraffic>) {
        let traffic = Arc::new(StepTraffic::default());
        let steps = OverNetwork {
            timing,
            templates,
            traffic: traffic.clone(),
        };
        (steps, traffic)
    }

    /// Time of a step that takes `inside_ns` if all its collectives stay inside of a host.
    fn over_network(&self, load: &StepLoad, inside_ns: u64) -> u64 {
        let (templates, traffic) = (&self.templates, &self.traffic);
        let whole = inside_ns as f64;
        let moved = self.timing.moved_ns(load).unwrap_or_default();
        let [reduces, exchanges] = templates.inside;
        let replaced = moved.reduces * (1.0 - reduces) + moved.exchanges * (1.0 - exchanges);
        let (into, out) = (
            traffic.into.load(Ordering::Relaxed),
            traffic.out.load(Ordering::Relaxed),
        );
        let network = templates.of_step(load.tokens(), Beside::of(into, out));
        if templates.transfers != Beside::default() {
            // As for one that begins during the step.
            let Beside {
                into: ins,
                out: outs,
            } = templates.transfers;
            let beside = Beside::of(into.max(ins), out.max(outs));
            let of = templates.of_step(load.tokens(), beside);
            for (stall, ns) in traffic.stalls.iter().zip(of.stalls) {
                stall.store(round_u64(ns), Ordering::Relaxed);
            }
        }
        round_u64((whole - replaced).max(0.0) + network.ns)
    }
}

impl StepTime for OverNetwork {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        let inside = self.timing.step_ns(load);
        self.over_network(load, inside)
    }

    fn step_ns_in_group(&mut self, load: &StepLoad, all: u64) -> u64 {
        let inside = self.timing.step_ns_in_group(load, all);
        self.over_network(load, inside)
    }

    fn has_range(&self) -> bool {
        self.timing.has_range()
    }

    fn extrapolates(&self, load: &StepLoad) -> bool {
        self.timing.extrapolates(load)
    }
}

/// The time for which transfers stood still because of the steps of one engine.
#[derive(Clone, Copy, Default)]
struct Stalls {
    /// Of its earlier steps, ns, by direction.
    before: [f64; 2],
    /// The current step, and the share of it.
    step: (SimTime, SimTime),
    share: [f64; 2],
}

impl Stalls {
    fn until(&self, now: SimTime) -> [f64; 2] {
        let (start, end) = self.step;
        let ns = now.min(end).since(start.min(now)) as f64;
        [0, 1].map(|at| self.before[at] + self.share[at] * ns)
    }

    fn begin(&mut self, now: SimTime, end: SimTime, stalls: [u64; 2]) {
        self.before = self.until(now);
        self.step = (now, end);
        let ns = end.since(now).max(1) as f64;
        // A transfer never stands still for all of a step.
        self.share = stalls.map(|stall| (stall as f64 / ns).min(0.99));
    }
}

/// A transfer of a worker on several hosts.
struct Crossing {
    from: WorkerId,
    to: WorkerId,
    /// Stalls of the sender's interfaces, and of the receiver's, so far.
    since: [f64; 2],
}

/// The engines of workers on several hosts, and the transfers that share their interfaces.
#[derive(Default)]
pub(crate) struct Crossings {
    /// By node; `None` if its worker is on one host.
    nodes: Vec<Option<(Arc<StepTraffic>, Stalls)>>,
    /// By worker: its nodes, and its transfers under way in each direction.
    workers: Vec<(Vec<u32>, Beside)>,
    under_way: BTreeMap<TransferId, Crossing>,
    /// Transfers that would have arrived without the collectives, and when those that they met are made up for.
    late: BinaryHeap<Reverse<(SimTime, TransferId)>>,
}

impl Crossings {
    /// `traffic` by node, with its worker. `None` if all are on one host each.
    pub(crate) fn new(traffic: Vec<(WorkerId, Option<Arc<StepTraffic>>)>) -> Option<Crossings> {
        if traffic.iter().all(|(_, traffic)| traffic.is_none()) {
            return None;
        }
        let mut crossings = Crossings::default();
        for (node, (worker, traffic)) in (0..).zip(traffic) {
            if crossings.workers.len() <= worker.index() {
                let all = worker.index() + 1;
                crossings.workers.resize_with(all, Default::default);
            }
            crossings.workers[worker.index()].0.push(node);
            let of_node = traffic.map(|traffic| (traffic, Stalls::default()));
            crossings.nodes.push(of_node);
        }
        Some(crossings)
    }

    /// A step of `node` is about to begin.
    pub(crate) fn before_step(&self, node: u32, worker: WorkerId) {
        if let Some((traffic, _)) = &self.nodes[node as usize] {
            let beside = self.workers[worker.index()].1;
            traffic.into.store(beside.into, Ordering::Relaxed);
            traffic.out.store(beside.out, Ordering::Relaxed);
        }
    }

    /// It has begun, and takes until `end`.
    pub(crate) fn step_began(&mut self, node: u32, now: SimTime, end: SimTime) {
        if let Some((traffic, stalls)) = &mut self.nodes[node as usize] {
            let of_step = [0, 1].map(|at| traffic.stalls[at].load(Ordering::Relaxed));
            stalls.begin(now, end, of_step);
        }
    }

    /// Stalls of transfers out of `from`, and of those into `to`: each rank of a worker has its part of the bytes.
    fn stalls(&self, from: WorkerId, to: WorkerId, now: SimTime) -> [f64; 2] {
        let mean = |worker: WorkerId, direction: usize| {
            let nodes = &self.workers[worker.index()].0;
            let each = nodes.iter().filter_map(|&node| {
                let (_, stalls) = self.nodes[node as usize].as_ref()?;
                Some(stalls.until(now)[direction])
            });
            each.sum::<f64>() / nodes.len().max(1) as f64
        };
        [mean(from, 1), mean(to, 0)]
    }

    pub(crate) fn began(&mut self, id: TransferId, now: SimTime, from: WorkerId, to: WorkerId) {
        self.workers[from.index()].1.out += 1;
        self.workers[to.index()].1.into += 1;
        let since = self.stalls(from, to, now);
        self.under_way.insert(id, Crossing { from, to, since });
    }

    pub(crate) fn cancelled(&mut self, id: TransferId) {
        if let Some(Crossing { from, to, .. }) = self.under_way.remove(&id) {
            self.workers[from.index()].1.out -= 1;
            self.workers[to.index()].1.into -= 1;
        }
    }

    /// Whether a transfer has arrived that would have without the collectives.
    pub(crate) fn arrives(&mut self, id: TransferId, now: SimTime) -> bool {
        let Some(&Crossing { from, to, since }) = self.under_way.get(&id) else {
            return true;
        };
        let stalls = self.stalls(from, to, now);
        let lacks = (stalls[0] - since[0]).max(stalls[1] - since[1]);
        if round_u64(lacks) < LACKS_NS_MIN {
            self.cancelled(id);
            return true;
        }
        if let Some(crossing) = self.under_way.get_mut(&id) {
            crossing.since = stalls;
        }
        self.late.push(Reverse((now + round_u64(lacks), id)));
        false
    }

    /// When the next late transfer is to be looked at again.
    pub(crate) fn next_time(&self) -> Option<SimTime> {
        self.late.peek().map(|Reverse((at, _))| *at)
    }

    /// Appends late transfers that have arrived by `now`.
    pub(crate) fn advance(&mut self, now: SimTime, out: &mut Vec<TransferId>) {
        while let Some(&Reverse((at, id))) = self.late.peek()
            && at <= now
        {
            self.late.pop();
            if self.under_way.contains_key(&id) && self.arrives(id, now) {
                out.push(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use slipstream_config::cluster::file;
    use slipstream_config::doc::Doc;
    use slipstream_engine::timing::build;

    use super::*;

    const SHAPE: Shape = Shape {
        hosts: 2,
        gpus: 2,
        gpus_per_nic: 1,
    };
    const LINK: measure::Interface = measure::Interface {
        bits_per_s: 400e9,
        delay_ns: 1_000,
        packet_bytes: 4_096,
        seed: 1,
    };

    #[test]
    fn alone_packets_take_the_time_of_a_fluid() {
        for kind in [Kind::Ring, Kind::AllToAll] {
            for (hosts, gpus_per_nic) in [(2, 1), (4, 1), (2, 2)] {
                let shape = Shape {
                    hosts,
                    gpus_per_nic,
                    ..SHAPE
                };
                for bytes in [1 << 20, 1 << 22] {
                    let none = Beside::default();
                    let fluid = measure::fluid(kind, shape, LINK, bytes as f64, none).ns;
                    let packets = measure::packets(kind, shape, LINK, bytes, none).ns;
                    let off = packets / fluid - 1.0;
                    assert!(
                        (0.0..0.02).contains(&off),
                        "{kind:?} {shape:?} {bytes}: {off}"
                    );
                }
            }
        }
    }

    #[test]
    fn transfers_and_collectives_slow_each_other_down() {
        for kind in [Kind::Ring, Kind::AllToAll] {
            let of = |into, out| measure::packets(kind, SHAPE, LINK, 1 << 18, Beside { into, out });
            let alone = of(0, 0);
            assert_eq!(alone.stalls, [0.0; 2]);
            for (beside, other) in [(of(1, 0), 1), (of(0, 1), 0)] {
                assert!(beside.ns > 1.1 * alone.ns, "{kind:?}: {alone:?} {beside:?}");
                let stall = beside.stalls[1 - other];
                assert!(
                    stall > 0.2 * alone.ns && stall < beside.ns,
                    "{kind:?}: {beside:?}"
                );
                assert_eq!(beside.stalls[other], 0.0);
            }
            assert_eq!(of(1, 0), of(1, 0));
        }
    }

    /// Llama 3.1 8B on two hosts of four GPUs, which generate what another pool has computed.
    fn steps(mode: &str) -> (Box<dyn StepTime>, OverNetwork, Arc<StepTraffic>) {
        let text = format!(
            "[model]\npreset = \"llama-3.1-8b\"\n[pool.p]\nrole = \"prefill\"\n[pool.d]\nrole = \"decode\"\n\
             [engine]\nnum_gpu_blocks = 4096\ntensor_parallel_size = 8\n[engine.timing]\nkind = \"roofline\"\n\
             gpu = \"h100-sxm\"\n[network]\nmode = \"{mode}\"\ngpus_per_host = 4\n"
        );
        let no_file = |_: &Path| Err(std::io::Error::from(std::io::ErrorKind::NotFound));
        let doc = Doc::parse("c.toml", text.as_bytes());
        let (cluster, _) = file::read(doc, no_file).unwrap_or_else(|e| panic!("{e}"));
        let pool = &cluster.pools[1];
        let timing = || build(&pool.engine, &cluster.model.shape, no_file).unwrap();
        let templates = Templates::new(&cluster, pool, 1.0).unwrap();
        let (steps, traffic) = OverNetwork::new(timing(), Arc::new(templates));
        (timing(), steps, traffic)
    }

    #[test]
    fn the_network_replaces_the_bytes_between_hosts() {
        let mut one = StepLoad::default();
        one.add_decode(100, 101);
        let (mut whole, mut over, _) = steps("flows");
        // 65 all-reduces of 8,192 bytes. Over NVLink 14/8 of them at 82 % of 450 GB/s, of which 6/7 are left; over the
        // network two rounds of 1,024 bytes at 50 bytes/ns, each over two links of 1 us.
        let replaced = 65.0 * 14.0 / 8.0 * 8_192.0 / (0.82 * 450.0) / 7.0;
        let network = 65.0 * 2.0 * (1_024.0 / 50.0 + 2_000.0);
        let expected = whole.step_ns(&one) as f64 - replaced + network;
        assert!((over.step_ns(&one) as f64 - expected).abs() < 2.0);
        // Packets agree within 2 % on that part.
        let mut prompt = StepLoad::default();
        prompt.add_prefill(0, 4_096);
        let (_, mut packets, _) = steps("packets");
        let added = |steps: &mut OverNetwork| steps.step_ns(&prompt) as f64;
        let (flows, packets) = (added(&mut over), added(&mut packets));
        let network = 65.0 * 2.0 * (4_096.0 * 1_024.0 / 50.0 + 2_000.0);
        let off = (packets - flows) / network;
        assert!((0.0..0.02).contains(&off), "{off}");
    }

    #[test]
    fn stages_on_different_hosts_send_over_the_network() {
        let of = |tensor: u32, stages: u32, gpus: u32| {
            let text = format!(
                "[model]\npreset = \"llama-3.1-8b\"\n[engine]\nnum_gpu_blocks = 4096\ntensor_parallel_size = {tensor}\n\
                 pipeline_parallel_size = {stages}\npipeline_latency_us = 5\n[engine.timing]\nkind = \"calibrated\"\n\
                 gpu = \"h100-sxm\"\n[network]\nmode = \"flows\"\ngpus_per_host = {gpus}\n"
            );
            let no_file = |_: &Path| Err(std::io::Error::from(std::io::ErrorKind::NotFound));
            let doc = Doc::parse("c.toml", text.as_bytes());
            let (cluster, _) = file::read(doc, no_file).unwrap_or_else(|e| panic!("{e}"));
            let engine = stages_on_hosts(&cluster, &cluster.pools[0]);
            let of = engine.pipeline.clone().unwrap();
            (of.send_ns_per_token, of.latency_ns)
        };
        let (inside, _) = of(2, 4, 8);
        // 8,192 bytes per token at 50 bytes per ns.
        let across = 8_192.0 / 50.0;
        assert_eq!(of(2, 4, 2), (across, 7_000.0));
        // The second of three sends is between hosts.
        let (mixed, latency) = of(2, 4, 4);
        assert!((mixed - (2.0 * inside + across) / 3.0).abs() < 1e-9);
        assert!((latency - (5_000.0 + 2_000.0 / 3.0)).abs() < 1e-9);
    }

    #[test]
    fn a_step_beside_transfers_takes_longer() {
        let mut load = StepLoad::default();
        load.add_prefill(0, 2_048);
        for mode in ["flows", "packets"] {
            let (_, mut steps, traffic) = steps(mode);
            let alone = steps.step_ns(&load);
            let stalls = [0, 1].map(|at| traffic.stalls[at].load(Ordering::Relaxed));
            assert!(stalls[0] > 0 && stalls[1] == 0, "{stalls:?}");
            traffic.into.store(1, Ordering::Relaxed);
            let beside = steps.step_ns(&load);
            assert!(beside > alone, "{mode}: {alone} {beside}");
            traffic.into.store(4, Ordering::Relaxed);
            // By packets four may leave more room than one, as DCQCN cuts each of them.
            let four = steps.step_ns(&load);
            assert!(four > if mode == "flows" { beside } else { alone });
            traffic.into.store(0, Ordering::Relaxed);
            assert_eq!(steps.step_ns(&load), alone);
        }
    }

    #[test]
    fn a_transfer_beside_steps_arrives_later() {
        let traffic = Arc::new(StepTraffic::default());
        let workers = vec![(WorkerId(0), None), (WorkerId(1), Some(traffic.clone()))];
        let mut crossings = Crossings::new(workers).unwrap();
        let ms = |ms: u64| SimTime(ms * 1_000_000);
        // Half of each step is lost for transfers into worker 1.
        traffic.stalls[0].store(5_000_000, Ordering::Relaxed);
        crossings.step_began(1, ms(0), ms(10));
        let (slow, other, gone) = (TransferId(1), TransferId(2), TransferId(3));
        crossings.began(slow, ms(2), WorkerId(0), WorkerId(1));
        crossings.began(other, ms(2), WorkerId(1), WorkerId(0));
        crossings.began(gone, ms(2), WorkerId(0), WorkerId(1));
        crossings.before_step(1, WorkerId(1));
        assert_eq!(traffic.into.load(Ordering::Relaxed), 2);
        assert!(crossings.arrives(other, ms(4)), "the other direction");
        // 2 ms of work end at 6 ms.
        assert!(!crossings.arrives(slow, ms(4)));
        assert!(!crossings.arrives(gone, ms(4)));
        crossings.cancelled(gone);
        let (mut out, mut at) = (Vec::new(), ms(4));
        while let Some(next) = crossings.next_time() {
            at = next;
            crossings.advance(at, &mut out);
        }
        assert_eq!(out, [slow]);
        assert!(at <= ms(6) && ms(6).since(at) < 2_000, "{at}");
        crossings.before_step(1, WorkerId(1));
        assert_eq!(traffic.into.load(Ordering::Relaxed), 0);
        // Behind the step nothing is lost.
        crossings.began(slow, ms(10), WorkerId(0), WorkerId(1));
        assert!(crossings.arrives(slow, ms(12)));
    }
}
