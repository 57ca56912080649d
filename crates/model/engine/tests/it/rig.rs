//! An engine with a clock that jumps from pass to pass.

use std::collections::BTreeMap;

use slipstream_base::{
    BlockHash, EngineRequest, FinishReason, GenerationParams, KvOp, Prompt, RankId, RequestId,
    SimTime, TokenId,
};
use slipstream_config::cluster::{EngineConfig, OutputLen};
use slipstream_engine::timing::{Constant, StepTime};
use slipstream_engine::{Engine, OutputModel, PassOutput, Refusal, Usage};

pub(crate) const ROOT: BlockHash = BlockHash(99);
pub(crate) const EOS: TokenId = 7;
pub(crate) const STEP_NS: u64 = 1_000;

/// A small engine: blocks of 4 tokens, everything on, passes scheduled one by one.
pub(crate) fn small(num_gpu_blocks: u32) -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_gpu_blocks,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 1_000,
        async_scheduling: false,
        ..EngineConfig::default()
    }
}

pub(crate) fn output_model(natural: u32) -> OutputModel {
    OutputModel {
        vocab: (1_000..1_100).collect(),
        first_vocab: None,
        eos: EOS,
        lengths: OutputLen::Constant(natural),
    }
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) now: SimTime,
    pub(crate) out: PassOutput,
    pub(crate) answers: BTreeMap<u64, Vec<TokenId>>,
    pub(crate) finished: BTreeMap<u64, (FinishReason, Usage)>,
}

impl Rig {
    pub(crate) fn new(config: &EngineConfig) -> Rig {
        Rig::with_output(config, output_model(10_000))
    }

    pub(crate) fn with_output(config: &EngineConfig, output: OutputModel) -> Rig {
        let timing = Box::new(Constant { step_ns: STEP_NS });
        Rig::with_timing(config, timing, output)
    }

    pub(crate) fn with_timing(
        config: &EngineConfig,
        timing: Box<dyn StepTime>,
        output: OutputModel,
    ) -> Rig {
        Rig {
            engine: Engine::new(RankId::default(), config, timing, output).unwrap(),
            now: SimTime(0),
            out: PassOutput::default(),
            answers: BTreeMap::new(),
            finished: BTreeMap::new(),
        }
    }

    pub(crate) fn add(&mut self, request: EngineRequest) -> Result<(), Refusal> {
        self.engine.add(self.now, request)
    }

    /// Adds a prompt of its own, `len` tokens long.
    pub(crate) fn add_len(&mut self, id: u64, len: u32, max_tokens: u32) {
        self.add(request(id, &tokens_of(id, len), max_tokens))
            .unwrap();
    }

    /// Runs a pass; false if there was none to run.
    pub(crate) fn step(&mut self) -> bool {
        let Some(end) = self.engine.begin_pass(self.now) else {
            return false;
        };
        self.engine.audit();
        self.finish(end);
        true
    }

    pub(crate) fn finish(&mut self, end: SimTime) {
        self.engine.finish_pass(&mut self.out);
        self.engine.audit();
        assert_eq!((self.out.start, self.out.end), (self.now, end));
        assert_eq!(self.out.token_count as usize, self.out.tokens.count());
        assert_eq!(
            self.out.sequence_count as usize,
            self.out.tokens.sequences()
        );
        self.now = end;
        for (id, tokens) in &self.out.tokens {
            self.answers.entry(id.0).or_default().extend(tokens);
        }
        for f in &self.out.finished {
            let twice = self.finished.insert(f.id.0, (f.reason, f.usage));
            assert!(twice.is_none(), "{} finished twice", f.id);
        }
    }

    pub(crate) fn run_until_idle(&mut self) {
        let mut passes = 0;
        while self.step() {
            passes += 1;
            assert!(passes < 100_000, "does not come to an end");
        }
    }

    /// Ids that got a token in the last pass, in order.
    pub(crate) fn ids(&self) -> Vec<u64> {
        self.out.tokens.iter().map(|t| t.0.0).collect()
    }

    /// Of the last pass: prefill sequences, tokens computed, tokens cached before; decode
    /// sequences, context.
    pub(crate) fn work(&self) -> (u32, u64, u64, u32, u64) {
        let fpm = &self.out.fpm;
        (
            fpm.scheduled_prefill.requests,
            fpm.scheduled_prefill.tokens,
            fpm.scheduled_prefill_kv_tokens,
            fpm.scheduled_decode.requests,
            fpm.scheduled_decode.kv_tokens,
        )
    }

    pub(crate) fn removed(&self) -> Vec<BlockHash> {
        let removed = |op: &KvOp| match *op {
            KvOp::Removed { hash } => Some(hash),
            _ => None,
        };
        self.out.kv.ops.iter().filter_map(removed).collect()
    }

    pub(crate) fn stored(&self) -> Vec<BlockHash> {
        let stored = |op: &KvOp| match *op {
            KvOp::Stored { hash, .. } => Some(hash),
            _ => None,
        };
        self.out.kv.ops.iter().filter_map(stored).collect()
    }
}

/// Tokens that no other id's prompt has.
pub(crate) fn tokens_of(id: u64, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| 10_000 * (id as u32 + 1) + i).collect()
}

pub(crate) fn request(id: u64, tokens: &[TokenId], max_tokens: u32) -> EngineRequest {
    EngineRequest {
        id: RequestId(id),
        prompt: Prompt::from_tokens(tokens, 4, ROOT).unwrap(),
        params: GenerationParams {
            max_tokens,
            ..GenerationParams::default()
        },
        priority: 0,
        seed: id,
    }
}
