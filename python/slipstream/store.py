"""The store interface of the worker half; any object with these methods is accepted.

This module does not import vLLM.
"""

from typing import Protocol

Loaded = tuple[int, list[int], str]
"""The end of a load: its number; the indexes of keys whose blocks did not arrive, or not as
they were stored; and the reason, as a label of the metrics. Each load ends exactly once, at its
deadline at the latest."""


class Store(Protocol):
    """Blocks of one rank by key, in host memory, on disk and at peers.

    All methods except `wait` return at once.
    """

    def put(self, keys: list[bytes], data: memoryview) -> int:
        """Store the blocks that it does not have, from `data`, one block after the other.

        `data` may be overwritten after the return. Returns the number of these blocks now held.
        """

    def load(
        self,
        job: int,
        keys: list[bytes],
        sources: list[str],
        into: memoryview,
        deadline_s: float,
    ) -> None:
        """Start to write the blocks into `into`, one after the other.

        `sources` names the holder of each key; the empty name is this store.
        Nothing is written after the load's end was reported.
        """

    def wait(self, timeout_s: float) -> list[Loaded]:
        """Wait for loads to end, without the interpreter's lock; returns none at the timeout."""

    def take_message(self) -> bytes | None:
        """Return changes in the set of keys held here, in the format of `KeyMirror.apply`."""

    def take_tier_message(self) -> tuple[str, bytes] | None:
        """Return changes in one tier, and its name, if enabled; for KV events."""

    def request_snapshot(self) -> None:
        """Publish all keys again in later messages."""

    def counters(self) -> dict[str, int]:
        """Return totals since the start, by metric name."""

    def reset(self) -> None:
        """Drop all blocks. Loads in progress fail."""

    def detach(self) -> None:
        """Drop the blocks in memory, and use neither disk nor peers from now on."""

    def address(self) -> str:
        """Where peers connect to this store, such as `tcp://IP:PORT`; empty if they cannot."""

    def close(self) -> None:
        """Stop all threads and connections; loads in progress fail.

        Blocks that wait for the disk are written first, within a time limit.
        """
