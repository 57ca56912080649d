//! The event queue.
//!
//! ```text
//!  near (heap)      current bucket: rare, late insertions
//!  run  (sorted)    current bucket: its events in time order
//!  fine (ring)      the next SLOTS buckets of 2^shift ns
//!  coarse (ring)    the next SLOTS super-buckets of SLOTS << shift ns; spilled into `fine` on entry
//!  far  (heap)      everything later (retransmission timers of a second, faults)
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::chunks::{Bucket, Chunks};

/// Slots in each ring. 512 keeps both rings' bitmaps in one cache line each.
const SLOTS: usize = 512;
const SLOTS_LOG: u32 = SLOTS.trailing_zeros();
const WORDS: usize = SLOTS / 64;
/// Below this many events insertion sort beats a counting sort's pass over its bins.
const INSERTION_MAX: usize = 24;
/// Bins of the counting sort; wider buckets with many events use the standard stable sort.
const BINS: usize = 1024;

/// The low 32 bits of `n`.
#[inline]
fn low(n: u64) -> u32 {
    (n & 0xffff_ffff) as u32
}

/// An event that carries the low 32 bits of its time.
///
/// 32 bits keep the event small; the wheel adds the rest, because an event in a ring is less than
/// 2^31 ns ahead.
pub trait Timed: Copy {
    /// The low 32 bits of the time, ns.
    fn time_low(&self) -> u32;
}

/// An event in the far heap, ordered by time and then by insertion.
struct Far<E> {
    time: u64,
    order: u64,
    event: E,
}

impl<E> PartialEq for Far<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.time, self.order) == (other.time, other.order)
    }
}
impl<E> Eq for Far<E> {}
impl<E> PartialOrd for Far<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Far<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.time, self.order).cmp(&(other.time, other.order))
    }
}

/// A ring of buckets with a bitmap of the occupied ones.
struct Ring {
    buckets: [Bucket; SLOTS],
    occupied: [u64; WORDS],
    /// Bit w: `occupied[w]` is not 0.
    words: u8,
}

impl Ring {
    fn new() -> Self {
        Ring {
            buckets: [Bucket::EMPTY; SLOTS],
            occupied: [0; WORDS],
            words: 0,
        }
    }

    #[inline]
    fn push<E: Copy>(&mut self, bucket: u64, event: E, chunks: &mut Chunks<E>) {
        let slot = low(bucket) as usize & (SLOTS - 1);
        if chunks.push(&mut self.buckets[slot], event) {
            self.occupied[slot >> 6] |= 1 << (slot & 63);
            self.words |= 1 << (slot >> 6);
        }
    }

    /// Empties a bucket and returns its events; the caller frees their chunks.
    fn take(&mut self, bucket: u64) -> Bucket {
        let slot = low(bucket) as usize & (SLOTS - 1);
        self.vacate(slot);
        std::mem::replace(&mut self.buckets[slot], Bucket::EMPTY)
    }

    #[inline]
    fn vacate(&mut self, slot: usize) {
        self.occupied[slot >> 6] &= !(1 << (slot & 63));
        if self.occupied[slot >> 6] == 0 {
            self.words &= !(1 << (slot >> 6));
        }
    }

    /// The first occupied bucket at or after `from`, which must be the ring's earliest possible.
    #[inline]
    fn first(&self, from: u64) -> Option<u64> {
        let start = low(from) as usize & (SLOTS - 1);
        let (word, bit) = (start >> 6, start & 63);
        let masked = self.occupied[word] >> bit;
        if masked != 0 {
            return Some(from + u64::from(masked.trailing_zeros()));
        }
        // The words after this one in ring order, this one (its low part) last.
        let after = self.words.rotate_right(low(word as u64) + 1);
        if after == 0 {
            return None;
        }
        let at = (word + 1 + after.trailing_zeros() as usize) & (WORDS - 1);
        let slot = (at << 6) + self.occupied[at].trailing_zeros() as usize;
        let ahead = slot.wrapping_sub(start) & (SLOTS - 1);
        Some(from + ahead as u64)
    }
}

/// A queue of events in time buckets of `2^shift` ns.
///
/// Fast if the buckets are narrower than the delay with which events schedule each other: then
/// nothing is inserted into the current bucket. Such insertions are allowed (a heap holds them).
pub struct Wheel<E> {
    shift: u32,
    /// The current bucket, or the earliest that may still receive events.
    cursor: u64,
    /// Whether `cursor`'s bucket has been opened, i.e. moved into `run`.
    open: bool,
    run: Vec<E>,
    run_at: usize,
    near: BinaryHeap<Reverse<Far<E>>>,
    /// The last event taken from `near`.
    late: Option<E>,
    fine: Ring,
    coarse: Ring,
    /// The events of both rings.
    chunks: Chunks<E>,
    far: BinaryHeap<Reverse<Far<E>>>,
    order: u64,
    len: usize,
}

impl<E: Timed> Wheel<E> {
    /// A wheel whose buckets are `2^shift` ns wide, at most `2^12` (so that both rings together
    /// stay within the 2^31 ns that 32-bit times can distinguish).
    pub fn new(shift: u32) -> Self {
        assert!(shift <= 12, "bucket width 2^{shift} ns exceeds 4096 ns");
        Wheel {
            shift,
            cursor: 0,
            open: false,
            run: Vec::new(),
            run_at: 0,
            near: BinaryHeap::new(),
            late: None,
            fine: Ring::new(),
            coarse: Ring::new(),
            chunks: Chunks::new(),
            far: BinaryHeap::new(),
            order: 0,
            len: 0,
        }
    }

    /// Events held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if no event is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Width of a bucket, ns.
    pub fn bucket_ns(&self) -> u64 {
        1 << self.shift
    }

    /// Schedules `event` at `time`, whose low 32 bits the event must carry.
    ///
    /// `time` must not be before the last event popped: simulated time does not run back.
    #[inline]
    pub fn push(&mut self, time: u64, event: E) {
        debug_assert_eq!(event.time_low(), low(time));
        self.len += 1;
        let bucket = time >> self.shift;
        let ahead = bucket.wrapping_sub(self.cursor);
        if ahead.wrapping_sub(u64::from(self.open)) < SLOTS as u64 - 1 {
            self.fine.push(bucket, event, &mut self.chunks);
        } else {
            self.push_elsewhere(time, event);
        }
    }

    #[cold]
    fn push_elsewhere(&mut self, time: u64, event: E) {
        let bucket = time >> self.shift;
        assert!(
            bucket >= self.cursor,
            "event at {time} ns is before the current bucket"
        );
        self.order += 1;
        let item = Far {
            time,
            order: self.order,
            event,
        };
        if bucket == self.cursor {
            self.near.push(Reverse(item));
            return;
        }
        let ahead = (bucket >> SLOTS_LOG) - (self.cursor >> SLOTS_LOG);
        if ahead < SLOTS as u64 {
            self.coarse
                .push(bucket >> SLOTS_LOG, event, &mut self.chunks);
        } else {
            self.far.push(Reverse(item));
        }
    }

    /// The start of the bucket of the earliest event, or of the remaining part of the current bucket;
    /// `None` if empty. A lower bound of the next event's time: a coarse bucket counts from its
    /// own start until it is entered.
    pub fn next_bucket_start(&self) -> Option<u64> {
        if self.open && (self.run_at < self.run.len() || !self.near.is_empty()) {
            return Some(self.cursor << self.shift);
        }
        let (fine, coarse, far) = self.firsts();
        let bucket = [fine, coarse, far].into_iter().flatten().min()?;
        Some(bucket.max(self.cursor) << self.shift)
    }

    /// The first bucket of the fine ring, of the coarse one (its start) and of the far heap.
    #[inline]
    fn firsts(&self) -> (Option<u64>, Option<u64>, Option<u64>) {
        let fine = self.fine.first(self.cursor + u64::from(self.open));
        let coarse = self.coarse.first(self.cursor >> SLOTS_LOG);
        let far = self.far.peek().map(|Reverse(f)| f.time >> self.shift);
        (fine, coarse.map(|s| s << SLOTS_LOG), far)
    }

    /// Moves coarse and far events until the earliest bucket is in `fine`, and returns it;
    /// `None` if it does not start before `until`. The cursor never moves to `until` or past it:
    /// events from elsewhere may still arrive there.
    fn seek(&mut self, until: u64) -> Option<u64> {
        loop {
            let (fine, coarse, far) = self.firsts();
            let ring = match (fine, coarse) {
                (Some(f), Some(c)) => Some(f.min(c)),
                (f, c) => f.or(c),
            };
            let first = match (ring, far) {
                (Some(r), Some(f)) => r.min(f),
                (r, f) => r.or(f)?,
            };
            if first << self.shift >= until {
                return None;
            }
            if far == Some(first) {
                self.bring_far(first, ring.is_none());
            } else if coarse == Some(first) {
                self.spill(first);
            } else {
                return fine;
            }
        }
    }

    /// Moves the earliest far event, which is in `bucket`, into a ring.
    fn bring_far(&mut self, bucket: u64, rings_empty: bool) {
        if rings_empty && bucket > self.cursor {
            self.cursor = bucket;
            self.open = false;
        }
        let Some(Reverse(item)) = self.far.pop() else {
            return;
        };
        if bucket - self.cursor < SLOTS as u64 - 1 {
            self.fine.push(bucket, item.event, &mut self.chunks);
        } else {
            self.coarse
                .push(bucket >> SLOTS_LOG, item.event, &mut self.chunks);
        }
    }

    /// Enters the super-bucket that starts at bucket `start`: its events move to the fine ring.
    fn spill(&mut self, start: u64) {
        let mut events = self.coarse.take(start >> SLOTS_LOG);
        // No event is between the cursor and `start`, so the cursor may move up to it.
        if start > self.cursor {
            self.cursor = start;
            self.open = false;
        }
        let start_ns = start << self.shift;
        while let Some((chunk, count)) = self.chunks.take_chunk(&mut events) {
            for &event in &chunk[..count] {
                let time = start_ns + u64::from(event.time_low().wrapping_sub(low(start_ns)));
                self.fine.push(time >> self.shift, event, &mut self.chunks);
            }
        }
    }

    /// Events of the current bucket that have not been popped, in order. For callers that
    /// prefetch their data.
    #[inline]
    pub fn upcoming(&self) -> &[E] {
        &self.run[self.run_at..]
    }

    /// Takes the earliest event before `until`, with its time.
    #[inline]
    pub fn pop_before(&mut self, until: u64) -> Option<(u64, E)> {
        self.pop_ref(until).map(|(time, event)| (time, *event))
    }

    /// Same as [`Wheel::pop_before`], but leaves the event in place, for a caller that reads its
    /// fields from there. Moved through the stack, an event is written in pieces and read as a whole,
    /// which causes a store-forwarding stall of a dozen cycles.
    #[inline]
    pub fn pop_ref(&mut self, until: u64) -> Option<(u64, &E)> {
        if self.near.is_empty() && self.run_at < self.run.len() {
            let start = self.cursor << self.shift;
            let event = &self.run[self.run_at];
            let time = start + u64::from(event.time_low().wrapping_sub(low(start)));
            if time >= until {
                return None;
            }
            self.run_at += 1;
            self.len -= 1;
            return Some((time, event));
        }
        self.pop_slow(until)
    }

    #[inline(never)]
    fn pop_slow(&mut self, until: u64) -> Option<(u64, &E)> {
        if self.run_at == self.run.len() && self.near.is_empty() {
            let bucket = self.seek(until)?;
            self.open_bucket(bucket);
        }
        let start = self.cursor << self.shift;
        let run = self
            .run
            .get(self.run_at)
            .map(|e| start + u64::from(e.time_low().wrapping_sub(low(start))));
        let near = self.near.peek().map(|Reverse(n)| n.time);
        // Equal times: events that waited in the bucket come first.
        let from_run = match (run, near) {
            (Some(r), Some(n)) => r <= n,
            (r, _) => r.is_some(),
        };
        let time = if from_run { run } else { near }?;
        if time >= until {
            return None;
        }
        self.len -= 1;
        if from_run {
            self.run_at += 1;
            Some((time, &self.run[self.run_at - 1]))
        } else {
            let Reverse(late) = self.near.pop()?;
            Some((time, self.late.insert(late.event)))
        }
    }

    fn open_bucket(&mut self, bucket: u64) {
        self.cursor = bucket;
        self.open = true;
        self.run_at = 0;
        let start = low(bucket << self.shift);
        self.run.clear();
        let events = self.fine.take(bucket);
        let count = self.chunks.len(events);
        if count > INSERTION_MAX && self.bucket_ns() <= BINS as u64 {
            self.counting_sort(events, count, start);
        } else {
            for piece in self.chunks.pieces(events) {
                self.run.extend_from_slice(piece);
            }
            if count <= INSERTION_MAX {
                insertion_sort(&mut self.run, start);
            } else {
                self.run.sort_by_key(|e| e.time_low().wrapping_sub(start));
            }
        }
        self.chunks.free(events);
    }

    /// Stable sort of `count` events by time into `run`, in two passes.
    fn counting_sort(&mut self, events: Bucket, count: usize, start: u32) {
        let mut bins = [0u32; BINS];
        let width = 1usize << self.shift;
        let bins = &mut bins[..width];
        let mask = width - 1;
        let mut filler = None;
        for event in self.chunks.pieces(events).flatten() {
            bins[event.time_low().wrapping_sub(start) as usize & mask] += 1;
            filler = Some(*event);
        }
        let mut sum = 0;
        for bin in bins.iter_mut() {
            sum += std::mem::replace(bin, sum);
        }
        let Some(filler) = filler else { return };
        self.run.resize(count, filler);
        for event in self.chunks.pieces(events).flatten() {
            let place = &mut bins[event.time_low().wrapping_sub(start) as usize & mask];
            self.run[*place as usize] = *event;
            *place += 1;
        }
    }
}

fn insertion_sort<E: Timed>(events: &mut [E], start: u32) {
    for i in 1..events.len() {
        let event = events[i];
        let key = event.time_low().wrapping_sub(start);
        let mut j = i;
        while j > 0 && events[j - 1].time_low().wrapping_sub(start) > key {
            events[j] = events[j - 1];
            j -= 1;
        }
        events[j] = event;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Tick {
        t: u32,
        id: u32,
    }
    impl Timed for Tick {
        fn time_low(&self) -> u32 {
            self.t
        }
    }

    fn push(wheel: &mut Wheel<Tick>, time: u64, id: u32) {
        wheel.push(time, Tick { t: time as u32, id });
    }

    #[test]
    fn equal_times_keep_their_order() {
        let mut wheel = Wheel::new(6);
        for id in 0..100 {
            push(&mut wheel, 1000 + u64::from(id % 3), id);
        }
        let mut last = (0, 0);
        while let Some((time, tick)) = wheel.pop_before(u64::MAX) {
            assert!((time, tick.id) >= last, "{time} {}", tick.id);
            last = (time, tick.id);
        }
    }

    #[test]
    fn nothing_at_or_after_the_limit_is_popped() {
        let mut wheel = Wheel::new(6);
        push(&mut wheel, 70, 0);
        push(&mut wheel, 100, 1);
        assert_eq!(wheel.pop_before(100).map(|e| e.0), Some(70));
        assert_eq!(wheel.pop_before(100), None);
        assert_eq!(wheel.next_bucket_start(), Some(64));
        assert_eq!(wheel.pop_before(101).map(|e| e.0), Some(100));
        assert!(wheel.is_empty());
    }

    proptest! {
        /// Against a sorted list: events schedule others at delays from 0 ns to 10 s.
        #[test]
        fn pops_what_a_sorted_list_pops(
            shift in 0u32..=12,
            seeds in prop::collection::vec((0u64..5_000_000_000, 0u32..34), 1..40),
        ) {
            let mut wheel = Wheel::new(shift);
            let mut list: Vec<(u64, u32)> = Vec::new();
            let mut id = 0;
            for &(time, _) in &seeds {
                push(&mut wheel, time, id);
                list.push((time, id));
                id += 1;
            }
            let mut popped = 0;
            while let Some((time, tick)) = wheel.pop_before(u64::MAX) {
                let earliest = list.iter().map(|e| e.0).min().expect("as many as the wheel");
                prop_assert_eq!(time, earliest);
                let at = list.iter().position(|&e| e == (time, tick.id)).expect("was pushed");
                list.remove(at);
                popped += 1;
                let (a, b) = seeds[popped % seeds.len()];
                if popped < 300 && b > 8 {
                    let delay = a & ((1 << b) - 1);
                    push(&mut wheel, time + delay, id);
                    list.push((time + delay, id));
                    id += 1;
                }
            }
            prop_assert!(list.is_empty());
            prop_assert!(wheel.is_empty());
        }
    }
}
