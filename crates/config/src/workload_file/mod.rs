//! The workload file, resolved: which requests are made, and when.
//!
//! Plain values with defaults. The same file and seed give the same requests to `bench`,
//! `simulate` and `drag`. All times are workload time; [`Workload::time_scale`] compresses them
//! together when the requests are made.

mod read;

use std::path::PathBuf;
use std::sync::Arc;

use slipstream_base::slo::Slo;

pub use read::{RATE_MAX, read};

/// A whole workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Seed of every draw. Default 0.
    pub seed: u64,
    /// Requests in all, later turns counted; `None`: until `duration_s` or the trace ends.
    pub requests: Option<u64>,
    /// No session begins later than this, s of workload time.
    pub duration_s: Option<f64>,
    /// Divides arrival times, think times and `duration_s`: 60 makes an hour a minute. Default 1.
    pub time_scale: f64,
    /// When sessions begin.
    pub arrival: Arrival,
    /// What is asked.
    pub content: Content,
}

impl Default for Workload {
    fn default() -> Self {
        Workload {
            seed: 0,
            requests: None,
            duration_s: None,
            time_scale: 1.0,
            arrival: Arrival::Closed { concurrency: 1 },
            content: Content::Generated(vec![Class::default()]),
        }
    }
}

/// When sessions begin. A session is one conversation, and most often one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// Closed loop: so many sessions at a time; one begins where another ended.
    Closed {
        /// Sessions at a time, at least 1.
        concurrency: u32,
    },
    /// At equal gaps.
    Constant {
        /// Sessions, 1/s.
        rate_per_s: f64,
    },
    /// At exponential gaps.
    Poisson {
        /// Sessions, 1/s, on average.
        rate_per_s: f64,
    },
    /// At Gamma-distributed gaps: `cv` above 1 is burstier than Poisson, below 1 smoother.
    Gamma {
        /// Sessions, 1/s, on average.
        rate_per_s: f64,
        /// Standard deviation of the gaps over their mean.
        cv: f64,
    },
    /// At Weibull-distributed gaps: `shape` below 1 is burstier than Poisson, 1 is Poisson, above it
    /// smoother.
    Weibull {
        /// Sessions, 1/s, on average.
        rate_per_s: f64,
        /// Shape of the distribution.
        shape: f64,
    },
    /// At random (Poisson), at a rate that goes from one value to another and stays there.
    Ramp {
        /// Sessions, 1/s, at the start.
        from_per_s: f64,
        /// Sessions, 1/s, at the end and from then on; above 0.
        to_per_s: f64,
        /// How long the rate takes from one to the other, s, above 0.
        ramp_s: f64,
    },
    /// At random (Poisson), at a rate that rises and falls like a cosine.
    Diurnal {
        /// Sessions, 1/s, on average over a period.
        rate_per_s: f64,
        /// The rate goes from `rate_per_s · (1 − amplitude)` to `rate_per_s · (1 + amplitude)`.
        amplitude: f64,
        /// From peak to peak, s. Default: a day.
        period_s: f64,
        /// When the first peak is, s. Default: half a period, so that a run begins at the lowest.
        peak_s: f64,
    },
    /// At these times, ms, in order; one session each.
    Timestamps {
        /// Shape `[n]`, not decreasing.
        ms: Vec<f64>,
    },
    /// As the trace says.
    Trace,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Drawn from classes; at least one.
    Generated(Vec<Class>),
    /// Read from a file.
    Trace(TraceFile),
}

/// `[trace]`
#[derive(Clone, Debug, PartialEq)]
pub struct TraceFile {
    /// A Mooncake JSONL file: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
    pub path: PathBuf,
    /// What to do with a line that is not a request. Default `Stop`.
    pub on_bad_line: OnBadLine,
    /// Tokens that one of `hash_ids` stands for. Default 512.
    pub tokens_per_id: u32,
}

/// What to do with a line of a trace that is not a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnBadLine {
    /// End the run with an error that names the line.
    #[default]
    Stop,
    /// Count it and go on.
    Skip,
}

/// A kind of session: `[[class]]`, or the top level of a file that has only one.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Name in reports. Default `default`.
    pub name: String,
    /// Share of sessions, relative to the other classes. Default 1.
    pub weight: f64,
    /// Tokens of a session's first prompt, shared prefix included. Default 1,024.
    pub isl: Dist,
    /// Tokens of an answer: the request's `max_tokens`. Default 128.
    pub osl: Dist,
    /// Ask for exactly `osl` tokens. Default true.
    pub ignore_eos: bool,
    /// Sent as `priority`, if not 0. Default 0.
    pub priority: i32,
    /// Shared prefixes, outermost first; empty: nothing is shared.
    pub prefix: Vec<PrefixLevel>,
    /// More than one turn.
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
            prefix: Vec::new(),
            session: SessionShape::default(),
            slo: None,
        }
    }
}

/// `[[prefix]]`: one level of a tree of shared prefixes. A session takes one path from the root,
/// and its prompt begins with the texts along it.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixLevel {
    /// Different texts below each text of the level above, at least 1.
    pub branches: u32,
    /// Tokens of each text, at least 1; the same for all sessions that share the text.
    pub tokens: Dist,
    /// Popularity of branch `k` (from 0) is `(k + 1)^-skew` (Zipf's law); 0: equal. Default 0.
    pub skew: f64,
}

/// `[session]`: turns that follow each other, each with everything before it in its prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct SessionShape {
    /// Turns. Default 1.
    pub turns: Dist,
    /// From an answer's end until the next turn is due, s of workload time. Default 0.
    pub think_time_s: Dist,
    /// New user text of every turn after the first, tokens. Default 64.
    pub user_tokens: Dist,
    /// A session ends before a turn whose prompt (counting answers at full `osl`) would be longer
    /// than this, tokens.
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
    /// Always this.
    Exact(f64),
    /// Equally likely between both ends; whole numbers include both.
    Uniform {
        /// Least.
        min: f64,
        /// Most.
        max: f64,
    },
    /// Normal, cut to the bounds (a draw beyond one becomes that bound).
    Normal {
        /// Mean before cutting.
        mean: f64,
        /// Standard deviation over mean, before cutting.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Log-normal with this mean and coefficient of variation (of the values, not their
    /// logarithms), cut to the bounds.
    LogNormal {
        /// Mean before cutting.
        mean: f64,
        /// Standard deviation over mean, before cutting.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Exponential, cut to the bounds.
    Exponential {
        /// Mean before cutting.
        mean: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Zipf's law over the whole numbers from `min` to `max`: the *k*-th of them (from 1) with a chance
    /// proportional to `k^-skew`.
    Zipf {
        /// Least, and likeliest.
        min: f64,
        /// Most.
        max: f64,
        /// Exponent; 0: all equal.
        skew: f64,
    },
    /// One of the values of a file, each as likely as any other.
    Empirical(Empirical),
    /// One of these values, by weight.
    Choice {
        /// Shape `[n]`, `n >= 1`.
        values: Vec<f64>,
        /// Shape `[n]`, at least one above 0.
        weights: Vec<f64>,
    },
}

/// Values that were measured: a column of a CSV file.
#[derive(Clone, Debug, PartialEq)]
pub struct Empirical {
    /// The file.
    pub path: PathBuf,
    /// Name of the column; `None`: the first one.
    pub column: Option<String>,
    /// Values beyond become the nearer bound.
    pub bounds: Bounds,
    /// The values; empty until whoever draws has read the file.
    pub values: Arc<[f64]>,
}

/// Ends of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Least. Default 0 (lengths are at least 1 in any case).
    pub min: f64,
    /// Most. Default: none.
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
    /// The largest value that can be drawn; infinite if there is none.
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

    /// The smallest value that can be drawn.
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
