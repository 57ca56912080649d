//! A pass as a weighted sum of its work.

use slipstream_base::width::round_u64;

use super::{StepLoad, StepTime};

/// `base + a·prefill_tokens + e·prefill_attention + b·decode_sequences + c·sequences + d·decode_context`, ns.
///
/// Fits measurements of one deployment, where the batch stays in one regime (below or above
/// the GPU's ridge); a roofline or a table follows it through both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linear {
    /// Fixed cost of a pass, ns.
    pub base_ns: f64,
    /// Per prompt token computed, ns.
    pub per_prefill_token_ns: f64,
    /// Per (query, key) pair that causal attention scores for prompts, ns.
    pub per_prefill_pair_ns: f64,
    /// Per sequence that decodes, and per token that it verifies, ns.
    pub per_decode_token_ns: f64,
    /// Per sequence in the pass, ns.
    pub per_sequence_ns: f64,
    /// Per token of context attended to by decoding sequences, ns.
    pub per_context_token_ns: f64,
}

impl StepTime for Linear {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        let ns = self.base_ns
            + self.per_prefill_token_ns * load.prefill_tokens as f64
            + self.per_prefill_pair_ns * load.prefill_attention as f64
            + self.per_decode_token_ns
                * (u64::from(load.decode_sequences) + load.draft_tokens) as f64
            + self.per_sequence_ns * f64::from(load.sequences())
            + self.per_context_token_ns * load.decode_context as f64;
        round_u64(ns) // saturates; negative and NaN give 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_coefficient_counts_its_own_work() {
        let mut linear = Linear {
            base_ns: 1e6,
            per_prefill_token_ns: 1e4,
            per_prefill_pair_ns: 1e5,
            per_decode_token_ns: 1e3,
            per_sequence_ns: 100.0,
            per_context_token_ns: 1.0,
        };
        let mut load = StepLoad::default();
        load.add_prefill(50, 7);
        load.add_decode(5, 5);
        load.add_decode(6, 6);
        assert_eq!(
            linear.step_ns(&load),
            // 7 tokens behind 50: 350 pairs, and 28 among themselves.
            1_000_000 + 70_000 + 37_800_000 + 2_000 + 300 + 11
        );
    }
}
