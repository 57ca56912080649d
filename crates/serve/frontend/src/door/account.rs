//! Account of one request: its line in the access log, its span, and the tokens that its key is charged for.

use std::sync::Arc;

use slipstream_planes::clock::monotonic_ns;

use crate::door::access::{AnswerEnd, Entry, TEXT_BYTES_MAX, unix_now};
use crate::door::budget::ClientUse;
use crate::door::rates::KeyUse;
use crate::door::service::Service;
use crate::door::trace_context::{Span, TraceId};

/// Tokens of a request and its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) prompt: u64,
    /// Those of the prompt that were cached; `None`: the engine does not say.
    pub(crate) cached: Option<u64>,
    pub(crate) completion: u64,
}

/// Of one request. Settled when it is dropped.
#[derive(Default)]
pub(crate) struct Account {
    line: Option<(Arc<Service>, Box<Entry>)>,
    /// The entry is for the access log, which counts tokens; otherwise for a span alone.
    is_logged: bool,
    /// Charge of its key, ns of its rate.
    charge: Option<(Arc<ClientUse>, u64)>,
    counts: Option<TokenCounts>,
    /// An answer began, or an error took its place.
    answered: bool,
    /// How the answer ended; `None`: its client left.
    end: Option<AnswerEnd>,
}

/// At most so much of `text` as a line takes.
fn shortened(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

impl Account {
    /// The request will have a line, or a span, or both.
    pub(crate) fn open_line(&mut self, service: &Arc<Service>, mut entry: Entry) {
        self.is_logged = service.access.is_some();
        entry.path = shortened(&entry.path);
        entry.method = shortened(&entry.method);
        self.line = Some((service.clone(), Box::new(entry)));
    }

    /// Whether tokens are of interest.
    pub(crate) fn wants_counts(&self) -> bool {
        self.is_logged || self.charge.is_some()
    }

    /// Its span, if it has one.
    pub(crate) fn span(&self) -> Option<&Span> {
        self.line.as_ref()?.1.span.as_ref()
    }

    fn entry(&mut self) -> Option<&mut Entry> {
        self.line.as_mut().map(|(_, entry)| &mut **entry)
    }

    pub(crate) fn note_key(&mut self, key: &KeyUse) {
        if let Some(entry) = self.entry() {
            entry.key = Some(key.name.clone());
        }
    }

    pub(crate) fn note_charge(&mut self, client: Arc<ClientUse>, taken_ns: u64) {
        self.charge = Some((client, taken_ns));
    }

    pub(crate) fn note_status(&mut self, status: u16) {
        self.answered = true;
        if let Some(entry) = self.entry() {
            entry.status = status;
        }
    }

    pub(crate) fn note_model(&mut self, model: Option<&str>) {
        if let Some(entry) = self.entry() {
            entry.model = model.map(shortened);
        }
    }

    /// `engine` makes the answer, or the rest of it; or it `answers` with an error only.
    pub(crate) fn note_engine(&mut self, engine: &dyn ToString, answers: bool) {
        if let Some(entry) = self.entry()
            && (answers || entry.engine.is_none())
        {
            entry.engine = Some(engine.to_string());
        }
    }

    pub(crate) fn note_trace(&mut self, id: &TraceId) {
        if let Some(entry) = self.entry() {
            entry.trace_id = Some(id.as_str().to_owned());
        }
    }

    pub(crate) fn note_retry(&mut self) {
        if let Some(entry) = self.entry() {
            entry.retries += 1;
        }
    }

    pub(crate) fn note_resume(&mut self) {
        if let Some(entry) = self.entry() {
            entry.resumes += 1;
        }
    }

    /// A piece of a stream was sent.
    #[inline]
    pub(crate) fn note_piece(&mut self) {
        if let Some(entry) = self.entry()
            && entry.first_ns == 0
        {
            entry.first_ns = monotonic_ns();
        }
    }

    /// The answer is over. The first end that is noted stands.
    pub(crate) fn note_end(&mut self, end: AnswerEnd) {
        self.end.get_or_insert(end);
    }

    /// The answer's tokens are known.
    pub(crate) fn note_counts(&mut self, counts: TokenCounts) {
        self.counts = Some(counts);
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let counts = self.counts;
        if let Some((client, charged)) = self.charge.take()
            && let Some(key) = &client.key
        {
            // An error costs nothing. A client that left before the answer pays the charge: an engine may have computed
            // any part of it.
            let used = counts.map_or(0, |of| of.prompt + of.completion);
            if counts.is_some() || self.answered {
                key.settle(charged, used);
            }
        }
        let Some((service, mut entry)) = self.line.take() else {
            return;
        };
        entry.ended_ns = monotonic_ns();
        entry.unix = unix_now();
        entry.end = match self.end {
            Some(AnswerEnd::Complete) if entry.status >= 400 => AnswerEnd::Refused,
            end => end.unwrap_or_default(),
        };
        entry.prompt_tokens = counts.map(|of| of.prompt);
        entry.cached_tokens = counts.and_then(|of| of.cached);
        entry.completion_tokens = counts.map(|of| of.completion);
        let spans = service.spans.as_ref().filter(|_| entry.span.is_some());
        match (&service.access, spans) {
            (None, None) => {}
            (Some(log), None) => log.send(entry),
            (None, Some(spans)) => spans.send(entry),
            (Some(log), Some(spans)) => {
                spans.send(entry.clone());
                log.send(entry);
            }
        }
    }
}
