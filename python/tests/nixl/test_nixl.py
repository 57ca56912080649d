"""Stores of two processes that read each other's memory by an installed NIXL.

`scripts/test-nixl.sh` runs this twice: with the transport that UCX chooses, and with TCP only, for
which a read involves both processes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slipstream._native import Store, take_warnings
from slipstream.nixl import find_library

IDENTITY = {
    "model": "m",
    "block_size": "16",
    "block_bytes": "1",
    "tensor_parallel": "1",
    "pipeline_parallel": "1",
    "rank": "0",
}
LONG_S = 60.0


def key(n: int) -> bytes:
    return n.to_bytes(4, "little") * 9


def block(n: int, size: int) -> bytes:
    return random.Random(n).randbytes(size)


def serve() -> None:
    """Run as the other process: hold blocks until the end of the input."""
    given = json.loads(sys.argv[1])
    size, count = given["size"], given["count"]
    store = Store(
        block_bytes=size,
        host_bytes=count * size,
        identity=IDENTITY | given["identity"],
        name="server",
        listen=[given["listen"]],
        nixl=find_library() if given["listen"].startswith("nixl") else None,
    )
    for n in range(count):
        store.put([key(n)], memoryview(block(n, size)))
    print(store.address(), flush=True)
    sys.stdin.read()


class Server:
    """A store in a separate process."""

    def __init__(self, size: int, count: int, **identity: str) -> None:
        self.start({"size": size, "count": count, "identity": identity} | ANYWHERE)

    def start(self, given: dict[str, Any]) -> None:
        self.given = given
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()
        assert self.address, "it did not start"

    def restart(self) -> None:
        self.start(self.given | {"listen": self.address})

    def send(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
                # The state follows the name, which is in brackets.
                while (thread / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                    pass

    def flip(self, at: int) -> None:
        """Flip a bit of its blocks."""
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "memfd:slipstream-kv" in os.readlink(fd):
                with open(fd, "r+b", buffering=0) as memory:
                    memory.seek(at)
                    byte = memory.read(1)
                    memory.seek(at)
                    memory.write(bytes([byte[0] ^ 4]))
                return
        raise AssertionError("it has no shared memory")


ANYWHERE = {"listen": "nixl://127.0.0.1:0"}


@contextmanager
def served(size: int, count: int, **identity: str) -> Iterator[Server]:
    server = Server(size, count, **identity)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


class Client:
    """A store that loads from a server."""

    def __init__(self, server: Server, **identity: str) -> None:
        self.size, self.address = server.given["size"], server.address
        self.store = Store(
            block_bytes=self.size,
            host_bytes=self.size,
            identity=IDENTITY | identity,
            name="client",
            peers=[self.address],
            nixl=find_library() if self.address.startswith("nixl") else None,
        )
        self.jobs = 0

    def begin(self, *numbers: int, deadline_s: float = LONG_S) -> bytearray:
        self.jobs += 1
        into = bytearray(self.size * len(numbers))
        keys, sources = [key(n) for n in numbers], [self.address] * len(numbers)
        self.store.load(self.jobs, keys, sources, memoryview(into), deadline_s)
        return into

    def end(self) -> tuple[list[int], str]:
        ((job, failed, reason),) = self.store.wait(LONG_S)
        assert job == self.jobs
        return sorted(failed), reason

    def load(self, *numbers: int, deadline_s: float = LONG_S) -> tuple[bytearray, list[int], str]:
        into = self.begin(*numbers, deadline_s=deadline_s)
        return into, *self.end()

    def connect(self) -> None:
        """Load, retrying until the peer is reachable."""
        end = time.monotonic() + LONG_S
        while self.load(0)[1]:
            assert time.monotonic() < end, take_warnings()

    def check(self, into: bytearray, numbers: range, failed: list[int]) -> None:
        for at, n in enumerate(numbers):
            came = into[at * self.size : (at + 1) * self.size]
            assert at in failed or came == block(n, self.size), f"block {n}"


def wait_for_bytes(into: bytearray, server: Server) -> None:
    """Wait until the first block has arrived."""
    first = block(0, 16)
    while into[:16] != first:
        assert server.process.poll() is None


@pytest.mark.parametrize("size", [4096, 65_536, 3_000_001])
def test_blocks_of_another_process_are_right(size: int) -> None:
    count = max(4, min(200, (64 << 20) // size))
    with served(size, count) as server:
        client = Client(server)
        client.connect()
        for _ in range(5):
            into, failed, _ = client.load(*range(count))
            assert failed == []
            client.check(into, range(count), failed)
        into, failed, reason = client.load(1, 10_000, 2)
        assert (failed, reason) == ([1], "absent")
        assert into[2 * size :] == block(2, size)
        counts = client.store.counters()
        assert counts["hit_blocks.peer"] == 5 * count + 3
        client.store.close()


def test_a_damaged_block_is_not_taken() -> None:
    with served(100_000, 8) as server:
        client = Client(server)
        client.connect()
        server.flip(3 * 100_000 + 70_000)
        into, failed, reason = client.load(*range(8))
        assert (failed, reason) == ([3], "checksum")
        client.check(into, range(8), failed)
        client.store.close()


def test_a_peer_that_is_killed_while_it_is_read_costs_what_had_not_come() -> None:
    size, count = 4 << 20, 48
    with served(size, count) as server:
        client = Client(server)
        lost = 0
        for _ in range(3):
            client.connect()
            into = client.begin(*range(count))
            wait_for_bytes(into, server)
            os.kill(server.process.pid, signal.SIGKILL)
            failed, reason = client.end()
            assert not failed or reason == "lost"
            client.check(into, range(count), failed)
            lost += len(failed)
            server.process.wait()
            server.restart()
        assert lost > 0, "it was killed too late each time"
        client.connect()
        into, failed, _ = client.load(*range(count))
        assert failed == []
        client.check(into, range(count), failed)
        client.store.close()


def test_a_peer_that_stops_costs_its_deadline_and_nothing_comes_later() -> None:
    size, count = 4 << 20, 48
    with served(size, count) as server:
        client = Client(server)
        client.connect()
        into = client.begin(*range(count), deadline_s=0.5)
        wait_for_bytes(into, server)
        server.send(signal.SIGSTOP)
        failed, reason = client.end()
        client.check(into, range(count), failed)
        # By memory of the same host all may have arrived, because that needs no CPU of the peer.
        assert not failed or reason == "deadline"
        before = bytes(into)
        _, next_failed, next_reason = client.load(5, deadline_s=0.2)
        assert (next_failed, next_reason) == ([0], "deadline")
        server.send(signal.SIGCONT)
        client.connect()
        assert into == before, "bytes came after the load had ended"
        again, failed, _ = client.load(*range(count))
        assert failed == []
        client.check(again, range(count), failed)
        client.store.close()


def wait_for_warning(*parts: str) -> None:
    end = time.monotonic() + LONG_S
    said: list[str] = []
    while not any(all(part in line for part in parts) for line in said):
        assert time.monotonic() < end, said
        said += take_warnings()


def test_engines_whose_blocks_mean_something_else_are_refused() -> None:
    with served(4096, 1) as server:
        client = Client(server, block_size="32")
        wait_for_warning("`block_size` is `32` on client and `16` on server")
        assert client.load(0)[1:] == ([0], "lost")
        client.store.close()
        server.address = server.address.replace("nixl", "tcp")
        client = Client(server)
        wait_for_warning("`transport` is `tcp` on client and `nixl` on server")
        client.store.close()


if __name__ == "__main__":
    serve()
