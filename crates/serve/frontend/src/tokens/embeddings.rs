//! `POST /v1/embeddings`: the engines compute the inputs as prompts, and the vectors are modelled.

use std::rc::Rc;

use bytes::Bytes;
use hyper::Response;
use slipstream_base::StageTimes;
use slipstream_base::width::to_usize;

use crate::door::body::HttpBody;
use crate::door::budget::Charge;
use crate::door::clock::now_unix_s;
use crate::door::helpers::NoResult;
use crate::door::http::RequestHead;
use crate::door::service::Service;
use crate::openai::{
    ApiError, CompletionApi, Encoding, Head, embedding_field_names, embeddings_json,
    parse_embeddings,
};
use crate::tokens::answers;
use crate::tokens::generate;
use crate::tokens::reply::whole::Whole;
use crate::tokens::workers::Workers;

/// Numbers of an answer that are rendered on the shard's thread: a millisecond.
const INLINE_NUMBERS: u64 = 4 << 10;
/// Bytes of a number at most: in Base64, and as `-0.000012345678,`.
const BASE64_BYTES: u64 = 6;
const FLOAT_BYTES: u64 = 24;

/// Serves `POST /v1/embeddings`.
pub(crate) async fn create(
    workers: &Rc<Workers>,
    head: RequestHead,
    body: Bytes,
    charge: Charge,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let prepare = move |service: &Service, body: &[u8]| {
        let request = parse_embeddings(body)?;
        let (prepared, seeds) = generate::prepare_inputs(service, &request.completion, times)
            .map_err(embedding_field_names)?;
        Ok((prepared, seeds, request))
    };
    let ((prepared, seeds, request), mut charge) = workers.shard.run(body, charge, prepare).await?;
    let numbers = seeds.len() as u64 * u64::from(request.dimensions);
    let bytes = numbers
        * match request.encoding {
            Encoding::Float => FLOAT_BYTES,
            Encoding::Base64 => BASE64_BYTES,
        };
    let most = workers.shard.service.limits.answer_bytes_max;
    if bytes > most {
        return Err(ApiError::answer_too_large(bytes, most));
    }
    charge.grow_to(bytes)?;
    let adapter = prepared
        .adapter
        .as_ref()
        .map(|adapter| adapter.name.clone());
    let model = adapter.unwrap_or_else(|| workers.model.to_string());
    let tokens = prepared.prompts.iter().map(|p| u64::from(p.len())).sum();
    let mut handle = generate::dispatch(workers, &head, prepared, false)
        .await
        .map_err(embedding_field_names)?;
    // Its text is of no use.
    let trace = handle.complete().await?;
    drop(Whole::of(handle)); // it has no text
    let id = format!("embd-{}", head.id);
    let created = now_unix_s();
    let render = move || {
        let head = Head {
            kind: CompletionApi::Completion,
            id: &id,
            created,
            model: &model,
            include_usage: false,
        };
        embeddings_json(&head, &seeds, &request, tokens)
    };
    let body = if numbers <= INLINE_NUMBERS {
        render()
    } else {
        let rendered = workers.shard.helpers.run(to_usize(bytes), render).await;
        rendered.map_err(|error| match error {
            NoResult::Busy => ApiError::overloaded(
                "too many long requests wait for a helper thread; try again later",
                1,
            ),
            NoResult::Failed => ApiError::internal(&head.id),
        })?
    };
    answers::embeddings(body, charge, trace.as_deref())
}
