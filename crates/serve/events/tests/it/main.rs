//! The event plane against real subscribers (our own, the `zeromq` crate's, a NATS server), and its
//! messages against bytes that vLLM and Dynamo encoded.

mod golden;
mod hub;
mod nats;
mod zmq;

use std::time::{Duration, Instant};

use slipstream_base::fpm::DecodeStats;
use slipstream_base::{BlockHash, ForwardPassMetrics, KvDelta, KvOp, RankId, WorkerId};
use slipstream_config::cluster::{EventBus, EventsConfig};
use slipstream_events::{EventPlane, EventPublisher, PlaneOptions};

/// Root of block chains.
const ROOT: BlockHash = BlockHash(7);

fn rank(worker: u32) -> RankId {
    RankId {
        worker: WorkerId(worker),
        dp_rank: 0,
    }
}

/// A bus on free ports of this machine.
fn config(bus: EventBus) -> EventsConfig {
    EventsConfig {
        bus,
        fpm_endpoint: "tcp://127.0.0.1:0".into(),
        kv_endpoint: "tcp://127.0.0.1:0".into(),
        replay_endpoint: Some("tcp://127.0.0.1:0".into()),
        interval_ms: 0.1,
        ..EventsConfig::default()
    }
}

/// A plane for two workers of one rank each, and one publisher for both.
fn start(config: &EventsConfig, fresh_buffers: bool) -> (EventPlane, EventPublisher) {
    let options = PlaneOptions {
        ranks: vec![(rank(0), 0), (rank(1), 1)],
        threads: 1,
        block_size: 2,
        root: ROOT,
        fresh_buffers,
    };
    let (plane, mut publishers) = EventPlane::start(config, &options).unwrap().unwrap();
    (plane, publishers.remove(0))
}

fn pass(worker: u32, counter: u64) -> ForwardPassMetrics {
    ForwardPassMetrics {
        rank: rank(worker),
        counter,
        wall_time_s: 0.01,
        scheduled_decode: DecodeStats {
            requests: 3,
            kv_tokens: counter,
            kv_tokens_variance: 0.5,
        },
        ..ForwardPassMetrics::default()
    }
}

/// A delta that stores blocks `first..first + count`, one after another from the root.
fn stores(worker: u32, first: u64, count: u64) -> KvDelta {
    let ops = (first..first + count).map(|n| KvOp::Stored {
        hash: BlockHash(1000 + n),
        parent: if n == first { ROOT } else { BlockHash(999 + n) },
    });
    KvDelta {
        rank: rank(worker),
        sequence: first,
        ops: ops.collect(),
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// Time limit, long enough for the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::yield_now();
    }
}

/// The result of `future`, within the time limit.
async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(PATIENCE, future).await;
    ended.unwrap_or_else(|_| panic!("never: {what}"))
}
