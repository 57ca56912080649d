//! Required form of an answer: calls of tools, JSON by a schema, one of some choices.

use slipstream_structured::{FormError, Rng, Tree, check_schema, text_by_pattern};

use super::ApiError;
use super::members::{boolean, missing, text, wrong_type};
use super::value::{Json, VALUES_MAX};

/// Tools of a request at most. OpenAI takes 128.
pub const TOOLS_MAX: usize = 512;
/// Values of a schema that is sent as a text, at most.
const SCHEMA_VALUES_MAX: u32 = 1 << 14;

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// `function.name`
    pub name: String,
    /// `function.parameters`: the schema of its arguments.
    pub parameters: Option<Tree>,
    /// All of it, as the client sent it: templates show it to the model.
    pub whole: Tree,
}

/// `tool_choice`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Text, whatever tools there are.
    None,
    /// A call, or text once a tool has answered.
    Auto,
    /// At least one call.
    Required,
    /// One call of the tool with this index.
    Named(usize),
}

/// Required form of a text.
#[derive(Clone, Debug, PartialEq)]
pub enum TextForm {
    /// Any text.
    Free,
    /// A JSON object.
    JsonObject,
    /// JSON that satisfies a schema, with the field that it came by.
    Schema(Tree, &'static str),
    /// One of these texts.
    Choice(Vec<String>),
    /// A match of a regular expression, with the field that it came by.
    Pattern(String, &'static str),
}

/// Required form of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// The tools, in the client's order.
    pub tools: Vec<Tool>,
    /// Which of them are called.
    pub choice: ToolChoice,
    /// More than one call may be made.
    pub parallel: bool,
    /// If no tool is called.
    pub text: TextForm,
}

impl Form {
    /// Whether all answers have it: no tools, and any text.
    pub fn is_free(&self) -> bool {
        self.tools.is_empty() && self.text == TextForm::Free
    }
}

/// The fields of a form as they were sent.
#[derive(Default)]
pub(super) struct RawForm {
    tools: Vec<Tool>,
    choice: Option<RawChoice>,
    parallel: Option<bool>,
    /// Each with the field that it came by.
    texts: Vec<(&'static str, TextForm)>,
}

enum RawChoice {
    None,
    Auto,
    Required,
    Named(String),
}

/// The field's name if it belongs to a form.
pub(super) fn form_field(name: &str) -> Option<&'static str> {
    const FIELDS: [&str; 8] = [
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_choice",
        "guided_regex",
    ];
    FIELDS.into_iter().find(|field| *field == name)
}

impl RawForm {
    /// Notes a field that [`form_field`] knows.
    pub(super) fn take(&mut self, name: &'static str, value: Json<'_>) -> Result<(), ApiError> {
        match name {
            "tools" => {
                let tools = tools(name, value)?;
                if tools.is_empty() {
                    return Err(ApiError::invalid(
                        name,
                        format!("`{name}` is empty; send at least one tool, or leave it out"),
                    ));
                }
                self.tools = tools;
            }
            "tool_choice" => self.choice = Some(choice(name, &value)?),
            "parallel_tool_calls" => self.parallel = Some(boolean(name, &value)?),
            "response_format" => {
                let form = response_format(name, &value)?;
                self.note(name, form);
            }
            "structured_outputs" => {
                let form = structured_outputs(name, value)?;
                self.note(name, form);
            }
            "guided_json" => {
                let form = schema(name, "guided_json", value)?;
                self.note(name, form);
            }
            "guided_choice" => {
                let form = choices(name, value)?;
                self.note(name, form);
            }
            _ => {
                let form = pattern(name, "guided_regex", value)?;
                self.note(name, form);
            }
        }
        Ok(())
    }

    /// A `tool_choice` of null: vLLM reads calls only from answers to `auto`, the default if nothing is sent.
    pub(super) fn choose_nothing(&mut self) {
        self.choice = Some(RawChoice::None);
    }

    /// A field that is sent twice counts as its last value.
    fn note(&mut self, name: &'static str, form: TextForm) {
        self.texts.retain(|(known, _)| *known != name);
        if form != TextForm::Free {
            self.texts.push((name, form));
        }
    }

    /// Checks what concerns several fields. `None`: any answer will do.
    pub(super) fn finish(mut self) -> Result<Option<Box<Form>>, ApiError> {
        if let [(first, _), (second, _), ..] = &self.texts[..] {
            return Err(ApiError::invalid(
                *second,
                format!("`{first}` and `{second}` both say what the answer looks like; send one"),
            ));
        }
        let tools = self.tools;
        let choice = match self.choice {
            _ if tools.is_empty() => match self.choice {
                None | Some(RawChoice::None) => ToolChoice::None,
                Some(_) => {
                    return Err(ApiError::invalid(
                        "tool_choice",
                        "`tool_choice` needs `tools`; send some, or leave it out",
                    ));
                }
            },
            None | Some(RawChoice::Auto) => ToolChoice::Auto,
            Some(RawChoice::None) => ToolChoice::None,
            Some(RawChoice::Required) => ToolChoice::Required,
            Some(RawChoice::Named(name)) => {
                let at = tools.iter().position(|tool| tool.name == name);
                ToolChoice::Named(at.ok_or_else(|| {
                    ApiError::invalid(
                        "tool_choice.function.name",
                        format!("`tools` has no function `{}`", super::error::clip(&name)),
                    )
                })?)
            }
        };
        let form = Form {
            tools,
            choice,
            parallel: self.parallel.unwrap_or(true),
            text: self.texts.pop().map_or(TextForm::Free, |(_, form)| form),
        };
        Ok((!form.is_free()).then(|| Box::new(form)))
    }
}

/// An error within a schema that came by the field at `path`.
pub(crate) fn schema_error(path: &str, error: &FormError) -> ApiError {
    let at = match error.at.as_str() {
        "" => path.to_owned(),
        at => format!("{path}.{at}"),
    };
    let message = format!("`{at}`: {}", error.message);
    ApiError::unsupported(at, message)
}

fn object<'a>(path: &str, value: Json<'a>) -> Result<Json<'a>, ApiError> {
    match value {
        Json::Object(_) => Ok(value),
        other => Err(wrong_type(path, "an object", &other)),
    }
}

fn tools(path: &str, value: Json<'_>) -> Result<Vec<Tool>, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of tools", &other))?;
    if elements.len() > TOOLS_MAX {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` has {} tools; at most {TOOLS_MAX} are taken",
                elements.len()
            ),
        ));
    }
    let each = elements.into_iter().enumerate();
    each.map(|(at, element)| tool(&format!("{path}.{at}"), element))
        .collect()
}

/// Tools as templates show them.
pub(super) fn shown_tools(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    let tools = tools(path, value)?;
    Ok(tools.into_iter().map(|tool| tool.whole).collect())
}

fn tool(path: &str, value: Json<'_>) -> Result<Tool, ApiError> {
    let whole = object(path, value)?.into_tree();
    match whole.get("type").and_then(Tree::as_text) {
        Some("function") | None => {}
        Some(other) => {
            let message =
                format!("`{path}.type` is {other:?}; only tools of type `function` are modelled");
            return Err(ApiError::unsupported(format!("{path}.type"), message));
        }
    }
    let function = whole
        .get("function")
        .ok_or_else(|| missing(&format!("{path}.function")))?;
    let name = function.get("name").and_then(Tree::as_text);
    let name = name.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| missing(&format!("{path}.function.name")))?;
    let parameters = match function.get("parameters") {
        None | Some(Tree::Null) => None,
        Some(schema) => {
            let at = format!("{path}.function.parameters");
            check_schema(schema).map_err(|error| schema_error(&at, &error))?;
            let is_object = schema
                .get("type")
                .is_none_or(|t| t.as_text() == Some("object"));
            if !matches!(schema, Tree::Object(_)) || !is_object {
                return Err(ApiError::invalid(
                    at.clone(),
                    format!("`{at}` must be a schema of an object: arguments have names"),
                ));
            }
            Some(schema.clone())
        }
    };
    Ok(Tool {
        name: name.to_owned(),
        parameters,
        whole: shown_tool(path, &whole, function)?,
    })
}

/// A tool as vLLM shows it to the template: its known members, in the order of its classes, null where one is absent.
/// Source: `ChatCompletionToolsParam` in `vllm/entrypoints/openai/chat_completion/protocol.py` and `FunctionDefinition`
/// in `vllm/entrypoints/generate/base/protocol.py`.
fn shown_tool(path: &str, tool: &Tree, function: &Tree) -> Result<Tree, ApiError> {
    let flag = |of: &Tree, at: String, name: &str| match of.get(name) {
        None | Some(Tree::Null) => Ok(None),
        Some(value) => match tree_bool(value) {
            Some(value) => Ok(Some((name.to_owned(), Tree::Bool(value)))),
            None => Err(ApiError::invalid(
                at.clone(),
                format!("`{at}` must be true or false"),
            )),
        },
    };
    let at = format!("{path}.function");
    let deferred = flag(tool, format!("{path}.defer_loading"), "defer_loading")?;
    let description = function.get("description").unwrap_or(&Tree::Null);
    if !matches!(description, Tree::Null | Tree::Text(_)) {
        let at = format!("{at}.description");
        return Err(ApiError::invalid(
            at.clone(),
            format!("`{at}` must be a string"),
        ));
    }
    let or_null = |name: &str| function.get(name).cloned().unwrap_or(Tree::Null);
    let mut members = vec![
        ("name".to_owned(), or_null("name")),
        ("description".to_owned(), description.clone()),
        ("parameters".to_owned(), or_null("parameters")),
    ];
    members.extend(flag(function, format!("{at}.strict"), "strict")?);
    let own = flag(function, format!("{at}.defer_loading"), "defer_loading")?;
    members.extend(own.or_else(|| deferred.clone()));
    let mut shown = vec![
        ("type".to_owned(), Tree::Text("function".into())),
        ("function".to_owned(), Tree::Object(members)),
    ];
    shown.extend(deferred);
    Ok(Tree::Object(shown))
}

/// The truth value that pydantic reads from `value`.
fn tree_bool(value: &Tree) -> Option<bool> {
    match value {
        Tree::Bool(value) => Some(*value),
        Tree::Number(number) => Json::Real(number.as_f64()).as_bool(),
        Tree::Text(text) => Json::Text(text.as_str().into()).as_bool(),
        _ => None,
    }
}

fn choice(path: &str, value: &Json<'_>) -> Result<RawChoice, ApiError> {
    match value {
        Json::Text(word) => match &**word {
            "none" => Ok(RawChoice::None),
            "auto" => Ok(RawChoice::Auto),
            "required" => Ok(RawChoice::Required),
            other => Err(ApiError::invalid(
                path,
                format!(
                    "`{path}` is {:?}; it must be `none`, `auto`, `required` or a function",
                    super::error::clip(other)
                ),
            )),
        },
        Json::Object(_) => {
            match value.member("type") {
                None | Some(Json::Null) => {}
                Some(Json::Text(kind)) if kind == "function" => {}
                Some(_) => {
                    return Err(ApiError::invalid(
                        format!("{path}.type"),
                        format!("`{path}.type` must be `function`"),
                    ));
                }
            }
            let function = value.member("function");
            match function.and_then(|f| f.member("name")) {
                Some(Json::Text(name)) => Ok(RawChoice::Named(name.clone().into_owned())),
                _ => Err(missing(&format!("{path}.function.name"))),
            }
        }
        other => Err(wrong_type(path, "a string or an object", other)),
    }
}

fn response_format(path: &str, value: &Json<'_>) -> Result<TextForm, ApiError> {
    if !matches!(value, Json::Object(_)) {
        return Err(wrong_type(path, "an object", value));
    }
    let kind = match value.member("type") {
        Some(Json::Text(kind)) => kind.clone().into_owned(),
        _ => return Err(missing(&format!("{path}.type"))),
    };
    let described = value.member("json_schema").filter(|of| **of != Json::Null);
    if let Some(described) = described {
        check_description("response_format.json_schema", described)?;
    }
    match kind.as_str() {
        "text" => Ok(TextForm::Free),
        "json_object" => Ok(TextForm::JsonObject),
        "json_schema" => {
            const AT: &str = "response_format.json_schema.schema";
            match described.and_then(|of| of.member("schema")) {
                None | Some(Json::Null) => Err(missing(AT)),
                Some(found) => schema(AT, AT, found.clone()),
            }
        }
        other => Err(ApiError::unsupported(
            format!("{path}.type"),
            format!(
                "`{path}.type` is {:?}; `text`, `json_object` and `json_schema` are modelled",
                super::error::clip(other)
            ),
        )),
    }
}

/// Checks what stands beside the schema of a form. Source: `JsonSchemaResponseFormat` in
/// `vllm/entrypoints/generate/base/protocol.py`.
fn check_description(path: &str, value: &Json<'_>) -> Result<(), ApiError> {
    if !matches!(value, Json::Object(_)) {
        return Err(wrong_type(path, "an object", value));
    }
    match value.member("name") {
        None => return Err(missing(&format!("{path}.name"))),
        Some(Json::Text(_)) => {}
        Some(other) => return Err(wrong_type(&format!("{path}.name"), "a string", other)),
    }
    match value.member("description") {
        None | Some(Json::Null | Json::Text(_)) => {}
        Some(other) => {
            return Err(wrong_type(
                &format!("{path}.description"),
                "a string",
                other,
            ));
        }
    }
    match value.member("strict") {
        None | Some(Json::Null) => Ok(()),
        Some(strict) => boolean(&format!("{path}.strict"), strict).map(|_| ()),
    }
}

fn structured_outputs(path: &str, value: Json<'_>) -> Result<TextForm, ApiError> {
    let Json::Object(members) = value else {
        return Err(wrong_type(path, "an object", &value));
    };
    let mut form = TextForm::Free;
    let mut first: Option<String> = None;
    for (name, value) in members {
        if value == Json::Null || value == Json::Bool(false) {
            continue;
        }
        let at = format!("{path}.{name}");
        let next = match &*name {
            "json" => schema(&at, "structured_outputs.json", value)?,
            "json_object" => {
                if !boolean(&at, &value)? {
                    continue;
                }
                TextForm::JsonObject
            }
            "choice" => choices(&at, value)?,
            "regex" => pattern(&at, "structured_outputs.regex", value)?,
            // They choose among ways that all satisfy the form.
            "disable_any_whitespace"
            | "disable_additional_properties"
            | "disable_fallback"
            | "backend" => continue,
            _ => {
                let message = format!(
                    "`{at}` is not modelled; `json`, `json_object`, `choice` and `regex` are"
                );
                return Err(ApiError::unsupported(at, message));
            }
        };
        if let Some(first) = first.replace(at.clone()) {
            let message =
                format!("`{first}` and `{at}` both say what the answer looks like; send one");
            return Err(ApiError::invalid(at, message));
        }
        form = next;
    }
    // As in vLLM: a client that sends it expects that the answer has some form.
    if first.is_none() {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` sets no form; send one of `json`, `json_object`, `choice` and `regex`"
            ),
        ));
    }
    Ok(form)
}

/// A schema, as JSON or as a text with JSON.
fn schema(path: &str, field: &'static str, value: Json<'_>) -> Result<TextForm, ApiError> {
    let schema = match value {
        Json::Text(text) => match Json::parse(&text, SCHEMA_VALUES_MAX) {
            Ok(schema) => schema.into_tree(),
            Err(error) => {
                let message = format!("`{path}` is a text that is no JSON: {error}");
                return Err(ApiError::invalid(path, message));
            }
        },
        value @ (Json::Object(_) | Json::Bool(_)) => value.into_tree(),
        other => return Err(wrong_type(path, "a JSON schema", &other)),
    };
    check_schema(&schema).map_err(|error| schema_error(path, &error))?;
    Ok(TextForm::Schema(schema, field))
}

fn choices(path: &str, value: Json<'_>) -> Result<TextForm, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of strings", &other))?;
    let each = elements.into_iter().enumerate();
    let texts = each
        .map(|(at, element)| Ok(text(&format!("{path}.{at}"), element)?.into_owned()))
        .collect::<Result<Vec<String>, ApiError>>()?;
    if texts.is_empty() {
        return Err(ApiError::invalid(
            path,
            format!("`{path}` is empty; name at least one"),
        ));
    }
    Ok(TextForm::Choice(texts))
}

fn pattern(path: &str, field: &'static str, value: Json<'_>) -> Result<TextForm, ApiError> {
    let pattern = text(path, value)?.into_owned();
    text_by_pattern(&pattern, &mut Rng::new(0)).map_err(|reason| {
        ApiError::unsupported(path, format!("the pattern in `{path}` {reason}"))
    })?;
    Ok(TextForm::Pattern(pattern, field))
}

/// `tool_calls` of a message, with arguments as values, as templates take them.
pub(super) fn tool_calls(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of calls", &other))?;
    let each = elements.into_iter().enumerate();
    each.map(|(at, element)| tool_call(&format!("{path}.{at}"), element))
        .collect()
}

/// A call as vLLM shows it to the template: the members of its class, in their order.
/// Source: `ChatCompletionMessageFunctionToolCallParam` of the package `openai`.
fn tool_call(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    let Json::Object(members) = value else {
        return Err(wrong_type(path, "an object", &value));
    };
    let at = format!("{path}.function");
    let mut shown = Vec::with_capacity(3);
    let mut function = None;
    for (name, value) in members {
        match &*name {
            "function" => function = Some(value),
            "type" if !matches!(&value, Json::Text(kind) if *kind == "function") => {
                return Err(ApiError::invalid(
                    format!("{path}.type"),
                    format!("`{path}.type` must be `function`"),
                ));
            }
            "id" if !value.is_text() => {
                return Err(wrong_type(&format!("{path}.id"), "a string", &value));
            }
            "id" | "type" => {
                shown.retain(|(known, _)| *known != *name);
                shown.push((name.into_owned(), value.into_tree()));
            }
            _ => {}
        }
    }
    let Some(function) = function else {
        return Err(missing(&format!("{at}.name")));
    };
    let Json::Object(parts) = function else {
        return Err(wrong_type(&at, "an object", &function));
    };
    let mut name = None;
    let mut found = None;
    for (part, value) in parts {
        match &*part {
            "name" => name = Some(text(&format!("{at}.name"), value)?.into_owned()),
            "arguments" => found = Some(arguments(&text(&format!("{at}.arguments"), value)?)),
            _ => {}
        }
    }
    let name = name.ok_or_else(|| missing(&format!("{at}.name")))?;
    let found = found.ok_or_else(|| missing(&format!("{at}.arguments")))?;
    for needed in ["id", "type"] {
        if !shown.iter().any(|(name, _)| name == needed) {
            return Err(missing(&format!("{path}.{needed}")));
        }
    }
    let function = Tree::Object(vec![
        ("arguments".into(), found),
        ("name".into(), Tree::Text(name)),
    ]);
    shown.push(("function".into(), function));
    // `id`, `function`, `type`.
    shown.sort_by_key(|(name, _)| ["id", "function", "type"].iter().position(|of| of == name));
    Ok(Tree::Object(shown))
}

/// The arguments of a call: the object in a text. Other texts count as `{}`, as in vLLM: a model's mistake in the
/// history would end the conversation. Source: `_postprocess_messages` in `vllm/renderers/chat_utils/chat_message.py`.
fn arguments(text: &str) -> Tree {
    match Json::parse_python(text, VALUES_MAX).map(Json::into_tree) {
        Ok(tree @ Tree::Object(_)) => tree,
        _ => Tree::Object(Vec::new()),
    }
}
