//! The waiting queue, in either order, with the sums that forward-pass metrics report.

use std::collections::BTreeSet;

use slipstream_config::cluster::SchedulingPolicy;

const NIL: u32 = u32::MAX;

/// Place of a sequence under priority scheduling: lower first, then the earlier arrival.
pub(crate) type Rank = (i32, u64);

/// Sequences that wait, by slot. Each operation is O(1) first come, first served, and O(log n) by
/// priority: an aborted request may sit anywhere in a queue of any length.
pub(crate) struct Waiting {
    order: Order,
    len: u32,
}

enum Order {
    /// A doubly linked list over slots.
    Fcfs {
        links: Vec<(u32, u32)>,
        first: u32,
        last: u32,
    },
    Priority(BTreeSet<(Rank, u32)>),
}

impl Waiting {
    pub(crate) fn new(policy: SchedulingPolicy) -> Waiting {
        let order = match policy {
            SchedulingPolicy::Fcfs => Order::Fcfs {
                links: Vec::new(),
                first: NIL,
                last: NIL,
            },
            SchedulingPolicy::Priority => Order::Priority(BTreeSet::new()),
        };
        Waiting { order, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The next to be admitted.
    #[inline]
    pub(crate) fn first(&self) -> Option<u32> {
        match &self.order {
            Order::Fcfs { first, .. } => (*first != NIL).then_some(*first),
            Order::Priority(set) => set.first().map(|&(_, slot)| slot),
        }
    }

    /// All, in order. For tests.
    pub(crate) fn slots(&self) -> Vec<u32> {
        match &self.order {
            Order::Fcfs { links, first, .. } => {
                let next = |&slot: &u32| {
                    let next = links[slot as usize].1;
                    (next != NIL).then_some(next)
                };
                std::iter::successors((*first != NIL).then_some(*first), next).collect()
            }
            Order::Priority(set) => set.iter().map(|&(_, slot)| slot).collect(),
        }
    }

    /// Enters a new arrival.
    pub(crate) fn push(&mut self, slot: u32, rank: Rank) {
        self.len += 1;
        match &mut self.order {
            Order::Fcfs { links, first, last } => {
                if links.len() <= slot as usize {
                    links.resize(slot as usize + 1, (NIL, NIL));
                }
                links[slot as usize] = (*last, NIL);
                if *last == NIL {
                    *first = slot;
                } else {
                    links[*last as usize].1 = slot;
                }
                *last = slot;
            }
            Order::Priority(set) => {
                set.insert((rank, slot));
            }
        }
    }

    /// Enters a preempted sequence: at the head, or by priority where it was, as in vLLM (whose
    /// priority queue knows no head to put it at).
    pub(crate) fn push_preempted(&mut self, slot: u32, rank: Rank) {
        self.len += 1;
        match &mut self.order {
            Order::Fcfs { links, first, last } => {
                links[slot as usize] = (NIL, *first);
                if *first == NIL {
                    *last = slot;
                } else {
                    links[*first as usize].0 = slot;
                }
                *first = slot;
            }
            Order::Priority(set) => {
                set.insert((rank, slot));
            }
        }
    }

    /// Takes out a sequence that is in.
    pub(crate) fn remove(&mut self, slot: u32, rank: Rank) {
        self.len -= 1;
        match &mut self.order {
            Order::Fcfs { links, first, last } => {
                let (prev, next) = links[slot as usize];
                if prev == NIL {
                    *first = next;
                } else {
                    links[prev as usize].1 = next;
                }
                if next == NIL {
                    *last = prev;
                } else {
                    links[next as usize].0 = prev;
                }
            }
            Order::Priority(set) => {
                let was_in = set.remove(&(rank, slot));
                debug_assert!(was_in);
            }
        }
    }
}

/// Count, sum and sum of squares of token counts, kept as sequences come and go. Integers, so that
/// no history of additions and removals leaves a rounding error behind.
#[derive(Clone, Copy, Default)]
pub(crate) struct RunningStats {
    pub(crate) count: u32,
    pub(crate) tokens: u64,
    squares: u128,
}

impl RunningStats {
    #[inline]
    pub(crate) fn add(&mut self, tokens: u32) {
        self.count += 1;
        self.tokens += u64::from(tokens);
        self.squares += u128::from(u64::from(tokens) * u64::from(tokens));
    }

    #[inline]
    pub(crate) fn add_all(&mut self, other: &RunningStats) {
        self.count += other.count;
        self.tokens += other.tokens;
        self.squares += other.squares;
    }

    #[inline]
    pub(crate) fn remove(&mut self, tokens: u32) {
        self.count -= 1;
        self.tokens -= u64::from(tokens);
        self.squares -= u128::from(u64::from(tokens) * u64::from(tokens));
    }

    /// As it is once each count has grown by `more`.
    pub(crate) fn grown(&self, more: u32) -> RunningStats {
        let (n, more) = (u64::from(self.count), u64::from(more));
        RunningStats {
            count: self.count,
            tokens: self.tokens + n * more,
            squares: self.squares
                + 2 * u128::from(more) * u128::from(self.tokens)
                + u128::from(n) * u128::from(more * more),
        }
    }

    /// Population variance.
    pub(crate) fn variance(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        let (n, sum) = (u128::from(self.count), u128::from(self.tokens));
        (n * self.squares - sum * sum) as f64 / (n * n) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(waiting: &mut Waiting, ranks: &[Rank]) -> Vec<u32> {
        let mut order = Vec::new();
        while let Some(slot) = waiting.first() {
            waiting.remove(slot, ranks[slot as usize]);
            order.push(slot);
        }
        order
    }

    #[test]
    fn preempted_sequences_go_to_the_head_or_to_their_rank() {
        let ranks = [(1, 0), (0, 1), (0, 2), (1, 3)];
        for (policy, expected) in [
            (SchedulingPolicy::Fcfs, [3, 0, 2]),
            (SchedulingPolicy::Priority, [2, 0, 3]),
        ] {
            let mut waiting = Waiting::new(policy);
            for slot in 0..3 {
                waiting.push(slot, ranks[slot as usize]);
            }
            waiting.push(3, ranks[3]);
            waiting.remove(3, ranks[3]);
            waiting.push_preempted(3, ranks[3]);
            waiting.remove(1, ranks[1]); // from the middle
            assert_eq!(waiting.len(), 3);
            assert_eq!(drain(&mut waiting, &ranks), expected);
        }
    }

    #[test]
    fn variance_is_that_of_the_population() {
        let mut sums = RunningStats::default();
        for n in [2, 4, 4, 4, 5, 5, 7, 9, 1000] {
            sums.add(n);
        }
        sums.remove(1000);
        assert_eq!((sums.count, sums.tokens, sums.variance()), (8, 40, 4.0));
    }
}
