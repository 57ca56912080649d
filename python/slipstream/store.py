"""What the worker half needs of a store of blocks; any object with these methods will do.

This module does not import vLLM.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Loaded(NamedTuple):
    """How a load ended. Each load ends exactly once, at its deadline at the latest."""

    job: int
    """The number that `Store.load` was given."""
    failed: tuple[int, ...]
    """Places in `keys` whose bytes did not come, or not as they were stored."""
    reason: str
    """Why, in a word or two: a label of the metrics. Empty if all came."""


class Store(Protocol):
    """Blocks of one rank by key, in host memory, on disk and at peers.

    All methods but `wait` return at once.
    """

    def put(self, keys: Sequence[bytes], data: memoryview) -> int:
        """Take the blocks that it has not, from `data`, one block after the other.

        `data` may be written again when this returns. Returns how many blocks it has now.
        """

    def load(
        self,
        job: int,
        keys: Sequence[bytes],
        sources: Sequence[str],
        into: memoryview,
        deadline_s: float,
    ) -> None:
        """Begin to write the blocks into `into`, one after the other.

        `sources` names for each key who is said to hold it; the empty name is this store.
        Nothing is written after the load's end was reported.
        """

    def wait(self, timeout_s: float) -> Sequence[Loaded]:
        """Wait for loads to end, without the interpreter's lock; none at the timeout."""

    def take_message(self, keys_max: int) -> bytes | None:
        """Return what changed in the set of keys held here, as `KeyMirror.apply` takes it."""

    def request_snapshot(self) -> None:
        """Tell all keys anew in the messages to come."""

    def counters(self) -> dict[str, int]:
        """Return totals since the start, by metric name."""

    def reset(self) -> None:
        """Forget all blocks. Loads under way fail."""

    def address(self) -> str:
        """`host:port` where peers reach this store; empty if they cannot."""

    def close(self) -> None:
        """End all threads and connections; loads under way fail."""
