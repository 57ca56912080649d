//! The workload file, resolved: requests and their arrival times.
//!
//! Plain values with defaults. The same file and seed give the same requests to `bench`, `simulate`
//! and `drag`. All times are workload time; [`Workload::time_scale`] divides them all when the
//! requests are generated.

mod arrival;
mod dist;
mod read;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use slipstream_base::slo::Slo;

pub use arrival::RATE_MAX;
pub(crate) use read::TELLING_KEYS;
pub use read::read;

/// A whole workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Seed of all random numbers. Default 0.
    pub seed: u64,
    /// Total number of requests, including later turns; `None`: until `duration_s` or the trace
    /// ends.
    pub requests: Option<u64>,
    /// Limit of session start times, s of workload time.
    pub duration_s: Option<f64>,
    /// Divides arrival times, think times and `duration_s`: 60 turns an hour into a minute. Default
    /// 1.
    pub time_scale: f64,
    /// Only the sessions that begin in this part, which then begins at 0: its start and its length,
    /// s of workload time after `time_scale`. Not for closed loops. No key of a file.
    pub window_s: Option<(f64, f64)>,
    /// Names of the models that requests may be for, which requests know by their place here; empty: all are for the
    /// only one. No key of a file.
    pub served_models: Vec<String>,
    /// Arrivals of sessions.
    pub arrival: Arrival,
    /// Prompts and answers.
    pub content: Content,
}

impl Workload {
    /// Names of the LoRA adapters that its requests use, some perhaps several times.
    pub fn adapters(&self) -> Vec<&str> {
        match &self.content {
            Content::Generated(classes) => {
                let names = classes.iter().flat_map(|class| &class.adapters);
                names.map(String::as_str).collect()
            }
            Content::Trace(_) => Vec::new(),
        }
    }

    /// Names of the models that its classes state, some perhaps several times.
    pub fn models(&self) -> Vec<&str> {
        match &self.content {
            Content::Generated(classes) => {
                let names = classes.iter().flat_map(|class| &class.models);
                names.map(String::as_str).collect()
            }
            Content::Trace(_) => Vec::new(),
        }
    }

    /// Whether its requests may have images.
    pub fn has_images(&self) -> bool {
        match &self.content {
            Content::Generated(classes) => classes.iter().any(|c| c.images != Dist::Exact(0.0)),
            Content::Trace(_) => false,
        }
    }
}

impl Default for Workload {
    fn default() -> Self {
        Workload {
            seed: 0,
            requests: None,
            duration_s: None,
            time_scale: 1.0,
            window_s: None,
            served_models: Vec::new(),
            arrival: Arrival::Closed { concurrency: 1 },
            content: Content::Generated(vec![Class::default()]),
        }
    }
}

/// Arrivals of sessions. A session is one conversation, and usually one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// Closed loop: a fixed number of concurrent sessions; when one ends, the next begins.
    Closed {
        /// Concurrent sessions, at least 1.
        concurrency: u32,
    },
    /// At constant intervals.
    Constant {
        /// Sessions, 1/s.
        rate_per_s: f64,
    },
    /// At exponential intervals (Poisson).
    Poisson {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
    },
    /// At Gamma-distributed intervals: `cv` above 1 is burstier than Poisson, below 1 smoother.
    Gamma {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
        /// Standard deviation of the intervals over their mean.
        cv: f64,
    },
    /// At Weibull-distributed intervals: `shape` below 1 is burstier than Poisson, 1 is Poisson,
    /// above 1 is smoother.
    Weibull {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
        /// Shape of the distribution.
        shape: f64,
    },
    /// Poisson, at a rate that changes linearly and then stays constant.
    Ramp {
        /// Sessions, 1/s, at the start.
        from_per_s: f64,
        /// Sessions, 1/s, at the end of the ramp and after it; above 0.
        to_per_s: f64,
        /// Duration of the ramp, s, above 0.
        ramp_s: f64,
    },
    /// Poisson, at a rate that follows a cosine.
    Diurnal {
        /// Mean sessions over a period, 1/s.
        rate_per_s: f64,
        /// The rate varies from `rate_per_s · (1 − amplitude)` to `rate_per_s · (1 + amplitude)`.
        amplitude: f64,
        /// Period, s. Default: a day.
        period_s: f64,
        /// Time of the first peak, s. Default: half a period, so that a run begins at the minimum.
        peak_s: f64,
    },
    /// At these times, ms, in order; one session each.
    Timestamps {
        /// Shape `[n]`, not decreasing.
        ms: Vec<f64>,
    },
    /// From the trace.
    Trace,
}

/// Prompts and answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Drawn from classes; at least one.
    Generated(Vec<Class>),
    /// Read from a file.
    Trace(TraceFile),
}

/// `[trace]`
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceFile {
    /// A file in any of the known formats, or one whose fields `columns` names.
    pub path: PathBuf,
    /// Handling of a line that is not a request. Default `Stop`.
    pub on_bad_line: OnBadLine,
    /// Tokens per entry of `hash_ids`; `None`: as the format has it.
    pub tokens_per_id: Option<u32>,
    /// Unit of its times; `None`: as the format has it.
    pub unit: Option<TimeUnit>,
    /// Names of its fields; `None`: those of a known format.
    pub columns: Option<TraceColumns>,
}

/// Unit of a trace's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUnit {
    /// Seconds.
    S,
    /// Milliseconds.
    Ms,
    /// Microseconds.
    Us,
    /// Nanoseconds.
    Ns,
}

impl TimeUnit {
    /// Names of the units, as in files and flags.
    pub const NAMES: [(&'static str, TimeUnit); 4] = [
        ("s", TimeUnit::S),
        ("ms", TimeUnit::Ms),
        ("us", TimeUnit::Us),
        ("ns", TimeUnit::Ns),
    ];

    /// Length in ms.
    pub fn ms(self) -> f64 {
        match self {
            TimeUnit::S => 1e3,
            TimeUnit::Ms => 1.0,
            TimeUnit::Us => 1e-3,
            TimeUnit::Ns => 1e-6,
        }
    }

    /// In words, in the plural.
    pub fn word(self) -> &'static str {
        match self {
            TimeUnit::S => "seconds",
            TimeUnit::Ms => "milliseconds",
            TimeUnit::Us => "microseconds",
            TimeUnit::Ns => "nanoseconds",
        }
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = TimeUnit::NAMES.into_iter().find(|(_, unit)| unit == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for TimeUnit {
    type Err = String;
    fn from_str(text: &str) -> Result<TimeUnit, String> {
        let found = TimeUnit::NAMES.into_iter().find(|(name, _)| *name == text);
        found
            .map(|(_, unit)| unit)
            .ok_or_else(|| format!("`{text}` is not a unit of time: use s, ms, us or ns"))
    }
}

/// Names of a trace's fields, written as `arrival=NAME,isl=NAME,osl=NAME`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TraceColumns {
    /// Arrival time: a date, or a number in the trace's unit. `None`: it has none.
    pub arrival: Option<String>,
    /// Tokens of the prompt.
    pub isl: String,
    /// Tokens of the answer.
    pub osl: String,
    /// Name of the session of which a request is a turn.
    pub session: Option<String>,
    /// Name of the model.
    pub model: Option<String>,
    /// List of ids of the prompt's parts, as `hash_ids`.
    pub hash_ids: Option<String>,
}

impl TraceColumns {
    /// The names in the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let optional = [&self.arrival, &self.session, &self.model, &self.hash_ids];
        let optional = optional.into_iter().filter_map(|name| name.as_deref());
        [&*self.isl, &*self.osl].into_iter().chain(optional)
    }
}

impl fmt::Display for TraceColumns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "isl={},osl={}", self.isl, self.osl)?;
        for (key, name) in [
            ("arrival", &self.arrival),
            ("session", &self.session),
            ("model", &self.model),
            ("ids", &self.hash_ids),
        ] {
            if let Some(name) = name {
                write!(f, ",{key}={name}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for TraceColumns {
    type Err = String;
    fn from_str(text: &str) -> Result<TraceColumns, String> {
        let [
            mut arrival,
            mut isl,
            mut osl,
            mut session,
            mut model,
            mut ids,
        ] = [const { None }; 6];
        for part in text.split(',') {
            let (key, name) = part
                .split_once('=')
                .filter(|(_, name)| !name.trim().is_empty())
                .ok_or_else(|| format!("`{part}` is not KEY=NAME, such as isl=ContextTokens"))?;
            let (key, name) = (key.trim(), name.trim().to_owned());
            let slot = match key {
                "arrival" => &mut arrival,
                "isl" => &mut isl,
                "osl" => &mut osl,
                "session" => &mut session,
                "model" => &mut model,
                "ids" => &mut ids,
                other => {
                    return Err(format!(
                        "`{other}` is not a field of a request: use arrival, isl, osl, session, model and ids"
                    ));
                }
            };
            if slot.replace(name).is_some() {
                return Err(format!("`{key}` is named twice"));
            }
        }
        Ok(TraceColumns {
            arrival,
            isl: isl.ok_or("`isl`, the tokens of the prompt, is not named")?,
            osl: osl.ok_or("`osl`, the tokens of the answer, is not named")?,
            session,
            model,
            hash_ids: ids,
        })
    }
}

/// Handling of a trace's line that is not a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadLine {
    /// End the run with an error that names the line.
    #[default]
    Stop,
    /// Count it and continue.
    Skip,
}

/// Most images of a prompt.
pub const IMAGES_MAX: u32 = 256;
/// Most tokens of an image.
pub const IMAGE_TOKENS_MAX: u32 = 65_536;

/// A kind of session: `[[class]]`, or the top level of a file that has only one.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Name in reports. Default `default`.
    pub name: String,
    /// Share of sessions, relative to the other classes. Default 1.
    pub weight: f64,
    /// Tokens of a session's first prompt, including the shared prefix. Default 1,024.
    pub isl: Dist,
    /// Tokens of an answer: the request's `max_tokens`. Default 128.
    pub osl: Dist,
    /// Generate exactly `osl` tokens. Default true.
    pub ignore_eos: bool,
    /// Sent as `priority`, if not 0. Default 0.
    pub priority: i32,
    /// Models, of which each session uses one; empty: the only one that is served.
    pub models: Vec<String>,
    /// Share of sessions of each of `models`, relative to the others. Default: equal.
    pub model_weights: Vec<f64>,
    /// LoRA adapters, of which each session uses one; empty: the model itself.
    pub adapters: Vec<String>,
    /// Popularity of adapter `k` (from 0) is `(k + 1)^-skew` (Zipf's law); 0: equal. Default 0.
    pub adapter_skew: f64,
    /// Images in each session's first prompt, in addition to `isl`. Default 0.
    pub images: Dist,
    /// Tokens that each of them takes in the prompt. Default 1,024.
    pub image_tokens: Dist,
    /// Shared prefixes, outermost first; empty: nothing is shared.
    pub prefix: Vec<PrefixLevel>,
    /// Multi-turn sessions.
    pub session: SessionShape,
    /// Objectives of its requests, for goodput; `None`: those of the run.
    pub slo: Option<Slo>,
}

impl Default for Class {
    fn default() -> Self {
        Class {
            name: "default".into(),
            weight: 1.0,
            isl: Dist::Exact(1024.0),
            osl: Dist::Exact(128.0),
            ignore_eos: true,
            priority: 0,
            models: Vec::new(),
            model_weights: Vec::new(),
            adapters: Vec::new(),
            adapter_skew: 0.0,
            images: Dist::Exact(0.0),
            image_tokens: Dist::Exact(1024.0),
            prefix: Vec::new(),
            session: SessionShape::default(),
            slo: None,
        }
    }
}

/// `[[prefix]]`: one level of a tree of shared prefixes. A session follows one path from the root,
/// and its prompt begins with the texts along it.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixLevel {
    /// Number of different texts below each text of the level above, at least 1.
    pub branches: u32,
    /// Tokens of each text, at least 1; the same for all sessions that share the text.
    pub tokens: Dist,
    /// Popularity of branch `k` (from 0) is `(k + 1)^-skew` (Zipf's law); 0: equal. Default 0.
    pub skew: f64,
}

/// `[session]`: consecutive turns, each with the whole conversation so far in its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionShape {
    /// Number of turns. Default 1.
    pub turns: Dist,
    /// Think time: from an answer's end until the next turn is due, s of workload time. Default 0.
    pub think_time_s: Dist,
    /// New user text of every turn after the first, tokens. Default 64.
    pub user_tokens: Dist,
    /// A session ends before a turn whose prompt (counting answers at full `osl`) would exceed this
    /// length, tokens.
    pub isl_max: Option<u32>,
}

impl Default for SessionShape {
    fn default() -> Self {
        SessionShape {
            turns: Dist::Exact(1.0),
            think_time_s: Dist::Exact(0.0),
            user_tokens: Dist::Exact(64.0),
            isl_max: None,
        }
    }
}

/// A distribution of positive numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Dist {
    /// A constant.
    Exact(f64),
    /// Uniform between both ends; whole numbers include both.
    Uniform {
        /// Minimum.
        min: f64,
        /// Maximum.
        max: f64,
    },
    /// Normal, clamped to the bounds.
    Normal {
        /// Mean before clamping.
        mean: f64,
        /// Standard deviation over mean, before clamping.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Log-normal with this mean and coefficient of variation (of the values, not their
    /// logarithms), clamped to the bounds.
    LogNormal {
        /// Mean before clamping.
        mean: f64,
        /// Standard deviation over mean, before clamping.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Exponential, clamped to the bounds.
    Exponential {
        /// Mean before clamping.
        mean: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Zipf's law over the whole numbers from `min` to `max`: the *k*-th of them (from 1) with a
    /// probability proportional to `k^-skew`.
    Zipf {
        /// Minimum, the most likely value.
        min: f64,
        /// Maximum.
        max: f64,
        /// Exponent; 0: all equal.
        skew: f64,
    },
    /// One of the values of a file, with equal probability.
    Empirical(Empirical),
    /// One of these values, by weight.
    Choice {
        /// Shape `[n]`, `n >= 1`.
        values: Vec<f64>,
        /// Shape `[n]`, at least one above 0.
        weights: Vec<f64>,
    },
}

/// Measured values: a column of a CSV file.
#[derive(Clone, Debug, PartialEq)]
pub struct Empirical {
    /// The file.
    pub path: PathBuf,
    /// Name of the column; `None`: the first one.
    pub column: Option<String>,
    /// Bounds that values are clamped to.
    pub bounds: Bounds,
    /// The values; empty until the user of the distribution has read the file.
    pub values: Arc<[f64]>,
}

/// Bounds of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Minimum. Default 0 (lengths are at least 1 in any case).
    pub min: f64,
    /// Maximum. Default: none.
    pub max: f64,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            min: 0.0,
            max: f64::INFINITY,
        }
    }
}

impl Dist {
    /// The largest possible value; infinite if there is none.
    pub fn max(&self) -> f64 {
        match self {
            Dist::Exact(value) => *value,
            Dist::Uniform { max, .. } | Dist::Zipf { max, .. } => *max,
            Dist::Empirical(e) => e.bounds.max,
            Dist::Normal { bounds, .. }
            | Dist::LogNormal { bounds, .. }
            | Dist::Exponential { bounds, .. } => bounds.max,
            Dist::Choice { values, .. } => values.iter().copied().fold(f64::MIN, f64::max),
        }
    }

    /// The smallest possible value.
    pub fn min(&self) -> f64 {
        match self {
            Dist::Exact(value) => *value,
            Dist::Uniform { min, .. } | Dist::Zipf { min, .. } => *min,
            Dist::Empirical(e) => e.bounds.min,
            Dist::Normal { bounds, .. }
            | Dist::LogNormal { bounds, .. }
            | Dist::Exponential { bounds, .. } => bounds.min,
            Dist::Choice { values, .. } => values.iter().copied().fold(f64::MAX, f64::min),
        }
    }
}
