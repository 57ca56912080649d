//! `[engine.timing]`: the duration of a pass.

use std::io;
use std::path::{Path, PathBuf};

use crate::cluster::ModelConfig;
use crate::doc::{Origin, Table, choice, path, required, required_path, section, text, value};
use crate::preset::{self, Gpu, ModelShape};

/// `[engine.timing]`: the duration of a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum TimingConfig {
    /// A constant duration, ns.
    Constant {
        /// Duration of a pass, ns.
        step_ns: u64,
    },
    /// `base + per_prefill_token·p + per_prefill_pair·a + per_decode_token·d + per_sequence·s +
    /// per_context_token·c`, ns.
    Linear {
        /// Fixed cost of a pass, ns.
        base_ns: f64,
        /// Per prompt token computed, ns.
        per_prefill_token_ns: f64,
        /// Per (query, key) pair that causal attention scores for prompts, ns.
        per_prefill_pair_ns: f64,
        /// Per sequence that decodes, ns.
        per_decode_token_ns: f64,
        /// Per sequence in the pass, ns.
        per_sequence_ns: f64,
        /// Per token of context attended to by decoding sequences, ns.
        per_context_token_ns: f64,
        /// Time of a request outside of passes: HTTP, tokenizer, hops between processes, ns.
        api_ns: f64,
        /// The same per token of the prompt, ns.
        api_prompt_token_ns: f64,
    },
    /// The model's shape and the GPU's peaks, with overheads, efficiencies and residuals of a profile
    /// of measured deployments.
    Calibrated {
        /// The GPU: a preset (`slipstream presets`), or a table `[gpu.NAME]` of the file.
        gpu: Gpu,
        /// Format of the weights. Default: the checkpoint's.
        dtype: Dtype,
        /// The framework whose overheads apply.
        framework: Framework,
        /// A profile of `slipstream calibrate`; `None`: the built-in one.
        profile: Option<PathBuf>,
    },
    /// From the model's shape and the GPU's peaks alone.
    Roofline {
        /// The GPU: a preset (`slipstream presets`), or a table `[gpu.NAME]` of the file.
        gpu: Gpu,
        /// Format of the weights: `bf16` has 2 bytes, `fp8` 1. Default: the checkpoint's.
        dtype: Dtype,
    },
    /// A CSV grid of measured passes.
    Table {
        /// The file.
        path: PathBuf,
    },
}

impl Default for TimingConfig {
    fn default() -> Self {
        TimingConfig::Calibrated {
            gpu: preset::gpu(&TimingKeys::gpu().default())
                .expect("it is a preset")
                .clone(),
            dtype: TimingKeys::dtype().default(),
            framework: TimingKeys::framework().default(),
            profile: None,
        }
    }
}

/// Serving framework; each has overheads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    TrtLlm,
}

impl Framework {
    /// All of them, in the order of a profile's parameters.
    pub const ALL: [Framework; 3] = [Framework::Vllm, Framework::Sglang, Framework::TrtLlm];

    /// Word in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Framework::Vllm => "vllm",
            Framework::Sglang => "sglang",
            Framework::TrtLlm => "trtllm",
        }
    }

    /// The framework called `name`, in any case, with or without hyphens.
    pub fn named(name: &str) -> Option<Framework> {
        let letters = name.chars().filter(char::is_ascii_alphanumeric);
        let name: String = letters.map(|c| c.to_ascii_lowercase()).collect();
        let name = match &*name {
            "tensorrtllm" | "trt" => "trtllm",
            name => name,
        };
        Framework::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// Number format of weights or KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits, floating point; scales per tensor, channel or block of 128.
    Fp8,
    /// 8 bits, integer.
    Int8,
    /// 4 bits, integer, with a 16-bit scale per group of 64: GPTQ, AWQ, compressed-tensors.
    Int4,
    /// 4 bits, floating point, with an FP8 scale per 16 numbers.
    Nvfp4,
    /// 4 bits, floating point, with an 8-bit exponent per 32 numbers.
    Mxfp4,
}

impl Dtype {
    /// Bytes of one number, its share of the scales included if there is one per group of numbers.
    pub fn bytes(self) -> f64 {
        match self {
            Dtype::Bf16 => 2.0,
            Dtype::Fp8 | Dtype::Int8 => 1.0,
            Dtype::Int4 | Dtype::Mxfp4 => 0.53125,
            Dtype::Nvfp4 => 0.5625,
        }
    }

    /// All of them.
    pub const ALL: [Dtype; 6] = [
        Dtype::Bf16,
        Dtype::Fp8,
        Dtype::Int8,
        Dtype::Int4,
        Dtype::Nvfp4,
        Dtype::Mxfp4,
    ];

    /// Word in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::Fp8 => "fp8",
            Dtype::Int8 => "int8",
            Dtype::Int4 => "int4",
            Dtype::Nvfp4 => "nvfp4",
            Dtype::Mxfp4 => "mxfp4",
        }
    }
}

/// Formats of the roofline.
const ROOFLINE_DTYPES: &[(&str, Dtype)] = &[("bf16", Dtype::Bf16), ("fp8", Dtype::Fp8)];
const DTYPES: &[(&str, Dtype)] = &[
    ("bf16", Dtype::Bf16),
    ("fp8", Dtype::Fp8),
    ("int8", Dtype::Int8),
    ("int4", Dtype::Int4),
    ("nvfp4", Dtype::Nvfp4),
    ("mxfp4", Dtype::Mxfp4),
];
const FRAMEWORKS: &[(&str, Framework)] = &[
    ("vllm", Framework::Vllm),
    ("sglang", Framework::Sglang),
    ("trtllm", Framework::TrtLlm),
];

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Calibrated,
    Constant,
    Linear,
    Roofline,
    Table,
}

const KINDS: &[(&str, Kind)] = &[
    ("calibrated", Kind::Calibrated),
    ("constant", Kind::Constant),
    ("linear", Kind::Linear),
    ("roofline", Kind::Roofline),
    ("table", Kind::Table),
];

/// Keys that each kind uses.
const KEYS: &[(Kind, &[&str])] = &[
    (Kind::Constant, &["step_ns"]),
    (
        Kind::Linear,
        &[
            "base_ns",
            "per_prefill_token_ns",
            "per_prefill_pair_ns",
            "per_decode_token_ns",
            "per_sequence_ns",
            "per_context_token_ns",
            "api_ns",
            "api_prompt_token_ns",
        ],
    ),
    (Kind::Calibrated, &["gpu", "dtype", "framework", "profile"]),
    (Kind::Roofline, &["gpu", "dtype"]),
    (Kind::Table, &["path"]),
];

/// An hour: a longer pass is an error in the unit.
const STEP_NS_MAX: u64 = 3_600_000_000_000;

section! {
    keys TimingKeys of "engine.timing" {
        /// Model of a pass's duration; `docs/step-time.md` has the equations.
        ///
        /// A key that the chosen kind does not use is an error, unless the kind is set in a higher layer (`--set
        /// engine.timing.kind=constant` over a file with a GPU).
        key kind: Kind = choice(KINDS, Kind::Calibrated);
        /// Duration of every pass.
        ///
        /// 0: passes take no time.
        key step_ns: u64 =
            required("set the duration of a pass, such as `step_ns = 10_000_000` for 10 ms", 0).within(0..=STEP_NS_MAX)
            .unit("ns").note("needed for \"constant\"");
        /// Fixed cost of a pass.
        ///
        /// Low: small batches are too fast.
        key base_ns: f64 =
            required("set the duration of an empty pass, such as `base_ns = 5e6` for 5 ms", 0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0; needed for \"linear\"");
        /// Cost per prompt token.
        ///
        /// 0: prefill is free, and prefix reuse gains nothing.
        key per_prefill_token_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0");
        /// Cost per (query, key) pair of causal attention over prompts: n·(n+1)/2 for a prompt of n tokens.
        ///
        /// 0: a long prompt costs no more per token than a short one.
        key per_prefill_pair_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0");
        /// Cost per decoding sequence.
        ///
        /// 0: larger batches cost nothing.
        key per_decode_token_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0");
        /// Cost per sequence in the pass, prefill or decode.
        ///
        /// 0: larger batches cost nothing.
        key per_sequence_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0");
        /// Cost per token of context in decode.
        ///
        /// 0: long contexts decode as fast as short ones.
        key per_context_token_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0");
        /// Time of a request outside of passes: HTTP, tokenizer, hops between processes. Simulated only: a live
        /// server has its own.
        ///
        /// Low: TTFT without load is too short.
        key api_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0; for \"linear\"");
        /// The same per token of the prompt, those found in the cache included: parsing and tokenizing. Simulated
        /// only.
        ///
        /// Low: TTFT of long prompts is too short where their prefixes are cached.
        key api_prompt_token_ns: f64 = value(0.0).within(0.0..=STEP_NS_MAX as f64)
            .with_description("ns, at least 0; for \"linear\"");
        /// The GPU: a preset (`slipstream presets` lists them) or the NAME of a `[gpu.NAME]`. Its memory also sets
        /// the default of `num_gpu_blocks`.
        ///
        /// A PCIe GPU with a high `tensor_parallel_size` spends most of a pass in all-reduces.
        key gpu: String = text("h100-sxm").with_description("string");
        /// Format of the weights. Default: the checkpoint's. `docs/step-time.md` says which parts of a checkpoint
        /// have it. The KV cache has its own (`kv_cache_dtype`).
        ///
        /// "bf16" for a checkpoint of fewer bits is rejected. A format that the GPU has no units for is unpacked to
        /// 16 bits ("calibrated") or rejected ("roofline").
        key dtype: Dtype = choice(DTYPES, Dtype::Bf16).note("for \"roofline\" the first two");
        /// Framework whose overheads per layer, step, sequence and request apply. The scheduler stays vLLM's.
        ///
        /// Another framework's steps differ by a tenth to a third.
        key framework: Framework = choice(FRAMEWORKS, Framework::Vllm);
        /// Profile from `slipstream calibrate`.
        ///
        /// A profile of other hosts or versions: times are off as by the error of its report.
        key profile?: PathBuf = path().with_default_text("the built-in profile");
        /// CSV grid of measured passes; `docs/step-time.md` has the format.
        ///
        /// Beyond its last points the table is extrapolated linearly.
        key path: PathBuf = required_path("set it to a CSV file (see docs/step-time.md)")
            .note("needed for \"table\"");
    }
}

/// Notes keys that another kind of step times uses.
fn refuse_other_keys(t: &Table<'_>, kind: Kind) {
    let word = KINDS
        .iter()
        .find(|(_, k)| *k == kind)
        .map_or("", |(word, _)| word);
    let keys_of = |kind| KEYS.iter().filter(move |(k, _)| *k == kind);
    let own: Vec<&str> = keys_of(kind).flat_map(|(_, keys)| *keys).copied().collect();
    let mut others: Vec<&str> = KEYS.iter().flat_map(|(_, keys)| *keys).copied().collect();
    others.sort_unstable();
    others.dedup();
    for key in others.into_iter().filter(|key| !own.contains(key)) {
        t.unused(key, "kind", &format!("`kind` is \"{word}\""));
    }
}

fn read_calibrated(
    t: &Table<'_>,
    model: &ModelConfig,
    gpus: &[Gpu],
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> TimingConfig {
    let gpu = choose_gpu(t, gpus);
    let dtype = read_formats(t, model);
    let framework = TimingKeys::framework().read(t);
    let profile = TimingKeys::profile().read(t);
    if let Some(path) = &profile
        && let Err(error) = load(path)
    {
        t.error(
            "profile",
            format!("`profile`: {}: {error}", path.display()),
            "set it to a file of `slipstream calibrate --out`, or remove it for the built-in one",
        );
    }
    TimingConfig::Calibrated {
        gpu,
        dtype,
        framework,
        profile,
    }
}

pub(super) fn read_timing(
    t: &Table<'_>,
    model: &ModelConfig,
    gpus: &[Gpu],
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> TimingConfig {
    let shape = &model.shape;
    let kind = TimingKeys::kind().read(t);
    refuse_other_keys(t, kind);
    match kind {
        Kind::Constant => TimingConfig::Constant {
            step_ns: TimingKeys::step_ns().read(t),
        },
        Kind::Linear => TimingConfig::Linear {
            base_ns: TimingKeys::base_ns().read(t),
            per_prefill_token_ns: TimingKeys::per_prefill_token_ns().read(t),
            per_prefill_pair_ns: TimingKeys::per_prefill_pair_ns().read(t),
            per_decode_token_ns: TimingKeys::per_decode_token_ns().read(t),
            per_sequence_ns: TimingKeys::per_sequence_ns().read(t),
            per_context_token_ns: TimingKeys::per_context_token_ns().read(t),
            api_ns: TimingKeys::api_ns().read(t),
            api_prompt_token_ns: TimingKeys::api_prompt_token_ns().read(t),
        },
        Kind::Roofline => {
            if !shape.is_uniform() {
                t.error(
                    "kind",
                    format!(
                        "`kind` is \"roofline\", but {} has layers of several kinds, latent attention or shared \
                         experts, which the roofline cannot express",
                        shape.name
                    ),
                    "take \"table\" or \"linear\"; `slipstream predict` answers deployments of this model",
                );
            }
            let gpu = choose_gpu(t, gpus);
            let dtype = read_weights(t, shape, &gpu);
            TimingConfig::Roofline { gpu, dtype }
        }
        Kind::Calibrated => read_calibrated(t, model, gpus, load),
        Kind::Table => {
            let path = TimingKeys::path().read(t);
            if !path.as_os_str().is_empty()
                && let Err(error) = load(&path)
            {
                t.error(
                    "path",
                    format!("`path`: {}: {error}", path.display()),
                    "paths are relative to the folder of the cluster file",
                );
            }
            TimingConfig::Table { path }
        }
    }
}

/// The GPU of `gpu`: a preset, or one of the file's own.
fn choose_gpu(t: &Table<'_>, gpus: &[Gpu]) -> Gpu {
    let all: Vec<(&str, &Gpu)> = gpus
        .iter()
        .chain(preset::GPUS.iter())
        .map(|gpu| (&*gpu.name, gpu))
        .collect();
    let default = preset::gpu(&TimingKeys::gpu().default()).expect("it is a preset");
    TimingKeys::gpu().choice_field(t, &all).or(default).clone()
}

/// The format of the weights, for a model that takes every format on every GPU: that of a checkpoint that exists.
///
/// A `config.json` is one checkpoint, and engines quantize 16 bits to FP8 as they load it. The name of a preset is a
/// model, of which checkpoints with fewer bits are published; more bits than the model was released in have no use.
fn read_formats(t: &Table<'_>, model: &ModelConfig) -> Dtype {
    let shape = &model.shape;
    let checkpoint = shape.dtype();
    let origin = match checkpoint {
        Dtype::Bf16 => Origin::Default,
        _ => Origin::Derived(format!("checkpoint of {}", shape.name)),
    };
    let dtype = TimingKeys::dtype().field(t).or_from(origin, checkpoint);
    let exists = dtype == checkpoint
        || match (model.config.is_some(), checkpoint) {
            (true, Dtype::Bf16) => dtype == Dtype::Fp8,
            (true, _) => false,
            (false, Dtype::Bf16) => true,
            (false, _) => dtype.bytes() < checkpoint.bytes() && checkpoint == Dtype::Fp8,
        };
    if !exists {
        let hint = match checkpoint {
            Dtype::Bf16 => format!(
                "use the `config.json` of a checkpoint in {}, or \"fp8\", to which engines quantize 16 bits",
                dtype.name()
            ),
            _ => format!(
                "remove it, or use the `config.json` of a checkpoint in {}",
                dtype.name()
            ),
        };
        t.error(
            "dtype",
            format!(
                "`dtype` is \"{}\", but {} has {} weights",
                dtype.name(),
                shape.name,
                checkpoint.name()
            ),
            hint,
        );
    }
    dtype
}

/// The format of the weights: the checkpoint's, or FP8 quantized from 16 bits at load time.
fn read_weights(t: &Table<'_>, shape: &ModelShape, gpu: &Gpu) -> Dtype {
    let origin = match shape.weights {
        Dtype::Bf16 => Origin::Default,
        _ => Origin::Derived(format!("`quantization_config` of {}", shape.name)),
    };
    let dtype = TimingKeys::dtype()
        .choice_field(t, ROOFLINE_DTYPES)
        .or_from(origin, shape.weights);
    if shape.weights == Dtype::Fp8 && dtype == Dtype::Bf16 {
        t.error(
            "dtype",
            format!(
                "`dtype` is \"bf16\", but {} has FP8 weights (`quantization_config`)",
                shape.name
            ),
            "remove it, or use the `config.json` of the checkpoint in 16 bits",
        );
    }
    let name = &gpu.name;
    if dtype == Dtype::Fp8 && gpu.fp8_flops.is_none() {
        let (message, hint) = if shape.weights == Dtype::Fp8 {
            (
                format!(
                    "{} has FP8 weights, but {name} has no FP8 units, and FP8 weights with \
                     16-bit arithmetic are not modelled",
                    shape.name
                ),
                "use another `gpu`, or the `config.json` of the checkpoint in 16 bits",
            )
        } else {
            (
                format!("`dtype` is \"fp8\", but {name} has no FP8 units"),
                "use \"bf16\", or another `gpu`",
            )
        };
        t.error("dtype", message, hint);
    }
    dtype
}
