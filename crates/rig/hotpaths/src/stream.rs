//! Streamed tokens, from a worker's engine to the bytes of the answer: a worker process and a frontend's shard in one
//! thread and in virtual time, with a pipe between them.

use std::future::ready;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix as _; // for its feature: see Cargo.toml
use slipstream_base::RankId;
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_dispatch::{Dispatcher, Rules};
use slipstream_engine::{Engine, OutputModel};
use slipstream_frontend::sim::{SimFrontend, SimShard};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{RemoteLimits, Roster, Service};
use slipstream_planes::clock::sim as clock;
use slipstream_planes::discovery::{ProcessRecord, ProcessRole, SeatKey, SessionEvent};
use slipstream_planes::link::Socket;
use slipstream_planes::ring::PlaneLimits;
use slipstream_router::{Fleets, Router};
use slipstream_worker::sim::{Connect, Connecting, SimConfig, SimWorker};
use slipstream_worker::{Backend, LiveTiming, WorkerSpec};
use tokio::task::LocalSet;

/// Streams at a time.
const STREAMS: u64 = 64;
const STEP_NS: u64 = 10_000_000;
const ORIGIN_NS: u64 = 1_000_000_000_000;
const FINGERPRINT: u64 = 7;

/// [`STREAMS`] answers of `tokens` tokens each. With `resumes`, another worker could continue them.
pub(crate) fn tokens(tokens: u64, resumes: bool) -> u64 {
    clock::set(Some((ORIGIN_NS, 1)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O takes no resource");
    let local = LocalSet::new();
    local.block_on(&runtime, run(tokens, resumes));
    clock::set(None);
    STREAMS * tokens
}

fn cluster(resumes: bool) -> Cluster {
    let text = format!(
        "[model]\nname = \"m\"\n[engine]\nnum_gpu_blocks = 65536\nmax_model_len = 16384\n\
         [engine.timing]\nkind = \"constant\"\nstep_ns = {STEP_NS}\n\
         [router]\nresumes_max = {}\n[pool.a]\nworkers = 1\n",
        if resumes { 3 } else { 0 }
    );
    let no_file = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let doc = Doc::parse("hotpaths.toml", text.as_bytes());
    file::read(doc, no_file).unwrap_or_else(|e| panic!("{e}")).0
}

async fn run(tokens: u64, resumes: bool) {
    let cluster = cluster(resumes);
    let text = Arc::new(TextModel::builtin());
    let (shard, record) = frontend(&cluster, &text);
    let carry = tokio::task::spawn_local(shard.clone().run());
    let mut worker = worker(&cluster, &text, &shard);
    worker.on_discovery(SessionEvent::Appeared(record));
    let mut now = ORIGIN_NS;
    // Connections, and the worker's readiness.
    while shard.state().seated.is_empty() || !worker.is_ready() {
        now = step(&mut worker, now).await;
    }
    now = step(&mut worker, now).await;
    let body = format!(
        "{{\"prompt\":\"{}\",\"max_tokens\":{tokens},\"stream\":true,\"ignore_eos\":true}}",
        "one two three four ".repeat(32)
    );
    let mut answers = tokio::task::JoinSet::new();
    for _ in 0..STREAMS {
        let (shard, body) = (shard.clone(), body.clone());
        answers.spawn_local(async move {
            let answer = shard.post(body.into(), None).await;
            let mut answer = answer.unwrap_or_else(|e| panic!("{e:?}"));
            let mut bytes = 0;
            while let Some(piece) = answer.next().await {
                bytes += piece.expect("the answer is whole").len();
            }
            bytes
        });
    }
    while !answers.is_empty() {
        while let Some(bytes) = answers.try_join_next() {
            assert!(bytes.expect("no panic") as u64 > 30 * tokens);
        }
        now = step(&mut worker, now).await;
    }
    carry.abort();
}

/// Lets the tasks run, then the engine: now, or at its next time.
async fn step(worker: &mut SimWorker, now: u64) -> u64 {
    // Frames cross the pipe, credit comes back.
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    let mut now = now;
    if !worker.is_due(now) {
        now = worker.next_due().min(now + STEP_NS);
        clock::set(Some((now, 1)));
    }
    worker.round(now);
    now
}

fn frontend(cluster: &Cluster, text: &Arc<TextModel>) -> (SimShard, ProcessRecord) {
    let fleets = Fleets::of_cluster(cluster).expect("a valid cluster");
    let key = SeatKey::draw().expect("random bytes");
    let roster = Roster::new(
        1,
        FINGERPRINT,
        "frontend".into(),
        fleets.clone(),
        1,
        1,
        key.bytes(),
    );
    let service = Service {
        max_model_len: 16_384,
        kv_blocks: 65_536,
        ..Service::new("m", text.clone(), fleets.clone())
    };
    let frontend = SimFrontend::new(service, Arc::new(roster), RemoteLimits::default());
    let router = Router::new(fleets.serve, 0);
    let shard = frontend.shard(
        0,
        Dispatcher::new(Rules::of_cluster(cluster), router, None),
        None,
    );
    let record = ProcessRecord {
        role: ProcessRole::Frontend,
        instance: 1,
        name: "frontend".into(),
        fingerprint: FINGERPRINT,
        shards: vec!["0".into()],
        workers: Vec::new(),
        key: Some(key),
    };
    (shard, record)
}

/// A process of one worker, whose connection to the frontend is a pipe to `shard`.
fn worker(cluster: &Cluster, text: &Arc<TextModel>, shard: &SimShard) -> SimWorker {
    let rank = RankId::default();
    let engine = &cluster.pools[0].engine;
    let read = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let timing = slipstream_engine::timing::build(engine, &cluster.model.shape, read);
    let output = OutputModel {
        vocab: text.output_vocab(),
        first_vocab: Some(text.first_vocab()),
        eos: text.eos(),
        lengths: engine.output_len.clone(),
    };
    let engine = Engine::new(rank, engine, timing.expect("a constant"), output);
    let spec = WorkerSpec {
        worker: rank.worker,
        ranks: vec![Box::new(engine.expect("a valid configuration")) as Box<dyn Backend>],
        startup_s: 0.0,
    };
    let config = SimConfig {
        instance: 2,
        fingerprint: FINGERPRINT,
        deadline: Duration::from_secs(5),
        unsent_bytes_max: 64 << 20,
        threads: 1,
        links: 1,
        limits: PlaneLimits::default(),
    };
    let shard = shard.clone();
    let connect: Connect = Rc::new(move |_: &str| -> Connecting {
        let (near, far) = tokio::io::duplex(256 << 10);
        shard.accept(Box::new(far));
        Box::pin(ready(Ok(Box::new(near) as Box<dyn Socket>)))
    });
    let started = SimWorker::start(&config, vec![spec], &LiveTiming::default(), connect);
    let (worker, task) = started.expect("one engine");
    tokio::task::spawn_local(task);
    worker
}
