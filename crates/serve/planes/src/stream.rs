//! The stream table of a shard: its open streams.

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::rc::Rc;

use slipstream_base::RequestId;
use slipstream_base::width::low_u32;

/// A place in one shard's [`StreamTable`]: a slot, and the number of times it was freed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId {
    /// Index in the table; below 2^24.
    pub slot: u32,
    /// Times that the slot was freed before this stream took it. It wraps after 2^32 streams in
    /// one slot: at 10^5 streams per second through a single slot, after 12 hours. An address
    /// would have to stay in flight for all that time to be mistaken.
    pub generation: u32,
}

/// A stream, with the shard that owns it. Packs into the [`RequestId`] that identifies it to engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamAddr {
    /// The shard.
    pub shard: u8,
    /// The stream in that shard's table.
    pub stream: StreamId,
}

/// Slots that an address can name: 24 bits.
pub const SLOTS_MAX: u32 = 1 << 24;

impl From<StreamAddr> for RequestId {
    fn from(addr: StreamAddr) -> RequestId {
        debug_assert!(addr.stream.slot < SLOTS_MAX);
        RequestId(
            u64::from(addr.shard) << 56
                | u64::from(addr.stream.slot) << 32
                | u64::from(addr.stream.generation),
        )
    }
}

impl From<RequestId> for StreamAddr {
    fn from(id: RequestId) -> StreamAddr {
        StreamAddr {
            shard: (id.0 >> 56) as u8,
            stream: StreamId {
                slot: (id.0 >> 32) as u32 & (SLOTS_MAX - 1),
                generation: low_u32(id.0),
            },
        }
    }
}

impl fmt::Display for StreamAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "s{}.{}#{}",
            self.shard, self.stream.slot, self.stream.generation
        )
    }
}

/// The table is full; the caller answers 503 and may retry later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{limit} streams are open on this shard, which is its limit; retry later or raise `live.streams_max`"
)]
pub struct TableFull {
    /// Maximum streams of the table.
    pub limit: u32,
}

/// Counters of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// Streams registered.
    pub registered: u64,
    /// Registrations refused because the table was full.
    pub refused: u64,
    /// Look-ups by an address whose stream is gone.
    pub stale: u64,
}

/// Streams of one shard, by [`StreamId`]. Cheap to clone: a clone is another handle on the table.
///
/// The table belongs to one thread, so it has no locks. Registering, looking up and
/// removing are array accesses. Slots are in chunks that never move, so an entry
/// may register or drop other streams during its own look-up.
pub struct StreamTable<T> {
    inner: Rc<Inner<T>>,
}

impl<T> Clone for StreamTable<T> {
    fn clone(&self) -> Self {
        StreamTable {
            inner: Rc::clone(&self.inner),
        }
    }
}

struct Inner<T> {
    shard: u8,
    limit: u32,
    chunks: Box<[OnceCell<Chunk<T>>]>,
    /// Slots freed, last freed first: the next stream finds its slot in the cache.
    free: RefCell<Vec<u32>>,
    /// Slots used so far; later ones have never been used.
    used: Cell<u32>,
    len: Cell<u32>,
    registered: Cell<u64>,
    refused: Cell<u64>,
    stale: Cell<u64>,
}

struct Slot<T> {
    generation: Cell<u32>,
    value: RefCell<Option<T>>,
}

/// Slots are allocated in chunks, so that a large limit costs nothing until it is used.
type Chunk<T> = Box<[Slot<T>]>;
const CHUNK_SLOTS: u32 = 256;

impl<T> StreamTable<T> {
    /// A table of shard `shard` for `limit` streams at most (no more than [`SLOTS_MAX`]).
    pub fn new(shard: u8, limit: u32) -> StreamTable<T> {
        let limit = limit.min(SLOTS_MAX);
        let chunks = limit.div_ceil(CHUNK_SLOTS);
        StreamTable {
            inner: Rc::new(Inner {
                shard,
                limit,
                chunks: (0..chunks).map(|_| OnceCell::new()).collect(),
                free: RefCell::new(Vec::new()),
                used: Cell::new(0),
                len: Cell::new(0),
                registered: Cell::new(0),
                refused: Cell::new(0),
                stale: Cell::new(0),
            }),
        }
    }

    /// Opens a stream. It lives until the registration is dropped.
    ///
    /// # Errors
    /// [`TableFull`]; `value` is dropped.
    pub fn register(&self, value: T) -> Result<Registration<T>, TableFull> {
        let inner = &self.inner;
        let free = inner.free.borrow_mut().pop();
        let slot = match free {
            Some(slot) => slot,
            None if inner.used.get() < inner.limit => {
                let slot = inner.used.get();
                inner.used.set(slot + 1);
                slot
            }
            None => {
                inner.refused.set(inner.refused.get() + 1);
                return Err(TableFull { limit: inner.limit });
            }
        };
        let entry = inner.slot_or_grow(slot);
        let previous = entry.value.replace(Some(value));
        debug_assert!(previous.is_none(), "a free slot holds no stream");
        inner.len.set(inner.len.get() + 1);
        inner.registered.set(inner.registered.get() + 1);
        Ok(Registration {
            table: Rc::clone(inner),
            id: StreamId {
                slot,
                generation: entry.generation.get(),
            },
        })
    }

    /// Calls `look` with the stream's entry. `None` (counted) if the stream is gone.
    ///
    /// # Panics
    /// If `look` looks up its own entry again.
    #[inline]
    pub fn with<R>(&self, id: StreamId, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let found = self.inner.with(id, look);
        if found.is_none() {
            self.inner.stale.set(self.inner.stale.get() + 1);
        }
        found
    }

    /// Whether the stream is open.
    pub fn contains(&self, id: StreamId) -> bool {
        self.inner.slot(id).is_some_and(|entry| {
            entry
                .value
                .try_borrow()
                .map_or(true, |value| value.is_some())
        })
    }

    /// Calls `look` with each open stream, by slot. For shutdown and for a vanished worker: costs
    /// as much as the maximum number of streams ever open.
    pub fn for_each(&self, mut look: impl FnMut(StreamId, &mut T)) {
        for slot in 0..self.inner.used.get() {
            let Some(entry) = self.inner.slot_at(slot) else {
                continue;
            };
            let id = StreamId {
                slot,
                generation: entry.generation.get(),
            };
            self.inner.with(id, |value| look(id, value));
        }
    }

    /// Streams open now.
    pub fn len(&self) -> u32 {
        self.inner.len.get()
    }

    /// Whether no stream is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Maximum number of open streams.
    pub fn limit(&self) -> u32 {
        self.inner.limit
    }

    /// The shard that owns the table.
    pub fn shard(&self) -> u8 {
        self.inner.shard
    }

    /// The table's counters.
    pub fn counts(&self) -> TableCounts {
        TableCounts {
            registered: self.inner.registered.get(),
            refused: self.inner.refused.get(),
            stale: self.inner.stale.get(),
        }
    }
}

impl<T> Inner<T> {
    fn slot_or_grow(&self, slot: u32) -> &Slot<T> {
        let chunk = self.chunks[(slot / CHUNK_SLOTS) as usize].get_or_init(|| {
            (0..CHUNK_SLOTS)
                .map(|_| Slot {
                    generation: Cell::new(0),
                    value: RefCell::new(None),
                })
                .collect()
        });
        &chunk[(slot % CHUNK_SLOTS) as usize]
    }

    #[inline]
    fn slot_at(&self, slot: u32) -> Option<&Slot<T>> {
        let chunk = self.chunks.get((slot / CHUNK_SLOTS) as usize)?.get()?;
        Some(&chunk[(slot % CHUNK_SLOTS) as usize])
    }

    /// The slot that `id` names, if its generation is the present one: its stream is open, or is
    /// the next to be opened (no address was issued yet). Removing a stream increments the generation
    /// first.
    #[inline]
    fn slot(&self, id: StreamId) -> Option<&Slot<T>> {
        let entry = self.slot_at(id.slot)?;
        (entry.generation.get() == id.generation).then_some(entry)
    }

    #[inline]
    fn with<R>(&self, id: StreamId, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let entry = self.slot(id)?;
        // If `look` drops the stream's own registration (or panics after that), the slot is
        // freed at the end of the look-up.
        let _finish = FinishRemoval {
            table: self,
            entry,
            id,
        };
        let mut value = entry.value.borrow_mut();
        value.as_mut().map(look)
    }

    fn remove(&self, id: StreamId) {
        let Some(entry) = self.slot(id) else { return };
        if slipstream_base::planted!("late-frame") {
            self.len.set(self.len.get() - 1);
            return self.take_value(entry, id.slot);
        }
        entry.generation.set(id.generation.wrapping_add(1));
        self.len.set(self.len.get() - 1);
        self.take_value(entry, id.slot);
    }

    /// Frees the slot, unless a look-up uses its entry; then [`FinishRemoval`] does.
    fn take_value(&self, entry: &Slot<T>, slot: u32) {
        let value = match entry.value.try_borrow_mut() {
            Ok(mut value) => value.take(),
            Err(_) => return,
        };
        // In this order: the value's own drop may register and remove streams, this slot included.
        self.free.borrow_mut().push(slot);
        drop(value);
    }
}

struct FinishRemoval<'a, T> {
    table: &'a Inner<T>,
    entry: &'a Slot<T>,
    id: StreamId,
}

impl<T> Drop for FinishRemoval<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.entry.generation.get() != self.id.generation {
            self.table.take_value(self.entry, self.id.slot);
        }
    }
}

/// An open stream. Dropping it closes the stream at once, in any place: in a handler, in
/// a panic's unwinding, after the runtime is gone. It needs no task and no runtime.
pub struct Registration<T> {
    table: Rc<Inner<T>>,
    id: StreamId,
}

impl<T> Registration<T> {
    /// The stream's place in its table.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// The stream's address, as in frames.
    pub fn addr(&self) -> StreamAddr {
        StreamAddr {
            shard: self.table.shard,
            stream: self.id,
        }
    }

    /// Gives the stream a new address in its slot. Frames for the former address are stale from now on.
    /// Not to be called during a look-up of the stream.
    pub fn renew(&mut self) {
        let entry = self.table.slot(self.id);
        let entry = entry.expect("a registered stream has an entry");
        debug_assert!(entry.value.try_borrow_mut().is_ok(), "it is looked up");
        self.id.generation = self.id.generation.wrapping_add(1);
        entry.generation.set(self.id.generation);
    }

    /// Calls `look` with the stream's entry.
    ///
    /// # Panics
    /// If `look` looks up its own entry again.
    #[inline]
    pub fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        self.table
            .with(self.id, look)
            .expect("a registered stream has an entry")
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        self.table.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_renewed_stream_is_found_by_its_new_address_alone() {
        let table = StreamTable::new(0, 8);
        let mut stream = table.register("it").unwrap();
        let former = stream.id();
        stream.renew();
        assert_eq!(stream.id().slot, former.slot);
        assert!(!table.contains(former));
        assert_eq!(table.with(former, |_| ()), None);
        assert_eq!(table.with(stream.id(), |value| *value), Some("it"));
        assert_eq!((table.len(), table.counts().stale), (1, 1));
        drop(stream);
        // The slot is free, and what takes it has an address of its own.
        let next = table.register("next").unwrap();
        assert_eq!(
            (next.id().slot, next.id().generation),
            (former.slot, former.generation + 2)
        );
    }

    #[test]
    fn an_address_packs_into_a_request_id() {
        let addr = StreamAddr {
            shard: 0xab,
            stream: StreamId {
                slot: 0x12_3456,
                generation: 0xdead_beef,
            },
        };
        assert_eq!(RequestId::from(addr), RequestId(0xab12_3456_dead_beef));
        assert_eq!(addr.to_string(), "s171.1193046#3735928559");
    }

    proptest! {
        #[test]
        fn every_request_id_is_an_address(id: u64) {
            prop_assert_eq!(RequestId::from(StreamAddr::from(RequestId(id))), RequestId(id));
        }

        /// Against a map that never forgets which ids were given out.
        #[test]
        fn a_table_finds_what_is_open_and_nothing_else(
            ops in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..400)
        ) {
            let table = StreamTable::new(3, 300);
            let mut open: Vec<(Registration<usize>, usize)> = Vec::new();
            let mut closed: Vec<StreamId> = Vec::new();
            for (n, (op, pick)) in ops.into_iter().enumerate() {
                match op {
                    0 | 1 => match table.register(n) {
                        Ok(registration) => {
                            prop_assert!(!closed.contains(&registration.id()), "an id comes once");
                            open.push((registration, n));
                        }
                        Err(full) => {
                            prop_assert_eq!(full, TableFull { limit: 300 });
                            prop_assert_eq!(open.len(), 300);
                        }
                    },
                    2 if !open.is_empty() => {
                        let (registration, _) = open.swap_remove(pick.index(open.len()));
                        closed.push(registration.id());
                    }
                    _ if !closed.is_empty() => {
                        let id = closed[pick.index(closed.len())];
                        prop_assert_eq!(table.with(id, |value| *value), None);
                        prop_assert!(!table.contains(id));
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len() as usize, open.len());
            }
            for (registration, n) in &open {
                prop_assert_eq!(table.with(registration.id(), |value| *value), Some(*n));
                prop_assert_eq!(registration.addr().shard, 3);
            }
            let mut seen = 0;
            table.for_each(|_, _| seen += 1);
            prop_assert_eq!(seen, open.len());
            let registered = table.counts().registered as usize;
            prop_assert_eq!(registered, open.len() + closed.len());
        }
    }

    #[test]
    fn a_full_table_says_so_and_takes_the_next_after_one_is_gone() {
        let table = StreamTable::new(0, 2);
        let first = table.register(()).unwrap();
        let _second = table.register(()).unwrap();
        assert_eq!(table.register(()).err(), Some(TableFull { limit: 2 }));
        let freed = first.id();
        drop(first);
        let third = table.register(()).unwrap();
        assert_eq!(third.id().slot, freed.slot, "the slot is reused");
        assert_ne!(third.id().generation, freed.generation);
        assert_eq!(table.counts().refused, 1);
        assert_eq!(table.with(freed, |()| ()), None);
        assert_eq!(table.counts().stale, 1);
    }

    #[test]
    fn ids_from_elsewhere_find_nothing() {
        let table = StreamTable::new(0, 1000);
        let _open = table.register(()).unwrap();
        for (slot, generation) in [(0, 1), (1, 0), (999, 0), (1000, 0), (u32::MAX, 0)] {
            assert_eq!(table.with(StreamId { slot, generation }, |()| ()), None);
            assert!(!table.contains(StreamId { slot, generation }));
        }
    }

    #[test]
    fn a_registration_removes_itself_during_a_panic() {
        let table = StreamTable::new(0, 8);
        let result = catch_unwind(AssertUnwindSafe(|| {
            let _registration = table.register(1).unwrap();
            panic!("a handler fails");
        }));
        assert!(result.is_err());
        assert!(table.is_empty());
        assert!(table.register(2).is_ok());
    }

    #[test]
    fn a_stream_may_be_dropped_while_its_entry_is_looked_at() {
        let table: StreamTable<u32> = StreamTable::new(0, 1);
        let registration = table.register(1).unwrap();
        let id = registration.id();
        let mut held = Some(registration);
        table.with(id, |value| {
            drop(held.take());
            *value = 7; // still there during the look-up
            assert!(!table.contains(id), "but closed for everybody else");
            assert!(table.register(2).is_err(), "and its slot is not free yet");
        });
        assert!(table.is_empty());
        assert!(table.register(3).is_ok(), "now it is");
    }

    #[test]
    fn a_panic_while_an_entry_is_looked_at_leaks_no_slot() {
        let table: StreamTable<u32> = StreamTable::new(0, 1);
        let registration = table.register(1).unwrap();
        let id = registration.id();
        let result = catch_unwind(AssertUnwindSafe(|| {
            table.with(id, move |_| {
                drop(registration);
                panic!("rendering fails");
            });
        }));
        assert!(result.is_err());
        assert!(table.register(2).is_ok());
    }

    #[test]
    fn a_value_may_own_other_streams() {
        struct Nested(#[allow(dead_code)] Option<Registration<Nested>>);
        let table = StreamTable::new(0, 8);
        let inner = table.register(Nested(None)).unwrap();
        let outer = table.register(Nested(Some(inner))).unwrap();
        drop(outer);
        assert!(table.is_empty());
    }

    #[test]
    fn a_registration_outlives_its_table() {
        let table = StreamTable::new(0, 8);
        let registration = table.register(5).unwrap();
        drop(table);
        assert_eq!(registration.with(|value| *value), 5);
    }
}
