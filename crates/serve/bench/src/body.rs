//! Requests rendered from prompt segments, head and body in one buffer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use slipstream_base::{RequestId, adapter_id};
use slipstream_workload::prompt::{Role, Segment, write_token_ids};
use slipstream_workload::{Request, Vocabulary};

use crate::target::{Endpoint, PromptForm, Target};

/// The part that all requests of a run have in common.
#[derive(Clone, Debug)]
pub struct Template {
    endpoint: Endpoint,
    form: PromptForm,
    stream: bool,
    vocabulary: Vocabulary,
    token_ids: std::ops::Range<u32>,
    /// Request line and headers up to the ones that differ.
    head: String,
    /// `{"model":"…",` and the fields that are the same for all.
    opening: String,
    /// The same for each LoRA adapter, by its number.
    openings: BTreeMap<u64, String>,
}

/// Parameters of [`Template::new`].
#[derive(Clone, Debug)]
pub struct TemplateParts<'a> {
    /// The server.
    pub target: &'a Target,
    /// Endpoint.
    pub endpoint: Endpoint,
    /// Form of prompts.
    pub form: PromptForm,
    /// Whether to request a stream.
    pub stream: bool,
    /// Model name.
    pub model: &'a str,
    /// Names of the LoRA adapters that requests use.
    pub adapters: Vec<&'a str>,
    /// Sent as a bearer token.
    pub api_key: Option<&'a str>,
    /// Further headers, `Name: value`.
    pub headers: &'a [String],
    /// Whether to request traced stages.
    pub trace_stages: bool,
    /// Vocabulary for prompts as words.
    pub vocabulary: Vocabulary,
    /// Token ids for [`PromptForm::Tokens`].
    pub token_ids: std::ops::Range<u32>,
}

impl Template {
    /// Renders the common part.
    pub fn new(parts: TemplateParts<'_>) -> Template {
        let path = match parts.endpoint {
            Endpoint::Completions => "/v1/completions",
            Endpoint::Chat => "/v1/chat/completions",
        };
        let mut head = format!(
            "POST {}{path} HTTP/1.1\r\nhost: {}\r\nuser-agent: slipstream-bench/{}\r\n\
             content-type: application/json\r\n",
            parts.target.base_path,
            parts.target.authority,
            env!("CARGO_PKG_VERSION")
        );
        push_common_headers(&mut head, parts.api_key, parts.headers);
        if parts.trace_stages {
            head.push_str("x-slipstream-trace: 1\r\n");
        }
        let opening = |model| {
            let mut opening = String::from("{\"model\":\"");
            escape(model, &mut opening);
            opening.push('"');
            if parts.stream {
                opening.push_str(",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
            }
            opening
        };
        let adapters = parts.adapters.iter();
        let openings = adapters.map(|&name| (adapter_id(name, name), opening(name)));
        Template {
            endpoint: parts.endpoint,
            form: parts.form,
            stream: parts.stream,
            vocabulary: parts.vocabulary,
            token_ids: parts.token_ids,
            head,
            opening: opening(parts.model),
            openings: openings.collect(),
        }
    }

    /// Endpoint of the requests.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Whether streams are requested.
    pub fn stream(&self) -> bool {
        self.stream
    }

    /// One request, ready to be sent. `answer` returns the text of an earlier answer of the
    /// session; if it returns none, a made-up text of the same length is used.
    pub fn render<'a>(
        &self,
        request: &Request,
        answer: impl Fn(RequestId) -> Option<&'a str>,
    ) -> Vec<u8> {
        let mut body = String::with_capacity(512 + request.prompt.tokens() as usize * 7);
        body.push_str(self.openings.get(&request.adapter).unwrap_or(&self.opening));
        write!(body, ",\"max_tokens\":{}", request.output_len).expect(TAKES_ALL);
        if request.ignore_eos {
            body.push_str(",\"ignore_eos\":true");
        }
        if request.priority != 0 {
            write!(body, ",\"priority\":{}", request.priority).expect(TAKES_ALL);
        }
        match self.endpoint {
            Endpoint::Completions => {
                body.push_str(",\"prompt\":");
                match self.form {
                    PromptForm::Text => {
                        self.write_texts(request.prompt.segments(), &answer, &mut body);
                    }
                    PromptForm::Tokens => self.write_ids(request.prompt.segments(), &mut body),
                }
            }
            Endpoint::Chat => self.write_messages(request.prompt.segments(), &answer, &mut body),
        }
        body.push('}');
        let mut out = Vec::with_capacity(self.head.len() + 128 + body.len());
        out.extend_from_slice(self.head.as_bytes());
        let mut own = format!("x-request-id: bench-{}\r\n", request.name());
        if request.turns > 1 {
            write!(own, "x-session-id: {}\r\n", request.session).expect(TAKES_ALL);
        }
        write!(own, "content-length: {}\r\n\r\n", body.len()).expect(TAKES_ALL);
        out.extend_from_slice(own.as_bytes());
        out.extend_from_slice(body.as_bytes());
        out
    }

    /// Segments as one JSON string.
    fn write_texts<'a>(
        &self,
        segments: &[Segment],
        answer: &impl Fn(RequestId) -> Option<&'a str>,
        body: &mut String,
    ) {
        body.push('"');
        let mut text = String::new();
        for segment in segments {
            text.clear();
            segment.write_text(&self.vocabulary, answer, &mut text);
            escape(&text, body);
        }
        body.push('"');
    }

    fn write_ids(&self, segments: &[Segment], body: &mut String) {
        let mut ids = Vec::new();
        for segment in segments {
            write_token_ids(
                segment.name(),
                segment.tokens,
                self.token_ids.clone(),
                &mut ids,
            );
        }
        body.push('[');
        for (i, id) in ids.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(body, "{comma}{id}").expect(TAKES_ALL);
        }
        body.push(']');
    }

    /// One message for each run of segments of one speaker.
    fn write_messages<'a>(
        &self,
        segments: &[Segment],
        answer: &impl Fn(RequestId) -> Option<&'a str>,
        body: &mut String,
    ) {
        body.push_str(",\"messages\":[");
        let runs = segments.chunk_by(|a, b| a.role == b.role);
        for (i, run) in runs.enumerate() {
            let role = match run[0].role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
            };
            let comma = if i == 0 { "" } else { "," };
            write!(body, "{comma}{{\"role\":\"{role}\",\"content\":").expect(TAKES_ALL);
            self.write_texts(run, answer, body);
            body.push('}');
        }
        body.push(']');
    }
}

const TAKES_ALL: &str = "a String takes every write";

/// Headers that every request has, whatever its method.
pub(crate) fn push_common_headers(head: &mut String, api_key: Option<&str>, headers: &[String]) {
    if let Some(key) = api_key {
        write!(head, "authorization: Bearer {key}\r\n").expect(TAKES_ALL);
    }
    for header in headers {
        write!(head, "{header}\r\n").expect(TAKES_ALL);
    }
}

/// Appends `text` as the inside of a JSON string.
fn escape(text: &str, out: &mut String) {
    let plain = |b: u8| b >= b' ' && b != b'"' && b != b'\\';
    let mut rest = text;
    while let Some(at) = rest.bytes().position(|b| !plain(b)) {
        out.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            control => write!(out, "\\u{control:04x}").expect(TAKES_ALL),
        }
        // Escaped characters are ASCII, so the next byte begins a character.
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use slipstream_base::SimTime;
    use slipstream_workload::{Content, Images, PromptSource};

    fn template(endpoint: Endpoint, form: PromptForm) -> Template {
        Template::new(TemplateParts {
            target: &Target {
                url: "http://h:1".into(),
                authority: "h:1".into(),
                base_path: "/x".into(),
                addresses: vec!["127.0.0.1:1".parse().unwrap()],
            },
            endpoint,
            form,
            stream: true,
            model: "a \"b\"",
            adapters: vec!["c \"d\""],
            api_key: Some("k"),
            headers: &["x-a: 1".to_owned()],
            trace_stages: true,
            vocabulary: Vocabulary::english(),
            token_ids: 100..200,
        })
    }

    fn request() -> Request {
        let segment = |content, tokens, role| Segment {
            content,
            tokens,
            role,
        };
        Request {
            session: 3,
            turn: 1,
            turns: 2,
            due: SimTime::ZERO,
            prompt: PromptSource::new([
                segment(Content::Text(1), 4, Role::System),
                segment(Content::Text(2), 3, Role::User),
                segment(Content::Answer(RequestId(9)), 2, Role::Assistant),
                segment(Content::Text(3), 5, Role::User),
            ]),
            output_len: 12,
            ignore_eos: true,
            priority: -1,
            adapter: 0,
            images: Images::default(),
            model: 0,
            class: 0,
        }
    }

    fn render(endpoint: Endpoint, form: PromptForm) -> (String, Value) {
        let answer = |id| (id == RequestId(9)).then_some(" say \"x\"\n");
        let bytes = template(endpoint, form).render(&request(), answer);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())));
        (head.to_owned(), serde_json::from_str(body).unwrap())
    }

    #[test]
    fn a_completion() {
        let (head, body) = render(Endpoint::Completions, PromptForm::Text);
        assert!(
            head.starts_with("POST /x/v1/completions HTTP/1.1\r\nhost: h:1\r\n"),
            "{head}"
        );
        for header in [
            "authorization: Bearer k",
            "x-a: 1",
            "x-slipstream-trace: 1",
            "x-session-id: 3",
        ] {
            assert!(head.contains(header), "{head}");
        }
        let prompt = body["prompt"].as_str().unwrap();
        assert_eq!(prompt.split(' ').count() - 1, 4 + 3 + 2 + 5);
        assert!(prompt.contains(" say \"x\"\n"));
        assert_eq!(body["model"], "a \"b\"");
        assert_eq!(
            (&body["max_tokens"], &body["priority"]),
            (&12.into(), &(-1).into())
        );
        assert_eq!(body["stream_options"]["include_usage"], true);
    }

    #[test]
    fn an_adapter_is_the_model_of_its_requests() {
        let template = template(Endpoint::Completions, PromptForm::Text);
        let model = |adapter| {
            let request = Request {
                adapter,
                ..request()
            };
            let text = String::from_utf8(template.render(&request, |_| None)).unwrap();
            let (_, body) = text.split_once("\r\n\r\n").unwrap();
            serde_json::from_str::<Value>(body).unwrap()["model"].clone()
        };
        assert_eq!(model(adapter_id("c \"d\"", "c \"d\"")), "c \"d\"");
        assert_eq!(model(0), "a \"b\"");
    }

    #[test]
    fn a_chat_has_a_message_for_each_change_of_speaker() {
        let (_, body) = render(Endpoint::Chat, PromptForm::Text);
        let roles: Vec<_> = body["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["role"].as_str().unwrap())
            .collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert_eq!(body["messages"][2]["content"], " say \"x\"\n");
    }

    #[test]
    fn token_ids_have_the_exact_length() {
        let (_, body) = render(Endpoint::Completions, PromptForm::Tokens);
        let ids = body["prompt"].as_array().unwrap();
        assert_eq!(ids.len(), 14);
        assert!(
            ids.iter()
                .all(|id| (100..200).contains(&id.as_u64().unwrap()))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn escaped_text_reads_back(text in any::<String>()) {
            let mut json = String::from("\"");
            escape(&text, &mut json);
            json.push('"');
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}
