//! The subscriber against publishers that the test plays, byte by byte.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slipstream_base::{BlockHash, KvOp, RankId, TokenId};
use slipstream_events::kv::ExternalHash;
use slipstream_events::{BlockRemoved, BlockStored, KvEvent, KvEventBatch};
use slipstream_probe::{KvCounters, KvEventSource, KvFollower, MirrorOptions, ViewState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Longer than anything here takes, so that a fault ends the test instead of hanging it.
const LIMIT: Duration = Duration::from_secs(60);

/// ZMTP 3.0's greeting with the NULL mechanism, and a READY command of a socket of type `kind`.
fn hello(kind: &str) -> Vec<u8> {
    let mut out = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    out.extend_from_slice(b"NULL");
    out.resize(64, 0);
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(kind.len() as u8);
    ready.extend_from_slice(kind.as_bytes());
    out.extend_from_slice(&[4, ready.len() as u8]);
    out.extend_from_slice(&ready);
    out
}

/// A message of several frames.
fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (at, frame) in frames.iter().enumerate() {
        let more = u8::from(at + 1 < frames.len());
        out.push(more | 2);
        out.extend_from_slice(&(frame.len() as u64).to_be_bytes());
        out.extend_from_slice(frame);
    }
    out
}

/// Accepts a peer, and reads its greeting, READY and `rest` bytes more.
async fn accept(listener: &TcpListener, kind: &str, rest: usize) -> (TcpStream, Vec<u8>) {
    let (mut stream, _) = listener.accept().await.unwrap();
    stream.write_all(&hello(kind)).await.unwrap();
    let mut greeting = [0; 64];
    stream.read_exact(&mut greeting).await.unwrap();
    let mut head = [0; 2];
    stream.read_exact(&mut head).await.unwrap();
    let mut ready = vec![0; head[1].into()];
    stream.read_exact(&mut ready).await.unwrap();
    let mut read = vec![0; rest];
    stream.read_exact(&mut read).await.unwrap();
    (stream, read)
}

/// A batch, as it is published.
type Payload = Vec<u8>;

/// The block with engine's hash `n`: tokens `n, n`, after block `n - 1`.
fn store(n: u64) -> Payload {
    let token = n as TokenId;
    batch(KvEvent::BlockStored(Box::new(BlockStored {
        block_hashes: vec![ExternalHash::Int(n)],
        parent_block_hash: (n > 1).then_some(ExternalHash::Int(n - 1)),
        token_ids: vec![token, token],
        block_size: 2,
        ..BlockStored::default()
    })))
}

fn remove(n: u64) -> Payload {
    batch(KvEvent::BlockRemoved(BlockRemoved {
        block_hashes: vec![ExternalHash::Int(n)],
        ..BlockRemoved::default()
    }))
}

fn batch(event: KvEvent) -> Payload {
    KvEventBatch {
        events: vec![event],
        ..KvEventBatch::default()
    }
    .to_vec()
}

/// Our hashes of the blocks 1 to `n`.
fn chain(n: u64) -> HashSet<BlockHash> {
    let tokens: Vec<TokenId> = (1..=n as TokenId).flat_map(|n| [n, n]).collect();
    BlockHash::root("m", "", "")
        .chain(&tokens, 2)
        .into_iter()
        .collect()
}

/// An engine: batches are published from a channel, and replayed from a list.
struct Engine {
    publish: TcpListener,
    replay: Option<TcpListener>,
    /// Batches that the replay endpoint still has.
    kept: Arc<Mutex<Vec<(u64, Payload)>>>,
}

impl Engine {
    async fn new(replays: bool) -> Engine {
        let bind = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let replay = if replays { Some(bind().await) } else { None };
        Engine {
            publish: bind().await,
            replay,
            kept: Arc::default(),
        }
    }

    fn source(&self) -> KvEventSource {
        let at = |l: &TcpListener| format!("tcp://{}", l.local_addr().unwrap());
        KvEventSource {
            rank: 0,
            endpoint: at(&self.publish),
            replay_endpoint: self.replay.as_ref().map(at),
            topic: "kv".into(),
        }
    }

    fn keep(&self, batches: impl IntoIterator<Item = (u64, Payload)>) {
        *self.kept.lock().unwrap() = batches.into_iter().collect();
    }

    /// The next subscriber.
    async fn subscriber(&self) -> TcpStream {
        // The subscription: a frame of 1 and the topic.
        let (stream, asked) = accept(&self.publish, "PUB", 5).await;
        assert_eq!(asked, b"\0\x03\x01kv");
        stream
    }

    /// Answers every replay with the batches that it keeps.
    async fn serve_replays(&self) {
        let Some(listener) = &self.replay else {
            return std::future::pending().await;
        };
        loop {
            let (mut stream, asked) = accept(listener, "ROUTER", 12).await;
            assert_eq!(asked[..4], [1, 0, 0, 8]);
            let start = u64::from_be_bytes(asked[4..].try_into().unwrap());
            let kept = self.kept.lock().unwrap().clone();
            for (sequence, payload) in kept.iter().filter(|(sequence, _)| *sequence >= start) {
                let frames = message(&[b"", b"kv", &sequence.to_be_bytes(), payload]);
                stream.write_all(&frames).await.unwrap();
            }
            let end = message(&[b"", b"", &u64::MAX.to_be_bytes(), b""]);
            stream.write_all(&end).await.unwrap();
        }
    }
}

async fn publish(stream: &mut TcpStream, sequence: u64, payload: &[u8]) {
    let frames = message(&[b"kv", &sequence.to_be_bytes(), payload]);
    stream.write_all(&frames).await.unwrap();
}

/// Contents of the follower's index, after each delta.
struct Index {
    deltas: mpsc::UnboundedReceiver<(u64, Vec<KvOp>)>,
    held: HashSet<BlockHash>,
    next: u64,
    counters: Arc<KvCounters>,
}

impl Index {
    /// Applies deltas until it holds `wanted`.
    async fn reaches(&mut self, wanted: &HashSet<BlockHash>) {
        while self.held != *wanted {
            self.delta().await;
        }
    }

    async fn delta(&mut self) {
        let (sequence, ops) = self.deltas.recv().await.expect("the follower runs");
        assert_eq!(sequence, self.next, "our own sequence has no gap");
        self.next += 1;
        for op in ops {
            match op {
                KvOp::Stored { hash, .. } => assert!(self.held.insert(hash)),
                KvOp::Removed { hash } => assert!(self.held.remove(&hash)),
                KvOp::Cleared => self.held.clear(),
            }
        }
    }

    fn count(&self, counter: impl Fn(&KvCounters) -> &std::sync::atomic::AtomicU64) -> u64 {
        counter(&self.counters).load(Ordering::Relaxed)
    }
}

/// Runs `script` with a follower of `engine`.
async fn check(engine: Engine, script: impl AsyncFnOnce(&Engine, &mut Index)) {
    let options = MirrorOptions {
        model: "m".into(),
        block_size: 2,
        blocks_max: 100,
    };
    let follower = KvFollower::new(engine.source(), RankId::default(), options);
    let (send, deltas) = mpsc::unbounded_channel();
    let mut index = Index {
        deltas,
        held: HashSet::new(),
        next: 0,
        counters: follower.counters(),
    };
    let following = follower.run(move |delta| {
        let _ = send.send((delta.sequence, delta.ops.clone()));
    });
    let played = async {
        tokio::select! {
            never = following => match never {},
            () = engine.serve_replays() => unreachable!("it serves until it is dropped"),
            () = script(&engine, &mut index) => {}
        }
    };
    tokio::time::timeout(LIMIT, played)
        .await
        .expect("the script ended");
}

#[tokio::test]
async fn a_gap_is_repaired_by_replay() {
    let engine = Engine::new(true).await;
    check(engine, async |engine, index| {
        engine.keep([(0, store(1))]);
        let mut stream = engine.subscriber().await;
        // From before the subscription.
        index.reaches(&chain(1)).await;
        publish(&mut stream, 1, &store(2)).await;
        index.reaches(&chain(2)).await;
        // 2 and 3 are not published. A removal is among them: without it the view would be wrong.
        engine.keep([(1, store(2)), (2, remove(2)), (3, store(2)), (4, store(3))]);
        publish(&mut stream, 4, &store(3)).await;
        index.reaches(&chain(3)).await;
        // The replay had batch 4 too; the following batch is no gap.
        publish(&mut stream, 5, &store(4)).await;
        index.reaches(&chain(4)).await;
        let found = (
            index.count(|c| &c.gaps),
            index.count(|c| &c.repaired),
            index.count(|c| &c.lost_batches),
            index.count(|c| &c.batches),
        );
        assert_eq!(found, (1, 1, 0, 6));
    })
    .await;
}

#[tokio::test]
async fn a_gap_that_cannot_be_repaired_clears_the_view() {
    for replays in [false, true] {
        check(Engine::new(replays).await, async |engine, index| {
            let mut stream = engine.subscriber().await;
            publish(&mut stream, 0, &store(1)).await;
            publish(&mut stream, 1, &store(2)).await;
            index.reaches(&chain(2)).await;
            // Batch 2, which may have removed blocks, is gone.
            engine.keep([(3, remove(9)), (4, store(3)), (5, store(1))]);
            for (sequence, payload) in [(3, remove(9)), (4, store(3)), (5, store(1))] {
                publish(&mut stream, sequence, &payload).await;
            }
            index.reaches(&HashSet::new()).await;
            index.reaches(&chain(1)).await;
            let found = (index.count(|c| &c.gaps), index.count(|c| &c.repaired));
            assert_eq!(found, (1, 0));
            assert_eq!(index.count(|c| &c.lost_batches), 1);
            // Block 3 follows one that is not known any more.
            assert_eq!(index.count(|c| &c.skipped_blocks), 1);
        })
        .await;
    }
}

#[tokio::test]
async fn a_lost_connection_keeps_the_view_of_the_same_engine() {
    check(Engine::new(true).await, async |engine, index| {
        let mut stream = engine.subscriber().await;
        publish(&mut stream, 0, &store(1)).await;
        publish(&mut stream, 1, &store(2)).await;
        index.reaches(&chain(2)).await;
        engine.keep([(0, store(1)), (1, store(2)), (2, store(3))]);
        drop(stream);
        let mut stream = engine.subscriber().await;
        index.reaches(&chain(3)).await;
        publish(&mut stream, 3, &store(4)).await;
        index.reaches(&chain(4)).await;
        assert_eq!(index.count(|c| &c.restarts), 0);
        assert_eq!(index.count(|c| &c.connections), 2);
        // Two replays: the first was that of the start. No batch was applied twice.
        assert_eq!(index.count(|c| &c.batches), 4);
    })
    .await;
}

/// The other process has the same numbers, and even as many batches.
#[tokio::test]
async fn an_engine_that_restarted_is_seen_as_empty() {
    for (replays, kept) in [
        (true, vec![(0, store(5)), (1, store(1))]),
        (true, vec![(0, store(1))]),
        (true, vec![]),
        (false, vec![]),
    ] {
        check(Engine::new(replays).await, async |engine, index| {
            let mut stream = engine.subscriber().await;
            publish(&mut stream, 0, &store(1)).await;
            publish(&mut stream, 1, &store(2)).await;
            index.reaches(&chain(2)).await;
            engine.keep(kept.clone());
            drop(stream);
            let mut stream = engine.subscriber().await;
            index.reaches(&HashSet::new()).await;
            assert_eq!(index.count(|c| &c.restarts), 1);
            let next = kept.len() as u64;
            publish(&mut stream, next, &store(1)).await;
            index.reaches(&chain(1)).await;
        })
        .await;
    }
}

/// A proxy may restart the numbers without a new connection.
#[tokio::test]
async fn numbers_that_begin_again_are_a_restart() {
    check(Engine::new(false).await, async |engine, index| {
        let mut stream = engine.subscriber().await;
        publish(&mut stream, 7, &store(1)).await;
        publish(&mut stream, 8, &store(2)).await;
        index.reaches(&chain(2)).await;
        publish(&mut stream, 0, &store(1)).await;
        index.reaches(&HashSet::new()).await;
        index.reaches(&chain(1)).await;
        assert_eq!(index.count(|c| &c.restarts), 1);
    })
    .await;
}

/// Duplicates, as of a proxy that delivers at least once, are no restart.
#[tokio::test]
async fn a_batch_received_twice_is_ignored() {
    check(Engine::new(false).await, async |engine, index| {
        let mut stream = engine.subscriber().await;
        for (sequence, payload) in [(4, store(1)), (5, store(2)), (4, store(1)), (5, store(2))] {
            publish(&mut stream, sequence, &payload).await;
        }
        publish(&mut stream, 6, &store(3)).await;
        index.reaches(&chain(3)).await;
        assert_eq!(index.count(|c| &c.duplicates), 2);
        assert_eq!(index.count(|c| &c.restarts), 0);
    })
    .await;
}

/// A publisher whose sequence runs backwards causes some replays, not one per batch.
#[tokio::test]
async fn a_sequence_that_runs_backwards_causes_few_replays() {
    const BATCHES: u64 = 500;
    check(Engine::new(true).await, async |engine, index| {
        let mut stream = engine.subscriber().await;
        for n in (1..=BATCHES).rev() {
            let mut payload = store(1);
            payload[3] = n as u8; // another creation time
            publish(&mut stream, 2 * n, &payload).await;
        }
        // The last one is the first of a new sequence.
        publish(&mut stream, 0, &store(1)).await;
        while index.count(|c| &c.restarts) < BATCHES {
            index.delta().await;
        }
        let withheld = index.count(|c| &c.withheld_replays);
        assert!(withheld >= BATCHES / 2, "{withheld}");
    })
    .await;
}

/// A follower of `engine`, and the states that it reports.
fn watched(engine: &Engine) -> (KvFollower, mpsc::UnboundedReceiver<ViewState>) {
    let (send, states) = mpsc::unbounded_channel();
    let options = MirrorOptions {
        model: "m".into(),
        block_size: 2,
        blocks_max: 100,
    };
    let follower = KvFollower::new(engine.source(), RankId::default(), options);
    let follower = follower.with_state(move |state| send.send(state.clone()).unwrap());
    (follower, states)
}

/// Runs `follower` until `script` has ended.
async fn play(follower: KvFollower, script: impl Future<Output = ()>) {
    let played = async {
        tokio::select! {
            never = follower.run(|_| {}) => match never {},
            () = script => {}
        }
    };
    tokio::time::timeout(LIMIT, played).await.expect("it ended");
}

/// An engine of which nothing can be read is guessed, and followed again when it can be read.
#[tokio::test]
async fn a_view_of_which_too_little_is_readable_is_of_no_use() {
    let engine = Engine::new(false).await;
    let (follower, mut states) = watched(&engine);
    let counters = follower.counters();
    let script = async {
        let mut stream = engine.subscriber().await;
        publish(&mut stream, 0, &store(1)).await;
        assert_eq!(states.recv().await.unwrap(), ViewState::Followed);
        let odd = with_odd_tokens();
        for n in 1..=20 {
            publish(&mut stream, n, &odd).await;
        }
        let ViewState::Useless(why) = states.recv().await.unwrap() else {
            panic!("it is of use");
        };
        assert!(
            why.contains("cannot be read") && why.contains("token"),
            "{why}"
        );
        assert!(counters.useless.load(Ordering::Relaxed));
        for n in 21..400 {
            publish(&mut stream, n, &store(1)).await;
        }
        assert_eq!(states.recv().await.unwrap(), ViewState::Followed);
        assert!(!counters.useless.load(Ordering::Relaxed));
    };
    play(follower, script).await;
}

/// A view counts from the first block that its events name, and not while they do not arrive.
#[tokio::test]
async fn a_view_is_of_use_while_events_arrive() {
    let engine = Engine::new(false).await;
    let (follower, mut states) = watched(&engine);
    let script = async {
        for round in 0..2 {
            let mut stream = engine.subscriber().await;
            if round > 0 {
                assert_eq!(states.recv().await.unwrap(), ViewState::Unproven);
            }
            publish(&mut stream, 0, &remove(1)).await;
            publish(&mut stream, 1, &store(1)).await;
            assert_eq!(states.recv().await.unwrap(), ViewState::Followed);
            publish(&mut stream, 2, &remove(1)).await; // empty, and known to be
            drop(stream);
            let ViewState::Useless(why) = states.recv().await.unwrap() else {
                panic!("nothing arrives");
            };
            assert!(why.contains("sends no KV events ("), "{why}");
        }
        let _stream = engine.subscriber().await;
        assert_eq!(states.recv().await.unwrap(), ViewState::Unproven);
    };
    play(follower, script).await;
}

/// A stored block whose token is a text.
fn with_odd_tokens() -> Payload {
    let mut out = batch(KvEvent::BlockStored(Box::default()));
    let name = b"\xa9token_ids";
    let at = out.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    out.splice(at..=at, [0x91, 0xa1, b'x']);
    out
}

#[tokio::test]
async fn a_batch_that_cannot_be_read_clears_the_view() {
    check(Engine::new(false).await, async |engine, index| {
        let mut stream = engine.subscriber().await;
        publish(&mut stream, 0, &store(1)).await;
        index.reaches(&chain(1)).await;
        publish(&mut stream, 1, b"\xc1").await;
        index.reaches(&HashSet::new()).await;
        // A message that is no event at all is noticed by the gap that it leaves.
        publish(&mut stream, 2, &store(1)).await;
        index.reaches(&chain(1)).await;
        stream
            .write_all(&message(&[b"kv", b"short"]))
            .await
            .unwrap();
        publish(&mut stream, 4, &store(1)).await;
        index.reaches(&HashSet::new()).await;
        index.reaches(&chain(1)).await;
        assert_eq!(index.count(|c| &c.unreadable), 2);
    })
    .await;
}
