//! Requests in flight.

use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{RankId, RequestId, SimTime};
use slipstream_dispatch::Attempt;
use slipstream_engine::{FirstToken, LowerHits, Usage};
use slipstream_flows::TransferId;
use slipstream_router::ActiveSequence;
use slipstream_workload::Request;

use crate::run::{Hops, RequestRecord};

/// A request in flight.
pub(crate) struct Flight {
    pub(crate) request: Request,
    /// Distinguishes it from earlier requests in this slot.
    pub(crate) ticket: u64,
    /// The router's charge, in a run that routes ahead (`lanes`). Otherwise the dispatcher has it.
    pub(crate) active: Option<ActiveSequence>,
    /// The node that computed its prompt, if it is another one.
    pub(crate) prefill: Option<u32>,
    /// Start of its KV transfer, and the transfer's id unless it took no time.
    pub(crate) sent: Option<(SimTime, Option<TransferId>)>,
    /// The attempt and tokens of that transfer.
    pub(crate) fetch: Option<(Attempt, u32)>,
    /// Number of retries by its client.
    pub(crate) retries: u32,
    /// Its client waits before it tries again: no frontend has it.
    pub(crate) away: bool,
    /// Tokens that its client had when a worker of it was last lost.
    pub(crate) answered: u32,
    /// From the loss of its worker until another one continues it: the node, and the part that had arrived.
    pub(crate) resuming: Option<(u32, Usage)>,
    /// Times that another worker continued it.
    pub(crate) resumed: u32,
    /// Time of its last token; 0 before the first.
    pub(crate) last: SimTime,
    pub(crate) first: Option<SimTime>,
    pub(crate) admitted: Option<SimTime>,
    pub(crate) first_pass_start: SimTime,
    pub(crate) cached_tokens: u32,
    pub(crate) lower: LowerHits,
    /// Longest gap between two tokens so far, ns; recorded only if every token is processed.
    pub(crate) gap_max: u64,
    pub(crate) hops: Hops,
}

impl Flight {
    pub(crate) fn new(request: Request, active: Option<ActiveSequence>, now: SimTime) -> Flight {
        Flight {
            request,
            ticket: 0,
            active,
            prefill: None,
            sent: None,
            fetch: None,
            retries: 0,
            away: false,
            answered: 0,
            resuming: None,
            resumed: 0,
            last: SimTime::ZERO,
            first: None,
            admitted: None,
            first_pass_start: now,
            cached_tokens: 0,
            lower: LowerHits::default(),
            gap_max: 0,
            hops: Hops::at(now),
        }
    }

    /// Whether another worker generated its first tokens.
    pub(crate) fn is_resumed(&self) -> bool {
        self.answered > 0
    }

    /// Records its first token at `now`, from a pass that ended at `pass_end`; or the first of a worker that
    /// continues it.
    pub(crate) fn on_first(&mut self, first: &FirstToken, pass_end: SimTime, now: SimTime) {
        self.last = now;
        if self.is_resumed() {
            self.resuming = None;
            self.resumed += 1;
            return;
        }
        self.first = Some(now);
        self.hops.first_pass_end = pass_end;
        if self.prefill.is_none() {
            self.admitted = Some(first.admitted);
        }
        self.first_pass_start = first.first_pass_start;
        if self.prefill.is_none() {
            self.cached_tokens = first.cached_tokens;
            self.lower = first.lower;
        }
        if let Some(active) = &mut self.active {
            active.on_first_token();
        }
    }

    /// The record of a request that ended on `rank` at `now`, after `failed_over` attempts elsewhere.
    pub(crate) fn record(
        &self,
        rank: RankId,
        prefill_rank: Option<RankId>,
        failed_over: u32,
        usage: &Usage,
        now: SimTime,
    ) -> RequestRecord<'_> {
        let cached_tokens = match self.prefill {
            None if !self.is_resumed() => usage.cached_tokens,
            _ => self.cached_tokens,
        };
        RequestRecord {
            request: &self.request,
            rank: Some(rank),
            prefill_rank,
            hops: self.hops,
            admitted: self.admitted.unwrap_or(now),
            first_pass_start: self.first_pass_start,
            first: self.first.unwrap_or(now),
            last: now,
            input_tokens: usage.prompt_tokens,
            cached_tokens,
            lower: self.lower,
            output_tokens: usage.output_tokens,
            preemptions: usage.preemptions,
            retries: self.retries + failed_over,
            error: None,
        }
    }
}

/// Requests in flight, by the slot that identifies them in engines.
#[derive(Default)]
pub(crate) struct Flights {
    slots: Vec<Option<Flight>>,
    free: Vec<u32>,
    len: usize,
    /// Requests so far.
    arrived: u64,
    /// Requests in flight whose session continues after them.
    continuing: usize,
}

impl Flights {
    /// Adds a request, and gives it a ticket.
    pub(crate) fn insert(&mut self, mut flight: Flight) -> RequestId {
        flight.ticket = self.arrived;
        self.arrived += 1;
        self.len += 1;
        self.continuing += usize::from(flight.request.has_next());
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(flight);
            slot
        } else {
            self.slots.push(Some(flight));
            to_u32(self.slots.len()) - 1
        };
        RequestId(slot.into())
    }

    pub(crate) fn get_mut(&mut self, id: RequestId) -> &mut Flight {
        self.slots[to_usize(id.0)]
            .as_mut()
            .expect("an engine knows only requests that are under way")
    }

    /// The request in `slot`, if it is still the one with `ticket`.
    pub(crate) fn find(&mut self, slot: u32, ticket: u64) -> Option<&mut Flight> {
        let flight = self.slots.get_mut(slot as usize)?.as_mut()?;
        (flight.ticket == ticket).then_some(flight)
    }

    /// The model of the request in `slot`, if there is one.
    pub(crate) fn model_of(&self, slot: u32) -> Option<u32> {
        let flight = self.slots.get(slot as usize)?.as_ref()?;
        Some(flight.request.model)
    }

    pub(crate) fn get(&self, id: RequestId) -> &Flight {
        self.slots[to_usize(id.0)]
            .as_ref()
            .expect("an engine knows only requests that are under way")
    }

    pub(crate) fn remove(&mut self, id: RequestId) -> Flight {
        self.len -= 1;
        self.free.push(to_u32(id.0));
        let flight = self.slots[to_usize(id.0)].take();
        let flight = flight.expect("an engine ends a request once");
        self.continuing -= usize::from(flight.request.has_next());
        flight
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Requests that have arrived.
    pub(crate) fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Requests in flight whose session continues after them.
    pub(crate) fn continuing(&self) -> usize {
        self.continuing
    }

    /// All requests, with their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Flight)> {
        let each = (0..).zip(&self.slots);
        each.filter_map(|(slot, flight)| Some((slot, flight.as_ref()?)))
    }
}
