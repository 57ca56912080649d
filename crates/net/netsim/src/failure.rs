//! Links and switches that fail and are repaired at given times.
//!
//! All failures are known before the run, so links carry their outages as plain data. A packet is
//! lost if its link is down at any moment between the start of its transmission and its arrival.
//! Flows move to other paths after the convergence time, and back after the repair.

use std::collections::{BTreeSet, HashMap};

use crate::error::Error;
use crate::topology::{End, Host, Node, PortId, Topology};

/// The component that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The link between two switches, in both directions.
    Link(Node, Node),
    /// A switch with all its links.
    Switch(Node),
    /// A host's link, in both directions.
    Host(Host),
}

/// A failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The component that fails.
    pub target: Target,
    /// Time of the failure, ns.
    pub at_ns: u64,
    /// Time of the repair, ns; `None`: never.
    pub repair_ns: Option<u64>,
}

impl Failure {
    fn is_down(&self, now: u64) -> bool {
        self.at_ns <= now && self.repair_ns.is_none_or(|end| now < end)
    }

    /// The ports that it stops.
    ///
    /// # Errors
    /// If the link, switch or host does not exist, or the repair is not after the failure.
    pub(crate) fn ports(&self, topology: &Topology) -> Result<Vec<PortId>, Error> {
        if self.repair_ns.is_some_and(|end| end <= self.at_ns) {
            return Err(Error::Value(format!(
                "a failure at {} ns is repaired before or at that time; give a later `repair`",
                self.at_ns
            )));
        }
        match self.target {
            Target::Link(a, b) => {
                let there = topology.port_between(a, b);
                there
                    .zip(topology.port_between(b, a))
                    .map(|(there, back)| vec![there, back])
                    .ok_or_else(|| {
                        Error::Value(format!(
                            "a failure names the link from switch {a} to switch {b}, which does not \
                             exist"
                        ))
                    })
            }
            Target::Host(host) if host < topology.host_count() => {
                Ok(vec![topology.host_up(host), topology.host_down(host)])
            }
            Target::Switch(node) if node < topology.node_count() => Ok((0..topology.port_count())
                .filter(|&p| {
                    let (from, to) = topology.port_ends(p);
                    from == End::Node(node) || to == End::Node(node)
                })
                .collect()),
            Target::Host(n) | Target::Switch(n) => Err(Error::Value(format!(
                "a failure names host or switch {n}, but there are {} hosts and {} switches",
                topology.host_count(),
                topology.node_count()
            ))),
        }
    }
}

/// Times at which routing changes, and the ports it avoids from then on.
pub(crate) fn epochs(
    failures: &[Failure],
    convergence_ns: u64,
    topology: &Topology,
) -> Result<Vec<(u64, BTreeSet<PortId>)>, Error> {
    let ports: Vec<Vec<PortId>> = failures
        .iter()
        .map(|f| f.ports(topology))
        .collect::<Result<_, _>>()?;
    let times: BTreeSet<u64> = failures
        .iter()
        .flat_map(|f| [Some(f.at_ns), f.repair_ns])
        .flatten()
        .collect();
    Ok(times
        .into_iter()
        .map(|time| {
            let down = failures.iter().zip(&ports);
            let down = down
                .filter(|(f, _)| f.is_down(time))
                .flat_map(|(_, ports)| ports)
                .copied()
                .collect();
            (time.saturating_add(convergence_ns), down)
        })
        .collect())
}

/// A link's class and its outages: from, to.
#[derive(Clone, Debug)]
pub(crate) struct Outages {
    pub(crate) class: u8,
    pub(crate) spans: Vec<(u64, u64)>,
}

/// By port, as a [`crate::step::Step`].
pub(crate) type OutageMap = HashMap<u32, Outages>;
