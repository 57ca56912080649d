//! JSON by schemas: accepted and refused schemas, and properties of the JSON that is made.

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_structured::{
    FormError, OUT_BYTES_MAX, Rng, Tree, check_schema, json_by_schema, text_by_pattern,
};

/// The schema, if all of it is modelled.
fn schema(schema: &Value) -> Result<Tree, FormError> {
    let tree = Tree::from(schema.clone());
    check_schema(&tree).map(|()| tree)
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
        assert_eq!(error.at, "properties.x");
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
