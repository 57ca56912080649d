//! Answers as clients get them: every shape, byte by byte, and as JSON whatever the text.

use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::openai::{
    ApiError, CompletionApi, Finish, Head, LogprobsPiece, ModelCard, SseRender, TokenLogprob,
    UnaryChoice, Usage, detokenize_json, model_json, models_json, openapi_json, render_unary,
    tokenize_json, version_json,
};
use slipstream_frontend::text::TextModel;

const HEAD: Head<'static> = Head {
    kind: CompletionApi::Chat,
    id: "chatcmpl-1",
    created: 1_700_000_000,
    model: "m",
    include_usage: false,
};

const USAGE: Usage = Usage {
    prompt_tokens: 20,
    completion_tokens: 3,
    cached_tokens: 16,
};

fn model() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(TextModel::builtin)
}

fn text(render: impl Fn(&mut Vec<u8>)) -> String {
    let mut out = Vec::new();
    render(&mut out);
    String::from_utf8(out).unwrap()
}

fn logprobs() -> LogprobsPiece {
    let entry = |text: &str, logprob, top| TokenLogprob {
        text: text.into(),
        bytes: text.as_bytes().into(),
        id: 7,
        logprob: Some(logprob),
        top,
    };
    LogprobsPiece {
        tokens: vec![entry(
            " a",
            -0.5,
            vec![entry(" a", -0.5, vec![]), entry("\"", -1.25, vec![])],
        )],
        text_offset: 2,
    }
}

/// The events of a stream with three tokens.
fn stream(kind: CompletionApi, include_usage: bool) -> String {
    let id = if kind == CompletionApi::Chat {
        "chatcmpl-1"
    } else {
        "cmpl-1"
    };
    let render = SseRender::new(
        &Head {
            kind,
            id,
            include_usage,
            ..HEAD
        },
        0,
    );
    text(|out| {
        render.role(out);
        render.text(" a\"b", out);
        render.escaped(b" c", out);
        render.finish(Some(" d"), None, &Finish::Length, out);
        if include_usage {
            render.usage(&USAGE, out);
        }
        SseRender::done(out);
    })
}

#[test]
fn a_chat_streams_as_openai_does() {
    assert_eq!(
        stream(CompletionApi::Chat, false),
        concat!(
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
            "\n\n",
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" a\"b"},"logprobs":null,"finish_reason":null}]}"#,
            "\n\n",
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" c"},"logprobs":null,"finish_reason":null}]}"#,
            "\n\n",
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" d"},"logprobs":null,"finish_reason":"length","stop_reason":null}]}"#,
            "\n\n",
            "data: [DONE]\n\n",
        )
    );
}

#[test]
fn a_completion_streams_with_its_usage() {
    assert_eq!(
        stream(CompletionApi::Completion, true),
        concat!(
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" a\"b","logprobs":null,"finish_reason":null}],"usage":null}"#,
            "\n\n",
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" c","logprobs":null,"finish_reason":null}],"usage":null}"#,
            "\n\n",
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" d","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}"#,
            "\n\n",
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[],"usage":{"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}"#,
            "\n\n",
            "data: [DONE]\n\n",
        )
    );
}

#[test]
fn an_error_in_mid_stream_is_an_event_and_then_the_end() {
    assert_eq!(
        text(|out| SseRender::error(&ApiError::worker_lost("w3"), out)),
        concat!(
            r#"data: {"error":{"message":"worker w3 went away before the answer was complete; try again","type":"server_error","param":null,"code":"worker_lost"}}"#,
            "\n\ndata: [DONE]\n\n",
        )
    );
}

#[test]
fn whole_answers_have_choices_and_usage() {
    let piece = logprobs();
    let choices = [
        UnaryChoice {
            text: " a\n",
            finish: Finish::StopString("\n"),
            logprobs: Some(&piece),
        },
        UnaryChoice {
            text: "",
            finish: Finish::StopToken(7),
            logprobs: None,
        },
    ];
    assert_eq!(
        text(|out| render_unary(&HEAD, &choices, &USAGE, out)),
        r#"{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":" a\n","refusal":null},"logprobs":{"content":[{"token":" a","logprob":-0.5,"bytes":[32,97],"top_logprobs":[{"token":" a","logprob":-0.5,"bytes":[32,97]},{"token":"\"","logprob":-1.25,"bytes":[34]}]}]},"finish_reason":"stop","stop_reason":"\n"},{"index":1,"message":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":7}],"usage":{"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}"#
    );
    let head = Head {
        kind: CompletionApi::Completion,
        id: "cmpl-1",
        ..HEAD
    };
    assert_eq!(
        text(|out| render_unary(&head, &choices[..1], &USAGE, out)),
        r#"{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" a\n","logprobs":{"text_offset":[2],"token_logprobs":[-0.5],"tokens":[" a"],"top_logprobs":[{" a":-0.5,"\"":-1.25}]},"finish_reason":"stop","stop_reason":"\n"}],"usage":{"prompt_tokens":20,"total_tokens":23,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}"#
    );
}

#[test]
fn the_small_answers() {
    let card = ModelCard {
        id: "m",
        root: "/adapters/m",
        parent: None,
        created: 5,
        max_model_len: 1024,
    };
    let shown = r#"{"id":"m","object":"model","created":5,"owned_by":"slipstream","root":"/adapters/m","parent":null,"max_model_len":1024}"#;
    assert_eq!(String::from_utf8(model_json(&card)).unwrap(), shown);
    assert_eq!(
        String::from_utf8(models_json(&[card, card])).unwrap(),
        format!(r#"{{"object":"list","data":[{shown},{shown}]}}"#)
    );
    assert_eq!(
        String::from_utf8(tokenize_json(&[1, 20], 64, None)).unwrap(),
        r#"{"count":2,"max_model_len":64,"tokens":[1,20],"token_strs":null}"#
    );
    assert_eq!(
        String::from_utf8(tokenize_json(
            &[1, 20],
            64,
            Some(&["\"".into(), "b".into()])
        ))
        .unwrap(),
        r#"{"count":2,"max_model_len":64,"tokens":[1,20],"token_strs":["\"","b"]}"#
    );
    assert_eq!(detokenize_json("a\"\u{1}"), br#"{"prompt":"a\"\u0001"}"#);
    let version: Value = serde_json::from_slice(version_json()).unwrap();
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[test]
fn errors_say_what_where_and_how_to_mend_it() {
    let error = ApiError::context_length(CompletionApi::Chat, 1000, Some(100), 1024);
    assert_eq!(
        error.param.as_deref(),
        Some("max_tokens"),
        "the prompt fits"
    );
    assert_eq!(error.code, Some("context_length_exceeded"));
    let long = ApiError::context_length(CompletionApi::Chat, 1024, Some(100), 1024);
    assert_eq!(long.param.as_deref(), Some("messages"));
    assert!(
        error
            .message
            .contains("1100 were requested (1000 in the prompt, 100 for the answer)")
    );
    let error = ApiError::context_length(CompletionApi::Completion, 1024, None, 1024);
    assert_eq!(error.param.as_deref(), Some("prompt"));
    assert!(error.message.contains("leaves no room"));
    let error = ApiError::model_not_found("gpt", &["a", "b"]);
    assert_eq!((error.status, error.code), (404, Some("model_not_found")));
    assert!(error.message.contains("has `a`, `b`"));
    assert_eq!(ApiError::overloaded("busy", 3).retry_after_s, Some(3));
}

#[test]
fn the_openapi_document_has_every_route() {
    let api: Value = serde_json::from_slice(openapi_json()).unwrap();
    assert_eq!(api["openapi"], "3.1.0");
    assert_eq!(api["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut routes: Vec<&str> = api["paths"]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    routes.sort_unstable();
    assert_eq!(
        routes,
        [
            "/detokenize",
            "/health",
            "/is_sleeping",
            "/kv_event_sources",
            "/live",
            "/metrics",
            "/openapi.json",
            "/ready",
            "/reset_prefix_cache",
            "/sleep",
            "/tokenize",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/load_lora_adapter",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models",
            "/v1/models/{id}",
            "/v1/responses",
            "/v1/responses/{id}",
            "/v1/responses/{id}/cancel",
            "/v1/unload_lora_adapter",
            "/version",
            "/wake_up",
        ]
    );
    // Every reference leads somewhere.
    fn follow(value: &Value, api: &Value) {
        match value {
            Value::Object(members) => members.iter().for_each(|(name, value)| {
                if name == "$ref" {
                    let target = value.as_str().unwrap().strip_prefix('#').unwrap();
                    assert!(api.pointer(target).is_some(), "{target}");
                }
                follow(value, api);
            }),
            Value::Array(elements) => elements.iter().for_each(|value| follow(value, api)),
            _ => {}
        }
    }
    follow(&api, &api);
}

/// The JSON of the one event in `event`.
fn parsed(event: &[u8]) -> Value {
    let data = event.strip_prefix(b"data: ").unwrap();
    let data = data.strip_suffix(b"\n\n").unwrap();
    assert!(!data.contains(&b'\n'), "an event is one line");
    serde_json::from_slice(data).unwrap()
}

#[test]
fn every_token_renders_as_itself() {
    let render = SseRender::new(&HEAD, 3);
    for token in 0..model().vocab_size() {
        let Some(json) = model().token_json(token) else {
            assert!(std::str::from_utf8(model().token_bytes(token)).is_err());
            continue;
        };
        let event = text(|out| render.escaped(json, out));
        let event = parsed(event.as_bytes());
        let expected = if model().is_special(token) {
            ""
        } else {
            std::str::from_utf8(model().token_bytes(token)).unwrap()
        };
        assert_eq!(event["choices"][0]["delta"]["content"], expected);
        assert_eq!(event["choices"][0]["index"], 3);
        assert_eq!(
            text(|out| render.finish_escaped(json, &Finish::Length, out)),
            text(|out| render.finish(Some(expected), None, &Finish::Length, out)),
        );
    }
}

proptest! {
    #[test]
    fn events_are_json_whatever_the_text(
        shown in any::<String>(), id in any::<String>(), name in any::<String>(),
        index in any::<u32>(), chat in any::<bool>(), include_usage in any::<bool>(),
        stop in any::<String>(), with_logprobs in any::<bool>(), running in any::<bool>(),
    ) {
        let kind = if chat { CompletionApi::Chat } else { CompletionApi::Completion };
        let head = Head { kind, id: &id, model: &name, include_usage, ..HEAD };
        let mut render = SseRender::new(&head, index);
        if running {
            render = render.with_running_usage(20);
        }
        render.set_counts(3, 16);
        let piece = logprobs();
        let finish = Finish::StopString(&stop);
        let events = [
            text(|out| render.text(&shown, out)),
            text(|out| render.text_logprobs(&shown, &piece, out)),
            text(|out| {
                let logprobs = with_logprobs.then_some(&piece);
                render.finish((!shown.is_empty()).then_some(&shown), logprobs, &finish, out);
            }),
        ];
        for (at, event) in events.iter().enumerate() {
            let event = parsed(event.as_bytes());
            prop_assert_eq!(&event["id"], &json!(id));
            prop_assert_eq!(&event["model"], &json!(name));
            let usage = match (running, include_usage) {
                (true, _) => Some(json!({
                    "prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23,
                    "prompt_tokens_details": {"cached_tokens": 16},
                })),
                (false, true) => Some(Value::Null),
                (false, false) => None,
            };
            prop_assert_eq!(event.get("usage").cloned(), usage);
            let choice = &event["choices"][0];
            prop_assert_eq!(&choice["index"], &json!(index));
            let said = if chat { choice["delta"].get("content") } else { choice.get("text") };
            let dropped = at == 2 && chat && shown.is_empty();
            prop_assert_eq!(said.cloned(), (!dropped).then_some(json!(shown)));
            let ends = if at == 2 { json!("stop") } else { Value::Null };
            prop_assert_eq!(&choice["finish_reason"], &ends);
            let has = at == 1 || at == 2 && with_logprobs;
            prop_assert_eq!(choice["logprobs"].is_object(), has);
        }
    }

    #[test]
    fn modelled_log_probabilities_are_probabilities(
        seed in any::<u64>(), position in 0u64..100_000, top in 0u32..=20,
    ) {
        let token = model().output_vocab()[3];
        let drawn = TokenLogprob::modelled(model(), seed, position, token, top);
        prop_assert_eq!(&drawn, &TokenLogprob::modelled(model(), seed, position, token, top));
        prop_assert_eq!(drawn.text.as_bytes(), model().token_bytes(token));
        prop_assert_eq!(drawn.top.len(), top as usize);
        if let Some(first) = drawn.top.first() {
            prop_assert_eq!(&first.text, &drawn.text);
            prop_assert_eq!(first.logprob, drawn.logprob);
        }
        prop_assert!(drawn.top.windows(2).all(|pair| pair[0].logprob > pair[1].logprob));
        let mut texts: Vec<_> = drawn.top.iter().map(|t| &t.text).collect();
        texts.sort();
        texts.dedup();
        prop_assert_eq!(texts.len(), top as usize);
        let sum: f64 = drawn.top.iter().filter_map(|t| t.logprob).map(f64::exp).sum();
        prop_assert!(sum <= 1.0 + 1e-9, "{}", sum);
        prop_assert!(drawn.logprob >= Some(0.5f64.ln()));
        // Those of a prompt follow from position and token; its first token has none.
        let of_prompt = TokenLogprob::of_prompt(model(), position, token, top);
        prop_assert_eq!(&of_prompt, &TokenLogprob::of_prompt(model(), position, token, top));
        prop_assert_eq!(of_prompt.logprob.is_none(), position == 0);
    }
}
