//! Judges the end of an answer by its content: finish reasons, last events, and errors within a 200. No I/O.
//!
//! The end of a connection proves little: vLLM and SGLang report their failure in a stream that then ends cleanly, and an
//! engine may be lost after the last word of its answer.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use memchr::memchr2;
use memchr::memmem::{self, Finder};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::api::Api;
use super::event::{Choice, EventData, Fields, fields, is_nothing, string, value};
use super::sse::{self, Event};

/// An error that an engine reported in an answer of status 200.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reported {
    /// Whether the client's request is at fault.
    pub(super) is_clients: bool,
    /// Whether the engine is busy (503).
    pub(super) is_busy: bool,
    pub(super) text: String,
}

/// Limit of an engine's message, in characters.
const TEXT_CHARS_MAX: usize = 300;

impl Reported {
    fn by_engine(text: impl Into<String>) -> Reported {
        Reported {
            is_clients: false,
            is_busy: false,
            text: text.into(),
        }
    }

    /// Reads an error object, or the value of an `error` field.
    fn of(error: &Value, outer: &Fields<'_>) -> Reported {
        let word = |of: &Value| of.as_str().map(str::to_owned);
        let inner = |name: &str| error.get(name).filter(|value| !value.is_null());
        let text = match error {
            Value::String(text) => text.clone(),
            error => inner("message")
                .and_then(word)
                .unwrap_or_else(|| error.to_string()),
        };
        // Numbers first: both vLLM and SGLang have one.
        let numbers = ["code", "status", "status_code", "http_code"];
        let status = numbers.iter().find_map(|name| {
            let value = inner(name)?;
            let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
            number.filter(|number| (400..600).contains(number))
        });
        // TGI has the kind in a member next to the text.
        let beside = outer.get("error_type").and_then(string);
        let kinds: Vec<String> = ["code", "type"]
            .iter()
            .filter_map(|name| inner(name).and_then(word))
            .chain(beside)
            .map(|kind| plain(&kind))
            .collect();
        let is_clients = match status {
            // Of a connection behind the engine: timeout, misdirected, failed dependency, too early, closed.
            Some(408 | 421 | 424 | 425 | 499) => false,
            // Older versions of vLLM report a dead engine with the status of a bad request.
            Some(400..500) => {
                !text.starts_with("EngineCore encountered an issue")
                    && !kinds.iter().any(|kind| is_of_answer(kind))
            }
            Some(status) => status == 501,
            None => kinds.iter().any(|kind| is_clients_fault(kind)),
        };
        Reported {
            is_clients,
            is_busy: status == Some(503),
            text: text.chars().take(TEXT_CHARS_MAX).collect(),
        }
    }
}

/// Letters and digits of `kind`, in lower case.
fn plain(kind: &str) -> String {
    kind.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|c| c.to_ascii_lowercase())
        .collect()
}

/// Whether `kind`, a plain type or code of an error, names an answer or who sent it: a gateway reports its engine.
fn is_of_answer(kind: &str) -> bool {
    const WORDS: [&str; 5] = ["upstream", "gateway", "backend", "provider", "timeout"];
    WORDS.iter().any(|word| kind.contains(word))
        || kind.contains("response") && !kind.contains("responseformat")
}

/// Whether `kind`, a plain type or code of an error, blames the request. Sources: the error types of OpenAI's and
/// Anthropic's APIs, and of vLLM, SGLang, llama.cpp and TGI.
fn is_clients_fault(kind: &str) -> bool {
    const WORDS: [&str; 20] = [
        "invalid",
        "badrequest",
        "notfound",
        "notimplemented",
        "notsupported",
        "unprocessable",
        "authentication",
        "permission",
        "unauthorized",
        "forbidden",
        "toolarge",
        "toolong",
        "ratelimit",
        "contextlength",
        "exceedcontextsize",
        "contentfilter",
        "contentpolicy",
        "validation",
        "unsupported",
        "insufficientquota",
    ];
    WORDS.iter().any(|word| kind.contains(word))
        && !is_of_answer(kind)
        && !["internal", "server", "engine", "state"]
            .iter()
            .any(|word| kind.contains(word))
}

/// The finish reason of a choice, once it has one.
pub(super) fn finish_of(choice: &Value) -> Option<&Value> {
    finish_in(choice.get("finish_reason"))
}

/// The finish reason in a field's value.
pub(super) fn finish_in(value: Option<&Value>) -> Option<&Value> {
    value.filter(|reason| !is_no_reason(reason))
}

/// Whether a value stands for an absent finish reason.
fn is_no_reason(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The error of an event that is no JSON object: text of a gateway, or half an event.
fn unreadable(text: &[u8]) -> Reported {
    let text = text.trim_ascii();
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * TEXT_CHARS_MAX)]);
    let text: String = text.chars().take(TEXT_CHARS_MAX).collect();
    Reported::by_engine(format!(
        "an event of its stream is not a JSON object: `{text}`"
    ))
}

/// Returns the error that an object reports, if any.
fn error_of(fields: &Fields<'_>, is_error_event: bool) -> Option<Reported> {
    let member = fields.get("error").filter(|raw| !is_nothing(raw));
    let kind = fields.get("type").and_then(string);
    let kind = kind.as_deref().unwrap_or_default();
    let is_error = fields.get("object").and_then(string).as_deref() == Some("error")
        || kind == "error"
        || is_error_event;
    match (member, kind) {
        // `response.failed` of `/v1/responses`, or the response itself.
        (_, "response.failed") => {
            let response = fields.get("response");
            let response = response.and_then(|raw| super::event::fields(raw.get().as_bytes()));
            let error = response.and_then(|response| Some(value(response.get("error")?)));
            let error = error.filter(|error| !error.is_null());
            let error = error.unwrap_or_else(|| "the response failed".into());
            Some(Reported::of(&error, fields))
        }
        (Some(raw), _) => Some(Reported::of(&value(raw), fields)),
        (None, _) if is_error => Some(Reported::of(&described(fields), fields)),
        (None, _) => None,
    }
}

/// The members by which an object describes an error.
fn described(fields: &Fields<'_>) -> Value {
    const NAMES: [&str; 10] = [
        "message",
        "error_message",
        "detail",
        "errors",
        "error_type",
        "type",
        "object",
        "code",
        "status",
        "status_code",
    ];
    let all = NAMES
        .iter()
        .filter_map(|&name| Some((name.to_owned(), value(fields.get(name)?))));
    Value::Object(all.collect())
}

/// Returns the error of an object that has neither choices nor an `error` member, but the members by which Python's web
/// frameworks and gateways report errors.
fn bare_error_of(fields: &Fields<'_>, has_choices: bool) -> Option<Reported> {
    let has = |name: &str| fields.get(name).is_some_and(|raw| !is_nothing(raw));
    let is_answer = has_choices || ["choices", "usage", "id"].iter().any(|name| has(name));
    let names = ["detail", "message", "errors", "error_message"];
    if is_answer || !names.iter().any(|name| has(name)) {
        return None;
    }
    Some(Reported::of(&described(fields), fields))
}

/// Limit of choices of a stream whose ends are remembered. A stream with more ends with its last event.
const CHOICES_TRACKED_MAX: u64 = 4096;

impl Choice<'_> {
    fn index(&self) -> u64 {
        let index = self.fields.get("index");
        index
            .and_then(|raw| serde_json::from_str(raw.get()).ok())
            .unwrap_or_default()
    }

    /// Its finish reason, once it has one.
    pub(super) fn reason(&self) -> Option<String> {
        let reason = self.fields.get("finish_reason").map(|raw| value(raw));
        Some(match reason.filter(|of| !is_no_reason(of))? {
            Value::String(reason) => reason,
            // As SGLang has it within the engine.
            Value::Object(reason) if reason.get("type").is_some_and(Value::is_string) => {
                reason["type"].as_str().unwrap_or_default().to_owned()
            }
            other => other.to_string(),
        })
    }
}

/// Whether a finish reason means that the engine gave up: vLLM and SGLang abort requests when they stop, sleep or load
/// weights; vLLM and gateways use `error` for an internal error.
fn gives_up(reason: &str) -> bool {
    matches!(
        reason,
        "error" | "abort" | "aborted" | "cancelled" | "canceled"
    )
}

fn gave_up(reason: &str) -> Reported {
    Reported::by_engine(format!("finish_reason `{reason}`"))
}

/// Progress of a stream towards its end.
#[derive(Debug, Default)]
pub(super) struct StreamEnd {
    api: Api,
    /// Number of choices requested.
    choices: u64,
    /// Choices that have a finish reason.
    finished: BTreeSet<u64>,
    /// The last event has come.
    is_over: bool,
    /// The engine refused the request within the stream.
    is_refused: bool,
    /// Beginning of events up to their choices, as of the last event that was read for it.
    head: Vec<u8>,
    /// End of that event, from the name of its finish reason: up to its last digits, and behind these.
    reason: Vec<u8>,
    after_digits: Vec<u8>,
    /// Number of digits in the last event.
    digits: usize,
}

/// Digits that are remembered: less than the length of `"error":1`.
const DIGITS_MAX: usize = 8;

/// Judgment of an event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgment {
    /// It belongs to the answer.
    Continues,
    /// The answer ended before it.
    IsOver,
    /// The engine failed.
    Failed(Reported),
}

/// Result of reading a piece of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// Bytes of the piece that belong to the answer: those before an error of the engine, up to the last event.
    pub(super) answer: usize,
    pub(super) reported: Option<Reported>,
}

static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"error\""));
/// A name within a text cannot match: its closing quote would be escaped.
static REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\":"));
static CHOICES: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"choices\":"));

fn is_null(value: &[u8]) -> bool {
    value
        .strip_prefix(b" ")
        .unwrap_or(value)
        .starts_with(b"null")
}

/// Whether whole events are one event of one line, which ends with LF LF.
fn is_one_line(piece: &[u8]) -> bool {
    memchr2(b'\n', b'\r', piece).is_some_and(|length| length + 2 == piece.len())
}

impl StreamEnd {
    /// A stream of `api` with `choices` choices.
    pub(super) fn new(api: Api, choices: u64) -> StreamEnd {
        StreamEnd {
            api,
            choices: choices.max(1),
            ..StreamEnd::default()
        }
    }

    pub(super) fn api(&self) -> Api {
        self.api
    }

    /// The last event has come.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// The engine refused the request within the stream.
    pub(super) fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// All of the answer has come, though perhaps not its last events.
    pub(super) fn is_finished(&self) -> bool {
        self.is_over || self.is_refused || self.finished.len() as u64 >= self.choices
    }

    /// Returns the reason why a stream that ends here is incomplete.
    pub(super) fn missing(&self) -> &'static str {
        match self.api {
            Api::Completions | Api::Chat => "its stream ended without finish reason and `[DONE]`",
            Api::Responses => "its stream ended without `response.completed`",
            Api::Messages => "its stream ended without `message_stop`",
            Api::Other => "its stream ended",
        }
    }

    /// The event that a finished stream must end with.
    pub(super) fn last_event(&self) -> &'static [u8] {
        match self.api {
            Api::Completions | Api::Chat => b"data: [DONE]\n\n",
            Api::Messages => b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            Api::Responses | Api::Other => b"",
        }
    }

    /// Judges the next whole events.
    #[cold]
    pub(super) fn read(&mut self, piece: &[u8]) -> Reading {
        for event in sse::events(piece) {
            let text = event.text();
            let data = EventData::read(&text);
            match self.judge(&event, data.as_ref()) {
                Judgment::Continues => {}
                Judgment::IsOver => {
                    return Reading {
                        answer: event.start,
                        reported: None,
                    };
                }
                Judgment::Failed(reported) => {
                    return Reading {
                        answer: event.start,
                        reported: Some(reported),
                    };
                }
            }
        }
        Reading {
            answer: piece.len(),
            reported: None,
        }
    }

    /// Judges the next event, if it is not [plain](Self::is_plain). `data`: its data, if that is a JSON object.
    pub(super) fn judge(&mut self, event: &Event<'_>, data: Option<&EventData<'_>>) -> Judgment {
        if self.is_over {
            // Other APIs report a failure twice, by `error` and by the event that ends the response.
            return if self.api.has_choices() {
                Judgment::IsOver
            } else {
                Judgment::Continues
            };
        }
        let Some(reported) = self.error_in(event, data) else {
            return Judgment::Continues;
        };
        // In other APIs an error is the last event.
        self.is_over |= !self.api.has_choices();
        if reported.is_clients {
            // The engine refuses the rest; what it says is the answer's end.
            self.is_refused = true;
            return Judgment::Continues;
        }
        Judgment::Failed(reported)
    }

    /// Whether `piece` is one event that continues an answer, and need not be read: nearly all are.
    #[inline]
    pub(super) fn is_plain(&mut self, piece: &[u8]) -> bool {
        if self.is_over && self.api.has_choices() {
            return false;
        }
        match self.api {
            Api::Completions | Api::Chat => self.is_unfinished(piece),
            Api::Responses | Api::Messages => {
                // `event: KIND`, `data: …` and a blank line.
                let Some(length) = memchr2(b'\n', b'\r', piece) else {
                    return false;
                };
                let (name, rest) = piece.split_at(length);
                (name.ends_with(b".delta") || name == b"event: content_block_delta")
                    && name.starts_with(b"event: ")
                    && rest.starts_with(b"\n")
                    && memchr2(b'\n', b'\r', &rest[1..]).is_some_and(|at| at + 3 == rest.len())
                    && ERROR.find(piece).is_none()
            }
            Api::Other => ERROR.find(piece).is_none(),
        }
    }

    /// Whether `piece` is one event, of one line, with choices that all have `"finish_reason": null`, and no error.
    #[inline]
    fn is_unfinished(&mut self, piece: &[u8]) -> bool {
        // Token by token the same is written before the choices, and from the finish reason on, but for a token's id.
        if self.choices == 1
            && !self.head.is_empty()
            && let Some(rest) = piece.strip_prefix(&self.head[..])
            && let Some(rest) = rest.strip_suffix(&self.after_digits[..])
            && self.has_known_reason(rest)
        {
            return memchr2(b'\n', b'\r', rest).is_none();
        }
        self.is_unfinished_anew(piece)
    }

    /// Whether `rest`, an event up to its last digits, has the finish reason of an earlier event before as many digits.
    #[inline]
    fn has_known_reason(&mut self, rest: &[u8]) -> bool {
        // As many as in the event before, mostly. Other bytes in their place are too few for another member.
        let reason = &self.reason[..];
        let before = |digits: usize| rest.get(..rest.len().checked_sub(digits)?);
        if before(self.digits).is_some_and(|rest| rest.ends_with(reason)) {
            return true;
        }
        let digits = rest.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        self.digits = digits.min(DIGITS_MAX);
        before(digits).is_some_and(|rest| rest.ends_with(reason))
    }

    #[cold]
    fn is_unfinished_anew(&mut self, piece: &[u8]) -> bool {
        let mut found = REASON.find_iter(piece);
        let Some(first) = found.next() else {
            return false;
        };
        let reason = |at: usize| &piece[at + REASON.needle().len()..];
        let is_escaped = |part: &[u8]| memmem::find(part, b"\\u").is_some(); // `"\u0065rror"`, perhaps
        let is_plain = is_one_line(piece)
            && ERROR.find(piece).is_none()
            && !is_escaped(&piece[first..])
            && is_null(reason(first))
            && found.all(|at| is_null(reason(at)));
        let Some(choices) = CHOICES.find(&piece[..first]) else {
            return false;
        };
        let head = &piece[..choices + CHOICES.needle().len()];
        let is_plain = is_plain && !is_escaped(head);
        if is_plain {
            head.clone_into(&mut self.head);
            let end = &piece[first..];
            let digit = end.iter().rposition(u8::is_ascii_digit);
            let (reason, after) = end.split_at(digit.map_or(0, |last| last + 1));
            let digits = reason.iter().rev().take_while(|b| b.is_ascii_digit());
            let reason = &reason[..reason.len() - digits.count()];
            reason.clone_into(&mut self.reason);
            after.clone_into(&mut self.after_digits);
        }
        is_plain
    }

    /// Notes the progress of an event. Returns the error that it reports, if any.
    fn error_in(&mut self, event: &Event<'_>, data: Option<&EventData<'_>>) -> Option<Reported> {
        let text = event.data.trim_ascii();
        if text == b"[DONE]" {
            self.is_over = true;
            return None;
        }
        if let Some(error) = event.error {
            let fields = fields(error).unwrap_or_default();
            return error_of(&fields, true);
        }
        let is_error_event = event.name == b"error";
        // JSON or a page without `data:`. Other fields are ignored, as the standard says.
        let is_text =
            |line: &&[u8]| text.is_empty() || line.starts_with(b"{") || line.starts_with(b"<");
        if let Some(line) = event
            .stray
            .filter(|line| self.api.has_choices() && is_text(line))
        {
            let found = fields(line).unwrap_or_default();
            let error = error_of(&found, false).or_else(|| bare_error_of(&found, false));
            return error.or_else(|| Some(unreadable(line)));
        }
        let Some(data) = data else {
            if is_error_event {
                let text = String::from_utf8_lossy(text);
                let text: String = text.chars().take(TEXT_CHARS_MAX).collect();
                return Some(Reported::by_engine(text));
            }
            return (self.api.has_choices() && !text.is_empty()).then(|| unreadable(text));
        };
        let fields = &data.fields;
        let bare = || {
            self.api
                .has_choices()
                .then(|| bare_error_of(fields, !data.choices.is_empty()))
                .flatten()
        };
        if let Some(reported) = error_of(fields, is_error_event).or_else(bare) {
            return Some(reported);
        }
        if let Some(fault) = data.fault.filter(|_| self.api.has_choices()) {
            return Some(Reported::by_engine(fault));
        }
        match self.api {
            Api::Completions | Api::Chat => {
                for choice in &data.choices {
                    let Some(reason) = choice.reason() else {
                        continue;
                    };
                    if gives_up(&reason) {
                        return Some(gave_up(&reason));
                    }
                    // Further ones are not the request's: once all have ended, the answer is over.
                    if (self.finished.len() as u64) < self.choices.min(CHOICES_TRACKED_MAX) {
                        self.finished.insert(choice.index());
                    }
                }
            }
            Api::Responses => {
                let kind = fields.get("type").and_then(string).unwrap_or_default();
                self.is_over |= matches!(
                    &*kind,
                    "response.completed" | "response.incomplete" | "response.cancelled"
                );
            }
            Api::Messages => match &*fields.get("type").and_then(string).unwrap_or_default() {
                "message_stop" => self.is_over = true,
                "message_delta" => {
                    let delta = fields
                        .get("delta")
                        .map(|raw| value(raw))
                        .unwrap_or_default();
                    if delta.get("stop_reason").is_some_and(|why| !why.is_null()) {
                        self.finished.insert(0);
                    }
                }
                _ => {}
            },
            Api::Other => {}
        }
        None
    }
}

/// Returns the error that `piece`, the beginning of a stream of `api`, reports before anything else. Its last event may
/// be cut off, unless the piece is the whole stream (`is_all`).
pub(super) fn first_error(api: Api, piece: &[u8], is_all: bool) -> Option<Reported> {
    let whole = sse::events(piece).filter(|event| event.is_whole).last();
    let whole = whole.map_or(0, |event| event.end);
    let piece = if is_all && is_complete(&piece[whole..]) {
        piece
    } else {
        &piece[..whole]
    };
    let reading = StreamEnd::new(api, 1).read(piece);
    let reported = reading.reported.filter(|of| !of.is_clients);
    reported.filter(|_| sse::events(&piece[..reading.answer]).next().is_none())
}

/// Whether `rest`, which no blank line ended, has only complete events: some engines omit that line at the end.
pub(super) fn is_complete(rest: &[u8]) -> bool {
    let mut any = false;
    sse::events(rest).all(|event| {
        any = true;
        let data = event.data.trim_ascii();
        data == b"[DONE]" || serde_json::from_slice::<IgnoredAny>(data).is_ok()
    }) && any
}

/// Checks an answer of status 200 and type `kind` that is not a stream.
///
/// # Errors
/// The engine's failure, in spite of the status.
pub(super) fn check_whole(api: Api, kind: &[u8], body: &[u8]) -> Result<(), Reported> {
    if api == Api::Other {
        return Ok(());
    }
    let essence = kind.split(|&byte| byte == b';').next().unwrap_or_default();
    let essence = essence.trim_ascii().to_ascii_lowercase();
    let Some(data) = EventData::read(body) else {
        let text = match &*essence {
            _ if body.trim_ascii().is_empty() => "its answer is empty",
            b"application/json" => "its answer is not a JSON object, or cut off",
            b"text/html" => "its answer is a page (text/html)",
            _ => return Ok(()),
        };
        return Err(Reported::by_engine(text));
    };
    let fields = &data.fields;
    let status = fields.get("status").and_then(string);
    let failed = api == Api::Responses && status.as_deref() == Some("failed");
    let has_choices = !data.choices.is_empty();
    let bare = || {
        api.has_choices()
            .then(|| bare_error_of(fields, has_choices))
            .flatten()
    };
    let error = error_of(fields, false).or_else(bare);
    let error = error.or_else(|| failed.then(|| Reported::by_engine("the response failed")));
    if let Some(error) = error.filter(|error| !error.is_clients) {
        return Err(error);
    }
    let mut reasons = data.choices.iter().filter_map(Choice::reason);
    match reasons.find(|reason| gives_up(reason)) {
        Some(reason) if api.has_choices() => Err(gave_up(&reason)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_event_at_the_beginning_is_no_error() {
        let text =
            ": c\rid: 2\rdata: {\"choices\":[]}\r\rdata: {\"error\":{\"message\":\"dead\"}}\r\r";
        let error = text.find("\rdata: {\"error").unwrap();
        for at in 0..=text.len() {
            let found = first_error(Api::Completions, &text.as_bytes()[..at], false);
            assert!(found.is_none(), "{at}: {found:?}");
            // Nor one without an event before it, before it has ended.
            let found = first_error(Api::Chat, &text.as_bytes()[error.min(at)..at], false);
            assert_eq!(found.is_some(), at == text.len(), "{at}: {found:?}");
        }
        let error = &text.trim_end().as_bytes()[error..];
        assert!(first_error(Api::Chat, error, false).is_none());
        assert!(first_error(Api::Chat, error, true).is_some());
    }

    #[test]
    fn members_and_choices_are_read_however_many_there_are() {
        let many: Vec<String> = (0..5_000).map(|n| format!("\"m{n}\":0,")).collect();
        let many = many.concat();
        let mut end = StreamEnd::new(Api::Chat, 1);
        let event = format!("data: {{{many}\"error\":{{\"message\":\"dead\",\"code\":500}}}}\n\n");
        assert!(end.read(event.as_bytes()).reported.is_some());
        let choice = format!("{{{many}\"index\":0,\"finish_reason\":\"stop\"}}");
        end.read(format!("data: {{{many}\"choices\":[{choice}]}}\n\n").as_bytes());
        assert!(end.is_finished());
        // The last one of a name wins.
        let twice = fields(b"{\"id\":1,\"id\":2}").unwrap();
        assert_eq!(twice["id"].get(), "2");
    }

    #[test]
    fn ends_of_choices_that_no_one_asked_for_are_not_kept() {
        for (asked, kept) in [(1, 1), (3, 3), (u64::MAX, CHOICES_TRACKED_MAX)] {
            let mut end = StreamEnd::new(Api::Completions, asked);
            for index in 0..2 * CHOICES_TRACKED_MAX {
                let event = format!(
                    "data: {{\"choices\":[{{\"index\":{index},\"finish_reason\":\"stop\"}}]}}\n\n"
                );
                end.read(event.as_bytes());
            }
            assert_eq!(end.finished.len() as u64, kept);
            assert_eq!(end.is_finished(), asked <= kept);
        }
    }
}
