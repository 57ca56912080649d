//! The policy core with the kernel's queues, arranged as in the BPF program, on one LLC: no CPU
//! idles while a task of its mask waits, shares follow weights, waits are bounded. Steps are a quarter of
//! a millisecond; a tick is every 4 ms, and slices end at ticks only, as on a kernel with 250 Hz.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;
use slipstream_cpusched::policy::{
    Core, DOMAINS, Heads, Params, Source, WAKE_MASKED, WAKE_PREV_OK, WAKE_SINGLE, Wake, choose,
};

const STEP: u64 = 250_000;
const STEPS_PER_TICK: u64 = 16;
const QUEUE_LLC: u32 = 7;
const PREEMPT: u32 = 6;

#[derive(Clone, Debug)]
struct Spec {
    mask: u32,
    weight: u32,
    /// Steps of computing and of sleeping; a hog never sleeps.
    cycle: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Running(usize),
    Queued,
    Sleeping,
}

struct Host {
    core: Core,
    specs: Vec<Spec>,
    now: u64,
    state: Vec<State>,
    exec: Vec<u64>,
    last_cpu: Vec<usize>,
    /// Steps left in the current part of a cycle.
    left: Vec<u64>,
    waiting_since: Vec<u64>,
    longest_wait: Vec<u64>,
    llc: BTreeSet<(i64, usize)>,
    own: Vec<BTreeSet<(i64, usize)>>,
    local: Vec<VecDeque<usize>>,
    /// The task that runs, and the end of its slice.
    running: Vec<Option<(usize, u64)>>,
    /// A real-time task has the CPU, or it is offline.
    taken: Vec<bool>,
    idle_beside_work: Vec<u64>,
}

impl Host {
    fn new(cpus: usize, specs: Vec<Spec>) -> Host {
        let n = specs.len();
        let mut core = Core::new(Params::with_defaults(), 1, cpus as u32, 1);
        let all = (1u32 << cpus) - 1;
        for (task, s) in specs.iter().enumerate() {
            core.add_task(s.weight, s.mask.trailing_zeros());
            let domain = match s.mask {
                m if m == all => 0,
                m if m.is_power_of_two() => DOMAINS + m.trailing_zeros(),
                // Each mask has its own domain: there are fewer masks than domains.
                m => 1 + m % (DOMAINS - 1),
            };
            core.set_domain(task, domain);
        }
        (0..cpus as u32).for_each(|cpu| core.set_idle(cpu, true));
        let mut host = Host {
            core,
            now: 1_000_000_000,
            state: vec![State::Sleeping; n],
            exec: vec![0; n],
            last_cpu: specs
                .iter()
                .map(|s| s.mask.trailing_zeros() as usize)
                .collect(),
            left: vec![0; n],
            waiting_since: vec![0; n],
            longest_wait: vec![0; n],
            llc: BTreeSet::new(),
            own: vec![BTreeSet::new(); cpus],
            local: vec![VecDeque::new(); cpus],
            running: vec![None; cpus],
            taken: vec![false; cpus],
            idle_beside_work: vec![0; cpus],
            specs,
        };
        (0..n).for_each(|task| host.wake(task));
        host
    }

    fn may(&self, task: usize, cpu: usize) -> bool {
        self.specs[task].mask >> cpu & 1 == 1
    }

    fn is_idle(&self, cpu: usize) -> bool {
        self.core.llcs[0].idle_mask >> cpu & 1 == 1
    }

    fn idle_cpu_of(&self, task: usize) -> Option<usize> {
        (0..self.running.len()).find(|&cpu| self.may(task, cpu) && self.is_idle(cpu))
    }

    fn single(&self, task: usize) -> bool {
        self.core.tasks[task].domain >= DOMAINS
    }

    fn wake(&mut self, task: usize) {
        let cpu = self.last_cpu[task];
        self.waiting_since[task] = self.now;
        self.left[task] = self.specs[task].cycle.map_or(u64::MAX, |(work, _)| work);
        self.core.account(task, cpu as u32, self.exec[task], true);
        if self.single(task) {
            return self.enqueue(task, true, None);
        }
        let mut flags = WAKE_PREV_OK;
        let masked = if self.core.tasks[task].domain == 0 {
            None
        } else {
            flags |= WAKE_MASKED;
            self.idle_cpu_of(task).map(|cpu| cpu as u32)
        };
        if self.single(task) {
            flags |= WAKE_SINGLE;
        }
        let wake = Wake {
            now: self.now,
            waker_cpu: cpu as u32,
            prev_cpu: cpu as u32,
            flags,
            ..Wake::default()
        };
        let p = self.core.place(task, None, wake, masked);
        if p.path == PREEMPT || p.path >= QUEUE_LLC {
            self.enqueue(task, true, (p.path == PREEMPT).then_some(cpu));
        } else {
            self.state[task] = State::Queued;
            self.local[p.cpu as usize].push_back(task);
            self.schedule(p.cpu as usize, None);
        }
    }

    /// `ops.enqueue`.
    fn enqueue(&mut self, task: usize, woken: bool, preempt: Option<usize>) {
        let cpu = self.last_cpu[task];
        let key = self.core.on_runnable(task, 0, self.now) as i64;
        self.state[task] = State::Queued;
        let kick = if self.single(task) {
            self.own[cpu].insert((key, task));
            let hog = woken && self.core.tasks[task].level == 0 && self.core.cpus[cpu].level == 2;
            (self.is_idle(cpu) || hog).then_some(cpu)
        } else {
            self.llc.insert((key, task));
            self.core.set_queued(0, self.llc.len() as u32);
            self.idle_cpu_of(task).or(preempt)
        };
        if let Some(cpu) = kick {
            self.interrupt(cpu);
        }
    }

    /// A kick: the CPU looks for work; its running task competes.
    fn interrupt(&mut self, cpu: usize) {
        if !self.taken[cpu] {
            let prev = self.running[cpu].take().map(|(task, _)| task);
            self.schedule(cpu, prev);
        }
    }

    fn first(&self, cpu: usize) -> Option<(i64, usize)> {
        self.llc.iter().find(|e| self.may(e.1, cpu)).copied()
    }

    /// The kernel's pick and `ops.dispatch`; `prev` ran until now and could continue.
    fn schedule(&mut self, cpu: usize, prev: Option<usize>) {
        let mut heads = Heads::default();
        let (own, shared) = (self.own[cpu].first().copied(), self.first(cpu));
        if let Some(task) = prev {
            self.core.account(task, cpu as u32, self.exec[task], false);
            heads.prev_key = self.core.key(task, 0);
            heads.has_prev = 1;
        }
        if let Some((key, _)) = own {
            (heads.has_cpu, heads.cpu_key) = (1, key as u64);
        }
        if let Some((key, _)) = shared {
            (heads.has_llc, heads.llc_key) = (1, key as u64);
        }
        let mut next = self.local[cpu].pop_front();
        if next.is_none() {
            next = match choose(&heads) {
                Source::Cpu => own.map(|e| {
                    self.own[cpu].remove(&e);
                    e.1
                }),
                Source::Llc => shared.map(|e| {
                    self.llc.remove(&e);
                    e.1
                }),
                Source::Prev => {
                    if let Some(task) = prev {
                        self.core.on_turn(task);
                    }
                    prev
                }
                Source::Handover | Source::None => {
                    if let Some(task) = prev {
                        self.core.on_kept(task);
                    }
                    prev
                }
            };
            self.core.set_queued(0, self.llc.len() as u32);
        }
        let Some(task) = next else {
            self.core.set_idle(cpu as u32, true);
            return;
        };
        self.core.set_idle(cpu as u32, false);
        let slice = self.core.slice(task, 0);
        self.running[cpu] = Some((task, self.now + slice));
        if next != prev {
            let waited = self.now - self.waiting_since[task];
            self.longest_wait[task] = self.longest_wait[task].max(waited);
            self.state[task] = State::Running(cpu);
            self.last_cpu[task] = cpu;
            if let Some(prev) = prev {
                self.waiting_since[prev] = self.now;
                self.enqueue(prev, false, None);
            }
        }
    }

    /// A real-time task takes the CPU, or leaves it.
    fn set_taken(&mut self, cpu: usize, taken: bool) {
        self.taken[cpu] = taken;
        if !taken {
            return self.schedule(cpu, None);
        }
        self.core.set_idle(cpu as u32, false);
        let back = self.running[cpu].take().map(|(task, _)| task);
        for task in back.into_iter().chain(std::mem::take(&mut self.local[cpu])) {
            self.core.account(task, cpu as u32, self.exec[task], false);
            self.waiting_since[task] = self.now;
            self.enqueue(task, false, None);
        }
    }

    fn step(&mut self, step: u64) {
        self.now += STEP;
        for cpu in 0..self.running.len() {
            let Some((task, slice_ends)) = self.running[cpu] else {
                continue;
            };
            self.exec[task] += STEP;
            self.left[task] = self.left[task].saturating_sub(1);
            let tick = (step + cpu as u64).is_multiple_of(STEPS_PER_TICK);
            if tick {
                self.core.cpus[cpu].level = self.core.tasks[task].level;
            }
            if self.left[task] == 0 {
                self.running[cpu] = None;
                self.state[task] = State::Sleeping;
                self.left[task] = self.specs[task].cycle.map_or(0, |(_, sleep)| sleep);
                self.schedule(cpu, None);
            } else if tick && self.now >= slice_ends {
                self.interrupt(cpu);
            }
        }
        for task in 0..self.specs.len() {
            if self.state[task] == State::Sleeping {
                self.left[task] = self.left[task].saturating_sub(1);
                if self.left[task] == 0 {
                    self.wake(task);
                }
            }
        }
        for cpu in 0..self.running.len() {
            let works =
                (0..self.specs.len()).any(|t| self.state[t] == State::Queued && self.may(t, cpu));
            let idles = self.running[cpu].is_none() && !self.taken[cpu];
            let beside = &mut self.idle_beside_work[cpu];
            *beside = if works && idles { *beside + 1 } else { 0 };
            assert!(
                *beside <= STEPS_PER_TICK,
                "CPU {cpu} idles for more than a tick while a task of its mask waits"
            );
        }
    }

    /// Runs for `ms` milliseconds; returns the CPU time of each task, in CPUs.
    fn run(&mut self, ms: u64) -> Vec<f64> {
        let before = self.exec.clone();
        let steps = ms * 1_000_000 / STEP;
        (1..=steps).for_each(|s| self.step(s));
        let of = |(e, b): (&u64, &u64)| (e - b) as f64 / (steps * STEP) as f64;
        self.exec.iter().zip(&before).map(of).collect()
    }
}

fn hog(mask: u32, weight: u32) -> Spec {
    Spec {
        mask,
        weight,
        cycle: None,
    }
}

fn task(cpus: u32) -> impl Strategy<Value = Spec> {
    let mask = prop_oneof![
        Just((1u32 << cpus) - 1),
        (0..cpus).prop_map(|c| 1 << c),
        1u32..1 << cpus
    ];
    let weight = prop_oneof![Just(100u32), 10u32..1000];
    let cycle = prop_oneof![Just(None), (1u64..40, 1u64..80).prop_map(Some)];
    (mask, weight, cycle).prop_map(|(mask, weight, cycle)| Spec {
        mask,
        weight,
        cycle,
    })
}

#[test]
fn a_free_hog_does_not_spoil_the_shares_of_pinned_ones() {
    for (heavy, light) in [(932, 100), (100, 1), (300, 100)] {
        let mut host = Host::new(4, vec![hog(2, heavy), hog(2, light), hog(15, 100)]);
        host.run(500);
        let got = host.run(4_000);
        let due = f64::from(heavy) / f64::from(heavy + light);
        assert!(
            (got[0] - due).abs() < 0.03,
            "{heavy}:{light}: {got:?}, {due} is due"
        );
        assert!(got[2] > 0.99, "{got:?}");
    }
}

#[test]
fn weights_hold_on_all_cpus() {
    let specs = (0..8)
        .map(|i| hog(15, if i < 4 { 100 } else { 11 }))
        .collect();
    let mut host = Host::new(4, specs);
    host.run(500);
    let got = host.run(4_000);
    let heavy: f64 = got[..4].iter().sum();
    assert!((heavy / 4.0 - 100.0 / 111.0).abs() < 0.03, "{got:?}");
}

#[test]
fn tasks_of_a_mask_use_all_its_cpus_when_some_end() {
    let mut specs = vec![hog(3, 100); 4];
    specs.push(Spec {
        mask: 3,
        weight: 100,
        cycle: Some((4, 8)),
    });
    let mut host = Host::new(4, specs);
    let got = host.run(1_000);
    assert!((got.iter().sum::<f64>() - 2.0).abs() < 0.01, "{got:?}");
}

#[test]
fn a_sleeper_is_not_late_beside_hogs_of_its_mask() {
    let mut specs = vec![hog(3, 100); 8];
    specs.push(Spec {
        mask: 3,
        weight: 100,
        cycle: Some((1, 4)),
    });
    let mut host = Host::new(4, specs);
    host.run(500);
    host.longest_wait[8] = 0;
    host.run(2_000);
    // The running task's level is known from the last tick: two ticks.
    assert!(
        host.longest_wait[8] <= 8_000_000,
        "{} ns",
        host.longest_wait[8]
    );
}

#[test]
fn a_real_time_task_does_not_hold_up_tasks_of_several_cpus() {
    let mut host = Host::new(4, vec![hog(6, 100); 4]);
    host.run(100);
    host.set_taken(1, true);
    let got = host.run(2_000);
    assert!(got.iter().all(|&g| (g - 0.25).abs() < 0.01), "{got:?}");
    host.set_taken(1, false);
    host.run(100);
    let got = host.run(2_000);
    assert!(got.iter().all(|&g| (g - 0.5).abs() < 0.02), "{got:?}");
}

proptest! {
    #![proptest_config(crate::cases())]

    /// `Host::step` asserts that no CPU idles for longer than a tick while a task of its mask waits.
    #[test]
    fn no_cpu_idles_beside_a_task_of_its_mask(
        specs in prop::collection::vec(task(5), 1..24),
        taken in prop::collection::vec((0usize..5, any::<bool>()), 0..12),
    ) {
        let mut host = Host::new(5, specs);
        for (cpu, take) in taken {
            host.run(20);
            // CPU 0 stays: otherwise a task bound to one CPU may have none, which is no error of the policy.
            if cpu > 0 && host.taken[cpu] != take {
                host.set_taken(cpu, take);
            }
        }
        host.run(200);
    }

    /// Hogs of one mask share the mask's CPU time by their weights, whatever runs elsewhere. This also
    /// holds if other masks overlap theirs in part, unless a hog has nearly a whole CPU: a task
    /// that is due a whole one, or more, shares it occasionally.
    #[test]
    fn hogs_of_one_mask_share_by_weight(
        (mask, weights) in (1u32..16, prop::collection::vec(50u32..400, 2..6)),
        others in prop::collection::vec((1u32..16, 50u32..400), 0..8),
    ) {
        let n = weights.len();
        let mut specs: Vec<Spec> = weights.iter().map(|&w| hog(mask, w)).collect();
        specs.extend(others.iter().map(|&(m, w)| hog(m, w)));
        let mut host = Host::new(4, specs);
        host.run(1_000);
        let got = host.run(8_000);
        let uncapped: Vec<usize> = (0..n).filter(|&i| got[i] < 0.85).collect();
        let per_weight = |i: &usize| got[*i] / f64::from(weights[*i]);
        let most = uncapped.iter().map(per_weight).fold(0.0, f64::max);
        let least = uncapped.iter().map(per_weight).fold(f64::MAX, f64::min);
        prop_assert!(uncapped.len() < 2 || most <= least * 1.06, "{got:?} of {weights:?}, mask {mask:b}, {others:?}");
    }

    /// No task waits for longer than two rounds, plus its earlier debt and the heaviest task's credit. In
    /// a round every other task has its longest slice and half a tick as often as its weight requires.
    #[test]
    fn waits_are_bounded(
        specs in prop::collection::vec(task(4), 1..16),
    ) {
        let mut host = Host::new(4, specs.clone());
        host.run(500);
        host.longest_wait.fill(0);
        host.run(3_000);
        let total: u64 = specs.iter().map(|s| u64::from(s.weight)).sum();
        let heaviest = specs.iter().map(|s| u64::from(s.weight)).max().unwrap_or(0);
        for (i, s) in specs.iter().enumerate() {
            let rounds = 28_000_000 * (2 + total / u64::from(s.weight));
            let bound = rounds + 4_800_000_000 / u64::from(s.weight) + 500_000 * heaviest;
            prop_assert!(host.longest_wait[i] <= bound, "task {i} waited {} of {bound} ns: {specs:?}", host.longest_wait[i]);
        }
    }
}
