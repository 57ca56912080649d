//! Jobs of a larger simulation: times worked out by hand, and properties.

use proptest::prelude::*;
use slipstream_cpusched::jobs::{Ended, JobHost, Stage, Threads, Waker};
use slipstream_cpusched::machine::{Costs, Machine, Mechanism};
use slipstream_cpusched::policy::Params;
use slipstream_cpusched::sched::{GAP_NS, SchedulerKind};
use slipstream_cpusched::workload::Channel;

const MS: u64 = 1_000_000;
/// An interrupt takes 1 us, leaving the idle state 9 us, a switch 1.5 us.
const WAKE_NS: u64 = 10_000;
const SWITCH_NS: u64 = 1_500;
const BOTH: [SchedulerKind; 2] = [SchedulerKind::Eevdf, SchedulerKind::Slipstream];

fn machine(cpus: u32) -> Machine {
    Machine {
        llcs: 1,
        cpus_per_llc: cpus,
        threads_per_core: 1,
    }
}

/// A host with an inbox for each of `threads`.
fn host(cpus: u32, threads: u32, background: u32, kind: SchedulerKind) -> (JobHost, Vec<Channel>) {
    let m = machine(cpus);
    let mut of = Threads::default();
    let inboxes = (0..threads).map(|_| of.add(m, "thread", 1)).collect();
    of.add_background(m, background);
    let sched = (kind, Params::with_defaults());
    let host = JobHost::new(m, Costs::flat(WAKE_NS), of, sched, 1, true);
    (host.expect("the threads are sound"), inboxes)
}

fn stage(to: Channel, by: Mechanism, work_ns: u64) -> Stage {
    Stage {
        to: Some((to, by)),
        work_ns,
    }
}

/// Takes all jobs until none is left.
fn drain(host: &mut JobHost) -> Vec<Ended> {
    let mut all = Vec::new();
    while let Some(at) = host.next_end(u64::MAX).unwrap() {
        all.extend(host.take_ended(at));
    }
    all
}

#[test]
fn two_threads_take_turns_on_one_cpu() {
    for kind in BOTH {
        let (mut host, to) = host(1, 2, 0, kind);
        let at = 50 * MS;
        for (caller, &to) in (0..).zip(&to) {
            let work = [stage(to, Mechanism::Unix, MS)];
            host.post(at, Waker::Device, caller, &work).unwrap();
        }
        let ended = drain(&mut host);
        let ends: Vec<_> = ended.iter().map(|e| (e.caller, e.at - at)).collect();
        // On a host of one CPU ours puts every task into a queue, which takes effect after the program.
        let queued = if kind == SchedulerKind::Eevdf {
            0
        } else {
            GAP_NS
        };
        let first = queued + WAKE_NS + SWITCH_NS + MS;
        let expected = [(0, first), (1, first + SWITCH_NS + MS)];
        assert_eq!(ends, expected, "{}", kind.name());
    }
}

/// A pipe costs 2.6 us at each end. The second thread's CPU idles: EEVDF wakes it, ours does not, and pays for the cache
/// of the other CPU (2 us).
#[test]
fn a_stage_on_another_thread_costs_its_wake_up() {
    let (work, more) = (100_000, 50_000);
    for (kind, cpus, wake_ns) in [
        (SchedulerKind::Eevdf, 1, 0),
        (SchedulerKind::Eevdf, 2, WAKE_NS),
        (SchedulerKind::Slipstream, 2, GAP_NS + 1 + 2_000),
    ] {
        let (mut host, to) = host(cpus, 2, 0, kind);
        let at = 50 * MS;
        let stages = [
            stage(to[0], Mechanism::Pipe, work / 4),
            Stage {
                to: None,
                work_ns: work / 4 * 3,
            },
            stage(to[1], Mechanism::Pipe, more),
        ];
        host.post(at, Waker::Device, 7, &stages).unwrap();
        let ended = drain(&mut host);
        let began = at + WAKE_NS + SWITCH_NS;
        let [one] = ended[..] else {
            panic!("{ended:?}")
        };
        assert_eq!((one.caller, one.thread), (7, 1));
        assert_eq!(
            one.stage_ends[..2],
            [began + work / 4, began + work],
            "{}",
            kind.name()
        );
        assert_eq!(
            one.at,
            began + work + 2_600 + wake_ns + SWITCH_NS + 2_600 + more,
            "{} on {cpus}",
            kind.name()
        );
    }
}

/// The thread whose job has ended wakes others before it waits, and does its own next job first.
#[test]
fn the_end_of_a_job_leads_to_others_without_an_interrupt() {
    let (mut host, to) = host(1, 2, 0, SchedulerKind::Eevdf);
    let at = 50 * MS;
    let one = |to| [stage(to, Mechanism::Pipe, 10_000)];
    host.post(at, Waker::Device, 0, &one(to[0])).unwrap();
    host.post(at, Waker::Device, 1, &one(to[0])).unwrap();
    let first = host.next_end(u64::MAX).unwrap().unwrap();
    assert_eq!(first, at + WAKE_NS + SWITCH_NS + 10_000);
    let ended = host.take_ended(first).unwrap();
    host.post(first, Waker::Itself(ended.thread), 2, &one(to[0]))
        .unwrap();
    host.post(first, Waker::Thread(ended.thread), 3, &one(to[1]))
        .unwrap();
    let all = drain(&mut host);
    let ends: Vec<_> = all.iter().map(|e| (e.caller, e.at - first)).collect();
    let sent = 2_600;
    let own = sent + 10_000;
    assert_eq!(
        ends,
        [
            (2, own),
            (1, own + 10_000),
            (3, own + 10_000 + SWITCH_NS + 2_600 + 10_000)
        ]
    );
}

/// Ends of jobs on a host with other work, in the order of callers.
fn ends(kind: SchedulerKind, cpus: u32, background: u32, jobs: &[(u64, u32, u64)]) -> Vec<u64> {
    let (mut host, to) = host(cpus, 4, background, kind);
    let mut all = Vec::new();
    let mut at = 10 * MS;
    let mut work = [0; 4];
    for (caller, &(gap, thread, work_ns)) in (0..).zip(jobs) {
        at += gap;
        while let Some(end) = host.next_end(at).unwrap() {
            all.extend(host.take_ended(end));
        }
        let thread = thread as usize % to.len();
        work[thread] += work_ns;
        let stages = [stage(to[thread], Mechanism::Unix, work_ns)];
        host.post(at, Waker::Device, caller, &stages).unwrap();
    }
    all.extend(drain(&mut host));
    assert_eq!(all.len(), jobs.len(), "every job ends once");
    assert!(all.is_sorted_by_key(|e| e.at), "in the order of time");
    // A migration costs a task up to 2 us each time it gets a CPU, which is CPU time too.
    for (thread, work) in (0..).zip(work) {
        let ran = host.run_ns(thread);
        assert!(ran >= work, "{}: {ran} of {work}", kind.name());
        if cpus == 1 {
            assert_eq!(ran, work, "{}", kind.name());
        }
    }
    // One tick, and the switch.
    assert!(
        host.idle_beside_work_ns() <= 4 * MS + WAKE_NS + SWITCH_NS,
        "{}: {}",
        kind.name(),
        host.idle_beside_work_ns()
    );
    all.sort_by_key(|e| e.caller);
    all.iter().map(|e| e.at).collect()
}

proptest! {
    #![proptest_config(super::cases())]

    /// CPU time handed out is the work that was asked for, every job ends once, no thread waits while a CPU idles for
    /// longer than a tick, and the same jobs end at the same times.
    #[test]
    fn work_is_conserved(
        cpus in 1u32..5,
        background in 0u32..6,
        jobs in prop::collection::vec((0u64..3 * MS, 0u32..4, 1u64..2 * MS), 1..40),
    ) {
        for kind in BOTH {
            let first = ends(kind, cpus, background, &jobs);
            prop_assert_eq!(&first, &ends(kind, cpus, background, &jobs));
        }
    }
}

#[test]
fn a_second_host_with_our_scheduler_is_an_error() {
    let first = host(1, 1, 0, SchedulerKind::Slipstream);
    let sched = (SchedulerKind::Slipstream, Params::with_defaults());
    let second = JobHost::new(
        machine(1),
        Costs::flat(WAKE_NS),
        Threads::default(),
        sched,
        1,
        false,
    );
    let text = second.err().expect("one at a time").to_string();
    assert!(text.contains("let the other simulation end"), "{text}");
    drop(first);
    let _ = host(1, 1, 0, SchedulerKind::Slipstream);
}

/// A thread that sleeps for 1 ms, with hogs, as in `load delay` on Linux 6.18 (`scripts/run.sh test-sched`): the longest waits
/// measured there, us. Medians differ by factors (docs/twin.md).
#[test]
fn a_sleeper_beside_hogs_waits_no_longer_than_on_the_real_kernel() {
    for (kind, cpus, background, longest_us) in [
        (SchedulerKind::Eevdf, 2, 8, 5_000),
        (SchedulerKind::Slipstream, 2, 8, 3_300),
        (SchedulerKind::Eevdf, 4, 16, 6_900),
        (SchedulerKind::Slipstream, 4, 16, 3_000),
    ] {
        let (mut host, to) = host(cpus, 1, background, kind);
        let (mut at, mut longest) = (300 * MS, 0);
        for round in 0..4_000 {
            // Not in step with the ticks: up to 0.3 ms of other work in each round.
            at += MS + round * 7_919 % 300_000;
            let job = [stage(to[0], Mechanism::Futex, 1)];
            host.post(at, Waker::Device, 0, &job).unwrap();
            let ended = drain(&mut host);
            longest = longest.max(ended[0].at - at);
            at = ended[0].at;
        }
        // A wait lasts until a tick, every 4 ms.
        assert!(
            longest <= longest_us * 1_000 + 4 * MS,
            "{}: {longest}",
            kind.name()
        );
    }
}

/// A host that idles for a day has next to nothing to do.
#[test]
fn an_idle_host_costs_no_events() {
    for kind in BOTH {
        let m = machine(64);
        let mut threads = Threads::default();
        let to = threads.add(m, "thread", 4);
        let sched = (kind, Params::with_defaults());
        let host = JobHost::new(m, Costs::flat(WAKE_NS), threads, sched, 1, false);
        let mut host = host.expect("the threads are sound");
        let day = 86_400_000 * MS;
        let job = [stage(to, Mechanism::Futex, 5 * MS)];
        host.post(day, Waker::Device, 0, &job).unwrap();
        let at = host.next_end(u64::MAX).unwrap().unwrap();
        assert!(at - day >= 5 * MS && host.take_ended(at).is_some());
        // Ours has a timer every 100 ms; 64 CPUs with ticks would have 16,000 events per second.
        assert!(
            host.events() < 2_000_000,
            "{}: {}",
            kind.name(),
            host.events()
        );
    }
}

/// One hog on one CPU, whose slice of 0.7 ms is over: a woken thread preempts it at once, by an interrupt of 1 us. The hog
/// then has a new slice, which a second wake-up does not shorten: it ends at the next tick, every 4 ms.
#[test]
fn eevdf_protects_a_slice_until_a_tick() {
    let (mut host, to) = host(1, 1, 1, SchedulerKind::Eevdf);
    let work = 10_000;
    let mut end_of = |at| {
        let job = [stage(to[0], Mechanism::Futex, work)];
        host.post(at, Waker::Device, 0, &job).unwrap();
        drain(&mut host)[0].at
    };
    let at = 50 * MS + 300_000;
    assert_eq!(end_of(at), at + 1_000 + SWITCH_NS + work);
    assert_eq!(end_of(50 * MS + 600_000), 52 * MS + SWITCH_NS + work);
    // A slice later it is over again.
    let at = 54 * MS;
    assert_eq!(end_of(at), at + 1_000 + SWITCH_NS + work);
}
