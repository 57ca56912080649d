//! Why the stream of requests failed.

use std::path::PathBuf;

/// Why the stream of requests failed. The trace must be corrected; a retry does not help.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The trace cannot be opened or read.
    #[error("trace {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The times of a trace are almost certainly in another unit than its format's.
    #[error("trace {what}")]
    Unit {
        /// The file, and the evidence.
        what: String,
    },
    /// A line is not a request.
    #[error("trace {}, line {line}: {what}; correct it, or skip such lines (`on_bad_line = \"skip\"`, `--on-bad-line skip`)", path.display())]
    BadLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The error.
        what: String,
    },
    /// A file of values cannot be used.
    #[error("values in {}{}: {what}; correct the file, or the distribution that refers to it (`kind = \"empirical\"`)", path.display(), at_line(*line))]
    Values {
        /// The file.
        path: PathBuf,
        /// Line number, from 1; 0 for the file as a whole.
        line: u64,
        /// The error.
        what: String,
    },
    /// A model that the workload states is not served.
    #[error(
        "the workload's `models` has `{model}`, which no pool serves; there {}; correct the name, or add a pool with \
         that `model.name`",
        served_are(served)
    )]
    UnknownModel {
        /// The model.
        model: String,
        /// Those that are served.
        served: Vec<String>,
    },
    /// Several models are served, and a class of the workload states none.
    #[error(
        "class `{class}` of the workload states no model, and there {}; set its `models`, such as `models = [\"{}\"]`",
        served_are(served),
        served.join("\", \"")
    )]
    NoModel {
        /// The class.
        class: String,
        /// The models that are served.
        served: Vec<String>,
    },
    /// A trace without a request.
    #[error("trace {}: {}", path.display(), no_requests(*skipped))]
    Empty {
        /// The file.
        path: PathBuf,
        /// Lines that were skipped as bad.
        skipped: u64,
    },
    /// A request would be due after more than a century: an error in a rate, a time or their scale.
    #[error(
        "a request is due {due_s:.3e} s after the start, more than a century; raise the rate, or `time_scale`, \
         or shorten think times"
    )]
    Late {
        /// When it is due, s.
        due_s: f64,
    },
    /// Arrival times are requested from a workload that is not a trace.
    #[error(
        "the workload takes its arrivals from a trace but has none; set `arrival.kind`, or add `[trace]`"
    )]
    NoTrace,
}

/// `is one model, `a``, or `are 2 models, `a` and `b``.
pub(crate) fn served_are(served: &[String]) -> String {
    let names: Vec<String> = served.iter().map(|name| format!("`{name}`")).collect();
    let names = names.join(", ");
    match served.len() {
        1 => format!("is one model, {names}"),
        count => format!("are {count} models, {names}"),
    }
}

fn no_requests(skipped: u64) -> String {
    match skipped {
        0 => "it has no request".to_owned(),
        n => format!("it has no request: all {n} of its lines were skipped as bad"),
    }
}

/// `, line 3`; empty for the file as a whole.
fn at_line(line: u64) -> String {
    if line == 0 {
        String::new()
    } else {
        format!(", line {line}")
    }
}
