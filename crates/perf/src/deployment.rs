//! Deployments, read from rows of a table: model, GPU, formats, parallel sizes, load.

use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{self, Attention, Gpu, ModelShape};
use thiserror::Error;

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
    /// All of them, in the order of the profile's parameters.
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
        let name = plain(name);
        let name = if name == "tensorrtllm" || name == "trt" {
            "trtllm"
        } else {
            &name
        };
        Framework::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// Formats of the weights' parts and of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// Attention projections.
    pub attention: Dtype,
    /// Dense MLPs and shared experts.
    pub mlp: Dtype,
    /// Routed experts.
    pub experts: Dtype,
    /// Keys and values.
    pub kv_cache: Dtype,
}

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
    pub fn gpus(&self) -> u32 {
        self.tensor * self.pipeline * self.attention_data
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
        must: &'static str,
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

/// Reads a CSV table with a header.
///
/// # Errors
/// If the text is no CSV with a header, or a row has more or fewer cells than the header; the
/// message names the line.
pub fn read_rows(text: &[u8]) -> Result<Vec<Row>, csv::Error> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let mut reader = csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .from_reader(text);
    let columns: Vec<String> = reader
        .headers()?
        .iter()
        .map(|c| c.trim().to_owned())
        .collect();
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

/// Other names of repositories whose `config.json` has the sizes of a preset.
const SAME_SIZES: &[(&str, &str)] = &[
    ("glm-4.7", "glm-4.6"),
    ("glm-5.1", "glm-5"),
    ("minimax-m2.7", "minimax-m2"),
    ("minimax-m2.1", "minimax-m2"),
    ("kimi-k2.6", "kimi-k2.5"),
    ("deepseek-v3-0324", "deepseek-v3"),
    ("deepseek-v3.1-terminus", "deepseek-v3.1"),
    ("deepseek-v3.2-exp", "deepseek-v3.2"),
    ("llama-3-8b", "llama-3.1-8b"),
    ("llama-3-70b", "llama-3.1-70b"),
    ("mixtral-8x7b-v0.1", "mixtral-8x7b"),
    ("mixtral-8x22b-v0.1", "mixtral-8x22b"),
];

/// The preset that a name or repository means: by preset name, by repository, or by the repository
/// without owner and without words for formats and tuning.
fn find_model(name: &str) -> Option<&'static ModelShape> {
    if let Some(shape) = preset::model(name) {
        return Some(shape);
    }
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
    let short = SAME_SIZES
        .iter()
        .find(|(other, _)| *other == short)
        .map_or(short.as_str(), |(_, same)| same);
    preset::model(short).or_else(|| {
        preset::MODELS.iter().find(|model| {
            let source = model.source.rsplit('/').next().unwrap_or(&model.source);
            let source = source.to_ascii_lowercase();
            let words: Vec<&str> = source.split('-').filter(|w| !WORDS.contains(w)).collect();
            words == kept
        })
    })
}

/// The preset that a system's name means: `h200_sxm`, `H200-SXM`, `h200`.
fn find_gpu(name: &str) -> Option<&'static Gpu> {
    let wanted = plain(name);
    let exact = preset::GPUS.iter().find(|gpu| plain(gpu.name) == wanted);
    exact.or_else(|| {
        let mut starting = preset::GPUS
            .iter()
            .filter(|gpu| !wanted.is_empty() && plain(gpu.name).starts_with(&wanted));
        // `h200` means its one kind; `h100` the SXM module.
        let first = starting.clone().find(|gpu| gpu.name.contains("sxm"));
        first.or_else(|| starting.next())
    })
}

/// Generation of a GPU: kernels and frameworks' overheads are shared within one.
pub fn generation(gpu: &str) -> &'static str {
    let starts = |names: &[&str]| names.iter().any(|name| gpu.starts_with(name));
    if starts(&["h100", "h200", "h20", "gh200"]) {
        "hopper"
    } else if starts(&["b200", "b300", "gb200", "gb300"]) {
        "blackwell"
    } else if starts(&["mi"]) {
        "cdna"
    } else if starts(&["rtx-pro", "rtx-50"]) {
        "blackwell-gddr"
    } else if starts(&["l4", "rtx-40"]) {
        "ada"
    } else {
        "older"
    }
}

impl Formats {
    /// Formats of the parts of a checkpoint of `shape` in `precision`.
    ///
    /// `int4` mixtures quantize routed experts alone (Kimi-K2.5's compressed-tensors); NVFP4
    /// checkpoints of latent attention leave its projections in 16 bits (nvidia/DeepSeek-R1-NVFP4).
    /// A checkpoint that brings experts of 4 bits has them in every precision (gpt-oss). Mixtures
    /// in FP8 or less are taken to have an FP8 KV cache.
    pub fn of(shape: &ModelShape, precision: Dtype) -> Formats {
        let latent = matches!(shape.attention, Attention::Latent { .. });
        let packed = shape
            .experts
            .map(|e| e.weights)
            .filter(|w| *w == Dtype::Mxfp4);
        let kv_cache = match precision {
            Dtype::Bf16 => Dtype::Bf16,
            _ if packed.is_some() => Dtype::Bf16,
            _ => Dtype::Fp8,
        };
        if let Some(experts) = packed {
            return Formats {
                attention: Dtype::Bf16,
                mlp: Dtype::Bf16,
                experts,
                kv_cache,
            };
        }
        let (attention, mlp) = match precision {
            Dtype::Int4 if shape.experts.is_some() => (Dtype::Bf16, Dtype::Bf16),
            Dtype::Nvfp4 | Dtype::Mxfp4 if latent => (Dtype::Bf16, precision),
            _ => (precision, precision),
        };
        Formats {
            attention,
            mlp,
            experts: precision,
            kv_cache,
        }
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
        let shape = load(name)
            .or_else(|| find_model(name).cloned())
            .ok_or_else(|| Refusal::Model(name.to_owned()))?;
        let system = text("system")?;
        let gpu = find_gpu(system).ok_or_else(|| Refusal::Gpu(system.to_owned()))?;
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
            assumed.push("precision: bf16".to_owned());
            (Dtype::Bf16, "bf16")
        };
        let positive = |column: &'static str, most: f64| match row.get(column) {
            None => Ok(None),
            Some(found) => match found.parse::<f64>() {
                Ok(x) if x > 0.0 && x <= most => Ok(Some(x)),
                // A size of 0 stands for "not stated".
                Ok(0.0) => Ok(None),
                _ => Err(Refusal::Invalid {
                    column,
                    found: found.chars().take(40).collect(),
                    must: "a positive number",
                }),
            },
        };
        let isl = positive("isl", 1e7)?.ok_or(Refusal::Missing("isl"))?;
        let osl = positive("osl", 1e7)?.ok_or(Refusal::Missing("osl"))?;
        let split = match row.get("mode") {
            Some(mode) => mode.to_ascii_lowercase().starts_with("dis"),
            None => row.get("decode_batch_size").is_some(),
        };
        let mut sizes = |columns: [&'static str; 5]| -> Result<Parallel, Refusal> {
            let mut found = [None; 5];
            for (slot, column) in found.iter_mut().zip(columns) {
                *slot = positive(column, 4096.0)?.map(|x| x as u32);
            }
            let [tensor, pipeline, data, expert_tensor, expert] = found;
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
            if shape.experts.is_some() && expert_tensor * expert != group {
                assumed.push(format!(
                    "impossible sizes: experts over {} GPUs, attention over {group}",
                    expert_tensor * expert
                ));
            }
            Ok(Parallel {
                tensor,
                pipeline: pipeline.unwrap_or(1),
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
                let found = positive(column, 1e6)?;
                if found.is_none() {
                    assumed.push(format!("{column}: 1"));
                }
                Ok(found.unwrap_or(1.0) as u32)
            };
            let serving = Serving::Disaggregated {
                prefill_workers: workers("prefill_num_workers")?,
                prefill,
                decode_workers: workers("decode_num_workers")?,
            };
            (decode, serving, positive("decode_batch_size", 1e6)?)
        } else {
            let sizes = sizes([
                "tp_size",
                "pp_size",
                "attention_dp_size",
                "moe_tp_size",
                "moe_ep_size",
            ])?;
            (sizes, Serving::Aggregated, positive("batch_size", 1e6)?)
        };
        let column = if split {
            "decode_batch_size"
        } else {
            "batch_size"
        };
        Ok(Deployment {
            formats: Formats::of(&shape, dtype),
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
            isl,
            osl,
            batch: batch.ok_or(Refusal::Missing(column))?,
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
            assert_eq!(find_model(name).map(|m| &*m.name), Some(expected), "{name}");
        }
        assert!(find_model("acme/unheard-of-7b").is_none());
        for (name, expected) in [
            ("h200_sxm", "h200-sxm"),
            ("B300", "b300-sxm"),
            ("gb300", "gb300"),
            ("h100", "h100-sxm"),
            ("rtx_pro_6000", "rtx-pro-6000"),
        ] {
            assert_eq!(find_gpu(name).map(|g| g.name), Some(expected), "{name}");
        }
        assert!(find_gpu("").is_none() && find_gpu("abacus").is_none());
    }

    #[test]
    fn what_a_row_lacks_is_assumed_by_name_or_refused_by_name() {
        let head = "model_path,system,backend,precision,isl,osl,batch_size,tp_size,attention_dp_size,moe_ep_size\n";
        let rows = read(&format!(
            "{head}openai/gpt-oss-120b,h100,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100,vllm,fp4,1024,512,8,,,\n\
             acme/x,h100,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,abacus,vllm,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100,ollama,fp4,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100,vllm,fp3,1024,512,8,2,,\n\
             openai/gpt-oss-120b,h100,vllm,fp4,,512,8,2,,\n\
             openai/gpt-oss-120b,h100,vllm,fp4,1024,512,-1,2,,\n\
             openai/gpt-oss-120b,h100,vllm,fp4,1024,512,8,2,2,2\n"
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
                "unknown GPU: abacus",
                "unknown framework: ollama",
                "unknown precision: fp3",
                "missing: isl",
                "invalid: batch_size is \"-1\", but must be a positive number",
            ]
        );
        let last = rows[8].as_ref().unwrap();
        assert_eq!(last.parallel.gpus(), 4);
        assert_eq!((last.parallel.expert_tensor, last.parallel.expert), (2, 2));
    }
}
