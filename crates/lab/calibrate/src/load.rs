//! Loads for a running engine, chosen so that each term of its steps shows in one of them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use slipstream_base::width::floor_u64;
use slipstream_bench::{Config, Endpoint, PromptForm, Target};
use slipstream_config::cluster::EngineConfig;
use slipstream_config::workload_file::{Arrival, Class, Content, Dist, Workload};
use slipstream_probe::Client;
use slipstream_probe::prometheus::Samples;
use slipstream_report::Objectives;
use slipstream_workload::Vocabulary;
use tokio::runtime::Runtime;

use crate::Note;
use crate::records::MeasuredRequest;

/// Bounds of the loads, and how they are sent.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// No request is started after this time, all loads together.
    pub max_duration: Duration,
    /// Requests at a time at most.
    pub max_concurrency: u32,
    /// Longest prompt, tokens.
    pub max_prompt: u32,
    /// Time limit of a request.
    pub timeout: Duration,
    /// Model name; `None`: the first of the server's list.
    pub model: Option<String>,
    /// API key of the engine.
    pub api_key: Option<String>,
    /// Form of prompts.
    pub form: PromptForm,
    /// Token ids of prompts in tokens.
    pub token_ids: std::ops::Range<u32>,
    /// Seed of lengths and texts.
    pub seed: u64,
}

/// Requests of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Its name, as the part of the data.
    pub name: &'static str,
    /// The terms that it is for.
    why: &'static str,
    concurrency: u32,
    /// Least and most tokens.
    input: [u32; 2],
    output: [u32; 2],
    /// Requests of each round.
    requests: u32,
}

/// Rounds over all loads: a disturbance of the host hits a part of each, not the whole of one.
const ROUNDS: u32 = 3;

/// The loads for an engine of `engine`.
///
/// # Errors
/// The engine has no room for them.
pub fn plan(args: &LoadOptions, engine: &EngineConfig) -> anyhow::Result<Vec<Load>> {
    const LONGEST_ANSWER: u32 = 128;
    let room = engine.max_model_len.saturating_sub(LONGEST_ANSWER + 32);
    let long = args.max_prompt.min(room);
    ensure!(
        long >= 128,
        "the engine's `max_model_len` of {} leaves no room for prompts of 128 tokens with answers of {LONGEST_ANSWER}",
        engine.max_model_len
    );
    let most = args.max_concurrency.min(engine.max_num_seqs).max(2);
    let (short, middle) = (32.min(long / 4), (long / 4).min(512));
    let load = |name, why, concurrency, input, output, requests| Load {
        name,
        why,
        concurrency,
        input,
        output,
        requests,
    };
    Ok(vec![
        load(
            "one short prompt at a time",
            "api, base",
            1,
            [short, short],
            [16, 48],
            6,
        ),
        load(
            "one prompt of the middle at a time",
            "prefill token",
            1,
            [middle / 2, middle],
            [8, 24],
            6,
        ),
        load(
            "one long prompt at a time",
            "prefill token, pair",
            1,
            [long / 2, long],
            [8, 16],
            5,
        ),
        load(
            "few at once",
            "decode",
            most.min(4),
            [short, middle],
            [24, 96],
            12,
        ),
        load(
            "many at once",
            "decode",
            most,
            [short, middle],
            [32, LONGEST_ANSWER],
            2 * most,
        ),
        load(
            "some, long prompts",
            "context",
            most.div_ceil(2),
            [middle, long],
            [32, LONGEST_ANSWER],
            most,
        ),
    ])
}

/// The loads in words.
pub fn table(loads: &[Load], args: &LoadOptions) -> String {
    let mut text = format!(
        "{ROUNDS} rounds of these loads; no request is started after {} s, and each ends within {} s.\n\n\
         | load | for | at once | prompt tokens | answer tokens | requests per round |\n\
         | --- | --- | --- | --- | --- | --- |\n",
        args.max_duration.as_secs_f64(),
        args.timeout.as_secs_f64()
    );
    let (mut requests, mut tokens) = (0, 0);
    for load in loads {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} to {} | {} to {} | {} |",
            load.name,
            load.why,
            load.concurrency,
            load.input[0],
            load.input[1],
            load.output[0],
            load.output[1],
            load.requests
        );
        requests += ROUNDS * load.requests;
        tokens += ROUNDS * load.requests * (load.input[1] + load.output[1]);
    }
    let _ = writeln!(
        text,
        "\nAt most {requests} requests and {tokens} tokens, and one of each load before, to warm up."
    );
    text
}

/// The measurement.
pub struct Measured {
    /// The requests, those to warm up left out.
    pub records: Vec<MeasuredRequest>,
    /// Requests that the engine answered, those to warm up included.
    pub sent: u64,
}

/// Sends the loads.
///
/// # Errors
/// Too little time, too many failures, or an interrupt.
pub fn send(
    url: &str,
    loads: &[Load],
    args: &LoadOptions,
    progress: Note<'_>,
    note: Note<'_>,
) -> anyhow::Result<Measured> {
    let target = Target::resolve(url)?;
    let began = Instant::now();
    let folder = Folder::new()?;
    let mut measured = Measured {
        records: Vec::new(),
        sent: 0,
    };
    let rounds = ROUNDS as usize;
    let all = rounds * loads.len();
    let mut failed = 0;
    let mut example = String::new();
    for (turn, (part, load)) in (0..rounds)
        .flat_map(|_| loads.iter().enumerate())
        .enumerate()
    {
        let left = args.max_duration.saturating_sub(began.elapsed());
        ensure!(
            left > Duration::from_millis(100),
            "`{}` was not measured: {} s were over after {turn} of {all} loads; raise --max-duration, or lower \
             --max-prompt and --max-concurrency",
            load.name,
            args.max_duration.as_secs_f64()
        );
        progress(&format!("load {} of {all}: {}", turn + 1, load.name));
        let drag = folder.0.join(format!("{turn}.csv"));
        let between = |[min, max]: [u32; 2]| Dist::Uniform {
            min: f64::from(min),
            max: f64::from(max),
        };
        let workload = Workload {
            seed: args.seed * 1000 + turn as u64,
            requests: Some(u64::from(load.requests)),
            // An even part of the time left: a slow load must not take that of the others.
            duration_s: Some(left.as_secs_f64() / (all - turn) as f64),
            arrival: Arrival::Closed {
                concurrency: load.concurrency,
            },
            content: Content::Generated(vec![Class {
                isl: between(load.input),
                osl: between(load.output),
                ..Class::default()
            }]),
            ..Workload::default()
        };
        if turn < loads.len() {
            // The first request of a kind pays for what later ones find ready. It has no record.
            let one = Workload {
                seed: args.seed * 1000 + 500 + turn as u64,
                requests: Some(1),
                ..workload.clone()
            };
            let warm = slipstream_bench::run(config(&target, one, load, args, None), &mut |_| ())?;
            measured.sent += warm.report.requests.succeeded;
        }
        let run = config(&target, workload, load, args, Some(drag.clone()));
        let outcome = slipstream_bench::run(run, &mut |_| ())?;
        if let Some(error) = outcome.drag_failure {
            return Err(error.into());
        }
        ensure!(!outcome.interrupted, "interrupted");
        measured.sent += outcome.report.requests.succeeded;
        failed += outcome.report.requests.failed;
        if let Some((kind, count)) = outcome.report.errors.iter().next() {
            example = format!("{kind}: {}", count.example);
        }
        let sent = measured.records.len() as u64 + failed;
        ensure!(
            failed * 20 <= sent.max(20),
            "{failed} of the first requests failed ({example}); an engine that refuses or fails has no step times to \
             fit: lower --max-concurrency or --max-prompt, or raise --timeout"
        );
        let text = std::fs::read_to_string(&drag)?;
        measured.records.extend(absolute(&text, part, note)?);
    }
    Ok(measured)
}

/// Drag records with the times of one clock.
fn absolute(text: &str, part: usize, note: Note<'_>) -> anyhow::Result<Vec<MeasuredRequest>> {
    let first = crate::records::first_due(text)?;
    let mut records = crate::records::parse(text, note)?;
    for record in &mut records {
        record.arrival_s += first;
        record.part = part;
    }
    Ok(records)
}

fn config(
    target: &Target,
    workload: Workload,
    load: &Load,
    args: &LoadOptions,
    drag: Option<PathBuf>,
) -> Config {
    Config {
        target: target.clone(),
        endpoint: Endpoint::Completions,
        form: args.form,
        stream: true,
        model: args.model.clone(),
        api_key: args.api_key.clone(),
        headers: Vec::new(),
        label: load.name.to_owned(),
        slo: Objectives::of(&workload, None),
        workload,
        workload_name: load.name.to_owned(),
        vocabulary: Vocabulary::english(),
        token_ids: args.token_ids.clone(),
        series: false,
        warmup: 0,
        timeout: args.timeout,
        connect_timeout: Duration::from_secs(10),
        threads: 1,
        in_flight_max: u64::from(load.concurrency),
        retries: 0,
        drag,
        trace_stages: false,
        server_pids: Vec::new(),
        scrape_metrics: false,
        wait_ready: Duration::ZERO,
        catch_interrupt: true,
    }
}

/// A folder that is deleted when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> anyhow::Result<Folder> {
        let path =
            std::env::temp_dir().join(format!("slipstream-calibrate-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Refuses an engine that works for others.
///
/// # Errors
/// It has requests of others.
pub fn check_idle(
    runtime: &Runtime,
    client: &Client,
    url: &str,
    within: Duration,
    note: Note<'_>,
) -> anyhow::Result<()> {
    let load = runtime.block_on(slipstream_probe::load::load(client, within));
    match load {
        Ok(load) => {
            let (running, waiting) = (load.running.unwrap_or(0), load.waiting.unwrap_or(0));
            if running + waiting > 0 {
                bail!(
                    "{url} runs {running} requests and has {waiting} waiting: their time would count as that of the \
                     loads; measure it without other clients, or add --shared"
                );
            }
        }
        Err(error) => note(&format!(
            "{url} does not state its load ({error}), so requests of other clients would not be noticed"
        )),
    }
    Ok(())
}

/// Requests that the engine has ended since its start; `None` if it does not state it.
pub async fn ended(client: &Client, within: Duration) -> Option<u64> {
    let answer = client.get("/metrics", within).await.ok()?;
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    let sum = Samples::parse(&text).sum("vllm:request_success_total")?;
    (sum.is_finite() && sum >= 0.0).then(|| floor_u64(sum))
}

/// Refuses a measurement during which the engine also answered others.
///
/// # Errors
/// It did.
pub fn check_alone(
    before: Option<u64>,
    after: Option<u64>,
    sent: u64,
    url: &str,
) -> anyhow::Result<()> {
    let (Some(before), Some(after)) = (before, after) else {
        return Ok(());
    };
    let others = after.saturating_sub(before).saturating_sub(sent);
    ensure!(
        others == 0,
        "{url} also ended {others} requests of other clients during the measurement, whose time would count as that \
         of the loads; measure it without them, or add --shared"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    fn options(max_concurrency: u32, max_prompt: u32) -> LoadOptions {
        LoadOptions {
            max_duration: Duration::from_secs(120),
            max_concurrency,
            max_prompt,
            timeout: Duration::from_secs(60),
            model: None,
            api_key: None,
            form: PromptForm::Text,
            token_ids: 1000..30_000,
            seed: 1,
        }
    }

    #[test]
    fn loads_stay_within_the_bounds_of_flags_and_engine() {
        let engine = EngineConfig {
            max_model_len: 2048,
            max_num_seqs: 8,
            ..EngineConfig::default()
        };
        for (args, concurrency, prompt) in [(options(16, 4096), 8, 1888), (options(4, 300), 4, 300)]
        {
            let loads = plan(&args, &engine).unwrap();
            assert!(loads.iter().any(|load| load.concurrency == 1));
            assert_eq!(loads.iter().map(|l| l.concurrency).max(), Some(concurrency));
            assert_eq!(loads.iter().map(|l| l.input[1]).max(), Some(prompt));
            for load in &loads {
                assert!(
                    load.input[0] >= 1 && load.input[0] <= load.input[1],
                    "{load:?}"
                );
                assert!(load.input[1] + load.output[1] <= engine.max_model_len);
            }
            assert!(table(&loads, &args).contains("| many at once | decode |"));
        }
        let small = EngineConfig {
            max_model_len: 200,
            ..engine
        };
        let error = plan(&options(16, 4096), &small).unwrap_err().to_string();
        assert!(error.contains("`max_model_len` of 200"), "{error}");
    }

    #[test]
    fn requests_of_others_are_noticed() {
        assert!(check_alone(Some(5), Some(25), 20, "u").is_ok());
        assert!(check_alone(None, Some(25), 20, "u").is_ok());
        let error = check_alone(Some(5), Some(28), 20, "u")
            .unwrap_err()
            .to_string();
        assert!(error.contains("3 requests of other clients"), "{error}");
    }
}
