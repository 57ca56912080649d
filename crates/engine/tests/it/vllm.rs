//! The engine against vLLM's own scheduler: workloads that vLLM ran, with what it did in each step.
//!
//! `python/tests_vllm/test_engine_steps.py` makes the file (it says how a step is written), and checks
//! it against the vLLM that is installed. `SLIPSTREAM_STEPS` names another file to replay.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Deserialize;
use slipstream_base::{
    EngineRequest, FinishReason, GenerationParams, Prompt, RankId, RequestId, SimTime, TokenId,
};
use slipstream_config::cluster::{EngineConfig, OutputLen, SchedulingPolicy};
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
    events: Vec<Event>,
}

/// Written as a list: its kind, and what it holds.
#[derive(Deserialize)]
#[serde(tag = "kind", content = "what", rename_all = "snake_case")]
enum Event {
    Add(Request),
    /// An id.
    Abort(u64),
    /// What happened.
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
}

/// An engine, and what vLLM's steps say of the requests in it so far.
struct Replay {
    engine: Engine,
    now: SimTime,
    block_size: u32,
    out: PassOutput,
    /// Tokens computed after a request's last step.
    computed: BTreeMap<u64, u32>,
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
            prompt: Prompt::from_tokens(&tokens, self.block_size, ROOT).unwrap(),
            params: GenerationParams {
                max_tokens: r.max_tokens,
                min_tokens: r.min_tokens,
                ignore_eos: r.ignore_eos,
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

    /// Runs a step; what happened, as the file writes it.
    fn step(&mut self, abort: Option<u64>) -> Option<String> {
        let end = self.engine.begin_pass(self.now)?;
        let mut text = String::new();
        for (n, (id, before, count)) in self.engine.scheduled().enumerate() {
            let last = self.computed.insert(id.0, before + count);
            let space = if n > 0 { " " } else { "" };
            if count == 1 && last == Some(before) {
                write!(text, "{space}{}", id.0).unwrap();
            } else {
                write!(text, "{space}{}:{before}+{count}", id.0).unwrap();
            }
        }
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
        write!(
            text,
            "|{}|{}|{} {} {} {}",
            preempted.join(" "),
            ended.join(" "),
            s.running,
            s.waiting,
            s.free_blocks,
            s.cached_blocks
        )
        .unwrap();
        Some(text)
    }
}

#[test]
fn steps_are_those_of_vllms_scheduler() {
    let file = std::env::var_os("SLIPSTREAM_STEPS");
    let text = match &file {
        Some(path) => std::fs::read_to_string(path).unwrap(),
        None => include_str!("vllm_steps.jsonl").to_owned(),
    };
    let (mut workloads, mut steps, mut preemptions, mut apart) = (0, 0, 0, Vec::new());
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
            let got = replay.step(abort);
            steps += 1;
            if got.as_deref() != Some(expected) {
                apart.push(format!(
                    "{} event {at}:\n  vLLM   {expected}\n  engine {}",
                    workload.name,
                    got.as_deref().unwrap_or("(no step)")
                ));
                break;
            }
        }
        if replay.step(None).is_some() {
            apart.push(format!("{}: goes on after vLLM's last step", workload.name));
        }
        preemptions += replay.engine.stats().preemptions;
    }
    eprintln!("{workloads} workloads, {steps} steps, {preemptions} preemptions");
    assert!(
        apart.is_empty(),
        "{} of {workloads} workloads differ:\n{}",
        apart.len(),
        apart.join("\n")
    );
    // What is kept must try what is hard, too.
    assert!(file.is_some() || (steps > 2_000 && preemptions > 100));
}
