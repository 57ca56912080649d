//! An answer whose text is decided before it is generated: calls of tools, and text in a form.
//!
//! The engine generates as many tokens as the script has, and the frontend shows the script's tokens in their
//! place, one by one as they come. So times, batches and token counts are those of any answer of that length. The
//! engine's cache has the blocks of its own tokens, so the next turn of a chat hits the blocks up to the answer,
//! and not those of the answer.
//!
//! Calls are written as models with the Hermes format write them, which is what their tokens count:
//!
//! ```text
//! <tool_call>\n{"name": "weather", "arguments": {"city": "amber"}}\n</tool_call>
//! '-------------- hidden ---'------'- hidden --'----- shown -----'--- hidden ---'
//! ```

use std::borrow::Cow;
use std::rc::Rc;

use slipstream_base::TokenId;
use slipstream_base::mix;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_structured::{Rng, Tree, json_by_schema, text_by_pattern, write_text};

use crate::openai::{ApiError, Form, RequestParams, TextForm, Tool, ToolChoice, schema_error};
use crate::text::TextModel;

/// Bytes of all texts of a request at most: some hundreds of µs to make and to tokenize.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Work for all choices of a request at most, in values that are made or copied: some ms. One choice may
/// take most of it.
const REQUEST_WORK_MAX: u32 = 20_000;

/// A call, as a whole answer shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScriptedCall {
    pub(crate) name: String,
    /// JSON.
    pub(crate) arguments: String,
}

/// Client's view of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Show {
    /// Its text.
    Text,
    /// Nothing: it is the frame of a call.
    Hidden,
    /// With the last token of the span: that this call begins.
    Call(u32),
    /// Its text, as a part of the arguments of this call.
    Arguments(u32),
}

struct Span {
    /// Position behind its last token.
    end: u32,
    show: Show,
}

/// See the module's text.
pub(crate) struct Script {
    tokens: Vec<TokenId>,
    spans: Vec<Span>,
    eos: TokenId,
    pub(crate) calls: Vec<ScriptedCall>,
    /// The client named the tool: the reason is then `stop`, as with OpenAI and vLLM.
    pub(crate) named: bool,
}

impl Script {
    fn new(eos: TokenId) -> Script {
        Script {
            tokens: Vec::new(),
            spans: Vec::new(),
            eos,
            calls: Vec::new(),
            named: false,
        }
    }

    fn push(&mut self, model: &TextModel, text: &str, show: Show) {
        model.encode(text, false, &mut self.tokens);
        let end = self.len();
        self.spans.push(Span { end, show });
    }

    /// The end-of-sequence token, which counts as a token.
    fn end(&mut self) {
        self.tokens.push(self.eos);
        match self.spans.last_mut() {
            Some(last) if !matches!(last.show, Show::Call(_)) => last.end += 1,
            _ => self.spans.push(Span {
                end: self.len(),
                show: Show::Text,
            }),
        }
    }

    /// Tokens, the end-of-sequence token included.
    pub(crate) fn len(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    /// Memory that it takes, bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let calls = self
            .calls
            .iter()
            .map(|call| call.name.len() + call.arguments.len());
        (self.tokens.len() * size_of::<TokenId>() + calls.sum::<usize>()) as u64
    }

    /// The token at `position`. Behind the last one, more of that: with `ignore_eos` an answer continues.
    pub(crate) fn token(&self, position: u64) -> TokenId {
        self.tokens
            .get(to_usize(position))
            .copied()
            .unwrap_or(self.eos)
    }

    /// The view of the token at `position`, and whether it is the last one with that view.
    pub(crate) fn show(&self, position: u64) -> (Show, bool) {
        let at = self.spans.partition_point(|s| u64::from(s.end) <= position);
        match self.spans.get(at) {
            Some(span) => (span.show, u64::from(span.end) == position + 1),
            None => (Show::Hidden, false),
        }
    }
}

/// The scripts of a request's choices, by the seed of each; empty if any text will do.
///
/// `tool_answered`: results of tools follow the assistant's last message, after which `auto` calls no tool.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault, if nothing satisfies the form.
pub(crate) fn scripts(
    model: &TextModel,
    params: &RequestParams,
    seeds: &[u64],
    tool_answered: bool,
) -> Result<Vec<Script>, ApiError> {
    let Some(form) = &params.form else {
        return Ok(Vec::new());
    };
    let calls = match form.choice {
        ToolChoice::None => false,
        ToolChoice::Auto => !tool_answered,
        ToolChoice::Required | ToolChoice::Named(_) => true,
    };
    if !calls && form.text == TextForm::Free {
        return Ok(Vec::new());
    }
    let mut scripts = Vec::with_capacity(seeds.len());
    let mut bytes = 0;
    let mut work = 0;
    for (index, seed) in seeds.iter().enumerate() {
        let mut rng = Rng::new(*seed ^ 0x666f_726d); // "form": apart from the answer's length
        let mut script = Script::new(model.eos());
        if calls {
            bytes += write_calls(model, form, &mut rng, &mut script)?;
        } else {
            let text = text_in_form(&form.text, &mut rng)?;
            bytes += text.len();
            script.push(model, &text, Show::Text);
        }
        script.end();
        work += rng.spent();
        let more_follow = index + 1 < seeds.len();
        if bytes > REQUEST_BYTES_MAX || more_follow && work > REQUEST_WORK_MAX {
            return Err(ApiError::invalid(
                "n",
                format!(
                    "the choices have more than {REQUEST_BYTES_MAX} bytes of structured text \
                     together, or are too much work; lower `n`"
                ),
            ));
        }
        scripts.push(script);
    }
    Ok(scripts)
}

fn text_in_form(form: &TextForm, rng: &mut Rng) -> Result<String, ApiError> {
    match form {
        TextForm::Free => Ok(String::new()),
        TextForm::JsonObject => {
            let text = |text: &str| Tree::Text(text.to_owned());
            let any = Tree::Object(vec![
                ("type".into(), text("object")),
                (
                    "additionalProperties".into(),
                    Tree::Object(vec![("type".into(), text("string"))]),
                ),
                ("minProperties".into(), Tree::Number(2.into())),
            ]);
            json_by_schema(&any, rng).map_err(|error| schema_error("response_format", &error))
        }
        TextForm::Schema(schema, field) => {
            json_by_schema(schema, rng).map_err(|error| schema_error(field, &error))
        }
        TextForm::Choice(texts) => {
            let chosen = rng.index(texts.len());
            Ok(texts[chosen].clone())
        }
        TextForm::Pattern(pattern, field) => text_by_pattern(pattern, rng).map_err(|reason| {
            ApiError::unsupported(*field, format!("the pattern in `{field}` {reason}"))
        }),
    }
}

/// Writes the calls, and returns their bytes.
fn write_calls(
    model: &TextModel,
    form: &Form,
    rng: &mut Rng,
    script: &mut Script,
) -> Result<usize, ApiError> {
    let named = match form.choice {
        ToolChoice::Named(at) => Some(at),
        _ => None,
    };
    script.named = named.is_some();
    // Mostly one, as models do; of several, two now and then.
    let two = named.is_none() && form.parallel && rng.below(4) == 0;
    let mut bytes = 0;
    for call in 0..=u32::from(two) {
        let at = named.unwrap_or_else(|| rng.index(form.tools.len()));
        let Tool {
            name, parameters, ..
        } = &form.tools[at];
        let arguments = match parameters {
            None => "{}".to_owned(),
            Some(schema) => json_by_schema(&of_object(schema), rng).map_err(|error| {
                schema_error(&format!("tools.{at}.function.parameters"), &error)
            })?,
        };
        let mut opening = if call == 0 { "" } else { "\n" }.to_owned();
        opening.push_str("<tool_call>\n{\"name\": ");
        write_text(name, &mut opening);
        opening.push_str(", \"arguments\": ");
        script.push(model, &opening, Show::Call(call));
        script.push(model, &arguments, Show::Arguments(call));
        script.push(model, "}\n</tool_call>", Show::Hidden);
        bytes += opening.len() + arguments.len() + 16;
        script.calls.push(ScriptedCall {
            name: name.clone(),
            arguments,
        });
    }
    Ok(bytes)
}

/// The schema, which demands an object also if it does not say so.
fn of_object(schema: &Tree) -> Cow<'_, Tree> {
    match schema {
        Tree::Object(members) if schema.get("type").is_none() => {
            let mut members = members.clone();
            members.push(("type".into(), Tree::Text("object".into())));
            Cow::Owned(Tree::Object(members))
        }
        schema => Cow::Borrowed(schema),
    }
}

/// `id` of a call: unique if the answer's id is.
pub(crate) fn call_id(answer_id: &str, choice: usize, call: u32) -> String {
    let hash = answer_id.bytes().fold(0, |hash, byte| {
        mix::draw(hash ^ u64::from(byte), u64::from(byte))
    });
    let place = (choice as u64) << 32 | u64::from(call);
    let (high, low) = (mix::draw(hash, place), mix::draw(hash ^ 1, place));
    format!("chatcmpl-tool-{high:016x}{low:016x}")
}

/// Shared by the parts of a reply.
pub(crate) type SharedScript = Option<Rc<Script>>;
