//! Engine threads whose work a shard's thread runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;

use slipstream_base::{EngineRequest, FinishReason};
use slipstream_planes::StreamAddr;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::host::{Host, Lent, Turn};

use crate::rig::{Rig, Setup, Shard, expected, rank, until, workers};
use crate::{prompt, real_time};

/// Steps of 2 ms: few enough.
const STEP_NS: u64 = 2_000_000;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

/// A shard's thread that runs work.
struct Runner {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    /// It has work.
    has_work: Arc<AtomicBool>,
}

impl Runner {
    fn start(shard: &Shard) -> Runner {
        let mut host = Host::open(shard.port.host(0));
        let (stop, has_work) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (stops, has) = (stop.clone(), has_work.clone());
        let thread = std::thread::spawn(move || {
            let woken = Arc::<Woken>::default();
            let waker = Waker::from(woken.clone());
            let mut lent: Option<Lent> = None;
            let mut due_ns = 0;
            while !stops.load(SeqCst) {
                std::thread::yield_now();
                let Some(work) = &mut lent else {
                    if let Poll::Ready(work) = host.poll_lent(&mut Context::from_waker(&waker)) {
                        (lent, due_ns) = (Some(work), 0);
                        has.store(true, SeqCst);
                    }
                    continue;
                };
                if !woken.0.swap(false, SeqCst) && monotonic_ns() < due_ns {
                    continue;
                }
                match work.turn(&waker) {
                    Turn::Until(at) => due_ns = at,
                    Turn::Leave => {
                        lent = None;
                        has.store(false, SeqCst);
                    }
                }
            }
        });
        Runner {
            thread: Some(thread),
            stop,
            has_work,
        }
    }

    fn has_work(&self) -> bool {
        self.has_work.load(SeqCst)
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn hosted(rig: &Rig) -> u64 {
    rig.set.thread_stats().map(|stats| stats.hosted.get()).sum()
}

fn check(rig: &Rig, shard: usize, addr: StreamAddr, seed: u64, osl: usize) {
    let answer = rig.shards[shard].answer(addr);
    assert_eq!(answer.tokens, expected(seed, osl));
    assert_eq!(answer.end.unwrap().reason, FinishReason::Length);
}

fn request(seed: u64, osl: u32) -> EngineRequest {
    Shard::request(&prompt(seed, 9), osl, seed)
}

#[test]
fn calm_steps_run_at_the_shard_with_the_same_answers() {
    let mut rig = real_time().start_ready(workers(1, STEP_NS));
    let runner = Runner::start(&rig.shards[0]);
    let first = rig.shards[0].start(rank(0), request(1, 100));
    until(|| runner.has_work());
    // It wakes the task that runs the work.
    let second = rig.shards[0].start(rank(0), request(2, 40));
    rig.shards[0].read_all();
    check(&rig, 0, first, 1, 100);
    check(&rig, 0, second, 2, 40);
    assert!(hosted(&rig) >= 30, "{} rounds", hosted(&rig));
    // To stop, the work returns to its thread.
    rig.set.shutdown().unwrap();
    until(|| !runner.has_work());
}

#[test]
fn work_leaves_a_shard_when_another_one_has_streams() {
    let setup = Setup {
        shards: 2,
        ..real_time()
    };
    let mut rig = setup.start_ready(workers(1, STEP_NS));
    let runner = Runner::start(&rig.shards[0]);
    let first = rig.shards[0].start(rank(0), request(1, 400));
    until(|| runner.has_work());
    let second = rig.shards[1].start(rank(0), request(2, 200));
    until(|| !runner.has_work());
    rig.shards[1].read_all();
    check(&rig, 1, second, 2, 200);
    // A shard that ends gives the work back.
    until(|| runner.has_work());
    drop(runner);
    rig.shards[0].read_all();
    check(&rig, 0, first, 1, 400);
}
