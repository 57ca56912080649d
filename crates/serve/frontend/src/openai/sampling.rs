//! Settings of the sampler. Samplers are not modelled: the settings must make sense, and change nothing unless they leave the
//! most likely token alone.

use super::ApiError;
use super::members::{real, wrong_type};
use super::value::Json;

/// Settings of the sampler that make it greedy or not.
pub(super) struct Sampling {
    temperature: f64,
    top_p: f64,
    top_k: f64,
    min_p: f64,
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
    /// The fields that it takes.
    pub(super) const FIELDS: [&'static str; 7] = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ];

    /// Notes one of [`FIELDS`](Self::FIELDS).
    pub(super) fn take(&mut self, name: &str, value: &Json<'_>) -> Result<(), ApiError> {
        match name {
            "temperature" => {
                let range = |t| (0.0..=2.0).contains(&t);
                self.temperature = real(name, value, range, "from 0 to 2")?;
            }
            "top_p" => {
                let range = |p| p > 0.0 && p <= 1.0;
                self.top_p = real(name, value, range, "above 0 and up to 1")?;
            }
            "top_k" => {
                let range = |k: f64| k >= -1.0 && k.fract() == 0.0;
                let wanted = "a whole number from -1 (0 and -1: all)";
                // Texts such as "1e2" are real numbers only.
                let value = value.as_whole();
                if matches!(&*value, Json::Text(_)) {
                    return Err(wrong_type(name, wanted, &value));
                }
                self.top_k = real(name, &value, range, wanted)?;
            }
            "min_p" => {
                let range = |p| (0.0..=1.0).contains(&p);
                self.min_p = real(name, value, range, "from 0 to 1")?;
            }
            "repetition_penalty" => {
                real(name, value, |p| p > 0.0 && p.is_finite(), "above 0")?;
            }
            _ => {
                real(name, value, |p| (-2.0..=2.0).contains(&p), "from -2 to 2")?;
            }
        }
        Ok(())
    }

    /// Refuses choices that would be copies of each other, as vLLM does.
    pub(super) fn check_choices(&self, n: u32) -> Result<(), ApiError> {
        if self.temperature == 0.0 && n > 1 {
            return Err(ApiError::invalid(
                "n",
                format!(
                    "`n` is {n}, but with a `temperature` of 0 all choices would be the same; send `n: 1`, or a \
                     higher `temperature`"
                ),
            ));
        }
        Ok(())
    }

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
