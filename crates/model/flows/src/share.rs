//! Flows on links, and their max-min fair rates.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slipstream_base::SimTime;
use slipstream_base::width::{floor_u64, to_u8, to_u32};

/// Index of a link.
pub(super) type LinkId = u32;

/// Maximum links of a path: up, leaf to spine, spine to leaf, down.
pub(super) const PATH_MAX: usize = 4;

struct Link {
    bits_per_s: f64,
    /// Slots of the flows that cross it.
    flows: Vec<u32>,
    /// Scratch: unassigned rate, and flows without a rate; meaningful while `round` is
    /// the current one.
    left: f64,
    open: u32,
    round: u64,
}

#[derive(Clone, Copy)]
struct Flow {
    path: [LinkId; PATH_MAX],
    hops: u8,
    /// Bits not yet sent at `since`.
    left: f64,
    rate: f64,
    since: SimTime,
    /// Incremented when its end moves, so that an outdated end is recognized.
    version: u32,
    name: u64,
    live: bool,
    /// Scratch: rate found in this round.
    found: f64,
    round: u64,
    fixed: bool,
}

/// Flows by slot.
#[derive(Default)]
pub(super) struct Sharing {
    links: Vec<Link>,
    flows: Vec<Flow>,
    free: Vec<u32>,
    ends: BinaryHeap<Reverse<(SimTime, u64, u32, u32)>>,
    round: u64,
    // Scratch: the links and flows that a change can reach.
    reached_links: Vec<LinkId>,
    reached_flows: Vec<u32>,
}

impl Sharing {
    pub(super) fn add_link(&mut self, bits_per_s: f64) -> LinkId {
        self.links.push(Link {
            bits_per_s,
            flows: Vec::new(),
            left: 0.0,
            open: 0,
            round: 0,
        });
        to_u32(self.links.len()) - 1
    }

    /// Starts a flow named `name` of `bits` over `path`; returns its slot.
    pub(super) fn begin(&mut self, now: SimTime, name: u64, path: &[LinkId], bits: f64) -> u32 {
        let mut flow = Flow {
            path: [0; PATH_MAX],
            hops: to_u8(path.len()),
            left: bits,
            rate: 0.0,
            since: now,
            version: 0,
            name,
            live: true,
            found: 0.0,
            round: 0,
            fixed: false,
        };
        flow.path[..path.len()].copy_from_slice(path);
        let slot = if let Some(slot) = self.free.pop() {
            flow.version = self.flows[slot as usize].version + 1;
            self.flows[slot as usize] = flow;
            slot
        } else {
            self.flows.push(flow);
            to_u32(self.flows.len()) - 1
        };
        for &link in path {
            self.links[link as usize].flows.push(slot);
        }
        self.share(now, path);
        slot
    }

    /// Removes a flow from its links.
    pub(super) fn remove(&mut self, now: SimTime, slot: u32) {
        let flow = self.flows[slot as usize];
        let path = &flow.path[..flow.hops as usize];
        for &link in path {
            let flows = &mut self.links[link as usize].flows;
            let at = flows.iter().position(|&f| f == slot);
            flows.swap_remove(at.expect("a flow is on its links"));
        }
        self.flows[slot as usize].live = false;
        self.flows[slot as usize].version += 1;
        self.free.push(slot);
        self.share(now, path);
    }

    pub(super) fn set_rate(&mut self, now: SimTime, link: LinkId, bits_per_s: f64) {
        self.links[link as usize].bits_per_s = bits_per_s;
        self.share(now, &[link]);
    }

    /// The next flow to end, by its slot and name.
    pub(super) fn next_end(&mut self) -> Option<(SimTime, u32, u64)> {
        loop {
            let &Reverse((end, name, slot, version)) = self.ends.peek()?;
            let flow = &self.flows[slot as usize];
            if flow.live && flow.version == version {
                return Some((end, slot, name));
            }
            self.ends.pop();
        }
    }

    /// Rates changed on `links`: finds all affected links and flows, and shares the links again.
    fn share(&mut self, now: SimTime, links: &[LinkId]) {
        self.round += 1;
        self.reached_links.clear();
        self.reached_flows.clear();
        for &link in links {
            self.reach(link);
        }
        let mut at = 0;
        while at < self.reached_links.len() {
            let link = self.reached_links[at] as usize;
            for i in 0..self.links[link].flows.len() {
                let slot = self.links[link].flows[i];
                let flow = &mut self.flows[slot as usize];
                if flow.round == self.round {
                    continue;
                }
                (flow.round, flow.fixed) = (self.round, false);
                self.reached_flows.push(slot);
                let (path, hops) = (flow.path, flow.hops as usize);
                for &link in &path[..hops] {
                    self.reach(link);
                }
            }
            at += 1;
        }
        self.fill();
        self.settle(now);
    }

    fn reach(&mut self, link: LinkId) {
        let l = &mut self.links[link as usize];
        if l.round != self.round {
            l.round = self.round;
            l.left = l.bits_per_s;
            l.open = to_u32(l.flows.len());
            self.reached_links.push(link);
        }
    }

    /// Progressive filling: the link with the least remaining rate per flow assigns it to its flows;
    /// repeated with the remaining flows.
    fn fill(&mut self) {
        let mut left = self.reached_flows.len();
        while left > 0 {
            let mut least: Option<(f64, LinkId)> = None;
            for &link in &self.reached_links {
                let l = &self.links[link as usize];
                if l.open > 0 {
                    let each = l.left / f64::from(l.open);
                    if least.is_none_or(|(than, _)| each < than) {
                        least = Some((each, link));
                    }
                }
            }
            let (each, link) = least.expect("a flow without a rate crosses a link");
            for i in 0..self.links[link as usize].flows.len() {
                let slot = self.links[link as usize].flows[i] as usize;
                let flow = &mut self.flows[slot];
                if flow.fixed {
                    continue;
                }
                (flow.fixed, flow.found) = (true, each);
                left -= 1;
                for &link in &flow.path[..flow.hops as usize] {
                    let l = &mut self.links[link as usize];
                    l.left = (l.left - each).max(0.0);
                    l.open -= 1;
                }
            }
        }
    }

    /// Assigns the new rates to the affected flows.
    fn settle(&mut self, now: SimTime) {
        for &slot in &self.reached_flows {
            let flow = &mut self.flows[slot as usize];
            let fresh = flow.rate == 0.0 && flow.since == now;
            if flow.found == flow.rate && !fresh {
                continue;
            }
            flow.left = (flow.left - flow.rate * (now.since(flow.since) as f64 / 1e9)).max(0.0);
            (flow.rate, flow.since) = (flow.found, now);
            flow.version += 1;
            let ns = flow.left / flow.rate * 1e9;
            // Beyond 2^62 ns, a century, or at rate 0, the flow does not end until its rate changes.
            if flow.left == 0.0 || ns < 4.6e18 {
                let ns = if flow.left == 0.0 {
                    0
                } else {
                    floor_u64(ns.ceil())
                };
                let end = (now + ns, flow.name, slot, flow.version);
                self.ends.push(Reverse(end));
            }
        }
    }

    /// Rate of a flow, bits/s.
    #[cfg(test)]
    pub(super) fn rate(&self, slot: u32) -> f64 {
        self.flows[slot as usize].rate
    }

    #[cfg(test)]
    pub(super) fn flows_of(&self, link: LinkId) -> &[u32] {
        &self.links[link as usize].flows
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn links(rates: &[f64]) -> Sharing {
        let mut sharing = Sharing::default();
        for &rate in rates {
            sharing.add_link(rate);
        }
        sharing
    }

    /// Capacities, paths, rates calculated by hand.
    #[track_caller]
    fn check_rates(capacities: &[f64], paths: &[&[LinkId]], expected: &[f64]) {
        let mut sharing = links(capacities);
        let slots: Vec<u32> = (0u64..)
            .zip(paths)
            .map(|(name, path)| sharing.begin(SimTime(0), name, path, 1e9))
            .collect();
        for (i, (&slot, &rate)) in slots.iter().zip(expected).enumerate() {
            let got = sharing.rate(slot);
            assert!(
                (got - rate).abs() < 1e-9 * rate.max(1.0),
                "flow {i}: {got} for {rate}"
            );
        }
    }

    #[test]
    fn shares_worked_out_by_hand() {
        check_rates(&[10.0], &[&[0]], &[10.0]);
        check_rates(&[10.0], &[&[0], &[0], &[0], &[0]], &[2.5; 4]);
        // The parking lot: a long flow over three links with one short flow on each.
        check_rates(
            &[10.0, 10.0, 10.0],
            &[&[0, 1, 2], &[0], &[1], &[2]],
            &[5.0; 4],
        );
        // The narrow link holds two to 1 each; the wide one's third flow gets the remaining rate.
        check_rates(&[10.0, 2.0], &[&[0, 1], &[0, 1], &[0]], &[1.0, 1.0, 8.0]);
        // Two links of three flows each, and a wide one that gives the rest to its last flow.
        check_rates(
            &[1.0, 1.0, 2.0],
            &[&[0], &[0, 1], &[0, 1], &[1, 2], &[2]],
            &[1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 5.0 / 3.0],
        );
    }

    #[test]
    fn ends_move_when_others_come_and_go() {
        let mut sharing = links(&[1e9]);
        // 1 Gbit alone takes 1 s; another comes at half of that.
        let first = sharing.begin(SimTime(0), 1, &[0], 1e9);
        assert_eq!(sharing.next_end(), Some((SimTime(1_000_000_000), first, 1)));
        let second = sharing.begin(SimTime(500_000_000), 2, &[0], 1e9);
        assert_eq!(sharing.next_end(), Some((SimTime(1_500_000_000), first, 1)));
        sharing.remove(SimTime(1_500_000_000), first);
        // The second has sent half at half the rate; the rest is sent at the full rate.
        assert_eq!(
            sharing.next_end(),
            Some((SimTime(2_000_000_000), second, 2))
        );
        sharing.set_rate(SimTime(1_750_000_000), 0, 0.0);
        assert_eq!(sharing.next_end(), None, "it stands still");
        sharing.set_rate(SimTime(9_000_000_000), 0, 1e9);
        assert_eq!(
            sharing.next_end(),
            Some((SimTime(9_250_000_000), second, 2))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// After any changes: no link exceeds its capacity, and each flow has a bottleneck, a
        /// full link on which no flow has more. The rates depend on the last state alone.
        #[test]
        fn rates_are_max_min_fair_after_any_changes(
            capacities in prop::collection::vec(1u32..100, 2..7),
            ops in prop::collection::vec(
                (0u8..4, prop::collection::btree_set(0u32..7, 1..4), any::<prop::sample::Index>(), 0u32..100),
                1..40,
            ),
        ) {
            let mut capacities: Vec<f64> = capacities.into_iter().map(f64::from).collect();
            let mut sharing = links(&capacities);
            let mut live: Vec<(u32, Vec<LinkId>)> = Vec::new();
            for (n, (op, path, which, rate)) in (0u64..).zip(ops) {
                let now = SimTime(n * 10);
                match op {
                    0 | 1 => {
                        let path: Vec<LinkId> = path.into_iter().filter(|&l| (l as usize) < capacities.len()).collect();
                        if !path.is_empty() {
                            let slot = sharing.begin(now, n, &path, 1e12);
                            live.push((slot, path));
                        }
                    }
                    2 if !live.is_empty() => {
                        let (slot, _) = live.swap_remove(which.index(live.len()));
                        sharing.remove(now, slot);
                    }
                    _ => {
                        let link = which.index(capacities.len());
                        capacities[link] = f64::from(rate);
                        sharing.set_rate(now, link as u32, f64::from(rate));
                    }
                }
                for (link, &capacity) in capacities.iter().enumerate() {
                    let sum: f64 = sharing.flows_of(link as u32).iter().map(|&f| sharing.rate(f)).sum();
                    prop_assert!(sum <= capacity * (1.0 + 1e-9) + 1e-9, "link {} carries {} of {}", link, sum, capacity);
                }
                for (slot, path) in &live {
                    let rate = sharing.rate(*slot);
                    let has_bottleneck = path.iter().any(|&link| {
                        let on = sharing.flows_of(link);
                        let sum: f64 = on.iter().map(|&f| sharing.rate(f)).sum();
                        let full = sum >= capacities[link as usize] * (1.0 - 1e-9) - 1e-9;
                        full && on.iter().all(|&f| sharing.rate(f) <= rate * (1.0 + 1e-9) + 1e-9)
                    });
                    prop_assert!(has_bottleneck);
                }
                let mut afresh = links(&capacities);
                let again: Vec<u32> = live.iter().map(|(_, path)| afresh.begin(now, 0, path, 1e12)).collect();
                for ((slot, _), again) in live.iter().zip(again) {
                    let (a, b) = (sharing.rate(*slot), afresh.rate(again));
                    prop_assert!((a - b).abs() <= 1e-9 * a.max(1.0), "{} for {}", a, b);
                }
            }
        }
    }
}
