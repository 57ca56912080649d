"""Saves and loads by vLLM's own scheduler and worker code, on CPU tensors.

`rig.Worker` compares every block that a model would read with its tokens, in each step.
"""

import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from double import DoubleStore
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rig import BLOCK, Rig
from slipstream import pool as pool_module
from slipstream.limited import SAME_MAX, WINDOW_S
from slipstream.pool import EVENTS, FILLS, HOOKS, NOTHING, RESYNC, block_ids, cached
from slipstream.vllm import SlipstreamConnector
from slipstream.vllm import connector as connector_module
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request, RequestStatus

OURS = {"connector": "SlipstreamConnector", "module": "slipstream.vllm", "worker": True}
BLOCK_BYTES = 2 * 4096


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DoubleStore:
    double = DoubleStore(BLOCK_BYTES)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    return double


def wait_saved(rig: Rig) -> None:
    """Let the saver's thread finish."""
    saves = rig.worker.connector.worker
    with saves.moved:
        assert saves.moved.wait_for(lambda: saves.saving_bytes == 0, 10)


def settle(rig: Rig) -> None:
    """Let the saver's thread finish, and the scheduler apply its message."""
    wait_saved(rig)
    rig.step()


def wait_loaded(rig: Rig) -> None:
    """Let the loader's thread finish the loads that the store has ended."""
    half = rig.worker.connector.worker
    with half.moved:
        assert half.moved.wait_for(lambda: half.loading == 0, 10)


def filled(store: DoubleStore, **options: Any) -> tuple[Rig, list[int]]:
    """An engine whose store has a prompt's 12 blocks and whose device has dropped them."""
    rig = Rig(num_blocks=64, **OURS, **options)
    prompt = rig.tokens(BLOCK * 12 + 5)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    settle(rig)
    assert len(store.blocks) == 12
    assert rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    return rig, prompt


def run_until(rig: Rig, name: str, *statuses: RequestStatus) -> None:
    for _ in range(50):
        if name not in rig.scheduler.requests or rig.scheduler.requests[name].status in statuses:
            return
        rig.step()
    raise AssertionError(f"{name} is {rig.scheduler.requests[name].status} after 50 steps")


def test_what_was_saved_is_loaded_and_not_computed(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    rig.add(prompt, max_tokens=3)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0, "only the last five tokens and the answer are computed"
    rig.close()


def test_another_engine_loads_what_this_one_saved(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, prompt = filled(store)
    double = DoubleStore(BLOCK_BYTES)
    double.put(list(store.blocks), memoryview(b"".join(store.blocks.values())))
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    second = Rig(num_blocks=64, seed=1, **OURS)
    second.step()
    second.add(prompt, max_tokens=3)
    second.step()
    wait_loaded(second)
    second.drain()
    assert second.worker.computed_blocks == 0
    first.close()


def test_a_failed_load_without_room_holds_up_no_load_that_has_ended(store: DoubleStore) -> None:
    # The first of three gets nothing and vLLM gives its blocks away; what the others hold and will
    # need leaves no room for it. They wait behind it, and their loads have ended, too.
    rig, prompt = filled(store)
    first, *others = [
        rig.add(prompt[: BLOCK * 4] + rig.tokens(BLOCK * 14), max_tokens=2) for _ in range(3)
    ]
    store.hold_back = True
    rig.step()
    assert len(store.held_back) == 3
    jobs = sorted(store.held_back)
    # 63 blocks, of which loads hold 12; a request of 18 does not fit into the 17 that will be left.
    rig.pool.get_new_blocks(38)
    store.held_back = jobs[:1]
    store.let_go(failed=tuple(range(4)))
    store.held_back = jobs[1:]
    store.let_go()
    store.hold_back = False
    for _ in range(200):
        wait_loaded(rig)
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
    assert not rig.scheduler.has_unfinished_requests(), (first, others)
    rig.close()


def test_a_lookup_may_be_asked_any_number_of_times(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    answers = {rig.connector.get_num_new_matched_tokens(request, 0) for _ in range(50)}
    assert answers == {(12 * BLOCK, True)}
    assert rig.connector.get_num_new_matched_tokens(request, 4 * BLOCK) == (8 * BLOCK, True)
    # The last token is always computed, for its output.
    whole = rig.scheduler.requests[rig.add(prompt[: 12 * BLOCK], max_tokens=1)]
    assert rig.connector.get_num_new_matched_tokens(whole, 0) == (11 * BLOCK, True)
    rig.drain()
    rig.close()


def test_late_load_holds_up_nobody_else(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    late = rig.add(prompt, max_tokens=2)
    other = rig.add(rig.tokens(40), max_tokens=4)
    run_until(rig, other)
    assert rig.scheduler.requests[late].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    store.let_go()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 2, "the other prompt's two full blocks"
    rig.close()


@pytest.mark.parametrize("failed", [(0,), (5,), (11,), (3, 7), tuple(range(12))])
def test_failed_blocks_are_computed_and_never_read(
    store: DoubleStore, failed: tuple[int, ...]
) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    rig.add(prompt, max_tokens=3)
    rig.step()
    store.let_go(failed)
    wait_loaded(rig)
    store.hold_back = False
    for key in list(store.blocks):
        store.lose(key)
    rig.drain()
    assert rig.worker.computed_blocks == 12 - min(failed)
    rig.close()


def test_a_load_that_ends_twice_ends_once(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    rig.add(prompt, max_tokens=3)
    rig.step()
    (job,) = store.let_go()
    wait_loaded(rig)
    store.end(job)
    store.end(job, (0,), "checksum")
    store.end(77)
    rig.drain()
    settle(rig)
    half = rig.worker.connector.worker
    with half.moved:
        assert half.moved.wait_for(lambda: half._counts["load_unexpected_ends"] == 3, 10)
    rig.close()


def test_a_store_that_never_answers_is_given_up(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    rig.add(prompt, max_tokens=2)
    rig.step()
    half = rig.worker.connector.worker
    monkeypatch.setattr("slipstream.vllm.worker.time.monotonic", lambda: 1e9)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig.step()
    assert "did not end the load" in caplog.text
    # The store ends it late: nothing of it is used.
    store.hold_back = False
    store.let_go()
    for key in list(store.blocks):
        store.lose(key)
    rig.drain()
    assert rig.worker.computed_blocks == 12
    assert half._counts["load_failed_blocks.abandoned"] == 12
    rig.close()


def test_abort_while_loading_frees_the_blocks(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    free = rig.pool.get_num_free_blocks()
    store.hold_back = True
    name = rig.add(prompt, max_tokens=2)
    rig.step()
    assert rig.pool.get_num_free_blocks() < free
    rig.abort(name)
    # The store still writes, but not into them.
    rig.step()
    rig.step()
    assert rig.pool.get_num_free_blocks() == free and not rig.scheduler.requests
    store.let_go()
    wait_loaded(rig)
    rig.close()


def test_loads_that_fail_after_an_abort_leave_nothing_behind(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    name = rig.add(prompt, max_tokens=2)
    rig.step()
    rig.abort(name)
    rig.step()
    store.let_go(tuple(range(12)))
    wait_loaded(rig)
    rig.step()
    scheduler = rig.connector.scheduler
    assert not (scheduler._limits or scheduler._loading or scheduler._sources)
    rig.close()


@pytest.mark.parametrize("ended", [False, True])
def test_sleep_takes_the_loads_under_way_with_it(store: DoubleStore, ended: bool) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    rig.add(prompt, max_tokens=2)
    rig.step()
    half = rig.worker.connector.worker
    if ended:
        store.let_go()
        wait_loaded(rig)
    rig.worker.connector.unregister_kv_caches()
    half.save([bytes(36)], [5])
    store.let_go()
    wait_loaded(rig)
    for cache in rig.worker.caches.values():
        cache.zero_()
    rig.worker.connector.restore_kv_caches()
    assert half._counts["save_dropped_blocks"] == 1 and bytes(36) not in store.blocks
    store.hold_back = False
    rig.drain()
    rig.close()


def test_a_device_without_memory_ends_no_step(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, prompt = filled(store)
    half = rig.worker.connector.worker

    def full(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(half.blocks, "staging", full)
    rig.add(prompt, max_tokens=2)
    rig.drain()
    assert rig.worker.computed_blocks == 12
    assert half._counts["load_failed_blocks.memory"] == 12
    monkeypatch.setattr(half.blocks, "gather", full)
    rig.add(rig.tokens(BLOCK * 3), max_tokens=1)
    rig.drain()
    assert half._counts["save_dropped_blocks"] == 3
    rig.close()


def test_reset_while_loading_recomputes(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    store.hold_back = True
    rig.add(prompt, max_tokens=2)
    rig.step()
    assert rig.connector.reset_cache() is True
    rig.step()
    assert not store.blocks and len(rig.connector.scheduler.stored[0]) == 0
    # The store sends what it had read before the reset.
    job, _, into = store.held_back.pop()
    into[:] = bytes(len(into))
    store.hold_back = False
    store.end(job)
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 12, "nothing from before the reset is used"
    settle(rig)
    assert len(store.blocks) == 12, "and saving goes on"
    rig.close()


def test_load_failures_fail_the_request_if_so_configured(
    store: DoubleStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, policy="fail", **OURS)
    assert '"kv_load_failure_policy": "recompute"' in caplog.text
    rig.close()


def test_evictions_are_no_longer_hits(store: DoubleStore) -> None:
    rig, prompt = filled(store)
    name = rig.add(prompt, max_tokens=1)
    hashes = rig.scheduler.requests[name].block_hashes
    store.lose(bytes(hashes[4]) + bytes(4))
    rig.step()
    wait_loaded(rig)
    rig.drain()
    # The look-up of the first step still knew the block; its load failed, and was recomputed.
    assert rig.worker.computed_blocks == 8
    assert rig.scheduler.reset_prefix_cache()
    settle(rig)
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    assert rig.connector.get_num_new_matched_tokens(request, 0)[0] == 12 * BLOCK, "saved again"
    rig.drain()
    rig.close()


def test_hits_and_counts_reach_the_engines_statistics(store: DoubleStore) -> None:
    rig, prompt = filled(store, log_stats=True, extra={"stats_interval_s": 0})
    rig.step()  # reports the counts so far
    store.hold_back = True  # otherwise this step may report the load's counts already
    rig.add(prompt, max_tokens=1)
    plan = rig.scheduler.schedule()
    outputs = rig.scheduler.update_from_output(plan, rig.output(plan, rig.worker.run(plan)))
    hits = next(iter(outputs.values())).scheduler_stats.connector_prefix_cache_stats
    assert hits.hits_by_source == {CacheHitSource.HOST: 12 * BLOCK}
    store.let_go()
    wait_loaded(rig)
    plan = rig.scheduler.schedule()
    outputs = rig.scheduler.update_from_output(plan, rig.output(plan, rig.worker.run(plan)))
    counted = next(iter(outputs.values())).scheduler_stats.kv_connector_stats
    assert counted == {"loaded_blocks": 12, "loaded_bytes": 12 * BLOCK_BYTES}
    rig.drain()
    rig.close()


def test_counts_become_prometheus_counters() -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    rig = Rig(num_blocks=8, **OURS)
    metrics = SlipstreamConnector.build_prom_metrics(
        rig.config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    told = {"loaded_blocks": 3, "load_failed_blocks.checksum": 2, "hit_blocks.disk": 7}
    stats = SlipstreamConnector.build_kv_connector_stats(told)
    stats = stats.aggregate(SlipstreamConnector.build_kv_connector_stats({"loaded_blocks": 1}))
    assert stats.reduce()["loaded_blocks"] == 4 and not stats.is_empty()
    metrics.observe(stats.to_dict(), 1)
    text = generate_latest(registry).decode()
    for line in (
        'vllm:slipstream_loaded_blocks_total{engine="1",model_name="m"} 4.0',
        'vllm:slipstream_load_failed_blocks_total{engine="1",model_name="m",reason="checksum"} 2.0',
        'vllm:slipstream_hit_blocks_total{engine="1",model_name="m",tier="disk"} 7.0',
    ):
        assert line in text
    rig.close()


def test_slow_store_drops_saves_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    double = DoubleStore(BLOCK_BYTES)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    rig = Rig(num_blocks=64, extra={"saving_bytes_max": BLOCK_BYTES * 4}, **OURS)
    rig.add(rig.tokens(BLOCK * 12), max_tokens=1)
    rig.drain()
    settle(rig)
    assert len(double.blocks) == 0
    assert rig.worker.connector.worker._counts["save_dropped_blocks"] == 12
    rig.close()


def test_as_many_blocks_are_saved_as_there_is_room_for(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.vllm.worker.COPY_BYTES", BLOCK_BYTES * 2)
    rig = Rig(num_blocks=64, extra={"saving_bytes_max": BLOCK_BYTES * 5}, **OURS)
    half = rig.worker.connector.worker
    with half._putting:
        rig.add(rig.tokens(BLOCK * 12), max_tokens=1)
        rig.drain()
    wait_saved(rig)
    assert len(store.blocks) == 4
    assert half._counts["save_dropped_blocks"] == 8
    rig.close()


def test_a_store_that_cannot_take_blocks_stops_nothing(store: DoubleStore) -> None:
    rig = Rig(num_blocks=64, **OURS)

    def full(keys: object, data: object) -> int:
        raise OSError("No space left on device")

    store.put = full  # type: ignore[method-assign]
    rig.add(rig.tokens(BLOCK * 3), max_tokens=1)
    rig.drain()
    settle(rig)
    assert rig.worker.connector.worker._counts["save_failed_blocks"] == 3
    rig.close()


def test_a_lost_message_is_asked_for_again(store: DoubleStore) -> None:
    rig, _ = filled(store)
    store.lose(next(iter(store.blocks)))
    assert store.take_message(), "lost on its way"
    store.lose(next(iter(store.blocks)))
    rig.step()
    assert not rig.connector.scheduler.stored[0].is_trusted
    rig.step()
    rig.step()
    mirror = rig.connector.scheduler.stored[0]
    assert mirror.is_trusted and set(mirror.keys()) == set(store.blocks) != set()
    rig.close()


def recorded_events(rig: Rig) -> list[Any]:
    """A list of the connector's KV events from now on, which vLLM does not see."""
    half, events = rig.connector.scheduler, list[Any]()
    take = half.take_events
    half.take_events = lambda: events.extend(take()) or ()
    return events


def test_kv_events_of_the_host_tier_have_tokens_and_parents(store: DoubleStore) -> None:
    rig = Rig(num_blocks=64, kv_events=True, **OURS)
    prompt = rig.tokens(BLOCK * 3 + 1)
    name = rig.add(prompt, max_tokens=BLOCK * 2 + 4)
    request = rig.scheduler.requests[name]
    events = recorded_events(rig)
    while rig.scheduler.has_unfinished_requests():
        rig.step()
        wait_saved(rig)
    # The workers' messages about their stores come with the next output.
    rig.step()
    chain: dict[Any, Any] = {None: b""}
    told: list[int] = []
    parent_hash = None
    for event in events:
        assert event.parent_block_hash in chain, "a parent is told of before what follows it"
        assert len(event.token_ids) == BLOCK * len(event.block_hashes) > 0
        assert event.parent_block_hash == parent_hash
        for block_hash in event.block_hashes:
            chain[block_hash] = event
            parent_hash = block_hash
        told += event.token_ids
    assert told == list(request.all_token_ids)[: BLOCK * 5]
    # An indexer that hashes the tokens itself comes to the same blocks.
    again = rig.scheduler.requests[rig.add(told, max_tokens=1)]
    assert [maybe_convert_block_hash(h) for h in again.block_hashes] == list(chain)[1:]
    rig.close()


def test_blocks_of_several_prompts_are_told_chain_by_chain(store: DoubleStore) -> None:
    rig = Rig(num_blocks=160, kv_events=True, **OURS)
    shared = rig.tokens(BLOCK * 4)
    prompts = [shared + rig.tokens(BLOCK * n + 1) for n in (1, 2, 3)]
    events = recorded_events(rig)
    rig.add(prompts[0], max_tokens=1)
    rig.step()
    for prompt in prompts[1:]:
        rig.add(prompt, max_tokens=1)
    rig.drain()
    wait_saved(rig)
    rig.step()
    tokens: dict[Any, list[int]] = {None: []}
    left = list(events)
    while left:
        ready = [event for event in left if event.parent_block_hash in tokens]
        assert ready, "every parent is told of"
        for event in ready:
            left.remove(event)
            before = tokens[event.parent_block_hash]
            for i, block_hash in enumerate(event.block_hashes):
                before = before + event.token_ids[i * BLOCK : (i + 1) * BLOCK]
                tokens[block_hash] = before
    expected = {tuple(p[: BLOCK * n]) for p in prompts for n in range(1, len(p) // BLOCK + 1)}
    assert {tuple(t) for t in tokens.values() if t} == expected
    rig.close()


def test_blocks_whose_tokens_are_not_known_are_told_by_hash(store: DoubleStore) -> None:
    first, _ = filled(store)
    first.close()
    store.closed = False
    store.request_snapshot()
    rig = Rig(num_blocks=64, kv_events=True, seed=1, **OURS)
    rig.connector.update_connector_output(rig.worker.run(rig.scheduler.schedule()))
    (event,) = rig.connector.take_events()
    assert len(event.block_hashes) == 12
    assert event.token_ids == [] and event.parent_block_hash is None
    rig.close()


def test_without_kv_events_nothing_is_noted_of_tokens(store: DoubleStore) -> None:
    rig, _ = filled(store)
    assert not rig.connector.scheduler._runs and not rig.connector.scheduler._chains._links
    assert "install_run_hook" not in rig.pool.cache_full_blocks.__qualname__
    rig.close()


def test_failed_loads_do_not_flood_the_log(
    store: DoubleStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(num_blocks=200, extra={"stats_interval_s": 0}, **OURS)
    prompts = [rig.tokens(BLOCK * 4 + 1) for _ in range(20)]
    for prompt in prompts:
        rig.add(prompt, max_tokens=1)
    rig.drain()
    settle(rig)
    assert rig.scheduler.reset_prefix_cache()
    store.hold_back = True
    for prompt in prompts:
        rig.add(prompt, max_tokens=1)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig.step()
        store.let_go((0,))
        wait_loaded(rig)
        rig.step()
        said = [text for text in caplog.messages if "did not come" in text]
        assert len(said) == SAME_MAX
        rig.worker.connector.worker._limited.flush(now=time.monotonic() + WINDOW_S)
    said = [text for text in caplog.messages if "did not come" in text]
    assert len(said) == SAME_MAX + 1
    assert said[-1].startswith(f"{20 - SAME_MAX} more warnings like this")
    assert rig.worker.connector.worker._counts["load_failed_blocks.checksum"] == 80
    store.hold_back = False
    rig.drain()
    rig.close()


def test_blocks_that_vllm_allocates_otherwise_are_computed(
    store: DoubleStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig, prompt = filled(store)
    allocated = rig.connector.update_state_after_alloc

    def other_blocks(request: Any, blocks: Any, tokens: int) -> None:
        held = list(blocks.blocks[0])
        held[7] = rig.pool.null_block
        allocated(request, type(blocks)((held,)), tokens)

    rig.connector.update_state_after_alloc = other_blocks
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig.add(prompt, max_tokens=3)
        assert not rig.step().kv_connector_metadata.loads[0].blocks
        rig.drain()
    assert "vLLM has allocated other blocks than a hit needs (full 16)" in caplog.text
    assert rig.worker.computed_blocks == 12
    scheduler = rig.connector.scheduler
    assert scheduler.counts["load_failed_blocks.layout"] == 12
    assert not (scheduler._limits or scheduler._loading or scheduler._hit_starts)
    rig.close()


def test_requests_that_wait_for_peers_are_not_looked_up_again(store: DoubleStore) -> None:
    rig, prompt = filled(store, extra={"lookup_wait_s": 3600})

    class Unsettled:
        settled, looks = False, 0

        def longest(self, *args: Any) -> tuple[str, int]:
            self.looks += 1
            return "", args[-1]

        def is_settled(self) -> bool:
            return self.settled

        def counters(self) -> dict[str, int]:
            return {}

        def close(self) -> None: ...

    peers = Unsettled()
    rig.connector.scheduler.follow(peers)
    names = [rig.add(prompt[:-1] + [n] * 40, max_tokens=1) for n in range(1, 31)]
    for _ in range(20):
        assert not rig.step().num_scheduled_tokens
    assert peers.looks == len(names), "one look each, however many steps they wait"
    assert rig.connector.scheduler.counts["lookup_deferred"] == len(names)
    rig.abort(names[0])
    assert len(rig.connector.scheduler._deferred) == len(names) - 1
    peers.settled = True
    for _ in range(200):
        wait_loaded(rig)
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    assert not rig.connector.scheduler._deferred
    rig.close()


def test_kv_events_tell_of_the_host_tier(store: DoubleStore) -> None:
    rig = Rig(num_blocks=64, kv_events=True, **OURS)
    events = recorded_events(rig)
    name = rig.add(rig.tokens(BLOCK * 3), max_tokens=1)
    hashes = [maybe_convert_block_hash(h) for h in rig.scheduler.requests[name].block_hashes]
    rig.drain()
    wait_saved(rig)
    rig.connector.update_connector_output(rig.worker.run(rig.scheduler.schedule()))
    rig.connector.take_events()
    (stored,) = events
    assert stored.medium == "CPU" and set(stored.block_hashes) == set(hashes)
    gone = next(iter(store.blocks))
    store.lose(gone)
    plan = rig.scheduler.schedule()
    rig.connector.update_connector_output(rig.worker.run(plan))
    rig.connector.take_events()
    (removed,) = events[1:]
    assert removed.block_hashes == [maybe_convert_block_hash(gone[:-4])]
    rig.close()


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("mode", [EVENTS, HOOKS, FILLS])
def test_a_step_that_preempts_saves_what_it_computes_and_nothing_else(
    store: DoubleStore, mode: str, events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    rig = Rig(
        num_blocks=13,
        max_num_batched_tokens=96,
        long_prefill_tokens=2 * BLOCK,
        scheduling="priority",
        kv_events=events or mode == EVENTS,
        extra={"hooks": mode != EVENTS, "follow": mode == HOOKS},
        **OURS,
    )
    assert rig.connector.feed.mode == mode

    def add(tokens: int, max_tokens: int, priority: int) -> Request:
        name = rig.add(rig.tokens(tokens), max_tokens=max_tokens, priority=priority)
        return rig.scheduler.requests[name]

    first = add(BLOCK * 10 + 1, 1, 2)
    rig.step()
    second, third = add(BLOCK - 1, 3, 1), add(BLOCK, 4, 1)
    rig.step()
    # The first one is planned for two blocks, the second one fills its block, and the third one
    # needs a block where there is none.
    plan = rig.step()
    assert plan.preempted_req_ids == {first.request_id}
    assert third.num_computed_tokens == BLOCK + 1
    saved = [key[:-4] for key in plan.kv_connector_metadata.save_keys]
    assert saved == [bytes(second.block_hashes[0])]
    known = {key[:-4] for key in cached(rig.pool)}
    assert known.isdisjoint(first.block_hashes[8:10]), "nobody computes these two"
    assert known.issuperset(first.block_hashes[:8]), "earlier steps have computed these"
    # The block of one of the two was taken by the third request.
    assert rig.connector.feed.uncomputed_total == 1
    rig.drain()
    settle(rig)
    check_stored(rig, store)
    assert len(store.blocks) == 12 and rig.connector.feed.log_errors_total == 0
    if mode != FILLS:
        rig.connector.feed.flush()
        assert set(rig.connector.feed.keys.keys()) == set(cached(rig.pool))
    rig.close()


def test_comparisons_save_late_and_only_what_is_there_still(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "RESYNC_STEPS", 8)
    monkeypatch.setattr(pool_module, "LATE_MAX", 5)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, extra={"hooks": False}, **OURS)
    assert rig.connector.feed.mode == RESYNC and "saves blocks that late" in caplog.text
    prompt = rig.tokens(BLOCK * 12 + 5)
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=7)]
    for _ in range(7):
        assert not rig.step().kv_connector_metadata.save_keys
    keys = [bytes(block_hash) + bytes(4) for block_hash in request.block_hashes]
    told: list[bytes] = list(rig.step().kv_connector_metadata.save_keys)
    assert told == keys[:5], "a prefix first"
    # One of the rest is dropped before its turn comes, and others are given to another request.
    rig.pool.evict_blocks(set(block_ids(cached(rig.pool)[keys[6]])))
    rig.add(rig.tokens(BLOCK * 50), max_tokens=1)
    told += rig.step().kv_connector_metadata.save_keys
    assert keys[6] not in cached(rig.pool) and keys[6] not in told
    settle(rig)
    check_stored(rig, store)
    for _ in range(30):
        rig.step()
    rig.drain()
    settle(rig)
    check_stored(rig, store)
    rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    held = next(i for i, key in enumerate(keys) if key not in store.blocks)
    assert held >= 5
    rig.add(prompt, max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 12 - held
    rig.close()


def test_comparisons_under_priorities_save_nothing_and_say_so(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "RESYNC_STEPS", 2)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, extra={"hooks": False}, scheduling="priority", **OURS)
    assert "saves no blocks, as with priority scheduling it cannot know" in caplog.text
    prompt = rig.tokens(BLOCK * 12 + 5)
    rig.add(prompt, max_tokens=7)
    rig.drain()
    settle(rig)
    assert not store.blocks and len(rig.connector.feed.keys) > 0
    rig.close()


def test_a_pool_that_cannot_be_read_still_lets_blocks_be_loaded(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled_rig, prompt = filled(store)
    filled_rig.close()
    store.closed = False
    store.request_snapshot()

    def unreadable(pool: Any) -> Any:
        raise AttributeError("'BlockHashToBlockMap' object has no attribute '_cache'")

    monkeypatch.setattr(pool_module, "cached", unreadable)
    with caplog.at_level("WARNING", "slipstream.vllm"):
        rig = Rig(num_blocks=64, seed=1, **OURS)
    assert rig.connector.feed.mode == NOTHING
    assert "only loads them" in caplog.text and "no attribute '_cache'" in caplog.text
    rig.step()
    rig.add(prompt, max_tokens=3)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0 and len(store.blocks) == 12
    rig.connector.feed.flush()
    rig.close()


def check_stored(rig: Rig, store: DoubleStore) -> None:
    """Every block in the store matches its key."""
    wait_saved(rig)
    for key, data in store.blocks.items():
        assert data == rig.worker.pattern(key[:-4])


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", [FILLS, HOOKS, EVENTS, RESYNC])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_any_run_reads_only_right_blocks(
    store: DoubleStore,
    seed: int,
    ahead: bool,
    mode: str,
    scheduling: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    # As late as in a pool of 16,000 blocks after 256 steps.
    monkeypatch.setattr(pool_module, "RESYNC_STEPS", 8)
    monkeypatch.setattr(pool_module, "LATE_MAX", 5)
    rng = random.Random(seed)
    rig = Rig(
        num_blocks=100,
        max_num_batched_tokens=512,
        seed=seed,
        scheduling=scheduling,
        async_scheduling=ahead,
        kv_events=mode == EVENTS,
        extra={"hooks": mode in (FILLS, HOOKS), "follow": mode == HOOKS},
        long_prefill_tokens=rng.choice([0, 5 * BLOCK]),
        **OURS,
    )
    assert rig.connector.feed.mode == mode
    saves = mode != RESYNC or scheduling == "fcfs"
    prefixes = [rig.tokens(BLOCK * 12) for _ in range(4)]
    live: list[str] = []
    finished = preempted = 0
    for _ in range(400):
        match rng.randrange(14):
            case 0 | 1 | 2:
                shared = rng.choice(prefixes)[: BLOCK * rng.randrange(13)]
                tokens = shared + rig.tokens(rng.randrange(1, 200))
                priority = rng.randrange(3)
                live.append(rig.add(tokens, max_tokens=rng.randrange(1, 100), priority=priority))
            case 3 if live:
                rig.abort(live.pop(rng.randrange(len(live))))
            case 4:
                store.hold_back = not store.hold_back
            case 5 | 6:
                store.let_go(tuple(i for i in range(12) if rng.randrange(8) == 0))
            case 7 if store.blocks:
                with_lock = rng.choice(list(store.blocks))
                store.lose(with_lock)
            case 8 if rng.randrange(10) == 0:
                rig.connector.reset_cache()
            case 9:
                held = [b.block_id for b in rig.pool.blocks if b.block_hash is not None]
                rig.pool.evict_blocks(set(rng.sample(held, len(held) // 2)))
        plan = rig.step()
        preempted += len(plan.preempted_req_ids or ())
        finished += len(plan.finished_req_ids)
        live = [name for name in live if name in rig.scheduler.requests]
        for key, data in list(store.blocks.items())[-20:]:
            assert data == rig.worker.pattern(key[:-4]), "a block is saved under another one's key"
    store.hold_back = False
    store.let_go()
    wait_loaded(rig)
    for _ in range(2000):
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
        wait_loaded(rig)
    assert not rig.scheduler.requests or all(
        r.is_finished() for r in rig.scheduler.requests.values()
    )
    assert finished > 30 and preempted, "the run must reach what it is there to test"
    assert (rig.worker.connector.worker._counts["loaded_blocks"] > 20) == saves
    assert (len(store.blocks) > 0) == saves
    check_stored(rig, store)
    rig.close()
