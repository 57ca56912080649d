//! The part of the kernel's `sched_ext` class that the BPF program uses: dispatch queues, idle CPUs, the
//! order of calls to the program, and the actions that take effect only after it has returned.
//!
//! Source: Linux 6.18, `kernel/sched/ext.c` and `ext_idle.c`. The parts relevant to the program:
//!
//! - An insertion made in `ops.enqueue` is recorded and performed after the op has returned, under the
//!   lock of the task's run queue; other CPUs may inspect queues in between. Kicks
//!   are carried out after it. Both are delayed by [`GAP_NS`], in which other CPUs' events happen.
//! - `ops.dispatch` is called before the leaving task is queued, and not at all while that task has
//!   slice left or the CPU's own queue holds a task.
//! - `update_idle` is called on changes only: a CPU that is kicked and finds no task is idle in the
//!   kernel's mask again without a call.
//! - Slices expire at ticks. No op is called on a CPU on which a real-time task runs. `ops.dispatch` is
//!   called on a CPU that a real-time task is about to take. `ops.cpu_release` follows if a task of ours
//!   had the CPU, and not if it idled: tasks in its local queue then wait for the real-time task.
//!
//! The program's state is global, as in the kernel: [`Host`] owns the only one of the process.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use slipstream_base::sync::lock;
use slipstream_base::width::{to_i32, to_u32};

use super::{Action, Next, TaskId, TaskParams, Wakeup, unwrap_key};
use crate::machine::{CpuMask, Machine};
use crate::policy::{COUNTERS, Params};

/// From an op's return to the effect of its request, ns: some hundred instructions.
pub const GAP_NS: u64 = 300;
/// `SCX_SLICE_DFL`.
const SLICE_DEFAULT_NS: u64 = 20_000_000;
/// `SLIP_CPUS_MAX` of the program.
pub const CPUS_MAX: u32 = 1024;
/// `SLIP_LLCS_MAX` of the program.
pub const LLCS_MAX: u32 = 256;

const DSQ_LOCAL: u64 = 1 << 63 | 2;
const DSQ_LOCAL_ON: u64 = 1 << 63 | 1 << 62;
const WAKE_SYNC: u64 = 0x10;
const WAKE_TTWU: u64 = 0x08;
const ENQ_WAKEUP: u64 = 1;
const ENQ_REENQ: u64 = 1 << 40;
const OPS_ENQ_MIGRATION_DISABLED: u64 = 1 << 4;
const KICK_IDLE: u64 = 1;
const KICK_PREEMPT: u64 = 2;
const PICK_IDLE_CORE: u64 = 1;
/// Tokens of [`Action::Later`] at or above this value are timers of the program.
const TIMER_TOKEN: u32 = 1 << 31;

unsafe extern "C" {
    fn slip_p_reset(
        params: &Params,
        nr_llcs: u32,
        nr_cpus: u32,
        llc_of: *const u32,
        bit_of: *const u32,
        core_of: *const u32,
    );
    safe fn slip_p_clear();
    fn slip_p_add_task(weight: u32, mask: *const u64, allowed: u32);
    fn slip_p_set_mask(task: u32, mask: *const u64, allowed: u32);
    safe fn slip_p_slice(task: u32) -> u64;
    safe fn slip_p_set_slice(task: u32, slice: u64);
    safe fn slip_p_set_vtime(task: u32, vtime: u64);
    safe fn slip_p_set_queued(task: u32, queued: u32);
    safe fn slip_p_set_exec(task: u32, sum: u64, start: u64);
    safe fn slip_p_enter(cpu: u32, current: i32, nr_running: u32, now: u64);
    safe fn slip_p_set_real_time(cpu: u32, tasks: u32);
    safe fn slip_p_init() -> i32;
    safe fn slip_p_init_task(task: u32) -> i32;
    safe fn slip_p_enable(task: u32);
    safe fn slip_p_select_cpu(task: u32, prev: i32, flags: u64) -> i32;
    safe fn slip_p_enqueue(task: u32, flags: u64);
    safe fn slip_p_dispatch(cpu: i32, prev: i32);
    safe fn slip_p_tick(task: u32);
    safe fn slip_p_running(task: u32);
    safe fn slip_p_stopping(task: u32, runnable: u32);
    safe fn slip_p_quiescent(task: u32);
    safe fn slip_p_update_idle(cpu: i32, idle: u32);
    safe fn slip_p_cpu_release(cpu: i32);
    safe fn slip_p_cpu_acquire(cpu: i32);
    safe fn slip_p_migration_disabled(task: u32) -> u32;
    safe fn slip_p_ops_flags() -> u64;
    safe fn slip_p_timer(timer: u32);
    fn slip_p_counters(out: *mut u64);
}

/// Order in a queue: first in, first out before virtual time; then by arrival.
type Key = (bool, i128, u64);

#[derive(Clone, Copy, Debug)]
struct Insert {
    dsq: u64,
    slice: u64,
    vtime: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It sleeps, or its insertion is in progress.
    Nowhere,
    Local(u32),
    Dsq(u64, Key),
    Running(u32),
}

#[derive(Clone, Debug)]
struct Task {
    mask: CpuMask,
    allowed: u32,
    cpu: u32,
    runnable: bool,
    place: Place,
    insert: Option<Insert>,
    exec: u64,
    since: u64,
}

/// Requests that take effect after the op has returned.
#[derive(Clone, Debug)]
struct Effect {
    task: TaskId,
    /// The task woke up: if its run queue's CPU is idle, that CPU looks for work.
    woke: bool,
    kicks: Vec<(u32, u64)>,
}

#[derive(Debug, Default)]
struct Kernel {
    machine: Option<Machine>,
    now: u64,
    gap_ns: u64,
    /// The CPU that runs the program.
    cpu: u32,
    tasks: Vec<Task>,
    dsqs: BTreeMap<u64, BTreeMap<Key, TaskId>>,
    local: Vec<VecDeque<TaskId>>,
    idle: Vec<bool>,
    is_idling: Vec<bool>,
    online: Vec<bool>,
    real_time: Vec<bool>,
    current: Vec<Option<TaskId>>,
    nr_running: Vec<u32>,
    locked_until: Vec<u64>,
    kicks: Vec<(u32, u64)>,
    effects: BTreeMap<u32, Effect>,
    next_token: u32,
    actions: Vec<Action>,
    seq: u64,
    error: Option<String>,
}

thread_local! {
    static KERNEL: RefCell<Kernel> = RefCell::default();
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}
static HOST: Mutex<()> = Mutex::new(());

/// Whether this thread has a [`Host`].
pub(super) fn is_in_use() -> bool {
    IN_USE.get()
}

/// Short access to the kernel: never held while the program runs, because it calls back.
fn with<R>(f: impl FnOnce(&mut Kernel) -> R) -> R {
    KERNEL.with_borrow_mut(f)
}

impl Kernel {
    fn fail(&mut self, what: String) {
        self.error.get_or_insert(what);
    }

    fn can_run(&self, task: TaskId, cpu: u32) -> bool {
        self.online[cpu as usize] && self.tasks[task as usize].mask.has(cpu)
    }

    /// `select_fallback_rq`: its last CPU, or the first that it may use, or any.
    fn fallback(&self, task: TaskId) -> u32 {
        let last = self.tasks[task as usize].cpu;
        if self.can_run(task, last) {
            return last;
        }
        let cpus = 0..to_u32(self.online.len());
        let mut usable = cpus.clone().filter(|&c| self.can_run(task, c));
        let mut online = cpus.filter(|&c| self.online[c as usize]);
        usable.next().or_else(|| online.next()).unwrap_or(last)
    }

    fn set_cpu(&mut self, task: TaskId, cpu: u32) {
        let t = &mut self.tasks[task as usize];
        if t.runnable {
            self.nr_running[t.cpu as usize] -= 1;
            self.nr_running[cpu as usize] += 1;
        }
        t.cpu = cpu;
    }

    fn set_runnable(&mut self, task: TaskId, runnable: bool) {
        let t = &mut self.tasks[task as usize];
        if t.runnable != runnable {
            t.runnable = runnable;
            let n = &mut self.nr_running[t.cpu as usize];
            *n = if runnable { *n + 1 } else { *n - 1 };
        }
        slip_p_set_queued(task, u32::from(runnable));
    }

    fn remove(&mut self, task: TaskId) {
        match self.tasks[task as usize].place {
            Place::Local(cpu) => self.local[cpu as usize].retain(|&t| t != task),
            Place::Dsq(dsq, key) => {
                if let Some(q) = self.dsqs.get_mut(&dsq) {
                    q.remove(&key);
                }
            }
            Place::Nowhere | Place::Running(_) => {}
        }
        self.tasks[task as usize].place = Place::Nowhere;
    }

    fn put_local(&mut self, task: TaskId, cpu: u32) {
        if !self.can_run(task, cpu) {
            self.fail(format!(
                "task {task} sent to CPU {cpu}, where it may not run"
            ));
        }
        self.remove(task);
        self.set_cpu(task, cpu);
        self.local[cpu as usize].push_back(task);
        self.tasks[task as usize].place = Place::Local(cpu);
    }

    /// Performs the recorded insertion.
    fn insert_now(&mut self, task: TaskId) {
        let Some(i) = self.tasks[task as usize].insert.take() else {
            return;
        };
        slip_p_set_slice(task, i.slice.max(1));
        if i.dsq == DSQ_LOCAL {
            let cpu = self.tasks[task as usize].cpu;
            self.put_local(task, cpu);
            self.resched_if_idle(cpu);
        } else if i.dsq & DSQ_LOCAL_ON == DSQ_LOCAL_ON {
            let cpu = (i.dsq & 0xffff_ffff) as u32;
            self.put_local(task, cpu);
            self.resched_if_idle(cpu);
        } else if let Some(q) = self.dsqs.get_mut(&i.dsq) {
            self.seq += 1;
            let key = (
                i.vtime.is_some(),
                unwrap_key(i.vtime.unwrap_or(0)),
                self.seq,
            );
            q.insert(key, task);
            if let Some(vtime) = i.vtime {
                slip_p_set_vtime(task, vtime);
            }
            self.tasks[task as usize].place = Place::Dsq(i.dsq, key);
        } else {
            self.fail(format!(
                "task {task} inserted into queue {:#x}, which is not there",
                i.dsq
            ));
        }
    }

    fn resched_if_idle(&mut self, cpu: u32) {
        if self.current[cpu as usize].is_none() && !self.real_time[cpu as usize] {
            self.actions.push(Action::Resched(cpu));
        }
    }

    fn kick_now(&mut self, cpu: u32, flags: u64) {
        let Some(&current) = self.current.get(cpu as usize) else {
            return;
        };
        match current {
            None => self.resched_if_idle(cpu),
            Some(_) if flags & KICK_IDLE != 0 => {}
            Some(task) if flags & KICK_PREEMPT != 0 => {
                slip_p_set_slice(task, 0);
                self.actions.push(Action::Preempt(cpu));
            }
            Some(_) => {}
        }
    }

    fn apply(&mut self, effect: Effect) {
        self.insert_now(effect.task);
        if effect.woke {
            self.resched_if_idle(self.tasks[effect.task as usize].cpu);
        }
        for (cpu, flags) in effect.kicks {
            self.kick_now(cpu, flags);
        }
    }

    /// Applies the insertion requested by `ops.enqueue` (or `select_cpu`): at once for a CPU's own queue,
    /// otherwise after the gap, in which the run queue of the task's CPU stays locked.
    fn settle(&mut self, task: TaskId, woke: bool) {
        let effect = Effect {
            task,
            woke,
            kicks: std::mem::take(&mut self.kicks),
        };
        let t = &self.tasks[task as usize];
        let Some(insert) = t.insert else {
            self.fail(format!("task {task} was not inserted anywhere"));
            return;
        };
        // Built-in queues of the kernel have the highest bit set.
        if self.gap_ns == 0 || insert.dsq >> 63 == 1 {
            self.apply(effect);
            return;
        }
        // The CPU that runs the op is busy with it, and the task's run queue is locked: until after the
        // insertion, also for a CPU that looks for work at the same instant.
        for cpu in [t.cpu as usize, self.cpu as usize] {
            self.locked_until[cpu] = self.locked_until[cpu].max(self.now + self.gap_ns + 1);
        }
        let token = self.next_token;
        self.next_token = (token + 1) % TIMER_TOKEN;
        self.effects.insert(token, effect);
        self.actions.push(Action::Later(self.gap_ns, token));
    }

    /// Performs the insertions in progress under the lock of this CPU's run queue, which a task of another
    /// class needs before it can take the CPU.
    fn finish_insertions(&mut self, cpu: u32) {
        let on_cpu = |e: &Effect| self.tasks[e.task as usize].cpu == cpu;
        let due = self.effects.iter().filter(|(_, e)| on_cpu(e));
        let tokens: Vec<u32> = due.map(|(&token, _)| token).collect();
        for token in tokens {
            if let Some(effect) = self.effects.remove(&token) {
                self.apply(effect);
            }
        }
    }

    fn update_current(&mut self, task: TaskId) {
        let t = &mut self.tasks[task as usize];
        let ran = self.now.saturating_sub(t.since);
        t.exec += ran;
        t.since = self.now;
        slip_p_set_exec(task, t.exec, self.now);
        slip_p_set_slice(task, slip_p_slice(task).saturating_sub(ran));
    }

    fn enter(&mut self, cpu: u32) {
        self.cpu = cpu;
        let current = self.current[cpu as usize].map_or(-1, to_i32);
        slip_p_enter(cpu, current, self.nr_running[cpu as usize], self.now);
    }

    fn deliver_kicks(&mut self) {
        for (cpu, flags) in std::mem::take(&mut self.kicks) {
            self.kick_now(cpu, flags);
        }
    }
}

/// The one host of this process that runs the program; other threads wait until it is dropped.
///
/// Its state is in [`KERNEL`] and in the program's globals. Methods take `self` as the proof
/// that the state is this host's.
#[derive(Debug)]
pub(super) struct Host {
    _only: MutexGuard<'static, ()>,
    machine: Machine,
    params: Params,
}

impl Drop for Host {
    fn drop(&mut self) {
        with(|k| *k = Kernel::default());
        slip_p_clear();
        IN_USE.set(false);
    }
}

#[allow(clippy::unused_self)] // see Host
impl Host {
    pub(super) fn new(machine: Machine, params: Params, gap_ns: u64) -> Host {
        assert!(
            !IN_USE.replace(true),
            "one simulation of our scheduler at a time; drop the other first"
        );
        let only = lock(&HOST);
        let n = machine.cpus() as usize;
        slip_p_clear();
        with(|k| {
            *k = Kernel {
                machine: Some(machine),
                gap_ns,
                local: vec![VecDeque::new(); n],
                idle: vec![true; n],
                is_idling: vec![true; n],
                online: vec![true; n],
                real_time: vec![false; n],
                current: vec![None; n],
                nr_running: vec![0; n],
                locked_until: vec![0; n],
                ..Kernel::default()
            };
        });
        let host = Host {
            _only: only,
            machine,
            params,
        };
        host.load();
        host
    }

    /// Loads the program for the CPUs that are online.
    fn load(&self) {
        let m = self.machine;
        let online = with(|k| {
            k.dsqs.clear();
            k.effects.clear();
            k.kicks.clear();
            k.locked_until.fill(0);
            k.local.iter_mut().for_each(VecDeque::clear);
            k.online.clone()
        });
        // LLCs without an online CPU are skipped, as in the loader.
        let mut llcs = Vec::new();
        let (mut llc_of, mut bit_of, mut core_of) = (Vec::new(), Vec::new(), Vec::new());
        let mut bits = 0;
        for cpu in 0..m.cpus() {
            core_of.push(cpu / m.threads_per_core);
            if !online[cpu as usize] {
                llc_of.push(u32::MAX);
                bit_of.push(0);
                continue;
            }
            if llcs.last() != Some(&m.llc_of(cpu)) {
                llcs.push(m.llc_of(cpu));
                bits = 0;
            }
            llc_of.push(to_u32(llcs.len() - 1));
            bit_of.push(bits);
            bits += 1;
        }
        // SAFETY: the three arrays have an entry per CPU, and nothing is kept.
        unsafe {
            slip_p_reset(
                &self.params,
                to_u32(llcs.len()),
                m.cpus(),
                llc_of.as_ptr(),
                bit_of.as_ptr(),
                core_of.as_ptr(),
            );
        }
        for cpu in 0..m.cpus() {
            slip_p_set_real_time(cpu, u32::from(with(|k| k.real_time[cpu as usize])));
        }
        with(|k| k.enter(k.first_online()));
        let failed = slip_p_init();
        assert_eq!(failed, 0, "the program's init");
        let tasks = with(|k| to_u32(k.tasks.len()));
        for task in 0..tasks {
            Host::attach(task);
        }
        with(|k| {
            for cpu in 0..m.cpus() {
                if k.online[cpu as usize] {
                    k.idle[cpu as usize] = k.is_idling[cpu as usize];
                    k.resched_if_idle(cpu);
                }
            }
        });
    }

    fn attach(task: TaskId) {
        let cpu = with(|k| {
            k.enter(k.first_online());
            k.tasks[task as usize].cpu
        });
        let failed = slip_p_init_task(task);
        assert_eq!(
            failed, 0,
            "the program's init_task for task {task} on CPU {cpu}"
        );
        slip_p_enable(task);
    }

    /// A mask in the program's form, and the number of its CPUs.
    fn words(&self, mask: &CpuMask) -> ([u64; CPUS_MAX as usize / 64], u32) {
        let mut words = [0u64; CPUS_MAX as usize / 64];
        for cpu in mask.iter(self.machine.cpus()) {
            words[cpu as usize / 64] |= 1 << (cpu % 64);
        }
        let allowed = words.iter().map(|w| w.count_ones()).sum();
        (words, allowed)
    }

    /// Widens the mask of a task that has no CPU left, as the kernel does.
    fn widen_masks(&self) {
        let (words, allowed) = self.words(&CpuMask::ALL);
        let lost = |k: &Kernel, t: TaskId| {
            let usable = |cpu: u32| k.can_run(t, cpu);
            !(0..to_u32(k.online.len())).any(usable)
        };
        let tasks = with(|k| {
            let ids = 0..to_u32(k.tasks.len());
            ids.filter(|&t| lost(k, t)).collect::<Vec<_>>()
        });
        for task in tasks {
            with(|k| {
                let t = &mut k.tasks[task as usize];
                (t.mask, t.allowed) = (CpuMask::ALL, allowed);
            });
            // SAFETY: the mask has the program's number of words and is copied.
            unsafe { slip_p_set_mask(task, words.as_ptr(), allowed) };
        }
    }

    pub(super) fn add_task(&mut self, t: &TaskParams) {
        let (words, allowed) = self.words(&t.mask);
        // SAFETY: the mask has the program's number of words and is copied.
        unsafe { slip_p_add_task(t.weight, words.as_ptr(), allowed) };
        let task = with(|k| {
            k.tasks.push(Task {
                mask: t.mask.clone(),
                allowed,
                cpu: t.home,
                runnable: false,
                place: Place::Nowhere,
                insert: None,
                exec: 0,
                since: 0,
            });
            to_u32(k.tasks.len() - 1)
        });
        with(|k| {
            let cpu = k.fallback(task);
            k.tasks[task as usize].cpu = cpu;
        });
        Host::attach(task);
    }

    pub(super) fn wake(&mut self, w: &Wakeup) {
        let task = w.wakee;
        let (prev, is_single) = with(|k| {
            k.now = w.now;
            k.enter(w.waker_cpu);
            let t = &k.tasks[task as usize];
            (t.cpu, t.allowed == 1)
        });
        // The kernel does not call select_cpu for a task bound to one CPU.
        let cpu = if is_single {
            to_i32(prev)
        } else {
            let flags = WAKE_TTWU | if w.sync { WAKE_SYNC } else { 0 };
            slip_p_select_cpu(task, to_i32(prev), flags)
        };
        let cpu = u32::try_from(cpu)
            .ok()
            .filter(|&c| with(|k| (c as usize) < k.online.len() && k.can_run(task, c)))
            .unwrap_or_else(|| with(|k| k.fallback(task)));
        let direct = with(|k| {
            k.set_cpu(task, cpu);
            k.set_runnable(task, true);
            k.tasks[task as usize].insert.is_some()
        });
        if !direct {
            slip_p_enqueue(task, ENQ_WAKEUP);
        }
        with(|k| k.settle(task, true));
    }

    pub(super) fn next(&mut self, cpu: u32, prev: Option<TaskId>, now: u64) -> Next {
        let i = cpu as usize;
        let locked = with(|k| {
            k.now = now;
            k.current[i] = prev;
            k.locked_until[i]
        });
        if locked > now {
            return Next::Retry(locked);
        }
        let has_local = |k: &mut Kernel| !k.local[i].is_empty();
        let has_slice = || prev.is_some_and(|p| slip_p_slice(p) > 0);
        if has_slice() {
            return self.keep(cpu, prev);
        }
        if !with(has_local) {
            with(|k| k.enter(cpu));
            slip_p_dispatch(to_i32(cpu), prev.map_or(-1, to_i32));
            with(Kernel::deliver_kicks);
            if has_slice() {
                return self.keep(cpu, prev);
            }
        }
        let Some(task) = with(|k| k.local[i].pop_front()) else {
            if let Some(prev) = prev {
                slip_p_set_slice(prev, SLICE_DEFAULT_NS);
            }
            return self.keep(cpu, prev);
        };
        with(|k| {
            k.tasks[task as usize].place = Place::Running(cpu);
            k.set_cpu(task, cpu);
        });
        if let Some(prev) = prev {
            slip_p_stopping(prev, 1);
            with(|k| {
                k.tasks[prev as usize].place = Place::Nowhere;
                k.enter(cpu);
            });
            slip_p_enqueue(prev, 0);
            with(|k| k.settle(prev, false));
        }
        with(|k| k.current[i] = Some(task));
        Next::Run(task)
    }

    fn keep(&self, cpu: u32, prev: Option<TaskId>) -> Next {
        match prev {
            Some(prev) => {
                with(|k| k.tasks[prev as usize].place = Place::Running(cpu));
                Next::Run(prev)
            }
            None => Next::Idle,
        }
    }

    pub(super) fn on_run(&mut self, task: TaskId, cpu: u32, now: u64) {
        with(|k| {
            k.now = now;
            k.current[cpu as usize] = Some(task);
            k.is_idling[cpu as usize] = false;
            let t = &mut k.tasks[task as usize];
            t.since = now;
            slip_p_set_exec(task, t.exec, now);
            k.enter(cpu);
        });
        slip_p_running(task);
    }

    pub(super) fn on_stop(&mut self, task: TaskId, cpu: u32, now: u64, runnable: bool) {
        with(|k| {
            k.now = now;
            k.update_current(task);
            k.enter(cpu);
        });
        if runnable {
            return;
        }
        slip_p_stopping(task, 0);
        slip_p_quiescent(task);
        with(|k| {
            k.set_runnable(task, false);
            k.tasks[task as usize].place = Place::Nowhere;
            k.current[cpu as usize] = None;
        });
    }

    /// `again`: it was idle before, and the kick found no task.
    pub(super) fn set_idle(&mut self, cpu: u32, now: u64, idle: bool, again: bool) {
        with(|k| {
            k.now = now;
            k.idle[cpu as usize] = idle;
            k.is_idling[cpu as usize] = idle;
            if idle {
                k.current[cpu as usize] = None;
            }
            k.enter(cpu);
        });
        if !again {
            slip_p_update_idle(to_i32(cpu), u32::from(idle));
            with(Kernel::deliver_kicks);
        }
    }

    /// Returns whether the running task must be descheduled.
    pub(super) fn tick(&mut self, cpu: u32, now: u64) -> bool {
        let Some(task) = with(|k| {
            k.now = now;
            let task = k.current[cpu as usize]?;
            k.update_current(task);
            k.enter(cpu);
            Some(task)
        }) else {
            return false;
        };
        slip_p_tick(task);
        with(Kernel::deliver_kicks);
        slip_p_slice(task) == 0
    }

    pub(super) fn later(&mut self, token: u32, now: u64) {
        with(|k| k.now = now);
        if token >= TIMER_TOKEN {
            with(|k| k.enter(k.first_online()));
            slip_p_timer(token - TIMER_TOKEN);
            with(Kernel::deliver_kicks);
            return;
        }
        with(|k| {
            if let Some(effect) = k.effects.remove(&token) {
                k.apply(effect);
            }
        });
    }

    /// A real-time task takes the CPU or leaves it; `prev` was running there.
    pub(super) fn set_real_time(&mut self, cpu: u32, now: u64, busy: bool, prev: Option<TaskId>) {
        with(|k| {
            k.now = now;
            k.finish_insertions(cpu);
            k.real_time[cpu as usize] = busy;
            k.current[cpu as usize] = prev;
            k.enter(cpu);
            k.current[cpu as usize] = None;
        });
        slip_p_set_real_time(cpu, u32::from(busy));
        if !busy {
            slip_p_cpu_acquire(to_i32(cpu));
            return;
        }
        // The kernel lets us dispatch before it picks the real-time task.
        let has_slice = |prev: TaskId| slip_p_slice(prev) > 0;
        if with(|k| k.local[cpu as usize].is_empty()) && !prev.is_some_and(has_slice) {
            slip_p_dispatch(to_i32(cpu), prev.map_or(-1, to_i32));
            with(Kernel::deliver_kicks);
        }
        let was_ours = prev.is_some();
        if let Some(prev) = prev {
            if has_slice(prev) {
                with(|k| {
                    k.tasks[prev as usize].place = Place::Local(cpu);
                    k.local[cpu as usize].push_front(prev);
                });
            } else {
                with(|k| {
                    k.tasks[prev as usize].place = Place::Nowhere;
                    k.enter(cpu);
                });
                slip_p_enqueue(prev, 0);
                with(|k| k.settle(prev, false));
            }
        } else {
            self.set_idle(cpu, now, false, false);
        }
        // Tasks in the local queue of a CPU that idled stay there.
        if was_ours {
            // On behalf of the task that is about to be descheduled.
            with(|k| {
                k.current[cpu as usize] = prev;
                k.enter(cpu);
                k.current[cpu as usize] = None;
            });
            slip_p_cpu_release(to_i32(cpu));
            with(Kernel::deliver_kicks);
        }
    }

    /// A CPU came online or went offline: the kernel ends the program and the loader loads it again.
    pub(super) fn set_online(&mut self, cpu: u32, now: u64, online: bool) {
        let waiting: Vec<TaskId> = with(|k| {
            k.now = now;
            k.online[cpu as usize] = online;
            // A real-time task that had the CPU moves elsewhere.
            k.real_time[cpu as usize] = false;
            k.current[cpu as usize] = None;
            k.is_idling[cpu as usize] = online;
            k.idle[cpu as usize] = online;
            let ids = 0..to_u32(k.tasks.len());
            let waits = |t: &TaskId| {
                let task = &k.tasks[*t as usize];
                let runs = matches!(task.place, Place::Running(c) if c != cpu || online);
                task.runnable && !runs
            };
            let waiting: Vec<TaskId> = ids.filter(waits).collect();
            for &t in &waiting {
                k.tasks[t as usize].place = Place::Nowhere;
                k.tasks[t as usize].insert = None;
            }
            waiting
        });
        self.widen_masks();
        with(|k| {
            // A sleeping task stays assigned to the CPU it last ran on, until it wakes up.
            for t in 0..to_u32(k.tasks.len()) {
                let task = &k.tasks[t as usize];
                if task.runnable && !matches!(task.place, Place::Running(_)) {
                    let cpu = k.fallback(t);
                    k.set_cpu(t, cpu);
                }
            }
        });
        self.load();
        for t in waiting {
            with(|k| k.enter(k.tasks[t as usize].cpu));
            slip_p_enqueue(t, 0);
            with(|k| k.settle(t, true));
        }
    }

    pub(super) fn take_actions(&mut self) -> Vec<Action> {
        with(|k| std::mem::take(&mut k.actions))
    }

    /// The error for which a kernel would have ended the program.
    pub(super) fn error(&self) -> Option<String> {
        with(|k| k.error.clone())
    }

    pub(super) fn counters(&self) -> [u64; COUNTERS.len()] {
        let mut out = [0; COUNTERS.len()];
        // SAFETY: the program has as many counters as there are names, which policy.rs checks.
        unsafe { slip_p_counters(out.as_mut_ptr()) };
        out
    }

    pub(super) fn waiting(&self) -> usize {
        with(|k| {
            let waits = |t: &&Task| t.runnable && !matches!(t.place, Place::Running(_));
            k.tasks.iter().filter(waits).count()
        })
    }
}

impl Kernel {
    fn first_online(&self) -> u32 {
        to_u32(self.online.iter().position(|&o| o).unwrap_or(0))
    }

    fn queue(&self, dsq: u64) -> Option<&BTreeMap<Key, TaskId>> {
        self.dsqs.get(&dsq)
    }
}

// ---- kfuncs: called by the program, through csrc/program.c ----

#[unsafe(no_mangle)]
extern "C" fn slip_k_now() -> u64 {
    with(|k| k.now)
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_create_dsq(dsq: u64) -> i32 {
    with(|k| k.dsqs.insert(dsq, BTreeMap::new()));
    0
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_insert(
    task: u32,
    dsq: u64,
    slice: u64,
    vtime: u64,
    by_vtime: u32,
    _flags: u64,
) {
    with(|k| {
        if k.tasks[task as usize].insert.is_some() {
            k.fail(format!("task {task} inserted twice"));
        }
        k.tasks[task as usize].insert = Some(Insert {
            dsq,
            slice,
            vtime: (by_vtime != 0).then_some(vtime),
        });
    });
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_move_to_local(dsq: u64) -> u32 {
    with(|k| {
        let cpu = k.cpu;
        let found = k
            .queue(dsq)
            .and_then(|q| q.values().copied().find(|&t| k.can_run(t, cpu)));
        let Some(task) = found else { return 0 };
        k.put_local(task, cpu);
        1
    })
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_move(task: u32, dsq: u64, _flags: u64) -> u32 {
    with(|k| {
        if !matches!(k.tasks[task as usize].place, Place::Dsq(..)) {
            return 0;
        }
        let cpu = if dsq == DSQ_LOCAL {
            k.cpu
        } else if dsq & DSQ_LOCAL_ON == DSQ_LOCAL_ON {
            (dsq & 0xffff_ffff) as u32
        } else {
            k.fail(format!(
                "task {task} moved to queue {dsq:#x}: not simulated"
            ));
            return 0;
        };
        k.put_local(task, cpu);
        if cpu != k.cpu {
            k.resched_if_idle(cpu);
        }
        1
    })
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_nr_queued(dsq: u64) -> i32 {
    with(|k| {
        if dsq == DSQ_LOCAL {
            return to_i32(k.local[k.cpu as usize].len());
        }
        if dsq & DSQ_LOCAL_ON == DSQ_LOCAL_ON {
            let cpu = (dsq & 0xffff_ffff) as usize;
            return k.local.get(cpu).map_or(-2, |q| to_i32(q.len()));
        }
        k.queue(dsq).map_or(-2, |q| to_i32(q.len()))
    })
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_kick(cpu: i32, flags: u64) {
    with(|k| match u32::try_from(cpu) {
        Ok(cpu) if (cpu as usize) < k.online.len() => k.kicks.push((cpu, flags)),
        _ => k.fail(format!("CPU {cpu} kicked, which is not there")),
    });
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_claim_idle(cpu: i32) -> u32 {
    with(|k| {
        let idle = usize::try_from(cpu).ok().and_then(|c| k.idle.get_mut(c));
        u32::from(idle.is_some_and(std::mem::take))
    })
}

/// # Safety
/// `mask` points to a mask of the program's number of words.
#[unsafe(no_mangle)]
unsafe extern "C" fn slip_k_pick_idle(mask: *const u64, flags: u64) -> i32 {
    // SAFETY: by the contract; every task's mask has this many words.
    let words = unsafe { std::slice::from_raw_parts(mask, CPUS_MAX as usize / 64) };
    with(|k| {
        let threads = k.machine.map_or(1, |m| m.threads_per_core);
        let is_core_idle = |cpu: u32| {
            let first = cpu / threads * threads;
            (first..first + threads).all(|c| k.idle[c as usize] || !k.online[c as usize])
        };
        let found = (0..to_u32(k.online.len())).find(|&cpu| {
            words[cpu as usize / 64] >> (cpu % 64) & 1 == 1
                && k.idle[cpu as usize]
                && k.online[cpu as usize]
                && (flags & PICK_IDLE_CORE == 0 || is_core_idle(cpu))
        });
        let Some(cpu) = found else { return -16 };
        k.idle[cpu as usize] = false;
        to_i32(cpu)
    })
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_task_cpu(task: u32) -> i32 {
    with(|k| to_i32(k.tasks[task as usize].cpu))
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_at(dsq: u64, index: u32, reverse: u32) -> i32 {
    with(|k| {
        let Some(q) = k.queue(dsq) else { return -1 };
        let found = if reverse == 0 {
            q.values().nth(index as usize)
        } else {
            q.values().nth_back(index as usize)
        };
        found.map_or(-1, |&t| to_i32(t))
    })
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_reenqueue_local() -> u32 {
    let tasks: Vec<TaskId> = with(|k| {
        let tasks: Vec<TaskId> = k.local[k.cpu as usize].drain(..).collect();
        for &t in &tasks {
            k.tasks[t as usize].place = Place::Nowhere;
        }
        tasks
    });
    let asks = slip_p_ops_flags() & OPS_ENQ_MIGRATION_DISABLED != 0;
    for &task in &tasks {
        if slip_p_migration_disabled(task) > 0 && !asks {
            slip_p_set_slice(task, SLICE_DEFAULT_NS);
            with(|k| k.put_local(task, k.cpu));
            continue;
        }
        slip_p_enqueue(task, ENQ_REENQ);
        with(|k| k.settle(task, false));
    }
    to_u32(tasks.len())
}

#[unsafe(no_mangle)]
extern "C" fn slip_k_timer(timer: u32, ns: u64) {
    with(|k| k.actions.push(Action::Later(ns, TIMER_TOKEN + timer)));
}
