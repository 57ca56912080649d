"""What the probe learns of a real vLLM, against what that engine then does."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fleet import START_S, free_port, make_model, post

VOCABULARY = 512
BLOCK, BLOCKS, CONTEXT = 32, 64, 1024
"""Tokens per block, blocks of the cache, tokens of prompt and answer."""

SETTLED_S = 0.3
"""Events arrive within this time after the answer that they belong to."""

REQUESTS = 60


def slipstream(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [os.environ["SLIPSTREAM_BIN"], *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a `vllm serve` with a small cache that publishes KV events."""
    folder = tmp_path_factory.mktemp("probe")
    model = make_model(folder / "model", vocabulary=VOCABULARY)
    port = free_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://*:{free_port()}",
        "topic": "kv",
    }
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(Path(sys.executable).with_name("vllm")),
        "serve",
        str(model),
        f"--port={port}",
        "--host=127.0.0.1",
        "--served-model-name=tiny",
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--dtype=float32",
        f"--block-size={BLOCK}",
        f"--max-model-len={CONTEXT}",
        "--max-num-seqs=8",
        f"--num-gpu-blocks-override={BLOCKS}",
        "--enable-prompt-tokens-details",
        f"--kv-events-config={json.dumps(events)}",
    ]
    log = folder / "vllm.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, f"no answer in {START_S} s: {log.read_text()[-4000:]}"
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_engine_describes_itself(engine: str, tmp_path: Path) -> None:
    described = slipstream("describe", engine)
    assert described.returncode == 0, described.stderr
    cluster = tomllib.loads(described.stdout)
    assert cluster["model"]["name"] == "tiny"
    main = cluster["pool"]["main"]["engine"]
    assert (main["block_size"], main["num_gpu_blocks"]) == (BLOCK, BLOCKS)
    assert (main["max_model_len"], main["max_num_seqs"]) == (CONTEXT, 8)
    assert (main["tensor_parallel_size"], main["data_parallel_size"]) == (1, 1)
    assert main["enable_prefix_caching"] is True
    assert cluster["router"]["kv_events"] is True
    # It is a cluster as it is, of the model that the engine serves.
    file = tmp_path / "cluster.toml"
    file.write_text(described.stdout)
    load = ["--requests=20", "--isl=200", "--osl=8", "--rate=5", "--json"]
    simulated = slipstream("simulate", str(file), *load)
    assert simulated.returncode == 0, simulated.stdout + simulated.stderr
    report = json.loads(simulated.stdout)
    assert (report["model"], report["requests"]["succeeded"]) == ("tiny", 20)

    facts = json.loads(slipstream("describe", "--json", engine).stdout)[0]
    assert facts["kind"] == "vllm"
    (source,) = facts["kv_events"]
    assert source["endpoint"].startswith("tcp://127.0.0.1:") and source["topic"] == "kv"


class Follower:
    """`slipstream events cached`: an index fed by the engine's KV events."""

    def __init__(self, url: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [os.environ["SLIPSTREAM_BIN"], "events", "cached", url, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """State of the engine's only rank, with the cached tokens of `prompt`."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        (rank,) = json.loads(self.process.stdout.readline())["ranks"]
        return dict(rank)

    def settled(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """The state once no more events arrive."""
        last = None
        while (state := self.ask(prompt)) != last or not state["connected"]:
            last = state
            time.sleep(SETTLED_S)
        return state

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(timeout=60) == 0


def body(prompt: dict[str, Any]) -> dict[str, Any]:
    salted = {"cache_salt": prompt["salt"]} if "salt" in prompt else {}
    return {
        "model": "tiny",
        "prompt": prompt["tokens"],
        "max_tokens": 40,
        "ignore_eos": True,
        "temperature": 0.0,
    } | salted


def prompts(count: int) -> Iterator[dict[str, Any]]:
    """Prompts that share prefixes and need three times the cache; some have a salt."""
    drawn = random.Random(5)
    text = [[drawn.randrange(10, VOCABULARY) for _ in range(400)] for _ in range(6)]
    for _ in range(count):
        begin = drawn.choice(text)[: drawn.randrange(1, 400)]
        end = [drawn.randrange(10, VOCABULARY) for _ in range(drawn.choice([0, 0, 50, 130]))]
        prompt: dict[str, Any] = {"tokens": begin + end}
        if drawn.random() < 0.2:
            prompt["salt"] = "tenant"
        yield prompt


def cached(answer: dict[str, Any]) -> int:
    details = answer["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"]) if details else 0


@pytest.mark.parametrize("size", [BLOCK, 16])
def test_the_index_predicts_the_engines_hits(engine: str, size: int) -> None:
    """Also for an index whose blocks are smaller than the engine's, and after both are cleared."""
    follower = Follower(engine, f"--block-size={size}")
    total = 0
    for number, prompt in enumerate(prompts(REQUESTS)):
        if number == REQUESTS // 2:
            post(engine, "/reset_prefix_cache", {})
            # vLLM publishes with its next step, which stores no block here.
            post(engine, "/v1/completions", body({"tokens": [7]}) | {"max_tokens": 1})
            assert follower.settled(prompt)["blocks"] == 0
        if number % 10 == 9:
            # Requests that compute the same prefix at once hold it twice.
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda p: post(engine, "/v1/completions", body(p)), [prompt] * 4))
        found = follower.settled(prompt)
        answer = post(engine, "/v1/completions", body(prompt))
        # The last token is computed in any case, and the engine reuses whole blocks of its own.
        reusable = min(found["cached_tokens"], len(prompt["tokens"]) - 1) // BLOCK * BLOCK
        assert cached(answer) == reusable, (number, found, len(prompt["tokens"]))
        total += cached(answer)
    state = follower.settled({"tokens": []})
    assert total > 20 * BLOCK, "prompts share prefixes"
    assert (state["gaps"], state["lost_batches"]) == (0, 0)
    assert state["skipped_blocks"] == 0
    follower.close()


def test_a_late_follower_catches_up_by_replay(engine: str) -> None:
    prompt = {"tokens": [random.Random(9).randrange(10, VOCABULARY) for _ in range(10 * BLOCK + 1)]}
    post(engine, "/v1/completions", body(prompt))
    follower = Follower(engine)
    assert follower.settled(prompt)["cached_tokens"] == 10 * BLOCK
    follower.close()
