//! Storage of the rings' events: chunks of a few cache lines, reused in last-in, first-out order.
//!
//! If each bucket had its own growing buffer, each event would be written to memory that was last used one
//! turn of the ring earlier and has left the caches since; the store would wait for it. Here, reading a
//! bucket frees chunks that are in the cache, and the next events are written to those.

/// Events per chunk: 256 bytes of 16-byte events. 8 and 32 performed equally on a network of 8,192 hosts,
/// within the variation of such measurements.
const EVENTS: usize = EVENTS_32 as usize;
const EVENTS_32: u32 = 16;
/// No chunk.
const NONE: u32 = u32::MAX;

/// A chunk begins on a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Chunk<E>([E; EVENTS]);

/// Events of one bucket, in the order in which they were added.
#[derive(Clone, Copy)]
pub(crate) struct Bucket {
    first: u32,
    /// Position of the next event: chunk · EVENTS + index. A multiple of EVENTS means that there is no
    /// chunk, or that the last one is full.
    at: u32,
}

impl Bucket {
    pub(crate) const EMPTY: Bucket = Bucket { first: NONE, at: 0 };

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self.first == NONE
    }

    /// The chunk of the last event.
    fn last(self) -> u32 {
        (self.at - 1) / EVENTS_32
    }
}

/// The chunks of all buckets.
pub(crate) struct Chunks<E> {
    chunks: Vec<Chunk<E>>,
    /// For each chunk: the next one in its bucket, or in the free list.
    next: Vec<u32>,
    free: u32,
}

impl<E: Copy> Chunks<E> {
    pub(crate) fn new() -> Self {
        Chunks {
            chunks: Vec::new(),
            next: Vec::new(),
            free: NONE,
        }
    }

    /// Adds an event. True if it is the bucket's first.
    #[inline]
    pub(crate) fn push(&mut self, bucket: &mut Bucket, event: E) -> bool {
        let at = bucket.at as usize;
        if at.is_multiple_of(EVENTS) {
            return self.push_chunk(bucket, event);
        }
        self.chunks[at / EVENTS].0[at % EVENTS] = event;
        bucket.at += 1;
        false
    }

    #[inline(never)]
    fn push_chunk(&mut self, bucket: &mut Bucket, event: E) -> bool {
        let new = if self.free == NONE {
            let new = self.chunks.len();
            assert!(
                new < u32::MAX as usize / EVENTS,
                "more than 2^32 events are queued"
            );
            self.chunks.push(Chunk([event; EVENTS]));
            self.next.push(NONE);
            u32::try_from(new).expect("it is below the limit")
        } else {
            let new = self.free;
            self.free = self.next[new as usize];
            self.next[new as usize] = NONE;
            self.chunks[new as usize].0[0] = event;
            new
        };
        let opens = bucket.is_empty();
        if opens {
            bucket.first = new;
        } else {
            self.next[bucket.last() as usize] = new;
        }
        bucket.at = new * EVENTS_32 + 1;
        opens
    }

    /// The bucket's events, one chunk at a time.
    pub(crate) fn pieces(&self, bucket: Bucket) -> impl Iterator<Item = &[E]> {
        let mut chunk = bucket.first;
        std::iter::from_fn(move || {
            let at = self.chunks.get(chunk as usize)?;
            if chunk == bucket.last() {
                chunk = NONE;
                let count = (bucket.at as usize - 1) % EVENTS + 1;
                return Some(&at.0[..count]);
            }
            chunk = self.next[chunk as usize];
            Some(&at.0[..])
        })
    }

    /// Events of the bucket.
    pub(crate) fn len(&self, bucket: Bucket) -> usize {
        self.pieces(bucket).map(<[E]>::len).sum()
    }

    /// Copies the bucket's first chunk out, and frees it; the bucket keeps the rest.
    pub(crate) fn take_chunk(&mut self, bucket: &mut Bucket) -> Option<([E; EVENTS], usize)> {
        if bucket.is_empty() {
            return None;
        }
        let chunk = bucket.first;
        let events = self.chunks[chunk as usize].0;
        let count = if chunk == bucket.last() {
            let count = (bucket.at as usize - 1) % EVENTS + 1;
            *bucket = Bucket::EMPTY;
            count
        } else {
            bucket.first = self.next[chunk as usize];
            EVENTS
        };
        self.next[chunk as usize] = self.free;
        self.free = chunk;
        Some((events, count))
    }

    /// Frees the bucket's chunks.
    pub(crate) fn free(&mut self, bucket: Bucket) {
        if !bucket.is_empty() {
            self.next[bucket.last() as usize] = self.free;
            self.free = bucket.first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_keep_their_events_and_give_their_chunks_back() {
        let mut chunks = Chunks::new();
        let mut buckets = [Bucket::EMPTY; 3];
        for round in 0..4 {
            for i in 0..100u32 {
                for (b, bucket) in buckets.iter_mut().enumerate() {
                    let opens = chunks.push(bucket, (b as u32, i));
                    assert_eq!(opens, i == 0);
                }
            }
            for (b, bucket) in buckets.iter_mut().enumerate() {
                let all: Vec<_> = chunks.pieces(*bucket).flatten().copied().collect();
                let expected: Vec<_> = (0..100).map(|i| (b as u32, i)).collect();
                assert_eq!((all, chunks.len(*bucket)), (expected, 100), "round {round}");
                chunks.free(*bucket);
                *bucket = Bucket::EMPTY;
            }
            // Three times 100 events need seven chunks each; later rounds allocate none.
            assert_eq!(chunks.chunks.len(), 3 * 100usize.div_ceil(EVENTS));
        }
    }

    #[test]
    fn chunks_are_taken_in_order() {
        let mut chunks = Chunks::new();
        let mut bucket = Bucket::EMPTY;
        for i in 0..=EVENTS {
            chunks.push(&mut bucket, i);
        }
        assert_eq!(chunks.take_chunk(&mut bucket).map(|c| c.1), Some(EVENTS));
        let (events, count) = chunks.take_chunk(&mut bucket).expect("one is left");
        assert_eq!((events[0], count), (EVENTS, 1));
        assert!(chunks.take_chunk(&mut bucket).is_none() && bucket.is_empty());
    }
}
