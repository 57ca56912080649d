//! `POST /v1/responses`: OpenAI's Responses API over the same engines, and the responses that are stored.
//!
//! A request becomes a chat, and the chat's events become the response's. That costs a parse per event, for
//! clients of this endpoint alone.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::Frame;
use hyper::{Method, Response};
use slipstream_base::StageTimes;

use crate::door::body::{AnswerBody, HttpBody};
use crate::door::budget::Charge;
use crate::door::clock::now_unix_s;
use crate::door::connection::Client;
use crate::door::http::{self, RequestHead};
use crate::door::service::Service;
use crate::openai::{
    ApiError, CompletionApi, ResponseStream, parse_responses, previous_response_id,
    response_field_names, response_not_found,
};
use crate::tokens::generate::{self, Prepared};
use crate::tokens::reply::body::ReplyBody;
use crate::tokens::response_store::StoredResponse;
use crate::tokens::workers::Workers;

/// Whose responses a client may continue: those of its key. Without keys all clients are one.
fn owner(workers: &Workers, client: &Client) -> usize {
    if workers.shard.service.api_keys.is_empty() {
        0
    } else {
        Arc::as_ptr(client.counts()) as usize
    }
}

/// A response that is stored at its end.
struct Keep {
    workers: Rc<Workers>,
    client: Client,
    request: Vec<u8>,
}

impl Keep {
    /// Stores it, unless there is no room for it. Responses that are not stored are counted.
    fn store(self, stream: &ResponseStream) {
        let metrics = &self.workers.shard.metrics;
        // Before it is rendered.
        let most = self.workers.responses.response_bytes_max();
        if stream.bytes() > most {
            return metrics.responses.evicted.add(1);
        }
        let Ok(body) = stream.whole() else {
            return;
        };
        let history = stream.history(&self.request);
        let bytes = body.len() + history.len();
        let charge = self
            .client
            .charge(&self.workers.shard.budget.memory, bytes as u64);
        let Ok(memory) = charge else {
            return metrics.responses.evicted.add(1);
        };
        if bytes > most {
            return metrics.responses.evicted.add(1);
        }
        let evicted = self.workers.responses.put(StoredResponse {
            id: stream.id().to_owned(),
            owner: owner(&self.workers, &self.client),
            body: body.into(),
            history: history.into(),
            memory,
        });
        metrics.responses.stored.add(1);
        metrics.responses.evicted.add(evicted);
    }
}

/// The events of a response.
pub(crate) struct ResponseBody {
    chat: ReplyBody,
    stream: ResponseStream,
    begun: bool,
    ended: bool,
    keep: Option<Keep>,
    /// Of the answer so far, which the last events repeat.
    charge: Charge,
    bytes_max: u64,
}

impl ResponseBody {
    fn charge_answer(&mut self) -> Result<(), ApiError> {
        charge_answer(&self.stream, &mut self.charge, self.bytes_max)
    }
}

impl AnswerBody for ResponseBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if !std::mem::replace(&mut self.begun, true) {
            let mut out = Vec::new();
            self.stream.begin(&mut out);
            return Poll::Ready(Some(Ok(Frame::data(out.into()))));
        }
        while !self.ended {
            match std::task::ready!(self.chat.poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let mut out = Vec::new();
                    if let Ok(data) = frame.into_data() {
                        self.stream.take(&data, Some(&mut out));
                    }
                    if let Err(error) = self.charge_answer() {
                        self.ended = true;
                        let message = error.message;
                        self.stream.fail(error.status, message, &mut Some(&mut out));
                    }
                    if self.stream.is_complete()
                        && let Some(keep) = self.keep.take()
                    {
                        keep.store(&self.stream);
                    }
                    // A frame may have only a comment, or the end.
                    if !out.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(out.into()))));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.ended = true,
            }
        }
        Poll::Ready(None)
    }
}

/// Charges an answer so far: its text and its JSON, which the last events repeat.
fn charge_answer(
    stream: &ResponseStream,
    charge: &mut Charge,
    bytes_max: u64,
) -> Result<(), ApiError> {
    let bytes = stream.bytes() as u64;
    if bytes > bytes_max {
        return Err(ApiError::answer_too_large(bytes, bytes_max));
    }
    charge.grow_to(6 * bytes)
}

/// Candidates of all log probabilities of an answer, at most. The last events repeat them, and are rendered in one go.
const CANDIDATES_MAX: u32 = 16 << 10;

/// Bounds the log probabilities of an answer: 400 if `max_output_tokens` asks for more, and a shorter answer without it.
fn check_logprobs(prepared: &mut Prepared) -> Result<(), ApiError> {
    let Some(wish) = prepared.params.logprobs else {
        return Ok(());
    };
    let most = CANDIDATES_MAX / (wish.top + 1);
    for prompt in &mut prepared.prompts {
        if prepared.params.max_tokens.is_some() && prompt.max_tokens > most {
            let text = format!(
                "{} tokens with {} log probabilities each are too many; ask for at most {most} tokens, or for fewer \
                 log probabilities",
                prompt.max_tokens, wish.top
            );
            return Err(ApiError::invalid("max_output_tokens", text));
        }
        prompt.max_tokens = prompt.max_tokens.min(most);
    }
    Ok(())
}

/// Serves `POST /v1/responses`.
pub(crate) async fn create(
    workers: &Rc<Workers>,
    head: RequestHead,
    body: Bytes,
    charge: Charge,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let find = |_: &Service, body: &[u8]| previous_response_id(body);
    let (previous, mut charge) = workers.shard.run(body.clone(), charge, find).await?;
    let previous = match previous {
        None => None,
        Some(id) => {
            let stored = workers.responses.get(owner(workers, &head.client), &id);
            let stored = stored.ok_or_else(|| response_not_found("previous_response_id", &id))?;
            // The body becomes longer by the conversation.
            let bytes = (body.len() + stored.1.len()) as u64;
            let most = workers.shard.service.limits.body_bytes_max;
            if bytes > most {
                return Err(ApiError::body_too_large(most));
            }
            charge.grow_to(bytes)?;
            Some(stored.1)
        }
    };
    let mut work =
        body.len() + generate::images_bytes(&workers.shard.service, &body, b"\"input_image\"");
    if let Some(previous) = &previous {
        // It is stored as a chat's messages.
        let images = generate::images_bytes(&workers.shard.service, previous, generate::CHAT_IMAGE);
        work += previous.len() + images;
    }
    let prepare = move |service: &Service, body: &[u8]| {
        let request = parse_responses(body, previous.as_deref())?;
        let mut prepared =
            generate::prepare(service, CompletionApi::Chat, &request.chat, times, |_| {
                Ok(())
            })
            .map_err(response_field_names)?;
        check_logprobs(&mut prepared)?;
        Ok((prepared, request))
    };
    let ((prepared, request), charge) =
        workers.shard.run_sized(body, work, charge, prepare).await?;
    let id = request.request_id.as_deref().unwrap_or(&head.id);
    let id = if id.starts_with("resp_") {
        id.to_owned()
    } else {
        format!("resp_{id}")
    };
    let created = now_unix_s();
    let model = prepared
        .adapter
        .as_ref()
        .map(|adapter| adapter.name.clone());
    let model = model.as_deref().unwrap_or(&workers.model);
    let mut stream = ResponseStream::new(id, created, model, request.repeated);
    let client = head.client.clone();
    let keep = request.store.then(|| Keep {
        workers: workers.clone(),
        client: client.clone(),
        request: request.history,
    });
    let handle = generate::dispatch(workers, &head, prepared, false)
        .await
        .map_err(response_field_names)?;
    let mut chat = ReplyBody::new(handle);
    let mut charge = charge;
    let bytes_max = workers.shard.service.limits.answer_bytes_max;
    if request.stream {
        charge.shrink_to(keep.as_ref().map_or(0, |keep| keep.request.len() as u64));
        return Ok(http::events(ResponseBody {
            chat,
            stream,
            begun: false,
            ended: false,
            keep,
            charge,
            bytes_max,
        }));
    }
    while let Some(frame) = poll_fn(|cx| chat.poll_frame(cx)).await {
        let frame = frame.map_err(|cut| ApiError::failed(503, cut.to_string()))?;
        if let Ok(data) = frame.into_data() {
            stream.take(&data, None);
        }
        charge_answer(&stream, &mut charge, bytes_max)?;
    }
    // As the chat's answer would have it.
    if let Some(error) = chat.error() {
        return Err(error);
    }
    match stream.whole() {
        Ok(whole) => {
            if let Some(keep) = keep.filter(|_| stream.is_complete()) {
                keep.store(&stream);
            }
            Ok(http::json(200, whole))
        }
        Err((status, message)) => Err(ApiError::failed(status, message)),
    }
}

/// Serves `GET` and `DELETE /v1/responses/{id}` and `POST /v1/responses/{id}/cancel`.
pub(crate) fn stored(
    workers: &Workers,
    client: &Client,
    method: &Method,
    path: &str,
    query: Option<&str>,
) -> Result<Response<HttpBody>, ApiError> {
    let owner = owner(workers, client);
    let find = |id: &str| {
        let found = workers.responses.get(owner, id);
        found.ok_or_else(|| response_not_found("response_id", id))
    };
    // Parts are divided before they are decoded: an id may have an escaped `/`.
    let (id, action) = match path.split_once('/') {
        Some((id, action)) => (id, Some(action)),
        None => (path, None),
    };
    let id = &*http::percent_decode(id);
    match (method, action) {
        (&Method::GET | &Method::HEAD, None) => {
            let (body, _) = find(id)?;
            let wants = |part: &str| part == "stream=true" || part.starts_with("starting_after=");
            if query.is_some_and(|query| query.split('&').any(wants)) {
                return Err(ApiError::unsupported(
                    "stream",
                    "`stream` is not supported: events are kept only while a response is sent",
                ));
            }
            Ok(http::json(200, body.to_vec()))
        }
        (&Method::DELETE, None) if workers.responses.remove(owner, id) => {
            let answer = serde_json::json!({"id": id, "object": "response", "deleted": true});
            Ok(http::json(200, answer.to_string().into_bytes()))
        }
        (&Method::DELETE, None) => Err(response_not_found("response_id", id)),
        // None is in progress when its id is stored.
        (&Method::POST, Some("cancel")) => {
            find(id)?;
            Err(ApiError::invalid(
                "response_id",
                "Cannot cancel a synchronous response; close its connection instead",
            ))
        }
        (_, None) => Err(ApiError::method_not_allowed(
            method.as_str(),
            "/v1/responses/{id}",
            "GET, HEAD, DELETE",
        )),
        _ => Err(ApiError::route_not_found(
            method.as_str(),
            &format!("/v1/responses/{path}"),
        )),
    }
}
