//! What tables call GPUs and number formats.

use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{self, Gpu, ModelShape};

use crate::deployment::Refusal;

/// Letters and digits, in lower case.
pub(crate) fn plain(text: &str) -> String {
    text.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

/// Other names of GPU presets, letters and digits in lower case.
pub(crate) const GPU_ALIASES: &[(&str, &str)] = &[
    ("a100sxm480gb", "a100-sxm-80gb"),
    ("a100sxm440gb", "a100-sxm-40gb"),
    ("h100sxm5", "h100-sxm"),
    ("h100sxm80gb", "h100-sxm"),
    ("h10080gbhbm3", "h100-sxm"),
    ("h200", "h200-sxm"),
    ("h200sxm5", "h200-sxm"),
    ("h200141gb", "h200-sxm"),
    ("h20sxm", "h20"),
    ("b200", "b200-sxm"),
    ("b300", "b300-sxm"),
    ("gb200sxm", "gb200"),
    ("gb200nvl72", "gb200"),
    ("gb300sxm", "gb300"),
    ("gb300nvl72", "gb300"),
    ("4090", "rtx-4090"),
    ("5090", "rtx-5090"),
    ("rtxpro6000server", "rtx-pro-6000"),
    ("rtxpro6000blackwell", "rtx-pro-6000"),
    ("rtxpro6000blackwellserveredition", "rtx-pro-6000"),
];

/// `name` as it is compared: without a vendor.
fn wanted_gpu(name: &str) -> String {
    let wanted = plain(name);
    let short = ["nvidia", "amd"]
        .iter()
        .find_map(|vendor| wanted.strip_prefix(vendor));
    short.map(str::to_owned).unwrap_or(wanted)
}

/// The preset that a system's name means: `h200_sxm`, `H200-SXM`, `NVIDIA H200`. Only whole names
/// and listed aliases count: a prefix such as `b20` fits several GPUs.
pub(crate) fn find_gpu(name: &str) -> Option<&'static Gpu> {
    let wanted = wanted_gpu(name);
    if let Some(gpu) = preset::GPUS.iter().find(|gpu| plain(&gpu.name) == wanted) {
        return Some(gpu);
    }
    let alias = GPU_ALIASES.iter().find(|(alias, _)| *alias == wanted);
    preset::gpu(alias?.1)
}

/// Reason to refuse `name`, with presets of similar names.
pub(crate) fn unknown_gpu(name: &str) -> Refusal {
    let wanted = wanted_gpu(name);
    let shared = |gpu: &Gpu| {
        let pairs = wanted.bytes().zip(plain(&gpu.name).into_bytes());
        pairs.take_while(|(a, b)| a == b).count()
    };
    let longest = preset::GPUS.iter().map(shared).max().unwrap_or(0);
    let near: Vec<&str> = preset::GPUS
        .iter()
        .filter(|gpu| longest > 0 && shared(gpu) == longest)
        .map(|gpu| &*gpu.name)
        .take(4)
        .collect();
    let name: String = name.chars().take(40).collect();
    Refusal::Gpu(if near.is_empty() {
        format!("{name}; `slipstream presets` lists those known")
    } else {
        format!("{name}; similar: {}", near.join(", "))
    })
}

/// The word for deployments whose weights have `format`.
pub fn precision_word(format: Dtype) -> &'static str {
    match format {
        Dtype::Bf16 => "bf16",
        Dtype::Fp8 => "fp8",
        Dtype::Int8 => "int8",
        Dtype::Int4 => "int4",
        Dtype::Nvfp4 | Dtype::Mxfp4 => "fp4",
    }
}

pub(crate) fn precision_of(word: &str) -> Option<(Dtype, &'static str)> {
    let word = word.to_ascii_lowercase();
    Some(match word.as_str() {
        "bf16" | "fp16" | "float16" | "bfloat16" | "half" | "auto" => (Dtype::Bf16, "bf16"),
        "fp8" | "fp8_block" | "fp8_static" | "fp8_ootb" | "w8a8_fp8" | "mxfp8" => {
            (Dtype::Fp8, "fp8")
        }
        "fp4" | "nvfp4" => (Dtype::Nvfp4, "fp4"),
        "mxfp4" | "w4a16_mxfp4" | "w4a8_mxfp4_mxfp8" => (Dtype::Mxfp4, "fp4"),
        "int4" | "int4_wo" | "w4a16" | "awq" | "gptq" | "w4afp8" => (Dtype::Int4, "int4"),
        "int8" | "int8_wo" | "w8a8" | "sq" => (Dtype::Int8, "int8"),
        _ => return None,
    })
}

/// Format of the weights of repository `name`, from the words of its name or else from `shape`, and its origin.
///
/// A repository without a format in its name has the one of its `config.json`: FP8 for DeepSeek-R1.
pub(crate) fn checkpoint_format(
    name: &str,
    shape: &ModelShape,
    loaded: bool,
) -> Result<(Dtype, &'static str), Refusal> {
    // Widths first: GPTQ and AWQ are methods, usually of 4 bits.
    const WORDS: &[(&str, Option<Dtype>)] = &[
        ("bnb", None),
        ("gguf", None),
        ("exl2", None),
        ("hqq", None),
        ("aqlm", None),
        ("w8a8fp8", Some(Dtype::Fp8)),
        ("fp8", Some(Dtype::Fp8)),
        ("mxfp8", Some(Dtype::Fp8)),
        ("nvfp4", Some(Dtype::Nvfp4)),
        ("mxfp4", Some(Dtype::Mxfp4)),
        ("fp4", Some(Dtype::Nvfp4)),
        ("int8", Some(Dtype::Int8)),
        ("w8a8", Some(Dtype::Int8)),
        ("w8a16", Some(Dtype::Int8)),
        ("8bit", Some(Dtype::Int8)),
        ("int4", Some(Dtype::Int4)),
        ("w4a16", Some(Dtype::Int4)),
        ("w4afp8", Some(Dtype::Int4)),
        ("4bit", Some(Dtype::Int4)),
        ("awq", Some(Dtype::Int4)),
        ("gptq", Some(Dtype::Int4)),
        ("bf16", Some(Dtype::Bf16)),
        ("fp16", Some(Dtype::Bf16)),
    ];
    let lower = name.to_ascii_lowercase();
    let repository = lower.rsplit('/').next().unwrap_or(&lower);
    let words: Vec<&str> = repository
        .split(|c: char| !c.is_ascii_alphanumeric())
        .collect();
    let named = WORDS.iter().find(|(word, _)| words.contains(word));
    match named {
        // A config.json states its formats itself.
        _ if loaded => {}
        Some((word, None)) => {
            let name: String = name.chars().take(80).collect();
            return Err(Refusal::Precision(format!(
                "`{word}` in {name}; state `precision`: bf16, fp8, fp4, int4 or int8"
            )));
        }
        Some((_, Some(format))) => return Ok((*format, " (from the model's name)")),
        None => {}
    }
    let format = shape
        .experts
        .map_or(shape.weights, |experts| experts.weights);
    let origin = match format {
        Dtype::Bf16 => "",
        _ => " (as published)",
    };
    Ok((format, origin))
}

/// The format of the KV cache that `word` names. `auto`, vLLM's default, is the model's 16 bits.
pub(crate) fn kv_cache_of(word: &str) -> Result<Dtype, Refusal> {
    match word.to_ascii_lowercase().as_str() {
        "auto" | "bf16" | "bfloat16" | "fp16" | "float16" => Ok(Dtype::Bf16),
        "fp8" | "fp8_e4m3" | "fp8_e5m2" => Ok(Dtype::Fp8),
        _ => Err(Refusal::Invalid {
            column: "kv_cache_dtype",
            found: word.chars().take(40).collect(),
            must: "`auto`, `bf16` or `fp8`".to_owned(),
        }),
    }
}
