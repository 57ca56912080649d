"""Bodies of /tokenize, /detokenize, /v1/responses and /v1/messages, drawn from a seed."""

import json
import random
from collections.abc import Iterator
from typing import Any

from bodies import (
    BOOLEANS,
    REALS,
    SCHEMA,
    TEXTS,
    TOKENS,
    WHOLES,
    Draw,
    choose,
    messages,
    stop,
    tools,
)

PATHS = {
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
}

MODEL = choose(["MODEL", "MODEL", "MODEL", None, "", 1, [], "other"])
SALT = choose([*TEXTS, "a/b", "x" * 128])
OBJECTS = [{}, {"a": 1}, None, [], "x", 1, True, {"a": {"b": [None]}}]


def block(rng: random.Random) -> Any:
    """A block of Anthropic's content."""
    text = rng.choice(["hi", "hi", "hi", "", "é", None, 1, [], True])
    forms: list[Any] = [{"type": "text", "text": text}] * 6
    forms += [{"type": "thinking", "thinking": text, "signature": rng.choice(["s", None, 1])}]
    forms += [{"type": "redacted_thinking", "data": text}, {"type": "other", "text": text}]
    forms += [{"type": "text"}, {"text": "hi"}, {}, None, "hi", 1, [], {"type": None, "text": "hi"}]
    forms += [
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}
    ]
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
    forms += [
        use,
        use,
        use | {"input": rng.choice(OBJECTS)},
        use | {rng.choice(["id", "name"]): text},
    ]
    forms += [{name: of for name, of in use.items() if name != rng.choice(list(use))}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "72"}
    inner = rng.choice(
        [[{"type": "text", "text": text}], [], None, "x", 1, {}, ["x"], [{"type": "x"}]]
    )
    forms += [
        result,
        result,
        result | {"content": inner},
        result | {"is_error": rng.choice(BOOLEANS)},
    ]
    forms += [result | {"tool_use_id": text}, {"type": "tool_result", "tool_use_id": "t1"}]
    return rng.choice(forms)


def blocks(rng: random.Random) -> Any:
    """A content of Anthropic's."""
    if rng.random() < 0.3:
        return rng.choice(["hello", "", "a\n\nb", None, 1, {}, True, [[]]])
    return [block(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]


def turns(rng: random.Random) -> Any:
    """The messages of Anthropic's API."""
    if rng.random() < 0.06:
        return rng.choice([[], None, {}, "hello", [None], ["hello"], [[]], [{}]])
    made = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        turn = {"role": rng.choice(["user", "user", "assistant", "system"]), "content": blocks(rng)}
        if rng.random() < 0.06:
            turn["role"] = rng.choice([None, 1, "", [], "User", "tool", "developer"])
        if rng.random() < 0.04:
            del turn[rng.choice(["role", "content"])]
        if rng.random() < 0.06:
            turn["name"] = rng.choice(TEXTS)
        made.append(turn)
    return made


def custom_tools(rng: random.Random) -> Any:
    """Tools of Anthropic's API."""
    tool: dict[str, Any] = {"name": "f", "input_schema": SCHEMA}
    for name, values in (
        ("description", TEXTS),
        ("input_schema", [*OBJECTS, {"properties": {}}]),
        ("strict", BOOLEANS),
        ("type", ["custom", "custom", None]),
        ("name", ["f-1", "f", 1, None]),
        ("cache_control", OBJECTS),
    ):
        if rng.random() < 0.2:
            tool[name] = rng.choice(values)
    if rng.random() < 0.06:
        del tool[rng.choice(["name", "input_schema"])]
    return rng.choice(
        [[tool]] * 10 + [[tool, tool | {"name": "g"}], [], None, {}, "x", [None], tool]
    )


def custom_choice(rng: random.Random) -> Any:
    """A `tool_choice` of Anthropic's API."""
    made: dict[str, Any] = {"type": rng.choice(["auto", "any", "tool", "none"])}
    if rng.random() < 0.6 or made["type"] == "tool":
        made["name"] = rng.choice(["f", "f", "f", "", None, 1])
    if rng.random() < 0.4:
        made["disable_parallel_tool_use"] = rng.choice(BOOLEANS)
    return rng.choice(
        [made] * 8 + [{}, None, "auto", [], {"type": "x"}, {"type": None}, {"name": "f"}]
    )


def thinking(rng: random.Random) -> Any:
    """A `thinking`."""
    made: dict[str, Any] = {
        "type": rng.choice(["enabled", "enabled", "disabled", "adaptive", "x", None])
    }
    if rng.random() < 0.7:
        made["budget_tokens"] = rng.choice(
            [1024, 1024, 2000, 1023, "1024", 1024.0, 5000, None, 0, "x"]
        )
    if rng.random() < 0.3:
        made["display"] = rng.choice(["summarized", "omitted", None, "x", 1])
    return rng.choice([made] * 6 + [None, {}, [], "enabled", True])


def output_config(rng: random.Random) -> Any:
    """An `output_config`."""
    form = rng.choice(
        [
            {"type": "json_schema", "schema": SCHEMA},
            {"schema": SCHEMA},
            {"type": "json_schema"},
            {"type": "x", "schema": SCHEMA},
            None,
            {},
            "x",
        ]
    )
    made = {"format": form}
    if rng.random() < 0.4:
        made["effort"] = rng.choice(["low", "max", None, "x", 1])
    return rng.choice([made] * 6 + [None, {}, [], "x"])


def items(rng: random.Random) -> Any:
    """An `input` of OpenAI's Responses."""
    if rng.random() < 0.2:
        return rng.choice(["hello", "hello", "", None, 1, {}, [], True, [None], ["x"], [{}]])
    made = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = rng.choice(["hi", "hi", "hi", "", None, 1])
        part = rng.choice(
            [{"type": "input_text", "text": text}] * 5
            + [
                {"type": "output_text", "text": text, "annotations": []},
                {"type": "output_text", "text": text},
            ]
            + [
                {"type": "refusal", "refusal": text},
                {"type": "text", "text": text},
                {"text": text},
                "hi",
                None,
            ]
        )
        content = rng.choice(["hello", "hello", [part], [part], [part, part], [], "", None, 1])
        role = rng.choice(
            ["user", "user", "user", "assistant", "system", "developer", "tool", "", None, 1]
        )
        item: dict[str, Any] = {"role": role, "content": content}
        if rng.random() < 0.5:
            item["type"] = rng.choice(["message"] * 8 + ["x", None, 1])
        if rng.random() < 0.2:
            item[rng.choice(["id", "status", "phase"])] = rng.choice(["m1", "completed", None, 1])
        call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
        output = {"type": "function_call_output", "call_id": "c1", "output": "72"}
        if rng.random() < 0.3:
            item = dict(
                rng.choice([call, output, {"type": "reasoning", "id": "r1", "summary": []}])
            )
            if rng.random() < 0.3:
                item[rng.choice(list(item))] = rng.choice(TEXTS)
            if rng.random() < 0.1:
                del item[rng.choice(list(item))]
        made.append(item)
    return made


def functions(rng: random.Random) -> Any:
    """Tools of OpenAI's Responses."""
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": SCHEMA}
    for name, values in (
        ("description", TEXTS),
        ("parameters", OBJECTS),
        ("strict", BOOLEANS),
        ("name", TEXTS),
    ):
        if rng.random() < 0.15:
            tool[name] = rng.choice(values)
    if rng.random() < 0.06:
        del tool[rng.choice(list(tool))]
    return rng.choice([[tool]] * 10 + [[], None, {}, "x", [None], tool])


def function_choice(rng: random.Random) -> Any:
    """A `tool_choice` of OpenAI's Responses."""
    forms = [
        "auto",
        "none",
        "required",
        {"type": "function", "name": "f"},
        {"type": "function", "name": "f"},
    ]
    forms += [
        {"type": "function", "name": "g"},
        {"type": "function"},
        {"name": "f"},
        "AUTO",
        "",
        1,
        [],
        {},
        None,
    ]
    return rng.choice(forms)


def text_form(rng: random.Random) -> Any:
    """A `text` of OpenAI's Responses."""
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    form = rng.choice(
        [
            {"type": "text"},
            {"type": "json_object"},
            schema,
            schema,
            schema | {"strict": rng.choice(BOOLEANS)},
            {"type": "json_schema", "schema": SCHEMA},
            schema | {"schema": None},
            {},
            None,
            "x",
        ]
    )
    made = {"format": form}
    if rng.random() < 0.2:
        made["verbosity"] = rng.choice(["low", None, "x"])
    return rng.choice([made] * 6 + [None, {}, [], "x"])


SAMPLING: dict[str, Draw] = {
    "temperature": choose(REALS),
    "top_p": choose(REALS),
    "top_k": choose(WHOLES),
    "stream": choose(BOOLEANS),
    "cache_salt": SALT,
    "some_unknown_key": choose(OBJECTS),
    "metadata": choose([{}, {"a": "b"}, None, {"a": 1}, [], "x", {"a": None}]),
}
CHAT_OPTIONS: dict[str, Draw] = {
    "add_generation_prompt": choose(BOOLEANS),
    "continue_final_message": choose(BOOLEANS),
    "add_special_tokens": choose(BOOLEANS),
    "return_token_strs": choose(BOOLEANS),
    "chat_template_kwargs": choose(OBJECTS),
    "tools": tools,
}
FIELDS: dict[str, dict[str, Draw]] = {
    "tokenize": {
        "messages": messages,
        "prompt": choose(TEXTS),
        **CHAT_OPTIONS,
        "some_unknown_key": choose(OBJECTS),
    },
    "detokenize": {
        "tokens": choose([*TOKENS, [0], [5, 6, 7], [2**31], [2**63], [1e2], [" 4 "], [0.0]]),
        "some_unknown_key": choose(OBJECTS),
    },
    "responses": SAMPLING
    | {
        "input": items,
        "instructions": choose(TEXTS),
        "max_output_tokens": choose(WHOLES),
        "tools": functions,
        "tool_choice": function_choice,
        "text": text_form,
        "store": choose(BOOLEANS),
        "parallel_tool_calls": choose(BOOLEANS),
        "background": choose([False, 0, "no", None]),
        "include": choose([[], None, ["message.output_text.logprobs"], ["x"], "x", {}, [1]]),
        "top_logprobs": choose(WHOLES),
        "truncation": choose(["disabled", None, "x", 1]),
        "service_tier": choose(["auto", "default", None, "x", 1]),
        "reasoning": choose(
            [
                {},
                {"effort": "low"},
                {"effort": "most"},
                {"effort": None},
                None,
                [],
                "x",
                {"effort": 1},
            ]
        ),
        "user": choose(TEXTS),
        "min_p": choose(REALS),
        "presence_penalty": choose(REALS),
        "frequency_penalty": choose(REALS),
        "repetition_penalty": choose(REALS),
        "seed": choose(WHOLES),
        "stop": stop,
        "ignore_eos": choose(BOOLEANS),
        "priority": choose([0, "0", 0.0, None]),
        "prompt_cache_key": choose(TEXTS),
        "max_tool_calls": choose(WHOLES),
        "include_stop_str_in_output": choose(BOOLEANS),
        "logit_bias": choose([{}, None, {"5": 1}, {"5": "1"}, [], {"x": 1}, {"5": None}]),
    },
    "messages": SAMPLING
    | {
        "messages": turns,
        "max_tokens": choose(WHOLES),
        "system": blocks,
        "stop_sequences": choose([["qz"], [], None, "x", [1], [""], {}, [None], ["q"] * 5]),
        "tools": custom_tools,
        "tool_choice": custom_choice,
        "thinking": thinking,
        "output_config": output_config,
        "chat_template_kwargs": choose(OBJECTS),
    },
    "count": {
        "messages": turns,
        "system": blocks,
        "tools": custom_tools,
        "tool_choice": custom_choice,
        "some_unknown_key": choose(OBJECTS),
    },
}
PLAIN: dict[str, dict[str, Any]] = {
    "tokenize": {"prompt": "hello there"},
    "detokenize": {"tokens": [5, 6, 7]},
    "responses": {"input": "hello", "max_output_tokens": 4, "temperature": 0},
    "messages": {
        "model": "MODEL",
        "max_tokens": 4,
        "temperature": 0,
        "messages": [{"role": "user", "content": "hello"}],
    },
    "count": {"model": "MODEL", "messages": [{"role": "user", "content": "hello"}]},
}


def body(rng: random.Random, kind: str) -> dict[str, Any]:
    """The members of a body: a plain request with some of its fields drawn."""
    made = dict(PLAIN[kind])
    if kind == "tokenize" and rng.random() < 0.7:
        made = {"messages": [{"role": "user", "content": "hello"}]}
    fields = FIELDS[kind]
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        name = rng.choice(list(fields))
        if rng.random() < 0.2:
            name = next(iter(fields)) if kind != "responses" else "input"
        if kind == "tokenize" and name in ("messages", "prompt") and rng.random() < 0.9:
            made.pop("prompt", None)
            made.pop("messages", None)
        made[name] = fields[name](rng)
        if name == "tool_choice" and rng.random() < 0.8:
            of_responses = {"type": "function", "name": "f", "parameters": SCHEMA}
            made["tools"] = [
                of_responses if kind == "responses" else {"name": "f", "input_schema": SCHEMA}
            ]
        if name == "thinking":
            made["max_tokens"] = 3000
            made["stop_sequences"] = ["a", "e", "i", "o"]
        if name == "continue_final_message" and rng.random() < 0.8:
            made["add_generation_prompt"] = False
    if rng.random() < 0.05:
        made["model"] = MODEL(rng)
    if rng.random() < 0.03:
        made.pop(rng.choice(list(made)))
    return made


def bodies(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Bodies, and the endpoint of each."""
    rng = random.Random(seed)
    for at in range(count):
        kind = list(PATHS)[at % len(PATHS)]
        made = body(rng, kind)
        yield kind, json.dumps(made, ensure_ascii=rng.random() < 0.5).encode()
