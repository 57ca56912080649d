"""Blocks divided by layers: saved while a forward pass computes, and loaded within a step.

`rig.Worker.forward_by_layer` makes the calls of vLLM's attention layers, and compares every block
that a layer would read with its tokens.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from double import DoubleStore
from rig import BLOCK, Rig, Shape, pattern
from slipstream.options import OptionError
from slipstream.vllm import SlipstreamConnector
from slipstream.vllm import connector as connector_module
from slipstream.vllm.groups import Group, GroupError, Layout, check_in_step, group_of, slice_key
from test_disagg import ASK, NoOther, Server
from test_transfers import OURS, recorded_events, settle, wait_loaded, wait_saved
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

LAYERS, BLOCKS = 4, 12
PAGE = Shape().page
IN_STEP = {"layer_slices": LAYERS, "layer_load_blocks_max": 64}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> DoubleStore:
    double = DoubleStore([PAGE] * LAYERS)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    return double


def engine(extra: dict[str, Any], num_blocks: int = 64, **options: Any) -> Rig:
    shapes = (Shape(layers=LAYERS),)
    return Rig(num_blocks=num_blocks, shapes=shapes, extra=extra, **OURS, **options)


def filled(extra: dict[str, Any], **options: Any) -> tuple[Rig, list[int]]:
    """An engine whose store has a prompt's 12 blocks and whose device has dropped them."""
    rig = engine(extra, **options)
    prompt = rig.tokens(BLOCK * BLOCKS + 5)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    settle(rig)
    rig.step()
    assert rig.scheduler.reset_prefix_cache()
    rig.worker.computed_blocks = 0
    return rig, prompt


def check_store(store: DoubleStore) -> None:
    """Each slice is of its layer and of the tokens that its key names."""
    for key, data in store.blocks.items():
        assert data == pattern(key[:-4], f"0.{group_of(key)}", 0, PAGE)


def let_go_first(store: DoubleStore, count: int = 1, **how: Any) -> None:
    """End the oldest loads that were held back."""
    jobs = sorted(store.held_back)
    store.held_back = jobs[:count]
    store.let_go(**how)
    store.held_back = jobs[count:]


def test_a_slice_is_stored_before_the_next_layer_is_computed(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine({"layer_slices": LAYERS})
    connector, seen = rig.worker.connector, []
    save = connector.save_kv_layer

    def save_and_look(layer: str, *rest: Any) -> None:
        save(layer, *rest)
        wait_saved(rig)
        seen.append(sorted({group_of(key) for key in store.blocks}))

    monkeypatch.setattr(connector, "save_kv_layer", save_and_look)
    rig.add(rig.tokens(BLOCK * BLOCKS), max_tokens=1)
    rig.step()
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert len(store.blocks) == BLOCKS * LAYERS
    check_store(store)
    assert connector.worker._counts["saved_blocks"] == BLOCKS
    rig.close()


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 6])
def test_slices_of_any_number_are_loaded_again(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [PAGE * (LAYERS * (n + 1) // slices - LAYERS * n // slices) or 1 for n in range(slices)]
    double = DoubleStore(sizes if slices > 1 else PAGE * LAYERS)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    rig, prompt = filled({"layer_slices": slices})
    assert len(double.blocks) == BLOCKS * slices
    rig.add(prompt, max_tokens=3)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0
    counts = rig.worker.connector.worker._counts
    assert (counts["saved_blocks"], counts["loaded_blocks"]) == (BLOCKS, BLOCKS)
    rig.close()


@pytest.mark.parametrize("extra", [{"layer_slices": LAYERS}, IN_STEP], ids=["between", "in step"])
def test_a_hit_needs_every_slice(store: DoubleStore, extra: dict[str, Any]) -> None:
    rig, prompt = filled(extra)
    name = rig.add(prompt, max_tokens=1)
    request = rig.scheduler.requests[name]
    lost = slice_key(bytes(request.block_hashes[5]) + bytes(4), 2)
    store.lose(lost)
    rig.abort(name)
    rig.step()
    rig.add(prompt, max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == BLOCKS - 5
    rig.close()


@pytest.mark.parametrize("slices", [1, LAYERS])
def test_a_load_within_the_step_takes_no_further_step(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = DoubleStore([PAGE] * slices if slices > 1 else PAGE * LAYERS)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    rig, prompt = filled({"layer_slices": slices, "layer_load_blocks_max": BLOCKS})
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    assert rig.connector.get_num_new_matched_tokens(request, 0) == (BLOCKS * BLOCK, False)
    assert rig.step().num_scheduled_tokens == {request.request_id: 5}
    assert request.is_finished() and rig.worker.computed_blocks == 0
    # A longer hit is loaded between steps: the step would wait for too long.
    double.blocks.clear()
    rig.connector.scheduler._options = rig.connector.options.__class__(layer_load_blocks_max=11)
    assert not rig.connector.scheduler.loads_in_step(BLOCKS * BLOCK)
    rig.close()


def test_a_layer_waits_for_its_own_slice_only(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, prompt = filled(IN_STEP)
    connector = rig.worker.connector
    wait, missing = connector.wait_for_layer_load, []

    def wait_and_look(layer: str) -> None:
        # Two parts of a load are under way at a time; the store answers one per layer.
        let_go_first(store)
        wait(layer)
        (load,) = connector.worker.in_step
        missing.append([bool(count) for count in load.missing])

    store.hold_back = True
    monkeypatch.setattr(connector, "wait_for_layer_load", wait_and_look)
    rig.add(prompt, max_tokens=1)
    rig.step()
    assert missing == [
        [False, True, True, True],
        [False, False, True, True],
        [False, False, False, True],
        [False, False, False, False],
    ]
    assert not rig.scheduler.has_unfinished_requests() and rig.worker.computed_blocks == 0
    assert not connector.worker.in_step
    rig.close()


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_failure_within_the_step_is_computed_in_the_next_one(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch, layer: int, role: str
) -> None:
    rig, prompt = filled(IN_STEP)
    # As if a peer had them: loaded blocks would be saved here, too.
    if role == "kv_consumer":
        rig.connector.scheduler.feed.wants_new = False
    connector = rig.worker.connector
    wait, asked = connector.wait_for_layer_load, []

    def wait_after_failure(name: str) -> None:
        let_go_first(store, failed=(7,) if len(asked) == layer else ())
        asked.append(name)
        wait(name)

    store.hold_back = True
    monkeypatch.setattr(connector, "wait_for_layer_load", wait_after_failure)
    name = rig.add(prompt, max_tokens=3)
    rig.step()
    monkeypatch.undo()
    monkeypatch.setattr(connector_module, "open_store", lambda *_: store)
    request = rig.scheduler.requests[name]
    assert request.num_output_tokens == 0, "the token of that step is of no use"
    assert rig.worker.lost_reads == BLOCKS * (LAYERS - layer)
    store.hold_back = False
    store.let_go()
    rig.drain()
    assert rig.worker.computed_blocks == BLOCKS
    wait_saved(rig)
    check_store(store)
    half = connector.worker
    assert half._counts["load_failed_blocks.checksum"] == BLOCKS
    assert half._counts["load_failed_blocks.deadline"] == 0
    with half.moved:
        assert half.moved.wait_for(lambda: not half.loading, 10)
    rig.close()


def test_the_wait_of_a_step_ends_with_the_deadline(store: DoubleStore) -> None:
    rig, prompt = filled(IN_STEP | {"load_deadline_s": 0.05})
    store.hold_back = True
    name = rig.add(prompt, max_tokens=3)
    rig.step()
    assert rig.scheduler.requests[name].num_output_tokens == 0
    # The store ends the load late: nothing of it is used.
    store.hold_back = False
    store.let_go()
    rig.drain()
    assert rig.worker.computed_blocks == BLOCKS
    half = rig.worker.connector.worker
    assert half._counts["load_failed_blocks.deadline"] == BLOCKS
    rig.close()


def test_others_in_the_step_of_a_failure_keep_their_tokens(store: DoubleStore) -> None:
    rig, prompt = filled(IN_STEP | {"load_deadline_s": 0.05})
    other = rig.add(rig.tokens(40), max_tokens=9)
    rig.step()
    before = rig.scheduler.requests[other].num_output_tokens
    store.hold_back = True
    rig.add(prompt, max_tokens=3)
    # It finds the blocks that are being loaded in the device's cache, in the same step.
    rig.add(prompt[: BLOCK * 8 + 3], max_tokens=3)
    rig.step()
    assert rig.scheduler.requests[other].num_output_tokens == before + 1
    store.hold_back = False
    store.let_go()
    rig.drain()
    wait_saved(rig)
    check_store(store)
    rig.close()


@pytest.mark.parametrize(("in_step", "is_async"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("seed", [0, 1, 7, 12])
def test_random_work_reads_no_other_tokens(
    store: DoubleStore, in_step: bool, is_async: bool, seed: int
) -> None:
    extra = {"layer_slices": LAYERS, "load_deadline_s": 0.02}
    rig = engine(
        extra | ({"layer_load_blocks_max": 8} if in_step else {}),
        num_blocks=36,
        async_scheduling=is_async,
        max_num_batched_tokens=96,
        seed=seed,
    )
    drawn = random.Random(seed)
    prompts = [rig.tokens(drawn.randrange(20, 200)) for _ in range(9)]
    for _ in range(400):
        act = drawn.random()
        if act < 0.35 and len(rig.scheduler.requests) < 4:
            prompt = drawn.choice(prompts)
            rig.add(prompt[: drawn.randrange(1, len(prompt))], max_tokens=drawn.randrange(1, 9))
        elif act < 0.4 and rig.scheduler.requests:
            rig.abort(drawn.choice(list(rig.scheduler.requests)))
        elif act < 0.43 and store.blocks:
            store.lose(drawn.choice(list(store.blocks)))
        elif act < 0.5:
            rig.scheduler.reset_prefix_cache()
        elif act < 0.56:
            store.hold_back = not store.hold_back
            if not store.hold_back:
                store.let_go(failed=(drawn.randrange(4),) if drawn.random() < 0.5 else ())
        elif act < 0.565:
            rig.connector.reset_cache()
        rig.step()
    store.hold_back = False
    store.let_go()
    for _ in range(2000):
        wait_loaded(rig)
        if not rig.scheduler.has_unfinished_requests():
            break
        rig.step()
    assert not rig.scheduler.has_unfinished_requests()
    wait_saved(rig)
    check_store(store)
    assert rig.worker.connector.worker._counts["loaded_blocks"] > 0
    rig.close()


def test_room_is_for_all_slices_of_a_block_or_for_none(store: DoubleStore) -> None:
    rig = engine({"layer_slices": LAYERS, "saving_bytes_max": PAGE * LAYERS * 5 + PAGE})
    rig.add(rig.tokens(BLOCK * BLOCKS), max_tokens=1)
    rig.drain()
    wait_saved(rig)
    assert len(store.blocks) == 5 * LAYERS
    assert rig.worker.connector.worker._counts["save_dropped_blocks"] == BLOCKS - 5
    rig.close()


def test_layers_that_are_not_called_are_saved_with_the_step(
    store: DoubleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine({"layer_slices": LAYERS})
    # A CUDA graph of the whole pass calls nothing.
    monkeypatch.setattr(rig.worker.connector, "save_kv_layer", lambda *_: None)
    rig.add(rig.tokens(BLOCK * BLOCKS), max_tokens=1)
    rig.drain()
    wait_saved(rig)
    assert len(store.blocks) == BLOCKS * LAYERS
    check_store(store)
    rig.close()
    needs = SlipstreamConnector.requires_piecewise_for_cudagraph
    assert not needs({}) and needs({"layer_slices": 2}) and needs({"layer_load_blocks_max": 1})


def test_kv_events_name_a_block_once(store: DoubleStore) -> None:
    rig = engine({"layer_slices": LAYERS}, kv_events=True)
    events = recorded_events(rig)
    prompt = rig.tokens(BLOCK * 3)
    request = rig.scheduler.requests[rig.add(prompt, max_tokens=1)]
    hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[:3]]
    rig.drain()
    settle(rig)
    rig.step()
    (stored,) = events
    assert stored.block_hashes == hashes and stored.token_ids == prompt
    assert stored.medium == "CPU"
    store.lose(slice_key(bytes(request.block_hashes[0]) + bytes(4), LAYERS - 1))
    rig.step()
    rig.step()
    removed = events[-1]
    assert removed.block_hashes == hashes[:1]
    rig.close()


def test_a_prompt_is_handed_over_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [DoubleStore([PAGE] * LAYERS) for _ in range(2)]
    opened = iter(stores)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: next(opened))
    prefill = engine({"layer_slices": LAYERS}, role="kv_producer")
    decode = engine(IN_STEP | {"remote_wait_s": 3600.0}, role="kv_consumer")
    prefill.connector.scheduler.server = Server("p", "tcp://10.0.0.1:7300", 1, BLOCK)
    decode.connector.scheduler.follow(NoOther())
    prompt = prefill.tokens(BLOCK * BLOCKS + 5)
    name = prefill.add(prompt, max_tokens=1, transfer=dict(ASK))
    prefill.drain()
    wait_saved(prefill)
    decode.add(prompt, max_tokens=2, transfer=prefill.handed_over[name])
    # All slices of a block have to arrive.
    blocks = sorted(stores[0].blocks.items(), key=lambda item: group_of(item[0]))
    for part in (blocks[: BLOCKS * 3], blocks[BLOCKS * 3 :]):
        assert not decode.step().num_scheduled_tokens
        data = b"".join(block for _, block in part)
        stores[1].put([key for key, _ in part], memoryview(data))
    decode.drain()
    assert decode.worker.computed_blocks == 0
    counts = decode.connector.scheduler.counts
    assert counts["remote_prefills.arrived"] == 1
    prefill.close()
    decode.close()


def test_loads_within_a_step_are_refused_where_a_failure_would_be_read(store: DoubleStore) -> None:
    shapes = (Shape(), Shape("window", 64))
    with pytest.raises(GroupError, match="but full 16, window 64 of 16; leave out `layer_load"):
        Rig(num_blocks=64, extra={"layer_load_blocks_max": 8}, shapes=shapes, **OURS)
    # vLLM on a CPU plans no step ahead, so these cannot be configured here.
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
    )
    layout = Layout((Group("full", BLOCK),), BLOCK)
    with pytest.raises(GroupError, match=r"--no-async-scheduling.*--pipeline-parallel-size 1"):
        check_in_step(config, layout)
    config.scheduler_config.async_scheduling = False
    config.parallel_config.pipeline_parallel_size = 1
    check_in_step(config, layout)


def test_slices_of_several_groups_are_refused(store: DoubleStore) -> None:
    shapes = (Shape(), Shape("window", 64))
    with pytest.raises(GroupError, match=r"full 16, window 64 of 16; leave out `layer_slices`"):
        Rig(num_blocks=64, extra={"layer_slices": 2}, shapes=shapes, **OURS)
    with pytest.raises(OptionError, match="`layer_slices` is 0, which is too small"):
        Rig(num_blocks=64, extra={"layer_slices": 0}, **OURS)
