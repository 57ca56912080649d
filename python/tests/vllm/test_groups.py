"""Models with several groups of layers, on vLLM's real scheduler.

`rig.Worker` compares every block of every group that a model would read with its tokens.
"""

import copy
import random
from typing import Any

import pytest
import torch
from double import DoubleStore
from rig import BLOCK, Rig, Shape
from slipstream.vllm import connector as connector_module
from slipstream.vllm.blocks import Blocks, LayoutError
from slipstream.vllm.groups import Group, GroupError, read_groups
from test_transfers import recorded_events, wait_loaded, wait_saved
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

OURS: dict[str, Any] = {
    "connector": "SlipstreamConnector",
    "module": "slipstream.vllm",
    "worker": True,
}
MODELS = {
    # As Gemma 3 and gpt-oss: one group that needs everything, others of a window.
    "window": (Shape(), Shape("window", 3 * BLOCK + 5), Shape("window", 3 * BLOCK + 5, layers=1)),
    "windows alone": (Shape("window", 40), Shape("window", 100)),
    "one window": (Shape("window", 5 * BLOCK),),
    "chunks": (Shape("chunk", 5 * BLOCK), Shape()),
    # As Gemma 4: pages of one size, of other numbers of tokens.
    "two sizes": (Shape(block=2 * BLOCK, heads=2), Shape("window", 90)),
    # Windows that reach over all of the prompts below.
    "wide windows": (Shape(), Shape("window", 64 * BLOCK), Shape("chunk", 64 * BLOCK)),
    "padded": (Shape(), Shape("window", 64, heads=3, padded=4096)),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DoubleStore:
    double = DoubleStore(0)

    def open_double(_options: Any, _identity: Any, block_bytes: list[int], *_: Any) -> Any:
        double.block_bytes = block_bytes
        return double

    monkeypatch.setattr(connector_module, "open_store", open_double)
    return double


def settle(rig: Rig) -> None:
    """Let the saver's thread finish, and the scheduler apply its message."""
    wait_saved(rig)
    rig.step()


def check_stored(rig: Rig, store: DoubleStore) -> None:
    """Every block in the store matches its key."""
    for key, data in store.blocks.items():
        assert data == rig.worker.pattern(key[:-4], int.from_bytes(key[-4:], "big"))


def filled(
    store: DoubleStore, model: str, blocks: int = 12, **options: Any
) -> tuple[Rig, list[int]]:
    """An engine whose store has a prompt's blocks and whose device has dropped them."""
    rig = Rig(num_blocks=160, shapes=MODELS[model], **OURS, **options)
    prompt = rig.tokens(BLOCK * blocks + 5)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    settle(rig)
    check_stored(rig, store)
    assert rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    return rig, prompt


@pytest.mark.parametrize("model", MODELS)
def test_what_was_saved_is_loaded_in_every_group(store: DoubleStore, model: str) -> None:
    rig, prompt = filled(store, model)
    name = rig.add(prompt, max_tokens=3)
    (load,) = rig.step().kv_connector_metadata.loads
    # Of each group, what is read after the hit, and no more.
    for shape, (first, count) in zip(rig.shapes, load.parts, strict=True):
        assert (first, first + count) == (shape.first(12 * BLOCK), 12 * BLOCK // shape.block)
    wait_loaded(rig)
    rig.drain()
    assert name not in rig.scheduler.requests
    assert rig.worker.computed_blocks == 0, "only the last five tokens and the answer are computed"
    assert all(rig.worker.read_blocks)
    rig.close()


def add_and_load(rig: Rig, prompt: list[int]) -> Any:
    """Let the prompt arrive, and return the load that it starts."""
    rig.add(prompt, max_tokens=3)
    (load,) = rig.step().kv_connector_metadata.loads
    return load


def keys_of(rig: Rig, prompt: list[int], group: int) -> list[bytes]:
    """The keys of a prompt's blocks in a group."""
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    rig.abort(request.request_id)
    step = rig.shapes[group].block // rig.hash_block
    return [bytes(h) + group.to_bytes(4, "big") for h in request.block_hashes[step - 1 :: step]]


def test_a_hit_is_one_that_every_group_can_serve(store: DoubleStore) -> None:
    rig, prompt = filled(store, "window")
    full, window = keys_of(rig, prompt, 0), keys_of(rig, prompt, 1)

    def hit() -> int:
        rig.step()
        name = rig.add(prompt, max_tokens=1)
        request = rig.scheduler.requests[name]
        tokens, _ = rig.connector.get_num_new_matched_tokens(request, 0)
        again = {rig.connector.get_num_new_matched_tokens(request, 0)[0] for _ in range(20)}
        assert again == {tokens}, "a look-up changes nothing"
        rig.abort(name)
        return tokens // BLOCK

    assert hit() == 12
    # A block that no hit of this length reads any more is not missed.
    store.lose(window[3])
    assert hit() == 12
    # A window of 53 tokens needs four blocks, the oldest of which one of the two groups lacks.
    store.lose(window[8])
    assert hit() == 8
    store.lose(full[7])
    # Blocks 3 to 6 would be read after a hit of seven, and block 3 is gone: three is left.
    assert hit() == 3
    store.lose(full[0])
    assert hit() == 0
    rig.drain()
    rig.close()


def test_what_the_device_has_is_not_loaded(store: DoubleStore) -> None:
    rig, prompt = filled(store, "window")
    rig.add(prompt[: 5 * BLOCK + 1], max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    before = list(rig.worker.read_blocks)
    load = add_and_load(rig, prompt)
    assert load.parts == [(5, 7), (8, 4), (8, 4)]
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0 and rig.worker.read_blocks > before
    rig.close()


def check_recomputed(
    rig: Rig,
    store: DoubleStore,
    prompt: list[int],
    failed: tuple[int, ...],
    kept: int,
    again: bool = True,
) -> None:
    """Blocks of a load fail; earlier ones are kept or loaded again, the rest computed."""
    store.hold_back = True
    load = add_and_load(rig, prompt)
    assert len(load.keys) > max(failed)
    store.let_go(failed)
    wait_loaded(rig)
    # The failure is reported in one step, in the next one it is deferred, and then it looks again.
    for _ in range(3):
        rig.step()
    loads = [keys for _, keys, _ in store.held_back]
    assert len(loads) == (kept > 0 and again)
    store.hold_back = False
    store.let_go()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 12 - kept
    assert not rig.connector.scheduler._loading and not rig.connector.scheduler._limits
    rig.close()


@pytest.mark.parametrize(
    ("failed", "kept"),
    # Blocks 0 to 11 of the first group, then 8 to 11 of each of the others.
    [((0,), 0), ((11,), 11), ((5, 9), 5), ((12,), 8), ((3, 19), 3), (tuple(range(20)), 0)],
)
def test_what_came_before_a_failed_block_is_loaded_again(
    store: DoubleStore, failed: tuple[int, ...], kept: int
) -> None:
    rig, prompt = filled(store, "window")
    check_recomputed(rig, store, prompt, failed, kept)


@pytest.mark.parametrize(
    ("failed", "kept"),
    # Blocks 0 to 11 of each of the three groups.
    [((0,), 0), ((11,), 11), ((5, 9), 5), ((12 + 4,), 4), ((7, 24 + 3), 3), ((24,), 0)],
)
def test_what_came_before_a_failed_block_is_kept(
    store: DoubleStore, failed: tuple[int, ...], kept: int
) -> None:
    rig, prompt = filled(store, "wide windows")
    check_recomputed(rig, store, prompt, failed, kept, again=False)


def test_a_block_that_the_device_had_is_kept_when_a_load_fails(store: DoubleStore) -> None:
    rig, prompt = filled(store, "wide windows")
    rig.add(prompt[: 4 * BLOCK + 1], max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    # Of each group, blocks 4 to 11; the first of them fails in the second group.
    check_recomputed(rig, store, prompt, (8,), 4, again=False)


class OnePeer:
    """A peer that reports every block as held."""

    name = "tcp://peer"

    def longest(
        self, groups: Any, stored: Any, hashes: Any, start: int, end: int, found: int
    ) -> tuple[str, int]:
        return self.name, end - end % groups.hit_tokens

    def is_settled(self) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def test_of_a_peers_blocks_only_those_that_failed_are_asked_for_again(store: DoubleStore) -> None:
    rig, prompt = filled(store, "window")
    # This engine's store has nothing; the blocks are a peer's.
    theirs = dict(store.blocks)
    rig.connector.reset_cache()
    rig.step()
    rig.step()
    rig.connector.scheduler.follow(OnePeer())
    store.hold_back = True
    load = add_and_load(rig, prompt)
    assert set(load.sources) == {OnePeer.name} and not store.blocks
    store.blocks = theirs
    store.hold_back, puts = False, []
    put = store.put

    def note(keys: list[bytes], data: memoryview) -> int:
        puts.extend(keys)
        return put(keys, data)

    store.put = note  # type: ignore[method-assign]
    store.let_go((9,))
    wait_loaded(rig)
    assert puts == [key for i, key in enumerate(load.keys) if i != 9]
    check_stored(rig, store)
    again: list[Any] = []
    for _ in range(4):
        again += rig.step().kv_connector_metadata.loads
    (second,) = again
    # Up to the block that failed, and of the windows what is read there.
    assert second.parts == [(0, 9), (5, 4), (5, 4)]
    came = {key for key, source in zip(second.keys, second.sources, strict=True) if not source}
    assert came == set(second.keys) & set(puts) and len(came) == 9 + 1 + 1
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 3
    rig.close()


def test_a_load_that_fails_twice_is_computed(store: DoubleStore) -> None:
    rig, prompt = filled(store, "window")
    store.hold_back = True
    add_and_load(rig, prompt)
    for failed in ((9,), (7,)):
        store.let_go(failed)
        wait_loaded(rig)
        for _ in range(3):
            rig.step()
    assert not store.held_back
    rig.drain()
    assert rig.worker.computed_blocks == 12
    rig.close()


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", MODELS)
def test_any_run_reads_only_right_blocks(
    store: DoubleStore, model: str, ahead: bool, scheduling: str
) -> None:
    seed = sorted(MODELS).index(model)
    rng = random.Random(seed)
    rig = Rig(
        # Few, so that eviction and preemption happen all the time.
        num_blocks=46 * len(MODELS[model]) - 4,
        max_num_batched_tokens=512,
        seed=seed,
        scheduling=scheduling,
        async_scheduling=ahead,
        long_prefill_tokens=rng.choice([0, 5 * BLOCK]),
        shapes=MODELS[model],
        **OURS,
    )
    prefixes = [rig.tokens(BLOCK * 12) for _ in range(4)]
    live: list[str] = []
    finished = preempted = 0
    counts = rig.worker.connector.worker._counts

    def seen() -> bool:
        """The events that the run must cover have happened."""
        failed = any(name.startswith("load_failed") for name in counts.copy())
        return finished > 30 and preempted > 0 and counts["loaded_blocks"] > 50 and failed

    for step in range(4000):
        if step > 250 and seen():
            break
        match rng.randrange(14):
            case 0 | 1 | 2 | 3:
                shared = rng.choice(prefixes)[: BLOCK * rng.randrange(13)]
                tokens = shared + rig.tokens(rng.randrange(1, 200))
                priority = rng.randrange(3)
                live.append(rig.add(tokens, max_tokens=rng.randrange(1, 150), priority=priority))
            case 4 if live:
                rig.abort(live.pop(rng.randrange(len(live))))
            case 5:
                store.hold_back = not store.hold_back
            case 6 | 7:
                store.let_go(tuple(i for i in range(30) if rng.randrange(12) == 0))
            case 8 if store.blocks:
                store.lose(rng.choice(list(store.blocks)))
            case 9 if rng.randrange(10) == 0:
                rig.connector.reset_cache()
            case 10:
                held = [b.block_id for b in rig.pool.blocks if b.block_hash is not None]
                rig.pool.evict_blocks(set(rng.sample(held, len(held) // 2)))
        plan = rig.step()
        preempted += len(plan.preempted_req_ids or ())
        finished += len(plan.finished_req_ids)
        live = [name for name in live if name in rig.scheduler.requests]
    store.hold_back = False
    # All that are left end, and a long queue would only take longer.
    for name in live[5:]:
        rig.abort(name)
    for _ in range(2000):
        store.let_go()
        wait_loaded(rig)
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
    assert all(request.is_finished() for request in rig.scheduler.requests.values())
    settle(rig)
    check_stored(rig, store)
    half = rig.connector.scheduler
    assert not half._loading and not half._limits, "nothing is remembered of who is gone"
    assert seen()
    rig.close()


def specs(*made: Any) -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec([f"{n}"], spec) for n, spec in enumerate(made)]


def test_kinds_that_cannot_be_shared_are_refused_by_name() -> None:
    rig = Rig(num_blocks=8, **(OURS | {"worker": False}))
    attention = {"block_size": BLOCK, "num_kv_heads": 4, "head_size": 16, "dtype": torch.float16}
    full, window = FullAttentionSpec(**attention), Shape("window", 64).spec()
    mamba = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
    config = copy.copy(rig.kv_cache_config)

    def refused(groups: list[KVCacheGroupSpec], text: str) -> None:
        config.kv_cache_groups = groups
        with pytest.raises(GroupError, match=text):
            read_groups(rig.config, config)

    offloading = "OffloadingConnector with a slipstream tier"
    refused(specs(full, mamba), rf"caches of group 1 \(MambaSpec\): .*{offloading}")
    refused(
        specs(CrossAttentionSpec(**attention), full, mamba),
        r"group 0 \(CrossAttentionSpec\); group 2 \(MambaSpec\)",
    )
    mixed = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": Shape("window", 64).spec(), "b": full}
    )
    refused(specs(mixed), "layers of several kinds")
    refused([], "no KV cache")
    config.hash_block_size = 12
    refused(specs(full), r"blocks have \[16\] tokens and hashes 12")
    config.hash_block_size = None
    rig.config.parallel_config.decode_context_parallel_size = 2
    refused(specs(full), "--decode-context-parallel-size")
    rig.config.parallel_config.decode_context_parallel_size = 1
    # What is left is taken: layers of one kind whose blocks have other sizes, and MLA.
    wide = UniformTypeKVCacheSpecs(
        block_size=BLOCK,
        kv_cache_specs={"a": window, "b": Shape("window", 64, heads=8).spec()},
    )
    mla = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float16)
    config.kv_cache_groups = specs(wide, mla)
    assert str(read_groups(rig.config, config)) == "window 64 of 16, full 16"
    rig.close()


def test_layers_of_no_group_are_refused_and_shared_ones_are_not() -> None:
    cache = torch.zeros((8, 2, BLOCK, 4, 16), dtype=torch.float16)
    groups = [Group("full", BLOCK, 0, ("a",)), Group("window", BLOCK, 64, ("b",))]
    shared = Blocks({"a": cache, "b": cache, "c": cache}, 8, groups)
    assert shared.group_bytes == [8192 // 2] * 2
    with pytest.raises(LayoutError, match="layer c is of none of the 2 cache groups"):
        Blocks({"a": cache, "b": cache, "c": cache.clone()}, 8, groups)


def test_kv_events_name_the_group(store: DoubleStore) -> None:
    rig = Rig(num_blocks=160, shapes=MODELS["two sizes"], kv_events=True, **OURS)
    events = recorded_events(rig)
    name = rig.add(rig.tokens(BLOCK * 4 + 1), max_tokens=1)
    hashes = [maybe_convert_block_hash(h) for h in rig.scheduler.requests[name].block_hashes]
    rig.drain()
    wait_saved(rig)
    rig.connector.update_connector_output(rig.worker.run(rig.scheduler.schedule()))
    rig.connector.take_events()
    told = {event.group_idx: (event.block_size, set(event.block_hashes)) for event in events}
    assert told == {0: (2 * BLOCK, set(hashes[1::2])), 1: (BLOCK, set(hashes))}
    rig.close()
