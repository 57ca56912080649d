//! From the body of a request to dispatched sequences.

use std::cell::RefCell;
use std::rc::Rc;

use hyper::Response;
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, Prompt, RankId, RequestId, Stage, StageTimes,
    TokenId, mix,
};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::{Part, Registration, StartRequest};
use slipstream_router::Score;

use crate::dispatching::Submission;
use crate::http::{self, HttpBody, RequestHead};
use crate::metrics::Rejection;
use crate::openai::{
    ApiError, ApiRequest, Input, Kind, PromptInput, RequestParams, parse_chat, parse_completion,
};
use crate::reply::{
    Feed, Leg, Reply, ReplyBody, ReplyHandle, ReplyState, SequenceSpec, Shape, Trace,
};
use crate::service::Service;
use crate::shard::Shard;
use crate::text::{ChatOptions, StopMatcher};

/// Room made for a chat's tokens before they are counted.
const CHAT_TOKENS_EXPECTED: usize = 1024;

/// A prompt, tokenized and hashed.
pub(crate) struct Tokenized {
    prompt: Prompt,
    max_tokens: u32,
    /// Its text, if it is to be repeated before the answer.
    echo: Option<String>,
}

impl Tokenized {
    /// Tokens of the prompt.
    pub(crate) fn len(&self) -> u32 {
        self.prompt.len()
    }
}

/// Serves `POST /v1/chat/completions` and `POST /v1/completions`.
pub(crate) async fn generate(
    shard: &Rc<Shard>,
    kind: Kind,
    head: RequestHead,
    body: &[u8],
    mut times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let request = match kind {
        Kind::Chat => parse_chat(body)?,
        Kind::Completion => parse_completion(body)?,
    };
    check_model(service, request.model.as_deref())?;
    times.note(Stage::Parsed, monotonic_ns());

    let prompts = tokenize(service, &request)?;
    times.note(Stage::Tokenized, monotonic_ns());

    let handle = dispatch(shard, &head, &request, prompts, times, false)?;
    if request.params.stream {
        return Ok(http::events(ReplyBody(handle)));
    }
    let (body, trace) = handle.whole().await?;
    Ok(http::whole(body, trace.as_deref()))
}

/// 404 unless `model` is what is served, or is not named at all.
pub(crate) fn check_model(service: &Service, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(model) if model != service.model => {
            Err(ApiError::model_not_found(model, &[&service.model]))
        }
        _ => Ok(()),
    }
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
) -> Result<Vec<Tokenized>, ApiError> {
    let params = &request.params;
    let text = &service.text;
    check_tokens(service, "stop_token_ids", &params.stop_token_ids)?;
    match &request.input {
        Input::Chat {
            messages,
            add_generation_prompt,
            template_kwargs,
        } => {
            let options = ChatOptions {
                add_generation_prompt: *add_generation_prompt,
                template_kwargs,
                now_unix_s: now_unix_s(),
            };
            let mut tokens = Vec::with_capacity(CHAT_TOKENS_EXPECTED);
            text.encode_chat(messages, &options, &mut tokens)
                .map_err(|error| ApiError::invalid("messages", error.to_string()))?;
            Ok(vec![fit(service, request.kind, params, &tokens, None)?])
        }
        Input::Prompts(prompts) => prompts
            .iter()
            .map(|prompt| match prompt {
                PromptInput::Text(prompt) => {
                    let mut tokens = Vec::with_capacity(prompt.len() / 3);
                    text.encode(prompt, params.add_special_tokens, &mut tokens);
                    let echo = params.echo.then(|| prompt.to_string());
                    fit(service, request.kind, params, &tokens, echo)
                }
                PromptInput::Tokens(tokens) => {
                    check_tokens(service, "prompt", tokens)?;
                    let echo = params.echo.then(|| text.decode(tokens));
                    fit(service, request.kind, params, tokens, echo)
                }
            })
            .collect(),
    }
}

/// Checks that prompt and answer fit into the model, and hashes the prompt.
fn fit(
    service: &Service,
    kind: Kind,
    params: &RequestParams,
    tokens: &[TokenId],
    echo: Option<String>,
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
    let root = match &params.cache_salt {
        None => service.root,
        Some(salt) => BlockHash::root(&service.model, "", salt),
    };
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
    })
}

/// Routes every sequence, opens its stream, and hands it to its worker; with `more`, as one whose
/// input goes on.
pub(crate) fn dispatch(
    shard: &Rc<Shard>,
    head: &RequestHead,
    request: &ApiRequest<'_>,
    prompts: Vec<Tokenized>,
    times: StageTimes,
    more: bool,
) -> Result<ReplyHandle, ApiError> {
    let service = &shard.service;
    let params = &request.params;
    let count = prompts.len() * params.n as usize;
    let most = service.limits.streams_max;
    if count > most as usize {
        let (field, asked) = match prompts.len() {
            1 => ("n", String::new()),
            prompts => (
                "prompt",
                format!(" ({prompts} prompts of {} choices)", params.n),
            ),
        };
        return Err(ApiError::invalid(
            field,
            format!(
                "asks for {count} streams{asked}, and the server opens at most {most} (`live.streams_max`)"
            ),
        ));
    }
    if !shard.open_streams(count) {
        shard.metrics.on_rejected(Rejection::StreamsMax);
        return Err(ApiError::overloaded(
            format!(
                "{} streams are open, which is the limit (`live.streams_max`); try again later",
                service.limits.streams_max
            ),
            1,
        ));
    }
    // From here on the streams are given back by `ReplyHandle`, or by `Claim` if none is made.
    let claim = Claim { shard, count };

    let seed = params.seed.unwrap_or_else(|| shard.next_request_number());
    let stops: Rc<[String]> = params.stop.as_slice().into();
    let stop_token_ids: Rc<[TokenId]> = params.stop_token_ids.as_slice().into();
    let mut specs = Vec::with_capacity(count);
    let mut requests = Vec::with_capacity(count);
    let trace = head.traced.then(|| Trace {
        block_size: service.block_size.max(1),
        scores: String::new(),
    });
    let shape = Shape {
        kind: request.kind,
        id: answer_id(
            request.kind,
            params.request_id.as_deref().unwrap_or(&head.id),
        ),
        created: now_unix_s(),
        model: shard.model.clone(),
        stream: params.stream,
        include_usage: params.include_usage,
        running_usage: params.running_usage,
        prompt_tokens: prompts.iter().map(|p| u64::from(p.prompt.len())).sum(),
        choices_per_prompt: params.n,
    };
    shard.metrics.prompt_tokens.add(shape.prompt_tokens);

    for tokenized in prompts {
        let mut echo = tokenized.echo;
        for choice in 0..params.n {
            // Choices differ, also those of different prompts: else the sequences of a batch would
            // all be of one length. The first is the one a request of its own would get.
            let seed = match specs.len() as u64 {
                0 => seed,
                index => mix::draw(seed, index),
            };
            requests.push(EngineRequest {
                id: RequestId::default(), // replaced by the stream's address
                prompt: tokenized.prompt.clone(),
                params: GenerationParams {
                    max_tokens: tokenized.max_tokens,
                    min_tokens: params.min_tokens,
                    ignore_eos: params.ignore_eos,
                    stop_token_ids: params.stop_token_ids.as_slice().into(),
                },
                priority: params.priority,
                seed,
            });
            specs.push(SequenceSpec {
                target: RankId::default(), // until it is dispatched
                prompt_tokens: tokenized.prompt.len(),
                max_tokens: tokenized.max_tokens,
                seed,
                top_logprobs: params.logprobs.map(|wish| wish.top),
                stop: (!stops.is_empty())
                    .then(|| StopMatcher::new(&stops, params.include_stop_str_in_output)),
                stops: stops.clone(),
                min_tokens: params.min_tokens,
                plain: stops.is_empty() && params.logprobs.is_none() && echo.is_none(),
                echo: if choice + 1 == params.n {
                    echo.take()
                } else {
                    echo.clone()
                },
                stop_token_ids: stop_token_ids.clone(),
            });
        }
    }
    let unread_max = service.limits.stream_buffer_bytes_max as usize;
    let state = ReplyState::new(shape, specs, times, trace, unread_max);
    let reply = Rc::new(Reply {
        state: RefCell::new(state),
    });
    let mut registrations: Vec<Registration<Feed>> = Vec::with_capacity(count);
    let register_ns = monotonic_ns();
    for sequence in 0..count as u32 {
        let _lock = shard.table_lock.hold();
        match shard.table.register(Feed {
            reply: reply.clone(),
            sequence,
            leg: Leg::Answer,
        }) {
            Ok(registration) => registrations.push(registration),
            Err(full) => {
                shard.metrics.on_rejected(Rejection::StreamsMax);
                return Err(ApiError::overloaded(full.to_string(), 1));
            }
        }
    }
    let registered_ns = monotonic_ns();
    let metrics = &shard.metrics;
    metrics.stream_register.observe(registered_ns - register_ns);
    let addresses: Vec<_> = registrations.iter().map(Registration::addr).collect();
    std::mem::forget(claim);
    let handle = ReplyHandle::new(shard.clone(), reply.clone(), registrations);

    // The turns of a talk are not held back at the worker; a client that does not read is cut.
    let credit_bytes = if more { NO_LIMIT } else { shard.credit_bytes() };
    let mut scores = head.traced.then(Vec::new);
    let starts = addresses.into_iter().zip(requests);
    for (sequence, (addr, request)) in (0u32..).zip(starts) {
        // Always traced: the prologue's times feed the stage histograms, and cost 16 bytes.
        let start = StartRequest {
            addr,
            rank: RankId::default(),
            request,
            dispatched_ns: 0,
            credit_bytes,
            traced: true,
            more,
            part: Part::Whole,
        };
        let submission = Submission {
            start: Box::new(start),
            session: head.session,
            direct: head.worker,
        };
        // The scores are those of the first sequence.
        let scores = scores.as_mut().filter(|_| sequence == 0);
        if let Err(error) = shard.submit(&reply, sequence, addr, submission, scores) {
            // Dropping the handle cancels the sequences that were submitted.
            reply.state.borrow_mut().reject(&error);
            return Err(error);
        }
    }
    if let Some(scores) = scores {
        reply.state.borrow_mut().set_scores(scores_json(&scores));
    }
    Ok(handle)
}

/// Gives claimed room back unless a [`ReplyHandle`] has taken that over.
struct Claim<'a> {
    shard: &'a Shard,
    count: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.shard.on_streams_closed(self.count);
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

/// Unix time, s. For `created` and for templates that write a date; nothing is measured with it.
pub(crate) fn now_unix_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// `chatcmpl-…` or `cmpl-…`.
fn answer_id(kind: Kind, request_id: &str) -> String {
    let prefix = match kind {
        Kind::Chat => "chatcmpl-",
        Kind::Completion => "cmpl-",
    };
    let mut id = String::with_capacity(prefix.len() + request_id.len());
    id.push_str(prefix);
    id.push_str(request_id);
    id
}
