"""A rank's KV cache as bytes by block: gathered for a save, scattered after a load.

A block's bytes are those of all layers of its group one after the other, each in its cache's
memory order. Two ranks can exchange them if their caches have the same layout (`Blocks.layout`).
Groups may share memory: a block id belongs to one group at a time.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.vllm.groups import Group


COPY_BYTES = 64 << 20
"""Maximum bytes per copy between device and host: device memory that copies use in addition to the
cache's."""


class ReleasedError(RuntimeError):
    """The KV cache has no memory, because the engine sleeps."""


class LayoutError(ValueError):
    """The KV cache is not stored in memory block by block; the text names the layer."""


class GroupBlocks:
    """The KV caches of one group's layers on one rank."""

    def __init__(
        self, kv_caches: dict[str, torch.Tensor], num_blocks: int, group: Group | None
    ) -> None:
        self.group = group
        self.views: list[torch.Tensor] = []
        shapes, seen = [], set()
        for name, cache in kv_caches.items():
            place = place_of(cache)
            # Layers may share one cache.
            if place in seen:
                continue
            seen.add(place)
            self.views += [as_bytes(part, num_blocks, name) for part in by_block(cache, num_blocks)]
            shapes.append(f"{tuple(cache.shape[1:])}/{tuple(cache.stride()[1:])}")
        # If ranks share the layers, one may have none of a group. It keeps a byte, so that it
        # publishes the group's keys like the others.
        self.block_bytes = sum(view.shape[1] for view in self.views) or 1
        repeats = len(shapes) if len(set(shapes)) == 1 else 0
        self.layout = f"{repeats}x{shapes[0]}" if repeats else " ".join(shapes) or "none"

    def read(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy blocks into `out`, of shape `[ids, block_bytes]`."""
        if not self.views:
            out.zero_()
        start = 0
        for view in self.views:
            end = start + view.shape[1]
            out[:, start:end] = view.index_select(0, ids)
            start = end

    def write(self, ids: torch.Tensor, data: torch.Tensor) -> None:
        """Copy `data`, of shape `[ids, block_bytes]`, into blocks."""
        start = 0
        for view in self.views:
            end = start + view.shape[1]
            view.index_copy_(0, ids, data[:, start:end])
            start = end


class Blocks:
    """The KV caches of one rank, all layers. Without `groups` they are one group.

    Gathered and scattered data is one run of bytes: block after block, group after group.
    """

    def __init__(
        self,
        kv_caches: dict[str, torch.Tensor],
        num_blocks: int,
        groups: Sequence[Group] = (),
    ) -> None:
        if not kv_caches:
            raise LayoutError("there is no KV cache to share")
        shapes: Sequence[Group | None] = groups or (None,)
        self.groups = [
            GroupBlocks(layers, num_blocks, group)
            for layers, group in zip(layers_of(kv_caches, groups), shapes, strict=True)
        ]
        self.device = next(iter(kv_caches.values())).device
        self.group_bytes = [group.block_bytes for group in self.groups]
        self.block_bytes = max(self.group_bytes)
        self.layout = ", ".join(group.layout for group in self.groups)
        self._cuda = self.device.type == "cuda"
        self.pins = self._cuda
        """Whether host memory is pinned, which takes time."""
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        # Held while a thread writes to the caches.
        self._writing = threading.Lock()
        self.is_released = False

    def release(self) -> None:
        """Release the caches permanently: their memory is about to be freed.

        Waits for a `scatter` in progress; later ones, and `gather`, raise `ReleasedError`.
        """
        with self._writing:
            self.is_released = True
            for group in self.groups:
                group.views = []

    def _check_held(self) -> None:
        if self.is_released:
            raise ReleasedError("the KV cache's memory was let go of, as the engine sleeps")

    def size(self, counts: Sequence[int]) -> int:
        """Total bytes of `counts` blocks of each group."""
        return sum(n * size for n, size in zip(counts, self.group_bytes, strict=True))

    def empty(self, counts: Sequence[int]) -> torch.Tensor:
        """Host memory for `counts` blocks of each group."""
        return self.staging(self.size(counts))

    def staging(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes, in the form that copies to and from the device require."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pins)

    def _parts(self, blocks: Sequence[list[int]], data: torch.Tensor) -> Any:
        """For each group with blocks: the group, their ids, and their place in `data`."""
        start = 0
        for group, ids in zip(self.groups, blocks, strict=True):
            end = start + len(ids) * group.block_bytes
            if ids:
                found = torch.tensor(ids, dtype=torch.int64)
                yield group, found, data[start:end].view(len(ids), group.block_bytes)
            start = end

    def gather(self, blocks: Sequence[list[int]]) -> tuple[torch.Tensor, Any]:
        """Copy blocks of each group out of the cache, as of now on the device's current stream.

        Later writes to the blocks do not affect the copy, so they need not be kept. The copy of a
        device's blocks stays there; `fetch` moves it to the host.
        """
        self._check_held()
        counts = [len(ids) for ids in blocks]
        if not self._cuda:
            out = self.empty(counts)
            for group, ids, part in self._parts(blocks, out):
                group.read(ids, part)
            return out, None
        out = torch.empty(self.size(counts), dtype=torch.uint8, device=self.device)
        for group, ids, part in self._parts(blocks, out):
            group.read(ids.pin_memory().to(self.device, non_blocking=True), part)
        return out, self.now()

    def fetch(self, gathered: torch.Tensor, ready: Any) -> torch.Tensor:
        """Copy the result of `gather` into host memory; waits for the device."""
        if self._stream is None:
            return gathered
        host = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def now(self) -> Any:
        """Mark the point in the device's current stream after which `scatter` may run."""
        return torch.cuda.current_stream(self.device).record_event() if self._cuda else None

    def scatter(self, blocks: Sequence[list[int]], host: torch.Tensor, after: Any) -> None:
        """Copy host memory into blocks of each group; waits for the device."""
        with self._writing:
            self._check_held()
            if self._stream is None:
                for group, ids, part in self._parts(blocks, host):
                    group.write(ids, part)
                return
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(after)
                for group, ids, part in self._parts(blocks, host):
                    # In steps: a whole load may be larger than the device's free memory.
                    step = max(1, COPY_BYTES // group.block_bytes)
                    for some, data in zip(ids.split(step), part.split(step), strict=True):
                        group.write(
                            some.to(self.device, non_blocking=True),
                            data.to(self.device, non_blocking=True),
                        )
            self._stream.synchronize()


def place_of(cache: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a value that is equal for layers that share one cache."""
    return cache.data_ptr(), tuple(cache.shape), tuple(cache.stride())


def layers_of(
    kv_caches: dict[str, torch.Tensor], groups: Sequence[Group]
) -> list[dict[str, torch.Tensor]]:
    """Split the caches by groups."""
    if len(groups) < 2:
        return [kv_caches]
    found = [
        {name: kv_caches[name] for name in group.layers if name in kv_caches} for group in groups
    ]
    known = {place_of(cache) for layers in found for cache in layers.values()}
    for name, cache in kv_caches.items():
        if place_of(cache) not in known:
            raise LayoutError(
                f"layer {name} is of none of the {len(groups)} cache groups; use a vLLM version "
                "that docs/connector.md lists"
            )
    return found


def by_block(cache: torch.Tensor, num_blocks: int) -> list[torch.Tensor]:
    """Return views of the cache whose first dimension is vLLM's block id."""
    if cache.shape[0] == num_blocks:
        return [cache]
    # Attention kernels may want smaller blocks than the scheduler's.
    if cache.shape[0] % num_blocks == 0:
        return [cache.unflatten(0, (num_blocks, -1))]
    # Before vLLM 0.33 some backends kept keys and values apart: `[2, blocks, ...]`.
    if cache.dim() > 1 and cache.shape[1] == num_blocks:
        return list(cache.unbind(0))
    raise LayoutError(f"no dimension of a KV cache of shape {tuple(cache.shape)} is {num_blocks}")


def as_bytes(cache: torch.Tensor, num_blocks: int, name: str) -> torch.Tensor:
    """View the cache as `[blocks, bytes]`, for any order of dimensions inside a block."""
    sizes, strides = cache.shape[1:], cache.stride()[1:]
    count = math.prod(sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    if reach != count:
        raise LayoutError(
            f"the blocks of layer {name} have gaps (shape {tuple(cache.shape)}, strides "
            f"{tuple(cache.stride())}); choose another attention backend"
        )
    flat = cache.as_strided((num_blocks, count), (cache.stride(0), 1))
    return flat.view(torch.uint8)
