"""Host memory that loads come into on their way to the KV cache: bounded, and used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slipstream.vllm.blocks import Blocks

SLAB_BYTES = 32 << 20
"""Host memory made in one go, and the most that one part of a load takes: a disk reads it in some
ten milliseconds, which is how long others wait for their turn."""

SLABS_MIN = 4
"""Into so many slabs less memory is divided, so that several loads find room."""


@dataclass(slots=True, eq=False)
class Slab:
    """Memory for parts of loads, side by side; it is used again when all have ended."""

    memory: torch.Tensor
    used: int = 0
    parts: int = 0


@dataclass(slots=True)
class Place:
    """Where a part of a load comes to."""

    slab: Slab
    bytes: torch.Tensor


class Staging:
    """At most `bytes_max` of memory, but one block's at least. Its user's lock guards it."""

    def __init__(self, blocks: Blocks, bytes_max: int) -> None:
        self.slab_bytes = max(blocks.block_bytes, min(SLAB_BYTES, bytes_max // SLABS_MIN))
        self.slabs: list[Slab] = []
        self._blocks = blocks
        self._slabs_max = self._limit = max(1, bytes_max // self.slab_bytes)

    def take(self, size: int) -> Place | None:
        """Return memory for a part; `None` if there is none just now.

        Makes some where that costs next to nothing. Memory for a device is pinned, which takes
        milliseconds: it is made by `make_slab`.
        """
        slab = self._with_room(size)
        if slab is None and self.can_grow() and not self._blocks.pins:
            slab = self.make_slab()
            self.slabs.append(slab)
        if slab is None:
            return None
        begin = slab.used
        slab.used += size
        slab.parts += 1
        return Place(slab, slab.memory[begin : slab.used])

    def _with_room(self, size: int) -> Slab | None:
        return next((slab for slab in self.slabs if slab.used + size <= len(slab.memory)), None)

    def give_back(self, place: Place) -> None:
        """Take memory back that nobody writes to any more."""
        place.slab.parts -= 1
        if place.slab.parts == 0:
            place.slab.used = 0

    def can_grow(self) -> bool:
        """Whether there may be more memory."""
        return len(self.slabs) < self._limit

    def make_slab(self) -> Slab:
        """Make memory, for `slabs`; needs no lock."""
        return Slab(self._blocks.staging(self.slab_bytes))

    def grow_no_more(self) -> None:
        """Make do with the memory that is there."""
        self._limit = len(self.slabs)

    def grow_again(self) -> None:
        """Try to make memory again."""
        self._limit = self._slabs_max
