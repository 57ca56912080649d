//! Cost of the engine itself: passes of a steady load, and the block pool's operations.

use std::collections::VecDeque;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::mix::mix64;
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, KvOp, Prompt, RankId, RequestId, SimTime, Tail,
};
use slipstream_config::cluster::{Dtype, EngineConfig, Framework, OutputLen, TimingConfig};
use slipstream_config::preset;
use slipstream_engine::pool::{BlockPool, Table};
use slipstream_engine::timing::{self, Constant, StepLoad};
use slipstream_engine::{DecodeRun, Engine, OutputModel, PassOutput};

fn engine(num_gpu_blocks: u32, block_size: u32) -> Engine {
    let config = EngineConfig {
        block_size,
        num_gpu_blocks,
        max_num_seqs: 256,
        max_num_batched_tokens: 8_192,
        max_model_len: 131_072,
        ..EngineConfig::default()
    };
    let output = OutputModel {
        vocab: (0..150_000).collect(),
        first_vocab: None,
        eos: 150_000,
        lengths: OutputLen::Constant(1),
    };
    let timing = Box::new(Constant { step_ns: 1 });
    Engine::new(RankId::default(), &config, timing, output).expect("a valid configuration")
}

/// A prompt of `len` tokens that nothing else shares a block with.
fn request(id: u64, len: u32, block_size: u32, max_tokens: u32, opaque: bool) -> EngineRequest {
    let full = u64::from(len / block_size);
    let blocks = (0..full)
        .map(|j| BlockHash::default().child_of_id(id, j))
        .collect();
    let tail = if opaque {
        Tail::Opaque { id }
    } else {
        Tail::Tokens(vec![1; (len % block_size) as usize].into())
    };
    EngineRequest {
        id: RequestId(id),
        prompt: Prompt::from_parts(len, block_size, blocks, tail).expect("shapes agree"),
        params: GenerationParams {
            max_tokens,
            ignore_eos: true,
            ..GenerationParams::default()
        },
        priority: 0,
        seed: id,
    }
}

/// A pass at a constant batch: 128 tokens in, 1,024 out, the next request as soon as one ends (its
/// making included). Per element: one output token.
fn step(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine_step");
    for batch in [1u64, 32, 256] {
        group.throughput(Throughput::Elements(batch));
        group.bench_function(BenchmarkId::from_parameter(batch), |b| {
            let mut engine = engine(32_768, 16);
            let mut out = PassOutput::default();
            let mut next = 0;
            let mut now = SimTime(0);
            // Staggered, so that ends are spread over passes.
            for _ in 0..batch {
                let left = 1 + (next * 1_024 / batch) as u32;
                engine
                    .add(now, request(next, 128, 16, left, false))
                    .expect("fits");
                next += 1;
            }
            b.iter(|| {
                now = engine.begin_pass(now).expect("never idle");
                engine.finish_pass(&mut out);
                for _ in &out.finished {
                    engine
                        .add(now, request(next, 128, 16, 1_024, false))
                        .expect("fits");
                    next += 1;
                }
                black_box(out.tokens.count())
            });
        });
    }
    group.finish();
}

/// 500 passes of 32 decodes, ahead of a prompt of 3,000 cached blocks that lacks one: it must not be
/// looked up block by block in every pass. Per element: one output token, as in `engine_step/32`.
fn stuck_head(c: &mut Criterion) {
    let stuck = || {
        let (mut out, mut now) = (PassOutput::default(), SimTime(0));
        let mut engine = engine(3_000 + 32 * 63, 16);
        let mut pass = |engine: &mut Engine| {
            now = engine.begin_pass(now).expect("not idle");
            engine.finish_pass(&mut out);
        };
        let long = |id| {
            let blocks = (0..3_000)
                .map(|j| BlockHash::default().child_of_id(1_000, j))
                .collect();
            let tail = Tail::Tokens([1].into());
            EngineRequest {
                prompt: Prompt::from_parts(48_001, 16, blocks, tail).expect("shapes agree"),
                ..request(id, 1, 16, 1, false)
            }
        };
        engine.add(SimTime(0), long(100)).expect("fits");
        (0..6).for_each(|_| pass(&mut engine));
        for id in 0..32 {
            engine
                .add(SimTime(0), request(id, 1_000, 16, 1_600, false))
                .expect("fits");
        }
        (0..6).for_each(|_| pass(&mut engine));
        engine.add(SimTime(0), long(101)).expect("fits");
        assert_eq!((engine.stats().running, engine.stats().waiting), (32, 1));
        engine
    };
    let mut group = c.benchmark_group("engine_step");
    group.throughput(Throughput::Elements(500 * 32));
    group.bench_function("32_before_a_stuck_head", |b| {
        let mut out = PassOutput::default();
        let run = |engine: &mut Engine| {
            for now in 0..500 {
                engine.begin_pass(SimTime(now)).expect("not idle");
                engine.finish_pass(&mut out);
            }
            assert_eq!(engine.stats().waiting, 1);
        };
        b.iter_batched_ref(stuck, run, criterion::BatchSize::LargeInput);
    });
    group.finish();
}

/// A whole request as the simulator sends it: 12,000 tokens in blocks of 64, half of them cached
/// with another request, 340 tokens out, among 31 others. Pass by pass, and jumping.
fn request_life(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine_request");
    group.throughput(Throughput::Elements(1));
    for (name, jump) in [
        ("12000_340_of_32_single", false),
        ("12000_340_of_32_jump", true),
    ] {
        group.bench_function(name, |b| {
            let mut engine = engine(16_384, 64);
            let mut out = PassOutput::default();
            let (mut next, mut now) = (0u64, SimTime(0));
            let make = |next: u64| {
                let mut r = request(next, 12_000, 64, 340, true);
                let shared = (0..93).map(|j| BlockHash::default().child_of_id(next / 2, j));
                let own = (93..187).map(|j| BlockHash::default().child_of_id(next, j));
                r.prompt = Prompt::from_parts(
                    12_000,
                    64,
                    shared.chain(own).collect(),
                    Tail::Opaque { id: next },
                )
                .expect("shapes agree");
                r
            };
            engine.list_tokens(!jump);
            let mut run = DecodeRun::default();
            for _ in 0..32 {
                engine.add(now, make(next)).expect("fits");
                next += 1;
            }
            b.iter(|| {
                let mut done = 0;
                while done == 0 {
                    if jump && engine.decode_run(now, SimTime::MAX, u32::MAX, &mut run) > 0 {
                        now = *run.ends.last().expect("at least one pass");
                    }
                    now = engine.begin_pass(now).expect("never idle");
                    engine.finish_pass(&mut out);
                    done = out.finished.len();
                    for _ in 0..done {
                        engine.add(now, make(next)).expect("fits");
                        next += 1;
                    }
                }
                done
            });
        });
    }
    group.finish();
}

/// A full cache in its steady state: a prompt of so many blocks evicts as many, is cached and, when its
/// turn comes, let go of. Per element: one block.
fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("block_pool");
    const BLOCKS: u32 = 16_384;
    for len in [1u32, 16, 190] {
        group.throughput(Throughput::Elements(len.into()));
        let mut pool = BlockPool::new(BLOCKS);
        let mut ops: Vec<KvOp> = Vec::new();
        let mut held = VecDeque::new();
        let mut n = 0;
        let mut prompt = Vec::new();
        let mut turn = |pool: &mut BlockPool, held: &mut VecDeque<Table>, mut table: Table| {
            ops.clear();
            n += 1;
            prompt.clear();
            prompt.extend((0..u64::from(len)).map(|j| BlockHash(mix64(n << 16 | j))));
            pool.allocate(len, &mut table, &mut ops);
            pool.cache(&mut table, BlockHash(0), &prompt, &mut ops);
            held.push_back(table);
        };
        for _ in 0..BLOCKS / 2 / len {
            turn(&mut pool, &mut held, Table::default());
        }
        group.bench_function(BenchmarkId::new("evict_allocate_cache_release", len), |b| {
            b.iter(|| {
                let mut oldest = held.pop_front().expect("half of them");
                pool.release(&mut oldest);
                turn(&mut pool, &mut held, oldest);
                pool.publish();
            });
        });
    }
    group.finish();
}

/// A look-up of a step's time: decodes alone, and with a chunk of a prompt; contexts differ from one
/// look-up to the next.
fn step_time(c: &mut Criterion) {
    let mut group = c.benchmark_group("step_time");
    for (model, dtype) in [("llama-3.1-8b", Dtype::Bf16), ("deepseek-v3", Dtype::Fp8)] {
        for kind in ["calibrated", "roofline"] {
            let shape = preset::model(model).expect("a preset");
            if kind == "roofline" && !shape.is_uniform() {
                continue;
            }
            let gpu = preset::gpu("h200-sxm").expect("a preset").clone();
            let timing = match kind {
                "calibrated" => TimingConfig::Calibrated {
                    gpu,
                    dtype,
                    framework: Framework::Vllm,
                    profile: None,
                },
                _ => TimingConfig::Roofline { gpu, dtype },
            };
            let config = EngineConfig {
                tensor_parallel_size: 8,
                timing,
                ..EngineConfig::default()
            };
            let no_file = |_: &std::path::Path| Err(std::io::ErrorKind::NotFound.into());
            let mut model_of_time =
                timing::build(&config, shape, no_file).expect("a valid configuration");
            for prompt in [0, 512] {
                let name = format!("{kind}/{model}/prompt_{prompt}");
                let mut load = StepLoad::default();
                for i in 0..64 {
                    load.add_decode(1000, 1000 + i);
                }
                if prompt > 0 {
                    load.add_prefill(0, prompt);
                }
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| {
                        load.decode_context += 64;
                        black_box(model_of_time.step_ns(black_box(&load)))
                    });
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, step, stuck_head, request_life, pool, step_time);
criterion_main!(benches);
