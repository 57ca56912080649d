//! The schedulers that the simulator compares.
//!
//! - [`slip`]: ours: the BPF program itself, on a model of the kernel that calls it, with and without
//!   handoff and learning.
//! - [`eevdf`]: a model of Linux's own scheduler.

pub mod eevdf;
mod kernel;
pub mod slip;

pub use kernel::{CPUS_MAX, GAP_NS, LLCS_MAX};
use serde::Deserialize;

use crate::machine::{CpuMask, Machine};
use crate::policy;

/// A task of the simulation; dense from 0.
pub type TaskId = u32;

/// Properties of a task when it is created.
#[derive(Clone, Debug)]
pub struct TaskParams {
    /// Weight, 100 for nice 0.
    pub weight: u32,
    /// The CPU that it starts on.
    pub home: u32,
    /// The CPUs that it may use.
    pub mask: CpuMask,
    /// Its cgroup: an id and the group's weight (100 is the default); `None`: the root.
    pub cgroup: Option<(u32, u32)>,
}

/// A wake-up.
#[derive(Clone, Copy, Debug)]
pub struct Wakeup {
    /// Current time, ns.
    pub now: u64,
    /// The task that wakes up.
    pub wakee: TaskId,
    /// The CPU it last ran on.
    pub prev_cpu: u32,
    /// The task that makes the wake-up; `None` for a timer or a device.
    pub waker: Option<TaskId>,
    /// The CPU on which the wake-up is made.
    pub waker_cpu: u32,
    /// Whether it carries the sync hint.
    pub sync: bool,
    /// A random word.
    pub rnd: u64,
}

/// An action requested by a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// This CPU should look for work if it is idle.
    Resched(u32),
    /// This CPU's task should yield.
    Preempt(u32),
    /// Call [`Scheduler::later`] after this many ns with this token.
    Later(u64, u32),
}

/// The next state of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It runs this task.
    Run(TaskId),
    /// It idles.
    Idle,
    /// Its run queue is locked: call again at this time, ns.
    Retry(u64),
}

/// A scheduler: receives events and chooses tasks. No clock, no I/O.
pub trait Scheduler {
    /// A task is created; called in order of ids.
    fn add_task(&mut self, t: &TaskParams);
    /// A task wakes up.
    fn wake(&mut self, w: &Wakeup);
    /// A CPU needs work; `prev` runs there, is runnable and was stopped by [`Scheduler::on_stop`]. The
    /// task returned leaves its queue, and `prev` is queued unless it is that task.
    fn next(&mut self, cpu: u32, prev: Option<TaskId>, now: u64, rnd: u64) -> Next;
    /// A task got a CPU, or keeps it.
    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64);
    /// The task left the CPU, or is about to be replaced.
    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, runnable: bool);
    /// A CPU became idle or busy. `again`: it was idle before, and was woken in vain.
    fn set_idle(&mut self, cpu: u32, now: u64, idle: bool, again: bool);
    /// The tick of a busy CPU. Returns whether the running task should yield.
    fn tick(&mut self, cpu: u32, now: u64, rnd: u64) -> bool;
    /// [`Action::Later`] is due.
    fn later(&mut self, _token: u32, _now: u64) {}
    /// A real-time task took a CPU on which `prev` was running, or left it.
    fn set_real_time(&mut self, cpu: u32, now: u64, busy: bool, prev: Option<TaskId>);
    /// A CPU on which `prev` was running went offline, or came back online, idle.
    fn set_online(&mut self, cpu: u32, now: u64, online: bool, prev: Option<TaskId>);
    /// Takes the actions requested by any of the calls above.
    fn take_actions(&mut self) -> Vec<Action>;
    /// The error for which a kernel would have ended the scheduler.
    fn error(&self) -> Option<String> {
        None
    }
    /// Delay from finding no task to being idle, ns.
    fn gap_ns(&self) -> u64 {
        0
    }
    /// Counters in the order of [`policy::COUNTERS`].
    fn counters(&self) -> [u64; policy::COUNTERS.len()];
    /// Number of tasks in queues.
    fn waiting(&self) -> usize;
}

/// A scheduler by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulerKind {
    /// The EEVDF model.
    Eevdf,
    /// Ours without handoff.
    NoHandOff,
    /// Ours without learning: every hint is followed.
    HandOff,
    /// Ours.
    Slipstream,
}

impl SchedulerKind {
    /// All, in the order of tables.
    pub const ALL: [SchedulerKind; 4] = [
        SchedulerKind::Eevdf,
        SchedulerKind::NoHandOff,
        SchedulerKind::HandOff,
        SchedulerKind::Slipstream,
    ];

    /// Name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            SchedulerKind::Eevdf => "eevdf",
            SchedulerKind::NoHandOff => "no-hand-off",
            SchedulerKind::HandOff => "hand-off",
            SchedulerKind::Slipstream => "slipstream",
        }
    }

    /// Builds the scheduler. `params` apply to ours; EEVDF has its own.
    pub fn build(self, machine: Machine, params: policy::Params) -> Box<dyn Scheduler> {
        match self {
            SchedulerKind::Eevdf => Box::new(eevdf::Eevdf::new(machine)),
            SchedulerKind::NoHandOff => ours(machine, params, 0, 0),
            SchedulerKind::HandOff => ours(machine, params, 1, 0),
            SchedulerKind::Slipstream => ours(machine, params, 1, 1),
        }
    }
}

fn ours(machine: Machine, base: policy::Params, hand_off: u32, learn: u32) -> Box<dyn Scheduler> {
    let mut params = base;
    params.hand_off = hand_off;
    params.learn = learn;
    Box::new(slip::Slipstream::new(machine, params))
}

/// Makes virtual times comparable, which wrap.
pub(crate) fn unwrap_key(key: u64) -> i128 {
    // Simulated time never reaches 2^63 ns, so keys below zero are those just before the start.
    i128::from(key.cast_signed())
}
