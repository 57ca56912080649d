//! OpenAI's API as bytes in and bytes out: requests parsed and checked, answers rendered.
//!
//! No socket, clock or tokenizer here. Accepted, refused and ignored fields are listed in
//! `docs/openai-api.md`; a test holds the list and the parser together.

mod adapters;
pub mod agreement;
mod anthropic;
mod chunks;
mod embeddings;
mod error;
mod fields;
mod form;
mod listing;
mod literals;
mod logprobs;
mod members;
mod message_stream;
mod message_turns;
mod messages;
mod prompt;
mod request;
mod response_items;
mod response_stream;
mod responses;
mod sampling;
mod sse;
mod tokenize;
mod unary;
mod value;

pub(crate) use adapters::{AdapterRequest, parse_adapter};
pub use anthropic::{MessagesRequest, parse_messages};
pub use embeddings::{
    DIMENSIONS, DIMENSIONS_MAX, EmbeddingsRequest, Encoding, embedding_field_names,
    embeddings_json, parse_embeddings, unit_vector,
};
pub use error::ApiError;
pub(crate) use form::schema_error;
pub use form::{Form, TOOLS_MAX, TextForm, Tool, ToolChoice};
pub use listing::{
    ModelCard, model_json, models_json, openapi_json, openapi_json_without, version_json,
};
pub use logprobs::{LogprobsPiece, TokenLogprob};
pub use message_stream::{MessageStream, input_tokens_json, message_error};
pub use request::{
    ApiRequest, CHOICES_MAX, COMPLETION_MAX_TOKENS, Input, LOGPROBS_MAX, LogprobsWish, N_MAX,
    NAME_BYTES_MAX, PromptInput, RequestParams, STOP_BYTES_MAX, STOP_TOKENS_MAX, STOPS_MAX,
    VocabLimits, parse_chat, parse_completion, parse_turn,
};
pub use response_stream::ResponseStream;
pub use responses::{
    ResponsesRequest, parse_responses, previous_response_id, response_field_names,
    response_not_found,
};
pub use sse::{CallDelta, SseRender};
pub use tokenize::{
    DetokenizeRequest, TokenizeInput, TokenizeRequest, detokenize_json, parse_detokenize,
    parse_tokenize, render_chat_body, tokenize_json,
};
pub use unary::{UnaryChoice, UnaryRender, WholeAnswer, WholeCall, render_unary};
pub(crate) use value::{lax_real, lax_truth, lax_whole, members};

pub use crate::json::Out;

use crate::json;

/// The API that a request came to, of the two that continue a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionApi {
    /// `POST /v1/chat/completions`
    Chat,
    /// `POST /v1/completions`
    Completion,
}

/// Fields that every answer to one request repeats.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// Which endpoint answers.
    pub kind: CompletionApi,
    /// `id` of the answer, by custom `chatcmpl-…` or `cmpl-…`.
    pub id: &'a str,
    /// `created`: Unix time, s.
    pub created: u64,
    /// `model`: the served name.
    pub model: &'a str,
    /// Streams: a usage event comes last, and `usage` is null in the others.
    pub include_usage: bool,
}

impl Head<'_> {
    /// Appends `{"id":…,"object":…,"created":…,"model":…,` with the comma.
    fn render(&self, out: &mut impl Out, stream: bool) {
        out.put(b"{\"id\":");
        json::string(out, self.id);
        out.put(b",\"object\":\"");
        out.put(match (self.kind, stream) {
            (CompletionApi::Chat, true) => b"chat.completion.chunk".as_slice(),
            (CompletionApi::Chat, false) => b"chat.completion",
            (CompletionApi::Completion, _) => b"text_completion",
        });
        out.put(b"\",\"created\":");
        json::integer(out, self.created);
        out.put(b",\"model\":");
        json::string(out, self.model);
        out.put(b",");
    }
}

/// Why a choice ended, as a client reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish<'a> {
    /// At its natural end: `"stop"`.
    Stop,
    /// At a stop string: `"stop"`, with the string in vLLM's `stop_reason`.
    StopString(&'a str),
    /// At a token of `stop_token_ids`: `"stop"`, with the token in vLLM's `stop_reason`.
    StopToken(u32),
    /// At `max_tokens` or the model's length: `"length"`.
    Length,
    /// With a call of a tool, which ends it: `"tool_calls"`.
    ToolCalls,
    /// Cancelled: `"abort"`, vLLM's word; OpenAI has none.
    Abort,
}

impl Finish<'_> {
    /// Value of `finish_reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            Finish::Stop | Finish::StopString(_) | Finish::StopToken(_) => "stop",
            Finish::Length => "length",
            Finish::ToolCalls => "tool_calls",
            Finish::Abort => "abort",
        }
    }

    /// Appends `"finish_reason":…,"stop_reason":…`.
    fn render(&self, out: &mut impl Out) {
        out.put(b"\"finish_reason\":\"");
        out.put(self.reason().as_bytes());
        out.put(b"\",\"stop_reason\":");
        match self {
            Finish::StopString(stop) => json::string(out, stop),
            Finish::StopToken(token) => json::integer(out, u64::from(*token)),
            _ => out.put(b"null"),
        }
    }
}

/// Token counts of an answer: of all its choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompts; a prompt counts once, however many choices it has.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens found in a KV cache.
    pub cached_tokens: u64,
}

impl Usage {
    /// Appends the `usage` object.
    fn render(&self, out: &mut impl Out) {
        out.put(b"{\"prompt_tokens\":");
        json::integer(out, self.prompt_tokens);
        out.put(b",\"total_tokens\":");
        json::integer(out, self.prompt_tokens + self.completion_tokens);
        out.put(b",\"completion_tokens\":");
        json::integer(out, self.completion_tokens);
        out.put(b",\"prompt_tokens_details\":{\"cached_tokens\":");
        json::integer(out, self.cached_tokens);
        out.put(b"}}");
    }
}
