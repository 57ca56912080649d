//! Reads a deployment from a row of a table.

use slipstream_base::width::floor_u32;
use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{self, Gpu, ModelShape};

use crate::deployment::{Deployment, Formats, Framework, Parallel, Refusal, Serving};
use crate::memory::check_memory;
use crate::names::{
    checkpoint_format, find_gpu, kv_cache_of, precision_of, precision_word, unknown_gpu,
};
use crate::table::Row;

/// Largest parallel size.
const SIZE_MAX: u32 = 4096;
/// Most workers of one side of a disaggregated deployment.
const WORKERS_MAX: u32 = 100_000;
/// Most requests under way on one rank.
const BATCH_MAX: u32 = 1_000_000;
/// Longest input or output, tokens.
const TOKENS_MAX: u32 = 10_000_000;

/// Columns of the sizes of a worker: tensor, pipeline, attention-data, and of experts tensor and expert.
type SizeColumns = [&'static str; 5];

const SIZES: SizeColumns = [
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
];
const PREFILL_SIZES: SizeColumns = [
    "prefill_tp_size",
    "prefill_pp_size",
    "prefill_attention_dp_size",
    "prefill_moe_tp_size",
    "prefill_moe_ep_size",
];
const DECODE_SIZES: SizeColumns = [
    "decode_tp_size",
    "decode_pp_size",
    "decode_attention_dp_size",
    "decode_moe_tp_size",
    "decode_moe_ep_size",
];

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
        let mut reader = RowReader {
            row,
            assumed: Vec::new(),
        };
        let name = reader.text("model_path")?;
        let loaded = load(name);
        let is_loaded = loaded.is_some();
        let shape = loaded
            .or_else(|| preset::find_model(name))
            .ok_or_else(|| Refusal::Model(name.to_owned()))?;
        let system = reader.text("system")?;
        let gpu = find_gpu(system).ok_or_else(|| unknown_gpu(system))?;
        let backend = reader.text("backend")?;
        let framework =
            Framework::named(backend).ok_or_else(|| Refusal::Framework(backend.to_owned()))?;
        let (dtype, precision) = reader.precision(name, &shape, is_loaded)?;
        let (isl, osl) = reader.lengths(&shape)?;
        let (parallel, serving, batch) = if reader.is_disaggregated()? {
            let prefill = reader.sizes(PREFILL_SIZES, &shape)?;
            let decode = reader.sizes(DECODE_SIZES, &shape)?;
            let serving = Serving::Disaggregated {
                prefill_workers: reader.workers("prefill_num_workers")?,
                prefill,
                decode_workers: reader.workers("decode_num_workers")?,
            };
            (decode, serving, "decode_batch_size")
        } else {
            let sizes = reader.sizes(SIZES, &shape)?;
            (sizes, Serving::Aggregated, "batch_size")
        };
        let batch = (batch, reader.integer(batch, BATCH_MAX)?);
        let formats = reader.formats(&shape, dtype)?;
        check_sizes(&shape, gpu, formats, (parallel, serving), (isl, osl))?;
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
            batch: f64::from(batch.1.ok_or(Refusal::Missing(batch.0))?),
            assumed: reader.assumed,
        })
    }
}

/// Refuses weights and caches that do not fit into the memory of the GPUs.
fn check_sizes(
    shape: &ModelShape,
    gpu: &Gpu,
    formats: Formats,
    (parallel, serving): (Parallel, Serving),
    (isl, osl): (u32, u32),
) -> Result<(), Refusal> {
    let check =
        |parallel, tokens, column| check_memory(shape, gpu, formats, parallel, tokens, column);
    let tokens = u64::from(isl) + u64::from(osl);
    match serving {
        Serving::Aggregated => check(parallel, tokens, "tp_size"),
        Serving::Disaggregated { prefill, .. } => {
            // A request on a prefill worker holds no output.
            check(prefill, u64::from(isl), "prefill_tp_size")?;
            check(parallel, tokens, "decode_tp_size")
        }
    }
}

/// A row that is read, and what was assumed for it.
struct RowReader<'r> {
    row: &'r Row,
    assumed: Vec<String>,
}

impl<'r> RowReader<'r> {
    fn text(&self, column: &'static str) -> Result<&'r str, Refusal> {
        self.row.get(column).ok_or(Refusal::Missing(column))
    }

    /// Tables written by data frames may hold integers as `8.0`.
    fn integer(&self, column: &'static str, most: u32) -> Result<Option<u32>, Refusal> {
        let Some(found) = self.row.get(column) else {
            return Ok(None);
        };
        match found.parse::<f64>() {
            Ok(x) if x >= 1.0 && x <= f64::from(most) && x.fract() == 0.0 => Ok(Some(floor_u32(x))),
            _ => Err(Refusal::Invalid {
                column,
                found: found.chars().take(40).collect(),
                must: format!("an integer from 1 to {most}"),
            }),
        }
    }

    /// Measured tables write 0 for a size that does not apply: experts of a dense model.
    fn size_or_zero(&self, column: &'static str) -> Result<Option<u32>, Refusal> {
        match self.row.number(column) {
            Some(0.0) => Ok(None),
            _ => self.integer(column, SIZE_MAX),
        }
    }

    /// Format of the weights of the model called `name`, and the word for it. `is_loaded`: its `config.json` was given.
    fn precision(
        &mut self,
        name: &str,
        shape: &ModelShape,
        is_loaded: bool,
    ) -> Result<(Dtype, &'static str), Refusal> {
        let row = self.row;
        let of_experts = || {
            row.get("moe_quant_mode")
                .filter(|_| shape.experts.is_some())
        };
        let word = row
            .get("precision")
            .or_else(of_experts)
            .or_else(|| row.get("gemm_quant_mode"));
        if let Some(word) = word {
            return precision_of(word).ok_or_else(|| Refusal::Precision(word.to_owned()));
        }
        let (format, origin) = checkpoint_format(name, shape, is_loaded)?;
        let precision = precision_word(format);
        self.assumed.push(format!("precision: {precision}{origin}"));
        Ok((format, precision))
    }

    /// Input and output tokens of a request.
    fn lengths(&self, shape: &ModelShape) -> Result<(u32, u32), Refusal> {
        let length = |column| {
            let length = self.integer(column, TOKENS_MAX)?;
            length.ok_or(Refusal::Missing(column))
        };
        let (isl, osl) = (length("isl")?, length("osl")?);
        let tokens = u64::from(isl) + u64::from(osl);
        if tokens > u64::from(shape.max_positions) {
            return Err(Refusal::Context {
                tokens,
                limit: shape.max_positions,
                model: shape.name.to_string(),
            });
        }
        Ok((isl, osl))
    }

    /// Whether prompts are computed by other workers than answers.
    fn is_disaggregated(&self) -> Result<bool, Refusal> {
        let Some(mode) = self.row.get("mode") else {
            return Ok(self.row.get("decode_batch_size").is_some());
        };
        match mode.to_ascii_lowercase().as_str() {
            "agg" | "aggregated" => Ok(false),
            "disagg" | "disaggregated" => Ok(true),
            _ => Err(Refusal::Invalid {
                column: "mode",
                found: mode.chars().take(40).collect(),
                must: "`agg` or `disagg`".to_owned(),
            }),
        }
    }

    /// How the GPUs of a worker share the model.
    fn sizes(&mut self, columns: SizeColumns, shape: &ModelShape) -> Result<Parallel, Refusal> {
        let [tensor, pipeline] = [
            self.integer(columns[0], SIZE_MAX)?,
            self.integer(columns[1], SIZE_MAX)?,
        ];
        let [data, expert_tensor, expert] = [
            self.size_or_zero(columns[2])?,
            self.size_or_zero(columns[3])?,
            self.size_or_zero(columns[4])?,
        ];
        if tensor.is_none() {
            self.assumed.push(format!("{}: 1", columns[0]));
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
        let parallel = Parallel {
            tensor,
            pipeline: pipeline.unwrap_or(1),
            attention_data,
            expert_tensor,
            expert,
        };
        check_parallel(parallel, columns, shape)?;
        Ok(parallel)
    }

    fn workers(&mut self, column: &'static str) -> Result<u32, Refusal> {
        let found = self.integer(column, WORKERS_MAX)?;
        if found.is_none() {
            self.assumed.push(format!("{column}: 1"));
        }
        Ok(found.unwrap_or(1))
    }

    /// Formats of the model's parts, if its weights have `dtype`.
    fn formats(&mut self, shape: &ModelShape, dtype: Dtype) -> Result<Formats, Refusal> {
        let mut formats = Formats::of(shape, dtype);
        match self.row.get("kv_cache_dtype") {
            Some(found) => formats.kv_cache = kv_cache_of(found)?,
            None if formats.kv_cache != Dtype::Bf16 => {
                let word = precision_word(formats.kv_cache);
                self.assumed.push(format!("kv_cache_dtype: {word}"));
            }
            None => {}
        }
        Ok(formats)
    }
}

/// Refuses sizes that contradict each other or the model.
fn check_parallel(
    parallel: Parallel,
    columns: SizeColumns,
    shape: &ModelShape,
) -> Result<(), Refusal> {
    let Parallel {
        tensor,
        pipeline,
        attention_data,
        expert_tensor,
        expert,
    } = parallel;
    let group = tensor * attention_data;
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{GPU_ALIASES, plain};
    use crate::table::{read_rows, unknown_columns};

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
