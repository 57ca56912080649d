//! Where a cluster, a workload and prices come from.
//!
//! A source names a file, or has its text: a question that travels to another process takes the text with it.
//! The files that a text refers to (a model's `config.json`, step times, a trace) are read where it is
//! answered.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use slipstream_base::Slo;
use slipstream_base::width::floor_u64;
use slipstream_config::cluster::{Cluster, TimingConfig, file};
use slipstream_config::doc::{Doc, Settings};
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::{
    self, Arrival, Class, Content, Dist, OnBadLine, TraceFile, Workload,
};

use crate::files;

/// A cluster file and overrides. Precedence: override, environment, file, default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterSource {
    /// The file; paths in it are relative to it. `None`: the defaults.
    pub file: Option<PathBuf>,
    /// Its text; `None`: read from the file.
    pub text: Option<String>,
    /// Overrides, `KEY=VALUE`, the last one of a key being valid.
    pub sets: Vec<String>,
}

impl ClusterSource {
    /// In words: the file and its overrides.
    pub fn name(&self) -> String {
        let file = self.file.as_ref().map_or_else(
            || "the defaults".to_owned(),
            |path| path.display().to_string(),
        );
        let sets = self.sets.iter().map(String::as_str);
        [file.as_str()]
            .into_iter()
            .chain(sets)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The cluster, and the origin of each value, with `sets` as the last overrides.
    ///
    /// # Errors
    /// If the file cannot be read, or what it says is wrong.
    pub fn resolve(&self, sets: &[String]) -> anyhow::Result<(Cluster, Settings)> {
        self.resolve_by(sets, files::read)
    }

    /// As [`resolve`](Self::resolve), with a reader for the files that the cluster file names.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub fn resolve_by(
        &self,
        sets: &[String],
        read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
    ) -> anyhow::Result<(Cluster, Settings)> {
        Ok(file::read(self.doc(sets)?, read)?)
    }

    /// As [`resolve`](Self::resolve), for a simulation.
    ///
    /// # Errors
    /// Also if a pool has real engines, and the model is not stated.
    pub fn resolve_simulated(&self, sets: &[String]) -> anyhow::Result<(Cluster, Settings)> {
        let doc = self.doc(sets)?;
        let model = doc.keys("model");
        let (cluster, settings) = file::read(doc, files::read)?;
        // A default model would answer for engines that serve another one.
        let real = cluster.pools.iter().find_map(|pool| {
            let engines = pool.engines.as_ref()?;
            Some((&pool.name, engines.urls.first()?))
        });
        if let Some((pool, url)) = real
            && !model.iter().any(|key| key == "preset" || key == "config")
        {
            anyhow::bail!(
                "{}: pool `{pool}` has real engines, and their model and GPU are not stated; `slipstream describe {url}` \
                 prints a cluster file with both, or set `model.preset` and `engine.timing.gpu`",
                self.name()
            );
        }
        Ok((cluster, settings))
    }

    /// Names of the GPUs that the file defines, as `[gpu.NAME]`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn gpus(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.doc(&[])?.keys("gpu"))
    }

    /// Content of the file; `None`: there is no file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn content(&self) -> anyhow::Result<Option<Vec<u8>>> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(Some(text.clone().into_bytes())),
            (None, Some(path)) => files::read(path)
                .map(Some)
                .with_context(|| format!("reading the cluster file {}", path.display())),
            (None, None) => Ok(None),
        }
    }

    /// The same source with its text and with an absolute path: it can travel to another process.
    ///
    /// # Errors
    /// If the file cannot be read, or is not UTF-8.
    pub fn with_text(mut self) -> anyhow::Result<ClusterSource> {
        carry(&mut self.file, &mut self.text, "reading the cluster file ")?;
        Ok(self)
    }

    /// The document of all layers, with `sets` as the last.
    fn doc(&self, sets: &[String]) -> anyhow::Result<Doc> {
        let mut doc = match self.content()? {
            None => Doc::empty(),
            Some(text) => Doc::parse(&self.file_name(), &text),
        };
        environment(&mut doc);
        for set in self.sets.iter().chain(sets) {
            doc.set(set);
        }
        Ok(doc)
    }

    pub(crate) fn file_name(&self) -> String {
        match (&self.file, &self.text) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(_)) => "cluster".to_owned(),
            (None, None) => String::new(),
        }
    }
}

/// Overlays `doc` with the variables of our prefix.
pub(crate) fn environment(doc: &mut Doc) {
    // A variable of another program may have any content. A variable with our prefix that is not UTF-8
    // gets a U+FFFD in its value, which the document then rejects by name.
    let vars = std::env::vars_os().map(|(name, value)| {
        let text = |os: OsString| os.to_string_lossy().into_owned();
        (text(name), text(value))
    });
    doc.env(file::ENV_PREFIX, vars);
}

/// The workload file `name` with the overrides `sets`, and the origin of each value.
///
/// # Errors
/// If what it says is wrong.
pub fn read_workload(
    name: &str,
    text: &[u8],
    sets: &[String],
) -> anyhow::Result<(Workload, Settings)> {
    let mut doc = Doc::parse(name, text);
    for assignment in sets {
        doc.set(assignment);
    }
    Ok(workload_file::read(doc)?)
}

/// A workload: a file, a trace, or a simple load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkloadSource {
    /// A workload file.
    pub file: Option<PathBuf>,
    /// Its text; `None`: read from the file.
    pub text: Option<String>,
    /// Overrides of the workload file, `KEY=VALUE`.
    pub sets: Vec<String>,
    /// A trace to replay; read where the question is answered.
    pub trace: Option<PathBuf>,
    /// Closed loop: concurrent requests.
    pub concurrency: Option<u32>,
    /// Open loop: requests per second, Poisson arrivals.
    pub rate: Option<f64>,
    /// Tokens per prompt, without a file.
    pub isl: Option<u32>,
    /// Tokens per answer, without a file.
    pub osl: Option<u32>,
    /// Total number of requests.
    pub requests: Option<u64>,
    /// No session starts later than this (workload time).
    pub duration: Option<Duration>,
    /// Divides arrival and think times.
    pub time_scale: Option<f64>,
    /// Seed of the random numbers.
    pub seed: Option<u64>,
    /// Whether bad lines of the trace are skipped; `None`: as the file says, otherwise they end the run.
    pub skip_bad_lines: Option<bool>,
    /// Names of the trace's fields, if it is in no known format.
    pub trace_columns: Option<String>,
    /// Unit of the trace's times, if it is not its format's.
    pub trace_unit: Option<String>,
}

/// Length of a rate that is stated alone, as `plan` takes it, s.
const STEADY_S: f64 = 120.0;
/// Its requests at most.
const STEADY_REQUESTS_MAX: u64 = 20_000;

impl WorkloadSource {
    /// The workload that a cluster is sized for: of a rate that is stated alone two minutes, and a note that says so. Fewer
    /// requests would be over before the answers of the first ones are.
    pub(crate) fn steady(mut self) -> (WorkloadSource, Option<String>) {
        let has_file = self.file.is_some() || self.text.is_some() || self.trace.is_some();
        let is_bounded = self.requests.is_some() || self.duration.is_some();
        let Some(rate) = self.rate.filter(|_| !has_file && !is_bounded) else {
            return (self, None);
        };
        let requests = floor_u64(rate * STEADY_S).clamp(100, STEADY_REQUESTS_MAX);
        self.requests = Some(requests);
        let note = format!(
            "{requests} requests at {rate} a second, as neither their number nor a duration is stated"
        );
        (self, Some(note))
    }

    /// The flags of a command that gives this workload; without `--time-scale` and `--workload-set`.
    pub fn flags(&self) -> Vec<OsString> {
        let mut flags: Vec<OsString> = Vec::new();
        for (name, path) in [("--workload", &self.file), ("--trace", &self.trace)] {
            if let Some(path) = path {
                flags.extend([name.into(), path.clone().into_os_string()]);
            }
        }
        let mut number = |name: &str, value: Option<String>| {
            flags.extend(value.map(|value| format!("{name}={value}").into()));
        };
        number("--concurrency", self.concurrency.map(|n| n.to_string()));
        number("--rate", self.rate.map(|x| x.to_string()));
        number("--isl", self.isl.map(|n| n.to_string()));
        number("--osl", self.osl.map(|n| n.to_string()));
        number("--requests", self.requests.map(|n| n.to_string()));
        number(
            "--duration",
            self.duration.map(|d| format!("{}ns", d.as_nanos())),
        );
        number("--seed", self.seed.map(|n| n.to_string()));
        let on_bad_line = self
            .skip_bad_lines
            .map(|skip| if skip { "skip" } else { "stop" });
        number("--on-bad-line", on_bad_line.map(str::to_owned));
        number("--trace-columns", self.trace_columns.clone());
        number("--trace-unit", self.trace_unit.clone());
        flags
    }

    /// The workload file with its overrides and `sets`; `None` if there is no file.
    fn read(&self, sets: &[String]) -> anyhow::Result<Option<(Workload, Settings)>> {
        let name = self
            .file
            .as_ref()
            .map_or_else(|| "workload".to_owned(), |path| path.display().to_string());
        let sets = [self.sets.as_slice(), sets].concat();
        let content = match (&self.text, &self.file) {
            (Some(text), _) => text.clone().into_bytes(),
            (None, Some(path)) => files::read(path).with_context(|| format!("reading {name}"))?,
            (None, None) => {
                anyhow::ensure!(
                    sets.is_empty(),
                    "`{}` changes a workload file, and there is none",
                    sets[0]
                );
                return Ok(None);
            }
        };
        read_workload(&name, &content, &sets).map(Some)
    }

    /// The same source with the text of its file and with absolute paths: it can travel to another process.
    ///
    /// # Errors
    /// If the file cannot be read, or is not UTF-8.
    pub fn with_text(mut self) -> anyhow::Result<WorkloadSource> {
        carry(&mut self.file, &mut self.text, "reading ")?;
        if let Some(trace) = &mut self.trace {
            *trace = std::path::absolute(&*trace)?;
        }
        Ok(self)
    }

    /// Whether there is a workload file, whose keys can be set.
    pub fn has_file(&self) -> bool {
        self.file.is_some() || self.text.is_some()
    }

    /// The workload, and its short name. `sets`: the last overrides of the workload file.
    ///
    /// # Errors
    /// If a file cannot be read, or a value is wrong.
    pub fn workload(&self, sets: &[String]) -> anyhow::Result<(Workload, String)> {
        let nothing = [
            ("--requests", self.requests == Some(0)),
            ("--duration", self.duration == Some(Duration::ZERO)),
            ("--concurrency", self.concurrency == Some(0)),
            ("--isl", self.isl == Some(0)),
            ("--osl", self.osl == Some(0)),
        ];
        if let Some((flag, _)) = nothing.into_iter().find(|(_, is_zero)| *is_zero) {
            bail!("{flag} is 0, but must be above 0");
        }
        let (mut workload, name) = match (self.read(sets)?, &self.trace) {
            (Some((workload, _)), _) => {
                let name = self.file.as_deref().map(file_name);
                (workload, name.unwrap_or_else(|| "workload".to_owned()))
            }
            (None, Some(path)) => (self.trace_workload(path), file_name(path)),
            (None, None) => self.plain_workload(),
        };
        // A key that varies is not one that a flag states for all runs.
        let stands = |key: &str| {
            let mut keys = sets.iter().filter_map(|set| set.split_once('='));
            !keys.any(|(varied, _)| varied.trim() == key)
        };
        if let Some(requests) = self.requests.filter(|_| stands("requests")) {
            workload.requests = Some(requests);
        }
        if let Some(duration) = self.duration.filter(|_| stands("duration_s")) {
            workload.duration_s = Some(duration.as_secs_f64());
        }
        if let Some(seed) = self.seed.filter(|_| stands("seed")) {
            workload.seed = seed;
        }
        if let Some(scale) = self.time_scale {
            if !workload_file::TIME_SCALES.contains(&scale) {
                bail!("--time-scale is {scale:?}, but must be from 1e-9 to 1e9");
            }
            if stands("time_scale") {
                workload.time_scale = scale;
            }
        }
        self.read_as(&mut workload)?;
        if let Some(rate) = self.rate
            && !(workload_file::RATE_MIN..=workload_file::RATE_MAX).contains(&rate)
        {
            bail!(
                "--rate is {rate:?}, but must be from {:e} to {:e} requests/s",
                workload_file::RATE_MIN,
                workload_file::RATE_MAX
            );
        }
        Ok((workload, name))
    }

    /// Applies how the trace of `workload` is read.
    fn read_as(&self, workload: &mut Workload) -> anyhow::Result<()> {
        if let Content::Trace(file) = &mut workload.content {
            file.on_bad_line = match self.skip_bad_lines {
                Some(true) => OnBadLine::Skip,
                Some(false) => OnBadLine::Stop,
                None => file.on_bad_line,
            };
            if let Some(columns) = &self.trace_columns {
                let columns = columns.parse();
                file.columns = Some(columns.map_err(|e| anyhow!("--trace-columns: {e}"))?);
            }
            if let Some(unit) = &self.trace_unit {
                let unit = unit.parse();
                file.unit = Some(unit.map_err(|e| anyhow!("--trace-unit: {e}"))?);
            }
            return Ok(());
        }
        let given = [
            ("on-bad-line", self.skip_bad_lines.is_some()),
            ("trace-columns", self.trace_columns.is_some()),
            ("trace-unit", self.trace_unit.is_some()),
        ];
        if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) {
            bail!("--{flag} says how a trace is read, and the workload has none");
        }
        Ok(())
    }

    /// Effective values of the workload file and their origins, under the flags and the objectives `slo` of a flag;
    /// `None` if there is no file.
    ///
    /// # Errors
    /// As [`workload`](Self::workload).
    pub fn settings(&self, slo: Option<&Slo>) -> anyhow::Result<Option<Settings>> {
        let Some((_, mut settings)) = self.read(&[])? else {
            return Ok(None);
        };
        self.workload(&[])?;
        if let Some(requests) = &self.requests {
            settings.override_by_flag("--requests", "requests", requests);
        }
        if let Some(duration) = &self.duration {
            settings.override_by_flag("--duration", "duration_s", &duration.as_secs_f64());
        }
        if let Some(scale) = &self.time_scale {
            settings.override_by_flag("--time-scale", "time_scale", scale);
        }
        if let Some(seed) = &self.seed {
            settings.override_by_flag("--seed", "seed", seed);
        }
        if let Some(skip) = self.skip_bad_lines {
            let word = if skip { "skip" } else { "stop" };
            settings.override_by_flag("--on-bad-line", "trace.on_bad_line", &word.to_owned());
        }
        if let Some(columns) = &self.trace_columns {
            settings.override_by_flag("--trace-columns", "trace.columns", columns);
        }
        if let Some(unit) = &self.trace_unit {
            settings.override_by_flag("--trace-unit", "trace.unit", unit);
        }
        if let Some(slo) = slo {
            for path in ["slo", "class.slo"] {
                settings.override_by_flag("--slo", path, &slo.to_string());
            }
        }
        Ok(Some(settings))
    }

    /// The workload as text, for a report: [`settings`](Self::settings) of the file, or the flags.
    ///
    /// # Errors
    /// As [`workload`](Self::workload).
    pub fn text(&self, slo: Option<&Slo>) -> anyhow::Result<String> {
        if let Some(settings) = self.settings(slo)? {
            return Ok(settings.to_toml());
        }
        if let Some(path) = &self.trace {
            self.read_as(&mut self.trace_workload(path))?;
        }
        let flags = self.flags();
        let words: Vec<_> = flags.iter().map(|flag| flag.to_string_lossy()).collect();
        Ok(words.join(" "))
    }

    fn arrival(&self) -> Option<Arrival> {
        match (self.concurrency, self.rate) {
            (Some(concurrency), _) => Some(Arrival::Closed { concurrency }),
            (None, Some(rate_per_s)) => Some(Arrival::Poisson { rate_per_s }),
            (None, None) => None,
        }
    }

    fn trace_workload(&self, path: &Path) -> Workload {
        Workload {
            arrival: self.arrival().unwrap_or(Arrival::Trace),
            content: Content::Trace(TraceFile {
                path: path.to_owned(),
                ..TraceFile::default()
            }),
            ..Workload::default()
        }
    }

    fn plain_workload(&self) -> (Workload, String) {
        let (isl, osl) = (self.isl.unwrap_or(1024), self.osl.unwrap_or(128));
        let arrival = self.arrival().unwrap_or(Arrival::Closed { concurrency: 1 });
        let when = match &arrival {
            Arrival::Closed { concurrency } => format!("c={concurrency}"),
            _ => format!("{}/s", self.rate.unwrap_or_default()),
        };
        // Fewer than a few waves of a closed loop would show mostly its start-up.
        let waves = 10 * u64::from(self.concurrency.unwrap_or(1));
        let workload = Workload {
            // A duration alone also ends the run.
            requests: self.duration.is_none().then_some(waves.max(100)),
            arrival,
            content: Content::Generated(vec![Class {
                isl: Dist::Exact(f64::from(isl)),
                osl: Dist::Exact(f64::from(osl)),
                ..Class::default()
            }]),
            ..Workload::default()
        };
        (workload, format!("{when} {isl}/{osl}"))
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// Prices over a file of prices. Nothing has a default price.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PriceSource {
    /// `GPU=PRICE` per GPU-hour.
    pub prices: Vec<String>,
    /// A file with `[prices]` and `[power]`.
    pub file: Option<PathBuf>,
    /// Its text; `None`: read from the file.
    pub text: Option<String>,
}

impl PriceSource {
    /// Prices of presets and of `own`, the GPUs of the cluster file.
    ///
    /// # Errors
    /// If the file cannot be read, or what it says is wrong.
    pub fn read(&self, own: &[String]) -> anyhow::Result<Prices> {
        let mut doc = match (&self.text, &self.file) {
            (Some(text), file) => {
                let name = file
                    .as_ref()
                    .map_or_else(|| "prices".to_owned(), |path| path.display().to_string());
                Doc::parse(&name, text.as_bytes())
            }
            (None, None) => Doc::empty(),
            (None, Some(path)) => {
                let name = path.display().to_string();
                let text = files::read(path).with_context(|| format!("reading {name}"))?;
                Doc::parse(&name, &text)
            }
        };
        let mut seen = Vec::new();
        for price in &self.prices {
            let (name, value) = price.split_once('=').unwrap_or((price, ""));
            let (name, value) = (name.trim(), value.trim());
            let number = value.parse::<f64>().ok().filter(|_| !name.is_empty());
            let number = number.with_context(|| {
                format!(
                    "--price {price}: not GPU=PRICE with one GPU and a number, such as h100-sxm=2.5"
                )
            })?;
            if let Some((_, first)) = seen.iter().find(|(seen, _)| *seen == name) {
                bail!("--price has `{name}` twice: {first} and {price}; keep one");
            }
            seen.push((name, price));
            doc.set_by_flag(
                &format!("--price {price}"),
                &format!("prices.{name}"),
                &format!("{number:?}"),
            );
        }
        Ok(Prices::read(doc, own)?)
    }
}

impl PriceSource {
    /// The same source with the text of its file: it can travel to another process.
    ///
    /// # Errors
    /// If the file cannot be read, or is not UTF-8.
    pub fn with_text(mut self) -> anyhow::Result<PriceSource> {
        carry(&mut self.file, &mut self.text, "reading ")?;
        Ok(self)
    }
}

/// Reads the text of `file`, and makes its path absolute.
fn carry(file: &mut Option<PathBuf>, text: &mut Option<String>, what: &str) -> anyhow::Result<()> {
    if let Some(path) = file {
        if text.is_none() {
            let read = files::read_text(path);
            *text = Some(read.with_context(|| format!("{what}{}", path.display()))?);
        }
        *path = std::path::absolute(&*path)?;
    }
    Ok(())
}

/// Cost of a cluster per hour.
///
/// # Errors
/// A pool's GPU has no price, or is not known.
pub fn per_hour(cluster: &Cluster, prices: &Prices) -> anyhow::Result<f64> {
    let mut sum = 0.0;
    for (pool, gpus) in cluster.gpus_by_pool() {
        let (TimingConfig::Calibrated { gpu, .. } | TimingConfig::Roofline { gpu, .. }) =
            &pool.engine.timing
        else {
            bail!(
                "[pool.{}] names no GPU, so it has no price; prices need `engine.timing.kind` \"calibrated\" \
                 or \"roofline\"",
                pool.name
            );
        };
        let gpu = &*gpu.name;
        let price = prices.per_gpu_hour(gpu).with_context(|| {
            format!("{gpu} has no price, or no power for that of energy; give --price {gpu}=PRICE")
        })?;
        sum += price * gpus as f64;
    }
    Ok(sum)
}

/// `99%`, `99.9 %` or `0.99`, as a share.
///
/// # Errors
/// A message with the expected form.
pub fn percent(text: &str) -> Result<f64, String> {
    let wrong = || format!("`{text}` is no share; write 99% or 0.99");
    let share = match text.trim().strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map_err(|_| wrong())? / 100.0,
        None => text.trim().parse::<f64>().map_err(|_| wrong())?,
    };
    if text.contains('%') || share <= 1.0 {
        Ok(share)
    } else {
        Err(format!("`{text}` is above 1; write {text}% for percent"))
    }
}

/// A value as its text, for values that are read from one.
pub(crate) mod as_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "the form that serde calls")]
    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_of_nothing_are_refused_by_flag() {
        let of = |source: WorkloadSource| source.workload(&[]).map(|_| ()).unwrap_err().to_string();
        let none = WorkloadSource::default;
        for (source, flag) in [
            (
                WorkloadSource {
                    requests: Some(0),
                    ..none()
                },
                "--requests",
            ),
            (
                WorkloadSource {
                    duration: Some(Duration::ZERO),
                    ..none()
                },
                "--duration",
            ),
            (
                WorkloadSource {
                    concurrency: Some(0),
                    ..none()
                },
                "--concurrency",
            ),
            (
                WorkloadSource {
                    isl: Some(0),
                    ..none()
                },
                "--isl",
            ),
            (
                WorkloadSource {
                    osl: Some(0),
                    ..none()
                },
                "--osl",
            ),
            (
                WorkloadSource {
                    rate: Some(1e-320),
                    ..none()
                },
                "--rate",
            ),
            (
                WorkloadSource {
                    rate: Some(f64::NAN),
                    ..none()
                },
                "--rate",
            ),
            (
                WorkloadSource {
                    time_scale: Some(1e-320),
                    ..none()
                },
                "--time-scale",
            ),
        ] {
            let error = of(source);
            assert!(error.starts_with(flag), "{error}");
        }
    }

    #[test]
    fn a_price_is_stated_once() {
        let prices = ["h100-sxm=2", "l40s=1", "h100-sxm =3"];
        let source = PriceSource {
            prices: prices.map(str::to_owned).to_vec(),
            ..PriceSource::default()
        };
        let error = source.read(&[]).unwrap_err().to_string();
        assert!(
            error.contains("`h100-sxm` twice: h100-sxm=2 and h100-sxm =3"),
            "{error}"
        );
    }

    #[test]
    fn a_price_is_of_one_gpu_and_a_number() {
        for wrong in [
            "",
            "=2",
            " = 2",
            "h100-sxm",
            "h100-sxm=",
            "h100-sxm=x",
            "h100-sxm=1,l40s=2",
            "h100-sxm=1,",
            ",h100-sxm=1",
            "h100=1",
            "h100-sxm=-1",
            "h100-sxm=nan",
            "h100-sxm=inf",
            "a.b=1",
            "h100-sxm=1=2",
        ] {
            let source = PriceSource {
                prices: vec![wrong.to_owned()],
                ..PriceSource::default()
            };
            let error = source.read(&[]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--price {wrong}: ")), "{error}");
        }
        let source = PriceSource {
            prices: vec![" h100-sxm = 2e0 ".to_owned(), "kwh=.5".to_owned()],
            ..PriceSource::default()
        };
        let prices = source.read(&[]).unwrap();
        assert_eq!(prices.gpu_hour["h100-sxm"], 2.0);
        assert_eq!(prices.kwh, Some(0.5));
    }

    #[test]
    fn flags_win_over_the_file_and_what_varies_over_flags() {
        let source = WorkloadSource {
            text: Some("requests = 3\nseed = 1\n[[class]]\nslo = \"ttft=1s\"\n[[class]]\n".into()),
            requests: Some(5),
            time_scale: Some(2.0),
            ..WorkloadSource::default()
        };
        let of = |sets: &[&str]| {
            let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
            source.workload(&sets).unwrap().0
        };
        assert_eq!((of(&[]).requests, of(&[]).time_scale), (Some(5), 2.0));
        assert_eq!(of(&["requests = 7"]).requests, Some(7));
        assert_eq!(of(&["time_scale=3", "seed=2"]).time_scale, 3.0);
        let text = source.text(Some(&"itl=5ms".parse().unwrap())).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let given = |line: &str| lines.iter().filter(|of| of.starts_with(line)).count();
        assert_eq!(given("requests = 5 "), 1, "{text}");
        assert_eq!(given("time_scale = 2.0 "), 1, "{text}");
        assert_eq!(given("slo = \"itl=5ms\" "), 2, "{text}");
        assert!(
            text.contains("# --slo") && text.contains("# --requests"),
            "{text}"
        );
    }
}
