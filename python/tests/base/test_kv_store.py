"""The store of one rank, without vLLM."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from slipstream import KeyMirror
from slipstream._native import Store, take_warnings
from slipstream.limited import LimitedLog
from slipstream.nixl import find_library, is_wanted
from slipstream.options import OptionError, Options, of_engine, of_rank, read_options
from slipstream.published import TIERS, TierEvents

BLOCK = 4096


def key(n: int) -> bytes:
    return n.to_bytes(4, "little") * 9


def block(n: int) -> bytes:
    return random.Random(n).randbytes(BLOCK)


class Opened:
    """A store, and its published keys so far."""

    def __init__(self, **options: Any) -> None:
        self.store = Store(block_bytes=BLOCK, **{"host_bytes": 64 * BLOCK, **options})
        self.mirror = KeyMirror()
        self.jobs = 0

    def put(self, *numbers: int) -> int:
        data = memoryview(b"".join(block(n) for n in numbers))
        return self.store.put([key(n) for n in numbers], data)

    def load(self, *numbers: int, deadline_s: float = 10.0) -> tuple[bytearray, list[int], str]:
        self.jobs += 1
        into = bytearray(BLOCK * len(numbers))
        self.store.load(
            self.jobs, [key(n) for n in numbers], [""] * len(numbers), memoryview(into), deadline_s
        )
        ended = self.wait()
        assert ended[0] == self.jobs
        return into, sorted(ended[1]), ended[2]

    def load_from(self, peer: str, n: int) -> tuple[int, list[int], str]:
        """Load one block from a named peer; returns the end of the load."""
        self.jobs += 1
        self.store.load(self.jobs, [key(n)], [peer], memoryview(bytearray(BLOCK)), 10.0)
        return self.wait()

    def wait(self) -> tuple[int, list[int], str]:
        (ended,) = self.store.wait(30.0)
        return ended

    def follow_until(self, held: set[int]) -> None:
        """Apply the store's messages until they contain these keys."""
        wanted = {key(n) for n in held}
        end = time.monotonic() + 30
        while set(self.mirror.keys()) != wanted or not self.mirror.is_trusted:
            if message := self.store.take_message():
                self.mirror.apply(message)
            assert time.monotonic() < end, f"holds {len(self.mirror)} keys"


@pytest.fixture(autouse=True)
def no_warnings_of_before() -> None:
    """Resets the rate limit of warnings for each test."""
    take_warnings(ahead_s=1e6)


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.store.close()


def check(loaded: tuple[bytearray, list[int], str], *numbers: int | None) -> None:
    """Loaded blocks are right, and blocks without a number failed."""
    into, failed, reason = loaded
    assert failed == [i for i, n in enumerate(numbers) if n is None]
    assert bool(reason) == bool(failed)
    for i, n in enumerate(numbers):
        if n is not None:
            assert into[i * BLOCK : (i + 1) * BLOCK] == block(n)


def test_what_was_put_is_loaded_and_told_of(opened: Opened) -> None:
    assert opened.put(1, 2, 3) == 3
    assert opened.put(2, 4) == 2
    opened.follow_until({1, 2, 3, 4})
    check(opened.load(3, 1, 4), 3, 1, 4)
    check(opened.load(3, 9, 4), 3, None, 4)


def test_the_oldest_go_first_and_that_is_told(opened: Opened) -> None:
    opened.put(*range(60))
    check(opened.load(0, 1), 0, 1)
    opened.put(*range(60, 70))
    opened.follow_until({0, 1} | set(range(8, 70)))
    assert opened.store.counters()["evicted_blocks.host"] == 6
    check(opened.load(1, 2, 69), 1, None, 69)


def test_reset_forgets_everything(opened: Opened) -> None:
    opened.put(1, 2)
    opened.follow_until({1, 2})
    opened.store.reset()
    opened.follow_until(set())
    check(opened.load(1), None)
    opened.put(3)
    opened.follow_until({3})


def test_a_follower_that_asks_gets_everything_again(opened: Opened) -> None:
    opened.put(1, 2)
    opened.follow_until({1, 2})
    opened.mirror = KeyMirror()
    opened.store.request_snapshot()
    opened.follow_until({1, 2})


def test_keys_of_another_length_are_kept_and_not_told_of(tmp_path: Path) -> None:
    opened = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    opened.put(1)
    wait_for_files(tmp_path, 1)
    take_warnings()
    short = b"of another hash"
    assert opened.store.put([short], memoryview(block(2))) == 1
    wait_for_files(tmp_path, 2)
    opened.follow_until({1})
    while opened.store.counters()["message_errors"] < 2:
        pass
    (text,) = take_warnings()
    assert "a key has 15 bytes, but the keys of this set have 36" in text
    assert "--prefix-caching-hash-algo" in text and "its own disk_dir" in text
    opened.store.close()


def test_old_blocks_are_not_served() -> None:
    opened = Opened(ttl_s=1e-6)
    opened.put(1)
    opened.follow_until(set())
    check(opened.load(1), None)
    opened.store.close()


def test_a_load_without_time_fails_whole(opened: Opened) -> None:
    opened.put(1)
    assert opened.load(1, deadline_s=0.0)[1:] == ([0], "deadline")


def test_loads_of_a_closed_store_end(opened: Opened) -> None:
    opened.store.close()
    assert opened.load(1)[1:] == ([0], "closed")


def test_disk_serves_what_memory_has_lost(tmp_path: Path) -> None:
    opened = Opened(host_bytes=4 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 20)
    for n in range(12):
        opened.put(n)
        wait_for_files(tmp_path, n + 1)
    opened.follow_until(set(range(12)))
    assert opened.store.counters()["hit_blocks.host"] == 0, "what the disk takes is no hit"
    check(opened.load(*range(12)), *range(12))
    opened.store.close()
    again = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    again.follow_until(set(range(12)))
    check(again.load(7), 7)
    assert again.store.counters()["hit_blocks.disk"] == 1
    check(again.load(7), 7)
    assert again.store.counters()["hit_blocks.host"] == 1, "what was read from disk is in memory"
    again.store.reset()
    check(again.load(7), None)
    assert not list(tmp_path.glob("blocks/*.kv"))
    again.store.close()


def wait_for_files(folder: Path, count: int) -> None:
    end = time.monotonic() + 30
    while len(list(folder.glob("blocks/*.kv"))) < count:
        assert time.monotonic() < end


def test_each_tier_tells_what_it_holds(tmp_path: Path) -> None:
    opened = Opened(
        host_bytes=4 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 20, publish_tiers=True
    )
    events, held = TierEvents(), {name: set[bytes]() for name in TIERS}
    # Keys that were temporarily on no tier although they were never lost.
    lost: set[bytes] = set()

    def follow_until(host: set[int], disk: set[int]) -> None:
        wanted = {"host": {key(n) for n in host}, "disk": {key(n) for n in disk}}
        end = time.monotonic() + 30
        while held != wanted:
            for tier, keys, gone in events.take(iter(opened.store.take_tier_message, None)):
                (held[tier].difference_update if gone else held[tier].update)(keys)
                lost.update(set(keys) - held["host"] - held["disk"])
            assert not events.error and time.monotonic() < end, f"holds {held}"

    for n in range(6):
        opened.put(n)
        wait_for_files(tmp_path, n + 1)
    follow_until({2, 3, 4, 5}, set(range(6)))
    assert not lost
    check(opened.load(0), 0)
    follow_until({0, 3, 4, 5}, set(range(6)))
    opened.store.request_snapshot()
    opened.put(6)
    wait_for_files(tmp_path, 7)
    follow_until({0, 4, 5, 6}, set(range(7)))
    assert not lost
    opened.store.reset()
    follow_until(set(), set())
    opened.store.close()


IDENTITY = {"tensor_parallel": "1", "pipeline_parallel": "1", "rank": "0", "block_size": "16"} | {
    "block_bytes": str(BLOCK)
}

SERVER = """
import json, sys
from slipstream._native import Store
options = json.loads(sys.argv[1])
store = Store(block_bytes=4096, **options)
print(store.address(), flush=True)
for line in sys.stdin:
    n = int(line)
    store.put([n.to_bytes(4, "little") * 9], memoryview(n.to_bytes(4, "little") * 1024))
    print(n, flush=True)
"""


class Server:
    """A store in a separate process, from which peers may load."""

    def __init__(self, **options: Any) -> None:
        options = {"host_bytes": 64 * BLOCK, "identity": IDENTITY, "name": "server"} | options
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self.answer()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def put(self, *numbers: int) -> None:
        assert self.process.stdin
        for n in numbers:
            self.process.stdin.write(f"{n}\n")
            self.process.stdin.flush()
            assert self.answer() == str(n)

    def stop(self) -> None:
        """Stop all its threads, as on a machine that hangs."""
        self.process.send_signal(signal.SIGSTOP)
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            # The state follows the name, which is in brackets.
            while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                pass

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()


def load_from(opened: Opened, sources: dict[int, str], **options: Any) -> Any:
    """Start to load blocks, each from its named source; returns the buffer."""
    opened.jobs += 1
    into = bytearray(BLOCK * len(sources))
    keys = [key(n) for n in sources]
    options = {"deadline_s": 30.0} | options
    opened.store.load(opened.jobs, keys, list(sources.values()), memoryview(into), **options)
    return into


def wait_connected(opened: Opened, server: Server, n: int) -> None:
    """Load one block, retrying until the peer is reachable."""
    end = time.monotonic() + 30
    while True:
        load_from(opened, {n: server.address})
        if not opened.wait()[1]:
            return
        assert time.monotonic() < end, take_warnings()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_blocks_that_a_peer_has_on_disk_only_are_loaded(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    listen = ["tcp://127.0.0.1:0" if kind == "tcp" else f"unix://{tmp_path}/a.sock"]
    options = {"host_bytes": 4 * BLOCK, "disk_dir": str(folder), "disk_bytes": 1 << 20}
    with Server(listen=listen, **options) as server:
        for n in range(12):
            server.put(n)
            wait_for_files(folder, n + 1)
        opened = Opened(identity=IDENTITY, name="client", peers=[server.address])
        wait_connected(opened, server, 11)
        for n in range(8):
            into = load_from(opened, {n: server.address})
            assert opened.wait()[1:] == ([], "")
            assert into == n.to_bytes(4, "little") * 1024
        assert opened.store.counters()["hit_blocks.peer"] == 9
        opened.store.close()


def test_a_store_that_is_closed_keeps_what_had_come_of_its_loads(tmp_path: Path) -> None:
    with Server(listen=[f"unix://{tmp_path}/a.sock"]) as server:
        server.put(7, 8)
        opened = Opened(identity=IDENTITY, name="client", peers=[server.address])
        opened.put(1, 3)
        wait_connected(opened, server, 8)
        server.stop()
        before = opened.store.counters()["hit_blocks.host"]
        into = load_from(opened, {1: "", 7: server.address, 3: ""})
        while opened.store.counters()["hit_blocks.host"] < before + 2:
            pass
        opened.store.close()
        assert opened.wait() == (opened.jobs, [1], "closed")
        assert into[:BLOCK] == block(1) and into[2 * BLOCK :] == block(3)


def wait_loaded_from(opened: Opened, source: str, n: int) -> None:
    """Load a block from the peer of this name, retrying until it arrives."""
    end = time.monotonic() + 30
    while True:
        into = load_from(opened, {n: source})
        if not opened.wait()[1]:
            assert into == n.to_bytes(4, "little") * 1024
            return
        assert time.monotonic() < end, take_warnings()


def test_a_peer_goes_by_the_name_that_its_first_rank_has(tmp_path: Path) -> None:
    with Server(listen=[f"unix://{tmp_path}/a.sock.1"]) as server:
        server.put(5)
        opened = Opened(
            identity=IDENTITY, name="client", peers=[server.address], peer_names=["first rank"]
        )
        wait_loaded_from(opened, "first rank", 5)
        opened.store.close()


def test_engines_find_each_other_in_a_folder(tmp_path: Path) -> None:
    meeting = tmp_path / "peers"

    def joined(engine: str, **options: Any) -> Server:
        listen = ["tcp://127.0.0.1:0", f"unix://{tmp_path}/{engine}.sock"]
        return Server(
            **{"listen": listen, "peers_dir": str(meeting), "engine": engine, "name": engine}
            | options
        )

    take_warnings()
    opened = Opened(identity=IDENTITY, name="client", peers_dir=str(meeting), engine="client")
    warnings: list[str] = []

    def wait_warned(text: str) -> None:
        end = time.monotonic() + 30
        while not any(text in warning for warning in warnings):
            warnings.extend(take_warnings())
            assert time.monotonic() < end, warnings

    with joined("a") as a:
        a.put(1)
        wait_loaded_from(opened, "a", 1)
        # A later one is found, too, and a mismatched one is not asked.
        with joined("b") as b, joined("c", identity=IDENTITY | {"model": "other"}) as c:
            b.put(2)
            c.put(3)
            wait_loaded_from(opened, "b", 2)
            wait_warned("ignoring peer c: `model` is `none` here and `other` there")
            (meeting / "notes.json").write_text("hello")
            wait_warned("notes.json, which is not an engine's record: expected")
            load_from(opened, {3: "c"})
            assert opened.wait()[1:] == ([0], "lost")
    # They were killed; their files stay for a while, and no load waits for them.
    load_from(opened, {9: "a"})
    assert opened.wait()[1] == [0]
    with joined("d") as d:
        d.put(4)
        wait_loaded_from(opened, "d", 4)
    opened.store.close()
    warnings += take_warnings()
    assert sum("notes.json" in warning for warning in warnings) == 1


def test_who_leaves_takes_its_file_along_and_a_bad_address_is_refused(tmp_path: Path) -> None:
    options = {"identity": IDENTITY, "name": "a", "peers_dir": str(tmp_path), "engine": "a"}
    opened = Opened(listen=["tcp://127.0.0.1:0"], **options)
    (file,) = tmp_path.glob("kv-*.json")
    record = json.loads(file.read_text())["record"]
    assert record["engine"] == "a" and record["addresses"] == [opened.store.address()]
    opened.store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"cannot reach an engine at tcp://0\.0\.0\.0:.*leave out"):
        Opened(listen=["tcp://0.0.0.0:0"], **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"discovery folder.*name another as peers_dir"):
        Opened(listen=["tcp://127.0.0.1:0"], **options | {"peers_dir": f"{tmp_path}/file"})


def test_a_damaged_file_is_a_miss_and_says_so(tmp_path: Path) -> None:
    opened = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    opened.put(1)
    wait_for_files(tmp_path, 1)
    opened.store.close()
    (file,) = tmp_path.glob("blocks/*.kv")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    take_warnings()
    again = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    check(again.load(1), None)
    assert again.store.counters()["corrupt_blocks.disk"] == 1
    assert any("be recomputed" in text for text in take_warnings())
    again.store.close()


CHILD = """
import sys
from slipstream._native import Store
store = Store(block_bytes=4096, host_bytes=1 << 22, disk_dir=sys.argv[1], disk_bytes=1 << 24)
n = int(sys.argv[2])
print("up", flush=True)
while True:
    n += 1
    key, part = n.to_bytes(4, "little") * 9, n.to_bytes(4, "little") * 1024
    store.put([key], memoryview(part))
"""


@pytest.mark.parametrize("round_", range(4))
def test_a_killed_process_leaves_whole_blocks_only(tmp_path: Path, round_: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), "0"], stdout=subprocess.PIPE
    )
    assert child.stdout and child.stdout.readline() == b"up\n"
    wait_for_files(tmp_path, 3 + 17 * round_)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    opened = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 24)
    files = len(list(tmp_path.glob("blocks/*.kv")))
    assert files >= 3 and not list(tmp_path.glob("*.part"))
    stems = {file.name.split("-")[0] for file in tmp_path.glob("blocks/*.kv")}
    numbers = [n for n in range(1, 5000) if key(n).hex() in stems]
    if not numbers:
        numbers = list(range(1, files + 1))
    into, failed, _ = opened.load(*numbers[:200])
    for i, n in enumerate(numbers[:200]):
        if i not in failed:
            assert into[i * BLOCK : (i + 1) * BLOCK] == n.to_bytes(4, "little") * 1024
    assert len(failed) == 0
    opened.store.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"host_bytes": 100}, "block"),
        ({"disk_dir": "/proc/nowhere", "disk_bytes": 1}, "/proc/nowhere"),
    ],
)
def test_a_store_that_cannot_be_says_why(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OSError, match=text):
        Opened(**options)


def test_two_stores_do_not_share_a_folder(tmp_path: Path) -> None:
    opened = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    with pytest.raises(OSError, match="another process; give each engine its own folder"):
        Opened(disk_dir=str(tmp_path), disk_bytes=1 << 20)
    opened.store.close()


def test_buffers_of_other_sizes_are_refused(opened: Opened) -> None:
    with pytest.raises(ValueError, match="has 5000 bytes, but 1 blocks have 4096"):
        opened.store.put([key(1)], memoryview(bytes(5000)))
    with pytest.raises(ValueError, match="cannot be written to"):
        opened.store.load(1, [key(1)], [""], memoryview(bytes(BLOCK)), 1.0)
    with pytest.raises(ValueError, match="one source per key"):
        opened.store.load(1, [key(1)], [], memoryview(bytearray(BLOCK)), 1.0)
    with pytest.raises(ValueError, match="not contiguous"):
        opened.store.put([key(1)], memoryview(bytes(2 * BLOCK))[::2])


def test_blocks_of_several_groups_have_sizes_of_their_own(tmp_path: Path) -> None:
    options = {"host_bytes": 64 * BLOCK, "disk_dir": str(tmp_path), "disk_bytes": 1 << 20}
    store = Store(block_bytes=[BLOCK, 100], **options)
    keys = [bytes([n]) * 32 + group.to_bytes(4, "big") for n in (1, 2) for group in (0, 1)]
    data = random.Random(1).randbytes(2 * (BLOCK + 100))
    assert store.put(keys, memoryview(data)) == 4
    # The small ones alone, and then all in another order.
    for wanted in (keys[1::2], keys[::-1]):
        places = [keys.index(key) for key in wanted]
        starts = [at // 2 * (BLOCK + 100) + at % 2 * BLOCK for at in places]
        right = b"".join(
            data[start : start + (100 if at % 2 else BLOCK)]
            for start, at in zip(starts, places, strict=True)
        )
        into = bytearray(len(right))
        store.load(1, wanted, [""] * len(wanted), memoryview(into), 5.0)
        ended = []
        while not ended:
            ended = store.wait(1.0)
        assert ended == [(1, [], "")] and bytes(into) == right
    with pytest.raises(ValueError, match=r"a key ends with .*7\].*, which matches none of 2"):
        store.put([bytes(35) + b"\7"], memoryview(bytes(BLOCK)))
    with pytest.raises(ValueError, match="blocks have 0 bytes"):
        Store(block_bytes=[BLOCK, 0], host_bytes=BLOCK)
    store.close()


def test_options_are_checked_together() -> None:
    assert read_options({}) == Options()
    assert read_options({"ttl_s": 60}).ttl_s == 60.0
    with pytest.raises(OptionError) as caught:
        read_options(
            {"hosts": 1, "ttl_s": True, "keys_max": 0, "host_bytes": -1, "save": 1}
            | {"peers": "a", "listen": [1]}
        )
    for text in (
        "`hosts` is unknown",
        "`ttl_s` is True, but takes float",
        "`keys_max` is 0",
        "`peers` is 'a', but takes list",
        "`host_bytes` is -1",
        "`save` is 1, but takes",
    ):
        assert text in str(caught.value)
    useless = r"`disk_dir` needs .*; `peers` needs `host_bytes` above 0"
    with pytest.raises(OptionError, match=useless):
        read_options({"host_bytes": 0, "peers": ["tcp://10.0.0.1:1"], "disk_dir": "/tmp"})
    assert read_options({"host_bytes": 0}).host_bytes == 0


def test_engines_that_were_given_the_same_options_do_not_meet() -> None:
    given = Options(listen=["tcp://10.0.0.1:7300", "unix:///run/a"], disk_dir="/kv")
    assert of_engine(given, 0, 4) == given
    second = of_engine(given, 2, 4)
    assert second.listen == ["tcp://10.0.0.1:7308", "unix:///run/a.8"]
    assert second.disk_dir == "/kv/engine-2"
    assert of_engine(Options(), 1, 4).disk_dir == "", "nowhere stays nowhere"


def test_nixl_that_is_missing_or_unknown_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert of_rank(["nixl://10.0.0.1:7300"], 3) == ["nixl://10.0.0.1:7303"]
    assert is_wanted(["tcp://a:1", "nixl://a:1"]) and not is_wanted(["tcp://nixl:1"])
    monkeypatch.delenv("SLIPSTREAM_NIXL_LIBRARY", raising=False)
    found = {"nixl-cu12": "1.9.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(OptionError, match=r"is 1\.9\.0: pip install 'slipstream\[nixl\]'"):
        find_library()
    found.clear()
    with pytest.raises(OptionError, match=r"not installed: pip install 'slipstream\[nixl\]'"):
        find_library()
    monkeypatch.setenv("SLIPSTREAM_NIXL_LIBRARY", str(tmp_path / "lib.so"))
    identity = {"tensor_parallel": "1", "pipeline_parallel": "1", "rank": "0"}
    identity |= {"block_size": "16", "block_bytes": "1"}
    listen = {"identity": identity, "listen": ["nixl://127.0.0.1:0"]}
    with pytest.raises(OSError, match=r"lib\.so .*pip install 'slipstream\[nixl\]'"):
        Store(block_bytes=BLOCK, host_bytes=BLOCK, nixl=find_library(), **listen)
    with pytest.raises(OSError, match="needs NIXL, which is not set up"):
        Store(block_bytes=BLOCK, host_bytes=BLOCK, **listen)


def test_who_cannot_listen_is_told_why(tmp_path: Path) -> None:
    identity = {"tensor_parallel": "1", "pipeline_parallel": "1", "rank": "0"}
    identity |= {"block_size": "16", "block_bytes": "1"}
    listen = [f"unix://{tmp_path}/no-folder/peer"]
    with pytest.raises(OSError, match=r"listening failed \(No such file or directory"):
        Store(block_bytes=BLOCK, host_bytes=BLOCK, identity=identity, listen=listen)


def test_a_close_writes_what_waits_for_the_disk(tmp_path: Path) -> None:
    opened = Opened(host_bytes=3000 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 30)
    for n in range(0, 3000, 100):
        assert opened.put(*range(n, n + 100)) == 100
    opened.store.close()
    assert len(list(tmp_path.glob("blocks/*.kv"))) == 3000
    counts = opened.store.counters()
    assert counts["disk_dropped_blocks"] == 0
    again = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 30)
    check(again.load(0, 1500, 2999), 0, 1500, 2999)
    again.store.close()


def test_a_close_without_time_says_how_many_blocks_it_drops(tmp_path: Path) -> None:
    opened = Opened(
        host_bytes=4000 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 30, close_s=0.0
    )
    opened.put(*range(4000))
    take_warnings()
    opened.store.close()
    written = len(list(tmp_path.glob("blocks/*.kv")))
    dropped = opened.store.counters()["disk_dropped_blocks"]
    assert written + dropped == 4000, "each block is on disk, or counted"
    if dropped:
        assert any(f"{dropped} blocks were not written" in text for text in take_warnings())


def test_blocks_that_memory_gave_up_before_they_were_written_are_counted(tmp_path: Path) -> None:
    # Room for the blocks that writers hold and for those of a put; far too little for the queue.
    opened = Opened(host_bytes=8 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 30)
    for n in range(0, 400, 2):
        opened.put(n, n + 1)
    opened.store.close()
    written = len(list(tmp_path.glob("blocks/*.kv")))
    assert written + opened.store.counters()["disk_dropped_blocks"] == 400


def test_a_reset_removes_no_file_by_itself_and_the_files_go_by_and_by(tmp_path: Path) -> None:
    opened = Opened(host_bytes=1000 * BLOCK, disk_dir=str(tmp_path), disk_bytes=1 << 30)
    opened.put(*range(1000))
    wait_for_files(tmp_path, 1000)
    opened.store.reset()
    check(opened.load(1), None)
    opened.put(5000)
    opened.follow_until({5000})
    end = time.monotonic() + 60
    while list(tmp_path.glob("old-*")):
        assert time.monotonic() < end
    opened.store.close()
    again = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 30)
    again.follow_until({5000})
    again.store.close()


def test_a_detached_store_keeps_to_memory(tmp_path: Path) -> None:
    disk = {"disk_dir": str(tmp_path), "disk_bytes": 1 << 30}
    opened = Opened(identity=IDENTITY, name="a", listen=[f"unix://{tmp_path}/s"], **disk)
    opened.put(1, 2)
    wait_for_files(tmp_path, 2)
    peer = Opened(identity=IDENTITY, name="b", peers=[f"unix://{tmp_path}/s"])
    while peer.load_from(f"unix://{tmp_path}/s", 1)[2]:
        pass
    opened.store.detach()
    check(opened.load(1), None)
    opened.put(3)
    opened.follow_until({3})
    check(opened.load(3), 3)
    assert opened.store.address() == ""
    assert peer.load_from(f"unix://{tmp_path}/s", 3)[2], "the peer gets nothing of it"
    opened.store.detach()
    check(opened.load(3), None)
    opened.store.close()
    again = Opened(**disk)
    again.follow_until({1, 2})
    again.store.close()
    peer.store.close()


def test_warnings_of_one_kind_are_counted_after_the_first_few(tmp_path: Path) -> None:
    opened = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 24)
    opened.put(*range(40))
    wait_for_files(tmp_path, 40)
    opened.store.close()
    for file in tmp_path.glob("blocks/*.kv"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    take_warnings(ahead_s=1e6)
    again = Opened(disk_dir=str(tmp_path), disk_bytes=1 << 24)
    check(again.load(*range(40)), *([None] * 40))
    assert again.store.counters()["corrupt_blocks.disk"] == 40
    assert len([text for text in take_warnings() if "is corrupt" in text]) == 3
    (left,) = [text for text in take_warnings(ahead_s=61.0) if "is corrupt" in text]
    assert left.startswith("37 more warnings like this in 60 s, the last one: ")
    assert not take_warnings(ahead_s=200.0), "they are said once"
    again.store.close()


def test_logged_warnings_of_one_kind_are_counted_after_the_first_few(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    limited = LimitedLog(logging.getLogger("test"), lambda: now[0])
    for n in range(10):
        limited.warning("a", "load %d failed", n)
    limited.warning("b", "something else")
    assert [record.getMessage() for record in caplog.records] == [
        "load 0 failed",
        "load 1 failed",
        "load 2 failed",
        "something else",
    ]
    caplog.clear()
    limited.flush()
    assert not caplog.records
    now[0] = 60.0
    limited.flush()
    limited.warning("a", "load %d failed", 10)
    assert [record.getMessage() for record in caplog.records] == [
        "7 more warnings like this in 60 s, the last one: load 9 failed",
        "load 10 failed",
    ]
