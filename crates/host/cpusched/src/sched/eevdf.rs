//! A model of Linux's EEVDF with its wake-up placement and balancing.
//!
//! The model covers, from Linux 6.12 `kernel/sched/fair.c`: a queue per CPU ordered by virtual
//! deadline; `wake_affine_idle` with the sync hint; `select_idle_sibling` (target, previous CPU, the
//! one before it, idle core, idle CPU of the target's LLC, of which it looks at fewer the busier the LLC
//! is: SIS_UTIL). A running task keeps its CPU until its slice is used
//! (RUN_TO_PARITY), which the tick or a wake-up with an earlier deadline detects. A CPU without work
//! pulls from the longest queue of its LLC, then of all (`sched_balance_newidle`), but no task that ran
//! within the last 500 us (`task_hot`). A tick that finds a
//! task waiting wakes an idle CPU, which pulls (`nohz_balancer_kick`). Queues whose lengths differ by two
//! are balanced every `BALANCE_TICKS`. CPU masks bind every step. A cgroup's weight is distributed to
//! its runnable tasks by their weights (`calc_group_shares`), with one level of groups.
//!
//! [`Eevdf::with_lag`] places a task that wakes up by its lag (`place_entity`): one that had less than its share keeps
//! that while it sleeps, so that it preempts tasks which are past their slice.
//!
//! The omissions flatter it: balancing costs nothing, is never skipped and sees every queue of the host,
//! eligibility by lag is always granted. A CPU taken by a real-time task gives its queue away, and
//! has no deadline server.

use std::collections::BTreeSet;

use slipstream_base::width::{to_i64, to_u32, to_u64};

use super::{Action, Next, Scheduler, TaskId, TaskParams, Wakeup};
use crate::machine::{CpuMask, Machine};
use crate::policy;

/// `normalized_sysctl_sched_base_slice`; scaled by `1 + ilog2(min(cpus, 8))`, 2.8 ms from 8 CPUs on.
const BASE_SLICE_NS: u64 = 700_000;
/// `sysctl_sched_migration_cost`: a CPU that becomes idle leaves a task where it is that ran there so recently.
const MIGRATION_COST_NS: u64 = 500_000;
/// Interval of the samples of an LLC's use.
const SAMPLE_NS: u64 = 4_000_000;
/// Ticks between balancing attempts of a busy CPU. The kernel's interval grows with the
/// domain and the load; this is the interval for a few CPUs at 250 Hz.
const BALANCE_TICKS: u64 = 4;
/// `TICK_NSEC` at 250 Hz.
const TICK_NS: u64 = 4_000_000;

#[derive(Clone, Debug)]
struct Entity {
    vruntime: u64,
    deadline: u64,
    weight: u32,
    run_at: u64,
    /// When it last left a CPU; 0: never.
    stopped_at: u64,
    /// The CPU that it had used before its previous one.
    recent: u32,
    /// The CPU whose queue its virtual times refer to.
    cpu: u32,
    mask: CpuMask,
    cgroup: Option<u32>,
    runnable: bool,
    /// When it went to sleep: virtual time that it was due, less what it had.
    lag: i64,
    /// Whether it is placed by its lag when it is next queued.
    by_lag: bool,
}

#[derive(Clone, Debug, Default)]
struct RunQueue {
    tree: BTreeSet<(u64, u64, TaskId)>,
    min_vruntime: u64,
    running: Option<TaskId>,
    ticks: u64,
    is_offline: bool,
    /// A real-time task has the CPU.
    is_taken: bool,
    /// A tick elsewhere asked it to balance.
    is_asked: bool,
}

/// How busy an LLC is, and how many of its CPUs a wake-up looks at.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// CPU time of its tasks until they last left a CPU.
    ran_ns: u64,
    sampled_ns: u64,
    sampled_at: u64,
    /// Share of its CPUs in use, of 1,024, as a moving average.
    share: u64,
    /// `nr_idle_scan`.
    looks: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Group {
    weight: u32,
    /// Sum of the weights of its runnable tasks.
    runnable: u64,
}

/// The EEVDF model.
#[derive(Debug)]
pub struct Eevdf {
    machine: Machine,
    tasks: Vec<Entity>,
    groups: Vec<Group>,
    queues: Vec<RunQueue>,
    idle: Vec<u64>,
    uses: Vec<Use>,
    /// Number of waiting tasks per LLC, to choose the LLC to pull from.
    queued: Vec<usize>,
    seq: u64,
    slice_ns: u64,
    waiting: usize,
    actions: Vec<Action>,
    has_lag: bool,
}

impl Eevdf {
    /// A host with all CPUs idle, whose tasks keep their lag while they sleep.
    pub fn with_lag(machine: Machine) -> Eevdf {
        Eevdf {
            has_lag: true,
            ..Eevdf::new(machine)
        }
    }

    /// A host with all CPUs idle.
    pub fn new(machine: Machine) -> Eevdf {
        let all = if machine.cpus_per_llc == 64 {
            !0
        } else {
            (1 << machine.cpus_per_llc) - 1
        };
        Eevdf {
            machine,
            tasks: Vec::new(),
            groups: Vec::new(),
            queues: vec![RunQueue::default(); machine.cpus() as usize],
            idle: vec![all; machine.llcs as usize],
            uses: vec![
                Use {
                    looks: machine.cpus_per_llc,
                    ..Use::default()
                };
                machine.llcs as usize
            ],
            queued: vec![0; machine.llcs as usize],
            seq: 0,
            slice_ns: BASE_SLICE_NS * u64::from(1 + machine.cpus().min(8).ilog2()),
            waiting: 0,
            actions: Vec::new(),
            has_lag: false,
        }
    }

    /// `avg_vruntime`: the mean virtual time of the tasks of a CPU by their weights, and the sum of these. `None`
    /// without tasks.
    fn mean_vruntime(&self, cpu: u32, now: u64) -> Option<(u64, u64)> {
        let q = &self.queues[cpu as usize];
        let queued = q.tree.iter().map(|&(.., task)| {
            let t = &self.tasks[task as usize];
            (task, t.vruntime)
        });
        let running = q.running.map(|task| {
            let t = &self.tasks[task as usize];
            let ran = self.virtual_ns(task, now.saturating_sub(t.run_at));
            (task, t.vruntime + ran)
        });
        let (mut sum, mut weights) = (0u128, 0u128);
        for (task, vruntime) in queued.chain(running) {
            let weight = u128::from(self.load(task));
            sum += weight * u128::from(vruntime);
            weights += weight;
        }
        let mean = sum.checked_div(weights)?;
        Some((to_u64(mean), to_u64(weights)))
    }

    /// `update_entity_lag` of a task that goes to sleep now, on its CPU.
    fn keep_lag(&mut self, task: TaskId, cpu: u32, now: u64) {
        let Some((mean, _)) = self.mean_vruntime(cpu, now) else {
            return;
        };
        let most = to_i64(self.virtual_ns(task, (2 * self.slice_ns).max(TICK_NS)));
        let t = &mut self.tasks[task as usize];
        // One that had more than its share stays queued until it is due again (DELAY_DEQUEUE): that ends its debt.
        t.lag = mean.wrapping_sub(t.vruntime).cast_signed().clamp(0, most);
        t.by_lag = true;
    }

    /// `place_entity`: behind the mean by its lag, which is larger than it was because the mean moves back when the
    /// task joins.
    fn place_by_lag(&mut self, task: TaskId, cpu: u32, now: u64) {
        let slice = self.virtual_ns(task, self.slice_ns);
        let weight = i128::from(self.load(task));
        let mean = self.mean_vruntime(cpu, now);
        let t = &mut self.tasks[task as usize];
        t.by_lag = false;
        t.cpu = cpu;
        t.vruntime = match mean {
            Some((mean, weights)) => {
                let weights = i128::from(weights);
                let lag = i128::from(t.lag) * (weights + weight) / weights;
                to_u64((i128::from(mean) - lag).max(0))
            }
            None => self.queues[cpu as usize].min_vruntime,
        };
        t.deadline = t.vruntime + slice;
    }

    /// The task's weight among all tasks, in units in which nice 0 in the root has 100,000.
    fn load(&self, task: TaskId) -> u64 {
        let t = &self.tasks[task as usize];
        let own = u64::from(t.weight) * 1_000;
        match t.cgroup {
            None => own,
            Some(g) => {
                let g = self.groups[g as usize];
                (own * u64::from(g.weight) / g.runnable.max(u64::from(t.weight))).max(1)
            }
        }
    }

    fn virtual_ns(&self, task: TaskId, ns: u64) -> u64 {
        to_u64(u128::from(ns) * 100_000 / u128::from(self.load(task)))
    }

    fn bits(&self, llc: u32, mask: &CpuMask) -> u64 {
        if mask.is_all() {
            return self.idle[llc as usize];
        }
        let first = llc * self.machine.cpus_per_llc;
        let own = (0..self.machine.cpus_per_llc).filter(|&b| mask.has(first + b));
        own.fold(0, |bits, b| bits | 1 << b) & self.idle[llc as usize]
    }

    fn is_idle(&self, cpu: u32) -> bool {
        let llc = self.machine.llc_of(cpu);
        self.idle[llc as usize] >> (cpu % self.machine.cpus_per_llc) & 1 == 1
    }

    fn set_bit(&mut self, cpu: u32, idle: bool) {
        let llc = self.machine.llc_of(cpu) as usize;
        let bit = 1 << (cpu % self.machine.cpus_per_llc);
        if idle {
            self.idle[llc] |= bit;
        } else {
            self.idle[llc] &= !bit;
        }
    }

    /// `select_idle_sibling`: an idle CPU near `target` that the task may use, or `target`.
    fn idle_sibling(&self, task: TaskId, prev: u32, target: u32) -> u32 {
        let t = &self.tasks[task as usize];
        let llc = self.machine.llc_of(target);
        if self.is_idle(target) {
            return target;
        }
        for near in [prev, t.recent] {
            if self.machine.llc_of(near) == llc && self.is_idle(near) && t.mask.has(near) {
                return near;
            }
        }
        let idle = self.bits(llc, &t.mask);
        let first = llc * self.machine.cpus_per_llc;
        if self.machine.threads_per_core == 2 {
            let cores = idle & (idle >> 1) & 0x5555_5555_5555_5555;
            if cores != 0 {
                return first + cores.trailing_zeros();
            }
        }
        // From the target's neighbor on, as many CPUs as pay off.
        let n = self.machine.cpus_per_llc;
        let bit = target - first;
        let mut order = (1..=n).map(|i| (bit + i) % n);
        let mut near = order.by_ref().take(self.uses[llc as usize].looks as usize);
        near.find(|b| idle >> b & 1 == 1)
            .map_or(target, |b| first + b)
    }

    /// `update_idle_cpu_scan` (SIS_UTIL): the busier an LLC is, the fewer of its CPUs a wake-up looks at.
    fn sample(&mut self, llc: u32, now: u64) {
        const FULL: u64 = 1_024;
        const IMBALANCE_PCT: u64 = 117;
        let n = u64::from(self.machine.cpus_per_llc);
        let first = llc * self.machine.cpus_per_llc;
        let runs = (first..first + self.machine.cpus_per_llc).filter_map(|c| {
            let task = self.queues[c as usize].running?;
            Some(now - self.tasks[task as usize].run_at.min(now))
        });
        let running: u64 = runs.sum();
        let u = &mut self.uses[llc as usize];
        let span = now - u.sampled_at;
        if span < SAMPLE_NS {
            return;
        }
        let ran = (u.ran_ns + running).saturating_sub(u.sampled_ns);
        // Half of it is forgotten after 32 ms, as in PELT.
        u.share = (u.share * 11 + (ran * FULL / (span * n)).min(FULL)) / 12;
        (u.sampled_ns, u.sampled_at) = (u.ran_ns + running, now);
        let used = u.share * u.share * IMBALANCE_PCT * IMBALANCE_PCT / (10_000 * FULL);
        u.looks = to_u32((FULL - used.min(FULL)) * n / FULL);
    }

    /// A CPU that the task may use: `cpu`, or the one with the fewest tasks. A CPU taken by a real-time
    /// task only if there is no other.
    fn usable(&self, mask: &CpuMask, cpu: u32) -> u32 {
        let queue = |c: u32| &self.queues[c as usize];
        if mask.has(cpu) && !queue(cpu).is_offline && !queue(cpu).is_taken {
            return cpu;
        }
        let order = |c: &u32| {
            let q = queue(*c);
            let length = q.tree.len() + usize::from(q.running.is_some());
            (q.is_taken, length, *c)
        };
        let of = |mask: &CpuMask| {
            let online = mask.iter(self.machine.cpus());
            online.filter(|&c| !queue(c).is_offline).min_by_key(order)
        };
        // A mask without an online CPU is widened, as in the kernel.
        of(mask).or_else(|| of(&CpuMask::ALL)).unwrap_or(cpu)
    }

    fn set_runnable(&mut self, task: TaskId, runnable: bool) {
        let t = &mut self.tasks[task as usize];
        if t.runnable == runnable {
            return;
        }
        t.runnable = runnable;
        if let Some(g) = t.cgroup {
            let g = &mut self.groups[g as usize];
            let weight = u64::from(t.weight);
            g.runnable = if runnable {
                g.runnable + weight
            } else {
                g.runnable - weight
            };
        }
    }

    /// Whether a running task is past its deadline.
    fn is_over(&self, task: TaskId, now: u64) -> bool {
        let t = &self.tasks[task as usize];
        let ran = self.virtual_ns(task, now.saturating_sub(t.run_at));
        t.vruntime + ran >= t.deadline
    }

    /// Queues a task that sleeps no more.
    fn enqueue_woken(&mut self, task: TaskId, cpu: u32, now: u64) {
        if self.has_lag && self.tasks[task as usize].by_lag {
            self.place_by_lag(task, cpu, now);
            self.insert(task, cpu);
        } else {
            self.enqueue(task, cpu);
        }
    }

    /// Queues a task whose slice has ended on this CPU.
    fn enqueue_again(&mut self, task: TaskId, cpu: u32) {
        if !self.has_lag {
            return self.enqueue(task, cpu);
        }
        let slice = self.virtual_ns(task, self.slice_ns);
        let t = &mut self.tasks[task as usize];
        if t.vruntime >= t.deadline {
            t.deadline = t.vruntime + slice;
        }
        self.insert(task, cpu);
    }

    fn enqueue(&mut self, task: TaskId, cpu: u32) {
        let slice = self.virtual_ns(task, self.slice_ns);
        let q = &mut self.queues[cpu as usize];
        let t = &mut self.tasks[task as usize];
        if t.cpu != cpu {
            // Its times refer to another queue's clock: shift them to this one's.
            t.cpu = cpu;
            t.vruntime = q.min_vruntime;
            t.deadline = t.vruntime;
        }
        // Placed with no lag. The deadline is one slice away, unless the old one is still ahead.
        let was = t.vruntime;
        t.vruntime = was.max(q.min_vruntime);
        t.deadline += t.vruntime - was;
        if t.vruntime >= t.deadline {
            t.deadline = t.vruntime + slice;
        }
        self.insert(task, cpu);
    }

    fn insert(&mut self, task: TaskId, cpu: u32) {
        self.seq += 1;
        let deadline = self.tasks[task as usize].deadline;
        let q = &mut self.queues[cpu as usize];
        q.tree.insert((deadline, self.seq, task));
        self.queued[self.machine.llc_of(cpu) as usize] += 1;
        self.waiting += 1;
    }

    /// Takes the first task of `from`'s queue that may run on `cpu`, and left its own CPU before `since`.
    fn pop(&mut self, from: u32, cpu: u32, since: u64) -> Option<TaskId> {
        let q = &mut self.queues[from as usize];
        let may = |e: &&(u64, u64, TaskId)| {
            let t = &self.tasks[e.2 as usize];
            t.mask.has(cpu) && t.stopped_at <= since
        };
        let found = if from == cpu {
            *q.tree.first()?
        } else {
            *q.tree.iter().find(may)?
        };
        q.tree.remove(&found);
        self.queued[self.machine.llc_of(from) as usize] -= 1;
        self.waiting -= 1;
        Some(found.2)
    }

    /// Takes a task for `cpu` from the longest queue of an LLC that is longer than `least`.
    fn pull(&mut self, llc: u32, cpu: u32, least: usize, since: u64) -> Option<TaskId> {
        if self.queued[llc as usize] == 0 {
            return None;
        }
        let first = llc * self.machine.cpus_per_llc;
        let mut busiest: Vec<(usize, u32)> = (first..first + self.machine.cpus_per_llc)
            // A task sent to a CPU that is leaving idle stays there.
            .filter(|&c| c != cpu && self.queues[c as usize].running.is_some())
            .map(|c| (self.queues[c as usize].tree.len(), c))
            .filter(|&(length, _)| length > least)
            .collect();
        busiest.sort_by_key(|&(length, c)| (std::cmp::Reverse(length), c));
        let task = busiest
            .into_iter()
            .find_map(|(_, from)| self.pop(from, cpu, since))?;
        let slice = self.virtual_ns(task, self.slice_ns);
        let t = &mut self.tasks[task as usize];
        t.cpu = cpu;
        t.vruntime = self.queues[cpu as usize].min_vruntime;
        t.deadline = t.vruntime + slice;
        Some(task)
    }

    /// Empties the queue of a CPU that cannot run its tasks, as far as other CPUs can.
    fn scatter(&mut self, cpu: u32) {
        let q = &mut self.queues[cpu as usize];
        let all: Vec<TaskId> = std::mem::take(&mut q.tree).iter().map(|e| e.2).collect();
        self.queued[self.machine.llc_of(cpu) as usize] -= all.len();
        self.waiting -= all.len();
        for task in all {
            self.place(task, cpu);
        }
    }

    /// Queues a task near `target`, and wakes the CPU if it idles.
    fn place(&mut self, task: TaskId, target: u32) {
        let mask = self.tasks[task as usize].mask.clone();
        let target = self.usable(&mask, target);
        let cpu = self.idle_sibling(task, target, target);
        self.enqueue(task, cpu);
        if self.is_idle(cpu) {
            self.set_bit(cpu, false);
            self.actions.push(Action::Resched(cpu));
        }
    }
}

impl Scheduler for Eevdf {
    fn add_task(&mut self, t: &TaskParams) {
        if let Some((id, weight)) = t.cgroup {
            let id = id as usize;
            if self.groups.len() <= id {
                self.groups.resize(id + 1, Group::default());
            }
            self.groups[id].weight = weight;
        }
        self.tasks.push(Entity {
            vruntime: 0,
            deadline: 0,
            weight: t.weight,
            run_at: 0,
            stopped_at: 0,
            recent: t.home,
            cpu: t.home,
            mask: t.mask.clone(),
            cgroup: t.cgroup.map(|g| g.0),
            runnable: false,
            lag: 0,
            by_lag: false,
        });
    }

    fn wake(&mut self, w: &Wakeup) {
        self.set_runnable(w.wakee, true);
        let mask = self.tasks[w.wakee as usize].mask.clone();
        // wake_affine_idle: the waker's CPU if it will be free at once, else the previous one.
        let q = &self.queues[w.waker_cpu as usize];
        let alone = q.tree.is_empty() && w.waker.is_some();
        let target = if w.sync && alone && mask.has(w.waker_cpu) && !q.is_taken && !q.is_offline {
            w.waker_cpu
        } else {
            self.usable(&mask, w.prev_cpu)
        };
        let cpu = self.idle_sibling(w.wakee, w.prev_cpu, target);
        self.tasks[w.wakee as usize].recent = w.prev_cpu;
        self.enqueue_woken(w.wakee, cpu, w.now);
        if self.is_idle(cpu) {
            self.set_bit(cpu, false);
            self.actions.push(Action::Resched(cpu));
            return;
        }
        // check_preempt_wakeup_fair: a task beyond its slice is no longer protected.
        let q = &self.queues[cpu as usize];
        let is_first = q.tree.first().is_some_and(|e| e.2 == w.wakee);
        let is_over = |t: TaskId| self.is_over(t, w.now);
        if is_first && q.running.is_some_and(is_over) {
            self.actions.push(Action::Preempt(cpu));
        }
    }

    fn next(&mut self, cpu: u32, prev: Option<TaskId>, now: u64, _rnd: u64) -> Next {
        let q = &mut self.queues[cpu as usize];
        q.running = None;
        // task_hot: the idle balancing that a tick asked for gives up on caches after a failure.
        let is_asked = std::mem::take(&mut q.is_asked);
        let since = if is_asked {
            now
        } else {
            now.saturating_sub(MIGRATION_COST_NS)
        };
        if let Some(prev) = prev {
            self.enqueue_again(prev, cpu);
        }
        if let Some(task) = self.pop(cpu, cpu, now) {
            return Next::Run(task);
        }
        let own = self.machine.llc_of(cpu);
        let mut others: Vec<u32> = (0..self.machine.llcs).filter(|&l| l != own).collect();
        others.sort_by_key(|&l| std::cmp::Reverse(self.queued[l as usize]));
        let found = std::iter::once(own)
            .chain(others)
            .find_map(|llc| self.pull(llc, cpu, 0, since));
        found.map_or(Next::Idle, Next::Run)
    }

    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) {
        let q = &mut self.queues[cpu as usize];
        q.running = Some(task);
        let t = &mut self.tasks[task as usize];
        t.run_at = now;
        q.min_vruntime = q.min_vruntime.max(t.vruntime);
    }

    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, runnable: bool) {
        let ran = now - self.tasks[task as usize].run_at;
        let virtual_ns = self.virtual_ns(task, ran);
        let t = &mut self.tasks[task as usize];
        t.vruntime += virtual_ns;
        t.stopped_at = now;
        t.run_at = now;
        if self.has_lag && !runnable {
            self.keep_lag(task, cpu, now);
        }
        self.uses[self.machine.llc_of(cpu) as usize].ran_ns += ran;
        self.set_runnable(task, runnable);
        if !runnable {
            self.queues[cpu as usize].running = None;
        }
    }

    fn set_idle(&mut self, cpu: u32, _now: u64, idle: bool, _again: bool) {
        self.set_bit(cpu, idle);
        if idle {
            self.queues[cpu as usize].running = None;
        }
    }

    fn tick(&mut self, cpu: u32, now: u64, _rnd: u64) -> bool {
        let own = self.machine.llc_of(cpu);
        self.sample(own, now);
        let q = &mut self.queues[cpu as usize];
        let Some(task) = q.running else {
            return false;
        };
        q.ticks += 1;
        let (ticks, length) = (q.ticks, q.tree.len());
        if ticks.is_multiple_of(BALANCE_TICKS) {
            // A queue longer by two would be balanced.
            let found = self.pull(own, cpu, length + 1, now);
            if let Some(task) = found {
                self.enqueue(task, cpu);
            }
        }
        let q = &self.queues[cpu as usize];
        let waits = !q.tree.is_empty();
        let used_up = waits && self.is_over(task, now);
        // nohz_balancer_kick: a task waits here and a CPU of its mask idles, own LLC first.
        let masks: Vec<CpuMask> = q
            .tree
            .iter()
            .map(|e| self.tasks[e.2 as usize].mask.clone())
            .collect();
        let llcs = (0..self.machine.llcs).map(|i| (own + i) % self.machine.llcs);
        let idle = llcs.filter(|&l| self.idle[l as usize] != 0).find_map(|l| {
            let bits = masks
                .iter()
                .map(|m| self.bits(l, m))
                .find(|&bits| bits != 0)?;
            Some(l * self.machine.cpus_per_llc + bits.trailing_zeros())
        });
        if let Some(idle) = idle {
            self.set_bit(idle, false);
            self.queues[idle as usize].is_asked = true;
            self.actions.push(Action::Resched(idle));
        }
        used_up
    }

    fn set_real_time(&mut self, cpu: u32, _now: u64, busy: bool, prev: Option<TaskId>) {
        let q = &mut self.queues[cpu as usize];
        (q.is_taken, q.running) = (busy, None);
        self.set_bit(cpu, false);
        if busy {
            self.scatter(cpu);
        }
        if let Some(prev) = prev {
            self.place(prev, cpu);
        }
    }

    fn set_online(&mut self, cpu: u32, _now: u64, online: bool, prev: Option<TaskId>) {
        let q = &mut self.queues[cpu as usize];
        (q.is_offline, q.running) = (!online, None);
        self.set_bit(cpu, false);
        if online {
            self.actions.push(Action::Resched(cpu));
        } else {
            self.scatter(cpu);
        }
        if let Some(prev) = prev {
            self.place(prev, cpu);
        }
    }

    fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    fn counters(&self) -> [u64; policy::COUNTERS.len()] {
        [0; policy::COUNTERS.len()]
    }

    fn waiting(&self) -> usize {
        self.waiting
    }
}
