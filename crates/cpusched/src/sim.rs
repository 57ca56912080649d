//! The event loop: tasks run their scripts on CPUs, under a scheduler, in virtual time.
//!
//! Events of the same instant keep the order in which they were scheduled, and all chance comes
//! from one seeded generator, so that the same input gives the same result on any machine.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use hdrhistogram::Histogram;

use crate::machine::{Costs, Machine, Mechanism};
use crate::perfetto::Trace;
use crate::policy::COUNTERS;
use crate::sched::{Placed, Scheduler, TaskId, Wakeup};
use crate::workload::{Op, Span, Workload};

/// Ops that take no time which a task may run in a row; more is a script that never computes.
const OPS_MAX: u32 = 10_000;

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next word.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform over [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn span(&mut self, span: Span) -> u64 {
        match span {
            Span::Fixed(ns) => ns,
            // libm, not the system's: its results differ between machines.
            Span::Exp(mean) => (-libm::log(1.0 - self.unit()) * mean as f64) as u64,
            Span::Uniform(a, b) => a + (self.unit() * (b.saturating_sub(a)) as f64) as u64,
            Span::Either(a, b, p) => {
                if self.unit() < p {
                    b
                } else {
                    a
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// An interrupt reached an idle CPU and it has left its idle state.
    Arrive(u32),
    /// The current piece of work ends, or the slice; the number tells stale events.
    RunEnd(u32, u32),
    /// A CPU is asked to let go of its task.
    Preempt(u32, u32),
    Tick(u32),
    /// A sleeper's time is up.
    Timer(TaskId),
    /// A message comes from outside.
    Post(u32),
    /// Warm-up is over.
    Measure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle { since: u64 },
    Waking,
    Busy(TaskId),
}

#[derive(Clone, Debug)]
struct Cpu {
    state: State,
    /// Counts pieces of work, so that events of earlier ones are known as stale.
    turn: u32,
    /// When the current piece of work began.
    since: u64,
    slice_end: u64,
    busy_ns: u64,
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
    /// Within the op: 0 not begun, 1 its work is done and its effect is due, 2 after the effect.
    stage: u8,
    /// CPU time left in the current stage, ns.
    left: u64,
    wait: Wait,
    cpu: u32,
    woken_at: u64,
    /// Turn of [`Op::SendNext`].
    next_channel: u32,
    /// When the request that it works on began.
    origin: u64,
    /// When the sender began to send the message that it received; for end-to-end latency.
    sent_at: u64,
    /// Deadline of [`Op::Timer`].
    period_at: u64,
    /// How its message came, until its receiving cost is paid.
    received_by: Option<Mechanism>,
    run_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Message {
    origin: u64,
    sent_at: u64,
    by: Option<Mechanism>,
}

/// Latencies of one group of tasks, ns.
#[derive(Clone, Debug)]
pub struct GroupResult {
    /// The group's name.
    pub name: String,
    /// From a wake-up to running.
    pub wake: Histogram<u64>,
    /// From the sender's beginning to send to the receiver's having received.
    pub hop: Histogram<u64>,
    /// From a request's beginning to [`Op::Done`].
    pub request: Histogram<u64>,
    /// CPU time used, ns.
    pub run_ns: u64,
}

/// What a run measured, after its warm-up.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// By group.
    pub groups: Vec<GroupResult>,
    /// The scheduler's counters, in the order of [`COUNTERS`]; whole run.
    pub counters: [u64; COUNTERS.len()],
    /// Measured time, ns.
    pub measured_ns: u64,
    /// CPU time used by tasks and switches over all there was, 0 to 1.
    pub utilization: f64,
    /// Context switches.
    pub switches: u64,
    /// Moves of a task to another LLC.
    pub llc_moves: u64,
    /// Events handled.
    pub events: u64,
    /// Requests that ended.
    pub requests: u64,
    /// A digest of everything that happened: equal digests mean equal runs.
    pub digest: u64,
}

/// Why a run could not be made or finished.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A script loops without computing or waiting.
    #[error(
        "task {task} of group `{group}` ran {OPS_MAX} steps without computing or waiting; \
         give its script a run, a sleep or a receive"
    )]
    Endless {
        /// The task.
        task: TaskId,
        /// Its group.
        group: String,
    },
    /// A task names a CPU that the machine lacks.
    #[error(
        "task {task} is to run on CPU {cpu}, but the machine has CPUs 0 to {last}; \
         change the task or make the machine larger"
    )]
    NoCpu {
        /// The task.
        task: TaskId,
        /// The CPU named.
        cpu: u32,
        /// The last CPU there is.
        last: u32,
    },
}

/// One run.
pub struct Sim<'a> {
    machine: Machine,
    costs: &'a Costs,
    workload: &'a Workload,
    sched: Box<dyn Scheduler>,
    now: u64,
    seq: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    cpus: Vec<Cpu>,
    tasks: Vec<Task>,
    channels: Vec<(VecDeque<Message>, VecDeque<TaskId>)>,
    locks: Vec<(Option<TaskId>, VecDeque<TaskId>)>,
    rng: Rng,
    out: RunResult,
    trace: Option<&'a mut Trace>,
}

fn histogram() -> Histogram<u64> {
    // Two digits from 1 ns to 1000 s; longer ones count as that.
    Histogram::new_with_bounds(1, 1_000_000_000_000, 2).expect("the bounds and digits are allowed")
}

/// Runs `workload` for `warmup_ns`, then measures for `measure_ns`.
///
/// # Errors
/// When a task names a CPU that is not there, or its script loops without ever taking time.
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
    Sim::new(machine, costs, workload, sched, seed, trace)?.run(warmup_ns, measure_ns)
}

impl<'a> Sim<'a> {
    fn new(
        machine: Machine,
        costs: &'a Costs,
        workload: &'a Workload,
        mut sched: Box<dyn Scheduler>,
        seed: u64,
        trace: Option<&'a mut Trace>,
    ) -> Result<Sim<'a>, SimError> {
        let idle = State::Idle { since: 0 };
        let cpu = Cpu {
            state: idle,
            turn: 0,
            since: 0,
            slice_end: 0,
            busy_ns: 0,
        };
        let mut tasks = Vec::with_capacity(workload.tasks.len());
        for (i, t) in workload.tasks.iter().enumerate() {
            for cpu in t.pinned.into_iter().chain([t.home]) {
                if cpu >= machine.cpus() {
                    let last = machine.cpus() - 1;
                    return Err(SimError::NoCpu {
                        task: i as TaskId,
                        cpu,
                        last,
                    });
                }
            }
            sched.add_task(t.weight, t.home, t.pinned);
            tasks.push(Task {
                pc: 0,
                stage: 0,
                left: 0,
                wait: Wait::Time,
                cpu: t.home,
                woken_at: 0,
                next_channel: 0,
                origin: 0,
                sent_at: 0,
                period_at: 0,
                received_by: None,
                run_ns: 0,
            });
        }
        let groups = workload
            .groups
            .iter()
            .map(|name| GroupResult {
                name: name.clone(),
                wake: histogram(),
                hop: histogram(),
                request: histogram(),
                run_ns: 0,
            })
            .collect();
        Ok(Sim {
            machine,
            costs,
            workload,
            sched,
            now: 0,
            seq: 0,
            heap: BinaryHeap::new(),
            cpus: vec![cpu; machine.cpus() as usize],
            tasks,
            channels: vec![Default::default(); workload.channels as usize],
            locks: vec![Default::default(); workload.locks as usize],
            rng: Rng::new(seed),
            out: RunResult {
                groups,
                counters: [0; COUNTERS.len()],
                measured_ns: 0,
                utilization: 0.0,
                switches: 0,
                llc_moves: 0,
                events: 0,
                requests: 0,
                digest: 0,
            },
            trace,
        })
    }

    fn at(&mut self, time: u64, event: Event) {
        self.seq += 1;
        self.heap.push(Reverse((time, self.seq, event)));
    }

    fn run(mut self, warmup_ns: u64, measure_ns: u64) -> Result<RunResult, SimError> {
        let end = warmup_ns + measure_ns;
        for task in 0..self.tasks.len() as TaskId {
            // Staggered by 1 us, so that not all begin in one instant.
            self.at(task as u64 * 1_000, Event::Timer(task));
        }
        for i in 0..self.workload.arrivals.len() {
            let first = self.rng.span(self.workload.arrivals[i].gap);
            self.at(first, Event::Post(i as u32));
        }
        for cpu in 0..self.machine.cpus() {
            // Ticks of different CPUs fall at different times, as the kernel's skew_tick does.
            let phase = self.costs.tick_ns * cpu as u64 / self.machine.cpus() as u64;
            self.at(phase, Event::Tick(cpu));
        }
        self.at(warmup_ns, Event::Measure);
        while let Some(Reverse((time, _, event))) = self.heap.pop() {
            if time > end {
                break;
            }
            debug_assert!(time >= self.now, "time runs forward");
            self.now = time;
            self.out.events += 1;
            self.handle(event)?;
        }
        self.now = end;
        Ok(self.finish(measure_ns))
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
            self.out.groups[spec.group].run_ns += t.run_ns;
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
            Event::Timer(task) => self.on_timer(task),
            Event::Post(i) => {
                let a = &self.workload.arrivals[i as usize];
                let (to, gap) = (a.to, a.gap);
                let msg = Message {
                    origin: self.now,
                    sent_at: self.now,
                    by: None,
                };
                // The interrupt comes in where the receiver last ran.
                self.post(to, msg, None, None, false);
                let next = self.now + self.rng.span(gap);
                self.at(next, Event::Post(i));
            }
            Event::Measure => {
                for g in &mut self.out.groups {
                    g.wake.reset();
                    g.hop.reset();
                    g.request.reset();
                }
                self.out.switches = 0;
                self.out.llc_moves = 0;
                self.out.requests = 0;
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
            let (idle, resched) = self.sched.tick(cpu, self.now, rnd);
            if let Some(idle) = idle {
                self.kick(idle);
            }
            if resched {
                self.preempt(cpu);
            }
        }
        self.at(self.now + self.costs.tick_ns, Event::Tick(cpu));
    }

    /// Sends an interrupt to an idle CPU that was claimed.
    fn kick(&mut self, cpu: u32) {
        let c = &mut self.cpus[cpu as usize];
        if let State::Idle { since } = c.state {
            let exit = self.costs.idle_exit_ns(self.now.saturating_sub(since));
            c.state = State::Waking;
            self.at(self.now + self.costs.ipi_ns + exit, Event::Arrive(cpu));
        }
    }

    /// Makes a waiting task runnable. Returns whether an interrupt was sent.
    fn wake(&mut self, task: TaskId, waker: Option<TaskId>, waker_cpu: u32, sync: bool) -> bool {
        self.note(task as u64);
        let t = &mut self.tasks[task as usize];
        t.wait = Wait::No;
        t.woken_at = self.now;
        let w = Wakeup {
            now: self.now,
            wakee: task,
            prev_cpu: t.cpu,
            waker,
            waker_cpu,
            sync,
            rnd: self.rng.word(),
        };
        match self.sched.wake(&w) {
            Placed::Kick(cpu) => {
                self.kick(cpu);
                true
            }
            Placed::Preempt(cpu) => {
                let turn = self.cpus[cpu as usize].turn;
                self.at(self.now + self.costs.ipi_ns, Event::Preempt(cpu, turn));
                true
            }
            Placed::Queued => false,
        }
    }

    /// Puts a message into a channel; wakes the first that waits. Returns whether an interrupt
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
        t.sent_at = msg.sent_at;
        t.received_by = msg.by;
        t.left = msg.by.map_or(0, Mechanism::recv_ns);
        t.stage = 1;
    }

    /// The current piece of work ended: the op's, or the slice.
    fn on_run_end(&mut self, cpu: u32) -> Result<(), SimError> {
        let State::Busy(task) = self.cpus[cpu as usize].state else {
            return Ok(());
        };
        self.account(cpu, task);
        if self.tasks[task as usize].left == 0 {
            return self.proceed(cpu, task);
        }
        self.requeue(cpu, task);
        Ok(())
    }

    fn preempt(&mut self, cpu: u32) {
        let State::Busy(task) = self.cpus[cpu as usize].state else {
            return;
        };
        if self.now < self.cpus[cpu as usize].since {
            // Still switching to it.
            return;
        }
        self.account(cpu, task);
        self.requeue(cpu, task);
    }

    fn requeue(&mut self, cpu: u32, task: TaskId) {
        self.sched.on_stop(task, cpu, self.now, true);
        self.trace_end(cpu, task);
        self.tasks[task as usize].woken_at = u64::MAX; // not a wake-up: no latency
        self.sched.requeue(task, cpu, self.now);
        self.dispatch(cpu, Some(task));
    }

    /// Charges the time since the piece of work began.
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

    /// A CPU looks for work: runs it or goes idle. `ended`: the task whose slice just ended here;
    /// going on with it is no switch.
    fn dispatch(&mut self, cpu: u32, ended: Option<TaskId>) {
        let rnd = self.rng.word();
        let Some(task) = self.sched.next(cpu, self.now, rnd) else {
            let c = &mut self.cpus[cpu as usize];
            c.turn = c.turn.wrapping_add(1);
            c.state = State::Idle { since: self.now };
            self.sched.set_idle(cpu, true);
            return;
        };
        if !matches!(self.cpus[cpu as usize].state, State::Busy(_)) {
            self.sched.set_idle(cpu, false);
        }
        self.note(((cpu as u64) << 32) | task as u64);
        let switch_ns = if ended == Some(task) {
            0
        } else {
            self.costs.switch_ns
        };
        let start = self.now + switch_ns;
        let slice = self.sched.on_run(task, cpu, self.now);
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
        if t.woken_at != u64::MAX {
            let group = self.workload.tasks[task as usize].group;
            let latency = start - t.woken_at;
            self.out.groups[group].wake.saturating_record(latency);
        }
        self.out.switches += (switch_ns > 0) as u64;
        let c = &mut self.cpus[cpu as usize];
        c.state = State::Busy(task);
        // The switch counts as busy time, charged here.
        c.busy_ns += switch_ns;
        c.since = start;
        c.slice_end = start.saturating_add(slice);
        c.turn = c.turn.wrapping_add(1);
        self.trace_begin(cpu, task, start);
        if self.tasks[task as usize].left > 0 {
            self.schedule_end(cpu, task);
            return;
        }
        // No work due: its next op begins once it is switched in.
        let turn = self.cpus[cpu as usize].turn;
        self.at(start, Event::RunEnd(cpu, turn));
    }

    fn schedule_end(&mut self, cpu: u32, task: TaskId) {
        let c = &self.cpus[cpu as usize];
        let end = (c.since + self.tasks[task as usize].left).min(c.slice_end.max(c.since + 1));
        let turn = c.turn;
        self.at(end, Event::RunEnd(cpu, turn));
    }

    /// Runs the script until it needs time or waits. The current stage's work is done.
    fn proceed(&mut self, cpu: u32, task: TaskId) -> Result<(), SimError> {
        let workload = self.workload;
        let script = &workload.tasks[task as usize].script;
        for _ in 0..OPS_MAX {
            let t = &mut self.tasks[task as usize];
            let op = &script[t.pc];
            let (stage, mut blocked) = (t.stage, false);
            match (op, stage) {
                (Op::Run(span), 0) => {
                    t.left = self.rng.span(*span);
                    t.stage = 2;
                }
                (Op::Send(_, by) | Op::SendNext { by, .. }, 0) => {
                    t.sent_at = self.now;
                    t.left = by.send_ns();
                    t.stage = 1;
                }
                (Op::Send(..) | Op::SendNext { .. }, 1) => {
                    let (to, by) = match op {
                        Op::Send(to, by) => (*to, *by),
                        Op::SendNext { first, count, by } => {
                            let to = first + t.next_channel % count;
                            t.next_channel = t.next_channel.wrapping_add(1);
                            (to, *by)
                        }
                        _ => unreachable!("matched above"),
                    };
                    let origin = if t.origin == 0 { t.sent_at } else { t.origin };
                    let msg = Message {
                        origin,
                        sent_at: t.sent_at,
                        by: Some(by),
                    };
                    let kicked = self.post(to, msg, Some(task), Some(cpu), by.is_sync());
                    let t = &mut self.tasks[task as usize];
                    t.left = if kicked { self.costs.kick_ns } else { 0 };
                    t.stage = 2;
                }
                (Op::Recv(from), 0) => {
                    let (queue, line) = &mut self.channels[*from as usize];
                    if let Some(msg) = queue.pop_front() {
                        self.accept(task, msg);
                    } else {
                        line.push_back(task);
                        t.wait = Wait::Message;
                        blocked = true;
                    }
                }
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
                    t.wait = Wait::Time;
                    t.stage = 2;
                    t.origin = 0;
                    blocked = true;
                    self.at(until, Event::Timer(task));
                }
                (Op::Timer(period), 0) => {
                    t.period_at += period;
                    t.stage = 2;
                    t.origin = 0;
                    if t.period_at > self.now {
                        t.wait = Wait::Time;
                        blocked = true;
                        let until = t.period_at;
                        self.at(until, Event::Timer(task));
                    }
                }
                (Op::Lock(lock), 0) => {
                    t.stage = 2;
                    let (owner, line) = &mut self.locks[*lock as usize];
                    if owner.is_none() {
                        *owner = Some(task);
                    } else {
                        line.push_back(task);
                        t.wait = Wait::Lock;
                        blocked = true;
                    }
                }
                (Op::Unlock(lock), 0) => {
                    t.stage = 2;
                    let (owner, line) = &mut self.locks[*lock as usize];
                    *owner = line.pop_front();
                    if let Some(next) = *owner
                        && self.wake(next, Some(task), cpu, false)
                    {
                        self.tasks[task as usize].left = self.costs.kick_ns;
                    }
                }
                (Op::Done, 0) => {
                    t.stage = 2;
                    let (origin, group) = (t.origin, workload.tasks[task as usize].group);
                    self.out.requests += 1;
                    if origin != 0 {
                        self.out.groups[group]
                            .request
                            .saturating_record(self.now - origin);
                    }
                }
                (Op::Exit, _) => {
                    t.wait = Wait::Gone;
                    blocked = true;
                }
                (_, _) => {
                    t.pc = (t.pc + 1) % script.len();
                    t.stage = 0;
                }
            }
            if blocked {
                self.sched.on_stop(task, cpu, self.now, false);
                self.trace_end(cpu, task);
                self.dispatch(cpu, None);
                return Ok(());
            }
            if self.tasks[task as usize].left > 0 {
                self.schedule_end(cpu, task);
                return Ok(());
            }
        }
        let group = workload.groups[workload.tasks[task as usize].group].clone();
        Err(SimError::Endless { task, group })
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
