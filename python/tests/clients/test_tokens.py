"""vLLM's `return_token_ids`, as clients that train on answers use it."""

import json
import urllib.request

import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CHAT = [{"role": "user", "content": "One two three."}]


def post(server, path: str, **body):
    """The answer's JSON, or the events' if it is a stream."""
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def decode(server, ids) -> str:
    return post(server, "/detokenize", tokens=ids)["prompt"]


@pytest.mark.parametrize("stop", [[], ["e"]])
@pytest.mark.parametrize("n", [1, 2])
def test_completion(server, n, stop):
    body = {
        "prompt": ["One two three.", "Four."],
        "n": n,
        "max_tokens": 12,
        "seed": 3,
        "stop": stop,
        "return_token_ids": True,
    }
    whole = post(server, "/v1/completions", **body)
    prompts = [post(server, "/tokenize", prompt=prompt)["tokens"] for prompt in body["prompt"]]
    assert len(whole["choices"]) == 2 * n
    for index, choice in enumerate(whole["choices"]):
        assert choice["prompt_token_ids"] == prompts[index // n]
        assert decode(server, choice["token_ids"]).startswith(choice["text"])
    counts = sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert counts == whole["usage"]["completion_tokens"]
    ids = {index: [] for index in range(2 * n)}
    for event in post(server, "/v1/completions", stream=True, **body):
        (choice,) = event["choices"]
        if not ids[choice["index"]]:
            assert choice.pop("prompt_token_ids") == prompts[choice["index"] // n]
        assert "prompt_token_ids" not in choice
        ids[choice["index"]] += choice["token_ids"]
    assert list(ids.values()) == [choice["token_ids"] for choice in whole["choices"]]


@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("logprobs", [False, True])
def test_chat(server, tools, logprobs):
    body = {
        "messages": CHAT,
        "max_tokens": 200,
        "seed": 3,
        "tools": tools,
        "logprobs": logprobs,
        "return_token_ids": True,
    }
    whole = post(server, "/v1/chat/completions", **body)
    (choice,) = whole["choices"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    shown = decode(server, choice["token_ids"])
    if tools:
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] in shown
    else:
        assert shown.startswith(choice["message"]["content"])
    events = post(server, "/v1/chat/completions", stream=True, **body)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    ids = [token for event in events[1:] for token in event["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]


def test_answers_have_no_ids_that_were_not_asked_for(server):
    for wish in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        body = {"prompt": "x", "max_tokens": 2, **wish}
        assert "token_ids" not in json.dumps(post(server, "/v1/completions", **body))
        assert "token_ids" not in json.dumps(post(server, "/v1/completions", stream=True, **body))
