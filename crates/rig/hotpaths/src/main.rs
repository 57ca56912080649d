//! Does a fixed amount of work on one hot path: `slipstream-hotpaths PATH COUNT`.
//!
//! `scripts/instructions.sh` runs it under callgrind with two counts. The difference of the two is the cost of the
//! work between them, without the set-up. Prints the operations done.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![allow(clippy::disallowed_methods)] // it calls the router directly

#[cfg(feature = "sim")]
mod stream;

use std::collections::VecDeque;
use std::fmt::Display;
use std::hint::black_box;
use std::io::Write;
use std::process::ExitCode;

use bytes::BytesMut;
use slipstream_base::mix::draw;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, KvDelta, KvOp, Prompt, RankId, RequestId, SimTime,
    Tail, WorkerId,
};
use slipstream_config::cluster::{EngineConfig, OutputLen, RouterConfig};
use slipstream_config::doc::Doc;
use slipstream_engine::timing::Constant;
use slipstream_engine::{Engine, OutputModel, PassOutput};
use slipstream_frontend::openai::{CompletionApi, Head, SseRender};
use slipstream_frontend::text::TextModel;
use slipstream_kvindex::{BlockIndex, Change, KeySet};
use slipstream_netsim::{Execution, Simulation};
use slipstream_planes::{Entry, PassFrame, StreamId, StreamTable};
use slipstream_router::{Fleet, RouteRequest, Router, TargetConfig};

type Work = fn(u64) -> u64;

/// Name and work of each path. The work takes a count of rounds, and returns the operations in them.
const PATHS: &[(&str, Work)] = &[
    ("engine token", |rounds| engine_tokens(rounds, true)),
    ("engine token, synchronous", |rounds| {
        engine_tokens(rounds, false)
    }),
    ("route, KV-aware, 64 engines", routes),
    ("frame token, encode", |rounds| frames(rounds, false)),
    ("frame token, decode", |rounds| frames(rounds, true)),
    ("SSE event", events),
    ("stream, open to end", streams),
    #[cfg(feature = "sim")]
    ("streamed token", |tokens| stream::tokens(tokens, true)),
    #[cfg(feature = "sim")]
    ("streamed token, no resume", |tokens| {
        stream::tokens(tokens, false)
    }),
    ("relayed event", |events| {
        slipstream_frontend::upstream::relay_events(events, false)
    }),
    ("relayed event, hidden token ids", |events| {
        slipstream_frontend::upstream::relay_events(events, true)
    }),
    ("packet event", |count| packets(count, false)),
    ("packet event, TCP with SACK", |count| packets(count, true)),
    ("block index, store and remove", index_blocks),
    ("key set, change", keys),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (path, rounds) = (args.next(), args.next());
    let Some(path) = path else {
        for (name, _) in PATHS {
            print(&name);
        }
        return ExitCode::SUCCESS;
    };
    let work = PATHS.iter().find(|(name, _)| *name == path);
    let rounds = rounds.and_then(|rounds| rounds.parse().ok());
    let (Some((_, work)), Some(rounds)) = (work, rounds) else {
        eprintln!("usage: slipstream-hotpaths [PATH COUNT]; without arguments it lists the paths");
        return ExitCode::from(2);
    };
    print(&work(rounds));
    ExitCode::SUCCESS
}

fn print(line: &dyn Display) {
    writeln!(std::io::stdout(), "{line}").expect("standard output is open");
}

/// The `n`th of `len` places, around and around.
fn place(n: u64, len: usize) -> usize {
    to_usize(n % len as u64)
}

/// Passes of 256 sequences, 128 tokens in and 1,024 out, the next request as soon as one ends.
fn engine_tokens(passes: u64, async_scheduling: bool) -> u64 {
    const BATCH: u64 = 256;
    let config = EngineConfig {
        block_size: 16,
        num_gpu_blocks: 32_768,
        max_num_seqs: to_u32(BATCH),
        max_num_batched_tokens: 8_192,
        max_model_len: 131_072,
        async_scheduling,
        ..EngineConfig::default()
    };
    let output = OutputModel {
        vocab: (0..150_000).collect(),
        first_vocab: None,
        eos: 150_000,
        lengths: OutputLen::Constant(1),
    };
    let timing = Box::new(Constant { step_ns: 1 });
    let mut engine =
        Engine::new(RankId::default(), &config, timing, output).expect("a valid configuration");
    let request = |id: u64, max_tokens: u32| {
        let blocks = (0..8)
            .map(|j| BlockHash::default().child_of_id(id, j))
            .collect();
        EngineRequest {
            id: RequestId(id),
            prompt: Prompt::from_parts(128, 16, blocks, Tail::Tokens([].into()))
                .expect("8 full blocks"),
            params: GenerationParams {
                max_tokens,
                ignore_eos: true,
                ..GenerationParams::default()
            },
            priority: 0,
            seed: id,
        }
    };
    let (mut out, mut now, mut tokens) = (PassOutput::default(), SimTime(0), 0);
    // Staggered, so that ends are spread over passes.
    for id in 0..BATCH {
        let left = 1 + to_u32(id * 1_024 / BATCH);
        engine.add(now, request(id, left)).expect("it fits");
    }
    let mut next = BATCH;
    for _ in 0..passes {
        now = engine.begin_pass(now).expect("never idle");
        engine.finish_pass(&mut out);
        tokens += u64::from(out.token_count);
        for _ in &out.finished {
            engine.add(now, request(next, 1_024)).expect("it fits");
            next += 1;
        }
    }
    tokens
}

/// Prompt `n` of 190 blocks; eight in a row share their first half.
fn prompt(n: u64) -> Prompt {
    let mut parent = BlockHash(0);
    let blocks = (0..190).map(|block| {
        let id = if block < 95 { n / 8 } else { (1 << 32) + n };
        parent = BlockHash(draw(parent.0 ^ id, block));
        parent
    });
    let tail = Tail::Opaque { id: n };
    Prompt::from_parts(190 * 64 + 10, 64, blocks.collect(), tail).expect("190 full blocks")
}

fn delta(rank: RankId, sequence: u64, prompt: &Prompt) -> KvDelta {
    let stored = |&hash| KvOp::Stored {
        hash,
        parent: BlockHash(0),
    };
    KvDelta {
        rank,
        sequence,
        ops: prompt.blocks().iter().map(stored).collect(),
    }
}

/// Decisions among 64 engines that hold 80 prompts each; 16 sequences per engine are open.
fn routes(count: u64) -> u64 {
    const ENGINES: u32 = 64;
    let rank = |worker| RankId {
        worker: WorkerId(worker),
        dp_rank: 0,
    };
    let targets = (0..ENGINES).map(|worker| TargetConfig {
        rank: rank(worker),
        kv_blocks: 16_384,
        prefix_caching: true,
    });
    let fleet = Fleet::new(RouterConfig::default(), 64, targets.collect()).expect("a valid fleet");
    for worker in 0..ENGINES {
        fleet.set_ready(WorkerId(worker), true);
        for n in 0..80 {
            let prompt = prompt(n * u64::from(ENGINES) + u64::from(worker));
            fleet.on_kv(&delta(rank(worker), n, &prompt));
        }
    }
    let mut router = Router::new(std::sync::Arc::new(fleet), 1);
    let prompts: Vec<Prompt> = (0..256).map(|n| prompt(n * 19)).collect();
    let mut open = VecDeque::new();
    for n in 0..count {
        let request = RouteRequest {
            prompt: black_box(&prompts[place(n, prompts.len())]),
            max_tokens: 100,
            session: None,
            direct: None,
            only: None,
            exclude: &[],
        };
        let mut routed = router
            .route(SimTime(0), &request, None)
            .expect("engines are ready");
        routed.active.on_first_token();
        open.push_back(routed);
        if open.len() > 16 * ENGINES as usize {
            open.pop_front();
        }
    }
    count
}

/// Frames of a pass of 256 sequences, one token each.
fn frames(count: u64, decode: bool) -> u64 {
    const PASS: u32 = 256;
    let mut frame = PassFrame::new();
    let fill = |frame: &mut PassFrame| {
        frame.clear();
        for slot in 0..PASS {
            let stream = StreamId {
                slot,
                generation: 1,
            };
            frame.push_tokens(stream, &[black_box(slot)], None);
        }
    };
    fill(&mut frame);
    let mut sum = 0;
    for _ in 0..count {
        if decode {
            for entry in black_box(&frame).entries() {
                if let Entry::Tokens { stream, tokens, .. } = entry {
                    sum += u64::from(stream.slot) + u64::from(tokens[0]);
                }
            }
        } else {
            fill(&mut frame);
            sum += frame.len() as u64;
        }
    }
    black_box(sum);
    count * u64::from(PASS)
}

/// One event per token of a chat, 1,024 tokens per buffer.
fn events(count: u64) -> u64 {
    let model = TextModel::builtin();
    let head = Head {
        kind: CompletionApi::Chat,
        id: "chatcmpl-0123456789abcdef",
        created: 1_700_000_000,
        model: "qwen3-32b",
        include_usage: false,
    };
    let render = SseRender::new(&head, 0);
    let vocab = model.output_vocab();
    let tokens: Vec<_> = (0..1024)
        .map(|at| vocab[place(draw(1, at), vocab.len())])
        .collect();
    let mut out = BytesMut::with_capacity(512 << 10);
    for _ in 0..count {
        out.clear();
        for &token in &tokens {
            let json = model.token_json(token).expect("words are whole characters");
            render.escaped(json, &mut out);
        }
        black_box(out.len());
    }
    count * tokens.len() as u64
}

/// Streams that open, are looked up once, and end, with 1,024 others open.
fn streams(count: u64) -> u64 {
    let table: StreamTable<[u64; 8]> = StreamTable::new(0, 1 << 16);
    let others: Vec<_> = (0..1024)
        .map(|n| table.register([n; 8]).expect("the table has room"))
        .collect();
    for n in 0..count {
        let registration = table.register([n; 8]).expect("the table has room");
        let value = table.with(registration.id(), |value| value[0] += 1);
        value.expect("it is open");
    }
    black_box(others.len());
    count
}

/// TCP (DCTCP) through a fat-tree of 16 hosts: `count` kB per flow. Returns the events.
fn packets(count: u64, sack: bool) -> u64 {
    let toml = format!(
        "seed = 1\nduration = 10.0\n\
         [topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 4, hosts_per_edge = 2 }}\n\
         [link]\npropagation_ns = 1000\n\
         [switch]\nport_rate = 1e10\n\
         [[flow_set]]\nfirst_flow_id = 0\nflow_type = \"TCP\"\npairing = \"Permutation\"\n\
         traffic = {{ size = {}, pkt_size_dist = 1460, tcp = {{ sack = {sack} }} }}\n",
        count * 1_000
    );
    let config = slipstream_netsim::config::read(Doc::parse("hotpaths.toml", toml.as_bytes()))
        .unwrap_or_else(|diagnostics| panic!("{diagnostics}"));
    let execution = Execution {
        threads: 1,
        ..Execution::default()
    };
    let mut simulation = Simulation::new(config.scenario, execution).expect("a valid scenario");
    simulation.run(execution, u64::MAX, &mut |_, _| ());
    simulation.events()
}

/// Deltas of 190 blocks to an index of 8 engines: stored, then removed.
fn index_blocks(count: u64) -> u64 {
    let index = BlockIndex::new(8, 8 * 16_384);
    for n in 0..8 * 40 {
        let of = place(n, 8);
        index.apply(of, &delta(RankId::default(), n / 8, &prompt(1_000 + n)));
    }
    let mut sequence = 40;
    let prompts: Vec<Prompt> = (0..64).map(prompt).collect();
    for n in 0..count {
        let prompt = &prompts[place(n, prompts.len())];
        let mut delta = delta(RankId::default(), sequence, prompt);
        index.apply(0, &delta);
        delta.sequence += 1;
        delta.ops.clear();
        let blocks = prompt.blocks().iter().rev();
        delta.ops.extend(blocks.map(|&hash| KvOp::Removed { hash }));
        index.apply(0, &delta);
        sequence += 2;
    }
    count * 2 * 190
}

/// Keys of 36 bytes in a set of 16,384: one leaves, another comes.
fn keys(count: u64) -> u64 {
    const HELD: u64 = 1 << 14;
    let key = |n: u64| {
        let mut key = [0; 36];
        for (word, bytes) in key.chunks_mut(8).enumerate() {
            bytes.copy_from_slice(&draw(n, word as u64).to_le_bytes()[..bytes.len()]);
        }
        key
    };
    let mut set = KeySet::new(to_usize(HELD) + 1, 1);
    for n in 0..HELD {
        set.change(&key(n), Change::Add(to_u32(n)))
            .expect("36 bytes");
    }
    for n in 0..count {
        let place = to_u32(n % HELD);
        set.change(&key(n), Change::Remove(place))
            .expect("36 bytes");
        set.change(&key(n + HELD), Change::Add(place))
            .expect("36 bytes");
    }
    count * 2
}
