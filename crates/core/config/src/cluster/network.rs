//! `[network]`: the network between frontend and workers: its model, rates and topology.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::{Fault, FaultEvent, PoolConfig, TimingConfig};
use crate::doc::{Table, choice, path, section, value};

/// Model of the network between frontend and workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NetworkMode {
    /// Messages arrive at once.
    #[default]
    None,
    /// Transfers are flows that share links fairly.
    Flows,
    /// Transfers that meet others are simulated packet by packet.
    Packets,
}

const NETWORKS: &[(&str, NetworkMode)] = &[
    ("none", NetworkMode::None),
    ("flows", NetworkMode::Flows),
    ("packets", NetworkMode::Packets),
];

/// Bits/s: at most a terabyte per millisecond, at least a bit per millisecond.
const RATE: RangeInclusive<f64> = 1e3..=1e16;

section! {
    /// `[network]`.
    pub struct NetworkConfig, keys NetworkKeys of "network", read by hand {
        /// `flows`: transfers between workers share links fairly (`docs/twin.md`). Live, KV transfers take the
        /// modelled time. `packets`: those that meet others are simulated packet by packet; simulation only.
        ///
        /// "none": KV transfers take no time.
        mode: NetworkMode = choice(NETWORKS, NetworkMode::None);
        /// Each network interface of a worker, in each direction; a GPU has its own unless `nics_per_host` is set.
        /// The default is a DGX H100's.
        nic_bits_per_s: f64 = value(400e9).within(RATE).unit("bits/s");
        /// GPUs of a host; 0: those of one worker. Workers fill hosts in order. Collectives of a worker with more
        /// GPUs use the network, and transfers between workers of one host do not. Simulation only.
        ///
        /// Low: steps of workers on several hosts take longer, and beside KV transfers even more.
        gpus_per_host: u32 = value(0).within(0..=1_024)
            .unit("GPUs").note("for \"flows\" and \"packets\"");
        /// Network interfaces of a host, shared evenly by its GPUs; 0: one per GPU.
        nics_per_host: u32 = value(0).with_description("a divisor of `gpus_per_host`, or 0");
        /// Rate between GPUs of one host, per GPU in each direction. The default is NVLink of an H100.
        host_bits_per_s: f64 = value(3.6e12).within(RATE).unit("bits/s");
        /// The frontend's interface in each direction.
        frontend_bits_per_s: f64 = value(100e9).within(RATE).unit("bits/s");
        /// Latency per link; two links to a worker under the same switch, four to others.
        hop_latency_us: f64 = value(1.0).within(0.0..=1e6).unit("us");
        /// Workers under one leaf switch; 0: all of them.
        workers_per_leaf: u32 = value(0).with_description("workers");
        /// Total rate of a leaf switch's links to the spine, in each direction; 0: no limit.
        ///
        /// Low: KV transfers between leaves slow each other down.
        uplink_bits_per_s: f64 = value(0.0).with_description("bits/s, 1e3 to 1e16, or 0")
            .check(|&rate| rate == 0.0 || RATE.contains(&rate), "1e3 to 1e16, or 0 for no limit");
        /// Spine switches. A leaf switch has a link to each, of an equal part of `uplink_bits_per_s`. `flows`: as one
        /// link. `packets`: each connection takes one of them, by a hash.
        ///
        /// High: transfers whose connections share a link take longer.
        spines: u32 = value(1).within(1..=64).unit("switches");
        /// From the failure or repair of a link until connections take other paths.
        ///
        /// High: packets are lost for longer.
        reroute_ms: f64 = value(0.0).within(0.0..=1e6).unit("ms").note("for \"packets\"");
        /// File of `slipstream net run` whose flows share the network, relative to the cluster file. Its host `n` is
        /// the network interface `n`, counted over the GPUs of all workers; the last one is the frontend's.
        background?: PathBuf = path().note("for \"packets\"");
        /// Simulation only: whether requests and answers use the network too, between frontend and workers.
        ///
        /// true: every pass is an event, so the simulation takes longer.
        messages: bool = value(false);
        /// Bytes per prompt token in a request.
        request_token_bytes: u32 = value(4).within(0..=4_096).unit("bytes");
        /// Bytes per answer token in a worker's frame.
        answer_token_bytes: u32 = value(8).within(0..=65_536).unit("bytes");
        /// Payload of a packet.
        ///
        /// High: fewer events, and coarser queues.
        packet_bytes: u32 = value(4_096).within(256..=65_000).unit("bytes").note("for \"packets\"");
    }
}

impl NetworkConfig {
    /// GPUs that share a network interface.
    pub fn gpus_per_nic(&self) -> u32 {
        let gpus = self.gpus_per_host.checked_div(self.nics_per_host);
        gpus.unwrap_or(1).max(1)
    }

    /// Network interfaces of a worker with `gpus`.
    pub fn nics(&self, gpus: u32) -> u32 {
        gpus.div_ceil(self.gpus_per_nic())
    }

    /// Hosts of a worker with `gpus` that does not fit into one; `None` if it does.
    pub fn hosts_of(&self, gpus: u32) -> Option<u32> {
        let of = self.gpus_per_host;
        (of > 0 && gpus > of).then(|| gpus.div_ceil(of))
    }
}

pub(super) fn read_network(t: &Table<'_>) -> NetworkConfig {
    let default = NetworkConfig::default();
    let mode = NetworkKeys::mode().read(t);
    let packets = mode == NetworkMode::Packets;
    if !packets {
        for key in ["packet_bytes", "reroute_ms", "background"] {
            t.unused(key, "mode", "only \"packets\" uses it");
        }
    }
    let gpus_per_host = NetworkKeys::gpus_per_host().read(t);
    if gpus_per_host == 0 {
        for key in ["nics_per_host", "host_bits_per_s"] {
            t.unused(key, "gpus_per_host", "`gpus_per_host` is 0");
        }
    } else if mode == NetworkMode::None {
        t.unused(
            "gpus_per_host",
            "mode",
            "only \"flows\" and \"packets\" use it",
        );
    }
    let network = NetworkConfig {
        mode,
        gpus_per_host,
        nics_per_host: if gpus_per_host == 0 {
            default.nics_per_host
        } else {
            let nics = NetworkKeys::nics_per_host().field(t).check(
                |&nics: &u32| nics == 0 || gpus_per_host.is_multiple_of(nics),
                &format!(
                    "a divisor of `gpus_per_host`, which is {gpus_per_host}; or 0 for one per GPU"
                ),
            );
            nics.or(default.nics_per_host)
        },
        host_bits_per_s: if gpus_per_host == 0 {
            default.host_bits_per_s
        } else {
            NetworkKeys::host_bits_per_s().read(t)
        },
        packet_bytes: if packets {
            NetworkKeys::packet_bytes().read(t)
        } else {
            default.packet_bytes
        },
        spines: NetworkKeys::spines().read(t),
        reroute_ms: if packets {
            NetworkKeys::reroute_ms().read(t)
        } else {
            default.reroute_ms
        },
        background: if packets {
            NetworkKeys::background().read(t)
        } else {
            None
        },
        nic_bits_per_s: NetworkKeys::nic_bits_per_s().read(t),
        frontend_bits_per_s: NetworkKeys::frontend_bits_per_s().read(t),
        hop_latency_us: NetworkKeys::hop_latency_us().read(t),
        workers_per_leaf: NetworkKeys::workers_per_leaf().read(t),
        uplink_bits_per_s: NetworkKeys::uplink_bits_per_s().read(t),
        messages: NetworkKeys::messages().read(t),
        request_token_bytes: NetworkKeys::request_token_bytes().read(t),
        answer_token_bytes: NetworkKeys::answer_token_bytes().read(t),
    };
    let (frontend, nic) = (network.frontend_bits_per_s, network.nic_bits_per_s);
    if network.spines > 1 && network.uplink_bits_per_s == 0.0 {
        t.error(
            "spines",
            format!("`spines` is {}, and the links to them have no rate", network.spines),
            "set `uplink_bits_per_s` to the total rate of a leaf switch's links to the spines, or remove `spines`",
        );
    }
    if packets && network.messages && frontend > nic {
        t.error(
            "frontend_bits_per_s",
            format!("the frontend's interface has {frontend:e} bits/s, and that of a GPU {nic:e}: packets need interfaces of one rate"),
            "set it to at most `nic_bits_per_s`, or set `mode = \"flows\"`",
        );
    }
    network
}

/// Workers fill whole hosts or parts of one, and collectives between hosts have a form that is modelled.
pub(super) fn check_hosts(root: &Table<'_>, pools: &[PoolConfig], network: &NetworkConfig) {
    let (of, share) = (network.gpus_per_host, network.gpus_per_nic());
    if of == 0 || network.mode == NetworkMode::None {
        return;
    }
    for pool in pools {
        let (engine, gpus, name) = (&pool.engine, pool.engine.gpus(), &pool.name);
        let shape = &pool.model.shape;
        let error = |message: String, hint: &str| root.error("pool", message, hint);
        if !gpus.is_multiple_of(share) {
            error(
                format!(
                    "a worker of pool `{name}` has {gpus} GPUs, and {share} GPUs share a network interface: workers \
                         with a part of an interface are not modelled"
                ),
                "raise `network.nics_per_host`",
            );
        }
        if network.hosts_of(gpus).is_none() {
            continue;
        }
        let tensor = engine.tensor_parallel_size;
        if !gpus.is_multiple_of(of) || !(tensor.is_multiple_of(of) || of.is_multiple_of(tensor)) {
            error(
                format!(
                    "a worker of pool `{name}` has {gpus} GPUs, {tensor} of which share each layer, and they do not \
                         fill hosts of {of}"
                ),
                "set `network.gpus_per_host` to a divisor or a multiple of `tensor_parallel_size` that divides the GPUs \
                 of a worker",
            );
        }
        let calibrated = matches!(engine.timing, TimingConfig::Calibrated { .. });
        if !calibrated && !matches!(engine.timing, TimingConfig::Roofline { .. }) {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, and its step times do not state which part \
                         of them is collectives, which the network is to carry"
                ),
                "set `engine.timing.kind` to \"calibrated\" or \"roofline\", or `network.gpus_per_host = 0`",
            );
        }
        let ranks = engine.data_parallel_size;
        if shape.experts.is_some() && ranks > 1 && engine.pipeline.is_some() {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, {ranks} data-parallel ranks with experts, \
                         and a pipeline: exchanges of experts within a stage are not modelled between hosts"
                ),
                "set `pipeline_parallel_size = 1`, or `network.gpus_per_host = 0`",
            );
        }
        if shape.experts.is_some() && ranks > 1 && !engine.enable_expert_parallel {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, and its {ranks} data-parallel ranks share \
                         each expert: that gather and scatter is not modelled between hosts"
                ),
                "set `enable_expert_parallel = true`, or `network.gpus_per_host = 0`",
            );
        }
    }
}

/// Links of packets are up or down, and the links between switches that fail exist.
pub(super) fn check_links(
    root: &Table<'_>,
    pools: &[PoolConfig],
    network: &NetworkConfig,
    events: &[FaultEvent],
) {
    let packets = network.mode == NetworkMode::Packets;
    let error = |message: &str, hint: &str| root.error("event", message, hint);
    for event in events {
        match event.fault {
            Fault::Link { share } if packets && share > 0.0 => error(
                &format!(
                    "an event of kind \"link\" has `share = {share}`, and with `network.mode = \"packets\"` an \
                     interface is up or down"
                ),
                "set `share = 0`, or `network.mode = \"flows\"`, or remove the event",
            ),
            Fault::Link { .. } if packets && event.until_s.is_none() => error(
                "an event of kind \"link\" has no end, and with `network.mode = \"packets\"` the packets of transfers \
                 are sent again until they arrive",
                "set `until_s`, or use an event of kind \"crash\" for a worker that does not come back",
            ),
            Fault::Uplink { leaf, spine } => {
                check_uplink(root, pools, network, (leaf, spine));
            }
            _ => {}
        }
    }
    let lasting: BTreeSet<u32> = (events.iter())
        .filter(|event| event.until_s.is_none())
        .filter_map(|event| match event.fault {
            Fault::Uplink { spine, .. } => Some(spine),
            _ => None,
        })
        .collect();
    if packets && !lasting.is_empty() && lasting.len() >= network.spines as usize {
        error(
            "events of kind \"uplink\" without end are about all spine switches, and with `network.mode = \"packets\"` \
             the packets of transfers without a path are sent again for ever",
            "set `until_s`, or leave one of `network.spines` with all of its links",
        );
    }
}

fn check_uplink(
    root: &Table<'_>,
    pools: &[PoolConfig],
    network: &NetworkConfig,
    (leaf, spine): (u32, u32),
) {
    let error = |message: String, hint: &str| root.error("event", message, hint);
    if network.mode == NetworkMode::None
        || network.workers_per_leaf == 0
        || network.uplink_bits_per_s == 0.0
    {
        return error(
            "an event of kind \"uplink\" is about a link between switches that is not modelled"
                .into(),
            "set `network.mode`, `network.workers_per_leaf` and `network.uplink_bits_per_s`, or remove the event",
        );
    }
    let workers = (pools.iter()).fold(0u32, |total, pool| total.saturating_add(pool.workers));
    let leaves = workers.div_ceil(network.workers_per_leaf);
    if leaf >= leaves {
        error(
            format!(
                "an event of kind \"uplink\" has `leaf = {leaf}`, and the workers are under {leaves} leaf switches"
            ),
            "set it to the number of a leaf switch, from 0",
        );
    }
    if spine >= network.spines {
        error(
            format!(
                "an event of kind \"uplink\" has `spine = {spine}`, and `network.spines` is {}",
                network.spines
            ),
            "set it to the number of a spine switch, from 0",
        );
    }
}
