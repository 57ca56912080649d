//! Errors of an engine's configuration, and reasons to refuse a request.

use slipstream_base::{RequestId, TokenId};

/// Why an engine could not be made. A mistake in the configuration; nothing to retry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A size that must be at least 1 is 0.
    #[error("`engine.{key}` is 0; set it to 1 or more")]
    Zero {
        /// Which one.
        key: &'static str,
    },
    /// A size beyond what the engine counts with.
    #[error("`engine.{key}` is {value}; at most {max} is possible")]
    TooLarge {
        /// Which one.
        key: &'static str,
        /// As configured.
        value: u32,
        /// The largest value.
        max: u32,
    },
    /// Nothing to make answers of.
    #[error("the output vocabulary is empty; give the engine at least one token to answer with")]
    EmptyVocab,
    /// The end-of-sequence token would show up in the middle of answers.
    #[error("the output vocabulary contains the end-of-sequence token {eos}; leave it out")]
    EosInVocab {
        /// The token.
        eos: TokenId,
    },
}

/// Why a request was not taken. The engine is unchanged; the same request would be refused again
/// (except [`Refusal::Duplicate`], once the first one has finished).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The prompt and one token of answer do not fit the model.
    #[error(
        "the prompt has {prompt_tokens} tokens, and with at least one output token it exceeds \
         max_model_len = {max_model_len}; shorten it"
    )]
    ModelLen {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// The limit.
        max_model_len: u32,
    },
    /// The prompt and one token of answer do not fit the whole KV cache.
    #[error(
        "the prompt has {prompt_tokens} tokens, and with at least one output token it needs \
         {needed_blocks} KV blocks of {block_size}, but the engine has {total_blocks}; \
         shorten it or raise num_gpu_blocks"
    )]
    Blocks {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Blocks for the prompt and one token.
        needed_blocks: u32,
        /// Blocks in the pool.
        total_blocks: u32,
        /// Tokens per block.
        block_size: u32,
    },
    /// Without chunked prefill a prompt must fit one pass.
    #[error(
        "the prompt has {prompt_tokens} tokens, and with at least one output token it exceeds \
         max_num_batched_tokens = {max_num_batched_tokens} while chunked prefill is off; \
         enable_chunked_prefill or raise the budget"
    )]
    Budget {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// The budget of a pass.
        max_num_batched_tokens: u32,
    },
    /// Hashed in blocks of another size.
    #[error("the prompt is hashed in blocks of {given} tokens, but the engine's have {block_size}")]
    BlockSize {
        /// The prompt's.
        given: u32,
        /// The engine's.
        block_size: u32,
    },
    /// An image or another input of the encoder can never be computed.
    #[error(
        "an image takes {tokens} tokens, but the encoder computes at most {most} at once; send smaller images, or raise \
         max_num_encoder_input_tokens and encoder_cache_size (with disable_chunked_mm_input also the limits of a pass)"
    )]
    EncoderInput {
        /// Tokens of the input.
        tokens: u32,
        /// The smaller of the encoder's budget and its cache; and of the limits of a pass, if it takes inputs whole.
        most: u32,
    },
    /// Nothing to generate.
    #[error("max_tokens is 0; ask for at least 1")]
    NoTokens,
    /// The id is taken.
    #[error("request {id} is already in the engine")]
    Duplicate {
        /// The id.
        id: RequestId,
    },
}
