//! A commented cluster file and workload file to begin with.

use anyhow::{Context, ensure};
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::{Doc, suggestion};
use slipstream_config::preset::{self, GPUS, MODELS};
use slipstream_config::workload_file;
use slipstream_report::table::grouped;

/// What the files of a new cluster describe.
#[derive(Clone, Debug)]
pub struct Choice {
    /// A name of a preset.
    pub model: String,
    /// A name of a preset.
    pub gpu: String,
    /// Requests per second.
    pub rate: f64,
    /// Mean tokens per prompt.
    pub isl: u32,
    /// Mean tokens per answer.
    pub osl: u32,
    /// Number of workers.
    pub workers: u32,
}

/// Both files, which were read back and found valid.
#[derive(Clone, Debug)]
pub struct Files {
    /// The cluster file.
    pub cluster: String,
    /// The workload file.
    pub workload: String,
    /// GPUs per worker.
    pub tensor_parallel: u32,
}

impl Choice {
    /// Writes both files.
    ///
    /// # Errors
    /// An unknown preset, a rate or lengths that no file can have, or a model that does not fit on eight GPUs.
    pub fn files(&self) -> anyhow::Result<Files> {
        let limit = model(&self.model)?;
        gpu(&self.gpu)?;
        check_rate(self.rate)?;
        let longest = 4 * (self.isl + self.osl);
        ensure!(
            longest <= limit,
            "prompts of {} and answers of {} tokens on average are up to {} together, but {} takes {}; \
             lower --isl or --osl, or choose another model",
            grouped(u64::from(self.isl)),
            grouped(u64::from(self.osl)),
            grouped(u64::from(longest)),
            self.model,
            grouped(u64::from(limit)),
        );
        let workload = self.workload();
        workload_file::read(Doc::parse("workload.toml", workload.as_bytes()))
            .map_err(|errors| anyhow::anyhow!("{errors}"))?;
        let (tensor_parallel, blocks) = self.layout(longest)?;
        Ok(Files {
            cluster: self.cluster(tensor_parallel, Some(blocks)),
            workload,
            tensor_parallel,
        })
    }

    /// The smallest tensor-parallel size whose KV cache holds 16 of the longest requests, or else the largest one
    /// that works; and the blocks of that cache.
    fn layout(&self, longest: u32) -> anyhow::Result<(u32, u32)> {
        let mut found = None;
        let mut reason = String::new();
        for size in [1, 2, 4, 8] {
            match read(&self.cluster(size, None)) {
                Err(errors) => reason = errors,
                Ok(cluster) => {
                    let engine = &cluster.pools[0].engine;
                    let tokens = u64::from(engine.num_gpu_blocks) * u64::from(engine.block_size);
                    if engine.max_model_len < longest {
                        reason = format!(
                            "the KV cache holds {} tokens, fewer than one request of {}",
                            grouped(tokens),
                            grouped(u64::from(longest))
                        );
                        continue;
                    }
                    found = Some((size, engine.num_gpu_blocks));
                    if tokens >= 16 * u64::from(longest) {
                        break;
                    }
                }
            }
        }
        found.with_context(|| {
            format!(
                "{} does not run on 1, 2, 4 or 8 {}: {reason}; choose another GPU or model \
                 (`slipstream presets`)",
                self.model, self.gpu
            )
        })
    }

    fn cluster(&self, tensor_parallel: u32, blocks: Option<u32>) -> String {
        let Choice {
            model,
            gpu,
            workers,
            ..
        } = self;
        let blocks = blocks.map_or_else(String::new, |blocks| {
            format!(
                "# The KV cache takes the memory that the weights leave: here {} blocks of 16 tokens.\n\
                 # num_gpu_blocks = {blocks}\n",
                grouped(u64::from(blocks))
            )
        });
        format!(
            "# A cluster of modelled engines. Every key has a default: docs/cluster-file.md lists them, and\n\
             # `slipstream serve cluster.toml --print-config` prints each value with its origin.\n\
             \n\
             [model]\n\
             preset = \"{model}\"\n\
             # Any other model: config = \"path/to/config.json\"\n\
             \n\
             [engine]\n\
             tensor_parallel_size = {tensor_parallel} # GPUs per worker\n\
             block_size = 16 # tokens per block of the KV cache\n\
             {blocks}\
             max_num_seqs = 256 # requests that a worker computes at a time; the others wait\n\
             max_num_batched_tokens = 8192 # tokens per step; larger steps raise throughput and ITL\n\
             \n\
             [engine.timing]\n\
             gpu = \"{gpu}\"\n\
             dtype = \"bf16\" # format of weights and products; \"fp8\" if the GPU has it\n\
             \n\
             [pool.main]\n\
             workers = {workers}\n\
             \n\
             [router]\n\
             policy = \"kv\" # to the worker with the least work left, cached prefixes counted; others: docs/routing.md\n\
             \n\
             [live]\n\
             listen = \"127.0.0.1:8000\" # for `slipstream serve`; other hosts cannot reach this address\n"
        )
    }

    fn workload(&self) -> String {
        let Choice { rate, isl, osl, .. } = self;
        // A minute, but enough requests for a 99th percentile.
        let requests = (60.0 * rate).clamp(1000.0, 100_000.0).ceil();
        // Half of a prompt of average length is shared.
        let shared = isl / 2;
        format!(
            "# Requests and the times at which they arrive. docs/workload.md lists every key, and how to replay a\n\
             # recorded trace instead.\n\
             seed = 1 # the same seed gives the same requests\n\
             requests = {requests}\n\
             \n\
             # Tokens per prompt (shared prefix included) and per answer.\n\
             isl = {{ kind = \"lognormal\", mean = {isl}, cv = 0.5, min = {min}, max = {isl_max} }}\n\
             osl = {{ kind = \"lognormal\", mean = {osl}, cv = 0.5, min = 1, max = {osl_max} }}\n\
             \n\
             # Objectives: `plan` sizes for them, and `bench` and `simulate` count the requests that meet them.\n\
             slo = \"ttft=1s,itl=50ms\"\n\
             \n\
             [arrival]\n\
             kind = \"poisson\"\n\
             rate_per_s = {rate:?}\n\
             \n\
             # Eight system prompts that requests share, the first ones more often. Without this table no prompt has\n\
             # a cached prefix.\n\
             [[prefix]]\n\
             branches = 8\n\
             tokens = {shared}\n\
             skew = 0.5\n",
            min = shared + 1,
            isl_max = 4 * isl,
            osl_max = 4 * osl,
        )
    }
}

fn read(cluster: &str) -> Result<Cluster, String> {
    let doc = Doc::parse("cluster.toml", cluster.as_bytes());
    let (cluster, _) = file::read(doc, crate::files::read).map_err(|errors| errors.to_string())?;
    Ok(cluster)
}

/// The context of model `name`, tokens.
///
/// # Errors
/// There is no such preset.
pub fn model(name: &str) -> anyhow::Result<u32> {
    let found = preset::model(name).with_context(|| {
        unknown(
            "model",
            name,
            MODELS.iter().map(|model| model.name.as_ref()),
        )
    })?;
    Ok(found.max_positions)
}

/// Checks that GPU `name` is a preset.
///
/// # Errors
/// There is no such preset.
pub fn gpu(name: &str) -> anyhow::Result<()> {
    preset::gpu(name)
        .map(|_| ())
        .with_context(|| unknown("GPU", name, GPUS.iter().map(|gpu| gpu.name.as_ref())))
}

/// There is no such preset; those that resemble it.
fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.collect();
    let near = suggestion(name, &known);
    format!("there is no {what} `{name}`; {near}")
}

/// Checks a rate, requests per second.
///
/// # Errors
/// It is outside of what a workload file takes.
pub fn check_rate(rate: f64) -> anyhow::Result<()> {
    ensure!(
        rate > 0.0 && rate <= 10_000.0,
        "{rate} requests per second are outside 0 to 10000"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(model: &str, gpu: &str) -> Choice {
        Choice {
            model: model.into(),
            gpu: gpu.into(),
            rate: 4.0,
            isl: 1000,
            osl: 200,
            workers: 2,
        }
    }

    /// Every model on a large and a small GPU: files that can be read, or a reason.
    #[test]
    fn files_are_valid_or_refused() {
        let mut written = 0;
        for model in MODELS.iter() {
            for gpu in ["h100-sxm", "b300-sxm", "t4"] {
                match choice(model.name.as_ref(), gpu).files() {
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains(model.name.as_ref()), "{text}");
                    }
                    Ok(files) => {
                        let cluster = read(&files.cluster).unwrap();
                        let engine = &cluster.pools[0].engine;
                        assert_eq!(engine.tensor_parallel_size, files.tensor_parallel);
                        // The comment states the cache of this very file.
                        let blocks = format!("# num_gpu_blocks = {}\n", engine.num_gpu_blocks);
                        assert!(files.cluster.contains(&blocks), "{}", files.cluster);
                        written += 1;
                    }
                }
            }
        }
        assert!(written > MODELS.len(), "{written}");
    }

    #[test]
    fn a_large_model_gets_more_gpus() {
        let size = |model| choice(model, "h100-sxm").files().unwrap().tensor_parallel;
        assert_eq!(size("qwen3-8b"), 1);
        assert!(size("llama-3.1-70b") > 1);
    }

    #[test]
    fn requests_that_no_worker_could_hold_are_refused() {
        let mut long = choice("llama-2-7b", "h100-sxm");
        long.isl = 3000;
        let error = long.files().err().unwrap().to_string();
        assert!(
            error.contains("4,096") && error.contains("--isl"),
            "{error}"
        );
        long.rate = f64::NAN;
        long.isl = 100;
        assert!(long.files().is_err());
    }
}
