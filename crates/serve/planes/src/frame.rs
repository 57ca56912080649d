//! Messages: requests and controls to a worker, the outputs of passes back to a shard.

use slipstream_base::width::{low_u32 as low, to_u8, to_u32};
use slipstream_base::{EngineRequest, FinishReason, RankId, Role, TokenId, WorkerId};

use crate::stream::{SLOTS_MAX, StreamAddr, StreamId};

/// A message from a shard to an engine thread.
#[derive(Debug)]
pub enum ToWorker {
    /// A new stream. Answered by [`Entry::Prologue`] or [`Entry::Refused`], then, if accepted, by
    /// tokens and exactly one [`Entry::End`] (none after a [`ToWorker::Kill`]).
    Start(Box<StartRequest>),
    /// End the stream at its current token. Computed tokens still arrive, then
    /// [`Entry::End`] with [`FinishReason::Abort`].
    Stop {
        /// The rank that runs it.
        rank: RankId,
        /// The stream.
        addr: StreamAddr,
    },
    /// The client is gone: free the blocks now, also during a pass, and send nothing.
    Kill {
        /// The rank that runs it.
        rank: RankId,
        /// The stream.
        addr: StreamAddr,
    },
    /// The keys and values for a stream that is an answer ([`Role::Decode`]), and has reserved blocks,
    /// have arrived: it may run. Ignored if the stream is gone.
    Receive {
        /// The rank that runs it.
        rank: RankId,
        /// The stream.
        addr: StreamAddr,
    },
    /// The keys and values of a prompt that was computed here ([`Role::Prefill`]) have been fetched:
    /// its blocks are free, and the stream is over. Ignored if the stream is gone.
    Release {
        /// The rank that runs it.
        rank: RankId,
        /// The stream.
        addr: StreamAddr,
    },
    /// Publish every block that the rank holds: a receiver saw a gap in its KV deltas.
    Resync {
        /// The rank.
        rank: RankId,
    },
    /// More of the prompt of a stream that began with [`StartRequest::more`]. At most the input credit
    /// that the worker has granted ([`Entry::Room`]), 4 bytes per token.
    Input(Box<Input>),
    /// This many more bytes of the stream's tokens (4 each) may be sent.
    Credit {
        /// The rank that runs it.
        rank: RankId,
        /// The stream.
        addr: StreamAddr,
        /// Number of bytes.
        bytes: u32,
    },
    /// The previous sender on this ring disconnected: kill every stream of the address's
    /// shard, then answer [`Entry::End`] for `addr` itself. Messages after that end belong to
    /// the ring's next user.
    HangUp {
        /// Any worker of the thread.
        worker: WorkerId,
        /// The shard, and a stream that was never started.
        addr: StreamAddr,
    },
}

impl ToWorker {
    /// The rank that the message is for.
    pub fn rank(&self) -> RankId {
        match self {
            ToWorker::Start(start) => start.rank,
            ToWorker::Input(input) => input.rank,
            ToWorker::Stop { rank, .. }
            | ToWorker::Kill { rank, .. }
            | ToWorker::Receive { rank, .. }
            | ToWorker::Release { rank, .. }
            | ToWorker::Credit { rank, .. }
            | ToWorker::Resync { rank } => *rank,
            ToWorker::HangUp { worker, .. } => RankId {
                worker: *worker,
                dp_rank: 0,
            },
        }
    }
}

/// Credit without a bound; see [`StartRequest::credit_bytes`].
pub const NO_LIMIT: u32 = u32::MAX;

/// A request for an engine.
#[derive(Clone, Debug)]
pub struct StartRequest {
    /// Destination of the answer.
    pub addr: StreamAddr,
    /// The rank that computes it.
    pub rank: RankId,
    /// The request. Its id is replaced by `addr`, which identifies it to the engine.
    pub request: EngineRequest,
    /// Time at which the shard submitted it, `CLOCK_MONOTONIC` ns.
    pub dispatched_ns: u64,
    /// Bytes of tokens (4 each) that may be sent before more credit is granted; [`NO_LIMIT`] if the
    /// shard itself bounds its memory.
    pub credit_bytes: u32,
    /// Whether the prologue should carry the times of the worker's stages.
    pub traced: bool,
    /// More input follows, in turns: the present input is answered, then the later input after
    /// that answer, until the input ends. The stream's credit is [`NO_LIMIT`] then.
    pub more: bool,
    /// The part that this worker computes; all of it if [`more`](Self::more).
    ///
    /// - [`Role::Prefill`]: it computes the prompt and keeps the blocks. Answered by [`Entry::Prologue`] and
    ///   [`Entry::Computed`] (or by [`Entry::Refused`]); ended by [`ToWorker::Release`] or
    ///   [`ToWorker::Kill`].
    /// - [`Role::Decode`]: it generates the answer to a prompt that another worker computes. Answered by
    ///   [`Entry::Reserved`] once there are blocks for the prompt (or by [`Entry::Refused`]); runs after
    ///   [`ToWorker::Receive`].
    pub role: Role,
    /// Number of the attempt. A request may return to a worker after an attempt that another one failed; answers to
    /// the earlier attempt are recognized by it.
    pub attempt: u8,
}

/// Tokens of a turn that follows the first prompt of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The rank that computes the stream.
    pub rank: RankId,
    /// The stream.
    pub addr: StreamAddr,
    /// The turn's next tokens.
    pub tokens: Box<[TokenId]>,
    /// The turn is complete, and may be answered.
    pub ends_turn: bool,
    /// No input follows: the stream ends after the last answer.
    pub last: bool,
}

/// The stream was accepted and its prompt left the waiting queue. Sent before its first tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prologue {
    /// Prompt tokens found in the KV cache.
    pub hit_tokens: u32,
    /// Time at which the worker received the request, `CLOCK_MONOTONIC` ns; `None` unless traced.
    pub worker_recv_ns: Option<u64>,
    /// Time at which it first left the waiting queue, ns; `None` unless traced.
    pub admitted_ns: Option<u64>,
}

/// The pass that computed a stream's first token, `CLOCK_MONOTONIC` ns (modelled, not measured:
/// the engine's start and end of the pass, independent of the host's delays).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstPass {
    /// Start of the pass.
    pub start_ns: u64,
    /// End of the pass.
    pub end_ns: u64,
}

/// Blocks were reserved for a prompt that another worker computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    /// As in [`StartRequest::attempt`].
    pub attempt: u8,
    /// Leading tokens of the prompt that are cached there and need not be transferred.
    pub cached_tokens: u32,
    /// Time at which the worker received the request, `CLOCK_MONOTONIC` ns; `None` if unknown.
    pub worker_recv_ns: Option<u64>,
    /// Time at which the blocks were reserved (modelled), ns; likewise.
    pub at_ns: Option<u64>,
}

impl Reserved {
    /// The same without its times, if `unknown`: they are of another clock.
    #[must_use]
    pub fn unless(self, unknown: bool) -> Reserved {
        if unknown {
            return Reserved {
                worker_recv_ns: None,
                at_ns: None,
                ..self
            };
        }
        self
    }
}

impl Prologue {
    /// The same without its times, if `unknown`: they are of another clock.
    #[must_use]
    pub fn unless(self, unknown: bool) -> Prologue {
        if unknown {
            return Prologue {
                worker_recv_ns: None,
                admitted_ns: None,
                ..self
            };
        }
        self
    }
}

impl FirstPass {
    /// The same with times of 0, if `unknown`: they are of another clock.
    #[must_use]
    pub fn unless(self, unknown: bool) -> FirstPass {
        if unknown {
            return FirstPass {
                start_ns: 0,
                end_ns: 0,
            };
        }
        self
    }
}

/// Token counts of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Generated tokens.
    pub completion_tokens: u32,
    /// Prompt tokens found in the KV cache.
    pub cached_tokens: u32,
    /// Number of preemptions of the sequence.
    pub preemptions: u32,
}

/// A stream's last entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Why the stream ended.
    pub reason: FinishReason,
    /// Its token counts.
    pub usage: Usage,
}

/// Why a worker refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RefusalReason {
    /// The request can never be served as it is (prompt too long, more blocks than the cache
    /// has). The client's error: 400, no retry.
    Invalid = 0,
    /// The worker has started, but is not ready. Retry elsewhere.
    NotReady = 1,
    /// The rank's waiting queue is full. Retry elsewhere, or later.
    Busy = 2,
    /// The worker is shutting down. Retry elsewhere.
    Stopping = 3,
    /// The worker has no such rank; the caller's view of the fleet is out of date. Retry elsewhere.
    NoSuchRank = 4,
    /// A stream with this address is open: a caller's error. No retry.
    Duplicate = 5,
}

impl RefusalReason {
    /// All reasons, by code.
    pub const ALL: [RefusalReason; 6] = [
        RefusalReason::Invalid,
        RefusalReason::NotReady,
        RefusalReason::Busy,
        RefusalReason::Stopping,
        RefusalReason::NoSuchRank,
        RefusalReason::Duplicate,
    ];

    /// Whether another worker may accept the request.
    pub fn retry_elsewhere(self) -> bool {
        !matches!(self, RefusalReason::Invalid | RefusalReason::Duplicate)
    }
}

/// An entry of a frame: an event of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<'a> {
    /// Accepted and admitted.
    Prologue {
        /// The stream.
        stream: StreamId,
        /// Its prologue.
        prologue: Prologue,
    },
    /// Not accepted. Nothing follows.
    Refused {
        /// The stream.
        stream: StreamId,
        /// As in [`StartRequest`]: a stream may have been started again since.
        attempt: u8,
        /// The reason, as a code.
        reason: RefusalReason,
        /// The reason, for people: the error with its numbers, and the remedy.
        message: &'a str,
    },
    /// New tokens, at least one.
    Tokens {
        /// The stream.
        stream: StreamId,
        /// The tokens, in order.
        tokens: &'a [TokenId],
        /// With a stream's first tokens: the pass that computed the first.
        first: Option<FirstPass>,
    },
    /// The present input is answered; the stream continues with its next input.
    Turn {
        /// The stream.
        stream: StreamId,
        /// Why the answer ended, and its token counts.
        end: End,
    },
    /// Input credit: this many more bytes of input (4 per token) may be sent. The first one also means
    /// that the stream was accepted.
    Room {
        /// The stream.
        stream: StreamId,
        /// Number of bytes.
        bytes: u32,
    },
    /// The prompt is computed, and its blocks are held for the decode worker.
    Computed {
        /// The stream.
        stream: StreamId,
        /// The pass that computed its last token.
        pass: FirstPass,
    },
    /// Blocks are reserved for the prompt, which may be transferred.
    Reserved {
        /// The stream.
        stream: StreamId,
        /// The cached part of the prompt, and the times.
        reserved: Reserved,
    },
    /// The last entry of a stream.
    End {
        /// The stream.
        stream: StreamId,
        /// Why it ended, and its token counts.
        end: End,
    },
}

impl Entry<'_> {
    /// The stream of the entry.
    pub fn stream(&self) -> StreamId {
        match *self {
            Entry::Prologue { stream, .. }
            | Entry::Refused { stream, .. }
            | Entry::Tokens { stream, .. }
            | Entry::Turn { stream, .. }
            | Entry::Room { stream, .. }
            | Entry::Computed { stream, .. }
            | Entry::Reserved { stream, .. }
            | Entry::End { stream, .. } => stream,
        }
    }
}

/// The output of one pass, or of a few in order, for one shard.
///
/// A flat run of 32-bit words, so that a reused frame allocates nothing and a frame can cross a
/// socket unchanged. Word 0 of an entry is `kind << 24 | slot`, word 1 the generation:
///
/// ```text
/// TOKEN    kind|slot  generation  token
/// TOKENS   kind|slot  generation  n  token*n
/// FIRST    kind|slot  generation  n  start.lo start.hi end.lo end.hi  token*n
/// PROLOGUE kind|slot  generation  hit_tokens  recv.lo recv.hi  admitted.lo admitted.hi
/// REFUSED  kind|slot  generation  attempt  reason  text_offset  text_len
/// END      kind|slot  generation  reason  prompt completion cached preemptions
/// TURN     kind|slot  generation  reason  prompt completion cached preemptions
/// ROOM     kind|slot  generation  bytes
/// COMPUTED kind|slot  generation  start.lo start.hi end.lo end.hi
/// RESERVED kind|slot  generation  attempt  cached_tokens  recv.lo recv.hi  at.lo at.hi
/// ```
///
/// An existing frame is well formed: it was built by the `push_*` functions or checked by
/// [`PassFrame::from_parts`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassFrame {
    words: Vec<u32>,
    text: String,
    entries: u32,
    /// Time at which the frame was sent to the response plane, `CLOCK_MONOTONIC` ns.
    pub sent_ns: u64,
}

/// Kinds of entry, as on the wire.
mod kind {
    pub(super) const TOKEN: u32 = 1;
    pub(super) const TOKENS: u32 = 2;
    pub(super) const FIRST: u32 = 3;
    pub(super) const PROLOGUE: u32 = 4;
    pub(super) const REFUSED: u32 = 5;
    pub(super) const END: u32 = 6;
    pub(super) const TURN: u32 = 7;
    pub(super) const ROOM: u32 = 8;
    pub(super) const COMPUTED: u32 = 9;
    pub(super) const RESERVED: u32 = 10;
}

impl PassFrame {
    /// An empty frame.
    pub fn new() -> PassFrame {
        PassFrame::default()
    }

    /// Adds the admission of `stream`.
    pub fn push_prologue(&mut self, stream: StreamId, prologue: &Prologue) {
        let recv = prologue.worker_recv_ns.unwrap_or(0);
        let admitted = prologue.admitted_ns.unwrap_or(0);
        self.push(
            kind::PROLOGUE,
            stream,
            &[
                prologue.hit_tokens,
                low(recv),
                high(recv),
                low(admitted),
                high(admitted),
            ],
        );
    }

    /// Adds the refusal of an `attempt` at `stream` ([`StartRequest::attempt`]).
    pub fn push_refused(
        &mut self,
        stream: StreamId,
        attempt: u8,
        reason: RefusalReason,
        message: &str,
    ) {
        let offset = to_u32(self.text.len());
        self.text.push_str(message);
        self.push(
            kind::REFUSED,
            stream,
            &[attempt.into(), reason as u32, offset, to_u32(message.len())],
        );
    }

    /// Adds tokens of `stream`; `first` with its first ones. Does nothing without tokens.
    #[inline]
    pub fn push_tokens(&mut self, stream: StreamId, tokens: &[TokenId], first: Option<FirstPass>) {
        match (tokens, first) {
            ([], _) => {}
            (&[token], None) => self.push(kind::TOKEN, stream, &[token]),
            (_, None) => {
                self.push(kind::TOKENS, stream, &[to_u32(tokens.len())]);
                self.words.extend_from_slice(tokens);
            }
            (_, Some(first)) => {
                self.push(
                    kind::FIRST,
                    stream,
                    &[
                        to_u32(tokens.len()),
                        low(first.start_ns),
                        high(first.start_ns),
                        low(first.end_ns),
                        high(first.end_ns),
                    ],
                );
                self.words.extend_from_slice(tokens);
            }
        }
    }

    /// Adds the end of `stream`.
    pub fn push_end(&mut self, stream: StreamId, end: &End) {
        let usage = &end.usage;
        self.push(
            kind::END,
            stream,
            &[
                end.reason as u32,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                usage.preemptions,
            ],
        );
    }

    /// Adds the end of a turn of `stream`.
    pub fn push_turn(&mut self, stream: StreamId, end: &End) {
        let usage = &end.usage;
        self.push(
            kind::TURN,
            stream,
            &[
                end.reason as u32,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                usage.preemptions,
            ],
        );
    }

    /// Adds `bytes` of input credit for `stream`.
    pub fn push_room(&mut self, stream: StreamId, bytes: u32) {
        self.push(kind::ROOM, stream, &[bytes]);
    }

    /// Adds that the prompt of `stream` is computed.
    pub fn push_computed(&mut self, stream: StreamId, pass: FirstPass) {
        let (start, end) = (pass.start_ns, pass.end_ns);
        let rest = [low(start), high(start), low(end), high(end)];
        self.push(kind::COMPUTED, stream, &rest);
    }

    /// Adds that blocks are reserved for the prompt of `stream`.
    pub fn push_reserved(&mut self, stream: StreamId, reserved: &Reserved) {
        let recv = reserved.worker_recv_ns.unwrap_or(0);
        let at = reserved.at_ns.unwrap_or(0);
        self.push(
            kind::RESERVED,
            stream,
            &[
                reserved.attempt.into(),
                reserved.cached_tokens,
                low(recv),
                high(recv),
                low(at),
                high(at),
            ],
        );
    }

    #[inline]
    fn push<const N: usize>(&mut self, kind: u32, stream: StreamId, rest: &[u32; N]) {
        debug_assert!(stream.slot < SLOTS_MAX);
        self.words.reserve(2 + N);
        self.words.push(kind << 24 | stream.slot);
        self.words.push(stream.generation);
        self.words.extend_from_slice(rest);
        self.entries += 1;
    }

    /// The entries, in the order in which they were added.
    pub fn entries(&self) -> Entries<'_> {
        Entries {
            words: &self.words,
            text: &self.text,
        }
    }

    /// Entries in the frame.
    pub fn len(&self) -> u32 {
        self.entries
    }

    /// Whether the frame has no entries.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Size of the frame: words of entries, and bytes of text as words.
    pub fn size_words(&self) -> usize {
        self.words.len() + self.text.len() / 4
    }

    /// Empties the frame and keeps its memory.
    pub fn clear(&mut self) {
        self.words.clear();
        self.text.clear();
        self.entries = 0;
        self.sent_ns = 0;
    }

    /// The words and the text of refusals, in their wire format.
    pub fn parts(&self) -> (&[u32], &str) {
        (&self.words, &self.text)
    }

    /// Checks words and text from another process.
    ///
    /// # Errors
    /// [`FrameError`]; close the connection that the frame came from.
    pub fn from_parts(
        words: Vec<u32>,
        text: String,
        sent_ns: u64,
    ) -> Result<PassFrame, FrameError> {
        let entries = check(&words, &text)?;
        Ok(PassFrame {
            words,
            text,
            entries,
            sent_ns,
        })
    }

    /// Same as [`PassFrame::from_parts`], into the memory of this frame, which is emptied first, and empty
    /// after an error.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn refill(
        &mut self,
        words: impl Iterator<Item = u32>,
        text: &str,
        sent_ns: u64,
    ) -> Result<(), FrameError> {
        self.clear();
        self.words.extend(words);
        self.text.push_str(text);
        match check(&self.words, &self.text) {
            Ok(entries) => {
                self.entries = entries;
                self.sent_ns = sent_ns;
                Ok(())
            }
            Err(error) => {
                self.clear();
                Err(error)
            }
        }
    }
}

fn high(x: u64) -> u32 {
    (x >> 32) as u32
}

fn wide(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn present(ns: u64) -> Option<u64> {
    (ns != 0).then_some(ns)
}

fn finish_reason(code: u32) -> Option<FinishReason> {
    [
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::Abort,
    ]
    .into_iter()
    .find(|&reason| reason as u32 == code)
}

fn end_of(body: &[u32]) -> End {
    End {
        reason: finish_reason(body[0]).expect("a frame is checked when it is made"),
        usage: Usage {
            prompt_tokens: body[1],
            completion_tokens: body[2],
            cached_tokens: body[3],
            preemptions: body[4],
        },
    }
}

/// Malformed bytes. The peer has another version, or is broken; do not retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("word {word} of a pass frame: {problem}; frontend and worker should be of one version")]
pub struct FrameError {
    /// First word of the entry.
    pub word: usize,
    /// The error.
    pub problem: FrameProblem,
}

/// An error in an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameProblem {
    /// The frame ends within the entry.
    #[error("the frame ends within the entry")]
    Cut,
    /// Its kind is unknown.
    #[error("no entry has kind {0}")]
    Kind(u32),
    /// A reason code is unknown.
    #[error("unknown reason code {0}")]
    Reason(u32),
    /// The number of attempts exceeds its maximum.
    #[error("attempt {0} is above 255")]
    Attempt(u32),
    /// It declares no tokens.
    #[error("an entry of tokens holds none")]
    NoTokens,
    /// Its text is outside of the frame's, or cuts a character.
    #[error("text {offset}..{offset}+{len} is not in the frame")]
    Text {
        /// First byte.
        offset: u32,
        /// Bytes.
        len: u32,
    },
}

/// Checks all entries, and counts them.
fn check(words: &[u32], text: &str) -> Result<u32, FrameError> {
    let mut entries = 0;
    let mut rest = words;
    while !rest.is_empty() {
        let word = words.len() - rest.len();
        rest = check_entry(rest, text).map_err(|problem| FrameError { word, problem })?;
        entries += 1;
    }
    Ok(entries)
}

/// Checks the entry at the start of `words`, and returns the rest.
fn check_entry<'a>(words: &'a [u32], text: &str) -> Result<&'a [u32], FrameProblem> {
    let &[head, _generation, ref body @ ..] = words else {
        return Err(FrameProblem::Cut);
    };
    let tokens = |fixed: usize| {
        let n = *body.first().ok_or(FrameProblem::Cut)? as usize;
        if n == 0 {
            return Err(FrameProblem::NoTokens);
        }
        Ok(fixed.saturating_add(n))
    };
    let len = match head >> 24 {
        kind::TOKEN | kind::ROOM => 1,
        kind::TOKENS => tokens(1)?,
        kind::FIRST => tokens(5)?,
        kind::PROLOGUE | kind::END | kind::TURN => 5,
        kind::REFUSED | kind::COMPUTED => 4,
        kind::RESERVED => 6,
        other => return Err(FrameProblem::Kind(other)),
    };
    let (entry, rest) = body.split_at_checked(len).ok_or(FrameProblem::Cut)?;
    match head >> 24 {
        kind::END | kind::TURN if finish_reason(entry[0]).is_none() => {
            Err(FrameProblem::Reason(entry[0]))
        }
        kind::RESERVED | kind::REFUSED if entry[0] > u32::from(u8::MAX) => {
            Err(FrameProblem::Attempt(entry[0]))
        }
        kind::REFUSED => {
            let (reason, offset, len) = (entry[1], entry[2], entry[3]);
            let end = offset as usize + len as usize;
            if reason as usize >= RefusalReason::ALL.len() {
                Err(FrameProblem::Reason(reason))
            } else if text.get(offset as usize..end).is_none() {
                Err(FrameProblem::Text { offset, len })
            } else {
                Ok(rest)
            }
        }
        _ => Ok(rest),
    }
}

/// Iterator over the entries of a frame.
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    words: &'a [u32],
    text: &'a str,
}

impl Entries<'_> {
    /// Whether the next entry means that the engine has generated all of `stream`. After an abort the
    /// previous entry need not be the last that the engine had computed.
    #[inline]
    pub fn begin_with_end_of(&self, stream: StreamId) -> bool {
        matches!(
            *self.words,
            [head, generation, reason, ..]
                if head == kind::END << 24 | stream.slot
                    && generation == stream.generation
                    && reason != FinishReason::Abort as u32
        )
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    #[inline]
    fn next(&mut self) -> Option<Entry<'a>> {
        let &[head, generation, ref body @ ..] = self.words else {
            return None;
        };
        let stream = StreamId {
            slot: head & (SLOTS_MAX - 1),
            generation,
        };
        let (entry, rest) = match head >> 24 {
            kind::TOKEN => {
                let (tokens, rest) = body.split_at(1);
                let first = None;
                (
                    Entry::Tokens {
                        stream,
                        tokens,
                        first,
                    },
                    rest,
                )
            }
            kind::TOKENS => {
                let (tokens, rest) = body[1..].split_at(body[0] as usize);
                let first = None;
                (
                    Entry::Tokens {
                        stream,
                        tokens,
                        first,
                    },
                    rest,
                )
            }
            kind::FIRST => {
                let (tokens, rest) = body[5..].split_at(body[0] as usize);
                let first = Some(FirstPass {
                    start_ns: wide(body[1], body[2]),
                    end_ns: wide(body[3], body[4]),
                });
                (
                    Entry::Tokens {
                        stream,
                        tokens,
                        first,
                    },
                    rest,
                )
            }
            kind::PROLOGUE => {
                let prologue = Prologue {
                    hit_tokens: body[0],
                    worker_recv_ns: present(wide(body[1], body[2])),
                    admitted_ns: present(wide(body[3], body[4])),
                };
                (Entry::Prologue { stream, prologue }, &body[5..])
            }
            kind::REFUSED => {
                let (offset, len) = (body[2] as usize, body[3] as usize);
                let reason = RefusalReason::ALL[body[1] as usize];
                let message = &self.text[offset..offset + len];
                (
                    Entry::Refused {
                        stream,
                        attempt: to_u8(body[0]),
                        reason,
                        message,
                    },
                    &body[4..],
                )
            }
            kind::END => {
                let end = end_of(body);
                (Entry::End { stream, end }, &body[5..])
            }
            kind::TURN => {
                let end = end_of(body);
                (Entry::Turn { stream, end }, &body[5..])
            }
            kind::ROOM => {
                let bytes = body[0];
                (Entry::Room { stream, bytes }, &body[1..])
            }
            kind::COMPUTED => {
                let pass = FirstPass {
                    start_ns: wide(body[0], body[1]),
                    end_ns: wide(body[2], body[3]),
                };
                (Entry::Computed { stream, pass }, &body[4..])
            }
            kind::RESERVED => {
                let reserved = Reserved {
                    attempt: to_u8(body[0]),
                    cached_tokens: body[1],
                    worker_recv_ns: present(wide(body[2], body[3])),
                    at_ns: present(wide(body[4], body[5])),
                };
                (Entry::Reserved { stream, reserved }, &body[6..])
            }
            other => unreachable!("a frame is checked when it is made, but has kind {other}"),
        };
        self.words = rest;
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An entry with its own tokens and text, to compare with.
    #[derive(Clone, Debug, PartialEq)]
    enum Owned {
        Prologue(StreamId, Prologue),
        Refused(StreamId, u8, RefusalReason, String),
        Tokens(StreamId, Vec<u32>, Option<FirstPass>),
        Turn(StreamId, End),
        Room(StreamId, u32),
        Computed(StreamId, FirstPass),
        Reserved(StreamId, Reserved),
        End(StreamId, End),
    }

    impl Owned {
        fn of(entry: Entry<'_>) -> Owned {
            match entry {
                Entry::Prologue { stream, prologue } => Owned::Prologue(stream, prologue),
                Entry::Refused {
                    stream,
                    attempt,
                    reason,
                    message,
                } => Owned::Refused(stream, attempt, reason, message.to_owned()),
                Entry::Tokens {
                    stream,
                    tokens,
                    first,
                } => Owned::Tokens(stream, tokens.to_vec(), first),
                Entry::Turn { stream, end } => Owned::Turn(stream, end),
                Entry::Room { stream, bytes } => Owned::Room(stream, bytes),
                Entry::Computed { stream, pass } => Owned::Computed(stream, pass),
                Entry::Reserved { stream, reserved } => Owned::Reserved(stream, reserved),
                Entry::End { stream, end } => Owned::End(stream, end),
            }
        }

        fn push(&self, frame: &mut PassFrame) {
            match self {
                Owned::Prologue(stream, prologue) => frame.push_prologue(*stream, prologue),
                Owned::Refused(stream, attempt, reason, text) => {
                    frame.push_refused(*stream, *attempt, *reason, text);
                }
                Owned::Tokens(stream, tokens, first) => frame.push_tokens(*stream, tokens, *first),
                Owned::Turn(stream, end) => frame.push_turn(*stream, end),
                Owned::Room(stream, bytes) => frame.push_room(*stream, *bytes),
                Owned::Computed(stream, pass) => frame.push_computed(*stream, *pass),
                Owned::Reserved(stream, reserved) => frame.push_reserved(*stream, reserved),
                Owned::End(stream, end) => frame.push_end(*stream, end),
            }
        }
    }

    fn stream() -> impl Strategy<Value = StreamId> {
        (0..SLOTS_MAX, any::<u32>()).prop_map(|(slot, generation)| StreamId { slot, generation })
    }

    fn entry() -> impl Strategy<Value = Owned> {
        let time = prop::option::of(1u64..);
        let prologue = (any::<u32>(), time.clone(), time).prop_map(
            |(hit_tokens, worker_recv_ns, admitted_ns)| Prologue {
                hit_tokens,
                worker_recv_ns,
                admitted_ns,
            },
        );
        let pass =
            any::<(u64, u64)>().prop_map(|(start_ns, end_ns)| FirstPass { start_ns, end_ns });
        let first = prop::option::of(pass.clone());
        let reserved = (
            any::<(u8, u32)>(),
            prop::option::of(1u64..),
            prop::option::of(1u64..),
        )
            .prop_map(
                |((attempt, cached_tokens), worker_recv_ns, at_ns)| Reserved {
                    attempt,
                    cached_tokens,
                    worker_recv_ns,
                    at_ns,
                },
            );
        let reason = prop::sample::select(RefusalReason::ALL.to_vec());
        let finish = prop::sample::select(vec![
            FinishReason::Stop,
            FinishReason::Length,
            FinishReason::Abort,
        ]);
        let end = (finish, any::<[u32; 4]>()).prop_map(|(reason, n)| End {
            reason,
            usage: Usage {
                prompt_tokens: n[0],
                completion_tokens: n[1],
                cached_tokens: n[2],
                preemptions: n[3],
            },
        });
        prop_oneof![
            (stream(), prologue).prop_map(|(s, p)| Owned::Prologue(s, p)),
            (stream(), any::<u8>(), reason, ".{0,40}")
                .prop_map(|(s, a, r, t)| Owned::Refused(s, a, r, t)),
            (stream(), prop::collection::vec(any::<u32>(), 1..9), first)
                .prop_map(|(s, t, f)| Owned::Tokens(s, t, f)),
            (stream(), end.clone()).prop_map(|(s, e)| Owned::End(s, e)),
            (stream(), end).prop_map(|(s, e)| Owned::Turn(s, e)),
            (stream(), any::<u32>()).prop_map(|(s, bytes)| Owned::Room(s, bytes)),
            (stream(), pass).prop_map(|(s, pass)| Owned::Computed(s, pass)),
            (stream(), reserved).prop_map(|(s, reserved)| Owned::Reserved(s, reserved)),
        ]
    }

    proptest! {
        #[test]
        fn what_goes_in_comes_out(entries in prop::collection::vec(entry(), 0..20)) {
            let mut frame = PassFrame::new();
            frame.push_end(StreamId { slot: 1, generation: 1 }, &End {
                reason: FinishReason::Stop,
                usage: Usage::default(),
            });
            frame.clear(); // a reused frame is as good as a new one
            for entry in &entries {
                entry.push(&mut frame);
            }
            prop_assert_eq!(frame.len() as usize, entries.len());
            prop_assert_eq!(frame.is_empty(), entries.is_empty());
            let back: Vec<Owned> = frame.entries().map(Owned::of).collect();
            prop_assert_eq!(&back, &entries);
            let (words, text) = frame.parts();
            let copy = PassFrame::from_parts(words.to_vec(), text.to_owned(), 0).unwrap();
            prop_assert_eq!(copy, frame);
        }

        /// Cut and changed words either are rejected or can be read to their end.
        #[test]
        fn a_frame_from_elsewhere_never_panics(
            entries in prop::collection::vec(entry(), 1..6),
            cut: prop::sample::Index,
            changes in prop::collection::vec((any::<prop::sample::Index>(), 0u32..9, 0u32..32), 0..4),
        ) {
            let mut frame = PassFrame::new();
            for entry in &entries {
                entry.push(&mut frame);
            }
            let (words, text) = frame.parts();
            let mut words = words[..cut.index(words.len() + 1)].to_vec();
            for (at, value, shift) in changes {
                if !words.is_empty() {
                    let at = at.index(words.len());
                    words[at] ^= value << shift;
                }
            }
            if let Ok(read) = PassFrame::from_parts(words, text.to_owned(), 0) {
                prop_assert_eq!(read.entries().count(), read.len() as usize);
            }
        }
    }

    #[test]
    fn bad_frames_say_what_is_wrong() {
        let token = [1 << 24, 0, 42];
        let check = |words: &[u32], text: &str, word, problem| {
            let words = [&token, words].concat();
            let error = PassFrame::from_parts(words, text.into(), 0).unwrap_err();
            assert_eq!(error, FrameError { word, problem });
        };
        check(&[1 << 24], "", 3, FrameProblem::Cut);
        check(&[1 << 24, 0], "", 3, FrameProblem::Cut);
        check(&[2 << 24, 0, 3, 7, 7], "", 3, FrameProblem::Cut);
        check(&[2 << 24, 0, u32::MAX], "", 3, FrameProblem::Cut);
        check(&[2 << 24, 0, 0], "", 3, FrameProblem::NoTokens);
        check(&[77 << 24, 0, 0], "", 3, FrameProblem::Kind(77));
        check(&[6 << 24, 0, 9, 0, 0, 0, 0], "", 3, FrameProblem::Reason(9));
        check(&[7 << 24, 0, 9, 0, 0, 0, 0], "", 3, FrameProblem::Reason(9));
        check(&[8 << 24, 0], "", 3, FrameProblem::Cut);
        check(&[9 << 24, 0, 1, 2, 3], "", 3, FrameProblem::Cut);
        check(
            &[10 << 24, 0, 256, 0, 0, 0, 0, 0],
            "",
            3,
            FrameProblem::Attempt(256),
        );
        check(
            &[5 << 24, 0, 256, 0, 0, 0],
            "",
            3,
            FrameProblem::Attempt(256),
        );
        check(&[5 << 24, 0, 0, 99, 0, 0], "", 3, FrameProblem::Reason(99));
        let text = FrameProblem::Text { offset: 1, len: 1 };
        check(&[5 << 24, 0, 0, 0, 1, 1], "é", 3, text);
    }

    #[test]
    fn one_token_is_three_words() {
        let mut frame = PassFrame::new();
        let stream = StreamId {
            slot: 5,
            generation: 6,
        };
        frame.push_tokens(stream, &[9], None);
        frame.push_tokens(stream, &[], None);
        assert_eq!(frame.parts().0, [1 << 24 | 5, 6, 9]);
        assert_eq!(frame.len(), 1);
    }
}
