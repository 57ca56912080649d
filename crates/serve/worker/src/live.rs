//! The open streams of an engine thread.

use slipstream_base::Role;
use slipstream_base::width::{to_u8, to_u32};
use slipstream_planes::{StreamAddr, Usage};

/// State of one stream in the thread that computes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveStream {
    generation: u32,
    /// Index of its rank on this thread; [`VACANT`] if there is no stream.
    pub(crate) rank: u32,
    pub(crate) prompt_tokens: u32,
    /// Tokens sent so far.
    pub(crate) completion_tokens: u32,
    pub(crate) cached_tokens: u32,
    /// Tokens that may still be sent; `NO_LIMIT`: no bound.
    pub(crate) credit_tokens: u32,
    /// Time at which the thread received it, ns; 0 unless traced.
    pub(crate) recv_ns: u64,
    /// Whether its input is open (see [`crate::inputs`]).
    pub(crate) is_duplex: bool,
    /// The part of it that is computed here.
    pub(crate) role: Role,
    /// As in [`StartRequest::attempt`](slipstream_planes::StartRequest::attempt).
    pub(crate) attempt: u8,
}

const VACANT: u32 = u32::MAX;

/// Initial state of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NewStream {
    pub(crate) rank: u32,
    pub(crate) prompt_tokens: u32,
    pub(crate) credit_tokens: u32,
    pub(crate) recv_ns: u64,
    pub(crate) is_duplex: bool,
    pub(crate) role: Role,
    pub(crate) attempt: u8,
}

impl LiveStream {
    pub(crate) fn usage(&self, preemptions: u32) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
            preemptions,
        }
    }
}

/// Live streams by shard and slot. A shard's slots are dense and reused, so an array replaces a
/// hash map. Its size follows the maximum number of open streams.
#[derive(Debug)]
pub(crate) struct LiveTable {
    shards: Vec<Vec<LiveStream>>,
    /// Live streams of each shard.
    counts: Vec<usize>,
    len: usize,
}

impl LiveTable {
    pub(crate) fn new(shards: usize) -> LiveTable {
        LiveTable {
            shards: vec![Vec::new(); shards],
            counts: vec![0; shards],
            len: 0,
        }
    }

    /// The stream at `addr`, if it is live.
    #[inline]
    pub(crate) fn get_mut(&mut self, addr: StreamAddr) -> Option<&mut LiveStream> {
        let slots = self.shards.get_mut(usize::from(addr.shard))?;
        let live = slots.get_mut(addr.stream.slot as usize)?;
        (live.rank != VACANT && live.generation == addr.stream.generation).then_some(live)
    }

    /// The live stream in the slot of `addr`, of any generation.
    pub(crate) fn occupant(&self, addr: StreamAddr) -> Option<StreamAddr> {
        let slots = self.shards.get(usize::from(addr.shard))?;
        let live = slots.get(addr.stream.slot as usize)?;
        let mut found = addr;
        found.stream.generation = live.generation;
        (live.rank != VACANT).then_some(found)
    }

    /// Adds a stream that has sent nothing. Its slot must be vacant, its shard exist.
    pub(crate) fn insert(&mut self, addr: StreamAddr, new: NewStream) {
        let slots = &mut self.shards[usize::from(addr.shard)];
        let slot = addr.stream.slot as usize;
        if slot >= slots.len() {
            let vacant = LiveStream {
                generation: 0,
                rank: VACANT,
                prompt_tokens: 0,
                completion_tokens: 0,
                cached_tokens: 0,
                credit_tokens: 0,
                recv_ns: 0,
                is_duplex: false,
                role: Role::Both,
                attempt: 0,
            };
            slots.resize(slot + 1, vacant);
        }
        assert_eq!(slots[slot].rank, VACANT, "a slot holds one stream");
        slots[slot] = LiveStream {
            generation: addr.stream.generation,
            rank: new.rank,
            prompt_tokens: new.prompt_tokens,
            completion_tokens: 0,
            cached_tokens: 0,
            credit_tokens: new.credit_tokens,
            recv_ns: new.recv_ns,
            is_duplex: new.is_duplex,
            role: new.role,
            attempt: new.attempt,
        };
        self.counts[usize::from(addr.shard)] += 1;
        self.len += 1;
    }

    /// Removes a stream and returns its state.
    pub(crate) fn remove(&mut self, addr: StreamAddr) -> Option<LiveStream> {
        let live = self.get_mut(addr)?;
        let found = *live;
        live.rank = VACANT;
        self.counts[usize::from(addr.shard)] -= 1;
        self.len -= 1;
        Some(found)
    }

    /// Every live stream of `shard`.
    pub(crate) fn of_shard(&self, shard: u8) -> Vec<StreamAddr> {
        let slots = self.shards.get(usize::from(shard)).into_iter().flatten();
        slots
            .enumerate()
            .filter(|(_, live)| live.rank != VACANT)
            .map(|(slot, live)| StreamAddr {
                shard,
                stream: slipstream_planes::StreamId {
                    slot: to_u32(slot),
                    generation: live.generation,
                },
            })
            .collect()
    }

    /// Live streams of the rank at `index`.
    #[cfg(feature = "sim")]
    pub(crate) fn of_rank(&self, index: Option<usize>) -> usize {
        let of = self.shards.iter().flatten();
        of.filter(|live| Some(live.rank as usize) == index).count()
    }

    /// The count agrees with the slots, and no stream has more credit than `credit_tokens`.
    #[cfg(feature = "sim")]
    pub(crate) fn check(&self, credit_tokens: u32) -> Result<(), String> {
        let of = || {
            self.shards
                .iter()
                .flatten()
                .filter(|live| live.rank != VACANT)
        };
        let limited = |live: &&LiveStream| live.credit_tokens != slipstream_planes::frame::NO_LIMIT;
        if let Some(live) = of()
            .filter(limited)
            .find(|live| live.credit_tokens > credit_tokens)
        {
            let credit = live.credit_tokens;
            return Err(format!(
                "a stream has credit for {credit} tokens, of {credit_tokens}"
            ));
        }
        let live = of().count();
        if live == self.len {
            return Ok(());
        }
        Err(format!(
            "{live} slots hold streams, and {} are counted",
            self.len
        ))
    }

    /// The shard that has all live streams, if there are any.
    pub(crate) fn only_shard(&self) -> Option<u8> {
        let first = self.counts.iter().position(|&count| count > 0)?;
        (self.counts[first] == self.len).then(|| to_u8(first))
    }

    /// Live streams.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_planes::StreamId;

    fn addr(shard: u8, slot: u32, generation: u32) -> StreamAddr {
        StreamAddr {
            shard,
            stream: StreamId { slot, generation },
        }
    }

    #[test]
    fn another_generation_is_another_stream() {
        let mut table = LiveTable::new(2);
        let new = NewStream {
            prompt_tokens: 100,
            ..NewStream::default()
        };
        table.insert(addr(1, 9, 4), new);
        assert!(table.get_mut(addr(1, 9, 3)).is_none());
        assert!(table.get_mut(addr(0, 9, 4)).is_none());
        assert!(table.get_mut(addr(7, 9, 4)).is_none());
        assert!(table.get_mut(addr(1, 1 << 23, 4)).is_none());
        assert_eq!(table.occupant(addr(1, 9, 5)), Some(addr(1, 9, 4)));
        assert_eq!(table.of_shard(1), [addr(1, 9, 4)]);
        assert!(table.remove(addr(1, 9, 5)).is_none());
        assert_eq!(table.remove(addr(1, 9, 4)).unwrap().prompt_tokens, 100);
        assert_eq!((table.len(), table.occupant(addr(1, 9, 4))), (0, None));
    }
}
