//! The invariants of a schedule, judged from its processes and its clients' records.
//!
//! After every event:
//!
//! 1. Each choice of an accepted request ends exactly once, and its tokens are those of its seed, in order.
//! 2. Blocks are conserved at each engine, and none is held without a stream. No more sequences are in an
//!    engine than streams are open there. Credit does not exceed the grants.
//! 3. Queues stay within their bounds.
//! 4. A request without a token is not lost with its worker.
//! 5. Nothing panics.
//! 6. A process that keeps a connection to a shard does not dial it: it would be refused as connected already.
//!
//! Once faults have healed and clients are done:
//!
//! 7. Every request has ended: sent = finished + refused + cancelled + lost.
//! 8. Nothing is left: no request, stream, byte of memory, block, or load of a router.
//! 9. Connections are as the seats are, and every worker is ready on every frontend.
//! 10. The index of cached blocks agrees with the engines.
//! 11. A further request is answered.

use std::cell::RefCell;
use std::rc::Rc;

use slipstream_frontend::sim::{ShardState, SimShard};

use crate::client::{self, Outcome};
use crate::machines::{Frontend, Process};
use crate::plan::{Pools, Shape};

/// What the oracle sees of a schedule.
pub(crate) struct View<'a> {
    pub(crate) now: u64,
    pub(crate) shape: &'a Shape,
    pub(crate) processes: &'a [Process],
    pub(crate) frontends: &'a [Frontend],
    pub(crate) records: &'a [Rc<RefCell<client::Record>>],
    /// No fault has happened that may cost a request.
    pub(crate) calm: bool,
}

impl View<'_> {
    /// No task sleeps while there is something for it: else a later ping or frame would hide a lost wake-up.
    pub(crate) fn check_wake_ups(&self) -> Result<(), String> {
        let now = self.now;
        for (index, process) in self.processes.iter().enumerate() {
            let Some((worker, _)) = process.up.as_ref().filter(|_| process.frozen_until <= now)
            else {
                continue;
            };
            let bytes = worker.kv_waiting();
            if bytes > 0 {
                return Err(format!(
                    "process {index}: no connection was woken for {bytes} bytes of KV deltas"
                ));
            }
        }
        Ok(())
    }

    /// The invariants that hold after every event.
    pub(crate) fn check(&self) -> Result<(), String> {
        let shape = self.shape;
        for (index, process) in self.processes.iter().enumerate() {
            if let Some((worker, _)) = &process.up {
                let credit = shape.credit_bytes / 4;
                worker
                    .check(credit)
                    .map_err(|what| format!("process {index}: {what}"))?;
            }
        }
        let streams_max = match shape.pools {
            Pools::Whole => u64::from(shape.streams_max),
            _ => 2 * u64::from(shape.streams_max),
        };
        for frontend in self.frontends.iter().filter_map(|f| f.up.as_ref()) {
            let mut queued = 0;
            for shard in &frontend.shards {
                if let Err((stream, worker)) = shard.check()
                    && !self.processes[worker.index() / shape.workers].stopped
                {
                    return Err(format!(
                        "{stream:?} got more tokens of {worker} than it has credit for"
                    ));
                }
                let (open, waits, streams) = shard.sizes();
                queued += waits;
                if streams > streams_max {
                    return Err(format!("{streams} streams, and {streams_max} are allowed"));
                }
                if open > streams {
                    return Err(format!("{open} requests have {streams} streams"));
                }
            }
            if queued > shape.queue_max {
                return Err(format!("{queued} requests wait, of {}", shape.queue_max));
            }
        }
        for (index, record) in self.records.iter().enumerate() {
            let record = record.borrow();
            if let Some(wrong) = &record.wrong {
                return Err(format!("client {index}: {wrong}"));
            }
            if record.outcomes.len() > 1 {
                return Err(format!("client {index} ends twice: {:?}", record.outcomes));
            }
            self.judge(index, &record)?;
        }
        Ok(())
    }

    /// Whether a request may end as it did.
    fn judge(&self, index: usize, record: &client::Record) -> Result<(), String> {
        let Some(outcome) = record.outcomes.first() else {
            return Ok(());
        };
        let unfit = |why: &str| Err(format!("client {index} ends as {outcome:?}: {why}"));
        match outcome {
            Outcome::Refused(error) if !matches!(error.status, 429 | 502 | 503 | 504) => {
                unfit("its request is valid")
            }
            Outcome::Refused(_) | Outcome::Lost(_)
                if self.calm && self.shape.is_ample() && self.is_past_start(record) =>
            {
                unfit("nothing has failed, and there is room")
            }
            Outcome::Lost(error) if error.starts_with("worker_lost") && record.is_empty() => {
                if record.plan.pause_ms == 0 && record.plan.stream {
                    return unfit("no token of it had come, so that another worker could take it");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn is_past_start(&self, record: &client::Record) -> bool {
        // Workers connect and start up first.
        record.plan.at_ns > 2 * self.shape.startup_ms * 1_000_000 + 50_000_000
    }

    /// Whether every request has ended, and nothing is left.
    pub(crate) fn is_quiet(&self) -> Result<(), String> {
        for (index, record) in self.records.iter().enumerate() {
            let record = record.borrow();
            if record.outcomes.is_empty() {
                return Err(format!("client {index} has no end: {:?}", record.choices));
            }
        }
        let mut caches = Vec::new();
        for (index, process) in self.processes.iter().enumerate() {
            let Some((worker, _)) = &process.up else {
                return Err(format!("process {index} is down"));
            };
            if process.leaving || !worker.is_ready() {
                return Err(format!("process {index} is not ready"));
            }
            let held = worker.check(u32::MAX)?;
            if (
                held.live,
                held.held,
                held.used_blocks,
                held.running + held.waiting,
            ) != (0, 0, 0, 0)
            {
                return Err(format!("process {index} holds {held:?}"));
            }
            let links = (self.shape.frontends * self.shape.shards) as u64;
            if worker.open_links() != links {
                return Err(format!("process {index} has {} links", worker.open_links()));
            }
            caches.extend(worker.caches());
        }
        for (index, frontend) in self.frontends.iter().enumerate() {
            let Some(up) = &frontend.up else {
                return Err(format!("frontend {index} is down"));
            };
            let mut seats = 0;
            for shard in &up.shards {
                let state = shard.state();
                let left = ShardState {
                    open: state.open,
                    queued: state.queued,
                    streams: state.streams,
                    streams_open: state.streams_open,
                    memory: state.memory,
                    ..ShardState::default()
                };
                if left != ShardState::default() {
                    return Err(format!("frontend {index} holds {left:?}"));
                }
                if state.seated.len() != self.shape.worker_count() {
                    return Err(format!("frontend {index} has {:?}", state.seated));
                }
                seats += self.shape.processes as u64;
            }
            let totals = up.roster.totals();
            if totals.open != seats {
                return Err(format!(
                    "frontend {index}: {} of {seats} connections",
                    totals.open
                ));
            }
            for fleet in up.fleets.each() {
                for load in fleet.loads() {
                    let rank = load.rank;
                    if !load.ready {
                        return Err(format!("frontend {index}: {rank} is not ready"));
                    }
                    if (load.requests, load.prefill_tokens, load.active_blocks) != (0, 0, 0) {
                        return Err(format!("frontend {index}: load of {rank}: {load:?}"));
                    }
                    if !fleet.reads_cache() {
                        continue;
                    }
                    let cached = caches
                        .iter()
                        .find(|(of, _)| *of == rank)
                        .map_or(0, |of| of.1);
                    if !load.trusted || load.cached_blocks != cached {
                        return Err(format!(
                            "frontend {index}: the index has {} blocks of {rank}, trusted: {}, and \
                             its engine {cached}",
                            load.cached_blocks, load.trusted
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// If nothing failed and every request finished: no entry was sent to a stream that was gone, and each
    /// shard has counted the tokens that its answers say were used.
    pub(crate) fn check_totals(&self) -> Result<(), String> {
        let finished =
            |record: &Rc<RefCell<client::Record>>| record.borrow().outcomes == [Outcome::Finished];
        if !self.calm || !self.records.iter().all(finished) {
            return Ok(());
        }
        for (at, frontend) in self.frontends.iter().enumerate() {
            let shards = frontend.up.iter().flat_map(|up| &up.shards);
            for (shard, state) in shards.map(SimShard::state).enumerate() {
                if (state.stale_entries, state.foreign_entries) != (0, 0) {
                    return Err(format!("entries came too late: {state:?}"));
                }
                let mut used = [0; 3];
                for record in self.records {
                    let record = record.borrow();
                    if record.plan.to == (at, shard) {
                        let usage = record.usage.ok_or("an answer without `usage`")?;
                        used = [0, 1, 2].map(|of| used[of] + usage[of]);
                    }
                }
                if state.tokens != used {
                    return Err(format!(
                        "frontend {at} shard {shard} has counted {:?} tokens of prompts, of caches and \
                         of answers, and its answers say {used:?}",
                        state.tokens
                    ));
                }
            }
        }
        Ok(())
    }
}
