"""Routing by the KV events of real engines."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Engine, make_model, metric, post, ready, router

SETTLED_S = 60
"""Events of an answer arrive within this time, also on a busy machine."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Engine]]]:
    model = make_model(tmp_path_factory.mktemp("events") / "tiny")
    started = [Engine(model, model.parent / f"vllm-{n}.log", events=True) for n in range(2)]
    with ready(started):
        yield model, started


def cached_tokens(url: str, path: str, body: dict[str, Any]) -> int:
    """Tokens of the prompt that the engine had, as it says itself."""
    if not body.get("stream"):
        usage = post(url, path, body)["usage"]
    else:
        request = urllib.request.Request(
            url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            events = [line for line in answer if line.startswith(b"data: {")]
        usage = json.loads(events[-1].removeprefix(b"data: "))["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def await_blocks(url: str, least: float) -> None:
    """Wait until the router knows more than `least` blocks: the events of the last answer."""
    end = time.monotonic() + SETTLED_S
    while metric(url, "slipstream_router_cached_blocks") <= least:
        assert time.monotonic() < end, "no events of the last answer"
        time.sleep(0.01)


def requests(group: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A completion by text, one by tokens and a chat; each streamed or not."""
    base = {"model": "tiny", "temperature": 0.0, "max_tokens": 4}
    text = f"Group {group}: " + "measure twice, cut once; " * 20
    for stream in (False, True):
        more: dict[str, Any] = {"stream": stream}
        if stream:
            more["stream_options"] = {"include_usage": True}
        told = f"{text} {stream} "
        tokens = [(group * 7 + at * at + stream) % 200 + 5 for at in range(300)]
        messages = [{"role": "user", "content": f"{stream} {text}"}]
        yield "/v1/completions", base | more | {"prompt": f"{stream} {told}"}
        yield "/v1/completions", base | more | {"prompt": tokens}
        yield "/v1/chat/completions", base | more | {"messages": messages}
        yield "/v1/completions", base | more | {"prompt": f"{stream} {told}", "cache_salt": "s"}


def test_repeated_prompts_hit_wherever_they_were_computed(
    fleet: tuple[Path, list[Engine]],
) -> None:
    model, engines = fleet
    flags = [f"--set=model.tokenizer={model}", "--set=model.name=tiny"]
    with router([engine.url for engine in engines], *flags) as front:
        end = time.monotonic() + SETTLED_S
        while metric(front, "slipstream_engine_kv_connected") < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        for group in range(4):
            for path, body in requests(group):
                known = metric(front, "slipstream_router_cached_blocks")
                # The router does not see this request: only events tell who has the prompt.
                assert cached_tokens(engines[group % 2].url, path, body) == 0
                await_blocks(front, known)
                assert cached_tokens(front, path, body) >= 64, (group, path, body)
        took = [metric(front, "slipstream_engine_requests_total", engine=e.url) for e in engines]
        assert took == [16, 16]
        assert metric(front, "slipstream_engine_prompts_total", **{"as": "text"}) == 0
        for name in ("gaps", "unreadable", "skipped_blocks"):
            assert metric(front, f"slipstream_engine_kv_{name}_total") == 0, name
        assert metric(front, "slipstream_engine_kv_unusable") == 0
