//! A scheduler in the manner of scx_p2dq, written after its description: queues per LLC ordered by
//! virtual time, the previous CPU first, then an idle core or CPU of the LLC, pick-two between LLCs
//! when a CPU runs dry, three slice lengths by how much of the last one was used. Without the
//! hand-over that was proposed for it and not merged.

use std::collections::BTreeSet;

use super::{Placed, Scheduler, TaskId, Wakeup};
use crate::machine::Machine;
use crate::policy;

/// Slices of its three levels, ns.
const SLICES_NS: [u64; 3] = [500_000, 2_500_000, 5_000_000];
/// The other LLC must be this much busier, percent.
const SLACK_PCT: usize = 5;

#[derive(Clone, Copy, Debug)]
struct Entity {
    vtime: u64,
    weight: u32,
    run_at: u64,
    level: usize,
    llc: u32,
    runs: u32,
    pinned: Option<u32>,
}

type Queue = BTreeSet<(u64, u64, TaskId)>;

#[derive(Clone, Debug, Default)]
struct Llc {
    clock: u64,
    /// Tasks that stay, and tasks that may leave.
    stay: Queue,
    leave: Queue,
    idle: u64,
}

impl Llc {
    fn len(&self) -> usize {
        self.stay.len() + self.leave.len()
    }
}

/// The p2dq-like scheduler.
#[derive(Debug)]
pub struct P2dq {
    machine: Machine,
    tasks: Vec<Entity>,
    llcs: Vec<Llc>,
    local: Vec<Queue>,
    /// Runs on an LLC before a task may leave: log2 of the LLC count.
    residency: u32,
    seq: u64,
    waiting: usize,
}

impl P2dq {
    /// All CPUs idle.
    pub fn new(machine: Machine) -> P2dq {
        let all = if machine.cpus_per_llc == 64 {
            !0
        } else {
            (1 << machine.cpus_per_llc) - 1
        };
        P2dq {
            machine,
            tasks: Vec::new(),
            llcs: vec![
                Llc {
                    idle: all,
                    ..Llc::default()
                };
                machine.llcs as usize
            ],
            local: vec![Queue::new(); machine.cpus() as usize],
            residency: machine.llcs.ilog2(),
            seq: 0,
            waiting: 0,
        }
    }

    fn claim_in(&mut self, llc: u32) -> Option<u32> {
        let l = &mut self.llcs[llc as usize];
        let mut pick = l.idle;
        if self.machine.threads_per_core == 2 {
            let cores = l.idle & (l.idle >> 1) & 0x5555_5555_5555_5555;
            if cores != 0 {
                pick = cores;
            }
        }
        if pick == 0 {
            return None;
        }
        let bit = pick.trailing_zeros();
        l.idle &= !(1 << bit);
        Some(llc * self.machine.cpus_per_llc + bit)
    }

    fn enqueue(&mut self, task: TaskId, llc: u32, local: Option<u32>) {
        self.seq += 1;
        self.waiting += 1;
        let t = &mut self.tasks[task as usize];
        let l = &mut self.llcs[llc as usize];
        if t.llc != llc {
            t.vtime = l.clock;
        }
        t.vtime = t.vtime.max(l.clock.saturating_sub(SLICES_NS[2]));
        let entry = (t.vtime, self.seq, task);
        if let Some(cpu) = local.or(t.pinned) {
            self.local[cpu as usize].insert(entry);
        } else if t.runs >= self.residency && t.level > 0 {
            l.leave.insert(entry);
        } else {
            l.stay.insert(entry);
        }
    }
}

impl Scheduler for P2dq {
    fn add_task(&mut self, weight: u32, home: u32, pinned: Option<u32>) {
        let llc = self.machine.llc_of(home);
        self.tasks.push(Entity {
            vtime: 0,
            weight,
            run_at: 0,
            level: 1,
            llc,
            runs: 0,
            pinned,
        });
    }

    fn wake(&mut self, w: &Wakeup) -> Placed {
        let pinned = self.tasks[w.wakee as usize].pinned;
        let prev = pinned.unwrap_or(w.prev_cpu);
        let llc = self.machine.llc_of(prev);
        let bit = 1u64 << (prev % self.machine.cpus_per_llc);
        let l = &mut self.llcs[llc as usize];
        let idle = if l.idle & bit != 0 {
            l.idle &= !bit;
            Some(prev)
        } else if pinned.is_none() {
            self.claim_in(llc)
        } else {
            None
        };
        self.enqueue(w.wakee, llc, idle);
        idle.map_or(Placed::Queued, Placed::Kick)
    }

    fn requeue(&mut self, task: TaskId, cpu: u32, _now: u64) {
        self.enqueue(task, self.machine.llc_of(cpu), None);
    }

    fn next(&mut self, cpu: u32, _now: u64, rnd: u64) -> Option<TaskId> {
        let llc = self.machine.llc_of(cpu);
        let (local, l) = (&mut self.local[cpu as usize], &mut self.llcs[llc as usize]);
        // Smallest virtual time of the CPU's own queue and the LLC's two.
        let best = [local.first(), l.stay.first(), l.leave.first()]
            .iter()
            .enumerate()
            .filter_map(|(i, e)| e.map(|e| (e.0, i)))
            .min();
        let taken = match best {
            Some((_, 0)) => local.pop_first(),
            Some((_, 1)) => l.stay.pop_first(),
            Some(_) => l.leave.pop_first(),
            None => {
                let n = self.machine.llcs;
                if n < 2 {
                    return None;
                }
                let own = l.len();
                let pick =
                    |word: u64| ((llc as u64 + 1 + word % (n as u64 - 1)) % n as u64) as usize;
                let (a, b) = (pick(rnd & 0xffff_ffff), pick(rnd >> 32));
                let (more, less) = if self.llcs[a].leave.len() >= self.llcs[b].leave.len() {
                    (a, b)
                } else {
                    (b, a)
                };
                let mut found = None;
                for far in [more, less] {
                    let q = &mut self.llcs[far].leave;
                    if found.is_none() && q.len() * 100 > own * (100 + SLACK_PCT) {
                        found = q.pop_first();
                    }
                }
                found
            }
        };
        let task = taken?.2;
        self.waiting -= 1;
        Some(task)
    }

    fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) -> u64 {
        let llc = self.machine.llc_of(cpu);
        let clock = &mut self.llcs[llc as usize].clock;
        let t = &mut self.tasks[task as usize];
        if t.llc != llc {
            t.llc = llc;
            t.runs = 0;
            t.vtime = *clock;
        }
        t.runs = t.runs.saturating_add(1);
        t.run_at = now;
        *clock = (*clock).max(t.vtime);
        SLICES_NS[t.level]
    }

    fn on_stop(&mut self, task: TaskId, _cpu: u32, now: u64, runnable: bool) {
        let t = &mut self.tasks[task as usize];
        let used = now - t.run_at;
        t.vtime += used * 100 / t.weight as u64;
        let slice = SLICES_NS[t.level];
        if used * 10 >= slice * 9 {
            t.level = (t.level + 1).min(2);
        } else if !runnable && used * 2 < slice {
            t.level = t.level.saturating_sub(1);
        }
    }

    fn set_idle(&mut self, cpu: u32, idle: bool) {
        let bit = 1u64 << (cpu % self.machine.cpus_per_llc);
        let l = &mut self.llcs[self.machine.llc_of(cpu) as usize];
        if idle {
            l.idle |= bit;
        } else {
            l.idle &= !bit;
        }
    }

    fn tick(&mut self, _cpu: u32, _now: u64, _rnd: u64) -> (Option<u32>, bool) {
        (None, false)
    }

    fn counters(&self) -> [u64; policy::COUNTERS.len()] {
        [0; policy::COUNTERS.len()]
    }

    fn waiting(&self) -> usize {
        self.waiting
    }
}
