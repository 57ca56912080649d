//! Ours: the policy header with queues around it, as the BPF program has.

use std::collections::{BTreeSet, VecDeque};

use super::{Placed, Scheduler, TaskId, Wakeup, unwrap_key};
use crate::machine::Machine;
use crate::policy::{self, Core, Heads, Source, Wake};

type Queue = BTreeSet<(i128, u64, TaskId)>;

/// Our scheduler on a simulated host.
#[derive(Debug)]
pub struct Slipstream {
    core: Core,
    pinned: Vec<Option<u32>>,
    /// Tasks that were sent to a CPU which was idle: nobody else takes them.
    local: Vec<VecDeque<TaskId>>,
    /// The task handed over to each CPU.
    handover: Vec<Option<TaskId>>,
    /// Tasks bound to one CPU.
    bound: Vec<Queue>,
    llc: Vec<Queue>,
    /// The task whose slice just ended on each CPU.
    ended: Vec<Option<TaskId>>,
    /// The task that each CPU runs, and since when.
    running: Vec<Option<(TaskId, u64)>>,
    /// CPU time of each task up to its last stop, and its last CPU: what a kernel counts itself.
    exec: Vec<(u64, u32)>,
    counters: [u64; policy::COUNTERS.len()],
    seq: u64,
    waiting: usize,
}

const HANDOFF: u32 = 0;
const PREV_IDLE: u32 = 1;
const MASK_IDLE: u32 = 5;
const PREEMPT: u32 = 6;
const QUEUE_CPU: u32 = 8;
const RAN_NEXT: usize = 9;
const STOLEN: usize = 10;
const HINT_LIED: usize = 11;
const HINT_REFUSED: usize = 12;
const TICK_KICK: usize = 13;
const FAR_PULL: usize = 14;
const KEPT: usize = 15;
const TRUSTED: usize = 16;
const MADE_ROOM: usize = 17;

impl Slipstream {
    /// Our scheduler with these parameters; all CPUs idle.
    pub fn new(machine: Machine, params: policy::Params) -> Slipstream {
        let n = machine.cpus() as usize;
        let mut core = Core::new(
            params,
            machine.llcs,
            machine.cpus_per_llc,
            machine.threads_per_core,
        );
        for cpu in 0..machine.cpus() {
            core.set_idle(cpu, true);
        }
        Slipstream {
            core,
            pinned: Vec::new(),
            local: vec![VecDeque::new(); n],
            handover: vec![None; n],
            bound: vec![Queue::new(); n],
            llc: vec![Queue::new(); machine.llcs as usize],
            ended: vec![None; n],
            running: vec![None; n],
            exec: Vec::new(),
            counters: [0; policy::COUNTERS.len()],
            seq: 0,
            waiting: 0,
        }
    }

    fn llc_of(&self, cpu: u32) -> u32 {
        self.core.cpus[cpu as usize].llc
    }

    /// Tells the policy what a task did since it last woke or was queued.
    fn account(&mut self, task: TaskId, blocked: bool) {
        let (exec_ns, cpu) = self.exec[task as usize];
        let lied = self.core.account(task as usize, cpu, exec_ns, blocked);
        self.counters[HINT_LIED] += lied as u64;
    }

    fn enqueue_llc(&mut self, task: TaskId, llc: u32, now: u64) {
        let key = self.core.on_runnable(task as usize, llc, now);
        self.seq += 1;
        self.llc[llc as usize].insert((unwrap_key(key), self.seq, task));
        self.core
            .set_queued(llc, self.llc[llc as usize].len() as u32);
    }

    fn enqueue_bound(&mut self, task: TaskId, cpu: u32, now: u64) {
        let key = self.core.on_runnable(task as usize, self.llc_of(cpu), now);
        self.seq += 1;
        self.bound[cpu as usize].insert((unwrap_key(key), self.seq, task));
    }

    fn take_handover(&mut self, cpu: u32) -> Option<TaskId> {
        let task = self.handover[cpu as usize].take()?;
        self.core.handover_taken(cpu);
        Some(task)
    }

    fn pop_llc(&mut self, llc: u32) -> Option<TaskId> {
        let (_, _, task) = self.llc[llc as usize].pop_first()?;
        self.core
            .set_queued(llc, self.llc[llc as usize].len() as u32);
        Some(task)
    }

    /// The first of the first eight tasks of an LLC's queue that may leave it.
    fn pull(&mut self, llc: u32, now: u64) -> Option<TaskId> {
        let q = &self.llc[llc as usize];
        let found = q
            .iter()
            .take(8)
            .find(|e| self.core.may_leave(e.2 as usize, false, now))
            .copied()?;
        self.llc[llc as usize].remove(&found);
        self.core
            .set_queued(llc, self.llc[llc as usize].len() as u32);
        Some(found.2)
    }

    fn find(&mut self, cpu: u32, now: u64, rnd: u64) -> Option<TaskId> {
        if let Some(task) = self.local[cpu as usize].pop_front() {
            return Some(task);
        }
        let llc = self.llc_of(cpu);
        let key = |q: &Queue| q.first().map_or(0, |e| e.0 as u64);
        let (own, shared) = (&self.bound[cpu as usize], &self.llc[llc as usize]);
        let heads = Heads {
            cpu_key: key(own),
            llc_key: key(shared),
            has_handover: self.handover[cpu as usize].is_some() as u32,
            has_cpu: !own.is_empty() as u32,
            has_llc: !shared.is_empty() as u32,
            ..Heads::default()
        };
        match policy::choose(&heads) {
            Source::Handover => {
                self.counters[RAN_NEXT] += 1;
                return self.take_handover(cpu);
            }
            Source::Cpu => return self.bound[cpu as usize].pop_first().map(|e| e.2),
            Source::Llc => return self.pop_llc(llc),
            // A task whose slice ended is in a queue here.
            Source::None | Source::Prev => {}
        }
        let mut mask = self.core.llcs[llc as usize].handover_mask;
        let bit = self.core.cpus[cpu as usize].bit;
        for _ in 0..policy::STEAL_TRIES {
            let victim_bit = policy::next_handover(mask, bit);
            if victim_bit >= 64 {
                break;
            }
            mask &= !(1 << victim_bit);
            let victim = cpu - bit + victim_bit;
            let free =
                self.handover[victim as usize].is_some_and(|t| self.pinned[t as usize].is_none());
            if free && self.core.may_steal(victim, now) {
                self.counters[STOLEN] += 1;
                return self.take_handover(victim);
            }
        }
        let far = self.core.pull_from(llc, rnd)?;
        let task = self.pull(far, now)?;
        self.counters[FAR_PULL] += 1;
        Some(task)
    }
}

impl Scheduler for Slipstream {
    fn add_task(&mut self, weight: u32, home: u32, pinned: Option<u32>) {
        let task = self.core.add_task(weight, home);
        if let Some(cpu) = pinned {
            self.core.set_domain(task, policy::DOMAINS + cpu);
        }
        self.pinned.push(pinned);
        self.exec.push((0, home));
    }

    fn wake(&mut self, w: &Wakeup) -> Placed {
        let task = w.wakee as usize;
        self.account(w.wakee, true);
        let pinned = self.pinned[task];
        let ok = |cpu: u32| pinned.is_none_or(|p| p == cpu);
        let mut flags = 0;
        if w.sync {
            flags |= policy::WAKE_SYNC;
        }
        if ok(w.waker_cpu) {
            flags |= policy::WAKE_WAKER_OK;
        }
        let prev_cpu = pinned.unwrap_or(w.prev_cpu);
        flags |= policy::WAKE_PREV_OK;
        if pinned.is_some() {
            flags |= policy::WAKE_MASKED | policy::WAKE_SINGLE;
        }
        let waker_cpu = w.waker_cpu as usize;
        let waker_queued = self.local[waker_cpu].len()
            + self.bound[waker_cpu].len()
            + self.handover[waker_cpu].is_some() as usize;
        let wake = Wake {
            now: w.now,
            rnd: w.rnd,
            waker_cpu: w.waker_cpu,
            prev_cpu,
            waker_queued: waker_queued as u32,
            flags,
            ..Wake::default()
        };
        if let (Some(waker), true) = (w.waker, w.sync) {
            let since = match self.running[waker_cpu] {
                Some((task, since)) if task == waker => w.now.saturating_sub(since),
                _ => 0,
            };
            let exec_ns = self.exec[waker as usize].0 + since;
            self.core.on_sync_wake(waker as usize, exec_ns);
        }
        self.core.tasks[task].queued_at = w.now;
        let p = self
            .core
            .place(task, w.waker.map(|t| t as usize), wake, pinned);
        self.counters[p.path as usize] += 1;
        self.counters[HINT_REFUSED] += p.refused as u64;
        self.waiting += 1;
        match p.path {
            HANDOFF => {
                let waker = w.waker.expect("the policy hands over only from a task");
                self.core.on_runnable(task, p.llc, w.now);
                if self.core.handover_put(p.cpu, waker as usize, w.now) {
                    self.counters[TRUSTED] += 1;
                    self.local[p.cpu as usize].push_back(w.wakee);
                } else {
                    self.handover[p.cpu as usize] = Some(w.wakee);
                }
                Placed::Queued
            }
            PREV_IDLE..=MASK_IDLE => {
                self.core.on_runnable(task, p.llc, w.now);
                self.local[p.cpu as usize].push_back(w.wakee);
                Placed::Kick(p.cpu)
            }
            QUEUE_CPU => {
                self.enqueue_bound(w.wakee, p.cpu, w.now);
                Placed::Queued
            }
            path => {
                self.enqueue_llc(w.wakee, p.llc, w.now);
                if path == PREEMPT {
                    Placed::Preempt(p.cpu)
                } else {
                    Placed::Queued
                }
            }
        }
    }

    fn requeue(&mut self, task: TaskId, cpu: u32, now: u64) {
        self.waiting += 1;
        self.ended[cpu as usize] = Some(task);
        self.account(task, false);
        match self.pinned[task as usize] {
            Some(cpu) => self.enqueue_bound(task, cpu, now),
            None => self.enqueue_llc(task, self.llc_of(cpu), now),
        }
    }

    fn next(&mut self, cpu: u32, now: u64, rnd: u64) -> Option<TaskId> {
        let ended = self.ended[cpu as usize].take();
        let task = self.find(cpu, now, rnd)?;
        self.counters[KEPT] += (ended == Some(task)) as u64;
        self.waiting -= 1;
        Some(task)
    }

    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) -> u64 {
        self.running[cpu as usize] = Some((task, now));
        self.exec[task as usize].1 = cpu;
        self.core.slice(task as usize, self.llc_of(cpu))
    }

    fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, _runnable: bool) {
        if let Some((_, since)) = self.running[cpu as usize].take() {
            self.exec[task as usize].0 += now.saturating_sub(since);
        }
    }

    fn set_idle(&mut self, cpu: u32, idle: bool) {
        self.core.set_idle(cpu, idle);
    }

    fn tick(&mut self, cpu: u32, now: u64, rnd: u64) -> (Option<u32>, bool) {
        let running = self.running[cpu as usize].map(|(task, _)| task as usize);
        let level = running.map_or(0, |task| self.core.tasks[task].level);
        self.core.cpus[cpu as usize].level = level;
        let room = !self.local[cpu as usize].is_empty()
            && running.is_some_and(|task| self.core.wants_room(task, cpu, now));
        self.counters[MADE_ROOM] += room as u64;
        let mut idle = self.core.tick(cpu, now, rnd);
        if room && idle.is_none() {
            // Somebody has to take the waker that made room.
            idle = self.core.claim_thread(self.llc_of(cpu));
        }
        self.counters[TICK_KICK] += idle.is_some() as u64;
        (idle, room)
    }

    fn counters(&self) -> [u64; policy::COUNTERS.len()] {
        self.counters
    }

    fn waiting(&self) -> usize {
        self.waiting
    }
}
