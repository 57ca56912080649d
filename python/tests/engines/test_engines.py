"""Answers of real engines through the router are those of the engines."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Engine, make_model, metric, post, ready, router
from openai import OpenAI

PROMPT = "Once upon a time there was an engineer who measured everything twice, and then"
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Tell me about queues in twenty words."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[list[Engine]]:
    started = [Engine(model, model.parent / f"vllm-{n}.log") for n in range(2)]
    with ready(started):
        yield started


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two equal ones."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        url + path,
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    return [bare(json.loads(event.removeprefix("data: "))) for event in events[:-2]]


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream says. vLLM joins tokens in one event if they are ready together."""
    said: dict[str, Any] = {"text": "", "tokens": [], "reasons": [], "usage": None, "fields": set()}
    for event in events:
        said["fields"] |= event.keys()
        said["usage"] = event.get("usage") or said["usage"]
        for choice in event["choices"]:
            said["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            said["tokens"] += choice.get("token_ids") or []
            said["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return said


def test_answers_are_those_of_the_engine(engines: list[Engine]) -> None:
    completion = GREEDY | {"prompt": PROMPT, "return_token_ids": True}
    chat = GREEDY | {"messages": MESSAGES, "chat_template_kwargs": {"x": [1, None]}}
    usage = {"stream_options": {"include_usage": True}}
    direct = engines[0].url
    with router([engine.url for engine in engines]) as front:
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            for _ in range(2):  # from either engine, cached or not
                assert bare(post(front, path, body)) == bare(post(direct, path, body))
                streamed = [folded(stream(url, path, body | usage)) for url in (front, direct)]
                assert streamed[0] == streamed[1]
                assert streamed[0]["text"] and streamed[0]["usage"]
        tokens = {"model": "tiny", "prompt": PROMPT}
        assert post(front, "/tokenize", tokens) == post(direct, "/tokenize", tokens)


def test_the_official_client_sees_models_answers_and_errors(engines: list[Engine]) -> None:
    with router([engine.url for engine in engines]) as front:
        client = OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
        assert [card.id for card in client.models.list().data] == ["tiny"]
        whole = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=20
        )
        parts = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=20, stream=True
        )
        said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert said == whole.choices[0].message.content
        for wrong in ({"max_tokens": -1}, {"temperature": -5}):
            with pytest.raises(Exception) as error:
                client.completions.create(model="tiny", prompt="x", **wrong)
            assert getattr(error.value, "status_code", None) == 400
        with pytest.raises(Exception) as error:
            client.completions.create(model="other", prompt="x")
        assert getattr(error.value, "status_code", None) == 404


def test_turns_of_a_conversation_meet_the_engine_that_has_them(engines: list[Engine]) -> None:
    with router([engine.url for engine in engines]) as front:
        for group in range(4):
            messages = [{"role": "system", "content": f"Assistant {group}. " + "Be brief. " * 60}]
            for turn in range(3):
                messages.append({"role": "user", "content": f"Question {turn}?"})
                answer = post(
                    front, "/v1/chat/completions", GREEDY | {"messages": messages, "max_tokens": 8}
                )
                messages.append(answer["choices"][0]["message"] | {"role": "assistant"})
                messages[-1] = {"role": "assistant", "content": messages[-1]["content"]}
        took = [metric(front, "slipstream_engine_requests_total", engine=e.url) for e in engines]
        # A conversation stays; several are spread.
        assert sum(took) == 12
        assert all(count % 3 == 0 for count in took), took


@pytest.mark.parametrize("resume", ["text", "tokens"])
def test_a_stream_survives_the_death_of_its_engine(
    model: Path, engines: list[Engine], resume: str
) -> None:
    doomed = Engine(model, model.parent / f"doomed-{resume}.log")
    other = engines[1]
    try:
        doomed.await_ready()
        body = GREEDY | {"prompt": PROMPT, "max_tokens": 600, "seed": 1}
        undisturbed = post(other.url, "/v1/completions", body)
        with router([doomed.url, other.url], f"--set=upstream.resume={resume}") as front:
            found: list[dict[str, Any]] = []
            begun = threading.Event()

            def read() -> None:
                request = urllib.request.Request(
                    f"{front}/v1/completions",
                    json.dumps(body | {"stream": True}).encode(),
                    {"Content-Type": "application/json", "x-slipstream-worker": "w0"},
                )
                with urllib.request.urlopen(request, timeout=300) as answer:
                    for line in answer:
                        if line.startswith(b"data: {"):
                            found.append(json.loads(line.removeprefix(b"data: ")))
                        if len(found) == 20:
                            begun.set()

            reader = threading.Thread(target=read)
            reader.start()
            assert begun.wait(timeout=300)
            doomed.kill()
            reader.join(timeout=300)
            assert not reader.is_alive()
            assert not any("error" in event for event in found), found[-1]
            assert len({event["id"] for event in found}) == 1
            text = "".join(event["choices"][0]["text"] for event in found if event["choices"])
            whole = undisturbed["choices"][0]["text"]
            if resume == "tokens":
                assert text == whole
            else:
                # Up to the seam it is the same; behind it tokens may be cut differently.
                assert text[:40] == whole[:40]
                assert found[-1]["choices"][0]["finish_reason"] == "length"
            assert metric(front, "slipstream_engine_streams_resumed_total") == 1
            assert metric(front, "slipstream_engine_answers_broken_total") == 0
            # The dead engine is known, and does not disturb others.
            deadline = time.monotonic() + 60
            while metric(front, "slipstream_engine_up") != 1:
                assert time.monotonic() < deadline
            assert bare(post(front, "/v1/completions", body)) == bare(undisturbed)
    finally:
        doomed.kill()
