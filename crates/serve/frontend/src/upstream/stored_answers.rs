//! Which engine stores which answer of `/v1/responses`, and for which API key: a bounded table. No I/O.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use slipstream_base::WorkerId;
use slipstream_base::sync::lock;

use super::sse;
use crate::door::connection::Client;
use crate::door::service::Service;

/// Ids that are remembered: the oldest are forgotten. Some 8 MB at most.
const KNOWN_MAX: usize = 1 << 16;

/// Longest id that is remembered or asked for, bytes. Those of vLLM have 37.
pub(super) const ID_BYTES_MAX: usize = 128;

/// Which engine stores which answer. Shared by the shards: one lock per request to `/v1/responses`.
#[derive(Debug, Default)]
pub(super) struct StoredAnswers {
    known: Mutex<Known>,
    /// Requests whose engine was known, was found by asking, was not found, and takes no requests; requests
    /// for which no engine was asked, because of a limit; and those for a response of another key.
    pub(super) outcomes: [AtomicU64; 6],
}

/// Labels of [`StoredAnswers::outcomes`].
pub(super) const OUTCOMES: [&str; 6] = ["known", "asked", "unknown", "gone", "refused", "denied"];

/// A label of [`OUTCOMES`].
#[derive(Clone, Copy)]
pub(super) enum Outcome {
    Known,
    Asked,
    Unknown,
    Gone,
    Refused,
    Denied,
}

/// Whose a stored answer is: the API key that made it. Without keys all clients are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// The router has no keys.
    Open,
    /// The address of the key's counters, which live as long as the router.
    Key(usize),
    /// Two keys were answered with one id, so it names neither's answer.
    Disputed,
}

impl Owner {
    pub(super) fn of(service: &Service, client: &Client) -> Owner {
        if service.api_keys.is_empty() {
            Owner::Open
        } else {
            Owner::Key(Arc::as_ptr(client.counts()) as usize)
        }
    }
}

#[derive(Debug, Default)]
struct Known {
    by_id: HashMap<Arc<str>, Holder>,
    /// By age: the number at which each was learned.
    order: BTreeMap<u64, Arc<str>>,
    /// Numbers of each owner's, oldest first.
    of_owner: HashMap<Owner, VecDeque<u64>>,
    next: u64,
}

impl Known {
    fn add(&mut self, id: &str, holder: Holder) {
        let owner = holder.owner;
        if self.order.len() >= KNOWN_MAX {
            // An owner of half of them makes room itself: it cannot make the router forget those of others.
            let own = self.of_owner.get(&owner);
            let own = own.filter(|own| own.len() >= KNOWN_MAX / 2);
            let oldest = own.and_then(VecDeque::front).copied();
            let oldest = oldest.or_else(|| self.order.keys().next().copied());
            self.forget(oldest.expect("there are some"));
        }
        let (id, number): (Arc<str>, u64) = (id.into(), self.next);
        self.next += 1;
        self.order.insert(number, id.clone());
        self.of_owner.entry(owner).or_default().push_back(number);
        self.by_id.insert(id, holder);
    }

    /// Forgets the oldest of all, or the oldest of its owner.
    fn forget(&mut self, number: u64) {
        let Some(id) = self.order.remove(&number) else {
            return;
        };
        let Some(holder) = self.by_id.remove(&id) else {
            return;
        };
        if let Some(numbers) = self.of_owner.get_mut(&holder.owner) {
            // The oldest of all is its owner's oldest as well.
            numbers.pop_front();
            if numbers.is_empty() {
                self.of_owner.remove(&holder.owner);
            }
        }
    }
}

/// An engine that stores answers.
#[derive(Clone, Debug)]
pub(super) struct StoringEngine {
    /// No other engine of this process has it, whatever its slot.
    pub(super) id: u64,
    pub(super) worker: WorkerId,
    pub(super) url: Arc<str>,
}

/// The engine that stores an answer, and whose answer it is.
#[derive(Clone, Debug)]
struct Holder {
    engine: StoringEngine,
    /// The key whose room in [`Known`] it takes.
    owner: Owner,
    /// Another owner was answered with the same id.
    is_disputed: bool,
}

impl Holder {
    fn owner(&self) -> Owner {
        if self.is_disputed {
            Owner::Disputed
        } else {
            self.owner
        }
    }
}

impl StoredAnswers {
    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        lock(&self.known)
    }

    /// Counts a request that names an answer.
    pub(super) fn count(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Relaxed);
    }

    /// `engine` stores the answer `id` of `owner`.
    pub(super) fn remember(&self, id: &str, engine: StoringEngine, owner: Owner) {
        if id.is_empty() || id.len() > ID_BYTES_MAX {
            return;
        }
        let holder = Holder {
            engine,
            owner,
            is_disputed: false,
        };
        let mut known = self.known();
        match known.by_id.get_mut(id) {
            // The engine has one of the two answers, and the router cannot say which.
            Some(held) if held.owner != owner => held.is_disputed = true,
            Some(held) => {
                *held = Holder {
                    is_disputed: held.is_disputed,
                    ..holder
                };
            }
            None => known.add(id, holder),
        }
    }

    /// The engine that stores the answer `id`, if it is known.
    pub(super) fn holder(&self, id: &str) -> Option<StoringEngine> {
        let known = self.known();
        known.by_id.get(id).map(|holder| holder.engine.clone())
    }

    /// Whose the answer `id` is, if that is known.
    pub(super) fn owner(&self, id: &str) -> Option<Owner> {
        self.known().by_id.get(id).map(Holder::owner)
    }
}

/// The id of the answer that begins with `piece`: that of the object, or in `is_events` of `response` in the first
/// event that has one. `piece` may be cut off.
pub(super) fn id_of(piece: &[u8], is_events: bool) -> Option<String> {
    let of = |json: &[u8]| {
        let mut id = None;
        let read = Fields {
            id: &mut id,
            inner: is_events,
        };
        // An error: it is cut off behind the id, or not JSON.
        let _ = read.deserialize(&mut serde_json::Deserializer::from_slice(json));
        id
    };
    if !is_events {
        return of(piece);
    }
    sse::events(piece).find_map(|event| of(&event.data))
}

/// Reads `id` of an object, or with `inner` that of its `response`.
struct Fields<'i> {
    id: &'i mut Option<String>,
    inner: bool,
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            match (&*name, self.inner) {
                ("id", false) => {
                    *self.id = Some(map.next_value()?);
                }
                ("response", true) => map.next_value_seed(Fields {
                    id: &mut *self.id,
                    inner: false,
                })?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::width::to_u32;

    use super::*;

    fn engine(worker: u32) -> StoringEngine {
        StoringEngine {
            id: u64::from(worker),
            worker: WorkerId(worker),
            url: "http://engine".into(),
        }
    }

    #[test]
    fn ids_are_read_from_answers_and_their_events() {
        let whole = br#"{"object":"response","metadata":{"id":"no"},"id":"resp_1","output":["#;
        assert_eq!(id_of(whole, false).as_deref(), Some("resp_1"));
        let events = b"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_2\"}}\n\n";
        assert_eq!(id_of(events, true).as_deref(), Some("resp_2"));
        for (piece, is_events) in [
            (&b"{\"id\":7}"[..], false),
            (b"{\"id\":\"cut", false),
            (b"", false),
            (b": comment\n\ndata: [DONE]\n\n", true),
            (b"data: {\"id\":\"event\"}\n\n", true),
            (b"data: {\"response\":null}\n\n", true),
        ] {
            assert_eq!(id_of(piece, is_events), None, "{piece:?}");
        }
    }

    #[test]
    fn the_oldest_ids_are_forgotten() {
        let stored = &StoredAnswers::default();
        for number in 0..KNOWN_MAX + 10 {
            stored.remember(
                &format!("r{number}"),
                engine(to_u32(number % 2)),
                Owner::Open,
            );
        }
        assert!(stored.holder("r9").is_none() && stored.holder("r10").is_some());
        assert_eq!(stored.holder("r11").unwrap().worker, WorkerId(1));
        stored.remember("r11", engine(0), Owner::Open);
        assert_eq!(stored.holder("r11").unwrap().worker, WorkerId(0));
        check_known(stored);
        stored.remember(&"x".repeat(ID_BYTES_MAX + 1), engine(0), Owner::Open);
        assert!(stored.holder(&"x".repeat(ID_BYTES_MAX + 1)).is_none());
    }

    /// As many as there may be, each counted once.
    fn check_known(stored: &StoredAnswers) {
        let known = stored.known();
        let owned: usize = known.of_owner.values().map(VecDeque::len).sum();
        assert_eq!(
            (known.by_id.len(), known.order.len(), owned),
            (KNOWN_MAX, KNOWN_MAX, KNOWN_MAX)
        );
    }

    #[test]
    fn a_key_with_many_answers_does_not_make_others_forgotten() {
        let stored = &StoredAnswers::default();
        let (quiet, greedy) = (Owner::Key(1), Owner::Key(2));
        stored.remember("quiet", engine(0), quiet);
        for number in 0..2 * KNOWN_MAX {
            stored.remember(&format!("r{number}"), engine(0), greedy);
        }
        assert!(stored.holder("quiet").is_some());
        assert!(stored.holder(&format!("r{}", 2 * KNOWN_MAX - 1)).is_some());
        check_known(stored);
    }
}
