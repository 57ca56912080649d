//! Answers of modelled workers as responses of HTTP.

use hyper::Response;
use hyper::header::HeaderValue;

use crate::door::body::HttpBody;
use crate::door::budget::Charge;
use crate::door::http::{X_TRACE, json, large_json};
use crate::openai::ApiError;
use crate::tokens::reply::whole::Whole;

/// An answer with vectors, and the trace of their prompts.
pub(crate) fn embeddings(
    body: Vec<u8>,
    charge: Charge,
    trace: Option<&str>,
) -> Result<Response<HttpBody>, ApiError> {
    let mut response = large_json((body, charge))?;
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(trace).ok()) {
        response.headers_mut().insert(X_TRACE, trace);
    }
    Ok(response)
}

/// A whole answer, with its trace.
pub(crate) fn whole(answer: Whole, trace: Option<&str>) -> Response<HttpBody> {
    let mut response = match answer {
        Whole::Bytes(bytes) => json(200, bytes),
        Whole::Slices(body) => json(200, Vec::new()).map(|_| HttpBody::slices(body)),
    };
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(trace).ok()) {
        response.headers_mut().insert(X_TRACE, trace);
    }
    response
}
