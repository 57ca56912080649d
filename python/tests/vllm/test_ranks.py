"""Engines of several ranks: one scheduler half, a worker half for each rank.

vLLM's own `KVOutputAggregator` joins the ranks' outputs; each rank has its own bytes, and
`rig.Worker` compares them with the expected ones in every step.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from double import DoubleStore
from rig import BLOCK, Rig, Shape
from slipstream.vllm import connector as connector_module
from test_groups import MODELS, OURS

RANKS = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "pp2": {"pp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}
ONE = (Shape(layers=3),)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[int, DoubleStore]:
    doubles: dict[int, DoubleStore] = {}

    def open_double(_options: Any, _identity: Any, sizes: list[int], rank: int, *_: Any) -> Any:
        doubles[rank] = DoubleStore(sizes)
        return doubles[rank]

    monkeypatch.setattr(connector_module, "open_store", open_double)
    return doubles


def wait_saved(rig: Rig) -> None:
    """Let the savers' threads finish on all ranks."""
    for worker in rig.workers:
        half = worker.connector.worker
        with half.moved:
            assert half.moved.wait_for(lambda half=half: half.saving_bytes == 0, 10)


def wait_loaded(rig: Rig, *ranks: int) -> None:
    """Let the loaders' threads finish the loads that the stores have ended."""
    for rank in ranks or range(len(rig.workers)):
        half = rig.workers[rank].connector.worker
        with half.moved:
            assert half.moved.wait_for(lambda half=half: half.loading == 0, 10)


def filled(**options: Any) -> tuple[Rig, list[int]]:
    """An engine whose stores have a prompt's 12 blocks and whose devices have dropped them."""
    rig = Rig(num_blocks=160, **OURS, **options)
    prompt = rig.tokens(BLOCK * 12 + 5)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    wait_saved(rig)
    told(rig)
    assert rig.scheduler.reset_prefix_cache()
    forget_counts(rig)
    return rig, prompt


def told(rig: Rig) -> None:
    """Let the scheduler apply the keys of all ranks' stores, which are the same."""
    for _ in range(100_000):
        rig.step()
        counts = {len(mirror) for mirror in rig.connector.scheduler.stored}
        if len(counts) == 1 and counts != {0}:
            return
    raise AssertionError(f"ranks have {counts} keys")


def forget_counts(rig: Rig) -> None:
    for worker in rig.workers:
        worker.computed_blocks = 0


def computed(rig: Rig) -> int:
    """Blocks of the first group that were computed; the same on all ranks."""
    (blocks,) = {worker.computed_blocks for worker in rig.workers}
    return blocks


def begin(rig: Rig, prompt: list[int]) -> Any:
    rig.add(prompt, max_tokens=3)
    (load,) = rig.step().kv_connector_metadata.loads
    return load


def hit(rig: Rig, prompt: list[int]) -> int:
    """Blocks that a look-up of the prompt finds."""
    rig.step()
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    tokens, _ = rig.connector.get_num_new_matched_tokens(request, 0)
    rig.abort(request.request_id)
    rig.step()
    return tokens // BLOCK


@pytest.mark.parametrize("model", ["window", "two sizes", "one"])
@pytest.mark.parametrize("ranks", RANKS)
def test_all_ranks_load_their_own_part(model: str, ranks: str) -> None:
    shapes = MODELS.get(model, ONE)
    rig, prompt = filled(shapes=shapes, extra={"host_bytes": 1 << 22}, **RANKS[ranks])
    begin(rig, prompt)
    wait_loaded(rig)
    rig.drain()
    assert computed(rig) == 0
    # If ranks share the layers, one may have none of a group; it still publishes the group's keys.
    counts = [len(mirror) for mirror in rig.connector.scheduler.stored]
    assert counts == [counts[0]] * len(rig.workers) and counts[0] >= 12
    rig.close()


@pytest.mark.parametrize("model", ["window", "one"])
def test_a_block_that_one_rank_lacks_is_no_hit(stores: dict[int, DoubleStore], model: str) -> None:
    rig, prompt = filled(shapes=MODELS.get(model, ONE), tp=2, pp=2)
    assert hit(rig, prompt) == 12
    keys = list(stores[3].blocks)
    group = [key for key in keys if key[-4:] == bytes(4)]
    stores[3].lose(group[7])
    assert hit(rig, prompt) == 7
    stores[1].lose(group[2])
    assert hit(rig, prompt) == 2
    # Saved again are those blocks that some rank lacks.
    rig.add(prompt, max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    wait_saved(rig)
    told(rig)
    assert hit(rig, prompt) == 12
    rig.drain()
    rig.close()


def test_a_request_waits_for_its_last_rank(stores: dict[int, DoubleStore]) -> None:
    rig, prompt = filled(shapes=MODELS["window"], tp=4)
    for store in stores.values():
        store.hold_back = True
    begin(rig, prompt)
    for rank in (2, 0, 3, 1):
        assert not rig.step().num_scheduled_tokens
        stores[rank].let_go()
        wait_loaded(rig, rank)
    rig.drain()
    assert computed(rig) == 0
    rig.close()


@pytest.mark.parametrize(
    ("model", "failed", "kept"),
    [
        # With one group vLLM keeps the blocks before the first one that one rank lacks.
        ("one", {1: (7,)}, 7),
        ("one", {0: (9,), 3: (4, 11)}, 4),
        ("one", {2: tuple(range(12))}, 0),
        # So it does of several whose windows reach as far.
        ("wide windows", {1: (7,)}, 7),
        ("wide windows", {0: (9,), 3: (12 + 4, 24 + 6)}, 4),
        ("wide windows", {1: (24,), 2: (3,)}, 0),
        # Of others it is loaded once more.
        ("window", {1: (7,)}, 7),
        ("window", {0: (9,), 3: (13,)}, 9),
        ("window", {3: (0,)}, 0),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_all(
    stores: dict[int, DoubleStore], model: str, failed: dict[int, tuple[int, ...]], kept: int
) -> None:
    rig, prompt = filled(shapes=MODELS.get(model, ONE), tp=2, pp=2)
    for store in stores.values():
        store.hold_back = True
    begin(rig, prompt)
    # One rank after the other, with steps between.
    for rank, store in stores.items():
        assert not rig.step().num_scheduled_tokens
        store.let_go(failed.get(rank, ()))
        wait_loaded(rig, rank)
    # The failure is reported in one step, in the next one it is deferred, and then it looks again.
    for _ in range(3):
        rig.step()
    for store in stores.values():
        assert len(store.held_back) == (kept > 0 and model == "window")
        store.hold_back = False
        store.let_go()
    wait_loaded(rig)
    rig.drain()
    assert computed(rig) == 12 - kept
    assert not rig.connector.scheduler._loading and not rig.connector.scheduler._limits
    rig.close()


def test_what_one_rank_keeps_is_not_kept_where_another_has_nothing(
    stores: dict[int, DoubleStore],
) -> None:
    rig, prompt = filled(shapes=MODELS["wide windows"], tp=2)
    for store in stores.values():
        store.hold_back = True
    begin(rig, prompt)
    stores[0].let_go((9,))
    wait_loaded(rig, 0)
    rig.step()
    # All of the other rank's blocks arrive, and its cache is released before it reports that.
    stores[1].let_go()
    wait_loaded(rig, 1)
    rig.workers[1].connector.worker.release()
    for cache in rig.workers[1].caches.values():
        cache.zero_()
    rig.workers[1].connector.restore_kv_caches()
    for store in stores.values():
        store.hold_back = False
        store.blocks.clear()
    rig.drain()
    assert computed(rig) == 12
    rig.close()


def test_a_reset_on_all_ranks_while_loading(stores: dict[int, DoubleStore]) -> None:
    rig, prompt = filled(shapes=MODELS["window"], tp=2)
    stores[1].hold_back = True
    begin(rig, prompt)
    wait_loaded(rig, 0)
    assert rig.connector.reset_cache() is True
    rig.step()
    assert not stores[0].blocks and not stores[1].blocks
    stores[1].let_go()
    wait_loaded(rig)
    stores[1].hold_back = False
    rig.drain()
    assert computed(rig) == 12, "nothing from before the reset is used"
    rig.close()


def wait_for_hit(rig: Rig, prompt: list[int], blocks: int) -> None:
    """Wait until the peers are known to have so many of the prompt's blocks, and no more."""
    for _ in range(200_000):
        if hit(rig, prompt) == blocks:
            return
    raise AssertionError(f"{hit(rig, prompt)} blocks are known of {blocks}")


def peers(tmp_path: Path, **options: Any) -> tuple[Rig, Rig]:
    """Two engines, of which the second loads blocks from the first."""
    extra = {"host_bytes": 1 << 22, "model_id": "m", "lookup_wait_s": 0.0}
    listen = f"unix://{tmp_path}/a.sock"
    first = Rig(num_blocks=160, extra=extra | {"listen": [listen]}, **OURS, **options)
    second = Rig(num_blocks=160, extra=extra | {"peers": [listen]}, seed=1, **OURS, **options)
    return first, second


@pytest.mark.parametrize("model", ["window", "two sizes", "one"])
@pytest.mark.parametrize("ranks", ["tp2", "tp2 pp2"])
def test_all_ranks_load_from_the_same_rank_of_a_peer(
    tmp_path: Path, model: str, ranks: str
) -> None:
    first, second = peers(tmp_path, shapes=MODELS.get(model, ONE), **RANKS[ranks])
    prompt = second.tokens(BLOCK * 12 + 5)
    first.add(prompt, max_tokens=1)
    first.drain()
    wait_saved(first)
    wait_for_hit(second, prompt, 12)
    forget_counts(second)
    load = begin(second, prompt)
    assert set(load.sources) == {f"unix://{tmp_path}/a.sock"}
    wait_loaded(second)
    second.drain()
    assert computed(second) == 0
    # One rank of the peer drops its blocks; that the others still have them is of no use.
    for rig in (first, second):
        assert rig.scheduler.reset_prefix_cache()
    second.connector.reset_cache()
    last = first.workers[-1].connector.worker.store
    last.reset()
    wait_for_hit(second, prompt, 0)
    first.close()
    second.close()


def test_own_blocks_and_those_of_a_peer_make_one_hit(tmp_path: Path) -> None:
    first, second = peers(tmp_path, shapes=MODELS["window"], tp=2)
    prompt = second.tokens(BLOCK * 12 + 5)
    # The second has the first five blocks of its own.
    for rig, tokens in ((first, prompt), (second, prompt[: 5 * BLOCK + 1])):
        rig.add(tokens, max_tokens=1)
        rig.drain()
        wait_saved(rig)
        told(rig)
        assert rig.scheduler.reset_prefix_cache()
    wait_for_hit(second, prompt, 12)
    forget_counts(second)
    load = begin(second, prompt)
    assert load.sources.count("") == 5 and len(load.keys) == 12 + 4 + 4
    wait_loaded(second)
    second.drain()
    assert computed(second) == 0
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (
            {"shapes": (Shape(), Shape("window", 64))},
            {"shapes": (Shape(), Shape("window", 80))},
            "`groups` is `full 16, window 64 of 16` on .* and `full 16, window 80 of 16` on",
        ),
        (
            {"shapes": (Shape(), Shape("window", 64))},
            {"shapes": (Shape("window", 64), Shape())},
            "`groups` is `full 16, window 64 of 16` on .* and `window 64 of 16, full 16` on",
        ),
        (
            {"shapes": (Shape(block=32),)},
            {"shapes": (Shape(),)},
            "`block_size` is `32` on .* and `16` on",
        ),
        ({"tp": 2}, {"tp": 1}, "`tp` is `rank 0 of 2` on .* and `rank 0 of 1` on"),
        (
            {"pp": 2, "shapes": (Shape(layers=4),)},
            {"shapes": (Shape(layers=2),)},
            "`pp` is `rank 0 of 2` on .* and `rank 0 of 1` on",
        ),
    ],
)
def test_engines_of_other_groups_or_ranks_are_refused(
    tmp_path: Path,
    here: dict[str, Any],
    there: dict[str, Any],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra = {"host_bytes": 1 << 22, "model_id": "m", "stats_interval_s": 0}
    listen = f"unix://{tmp_path}/a.sock"
    first = Rig(num_blocks=64, extra=extra | {"listen": [listen]}, **OURS, **there)
    second = Rig(num_blocks=64, extra=extra | {"peers": [listen]}, **OURS, **here)
    for _ in range(100_000):
        second.step()
        if "unavailable" in caplog.text and re.search(text, caplog.text):
            break
    assert re.search(text, caplog.text), caplog.text[-2000:]
    first.close()
    second.close()
