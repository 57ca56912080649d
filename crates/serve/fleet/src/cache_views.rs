//! Whether a router follows an engine's cache by KV events, or guesses it from the requests that it sent there.
//!
//! It is followed if the view of every rank is usable ([`ViewState`]), and events named the blocks of the prompts that the
//! engine answered. The second finds what the events themselves do not show: those that stop, come from another process,
//! or are understood but are not of these prompts. While it is guessed, events are applied, so that the index is complete
//! once the view is usable again.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use slipstream_base::sync::lock;
use slipstream_frontend::upstream::Member;
use slipstream_probe::{KvCounters, ViewState};
use slipstream_router::{Fleets, Testimony};

/// Answered prompts from which on they count.
const PROMPTS_MIN: u32 = 8;

/// Weight of the recent prompts; older ones count half, a quarter and so on.
const WINDOW: u32 = 32;

/// The recent prompts of an engine whose blocks its KV events named, or did not.
#[derive(Debug, Default)]
struct Agreement {
    found: u32,
    missing: u32,
    /// Whether more than half were missing, and not yet fewer than a quarter since.
    is_lost: bool,
}

impl Agreement {
    fn note(&mut self, more: Testimony) {
        self.found += more.found;
        self.missing += more.missing;
        let all = self.found + self.missing;
        if all >= PROMPTS_MIN {
            let share = if self.is_lost { 4 } else { 2 };
            self.is_lost = self.missing * share > all;
        }
        while self.found + self.missing > WINDOW {
            self.found /= 2;
            self.missing /= 2;
        }
    }
}

/// Why an engine's cache is guessed.
#[derive(Debug, PartialEq, Eq)]
enum Guessed {
    /// No event has named a block yet.
    NotYet,
    /// A fault, as a predicate of the engine.
    For(String),
}

/// The views of an engine's ranks.
#[derive(Debug)]
struct Standing {
    ranks: Vec<ViewState>,
    /// Since the last change of a rank's state.
    agreement: Agreement,
    /// Whether a fault was logged, and not yet its end.
    warned: bool,
}

impl Standing {
    /// Counts what the engine answered, unless its events are known to be missing or late.
    fn note(&mut self, more: Testimony) {
        let is_early =
            |state: &ViewState| matches!(state, ViewState::Unproven | ViewState::Followed);
        if self.ranks.iter().all(is_early) {
            self.agreement.note(more);
        }
    }

    fn guessed(&self) -> Option<Guessed> {
        let useless = self.ranks.iter().find_map(|state| match state {
            ViewState::Useless(why) => Some(Guessed::For(why.clone())),
            _ => None,
        });
        if useless.is_some() {
            return useless;
        }
        if self.agreement.is_lost {
            let Agreement { found, missing, .. } = self.agreement;
            return Some(Guessed::For(format!(
                "answered {} prompts of late, and its KV events named the blocks of {found}",
                found + missing
            )));
        }
        let is_unproven = self.ranks.contains(&ViewState::Unproven);
        is_unproven.then_some(Guessed::NotYet)
    }

    fn is_late(&self) -> bool {
        self.ranks.contains(&ViewState::Late)
    }

    /// As `/admin/engines` and `/ui` show it.
    fn shown(&self) -> String {
        match self.guessed() {
            Some(Guessed::For(why)) => format!("guessed: it {why}"),
            Some(Guessed::NotYet) => "guessed: its KV events have named no block yet".into(),
            None if self.is_late() => {
                "KV events, late: they take longer to read than one engine's may".into()
            }
            None if self.ranks.len() > 1 => format!("KV events of {} ranks", self.ranks.len()),
            None => "KV events".into(),
        }
    }
}

/// The views of one engine, as long as its events are received.
pub(crate) struct CacheViews {
    fleets: Fleets,
    member: Member,
    counters: Vec<Arc<KvCounters>>,
    standing: Mutex<Standing>,
}

impl CacheViews {
    /// `counters`: of each rank.
    pub(crate) fn new(
        fleets: Fleets,
        member: Member,
        counters: Vec<Arc<KvCounters>>,
    ) -> Arc<CacheViews> {
        let views = CacheViews {
            fleets,
            member,
            standing: Mutex::new(Standing {
                ranks: vec![ViewState::Unproven; counters.len()],
                agreement: Agreement::default(),
                warned: false,
            }),
            counters,
        };
        views.apply(&lock(&views.standing));
        Arc::new(views)
    }

    /// The view of a rank has another state.
    pub(crate) fn update(&self, rank: usize, state: &ViewState) {
        self.change(|standing| {
            standing.ranks[rank] = state.clone();
            // What was answered under another state says nothing of this one.
            standing.agreement = Agreement::default();
        });
    }

    /// What the engine answered in an interval.
    pub(crate) fn check(&self, more: Testimony) {
        if more != Testimony::default() {
            self.change(|standing| standing.note(more));
        }
    }

    fn change(&self, change: impl FnOnce(&mut Standing)) {
        let mut standing = lock(&self.standing);
        let was_late = standing.is_late();
        change(&mut standing);
        let engine = &self.member.spec().url;
        match standing.guessed() {
            Some(Guessed::For(why)) if !standing.warned => {
                standing.warned = true;
                tracing::warn!(
                    %engine,
                    "its cache is guessed from the requests sent there, not followed by KV events, until they are usable: it {why}"
                );
            }
            None if standing.warned => {
                standing.warned = false;
                tracing::warn!(
                    %engine,
                    "its KV events are usable again: its cache is followed by them"
                );
            }
            None if !was_late && standing.is_late() => tracing::warn!(
                %engine,
                "its KV events take longer to read than one engine's may, so its cache is known late"
            ),
            _ => {}
        }
        self.apply(&standing);
    }

    fn apply(&self, standing: &Standing) {
        let guessed = standing.guessed().is_some();
        self.fleets.set_guessed(self.member.spec().worker, guessed);
        for rank in &self.counters {
            rank.guessed.store(guessed, Relaxed);
        }
        self.member.set_cache_view(standing.shown());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(ranks: &[ViewState], found: u32, missing: u32) -> Standing {
        let mut standing = Standing {
            ranks: ranks.to_vec(),
            agreement: Agreement::default(),
            warned: false,
        };
        standing.note(Testimony { found, missing });
        standing
    }

    #[test]
    fn a_cache_is_followed_if_all_ranks_are_usable_and_prompts_are_named() {
        use ViewState::{Followed, Late, Unproven};
        let useless = ViewState::Useless("sends nothing".into());
        let cases: [(&[ViewState], u32, u32, &str); 9] = [
            (
                &[Unproven],
                0,
                0,
                "guessed: its KV events have named no block yet",
            ),
            (&[Followed], 0, 0, "KV events"),
            (&[Followed], 0, 7, "KV events"),
            (&[Followed], 4, 4, "KV events"),
            (
                &[Followed],
                3,
                5,
                "guessed: it answered 8 prompts of late, and its KV events named the blocks of 3",
            ),
            (&[Followed, Followed], 0, 0, "KV events of 2 ranks"),
            (
                &[Followed, Unproven],
                9,
                0,
                "guessed: its KV events have named no block yet",
            ),
            (&[useless, Unproven], 9, 0, "guessed: it sends nothing"),
            (
                &[Late, Followed],
                0,
                0,
                "KV events, late: they take longer to read than one engine's may",
            ),
        ];
        for (ranks, found, missing, shown) in cases {
            assert_eq!(standing(ranks, found, missing).shown(), shown);
        }
    }

    /// A cache that is followed stays followed while few prompts are missing, and one that was lost comes back.
    #[test]
    fn the_last_prompts_decide() {
        let mut of = Agreement::default();
        let each = |of: &mut Agreement, found, missing| {
            of.note(Testimony { found, missing });
            of.is_lost
        };
        assert!((0..1_000).all(|n| !each(&mut of, 1, u32::from(n % 3 == 0))));
        let lost = (1..1_000).find(|_| each(&mut of, 0, 1));
        assert!(lost.is_some_and(|prompts| prompts <= WINDOW), "{lost:?}");
        assert!((0..1_000).all(|_| each(&mut of, 1, 1)));
        let back = (1..1_000).find(|_| !each(&mut of, 1, 0));
        assert!(
            back.is_some_and(|prompts| prompts <= 2 * WINDOW),
            "{back:?}"
        );
        assert!(each(&mut of, 0, 1_000_000));
    }
}
