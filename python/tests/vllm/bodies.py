"""Request bodies drawn from a seed: mostly right, some members wrong in the ways of clients."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Draw = Callable[[random.Random], Any]

BOOLEANS = [
    True,
    False,
    0,
    1,
    "true",
    "false",
    "ON",
    "off",
    "yes",
    "n",
    "1",
    "0",
    1.0,
    0.0,
    2,
    -1,
    0.5,
]
BOOLEANS += ["2", " true", "True\n", "", "maybe", None, [], {}, "1.0", [True]]
WHOLES = [1, 2, 3, 5, 0, -1, "3", " 4 ", "5.0", "3.5", 2.0, 2.5, 1e2, True, False, None, "", [], {}]
WHOLES += [
    "1_0",
    "1__0",
    "_1",
    "1e2",
    "+2",
    "-0",
    "00",
    "0x10",
    "٣",
    "4\n",
    "5.",
    ".5",
    2**31,
    2**32,
    2**63,
    -(2**63),
]
WHOLES += [2**64, "9223372036854775807", "1.0e1", "- 1", "\t7", "3,0", [1], -2, 20, 21, 1e-3, -0.0]
REALS = [
    0,
    1,
    0.5,
    "0.5",
    " .5",
    "1.",
    "1e-1",
    "1_0.5",
    "0_.5",
    True,
    False,
    None,
    "",
    [],
    {},
    -1,
    2,
    2.1,
    1e-6,
]
REALS += [
    -0.0,
    "-0",
    "+.5",
    "0x1p-1",
    "inf",
    "nan",
    "-Infinity",
    "1e400",
    "0.5f",
    [0.5],
    1e-5,
    0.009,
    -2,
    "2.0 ",
]
TEXTS = ["x", "", "é\U0001f600", "a\nb", 1, 0.5, True, None, [], {}, ["x"], " ", "\x00", "x" * 600]
TOKENS = [
    [1, 2],
    [],
    [1.0, 2],
    ["1"],
    ["x"],
    [True],
    [-1],
    [None],
    [[1]],
    1,
    "1",
    {},
    None,
    [1, "2.0"],
    [2.5],
]


def choose(values: list[Any]) -> Draw:
    """One of the values."""
    return lambda rng: rng.choice(values)


def stop(rng: random.Random) -> Any:
    """A `stop`: a text, several, or neither."""
    forms = [
        "qz",
        ["qz", "qy"],
        [],
        "",
        [""],
        None,
        1,
        [1],
        [None],
        [["qz"]],
        {},
        True,
        ["q\u0301"],
        ["q"] * 5,
    ]
    return rng.choice(forms)


def logit_bias(rng: random.Random) -> Any:
    """A `logit_bias`."""
    token = rng.choice(["5", "6", " 7 ", "-1", "x", "5.0", "1_0", "", "+5"])
    bias = rng.choice([0, 1, -100, 100, 101, -1e9, "5", " -1 ", None, True, [], "x", 0.5])
    return rng.choice([{token: bias}, {token: bias, "9": 1}, {}, None, [], 1, "x", [[5, 1]]])


def stream_options(rng: random.Random) -> Any:
    """`stream_options`."""
    members = {}
    if rng.random() < 0.8:
        members["include_usage"] = rng.choice(BOOLEANS)
    if rng.random() < 0.4:
        members["continuous_usage_stats"] = rng.choice(BOOLEANS)
    if rng.random() < 0.2:
        members["include_obfuscation"] = rng.choice(BOOLEANS)
    return rng.choice([members, members, members, None, [], "x", True, 0])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def response_format(rng: random.Random) -> Any:
    """A `response_format`."""
    schema = rng.choice([SCHEMA, {}, None, [], "x", True, {"type": "integer"}])
    inner = rng.choice(
        [
            {"name": "s", "schema": schema},
            {"name": "s", "schema": schema, "strict": rng.choice(BOOLEANS)},
            {"schema": schema},
            {"name": rng.choice(TEXTS), "schema": SCHEMA, "description": rng.choice(TEXTS)},
            {"name": "s"},
            None,
            [],
            "x",
        ]
    )
    kind = rng.choice(
        ["text", "json_object", "json_schema", "json_schema", "JSON", "", None, 1, "grammar"]
    )
    return rng.choice(
        [
            {"type": kind},
            {"type": kind, "json_schema": inner},
            {"json_schema": inner},
            {},
            None,
            [],
            "text",
            True,
        ]
    )


def structured_outputs(rng: random.Random) -> Any:
    """`structured_outputs`."""
    members: dict[str, Any] = {}
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        name = rng.choice(["json", "choice", "regex", "json_object", "grammar", "other"])
        values = {
            "json": [SCHEMA, json.dumps(SCHEMA), None, "x", 1, []],
            "choice": [["a", "b"], [], "a", None, [1], ["a", "a"], [""]],
            "regex": ["a+", "", None, 1, "(", ["a"]],
            "json_object": BOOLEANS,
            "grammar": [None],
            "other": [None, 1],
        }
        members[name] = rng.choice(values[name])
    return rng.choice([members, members, members, None, [], "x"])


def function(rng: random.Random) -> Any:
    """The function of a tool."""
    members: dict[str, Any] = {"name": "f"}
    if rng.random() < 0.15:
        members["name"] = rng.choice([*TEXTS, "f-1", "f.g"])
    if rng.random() < 0.4:
        members["description"] = rng.choice(TEXTS)
    if rng.random() < 0.6:
        members["parameters"] = rng.choice(
            [SCHEMA, SCHEMA, SCHEMA, {}, None, [], "x", {"type": "object"}]
        )
    if rng.random() < 0.2:
        members["strict"] = rng.choice(BOOLEANS)
    if rng.random() < 0.1:
        del members["name"]
    return members


def tools(rng: random.Random) -> Any:
    """`tools`."""
    made: list[Any] = []
    for _ in range(rng.choice([1, 1, 2])):
        tool: dict[str, Any] = {"type": "function", "function": function(rng)}
        spoiled = rng.random()
        if spoiled < 0.05:
            del tool["type"]
        elif spoiled < 0.1:
            tool["type"] = rng.choice([*TEXTS, "custom", "web_search"])
        elif spoiled < 0.15:
            tool["function"] = rng.choice([None, [], "f", {}, 1])
        elif spoiled < 0.2:
            tool["extra"] = 1
        made.append(tool)
    return rng.choice([made] * 12 + [[], None, {}, "x", [None], [[]], ["f"], made[0]])


def tool_choice(rng: random.Random) -> Any:
    """A `tool_choice`."""
    named = {"type": "function", "function": {"name": rng.choice(["f", "f", "g", "", 1, None])}}
    forms = [
        "auto",
        "none",
        "required",
        named,
        named,
        None,
        {"type": "function"},
        {"function": {"name": "f"}},
    ]
    forms += [
        "f",
        "AUTO",
        "",
        1,
        True,
        [],
        {},
        {"type": "x", "function": {"name": "f"}},
        {"name": "f"},
    ]
    forms += [{"type": "function", "name": "f"}, {"type": "function", "function": "f"}, "any"]
    return rng.choice(forms)


def part(rng: random.Random) -> Any:
    """A part of a content."""
    text = rng.choice(["hi", "hi", "", "é", None, 1, [], True])
    forms: list[Any] = [{"type": "text", "text": text}] * 6
    forms += [
        {"type": kind, "text": text}
        for kind in ("input_text", "output_text", "refusal", "other", "", None)
    ]
    forms += [
        {"type": "refusal", "refusal": text},
        {"type": "thinking", "thinking": text},
        {"text": text},
    ]
    forms += [
        "hi",
        "",
        None,
        1,
        [],
        {},
        [{"type": "text", "text": "hi"}],
        {"type": "text"},
        {"type": 1, "text": "hi"},
    ]
    forms += [
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "content": "hi"},
    ]
    forms += [{"refusal": text}, {"thinking": text}]
    return rng.choice(forms)


def content(rng: random.Random) -> Any:
    """The content of a message."""
    if rng.random() < 0.5:
        return rng.choice(["hello", "", "a\n\nb", "é\U0001f600"])
    if rng.random() < 0.8:
        return [part(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    return rng.choice([None, 1, {}, {"type": "text", "text": "hi"}, True, 0.5, [[]]])


def call(rng: random.Random) -> Any:
    """A call of a tool in a message."""
    arguments = rng.choice(
        [
            '{"a": 1}',
            "{}",
            "",
            " ",
            None,
            {"a": 1},
            {},
            "x",
            "[1]",
            "1",
            [],
            1,
            "null",
            '{"a": NaN}',
        ]
    )
    made: dict[str, Any] = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    spoiled = rng.random()
    if spoiled < 0.06:
        del made[rng.choice(["id", "type", "function"])]
    elif spoiled < 0.12:
        made[rng.choice(["id", "type"])] = rng.choice(TEXTS)
    elif spoiled < 0.16:
        made["function"] = rng.choice(
            [None, {}, [], "f", {"name": "f"}, {"arguments": "{}"}, {"name": 1, "arguments": ""}]
        )
    elif spoiled < 0.2:
        made["index"] = 0
    return made


def message(rng: random.Random) -> Any:
    """A message of a chat."""
    role = rng.choice(
        [
            "user",
            "user",
            "system",
            "assistant",
            "assistant",
            "tool",
            "developer",
            "function",
            "other",
        ]
    )
    made: dict[str, Any] = {"role": role, "content": content(rng)}
    if rng.random() < 0.05:
        made["role"] = rng.choice([None, 1, "", [], "User"])
    if rng.random() < 0.05:
        del made[rng.choice(["role", "content"])]
    if rng.random() < 0.15:
        made["name"] = rng.choice(TEXTS)
    if rng.random() < (0.5 if role == "assistant" else 0.05):
        made["tool_calls"] = rng.choice(
            [[call(rng)], [call(rng)], [call(rng), call(rng)], [], None, {}, "x", [None], ["x"]]
        )
    if rng.random() < (0.8 if role == "tool" else 0.05):
        made["tool_call_id"] = rng.choice(["c1", "c1", "c1", *TEXTS])
    if rng.random() < 0.15:
        made[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(TEXTS)
    if rng.random() < 0.05:
        made[rng.choice(["refusal", "extra", "annotations"])] = rng.choice(TEXTS)
    return made


def messages(rng: random.Random) -> Any:
    """The messages of a chat."""
    if rng.random() < 0.04:
        return rng.choice([[], None, {}, "hello", 1, [None], ["hello"], [[]], [{}]])
    return [message(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def prompt(rng: random.Random) -> Any:
    """The prompt of a completion."""
    forms: list[Any] = [
        "hello",
        "hello there",
        ["hello", "you"],
        [1, 2, 3],
        [[1, 2], [3]],
        "",
        [],
        [""],
        [[]],
    ]
    forms += [
        None,
        1,
        1.5,
        {},
        True,
        [1, "a"],
        ["a", 1],
        [1.0, 2.0],
        ["1", "2"],
        [-1],
        [True, 2],
        [[1], "a"],
        [None],
    ]
    forms += [
        [[1.0]],
        [["1"]],
        [["a"]],
        [[True]],
        [2**31],
        ["a", None],
        [1, 2.5],
        [["a", "b"]],
        [{}],
        ["a", ""],
        [[1], []],
    ]
    return rng.choice(forms)


BOTH: dict[str, Draw] = {
    "stream": choose(BOOLEANS),
    "stream_options": stream_options,
    "n": choose(WHOLES),
    "max_tokens": choose(WHOLES),
    "min_tokens": choose(WHOLES),
    "ignore_eos": choose(BOOLEANS),
    "stop": stop,
    "stop_token_ids": choose(TOKENS),
    "include_stop_str_in_output": choose(BOOLEANS),
    "seed": choose(WHOLES),
    "prompt_logprobs": choose(WHOLES),
    "echo": choose(BOOLEANS),
    "logit_bias": logit_bias,
    "allowed_token_ids": choose(TOKENS),
    "add_special_tokens": choose(BOOLEANS),
    "user": choose(TEXTS),
    "request_id": choose(TEXTS),
    "cache_salt": choose([*TEXTS, "a/b", "a@b", "x" * 128, "x" * 129, "é" * 128]),
    "return_token_ids": choose(BOOLEANS),
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "temperature": choose(REALS),
    "top_p": choose(REALS),
    "top_k": choose(WHOLES),
    "min_p": choose(REALS),
    "frequency_penalty": choose(REALS),
    "presence_penalty": choose(REALS),
    "repetition_penalty": choose(REALS),
    "use_beam_search": choose([False, 0, "false", None, "off"]),
    "bad_words": choose([[], None, {}, "", 1]),
    "kv_transfer_params": choose([{}, None]),
    "logprob_token_ids": choose([[], None]),
    "return_tokens_as_token_ids": choose([False, 0, "no", None]),
    "skip_special_tokens": choose(BOOLEANS),
    "spaces_between_special_tokens": choose(BOOLEANS),
    "length_penalty": choose(REALS),
    "some_unknown_key": choose([None, 1, {"a": [1, {}]}, "x"]),
    "model": choose(["MODEL", "MODEL", None, "", 1, [], "other"]),
}
CHAT: dict[str, Draw] = {
    "messages": messages,
    "max_completion_tokens": choose(WHOLES),
    "logprobs": choose(BOOLEANS),
    "top_logprobs": choose(WHOLES),
    "add_generation_prompt": choose(BOOLEANS),
    "continue_final_message": choose(BOOLEANS),
    "chat_template_kwargs": choose([{}, {"a": 1}, None, [], "x", {"a": {"b": [None]}}]),
    "tools": tools,
    "tool_choice": tool_choice,
    "parallel_tool_calls": choose(BOOLEANS),
    "documents": choose([[], None]),
    "reasoning_effort": choose(["low", "none", "max", None, "", 1, "LOW"]),
    "include_reasoning": choose(BOOLEANS),
}
COMPLETION: dict[str, Draw] = {
    "prompt": prompt,
    "logprobs": choose(WHOLES),
    "suffix": choose(["", None]),
}


def body(rng: random.Random, chat: bool) -> dict[str, Any]:
    """The members of a body: a plain request with some of its fields drawn."""
    made: dict[str, Any] = {"seed": rng.randrange(1000), "max_tokens": 4}
    if chat:
        made["messages"] = [{"role": "user", "content": "hello"}]
    else:
        made["prompt"] = "hello"
    fields = BOTH | (CHAT if chat else COMPLETION)
    names = list(fields)
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        name = rng.choice(names)
        if rng.random() < 0.25:
            name = "messages" if chat else "prompt"
        made[name] = fields[name](rng)
        if name == "tool_choice" and rng.random() < 0.8:
            made["tools"] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
        if name == "stream_options" and rng.random() < 0.8:
            made["stream"] = True
        if name == "top_logprobs" and rng.random() < 0.8:
            made["logprobs"] = True
        if name == "continue_final_message" and rng.random() < 0.8:
            made["add_generation_prompt"] = False
    return made


def encoded(rng: random.Random, members: dict[str, Any]) -> bytes:
    """The members as JSON, at times written in a rare way."""
    text = json.dumps(members, ensure_ascii=rng.random() < 0.5)
    rare = rng.random()
    if rare < 0.02:
        return b"\xef\xbb\xbf" + text.encode()
    if rare < 0.03:
        return b" \r\n\t" + text.encode() + b"\n"
    if rare < 0.04:
        return text.replace(": ", " :\n").encode()
    if rare < 0.05:
        return text[: rng.randrange(len(text))].encode()
    if rare < 0.055:
        return (text + rng.choice(["}", ",", " x", "\x00", "{}"])).encode()
    if rare < 0.06:
        return text[:-1].encode() + b', "seed": 7}'
    if rare < 0.065:
        return rng.choice([b"", b"null", b"[]", b"1", b'"x"', b"[" + text.encode() + b"]"])
    return text.encode()


def bodies(seed: int, count: int) -> Iterator[tuple[bool, bytes]]:
    """Whether the body is a chat's, and the body."""
    rng = random.Random(seed)
    for _ in range(count):
        chat = rng.random() < 0.6
        yield chat, encoded(rng, body(rng, chat))
