//! Tasks as scripts, and ready-made workloads.

use std::sync::Arc;

use slipstream_base::width::{floor_u64, to_u32};

use crate::machine::{CpuMask, Machine, Mechanism};

/// A channel: a message count and a queue of tasks that wait for a message.
pub type Channel = u32;
/// A blocking lock.
pub type Lock = u32;

/// A duration, drawn at each use, ns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    /// Constant.
    Fixed(u64),
    /// Exponential with this mean.
    Exp(u64),
    /// Uniform from low to high.
    Uniform(u64, u64),
    /// Usually the first, with this share (0 to 1) of the second.
    Either(u64, u64, f64),
}

impl Span {
    /// Mean, ns.
    pub fn mean_ns(self) -> f64 {
        match self {
            Span::Fixed(ns) | Span::Exp(ns) => ns as f64,
            Span::Uniform(a, b) => (a + b) as f64 / 2.0,
            Span::Either(a, b, p) => a as f64 * (1.0 - p) + b as f64 * p,
        }
    }
}

/// One step of a script. A script starts again when it ends.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Computes.
    Run(Span),
    /// Sends one message.
    Send(Channel, Mechanism),
    /// Sends one message to one of the channels `first .. first + count`, round robin.
    SendNext {
        /// The first channel.
        first: Channel,
        /// Number of channels.
        count: u32,
        /// Wake-up mechanism.
        by: Mechanism,
    },
    /// Sends one message that names the channel on which the sender waits for the answer.
    Ask {
        /// Destination.
        to: Channel,
        /// Channel of the answer.
        reply: Channel,
        /// Wake-up mechanism.
        by: Mechanism,
    },
    /// Sends one message to the channel that the last received message named.
    Reply(Mechanism),
    /// Waits for a message.
    Recv(Channel),
    /// Sleeps.
    Sleep(Span),
    /// Sleeps until the next multiple of a period since the task's start, ns.
    Timer(u64),
    /// Acquires a lock.
    Lock(Lock),
    /// Releases it.
    Unlock(Lock),
    /// A request ends here: its latency counts from the message that started it.
    Done,
    /// Does the work of the received job's stage, and of those that follow it on the same thread ([`crate::jobs`]).
    Work,
    /// Passes the received job on to the thread of its next stage, or ends it.
    Forward,
    /// Ends the task.
    Exit,
}

/// A task.
#[derive(Clone, Debug)]
pub struct TaskSpec {
    /// The group that its latencies are reported under; index into [`Workload::groups`].
    pub group: usize,
    /// Its operations.
    pub script: Arc<[Op]>,
    /// Weight, 100 for nice 0.
    pub weight: u32,
    /// The CPUs that it may use.
    pub mask: CpuMask,
    /// Its cgroup; index into [`Workload::cgroups`]. `None`: the root.
    pub cgroup: Option<u32>,
    /// The CPU that it starts on.
    pub home: u32,
}

/// Messages that arrive from outside (a network card, a timer).
#[derive(Clone, Debug)]
pub struct Arrivals {
    /// Destination.
    pub to: Channel,
    /// Interval between messages.
    pub gap: Span,
}

/// A real-time task that takes a CPU away from the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RealTime {
    /// The CPU.
    pub cpu: u32,
    /// Start, ns.
    pub from_ns: u64,
    /// Duration, ns.
    pub run_ns: u64,
    /// Interval between bursts, ns; 0: one burst.
    pub period_ns: u64,
}

/// A CPU that goes offline or comes online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hotplug {
    /// The CPU.
    pub cpu: u32,
    /// Time, ns.
    pub at_ns: u64,
    /// Whether it comes online.
    pub online: bool,
}

/// The tasks and external events of a host.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// Names of groups.
    pub groups: Vec<String>,
    /// Tasks.
    pub tasks: Vec<TaskSpec>,
    /// Arrivals from outside.
    pub arrivals: Vec<Arrivals>,
    /// Weights of cgroups, 100 by default.
    pub cgroups: Vec<u32>,
    /// Real-time tasks.
    pub real_time: Vec<RealTime>,
    /// CPUs that go offline or come online.
    pub hotplug: Vec<Hotplug>,
    /// Channels `0 .. channels`.
    pub channels: u32,
    /// Locks `0 .. locks`.
    pub locks: u32,
}

impl Workload {
    /// The index of a group by name, which is added if new.
    pub fn group(&mut self, name: &str) -> usize {
        if let Some(i) = self.groups.iter().position(|g| g == name) {
            return i;
        }
        self.groups.push(name.to_owned());
        self.groups.len() - 1
    }

    /// A new channel.
    pub(crate) fn channel(&mut self) -> Channel {
        self.channels += 1;
        self.channels - 1
    }

    /// Adds a task of weight 100 that may run on all CPUs.
    pub(crate) fn task(&mut self, group: usize, home: u32, script: &[Op]) {
        self.tasks.push(TaskSpec {
            group,
            script: script.into(),
            weight: 100,
            mask: CpuMask::ALL,
            cgroup: None,
            home,
        });
    }

    /// Adds a task that never sleeps.
    pub fn add_hog(&mut self, group: &str, weight: u32, mask: CpuMask, home: u32) {
        let group = self.group(group);
        self.task(group, home, &[Op::Run(Span::Fixed(10_000_000))]);
        let t = self.tasks.last_mut().expect("just added");
        (t.weight, t.mask) = (weight, mask);
    }

    /// Adds a task that alternates between sleeping and running.
    pub fn add_sleeper(&mut self, group: &str, sleep: Span, run: Span, mask: CpuMask, home: u32) {
        let group = self.group(group);
        self.task(group, home, &[Op::Sleep(sleep), Op::Run(run)]);
        self.tasks.last_mut().expect("just added").mask = mask;
    }

    /// Adds `n` tasks that never sleep.
    pub fn add_hogs(&mut self, machine: Machine, n: u32) {
        let group = self.group("hog");
        for i in 0..n {
            let home = (i * 7919) % machine.cpus();
            self.task(group, home, &[Op::Run(Span::Fixed(10_000_000))]);
        }
    }

    /// Message threads that distribute requests to workers round robin, as schbench does. Requests arrive
    /// at the message threads as a Poisson stream. Each is sent to the next worker, which computes and
    /// waits again. `load` is the share of all CPUs' time that the requests take, including the message
    /// threads' part.
    ///
    /// There is one worker per CPU, evenly distributed, so that at `load` 1 all of them are needed.
    pub fn schbench(machine: Machine, s: Schbench, load: f64) -> Workload {
        let mut w = Workload::default();
        let (message, worker) = (w.group("message"), w.group("worker"));
        let cpus = machine.cpus();
        let per_message = (cpus / s.message_threads).max(1);
        let request_ns = s.work.mean_ns()
            + s.route.mean_ns()
            + s.linger.mean_ns()
            + (s.mechanism.send_ns() + 2 * s.mechanism.recv_ns()) as f64;
        let rate = load * cpus as f64 / request_ns; // requests per ns
        let gap = floor_u64(s.message_threads as f64 / rate);
        for m in 0..s.message_threads {
            let inbox = w.channel();
            let first = w.channels;
            for _ in 0..per_message {
                w.channel();
            }
            let home = (m * per_message) % cpus;
            w.task(
                message,
                home,
                &[
                    Op::Recv(inbox),
                    Op::Run(s.route),
                    Op::SendNext {
                        first,
                        count: per_message,
                        by: s.mechanism,
                    },
                    Op::Run(s.linger),
                ],
            );
            for i in 0..per_message {
                let inbox = first + i;
                w.task(
                    worker,
                    (home + i) % cpus,
                    &[Op::Recv(inbox), Op::Run(s.work), Op::Done],
                );
            }
            w.arrivals.push(Arrivals {
                to: inbox,
                gap: Span::Exp(gap),
            });
        }
        w
    }

    /// Workers that ask a message thread for each request and wait until it wakes them, by futex, as
    /// in the benchmark schbench: a closed loop. A worker computes for `work`, then sleeps. The sleep is
    /// such that all workers together, one per CPU, take `load` of all CPUs' time; at 1 they never sleep.
    pub fn schbench_closed(
        machine: Machine,
        message_threads: u32,
        work: Span,
        load: f64,
    ) -> Workload {
        let mut w = Workload::default();
        let (message, worker) = (w.group("message"), w.group("worker"));
        let by = Mechanism::Futex;
        let busy = work.mean_ns() + (2 * (by.send_ns() + by.recv_ns())) as f64;
        let sleep = floor_u64(busy * (1.0 / load.min(1.0) - 1.0));
        let inboxes: Vec<Channel> = (0..message_threads).map(|_| w.channel()).collect();
        for (m, &inbox) in inboxes.iter().enumerate() {
            let home = to_u32(m) * machine.cpus() / message_threads;
            w.task(message, home, &[Op::Recv(inbox), Op::Reply(by)]);
        }
        for i in 0..machine.cpus() {
            let own = w.channel();
            let to = inboxes[(i % message_threads) as usize];
            let mut script = vec![
                Op::Ask { to, reply: own, by },
                Op::Recv(own),
                Op::Run(work),
                Op::Done,
            ];
            if sleep > 0 {
                script.push(Op::Sleep(Span::Exp(sleep)));
            }
            w.task(worker, i, &script);
        }
        w
    }

    /// Pairs that send one message back and forth. With `consumers` above 1, one producer sends to
    /// several in turn and waits for each answer in turn. The producer computes for `linger` after
    /// each send.
    pub fn pairs(
        machine: Machine,
        pairs: u32,
        consumers: u32,
        by: Mechanism,
        linger: Span,
    ) -> Workload {
        let mut w = Workload::default();
        let (ping, pong) = (w.group("producer"), w.group("consumer"));
        for p in 0..pairs {
            let home = (p * machine.cpus_per_llc) % machine.cpus();
            let mut script = Vec::new();
            let back = w.channel();
            for c in 0..consumers {
                let to = w.channel();
                script.extend([Op::Send(to, by), Op::Run(linger)]);
                let home = (home + 1 + c) % machine.cpus();
                w.task(pong, home, &[Op::Recv(to), Op::Done, Op::Send(back, by)]);
            }
            for _ in 0..consumers {
                script.push(Op::Recv(back));
            }
            w.task(ping, home, &script);
        }
        w
    }

    /// Clients that compute, ask a server thread and wait for its answer.
    pub fn request_response(
        machine: Machine,
        pairs: u32,
        think: Span,
        work: Span,
        by: Mechanism,
    ) -> Workload {
        let mut w = Workload::default();
        let (client, server) = (w.group("client"), w.group("server"));
        for p in 0..pairs {
            let home = (p * 2) % machine.cpus();
            let (ask, answer) = (w.channel(), w.channel());
            w.task(
                client,
                home,
                &[
                    Op::Sleep(think),
                    Op::Send(ask, by),
                    Op::Recv(answer),
                    Op::Done,
                ],
            );
            let server_home = (home + 1) % machine.cpus();
            w.task(
                server,
                server_home,
                &[Op::Recv(ask), Op::Run(work), Op::Send(answer, by)],
            );
        }
        w
    }

    /// An inference host. HTTP requests arrive at frontend shards, are passed to tokenizers (futex: a
    /// channel of the runtime) and over a Unix socket to an engine loop, which runs steps. Each step wakes
    /// the detokenizers over a pipe and connector threads over futexes.
    ///
    /// Spans are round numbers for a busy eight-GPU host, not measurements of one: 300 us to
    /// parse and route, 1 ms to tokenize, 25 ms steps with 2 ms of host work, 100 us to render.
    pub fn inference(machine: Machine, engines: u32, requests_per_s: f64) -> Workload {
        let mut w = Workload::default();
        let frontend = w.group("frontend");
        let tokenizer = w.group("tokenizer");
        let engine = w.group("engine");
        let detokenizer = w.group("detokenizer");
        let connector = w.group("connector");
        for e in 0..engines {
            let home = (e * machine.cpus() / engines.max(1)) % machine.cpus();
            let (http, tok, queue, render, kv) = (
                w.channel(),
                w.channel(),
                w.channel(),
                w.channel(),
                w.channel(),
            );
            w.task(
                frontend,
                home,
                &[
                    Op::Recv(http),
                    Op::Run(Span::Exp(300_000)),
                    Op::Send(tok, Mechanism::Futex),
                ],
            );
            for _ in 0..2 {
                w.task(
                    tokenizer,
                    (home + 1) % machine.cpus(),
                    &[
                        Op::Recv(tok),
                        Op::Run(Span::Exp(1_000_000)),
                        Op::Send(queue, Mechanism::Unix),
                    ],
                );
            }
            // Receives queued requests, concurrently with the steps.
            w.task(
                engine,
                (home + 2) % machine.cpus(),
                &[Op::Recv(queue), Op::Run(Span::Fixed(50_000)), Op::Done],
            );
            // The step loop: host work, launch, wait for the device, publish the results.
            w.task(
                engine,
                (home + 3) % machine.cpus(),
                &[
                    Op::Run(Span::Uniform(1_500_000, 2_500_000)),
                    Op::Send(kv, Mechanism::Futex),
                    Op::Sleep(Span::Fixed(23_000_000)),
                    Op::Send(render, Mechanism::Pipe),
                ],
            );
            w.task(
                detokenizer,
                (home + 4) % machine.cpus(),
                &[Op::Recv(render), Op::Run(Span::Exp(100_000)), Op::Done],
            );
            w.task(
                connector,
                (home + 5) % machine.cpus(),
                &[Op::Recv(kv), Op::Run(Span::Fixed(30_000)), Op::Done],
            );
            let gap = floor_u64(engines as f64 / requests_per_s * 1e9);
            w.arrivals.push(Arrivals {
                to: http,
                gap: Span::Exp(gap),
            });
        }
        w
    }
}

/// Parameters of the schbench-like workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schbench {
    /// Message threads.
    pub message_threads: u32,
    /// CPU time of a worker per request.
    pub work: Span,
    /// CPU time of a message thread before it sends.
    pub route: Span,
    /// CPU time of a message thread after it sent. If longer than waking an idle CPU, the sync hint is false.
    pub linger: Span,
    /// How a message thread wakes a worker.
    pub mechanism: Mechanism,
}
