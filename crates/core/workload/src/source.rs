//! Sources of requests: one interface over generators and traces.

use slipstream_base::SimTime;
use slipstream_config::workload_file::{Content, Workload};

use crate::empirical;
pub use crate::error::SourceError;
use crate::generate::Generator;
pub use crate::request::{Images, Request, TURNS_MAX};
use crate::trace::Trace;

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
