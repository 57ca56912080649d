//! Requests to the two generating endpoints, parsed and checked.

use std::borrow::Cow;

use slipstream_base::TokenId;
use slipstream_structured::Tree;

use super::fields::{self, Rule};
use super::form::{Form, RawForm, form_field};
use super::members::{boolean, missing, read_members, real, text, tokens, whole, wrong_type};
use super::prompt::RawPrompt;
use super::sampling::Sampling;
use super::value::Json;
use super::{ApiError, CompletionApi};
use crate::text::Message;

/// Choices of one request at most: `n` times its prompts.
pub const CHOICES_MAX: u32 = 1024;
/// `n` at most. Source: OpenAI's API reference, "Create chat completion".
pub const N_MAX: u32 = 128;
/// Stop strings at most. OpenAI takes 4, vLLM any number; each costs time per byte of the answer.
pub const STOPS_MAX: usize = 64;
/// A stop string's length at most, bytes: what it could hold back of an answer.
pub const STOP_BYTES_MAX: usize = 1024;
/// `stop_token_ids` at most.
pub const STOP_TOKENS_MAX: usize = 1024;
/// Log probabilities per token at most. Source: OpenAI's `top_logprobs`; vLLM's `max_logprobs`.
pub const LOGPROBS_MAX: u32 = 20;
/// `max_tokens` of a completion that names none. Source: OpenAI's API reference; vLLM keeps to it.
pub const COMPLETION_MAX_TOKENS: u32 = 16;
/// `user`, `request_id` and `cache_salt` at most, bytes.
pub const NAME_BYTES_MAX: usize = 512;

/// A well-formed request. All that depends on the model (its name, its length, its
/// vocabulary) is for the caller to check.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiRequest<'a> {
    /// Where it came.
    pub kind: CompletionApi,
    /// `model`; without one, the model that is served (as vLLM does).
    pub model: Option<Cow<'a, str>>,
    /// The prompts.
    pub input: Input<'a>,
    /// How to answer.
    pub params: RequestParams,
}

/// The prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum Input<'a> {
    /// A chat; at least one message.
    Chat {
        /// The messages so far.
        messages: Vec<Message<'a>>,
        /// Open the assistant's turn behind the last message. Default true.
        add_generation_prompt: bool,
        /// The answer continues the last message.
        continue_final_message: bool,
        /// `chat_template_kwargs`: variables for the template.
        template_kwargs: Vec<(String, Tree)>,
    },
    /// Prompts; at least one, none empty. Each gets `n` choices, in order.
    Prompts(Vec<PromptInput<'a>>),
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptInput<'a> {
    /// As text.
    Text(Cow<'a, str>),
    /// As token ids.
    Tokens(Vec<TokenId>),
}

/// How to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestParams {
    /// Answer in events.
    pub stream: bool,
    /// `stream_options.include_usage`: a last event with the counts.
    pub include_usage: bool,
    /// `stream_options.continuous_usage_stats`: counts in every event too. As in vLLM, nothing
    /// without `include_usage`.
    pub running_usage: bool,
    /// Choices per prompt, `1..=`[`N_MAX`].
    pub n: u32,
    /// Tokens per choice at most, 1 or more; `None`: as many as the model's length leaves.
    pub max_tokens: Option<u32>,
    /// Tokens before anything may end a choice; at most `max_tokens`.
    pub min_tokens: u32,
    /// Generate `max_tokens` tokens in any case.
    pub ignore_eos: bool,
    /// Stop strings, none empty.
    pub stop: Vec<String>,
    /// Tokens that end a choice.
    pub stop_token_ids: Vec<TokenId>,
    /// A stop string that was found stays in the answer.
    pub include_stop_str_in_output: bool,
    /// Decides the answer; negative seeds wrap. `None`: the caller draws one.
    pub seed: Option<u64>,
    /// Greedy sampling: the prompt alone decides the answer, and `seed` has no effect.
    pub greedy: bool,
    /// Log probabilities of the generated tokens.
    pub logprobs: Option<LogprobsWish>,
    /// Log probabilities of the prompt's tokens, with so many alternatives each.
    pub prompt_logprobs: Option<LogprobsWish>,
    /// The prompt is repeated with its log probabilities: `echo` and `logprobs` of a completion.
    pub scores_echo: bool,
    /// Tokens that answers are made of, or not made of; `None`: all of the model's.
    pub vocab: Option<Box<VocabLimits>>,
    /// Completions: the prompt's text goes before the answer's. Chats: the last message's text, if it is
    /// the assistant's.
    pub echo: bool,
    /// Completions with `echo` and a `max_tokens` of 0: the answer shows the prompt only. As in vLLM, the engine
    /// generates one token, which is counted, and `max_tokens` is 1 here.
    pub echo_only: bool,
    /// Tokens such as BOS around the prompt: completions yes, chats no (their template has them).
    pub add_special_tokens: bool,
    /// Under priority scheduling: lower goes first.
    pub priority: i32,
    /// The user, by the client's name.
    pub user: Option<String>,
    /// The client's name for the request; the header `x-request-id` may give one too.
    pub request_id: Option<String>,
    /// Keeps prefixes apart from those of requests with another salt.
    pub cache_salt: Option<String>,
    /// The answer has the ids of its tokens and of the prompt's.
    pub return_token_ids: bool,
    /// Tools, and what the answer must look like; `None`: any text.
    pub form: Option<Box<Form>>,
}

/// Limits of the tokens of an answer: `logit_bias` at its ends, and `allowed_token_ids`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VocabLimits {
    /// Tokens with a bias of -100, which the answer does not have. Sorted.
    pub banned: Vec<TokenId>,
    /// If there are any: tokens with a bias of 100, the only ones that the answer has. Sorted.
    pub forced: Vec<TokenId>,
    /// If there are any: `allowed_token_ids`, out of which the answer is made. Sorted.
    pub allowed: Vec<TokenId>,
}

/// Log probabilities asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogprobsWish {
    /// Alternatives per token, `0..=`[`LOGPROBS_MAX`].
    pub top: u32,
}

/// Parses the body of `POST /v1/chat/completions`.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault, or with the place where the JSON breaks off.
pub fn parse_chat(body: &[u8]) -> Result<ApiRequest<'_>, ApiError> {
    parse(CompletionApi::Chat, body)
}

/// Parses the body of `POST /v1/completions`.
///
/// # Errors
/// As [`parse_chat`].
pub fn parse_completion(body: &[u8]) -> Result<ApiRequest<'_>, ApiError> {
    parse(CompletionApi::Completion, body)
}

/// Parses a further line of a request with more input to come: `{"prompt": …}`, text or token ids.
///
/// # Errors
/// As [`parse_chat`].
pub fn parse_turn(line: &[u8]) -> Result<PromptInput<'_>, ApiError> {
    let mut prompt = None;
    read_members(
        line,
        |name| name == "prompt",
        |name, value| {
            prompt = Some(match value {
                Json::Text(text) => PromptInput::Text(text),
                value => PromptInput::Tokens(tokens(name, value)?),
            });
            Ok(())
        },
    )?;
    prompt.ok_or_else(|| missing("prompt"))
}

fn parse(kind: CompletionApi, body: &[u8]) -> Result<ApiRequest<'_>, ApiError> {
    let mut raw = Raw::new();
    read_members(
        body,
        |name| fields::rule(kind, name).is_some(),
        |name, value| raw.take(kind, name, value),
    )?;
    raw.finish(kind)
}

/// Values of the fields as they were sent, types checked.
struct Raw<'a> {
    model: Option<Cow<'a, str>>,
    prompt: RawPrompt<'a>,
    form: RawForm,
    sampling: Sampling,
    logprobs: RawLogprobs,
    stream_options: Option<StreamOptions>,
    max_completion_tokens: Option<u32>,
    best_of: Option<u32>,
    params: RequestParams,
}

/// Fields of log probabilities.
#[derive(Default)]
struct RawLogprobs {
    /// `logprobs` of a chat.
    chat: bool,
    /// `top_logprobs`
    top: Option<u32>,
    /// `logprobs` of a completion.
    completion: Option<u32>,
}

impl RawLogprobs {
    fn finish(&self, kind: CompletionApi) -> Result<Option<LogprobsWish>, ApiError> {
        match kind {
            CompletionApi::Completion => Ok(self.completion.map(|top| LogprobsWish { top })),
            CompletionApi::Chat if self.chat => Ok(Some(LogprobsWish {
                top: self.top.unwrap_or(0),
            })),
            CompletionApi::Chat if self.top.is_some_and(|top| top > 0) => Err(ApiError::invalid(
                "top_logprobs",
                "`top_logprobs` needs `logprobs: true`; set it, or leave `top_logprobs` out",
            )),
            CompletionApi::Chat => Ok(None),
        }
    }
}

impl<'a> Raw<'a> {
    fn new() -> Self {
        Raw {
            model: None,
            prompt: RawPrompt::default(),
            form: RawForm::default(),
            sampling: Sampling::default(),
            logprobs: RawLogprobs::default(),
            stream_options: None,
            max_completion_tokens: None,
            best_of: None,
            params: RequestParams {
                stream: false,
                include_usage: false,
                running_usage: false,
                n: 1,
                max_tokens: None,
                min_tokens: 0,
                ignore_eos: false,
                stop: Vec::new(),
                stop_token_ids: Vec::new(),
                include_stop_str_in_output: false,
                seed: None,
                greedy: false,
                logprobs: None,
                prompt_logprobs: None,
                scores_echo: false,
                vocab: None,
                echo: false,
                echo_only: false,
                add_special_tokens: false,
                priority: 0,
                user: None,
                request_id: None,
                cache_salt: None,
                return_token_ids: false,
                form: None,
            },
        }
    }

    /// Notes one field. A field sent twice counts as its last value, as in Python's parser; null
    /// counts as not sent.
    fn take(&mut self, kind: CompletionApi, name: &str, value: Json<'a>) -> Result<(), ApiError> {
        if value == Json::Null {
            if name == "tool_choice" {
                self.form.choose_nothing();
            }
            return Ok(());
        }
        if let Some(Rule::Refused { harmless, hint }) = fields::rule(kind, name) {
            return if harmless(&value) {
                Ok(())
            } else {
                Err(ApiError::unsupported(
                    name,
                    format!("`{name}` is not supported: {hint}"),
                ))
            };
        }
        if let Some(field) = form_field(name) {
            return self.form.take(field, value);
        }
        if RawPrompt::FIELDS.contains(&name) {
            return self.prompt.take(name, value);
        }
        if Sampling::FIELDS.contains(&name) {
            return self.sampling.take(name, &value);
        }
        match name {
            "model" => self.model = model(name, value)?,
            // As in vLLM, an empty one is none.
            "stream_options" if matches!(&value, Json::Object(members) if members.is_empty()) => {}
            "stream_options" => self.stream_options = Some(stream_options(name, &value)?),
            "max_completion_tokens" => {
                self.max_completion_tokens = Some(whole(name, &value, 1, u32::MAX)?);
            }
            "logprobs" => match kind {
                CompletionApi::Chat => self.logprobs.chat = boolean(name, &value)?,
                CompletionApi::Completion => {
                    self.logprobs.completion = Some(top_count(name, &value)?);
                }
            },
            "top_logprobs" => self.logprobs.top = Some(top_count(name, &value)?),
            "best_of" => self.best_of = Some(whole(name, &value, 1, N_MAX)?),
            _ => self.params.take(kind, name, value)?,
        }
        Ok(())
    }

    /// Checks what concerns several fields.
    fn finish(self, kind: CompletionApi) -> Result<ApiRequest<'a>, ApiError> {
        let mut params = self.params;
        let (input, special) = self.prompt.finish(kind)?;
        params.add_special_tokens = special;
        params.form = self.form.finish()?;
        if let Some(options) = self.stream_options {
            params.set_stream_options(options)?;
        }
        // The newer name counts where both are sent, as in vLLM.
        params.max_tokens = self.max_completion_tokens.or(params.max_tokens);
        params.check_lengths(kind)?;
        params.greedy = self.sampling.is_greedy();
        self.sampling.check_choices(params.n)?;
        check_best_of(self.best_of, params.n)?;
        params.logprobs = self.logprobs.finish(kind)?;
        params.set_prompt_logprobs(kind)?;
        params.vocab = params
            .vocab
            .filter(|limits| **limits != VocabLimits::default());
        check_number_of_choices(&input, params.n)?;
        Ok(ApiRequest {
            kind,
            model: self.model,
            input,
            params,
        })
    }
}

impl RequestParams {
    /// Notes a field that needs no other.
    fn take(&mut self, kind: CompletionApi, name: &str, value: Json<'_>) -> Result<(), ApiError> {
        match name {
            "stream" => self.stream = boolean(name, &value)?,
            "n" => self.n = whole(name, &value, 1, N_MAX)?,
            "max_tokens" => {
                // 0 has a meaning with `echo`, which may follow.
                let least = u32::from(kind == CompletionApi::Chat);
                self.max_tokens = Some(whole(name, &value, least, u32::MAX)?);
            }
            "min_tokens" => self.min_tokens = whole(name, &value, 0, u32::MAX)?,
            "ignore_eos" => self.ignore_eos = boolean(name, &value)?,
            "stop" => self.stop = stops(name, value)?,
            "stop_token_ids" => self.stop_token_ids = stop_tokens(name, value)?,
            "include_stop_str_in_output" => {
                self.include_stop_str_in_output = boolean(name, &value)?;
            }
            "seed" => self.seed = Some(seed(name, &value)?),
            "echo" => self.echo = boolean(name, &value)?,
            "priority" => self.priority = priority(name, &value)?,
            "user" => self.user = name_text(name, value)?,
            "request_id" => {
                let id = name_text(name, value)?;
                self.request_id = id.map(|id| printable(name, id)).transpose()?;
            }
            "cache_salt" => {
                let salt = name_text(name, value)?;
                self.cache_salt = Some(checked_salt(name, salt)?);
            }
            "return_token_ids" => self.return_token_ids = boolean(name, &value)?,
            "logit_bias" => {
                let (banned, forced) = logit_bias(name, &value)?;
                let limits = self.vocab.get_or_insert_default();
                (limits.banned, limits.forced) = (banned, forced);
            }
            "allowed_token_ids" => {
                self.vocab.get_or_insert_default().allowed = allowed_tokens(name, value)?;
            }
            "prompt_logprobs" => {
                let top = top_count(name, &value)?;
                self.prompt_logprobs = Some(LogprobsWish { top });
            }
            other => unreachable!("`{other}` is in the table of fields, but nothing takes it"),
        }
        Ok(())
    }

    fn set_stream_options(&mut self, options: StreamOptions) -> Result<(), ApiError> {
        if !self.stream {
            return Err(ApiError::invalid(
                "stream_options",
                "`stream_options` needs `stream: true`; set it, or leave the options out",
            ));
        }
        self.include_usage = options.include_usage;
        self.running_usage = options.include_usage && options.continuous_usage_stats;
        Ok(())
    }

    /// Checks the limits of tokens, and sets those that have defaults.
    fn check_lengths(&mut self, kind: CompletionApi) -> Result<(), ApiError> {
        if kind == CompletionApi::Completion && self.max_tokens.is_none() {
            self.max_tokens = Some(COMPLETION_MAX_TOKENS);
        }
        if self.max_tokens == Some(0) {
            if !self.echo {
                return Err(ApiError::invalid(
                    "max_tokens",
                    format!(
                        "`max_tokens` is 0; it must be from 1 to {}, or 0 with `echo: true`, which answers \
                         with the prompt only",
                        u32::MAX
                    ),
                ));
            }
            self.echo_only = true;
            self.max_tokens = Some(1);
        }
        if let Some(max_tokens) = self.max_tokens
            && self.min_tokens > max_tokens
        {
            return Err(ApiError::invalid(
                "min_tokens",
                format!(
                    "`min_tokens` is {}, more than the {max_tokens} tokens that `max_tokens` \
                     allows; lower it",
                    self.min_tokens
                ),
            ));
        }
        Ok(())
    }

    /// Sets the log probabilities of the prompt, which `echo` may request too.
    fn set_prompt_logprobs(&mut self, kind: CompletionApi) -> Result<(), ApiError> {
        if let (true, Some(LogprobsWish { top })) = (self.stream, self.prompt_logprobs) {
            // As in vLLM: 0 asks for nothing in a stream.
            if top > 0 {
                return Err(ApiError::invalid(
                    "prompt_logprobs",
                    "`prompt_logprobs` are not part of streams; send `stream: false`, or `echo` with \
                     `logprobs` to /v1/completions",
                ));
            }
            self.prompt_logprobs = None;
        }
        self.scores_echo =
            kind == CompletionApi::Completion && self.echo && self.logprobs.is_some();
        // As in vLLM: an echoed chat has them as `prompt_logprobs`, and an echoed completion that is not streamed a second
        // time.
        if self.echo && !self.stream {
            self.prompt_logprobs = self.prompt_logprobs.or(self.logprobs);
        }
        Ok(())
    }
}

fn check_best_of(best_of: Option<u32>, n: u32) -> Result<(), ApiError> {
    match best_of {
        Some(best_of) if best_of != n => Err(ApiError::unsupported(
            "best_of",
            format!(
                "`best_of` is {best_of}, but `n` is {n}: choosing among more answers than are \
                 returned is not supported; leave `best_of` out"
            ),
        )),
        _ => Ok(()),
    }
}

fn check_number_of_choices(input: &Input<'_>, n: u32) -> Result<(), ApiError> {
    let Input::Prompts(prompts) = input else {
        return Ok(());
    };
    let choices = prompts.len() as u64 * u64::from(n);
    if choices > u64::from(CHOICES_MAX) {
        return Err(ApiError::invalid(
            "prompt",
            format!(
                "{} prompts with `n` = {n} make {choices} choices; a request may have \
                 {CHOICES_MAX}; send several requests",
                prompts.len(),
            ),
        ));
    }
    Ok(())
}

/// The name of a model; `None` if it is empty, which is the served one as in vLLM.
pub(super) fn model<'a>(path: &str, value: Json<'a>) -> Result<Option<Cow<'a, str>>, ApiError> {
    Ok(Some(text(path, value)?).filter(|name| !name.is_empty()))
}

/// A salt that vLLM takes too. Source: `validate_cache_salt` in `vllm/entrypoints/generate/base/protocol.py`.
fn checked_salt(path: &str, salt: Option<String>) -> Result<String, ApiError> {
    const CHARS_MAX: usize = 128;
    match salt {
        None => Err(ApiError::invalid(
            path,
            format!("`{path}` is empty; leave it out"),
        )),
        Some(salt) if salt.contains(['@', '/', '\\', '\0']) || salt.chars().count() > CHARS_MAX => {
            Err(ApiError::invalid(
                path,
                format!(
                    "`{path}` must have at most {CHARS_MAX} characters, and none of `@`, `/`, `\\` and NUL"
                ),
            ))
        }
        Some(salt) => Ok(salt),
    }
}

/// A name; `None` if it is empty.
fn name_text(path: &str, value: Json<'_>) -> Result<Option<String>, ApiError> {
    let name = text(path, value)?;
    if name.len() > NAME_BYTES_MAX {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` has {} bytes; it must have at most {NAME_BYTES_MAX}",
                name.len()
            ),
        ));
    }
    Ok(Some(name.into_owned()).filter(|name| !name.is_empty()))
}

/// A name that stands in logs and headers: no line breaks.
fn printable(path: &str, name: String) -> Result<String, ApiError> {
    match name.chars().find(|c| c.is_control()) {
        None => Ok(name),
        Some(control) => Err(ApiError::invalid(
            path,
            format!("`{path}` holds the control character {control:?}; leave it out"),
        )),
    }
}

/// A number of log probabilities per token. As in vLLM, texts are not converted here.
fn top_count(path: &str, value: &Json<'_>) -> Result<u32, ApiError> {
    if matches!(value, Json::Text(_)) {
        return Err(wrong_type(path, "a whole number", value));
    }
    whole(path, value, 0, LOGPROBS_MAX)
}

/// Tokens that a bias excludes, and those that it forces, sorted. Other biases change nothing: no logits are modelled.
fn logit_bias(path: &str, value: &Json<'_>) -> Result<(Vec<TokenId>, Vec<TokenId>), ApiError> {
    let (mut banned, mut forced) = (Vec::new(), Vec::new());
    let Json::Object(members) = value else {
        return Err(wrong_type(path, "an object", value));
    };
    for (token, bias) in members {
        let at = format!("{path}.{token}");
        let id = match &*Json::Text(token.as_ref().into()).as_whole() {
            // Python's `int` takes no decimal point.
            Json::Unsigned(id) if !token.contains('.') => TokenId::try_from(*id).ok(),
            _ => None,
        };
        let Some(id) = id else {
            return Err(ApiError::invalid(
                at.clone(),
                format!("`{at}`: names in `{path}` must be token ids"),
            ));
        };
        // vLLM clamps a bias to the range.
        let bias = real(&at, bias, |b| !b.is_nan(), "from -100 to 100")?;
        if bias <= -100.0 {
            banned.push(id);
        } else if bias >= 100.0 {
            forced.push(id);
        }
        if banned.len().max(forced.len()) > STOP_TOKENS_MAX {
            return Err(ApiError::invalid(
                path,
                format!(
                    "`{path}` excludes or forces more than {STOP_TOKENS_MAX} tokens; name fewer"
                ),
            ));
        }
    }
    banned.sort_unstable();
    forced.sort_unstable();
    Ok((banned, forced))
}

fn seed(path: &str, value: &Json<'_>) -> Result<u64, ApiError> {
    match &*value.as_whole() {
        Json::Unsigned(n) if i64::try_from(*n).is_ok() => Ok(*n),
        Json::Negative(n) => Ok(n.cast_unsigned()),
        Json::Unsigned(_) | Json::Real(_) | Json::Long(_) => Err(ApiError::invalid(
            path,
            format!("`{path}` must be a whole number from -2^63 to 2^63 - 1"),
        )),
        other => Err(wrong_type(path, "a whole number", other)),
    }
}

fn priority(path: &str, value: &Json<'_>) -> Result<i32, ApiError> {
    let number = match &*value.as_whole() {
        Json::Unsigned(n) => i32::try_from(*n).ok(),
        Json::Negative(n) => i32::try_from(*n).ok(),
        other => return Err(wrong_type(path, "a whole number", other)),
    };
    number.ok_or_else(|| {
        ApiError::invalid(
            path,
            format!("`{path}` must be from {} to {}", i32::MIN, i32::MAX),
        )
    })
}

#[derive(Clone, Copy, Debug)]
struct StreamOptions {
    include_usage: bool,
    continuous_usage_stats: bool,
}

fn stream_options(path: &str, value: &Json<'_>) -> Result<StreamOptions, ApiError> {
    if !matches!(value, Json::Object(_)) {
        return Err(wrong_type(path, "an object", value));
    }
    let flag = |name: &str| match value.member(name) {
        None | Some(Json::Null) => Ok(false),
        Some(flag) => boolean(&format!("{path}.{name}"), flag),
    };
    Ok(StreamOptions {
        include_usage: flag("include_usage")?,
        continuous_usage_stats: flag("continuous_usage_stats")?,
    })
}

fn stops(path: &str, value: Json<'_>) -> Result<Vec<String>, ApiError> {
    let stops = match value {
        Json::Text(stop) => vec![stop.into_owned()],
        other => other
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of strings", &other))?
            .into_iter()
            .enumerate()
            .map(|(at, stop)| Ok(text(&format!("{path}.{at}"), stop)?.into_owned()))
            .collect::<Result<_, ApiError>>()?,
    };
    if stops.len() > STOPS_MAX {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` has {} strings; at most {STOPS_MAX} are taken",
                stops.len()
            ),
        ));
    }
    if let Some(stop) = stops.iter().find(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(ApiError::invalid(
            path,
            format!(
                "a string of `{path}` has {} bytes; at most {STOP_BYTES_MAX} are taken",
                stop.len()
            ),
        ));
    }
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::invalid(
            path,
            format!("`{path}` has an empty string, which every text contains; remove it"),
        ));
    }
    Ok(stops)
}

/// `allowed_token_ids`, sorted. None at all would be the opposite of no limit; vLLM refuses that too.
fn allowed_tokens(path: &str, value: Json<'_>) -> Result<Vec<TokenId>, ApiError> {
    let mut allowed = stop_tokens(path, value)?;
    if allowed.is_empty() {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` is empty, so no token could be answered; name at least one token, or leave it \
                 out"
            ),
        ));
    }
    allowed.sort_unstable();
    Ok(allowed)
}

fn stop_tokens(path: &str, value: Json<'_>) -> Result<Vec<TokenId>, ApiError> {
    let tokens = tokens(path, value)?;
    if tokens.len() > STOP_TOKENS_MAX {
        return Err(ApiError::invalid(
            path,
            format!(
                "`{path}` has {} tokens; at most {STOP_TOKENS_MAX} are taken",
                tokens.len()
            ),
        ));
    }
    Ok(tokens)
}
