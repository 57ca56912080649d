"""`SlipstreamTier` behind vLLM's own tiering manager."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

CHUNK = 8192
CHUNKS = 6
CONTEXT = ReqContext(req_id="r")


def key(n: int) -> Any:
    return make_offload_key(n.to_bytes(32, "big"), 0)


def spec(events: bool = False, data_parallel_index: int = 0) -> Any:
    """The parts of an offloading spec that a tier uses."""
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("a", "b")),),
        model=SimpleNamespace(name="m", dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, world_size=1, data_parallel_index=data_parallel_index
        ),
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )


class Offloading:
    """vLLM's manager with a pool of six chunks, and our tier behind it."""

    def __init__(self, events: bool = False, data_parallel_index: int = 0, **options: Any) -> None:
        region = SharedOffloadRegion(
            engine_id=f"test-{uuid4()}",
            num_chunks=CHUNKS,
            rank=None,
            kv_bytes_per_chunk=CHUNK,
            cpu_page_size=CHUNK,
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        self.view = primary.get_kv_memoryview()
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {
                "type": "SlipstreamTier",
                "module_path": "slipstream.vllm.tier",
                "host_bytes": 64 * CHUNK,
                "model_id": "m",
                **options,
            },
            self.view,
            spec(events, data_parallel_index),
        )
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.manager.on_new_request(CONTEXT)
        self.region = region

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def store(self, n: int) -> None:
        """Do what the device's copy does: fill the chunk that vLLM gives for the key."""
        for _ in range(100_000):
            prepared = self.manager.prepare_store([key(n)], CONTEXT)
            if prepared is not None:
                break
            self.step()
        assert prepared is not None, "the pool's chunks are given back after they were stored"
        for chunk in prepared.store_spec.chunk_ids:
            np.asarray(self.view)[int(chunk)] = n
        self.manager.complete_store([key(n)], CONTEXT)
        self.step()

    def settle(self, count: int) -> None:
        """Step until the tier is known to hold so many chunks."""
        for _ in range(1_000_000):
            if len(self.tier.held) == count and not self.tier.has_pending_work():
                return
            self.step()
        raise AssertionError(f"{len(self.tier.held)} chunks are held")

    def load(self, n: int) -> int | None:
        """Look a chunk up until vLLM knows; its bytes' value if it is there."""
        for _ in range(1_000_000):
            result = self.manager.lookup(key(n), CONTEXT)
            if result is LookupResult.MISS:
                return None
            if result is LookupResult.HIT:
                (chunk,) = self.manager.prepare_load([key(n)], CONTEXT).chunk_ids
                values = set(np.asarray(self.view)[int(chunk)].tolist())
                self.manager.complete_load([key(n)], CONTEXT)
                assert len(values) == 1
                return values.pop()
            self.step()
        raise AssertionError("the look-up never ends")

    def close(self) -> None:
        self.tier.shutdown()


@pytest.fixture
def offloading() -> Iterator[Offloading]:
    made = Offloading()
    yield made
    made.close()


def test_chunks_that_left_vllms_pool_come_back(offloading: Offloading) -> None:
    for n in range(1, 21):
        offloading.store(n)
    offloading.settle(20)
    assert [offloading.load(n) for n in range(1, 21)] == list(range(1, 21))
    assert offloading.load(99) is None


def test_chunks_outlive_the_engine_on_disk(tmp_path: Path) -> None:
    first = Offloading(disk_dir=str(tmp_path))
    for n in range(1, 11):
        first.store(n)
    first.settle(10)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    while len(list(folder.glob("blocks/*.kv"))) < 10:
        first.step()
    first.close()
    second = Offloading(disk_dir=str(tmp_path))
    second.settle(10)
    assert [second.load(n) for n in range(1, 11)] == list(range(1, 11))
    second.close()


def test_a_chunk_that_is_gone_is_a_failed_load_and_not_other_bytes(offloading: Offloading) -> None:
    for n in range(1, 21):
        offloading.store(n)
    offloading.settle(20)
    # Dropped by the store, and not yet by the scheduler.
    offloading.tier.store.reset()
    assert offloading.load(1) is None
    offloading.manager.reset_cache()


def test_events_tell_of_stores_and_removals() -> None:
    offloading = Offloading(events=True)
    for n in range(1, 4):
        offloading.store(n)
    offloading.settle(3)
    stored = list(offloading.tier.take_events())
    assert {k for e in stored for k in e.keys} == {key(n) for n in range(1, 4)}
    assert not any(e.removed for e in stored)
    offloading.tier.store.reset()
    offloading.settle(0)
    removed = list(offloading.tier.take_events())
    assert {k for e in removed if e.removed for k in e.keys} == {key(n) for n in range(1, 4)}
    offloading.close()


def test_events_tell_host_memory_from_disk(tmp_path: Path) -> None:
    offloading = Offloading(events=True, host_bytes=4 * CHUNK, disk_dir=str(tmp_path))
    held: dict[Medium, set[Any]] = {Medium.CPU: set(), Medium.STORAGE: set()}
    for n in range(1, 11):
        offloading.store(n)
        for _ in range(10_000_000):
            offloading.step()
            for event in offloading.tier.take_events():
                assert event.ownership == "slipstream" and event.removal_expected
                known = held[event.medium]
                (known.difference_update if event.removed else known.update)(event.keys)
            if key(n) in held[Medium.STORAGE] and key(n) in held[Medium.CPU]:
                break
    assert held[Medium.STORAGE] == {key(n) for n in range(1, 11)}
    assert len(held[Medium.CPU]) == 4
    offloading.close()


def test_another_engine_takes_chunks_from_this_one(tmp_path: Path) -> None:
    first = Offloading(listen=[f"unix://{tmp_path}/a.sock"])
    for n in range(1, 11):
        first.store(n)
    first.settle(10)
    second = Offloading(peers=[f"unix://{tmp_path}/a.sock"])
    for _ in range(10_000_000):
        if second.tier._peers.prefix([key(n) for n in range(1, 11)], 0, 10, b"")[1] == 10:
            break
    assert [second.load(n) for n in range(1, 11)] == list(range(1, 11))
    assert second.tier.store.counters()["hit_blocks.peer"] == 10
    second.close()
    first.close()


def test_a_tier_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="`host_bytes` above 0"):
        Offloading(host_bytes=0)


def test_engines_of_a_data_parallel_group_have_folders_of_their_own(tmp_path: Path) -> None:
    first = Offloading(disk_dir=str(tmp_path))
    second = Offloading(disk_dir=str(tmp_path), data_parallel_index=1)
    first.store(1)
    second.store(2)
    first.close()
    second.close()
    assert len(list(tmp_path.glob("*/blocks/*.kv"))) == 1
    assert len(list(tmp_path.glob("engine-1/*/blocks/*.kv"))) == 1


def test_after_an_update_of_the_weights_no_chunk_is_of_the_old_ones(tmp_path: Path) -> None:
    made = Offloading(disk_dir=str(tmp_path), listen=[f"unix://{tmp_path}/s"])
    for n in range(1, 11):
        made.store(n)
    made.settle(10)
    while len(list(tmp_path.glob("*/blocks/*.kv"))) < 10:
        made.step()
    made.tier.weights_changed("a test")
    made.settle(0)
    assert made.load(1) is None
    made.store(20)
    made.settle(1)
    made.close()
    again = Offloading(disk_dir=str(tmp_path))
    again.settle(10)
    assert again.load(20) is None, "what came after the update is of other weights"
    assert again.load(1) == 1
    again.close()


def test_a_tier_of_a_model_that_nothing_identifies_keeps_nothing_for_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Offloading(disk_dir=str(tmp_path), model_id="")
    made.store(1)
    made.settle(1)
    made.close()
    assert not list(tmp_path.iterdir())
    assert "`disk_dir` is not used" in caplog.text and "set `model_id`" in caplog.text
