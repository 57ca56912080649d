"""Our index against the pool of vLLM's own scheduler."""

import random

import pytest
from rig import BLOCK, Rig, Shape
from slipstream.pool import (
    CHECK_STEPS,
    EVENTS,
    FILLS,
    HOOKS,
    RESYNC,
    RESYNC_STEPS,
    block_ids,
    cached,
)
from slipstream.vllm import SlipstreamConnector
from slipstream.vllm.metadata import NOTHING
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

OURS = {"connector": "SlipstreamConnector", "module": "slipstream.vllm"}


def worker_half(rig: Rig) -> SlipstreamConnector:
    """Make the worker half by vLLM's own factory."""
    made = KVConnectorFactory.create_connector(
        rig.config, KVConnectorRole.WORKER, rig.kv_cache_config
    )
    assert isinstance(made, SlipstreamConnector)
    return made


def check_equal(rig: Rig, worker: SlipstreamConnector) -> None:
    """Scheduler half and worker half have exactly the pool's keys."""
    assert rig.step().kv_connector_metadata.keys is None, "nothing runs, so nothing changes"
    pool = set(cached(rig.pool))
    assert set(rig.connector.feed.keys.keys()) == pool
    assert set(worker.mirror.keys()) == pool


@pytest.mark.parametrize("seed", range(6))
def test_index_equals_the_pool_after_any_run(seed: int) -> None:
    rng = random.Random(seed)
    # Few blocks for the requests below, so that eviction and preemption happen all the time.
    rig = Rig(
        num_blocks=120,
        extra={"follow": True, "keys_max": 7},
        max_num_batched_tokens=512,
        seed=seed,
        **OURS,
    )
    assert rig.connector.feed.mode == HOOKS
    worker = worker_half(rig)
    prefixes = [rig.tokens(BLOCK * 8) for _ in range(3)]
    preempted = evicted = resets = held_max = 0
    live: list[str] = []
    for _ in range(400):
        match rng.randrange(12):
            case 0 | 1 | 2:
                shared = rng.choice(prefixes)[: BLOCK * rng.randrange(9)]
                tokens = shared + rig.tokens(rng.randrange(1, 300))
                live.append(rig.add(tokens, max_tokens=rng.randrange(1, 200)))
            case 3 if live:
                rig.abort(live.pop(rng.randrange(len(live))))
            case 4 if rng.randrange(8) == 0:
                for name in live:
                    rig.abort(name)
                live.clear()
                resets += rig.scheduler.reset_prefix_cache()
            case 5:
                rig.connector.feed.keys.request_snapshot()
            case 6:
                held = [b.block_id for b in rig.pool.blocks if b.block_hash is not None]
                evicted += len(held) > 0
                rig.pool.evict_blocks(set(rng.sample(held, min(3, len(held)))))
        plan = rig.scheduler.schedule()
        preempted += len(plan.preempted_req_ids or ())
        worker.bind_connector_metadata(plan.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.clear_connector_metadata()
        rig.scheduler.update_from_output(plan, rig.output(plan))
        live = [name for name in live if name in rig.scheduler.requests]
        rig.connector.feed.flush()
        assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool))
        held_max = max(held_max, len(cached(rig.pool)))
    assert preempted and evicted and held_max > 60, "the run must reach what it is there to test"
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    # What is left of a snapshot in chunks of 7 goes out; then both sides are equal.
    for _ in range(40):
        plan = rig.scheduler.schedule()
        worker.bind_connector_metadata(plan.kv_connector_metadata)
        rig.scheduler.update_from_output(plan, rig.output(plan))
    rig.connector.feed.flush()
    message = rig.connector.feed.keys.take_message(10_000)
    if message:
        worker.mirror.apply(message)
    assert worker.mirror.is_trusted and worker.mirror_errors_total == 0
    assert set(worker.mirror.keys()) == set(cached(rig.pool)) != set()


def test_reset_empties_both_halves() -> None:
    rig = Rig(num_blocks=64, extra={"follow": True}, **OURS)
    worker = worker_half(rig)
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    for _ in range(6):
        plan = rig.step()
        worker.bind_connector_metadata(plan.kv_connector_metadata)
    assert len(worker.mirror) == len(cached(rig.pool)) == 10
    assert rig.scheduler.reset_prefix_cache()
    worker.bind_connector_metadata(rig.step().kv_connector_metadata)
    assert len(worker.mirror) == len(rig.connector.feed.keys) == 0
    check_equal(rig, worker)


def test_nothing_is_kept_while_nobody_follows() -> None:
    rig = Rig(num_blocks=64, **OURS)
    assert rig.connector.feed.mode == FILLS
    name = rig.add(rig.tokens(BLOCK * 10 + 1), max_tokens=4)
    keys = [
        bytes(block_hash) + bytes(4) for block_hash in rig.scheduler.requests[name].block_hashes
    ]
    meta = rig.step().kv_connector_metadata
    assert meta.keys is None and meta.save_keys == keys
    assert [cached(rig.pool)[key].block_id for key in keys] == meta.save_blocks
    assert all(rig.step().kv_connector_metadata == NOTHING for _ in range(3))


@pytest.mark.parametrize("shapes", [(Shape(),), (Shape(block=2 * BLOCK), Shape("window", 90))])
@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(3))
def test_every_new_key_is_saved_once_with_a_block_that_holds_it(
    seed: int, scheduling: str, shapes: tuple[Shape, ...]
) -> None:
    rng = random.Random(seed)
    # Few blocks for the requests below, so that eviction and preemption happen all the time.
    rig = Rig(
        num_blocks=80 + 20 * len(shapes),
        max_num_batched_tokens=512,
        long_prefill_tokens=5 * BLOCK,
        scheduling=scheduling,
        shapes=shapes,
        seed=seed,
        **OURS,
    )
    assert rig.connector.feed.mode == FILLS
    prefixes = [rig.tokens(BLOCK * 8) for _ in range(3)]
    saved, preempted = 0, 0
    for _ in range(400):
        match rng.randrange(8):
            case 0 | 1:
                shared = rng.choice(prefixes)[: BLOCK * rng.randrange(9)]
                tokens = shared + rig.tokens(rng.randrange(1, 300))
                priority = rng.randrange(3)
                rig.add(tokens, max_tokens=rng.randrange(1, 200), priority=priority)
            case 2 if rig.scheduler.requests:
                rig.abort(rng.choice(list(rig.scheduler.requests)))
            case 3:
                held = [b.block_id for b in rig.pool.blocks if b.block_hash is not None]
                rig.pool.evict_blocks(set(rng.sample(held, min(3, len(held)))))
            case 4 if rng.randrange(9) == 0:
                for name in list(rig.scheduler.requests):
                    rig.abort(name)
                assert rig.scheduler.reset_prefix_cache()
        before = set(cached(rig.pool))
        plan = rig.step()
        preempted += len(plan.preempted_req_ids or ())
        meta = plan.kv_connector_metadata
        now = cached(rig.pool)
        new = {key for key in now.keys() - before if is_full(rig, key)}
        assert new <= set(meta.save_keys) <= now.keys()
        assert len(set(meta.save_keys)) == len(meta.save_keys) == len(set(meta.save_blocks))
        for key, block_id in zip(meta.save_keys, meta.save_blocks, strict=True):
            assert block_id in block_ids(now[key])
        saved += len(meta.save_keys)
    assert saved > 300 and preempted, "the run must reach what it is there to test"
    assert rig.connector.feed.log_errors_total == 0


def is_full(rig: Rig, key: bytes) -> bool:
    """Whether a key in the pool is of a whole block, and not of a prompt's tail in it."""
    block = rig.pool.blocks[next(iter(block_ids(cached(rig.pool)[key])))]
    size = rig.shapes[int.from_bytes(key[-4:], "big")].block
    return block.block_hash == key and block.block_hash_num_tokens % size == 0


def test_a_pool_whose_blocks_are_unlike_known_ones_ends_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(num_blocks=64, extra={"stats_interval_s": 0}, **OURS)
    rig.step()
    rig.connector.feed._log.append(object())
    rig.add(rig.tokens(BLOCK * 3), max_tokens=2)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        assert rig.step().kv_connector_metadata.saves_nothing
        rig.connector.get_kv_connector_stats()
    assert "blocks of a step are not saved" in caplog.text and "_block_hash" in caplog.text
    assert rig.connector.feed.log_errors_total == 1
    rig.add(rig.tokens(BLOCK * 3), max_tokens=2)
    assert len(rig.step().kv_connector_metadata.save_keys) == 3, "later ones are"


def test_full_pool_does_not_deadlock() -> None:
    rig = Rig(num_blocks=40, extra={"follow": True}, **OURS)
    for _ in range(12):
        rig.add(rig.tokens(BLOCK * 20), max_tokens=150)
    rig.drain()
    rig.connector.feed.flush()
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool))


def test_without_hooks_it_says_so_and_compares_all_keys(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, extra={"hooks": False}, **OURS)
    assert rig.connector.feed.mode == RESYNC and "DEGRADED" in caplog.text
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    for _ in range(RESYNC_STEPS):
        rig.step()
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool)) != set()


@pytest.mark.parametrize("seed", range(3))
def test_without_hooks_kv_events_do(
    seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    rng = random.Random(seed)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(
            num_blocks=120,
            kv_events=True,
            max_num_batched_tokens=512,
            extra={"hooks": False},
            seed=seed,
            **OURS,
        )
    feed = rig.connector.feed
    assert feed.mode == EVENTS and "DEGRADED: reads KV events" in caplog.text
    prefixes = [rig.tokens(BLOCK * 8) for _ in range(3)]
    saved: set[bytes] = set()
    stored: set[bytes] = set()
    for step in range(300):
        if rng.randrange(3) == 0:
            shared = rng.choice(prefixes)[: BLOCK * rng.randrange(9)]
            rig.add(shared + rig.tokens(rng.randrange(1, 300)), max_tokens=rng.randrange(1, 60))
        if step % 50 == 49:
            for name in list(rig.scheduler.requests):
                rig.abort(name)
            rig.step()
            assert rig.scheduler.reset_prefix_cache()
        before = set(cached(rig.pool))
        plan = rig.scheduler.schedule()
        stored |= set(cached(rig.pool)) - before
        saved.update(plan.kv_connector_metadata.save_keys)
        assert set(feed.keys.keys()) == set(cached(rig.pool))
        rig.scheduler.update_from_output(plan, rig.output(plan))
    assert saved >= stored and len(stored) > 100 and feed.log_errors_total == 0


def test_kv_events_with_short_hashes_are_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, kv_events=True, extra={"hooks": False}, **OURS)
        rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
        rig.step()
    assert rig.connector.feed.mode == RESYNC
    assert "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0" in caplog.text
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool)) != set()


def test_keys_that_went_unseen_are_found_by_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(num_blocks=64, extra={"follow": True}, **OURS)
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    rig.step()
    cached(rig.pool).popitem()
    with caplog.at_level("WARNING", "slipstream.vllm"):
        for _ in range(CHECK_STEPS):
            rig.connector.feed.step()
    assert "10 keys are known of the 9 in the block pool" in caplog.text
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool))


def test_a_replaced_map_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_blocks=64, extra={"follow": True}, **OURS)
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    rig.step()
    # As a later vLLM might flush, on a path that the hooks do not see.
    rig.pool.cached_block_hash_to_block = type(rig.pool.cached_block_hash_to_block)()
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig.step()
    assert "replaced" in caplog.text and len(rig.connector.feed.keys) == 0


def test_unknown_and_wrong_options_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"`folow` is unknown; `keys_max` is True"):
        Rig(num_blocks=8, extra={"folow": True, "keys_max": True}, **OURS)
