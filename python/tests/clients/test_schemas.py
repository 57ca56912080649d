"""JSON that is made for a schema, checked by PyPI's `jsonschema`."""

import json

import jsonschema
import pytest

NUMBERS = {
    "type": "object",
    "properties": {
        "i": {"type": "integer", "minimum": -5, "exclusiveMaximum": 3},
        "step": {"type": "integer", "multipleOf": 7, "minimum": 50},
        "n": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.001},
        "under": {"type": "number", "maximum": -40},
    },
    "required": ["i", "step", "n", "under"],
}
LINKED = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "maxLength": 4},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
JOINED = {
    "allOf": [
        {"properties": {"a": {"type": "number", "minimum": 3}}, "required": ["a"]},
        {"properties": {"a": {"type": "integer", "maximum": 4}, "b": {"const": [1, None]}}},
        {"required": ["b"]},
    ],
    "type": "object",
}
ARRAYS = {
    "type": "array",
    "prefixItems": [{"const": 1}, {"type": "string", "format": "date"}],
    "items": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "minItems": 4,
    "maxItems": 5,
}
TEXTS = {
    "type": "object",
    "properties": {
        name: {"type": "string", "format": name}
        for name in ("date-time", "date", "email", "ipv4", "ipv6", "uuid", "hostname", "time")
    }
    | {
        "code": {"type": "string", "pattern": "^(ab|c)+\\d{2,4}[^\\s]$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        'odd "name"\n': {"enum": ["\u00e9\\", 1.5, {"k": [None, True]}]},
    },
    "additionalProperties": False,
    "minProperties": 11,
}
MAP = {"additionalProperties": {"type": ["integer", "null"]}, "minProperties": 3, "type": "object"}
UNION = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}},
            "required": ["kind", "x"],
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "b"}, "y": {"type": "array", "minItems": 2}},
            "required": ["kind", "y"],
        },
    ]
}


@pytest.mark.parametrize("schema", [NUMBERS, LINKED, JOINED, ARRAYS, TEXTS, MAP, UNION, True, {}])
def test_json_satisfies_its_schema(client, model, schema):
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    found = set()
    for seed in range(25):
        answer = client.completions.create(
            model=model,
            prompt="x",
            max_tokens=4096,
            seed=seed,
            extra_body={"structured_outputs": {"json": schema}},
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        validator.validate(json.loads(choice.text))
        found.add(choice.text)
    assert len(found) > 1, "the seed decides"
