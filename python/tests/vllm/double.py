"""A store of Python objects; the test controls when and how its loads end."""

import threading
from collections import deque

from slipstream import KeySet
from slipstream.store import Loaded


class DoubleStore:
    """Stores blocks in a dictionary. `held_back` loads end only when the test releases them."""

    def __init__(self, block_bytes: int | list[int]) -> None:
        self.block_bytes = [block_bytes] if isinstance(block_bytes, int) else block_bytes
        self.blocks: dict[bytes, bytes] = {}
        self.keys = KeySet()
        self.keys.set_consumed(True)
        self.tier = KeySet()
        self.tier.set_consumed(True)
        self.hold_back = False
        self.held_back: list[tuple[int, list[bytes], memoryview]] = []
        self.put_calls = 0
        self._ended: deque[Loaded] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, keys: list[bytes], data: memoryview) -> int:
        data = data.cast("B")
        places = self.places(keys, data)
        with self._changed:
            self.put_calls += 1
            for key, place in zip(keys, places, strict=True):
                self.blocks[key] = bytes(data[place])
                self.keys.apply([key, 0])
                self.tier.apply([key, 0])
            self._changed.notify_all()
        return len(keys)

    def places(self, keys: list[bytes], data: memoryview) -> list[slice]:
        """Where each block is in `data`."""
        found, end = [], 0
        for key in keys:
            # With one group, the key's group is not checked.
            group = int.from_bytes(key[-4:], "big") if len(self.block_bytes) > 1 else 0
            found.append(slice(end, end + self.block_bytes[group]))
            end = found[-1].stop
        assert len(data) == end
        return found

    def load(
        self,
        job: int,
        keys: list[bytes],
        sources: list[str],
        into: memoryview,
        deadline_s: float,
    ) -> None:
        assert len(sources) == len(keys)
        with self._changed:
            self.held_back.append((job, keys, into.cast("B")))
            self._changed.notify_all()
        if not self.hold_back:
            self.let_go()

    def let_go(self, failed: tuple[int, ...] = (), reason: str = "checksum") -> list[int]:
        """End all loads that were held back; returns their numbers."""
        jobs = []
        while self.held_back:
            job, keys, into = self.held_back.pop()
            bad = {i for i, key in enumerate(keys) if key not in self.blocks} | set(failed)
            for i, key in enumerate(keys):
                if i not in bad:
                    into[self.places(keys, into)[i]] = self.blocks[key]
            self.end(job, tuple(sorted(bad)), reason if bad else "")
            jobs.append(job)
        return jobs

    def end(self, job: int, failed: tuple[int, ...] = (), reason: str = "") -> None:
        """Report the end of a load."""
        with self._changed:
            self._ended.append((job, list(failed), reason))
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[Loaded]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.closed, timeout_s)
            ended, self._ended = list(self._ended), deque()
            return ended

    def lose(self, key: bytes) -> None:
        """Evict one block."""
        with self._changed:
            del self.blocks[key]
            self.keys.apply([key, ~0])
            self.tier.apply([key, ~0])

    def take_message(self) -> bytes | None:
        with self._changed:
            return self.keys.take_message(2048)

    def take_tier_message(self) -> tuple[str, bytes] | None:
        with self._changed:
            message = self.tier.take_message(2048)
            return ("host", message) if message else None

    def request_snapshot(self) -> None:
        with self._changed:
            self.keys.request_snapshot()
            self.tier.request_snapshot()

    def counters(self) -> dict[str, int]:
        return {}

    def address(self) -> str:
        return ""

    def reset(self) -> None:
        with self._changed:
            self.blocks.clear()
            self.keys.apply([None])
            self.tier.apply([None])

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()
