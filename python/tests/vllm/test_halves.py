"""Parts of the two halves on their own: memory layouts, several ranks, sleep."""

import pickle

import pytest
import torch
from double import DoubleStore
from rig import BLOCK, Rig
from slipstream.options import OptionError, of_rank
from slipstream.vllm import connector as connector_module
from slipstream.vllm.blocks import Blocks, LayoutError
from slipstream.vllm.metadata import Load, SlipstreamMetadata, SlipstreamWorkerMetadata
from test_transfers import BLOCK_BYTES, OURS, settle, wait_loaded
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

COUNT = 12


def caches(kind: str) -> dict[str, torch.Tensor]:
    """Two layers of 12 blocks, laid out in one of the ways that attention backends choose."""
    made = {}
    for layer in ("a", "b"):
        match kind:
            case "blocks first":
                cache = torch.empty((COUNT, 2, 16, 4, 8), dtype=torch.float16)
            case "heads before tokens":
                cache = torch.empty((COUNT, 2, 4, 16, 8), dtype=torch.float16).transpose(2, 3)
            case "keys and values apart":
                cache = torch.empty((2, COUNT, 16, 4, 8), dtype=torch.bfloat16)
            case "smaller kernel blocks":
                cache = torch.empty((COUNT * 4, 2, 4, 4, 8), dtype=torch.float16)
            case "blocks of all layers together":
                whole = torch.empty((COUNT, 2, 16, 4, 8), dtype=torch.uint8)
                cache = whole[:, 0]
        made[layer] = cache
    if kind == "blocks of all layers together":
        whole = torch.empty((COUNT, 2, 16, 4, 8), dtype=torch.uint8)
        made = {"a": whole[:, 0], "b": whole[:, 1]}
    for cache in made.values():
        cache.view(torch.uint8).random_(0, 60)
    return made


@pytest.mark.parametrize(
    "kind",
    [
        "blocks first",
        "heads before tokens",
        "keys and values apart",
        "smaller kernel blocks",
        "blocks of all layers together",
    ],
)
def test_blocks_are_gathered_and_scattered_whole(kind: str) -> None:
    source, target = caches(kind), caches(kind)
    ours, theirs = Blocks(source, COUNT), Blocks(target, COUNT)
    assert ours.layout == theirs.layout
    total = sum(cache.numel() * cache.element_size() for cache in source.values())
    assert ours.block_bytes * COUNT == total
    before = {name: cache.clone() for name, cache in target.items()}
    gathered, ready = ours.gather([[7, 0, 3]])
    theirs.scatter([[1, 2, 11]], ours.fetch(gathered, ready), theirs.now())
    axis = 1 if kind == "keys and values apart" else 0
    split = 4 if kind == "smaller kernel blocks" else 1

    def block(cache: torch.Tensor, at: int) -> torch.Tensor:
        return cache.narrow(axis, at * split, split)

    for name in source:
        for there, here in ((1, 7), (2, 0), (11, 3)):
            assert torch.equal(block(target[name], there), block(source[name], here))
        for other in set(range(COUNT)) - {1, 2, 11}:
            assert torch.equal(block(target[name], other), block(before[name], other))


def test_layouts_that_differ_have_other_names() -> None:
    names = {
        Blocks(caches(kind), COUNT).layout
        for kind in ("blocks first", "heads before tokens", "keys and values apart")
    }
    assert len(names) == 3


def test_layers_that_share_a_cache_are_stored_once() -> None:
    made = caches("blocks first")
    assert Blocks(made | {"c": made["a"]}, COUNT).block_bytes == Blocks(made, COUNT).block_bytes


def test_caches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layer a have gaps .*another attention backend"):
        Blocks({"a": torch.empty((COUNT, 4, 8))[:, :, :5]}, COUNT)
    with pytest.raises(LayoutError, match="no dimension of a KV cache of shape"):
        Blocks({"a": torch.empty((5, 5, 8))}, COUNT)
    with pytest.raises(LayoutError, match="no KV cache to share"):
        Blocks({}, COUNT)


def test_what_the_halves_say_can_be_sent() -> None:
    load = Load("r", [b"k" * 36], [3], [""], [(0, 1)])
    meta = SlipstreamMetadata(b"keys", [b"k" * 36], [3], [load], ["s"], True, False, True)
    there = pickle.loads(pickle.dumps(meta))
    assert there == meta and isinstance(there, KVConnectorMetadata)
    assert (there.keys, there.save_keys, there.save_blocks) == (b"keys", [b"k" * 36], [3])
    assert (there.loads, there.cancels) == ([load], ["s"])
    assert (there.reset, there.resend, there.detach, there.only_saves) == (True, False, True, False)
    saves = SlipstreamMetadata(save_keys=[b"k" * 20, b"l" * 20], save_blocks=[1, 1 << 31])
    there = pickle.loads(pickle.dumps(saves))
    assert there == saves != meta and there.only_saves and not there.saves_nothing
    assert (there.save_keys, there.save_blocks) == ([b"k" * 20, b"l" * 20], [1, 1 << 31])
    with pytest.raises(ValueError, match="2 keys to save, and 1 blocks"):
        SlipstreamMetadata(save_keys=[b"k" * 36] * 2, save_blocks=[3])
    with pytest.raises(ValueError, match="a key has 20 bytes, earlier ones have 36"):
        SlipstreamMetadata(save_keys=[b"k" * 36, b"k" * 20], save_blocks=[3, 4])
    told = SlipstreamWorkerMetadata({0: [b"a"]}).aggregate(
        SlipstreamWorkerMetadata({1: [b"b"]}, [("disk", b"d")], {"r": 64, "s": 16})
    )
    told = told.aggregate(SlipstreamWorkerMetadata({0: [b"c"]}, kept={"r": 32, "s": 48}))
    told = pickle.loads(pickle.dumps(told))
    assert told.stored == {0: [b"a", b"c"], 1: [b"b"]} and told.kept == {"r": 32, "s": 16}


def test_a_block_is_a_hit_when_all_ranks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    double = DoubleStore(BLOCK_BYTES)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    rig = Rig(num_blocks=64, **OURS)
    half = rig.connector.scheduler
    half.__init__(rig.connector.options, layout=half._layout, ranks=2, events=False)  # type: ignore[misc]
    half.bind(rig.pool)
    request = rig.scheduler.requests[rig.add(rig.tokens(BLOCK * 6 + 1), max_tokens=1)]
    keys = [bytes(block_hash) + bytes(4) for block_hash in request.block_hashes]
    for rank, count in ((0, 5), (1, 3)):
        store = DoubleStore(1)
        store.put(keys[:count], memoryview(bytes(count)))
        half.apply(SlipstreamWorkerMetadata({rank: [store.take_message() or b""]}), set())
    assert half.lookup(request, 0) == 3 * BLOCK
    assert half._not_stored(keys, list(range(6))) == (keys[3:], [3, 4, 5])
    rig.close()


def test_a_pool_that_was_not_handed_over_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(num_blocks=64, connector="SlipstreamConnector", module="slipstream.vllm")
    half = rig.connector.scheduler
    half.feed, half.build = None, half._build
    with caplog.at_level("WARNING", "slipstream.vllm"):
        for _ in range(3):
            rig.step()
    assert caplog.text.count("DEGRADED: saves no blocks and only loads them") == 1
    rig.close()


def test_addresses_by_rank() -> None:
    given = ["tcp://10.0.0.1:7300", "unix:///run/kv.sock", "tcp://127.0.0.1:0"]
    assert of_rank(given, 0) == given
    assert of_rank(given, 3) == [
        "tcp://10.0.0.1:7303",
        "unix:///run/kv.sock.3",
        "tcp://127.0.0.1:0",
    ]
    for wrong in ("10.0.0.1:7300", "tcp://host", "unix://run", ""):
        with pytest.raises(OptionError, match=r"not a valid address; write tcp://IP:PORT, .*unix"):
            of_rank([wrong], 1)


def test_after_sleep_blocks_are_loaded_into_the_caches_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    double = DoubleStore(BLOCK_BYTES)
    monkeypatch.setattr(connector_module, "open_store", lambda *_: double)
    rig = Rig(num_blocks=64, **OURS)
    prompt = rig.tokens(BLOCK * 12 + 3)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    settle(rig)
    connector = rig.worker.connector
    connector.unregister_kv_caches()
    assert rig.scheduler.reset_prefix_cache()
    for cache in rig.worker.caches.values():
        cache.zero_()
    connector.restore_kv_caches()
    rig.worker.computed_blocks = 0
    rig.add(prompt, max_tokens=1)
    rig.step()
    wait_loaded(rig)
    rig.drain()
    assert rig.worker.computed_blocks == 0
    rig.close()
