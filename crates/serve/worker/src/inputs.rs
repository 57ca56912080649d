//! Streams with duplex input: the conversation so far, and the turns that wait to be answered.
//!
//! A turn is answered as a separate request, whose prompt is the whole conversation, answers
//! included; the prefix cache makes that cheap. (vLLM keeps the blocks of such a request between
//! its turns; here they may be evicted, like those of any prompt.)
//!
//! Input credit is granted like credit for tokens in the other direction. Input of the next turn
//! frees credit at once; input that waits for an answer frees it only when its turn begins.

use std::collections::HashMap;

use slipstream_base::width::to_u32;
use slipstream_base::{
    EngineRequest, FinishReason, GenerationParams, Prompt, RequestId, TokenId, mix,
};
use slipstream_planes::{End, Input, StreamAddr, Usage};

/// Maximum bytes of input that may wait for one stream's answers (4 per token).
pub(crate) const ROOM_BYTES: u32 = 64 << 10;

const TOKEN_BYTES: u32 = TokenId::BITS / 8;

/// The open inputs of an engine thread, by shard and slot.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    streams: HashMap<(u8, u32), DuplexStream>,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct DuplexStream {
    generation: u32,
    /// The conversation up to and including the present turn.
    prompt: Prompt,
    /// The answer to the present turn so far.
    answer: Vec<TokenId>,
    /// Input that no turn has taken yet.
    waiting: Vec<TokenId>,
    /// Lengths of the complete turns in `waiting`.
    turns: std::collections::VecDeque<usize>,
    /// Bytes of input credit that the shard has left.
    room_bytes: u32,
    last: bool,
    answering: bool,
    /// Number of turns begun.
    begun: u64,
    params: GenerationParams,
    priority: i32,
    seed: u64,
    /// Why the last answered turn ended.
    reason: FinishReason,
    /// Completion tokens of the finished turns.
    completion_tokens: u32,
    preemptions: u32,
    /// Cached tokens of the first turn.
    cached_tokens: Option<u32>,
    /// Tokens of input.
    input_tokens: u32,
}

/// Why input is rejected: the stream must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

impl Inputs {
    /// Records a stream whose first turn is being answered.
    pub(crate) fn begin(&mut self, addr: StreamAddr, request: &EngineRequest) {
        let duplex = DuplexStream {
            generation: addr.stream.generation,
            prompt: request.prompt.clone(),
            answer: Vec::new(),
            waiting: Vec::new(),
            turns: std::collections::VecDeque::new(),
            room_bytes: 0,
            last: false,
            answering: true,
            begun: 1,
            params: request.params.clone(),
            priority: request.priority,
            seed: request.seed,
            reason: FinishReason::Stop,
            completion_tokens: 0,
            preemptions: 0,
            cached_tokens: None,
            input_tokens: request.prompt.len(),
        };
        self.streams.insert(key(addr), duplex);
    }

    /// The stream at `addr`, if its input is open.
    pub(crate) fn get_mut(&mut self, addr: StreamAddr) -> Option<&mut DuplexStream> {
        let duplex = self.streams.get_mut(&key(addr))?;
        (duplex.generation == addr.stream.generation).then_some(duplex)
    }

    /// Removes the stream at `addr`, and returns its state, if it was there.
    pub(crate) fn remove(&mut self, addr: StreamAddr) -> Option<DuplexStream> {
        if self.streams.is_empty() {
            return None; // the usual case
        }
        self.get_mut(addr)?;
        self.streams.remove(&key(addr))
    }
}

impl DuplexStream {
    /// Adds received input.
    ///
    /// # Errors
    /// [`Overrun`] if it exceeds the credit, or follows the last input.
    pub(crate) fn take(&mut self, input: &Input) -> Result<(), Overrun> {
        let bytes = u32::try_from(input.tokens.len())
            .unwrap_or(u32::MAX)
            .saturating_mul(TOKEN_BYTES);
        if bytes > self.room_bytes || self.last {
            return Err(Overrun);
        }
        self.room_bytes -= bytes;
        self.waiting.extend_from_slice(&input.tokens);
        if input.ends_turn {
            let known: usize = self.turns.iter().sum();
            self.turns.push_back(self.waiting.len() - known);
        }
        self.last |= input.last;
        Ok(())
    }

    /// Input credit to grant to the shard, bytes.
    pub(crate) fn room_due(&mut self) -> u32 {
        // The next turn counts as taken: its length is bounded by the model's.
        let held = if self.answering {
            to_u32(self.waiting.len()) * TOKEN_BYTES
        } else {
            0
        };
        let due = ROOM_BYTES
            .saturating_sub(held)
            .saturating_sub(self.room_bytes);
        self.room_bytes += due;
        due
    }

    /// Adds tokens that the engine computed.
    pub(crate) fn on_tokens(&mut self, tokens: &[TokenId]) {
        self.answer.extend_from_slice(tokens);
    }

    /// Records the number of cached tokens of the present turn's prompt.
    pub(crate) fn on_cached(&mut self, tokens: u32) {
        self.cached_tokens.get_or_insert(tokens);
    }

    /// Ends the answer to the present turn. Returns whether the stream is over.
    pub(crate) fn on_answered(&mut self, reason: FinishReason, preemptions: u32) -> bool {
        self.answering = false;
        self.reason = reason;
        self.completion_tokens += to_u32(self.answer.len());
        self.preemptions += preemptions;
        self.is_over()
    }

    /// Whether nothing is left to answer, and no input to come.
    pub(crate) fn is_over(&self) -> bool {
        self.last && !self.answering && self.turns.is_empty()
    }

    /// Its end, once it is over.
    pub(crate) fn end(&self) -> End {
        End {
            reason: self.reason,
            usage: self.usage(),
        }
    }

    /// Whether the engine is answering a turn.
    pub(crate) fn is_answering(&self) -> bool {
        self.answering
    }

    /// Tokens of input that wait for their turn's end.
    pub(crate) fn gathered(&self) -> usize {
        self.waiting.len()
    }

    /// The next turn's request, if one is complete and none is being answered.
    pub(crate) fn next_turn(&mut self, addr: StreamAddr) -> Option<EngineRequest> {
        if self.answering {
            return None;
        }
        let len = self.turns.pop_front()?;
        let mut said = std::mem::take(&mut self.answer);
        said.extend(self.waiting.drain(..len));
        self.prompt = self
            .prompt
            .extended(&said)
            .expect("a prompt with more input to come has its tokens, and fewer than 2^32");
        self.input_tokens += to_u32(len);
        self.answering = true;
        let turn = self.begun;
        self.begun += 1;
        Some(EngineRequest {
            id: RequestId::from(addr),
            prompt: self.prompt.clone(),
            params: self.params.clone(),
            priority: self.priority,
            seed: mix::draw(self.seed, turn),
        })
    }

    /// The stream's token counts, with `completion_tokens` of an unfinished turn.
    pub(crate) fn usage(&self) -> Usage {
        let running = if self.answering {
            to_u32(self.answer.len())
        } else {
            0
        };
        Usage {
            prompt_tokens: self.input_tokens,
            completion_tokens: self.completion_tokens + running,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            preemptions: self.preemptions,
        }
    }
}

fn key(addr: StreamAddr) -> (u8, u32) {
    (addr.shard, addr.stream.slot)
}

#[cfg(test)]
mod tests {
    use slipstream_base::{BlockHash, RankId};
    use slipstream_planes::StreamId;

    use super::*;

    fn addr(generation: u32) -> StreamAddr {
        StreamAddr {
            shard: 0,
            stream: StreamId {
                slot: 3,
                generation,
            },
        }
    }

    fn request(tokens: &[TokenId]) -> EngineRequest {
        EngineRequest {
            id: RequestId::from(addr(1)),
            prompt: Prompt::from_tokens(tokens, 4, BlockHash(1)).unwrap(),
            params: GenerationParams::default(),
            priority: 0,
            seed: 7,
        }
    }

    fn input(tokens: &[TokenId], ends_turn: bool, last: bool) -> Input {
        Input {
            rank: RankId::default(),
            addr: addr(1),
            tokens: tokens.into(),
            ends_turn,
            last,
        }
    }

    #[test]
    fn a_turn_goes_on_with_all_that_was_said() {
        let mut inputs = Inputs::default();
        inputs.begin(addr(1), &request(&[1, 2, 3]));
        assert!(inputs.get_mut(addr(2)).is_none(), "another generation");
        let duplex = inputs.get_mut(addr(1)).unwrap();
        assert_eq!(duplex.room_due(), ROOM_BYTES, "accepted");
        duplex.take(&input(&[20], false, false)).unwrap();
        duplex.take(&input(&[21], true, false)).unwrap();
        duplex.take(&input(&[30], true, true)).unwrap();
        assert_eq!(
            duplex.next_turn(addr(1)),
            None,
            "the first is being answered"
        );
        assert_eq!(duplex.room_due(), 0, "what waits takes room");
        for token in [10, 11] {
            duplex.on_tokens(&[token]);
        }
        assert!(!duplex.on_answered(FinishReason::Length, 0));
        let turn = duplex.next_turn(addr(1)).unwrap();
        assert_eq!(turn.prompt, request(&[1, 2, 3, 10, 11, 20, 21]).prompt);
        assert_eq!(duplex.room_due(), 8, "of what the turn took");
        duplex.on_tokens(&[12]);
        assert!(!duplex.on_answered(FinishReason::Length, 1));
        let turn = duplex.next_turn(addr(1)).unwrap();
        assert_eq!(
            turn.prompt,
            request(&[1, 2, 3, 10, 11, 20, 21, 12, 30]).prompt
        );
        assert!(
            duplex.on_answered(FinishReason::Length, 0),
            "nothing is left"
        );
        let usage = duplex.usage();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (6, 3));
        assert_eq!(usage.preemptions, 1);
        assert!(inputs.remove(addr(2)).is_none());
        assert!(inputs.remove(addr(1)).is_some());
    }

    #[test]
    fn more_than_there_is_room_for_or_after_the_last_is_refused() {
        let mut inputs = Inputs::default();
        inputs.begin(addr(1), &request(&[1]));
        let duplex = inputs.get_mut(addr(1)).unwrap();
        assert_eq!(
            duplex.take(&input(&[1], true, false)),
            Err(Overrun),
            "early"
        );
        duplex.room_due();
        let most = vec![5; (ROOM_BYTES / TOKEN_BYTES) as usize];
        duplex.take(&input(&most, false, false)).unwrap();
        assert_eq!(duplex.room_due(), 0);
        assert_eq!(duplex.take(&input(&[1], false, false)), Err(Overrun));
        // The turn that is next in line may be longer than what may wait.
        duplex.on_answered(FinishReason::Length, 0);
        assert_eq!(duplex.room_due(), ROOM_BYTES);
        duplex.take(&input(&most, true, true)).unwrap();
        assert_eq!(duplex.take(&input(&[], false, true)), Err(Overrun));
        let turn = duplex.next_turn(addr(1)).unwrap();
        assert_eq!(turn.prompt.len() as usize, 1 + 2 * most.len());
    }
}
