//! What a run measured, or why it could not.

use hdrhistogram::Histogram;

use crate::policy::COUNTERS;
use crate::sched::TaskId;

/// Maximum ops in a row that take no time. A script that exceeds it never computes.
pub(crate) const OPS_MAX: u32 = 10_000;

/// Latencies of one group of tasks, ns.
#[derive(Clone, Debug)]
pub struct GroupResult {
    /// The group's name.
    pub name: String,
    /// From wake-up to running.
    pub wake: Histogram<u64>,
    /// From the start of a send to the end of its reception.
    pub hop: Histogram<u64>,
    /// From the start of a request to [`Op::Done`](crate::workload::Op::Done).
    pub request: Histogram<u64>,
    /// CPU time used, ns.
    pub run_ns: u64,
    /// Longest wait for a CPU, after a wake-up or a slice; over the whole run, ns.
    pub wait_max_ns: u64,
}

/// Measurements of a run, after its warm-up.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// By group.
    pub groups: Vec<GroupResult>,
    /// The scheduler's counters, in the order of [`COUNTERS`]; over the whole run.
    pub counters: [u64; COUNTERS.len()],
    /// Measured time, ns.
    pub measured_ns: u64,
    /// CPU time used by tasks and switches over the available CPU time, 0 to 1.
    pub utilization: f64,
    /// Longest time that a task waited while a CPU of its mask was idle, ns; over the whole run. Checked
    /// every millisecond, on hosts of up to 64 CPUs.
    pub idle_beside_work_ns: u64,
    /// Context switches.
    pub switches: u64,
    /// Migrations of a task to another LLC.
    pub llc_moves: u64,
    /// Events handled.
    pub events: u64,
    /// Requests completed.
    pub requests: u64,
    /// A digest of all events: equal digests mean equal runs.
    pub digest: u64,
}

impl RunResult {
    /// Of a run that has not begun.
    pub(crate) fn new(groups: &[String]) -> RunResult {
        let group = |name: &String| GroupResult {
            name: name.clone(),
            wake: histogram(),
            hop: histogram(),
            request: histogram(),
            run_ns: 0,
            wait_max_ns: 0,
        };
        RunResult {
            groups: groups.iter().map(group).collect(),
            counters: [0; COUNTERS.len()],
            measured_ns: 0,
            utilization: 0.0,
            idle_beside_work_ns: 0,
            switches: 0,
            llc_moves: 0,
            events: 0,
            requests: 0,
            digest: 0,
        }
    }

    /// Forgets what the warm-up measured.
    pub(crate) fn begin(&mut self) {
        for group in &mut self.groups {
            group.wake.reset();
            group.hop.reset();
            group.request.reset();
        }
        self.switches = 0;
        self.llc_moves = 0;
        self.requests = 0;
    }

    /// Adds another run of the same workload: its samples, counts and measured time.
    ///
    /// # Panics
    /// If the groups differ.
    pub fn add(&mut self, other: &RunResult) {
        assert_eq!(
            self.groups.len(),
            other.groups.len(),
            "runs of one workload"
        );
        let (own, its) = (self.measured_ns as f64, other.measured_ns as f64);
        self.utilization = (self.utilization * own + other.utilization * its) / (own + its);
        for (a, b) in self.groups.iter_mut().zip(&other.groups) {
            for (to, from) in [
                (&mut a.wake, &b.wake),
                (&mut a.hop, &b.hop),
                (&mut a.request, &b.request),
            ] {
                to.add(from).expect("the bounds are the same");
            }
            a.run_ns += b.run_ns;
            a.wait_max_ns = a.wait_max_ns.max(b.wait_max_ns);
        }
        for (a, b) in self.counters.iter_mut().zip(other.counters) {
            *a += b;
        }
        self.measured_ns += other.measured_ns;
        self.idle_beside_work_ns = self.idle_beside_work_ns.max(other.idle_beside_work_ns);
        self.switches += other.switches;
        self.llc_moves += other.llc_moves;
        self.events += other.events;
        self.requests += other.requests;
        self.digest = (self.digest ^ other.digest).wrapping_mul(0x0100_0000_01b3);
    }
}

/// Why a run could not start or finish.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A script loops without computing or waiting.
    #[error(
        "task {task} of group `{group}` ran {OPS_MAX} steps without computing or waiting; \
         give its script a run, a sleep or a receive"
    )]
    Endless {
        /// The task.
        task: TaskId,
        /// Its group.
        group: String,
    },
    /// The scheduler did something for which a kernel would have aborted it.
    #[error("scheduler error that a kernel aborts on: {0}")]
    Scheduler(String),
    /// A thread of the process simulates two hosts with our scheduler.
    #[error(
        "this thread simulates a host with our scheduler already, and a process has one of them at a time; \
         let the other simulation end first"
    )]
    InUse,
    /// A task names a CPU that the machine does not have.
    #[error(
        "task {task} is to run on CPU {cpu}, but the machine has CPUs 0 to {last}; \
         change the task or make the machine larger"
    )]
    NoCpu {
        /// The task.
        task: TaskId,
        /// The CPU named.
        cpu: u32,
        /// The last CPU of the machine.
        last: u32,
    },
}

fn histogram() -> Histogram<u64> {
    // Two digits from 1 ns to 1000 s; longer values count as 1000 s.
    Histogram::new_with_bounds(1, 1_000_000_000_000, 2).expect("the bounds and digits are allowed")
}
