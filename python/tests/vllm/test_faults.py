"""Damaged input, through the whole connector: it is recomputed, counted, and logged.

The rig compares the bytes of every block that is read with its tokens, in every step.
"""

import itertools
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults import Fault, Proxy, flip, flip_frame, replace_frame, short
from rig import BLOCK, Rig
from slipstream import KeySet
from slipstream.limited import LimitedLog
from slipstream.vllm.metadata import SlipstreamWorkerMetadata
from test_peers import wait_for_hit
from test_store import run, step_until_stored
from test_transfers import BLOCK_BYTES, OURS, wait_saved

BLOCKS = 40


def engine(**extra: Any) -> Rig:
    extra = {"host_bytes": 1 << 23, "model_id": "m", "stats_interval_s": 0} | extra
    return Rig(num_blocks=128, seed=1, extra=extra, **OURS)


def counts(rig: Rig) -> dict[str, int]:
    half = rig.worker.connector.worker
    return half.store.counters() | half._counts


@contextmanager
def behind_a_bad_network(**extra: Any) -> Iterator[tuple[Rig, Rig, Proxy]]:
    """Two engines: one that serves, and one that connects to it through a proxy."""
    first = engine(listen=["tcp://127.0.0.1:0"])
    proxy = Proxy(first.worker.connector.worker.store.address())
    second = engine(peers=[proxy.address], **extra)
    try:
        yield first, second, proxy
    finally:
        second.close()
        proxy.close()
        first.close()


@pytest.mark.parametrize(
    ("fault", "reason", "lost", "computed", "text"),
    [
        # One block is damaged; those before it are kept.
        (flip(5 * BLOCK_BYTES + 100), "checksum", 1, BLOCKS - 5, "check memory and network"),
        (flip(0), "checksum", BLOCKS, BLOCKS, "check memory and network"),
        # The peer stops, or disconnects, in the middle of the sixth block.
        (
            short(5 * BLOCK_BYTES + 9, "stall"),
            "deadline",
            BLOCKS - 5,
            BLOCKS - 5,
            "load_deadline_s",
        ),
        (short(5 * BLOCK_BYTES + 9, "cut"), "lost", BLOCKS - 5, BLOCKS - 5, "the peer ended"),
        (short(0, "cut"), "lost", BLOCKS, BLOCKS, "the peer ended"),
        # The bytes are no frame.
        (flip_frame, "lost", BLOCKS, BLOCKS, "the peer ended"),
        (replace_frame, "lost", BLOCKS, BLOCKS, "the peer ended"),
    ],
)
def test_a_transfer_that_goes_wrong_is_recomputed(
    fault: Fault,
    reason: str,
    lost: int,
    computed: int,
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    deadline_s = 0.5 if reason == "deadline" else 30.0
    with behind_a_bad_network(load_deadline_s=deadline_s) as (first, second, proxy):
        prompt = first.tokens(BLOCK * BLOCKS + 3)
        run(first, prompt)
        wait_saved(first)
        wait_for_hit(second, prompt, BLOCKS)
        proxy.fault = fault
        assert run(second, prompt) == computed
        assert proxy.fault is None, "it befell the blocks"
        told = counts(second)
        assert told[f"load_failed_blocks.{reason}"] == lost
        assert f"are recomputed ({reason}); " in caplog.text and text in caplog.text
        assert (told["peer_malformed"] > 0) == (fault in (flip_frame, replace_frame))
        if reason == "deadline":
            return
        # The peer can be used again.
        assert second.scheduler.reset_prefix_cache(reset_connector=True)
        second.step()
        wait_for_hit(second, prompt, BLOCKS)
        for _ in range(10_000):
            if run(second, prompt) == 0:
                break
            # The workers' own connection is restored a little later.
            assert second.scheduler.reset_prefix_cache(reset_connector=True)
            second.step()
            wait_for_hit(second, prompt, BLOCKS)
        else:
            raise AssertionError("no blocks come from the peer any more")


def damage(data: bytearray, at: int) -> bytes:
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    "tear",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: damage(data, -100),
        lambda data: damage(data, 70),
        lambda data: data + b"x",
    ],
    ids=["cut in half", "empty", "a bit of the block", "a bit of the key", "too long"],
)
def test_torn_disk_files_are_recomputed(
    tear: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine(disk_dir=str(tmp_path))
    prompt = first.tokens(BLOCK * BLOCKS + 3)
    run(first, prompt)
    wait_saved(first)
    while len(list(tmp_path.glob("*/blocks/*.kv"))) < BLOCKS:
        pass
    keys = [bytes(h) + bytes(4) for h in request_hashes(first, prompt)]
    first.close()
    second = engine(disk_dir=str(tmp_path))
    step_until_stored(second, BLOCKS)
    # After the start, which reads the heads of all files.
    for place in (7, 20):
        (file,) = tmp_path.glob(f"*/blocks/{keys[place].hex()}.kv")
        file.write_bytes(tear(bytearray(file.read_bytes())))
    assert run(second, prompt) == BLOCKS - 7
    told = counts(second)
    assert told["load_failed_blocks.absent"] == told["corrupt_blocks.disk"] == 2
    assert "is corrupt; it is removed, and its block will be recomputed" in caplog.text
    second.close()


def test_a_file_under_another_blocks_name_is_not_that_block(tmp_path: Path) -> None:
    first = engine(disk_dir=str(tmp_path))
    prompt = first.tokens(BLOCK * BLOCKS + 3)
    run(first, prompt)
    wait_saved(first)
    while len(list(tmp_path.glob("*/blocks/*.kv"))) < BLOCKS:
        pass
    keys = [bytes(h) + bytes(4) for h in request_hashes(first, prompt)]
    first.close()
    second = engine(disk_dir=str(tmp_path))
    step_until_stored(second, BLOCKS)
    (one,), (other,) = (tmp_path.glob(f"*/blocks/{keys[place].hex()}.kv") for place in (3, 4))
    one.write_bytes(other.read_bytes())
    assert run(second, prompt) == BLOCKS - 3
    assert counts(second)["corrupt_blocks.disk"] == 1
    second.close()


def request_hashes(rig: Rig, prompt: list[int]) -> list[Any]:
    name = rig.add(prompt, max_tokens=1)
    hashes = list(rig.scheduler.requests[name].block_hashes)
    rig.abort(name)
    rig.step()
    return hashes


@contextmanager
def files_up_to(limit: int) -> Iterator[None]:
    """Limits the size of files, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = engine(disk_dir=str(tmp_path))
    prompts = [rig.tokens(BLOCK * BLOCKS + 3) for _ in range(2)]
    with files_up_to(BLOCK_BYTES):
        assert run(rig, prompts[0]) == BLOCKS
        wait_saved(rig)
        while counts(rig)["store_failed_blocks.disk"] < BLOCKS:
            rig.step()
        assert not list(tmp_path.glob("*/blocks/*"))
        # Host memory still has them.
        step_until_stored(rig, BLOCKS)
        assert rig.scheduler.reset_prefix_cache()
        assert run(rig, prompts[0]) == 0
    assert run(rig, prompts[1]) == BLOCKS
    wait_saved(rig)
    while len(list(tmp_path.glob("*/blocks/*.kv"))) < BLOCKS:
        rig.step()
    while "blocks are written to disk again" not in caplog.text:
        rig.step()
    assert caplog.text.count("blocks are in memory only, not on disk") == 1
    assert "free some space, or give the disk tier fewer bytes" in caplog.text
    assert "File too large" in caplog.text, "what the system said"
    rig.close()


def test_a_disk_of_few_bytes_gives_up_the_oldest_blocks(tmp_path: Path) -> None:
    file_bytes = BLOCK_BYTES + 100
    rig = engine(disk_dir=str(tmp_path), disk_bytes=10 * file_bytes)
    run(rig, rig.tokens(BLOCK * BLOCKS + 3))
    wait_saved(rig)
    while counts(rig)["evicted_blocks.disk"] < BLOCKS - 10:
        rig.step()
    assert sum(f.stat().st_size for f in tmp_path.glob("*/blocks/*.kv")) <= 10 * file_bytes
    rig.close()


def test_too_little_shared_memory_is_said_at_the_start() -> None:
    with (
        files_up_to(1 << 20),
        pytest.raises(OSError, match=r"8388608 bytes of shared memory requested, and only 1048576"),
    ):
        engine(host_bytes=1 << 23)
    with pytest.raises(OSError, match=r"available \(.*give the host tier fewer bytes or raise"):
        engine(host_bytes=1 << 40)


def test_messages_about_keys_that_make_no_sense_are_counted_and_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stream(key_bytes: int, *numbers: int) -> list[bytes]:
        """One message for each key, of a later life of the store."""
        keys, messages = KeySet(), []
        keys.set_consumed(True)
        keys.request_snapshot()
        for n in numbers:
            keys.apply([bytes([n]) * key_bytes, 0])
            messages.append(keys.take_message(10) or b"")
        return messages

    stale = stream(36, 1, 2)
    rig = engine()
    prompt = rig.tokens(BLOCK * BLOCKS + 3)
    run(rig, prompt)
    wait_saved(rig)
    step_until_stored(rig, BLOCKS)
    half = rig.connector.scheduler
    # Each read of the clock is a minute later: every warning is logged.
    minutes = itertools.count(0.0, 60.0)
    half._limited = LimitedLog(logging.getLogger("slipstream.vllm"), lambda: next(minutes))

    def tell(*messages: bytes) -> None:
        half.apply(SlipstreamWorkerMetadata({0: list(messages)}), set())

    def check_mended(errors: int, text: str) -> None:
        assert half.counts["message_errors"] == errors and text in caplog.text
        # Nothing is trusted until the store has published all keys again.
        for _ in range(1_000_000):
            if half.stored[0].is_trusted and len(half.stored[0]) == BLOCKS:
                break
            rig.step()
        rig.scheduler.reset_prefix_cache()
        assert run(rig, prompt) == 0
        caplog.clear()

    # A snapshot of an earlier life is ignored, and is no error.
    tell(*stale)
    check_mended(0, "")
    _, second, third = stream(36, 1, 2, 3)
    tell(third)
    check_mended(1, "snapshot of the keys of rank 0: out-of-order key message")
    tell(second[:-1])
    check_mended(2, "request a snapshot")
    tell(second[:20] + b"?" + second[21:])
    check_mended(3, "damaged in transit")
    rig.close()
