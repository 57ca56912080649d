//! Recognizes errors that engines and gateways report within an answer of status 200, in the shapes of many vendors. No I/O.
//!
//! An object with members of its API is a part of an answer, unless it has an `error` too. Any other object is an error if
//! its members are those by which servers describe errors, and otherwise foreign: no error, and no part of an answer.

use serde_json::Value;
use serde_json::value::RawValue;

use super::api::Api;
use super::event::{Choice, EventData, Fields, fields, is_nothing, string, value};

/// An error that an engine reported in an answer of status 200.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reported {
    /// Whether the client's request is at fault.
    pub(super) is_clients: bool,
    /// Whether the engine is busy (503).
    pub(super) is_busy: bool,
    /// Whether it is an error event of `/v1/responses` or `/v1/messages`, which clients of these understand.
    pub(super) is_of_api: bool,
    pub(super) text: String,
}

/// Limit of an engine's message, in characters.
pub(super) const TEXT_CHARS_MAX: usize = 300;

/// Members with the text of an error, the most telling ones first.
const TEXTS: [&str; 11] = [
    "message",
    "errormessage",
    "errormsg",
    "msg",
    "detail",
    "details",
    "description",
    "statusmsg",
    "title",
    "reason",
    "cause",
];

/// Members with the status of an error as a number.
const STATUSES: [&str; 8] = [
    "code",
    "status",
    "statuscode",
    "httpcode",
    "httpstatus",
    "errorcode",
    "errcode",
    "originalstatuscode",
];

/// Members with the kind of an error as a word.
const KINDS: [&str; 5] = ["code", "type", "errortype", "errorcode", "reason"];

impl Reported {
    pub(super) fn by_engine(text: impl Into<String>) -> Reported {
        Reported {
            text: text.into(),
            ..Reported::default()
        }
    }

    /// An event that is no JSON object: text of a gateway, or half an event.
    pub(super) fn unreadable(text: &[u8]) -> Reported {
        let text = beginning(text);
        Reported::by_engine(format!(
            "an event of its stream is not a JSON object: `{text}`"
        ))
    }

    /// Reads the value of an error member, or an object that describes an error. `outer`: the object around it. `name`: the
    /// member's name, if it is more than `error`.
    fn of(error: &Value, outer: &Fields<'_>, name: &str) -> Reported {
        let text = match error {
            Value::String(text) => text.clone(),
            error => {
                let named = TEXTS.iter().find_map(|name| member(error, name)?.as_str());
                named.map_or_else(|| error.to_string(), str::to_owned)
            }
        };
        // Numbers first: both vLLM and SGLang have one.
        let inner = STATUSES
            .iter()
            .find_map(|name| status(member(error, name)?));
        let status = inner.or_else(|| status_beside(outer));
        // TGI has the kind in a member next to the text.
        let beside = outer.get("error_type").and_then(string);
        let kinds = KINDS
            .iter()
            .filter_map(|name| member(error, name)?.as_str().map(str::to_owned));
        let kinds: Vec<String> = kinds
            .chain(beside)
            .map(|kind| plain(&kind))
            .chain([plain(name)])
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
            is_of_api: false,
            text: text.chars().take(TEXT_CHARS_MAX).collect(),
        }
    }
}

/// The beginning of `text`, as far as it is kept.
pub(super) fn beginning(text: &[u8]) -> String {
    let text = text.trim_ascii();
    let text = String::from_utf8_lossy(&text[..text.len().min(4 * TEXT_CHARS_MAX)]);
    text.chars().take(TEXT_CHARS_MAX).collect()
}

/// The member of an object whose plain name is `name`, unless it is null.
fn member<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    let members = object.as_object()?;
    let mut found = members.iter().filter(|(key, _)| plain(key) == name);
    found.find_map(|(_, value)| (!value.is_null()).then_some(value))
}

/// A status of an error: 400 to 599.
fn status(value: &Value) -> Option<u64> {
    let number = value.as_u64().or_else(|| value.as_str()?.parse().ok());
    number.filter(|number| (400..600).contains(number))
}

/// The status in a member of the object around an error.
fn status_beside(outer: &Fields<'_>) -> Option<u64> {
    let is_status = |name: &str| STATUSES.contains(&plain(name).as_str());
    let mut found = outer.iter().filter(|(name, _)| is_status(name));
    found.find_map(|(_, raw)| status(&value(raw)))
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
/// Anthropic's APIs, of vLLM, SGLang, llama.cpp and TGI, and of Amazon Bedrock.
fn is_clients_fault(kind: &str) -> bool {
    const WORDS: [&str; 22] = [
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
        "accessdenied",
        "toolarge",
        "toolong",
        "ratelimit",
        "throttling",
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

/// Whether a member or an event of this name is an error: `Error`, `error_msg`, `internalServerException`.
fn names_error(name: &[u8]) -> bool {
    const WORDS: [&[u8]; 4] = [b"error", b"exception", b"failure", b"traceback"];
    let has = |word: &&[u8]| {
        name.windows(word.len())
            .any(|of| of.eq_ignore_ascii_case(word))
    };
    WORDS.iter().any(has)
        || name
            .get(..5)
            .is_some_and(|of| of.eq_ignore_ascii_case(b"fault"))
}

/// Whether a value stands for no error: absent, or the code of success.
fn is_no_error(raw: &RawValue) -> bool {
    is_nothing(raw) || matches!(raw.get(), "0" | "0.0" | "\"0\"" | "\"none\"" | "\"None\"")
}

/// Returns the error that an object reports in the way of its API or of most engines: by a member `error`, or its type.
fn error_of(fields: &Fields<'_>, is_error_event: bool) -> Option<Reported> {
    let error = fields.get("error").filter(|raw| !is_nothing(raw));
    let kind = fields.get("type").and_then(string);
    let kind = kind.as_deref().unwrap_or_default();
    let is_error = fields.get("object").and_then(string).as_deref() == Some("error")
        || kind == "error"
        || is_error_event;
    let reported = match (error, kind) {
        // `response.failed` of `/v1/responses`, or the response itself.
        (_, "response.failed") => {
            let response = fields.get("response");
            let response = response.and_then(|raw| super::event::fields(raw.get().as_bytes()));
            let error = response.and_then(|response| Some(value(response.get("error")?)));
            let error = error.filter(|error| !error.is_null());
            let error = error.unwrap_or_else(|| "the response failed".into());
            Reported::of(&error, fields, "")
        }
        (Some(raw), _) => match value(raw) {
            // `{"error": true, "message": …}`
            Value::Bool(_) => Reported::of(&described(fields), fields, ""),
            error => Reported::of(&error, fields, ""),
        },
        (None, _) if is_error => Reported::of(&described(fields), fields, ""),
        (None, _) => return None,
    };
    Some(Reported {
        is_of_api: matches!(kind, "error" | "response.failed"),
        ..reported
    })
}

/// Returns the error of a choice, as gateways write it whose engine failed.
fn error_of_choice(choice: &Choice<'_>) -> Option<Reported> {
    let delta = choice.delta.iter().flatten();
    named_error(choice.fields.iter().chain(delta), &choice.fields)
}

/// Returns the error in a member whose name says that it is one.
fn named_error<'a>(
    members: impl Iterator<Item = (&'a std::borrow::Cow<'a, str>, &'a &'a RawValue)>,
    outer: &Fields<'_>,
) -> Option<Reported> {
    let mut found = members.filter(|(_, raw)| !is_no_error(raw));
    let (name, raw) = found.find(|(name, _)| names_error(name.as_bytes()))?;
    let error = value(raw);
    // A code or a flag, beside which the text is.
    if matches!(error, Value::Number(_) | Value::Bool(_)) {
        return Some(Reported::of(&described(outer), outer, name));
    }
    Some(Reported::of(&error, outer, name))
}

/// The members by which an object describes an error.
fn described(fields: &Fields<'_>) -> Value {
    let describes = |name: &str| {
        let name = plain(name);
        let name = name.as_str();
        TEXTS.contains(&name)
            || STATUSES.contains(&name)
            || KINDS.contains(&name)
            || name == "object"
            || names_error(name.as_bytes())
    };
    let all = fields.iter().filter(|(name, _)| describes(name));
    Value::Object(
        all.map(|(name, raw)| (name.to_string(), value(raw)))
            .collect(),
    )
}

/// Whether an object without members of its API describes an error: by a text, as Python's web frameworks and gateways do, by
/// a status, or by a title (RFC 9457).
fn describes_error(fields: &Fields<'_>) -> bool {
    let mut says = false;
    for (name, raw) in fields {
        if is_no_error(raw) {
            continue;
        }
        let name = plain(name);
        let name = name.as_str();
        if STATUSES.contains(&name) {
            match value(raw) {
                // `{"code": 200, "message": "ok"}`
                Value::Number(number)
                    if number.as_u64().is_some_and(|of| (200..400).contains(&of)) =>
                {
                    return false;
                }
                status_of => {
                    let is_bad = status_of.as_str().is_some_and(is_bad_word);
                    says |= is_bad || status(&status_of).is_some();
                }
            }
        } else {
            says |= TEXTS.contains(&name) || matches!(name, "errors" | "messages");
        }
    }
    let is_false = |name: &str| fields.get(name).is_some_and(|raw| raw.get() == "false");
    says || is_false("success") || is_false("ok")
}

/// Whether a status in words is bad.
fn is_bad_word(word: &str) -> bool {
    const WORDS: [&str; 9] = [
        "error",
        "fail",
        "unavailable",
        "timeout",
        "exhausted",
        "abort",
        "internal",
        "denied",
        "exceeded",
    ];
    let word = plain(word);
    WORDS.iter().any(|bad| word.contains(bad))
}

/// Whether the data of an event, or with `is_whole` an answer, has members of `api`. `event`: the name of the event.
fn is_of_api(api: Api, data: &EventData<'_>, event: &[u8], is_whole: bool) -> bool {
    let fields = &data.fields;
    let has = |name: &str| fields.get(name).is_some_and(|raw| !is_nothing(raw));
    let word = |name: &str| fields.get(name).and_then(string).unwrap_or_default();
    let mut kind = word("type");
    if kind.is_empty() {
        kind = String::from_utf8_lossy(event).into_owned();
    }
    match api {
        Api::Completions | Api::Chat => {
            let object = word("object");
            data.has_choices
                || has("usage")
                || object.starts_with("chat.completion")
                || object == "text_completion"
        }
        Api::Responses if is_whole => {
            has("output") || has("id") && has("status") || word("object") == "response"
        }
        Api::Responses => kind.starts_with("response."),
        Api::Messages if is_whole => kind == "message" || has("content") || has("stop_reason"),
        Api::Messages => kind.starts_with("content_block_") || kind.starts_with("message_"),
        Api::Other => true,
    }
}

/// What an object of an event, or a whole answer, is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    /// A part of the answer.
    Answer,
    Error(Reported),
    /// Neither.
    Foreign,
}

/// Returns what the data of an event is, or with `is_whole` an answer. `event`: the name of the event.
pub(super) fn kind_of(api: Api, data: &EventData<'_>, event: &[u8], is_whole: bool) -> ObjectKind {
    let fields = &data.fields;
    if let Some(reported) = error_of(fields, names_error(event)) {
        return ObjectKind::Error(Reported {
            is_of_api: reported.is_of_api || event == b"error",
            ..reported
        });
    }
    if api == Api::Other {
        return ObjectKind::Answer;
    }
    let of_api = is_of_api(api, data, event, is_whole);
    let of_choice = || data.choices.iter().find_map(error_of_choice);
    let of_object = || {
        // Choices prove nothing, an empty list of them above all.
        let may_be_named = api.has_choices() || !of_api;
        let named = may_be_named
            .then(|| named_error(fields.iter(), fields))
            .flatten();
        let described = || (!of_api && describes_error(fields)).then(|| described(fields));
        named.or_else(|| Some(Reported::of(&described()?, fields, "")))
    };
    let reported = if api.has_choices() { of_choice() } else { None };
    match reported.or_else(of_object) {
        Some(reported) => ObjectKind::Error(reported),
        None if of_api => ObjectKind::Answer,
        None => ObjectKind::Foreign,
    }
}

/// The error that text without a field of an event is: JSON without `data:`, or a page.
pub(super) fn error_of_stray(api: Api, line: &[u8]) -> Reported {
    let reported = EventData::read(line).and_then(|data| match kind_of(api, &data, b"", false) {
        ObjectKind::Error(reported) => Some(reported),
        ObjectKind::Answer | ObjectKind::Foreign => None,
    });
    reported.unwrap_or_else(|| Reported::unreadable(line))
}

/// The error in a field `error` of an event, by which llama.cpp reported errors.
pub(super) fn error_of_field(json: &[u8]) -> Option<Reported> {
    error_of(&fields(json).unwrap_or_default(), true)
}
