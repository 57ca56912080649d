//! Samples of every port at equal intervals: backlog and link utilization.

use slipstream_base::width::{nearest_f32, to_u32, to_u64};

use crate::net::Net;
use crate::shard::Shard;
use crate::step::{Place, Step};
use crate::topology::{PortId, Tier, Topology};

/// Limit of samples of single ports; later ones are only per tier.
const SAMPLES_MAX: usize = 4_000_000;

/// Limit of sampling times; a longer run has no samples of its end.
const TIMES_MAX: usize = 200_000;

/// A port at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PortSample {
    /// Bytes accepted and not yet sent: waiting packets and the rest of the packet in service.
    pub backlog_bytes: u64,
    /// Share of the link's time in the interval that ends here, 0 to 1.
    pub utilization: f32,
    /// Packets dropped in the interval.
    pub drops: u32,
    /// Packets marked or trimmed in the interval.
    pub marks: u32,
}

/// The ports of a tier at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierSample {
    /// Ports in use in the run.
    pub ports: u32,
    /// Largest backlog of a port, bytes.
    pub backlog_bytes_max: u64,
    /// Sum of backlogs, bytes.
    pub backlog_bytes: u64,
    /// Mean over the ports in use.
    pub utilization_mean: f64,
    /// Utilization of the busiest port.
    pub utilization_max: f32,
    /// Packets dropped in the interval.
    pub drops: u64,
    /// Packets marked or trimmed in the interval.
    pub marks: u64,
}

/// Samples over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Time between samples, ns.
    pub interval_ns: u64,
    /// Sampling times, ns: ends of the intervals.
    pub times_ns: Vec<u64>,
    /// By time: links of hosts, links between switches, links of cores.
    pub tiers: Vec<[TierSample; 3]>,
    /// The ports, ascending.
    pub ports: Vec<PortId>,
    /// By time, then by port. Covers fewer times than `times_ns` if the limit was reached.
    pub samples: Vec<PortSample>,
}

impl Series {
    /// The samples of single ports at time number `index`; empty beyond the limit.
    pub fn at(&self, index: usize) -> &[PortSample] {
        let n = self.ports.len();
        self.samples.get(index * n..(index + 1) * n).unwrap_or(&[])
    }

    /// Number of times with samples of single ports.
    pub fn kept(&self) -> usize {
        self.samples.len() / self.ports.len().max(1)
    }
}

/// Counters of a port at one time.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    sent: u64,
    drops: u64,
    marks: u64,
}

/// Takes the samples.
pub(crate) struct Sampler {
    pub(crate) series: Series,
    places: Vec<(Step, u8)>,
    before: Vec<Count>,
    before_ns: u64,
    pub(crate) next_ns: u64,
}

impl Sampler {
    pub(crate) fn new(interval_ns: u64, shards: &[Shard], topology: &Topology) -> Self {
        let mut ports: Vec<(PortId, Step)> = Vec::new();
        for (s, shard) in shards.iter().enumerate() {
            let f = &shard.fabric;
            for (place, ids) in [
                (Place::Fifo, &f.port_ids),
                (Place::Scheduled, &f.scheduled_ids),
                (Place::Trim, &f.trim_ids),
            ] {
                let steps = ids.iter().enumerate();
                ports.extend(steps.map(|(i, &id)| (id, Step::new(to_u32(s), place, i))));
            }
        }
        ports.sort_unstable_by_key(|p| p.0);
        let tier = |id| match topology.tier(id) {
            Tier::Host => 0,
            Tier::Edge => 1,
            Tier::Core => 2,
        };
        Sampler {
            places: ports.iter().map(|&(id, step)| (step, tier(id))).collect(),
            before: vec![Count::default(); ports.len()],
            before_ns: 0,
            next_ns: interval_ns,
            series: Series {
                interval_ns,
                ports: ports.iter().map(|p| p.0).collect(),
                ..Series::default()
            },
        }
    }

    /// Skips the intervals before `next`, the next event, if the network is idle: their samples
    /// would be zeros.
    pub(crate) fn skip_to(&mut self, next: u64, shards: &[Shard]) {
        let interval = self.series.interval_ns;
        if next < self.next_ns.saturating_add(interval) || !self.is_idle(shards) {
            return;
        }
        self.before_ns = next / interval * interval;
        self.next_ns = self.before_ns + interval;
    }

    /// Whether every port was idle at the last sample. Only FIFO ports can be busy without a
    /// pending event, so the others need no check.
    fn is_idle(&self, shards: &[Shard]) -> bool {
        self.places.iter().all(|&(step, _)| {
            let f = &shards[step.shard()].fabric;
            let busy = match step.place() {
                Place::Fifo => f.ports[step.index()].busy,
                Place::Scheduled => f.scheduled[step.index()].busy(),
                _ => f.trim_ports[step.index()].busy,
            };
            busy <= self.before_ns
        })
    }

    /// Samples all ports; every event before `now` has run.
    pub(crate) fn take(&mut self, now: u64, shards: &[Shard], net: &Net) {
        let span = (now - self.before_ns).max(1);
        let mut tiers = [TierSample::default(); 3];
        let keep = self.series.samples.len() + self.places.len() <= SAMPLES_MAX
            && self.series.kept() == self.series.times_ns.len();
        for (i, &(step, tier)) in self.places.iter().enumerate() {
            let f = &shards[step.shard()].fabric;
            let at = step.index();
            // Bytes put on the link or on it, when it is free, and waiting bytes in addition.
            let (class, busy, bytes, waiting, drops, marks) = match step.place() {
                Place::Fifo => {
                    let (p, rest) = (&f.ports[at], &f.port_rest[at]);
                    let (drops, marks) = (u64::from(rest.drops), u64::from(rest.marks));
                    (p.class(), p.busy, p.bytes, 0, drops, marks)
                }
                Place::Scheduled => {
                    let p = &f.scheduled[at];
                    (
                        p.link_class(),
                        p.busy(),
                        p.bytes,
                        p.waiting_bytes(),
                        p.drops,
                        p.marks,
                    )
                }
                _ => {
                    let p = &f.trim_ports[at];
                    let (drops, marks) = (u64::from(p.drops), u64::from(p.trims));
                    (p.class(), p.busy, p.bytes, p.waiting_bytes, drops, marks)
                }
            };
            let rate = net.classes[class as usize].bits_per_s;
            let left = u128::from(busy.saturating_sub(now)) * u128::from(rate);
            // A FIFO port counts bytes at acceptance; the others when service starts.
            let left = to_u64((left / 8_000_000_000).min(u128::from(bytes)));
            let count = Count {
                sent: bytes - left,
                drops,
                marks,
            };
            let before = std::mem::replace(&mut self.before[i], count);
            let sent = count.sent.saturating_sub(before.sent);
            let utilization = sent as f64 * 8e9 / (rate as f64 * span as f64);
            let (drops, marks) = (count.drops - before.drops, count.marks - before.marks);
            let sample = PortSample {
                backlog_bytes: left + waiting,
                utilization: nearest_f32(utilization.min(1.0)),
                drops: u32::try_from(drops).unwrap_or(u32::MAX),
                marks: u32::try_from(marks).unwrap_or(u32::MAX),
            };
            let t = &mut tiers[tier as usize];
            t.ports += 1;
            t.backlog_bytes += sample.backlog_bytes;
            t.backlog_bytes_max = t.backlog_bytes_max.max(sample.backlog_bytes);
            t.utilization_mean += f64::from(sample.utilization);
            t.utilization_max = t.utilization_max.max(sample.utilization);
            t.drops += drops;
            t.marks += marks;
            if keep {
                self.series.samples.push(sample);
            }
        }
        for tier in &mut tiers {
            tier.utilization_mean /= f64::from(tier.ports.max(1));
        }
        self.series.times_ns.push(now);
        self.series.tiers.push(tiers);
        self.before_ns = now;
        self.next_ns = if self.series.times_ns.len() < TIMES_MAX {
            now + self.series.interval_ns
        } else {
            u64::MAX
        };
    }
}
