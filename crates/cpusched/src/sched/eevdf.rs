//! A model of Linux's EEVDF with its wake-up placement and idle balancing.
//!
//! What is modelled, from Linux 6.12 `kernel/sched/fair.c`: a queue per CPU ordered by virtual
//! deadline; `wake_affine_idle` with the sync hint; `select_idle_sibling` (target, previous CPU,
//! idle core, idle CPU of the target's LLC); a running task keeps its CPU until its slice is used
//! (RUN_TO_PARITY) and is looked at when the tick comes; a CPU that runs out of work pulls from the
//! longest queue of its LLC, then of all (`sched_balance_newidle`); a tick that finds a task waiting
//! wakes an idle CPU to come and pull (`nohz_balancer_kick`).
//!
//! What is left out flatters it: no periodic balancing noise, balancing costs nothing and sees every
//! queue of the host, eligibility by lag is always granted.

use std::collections::BTreeSet;

use super::{Placed, Scheduler, TaskId, Wakeup};
use crate::machine::Machine;
use crate::policy;

/// `sysctl_sched_base_slice` (0.7 ms) scaled by `1 + ilog2(min(cpus, 8))`: 2.8 ms from 8 CPUs on.
const BASE_SLICE_NS: u64 = 2_800_000;

#[derive(Clone, Copy, Debug)]
struct Entity {
    vruntime: u64,
    deadline: u64,
    weight: u32,
    run_at: u64,
    pinned: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct RunQueue {
    tree: BTreeSet<(u64, u64, TaskId)>,
    min_vruntime: u64,
    running: Option<TaskId>,
}

/// The EEVDF model.
#[derive(Debug)]
pub struct Eevdf {
    machine: Machine,
    tasks: Vec<Entity>,
    queues: Vec<RunQueue>,
    idle: Vec<u64>,
    /// Tasks that wait, by LLC: which LLC to pull from.
    queued: Vec<usize>,
    seq: u64,
    waiting: usize,
}

impl Eevdf {
    /// All CPUs idle.
    pub fn new(machine: Machine) -> Eevdf {
        let all = if machine.cpus_per_llc == 64 {
            !0
        } else {
            (1 << machine.cpus_per_llc) - 1
        };
        Eevdf {
            machine,
            tasks: Vec::new(),
            queues: vec![RunQueue::default(); machine.cpus() as usize],
            idle: vec![all; machine.llcs as usize],
            queued: vec![0; machine.llcs as usize],
            seq: 0,
            waiting: 0,
        }
    }

    fn is_idle(&self, cpu: u32) -> bool {
        let llc = self.machine.llc_of(cpu);
        self.idle[llc as usize] >> (cpu % self.machine.cpus_per_llc) & 1 == 1
    }

    fn claim(&mut self, cpu: u32) {
        let llc = self.machine.llc_of(cpu);
        self.idle[llc as usize] &= !(1 << (cpu % self.machine.cpus_per_llc));
    }

    /// `select_idle_sibling`: an idle CPU near `target`, or `target`.
    fn idle_sibling(&self, prev: u32, target: u32) -> u32 {
        let llc = self.machine.llc_of(target);
        if self.is_idle(target) {
            return target;
        }
        if self.machine.llc_of(prev) == llc && self.is_idle(prev) {
            return prev;
        }
        let idle = self.idle[llc as usize];
        let first = llc * self.machine.cpus_per_llc;
        if self.machine.threads_per_core == 2 {
            let cores = idle & (idle >> 1) & 0x5555_5555_5555_5555;
            if cores != 0 {
                return first + cores.trailing_zeros();
            }
        }
        if idle != 0 {
            return first + idle.trailing_zeros();
        }
        target
    }

    fn enqueue(&mut self, task: TaskId, cpu: u32) {
        let q = &mut self.queues[cpu as usize];
        let t = &mut self.tasks[task as usize];
        // Placed with no lag, and a new deadline one slice away.
        t.vruntime = t.vruntime.max(q.min_vruntime);
        t.deadline = t.vruntime + BASE_SLICE_NS * 100 / t.weight as u64;
        self.seq += 1;
        q.tree.insert((t.deadline, self.seq, task));
        self.queued[self.machine.llc_of(cpu) as usize] += 1;
        self.waiting += 1;
    }

    fn pop(&mut self, cpu: u32, movable: bool) -> Option<TaskId> {
        let q = &mut self.queues[cpu as usize];
        let found = if movable {
            *q.tree
                .iter()
                .find(|e| self.tasks[e.2 as usize].pinned.is_none())?
        } else {
            *q.tree.first()?
        };
        q.tree.remove(&found);
        self.queued[self.machine.llc_of(cpu) as usize] -= 1;
        self.waiting -= 1;
        Some(found.2)
    }

    fn pull_within(&mut self, llc: u32) -> Option<TaskId> {
        if self.queued[llc as usize] == 0 {
            return None;
        }
        let first = llc * self.machine.cpus_per_llc;
        let busiest = (first..first + self.machine.cpus_per_llc)
            // A task sent to a CPU that is on its way out of idle is left there.
            .filter(|&c| self.queues[c as usize].running.is_some())
            .max_by_key(|&c| (self.queues[c as usize].tree.len(), std::cmp::Reverse(c)))?;
        self.pop(busiest, true)
    }
}

impl Scheduler for Eevdf {
    fn add_task(&mut self, weight: u32, _home: u32, pinned: Option<u32>) {
        self.tasks.push(Entity {
            vruntime: 0,
            deadline: 0,
            weight,
            run_at: 0,
            pinned,
        });
    }

    fn wake(&mut self, w: &Wakeup) -> Placed {
        let cpu = if let Some(cpu) = self.tasks[w.wakee as usize].pinned {
            cpu
        } else {
            // wake_affine_idle: the waker's CPU if it will be free at once, else the previous one.
            let q = &self.queues[w.waker_cpu as usize];
            let alone = q.tree.is_empty() && w.waker.is_some();
            let target = if w.sync && alone {
                w.waker_cpu
            } else {
                w.prev_cpu
            };
            self.idle_sibling(w.prev_cpu, target)
        };
        self.enqueue(w.wakee, cpu);
        if self.is_idle(cpu) {
            self.claim(cpu);
            return Placed::Kick(cpu);
        }
        Placed::Queued
    }

    fn requeue(&mut self, task: TaskId, cpu: u32, _now: u64) {
        self.enqueue(task, cpu);
    }

    fn next(&mut self, cpu: u32, _now: u64, _rnd: u64) -> Option<TaskId> {
        if let Some(task) = self.pop(cpu, false) {
            return Some(task);
        }
        let own = self.machine.llc_of(cpu);
        let task = self.pull_within(own).or_else(|| {
            let far = (0..self.machine.llcs).max_by_key(|&l| self.queued[l as usize])?;
            self.pull_within(far)
        })?;
        self.tasks[task as usize].vruntime = self.queues[cpu as usize].min_vruntime;
        Some(task)
    }

    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) -> u64 {
        let q = &mut self.queues[cpu as usize];
        q.running = Some(task);
        let t = &mut self.tasks[task as usize];
        t.run_at = now;
        q.min_vruntime = q.min_vruntime.max(t.vruntime);
        // The slice's end is noticed by the tick; see `tick`.
        u64::MAX / 2
    }

    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, _runnable: bool) {
        let t = &mut self.tasks[task as usize];
        t.vruntime += (now - t.run_at) * 100 / t.weight as u64;
        self.queues[cpu as usize].running = None;
    }

    fn set_idle(&mut self, cpu: u32, idle: bool) {
        if idle {
            let llc = self.machine.llc_of(cpu);
            self.idle[llc as usize] |= 1 << (cpu % self.machine.cpus_per_llc);
        } else {
            self.claim(cpu);
        }
    }

    fn tick(&mut self, cpu: u32, now: u64, _rnd: u64) -> (Option<u32>, bool) {
        let q = &self.queues[cpu as usize];
        let Some(task) = q.running else {
            return (None, false);
        };
        let t = &self.tasks[task as usize];
        let waits = !q.tree.is_empty();
        let used_up = waits && now.saturating_sub(t.run_at) >= BASE_SLICE_NS;
        // nohz_balancer_kick: two tasks here and an idle CPU anywhere, own LLC first.
        let own = self.machine.llc_of(cpu);
        let idle = waits
            .then(|| (0..self.machine.llcs).map(|i| (own + i) % self.machine.llcs))
            .and_then(|mut llcs| llcs.find(|&l| self.idle[l as usize] != 0))
            .map(|l| l * self.machine.cpus_per_llc + self.idle[l as usize].trailing_zeros());
        if let Some(idle) = idle {
            self.claim(idle);
        }
        (idle, used_up)
    }

    fn counters(&self) -> [u64; policy::COUNTERS.len()] {
        [0; policy::COUNTERS.len()]
    }

    fn waiting(&self) -> usize {
        self.waiting
    }
}
