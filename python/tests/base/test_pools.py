"""The official `openai` package against prefill and decode pools."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

POOLS = Path(__file__).parents[3] / "examples" / "cluster-prefill-decode.toml"
PROMPT = "Tell me of the sea, its salt and its ships. " * 40
PARAMS = {"max_tokens": 24, "seed": 11, "extra_body": {"ignore_eos": True}}


def metric(server, name: str) -> float:
    """A metric, summed over its labels."""
    text = server.client().get("/../metrics", cast_to=str)
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return sum(float(value) for series, value in lines if series.split("{")[0] == name)


def await_metric(server, name: str, reached: Callable[[float], bool]) -> None:
    """Read a metric until it has the expected value."""
    deadline = time.monotonic() + 30
    while not reached(value := metric(server, name)):
        assert time.monotonic() < deadline, f"{name} is still {value}"


@pytest.mark.parametrize("order", ["pull", "push"])
def test_a_prompt_that_another_worker_computes_changes_no_answer(start, client, model, order):
    expected = client.completions.create(model=model, prompt=PROMPT, **PARAMS)
    with start(str(POOLS), "--speedup", "1000", "--set", f'kv.hand_over="{order}"') as pools:
        name = pools.client().models.list().data[0].id
        whole = pools.client().completions.create(model=name, prompt=PROMPT, **PARAMS)
        assert whole.choices[0].text == expected.choices[0].text
        assert whole.usage.prompt_tokens == expected.usage.prompt_tokens
        assert metric(pools, "slipstream_rank_prompts_handed_over_total") == 1
        stream = pools.client().completions.create(
            model=name, prompt="And now: " + PROMPT, stream=True, **PARAMS
        )
        texts = [chunk.choices[0].text for chunk in stream]
        assert sum(bool(text) for text in texts) == 24, "one event a token"
        assert metric(pools, "slipstream_rank_prompts_received_total") == 2


def test_a_client_that_leaves_takes_its_prompt_with_it(start):
    with start(str(POOLS), "--speedup", "0.001") as pools:
        name = pools.client().models.list().data[0].id
        stream = pools.client().completions.create(model=name, prompt=PROMPT, stream=True, **PARAMS)
        await_metric(pools, "vllm:kv_cache_usage_perc", lambda held: held > 0)
        stream.close()
        await_metric(pools, "vllm:kv_cache_usage_perc", lambda held: held == 0)
        assert metric(pools, "slipstream_rank_prompts_handed_over_total") == 0
