"""Loads in parts: bounded memory, turns, canceled loads, and faults."""

from typing import Any

import pytest
import torch
from double import DoubleStore
from rig import BLOCK, Rig
from slipstream.vllm import connector as connector_module
from slipstream.vllm.worker import PARTS_AT_ONCE
from test_transfers import BLOCK_BYTES, filled, settle, wait_loaded

SMALL = {"loading_bytes_max": 4 * 2 * BLOCK_BYTES}
"""Four slabs of two blocks."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DoubleStore:
    double = DoubleStore(BLOCK_BYTES)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    return double


def let_go_one(rig: Rig, store: DoubleStore, *, fails: bool = False) -> None:
    """End the first part that is held back, and wait until its memory is used again."""
    half = rig.worker.connector.worker
    job, keys, into = store.held_back.pop(0)
    for i, key in enumerate(keys):
        into[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] = store.blocks[key]
    store.end(job, (0,) if fails else (), "checksum" if fails else "")
    with half.moved:
        assert half.moved.wait_for(lambda: job not in half._parts, 10)
    # The next ones are asked for outside the lock.
    wait_asked(rig, store)


def wait_asked(rig: Rig, store: DoubleStore) -> None:
    half = rig.worker.connector.worker
    with store._changed:
        assert store._changed.wait_for(lambda: len(store.held_back) == len(half._parts), 10)


@pytest.mark.parametrize("pins", [False, True])
def test_a_load_goes_in_parts_that_use_memory_again(store: DoubleStore, pins: bool) -> None:
    rig, prompt = filled(store, extra=SMALL)
    half = rig.worker.connector.worker
    half.blocks.pins = pins
    made: list[int] = []
    if pins:
        # Memory that takes long to allocate is allocated outside of the engine's thread.
        half.blocks.staging = lambda size: made.append(size) or torch.empty(size, dtype=torch.uint8)
    store.hold_back = True
    rig.add(prompt, max_tokens=2)
    rig.step()
    with store._changed:
        assert store._changed.wait_for(lambda: len(store.held_back) == PARTS_AT_ONCE, 10)
    for _ in range(6):
        assert half.loading == 1 and len(store.held_back) <= PARTS_AT_ONCE
        assert all(len(keys) == 2 for _, keys, _ in store.held_back)
        let_go_one(rig, store)
    wait_loaded(rig)
    assert len(half.staging.slabs) <= 4 and sum(made) <= 8 * BLOCK_BYTES
    assert len(half._ended) == 1, "the request is told of once"
    store.hold_back = False
    rig.drain()
    assert rig.worker.computed_blocks == 0
    rig.close()


def test_loads_take_turns(store: DoubleStore) -> None:
    rig, prompt = filled(store, extra=SMALL)
    other = rig.tokens(BLOCK * 4 + 1)
    rig.add(other, max_tokens=1)
    rig.drain()
    settle(rig)
    assert rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    store.hold_back = True
    rig.add(prompt, max_tokens=1)
    small = rig.add(other, max_tokens=1)
    rig.step()
    assert len(store.held_back) == 4, "two parts of each"
    for _ in range(4):
        let_go_one(rig, store)
    half = rig.worker.connector.worker
    with half.moved:
        assert half.moved.wait_for(lambda: half.loading == 1, 10)
    assert [ended.request_id for ended in half._ended] == [half_name(rig, small)]
    while half.loading:
        let_go_one(rig, store)
    store.hold_back = False
    rig.drain()
    assert rig.worker.computed_blocks == 0
    rig.close()


def half_name(rig: Rig, name: str) -> str:
    return rig.scheduler.requests[name].request_id


def test_what_follows_a_failed_part_is_not_asked_for(store: DoubleStore) -> None:
    rig, prompt = filled(store, extra=SMALL)
    store.hold_back = True
    rig.add(prompt, max_tokens=1)
    rig.step()
    let_go_one(rig, store)
    let_go_one(rig, store, fails=True)
    let_go_one(rig, store)
    wait_loaded(rig)
    assert not store.held_back
    store.hold_back = False
    store.blocks.clear()
    rig.drain()
    assert rig.worker.computed_blocks == 10, "all but the first part"
    assert rig.worker.connector.worker._counts["load_failed_blocks.checksum"] == 7
    rig.close()


def test_what_an_aborted_request_wanted_is_not_asked_for(store: DoubleStore) -> None:
    rig, prompt = filled(store, extra=SMALL)
    half = rig.worker.connector.worker
    store.hold_back = True
    name = rig.add(prompt, max_tokens=1)
    rig.step()
    rig.abort(name)
    rig.step()
    assert half.loading == 0 and len(store.held_back) == PARTS_AT_ONCE
    while store.held_back:
        let_go_one(rig, store)
    assert half._counts["load_canceled_blocks"] == 12 - 2 * PARTS_AT_ONCE
    assert half._counts["load_unexpected_ends"] == 0
    assert not half._parts and all(slab.used == 0 for slab in half.staging.slabs)
    rig.step()
    rig.close()


def test_an_error_of_one_load_ends_no_other(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, prompt = filled(store)
    half = rig.worker.connector.worker
    takes_parts = half._takes_parts
    errors = [RuntimeError("unforeseen")]

    def fails_once() -> Any:
        if errors:
            raise errors.pop()
        return takes_parts()

    monkeypatch.setattr(half, "_takes_parts", fails_once)
    store.hold_back = True
    rig.add(prompt, max_tokens=1)
    rig.step()
    store.let_go((11,))
    wait_loaded(rig)
    assert half._counts["load_failed_blocks.internal"] == 12 and not half._parts
    store.hold_back = False
    rig.drain()
    assert rig.worker.computed_blocks == 12
    assert rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    rig.add(prompt, max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0, "later loads go on"
    rig.close()
