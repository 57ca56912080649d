"""Streams of engines that are killed or stopped continue on another one, exactly if greedy.

Prints how many of the streams that moved are exact. `SLIPSTREAM_STREAMS` is their number per kind.
"""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import Engine, make_model, metric, ready, router

STREAMS = int(os.environ.get("SLIPSTREAM_STREAMS", "8"))
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 160, "ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
]
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")


def await_up(front: str, url: str) -> None:
    """Wait until the router sends requests to an engine."""
    end = time.monotonic() + 300
    while metric(front, "slipstream_engine_up", engine=url) != 1:
        assert time.monotonic() < end, f"{url} stays down"
        time.sleep(0.5)


def body(kind: str, at: int) -> tuple[str, dict[str, Any]]:
    text = f"Question {at}: tell me about queues, locks and number {at * 7919}."
    if kind == "completion":
        return "/v1/completions", GREEDY | USAGE | {"prompt": text}
    chat = GREEDY | USAGE | {"messages": [{"role": "user", "content": text}]}
    if kind == "tools":
        chat |= {"tools": TOOLS, "tool_choice": "auto"}
    if kind == "stop":
        chat |= {"stop": ["never said", "zzzz"]}
    return "/v1/chat/completions", chat


def ask(url: str, kind: str, at: int, begun: threading.Event | None = None) -> dict[str, Any]:
    """A stream, folded; `begun` is set at its twentieth event with text."""
    path, asked = body(kind, at)
    request = urllib.request.Request(
        url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    said: dict[str, Any] = {"text": "", "ids": set(), "roles": 0, "finish": [], "usage": None}
    seen = 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return said | {"error": event["error"]["message"]}
            said["ids"].add(event["id"])
            said["usage"] = event.get("usage") or said["usage"]
            for choice in event["choices"]:
                assert choice.get("token_ids") is None, event
                delta = choice.get("delta", {})
                said["text"] += choice.get("text") or delta.get("content") or ""
                said["roles"] += "role" in delta
                said["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
                seen += 1
            if begun is not None and seen >= 20:
                begun.set()
    said["ids"] = len(said["ids"])
    return said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[list[Engine]]:
    started = [Engine(model, model.parent / f"vllm-{n}.log", flags=FLAGS) for n in range(2)]
    with ready(started):
        yield started


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_streams_that_move_are_exact(
    model: Path, engines: list[Engine], how: signal.Signals
) -> None:
    kinds = ("completion", "chat", "tools", "stop")
    asked = [(kind, at) for at in range(STREAMS) for kind in kinds]
    with ThreadPoolExecutor(16) as pool:
        wanted = list(pool.map(lambda of: ask(engines[0].url, *of), asked))
    urls = [engine.url for engine in engines]
    flags = ("--set=upstream.health_timeout_s=1", "--set=router.policy=round_robin")
    with router(urls, *flags) as front, ThreadPoolExecutor(len(asked)) as pool:
        for engine in engines:
            await_up(front, engine.url)
        begun = [threading.Event() for _ in asked]
        streams = [
            pool.submit(ask, front, *of, event) for of, event in zip(asked, begun, strict=True)
        ]
        for event in begun[: len(begun) // 2]:
            event.wait(timeout=300)
        since = time.monotonic()
        os.killpg(engines[1].process.pid, how)
        found = [stream.result() for stream in streams]
        took = time.monotonic() - since
        moved = metric(front, "slipstream_engine_streams_resumed_total", engine=urls[1])
        os.killpg(engines[1].process.pid, signal.SIGCONT) if how == signal.SIGSTOP else None
        if how == signal.SIGSTOP:
            await_up(front, urls[1])
    exact = {kind: [0, 0, 0] for kind in kinds}
    for (kind, at), one, other in zip(asked, found, wanted, strict=True):
        is_lost = "error" in one
        exact[kind][0] += 1
        exact[kind][1] += not is_lost and one == other
        exact[kind][2] += is_lost
        if one != other:
            print(kind, at, one.get("error") or (one, other), flush=True)
    print(f"{how.name}: {moved:.0f} moved, {took:.0f} s; of, exact, lost: {exact}", flush=True)
    assert moved > 0
    assert all(lost == 0 and same == number for number, same, lost in exact.values()), exact
