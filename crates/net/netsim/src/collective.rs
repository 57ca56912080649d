//! Collectives as flows that depend on each other.
//!
//! A step's flow starts when the data that its sender needs has arrived. Every dependency is
//! resolved at the host that starts, so collectives run on shards like other traffic.

use std::collections::{HashMap, HashSet};

use slipstream_base::mix;
use slipstream_base::width::{round_u64, to_u32};

use crate::topology::Host;

/// The communication pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// Each source sends all bytes to each sink.
    Broadcast,
    /// Every source sends its bytes to the sink.
    Gather,
    /// All send to the first host, which sends the result back.
    AllReduce,
    /// 2(n − 1) steps around a ring, of bytes/n each (Patarasuk, Yuan, "Bandwidth optimal
    /// all-reduce algorithms for clusters of workstations", JPDC 2009).
    RingAllReduce,
    /// Up and down a binary tree.
    TreeAllReduce,
    /// log2 n exchanges of all bytes; n a power of two.
    RecursiveDoubling,
    /// n − 1 steps around a ring, of bytes/n each.
    AllGather,
    /// n − 1 steps around a ring, of bytes/n each.
    ReduceScatter,
    /// Every host to every other, bytes/n each, uneven with `skew`.
    AllToAll,
}

/// A collective among hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The pattern.
    pub kind: CollectiveKind,
    /// Senders; for symmetric patterns, hosts.
    pub sources: Vec<Host>,
    /// Receivers; for symmetric patterns, more hosts.
    pub sinks: Vec<Host>,
    /// Bytes per host.
    pub bytes: u64,
    /// Computation between a step's arrival and the next step, ns.
    pub compute_ns: u64,
    /// All-to-all: the share of destination rank r is proportional to (r + 1)^-skew, over a
    /// permutation per sender; 0: equal shares.
    pub skew: f64,
    /// Seed of that permutation.
    pub seed: u64,
}

/// One flow of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Sender.
    pub src: Host,
    /// Receiver.
    pub dst: Host,
    /// Bytes; at least 1.
    pub bytes: u64,
    /// Indexes of the steps that must have arrived before.
    pub after: Vec<u32>,
}

impl Collective {
    /// The number of flows, without creating them: it grows with the square of the hosts for some
    /// patterns.
    pub fn flow_count(&self) -> u64 {
        let fans = matches!(
            self.kind,
            CollectiveKind::Broadcast | CollectiveKind::Gather
        );
        if fans {
            let mut times: HashMap<Host, u64> = HashMap::new();
            for &sink in &self.sinks {
                *times.entry(sink).or_default() += 1;
            }
            let all = self.sinks.len() as u64;
            let sent = |source| all - times.get(source).copied().unwrap_or(0);
            return self.sources.iter().map(sent).sum();
        }
        let n = self.hosts().len() as u64;
        let others = n.saturating_sub(1);
        match self.kind {
            CollectiveKind::RingAllReduce => 2 * others * n,
            CollectiveKind::AllReduce | CollectiveKind::TreeAllReduce => 2 * others,
            CollectiveKind::RecursiveDoubling => n * u64::from(n.max(1).ilog2()),
            _ => others * n,
        }
    }

    /// The hosts of a symmetric pattern.
    fn hosts(&self) -> Vec<Host> {
        let mut hosts = self.sources.clone();
        let mut known: HashSet<Host> = hosts.iter().copied().collect();
        hosts.extend(self.sinks.iter().filter(|&&sink| known.insert(sink)));
        hosts
    }

    /// The flows, in order.
    ///
    /// # Errors
    /// If there are too few hosts, or their number is not a power of two for recursive doubling; if
    /// there are more than 2^32 - 1 flows.
    pub fn steps(&self) -> Result<Vec<Step>, String> {
        if self.bytes == 0 {
            return Err("the collective has 0 bytes".into());
        }
        let count = self.flow_count();
        if count > u64::from(u32::MAX) {
            return Err(format!("the collective has {count} flows"));
        }
        match self.kind {
            CollectiveKind::Broadcast | CollectiveKind::Gather => self.fan(),
            _ => {
                let hosts = self.hosts();
                if hosts.len() < 2 {
                    return Err(format!("the collective has {} hosts", hosts.len()));
                }
                match self.kind {
                    CollectiveKind::RingAllReduce => Ok(self.ring(&hosts, 2 * (hosts.len() - 1))),
                    CollectiveKind::AllGather | CollectiveKind::ReduceScatter => {
                        Ok(self.ring(&hosts, hosts.len() - 1))
                    }
                    CollectiveKind::AllReduce => Ok(self.star(&hosts)),
                    CollectiveKind::TreeAllReduce => Ok(self.tree(&hosts)),
                    CollectiveKind::RecursiveDoubling => self.doubling(&hosts),
                    _ => Ok(self.all_to_all(&hosts)),
                }
            }
        }
    }

    fn fan(&self) -> Result<Vec<Step>, String> {
        if self.sources.is_empty() || self.sinks.is_empty() {
            return Err("the collective needs sources and sinks".into());
        }
        let mut steps = Vec::new();
        for &src in &self.sources {
            for &dst in self.sinks.iter().filter(|&&dst| dst != src) {
                steps.push(Step {
                    src,
                    dst,
                    bytes: self.bytes,
                    after: Vec::new(),
                });
            }
        }
        Ok(steps)
    }

    /// Size of part `i` of n nearly equal parts; at least 1 byte, so that every step is a flow.
    fn part(&self, i: u64, n: u64) -> u64 {
        (self.bytes / n + u64::from(i < self.bytes % n)).max(1)
    }

    fn ring(&self, hosts: &[Host], rounds: usize) -> Vec<Step> {
        let n = hosts.len();
        let mut steps = Vec::with_capacity(rounds * n);
        for round in 0..rounds {
            for (i, &src) in hosts.iter().enumerate() {
                // In round r, host i forwards chunk i − r, which it received from host i − 1.
                let chunk = (i + rounds * n - round) % n;
                let after = if round == 0 {
                    Vec::new()
                } else {
                    vec![to_u32((round - 1) * n + (i + n - 1) % n)]
                };
                steps.push(Step {
                    src,
                    dst: hosts[(i + 1) % n],
                    bytes: self.part(chunk as u64, n as u64),
                    after,
                });
            }
        }
        steps
    }

    fn star(&self, hosts: &[Host]) -> Vec<Step> {
        let n = hosts.len();
        let step = |src, dst, after| Step {
            src,
            dst,
            bytes: self.bytes,
            after,
        };
        let mut steps: Vec<Step> = hosts[1..]
            .iter()
            .map(|&h| step(h, hosts[0], Vec::new()))
            .collect();
        let all: Vec<u32> = (0..to_u32(n - 1)).collect();
        steps.extend(hosts[1..].iter().map(|&h| step(hosts[0], h, all.clone())));
        steps
    }

    /// Host i's parent is host (i − 1) / 2. A host sends up when the data of its children has
    /// arrived. The result goes down the same tree.
    fn tree(&self, hosts: &[Host]) -> Vec<Step> {
        let n = hosts.len();
        let children = |i: usize| [2 * i + 1, 2 * i + 2].into_iter().filter(move |&c| c < n);
        // Step i − 1 sends host i's sum up; step n − 1 + i − 1 sends the result down to it.
        let up = |i: usize| to_u32(i - 1);
        let down = |i: usize| to_u32(n - 1 + i - 1);
        let mut steps = Vec::with_capacity(2 * (n - 1));
        for i in 1..n {
            steps.push(Step {
                src: hosts[i],
                dst: hosts[(i - 1) / 2],
                bytes: self.bytes,
                after: children(i).map(up).collect(),
            });
        }
        for i in 1..n {
            let parent = (i - 1) / 2;
            let after = if parent == 0 {
                children(0).map(up).collect()
            } else {
                vec![down(parent)]
            };
            steps.push(Step {
                src: hosts[parent],
                dst: hosts[i],
                bytes: self.bytes,
                after,
            });
        }
        steps
    }

    fn doubling(&self, hosts: &[Host]) -> Result<Vec<Step>, String> {
        let n = hosts.len();
        if !n.is_power_of_two() {
            return Err(format!(
                "recursive doubling needs a power of two of hosts, not {n}"
            ));
        }
        let mut steps = Vec::new();
        for round in 0..n.trailing_zeros() as usize {
            for (i, &src) in hosts.iter().enumerate() {
                let after = if round == 0 {
                    Vec::new()
                } else {
                    let partner = i ^ (1 << (round - 1));
                    vec![to_u32((round - 1) * n + partner)]
                };
                steps.push(Step {
                    src,
                    dst: hosts[i ^ (1 << round)],
                    bytes: self.bytes,
                    after,
                });
            }
        }
        Ok(steps)
    }

    fn all_to_all(&self, hosts: &[Host]) -> Vec<Step> {
        let n = hosts.len();
        let mut steps = Vec::with_capacity(n * (n - 1));
        for (i, &src) in hosts.iter().enumerate() {
            // Destinations in random order per sender: rank r has weight (r + 1)^-skew.
            let mut order: Vec<usize> = (0..n).filter(|&j| j != i).collect();
            if self.skew > 0.0 {
                order.sort_by_key(|&j| mix::draw(self.seed, (i * n + j) as u64));
            }
            let weights: Vec<f64> = (0..order.len())
                .map(|r| libm::pow(r as f64 + 1.0, -self.skew))
                .collect();
            let sum: f64 = weights.iter().sum();
            let sent = self.bytes as f64 * (n - 1) as f64 / n as f64;
            for (&j, weight) in order.iter().zip(&weights) {
                steps.push(Step {
                    src,
                    dst: hosts[j],
                    bytes: round_u64(sent * weight / sum).max(1),
                    after: Vec::new(),
                });
            }
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(kind: CollectiveKind, hosts: u32, bytes: u64) -> Collective {
        Collective {
            kind,
            sources: (0..hosts).collect(),
            sinks: Vec::new(),
            bytes,
            compute_ns: 0,
            skew: 0.0,
            seed: 1,
        }
    }

    #[test]
    fn a_ring_of_four_has_24_flows_and_moves_each_byte_six_times_over_four() {
        let steps = collective(CollectiveKind::RingAllReduce, 4, 1002)
            .steps()
            .unwrap();
        assert_eq!(steps.len(), 24);
        // Each host sends 2(n − 1)/n of the bytes.
        let sent: u64 = steps.iter().filter(|s| s.src == 0).map(|s| s.bytes).sum();
        assert!((1503i64 - sent as i64).abs() <= 6, "{sent}");
        // Round 1 of host 1 forwards the chunk that host 0 sent in round 0.
        assert_eq!((steps[5].src, steps[5].after.clone()), (1, vec![0]));
        assert_eq!(steps[0].bytes, steps[5].bytes);
    }

    #[test]
    fn flows_are_counted_without_creating_them() {
        for kind in [
            CollectiveKind::Broadcast,
            CollectiveKind::Gather,
            CollectiveKind::AllReduce,
            CollectiveKind::RingAllReduce,
            CollectiveKind::TreeAllReduce,
            CollectiveKind::RecursiveDoubling,
            CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter,
            CollectiveKind::AllToAll,
        ] {
            // Sinks that are sources too, one of them twice.
            let some = Collective {
                sinks: vec![1, 9, 9, 10],
                ..collective(kind, 6, 1_000)
            };
            assert_eq!(
                some.flow_count(),
                some.steps().unwrap().len() as u64,
                "{kind:?}"
            );
        }
        // 2 * 99,999 * 100,000 flows are not created.
        let many = collective(CollectiveKind::RingAllReduce, 100_000, 1_000);
        assert_eq!(many.flow_count(), 19_999_800_000);
        assert!(many.steps().unwrap_err().contains("19999800000 flows"));
    }

    #[test]
    fn every_step_of_a_tiny_collective_has_a_byte() {
        for kind in [
            CollectiveKind::RingAllReduce,
            CollectiveKind::AllGather,
            CollectiveKind::AllToAll,
        ] {
            let steps = collective(kind, 8, 3).steps().unwrap();
            assert!(steps.iter().all(|s| s.bytes >= 1), "{kind:?}");
        }
    }

    #[test]
    fn trees_and_doubling_reach_every_host() {
        for n in [2, 3, 7, 8] {
            let steps = collective(CollectiveKind::TreeAllReduce, n, 10)
                .steps()
                .unwrap();
            assert_eq!(steps.len() as u32, 2 * (n - 1));
            for step in &steps {
                for &a in &step.after {
                    assert_eq!(steps[a as usize].dst, step.src, "resolved at the sender");
                }
            }
        }
        assert!(
            collective(CollectiveKind::RecursiveDoubling, 6, 10)
                .steps()
                .is_err()
        );
        let steps = collective(CollectiveKind::RecursiveDoubling, 8, 10)
            .steps()
            .unwrap();
        assert_eq!(steps.len(), 24);
        assert!(
            steps
                .iter()
                .all(|s| s.after.iter().all(|&a| steps[a as usize].dst == s.src))
        );
    }
}
