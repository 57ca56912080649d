"""Real engines whose blocks leave layer by layer, and whose passes wait for them layer by layer."""

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleet import LAYERS, Engine, make_model, metric, post, router
from test_disaggregated import (
    BLOCK,
    GREEDY,
    PEERS_WAIT_S,
    Fleet,
    handed_over,
    prompt,
    settled,
    tokens,
    total,
)

pytest.importorskip("slipstream._native", reason="the connector is not installed")

PROMPTS = 24


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_model(tmp_path_factory.mktemp("layers") / "tiny")
    # Sockets' paths are short.
    folder = Path(tempfile.mkdtemp(prefix="layers-"))
    (folder / "peers").mkdir()

    def engine(name: str, role: str, *flags: str) -> Engine:
        connector = {
            "listen": [f"unix://{folder}/{name}"],
            "peers_dir": str(folder / "peers"),
            "host_bytes": 256 << 20,
            # The machine may be busy with other engines.
            "remote_wait_s": 20.0,
            "layer_slices": LAYERS,
        }
        if role == "kv_consumer":
            connector["layer_load_blocks_max"] = 64
        transfer = {
            "kv_connector": "SlipstreamConnector",
            "kv_connector_module_path": "slipstream.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        }
        return Engine(model, model.parent / f"{name}.log", transfer=transfer, flags=flags)

    alone = Engine(model, model.parent / "alone.log")
    prefill = engine("p", "kv_producer")
    decode = engine("d", "kv_consumer", "--no-async-scheduling")
    try:
        for each in (alone, prefill, decode):
            each.await_ready()
        yield Fleet(model, folder, [prefill], [decode], alone)
    finally:
        for each in (alone, prefill, decode):
            each.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_answers_are_those_of_one_engine(fleet: Fleet) -> None:
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    end = time.monotonic() + PEERS_WAIT_S
    while total([decode], "loaded_blocks") == 0:
        handed_over(prefill, decode, GREEDY | {"prompt": prompt(), "max_tokens": 2})
        settled(lambda: total([decode], "loaded_blocks"))
        assert time.monotonic() < end, "engines do not load each other's blocks"
    loaded = total([decode], "loaded_blocks")
    slices = total([decode], "hit_blocks", tier="peer")
    for _ in range(4):
        body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
        wanted = tokens(post(fleet.alone.url, "/v1/completions", body))
        assert tokens(handed_over(prefill, decode, body)) == wanted
    assert settled(lambda: total([decode], "loaded_blocks")) == loaded + 4 * 6
    assert settled(lambda: total([decode], "hit_blocks", tier="peer")) == slices + 4 * 6 * LAYERS
    assert total([decode], "load_failed_blocks") == 0
    for outcome in ("late", "foreign", "keys", "no_peers", "parallelism"):
        assert total([decode], "remote_prefills", outcome=outcome) == 0, outcome
    assert total([prefill], "saved_blocks") > 0


def test_an_engine_whose_blocks_are_whole_computes_them(fleet: Fleet) -> None:
    transfer = {
        "kv_connector": "SlipstreamConnector",
        "kv_connector_module_path": "slipstream.vllm",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"peers_dir": str(fleet.folder / "peers")},
    }
    log = fleet.model.parent / "whole.log"
    whole = Engine(fleet.model, log, transfer=transfer)
    try:
        whole.await_ready()
        body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
        wanted = tokens(post(fleet.alone.url, "/v1/completions", body))
        assert tokens(handed_over(fleet.prefill[0], whole, body)) == wanted
        assert total([whole], "loaded_blocks") == 0
        assert f"full {BLOCK} in {LAYERS} slices" in log.read_text()
    finally:
        whole.kill()


def test_the_prefill_engine_dies_under_load(fleet: Fleet) -> None:
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    bodies = [
        GREEDY | {"prompt": prompt(blocks=12), "return_token_ids": True} for _ in range(PROMPTS)
    ]
    wanted = [tokens(post(fleet.alone.url, "/v1/completions", body)) for body in bodies]
    done, killed = 0, threading.Event()
    with router([decode.url], prefill=[prefill.url]) as front:

        def ask(at: int) -> list[int]:
            nonlocal done
            found = tokens(post(front, "/v1/completions", bodies[at]))
            done += 1
            if done >= PROMPTS // 3 and not killed.is_set():
                killed.set()
                prefill.kill()
            return found

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(PROMPTS))) == wanted
        prefills = "slipstream_engine_prefills_total"
        assert metric(front, prefills, outcome="transferred") > 0
    assert killed.is_set()
