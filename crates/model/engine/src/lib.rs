//! One modelled engine: continuous batching, paged KV cache with prefix reuse, preemption,
//! step-time models.
//!
//! It stands in for vLLM's V1 engine where there is no GPU: the same scheduling decisions from the
//! same inputs, with the forward pass replaced by a model of how long it takes. It does no I/O and
//! reads no clock, so one code serves live clients and the simulator.
//!
//! ```text
//!   add, abort ─► Engine ── begin_pass(now) ─► end of the pass     (the driver waits until then)
//!                   │  ◄── finish_pass(out) ── tokens, first tokens, finished, KV delta, FPM
//!        ┌──────────┼─────────────┬────────────┐
//!     waiting     pool          answer       timing
//!     (queue)  (KV blocks)  (what is said)  (how long)
//! ```
//!
//! The model and its differences from vLLM: `docs/engine-model.md`.
//!
//! One request, in virtual time:
//!
//! ```
//! use slipstream_base::{
//!     BlockHash, EngineRequest, GenerationParams, Prompt, RankId, RequestId, SimTime,
//! };
//! use slipstream_config::cluster::{EngineConfig, OutputLen};
//! use slipstream_engine::timing::Constant;
//! use slipstream_engine::{Engine, OutputModel, PassOutput};
//!
//! let config = EngineConfig::default();
//! let timing = Box::new(Constant { step_ns: 10_000_000 });
//! let answers = OutputModel {
//!     vocab: (0..100).collect(),
//!     first_vocab: None,
//!     eos: 100,
//!     lengths: OutputLen::Constant(3),
//! };
//! let mut engine = Engine::new(RankId::default(), &config, timing, answers)?;
//! let request = EngineRequest {
//!     id: RequestId(1),
//!     prompt: Prompt::from_tokens(&[7; 100], config.block_size, BlockHash::default())?,
//!     params: GenerationParams::default(),
//!     priority: 0,
//!     seed: 1,
//! };
//! engine.add(SimTime::ZERO, request)?;
//!
//! let (mut now, mut pass, mut token_times) = (SimTime::ZERO, PassOutput::default(), Vec::new());
//! while let Some(end) = engine.begin_pass(now) {
//!     now = end; // a live driver waits until then
//!     engine.finish_pass(&mut pass);
//!     if pass.token_count > 0 {
//!         token_times.push(pass.end.0);
//!     }
//! }
//! assert_eq!(token_times, [10_000_000, 20_000_000, 30_000_000]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(test, allow(clippy::disallowed_methods))] // its tests do I/O
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

mod answer;
mod engine;
mod error;
mod host_tier;
mod output;
pub mod pool;
pub mod timing;
mod waiting;

pub use answer::{OutputModel, natural_len, output_token};
pub use engine::{DecodeRun, Engine, FoundAtPeer, PeerBlocks, PeerLoad, Reserved};
pub use error::{EngineError, Refusal};
pub use host_tier::{DiskTier, HostTier, Medium};
pub use output::{
    Finished, FirstToken, LowerHits, PassOutput, Stats, StepTokens, StepTokensIter, Usage,
};
pub use pool::KvChanges;
