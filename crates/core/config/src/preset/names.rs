//! Presets by the names of their repositories.

use super::model::ModelShape;
use super::models::{model, model_of_same_sizes, model_of_source};
use crate::cluster::Dtype;

/// Parts of a repository's name that indicate the format of its weights.
const FORMATS: &[(&str, Dtype)] = &[
    ("fp8", Dtype::Fp8),
    ("nvfp4", Dtype::Nvfp4),
    ("fp4", Dtype::Nvfp4),
    ("mxfp4", Dtype::Mxfp4),
    ("int4", Dtype::Int4),
    ("awq", Dtype::Int4),
    ("gptq", Dtype::Int4),
    ("w4a16", Dtype::Int4),
    ("int8", Dtype::Int8),
    ("w8a8", Dtype::Int8),
];

/// Finds a preset by its name, by repository, or by the repository without owner, format and
/// tuning. A format in a repository's name applies to the weights.
pub fn find_model(name: &str) -> Option<ModelShape> {
    if let Some(shape) = model(name) {
        return Some(shape.clone());
    }
    let mut shape = find(name)?.clone();
    let lower = name.to_ascii_lowercase();
    let mut words = lower.split(['/', '-', '_', '.']);
    let format = words.find_map(|word| FORMATS.iter().find(|(format, _)| *format == word));
    if let Some((_, format)) = format {
        shape.weights = *format;
        if let Some(experts) = &mut shape.experts {
            experts.weights = *format;
        }
    }
    Some(shape)
}

fn find(name: &str) -> Option<&'static ModelShape> {
    const WORDS: &[&str] = &[
        "instruct",
        "chat",
        "it",
        "hf",
        "base",
        "fp8",
        "fp4",
        "nvfp4",
        "mxfp4",
        "bf16",
        "int4",
        "int8",
        "awq",
        "gptq",
        "w4a16",
        "w8a8",
        "dynamic",
        "kv",
        "quantized",
        "block",
        "meta",
        "2507",
        "0905",
        "thinking",
        "2512",
        "v2",
        "eagle",
        "tput",
        "fp",
    ];
    let base = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
    let base = base.replace("meta-llama-", "llama-").replace('_', "-");
    let kept: Vec<&str> = base
        .split('-')
        .filter(|word| !WORDS.contains(word))
        .collect();
    let short = kept.join("-");
    let named = model(&short).or_else(|| model_of_same_sizes(&short));
    named.or_else(|| {
        model_of_source(|source| {
            let source = source.rsplit('/').next().unwrap_or(source);
            let source = source.to_ascii_lowercase();
            let words: Vec<&str> = source.split('-').filter(|w| !WORDS.contains(w)).collect();
            words == kept
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_names_a_preset_and_its_format() {
        let found = |name: &str| find_model(name).map(|m| (m.name.into_owned(), m.weights));
        let is = |name: &str, weights| Some((name.to_owned(), weights));
        assert_eq!(
            found("meta-llama/Llama-3.1-8B"),
            is("llama-3.1-8b", Dtype::Bf16)
        );
        assert_eq!(
            found("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"),
            is("qwen3-235b-a22b", Dtype::Fp8)
        );
        assert_eq!(
            found("nvidia/DeepSeek-V3.1-NVFP4"),
            is("deepseek-v3.1", Dtype::Nvfp4)
        );
        assert_eq!(
            found("deepseek-ai/DeepSeek-V3"),
            is("deepseek-v3", Dtype::Fp8)
        );
        assert_eq!(found("acme/unheard-of-7b"), None);
    }
}
