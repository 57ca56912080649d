"""What the worker half needs of a store of blocks; any object with these methods will do.

This module does not import vLLM.
"""

from typing import Protocol

Loaded = tuple[int, list[int], str]
"""How a load ended: its number; the places in its keys of the blocks that did not come, or not as
they were stored; and why, as a label of the metrics. Each load ends exactly once, at its deadline
at the latest."""


class Store(Protocol):
    """Blocks of one rank by key, in host memory, on disk and at peers.

    All methods but `wait` return at once.
    """

    def put(self, keys: list[bytes], data: memoryview) -> int:
        """Take the blocks that it has not, from `data`, one block after the other.

        `data` may be written again when this returns. Returns how many blocks it has now.
        """

    def load(
        self,
        job: int,
        keys: list[bytes],
        sources: list[str],
        into: memoryview,
        deadline_s: float,
    ) -> None:
        """Begin to write the blocks into `into`, one after the other.

        `sources` names for each key who is said to hold it; the empty name is this store.
        Nothing is written after the load's end was reported.
        """

    def wait(self, timeout_s: float) -> list[Loaded]:
        """Wait for loads to end, without the interpreter's lock; none at the timeout."""

    def take_message(self) -> bytes | None:
        """Return what changed in the set of keys held here, as `KeyMirror.apply` takes it."""

    def take_tier_message(self) -> tuple[str, bytes] | None:
        """Return what changed in one tier, and its name, if it was asked for; for KV events."""

    def request_snapshot(self) -> None:
        """Tell all keys anew in the messages to come."""

    def counters(self) -> dict[str, int]:
        """Return totals since the start, by metric name."""

    def reset(self) -> None:
        """Forget all blocks. Loads under way fail."""

    def detach(self) -> None:
        """Forget the blocks in memory, and use neither disk nor peers from now on."""

    def address(self) -> str:
        """`host:port` where peers reach this store; empty if they cannot."""

    def close(self) -> None:
        """End all threads and connections; loads under way fail.

        Blocks that wait for the disk are written first, as far as a limit of time allows.
        """
