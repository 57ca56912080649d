//! The life of a request up to its engine, and its end without an answer.

use slipstream_base::width::to_u32;
use slipstream_base::{EngineRequest, GenerationParams, Prompt, RequestId, SimTime};
use slipstream_config::cluster::HandOver;
use slipstream_dispatch::Role;
use slipstream_engine::{LowerHits, Usage};
use slipstream_router::RouteError;
use slipstream_workload::Request;

use super::Sim;
use crate::event::{Event, Step};
use crate::faults::Held;
use crate::flight::Flight;
use crate::requests::{
    check_length, dispatch_request, encoder_inputs, prompt_of, request_seed, root_of,
};
use crate::run::{Failure, REFUSED, RequestRecord, Sink, TwinError, WORKER_LOST, failure};

impl Sim<'_> {
    /// Takes the requests that are due now. Returns whether more than `in_flight_max` came, and almost all were refused: each
    /// refusal lets a closed loop begin the next request at once, so time may never advance.
    pub(super) fn take_arrivals(&mut self, sink: &mut dyn Sink) -> Result<bool, TwinError> {
        // All requests of an endless workload may be due at one time. So may those of a closed loop
        // if they are refused: each lets the next begin, at that time.
        let most = self.options.in_flight_max;
        let mut came = 0;
        while self.flights.len() <= most
            && came <= most
            && let Some(request) = self.schedule.pop(self.agenda.now)?
        {
            came += 1;
            self.arrive(request, sink);
        }
        Ok(came > most && self.flights.len() <= most)
    }

    fn arrive(&mut self, request: Request, sink: &mut dyn Sink) {
        let isl = request.prompt.tokens();
        self.turn_to(request.model as usize);
        let slot = to_u32(
            self.flights
                .insert(Flight::new(request, None, self.agenda.now))
                .0,
        );
        let flight = self.flights.get_mut(RequestId(slot.into()));
        let ticket = flight.ticket;
        if self.faults.frontend_is_down() {
            self.route(slot, sink);
        } else if let Some((host, costs)) = &mut self.host {
            let (ns, after_parsing, after_tokenizing) = costs.request(isl);
            let done = host.run(self.agenda.now, ns);
            flight.hops.parsed = SimTime(done.0 - after_parsing);
            flight.hops.tokenized = SimTime(done.0 - after_tokenizing);
            self.agenda.plan(done, Event::Route { slot, ticket });
        } else if let Some(threads) = &mut self.threads {
            threads.read(self.agenda.now, slot, ticket, isl);
        } else {
            let api_ns = self.model.api_time.ns(isl);
            if api_ns > 0 {
                let at = self.agenda.now + api_ns;
                self.agenda.plan(at, Event::Route { slot, ticket });
            } else {
                self.route(slot, sink);
            }
        }
    }

    /// Releases requests that wait in the frontend, in order, as far as workers have capacity.
    pub(super) fn admit_waiting(&mut self, sink: &mut dyn Sink) {
        let now = self.agenda.now;
        for model in 0..self.models.len() {
            self.turn_to(model);
            let (dispatch, mut env) = self.dispatching();
            dispatch.admit(now, &mut env);
            self.carry_out(None, sink);
        }
    }

    /// Submits a request to the dispatcher.
    pub(crate) fn route(&mut self, slot: u32, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        flight.away = false;
        if self.faults.frontend_is_down() {
            return self.refuse_at_connect(slot, sink);
        }
        let block_size = self.model.serve.fleet.block_size();
        let prompt = check_length(&flight.request, self.model.context_max).and_then(|()| {
            let request = &flight.request;
            let prompt =
                self.scratch
                    .hasher
                    .prompt(request, block_size, root_of(request, self.model.root));
            prompt.map_err(|error| error.to_string())
        });
        let prompt = match prompt {
            Ok(prompt) => prompt,
            Err(error) => {
                return self.refuse_for_good(slot, failure(REFUSED, &error), 0, sink);
            }
        };
        let direct = self.pins.get(&flight.request.id().0).copied();
        let request = dispatch_request(&flight.request, prompt, direct);
        let now = self.agenda.now;
        let (dispatch, mut env) = self.dispatching();
        dispatch.submit(now, slot, &request, &mut env, None);
        self.carry_out(Some(request.prompt), sink);
    }

    /// Whether a node with `role` is the second of a request's two. A request is sent from the
    /// frontend to the first one, and from there to the second.
    pub(crate) fn is_second(&self, role: Role) -> bool {
        match self.cluster.kv.hand_over {
            HandOver::Pull => role == Role::Decode,
            HandOver::Push => role == Role::Prefill,
        }
    }

    /// Sends a request to its first node.
    pub(super) fn begin_step(&mut self, step: Step, prompt: Option<Prompt>, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(step.slot.into()));
        if !flight.is_resumed() {
            flight.hops.routed = self.agenda.now;
            // Those of an attempt that failed.
            (flight.hops.prefilled, flight.hops.kv) = (None, None);
        }
        (flight.prefill, flight.sent) = (None, None);
        if let Some((host, costs)) = &mut self.host {
            let done = host.run(self.agenda.now, costs.dispatch());
            self.agenda.plan(done, Event::Send { step });
        } else if let Some(threads) = &mut self.threads {
            threads.dispatch(self.agenda.now, step.slot, Event::Send { step });
        } else if self.wire.carries_messages() {
            self.send(step);
        } else {
            self.deliver(step, prompt, sink);
        }
    }

    /// Passes a request to the network.
    pub(super) fn send(&mut self, step: Step) {
        if !self.model.dispatch.is_current(step.slot, step.attempt) {
            return;
        }
        let flight = self.flights.get_mut(RequestId(step.slot.into()));
        if flight.hops.dispatched < flight.hops.routed {
            flight.hops.dispatched = self.agenda.now;
        }
        let deliver = Event::Deliver { step };
        if self.wire.carries_messages() {
            let worker = self.nodes[step.node].rank.worker;
            let tokens = flight.request.prompt.tokens();
            self.wire
                .send_request(self.agenda.now, worker, tokens, deliver);
        } else {
            self.agenda.plan(self.agenda.now, deliver);
        }
    }

    /// A request reaches an engine.
    pub(crate) fn deliver(&mut self, step: Step, prompt: Option<Prompt>, sink: &mut dyn Sink) {
        if !self.model.dispatch.is_current(step.slot, step.attempt) {
            return;
        }
        let id = RequestId(step.slot.into());
        let second = self.is_second(step.role);
        if !self.faults.partitions.is_empty() && self.is_cut_off(step) {
            return self.faults.partitions.hold(Held::Deliver { step });
        }
        self.leave_plan(step.node);
        self.nodes[step.node].on_request();
        let request = self.engine_request(id, prompt);
        let flight = self.flights.get_mut(id);
        if !second && !flight.is_resumed() {
            flight.hops.dispatched = flight.hops.dispatched.max(flight.hops.routed);
            flight.hops.received = self.agenda.now;
        }
        let engine = &mut self.nodes[step.node].engine;
        let added = match step.role {
            Role::Prefill => engine.add_prompt(self.agenda.now, request),
            Role::Decode => engine.add_answer(self.agenda.now, request),
            Role::Both => engine.add(self.agenda.now, request),
        };
        if let Some(shares) = &mut self.shares {
            shares.note(step.node);
        }
        match added {
            Ok(()) => self.nodes.wake(step.node),
            Err(refusal) => {
                self.cause.refusal = refusal.to_string();
                let worker = self.nodes[step.node].rank.worker;
                let now = self.agenda.now;
                let (dispatch, mut env) = self.dispatching();
                // A request that does not fit one engine fits none.
                dispatch.on_refused(now, step.slot, worker, false, &mut env);
                self.carry_out(None, sink);
            }
        }
    }

    /// The request in the form of the engines. `prompt` if it is known.
    fn engine_request(&self, id: RequestId, prompt: Option<Prompt>) -> EngineRequest {
        let block_size = self.model.serve.fleet.block_size();
        let flight = self.flights.get(id);
        let request = &flight.request;
        let prompt = prompt.map_or_else(|| prompt_of(request, block_size, self.model.root), Ok);
        EngineRequest {
            id,
            prompt: prompt.expect("it was routed by its prompt"),
            params: GenerationParams {
                max_tokens: request.output_len,
                ignore_eos: request.ignore_eos,
                answered: flight.answered,
                adapter: request.adapter,
                encoder_inputs: encoder_inputs(request),
                ..GenerationParams::default()
            },
            priority: request.priority,
            seed: request_seed(self.rules.seed, request),
        }
    }

    /// No worker takes a request: its client retries later, or gives up.
    pub(super) fn reject(
        &mut self,
        slot: u32,
        error: &RouteError,
        failed_over: u32,
        sink: &mut dyn Sink,
    ) {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        if let Some(lost) = flight.resuming {
            let message = format!("the worker vanished under the answer, and {error}");
            return self.lose(
                slot,
                lost,
                failure(WORKER_LOST, &message),
                failed_over,
                sink,
            );
        }
        // As the frontend answers: with the router's retry time, otherwise a second.
        let wait_s = match error {
            RouteError::Busy { retry_after_s, .. } => *retry_after_s,
            _ => 1,
        };
        if !error.retry_may_help() || !self.client_retries(slot, wait_s) {
            let message = error.to_string();
            self.refuse_for_good(slot, failure(REFUSED, &message), failed_over, sink);
        }
    }

    /// The client of a refused request tries again in `wait_s`, if it has tries left.
    pub(crate) fn client_retries(&mut self, slot: u32, wait_s: u32) -> bool {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        if flight.retries >= self.options.retries {
            return false;
        }
        flight.retries += 1;
        flight.away = true;
        let ticket = flight.ticket;
        self.model.tally.totals.requests.retries += 1;
        let at = self.agenda.now + u64::from(wait_s) * 1_000_000_000;
        self.agenda.plan(at, Event::Route { slot, ticket });
        true
    }

    /// Ends a request that no worker has taken.
    pub(crate) fn refuse_for_good(
        &mut self,
        slot: u32,
        failure: Failure<'_>,
        failed_over: u32,
        sink: &mut dyn Sink,
    ) {
        let flight = self.flights.remove(RequestId(slot.into()));
        let record = RequestRecord {
            request: &flight.request,
            rank: None,
            prefill_rank: None,
            hops: flight.hops,
            admitted: self.agenda.now,
            first_pass_start: self.agenda.now,
            first: self.agenda.now,
            last: self.agenda.now,
            input_tokens: flight.request.prompt.tokens(),
            cached_tokens: 0,
            lower: LowerHits::default(),
            output_tokens: 0,
            preemptions: 0,
            retries: flight.retries + failed_over,
            error: Some(failure),
        };
        self.note_failed(&record, sink);
    }

    /// Ends a request that was lost; `usage` of it had arrived by then from node `target`.
    pub(crate) fn lose(
        &mut self,
        slot: u32,
        (target, usage): (u32, Usage),
        failure: Failure<'_>,
        failed_over: u32,
        sink: &mut dyn Sink,
    ) {
        let flight = self.flights.remove(RequestId(slot.into()));
        let rank = self.nodes[target].rank;
        let prefill_rank = flight.prefill.map(|node| self.nodes[node].rank);
        let failed_over = failed_over.max(flight.resumed);
        let record = RequestRecord {
            error: Some(failure),
            ..flight.record(rank, prefill_rank, failed_over, &usage, self.agenda.now)
        };
        self.note_failed(&record, sink);
    }

    fn note_failed(&mut self, record: &RequestRecord<'_>, sink: &mut dyn Sink) {
        self.model.tally.note(record, 0, &self.options.slo);
        sink.on_request(record);
        self.schedule.on_failed(record.request);
        self.pins.remove(&record.request.id().0);
    }
}
