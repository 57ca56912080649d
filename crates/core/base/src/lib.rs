//! Types that every crate of Slipstream shares: ids, time, tokens and block hashes, requests, KV
//! events, forward-pass metrics, the stages of a request and its objectives.
//!
//! This crate does no I/O, reads no clock and depends on no other crate of the workspace. Types are
//! plain values; constructors check their invariants once.
// Casts that could change a number go through `crate::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod count;
pub mod engine_kind;
pub mod fpm;
pub mod ids;
pub mod kv_event;
pub mod mix;
pub mod planted;
pub mod request;
pub mod role;
pub mod slo;
pub mod stage;
pub mod sync;
pub mod text;
pub mod time;
pub mod token;
pub mod width;

pub use engine_kind::EngineKind;
pub use fpm::ForwardPassMetrics;
pub use ids::{RankId, RequestId, WorkerId};
pub use kv_event::{KvDelta, KvOp};
pub use request::{
    EncoderInput, EngineRequest, FinishReason, GenerationParams, Prompt, Tail, adapter_id,
};
pub use role::Role;
pub use slo::Slo;
pub use stage::{Stage, StageTimes};
pub use time::SimTime;
pub use token::{BlockHash, TokenId};
