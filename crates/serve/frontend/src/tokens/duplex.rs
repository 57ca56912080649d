//! Requests whose body continues while the answer comes: a client that sends while it receives.
//!
//! `POST /v1/completions` with `Content-Type: application/x-ndjson`. The first line is a completion
//! request with `"stream": true`; each further line, `{"prompt": …}`, is a turn that continues where
//! the answer before it ended. Turns may come at any time; they are answered in order, each with
//! `max_tokens` tokens at most, and each answer ends in an event with its `finish_reason`. The end
//! of the body ends the input.
//!
//! The shard opens the stream by a start that says so, and sends input only once the worker has
//! given room for it: this shows that the stream was accepted.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use slipstream_base::{StageTimes, TokenId};
use slipstream_planes::{Input, StreamAddr, ToWorker};

use crate::door::body::HttpBody;
use crate::door::budget::Charge;
use crate::door::http::{self, RequestHead};
use crate::door::service::Service;
use crate::openai::{self, ApiError, ApiRequest, CompletionApi, PromptInput, parse_turn};
use crate::tokens::generate::{self, check_tokens};
use crate::tokens::reply::Reply;
use crate::tokens::reply::body::ReplyBody;
use crate::tokens::workers::Workers;

/// Tokens of input in one message; longer turns take several.
const PIECE_TOKENS: usize = 4096;

/// Serves a request with more input to come.
pub(crate) async fn serve(
    workers: &Rc<Workers>,
    head: RequestHead,
    body: Incoming,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let service = &workers.shard.service;
    let limits = &service.limits;
    let mut lines = Lines {
        body,
        read: BytesMut::new(),
        ended: false,
        bytes_max: limits.body_bytes_max,
        charge: head.client.charge(&workers.shard.budget.memory, 0)?,
    };
    let first = tokio::time::timeout(limits.read_timeout, lines.next()).await;
    let first = first
        .map_err(|_| ApiError::request_timeout("first line", limits.read_timeout.as_secs_f64()))??
        .ok_or_else(|| ApiError::bad_body("the body is empty; its first line is the request"))?;
    let charge = head.client.charge(&workers.shard.budget.memory, 0)?;
    let prepare = move |service: &Service, line: &[u8]| {
        generate::prepare(
            service,
            CompletionApi::Completion,
            line,
            times,
            check_duplex,
        )
    };
    let (prepared, charge) = workers.shard.run(first.freeze(), charge, prepare).await?;
    let used = prepared.prompts.first().map_or(0, generate::Tokenized::len);
    let turn_tokens = prepared.params.max_tokens;
    let turn_tokens = turn_tokens.expect("completions have a default");
    let handle = generate::dispatch(workers, &head, prepared, true).await?;
    let feeder = Feeder {
        workers: workers.clone(),
        reply: handle.reply().clone(),
        addr: handle.addr(),
        turn_tokens,
        context_left: service.context_max().saturating_sub(used),
        charge: Some(charge),
        idle_timeout: limits.idle_timeout,
    };
    workers.shard.meter.spawn(feeder.run(lines));
    Ok(http::events(ReplyBody::new(handle)))
}

/// Requirements of a request with more input to come.
fn check_duplex(request: &ApiRequest<'_>) -> Result<(), ApiError> {
    let params = &request.params;
    let one = "a request with more input to come (application/x-ndjson)";
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
        ("response_format", params.form.is_some()),
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
    workers: Rc<Workers>,
    reply: Rc<Reply>,
    addr: StreamAddr,
    /// Tokens that each turn may be answered with.
    turn_tokens: u32,
    /// Tokens that turns and their answers may yet take. The first prompt is not counted, its
    /// answer is.
    context_left: u32,
    /// Memory of a turn while it is tokenized.
    charge: Option<Charge>,
    /// How long the client may be silent when all its turns are answered.
    idle_timeout: Duration,
}

impl Feeder {
    async fn run(mut self, mut lines: Lines) {
        self.context_left = self.context_left.saturating_sub(self.turn_tokens);
        // When the client last had nothing to wait for. Blank lines do not count as input.
        let mut idle_since: Option<Instant> = None;
        loop {
            let looked = Instant::now();
            let line = self.unless_over(lines.next());
            let line = tokio::time::timeout(self.idle_timeout / 4, line).await;
            let is_blank = |line: &BytesMut| line.iter().all(u8::is_ascii_whitespace);
            let line = match line {
                Ok(Some(Ok(Some(line)))) if is_blank(&line) => None,
                Ok(line) => Some(line),
                Err(_) => None,
            };
            let Some(line) = line else {
                if !self.reply.state.borrow().awaits_turn() {
                    idle_since = None;
                } else if idle_since.get_or_insert(looked).elapsed() >= self.idle_timeout {
                    self.workers.shard.metrics.streams_cut_idle.add(1);
                    self.fail(&ApiError::idle(self.idle_timeout.as_secs_f64()));
                    return;
                }
                continue;
            };
            let sent = match line {
                None => return, // the answer is over, or its client has gone
                Some(Ok(Some(line))) => self.turn(line.freeze()).await,
                Some(Ok(None)) => {
                    // The first input credit shows that the worker has the stream; it drops earlier input.
                    if self.room().await.is_some() {
                        self.send(Vec::new(), false, true);
                    }
                    return;
                }
                Some(Err(error)) => Err(error),
            };
            idle_since = None;
            if let Err(error) = sent {
                self.fail(&error);
                return;
            }
        }
    }

    async fn turn(&mut self, line: Bytes) -> Result<(), ApiError> {
        let charge = self.charge.take();
        let charge = charge.ok_or_else(|| ApiError::internal("after a failed turn"))?;
        let most = self.context_left as usize;
        let encode = move |service: &Service, line: &[u8]| turn_tokens(service, line, most);
        let (tokens, charge) = self.workers.shard.run(line, charge, encode).await?;
        self.charge = Some(charge);
        let takes = u32::try_from(tokens.len())
            .unwrap_or(u32::MAX)
            .saturating_add(self.turn_tokens);
        self.context_left = self.context_left.checked_sub(takes).ok_or_else(|| {
            ApiError::invalid(
                "prompt",
                format!(
                    "this turn of {} tokens and its answer of up to {} do not fit into the \
                     rest of the model's length, {} tokens; begin a new request",
                    tokens.len(),
                    self.turn_tokens,
                    self.context_left
                ),
            )
        })?;
        self.workers
            .shard
            .metrics
            .tokens
            .prompt
            .add(tokens.len() as u64);
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
        self.workers.dispatching.on_input_sent(id);
        self.workers.send_control(ToWorker::Input(Box::new(Input {
            rank,
            addr: self.addr,
            tokens: tokens.into(),
            ends_turn,
            last,
        })));
    }

    /// The client sent invalid input: the answer ends with the error.
    fn fail(&self, error: &ApiError) {
        let mut state = self.reply.state.borrow_mut();
        if !state.has_ended(0) {
            state.on_refused(0, error);
            drop(state);
            self.workers.cancel(self.addr.stream.slot);
        }
    }

    /// Result of `future`, unless the answer is over before.
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

/// The tokens of a turn, of which there may be at most `tokens_max`.
fn turn_tokens(
    service: &Service,
    line: &[u8],
    tokens_max: usize,
) -> Result<Vec<TokenId>, ApiError> {
    match parse_turn(line)? {
        PromptInput::Text(text) => {
            let least = service.text.tokens_min(text.len());
            if least > tokens_max {
                return Err(ApiError::invalid(
                    "prompt",
                    format!(
                        "this turn of {least} tokens or more does not fit into the rest of the \
                         model's length, {tokens_max} tokens; begin a new request"
                    ),
                ));
            }
            let mut tokens = Vec::new();
            service.text.encode(&text, false, &mut tokens);
            Ok(tokens)
        }
        PromptInput::Tokens(tokens) => {
            check_tokens(service, "prompt", &tokens)?;
            Ok(tokens)
        }
    }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    read: BytesMut,
    ended: bool,
    /// Longest line, bytes.
    bytes_max: u64,
    /// Input that was read and is not taken.
    charge: Charge,
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
                        self.charge.grow_to((self.read.len() + data.len()) as u64)?;
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
