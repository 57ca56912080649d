//! Responses of OpenAI's API: a chat's events become a response's, and the response itself.
//!
//! Source: OpenAI's API reference, "Streaming events"; vLLM, `vllm/entrypoints/openai/responses/streaming_events.py`.

use serde_json::{Map, Value, json};

use super::chunks::Chunks;
use super::{ApiError, Usage};

/// Turns the events of a chat into those of a response, and into the response itself.
#[derive(Debug)]
pub struct ResponseStream {
    id: String,
    created: u64,
    repeated: Map<String, Value>,
    chunks: Chunks,
    items: Vec<Item>,
    /// Bytes of the items.
    bytes: usize,
    /// The last item is not complete.
    open: bool,
    events: u64,
    usage: Usage,
    reason: Option<String>,
    error: Option<(u16, String)>,
    done: bool,
}

#[derive(Debug)]
enum Item {
    Message {
        text: String,
        logprobs: Vec<Value>,
    },
    Call {
        call_id: String,
        name: String,
        arguments: String,
    },
}

impl ResponseStream {
    /// The response `id` to a request, which the model with this name answers.
    pub fn new(id: String, created: u64, model: &str, repeated: Map<String, Value>) -> Self {
        let mut repeated = repeated;
        for (name, value) in [
            ("parallel_tool_calls", json!(true)),
            ("temperature", json!(1.0)),
            ("tool_choice", json!("auto")),
            ("tools", json!([])),
            ("top_p", json!(1.0)),
            ("service_tier", json!("auto")),
            ("metadata", json!({})),
            ("instructions", Value::Null),
            ("max_output_tokens", Value::Null),
            ("previous_response_id", Value::Null),
            ("reasoning", Value::Null),
            ("text", json!({"format": {"type": "text"}})),
            ("user", Value::Null),
        ] {
            repeated.entry(name).or_insert(value);
        }
        repeated.insert("model".into(), json!(model));
        repeated.insert("background".into(), json!(false));
        repeated.insert("truncation".into(), json!("disabled"));
        ResponseStream {
            id,
            created,
            repeated,
            chunks: Chunks::default(),
            items: Vec::new(),
            bytes: 0,
            open: false,
            events: 0,
            usage: Usage::default(),
            reason: None,
            error: None,
            done: false,
        }
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Bytes of its items so far.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is complete and did not fail.
    pub fn is_complete(&self) -> bool {
        self.done && self.error.is_none()
    }

    /// The events that open a stream, before the prompt is computed: `response.created` and
    /// `response.in_progress`.
    pub fn begin(&mut self, out: &mut Vec<u8>) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.emit(&mut Some(out), kind, |_| json!({"response": response}));
        }
    }

    /// Takes a frame of the chat's events. Appends the response's events to `out` if there is one.
    pub fn take(&mut self, frame: &[u8], mut out: Option<&mut Vec<u8>>) {
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.take(frame, |chunk| self.chunk(chunk, &mut out));
        self.chunks = chunks;
    }

    /// The response fails: `response.failed`.
    pub fn fail(&mut self, status: u16, message: String, out: &mut Option<&mut Vec<u8>>) {
        if self.done {
            return;
        }
        self.done = true;
        self.open = false;
        self.error = Some((status, message));
        let response = self.response("failed");
        self.emit(out, "response.failed", |_| json!({"response": response}));
    }

    fn chunk(&mut self, chunk: &Value, out: &mut Option<&mut Vec<u8>>) {
        if self.done {
            return;
        }
        if let Some(error) = chunk.get("error") {
            let message = error["message"].as_str().unwrap_or_default().to_owned();
            let status = ApiError::status_of(error["code"].as_str());
            return self.fail(status, message, out);
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
        let Some(choice) = chunk["choices"].get(0) else {
            return self.end(out);
        };
        let delta = &choice["delta"];
        let logprobs = choice["logprobs"]["content"].as_array();
        if let Some(text) = delta["content"].as_str()
            && (!text.is_empty() || logprobs.is_some_and(|l| !l.is_empty()))
        {
            self.text(text, logprobs.map_or(&[], Vec::as_slice), out);
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(part, out);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.reason = Some(reason.to_owned());
        }
    }

    fn text(&mut self, text: &str, logprobs: &[Value], out: &mut Option<&mut Vec<u8>>) {
        if !self.open || matches!(self.items.last(), Some(Item::Call { .. })) {
            self.begin_item(
                Item::Message {
                    text: String::new(),
                    logprobs: Vec::new(),
                },
                out,
            );
            self.emit(out, "response.content_part.added", |this| {
                let part =
                    json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
                this.placed(json!({"content_index": 0, "part": part}))
            });
        }
        self.emit(out, "response.output_text.delta", |this| {
            let logprobs: Vec<Value> = logprobs.iter().map(|l| logprob(l, false)).collect();
            this.placed(json!({"content_index": 0, "delta": text, "logprobs": logprobs}))
        });
        let Some(Item::Message {
            text: whole,
            logprobs: all,
        }) = self.items.last_mut()
        else {
            return;
        };
        whole.push_str(text);
        for token in logprobs.iter().map(|l| logprob(l, true)) {
            self.bytes += token.to_string().len() * 4; // its values take more than their text
            all.push(token);
        }
        self.bytes += text.len();
    }

    fn call(&mut self, part: &Value, out: &mut Option<&mut Vec<u8>>) {
        let function = &part["function"];
        if let Some(id) = part["id"].as_str() {
            let name = function["name"].as_str().unwrap_or_default();
            self.begin_item(
                Item::Call {
                    call_id: id.to_owned(),
                    name: name.to_owned(),
                    arguments: String::new(),
                },
                out,
            );
            self.bytes += id.len() + name.len();
        }
        let delta = function["arguments"].as_str().unwrap_or_default();
        if delta.is_empty() {
            return;
        }
        self.emit(out, "response.function_call_arguments.delta", |this| {
            this.placed(json!({"delta": delta}))
        });
        if let Some(Item::Call { arguments, .. }) = self.items.last_mut() {
            arguments.push_str(delta);
            self.bytes += delta.len();
        }
    }

    fn begin_item(&mut self, item: Item, out: &mut Option<&mut Vec<u8>>) {
        self.close("completed", out);
        self.items.push(item);
        self.open = true;
        self.emit(out, "response.output_item.added", |this| {
            let at = this.items.len() - 1;
            let mut item = this.item(at, "in_progress");
            if let Some(content) = item.get_mut("content") {
                *content = json!([]);
            }
            json!({"output_index": at, "item": item})
        });
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, out: &mut Option<&mut Vec<u8>>) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let at = self.items.len() - 1;
        let is_call = matches!(self.items[at], Item::Call { .. });
        if is_call {
            self.emit(out, "response.function_call_arguments.done", |this| {
                let item = this.item(at, status);
                this.placed(json!({"arguments": item["arguments"], "name": item["name"]}))
            });
        } else {
            self.emit(out, "response.output_text.done", |this| {
                let part = &this.item(at, status)["content"][0];
                this.placed(json!({"content_index": 0, "text": part["text"], "logprobs": []}))
            });
            self.emit(out, "response.content_part.done", |this| {
                let part = &this.item(at, status)["content"][0];
                this.placed(json!({"content_index": 0, "part": part}))
            });
        }
        self.emit(
            out,
            "response.output_item.done",
            |this| json!({"output_index": at, "item": this.item(at, status)}),
        );
    }

    fn end(&mut self, out: &mut Option<&mut Vec<u8>>) {
        let status = self.status();
        self.close(status, out);
        self.done = true;
        let response = self.response(status);
        let kind = format!("response.{status}");
        self.emit(out, &kind, |_| json!({"response": response}));
    }

    fn status(&self) -> &'static str {
        match self.reason.as_deref() {
            Some("length") => "incomplete",
            _ => "completed",
        }
    }

    fn item_id(&self, at: usize) -> String {
        let prefix = match self.items[at] {
            Item::Message { .. } => "msg",
            Item::Call { .. } => "fc",
        };
        let own = self.id.strip_prefix("resp_").unwrap_or(&self.id);
        format!("{prefix}_{own}_{at}")
    }

    fn item(&self, at: usize, status: &str) -> Value {
        let id = self.item_id(at);
        match &self.items[at] {
            Item::Message { text, logprobs } => {
                let part = json!({
                    "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs,
                });
                json!({
                    "type": "message", "id": id, "role": "assistant", "status": status,
                    "content": [part],
                })
            }
            Item::Call {
                call_id,
                name,
                arguments,
            } => json!({
                "type": "function_call", "id": id, "call_id": call_id, "name": name,
                "arguments": arguments, "status": status,
            }),
        }
    }

    /// `data` of an event that concerns the last item.
    fn placed(&self, mut data: Value) -> Value {
        let at = self.items.len() - 1;
        data["output_index"] = json!(at);
        data["item_id"] = json!(self.item_id(at));
        data
    }

    fn response(&self, status: &str) -> Value {
        let mut response = self.repeated.clone();
        let last = self.items.len().saturating_sub(1);
        let output: Vec<Value> = (0..self.items.len())
            .map(|at| self.item(at, if at == last { status } else { "completed" }))
            .collect();
        let incomplete = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        let error = match &self.error {
            Some((_, message)) => json!({"code": "server_error", "message": message}),
            None => Value::Null,
        };
        let usage = match status {
            "in_progress" | "failed" => Value::Null,
            _ => json!({
                "input_tokens": self.usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": self.usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": self.usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
            }),
        };
        for (name, value) in [
            ("id", json!(self.id)),
            ("object", json!("response")),
            ("created_at", json!(self.created)),
            ("status", json!(status)),
            ("output", Value::Array(output)),
            ("incomplete_details", incomplete),
            ("error", error),
            ("usage", usage),
        ] {
            response.insert(name.into(), value);
        }
        Value::Object(response)
    }

    fn emit(
        &mut self,
        out: &mut Option<&mut Vec<u8>>,
        kind: &str,
        data: impl FnOnce(&Self) -> Value,
    ) {
        let Some(out) = out else {
            return;
        };
        let mut data = data(self);
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.events);
        self.events += 1;
        out.extend_from_slice(format!("event: {kind}\ndata: {data}\n\n").as_bytes());
    }

    /// The whole response, after the last frame.
    ///
    /// # Errors
    /// Status and message, if the chat failed.
    pub fn whole(&self) -> Result<Vec<u8>, (u16, String)> {
        match &self.error {
            Some((status, message)) => Err((*status, message.clone())),
            None => Ok(self.response(self.status()).to_string().into_bytes()),
        }
    }

    /// `history` of the request with the answer behind it.
    pub fn history(&self, request: &[u8]) -> Vec<u8> {
        let mut text = String::new();
        let mut calls = Vec::new();
        for item in &self.items {
            match item {
                Item::Message { text: more, .. } => text.push_str(more),
                // The arguments of a call that was cut are no JSON, which no later chat may have.
                Item::Call { arguments, .. }
                    if serde_json::from_str::<Value>(arguments).is_err() => {}
                Item::Call {
                    call_id,
                    name,
                    arguments,
                } => calls.push(json!({
                    "id": call_id, "type": "function",
                    "function": {"name": name, "arguments": arguments},
                })),
            }
        }
        let mut message = json!({"role": "assistant", "content": text});
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        let mut history = request.to_vec();
        if !history.is_empty() {
            history.push(b',');
        }
        history.extend_from_slice(message.to_string().as_bytes());
        history
    }
}

/// A token's log probability, as a response has it.
fn logprob(chat: &Value, with_bytes: bool) -> Value {
    let one = |from: &Value| {
        let mut to = json!({"token": from["token"], "logprob": from["logprob"]});
        if with_bytes {
            to["bytes"] = from["bytes"].clone();
        }
        to
    };
    let mut token = one(chat);
    let top = chat["top_logprobs"].as_array().into_iter().flatten();
    token["top_logprobs"] = top.map(one).collect();
    token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_may_be_cut_anywhere() {
        let chunk = |delta: Value, finish: Option<&str>| json!({"choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}});
        let mut events = Vec::new();
        for data in [
            chunk(json!({"role": "assistant", "content": ""}), None),
            chunk(json!({"content": "é"}), None),
            chunk(json!({"content": " b"}), Some("length")),
            usage,
        ] {
            events.extend_from_slice(format!("data: {data}\n\n").as_bytes());
        }
        events.extend_from_slice(b"data: [DONE]\n\n");
        let whole = |cut: usize| {
            let mut stream = ResponseStream::new("resp_1".into(), 1, "m", Map::new());
            let mut out = Vec::new();
            stream.begin(&mut out);
            stream.take(&events[..cut], Some(&mut out));
            stream.take(&events[cut..], Some(&mut out));
            assert!(stream.is_complete());
            (String::from_utf8(out).unwrap(), stream.whole().unwrap())
        };
        let (text, body) = whole(0);
        for cut in 1..events.len() {
            assert_eq!(whole(cut), (text.clone(), body.clone()), "cut at {cut}");
        }
        let numbers: Vec<u64> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .map(|data| serde_json::from_str::<Value>(data).unwrap())
            .map(|event| event["sequence_number"].as_u64().unwrap())
            .collect();
        assert!(
            numbers.iter().copied().eq(0..numbers.len() as u64),
            "{numbers:?}"
        );
        assert!(text.ends_with("\n\n") && text.contains("event: response.incomplete\n"));
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["output"][0]["content"][0]["text"], "é b");
        assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(body["usage"]["total_tokens"], 5);
    }
}
