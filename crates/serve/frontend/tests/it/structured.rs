//! Tools and forms of answers: accepted and refused requests, and their answers.

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::openai::{
    ApiError, Form, Input, MessageStream, RequestParams, ToolChoice, parse_chat, parse_completion,
    parse_messages,
};
use slipstream_frontend::text::{ChatOptions, TextModel};
use slipstream_structured::Tree;

#[allow(clippy::needless_pass_by_value)] // reads as `json!` at every call
fn chat(fields: Value) -> Result<RequestParams, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    parse_chat(body.to_string().as_bytes()).map(|request| request.params)
}

fn form(fields: Value) -> Option<Form> {
    chat(fields).unwrap().form.map(|form| *form)
}

fn form_of(fields: &Value) -> Result<Form, ApiError> {
    chat(fields.clone()).map(|params| *params.form.unwrap())
}

#[allow(clippy::needless_pass_by_value)] // as above
fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

#[test]
fn tools_and_choices_are_understood() {
    let tools = json!([tool("a", json!({"type": "object"})), tool("b", json!({}))]);
    let choice = |choice: Value| {
        form(json!({"tools": tools, "tool_choice": choice}))
            .unwrap()
            .choice
    };
    assert_eq!(choice(json!(null)), ToolChoice::None, "as in vLLM");
    let unsaid = form(json!({"tools": tools})).unwrap().choice;
    assert_eq!(unsaid, ToolChoice::Auto);
    assert_eq!(choice(json!("none")), ToolChoice::None);
    assert_eq!(choice(json!("required")), ToolChoice::Required);
    let named = json!({"type": "function", "function": {"name": "b"}});
    assert_eq!(choice(named), ToolChoice::Named(1));
    let single = form(json!({"tools": tools, "parallel_tool_calls": false})).unwrap();
    assert!(!single.parallel);
    assert_eq!(single.tools[1].name, "b");
    // Requests without a form cost nothing.
    for idle in [
        json!({"tools": null, "tool_choice": "none"}),
        json!({"response_format": {"type": "text"}}),
    ] {
        assert_eq!(form(idle.clone()), None, "{idle}");
    }
}

#[test]
fn forms_that_make_no_sense_are_refused_with_the_field() {
    let f = || tool("f", json!({}));
    for (fields, param, part) in [
        (json!({"tools": 1}), "tools", "array"),
        (json!({"tools": [1]}), "tools.0", "an object"),
        (
            json!({"tools": [{"type": "web_search"}]}),
            "tools.0.type",
            "`function`",
        ),
        (
            json!({"tools": [{"type": "function"}]}),
            "tools.0.function",
            "missing",
        ),
        (
            json!({"tools": [{"type": "function", "function": {}}]}),
            "tools.0.function.name",
            "missing",
        ),
        (
            json!({"tools": [tool("f", json!({"type": "array"}))]}),
            "tools.0.function.parameters",
            "object",
        ),
        (
            json!({"tools": [tool("f", json!({"properties": {"x": {"if": true}}}))]}),
            "tools.0.function.parameters.properties.x",
            "`if`",
        ),
        (
            json!({"tool_choice": "auto"}),
            "tool_choice",
            "needs `tools`",
        ),
        (
            json!({"tools": [f()], "tool_choice": "any"}),
            "tool_choice",
            "`required`",
        ),
        (
            json!({"tools": [f()], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "tool_choice.function.name",
            "no function `g`",
        ),
        (
            json!({"response_format": {}}),
            "response_format.type",
            "missing",
        ),
        (
            json!({"response_format": {"type": "structural_tag"}}),
            "response_format.type",
            "json_schema",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            json!({"structured_outputs": {"grammar": "x"}}),
            "structured_outputs.grammar",
            "not modelled",
        ),
        (
            json!({"structured_outputs": {"choice": ["x"], "regex": "y"}}),
            "structured_outputs.regex",
            "send one",
        ),
        (
            json!({"guided_json": {}, "response_format": {"type": "json_object"}}),
            "response_format",
            "send one",
        ),
        (json!({"guided_json": "{"}), "guided_json", "no JSON"),
        (json!({"guided_choice": []}), "guided_choice", "empty"),
        (
            json!({"guided_regex": "("}),
            "guided_regex",
            "cannot be modelled",
        ),
        (
            json!({"guided_regex": "a\\bc"}),
            "guided_regex",
            "cannot be modelled",
        ),
        (
            json!({"guided_regex": "a$b"}),
            "guided_regex",
            "follows `$`",
        ),
    ] {
        // Objects of `serde_json` are sorted, so fields come in the order of their names.
        let error = chat(fields.clone()).unwrap_err();
        assert_eq!(
            (error.status, error.param.as_deref()),
            (400, Some(param)),
            "{fields}"
        );
        assert!(error.message.contains(part), "{fields}: {}", error.message);
    }
    let body = br#"{"prompt": "x", "tools": [1], "guided_choice": ["a"]}"#;
    let params = parse_completion(body).unwrap().params;
    assert!(
        params.form.unwrap().tools.is_empty(),
        "completions have no tools"
    );
}

#[test]
fn calls_in_the_history_are_rendered_with_their_arguments() {
    let body = json!({"messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": \"x\\n\"}"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]})
    .to_string();
    let request = parse_chat(body.as_bytes()).unwrap();
    let Input::Chat { messages, .. } = &request.input else {
        panic!("not a chat")
    };
    let tools = [Tree::Object(vec![(
        "type".into(),
        Tree::Text("function".into()),
    )])];
    let options = ChatOptions {
        add_generation_prompt: true,
        continue_final_message: false,
        tools: &tools,
        template_kwargs: &[],
        now_unix_s: 0,
    };
    let model = TextModel::builtin();
    let shown = model.render_chat(messages, &options).unwrap();
    assert_eq!(
        shown,
        "<|im_start|>system\nTools, one per line:\n{\"type\": \"function\"}\n<|im_end|>\n\
         <|im_start|>user\nhi<|im_end|>\n\
         <|im_start|>assistant\n\
         <tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"x\\n\"}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call><|im_end|>\n\
         <|im_start|>tool\nsunny<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    let exported = crate::huggingface::exported();
    assert_eq!(exported.render_chat(messages, &options).unwrap(), shown);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    model.encode_chat(messages, &options, &mut ours).unwrap();
    exported
        .encode_chat(messages, &options, &mut theirs)
        .unwrap();
    assert_eq!(ours, theirs);
    // Arguments that are no object count as none, and other members are not shown, as in vLLM.
    for arguments in ["[", "[]", "7", "null"] {
        let body = json!({"messages": [{"role": "assistant", "tool_calls": [
            {"type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}, "id": "c"}]}]})
        .to_string();
        let Input::Chat { messages, .. } = parse_chat(body.as_bytes()).unwrap().input else {
            panic!("no chat");
        };
        let mut shown = String::new();
        messages[0].calls()[0].write(&mut shown);
        assert_eq!(
            shown,
            r#"{"id": "c", "function": {"arguments": {}, "name": "f"}, "type": "function"}"#
        );
    }
}

#[test]
fn tools_are_shown_as_vllm_shows_them() {
    let tools = json!([
        {"extra": 1, "function": {"parameters": {"type": "object"}, "name": "f", "strict": "yes", "x": 2}},
        {"type": "function", "function": {"name": "g", "description": "d"}, "defer_loading": true},
    ]);
    let shown = form(json!({ "tools": tools })).unwrap().tools;
    let shown: Vec<String> = (shown.iter())
        .map(|tool| {
            let mut text = String::new();
            tool.whole.write(&mut text);
            text
        })
        .collect();
    assert_eq!(
        shown,
        [
            r#"{"type": "function", "function": {"name": "f", "description": null, "parameters": {"type": "object"}, "strict": true}}"#,
            r#"{"type": "function", "function": {"name": "g", "description": "d", "parameters": null, "defer_loading": true}, "defer_loading": true}"#,
        ]
    );
    for (function, at) in [
        (
            json!({"name": "f", "description": 1}),
            "tools.0.function.description",
        ),
        (
            json!({"name": "f", "strict": "maybe"}),
            "tools.0.function.strict",
        ),
    ] {
        let error = form_of(&json!({"tools": [{"function": function}]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(at));
    }
}

#[test]
fn messages_of_anthropic_become_a_chat() {
    let body = json!({
        "model": "m", "max_tokens": 9, "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "be "},
            {"type": "text"}, {"type": "text", "text": "brief"}],
        "stop_sequences": ["x"], "stream": true, "temperature": 0.5,
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": ""}]},
            {"role": "system", "content": ""},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1",
                 "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"type": "text", "text": "and now?"},
            ]},
        ],
    })
    .to_string();
    let request = parse_messages(body.as_bytes(), false).unwrap();
    assert!(request.stream);
    let chat: Value = serde_json::from_slice(&request.chat).unwrap();
    assert_eq!(
        chat["messages"],
        json!([
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "wait", "reasoning": "hm", "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "t1", "content": "one\ntwo"},
            {"role": "user", "content": "and now?"},
        ])
    );
    let params = parse_chat(&request.chat).unwrap().params;
    assert!(params.stream && params.running_usage);
    assert_eq!((params.max_tokens, params.stop.len()), (Some(9), 1));
    let form = params.form.unwrap();
    assert_eq!((form.choice, form.parallel), (ToolChoice::Named(0), false));
    for (body, param) in [
        (json!({"messages": []}), "max_tokens"),
        (json!({"max_tokens": 1}), "messages"),
        (
            json!({"max_tokens": 1, "messages": [{"role": "tool", "content": "x"}]}),
            "messages.0.role",
        ),
        (
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document"}]}]}),
            "messages.0.content.0",
        ),
        (
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages.0.content.0.source",
        ),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (json!({"metadata": []}), "metadata"),
        (json!({"stop_sequences": "x"}), "stop_sequences"),
        (
            json!({"output_config": {"effort": "some"}}),
            "output_config.effort",
        ),
        (
            json!({"output_config": {"format": {"type": "x"}}}),
            "output_config.format.type",
        ),
        (
            json!({"tools": [{"name": "f", "input_schema": {}, "strict": "maybe"}]}),
            "tools.0.strict",
        ),
        (
            json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 2}}),
            "tool_choice.disable_parallel_tool_use",
        ),
        (
            json!({"max_tokens": 9, "thinking": {"type": "on"}}),
            "thinking.type",
        ),
        (
            json!({"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": "1024"}}),
            "thinking.budget_tokens",
        ),
    ] {
        let error = parse_messages(body.to_string().as_bytes(), false).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{body}");
    }
}

proptest! {
    /// A message is the same however its chat's events are cut into frames.
    #[test]
    fn a_message_does_not_depend_on_frames(size in 1usize..60) {
        let chunk = |delta: Value, reason: Value| {
            json!({"id": "chatcmpl-1", "model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 2},
                   "choices": [{"delta": delta, "finish_reason": reason}]})
        };
        let call = json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]});
        let rest = json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\": \"\u{e9}\"}"}}]});
        let mut events = Vec::new();
        for data in [
            chunk(json!({"role": "assistant", "content": ""}), json!(null)),
            chunk(json!({"content": "wait \u{1f600}"}), json!(null)),
            chunk(call, json!(null)),
            chunk(rest, json!("tool_calls")),
            json!({"id": "chatcmpl-1", "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}),
        ] {
            events.extend_from_slice(format!("data: {data}\n\n").as_bytes());
        }
        events.extend_from_slice(b"data: [DONE]\n\n");
        let mut stream = MessageStream::default();
        let mut whole = MessageStream::default();
        let mut out = Vec::new();
        for frame in events.chunks(size) {
            stream.take(frame, Some(&mut out));
            whole.take(frame, None);
        }
        let message: Value = serde_json::from_slice(&whole.whole().unwrap()).unwrap();
        prop_assert_eq!(&message["content"][0], &json!({"type": "text", "text": "wait \u{1f600}"}));
        prop_assert_eq!(&message["content"][1]["input"], &json!({"a": "\u{e9}"}));
        prop_assert_eq!(&message["stop_reason"], "tool_use");
        prop_assert_eq!(&message["usage"]["output_tokens"], 7);
        let shown = String::from_utf8(out).unwrap();
        let kinds: Vec<&str> = shown.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        prop_assert_eq!(kinds, [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop",
            "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop",
        ]);
    }
}
