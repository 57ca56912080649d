"""The connector with its own store."""

from pathlib import Path
from typing import Any

import pytest
from rig import BLOCK, Rig
from slipstream.options import Options
from slipstream.vllm import SlipstreamConnector
from slipstream.vllm.content import content_of
from slipstream.vllm.identity import hash_seed, identity_of
from slipstream.vllm.open import tier_folder
from test_transfers import BLOCK_BYTES, OURS, settle, wait_loaded, wait_saved
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash


def engine(**extra: Any) -> Rig:
    return Rig(num_blocks=64, extra={"host_bytes": 1 << 22, "model_id": "m"} | extra, **OURS)


def step_until_stored(rig: Rig, count: int) -> None:
    """Step until the scheduler knows this many stored blocks."""
    for _ in range(100_000):
        if len(rig.connector.scheduler.stored[0]) >= count:
            return
        rig.step()
    raise AssertionError(f"heard of {len(rig.connector.scheduler.stored[0])} stored blocks")


def run(rig: Rig, prompt: list[int]) -> int:
    """Answer a prompt; returns the number of computed blocks."""
    before = rig.worker.computed_blocks
    rig.add(prompt, max_tokens=3)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    return rig.worker.computed_blocks - before


def test_host_memory_gives_back_what_the_device_forgot() -> None:
    rig = engine()
    prompt = rig.tokens(BLOCK * 20 + 3)
    assert run(rig, prompt) == 20
    wait_saved(rig)
    step_until_stored(rig, 20)
    assert rig.scheduler.reset_prefix_cache()
    assert run(rig, prompt) == 0
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert run(rig, prompt) == 20
    wait_saved(rig)
    step_until_stored(rig, 20)
    assert rig.scheduler.reset_prefix_cache()
    assert run(rig, prompt) == 0, "a reset ends nothing for good"
    rig.close()


def test_no_folder_is_made_that_the_next_start_cannot_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    identity = {"rank": "0", "hash_algorithm": "xxhash", "hash_seed": hash_seed("xxhash")}
    assert tier_folder("disk", str(tmp_path), identity) is None
    assert "set PYTHONHASHSEED" in caplog.text
    assert not list(tmp_path.iterdir())
    for seed in ("7", "random"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert tier_folder("disk", str(tmp_path), identity | {"hash_seed": hash_seed("xxhash")})


def test_disk_outlives_the_engine_and_knows_the_model(tmp_path: Path) -> None:
    first = engine(disk_dir=str(tmp_path))
    prompt = first.tokens(BLOCK * 20 + 3)
    assert run(first, prompt) == 20
    wait_saved(first)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    while len(list(folder.glob("blocks/*.kv"))) < 20:
        settle(first)
    first.close()
    second = engine(disk_dir=str(tmp_path))
    assert len(second.connector.scheduler.stored[0]) == 20, "known before the first step"
    assert run(second, prompt) == 0
    # What is stored later is known with the steps.
    more = second.tokens(BLOCK * 10 + 3)
    assert run(second, more) == 10
    wait_saved(second)
    step_until_stored(second, 30)
    second.close()
    other = engine(disk_dir=str(tmp_path), model_id="another")
    assert run(other, prompt) == 20, "the same tokens are other blocks of another model"
    other.close()


def test_kv_events_name_the_tier_that_a_block_came_to_or_left(tmp_path: Path) -> None:
    rig = Rig(
        num_blocks=64,
        extra={"host_bytes": BLOCK_BYTES * 8, "disk_dir": str(tmp_path), "model_id": "m"},
        kv_events=True,
        **OURS,
    )
    held: dict[str, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    told: list[Any] = []
    # As vLLM would publish: the pool's events and the connector's, in one batch.
    publish = rig.scheduler.kv_event_publisher.publish

    def take(batch: Any) -> None:
        publish(batch)
        told.extend(batch.events)
        for event in batch.events:
            if type(event).__name__ == "AllBlocksCleared":
                held["GPU"].clear()
                continue
            for block_hash in event.block_hashes:
                if type(event).__name__ == "BlockStored":
                    assert block_hash not in held[event.medium]
                    held[event.medium].add(block_hash)
                else:
                    held[event.medium].remove(block_hash)

    rig.scheduler.kv_event_publisher.publish = take
    hashes = []
    for count in range(1, 21):
        name = rig.add(rig.tokens(BLOCK), max_tokens=1)
        hashes.append(maybe_convert_block_hash(rig.scheduler.requests[name].block_hashes[0]))
        rig.drain()
        wait_saved(rig)
        for _ in range(1_000_000):
            if len(held["STORAGE"]) == count:
                break
            rig.step()
        assert held["STORAGE"] == set(hashes)
    while held["CPU"] != set(hashes[-8:]):
        rig.step()
    assert held["GPU"] == set(hashes)
    # A block that left host memory was published on disk before.
    order = [(type(e).__name__, e.medium, h) for e in told for h in e.block_hashes]
    for block_hash in hashes[:12]:
        stored, removed = ("BlockStored", "STORAGE"), ("BlockRemoved", "CPU")
        assert order.index((*stored, block_hash)) < order.index((*removed, block_hash))
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    while held["CPU"] or held["STORAGE"]:
        rig.step()
    rig.close()


def test_data_parallel_engines_share_a_host_and_its_folder(tmp_path: Path) -> None:
    rig = engine(disk_dir=str(tmp_path), listen=[f"unix://{tmp_path}/s"])
    rig.config.parallel_config.data_parallel_index = 1
    second = SlipstreamConnector(rig.config, KVConnectorRole.WORKER, rig.kv_cache_config)
    second.register_kv_caches(rig.worker.caches)
    assert second.get_handshake_metadata().address == f"unix://{tmp_path}/s.1"
    assert second.get_handshake_metadata().identity == rig.worker.connector.identity
    second.shutdown()
    rig.close()


def test_what_changes_the_bytes_of_a_block_changes_its_identity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = engine()
    half, model = rig.worker.connector, rig.config.model_config

    def identity() -> dict[str, str]:
        content = content_of(rig.config, Options(model_id="m"))
        return identity_of(rig.config, half._layout, half.worker.blocks, content)

    def differs(at: object, name: str, value: object) -> set[str]:
        before = identity()
        monkeypatch.setattr(at, name, value)
        return {key for key, text in identity().items() if text != before[key]}

    assert differs(model, "max_model_len", 4096) == set(), "it does not decide any bytes"
    assert differs(model, "revision", "main") == set(), "a name decides nothing"
    assert differs(model, "quantization", "fp8") == {"dtype", "config"}
    assert differs(model, "hf_overrides", {"rope_theta": 7.0}) == {"config"}
    assert differs(model, "hf_overrides", lambda config: config) == {"config"}
    assert differs(model, "hf_overrides", {}) == {"config"}
    config = model.hf_text_config
    assert differs(config, "rope_parameters", {"rope_theta": 7.0}) == {"layout"}
    assert differs(config, "rope_parameters", {"rope_type": "longrope"}) == {"layout"}
    assert differs(model, "max_model_len", 8192) == {"layout"}, "such a model turns otherwise"
    rig.close()


def test_a_cache_smaller_than_the_load_is_only_slower() -> None:
    rig = engine(host_bytes=BLOCK_BYTES * 8)
    prompts = [rig.tokens(BLOCK * 12 + 3) for _ in range(3)]
    for i in range(12):
        run(rig, prompts[i % 3])
        wait_saved(rig)
        rig.step()
        rig.scheduler.reset_prefix_cache()
    counts = rig.worker.connector.worker.store.counters()
    assert counts["evicted_blocks.host"] > 0
    rig.close()


def test_vllm_sees_a_connector_for_its_hybrid_allocator() -> None:
    assert supports_hma(SlipstreamConnector)


def test_without_prefix_caching_it_says_what_to_change() -> None:
    rig = engine()
    rig.config.cache_config.enable_prefix_caching = False
    with pytest.raises(ValueError, match="--no-enable-prefix-caching"):
        type(rig.connector)(rig.config, rig.connector.role, rig.kv_cache_config)
    rig.close()
