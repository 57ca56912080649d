//! Step times by physics and a profile of measured deployments (`slipstream-perf`).

use std::sync::Arc;

use slipstream_base::SimTime;
use slipstream_base::width::round_u64;
use slipstream_config::cluster::{EngineConfig, TimingConfig};
use slipstream_config::preset::{Formats, ModelShape};
use slipstream_perf::{Deployment, LastStep, Load, Moved, Parallel, Serving, StepModel};

use super::{StepLoad, StepTime};

/// The step times that `slipstream predict` uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    /// Shared, so that the engines of a pool read the same memory.
    model: Arc<StepModel>,
    last: LastStep,
}

impl Calibrated {
    /// The step times of `model`.
    pub fn new(model: StepModel) -> Calibrated {
        Calibrated {
            model: Arc::new(model),
            last: LastStep::default(),
        }
    }
}

impl StepTime for Calibrated {
    #[inline]
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        let drafts = load.draft_tokens;
        let load = load_of(load);
        round_u64(if drafts == 0 {
            self.model.ns_after(&load, &mut self.last)
        } else {
            let last = &mut self.last;
            self.model.ns_with_drafts(&load, drafts as f64, last)
        })
    }

    fn moved_ns(&self, load: &StepLoad) -> Option<Moved> {
        let drafts = load.draft_tokens as f64;
        let load = load_of(load);
        Some(self.model.moved_ns(&Load {
            prefill_tokens: load.prefill_tokens + drafts,
            ..load
        }))
    }

    fn step_ns_in_group(&mut self, load: &StepLoad, all: u64) -> u64 {
        let (drafts, all) = (load.draft_tokens as f64, all as f64);
        let last = &mut self.last;
        round_u64(self.model.ns_in_group(&load_of(load), drafts, all, last))
    }

    fn decode_ends(&mut self, now: SimTime, load: &StepLoad, passes: u32, ends: &mut Vec<SimTime>) {
        let mut end = now;
        ends.reserve(passes as usize);
        self.model
            .decodes_ns(&load_of(load), &mut self.last, passes, |ns| {
                end += round_u64(ns);
                ends.push(end);
            });
    }

    fn copy(&self) -> Option<Box<dyn StepTime>> {
        Some(Box::new(self.clone()))
    }
}

#[inline]
fn load_of(load: &StepLoad) -> Load {
    Load {
        decodes: f64::from(load.decode_sequences),
        decode_context: load.decode_context as f64,
        decode_prompt: load.decode_prompt as f64,
        prefills: f64::from(load.prefill_sequences),
        prefill_tokens: load.prefill_tokens as f64,
        prefill_pairs: load.prefill_attention as f64,
        prefill_context: load.prefill_context as f64,
    }
}

/// The deployment that an engine of `config` is one worker of, for the profile; `None` if its step
/// times are not calibrated ones. Lengths and batch size are 1: a caller that knows the load sets them.
pub fn deployment(config: &EngineConfig, shape: &ModelShape) -> Option<Deployment> {
    let TimingConfig::Calibrated {
        gpu,
        dtype,
        framework,
        ..
    } = &config.timing
    else {
        return None;
    };
    let tensor = config.tensor_parallel_size.max(1);
    let attention_data = match shape.experts {
        Some(_) => config.data_parallel_size.max(1),
        // Ranks of a dense model never meet.
        None => 1,
    };
    let group = tensor * attention_data;
    let (expert_tensor, expert) = if config.enable_expert_parallel {
        (1, group)
    } else {
        (group, 1)
    };
    let formats = Formats {
        kv_cache: config.kv_cache_dtype,
        ..Formats::of(shape, *dtype)
    };
    Some(Deployment {
        shape: shape.clone(),
        gpu: gpu.clone(),
        framework: *framework,
        version: String::new(),
        formats,
        precision: slipstream_perf::precision_word(*dtype),
        parallel: Parallel {
            tensor,
            pipeline: 1,
            attention_data,
            expert_tensor,
            expert,
        },
        serving: Serving::Aggregated,
        isl: 1.0,
        osl: 1.0,
        batch: 1.0,
        assumed: Vec::new(),
    })
}
