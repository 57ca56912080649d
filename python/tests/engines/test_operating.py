"""Stored responses, copies of requests, and the twin beside a fleet of real engines."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Engine, make_model, metric, post, ready, router, slipstream
from openai import OpenAI

ROUND_ROBIN = '--set=router.policy="round_robin"'


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    model = make_model(tmp_path_factory.mktemp("model") / "tiny")
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    started = [
        Engine(model, model.parent / f"vllm-{n}.log", development=True, variables=stores)
        for n in range(2)
    ]
    with ready(started):
        yield started


def await_metric(url: str, name: str, least: float, **labels: str) -> None:
    end = time.monotonic() + 120
    while metric(url, name, **labels) < least:
        assert time.monotonic() < end, name
        time.sleep(0.2)


def test_chains_of_responses_meet_the_engine_that_stores_them(engines: list[Engine]) -> None:
    urls = [engine.url for engine in engines]
    params: dict[str, Any] = {"model": "tiny", "max_output_tokens": 8, "temperature": 0}
    lasts = []
    with router(urls, ROUND_ROBIN) as front:
        client = OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
        for streamed in (False, True):
            last = None
            for turn in range(3):
                asked = params | {"input": f"Turn {turn}.", "previous_response_id": last}
                if streamed:
                    with client.responses.stream(**asked) as events:
                        last = events.get_final_response().id
                else:
                    last = client.responses.create(**asked).id
                assert client.responses.retrieve(last).id == last
            lasts.append(last)
        count = "slipstream_engine_stored_responses_total"
        assert metric(front, count, engine_was="known") == 10
        assert metric(front, count, engine_was="asked") == 0
    # Another router finds them by asking.
    with router(urls, ROUND_ROBIN) as front:
        client = OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)
        for last in lasts:
            client.responses.create(**params, input="More.", previous_response_id=last)
        assert metric(front, "slipstream_engine_stored_responses_total", engine_was="asked") == 2
        with pytest.raises(Exception) as error:
            client.responses.create(**params, input="x", previous_response_id="resp_none")
        assert getattr(error.value, "status_code", None) == 404


def test_the_twin_of_real_engines_is_compared_with_them(
    engines: list[Engine], tmp_path: Path
) -> None:
    urls = [engine.url for engine in engines]
    described = subprocess.run(
        [slipstream(), "describe", *urls], check=True, capture_output=True, text=True
    )
    twin = tmp_path / "twin.toml"
    # Steps of 5 s, so that its times are not those of the engines by chance.
    head, timing = described.stdout.split(".engine.timing]\n")
    constant = 'kind = "constant"\nstep_ns = 5_000_000_000\n'
    twin.write_text(
        f"{head}.engine.timing]\n{constant}\n[router]\n" + timing.split("[router]\n")[1]
    )
    with router(urls, ROUND_ROBIN, f"--shadow={twin}") as front:
        for n in range(44):
            body = {"model": "tiny", "prompt": f"Prompt {n % 4}. " * 40, "max_tokens": 4}
            body |= {"ignore_eos": True, "stream": True}
            body["stream_options"] = {"include_usage": True}
            request = urllib.request.Request(
                f"{front}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        await_metric(front, "slipstream_shadow_requests_total", 1)
        assert metric(front, "slipstream_shadow_skipped_total") == 0
        for url in urls:
            mean = "slipstream_shadow_ttft_mean_seconds"
            assert metric(front, mean, engine=url, side="predicted") >= 5
            assert metric(front, mean, engine=url, side="measured") > 0


def test_copies_reach_a_mirror(engines: list[Engine]) -> None:
    pools = {"serving": engines[0].url, "next": engines[1].url}
    flags = [f'--set=pool.{name}.engines=["{url}"]' for name, url in pools.items()]
    with router([], *flags, "--set=pool.next.mirror=1.0") as front:
        await_metric(front, "slipstream_engine_up", 2)
        for _ in range(3):
            post(front, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 4})
        count = "slipstream_engine_mirrored_total"
        await_metric(front, count, 3, engine=engines[1].url, outcome="answered")
        assert metric(front, "slipstream_engine_requests_total", engine=engines[0].url) == 3
