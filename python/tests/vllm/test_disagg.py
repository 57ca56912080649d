"""Disaggregated prefill: roles, and `kv_transfer_params` between two of vLLM's schedulers.

`rig.Worker` compares every block that a model would read with its tokens, in each step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from double import DoubleStore
from rig import BLOCK, Rig, Shape
from slipstream.vllm import connector as connector_module
from slipstream.vllm.disagg import Server
from test_transfers import BLOCK_BYTES, OURS, wait_loaded, wait_saved
from vllm.v1.request import RequestStatus

BLOCKS, REST = 12, 5
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NoOther:
    """Peers that have nothing."""

    def longest(self, *given: Any) -> tuple[str, int]:
        return "", given[-1]

    def is_settled(self) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class Pair:
    """A prefill engine and a decode engine, whose stores the test connects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
        self.stores = [DoubleStore(BLOCK_BYTES), DoubleStore(BLOCK_BYTES)]
        opened = iter(self.stores)
        monkeypatch.setattr(connector_module, "open_store", lambda *_: next(opened))
        options = {"remote_wait_s": 3600.0} | extra
        self.prefill = Rig(num_blocks=64, role="kv_producer", **OURS)
        self.decode = Rig(num_blocks=64, role="kv_consumer", extra=options, **OURS)
        self.prefill.connector.scheduler.server = Server("p", "tcp://10.0.0.1:7300", 1, BLOCK)
        self.decode.connector.scheduler.follow(NoOther())
        self.prompt = self.prefill.tokens(BLOCKS * BLOCK + REST)

    def ask(self, tokens: list[int] | None = None) -> dict[str, Any] | None:
        """What the prefill engine answers."""
        tokens = tokens if tokens is not None else self.prompt
        name = self.prefill.add(tokens, max_tokens=1, transfer=dict(ASK))
        self.prefill.drain()
        wait_saved(self.prefill)
        return self.prefill.handed_over[name]

    def move(self, count: int | None = None) -> None:
        """Let blocks of the prefill engine arrive at the decode engine."""
        blocks = list(self.stores[0].blocks.items())[:count]
        data = b"".join(block for _, block in blocks)
        self.stores[1].put([key for key, _ in blocks], memoryview(data))

    def outcome(self) -> list[str]:
        counts = self.decode.connector.scheduler.counts
        return [name for name in counts if name.startswith("remote_prefills.") and counts[name]]

    def finish(self) -> None:
        """Let the decode engine answer."""
        for _ in range(200):
            wait_loaded(self.decode)
            if not self.decode.scheduler.has_unfinished_requests():
                return
            self.decode.step()
        raise AssertionError("the request never ends")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(monkeypatch)
    yield made
    made.prefill.close()
    made.decode.close()


def test_the_decode_engine_waits_for_the_blocks_and_computes_none(pair: Pair) -> None:
    params = pair.ask()
    assert params is not None
    request = pair.decode.add(pair.prompt, max_tokens=3, transfer=dict(params))
    hashes = pair.decode.scheduler.requests[request].block_hashes
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "r1",
        "remote_block_ids": params["remote_block_ids"],
        "remote_host": "10.0.0.1",
        "remote_port": 7300,
        "remote_num_tokens": BLOCKS * BLOCK,
        "remote_block_key": hashes[BLOCKS - 1].hex(),
        "tp_size": 1,
        # vLLM's: what the prefill engine had cached.
        "remote_prefill_cached_tokens": 0,
    }
    assert len(params["remote_block_ids"][0]) == BLOCKS + 1
    for _ in range(5):
        assert not pair.decode.step().num_scheduled_tokens
    pair.move(count=4)
    for _ in range(5):
        assert not pair.decode.step().num_scheduled_tokens, "some of them are not enough"
    pair.move()
    pair.finish()
    assert pair.decode.worker.computed_blocks == 0
    assert pair.outcome() == ["remote_prefills.arrived"]
    assert not pair.decode.connector.scheduler._remote._waiting


@pytest.mark.parametrize("rest", [0, REST])
def test_a_prompt_that_the_device_has_already_waits_for_nothing(pair: Pair, rest: int) -> None:
    prompt = pair.prompt[: BLOCKS * BLOCK + rest]
    for arrived in (1, 2, 3):
        params = pair.ask(prompt)
        pair.move()
        pair.decode.step()
        pair.decode.add(prompt, max_tokens=1, transfer=params)
        pair.finish()
        counts = pair.decode.connector.scheduler.counts
        assert counts["remote_prefills.arrived"] == arrived
    assert pair.outcome() == ["remote_prefills.arrived"]
    # The last token is computed always, and with it its block.
    assert pair.decode.worker.computed_blocks == (3 if rest == 0 else 0)


def test_the_end_of_the_wait_computes_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch, remote_wait_s=0.0)
    params = pair.ask()
    pair.move(count=4)
    pair.decode.step()
    pair.decode.add(pair.prompt, max_tokens=3, transfer=params)
    pair.finish()
    assert pair.decode.worker.computed_blocks == BLOCKS - 4
    assert pair.outcome() == ["remote_prefills.late"]
    pair.prefill.close()
    pair.decode.close()


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"remote_block_key": None}, "foreign"),
        ({"remote_num_tokens": None}, "foreign"),
        ({"remote_num_tokens": "192"}, "foreign"),
        ({"tp_size": 2}, "parallelism"),
        ({"remote_block_key": "00" * 32}, "keys"),
        ({"remote_num_tokens": -16}, "keys"),
        ({"remote_num_tokens": 0}, "keys"),
        ({"remote_num_tokens": 10**12}, "keys"),
    ],
)
def test_parameters_that_do_not_fit_are_counted_and_the_prompt_is_computed(
    pair: Pair, change: dict[str, Any], outcome: str
) -> None:
    params = pair.ask()
    assert params is not None
    pair.decode.add(pair.prompt, max_tokens=1, transfer=params | change)
    pair.finish()
    assert pair.decode.worker.computed_blocks == BLOCKS
    assert pair.outcome() == [f"remote_prefills.{outcome}"]


def test_an_engine_of_other_blocks_computes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = iter([DoubleStore(BLOCK_BYTES), DoubleStore(2 * BLOCK_BYTES)])
    monkeypatch.setattr(connector_module, "open_store", lambda *_: next(opened))
    prefill = Rig(num_blocks=64, role="kv_producer", **OURS)
    decode = Rig(num_blocks=64, role="kv_consumer", shapes=(Shape(block=2 * BLOCK),), **OURS)
    prefill.connector.scheduler.server = Server("p", "tcp://10.0.0.1:7300", 1, BLOCK)
    decode.connector.scheduler.follow(NoOther())
    prompt = prefill.tokens(BLOCKS * BLOCK + REST)
    name = prefill.add(prompt, max_tokens=1, transfer=dict(ASK))
    prefill.drain()
    decode.add(prompt, max_tokens=3, transfer=prefill.handed_over[name])
    decode.drain()
    assert decode.worker.computed_blocks == BLOCKS // 2
    assert decode.connector.scheduler.counts["remote_prefills.keys"] == 1
    prefill.close()
    decode.close()


def test_without_peers_no_request_waits(pair: Pair) -> None:
    pair.decode.connector.scheduler.follow(None)
    pair.decode.add(pair.prompt, max_tokens=1, transfer=pair.ask())
    pair.finish()
    assert pair.outcome() == ["remote_prefills.no_peers"]


def test_a_request_that_waits_can_be_aborted(pair: Pair) -> None:
    name = pair.decode.add(pair.prompt, max_tokens=1, transfer=pair.ask())
    pair.decode.step()
    pair.decode.abort(name)
    pair.decode.step()
    assert not pair.decode.connector.scheduler._remote._waiting
    assert not pair.decode.scheduler.has_unfinished_requests()


def test_nothing_is_offered_that_no_engine_could_load(pair: Pair) -> None:
    counts = pair.prefill.connector.scheduler.counts
    assert pair.ask(pair.prompt[: BLOCK - 1]) is None, "no whole block"
    # Without the protocol, nothing is said.
    name = pair.prefill.add(pair.prompt, max_tokens=1)
    pair.prefill.drain()
    assert pair.prefill.handed_over[name] is None
    # Aborted: its client is gone.
    name = pair.prefill.add(pair.prefill.tokens(40), max_tokens=9, transfer=dict(ASK))
    request = pair.prefill.scheduler.requests[name]
    pair.prefill.step()
    pair.prefill.abort(name)
    assert request.status == RequestStatus.FINISHED_ABORTED and request.num_computed_tokens > BLOCK
    assert pair.prefill.connector.request_finished(request, [1, 2, 3]) == (False, None)
    # It serves no blocks, or those of other weights.
    server = pair.prefill.connector.scheduler.server
    pair.prefill.connector.scheduler.server = None
    assert pair.ask() is None
    pair.prefill.connector.scheduler.server = server
    assert pair.ask() is not None
    assert counts["remote_decodes.offered"] == 1
    pair.prefill.connector.weights_changed("a test")
    assert pair.prefill.connector.scheduler.server is None
    # A decode engine offers nothing of what it got.
    assert pair.decode.connector.scheduler.server is None


def test_roles_mean_what_they_mean_in_vllm(pair: Pair) -> None:
    for _ in range(2):
        # The second time its own store has it.
        assert pair.ask() is not None
        assert pair.prefill.worker.computed_blocks == BLOCKS
        pair.prefill.worker.computed_blocks = 0
        assert pair.prefill.scheduler.reset_prefix_cache()
    assert len(pair.stores[0].blocks) == BLOCKS
    pair.decode.add(pair.prompt, max_tokens=3 * BLOCK)
    pair.finish()
    assert pair.decode.worker.computed_blocks > BLOCKS
    pair.decode.step()
    assert not pair.stores[1].blocks and pair.stores[1].put_calls == 0


def test_cached_blocks_that_the_store_has_lost_are_saved_again(pair: Pair) -> None:
    assert pair.ask() is not None
    pair.stores[0].reset()
    pair.prefill.step()
    pair.prefill.step()
    assert not pair.stores[0].blocks
    # The device has the prompt still: nothing is computed but its end.
    pair.prefill.worker.computed_blocks = 0
    params = pair.ask()
    assert pair.prefill.worker.computed_blocks == 0
    assert len(pair.stores[0].blocks) == BLOCKS
    pair.move()
    pair.decode.step()
    pair.decode.add(pair.prompt, max_tokens=3, transfer=params)
    pair.finish()
    assert pair.decode.worker.computed_blocks == 0


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://10.0.0.1:7300", "10.0.0.1", 7300),
        ("nixl://[::1]:7300", "[::1]", 7300),
        ("unix:///run/a:7300", "unix:///run/a:7300", 0),
    ],
)
def test_the_address_is_that_of_the_store(
    pair: Pair, tmp_path: Path, address: str, host: str, port: int
) -> None:
    pair.prefill.connector.scheduler.server = Server("p", address, 1, BLOCK)
    params = pair.ask()
    assert params is not None
    assert (params["remote_host"], params["remote_port"]) == (host, port)
