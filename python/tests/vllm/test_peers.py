"""Two engines in two processes: one loads the blocks that the other has computed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rig import BLOCK, Rig
from slipstream.nixl import find_library
from slipstream.options import OptionError
from test_store import run
from test_transfers import OURS, wait_loaded, wait_saved

PROMPT_BLOCKS = 40


class Other:
    """Another engine, in a separate process, that executes commands line by line."""

    def __init__(self, **extra: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(extra)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the other engine ended with {self.process.wait()}")

    def ask(self, **what: Any) -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """Stop all its threads, as on a machine that hangs."""
        self.process.send_signal(signal.SIGSTOP)
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            # The state follows the name, which is in brackets.
            while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                pass


@contextmanager
def other(**extra: Any) -> Iterator[Other]:
    engine = Other(**extra)
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.wait()


def engine(**extra: Any) -> Rig:
    return Rig(
        num_blocks=128,
        seed=1,
        extra={"host_bytes": 1 << 23, "model_id": "m", "stats_interval_s": 0} | extra,
        **OURS,
    )


def wait_for_hit(rig: Rig, prompt: list[int], blocks: int) -> None:
    """Wait until the peer is known to have so many of the prompt's blocks."""
    name = rig.add(prompt, max_tokens=1)
    request = rig.scheduler.requests[name]
    peers = rig.connector.scheduler.peers
    assert peers is not None
    for _ in range(20_000_000):
        if peers.prefix(request.block_hashes, 0, 10_000, bytes(4))[1] >= blocks:
            break
    else:
        raise AssertionError(f"settled: {peers.is_settled()}; {peers.counters()}")
    rig.abort(name)
    rig.step()


@pytest.mark.parametrize("kind", ["tcp", "unix", "nixl"])
def test_blocks_of_another_process_are_loaded_and_right(kind: str, tmp_path: Path) -> None:
    listen = f"unix://{tmp_path}/a.sock" if kind == "unix" else f"{kind}://127.0.0.1:0"
    if kind == "nixl":
        try:
            find_library()
        except OptionError as error:
            pytest.skip(str(error))
    with other(listen=[listen]) as first:
        second = engine(peers=[first.address])
        prompt = second.tokens(BLOCK * PROMPT_BLOCKS + 3)
        assert first.ask(run=prompt) == PROMPT_BLOCKS
        wait_for_hit(second, prompt, PROMPT_BLOCKS)
        # The rig compares the bytes of every block that is read with its tokens.
        assert run(second, prompt) == 0
        counts = second.worker.connector.worker.store.counters()
        assert counts["hit_blocks.peer"] == PROMPT_BLOCKS
        assert counts["fetched_bytes"] == PROMPT_BLOCKS * 8192
        # Blocks of the peer are in this engine's store now, and served from there.
        wait_saved(second)
        for _ in range(100_000):
            if len(second.connector.scheduler.stored[0]) == PROMPT_BLOCKS:
                break
            second.step()
        assert second.scheduler.reset_prefix_cache()
        assert run(second, prompt) == 0
        assert second.worker.connector.worker.store.counters()["hit_blocks.peer"] == PROMPT_BLOCKS
        second.close()


def test_blocks_that_a_peer_has_on_disk_only_are_loaded(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    # Host memory for the blocks of two prompts: after the third the first one's are on disk alone.
    # Peers may pin half of the memory.
    extra = {"host_bytes": 8192 * 2 * PROMPT_BLOCKS, "disk_dir": str(disk)}
    with other(listen=[f"unix://{tmp_path}/a.sock"], **extra) as first:
        second = engine(peers=[first.address])
        prompts = [second.tokens(BLOCK * PROMPT_BLOCKS + 3) for _ in range(3)]
        for done, prompt in enumerate(prompts, 1):
            assert first.ask(run=prompt) == PROMPT_BLOCKS
            while len(list(disk.glob("*/blocks/*.kv"))) < PROMPT_BLOCKS * done:
                pass
        wait_for_hit(second, prompts[0], PROMPT_BLOCKS)
        assert run(second, prompts[0]) == 0
        counts = second.worker.connector.worker.store.counters()
        assert counts["hit_blocks.peer"] == PROMPT_BLOCKS
        second.close()


def test_engines_find_each_other_in_a_folder(tmp_path: Path) -> None:
    meeting = str(tmp_path / "peers")
    second = engine(peers_dir=meeting)
    prompts = [second.tokens(BLOCK * PROMPT_BLOCKS + 3) for _ in range(2)]
    # Each joins when the others run already.
    for n, prompt in enumerate(prompts):
        with other(listen=[f"unix://{tmp_path}/{n}.sock"], peers_dir=meeting) as first:
            assert first.ask(run=prompt) == PROMPT_BLOCKS
            wait_for_hit(second, prompt, PROMPT_BLOCKS)
            # The workers' own connection may be established a little later.
            for _ in range(10_000):
                if run(second, prompt) == 0:
                    break
                assert second.scheduler.reset_prefix_cache(reset_connector=True)
                second.step()
                wait_for_hit(second, prompt, PROMPT_BLOCKS)
            assert second.scheduler.reset_prefix_cache()
            assert run(second, prompt) == 0
    assert second.connector.scheduler.peers.counters()["peers_found"] == 2
    second.close()


def test_a_lost_peer_costs_a_recompute_and_no_more(tmp_path: Path) -> None:
    with other(listen=[f"unix://{tmp_path}/a.sock"]) as first:
        second = engine(peers=[first.address], load_deadline_s=5.0)
        prompt = second.tokens(BLOCK * PROMPT_BLOCKS + 3)
        first.ask(run=prompt)
        wait_for_hit(second, prompt, PROMPT_BLOCKS)
        first.stop()
        second.add(prompt, max_tokens=3)
        second.step()
        assert second.worker.connector.worker.loading == 1, "the peer is known to have it"
        os.kill(first.process.pid, signal.SIGKILL)
        wait_loaded(second)
        second.drain()
        assert second.worker.computed_blocks == PROMPT_BLOCKS
        counts = second.worker.connector.worker._counts
        assert counts["load_failed_blocks.lost"] == PROMPT_BLOCKS
        second.close()


def test_a_peer_that_stops_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with other(listen=[f"unix://{tmp_path}/a.sock"]) as first:
        second = engine(peers=[first.address], load_deadline_s=0.3)
        prompt = second.tokens(BLOCK * PROMPT_BLOCKS + 3)
        first.ask(run=prompt)
        wait_for_hit(second, prompt, PROMPT_BLOCKS)
        first.stop()
        second.add(prompt, max_tokens=3)
        second.step()
        wait_loaded(second)
        second.drain()
        assert second.worker.computed_blocks == PROMPT_BLOCKS
        counts = second.worker.connector.worker._counts
        assert counts["load_failed_blocks.deadline"] == PROMPT_BLOCKS
        second.close()


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        ({"model_id": "a"}, {"model_id": "b"}, "`model` is `a` on .* and `b` on"),
        ({"hash_seed": "1"}, {"hash_seed": "2"}, "`hash_seed` is `1` on .* and `2` on"),
        ({"layer_slices": 2}, {}, "`groups` is `full 16 in 2 slices` on .* and `full 16` on"),
    ],
)
def test_an_engine_that_does_not_match_is_refused_with_both_values(
    here: dict[str, Any],
    there: dict[str, Any],
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if seed := here.pop("hash_seed", None):
        monkeypatch.setenv("PYTHONHASHSEED", there.pop("hash_seed"))
        with other(listen=[f"unix://{tmp_path}/a.sock"], **there) as first:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            check_refused(first, here, text, caplog)
    else:
        with other(listen=[f"unix://{tmp_path}/a.sock"], **there) as first:
            check_refused(first, here, text, caplog)


def check_refused(
    first: Other, here: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = engine(peers=[first.address], **here)
    prompt = second.tokens(BLOCK * PROMPT_BLOCKS + 3)
    first.ask(run=prompt)
    for _ in range(100_000):
        second.step()
        if "cannot" in caplog.text or "unavailable" in caplog.text:
            break
    import re

    assert re.search(text, caplog.text), caplog.text[-2000:]
    assert run(second, prompt) == PROMPT_BLOCKS
    second.close()


def test_a_lookup_waits_a_little_for_a_peer_that_is_not_known_yet(tmp_path: Path) -> None:
    second = engine(peers=[f"unix://{tmp_path}/nobody.sock"], lookup_wait_s=1e9)
    scheduler = second.connector.scheduler

    class Unsettled:
        settled = False

        def longest(self, *given: Any) -> tuple[str, int]:
            return "", given[-1]

        def is_settled(self) -> bool:
            return self.settled

        def counters(self) -> dict[str, int]:
            return {}

        def close(self) -> None: ...

    peers = Unsettled()
    scheduler.follow(peers)
    request = second.scheduler.requests[second.add(second.tokens(100), max_tokens=1)]
    assert second.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert not second.step().num_scheduled_tokens
    # All loadable blocks are cached already: there is nothing to wait for.
    assert second.connector.get_num_new_matched_tokens(request, 96) == (0, False)
    peers.settled = True
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    peers.settled = False
    request.arrival_time -= 2e9
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    # A clock that was set back causes no wait.
    request.arrival_time += 4e9
    assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    second.drain()
    assert scheduler.counts["lookup_deferred"] == 1, "once per request, however often it is asked"
    second.close()


def serve(extra: dict[str, Any]) -> None:
    """Run as the other engine."""
    rig = engine(**extra)
    print("answer", json.dumps(rig.worker.connector.worker.store.address()), flush=True)
    for line in sys.stdin:
        computed = run(rig, json.loads(line)["run"])
        wait_saved(rig)
        print("answer", json.dumps(computed), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
