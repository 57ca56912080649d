//! A seed draws the shape of a cluster, its clients and its faults.

use std::fmt;

use slipstream_base::width::to_u32;

use crate::rng::Rng;

/// Clients and faults begin within this time, ns.
pub const HORIZON_NS: u64 = 400_000_000;
/// Everything has healed by then, ns.
pub const HEAL_NS: u64 = 1_500_000_000;

/// A schedule before it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Draws what the run leaves open: latencies, the order of threads.
    pub seed: u64,
    /// The cluster.
    pub shape: Shape,
    /// The requests.
    pub clients: Vec<ClientPlan>,
    /// The faults.
    pub faults: Vec<Fault>,
}

/// The workers that compute prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// The worker that answers.
    Whole,
    /// A prefill worker, whose blocks the decode worker pulls.
    Pull,
    /// A prefill worker, which pushes them.
    Push,
}

/// A cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The workers that compute prompts.
    pub pools: Pools,
    /// Frontends.
    pub frontends: usize,
    /// Shards of each.
    pub shards: usize,
    /// Worker processes.
    pub processes: usize,
    /// Workers of each process.
    pub workers: usize,
    /// Engine threads of each process.
    pub threads: usize,
    /// KV blocks of an engine, of 16 tokens.
    pub blocks: u32,
    /// Sequences that an engine runs at a time.
    pub seqs: u32,
    /// Tokens of a pass.
    pub batched_tokens: u32,
    /// Length of a pass, ns.
    pub step_ns: u64,
    /// Length of a worker's start, ms.
    pub startup_ms: u64,
    /// Sequences that may wait at an engine.
    pub waiting_max: u32,
    /// Credit of a stream, bytes.
    pub credit_bytes: u32,
    /// Requests that may wait in a frontend.
    pub queue_max: u64,
    /// Streams of a frontend.
    pub streams_max: u32,
    /// Requests in a ring.
    pub ring: usize,
    /// Patience of links, ms.
    pub deadline_ms: u64,
    /// Time that requests have, ms; 0: any.
    pub request_timeout_ms: u64,
    /// Mean latency of a connection, ns.
    pub latency_ns: u64,
    /// Bytes under way per direction of a connection.
    pub window: usize,
    /// Share of KV blocks from which on a worker is busy, percent.
    pub busy_percent: u32,
    /// Routing policy.
    pub policy: Policy,
    /// Mean length of answers, tokens.
    pub answer_tokens: u32,
    /// Rate of a worker's interface for KV transfers, bits/s.
    pub nic_bits_per_s: u64,
}

/// Routing policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// By cached blocks and load.
    Kv,
    /// In turn.
    RoundRobin,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientPlan {
    /// When it is sent, ns.
    pub at_ns: u64,
    /// Its frontend and shard.
    pub to: (usize, usize),
    /// Seed of its answer.
    pub seed: u64,
    /// Prompts of one group share a prefix.
    pub group: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Maximum tokens of its answer.
    pub max_tokens: u32,
    /// Choices.
    pub choices: u32,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether the answer continues to `max_tokens`.
    pub ignore_eos: bool,
    /// Whether it belongs to a session, and to which.
    pub session: Option<u64>,
    /// It goes away after so long, ns.
    pub cancel_ns: Option<u64>,
    /// Pause after each read, ms.
    pub pause_ms: u64,
}

/// A fault and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// When it happens, ns.
    pub at_ns: u64,
    /// The kind of a fault.
    pub kind: FaultKind,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A worker process is killed, and starts again after `down_ns`. With `power`, no peer is notified.
    Crash {
        /// The process.
        process: usize,
        /// Time until it starts again, ns.
        down_ns: u64,
        /// Its host fails with it.
        power: bool,
    },
    /// A worker process takes no more requests, ends after `grace_ns`, and starts again.
    Drain {
        /// The process.
        process: usize,
        /// Time that requests have, ns.
        grace_ns: u64,
        /// Time until it starts again, ns.
        down_ns: u64,
    },
    /// A worker process stands still (SIGSTOP).
    Pause {
        /// The process.
        process: usize,
        /// For so long, ns.
        for_ns: u64,
    },
    /// A frontend is killed, and starts again after `down_ns`.
    CrashFrontend {
        /// The frontend.
        frontend: usize,
        /// Time until it starts again, ns.
        down_ns: u64,
    },
    /// A connection of a process breaks.
    Cut {
        /// The process.
        process: usize,
        /// Which connection.
        pick: u64,
    },
    /// One side of a connection learns that it is broken.
    HalfOpen {
        /// The process.
        process: usize,
        /// Which connection.
        pick: u64,
        /// The side: 0: the worker's.
        side: usize,
    },
    /// Nothing arrives at one side of a connection.
    Stall {
        /// The process.
        process: usize,
        /// Which connection.
        pick: u64,
        /// The side.
        side: usize,
        /// For so long, ns.
        for_ns: u64,
    },
    /// A connection is slow.
    Slow {
        /// The process.
        process: usize,
        /// Which connection.
        pick: u64,
        /// Additional latency, ns.
        extra_ns: u64,
    },
    /// A frame arrives with a wrong bit.
    Corrupt {
        /// The process.
        process: usize,
        /// Which connection.
        pick: u64,
        /// The side.
        side: usize,
    },
    /// The clock of a process's host jumps forward.
    ClockJump {
        /// The process.
        process: usize,
        /// By so much, ns.
        by_ns: u64,
    },
    /// A process reads that a frontend's record is gone, and that it is back after `for_ns`.
    RecordGone {
        /// The process.
        process: usize,
        /// The frontend.
        frontend: usize,
        /// For so long, ns.
        for_ns: u64,
    },
    /// A process reads the record of an earlier run of a frontend.
    RecordStale {
        /// The process.
        process: usize,
        /// The frontend.
        frontend: usize,
    },
    /// A process reads half of a record.
    RecordTorn {
        /// The process.
        process: usize,
    },
    /// Connections of a process are too far behind for the next KV deltas.
    LoseKv {
        /// The process.
        process: usize,
    },
    /// The next KV delta of a process is lost, and only the gap in the numbers shows it.
    LoseKvUnseen {
        /// The process.
        process: usize,
    },
}

impl Plan {
    /// The plan of `seed`.
    pub fn of(seed: u64) -> Plan {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let shape = Shape::draw(rng);
        let clients = clients(rng, &shape);
        let faults = faults(rng, &shape);
        Plan {
            seed,
            shape,
            clients,
            faults,
        }
    }
}

impl Shape {
    fn draw(rng: &mut Rng) -> Shape {
        let pools = match rng.below(6) {
            0 => Pools::Pull,
            1 => Pools::Push,
            _ => Pools::Whole,
        };
        let least = if pools == Pools::Whole { 1 } else { 2 };
        let frontends = rng.size(1, 2);
        let workers = rng.size(1, 2);
        Shape {
            pools,
            frontends,
            shards: rng.size(1, 2),
            processes: rng.size(least, 4),
            workers,
            threads: rng.size(1, workers),
            blocks: rng.between_u32(12, 64),
            seqs: rng.between_u32(1, 8),
            batched_tokens: rng.pick(&[32, 64, 256]),
            step_ns: rng.pick(&[200_000, 1_000_000, 3_000_000]),
            startup_ms: rng.pick(&[0, 0, 5, 40]),
            waiting_max: rng.pick(&[1, 4, 64, 64]),
            credit_bytes: rng.pick(&[4, 12, 64, 256 << 10]),
            queue_max: rng.pick(&[0, 2, 16]),
            streams_max: rng.pick(&[4, 64, 64]),
            ring: rng.pick(&[2, 64]),
            deadline_ms: rng.pick(&[100, 250]),
            request_timeout_ms: rng.pick(&[0, 0, 0, 60]),
            latency_ns: rng.pick(&[20_000, 200_000, 1_000_000]),
            window: rng.pick(&[256, 4096, 65_536]),
            busy_percent: rng.pick(&[100, 90, 50]),
            policy: rng.pick(&[Policy::Kv, Policy::Kv, Policy::RoundRobin]),
            answer_tokens: rng.pick(&[4, 12]),
            // A prompt of 100 tokens takes about 0.3, 5 and 25 ms.
            nic_bits_per_s: rng.pick(&[400_000_000_000, 20_000_000_000, 4_000_000_000]),
        }
    }

    /// Workers in all.
    pub fn worker_count(&self) -> usize {
        self.processes * self.workers
    }

    /// Workers that compute prompts for others: the first ones.
    pub fn prefill_workers(&self) -> usize {
        match self.pools {
            Pools::Whole => 0,
            _ => (self.worker_count() / 2).max(1),
        }
    }

    /// Whether no request has a reason to be refused but faults.
    pub fn is_ample(&self) -> bool {
        self.busy_percent == 100
            && self.waiting_max >= 64
            && self.streams_max >= 64
            && self.ring >= 64
            && self.request_timeout_ms == 0
    }
}

fn clients(rng: &mut Rng, shape: &Shape) -> Vec<ClientPlan> {
    let count = rng.between(1, 12);
    let flood = rng.one_in(4);
    let cancels = rng.pick(&[0, 0, 2, 4]);
    let slow = rng.pick(&[0, 0, 3]);
    let tokens_max = u64::from(shape.blocks) * 16;
    (0..count)
        .map(|_| {
            let max_tokens = rng.between_u32(1, 24);
            let most = (tokens_max - u64::from(max_tokens) - 8).min(160);
            ClientPlan {
                at_ns: if flood {
                    60_000_000
                } else {
                    rng.below(HORIZON_NS)
                },
                to: (rng.index(shape.frontends), rng.index(shape.shards)),
                seed: rng.bits() >> 12,
                group: rng.below(3),
                prompt_tokens: to_u32(rng.between(1, most)),
                max_tokens,
                choices: rng.pick(&[1, 1, 1, 2, 3]),
                stream: !rng.one_in(4),
                ignore_eos: rng.one_in(2),
                session: rng.one_in(3).then(|| rng.below(3)),
                cancel_ns: (cancels > 0 && rng.one_in(cancels)).then(|| rng.below(40_000_000)),
                pause_ms: if slow > 0 && rng.one_in(slow) {
                    rng.between(1, 20)
                } else {
                    0
                },
            }
        })
        .collect()
}

fn faults(rng: &mut Rng, shape: &Shape) -> Vec<Fault> {
    const KINDS: u64 = 16;
    let count = rng.pick(&[0, 1, 2, 4, 8]);
    // Each schedule has a few kinds, so that their combinations are met more often.
    let kinds = [0; 3].map(|_| rng.below(KINDS));
    let deadline_ns = shape.deadline_ms * 1_000_000;
    (0..count)
        .map(|_| {
            let process = rng.index(shape.processes);
            let frontend = rng.index(shape.frontends);
            let (pick, side) = (rng.bits(), rng.index(2));
            let some_ns = rng.between(1, 2 * deadline_ns);
            let kind = match rng.pick(&kinds) {
                0 => FaultKind::Crash {
                    process,
                    down_ns: rng.below(deadline_ns),
                    power: false,
                },
                1 => FaultKind::Crash {
                    process,
                    down_ns: rng.between(1, 3) * deadline_ns,
                    power: true,
                },
                2 => FaultKind::Drain {
                    process,
                    grace_ns: rng.below(60_000_000),
                    down_ns: rng.below(deadline_ns),
                },
                3 => FaultKind::Pause {
                    process,
                    for_ns: some_ns,
                },
                4 => FaultKind::CrashFrontend {
                    frontend,
                    down_ns: rng.below(deadline_ns),
                },
                5 => FaultKind::Cut { process, pick },
                6 => FaultKind::HalfOpen {
                    process,
                    pick,
                    side,
                },
                7 => FaultKind::Stall {
                    process,
                    pick,
                    side,
                    for_ns: some_ns,
                },
                8 => FaultKind::Slow {
                    process,
                    pick,
                    extra_ns: rng.between(1, 20_000_000),
                },
                9 => FaultKind::Corrupt {
                    process,
                    pick,
                    side,
                },
                10 => FaultKind::ClockJump {
                    process,
                    by_ns: rng.below(1_000_000_000),
                },
                11 => FaultKind::RecordGone {
                    process,
                    frontend,
                    for_ns: some_ns,
                },
                12 => FaultKind::RecordStale { process, frontend },
                13 => FaultKind::RecordTorn { process },
                14 => FaultKind::LoseKvUnseen { process },
                _ => FaultKind::LoseKv { process },
            };
            // One in three while workers start and connect.
            let within_ns = match rng.below(3) {
                0 => (shape.startup_ms + 10) * 1_000_000,
                _ => HORIZON_NS,
            };
            Fault {
                at_ns: rng.below(within_ns),
                kind,
            }
        })
        .collect()
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}: {:?}", self.seed, self.shape)?;
        for (index, client) in self.clients.iter().enumerate() {
            writeln!(f, "  client {index}: {client:?}")?;
        }
        for fault in &self.faults {
            writeln!(f, "  at {} us: {:?}", fault.at_ns / 1000, fault.kind)?;
        }
        Ok(())
    }
}
