"""Real engines that compute prompts for others: the answers of one engine, and blocks that move."""

import json
import random
import shutil
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import Engine, free_port, make_model, metric, post, ready, router

pytest.importorskip("slipstream._native", reason="the connector is not installed")

BLOCK = 32
PEERS_WAIT_S = 60
"""Engines have found each other within this time, also on a busy machine."""

GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@dataclass
class Fleet:
    """Engines of three roles."""

    model: Path
    folder: Path
    prefill: list[Engine]
    decode: list[Engine]
    alone: Engine
    """Has no connector, and computes everything."""

    def engine(self, name: str, role: str, *, port: int | None = None) -> Engine:
        """A further engine, not ready yet."""
        connector = {
            "listen": [f"unix://{self.folder}/{name}"],
            "peers_dir": str(self.folder / "peers"),
            "host_bytes": 256 << 20,
            # The machine may be busy with other engines.
            "remote_wait_s": 20.0,
        }
        transfer = {
            "kv_connector": "SlipstreamConnector",
            "kv_connector_module_path": "slipstream.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        }
        log = self.model.parent / f"{name}.log"
        return Engine(self.model, log, transfer=transfer, port=port)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_model(tmp_path_factory.mktemp("apart") / "tiny")
    # Sockets' paths are short.
    folder = Path(tempfile.mkdtemp(prefix="pd-"))
    (folder / "peers").mkdir()
    made = Fleet(model, folder, [], [], Engine(model, model.parent / "alone.log"))
    try:
        for n in range(2):
            made.prefill.append(made.engine(f"p{n}", "kv_producer"))
            made.decode.append(made.engine(f"d{n}", "kv_consumer"))
        for engine in (made.alone, *made.prefill, *made.decode):
            engine.await_ready()
        await_peers(made)
        yield made
    finally:
        for engine in (made.alone, *made.prefill, *made.decode):
            engine.kill()
        shutil.rmtree(folder, ignore_errors=True)


def total(engines: list[Engine], name: str, **labels: str) -> float:
    """Sum over the engines that count `name` already."""
    found = 0.0
    for engine in engines:
        try:
            found += metric(engine.url, f"vllm:slipstream_{name}_total", **labels)
        except AssertionError:
            continue
    return found


def handed_over(prefill: Engine, decode: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a completion whose prompt `prefill` computes, as vLLM's own proxies get it."""
    ask = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    first = post(
        prefill.url, "/v1/completions", body | {"max_tokens": 1, "kv_transfer_params": ask}
    )
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    answer = post(decode.url, "/v1/completions", body | {"kv_transfer_params": params})
    answer["params"] = params
    return answer


def await_peers(fleet: Fleet) -> None:
    """Wait until each decode engine has loaded blocks of each prefill engine."""
    end = time.monotonic() + PEERS_WAIT_S
    for prefill in fleet.prefill:
        for decode in fleet.decode:
            while True:
                before = total([decode], "hit_blocks", tier="peer")
                handed_over(prefill, decode, GREEDY | {"prompt": prompt(), "max_tokens": 2})
                settled(lambda decode=decode: total([decode], "loaded_blocks"))
                if total([decode], "hit_blocks", tier="peer") > before:
                    break
                assert time.monotonic() < end, "engines do not load each other's blocks"


def settled(read: Any) -> float:
    """A counter once it stands still: engines report counts at intervals of half a second."""
    last = read()
    while True:
        time.sleep(1.5)
        now = read()
        if now == last:
            return float(now)
        last = now


def prompt(blocks: int = 6, rest: int = 11) -> list[int]:
    """Tokens that no engine has seen."""
    return [random.randrange(5, 250) for _ in range(blocks * BLOCK + rest)]


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def stream_tokens(url: str, path: str, body: dict[str, Any]) -> list[int]:
    request = urllib.request.Request(
        url + path,
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    found: list[int] = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            found += choice.get("token_ids") or []
    return found


def test_a_proxy_of_vllm_works_unchanged(fleet: Fleet) -> None:
    body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
    loaded = settled(lambda: total(fleet.decode[:1], "hit_blocks", tier="peer"))
    answer = handed_over(fleet.prefill[0], fleet.decode[0], body)
    assert tokens(answer) == tokens(post(fleet.alone.url, "/v1/completions", body))
    params = answer["params"]
    assert params["remote_num_tokens"] == 6 * BLOCK
    assert params["remote_host"] == f"unix://{fleet.folder}/p0"
    now = settled(lambda: total(fleet.decode[:1], "hit_blocks", tier="peer"))
    assert now == loaded + 6, "all blocks come from the prefill engine"
    # Its last tokens are computed by the decode engine alone.
    short = post(
        fleet.prefill[0].url,
        "/v1/completions",
        GREEDY
        | {"prompt": [7, 8, 9], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    )
    assert short["kv_transfer_params"] is None, "no whole block"


def test_answers_through_two_engines_are_those_of_one(fleet: Fleet) -> None:
    urls = [engine.url for engine in fleet.decode]
    moved = settled(lambda: total(fleet.decode, "loaded_blocks"))
    cases = 0
    with router(urls, prefill=[engine.url for engine in fleet.prefill]) as front:
        for _ in range(4):
            completion = GREEDY | {"prompt": prompt(), "return_token_ids": True}
            text = " ".join(str(random.randrange(10**6)) for _ in range(120))
            chat = GREEDY | {
                "messages": [{"role": "user", "content": text}],
                "return_token_ids": True,
                "logprobs": True,
                "top_logprobs": 2,
            }
            for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
                one = post(fleet.alone.url, path, body)
                two = post(front, path, body)
                assert tokens(one) == tokens(two)
                assert one["usage"] == two["usage"]
                if path.endswith("chat/completions"):
                    assert one["choices"][0]["message"] == two["choices"][0]["message"]
                assert stream_tokens(front, path, body) == tokens(one)
                cases += 2
        # At one engine, and right as well.
        for more in (
            {"n": 2, "temperature": 0.8, "seed": 5},
            {"prompt": [prompt(), prompt()]},
            {"echo": True},
        ):
            body = GREEDY | {"prompt": prompt()} | more
            one, two = (post(url, "/v1/completions", body) for url in (fleet.alone.url, front))
            assert [c["text"] for c in one["choices"]] == [c["text"] for c in two["choices"]]
        prefills = "slipstream_engine_prefills_total"
        assert metric(front, prefills, outcome="transferred") == cases
        assert metric(front, prefills) == cases
    assert settled(lambda: total(fleet.decode, "loaded_blocks")) >= moved + 4 * 2 * 6
    for outcome in ("late", "foreign", "keys", "no_peers", "parallelism"):
        assert total(fleet.decode, "remote_prefills", outcome=outcome) == 0, outcome
    # A producer loads nothing, and a consumer saves nothing.
    assert total(fleet.prefill, "loaded_blocks") == 0
    assert total(fleet.decode, "saved_blocks") == 0


def test_engines_of_the_wrong_role_answer_right(fleet: Fleet) -> None:
    body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
    wanted = tokens(post(fleet.alone.url, "/v1/completions", body))
    # One that has no connector, and one that loads nothing.
    for decode in (fleet.alone, fleet.prefill[1]):
        assert tokens(handed_over(fleet.prefill[0], decode, body)) == wanted
    ask = body | {"prompt": prompt(), "kv_transfer_params": {"do_remote_decode": True}}
    for prefill in (fleet.alone, fleet.decode[0]):
        assert post(prefill.url, "/v1/completions", ask)["kv_transfer_params"] is None
    # The router takes them as they are.
    urls = [fleet.prefill[0].url]
    for prefill in (fleet.alone, fleet.decode[0]):
        with router(urls, prefill=[prefill.url]) as front:
            assert tokens(post(front, "/v1/completions", body)) == wanted
            assert metric(front, "slipstream_engine_prefills_total", outcome="no_params") == 1


def test_what_a_prefill_engine_has_cached_is_handed_over_too(fleet: Fleet) -> None:
    body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
    prefill, decode = fleet.prefill[0], fleet.decode[1]
    # Computed without the protocol, and computed again from the cache.
    post(prefill.url, "/v1/completions", body)
    answer = handed_over(prefill, decode, body)
    assert tokens(answer) == tokens(post(fleet.alone.url, "/v1/completions", body))


def test_prefill_engines_die_under_load(fleet: Fleet) -> None:
    doomed = fleet.engine("doomed", "kv_producer")
    try:
        doomed.await_ready()
        bodies = [
            GREEDY | {"prompt": prompt(blocks=12), "return_token_ids": True} for _ in range(48)
        ]
        wanted = [tokens(post(fleet.alone.url, "/v1/completions", body)) for body in bodies]
        urls = [engine.url for engine in fleet.decode]
        with router(urls, prefill=[doomed.url, fleet.prefill[0].url]) as front:
            done = 0
            killed = threading.Event()

            def ask(at: int) -> list[int]:
                nonlocal done
                if at % 2:
                    found = stream_tokens(front, "/v1/completions", bodies[at])
                else:
                    found = tokens(post(front, "/v1/completions", bodies[at]))
                done += 1
                if done >= 12 and not killed.is_set():
                    killed.set()
                    doomed.kill()
                return found

            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(ask, range(len(bodies))))
            assert found == wanted
            assert killed.is_set()
            requests = "slipstream_engine_requests_total"
            for engine in (doomed, fleet.prefill[0], *fleet.decode):
                assert metric(front, requests, engine=engine.url) > 0
            prefills = "slipstream_engine_prefills_total"
            assert metric(front, prefills, outcome="transferred") > 0
            assert metric(front, "slipstream_engine_up", engine=doomed.url) == 0
    finally:
        doomed.kill()


def test_parameters_of_nixl_are_passed_on(fleet: Fleet) -> None:
    """The connector of vLLM, whose parameters name blocks and addresses of the prefill engine."""
    pytest.importorskip("nixl._api", reason="NIXL is not installed")
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    engines = [
        Engine(
            fleet.model,
            fleet.model.parent / f"nixl-{n}.log",
            transfer=transfer,
            variables={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "UCX_TLS": "tcp,sm,self"},
        )
        for n in range(2)
    ]
    with ready(engines):
        prefill, decode = engines
        with router([decode.url], prefill=[prefill.url]) as front:
            for _ in range(6):
                body = GREEDY | {"prompt": prompt(), "return_token_ids": True}
                wanted = tokens(post(fleet.alone.url, "/v1/completions", body))
                assert tokens(post(front, "/v1/completions", body)) == wanted
                again = body | {"prompt": prompt()}
                wanted = tokens(post(fleet.alone.url, "/v1/completions", again))
                assert stream_tokens(front, "/v1/completions", again) == wanted
            prefills = "slipstream_engine_prefills_total"
            assert metric(front, prefills, outcome="transferred") == 12
        end = time.monotonic() + 60
        while metric(decode.url, "vllm:nixl_bytes_transferred_sum") == 0:
            assert time.monotonic() < end, "no block was transferred"
            time.sleep(0.5)
