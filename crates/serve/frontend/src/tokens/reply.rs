//! The answer to one HTTP request while it is being made.
//!
//! ```text
//!   PassFrame ─► Shard::drain ─► stream table ─► Reply::on_tokens ─► `out` (rendered events)
//!                                                   │ more than RENDERED_BYTES_MAX unread?
//!                                                   └─► `held` (tokens, 4 bytes each)
//!   hyper polls ReplyBody::poll_frame ◄── `out`, then what `held` renders to
//! ```
//!
//! A reply has one *sequence* for each choice of each prompt. It lives in an `Rc` shared by the
//! stream table (which feeds it) and by the HTTP side (which owns it: dropping [`ReplyHandle`] kills
//! parts that are still under way).

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};
use hyper::body::Frame;
use slipstream_base::width::{low_u32, to_u32, to_usize};
use slipstream_base::{FinishReason, RankId, Stage, StageTimes, TokenId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::link::yield_turn;
use slipstream_planes::{End, FirstPass, Prologue, Registration, StreamAddr, ToWorker};
use slipstream_recorder::{RecordedRequest, RecorderHandle};
use tokio::time::Sleep;

use crate::door::access::AnswerEnd;
use crate::door::account::{Account, TokenCounts};
use crate::door::body::AnswerBody;
use crate::door::budget::Charge;
use crate::door::connection::Client;
use crate::door::management::AdapterUse;
use crate::door::metrics::{FinishedSequence, ShardMetrics};
use crate::openai::{
    ApiError, CallDelta, CompletionApi, Finish, Head, LogprobsPiece, Out, SseRender, TokenLogprob,
    UnaryRender, Usage, WholeAnswer, WholeCall,
};
use crate::text::{Detokenizer, StopMatcher, TextModel};
use crate::tokens::script::{Script, ScriptedCall, SharedScript, Show, call_id};
use crate::tokens::vocab::AnswerVocab;
use crate::tokens::workers::Workers;

/// Rendered bytes that may wait for one client. Beyond that its tokens are kept as numbers, a
/// fiftieth of the size, until the client has read: 1,024 streams without a reader then hold
/// 8 MiB of text and not 200. One write of 8 KiB carries about 42 tokens; at twice that a token
/// cost no less, and 1,024 streams 10 MiB more. Less by an event, so that
/// the last one does not double the buffer.
const RENDERED_BYTES_MAX: usize = (8 << 10) - EVENT_BYTES;

/// Pieces in which a whole answer is rendered, bytes: some 60 µs with log probabilities.
const SLICE_BYTES: usize = 32 << 10;

/// A whole answer up to this size is sent in one piece, with its length.
const WHOLE_BYTES_MAX: usize = 64 << 10;

/// Times that rendered events are refilled from tokens before other clients have a turn. The socket of a
/// fast reader takes megabytes in one go.
const REFILLS_PER_TURN: u32 = 8;

/// Memory of a reply and of each of its sequences, bytes.
pub(crate) const REPLY_BYTES: u64 = 4 << 10;
pub(crate) const SEQUENCE_BYTES: u64 = 1 << 10;

/// Memory of a token of a whole answer: its text, and its number if log probabilities follow.
const WHOLE_TOKEN_BYTES: u64 = 16;

/// Room for nearly any event.
const EVENT_BYTES: usize = 512;

/// Room that a stream keeps for its next events once the shard has written those before.
const WRITTEN_BYTES_KEPT: usize = 2 << 10;

/// Makes room for an event. A buffer that grows by itself ends at odd sizes, up to twice the bound.
#[inline]
fn make_room(out: &mut BytesMut) {
    let len = out.len();
    if out.capacity() - len < EVENT_BYTES {
        let size = (len + EVENT_BYTES).next_power_of_two().max(2 << 10);
        out.reserve(size - len);
    }
}

/// Entry of the stream table: which sequence of which reply it feeds.
pub(crate) struct StreamSlot {
    pub(crate) reply: Rc<Reply>,
    pub(crate) sequence: u32,
    pub(crate) role: StreamRole,
}

/// Which of a sequence's streams it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamRole {
    /// Its tokens come by it.
    Answer,
    /// The worker that computes its prompt for another one reports by it.
    Prefill {
        /// Number of the request in the dispatcher.
        id: u32,
    },
}

/// Effect of tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    /// They are the first ones of the sequence.
    pub(crate) begins: bool,
    /// The worker should stop: a stop string was found, or the reply has failed.
    pub(crate) kill: bool,
    /// It is to be written at the end of the turn ([`Shard::write_some`]).
    pub(crate) due: bool,
}

/// Whether the shard writes events to the socket itself (`direct.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direct {
    /// The client's side takes all events.
    Off,
    /// As soon as the head of the answer and its first events are written.
    Allowed,
    On,
}

/// See the module's text.
pub(crate) struct Reply {
    pub(crate) state: RefCell<ReplyState>,
    /// Its streams, until they are closed.
    streams: RefCell<Vec<Registration<StreamSlot>>>,
    /// Whose it is.
    pub(crate) client: Client,
    /// When it has to be complete, `CLOCK_MONOTONIC` ns.
    deadline_ns: Option<u64>,
}

/// Why a reply is ended from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overdue {
    /// It was not complete in time.
    Deadline,
    /// Its client has read nothing for too long.
    Unread,
}

impl Reply {
    pub(crate) fn new(state: ReplyState, client: Client, deadline_ns: Option<u64>) -> Reply {
        Reply {
            state: RefCell::new(state),
            streams: RefCell::default(),
            client,
            deadline_ns,
        }
    }

    /// Its streams, which are closed by now. The caller takes them off their workers.
    pub(crate) fn take_streams(&self) -> Vec<Registration<StreamSlot>> {
        self.streams.take()
    }

    /// Gives the stream of sequence `index` a new address, which frames of its former workers do not have.
    /// `None` if it is closed.
    pub(crate) fn renew_stream(&self, index: u32) -> Option<StreamAddr> {
        let mut streams = self.streams.borrow_mut();
        let stream = streams.get_mut(index as usize)?;
        stream.renew();
        Some(stream.addr())
    }

    /// Whether it has to end, at tick `tick` of the shard and time `now_ns`. A client may leave what waits
    /// for it unread for `ticks_max` ticks.
    pub(crate) fn overdue(&self, tick: u64, ticks_max: u64, now_ns: u64) -> Option<Overdue> {
        let mut state = self.state.borrow_mut();
        if state.delivered || state.cut {
            return None;
        }
        if self.deadline_ns.is_some_and(|deadline| now_ns >= deadline) {
            return Some(Overdue::Deadline);
        }
        if !state.waits_for_client() {
            state.polled_tick = tick;
            return None;
        }
        (tick - state.polled_tick > ticks_max).then_some(Overdue::Unread)
    }
}

pub(crate) struct ReplyState {
    shape: Shape,
    sequences: Vec<Sequence>,
    /// Sequences that have not ended.
    open: u32,
    /// Times that sequences went to another worker before, and after their first token.
    pub(crate) retries: u32,
    resumes: u32,
    out: BytesMut,
    /// The events that open each choice are rendered. That waits for the first token: a client that
    /// times the first event measures the prompt's computation, as with vLLM.
    opened: bool,
    /// All events, `[DONE]` included, are in `out` or gone.
    complete: bool,
    /// The reply failed: what to answer instead, if nothing of it is sent yet.
    error: Option<ApiError>,
    /// The client's side has taken all of it.
    delivered: bool,
    /// It never became a response.
    rejected: bool,
    /// A pause has been counted since the client last caught up.
    paused: bool,
    /// A whole answer is being rendered, and does not change.
    rendering: bool,
    /// It was ended from outside; nothing more is rendered.
    cut: bool,
    /// Tick of the shard at which the client's side last asked for more.
    polled_tick: u64,
    /// Sequences whose event with the reason is rendered.
    closed: usize,
    /// Its memory, bytes, and the charge for it.
    kept_bytes: u64,
    /// Of these, those that it takes from its begin to its end.
    base_bytes: u64,
    charge: Option<Charge>,
    unread_bytes_max: usize,
    waker: Option<Waker>,
    direct: Direct,
    /// It waits for its turn to be written by the shard.
    due: bool,
    /// Room for input from the client, if more may come.
    input: InputState,
    pub(crate) times: StageTimes,
    trace: Option<Trace>,
    /// The adapter that it uses.
    pub(crate) adapter: Option<AdapterUse>,
}

/// The input of a request with more to come.
#[derive(Default)]
struct InputState {
    /// Room that the worker has given and that is not used, bytes.
    room_bytes: u64,
    /// The reader of the body.
    waker: Option<Waker>,
    /// The answer has no reader any more.
    over: bool,
    /// Turns that the client has asked for, and those that are answered.
    turns_asked: u64,
    turns_answered: u64,
}

/// Fields that the events of a reply repeat. Constant but for `prompt_tokens`, which grows with the turns of a duplex
/// request.
pub(crate) struct Shape {
    pub(crate) kind: CompletionApi,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Rc<str>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Every event carries the counts of its choice so far.
    pub(crate) running_usage: bool,
    /// Tokens of all prompts, each counted once.
    pub(crate) prompt_tokens: u64,
    /// Sequences per prompt.
    pub(crate) choices_per_prompt: u32,
}

impl Shape {
    pub(crate) fn head(&self) -> Head<'_> {
        Head {
            kind: self.kind,
            id: &self.id,
            created: self.created,
            model: &self.model,
            include_usage: self.include_usage,
        }
    }
}

/// Data of a traced request at its end, in addition to stage times.
pub(crate) struct Trace {
    /// Tokens per block of the engines, at least 1.
    pub(crate) block_size: u32,
    /// JSON array of the candidates' scores, as the router saw them.
    pub(crate) scores: String,
}

/// How one sequence's tokens become text.
pub(crate) struct SequenceSpec {
    pub(crate) target: RankId,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u32,
    /// Tokens that were asked for at most.
    pub(crate) max_tokens: u32,
    pub(crate) seed: u64,
    /// Number of alternatives per token; `None`: no log probabilities.
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) stop: Option<StopMatcher>,
    /// The stop strings that the matcher counts.
    pub(crate) stops: Rc<[String]>,
    /// The sequence runs to `max_tokens`.
    pub(crate) ignores_eos: bool,
    /// Before this many tokens no stop string ends the sequence.
    pub(crate) min_tokens: u32,
    /// No stop strings and no log probabilities: a token's event needs nothing but its text.
    pub(crate) plain: bool,
    /// Completions with `echo`: the prompt's text, which the first token's event begins with.
    pub(crate) echo: Option<Rc<str>>,
    /// The echo has log probabilities.
    pub(crate) scores_echo: bool,
    /// The answer shows the echo only: its one token is counted, and not shown.
    pub(crate) echo_only: bool,
    pub(crate) stop_token_ids: Rc<[TokenId]>,
    /// Ids of the prompt's tokens, if the answer has them and those of its own.
    pub(crate) prompt_ids: Option<Rc<[TokenId]>>,
    /// Ids of the prompt's tokens, if the answer has their log probabilities: by `prompt_logprobs`, or as an
    /// echo's.
    pub(crate) scored_prompt: Option<Rc<[TokenId]>>,
    /// Number of alternatives per token of `prompt_logprobs`; `None`: there are none.
    pub(crate) prompt_tops: Option<u32>,
    /// Tokens of the answer, if they are limited: the engine's are replaced by these.
    pub(crate) vocab: Option<Rc<AnswerVocab>>,
    /// The answer, if it is decided already: its tokens are shown in place of the engine's.
    pub(crate) script: SharedScript,
    /// Its line in the record as far as it is known at the start, if there is a record.
    pub(crate) recorded: Option<Box<RecordedRequest>>,
}

/// Tokens of a sequence that reached the shard together: those of one step of its engine. They share an
/// event, as with vLLM.
pub(crate) struct NewTokens<'a> {
    /// At least one.
    pub(crate) tokens: &'a [TokenId],
    /// With a sequence's first tokens: the pass that made the first.
    pub(crate) first: Option<FirstPass>,
    /// The sequence's end is the next entry of the frame.
    pub(crate) end_follows: bool,
    /// When they came, `CLOCK_MONOTONIC` ns.
    pub(crate) now_ns: u64,
}

struct Sequence {
    spec: SequenceSpec,
    /// Which choice it is, and the answer's id: ids of calls are made of them.
    index: usize,
    answer_id: Rc<str>,
    /// The worker that computed its prompt, if not the worker that generates.
    prefilled: Option<RankId>,
    /// Bytes of tokens that the worker may have sent, all in all.
    granted_bytes: u64,
    /// Credit that is given when half of it is used up, bytes; `NO_LIMIT`: none is needed.
    credit_bytes: u32,
    render: SseRender,
    detok: Detokenizer,
    /// Tokens that wait (streams): for the client to read, and those of the last step for the sequence's
    /// end, with which they share an event.
    held: VecDeque<TokenId>,
    /// Of the tokens in `held`, those that share an event: the position of the first of them, and how many
    /// there are. Runs of one are not listed.
    held_runs: VecDeque<(u64, u32)>,
    /// Text of the step that completed a stop string, for the event with the reason.
    stopped: Option<Piece>,
    /// The answer so far (whole answers).
    text: String,
    /// Positions and numbers of the tokens that have log probabilities (whole answers). They follow from
    /// these, so they are made when they are rendered: they take a hundred times the memory.
    logprob_tokens: Vec<(u32, TokenId)>,
    /// Ids of the tokens (whole answers), if the answer has them.
    ids: Vec<TokenId>,
    /// Characters of text rendered, for `text_offset`.
    text_chars: u64,
    /// Tokens rendered, or consumed by a stop matcher: the position of the next one.
    position: u64,
    generated: u32,
    /// Tokens that came from workers before the present one.
    resumed_at: u32,
    cached: u32,
    preemptions: u32,
    last_token_ns: u64,
    last_token: TokenId,
    ended: Option<Ending>,
    /// Turns that are answered, and whose events are not rendered: their tokens wait for the client.
    turns: VecDeque<(u32, FinishReason)>,
    /// No engine took it.
    refused: bool,
    /// Counted as ended in [`ReplyState::open`].
    over: bool,
    /// The event with the reason is rendered.
    closed: bool,
}

/// Text that the tokens of a step add to a streamed answer.
#[derive(Default)]
struct Piece {
    shown: String,
    logprobs: Option<LogprobsPiece>,
    /// Parts of calls of tools.
    calls: Vec<CallDelta>,
    /// All tokens are frames of calls: no event is sent for them, as with vLLM.
    hidden: bool,
}

#[derive(Clone, Debug)]
enum Ending {
    Engine(FinishReason),
    StopString(String),
}

impl ReplyState {
    pub(crate) fn new(
        shape: Shape,
        specs: Vec<SequenceSpec>,
        times: StageTimes,
        trace: Option<Trace>,
        unread_bytes_max: usize,
        charge: Option<Charge>,
    ) -> ReplyState {
        let head = shape.head();
        let answer_id: Rc<str> = shape.id.as_str().into();
        let sequences: Vec<Sequence> = specs
            .into_iter()
            .enumerate()
            .map(|(index, spec)| Sequence {
                render: {
                    let mut render = SseRender::new(&head, to_u32(index));
                    if let Some(prompt) = spec.prompt_ids.as_ref().filter(|_| shape.stream) {
                        render = render.with_token_ids(prompt.clone());
                    }
                    if shape.running_usage {
                        render.with_running_usage(u64::from(spec.prompt_tokens))
                    } else {
                        render
                    }
                },
                index,
                answer_id: answer_id.clone(),
                prefilled: None,
                granted_bytes: 0,
                credit_bytes: NO_LIMIT,
                detok: Detokenizer::default(),
                held: VecDeque::new(),
                held_runs: VecDeque::new(),
                stopped: None,
                text: String::new(),
                logprob_tokens: Vec::new(),
                ids: Vec::new(),
                text_chars: 0,
                position: 0,
                generated: 0,
                resumed_at: 0,
                cached: 0,
                preemptions: 0,
                last_token_ns: 0,
                last_token: 0,
                ended: None,
                turns: VecDeque::new(),
                refused: false,
                over: false,
                closed: false,
                spec,
            })
            .collect();
        let mut state = ReplyState {
            open: to_u32(sequences.len()),
            retries: 0,
            resumes: 0,
            sequences,
            shape,
            out: BytesMut::new(),
            opened: false,
            complete: false,
            error: None,
            delivered: false,
            rejected: false,
            paused: false,
            rendering: false,
            cut: false,
            polled_tick: 0,
            closed: 0,
            kept_bytes: charge.as_ref().map_or(0, Charge::bytes),
            base_bytes: charge.as_ref().map_or(0, Charge::bytes),
            charge,
            unread_bytes_max,
            waker: None,
            direct: Direct::Off,
            due: false,
            input: InputState {
                turns_asked: 1,
                ..InputState::default()
            },
            times,
            trace,
            adapter: None,
        };
        if !state.shape.stream {
            let per_prompt = state.shape.choices_per_prompt.max(1) as usize;
            for choices in state.sequences.chunks_mut(per_prompt) {
                // Counted once: the choices of a prompt share it.
                let echo = choices[0].spec.echo.as_ref();
                let chars = echo.map_or(0, |echo| echo.chars().count() as u64);
                for sequence in choices {
                    sequence.text_chars += chars;
                }
            }
        }
        state
    }

    /// Renders the events that open the choices, all at the first token of any, as vLLM does.
    #[cold]
    fn open_choices(&mut self) {
        self.opened = true;
        for sequence in &self.sequences {
            sequence.render.role(&mut self.out);
        }
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        if self.complete {
            self.wake_input();
        }
    }

    /// Events are rendered: the shard writes them at the end of its turn (true, once), or the client's side is
    /// woken to take them.
    #[inline]
    fn announce(&mut self) -> bool {
        let writes = self.direct == Direct::On && self.waker.is_some();
        if writes && !self.complete && !self.paused {
            return !std::mem::replace(&mut self.due, true);
        }
        self.wake();
        false
    }

    /// Events that the shard may write itself, although it is no longer the same turn. Otherwise the client's
    /// side has been woken to take them.
    pub(crate) fn take_due(&mut self) -> Option<&[u8]> {
        self.due = false;
        if self.complete || self.paused {
            self.wake();
        }
        // Without a waker the client's side is about to look.
        (self.waker.is_some() && !self.out.is_empty()).then_some(&self.out)
    }

    /// The shard has written them. `wake`: the client's side is needed for a rest.
    pub(crate) fn on_written(&mut self, wake: bool) {
        self.out.clear();
        if self.out.capacity() > WRITTEN_BYTES_KEPT {
            self.out = BytesMut::new();
        }
        if wake {
            self.wake();
        }
    }

    /// The shard may not write them now.
    pub(crate) fn on_unwritten(&mut self) {
        self.wake();
    }

    /// The worker has room for so much more input.
    pub(crate) fn on_room(&mut self, bytes: u32) {
        self.input.room_bytes = self.input.room_bytes.saturating_add(bytes.into());
        self.wake_input();
    }

    /// The client asks for one more turn of at most `max_tokens`, with `tokens` of input.
    pub(crate) fn on_turn_asked(&mut self, max_tokens: u32, tokens: u64) {
        self.input.turns_asked += 1;
        self.shape.prompt_tokens += tokens;
        let spec = &mut self.sequences[0].spec;
        spec.max_tokens = spec.max_tokens.saturating_add(max_tokens);
    }

    /// So many tokens of input are on their way. Sent input cannot be sent again elsewhere.
    pub(crate) fn on_input_sent(&mut self, tokens: usize) {
        let bytes = (tokens * size_of::<TokenId>()) as u64;
        self.input.room_bytes = self.input.room_bytes.saturating_sub(bytes);
    }

    /// Waits for room for input: how many tokens, or `None` once the answer is over.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        if self.poll_over(cx).is_ready() {
            return Poll::Ready(None);
        }
        let tokens = to_usize(self.input.room_bytes) / size_of::<TokenId>();
        if tokens == 0 {
            return Poll::Pending;
        }
        Poll::Ready(Some(tokens))
    }

    /// Whether the client has an answer to every turn.
    pub(crate) fn awaits_turn(&self) -> bool {
        self.input.turns_answered >= self.input.turns_asked
    }

    /// Waits until the answer is over.
    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.input.over || self.complete || self.sequences[0].ended.is_some() {
            return Poll::Ready(());
        }
        self.input.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn wake_input(&mut self) {
        if let Some(waker) = self.input.waker.take() {
            waker.wake();
        }
    }

    /// A turn is answered: the event with its reason, after which the stream continues.
    pub(crate) fn on_turn(&mut self, index: u32, end: &End, text: &TextModel) {
        let sequence = &mut self.sequences[index as usize];
        if self.complete || sequence.ended.is_some() {
            return;
        }
        sequence.turns.push_back((sequence.generated, end.reason));
        self.input.turns_answered += 1;
        self.settle(index, text);
        self.wake();
    }

    /// The worker admitted the sequence.
    pub(crate) fn on_prologue(&mut self, sequence: u32, prologue: &Prologue) {
        let sequence = &mut self.sequences[sequence as usize];
        // The hits that its prompt's worker found, when it began.
        if sequence.prefilled.is_none() && sequence.resumed_at == 0 {
            sequence.cached = prologue.hit_tokens;
        }
        if let Some(ns) = prologue.worker_recv_ns {
            self.times.note(Stage::WorkerRecv, ns);
        }
        if let Some(ns) = prologue.admitted_ns {
            self.times.note(Stage::Admitted, ns);
        }
    }

    /// Tokens came.
    pub(crate) fn on_tokens(
        &mut self,
        index: u32,
        new: &NewTokens<'_>,
        text: &TextModel,
        metrics: &ShardMetrics,
    ) -> Taken {
        let &NewTokens {
            tokens,
            first,
            now_ns,
            ..
        } = new;
        let sequence = &mut self.sequences[index as usize];
        let mut taken = Taken::default();
        if sequence.ended.is_some() {
            return taken; // past a stop string: computed before the kill arrived
        }
        if self.complete {
            sequence.ended = Some(Ending::Engine(FinishReason::Abort));
            taken.kill = true;
            return taken;
        }
        taken.begins = sequence.generated == sequence.resumed_at;
        // A worker that never ends costs no memory.
        let room = sequence.spec.max_tokens.saturating_sub(sequence.generated) as usize;
        let (tokens, excess) = tokens.split_at(tokens.len().min(room));
        if !excess.is_empty() {
            metrics.excess_tokens.add(excess.len() as u64);
        }
        if tokens.is_empty() {
            return taken;
        }
        if let Some(first) = first
            && sequence.resumed_at == 0
        {
            self.times.note(Stage::FirstPassStart, first.start_ns);
            self.times.note(Stage::FirstPassEnd, first.end_ns);
            self.times.note(Stage::FrameRecv, now_ns);
            if let Some(adapter) = &mut self.adapter {
                adapter.run();
            }
            if let Some(accept) = self.times.at(Stage::Accept) {
                metrics.ttft.observe(now_ns.saturating_sub(accept));
            }
        } else {
            // One observation per step, however many tokens it gave: as vLLM's `IterationStats`.
            let gap_ns = now_ns.saturating_sub(sequence.last_token_ns);
            metrics.itl.observe(gap_ns);
            if first.is_some() {
                metrics.resume.observe(gap_ns);
            }
        }
        sequence.last_token_ns = now_ns;
        sequence.last_token = *tokens.last().expect("an entry of tokens holds one");
        metrics.generation_tokens.add(tokens.len() as u64);
        if self.shape.stream {
            let new = NewTokens { tokens, ..*new };
            taken.kill = self.stream_tokens(index, &new, text, metrics);
            taken.due = self.announce();
        } else {
            taken.kill = self.gather_tokens(index, tokens, text, metrics);
        }
        taken
    }

    /// Adds tokens to an answer that is sent as a whole. True if the worker should stop.
    fn gather_tokens(
        &mut self,
        index: u32,
        tokens: &[TokenId],
        text: &TextModel,
        metrics: &ShardMetrics,
    ) -> bool {
        let sequence = &mut self.sequences[index as usize];
        let stopped = tokens.iter().any(|&token| {
            sequence.generated += 1;
            sequence.take_whole(token, text)
        });
        if stopped {
            self.close_sequence(index);
        }
        let bytes = WHOLE_TOKEN_BYTES * tokens.len() as u64;
        let kill = stopped || !self.keep(index, bytes, metrics);
        if self.open == 0 {
            self.wake();
        }
        kill
    }

    /// Renders tokens as events, or holds them for a client that reads slowly. True if the worker should stop.
    fn stream_tokens(
        &mut self,
        index: u32,
        new: &NewTokens<'_>,
        text: &TextModel,
        metrics: &ShardMetrics,
    ) -> bool {
        let tokens = new.tokens;
        let mut stopped = false;
        if !self.opened {
            self.open_choices();
        }
        let sequence = &mut self.sequences[index as usize];
        if sequence.held.is_empty() && self.out.len() < RENDERED_BYTES_MAX {
            if new.end_follows {
                // They share an event with the reason, which is known in a moment.
                sequence.hold(tokens);
            } else {
                // No more than `room` above, which has 32 bits.
                sequence.generated += low_u32(tokens.len() as u64);
                make_room(&mut self.out);
                stopped = sequence.take_streamed(tokens, text, &mut self.out);
            }
        } else {
            if !self.paused {
                self.paused = true;
                metrics.streams_paused.add(1);
            }
            sequence.hold(tokens);
            if self.out.len() + sequence.held.len() * size_of::<TokenId>() > self.unread_bytes_max {
                metrics.streams_cut_full.add(1);
                self.fail(&ApiError::overloaded(
                    "the client reads more slowly than the answer is made, and its buffer is full; \
                     read faster, or raise `live.stream_buffer_bytes_max`",
                    1,
                ));
                self.sequences[index as usize].ended = Some(Ending::Engine(FinishReason::Abort));
                return true;
            }
            if !self.keep(index, size_of_val(tokens) as u64, metrics) {
                return true;
            }
        }
        if stopped {
            self.close_sequence(index);
        }
        self.settle(index, text);
        if new.first.is_some() {
            self.times.note(Stage::Rendered, monotonic_ns());
        }
        stopped
    }

    /// The engine ended the sequence. False if it had done so before: nothing changes then.
    pub(crate) fn on_end(
        &mut self,
        index: u32,
        end: &End,
        text: &TextModel,
        metrics: &ShardMetrics,
    ) -> bool {
        let per_prompt = self.shape.choices_per_prompt.max(1);
        let sequence = &mut self.sequences[index as usize];
        if matches!(sequence.ended, Some(Ending::Engine(_))) {
            return false;
        }
        if sequence.prefilled.is_none() && sequence.resumed_at == 0 {
            sequence.cached = end.usage.cached_tokens;
        }
        sequence.preemptions = end.usage.preemptions;
        // As in `usage`: a prompt counts once, however many choices it has.
        if index.is_multiple_of(per_prompt) {
            metrics.cached_tokens.add(u64::from(sequence.cached));
            let computed = sequence.spec.prompt_tokens.saturating_sub(sequence.cached);
            metrics.computed_tokens.add(u64::from(computed));
        }
        if self.complete || sequence.ended.is_some() {
            return true;
        }
        let reason = match &sequence.spec.script {
            Some(script) => sequence.scripted_end(script, end.reason),
            None => end.reason,
        };
        sequence.ended = Some(Ending::Engine(reason));
        self.close_sequence(index);
        if self.shape.stream && !self.opened {
            self.open_choices();
        }
        self.settle(index, text);
        if self.shape.stream || self.open == 0 {
            self.wake();
        }
        true
    }

    /// Adds tokens to the request's account, if an engine took it.
    fn note(&self, account: &mut Account) {
        let taken = || self.sequences.iter().filter(|s| !s.refused);
        let Some(first) = taken().next().filter(|_| account.wants_counts()) else {
            return;
        };
        let sum = |of: fn(&Sequence) -> u32| taken().map(|s| u64::from(of(s))).sum();
        account.note_engine(&first.spec.target.worker, true);
        (0..self.retries).for_each(|_| account.note_retry());
        (0..self.resumes).for_each(|_| account.note_resume());
        account.note_counts(TokenCounts {
            prompt: self.shape.prompt_tokens,
            // Of each prompt once, as `prompt`.
            cached: Some(self.usage().cached_tokens),
            completion: sum(|s| s.generated),
        });
    }

    /// Records the sequences that an engine took.
    fn record(&self, recorder: &RecorderHandle) {
        let arrival_ns = self.times.at(Stage::Accept).unwrap_or_default();
        for sequence in self.sequences.iter().filter(|s| !s.refused) {
            if let Some(known) = &sequence.spec.recorded {
                recorder.record(RecordedRequest {
                    arrival_ns,
                    output_tokens: sequence.generated,
                    ..RecordedRequest::clone(known)
                });
            }
        }
    }

    /// Charges `bytes` more. False if there is no memory for them: the reply has failed.
    #[inline]
    fn keep(&mut self, index: u32, bytes: u64, metrics: &ShardMetrics) -> bool {
        self.kept_bytes += bytes;
        let Some(charge) = &mut self.charge else {
            return true;
        };
        let Err(error) = charge.grow_to(self.kept_bytes) else {
            return true;
        };
        metrics.streams_cut_memory.add(1);
        self.sequences[index as usize].ended = Some(Ending::Engine(FinishReason::Abort));
        self.fail(&error);
        false
    }

    /// Notes the credit with which the sequence begins, wherever that will be.
    pub(crate) fn set_credit(&mut self, index: u32, bytes: u32) {
        let sequence = &mut self.sequences[index as usize];
        sequence.credit_bytes = bytes;
        sequence.granted_bytes = u64::from(bytes);
    }

    /// `rank` has computed the prompt of the sequence for another worker.
    pub(crate) fn on_prompt_computed(&mut self, index: u32, rank: Option<RankId>, pass: FirstPass) {
        self.times.note(Stage::Prefilled, pass.end_ns);
        self.sequences[index as usize].prefilled = rank;
    }

    /// The sequence runs at `target` from now on.
    pub(crate) fn move_to(&mut self, index: u32, target: RankId) {
        self.input.room_bytes = 0; // each worker gives its own
        let sequence = &mut self.sequences[index as usize];
        sequence.prefilled = None;
        sequence.spec.target = target;
    }

    /// Another worker is to continue the sequence. The new one may send what the client has room for.
    pub(crate) fn resume(&mut self, index: u32) {
        let sequence = &mut self.sequences[index as usize];
        sequence.resumed_at = sequence.generated;
        self.resumes += 1;
        if sequence.credit_bytes != NO_LIMIT {
            let unread = (sequence.held.len() * size_of::<TokenId>()) as u64;
            let room = u64::from(sequence.credit_bytes).saturating_sub(unread);
            sequence.granted_bytes = sequence.came_bytes() + room;
        }
    }

    /// Tokens of the sequence that are here, fewer than were asked for.
    pub(crate) fn answered(&self, index: u32) -> u32 {
        let sequence = &self.sequences[index as usize];
        let most = sequence.spec.max_tokens.saturating_sub(1);
        if slipstream_base::planted!("resume-behind") {
            return sequence.generated.saturating_sub(1);
        }
        sequence.generated.min(most)
    }

    /// Credit with which a worker starts the sequence, or its rest, bytes.
    pub(crate) fn start_credit(&self, index: u32) -> u32 {
        let sequence = &self.sequences[index as usize];
        if sequence.credit_bytes == NO_LIMIT {
            return NO_LIMIT;
        }
        let left = sequence.granted_bytes.saturating_sub(sequence.came_bytes());
        u32::try_from(left).unwrap_or(NO_LIMIT - 1)
    }

    /// Whether nothing is to be added to it any more.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether a token of the sequence has come.
    pub(crate) fn has_begun(&self, index: u32) -> bool {
        self.sequences[index as usize].generated > 0
    }

    /// Whether all tokens of the sequence are here, or it was given up.
    pub(crate) fn has_ended(&self, index: u32) -> bool {
        self.sequences[index as usize].ended.is_some()
    }

    /// Credit that the sequence's worker should get now, bytes: once half of what it had is used
    /// up, as much as was. Tokens that wait for the client count as unused.
    #[inline]
    pub(crate) fn credit_due(&mut self, index: u32) -> u32 {
        let sequence = &mut self.sequences[index as usize];
        if sequence.credit_bytes == NO_LIMIT || sequence.ended.is_some() {
            return 0;
        }
        let taken = u64::from(sequence.generated) - sequence.held.len() as u64;
        let due = taken * size_of::<TokenId>() as u64 + u64::from(sequence.credit_bytes);
        let due = due.saturating_sub(sequence.granted_bytes);
        let due = u32::try_from(due).unwrap_or(NO_LIMIT - 1);
        if due < sequence.credit_bytes / 2 {
            return 0;
        }
        if slipstream_base::planted!("double-credit") {
            return due;
        }
        sequence.granted_bytes += u64::from(due);
        due
    }

    /// Whether more tokens of the sequence came than it had credit for.
    #[cfg(feature = "sim")]
    pub(crate) fn exceeds_credit(&self, index: u32) -> bool {
        let sequence = &self.sequences[index as usize];
        sequence.credit_bytes != NO_LIMIT && sequence.came_bytes() > sequence.granted_bytes
    }

    /// Where the sequence runs.
    pub(crate) fn target(&self, index: u32) -> RankId {
        self.sequences[index as usize].spec.target
    }

    /// The worker did not take the sequence.
    pub(crate) fn on_refused(&mut self, index: u32, error: &ApiError) {
        if self.sequences[index as usize].ended.is_some() {
            return; // all of it is here; only its client may be behind
        }
        let sequence = &mut self.sequences[index as usize];
        sequence.ended = Some(Ending::Engine(FinishReason::Abort));
        sequence.refused = sequence.generated == 0;
        self.fail(error);
    }

    /// No worker takes the reply: its client gets the error instead of a response.
    pub(crate) fn reject(&mut self, error: &ApiError) {
        for sequence in &mut self.sequences {
            sequence.refused = sequence.generated == 0;
        }
        self.rejected = true;
        self.fail(error);
    }

    /// The reply cannot be completed. A stream gets the error and its end; a whole answer becomes
    /// the error.
    pub(crate) fn fail(&mut self, error: &ApiError) {
        if self.complete {
            return;
        }
        if self.shape.stream {
            SseRender::error(error, &mut self.out);
        }
        self.error = Some(error.clone());
        self.complete = true;
        self.open = 0;
        for sequence in &mut self.sequences {
            sequence.held.clear();
            sequence.held_runs.clear();
        }
        self.wake();
    }

    /// The sequence has all its tokens: the engine ended it, or a stop string was found. Both may
    /// come, in either order, as held tokens are looked at later; the first counts.
    fn close_sequence(&mut self, index: u32) {
        let sequence = &mut self.sequences[index as usize];
        if !sequence.over {
            sequence.over = true;
            self.open -= 1;
        }
    }

    /// Renders due text after tokens or the end of sequence `index`.
    #[inline]
    fn settle(&mut self, index: u32, text: &TextModel) {
        if !self.shape.stream || self.complete {
            return;
        }
        self.settle_sequence(index as usize, text);
        self.close();
    }

    /// Renders due text after the client has read.
    fn settle_all(&mut self, text: &TextModel) {
        if !self.shape.stream || self.complete {
            return;
        }
        for index in 0..self.sequences.len() {
            self.settle_sequence(index, text);
        }
        self.close();
    }

    #[inline]
    fn settle_sequence(&mut self, index: usize, text: &TextModel) {
        let sequence = &mut self.sequences[index];
        sequence.render_turns(&mut self.out);
        if sequence.ended.is_some() && !sequence.closed && sequence.holds_last_step() {
            sequence.render_end(text, &mut self.out);
            self.closed += 1;
        }
    }

    /// Renders the end of the stream, once all sequences have theirs.
    #[inline]
    fn close(&mut self) {
        if self.open > 0 || self.closed < self.sequences.len() {
            return;
        }
        if self.shape.include_usage {
            let usage = self.usage();
            self.sequences[0].render.usage(&usage, &mut self.out);
        }
        if self.trace.is_some() {
            let trace = self.trace_json();
            self.out.put(b": slipstream-trace ");
            self.out.put(trace.as_bytes());
            self.out.put(b"\n\n");
        }
        SseRender::done(&mut self.out);
        self.complete = true;
    }

    /// Fills the empty buffer from held tokens, now that the client has read. Returns the sequences
    /// in which a stop string was found: the worker should kill them.
    fn refill(&mut self, text: &TextModel) -> Vec<u32> {
        let mut stopped = Vec::new();
        for (index, sequence) in self.sequences.iter_mut().enumerate() {
            while self.out.len() < RENDERED_BYTES_MAX {
                sequence.render_turns(&mut self.out);
                if sequence.ended.is_some() && sequence.holds_last_step() {
                    break; // it leaves with the reason
                }
                if sequence.held.is_empty() {
                    break;
                }
                make_room(&mut self.out);
                if sequence.take_held(text, &mut self.out) {
                    stopped.push(to_u32(index));
                    break;
                }
            }
            if sequence.held.is_empty() && sequence.held.capacity() > 1024 {
                sequence.held = VecDeque::new();
            }
        }
        for &index in &stopped {
            self.close_sequence(index);
        }
        self.settle_all(text);
        let base = self.base_bytes;
        if self.kept_bytes > base && self.sequences.iter().all(|s| s.held.is_empty()) {
            self.kept_bytes = base;
            if let Some(charge) = &mut self.charge {
                charge.shrink_to(base);
            }
        }
        stopped
    }

    /// Whether something is there that the client has not taken.
    fn waits_for_client(&self) -> bool {
        self.rendering
            || self.shape.stream && (self.paused || self.complete || !self.out.is_empty())
    }

    /// Ends it: the rest is never rendered.
    pub(crate) fn cut(&mut self, error: &ApiError) {
        self.fail(error);
        self.cut = true;
        if !self.shape.stream {
            self.error = Some(error.clone());
            for sequence in &mut self.sequences {
                sequence.text = String::new();
                sequence.logprob_tokens = Vec::new();
                sequence.ids = Vec::new();
            }
        }
        if let Some(charge) = &mut self.charge {
            charge.shrink_to(REPLY_BYTES);
        }
    }

    fn usage(&self) -> Usage {
        let per_prompt = self.shape.choices_per_prompt.max(1) as usize;
        Usage {
            prompt_tokens: self.shape.prompt_tokens,
            completion_tokens: self.sequences.iter().map(|s| u64::from(s.generated)).sum(),
            cached_tokens: self
                .sequences
                .iter()
                .step_by(per_prompt)
                .map(|s| u64::from(s.cached))
                .sum(),
        }
    }

    /// Cost of each candidate by the router, as JSON.
    pub(crate) fn set_scores(&mut self, scores: String) {
        if let Some(trace) = &mut self.trace {
            trace.scores = scores;
        }
    }

    /// The trace as JSON: stage times by name (ns of `CLOCK_MONOTONIC`), where it ran, what it hit.
    pub(crate) fn trace_json(&self) -> String {
        use std::fmt::Write;
        let mut json = String::from("{\"stages\":{");
        let mut comma = "";
        for stage in Stage::ALL {
            if let Some(ns) = self.times.at(stage) {
                let _ = write!(json, "{comma}\"{}\":{ns}", stage.name());
                comma = ",";
            }
        }
        let first = &self.sequences[0];
        let _ = write!(
            json,
            "}},\"worker\":{},\"dp_rank\":{},\"cached_tokens\":{},\"preemptions\":{}",
            first.spec.target.worker.0, first.spec.target.dp_rank, first.cached, first.preemptions
        );
        if let Some(prefilled) = first.prefilled {
            let _ = write!(
                json,
                ",\"prefill_worker\":{},\"prefill_dp_rank\":{}",
                prefilled.worker.0, prefilled.dp_rank
            );
        }
        if let Some(trace) = &self.trace {
            let _ = write!(json, ",\"hit_blocks\":{}", first.cached / trace.block_size);
        }
        if let Some(trace) = self.trace.as_ref().filter(|t| !t.scores.is_empty()) {
            let _ = write!(json, ",\"scores\":{}", trace.scores);
        }
        json.push('}');
        json
    }

    fn is_traced(&self) -> bool {
        self.trace.is_some()
    }
}

/// A whole answer that is complete.
struct Complete<'a> {
    state: &'a ReplyState,
    text: &'a TextModel,
}

impl WholeAnswer for Complete<'_> {
    fn head(&self) -> Head<'_> {
        self.state.shape.head()
    }

    fn choices(&self) -> usize {
        self.state.sequences.len()
    }

    fn text(&self, choice: usize) -> [&str; 2] {
        let sequence = &self.state.sequences[choice];
        [
            sequence.spec.echo.as_deref().unwrap_or_default(),
            &sequence.text,
        ]
    }

    fn calls(&self, choice: usize) -> usize {
        self.state.sequences[choice].calls().len()
    }

    fn call(&self, choice: usize, call: usize) -> (String, WholeCall<'_>) {
        let id = call_id(&self.state.shape.id, choice, to_u32(call));
        let call = &self.state.sequences[choice].calls()[call];
        let shown = WholeCall {
            name: &call.name,
            arguments: &call.arguments,
        };
        (id, shown)
    }

    fn finish(&self, choice: usize) -> Finish<'_> {
        self.state.sequences[choice].finish()
    }

    fn logprobs(&self, choice: usize) -> Option<usize> {
        let sequence = &self.state.sequences[choice];
        sequence.spec.top_logprobs?;
        Some(sequence.echoed_tokens() + sequence.logprob_tokens.len())
    }

    fn logprob(&self, choice: usize, token: usize, with_top: bool) -> Cow<'_, TokenLogprob> {
        let sequence = &self.state.sequences[choice];
        let top = sequence.spec.top_logprobs.filter(|_| with_top);
        let echoed = sequence.echoed_tokens();
        if token < echoed {
            let top = top.unwrap_or_default();
            return Cow::Owned(sequence.prompt_logprob(token, top, self.text));
        }
        let (position, token) = sequence.logprob_tokens[token - echoed];
        let (seed, position) = (sequence.spec.seed, u64::from(position));
        let top = top.unwrap_or_default();
        Cow::Owned(TokenLogprob::modelled(
            self.text, seed, position, token, top,
        ))
    }

    fn text_offset(&self, choice: usize) -> u64 {
        match &self.state.sequences[choice] {
            echoed if echoed.echoed_tokens() > 0 => 0,
            sequence => sequence.text_chars,
        }
    }

    fn prompt_logprobs(&self, choice: usize) -> Option<usize> {
        let spec = &self.state.sequences[choice].spec;
        spec.prompt_tops?;
        spec.scored_prompt.as_ref().map(|ids| ids.len())
    }

    fn prompt_logprob(&self, choice: usize, token: usize) -> TokenLogprob {
        let sequence = &self.state.sequences[choice];
        let top = sequence.spec.prompt_tops.unwrap_or_default();
        sequence.prompt_logprob(token, top, self.text)
    }

    fn token_ids(&self, choice: usize) -> Option<[&[TokenId]; 2]> {
        let sequence = &self.state.sequences[choice];
        let prompt = sequence.spec.prompt_ids.as_deref()?;
        Some([prompt, &sequence.ids])
    }

    fn usage(&self) -> Usage {
        self.state.usage()
    }
}

impl Sequence {
    /// Tokens of the prompt whose log probabilities go before those of the answer: with an echo.
    fn echoed_tokens(&self) -> usize {
        let spec = &self.spec;
        if !spec.scores_echo {
            return 0;
        }
        spec.scored_prompt.as_ref().map_or(0, |ids| ids.len())
    }

    /// Log probability of a token of the prompt.
    fn prompt_logprob(&self, at: usize, top: u32, text: &TextModel) -> TokenLogprob {
        let ids = self.spec.scored_prompt.as_deref().unwrap_or_default();
        TokenLogprob::of_prompt(text, at as u64, ids[at], top)
    }

    /// The token that the answer has in place of the engine's.
    fn allowed(&self, token: TokenId) -> TokenId {
        match &self.spec.vocab {
            Some(vocab) => vocab.token(token, self.spec.seed, self.position),
            None => token,
        }
    }

    /// Bytes of all tokens that came.
    fn came_bytes(&self) -> u64 {
        u64::from(self.generated) * size_of::<TokenId>() as u64
    }

    /// Keeps the tokens of a step for later.
    fn hold(&mut self, tokens: &[TokenId]) {
        if tokens.len() > 1 {
            let position = self.position + self.held.len() as u64;
            self.held_runs.push_back((position, to_u32(tokens.len())));
        }
        // The caller has cut them to the 32 bits that are left of `max_tokens`.
        self.generated += low_u32(tokens.len() as u64);
        self.held.extend(tokens);
    }

    /// Whether no more tokens wait than those of the last step.
    #[inline]
    fn holds_last_step(&self) -> bool {
        self.held.len() <= 1
            || matches!(self.held_runs.front(), Some(&(at, run))
                if at == self.position && self.held.len() == run as usize)
    }

    /// Renders the first step of those that wait. Returns whether it completed a stop string.
    fn take_held(&mut self, text: &TextModel, out: &mut BytesMut) -> bool {
        let run = self
            .held_runs
            .front()
            .filter(|(at, _)| *at == self.position);
        let run = run.map(|&(_, run)| run);
        let stopped = match run {
            None => match self.held.pop_front() {
                Some(token) => self.take_streamed(&[token], text, out),
                None => false,
            },
            Some(run) => {
                self.held_runs.pop_front();
                let run = self.held.len().min(run as usize);
                let tokens: Vec<TokenId> = self.held.drain(..run).collect();
                self.take_streamed(&tokens, text, out)
            }
        };
        if stopped {
            self.held.clear();
            self.held_runs.clear();
        }
        stopped
    }

    /// Renders the tokens of a step as an event, also if they show no text. Returns whether they
    /// completed a stop string; their event is then the one with the reason.
    #[inline]
    fn take_streamed(&mut self, tokens: &[TokenId], text: &TextModel, out: &mut BytesMut) -> bool {
        if let [token] = *tokens
            && self.spec.plain
            && self.detok.is_clean()
            && let Some(json) = text.token_json(token)
        {
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            self.render.escaped(json, out);
            return false;
        }
        self.take_streamed_slowly(tokens, text, out)
    }

    /// As [`take_streamed`](Self::take_streamed): for several tokens, an echo, stop strings, log
    /// probabilities, and tokens that are no whole characters.
    #[cold]
    fn take_streamed_slowly(
        &mut self,
        tokens: &[TokenId],
        text: &TextModel,
        out: &mut BytesMut,
    ) -> bool {
        let (piece, stopped) = self.take_step(tokens, text);
        if stopped {
            self.stopped = Some(piece);
            return true;
        }
        match &piece.logprobs {
            None if piece.hidden => {}
            logprobs if piece.hidden || !piece.calls.is_empty() => {
                self.render
                    .calls(&piece.calls, logprobs.as_ref(), None, out);
            }
            Some(logprobs) => self.render.text_logprobs(&piece.shown, logprobs, out),
            None => self.render.text(&piece.shown, out),
        }
        false
    }

    /// Text that the tokens of a step add, and whether one completed a stop string: those after it count for
    /// nothing.
    fn take_step(&mut self, tokens: &[TokenId], text: &TextModel) -> (Piece, bool) {
        let mut step = Piece {
            hidden: true,
            ..Piece::default()
        };
        for &token in tokens {
            let (piece, stopped) = self.take_piece(token, text);
            step.shown.push_str(&piece.shown);
            step.hidden &= piece.hidden;
            for part in piece.calls {
                match step.calls.last_mut() {
                    Some(last) if last.index == part.index => {
                        last.arguments.push_str(&part.arguments);
                    }
                    _ => step.calls.push(part),
                }
            }
            match (&mut step.logprobs, piece.logprobs) {
                (Some(all), Some(more)) => all.tokens.extend(more.tokens),
                (None, more) => step.logprobs = more,
                (Some(_), None) => {}
            }
            if stopped {
                self.generated = to_u32(self.position);
                return (step, true);
            }
        }
        (step, false)
    }

    /// Text that a generated token adds, and whether it completed a stop string.
    fn take_piece(&mut self, token: TokenId, text: &TextModel) -> (Piece, bool) {
        let token = match self.spec.script.clone() {
            None => {
                let token = self.allowed(token);
                self.render.note_token(token);
                token
            }
            Some(script) => {
                let token = script.token(self.position);
                self.render.note_token(token);
                match script.show(self.position) {
                    (Show::Text, _) => token,
                    show => return (self.take_call(&script, token, show, text), false),
                }
            }
        };
        let mut shown = String::new();
        let mut echoed_logprobs = None;
        if let Some(echo) = self.spec.echo.take() {
            // Those of the echoed prompt go before those of its first token.
            if let Some(top) = self.spec.top_logprobs.filter(|_| self.echoed_tokens() > 0) {
                let tokens = (0..self.echoed_tokens()).map(|at| self.prompt_logprob(at, top, text));
                echoed_logprobs = Some(LogprobsPiece {
                    tokens: tokens.collect(),
                    text_offset: self.text_chars,
                });
            }
            self.text_chars += echo.chars().count() as u64;
            shown.push_str(&echo);
            self.spec.plain = self.spec.stop.is_none()
                && self.spec.top_logprobs.is_none()
                && self.spec.vocab.is_none()
                && self.spec.prompt_ids.is_none();
        }
        if self.spec.echo_only {
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            let piece = Piece {
                shown,
                logprobs: echoed_logprobs,
                ..Piece::default()
            };
            return (piece, false);
        }
        let echoed = shown.len();
        let own = self.logprob(token, text);
        let logprobs = match echoed_logprobs {
            Some(mut all) => {
                all.tokens.extend(own);
                Some(all)
            }
            None => own.map(|token| LogprobsPiece {
                tokens: vec![token],
                text_offset: self.text_chars,
            }),
        };
        let stopped = self.take_text(token, text, &mut shown);
        self.text_chars += shown[echoed..].chars().count() as u64;
        self.render.set_counts(self.position, self.cached.into());
        let piece = Piece {
            shown,
            logprobs,
            ..Piece::default()
        };
        (piece, stopped)
    }

    /// Text that a token of a scripted call adds.
    fn take_call(
        &mut self,
        script: &Script,
        token: TokenId,
        (show, is_last): (Show, bool),
        text: &TextModel,
    ) -> Piece {
        let logprobs = self.logprob(token, text).map(|token| LogprobsPiece {
            tokens: vec![token],
            text_offset: self.text_chars,
        });
        let mut shown = String::new();
        self.detok.push(text, token, &mut shown);
        self.position += 1;
        self.render.set_counts(self.position, self.cached.into());
        let part = match show {
            Show::Call(index) if is_last => Some(CallDelta {
                index,
                begins: Some((
                    call_id(&self.answer_id, self.index, index),
                    script.calls[index as usize].name.clone(),
                )),
                arguments: String::new(),
            }),
            Show::Arguments(index) if !shown.is_empty() => Some(CallDelta {
                index,
                begins: None,
                arguments: shown,
            }),
            _ => None,
        };
        Piece {
            logprobs,
            hidden: part.is_none(),
            calls: part.into_iter().collect(),
            ..Piece::default()
        }
    }

    /// The engine ended at the length that it was given: why the scripted answer ends.
    #[cold]
    fn scripted_end(&self, script: &Script, reason: FinishReason) -> FinishReason {
        let is_whole = self.generated >= script.len() && !self.spec.ignores_eos;
        match reason {
            FinishReason::Length if is_whole => FinishReason::Stop,
            reason => reason,
        }
    }

    /// The calls of a whole answer that came to its end; without that end it is text.
    fn calls(&self) -> &[ScriptedCall] {
        match (&self.spec.script, &self.ended) {
            (Some(script), Some(Ending::Engine(_))) if self.generated >= script.len() => {
                &script.calls
            }
            _ => &[],
        }
    }

    /// Adds one generated token to a whole answer. Returns whether it completed a stop string.
    fn take_whole(&mut self, token: TokenId, text: &TextModel) -> bool {
        let mut token = token;
        match &self.spec.script {
            Some(script) => token = script.token(self.position),
            None => token = self.allowed(token),
        }
        if self.spec.prompt_ids.is_some() {
            self.ids.push(token);
        }
        if self.spec.echo_only {
            self.position += 1;
            return false;
        }
        if let Some(script) = &self.spec.script
            && script.show(self.position).0 != Show::Text
        {
            if self.spec.top_logprobs.is_some() && !text.is_special(token) {
                self.logprob_tokens.push((to_u32(self.position), token));
            }
            self.position += 1;
            self.detok.push(text, token, &mut self.text);
            return false;
        }
        if self.spec.top_logprobs.is_some() && !text.is_special(token) {
            self.logprob_tokens.push((to_u32(self.position), token));
        }
        let mut shown = std::mem::take(&mut self.text);
        let stopped = self.take_text(token, text, &mut shown);
        self.text = shown;
        stopped
    }

    /// Log probability of the token at the present position, if asked for; special tokens are not
    /// shown and have none.
    fn logprob(&self, token: TokenId, text: &TextModel) -> Option<TokenLogprob> {
        let top = self.spec.top_logprobs?;
        if text.is_special(token) {
            return None;
        }
        Some(TokenLogprob::modelled(
            text,
            self.spec.seed,
            self.position,
            token,
            top,
        ))
    }

    /// Appends what `token` shows: through the detokenizer, and past the stop strings. Returns
    /// whether it completed one.
    fn take_text(&mut self, token: TokenId, text: &TextModel, shown: &mut String) -> bool {
        self.position += 1;
        let Some(stop) = &mut self.spec.stop else {
            self.detok.push(text, token, shown);
            return false;
        };
        let mut piece = String::new();
        self.detok.push(text, token, &mut piece);
        if self.position < u64::from(self.spec.min_tokens) {
            stop.pass(&piece, shown);
            return false;
        }
        let Some(hit) = stop.push(&piece, shown) else {
            return false;
        };
        self.ended = Some(Ending::StopString(self.spec.stops[hit.index].clone()));
        true
    }

    /// Text that was held back and is no stop string, and half characters.
    fn take_rest(&mut self, shown: &mut String) {
        if matches!(self.ended, Some(Ending::StopString(_))) {
            return;
        }
        let mut piece = String::new();
        self.detok.finish(&mut piece);
        match &mut self.spec.stop {
            Some(stop) => stop.pass(&piece, shown),
            None => shown.push_str(&piece),
        }
    }

    fn finish(&self) -> Finish<'_> {
        match &self.ended {
            Some(Ending::StopString(stop)) => Finish::StopString(stop),
            Some(Ending::Engine(FinishReason::Stop)) => {
                if let Some(script) = &self.spec.script {
                    return match &script.calls[..] {
                        [_, ..] if !script.named => Finish::ToolCalls,
                        _ => Finish::Stop,
                    };
                }
                if self.spec.stop_token_ids.contains(&self.last_token) {
                    Finish::StopToken(self.last_token)
                } else {
                    Finish::Stop
                }
            }
            Some(Ending::Engine(FinishReason::Length)) => Finish::Length,
            Some(Ending::Engine(FinishReason::Abort)) | None => Finish::Abort,
        }
    }

    /// Renders the ends of turns whose tokens are all rendered.
    #[inline]
    fn render_turns(&mut self, out: &mut BytesMut) {
        let rendered = self.generated - low_u32(self.held.len() as u64);
        while let Some(&(at, reason)) = self.turns.front()
            && at <= rendered
        {
            self.turns.pop_front();
            let finish = match reason {
                FinishReason::Stop => Finish::Stop,
                FinishReason::Length => Finish::Length,
                FinishReason::Abort => Finish::Abort,
            };
            let mut rest = String::new();
            self.take_rest(&mut rest);
            let rest = (!rest.is_empty()).then_some(&rest[..]);
            self.render.finish(rest, None, &finish, out);
        }
    }

    /// Renders the event with the reason, and what the last step shows.
    fn render_end(&mut self, text: &TextModel, out: &mut BytesMut) {
        self.closed = true;
        make_room(out);
        if self.held.len() == 1
            && let Some(&token) = self.held.front()
            && self.spec.plain
            && self.detok.is_clean()
            && let Some(json) = text.token_json(token)
        {
            self.held.clear();
            self.position += 1;
            self.render.set_counts(self.position, self.cached.into());
            self.render.finish_escaped(json, &self.finish(), out);
            return;
        }
        let mut piece = self.stopped.take();
        if !self.held.is_empty() {
            let tokens: Vec<TokenId> = self.held.drain(..).collect();
            self.held_runs.clear();
            piece = Some(self.take_step(&tokens, text).0);
        }
        let mut rest = String::new();
        self.take_rest(&mut rest);
        let (mut shown, logprobs) = match piece {
            Some(piece) if piece.hidden || !piece.calls.is_empty() => {
                let finish = self.finish();
                return self.render.calls(
                    &piece.calls,
                    piece.logprobs.as_ref(),
                    Some(&finish),
                    out,
                );
            }
            Some(piece) => (Some(piece.shown), piece.logprobs),
            None => (None, None),
        };
        if !rest.is_empty() {
            shown.get_or_insert_default().push_str(&rest);
        }
        self.render
            .finish(shown.as_deref(), logprobs.as_ref(), &self.finish(), out);
    }
}

/// The HTTP side's hold on a reply. Dropping it closes the streams and kills, at the workers, those that
/// have not ended.
pub(crate) struct ReplyHandle {
    workers: Rc<Workers>,
    reply: Rc<Reply>,
    /// Place among the replies that the shard looks after.
    place: u32,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl ReplyHandle {
    pub(crate) fn new(
        workers: Rc<Workers>,
        reply: Rc<Reply>,
        registrations: Vec<Registration<StreamSlot>>,
    ) -> ReplyHandle {
        let deadline = workers
            .shard
            .service
            .limits
            .request_timeout
            .map(|t| Box::pin(tokio::time::sleep(t)));
        reply.streams.replace(registrations);
        reply.state.borrow_mut().polled_tick = workers.replies.tick();
        ReplyHandle {
            place: workers.replies.add(&reply),
            workers,
            reply,
            deadline,
        }
    }

    /// The reply.
    pub(crate) fn reply(&self) -> &Rc<Reply> {
        &self.reply
    }

    /// Address of its first stream.
    pub(crate) fn addr(&self) -> StreamAddr {
        self.reply.streams.borrow()[0].addr()
    }

    /// Fails the reply if its time is over. Registers the task with the timer.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) {
        let Some(deadline) = &mut self.deadline else {
            return;
        };
        if deadline.as_mut().poll(cx).is_ready() {
            self.deadline = None;
            if !self.reply.state.borrow().cut {
                self.workers.end_overdue(&self.reply, Overdue::Deadline);
            }
        }
    }

    /// Waits until every sequence has ended, and renders the answer: a small one whole, a large one as its
    /// client reads it. With it, for a traced request, the trace.
    pub(crate) async fn whole(mut self) -> Result<(Whole, Option<String>), ApiError> {
        std::future::poll_fn(|cx| {
            self.poll_deadline(cx);
            let mut state = self.reply.state.borrow_mut();
            if state.open == 0 {
                return Poll::Ready(());
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        // The rest needs no worker and no stream.
        self.workers.end_streams(&self.reply);
        let mut state = self.reply.state.borrow_mut();
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        for sequence in &mut state.sequences {
            let mut text = std::mem::take(&mut sequence.text);
            sequence.take_rest(&mut text);
            sequence.text = text;
        }
        state.rendering = true;
        state.polled_tick = self.workers.replies.tick();
        let trace = state.is_traced().then(|| {
            let now = monotonic_ns();
            state.times.note(Stage::Rendered, now);
            state.times.note(Stage::Written, now);
            state.trace_json()
        });
        drop(state);
        let mut body = WholeBody {
            handle: self,
            render: UnaryRender::default(),
            first: None,
            done: false,
            yielded: true,
        };
        let (first, done) = body.slice(WHOLE_BYTES_MAX);
        if done {
            body.delivered();
            return Ok((Whole::Bytes(first), trace));
        }
        body.first = Some(first);
        Ok((Whole::Slices(body), trace))
    }
}

/// An answer that is not streamed.
pub(crate) enum Whole {
    /// All of it.
    Bytes(Vec<u8>),
    /// Too large for one piece.
    Slices(WholeBody),
}

/// A large whole answer, rendered as its client reads it.
pub(crate) struct WholeBody {
    handle: ReplyHandle,
    render: UnaryRender,
    first: Option<Vec<u8>>,
    done: bool,
    /// Other clients have had their turn since the last piece.
    yielded: bool,
}

/// The rest of an answer will not come.
#[derive(Debug)]
pub(crate) struct Cut(ApiError);

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Cut {}

impl WholeBody {
    /// The next piece, of about `bytes` bytes, and whether it is the last.
    fn slice(&mut self, bytes: usize) -> (Vec<u8>, bool) {
        let state = self.handle.reply.state.borrow();
        let answer = Complete {
            state: &state,
            text: &self.handle.workers.shard.service.text,
        };
        let mut out = Vec::new();
        self.done = self.render.advance(&answer, &mut out, bytes);
        (out, self.done)
    }

    fn delivered(&self) {
        let mut state = self.handle.reply.state.borrow_mut();
        state.delivered = true;
        let now = monotonic_ns();
        state.times.note(Stage::Rendered, now);
        state.times.note(Stage::Written, now);
    }
}

impl AnswerBody for WholeBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        {
            let mut state = self.handle.reply.state.borrow_mut();
            if state.cut {
                let error = state.error.clone().unwrap_or_else(ApiError::stopping);
                return Poll::Ready(Some(Err(io::Error::other(Cut(error)))));
            }
            state.polled_tick = self.handle.workers.replies.tick();
        }
        let piece = match self.first.take() {
            Some(first) => first,
            None if self.done => {
                self.delivered();
                return Poll::Ready(None);
            }
            None if !self.yielded => {
                self.yielded = true;
                yield_turn(cx);
                return Poll::Pending;
            }
            None => self.slice(SLICE_BYTES).0,
        };
        self.yielded = false;
        self.handle.workers.shard.metrics.flushes.add(1);
        Poll::Ready(Some(Ok(Frame::data(piece.into()))))
    }
}

impl Drop for ReplyHandle {
    fn drop(&mut self) {
        self.workers.replies.remove(self.place);
        let state = self.reply.state.borrow();
        if state.rejected {
            drop(state);
            return self.workers.end_streams(&self.reply);
        }
        let now = monotonic_ns();
        if state.open > 0
            || (state.shape.stream && !state.complete)
            || state.rendering && !state.delivered
        {
            self.workers.shard.metrics.disconnects.add(1);
        }
        if let Some(accept) = state.times.at(Stage::Accept) {
            self.workers
                .shard
                .metrics
                .e2e
                .observe(now.saturating_sub(accept));
        }
        self.workers.shard.metrics.on_stages(&state.times);
        for sequence in state.sequences.iter().filter(|s| !s.refused) {
            // An answer that was not read to its end is no success, although the engine was done.
            let reason = match &sequence.ended {
                Some(Ending::Engine(reason)) if state.delivered => *reason,
                Some(Ending::StopString(_)) if state.delivered => FinishReason::Stop,
                _ => FinishReason::Abort,
            };
            let metrics = &self.workers.shard.metrics;
            let finished = FinishedSequence {
                prompt: sequence.spec.prompt_tokens,
                cached: sequence.cached,
                generated: sequence.generated,
                max_tokens: sequence.spec.max_tokens,
                preemptions: sequence.preemptions,
            };
            metrics.on_finished(reason, &finished);
            metrics.on_phases(&state.times, sequence.last_token_ns, sequence.generated);
        }
        let per_prompt = state.shape.choices_per_prompt.max(1);
        for choices in state.sequences.chunks(per_prompt as usize) {
            if choices.iter().any(|choice| !choice.refused) {
                let longest = choices.iter().map(|choice| choice.generated).max();
                let metrics = &self.workers.shard.metrics;
                metrics.on_choices(per_prompt, longest.unwrap_or_default());
            }
        }
        if let Some(recorder) = &self.workers.shard.service.recorder {
            state.record(recorder);
        }
        state.note(&mut self.reply.client.owner().account());
        drop(state);
        self.workers.end_streams(&self.reply);
        let mut state = self.reply.state.borrow_mut();
        state.input.over = true;
        state.wake_input();
    }
}

/// A streamed answer as hyper takes it.
pub(crate) struct ReplyBody {
    handle: ReplyHandle,
    /// Refills since other clients had a turn.
    refills: u32,
}

impl ReplyBody {
    pub(crate) fn new(handle: ReplyHandle) -> ReplyBody {
        ReplyBody { handle, refills: 0 }
    }

    /// Why the reply failed, if it did: the error that its last event has.
    pub(crate) fn error(&self) -> Option<ApiError> {
        self.handle.reply.state.borrow().error.clone()
    }
}

impl AnswerBody for ReplyBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let handle = &mut self.handle;
        handle.poll_deadline(cx);
        let workers = handle.workers.clone();
        let mut stopped = Vec::new();
        let mut refilled = false;
        let outcome = {
            let mut state = handle.reply.state.borrow_mut();
            let state = &mut *state;
            state.polled_tick = workers.replies.tick();
            if state.out.is_empty() && !state.complete {
                if self.refills >= REFILLS_PER_TURN {
                    self.refills = 0;
                    yield_turn(cx);
                    return Poll::Pending;
                }
                self.refills += 1;
                stopped = state.refill(&workers.shard.service.text);
                refilled = true;
            }
            if !state.out.is_empty() {
                if state.times.at(Stage::Rendered).is_some() {
                    state.times.note(Stage::Written, monotonic_ns());
                }
                if state.direct != Direct::Off {
                    state.direct = Direct::On;
                    // Until it is written, nothing goes past it.
                    handle.reply.client.owner().wire().set_flushed(false);
                }
                workers.shard.metrics.flushes.add(1);
                Poll::Ready(Some(Ok(Frame::data(state.out.split().freeze()))))
            } else if state.complete {
                state.delivered = true;
                if state.error.is_some() {
                    let owner = handle.reply.client.owner();
                    owner.account().note_end(AnswerEnd::Broken);
                }
                Poll::Ready(None)
            } else {
                // The client has everything there is.
                state.paused = false;
                self.refills = 0;
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        };
        for index in stopped {
            handle.kill(index);
        }
        if refilled {
            handle.give_credit();
        }
        outcome
    }

    /// The shard may write events to the client's socket itself, as chunks of HTTP/1.1.
    fn allow_direct(&self) {
        self.handle.reply.state.borrow_mut().direct = Direct::Allowed;
    }
}

impl ReplyHandle {
    /// The client has read: workers that wait for credit get some.
    fn give_credit(&self) {
        let mut state = self.reply.state.borrow_mut();
        for (index, registration) in (0u32..).zip(&*self.reply.streams.borrow()) {
            let bytes = state.credit_due(index);
            if bytes > 0 {
                let (rank, addr) = (state.target(index), registration.addr());
                self.workers
                    .send_control(ToWorker::Credit { rank, addr, bytes });
            }
        }
    }

    fn kill(&self, index: u32) {
        let addr = self
            .reply
            .streams
            .borrow()
            .get(index as usize)
            .map(Registration::addr);
        if let Some(addr) = addr {
            self.workers.cancel(addr.stream.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A streamed reply with `n` choices that stop at `stop`.
    fn reply(kind: CompletionApi, n: u32, stop: &[&str], echo: Option<&str>) -> ReplyState {
        let shape = Shape {
            kind,
            id: "1".into(),
            created: 0,
            model: "m".into(),
            stream: true,
            include_usage: true,
            running_usage: false,
            prompt_tokens: 1,
            choices_per_prompt: n,
        };
        let stops: Rc<[String]> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let specs = (0..n).map(|seed| SequenceSpec {
            target: RankId::default(),
            prompt_tokens: 1,
            max_tokens: 1000,
            seed: u64::from(seed),
            top_logprobs: None,
            stop: (!stops.is_empty()).then(|| StopMatcher::new(&stops, false)),
            stops: stops.clone(),
            min_tokens: 0,
            plain: stops.is_empty() && echo.is_none(),
            echo: echo.map(Rc::from),
            stop_token_ids: [].into(),
            prompt_ids: None,
            scored_prompt: None,
            scores_echo: false,
            echo_only: false,
            prompt_tops: None,
            vocab: None,
            script: None,
            ignores_eos: false,
            recorded: None,
        });
        let times = StageTimes::default();
        ReplyState::new(shape, specs.collect(), times, None, 1 << 20, None)
    }

    fn end(reason: FinishReason) -> End {
        End {
            reason,
            usage: slipstream_planes::Usage::default(),
        }
    }

    /// Data at the client: the JSON of each event, and the text where an event is none.
    fn events(state: &mut ReplyState) -> Vec<serde_json::Value> {
        let bytes = state.out.split();
        let text = std::str::from_utf8(&bytes).unwrap();
        text.split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").unwrap())
            .map(|data| serde_json::from_str(data).unwrap_or_else(|_| data.into()))
            .collect()
    }

    /// Text of a completion's events, and whether each has a reason.
    fn texts(events: &[serde_json::Value]) -> Vec<(&str, bool)> {
        let choices = events.iter().filter_map(|event| event["choices"].get(0));
        choices
            .map(|choice| {
                let text = choice["text"].as_str().unwrap();
                (text, !choice["finish_reason"].is_null())
            })
            .collect()
    }

    fn words(text: &TextModel, shown: &str) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        text.encode(shown, false, &mut tokens);
        tokens
    }

    fn tokens(tokens: &[TokenId]) -> NewTokens<'_> {
        NewTokens {
            tokens,
            first: None,
            end_follows: false,
            now_ns: 1,
        }
    }

    /// A limit that one choice meets is exceeded by many.
    #[test]
    fn the_choices_of_a_request_share_a_bound_of_work() {
        let text = TextModel::builtin();
        let pattern = "[a-z]|".repeat(500);
        let body =
            serde_json::json!({"prompt": "x", "n": 128, "guided_regex": pattern}).to_string();
        let params = crate::openai::parse_completion(body.as_bytes())
            .unwrap()
            .params;
        let scripts = |choices| {
            let seeds: Vec<u64> = (0..choices).collect();
            crate::tokens::script::scripts(&text, &params, &seeds, false)
        };
        assert_eq!(scripts(2).unwrap().len(), 2);
        let error = scripts(128).err().unwrap();
        assert_eq!((error.status, error.param.as_deref()), (400, Some("n")));
    }

    /// The tokens of a scripted answer stand in the place of the engine's, whether or not the client keeps up,
    /// and only those of calls are sent.
    #[test]
    fn a_scripted_call_is_streamed_token_by_token() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let body = serde_json::json!({
            "messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": false,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {
                "type": "object", "required": ["at"],
                "properties": {"at": {"type": "string", "minLength": 20}},
            }}}],
        })
        .to_string();
        let params = crate::openai::parse_chat(body.as_bytes()).unwrap().params;
        let scripts = || crate::tokens::script::scripts(&text, &params, &[3], false).unwrap();
        let len = scripts()[0].len();
        let expected = scripts()[0].calls[0].arguments.clone();
        for (given, client_is_slow) in [(len, false), (len, true), (len - 1, false)] {
            let mut state = reply(CompletionApi::Chat, 1, &[], None);
            let spec = &mut state.sequences[0].spec;
            spec.script = scripts().pop().map(Rc::new);
            spec.plain = false;
            let engine = words(&text, " the");
            let mut found = Vec::new();
            for at in 0..given {
                if client_is_slow && at == 1 {
                    found.extend(events(&mut state));
                    state.out.resize(RENDERED_BYTES_MAX, b' ');
                }
                let new = NewTokens {
                    end_follows: at + 1 == given,
                    ..tokens(&engine)
                };
                state.on_tokens(0, &new, &text, &metrics);
            }
            state.on_end(0, &end(FinishReason::Length), &text, &metrics);
            if client_is_slow {
                catch_up(&mut state, &mut found);
            }
            found.extend(events(&mut state));
            let choices: Vec<_> = found.iter().filter_map(|e| e["choices"].get(0)).collect();
            let calls = choices
                .iter()
                .filter_map(|c| c["delta"]["tool_calls"].get(0));
            let calls: Vec<_> = calls.collect();
            assert_eq!(calls[0]["function"]["name"], "look");
            let arguments: String = calls
                .iter()
                .map(|call| call["function"]["arguments"].as_str().unwrap())
                .collect();
            assert_eq!(arguments, expected);
            assert!(calls.len() > 4, "not all at once: {calls:?}");
            let last = choices.last().unwrap();
            let reason = if given == len { "tool_calls" } else { "length" };
            assert_eq!(last["finish_reason"], reason);
            let usage = &found[found.len() - 2]["usage"];
            assert_eq!(usage["completion_tokens"], given);
        }
    }

    /// A stop string among tokens that wait for the client ends each sequence once, whether or not
    /// the engine has ended it.
    #[test]
    fn stop_strings_in_held_tokens_end_every_sequence() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let words = words(&text, &" the".repeat(300));
        let tail = self::words(&text, " zebra and more");
        let mut state = reply(CompletionApi::Completion, 3, &["zebra"], None);
        for index in 0..3 {
            for word in words.chunks(1) {
                let taken = state.on_tokens(index, &tokens(word), &text, &metrics);
                assert!(!taken.kill);
            }
            assert!(
                !state.on_tokens(index, &tokens(&tail), &text, &metrics).kill,
                "held, not looked at"
            );
        }
        state.on_end(1, &end(FinishReason::Length), &text, &metrics);
        let mut all = Vec::new();
        let mut killed = Vec::new();
        for _ in 0..100 {
            all.extend_from_slice(&state.out.split());
            if state.complete {
                break;
            }
            killed.extend(state.refill(&text));
        }
        let all = String::from_utf8(all).unwrap();
        assert!(all.ends_with("data: [DONE]\n\n"), "the reply completes");
        assert_eq!(all.matches("\"stop_reason\":\"zebra\"").count(), 3);
        assert!(!all.contains("more"), "nothing past the stop string");
        assert_eq!(killed, [0, 2], "the engine has ended the other itself");
        let shown = self::words(&text, " zebra");
        let counted = 3 * (words.len() + shown.len());
        assert!(
            all.contains(&format!("\"completion_tokens\":{counted}")),
            "{}",
            &all[all.len() - 300..]
        );
    }

    /// Clients that time the first event read the time to the first token from it.
    #[test]
    fn nothing_is_sent_before_the_first_token_and_then_every_choice_opens() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let mut state = reply(CompletionApi::Chat, 2, &[], None);
        assert!(state.out.is_empty());
        let word = words(&text, " the");
        state.on_tokens(1, &tokens(&word), &text, &metrics);
        let first = events(&mut state);
        let choice = |at: usize| &first[at]["choices"][0];
        let role = serde_json::json!({"role": "assistant", "content": ""});
        assert_eq!(
            (&choice(0)["index"], &choice(0)["delta"]),
            (&0.into(), &role)
        );
        assert_eq!(
            (&choice(1)["index"], &choice(1)["delta"]),
            (&1.into(), &role)
        );
        assert_eq!(choice(2)["delta"], serde_json::json!({"content": " the"}));
        assert_eq!((first.len(), &choice(2)["index"]), (3, &1.into()));
        state.on_tokens(0, &tokens(&word), &text, &metrics);
        assert_eq!(events(&mut state).len(), 1, "no role twice");
    }

    #[test]
    fn a_chat_that_ends_without_a_token_opens_and_closes() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let mut state = reply(CompletionApi::Chat, 1, &[], None);
        state.on_end(0, &end(FinishReason::Abort), &text, &metrics);
        let events = events(&mut state);
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(events[1]["choices"][0]["delta"], serde_json::json!({}));
        assert_eq!(events[1]["choices"][0]["finish_reason"], "abort");
        assert_eq!(events[3], "[DONE]");
        let mut failed = reply(CompletionApi::Chat, 1, &[], None);
        failed.fail(&ApiError::worker_lost("w3"));
        let events = self::events(&mut failed);
        assert!(
            events[0]["error"].is_object(),
            "an error comes first: {events:?}"
        );
    }

    #[test]
    fn a_completion_has_an_event_per_token_and_the_last_carries_the_reason() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let words = words(&text, " the quick brown");
        for client_is_slow in [false, true] {
            let mut state = reply(CompletionApi::Completion, 1, &[], None);
            let mut found = Vec::new();
            for (at, token) in words.iter().enumerate() {
                if client_is_slow && at == 1 {
                    // Tokens wait, as the buffer of rendered events is full.
                    state.out.resize(RENDERED_BYTES_MAX, b' ');
                }
                let new = NewTokens {
                    end_follows: at + 1 == words.len(),
                    ..tokens(std::slice::from_ref(token))
                };
                state.on_tokens(0, &new, &text, &metrics);
                if !client_is_slow {
                    found.extend(events(&mut state));
                }
            }
            assert_eq!(
                found.len(),
                if client_is_slow { 0 } else { words.len() - 1 }
            );
            state.on_end(0, &end(FinishReason::Length), &text, &metrics);
            if client_is_slow {
                let first = state.out.split();
                found.push(
                    serde_json::from_slice(first[6..first.len().min(400)].trim_ascii_end())
                        .unwrap(),
                );
                state.refill(&text);
            }
            found.extend(events(&mut state));
            let texts = texts(&found);
            assert_eq!(texts.len(), words.len(), "{texts:?}");
            assert!(texts.iter().rev().skip(1).all(|(_, ends)| !ends));
            assert!(texts.last().unwrap().1);
            let whole: String = texts.iter().map(|(text, _)| *text).collect();
            assert_eq!(whole, " the quick brown");
            assert_eq!(
                found[found.len() - 2]["usage"]["completion_tokens"],
                words.len()
            );
        }
    }

    /// As with vLLM, text that is held back leaves events without text, one per token.
    #[test]
    fn the_token_that_completes_a_stop_string_carries_the_reason_and_the_text_before_it() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let words = words(&text, " the zebra");
        let mut state = reply(CompletionApi::Completion, 1, &["zebra"], None);
        let mut found = Vec::new();
        for token in &words {
            state.on_tokens(0, &tokens(std::slice::from_ref(token)), &text, &metrics);
            found.extend(events(&mut state));
        }
        let texts = texts(&found);
        assert_eq!(texts.len(), words.len(), "{texts:?}");
        assert!(texts.last().unwrap().1, "{texts:?}");
        let whole: String = texts.iter().map(|(text, _)| *text).collect();
        assert_eq!(whole, " the ");
        // The same if the engine's own end comes with that token: the stop string is the reason.
        let mut state = reply(CompletionApi::Completion, 1, &["zebra"], None);
        let all = NewTokens {
            end_follows: true,
            ..tokens(&words)
        };
        state.on_tokens(0, &all, &text, &metrics);
        state.on_end(0, &end(FinishReason::Length), &text, &metrics);
        let found = events(&mut state);
        let last = &found[0]["choices"][0];
        assert_eq!(
            (&last["finish_reason"], &last["stop_reason"]),
            (&"stop".into(), &"zebra".into())
        );
    }

    /// Made once: it takes a while.
    fn shared_text() -> &'static TextModel {
        static TEXT: std::sync::OnceLock<TextModel> = std::sync::OnceLock::new();
        TEXT.get_or_init(TextModel::builtin)
    }

    /// Renders `words` in steps of these sizes, and returns the events. `read_after`: the client
    /// reads nothing before so many steps. The last step comes with the end.
    fn stream_in_steps(
        state: &mut ReplyState,
        sizes: &[usize],
        read_after: usize,
        words: &[TokenId],
    ) -> Vec<serde_json::Value> {
        let text = shared_text();
        let metrics = ShardMetrics::new();
        let mut found = Vec::new();
        let mut rest = words;
        let mut filled = false;
        for (at, &size) in sizes.iter().enumerate() {
            let (step, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            if step.is_empty() {
                break;
            }
            let new = NewTokens {
                end_follows: rest.is_empty(),
                ..tokens(step)
            };
            let taken = state.on_tokens(0, &new, text, &metrics);
            if rest.is_empty() {
                state.on_end(0, &end(FinishReason::Length), text, &metrics);
            }
            if at < read_after {
                if !filled {
                    found.extend(events(state));
                    state.out.resize(RENDERED_BYTES_MAX, b' ');
                    filled = true;
                }
                continue;
            }
            if filled {
                filled = false;
                catch_up(state, &mut found);
            }
            found.extend(events(state));
            if taken.kill {
                break;
            }
        }
        if filled {
            catch_up(state, &mut found);
        }
        found
    }

    /// A client that was behind reads all there is.
    fn catch_up(state: &mut ReplyState, found: &mut Vec<serde_json::Value>) {
        let _filler = state.out.split_to(RENDERED_BYTES_MAX);
        found.extend(events(state));
        state.refill(shared_text());
        found.extend(events(state));
    }

    fn choice_events(events: &[serde_json::Value]) -> usize {
        let has_choice = |event: &&serde_json::Value| event["choices"].get(0).is_some();
        events.iter().filter(has_choice).count()
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

        /// One event per step, whether or not the client is behind; text, counts and order are those of
        /// the tokens one by one.
        #[test]
        fn tokens_of_a_step_share_an_event(
            sizes in proptest::collection::vec(1usize..=5, 1..20),
            read_after in 0usize..20,
        ) {
            let text = shared_text();
            let all: usize = sizes.iter().sum();
            let words = words(text, &" the".repeat(all));
            proptest::prop_assert_eq!(words.len(), all);
            let mut state = reply(CompletionApi::Completion, 1, &[], None);
            let found = stream_in_steps(&mut state, &sizes, read_after, &words);
            let texts = texts(&found);
            let shown: String = texts.iter().map(|(text, _)| *text).collect();
            proptest::prop_assert_eq!(shown, " the".repeat(all));
            proptest::prop_assert_eq!(choice_events(&found), sizes.len());
            for (&(text, ends), (at, size)) in texts.iter().zip(sizes.iter().enumerate()) {
                proptest::prop_assert_eq!(text, " the".repeat(*size));
                proptest::prop_assert_eq!(ends, at + 1 == sizes.len());
            }
            let usage = &found[found.len() - 2]["usage"];
            proptest::prop_assert_eq!(&usage["completion_tokens"], &serde_json::json!(all));
            proptest::prop_assert_eq!(found.last().unwrap(), "[DONE]");
        }

        /// A stop string ends the answer at its token at any place in a step, and tokens after it in
        /// that step are neither shown nor counted.
        #[test]
        fn a_stop_string_cuts_a_step(
            before in 0usize..8,
            after in 1usize..8,
            sizes in proptest::collection::vec(1usize..=5, 20),
            read_after in 0usize..6,
        ) {
            let text = shared_text();
            let counted = words(text, &format!("{} zebra", " the".repeat(before)));
            let shown = format!("{} zebra{}", " the".repeat(before), " fox".repeat(after));
            let all = words(text, &shown);
            let mut state = reply(CompletionApi::Completion, 1, &["zebra"], None);
            let found = stream_in_steps(&mut state, &sizes, read_after, &all);
            let texts = texts(&found);
            let whole: String = texts.iter().map(|(text, _)| *text).collect();
            proptest::prop_assert_eq!(whole, format!("{} ", " the".repeat(before)));
            let last = &found[found.len() - 3]["choices"][0];
            proptest::prop_assert_eq!(&last["stop_reason"], "zebra");
            let usage = &found[found.len() - 2]["usage"];
            proptest::prop_assert_eq!(
                &usage["completion_tokens"], &serde_json::json!(counted.len()));
        }
    }

    /// An engine that gives more than `max_tokens` within a step is cut there.
    #[test]
    fn max_tokens_cuts_a_step() {
        let text = shared_text();
        let metrics = ShardMetrics::new();
        let words = words(text, &" the".repeat(7));
        let mut state = reply(CompletionApi::Completion, 1, &[], None);
        state.sequences[0].spec.max_tokens = 5;
        state.on_tokens(0, &tokens(&words[..3]), text, &metrics);
        let rest = NewTokens {
            end_follows: true,
            ..tokens(&words[3..])
        };
        state.on_tokens(0, &rest, text, &metrics);
        state.on_end(0, &end(FinishReason::Length), text, &metrics);
        let found = events(&mut state);
        assert_eq!(
            texts(&found)[..2],
            [(" the the the", false), (" the the", true)]
        );
        assert_eq!(found[2]["usage"]["completion_tokens"], 5);
        assert_eq!(metrics.excess_tokens.get(), 2);
    }

    #[test]
    fn a_prompt_counts_as_cached_once_for_all_its_choices() {
        let text = shared_text();
        let metrics = ShardMetrics::new();
        let mut state = reply(CompletionApi::Completion, 3, &[], None);
        let mut end = end(FinishReason::Length);
        end.usage.cached_tokens = 16;
        for index in 0..3 {
            state.on_tokens(index, &tokens(&words(text, " the")), text, &metrics);
            assert!(state.on_end(index, &end, text, &metrics));
            assert!(!state.on_end(index, &end, text, &metrics), "it has ended");
        }
        assert_eq!(metrics.cached_tokens.get(), 16);
        assert_eq!(state.usage().cached_tokens, 16);
    }

    /// vLLM observes the time between two outputs of a sequence, not between two tokens.
    #[test]
    fn a_step_is_one_inter_token_latency() {
        let text = shared_text();
        let metrics = ShardMetrics::new();
        let words = words(text, &" the".repeat(9));
        let mut state = reply(CompletionApi::Completion, 1, &[], None);
        let first = FirstPass {
            start_ns: 1,
            end_ns: 2,
        };
        for (step, words) in words.chunks(3).enumerate() {
            let new = NewTokens {
                first: (step == 0).then_some(first),
                now_ns: 10 * step as u64,
                ..tokens(words)
            };
            state.on_tokens(0, &new, text, &metrics);
        }
        assert_eq!((metrics.itl.count(), metrics.itl.sum()), (2, 20));
        assert_eq!(metrics.generation_tokens.get(), 9);
    }

    #[test]
    fn an_echo_shares_the_event_of_the_first_token_of_its_choice() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let word = words(&text, " the");
        let mut state = reply(CompletionApi::Completion, 2, &[], Some("Say"));
        assert!(state.out.is_empty());
        for index in [0, 1, 0] {
            state.on_tokens(index, &tokens(&word), &text, &metrics);
        }
        let events = events(&mut state);
        assert_eq!(
            texts(&events),
            [("Say the", false), ("Say the", false), (" the", false)]
        );
    }
}
