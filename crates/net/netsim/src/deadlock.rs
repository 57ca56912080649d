//! PFC deadlock: paused links that wait for each other in a cycle, so that none can resume.
//!
//! A paused link resumes when packets that came over it leave the switch. If all of them wait in
//! queues that are paused too, in a cycle, the pauses never end. The search is by elimination: an
//! ingress is live if one of its packets waits in a queue that may send, or in one that a live
//! ingress pauses. The rest is deadlocked.

use std::collections::HashMap;

use slipstream_base::width::{to_u8, to_u32};

use crate::net::Net;
use crate::queueing::{NO_INGRESS, PFC_CLASSES};
use crate::shard::Shard;
use crate::step::Step;
use crate::topology::PortId;

/// Links that wait for each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// When it was detected, ns; it began earlier.
    pub seen_ns: u64,
    /// The cycle: each port is paused because the packets it sent wait at the next one. The class
    /// is the port's.
    pub cycle: Vec<(PortId, u8)>,
}

/// A paused ingress: shard, index, class.
type Key = (usize, u32, u8);

/// Paused ingresses, by the step and class of the port that they pause.
type Paused = HashMap<(u32, u8), Key>;

/// Searches for a deadlock, in time proportional to the packets waiting in paused switches.
pub(crate) fn find(shards: &[Shard], net: &Net, now: u64) -> Option<Deadlock> {
    let paused = find_paused(shards);
    if paused.is_empty() {
        return None;
    }
    let waits = find_waits(shards, net, &paused);
    let mut dead: Vec<Key> = paused.values().copied().collect();
    dead.sort_unstable();
    loop {
        let before = dead.len();
        let still: Vec<Key> = dead
            .iter()
            .copied()
            .filter(|key| {
                // No packet waits here: the revocation of the pause is in flight.
                let Some(list) = waits.get(key) else {
                    return false;
                };
                list.iter()
                    .all(|by| by.is_some_and(|by| dead.binary_search(&by).is_ok()))
            })
            .collect();
        dead = still;
        if dead.len() == before {
            break;
        }
    }
    let mut at = *dead.first()?;
    let mut walk = vec![at];
    let start = loop {
        let next = waits[&at]
            .iter()
            .flatten()
            .min()
            .expect("a deadlocked ingress waits for another");
        at = *next;
        if let Some(start) = walk.iter().position(|k| *k == at) {
            break start;
        }
        walk.push(at);
    };
    let cycle = walk[start..]
        .iter()
        .map(|&(s, i, class)| {
            let upstream = shards[s].fabric.ingresses[i as usize].upstream;
            let ids = &shards[upstream.shard()].fabric.scheduled_ids;
            (ids[upstream.index()], class)
        })
        .collect();
    Some(Deadlock {
        seen_ns: now,
        cycle,
    })
}

/// Paused ingresses, by the port that they pause.
fn find_paused(shards: &[Shard]) -> Paused {
    let mut paused = HashMap::new();
    for (s, shard) in shards.iter().enumerate() {
        for (i, ingress) in shard.fabric.ingresses.iter().enumerate() {
            for class in (0..to_u8(PFC_CLASSES)).filter(|c| ingress.off >> c & 1 == 1) {
                paused.insert((ingress.upstream.0, class), (s, to_u32(i), class));
            }
        }
    }
    paused
}

/// For each paused ingress, the ingresses that pause the queues where its packets wait, if any.
fn find_waits(shards: &[Shard], net: &Net, paused: &Paused) -> HashMap<Key, Vec<Option<Key>>> {
    let mut waits: HashMap<Key, Vec<Option<Key>>> = HashMap::new();
    for (s, shard) in shards.iter().enumerate() {
        for (index, port) in shard.fabric.scheduled.iter().enumerate() {
            let step = Step::new(to_u32(s), crate::step::Place::Scheduled, index);
            for (class, at) in port.waiting_rows() {
                let ingress = net.ingress_at(at as usize);
                if ingress == NO_INGRESS || class >= PFC_CLASSES {
                    continue;
                }
                let class = to_u8(class);
                let stopped_by = paused.get(&(step.0, class)).copied();
                let list = waits.entry((s, ingress, class)).or_default();
                if !list.contains(&stopped_by) {
                    list.push(stopped_by);
                }
            }
        }
    }
    waits
}
