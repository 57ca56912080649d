"""A rank's KV cache as bytes by block: gathered for a save, scattered after a load.

A block's bytes are those of all layers one after the other, each as it lies in its cache, so two
ranks can exchange them if their caches are laid out alike (`Blocks.layout` says how).
"""

from __future__ import annotations

import math
from typing import Any

import torch


class LayoutError(ValueError):
    """The KV cache does not lie in memory block by block; the text says which layer."""


class Blocks:
    """The KV caches of one rank, all layers."""

    def __init__(self, kv_caches: dict[str, torch.Tensor], num_blocks: int) -> None:
        self._views: list[torch.Tensor] = []
        shapes, seen = [], set()
        for name, cache in kv_caches.items():
            place = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
            # Layers may share one cache.
            if place in seen:
                continue
            seen.add(place)
            self._views += [
                as_bytes(part, num_blocks, name) for part in by_block(cache, num_blocks)
            ]
            shapes.append(f"{tuple(cache.shape[1:])}/{tuple(cache.stride()[1:])}")
        if not self._views:
            raise LayoutError("there is no KV cache to share")
        self.device = self._views[0].device
        self.block_bytes = sum(view.shape[1] for view in self._views)
        repeats = len(shapes) if len(set(shapes)) == 1 else 0
        self.layout = f"{repeats}x{shapes[0]}" if repeats else " ".join(shapes)
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None

    def release(self) -> None:
        """Let go of the caches: their memory is about to be taken away."""
        self._views = []

    def empty(self, count: int) -> torch.Tensor:
        """Host memory for so many blocks; shape `[count, block_bytes]`."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=self._cuda)

    def gather(self, blocks: list[int]) -> tuple[torch.Tensor, Any]:
        """Copy blocks out of the cache, as of now on the device's current stream.

        What is overwritten later does not matter, so the blocks need not be kept. On a device the
        copy stays there; `fetch` brings it over.
        """
        ids = torch.tensor(blocks, dtype=torch.int64)
        if not self._cuda:
            out, start = self.empty(len(blocks)), 0
            for view in self._views:
                end = start + view.shape[1]
                out[:, start:end] = view.index_select(0, ids)
                start = end
            return out, None
        ids = ids.pin_memory().to(self.device, non_blocking=True)
        out = torch.cat([view.index_select(0, ids) for view in self._views], dim=1)
        return out, self.now()

    def fetch(self, gathered: torch.Tensor, ready: Any) -> torch.Tensor:
        """Bring what `gather` copied into host memory; waits for the device."""
        if self._stream is None:
            return gathered
        host = self.empty(gathered.shape[0])
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.copy_(gathered, non_blocking=True)
            gathered.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def now(self) -> Any:
        """Mark the point in the device's current stream that `scatter` has to come after."""
        return torch.cuda.current_stream(self.device).record_event() if self._cuda else None

    def scatter(self, blocks: list[int], host: torch.Tensor, after: Any) -> None:
        """Copy host memory into blocks of the cache; waits for the device."""
        ids = torch.tensor(blocks, dtype=torch.int64)
        if self._stream is None:
            self._scatter(ids, host)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            self._scatter(
                ids.to(self.device, non_blocking=True), host.to(self.device, non_blocking=True)
            )
        self._stream.synchronize()

    def _scatter(self, ids: torch.Tensor, data: torch.Tensor) -> None:
        start = 0
        for view in self._views:
            end = start + view.shape[1]
            view.index_copy_(0, ids, data[:, start:end])
            start = end


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
    """View the cache as `[blocks, bytes]`, whatever the order of dimensions inside a block."""
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
