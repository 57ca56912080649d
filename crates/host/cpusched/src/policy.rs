//! The policy header, called from Rust: the same C text that the BPF program includes.
//!
//! The structs mirror `include/slip_policy.h`; [`layout_matches`] compares their sizes with the C
//! compiler's, and [`Core::new`] panics if they differ.

use slipstream_base::width::{to_i32, to_u32};

/// Maximum CPUs per LLC. `SLIP_LLC_CPUS`.
pub const LLC_CPUS_MAX: u32 = 64;
/// Maximum handoffs of other CPUs that one dispatch tries to steal. `SLIP_STEAL_TRIES`.
pub const STEAL_TRIES: u32 = 4;

/// The wake-up carried the sync hint.
pub const WAKE_SYNC: u32 = 1;
/// The wakee may run on the waker's CPU.
pub const WAKE_WAKER_OK: u32 = 4;
/// The wakee may run on its previous CPU.
pub const WAKE_PREV_OK: u32 = 8;
/// The wakee may not run on every CPU.
pub const WAKE_MASKED: u32 = 16;
/// The wakee may run on one CPU only.
pub const WAKE_SINGLE: u32 = 32;
/// Domains per LLC: 0 for tasks without a CPU mask, the others for one CPU mask each. `SLIP_DOMAINS`.
pub const DOMAINS: u32 = 64;

/// Counters in the order of `enum slip_path`, then `enum slip_counter`.
pub const COUNTERS: [&str; 22] = [
    "handoff",
    "prev_idle",
    "llc_core",
    "llc_thread",
    "far_idle",
    "mask_idle",
    "preempt",
    "queue_llc",
    "queue_cpu",
    "ran_next",
    "stolen",
    "hint_lied",
    "hint_refused",
    "tick_kick",
    "far_pull",
    "kept",
    "trusted",
    "made_room",
    "reenqueued",
    "rescued",
    "aged",
    "balanced",
];
/// Index of a counter by name.
///
/// # Panics
/// If there is no such counter: the names are constants of this crate.
pub fn counter(name: &str) -> usize {
    COUNTERS
        .iter()
        .position(|c| *c == name)
        .expect("a counter's name")
}

/// `struct slip_params`: tunables. Durations in ns, shares in percent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// Slice of a weight-100 task, by level.
    pub slice_ns: [u64; 3],
    /// Minimum slice.
    pub slice_min_ns: u64,
    /// Maximum slice.
    pub slice_max_ns: u64,
    /// Cost of waking an idle CPU; no handoff from a waker that blocks later than this.
    pub wake_idle_ns: u64,
    /// A task that has waited this long may leave its LLC at once.
    pub patience_ns: u64,
    /// Runs on an LLC before a task may leave it.
    pub residency_runs: u32,
    /// A task leaves its LLC only if it is busier than the other one by this percentage.
    pub slack_pct: u32,
    /// An LLC saturates when at most this share of its CPUs idles.
    pub saturated_pct: u32,
    /// It is no longer saturated when at least this share idles.
    pub relaxed_pct: u32,
    /// 0: no handoffs.
    pub hand_off: u32,
    /// 0: follow every hint.
    pub learn: u32,
    /// 0: a wake-up never preempts a hog.
    pub preempt: u32,
    /// Replaces `residency_runs` for a wakee whose LLC is saturated.
    pub saturated_runs: u32,
    /// Honest hints in a row after which other CPUs cannot steal a waker's handoffs.
    pub trust_after: u32,
    /// LLCs of a NUMA node, which have consecutive numbers. 0: nodes do not matter.
    pub llcs_per_node: u32,
}

/// `struct slip_task`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Task {
    pub vtime: u64,
    pub exec_ns: u64,
    pub queued_at: u64,
    pub burst_ns: u64,
    pub sync_ns: u64,
    pub block_ns: u64,
    pub llc_mask: u64,
    pub slice_cap_ns: u64,
    pub weight: u32,
    pub llc: u32,
    pub runs_on_llc: u32,
    pub level: u32,
    pub handed: u32,
    pub honest: u32,
    pub no_hand_off: u32,
    pub domain: u32,
    pub queued: u32,
    pub pad: u32,
}

/// `struct slip_cpu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Cpu {
    pub handover_at: u64,
    pub llc: u32,
    pub bit: u32,
    pub level: u32,
    pub pad: u32,
}

/// `struct slip_domain`: tasks that compete for the same CPUs, and their virtual clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Domain {
    pub clock: u64,
    pub offset: u64,
}

/// `struct slip_llc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Llc {
    pub vclock: u64,
    pub base: u64,
    pub balance_at: u64,
    pub idle_mask: u64,
    pub handover_mask: u64,
    pub nr_cpus: u32,
    pub nr_queued: u32,
    pub saturated: u32,
    pub overloaded: u32,
}

/// `struct slip_wake`: the inputs of a placement.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Wake {
    pub now: u64,
    pub rnd: u64,
    pub waker_cpu: u32,
    pub prev_cpu: u32,
    pub waker_llc: u32,
    pub prev_llc: u32,
    pub waker_queued: u32,
    pub nr_llcs: u32,
    pub flags: u32,
    pub pad: u32,
}

/// `struct slip_placement`: the decision.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Placement {
    pub path: u32,
    pub cpu: u32,
    pub llc: u32,
    pub refused: u32,
}

/// `struct slip_heads`: the heads of a CPU's queues.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // documented field by field in the header
pub struct Heads {
    pub cpu_key: u64,
    pub llc_key: u64,
    pub prev_key: u64,
    pub has_handover: u32,
    pub has_cpu: u32,
    pub has_llc: u32,
    pub has_prev: u32,
}

/// A source of work, in the order of `enum slip_source`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The task handed off to this CPU.
    Handover,
    /// Tasks bound to this CPU.
    Cpu,
    /// The LLC's queue: the first task that may run here.
    Llc,
    /// No task here.
    None,
    /// The running task continues.
    Prev,
}

#[repr(C)]
struct Env {
    llcs: *mut Llc,
    cpus: *mut Cpu,
    nr_llcs: u32,
    nr_cpus: u32,
    cpus_per_llc: u32,
    threads_per_core: u32,
    masked_cpu: i32,
    pad: u32,
}

// References: C receives them as pointers, and `Option<&T>` is a pointer that may be null.
unsafe extern "C" {
    fn slip_n_layout(sizes: &mut [u32; 9]);
    fn slip_n_params_default(p: &mut Params);
    fn slip_n_place(
        p: &Params,
        env: &mut Env,
        wakee: &Task,
        waker: Option<&Task>,
        w: &Wake,
        prev_level: u32,
        out: &mut Placement,
    );
    fn slip_n_llc_update(p: &Params, llc: &mut Llc);
    fn slip_n_cpu_set_idle(p: &Params, llc: &mut Llc, cpu: &Cpu, idle: u32);
    fn slip_n_llc_load(llc: &Llc) -> u32;
    fn slip_n_task_init(t: &mut Task, weight: u32, llc: u32, vclock: u64);
    fn slip_n_slice(p: &Params, t: &Task, llc: &Llc) -> u64;
    fn slip_n_on_runnable(p: &Params, t: &mut Task, llc: &mut Llc, d: &mut Domain, now: u64);
    fn slip_n_on_kept(p: &Params, t: &mut Task, d: &Domain);
    fn slip_n_on_turn(t: &mut Task);
    fn slip_n_change_domain(t: &mut Task, from: &Domain, to: &Domain);
    fn slip_n_queue_key(t: &Task, d: &Domain, slice: u64) -> u64;
    fn slip_n_charge(t: &mut Task, exec_ns: u64) -> u64;
    fn slip_n_on_sync_wake(t: &mut Task, exec_ns: u64);
    fn slip_n_account(
        p: &Params,
        t: &mut Task,
        id: u32,
        llc: &mut Llc,
        from: &Domain,
        d: &mut Domain,
        exec_ns: u64,
        blocked: u32,
    ) -> u32;
    fn slip_n_may_leave(p: &Params, t: &Task, saturated: u32, now: u64) -> u32;
    fn slip_n_pick_two(
        p: &Params,
        env: &mut Env,
        home: u32,
        nr_llcs: u32,
        rnd: u64,
        busiest: u32,
    ) -> i32;
    fn slip_n_handover_put(
        p: &Params,
        llc: &mut Llc,
        cpu: &mut Cpu,
        waker: &mut Task,
        now: u64,
    ) -> u32;
    fn slip_n_trusted(p: &Params, waker: &Task) -> u32;
    fn slip_n_tick_wants_room(p: &Params, running: &Task, cpu: &Cpu, now: u64) -> u32;
    fn slip_n_handover_taken(llc: &mut Llc, cpu: &Cpu);
    fn slip_n_tick_wants_kick(p: &Params, llc: &Llc, cpu: &Cpu, now: u64) -> u32;
    fn slip_n_tick_far(p: &Params, env: &mut Env, home: u32, nr_llcs: u32, rnd: u64) -> i32;
    fn slip_n_choose(h: &Heads) -> u32;
    fn slip_n_next_handover(mask: u64, bit: u32) -> u32;
    fn slip_n_may_steal(p: &Params, victim: &Cpu, now: u64) -> u32;
    fn slip_n_pull_from(p: &Params, env: &mut Env, home: u32, nr_llcs: u32, rnd: u64) -> i32;
    fn slip_n_claim_thread(env: &mut Env, llc: u32, cpu: &mut i32) -> u32;
    fn slip_n_count_bits(x: u64) -> u32;
    fn slip_n_lowest_bit(x: u64) -> u32;
}

impl Params {
    /// The header's defaults.
    pub fn with_defaults() -> Params {
        let mut p = Params::default();
        // SAFETY: `p` is a live, aligned Params; the function writes every field and keeps nothing.
        unsafe { slip_n_params_default(&mut p) };
        p
    }
}

/// Whether the Rust mirrors have the sizes of the C structs.
pub fn layout_matches() -> bool {
    let mut c = [0u32; 9];
    // SAFETY: the function writes exactly nine words.
    unsafe { slip_n_layout(&mut c) };
    let rust = [
        size_of::<Params>(),
        size_of::<Task>(),
        size_of::<Cpu>(),
        size_of::<Llc>(),
        size_of::<Wake>(),
        size_of::<Placement>(),
        size_of::<Env>(),
        size_of::<Heads>(),
        size_of::<Domain>(),
    ];
    c.iter().zip(rust).all(|(&c, rust)| c as usize == rust)
}

/// Number of bits set in `x`, by the header's function.
pub fn count_bits(x: u64) -> u32 {
    // SAFETY: a pure function of its argument.
    unsafe { slip_n_count_bits(x) }
}

/// Index of the lowest bit set, 64 for none, by the header's function.
pub fn lowest_bit(x: u64) -> u32 {
    // SAFETY: a pure function of its argument.
    unsafe { slip_n_lowest_bit(x) }
}

/// The next waiting handoff of another CPU, after `bit`; 64 if none.
pub fn next_handover(mask: u64, bit: u32) -> u32 {
    // SAFETY: a pure function of its arguments.
    unsafe { slip_n_next_handover(mask, bit) }
}

/// The queue that a CPU takes from next.
pub fn choose(heads: &Heads) -> Source {
    // SAFETY: reads one live struct.
    match unsafe { slip_n_choose(heads) } {
        0 => Source::Handover,
        1 => Source::Cpu,
        2 => Source::Llc,
        4 => Source::Prev,
        _ => Source::None,
    }
}

/// The policy's state for one host: parameters, LLCs, CPUs and tasks, and every decision about them.
#[derive(Clone, Debug)]
pub struct Core {
    /// Tunables.
    pub params: Params,
    /// One entry per LLC.
    pub llcs: Vec<Llc>,
    /// One entry per CPU; CPU `i` is in LLC `i / cpus_per_llc`.
    pub cpus: Vec<Cpu>,
    /// One entry per task.
    pub tasks: Vec<Task>,
    /// [`DOMAINS`] per LLC, then one per CPU for the tasks bound to that CPU.
    pub domains: Vec<Domain>,
    cpus_per_llc: u32,
    threads_per_core: u32,
}

impl Core {
    /// A host of `nr_llcs` LLCs of `cpus_per_llc` CPUs each, all busy (as at boot of the policy).
    ///
    /// # Panics
    /// If an LLC has no CPU or more than [`LLC_CPUS_MAX`], or the layouts differ.
    pub fn new(params: Params, nr_llcs: u32, cpus_per_llc: u32, threads_per_core: u32) -> Core {
        assert!(
            layout_matches(),
            "the Rust mirror of slip_policy.h is out of date"
        );
        assert!((1..=LLC_CPUS_MAX).contains(&cpus_per_llc) && nr_llcs > 0);
        let llc = Llc {
            nr_cpus: cpus_per_llc,
            saturated: 1,
            ..Llc::default()
        };
        let cpus = (0..nr_llcs * cpus_per_llc)
            .map(|i| Cpu {
                llc: i / cpus_per_llc,
                bit: i % cpus_per_llc,
                ..Cpu::default()
            })
            .collect();
        Core {
            params,
            llcs: vec![llc; nr_llcs as usize],
            cpus,
            tasks: Vec::new(),
            domains: vec![Domain::default(); (nr_llcs * DOMAINS + nr_llcs * cpus_per_llc) as usize],
            cpus_per_llc,
            threads_per_core,
        }
    }

    fn env(&mut self, masked_cpu: Option<u32>) -> Env {
        Env {
            llcs: self.llcs.as_mut_ptr(),
            cpus: self.cpus.as_mut_ptr(),
            nr_llcs: to_u32(self.llcs.len()),
            nr_cpus: to_u32(self.cpus.len()),
            cpus_per_llc: self.cpus_per_llc,
            threads_per_core: self.threads_per_core,
            masked_cpu: masked_cpu.map_or(-1, to_i32),
            pad: 0,
        }
    }

    /// Index in `domains` of a task's domain on an LLC.
    fn domain(&self, domain: u32, llc: u32) -> usize {
        if domain < DOMAINS {
            (llc * DOMAINS + domain) as usize
        } else {
            self.llcs.len() * DOMAINS as usize + (domain - DOMAINS) as usize
        }
    }

    /// Adds a task whose home is the LLC of `cpu`, and which may run anywhere; returns its index.
    pub fn add_task(&mut self, weight: u32, cpu: u32) -> usize {
        let llc = self.cpus[cpu as usize].llc;
        let clock = self.domains[self.domain(0, llc)].clock;
        let mut t = Task::default();
        // SAFETY: `t` is a live, aligned Task; nothing is kept.
        unsafe { slip_n_task_init(&mut t, weight, llc, clock) };
        self.tasks.push(t);
        self.tasks.len() - 1
    }

    /// Changes a task's CPU mask: below [`DOMAINS`] the domain of its mask (0: any CPU), otherwise
    /// `DOMAINS` plus its only CPU. The task keeps its lag.
    ///
    /// # Panics
    /// If there is no such CPU.
    pub fn set_domain(&mut self, task: usize, domain: u32) {
        let t = self.tasks[task];
        let from = self.domains[self.domain(t.domain, t.llc)];
        let to = self.domains[self.domain(domain, t.llc)];
        let t = &mut self.tasks[task];
        // SAFETY: live, aligned structs; nothing is kept.
        unsafe { slip_n_change_domain(t, &from, &to) };
        t.domain = domain;
    }

    /// Places a waking task. Fills in the LLC fields of `wake`.
    pub fn place(
        &mut self,
        wakee: usize,
        waker: Option<usize>,
        mut wake: Wake,
        masked_cpu: Option<u32>,
    ) -> Placement {
        wake.waker_llc = self.cpus[wake.waker_cpu as usize].llc;
        wake.prev_llc = self.cpus[wake.prev_cpu as usize].llc;
        wake.nr_llcs = to_u32(self.llcs.len());
        let prev_level = self.cpus[wake.prev_cpu as usize].level;
        let mut out = Placement::default();
        let mut env = self.env(masked_cpu);
        let waker = waker.map(|w| &self.tasks[w]);
        // SAFETY: all pointers point to live values of this Core or this frame; the C code touches
        // LLCs and CPUs only through `env`, with its bounds, and keeps no pointer. `waker` may be
        // null, which the C code tests.
        unsafe {
            slip_n_place(
                &self.params,
                &mut env,
                &self.tasks[wakee],
                waker,
                &wake,
                prev_level,
                &mut out,
            );
        }
        out
    }

    /// Records that a CPU became idle or busy.
    pub fn set_idle(&mut self, cpu: u32, idle: bool) {
        let c = self.cpus[cpu as usize];
        let llc = &mut self.llcs[c.llc as usize];
        // SAFETY: live, aligned structs; nothing is kept.
        unsafe { slip_n_cpu_set_idle(&self.params, llc, &c, idle as u32) };
    }

    /// Sets the queue length of an LLC to `nr_queued`.
    pub fn set_queued(&mut self, llc: u32, nr_queued: u32) {
        let l = &mut self.llcs[llc as usize];
        l.nr_queued = nr_queued;
        // SAFETY: live, aligned structs; nothing is kept.
        unsafe { slip_n_llc_update(&self.params, l) };
    }

    /// Runnable tasks per CPU of an LLC, scaled by 1024.
    pub fn llc_load(&self, llc: u32) -> u32 {
        // SAFETY: reads one live struct.
        unsafe { slip_n_llc_load(&self.llcs[llc as usize]) }
    }

    /// The slice that a task would get on an LLC now, ns.
    pub fn slice(&self, task: usize, llc: u32) -> u64 {
        // SAFETY: reads live structs.
        unsafe { slip_n_slice(&self.params, &self.tasks[task], &self.llcs[llc as usize]) }
    }

    /// Prepares a task to be queued on `llc`; returns its key there.
    pub fn on_runnable(&mut self, task: usize, llc: u32, now: u64) -> u64 {
        let slice = self.slice(task, llc);
        let domain = self.domain(self.tasks[task].domain, llc);
        let d = &mut self.domains[domain];
        let (t, l) = (&mut self.tasks[task], &mut self.llcs[llc as usize]);
        // SAFETY: live, aligned structs, all distinct; nothing is kept.
        unsafe {
            slip_n_on_runnable(&self.params, t, l, d, now);
            slip_n_queue_key(t, d, slice)
        }
    }

    /// The key that a task would have if it were queued on `llc`.
    pub fn key(&self, task: usize, llc: u32) -> u64 {
        let t = &self.tasks[task];
        let d = &self.domains[self.domain(t.domain, llc)];
        // SAFETY: reads live structs.
        unsafe { slip_n_queue_key(t, d, self.slice(task, llc)) }
    }

    /// Records that a task keeps its CPU because no other task wants it.
    pub fn on_kept(&mut self, task: usize) {
        let domain = self.domain(self.tasks[task].domain, self.tasks[task].llc);
        let (t, d) = (&mut self.tasks[task], &self.domains[domain]);
        // SAFETY: live, aligned structs; nothing is kept.
        unsafe { slip_n_on_kept(&self.params, t, d) };
    }

    /// Records that the running task continues for another slice, because it comes before the queued ones.
    pub fn on_turn(&mut self, task: usize) {
        // SAFETY: a live, aligned struct; nothing is kept.
        unsafe { slip_n_on_turn(&mut self.tasks[task]) };
    }

    /// Charges a task for the CPU time it has used, without accounting for a whole run.
    pub fn charge(&mut self, task: usize, exec_ns: u64) -> u64 {
        // SAFETY: a live, aligned struct; nothing is kept.
        unsafe { slip_n_charge(&mut self.tasks[task], exec_ns) }
    }

    /// Records a sync wake-up by the running task, which has used `exec_ns` of CPU time.
    pub fn on_sync_wake(&mut self, task: usize, exec_ns: u64) {
        // SAFETY: a live, aligned struct; nothing is kept.
        unsafe { slip_n_on_sync_wake(&mut self.tasks[task], exec_ns) };
    }

    /// Accounts for a task's activity since the last call, when it wakes up (`blocked`) or is queued
    /// again. It last ran on `cpu` and has used `exec_ns` of CPU time in total. Returns true if the hint
    /// behind its handoff was false.
    pub fn account(&mut self, task: usize, cpu: u32, exec_ns: u64, blocked: bool) -> bool {
        let id = self.cpus[cpu as usize].llc;
        let t = self.tasks[task];
        let from = self.domains[self.domain(t.domain, t.llc)];
        let domain = self.domain(t.domain, id);
        let d = &mut self.domains[domain];
        let (t, llc) = (&mut self.tasks[task], &mut self.llcs[id as usize]);
        // SAFETY: live, aligned structs, all distinct; nothing is kept.
        unsafe { slip_n_account(&self.params, t, id, llc, &from, d, exec_ns, blocked as u32) != 0 }
    }

    /// Whether a task may leave its LLC, and whether that is `saturated`.
    pub fn may_leave(&self, task: usize, saturated: bool, now: u64) -> bool {
        // SAFETY: reads live structs.
        unsafe { slip_n_may_leave(&self.params, &self.tasks[task], saturated as u32, now) != 0 }
    }

    /// One of two random LLCs other than `home`: the less loaded, or the more loaded.
    pub fn pick_two(&mut self, home: u32, rnd: u64, busiest: bool) -> Option<u32> {
        let (params, mut env) = (self.params, self.env(None));
        let n = to_u32(self.llcs.len());
        // SAFETY: `env` points into this Core and bounds every access.
        let far = unsafe { slip_n_pick_two(&params, &mut env, home, n, rnd, busiest as u32) };
        u32::try_from(far).ok()
    }

    /// Records a handoff to `cpu` by `waker`; true if the waker is trusted, so that the task goes into
    /// the CPU's own queue.
    pub fn handover_put(&mut self, cpu: u32, waker: usize, now: u64) -> bool {
        let c = &mut self.cpus[cpu as usize];
        let llc = &mut self.llcs[c.llc as usize];
        // SAFETY: live, aligned structs, all distinct; nothing is kept.
        unsafe { slip_n_handover_put(&self.params, llc, c, &mut self.tasks[waker], now) != 0 }
    }

    /// Whether the hints of a waker were honest so often that other CPUs cannot steal its handoffs.
    pub fn trusted(&self, task: usize) -> bool {
        // SAFETY: reads live structs.
        unsafe { slip_n_trusted(&self.params, &self.tasks[task]) != 0 }
    }

    /// At the tick of `task`, which runs on `cpu`: whether it should yield to the task that it handed off.
    pub fn wants_room(&self, task: usize, cpu: u32, now: u64) -> bool {
        let (t, c) = (&self.tasks[task], &self.cpus[cpu as usize]);
        // SAFETY: reads live structs.
        unsafe { slip_n_tick_wants_room(&self.params, t, c, now) != 0 }
    }

    /// Records that the handoff on `cpu` was taken.
    pub fn handover_taken(&mut self, cpu: u32) {
        let c = self.cpus[cpu as usize];
        // SAFETY: live, aligned structs; nothing is kept.
        unsafe { slip_n_handover_taken(&mut self.llcs[c.llc as usize], &c) };
    }

    /// At the tick: claims an idle CPU for waiting work, in this LLC or another.
    pub fn tick(&mut self, cpu: u32, now: u64, rnd: u64) -> Option<u32> {
        let c = self.cpus[cpu as usize];
        let n = to_u32(self.llcs.len());
        let params = self.params;
        let llc = self.llcs[c.llc as usize];
        let mut env = self.env(None);
        // SAFETY: live structs; `env` points into this Core and bounds every access.
        unsafe {
            let target = if slip_n_tick_wants_kick(&params, &llc, &c, now) != 0 {
                Some(c.llc)
            } else {
                u32::try_from(slip_n_tick_far(&params, &mut env, c.llc, n, rnd)).ok()
            };
            let mut idle = -1;
            if slip_n_claim_thread(&mut env, target?, &mut idle) != 0 {
                return Some(to_u32(idle));
            }
        }
        None
    }

    /// Claims an idle CPU of an LLC.
    pub fn claim_thread(&mut self, llc: u32) -> Option<u32> {
        let (mut env, mut idle) = (self.env(None), -1);
        // SAFETY: live structs; `env` points into this Core and bounds every access.
        let found = unsafe { slip_n_claim_thread(&mut env, llc, &mut idle) } != 0;
        found.then(|| to_u32(idle))
    }

    /// Whether another CPU may steal the handoff that waits on `victim`.
    pub fn may_steal(&self, victim: u32, now: u64) -> bool {
        // SAFETY: reads live structs.
        unsafe { slip_n_may_steal(&self.params, &self.cpus[victim as usize], now) != 0 }
    }

    /// The LLC from which an idle CPU of `home` should pull.
    pub fn pull_from(&mut self, home: u32, rnd: u64) -> Option<u32> {
        let (params, mut env) = (self.params, self.env(None));
        let n = to_u32(self.llcs.len());
        // SAFETY: `env` points into this Core and bounds every access.
        u32::try_from(unsafe { slip_n_pull_from(&params, &mut env, home, n, rnd) }).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PREV: u32 = 0;
    const WAKER: u32 = 1;

    /// One LLC of four CPUs, all idle except the waker's; task 0 wakes task 1.
    fn host() -> Core {
        let mut core = Core::new(Params::with_defaults(), 1, 4, 1);
        for cpu in [0, 2, 3] {
            core.set_idle(cpu, true);
        }
        core.add_task(100, WAKER);
        core.add_task(100, PREV);
        core
    }

    fn sync_wake(now: u64) -> Wake {
        Wake {
            now,
            waker_cpu: WAKER,
            prev_cpu: PREV,
            flags: WAKE_SYNC | WAKE_WAKER_OK | WAKE_PREV_OK,
            ..Wake::default()
        }
    }

    fn check_path(change: impl FnOnce(&mut Core, &mut Wake), path: &str, cpu: u32) {
        let (mut core, mut wake) = (host(), sync_wake(1_000));
        change(&mut core, &mut wake);
        let p = core.place(1, Some(0), wake, None);
        assert_eq!((COUNTERS[p.path as usize], p.cpu), (path, cpu));
    }

    #[test]
    fn sync_wakeup_takes_the_wakers_cpu_before_the_idle_previous_one() {
        check_path(|_, _| {}, "handoff", WAKER);
    }

    #[test]
    fn hand_over_needs_every_condition() {
        check_path(|_, w| w.flags &= !WAKE_SYNC, "prev_idle", PREV);
        check_path(|_, w| w.flags &= !WAKE_WAKER_OK, "prev_idle", PREV);
        check_path(|_, w| w.flags |= 2, "prev_idle", PREV); // exiting
        check_path(|_, w| w.waker_queued = 1, "prev_idle", PREV);
        check_path(|c, _| c.set_queued(0, 1), "prev_idle", PREV);
        check_path(|c, _| c.params.hand_off = 0, "prev_idle", PREV);
        check_path(|c, _| c.tasks[1].no_hand_off = 1, "prev_idle", PREV);
        check_path(|c, _| c.tasks[0].block_ns = 20_001, "prev_idle", PREV);
        check_path(|c, _| c.tasks[0].block_ns = 20_000, "handoff", WAKER);
    }

    #[test]
    fn hand_over_does_not_pile_tasks_up_on_a_busier_llc() {
        for (idle_at_home, path) in [(1, "handoff"), (2, "handoff"), (3, "prev_idle")] {
            // The wakee's LLC is CPUs 0 to 3; its waker runs on CPU 4 of 4 to 7, two of which idle.
            let mut core = Core::new(Params::with_defaults(), 2, 4, 1);
            core.add_task(100, 4);
            core.add_task(100, 0);
            core.tasks[1].runs_on_llc = core.params.residency_runs;
            (0..idle_at_home).for_each(|cpu| core.set_idle(cpu, true));
            for cpu in [5, 6] {
                core.set_idle(cpu, true);
            }
            let wake = Wake {
                waker_cpu: 4,
                ..sync_wake(1_000)
            };
            let p = core.place(1, Some(0), wake, None);
            assert_eq!(
                COUNTERS[p.path as usize], path,
                "{idle_at_home} idle at home"
            );
        }
    }

    #[test]
    fn placement_goes_down_its_list() {
        let busy = |c: &mut Core, cpus: &[u32]| cpus.iter().for_each(|&i| c.set_idle(i, false));
        let plain = |w: &mut Wake| w.flags = WAKE_PREV_OK;
        check_path(|_, w| plain(w), "prev_idle", 0);
        check_path(|c, w| (plain(w), busy(c, &[0])).1, "llc_core", 2);
        check_path(|c, w| (plain(w), busy(c, &[0, 2, 3])).1, "queue_llc", 0);
        let hog = |c: &mut Core| c.cpus[0].level = 2;
        check_path(
            |c, w| (plain(w), busy(c, &[0, 2, 3]), hog(c)).2,
            "preempt",
            0,
        );
    }

    #[test]
    fn saturation_has_two_thresholds() {
        let mut core = Core::new(Params::with_defaults(), 1, 8, 1);
        let state = |c: &Core| c.llcs[0].saturated;
        assert_eq!(state(&core), 1, "all CPUs busy");
        core.set_idle(0, true);
        assert_eq!(state(&core), 1, "12.5 % idle is between the thresholds");
        core.set_idle(1, true);
        assert_eq!(state(&core), 0, "25 % idle is above the upper one");
        core.set_idle(1, false);
        assert_eq!(state(&core), 0, "and stays so between them");
        core.set_idle(0, false);
        assert_eq!(state(&core), 1);
        core.set_queued(0, 8);
        assert_eq!(core.llcs[0].overloaded, 1, "a task a CPU waits");
        core.set_queued(0, 7);
        assert_eq!(core.llcs[0].overloaded, 1);
        core.set_queued(0, 0);
        assert_eq!(core.llcs[0].overloaded, 0);
    }

    #[test]
    fn liar_is_found_out_after_one_hand_over_and_forgiven_after_few() {
        let mut core = host();
        core.on_sync_wake(0, 1_000);
        assert!(!core.handover_put(WAKER, 0, 1_000), "no trust yet");
        assert!(
            core.account(0, WAKER, 501_000, true),
            "500 us is a false hint"
        );
        let refused = core.place(1, Some(0), sync_wake(501_000), None);
        assert_eq!((refused.path, refused.refused), (1, 1));
        core.set_idle(PREV, true);
        let mut honest = 0;
        while core.tasks[0].block_ns > core.params.wake_idle_ns {
            let exec_ns = 600_000 + honest * 10_000;
            core.on_sync_wake(0, exec_ns);
            assert!(!core.account(0, WAKER, exec_ns + 1_000, true));
            honest += 1;
        }
        assert!((2..=4).contains(&honest), "{honest} honest hints");
        assert_eq!(core.place(1, Some(0), sync_wake(700_000), None).path, 0);
    }

    #[test]
    fn trust_is_earned_by_honest_hints_and_lost_by_one_lie() {
        let mut core = host();
        let hint = |core: &mut Core, at: u64, took: u64| {
            core.on_sync_wake(0, at);
            let trusted = core.handover_put(WAKER, 0, at);
            let room = core.wants_room(0, WAKER, at + core.params.wake_idle_ns);
            assert_eq!(
                room, trusted,
                "only a handoff that cannot be stolen needs room at the tick"
            );
            core.account(0, WAKER, at + took, true);
            trusted
        };
        let after = core.params.trust_after as u64;
        for i in 0..after {
            assert!(!hint(&mut core, 1_000 + i * 100_000, 1_000), "hint {i}");
        }
        assert!(hint(&mut core, 1_000_000, 1_000));
        assert!(
            hint(&mut core, 2_000_000, 30_000),
            "the false hint itself is trusted"
        );
        assert!(!hint(&mut core, 3_000_000, 1_000));
    }

    #[test]
    fn task_stays_on_its_llc_for_the_minimum_of_runs() {
        let mut core = Core::new(Params::with_defaults(), 2, 2, 1);
        core.add_task(100, 0);
        for runs in 0..core.params.residency_runs {
            assert!(!core.may_leave(0, false, 1_000), "after {runs} runs");
            core.account(0, 0, 1_000, true);
        }
        assert!(core.may_leave(0, false, 1_000));
        core.account(0, 2, 2_000, true);
        assert!(
            !core.may_leave(0, false, 2_000),
            "a move starts the count again"
        );
        core.tasks[0].queued_at = 2_000;
        let patience = core.params.patience_ns;
        assert!(
            core.may_leave(0, false, 2_000 + patience),
            "but not forever"
        );
    }

    #[test]
    fn weights_divide_virtual_time() {
        let mut core = host();
        core.tasks[0].weight = 300;
        for task in [0, 1] {
            core.account(task, 0, 3_000_000, false);
        }
        assert_eq!(
            (core.tasks[0].vtime, core.tasks[1].vtime),
            (1_000_000, 3_000_000)
        );
    }

    #[test]
    fn bits_are_counted_as_the_machine_counts_them() {
        for x in [0, 1, 0x8000_0000_0000_0000, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(count_bits(x), x.count_ones());
            assert_eq!(lowest_bit(x), x.trailing_zeros());
        }
    }

    /// LLCs of 8 CPUs, of which this many are busy, in two nodes of three. All that two random choices find for
    /// LLC 0.
    fn picked(busy: [u32; 6], busiest: bool) -> std::collections::BTreeSet<u32> {
        let mut core = Core::new(Params::with_defaults(), 6, 8, 1);
        core.params.llcs_per_node = 3;
        for (llc, n) in core.llcs.iter_mut().zip(busy) {
            llc.idle_mask = 0xff & !((1u64 << n) - 1);
            llc.nr_queued = u32::from(n == 8);
        }
        let mut rnd = 1u64;
        let mut draw = || {
            rnd = rnd.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            core.pick_two(0, rnd, busiest)
        };
        (0..1_000).filter_map(|_| draw()).collect()
    }

    #[test]
    fn llcs_of_the_own_node_come_first() {
        // A little less load elsewhere is not worth leaving the node; much less is.
        assert_eq!(picked([8, 6, 6, 5, 5, 5], false), [1, 2].into());
        assert_eq!(picked([8, 6, 6, 5, 4, 5], false), [1, 2, 4].into());
        // An idle CPU is, whatever the load.
        assert_eq!(picked([8, 8, 8, 7, 7, 7], false), [1, 2, 3, 4, 5].into());
        // Likewise for a CPU that looks for work: where tasks wait.
        assert_eq!(picked([4, 8, 8, 8, 8, 8], true), [1, 2].into());
        assert_eq!(picked([4, 7, 7, 8, 7, 7], true), [1, 2, 3].into());
    }

    proptest! {
        #[test]
        fn placement_names_a_cpu_that_was_idle_and_claims_it(
            idle in prop::collection::vec(any::<u8>(), 4),
            flags in 0u32..32,
            (waker_cpu, prev_cpu) in (0u32..32, 0u32..32),
            (queued, waker_queued, runs, rnd) in (0u32..20, 0u32..2, 0u32..8, any::<u64>()),
        ) {
            let mut core = Core::new(Params::with_defaults(), 4, 8, 2);
            for cpu in 0..32 {
                core.set_idle(cpu, idle[cpu as usize / 8] >> (cpu % 8) & 1 == 1);
            }
            core.set_queued(1, queued);
            core.add_task(100, waker_cpu);
            core.add_task(100, prev_cpu);
            core.tasks[1].runs_on_llc = runs;
            let before: Vec<u64> = core.llcs.iter().map(|l| l.idle_mask).collect();
            let pinned = (flags & WAKE_MASKED != 0).then_some(prev_cpu);
            let wake = Wake { now: 5, rnd, waker_cpu, prev_cpu, waker_queued, flags, ..Wake::default() };
            let p = core.place(1, Some(0), wake, pinned);
            let after: Vec<u64> = core.llcs.iter().map(|l| l.idle_mask).collect();
            let claimed: u32 =
                before.iter().zip(&after).map(|(b, a)| (b & !a).count_ones()).sum();
            prop_assert!(before.iter().zip(&after).all(|(b, a)| a & !b == 0), "only claims");
            let (llc, bit) = (p.cpu as usize / 8, p.cpu % 8);
            match COUNTERS[p.path as usize] {
                "handoff" => {
                    prop_assert_eq!(p.cpu, waker_cpu);
                    prop_assert_eq!(flags & (WAKE_SYNC | 2 | WAKE_WAKER_OK), WAKE_SYNC | WAKE_WAKER_OK);
                    prop_assert_eq!(waker_queued, 0);
                    prop_assert_eq!(core.llcs[llc].saturated, 0);
                    prop_assert_eq!(core.llcs[llc].nr_queued, 0);
                    prop_assert_eq!(claimed, 0);
                }
                "queue_llc" | "queue_cpu" | "preempt" => prop_assert_eq!(claimed, 0),
                path => {
                    prop_assert_eq!(claimed, 1);
                    prop_assert!(before[llc] >> bit & 1 == 1 && after[llc] >> bit & 1 == 0);
                    if path == "far_idle" {
                        prop_assert!(runs >= 1, "a task that never ran there may not leave");
                        prop_assert_eq!(before[prev_cpu as usize / 8], 0);
                    } else {
                        prop_assert_eq!(llc as u32, prev_cpu / 8);
                    }
                }
            }
        }

        #[test]
        fn pick_two_never_picks_home(
            n in 2u32..20,
            per_node in 0u32..7,
            home in 0u32..20,
            rnd in any::<u64>(),
        ) {
            let mut core = Core::new(Params::with_defaults(), n, 1, 1);
            core.params.llcs_per_node = per_node;
            let home = home % n;
            for busiest in [false, true] {
                let far = core.pick_two(home, rnd, busiest).expect("there are others");
                prop_assert!(far < n && far != home);
            }
        }

        #[test]
        fn slice_stays_within_its_bounds(weight in 1u32..10_000, level in 0u32..3, queued in 0u32..1000) {
            let mut core = host();
            core.tasks[0].weight = weight;
            core.tasks[0].level = level;
            core.set_queued(0, queued);
            let slice = core.slice(0, 0);
            prop_assert!((core.params.slice_min_ns..=core.params.slice_max_ns).contains(&slice));
        }

        #[test]
        fn dispatch_takes_the_hand_over_first_and_then_the_smaller_key(
            (cpu_key, llc_key, prev_key) in (any::<u64>(), any::<u64>(), any::<u64>()),
            (has_handover, has_cpu, has_llc, has_prev) in (0u32..2, 0u32..2, 0u32..2, 0u32..2),
        ) {
            let heads = Heads { cpu_key, llc_key, prev_key, has_handover, has_cpu, has_llc, has_prev };
            let before = |a: u64, b: u64| (a.wrapping_sub(b) as i64) < 0;
            let llc_first = before(llc_key, cpu_key);
            // The running task continues only against others, and only if it comes before each.
            let prev_first = has_prev == 1
                && has_cpu + has_llc > 0
                && (has_cpu == 0 || before(prev_key, cpu_key))
                && (has_llc == 0 || before(prev_key, llc_key));
            let expected = match (has_handover, has_cpu, has_llc) {
                (1, ..) => Source::Handover,
                _ if prev_first => Source::Prev,
                (_, 1, 1) if llc_first => Source::Llc,
                (_, 1, _) => Source::Cpu,
                (_, _, 1) => Source::Llc,
                _ => Source::None,
            };
            prop_assert_eq!(choose(&heads), expected);
        }

        #[test]
        fn thieves_find_every_waiting_hand_over_but_their_own(mask in any::<u64>(), bit in 0u32..64) {
            let (mut left, mut found) = (mask, 0u64);
            loop {
                let next = next_handover(left, bit);
                if next == 64 {
                    break;
                }
                prop_assert!(next != bit && left >> next & 1 == 1);
                left &= !(1 << next);
                found |= 1 << next;
            }
            prop_assert_eq!(found, mask & !(1 << bit));
        }
    }
}
