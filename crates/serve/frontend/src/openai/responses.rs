//! OpenAI's Responses API, as vLLM serves it: requests become chats, and a chat's events become a response's.
//!
//! Source: OpenAI's API reference, "Responses" and "Streaming events"; vLLM,
//! `vllm/entrypoints/openai/responses/protocol.py` and `streaming_events.py`.

use serde_json::{Map, Value, json};
use slipstream_structured::Tree;

use super::chunks::Chunks;
use super::error::clip;
use super::members::{boolean, missing, read_members, text, whole, wrong_type};
use super::request::LOGPROBS_MAX;
use super::value::Json;
use super::{ApiError, Usage};

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
    let mut chat: Vec<(String, Tree)> = Vec::new();
    let mut repeated = Map::new();
    let mut instructions = None;
    let mut input = None;
    let (mut stream, mut store) = (false, true);
    let (mut logprobs, mut top_logprobs) = (false, None);
    let mut request_id = None;
    read_members(
        body,
        |name| FIELDS.iter().any(|(known, _)| *known == name),
        |name, value| {
            if value == Json::Null {
                return Ok(());
            }
            let rule = FIELDS.iter().find(|(known, _)| *known == name);
            let rule = rule.expect("only known fields are read").1;
            let mut put = |name: &str, value: Tree| {
                chat.retain(|(known, _)| known != name);
                chat.push((name.into(), value));
            };
            if repeats(name) {
                repeated.insert(name.into(), value.clone().into_owned());
            }
            match (name, rule) {
                (_, Rule::Repeated) => check_repeated(name, &value)?,
                (_, Rule::Refused(_)) if is_harmless(name, &value) => {}
                (_, Rule::Refused(hint)) => {
                    return Err(ApiError::unsupported(
                        name,
                        format!("`{name}` is not supported: {hint}"),
                    ));
                }
                ("request_id", _) => {
                    let id = text(name, value)?.into_owned();
                    put(name, Tree::Text(id.clone()));
                    request_id = Some(id);
                }
                (_, Rule::Chat(to)) => put(to, value.into_tree()),
                ("stream", _) => stream = boolean(name, &value)?,
                ("store", _) => store = boolean(name, &value)?,
                ("instructions", _) => instructions = Some(text(name, value)?.into_owned()),
                ("input", _) => input = Some(input_items(name, value)?),
                ("text", _) => {
                    if let Some(format) = text_format(name, &value)? {
                        put("response_format", format);
                    }
                }
                ("tools", _) => put(name, tools(name, value)?),
                ("tool_choice", _) => put(name, tool_choice(name, value)?),
                ("include", _) => logprobs = includes_logprobs(name, value)?,
                ("top_logprobs", _) => {
                    // Its range counts if log probabilities are included.
                    if !value.as_whole().is_number()
                        || matches!(value, Json::Real(n) if n.fract() != 0.0)
                    {
                        whole(name, &value, 0, LOGPROBS_MAX)?;
                    }
                    top_logprobs = Some(value);
                }
                // It was read before.
                _ => {}
            }
            Ok(())
        },
    )?;
    if logprobs {
        chat.push(("logprobs".into(), Tree::Bool(true)));
        if let Some(top) = top_logprobs {
            let top = whole("top_logprobs", &top, 0, LOGPROBS_MAX)?;
            chat.push(("top_logprobs".into(), Tree::Number(top.into())));
        }
    }
    // Without tools `auto` and `none` say the same; clients send the default.
    let is_plain = |choice: &Tree| matches!(choice.as_text(), Some("auto" | "none"));
    if !chat
        .iter()
        .any(|(name, of)| name == "tools" && *of != Tree::Array(Vec::new()))
    {
        chat.retain(|(name, of)| name != "tools" && (name != "tool_choice" || !is_plain(of)));
    }
    chat.push(("stream".into(), Tree::Bool(true)));
    let counts = object([("include_usage", Tree::Bool(true))]);
    chat.push(("stream_options".into(), counts));
    let echo_bytes = Value::Object(repeated.clone()).to_string().len();
    if echo_bytes > ECHO_BYTES_MAX {
        return Err(ApiError::invalid(
            "tools",
            format!(
                "the fields that a response repeats (`tools`, `metadata` and others) have {echo_bytes} \
                 bytes; the limit is {ECHO_BYTES_MAX}"
            ),
        ));
    }
    let items: Vec<Tree> = input.ok_or_else(|| missing("input"))?;
    let mut history = previous.map(<[u8]>::to_vec).unwrap_or_default();
    for item in &items {
        if !history.is_empty() {
            history.push(b',');
        }
        history.extend(item.to_json());
    }
    let mut messages = Vec::with_capacity(history.len() + 64);
    if let Some(instructions) = instructions {
        let system = [
            ("role", Tree::Text("system".into())),
            ("content", Tree::Text(instructions)),
        ];
        messages.extend(object(system).to_json());
        if !history.is_empty() {
            messages.push(b',');
        }
    }
    messages.extend_from_slice(&history);
    // The conversation is copied as it is stored.
    let mut whole = Tree::Object(chat).to_json();
    whole.pop();
    whole.extend_from_slice(b",\"messages\":[");
    whole.extend_from_slice(&messages);
    whole.extend_from_slice(b"]}");
    Ok(ResponsesRequest {
        chat: whole,
        history,
        stream,
        store,
        request_id,
        repeated,
    })
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

fn object<const N: usize>(members: [(&str, Tree); N]) -> Tree {
    let members = members.into_iter();
    Tree::Object(members.map(|(name, value)| (name.into(), value)).collect())
}

/// The messages of a chat. A call that follows a message of the assistant joins it.
fn input_items(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    if let Json::Text(text) = value {
        return Ok(vec![object([
            ("role", Tree::Text("user".into())),
            ("content", Tree::Text(text.into_owned())),
        ])]);
    }
    let items = value
        .into_elements()
        .map_err(|other| wrong_type(path, "a string or an array of items", &other))?;
    let mut messages = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        input_item(&format!("{path}.{at}"), item, &mut messages)?;
    }
    Ok(messages)
}

fn input_item(path: &str, item: Json<'_>, messages: &mut Vec<Tree>) -> Result<(), ApiError> {
    let Json::Object(members) = item else {
        return Err(wrong_type(path, "an object", &item));
    };
    let mut kind = None;
    let mut content = None;
    let mut others = Vec::new();
    for (name, value) in members {
        match &*name {
            "type" if value != Json::Null => kind = Some(text(&format!("{path}.type"), value)?),
            "content" | "output" => content = Some((name, value)),
            _ => others.push((name.into_owned(), value.into_tree())),
        }
    }
    let others = Tree::Object(others);
    let member = |name: &str| {
        let value = others.get(name).and_then(Tree::as_text);
        value.ok_or_else(|| missing(&format!("{path}.{name}")))
    };
    match kind.as_deref() {
        None | Some("message") => {
            let role = member("role")?;
            if !matches!(role, "user" | "assistant" | "system" | "developer") {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    format!("`{path}.role` must be `user`, `assistant`, `system` or `developer`"),
                ));
            }
            let (name, content) = content.ok_or_else(|| missing(&format!("{path}.content")))?;
            let parts = content_parts(&format!("{path}.{name}"), content)?;
            messages.push(object([
                ("role", Tree::Text(role.into())),
                ("content", parts),
            ]));
        }
        Some("function_call") => {
            let function = [
                ("name", Tree::Text(member("name")?.into())),
                ("arguments", Tree::Text(member("arguments")?.into())),
            ];
            let call = object([
                ("id", Tree::Text(member("call_id")?.into())),
                ("type", Tree::Text("function".into())),
                ("function", object(function)),
            ]);
            join_call(call, messages);
        }
        Some("function_call_output") => {
            let (name, output) = content.ok_or_else(|| missing(&format!("{path}.output")))?;
            messages.push(object([
                ("role", Tree::Text("tool".into())),
                ("tool_call_id", Tree::Text(member("call_id")?.into())),
                ("content", content_parts(&format!("{path}.{name}"), output)?),
            ]));
        }
        // Modelled answers have no thoughts, and templates leave out those of earlier turns.
        Some("reasoning") => {}
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("{path}.type"),
                format!(
                    "`{path}` is an item of type `{}`; messages, `function_call`, \
                     `function_call_output` and `reasoning` are supported",
                    clip(other)
                ),
            ));
        }
    }
    Ok(())
}

fn join_call(call: Tree, messages: &mut Vec<Tree>) {
    let of_assistant =
        |message: &&mut Tree| message.get("role").and_then(Tree::as_text) == Some("assistant");
    if let Some(Tree::Object(members)) = messages.last_mut().filter(of_assistant) {
        match members.iter_mut().find(|(name, _)| name == "tool_calls") {
            Some((_, Tree::Array(calls))) => calls.push(call),
            _ => members.push(("tool_calls".into(), Tree::Array(vec![call]))),
        }
        return;
    }
    messages.push(object([
        ("role", Tree::Text("assistant".into())),
        ("content", Tree::Text(String::new())),
        ("tool_calls", Tree::Array(vec![call])),
    ]));
}

/// Content of a chat's message: a text, or parts. Parts of text are joined by line breaks unless there are images.
fn content_parts(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    let parts = match value {
        Json::Text(text) => return Ok(Tree::Text(text.into_owned())),
        value => value
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of parts", &other))?,
    };
    let mut content = Vec::with_capacity(parts.len());
    let mut images = 0;
    for (at, part) in parts.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let part = part.into_tree();
        let Some(kind) = part.get("type").and_then(Tree::as_text) else {
            return Err(missing(&format!("{path}.type")));
        };
        let field = match kind {
            "input_text" | "output_text" | "text" => "text",
            "refusal" => "refusal",
            "input_image" => {
                images += 1;
                content.push(image_part(&path, &part)?);
                continue;
            }
            other => {
                return Err(ApiError::unsupported(
                    format!("{path}.type"),
                    format!(
                        "`{path}` is a part of type `{}`; only text and images are modelled",
                        clip(other)
                    ),
                ));
            }
        };
        let Some(text) = part.get(field).and_then(Tree::as_text) else {
            return Err(missing(&format!("{path}.{field}")));
        };
        content.push(object([
            ("type", Tree::Text("text".into())),
            ("text", Tree::Text(text.into())),
        ]));
    }
    if images > 0 {
        return Ok(Tree::Array(content));
    }
    let texts = content
        .iter()
        .filter_map(|part| part.get("text")?.as_text());
    Ok(Tree::Text(texts.collect::<Vec<_>>().join("\n")))
}

/// The chat's part for one of type `input_image`.
fn image_part(path: &str, part: &Tree) -> Result<Tree, ApiError> {
    if part.get("file_id").is_some_and(|id| *id != Tree::Null) {
        return Err(ApiError::unsupported(
            format!("{path}.file_id"),
            format!("`{path}.file_id` is not supported: no files are stored; send `image_url`"),
        ));
    }
    let path = format!("{path}.image_url");
    let url = super::members::text_member(&path, part.get("image_url"))?;
    // Here, because the chat's parts are counted from other places.
    if !super::messages::is_image_address(url) {
        return Err(super::messages::wrong_image_address(&path));
    }
    Ok(object([
        ("type", Tree::Text("image_url".into())),
        ("image_url", object([("url", Tree::Text(url.into()))])),
    ]))
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

/// Turns the events of a chat into those of a response, and into the response itself.
#[derive(Debug)]
pub struct ResponseStream {
    id: String,
    created: u64,
    repeated: Map<String, Value>,
    chunks: Chunks,
    items: Vec<Item>,
    /// Bytes of the items.
    bytes: usize,
    /// The last item is not complete.
    open: bool,
    events: u64,
    usage: Usage,
    reason: Option<String>,
    error: Option<(u16, String)>,
    done: bool,
}

#[derive(Debug)]
enum Item {
    Message {
        text: String,
        logprobs: Vec<Value>,
    },
    Call {
        call_id: String,
        name: String,
        arguments: String,
    },
}

impl ResponseStream {
    /// The response `id` to a request, which the model with this name answers.
    pub fn new(id: String, created: u64, model: &str, repeated: Map<String, Value>) -> Self {
        let mut repeated = repeated;
        for (name, value) in [
            ("parallel_tool_calls", json!(true)),
            ("temperature", json!(1.0)),
            ("tool_choice", json!("auto")),
            ("tools", json!([])),
            ("top_p", json!(1.0)),
            ("service_tier", json!("auto")),
            ("metadata", json!({})),
            ("instructions", Value::Null),
            ("max_output_tokens", Value::Null),
            ("previous_response_id", Value::Null),
            ("reasoning", Value::Null),
            ("text", json!({"format": {"type": "text"}})),
            ("user", Value::Null),
        ] {
            repeated.entry(name).or_insert(value);
        }
        repeated.insert("model".into(), json!(model));
        repeated.insert("background".into(), json!(false));
        repeated.insert("truncation".into(), json!("disabled"));
        ResponseStream {
            id,
            created,
            repeated,
            chunks: Chunks::default(),
            items: Vec::new(),
            bytes: 0,
            open: false,
            events: 0,
            usage: Usage::default(),
            reason: None,
            error: None,
            done: false,
        }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Bytes of its items so far.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is complete and did not fail.
    pub fn is_complete(&self) -> bool {
        self.done && self.error.is_none()
    }

    /// The events that open a stream, before the prompt is computed: `response.created` and
    /// `response.in_progress`.
    pub fn begin(&mut self, out: &mut Vec<u8>) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.emit(&mut Some(out), kind, |_| json!({"response": response}));
        }
    }

    /// Takes a frame of the chat's events. Appends the response's events to `out` if there is one.
    pub fn take(&mut self, frame: &[u8], mut out: Option<&mut Vec<u8>>) {
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.take(frame, |chunk| self.chunk(chunk, &mut out));
        self.chunks = chunks;
    }

    /// The response fails: `response.failed`.
    pub fn fail(&mut self, status: u16, message: String, out: &mut Option<&mut Vec<u8>>) {
        if self.done {
            return;
        }
        self.done = true;
        self.open = false;
        self.error = Some((status, message));
        let response = self.response("failed");
        self.emit(out, "response.failed", |_| json!({"response": response}));
    }

    fn chunk(&mut self, chunk: &Value, out: &mut Option<&mut Vec<u8>>) {
        if self.done {
            return;
        }
        if let Some(error) = chunk.get("error") {
            let message = error["message"].as_str().unwrap_or_default().to_owned();
            let status = ApiError::status_of(error["code"].as_str());
            return self.fail(status, message, out);
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = Usage {
                prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
                completion_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
                cached_tokens: usage["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap_or(0),
            };
        }
        let Some(choice) = chunk["choices"].get(0) else {
            return self.end(out);
        };
        let delta = &choice["delta"];
        let logprobs = choice["logprobs"]["content"].as_array();
        if let Some(text) = delta["content"].as_str()
            && (!text.is_empty() || logprobs.is_some_and(|l| !l.is_empty()))
        {
            self.text(text, logprobs.map_or(&[], Vec::as_slice), out);
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(part, out);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.reason = Some(reason.to_owned());
        }
    }

    fn text(&mut self, text: &str, logprobs: &[Value], out: &mut Option<&mut Vec<u8>>) {
        if !self.open || matches!(self.items.last(), Some(Item::Call { .. })) {
            self.begin_item(
                Item::Message {
                    text: String::new(),
                    logprobs: Vec::new(),
                },
                out,
            );
            self.emit(out, "response.content_part.added", |this| {
                let part =
                    json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                this.placed(json!({"content_index": 0, "part": part}))
            });
        }
        self.emit(out, "response.output_text.delta", |this| {
            let logprobs: Vec<Value> = logprobs.iter().map(|l| logprob(l, false)).collect();
            this.placed(json!({"content_index": 0, "delta": text, "logprobs": logprobs}))
        });
        let Some(Item::Message {
            text: whole,
            logprobs: all,
        }) = self.items.last_mut()
        else {
            return;
        };
        whole.push_str(text);
        for token in logprobs.iter().map(|l| logprob(l, true)) {
            self.bytes += token.to_string().len() * 4; // its values take more than their text
            all.push(token);
        }
        self.bytes += text.len();
    }

    fn call(&mut self, part: &Value, out: &mut Option<&mut Vec<u8>>) {
        let function = &part["function"];
        if let Some(id) = part["id"].as_str() {
            let name = function["name"].as_str().unwrap_or_default();
            self.begin_item(
                Item::Call {
                    call_id: id.to_owned(),
                    name: name.to_owned(),
                    arguments: String::new(),
                },
                out,
            );
            self.bytes += id.len() + name.len();
        }
        let delta = function["arguments"].as_str().unwrap_or_default();
        if delta.is_empty() {
            return;
        }
        self.emit(out, "response.function_call_arguments.delta", |this| {
            this.placed(json!({"delta": delta}))
        });
        if let Some(Item::Call { arguments, .. }) = self.items.last_mut() {
            arguments.push_str(delta);
            self.bytes += delta.len();
        }
    }

    fn begin_item(&mut self, item: Item, out: &mut Option<&mut Vec<u8>>) {
        self.close("completed", out);
        self.items.push(item);
        self.open = true;
        self.emit(out, "response.output_item.added", |this| {
            let at = this.items.len() - 1;
            let mut item = this.item(at, "in_progress");
            if let Some(content) = item.get_mut("content") {
                *content = json!([]);
            }
            json!({"output_index": at, "item": item})
        });
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, out: &mut Option<&mut Vec<u8>>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let at = self.items.len() - 1;
        let is_call = matches!(self.items[at], Item::Call { .. });
        if is_call {
            self.emit(out, "response.function_call_arguments.done", |this| {
                let item = this.item(at, status);
                this.placed(json!({"arguments": item["arguments"], "name": item["name"]}))
            });
        } else {
            self.emit(out, "response.output_text.done", |this| {
                let part = &this.item(at, status)["content"][0];
                this.placed(json!({"content_index": 0, "text": part["text"], "logprobs": []}))
            });
            self.emit(out, "response.content_part.done", |this| {
                let part = &this.item(at, status)["content"][0];
                this.placed(json!({"content_index": 0, "part": part}))
            });
        }
        self.emit(
            out,
            "response.output_item.done",
            |this| json!({"output_index": at, "item": this.item(at, status)}),
        );
    }

    fn end(&mut self, out: &mut Option<&mut Vec<u8>>) {
        let status = self.status();
        self.close(status, out);
        self.done = true;
        let response = self.response(status);
        let kind = format!("response.{status}");
        self.emit(out, &kind, |_| json!({"response": response}));
    }

    fn status(&self) -> &'static str {
        match self.reason.as_deref() {
            Some("length") => "incomplete",
            _ => "completed",
        }
    }

    fn item_id(&self, at: usize) -> String {
        let prefix = match self.items[at] {
            Item::Message { .. } => "msg",
            Item::Call { .. } => "fc",
        };
        let own = self.id.strip_prefix("resp_").unwrap_or(&self.id);
        format!("{prefix}_{own}_{at}")
    }

    fn item(&self, at: usize, status: &str) -> Value {
        let id = self.item_id(at);
        match &self.items[at] {
            Item::Message { text, logprobs } => {
                let part = json!({
                    "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs,
                });
                json!({
                    "type": "message", "id": id, "role": "assistant", "status": status,
                    "content": [part],
                })
            }
            Item::Call {
                call_id,
                name,
                arguments,
            } => json!({
                "type": "function_call", "id": id, "call_id": call_id, "name": name,
                "arguments": arguments, "status": status,
            }),
        }
    }

    /// `data` of an event that concerns the last item.
    fn placed(&self, mut data: Value) -> Value {
        let at = self.items.len() - 1;
        data["output_index"] = json!(at);
        data["item_id"] = json!(self.item_id(at));
        data
    }

    fn response(&self, status: &str) -> Value {
        let mut response = self.repeated.clone();
        let last = self.items.len().saturating_sub(1);
        let output: Vec<Value> = (0..self.items.len())
            .map(|at| self.item(at, if at == last { status } else { "completed" }))
            .collect();
        let incomplete = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let error = match &self.error {
            Some((_, message)) => json!({"code": "server_error", "message": message}),
            None => Value::Null,
        };
        let usage = match status {
            "in_progress" | "failed" => Value::Null,
            _ => json!({
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": self.usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            }),
        };
        for (name, value) in [
            ("id", json!(self.id)),
            ("object", json!("response")),
            ("created_at", json!(self.created)),
            ("status", json!(status)),
            ("output", Value::Array(output)),
            ("incomplete_details", incomplete),
            ("error", error),
            ("usage", usage),
        ] {
            response.insert(name.into(), value);
        }
        Value::Object(response)
    }

    fn emit(
        &mut self,
        out: &mut Option<&mut Vec<u8>>,
        kind: &str,
        data: impl FnOnce(&Self) -> Value,
    ) {
        let Some(out) = out else {
            return;
        };
        let mut data = data(self);
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.events);
        self.events += 1;
        out.extend_from_slice(format!("event: {kind}\ndata: {data}\n\n").as_bytes());
    }

    /// The whole response, after the last frame.
    ///
    /// # Errors
    /// Status and message, if the chat failed.
    pub fn whole(&self) -> Result<Vec<u8>, (u16, String)> {
        match &self.error {
            Some((status, message)) => Err((*status, message.clone())),
            None => Ok(self.response(self.status()).to_string().into_bytes()),
        }
    }

    /// `history` of the request with the answer behind it.
    pub fn history(&self, request: &[u8]) -> Vec<u8> {
        let mut text = String::new();
        let mut calls = Vec::new();
        for item in &self.items {
            match item {
                Item::Message { text: more, .. } => text.push_str(more),
                // The arguments of a call that was cut are no JSON, which no later chat may have.
                Item::Call { arguments, .. }
                    if serde_json::from_str::<Value>(arguments).is_err() => {}
                Item::Call {
                    call_id,
                    name,
                    arguments,
                } => calls.push(json!({
                    "id": call_id, "type": "function",
                    "function": {"name": name, "arguments": arguments},
                })),
            }
        }
        let mut message = json!({"role": "assistant", "content": text});
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        let mut history = request.to_vec();
        if !history.is_empty() {
            history.push(b',');
        }
        history.extend_from_slice(message.to_string().as_bytes());
        history
    }
}

/// A token's log probability, as a response has it.
fn logprob(chat: &Value, with_bytes: bool) -> Value {
    let one = |from: &Value| {
        let mut to = json!({"token": from["token"], "logprob": from["logprob"]});
        if with_bytes {
            to["bytes"] = from["bytes"].clone();
        }
        to
    };
    let mut token = one(chat);
    let top = chat["top_logprobs"].as_array().into_iter().flatten();
    token["top_logprobs"] = top.map(one).collect();
    token
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn frames_may_be_cut_anywhere() {
        let chunk = |delta: Value, finish: Option<&str>| json!({"choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}});
        let mut events = Vec::new();
        for data in [
            chunk(json!({"role": "assistant", "content": ""}), None),
            chunk(json!({"content": "é"}), None),
            chunk(json!({"content": " b"}), Some("length")),
            usage,
        ] {
            events.extend_from_slice(format!("data: {data}\n\n").as_bytes());
        }
        events.extend_from_slice(b"data: [DONE]\n\n");
        let whole = |cut: usize| {
            let mut stream = ResponseStream::new("resp_1".into(), 1, "m", Map::new());
            let mut out = Vec::new();
            stream.begin(&mut out);
            stream.take(&events[..cut], Some(&mut out));
            stream.take(&events[cut..], Some(&mut out));
            assert!(stream.is_complete());
            (String::from_utf8(out).unwrap(), stream.whole().unwrap())
        };
        let (text, body) = whole(0);
        for cut in 1..events.len() {
            assert_eq!(whole(cut), (text.clone(), body.clone()), "cut at {cut}");
        }
        let numbers: Vec<u64> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|data| serde_json::from_str::<Value>(data).unwrap())
            .map(|event| event["sequence_number"].as_u64().unwrap())
            .collect();
        assert!(
            numbers.iter().copied().eq(0..numbers.len() as u64),
            "{numbers:?}"
        );
        assert!(text.ends_with("\n\n") && text.contains("event: response.incomplete\n"));
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["output"][0]["content"][0]["text"], "é b");
        assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(body["usage"]["total_tokens"], 5);
    }
}
