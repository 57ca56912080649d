"""Host memory for staging loads on their way to the KV cache: bounded, and reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slipstream.vllm.blocks import Blocks

SLAB_BYTES = 32 << 20
"""Size of one allocation, and the maximum of one part of a load. A disk reads it in some ten
milliseconds, which is the wait of other loads for their turn."""

SLABS_MIN = 4
"""Minimum number of slabs that smaller memory is divided into, for several concurrent loads."""


@dataclass(slots=True, eq=False)
class Slab:
    """Memory for parts of loads, side by side; it is reused when all of them have ended."""

    memory: torch.Tensor
    used: int = 0
    parts: int = 0


@dataclass(slots=True)
class Place:
    """The destination of a part of a load."""

    slab: Slab
    bytes: torch.Tensor


class Staging:
    """At most `bytes_max` of memory, but at least one block's. Its user's lock guards it."""

    def __init__(self, blocks: Blocks, bytes_max: int) -> None:
        self.slab_bytes = max(blocks.block_bytes, min(SLAB_BYTES, bytes_max // SLABS_MIN))
        self.slabs: list[Slab] = []
        self._blocks = blocks
        self._slabs_max = self._limit = max(1, bytes_max // self.slab_bytes)

    def take(self, size: int) -> Place | None:
        """Return memory for a part; `None` if there is none at present.

        Allocates if that is cheap. Memory for a device is pinned, which takes milliseconds:
        `make_slab` allocates it.
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
        """Return memory to which nothing writes any more."""
        place.slab.parts -= 1
        if place.slab.parts == 0:
            place.slab.used = 0

    def can_grow(self) -> bool:
        """Whether more memory may be allocated."""
        return len(self.slabs) < self._limit

    def make_slab(self) -> Slab:
        """Allocate memory, for `slabs`; needs no lock."""
        return Slab(self._blocks.staging(self.slab_bytes))

    def grow_no_more(self) -> None:
        """Stop allocating: use the present memory."""
        self._limit = len(self.slabs)

    def grow_again(self) -> None:
        """Allow allocations again."""
        self._limit = self._slabs_max
