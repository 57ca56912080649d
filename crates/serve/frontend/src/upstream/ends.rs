//! Judges the end of an answer by its content: finish reasons, last events, and errors within a 200. No I/O.
//!
//! The end of a connection proves little: vLLM and SGLang report their failure in a stream that then ends cleanly, and an
//! engine may be lost after the last word of its answer.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use memchr::memmem::{self, Finder};
use memchr::{memchr2, memchr3};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::api::Api;
use super::event::{Choice, EventData, is_nothing, string, value};
use super::failure::Failure;
use super::reported::{self, ObjectKind, Reported};
use super::sse::{self, Event};

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
    /// A part of the answer has come.
    has_answer: bool,
    /// The last event, if it is neither a part of the answer nor an error: its beginning.
    foreign: Option<String>,
    /// The last event has come.
    is_over: bool,
    /// The engine refused the request within the stream.
    is_refused: bool,
    shape: Shape,
}

/// The bytes that events of an answer have in common, token by token: all but the text, and digits near the end.
#[derive(Debug, Default)]
struct Shape {
    /// Beginning of the events, up to the text. Empty: no event is known.
    head: Vec<u8>,
    /// End of the events, from the end of the text on: up to their last digits, and behind these.
    tail: Vec<u8>,
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
    /// It does not, but may pass.
    Foreign,
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

/// Of `"error"`, `"Error"` and `"error_msg"`, which some engines send next to choices. In a text the word is harmless, but
/// its event is read.
static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"rror"));
static EXCEPTION: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"xception"));
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

/// Whether a part of an event has the name of an error, or a text with that word.
fn may_have_error(part: &[u8]) -> bool {
    ERROR.find(part).is_some() || EXCEPTION.find(part).is_some()
}

/// Whether `piece` is one event of an answer without choices that continues a part of it: `event: KIND`, `data: …` and a
/// blank line.
fn is_delta(api: Api, piece: &[u8]) -> bool {
    let Some(length) = memchr2(b'\n', b'\r', piece) else {
        return false;
    };
    let (name, rest) = piece.split_at(length);
    let is_named = match api {
        Api::Responses => name.starts_with(b"event: response.") && name.ends_with(b".delta"),
        _ => name == b"event: content_block_delta",
    };
    is_named
        && rest.starts_with(b"\n")
        && memchr2(b'\n', b'\r', &rest[1..]).is_some_and(|at| at + 3 == rest.len())
        && !may_have_error(piece)
}

/// Names of the text in a choice, up to the text.
static TEXTS: LazyLock<[Finder<'static>; 3]> = LazyLock::new(|| {
    // The last one is also the end of `"reasoning_content":"`.
    [&b"\"text\":\""[..], b"\"reasoning\":\"", b"content\":\""].map(Finder::new)
});

impl Shape {
    /// Whether `piece` is an event like the last one that was learned, but for its text and digits.
    #[inline]
    fn fits(&mut self, piece: &[u8]) -> bool {
        if self.head.is_empty() {
            return false;
        }
        let Some(rest) = piece.strip_prefix(&self.head[..]) else {
            return false;
        };
        let Some(rest) = rest.strip_suffix(&self.after_digits[..]) else {
            return false;
        };
        let Some(text) = self.before_tail(rest) else {
            return false;
        };
        // Without a quote there is no end of the text, and no member behind it.
        match first_special(text) {
            None => true,
            Some(at) => is_quoted(&text[at..]),
        }
    }

    /// The part of `rest`, an event up to its last digits, before the end of an earlier event and as many digits.
    #[inline]
    fn before_tail<'a>(&mut self, rest: &'a [u8]) -> Option<&'a [u8]> {
        // As many as in the event before, mostly. Other bytes in their place are too few for another member.
        let tail = &self.tail[..];
        let before = |digits: usize| {
            rest.get(..rest.len().checked_sub(digits)?)?
                .strip_suffix(tail)
        };
        if let Some(text) = before(self.digits) {
            return Some(text);
        }
        let digits = rest.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        self.digits = digits.min(DIGITS_MAX);
        before(digits)
    }

    /// Remembers the shape of `piece`, whose choices begin at `choices`, and whose first finish reason has its name at
    /// `reason`.
    fn learn(&mut self, piece: &[u8], choices: usize, reason: usize) {
        let within = &piece[choices..reason];
        let text = TEXTS.iter().find_map(|name| {
            let begin = choices + name.find(within)? + name.needle().len();
            Some((begin, begin + end_of_text(&piece[begin..reason])?))
        });
        // Without a text all of the choices may differ.
        let (head, tail) = text.unwrap_or((choices, reason));
        piece[..head].clone_into(&mut self.head);
        let digit = piece[reason..].iter().rposition(u8::is_ascii_digit);
        let digit = digit.map_or(tail, |last| reason + last + 1);
        let (tail, after) = piece[tail..].split_at(digit - tail);
        let digits = tail.iter().rev().take_while(|b| b.is_ascii_digit()).count();
        tail[..tail.len() - digits].clone_into(&mut self.tail);
        after.clone_into(&mut self.after_digits);
    }
}

/// Offset of the first quote, or end of a line, in the text of an event.
#[inline]
fn first_special(text: &[u8]) -> Option<usize> {
    // A token's text is shorter than the set-up of a search is long. Most bytes fail the first comparison.
    if text.len() > 32 {
        return memchr3(b'"', b'\n', b'\r', text);
    }
    let is_special = |&byte: &u8| byte < b'#' && matches!(byte, b'"' | b'\n' | b'\r');
    text.iter().position(is_special)
}

/// Offset of the quote that ends a JSON string which has begun.
fn end_of_text(text: &[u8]) -> Option<usize> {
    let mut escaped = false;
    text.iter().position(|&byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    })
}

/// Whether `text`, from its first quote or end of a line on, is of one line, and has no name of an error: it may be more
/// than a text, with further members of a choice.
#[cold]
fn is_quoted(text: &[u8]) -> bool {
    memchr2(b'\n', b'\r', text).is_none()
        && !may_have_error(text)
        && memmem::find(text, b"\\u").is_none()
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
                Judgment::Continues | Judgment::Foreign => {}
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
        let reported = match self.kind_of(event, data) {
            ObjectKind::Answer => return Judgment::Continues,
            ObjectKind::Foreign => return Judgment::Foreign,
            ObjectKind::Error(reported) => reported,
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

    /// Whether the event with this error of the engine is for the client: the client understands it, and no other engine can
    /// give the answer.
    pub(super) fn relays(&self, reported: &Reported) -> bool {
        match self.api {
            Api::Completions | Api::Chat => false,
            Api::Responses | Api::Messages => reported.is_of_api && self.has_answer,
            Api::Other => true,
        }
    }

    /// A part of the answer has come.
    pub(super) fn has_answer(&self) -> bool {
        self.has_answer
    }

    /// A part of the answer has come that is not read.
    pub(super) fn begin(&mut self) {
        self.has_answer = true;
    }

    /// The same for a stream of another engine.
    pub(super) fn anew(&self) -> StreamEnd {
        StreamEnd::new(self.api, self.choices)
    }

    /// Whether `piece` is one event that continues an answer, and need not be read: nearly all are.
    #[inline]
    pub(super) fn is_plain(&mut self, piece: &[u8]) -> bool {
        if self.is_over && self.api.has_choices() {
            return false;
        }
        match self.api {
            // With one choice, token by token the same is written around the text.
            Api::Completions | Api::Chat => {
                self.choices == 1 && self.shape.fits(piece) || self.is_unfinished(piece)
            }
            Api::Responses | Api::Messages => {
                let is_delta = is_delta(self.api, piece);
                self.has_answer |= is_delta;
                is_delta
            }
            Api::Other => ERROR.find(piece).is_none(),
        }
    }

    /// Whether `piece` is one event, of one line, with choices that all have `"finish_reason": null`, and no error.
    #[cold]
    fn is_unfinished(&mut self, piece: &[u8]) -> bool {
        let mut found = REASON.find_iter(piece);
        let Some(first) = found.next() else {
            return false;
        };
        let reason = |at: usize| &piece[at + REASON.needle().len()..];
        let is_escaped = |part: &[u8]| memmem::find(part, b"\\u").is_some(); // `"\u0065rror"`, perhaps
        let is_plain = is_one_line(piece)
            && !may_have_error(piece)
            && !is_escaped(&piece[first..])
            && is_null(reason(first))
            && found.all(|at| is_null(reason(at)));
        let Some(choices) = CHOICES.find(&piece[..first]) else {
            return false;
        };
        let choices = choices + CHOICES.needle().len();
        let is_plain = is_plain && !is_escaped(&piece[..choices]);
        if is_plain {
            self.has_answer = true;
            self.foreign = None;
            self.shape.learn(piece, choices, first);
        }
        is_plain
    }

    /// Notes the progress of an event. Returns what it is.
    fn kind_of(&mut self, event: &Event<'_>, data: Option<&EventData<'_>>) -> ObjectKind {
        if let Some(json) = event.error
            && let Some(reported) = reported::error_of_field(json)
        {
            return ObjectKind::Error(reported);
        }
        let (text, is_known) = (event.data.trim_ascii(), self.api != Api::Other);
        let is_done = text == b"[DONE]";
        // Text without `data:`. Other fields are ignored, as the standard says.
        let is_text = |line: &&[u8]| {
            text.is_empty() || is_done || line.starts_with(b"{") || line.starts_with(b"<")
        };
        if let Some(line) = event.stray.filter(|line| is_known && is_text(line)) {
            return ObjectKind::Error(reported::error_of_stray(self.api, line));
        }
        let Some(data) = data else {
            return self.kind_of_text(event, text);
        };
        let kind = reported::kind_of(self.api, data, event.name, false);
        if kind == ObjectKind::Foreign && event.has_content() {
            self.foreign = Some(reported::beginning(text));
        }
        if kind != ObjectKind::Answer {
            return kind;
        }
        if let Some(fault) = data.fault.filter(|_| self.api.has_choices()) {
            return ObjectKind::Error(Reported::by_engine(fault));
        }
        let kind = self.note_progress(event, data);
        if kind == ObjectKind::Answer {
            self.foreign = None;
            self.has_answer |= !self.api.has_choices() || !data.choices.is_empty();
        }
        kind
    }

    /// The same for an event whose data is no JSON object.
    fn kind_of_text(&mut self, event: &Event<'_>, text: &[u8]) -> ObjectKind {
        if event.name == b"error" {
            return ObjectKind::Error(Reported::by_engine(reported::beginning(text)));
        }
        match self.api {
            Api::Other => {
                self.is_over |= text == b"[DONE]";
                ObjectKind::Answer
            }
            _ if text.is_empty() => ObjectKind::Foreign,
            // Some gateways end every stream with it, whatever the API. Some clients read no further.
            Api::Responses | Api::Messages if text == b"[DONE]" => {
                if self.is_finished() {
                    return ObjectKind::Foreign;
                }
                ObjectKind::Error(Reported::by_engine(self.missing()))
            }
            Api::Completions | Api::Chat if text == b"[DONE]" => {
                let fault = match &self.foreign {
                    _ if self.is_finished() => None,
                    Some(event) => Some(format!(
                        "its stream ended behind an event that is no part of an answer: `{event}`"
                    )),
                    None => (!self.has_answer).then(|| "its stream ended without an answer".into()),
                };
                self.is_over = fault.is_none();
                fault.map_or(ObjectKind::Answer, |fault| {
                    ObjectKind::Error(Reported::by_engine(fault))
                })
            }
            // A gateway keeps a connection open in its own way.
            Api::Responses | Api::Messages if event.name == b"ping" => ObjectKind::Foreign,
            // A line that ends too few lines: the first one may be the error.
            _ => {
                let line = text.split(|&byte| byte == b'\n').next().unwrap_or(text);
                let reported = if line.len() < text.len() {
                    reported::error_of_stray(self.api, line)
                } else {
                    Reported::unreadable(text)
                };
                ObjectKind::Error(reported)
            }
        }
    }

    /// Notes the progress by an event of the answer.
    fn note_progress(&mut self, event: &Event<'_>, data: &EventData<'_>) -> ObjectKind {
        let fields = &data.fields;
        let kind = || {
            let named = || String::from_utf8_lossy(event.name).into_owned();
            fields.get("type").and_then(string).unwrap_or_else(named)
        };
        match self.api {
            Api::Completions | Api::Chat => {
                for choice in &data.choices {
                    let Some(reason) = choice.reason() else {
                        continue;
                    };
                    if gives_up(&reason) {
                        return ObjectKind::Error(gave_up(&reason));
                    }
                    // Further ones are not the request's: once all have ended, the answer is over.
                    if (self.finished.len() as u64) < self.choices.min(CHOICES_TRACKED_MAX) {
                        self.finished.insert(choice.index());
                    }
                }
            }
            Api::Responses => {
                self.is_over |= matches!(
                    &*kind(),
                    "response.completed" | "response.incomplete" | "response.cancelled"
                );
            }
            Api::Messages => match &*kind() {
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
        ObjectKind::Answer
    }
}

/// Checks `piece`, the beginning of a stream of `api`, before any of it is passed on. Its last event may be cut off, unless
/// the piece is the whole stream (`is_all`).
///
/// # Errors
/// The engine's failure before any part of an answer.
pub(super) fn check_beginning(api: Api, piece: &[u8], is_all: bool) -> Result<(), Failure> {
    let whole = sse::events(piece).filter(|event| event.is_whole).last();
    let whole = whole.map_or(0, |event| event.end);
    let is_complete = is_all && is_complete(&piece[whole..]);
    let mut end = StreamEnd::new(api, 1);
    let reading = end.read(if is_complete { piece } else { &piece[..whole] });
    if end.has_answer || end.is_refused {
        return Ok(());
    }
    match reading.reported {
        Some(reported) => Err(Failure::Reported(reported)),
        None if is_all => Err(Failure::Incomplete("its stream ended without an answer")),
        None => Ok(()),
    }
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

/// Checks an answer of `api` with a status of success that is not a stream.
///
/// # Errors
/// The engine's failure, in spite of the status.
pub(super) fn check_whole(api: Api, body: &[u8]) -> Result<(), Reported> {
    if api == Api::Other {
        return Ok(());
    }
    let failed = |text: &str| Err(Reported::by_engine(text));
    let Some(data) = EventData::read(body) else {
        let text = body.trim_ascii();
        return match text.first() {
            None => failed("its answer is empty"),
            Some(b'<') => failed("its answer is a page"),
            Some(b'{') => failed("its answer is not a JSON object, or cut off"),
            Some(_) => Err(Reported::by_engine(format!(
                "its answer is not a JSON object: `{}`",
                reported::beginning(text)
            ))),
        };
    };
    match reported::kind_of(api, &data, b"", true) {
        ObjectKind::Error(reported) if reported.is_clients => return Ok(()),
        ObjectKind::Error(reported) => return Err(reported),
        ObjectKind::Foreign => {
            return Err(Reported::by_engine(format!(
                "its answer has no member of an answer: `{}`",
                reported::beginning(body)
            )));
        }
        ObjectKind::Answer => {}
    }
    let fields = &data.fields;
    match api {
        Api::Completions | Api::Chat => {
            let mut reasons = data.choices.iter().filter_map(Choice::reason);
            if let Some(reason) = reasons.find(|reason| gives_up(reason)) {
                return Err(gave_up(&reason));
            }
            if data.choices.is_empty() {
                return failed("its answer has no choices");
            }
            let is_unfinished =
                |of: &Choice<'_>| of.fields.contains_key("finish_reason") && of.reason().is_none();
            if data.choices.iter().all(is_unfinished) {
                return failed("its answer has no finish reason");
            }
        }
        Api::Responses => {
            if fields.get("status").and_then(string).as_deref() == Some("failed") {
                return failed("the response failed");
            }
        }
        Api::Messages => {
            if fields.get("stop_reason").is_some_and(|why| is_nothing(why)) {
                return failed("its answer has no stop reason");
            }
        }
        Api::Other => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::event::fields;
    use super::*;

    #[test]
    fn half_an_event_at_the_beginning_is_no_error() {
        let text =
            ": c\rid: 2\rdata: {\"choices\":[{}]}\r\rdata: {\"error\":{\"message\":\"dead\"}}\r\r";
        let error = text.find("\rdata: {\"error").unwrap();
        for at in 0..=text.len() {
            let found = check_beginning(Api::Completions, &text.as_bytes()[..at], false);
            assert!(found.is_ok(), "{at}: {found:?}");
            // Nor one without an event before it, before it has ended.
            let found = check_beginning(Api::Chat, &text.as_bytes()[error.min(at)..at], false);
            assert_eq!(found.is_err(), at == text.len(), "{at}: {found:?}");
        }
        let error = &text.trim_end().as_bytes()[error..];
        assert!(check_beginning(Api::Chat, error, false).is_ok());
        assert!(check_beginning(Api::Chat, error, true).is_err());
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
