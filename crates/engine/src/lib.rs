//! One modelled engine: continuous batching, paged KV cache with prefix reuse, preemption, step-time models.
#![forbid(unsafe_code)]

pub mod timing;
