//! From the body of a request to dispatched sequences.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hyper::Response;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, Prompt, RankId, RequestId, Role, Stage, StageTimes,
    TokenId, adapter_id, mix,
};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::{Registration, StartRequest, StreamAddr};
use slipstream_recorder::RecordedRequest;
use slipstream_router::Score;
use slipstream_structured::Tree;

use crate::door::body::HttpBody;
use crate::door::budget::Charge;
use crate::door::clock::now_unix_s;
use crate::door::connection::Client;
use crate::door::http::{self, RequestHead};
use crate::door::management::{Adapter, AdapterUse};
use crate::door::metrics::Rejection;
use crate::door::service::Service;
use crate::openai::{
    ApiError, ApiRequest, CompletionApi, Input, LogprobsWish, PromptInput, RequestParams,
    parse_chat, parse_completion,
};
use crate::text::{ChatOptions, Message, StopMatcher, TextError, TextModel};
use crate::tokens::answers;
use crate::tokens::dispatching::Submission;
use crate::tokens::reply::body::ReplyBody;
use crate::tokens::reply::handle::ReplyHandle;
use crate::tokens::reply::spec::{SequenceSpec, Shape};
use crate::tokens::reply::state::{REPLY_BYTES, ReplyState, SEQUENCE_BYTES};
use crate::tokens::reply::trace::Trace;
use crate::tokens::reply::whole::Whole;
use crate::tokens::reply::{Reply, StreamRole, StreamSlot};
use crate::tokens::script::{Script, scripts};
use crate::tokens::vocab::AnswerVocab;
use crate::tokens::workers::Workers;

/// Work on one request before others have a turn, ns.
const SLICE_NS: u64 = 1_000_000;

/// Log probabilities of echoed prompts at most in a stream, as JSON, bytes: those of a prompt are one event, which is
/// rendered in one go. Some 4 ms.
const STREAM_SCORES_BYTES_MAX: u64 = 512 << 10;

/// An id of a token as JSON, with its comma, at most, bytes.
const ID_BYTES: u64 = 11;

/// Tokens of all images of a chat at most, if the model has no longer context.
const IMAGE_TOKENS_MAX: u32 = 1 << 20;

/// Room made for a chat's tokens before they are counted.
const CHAT_TOKENS_EXPECTED: usize = 1024;

/// A prompt, tokenized and hashed.
pub(crate) struct Tokenized {
    prompt: Prompt,
    pub(crate) max_tokens: u32,
    /// Its text, if it is to be repeated before the answer.
    echo: Option<Box<str>>,
    /// Ids of its tokens, if the answer has them or their log probabilities.
    ids: Option<Box<[TokenId]>>,
    /// The answers of its choices, if they are decided already.
    scripts: Vec<Script>,
    /// Seed of a greedy answer.
    greedy_seed: Option<u64>,
}

/// A request, parsed, checked and tokenized.
pub(crate) struct Prepared {
    pub(crate) kind: CompletionApi,
    pub(crate) params: RequestParams,
    pub(crate) prompts: Vec<Tokenized>,
    pub(crate) adapter: Option<Arc<Adapter>>,
    pub(crate) times: StageTimes,
}

impl Tokenized {
    /// Tokens of the prompt.
    pub(crate) fn len(&self) -> u32 {
        self.prompt.len()
    }
}

/// Serves `POST /v1/chat/completions` and `POST /v1/completions`.
pub(crate) async fn generate(
    workers: &Rc<Workers>,
    kind: CompletionApi,
    head: RequestHead,
    body: Bytes,
    charge: Charge,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let prepare =
        move |service: &Service, body: &[u8]| prepare(service, kind, body, times, |_| Ok(()));
    let bytes = body.len() + images_bytes(&workers.shard.service, &body, CHAT_IMAGE);
    let (prepared, charge) = workers
        .shard
        .run_sized(body, bytes, charge, prepare)
        .await?;
    drop(charge); // with the body
    let stream = prepared.params.stream;
    let mut handle = dispatch(workers, &head, prepared, false).await?;
    if stream {
        return Ok(http::events(ReplyBody::new(handle)));
    }
    let trace = handle.complete().await?;
    Ok(answers::whole(Whole::of(handle), trace.as_deref()))
}

/// Parses, checks and tokenizes the body of a request.
pub(crate) fn prepare(
    service: &Service,
    kind: CompletionApi,
    body: &[u8],
    mut times: StageTimes,
    check: impl FnOnce(&ApiRequest<'_>) -> Result<(), ApiError>,
) -> Result<Prepared, ApiError> {
    let mut request = match kind {
        CompletionApi::Chat => parse_chat(body)?,
        CompletionApi::Completion => parse_completion(body)?,
    };
    let adapter = check_model(service, request.model.as_deref())?;
    check(&request)?;
    times.note(Stage::Parsed, monotonic_ns());
    let mut prompts = tokenize(service, &request, adapter.as_deref())?;
    if request.params.form.is_some() {
        decide(service, body, &mut request, &mut prompts)?;
    }
    bound_answer(service, kind, &request.params, &mut prompts)?;
    times.note(Stage::Tokenized, monotonic_ns());
    Ok(Prepared {
        kind,
        params: request.params,
        prompts,
        adapter,
        times,
    })
}

/// Parses, checks and tokenizes completions that only compute their prompts. With them, a seed per prompt that
/// follows from its tokens.
pub(crate) fn prepare_inputs(
    service: &Service,
    body: &[u8],
    mut times: StageTimes,
) -> Result<(Prepared, Vec<u64>), ApiError> {
    let mut request = parse_completion(body)?;
    let adapter = check_model(service, request.model.as_deref())?;
    times.note(Stage::Parsed, monotonic_ns());
    let mut seeds = Vec::new();
    if let Input::Prompts(prompts) = &mut request.input {
        for prompt in prompts {
            if let PromptInput::Text(text) = prompt {
                let least = service.text.tokens_min(text.len());
                if least > service.context_max() as usize {
                    return Err(too_long(service, request.kind, &request.params, least));
                }
                let mut tokens = Vec::with_capacity(text.len() / 3);
                let special = request.params.add_special_tokens;
                service.text.encode(text, special, &mut tokens);
                *prompt = PromptInput::Tokens(tokens);
            }
            if let PromptInput::Tokens(tokens) = prompt {
                let draw = |seed, &token: &TokenId| mix::draw(seed, u64::from(token));
                seeds.push(tokens.iter().fold(0x656d_6265_6464, draw)); // "embedd"
            }
        }
    }
    let prompts = tokenize(service, &request, adapter.as_deref())?;
    times.note(Stage::Tokenized, monotonic_ns());
    let prepared = Prepared {
        kind: CompletionApi::Completion,
        params: request.params,
        prompts,
        adapter,
        times,
    };
    Ok((prepared, seeds))
}

/// Decides the answers of a request that says what they look like. Without a `seed` they follow from the body.
#[cold]
fn decide(
    service: &Service,
    body: &[u8],
    request: &mut ApiRequest<'_>,
    prompts: &mut [Tokenized],
) -> Result<(), ApiError> {
    let tool_answered = match &request.input {
        // Text may follow the results, as in Anthropic's messages.
        Input::Chat { messages, .. } => messages
            .iter()
            .rev()
            .take_while(|message| message.role != "assistant")
            .any(|message| message.role == "tool"),
        Input::Prompts(_) => false,
    };
    let params = &mut request.params;
    let seed = params.seed.unwrap_or_else(|| {
        let words = body.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        words.fold(mix::mix64(service.seed), mix::draw)
    });
    let seeds = choice_seeds(prompts, params.n, seed);
    let mut scripts = scripts(&service.text, params, &seeds, tool_answered)?.into_iter();
    if scripts.len() == 0 {
        return Ok(());
    }
    params.seed = Some(seed);
    for prompt in prompts {
        prompt.scripts = scripts.by_ref().take(params.n as usize).collect();
    }
    Ok(())
}

/// Returns the seeds of `n` choices of each of `prompts`. Greedy choices use their prompt's seed. Others have different
/// seeds, also across prompts, because the sequences of a batch would otherwise all have one length. The first choice
/// gets `seed`, as it would alone in a request.
fn choice_seeds(prompts: &[Tokenized], n: u32, seed: u64) -> Vec<u64> {
    let choices = prompts
        .iter()
        .flat_map(|prompt| (0..n).map(move |_| prompt));
    let seeds = choices.enumerate().map(|(index, prompt)| {
        let own = || match index as u64 {
            0 => seed,
            index => mix::draw(seed, index),
        };
        prompt.greedy_seed.unwrap_or_else(own)
    });
    seeds.collect()
}

/// Seed of the greedy answer to `tokens`, the same on every worker and in every request.
fn greedy_seed(service: &Service, adapter: Option<&Adapter>, tokens: &[TokenId]) -> u64 {
    let adapter = adapter.map_or("", |adapter| adapter.name.as_str());
    BlockHash::root(&service.model, adapter, "greedy")
        .child(tokens)
        .0
}

/// Bytes of a token of a whole answer at most, as JSON.
fn token_json_max(text: &TextModel, kind: CompletionApi, logprobs: Option<LogprobsWish>) -> u64 {
    /// Of a float in its shortest form, and of an offset.
    const NUMBER: u64 = 24;
    let shown = text.answer_json_max() as u64;
    let Some(LogprobsWish { top }) = logprobs else {
        return shown;
    };
    let top = u64::from(top);
    shown
        + match kind {
            // `"token":…,"logprob":…,"bytes":[…]` with up to four characters per byte.
            CompletionApi::Chat => (1 + top) * (5 * shown + NUMBER + 40) + 24,
            // `text_offset`, `token_logprobs`, `tokens` and `top_logprobs`.
            CompletionApi::Completion => 2 * NUMBER + shown + 16 + top * (shown + NUMBER + 8),
        }
}

/// Bytes of the log probabilities of a prompt's tokens at most, as JSON.
fn prompt_json_max(text: &TextModel, params: &RequestParams, ids: &[TokenId]) -> u64 {
    // A byte takes six as `\u00XX`. A token is listed among its alternatives too.
    let own: u64 = ids
        .iter()
        .map(|&id| 6 * text.token_bytes(id).len() as u64)
        .sum();
    let alternative = text.answer_json_max() as u64;
    let each = |top: u32, fixed: u64| {
        2 * own + ids.len() as u64 * (fixed + u64::from(top) * (alternative + fixed))
    };
    // `"ID":{"logprob":…,"rank":…,"decoded_token":…}`.
    let listed = params.prompt_logprobs.map_or(0, |wish| each(wish.top, 80));
    let echoed = params.logprobs.filter(|_| params.scores_echo);
    listed + echoed.map_or(0, |wish| each(wish.top, 64))
}

/// Checks that the answer stays within its limits, whatever the engines generate. Without a `max_tokens` the
/// limit of a whole answer shortens it.
fn bound_answer(
    service: &Service,
    kind: CompletionApi,
    params: &RequestParams,
    prompts: &mut [Tokenized],
) -> Result<(), ApiError> {
    let n = u64::from(params.n);
    let echo = |prompt: &Tokenized| prompt.echo.as_ref().map_or(0, |echo| echo.len() as u64);
    // A chat has the ids of its prompt once.
    let ids = |prompt: &Tokenized| {
        prompt
            .ids
            .as_ref()
            .map_or(0, |ids| ID_BYTES * ids.len() as u64)
    };
    let id_lists = match kind {
        CompletionApi::Completion => n,
        CompletionApi::Chat => 1,
    };
    let scores = |prompt: &Tokenized| {
        let ids = prompt.ids.as_deref().unwrap_or_default();
        prompt_json_max(&service.text, params, ids)
    };
    let lists = prompts.iter().map(|prompt| ids(prompt) + scores(prompt));
    let echoes = n * prompts.iter().map(echo).sum::<u64>() + id_lists * lists.sum::<u64>();
    let limits = &service.limits;
    if params.stream {
        let scored = n * prompts.iter().map(scores).sum::<u64>();
        if scored > STREAM_SCORES_BYTES_MAX {
            return Err(ApiError::invalid(
                "echo",
                format!(
                    "the log probabilities of the echoed prompts take up to {scored} bytes, and a stream sends at \
                     most {STREAM_SCORES_BYTES_MAX} in one event; send `stream: false`, or lower `n` or `logprobs`"
                ),
            ));
        }
        let most = limits.stream_buffer_bytes_max;
        if echoes > most {
            return Err(ApiError::invalid(
                if params.echo {
                    "echo"
                } else {
                    "return_token_ids"
                },
                format!(
                    "the prompts that the choices repeat take up to {echoes} bytes, and at most {most} may \
                     wait for a client (`live.stream_buffer_bytes_max`); lower `n`, or do without `echo` and `return_token_ids`"
                ),
            ));
        }
        return Ok(());
    }
    let ids = if params.return_token_ids { ID_BYTES } else { 0 };
    let per_token = token_json_max(&service.text, kind, params.logprobs) + ids;
    let tokens: u64 = prompts.iter().map(|p| u64::from(p.max_tokens)).sum();
    let bytes = n
        .saturating_mul(tokens)
        .saturating_mul(per_token)
        .saturating_add(echoes);
    let most = limits.answer_bytes_max;
    if bytes <= most {
        return Ok(());
    }
    let choices = n * prompts.len() as u64;
    let fitting = most.saturating_sub(echoes) / (per_token * choices).max(1);
    if params.max_tokens.is_some() || fitting == 0 {
        return Err(ApiError::answer_too_large(bytes, most));
    }
    let fitting = u32::try_from(fitting).unwrap_or(u32::MAX);
    for prompt in prompts {
        prompt.max_tokens = prompt.max_tokens.min(fitting);
    }
    Ok(())
}

/// 404 unless `model` is the served one, or one of its adapters, or absent.
pub(crate) fn check_model(
    service: &Service,
    model: Option<&str>,
) -> Result<Option<Arc<Adapter>>, ApiError> {
    let Some(model) = model.filter(|model| *model != service.model) else {
        return Ok(None);
    };
    if let Some(adapter) = service.management.adapter(model) {
        return Ok(Some(adapter));
    }
    let aliases = &service.management.aliases;
    if aliases.iter().any(|alias| alias == model) {
        return Ok(None);
    }
    let adapters = service.management.adapters();
    let adapters = adapters.iter().map(|adapter| adapter.name.as_str());
    let served: Vec<&str> = std::iter::once(service.model.as_str())
        .chain(aliases.iter().map(String::as_str))
        .chain(adapters)
        .collect();
    Err(ApiError::model_not_found(model, &served))
}

/// 400 unless all of `tokens` are in the vocabulary.
pub(crate) fn check_tokens(
    service: &Service,
    field: &str,
    tokens: &[TokenId],
) -> Result<(), ApiError> {
    let vocab_size = service.text.vocab_size();
    match tokens.iter().find(|&&token| token >= vocab_size) {
        None => Ok(()),
        Some(token) => Err(ApiError::invalid(
            field,
            format!("token {token} is not in the vocabulary, which has {vocab_size} tokens"),
        )),
    }
}

pub(crate) fn tokenize(
    service: &Service,
    request: &ApiRequest<'_>,
    adapter: Option<&Adapter>,
) -> Result<Vec<Tokenized>, ApiError> {
    let params = &request.params;
    let text = &service.text;
    // Its log probabilities need all of a prompt computed: as in vLLM, none of it is taken from the cache.
    let root = if scores_prompt(params) {
        service.management.unshared_root(&service.model)
    } else {
        let salt = params.cache_salt.as_deref();
        service
            .management
            .root(&service.model, service.root, adapter, salt)
    };
    check_tokens(service, "stop_token_ids", &params.stop_token_ids)?;
    if let Some(limits) = &params.vocab {
        check_tokens(service, "logit_bias", &limits.banned)?;
        check_tokens(service, "logit_bias", &limits.forced)?;
        check_tokens(service, "allowed_token_ids", &limits.allowed)?;
        if AnswerVocab::new(limits, text).is_empty() {
            return Err(ApiError::invalid(
                "logit_bias",
                "no token is left that an answer could have; exclude fewer in `logit_bias`",
            ));
        }
    }
    match &request.input {
        Input::Chat { messages, .. } => {
            let tokens = chat_tokens(service, request, service.context_max() as usize)?;
            let last = messages.last().filter(|last| last.role == "assistant");
            let echo = last.filter(|_| params.echo);
            let echo = echo.map(|message| message.content.as_ref().into());
            Ok(vec![fit(
                service,
                request.kind,
                params,
                &tokens,
                echo,
                (adapter, root),
            )?])
        }
        Input::Prompts(prompts) => prompts
            .iter()
            .map(|prompt| match prompt {
                PromptInput::Text(prompt) => {
                    let least = text.tokens_min(prompt.len());
                    if least > service.context_max() as usize {
                        return Err(too_long(service, request.kind, params, least));
                    }
                    let mut tokens = Vec::with_capacity(prompt.len() / 3);
                    text.encode(prompt, params.add_special_tokens, &mut tokens);
                    let echo = params.echo.then(|| prompt.as_ref().into());
                    fit(
                        service,
                        request.kind,
                        params,
                        &tokens,
                        echo,
                        (adapter, root),
                    )
                }
                PromptInput::Tokens(tokens) => {
                    check_tokens(service, "prompt", tokens)?;
                    let echo = params.echo.then(|| text.decode(tokens).into());
                    fit(service, request.kind, params, tokens, echo, (adapter, root))
                }
            })
            .collect(),
    }
}

/// Tokens of a chat, which has `most` at most.
fn chat_tokens(
    service: &Service,
    request: &ApiRequest<'_>,
    most: usize,
) -> Result<Vec<TokenId>, ApiError> {
    let Input::Chat {
        messages,
        add_generation_prompt,
        continue_final_message,
        template_kwargs,
    } = &request.input
    else {
        return Ok(Vec::new());
    };
    let params = &request.params;
    let tools: Vec<Tree> = params.form.as_ref().map_or_else(Vec::new, |form| {
        form.tools.iter().map(|tool| tool.whole.clone()).collect()
    });
    let options = ChatOptions {
        add_generation_prompt: *add_generation_prompt,
        continue_final_message: *continue_final_message,
        tools: &tools,
        template_kwargs,
        now_unix_s: now_unix_s(),
    };
    let mut tokens = Vec::with_capacity(CHAT_TOKENS_EXPECTED);
    let with_images = show_images(service, messages, most)?;
    let messages = with_images.as_deref().unwrap_or(messages);
    service
        .text
        .encode_chat_within(messages, &options, most, &mut tokens)
        .map_err(|error| match error {
            TextError::TooLong { tokens } => too_long(service, request.kind, params, tokens),
            error @ TextError::TemplateUnsupported { .. } => {
                ApiError::failed(500, error.to_string())
            }
            error => ApiError::invalid("messages", error.to_string()),
        })?;
    Ok(tokens)
}

/// The messages with a text in place of each image, which has the image's number of tokens. `None`: there are no images.
pub(crate) fn show_images<'a>(
    service: &Service,
    messages: &[Message<'a>],
    most: usize,
) -> Result<Option<Vec<Message<'a>>>, ApiError> {
    let Some(first) = messages
        .iter()
        .position(|message| !message.images.is_empty())
    else {
        return Ok(None);
    };
    if service.image_tokens == 0 {
        return Err(ApiError::unsupported(
            format!("messages.{first}.content"),
            format!(
                "model `{}` takes no images; send text only, or set `model.image_tokens` in the cluster file",
                service.model
            ),
        ));
    }
    let count: usize = messages.iter().map(|message| message.images.len()).sum();
    let tokens = count.saturating_mul(service.image_tokens as usize);
    // Before as much memory is used. A count alone has no such limit.
    let limit = most.min(service.context_max().max(IMAGE_TOKENS_MAX) as usize);
    if tokens > limit {
        return Err(ApiError::invalid(
            format!("messages.{first}.content"),
            format!("{count} images have {tokens} tokens, more than {limit}; send fewer"),
        ));
    }
    let each = messages.iter().map(|message| {
        let mut message = message.clone();
        for image in message.images.iter().rev() {
            let mut shown = service.text.image_text(image.hash, service.image_tokens);
            let text = message.content.to_mut();
            if image.at > 0 {
                shown.insert(0, '\n');
            }
            if image.at < text.len() {
                shown.push('\n');
            }
            text.insert_str(image.at, &shown);
        }
        message
    });
    Ok(Some(each.collect()))
}

/// Name of an image's part in chats, in quotes. A part names it twice at most: as its type, and as a member.
pub(crate) const CHAT_IMAGE: &[u8] = b"\"image_url\"";

/// Bytes of the text that stands for the images in `body`, about: so that a helper thread encodes it if it is long.
/// `part`: what every image has in the body.
pub(crate) fn images_bytes(service: &Service, body: &[u8], part: &[u8]) -> usize {
    const TOKEN_BYTES: usize = 6;
    if service.image_tokens == 0 {
        return 0;
    }
    let count = body.windows(part.len()).filter(|window| *window == part);
    count.count() * service.image_tokens as usize * TOKEN_BYTES
}

/// Counts the tokens of a chat, also of one that does not fit into the model: clients ask in order to shorten it.
pub(crate) fn count_tokens(service: &Service, request: &ApiRequest<'_>) -> Result<u64, ApiError> {
    Ok(chat_tokens(service, request, usize::MAX)?.len() as u64)
}

/// A prompt that has at least so many `tokens` by its length.
fn too_long(
    service: &Service,
    kind: CompletionApi,
    params: &RequestParams,
    tokens: usize,
) -> ApiError {
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    ApiError::context_length(kind, tokens, params.max_tokens, service.context_max())
}

/// Checks that prompt and answer fit into the model, and hashes the prompt.
fn fit(
    service: &Service,
    kind: CompletionApi,
    params: &RequestParams,
    tokens: &[TokenId],
    echo: Option<Box<str>>,
    (adapter, root): (Option<&Adapter>, BlockHash),
) -> Result<Tokenized, ApiError> {
    let len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
    let limit = service.context_max();
    let room = limit.saturating_sub(len);
    if room == 0 || params.max_tokens.is_some_and(|asked| asked > room) {
        return Err(ApiError::context_length(
            kind,
            len,
            params.max_tokens,
            limit,
        ));
    }
    let prompt = Prompt::from_tokens(tokens, service.block_size, root)
        .and_then(|prompt| {
            if service.keep_tokens {
                prompt.with_block_tokens(tokens)
            } else {
                Ok(prompt)
            }
        })
        .map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
    Ok(Tokenized {
        prompt,
        max_tokens: params.max_tokens.unwrap_or(room),
        echo,
        ids: (params.return_token_ids || scores_prompt(params)).then(|| tokens.into()),
        scripts: Vec::new(),
        greedy_seed: params.greedy.then(|| greedy_seed(service, adapter, tokens)),
    })
}

/// Whether the answer has log probabilities of the prompt's tokens.
fn scores_prompt(params: &RequestParams) -> bool {
    params.prompt_logprobs.is_some() || params.scores_echo
}

/// Opens a stream per sequence and submits each; with `more`, as one whose input continues.
pub(crate) async fn dispatch(
    workers: &Rc<Workers>,
    head: &RequestHead,
    prepared: Prepared,
    more: bool,
) -> Result<ReplyHandle, ApiError> {
    let service = &workers.shard.service;
    let Prepared {
        kind,
        params,
        prompts,
        adapter,
        times,
    } = prepared;
    let params = &params;
    let count = prompts.len() * params.n as usize;
    let most = workers.shard.budget.request_streams_max();
    check_count(count, prompts.len(), params.n, most)?;
    let asked = |prompt: &Tokenized| {
        // Without a limit by the client only produced tokens count, once they are known.
        let answer = params.max_tokens.map_or(0, |_| prompt.max_tokens);
        u64::from(prompt.len()) + u64::from(params.n) * u64::from(answer)
    };
    head.client.charge_tokens(prompts.iter().map(asked).sum())?;
    let quota = StreamQuota::take(workers, &head.client, count)?;
    // Prompts are kept while another worker may continue their answers.
    let keeps = head.resumes && workers.dispatching.keeps_requests();
    let kept = prompts.iter().filter(|_| keeps).map(|p| p.prompt.bytes());
    let scripts = prompts.iter().flat_map(|prompt| &prompt.scripts);
    let ids = prompts.iter().filter_map(|prompt| prompt.ids.as_ref());
    let bytes = REPLY_BYTES
        + SEQUENCE_BYTES * count as u64
        + kept.sum::<u64>()
        + scripts.map(Script::bytes).sum::<u64>()
        + ids.map(|ids| size_of_val(&**ids) as u64).sum::<u64>();
    let charge = head.client.charge(&workers.shard.budget.memory, bytes)?;
    let mut shape = shape_of(workers, head, kind, params, &prompts);
    if let Some(adapter) = &adapter {
        shape.model = adapter.name.as_str().into();
    }
    workers.shard.metrics.tokens.prompt.add(shape.prompt_tokens);
    let trace = head.traced.then(|| Trace {
        block_size: service.block_size.max(1),
        scores: String::new(),
    });
    let number = adapter.as_ref().map_or(0, |a| adapter_id(&a.name, &a.path));
    let (specs, requests) = sequences(workers, params, prompts, head.session, number);
    let unread_max = to_usize(service.limits.stream_buffer_bytes_max);
    let timeout = service.limits.request_timeout;
    let deadline_ns = timeout.map(|t| {
        let timeout_ns = u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
        monotonic_ns().saturating_add(timeout_ns)
    });
    let mut state = ReplyState::new(shape, specs, times, trace, unread_max, Some(charge));
    state.adapter = adapter.map(AdapterUse::new);
    let reply = Rc::new(Reply::new(state, head.client.clone(), deadline_ns));
    let registrations = register(workers, &reply, count)?;
    let addresses: Vec<StreamAddr> = registrations.iter().map(Registration::addr).collect();
    quota.hand_on();
    let handle = ReplyHandle::new(workers.clone(), reply, registrations);
    submit(workers, head, handle.reply(), addresses, requests, more).await?;
    Ok(handle)
}

/// Refuses a request for more streams than the server ever opens.
fn check_count(count: usize, prompts: usize, choices: u32, most: u64) -> Result<(), ApiError> {
    if count as u64 <= most {
        return Ok(());
    }
    let (field, asked) = match prompts {
        1 => ("n", String::new()),
        prompts => (
            "prompt",
            format!(" ({prompts} prompts of {choices} choices)"),
        ),
    };
    Err(ApiError::invalid(
        field,
        format!(
            "asks for {count} streams{asked}, and the server opens at most {most} for a request \
             (`live.streams_max`, `live.client_streams_max`, `live.connection_streams_max`)"
        ),
    ))
}

fn shape_of(
    workers: &Workers,
    head: &RequestHead,
    kind: CompletionApi,
    params: &RequestParams,
    prompts: &[Tokenized],
) -> Shape {
    let id = params.request_id.as_deref().unwrap_or(&head.id);
    Shape {
        kind,
        id: answer_id(kind, id),
        created: now_unix_s(),
        model: workers.model.clone(),
        stream: params.stream,
        include_usage: params.include_usage,
        running_usage: params.running_usage,
        prompt_tokens: prompts.iter().map(|p| u64::from(p.prompt.len())).sum(),
        choices_per_prompt: params.n,
    }
}

/// For each choice of each prompt: how its tokens become text, and what its engine computes.
fn sequences(
    workers: &Workers,
    params: &RequestParams,
    prompts: Vec<Tokenized>,
    session: Option<u64>,
    adapter: u64,
) -> (Vec<SequenceSpec>, Vec<EngineRequest>) {
    let seed = params
        .seed
        .unwrap_or_else(|| workers.shard.next_request_number());
    let seeds = choice_seeds(&prompts, params.n, seed);
    let stops: Rc<[String]> = params.stop.as_slice().into();
    // Made once: the choices of a request share its tables.
    let matcher =
        (!stops.is_empty()).then(|| StopMatcher::new(&stops, params.include_stop_str_in_output));
    let stop_token_ids: Rc<[TokenId]> = params.stop_token_ids.as_slice().into();
    let vocab = params.vocab.as_deref().map(|limits| {
        let text = &workers.shard.service.text;
        Rc::new(AnswerVocab::new(limits, text))
    });
    let ignore_eos = params.ignore_eos || vocab.as_ref().is_some_and(|vocab| !vocab.may_end());
    let mut specs = Vec::with_capacity(seeds.len());
    let mut requests = Vec::with_capacity(seeds.len());
    for tokenized in prompts {
        let echo: Option<Rc<str>> = tokenized.echo.map(Into::into);
        let prompt_ids: Option<Rc<[TokenId]>> = tokenized.ids.map(Into::into);
        let mut scripts = tokenized.scripts.into_iter().map(Rc::new);
        for _ in 0..params.n {
            let script = scripts.next();
            let max_tokens = match &script {
                Some(script) if !params.ignore_eos => {
                    let len = script.len().max(params.min_tokens);
                    len.min(tokenized.max_tokens)
                }
                _ => tokenized.max_tokens,
            };
            let seed = seeds[specs.len()];
            requests.push(EngineRequest {
                id: RequestId::default(), // replaced by the stream's address
                prompt: tokenized.prompt.clone(),
                params: GenerationParams {
                    max_tokens,
                    min_tokens: params.min_tokens,
                    ignore_eos: ignore_eos || script.is_some(),
                    // The engine's tokens are not those that the client sees.
                    stop_token_ids: match script {
                        Some(_) => [].into(),
                        None if vocab.is_some() => [].into(),
                        None => params.stop_token_ids.as_slice().into(),
                    },
                    adapter,
                    ..GenerationParams::default()
                },
                priority: params.priority,
                seed,
            });
            let mut spec = SequenceSpec {
                target: RankId::default(), // until it is dispatched
                prompt_tokens: tokenized.prompt.len(),
                max_tokens,
                seed,
                top_logprobs: params.logprobs.map(|wish| wish.top),
                stop: matcher.clone(),
                stops: stops.clone(),
                min_tokens: params.min_tokens,
                plain: false,
                prompt_ids: prompt_ids.clone().filter(|_| params.return_token_ids),
                scored_prompt: prompt_ids.clone().filter(|_| scores_prompt(params)),
                prompt_tops: params.prompt_logprobs.map(|wish| wish.top),
                vocab: vocab.clone(),
                script,
                ignores_eos: params.ignore_eos,
                scores_echo: params.scores_echo,
                echo_only: params.echo_only,
                echo: echo.clone(),
                stop_token_ids: stop_token_ids.clone(),
                recorded: workers.shard.service.recorder.is_some().then(|| {
                    Box::new(RecordedRequest {
                        input_tokens: tokenized.prompt.len(),
                        blocks: tokenized.prompt.shared_blocks(),
                        session,
                        priority: params.priority,
                        ..RecordedRequest::default()
                    })
                }),
            };
            spec.plain = spec.echo.is_none() && spec.shows_each_token();
            specs.push(spec);
        }
    }
    (specs, requests)
}

/// Opens a stream for each sequence of `reply`.
fn register(
    workers: &Workers,
    reply: &Rc<Reply>,
    count: usize,
) -> Result<Vec<Registration<StreamSlot>>, ApiError> {
    let register_ns = monotonic_ns();
    let mut registrations = Vec::with_capacity(count);
    for sequence in 0..to_u32(count) {
        let feed = StreamSlot {
            reply: reply.clone(),
            sequence,
            role: StreamRole::Answer,
        };
        registrations.push(workers.table.register(feed).map_err(|full| {
            workers.shard.metrics.on_rejected(Rejection::StreamsMax);
            ApiError::overloaded(full.to_string(), 1)
        })?);
    }
    let took = monotonic_ns() - register_ns;
    workers.shard.metrics.latency.stream_register.observe(took);
    Ok(registrations)
}

/// Submits the sequences of `reply`. After an error the caller drops its handle, which cancels those that
/// were submitted.
async fn submit(
    workers: &Workers,
    head: &RequestHead,
    reply: &Rc<Reply>,
    addresses: Vec<StreamAddr>,
    requests: Vec<EngineRequest>,
    more: bool,
) -> Result<(), ApiError> {
    // The turns of a duplex request are not held back at the worker; a client that does not read is cut.
    let credit_bytes = if more {
        NO_LIMIT
    } else {
        workers.credit_bytes()
    };
    let mut scores = head.traced.then(Vec::new);
    let starts = addresses.into_iter().zip(requests);
    let mut slice_began = monotonic_ns();
    for (sequence, (addr, request)) in (0u32..).zip(starts) {
        // The work grows with the blocks of the prompt, for each choice again.
        if sequence > 0 && monotonic_ns() - slice_began > SLICE_NS {
            tokio::task::yield_now().await;
            slice_began = monotonic_ns();
            if reply.state.borrow().is_complete() {
                break; // it has failed
            }
        }
        // Always traced: the prologue's times feed the stage histograms, and cost 16 bytes.
        let start = StartRequest {
            addr,
            rank: RankId::default(),
            request,
            dispatched_ns: 0,
            credit_bytes,
            traced: true,
            more,
            role: Role::Both,
            attempt: 0,
        };
        let submission = Submission {
            start: Box::new(start),
            session: head.session,
            direct: head.worker,
            resumes: head.resumes,
        };
        // The scores are those of the first sequence.
        let scores = scores.as_mut().filter(|_| sequence == 0);
        if let Err(error) = workers.submit(reply, sequence, addr, submission, scores) {
            reply.state.borrow_mut().reject(&error);
            return Err(error);
        }
    }
    if let Some(scores) = scores {
        reply.state.borrow_mut().set_scores(scores_json(&scores));
    }
    Ok(())
}

/// Room for streams, given back unless a [`ReplyHandle`] takes it over.
struct StreamQuota<'a> {
    workers: &'a Workers,
    client: &'a Client,
    count: usize,
}

impl<'a> StreamQuota<'a> {
    fn take(
        workers: &'a Workers,
        client: &'a Client,
        count: usize,
    ) -> Result<StreamQuota<'a>, ApiError> {
        match workers.shard.open_streams(client, count) {
            Ok(()) => Ok(StreamQuota {
                workers,
                client,
                count,
            }),
            Err(error) => {
                workers.shard.metrics.on_rejected(Rejection::StreamsMax);
                Err(error)
            }
        }
    }

    /// Another owner gives it back.
    fn hand_on(self) {
        std::mem::forget(self);
    }
}

impl Drop for StreamQuota<'_> {
    fn drop(&mut self) {
        self.workers
            .shard
            .on_streams_closed(self.client, self.count);
    }
}

fn scores_json(scores: &[Score]) -> String {
    use std::fmt::Write;
    let mut json = String::from("[");
    for (at, score) in scores.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        let _ = write!(
            json,
            "{comma}{{\"worker\":{},\"dp_rank\":{},\"hit_blocks\":{},\"cost\":{:.3}}}",
            score.rank.worker.0, score.rank.dp_rank, score.hit_blocks, score.cost
        );
    }
    json.push(']');
    json
}

/// `chatcmpl-…` or `cmpl-…`.
fn answer_id(kind: CompletionApi, request_id: &str) -> String {
    let prefix = match kind {
        CompletionApi::Chat => "chatcmpl-",
        CompletionApi::Completion => "cmpl-",
    };
    let mut id = String::with_capacity(prefix.len() + request_id.len());
    id.push_str(prefix);
    id.push_str(request_id);
    id
}
