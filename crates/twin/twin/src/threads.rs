//! The host's threads under a CPU scheduler: `host.mode = "threads"`.
//!
//! ```text
//!   client ─► API server ─(futex)─► tokenizer ─(eventfd)─► API server ─(wake_by)─► engine ─► GPU
//!   client ◄─ API server or detokenizer ◄──────────────────────────────(wake_by)── engine ◄── GPU
//! ```
//!
//! The host advances as far as no other event can reach it, up to the next end of a job, which becomes an event of the
//! run.

use slipstream_base::SimTime;
use slipstream_base::width::{round_u64, to_u32, to_usize};
use slipstream_config::cluster::{Cluster, HostMode, HostScheduler, WakeMechanism};
use slipstream_cpusched::jobs::{self, JobHost, Stage, Waker};
use slipstream_cpusched::machine::{Costs as MachineCosts, Machine, Mechanism};
use slipstream_cpusched::policy::Params;
use slipstream_cpusched::result::SimError;
use slipstream_cpusched::sched::{SchedulerKind, TaskId};
use slipstream_cpusched::workload::Channel;

use crate::agenda::Agenda;
use crate::event::Event;
use crate::flight::Flights;
use crate::host::Costs;

/// Scheduling of an engine's next step by its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheduling {
    /// Not begun.
    No,
    /// The thread has it to do. Whether the engine waits for it.
    Posted { waits: bool },
    /// The step can begin.
    Done,
}

/// The effect of the end of a job.
#[derive(Clone, Copy, Debug)]
enum Then {
    Event(Event),
    /// A request is routed. Its first two stages parsed and tokenized it.
    Route {
        slot: u32,
        ticket: u64,
    },
}

/// The threads of a host.
pub(crate) struct Threads {
    host: JobHost,
    costs: Costs,
    /// Inboxes. The threads of the API servers have the first numbers.
    frontends: Vec<Channel>,
    tokenizers: Option<Channel>,
    /// Those that render tokens.
    outputs: Vec<Channel>,
    /// By node.
    engines: Vec<Channel>,
    connectors: Vec<Channel>,
    wake_by: Mechanism,
    step_ns: u64,
    connector_ns: u64,
    /// By node.
    scheduling: Vec<Scheduling>,
    /// By the number of a job.
    thens: Vec<Then>,
    free: Vec<u32>,
    under_way: usize,
    /// The thread whose job ended, and when: it has the CPU at that time.
    running: (SimTime, TaskId),
    failed: Option<SimError>,
}

impl Threads {
    /// The threads of `cluster`, if it has a host with threads.
    ///
    /// # Errors
    /// The thread that calls has a simulation of such a host with our scheduler.
    pub(crate) fn new(
        cluster: &Cluster,
        nodes: usize,
        seed: u64,
    ) -> Result<Option<Box<Threads>>, SimError> {
        let host = &cluster.host;
        if host.mode != HostMode::Threads {
            return Ok(None);
        }
        let of = &host.threads;
        let machine = Machine {
            llcs: of.llcs,
            cpus_per_llc: host.cpus / of.llcs,
            threads_per_core: 1,
        };
        let us = |us: f64| round_u64(us * 1e3);
        let mut params = Params::with_defaults();
        let mut costs = MachineCosts::bare_metal();
        if let Some(wake_us) = of.wake_idle_us {
            costs = MachineCosts::flat(us(wake_us));
            params.wake_idle_ns = us(wake_us); // as the loader measures it
        }
        let kind = match of.scheduler {
            HostScheduler::Eevdf => SchedulerKind::Eevdf,
            HostScheduler::Slipstream => SchedulerKind::Slipstream,
        };
        let mut threads = jobs::Threads::default();
        let mut each = |name, count: usize| -> Vec<Channel> {
            (0..count).map(|_| threads.add(machine, name, 1)).collect()
        };
        let frontends = each("frontend", of.frontends as usize);
        let engines = each("engine", nodes);
        let detokenizers = each("detokenizer", of.detokenizers as usize);
        let connectors = each("connector", if cluster.hands_over() { nodes } else { 0 });
        let tokenizers =
            (of.tokenizers > 0).then(|| threads.add(machine, "tokenizer", of.tokenizers));
        threads.add_background(machine, of.background);
        let simulated = JobHost::new(machine, costs, threads, (kind, params), seed, false)?;
        Ok(Some(Box::new(Threads {
            host: simulated,
            costs: Costs::new(host),
            outputs: if detokenizers.is_empty() {
                frontends.clone()
            } else {
                detokenizers
            },
            frontends,
            tokenizers,
            engines,
            connectors,
            wake_by: mechanism(of.wake_by),
            step_ns: us(of.step_us),
            connector_ns: us(of.connector_us),
            scheduling: vec![Scheduling::No; nodes],
            thens: Vec::new(),
            free: Vec::new(),
            under_way: 0,
            running: (SimTime::ZERO, TaskId::MAX),
            failed: None,
        })))
    }

    /// Whether no thread has a job.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way == 0
    }

    /// Time of the next end of a job, if it is before `limit`, before which nothing else happens.
    pub(crate) fn next_time(&mut self, limit: SimTime) -> Result<Option<SimTime>, SimError> {
        if let Some(failed) = self.failed.take() {
            return Err(failed);
        }
        Ok(self.host.next_end(limit.0)?.map(SimTime))
    }

    /// The thread that has the CPU while the effect of its job is processed.
    fn running(&self, now: SimTime) -> Option<TaskId> {
        let (at, thread) = self.running;
        (at == now && thread != TaskId::MAX).then_some(thread)
    }

    fn post(&mut self, now: SimTime, waker: Waker, then: Then, stages: &[Stage]) {
        let number = if let Some(number) = self.free.pop() {
            self.thens[number as usize] = then;
            number
        } else {
            self.thens.push(then);
            to_u32(self.thens.len()) - 1
        };
        self.under_way += 1;
        if let Err(error) = self.host.post(now.0, waker, number.into(), stages) {
            self.failed.get_or_insert(error);
        }
    }

    /// A request arrives from a client.
    pub(crate) fn read(&mut self, now: SimTime, slot: u32, ticket: u64, tokens: u32) {
        let frontend = self.frontends[to_usize(ticket % self.frontends.len() as u64)];
        let (parse, tokenize, route) = self.costs.stages(tokens);
        let first = stage(frontend, self.wake_by, parse);
        let stages = match self.tokenizers {
            Some(tokenizers) => [
                first,
                stage(tokenizers, Mechanism::Futex, tokenize),
                stage(frontend, Mechanism::Eventfd, route),
            ],
            None => [first, next(tokenize), next(route)],
        };
        self.post(now, Waker::Device, Then::Route { slot, ticket }, &stages);
    }

    /// A request is submitted, which leads to `event`.
    pub(crate) fn dispatch(&mut self, now: SimTime, slot: u32, event: Event) {
        let dispatch = self.costs.dispatch();
        let running = self.running(now).filter(|&thread| self.is_frontend(thread));
        let (waker, frontend) = match running {
            Some(thread) => (Waker::Itself(thread), thread as usize),
            None => (Waker::Device, slot as usize % self.frontends.len()),
        };
        let stage = stage(self.frontends[frontend], self.wake_by, dispatch);
        self.post(now, waker, Then::Event(event), &[stage]);
    }

    fn is_frontend(&self, thread: TaskId) -> bool {
        (thread as usize) < self.frontends.len()
    }

    /// A pass of `node` with `tokens` has ended. `event`: its clients have the tokens.
    pub(crate) fn pass_ended(&mut self, now: SimTime, node: u32, tokens: u32, event: Event) {
        let outputs = self.outputs[node as usize % self.outputs.len()];
        let stages = [
            stage(self.engines[node as usize], self.wake_by, 0),
            stage(outputs, self.wake_by, self.costs.frame(tokens)),
        ];
        self.post(now, Waker::Device, Then::Event(event), &stages);
    }

    /// A KV transfer to `node` has ended, which leads to `event`.
    pub(crate) fn transfer_ended(&mut self, now: SimTime, node: u32, event: Event) {
        let stage = stage(
            self.connectors[node as usize],
            self.wake_by,
            self.connector_ns,
        );
        self.post(now, Waker::Device, Then::Event(event), &[stage]);
    }

    /// Whether `node` may begin a pass: its thread has scheduled it. Otherwise [`Event::Scheduled`] follows.
    pub(crate) fn may_begin(&mut self, now: SimTime, node: u32) -> bool {
        match self.scheduling[node as usize] {
            Scheduling::Done => return true,
            Scheduling::Posted { .. } => {}
            Scheduling::No => self.schedule(now, node),
        }
        self.scheduling[node as usize] = Scheduling::Posted { waits: true };
        false
    }

    /// A pass of `node` has begun, or it had no work. With `ahead` its thread schedules the next pass now.
    pub(crate) fn began(&mut self, now: SimTime, node: u32, ahead: bool) {
        self.scheduling[node as usize] = Scheduling::No;
        if ahead {
            self.schedule(now, node);
            self.scheduling[node as usize] = Scheduling::Posted { waits: false };
        }
    }

    fn schedule(&mut self, now: SimTime, node: u32) {
        let own = to_u32(self.frontends.len()) + node;
        let waker = match self.running(now) {
            Some(thread) if thread != own => Waker::Thread(thread),
            // It finds the job in its inbox, after the output of earlier steps.
            _ => Waker::Device,
        };
        let stage = stage(self.engines[node as usize], self.wake_by, self.step_ns);
        self.post(now, waker, Then::Event(Event::Scheduled { node }), &[stage]);
    }

    /// The thread of `node` has scheduled its next pass. Returns whether the engine waits for it.
    pub(crate) fn scheduled(&mut self, node: u32) -> bool {
        let waits = self.scheduling[node as usize] == Scheduling::Posted { waits: true };
        self.scheduling[node as usize] = Scheduling::Done;
        waits
    }

    /// Plans the event of the job that has just ended, if one has.
    pub(crate) fn take_ended(&mut self, agenda: &mut Agenda, flights: &mut Flights) {
        let now = agenda.now;
        let Some(ended) = self.host.take_ended(now.0) else {
            return;
        };
        self.under_way -= 1;
        self.running = (now, ended.thread);
        let number = to_u32(ended.caller);
        self.free.push(number);
        let event = match self.thens[number as usize] {
            Then::Event(event) => event,
            Then::Route { slot, ticket } => {
                if let Some(flight) = flights.find(slot, ticket) {
                    flight.hops.parsed = SimTime(ended.stage_ends[0]);
                    flight.hops.tokenized = SimTime(ended.stage_ends[1]);
                }
                Event::Route { slot, ticket }
            }
        };
        agenda.plan(now, event);
    }
}

fn stage(to: Channel, by: Mechanism, work_ns: u64) -> Stage {
    Stage {
        to: Some((to, by)),
        work_ns,
    }
}

/// A stage on the same thread.
fn next(work_ns: u64) -> Stage {
    Stage { to: None, work_ns }
}

fn mechanism(by: WakeMechanism) -> Mechanism {
    match by {
        WakeMechanism::Pipe => Mechanism::Pipe,
        WakeMechanism::Unix => Mechanism::Unix,
        WakeMechanism::Tcp => Mechanism::Tcp,
        WakeMechanism::Epoll => Mechanism::Epoll,
        WakeMechanism::Eventfd => Mechanism::Eventfd,
        WakeMechanism::Futex => Mechanism::Futex,
    }
}
