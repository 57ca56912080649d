//! The simulated host: topology and costs.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// CPUs in LLCs of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Last-level caches.
    pub llcs: u32,
    /// CPUs (hardware threads) per LLC, 1 to 64.
    pub cpus_per_llc: u32,
    /// Hardware threads per core: 1 or 2. Threads of a core have adjacent numbers.
    pub threads_per_core: u32,
}

impl Machine {
    /// CPUs of the host.
    pub fn cpus(&self) -> u32 {
        self.llcs * self.cpus_per_llc
    }

    /// The LLC of a CPU.
    pub fn llc_of(&self, cpu: u32) -> u32 {
        cpu / self.cpus_per_llc
    }
}

/// The CPUs that a task may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuMask(Option<Arc<[u64]>>);

impl CpuMask {
    /// Every CPU.
    pub const ALL: CpuMask = CpuMask(None);

    /// Only these CPUs.
    pub fn of(cpus: impl IntoIterator<Item = u32>) -> CpuMask {
        let mut words = Vec::new();
        for cpu in cpus {
            let word = cpu as usize / 64;
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (cpu % 64);
        }
        CpuMask(Some(words.into()))
    }

    /// Whether the mask contains this CPU.
    pub fn has(&self, cpu: u32) -> bool {
        self.0.as_ref().is_none_or(|words| {
            let word = words.get(cpu as usize / 64);
            word.is_some_and(|w| w >> (cpu % 64) & 1 == 1)
        })
    }

    /// Whether the mask is [`CpuMask::ALL`].
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Its CPUs below `cpus`, in ascending order.
    pub fn iter(&self, cpus: u32) -> impl Iterator<Item = u32> + '_ {
        (0..cpus).filter(|&cpu| self.has(cpu))
    }
}

/// How one task wakes another; determines the sync hint and the cost of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
pub enum Mechanism {
    /// A pipe.
    Pipe,
    /// A Unix stream socket.
    Unix,
    /// TCP over loopback, `TCP_NODELAY`.
    Tcp,
    /// The same with the receiver in `epoll_wait`.
    Epoll,
    /// An eventfd; a queue holds the messages.
    Eventfd,
    /// A futex, with a queue: mutexes, condition variables, channels of most runtimes.
    Futex,
}

impl Mechanism {
    /// All mechanisms, in the order of tables.
    pub const ALL: [Mechanism; 6] = [
        Mechanism::Pipe,
        Mechanism::Unix,
        Mechanism::Tcp,
        Mechanism::Epoll,
        Mechanism::Eventfd,
        Mechanism::Futex,
    ];

    /// Whether the kernel's wake-up carries the sync hint. Pipes and sockets use
    /// `wake_up_interruptible_sync_poll`, and epoll relays it (Linux 6.12: `fs/pipe.c`,
    /// `net/core/sock.c`, `fs/eventpoll.c`); futex and eventfd use plain wake-ups.
    pub fn is_sync(self) -> bool {
        !matches!(self, Mechanism::Eventfd | Mechanism::Futex)
    }

    /// Name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Pipe => "pipe",
            Mechanism::Unix => "unix",
            Mechanism::Tcp => "tcp",
            Mechanism::Epoll => "epoll",
            Mechanism::Eventfd => "eventfd",
            Mechanism::Futex => "futex",
        }
    }

    /// The mechanism of that name.
    pub fn parse(name: &str) -> Option<Mechanism> {
        Mechanism::ALL.into_iter().find(|m| m.name() == name)
    }

    /// CPU time of one message, ns: the wake-up latency of [`PROBE_US`] under handoff, minus the
    /// context switch; for eventfd and futex, the EEVDF latency minus also the cost of waking an idle
    /// CPU.
    fn path_ns(self) -> u64 {
        match self {
            Mechanism::Pipe => 5_200,
            Mechanism::Unix => 8_300,
            Mechanism::Tcp => 22_800,
            Mechanism::Epoll => 24_500,
            Mechanism::Eventfd => 4_100,
            Mechanism::Futex => 3_900,
        }
    }

    /// CPU time of the sender before the wake-up takes effect, ns. Half of the path, because the guest's
    /// clock measures only the sum.
    pub fn send_ns(self) -> u64 {
        self.path_ns() / 2
    }

    /// CPU time of the receiver after it got a CPU, ns.
    pub fn recv_ns(self) -> u64 {
        self.path_ns() - self.send_ns()
    }
}

/// Median wake-up latency, us: under EEVDF, and with a minimal `sched_ext` program that hands off every
/// sync wake-up (110 lines, no policy). Linux 6.18 in QEMU at one instruction per ns, 4 CPUs;
/// pipe, Unix, TCP, epoll. The costs above are derived from these.
pub const PROBE_US: [(f64, f64); 4] = [(11.9, 6.7), (14.8, 9.8), (29.7, 24.3), (31.4, 26.0)];

/// The same under EEVDF and under our own program (`scripts/run.sh test-sched`); pipe, Unix, TCP, epoll, eventfd,
/// futex. The simulator is checked against these.
pub const VM_US: [(f64, f64); 6] = [
    (12.16, 6.86),
    (14.89, 9.41),
    (29.30, 23.93),
    (30.77, 25.42),
    (11.62, 11.86),
    (11.21, 10.64),
];

/// One idle state: the cost of leaving it, and the idle time after which it is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleState {
    /// A CPU is in this state (or a deeper one) after idling this long, ns.
    pub after_ns: u64,
    /// Time to leave it, ns.
    pub exit_ns: u64,
}

/// Costs, ns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A context switch.
    pub switch_ns: u64,
    /// From sending an interrupt to its arrival at another CPU.
    pub ipi_ns: u64,
    /// Cost of sending it, paid by the sender.
    pub kick_ns: u64,
    /// Idle states, shallowest first; the first must start at 0.
    pub idle: Vec<IdleState>,
    /// Extra run time of a task on an LLC other than its last one.
    pub llc_refill_ns: u64,
    /// Extra run time on another CPU of the same LLC.
    pub cpu_refill_ns: u64,
    /// Interval between ticks of a CPU.
    pub tick_ns: u64,
}

impl Costs {
    /// A server that manages its own idle states. Exit latencies and target residencies of C1, C1E
    /// and C6: `skx_cstates` in Linux `drivers/idle/intel_idle.c`. Switch, interrupt and refill are
    /// assumptions of common magnitude: set them for your machine.
    pub fn bare_metal() -> Costs {
        Costs {
            switch_ns: 1_500,
            ipi_ns: 1_000,
            kick_ns: 700,
            idle: vec![
                IdleState {
                    after_ns: 0,
                    exit_ns: 2_000,
                },
                IdleState {
                    after_ns: 20_000,
                    exit_ns: 10_000,
                },
                IdleState {
                    after_ns: 600_000,
                    exit_ns: 133_000,
                },
            ],
            llc_refill_ns: 20_000,
            cpu_refill_ns: 2_000,
            tick_ns: 4_000_000,
        }
    }

    /// A kernel under an instruction clock: waking an idle CPU takes 5.2 us more than a handoff
    /// ([`PROBE_US`]), no idle state is deep and caches cost nothing.
    pub fn instruction_clock() -> Costs {
        Costs {
            switch_ns: 1_500,
            ipi_ns: 2_000,
            kick_ns: 700,
            idle: vec![IdleState {
                after_ns: 0,
                exit_ns: 3_200,
            }],
            llc_refill_ns: 0,
            cpu_refill_ns: 0,
            tick_ns: 4_000_000,
        }
    }

    /// A guest whose idle CPUs are halted: an interrupt and a wake-up together take `wake_ns`,
    /// for any idle time.
    pub fn flat(wake_ns: u64) -> Costs {
        let ipi_ns = (wake_ns / 2).min(1_000);
        Costs {
            ipi_ns,
            idle: vec![IdleState {
                after_ns: 0,
                exit_ns: wake_ns - ipi_ns,
            }],
            ..Costs::bare_metal()
        }
    }

    /// Time to leave the idle state after `idled_ns` of idling.
    pub fn idle_exit_ns(&self, idled_ns: u64) -> u64 {
        self.idle
            .iter()
            .rev()
            .find(|s| idled_ns >= s.after_ns)
            .map_or(0, |s| s.exit_ns)
    }
}
