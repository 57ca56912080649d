//! `[engine.speculation]`: speculative decoding.

use super::TimingConfig;
use crate::doc::{Table, optional, required_choice, section, value};

/// Speculative decoding: tokens that are drafted, and verified in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculationConfig {
    /// The drafter.
    pub method: SpeculationMethod,
    /// For each token of a draft, the share of drafts in which it is accepted. At least one; none is larger than the
    /// one before it.
    pub acceptance: Vec<f64>,
    /// Time of drafting in each step, ns.
    pub draft_ns: f64,
    /// The same as a share of the step's time without it.
    pub draft_share: f64,
}

impl SpeculationConfig {
    /// Tokens of a draft.
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.acceptance.len()).unwrap_or(u32::MAX)
    }
}

/// A drafter, by vLLM's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeculationMethod {
    /// A head on the model's hidden states (EAGLE, EAGLE 3).
    Eagle,
    /// The model's own layers for it (multi-token prediction).
    Mtp,
    /// A smaller model.
    DraftModel,
    /// Earlier occurrences of the last tokens.
    Ngram,
}

impl SpeculationMethod {
    /// Whether drafted tokens have keys and values of the drafter, for which blocks are taken in advance.
    pub fn has_kv_cache(self) -> bool {
        self != SpeculationMethod::Ngram
    }
}

/// Drafters by vLLM's names.
const SPECULATION: &[(&str, SpeculationMethod)] = &[
    ("eagle", SpeculationMethod::Eagle),
    ("mtp", SpeculationMethod::Mtp),
    ("draft_model", SpeculationMethod::DraftModel),
    ("ngram", SpeculationMethod::Ngram),
];

section! {
    keys SpeculationKeys of "engine.speculation" {
        /// Tokens of a draft, which a step verifies together with the one before them. 0: no speculative decoding.
        ///
        /// High: steps verify tokens that are rejected.
        key num_speculative_tokens: u32 = value(0).within(0..=32);
        /// The drafter, by vLLM's name. All but "ngram" take KV blocks for their drafts in advance.
        ///
        /// The weights and the KV cache of a draft model take memory that is not counted: set `num_gpu_blocks`.
        key method: SpeculationMethod = required_choice(
            SPECULATION,
            "name the drafter, such as `method = \"mtp\"`",
            SpeculationMethod::Mtp,
        )
            .note("needed if `num_speculative_tokens` is not 0");
        /// Share of drafts in which each token is accepted: what vLLM logs as `Per-position acceptance rate`. Drawn
        /// per request from its seed.
        ///
        /// It depends on the model, the drafter, the text and the temperature: measure it on your traffic.
        key acceptance?: Vec<f64> = optional()
            .with_description("list of shares, 0 to 1, one per token of a draft or of longer ones, none larger than the one before it; needed as `method`");
        /// Time of drafting, added to each step.
        ///
        /// High: speculation pays in large drafts only.
        key draft_us: f64 = value(0.0).within(0.0..=1e6).unit("µs");
        /// The same as a share of the step's time.
        ///
        /// As above.
        key draft_share: f64 = value(0.0).within(0.0..=10.0);
    }
}

pub(super) fn read_speculation(t: &Table<'_>, timing: &TimingConfig) -> Option<SpeculationConfig> {
    let tokens: u32 = SpeculationKeys::num_speculative_tokens().read(t);
    if tokens == 0 {
        for key in ["method", "acceptance", "draft_us", "draft_share"] {
            t.unused(
                key,
                "num_speculative_tokens",
                "`num_speculative_tokens` is 0",
            );
        }
        return None;
    }
    let method = SpeculationKeys::method().read(t);
    let ordered = |rates: &Vec<f64>| {
        rates.iter().all(|rate| (0.0..=1.0).contains(rate))
            && rates.windows(2).all(|pair| pair[1] <= pair[0])
    };
    let acceptance = SpeculationKeys::acceptance()
        .field(t)
        .check(
            |rates| rates.len() >= tokens as usize,
            &format!("a list of at least {tokens}, as `num_speculative_tokens` is"),
        )
        .check(
            ordered,
            "shares of 0 to 1, none larger than the one before it: a token is accepted only after those before it",
        )
        .required(
            "set what your deployment measures: vLLM logs it as `Per-position acceptance rate`",
            vec![0.0; tokens as usize],
        );
    // Further ones are of longer drafts.
    let acceptance = acceptance[..acceptance.len().min(tokens as usize)].to_vec();
    let draft_us = SpeculationKeys::draft_us().read(t);
    let draft_share = SpeculationKeys::draft_share().read(t);
    if matches!(timing, TimingConfig::Table { .. }) {
        t.error(
            "num_speculative_tokens",
            "a table of step times has no rows with drafted tokens".to_owned(),
            "set another `engine.timing.kind`, or remove [engine.speculation]",
        );
    }
    Some(SpeculationConfig {
        method,
        acceptance,
        draft_ns: draft_us * 1e3,
        draft_share,
    })
}
