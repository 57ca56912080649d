//! The engine against vLLM's own scheduler: workloads that vLLM ran, with what it did in each step.
//!
//! `python/tests/vllm/test_engine_steps.py` makes the file (it says how a step is written), and checks
//! it against the vLLM that is installed. `SLIPSTREAM_STEPS` names another file to replay.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;
use slipstream_base::{
    BlockHash, EncoderInput, EngineRequest, FinishReason, GenerationParams, KvOp, Prompt, RankId,
    RequestId, SimTime, TokenId,
};
use slipstream_config::cluster::{
    EncoderConfig, EngineConfig, LoraConfig, OutputLen, PipelineConfig, SchedulingPolicy,
    SpeculationConfig, SpeculationMethod,
};
use slipstream_engine::timing::Constant;
use slipstream_engine::{Engine, OutputModel, PassOutput};

use crate::rig::{EOS, ROOT};

/// The one word of every answer.
const WORD: TokenId = 1_000;

#[derive(Deserialize)]
struct Workload {
    name: String,
    block_size: u32,
    num_gpu_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    max_model_len: u32,
    caching: bool,
    chunked: bool,
    policy: String,
    natural: u32,
    #[serde(rename = "async")]
    is_async: bool,
    long_prefill: u32,
    adaptive: bool,
    max_num_active_seqs: Option<u32>,
    max_num_scheduled_tokens: Option<u32>,
    reserve_full: bool,
    /// Stages of a pipeline.
    #[serde(default)]
    stages: Option<u32>,
    /// Limit of LoRA adapters in a step.
    #[serde(default)]
    max_loras: Option<u32>,
    /// Of images: tokens that a step encodes, tokens that are kept, and whether an image is not divided.
    #[serde(default)]
    encoder: Option<(u32, u32, bool)>,
    /// Tokens of a draft, those of them that are accepted, and whether they take blocks in advance.
    #[serde(default)]
    drafts: Option<(u32, u32, bool)>,
    events: Vec<Event>,
}

/// Written as a list: its kind, and what it holds.
#[derive(Deserialize)]
#[serde(tag = "kind", content = "what", rename_all = "snake_case")]
enum Event {
    Add(Request),
    /// An id.
    Abort(u64),
    /// Record of a step.
    Step(String),
    /// The same, with an id that is aborted in the middle of the step.
    StepAbort(String, u64),
}

#[derive(Deserialize)]
struct Request {
    id: u64,
    /// First token, how many, and how much each is above the one before.
    prompt: Vec<[u32; 3]>,
    max_tokens: u32,
    min_tokens: u32,
    ignore_eos: bool,
    priority: i32,
    #[serde(default)]
    adapter: u64,
    /// First token, how many, and id.
    #[serde(default)]
    images: Vec<(u32, u32, u64)>,
}

/// Most LoRA adapters in a file.
const ADAPTERS: u64 = 5;

/// An engine, and what vLLM's steps say of the requests in it so far.
struct Replay {
    engine: Engine,
    now: SimTime,
    block_size: u32,
    out: PassOutput,
    /// Tokens computed after a request's last step.
    computed: BTreeMap<u64, u32>,
    /// Of each hash, its number in order of appearance.
    numbers: BTreeMap<BlockHash, usize>,
    is_async: bool,
    is_pipeline: bool,
    encodes: bool,
    preemptions: BTreeMap<u64, u32>,
}

impl Replay {
    fn new(w: &Workload) -> Replay {
        let config = EngineConfig {
            block_size: w.block_size,
            num_gpu_blocks: w.num_gpu_blocks,
            max_num_seqs: w.max_num_seqs,
            max_num_batched_tokens: w.max_num_batched_tokens,
            max_model_len: w.max_model_len,
            enable_prefix_caching: w.caching,
            enable_chunked_prefill: w.chunked,
            scheduling_policy: match w.policy.as_str() {
                "fcfs" => SchedulingPolicy::Fcfs,
                "priority" => SchedulingPolicy::Priority,
                other => panic!("policy {other}"),
            },
            async_scheduling: w.is_async,
            long_prefill_token_threshold: w.long_prefill,
            long_prefill_token_threshold_adaptive: w.adaptive,
            max_num_active_seqs: w.max_num_active_seqs,
            max_num_scheduled_tokens: w.max_num_scheduled_tokens,
            scheduler_reserve_full_isl: w.reserve_full,
            pipeline: w.stages.map(|stages| PipelineConfig {
                layers: vec![1; stages as usize],
                send_ns_per_token: 0.0,
                latency_ns: 0.0,
            }),
            lora: w.max_loras.map(|max_loras| LoraConfig {
                max_loras,
                max_cpu_loras: max_loras,
                load_ns: 0,
                activate_ns: 0,
            }),
            encoder: w.encoder.map(
                |(budget_tokens, cache_tokens, whole_inputs)| EncoderConfig {
                    budget_tokens,
                    cache_tokens,
                    whole_inputs,
                    input_ns: 0.0,
                    token_ns: 0.0,
                },
            ),
            speculation: w.drafts.map(|(tokens, accepted, takes_blocks)| {
                let share = |at| f64::from(u8::from(at < accepted));
                SpeculationConfig {
                    method: if takes_blocks {
                        SpeculationMethod::Mtp
                    } else {
                        SpeculationMethod::Ngram
                    },
                    acceptance: (0..tokens).map(share).collect(),
                    draft_ns: 0.0,
                    draft_share: 0.0,
                }
            }),
            ..EngineConfig::default()
        };
        let output = OutputModel {
            vocab: [WORD].into_iter().collect(),
            first_vocab: None,
            eos: EOS,
            lengths: OutputLen::Constant(w.natural),
        };
        let timing = Box::new(Constant { step_ns: 1_000 });
        Replay {
            engine: Engine::new(RankId::default(), &config, timing, output).unwrap(),
            now: SimTime(0),
            block_size: w.block_size,
            out: PassOutput::default(),
            computed: BTreeMap::new(),
            numbers: BTreeMap::new(),
            is_async: w.is_async,
            is_pipeline: w.stages.is_some(),
            encodes: w.encoder.is_some(),
            preemptions: BTreeMap::new(),
        }
    }

    fn add(&mut self, r: &Request) {
        let tokens: Vec<TokenId> = r
            .prompt
            .iter()
            .flat_map(|&[first, count, step]| (0..count).map(move |i| first + i * step))
            .collect();
        let request = EngineRequest {
            id: RequestId(r.id),
            prompt: Prompt::from_tokens(&tokens, self.block_size, BlockHash(ROOT.0 + r.adapter))
                .unwrap(),
            params: GenerationParams {
                max_tokens: r.max_tokens,
                min_tokens: r.min_tokens,
                ignore_eos: r.ignore_eos,
                adapter: r.adapter,
                encoder_inputs: (r.images.iter())
                    .map(|&(offset, tokens, id)| EncoderInput { id, offset, tokens })
                    .collect(),
                ..GenerationParams::default()
            },
            priority: r.priority,
            seed: r.id,
        };
        self.engine.add(self.now, request).unwrap();
        self.preemptions.insert(r.id, 0);
    }

    fn abort(&mut self, id: u64) {
        assert!(self.engine.abort(RequestId(id)), "{id} is not there");
        self.preemptions.remove(&id);
    }

    /// Sequences of a step in the file: their tokens computed before, and in it.
    fn scheduled(&mut self, scheduled: &[(RequestId, u32, u32)]) -> String {
        let names = scheduled.iter().map(|&(id, before, count)| {
            let last = self.computed.insert(id.0, before + count);
            if count == 1 && last == Some(before) {
                id.0.to_string()
            } else {
                format!("{}:{before}+{count}", id.0)
            }
        });
        names.collect::<Vec<_>>().join(" ")
    }

    /// Runs a step; what happened, as the file writes it. The last part is in whole if `whole`.
    fn step(&mut self, abort: Option<u64>, whole: bool) -> Option<String> {
        let fresh = !self.engine.is_scheduled();
        let end = self.engine.begin_pass(self.now)?;
        let now: Vec<_> = self.engine.scheduled().collect();
        let ahead: Vec<_> = self.engine.scheduled_ahead().collect();
        let mut plans = Vec::new();
        if self.is_pipeline {
            for launched in self.engine.launched() {
                if !launched.is_empty() {
                    plans.push(self.scheduled(&launched));
                }
            }
        } else {
            if fresh {
                plans.push(self.scheduled(&now));
            }
            if !ahead.is_empty() {
                plans.push(self.scheduled(&ahead));
            }
            assert!(self.is_async || ahead.is_empty());
        }
        let mut text = plans.join(";");
        let mut preempted = Vec::new();
        for (&id, known) in &mut self.preemptions {
            let now = self.engine.preemptions_of(RequestId(id)).unwrap();
            if now > *known {
                preempted.push(id.to_string());
            }
            *known = now;
        }
        if let Some(id) = abort {
            self.abort(id);
        }
        self.engine.finish_pass(&mut self.out);
        self.engine.audit();
        self.now = end;
        let mut ended = Vec::new();
        for f in &self.out.finished {
            let reason = match f.reason {
                FinishReason::Stop => 'S',
                FinishReason::Length => 'L',
                FinishReason::Abort => panic!("{f:?}"),
            };
            ended.push(format!("{}:{reason}{}", f.id.0, f.usage.output_tokens));
            self.preemptions.remove(&f.id.0);
        }
        let s = self.engine.stats();
        ended.sort_unstable();
        let state = self.state();
        let state = if whole { state } else { checksum(&state) };
        write!(
            text,
            "|{}|{}|{} {} {} {}{}|{state}",
            preempted.join(" "),
            ended.join(" "),
            s.running,
            s.waiting,
            s.free_blocks,
            s.cached_blocks,
            self.encoder_state()
        )
        .unwrap();
        Some(text)
    }

    /// Room for outputs of the encoder, and the inputs and tokens that it has computed.
    fn encoder_state(&self) -> String {
        if !self.encodes {
            return String::new();
        }
        let (free, freeable) = self.engine.encoder_room();
        let (inputs, tokens) = self.engine.encoded();
        format!(" {free} {freeable} {inputs} {tokens}")
    }

    /// Both queues, the blocks of running requests, and the changes of the KV cache.
    fn state(&mut self) -> String {
        let running = self.engine.running_ids().zip(self.engine.running_blocks());
        let running: Vec<String> = running
            .map(|(id, blocks)| format!("{}/{blocks}", id.0))
            .collect();
        let waiting = self.engine.waiting_ids();
        let waiting: Vec<String> = waiting.iter().map(|id| id.0.to_string()).collect();
        let mut changes = Vec::new();
        for op in &self.out.kv.ops {
            let count = self.numbers.len();
            changes.push(match *op {
                KvOp::Stored { hash, parent } => {
                    let number = *self.numbers.entry(hash).or_insert(count);
                    match self.numbers.get(&parent) {
                        Some(above) => format!("+{number}<{above}"),
                        None if (ROOT.0..=ROOT.0 + ADAPTERS).contains(&parent.0) => {
                            format!("+{number}<")
                        }
                        None => panic!("{parent:?} was never stored"),
                    }
                }
                KvOp::Removed { hash } => format!("-{}", self.numbers[&hash]),
                KvOp::Cleared => panic!("nothing is cleared"),
            });
        }
        [running, waiting, changes]
            .map(|part| part.join(" "))
            .join(";")
    }
}

/// FNV-1a, 32 bits.
fn checksum(text: &str) -> String {
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("#{hash:08x}")
}

#[test]
fn steps_are_those_of_vllms_scheduler() {
    let file = std::env::var_os("SLIPSTREAM_STEPS");
    let text = match &file {
        Some(path) => std::fs::read_to_string(path).unwrap(),
        None => include_str!("vllm_steps.jsonl").to_owned(),
    };
    let (steps, steps_ahead, preemptions) = replay_all(&text);
    // Recorded workloads must cover hard cases, too.
    assert!(file.is_some() || (steps > 4_000 && steps_ahead > 2_000 && preemptions > 100));
}

/// The same, with the layers on several stages.
#[test]
fn steps_of_pipelines_are_those_of_vllms_scheduler() {
    let (steps, steps_ahead, preemptions) = replay_all(include_str!("vllm_pipeline_steps.jsonl"));
    assert!(steps > 4_000 && steps_ahead > 2_000 && preemptions > 100);
}

/// The same, with a limit of LoRA adapters in a step.
#[test]
fn steps_with_adapters_are_those_of_vllms_scheduler() {
    let (steps, steps_ahead, preemptions) = replay_all(include_str!("vllm_lora_steps.jsonl"));
    assert!(steps > 4_000 && steps_ahead > 2_000 && preemptions > 100);
}

/// The same, of prompts with images.
#[test]
fn steps_with_images_are_those_of_vllms_scheduler() {
    let (steps, steps_ahead, preemptions) = replay_all(include_str!("vllm_image_steps.jsonl"));
    assert!(steps > 4_000 && steps_ahead > 2_000 && preemptions > 100);
}

/// The same, of steps that verify drafts, of which a fixed number is accepted.
#[test]
fn steps_with_drafts_are_those_of_vllms_scheduler() {
    let (steps, steps_ahead, preemptions) = replay_all(include_str!("vllm_draft_steps.jsonl"));
    assert!(steps > 2_000 && steps_ahead > 1_000 && preemptions > 100);
}

/// The same, with a limit of LoRA adapters in a step, and images, several stages or drafts.
#[test]
fn steps_of_mixtures_are_those_of_vllms_scheduler() {
    let (steps, steps_ahead, preemptions) = replay_all(include_str!("vllm_mixed_steps.jsonl"));
    assert!(steps > 3_000 && steps_ahead > 1_500 && preemptions > 100);
}

/// Runs the workloads of a file, which have to agree. Returns the steps, those with asynchronous scheduling, and preemptions.
fn replay_all(text: &str) -> (u32, u32, u64) {
    let (mut workloads, mut steps, mut preemptions, mut apart) = (0, 0, 0, Vec::new());
    let mut steps_ahead = 0;
    for line in text.lines() {
        let workload: Workload = serde_json::from_str(line).unwrap();
        let mut replay = Replay::new(&workload);
        workloads += 1;
        for (at, event) in workload.events.iter().enumerate() {
            let (expected, abort) = match event {
                Event::Add(request) => {
                    replay.add(request);
                    continue;
                }
                Event::Abort(id) => {
                    replay.abort(*id);
                    continue;
                }
                Event::Step(expected) => (expected, None),
                Event::StepAbort(expected, id) => (expected, Some(*id)),
            };
            let whole = !expected.contains("|#");
            let got = replay.step(abort, whole);
            steps += 1;
            steps_ahead += u32::from(workload.is_async);
            if got.as_deref() != Some(expected) {
                apart.push(format!(
                    "{} event {at}:\n  vLLM   {expected}\n  engine {}",
                    workload.name,
                    got.as_deref().unwrap_or("(no step)")
                ));
                break;
            }
        }
        if replay.step(None, true).is_some() {
            apart.push(format!(
                "{}: continues after vLLM's last step",
                workload.name
            ));
        }
        preemptions += replay.engine.stats().preemptions;
    }
    eprintln!(
        "{workloads} workloads, {steps} steps ({steps_ahead} asynchronous), {preemptions} preemptions"
    );
    assert!(
        apart.is_empty(),
        "{} of {workloads} workloads differ:\n{}",
        apart.len(),
        apart[..apart.len().min(20)].join("\n")
    );
    (steps, steps_ahead, preemptions)
}
