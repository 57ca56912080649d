"""A stream says what the whole answer to the same request says, whatever the request combines."""

import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

SEED = int(os.environ.get("SLIPSTREAM_STREAMS_SEED", "1"))
CASES = int(os.environ.get("SLIPSTREAM_STREAMS_CASES", "120"))

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ö": {"type": "string"}},
    "required": ["n"],
}
SHAPES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA},
        }
    },
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[0-9]{3}"}},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def draw_body(draw: random.Random, is_chat: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "seed": draw.randrange(1000),
        "max_tokens": draw.choice([1, 2, 3, 7, 20, 64]),
    }
    options: list[dict[str, Any]] = [
        {"stop": draw.choice(["e", ["in", "ing"], "zz"])},
        {"n": 2},
        {"ignore_eos": True},
        {"min_tokens": draw.choice([1, 5])},
        {"return_token_ids": True},
        {"temperature": 0},
        {"logit_bias": {"100": 5}},
        draw.choice(SHAPES),
    ]
    if is_chat:
        body["messages"] = [{"role": "user", "content": "Wörld 😀 " * draw.randrange(1, 4)}]
        options += [{"logprobs": True, "top_logprobs": draw.choice([0, 2])}]
        options += [{"tools": [TOOL], "tool_choice": draw.choice(["auto", "required"])}]
    else:
        body["prompt"] = draw.choice(["hi wörld", [1, 2, 3]])
        options += [{"logprobs": draw.choice([0, 2])}, {"echo": True}]
    for option in options:
        if draw.random() < 0.3:
            body |= option
    if body.get("temperature") == 0:
        body.pop("n", None)
    if "tools" in body:
        body.pop("response_format", None)
        body.pop("structured_outputs", None)
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body


def events(data: bytes) -> Iterator[dict[str, Any]]:
    lines = data.decode().split("\n")
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def whole_choice(choice: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    message = choice["message"] if is_chat else {"content": choice["text"]}
    logprobs = choice["logprobs"] or {}
    calls = message.get("tool_calls") or []
    return {
        "text": message["content"] or "",
        "calls": [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        "tokens": [of["token"] for of in logprobs.get("content") or []]
        + (logprobs.get("tokens") or []),
        "ids": choice.get("token_ids") or [],
        "finish": (choice["finish_reason"], choice.get("stop_reason")),
    }


def streamed_choices(data: bytes, is_chat: bool) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for event in events(data):
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        assert event["object"] == kind, event
        for part in event["choices"]:
            assert ("delta" in part) == is_chat and ("text" in part) == (not is_chat), event
            of = choices.setdefault(
                part["index"],
                {"text": "", "calls": [], "tokens": [], "ids": [], "finish": None},
            )
            delta = part["delta"] if is_chat else {"content": part["text"]}
            of["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                if call["index"] == len(of["calls"]):
                    of["calls"].append((function["name"], ""))
                name, arguments = of["calls"][call["index"]]
                of["calls"][call["index"]] = (name, arguments + (function.get("arguments") or ""))
            logprobs = part.get("logprobs") or {}
            of["tokens"] += [one["token"] for one in logprobs.get("content") or []]
            of["tokens"] += logprobs.get("tokens") or []
            of["ids"] += part.get("token_ids") or []
            if part["finish_reason"]:
                assert of["finish"] is None, "it ends once"
                of["finish"] = (part["finish_reason"], part.get("stop_reason"))
    return choices


@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
def test_a_stream_and_a_whole_answer_say_the_same(
    client: openai.OpenAI, model: str, is_chat: bool
) -> None:
    draw = random.Random(SEED)
    path = "chat/completions" if is_chat else "completions"

    def post(body: dict[str, Any]) -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"{client.base_url}{path}",
            json.dumps({"model": model, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    answered = 0
    for _ in range(CASES // 2):
        body = draw_body(draw, is_chat)
        status, whole = post(body)
        streamed_status, stream = post({**body, "stream": True})
        assert status == streamed_status, (body, whole, stream)
        if status != 200:
            assert status == 400, (body, whole)
            continue
        answered += 1
        wanted = {
            choice["index"]: whole_choice(choice, is_chat)
            for choice in json.loads(whole)["choices"]
        }
        streamed = streamed_choices(stream, is_chat)
        for index, of in wanted.items():
            if "tools" in body and of["finish"][0] == "length":
                # As with vLLM: a call that is cut off is text, or part of a call if streamed.
                del of["text"], of["calls"]
                del streamed[index]["text"], streamed[index]["calls"]
        assert streamed == wanted, body
    assert answered > CASES // 4
