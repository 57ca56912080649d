//! Answers of Anthropic's Messages API: a chat's events become a message's, and the message itself.
//!
//! Source: Anthropic's API reference, "Streaming messages"; vLLM, `vllm/entrypoints/anthropic/serving.py`.

use serde_json::{Value, json};

use super::chunks::Chunks;
use super::{ApiError, Usage};

/// Body of an error in Anthropic's shape.
pub fn message_error(error: &ApiError) -> Vec<u8> {
    error_json(error.status, &error.message).into_bytes()
}

fn error_json(status: u16, message: &str) -> String {
    let kind = match status {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}}).to_string()
}

/// Body of the answer to `count_tokens`.
pub fn input_tokens_json(tokens: u64) -> Vec<u8> {
    json!({"input_tokens": tokens}).to_string().into_bytes()
}

/// Turns the events of a chat into those of a message, and into the message itself.
#[derive(Debug, Default)]
pub struct MessageStream {
    chunks: Chunks,
    /// `id` and `model` once it has begun.
    head: Option<(String, String)>,
    /// Blocks so far, if the message is sent as a whole.
    blocks: Vec<Block>,
    /// Blocks that have begun; the last one is open if `open`.
    begun: usize,
    open: bool,
    /// The open block is a call.
    in_call: bool,
    usage: Usage,
    reason: Option<String>,
    stop: Option<String>,
    error: Option<(u16, String)>,
}

#[derive(Debug)]
enum Block {
    Text(String),
    Call {
        id: String,
        name: String,
        input: String,
    },
}

impl MessageStream {
    /// Takes a frame of the chat's events. Appends the message's events to `out` if there is one.
    pub fn take(&mut self, frame: &[u8], mut out: Option<&mut Vec<u8>>) {
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.take(frame, |chunk| self.chunk(chunk, &mut out));
        self.chunks = chunks;
    }

    /// Bytes of the blocks so far.
    pub fn bytes(&self) -> usize {
        let len = |block: &Block| match block {
            Block::Text(text) => text.len(),
            Block::Call { id, name, input } => id.len() + name.len() + input.len(),
        };
        self.blocks.iter().map(len).sum()
    }

    fn chunk(&mut self, chunk: &Value, out: &mut Option<&mut Vec<u8>>) {
        if let Some(error) = chunk.get("error") {
            let message = error["message"].as_str().unwrap_or_default().to_owned();
            let status = ApiError::status_of(error["code"].as_str());
            emit(out, "error", || error_json(status, &message));
            self.error = Some((status, message));
            return;
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = Usage {
                prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
                completion_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
                cached_tokens: usage["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap_or(0),
            };
        }
        if self.head.is_none() {
            let text = |name: &str| chunk[name].as_str().unwrap_or_default().to_owned();
            self.head = Some((text("id").replacen("chatcmpl-", "msg_", 1), text("model")));
            emit(out, "message_start", || {
                json!({"type": "message_start", "message": self.message(&[])}).to_string()
            });
        }
        let Some(choice) = chunk["choices"].get(0) else {
            return self.end(out);
        };
        let delta = &choice["delta"];
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            self.text(text, out);
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(part, out);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.reason = Some(reason.to_owned());
            self.stop = choice["stop_reason"].as_str().map(str::to_owned);
        }
    }

    fn begin(&mut self, block: &Value, in_call: bool, out: &mut Option<&mut Vec<u8>>) {
        self.close(out);
        let index = self.begun;
        emit(out, "content_block_start", || {
            json!({"type": "content_block_start", "index": index, "content_block": block})
                .to_string()
        });
        self.begun += 1;
        self.open = true;
        self.in_call = in_call;
    }

    fn delta(&self, delta: &Value, out: &mut Option<&mut Vec<u8>>) {
        emit(out, "content_block_delta", || {
            json!({"type": "content_block_delta", "index": self.begun - 1, "delta": delta})
                .to_string()
        });
    }

    fn close(&mut self, out: &mut Option<&mut Vec<u8>>) {
        if std::mem::take(&mut self.open) {
            let index = self.begun - 1;
            emit(out, "content_block_stop", || {
                json!({"type": "content_block_stop", "index": index}).to_string()
            });
        }
    }

    fn text(&mut self, text: &str, out: &mut Option<&mut Vec<u8>>) {
        if !self.open || self.in_call {
            self.begin(&json!({"type": "text", "text": ""}), false, out);
            if out.is_none() {
                self.blocks.push(Block::Text(String::new()));
            }
        }
        self.delta(&json!({"type": "text_delta", "text": text}), out);
        if let Some(Block::Text(whole)) = self.blocks.last_mut() {
            whole.push_str(text);
        }
    }

    fn call(&mut self, part: &Value, out: &mut Option<&mut Vec<u8>>) {
        let function = &part["function"];
        if let Some(id) = part["id"].as_str() {
            let name = function["name"].as_str().unwrap_or_default();
            let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            self.begin(&block, true, out);
            if out.is_none() {
                self.blocks.push(Block::Call {
                    id: id.to_owned(),
                    name: name.to_owned(),
                    input: String::new(),
                });
            }
        }
        let arguments = function["arguments"].as_str().unwrap_or_default();
        if !arguments.is_empty() {
            self.delta(
                &json!({"type": "input_json_delta", "partial_json": arguments}),
                out,
            );
            if let Some(Block::Call { input, .. }) = self.blocks.last_mut() {
                input.push_str(arguments);
            }
        }
    }

    fn end(&mut self, out: &mut Option<&mut Vec<u8>>) {
        self.close(out);
        let (reason, stop) = self.reason();
        emit(out, "message_delta", || {
            json!({
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": stop},
                "usage": self.counts(),
            })
            .to_string()
        });
        emit(out, "message_stop", || {
            json!({"type": "message_stop"}).to_string()
        });
    }

    /// `stop_reason` and `stop_sequence`.
    fn reason(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(reason) = self.reason.as_deref() else {
            return (None, None);
        };
        match (reason, self.stop.as_deref()) {
            ("length", _) => (Some("max_tokens"), None),
            (_, Some(stop)) => (Some("stop_sequence"), Some(stop)),
            // Also of a call that the client named, which ends a chat with `stop`.
            _ if self.in_call => (Some("tool_use"), None),
            _ => (Some("end_turn"), None),
        }
    }

    /// Counts as Anthropic has them: cached tokens are not among `input_tokens`.
    fn counts(&self) -> Value {
        json!({
            "input_tokens": self.usage.prompt_tokens.saturating_sub(self.usage.cached_tokens),
            "cache_read_input_tokens": self.usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        })
    }

    fn message(&self, content: &[Value]) -> Value {
        let (id, model) = self.head.clone().unwrap_or_default();
        let (reason, stop) = self.reason();
        json!({
            "id": id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.counts(),
        })
    }

    /// The whole message, after the last frame. A call that `max_tokens` cut has no input.
    ///
    /// # Errors
    /// Status and message, if the chat failed.
    pub fn whole(&self) -> Result<Vec<u8>, (u16, String)> {
        if let Some((status, message)) = &self.error {
            return Err((*status, message.clone()));
        }
        let block = |block: &Block| match block {
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::Call { id, name, input } => {
                let input = serde_json::from_str(input).unwrap_or_else(|_| json!({}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        };
        let content: Vec<Value> = self.blocks.iter().map(block).collect();
        Ok(self.message(&content).to_string().into_bytes())
    }
}

fn emit(out: &mut Option<&mut Vec<u8>>, event: &str, data: impl FnOnce() -> String) {
    if let Some(out) = out {
        out.extend_from_slice(format!("event: {event}\ndata: {}\n\n", data()).as_bytes());
    }
}
