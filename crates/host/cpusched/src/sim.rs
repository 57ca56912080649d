//! The event loop: tasks run their scripts on CPUs, under a scheduler, in virtual time.
//!
//! Events at the same instant keep the order in which they were scheduled, and all random numbers come
//! from one seeded generator, so the same input gives the same result on any machine.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use slipstream_base::width::to_u32;

use crate::jobs::{Ended, Job};
use crate::machine::{Costs, Machine, Mechanism};
use crate::perfetto::Trace;
use crate::result::{OPS_MAX, RunResult, SimError};
use crate::rng::Rng;
use crate::sched::{Action, Next, Scheduler, TaskId, TaskParams, Wakeup};
use crate::workload::{Op, Workload};

/// Stage of an [`Op::Work`] or [`Op::Forward`] that is complete.
const DONE: u8 = u8::MAX;
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// An interrupt reached an idle CPU, which has left its idle state.
    Arrive(u32),
    /// The current piece of work ends; the number identifies stale events.
    RunEnd(u32, u32),
    /// A CPU that found no task becomes idle.
    Idle(u32, u32),
    /// A CPU retries its dispatch: its run queue was locked.
    Redo(u32, u32),
    /// A scheduler's [`Action::Later`].
    Later(u32),
    /// A real-time task takes its CPU or leaves it.
    RealTime(u32, bool),
    /// A CPU goes offline or comes online.
    Hotplug(u32),
    /// Waiting tasks are compared with idle CPUs.
    Check,
    /// A CPU is asked to preempt its task.
    Preempt(u32, u32),
    Tick(u32),
    /// A sleeper's time is up.
    Timer(TaskId),
    /// A message arrives from outside.
    Post(u32),
    /// The warm-up ends.
    Measure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle {
        since: u64,
    },
    Waking,
    Busy(TaskId),
    /// It found no task and is about to idle; a kick makes it look again.
    Idling {
        kicked: bool,
    },
    /// Its run queue is locked; this task was running.
    Locked(Option<TaskId>),
    /// A real-time task runs.
    RealTime,
    Offline,
}

#[derive(Clone, Debug)]
struct Cpu {
    state: State,
    /// Number of the current piece of work, to identify stale events of earlier ones.
    turn: u32,
    /// When the current piece of work began.
    since: u64,
    busy_ns: u64,
    /// Whether the scheduler knows that the CPU is idle.
    known_idle: bool,
    /// Whether its next tick is planned.
    ticks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// It runs, or waits for a CPU.
    No,
    Message,
    Lock,
    Time,
    Gone,
}

#[derive(Clone, Debug)]
struct Task {
    pc: usize,
    /// Progress of the op: 0 not begun, 1 its work is done and its effect is due, 2 after the effect.
    stage: u8,
    /// CPU time left in the current stage, ns.
    left: u64,
    wait: Wait,
    cpu: u32,
    woken_at: u64,
    /// Start of its wait for a CPU.
    ready_at: Option<u64>,
    /// Channel for the answer to the message in progress.
    reply: u32,
    /// Position of [`Op::SendNext`].
    next_channel: u32,
    /// Start of the request in progress.
    origin: u64,
    /// Start of the send of the received message; for end-to-end latency.
    sent_at: u64,
    /// Deadline of [`Op::Timer`].
    period_at: u64,
    /// Mechanism of the received message, until its receiving cost is paid.
    received_by: Option<Mechanism>,
    /// The job of the received message.
    job: Option<u32>,
    /// Jobs that it sends before it receives the next message.
    outbox: VecDeque<u32>,
    run_ns: u64,
}

impl Task {
    /// One that begins on the CPU `home`.
    fn new(home: u32) -> Task {
        Task {
            pc: 0,
            stage: 0,
            left: 0,
            wait: Wait::Time,
            cpu: home,
            woken_at: 0,
            ready_at: None,
            reply: 0,
            next_channel: 0,
            origin: 0,
            sent_at: 0,
            period_at: 0,
            received_by: None,
            job: None,
            outbox: VecDeque::new(),
            run_ns: 0,
        }
    }

    /// Goes on to the next op of a script of `ops`.
    fn next_op(&mut self, ops: usize) {
        self.pc = (self.pc + 1) % ops;
        self.stage = 0;
    }
}

#[derive(Clone, Copy, Debug)]
struct Message {
    origin: u64,
    reply: u32,
    sent_at: u64,
    by: Option<Mechanism>,
    job: Option<u32>,
}

/// What a stage of an op led to.
enum Step {
    Done,
    /// The task waits.
    Waits,
    /// The task's job has ended.
    EndsJob,
}

/// One run.
pub struct Sim<'a> {
    machine: Machine,
    costs: Costs,
    workload: Rc<Workload>,
    sched: Box<dyn Scheduler>,
    pub(crate) now: u64,
    seq: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    cpus: Vec<Cpu>,
    tasks: Vec<Task>,
    channels: Vec<(VecDeque<Message>, VecDeque<TaskId>)>,
    locks: Vec<(Option<TaskId>, VecDeque<TaskId>)>,
    rng: Rng,
    out: RunResult,
    trace: Option<&'a mut Trace>,
    /// CPUs without a task have no ticks, which have no effect there. Else a host that idles for hours takes time.
    pub(crate) skips_idle_ticks: bool,
    /// By number; those that have ended are free.
    pub(crate) jobs: Vec<Job>,
    /// Jobs that have ended and were not taken.
    pub(crate) ended: VecDeque<Ended>,
}

/// Interval between checks of waiting tasks against idle CPUs.
const CHECK_NS: u64 = 1_000_000;
/// Hosts larger than this are not checked.
const CHECK_CPUS_MAX: u32 = 64;

/// Runs `workload` for `warmup_ns`, then measures for `measure_ns`.
///
/// # Errors
/// If a task names a CPU that does not exist, or its script loops without taking time.
#[allow(clippy::too_many_arguments)] // a run's inputs, each of its own type
pub fn run(
    machine: Machine,
    costs: &Costs,
    workload: &Workload,
    sched: Box<dyn Scheduler>,
    seed: u64,
    warmup_ns: u64,
    measure_ns: u64,
    trace: Option<&mut Trace>,
) -> Result<RunResult, SimError> {
    let workload = Rc::new(workload.clone());
    Sim::new(machine, costs.clone(), workload, sched, seed, trace)?.run(warmup_ns, measure_ns)
}

impl<'a> Sim<'a> {
    pub(crate) fn new(
        machine: Machine,
        costs: Costs,
        workload: Rc<Workload>,
        mut sched: Box<dyn Scheduler>,
        seed: u64,
        trace: Option<&'a mut Trace>,
    ) -> Result<Sim<'a>, SimError> {
        let idle = State::Idle { since: 0 };
        let cpu = Cpu {
            state: idle,
            turn: 0,
            since: 0,
            busy_ns: 0,
            known_idle: true,
            ticks: true,
        };
        let mut tasks = Vec::with_capacity(workload.tasks.len());
        for (i, t) in workload.tasks.iter().enumerate() {
            let first = t.mask.iter(machine.cpus()).next();
            for cpu in [t.home, first.unwrap_or(machine.cpus())] {
                if cpu >= machine.cpus() {
                    let last = machine.cpus() - 1;
                    return Err(SimError::NoCpu {
                        task: to_u32(i),
                        cpu,
                        last,
                    });
                }
            }
            sched.add_task(&TaskParams {
                weight: t.weight,
                home: t.home,
                mask: t.mask.clone(),
                cgroup: t.cgroup.map(|g| (g, workload.cgroups[g as usize])),
            });
            tasks.push(Task::new(t.home));
        }
        Ok(Sim {
            machine,
            costs,
            sched,
            now: 0,
            seq: 0,
            heap: BinaryHeap::new(),
            cpus: vec![cpu; machine.cpus() as usize],
            tasks,
            channels: vec![Default::default(); workload.channels as usize],
            locks: vec![Default::default(); workload.locks as usize],
            rng: Rng::new(seed),
            out: RunResult::new(&workload.groups),
            workload,
            trace,
            skips_idle_ticks: false,
            jobs: Vec::new(),
            ended: VecDeque::new(),
        })
    }

    fn at(&mut self, time: u64, event: Event) {
        self.seq += 1;
        self.heap.push(Reverse((time, self.seq, event)));
    }

    /// Plans the events that a run begins with.
    pub(crate) fn start(&mut self, checked: bool) {
        for task in 0..to_u32(self.tasks.len()) {
            // Staggered by 1 us, so that tasks do not all start at one instant.
            self.at(task as u64 * 1_000, Event::Timer(task));
        }
        for i in 0..self.workload.arrivals.len() {
            let first = self.rng.span(self.workload.arrivals[i].gap);
            self.at(first, Event::Post(to_u32(i)));
        }
        for cpu in 0..self.machine.cpus() {
            let phase = self.tick_phase(cpu);
            self.at(phase, Event::Tick(cpu));
        }
        for i in 0..self.workload.real_time.len() {
            self.at(
                self.workload.real_time[i].from_ns,
                Event::RealTime(to_u32(i), true),
            );
        }
        for i in 0..self.workload.hotplug.len() {
            self.at(self.workload.hotplug[i].at_ns, Event::Hotplug(to_u32(i)));
        }
        if checked && self.machine.cpus() <= CHECK_CPUS_MAX {
            self.at(CHECK_NS, Event::Check);
        }
    }

    fn run(mut self, warmup_ns: u64, measure_ns: u64) -> Result<RunResult, SimError> {
        let end = warmup_ns + measure_ns;
        self.start(true);
        self.at(warmup_ns, Event::Measure);
        self.drain();
        while let Some(Reverse((time, _, event))) = self.heap.pop() {
            if time > end {
                break;
            }
            self.handle_at(time, event)?;
        }
        self.now = end;
        if let Some(what) = self.sched.error() {
            return Err(SimError::Scheduler(what));
        }
        Ok(self.finish(measure_ns))
    }

    /// Handles the events before `limit`, up to the first that ends a job.
    pub(crate) fn advance(&mut self, limit: u64) -> Result<(), SimError> {
        while self.ended.is_empty()
            && let Some(&Reverse((time, _, event))) = self.heap.peek()
            && time < limit
        {
            self.heap.pop();
            self.handle_at(time, event)?;
        }
        match self.sched.error() {
            Some(what) => Err(SimError::Scheduler(what)),
            None => Ok(()),
        }
    }

    fn handle_at(&mut self, time: u64, event: Event) -> Result<(), SimError> {
        debug_assert!(time >= self.now, "time runs forward");
        self.now = time;
        self.out.events += 1;
        self.handle(event)
    }

    fn finish(mut self, measure_ns: u64) -> RunResult {
        for cpu in 0..self.cpus.len() {
            if let State::Busy(_) = self.cpus[cpu].state {
                let c = &mut self.cpus[cpu];
                c.busy_ns += self.now.saturating_sub(c.since);
            }
        }
        let busy: u64 = self.cpus.iter().map(|c| c.busy_ns).sum();
        self.out.utilization = busy as f64 / (measure_ns as f64 * self.cpus.len() as f64);
        self.out.measured_ns = measure_ns;
        self.out.counters = self.sched.counters();
        for (t, spec) in self.tasks.iter().zip(&self.workload.tasks) {
            let group = &mut self.out.groups[spec.group];
            let waits = t.ready_at.map_or(0, |since| self.now - since);
            group.wait_max_ns = group.wait_max_ns.max(waits);
            group.run_ns += t.run_ns;
        }
        self.out
    }

    fn note(&mut self, what: u64) {
        // FNV-1a over words: order-sensitive and cheap.
        self.out.digest = (self.out.digest ^ what ^ self.now).wrapping_mul(0x0100_0000_01b3);
    }

    fn handle(&mut self, event: Event) -> Result<(), SimError> {
        match event {
            Event::Arrive(cpu) => {
                if self.cpus[cpu as usize].state == State::Waking {
                    self.dispatch(cpu, None);
                }
            }
            Event::RunEnd(cpu, turn) => {
                if self.cpus[cpu as usize].turn == turn {
                    self.on_run_end(cpu)?;
                }
            }
            Event::Preempt(cpu, turn) => {
                if self.cpus[cpu as usize].turn == turn {
                    self.preempt(cpu);
                }
            }
            Event::Tick(cpu) => self.on_tick(cpu),
            Event::Idle(cpu, turn) => {
                if self.cpus[cpu as usize].turn == turn {
                    self.go_idle(cpu);
                }
            }
            Event::Redo(cpu, turn) => {
                if self.cpus[cpu as usize].turn == turn
                    && let State::Locked(prev) = self.cpus[cpu as usize].state
                {
                    self.dispatch(cpu, prev);
                }
            }
            Event::Later(token) => {
                self.sched.later(token, self.now);
                self.drain();
            }
            Event::RealTime(i, busy) => self.on_real_time(i, busy),
            Event::Hotplug(i) => self.on_hotplug(i),
            Event::Check => {
                self.check();
                self.at(self.now + CHECK_NS, Event::Check);
            }
            Event::Timer(task) => self.on_timer(task),
            Event::Post(i) => {
                let a = &self.workload.arrivals[i as usize];
                let (to, gap) = (a.to, a.gap);
                let msg = Message {
                    origin: self.now,
                    reply: 0,
                    sent_at: self.now,
                    by: None,
                    job: None,
                };
                // The interrupt arrives on the CPU that the receiver last ran on.
                self.post(to, msg, None, None, false);
                let next = self.now + self.rng.span(gap);
                self.at(next, Event::Post(i));
            }
            Event::Measure => {
                self.out.begin();
                for c in &mut self.cpus {
                    c.busy_ns = 0;
                    c.since = c.since.max(self.now);
                }
                for t in &mut self.tasks {
                    t.run_ns = 0;
                }
            }
        }
        Ok(())
    }

    fn on_timer(&mut self, task: TaskId) {
        if self.tasks[task as usize].wait == Wait::Time {
            let cpu = self.tasks[task as usize].cpu;
            self.wake(task, None, cpu, false);
        }
    }

    fn on_tick(&mut self, cpu: u32) {
        if let State::Busy(_) = self.cpus[cpu as usize].state {
            let rnd = self.rng.word();
            let resched = self.sched.tick(cpu, self.now, rnd);
            self.drain();
            if resched {
                self.preempt(cpu);
            }
        }
        let c = &mut self.cpus[cpu as usize];
        c.ticks = !self.skips_idle_ticks || matches!(c.state, State::Busy(_));
        if c.ticks {
            self.at(self.now + self.costs.tick_ns, Event::Tick(cpu));
        }
    }

    /// Ticks of different CPUs are staggered, as with the kernel's skew_tick.
    fn tick_phase(&self, cpu: u32) -> u64 {
        self.costs.tick_ns * cpu as u64 / self.machine.cpus() as u64
    }

    /// A CPU that was without ticks has a task.
    fn restart_ticks(&mut self, cpu: u32) {
        let (phase, tick_ns) = (self.tick_phase(cpu), self.costs.tick_ns);
        let past = (self.now.max(phase) - phase) / tick_ns;
        self.cpus[cpu as usize].ticks = true;
        self.at(phase + (past + 1) * tick_ns, Event::Tick(cpu));
    }

    /// Carries out the scheduler's actions. Returns whether an idle CPU was sent an interrupt.
    pub(crate) fn drain(&mut self) -> bool {
        let mut sent = false;
        for action in self.sched.take_actions() {
            match action {
                Action::Resched(cpu) => sent |= self.kick(cpu),
                Action::Preempt(cpu) => {
                    let turn = self.cpus[cpu as usize].turn;
                    self.at(self.now + self.costs.ipi_ns, Event::Preempt(cpu, turn));
                    sent = true;
                }
                Action::Later(ns, token) => self.at(self.now + ns, Event::Later(token)),
            }
        }
        sent
    }

    /// Makes a CPU look for work if it is idle.
    fn kick(&mut self, cpu: u32) -> bool {
        let c = &mut self.cpus[cpu as usize];
        match &mut c.state {
            State::Idle { since } => {
                let idled = self.now.saturating_sub(*since);
                c.state = State::Waking;
                // A CPU that has just become idle sees the request before it sleeps, but not before the
                // interrupt that carries it.
                let delay = if idled == 0 {
                    self.costs.ipi_ns.max(2 * self.sched.gap_ns())
                } else {
                    self.costs.ipi_ns + self.costs.idle_exit_ns(idled)
                };
                self.at(self.now + delay, Event::Arrive(cpu));
                true
            }
            State::Idling { kicked } => {
                *kicked = true;
                false
            }
            _ => false,
        }
    }

    fn go_idle(&mut self, cpu: u32) {
        let c = &mut self.cpus[cpu as usize];
        let kicked = matches!(c.state, State::Idling { kicked: true });
        c.turn = c.turn.wrapping_add(1);
        c.state = State::Idle { since: self.now };
        let again = std::mem::replace(&mut c.known_idle, true);
        self.sched.set_idle(cpu, self.now, true, again);
        self.drain();
        if kicked {
            self.kick(cpu);
        }
    }

    fn on_real_time(&mut self, i: u32, busy: bool) {
        let r = self.workload.real_time[i as usize];
        if busy {
            self.at(self.now + r.run_ns, Event::RealTime(i, false));
            if r.period_ns > 0 {
                self.at(self.now + r.period_ns, Event::RealTime(i, true));
            }
            let before = self.cpus[r.cpu as usize].state;
            if matches!(before, State::RealTime | State::Offline) {
                return;
            }
            let prev = self.take_off(r.cpu, State::RealTime);
            self.sched.set_real_time(r.cpu, self.now, true, prev);
            self.drain();
        } else if self.cpus[r.cpu as usize].state == State::RealTime {
            self.sched.set_real_time(r.cpu, self.now, false, None);
            self.drain();
            self.dispatch(r.cpu, None);
        }
    }

    fn on_hotplug(&mut self, i: u32) {
        let h = self.workload.hotplug[i as usize];
        let is_offline = self.cpus[h.cpu as usize].state == State::Offline;
        if h.online != is_offline {
            return;
        }
        let prev = if h.online {
            let c = &mut self.cpus[h.cpu as usize];
            c.state = State::Idle { since: self.now };
            c.known_idle = true;
            None
        } else {
            self.take_off(h.cpu, State::Offline)
        };
        self.sched.set_online(h.cpu, self.now, h.online, prev);
        self.drain();
    }

    /// Takes a CPU away from the scheduler. Returns the task that was running there and now waits.
    fn take_off(&mut self, cpu: u32, to: State) -> Option<TaskId> {
        let prev = match self.cpus[cpu as usize].state {
            State::Busy(task) => {
                self.account(cpu, task);
                self.sched.on_stop(task, cpu, self.now, true);
                self.trace_end(cpu, task);
                let t = &mut self.tasks[task as usize];
                t.woken_at = u64::MAX;
                t.ready_at = Some(self.now);
                Some(task)
            }
            State::Locked(prev) => prev,
            _ => None,
        };
        let c = &mut self.cpus[cpu as usize];
        c.turn = c.turn.wrapping_add(1);
        c.state = to;
        c.known_idle = false;
        prev
    }

    /// Finds tasks that wait while a CPU of their mask is idle.
    fn check(&mut self) {
        for (t, spec) in self.tasks.iter().zip(&self.workload.tasks) {
            let Some(ready_at) = t.ready_at else { continue };
            for (cpu, c) in self.cpus.iter().enumerate() {
                if let State::Idle { since } = c.state
                    && spec.mask.has(to_u32(cpu))
                {
                    let both = self.now - ready_at.max(since);
                    self.out.idle_beside_work_ns = self.out.idle_beside_work_ns.max(both);
                }
            }
        }
    }

    /// Makes a waiting task runnable. Returns whether an interrupt was sent.
    fn wake(&mut self, task: TaskId, waker: Option<TaskId>, waker_cpu: u32, sync: bool) -> bool {
        self.note(task as u64);
        let t = &mut self.tasks[task as usize];
        t.wait = Wait::No;
        t.woken_at = self.now;
        t.ready_at = Some(self.now);
        let w = Wakeup {
            now: self.now,
            wakee: task,
            prev_cpu: t.cpu,
            waker,
            waker_cpu,
            sync,
            rnd: self.rng.word(),
        };
        self.sched.wake(&w);
        self.drain()
    }

    /// Puts a message into a channel, and wakes the first waiting task. Returns whether an interrupt
    /// was sent.
    fn post(
        &mut self,
        to: u32,
        msg: Message,
        waker: Option<TaskId>,
        waker_cpu: Option<u32>,
        sync: bool,
    ) -> bool {
        let (queue, line) = &mut self.channels[to as usize];
        let Some(task) = line.pop_front() else {
            queue.push_back(msg);
            return false;
        };
        self.accept(task, msg);
        let cpu = waker_cpu.unwrap_or(self.tasks[task as usize].cpu);
        self.wake(task, waker, cpu, sync)
    }

    fn accept(&mut self, task: TaskId, msg: Message) {
        let t = &mut self.tasks[task as usize];
        t.origin = msg.origin;
        t.reply = msg.reply;
        t.sent_at = msg.sent_at;
        t.received_by = msg.by;
        t.job = msg.job;
        t.left = msg.by.map_or(0, Mechanism::recv_ns);
        t.stage = 1;
    }

    /// Handles the end of the current piece of work.
    fn on_run_end(&mut self, cpu: u32) -> Result<(), SimError> {
        let State::Busy(task) = self.cpus[cpu as usize].state else {
            return Ok(());
        };
        self.account(cpu, task);
        self.proceed(cpu, task)
    }

    fn preempt(&mut self, cpu: u32) {
        let State::Busy(task) = self.cpus[cpu as usize].state else {
            return;
        };
        if self.now < self.cpus[cpu as usize].since {
            // The switch to the task is in progress.
            return;
        }
        self.account(cpu, task);
        self.requeue(cpu, task);
    }

    fn requeue(&mut self, cpu: u32, task: TaskId) {
        self.sched.on_stop(task, cpu, self.now, true);
        self.trace_end(cpu, task);
        let t = &mut self.tasks[task as usize];
        t.woken_at = u64::MAX; // not a wake-up: no latency
        t.ready_at = Some(self.now);
        self.dispatch(cpu, Some(task));
    }

    /// Charges the time since the start of the current piece of work.
    fn account(&mut self, cpu: u32, task: TaskId) {
        let c = &mut self.cpus[cpu as usize];
        let ran = self.now.saturating_sub(c.since);
        c.busy_ns += ran;
        c.since = self.now;
        c.turn = c.turn.wrapping_add(1);
        let t = &mut self.tasks[task as usize];
        t.left = t.left.saturating_sub(ran);
        t.run_ns += ran;
    }

    /// A CPU looks for work: runs it or becomes idle. `prev`: the task that ran here and still can;
    /// continuing it is no switch.
    fn dispatch(&mut self, cpu: u32, prev: Option<TaskId>) {
        let rnd = self.rng.word();
        let next = self.sched.next(cpu, prev, self.now, rnd);
        self.drain();
        let c = &mut self.cpus[cpu as usize];
        let task = match next {
            Next::Run(task) => task,
            Next::Idle => {
                c.turn = c.turn.wrapping_add(1);
                c.state = State::Idling { kicked: false };
                match self.sched.gap_ns() {
                    0 => self.go_idle(cpu),
                    gap => {
                        let turn = c.turn;
                        self.at(self.now + gap, Event::Idle(cpu, turn));
                    }
                }
                return;
            }
            Next::Retry(at) => {
                c.turn = c.turn.wrapping_add(1);
                c.state = State::Locked(prev);
                let turn = c.turn;
                self.at(at, Event::Redo(cpu, turn));
                return;
            }
        };
        if std::mem::take(&mut c.known_idle) {
            self.sched.set_idle(cpu, self.now, false, false);
            self.drain();
        }
        self.note(((cpu as u64) << 32) | task as u64);
        let switch_ns = if prev == Some(task) {
            0
        } else {
            self.costs.switch_ns
        };
        let start = self.now + switch_ns;
        self.sched.on_run(task, cpu, self.now);
        let t = &mut self.tasks[task as usize];
        if t.cpu != cpu {
            if self.machine.llc_of(t.cpu) == self.machine.llc_of(cpu) {
                t.left += self.costs.cpu_refill_ns;
            } else {
                t.left += self.costs.llc_refill_ns;
                self.out.llc_moves += 1;
            }
            t.cpu = cpu;
        }
        let group = &mut self.out.groups[self.workload.tasks[task as usize].group];
        if t.woken_at != u64::MAX {
            group.wake.saturating_record(start - t.woken_at);
        }
        if let Some(ready_at) = t.ready_at.take() {
            group.wait_max_ns = group.wait_max_ns.max(start - ready_at);
        }
        self.out.switches += (switch_ns > 0) as u64;
        let c = &mut self.cpus[cpu as usize];
        c.state = State::Busy(task);
        // The switch counts as busy time, charged here.
        c.busy_ns += switch_ns;
        c.since = start;
        c.turn = c.turn.wrapping_add(1);
        if !c.ticks {
            self.restart_ticks(cpu);
        }
        self.trace_begin(cpu, task, start);
        if self.tasks[task as usize].left > 0 {
            self.schedule_end(cpu, task);
            return;
        }
        // No work due: its next op begins after the switch.
        let turn = self.cpus[cpu as usize].turn;
        self.at(start, Event::RunEnd(cpu, turn));
    }

    fn schedule_end(&mut self, cpu: u32, task: TaskId) {
        let c = &self.cpus[cpu as usize];
        let end = c.since + self.tasks[task as usize].left.max(1);
        let turn = c.turn;
        self.at(end, Event::RunEnd(cpu, turn));
    }

    /// Runs the script until an op takes time or waits. The work of the current stage is done.
    fn proceed(&mut self, cpu: u32, task: TaskId) -> Result<(), SimError> {
        let workload = Rc::clone(&self.workload);
        let script = &workload.tasks[task as usize].script;
        for _ in 0..OPS_MAX {
            let op = &script[self.tasks[task as usize].pc];
            match self.step(cpu, task, op, script.len()) {
                Step::Done => {}
                Step::Waits => {
                    self.sched.on_stop(task, cpu, self.now, false);
                    self.trace_end(cpu, task);
                    self.dispatch(cpu, None);
                    return Ok(());
                }
                Step::EndsJob => {
                    // The caller may give it another job before it continues.
                    let turn = self.cpus[cpu as usize].turn;
                    self.at(self.now, Event::RunEnd(cpu, turn));
                    return Ok(());
                }
            }
            if self.tasks[task as usize].left > 0 {
                self.schedule_end(cpu, task);
                return Ok(());
            }
        }
        let group = workload.groups[workload.tasks[task as usize].group].clone();
        Err(SimError::Endless { task, group })
    }

    /// One stage of an op.
    fn step(&mut self, cpu: u32, task: TaskId, op: &Op, ops: usize) -> Step {
        let t = &mut self.tasks[task as usize];
        match (op, t.stage) {
            (Op::Run(span), 0) => {
                t.left = self.rng.span(*span);
                t.stage = 2;
            }
            (Op::Send(_, by) | Op::SendNext { by, .. } | Op::Ask { by, .. } | Op::Reply(by), 0) => {
                t.sent_at = self.now;
                t.left = by.send_ns();
                t.stage = 1;
            }
            (Op::Send(..) | Op::SendNext { .. } | Op::Ask { .. } | Op::Reply(_), 1) => {
                self.send(cpu, task, op);
            }
            (Op::Recv(from), 0) => return self.receive(task, *from),
            (Op::Recv(_), 1) => {
                let (sent_at, by) = (t.sent_at, t.received_by.take());
                t.stage = 2;
                if by.is_some() {
                    let group = self.workload.tasks[task as usize].group;
                    self.out.groups[group]
                        .hop
                        .saturating_record(self.now - sent_at);
                }
            }
            (Op::Sleep(span), 0) => {
                let until = self.now + self.rng.span(*span);
                return self.sleep(task, until);
            }
            (Op::Timer(period), 0) => {
                t.period_at += period;
                let until = t.period_at;
                if until > self.now {
                    return self.sleep(task, until);
                }
                // Late: it does not sleep.
                t.stage = 2;
                t.origin = 0;
            }
            (Op::Lock(lock), 0) => return self.lock(task, *lock),
            (Op::Unlock(lock), 0) => self.unlock(cpu, task, *lock),
            (Op::Done, 0) => {
                t.stage = 2;
                let (origin, group) = (t.origin, self.workload.tasks[task as usize].group);
                self.out.requests += 1;
                if origin != 0 {
                    self.out.groups[group]
                        .request
                        .saturating_record(self.now - origin);
                }
            }
            (Op::Work | Op::Forward, _) => {
                if self.proceed_job(task, cpu, *op == Op::Work) {
                    return Step::EndsJob;
                }
                let t = &mut self.tasks[task as usize];
                if t.stage == DONE {
                    t.next_op(ops);
                }
            }
            (Op::Exit, _) => {
                t.wait = Wait::Gone;
                return Step::Waits;
            }
            (_, _) => t.next_op(ops),
        }
        Step::Done
    }

    /// The effect of an op that sends.
    fn send(&mut self, cpu: u32, task: TaskId, op: &Op) {
        let t = &mut self.tasks[task as usize];
        let mut reply = t.reply;
        let (to, by) = match op {
            Op::Send(to, by) => (*to, *by),
            Op::Reply(by) => (t.reply, *by),
            Op::Ask { to, reply: own, by } => {
                reply = *own;
                // A request starts here.
                t.origin = t.sent_at;
                (*to, *by)
            }
            Op::SendNext { first, count, by } => {
                let to = first + t.next_channel % count;
                t.next_channel = t.next_channel.wrapping_add(1);
                (to, *by)
            }
            _ => unreachable!("only ops that send are passed"),
        };
        let origin = if t.origin == 0 { t.sent_at } else { t.origin };
        let msg = Message {
            origin,
            reply,
            sent_at: t.sent_at,
            by: Some(by),
            job: None,
        };
        let kicked = self.post(to, msg, Some(task), Some(cpu), by.is_sync());
        let t = &mut self.tasks[task as usize];
        t.left = if kicked { self.costs.kick_ns } else { 0 };
        t.stage = 2;
    }

    /// Takes a message, or waits for one.
    fn receive(&mut self, task: TaskId, from: u32) -> Step {
        let (queue, line) = &mut self.channels[from as usize];
        if let Some(msg) = queue.pop_front() {
            self.accept(task, msg);
            return Step::Done;
        }
        line.push_back(task);
        self.tasks[task as usize].wait = Wait::Message;
        Step::Waits
    }

    /// Sleeps until a time. Its request ends there.
    fn sleep(&mut self, task: TaskId, until: u64) -> Step {
        let t = &mut self.tasks[task as usize];
        t.stage = 2;
        t.origin = 0;
        t.wait = Wait::Time;
        self.at(until, Event::Timer(task));
        Step::Waits
    }

    /// Takes a lock, or waits for it.
    fn lock(&mut self, task: TaskId, lock: u32) -> Step {
        let t = &mut self.tasks[task as usize];
        t.stage = 2;
        let (owner, line) = &mut self.locks[lock as usize];
        if owner.is_none() {
            *owner = Some(task);
            return Step::Done;
        }
        line.push_back(task);
        t.wait = Wait::Lock;
        Step::Waits
    }

    /// Passes a lock on to the first that waits.
    fn unlock(&mut self, cpu: u32, task: TaskId, lock: u32) {
        self.tasks[task as usize].stage = 2;
        let (owner, line) = &mut self.locks[lock as usize];
        *owner = line.pop_front();
        if let Some(next) = *owner
            && self.wake(next, Some(task), cpu, false)
        {
            self.tasks[task as usize].left = self.costs.kick_ns;
        }
    }

    /// One step of the job of `task`, which runs on `cpu`: part of its work, or of passing it on. Returns whether the
    /// job has ended here.
    fn proceed_job(&mut self, task: TaskId, cpu: u32, works: bool) -> bool {
        let t = &mut self.tasks[task as usize];
        let Some(number) = t.job else {
            t.stage = DONE; // its message had no job
            return false;
        };
        let job = &mut self.jobs[number as usize];
        match (works, t.stage) {
            (true, 0) => {
                t.left = job.work_ns().max(1);
                t.stage = 1;
            }
            (true, _) => t.stage = if job.end_stage(self.now) { 0 } else { DONE },
            (false, 0) if job.has_stage() => {
                // It sends the job itself like those of its outbox.
                t.outbox.push_front(number);
                t.stage = 1;
            }
            (false, 0) => {
                self.ended.push_back(job.end(number, self.now, task));
                t.stage = 1;
                return true;
            }
            (false, 1) => match t.outbox.front() {
                Some(&next) => {
                    t.sent_at = self.now;
                    t.left = self.jobs[next as usize].by().map_or(0, Mechanism::send_ns);
                    t.stage = 2;
                }
                None => t.stage = DONE,
            },
            (false, _) => {
                let sent_at = t.sent_at;
                t.stage = 1;
                let next = t.outbox.pop_front().expect("its cost was paid");
                if self.send_job(next, sent_at, Some((task, cpu))) {
                    self.tasks[task as usize].left = self.costs.kick_ns;
                }
            }
        }
        false
    }

    /// Sends a job to the thread of its next stage: from `task`, which runs on `cpu`, or from outside. Returns whether
    /// an interrupt was sent.
    pub(crate) fn send_job(
        &mut self,
        number: u32,
        sent_at: u64,
        from: Option<(TaskId, u32)>,
    ) -> bool {
        let job = &self.jobs[number as usize];
        let by = job.by().filter(|_| from.is_some());
        let message = Message {
            origin: sent_at,
            reply: 0,
            sent_at,
            by,
            job: Some(number),
        };
        let (task, cpu) = from.unzip();
        let sync = by.is_some_and(Mechanism::is_sync);
        self.post(job.inbox(), message, task, cpu, sync)
    }

    /// Gives `task` a job to be sent, or to work on next, before it receives its next message. It has just ended one.
    pub(crate) fn add_to(&mut self, task: TaskId, number: u32, own: bool) {
        if own {
            let (queue, _) = &mut self.channels[self.jobs[number as usize].inbox() as usize];
            queue.push_front(Message {
                origin: self.now,
                reply: 0,
                sent_at: self.now,
                by: None,
                job: Some(number),
            });
        } else {
            self.tasks[task as usize].outbox.push_back(number);
        }
    }

    /// CPU time that `task` has used until it last left a CPU or ended a piece of work, ns.
    pub(crate) fn run_ns(&self, task: TaskId) -> u64 {
        self.tasks[task as usize].run_ns
    }

    /// See [`RunResult::events`].
    pub(crate) fn events(&self) -> u64 {
        self.out.events
    }

    /// See [`RunResult::idle_beside_work_ns`].
    pub(crate) fn idle_beside_work_ns(&self) -> u64 {
        self.out.idle_beside_work_ns
    }

    fn trace_begin(&mut self, cpu: u32, task: TaskId, start: u64) {
        if let Some(trace) = &mut self.trace {
            trace.begin(cpu, task, start);
        }
    }

    fn trace_end(&mut self, cpu: u32, task: TaskId) {
        if let Some(trace) = &mut self.trace {
            let group = &self.workload.groups[self.workload.tasks[task as usize].group];
            trace.end(cpu, task, group, self.now);
        }
    }
}
