//! Reads the number formats of a checkpoint, from `quantization_config` in its `config.json` or from a separate file.
//!
//! Supported: FP8 weights with FP8 activations, INT4 weights with 16-bit activations, NVFP4, MXFP4,
//! and FP8 KV caches. Other formats are refused by name, as their bytes or their peak differ.

use serde_json::Value;

use super::error::ShapeError;
use super::fields::{Fields, Log, Object, integer, is_nothing, shown};
use super::files::ModelFiles;
use super::index::is_encoder;
use super::kept::{Found, Kept, Names, Parts};
use super::python_json;
use crate::cluster::Dtype;

/// The default formats in which vLLM would run a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats {
    /// Matrices of attention and MLPs.
    pub(super) weights: Dtype,
    /// Dense MLPs and shared experts next to quantized experts.
    pub(super) mlps: Option<Dtype>,
    /// Routed experts.
    pub(super) experts: Dtype,
    /// Keys and values.
    pub(super) kv_cache: Dtype,
    /// Number of weights that share a scale in INT4; 0: another format, or a scale per channel.
    pub(super) group: u32,
}

const PLAIN: Formats = Formats {
    weights: Dtype::Bf16,
    mlps: None,
    experts: Dtype::Bf16,
    kv_cache: Dtype::Bf16,
    group: 0,
};

const FIELD: &str = "quantization_config";
const MODELOPT_FILE: &str = "hf_quant_config.json";
const GPTQ_FILE: &str = "quantize_config.json";
const AWQ_FILE: &str = "quant_config.json";

/// Reads the formats of `files` from `config`, from `outer`, the object that contains it, or from a file next to it. `parts`
/// are those of the served model.
///
/// Source: vLLM 0.33, `vllm/model_executor/layers/quantization` (`fp8.py`, `fbgemm_fp8.py`,
/// `modelopt.py`, `compressed_tensors`), `get_config` in `vllm/transformers_utils/config.py` (separate files), and
/// `get_kv_cache_quant_algo_string` in `vllm/utils/torch_utils.py`.
pub(super) fn read(
    files: &ModelFiles,
    outer: Fields<'_>,
    config: Fields<'_>,
    parts: Parts,
) -> Result<Formats, ShapeError> {
    let mut found = None;
    for object in [config, outer] {
        // llm-compressor used the second name at first.
        for key in [FIELD, "compression_config"] {
            if let Some(value) = object.get(key) {
                if found.is_some_and(|found| found != value) {
                    return Err(unsupported("two objects of different values in one file"));
                }
                found = Some(value);
            }
        }
    }
    let beside;
    let (object, file) = match found {
        Some(value) => (
            value
                .as_object()
                .ok_or_else(|| unsupported("a value that is not a JSON object"))?,
            FIELD,
        ),
        None => match (&files.hf_quant_config, &files.quantize_config) {
            (Some(text), _) => {
                beside = parsed(text, MODELOPT_FILE)?;
                (&beside, MODELOPT_FILE)
            }
            (None, Some((name, text))) => {
                let name = if *name == AWQ_FILE {
                    AWQ_FILE
                } else {
                    GPTQ_FILE
                };
                beside = parsed(text, name)?;
                (&beside, name)
            }
            (None, None) => return Ok(PLAIN),
        },
    };
    let log = Log::default();
    let name = |error| match error {
        ShapeError::Unsupported { what, .. } => ShapeError::Unsupported {
            field: file.into(),
            what,
        },
        other => other,
    };
    let prefix = format!("{file}: ");
    let quantization = Fields::new(object, &prefix, &log);
    let formats = of_object(quantization, file, parts).map_err(name)?;
    close(object, &log, &prefix, file)?;
    Ok(formats)
}

fn parsed(text: &[u8], file: &'static str) -> Result<Object, ShapeError> {
    match python_json::parse(text) {
        Ok(Value::Object(object)) => Ok(object),
        _ => Err(ShapeError::Beside(file)),
    }
}

/// Keys of formats that affect no size, or that follow from the formats read here.
const IMMATERIAL: &[&str] = &[
    // GPTQ and AWQ
    "desc_act",
    "sym",
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "model_name_or_path",
    "model_file_base_name",
    "checkpoint_format",
    "meta",
    "quantizer",
    "pack_dtype",
    "dataset",
    "tokenizer",
    "block_name_to_quantize",
    "cache_block_outputs",
    "exllama_config",
    "use_exllama",
    "max_input_length",
    "module_name_preceding_first_block",
    "pad_token_id",
    "use_cuda_fp16",
    "batch_size",
    "model_seqlen",
    "zero_point",
    "backend",
    "version",
    "fuse_max_seq_len",
    "do_fuse",
    "modules_to_fuse",
    "is_marlin_format",
    "quant_type",
    "autoround_version",
    "iters",
    "lr",
    "minmax_lr",
    "nsamples",
    "seqlen",
    "low_gpu_mem_usage",
    "packing_format",
    "enable_minmax_tuning",
    "enable_quanted_input",
    "gradient_accumulate_steps",
    "enable_norm_bias_tuning",
    "offload_to_disk",
    "gptaq",
    "mse",
    "act_group_aware",
    "hyb_act",
    // FP8
    "fmt",
    "scale_fmt",
    "activation_scale_ub",
    "is_checkpoint_fp8_serialized",
    "dequantize",
    "scale_dtype",
    // compressed-tensors
    "global_compression_ratio",
    "quantization_status",
    "quant_library",
    // ModelOpt
    "producer",
    "has_zero_point",
    "pre_quant_scale",
];

/// Values of `format` whose bytes follow from `config_groups`, which `marlin-24` (2:4 sparsity) is not.
const PACKINGS: &[&str] = &[
    "dense",
    "naive-quantized",
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
];

/// Refuses unread keys: every key of this object is about formats.
fn close(object: &Object, log: &Log, prefix: &str, file: &str) -> Result<(), ShapeError> {
    for (key, value) in object {
        let known = key == "quantization"
            || IMMATERIAL.contains(&&**key)
            || log.has(&format!("{prefix}{key}"));
        if !known && !is_nothing(value) {
            return Err(ShapeError::Unsupported {
                field: file.to_owned().into(),
                what: format!("`{}` = {}", super::fields::cleaned(key), shown(value)).into(),
            });
        }
    }
    Ok(())
}

/// Returns the method of a file that does not name it.
fn method_of<'a>(quantization: Fields<'a>, file: &str) -> Result<&'a str, ShapeError> {
    let named = quantization.text("quant_method")?;
    Ok(match (named, file) {
        (Some(named), _) => named,
        (None, MODELOPT_FILE) => "modelopt",
        (None, GPTQ_FILE | AWQ_FILE) if quantization.has("w_bit") => "awq",
        (None, GPTQ_FILE | AWQ_FILE) => "gptq",
        (None, _) => "(no `quant_method`)",
    })
}

/// Format of the quantized matrices, and what it comes with.
struct Method {
    weights: Dtype,
    kv_cache: Dtype,
    /// Weights that share a scale in INT4.
    group: u32,
    /// Only routed experts are quantized.
    only_experts: bool,
    /// How it names modules that stay in 16 bits.
    names: Names,
}

impl Method {
    fn new(weights: Dtype, kv_cache: Dtype, names: Names) -> Method {
        Method {
            weights,
            kv_cache,
            group: 0,
            only_experts: false,
            names,
        }
    }
}

fn of_object(quantization: Fields<'_>, file: &str, parts: Parts) -> Result<Formats, ShapeError> {
    let mixture = parts.experts.is_some();
    let method = method_of(quantization, file)?;
    // ModelOpt nests its settings in some files.
    let log = Log::default();
    let nested = quantization.object("quantization")?;
    let inner = nested.map_or(quantization, |object| {
        Fields::new(object, "quantization.", &log)
    });
    let found = match method {
        "mxfp4" if mixture => return gpt_oss(quantization),
        "awq" | "gptq" | "awq_marlin" | "gptq_marlin" | "auto-round" => {
            int4(quantization, method, parts)?
        }
        "fp8" | "fbgemm_fp8" => fp8(quantization, method)?,
        "compressed-tensors" => compressed_tensors(quantization, parts)?,
        "modelopt" | "modelopt_fp4" => modelopt(quantization, inner, parts)?,
        other => return Err(unsupported(&format!("the format `{other}`"))),
    };
    if found.only_experts && !(found.weights == Dtype::Int4 && mixture) {
        return Err(unsupported(
            "`compressed-tensors` whose `targets` are experts alone",
        ));
    }
    let kept = kept_modules([quantization, inner], found.names, parts)?;
    let [attention, mlps] = match &kept {
        _ if found.only_experts => [true, true],
        Some(kept) if mixture => kept.whole().map_err(|which| {
            unsupported(&format!("a file whose kept modules are those of {which}"))
        })?,
        _ => [false, false],
    };
    let format = |kept: bool| if kept { Dtype::Bf16 } else { found.weights };
    if let Some(object) = nested {
        close(object, &log, "quantization.", file)?;
    }
    Ok(Formats {
        weights: format(attention),
        mlps: mixture.then(|| format(mlps)),
        experts: found.weights,
        kv_cache: found.kv_cache,
        group: found.group,
    })
}

/// MXFP4 of gpt-oss: only routed experts.
fn gpt_oss(quantization: Fields<'_>) -> Result<Formats, ShapeError> {
    for key in KEPT {
        let names = quantization.list(key)?.unwrap_or_default();
        let mut names = names.iter().filter_map(Value::as_str);
        if let Some(name) = names.find(|name| name.contains("experts")) {
            return Err(unsupported(&format!(
                "experts kept in 16 bits (`{key}`: {name})"
            )));
        }
    }
    Ok(Formats {
        experts: Dtype::Mxfp4,
        ..PLAIN
    })
}

/// GPTQ, AWQ and `AutoRound`.
fn int4(quantization: Fields<'_>, method: &str, parts: Parts) -> Result<Method, ShapeError> {
    let bits = quantization.get("bits").or(quantization.get("w_bit"));
    let bits = bits.map_or("?".into(), Value::to_string);
    if let Some(kind) = quantization
        .text("data_type")?
        .filter(|kind| *kind != "int")
    {
        return Err(unsupported(&format!("`{method}` with `data_type` {kind}")));
    }
    if bits != "4" {
        return Err(unsupported(&format!("`{method}` of {bits} bits")));
    }
    for key in ["checkpoint_format", "format", "backend"] {
        let sparse = quantization
            .get(key)
            .and_then(Value::as_str)
            .filter(|name| name.contains("24"));
        if let Some(sparse) = sparse {
            return Err(unsupported(&format!("`{key}` {sparse}, of 2:4 sparsity")));
        }
    }
    if quantization.set("lm_head") {
        return Err(unsupported("a quantized `lm_head`"));
    }
    check_dynamic(quantization, parts)?;
    Ok(Method {
        group: group_of(quantization, &["group_size", "q_group_size"])?,
        ..Method::new(Dtype::Int4, Dtype::Bf16, Names::Part)
    })
}

/// FP8 with dynamic scales: the cache stays in 16 bits unless `kv_cache_dtype` is set.
fn fp8(quantization: Fields<'_>, method: &str) -> Result<Method, ShapeError> {
    let scheme = quantization.text("activation_scheme")?;
    if let Some(scheme) = scheme.filter(|scheme| !["dynamic", "static"].contains(scheme)) {
        return Err(unsupported(&format!(
            "`{method}` with `activation_scheme` {scheme}"
        )));
    }
    let block = quantization.list("weight_block_size")?.unwrap_or_default();
    let sizes: Vec<u64> = block.iter().filter_map(integer).collect();
    if sizes.len() != block.len() || !block.is_empty() && sizes.iter().product::<u64>() < 1024 {
        return Err(unsupported(&format!(
            "`{method}` in blocks of {}",
            Value::from(block.to_vec())
        )));
    }
    let kv_cache = kv_format(quantization.get("kv_cache_scheme"))?;
    Ok(Method::new(Dtype::Fp8, kv_cache, Names::Exact))
}

fn compressed_tensors(quantization: Fields<'_>, parts: Parts) -> Result<Method, ShapeError> {
    if let Some(scheme) = quantization
        .get("sparsity_config")
        .filter(|scheme| !is_nothing(scheme))
    {
        let dense = scheme.get("format").and_then(Value::as_str) == Some("dense");
        if !dense {
            return Err(unsupported("`sparsity_config`"));
        }
    }
    // Rotations that are folded into the weights.
    if quantization.set("transform_config") {
        return Err(unsupported("`transform_config`"));
    }
    let format = quantization.text("format")?;
    if let Some(format) = format.filter(|format| !PACKINGS.contains(format)) {
        return Err(unsupported(&format!("`format` {format}")));
    }
    let (weights, only_experts, group) = check_groups(quantization, parts)?;
    let kv_cache = kv_format(quantization.get("kv_cache_scheme"))?;
    Ok(Method {
        group,
        only_experts,
        ..Method::new(weights, kv_cache, Names::Exact)
    })
}

/// ModelOpt, whose settings are in `inner`.
fn modelopt(
    quantization: Fields<'_>,
    inner: Fields<'_>,
    parts: Parts,
) -> Result<Method, ShapeError> {
    let weights = match inner.text("quant_algo")? {
        Some(algorithm) if algorithm.eq_ignore_ascii_case("fp8") => Dtype::Fp8,
        Some(algorithm) if algorithm.eq_ignore_ascii_case("nvfp4") => Dtype::Nvfp4,
        algorithm => {
            let algorithm = algorithm.unwrap_or("an unnamed format");
            return Err(unsupported(&format!("`modelopt` with {algorithm}")));
        }
    };
    let size = inner.count("group_size")?.unwrap_or(16);
    if weights == Dtype::Nvfp4 && size != 16 {
        return Err(unsupported(&format!("NVFP4 in groups of {size}")));
    }
    if inner.set("quantized_layers") {
        return Err(unsupported("formats by layer (`quantized_layers`)"));
    }
    if quantization.set("config_groups") {
        let (of_groups, only, _) = check_groups(quantization, parts)?;
        if of_groups != weights || only {
            return Err(unsupported(
                "`config_groups` of another format than `quant_algo`",
            ));
        }
    }
    let mut cache = Dtype::Bf16;
    for key in ["kv_cache_scheme", "kv_cache_quant_algo"] {
        if let Some(scheme) = inner.get(key) {
            cache = kv_format(Some(scheme))?;
        }
    }
    Ok(Method::new(weights, cache, Names::Glob))
}

/// The modules that `objects` keep in 16 bits. Refuses those that the shape cannot express.
fn kept_modules(
    objects: [Fields<'_>; 2],
    names: Names,
    parts: Parts,
) -> Result<Option<Kept>, ShapeError> {
    let mixture = parts.experts.is_some();
    let mut kept = Kept::new(parts);
    for key in KEPT {
        for object in objects {
            for name in object.list(key)?.unwrap_or_default() {
                let Some(name) = name.as_str() else {
                    return Err(unsupported(&format!("`{key}` with {}", shown(name))));
                };
                let found = kept
                    .as_mut()
                    .map_or(Found::Unread, |kept| kept.keep(name, names));
                let known = match found {
                    Found::Modules | Found::Absent => mixture,
                    Found::Others => false,
                    Found::Nothing => !is_projection(name, parts.layers),
                    Found::Unread => !is_negated(name) && !is_projection(name, parts.layers),
                };
                if !known {
                    let what = format!("a projection kept in 16 bits (`{key}`: {name})");
                    return Err(unsupported(&what));
                }
            }
        }
    }
    Ok(kept)
}

/// Keys that name modules kept in 16 bits.
const KEPT: [&str; 6] = [
    "modules_to_not_convert",
    "ignored_layers",
    "ignore",
    "exclude_modules",
    "modules_to_not_quantize",
    "extra_ignored",
];

/// Weights that share a scale, under one of `keys`; 0: a scale per channel (-1).
fn group_of(object: Fields<'_>, keys: &[&str]) -> Result<u32, ShapeError> {
    let Some(value) = keys.iter().find_map(|key| object.get(key)) else {
        return Err(unsupported(&format!("INT4 without `{}`", keys[0])));
    };
    if value.as_i64() == Some(-1) {
        return Ok(0);
    }
    match integer(value).and_then(|n| u32::try_from(n).ok()) {
        Some(size) if size >= 16 && size.is_power_of_two() => Ok(size),
        _ => Err(unsupported(&format!("INT4 in groups of {}", shown(value)))),
    }
}

/// The common format of all groups of a compressed-tensors file: FP8 weights and activations, INT4
/// weights with 16-bit activations, or FP4 weights and activations in groups of 16. Also whether the
/// targets are only routed experts, and the weights that share a scale in INT4.
fn check_groups(quantization: Fields<'_>, parts: Parts) -> Result<(Dtype, bool, u32), ShapeError> {
    let groups = quantization.object("config_groups")?;
    let groups = groups.filter(|groups| !groups.is_empty());
    let Some(groups) = groups else {
        return Err(unsupported("`compressed-tensors` without `config_groups`"));
    };
    let mut found = None;
    let mut only_experts = true;
    let mut size = 0;
    for group in groups.values() {
        only_experts &= has_only_experts(group, parts)?;
        let part = |part| group.get(part).filter(|value: &&Value| !value.is_null());
        let (weights, activations) = (part("weights"), part("input_activations"));
        let of_group = group.get("format").and_then(Value::as_str);
        if let Some(format) = of_group.filter(|format| !PACKINGS.contains(format)) {
            return Err(unsupported(&format!("`format` {format}")));
        }
        let format = format_of(weights, activations)?;
        if found.is_some_and(|found| found != format) {
            return Err(unsupported(
                "`compressed-tensors` with groups of several formats",
            ));
        }
        found = Some(format);
        let log = Log::default();
        if let Some(weights) = weights
            .and_then(Value::as_object)
            .filter(|_| format == Dtype::Int4)
        {
            let weights = Fields::new(weights, "weights.", &log);
            size = match weights.text("strategy")? {
                Some("channel" | "tensor") => 0,
                _ => group_of(weights, &["group_size"])?,
            };
        }
        if part("output_activations").is_some() {
            return Err(unsupported(
                "`compressed-tensors` with `output_activations`",
            ));
        }
    }
    Ok((
        found.expect("at least one group was checked"),
        only_experts,
        size,
    ))
}

/// Whether all targets of a group are routed experts. Refuses those that are some layers alone.
fn has_only_experts(group: &Value, parts: Parts) -> Result<bool, ShapeError> {
    let mut only = true;
    let targets = group.get("targets").and_then(Value::as_array);
    for target in targets.into_iter().flatten() {
        let name = target.as_str().unwrap_or("?");
        let after = name.split("experts").nth(1);
        let some = after.is_some_and(|after| after.contains(|c: char| c.is_ascii_digit()));
        let shared = parts.experts.is_some_and(|experts| experts.shared_size > 0);
        let routed = !shared || name.replace('\\', "").contains("mlp.experts");
        let of_experts = after.is_some() && !name.contains("shared") && routed && !some;
        if name != "Linear" && !of_experts {
            let name: String = name.chars().take(60).collect();
            return Err(unsupported(&format!(
                "`targets` of some layers alone ({name})"
            )));
        }
        only &= of_experts;
    }
    Ok(only && targets.is_some_and(|targets| !targets.is_empty()))
}

/// The format of a group whose matrices and their inputs have these schemes.
fn format_of(weights: Option<&Value>, activations: Option<&Value>) -> Result<Dtype, ShapeError> {
    match (weights, activations) {
        (Some(weights), Some(activations))
            if is(weights, 8, "float") && is(activations, 8, "float") =>
        {
            // MXFP8 has a scale per 32 numbers.
            if weights.get("strategy").and_then(Value::as_str) == Some("group") {
                let what = "`compressed-tensors` with 8-bit float weights in groups";
                return Err(unsupported(what));
            }
            Ok(Dtype::Fp8)
        }
        (Some(weights), None) if is(weights, 4, "int") => Ok(Dtype::Int4),
        (Some(weights), Some(activations))
            if is(weights, 4, "float") && is(activations, 4, "float") =>
        {
            let size = weights.get("group_size").and_then(integer);
            if size != Some(16) {
                let what = "`compressed-tensors` with 4-bit float weights in groups of";
                let size = size.map_or("?".into(), |size| size.to_string());
                return Err(unsupported(&format!("{what} {size}")));
            }
            Ok(Dtype::Nvfp4)
        }
        (weights, activations) => {
            let name = |scheme: Option<&Value>| scheme.map_or("16-bit".into(), name_of);
            let what = format!(
                "`compressed-tensors` with {} weights under {} activations",
                name(weights),
                name(activations)
            );
            Err(unsupported(&what))
        }
    }
}

/// Refuses other bits for some layers, which GPTQModel writes as patterns in `dynamic`.
fn check_dynamic(quantization: Fields<'_>, parts: Parts) -> Result<(), ShapeError> {
    let dynamic = quantization.object("dynamic")?;
    let mut kept = Kept::new(parts);
    for pattern in dynamic.into_iter().flat_map(Object::keys) {
        let name = pattern.trim_start_matches("-:").trim_start_matches("+:");
        let name = format!("re:{name}");
        let found = kept
            .as_mut()
            .map_or(Found::Unread, |kept| kept.keep(&name, Names::Exact));
        // A pattern for routers may match the dense MLP's gate too, which a mixture in every layer has not.
        if found == Found::Absent {
            continue;
        }
        let unread = found == Found::Unread && !is_negated(&name);
        if !unread && found != Found::Nothing || is_projection(&name, parts.layers) {
            let pattern: String = pattern.chars().take(60).collect();
            return Err(unsupported(&format!(
                "other bits for some layers (`dynamic`: {pattern})"
            )));
        }
    }
    Ok(())
}

/// The format of keys and values for which a checkpoint contains scales.
fn kv_format(scheme: Option<&Value>) -> Result<Dtype, ShapeError> {
    match scheme.filter(|value| !value.is_null()) {
        None => Ok(Dtype::Bf16),
        Some(Value::String(name)) if name.eq_ignore_ascii_case("fp8") => Ok(Dtype::Fp8),
        Some(scheme) if is_fp8(scheme) => Ok(Dtype::Fp8),
        Some(Value::String(name)) => Err(unsupported(&format!("a KV cache of {name}"))),
        Some(scheme) => Err(unsupported(&format!("a KV cache of {}", name_of(scheme)))),
    }
}

fn is_fp8(scheme: &Value) -> bool {
    is(scheme, 8, "float")
}

fn is(scheme: &Value, bits: u64, kind: &str) -> bool {
    scheme.get("type").and_then(Value::as_str) == Some(kind)
        && scheme.get("num_bits").and_then(Value::as_u64) == Some(bits)
}

/// `4-bit int`, from a scheme of compressed-tensors.
fn name_of(scheme: &Value) -> String {
    let bits = scheme.get("num_bits").map_or("?".into(), Value::to_string);
    let kind = scheme.get("type").and_then(Value::as_str).unwrap_or("?");
    format!("{bits}-bit {kind}")
}

/// Whether a pattern refers to what it does not name.
fn is_negated(name: &str) -> bool {
    ["(?!", "(?<", "(?=", "[^"]
        .iter()
        .any(|part| name.contains(part))
}

/// Whether a name or pattern of modules that are not quantized may refer to matrices of a layer's attention or MLP: unless
/// all that it refers to is known to be something else. Embeddings, output heads and norms are always in 16 bits, routers of
/// experts are small. Vision encoders and layers beyond the model's own (multi-token prediction) are not served.
fn is_projection(name: &str, layers: u32) -> bool {
    let name = name.to_ascii_lowercase();
    // An alternative of a pattern may be anything.
    if name.contains('|') {
        return name
            .trim_start_matches("re:")
            .split('|')
            .any(|name| is_projection(name, layers));
    }
    let other = [
        "norm",
        "mtp",
        "embed",
        "lm_head",
        "indexer",
        "wte",
        "wpe",
        "ln_f",
        "rotary",
        "shared_head",
        "classifier",
    ];
    if is_encoder(&name) || other.iter().any(|word| name.contains(word)) {
        return false;
    }
    // Small matrices of linear attention and of routing, and heads.
    let last = name
        .trim_end_matches(['*', '.', '$', ')'])
        .rsplit(['.', '*', '(', ':'])
        .next()
        .unwrap_or("");
    if [
        "conv1d",
        "in_proj_ba",
        "in_proj_a",
        "in_proj_b",
        "shared_expert_gate",
        "gate",
        "router",
        "output",
        "score",
        "e_score_correction_bias",
        "sinks",
    ]
    .contains(&last)
    {
        return false;
    }
    let layer = name.split("layers.").nth(1).and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    layer.is_none_or(|layer| layer < layers)
}

fn unsupported(what: &str) -> ShapeError {
    ShapeError::Unsupported {
        field: FIELD.into(),
        what: super::fields::cleaned(what).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::{Attention, Experts};
    use super::*;

    fn formats(quantization: &str) -> Result<Formats, String> {
        let mixture = crate::preset::model("qwen3-30b-a3b").unwrap();
        formats_of(quantization, mixture.experts)
    }

    fn formats_of(quantization: &str, experts: Option<Experts>) -> Result<Formats, String> {
        let text = format!("{{\"quantization_config\": {quantization}}}");
        let outer: Object = serde_json::from_str(&text).unwrap();
        let log = Log::default();
        let (outer, none) = (Fields::new(&outer, "", &log), Object::new());
        let config = Fields::new(&none, "", &log);
        let parts = Parts {
            layers: 4,
            attention: Attention::Full,
            experts,
        };
        read(&ModelFiles::default(), outer, config, parts).map_err(|e| e.to_string())
    }

    /// Patterns for routers change no other bits where the dense MLP whose gate they match as well does not exist.
    #[test]
    fn patterns_for_routers_are_read_where_no_dense_mlp_has_a_gate() {
        let mixture = crate::preset::model("qwen3-30b-a3b").unwrap().experts;
        let dense_layers = mixture.map(|experts| Experts {
            dense_layers: 1,
            ..experts
        });
        for start in ["-:", "+:", ""] {
            for pattern in [
                ".*mlp.gate.*",
                r"model\\.layers\\.\\d+\\.mlp.gate.*",
                r".*\\.mlp\\.gate.*",
            ] {
                let text = format!(
                    r#"{{"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {{"{start}{pattern}": {{}}}}}}"#
                );
                let found = formats_of(&text, mixture);
                assert_eq!(
                    found.map(|formats| formats.weights),
                    Ok(Dtype::Int4),
                    "{text}"
                );
                for other in [dense_layers, None] {
                    let error = formats_of(&text, other).unwrap_err();
                    assert!(error.contains("`dynamic`"), "{error}");
                }
            }
        }
    }

    const FP8: Formats = Formats {
        weights: Dtype::Fp8,
        mlps: Some(Dtype::Fp8),
        experts: Dtype::Fp8,
        kv_cache: Dtype::Bf16,
        group: 0,
    };
    const FP8_KV: Formats = Formats {
        kv_cache: Dtype::Fp8,
        ..FP8
    };

    #[test]
    fn fp8_checkpoints_are_fp8() {
        let eight = r#"{"num_bits": 8, "type": "float", "dynamic": true}"#;
        let groups = format!(
            "\"config_groups\": {{\"group_0\": {{\"weights\": {eight}, \"input_activations\": {eight}}}}}"
        );
        let cases = [
            // Qwen3-235B-A22B-FP8 lists modules that are small or not in a layer's matrices.
            (
                r#"{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head",
                    "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]}"#
                    .to_owned(),
                FP8,
            ),
            (
                r#"{"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}"#.into(),
                FP8,
            ),
            (
                r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.4.self_attn.q_proj"]}"#
                    .into(),
                FP8, // a layer for multi-token prediction, after the four
            ),
            (
                format!(
                    "{{\"quant_method\": \"compressed-tensors\", {groups}, \"ignore\": [\"lm_head\"]}}"
                ),
                FP8,
            ),
            (
                format!(
                    "{{\"quant_method\": \"compressed-tensors\", {groups}, \"kv_cache_scheme\": {eight}}}"
                ),
                FP8_KV,
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#.into(),
                FP8,
            ),
            (
                r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "FP8",
                    "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}"#
                    .into(),
                FP8_KV,
            ),
        ];
        for (json, expected) in cases {
            assert_eq!(formats(&json), Ok(expected), "{json}");
        }
        assert_eq!(formats("null").unwrap().weights, Dtype::Bf16);
    }

    #[test]
    fn only_experts_have_four_bits_if_the_rest_is_kept() {
        // Kimi-K2.5 and gpt-oss.
        let int4 = r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
            {"num_bits": 4, "type": "int", "group_size": 32}, "input_activations": null}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]}"#;
        let of_experts = |experts, group| Formats {
            weights: Dtype::Bf16,
            mlps: (experts == Dtype::Int4).then_some(Dtype::Bf16),
            experts,
            kv_cache: Dtype::Bf16,
            group,
        };
        assert_eq!(formats(int4), Ok(of_experts(Dtype::Int4, 32)));
        let mxfp4 =
            r#"{"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}"#;
        assert_eq!(formats(mxfp4), Ok(of_experts(Dtype::Mxfp4, 0)));
        let whole = formats(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#).unwrap();
        assert_eq!((whole.weights, whole.experts), (Dtype::Nvfp4, Dtype::Nvfp4));
    }

    #[test]
    fn other_formats_are_refused_by_name() {
        let group = |weights: &str, activations: &str| {
            format!(
                "{{\"quant_method\": \"compressed-tensors\", \"config_groups\": {{\"group_0\": \
                 {{\"weights\": {weights}, \"input_activations\": {activations}}}}}}}"
            )
        };
        let eight = r#"{"num_bits": 8, "type": "float"}"#;
        let cases = [
            (r#"{"quant_method": "awq", "bits": 8}"#.into(), "`awq` of 8 bits"),
            (r#"{"quant_method": "bitsandbytes"}"#.into(), "the format `bitsandbytes`"),
            (
                r#"{"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp.*": {}}}"#.into(),
                "other bits for some layers (`dynamic`: -:.*mlp.*)",
            ),
            (
                group(eight, eight).replace("\"weights\"", "\"targets\": [\"re:.*mlp.*\"], \"weights\""),
                "`targets` of some layers alone (re:.*mlp.*)",
            ),
            (
                group(eight, eight).replace("\"weights\"", "\"targets\": [\"re:.*experts.*\"], \"weights\""),
                "whose `targets` are experts alone",
            ),
            (r#"{"bits": 4}"#.into(), "(no `quant_method`)"),
            ("3".into(), "not a JSON object"),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}"#.into(),
                "`modelopt` with W4A8_AWQ",
            ),
            (group(eight, "null"), "8-bit float weights under 16-bit activations"),
            (
                group(eight, r#"{"num_bits": 8, "type": "int"}"#),
                "8-bit int activations",
            ),
            (
                r#"{"quant_method": "compressed-tensors"}"#.into(),
                "without `config_groups`",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}"#
                    .into(),
                "a KV cache of NVFP4",
            ),
        ];
        for (json, part) in cases {
            let error = formats(&json).unwrap_err();
            assert!(error.starts_with("`quantization_config`: "), "{error}");
            assert!(error.contains(part), "{error} for {json}");
        }
    }

    #[test]
    fn projections_that_dense_models_keep_are_refused() {
        let cases = [
            // Llama-3.1-405B-FP8 keeps attention, and the first and last layers, in 16 bits.
            (
                r#"{"quant_method": "fbgemm_fp8", "modules_to_not_convert":
                    ["model.layers.0.mlp.down_proj"]}"#,
                "model.layers.0.mlp.down_proj",
            ),
            (
                r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.3"]}"#,
                "model.layers.3",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules":
                    ["*.self_attn*"]}"#,
                "*.self_attn*",
            ),
        ];
        for (json, part) in cases {
            let error = formats_of(json, None).unwrap_err();
            assert!(error.contains(part) && error.contains("kept"), "{error}");
        }
    }

    /// Formats of compressed-tensors that have the bits of a known one and other bytes.
    #[test]
    fn relatives_of_known_formats_are_refused() {
        let groups = |weights: &str, activations: &str, more: &str| {
            format!(
                r#"{{"quant_method": "compressed-tensors"{more}, "config_groups": {{"group_0": {{"targets": ["Linear"],
                "weights": {weights}, "input_activations": {activations}}}}}}}"#
            )
        };
        let four =
            r#"{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}"#;
        let four_mx = r#"{"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}"#;
        let eight = r#"{"num_bits": 8, "type": "float", "strategy": "channel"}"#;
        let eight_mx = r#"{"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}"#;
        let int = r#"{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}"#;
        assert!(formats(&groups(four, four, "")).is_ok());
        assert!(formats(&groups(eight, eight, r#", "format": "float-quantized""#)).is_ok());
        for (weights, activations, more, part) in [
            (four_mx, four_mx, "", "in groups of 32"),
            (eight_mx, eight_mx, "", "8-bit float weights in groups"),
            (
                int,
                "null",
                r#", "format": "marlin-24""#,
                "`format` marlin-24",
            ),
            (
                eight,
                eight,
                r#", "format": "sparse-24-bitmask""#,
                "`format` sparse-24-bitmask",
            ),
        ] {
            let error = formats(&groups(weights, activations, more)).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let gptq = r#"{"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin_24"}"#;
        assert!(formats(gptq).unwrap_err().contains("2:4 sparsity"));
        let gate = |algorithm: &str| {
            let json = format!(
                r#"{{"quant_method": "{algorithm}", "quant_algo": "FP8", "exclude_modules": ["gate"]}}"#
            );
            formats(&json)
        };
        assert!(gate("modelopt").unwrap_err().contains("kept in 16 bits"));
    }

    #[test]
    fn encoders_are_no_projections_of_the_language_model() {
        for name in [
            "model.mm_projector.0",
            "mm_projector",
            "multi_modal_projector.linear_1",
            "model.vision_tower.layers.3.attention.q_proj",
            "audio_tower.layers.0.self_attn.k_proj",
            "visual.blocks.0.attn.qkv",
            "mlp1.1",
            "vit.encoder.layers.1.mlp.fc1",
            "model.layers.2.mlp.gate",
            "model.layers.0.linear_attn.conv1d",
        ] {
            assert!(!is_projection(name, 4), "{name}");
            let text = format!("{{\"quant_method\": \"fp8\", \"ignored_layers\": [\"{name}\"]}}");
            assert_eq!(formats(&text), Ok(FP8), "{name}");
        }
        for name in [
            "model.layers.2.mlp.gate_proj",
            "language_model.layers.1.self_attn.o_proj",
            "*.mlp",
        ] {
            assert!(is_projection(name, 4), "{name}");
        }
    }
}
