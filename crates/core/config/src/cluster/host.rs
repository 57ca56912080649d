//! `[host]`: CPU time of the work on the frontend's host, and the scheduling of its threads.

use super::{NetworkConfig, NetworkMode, PoolConfig};
use crate::doc::{Section, Table, choice, optional, section, value};

/// Model of the frontend's processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostMode {
    /// Work takes no time.
    #[default]
    None,
    /// Work waits for the first free core, and keeps it until done.
    Ideal,
    /// Work is that of threads, which a CPU scheduler runs on the host's CPUs.
    Threads,
}

/// The CPU scheduler of a simulated host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostScheduler {
    /// A model of Linux's own.
    #[default]
    Eevdf,
    /// The program of `slipstream sched run`.
    Slipstream,
}

/// How one thread of a simulated host wakes another: decides the cost, and whether the kernel's wake-up says that the
/// waker is about to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WakeMechanism {
    /// A pipe.
    Pipe,
    /// A Unix stream socket.
    #[default]
    Unix,
    /// TCP over loopback.
    Tcp,
    /// TCP with the receiver in `epoll_wait`.
    Epoll,
    /// An eventfd.
    Eventfd,
    /// A futex.
    Futex,
}

const HOSTS: &[(&str, HostMode)] = &[
    ("none", HostMode::None),
    ("ideal", HostMode::Ideal),
    ("threads", HostMode::Threads),
];

const SCHEDULERS: &[(&str, HostScheduler)] = &[
    ("eevdf", HostScheduler::Eevdf),
    ("slipstream", HostScheduler::Slipstream),
];

const WAKE_MECHANISMS: &[(&str, WakeMechanism)] = &[
    ("pipe", WakeMechanism::Pipe),
    ("unix", WakeMechanism::Unix),
    ("tcp", WakeMechanism::Tcp),
    ("epoll", WakeMechanism::Epoll),
    ("eventfd", WakeMechanism::Eventfd),
    ("futex", WakeMechanism::Futex),
];

section! {
    /// `[host]`: cost of the frontend's work. The defaults are measurements of Slipstream's own
    /// frontend (table in `docs/twin.md`).
    pub struct HostConfig, keys HostKeys of "host", read in order {
        /// `ideal`: the frontend's work waits for a free core and takes the time below. `threads`: it is done by
        /// threads, as that of the engines, and a CPU scheduler runs them. Simulation only.
        ///
        /// "none": TTFT excludes the frontend's time.
        mode: HostMode = choice(HOSTS, HostMode::None);
        /// Cores of the frontend; with "threads" CPUs of the host, on which the engines' threads run too.
        ///
        /// Low: requests and tokens wait for each other.
        cpus: u32 = value(4).within(1..=4_096).unit("cores").note("for \"threads\" to 1,024");
        /// Read and check a request. The defaults of this table are measurements of Slipstream's own frontend.
        parse_us: f64 = value(26.0).within(0.0..=1e9).with_description("us");
        /// Tokenize and hash, per prompt token.
        tokenize_token_ns: f64 = value(115.0).within(0.0..=1e9).with_description("ns");
        /// Choose a worker.
        route_us: f64 = value(17.0).within(0.0..=1e9).with_description("us");
        /// Submit a request to its worker.
        dispatch_us: f64 = value(3.0).within(0.0..=1e9).with_description("us");
        /// Read a worker's frame of tokens (one per pass) and write it to clients.
        frame_us: f64 = value(6.0).within(0.0..=1e9).with_description("us");
        /// Render, per token.
        token_ns: f64 = value(190.0).within(0.0..=1e9).with_description("ns");
        /// For [`HostMode::Threads`].
        field threads: HostThreads = HostThreads::default();
    }
}

section! {
    /// Threads of a simulated host, with [`HostMode::Threads`].
    pub struct HostThreads, keys ThreadsKeys of "host", read in order {
        /// The host's CPU scheduler: a model of Linux's own, or the program of `slipstream sched run`. A process
        /// simulates one host with the second at a time: further runs of a sweep wait.
        scheduler: HostScheduler = choice(SCHEDULERS, HostScheduler::Eevdf)
            .note("for \"threads\", as all below");
        /// Last-level caches, of `host.cpus` / `host.llcs` CPUs each (1 to 64).
        llcs: u32 = value(1).within(1..=256).unit("caches");
        /// API servers of one thread each. Requests and engines are divided among them.
        ///
        /// Low: requests and tokens wait for the thread, even on idle CPUs.
        frontends: u32 = value(1).within(1..=1_024).unit("threads");
        /// Threads that tokenize prompts for the API servers (woken by futex, which answer by eventfd). 0: API
        /// servers tokenize themselves.
        ///
        /// 0: tokens wait behind long prompts.
        tokenizers: u32 = value(0).within(0..=1_024).unit("threads");
        /// Threads that render and write tokens. 0: API servers do.
        detokenizers: u32 = value(0).within(0..=1_024).unit("threads");
        /// Threads of other programs on the host, which compute without a pause.
        background: u32 = value(0).within(0..=1_024).unit("threads");
        /// Work of an engine's thread per step: with `engine.async_scheduling` for the next step while one runs, else
        /// before each step. At 0 step times contain it.
        ///
        /// High without asynchronous scheduling: it counts twice where step times contain it.
        step_us: f64 = value(0.0).within(0.0..=1e9).with_description("us");
        /// Work of a thread at the end of each KV transfer.
        connector_us: f64 = value(0.0).within(0.0..=1e9).with_description("us");
        /// How API servers and engines wake each other. The first four tell the CPU scheduler that the waker is about
        /// to wait.
        wake_by: WakeMechanism = choice(WAKE_MECHANISMS, WakeMechanism::Unix);
        /// Time to wake an idle CPU; measured by `slipstream sched run --wake-idle-us auto`. The default is 3 to 134
        /// us, by the time for which the CPU idled.
        wake_idle_us?: f64 = optional().within(0.0..=1e6).with_description("us").with_default_text("idle states of an Intel server");
    }
}

pub(super) fn read_host(t: &Table<'_>) -> HostConfig {
    let host = HostConfig::read(t);
    HostConfig {
        threads: read_threads(t, host.mode),
        ..host
    }
}

/// Reads the keys that describe the threads of a host, which only [`HostMode::Threads`] has.
fn read_threads(t: &Table<'_>, mode: HostMode) -> HostThreads {
    if mode == HostMode::Threads {
        return HostThreads::read(t);
    }
    for key in ThreadsKeys::NAMES {
        t.unused(key, "mode", "only \"threads\" uses it");
    }
    HostThreads::default()
}

/// CPUs of a host with threads, and of one of its LLCs, at most: limits of the CPU scheduler.
const HOST_CPUS_MAX: u32 = 1_024;
const LLC_CPUS_MAX: u32 = 64;

/// A host with threads has the CPUs that the scheduler takes, and its workers.
pub(super) fn check_host(
    root: &Table<'_>,
    host: &HostConfig,
    network: &NetworkConfig,
    pools: &[PoolConfig],
) {
    if host.mode != HostMode::Threads {
        return;
    }
    let (cpus, llcs) = (host.cpus, host.threads.llcs);
    if cpus > HOST_CPUS_MAX {
        root.error(
            "host",
            format!(
                "`host.cpus` is {cpus}, and a host with threads has at most {HOST_CPUS_MAX} CPUs"
            ),
            "set fewer, or `host.mode = \"ideal\"`",
        );
    } else if !cpus.is_multiple_of(llcs) || cpus / llcs > LLC_CPUS_MAX {
        root.error(
            "host",
            format!(
                "`host.cpus` is {cpus} and `host.llcs` is {llcs}: each last-level cache needs the same number of CPUs, \
                 {LLC_CPUS_MAX} at most"
            ),
            "set `host.llcs` to a divisor of `host.cpus` that leaves so few",
        );
    }
    if network.messages && network.mode != NetworkMode::None {
        root.error(
            "host",
            "`host.mode` is \"threads\", whose workers run on the frontend's host, and `network.messages` puts a network \
             between them",
            "set `network.messages = false`, or `host.mode = \"ideal\"`",
        );
    }
    if let Some(pool) = pools.iter().find(|p| p.engine.data_parallel_barrier) {
        root.error(
            "host",
            format!(
                "`host.mode` is \"threads\", whose engines begin their passes one by one, and the ranks of pool `{}` begin \
                 them together (`engine.data_parallel_barrier`)",
                pool.name
            ),
            "set `host.mode = \"ideal\"`, or `engine.data_parallel_barrier = false`",
        );
    }
}
