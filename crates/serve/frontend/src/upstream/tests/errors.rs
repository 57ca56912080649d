//! Errors of engines and gateways in the shapes of many vendors, wherever they are in an answer, and answers that are none.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::super::api::Api;
use super::super::ends::{StreamEnd, check_beginning, check_whole};
use super::super::stream::{BodyEnd, EventStream};
use super::chunks::{pieces, relayed};

const APIS: [Api; 4] = [Api::Completions, Api::Chat, Api::Responses, Api::Messages];

/// In no part of an answer.
const MARK: &str = "qqDIEDqq";

/// Names of members that are errors. Sources: vLLM, SGLang, TGI, Ollama, KServe, Triton (`error`); Bedrock's and SageMaker's
/// events; GraphQL and Cloudflare (`errors`); Apigee (`fault`); ASP.NET; Baidu.
const ERROR_NAMES: &[&str] = &[
    "error",
    "Error",
    "ERROR",
    "errors",
    "error_msg",
    "errorMessage",
    "error_message",
    "errMsgError",
    "exception",
    "Exception",
    "internalServerException",
    "modelStreamErrorException",
    "serviceUnavailableException",
    "modelTimeoutException",
    "InternalStreamFailure",
    "InternalFailure",
    "ModelError",
    "ModelStreamError",
    "fault",
    "Fault",
    "traceback",
];

/// Members that occur beside an error.
fn beside() -> impl Strategy<Value = Map<String, Value>> {
    let one = prop::sample::select(
        &[
            ("request_id", "\"r-1\""),
            ("timestamp", "1764300000"),
            ("path", "\"/v1\""),
            ("trace_id", "\"0af7\""),
            ("model", "\"m\""),
            ("created", "1764300000"),
            ("instance", "\"/x/1\""),
            ("param", "null"),
            ("details", "[]"),
            ("data", "null"),
            ("usage", "null"),
            ("error", "null"),
            ("activityId", "\"7\""),
        ][..],
    );
    prop::collection::vec(one, 0..4).prop_map(|members| {
        let value = |text: &str| serde_json::from_str(text).unwrap();
        let each = members.iter();
        each.map(|&(name, text)| (name.to_owned(), value(text)))
            .collect()
    })
}

/// An object that describes an error of a server.
fn error_objects() -> impl Strategy<Value = Value> {
    let status = prop::sample::select(&[500, 502, 503, 504, 520][..]);
    let text = prop::sample::select(&["CUDA out of memory", "upstream reset", "worker died"][..])
        .prop_map(|text| format!("{text} {MARK}"));
    (0usize..9, status, text).prop_map(|(style, status, text)| match style {
        0 => json!({"message": text, "type": "InternalServerError", "param": null, "code": status}),
        1 => json!({"message": text, "type": "server_error", "code": status.to_string()}),
        2 => json!({"code": status, "message": text, "status": "UNAVAILABLE"}),
        3 => json!({"message": text}),
        4 => json!({"Message": text, "Code": "InternalFailure"}),
        5 => json!({"grpc_code": 13, "http_code": status, "message": text}),
        6 => json!({"faultstring": text, "detail": {"errorcode": "messaging.adaptors.http.flow.Down"}}),
        7 => json!({"type": "api_error", "message": text}),
        _ => json!({"code": "internal_error", "message": text, "innererror": {"code": "x"}}),
    })
}

/// An object that is an error of the engine, outside of any choice.
fn errors() -> impl Strategy<Value = Value> {
    let named = (
        prop::sample::select(ERROR_NAMES),
        error_objects(),
        0usize..5,
    )
        .prop_map(|(name, error, style)| match style {
            0 => json!({name: error}),
            1 => json!({name: format!("Internal Server Error {MARK}")}),
            2 => json!({name: [error]}),
            3 if name == "error" => json!({name: true, "message": MARK}),
            3 => json!({name: 50_001, "text": MARK, "message": MARK}),
            _ => json!({name: format!("gone {MARK}"), "status": 500}),
        });
    let status = || prop::sample::select(&[500, 502, 503, 504][..]);
    let described = (0usize..15, status()).prop_map(|(style, status)| match style {
        // RFC 9457, whose members are all optional.
        0 => json!({"type": "about:blank", "title": MARK, "status": status}),
        1 => json!({"title": MARK, "status": status, "detail": "boom"}),
        2 => json!({"type": "https://example.com/probs/down", "title": MARK}),
        3 => json!({"status": status, "instance": MARK}),
        4 => json!({"detail": MARK}),
        5 => json!({"message": MARK}),
        6 => json!({"Message": MARK}),
        7 => json!({"code": 13, "message": MARK, "details": []}),
        8 => json!({"success": false, "x": MARK}),
        9 => json!({"statusCode": status, "message": MARK, "activityId": "1"}),
        10 => json!({"object": "error", "message": MARK, "type": "internal_error", "param": null, "code": status}),
        11 => json!({"text": format!("**NETWORK ERROR** {MARK}"), "error_code": 50_001}),
        12 => json!({"__type": "InternalServerException", "message": MARK}),
        13 => json!({"code": status, "type": "ServiceUnavailableException", "message": MARK}),
        _ => json!({"ErrorCode": "INTERNAL_FAILURE_FROM_MODEL", "OriginalStatusCode": status, "OriginalMessage": MARK}),
    });
    (prop_oneof![named, described], beside()).prop_map(|(error, beside)| {
        let Value::Object(mut error) = error else {
            unreachable!()
        };
        for (name, value) in beside {
            error.entry(name).or_insert(value);
        }
        Value::Object(error)
    })
}

/// An event of a chat or a completion with an error beside a choice, within one, or beside an empty list of choices.
fn errors_beside_choices() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(&["error", "Error", "error_msg", "exception"][..]);
    (name, error_objects(), 0usize..5).prop_map(|(name, error, place)| {
        let mut choice = json!({"index": 0, "text": "", "delta": {"content": ""}, "logprobs": null, "finish_reason": null});
        match place {
            0 => choice[name] = error.clone(),
            1 => choice["delta"][name] = error.clone(),
            2 => choice["finish_reason"] = "error".into(),
            _ => {}
        }
        let mut event = json!({"id": "a", "object": "chat.completion.chunk", "choices": [choice]});
        match place {
            3 => event[name] = error,
            4 => {
                event["choices"] = json!([]);
                event[name] = error;
            }
            _ => {}
        }
        event["system_fingerprint"] = Value::Null;
        event
    })
}

/// An object that is neither an error nor a part of an answer.
fn foreign() -> impl Strategy<Value = Value> {
    prop::sample::select(
        &[
            r#"{"type":"ping"}"#,
            r#"{"event":"ping"}"#,
            r#"{"type":"keepalive","sequence_number":3}"#,
            r#"{"conversation_id":"c-1"}"#,
            r#"{"base_resp":{"status_code":1004,"status_msg":"qqDIEDqq"}}"#,
            r#"{"code":200,"msg":"ok"}"#,
            r#"{"status":"queued","position":3}"#,
            r#"{"heartbeat":1}"#,
        ][..],
    )
    .prop_map(|text| serde_json::from_str(text).unwrap())
}

/// An event of the answer with some text.
fn part(api: Api, number: usize) -> String {
    let text = [" a", " \\\"quoted\\\"", " error", "\u{e9}"][number % 4];
    match api {
        Api::Completions => format!(
            "data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        ),
        Api::Chat => format!(
            "data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\
             \"finish_reason\":null}}]}}\n\n"
        ),
        Api::Responses => format!(
            "event: response.output_text.delta\ndata: {{\"type\":\"response.output_text.delta\",\"delta\":\"{text}\"}}\n\n"
        ),
        _ => format!(
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":0,\
             \"delta\":{{\"type\":\"text_delta\",\"text\":\"{text}\"}}}}\n\n"
        ),
    }
}

/// The end of a complete answer.
fn ending(api: Api) -> &'static str {
    match api {
        Api::Completions | Api::Chat => {
            "data: {\"id\":\"a\",\"choices\":[{\"index\":0,\"text\":\"\",\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
             data: [DONE]\n\n"
        }
        Api::Responses => {
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"error\":null}}\n\n"
        }
        _ => {
            "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n\
             event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
        }
    }
}

/// An event with an error, in one of several ways.
fn framed(style: usize, error: &Value) -> String {
    let json = error.to_string();
    let pretty = serde_json::to_string_pretty(error).unwrap();
    match style {
        0 => format!("data: {json}\n\ndata: [DONE]\n\n"),
        1 => format!("event: error\ndata: {json}\n\n"),
        2 => format!("data: {json}\ndata: [DONE]\n\n"),
        3 => format!("{json}\ndata: [DONE]\n\n"),
        4 => format!("{json}\n\ndata: [DONE]\n\n"),
        5 => format!("error: {json}\n\n"),
        6 => format!("data: {}\n\n", pretty.replace('\n', "\ndata: ")),
        7 => format!("id: 7\nretry: 100\nevent: modelStreamErrorException\ndata:{json}\n\n"),
        8 => format!("event: error\ndata: [DONE]\n: {json}\n\n"),
        _ => format!("data: {json}\n\n"),
    }
}

/// Text of a gateway in place of an event.
const TEXTS: &[&str] = &[
    "data: Internal Server Error qqDIEDqq\n\n",
    "data: upstream connect error or disconnect/reset before headers. qqDIEDqq\n\ndata: [DONE]\n\n",
    "<html><body><h1>502 Bad Gateway</h1>qqDIEDqq</body></html>\n\n",
    "data: <html>qqDIEDqq</html>\n\n",
    "data: [{\"error\":{\"code\":500,\"message\":\"qqDIEDqq\"}}]\n\n",
    "data: {\"id\":\"a\",\"choices\":[{\"qqDIEDqq\n\n",
    "upstream request timeout qqDIEDqq\ndata: [DONE]\n\n",
];

fn stream(api: Api) -> EventStream {
    EventStream::new(StreamEnd::new(api, 1), true, None)
}

proptest! {
    /// Whatever an engine's failure looks like, and whereever it is: it counts once, the client gets none of it, and the
    /// answer is not complete. Before the first token the engine's answer is refused.
    #[test]
    fn failures_in_any_shape_are_failures_of_the_engine(
        api in prop::sample::select(&APIS[..]),
        error in prop_oneof![6 => errors(), 3 => errors_beside_choices()],
        text in prop::option::weighted(0.1, prop::sample::select(TEXTS)),
        style in 0usize..12,
        before in 0usize..5,
        waits in prop::sample::select(&["", ": c\n\n", "event: ping\ndata: {\"type\":\"ping\"}\n\n"][..]),
        line in prop::sample::select(&["\n", "\r\n", "\r"][..]),
        cuts in prop::collection::vec(prop_oneof![1usize..8, 1usize..400], 1..6),
    ) {
        if !api.has_choices() && error.get("choices").is_some() {
            return Ok(());
        }
        let failure = text.map_or_else(|| framed(style, &error), str::to_owned);
        let answer: String = (0..before).map(|number| part(api, number)).collect();
        let whole = format!("{waits}{answer}{failure}").replace('\n', line);
        let outcome = relayed(stream(api), &pieces(whole.as_bytes(), &cuts));
        prop_assert_eq!(outcome.reports, 1, "{}", whole);
        let is_shown = outcome.shown.iter().any(|of| String::from_utf8_lossy(of).contains(MARK));
        // Errors of `/v1/responses` and `/v1/messages` are for their clients.
        let is_of_api = !api.has_choices() && before > 0;
        prop_assert!(!is_shown || is_of_api, "{}", whole);
        let parts = outcome.shown.len() - usize::from(is_shown) - usize::from(waits.contains("ping"));
        prop_assert!(parts == before || is_of_api, "{} of {}: {}", parts, before, whole);
        // As one piece: what is not passed on may be requested elsewhere.
        let begins = check_beginning(api, whole.as_bytes(), true);
        prop_assert_eq!(begins.is_err(), before == 0, "{}", whole);
    }

    /// What is no part of an answer does not begin it, is no progress, and does not end it.
    #[test]
    fn what_is_no_part_of_an_answer_is_no_answer(
        api in prop::sample::select(&APIS[..]),
        foreign in prop::collection::vec(foreign(), 1..4),
        before in 0usize..3,
        done in any::<bool>(),
        finishes in any::<bool>(),
        cuts in prop::collection::vec(1usize..200, 1..6),
    ) {
        let answer: String = (0..before).map(|number| part(api, number)).collect();
        let events: Vec<String> = foreign.iter().map(|of| format!("data: {of}\n\n")).collect();
        let events = events.concat();
        let end = if done { "data: [DONE]\n\n" } else { "" };
        if finishes {
            let whole = format!("{answer}{}{events}{}", part(api, 0), ending(api));
            let outcome = relayed(stream(api), &pieces(whole.as_bytes(), &cuts));
            prop_assert_eq!((outcome.reports, outcome.end), (0, Some(BodyEnd::Complete)), "{}", whole);
            return Ok(());
        }
        let whole = format!("{answer}{events}{end}");
        let outcome = relayed(stream(api), &pieces(whole.as_bytes(), &cuts));
        let is_lost = outcome.reports == 1 || matches!(outcome.end, Some(BodyEnd::Incomplete(_)));
        prop_assert!(is_lost, "{:?} {}", outcome, whole);
        prop_assert_eq!(check_beginning(api, whole.as_bytes(), true).is_err(), before == 0);
        let mut alone = stream(api);
        alone.pass(events.into_bytes().into(), usize::MAX);
        prop_assert!(!alone.has_progress() && alone.may_restart());
    }

    /// The same for answers that are not streamed.
    #[test]
    fn whole_answers_in_the_shape_of_errors_are_failures(
        api in prop::sample::select(&APIS[..]),
        error in prop_oneof![6 => errors(), 2 => errors_beside_choices()],
        spaces in "[ \n\t]{0,4}",
    ) {
        if !api.has_choices() && error.get("choices").is_some() {
            return Ok(());
        }
        let error = error.to_string();
        let body = format!("{spaces}{error}{spaces}");
        let found = check_whole(api, body.as_bytes());
        prop_assert!(found.is_err_and(|of| !of.is_clients), "{}", body);
        for at in [1, body.len() / 2, body.len() - spaces.len() - 1] {
            prop_assert!(check_whole(api, &body.as_bytes()[..at]).is_err());
        }
    }

    /// Answers of real engines are complete, in whatever pieces, and from whichever event on.
    #[test]
    fn answers_of_real_engines_are_complete(
        (api, events) in prop::sample::select(STREAMS),
        again in prop::collection::vec(0usize..100, 0..4),
        comments in any::<bool>(),
        cuts in prop::collection::vec(prop_oneof![1usize..8, 1usize..400], 1..6),
    ) {
        // Some events but the last two come more than once.
        let mut order: Vec<usize> = (0..events.len()).collect();
        for at in again.into_iter().filter(|_| events.len() > 3) {
            let at = 1 + at % (events.len() - 3);
            order.insert(at, order[at]);
        }
        let whole: Vec<String> = order
            .iter()
            .map(|&at| {
                let comment = if comments && at % 2 == 1 { ": keep-alive\n\n" } else { "" };
                format!("{comment}{}\n\n", events[at])
            })
            .collect();
        let outcome = relayed(stream(api), &pieces(whole.concat().as_bytes(), &cuts));
        prop_assert_eq!((outcome.reports, &outcome.end), (0, &Some(BodyEnd::Complete)), "{:?}", whole);
        prop_assert_eq!(outcome.shown.len(), order.len());
        prop_assert!(check_beginning(api, whole.concat().as_bytes(), true).is_ok());
    }
}

/// Streams as engines and services write them. The formats: their documentation and, where they are open, their sources.
const STREAMS: &[(Api, &[&str])] = &[
    // vLLM, with usage in every event.
    (
        Api::Chat,
        &[
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}"#,
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" error"},"logprobs":null,"finish_reason":null,"token_ids":null}],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}"#,
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null}]}"#,
            r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}"#,
            "data: [DONE]",
        ],
    ),
    (
        Api::Completions,
        &[
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"{\"error\":{\"message\":\"x\"}}","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}"#,
            r#"data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","logprobs":{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["error"],"top_logprobs":[{"error":-0.5}]},"finish_reason":"length","stop_reason":null}],"usage":null}"#,
            "data: [DONE]",
        ],
    ),
    // SGLang.
    (
        Api::Chat,
        &[
            r#"data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}"#,
            r#"data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":null,"content":"a","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}"#,
            r#"data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":null,"content":null,"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"stop","matched_stop":128009}],"usage":null}"#,
            "data: [DONE]",
        ],
    ),
    // llama.cpp.
    (
        Api::Chat,
        &[
            r#"data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1,"id":"chatcmpl-1","model":"m","system_fingerprint":"b6000","object":"chat.completion.chunk"}"#,
            r#"data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"a"}}],"created":1,"id":"chatcmpl-1","model":"m","system_fingerprint":"b6000","object":"chat.completion.chunk","prompt_progress":{"total":9,"cache":0,"processed":9,"time_ms":3}}"#,
            r#"data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1,"id":"chatcmpl-1","model":"m","system_fingerprint":"b6000","object":"chat.completion.chunk"}"#,
            r#"data: {"choices":[],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk","usage":{"completion_tokens":1,"prompt_tokens":2,"total_tokens":3},"timings":{"cache_n":0,"prompt_n":2,"prompt_ms":3.5}}"#,
            "data: [DONE]",
        ],
    ),
    // Azure: results of filters first, in events without choices, and behind; offsets of the asynchronous filter.
    (
        Api::Chat,
        &[
            r#"data: {"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[{"prompt_index":0,"content_filter_results":{"hate":{"filtered":false,"severity":"safe"},"error":{"code":"content_filter_error","message":"The contents are not filtered"}}}]}"#,
            r#"data: {"choices":[{"content_filter_results":{},"delta":{"content":"","refusal":null,"role":"assistant"},"finish_reason":null,"index":0,"logprobs":null}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk","obfuscation":"x","system_fingerprint":"fp_1","usage":null}"#,
            r#"data: {"choices":[{"content_filter_results":{"error":{"code":"content_filter_error","message":"The contents are not filtered"}},"delta":{"content":"a"},"finish_reason":null,"index":0,"logprobs":null}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk","system_fingerprint":"fp_1"}"#,
            r#"data: {"choices":[{"content_filter_offsets":{"check_offset":1,"start_offset":1,"end_offset":9},"content_filter_results":{"hate":{"filtered":false}},"finish_reason":null,"index":0}],"created":0,"id":"","model":"","object":""}"#,
            r#"data: {"choices":[{"content_filter_results":{},"delta":{},"finish_reason":"stop","index":0,"logprobs":null}],"created":1,"id":"chatcmpl-1","model":"m","object":"chat.completion.chunk"}"#,
            "data: [DONE]",
        ],
    ),
    // OpenAI, Groq, DeepSeek.
    (
        Api::Chat,
        &[
            r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":"fp","choices":[{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}],"usage":null,"obfuscation":"ab","error":null,"x_groq":{"id":"req_1"}}"#,
            r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","service_tier":"default","system_fingerprint":"fp","choices":[{"index":0,"delta":{"content":null,"reasoning_content":"An exception is an error"},"logprobs":null,"finish_reason":null}],"usage":null,"error":""}"#,
            r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"t","type":"function","function":{"name":"report_error","arguments":"{\"error\":1}"}}]},"logprobs":null,"finish_reason":null}]}"#,
            r#"data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}],"errors":[],"error_code":0,"error_msg":""}"#,
            r#"data: {"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}"#,
            "data: [DONE]",
        ],
    ),
    // vLLM's other APIs; it ends both with `[DONE]` in some versions.
    (
        Api::Messages,
        &[
            "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"content\":[],\"model\":\"m\",\"stop_reason\":null,\"usage\":{\"input_tokens\":3,\"output_tokens\":0}}}",
            "event: ping\ndata: {\"type\": \"ping\"}",
            "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}",
            "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"an error\"}}",
            "event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}",
            "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":1}}",
            "event: message_stop\ndata: {\"type\":\"message_stop\"}",
            "data: [DONE]",
        ],
    ),
    (
        Api::Responses,
        &[
            "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_1\",\"error\":null,\"status\":\"in_progress\"}}",
            "event: keepalive\ndata: {\"type\":\"keepalive\",\"sequence_number\":1}",
            "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"an error\"}",
            "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"error\":null,\"incomplete_details\":null,\"status\":\"completed\"}}",
            "data: [DONE]",
        ],
    ),
];

#[test]
fn whole_answers_of_real_engines_are_answers() {
    for (api, body) in [
        (
            Api::Chat,
            r#"{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"an error","refusal":null},"logprobs":null,"finish_reason":"stop","stop_reason":null,"content_filter_results":{"error":{"code":"x"}}}],"service_tier":null,"usage":{"prompt_tokens":1},"error":null,"kv_transfer_params":null,"prompt_filter_results":[]}"#,
        ),
        // Without the member the engine does not say how its answers end.
        (Api::Chat, r#"{"choices":[{"message":{"content":"a"}}]}"#),
        (
            Api::Chat,
            r#"{"choices":[{"finish_reason":"stop","message":{}},{"finish_reason":null,"message":{}}]}"#,
        ),
        (
            Api::Completions,
            r#"{"id":"c","object":"text_completion","choices":[{"text":"","finish_reason":"load"}],"timings":{},"error":false}"#,
        ),
        (
            Api::Responses,
            r#"{"id":"resp_1","object":"response","status":"completed","error":null,"incomplete_details":null,"output":[],"metadata":{"error":"x"}}"#,
        ),
        (
            Api::Responses,
            r#"{"id":"resp_1","object":"response","status":"queued","background":true,"output":[]}"#,
        ),
        (
            Api::Messages,
            r#"{"id":"m","type":"message","role":"assistant","content":[{"type":"text","text":"an error"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{}}"#,
        ),
        // A fault of the client.
        (
            Api::Messages,
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"x"}}"#,
        ),
        (
            Api::Chat,
            r#"{"type":"https://example.com/too-long","title":"Too long","status":413}"#,
        ),
        (Api::Chat, r#"{"validationException":{"message":"x"}}"#),
    ] {
        assert_eq!(check_whole(api, body.as_bytes()), Ok(()), "{body}");
    }
    for (api, body) in [
        (Api::Chat, r#"{"id":"c","choices":null,"usage":{}}"#),
        (
            Api::Chat,
            r#"{"id":"c","object":"chat.completion","choices":[]}"#,
        ),
        (Api::Chat, r#"{"id":"c","choices":{}}"#),
        (
            Api::Completions,
            r#"{"choices":[{"text":"a","finish_reason":null},{"text":"b","finish_reason":""}]}"#,
        ),
        (Api::Responses, r#"{"id":"resp_1"}"#),
        (
            Api::Messages,
            r#"{"type":"message","content":[],"stop_reason":null}"#,
        ),
        (Api::Messages, "{}"),
        (Api::Chat, ""),
        (Api::Chat, "ok"),
        (Api::Chat, "[]"),
        (Api::Completions, "null"),
    ] {
        assert!(check_whole(api, body.as_bytes()).is_err(), "{body}");
    }
}

/// An error beside the text of an event that is like those before, which is not read otherwise.
#[test]
fn an_error_within_a_known_shape_is_seen() {
    for (api, text) in [
        (Api::Chat, r#""delta":{"content":""#),
        (Api::Completions, r#""text":""#),
    ] {
        let close = if api == Api::Chat { "\"}" } else { "\"" };
        let event = |more: &str| {
            format!(
                "data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,{text} a{more},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
            )
        };
        for (more, fails) in [
            ("", false),
            (" error Error", false),
            ("\\\"error\\\": 1", false),
            ("\\\\", false),
            (
                &format!("{close},\"error\":{{\"code\":500}},\"x\":{{\"y\":\""),
                true,
            ),
            (
                &format!("{close},\"Error\":\"died\",\"x\":{{\"y\":\""),
                true,
            ),
            (
                &format!("{close},\"\\u0065rror\":\"died\",\"x\":{{\"y\":\""),
                true,
            ),
            (
                &format!("{close},\"exception\":\"died\",\"x\":{{\"y\":\""),
                true,
            ),
        ] {
            let last = if more.is_empty() || !fails {
                close.to_owned()
            } else {
                "\"}".to_owned()
            };
            let events = [
                event(close),
                event(close),
                event(&format!("{more}{last}")),
                event(close),
            ];
            let pieces: Vec<&[u8]> = events.iter().map(String::as_bytes).collect();
            let outcome = relayed(stream(api), &pieces);
            assert_eq!(outcome.reports, usize::from(fails), "{}", events[2]);
        }
    }
}
