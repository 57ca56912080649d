//! Passes of the engines: which begin, jump or are planned, and when they end.

use slipstream_base::SimTime;
use slipstream_dispatch::Role;
use slipstream_report::PassRecord;

use super::Sim;
use crate::lockstep::Start;
use crate::node::Phase;
use crate::run::{Sink, TwinError};

impl Sim<'_> {
    /// Ends the passes that end now.
    pub(super) fn end_passes(&mut self, sink: &mut dyn Sink) {
        while let Some((entry, node, life)) = self.agenda.take_end() {
            if self.planned.is_stale(node, entry) {
                continue;
            }
            let n = &self.nodes[node];
            if n.life != life || n.hangs {
                continue; // its worker was lost, or hangs
            }
            self.turn_to_node(node);
            match self.nodes[node].phase {
                Phase::Jumped => self.nodes[node].phase = Phase::Awake,
                Phase::Planned => self.end_plan(node),
                _ => self.end_pass(node, sink),
            }
            self.nodes.note_awake(node);
        }
        while let Some((_, node, life)) = self.agenda.take_prefill_end() {
            let n = &self.nodes[node];
            if n.life == life && !n.hangs {
                self.turn_to_node(node);
                self.end_prefill(node, sink);
                self.nodes.note_awake(node);
            }
        }
    }

    /// Ends the plan of a node, whose last pass ends now.
    fn end_plan(&mut self, node: u32) {
        let (nodes, tally) = (&mut *self.nodes, &mut self.model.tally);
        let serve = &mut self.model.serve;
        self.planned.run(self.agenda.now, node, nodes, serve, tally);
        let n = &mut self.nodes[node];
        n.engine.end_plan();
        n.phase = Phase::Awake;
    }

    /// Ends the plan of a node, if it has one, before anything is done to its engine.
    pub(super) fn leave_plan(&mut self, node: u32) {
        if self.nodes[node].phase != Phase::Planned {
            return;
        }
        let (nodes, tally) = (&mut *self.nodes, &mut self.model.tally);
        let serve = &mut self.model.serve;
        self.planned.run(self.agenda.now, node, nodes, serve, tally);
        let n = &mut self.nodes[node];
        let at = n.engine.end_plan();
        if at == self.agenda.now {
            n.phase = Phase::Awake;
            self.nodes.note_awake(node);
        } else if let Some(end) = n.begin(at) {
            assert!(
                end > self.agenda.now,
                "a pass has the length that was planned"
            );
            self.push_end(node, end);
        }
    }

    fn push_end(&mut self, node: u32, end: SimTime) {
        let n = &self.nodes[node];
        let entry = self.agenda.plan_end(end, node, n.life, n.role);
        self.planned.set_entry(node, entry);
    }

    /// Begins a pass on each engine whose last one has ended, or that got work.
    pub(super) fn begin_passes(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        let mut awake = self.nodes.take_awake();
        if self.rules.hands_over {
            // First those whose ends limit the jumps of others.
            awake.sort_by_key(|&node| self.nodes[node].role != Role::Prefill);
        }
        let mut until = None;
        let mut left = awake.len();
        for node in awake.drain(..) {
            if self.nodes[node].phase != Phase::Awake {
                continue; // its worker was lost at this time
            }
            if let Some(threads) = &mut self.threads
                && !threads.may_begin(self.agenda.now, node)
            {
                continue; // until its thread has scheduled the pass
            }
            self.turn_to_node(node);
            if let Some(lockstep) = &self.lockstep
                && let Some(group) = lockstep.group_of(node)
            {
                self.begin_together(group, sink);
                continue;
            }
            let n = &mut self.nodes[node];
            if n.role == Role::Prefill {
                left -= 1;
                if let Some(end) = self.begin(node, sink) {
                    let life = self.nodes[node].life;
                    self.agenda.plan_end(end, node, life, Role::Prefill);
                }
                continue;
            }
            let mut end = self.planned.plan(n, self.agenda.now);
            if end.is_none() && !(self.planned.is_enabled() && n.engine.may_plan()) {
                let until = match until {
                    Some(until) => until,
                    None => *until.insert(self.jump_until(left)?),
                };
                end = self.jump(node, until, sink);
            }
            let end = end.or_else(|| self.begin(node, sink));
            if let Some(end) = end {
                self.push_end(node, end);
            }
        }
        self.nodes.reuse_awake(awake);
        Ok(())
    }

    /// Begins a step of all ranks of `group`, none of which is in one.
    fn begin_together(&mut self, group: u32, sink: &mut dyn Sink) {
        let Some(lockstep) = &mut self.lockstep else {
            return;
        };
        let now = self.agenda.now;
        let (nodes, first) = match lockstep.start(group, &self.nodes, now) {
            Start::Never => return,
            Start::Paused(nodes) => {
                for node in nodes {
                    self.nodes[node].phase = Phase::Idle;
                    self.publish_idle(node);
                }
                return;
            }
            Start::Step { nodes, first } => (nodes, first),
        };
        let (mut most, mut all) = (0, 0);
        for node in nodes.clone() {
            self.nodes[node].begin_in_step(now, first);
            self.began(node, sink);
            let tokens = self.nodes[node].engine.tokens_in_step();
            (most, all) = (most.max(tokens), all + tokens);
        }
        if let Some(lockstep) = &mut self.lockstep {
            let end = lockstep.meet(group, &mut self.nodes, now, (most, all));
            for node in nodes {
                let n = &self.nodes[node];
                self.agenda.plan_end(end, node, n.life, n.role);
            }
        }
    }

    fn begin(&mut self, node: u32, sink: &mut dyn Sink) -> Option<SimTime> {
        self.wire.before_step(node, self.nodes[node].rank.worker);
        let end = self.nodes[node].begin(self.agenda.now);
        if let Some(end) = end {
            self.wire.step_began(node, self.agenda.now, end);
        }
        if let Some(threads) = &mut self.threads {
            let ahead = end.is_some() && self.nodes[node].engine.schedules_ahead();
            threads.began(self.agenda.now, node, ahead);
        }
        self.began(node, sink);
        end
    }

    /// A node has begun a pass, or is idle.
    fn began(&mut self, node: u32, sink: &mut dyn Sink) {
        self.publish_idle(node);
        self.note_queue(node);
        if let Some(peers) = &mut self.peers {
            peers.begin_loads(node, &mut self.nodes, &self.wire, &mut self.agenda);
        }
        if self.model.prefill.is_some() {
            let mut reserved = std::mem::take(&mut self.scratch.reserved);
            self.nodes[node].engine.take_reserved(&mut reserved);
            for reserved in reserved.drain(..) {
                self.on_reserved(reserved, sink);
            }
            self.scratch.reserved = reserved;
        }
    }

    /// Limit of jumps for the `awake` engines that begin a pass now: a request must find the state
    /// of its target engine, and of the router's index, at its time.
    fn jump_until(&mut self, awake: usize) -> Result<SimTime, TwinError> {
        let single = self.rules.delays_output
            || self.faults.need_single_passes
            || self.peers.is_some()
            || self.wire.slows_steps();
        if !self.options.jump || single || awake == 0 {
            return Ok(SimTime::ZERO);
        }
        let mut until = self.agenda.horizon;
        if !self.is_plain() {
            until = self.next_other().map_or(until, |next| next.min(until));
        }
        if self.rules.hands_over
            && let Some(end) = self.agenda.first_end()
        {
            // The end of a pass may free blocks for a prompt, and so wake its prefill node.
            until = until.min(end);
        }
        // Requests arrive at known times, unless one that ends causes the next, or frees capacity.
        let known = self.flights.continuing() == 0 && !self.schedule.is_closed();
        if known && self.models.queued(&self.model) == 0 {
            if self.rules.hands_over && awake > 1 {
                // One may free blocks for a prompt, and so wake the node that computes the next
                // one.
                return Ok(SimTime::ZERO);
            }
            let due = self.schedule.next_due(self.agenda.now)?;
            return Ok(due.map_or(until, |due| due.min(until)));
        }
        if awake > 1 {
            return Ok(SimTime::ZERO);
        }
        Ok(self.next_time()?.map_or(until, |next| next.min(until)))
    }

    /// Jumps over passes that end before `until`; returns the end of the last.
    fn jump(&mut self, node: u32, until: SimTime, sink: &mut dyn Sink) -> Option<SimTime> {
        if until <= self.agenda.now {
            return None;
        }
        let until = until.min(self.options.time_max);
        let end = self.nodes[node].jump(
            self.agenda.now,
            until,
            &mut self.scratch.run,
            &mut self.model.tally.totals,
        )?;
        let passes = self.scratch.run.ends.len() as u64;
        self.model.tally.passes += passes;
        self.model.tally.jumped += passes;
        let n = &self.nodes[node];
        let kv = &mut self.scratch.out.get_or_insert_default().kv;
        self.model.serve.on_run(node, n, &self.scratch.run, kv);
        self.note_queue(node);
        if self.rules.watches {
            self.report_jump(node, sink);
        }
        Some(end)
    }

    /// Passes of a node have begun, or it is idle: who waits there decides whether its model's requests wake others.
    fn note_queue(&mut self, node: u32) {
        if let Some(shares) = &mut self.shares {
            let waiting = self.nodes[node].engine.stats().waiting;
            shares.began(self.agenda.now, node, waiting);
        }
    }

    /// Reports the passes that were just jumped over.
    fn report_jump(&mut self, node: u32, sink: &mut dyn Sink) {
        let (run, sequences) = (&self.scratch.run, self.scratch.run.sequences());
        let fpm = &mut self.scratch.out.get_or_insert_default().fpm;
        let mut start = run.start;
        for (pass, (&end, &used_blocks)) in run.ends.iter().zip(&run.used_blocks).enumerate() {
            run.fpm_of(pass, fpm);
            sink.on_pass(&PassRecord {
                engine: node,
                start,
                end,
                fpm,
                tokens: run.tokens(),
                used_blocks,
                preemptions: 0,
                gaps: &[(end.since(start), sequences)],
                // It would end before the next arrival.
                arrived: &[],
            });
            start = end;
        }
    }

    /// Publishes blocks that left the cache of `node` without a pass, if it is idle.
    pub(super) fn publish_idle(&mut self, node: u32) {
        let kv = &mut self.scratch.out.get_or_insert_default().kv;
        let n = &mut self.nodes[node];
        self.model.publish_idle(self.agenda.now, node, n, kv);
    }
}
