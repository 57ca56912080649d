//! Requests whose body goes on while the answer comes: a client that sends while it receives.
//!
//! `POST /v1/completions` with `Content-Type: application/x-ndjson`. The first line is a completion
//! request with `"stream": true`; each further line, `{"prompt": …}`, is a turn that goes on where
//! the answer before it ended. Turns may come at any time; they are answered in order, each with
//! `max_tokens` tokens at most, and each answer ends in an event with its `finish_reason`. The end
//! of the body ends the input.
//!
//! The shard opens the stream by a start that says so, and sends input only once the worker has
//! given room for it: that is how it hears that the stream was accepted.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use slipstream_base::{Stage, StageTimes, TokenId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::{Input, StreamAddr, ToWorker};

use crate::generate::{self, check_model, check_tokens};
use crate::http::{self, HttpBody, RequestHead};
use crate::openai::{self, ApiError, ApiRequest, PromptInput, parse_completion, parse_turn};
use crate::reply::{Reply, ReplyBody};
use crate::shard::Shard;

/// Tokens of input in one message; longer turns take several.
const PIECE_TOKENS: usize = 4096;

/// Serves a request whose body goes on.
pub(crate) async fn talk(
    shard: &Rc<Shard>,
    head: RequestHead,
    body: Incoming,
    mut times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let limits = &service.limits;
    let mut lines = Lines {
        body,
        read: BytesMut::new(),
        ended: false,
        bytes_max: limits.body_bytes_max,
    };
    let first = tokio::time::timeout(limits.read_timeout, lines.next()).await;
    let first = first
        .map_err(|_| ApiError::request_timeout("first line", limits.read_timeout.as_secs_f64()))??
        .ok_or_else(|| ApiError::bad_body("the body is empty; its first line is the request"))?;
    let request = parse_completion(&first)?;
    check_model(service, request.model.as_deref())?;
    check_talk(&request)?;
    times.note(Stage::Parsed, monotonic_ns());
    let prompts = generate::tokenize(service, &request)?;
    times.note(Stage::Tokenized, monotonic_ns());
    let used = prompts.first().map_or(0, generate::Tokenized::len);
    let handle = generate::dispatch(shard, &head, &request, prompts, times, true)?;
    let turn_tokens = request
        .params
        .max_tokens
        .expect("completions have a default");
    let feeder = Feeder {
        shard: shard.clone(),
        reply: handle.reply().clone(),
        addr: handle.addr(),
        turn_tokens,
        context_left: service.context_max().saturating_sub(used),
    };
    tokio::task::spawn_local(feeder.run(lines));
    Ok(http::events(ReplyBody(handle)))
}

/// What a request must be whose body goes on.
fn check_talk(request: &ApiRequest<'_>) -> Result<(), ApiError> {
    let params = &request.params;
    let one = "a request whose body goes on (application/x-ndjson)";
    if !params.stream {
        return Err(ApiError::invalid(
            "stream",
            format!("{one} is answered in events; send `\"stream\": true`"),
        ));
    }
    let single = matches!(&request.input, openai::Input::Prompts(prompts) if prompts.len() == 1);
    for (field, asked) in [
        ("prompt", !single),
        ("n", params.n != 1),
        ("stop", !params.stop.is_empty()),
        ("logprobs", params.logprobs.is_some()),
        ("echo", params.echo),
    ] {
        if asked {
            return Err(ApiError::invalid(
                field,
                format!(
                    "{one} has one prompt and one choice, without `stop`, `logprobs` and `echo`"
                ),
            ));
        }
    }
    Ok(())
}

/// Reads turns and sends them to the stream's worker.
struct Feeder {
    shard: Rc<Shard>,
    reply: Rc<Reply>,
    addr: StreamAddr,
    /// Tokens that each turn may be answered with.
    turn_tokens: u32,
    /// Tokens that turns and their answers may yet take. The first prompt is not counted, its
    /// answer is.
    context_left: u32,
}

impl Feeder {
    async fn run(mut self, mut lines: Lines) {
        self.context_left = self.context_left.saturating_sub(self.turn_tokens);
        loop {
            let line = self.unless_over(lines.next()).await;
            let sent = match line {
                None => return, // the answer is over, or its client has gone
                Some(Ok(Some(line))) if line.iter().all(u8::is_ascii_whitespace) => continue,
                Some(Ok(Some(line))) => self.turn(&line).await,
                Some(Ok(None)) => {
                    // The first input credit shows that the worker has the stream; it drops earlier input.
                    if self.room().await.is_some() {
                        self.send(Vec::new(), false, true);
                    }
                    return;
                }
                Some(Err(error)) => Err(error),
            };
            if let Err(error) = sent {
                self.fail(&error);
                return;
            }
        }
    }

    async fn turn(&mut self, line: &[u8]) -> Result<(), ApiError> {
        let service = self.shard.service.clone();
        let mut tokens: Vec<TokenId> = Vec::new();
        match parse_turn(line)? {
            PromptInput::Text(text) => service.text.encode(&text, false, &mut tokens),
            PromptInput::Tokens(ids) => {
                check_tokens(&service, "prompt", &ids)?;
                tokens = ids;
            }
        }
        let takes = u32::try_from(tokens.len())
            .unwrap_or(u32::MAX)
            .saturating_add(self.turn_tokens);
        self.context_left = self.context_left.checked_sub(takes).ok_or_else(|| {
            ApiError::invalid(
                "prompt",
                format!(
                    "this turn of {} tokens and its answer of up to {} do not fit into what is \
                     left of the model's length, {} tokens; begin a new request",
                    tokens.len(),
                    self.turn_tokens,
                    self.context_left
                ),
            )
        })?;
        self.shard.metrics.prompt_tokens.add(tokens.len() as u64);
        self.reply
            .state
            .borrow_mut()
            .on_turn_asked(self.turn_tokens, tokens.len() as u64);
        let mut rest = tokens.as_slice();
        loop {
            let Some(room) = self.room().await else {
                return Ok(()); // over
            };
            let (piece, later) = rest.split_at(rest.len().min(room).min(PIECE_TOKENS));
            rest = later;
            self.send(piece.to_vec(), rest.is_empty(), false);
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Waits until the worker has room for input. Returns how many tokens; `None` once the answer
    /// is over.
    async fn room(&self) -> Option<usize> {
        poll_fn(|cx| self.reply.state.borrow_mut().poll_room(cx)).await
    }

    fn send(&self, tokens: Vec<TokenId>, ends_turn: bool, last: bool) {
        let mut state = self.reply.state.borrow_mut();
        state.on_input_sent(tokens.len());
        let rank = state.target(0);
        drop(state);
        let id = self.addr.stream.slot;
        self.shard.dispatching.on_input_sent(id);
        self.shard.send_control(ToWorker::Input(Box::new(Input {
            rank,
            addr: self.addr,
            tokens: tokens.into(),
            ends_turn,
            last,
        })));
    }

    /// The client sent what cannot be taken: it is told in the answer, which ends.
    fn fail(&self, error: &ApiError) {
        let mut state = self.reply.state.borrow_mut();
        if !state.has_ended(0) {
            state.on_refused(0, error);
            drop(state);
            self.shard.cancel(self.addr.stream.slot);
        }
    }

    /// What `future` gives, unless the answer is over before.
    async fn unless_over<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        poll_fn(|cx| {
            if self.reply.state.borrow_mut().poll_over(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    read: BytesMut,
    ended: bool,
    /// Longest line, bytes.
    bytes_max: u64,
}

impl Lines {
    /// The next line, without its end; `None` behind the last.
    async fn next(&mut self) -> Result<Option<BytesMut>, ApiError> {
        let mut looked = 0;
        loop {
            if let Some(at) = self.read[looked..].iter().position(|&byte| byte == b'\n') {
                let mut line = self.read.split_to(looked + at + 1);
                line.truncate(looked + at);
                return Ok(Some(line));
            }
            looked = self.read.len();
            if self.ended {
                let rest = self.read.split();
                return Ok((!rest.is_empty()).then_some(rest));
            }
            if looked as u64 > self.bytes_max {
                return Err(ApiError::body_too_large(self.bytes_max));
            }
            match Pin::new(&mut self.body).frame().await {
                None => self.ended = true,
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.read.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => {
                    return Err(ApiError::bad_body(format!(
                        "the body broke off: {error}; send it whole"
                    )));
                }
            }
        }
    }
}
