//! The APIs of engines, by path: how their streams end, and which of them continue on another engine.

use hyper::Method;

/// The API of a request, which determines how its answer ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
    /// Others, whose answers end with their transport.
    #[default]
    Other,
}

impl Api {
    pub(super) fn of(method: &Method, path: &str) -> Api {
        if *method != Method::POST {
            return Api::Other;
        }
        match path {
            "/v1/completions" => Api::Completions, // `/completions` is another API of llama.cpp
            "/v1/chat/completions" | "/chat/completions" => Api::Chat,
            "/v1/responses" => Api::Responses,
            "/v1/messages" => Api::Messages,
            _ => Api::Other,
        }
    }

    /// Whether its answers have choices, and end with `[DONE]`.
    pub(super) fn has_choices(self) -> bool {
        matches!(self, Api::Completions | Api::Chat)
    }

    /// Returns the event by which the router reports a lost stream.
    pub(super) fn error_event(self, message: &str, openai: &[u8]) -> Vec<u8> {
        let (before, error, after) = match self {
            Api::Responses => (
                "event: error\ndata: ",
                serde_json::json!({"type": "error", "code": "stream_lost", "message": message, "param": null}),
                "\n\n",
            ),
            Api::Messages => (
                "event: error\ndata: ",
                serde_json::json!({"type": "error", "error": {"type": "api_error", "message": message}}),
                "\n\n",
            ),
            Api::Completions | Api::Chat | Api::Other => {
                return [b"data: ", openai, b"\n\ndata: [DONE]\n\n"].concat();
            }
        };
        [
            before.as_bytes(),
            error.to_string().as_bytes(),
            after.as_bytes(),
        ]
        .concat()
    }
}

/// A request whose stream may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamKind {
    Completion,
    Chat,
}
