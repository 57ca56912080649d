"""Our index against the pool of vLLM's own scheduler."""

import random

import pytest
from rig import BLOCK, Rig
from slipstream.pool import CHECK_STEPS, EVENTS, HOOKS, RESYNC, RESYNC_STEPS, cached
from slipstream.vllm import SlipstreamConnector
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
    """Scheduler half and worker half know exactly the pool's keys."""
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


def test_nothing_is_sent_while_nobody_follows() -> None:
    rig = Rig(num_blocks=64, **OURS)
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    assert all(rig.step().kv_connector_metadata.keys is None for _ in range(6))
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool)) != set()


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
    rig = Rig(num_blocks=64, **OURS)
    rig.add(rig.tokens(BLOCK * 10), max_tokens=4)
    rig.step()
    cached(rig.pool).popitem()
    with caplog.at_level("WARNING", "slipstream.vllm"):
        for _ in range(CHECK_STEPS):
            rig.connector.feed.step()
    assert "10 keys are known of the 9 in the block pool" in caplog.text
    assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool))


def test_a_replaced_map_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_blocks=64, **OURS)
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
