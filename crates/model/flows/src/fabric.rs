//! Endpoints under leaf switches under one spine, with flows between them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use slipstream_base::SimTime;
use slipstream_base::width::to_u32;

use crate::share::{LinkId, Sharing};
use crate::{Endpoint, Network, TransferId};

/// Parameters of a [`Fabric`].
#[derive(Clone, Debug, PartialEq)]
pub struct FabricConfig {
    /// Rate of each endpoint's interface in each direction, bits/s. Shape `[endpoints]`.
    pub endpoint_bits_per_s: Vec<f64>,
    /// The leaf switch of each endpoint. Shape `[endpoints]`.
    pub leaf: Vec<u32>,
    /// Total rate of a leaf's links to the spine, in each direction, bits/s; `None`: no limit.
    pub uplink_bits_per_s: Option<f64>,
    /// Latency of each link, ns. Two links join endpoints of one leaf, four between others.
    pub hop_latency_ns: u64,
}

/// A two-level tree whose links are shared fairly.
///
/// ```text
///        ┌────────┴────────┐        uplinks: one capacity per leaf and direction
///        ┌────────┴────────┐        uplinks: one capacity a leaf and direction
///      leaf 0            leaf 1
///    ┌───┴───┐         ┌───┴───┐    interfaces: one capacity per endpoint and direction
///   ep 0    ep 1      ep 2    ep 3
/// ```
pub struct Fabric {
    config: FabricConfig,
    sharing: Sharing,
    /// Links of endpoint `e`: out `2e`, in `2e + 1`. After them those of leaves, likewise.
    leaf_links: u32,
    transfers: BTreeMap<TransferId, Transfer>,
    /// Messages that have been sent completely, and not yet arrived.
    arrivals: BinaryHeap<Reverse<(SimTime, TransferId)>>,
    next: u64,
}

#[derive(Clone, Copy)]
struct Transfer {
    /// Its flow, while it is being sent.
    flow: Option<u32>,
    latency_ns: u64,
}

impl Fabric {
    /// A fabric without transfers.
    ///
    /// # Panics
    /// If the shapes of `config` disagree.
    pub fn new(config: FabricConfig) -> Fabric {
        let endpoints = config.endpoint_bits_per_s.len();
        assert_eq!(endpoints, config.leaf.len(), "a leaf for each endpoint");
        let mut sharing = Sharing::default();
        for &rate in &config.endpoint_bits_per_s {
            sharing.add_link(rate);
            sharing.add_link(rate);
        }
        if let Some(rate) = config.uplink_bits_per_s {
            for _ in 0..2 * config.leaf.iter().max().map_or(0, |leaf| leaf + 1) {
                sharing.add_link(rate);
            }
        }
        Fabric {
            leaf_links: 2 * to_u32(endpoints),
            config,
            sharing,
            transfers: BTreeMap::new(),
            arrivals: BinaryHeap::new(),
            next: 0,
        }
    }

    /// The links from one endpoint to another, and their total number: without a limit on
    /// uplinks those are crossed, but not counted.
    fn path(&self, from: Endpoint, to: Endpoint) -> ([LinkId; 4], usize) {
        let (up, down) = (2 * from.0, 2 * to.0 + 1);
        let leaf = |e: Endpoint| self.config.leaf[e.0 as usize];
        if leaf(from) == leaf(to) || self.config.uplink_bits_per_s.is_none() {
            return ([up, down, 0, 0], 2);
        }
        let out = self.leaf_links + 2 * leaf(from);
        let into = self.leaf_links + 2 * leaf(to) + 1;
        ([up, out, into, down], 4)
    }

    /// Forwards messages that have left their leaf completely by `now`.
    fn run(&mut self, now: SimTime) {
        while let Some((end, slot, name)) = self.sharing.next_end()
            && end <= now
        {
            self.sharing.remove(end, slot);
            let id = TransferId(name);
            let transfer = self.transfers.get_mut(&id).expect("it is under way");
            transfer.flow = None;
            self.arrivals.push(Reverse((end + transfer.latency_ns, id)));
        }
    }
}

impl Network for Fabric {
    fn send(&mut self, now: SimTime, from: Endpoint, to: Endpoint, bytes: u64) -> TransferId {
        self.run(now);
        let id = TransferId(self.next);
        self.next += 1;
        let latency_ns = self.latency_ns(from, to);
        let flow = if from == to || bytes == 0 {
            self.arrivals.push(Reverse((now + latency_ns, id)));
            None
        } else {
            let (path, hops) = self.path(from, to);
            let bits = bytes as f64 * 8.0;
            Some(self.sharing.begin(now, id.0, &path[..hops], bits))
        };
        self.transfers.insert(id, Transfer { flow, latency_ns });
        id
    }

    fn cancel(&mut self, now: SimTime, transfer: TransferId) -> bool {
        self.run(now);
        let Some(Transfer { flow, .. }) = self.transfers.remove(&transfer) else {
            return false;
        };
        if let Some(slot) = flow {
            self.sharing.remove(now, slot);
        }
        true
    }

    fn set_share(&mut self, now: SimTime, endpoint: Endpoint, share: f64) {
        self.run(now);
        let rate = self.config.endpoint_bits_per_s[endpoint.0 as usize] * share;
        self.sharing.set_rate(now, 2 * endpoint.0, rate);
        self.sharing.set_rate(now, 2 * endpoint.0 + 1, rate);
    }

    fn set_uplink_share(&mut self, now: SimTime, leaf: u32, share: f64) {
        let Some(rate) = self.config.uplink_bits_per_s else {
            return;
        };
        self.run(now);
        let link = self.leaf_links + 2 * leaf;
        self.sharing.set_rate(now, link, rate * share);
        self.sharing.set_rate(now, link + 1, rate * share);
    }

    fn next_time(&mut self) -> Option<SimTime> {
        while let Some(Reverse((_, id))) = self.arrivals.peek()
            && !self.transfers.contains_key(id)
        {
            self.arrivals.pop(); // it was cancelled
        }
        let end = self.sharing.next_end().map(|(end, ..)| end);
        let arrival = self.arrivals.peek().map(|Reverse((at, _))| *at);
        end.into_iter().chain(arrival).min()
    }

    fn advance(&mut self, now: SimTime, out: &mut Vec<TransferId>) {
        self.run(now);
        while let Some(&Reverse((at, id))) = self.arrivals.peek()
            && at <= now
        {
            self.arrivals.pop();
            if self.transfers.remove(&id).is_some() {
                out.push(id);
            }
        }
    }

    fn latency_ns(&self, from: Endpoint, to: Endpoint) -> u64 {
        let leaf = |e: Endpoint| self.config.leaf[e.0 as usize];
        let links = match (from == to, leaf(from) == leaf(to)) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => 4,
        };
        links * self.config.hop_latency_ns
    }

    fn under_way(&self) -> usize {
        self.transfers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two leaves of two endpoints at 8 Gbit/s (1 byte/ns), 100 ns per link.
    fn fabric(uplink_bits_per_s: Option<f64>) -> Fabric {
        Fabric::new(FabricConfig {
            endpoint_bits_per_s: vec![8e9; 4],
            leaf: vec![0, 0, 1, 1],
            uplink_bits_per_s,
            hop_latency_ns: 100,
        })
    }

    /// Arrivals until no transfer is left.
    fn arrivals(fabric: &mut Fabric) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        let mut out = Vec::new();
        while let Some(at) = fabric.next_time() {
            fabric.advance(at, &mut out);
            all.extend(out.drain(..).map(|id| (at.0, id.0)));
        }
        assert_eq!(fabric.under_way(), 0);
        all
    }

    fn send(fabric: &mut Fabric, at: u64, from: u32, to: u32, bytes: u64) -> TransferId {
        fabric.send(SimTime(at), Endpoint(from), Endpoint(to), bytes)
    }

    #[test]
    fn a_lone_transfer_takes_its_bytes_and_its_links() {
        for (from, to, bytes, expected) in [
            (0, 1, 1_000, 1_200),
            (0, 2, 1_000, 1_400),
            (0, 1, 0, 200),
            (3, 3, 1_000, 0),
        ] {
            let mut fabric = fabric(None);
            send(&mut fabric, 0, from, to, bytes);
            assert_eq!(arrivals(&mut fabric), [(expected, 0)]);
        }
    }

    #[test]
    fn directions_are_apart_and_interfaces_are_shared() {
        let mut f = fabric(None);
        send(&mut f, 0, 0, 1, 1_000);
        send(&mut f, 0, 1, 0, 1_000);
        assert_eq!(arrivals(&mut f), [(1_200, 0), (1_200, 1)]);
        // Two into one: half each, until the shorter one ends at 1,000; then the last 1,000 bytes of the
        // longer one go at the full rate.
        let mut f = fabric(None);
        send(&mut f, 0, 0, 1, 500);
        send(&mut f, 0, 2, 1, 1_500);
        assert_eq!(arrivals(&mut f), [(1_200, 0), (2_400, 1)]);
    }

    #[test]
    fn a_narrow_uplink_holds_up_those_who_cross_it() {
        let mut f = fabric(Some(8e9));
        send(&mut f, 0, 0, 2, 1_000);
        send(&mut f, 0, 1, 3, 1_000);
        assert_eq!(arrivals(&mut f), [(2_400, 0), (2_400, 1)]);
        // Within a leaf there is no uplink, and the remaining rate of an interface is used.
        let mut f = fabric(Some(4e9));
        send(&mut f, 0, 0, 2, 1_000); // 0.5 bytes/ns
        send(&mut f, 0, 0, 1, 500); // the other half
        assert_eq!(arrivals(&mut f), [(1_200, 1), (2_400, 0)]);
    }

    #[test]
    fn what_is_cancelled_never_arrives_and_leaves_its_share() {
        let mut f = fabric(None);
        let lost = send(&mut f, 0, 0, 1, 1_000);
        send(&mut f, 0, 2, 1, 1_000);
        assert!(f.cancel(SimTime(1_000), lost));
        assert!(!f.cancel(SimTime(1_000), lost), "once");
        assert_eq!(arrivals(&mut f), [(1_900, 1)]);
        // Also when it is sent, and on its last links.
        let on_the_way = send(&mut f, 2_000, 0, 1, 1_000);
        f.advance(SimTime(3_050), &mut Vec::new());
        assert!(f.cancel(SimTime(3_050), on_the_way));
        assert_eq!(f.next_time(), None);
    }

    #[test]
    fn an_uplink_that_is_down_holds_transfers_between_leaves() {
        let mut f = fabric(Some(8e9));
        send(&mut f, 0, 0, 2, 1_000);
        send(&mut f, 0, 0, 1, 1_000);
        f.set_uplink_share(SimTime(500), 1, 0.0);
        f.set_uplink_share(SimTime(2_000), 1, 0.5);
        // 250 bytes each, then the other alone; 750 bytes at half the rate.
        assert_eq!(arrivals(&mut f), [(1_450, 1), (3_900, 0)]);
    }

    #[test]
    fn a_link_that_is_down_holds_what_it_has() {
        let mut f = fabric(None);
        send(&mut f, 0, 0, 1, 1_000);
        f.set_share(SimTime(400), Endpoint(1), 0.0);
        assert_eq!(f.next_time(), None);
        assert_eq!(f.under_way(), 1);
        f.set_share(SimTime(10_000), Endpoint(1), 0.5);
        assert_eq!(arrivals(&mut f), [(11_400, 0)]);
    }
}
