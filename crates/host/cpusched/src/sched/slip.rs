//! Ours: the BPF program itself, on the simulated kernel of `kernel`.

use super::kernel::{self, GAP_NS, Host};
use super::{Action, Next, Scheduler, TaskId, TaskParams, Wakeup};
use crate::machine::Machine;
use crate::policy::{COUNTERS, Params};

/// Our scheduler on a simulated host. A process has at most one at a time.
#[derive(Debug)]
pub struct Slipstream(Host);

impl Slipstream {
    /// Our scheduler with these parameters; all CPUs idle.
    ///
    /// # Panics
    /// If this thread has another one that has not been dropped.
    pub fn new(machine: Machine, params: Params) -> Slipstream {
        Slipstream(Host::new(machine, params, GAP_NS))
    }
}

/// Whether this thread has one that has not been dropped.
pub fn is_in_use() -> bool {
    kernel::is_in_use()
}

impl Scheduler for Slipstream {
    fn add_task(&mut self, t: &TaskParams) {
        self.0.add_task(t);
    }

    fn wake(&mut self, w: &Wakeup) {
        self.0.wake(w);
    }

    fn next(&mut self, cpu: u32, prev: Option<TaskId>, now: u64, _rnd: u64) -> Next {
        self.0.next(cpu, prev, now)
    }

    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) {
        self.0.on_run(task, cpu, now);
    }

    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, runnable: bool) {
        self.0.on_stop(task, cpu, now, runnable);
    }

    fn set_idle(&mut self, cpu: u32, now: u64, idle: bool, again: bool) {
        self.0.set_idle(cpu, now, idle, again);
    }

    fn tick(&mut self, cpu: u32, now: u64, _rnd: u64) -> bool {
        self.0.tick(cpu, now)
    }

    fn later(&mut self, token: u32, now: u64) {
        self.0.later(token, now);
    }

    fn set_real_time(&mut self, cpu: u32, now: u64, busy: bool, prev: Option<TaskId>) {
        self.0.set_real_time(cpu, now, busy, prev);
    }

    fn set_online(&mut self, cpu: u32, now: u64, online: bool, _prev: Option<TaskId>) {
        self.0.set_online(cpu, now, online);
    }

    fn take_actions(&mut self) -> Vec<Action> {
        self.0.take_actions()
    }

    fn gap_ns(&self) -> u64 {
        GAP_NS
    }

    fn error(&self) -> Option<String> {
        self.0.error()
    }

    fn counters(&self) -> [u64; COUNTERS.len()] {
        self.0.counters()
    }

    fn waiting(&self) -> usize {
        self.0.waiting()
    }
}
