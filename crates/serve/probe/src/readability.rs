//! The share of an engine's KV events that is unreadable, and whether its view is still usable.

/// How much of a batch was understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Events of the batch.
    pub events: u64,
    /// Events that could not be read, or whose blocks could not be placed.
    pub unreadable: u64,
    /// Unreadable events that cleared the view.
    pub views_lost: u64,
}

impl Reading {
    /// A batch that could not be read.
    pub(crate) const NONE: Reading = Reading {
        events: 1,
        unreadable: 1,
        views_lost: 1,
    };
}

/// Weight of the recent events; older ones count half, a quarter and so on.
const WINDOW: u64 = 128;

/// Unreadable events before the view is abandoned, so that a single odd event costs only the blocks that it names.
const UNREADABLE_MIN: u64 = 8;

/// The view is abandoned above one unreadable event in this many, and used again at half of that share.
const UNREADABLE_SHARE: u64 = 4;

/// Number of unreadable events as which an event that clears the view counts.
const VIEW_LOST: u64 = 4;

/// Decides by the share of unreadable events whether an engine's view is followed.
#[derive(Debug, Default)]
pub(crate) struct Readability {
    events: u64,
    unreadable: u64,
    /// `unreadable`, weighted by what the events cost.
    cost: u64,
    given_up: bool,
}

impl Readability {
    /// Adds a batch. Returns whether too few events are readable for the view to be usable.
    pub(crate) fn note(&mut self, reading: Reading) -> bool {
        // One batch, such as a replay's first, must not outweigh all that follow.
        let share = |count: u64| count.saturating_mul(WINDOW) / reading.events.max(WINDOW);
        let cost = reading
            .unreadable
            .saturating_add(reading.views_lost.saturating_mul(VIEW_LOST - 1));
        self.events += share(reading.events);
        self.unreadable += share(reading.unreadable);
        self.cost += share(cost);
        if self.given_up {
            self.given_up = self.cost * 2 * UNREADABLE_SHARE > self.events;
        } else {
            self.given_up =
                self.cost >= UNREADABLE_MIN && self.cost * UNREADABLE_SHARE > self.events;
        }
        while self.events > WINDOW {
            self.events /= 2;
            self.unreadable /= 2;
            self.cost /= 2;
        }
        self.given_up
    }

    /// Numbers of recent events, and of unreadable ones among them.
    pub(crate) fn recent(&self) -> (u64, u64) {
        (self.events, self.unreadable.min(self.events))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reading(events: u64, unreadable: u64, views_lost: u64) -> Reading {
        Reading {
            events,
            unreadable,
            views_lost,
        }
    }

    #[test]
    fn a_view_is_given_up_above_a_share_and_comes_back() {
        // Many readable events, and one in ten that costs its own blocks.
        let mut some = Readability::default();
        assert!((0..1_000).all(|n| !some.note(reading(1, u64::from(n % 10 == 0), 0))));
        // None readable.
        let mut none = Readability::default();
        let given_up = (1..1_000).find(|_| none.note(reading(1, 1, 0)));
        assert_eq!(given_up, Some(UNREADABLE_MIN));
        assert!((0..10_000).all(|_| none.note(reading(1, 1, 0))));
        // All readable again.
        let back = (1..10_000).find(|_| !none.note(reading(1, 0, 0)));
        assert!(back.is_some_and(|events| events <= 8 * WINDOW), "{back:?}");
        // A view that is lost again and again is of no use, at a smaller share.
        let mut lost = Readability::default();
        assert!((0..1_000).any(|n| lost.note(reading(
            1,
            u64::from(n % 8 == 0),
            u64::from(n % 8 == 0)
        ))));
    }

    proptest! {
        /// After any past, readable events end the guessing, unreadable ones begin it.
        #[test]
        fn the_last_few_hundred_events_decide(
            batches in prop::collection::vec((0u64..2_000, 0u64..2_000, 0u64..2_000), 0..50),
        ) {
            let mut of = Readability::default();
            for (events, unreadable, lost) in batches {
                let unreadable = unreadable.min(events);
                of.note(reading(events, unreadable, lost.min(unreadable)));
            }
            let mut last = true;
            for _ in 0..16 * WINDOW {
                last = of.note(reading(1, 0, 0));
            }
            prop_assert!(!last);
            for _ in 0..16 * WINDOW {
                last = of.note(reading(1, 1, 0));
            }
            prop_assert!(last);
        }
    }
}
