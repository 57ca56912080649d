"""Streams that `slipstream` serves, as `vllm bench serve` counts them."""

import asyncio

import aiohttp
import pytest
from served import serving
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    RequestFuncOutput,
    async_request_openai_chat_completions,
    async_request_openai_completions,
)

MODEL = "qwen3-8b"


@pytest.mark.parametrize(
    ("path", "request_func"),
    [
        ("completions", async_request_openai_completions),
        ("chat/completions", async_request_openai_chat_completions),
    ],
)
def test_vllms_benchmark_finds_a_gap_less_than_tokens(path, request_func) -> None:
    async def ask(url: str, tokens: int, extra: dict[str, object]) -> RequestFuncOutput:
        request = RequestFuncInput(
            prompt="Count to ten.",
            api_url=f"{url}/v1/{path}",
            prompt_len=5,
            output_len=tokens,
            model=MODEL,
            ignore_eos=True,
            extra_body=extra,
        )
        async with aiohttp.ClientSession() as session:
            return await request_func(request, session)

    with serving("--set", "model.preset=qwen3-8b") as url:
        for tokens in (1, 2, 17):
            for extra in ({}, {"stop": ["no such text"]}):
                output = asyncio.run(ask(url, tokens, extra))
                assert output.success, output.error
                assert output.output_tokens == tokens
                # Every gap but those between tokens would be counted as one, and lower the mean.
                assert len(output.itl) == tokens - 1
