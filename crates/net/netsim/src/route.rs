//! Paths. The generic algorithm walks shortest paths hop by hop, and chooses among the neighbors
//! that are nearer to the destination. Fat-trees and leaf-spines compute the same paths directly.

use std::collections::{BTreeSet, HashMap, VecDeque};

use slipstream_base::mix;
use slipstream_base::width::to_u32;

use crate::topology::{Host, Node, PortId, Topology};

/// Choice of a flow's path among the shortest ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The first path in order of node numbers: all flows between two switches take the same path.
    #[default]
    ShortestPath,
    /// One path per flow and direction, by hash.
    Ecmp,
    /// Every packet chooses among up to `spray_paths` paths.
    Spray,
}

/// Finds paths, and caches the distances it had to search for.
pub(crate) struct Router<'a> {
    topology: &'a Topology,
    down: &'a BTreeSet<PortId>,
    /// Hops from every switch to a destination switch; `u32::MAX`: unreachable.
    distances: HashMap<Node, Vec<u32>>,
    /// Never use the arithmetic paths.
    generic: bool,
    host_links: bool,
}

impl<'a> Router<'a> {
    pub(crate) fn new(
        topology: &'a Topology,
        down: &'a BTreeSet<PortId>,
        host_links: bool,
    ) -> Self {
        Router {
            topology,
            down,
            distances: HashMap::new(),
            generic: !down.is_empty(),
            host_links,
        }
    }

    /// The switches from `src`'s to `dst`'s, both included; `None` if there is no path.
    pub(crate) fn nodes(
        &mut self,
        src: Host,
        dst: Host,
        pick: &mut dyn FnMut(u32) -> u32,
    ) -> Option<Vec<Node>> {
        let (from, to) = (self.topology.attachment(src), self.topology.attachment(dst));
        let mut path = vec![from];
        if !self.generic && self.topology.fast_path(from, to, pick, &mut path) {
            return Some(path);
        }
        self.distances_to(to);
        let distance = &self.distances[&to];
        let (mut at, mut near) = (from, Vec::new());
        if distance[at as usize] == u32::MAX {
            return None;
        }
        while at != to {
            self.topology.neighbors(at, &mut near);
            near.retain(|&n| distance[n as usize] < distance[at as usize] && self.is_up(at, n));
            let n = to_u32(near.len());
            at = near[if n > 1 { pick(n) } else { 0 } as usize];
            path.push(at);
        }
        Some(path)
    }

    fn is_up(&self, from: Node, to: Node) -> bool {
        self.down.is_empty()
            || self
                .topology
                .port_between(from, to)
                .is_some_and(|p| !self.down.contains(&p))
    }

    fn distances_to(&mut self, to: Node) {
        if self.distances.contains_key(&to) {
            return;
        }
        if self.distances.len() > 64 {
            // Cleared instead of evicted one by one: flows rarely come in order of destination, and
            // the bound is what matters.
            self.distances.clear();
        }
        let mut distance = vec![u32::MAX; self.topology.node_count() as usize];
        let mut near = Vec::new();
        let mut queue = VecDeque::from([to]);
        distance[to as usize] = 0;
        while let Some(at) = queue.pop_front() {
            self.topology.neighbors(at, &mut near);
            for &n in &near {
                // The link is walked backwards: from n towards `to`.
                if distance[n as usize] == u32::MAX && self.is_up(n, at) {
                    distance[n as usize] = distance[at as usize] + 1;
                    queue.push_back(n);
                }
            }
        }
        self.distances.insert(to, distance);
    }

    /// The ports along `nodes`, host links included if they are modeled. An error holds a pair of
    /// nodes without a link.
    pub(crate) fn ports(
        &self,
        src: Host,
        dst: Host,
        nodes: &[Node],
        out: &mut Vec<PortId>,
    ) -> Result<(), (Node, Node)> {
        out.clear();
        if self.host_links {
            out.push(self.topology.host_up(src));
        }
        for pair in nodes.windows(2) {
            let port = self.topology.port_between(pair[0], pair[1]);
            out.push(port.ok_or((pair[0], pair[1]))?);
        }
        if self.host_links {
            out.push(self.topology.host_down(dst));
        }
        Ok(())
    }

    /// Path number `index` of a flow whose hash is `hash`, as ports, with the number of equal paths
    /// for sprayed flows; `None` if there is no path.
    pub(crate) fn path(
        &mut self,
        src: Host,
        dst: Host,
        routing: Routing,
        hash: u64,
        index: u32,
        out: &mut Vec<PortId>,
    ) -> Option<u32> {
        let key = mix::draw(hash, u64::from(index));
        let mut choice = 0;
        let mut by_hash = |n: u32| {
            choice += 1;
            to_u32(mix::below(mix::draw(key, choice), u64::from(n)))
        };
        let mut first = |_: u32| 0;
        // Sprayed packets take the paths in turn: the digits of the index choose the hops. The
        // flow's hash rotates each digit, so that flows begin at different paths.
        let (mut paths, mut level) = (1u32, 0);
        let mut in_turn = |n: u32| {
            level += 1;
            let turn = to_u32(mix::below(mix::draw(hash, level), u64::from(n)));
            let digit = index / paths % n;
            paths = paths.saturating_mul(n);
            (digit + turn) % n
        };
        let nodes = match routing {
            Routing::ShortestPath => self.nodes(src, dst, &mut first)?,
            Routing::Ecmp => self.nodes(src, dst, &mut by_hash)?,
            Routing::Spray => self.nodes(src, dst, &mut in_turn)?,
        };
        self.ports(src, dst, &nodes, out)
            .expect("neighbors are linked");
        Some(paths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{FatTree, Graph, HostOrder, LeafSpine};

    fn check_fast_is_generic(topology: &Topology, pairs: impl Iterator<Item = (Host, Host)>) {
        let none = BTreeSet::new();
        let mut fast = Router::new(topology, &none, true);
        let mut slow = Router::new(topology, &none, true);
        slow.generic = true;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for (src, dst) in pairs {
            for (routing, hash) in [
                (Routing::ShortestPath, 0),
                (Routing::Ecmp, u64::from(src) << 20 | u64::from(dst)),
            ] {
                assert!(fast.path(src, dst, routing, hash, 0, &mut a).is_some());
                assert!(slow.path(src, dst, routing, hash, 0, &mut b).is_some());
                assert_eq!(a, b, "{src} to {dst} with {routing:?}");
            }
        }
        assert!(
            fast.distances.is_empty(),
            "the arithmetic path was not used"
        );
    }

    #[test]
    fn fat_tree_paths_are_the_generic_algorithms_paths() {
        for (k, hosts) in [(2, 1), (4, 1), (4, 2), (6, 3)] {
            let topology = Topology::FatTree(FatTree::new(k, hosts).unwrap());
            let n = topology.host_count();
            check_fast_is_generic(&topology, (0..n * n).map(|i| (i / n, i % n)));
        }
        let topology = Topology::FatTree(FatTree::new(32, 16).unwrap());
        let n = u64::from(topology.host_count());
        let sample = (0..200).map(|i| {
            (
                mix::below(mix::draw(1, i), n) as u32,
                mix::below(mix::draw(2, i), n) as u32,
            )
        });
        check_fast_is_generic(&topology, sample);
        let topology = Topology::LeafSpine(LeafSpine::new(5, 3, 2).unwrap());
        check_fast_is_generic(&topology, (0..100).map(|i| (i / 10, i % 10)));
    }

    #[test]
    fn ports_and_their_ends_agree() {
        for topology in [
            Topology::FatTree(FatTree::new(4, 3).unwrap()),
            Topology::FatTree(FatTree::new(4, 3).unwrap().numbered(HostOrder::ByOrdinal)),
            Topology::Graph(Graph::rails(16, 2, 4, 3).unwrap()),
            Topology::LeafSpine(LeafSpine::new(3, 2, 4).unwrap()),
            Topology::Graph(Graph::torus(2, 3).unwrap()),
            Topology::Graph(Graph::dragonfly(2, 3, 1, HostOrder::ByOrdinal).unwrap()),
        ] {
            use crate::topology::End;
            let mut seen = BTreeSet::new();
            let mut near = Vec::new();
            for node in 0..topology.node_count() {
                topology.neighbors(node, &mut near);
                assert!(near.is_sorted());
                for &to in &near {
                    let port = topology.port_between(node, to).unwrap();
                    assert_eq!(topology.port_ends(port), (End::Node(node), End::Node(to)));
                    assert!(topology.part_of_port(port) < topology.parts());
                    assert!(seen.insert(port));
                }
            }
            for host in 0..topology.host_count() {
                let node = End::Node(topology.attachment(host));
                let (up, down) = (topology.host_up(host), topology.host_down(host));
                assert_eq!(topology.port_ends(up), (End::Host(host), node));
                assert_eq!(topology.port_ends(down), (node, End::Host(host)));
                assert!(seen.insert(up) && seen.insert(down));
            }
            assert_eq!(seen.len() as u32, topology.port_count());
        }
    }

    #[test]
    fn a_dragonfly_joins_each_pair_of_groups_once() {
        let (a, h) = (4, 2);
        let topology = Topology::Graph(Graph::dragonfly(1, a, h, HostOrder::BySwitch).unwrap());
        let mut pairs = BTreeSet::new();
        let mut near = Vec::new();
        for node in 0..topology.node_count() {
            topology.neighbors(node, &mut near);
            assert_eq!(near.len() as u32, a - 1 + h);
            for &to in near.iter().filter(|&&to| to / a != node / a) {
                assert!(pairs.insert((node / a, to / a)));
            }
        }
        assert_eq!(pairs.len(), 9 * 8);
    }

    #[test]
    fn paths_avoid_failed_links() {
        let topology = Topology::FatTree(FatTree::new(4, 1).unwrap());
        // Edge 0 loses its link to aggregation 8, the canonical choice.
        let down = BTreeSet::from([topology.port_between(0, 8).unwrap()]);
        let mut router = Router::new(&topology, &down, false);
        let nodes = router.nodes(0, 7, &mut |_| 0).unwrap();
        assert_eq!(nodes, [0, 9, 18, 15, 7]);
        let all: BTreeSet<_> = [8, 9]
            .map(|agg| topology.port_between(0, agg).unwrap())
            .into();
        assert!(
            Router::new(&topology, &all, false)
                .nodes(0, 7, &mut |_| 0)
                .is_none()
        );
    }
}
