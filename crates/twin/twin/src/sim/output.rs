//! Tokens: from the end of a pass to the clients.

use slipstream_base::width::to_u32;
use slipstream_engine::PassOutput;
use slipstream_report::PassRecord;

use super::Sim;
use crate::event::Event;
use crate::faults::Held;
use crate::node::Watched;
use crate::run::Sink;
use crate::wire::Frame;

impl Sim<'_> {
    /// A pass of a serving node ends.
    pub(super) fn end_pass(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = self.scratch.out.take().unwrap_or_default();
        let n = &mut self.nodes[node];
        let watched = n.finish(&mut out);
        self.model.tally.passes += 1;
        self.model
            .serve
            .on_kv(self.agenda.now, node, n.life, &out.kv);
        if let Some(peers) = &mut self.peers {
            peers.publish_host(self.agenda.now, node, n);
        }
        if self.rules.delays_output {
            self.send_frame(node, out, watched);
            return;
        }
        self.deliver_output(node, &out, watched, sink);
        self.scratch.out = Some(out);
    }

    /// Delivers the output of a pass to the clients.
    pub(super) fn deliver_output(
        &mut self,
        node: u32,
        out: &PassOutput,
        watched: Watched,
        sink: &mut dyn Sink,
    ) {
        let now = self.agenda.now;
        // Before `record_output`, which may move the time of a request's last token to now.
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            if flight.is_resumed() {
                let tokens = flight.request.prompt.tokens() + flight.answered;
                self.model.tally.resumes.tokens += u64::from(tokens);
                self.model
                    .tally
                    .resumes
                    .times
                    .record(now.since(flight.last));
            }
        }
        let n = &mut self.nodes[node];
        let totals = &mut self.model.tally.totals;
        n.record_output(now, out, &mut self.flights, totals);
        if let Some(watch) = &n.watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: out.token_count,
                used_blocks: watched.used_blocks,
                preemptions: watched.preempted,
                gaps: &watch.gaps,
                arrived: &out.arrived,
            });
        }
        self.note_first_tokens(node, out, sink);
        self.end_answers(node, out, sink);
    }

    /// The requests of a pass that got their first token.
    fn note_first_tokens(&mut self, node: u32, out: &PassOutput, sink: &mut dyn Sink) {
        let now = self.agenda.now;
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            flight.on_first(first, out.end, now);
            if !flight.is_resumed() {
                sink.on_first(&flight.request, now);
            }
            if !self.scaling.is_empty() {
                let slo = self.options.slo.of_class(flight.request.class);
                let limit = slo.and_then(|slo| slo.limit_ns("ttft"));
                let ttft = now.since(flight.request.due);
                // Both pools that had a part of it can be what made it late.
                for node in [Some(node), flight.prefill].into_iter().flatten() {
                    let worker = self.nodes[node].rank.worker;
                    self.scaling.on_first_token(worker, ttft, limit);
                }
            }
            self.model.dispatch.on_first_token(to_u32(first.id.0));
        }
    }

    /// The requests of a pass that got their last token.
    fn end_answers(&mut self, node: u32, out: &PassOutput, sink: &mut dyn Sink) {
        let now = self.agenda.now;
        for done in &out.finished {
            let flight = self.flights.remove(done.id);
            let slot = to_u32(done.id.0);
            let failed_over = u32::from(self.model.dispatch.retries(slot));
            self.model.dispatch.on_ended(slot);
            let rank = self.nodes[node].rank;
            let prefill_rank = flight.prefill.map(|node| self.nodes[node].rank);
            let record = flight.record(rank, prefill_rank, failed_over, &done.usage, now);
            let slo = &self.options.slo;
            self.model.tally.note(&record, flight.gap_max, slo);
            sink.on_request(&record);
            self.schedule
                .on_done(&flight.request, done.usage.output_tokens, now);
            if !self.pins.is_empty() {
                self.pins.remove(&flight.request.id().0);
            }
        }
    }

    /// Sends the tokens of a pass to the frontend.
    fn send_frame(&mut self, node: u32, out: Box<PassOutput>, watched: Watched) {
        let n = &self.nodes[node];
        let (worker, life) = (n.rank.worker, n.life);
        let tokens = out.token_count;
        let frame = self.wire.frames.insert(Frame {
            node,
            life,
            out,
            watched,
        });
        if self.wire.carries_messages() {
            self.wire.send_frame(self.agenda.now, worker, tokens, frame);
        } else {
            self.frame_received(frame);
        }
    }

    /// The frontend has a frame, and processes it.
    pub(super) fn frame_received(&mut self, frame: u32) {
        let Some(Frame {
            node, life, out, ..
        }) = self.wire.frames.get(frame)
        else {
            return;
        };
        let n = &mut self.nodes[*node];
        if self.faults.partitions.divide(Some(n.rank.worker), None) {
            return self.faults.partitions.hold(Held::Frame { frame });
        }
        let now = self.agenda.now;
        if n.life == *life {
            for first in &out.first {
                let flight = self.flights.get_mut(first.id);
                if !flight.is_resumed() {
                    flight.hops.frame = now;
                }
            }
        }
        if let Some(threads) = &mut self.threads {
            return threads.pass_ended(now, *node, out.token_count, Event::Output { frame });
        }
        let done = match &mut self.host {
            Some((host, costs)) => host.run(now, costs.frame(out.token_count)),
            None => now,
        };
        n.frames_end = n.frames_end.max(done);
        self.agenda.plan(n.frames_end, Event::Output { frame });
    }

    /// The clients have the tokens of a frame.
    pub(super) fn deliver_frame(&mut self, frame: u32, sink: &mut dyn Sink) {
        let Some(frame) = self.wire.frames.take(frame) else {
            return;
        };
        // Messages in transit from a lost worker never arrive.
        if self.nodes[frame.node].life == frame.life {
            self.turn_to_node(frame.node);
            self.deliver_output(frame.node, &frame.out, frame.watched, sink);
        }
        self.scratch.out = Some(frame.out); // reuse its memory
    }
}
