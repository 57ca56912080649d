//! Random workloads, run by the engine and by the plain model of it, step by step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use slipstream_base::{
    BlockHash, EngineRequest, FinishReason, GenerationParams, KvDelta, KvOp, Prompt, RankId,
    RequestId, SimTime, Tail, TokenId,
};
use slipstream_config::cluster::{EngineConfig, SchedulingPolicy};
use slipstream_engine::timing::Constant;
use slipstream_engine::{Engine, OutputModel, PassOutput, StepTokens, output_token};

use crate::plain::{Plain, Result};
use crate::rig::{ROOT, output_model};

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Add(Add),
    /// Whole passes.
    Pass(u8),
    /// A pass in which the n-th live request is aborted.
    AbortDuring(u8),
    Abort(u8),
    Reset,
}

#[derive(Clone, Debug)]
pub(crate) struct Add {
    /// Prompts of a family share a prefix.
    family: u32,
    shared: u32,
    own: u32,
    /// Continues the family's last conversation instead.
    follow: bool,
    opaque: bool,
    seed: u64,
    max_tokens: u32,
    min_tokens: u32,
    ignore_eos: bool,
    priority: i32,
    stops: bool,
}

impl Add {
    /// Longer answers, no stop tokens: more to jump over.
    pub(crate) fn lengthen(&mut self) {
        self.max_tokens *= 2;
        self.stops = self.stops && self.seed == 0;
    }
}

pub(crate) fn add() -> impl Strategy<Value = Add> {
    (
        (
            0..3u32,
            0..24u32,
            0..20u32,
            any::<bool>(),
            prop::bool::weighted(0.3),
        ),
        (
            0..4u64,
            1..30u32,
            0..6u32,
            any::<bool>(),
            0..3i32,
            prop::bool::weighted(0.2),
        ),
    )
        .prop_map(
            |(
                (family, shared, own, follow, opaque),
                (seed, max_tokens, min_tokens, ignore_eos, priority, stops),
            )| Add {
                family,
                shared,
                own,
                follow,
                opaque,
                seed,
                max_tokens,
                min_tokens,
                ignore_eos,
                priority,
                stops,
            },
        )
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => add().prop_map(Op::Add),
        8 => (1..6u8).prop_map(Op::Pass),
        1 => any::<u8>().prop_map(Op::AbortDuring),
        1 => any::<u8>().prop_map(Op::Abort),
        1 => Just(Op::Reset),
    ]
}

pub(crate) fn config() -> impl Strategy<Value = EngineConfig> {
    (
        (1..6u32, 2..16u32, 1..6u32, 1..40u32, 8..80u32),
        (
            prop::bool::weighted(0.85),
            prop::bool::weighted(0.8),
            any::<bool>(),
            any::<bool>(),
        ),
        (
            prop_oneof![3 => Just(0), 1 => 1..20u32],
            any::<bool>(),
            prop::option::weighted(0.2, 1..6u32),
            prop::option::weighted(0.2, 1..30u32),
            prop::bool::weighted(0.8),
        ),
    )
        .prop_map(
            |(
                (block_size, num_gpu_blocks, max_num_seqs, budget, max_model_len),
                (caching, chunked, priority, ahead),
                (long_prefill, adaptive, active, scheduled, reserves_full),
            )| {
                EngineConfig {
                    block_size,
                    num_gpu_blocks,
                    max_num_seqs,
                    max_num_batched_tokens: budget,
                    max_model_len,
                    enable_prefix_caching: caching,
                    enable_chunked_prefill: chunked,
                    scheduling_policy: if priority {
                        SchedulingPolicy::Priority
                    } else {
                        SchedulingPolicy::Fcfs
                    },
                    async_scheduling: ahead,
                    long_prefill_token_threshold: long_prefill,
                    long_prefill_token_threshold_adaptive: adaptive,
                    max_num_active_seqs: active,
                    max_num_scheduled_tokens: scheduled,
                    scheduler_reserve_full_isl: reserves_full,
                    ..EngineConfig::default()
                }
            },
        )
}

/// Makes requests whose prompts overlap with each other and with earlier answers.
pub(crate) struct Maker {
    block_size: u32,
    output: OutputModel,
    next: u64,
    /// Last conversation of each family.
    said: BTreeMap<u32, Vec<TokenId>>,
}

impl Maker {
    pub(crate) fn new(block_size: u32, output: OutputModel) -> Maker {
        Maker {
            block_size,
            output,
            next: 0,
            said: BTreeMap::new(),
        }
    }

    pub(crate) fn make(&mut self, add: &Add) -> (EngineRequest, Vec<TokenId>) {
        let id = self.next;
        self.next += 1;
        let mut tokens: Vec<TokenId> = match self.said.get(&add.family) {
            Some(said) if add.follow => said.clone(),
            _ => (0..add.shared).map(|i| add.family * 100 + i).collect(),
        };
        tokens.extend((0..add.own).map(|i| 10_000 + 100 * id as u32 + i));
        if tokens.is_empty() {
            tokens.push(1);
        }
        let vocab = &self.output.vocab;
        // The beginning of a long answer.
        let mut said = tokens.clone();
        said.extend((0..add.max_tokens.min(12)).map(|p| output_token(vocab, add.seed, p)));
        self.said.insert(add.family, said);

        let mut prompt = Prompt::from_tokens(&tokens, self.block_size, ROOT).unwrap();
        if add.opaque {
            let blocks = prompt.blocks().into();
            let tail = Tail::Opaque { id: add.seed };
            prompt = Prompt::from_parts(prompt.len(), self.block_size, blocks, tail)
                .unwrap()
                .with_root(ROOT);
        }
        let stop_token_ids = if add.stops {
            vocab[..5].into()
        } else {
            [].into()
        };
        let request = EngineRequest {
            id: RequestId(id),
            prompt,
            params: GenerationParams {
                max_tokens: add.max_tokens,
                min_tokens: add.min_tokens,
                ignore_eos: add.ignore_eos,
                stop_token_ids,
                answered: 0,
                ..GenerationParams::default()
            },
            priority: add.priority,
            seed: add.seed,
        };
        (request, tokens)
    }
}

struct Pair {
    engine: Engine,
    plain: Plain,
    budget: u64,
    ahead: bool,
    now: SimTime,
    out: PassOutput,
    maker: Maker,
    /// Blocks held, by the deltas.
    held: BTreeSet<BlockHash>,
    /// The same, by a consumer that now and then takes a snapshot, be it in mid-pass, and
    /// gets its content again.
    late: BTreeSet<BlockHash>,
    published: u64,
    /// Accepted and neither finished nor aborted.
    open: BTreeSet<u64>,
}

impl Pair {
    fn run(
        config: &EngineConfig,
        natural: u32,
        ops: &[Op],
    ) -> std::result::Result<(), TestCaseError> {
        let output = output_model(natural);
        let timing = Box::new(Constant { step_ns: 10 });
        let mut pair = Pair {
            engine: Engine::new(RankId::default(), config, timing, output.clone()).unwrap(),
            plain: Plain::new(config, output.clone()),
            budget: u64::from(config.max_num_batched_tokens),
            ahead: config.async_scheduling,
            now: SimTime(0),
            out: PassOutput::default(),
            maker: Maker::new(config.block_size, output),
            held: BTreeSet::new(),
            late: BTreeSet::new(),
            published: 0,
            open: BTreeSet::new(),
        };
        for op in ops {
            match op {
                Op::Add(add) => pair.add(add)?,
                Op::Pass(n) => {
                    for _ in 0..*n {
                        pair.pass(None)?;
                    }
                }
                Op::AbortDuring(n) => {
                    pair.pass(Some(*n))?;
                }
                Op::Abort(n) => pair.abort(*n)?,
                Op::Reset => prop_assert_eq!(pair.engine.reset_prefix_cache(), pair.plain.reset()),
            }
            pair.check_state()?;
        }
        let mut passes = 0;
        while pair.pass(None)? {
            passes += 1;
            prop_assert!(passes < 20_000, "the engine does not come to an end");
        }
        prop_assert!(pair.open.is_empty(), "never finished: {:?}", pair.open);
        prop_assert!(pair.engine.is_idle());
        pair.check_snapshot()
    }

    fn add(&mut self, add: &Add) -> std::result::Result<(), TestCaseError> {
        let (request, tokens) = self.maker.make(add);
        let id = request.id.0;
        let fits = (tokens.len() as u32) < self.plain.max_len();
        let taken = self.engine.add(self.now, request.clone());
        prop_assert_eq!(taken.is_ok(), fits, "{:?}", taken);
        if fits {
            self.plain.add(request, &tokens);
            self.open.insert(id);
        }
        Ok(())
    }

    fn abort(&mut self, n: u8) -> std::result::Result<(), TestCaseError> {
        let live = self.plain.live();
        if live.is_empty() {
            return Ok(());
        }
        let id = live[n as usize % live.len()];
        prop_assert!(self.engine.abort(RequestId(id)));
        prop_assert!(self.plain.abort(id));
        prop_assert!(!self.engine.abort(RequestId(id)));
        self.open.remove(&id);
        Ok(())
    }

    fn pass(&mut self, abort: Option<u8>) -> std::result::Result<bool, TestCaseError> {
        let end = self.engine.begin_pass(self.now);
        let work = self.plain.begin();
        prop_assert_eq!(end.is_some(), work.is_some());
        let (Some(end), Some(work)) = (end, work) else {
            return Ok(false);
        };
        prop_assert!(work.1 + u64::from(work.3) <= self.budget);
        self.check_state()?;
        if let Some(n) = abort {
            self.abort(n)?;
            self.check_state()?;
            self.late = self.snapshot();
        }
        self.engine.finish_pass(&mut self.out);
        let mut expected = self.plain.finish();
        let out = &self.out;
        prop_assert_eq!((out.start, out.end), (self.now, end));
        self.now = end;
        let mut got = Result {
            tokens: flat(&out.tokens),
            first: out.first.iter().map(|f| (f.id, f.cached_tokens)).collect(),
            finished: out
                .finished
                .iter()
                .map(|f| (f.id, f.reason, f.usage))
                .collect(),
        };
        if self.ahead {
            // Of sequences that were preempted in the pass, the engine lists the tokens last.
            for result in [&mut got, &mut expected] {
                result.tokens.sort_unstable();
                result.first.sort_unstable();
                result.finished.sort_unstable_by_key(|&(id, ..)| id);
            }
        }
        prop_assert_eq!(&got, &expected);
        let fpm = &out.fpm;
        let (prefill, decode) = (fpm.scheduled_prefill, fpm.scheduled_decode);
        let got = (
            prefill.requests,
            prefill.tokens,
            fpm.scheduled_prefill_kv_tokens,
            decode.requests,
            decode.kv_tokens,
        );
        prop_assert_eq!(got, work);

        let ops = std::mem::take(&mut self.plain.ops);
        prop_assert_eq!(&out.kv.ops, &ops);
        let delta = self.out.kv.clone();
        prop_assert_eq!(delta.sequence, self.published);
        self.published += u64::from(!delta.ops.is_empty());
        self.apply(&delta)?;
        for finished in &self.out.finished {
            prop_assert!(finished.reason != FinishReason::Abort);
            prop_assert!(self.open.remove(&finished.id.0), "finished once");
        }
        self.check_state()?;
        Ok(true)
    }

    fn apply(&mut self, delta: &KvDelta) -> std::result::Result<(), TestCaseError> {
        for op in &delta.ops {
            match *op {
                KvOp::Stored { hash, .. } => _ = self.late.insert(hash),
                KvOp::Removed { hash } => _ = self.late.remove(&hash),
                KvOp::Cleared => self.late.clear(),
            }
            match *op {
                KvOp::Stored { hash, .. } => prop_assert!(self.held.insert(hash), "stored twice"),
                KvOp::Removed { hash } => prop_assert!(self.held.remove(&hash), "not held"),
                KvOp::Cleared => self.held.clear(),
            }
        }
        Ok(())
    }

    fn check_state(&self) -> std::result::Result<(), TestCaseError> {
        self.engine.audit();
        let stats = self.engine.stats();
        let counts = (
            stats.running,
            stats.waiting,
            stats.free_blocks,
            stats.cached_blocks,
        );
        prop_assert_eq!(counts, self.plain.counts());
        prop_assert_eq!(stats.preemptions, self.plain.preemptions);
        prop_assert_eq!(stats.prefix_query_tokens, self.plain.queries);
        prop_assert_eq!(stats.prefix_hit_tokens, self.plain.hits);
        Ok(())
    }

    fn check_snapshot(&mut self) -> std::result::Result<(), TestCaseError> {
        let mut delta = KvDelta::default();
        if self.engine.take_kv(&mut delta) {
            self.published += 1;
        }
        self.apply(&delta)?;
        prop_assert_eq!(&self.snapshot(), &self.held);
        prop_assert_eq!(&self.late, &self.held);
        Ok(())
    }

    fn snapshot(&self) -> BTreeSet<BlockHash> {
        let mut snapshot = KvDelta::default();
        self.engine.kv_snapshot(&mut snapshot);
        assert_eq!(snapshot.sequence, self.published);
        let held: BTreeSet<BlockHash> = snapshot
            .ops
            .iter()
            .filter_map(|op| match *op {
                KvOp::Stored { hash, .. } => Some(hash),
                _ => None,
            })
            .collect();
        assert_eq!(snapshot.ops[0], KvOp::Cleared);
        assert_eq!(held.len() + 1, snapshot.ops.len(), "each block once");
        held
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]
    #[test]
    fn the_engine_does_what_the_plain_model_does(
        config in config(),
        natural in 1..40u32,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        Pair::run(&config, natural, &ops)?;
    }
}

/// Each token with its sequence.
fn flat(tokens: &StepTokens) -> Vec<(RequestId, TokenId)> {
    let of = |(id, tokens): (RequestId, &[TokenId])| -> Vec<_> {
        tokens.iter().map(|&token| (id, token)).collect()
    };
    tokens.iter().flat_map(of).collect()
}
