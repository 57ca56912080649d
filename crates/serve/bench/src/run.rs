//! The run: threads of single-threaded runtimes, each with its share of the sessions.

mod counters;
mod driver;

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use slipstream_base::width;
use slipstream_config::workload_file::{Arrival, Workload};
use slipstream_os::process;
use slipstream_report::drag::{DragError, DragWriter};
use slipstream_report::run::{EngineCounts, ProcessCost, RunReport, SCHEMA};
use slipstream_workload::schedule::Shard;
use slipstream_workload::{SourceError, Vocabulary};
use tokio::sync::watch;

use crate::body::{Template, TemplateParts};
use crate::client::{self, Failure};
use crate::target::{Endpoint, PromptForm, Target};
use slipstream_report::{Distributions, Objectives, Series, Totals};

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The server.
    pub target: Target,
    /// Endpoint.
    pub endpoint: Endpoint,
    /// Form of prompts.
    pub form: PromptForm,
    /// Whether to request streams (or whole answers).
    pub stream: bool,
    /// Model; `None`: the first in the server's list.
    pub model: Option<String>,
    /// Sent as a bearer token.
    pub api_key: Option<String>,
    /// Further headers, `Name: value`.
    pub headers: Vec<String>,
    /// The requests.
    pub workload: Workload,
    /// A short description of the workload.
    pub workload_name: String,
    /// Words of one token each on the server.
    pub vocabulary: Vocabulary,
    /// Token ids of the server's model, for [`PromptForm::Tokens`].
    pub token_ids: std::ops::Range<u32>,
    /// Objectives.
    pub slo: Objectives,
    /// Warm-up requests before the measurement; of the same kind, with other texts.
    pub warmup: u64,
    /// Timeout of a request.
    pub timeout: Duration,
    /// Timeout of a connection attempt.
    pub connect_timeout: Duration,
    /// Threads; sessions are divided among them. At least 1.
    pub threads: u32,
    /// Limit of requests in flight over all threads; further ones wait, and their wait counts.
    pub in_flight_max: u64,
    /// Retries of a request that is answered 429 or 503, after its `Retry-After`.
    pub retries: u32,
    /// Write one drag record per request to this file: CSV, or Parquet if its name ends in
    /// `.parquet`.
    pub drag: Option<PathBuf>,
    /// Record the run over time.
    pub series: bool,
    /// Request the server's stage times.
    pub trace_stages: bool,
    /// Server processes whose cost is measured.
    pub server_pids: Vec<u32>,
    /// Read the server's counters from `/metrics`, if it has them.
    pub scrape_metrics: bool,
    /// Name of the run in tables.
    pub label: String,
    /// Wait this long for the server to answer before the run.
    pub wait_ready: Duration,
    /// On SIGINT, end the run early and report the measurements so far.
    pub catch_interrupt: bool,
}

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Whether warm-up is in progress.
    pub warming_up: bool,
    /// Requests that ended.
    pub ended: u64,
    /// Of those, failed.
    pub failed: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Events with text so far.
    pub events: u64,
    /// Number of requests, if known.
    pub total: Option<u64>,
    /// Time since the measurement began, ns.
    pub elapsed_ns: u64,
}

/// Results of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The measurements.
    pub report: RunReport,
    /// The latencies behind its percentiles.
    pub distributions: Distributions,
    /// The run over time, if recorded.
    pub series: Option<Box<Series>>,
    /// Why the drag records are incomplete, if they are.
    pub drag_failure: Option<DragError>,
    /// Whether the run was cut short by an interrupt.
    pub interrupted: bool,
    /// Notes for the reader of the report.
    pub notes: Vec<String>,
}

/// Why a run failed. Failed requests are counted instead.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The URL cannot be used.
    #[error("`{url}` cannot be loaded: {why}")]
    Url {
        /// As it was given.
        url: String,
        /// The remedy.
        why: String,
    },
    /// The host's name is not known.
    #[error("looking up {host}: {source}")]
    Lookup {
        /// Host and port.
        host: String,
        /// The system's error.
        source: io::Error,
    },
    /// The server does not answer, or its answer is not that of an OpenAI endpoint. May be retried.
    #[error("{url}: {what}")]
    Server {
        /// The URL of the request.
        url: String,
        /// The answer.
        what: String,
    },
    /// The source of requests failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// Drag records could not be written.
    #[error("{}: {source}", path.display())]
    Drag {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: DragError,
    },
    /// A process to watch does not exist.
    #[error("there is no process {0} to watch, or /proc does not show it; check --server-pid")]
    NoProcess(u32),
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
    /// The system refused a thread, a timer or a file.
    #[error("{what}: {source}")]
    System {
        /// The resource.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Counters that a thread publishes while it runs.
#[derive(Debug, Default)]
pub(crate) struct ThreadProgress {
    pub(crate) ended: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) events: AtomicU64,
}

/// Rows of drag records, shared by the threads: one lock per request.
pub(crate) type DragSink = Mutex<DragWriter<BufWriter<File>>>;

/// State shared by all threads of a run.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) template: Template,
    pub(crate) drag: Option<DragSink>,
    /// Why drag records are no longer written, if so.
    pub(crate) drag_failure: Mutex<Option<DragError>>,
    pub(crate) stop: watch::Receiver<bool>,
    pub(crate) progress: Vec<ThreadProgress>,
    gate: Barrier,
    start: Mutex<Option<Baseline>>,
    start_ns: AtomicU64,
}

/// Costs and counters when measuring began.
#[derive(Clone, Debug, Default)]
struct Baseline {
    own_cpu_ns: u64,
    server_cpu_s: f64,
    engine: Option<EngineCounts>,
}

/// Runs a workload, and calls `on_progress` about four times a second.
///
/// # Errors
/// [`BenchError`]. Requests that fail are counted in the report instead.
pub fn run(config: Config, on_progress: &mut dyn FnMut(&Progress)) -> Result<Outcome, BenchError> {
    let config = Config {
        threads: threads_of(&config)?,
        ..config
    };
    if config.workload.has_images() {
        return Err(BenchError::Options(
            "`images_per_request` is for simulation, and requests to a server would have no images; set it to 0".into(),
        ));
    }
    if !config.workload.models().is_empty() {
        return Err(BenchError::Options(
            "`models` of the workload is for simulation, and all requests to a server would be for one model; remove it, \
             or run one bench for each model".into(),
        ));
    }
    for pid in &config.server_pids {
        process::usage_of(*pid).ok_or(BenchError::NoProcess(*pid))?;
    }
    let model = find_model(&config)?;
    let mut notes = Vec::new();
    // A few files besides the sockets: runtimes, timers, the drag file.
    let files = process::raise_open_files().saturating_sub(64);
    let in_flight_max = config.in_flight_max.min(files).max(1);
    if let Arrival::Closed { concurrency } = config.workload.arrival
        && u64::from(concurrency) > in_flight_max
    {
        notes.push(format!(
            "only {in_flight_max} of {concurrency} requests fit in flight; raise --max-in-flight or `ulimit -n`"
        ));
    }
    let config = Config {
        in_flight_max,
        ..config
    };
    let drag = config.drag.as_deref().map(open_drag).transpose()?;
    let template = Template::new(TemplateParts {
        target: &config.target,
        endpoint: config.endpoint,
        form: config.form,
        stream: config.stream,
        model: &model,
        adapters: config.workload.adapters(),
        api_key: config.api_key.as_deref(),
        headers: &config.headers,
        trace_stages: config.trace_stages,
        vocabulary: config.vocabulary.clone(),
        token_ids: config.token_ids.clone(),
    });
    let (stopper, stop) = watch::channel(false);
    let threads = config.threads;
    let shared = Arc::new(Shared {
        template,
        drag,
        drag_failure: Mutex::default(),
        stop,
        progress: (0..threads).map(|_| ThreadProgress::default()).collect(),
        gate: Barrier::new(threads as usize),
        start: Mutex::new(None),
        start_ns: AtomicU64::new(0),
        config,
    });

    let (outcomes, received) = mpsc::channel();
    let stopper = Arc::new(stopper);
    for index in 0..threads {
        let (shared, outcomes, stopper) = (shared.clone(), outcomes.clone(), stopper.clone());
        std::thread::Builder::new()
            .name(format!("bench-{index}"))
            .spawn(move || {
                let shard = Shard {
                    index,
                    count: shared.config.threads,
                };
                // The receiver is dropped only if the run was abandoned.
                let _ = outcomes.send(driver::run_thread(&shared, shard, &stopper));
            })
            .map_err(|source| BenchError::System {
                what: "starting a thread",
                source,
            })?;
    }
    drop(outcomes);

    let mut totals = Totals::default();
    let mut failure = None;
    loop {
        match received.recv_timeout(Duration::from_millis(250)) {
            Ok(Ok(part)) => totals.add(&part),
            Ok(Err(error)) => {
                failure.get_or_insert(error);
                // The report is no longer needed.
                stopper.send_replace(true);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => on_progress(&shared.progress()),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    let interrupted = *stopper.borrow();
    Ok(shared.finish(&totals, model, interrupted, notes))
}

impl Shared {
    /// Starts the measurement in all threads together, and returns the time.
    fn start_line(&self) -> u64 {
        if self.gate.wait().is_leader() {
            let baseline = Baseline {
                engine: self.engine_counts(),
                server_cpu_s: self.server_usage().map_or(0.0, |u| u.cpu_s),
                own_cpu_ns: process::own_cpu_ns(),
            };
            *self.start.lock().expect(UNPOISONED) = Some(baseline);
            self.start_ns.store(process::monotonic_ns(), Relaxed);
        }
        self.gate.wait();
        self.start_ns.load(Relaxed)
    }

    fn engine_counts(&self) -> Option<EngineCounts> {
        let c = &self.config;
        if !c.scrape_metrics {
            return None;
        }
        let answer = client::get(
            &c.target,
            "/metrics",
            c.api_key.as_deref(),
            &c.headers,
            c.connect_timeout,
        );
        match answer {
            Ok((200, text)) => counters::engine_counts(&text),
            _ => None,
        }
    }

    fn server_usage(&self) -> Option<process::Usage> {
        let pids = &self.config.server_pids;
        if pids.is_empty() {
            return None;
        }
        // Without one of the processes the sum is wrong.
        pids.iter().try_fold(process::Usage::default(), |sum, pid| {
            let one = process::usage_of(*pid)?;
            Some(process::Usage {
                cpu_s: sum.cpu_s + one.cpu_s,
                rss_peak_bytes: sum.rss_peak_bytes + one.rss_peak_bytes,
            })
        })
    }

    fn progress(&self) -> Progress {
        let start = self.start_ns.load(Relaxed);
        let mut all = Progress {
            warming_up: start == 0,
            total: self.config.workload.requests,
            elapsed_ns: if start == 0 {
                0
            } else {
                process::monotonic_ns().saturating_sub(start)
            },
            ..Progress::default()
        };
        for one in &self.progress {
            all.ended += one.ended.load(Relaxed);
            all.failed += one.failed.load(Relaxed);
            all.in_flight += one.in_flight.load(Relaxed);
            all.events += one.events.load(Relaxed);
        }
        all
    }

    fn finish(
        &self,
        totals: &Totals,
        model: String,
        interrupted: bool,
        mut notes: Vec<String>,
    ) -> Outcome {
        let own_cpu_ns = process::own_cpu_ns();
        let baseline = self
            .start
            .lock()
            .expect(UNPOISONED)
            .take()
            .unwrap_or_default();
        let mut drag_failure = self.drag_failure.lock().expect(UNPOISONED).take();
        if let (Some(drag), None) = (&self.drag, &drag_failure) {
            drag_failure = drag.lock().expect(UNPOISONED).finish().err();
        }
        let cost = |cpu_s: f64, rss| ProcessCost {
            cpu_s,
            cpu_us_per_request: per(cpu_s, totals.requests.succeeded),
            cpu_us_per_token: per(cpu_s, totals.tokens().output),
            rss_peak_bytes: rss,
        };
        let own_rss = process::usage_of(std::process::id()).map(|u| u.rss_peak_bytes);
        let own_cpu_s = own_cpu_ns.saturating_sub(baseline.own_cpu_ns) as f64 / 1e9;
        let server = self
            .server_usage()
            .map(|u| cost(u.cpu_s - baseline.server_cpu_s, Some(u.rss_peak_bytes)));
        if server.is_none() && !self.config.server_pids.is_empty() {
            notes
                .push("a process of --server-pid has ended; the server's cost is not known".into());
        }
        let engine = self
            .engine_counts()
            .zip(baseline.engine)
            .map(|(end, begin)| counters::difference(&end, &begin));
        let c = &self.config;
        let report = RunReport {
            schema: SCHEMA,
            label: c.label.clone(),
            target: c.target.url.clone(),
            model,
            workload: c.workload_name.clone(),
            seed: c.workload.seed,
            duration_s: totals.duration_s(),
            requests: totals.requests,
            errors: totals.errors.clone(),
            tokens: totals.tokens(),
            throughput: totals.throughput(),
            latency: totals.latencies(),
            goodput: totals.goodput(&c.slo),
            overloaded: None,
            classes: totals.class_reports(&c.slo),
            models: Vec::new(),
            shares: Vec::new(),
            gpu: None,
            transfers: None,
            resumed: None,
            autoscale: None,
            simulation: None,
            client: Some(cost(own_cpu_s, own_rss)),
            server,
            engine,
        };
        Outcome {
            report,
            distributions: totals.distributions(),
            series: totals.series.clone(),
            drag_failure,
            interrupted,
            notes,
        }
    }
}

const UNPOISONED: &str = "no thread panics while it holds the lock";

fn per(cpu_s: f64, count: u64) -> f64 {
    if count == 0 {
        0.0
    } else {
        cpu_s * 1e6 / count as f64
    }
}

/// Number of threads with at least one session.
fn threads_of(config: &Config) -> Result<u32, BenchError> {
    if config.threads == 0 {
        return Err(BenchError::Options("--threads is 0; use 1 or more".into()));
    }
    if config.form == PromptForm::Tokens && config.endpoint == Endpoint::Chat {
        return Err(BenchError::Options(
            "chat prompts cannot be sent as token ids; use --endpoint completions".into(),
        ));
    }
    Ok(match config.workload.arrival {
        Arrival::Closed { concurrency } => config.threads.min(concurrency.max(1)),
        _ => config.threads,
    })
}

fn open_drag(path: &Path) -> Result<DragSink, BenchError> {
    let writer = DragWriter::create(path).map_err(|source| BenchError::Drag {
        path: path.to_path_buf(),
        source,
    })?;
    Ok(Mutex::new(writer))
}

/// The model to request; waits for the server if configured.
fn find_model(config: &Config) -> Result<String, BenchError> {
    let url = format!("{}/v1/models", config.target.url.trim_end_matches("/v1"));
    let fail = |what: String| BenchError::Server {
        url: url.clone(),
        what,
    };
    let give_up_ns = process::monotonic_ns() + width::nanos(config.wait_ready);
    let (status, body) = loop {
        let key = config.api_key.as_deref();
        match client::get(
            &config.target,
            "/v1/models",
            key,
            &config.headers,
            config.connect_timeout,
        ) {
            Ok((503, _)) | Err(Failure::Connect(_)) if process::monotonic_ns() < give_up_ns => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(answer) => break answer,
            Err(error) => {
                return Err(fail(format!(
                    "{error}; is the server running? (--wait-ready 30s waits for it)"
                )));
            }
        }
    };
    if let Some(model) = &config.model {
        return Ok(model.clone());
    }
    if status == 401 || status == 403 {
        return Err(fail(format!("status {status}; set a key with --api-key")));
    }
    serde_json::from_str::<serde_json::Value>(&body)
        .ok()
        .filter(|_| status == 200)
        .and_then(|v| v["data"][0]["id"].as_str().map(str::to_owned))
        .ok_or_else(|| {
            let says = client::error_text(&body);
            fail(format!(
                "status {status} {says}: no model is listed; name one with --model"
            ))
        })
}
