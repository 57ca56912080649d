//! Deployments, read from rows of a table: model, GPU, formats, parallel sizes, load.

use slipstream_base::width::floor_u32;
use slipstream_config::cluster::Dtype;
pub use slipstream_config::cluster::Framework;
pub use slipstream_config::preset::Formats;
use slipstream_config::preset::{self, Gpu, ModelShape};
use thiserror::Error;

use crate::predict;

/// How the GPUs of one worker share the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// GPUs that share each layer's attention.
    pub tensor: u32,
    /// Stages of a pipeline.
    pub pipeline: u32,
    /// Ranks with attention of their own, which meet at the experts of every layer.
    pub attention_data: u32,
    /// GPUs that share each expert.
    pub expert_tensor: u32,
    /// Groups of GPUs between which the experts are divided.
    pub expert: u32,
}

impl Parallel {
    /// One GPU.
    pub const ONE: Parallel = Parallel {
        tensor: 1,
        pipeline: 1,
        attention_data: 1,
        expert_tensor: 1,
        expert: 1,
    };

    /// GPUs of a worker.
    pub fn gpus(&self) -> u64 {
        u64::from(self.tensor) * u64::from(self.pipeline) * u64::from(self.attention_data)
    }
}

/// Which workers compute prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Serving {
    /// Each worker computes prompts and answers.
    Aggregated,
    /// Prefill workers compute prompts, decode workers generate.
    Disaggregated {
        /// Prefill workers.
        prefill_workers: u32,
        /// How the GPUs of each share the model.
        prefill: Parallel,
        /// Decode workers.
        decode_workers: u32,
    },
}

/// A deployment under a closed loop of equal requests.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The model.
    pub shape: ModelShape,
    /// The GPU.
    pub gpu: Gpu,
    /// The framework.
    pub framework: Framework,
    /// Its version or image, if stated; versions differ in kernels and overheads.
    pub version: String,
    /// Formats of weights and KV cache.
    pub formats: Formats,
    /// Word for the formats together: `bf16`, `fp8`, `fp4`, `int4`, `int8`.
    pub precision: &'static str,
    /// The workers that generate.
    pub parallel: Parallel,
    /// Which workers compute prompts.
    pub serving: Serving,
    /// Input tokens of a request.
    pub isl: f64,
    /// Output tokens of a request.
    pub osl: f64,
    /// Requests under way on each attention-data rank of each worker that generates.
    pub batch: f64,
    /// Values that the row left open, as assumed.
    pub assumed: Vec<String>,
}

/// Why a row is not answered.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A column that is needed is empty or absent.
    #[error("missing: {0}")]
    Missing(&'static str),
    /// A number is unusable.
    #[error("invalid: {column} is \"{found}\", but must be {must}")]
    Invalid {
        /// The column.
        column: &'static str,
        /// Its value in the row.
        found: String,
        /// A description of valid values.
        must: String,
    },
    /// No preset or `config.json` of this model.
    #[error("unknown model: {0}")]
    Model(String),
    /// No GPU of this name.
    #[error("unknown GPU: {0}")]
    Gpu(String),
    /// Not a framework that was calibrated.
    #[error("unknown framework: {0}")]
    Framework(String),
    /// A number format that is not modelled.
    #[error("unknown precision: {0}")]
    Precision(String),
    /// Parallel sizes that contradict each other or the model.
    #[error("impossible sizes: {0}")]
    Sizes(String),
    /// Requests longer than the model's context.
    #[error(
        "too long: isl + osl is {tokens} tokens, but {model} has a context of {limit} tokens; for a \
         longer one, give a config.json with another max_position_embeddings in --models"
    )]
    Context {
        /// Input and output tokens of a request.
        tokens: u64,
        /// The model's `max_position_embeddings`.
        limit: u32,
        /// Name of the model.
        model: String,
    },
    /// Weights, or the KV cache of a single request, are larger than the GPUs' memory.
    #[error("does not fit: {0}")]
    Memory(String),
    /// An estimate is infinite or not a number.
    #[error("no estimate: the load is beyond the range of the model")]
    NotFinite,
}

/// Largest parallel size.
const SIZE_MAX: u32 = 4096;
/// Most workers of one side of a disaggregated deployment.
const WORKERS_MAX: u32 = 100_000;
/// Most requests under way on one rank.
const BATCH_MAX: u32 = 1_000_000;
/// Longest input or output, tokens.
const TOKENS_MAX: u32 = 10_000_000;

/// Why a text is no table of deployments.
#[derive(Debug, Error)]
pub enum TableError {
    /// The text is no CSV, or a row has more or fewer cells than the header.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// Two columns have one name.
    #[error("the header has column \"{0}\" more than once")]
    Duplicate(String),
    /// The header is a single cell that contains another separator.
    #[error("the header is a single cell that contains {0}; cells must be separated by commas")]
    Separator(&'static str),
}

/// Columns that `predict` and `calibrate` read, and those of measured tables that neither needs.
const COLUMNS: &[&str] = &[
    "id",
    "backend",
    "backend_version",
    "model_path",
    "system",
    "precision",
    "kv_cache_dtype",
    "mode",
    "isl",
    "osl",
    "gemm_quant_mode",
    "moe_quant_mode",
    "batch_size",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "prefill_batch_size",
    "prefill_num_workers",
    "prefill_tp_size",
    "prefill_pp_size",
    "prefill_attention_dp_size",
    "prefill_moe_tp_size",
    "prefill_moe_ep_size",
    "decode_batch_size",
    "decode_num_workers",
    "decode_tp_size",
    "decode_pp_size",
    "decode_attention_dp_size",
    "decode_moe_tp_size",
    "decode_moe_ep_size",
    "ttft_ms",
    "tpot_ms",
    "source",
];

/// Columns of `rows` that no deployment is read from, such as misspelt ones.
pub fn unknown_columns(rows: &[Row]) -> Vec<&str> {
    let columns = rows.first().map_or(&[][..], |row| row.columns.as_slice());
    columns
        .iter()
        .map(String::as_str)
        .filter(|name| !name.is_empty() && !COLUMNS.contains(name))
        .collect()
}

/// A row of a table of deployments, as text.
#[derive(Clone, Debug)]
pub struct Row {
    /// Column `id`, or the number of the row.
    pub id: String,
    cells: Vec<String>,
    columns: std::sync::Arc<Vec<String>>,
}

impl Row {
    /// The cell of `column`; `None` if it is empty or there is no such column.
    pub fn get(&self, column: &str) -> Option<&str> {
        let at = self.columns.iter().position(|name| name == column)?;
        let cell = self.cells.get(at)?.trim();
        (!cell.is_empty() && !cell.eq_ignore_ascii_case("nan")).then_some(cell)
    }

    /// The number in `column`, if it is one that is finite.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.get(column)?
            .parse()
            .ok()
            .filter(|x: &f64| x.is_finite())
    }
}

/// Reads a CSV table with a header. Lines above the header that start with `#` are comments.
///
/// # Errors
/// If the text is no CSV with a header, a column name is repeated, or a row has more or fewer cells
/// than the header; the message names the line.
pub fn read_rows(text: &[u8]) -> Result<Vec<Row>, TableError> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    // Comments become empty lines, which the reader skips but counts in its errors. A `#` below the
    // header may start an id: such a row is data.
    let mut lines = Vec::with_capacity(text.len());
    let mut above = true;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if above && line.starts_with(b"#") {
            lines.push(b'\n');
        } else {
            above &= line.trim_ascii().is_empty();
            lines.extend_from_slice(line);
        }
    }
    let mut reader = csv::Reader::from_reader(lines.as_slice());
    let columns: Vec<String> = reader
        .headers()?
        .iter()
        .map(|c| c.trim().to_owned())
        .collect();
    if let [only] = columns.as_slice() {
        if only.contains(';') {
            return Err(TableError::Separator("semicolons"));
        } else if only.contains('\t') {
            return Err(TableError::Separator("tabs"));
        }
    }
    for (at, name) in columns.iter().enumerate() {
        if !name.is_empty() && columns[..at].contains(name) {
            return Err(TableError::Duplicate(name.clone()));
        }
    }
    let columns = std::sync::Arc::new(columns);
    reader
        .records()
        .enumerate()
        .map(|(index, record)| {
            let cells: Vec<String> = record?.iter().map(str::to_owned).collect();
            let mut row = Row {
                id: String::new(),
                cells,
                columns: columns.clone(),
            };
            row.id = row
                .get("id")
                .map_or_else(|| (index + 1).to_string(), str::to_owned);
            Ok(row)
        })
        .collect()
}

/// Letters and digits, in lower case.
fn plain(text: &str) -> String {
    text.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

/// Other names of GPU presets, letters and digits in lower case.
const GPU_ALIASES: &[(&str, &str)] = &[
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
fn find_gpu(name: &str) -> Option<&'static Gpu> {
    let wanted = wanted_gpu(name);
    if let Some(gpu) = preset::GPUS.iter().find(|gpu| plain(&gpu.name) == wanted) {
        return Some(gpu);
    }
    let alias = GPU_ALIASES.iter().find(|(alias, _)| *alias == wanted);
    preset::gpu(alias?.1)
}

/// Reason to refuse `name`, with presets of similar names.
fn unknown_gpu(name: &str) -> Refusal {
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

fn precision_of(word: &str) -> Option<(Dtype, &'static str)> {
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
fn checkpoint_format(
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
fn kv_cache_of(word: &str) -> Result<Dtype, Refusal> {
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

impl Deployment {
    /// Reads a row; the columns are those of `silicon_points.csv` in `docs/accuracy.md`. `load`
    /// gives the shape of a model that is no preset.
    ///
    /// # Errors
    /// If something that is needed is missing, unusable or unknown; see [`Refusal`].
    pub fn read(
        row: &Row,
        load: &dyn Fn(&str) -> Option<ModelShape>,
    ) -> Result<Deployment, Refusal> {
        let mut assumed = Vec::new();
        let text = |column: &'static str| row.get(column).ok_or(Refusal::Missing(column));
        let name = text("model_path")?;
        let loaded = load(name);
        let is_loaded = loaded.is_some();
        let shape = loaded
            .or_else(|| preset::find_model(name))
            .ok_or_else(|| Refusal::Model(name.to_owned()))?;
        let system = text("system")?;
        let gpu = find_gpu(system).ok_or_else(|| unknown_gpu(system))?;
        let backend = text("backend")?;
        let framework =
            Framework::named(backend).ok_or_else(|| Refusal::Framework(backend.to_owned()))?;
        let word = row
            .get("precision")
            .or_else(|| {
                row.get("moe_quant_mode")
                    .filter(|_| shape.experts.is_some())
            })
            .or_else(|| row.get("gemm_quant_mode"));
        let (dtype, precision) = if let Some(word) = word {
            precision_of(word).ok_or_else(|| Refusal::Precision(word.to_owned()))?
        } else {
            let (format, origin) = checkpoint_format(name, &shape, is_loaded)?;
            let precision = precision_word(format);
            assumed.push(format!("precision: {precision}{origin}"));
            (format, precision)
        };
        // Tables written by data frames may hold integers as `8.0`.
        let integer = |column: &'static str, most: u32| match row.get(column) {
            None => Ok(None),
            Some(found) => match found.parse::<f64>() {
                Ok(x) if x >= 1.0 && x <= f64::from(most) && x.fract() == 0.0 => {
                    Ok(Some(floor_u32(x)))
                }
                _ => Err(Refusal::Invalid {
                    column,
                    found: found.chars().take(40).collect(),
                    must: format!("an integer from 1 to {most}"),
                }),
            },
        };
        // Measured tables write 0 for a size that does not apply: experts of a dense model.
        let optional = |column: &'static str| match row.number(column) {
            Some(0.0) => Ok(None),
            _ => integer(column, SIZE_MAX),
        };
        let isl = integer("isl", TOKENS_MAX)?.ok_or(Refusal::Missing("isl"))?;
        let osl = integer("osl", TOKENS_MAX)?.ok_or(Refusal::Missing("osl"))?;
        let tokens = u64::from(isl) + u64::from(osl);
        if tokens > u64::from(shape.max_positions) {
            return Err(Refusal::Context {
                tokens,
                limit: shape.max_positions,
                model: shape.name.to_string(),
            });
        }
        let split = match row.get("mode") {
            None => row.get("decode_batch_size").is_some(),
            Some(mode) => match mode.to_ascii_lowercase().as_str() {
                "agg" | "aggregated" => false,
                "disagg" | "disaggregated" => true,
                _ => {
                    return Err(Refusal::Invalid {
                        column: "mode",
                        found: mode.chars().take(40).collect(),
                        must: "`agg` or `disagg`".to_owned(),
                    });
                }
            },
        };
        let mut sizes = |columns: [&'static str; 5]| -> Result<Parallel, Refusal> {
            let [tensor, pipeline] = [
                integer(columns[0], SIZE_MAX)?,
                integer(columns[1], SIZE_MAX)?,
            ];
            let [data, expert_tensor, expert] = [
                optional(columns[2])?,
                optional(columns[3])?,
                optional(columns[4])?,
            ];
            if tensor.is_none() {
                assumed.push(format!("{}: 1", columns[0]));
            }
            let tensor = tensor.unwrap_or(1);
            let attention_data = data.unwrap_or(1);
            let group = tensor * attention_data;
            let (expert_tensor, expert) = match (expert_tensor, expert) {
                (Some(t), Some(e)) => (t, e),
                (Some(t), None) => (t, (group / t).max(1)),
                (None, Some(e)) => ((group / e).max(1), e),
                (None, None) => (group, 1),
            };
            let pipeline = pipeline.unwrap_or(1);
            if shape.experts.is_some() && expert_tensor * expert != group {
                return Err(Refusal::Sizes(format!(
                    "experts over {} GPUs, attention over {group}; {} * {} must equal {} * {}",
                    expert_tensor * expert,
                    columns[3],
                    columns[4],
                    columns[0],
                    columns[2],
                )));
            }
            // Every framework divides attention by whole heads; vLLM: `verify_with_parallel_config`.
            if !shape.attention_heads.is_multiple_of(tensor) {
                return Err(Refusal::Sizes(format!(
                    "{} is {tensor}, which does not divide the {} attention heads of {}",
                    columns[0], shape.attention_heads, shape.name
                )));
            }
            if pipeline > shape.layers {
                return Err(Refusal::Sizes(format!(
                    "{} is {pipeline}, but {} has {} layers",
                    columns[1], shape.name, shape.layers
                )));
            }
            Ok(Parallel {
                tensor,
                pipeline,
                attention_data,
                expert_tensor,
                expert,
            })
        };
        let (parallel, serving, batch) = if split {
            let prefill = sizes([
                "prefill_tp_size",
                "prefill_pp_size",
                "prefill_attention_dp_size",
                "prefill_moe_tp_size",
                "prefill_moe_ep_size",
            ])?;
            let decode = sizes([
                "decode_tp_size",
                "decode_pp_size",
                "decode_attention_dp_size",
                "decode_moe_tp_size",
                "decode_moe_ep_size",
            ])?;
            let mut workers = |column: &'static str| -> Result<u32, Refusal> {
                let found = integer(column, WORKERS_MAX)?;
                if found.is_none() {
                    assumed.push(format!("{column}: 1"));
                }
                Ok(found.unwrap_or(1))
            };
            let serving = Serving::Disaggregated {
                prefill_workers: workers("prefill_num_workers")?,
                prefill,
                decode_workers: workers("decode_num_workers")?,
            };
            (decode, serving, integer("decode_batch_size", BATCH_MAX)?)
        } else {
            let sizes = sizes([
                "tp_size",
                "pp_size",
                "attention_dp_size",
                "moe_tp_size",
                "moe_ep_size",
            ])?;
            (
                sizes,
                Serving::Aggregated,
                integer("batch_size", BATCH_MAX)?,
            )
        };
        let column = if split {
            "decode_batch_size"
        } else {
            "batch_size"
        };
        let mut formats = Formats::of(&shape, dtype);
        match row.get("kv_cache_dtype") {
            Some(found) => formats.kv_cache = kv_cache_of(found)?,
            None if formats.kv_cache != Dtype::Bf16 => {
                assumed.push(format!(
                    "kv_cache_dtype: {}",
                    precision_word(formats.kv_cache)
                ));
            }
            None => {}
        }
        // A request on a prefill worker holds no output.
        let check = |parallel, tokens, column| {
            predict::check_memory(&shape, gpu, formats, parallel, tokens, column)
        };
        match serving {
            Serving::Aggregated => check(parallel, tokens, "tp_size")?,
            Serving::Disaggregated { prefill, .. } => {
                check(prefill, u64::from(isl), "prefill_tp_size")?;
                check(parallel, tokens, "decode_tp_size")?;
            }
        }
        Ok(Deployment {
            formats,
            shape,
            gpu: gpu.clone(),
            framework,
            version: row
                .get("backend_version")
                .unwrap_or("")
                .replace([',', '|'], " "),
            precision,
            parallel,
            serving,
            isl: f64::from(isl),
            osl: f64::from(osl),
            batch: f64::from(batch.ok_or(Refusal::Missing(column))?),
            assumed,
        })
    }

    /// `agg` or `disagg`.
    pub fn mode(&self) -> &'static str {
        match self.serving {
            Serving::Aggregated => "agg",
            Serving::Disaggregated { .. } => "disagg",
        }
    }

    /// Key of models of equal sizes, whatever they are called.
    pub fn family(&self) -> String {
        let s = &self.shape;
        let experts = s.experts.map_or(0, |e| e.count);
        format!(
            "L{}h{}H{}E{experts}",
            s.layers, s.hidden_size, s.attention_heads
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Result<Deployment, Refusal>> {
        let rows = read_rows(text.as_bytes()).unwrap();
        rows.iter()
            .map(|row| Deployment::read(row, &|_| None))
            .collect()
    }

    #[test]
    fn repositories_and_systems_name_presets() {
        let models = [
            ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
            ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3.1"),
            ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
            ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
            ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b"),
            ("zai-org/GLM-4.6-FP8", "glm-4.6"),
            ("OPENAI/gpt-oss-120b", "gpt-oss-120b"),
        ];
        for (name, expected) in models {
            let found = preset::find_model(name).map(|m| m.name.into_owned());
            assert_eq!(found.as_deref(), Some(expected), "{name}");
        }
        assert!(preset::find_model("acme/unheard-of-7b").is_none());
        for (name, expected) in [
            ("h200_sxm", "h200-sxm"),
            ("B300", "b300-sxm"),
            ("gb300", "gb300"),
            ("h100_sxm", "h100-sxm"),
            ("NVIDIA H100 80GB HBM3", "h100-sxm"),
            ("rtx_pro_6000", "rtx-pro-6000"),
        ] {
            assert_eq!(find_gpu(name).map(|g| &*g.name), Some(expected), "{name}");
        }
        assert!(find_gpu("").is_none() && find_gpu("abacus").is_none());
    }

    #[test]
    fn what_a_row_lacks_is_assumed_by_name_or_refused_by_name() {
        let head = "model_path,system,backend,precision,isl,osl,batch_size,tp_size,attention_dp_size,moe_ep_size\n";
        let rows = read(&format!(
            "{head}openai/gpt-oss-120b,h100_sxm,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100_sxm,vllm,fp4,1024,512,8,,,\n\
             acme/x,h100_sxm,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,abacus,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100_sxm,ollama,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100_sxm,vllm,fp3,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100_sxm,vllm,fp4,,512,8,2,,\n\
             openai/gpt-oss-120b,h100_sxm,vllm,fp4,1024,512,-1,2,,\n\
             openai/gpt-oss-120b,h100_sxm,vllm,fp4,1024,512,8,2,2,2\n"
        ));
        let first = rows[0].as_ref().unwrap();
        assert_eq!(
            (first.parallel.expert_tensor, first.parallel.expert),
            (2, 1)
        );
        assert!(first.assumed.is_empty());
        assert_eq!(first.formats.experts, Dtype::Mxfp4);
        assert_eq!(first.formats.attention, Dtype::Bf16);
        assert_eq!(rows[1].as_ref().unwrap().assumed, ["tp_size: 1"]);
        let reasons: Vec<String> = rows[2..8]
            .iter()
            .map(|row| row.as_ref().unwrap_err().to_string())
            .collect();
        assert_eq!(
            reasons,
            [
                "unknown model: acme/x",
                "unknown GPU: abacus; similar: a100-sxm-80gb, a100-sxm-40gb, a100-pcie-80gb, a10",
                "unknown framework: ollama",
                "unknown precision: fp3",
                "missing: isl",
                "invalid: batch_size is \"-1\", but must be an integer from 1 to 1000000",
            ]
        );
        let last = rows[8].as_ref().unwrap();
        assert_eq!(last.parallel.gpus(), 4);
        assert_eq!((last.parallel.expert_tensor, last.parallel.expert), (2, 2));
    }

    /// A row without a precision has that of its checkpoint, in every spelling of repositories, or is refused.
    #[test]
    fn formats_come_from_the_checkpoint() {
        let head = "model_path,system,backend,isl,osl,batch_size,tp_size\n";
        let row = |name: &str| {
            let mut rows = read(&format!("{head}{name},h200,vllm,1000,200,16,8\n"));
            rows.remove(0)
        };
        let bases = [
            "Qwen/Qwen3-8B",
            "RedHatAI/Meta-Llama-3.1-70B-Instruct",
            "acme/Qwen3-32B",
        ];
        for base in bases {
            for (suffix, word) in [
                ("", "bf16"),
                ("-BF16", "bf16"),
                ("-FP8", "fp8"),
                ("-FP8-dynamic", "fp8"),
                ("-NVFP4", "fp4"),
                ("-FP4", "fp4"),
                ("-MXFP4", "fp4"),
                ("-AWQ", "int4"),
                ("-GPTQ", "int4"),
                ("-GPTQ-Int4", "int4"),
                ("-GPTQ-Int8", "int8"),
                ("-INT8", "int8"),
                ("-quantized-w4a16", "int4"),
                ("_W8A8", "int8"),
                ("-quantized.w4a16", "int4"),
                ("-bnb-4bit", ""),
                ("-GGUF", ""),
            ] {
                let name = format!("{base}{suffix}");
                match row(&name) {
                    Ok(read) => {
                        assert_eq!(read.precision, word, "{name}");
                        assert!(read.assumed[0].starts_with(&format!("precision: {word}")));
                    }
                    // A name that no preset has, or without a known format.
                    Err(refusal) => {
                        let odd = suffix.contains('.') || word.is_empty();
                        assert!(odd, "{name}: {refusal}");
                    }
                }
            }
        }
        for (name, word) in [
            ("deepseek-ai/DeepSeek-R1", "fp8"),
            ("openai/gpt-oss-120b", "fp4"),
            ("nvidia/DeepSeek-R1-NVFP4", "fp4"),
        ] {
            let read = row(name).unwrap();
            assert_eq!(read.precision, word, "{name}");
        }
    }

    #[test]
    fn the_kv_cache_is_assumed_by_name_or_stated() {
        let head =
            "model_path,system,backend,precision,kv_cache_dtype,isl,osl,batch_size,tp_size\n";
        let row = |precision: &str, kv: &str| {
            let row = format!("Qwen/Qwen3-32B,h200,vllm,{precision},{kv},1024,512,8,1\n");
            read(&format!("{head}{row}")).remove(0)
        };
        for (precision, kv, format, assumed) in [
            ("bf16", "", Dtype::Bf16, ""),
            ("fp8", "", Dtype::Fp8, "kv_cache_dtype: fp8"),
            ("int4", "", Dtype::Fp8, "kv_cache_dtype: fp8"),
            ("fp8", "auto", Dtype::Bf16, ""),
            ("bf16", "fp8_e4m3", Dtype::Fp8, ""),
        ] {
            let read = row(precision, kv).unwrap();
            assert_eq!(read.formats.kv_cache, format);
            assert_eq!(read.assumed.join("; "), assumed);
        }
        let refusal = row("fp8", "nvfp4").unwrap_err().to_string();
        assert!(
            refusal.starts_with("invalid: kv_cache_dtype is \"nvfp4\""),
            "{refusal}"
        );
    }

    /// A name that several presets begin with is none of them.
    #[test]
    fn beginnings_of_several_presets_are_refused_with_the_choices() {
        for gpu in preset::GPUS.iter() {
            let name = plain(&gpu.name);
            for end in 1..name.len() {
                let start = &name[..end];
                let others: Vec<&str> = preset::GPUS
                    .iter()
                    .map(|gpu| &*gpu.name)
                    .filter(|other| plain(other).starts_with(start))
                    .collect();
                let exact = preset::GPUS.iter().any(|gpu| plain(&gpu.name) == start);
                if others.len() > 1 && !exact {
                    assert!(find_gpu(start).is_none(), "{start}: {others:?}");
                }
            }
        }
        for name in ["h100", "A100", "NVIDIA H100", "a100_80gb"] {
            let Refusal::Gpu(says) = unknown_gpu(name) else {
                panic!("it is a GPU's")
            };
            assert!(find_gpu(name).is_none());
            assert!(says.contains("100-"), "{says}");
        }
    }

    const HEAD: &str = "model_path,system,backend,precision,mode,isl,osl,batch_size,tp_size,\
        pp_size,attention_dp_size,moe_tp_size,moe_ep_size\n";

    /// Reason for each row of `rows` below [`HEAD`]; empty if it is read.
    fn reasons(rows: &str) -> Vec<String> {
        let reason =
            |row: Result<Deployment, Refusal>| row.err().map_or(String::new(), |r| r.to_string());
        read(&format!("{HEAD}{rows}"))
            .into_iter()
            .map(reason)
            .collect()
    }

    #[test]
    fn sizes_that_are_no_integers_from_1_are_refused_by_column_and_value() {
        for bad in ["0.5", "0", "-1", "1.5", "inf", "1e30", "x", "4097"] {
            for (row, column) in [
                (format!("8,{bad},,,,"), "tp_size"),
                (format!("8,1,{bad},,,"), "pp_size"),
                (format!("8,1,,{bad},,"), "attention_dp_size"),
                (format!("8,1,,,{bad},"), "moe_tp_size"),
                (format!("8,1,,,,{bad}"), "moe_ep_size"),
                (format!("{bad},1,,,,"), "batch_size"),
            ] {
                let zero = bad == "0" && !["tp_size", "pp_size", "batch_size"].contains(&column);
                if zero || (bad == "4097" && column == "batch_size") {
                    continue;
                }
                let row = format!("Qwen/Qwen3-32B,h200,vllm,fp8,agg,1024,512,{row}\n");
                let found = &reasons(&row)[0];
                let start =
                    format!("invalid: {column} is \"{bad}\", but must be an integer from 1 to ");
                assert!(found.starts_with(&start), "{row}: {found}");
            }
        }
        let row = "Qwen/Qwen3-32B,h200,vllm,fp8,agg,1024,512,8.0,2.0,1.0,0,0,0\n";
        assert_eq!(reasons(row), [""]);
    }

    #[test]
    fn models_larger_than_the_memory_are_refused() {
        let found = reasons(
            "deepseek-ai/DeepSeek-V3,h100_sxm,vllm,bf16,agg,1024,512,8,1,,,,\n\
             meta-llama/Llama-3.1-70B,h100_sxm,vllm,bf16,agg,1024,512,8,1,,,,\n\
             meta-llama/Llama-3.1-70B,l4,vllm,bf16,agg,1024,512,8,1,,,,\n\
             meta-llama/Llama-3.1-70B,h100_sxm,vllm,bf16,agg,1024,512,8,2,,,,\n\
             meta-llama/Llama-3.1-70B,h100_sxm,vllm,fp8,agg,1024,512,8,1,,,,\n\
             meta-llama/Llama-3.1-8B,l4,vllm,bf16,agg,120000,512,8,1,,,,\n",
        );
        assert!(
            found[0].starts_with("does not fit: weights take 12"),
            "{}",
            found[0]
        );
        assert_eq!(
            found[1],
            "does not fit: weights take 131.4 GiB per GPU of 79.6 GiB; use tp_size >= 2 or another precision"
        );
        assert!(
            found[2].contains("of 22.5 GiB; use tp_size >= 8 or"),
            "{}",
            found[2]
        );
        assert_eq!(found[3..5], ["", ""]);
        assert!(
            found[5].contains("the KV cache of one request"),
            "{}",
            found[5]
        );
    }

    #[test]
    fn requests_beyond_the_context_and_contradicting_sizes_are_refused() {
        let found = reasons(
            "meta-llama/Llama-2-7b-hf,h100_sxm,vllm,bf16,agg,4000,96,8,1,,,,\n\
             meta-llama/Llama-2-7b-hf,h100_sxm,vllm,bf16,agg,4000,97,8,1,,,,\n\
             deepseek-ai/DeepSeek-V3,h200,vllm,fp8,agg,1024,512,8,8,,,1,4096\n\
             deepseek-ai/DeepSeek-V3,h200,vllm,fp8,agg,1024,512,8,4,,2,,8\n\
             Qwen/Qwen3-32B,h200,vllm,fp8,agg,1024,512,8,3,,,,\n\
             Qwen/Qwen3-32B,h200,vllm,fp8,agg,1024,512,8,1,65,,,\n",
        );
        assert_eq!(found[0], "");
        assert!(found[1].starts_with(
            "too long: isl + osl is 4097 tokens, but llama-2-7b has a context of 4096"
        ));
        assert!(
            found[2].starts_with("impossible sizes: experts over 4096 GPUs, attention over 8;")
        );
        assert_eq!(found[3], "");
        assert!(
            found[4].starts_with("impossible sizes: tp_size is 3,"),
            "{}",
            found[4]
        );
        assert!(
            found[5].starts_with("impossible sizes: pp_size is 65,"),
            "{}",
            found[5]
        );
    }

    #[test]
    fn modes_and_gpus_are_named_in_full() {
        let found = reasons(
            "Qwen/Qwen3-32B,h200,vllm,fp8,distributed,1024,512,8,1,,,,\n\
             Qwen/Qwen3-32B,h,vllm,fp8,agg,1024,512,8,1,,,,\n\
             Qwen/Qwen3-32B,b20,vllm,fp8,agg,1024,512,8,1,,,,\n\
             Qwen/Qwen3-32B,NVIDIA H200,vllm,fp8,Aggregated,1024,512,8,1,,,,\n",
        );
        assert_eq!(
            found,
            [
                "invalid: mode is \"distributed\", but must be `agg` or `disagg`",
                "unknown GPU: h; similar: h100-sxm, h200-sxm, h100-pcie, h100-nvl",
                "unknown GPU: b20; similar: b200-sxm",
                "",
            ]
        );
        for (alias, name) in GPU_ALIASES {
            assert_eq!(plain(alias), *alias);
            assert!(preset::gpu(name).is_some(), "{name}");
        }
    }

    #[test]
    fn tables_with_an_ambiguous_header_are_refused_and_rows_with_a_hash_kept() {
        let refused = |text: &str| read_rows(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(
            refused("id,isl,isl\na,1,2\n"),
            "the header has column \"isl\" more than once"
        );
        assert!(refused("id;isl\na;1\n").contains("semicolons"));
        assert!(refused("id\tisl\na\t1\n").contains("tabs"));
        let rows = read_rows(b"# a comment\n# another\nid,isl,tp_sise\n#1,8,2\n2,9,2\n").unwrap();
        let ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["#1", "2"]);
        assert_eq!(unknown_columns(&rows), ["tp_sise"]);
        // Lines above the header count.
        assert!(refused("# a comment\nid,isl\n# a remark\n").contains("line: 3"));
    }
}
