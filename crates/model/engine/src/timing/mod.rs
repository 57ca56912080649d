//! How long a pass of the engine takes.
//!
//! The scheduler sums up what it scheduled in a [`StepLoad`], and a [`StepTime`] turns that into
//! nanoseconds. The sums are enough for every model here, so a pass costs the timing model the
//! same whether it holds one sequence or a thousand.
//!
//! | model | when |
//! | --- | --- |
//! | [`Constant`] | tests, and load tests of everything but the engine |
//! | [`Linear`] | coefficients fitted to one deployment |
//! | [`Calibrated`] | a profile of measured deployments: the default |
//! | [`Roofline`] | no measurement at hand: shape of the model and peaks of the GPU |
//! | [`Table`] | a grid of measured passes |
//!
//! Equations, sources and errors: `docs/step-time.md`.

mod calibrated;
mod drafting;
mod linear;
mod roofline;
mod table;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use slipstream_base::SimTime;
use slipstream_base::width::round_u64;
use slipstream_config::cluster::{EngineConfig, TimingConfig};
use slipstream_config::preset::ModelShape;
pub use slipstream_perf::Moved;
use slipstream_perf::{Deployment, Profile, ProfileError, StepModel};
use thiserror::Error;

pub use calibrated::{Calibrated, deployment};
pub use drafting::Drafting;
pub use linear::Linear;
pub use roofline::{Breakdown, Roofline};
pub use table::{Table, TableError};

/// Turns the work of one pass into the time that it takes.
///
/// A model reads no clock and draws nothing: equal loads take equal times (`&mut` lets a model
/// keep a memo of its last answers). A driver divides the result by its `speedup`; a model knows
/// nothing of that.
pub trait StepTime: Send {
    /// Length of a pass that works on `load`, ns. An empty load has no defined length; the engine
    /// does not ask.
    fn step_ns(&mut self, load: &StepLoad) -> u64;

    /// The part of [`step_ns`](Self::step_ns) in which collectives move bytes between GPUs, without their latency;
    /// `None` if the model has no such part.
    fn moved_ns(&self, load: &StepLoad) -> Option<Moved> {
        let _ = load;
        None
    }

    /// [`step_ns`](Self::step_ns) with other ranks that share experts: the tokens of all ranks together are `all`. A
    /// model of which the experts are no part takes the time of the rank's own work.
    fn step_ns_in_group(&mut self, load: &StepLoad, all: u64) -> u64 {
        let _ = all;
        self.step_ns(load)
    }

    /// Appends to `ends` when each of `passes` passes ends that only decode: the first begins at `now` and works on `load`,
    /// each other one on [what follows](StepLoad::next_decode).
    fn decode_ends(&mut self, now: SimTime, load: &StepLoad, passes: u32, ends: &mut Vec<SimTime>) {
        let (mut end, mut load) = (now, *load);
        for _ in 0..passes {
            end += self.step_ns(&load);
            ends.push(end);
            load = load.next_decode();
        }
    }

    /// The same model for another engine, if that is cheaper than to build it again.
    fn copy(&self) -> Option<Box<dyn StepTime>> {
        None
    }

    /// Whether the model has a range, beyond which it extrapolates. Asked once.
    fn has_range(&self) -> bool {
        false
    }

    /// Whether `load` is beyond that range.
    fn extrapolates(&self, load: &StepLoad) -> bool {
        let _ = load;
        false
    }
}

/// Work of one pass, as sums over its sequences.
///
/// A prefill chunk computes `chunk` prompt tokens of a sequence of which `context` tokens are
/// already in the KV cache (computed by an earlier pass or found by prefix). A decode computes one
/// token and attends to `context` tokens, itself included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Prompt tokens computed: sum of `chunk`.
    pub prefill_tokens: u64,
    /// Sequences that those tokens belong to.
    pub prefill_sequences: u32,
    /// Tokens whose keys and values the prefill chunks read: sum of `context + chunk`.
    pub prefill_context: u64,
    /// Pairs of (query, key) that causal attention scores for the prefill chunks: sum of
    /// `chunk * context + chunk * (chunk + 1) / 2`.
    pub prefill_attention: u64,
    /// Sequences that decode one token each.
    pub decode_sequences: u32,
    /// Tokens whose keys and values the decodes read, which is also the number of (query, key)
    /// pairs that they score: sum of `context`.
    pub decode_context: u64,
    /// Prompt tokens among those: sum of `prompt`.
    pub decode_prompt: u64,
    /// Drafted tokens that the decoding sequences verify (speculative decoding).
    pub draft_tokens: u64,
}

impl StepLoad {
    /// Adds a prefill of `chunk` tokens behind `context` tokens that are in the KV cache.
    #[inline]
    pub fn add_prefill(&mut self, context: u32, chunk: u32) {
        let (context, chunk) = (u64::from(context), u64::from(chunk));
        self.prefill_tokens += chunk;
        self.prefill_sequences += 1;
        self.prefill_context += context + chunk;
        self.prefill_attention += chunk * context + chunk * (chunk + 1) / 2;
    }

    /// Adds the decode of one token behind a prompt of `prompt` tokens; it attends to `context` tokens,
    /// itself included.
    #[inline]
    pub fn add_decode(&mut self, prompt: u32, context: u32) {
        self.decode_sequences += 1;
        self.decode_context += u64::from(context);
        self.decode_prompt += u64::from(prompt);
    }

    /// The load of the next pass if every decode adds one token and nothing is prefilled.
    #[inline]
    #[must_use]
    pub fn next_decode(&self) -> StepLoad {
        StepLoad {
            decode_sequences: self.decode_sequences,
            decode_context: self.decode_context + u64::from(self.decode_sequences),
            decode_prompt: self.decode_prompt,
            ..StepLoad::default()
        }
    }

    /// Tokens computed: rows of every matrix product of the pass.
    #[inline]
    pub fn tokens(&self) -> u64 {
        self.prefill_tokens + u64::from(self.decode_sequences) + self.draft_tokens
    }

    /// Sequences in the pass.
    #[inline]
    pub fn sequences(&self) -> u32 {
        self.prefill_sequences + self.decode_sequences
    }

    /// True if the pass works on nothing.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.sequences() == 0
    }
}

/// Why `[engine.timing]` gives no model of step times. Nothing was built; mend the configuration.
#[derive(Debug, Error)]
pub enum TimingError {
    /// The table cannot be read.
    #[error("reading the table of step times {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The profile cannot be read.
    #[error("`engine.timing.profile`: reading {}", path.display())]
    ReadProfile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The profile is malformed.
    #[error("`engine.timing.profile`: {}", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// Where, and how.
        #[source]
        error: ProfileError,
    },
    /// The table is malformed.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// The model of step times that `config` asks for. `load` reads the file of a table.
///
/// # Errors
/// If a profile or a table cannot be read or is malformed.
pub fn build(
    config: &EngineConfig,
    shape: &ModelShape,
    load: impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Result<Box<dyn StepTime>, TimingError> {
    let model = build_plain(config, shape, load)?;
    Ok(match &config.speculation {
        Some(speculation) => Box::new(Drafting::new(model, speculation)),
        None => model,
    })
}

fn build_plain(
    config: &EngineConfig,
    shape: &ModelShape,
    mut load: impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Result<Box<dyn StepTime>, TimingError> {
    if let Some(deployment) = deployment(config, shape) {
        let profile = profile(config, &mut load)?;
        let model = step_model(config, &deployment, &profile);
        return Ok(Box::new(Calibrated::new(model)));
    }
    Ok(match &config.timing {
        TimingConfig::Constant { step_ns } => Box::new(Constant { step_ns: *step_ns }),
        &TimingConfig::Linear {
            base_ns,
            per_prefill_token_ns,
            per_prefill_pair_ns,
            per_decode_token_ns,
            per_sequence_ns,
            per_context_token_ns,
            api_ns: _,
            api_prompt_token_ns: _,
        } => Box::new(Linear {
            base_ns,
            per_prefill_token_ns,
            per_prefill_pair_ns,
            per_decode_token_ns,
            per_sequence_ns,
            per_context_token_ns,
        }),
        TimingConfig::Calibrated { .. } => unreachable!("handled above"),
        TimingConfig::Roofline { gpu, dtype } => Box::new(Roofline::new(
            shape,
            gpu,
            config.tensor_parallel_size,
            *dtype,
            config.kv_cache_dtype,
        )),
        TimingConfig::Table { path } => {
            let text = load(path).map_err(|error| TimingError::Read {
                path: path.clone(),
                error,
            })?;
            let file = path.to_string_lossy();
            if path
                .extension()
                .is_some_and(|ending| ending.eq_ignore_ascii_case("parquet"))
            {
                Box::new(Table::parse_parquet(&file, text)?)
            } else {
                Box::new(Table::parse(&file, &text)?)
            }
        }
    })
}

/// The profile that the engine of `config` is calibrated by. `load` reads its file.
///
/// # Errors
/// If the file cannot be read or is malformed.
pub fn profile(
    config: &EngineConfig,
    mut load: impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Result<Cow<'static, Profile>, TimingError> {
    let TimingConfig::Calibrated {
        profile: Some(path),
        ..
    } = &config.timing
    else {
        return Ok(Cow::Borrowed(Profile::built_in()));
    };
    let text = load(path).and_then(|text| String::from_utf8(text).map_err(io::Error::other));
    let text = text.map_err(|error| TimingError::ReadProfile {
        path: path.clone(),
        error,
    })?;
    let profile = Profile::parse(&text).map_err(|error| TimingError::Profile {
        path: path.clone(),
        error,
    })?;
    Ok(Cow::Owned(profile))
}

fn step_model(config: &EngineConfig, deployment: &Deployment, profile: &Profile) -> StepModel {
    let model = StepModel::new(deployment, profile);
    match config.expert_imbalance {
        // One GPU has all experts.
        Some(factor) if deployment.parallel.expert > 1 => model.with_expert_imbalance(factor),
        _ => model,
    }
}

/// Time of a request outside of passes: HTTP, tokenizer, hops between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ApiTime {
    /// Of each request, ns.
    pub request_ns: f64,
    /// Of each token of its prompt, ns.
    pub prompt_token_ns: f64,
}

impl ApiTime {
    /// Time of a request whose prompt has `tokens`, ns.
    pub fn ns(&self, tokens: u32) -> u64 {
        round_u64(self.request_ns + self.prompt_token_ns * f64::from(tokens))
    }
}

/// Time from the arrival of a request at the server of `config` to the engine's queue; none unless
/// its step times are calibrated or linear.
///
/// # Errors
/// As [`build`].
pub fn api_time(
    config: &EngineConfig,
    shape: &ModelShape,
    load: impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Result<ApiTime, TimingError> {
    if let TimingConfig::Linear {
        api_ns,
        api_prompt_token_ns,
        ..
    } = config.timing
    {
        return Ok(ApiTime {
            request_ns: api_ns,
            prompt_token_ns: api_prompt_token_ns,
        });
    }
    let Some(deployment) = deployment(config, shape) else {
        return Ok(ApiTime::default());
    };
    let model = step_model(config, &deployment, &*profile(config, load)?);
    let own_steps = 1 + u32::from(config.async_scheduling);
    Ok(ApiTime {
        request_ns: model.api_ns(own_steps),
        prompt_token_ns: model.api_prompt_token_ns(),
    })
}

/// Every pass takes the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Length of a pass, ns.
    pub step_ns: u64,
}

impl StepTime for Constant {
    fn step_ns(&mut self, _load: &StepLoad) -> u64 {
        self.step_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_score_as_many_pairs_as_the_whole_prompt() {
        let mut whole = StepLoad::default();
        whole.add_prefill(0, 1000);
        let mut parts = StepLoad::default();
        parts.add_prefill(0, 300);
        parts.add_prefill(300, 700);
        assert_eq!(whole.prefill_attention, 1000 * 1001 / 2);
        assert_eq!(whole.prefill_attention, parts.prefill_attention);
        assert_eq!(whole.tokens(), parts.tokens());
    }

    #[test]
    fn a_decode_is_a_prefill_of_one_token() {
        let (mut decode, mut prefill) = (StepLoad::default(), StepLoad::default());
        decode.add_decode(500, 801);
        prefill.add_prefill(800, 1);
        assert_eq!(decode.decode_context, prefill.prefill_attention);
        assert_eq!(decode.decode_context, prefill.prefill_context);
        assert_eq!(decode.next_decode().decode_context, 802);
    }
}
