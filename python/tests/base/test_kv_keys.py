"""The key set and the pool's feed, without vLLM: a test double replaces its block pool."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slipstream import KeyMirror, KeySet
from slipstream.pool import HOOKS, RESYNC, RESYNC_STEPS, PoolFeed


class Block:
    """One block of a pool."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.key: bytes | None = None


class Map:
    """As in vLLM 0.33: one block, or several by id."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Block | dict[int, Block]] = {}


class Pool:
    """The part of a block pool that the feed uses."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        self.blocks = [Block(n) for n in range(num_gpu_blocks)]
        self.cached_block_hash_to_block = Map()

    def get_new_blocks(self, count: int) -> list[Block]:
        return self.blocks[:count]

    def free_blocks(self, blocks: list[Block]) -> None: ...

    def _insert_block_hash(
        self, block_hash_with_group_id: bytes, block: Block, num_tokens: int | None
    ) -> None:
        key = block_hash_with_group_id
        held = self.cached_block_hash_to_block._cache
        block.key = key
        old = held.get(key)
        if isinstance(old, Block) and old is not block:
            held[key] = {old.block_id: old, block.block_id: block}
        elif isinstance(old, dict):
            old[block.block_id] = block
        else:
            held[key] = block

    def _remove_cached_block_hashes(self, block: Block) -> list[bytes]:
        if block.key is None:
            return []
        key, block.key = block.key, None
        held = self.cached_block_hash_to_block._cache
        old = held.pop(key)
        if isinstance(old, dict):
            del old[block.block_id]
            if old:
                held[key] = old
        return [key]

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        return bool(self._remove_cached_block_hashes(block))

    def reset_prefix_cache(self) -> bool:
        self.cached_block_hash_to_block = Map()
        for block in self.blocks:
            block.key = None
        return True


class OtherPool(Pool):
    """A pool whose method takes other arguments."""

    def _remove_cached_block_hashes(self, block: Block, why: str = "") -> list[bytes]:
        return super()._remove_cached_block_hashes(block)


class DeafPool(Pool):
    """A pool with its own eviction path, as a later vLLM might have."""

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        return bool(Pool._remove_cached_block_hashes(self, block))


def make(kind: type[Pool] = Pool) -> Any:
    return kind(num_gpu_blocks=30, enable_caching=True, hash_block_size=16)


def key(n: int) -> bytes:
    return bytes([n]) * 36


@pytest.mark.parametrize("seed", range(8))
def test_set_and_mirror_follow_the_pool(seed: int) -> None:
    rng = random.Random(seed)
    pool, mirror = make(), KeyMirror()
    feed = PoolFeed(pool, keys_max=3)
    assert feed.mode == HOOKS
    feed.keys.set_consumed(True)
    for _ in range(2000):
        block = rng.choice(pool.blocks)
        match rng.randrange(40):
            case 0:
                assert pool.reset_prefix_cache()
            case 1:
                feed.keys.request_snapshot()
            case n if n < 22 and block.key is None:
                pool._insert_block_hash(key(rng.randrange(20)), block, 16)
            case _:
                pool._maybe_evict_cached_block(block)
        if rng.randrange(3) == 0 and (step := feed.step()) and step[0]:
            mirror.apply(step[0])
    while (step := feed.step()) and step[0]:
        mirror.apply(step[0])
    held = set(pool.cached_block_hash_to_block._cache)
    assert set(feed.keys.keys()) == held == set(mirror.keys())
    assert feed.resyncs_total == 1, "the first look at the pool is the only whole one"


@pytest.mark.parametrize(("kind", "reason"), [(DeafPool, "self-test"), (OtherPool, "arguments")])
def test_a_pool_that_the_hooks_do_not_fit_is_found_at_the_start(
    kind: type[Pool], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(kind)
    feed = PoolFeed(pool)
    assert feed.mode == RESYNC and reason in feed.reason and "DEGRADED" in caplog.text
    pool._insert_block_hash(key(1), pool.blocks[0], 16)
    for _ in range(RESYNC_STEPS):
        feed.step()
    assert feed.keys.keys() == [key(1)]


def test_a_key_of_another_length_starts_over() -> None:
    feed = PoolFeed(pool := make())
    pool._insert_block_hash(key(1), pool.blocks[0], 16)
    pool._insert_block_hash(b"short", pool.blocks[1], 16)
    with pytest.raises(ValueError, match=r"5 bytes.*36.*hash-algo"):
        feed.flush()


def test_a_log_that_makes_no_sense_is_refused() -> None:
    keys = KeySet()
    wrong = ([key(1)], [key(1), "block"], [1, key(1)], [key(1), 1 << 40], [[1], 1], [key(1), "1"])
    for log in wrong:
        with pytest.raises((TypeError, ValueError)):
            keys.apply(log)
    assert len(keys) == 0


def test_new_keys_are_told_with_the_block_that_holds_them_in_the_end() -> None:
    keys = KeySet()
    keys.apply([key(1), 1])
    log = [key(1), 2, key(2), 3, key(3), 4, key(2), ~3, key(1), ~1, key(4), 3, key(2), 9]
    log += [key(8), ~1, key(5), 5, key(5), 6, key(5), ~6]
    assert keys.step_with_new(log, 8) == (None, [key(3), key(4), key(2), key(5)], [4, 3, 9, 5])
    assert log == []
    assert keys.step_with_new([key(6), 1, None, key(7), 2], 8) == (None, [key(7)], [2])
    # All were dropped, so a known key is new again.
    assert keys.step_with_new([None, key(7), 3], 8) == (None, [key(7)], [3])


def test_messages_out_of_order_or_broken_are_not_believed() -> None:
    keys, mirror = KeySet(), KeyMirror()
    keys.set_consumed(True)
    mirror.apply(keys.take_message(8) or b"")
    first = keys.step([key(1), 1], 8)
    second = keys.step([key(2), 2], 8)
    assert first and second
    with pytest.raises(ValueError, match="snapshot"):
        mirror.apply(second)
    assert not mirror.is_trusted and len(mirror) == 0
    for broken in (b"", first[:-1], first + b"x", b"\x09" + first[1:]):
        with pytest.raises(ValueError):
            KeyMirror().apply(broken)


def test_without_vllm_the_import_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import slipstream.vllm"], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "ImportError: slipstream.vllm needs vLLM, which is not installed: pip install" in (
        run.stderr
    )


def import_beside(tmp_path: Path, version: str, **environment: str) -> str:
    """Import the connector with a module `vllm` without a distribution; returns its output."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    run = subprocess.run(
        [sys.executable, "-c", "import slipstream.vllm"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
    )
    return run.stderr


@pytest.mark.parametrize(
    "version", ["0.30.0", "0.34.0", "0.34.0.dev5+gabcdef", "1.0", "dev", "0.3", "0.1.dev1+gabcdef"]
)
def test_an_untested_vllm_is_refused_by_name(tmp_path: Path, version: str) -> None:
    said = import_beside(tmp_path, version)
    assert f"was not tested with vLLM {version}: pip install 'vllm>=" in said
    assert "SLIPSTREAM_ANY_VLLM=1" in said


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.33.0+cpu", "0.33.1.dev123+gabcdef", "0.33.0rc2.dev7+gabc.d20261120"]
)
def test_the_module_is_asked_for_its_version(tmp_path: Path, version: str) -> None:
    said = import_beside(tmp_path, version)
    # It is accepted; the first import of a name that this module lacks fails.
    assert "not tested" not in said and "No module named" in said


def test_an_untested_vllm_runs_if_told_to(tmp_path: Path) -> None:
    said = import_beside(tmp_path, "0.40.0", SLIPSTREAM_ANY_VLLM="1")
    assert "vLLM 0.40.0 is untested" in said and "was not tested" not in said
