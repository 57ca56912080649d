//! Tools and forms of answers: what is taken, what is refused, and what is made for them.

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::openai::{
    ApiError, Form, Input, MessageStream, RequestParams, TextForm, ToolChoice, parse_chat,
    parse_completion, parse_messages,
};
use slipstream_frontend::structured::{
    Draws, OUT_BYTES_MAX, Tree, check_schema, json_by_schema, text_by_pattern,
};
use slipstream_frontend::text::{ChatOptions, TextModel};

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

/// The schema as a request brings it.
fn schema(schema: &Value) -> Result<Tree, ApiError> {
    let form = form_of(&json!({"guided_json": schema}))?;
    match form.text {
        TextForm::Schema(tree, _) => Ok(tree),
        other => panic!("{other:?}"),
    }
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
    assert_eq!(choice(json!(null)), ToolChoice::Auto);
    assert_eq!(choice(json!("none")), ToolChoice::None);
    assert_eq!(choice(json!("required")), ToolChoice::Required);
    let named = json!({"type": "function", "function": {"name": "b"}});
    assert_eq!(choice(named), ToolChoice::Named(1));
    let single = form(json!({"tools": tools, "parallel_tool_calls": false})).unwrap();
    assert!(!single.parallel);
    assert_eq!(single.tools[1].name, "b");
    // What asks for nothing costs nothing.
    for idle in [
        json!({"tools": []}),
        json!({"tools": null, "tool_choice": "none"}),
        json!({"response_format": {"type": "text"}}),
        json!({"structured_outputs": {}}),
        json!({"structured_outputs": {"json": null, "json_object": false}}),
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
            json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
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
    // What is no call is refused.
    for (arguments, part) in [
        (json!("["), "no JSON"),
        (json!("[]"), "object"),
        (json!(7), "object"),
    ] {
        let body = json!({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": arguments}}]}]})
        .to_string();
        let error = parse_chat(body.as_bytes()).unwrap_err();
        assert_eq!(
            error.param.as_deref(),
            Some("messages.0.tool_calls.0.function.arguments")
        );
        assert!(error.message.contains(part), "{}", error.message);
    }
}

#[test]
fn schemas_that_demand_too_much_are_refused_and_not_computed() {
    let mut deep = json!({"type": "null"});
    for _ in 0..100 {
        deep = json!({"items": deep, "minItems": 1});
    }
    let wide: Vec<Value> = (0..5000).map(|at| json!({"const": at})).collect();
    for refused in [deep, json!({"anyOf": wide})] {
        let error = schema(&refused).unwrap_err();
        assert!(error.message.contains("subschemas"), "{}", error.message);
    }
    // These are small, and what they demand is not, or does not exist.
    let big: serde_json::Map<String, Value> = (0..500)
        .map(|at| (format!("p{at}"), json!({"type": "null"})))
        .collect();
    let many: Vec<Value> = (0..200).map(|_| json!({"$ref": "#/$defs/big"})).collect();
    for (demand, part) in [
        (json!({"$ref": "#"}), "levels"),
        (
            json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
            "levels",
        ),
        (
            json!({"type": "array", "items": {"type": "null"}, "minItems": 100_000}),
            "values",
        ),
        (
            json!({"type": "string", "minLength": 1_000_000}),
            "minLength",
        ),
        (
            json!({"$defs": {"big": {"properties": big}}, "allOf": many}),
            "too many",
        ),
        (json!({"$ref": "#/$defs/none"}), "points to nothing"),
        (
            json!({"type": "integer", "minimum": 3, "maximum": 2}),
            "bounds",
        ),
        (json!({"enum": []}), "enum"),
        (json!(false), "nothing satisfies"),
        (
            json!({"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": true}),
            "unique",
        ),
        (
            json!({"items": {"pattern": "[a-z]{2}|".repeat(300)}, "minItems": 500}),
            "too often",
        ),
        (json!({"allOf": [{"const": 1}, {"const": 2}]}), "const"),
    ] {
        let tree = schema(&demand).unwrap();
        let error = json_by_schema(&tree, &mut Draws::new(1)).unwrap_err();
        assert!(error.message.contains(part), "{}", error.message);
    }
    let error = text_by_pattern("((a{100}){100}){100}", &mut Draws::new(1)).unwrap_err();
    assert!(
        error.contains("more than") || error.contains("repeats"),
        "{error}"
    );
}

fn any_tree() -> impl Strategy<Value = Value> {
    let names = prop::sample::select(vec![
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "items",
        "anyOf",
        "allOf",
        "$ref",
        "minItems",
        "maxItems",
        "minLength",
        "minimum",
        "maximum",
        "multipleOf",
        "pattern",
        "additionalProperties",
        "minProperties",
        "prefixItems",
        "format",
        "uniqueItems",
    ]);
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        (-5i64..50).prop_map(Value::from),
        prop::sample::select(vec![
            "object", "array", "string", "integer", "null", "#", "a+", "date"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names.clone().prop_map(str::to_owned), inner, 0..5)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Whatever a client sends as a schema: an error, or JSON of a bounded size, the same each time.
    #[test]
    fn no_schema_is_too_odd(value in any_tree(), seed in any::<u64>()) {
        if let Ok(tree) = schema(&value) {
            prop_assert!(check_schema(&tree).is_ok());
            let made = json_by_schema(&tree, &mut Draws::new(seed));
            prop_assert_eq!(&made, &json_by_schema(&tree, &mut Draws::new(seed)));
            if let Ok(json) = made {
                prop_assert!(json.len() < 4 * OUT_BYTES_MAX);
                prop_assert!(serde_json::from_str::<Value>(&json).is_ok(), "{}", json);
            }
        }
    }

    #[test]
    fn integers_keep_to_their_bounds(low in -1000i64..1000, span in 0i64..50, step in 1i64..9) {
        let tree = schema(&json!({
            "type": "integer", "minimum": low, "maximum": low + span, "multipleOf": step,
        })).unwrap();
        match json_by_schema(&tree, &mut Draws::new(7)) {
            Ok(text) => {
                let number: i64 = text.parse().unwrap();
                prop_assert!((low..=low + span).contains(&number) && number % step == 0, "{}", text);
            }
            Err(_) => prop_assert!((low..=low + span).all(|n| n % step != 0)),
        }
    }
}

#[test]
fn messages_of_anthropic_become_a_chat() {
    let body = json!({
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be brief"}],
        "stop_sequences": ["x"], "stream": true, "temperature": 0.5,
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": "hi"},
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
            {"role": "assistant", "content": "wait", "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
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
            json!({"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages.0.content.0",
        ),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
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
