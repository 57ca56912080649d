//! The same scheduler written as plainly as it can be: every token kept, every list a `Vec`, every
//! search a scan. Written from vLLM's rules, apart from the engine, to check it against.

use std::collections::{HashMap, VecDeque};

use slipstream_base::{BlockHash, EngineRequest, FinishReason, KvOp, RequestId, Tail, TokenId};
use slipstream_config::cluster::{EngineConfig, OutputLen, SchedulingPolicy};
use slipstream_engine::{OutputModel, Usage, output_token};

pub(crate) struct Plain {
    config: EngineConfig,
    output: OutputModel,
    max_len: u32,
    requests: HashMap<u64, Request>,
    running: Vec<u64>,
    waiting: Vec<u64>,
    arrivals: u64,
    // Blocks.
    free: Vec<usize>, // next to be allocated first
    refs: Vec<u32>,
    content: Vec<Option<BlockHash>>,
    copies: HashMap<BlockHash, Vec<usize>>, // oldest first
    pub(crate) ops: Vec<KvOp>,
    // Passes that are scheduled, the one under way first.
    passes: VecDeque<Pass>,
    pub(crate) preemptions: u64,
    pub(crate) queries: u64,
    pub(crate) hits: u64,
}

/// Requests that a pass computes, how many tokens of each, and which of them it samples.
struct Pass {
    scheduled: Vec<(u64, u32, bool)>,
    work: Work,
}

struct Request {
    request: EngineRequest,
    /// Prompt and answer; the prompt's tokens are only placeholders if it is opaque.
    tokens: Vec<TokenId>,
    /// As vLLM counts: also those of passes that are scheduled.
    computed: u32,
    /// Tokens of passes that are scheduled.
    in_flight: u32,
    /// Tokens that those passes sample.
    unknown: u32,
    /// Of `in_flight`, those scheduled before a preemption.
    stale: u32,
    blocks: Vec<usize>,
    arrival: u64,
    cached: Option<u32>,
    preemptions: u32,
    decoding: bool,
}

/// Work of a pass: (prefills, their tokens, their cached tokens, decodes, their context).
pub(crate) type Work = (u32, u64, u64, u32, u64);

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Result {
    pub(crate) tokens: Vec<(RequestId, TokenId)>,
    /// Id and cached tokens.
    pub(crate) first: Vec<(RequestId, u32)>,
    pub(crate) finished: Vec<(RequestId, FinishReason, Usage)>,
}

impl Plain {
    pub(crate) fn new(config: &EngineConfig, output: OutputModel) -> Plain {
        let blocks = config.num_gpu_blocks as usize;
        let mut max_len = config
            .max_model_len
            .min(config.num_gpu_blocks * config.block_size);
        if !config.enable_chunked_prefill {
            max_len = max_len.min(budget(config));
        }
        Plain {
            config: config.clone(),
            output,
            max_len,
            requests: HashMap::new(),
            running: vec![],
            waiting: vec![],
            arrivals: 0,
            free: (0..blocks).collect(),
            refs: vec![0; blocks],
            content: vec![None; blocks],
            copies: HashMap::new(),
            ops: vec![],
            passes: VecDeque::new(),
            preemptions: 0,
            queries: 0,
            hits: 0,
        }
    }

    pub(crate) fn max_len(&self) -> u32 {
        self.max_len
    }

    pub(crate) fn live(&self) -> Vec<u64> {
        let mut ids: Vec<u64> = self.requests.keys().copied().collect();
        ids.sort_unstable();
        ids
    }

    /// Running, waiting, free blocks, distinct cached blocks.
    pub(crate) fn counts(&self) -> (u32, u32, u32, u32) {
        (
            self.running.len() as u32,
            self.waiting.len() as u32,
            self.free.len() as u32,
            self.copies.len() as u32,
        )
    }

    pub(crate) fn add(&mut self, request: EngineRequest, prompt: &[TokenId]) {
        let id = request.id.0;
        self.requests.insert(
            id,
            Request {
                request,
                tokens: prompt.to_vec(),
                computed: 0,
                in_flight: 0,
                unknown: 0,
                stale: 0,
                blocks: vec![],
                arrival: self.arrivals,
                cached: None,
                preemptions: 0,
                decoding: false,
            },
        );
        self.arrivals += 1;
        self.waiting.push(id);
        self.sort_waiting();
    }

    fn sort_waiting(&mut self) {
        if self.config.scheduling_policy == SchedulingPolicy::Priority {
            let requests = &self.requests;
            self.waiting
                .sort_by_key(|id| (requests[id].request.priority, requests[id].arrival));
        }
    }

    pub(crate) fn abort(&mut self, id: u64) -> bool {
        let known = self.requests.contains_key(&id);
        if known {
            self.waiting.retain(|&w| w != id);
            self.running.retain(|&r| r != id);
            self.free_blocks(id);
            self.requests.remove(&id);
        }
        known
    }

    pub(crate) fn reset(&mut self) -> bool {
        if self.refs.iter().any(|&r| r > 0) {
            return false;
        }
        self.copies.clear();
        self.content.fill(None);
        self.ops = vec![KvOp::Cleared];
        true
    }

    /// Hash of block `j`, from all tokens up to its end.
    fn hash(&self, id: u64, j: usize) -> BlockHash {
        let r = &self.requests[&id];
        let prompt = &r.request.prompt;
        if j < prompt.blocks().len() {
            return prompt.blocks()[j];
        }
        match prompt.tail() {
            Tail::Tokens(_) => prompt.root().chain(&r.tokens, prompt.block_size())[j],
            Tail::Opaque { id: name } => {
                let parent = self.parent(id, j);
                parent.child_of_id(*name, j as u64)
            }
        }
    }

    fn parent(&self, id: u64, j: usize) -> BlockHash {
        match j {
            0 => self.requests[&id].request.prompt.root(),
            _ => self.hash(id, j - 1),
        }
    }

    fn size(&self) -> usize {
        self.config.block_size as usize
    }

    /// Gives a request blocks for `target` tokens, and caches those that are full with known ones.
    fn allocate(&mut self, id: u64, target: u32) {
        let want = (target as usize).div_ceil(self.size());
        while self.requests[&id].blocks.len() < want {
            let block = self.free.remove(0);
            if let Some(hash) = self.content[block].take() {
                let copies = self.copies.get_mut(&hash).unwrap();
                copies.retain(|&b| b != block);
                if copies.is_empty() {
                    self.copies.remove(&hash);
                    self.ops.push(KvOp::Removed { hash });
                }
            }
            self.refs[block] = 1;
            self.requests.get_mut(&id).unwrap().blocks.push(block);
        }
        self.cache(id, target.min(self.requests[&id].tokens.len() as u32));
    }

    fn cache(&mut self, id: u64, target: u32) {
        if !self.config.enable_prefix_caching {
            return;
        }
        for j in 0..target as usize / self.size() {
            let block = self.requests[&id].blocks[j];
            if self.content[block].is_none() {
                let (hash, parent) = (self.hash(id, j), self.parent(id, j));
                self.content[block] = Some(hash);
                let copies = self.copies.entry(hash).or_default();
                if copies.is_empty() {
                    self.ops.push(KvOp::Stored { hash, parent });
                }
                copies.push(block);
            }
        }
    }

    fn free_blocks(&mut self, id: u64) {
        let blocks = std::mem::take(&mut self.requests.get_mut(&id).unwrap().blocks);
        for block in blocks.into_iter().rev() {
            self.refs[block] -= 1;
            if self.refs[block] == 0 {
                match self.content[block] {
                    Some(_) => self.free.push(block),
                    None => self.free.insert(0, block),
                }
            }
        }
    }

    fn preempt(&mut self, victim: u64) {
        self.free_blocks(victim);
        let r = self.requests.get_mut(&victim).unwrap();
        r.computed = 0;
        r.stale = r.in_flight;
        r.unknown = 0;
        r.decoding = false;
        r.preemptions += 1;
        self.preemptions += 1;
        self.waiting.insert(0, victim);
        self.sort_waiting();
    }

    /// Begins a pass; `None` if there is nothing to do.
    pub(crate) fn begin(&mut self) -> Option<Work> {
        while self.passes.is_empty() {
            if self.requests.is_empty() {
                return None;
            }
            self.schedule();
        }
        if self.config.async_scheduling {
            self.schedule();
        }
        Some(self.passes[0].work)
    }

    fn schedule(&mut self) {
        let config = self.config.clone();
        let mut budget = budget(&config);
        let mut scheduled: Vec<(u64, u32)> = vec![];
        let mut most = u32::MAX;
        if config.long_prefill_token_threshold > 0 && self.requests.len() > 1 {
            most = config.long_prefill_token_threshold;
            if config.long_prefill_token_threshold_adaptive {
                most = most.max(config.max_num_batched_tokens / self.requests.len() as u32);
            }
        }
        let running_max = config.max_num_active_seqs.unwrap_or(u32::MAX);
        let running_max = running_max.min(config.max_num_seqs);
        let mut preempted = false;
        let mut at = 0;
        'running: while at < self.running.len() && budget > 0 {
            let id = self.running[at];
            let r = &self.requests[&id];
            let len = r.tokens.len() as u32 + r.unknown;
            let limit = r.request.prompt.len() + r.request.params.max_tokens;
            if r.unknown > 0 && len >= limit.min(self.max_len) {
                at += 1;
                continue;
            }
            let new = (len - r.computed).min(budget).min(most);
            let target = r.computed + new;
            let missing = (target as usize)
                .div_ceil(self.size())
                .saturating_sub(r.blocks.len());
            while missing > self.free.len() {
                preempted = true;
                let victim = match self.config.scheduling_policy {
                    SchedulingPolicy::Fcfs => *self.running.last().unwrap(),
                    SchedulingPolicy::Priority => *self
                        .running
                        .iter()
                        .max_by_key(|id| {
                            (
                                self.requests[id].request.priority,
                                self.requests[id].arrival,
                            )
                        })
                        .unwrap(),
                };
                let place = self.running.iter().position(|&r| r == victim).unwrap();
                self.running.remove(place);
                if let Some(i) = scheduled.iter().position(|s| s.0 == victim) {
                    budget += scheduled.remove(i).1;
                }
                at -= usize::from(place < at);
                self.preempt(victim);
                if victim == id {
                    // First come, first served: it was the last. By priority those behind it
                    // outrank it, and one of them stands at `at` now.
                    continue 'running;
                }
            }
            self.allocate(id, target);
            scheduled.push((id, new));
            budget -= new;
            at += 1;
        }
        while let Some(&id) = self.waiting.first() {
            if preempted || budget == 0 || self.running.len() as u32 == running_max {
                break;
            }
            let len = self.requests[&id].tokens.len();
            let mut found = vec![];
            if self.config.enable_prefix_caching {
                for j in 0..(len - 1) / self.size() {
                    match self.copies.get(&self.hash(id, j)) {
                        Some(copies) => found.push(copies[0]),
                        None => break,
                    }
                }
            }
            let computed = (found.len() * self.size()) as u32;
            let mut new = (len as u32 - computed).min(most);
            if new > budget && !self.config.enable_chunked_prefill {
                break;
            }
            new = new.min(budget);
            let unheld = found.iter().filter(|&&b| self.refs[b] == 0).count();
            let fits = if config.scheduler_reserve_full_isl {
                len
            } else {
                (computed + new) as usize
            };
            if fits.div_ceil(self.size()) - found.len() + unheld > self.free.len() {
                break;
            }
            for &block in &found {
                self.refs[block] += 1;
                self.free.retain(|&b| b != block);
            }
            self.waiting.remove(0);
            self.running.push(id);
            let r = self.requests.get_mut(&id).unwrap();
            r.blocks = found;
            r.computed = computed;
            if r.cached.is_none() {
                r.cached = Some(computed);
                if self.config.enable_prefix_caching {
                    self.queries += len as u64;
                    self.hits += u64::from(computed);
                }
            }
            self.allocate(id, computed + new);
            scheduled.push((id, new));
            budget -= new;
        }
        if scheduled.is_empty() {
            return;
        }
        let (mut work, mut pass): (Work, _) = ((0, 0, 0, 0, 0), vec![]);
        for (id, new) in scheduled {
            let r = self.requests.get_mut(&id).unwrap();
            if r.decoding || r.unknown > 0 {
                work.3 += 1;
                work.4 += u64::from(r.computed + new);
            } else {
                work.0 += 1;
                work.1 += u64::from(new);
                work.2 += u64::from(r.computed);
            }
            r.computed += new;
            r.in_flight += new;
            let samples = r.computed == r.tokens.len() as u32 + r.unknown;
            r.unknown += u32::from(samples);
            pass.push((id, new, samples));
        }
        self.passes.push_back(Pass {
            scheduled: pass,
            work,
        });
    }

    pub(crate) fn finish(&mut self) -> Result {
        let mut result = Result::default();
        for (id, new, samples) in self.passes.pop_front().unwrap().scheduled {
            let natural = match self.output.lengths {
                OutputLen::Constant(n) => n,
                OutputLen::LogNormal { .. } => unreachable!("the tests use constants"),
            };
            let Some(r) = self.requests.get_mut(&id) else {
                continue;
            };
            r.in_flight -= new;
            let is_stale = r.stale > 0;
            if is_stale {
                r.stale -= new;
            }
            if !samples {
                continue;
            }
            if !is_stale {
                r.decoding = true;
                r.unknown -= 1;
            }
            let params = &r.request.params;
            let prompt_tokens = r.request.prompt.len();
            let outputs = r.tokens.len() as u32 - prompt_tokens + 1;
            let masked = outputs <= params.min_tokens;
            let at_end = !params.ignore_eos && !masked && outputs >= natural;
            let token = if at_end {
                self.output.eos
            } else {
                output_token(&self.output.vocab, r.request.seed, outputs - 1)
            };
            r.tokens.push(token);
            result.tokens.push((RequestId(id), token));
            if outputs == 1 {
                result.first.push((RequestId(id), r.cached.unwrap()));
            }
            let stopped = at_end || (!masked && params.stop_token_ids.contains(&token));
            let full = outputs == params.max_tokens || r.tokens.len() as u32 == self.max_len;
            let (cached, preemptions) = (r.cached.unwrap(), r.preemptions);
            let computed = r.computed - r.in_flight;
            if !is_stale {
                self.cache(id, computed);
            }
            if stopped || full {
                let reason = if stopped {
                    FinishReason::Stop
                } else {
                    FinishReason::Length
                };
                let usage = Usage {
                    prompt_tokens,
                    cached_tokens: cached,
                    output_tokens: outputs,
                    preemptions,
                };
                result.finished.push((RequestId(id), reason, usage));
                self.running.retain(|&r| r != id);
                self.waiting.retain(|&w| w != id);
                self.free_blocks(id);
                self.requests.remove(&id);
            }
        }
        result
    }
}

fn budget(config: &EngineConfig) -> u32 {
    let most = config.max_num_scheduled_tokens.unwrap_or(u32::MAX);
    most.min(config.max_num_batched_tokens)
}
