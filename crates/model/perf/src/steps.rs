//! Steps of one rank for an engine: physics, and the residual at the step's own load.

use crate::deployment::Deployment;
use crate::elementary;
use crate::physics::{Load, Moved, Physics, Terms};
use crate::predict::aggregated;
use crate::profile::{Profile, own};
use crate::residual::{Features, StepResidual, input_feature, output_feature};

/// Lengths that a step without any sequence in decode has, and that the hop before the engine is timed at.
const ISL: f64 = 2048.0;
const OSL: f64 = 1024.0;

/// Steps that are computed together: more of them would often be computed for nothing.
const AT_ONCE: usize = 4;

/// How long the steps of one rank take. Everything that does not depend on the load is precomputed:
/// a look-up costs some dozen operations.
#[derive(Clone, Debug, PartialEq)]
pub struct StepModel {
    physics: Physics,
    residual: StepResidual,
    /// Time of a request outside of the engine's steps, up to its first token, ns.
    api_ns: f64,
    /// The same per token of its prompt, ns.
    api_prompt_token_ns: f64,
    /// Steps by which tokens are behind, those that an engine runs itself included.
    lag_steps: f64,
    /// Length of such a step, ns.
    lag_step_ns: f64,
}

/// Terms of an engine's last look-up, for [`StepModel::ns_after`]. It belongs to one model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LastStep {
    whole: ByCount,
    /// The decodes of a step that also has prompts.
    decodes: ByCount,
    input: Input,
}

/// Feature of the residual for a mean length of prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Input {
    isl: f64,
    feature: f64,
}

impl Input {
    #[inline]
    fn feature_of(&mut self, isl: f64) -> f64 {
        if self.isl != isl {
            let feature = input_feature(isl);
            *self = Input { isl, feature };
        }
        self.feature
    }
}

impl Default for Input {
    fn default() -> Input {
        Input {
            // No prompt is as long.
            isl: -1.0,
            feature: 0.0,
        }
    }
}

/// Terms of the physics for some numbers of sequences and prompt tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ByCount {
    decodes: f64,
    prefills: f64,
    prefill_tokens: f64,
    terms: Terms,
}

impl Default for ByCount {
    fn default() -> ByCount {
        ByCount {
            // No load has as many.
            decodes: -1.0,
            prefills: 0.0,
            prefill_tokens: 0.0,
            terms: Terms::default(),
        }
    }
}

impl ByCount {
    #[inline]
    fn ns(&mut self, physics: &Physics, load: &Load) -> f64 {
        let terms = Terms {
            attention: physics.attention_ns(load),
            ..self.terms(physics, load)
        };
        terms.total()
    }

    /// All terms but attention.
    #[inline]
    fn terms(&mut self, physics: &Physics, load: &Load) -> Terms {
        if self.decodes != load.decodes
            || self.prefills != load.prefills
            || self.prefill_tokens != load.prefill_tokens
        {
            *self = ByCount {
                decodes: load.decodes,
                prefills: load.prefills,
                prefill_tokens: load.prefill_tokens,
                terms: physics.terms_by_count(load),
            };
        }
        self.terms
    }
}

impl StepModel {
    /// The steps of the ranks of `deployment`; its lengths and batch size are not used.
    pub fn new(deployment: &Deployment, profile: &Profile) -> StepModel {
        let d = aggregated(deployment);
        StepModel {
            physics: Physics::new(
                &d.shape,
                &d.gpu,
                d.formats,
                d.parallel,
                d.framework,
                &profile.params,
            ),
            residual: Features::of(&d).of_steps(profile, d.parallel.attention_data),
            api_ns: own!(profile.params, d.framework, "api_ms") * 1e6,
            api_prompt_token_ns: own!(profile.params, d.framework, "api_prompt_token_us") * 1e3,
            lag_steps: own!(profile.params, d.framework, "lag_steps"),
            lag_step_ns: 0.0,
        }
        .with_lag_step()
    }

    /// The same, if the GPU whose experts have most rows has `factor` times the mean of all GPUs, and not what the profile
    /// has.
    #[must_use]
    pub fn with_expert_imbalance(mut self, factor: f64) -> StepModel {
        self.physics = self.physics.with_expert_imbalance(factor);
        self.with_lag_step()
    }

    fn with_lag_step(mut self) -> StepModel {
        self.lag_step_ns = self.ns(&Load::decode(1.0, ISL + OSL / 2.0, ISL));
        self
    }

    /// Length of a step on `load`, ns.
    pub fn ns(&self, load: &Load) -> f64 {
        self.ns_after(load, &mut LastStep::default())
    }

    /// The same. `last` keeps what the next step shares with this one if it has as many sequences and prompt
    /// tokens, as steps without arrivals and ends do: half of the arithmetic, with the same bits.
    #[inline]
    pub fn ns_after(&self, load: &Load, last: &mut LastStep) -> f64 {
        let mut ns = last.whole.ns(&self.physics, load);
        // Where kernels were measured, prompts take no longer beside decodes than alone.
        let slower = self.physics.interference();
        if load.prefill_tokens > 0.0 && load.decodes > 0.0 && slower != 1.0 {
            let alone = Load {
                prefills: 0.0,
                prefill_tokens: 0.0,
                prefill_pairs: 0.0,
                prefill_context: 0.0,
                ..*load
            };
            let decodes = last.decodes.ns(&self.physics, &alone);
            ns = decodes + slower * (ns - decodes).max(0.0);
        }
        ns * self.factor(load, &mut last.input)
    }

    /// The part of the length of a step on `load` in which collectives move bytes between GPUs.
    pub fn moved_ns(&self, load: &Load) -> Moved {
        let moved = self.physics.moved_ns(load);
        let slower = self.physics.interference();
        let whole = if load.prefill_tokens > 0.0 && load.decodes > 0.0 && slower != 1.0 {
            let decodes = self.physics.moved_ns(&Load {
                prefill_tokens: 0.0,
                ..*load
            });
            Moved {
                reduces: decodes.reduces + slower * (moved.reduces - decodes.reduces),
                exchanges: decodes.exchanges + slower * (moved.exchanges - decodes.exchanges),
            }
        } else {
            moved
        };
        whole.times(self.factor(load, &mut Input::default()))
    }

    /// Lengths of `steps` steps that only decode, the first on `load` and each on one more token per sequence than the
    /// one before it, ns: what [`ns_after`](Self::ns_after) gives for each, in a fraction of the time.
    #[inline]
    pub fn decodes_ns(
        &self,
        load: &Load,
        last: &mut LastStep,
        steps: u32,
        mut each_ns: impl FnMut(f64),
    ) {
        let terms = last.whole.terms(&self.physics, load);
        let each = 1.0 / load.decodes;
        let isl = load.decode_prompt * each;
        let feature = last.input.feature_of(isl);
        let residual = self.residual.of_decodes(load.decodes, (isl, feature));
        let mut next = load.decode_context;
        let mut left = steps as usize;
        while left > 0 {
            // The same operation on all of them, so that the compiler can do several at once.
            let mut contexts = [0.0; AT_ONCE];
            for context in &mut contexts {
                *context = next;
                next += load.decodes;
            }
            let mut factors = [0.0; AT_ONCE];
            for (factor, context) in factors.iter_mut().zip(contexts) {
                let osl = 2.0 * (context - load.decode_prompt).max(0.0) * each;
                *factor = output_feature(osl);
            }
            for (factor, context) in factors.iter_mut().zip(contexts) {
                let osl = 2.0 * (context - load.decode_prompt).max(0.0) * each;
                *factor = residual.at(osl, *factor);
            }
            for factor in &mut factors {
                *factor = elementary::exp(*factor);
            }
            for (context, factor) in contexts.into_iter().zip(factors).take(left) {
                let load = Load {
                    decodes: load.decodes,
                    decode_context: context,
                    decode_prompt: load.decode_prompt,
                    ..Load::default()
                };
                let terms = Terms {
                    attention: self.physics.attention_ns(&load),
                    ..terms
                };
                each_ns(terms.total() * factor);
            }
            left = left.saturating_sub(AT_ONCE);
        }
    }

    /// Length of a step on `load` whose decodes also verify `drafts` tokens, ns; `last` as in
    /// [`ns_after`](Self::ns_after). The residual is that of the step without them.
    pub fn ns_with_drafts(&self, load: &Load, drafts: f64, last: &mut LastStep) -> f64 {
        let ns = self.ns_after(load, last);
        ns + self.physics.drafts_ns(load, drafts) * self.factor(load, &mut last.input)
    }

    /// Length of a step on `load` and `drafts` together with ranks of known work, ns: the tokens of all ranks together are `all`. The
    /// other look-ups take each rank to have as many as this one.
    pub fn ns_in_group(&self, load: &Load, drafts: f64, all: f64, last: &mut LastStep) -> f64 {
        let alone = self.ns_with_drafts(load, drafts, last);
        let slower = if load.prefill_tokens > 0.0 && load.decodes > 0.0 {
            self.physics.interference()
        } else {
            1.0
        };
        let experts = self.physics.experts_beside_ns(load, drafts, all);
        alone + slower * experts * self.factor(load, &mut last.input)
    }

    /// Measured over physical time, at the mean lengths of the step's sequences. Answers are half written
    /// on average.
    #[inline]
    fn factor(&self, load: &Load, input: &mut Input) -> f64 {
        let (isl, osl) = if load.decodes > 0.0 {
            let answers = (load.decode_context - load.decode_prompt).max(0.0);
            let each = 1.0 / load.decodes;
            (load.decode_prompt * each, 2.0 * answers * each)
        } else {
            (load.prefill_context / load.prefills.max(1.0), OSL)
        };
        let feature = input.feature_of(isl);
        elementary::exp(self.residual.at(load.decodes, (isl, feature), osl))
    }

    /// Time of a request outside of the engine's steps, up to its first token: HTTP, tokenizer, the hop to
    /// the engine's process, and tokens that are one or more steps behind, ns. The lag counts as steps of
    /// one sequence, less the `own_steps` that the engine runs itself: 1, or 2 if it schedules each step
    /// while the one before it runs. A prompt adds [`api_prompt_token_ns`](Self::api_prompt_token_ns).
    pub fn api_ns(&self, own_steps: u32) -> f64 {
        let lag = (self.lag_steps - f64::from(own_steps)).max(0.0);
        self.api_ns + lag * self.lag_step_ns
    }

    /// Time that each token of a prompt adds to [`api_ns`](Self::api_ns), ns: parsing, tokenizing, copies
    /// between processes.
    pub fn api_prompt_token_ns(&self) -> f64 {
        self.api_prompt_token_ns
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_config::cluster::Dtype;
    use slipstream_config::preset;

    use super::*;
    use crate::deployment::{Formats, Framework, Parallel, Serving};

    fn model(name: &str, framework: Framework) -> StepModel {
        let shape = preset::model(name).expect("a preset");
        let deployment = Deployment {
            shape: shape.clone(),
            gpu: preset::gpu("h100-sxm").expect("a preset").clone(),
            framework,
            version: String::new(),
            formats: Formats::of(shape, Dtype::Fp8),
            precision: crate::precision_word(Dtype::Fp8),
            parallel: Parallel {
                tensor: 8,
                pipeline: 1,
                attention_data: 1,
                expert_tensor: 8,
                expert: 1,
            },
            serving: Serving::Aggregated,
            isl: 1.0,
            osl: 1.0,
            batch: 1.0,
            assumed: Vec::new(),
        };
        StepModel::new(&deployment, Profile::built_in())
    }

    /// Weights are streamed once: few drafts cost little, and many cost what as many prompt tokens do.
    #[test]
    fn drafts_cost_their_rows() {
        let model = model("llama-3.1-8b", Framework::Vllm);
        let load = Load::decode(8.0, 2_000.0, 1_000.0);
        let plain = model.ns(&load);
        let with = |drafts| model.ns_with_drafts(&load, drafts, &mut LastStep::default());
        assert_eq!(with(0.0).to_bits(), plain.to_bits());
        assert!(
            with(24.0) > plain && with(24.0) < 1.2 * plain,
            "{}",
            with(24.0) / plain
        );
        assert!(with(4_096.0) > 3.0 * plain, "{}", with(4_096.0) / plain);
    }

    /// Ranks with fewer tokens leave the experts less to do; the rest of a step is the rank's own.
    #[test]
    fn experts_compute_the_tokens_of_all_ranks() {
        let model = |ranks| {
            let shape = preset::model("deepseek-v3").expect("a preset");
            let deployment = Deployment {
                shape: shape.clone(),
                gpu: preset::gpu("h200-sxm").expect("a preset").clone(),
                framework: Framework::Vllm,
                version: String::new(),
                formats: Formats::of(shape, Dtype::Fp8),
                precision: crate::precision_word(Dtype::Fp8),
                parallel: Parallel {
                    tensor: 1,
                    pipeline: 1,
                    attention_data: ranks,
                    expert_tensor: 1,
                    expert: ranks,
                },
                serving: Serving::Aggregated,
                isl: 1.0,
                osl: 1.0,
                batch: 1.0,
                assumed: Vec::new(),
            };
            StepModel::new(&deployment, Profile::built_in())
        };
        let model = model(8);
        let of =
            |load: &Load, all: f64| model.ns_in_group(load, 0.0, all, &mut LastStep::default());
        let prompt = Load::default().with_prompt(4_096.0);
        let alone = model.ns(&prompt);
        assert!((of(&prompt, 8.0 * 4_096.0) - alone).abs() < 1.0);
        let beside_idle = of(&prompt, 4_096.0 + 7.0);
        assert!(
            beside_idle > 0.1 * alone && beside_idle < 0.7 * alone,
            "{}",
            beside_idle / alone
        );
        let mixed = Load::decode(30.0, 2_000.0, 1_500.0).with_prompt(2_000.0);
        assert!(of(&mixed, 2_100.0) < model.ns(&mixed));
        assert!(of(&mixed, 30_000.0) > model.ns(&mixed));
    }

    fn load_of(decodes: u32, context: u32) -> Load {
        Load::decode(
            f64::from(decodes),
            f64::from(context),
            f64::from(context / 2),
        )
    }

    proptest! {
        /// Steps whose counts repeat, and such whose counts change.
        #[test]
        fn steps_do_not_depend_on_the_last_one(
            steps in prop::collection::vec((0..3_u32, 0..3_u32, 0..3_u32, 1..100_000_u32), 1..50),
        ) {
            for name in ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"] {
                let model = model(name, Framework::Vllm);
                let mut last = LastStep::default();
                for &(decodes, prefills, tokens, context) in &steps {
                    let load = Load {
                        decodes: f64::from(decodes),
                        decode_context: f64::from(decodes * context),
                        decode_prompt: f64::from(decodes * context / 2),
                        prefills: f64::from(prefills),
                        prefill_tokens: f64::from(prefills * tokens),
                        prefill_pairs: f64::from(prefills * tokens) * f64::from(context),
                        prefill_context: f64::from(prefills * context),
                    };
                    let after = model.ns_after(&load, &mut last);
                    prop_assert_eq!(after.to_bits(), model.ns(&load).to_bits());
                    if decodes == 0 {
                        continue;
                    }
                    let mut at = f64::from(decodes * context);
                    model.decodes_ns(&load_of(decodes, context), &mut last, tokens * 40, |ns| {
                        let single = Load { decode_context: at, ..load_of(decodes, context) };
                        assert_eq!(ns.to_bits(), model.ns(&single).to_bits());
                        at += f64::from(decodes);
                    });
                }
            }
        }
    }
}
