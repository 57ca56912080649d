//! The schedulers that the simulator compares.
//!
//! - [`slip`]: ours, the policy header itself, with and without hand-over and learning.
//! - [`eevdf`]: a model of Linux's own scheduler.
//! - [`p2dq`]: a scheduler in the manner of scx_p2dq, without hand-over.

pub mod eevdf;
pub mod p2dq;
pub mod slip;

use serde::Deserialize;

use crate::machine::Machine;
use crate::policy;

/// A task of the simulation; dense from 0.
pub type TaskId = u32;

/// A wake-up.
#[derive(Clone, Copy, Debug)]
pub struct Wakeup {
    /// Now, ns.
    pub now: u64,
    /// Who wakes.
    pub wakee: TaskId,
    /// The CPU it last ran on.
    pub prev_cpu: u32,
    /// Who makes the wake-up; `None` for a timer or a device.
    pub waker: Option<TaskId>,
    /// Where the wake-up is made.
    pub waker_cpu: u32,
    /// Whether it carries the sync hint.
    pub sync: bool,
    /// A random word.
    pub rnd: u64,
}

/// What a scheduler did with a wakee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// It waits on this CPU, which was idle and must be woken.
    Kick(u32),
    /// It waits in a queue.
    Queued,
    /// It waits in a queue, and this CPU's task should make room.
    Preempt(u32),
}

/// A scheduler: told what happens, asked what to run. No clock, no I/O.
pub trait Scheduler {
    /// A task is born; called in order of ids.
    fn add_task(&mut self, weight: u32, home: u32, pinned: Option<u32>);
    /// A task wakes up.
    fn wake(&mut self, w: &Wakeup) -> Placed;
    /// A task's slice ended on `cpu`; it is runnable.
    fn requeue(&mut self, task: TaskId, cpu: u32, now: u64);
    /// A CPU needs work. Takes the task out of its queue.
    fn next(&mut self, cpu: u32, now: u64, rnd: u64) -> Option<TaskId>;
    /// A task got a CPU; returns its slice, ns.
    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) -> u64;
    /// It left the CPU.
    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, runnable: bool);
    /// A CPU became idle or busy.
    fn set_idle(&mut self, cpu: u32, idle: bool);
    /// A busy CPU's tick: an idle CPU to wake for work that waits, and whether the running task
    /// should make room.
    fn tick(&mut self, cpu: u32, now: u64, rnd: u64) -> (Option<u32>, bool);
    /// Counters in the order of [`policy::COUNTERS`].
    fn counters(&self) -> [u64; policy::COUNTERS.len()];
    /// Tasks that wait in queues.
    fn waiting(&self) -> usize;
}

/// A scheduler by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The EEVDF model.
    Eevdf,
    /// In the manner of scx_p2dq.
    P2dq,
    /// Ours without hand-over.
    NoHandOff,
    /// Ours, every hint believed.
    HandOff,
    /// Ours.
    Slipstream,
}

impl Kind {
    /// All, in the order of tables.
    pub const ALL: [Kind; 5] = [
        Kind::Eevdf,
        Kind::P2dq,
        Kind::NoHandOff,
        Kind::HandOff,
        Kind::Slipstream,
    ];

    /// Name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Eevdf => "eevdf",
            Kind::P2dq => "p2dq",
            Kind::NoHandOff => "no-hand-off",
            Kind::HandOff => "hand-off",
            Kind::Slipstream => "slipstream",
        }
    }

    /// Builds it. `params` are ours; the others have their own.
    pub fn build(self, machine: Machine, params: policy::Params) -> Box<dyn Scheduler> {
        match self {
            Kind::Eevdf => Box::new(eevdf::Eevdf::new(machine)),
            Kind::P2dq => Box::new(p2dq::P2dq::new(machine)),
            Kind::NoHandOff => ours(machine, params, 0, 0),
            Kind::HandOff => ours(machine, params, 1, 0),
            Kind::Slipstream => ours(machine, params, 1, 1),
        }
    }
}

fn ours(machine: Machine, base: policy::Params, hand_off: u32, learn: u32) -> Box<dyn Scheduler> {
    let mut params = base;
    params.hand_off = hand_off;
    params.learn = learn;
    Box::new(slip::Slipstream::new(machine, params))
}

/// Orders virtual times, which wrap: their difference decides.
pub(crate) fn unwrap_key(key: u64) -> i128 {
    // Simulated time never reaches 2^63 ns, so keys below zero are those just before the start.
    i128::from(key as i64)
}
