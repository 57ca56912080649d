//! `[engine.encoder]`: the encoder of a multimodal model.

use super::TimingConfig;
use crate::doc::{Key, NoDefault, Origin, Table, optional, section, value};

/// The encoder of a multimodal model, on the GPUs of its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Tokens of output that a pass may compute.
    pub budget_tokens: u32,
    /// Tokens of output that are kept.
    pub cache_tokens: u32,
    /// An input is not divided between passes.
    pub whole_inputs: bool,
    /// Time of each input, ns.
    pub input_ns: f64,
    /// Time of each token of output, ns.
    pub token_ns: f64,
}

section! {
    keys EncoderKeys of "engine.encoder" {
        /// Model the encoder of images, which runs on the engine's GPUs within the steps that need its outputs
        /// (`docs/engine-model.md`). For simulation only; `images_per_request` of workload files makes images.
        ///
        /// false: an image takes the time of its tokens alone.
        key enabled: bool = value(false);
        /// Time of the encoder per token that an image takes in the prompt.
        ///
        /// High: every request in a step waits for the images of one.
        key token_us?: f64 = optional().within(0.0..=1e6)
            .unit("µs").note("needed unless `parameters` is set").with_default_text("from `parameters`");
        /// Parameters of the encoder, such as 0.675e9. Each is two operations per patch, divided by `flops_share` of
        /// the GPU's BF16 peak and by `tensor_parallel_size`. Attention between patches is left out.
        ///
        /// Large images take longer than that: measure `token_us`.
        key parameters?: f64 = optional().within(1e3..=1e13).with_description("1,000 to 1e13");
        /// Patches of an image per token in the prompt: 4 if 2 x 2 are merged.
        ///
        /// As `parameters`.
        key patches_per_token: f64 = value(4.0).within(1.0..=1_024.0);
        /// Share of the GPU's peak that the encoder reaches. The default is an assumption, not a measurement.
        ///
        /// As `parameters`.
        key flops_share: f64 = value(0.5).within(0.01..=1.0).unit("share");
        /// Time of each image besides its tokens.
        ///
        /// High: small images cost as much as large ones.
        key input_us: f64 = value(0.0).within(0.0..=1e9).unit("µs");
        /// Tokens of images that a step may encode. A larger image is refused.
        ///
        /// Low: prompts wait before their images. High: a step with many images delays all decodes.
        key max_num_encoder_input_tokens?: u32 = optional().within(1..=1 << 24)
            .unit("tokens").with_default_text("`max_num_batched_tokens`");
        /// Tokens of encoded images that are kept for prompts that need them, now or later. A larger image is
        /// refused.
        ///
        /// Low: prompts wait before their images, and images that come again are encoded again.
        key encoder_cache_size?: u32 = optional().within(1..=1 << 24)
            .unit("tokens").with_default_text("`max_num_batched_tokens`");
        /// Do not divide the tokens of an image between two steps, if they fit one.
        ///
        /// true: steps before images are left short.
        key disable_chunked_mm_input: bool = value(false);
    }
}

/// `others`: keys of `[engine]` that an encoder does not go with, and whether they are set.
pub(super) fn read_encoder(
    t: &Table<'_>,
    timing: &TimingConfig,
    tensor: u32,
    budget: u32,
    others: &[(&str, bool)],
) -> Option<EncoderConfig> {
    if !EncoderKeys::enabled().read(t) {
        for key in EncoderKeys::NAMES.iter().filter(|key| **key != "enabled") {
            t.unused(key, "enabled", "`enabled` is false");
        }
        return None;
    }
    if let Some((other, _)) = others.iter().find(|(_, is_set)| *is_set) {
        t.error(
            "enabled",
            format!("an encoder with `engine.{other}` is not modelled"),
            format!("set it to false, or remove `engine.{other}`"),
        );
    }
    let of_tokens = || Origin::Derived("max_num_batched_tokens".into());
    let tokens = |key: Key<u32, NoDefault>| key.field(t).or_from(of_tokens(), budget);
    Some(EncoderConfig {
        budget_tokens: tokens(EncoderKeys::max_num_encoder_input_tokens()),
        cache_tokens: tokens(EncoderKeys::encoder_cache_size()),
        whole_inputs: EncoderKeys::disable_chunked_mm_input().read(t),
        input_ns: EncoderKeys::input_us().read(t) * 1e3,
        token_ns: read_encoder_token_us(t, timing, tensor) * 1e3,
    })
}

/// Time of a token of the encoder's output, µs: as stated, or from the parameters of a vision transformer.
fn read_encoder_token_us(t: &Table<'_>, timing: &TimingConfig, tensor: u32) -> f64 {
    let token_us = EncoderKeys::token_us().field(t);
    let parameters: Option<f64> = EncoderKeys::parameters().read(t);
    let Some(parameters) = parameters else {
        for key in ["patches_per_token", "flops_share"] {
            t.unused(key, "parameters", "`parameters` is not set");
        }
        return token_us.required(
            "set the time per token that an image takes in the prompt, or `parameters` of the encoder",
            0.0,
        );
    };
    let patches: f64 = EncoderKeys::patches_per_token().read(t);
    let share: f64 = EncoderKeys::flops_share().read(t);
    let (TimingConfig::Roofline { gpu, .. } | TimingConfig::Calibrated { gpu, .. }) = timing else {
        t.error(
            "parameters",
            "`parameters` gives a time by the arithmetic of a GPU, and `engine.timing` has none",
            "set `token_us` instead",
        );
        return 0.0;
    };
    // Each parameter is a multiplication and an addition per patch. Tensor-parallel GPUs divide the weights.
    let flops = 2.0 * parameters * patches;
    let us = flops / (gpu.bf16_flops * share * f64::from(tensor)) * 1e6;
    token_us.or_from(Origin::Derived(format!("`parameters` on {}", gpu.name)), us)
}
