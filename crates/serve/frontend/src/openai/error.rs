//! Errors as a client sees them: OpenAI's shape, with a status and a remedy.

use std::fmt::Write as _;

use crate::json;

/// Models that an error names.
const MODELS_LISTED: usize = 16;

/// A refusal or a failure, ready to be sent to a client.
///
/// The body is OpenAI's: `{"error":{"message","type","param","code"}}`. Whether to retry follows
/// from the status: 4xx no (408 and 429 yes), 5xx yes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status of the answer; in mid-stream, the status it would have had.
    pub status: u16,
    /// `error.type`: OpenAI's classes, such as `invalid_request_error`.
    pub kind: &'static str,
    /// `error.code`: what to match on in a program; `null` if `None`.
    pub code: Option<&'static str>,
    /// `error.param`: the field at fault, as a path (`messages.2.content`).
    pub param: Option<String>,
    /// The problem, its position, and the remedy.
    pub message: String,
    /// Value of the `Retry-After` header, s.
    pub retry_after_s: Option<u32>,
}

impl ApiError {
    fn new(status: u16, kind: &'static str, code: Option<&'static str>, message: String) -> Self {
        ApiError {
            status,
            kind,
            code,
            param: None,
            message,
            retry_after_s: None,
        }
    }

    /// 400: field `param` has a value that cannot be.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError {
            param: Some(param.into()),
            ..ApiError::new(400, "invalid_request_error", None, message.into())
        }
    }

    /// 400: field `param` asks for something that is not modelled.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError {
            code: Some("unsupported_parameter"),
            ..ApiError::invalid(param, message)
        }
    }

    /// A failure in mid-stream, for a client that is sent no events.
    pub(crate) fn failed(status: u16, message: String) -> Self {
        ApiError::new(status, "server_error", None, message)
    }

    /// 400: the body is not what it should be, and no field is to blame.
    pub fn bad_body(message: impl Into<String>) -> Self {
        ApiError::new(400, "invalid_request_error", None, message.into())
    }

    /// 400: prompt plus answer do not fit into the model.
    ///
    /// `max_tokens` is what the client asked for; `None` if it left that open.
    pub fn context_length(
        kind: super::CompletionApi,
        prompt_tokens: u32,
        max_tokens: Option<u32>,
        max_model_len: u32,
    ) -> Self {
        let message = match max_tokens {
            Some(asked) => format!(
                "this model's maximum context length is {max_model_len} tokens, but {} were \
                 requested ({prompt_tokens} in the prompt, {asked} for the answer); shorten the \
                 prompt or lower `max_tokens`",
                u64::from(prompt_tokens) + u64::from(asked)
            ),
            None => format!(
                "this model's maximum context length is {max_model_len} tokens, but the prompt \
                 has {prompt_tokens}, which leaves no room for an answer; shorten the prompt"
            ),
        };
        let param = match kind {
            // The prompt alone would fit.
            _ if max_tokens.is_some() && prompt_tokens < max_model_len => "max_tokens",
            super::CompletionApi::Chat => "messages",
            super::CompletionApi::Completion => "prompt",
        };
        ApiError {
            code: Some("context_length_exceeded"),
            ..ApiError::invalid(param, message)
        }
    }

    /// 401: no API key, or one that is not known.
    pub fn unauthorized() -> Self {
        ApiError::new(
            401,
            "invalid_request_error",
            Some("invalid_api_key"),
            "no valid API key; send one of the server's keys as `Authorization: Bearer KEY`".into(),
        )
    }

    /// 404: `model` is not served here; `served` are the names that are, of which the first few are listed.
    pub fn model_not_found(model: &str, served: &[&str]) -> Self {
        let listed = served.iter().take(MODELS_LISTED);
        let listed: Vec<String> = listed.map(|name| format!("`{}`", clip(name))).collect();
        let mut message = format!(
            "the model `{}` does not exist; this server has {}",
            clip(model),
            listed.join(", ")
        );
        let more = served.len() - listed.len();
        if more > 0 {
            let _ = write!(message, " and {more} more (`GET /v1/models`)"); // into memory
        }
        ApiError {
            param: Some("model".into()),
            ..ApiError::new(
                404,
                "invalid_request_error",
                Some("model_not_found"),
                message,
            )
        }
    }

    /// 404: no such route.
    pub fn route_not_found(method: &str, path: &str) -> Self {
        ApiError::new(
            404,
            "invalid_request_error",
            Some("unknown_url"),
            format!(
                "no route for {} {}; `GET /openapi.json` lists the routes",
                clip(method),
                clip(path)
            ),
        )
    }

    /// 405: the route exists, for other methods.
    pub fn method_not_allowed(method: &str, path: &str, allowed: &str) -> Self {
        ApiError::new(
            405,
            "invalid_request_error",
            Some("method_not_allowed"),
            format!(
                "{} is not allowed on {}; use {allowed}",
                clip(method),
                clip(path)
            ),
        )
    }

    /// 408: the request did not arrive in time.
    pub fn request_timeout(what: &str, limit_s: f64) -> Self {
        ApiError::new(
            408,
            "timeout_error",
            Some("request_timeout"),
            format!("the {what} did not arrive within {limit_s} s; send it without pauses"),
        )
    }

    /// 413: the body is longer than the server takes.
    pub fn body_too_large(limit_bytes: u64) -> Self {
        ApiError::new(
            413,
            "invalid_request_error",
            Some("body_too_large"),
            format!(
                "the body is longer than {limit_bytes} bytes; shorten it, or raise \
                 `live.body_bytes_max`"
            ),
        )
    }

    /// 413: the request takes more memory than one client may ever hold: `needed` of `allowed` bytes, with
    /// `live.memory_max` at `max`.
    pub(crate) fn never_fits(needed: u64, allowed: u64, max: u64) -> Self {
        ApiError::new(
            413,
            "invalid_request_error",
            Some("request_too_large"),
            format!(
                "the request needs {needed} bytes of memory or more for its body, tokens and answer, and the server \
                 allows {allowed}: half of `live.memory_max`, which is {max}, less the connection; send a shorter \
                 request, or raise `live.memory_max`"
            ),
        )
    }

    /// Whether `live.memory_max` is why the request is refused.
    pub(crate) fn is_about_memory(&self) -> bool {
        matches!(self.code, Some("memory_max" | "request_too_large"))
    }

    /// The status of an error event with this code, in an answer that has begun.
    pub(super) fn status_of(code: Option<&str>) -> u16 {
        match code {
            Some("overloaded" | "memory_max") => 503,
            Some("request_too_large") => 413,
            _ => 500,
        }
    }

    /// 413: the body of a request to the admin API is longer than `limit_bytes`.
    pub fn admin_body_too_large(limit_bytes: u64) -> Self {
        ApiError::new(
            413,
            "invalid_request_error",
            Some("body_too_large"),
            format!(
                "the body is longer than {limit_bytes} bytes, the limit of the admin API; shorten it"
            ),
        )
    }

    /// 415: the body is announced as something that is not JSON.
    pub fn media_type(content_type: &str) -> Self {
        ApiError::new(
            415,
            "invalid_request_error",
            Some("unsupported_media_type"),
            format!(
                "the body is `{}`; send `Content-Type: application/json`",
                clip(content_type)
            ),
        )
    }

    /// 415: the body is compressed.
    pub fn content_coding(coding: &str) -> Self {
        ApiError::new(
            415,
            "invalid_request_error",
            Some("unsupported_content_encoding"),
            format!(
                "the body's `Content-Encoding` is `{}`; send it as it is, without that header",
                clip(coding)
            ),
        )
    }

    /// 431: the head of the request is longer than the server takes.
    pub fn head_too_large(limit_bytes: u32) -> Self {
        ApiError::new(
            431,
            "invalid_request_error",
            Some("headers_too_large"),
            format!("the head of the request is longer than {limit_bytes} bytes; send less"),
        )
    }

    /// 500: we broke; the log has more under this request id.
    pub fn internal(request_id: &str) -> Self {
        ApiError::new(
            500,
            "server_error",
            Some("internal_error"),
            format!("the server failed to answer request {request_id}; its log says why"),
        )
    }

    /// 502: the worker that had the request went away.
    pub fn worker_lost(worker: &str) -> Self {
        ApiError::new(
            502,
            "server_error",
            Some("worker_lost"),
            format!("worker {worker} went away before the answer was complete; try again"),
        )
    }

    /// 404: the path is not one that is sent to engines.
    pub(crate) fn not_forwarded(method: &str, path: &str) -> Self {
        let remedy = if path.starts_with("/admin/") {
            "the admin API is off: `upstream.admin_key_file` switches it on"
        } else {
            "`upstream.forward` adds paths"
        };
        let text = format!(
            "{} {} is not forwarded to engines; {remedy}",
            clip(method),
            clip(path)
        );
        ApiError::new(404, "invalid_request_error", Some("unknown_url"), text)
    }

    /// 404: the engine that stored a response left the fleet.
    pub(crate) fn response_gone(id: &str, param: Option<&str>, engine: &str) -> Self {
        let text = format!(
            "response `{}` is lost: engine {engine}, which stored it, left the fleet; send the whole conversation \
             without `previous_response_id`",
            clip(id)
        );
        ApiError {
            param: param.map(str::to_owned),
            ..ApiError::new(
                404,
                "invalid_request_error",
                Some("previous_response_not_found"),
                text,
            )
        }
    }

    /// 409: the engine that stores a response takes no requests now.
    pub(crate) fn response_unavailable(
        id: &str,
        param: Option<&str>,
        engine: &str,
        state: &str,
    ) -> Self {
        let text = format!(
            "engine {engine}, which stores response `{}`, takes no requests ({state}); send the whole conversation \
             without `previous_response_id`, or try again once it is up",
            clip(id)
        );
        ApiError {
            param: param.map(str::to_owned),
            ..ApiError::new(
                409,
                "invalid_request_error",
                Some("response_unavailable"),
                text,
            )
        }
    }

    /// 502: an engine failed the request, which may be sent again.
    pub(crate) fn engine_failed(engine: &str, why: &str) -> Self {
        let text = format!("engine {engine}: {why}; try again");
        ApiError::new(502, "server_error", Some("engine_failed"), text)
    }

    /// 502: an engine answered with a redirect, which would lead the client past the router.
    pub(crate) fn engine_redirects(engine: &str, status: u16) -> Self {
        let text = format!(
            "engine {engine} answered {status}, a redirect, which is not passed on; call the path that the engine serves, \
             without a `/` at its end"
        );
        ApiError::new(502, "server_error", Some("engine_redirects"), text)
    }

    /// The status by which a prefill engine refused a request.
    pub(crate) fn refused_by_engine(status: u16, engine: &str, answer: &str) -> Self {
        let text = format!("engine {engine} refused the prompt: {answer}");
        ApiError::new(
            status,
            "invalid_request_error",
            Some("prompt_refused"),
            text,
        )
    }

    /// 502: a stream's engine was lost, and no other one continues it.
    pub(crate) fn stream_lost(why: &str) -> Self {
        let text = format!("the stream broke off and cannot continue: {why}");
        ApiError::new(502, "server_error", Some("stream_lost"), text)
    }

    /// 504: an engine did not begin its answer in time.
    pub(crate) fn engine_timeout(engine: &str, limit_s: f64) -> Self {
        let text = format!(
            "engine {engine} sent no byte of an answer within {limit_s} s \
             (`upstream.first_byte_timeout_s`)"
        );
        ApiError::new(504, "timeout_error", Some("engine_timeout"), text)
    }

    /// 503: too much load; try again in `retry_after_s`.
    pub fn overloaded(what: impl Into<String>, retry_after_s: u32) -> Self {
        ApiError {
            retry_after_s: Some(retry_after_s),
            ..ApiError::new(503, "server_error", Some("overloaded"), what.into())
        }
    }

    /// 429: this client has as much under way as it may.
    pub fn too_many(message: String) -> Self {
        ApiError {
            retry_after_s: Some(1),
            ..ApiError::new(429, "rate_limit_error", Some("too_many_requests"), message)
        }
    }

    /// 429: the key `name` has used up its rate of `what`: `requests` or `tokens`. As OpenAI's.
    pub fn rate_limited(what: &'static str, name: &str, retry_after_s: u32) -> Self {
        let message = format!(
            "the rate limit of {what} of the API key named `{name}` is reached; try again in {retry_after_s} s"
        );
        ApiError {
            retry_after_s: Some(retry_after_s),
            ..ApiError::new(429, what, Some("rate_limit_exceeded"), message)
        }
    }

    /// 508: the request came from this server, by way of its engines.
    pub fn forwarding_loop() -> Self {
        let message = "this router got its own request: one of its engines is the router itself, or forwards to it; \
                       remove that address";
        ApiError::new(508, "server_error", Some("forwarding_loop"), message.into())
    }

    /// 503: bodies, answers and buffers of clients take all memory that they may.
    pub fn out_of_memory() -> Self {
        ApiError {
            code: Some("memory_max"),
            ..ApiError::overloaded(
                "bodies and answers of all clients take as much memory as they may \
                 (`live.memory_max`); try again later",
                1,
            )
        }
    }

    /// 408: a duplex request has no further turn, and its body does not end.
    pub fn idle(limit_s: f64) -> Self {
        ApiError::new(
            408,
            "timeout_error",
            Some("idle_timeout"),
            format!(
                "no turn came within {limit_s} s (`live.idle_timeout_s`) of the last answer; end the \
                 body after the last turn"
            ),
        )
    }

    /// 400: an answer that is not streamed could be larger than the server makes.
    pub fn answer_too_large(bytes: u64, limit_bytes: u64) -> Self {
        ApiError {
            code: Some("answer_too_large"),
            ..ApiError::invalid(
                "max_tokens",
                format!(
                    "the answer could have {bytes} bytes, and the limit is {limit_bytes} \
                     (`live.answer_bytes_max`); lower `max_tokens`, `n` or the number of log \
                     probabilities, or send `\"stream\": true`"
                ),
            )
        }
    }

    /// 503: the server stops before the answer is complete.
    pub fn stopping() -> Self {
        ApiError {
            retry_after_s: Some(1),
            ..ApiError::new(
                503,
                "server_error",
                Some("stopping"),
                "the server is stopping, and the answer was not complete in \
                 `live.drain_timeout_s`; try again"
                    .into(),
            )
        }
    }

    /// 504: the answer was not complete in the time a request may take.
    pub fn deadline(limit_s: f64) -> Self {
        ApiError::new(
            504,
            "timeout_error",
            Some("deadline_exceeded"),
            format!("the answer was not complete after {limit_s} s (`live.request_timeout_s`)"),
        )
    }

    /// The body of the answer, and the payload of an error event in a stream.
    pub fn body(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(128 + self.message.len());
        out.extend_from_slice(b"{\"error\":{\"message\":");
        json::string(&mut out, &self.message);
        out.extend_from_slice(b",\"type\":");
        json::string(&mut out, self.kind);
        out.extend_from_slice(b",\"param\":");
        json::string_or_null(&mut out, self.param.as_deref());
        out.extend_from_slice(b",\"code\":");
        json::string_or_null(&mut out, self.code);
        out.extend_from_slice(b"}}");
        out
    }
}

/// At most the first 128 bytes of something a client sent, so that an error quotes no megabyte.
pub(super) fn clip(text: &str) -> &str {
    const BYTES_MAX: usize = 128;
    if text.len() <= BYTES_MAX {
        return text;
    }
    let end = (0..=BYTES_MAX)
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or(0);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_is_openais_shape() {
        let body = ApiError::invalid("max_tokens", "must be \"1\" or more").body();
        assert_eq!(
            String::from_utf8(body).unwrap(),
            r#"{"error":{"message":"must be \"1\" or more","type":"invalid_request_error","param":"max_tokens","code":null}}"#
        );
    }

    #[test]
    fn quotes_of_the_client_are_clipped_at_a_character() {
        let long = "é".repeat(100);
        let error = ApiError::model_not_found(&long, &["m"]);
        assert!(error.message.contains(&"é".repeat(64)));
        assert!(!error.message.contains(&"é".repeat(65)));
    }

    #[test]
    fn an_unknown_model_is_answered_with_few_of_many_names() {
        let long = "n".repeat(1000);
        let names: Vec<String> = (0..5000).map(|n| format!("m{n}-{long}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let listed = |count: usize| ApiError::model_not_found("x", &names[..count]).message;
        assert!(listed(5000).len() < 4096, "{}", listed(5000).len());
        assert!(listed(5000).ends_with("and 4984 more (`GET /v1/models`)"));
        assert!(listed(16).contains("`m15-n") && !listed(16).contains("more"));
        assert!(listed(17).contains("`m15-n") && !listed(17).contains("`m16-n"));
    }
}
