//! The HTTP side's hold on a reply.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use slipstream_base::{FinishReason, Stage};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::{Registration, StreamAddr, ToWorker};
use tokio::time::Sleep;

use crate::door::metrics::FinishedSequence;
use crate::openai::ApiError;
use crate::tokens::reply::progress::{Ending, Progress};
use crate::tokens::reply::sequence::Sequence;
use crate::tokens::reply::state::Overdue;
use crate::tokens::reply::{Reply, StreamSlot};
use crate::tokens::workers::Workers;

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
        reply.set_streams(registrations);
        reply.state.borrow_mut().outlet.polled_tick = workers.replies.tick();
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

    /// The workers that make it.
    pub(crate) fn workers(&self) -> &Rc<Workers> {
        &self.workers
    }

    /// Address of its first stream.
    pub(crate) fn addr(&self) -> StreamAddr {
        self.reply.first_addr()
    }

    /// Fails the reply if its time is over. Registers the task with the timer.
    pub(super) fn poll_deadline(&mut self, cx: &mut Context<'_>) {
        let Some(deadline) = &mut self.deadline else {
            return;
        };
        if deadline.as_mut().poll(cx).is_ready() {
            self.deadline = None;
            if !self.reply.state.borrow().progress.is_cut() {
                self.workers.end_overdue(&self.reply, Overdue::Deadline);
            }
        }
    }

    /// Waits until every sequence of a whole answer has ended. With a traced one, the trace.
    ///
    /// # Errors
    /// The answer failed.
    pub(crate) async fn complete(&mut self) -> Result<Option<String>, ApiError> {
        std::future::poll_fn(|cx| {
            self.poll_deadline(cx);
            let mut state = self.reply.state.borrow_mut();
            if state.open == 0 {
                return Poll::Ready(());
            }
            state.outlet.wait(cx);
            Poll::Pending
        })
        .await;
        // The rest needs no worker and no stream.
        self.workers.end_streams(&self.reply);
        let mut state = self.reply.state.borrow_mut();
        if let Some(error) = state.progress.error() {
            return Err(error.clone());
        }
        state.sequences.iter_mut().for_each(Sequence::finish_text);
        state.progress = Progress::Rendering;
        state.outlet.polled_tick = self.workers.replies.tick();
        Ok(state.is_traced().then(|| {
            let now = monotonic_ns();
            state.times.note(Stage::Rendered, now);
            state.times.note(Stage::Written, now);
            state.trace_json()
        }))
    }
}

impl Drop for ReplyHandle {
    fn drop(&mut self) {
        self.workers.replies.remove(self.place);
        let state = self.reply.state.borrow();
        if state.progress.is_rejected() {
            drop(state);
            return self.workers.end_streams(&self.reply);
        }
        let now = monotonic_ns();
        if state.is_abandoned() {
            self.workers.shard.metrics.disconnects.add(1);
        }
        if let Some(accept) = state.times.at(Stage::Accept) {
            self.workers
                .shard
                .metrics
                .latency
                .e2e
                .observe(now.saturating_sub(accept));
        }
        self.workers.shard.metrics.on_stages(&state.times);
        let is_delivered = state.progress.is_delivered();
        for sequence in state.sequences.iter().filter(|s| !s.life.is_refused()) {
            // An answer that was not read to its end is no success, although the engine was done.
            let reason = match sequence.life.ending() {
                Some(Ending::Engine(reason)) if is_delivered => *reason,
                Some(Ending::StopString(_)) if is_delivered => FinishReason::Stop,
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
            if choices.iter().any(|choice| !choice.life.is_refused()) {
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
        self.reply.state.borrow_mut().end_input();
    }
}

impl ReplyHandle {
    /// The client has read: workers that wait for credit get some.
    pub(super) fn give_credit(&self) {
        let mut state = self.reply.state.borrow_mut();
        for (index, registration) in (0u32..).zip(&*self.reply.streams()) {
            let bytes = state.credit_due(index);
            if bytes > 0 {
                let (rank, addr) = (state.target(index), registration.addr());
                self.workers
                    .send_control(ToWorker::Credit { rank, addr, bytes });
            }
        }
    }

    pub(super) fn kill(&self, index: u32) {
        let addr = self
            .reply
            .streams()
            .get(index as usize)
            .map(Registration::addr);
        if let Some(addr) = addr {
            self.workers.cancel(addr.stream.slot);
        }
    }
}
