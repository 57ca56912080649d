//! The answer to one HTTP request while it is being made: what comes from workers, and what of it is rendered.

use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll};

use slipstream_base::width::{low_u32, to_u32};
use slipstream_base::{RankId, Stage, StageTimes, TokenId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::{End, FirstPass, Prologue};
use slipstream_recorder::{RecordedRequest, RecorderHandle};

use crate::door::account::{Account, TokenCounts};
use crate::door::budget::Charge;
use crate::door::management::AdapterUse;
use crate::door::metrics::ShardMetrics;
use crate::openai::{ApiError, Out, SseRender, Usage};
use crate::text::TextModel;
use crate::tokens::reply::credit::Credit;
use crate::tokens::reply::input::Input;
use crate::tokens::reply::memory::AnswerMemory;
use crate::tokens::reply::outlet::{Outlet, make_room};
use crate::tokens::reply::progress::{Ending, FailureKind, Life, Progress};
use crate::tokens::reply::sequence::Sequence;
use crate::tokens::reply::spec::{SequenceSpec, Shape};
use crate::tokens::reply::trace::{Trace, trace_json};

/// Memory of a reply and of each of its sequences, bytes.
pub(crate) const REPLY_BYTES: u64 = 4 << 10;
pub(crate) const SEQUENCE_BYTES: u64 = 1 << 10;

/// Memory of a token of a whole answer: its text, and its number if log probabilities follow.
const WHOLE_TOKEN_BYTES: u64 = 16;

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

/// Effect of tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    /// They are the first ones of the sequence.
    pub(crate) begins: bool,
    /// The worker should stop: a stop string was found, or the reply has failed.
    pub(crate) kill: bool,
    /// It is to be written at the end of the turn ([`Workers::write_some`](crate::tokens::workers::Workers::write_some)).
    pub(crate) due: bool,
}

/// Why a reply is ended from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overdue {
    /// It was not complete in time.
    Deadline,
    /// Its client has read nothing for too long.
    Unread,
}

/// An answer in the making.
pub(crate) struct ReplyState {
    pub(super) shape: Shape,
    pub(super) sequences: Vec<Sequence>,
    /// Sequences that run; none once it has failed.
    pub(super) open: u32,
    /// Sequences whose event with the reason is rendered.
    closed: usize,
    /// Times that sequences went to another worker before, and after their first token.
    pub(crate) retries: u32,
    resumes: u32,
    pub(super) progress: Progress,
    pub(super) outlet: Outlet,
    memory: AnswerMemory,
    unread_bytes_max: usize,
    pub(super) input: Input,
    pub(crate) times: StageTimes,
    pub(super) trace: Option<Trace>,
    /// The adapter that it uses.
    pub(crate) adapter: Option<AdapterUse>,
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
        let answer_id: Rc<str> = shape.id.as_str().into();
        let specs = specs.into_iter().enumerate();
        let mut sequences: Vec<Sequence> = specs
            .map(|(index, spec)| Sequence::new(index, spec, &shape, answer_id.clone()))
            .collect();
        if !shape.stream {
            let per_prompt = shape.choices_per_prompt.max(1) as usize;
            for choices in sequences.chunks_mut(per_prompt) {
                // Counted once: the choices of a prompt share it.
                let echo = choices[0].spec.echo.as_ref();
                let chars = echo.map_or(0, |echo| echo.chars().count() as u64);
                for sequence in choices {
                    sequence.text_chars += chars;
                }
            }
        }
        ReplyState {
            open: to_u32(sequences.len()),
            closed: 0,
            retries: 0,
            resumes: 0,
            sequences,
            shape,
            progress: Progress::Waiting,
            outlet: Outlet::new(),
            memory: AnswerMemory::new(charge),
            unread_bytes_max,
            input: Input::new(),
            times,
            trace,
            adapter: None,
        }
    }

    /// Renders the events that open the choices, all at the first token of any, as vLLM does.
    #[cold]
    fn open_choices(&mut self) {
        self.progress = Progress::Open;
        for sequence in &self.sequences {
            sequence.render_role(&mut self.outlet.bytes);
        }
    }

    fn wake(&mut self) {
        self.outlet.wake();
        if self.progress.is_complete() {
            self.input.wake();
        }
    }

    /// Events are rendered: the shard writes them at the end of its turn (true, once), or the client's side is
    /// woken to take them.
    #[inline]
    fn announce(&mut self) -> bool {
        if self.outlet.is_shards(self.progress.is_complete()) {
            return self.outlet.set_due();
        }
        self.wake();
        false
    }

    /// Events that the shard may write itself, although it is no longer the same turn. Otherwise the client's
    /// side has been woken to take them.
    pub(crate) fn take_due(&mut self) -> Option<&[u8]> {
        self.outlet.clear_due();
        if self.progress.is_complete() || self.outlet.is_paused() {
            self.wake();
        }
        self.outlet.for_shard()
    }

    /// The shard has written them. `wake`: the client's side is needed for a rest.
    pub(crate) fn on_written(&mut self, wake: bool) {
        self.outlet.on_written();
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
        self.input.add_room(bytes);
    }

    /// The client asks for one more turn of at most `max_tokens`, with `tokens` of input.
    pub(crate) fn on_turn_asked(&mut self, max_tokens: u32, tokens: u64) {
        self.input.ask_turn();
        self.shape.prompt_tokens += tokens;
        let spec = &mut self.sequences[0].spec;
        spec.max_tokens = spec.max_tokens.saturating_add(max_tokens);
    }

    /// So many tokens of input are on their way. Sent input cannot be sent again elsewhere.
    pub(crate) fn on_input_sent(&mut self, tokens: usize) {
        self.input.use_room(tokens);
    }

    /// Waits for room for input: how many tokens, or `None` once the answer is over.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        if self.poll_over(cx).is_ready() {
            return Poll::Ready(None);
        }
        self.input.room().map(Some)
    }

    /// Whether the client has an answer to every turn.
    pub(crate) fn awaits_turn(&self) -> bool {
        self.input.awaits_turn()
    }

    /// Waits until the answer is over.
    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let is_over = self.input.is_over() || self.progress.is_complete();
        if is_over || !self.sequences[0].life.is_running() {
            return Poll::Ready(());
        }
        self.input.wait(cx);
        Poll::Pending
    }

    /// A turn is answered: the event with its reason, after which the stream continues.
    pub(crate) fn on_turn(&mut self, index: u32, end: &End, text: &TextModel) {
        let sequence = &mut self.sequences[index as usize];
        if self.progress.is_complete() || !sequence.life.is_running() {
            return;
        }
        sequence.end_turn(end.reason);
        self.input.answer_turn();
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
        if !sequence.life.is_running() {
            return taken; // past a stop string: computed before the kill arrived
        }
        if self.progress.is_complete() {
            sequence.life.abort();
            taken.kill = true;
            return taken;
        }
        taken.begins = sequence.generated == sequence.resumed_at;
        // A worker that never ends costs no memory.
        let room = sequence.spec.max_tokens.saturating_sub(sequence.generated) as usize;
        let (tokens, excess) = tokens.split_at(tokens.len().min(room));
        if !excess.is_empty() {
            metrics.plane.excess_tokens.add(excess.len() as u64);
        }
        if tokens.is_empty() {
            return taken;
        }
        self.observe(index, first, now_ns, metrics);
        let sequence = &mut self.sequences[index as usize];
        sequence.last_token_ns = now_ns;
        sequence.last_token = *tokens.last().expect("an entry of tokens holds one");
        metrics.tokens.generation.add(tokens.len() as u64);
        if self.shape.stream {
            let new = NewTokens { tokens, ..*new };
            taken.kill = self.stream_tokens(index, &new, text, metrics);
            taken.due = self.announce();
        } else {
            taken.kill = self.gather_tokens(index, tokens, text, metrics);
        }
        taken
    }

    /// Observes the latency of tokens: the first of all, those of a resumed answer, or others.
    #[inline]
    fn observe(
        &mut self,
        index: u32,
        first: Option<FirstPass>,
        now_ns: u64,
        metrics: &ShardMetrics,
    ) {
        let sequence = &self.sequences[index as usize];
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
                metrics.latency.ttft.observe(now_ns.saturating_sub(accept));
            }
        } else {
            // One observation per step, however many tokens it gave: as vLLM's `IterationStats`.
            let gap_ns = now_ns.saturating_sub(sequence.last_token_ns);
            metrics.latency.itl.observe(gap_ns);
            if first.is_some() {
                metrics.latency.resume.observe(gap_ns);
            }
        }
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
            self.open -= 1;
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
        if matches!(self.progress, Progress::Waiting) {
            self.open_choices();
        }
        let sequence = &mut self.sequences[index as usize];
        if sequence.held.is_empty() && self.outlet.has_room() {
            if new.end_follows {
                // They share an event with the reason, which is known in a moment.
                sequence.hold(tokens);
            } else {
                // No more than `room` above, which has 32 bits.
                sequence.generated += low_u32(tokens.len() as u64);
                make_room(&mut self.outlet.bytes);
                stopped = sequence.take_streamed(tokens, text, &mut self.outlet.bytes);
            }
        } else {
            if self.outlet.pause() {
                metrics.streams_paused.add(1);
            }
            sequence.hold(tokens);
            let unread = self.outlet.bytes.len() + sequence.held.len() * size_of::<TokenId>();
            if unread > self.unread_bytes_max {
                metrics.streams_cut_full.add(1);
                self.fail(&ApiError::overloaded(
                    "the client reads more slowly than the answer is made, and its buffer is full; \
                     read faster, or raise `live.stream_buffer_bytes_max`",
                    1,
                ));
                self.sequences[index as usize].life.abort();
                return true;
            }
            if !self.keep(index, size_of_val(tokens) as u64, metrics) {
                return true;
            }
        }
        if stopped {
            self.open -= 1;
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
        if sequence.life.is_ended_by_engine() {
            return false;
        }
        if sequence.prefilled.is_none() && sequence.resumed_at == 0 {
            sequence.cached = end.usage.cached_tokens;
        }
        sequence.preemptions = end.usage.preemptions;
        // As in `usage`: a prompt counts once, however many choices it has.
        if index.is_multiple_of(per_prompt) {
            metrics.tokens.cached.add(u64::from(sequence.cached));
            let computed = sequence.spec.prompt_tokens.saturating_sub(sequence.cached);
            metrics.tokens.computed.add(u64::from(computed));
        }
        if self.progress.is_complete() || !sequence.life.is_running() {
            return true;
        }
        let reason = match &sequence.spec.script {
            Some(script) => sequence.scripted_end(script, end.reason),
            None => end.reason,
        };
        sequence.life = Life::Ended(Ending::Engine(reason));
        self.open -= 1;
        if self.shape.stream && matches!(self.progress, Progress::Waiting) {
            self.open_choices();
        }
        self.settle(index, text);
        if self.shape.stream || self.open == 0 {
            self.wake();
        }
        true
    }

    /// Adds tokens to the request's account, if an engine took it.
    pub(super) fn note(&self, account: &mut Account) {
        let taken = || self.sequences.iter().filter(|s| !s.life.is_refused());
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
    pub(super) fn record(&self, recorder: &RecorderHandle) {
        let arrival_ns = self.times.at(Stage::Accept).unwrap_or_default();
        for sequence in self.sequences.iter().filter(|s| !s.life.is_refused()) {
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
        let Err(error) = self.memory.grow(bytes) else {
            return true;
        };
        metrics.streams_cut_memory.add(1);
        self.sequences[index as usize].life.abort();
        self.fail(&error);
        false
    }

    /// Notes the credit with which the sequence begins, wherever that will be.
    pub(crate) fn set_credit(&mut self, index: u32, bytes: u32) {
        self.sequences[index as usize].credit = Credit::new(bytes);
    }

    /// `rank` has computed the prompt of the sequence for another worker.
    pub(crate) fn on_prompt_computed(&mut self, index: u32, rank: Option<RankId>, pass: FirstPass) {
        self.times.note(Stage::Prefilled, pass.end_ns);
        self.sequences[index as usize].prefilled = rank;
    }

    /// The sequence runs at `target` from now on.
    pub(crate) fn move_to(&mut self, index: u32, target: RankId) {
        self.input.forget_room();
        let sequence = &mut self.sequences[index as usize];
        sequence.prefilled = None;
        sequence.spec.target = target;
    }

    /// Another worker is to continue the sequence. The new one may send what the client has room for.
    pub(crate) fn resume(&mut self, index: u32) {
        let sequence = &mut self.sequences[index as usize];
        sequence.resumed_at = sequence.generated;
        self.resumes += 1;
        let unread = sequence.held.len();
        sequence.credit.renew(sequence.generated, unread);
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
        sequence.credit.at_start(sequence.generated)
    }

    /// Whether nothing is to be added to it any more.
    pub(crate) fn is_complete(&self) -> bool {
        self.progress.is_complete()
    }

    /// Whether a token of the sequence has come.
    pub(crate) fn has_begun(&self, index: u32) -> bool {
        self.sequences[index as usize].generated > 0
    }

    /// Whether all tokens of the sequence are here, or it was given up.
    pub(crate) fn has_ended(&self, index: u32) -> bool {
        !self.sequences[index as usize].life.is_running()
    }

    /// Credit that the sequence's worker should get now, bytes: once half of what it had is used
    /// up, as much as was. Tokens that wait for the client count as unused.
    #[inline]
    pub(crate) fn credit_due(&mut self, index: u32) -> u32 {
        let sequence = &mut self.sequences[index as usize];
        if !sequence.life.is_running() {
            return 0;
        }
        let taken = sequence.taken();
        sequence.credit.due(taken)
    }

    /// Whether more tokens of the sequence came than it had credit for.
    #[cfg(feature = "sim")]
    pub(crate) fn exceeds_credit(&self, index: u32) -> bool {
        let sequence = &self.sequences[index as usize];
        sequence.credit.is_exceeded(sequence.generated)
    }

    /// Where the sequence runs.
    pub(crate) fn target(&self, index: u32) -> RankId {
        self.sequences[index as usize].spec.target
    }

    /// The worker did not take the sequence.
    pub(crate) fn on_refused(&mut self, index: u32, error: &ApiError) {
        if !self.sequences[index as usize].life.is_running() {
            return; // all of it is here; only its client may be behind
        }
        let sequence = &mut self.sequences[index as usize];
        if sequence.generated == 0 {
            sequence.life = Life::Refused;
        } else {
            sequence.life.abort();
        }
        self.fail(error);
    }

    /// No worker takes the reply: its client gets the error instead of a response.
    pub(crate) fn reject(&mut self, error: &ApiError) {
        self.fail_as(error, FailureKind::Rejected);
    }

    /// The reply cannot be completed. A stream gets the error and its end; a whole answer becomes
    /// the error.
    pub(crate) fn fail(&mut self, error: &ApiError) {
        self.fail_as(error, FailureKind::Broken);
    }

    fn fail_as(&mut self, error: &ApiError, kind: FailureKind) {
        if self.progress.fail(error, kind) {
            self.on_failed(error);
        }
    }

    /// Renders the error, and drops what waits.
    fn on_failed(&mut self, error: &ApiError) {
        if self.shape.stream {
            SseRender::error(error, &mut self.outlet.bytes);
        }
        self.open = 0;
        self.sequences.iter_mut().for_each(Sequence::drop_held);
        self.wake();
    }

    /// Renders due text after tokens or the end of sequence `index`.
    #[inline]
    fn settle(&mut self, index: u32, text: &TextModel) {
        if !self.shape.stream || self.progress.is_complete() {
            return;
        }
        self.settle_sequence(index as usize, text);
        self.close();
    }

    /// Renders due text after the client has read.
    fn settle_all(&mut self, text: &TextModel) {
        if !self.shape.stream || self.progress.is_complete() {
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
        sequence.render_turns(&mut self.outlet.bytes);
        if matches!(sequence.life, Life::Ended(_)) && sequence.holds_last_step() {
            sequence.render_end(text, &mut self.outlet.bytes);
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
            self.sequences[0].render_usage(&usage, &mut self.outlet.bytes);
        }
        if self.trace.is_some() {
            let trace = self.trace_json();
            self.outlet.bytes.put(b": slipstream-trace ");
            self.outlet.bytes.put(trace.as_bytes());
            self.outlet.bytes.put(b"\n\n");
        }
        SseRender::done(&mut self.outlet.bytes);
        self.progress = Progress::Complete { is_given_up: false };
    }

    /// Fills the empty buffer from held tokens, now that the client has read. Returns the sequences
    /// in which a stop string was found: the worker should kill them.
    pub(super) fn refill(&mut self, text: &TextModel) -> Vec<u32> {
        let mut stopped = Vec::new();
        for (index, sequence) in self.sequences.iter_mut().enumerate() {
            while self.outlet.has_room() {
                sequence.render_turns(&mut self.outlet.bytes);
                if !sequence.life.is_running() && sequence.holds_last_step() {
                    break; // it leaves with the reason
                }
                if sequence.held.is_empty() {
                    break;
                }
                make_room(&mut self.outlet.bytes);
                let was_running = sequence.life.is_running();
                if sequence.take_held(text, &mut self.outlet.bytes) {
                    // The engine may have ended it before: its tokens were not looked at yet.
                    self.open -= u32::from(was_running);
                    stopped.push(to_u32(index));
                    break;
                }
            }
            if sequence.held.is_empty() && sequence.held.capacity() > 1024 {
                sequence.held = VecDeque::new();
            }
        }
        self.settle_all(text);
        if self.memory.has_grown() && self.sequences.iter().all(|s| s.held.is_empty()) {
            self.memory.shrink_to_base();
        }
        stopped
    }

    /// Whether something is there that the client has not taken.
    fn waits_for_client(&self) -> bool {
        match self.progress {
            Progress::Rendering => true,
            Progress::Waiting | Progress::Open => {
                self.outlet.is_paused() || self.shape.stream && !self.outlet.bytes.is_empty()
            }
            Progress::Complete { .. } | Progress::Delivered | Progress::Failed(_) => {
                self.shape.stream
            }
        }
    }

    /// Whether it has to end, at tick `tick` of the shard. A client may leave what waits for it unread for
    /// `ticks_max` ticks; `is_late`: it had to be complete by now.
    pub(super) fn overdue(&mut self, tick: u64, ticks_max: u64, is_late: bool) -> Option<Overdue> {
        if self.progress.is_delivered() || self.progress.is_cut() {
            return None;
        }
        if is_late {
            return Some(Overdue::Deadline);
        }
        if !self.waits_for_client() {
            self.outlet.polled_tick = tick;
            return None;
        }
        (tick - self.outlet.polled_tick > ticks_max).then_some(Overdue::Unread)
    }

    /// Ends it: the rest is never rendered.
    pub(crate) fn cut(&mut self, error: &ApiError) {
        let was_complete = self.progress.is_complete();
        self.progress.cut(error, self.shape.stream);
        if !was_complete {
            self.on_failed(error);
        }
        if !self.shape.stream {
            self.sequences.iter_mut().for_each(Sequence::drop_text);
        }
        self.memory.shrink_charge_to(REPLY_BYTES);
    }

    /// Whether its client leaves before it has all of it.
    pub(super) fn is_abandoned(&self) -> bool {
        match &self.progress {
            Progress::Waiting | Progress::Open => self.shape.stream || self.open > 0,
            Progress::Rendering => true,
            Progress::Complete { .. } | Progress::Delivered => false,
            Progress::Failed(failure) => failure.kind == FailureKind::CutInRendering,
        }
    }

    /// The reader of the request's input may stop.
    pub(super) fn end_input(&mut self) {
        self.input.end();
    }

    pub(super) fn usage(&self) -> Usage {
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

    pub(super) fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Cost of each candidate by the router, as JSON.
    pub(crate) fn set_scores(&mut self, scores: String) {
        if let Some(trace) = &mut self.trace {
            trace.scores = scores;
        }
    }

    /// The trace as JSON.
    pub(crate) fn trace_json(&self) -> String {
        trace_json(&self.times, &self.sequences[0], self.trace.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::FinishReason;

    use super::*;
    use crate::openai::CompletionApi;
    use crate::text::StopMatcher;
    use crate::tokens::reply::outlet::RENDERED_BYTES_MAX;

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
        let bytes = state.outlet.bytes.split();
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
                    state.outlet.bytes.resize(RENDERED_BYTES_MAX, b' ');
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
            all.extend_from_slice(&state.outlet.bytes.split());
            if state.progress.is_complete() {
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
        assert!(state.outlet.bytes.is_empty());
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
                    state.outlet.bytes.resize(RENDERED_BYTES_MAX, b' ');
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
                let first = state.outlet.bytes.split();
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
                    state.outlet.bytes.resize(RENDERED_BYTES_MAX, b' ');
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
        let _filler = state.outlet.bytes.split_to(RENDERED_BYTES_MAX);
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
        assert_eq!(metrics.plane.excess_tokens.get(), 2);
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
        assert_eq!(metrics.tokens.cached.get(), 16);
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
        assert_eq!(
            (metrics.latency.itl.count(), metrics.latency.itl.sum()),
            (2, 20)
        );
        assert_eq!(metrics.tokens.generation.get(), 9);
    }

    #[test]
    fn an_echo_shares_the_event_of_the_first_token_of_its_choice() {
        let text = TextModel::builtin();
        let metrics = ShardMetrics::new();
        let word = words(&text, " the");
        let mut state = reply(CompletionApi::Completion, 2, &[], Some("Say"));
        assert!(state.outlet.bytes.is_empty());
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
