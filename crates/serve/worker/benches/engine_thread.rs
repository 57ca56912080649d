//! From a request in a ring to tokens out of one, at a million times modelled time: engine, fan-out,
//! frames and hand-over, without HTTP. `elem/s` is tokens per second.

use std::hint::black_box;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, Prompt, RankId, RequestId, Role, WorkerId,
};
use slipstream_config::cluster::{EngineConfig, OutputLen};
use slipstream_engine::timing::Constant;
use slipstream_engine::{Engine, OutputModel};
use slipstream_planes::events::NoEvents;
use slipstream_planes::ring::Polled;
use slipstream_planes::{
    Entry, EventSink, Plane, PlaneLimits, Registration, ShardPort, StartRequest, StreamTable,
    ToWorker,
};
use slipstream_worker::{LiveTiming, WorkerSet, WorkerSpec};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

struct Rig {
    set: WorkerSet,
    port: ShardPort,
    table: StreamTable<()>,
    waker: Waker,
    workers: u32,
}

fn rig(workers: u32, threads: usize, fast_path: bool) -> Rig {
    let specs = (0..workers)
        .map(|worker| {
            let rank = RankId {
                worker: WorkerId(worker),
                dp_rank: 0,
            };
            let output = OutputModel {
                vocab: (1_000..30_000).collect(),
                first_vocab: None,
                eos: 7,
                lengths: OutputLen::Constant(1 << 20),
            };
            let timing = Box::new(Constant {
                step_ns: 10_000_000,
            });
            let engine = Engine::new(rank, &EngineConfig::default(), timing, output).unwrap();
            WorkerSpec {
                worker: WorkerId(worker),
                ranks: vec![Box::new(engine)],
                startup_s: 0.0,
            }
        })
        .collect();
    let mut plane = Plane::new(1, threads, PlaneLimits::default());
    let sinks = (0..threads)
        .map(|_| Box::new(NoEvents) as Box<dyn EventSink>)
        .collect();
    let timing = LiveTiming {
        speedup: 1e6,
        fast_path,
        ..LiveTiming::default()
    };
    let set = WorkerSet::start(specs, &timing, plane.threads, sinks, |_, _| ()).unwrap();
    while !set.ranks().iter().all(|rank| rank.is_ready()) {
        std::thread::yield_now();
    }
    Rig {
        set,
        port: plane.shards.pop().unwrap(),
        table: StreamTable::new(0, 1 << 16),
        waker: Waker::from(Arc::new(Unpark(std::thread::current()))),
        workers,
    }
}

impl Rig {
    fn start(&self, n: u64, isl: u32, osl: u32) -> Registration<()> {
        let registration = self.table.register(()).unwrap();
        let tokens: Vec<u32> = (0..isl)
            .map(|at| (n as u32).wrapping_mul(977) + at)
            .collect();
        let start = StartRequest {
            addr: registration.addr(),
            rank: RankId {
                worker: WorkerId(n as u32 % self.workers),
                dp_rank: 0,
            },
            request: EngineRequest {
                id: RequestId(0),
                prompt: Prompt::from_tokens(&tokens, 16, BlockHash(n)).unwrap(),
                params: GenerationParams {
                    max_tokens: osl,
                    ..GenerationParams::default()
                },
                priority: 0,
                seed: n,
            },
            dispatched_ns: slipstream_planes::clock::monotonic_ns(),
            credit_bytes: slipstream_planes::frame::NO_LIMIT,
            traced: false,
            more: false,
            role: Role::Both,
            attempt: 0,
        };
        self.port.send(ToWorker::Start(Box::new(start))).unwrap();
        registration
    }

    /// Sends `count` requests, `concurrency` at a time, and reads every token.
    fn run(&self, count: u64, concurrency: usize, isl: u32, osl: u32) {
        let mut open: Vec<Option<Registration<()>>> = Vec::new();
        let (mut sent, mut live, mut ended, mut tokens_read) = (0, 0, 0, 0u64);
        while ended < count {
            while live < concurrency && sent < count {
                let registration = self.start(sent, isl, osl);
                let slot = registration.id().slot as usize;
                if slot >= open.len() {
                    open.resize_with(slot + 1, || None);
                }
                open[slot] = Some(registration);
                sent += 1;
                live += 1;
            }
            let mut cx = Context::from_waker(&self.waker);
            let polled = self.port.poll_frames(&mut cx, 64, |frame| {
                for entry in frame.entries() {
                    match entry {
                        Entry::Tokens { stream, tokens, .. } => {
                            self.table
                                .with(stream, |()| ())
                                .expect("the stream is open");
                            tokens_read += black_box(tokens).len() as u64;
                        }
                        Entry::End { stream, .. } => {
                            open[stream.slot as usize] = None;
                            live -= 1;
                            ended += 1;
                        }
                        Entry::Prologue { .. } => {}
                        Entry::Turn { .. } | Entry::Room { .. } => {
                            unreachable!("no stream has more input")
                        }
                        Entry::Computed { .. } | Entry::Reserved { .. } => {
                            unreachable!("nothing is handed over")
                        }
                        Entry::Refused { message, .. } => panic!("refused: {message}"),
                    }
                }
            });
            match polled {
                Poll::Pending => std::thread::park(),
                Poll::Ready(Polled::Frames(_)) => {}
                Poll::Ready(other) => panic!("{other:?}"),
            }
        }
        assert_eq!(tokens_read, count * u64::from(osl));
    }
}

struct Case {
    name: &'static str,
    workers: u32,
    count: u64,
    concurrency: usize,
    isl: u32,
    osl: u32,
    fast_path: bool,
}

const C256: Case = Case {
    name: "c256_1024_1024",
    workers: 1,
    count: 256,
    concurrency: 256,
    isl: 1024,
    osl: 1024,
    fast_path: true,
};

const C1: Case = Case {
    name: "c1_128_32",
    workers: 1,
    count: 200,
    concurrency: 1,
    isl: 128,
    osl: 32,
    fast_path: true,
};

const CASES: [Case; 6] = [
    C256,
    Case {
        name: "c256_1024_1024_no_fast_path",
        fast_path: false,
        ..C256
    },
    Case {
        name: "c256_128_1",
        count: 4096,
        isl: 128,
        osl: 1,
        ..C256
    },
    Case {
        name: "c256_256_32_8_workers",
        workers: 8,
        count: 2048,
        isl: 256,
        osl: 32,
        ..C256
    },
    C1,
    Case {
        name: "c1_128_32_no_fast_path",
        fast_path: false,
        ..C1
    },
];

fn live(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine_thread");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(5));
    for case in &CASES {
        let rig = rig(case.workers, 1, case.fast_path);
        group.throughput(Throughput::Elements(case.count * u64::from(case.osl)));
        group.bench_function(case.name, |b| {
            b.iter(|| rig.run(case.count, case.concurrency, case.isl, case.osl));
        });
        rig.set.shutdown().unwrap();
    }
    group.finish();
}

/// How late a thread is that waits for 200 µs: with the slack of a new thread (50 µs), and with
/// the 1 ns that engine threads ask for.
fn oversleep(c: &mut Criterion) {
    use slipstream_planes::bell::ThreadBell;
    use slipstream_planes::clock::monotonic_ns;

    let mut group = c.benchmark_group("oversleep");
    for (name, slack_ns) in [("slack_50us", 50_000), ("slack_1ns", 1)] {
        group.bench_function(name, |b| {
            #[cfg(target_os = "linux")]
            rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(slack_ns)).unwrap();
            let bell = ThreadBell::default();
            b.iter_custom(|iterations| {
                let mut late_ns = 0;
                for _ in 0..iterations.min(2_000) {
                    let deadline = monotonic_ns() + 200_000;
                    bell.prepare();
                    bell.wait(Some(deadline));
                    late_ns += monotonic_ns().saturating_sub(deadline);
                }
                // Scaled up, as sleeping a million times would take minutes.
                let scale = iterations as f64 / iterations.min(2_000) as f64;
                Duration::from_nanos((late_ns as f64 * scale) as u64)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, live, oversleep);
criterion_main!(benches);
