//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same engines.
//!
//! A request becomes a chat, and the chat's events become the message's. That costs a parse per event, for
//! clients of this endpoint alone.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::Response;
use hyper::body::Frame;
use slipstream_base::StageTimes;

use crate::door::body::{AnswerBody, HttpBody};
use crate::door::budget::Charge;
use crate::door::http::{self, RequestHead};
use crate::door::service::Service;
use crate::openai::{
    ApiError, CompletionApi, MessageStream, input_tokens_json, parse_chat, parse_messages,
};
use crate::tokens::generate::{self, check_model};
use crate::tokens::reply::body::ReplyBody;
use crate::tokens::workers::Workers;

/// The events of a message.
pub(crate) struct MessageBody {
    chat: ReplyBody,
    stream: MessageStream,
}

impl AnswerBody for MessageBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            match std::task::ready!(self.chat.poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let mut out = Vec::new();
                    if let Ok(data) = frame.into_data() {
                        self.stream.take(&data, Some(&mut out));
                    }
                    // A frame may have only a comment, or the end.
                    if !out.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(out.into()))));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
    }
}

/// Bytes to tokenize of a message, about.
fn work(workers: &Workers, body: &[u8]) -> usize {
    body.len() + generate::images_bytes(&workers.shard.service, body, b"\"image\"")
}

/// Serves `POST /v1/messages`.
pub(crate) async fn create(
    workers: &Rc<Workers>,
    head: RequestHead,
    body: Bytes,
    charge: Charge,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let prepare = move |service: &Service, body: &[u8]| {
        let request = parse_messages(body, false)?;
        let prepared =
            generate::prepare(service, CompletionApi::Chat, &request.chat, times, |_| {
                Ok(())
            })?;
        Ok((prepared, request.stream))
    };
    let work = work(workers, &body);
    let ((prepared, stream), charge) = workers.shard.run_sized(body, work, charge, prepare).await?;
    let handle = generate::dispatch(workers, &head, prepared, false).await?;
    let mut chat = ReplyBody::new(handle);
    if stream {
        drop(charge); // with the body
        let stream = MessageStream::default();
        return Ok(http::events(MessageBody { chat, stream }));
    }
    let mut whole = MessageStream::default();
    let most = workers.shard.service.limits.answer_bytes_max;
    let mut charge = charge;
    while let Some(frame) = poll_fn(|cx| chat.poll_frame(cx)).await {
        let frame = frame.map_err(|cut| ApiError::failed(503, cut.to_string()))?;
        if let Ok(data) = frame.into_data() {
            whole.take(&data, None);
        }
        let bytes = whole.bytes() as u64;
        if bytes > most {
            return Err(ApiError::answer_too_large(bytes, most));
        }
        // The text, and its JSON.
        charge.grow_to(3 * bytes)?;
    }
    // As the chat's answer would have it.
    if let Some(error) = chat.error() {
        return Err(error);
    }
    match whole.whole() {
        Ok(message) => Ok(http::json(200, message)),
        Err((status, message)) => Err(ApiError::failed(status, message)),
    }
}

/// Serves `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(
    workers: &Rc<Workers>,
    body: Bytes,
    charge: Charge,
) -> Result<Response<HttpBody>, ApiError> {
    let count = |service: &Service, body: &[u8]| {
        let request = parse_messages(body, true)?;
        let chat = parse_chat(&request.chat)?;
        check_model(service, chat.model.as_deref())?;
        generate::count_tokens(service, &chat)
    };
    let work = work(workers, &body);
    let (tokens, _): (u64, Charge) = workers.shard.run_sized(body, work, charge, count).await?;
    Ok(http::json(200, input_tokens_json(tokens)))
}
