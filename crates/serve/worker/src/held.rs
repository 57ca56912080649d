//! Tokens of streams that have used up their credit.
//!
//! The engine continues: a pass serves many streams and waits for none. Tokens that a stream computes
//! without credit are kept here, four bytes per token, until its shard grants more. Their number is
//! bounded by the stream's `max_tokens`.

use std::collections::HashMap;

use slipstream_base::TokenId;
use slipstream_base::width::to_u32;
use slipstream_planes::{End, FirstPass, PassFrame, StreamAddr, StreamId};

/// Tokens that wait for credit, by shard and slot: a slot holds one stream.
#[derive(Debug, Default)]
pub(crate) struct HeldTokens {
    streams: HashMap<(u8, u32), Held>,
}

#[derive(Debug)]
struct Held {
    generation: u32,
    tokens: Vec<TokenId>,
    /// The pass of the stream's first tokens, if those are among the held ones.
    first: Option<FirstPass>,
    /// The end of the stream, if it waits after its tokens.
    end: Option<End>,
}

impl HeldTokens {
    /// Whether no token waits, which is the usual case.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }

    /// Streams whose tokens wait.
    #[cfg(feature = "sim")]
    pub(crate) fn len(&self) -> usize {
        self.streams.len()
    }

    /// Whether tokens of `addr` wait.
    pub(crate) fn contains(&self, addr: StreamAddr) -> bool {
        self.get(addr).is_some()
    }

    fn get(&self, addr: StreamAddr) -> Option<&Held> {
        let held = self.streams.get(&key(addr))?;
        (held.generation == addr.stream.generation).then_some(held)
    }

    fn get_mut(&mut self, addr: StreamAddr) -> Option<&mut Held> {
        let held = self.streams.get_mut(&key(addr))?;
        (held.generation == addr.stream.generation).then_some(held)
    }

    /// Keeps tokens. Returns whether the stream has just begun to wait.
    pub(crate) fn push(
        &mut self,
        addr: StreamAddr,
        tokens: &[TokenId],
        first: Option<FirstPass>,
    ) -> bool {
        if let Some(held) = self.get_mut(addr) {
            held.tokens.extend_from_slice(tokens);
            return false;
        }
        let held = Held {
            generation: addr.stream.generation,
            tokens: tokens.to_vec(),
            first,
            end: None,
        };
        self.streams.insert(key(addr), held);
        true
    }

    /// Keeps the end of a stream whose tokens wait; false if none do.
    pub(crate) fn end(&mut self, addr: StreamAddr, end: End) -> bool {
        let Some(held) = self.get_mut(addr) else {
            return false;
        };
        held.end = Some(end);
        true
    }

    /// Moves up to `tokens` tokens to `frame`, and then the end. Returns the number of tokens
    /// moved.
    pub(crate) fn release(&mut self, addr: StreamAddr, tokens: u32, frame: &mut PassFrame) -> u32 {
        let Some(held) = self.get_mut(addr) else {
            return 0;
        };
        let count = held.tokens.len().min(tokens as usize);
        frame.push_tokens(
            addr.stream,
            &held.tokens[..count],
            held.first.take_if(|_| count > 0),
        );
        let lost =
            usize::from(slipstream_base::planted!("lost-token") && held.tokens.len() > count);
        held.tokens.drain(..count + lost);
        if held.tokens.is_empty() {
            if let Some(end) = held.end
                && !slipstream_base::planted!("lost-held-end")
            {
                frame.push_end(addr.stream, &end);
            }
            self.streams.remove(&key(addr));
        }
        to_u32(count)
    }

    /// Drops the tokens in the slot of `addr`, of any generation.
    pub(crate) fn forget(&mut self, addr: StreamAddr) {
        if !self.streams.is_empty() {
            self.streams.remove(&key(addr));
        }
    }

    /// Drops all tokens of `shard`. Returns the number of their streams.
    pub(crate) fn forget_shard(&mut self, shard: u8) -> usize {
        let before = self.streams.len();
        self.streams.retain(|&(of, _), _| of != shard);
        before - self.streams.len()
    }

    /// Streams of `shard` whose tokens wait, by slot.
    pub(crate) fn of_shard(&self, shard: u8) -> Vec<StreamAddr> {
        let ours = self.streams.iter().filter(|((of, _), _)| *of == shard);
        let mut ours: Vec<_> = ours
            .map(|(&(shard, slot), held)| StreamAddr {
                shard,
                stream: StreamId {
                    slot,
                    generation: held.generation,
                },
            })
            .collect();
        ours.sort_unstable_by_key(|addr| addr.stream.slot);
        ours
    }
}

fn key(addr: StreamAddr) -> (u8, u32) {
    (addr.shard, addr.stream.slot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_base::FinishReason;
    use slipstream_planes::{Entry, Usage};

    fn addr(slot: u32, generation: u32) -> StreamAddr {
        StreamAddr {
            shard: 1,
            stream: StreamId { slot, generation },
        }
    }

    #[test]
    fn tokens_leave_in_order_with_the_end_behind_them() {
        let mut held = HeldTokens::default();
        let first = FirstPass {
            start_ns: 1,
            end_ns: 2,
        };
        assert!(held.push(addr(3, 7), &[10], Some(first)));
        assert!(!held.push(addr(3, 7), &[11], None));
        assert!(!held.push(addr(3, 7), &[12], None));
        let end = End {
            reason: FinishReason::Stop,
            usage: Usage::default(),
        };
        assert!(held.end(addr(3, 7), end));
        assert!(
            !held.end(addr(3, 8), end),
            "another generation, another stream"
        );
        let mut frame = PassFrame::new();
        assert_eq!(held.release(addr(3, 6), 9, &mut frame), 0);
        assert_eq!(held.release(addr(3, 7), 2, &mut frame), 2);
        assert_eq!(held.release(addr(3, 7), 2, &mut frame), 1);
        assert!(held.is_empty());
        let stream = addr(3, 7).stream;
        let entries: Vec<Entry<'_>> = frame.entries().collect();
        let tokens = |tokens, first| Entry::Tokens {
            stream,
            tokens,
            first,
        };
        assert_eq!(
            entries,
            [
                tokens(&[10, 11], Some(first)),
                tokens(&[12], None),
                Entry::End { stream, end }
            ]
        );
    }

    #[test]
    fn a_shard_that_goes_takes_what_waits_for_it() {
        let mut held = HeldTokens::default();
        held.push(addr(1, 0), &[1], None);
        held.push(addr(2, 0), &[1], None);
        assert_eq!(held.of_shard(1).len(), 2);
        held.forget(addr(1, 5));
        assert_eq!(held.of_shard(1), [addr(2, 0)]);
        assert_eq!((held.forget_shard(0), held.forget_shard(1)), (0, 1));
    }
}
