//! Guarantees of the scheduler, on hosts with masks, weights, cgroups, real-time tasks and CPUs that
//! go offline: the BPF program as the kernel calls it, and also the model of EEVDF if both must hold.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use slipstream_cpusched::machine::{Costs, CpuMask, Machine, Mechanism};
use slipstream_cpusched::policy::Params;
use slipstream_cpusched::result::{GroupResult, RunResult};
use slipstream_cpusched::sched::SchedulerKind;
use slipstream_cpusched::sim;
use slipstream_cpusched::workload::{Hotplug, Op, RealTime, Span, Workload};

const MS: u64 = 1_000_000;
/// A tick, plus the 1 ms interval of the checks.
const TICK: u64 = 5 * MS;
const BOTH: [SchedulerKind; 2] = [SchedulerKind::Eevdf, SchedulerKind::Slipstream];

fn machine(llcs: u32, cpus_per_llc: u32) -> Machine {
    Machine {
        llcs,
        cpus_per_llc,
        threads_per_core: 1,
    }
}

fn run_seed(
    m: Machine,
    w: &Workload,
    kind: SchedulerKind,
    warmup: u64,
    ms: u64,
    seed: u64,
) -> RunResult {
    let sched = kind.build(m, Params::with_defaults());
    let costs = Costs::bare_metal();
    sim::run(m, &costs, w, sched, seed, warmup * MS, ms * MS, None).expect("the workload is sound")
}

fn run(m: Machine, w: &Workload, kind: SchedulerKind, warmup: u64, ms: u64) -> RunResult {
    run_seed(m, w, kind, warmup, ms, 1)
}

fn group<'r>(r: &'r RunResult, name: &str) -> &'r GroupResult {
    r.groups
        .iter()
        .find(|g| g.name == name)
        .expect("a group's name")
}

/// CPU time of a group, in CPUs.
fn cpus(r: &RunResult, name: &str) -> f64 {
    group(r, name).run_ns as f64 / r.measured_ns as f64
}

/// `n` hogs of a mask, of which those created on CPU `first` end after 100 ms.
fn leaving(n: u32, mask: &CpuMask, first: u32, home: impl Fn(u32) -> u32) -> Workload {
    let mut w = Workload::default();
    for i in 0..n {
        let at = home(i);
        w.add_hog("stays", 100, mask.clone(), at);
        if at == first {
            let t = w.tasks.last_mut().unwrap();
            t.script = [Op::Run(Span::Fixed(100 * MS)), Op::Exit].into();
        }
    }
    w
}

#[test]
fn cpus_of_a_mask_that_become_free_are_used() {
    let m = machine(1, 4);
    for kind in BOTH {
        let w = leaving(4, &CpuMask::of([0, 1]), 0, |i| i % 2);
        let r = run(m, &w, kind, 1_000, 1_000);
        let used = cpus(&r, "stays");
        assert!((used - 2.0).abs() < 0.02, "{}: {used} of 2", kind.name());

        let w = leaving(9, &CpuMask::of([0, 1, 2]), 0, |i| i % 3);
        let r = run(m, &w, kind, 1_000, 1_000);
        let used = cpus(&r, "stays");
        assert!((used - 3.0).abs() < 0.03, "{}: {used} of 3", kind.name());
    }
}

#[test]
fn sleeper_beside_hogs_of_its_mask_is_not_kept_waiting() {
    let m = machine(1, 4);
    let mask = CpuMask::of([0, 1]);
    for kind in BOTH {
        let mut w = Workload::default();
        for i in 0..8 {
            w.add_hog("hog", 100, mask.clone(), i % 2);
        }
        let (sleep, work) = (Span::Fixed(MS), Span::Fixed(20_000));
        w.add_sleeper("sleeper", sleep, work, mask.clone(), 0);
        let r = run(m, &w, kind, 200, 1_000);
        let wake = &group(&r, "sleeper").wake;
        let (p50, max) = (wake.value_at_quantile(0.5), wake.max());
        assert!(max < 20 * MS, "{}: {max} ns", kind.name());
        // EEVDF in the virtual machine: 0.31 ms. Its model waits for a tick, as it preempts no task.
        if kind == SchedulerKind::Slipstream {
            assert!(p50 < MS, "{p50} ns");
        }
    }
}

/// Whenever one of the early tasks sleeps, a light one gets its CPU for a moment, in which its virtual time
/// passes a hundred times as fast as that of the others. They must not keep their CPUs for as long
/// as it takes to catch up, once one more task wants a share.
#[test]
fn task_that_comes_later_has_its_share() {
    let m = machine(1, 4);
    let mut w = Workload::default();
    for i in 0..3 {
        w.add_hog("early", 100, CpuMask::ALL, i);
    }
    let (sleep, work) = (Span::Fixed(2 * MS), Span::Fixed(60 * MS));
    w.add_sleeper("early", sleep, work, CpuMask::ALL, 3);
    w.add_hog("light", 1, CpuMask::ALL, 3);
    let (sleep, work) = (Span::Fixed(1_000 * MS), Span::Fixed(60_000 * MS));
    w.add_sleeper("late", sleep, work, CpuMask::ALL, 3);
    let r = run(m, &w, SchedulerKind::Slipstream, 1_500, 2_000);
    let (early, late) = (cpus(&r, "early") / 4.0, cpus(&r, "late"));
    assert!((early - 0.8).abs() < 0.02, "early ones {early}");
    assert!((late - 0.8).abs() < 0.02, "late one {late}");
}

#[test]
fn wakee_whose_mask_lost_a_cpu_is_not_lost() {
    let m = machine(1, 4);
    for kind in BOTH {
        let mut w = Workload::pairs(m, 1, 1, Mechanism::Pipe, Span::Fixed(0));
        w.tasks[0].mask = CpuMask::of([1, 2, 3]);
        w.tasks[1].mask = CpuMask::of([0]);
        w.hotplug = vec![Hotplug {
            cpu: 3,
            at_ns: 100 * MS,
            online: false,
        }];
        let r = run(m, &w, kind, 200, 1_000);
        assert!(r.requests > 10_000, "{}: {}", kind.name(), r.requests);
        for g in &r.groups {
            assert!(g.wait_max_ns < TICK, "{}: {}", kind.name(), g.wait_max_ns);
        }
    }
}

/// The kernel passes the CPU on which a task last ran as its previous one, also when that CPU has gone
/// offline since and the program was loaded without it.
#[test]
fn task_that_slept_while_its_cpu_went_offline_is_placed() {
    for m in [machine(1, 4), machine(2, 4)] {
        let mut w = Workload::default();
        for cpu in 0..m.cpus() {
            let (sleep, work) = (Span::Fixed(20 * MS), Span::Fixed(MS));
            w.add_sleeper("free", sleep, work, CpuMask::ALL, cpu);
        }
        w.add_hogs(m, m.cpus());
        w.hotplug = vec![Hotplug {
            cpu: m.cpus() - 1,
            at_ns: 110 * MS,
            online: false,
        }];
        let r = run(m, &w, SchedulerKind::Slipstream, 100, 500);
        let waited = group(&r, "free").wait_max_ns;
        assert!(waited < 50 * MS, "{waited} ns");
    }
}

#[test]
fn cpu_that_returns_is_used_again() {
    let m = machine(2, 2);
    for kind in BOTH {
        let mut w = Workload::default();
        w.add_hogs(m, 4);
        w.hotplug = [(100, false), (200, true)]
            .map(|(ms, online)| Hotplug {
                cpu: 3,
                at_ns: ms * MS,
                online,
            })
            .into();
        let r = run(m, &w, kind, 400, 500);
        assert!(r.utilization > 0.98, "{}: {}", kind.name(), r.utilization);
    }
}

/// Two hogs of one CPU with these weights, and a hog that may run anywhere.
fn check_pair(kind: SchedulerKind, weights: (u32, u32)) {
    let mut w = Workload::default();
    w.add_hog("heavy", weights.0, CpuMask::of([1]), 1);
    w.add_hog("light", weights.1, CpuMask::of([1]), 1);
    w.add_hog("free", 100, CpuMask::ALL, 0);
    let r = run(machine(1, 4), &w, kind, 500, 4_000);
    let (heavy, light) = (cpus(&r, "heavy"), cpus(&r, "light"));
    let due = f64::from(weights.0) / f64::from(weights.0 + weights.1);
    let share = heavy / (heavy + light);
    assert!(
        (share - due).abs() < 0.03,
        "{}: {share}, due {due}",
        kind.name()
    );
    assert!((heavy + light - 1.0).abs() < 0.02, "one CPU");
    assert!(cpus(&r, "free") > 0.98, "{}", kind.name());
}

#[test]
fn weights_of_one_cpu_hold_beside_a_free_hog() {
    for kind in BOTH {
        // Nice -10 and 0, 0 and 19, 0 and 3 (sched_prio_to_weight over 1024, times 100).
        check_pair(kind, (932, 100));
        check_pair(kind, (100, 1));
        check_pair(kind, (100, 51));
    }
}

#[test]
fn weights_hold_on_all_cpus() {
    let m = machine(1, 4);
    for kind in BOTH {
        let mut w = Workload::default();
        for i in 0..4 {
            w.add_hog("nice 0", 100, CpuMask::ALL, i);
            w.add_hog("nice 10", 11, CpuMask::ALL, i);
        }
        let r = run(m, &w, kind, 500, 4_000);
        let share = cpus(&r, "nice 0") / 4.0;
        assert!((share - 0.903).abs() < 0.03, "{}: {share}", kind.name());
    }
}

/// Tasks of two weights in two LLCs, in four arrangements at the start. No CPU ever idles, so that nothing but
/// the balance by what they are due moves them.
#[test]
fn weights_hold_between_llcs() {
    for (per_llc, n) in [(2, 4), (4, 4), (4, 8)] {
        let m = machine(2, per_llc);
        for first in [0, n / 4, n / 2 + 1, n] {
            let mut w = Workload::default();
            for i in 0..n {
                // `first` of the heavy tasks start on LLC 0, and as many light ones on LLC 1.
                let (heavy, light) = if i < first {
                    (0, per_llc)
                } else {
                    (per_llc, 0)
                };
                w.add_hog("nice 0", 100, CpuMask::ALL, heavy + i % per_llc);
                w.add_hog("nice 10", 11, CpuMask::ALL, light + i % per_llc);
            }
            // Due: the light ones' part of all CPUs, unless the heavy ones could not use the rest.
            let all = f64::from(2 * per_llc);
            let due = (100.0 / 111.0 * all).min(f64::from(n));
            let r = run(m, &w, SchedulerKind::Slipstream, 1_000, 4_000);
            let (used, light) = (cpus(&r, "nice 0"), cpus(&r, "nice 10"));
            assert!(used + light > 0.98 * all, "all CPUs are used");
            assert!(
                (used / due - 1.0).abs() < 0.02,
                "{n} on {per_llc}: {used} of {due} from {first}"
            );
        }
    }
}

/// Five hogs on two LLCs of a CPU each: no distribution is even, so they take turns.
#[test]
fn tasks_that_cannot_be_spread_evenly_take_turns_between_llcs() {
    let m = machine(2, 1);
    let mut w = Workload::default();
    for i in 0..5 {
        w.add_hog(&i.to_string(), 100, CpuMask::ALL, i % 2);
    }
    let r = run(m, &w, SchedulerKind::Slipstream, 1_000, 4_000);
    for i in 0..5 {
        let used = cpus(&r, &i.to_string());
        assert!((used - 0.4).abs() < 0.012, "hog {i} used {used}");
    }
}

#[test]
fn groups_weights_hold_in_the_model_of_eevdf() {
    let m = machine(1, 4);
    let mut w = Workload::default();
    for i in 0..16 {
        let name = if i < 8 { "heavy" } else { "light" };
        w.add_hog(name, 100, CpuMask::ALL, i % 4);
        w.tasks.last_mut().unwrap().cgroup = Some(u32::from(i >= 8));
    }
    w.cgroups = vec![900, 100];
    let r = run(m, &w, SchedulerKind::Eevdf, 500, 4_000);
    let share = cpus(&r, "heavy") / 4.0;
    assert!((share - 0.9).abs() < 0.03, "{share}");
}

#[test]
fn real_time_task_leaves_masked_tasks_their_other_cpus() {
    let m = machine(1, 4);
    for kind in BOTH {
        let mut w = Workload::default();
        for i in 0..4 {
            w.add_hog("masked", 100, CpuMask::of([1, 2]), 1 + i % 2);
        }
        w.real_time = vec![RealTime {
            cpu: 1,
            from_ns: 50 * MS,
            run_ns: 8_000 * MS,
            period_ns: 0,
        }];
        let r = run(m, &w, kind, 200, 2_000);
        let used = cpus(&r, "masked");
        assert!((used - 1.0).abs() < 0.02, "{}: {used}", kind.name());
        let waited = group(&r, "masked").wait_max_ns;
        assert!(waited < 200 * MS, "{}: {waited} ns", kind.name());
    }
}

/// A real-time task that comes every few milliseconds preempts tasks in the middle of their slices. The one
/// that it preempts must not have the CPU back ahead of all others, again and again.
#[test]
fn real_time_task_that_comes_often_favors_nobody() {
    let m = machine(1, 4);
    let masks = [CpuMask::of([1]), CpuMask::of([0, 1]), CpuMask::ALL];
    for (mask, interrupted) in masks.iter().flat_map(|mask| [(mask, 1), (mask, 4)]) {
        let homes: Vec<u32> = mask.iter(m.cpus()).collect();
        let mut w = Workload::default();
        for (i, home) in homes.iter().chain(&homes).enumerate() {
            w.add_hog(&i.to_string(), 100, mask.clone(), *home);
        }
        w.real_time = homes
            .iter()
            .take(interrupted)
            .map(|&cpu| RealTime {
                cpu,
                from_ns: (20 + u64::from(cpu)) * MS,
                run_ns: MS / 10,
                period_ns: 4 * MS,
            })
            .collect();
        let r = run(m, &w, SchedulerKind::Slipstream, 500, 2_000);
        for i in 0..w.tasks.len() {
            let used = cpus(&r, &i.to_string());
            assert!((used - 0.49).abs() < 0.03, "task {i} used {used}");
        }
    }
}

/// Each burst of a real-time task wakes its CPU from idle, or interrupts a task there. Tasks that wait in
/// the other LLC, whose CPUs are all busy, must not be moved to a CPU that is about to be taken.
#[test]
fn real_time_task_that_wakes_an_idle_cpu_keeps_no_task_there() {
    let m = machine(2, 3);
    let mut w = Workload::default();
    for i in 0..6 {
        let (sleep, work) = (Span::Exp(2 * MS), Span::Exp(MS));
        w.add_sleeper("free", sleep, work, CpuMask::ALL, i % 3);
    }
    w.real_time = (0..2)
        .map(|i| RealTime {
            cpu: 4 + i,
            from_ns: (20 + 7 * u64::from(i)) * MS,
            run_ns: 12 * MS,
            period_ns: 17 * MS,
        })
        .collect();
    let r = run(m, &w, SchedulerKind::Slipstream, 0, 10_000);
    assert!(
        r.idle_beside_work_ns <= TICK,
        "a task waited {} ns while a CPU was idle",
        r.idle_beside_work_ns
    );
}

/// After a long real-time run, tasks that are woken for an idle CPU of another LLC wait in that LLC's queue.
/// The clock there is ahead: light tasks have competed there alone. That must not become a debt.
#[test]
fn task_woken_for_another_llc_brings_no_debt() {
    let m = machine(2, 1);
    let mut w = Workload::default();
    for _ in 0..2 {
        w.add_hog("early", 10, CpuMask::ALL, 1);
        let t = w.tasks.last_mut().unwrap();
        t.script = [Op::Run(Span::Fixed(400 * MS)), Op::Exit].into();
    }
    w.add_hog("bound", 100, CpuMask::of([0]), 0);
    for _ in 0..2 {
        let (sleep, work) = (Span::Fixed(1_300 * MS), Span::Fixed(60_000 * MS));
        w.add_sleeper("late", sleep, work, CpuMask::ALL, 1);
    }
    let (sleep, work) = (Span::Fixed(1_200 * MS), Span::Fixed(MS));
    w.add_sleeper("sleeper", sleep, work, CpuMask::ALL, 0);
    w.real_time = vec![RealTime {
        cpu: 0,
        from_ns: 20 * MS,
        run_ns: 1_000 * MS,
        period_ns: 0,
    }];
    let r = run(m, &w, SchedulerKind::Slipstream, 0, 8_000);
    let waited = group(&r, "sleeper").wait_max_ns;
    assert!(waited < 30 * MS, "{waited} ns");
}

#[test]
fn benchmark_of_futexes_loses_no_task() {
    for m in [machine(1, 4), machine(2, 4)] {
        for load in [0.5, 0.7, 0.9, 1.0] {
            let w = Workload::schbench_closed(m, 1, Span::Exp(500_000), load);
            let requests = |kind| {
                let r = run(m, &w, kind, 100, 1_000);
                let longest = r.groups.iter().map(|g| g.wait_max_ns).max().unwrap();
                assert!(longest < 50 * MS, "{} at {load}: {longest} ns", kind.name());
                r.requests as f64
            };
            let (eevdf, ours) = (
                requests(SchedulerKind::Eevdf),
                requests(SchedulerKind::Slipstream),
            );
            // EEVDF's model sees every queue at no cost; 3 % fewer requests in 2 LLCs are usual.
            assert!(ours > 0.9 * eevdf, "{ours} against {eevdf} at {load}");
        }
    }
}

/// A random host: LLCs, hogs and sleepers of random masks and weights, real-time tasks.
#[derive(Clone, Debug)]
struct Host {
    machine: Machine,
    tasks: Vec<(u64, u32, bool)>,
    real_time: Vec<(u32, u64)>,
    away: Option<u32>,
    seed: u64,
}

fn host() -> impl Strategy<Value = Host> {
    let tasks = prop::collection::vec((any::<u64>(), 0usize..5, any::<bool>()), 1..14);
    let real_time = prop::collection::vec((0u32..8, 1u64..40), 0..2);
    let away = prop::option::weighted(0.3, 0u32..8);
    (1u32..3, 2u32..5, tasks, real_time, away, any::<u64>()).prop_map(
        |(llcs, per_llc, tasks, real_time, away, seed)| {
            let machine = machine(llcs, per_llc);
            let all = (1u64 << machine.cpus()) - 1;
            let weights = [100, 100, 20, 50, 400];
            let task = |(mask, weight, hog): (u64, usize, bool)| {
                let mask = if mask & all == 0 { all } else { mask & all };
                (mask, weights[weight], hog)
            };
            Host {
                machine,
                tasks: tasks.into_iter().map(task).collect(),
                real_time: real_time
                    .into_iter()
                    .map(|(cpu, ms)| (cpu % machine.cpus(), ms))
                    .collect(),
                away: away.map(|cpu| cpu % machine.cpus()),
                seed,
            }
        },
    )
}

/// `idle_ns`: how long a task may wait beside an idle CPU of its mask.
fn check_host(h: &Host, idle_ns: u64) -> Result<(), TestCaseError> {
    let n = h.machine.cpus();
    let mut w = Workload::default();
    for (i, &(bits, weight, hog)) in h.tasks.iter().enumerate() {
        let mask = CpuMask::of((0..n).filter(|c| bits >> c & 1 == 1));
        let home = bits.trailing_zeros();
        let name = format!("task {i} of {bits:#b}");
        if hog {
            w.add_hog(&name, weight, mask, home);
        } else {
            let (sleep, work) = (Span::Exp(2 * MS), Span::Exp(MS));
            w.add_sleeper(&name, sleep, work, mask, home);
            w.tasks.last_mut().unwrap().weight = weight;
        }
    }
    for &(cpu, run_ms) in &h.real_time {
        w.real_time.push(RealTime {
            cpu,
            from_ns: 20 * MS,
            run_ns: run_ms * MS,
            period_ns: 100 * MS,
        });
    }
    if let Some(cpu) = h.away {
        w.hotplug = [(50, false), (250, true)]
            .map(|(ms, online)| Hotplug {
                cpu,
                at_ns: ms * MS,
                online,
            })
            .into();
    }
    let r = run_seed(h.machine, &w, SchedulerKind::Slipstream, 50, 450, h.seed);
    // The first burst of a real-time task on a CPU may catch a task that was just sent there.
    let trapped = h.real_time.iter().map(|t| t.1 * MS).max().unwrap_or(0);
    prop_assert!(
        r.idle_beside_work_ns <= idle_ns + trapped,
        "a task waited {} ns while a CPU of its mask was idle",
        r.idle_beside_work_ns
    );
    // Twice the time in which all others have their share of one CPU while the task is due one run, which
    // is a slice and a tick; plus earlier debts of the tasks, and real-time tasks. After 2 s the task is
    // sent ahead of the order.
    let total: u64 = h.tasks.iter().map(|t| u64::from(t.1)).sum();
    for (g, &(_, weight, _)) in r.groups.iter().zip(&h.tasks) {
        let weight = u64::from(weight);
        let one_run = (6 * MS * weight / 100).clamp(MS / 2, 12 * MS) + TICK;
        let most = (200 * MS + 2 * one_run * total / weight + trapped).min(2_300 * MS);
        prop_assert!(
            g.wait_max_ns < most,
            "{} waited {} of {most} ns",
            g.name,
            g.wait_max_ns
        );
    }
    Ok(())
}

fn sleepers(machine: Machine, masks: &[u64], real_time: &[(u32, u64)], seed: u64) -> Host {
    Host {
        machine,
        tasks: masks.iter().map(|&m| (m, 100, false)).collect(),
        real_time: real_time.to_vec(),
        away: None,
        seed,
    }
}

/// A CPU that looks for work at the instant at which an insertion into its queue ends must find the task:
/// the kernel inserts under the lock of the run queue.
#[test]
fn task_inserted_while_its_cpu_looks_for_work_is_found() {
    for seed in [3, 11] {
        check_host(&sleepers(machine(1, 2), &[3, 3, 2, 2, 1], &[], seed), TICK).unwrap();
    }
}

/// Likewise a real-time task, which takes the lock before it takes the CPU.
#[test]
fn task_inserted_while_a_real_time_task_takes_its_cpu_is_found() {
    let mut h = sleepers(
        machine(1, 3),
        &[7, 1, 4, 6, 7],
        &[(0, 1)],
        130_016_353_854_578_980,
    );
    h.tasks = vec![
        (7, 20, false),
        (1, 100, false),
        (4, 20, true),
        (6, 100, true),
        (7, 100, false),
    ];
    check_host(&h, TICK).unwrap();
    let masks = [37, 28, 43, 37, 8, 16];
    let mut h = sleepers(
        machine(2, 3),
        &masks,
        &[(3, 16)],
        12_083_865_190_291_212_983,
    );
    for (task, weight) in h.tasks.iter_mut().zip([100, 400, 50, 20, 20, 100]) {
        task.1 = weight;
    }
    (h.tasks[1].2, h.tasks[5].2) = (true, true);
    check_host(&h, TICK).unwrap();
}

/// A host with a crowd of hogs of one mask in one LLC, more than CPUs there, and other tasks behind them in its queue.
fn crowded() -> impl Strategy<Value = Host> {
    let crowd = (any::<u64>(), 5usize..60);
    let often = || prop::bool::weighted(0.8);
    let others = prop::collection::vec((any::<u64>(), often(), often()), 1..10);
    (2u32..5, 2u32..5, crowd, others, any::<u64>()).prop_map(
        |(llcs, per_llc, (mask, crowd), others, seed)| {
            let machine = machine(llcs, per_llc);
            let all = (1u64 << machine.cpus()) - 1;
            let near = (1u64 << per_llc) - 1;
            let mask = if mask & near == 0 { near } else { mask & near };
            let mut tasks = vec![(mask, 100, true); crowd];
            for (other, hog, free) in others {
                let other = if free || other & all == 0 {
                    all
                } else {
                    other & all
                };
                tasks.push((other, 100, hog));
            }
            Host {
                machine,
                tasks,
                real_time: Vec::new(),
                away: None,
                seed,
            }
        },
    )
}

/// Free hogs behind a crowd of masked ones use the CPUs of the other LLC.
#[test]
fn free_tasks_behind_a_crowd_of_masked_ones_use_another_llc() {
    for crowd in [6, 19, 40, 90] {
        for crowd_first in [true, false] {
            let mut w = Workload::default();
            let mut add = |masked: bool| {
                let (count, name, mask) = if masked {
                    (crowd, "masked", CpuMask::of([0, 1, 2]))
                } else {
                    (4, "free", CpuMask::ALL)
                };
                for _ in 0..count {
                    w.add_hog(name, 100, mask.clone(), 0);
                }
            };
            add(crowd_first);
            add(!crowd_first);
            let r = run(machine(2, 4), &w, SchedulerKind::Slipstream, 500, 1_000);
            let (masked, free) = (cpus(&r, "masked"), cpus(&r, "free"));
            assert!(masked > 2.97, "{crowd} masked hogs: {masked} of 3 CPUs");
            assert!(free > 3.97, "beside {crowd} masked hogs: {free} of 4 CPUs");
        }
    }
}

/// Hogs of one mask share its CPUs by their weights, while other hogs run freely.
fn check_shares(
    (width, first): (u32, u32),
    weights: &[u32],
    free: u32,
    seed: u64,
) -> Result<(), TestCaseError> {
    let m = machine(1, 4);
    let mask = CpuMask::of((0..width).map(|i| (first + i) % 4));
    let mut w = Workload::default();
    for (i, &weight) in weights.iter().enumerate() {
        let home = (first + i as u32 % width) % 4;
        w.add_hog(&format!("{i}"), weight, mask.clone(), home);
    }
    for i in 0..free {
        w.add_hog("free", 100, CpuMask::ALL, i % 4);
    }
    let r = run_seed(m, &w, SchedulerKind::Slipstream, 1_000, 4_000, seed);
    let used: Vec<f64> = (0..weights.len())
        .map(|i| cpus(&r, &i.to_string()))
        .collect();
    let (all, sum): (f64, u32) = (used.iter().sum(), weights.iter().sum());
    // No task can use more than one CPU: weights alone decide only if none is due more.
    let most = weights.iter().max().copied().unwrap_or(0);
    prop_assume!(f64::from(most) / f64::from(sum) * all <= 0.98);
    for (used, &weight) in used.iter().zip(weights) {
        let (share, due) = (used / all, f64::from(weight) / f64::from(sum));
        prop_assert!(
            (share - due).abs() < 0.03,
            "{share}, due {due}, of {all} CPUs"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn no_task_waits_beside_an_idle_cpu_or_for_long(h in host()) {
        check_host(&h, TICK)?;
    }

    #[test]
    fn no_task_waits_beside_an_idle_cpu_behind_a_crowd(h in crowded()) {
        // A tick sends an idle CPU for one task of the queue; the next one, for another.
        check_host(&h, 2 * TICK)?;
    }

    #[test]
    fn weights_hold_inside_of_any_mask(
        mask in (1u32..4, 0u32..4),
        weights in prop::collection::vec(prop::sample::select(vec![50u32, 100, 200, 300]), 2..7),
        free in 0u32..5,
        seed in any::<u64>(),
    ) {
        check_shares(mask, &weights, free, seed)?;
    }
}
