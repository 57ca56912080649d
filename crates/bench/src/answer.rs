//! Answers of an OpenAI endpoint: streamed events counted as they arrive, or one JSON body.
//!
//! Only events without text (role, finish, usage, errors), the last event, and the traced stages
//! are parsed as JSON. An event with text costs two substring searches.

use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::Value;

/// Longest line of a stream, and longest body that is not a stream, bytes.
const BODY_BYTES_MAX: usize = 64 << 20;

/// Tokens as the server counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: u32,
    /// Prompt tokens found cached; `None` if the server does not report them.
    #[serde(default, rename = "prompt_tokens_details", deserialize_with = "cached")]
    pub cached_tokens: Option<u32>,
}

fn cached<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    #[derive(Deserialize)]
    struct Details {
        #[serde(default)]
        cached_tokens: Option<u32>,
    }
    Ok(Option::<Details>::deserialize(d)?.and_then(|d| d.cached_tokens))
}

/// Which field of an event holds text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextField {
    /// `choices[].delta.content` (and `reasoning_content`).
    Content,
    /// `choices[].text`.
    Text,
}

// The quote before the name is left out, so that `reasoning_content` counts as content. A name
// within a text cannot match: its closing quote would be escaped.
static CONTENT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"content\":"));
static TEXT: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"text\":"));

/// An answer in progress.
#[derive(Debug)]
pub struct Answer {
    field: TextField,
    /// An unfinished line of a stream, or the body if it is not a stream.
    partial: Vec<u8>,
    /// The last event with text, since it may carry usage too.
    last: Vec<u8>,
    text: Option<String>,
    /// Events that carried text.
    pub events: u64,
    /// Whether `[DONE]` arrived.
    pub done: bool,
    /// Token counts of the server.
    pub usage: Option<Usage>,
    /// An error that the stream or the body carried.
    pub error: Option<String>,
    /// The traced stages.
    pub trace: Option<Value>,
    /// The body exceeded the limit.
    pub too_long: bool,
}

impl Answer {
    /// An answer whose text is in `field`; `keep_text` collects the text too.
    pub fn new(field: TextField, keep_text: bool) -> Answer {
        Answer {
            field,
            partial: Vec::new(),
            last: Vec::new(),
            text: keep_text.then(String::new),
            events: 0,
            done: false,
            usage: None,
            error: None,
            trace: None,
            too_long: false,
        }
    }

    /// The collected text.
    pub fn take_text(&mut self) -> String {
        self.text.take().unwrap_or_default()
    }

    /// Processes the next bytes of an event stream.
    pub fn feed_stream(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        // The last event with text within this read; stored once per read, not once per event.
        let mut last: Option<&[u8]> = None;
        while let Some(end) = memchr::memchr(b'\n', rest) {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            rest = after;
            if self.partial.is_empty() {
                if self.on_line(line) {
                    last = Some(line);
                }
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                if self.on_line(&whole) {
                    self.last.clone_from(&whole);
                    last = None;
                }
                whole.clear();
                self.partial = whole;
            }
        }
        if let Some(line) = last {
            self.last.clear();
            self.last.extend_from_slice(line);
        }
        self.keep(rest);
    }

    /// Processes the next bytes of a body that is not a stream.
    pub fn feed_body(&mut self, bytes: &[u8]) {
        self.keep(bytes);
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.partial.len() + bytes.len() > BODY_BYTES_MAX {
            self.too_long = true;
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    /// The stream has ended.
    pub fn end_stream(&mut self) {
        if !self.partial.is_empty() {
            // A last line without its line end still counts.
            let line = std::mem::take(&mut self.partial);
            if self.on_line(&line) {
                self.last = line;
            }
        }
        if self.usage.is_none() && !self.last.is_empty() {
            let last = std::mem::take(&mut self.last);
            self.parse_event(data_of(&last).unwrap_or_default());
        }
    }

    /// The body, which was not a stream, has ended: a success if `ok`, or else an error.
    pub fn end_body(&mut self, ok: bool) {
        let body = std::mem::take(&mut self.partial);
        match serde_json::from_slice::<Value>(&body) {
            Ok(value) => {
                self.take_value(&value);
                if ok && self.error.is_none() {
                    self.done = value.get("choices").is_some_and(Value::is_array);
                    let text = text_of(&value, self.field).unwrap_or_default();
                    self.events += u64::from(!text.is_empty());
                    if let Some(kept) = &mut self.text {
                        kept.push_str(&text);
                    }
                }
            }
            Err(_) if !ok => self.error = Some(excerpt(&body)),
            Err(_) => {}
        }
    }

    /// Processes a line of the stream; returns whether it was an event with text.
    fn on_line(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let Some(data) = data_of(line) else {
            if let Some(json) = line.strip_prefix(b": slipstream-trace ") {
                self.trace = serde_json::from_slice(json).ok();
            }
            return false;
        };
        if self.has_text(data) {
            self.events += 1;
            if let Some(kept) = &mut self.text
                && let Ok(value) = serde_json::from_slice::<Value>(data)
                && let Some(text) = text_of(&value, self.field)
            {
                kept.push_str(&text);
            }
            return true;
        }
        if data == b"[DONE]" {
            self.done = true;
        } else {
            self.parse_event(data);
        }
        false
    }

    /// Whether an event has text that is not empty.
    fn has_text(&self, data: &[u8]) -> bool {
        let finder = match self.field {
            TextField::Content => &*CONTENT,
            TextField::Text => &*TEXT,
        };
        finder.find_iter(data).any(|at| {
            let value = data[at + finder.needle().len()..].trim_ascii_start();
            matches!(value, [b'"', next, ..] if *next != b'"')
        })
    }

    fn parse_event(&mut self, data: &[u8]) {
        if data.is_empty() {
            return;
        }
        match serde_json::from_slice::<Value>(data) {
            Ok(value) => self.take_value(&value),
            Err(e) => {
                let broken = || format!("an event is not JSON ({e}): {}", excerpt(data));
                self.error.get_or_insert_with(broken);
            }
        }
    }

    fn take_value(&mut self, value: &Value) {
        if let Some(usage) = value.get("usage").filter(|u| !u.is_null()) {
            self.usage = Usage::deserialize(usage).ok().or(self.usage);
        }
        if let Some(error) = value.get("error").filter(|e| !e.is_null()) {
            let message = error.get("message").unwrap_or(error);
            let message = message
                .as_str()
                .map_or_else(|| message.to_string(), str::to_owned);
            self.error.get_or_insert(message);
        }
    }
}

/// The data of an event's line: the part after `data:` and one space. `None` for other lines.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let data = line.strip_prefix(b"data:")?;
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

fn text_of(value: &Value, field: TextField) -> Option<String> {
    let choice = value.get("choices")?.get(0)?;
    let text = match field {
        TextField::Text => choice.get("text"),
        TextField::Content => choice
            .get("delta")
            .or_else(|| choice.get("message"))
            .and_then(|d| d.get("content")),
    };
    text?.as_str().map(str::to_owned)
}

/// The beginning of a malformed answer, for a message.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        ": slipstream-trace {\"accept\": 5, \"worker\": 3}\n\n",
        "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\" one\"}}]}\r\n\r\n",
        "event: x\n",
        "data:{\"choices\": [{\"delta\": {\"content\": \" \\\"content\\\":\\\"\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n",
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,",
        "\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n",
        "data: [DONE]\n\n",
    );

    fn feed(stream: &str, cuts: &[usize]) -> Answer {
        let mut answer = Answer::new(TextField::Content, true);
        let bytes = stream.as_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            answer.feed_stream(&bytes[pair[0]..pair[1]]);
        }
        answer.end_stream();
        answer
    }

    fn facts(
        answer: &mut Answer,
    ) -> (
        u64,
        bool,
        Option<Usage>,
        Option<String>,
        Option<Value>,
        String,
    ) {
        let text = answer.take_text();
        (
            answer.events,
            answer.done,
            answer.usage,
            answer.error.take(),
            answer.trace.take(),
            text,
        )
    }

    #[test]
    fn events_with_text_are_counted() {
        let mut answer = feed(STREAM, &[]);
        let (events, done, usage, error, trace, text) = facts(&mut answer);
        assert_eq!((events, done, error), (3, true, None));
        let expected = Usage {
            prompt_tokens: 7,
            completion_tokens: 3,
            cached_tokens: Some(4),
        };
        assert_eq!(usage, Some(expected));
        assert_eq!(trace.unwrap()["worker"], 3);
        assert_eq!(text, " one \"content\":\"");
    }

    #[test]
    fn usage_on_the_last_event_with_text_is_seen() {
        let stream = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":{\"completion_tokens\":9}}\n\ndata: [DONE]\n\n";
        assert_eq!(feed(stream, &[]).usage.unwrap().completion_tokens, 9);
        assert_eq!(feed(stream, &[20]).usage.unwrap().completion_tokens, 9);
    }

    #[test]
    fn errors_in_a_stream_are_seen() {
        let stream =
            "data: {\"error\":{\"message\":\"worker gone\",\"code\":500}}\n\ndata: [DONE]\n\n";
        assert_eq!(feed(stream, &[]).error.unwrap(), "worker gone");
        assert!(
            feed("data: {\"choi\n\n", &[])
                .error
                .unwrap()
                .contains("not JSON")
        );
    }

    #[test]
    fn completions_text_field() {
        let mut answer = Answer::new(TextField::Text, false);
        answer.feed_stream(
            b"data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: {\"choices\":[{\"text\":\"\"}]}\n\n",
        );
        assert_eq!(answer.events, 1);
    }

    #[test]
    fn bodies() {
        let mut answer = Answer::new(TextField::Content, true);
        answer.feed_body(b"{\"choices\":[{\"message\":{\"content\":\"hi\"}}],");
        answer.feed_body(b"\"usage\":{\"completion_tokens\":1,\"prompt_tokens_details\":null}}");
        answer.end_body(true);
        assert!(answer.done && answer.usage.unwrap().completion_tokens == 1);
        assert_eq!(answer.take_text(), "hi");
        let mut answer = Answer::new(TextField::Content, false);
        answer.feed_body(b"<html>\n  Bad gateway");
        answer.end_body(false);
        assert_eq!(answer.error.unwrap(), "<html> Bad gateway");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn where_the_network_cuts_makes_no_difference(cuts in prop::collection::vec(any::<usize>(), 0..12)) {
            prop_assert_eq!(facts(&mut feed(STREAM, &cuts)), facts(&mut feed(STREAM, &[])));
        }
    }
}
