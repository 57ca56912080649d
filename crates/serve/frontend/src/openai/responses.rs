//! Requests of OpenAI's Responses API, as vLLM serves it: they become chats.
//!
//! Source: OpenAI's API reference, "Responses"; vLLM, `vllm/entrypoints/openai/responses/protocol.py`.

use serde_json::{Map, Value};
use slipstream_structured::Tree;

use super::ApiError;
use super::error::clip;
use super::members::{boolean, missing, object, read_members, text, whole, wrong_type};
use super::request::LOGPROBS_MAX;
use super::response_items::input_items;
use super::value::Json;

/// Bytes of `metadata` and the other fields that a response repeats, at most.
const ECHO_BYTES_MAX: usize = 256 << 10;

/// Treatment of a field of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// It becomes the field of a chat that has this name.
    Chat(&'static str),
    /// It becomes something else.
    Used,
    /// It changes nothing; the response repeats it.
    Repeated,
    /// It is refused, unless its value requests nothing.
    Refused(&'static str),
}

/// Fields of a request. Others are ignored.
const FIELDS: [(&str, Rule); 48] = [
    ("model", Rule::Chat("model")),
    ("max_output_tokens", Rule::Chat("max_completion_tokens")),
    ("temperature", Rule::Chat("temperature")),
    ("top_p", Rule::Chat("top_p")),
    ("top_k", Rule::Chat("top_k")),
    ("min_p", Rule::Chat("min_p")),
    ("presence_penalty", Rule::Chat("presence_penalty")),
    ("frequency_penalty", Rule::Chat("frequency_penalty")),
    ("repetition_penalty", Rule::Chat("repetition_penalty")),
    ("logit_bias", Rule::Chat("logit_bias")),
    ("seed", Rule::Chat("seed")),
    ("stop", Rule::Chat("stop")),
    ("stop_token_ids", Rule::Chat("stop_token_ids")),
    ("ignore_eos", Rule::Chat("ignore_eos")),
    (
        "include_stop_str_in_output",
        Rule::Chat("include_stop_str_in_output"),
    ),
    ("cache_salt", Rule::Chat("cache_salt")),
    ("priority", Rule::Chat("priority")),
    ("user", Rule::Chat("user")),
    ("request_id", Rule::Chat("request_id")),
    ("chat_template_kwargs", Rule::Chat("chat_template_kwargs")),
    ("structured_outputs", Rule::Chat("structured_outputs")),
    ("parallel_tool_calls", Rule::Chat("parallel_tool_calls")),
    ("input", Rule::Used),
    ("instructions", Rule::Used),
    ("previous_response_id", Rule::Used),
    ("stream", Rule::Used),
    ("store", Rule::Used),
    ("text", Rule::Used),
    ("tools", Rule::Used),
    ("tool_choice", Rule::Used),
    ("include", Rule::Used),
    ("top_logprobs", Rule::Used),
    ("metadata", Rule::Repeated),
    ("reasoning", Rule::Repeated),
    ("service_tier", Rule::Repeated),
    ("safety_identifier", Rule::Repeated),
    ("prompt_cache_key", Rule::Repeated),
    ("prompt_cache_retention", Rule::Repeated),
    ("prompt_cache_options", Rule::Repeated),
    ("max_tool_calls", Rule::Repeated),
    (
        "background",
        Rule::Refused("responses are answered at once; send `stream: true` to follow one"),
    ),
    (
        "truncation",
        Rule::Refused("shorten the input before it is sent"),
    ),
    (
        "conversation",
        Rule::Refused("send `previous_response_id` or the whole input"),
    ),
    (
        "prompt",
        Rule::Refused("prompt templates are not stored here; send `input`"),
    ),
    (
        "previous_input_messages",
        Rule::Refused("send `previous_response_id` or the whole input"),
    ),
    (
        "enable_response_messages",
        Rule::Refused("the response has no raw messages; leave it out"),
    ),
    (
        "kv_transfer_params",
        Rule::Refused("KV transfers are set up by the cluster file, not by requests"),
    ),
    (
        "ec_transfer_params",
        Rule::Refused("encoder caches are not modelled; leave it out"),
    ),
];

/// Whether the value of a refused field requests nothing.
fn is_harmless(name: &str, value: &Json<'_>) -> bool {
    match value {
        Json::Text(text) if name == "truncation" => text == "disabled",
        Json::Bool(_) | Json::Text(_) => value.as_bool() == Some(false),
        value if value.is_number() => value.as_bool() == Some(false),
        Json::Array(elements) => elements.is_empty(),
        Json::Object(members) => members.is_empty(),
        _ => false,
    }
}

/// A request that became a chat.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponsesRequest {
    /// Body of `POST /v1/chat/completions`, streamed with counts in its last event.
    pub chat: Vec<u8>,
    /// Messages of the chat without the instructions, as JSON with commas between them: those that a
    /// response to this one's answer continues.
    pub history: Vec<u8>,
    /// The client asked for events.
    pub stream: bool,
    /// The response may be stored. Default true.
    pub store: bool,
    /// The client's name for the request.
    pub request_id: Option<String>,
    /// Fields of the request that the response repeats.
    pub repeated: Map<String, Value>,
}

/// `previous_response_id` of a request's body, if it has one.
///
/// # Errors
/// [`ApiError`] 400 as [`parse_responses`].
pub fn previous_response_id(body: &[u8]) -> Result<Option<String>, ApiError> {
    const NAME: &str = "previous_response_id";
    // Most bodies do not contain the name, and are parsed once.
    if memchr::memmem::find(body, NAME.as_bytes()).is_none() {
        return Ok(None);
    }
    let mut id = None;
    read_members(
        body,
        |name| name == NAME,
        |name, value| {
            if value != Json::Null {
                id = Some(text(name, value)?.into_owned());
            }
            Ok(())
        },
    )?;
    Ok(id)
}

/// Parses the body of `POST /v1/responses`. `previous`: [`ResponsesRequest::history`] of the conversation that
/// it continues, with the answer.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault.
pub fn parse_responses(body: &[u8], previous: Option<&[u8]>) -> Result<ResponsesRequest, ApiError> {
    let mut raw = RawResponse::default();
    read_members(
        body,
        |name| FIELDS.iter().any(|(known, _)| *known == name),
        |name, value| raw.take(name, value),
    )?;
    raw.finish(previous)
}

/// Fields of a request as they were sent.
#[derive(Default)]
struct RawResponse<'a> {
    /// Those of the chat, without its messages.
    chat: Vec<(String, Tree)>,
    repeated: Map<String, Value>,
    instructions: Option<String>,
    input: Option<Vec<Tree>>,
    stream: bool,
    store: Option<bool>,
    logprobs: bool,
    top_logprobs: Option<Json<'a>>,
    request_id: Option<String>,
}

impl<'a> RawResponse<'a> {
    /// Sets a field of the chat.
    fn put(&mut self, name: &str, value: Tree) {
        self.chat.retain(|(known, _)| known != name);
        self.chat.push((name.into(), value));
    }

    /// Notes a field that is in the table. Null counts as not sent.
    fn take(&mut self, name: &str, value: Json<'a>) -> Result<(), ApiError> {
        if value == Json::Null {
            return Ok(());
        }
        let rule = FIELDS.iter().find(|(known, _)| *known == name);
        let rule = rule.expect("only known fields are read").1;
        if repeats(name) {
            self.repeated
                .insert(name.into(), value.clone().into_owned());
        }
        match rule {
            Rule::Repeated => check_repeated(name, &value),
            Rule::Refused(_) if is_harmless(name, &value) => Ok(()),
            Rule::Refused(hint) => Err(ApiError::unsupported(
                name,
                format!("`{name}` is not supported: {hint}"),
            )),
            Rule::Chat("request_id") => {
                let id = text(name, value)?.into_owned();
                self.put(name, Tree::Text(id.clone()));
                self.request_id = Some(id);
                Ok(())
            }
            Rule::Chat(to) => {
                self.put(to, value.into_tree());
                Ok(())
            }
            Rule::Used => self.take_used(name, value),
        }
    }

    /// Notes a field that becomes something else than the chat's of its name.
    fn take_used(&mut self, name: &str, value: Json<'a>) -> Result<(), ApiError> {
        match name {
            "stream" => self.stream = boolean(name, &value)?,
            "store" => self.store = Some(boolean(name, &value)?),
            "instructions" => self.instructions = Some(text(name, value)?.into_owned()),
            "input" => self.input = Some(input_items(name, value)?),
            "text" => {
                if let Some(format) = text_format(name, &value)? {
                    self.put("response_format", format);
                }
            }
            "tools" => self.put(name, tools(name, value)?),
            "tool_choice" => self.put(name, tool_choice(name, value)?),
            "include" => self.logprobs = includes_logprobs(name, value)?,
            "top_logprobs" => {
                // Its range counts if log probabilities are included.
                if !value.as_whole().is_number()
                    || matches!(value, Json::Real(n) if n.fract() != 0.0)
                {
                    whole(name, &value, 0, LOGPROBS_MAX)?;
                }
                self.top_logprobs = Some(value);
            }
            // It was read before.
            _ => {}
        }
        Ok(())
    }

    /// Checks what concerns several fields, and writes the chat behind `previous`.
    fn finish(mut self, previous: Option<&[u8]>) -> Result<ResponsesRequest, ApiError> {
        if self.logprobs {
            self.put("logprobs", Tree::Bool(true));
            if let Some(top) = self.top_logprobs.take() {
                let top = whole("top_logprobs", &top, 0, LOGPROBS_MAX)?;
                self.put("top_logprobs", Tree::Number(top.into()));
            }
        }
        self.drop_idle_tools();
        self.put("stream", Tree::Bool(true));
        self.put(
            "stream_options",
            object([("include_usage", Tree::Bool(true))]),
        );
        check_repeated_bytes(&self.repeated)?;
        let items = self.input.take().ok_or_else(|| missing("input"))?;
        let history = joined(previous, &items);
        Ok(ResponsesRequest {
            chat: self.chat_of(&history),
            history,
            stream: self.stream,
            store: self.store.unwrap_or(true),
            request_id: self.request_id,
            repeated: self.repeated,
        })
    }

    /// Drops an empty list of tools, and then a choice among none: `auto` and `none` say the same, and clients send the
    /// default.
    fn drop_idle_tools(&mut self) {
        let is_used =
            |(name, of): &(String, Tree)| name == "tools" && *of != Tree::Array(Vec::new());
        if self.chat.iter().any(is_used) {
            return;
        }
        let is_plain = |choice: &Tree| matches!(choice.as_text(), Some("auto" | "none"));
        self.chat
            .retain(|(name, of)| name != "tools" && (name != "tool_choice" || !is_plain(of)));
    }

    /// The chat's body. Its messages are the instructions and `history`, which is copied as it is stored.
    fn chat_of(&mut self, history: &[u8]) -> Vec<u8> {
        let mut chat = Tree::Object(std::mem::take(&mut self.chat)).to_json();
        chat.pop();
        chat.extend_from_slice(b",\"messages\":[");
        if let Some(instructions) = self.instructions.take() {
            let system = [
                ("role", Tree::Text("system".into())),
                ("content", Tree::Text(instructions)),
            ];
            chat.extend(object(system).to_json());
            if !history.is_empty() {
                chat.push(b',');
            }
        }
        chat.extend_from_slice(history);
        chat.extend_from_slice(b"]}");
        chat
    }
}

/// Messages as JSON with commas between them: those of `previous`, and `items`.
fn joined(previous: Option<&[u8]>, items: &[Tree]) -> Vec<u8> {
    let mut history = previous.map(<[u8]>::to_vec).unwrap_or_default();
    for item in items {
        if !history.is_empty() {
            history.push(b',');
        }
        history.extend(item.to_json());
    }
    history
}

/// Checks the size of what the response repeats.
fn check_repeated_bytes(repeated: &Map<String, Value>) -> Result<(), ApiError> {
    let bytes = Value::Object(repeated.clone()).to_string().len();
    if bytes > ECHO_BYTES_MAX {
        return Err(ApiError::invalid(
            "tools",
            format!(
                "the fields that a response repeats (`tools`, `metadata` and others) have {bytes} \
                 bytes; the limit is {ECHO_BYTES_MAX}"
            ),
        ));
    }
    Ok(())
}

/// Checks a field that the response repeats.
fn check_repeated(name: &str, value: &Json<'_>) -> Result<(), ApiError> {
    match name {
        "prompt_cache_key" | "prompt_cache_retention" | "safety_identifier" if !value.is_text() => {
            Err(wrong_type(name, "a string", value))
        }
        "service_tier" => {
            let tiers = ["auto", "default", "flex", "scale", "priority"];
            match value {
                Json::Text(tier) if tiers.contains(&&**tier) => Ok(()),
                Json::Text(_) => Err(ApiError::invalid(
                    name,
                    format!("`{name}` must be one of `{}`", tiers.join("`, `")),
                )),
                other => Err(wrong_type(name, "a string", other)),
            }
        }
        "max_tool_calls" => match &*value.as_whole() {
            Json::Unsigned(_) | Json::Negative(_) | Json::Long(_) => Ok(()),
            Json::Real(n) if n.fract() == 0.0 => Ok(()),
            other => Err(wrong_type(name, "a whole number", other)),
        },
        "metadata" => match value {
            Json::Object(members) => match members.iter().find(|(_, of)| !of.is_text()) {
                None => Ok(()),
                Some((key, of)) => {
                    Err(wrong_type(&format!("{name}.{}", clip(key)), "a string", of))
                }
            },
            other => Err(wrong_type(name, "an object", other)),
        },
        "reasoning" | "prompt_cache_options" if !matches!(value, Json::Object(_)) => {
            Err(wrong_type(name, "an object", value))
        }
        "reasoning" => super::anthropic::word_of(name, value, "effort", &EFFORTS).map(|_| ()),
        _ => Ok(()),
    }
}

/// Values of `reasoning.effort`. Source: `Reasoning` of the package `openai`.
const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Whether the response repeats the field.
fn repeats(name: &str) -> bool {
    matches!(
        name,
        "instructions"
            | "max_output_tokens"
            | "parallel_tool_calls"
            | "previous_response_id"
            | "temperature"
            | "text"
            | "tool_choice"
            | "tools"
            | "top_logprobs"
            | "top_p"
            | "user"
            | "presence_penalty"
            | "frequency_penalty"
    ) || FIELDS.contains(&(known_name(name), Rule::Repeated))
}

fn known_name(name: &str) -> &'static str {
    FIELDS
        .iter()
        .find(|(known, _)| *known == name)
        .map_or("", |(known, _)| known)
}

/// An error of the chat, with the fields' names as this API has them.
pub fn response_field_names(mut error: ApiError) -> ApiError {
    const NAMES: [(&str, &str); 5] = [
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
    ];
    let Some(param) = &error.param else {
        return error;
    };
    for (chat, here) in NAMES {
        if let Some(rest) = param.strip_prefix(chat)
            && (rest.is_empty() || rest.starts_with('.'))
        {
            error.message = error
                .message
                .replace(&format!("`{chat}"), &format!("`{here}"));
            error.param = Some(format!("{here}{rest}"));
            break;
        }
    }
    if let Some(param) = &mut error.param
        && (param.starts_with("tools.") || param.starts_with("tool_choice."))
    {
        *param = param.replacen(".function", "", 1);
        error.message = error.message.replace(".function", "");
    }
    error
}

/// The chat's `response_format`.
fn text_format(path: &str, value: &Json<'_>) -> Result<Option<Tree>, ApiError> {
    let Json::Object(_) = value else {
        return Err(wrong_type(path, "an object", value));
    };
    super::anthropic::word_of(path, value, "verbosity", &["low", "medium", "high"])?;
    let path = format!("{path}.format");
    let Some(format) = value.member("format").filter(|f| **f != Json::Null) else {
        return Ok(None);
    };
    let kind = match format.member("type") {
        Some(Json::Text(kind)) => &**kind,
        _ => return Err(missing(&format!("{path}.type"))),
    };
    let word = Tree::Text(kind.into());
    match kind {
        "text" | "json_object" => Ok(Some(object([("type", word)]))),
        "json_schema" => {
            let schema = format.member("schema").cloned();
            let schema = schema.ok_or_else(|| missing(&format!("{path}.schema")))?;
            if format.member("name").is_none() {
                return Err(missing(&format!("{path}.name")));
            }
            let mut described = vec![("schema".to_owned(), schema.into_tree())];
            for name in ["name", "description", "strict"] {
                let value = format.member(name).cloned();
                described.extend(value.map(|value| (name.to_owned(), value.into_tree())));
            }
            let schema = Tree::Object(described);
            Ok(Some(object([("type", word), ("json_schema", schema)])))
        }
        other => Err(ApiError::unsupported(
            format!("{path}.type"),
            format!(
                "`{path}.type` is `{}`; `text`, `json_object` and `json_schema` are supported",
                clip(other)
            ),
        )),
    }
}

fn tools(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of tools", &other))?;
    let mut tools = Vec::with_capacity(elements.len());
    for (at, element) in elements.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let tool = element.into_tree();
        match tool.get("type").and_then(Tree::as_text) {
            Some("function") => {}
            None => return Err(missing(&format!("{path}.type"))),
            Some(other) => {
                return Err(ApiError::unsupported(
                    format!("{path}.type"),
                    format!(
                        "`{path}.type` is `{}`; only tools of type `function` are modelled",
                        clip(other)
                    ),
                ));
            }
        }
        let mut function = Vec::new();
        for name in ["name", "description", "parameters"] {
            match tool.get(name) {
                Some(Tree::Null) => {}
                Some(value) => function.push((name.to_owned(), value.clone())),
                None if name == "name" => return Err(missing(&format!("{path}.name"))),
                None => {}
            }
        }
        tools.push(object([
            ("type", Tree::Text("function".into())),
            ("function", Tree::Object(function)),
        ]));
    }
    Ok(Tree::Array(tools))
}

/// The chat's `tool_choice`.
fn tool_choice(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    if matches!(value, Json::Text(_)) {
        return Ok(value.into_tree());
    }
    let choice = value.into_tree();
    match choice.get("type").and_then(Tree::as_text) {
        Some("function") => {
            let name = choice.get("name").cloned();
            let name = name.ok_or_else(|| missing(&format!("{path}.name")))?;
            Ok(object([
                ("type", Tree::Text("function".into())),
                ("function", object([("name", name)])),
            ]))
        }
        None => Err(missing(&format!("{path}.type"))),
        Some(other) => Err(ApiError::unsupported(
            format!("{path}.type"),
            format!(
                "`{path}.type` is `{}`; send `auto`, `none`, `required` or a function",
                clip(other)
            ),
        )),
    }
}

/// Value of `include` for log probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Values of `include`; the others concern tools that are not modelled.
const INCLUDES: [&str; 6] = [
    LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
];

/// Whether `include` asks for log probabilities.
fn includes_logprobs(path: &str, value: Json<'_>) -> Result<bool, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of strings", &other))?;
    let mut found = false;
    for (at, element) in elements.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let name = text(&path, element)?;
        if !INCLUDES.contains(&&*name) {
            return Err(ApiError::invalid(
                &*path,
                format!(
                    "`{path}` is `{}`; it must be one of `{}`",
                    clip(&name),
                    INCLUDES.join("`, `")
                ),
            ));
        }
        found |= name == LOGPROBS;
    }
    Ok(found)
}

/// 404: no response with this id is stored.
pub fn response_not_found(param: &'static str, id: &str) -> ApiError {
    ApiError {
        status: 404,
        ..ApiError::invalid(
            param,
            format!(
                "response `{}` is not stored; responses with `store: false` and the oldest ones are \
                 not kept; send the whole conversation as `input`",
                clip(id)
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::openai::parse_chat;

    fn refused(body: &Value) -> ApiError {
        parse_responses(body.to_string().as_bytes(), None)
            .and_then(|request| {
                parse_chat(&request.chat)
                    .map(|_| ())
                    .map_err(response_field_names)
            })
            .expect_err(&body.to_string())
    }

    #[test]
    fn docs_name_every_field_and_refusals_have_one() {
        let docs = include_str!("../../../../../docs/openai-api.md");
        let (_, section) = docs.split_once("## Responses").expect("a section");
        let section = section.split("\n## ").next().unwrap_or_default();
        for (name, rule) in FIELDS {
            assert!(section.contains(&format!("`{name}`")), "docs lack `{name}`");
            let wrong = json!({"input": "x", name: [[{"x": 1}]]});
            match rule {
                // It is read first.
                Rule::Used if name == "previous_response_id" => {
                    let error = previous_response_id(wrong.to_string().as_bytes()).unwrap_err();
                    assert_eq!(error.param.as_deref(), Some(name));
                }
                Rule::Chat(_) | Rule::Used => {
                    let param = refused(&wrong).param.unwrap_or_default();
                    assert!(param.starts_with(name), "{name}: {param}");
                }
                Rule::Refused(_) => {
                    let error = refused(&wrong);
                    assert_eq!(error.code, Some("unsupported_parameter"));
                    assert_eq!(error.param.as_deref(), Some(name));
                }
                Rule::Repeated => {
                    let param = refused(&wrong).param.unwrap_or_default();
                    assert!(param.starts_with(name), "{name}: {param}");
                    let right = match name {
                        "metadata" | "reasoning" | "prompt_cache_options" => json!({"a": "b"}),
                        "service_tier" => json!("flex"),
                        "max_tool_calls" => json!(3),
                        _ => json!("24h"),
                    };
                    let body = json!({"input": "x", name: right}).to_string();
                    let request = parse_responses(body.as_bytes(), None).unwrap();
                    assert_eq!(request.repeated[name], right);
                }
            }
        }
    }

    #[test]
    fn items_become_the_messages_of_a_chat() {
        let body = json!({
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "message", "role": "assistant", "id": "m", "status": "completed",
                 "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "d"},
            ],
        });
        let request = parse_responses(
            body.to_string().as_bytes(),
            Some(b"{\"role\":\"user\",\"content\":\"old\"}"),
        );
        let request = request.unwrap();
        let chat: Value = serde_json::from_slice(&request.chat).unwrap();
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "old"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c", "tool_calls": [call("1", "f"), call("2", "g")]},
            {"role": "tool", "tool_call_id": "1", "content": "d"},
        ]);
        assert_eq!(chat["messages"], expected);
        assert!(
            !request.history.windows(5).any(|w| w == b"brief"),
            "instructions are not carried over"
        );
        parse_chat(&request.chat).unwrap();
    }

    #[test]
    fn errors_name_the_fields_of_this_api() {
        for (body, param) in [
            (json!({}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": 1}), "input"),
            (json!({"input": [1]}), "input.0"),
            (json!({"input": [{"role": "user"}]}), "input.0.content"),
            (
                json!({"input": [{"role": "robot", "content": "x"}]}),
                "input.0.role",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
                "input.0.content.0.type",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
                "input.0.content.0.image_url",
            ),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}),
                "input.0.content.0.file_id",
            ),
            (
                json!({"input": [{"type": "item_reference", "id": "x"}]}),
                "input.0.type",
            ),
            (
                json!({"input": "x", "max_output_tokens": 0}),
                "max_output_tokens",
            ),
            (
                json!({"input": "x", "text": {"format": {"type": "grammar"}}}),
                "text.format.type",
            ),
            (
                json!({"input": "x", "text": {"format": {"type": "json_schema"}}}),
                "text.format.schema",
            ),
            (
                json!({"input": "x", "tools": [{"type": "web_search"}]}),
                "tools.0.type",
            ),
            (
                json!({"input": "x", "tools": [{"type": "function"}]}),
                "tools.0.name",
            ),
            (
                json!({"input": "x", "tool_choice": {"type": "mcp"}}),
                "tool_choice.type",
            ),
            (
                json!({"input": "x", "text": {"format": {"type": "json_schema", "schema": {}}}}),
                "text.format.name",
            ),
            (
                json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": [true]}}}),
                "text.format.strict",
            ),
            (
                json!({"input": "x", "reasoning": {"effort": "most"}}),
                "reasoning.effort",
            ),
            (
                json!({"input": "x", "text": {"verbosity": "much"}}),
                "text.verbosity",
            ),
            (json!({"input": "x", "truncation": "auto"}), "truncation"),
            (json!({"input": "x", "background": true}), "background"),
        ] {
            assert_eq!(refused(&body).param.as_deref(), Some(param), "{body}");
        }
    }
}
