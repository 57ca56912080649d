//! Tools and forms of answers: accepted and refused requests, and their answers.

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::openai::{
    ApiError, Form, Input, MessageStream, RequestParams, TextForm, ToolChoice, parse_chat,
    parse_completion, parse_messages,
};
use slipstream_frontend::structured::{
    OUT_BYTES_MAX, Rng, Tree, check_schema, json_by_schema, text_by_pattern,
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
        json!({"tools": []}),
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
    for arguments in [json!("["), json!("[]"), json!(7), json!(null)] {
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
        let error = json_by_schema(&tree, &mut Rng::new(1)).unwrap_err();
        assert!(error.message.contains(part), "{}", error.message);
    }
    let error = text_by_pattern("((a{100}){100}){100}", &mut Rng::new(1)).unwrap_err();
    assert!(
        error.contains("more than") || error.contains("repeats"),
        "{error}"
    );
}

/// Answers for `value` with a few seeds, or the first error.
fn made(value: &Value) -> Result<Vec<Value>, String> {
    let tree = schema(value).map_err(|error| error.message)?;
    (0..40)
        .map(|seed| {
            let text = json_by_schema(&tree, &mut Rng::new(seed)).map_err(|e| e.message)?;
            Ok(serde_json::from_str(&text).unwrap())
        })
        .collect()
}

#[test]
fn listed_values_satisfy_the_keywords_next_to_them() {
    for (demand, allowed) in [
        (json!({"const": 1, "type": "string"}), vec![]),
        (json!({"const": "ab", "minLength": 3}), vec![]),
        (json!({"const": {"a": 1}, "required": ["b"]}), vec![]),
        (json!({"const": "x1", "pattern": "^[a-z]+$"}), vec![]),
        (json!({"const": 1, "anyOf": [{"type": "null"}]}), vec![]),
        (
            json!({"const": "x1", "pattern": "[0-9]"}),
            vec![json!("x1")],
        ),
        (json!({"enum": [1, 5], "minimum": 3}), vec![json!(5)]),
        (
            json!({"allOf": [{"enum": [1, 2, 9]}, {"minimum": 5}]}),
            vec![json!(9)],
        ),
        (
            json!({"enum": ["a", 1], "anyOf": [{"type": "integer"}, {"type": "null"}]}),
            vec![json!(1)],
        ),
        (
            json!({"enum": ["ab", "abb", "ac", "b"], "pattern": "^a(b|c){1,2}$", "maxLength": 2}),
            vec![json!("ab"), json!("ac")],
        ),
        (
            json!({"enum": [[1, 1.0], [1, 2]], "uniqueItems": true}),
            vec![json!([1, 2])],
        ),
        (
            json!({"enum": [{"a": 1, "b": 2}, {"a": 1}],
                   "properties": {"a": true}, "unevaluatedProperties": false}),
            vec![json!({"a": 1})],
        ),
    ] {
        match made(&demand) {
            Ok(values) => {
                assert!(
                    values.iter().all(|v| allowed.contains(v)),
                    "{demand}: {values:?}"
                );
                assert!(
                    allowed.iter().all(|v| values.contains(v)),
                    "{demand}: {values:?}"
                );
            }
            Err(message) => {
                assert!(allowed.is_empty(), "{demand}: {message}");
                assert!(message.contains("next to it"), "{demand}: {message}");
            }
        }
    }
}

#[test]
fn joined_subschemas_keep_their_own_other_members() {
    let closed = |name: &str| json!({"properties": {name: {"type": "integer"}}, "additionalProperties": false});
    // Both allow only what the other forbids.
    for value in made(&json!({"type": "object", "allOf": [closed("a"), closed("b")]})).unwrap() {
        assert_eq!(value, json!({}));
    }
    for refused in [
        json!({"type": "object", "allOf": [closed("a"), closed("b")], "required": ["a"]}),
        json!({"type": "object", "properties": {"a": true}, "additionalProperties": false,
               "anyOf": [{"properties": {"b": true}, "required": ["b"]}]}),
    ] {
        let message = made(&refused).unwrap_err();
        assert!(
            message.contains("nothing satisfies"),
            "{refused}: {message}"
        );
    }
    let demand = json!({"allOf": [
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 7}},
        {"properties": {"a": {"maximum": 7}, "b": {"maximum": 8}}, "required": ["a", "b"]},
    ]});
    for value in made(&demand).unwrap() {
        assert_eq!(value["a"], 7, "{value}");
        assert!([7, 8].map(Value::from).contains(&value["b"]), "{value}");
    }
    let demand = json!({"type": "array", "minItems": 3, "maxItems": 3, "allOf": [
        {"prefixItems": [{"const": "x"}], "items": {"type": "integer"}},
        {"prefixItems": [true, {"minimum": 4}], "items": {"maximum": 4}},
        {"items": {"type": ["string", "integer"]}, "prefixItems": [true, {"maximum": 4}, {"minimum": 4}]},
    ]});
    for value in made(&demand).unwrap() {
        assert_eq!(value, json!(["x", 4, 4]));
    }
    let demand = json!({"type": "object", "minProperties": 2, "properties": {"a": {"const": 1}},
                        "unevaluatedProperties": false});
    let message = made(&demand).unwrap_err();
    assert!(message.contains("`unevaluatedProperties`"), "{message}");
}

#[test]
fn unique_items_differ_as_values() {
    for refused in [
        json!({"items": {"enum": [1, 1.0]}, "minItems": 2, "uniqueItems": true}),
        json!({"items": {"enum": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}, "minItems": 2, "uniqueItems": true}),
    ] {
        let message = made(&refused).unwrap_err();
        assert!(message.contains("`uniqueItems`"), "{refused}: {message}");
    }
    let text = json!({"type": "string", "minLength": 6, "maxLength": 6});
    let demand = json!({"type": "array", "items": text, "minItems": 40, "uniqueItems": true});
    for value in made(&demand).unwrap() {
        let items = value.as_array().unwrap();
        let different: std::collections::HashSet<&str> =
            items.iter().map(|item| item.as_str().unwrap()).collect();
        assert!(items.len() >= 40 && different.len() == items.len());
        assert!(different.iter().all(|text| text.len() == 6), "{value}");
    }
    // Tries count as work: this ends at the bound, and not when all numbers were found.
    let items = json!({"type": "integer", "minimum": 0, "maximum": 1999});
    let tree =
        schema(&json!({"type": "array", "items": items, "minItems": 2000, "uniqueItems": true}));
    let mut rng = Rng::new(1);
    assert!(json_by_schema(&tree.unwrap(), &mut rng).is_err());
    assert!(rng.spent() < 20_000, "{}", rng.spent());
}

#[test]
fn patterns_are_fitted_to_the_length() {
    for (pattern, least, most) in [
        ("^[A-Z]", 5, 9),
        ("[a-z]{1,64}", 20, 40),
        ("^[a-z]+$", 20, 20),
        ("[0-9]+", 1, 1),
    ] {
        let demand =
            json!({"type": "string", "pattern": pattern, "minLength": least, "maxLength": most});
        for value in made(&demand).unwrap() {
            let text = value.as_str().unwrap();
            assert!((least..=most).contains(&text.len()), "{pattern}: {text}");
            let first = text.as_bytes()[0];
            match pattern {
                "^[A-Z]" => assert!(first.is_ascii_uppercase(), "{text}"),
                "^[a-z]+$" => assert!(text.bytes().all(|b| b.is_ascii_lowercase()), "{text}"),
                "[0-9]+" => assert!(text.bytes().any(|b| b.is_ascii_digit()), "{text}"),
                _ => assert!(text.bytes().any(|b| b.is_ascii_lowercase()), "{text}"),
            }
        }
    }
    let demand = json!({"pattern": "^[a-z]$", "minLength": 2});
    let message = made(&demand).unwrap_err();
    assert!(message.contains("no match"), "{message}");
}

#[test]
fn malformed_keywords_are_refused_with_their_path() {
    for (wrong, part) in [
        (json!({"required": "a"}), "`required` must be an array"),
        (json!({"required": 5}), "`required` must be an array"),
        (json!({"required": [1]}), "`required` must be an array"),
        (json!({"enum": 5}), "`enum` must be an array"),
        (json!({"enum": {}}), "`enum` must be an array"),
        (json!({"minLength": "3"}), "`minLength` must be a whole"),
        (json!({"maxItems": "x"}), "`maxItems` must be a whole"),
        (json!({"minItems": -1}), "`minItems` must be a whole"),
        (json!({"maxProperties": 1.5}), "not 1.5"),
        (json!({"minimum": "x"}), "`minimum` must be a number"),
        (
            json!({"multipleOf": 0}),
            "`multipleOf` must be a number above",
        ),
        (json!({"pattern": 5}), "`pattern` must be a string"),
        (json!({"format": 5}), "`format` must be a string"),
        (json!({"uniqueItems": "x"}), "`uniqueItems` must be a bool"),
        (json!({"$ref": "#foo"}), "`$ref` must point"),
        (json!({"pattern": "^2", "format": "date"}), "`format`"),
    ] {
        let error = schema(&json!({"properties": {"x": wrong}})).unwrap_err();
        assert_eq!(error.status, 400);
        assert_eq!(error.param.as_deref(), Some("guided_json.properties.x"));
        assert!(error.message.contains(part), "{wrong}: {}", error.message);
    }
    // Together only once they are joined.
    let joined = json!({"allOf": [{"type": "string", "pattern": "^2"}, {"format": "date"}]});
    assert!(made(&joined).unwrap_err().contains("`format`"));
    assert!(made(&json!({"pattern": "^2", "format": "x-own"})).is_ok());
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
    /// For any schema from a client: an error, or JSON of a bounded size, the same each time.
    #[test]
    fn no_schema_is_too_odd(value in any_tree(), seed in any::<u64>()) {
        if let Ok(tree) = schema(&value) {
            prop_assert!(check_schema(&tree).is_ok());
            let made = json_by_schema(&tree, &mut Rng::new(seed));
            prop_assert_eq!(&made, &json_by_schema(&tree, &mut Rng::new(seed)));
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
        match json_by_schema(&tree, &mut Rng::new(7)) {
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
