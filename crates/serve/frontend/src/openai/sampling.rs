//! Settings of the sampler.

/// Settings of the sampler that make it greedy or not.
pub(super) struct Sampling {
    pub(super) temperature: f64,
    pub(super) top_p: f64,
    pub(super) top_k: f64,
    pub(super) min_p: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0.0,
            min_p: 0.0,
        }
    }
}

impl Sampling {
    /// vLLM's `_SAMPLING_EPS` (`vllm/sampling_params.py`).
    const EPS: f64 = 1e-5;

    /// Whether only the most likely token can be sampled: by the temperature, or because the filters leave no other.
    pub(super) fn is_greedy(&self) -> bool {
        self.temperature < Self::EPS
            || self.top_k == 1.0
            || self.top_p < Self::EPS
            || self.min_p == 1.0
    }
}
