//! `slipstream init`: a commented cluster file and workload file to begin with.

use std::fs::OpenOptions;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::builder::NonEmptyStringValueParser;
use slipstream_study::starter::{self, Choice};

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
        ask(&mut choice, &mut std::io::stdin().lock())?;
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

pub(super) fn save(path: &Path, text: &str, replace: bool) -> std::io::Result<()> {
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

/// Asks three questions; an empty answer takes the default.
fn ask(choice: &mut Choice, answers: &mut dyn BufRead) -> anyhow::Result<()> {
    errln!("Empty answers take the value in brackets. `slipstream presets` lists all names.");
    choice.model = answer(answers, "Model", &choice.model, |text| {
        starter::model(text).map(|_| text.to_owned())
    })?;
    choice.gpu = answer(answers, "GPU", &choice.gpu, |text| {
        starter::gpu(text).map(|()| text.to_owned())
    })?;
    let rate = choice.rate.to_string();
    choice.rate = answer(answers, "Requests per second", &rate, |text| {
        let parsed = text.parse().ok();
        let rate = parsed.ok_or_else(|| anyhow::anyhow!("`{text}` is not a number"))?;
        starter::check_rate(rate).map(|()| rate)
    })?;
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

    #[test]
    fn wrong_answers_are_asked_again() {
        let mut choice = Choice {
            model: MODEL.into(),
            gpu: GPU.into(),
            rate: RATE,
            isl: 1000,
            osl: 200,
            workers: 2,
        };
        let mut answers = "llama\nllama-3.1-8b\n\n0\nfast\n12.5\n".as_bytes();
        ask(&mut choice, &mut answers).unwrap();
        assert_eq!(
            (choice.model.as_str(), choice.gpu.as_str(), choice.rate),
            ("llama-3.1-8b", GPU, 12.5)
        );
        assert!(answers.is_empty(), "every answer was read");
        let end = ask(&mut choice, &mut "llama".as_bytes()).unwrap_err();
        assert!(end.to_string().contains("did you mean llama-"), "{end}");
    }
}
