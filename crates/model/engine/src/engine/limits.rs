//! Limits of an engine: those of its configuration, and those that follow from the size of its cache.

use slipstream_base::EngineRequest;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::{EngineConfig, SchedulingPolicy};

use crate::error::{EngineError, Refusal};
use crate::pool::BLOCKS_MAX;

/// What a pass, and a sequence, may have at most, and in which order sequences run.
pub(super) struct Limits {
    pub(super) block_size: u32,
    /// Running sequences: `max_num_active_seqs`, or `max_num_seqs`.
    pub(super) running: u32,
    max_num_batched_tokens: u32,
    /// Tokens of a pass: the smaller of `max_num_scheduled_tokens` and `max_num_batched_tokens`.
    pub(super) budget: u32,
    /// Tokens of a sequence in a pass while there are others; `u32::MAX` without a limit.
    pub(super) long_prefill: u32,
    /// `long_prefill` is at least a fair share of the pass.
    long_prefill_adaptive: bool,
    /// A sequence is admitted if all of it fits, not its first chunk alone.
    pub(super) reserves_full: bool,
    /// Each pass is scheduled when the one before it begins.
    pub(super) ahead: bool,
    /// As configured; `max_len` is what can be held of it.
    max_model_len: u32,
    /// Tokens of a sequence, its answer included.
    pub(super) max_len: u32,
    pub(super) chunked: bool,
    pub(super) policy: SchedulingPolicy,
    blocks: u32,
}

impl Limits {
    /// # Errors
    /// [`EngineError`] if the configuration makes no engine.
    pub(super) fn new(config: &EngineConfig) -> Result<Limits, EngineError> {
        for (key, value) in [
            ("block_size", config.block_size),
            ("num_gpu_blocks", config.num_gpu_blocks),
            ("max_num_seqs", config.max_num_seqs),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
            ("max_model_len", config.max_model_len),
        ] {
            if value == 0 {
                return Err(EngineError::Zero { key });
            }
        }
        for (key, value) in [
            ("max_num_active_seqs", config.max_num_active_seqs),
            ("max_num_scheduled_tokens", config.max_num_scheduled_tokens),
        ] {
            if value == Some(0) {
                return Err(EngineError::Zero { key });
            }
        }
        // So that no count of tokens or blocks leaves its type.
        for (key, value, max) in [
            ("block_size", config.block_size, 1 << 16),
            ("num_gpu_blocks", config.num_gpu_blocks, BLOCKS_MAX),
            ("max_model_len", config.max_model_len, 1 << 31),
        ] {
            if value > max {
                return Err(EngineError::TooLarge { key, value, max });
            }
        }

        // A sequence longer than the cache, or (without chunks) than a pass, could be preempted
        // and never come back. vLLM does not start with such a configuration unless it may
        // lower max_model_len by itself (`--max-model-len auto`), which is what happens here.
        let cache_tokens = u64::from(config.num_gpu_blocks) * u64::from(config.block_size);
        let mut max_len = to_u32(u64::from(config.max_model_len).min(cache_tokens));
        let budget = config
            .max_num_scheduled_tokens
            .unwrap_or(u32::MAX)
            .min(config.max_num_batched_tokens);
        if !config.enable_chunked_prefill {
            max_len = max_len.min(budget);
        }
        let active = config.max_num_active_seqs.unwrap_or(u32::MAX);
        Ok(Limits {
            block_size: config.block_size,
            running: active.min(config.max_num_seqs),
            max_num_batched_tokens: config.max_num_batched_tokens,
            budget,
            long_prefill: match config.long_prefill_token_threshold {
                0 => u32::MAX,
                most => most,
            },
            long_prefill_adaptive: config.long_prefill_token_threshold_adaptive,
            reserves_full: config.scheduler_reserve_full_isl,
            ahead: config.async_scheduling,
            max_model_len: config.max_model_len,
            max_len,
            chunked: config.enable_chunked_prefill,
            policy: config.scheduling_policy,
            blocks: config.num_gpu_blocks,
        })
    }

    /// Most tokens that one of `sequences` may have in a pass. A sequence that is alone starves no other.
    pub(super) fn sequence_tokens_max(&self, sequences: u32) -> u32 {
        if self.long_prefill == u32::MAX || sequences <= 1 {
            return u32::MAX;
        }
        if self.long_prefill_adaptive {
            self.long_prefill
                .max(self.max_num_batched_tokens / sequences)
        } else {
            self.long_prefill
        }
    }

    /// # Errors
    /// [`Refusal`] if a request can never run in the cache and the passes of this engine.
    pub(super) fn check(&self, request: &EngineRequest) -> Result<(), Refusal> {
        let prompt = &request.prompt;
        if prompt.block_size() != self.block_size {
            return Err(Refusal::BlockSize {
                given: prompt.block_size(),
                block_size: self.block_size,
            });
        }
        if request.params.max_tokens <= request.params.answered {
            return Err(Refusal::NoTokens);
        }
        let prompt_tokens = prompt.len().saturating_add(request.params.answered);
        if prompt_tokens >= self.max_model_len {
            return Err(Refusal::ModelLen {
                prompt_tokens,
                max_model_len: self.max_model_len,
            });
        }
        let needed_blocks = prompt_tokens / self.block_size + 1;
        if needed_blocks > self.blocks {
            return Err(Refusal::Blocks {
                prompt_tokens,
                needed_blocks,
                total_blocks: self.blocks,
                block_size: self.block_size,
            });
        }
        if prompt_tokens >= self.max_len {
            return Err(Refusal::Budget {
                prompt_tokens,
                max_num_batched_tokens: self.budget,
            });
        }
        Ok(())
    }
}
