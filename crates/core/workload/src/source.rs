//! Sources of requests: one interface over generators and traces.

use std::path::PathBuf;

use slipstream_base::{RequestId, SimTime};
use slipstream_config::workload_file::{Content, Workload};

use crate::empirical;
use crate::generate::Generator;
use crate::prompt::PromptSource;
use crate::trace::Trace;

/// Limit of a session's turns; a request's number has 12 bits for them.
pub const TURNS_MAX: u32 = 1 << 12;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Number of the session, from 0 in order of arrival.
    pub session: u64,
    /// Turn of the session, from 0.
    pub turn: u32,
    /// Planned turns of the session.
    pub turns: u32,
    /// Due time, after the run's start; compressed by the time scale. For a later turn: known when
    /// the previous answer is complete.
    pub due: SimTime,
    /// The prompt.
    pub prompt: PromptSource,
    /// Limit of tokens to generate (exact, if `ignore_eos`), at least 1.
    pub output_len: u32,
    /// Generate `output_len` tokens whatever the natural length is.
    pub ignore_eos: bool,
    /// Priority in engines that schedule by priority: lower goes first.
    pub priority: i32,
    /// Its LoRA adapter ([`adapter_id`](slipstream_base::adapter_id)); 0: the model itself.
    pub adapter: u64,
    /// Images in its prompt.
    pub images: Images,
    /// Its model, as an index into [`Workload::served_models`]; 0 if there is one.
    pub model: u32,
    /// Index of its class in the workload.
    pub class: u32,
}

/// Images in a prompt, one after the other. None of them is in another session's prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Images {
    /// Their number.
    pub count: u32,
    /// The first one's first token in the prompt.
    pub offset: u32,
    /// Tokens of each.
    pub tokens: u32,
}

impl Request {
    /// The request's number: the same in every run of the workload.
    pub fn id(&self) -> RequestId {
        RequestId(self.session << 12 | u64::from(self.turn))
    }

    /// The request's name in reports: `session.turn`.
    pub fn name(&self) -> String {
        format!("{}.{}", self.session, self.turn)
    }

    /// Whether another turn follows.
    pub fn has_next(&self) -> bool {
        self.turn + 1 < self.turns
    }
}

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

/// The first requests of all sessions, in order of arrival; later turns by
/// [`follow_up`](Source::follow_up).
///
/// One request is in memory at a time.
#[derive(Debug)]
pub struct Source {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Generated(Generator),
    Trace(Box<Trace>),
}

impl Source {
    /// Opens a workload. `salt` 0 is the workload itself; another salt gives requests of the same
    /// kind with other texts (a warm-up that does not fill caches for the measured part).
    ///
    /// # Errors
    /// [`SourceError`] if a trace cannot be opened.
    pub fn open(workload: &Workload, salt: u64) -> Result<Source, SourceError> {
        let kind = match &workload.content {
            Content::Generated(classes) => {
                let mut classes = classes.clone();
                empirical::load(&mut classes)?;
                Kind::Generated(Generator::new(workload, classes, salt)?)
            }
            Content::Trace(file) => Kind::Trace(Box::new(Trace::open(workload, file, salt)?)),
        };
        Ok(Source { kind })
    }

    /// The turn after `request`, or `None` if the session ends with it. The answer had
    /// `answer_tokens` tokens, the last of them at `now`; think time is added.
    pub fn follow_up(
        &self,
        request: &Request,
        answer_tokens: u32,
        now: SimTime,
    ) -> Option<Request> {
        match &self.kind {
            Kind::Generated(generator) => generator.follow_up(request, answer_tokens, now),
            Kind::Trace(trace) => trace.follow_up(request, answer_tokens, now),
        }
    }

    /// Ends the session: a request of it failed, or another driver runs it.
    pub fn forget(&self, session: u64) {
        if let Kind::Trace(trace) = &self.kind {
            trace.forget(session);
        }
    }

    /// Whether requests may follow from answers. For a trace this is known after its first line.
    pub fn may_follow_up(&self) -> bool {
        match &self.kind {
            Kind::Generated(generator) => generator.may_follow_up(),
            Kind::Trace(trace) => trace.has_sessions(),
        }
    }

    /// Lines of the trace skipped as bad so far.
    pub fn skipped_lines(&self) -> u64 {
        match &self.kind {
            Kind::Generated(_) => 0,
            Kind::Trace(trace) => trace.skipped_lines(),
        }
    }
}

impl Iterator for Source {
    type Item = Result<Request, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.kind {
            Kind::Generated(generator) => generator.next().map(Ok),
            Kind::Trace(trace) => trace.next(),
        }
    }
}
