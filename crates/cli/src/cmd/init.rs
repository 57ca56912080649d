//! `slipstream init`: a commented cluster file and workload file to begin with.

use std::fs::OpenOptions;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::builder::NonEmptyStringValueParser;
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_config::preset::{self, GPUS, MODELS};
use slipstream_config::workload_file;
use slipstream_report::table::grouped;

use crate::out;

/// Flags of `slipstream init`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Model: a name of `slipstream presets` [default: qwen3-8b]
    #[arg(long, value_name = "PRESET", value_parser = NonEmptyStringValueParser::new())]
    model: Option<String>,
    /// GPU: a name of `slipstream presets` [default: h100-sxm]
    #[arg(long, value_name = "PRESET", value_parser = NonEmptyStringValueParser::new())]
    gpu: Option<String>,
    /// Requests per second [default: 4]
    #[arg(long, value_name = "PER_S")]
    rate: Option<f64>,
    /// Mean tokens per prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(64..=100_000))]
    isl: u32,
    /// Mean tokens per answer
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    osl: u32,
    /// Workers
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Folder of the two files; it is created if it does not exist
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Replace existing files
    #[arg(long)]
    force: bool,
}

const MODEL: &str = "qwen3-8b";
const GPU: &str = "h100-sxm";
const RATE: f64 = 4.0;

/// Writes both files. On a terminal, flags that choose the model, the GPU and the rate are asked for if none
/// of them is given.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut choice = Choice {
        model: args.model.clone().unwrap_or_else(|| MODEL.into()),
        gpu: args.gpu.clone().unwrap_or_else(|| GPU.into()),
        rate: args.rate.unwrap_or(RATE),
        isl: args.isl,
        osl: args.osl,
        workers: args.workers,
    };
    let stated = args.model.is_some() || args.gpu.is_some() || args.rate.is_some();
    if !stated && std::io::stdin().is_terminal() && std::io::stderr().is_terminal() {
        choice.ask(&mut std::io::stdin().lock())?;
    }
    let files = choice.files()?;
    std::fs::create_dir_all(&args.dir).with_context(|| format!("making {}", args.dir.display()))?;
    let paths = ["cluster.toml", "workload.toml"].map(|name| match args.dir.as_os_str() {
        here if here == "." => PathBuf::from(name),
        _ => args.dir.join(name),
    });
    // Both or none: a new cluster file and an old workload would not belong together.
    if let Some(path) = paths.iter().find(|path| path.exists() && !args.force) {
        bail!(
            "{} exists; remove it, name another folder by --dir, or replace it by --force",
            path.display()
        );
    }
    for (path, text) in paths.iter().zip([&files.cluster, &files.workload]) {
        save(path, text, args.force).with_context(|| format!("writing {}", path.display()))?;
    }
    let [cluster, workload] = paths.map(|path| path.display().to_string());
    out::print(&format!(
        "{cluster}: {} of {} on {} {} each\n{workload}: {} requests/s\n\n\
         slipstream simulate {cluster} -w {workload}\n\
         slipstream plan {workload} --cluster {cluster} --model {} --gpus {}\n\
         slipstream serve {cluster}\n",
        counted(choice.workers, "worker"),
        choice.model,
        files.tensor_parallel,
        choice.gpu,
        choice.rate,
        choice.model,
        choice.gpu,
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn save(path: &Path, text: &str, replace: bool) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    if replace {
        options.create(true).truncate(true);
    } else {
        options.create_new(true);
    }
    options.open(path)?.write_all(text.as_bytes())
}

fn counted(n: u32, noun: &str) -> String {
    slipstream_report::table::counted(u64::from(n), noun)
}

/// Content of the files.
struct Choice {
    model: String,
    gpu: String,
    rate: f64,
    isl: u32,
    osl: u32,
    workers: u32,
}

/// The files, which were read back and found valid.
struct Files {
    cluster: String,
    workload: String,
    tensor_parallel: u32,
}

impl Choice {
    /// Asks three questions; an empty answer takes the default.
    fn ask(&mut self, answers: &mut dyn BufRead) -> anyhow::Result<()> {
        errln!("Empty answers take the value in brackets. `slipstream presets` lists all names.");
        self.model = answer(answers, "Model", &self.model, |text| {
            model(text).map(|_| text.to_owned())
        })?;
        self.gpu = answer(answers, "GPU", &self.gpu, |text| {
            gpu(text).map(|()| text.to_owned())
        })?;
        let rate = self.rate.to_string();
        self.rate = answer(answers, "Requests per second", &rate, |text| {
            let parsed = text.parse().ok();
            let rate = parsed.ok_or_else(|| anyhow::anyhow!("`{text}` is not a number"))?;
            check_rate(rate).map(|()| rate)
        })?;
        Ok(())
    }

    fn files(&self) -> anyhow::Result<Files> {
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
    let (cluster, _) = file::read(doc, super::files::read).map_err(|errors| errors.to_string())?;
    Ok(cluster)
}

/// The context of model `name`, tokens.
fn model(name: &str) -> anyhow::Result<u32> {
    let found = preset::model(name).with_context(|| {
        unknown(
            "model",
            name,
            MODELS.iter().map(|model| model.name.as_ref()),
        )
    })?;
    Ok(found.max_positions)
}

fn gpu(name: &str) -> anyhow::Result<()> {
    preset::gpu(name)
        .map(|_| ())
        .with_context(|| unknown("GPU", name, GPUS.iter().map(|gpu| gpu.name.as_ref())))
}

/// Names with a part of `name`, such as a model's family.
fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let family = name
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '.')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    let near: Vec<&str> = known
        .filter(|known| !family.is_empty() && known.starts_with(&family))
        .collect();
    let near = if near.is_empty() {
        "`slipstream presets` lists all".to_owned()
    } else {
        format!("did you mean {}?", near.join(", "))
    };
    format!("there is no {what} `{name}`; {near}")
}

fn check_rate(rate: f64) -> anyhow::Result<()> {
    ensure!(
        rate > 0.0 && rate <= 10_000.0,
        "{rate} requests per second are outside 0 to 10000"
    );
    Ok(())
}

/// Asks until `parse` takes the answer.
fn answer<T>(
    answers: &mut dyn BufRead,
    question: &str,
    default: &str,
    parse: impl Fn(&str) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut refused = None;
    loop {
        err!("{question} [{default}]: ");
        let mut line = String::new();
        let read = answers.read_line(&mut line).context("reading the answer")?;
        // The input ended behind an answer that was refused: the user did not mean the default.
        if read == 0
            && let Some(error) = refused
        {
            return Err(error);
        }
        let text = match line.trim() {
            "" => default,
            text => text,
        };
        match parse(text) {
            Ok(value) => return Ok(value),
            Err(error) if read == 0 => return Err(error),
            Err(error) => {
                errln!("{error:#}");
                refused = Some(error);
            }
        }
    }
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
    fn wrong_answers_are_asked_again() {
        let mut choice = choice(MODEL, GPU);
        let mut answers = "llama\nllama-3.1-8b\n\n0\nfast\n12.5\n".as_bytes();
        choice.ask(&mut answers).unwrap();
        assert_eq!(
            (choice.model.as_str(), choice.gpu.as_str(), choice.rate),
            ("llama-3.1-8b", GPU, 12.5)
        );
        assert!(answers.is_empty(), "every answer was read");
        let end = choice.ask(&mut "llama".as_bytes()).unwrap_err();
        assert!(end.to_string().contains("did you mean llama-"), "{end}");
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
