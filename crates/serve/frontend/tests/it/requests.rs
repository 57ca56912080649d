//! Requests as clients send them: accepted ones, and errors of others.

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::openai::{
    ApiError, ApiRequest, CompletionApi, Input, LogprobsWish, PromptInput, TokenizeInput,
    parse_chat, parse_completion, parse_detokenize, parse_tokenize,
};
use slipstream_structured::Tree;

fn parse(kind: CompletionApi, body: &str) -> Result<ApiRequest<'_>, ApiError> {
    match kind {
        CompletionApi::Chat => parse_chat(body.as_bytes()),
        CompletionApi::Completion => parse_completion(body.as_bytes()),
    }
}

/// The smallest request to `kind`, with `fields` in it.
#[allow(clippy::needless_pass_by_value)] // reads as `json!` at every call
fn body(kind: CompletionApi, fields: Value) -> String {
    let mut body = match kind {
        CompletionApi::Chat => {
            json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        }
        CompletionApi::Completion => json!({"model": "m", "prompt": "hi"}),
    };
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body.to_string()
}

/// `fields` in a request to `kind` are refused with 400, naming `param`, and saying `part`.
fn check_refused(kind: CompletionApi, fields: Value, param: &str, part: &str) {
    let body = body(kind, fields);
    let error = parse(kind, &body).expect_err(&body);
    assert_eq!(error.status, 400, "{body}");
    assert_eq!(error.param.as_deref(), Some(param), "{body}: {error:?}");
    assert!(
        error.message.contains(part),
        "{body}: {error:?} should say {part:?}"
    );
}

use CompletionApi::{Chat, Completion};

/// Texts, booleans and real numbers in place of numbers and booleans, with the values that pydantic's conversion
/// table gives them in lax mode; `None`: refused.
#[test]
fn values_are_converted_as_pydantic_does() {
    let numbers = [
        (json!("3"), Some(3)),
        (json!(" 3\n"), Some(3)),
        (json!("+3"), Some(3)),
        (json!("3.0"), Some(3)),
        (json!("3.00"), Some(3)),
        (json!("1_0"), Some(10)),
        (json!("007"), Some(7)),
        (json!(3.0), Some(3)),
        (json!(true), Some(1)),
        (json!(""), None),
        (json!("3.5"), None),
        (json!("3."), None),
        (json!("1e1"), None),
        (json!("_3"), None),
        (json!("1__0"), None),
        (json!("0x3"), None),
        (json!("three"), None),
        (json!(3.5), None),
        (json!([3]), None),
        (json!({}), None),
    ];
    for (value, expected) in numbers {
        let body = body(Completion, json!({"max_tokens": value}));
        let parsed = parse(Completion, &body).ok();
        let number = parsed.and_then(|request| request.params.max_tokens);
        assert_eq!(number, expected, "{body}");
    }
    let truths = [
        (json!(1), Some(true)),
        (json!(0), Some(false)),
        (json!(1.0), Some(true)),
        (json!(0.0), Some(false)),
        (json!("true"), Some(true)),
        (json!("TRUE"), Some(true)),
        (json!("on"), Some(true)),
        (json!("Yes"), Some(true)),
        (json!("y"), Some(true)),
        (json!("t"), Some(true)),
        (json!("1"), Some(true)),
        (json!("false"), Some(false)),
        (json!("Off"), Some(false)),
        (json!("no"), Some(false)),
        (json!("n"), Some(false)),
        (json!("f"), Some(false)),
        (json!("0"), Some(false)),
        (json!(2), None),
        (json!(0.5), None),
        (json!("maybe"), None),
        (json!(" true"), None),
        (json!(""), None),
        (json!([]), None),
    ];
    for (value, expected) in truths {
        let body = body(Chat, json!({"stream": value}));
        let stream = parse(Chat, &body).ok().map(|request| request.params.stream);
        assert_eq!(stream, expected, "{body}");
    }
    let greedy = [
        (json!({"temperature": 0}), true),
        (json!({"temperature": "0"}), true),
        (json!({"temperature": false}), true),
        (json!({"temperature": "1e-6"}), true),
        (json!({"temperature": 0.01}), false),
        (json!({"top_k": 1}), true),
        (json!({"top_k": "1"}), true),
        (json!({"top_k": 2}), false),
        (json!({"top_p": 1e-6}), true),
        (json!({"top_p": "0.9"}), false),
        (json!({"min_p": 1}), true),
        (json!({}), false),
    ];
    for (fields, expected) in greedy {
        let body = body(Chat, fields);
        assert_eq!(
            parse(Chat, &body).unwrap().params.greedy,
            expected,
            "{body}"
        );
    }
}

/// As Python's `json` reads them: integers of up to 4,300 digits.
#[test]
fn long_integers_are_read_as_far_as_python_reads_them() {
    let body = |digits: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{"a":{digits},"b":[-{digits}]}}}}"#
        )
    };
    for len in [20, 309, 400, 4300] {
        let digits = "9".repeat(len);
        let body = body(&digits);
        let Input::Chat {
            template_kwargs, ..
        } = parse(Chat, &body).unwrap().input
        else {
            panic!("a chat");
        };
        let shown: Vec<String> = template_kwargs
            .iter()
            .map(|(_, value)| String::from_utf8(value.to_json()).unwrap())
            .collect();
        assert_eq!(shown, [digits.clone(), format!("[-{digits}]")]);
    }
    for (wrong, part) in [
        ("9".repeat(4301), "more than 4300 digits"),
        (format!("0{}", "9".repeat(400)), "not valid JSON"),
        ("1e400".into(), "out of range"),
        (format!("{}x", "9".repeat(400)), "not valid JSON"),
    ] {
        let error = parse(Chat, &body(&wrong)).unwrap_err();
        assert!(error.message.contains(part), "{}", error.message);
    }
    let long = format!(r#"{{"prompt":"x","seed":{}}}"#, "9".repeat(400));
    assert_eq!(
        parse(Completion, &long).unwrap_err().param.as_deref(),
        Some("seed")
    );
}

#[test]
fn what_vllm_takes_is_taken() {
    let parts = json!([
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
        {"type": "thinking", "thinking": "d"},
        {"type": "text", "text": null},
        "e",
    ]);
    let fields = json!({
        "messages": [{"role": "user", "content": parts}, {"role": "user"}],
        "user": "", "request_id": "",
    });
    let body = body(Chat, fields);
    let marked = format!("\u{feff}{body}");
    let request = parse(Chat, &marked).expect(&body);
    let Input::Chat { messages, .. } = &request.input else {
        panic!("a chat");
    };
    assert_eq!(messages[0].content, "a\nb\nc\nd\ne");
    assert_eq!(messages[1].content, "");
    let params = &request.params;
    assert!(params.form.is_none() && params.user.is_none() && params.request_id.is_none());
    for refused in [
        r#"{"prompt": "x", "logprobs": "1"}"#,
        "\u{feff}\u{feff}{\"prompt\": \"x\"}",
    ] {
        assert!(parse(Completion, refused).is_err(), "{refused}");
    }
}

#[test]
fn messages_are_read_as_by_vllm() {
    let fields = json!({
        "model": "",
        "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1\nrules"},
            {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: 2"}, "", "b"]},
            {"role": "user", "content": "x-anthropic-billing-header\nq", "tool_calls": 1, "tool_call_id": 1},
            {"role": "assistant", "content": ["", "a", "", "b"]},
        ],
        "reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "high"},
        "logit_bias": {" 5 ": -1e9, "1_0": "200", "+7": 0},
    });
    let body = body(Chat, fields);
    let request = parse(Chat, &body).expect(&body);
    assert_eq!(request.model, None);
    let Input::Chat {
        messages,
        template_kwargs,
        ..
    } = &request.input
    else {
        panic!("a chat");
    };
    let texts: Vec<&str> = messages.iter().map(|message| &*message.content).collect();
    assert_eq!(
        texts,
        ["rules", "b", "x-anthropic-billing-header\nq", "a\nb"]
    );
    assert_eq!(messages[0].parts, None);
    assert_eq!(messages[1].parts, Some(vec![0..0, 0..1]));
    assert_eq!(messages[3].parts, Some(vec![0..0, 0..1, 1..1, 2..3]));
    assert!(messages[2].tools.is_none());
    let kwargs: Vec<(&str, &Tree)> = (template_kwargs.iter())
        .map(|(name, value)| (name.as_str(), value))
        .collect();
    let effort = Tree::Text("none".into());
    let thinks = Tree::Bool(false);
    assert_eq!(
        kwargs,
        [("enable_thinking", &thinks), ("reasoning_effort", &effort)]
    );
    let limits = request.params.vocab.unwrap();
    assert_eq!((limits.banned, limits.forced), (vec![5], vec![10]));
    for refused in [
        json!({"cache_salt": "a/b"}),
        json!({"cache_salt": "x".repeat(129)}),
        json!({"reasoning_effort": "some"}),
        json!({"top_k": "1e2"}),
        json!({"logit_bias": {"5.0": 1}}),
    ] {
        let body = self::body(Chat, refused);
        assert!(parse(Chat, &body).is_err(), "{body}");
    }
}

#[test]
fn everything_that_is_modelled_is_understood() {
    let body = body(
        Chat,
        json!({
            "messages": [
                {"role": "system", "content": "be\nbrief", "name": "ops"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": null},
            ],
            "stream": true, "stream_options": {"include_usage": true}, "n": 3,
            "max_tokens": 7, "max_completion_tokens": 9, "min_tokens": 2, "ignore_eos": true,
            "stop": ["a", "b"], "stop_token_ids": [5, 6], "include_stop_str_in_output": true,
            "seed": -1, "logprobs": true, "top_logprobs": 4, "priority": -3, "user": "u",
            "request_id": "r", "cache_salt": "s", "add_generation_prompt": false,
            "chat_template_kwargs": {"thinking": false},
            "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.5, "presence_penalty": -2,
            "logit_bias": {"5": -100}, "frequency_penalty": 2.0, "repetition_penalty": 1.1, "best_of": 3,
            "somebody_elses_field": {"deep": [1, {"er": null}]},
        }),
    );
    let request = parse(Chat, &body).unwrap();
    assert_eq!(request.model.as_deref(), Some("m"));
    let Input::Chat {
        messages,
        add_generation_prompt,
        continue_final_message,
        template_kwargs,
    } = &request.input
    else {
        panic!("{request:?}")
    };
    let said: Vec<_> = messages.iter().map(|m| (&*m.role, &*m.content)).collect();
    assert_eq!(
        said,
        [
            ("system", "be\nbrief"),
            ("user", "one\ntwo"),
            ("assistant", "")
        ]
    );
    assert_eq!(messages[0].name.as_deref(), Some("ops"));
    assert!(!add_generation_prompt && !continue_final_message);
    assert_eq!(
        template_kwargs,
        &[("thinking".to_owned(), Tree::Bool(false))]
    );
    let params = &request.params;
    assert!(params.stream && params.include_usage && params.ignore_eos);
    assert_eq!(
        (params.n, params.max_tokens, params.min_tokens),
        (3, Some(9), 2)
    );
    assert_eq!(params.stop, ["a", "b"]);
    assert_eq!(params.stop_token_ids, [5, 6]);
    assert!(params.include_stop_str_in_output && !params.add_special_tokens);
    assert_eq!((params.seed, params.priority), (Some(u64::MAX), -3));
    assert_eq!(params.logprobs, Some(LogprobsWish { top: 4 }));
    assert_eq!(params.user.as_deref(), Some("u"));
    assert_eq!(params.request_id.as_deref(), Some("r"));
    assert_eq!(params.cache_salt.as_deref(), Some("s"));
}

#[test]
fn prompts_come_as_text_as_tokens_and_in_batches() {
    let prompts = |prompt: Value| {
        let body = body(Completion, json!({"prompt": prompt}));
        let Input::Prompts(prompts) = parse(Completion, &body).unwrap().input else {
            panic!("not prompts")
        };
        prompts
            .into_iter()
            .map(|prompt| match prompt {
                PromptInput::Text(text) => json!(text),
                PromptInput::Tokens(tokens) => json!(tokens),
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(prompts(json!("a\tb")), [json!("a\tb")]);
    assert_eq!(prompts(json!(["a", "b"])), [json!("a"), json!("b")]);
    assert_eq!(
        prompts(json!([1, 2, 4_294_967_295_u32])),
        [json!([1, 2, 4_294_967_295_u32])]
    );
    assert_eq!(prompts(json!([[1, 2], [3]])), [json!([1, 2]), json!([3])]);
}

#[test]
fn whole_numbers_may_be_written_as_real_ones() {
    let body = r#"{"prompt": [[5.0, 6], [1e3]], "max_tokens": 100.0, "min_tokens": 0.0, "n": 2e0, "seed": -3.0, "priority": -1.0,
                   "logprobs": 1.0, "stop_token_ids": [7.0, 1e1]}"#;
    let real = parse_completion(body.as_bytes()).unwrap();
    let body = r#"{"prompt": [[5, 6], [1000]], "max_tokens": 100, "min_tokens": 0, "n": 2, "seed": -3, "priority": -1,
                   "logprobs": 1, "stop_token_ids": [7, 10]}"#;
    let whole = parse_completion(body.as_bytes()).unwrap();
    assert_eq!(real, whole);
    // Above 2^53 real numbers are not exact.
    check_refused(
        Completion,
        json!({"seed": 1e17}),
        "seed",
        "must be a whole number",
    );
    check_refused(Completion, json!({"n": -1.0}), "n", "`n` is -1;");
}

#[test]
fn defaults_are_those_of_openai_and_vllm() {
    let body = body(Completion, json!({}));
    let params = parse(Completion, &body).unwrap().params;
    assert_eq!(
        (params.n, params.max_tokens, params.min_tokens),
        (1, Some(16), 0)
    );
    assert!(!params.stream && !params.ignore_eos && params.add_special_tokens);
    let body = self::body(
        Chat,
        json!({"max_tokens": null, "tools": null, "seed": null}),
    );
    let params = parse(Chat, &body).unwrap().params;
    assert_eq!((params.max_tokens, params.seed), (None, None));
    assert_eq!(params.logprobs, None);
}

#[test]
fn wrong_values_are_refused_with_the_field_and_the_remedy() {
    for kind in [Chat, Completion] {
        for (fields, param, part) in [
            (
                json!({"model": 3}),
                "model",
                "must be a string, not a number",
            ),
            (
                json!({"stream": "maybe"}),
                "stream",
                "must be true or false, not a string",
            ),
            (json!({"n": 0}), "n", "is 0; it must be from 1 to 128"),
            (json!({"n": 129}), "n", "from 1 to 128"),
            (json!({"n": 1.5}), "n", "is 1.5; it must be a whole number"),
            (
                json!({"max_tokens": 0}),
                "max_tokens",
                "is 0; it must be from 1",
            ),
            (json!({"max_tokens": -5}), "max_tokens", "is -5"),
            (
                json!({"max_tokens": 10_000_000_000_u64}),
                "max_tokens",
                "is 10000000000",
            ),
            (
                json!({"max_tokens": "ten"}),
                "max_tokens",
                "must be a whole number, not a string",
            ),
            (
                json!({"max_tokens": 4, "min_tokens": 5}),
                "min_tokens",
                "`max_tokens` allows",
            ),
            (json!({"min_tokens": -1}), "min_tokens", "is -1"),
            (json!({"temperature": -0.1}), "temperature", "from 0 to 2"),
            (json!({"temperature": 2.1}), "temperature", "from 0 to 2"),
            (json!({"temperature": 0, "n": 2}), "n", "would be the same"),
            (
                json!({"temperature": "hot"}),
                "temperature",
                "must be a number, not a string",
            ),
            (json!({"top_p": 0}), "top_p", "above 0 and up to 1"),
            (json!({"top_p": 1.01}), "top_p", "above 0 and up to 1"),
            (json!({"top_k": -2}), "top_k", "from -1"),
            (json!({"min_p": 2}), "min_p", "from 0 to 1"),
            (
                json!({"presence_penalty": 2.5}),
                "presence_penalty",
                "from -2 to 2",
            ),
            (
                json!({"frequency_penalty": -2.5}),
                "frequency_penalty",
                "from -2 to 2",
            ),
            (
                json!({"repetition_penalty": 0}),
                "repetition_penalty",
                "above 0",
            ),
            (json!({"stop": ""}), "stop", "empty string"),
            (
                json!({"stop": ["a", 1]}),
                "stop.1",
                "must be a string, not a number",
            ),
            (
                json!({"stop": {"a": 1}}),
                "stop",
                "a string or an array of strings, not an object",
            ),
            (json!({"stop": vec!["x"; 65]}), "stop", "at most 64"),
            (json!({"stop": "x".repeat(1025)}), "stop", "at most 1024"),
            (
                json!({"stop_token_ids": [1, -1]}),
                "stop_token_ids.1",
                "is -1",
            ),
            (
                json!({"stop_token_ids": "x"}),
                "stop_token_ids",
                "an array of token ids",
            ),
            (json!({"seed": 1.5}), "seed", "2^63 - 1"),
            (
                json!({"seed": 9_223_372_036_854_775_808_u64}),
                "seed",
                "2^63 - 1",
            ),
            (
                json!({"stream_options": {"include_usage": true}}),
                "stream_options",
                "needs `stream: true`",
            ),
            (
                json!({"stream": true, "stream_options": true}),
                "stream_options",
                "must be an object",
            ),
            (
                json!({"stream": true, "stream_options": {"include_usage": 2}}),
                "stream_options.include_usage",
                "true or false",
            ),
            (
                json!({"stream": true, "stream_options": {"continuous_usage_stats": "maybe"}}),
                "stream_options.continuous_usage_stats",
                "true or false",
            ),
            (
                json!({"priority": 3_000_000_000_u32}),
                "priority",
                "from -2147483648 to 2147483647",
            ),
            (json!({"user": "x".repeat(513)}), "user", "at most 512"),
            (json!({"cache_salt": ""}), "cache_salt", "is empty"),
            (
                json!({"cache_salt": "x".repeat(513)}),
                "cache_salt",
                "513 bytes",
            ),
            (json!({"best_of": 2}), "best_of", "`n` is 1"),
        ] {
            check_refused(kind, fields, param, part);
        }
    }
    for (fields, param, part) in [
        (json!({"messages": null}), "messages", "is missing"),
        (json!({"messages": []}), "messages", "is empty"),
        (
            json!({"messages": "hi"}),
            "messages",
            "an array of messages, not a string",
        ),
        (
            json!({"messages": [5]}),
            "messages.0",
            "must be an object, not a number",
        ),
        (
            json!({"messages": [{"content": "x"}]}),
            "messages.0.role",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "", "content": "x"}]}),
            "messages.0.role",
            "is empty",
        ),
        (
            json!({"messages": [{"role": 1, "content": "x"}]}),
            "messages.0.role",
            "must be a string",
        ),
        (
            json!({"messages": [{"role": "user", "content": 7}]}),
            "messages.0.content",
            "not a number",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
            "messages.0.content.0.type",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
            "messages.0.content.0.text",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "user", "content": [
                {"type": "text", "text": "see"},
                {"type": "video_url", "video_url": {"url": "data:"}},
            ]}]}),
            "messages.0.content.1",
            "`video_url`; only parts with text and images",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
            "messages.1.tool_calls.0.function.name",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}]}),
            "messages.0.tool_calls.0.function.arguments",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}]}),
            "messages.0.tool_calls.0.function.arguments",
            "must be a string",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": ""}}]}]}),
            "messages.0.tool_calls.0.id",
            "is missing",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]}),
            "messages.0.tool_calls.0.type",
            "is missing",
        ),
        (json!({"tools": []}), "tools", "is empty"),
        (
            json!({"tools": [], "tool_choice": "none"}),
            "tools",
            "is empty",
        ),
        (
            json!({
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "tool", "function": {"name": "f"}},
            }),
            "tool_choice.type",
            "must be `function`",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}),
            "response_format.json_schema.name",
            "is missing",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}}),
            "response_format.json_schema.name",
            "must be a string",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 2}}}),
            "response_format.json_schema.strict",
            "true or false",
        ),
        (
            json!({"response_format": {"type": "text", "json_schema": {"name": "n", "description": ["x"]}}}),
            "response_format.json_schema.description",
            "must be a string",
        ),
        (json!({"logprobs": 2}), "logprobs", "true or false"),
        (
            json!({"top_logprobs": 2}),
            "top_logprobs",
            "needs `logprobs: true`",
        ),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "from 0 to 20",
        ),
        (
            json!({"continue_final_message": true}),
            "continue_final_message",
            "`\"add_generation_prompt\": false`",
        ),
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
            "`\"add_generation_prompt\": false`",
        ),
        (
            json!({
                "continue_final_message": true, "add_generation_prompt": false,
                "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}]}],
            }),
            "continue_final_message",
            "calls tools",
        ),
        (
            json!({"prompt_logprobs": 1, "stream": true}),
            "prompt_logprobs",
            "`stream: false`",
        ),
        (
            json!({"prompt_logprobs": 21}),
            "prompt_logprobs",
            "from 0 to 20",
        ),
        (
            json!({"allowed_token_ids": ["a"]}),
            "allowed_token_ids.0",
            "a whole number",
        ),
        (
            json!({"allowed_token_ids": []}),
            "allowed_token_ids",
            "is empty",
        ),
        (
            json!({"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            ]}]}),
            "messages.0.content.0.image_url",
            "`https://`",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
            "messages.0.content.0",
            "parts with text and images",
        ),
        (
            json!({"logit_bias": {"5": "nan"}}),
            "logit_bias.5",
            "from -100",
        ),
        (json!({"logit_bias": {"a": 1}}), "logit_bias.a", "token ids"),
        (
            json!({"chat_template_kwargs": 1}),
            "chat_template_kwargs",
            "must be an object",
        ),
        (
            json!({"max_completion_tokens": 0}),
            "max_completion_tokens",
            "from 1",
        ),
    ] {
        check_refused(Chat, fields, param, part);
    }
    for (fields, param, part) in [
        (json!({"prompt": null}), "prompt", "is missing"),
        (json!({"prompt": ""}), "prompt", "at least one token"),
        (json!({"prompt": []}), "prompt", "is empty"),
        (
            json!({"prompt": ["a", ""]}),
            "prompt.1",
            "at least one token",
        ),
        (
            json!({"prompt": [[1], []]}),
            "prompt.1",
            "at least one token",
        ),
        (json!({"prompt": {"a": 1}}), "prompt", "not an object"),
        (json!({"prompt": [1, -1]}), "prompt.1", "is -1"),
        (json!({"prompt": [1, 0.5]}), "prompt.1", "whole number"),
        (
            json!({"prompt": [1, "a"]}),
            "prompt.1",
            "must be a whole number, not a string",
        ),
        (
            json!({"prompt": [[1, "a"]]}),
            "prompt.0.1",
            "must be a whole number, not a string",
        ),
        (json!({"prompt": [null]}), "prompt.0", "not null"),
        (
            json!({"prompt": ["a", "b", [3]]}),
            "prompt.2",
            "mixes texts and lists",
        ),
        (json!({"prompt": [[3], "a"]}), "prompt.1", "mixes texts"),
        (
            json!({"prompt": vec!["a"; 20], "n": 100}),
            "prompt",
            "make 2000 choices",
        ),
        (
            json!({"logprobs": "1"}),
            "logprobs",
            "a whole number, not a string",
        ),
        (json!({"logprobs": 21}), "logprobs", "from 0 to 20"),
        (json!({"suffix": "end"}), "suffix", "not supported"),
    ] {
        check_refused(Completion, fields, param, part);
    }
}

#[test]
fn what_is_not_modelled_is_refused_unless_it_asks_for_nothing() {
    for (asks, idle) in [
        (json!({"functions": [{}]}), json!({"functions": []})),
        (json!({"bad_words": ["x"]}), json!({"bad_words": []})),
        (
            json!({"modalities": ["text", "audio"]}),
            json!({"modalities": ["text"]}),
        ),
        (
            json!({"guided_grammar": "root ::= \"x\""}),
            json!({"guided_grammar": null}),
        ),
        (
            json!({"use_beam_search": true}),
            json!({"use_beam_search": false}),
        ),
    ] {
        let param = asks.as_object().unwrap().keys().next().unwrap().clone();
        let text = body(Chat, asks);
        let error = parse(Chat, &text).unwrap_err();
        assert_eq!(error.code, Some("unsupported_parameter"), "{text}");
        assert_eq!(error.param, Some(param), "{text}");
        let text = body(Chat, idle);
        assert!(parse(Chat, &text).is_ok(), "{text}");
    }
}

#[test]
fn a_broken_body_is_told_where_it_breaks() {
    for (body, part) in [
        (
            &b"{\"messages\": [{\"role\": \"user\",\n \"content\": }]}"[..],
            "line 2 column 13",
        ),
        (b"{\"messages\"", "EOF"),
        (b"", "EOF"),
        (b"[]", "expected a JSON object"),
        (b"{} {}", "trailing characters at line 1 column 4"),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}",
            "byte 43 cannot stand there",
        ),
        (b"{\"seed\": 1e999}", "number out of range"),
        (b"{\"user\": \"\\ud800\"}", "not valid JSON"),
    ] {
        let error = parse_chat(body).unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, None),
            "{error:?}"
        );
        assert!(
            error.message.contains(part),
            "{:?} should say {part:?}",
            error.message
        );
    }
    let deep = format!("{{\"messages\": {}", "[".repeat(100_000));
    assert!(
        parse_chat(deep.as_bytes())
            .unwrap_err()
            .message
            .contains("recursion limit")
    );
    // Values cost more memory than their text: many of them are refused.
    let many = format!("{{\"messages\": [{}[]]}}", "[],".repeat(300_000));
    assert!(
        parse_chat(many.as_bytes())
            .unwrap_err()
            .message
            .contains("more than 262144 values")
    );
    // Token ids cost no more than their text.
    let ids = format!("{{\"prompt\": [{}1]}}", "1,".repeat(300_000));
    assert!(parse_completion(ids.as_bytes()).is_ok());
}

#[test]
fn a_field_sent_twice_counts_as_its_last_value() {
    let body =
        r#"{"messages": [], "messages": [{"role": "user", "content": "x"}], "n": 2, "n": 3}"#;
    // The first `messages` is wrong all the same: it was read.
    assert_eq!(
        parse(Chat, body).unwrap_err().param.as_deref(),
        Some("messages")
    );
    let body = r#"{"prompt": "a", "prompt": "b", "n": 2, "n": 3}"#;
    let request = parse(Completion, body).unwrap();
    assert_eq!(request.params.n, 3);
    assert_eq!(
        request.input,
        Input::Prompts(vec![PromptInput::Text("b".into())])
    );
}

#[test]
fn tokenize_takes_a_prompt_or_a_chat() {
    let parsed =
        parse_tokenize(br#"{"model": "m", "prompt": "x", "return_token_strs": true}"#).unwrap();
    assert_eq!(parsed.input, TokenizeInput::Prompt("x".into()));
    assert!(parsed.add_special_tokens && parsed.return_token_strs);
    let parsed = parse_tokenize(
        br#"{"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": false}"#,
    )
    .unwrap();
    assert!(!parsed.add_special_tokens);
    assert!(matches!(
        parsed.input,
        TokenizeInput::Chat {
            add_generation_prompt: false,
            ..
        }
    ));
    let parsed = parse_tokenize(
        br#"{"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}],
            "tools": [{"function": {"name": "f"}, "type": "function"}],
            "chat_template_kwargs": {"b": {"z": 1, "a": 2}, "a": true}, "chat_template": "t"}"#,
    )
    .unwrap();
    let TokenizeInput::Chat {
        messages,
        tools,
        template_kwargs,
        template,
        ..
    } = &parsed.input
    else {
        panic!("{parsed:?}");
    };
    assert_eq!(messages[0].reasoning.as_deref(), Some("hm"));
    assert_eq!(tools[0].get("type"), Some(&Tree::Text("function".into())));
    let names: Vec<&str> = template_kwargs
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["b", "a"]);
    assert!(matches!(&template_kwargs[0].1, Tree::Object(members) if members[0].0 == "z"));
    assert_eq!(template.as_deref(), Some("t"));
    for (body, param) in [
        ("{}", "prompt"),
        (r#"{"prompt": 1}"#, "prompt"),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}"#,
            "tools.0.function",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": []}"#,
            "chat_template_kwargs",
        ),
        (
            r#"{"prompt": 1, "messages": [{"role": "user", "content": 1}]}"#,
            "messages.0.content",
        ),
        (
            r#"{"prompt": "x", "add_special_tokens": 2}"#,
            "add_special_tokens",
        ),
    ] {
        assert_eq!(
            parse_tokenize(body.as_bytes())
                .unwrap_err()
                .param
                .as_deref(),
            Some(param)
        );
    }
    // As vLLM reads the union of its classes: a chat if it is one, and otherwise the prompt.
    let chat = r#"{"prompt": "x", "messages": [{"role": "user", "content": "y"}]}"#;
    let chat = parse_tokenize(chat.as_bytes()).unwrap();
    assert!(matches!(chat.input, TokenizeInput::Chat { .. }));
    for beside in [
        r#""messages": 1"#,
        r#""tools": 1"#,
        r#""add_generation_prompt": []"#,
    ] {
        let body = format!(r#"{{"prompt": "x", {beside}}}"#);
        let prompt = parse_tokenize(body.as_bytes()).unwrap();
        assert!(matches!(prompt.input, TokenizeInput::Prompt(text) if text == "x"));
    }
    assert_eq!(
        parse_detokenize(br#"{"tokens": [3, 4]}"#).unwrap().tokens,
        [3, 4]
    );
    let none = parse_detokenize(br#"{"tokens": []}"#).unwrap();
    assert!(none.tokens.is_empty());
    for (body, param) in [("{}", "tokens"), (r#"{"tokens": [1, -2]}"#, "tokens.1")] {
        assert_eq!(
            parse_detokenize(body.as_bytes())
                .unwrap_err()
                .param
                .as_deref(),
            Some(param)
        );
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["text", "user", "none"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(
                prop::sample::select(vec!["role", "content", "type", "text", "x"]),
                inner,
                0..4
            )
            .prop_map(|map| {
                Value::Object(map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
            }),
        ]
    })
}

proptest! {
    /// For any content of a field, the answer is a request or a 400 that has a reason.
    #[test]
    fn no_value_of_a_field_is_too_odd(
        name in prop::sample::select(vec![
            "messages", "prompt", "stop", "stop_token_ids", "stream_options", "n", "logprobs", "seed",
            "max_tokens", "tools", "response_format", "logit_bias", "chat_template_kwargs", "priority",
        ]),
        value in any_json(),
    ) {
        for kind in [Chat, Completion] {
            let body = body(kind, json!({name: value.clone()}));
            if let Err(error) = parse(kind, &body) {
                prop_assert_eq!(error.status, 400);
                prop_assert!(!error.message.is_empty());
                let param = error.param.unwrap_or_default();
                prop_assert!(param.starts_with(name), "{} for {}", param, body);
            }
        }
    }

    #[test]
    fn no_bytes_are_too_odd(
        start in prop::sample::select(vec!["", "{", "{\"messages\":", "{\"prompt\":[", "{\"prompt\":\""]),
        rest in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let bytes = [start.as_bytes(), &rest].concat();
        for result in [parse_chat(&bytes), parse_completion(&bytes)] {
            if let Err(error) = result {
                prop_assert_eq!(error.status, 400);
            }
        }
    }
}
