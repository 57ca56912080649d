//! Runs a plan: the events of a schedule and the tasks of its processes, in virtual time and in an order of chance. The
//! oracle checks its invariants after every event.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::task::Poll;
use std::time::Duration;

use slipstream_base::width::{nanos, to_usize};
use slipstream_config::cluster::Cluster;
use slipstream_engine::OutputModel;
use slipstream_planes::clock::sim as clock;
use slipstream_planes::discovery::SessionEvent;
use slipstream_planes::link::Socket;
use slipstream_worker::sim::{Connect, Connecting};
use tokio::time::Instant;

use crate::client::{self, Answers, Outcome};
use crate::cluster::{Shared, cluster_of};
use crate::dial::{Dial, DialHandle, Dialed, Dials};
use crate::machines::{Frontend, Process, RunningFrontend, Site, start_worker};
use crate::net::{Delivery, Net, Queue};
use crate::oracle::View;
use crate::outcome::{Failure, Stats};
use crate::plan::{ClientPlan, FaultKind, HEAL_NS, Plan};
use crate::rng::Rng;
use crate::tasks::{Driver, Group};

/// When a schedule begins, ns.
const ORIGIN_NS: u64 = 1_000_000_000_000;
/// After the faults have healed, everything has to be done within this time, ns.
const PATIENCE_NS: u64 = 60_000_000_000;
/// Time between two looks whether it is, ns.
const LOOK_NS: u64 = 20_000_000;
/// Turns without a passing of time that are taken for a livelock.
const TURNS_MAX: u64 = 200_000;

/// An event of the simulation.
#[derive(Clone, Copy, Debug)]
enum Next {
    Delivery(Delivery),
    /// A dial reaches its frontend.
    Dialed(usize),
    Client(usize),
    Cancel(usize),
    Fault(usize),
    Start(usize),
    Stop(usize),
    Exit(usize),
    Thaw(usize),
    StartFrontend(usize),
    /// A process reads a frontend's record, of that instance.
    Appeared(usize, usize),
    Vanished(usize, usize, u64),
    Heal,
    Look,
}

impl From<Delivery> for Next {
    fn from(delivery: Delivery) -> Next {
        Next::Delivery(delivery)
    }
}

struct World<'a> {
    plan: &'a Plan,
    cluster: Cluster,
    answers: Rc<Answers>,
    queue: Rc<Queue<Next>>,
    net: Net<Next>,
    rng: Rng,
    driver: Driver,
    processes: Vec<Process>,
    frontends: Vec<Frontend>,
    dials: Dials,
    /// The last connection of each instance of a process to each shard, by its address.
    connections: BTreeMap<(u64, String), usize>,
    records: Vec<Rc<RefCell<client::Record>>>,
    tasks: Vec<Option<tokio::task::JoinHandle<()>>>,
    instances: u64,
    started: Instant,
    stats: Stats,
    /// No fault has happened that may cost a request.
    calm: bool,
    probes: Option<usize>,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Panics of this thread are noted while a schedule runs: tasks would hide them.
fn note_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if QUIET.get() {
                PANIC.with(|panic| {
                    let mut panic = panic.borrow_mut();
                    panic.get_or_insert_with(|| info.to_string());
                });
            } else {
                before(info);
            }
        }));
    });
}

/// Runs `plan`.
///
/// # Errors
/// The first invariant that does not hold.
pub fn run(plan: &Plan, shared: &Shared) -> Result<Stats, Failure> {
    note_panics();
    QUIET.set(true);
    PANIC.take();
    clock::set(Some((ORIGIN_NS, 1)));
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime without I/O takes no resource");
        runtime.block_on(async {
            let mut world = World::new(plan, shared);
            let outcome = world.drive().await;
            let failure = |what| Failure {
                step: world.stats.events,
                at_ns: world.queue.now() - ORIGIN_NS,
                what,
            };
            match outcome {
                Ok(()) => Ok(world.stats),
                Err(what) => Err(failure(what)),
            }
        })
    }));
    clock::set(None);
    QUIET.set(false);
    let panicked = PANIC.take();
    match (caught, panicked) {
        (Ok(outcome), None) => outcome,
        (Ok(Err(failure)), _) => Err(failure),
        (_, panicked) => Err(Failure {
            step: 0,
            at_ns: 0,
            what: format!("panic: {}", panicked.unwrap_or_default()),
        }),
    }
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan, shared: &Shared) -> World<'a> {
        let shape = &plan.shape;
        let cluster = cluster_of(shape, shared);
        let queue = Queue::new(ORIGIN_NS);
        let text = shared.text.clone();
        let answers = Rc::new(Answers {
            output: OutputModel {
                vocab: text.output_vocab(),
                first_vocab: Some(text.first_vocab()),
                eos: text.eos(),
                lengths: cluster.pools[0].engine.output_len.clone(),
            },
            text,
        });
        let clients = plan.clients.iter();
        let records =
            clients.map(|plan| Rc::new(RefCell::new(client::Record::new(plan, &answers))));
        World {
            plan,
            cluster,
            net: Net::new(
                plan.seed ^ 0x006e_6574_776f_726b,
                shape.window,
                queue.clone(),
            ),
            queue,
            rng: Rng::new(plan.seed ^ 0x006f_7264_6572),
            driver: Arc::default(),
            processes: (0..shape.processes).map(|_| Process::default()).collect(),
            frontends: (0..shape.frontends).map(|_| Frontend::default()).collect(),
            dials: Dials::default(),
            connections: BTreeMap::new(),
            records: records.collect(),
            answers,
            tasks: plan.clients.iter().map(|_| None).collect(),
            instances: 0,
            started: Instant::now(),
            stats: Stats::default(),
            calm: true,
            probes: None,
        }
    }

    fn note(&mut self, what: u64) {
        self.stats.digest = slipstream_base::mix::mix64(self.stats.digest ^ what);
    }

    fn site(&self) -> Site<'_> {
        Site {
            shape: &self.plan.shape,
            seed: self.plan.seed,
            cluster: &self.cluster,
            answers: &self.answers,
            driver: &self.driver,
        }
    }

    fn view(&self) -> View<'_> {
        View {
            now: self.queue.now(),
            shape: &self.plan.shape,
            processes: &self.processes,
            frontends: &self.frontends,
            records: &self.records,
            calm: self.calm,
        }
    }

    // The main loop.

    async fn drive(&mut self) -> Result<(), String> {
        for frontend in 0..self.frontends.len() {
            self.start_frontend(frontend)?;
        }
        for process in 0..self.processes.len() {
            self.start_process(process)?;
        }
        for (index, client) in self.plan.clients.iter().enumerate() {
            self.queue
                .push(ORIGIN_NS + client.at_ns, Next::Client(index));
        }
        for (index, fault) in self.plan.faults.iter().enumerate() {
            self.queue.push(ORIGIN_NS + fault.at_ns, Next::Fault(index));
        }
        let heal_ns = if self.plan.faults.is_empty() {
            LOOK_NS
        } else {
            HEAL_NS
        };
        self.queue.push(ORIGIN_NS + heal_ns, Next::Heal);
        let mut turns = 0;
        loop {
            let before = self.queue.now();
            if self.settle()? {
                self.view().check_wake_ups()?;
                turns += 1;
                if turns > TURNS_MAX {
                    return Err("livelock: tasks run without an end while no time passes".into());
                }
            }
            let due = self
                .queue
                .next_at()
                .into_iter()
                .chain(self.next_engine())
                .min();
            let Some(due) = due else {
                return Err("nothing will ever happen again".into());
            };
            let reached = self.reached();
            if due <= reached {
                self.queue.now_ns.set(due.max(before));
                if due > before {
                    turns = 0;
                }
                if self.queue.next_at() == Some(due) {
                    let next = self.queue.pop().expect("it is there").event;
                    self.stats.events += 1;
                    self.note(self.queue.now());
                    tracing::info!(at_us = (due - ORIGIN_NS) / 1000, ?next);
                    if self.handle(next)? {
                        self.stats.virtual_ns = self.queue.now() - ORIGIN_NS;
                        return Ok(());
                    }
                    self.view().check()?;
                }
                continue;
            }
            self.sleep(due).await;
            // Timers of the production code may have woken it earlier.
            let now = self.reached().min(due).max(self.queue.now());
            if now > before {
                turns = 0;
            }
            self.queue.now_ns.set(now);
        }
    }

    /// How far the runtime's time is, ns.
    fn reached(&self) -> u64 {
        ORIGIN_NS + nanos(self.started.elapsed())
    }

    /// Sleeps until `due`, or until a task is woken.
    async fn sleep(&self, due: u64) {
        let at = self.started + Duration::from_nanos(due - ORIGIN_NS);
        let mut sleep = std::pin::pin!(tokio::time::sleep_until(at));
        poll_fn(|cx| {
            *self.driver.lock().expect("nothing panics with it") = Some(cx.waker().clone());
            if self.is_woken() {
                return Poll::Ready(());
            }
            sleep.as_mut().poll(cx)
        })
        .await;
    }

    fn is_woken(&self) -> bool {
        let now = self.queue.now();
        let processes = self.processes.iter().filter(|p| p.frozen_until <= now);
        let of_processes = processes.filter_map(|p| p.up.as_ref().map(|(_, group)| group));
        let of_frontends = self.frontends.iter().filter_map(|f| f.up.as_ref());
        let mut all = of_processes.chain(of_frontends.flat_map(|up| &up.groups));
        all.any(Group::is_woken)
    }

    fn next_engine(&self) -> Option<u64> {
        let now = self.queue.now();
        let of = self.processes.iter().filter(|p| p.frozen_until <= now);
        let due = |p: &Process| {
            let (worker, _) = p.up.as_ref()?;
            Some(worker.next_due().saturating_sub(p.ahead_ns))
        };
        of.filter_map(due).min()
    }

    /// Runs tasks and engine threads, in any order, until none has anything to do. Returns whether one had.
    fn settle(&mut self) -> Result<bool, String> {
        #[derive(Clone, Copy)]
        enum Turn {
            Plane(usize),
            Engines(usize),
            Shard(usize, usize),
        }
        let mut ran = false;
        let mut turns = Vec::new();
        let mut rounds = 0u64;
        loop {
            turns.clear();
            let now = self.queue.now();
            for (index, process) in self.processes.iter_mut().enumerate() {
                if process.frozen_until > now {
                    continue;
                }
                let Some((worker, group)) = &mut process.up else {
                    continue;
                };
                clock::set(Some((now + process.ahead_ns, 100 + index as u64)));
                if group.is_woken() {
                    turns.push(Turn::Plane(index));
                }
                if worker.is_due(now + process.ahead_ns) {
                    turns.push(Turn::Engines(index));
                }
            }
            for (index, frontend) in self.frontends.iter().enumerate() {
                let groups = frontend
                    .up
                    .iter()
                    .flat_map(|up| up.groups.iter().enumerate());
                for (shard, group) in groups {
                    if group.is_woken() {
                        turns.push(Turn::Shard(index, shard));
                    }
                }
            }
            if turns.is_empty() {
                return Ok(ran);
            }
            ran = true;
            rounds += 1;
            if rounds > TURNS_MAX {
                return Err("livelock: tasks wake each other without an end".into());
            }
            match self.rng.pick(&turns) {
                Turn::Plane(index) => {
                    self.stats.polls += 1;
                    let process = &mut self.processes[index];
                    let ahead = process.ahead_ns;
                    if let Some((_, group)) = &mut process.up {
                        clock::set(Some((now + ahead, 100 + index as u64)));
                        group.poll();
                    }
                }
                Turn::Engines(index) => {
                    self.stats.events += 1;
                    self.note(now ^ index as u64);
                    let process = &mut self.processes[index];
                    let ahead = process.ahead_ns;
                    if let Some((worker, _)) = &mut process.up {
                        clock::set(Some((now + ahead, 100 + index as u64)));
                        tracing::debug!(at_us = (now - ORIGIN_NS) / 1000, process = index, "round");
                        worker.round(now + ahead);
                    }
                    self.view().check()?;
                }
                Turn::Shard(index, shard) => {
                    self.stats.polls += 1;
                    clock::set(Some((now, 1)));
                    if let Some(up) = &mut self.frontends[index].up {
                        up.groups[shard].poll();
                    }
                }
            }
            clock::set(Some((now, 1)));
            if let Some(panic) = PANIC.take() {
                return Err(format!("panic: {panic}"));
            }
        }
    }

    /// Handles an event. Returns whether the schedule is over.
    fn handle(&mut self, next: Next) -> Result<bool, String> {
        clock::set(Some((self.queue.now(), 1)));
        match next {
            Next::Delivery(delivery) => self.net.deliver(delivery),
            Next::Dialed(index) => self.on_dialed(index)?,
            Next::Client(index) => self.send(index),
            Next::Cancel(index) => {
                let mut record = self.records[index].borrow_mut();
                if record.outcomes.is_empty() {
                    record.outcomes.push(Outcome::Cancelled);
                    drop(record);
                    if let Some(task) = &self.tasks[index] {
                        task.abort();
                    }
                }
            }
            Next::Fault(index) => self.strike(self.plan.faults[index].kind),
            Next::Start(process) => {
                if self.processes[process].up.is_none() {
                    self.start_process(process)?;
                }
            }
            Next::Stop(process) => {
                let process = &mut self.processes[process];
                if let (true, Some((worker, _))) = (process.leaving, &mut process.up) {
                    worker.stop();
                    process.stopped = true;
                }
            }
            Next::Exit(process) => {
                if self.processes[process].leaving {
                    self.kill(process);
                }
            }
            Next::Thaw(process) => {
                let process = &mut self.processes[process];
                if process.frozen_until <= self.queue.now()
                    && let Some((_, group)) = &process.up
                {
                    group.wake();
                }
            }
            Next::StartFrontend(frontend) => {
                if self.frontends[frontend].up.is_none() {
                    self.start_frontend(frontend)?;
                }
            }
            Next::Appeared(process, frontend) => {
                let process = &mut self.processes[process];
                if let (Some((worker, _)), Some(up)) = (&process.up, &self.frontends[frontend].up)
                    && process.known.insert(up.record.instance)
                {
                    worker.on_discovery(SessionEvent::Appeared(up.record.clone()));
                }
            }
            Next::Vanished(process, frontend, instance) => {
                let of = &self.frontends[frontend];
                let record = match (&of.up, &of.stale) {
                    (Some(up), _) if up.record.instance == instance => Some(up.record.clone()),
                    (_, Some(stale)) if stale.instance == instance => Some(stale.clone()),
                    _ => None,
                };
                let process = &mut self.processes[process];
                if let (Some((worker, _)), Some(record)) = (&process.up, record)
                    && process.known.remove(&instance)
                {
                    worker.on_discovery(SessionEvent::Vanished(record));
                }
            }
            Next::Heal => {
                self.net.heal();
                let now = self.queue.now();
                for index in 0..self.processes.len() {
                    self.processes[index].frozen_until = 0;
                    if let Some((worker, group)) = &self.processes[index].up {
                        worker.heal();
                        group.wake();
                    }
                }
                self.queue.push(now + LOOK_NS, Next::Look);
            }
            Next::Look => return self.look(),
        }
        Ok(false)
    }

    // Processes.

    fn start_frontend(&mut self, index: usize) -> Result<(), String> {
        self.instances += 1;
        let instance = self.instances;
        let up = RunningFrontend::start(index, instance, &self.site())?;
        self.frontends[index].instance = instance;
        self.frontends[index].up = Some(up);
        for process in 0..self.processes.len() {
            let at = self.queue.now() + self.rng.below(5_000_000);
            self.queue.push(at, Next::Appeared(process, index));
        }
        Ok(())
    }

    fn start_process(&mut self, index: usize) -> Result<(), String> {
        self.instances += 1;
        let instance = self.instances;
        let (dials, queue) = (self.dials.clone(), self.queue.clone());
        let latency = self.plan.shape.latency_ns;
        let connect: Connect = Rc::new(move |address: &str| -> Connecting {
            let done = Rc::<RefCell<Dialed>>::default();
            let mut dials = dials.borrow_mut();
            queue.push(queue.now() + latency, Next::Dialed(dials.len()));
            dials.push(Dial {
                address: address.to_owned(),
                process: index,
                instance,
                done: done.clone(),
            });
            let handle = DialHandle(done);
            Box::pin(poll_fn(move |cx| handle.poll(cx)))
        });
        clock::set(Some((
            self.queue.now() + self.processes[index].ahead_ns,
            100 + index as u64,
        )));
        let started = start_worker(index, instance, &self.site(), connect);
        clock::set(Some((self.queue.now(), 1)));
        let up = started?;
        let process = &mut self.processes[index];
        process.instance = instance;
        process.up = Some(up);
        process.leaving = false;
        process.known.clear();
        for frontend in 0..self.frontends.len() {
            let at = self.queue.now() + self.rng.below(2_000_000);
            self.queue.push(at, Next::Appeared(index, frontend));
        }
        Ok(())
    }

    /// Ends a worker process as SIGKILL does.
    fn kill(&mut self, index: usize) {
        let process = &mut self.processes[index];
        process.frozen_until = 0;
        process.leaving = false;
        let Some((worker, group)) = process.up.take() else {
            return;
        };
        drop(group);
        drop(worker);
    }

    fn on_dialed(&mut self, index: usize) -> Result<(), String> {
        let dials = self.dials.borrow();
        let Dial {
            address,
            process,
            instance,
            done,
        } = &dials[index];
        if self.processes[*process].instance != *instance || self.processes[*process].up.is_none() {
            return Ok(()); // it has ended meanwhile
        }
        let abandoned = done.borrow().abandoned;
        let connection = (*instance, address.clone());
        let before = self.connections.get(&connection);
        if !abandoned && before.is_some_and(|&before| self.net.is_kept_by_worker(before)) {
            return Err(format!(
                "process {process} dials {address} (frontend, shard, instance), and keeps a connection to it"
            ));
        }
        let mut parts = address
            .split(' ')
            .map(|part| part.parse::<u64>().unwrap_or(u64::MAX));
        let mut part = || parts.next().unwrap_or(u64::MAX);
        let (frontend, shard, of) = (to_usize(part()), to_usize(part()), part());
        // A frontend that starts again on its host takes the same port: an old record leads to it.
        let up = self
            .frontends
            .get(frontend)
            .and_then(|frontend| frontend.up.as_ref());
        let same_port = self.plan.seed.is_multiple_of(2);
        let result = match up.filter(|up| same_port || up.record.instance == of) {
            None => Err(io::ErrorKind::ConnectionRefused.into()),
            Some(up) => {
                let latency = self.plan.shape.latency_ns;
                let [near, far] = self.net.connect(*process, frontend, latency);
                if !abandoned {
                    self.connections.insert(connection, near.connection);
                }
                let accepts = up.shards[shard].clone();
                up.groups[shard].local.spawn_local(async move {
                    accepts.accept(Box::new(far));
                });
                Ok(Box::new(near) as Box<dyn Socket>)
            }
        };
        if abandoned {
            return Ok(());
        }
        let mut done = done.borrow_mut();
        done.result = Some(result);
        if let Some(waker) = done.waker.take() {
            waker.wake();
        }
        Ok(())
    }

    fn send(&mut self, index: usize) {
        let record = self.records[index].clone();
        let plan = record.borrow().plan.clone();
        let (frontend, shard) = plan.to;
        let Some(up) = &self.frontends[frontend].up else {
            let mut record = record.borrow_mut();
            record.sent = true;
            record.outcomes.push(Outcome::Dropped);
            return;
        };
        let task = client::run(up.shards[shard].clone(), record, self.answers.clone());
        self.tasks[index] = Some(up.groups[shard].local.spawn_local(task));
        if let Some(after) = plan.cancel_ns {
            self.queue
                .push(self.queue.now() + after, Next::Cancel(index));
        }
    }

    // Faults.

    fn crash_frontend(&mut self, frontend: usize, down_ns: u64) {
        let now = self.queue.now();
        let Some(up) = self.frontends[frontend].up.take() else {
            return;
        };
        let instance = up.record.instance;
        self.frontends[frontend].stale = Some(up.record.clone());
        for (index, record) in self.records.iter().enumerate() {
            let mut record = record.borrow_mut();
            let here = record.sent && record.plan.to.0 == frontend;
            if here && record.outcomes.is_empty() {
                record.outcomes.push(Outcome::Dropped);
                self.tasks[index] = None;
            }
        }
        drop(up);
        let lease_ns = 3 * self.plan.shape.deadline_ms * 1_000_000;
        for process in 0..self.processes.len() {
            let gone = Next::Vanished(process, frontend, instance);
            self.queue.push(now + lease_ns, gone);
        }
        self.queue
            .push(now + down_ns, Next::StartFrontend(frontend));
    }

    fn strike_connection(&mut self, connection: usize, kind: FaultKind) {
        match kind {
            FaultKind::Cut { .. } => self.net.cut(connection),
            FaultKind::HalfOpen { side, .. } => self.net.half_open(connection, side),
            FaultKind::Stall { side, for_ns, .. } => {
                let until = self.queue.now() + for_ns;
                self.net.stall(connection, side, until);
            }
            FaultKind::Slow { extra_ns, .. } => self.net.slow(connection, extra_ns),
            FaultKind::Corrupt { side, .. } => self.net.corrupt(connection, side),
            _ => {}
        }
    }

    fn strike(&mut self, kind: FaultKind) {
        let now = self.queue.now();
        self.calm = false;
        match kind {
            FaultKind::Crash {
                process,
                down_ns,
                power,
            } => {
                if power {
                    self.net.silence(0, process);
                }
                self.kill(process);
                self.queue.push(now + down_ns, Next::Start(process));
            }
            FaultKind::Drain {
                process,
                grace_ns,
                down_ns,
            } => {
                let of = &mut self.processes[process];
                if let Some((worker, _)) = &of.up {
                    worker.leave();
                    of.leaving = true;
                    let stop = now + grace_ns;
                    self.queue.push(stop, Next::Stop(process));
                    let exit = stop + self.plan.shape.deadline_ms * 1_000_000;
                    self.queue.push(exit, Next::Exit(process));
                    self.queue.push(exit + down_ns, Next::Start(process));
                }
            }
            FaultKind::Pause { process, for_ns } => {
                let of = &mut self.processes[process];
                of.frozen_until = of.frozen_until.max(now + for_ns);
                self.queue.push(of.frozen_until, Next::Thaw(process));
            }
            FaultKind::CrashFrontend { frontend, down_ns } => {
                self.crash_frontend(frontend, down_ns);
            }
            FaultKind::Cut { process, pick }
            | FaultKind::HalfOpen { process, pick, .. }
            | FaultKind::Stall { process, pick, .. }
            | FaultKind::Slow { process, pick, .. }
            | FaultKind::Corrupt { process, pick, .. } => {
                if let Some(connection) = self.net.pick(process, pick) {
                    self.strike_connection(connection, kind);
                }
            }
            FaultKind::ClockJump { process, by_ns } => self.processes[process].ahead_ns += by_ns,
            FaultKind::RecordGone {
                process,
                frontend,
                for_ns,
            } => {
                let instance = self.frontends[frontend].instance;
                self.queue
                    .push(now, Next::Vanished(process, frontend, instance));
                self.queue
                    .push(now + for_ns, Next::Appeared(process, frontend));
            }
            FaultKind::RecordStale { process, frontend } => {
                let index = process;
                let process = &mut self.processes[process];
                if let (Some((worker, _)), Some(stale)) =
                    (&process.up, &self.frontends[frontend].stale)
                    && process.known.insert(stale.instance)
                {
                    // Its lease ends some time.
                    let gone = Next::Vanished(index, frontend, stale.instance);
                    self.queue.push(now + 300_000_000, gone);
                    worker.on_discovery(SessionEvent::Appeared(stale.clone()));
                }
            }
            FaultKind::RecordTorn { process } => {
                if let Some((worker, _)) = &self.processes[process].up {
                    worker.on_discovery(SessionEvent::Invalid {
                        name: "frontend".into(),
                        reason: "EOF while parsing".into(),
                    });
                }
            }
            FaultKind::LoseKv { process } => {
                if let Some((worker, _)) = &self.processes[process].up {
                    worker.lose_kv();
                }
            }
            FaultKind::LoseKvUnseen { process } => {
                if let Some((worker, _)) = &self.processes[process].up {
                    worker.lose_kv_unseen();
                }
            }
        }
    }

    /// Looks whether everything is done. Returns whether the schedule is over.
    fn look(&mut self) -> Result<bool, String> {
        let now = self.queue.now();
        let quiet = self.view().is_quiet();
        match (quiet, self.probes) {
            (Ok(()), None) => {
                // A further request on each shard.
                self.probes = Some(self.records.len());
                let (frontends, shards) = (self.plan.shape.frontends, self.plan.shape.shards);
                for to in (0..frontends).flat_map(|f| (0..shards).map(move |s| (f, s))) {
                    let plan = ClientPlan {
                        at_ns: now - ORIGIN_NS,
                        to,
                        seed: 99,
                        group: 9,
                        prompt_tokens: 20,
                        max_tokens: 3,
                        choices: 1,
                        stream: true,
                        ignore_eos: true,
                        session: None,
                        cancel_ns: None,
                        pause_ms: 0,
                    };
                    let record = client::Record::new(&plan, &self.answers);
                    self.records.push(Rc::new(RefCell::new(record)));
                    self.tasks.push(None);
                    // One after the other, as there may be room for one alone.
                    let nth = (self.records.len() - self.probes.unwrap_or(0)) as u64;
                    let at = now + nth * 200_000_000;
                    self.queue.push(at, Next::Client(self.records.len() - 1));
                }
            }
            (Ok(()), Some(first)) => {
                for record in &self.records[first..] {
                    let record = record.borrow();
                    if record.outcomes != [Outcome::Finished] {
                        return Err(format!(
                            "after all is healed a request is not answered: {:?}",
                            record.outcomes
                        ));
                    }
                }
                self.view().check_totals()?;
                self.count();
                return Ok(true);
            }
            (Err(what), _) => {
                if now > ORIGIN_NS + HEAL_NS + PATIENCE_NS {
                    return Err(format!("not done after all is healed: {what}"));
                }
            }
        }
        self.queue.push(now + LOOK_NS, Next::Look);
        Ok(false)
    }

    fn count(&mut self) {
        let first = self.probes.unwrap_or(self.records.len());
        let mut stats = self.stats;
        for record in &self.records[..first] {
            let record = record.borrow();
            stats.tokens += record.tokens;
            match &record.outcomes[0] {
                Outcome::Finished => stats.finished += 1,
                Outcome::Refused(_) => stats.refused += 1,
                Outcome::Lost(_) => stats.lost += 1,
                Outcome::Cancelled | Outcome::Dropped => stats.cancelled += 1,
            }
        }
        for shard in self
            .frontends
            .iter()
            .flat_map(|f| f.up.iter().flat_map(|up| &up.shards))
        {
            let state = shard.state();
            stats.retries += state.retries;
            stats.resumed += state.resumed;
            stats.stale += state.stale_entries;
        }
        self.stats = stats;
        self.note(stats.tokens);
        self.note(stats.finished << 32 | stats.lost << 16 | stats.refused);
    }
}
