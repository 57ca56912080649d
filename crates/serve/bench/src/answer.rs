//! Answers of an OpenAI endpoint: streamed events counted as they arrive, or one JSON body.
//!
//! Every event is parsed as JSON once, without building a value. Which fields of a delta have generated text differs by
//! server and version, so every field counts that is not known to have other content.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use slipstream_base::text::{brief, foreign};

/// Longest event of a stream, and longest body that is not a stream, bytes.
const BODY_BYTES_MAX: usize = 64 << 20;
/// Characters of a server's message that are kept.
const MESSAGE_CHARS_MAX: usize = 500;

/// Tokens as the server counted them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    #[serde(default, alias = "input_tokens")]
    pub prompt_tokens: u32,
    /// Tokens of the answer.
    #[serde(default, alias = "output_tokens")]
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

/// An answer in progress.
#[derive(Debug, Default)]
pub struct Answer {
    /// An unfinished line of a stream, or the body if it is not a stream.
    partial: Vec<u8>,
    /// Data of the event that is being read: its lines of `data:`, joined.
    data: Vec<u8>,
    /// Lines in `data`.
    data_lines: u32,
    /// Whether the last byte was a carriage return, after which a line feed may follow.
    after_cr: bool,
    /// Whether bytes were read, so that a byte order mark can no longer follow.
    begun: bool,
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
    /// An empty answer; with `keep_text` its text is collected too.
    pub fn new(keep_text: bool) -> Answer {
        Answer {
            text: keep_text.then(String::new),
            ..Answer::default()
        }
    }

    /// The collected text.
    pub fn take_text(&mut self) -> String {
        self.text.take().unwrap_or_default()
    }

    /// Processes the next bytes of an event stream. Lines end by LF, CR or both (WHATWG HTML, section 9.2.5).
    pub fn feed_stream(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        if self.after_cr && !rest.is_empty() {
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            self.after_cr = false;
        }
        while let Some(end) = memchr::memchr2(b'\n', b'\r', rest) {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            rest = match (rest[end], after.first()) {
                (b'\r', Some(b'\n')) => &after[1..],
                (b'\r', None) => {
                    self.after_cr = true;
                    after
                }
                _ => after,
            };
            if self.partial.is_empty() {
                self.on_line(line);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.on_line(&whole);
                whole.clear();
                self.partial = whole;
            }
        }
        self.keep(rest);
    }

    /// Processes the next bytes of a body that is not a stream.
    pub fn feed_body(&mut self, bytes: &[u8]) {
        self.keep(bytes);
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.partial.len() + self.data.len() + bytes.len() > BODY_BYTES_MAX {
            self.too_long = true;
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    /// The stream has ended. An event without its empty line, or without the end of its line, still counts.
    pub fn end_stream(&mut self) {
        if !self.partial.is_empty() {
            let line = std::mem::take(&mut self.partial);
            self.on_line(&line);
        }
        self.end_event();
    }

    /// The body, which was not a stream, has ended: a success if `ok`, or else an error.
    pub fn end_body(&mut self, ok: bool) {
        let body = std::mem::take(&mut self.partial);
        let before = self.error.is_some();
        match self.walk(without_mark(&body)) {
            Ok(walked) => {
                let success = ok && (before || self.error.is_none());
                self.done = success && walked.has_choices;
                if success {
                    self.events += u64::from(walked.generated);
                }
            }
            Err(_) if !ok => self.error = Some(excerpt(&body)),
            Err(_) => {}
        }
    }

    /// Processes a line of the stream.
    fn on_line(&mut self, line: &[u8]) {
        let line = if std::mem::replace(&mut self.begun, true) {
            line
        } else {
            without_mark(line)
        };
        if line.is_empty() {
            return self.end_event();
        }
        if let Some(json) = line.strip_prefix(b": slipstream-trace ") {
            self.trace = serde_json::from_slice(json).ok();
            return;
        }
        // Other fields and comments have no part of the answer.
        let Some(data) = line.strip_prefix(b"data:") else {
            return;
        };
        if self.data.len() + data.len() > BODY_BYTES_MAX {
            self.too_long = true;
            return;
        }
        if self.data_lines > 0 {
            self.data.push(b'\n');
        }
        self.data_lines += 1;
        let data = data.strip_prefix(b" ").unwrap_or(data);
        self.data.extend_from_slice(data);
    }

    /// Processes the event that has ended.
    fn end_event(&mut self) {
        let lines = std::mem::take(&mut self.data_lines);
        if lines == 0 {
            return;
        }
        let mut data = std::mem::take(&mut self.data);
        let known = self.error.is_some();
        match self.on_data(&data) {
            Ok(()) => {}
            // Servers that put no empty line between their events.
            Err(_) if lines > 1 && data.split(|&b| b == b'\n').all(is_json) => {
                if !known {
                    self.error = None;
                }
                for line in data.split(|&b| b == b'\n') {
                    let _ = self.on_data(line);
                }
            }
            Err(error) => {
                let broken = || format!("an event is not JSON ({error}): {}", excerpt(&data));
                self.error.get_or_insert_with(broken);
            }
        }
        data.clear();
        self.data = data;
    }

    fn on_data(&mut self, data: &[u8]) -> Result<(), serde_json::Error> {
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
        } else if !data.is_empty() {
            let walked = self.walk(data)?;
            self.events += u64::from(walked.generated);
            self.done |= walked.is_last;
        }
        Ok(())
    }

    /// Walks an event or a body: notes its counts and its error, collects its text.
    fn walk(&mut self, json: &[u8]) -> Result<Walked, serde_json::Error> {
        let mut walked = Walked::default();
        let mut json = serde_json::Deserializer::from_slice(json);
        let event = Event {
            answer: self,
            walked: &mut walked,
        };
        event.deserialize(&mut json)?;
        json.end()?;
        Ok(walked)
    }

    fn on_error(&mut self, error: &Value) {
        let message = error.get("message").unwrap_or(error);
        let message = match message.as_str() {
            Some(text) => brief(text, MESSAGE_CHARS_MAX),
            None => brief(&message.to_string(), MESSAGE_CHARS_MAX)
                .into_owned()
                .into(),
        };
        self.error.get_or_insert_with(|| message.into_owned());
    }
}

/// Findings in an event or a body.
#[derive(Debug, Default)]
struct Walked {
    generated: bool,
    has_choices: bool,
    /// The last event of APIs that end without `[DONE]`.
    is_last: bool,
}

/// The object of an event, or of a body.
struct Event<'a> {
    answer: &'a mut Answer,
    walked: &'a mut Walked,
}

impl<'de> DeserializeSeed<'de> for Event<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Event<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Event { answer, walked } = self;
        let (mut is_error, mut message) = (false, None);
        while let Some(name) = map.next_key::<Name>()? {
            match name {
                Name::Choices => {
                    let text = &mut answer.text;
                    let choices = Choices { text };
                    let (found, generated) = map.next_value_seed(choices)?;
                    walked.has_choices |= found;
                    walked.generated |= generated;
                }
                // Of the Responses and the Messages API.
                Name::Delta => walked.generated |= map.next_value_seed(Generated)?,
                Name::Usage => {
                    // Some servers send an object without counts, or null.
                    let usage = map.next_value::<Value>()?;
                    if !usage.is_null() {
                        answer.usage = Usage::deserialize(usage).ok().or(answer.usage);
                    }
                }
                Name::Error => {
                    let error = map.next_value::<Value>()?;
                    if !error.is_null() {
                        answer.on_error(&error);
                    }
                }
                Name::Message => message = Some(map.next_value::<Value>()?),
                Name::Object => is_error = map.next_value::<Value>()? == "error",
                Name::Type => {
                    let kind = map.next_value::<Value>()?;
                    walked.is_last |= kind == "message_stop" || kind == "response.completed";
                }
                Name::Response => {
                    let response = map.next_value::<Value>()?;
                    if let Some(usage) = response.get("usage") {
                        answer.usage = Usage::deserialize(usage).ok().or(answer.usage);
                    }
                }
                Name::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        match message {
            // vLLM before 0.11: the error is the whole object.
            Some(message) if is_error => answer.on_error(&message),
            // The first event of the Messages API has the count of the prompt.
            Some(Value::Object(message)) => {
                if let Some(usage) = message.get("usage") {
                    answer.usage = Usage::deserialize(usage).ok().or(answer.usage);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// A member of an event.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Name {
    Choices,
    Delta,
    Usage,
    Error,
    Message,
    Object,
    Type,
    Response,
    #[serde(other)]
    Other,
}

/// The list of choices: whether it is one, and whether it carries something generated.
struct Choices<'a> {
    text: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Choices<'_> {
    type Value = (bool, bool);
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(bool, bool), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Choices<'_> {
    type Value = (bool, bool);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of choices")
    }
    fn visit_unit<E>(self) -> Result<(bool, bool), E> {
        Ok((false, false))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(bool, bool), A::Error> {
        let mut generated = false;
        let mut none = None;
        // The first choice is the one that the next turn continues.
        let mut text = self.text;
        while let Some(of) = seq.next_element_seed(Choice { text })? {
            generated |= of;
            text = &mut none;
        }
        Ok((true, generated))
    }
}

/// A choice: whether it carries something generated.
struct Choice<'a> {
    text: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Choice<'_> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Choice<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a choice")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut generated = false;
        let mut none = None;
        let mut text = self.text;
        while let Some(name) = map.next_key::<ChoiceName>()? {
            let of = match name {
                ChoiceName::Delta => map.next_value_seed(Delta { text: &mut *text })?,
                ChoiceName::Text => map.next_value_seed(Kept { text: &mut *text })?,
                ChoiceName::Other => {
                    map.next_value::<IgnoredAny>()?;
                    false
                }
            };
            generated |= of;
            if of {
                // A text that has two names is one text.
                text = &mut none;
            }
        }
        Ok(generated)
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum ChoiceName {
    #[serde(alias = "message")]
    Delta,
    Text,
    #[serde(other)]
    Other,
}

/// A delta, or a message: whether it carries something generated.
struct Delta<'a> {
    text: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Delta<'_> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Delta<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a delta")
    }
    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut generated = false;
        while let Some(name) = map.next_key::<DeltaName>()? {
            match name {
                DeltaName::Content => {
                    let text = &mut *self.text;
                    generated |= map.next_value_seed(Kept { text })?;
                }
                DeltaName::Generated => generated |= map.next_value_seed(Generated)?,
                DeltaName::Label => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(generated)
    }
}

/// A text that may be collected; other values are walked.
struct Kept<'a> {
    text: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Kept<'_> {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Kept<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }
    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<bool, E> {
        if let Some(kept) = self.text {
            kept.push_str(text);
        }
        Ok(!text.is_empty())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<bool, A::Error> {
        Generated.visit_seq(seq)
    }
    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<bool, A::Error> {
        Generated.visit_map(map)
    }
    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_bool<E>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }
}

/// Any value: whether a text within it was generated.
#[derive(Clone, Copy)]
struct Generated;

impl<'de> DeserializeSeed<'de> for Generated {
    type Value = bool;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<bool, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Generated {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_str<E>(self, text: &str) -> Result<bool, E> {
        Ok(!text.is_empty())
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut generated = false;
        while let Some(of) = seq.next_element_seed(self)? {
            generated |= of;
        }
        Ok(generated)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut generated = false;
        while let Some(name) = map.next_key::<DeltaName>()? {
            match name {
                DeltaName::Content | DeltaName::Generated => {
                    generated |= map.next_value_seed(self)?;
                }
                DeltaName::Label => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(generated)
    }
    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_bool<E>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }
    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }
}

/// A member within a delta.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum DeltaName {
    Content,
    /// Metadata from the server, not generated.
    #[serde(
        alias = "role",
        alias = "id",
        alias = "type",
        alias = "object",
        alias = "index",
        alias = "status",
        alias = "format",
        alias = "model",
        alias = "signature",
        alias = "encrypted_content",
        alias = "expires_at",
        alias = "stop_reason",
        alias = "stop_sequence",
        alias = "finish_reason"
    )]
    Label,
    #[serde(other)]
    Generated,
}

fn is_json(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    line.is_empty() || line == b"[DONE]" || serde_json::from_slice::<IgnoredAny>(line).is_ok()
}

fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes)
}

/// The beginning of a malformed answer, for a message.
fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    foreign(&words).into_owned()
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
        let mut answer = Answer::new(true);
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
        let mut answer = Answer::new(false);
        answer.feed_stream(
            b"data: {\"choices\":[{\"text\":\" a\"}]}\n\ndata: {\"choices\":[{\"text\":\"\"}]}\n\n",
        );
        assert_eq!(answer.events, 1);
    }

    #[test]
    fn bodies() {
        let mut answer = Answer::new(true);
        answer.feed_body(b"{\"choices\":[{\"message\":{\"content\":\"hi\"}}],");
        answer.feed_body(b"\"usage\":{\"completion_tokens\":1,\"prompt_tokens_details\":null}}");
        answer.end_body(true);
        assert!(answer.done && answer.usage.unwrap().completion_tokens == 1);
        assert_eq!(answer.take_text(), "hi");
        let mut answer = Answer::new(false);
        answer.feed_body(b"<html>\n  Bad gateway");
        answer.end_body(false);
        assert_eq!(answer.error.unwrap(), "<html> Bad gateway");
    }

    /// Deltas and messages, with what they are: whether they carry generated text.
    const DELTAS: &[(&str, bool)] = &[
        (r#"{"delta":{"content":"a"}}"#, true),
        (r#"{"delta":{"reasoning_content":"a"}}"#, true),
        (r#"{"delta":{"reasoning":"a"}}"#, true),
        (r#"{"delta":{"reasoning":"a","content":null}}"#, true),
        (r#"{"delta":{"thinking":"a"}}"#, true),
        (r#"{"delta":{"refusal":"No"}}"#, true),
        (
            r#"{"delta":{"content":[{"type":"text","text":"a"}]}}"#,
            true,
        ),
        (
            r#"{"delta":{"reasoning_details":[{"type":"reasoning.text","text":"a","index":0}]}}"#,
            true,
        ),
        (
            r#"{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}"#,
            true,
        ),
        (
            r#"{"delta":{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"f","arguments":""}}]}}"#,
            true,
        ),
        (r#"{"delta":{"function_call":{"arguments":"{"}}}"#, true),
        (r#"{"delta":{"audio":{"id":"x","data":"UklG"}}}"#, true),
        (r#"{"text":"a"}"#, true),
        (r#"{"message":{"role":"assistant","content":"a"}}"#, true),
        (r#"{"delta":{"role":"assistant"}}"#, false),
        (r#"{"delta":{"role":"assistant","content":""}}"#, false),
        (
            r#"{"delta":{"content":null,"reasoning":null,"tool_calls":[]}}"#,
            false,
        ),
        (
            r#"{"delta":{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"arguments":""}}]}}"#,
            false,
        ),
        (
            r#"{"delta":{},"finish_reason":"stop","stop_reason":"x"}"#,
            false,
        ),
        (
            r#"{"delta":{},"logprobs":{"content":[{"token":"a","content":"b"}]}}"#,
            false,
        ),
        (r#"{"text":""}"#, false),
        (r#"{"text":null}"#, false),
        (r#"{"delta":null}"#, false),
    ];

    /// The same for events of other APIs.
    const OTHERS: &[(&str, bool)] = &[
        (
            r#"{"type":"response.output_text.delta","item_id":"m","delta":"a"}"#,
            true,
        ),
        (
            r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#,
            true,
        ),
        (
            r#"{"type":"response.output_item.added","item":{"type":"message","content":"x"}}"#,
            false,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}"#,
            true,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}"#,
            true,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#,
            true,
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"a"}}"#,
            false,
        ),
        (
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null}}"#,
            false,
        ),
        (r#"{"type":"ping"}"#, false),
    ];

    #[test]
    fn every_delta_with_something_generated_is_a_token_event() {
        let choices = DELTAS.iter().map(|(choice, generated)| {
            (
                format!("{{\"id\":\"x\",\"choices\":[{choice}]}}"),
                generated,
            )
        });
        let others = OTHERS
            .iter()
            .map(|(event, generated)| ((*event).to_owned(), generated));
        for (event, &generated) in choices.chain(others) {
            let answer = feed(&format!("data: {event}\n\n"), &[]);
            assert_eq!(
                (answer.events, answer.error),
                (u64::from(generated), None),
                "{event}"
            );
        }
    }

    #[test]
    fn usage_and_the_end_are_read_in_other_apis() {
        let stream = concat!(
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n",
            "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        );
        let answer = feed(stream, &[]);
        assert_eq!(answer.usage.unwrap().prompt_tokens, 9);
        assert!(answer.done);
        let old = "data: {\"object\":\"error\",\"message\":\"gone\",\"code\":500}\n\n";
        assert_eq!(feed(old, &[]).error.unwrap(), "gone");
    }

    #[test]
    fn a_servers_text_acts_on_no_terminal() {
        let escape = "data: {\"error\":{\"message\":\"a\\u001b[2Jb\\nc\"}}\n\n";
        assert_eq!(feed(escape, &[]).error.unwrap(), "a\\u{1b}[2Jb\\nc");
        let mut answer = Answer::new(false);
        answer.feed_body(b"\x1b]0;x\x07");
        answer.end_body(false);
        assert_eq!(answer.error.unwrap(), "\\u{1b}]0;x\\u{7}");
    }

    #[test]
    fn events_without_empty_lines_between_them_count() {
        let stream = "data: {\"choices\":[{\"text\":\"a\"}]}\ndata: {\"choices\":[{\"text\":\"b\"}]}\ndata: [DONE]";
        let answer = feed(stream, &[]);
        assert_eq!((answer.events, answer.done, answer.error), (2, true, None));
    }

    /// An event as a server may write it: JSON over several lines, other fields and comments around it.
    fn written(event: &str, ending: &str, style: u8) -> String {
        let value: Value = serde_json::from_str(event).unwrap();
        let json = match style % 3 {
            0 => event.to_owned(),
            1 => value.to_string(),
            _ => serde_json::to_string_pretty(&value).unwrap(),
        };
        let space = if style & 4 == 0 { " " } else { "" };
        let mut text = String::new();
        if style & 8 != 0 {
            text.extend([
                ": comment",
                ending,
                "id: 7",
                ending,
                "event: message",
                ending,
            ]);
        }
        for line in json.lines() {
            text.extend(["data:", space, line, ending]);
        }
        if style & 16 != 0 {
            text.extend(["retry: 5", ending]);
        }
        text + ending
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(256), ..ProptestConfig::default() })]
        /// Any mix of events, line endings, chunks and styles of writing gives the same figures.
        #[test]
        fn streams_are_read_however_they_are_written(
            drawn in prop::collection::vec((0..DELTAS.len() + OTHERS.len(), any::<u8>(), any::<bool>()), 0..12),
            ending in prop::sample::select(vec!["\n", "\r", "\r\n"]),
            mark in any::<bool>(),
            cuts in prop::collection::vec(any::<usize>(), 0..40),
        ) {
            let mut stream = String::from(if mark { "\u{feff}" } else { "" });
            let (mut expected, mut usage) = (0, None);
            for (at, (which, style, counts)) in drawn.iter().enumerate() {
                let tokens = u32::try_from(at).unwrap() + 1;
                let counted = if *counts {
                    usage = Some(tokens);
                    format!(",\"usage\":{{\"completion_tokens\":{tokens}}}")
                } else {
                    ",\"usage\":null".to_owned()
                };
                let (event, generated) = if let Some((choice, generated)) = DELTAS.get(*which) {
                    (format!("{{\"choices\":[{choice}]{counted}}}"), *generated)
                } else {
                    let (event, generated) = OTHERS[which - DELTAS.len()];
                    (format!("{}{counted}}}", event.strip_suffix('}').unwrap()), generated)
                };
                expected += u64::from(generated);
                stream += &written(&event, ending, *style);
            }
            stream.extend(["data: [DONE]", ending, ending]);
            let answer = feed(&stream, &cuts);
            prop_assert_eq!(answer.events, expected, "{}", &stream);
            prop_assert_eq!(answer.usage.map(|u| u.completion_tokens), usage);
            prop_assert!(answer.done && answer.error.is_none(), "{:?}", answer.error);
        }

        #[test]
        fn where_the_network_cuts_makes_no_difference(cuts in prop::collection::vec(any::<usize>(), 0..12)) {
            prop_assert_eq!(facts(&mut feed(STREAM, &cuts)), facts(&mut feed(STREAM, &[])));
        }
    }
}
