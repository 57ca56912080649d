//! A host whose threads work on jobs of a larger simulation.
//!
//! The caller owns the time: it posts jobs, asks for the next end of one, and takes it. A job is a list of stages, each
//! CPU time of one thread. A thread that ends a stage wakes the thread of the next one, by the mechanism of that stage,
//! so the scheduler sees who wakes whom and with which hint. Threads wait for jobs in the order of arrival.

use std::rc::Rc;

use slipstream_base::width::to_u32;

use crate::machine::{Costs, CpuMask, Machine, Mechanism};
use crate::policy::Params;
use crate::result::SimError;
use crate::sched::{SchedulerKind, TaskId, eevdf, slip};
use crate::sim::Sim;
use crate::workload::{Channel, Op, Workload};

/// Stages of a job at most.
pub const STAGES_MAX: usize = 6;

/// One stage of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The inbox of its threads, and how the thread before it wakes them; `None`: the same thread continues.
    pub to: Option<(Channel, Mechanism)>,
    /// Its CPU time, ns.
    pub work_ns: u64,
}

/// A job of a running host.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    stages: [Stage; STAGES_MAX],
    ends: [u64; STAGES_MAX],
    count: usize,
    current: usize,
    caller: u64,
}

impl Job {
    fn stage(&self) -> Stage {
        self.stages[self.current]
    }

    pub(crate) fn work_ns(&self) -> u64 {
        self.stage().work_ns
    }

    pub(crate) fn by(&self) -> Option<Mechanism> {
        Some(self.stage().to?.1)
    }

    pub(crate) fn inbox(&self) -> Channel {
        self.stage().to.expect("sent to another thread").0
    }

    pub(crate) fn has_stage(&self) -> bool {
        self.current < self.count
    }

    /// Ends the current stage. Returns whether the same thread does the next one.
    pub(crate) fn end_stage(&mut self, now: u64) -> bool {
        self.ends[self.current] = now;
        self.current += 1;
        self.has_stage() && self.stage().to.is_none()
    }

    pub(crate) fn end(&self, number: u32, now: u64, task: TaskId) -> Ended {
        Ended {
            number,
            caller: self.caller,
            at: now,
            stage_ends: self.ends,
            thread: task,
        }
    }
}

/// A job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    number: u32,
    /// The caller's number of the job.
    pub caller: u64,
    /// When its last stage ended, ns.
    pub at: u64,
    /// When each of its stages ended, ns.
    pub stage_ends: [u64; STAGES_MAX],
    /// The thread of its last stage, which has the CPU still.
    pub thread: TaskId,
}

/// The origin of the wake-up for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waker {
    /// A device: the thread is woken by an interrupt.
    Device,
    /// The thread of the [`Ended`] that was taken last, at the same time: it wakes the thread of the first stage before
    /// it waits for its next job.
    Thread(TaskId),
    /// The same, for a job that this thread does itself, before others.
    Itself(TaskId),
}

/// Threads of a host, before it starts.
#[derive(Clone, Debug, Default)]
pub struct Threads {
    workload: Workload,
}

impl Threads {
    /// Adds `count` threads with one inbox: a free one takes the next job.
    pub fn add(&mut self, machine: Machine, name: &str, count: u32) -> Channel {
        let group = self.workload.group(name);
        let inbox = self.workload.channel();
        for _ in 0..count {
            let home = self.next_home(machine);
            let script = [Op::Recv(inbox), Op::Work, Op::Forward];
            self.workload.task(group, home, &script);
        }
        inbox
    }

    /// Adds `count` threads that never wait, of nice 0: other programs.
    pub fn add_background(&mut self, machine: Machine, count: u32) {
        for _ in 0..count {
            let home = self.next_home(machine);
            self.workload.add_hog("background", 100, CpuMask::ALL, home);
        }
    }

    /// Threads start on one CPU after the other.
    fn next_home(&self, machine: Machine) -> u32 {
        to_u32(self.workload.tasks.len()) % machine.cpus()
    }
}

/// A host of a larger simulation. Its EEVDF is [`eevdf::Eevdf::with_lag`].
pub struct JobHost {
    sim: Sim<'static>,
    free: Vec<u32>,
    /// Jobs that have not ended.
    under_way: usize,
}

impl JobHost {
    /// A host at time 0. With `checked` it is watched for tasks that wait although a CPU idles
    /// ([`idle_beside_work_ns`](Self::idle_beside_work_ns)), which takes time.
    ///
    /// A process has one host with our scheduler at a time: other threads wait for its end here.
    ///
    /// # Errors
    /// This thread has a host with our scheduler.
    pub fn new(
        machine: Machine,
        costs: Costs,
        threads: Threads,
        (kind, params): (SchedulerKind, Params),
        seed: u64,
        checked: bool,
    ) -> Result<JobHost, SimError> {
        if kind != SchedulerKind::Eevdf && slip::is_in_use() {
            return Err(SimError::InUse);
        }
        let sched = match kind {
            SchedulerKind::Eevdf => Box::new(eevdf::Eevdf::with_lag(machine)),
            ours => ours.build(machine, params),
        };
        let workload = Rc::new(threads.workload);
        let mut sim = Sim::new(machine, costs, workload, sched, seed, None)?;
        sim.skips_idle_ticks = true;
        sim.start(checked);
        sim.drain();
        Ok(JobHost {
            sim,
            free: Vec::new(),
            under_way: 0,
        })
    }

    /// Adds a job at `now`: the time of the last end that [`next_end`](Self::next_end) found, or a time up to which it
    /// found none. `caller` comes back with its end.
    ///
    /// # Errors
    /// See [`SimError`].
    ///
    /// # Panics
    /// If there are no stages, or more than [`STAGES_MAX`], or the first one has no inbox.
    pub fn post(
        &mut self,
        now: u64,
        waker: Waker,
        caller: u64,
        stages: &[Stage],
    ) -> Result<(), SimError> {
        if self.under_way == 0 {
            self.sim.advance(now)?; // it was not asked for ends
        }
        self.sim.now = self.sim.now.max(now);
        let job = Job {
            stages: std::array::from_fn(|i| stages[i.min(stages.len() - 1)]),
            ends: [0; STAGES_MAX],
            count: stages.len(),
            current: 0,
            caller,
        };
        assert!(stages.len() <= STAGES_MAX && stages[0].to.is_some());
        self.under_way += 1;
        let number = if let Some(number) = self.free.pop() {
            self.sim.jobs[number as usize] = job;
            number
        } else {
            self.sim.jobs.push(job);
            to_u32(self.sim.jobs.len() - 1)
        };
        match waker {
            Waker::Device => {
                self.sim.send_job(number, now, None);
            }
            Waker::Thread(task) => self.sim.add_to(task, number, false),
            Waker::Itself(task) => self.sim.add_to(task, number, true),
        }
        Ok(())
    }

    /// Time of the next end of a job, if it is before `limit`. From then on no job may be posted before that time, or
    /// before `limit` if there is none.
    ///
    /// # Errors
    /// See [`SimError`].
    pub fn next_end(&mut self, limit: u64) -> Result<Option<u64>, SimError> {
        if self.under_way > 0 {
            self.sim.advance(limit)?;
        }
        Ok(self.sim.ended.front().map(|ended| ended.at))
    }

    /// Takes a job that has ended by `now`, in order.
    pub fn take_ended(&mut self, now: u64) -> Option<Ended> {
        self.sim.ended.front().filter(|ended| ended.at <= now)?;
        let ended = self.sim.ended.pop_front()?;
        self.under_way -= 1;
        self.free.push(ended.number);
        Some(ended)
    }

    /// CPU time that a thread has used until it last left a CPU or ended a piece of work, ns. Threads are numbered in
    /// the order in which they were added.
    pub fn run_ns(&self, thread: TaskId) -> u64 {
        self.sim.run_ns(thread)
    }

    /// Events handled.
    pub fn events(&self) -> u64 {
        self.sim.events()
    }

    /// Longest time that a thread waited while a CPU was idle, ns, if the host is checked.
    pub fn idle_beside_work_ns(&self) -> u64 {
        self.sim.idle_beside_work_ns()
    }
}
