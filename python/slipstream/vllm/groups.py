"""Groups of layers: vLLM caches each group's blocks under separate keys.

A hit of *n* tokens needs of each group the blocks that its attention reads afterwards: all, those
of the window that ends there, or those of the chunk that is not full. The rules, and the search
for the longest such hit, are in Rust (`slipstream_kvindex::Groups`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class GroupError(ValueError):
    """The engine's cache is of a kind that cannot be shared; the text names the remedy."""


INSTEAD = "use vLLM's OffloadingConnector with a slipstream tier for this model (docs/connector.md)"


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are cached under the same keys."""

    kind: str
    """`full`, `window` or `chunk`."""
    block_size: int
    """Tokens per block."""
    reach: int = 0
    """Tokens of the window or of a chunk; 0 for full attention."""
    layers: tuple[str, ...] = ()
    """Layers of this rank; may be empty if ranks share the layers."""

    def __str__(self) -> str:
        if self.kind == "full":
            return f"full {self.block_size}"
        return f"{self.kind} {self.reach} of {self.block_size}"

    def first_read(self, tokens: int) -> int:
        """Return the first block that a token at position `tokens` reads.

        Same rule as `slipstream_kvindex::Group`.
        """
        match self.kind:
            case "window":
                return max(tokens - self.reach + 1, 0) // self.block_size
            case "chunk":
                return tokens // self.reach * self.reach // self.block_size
        return 0

    def shape(self) -> tuple[str, int, int]:
        """Return the parameters for look-ups."""
        return self.kind, self.block_size, self.reach


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of an engine, by id, and its hashes."""

    groups: tuple[Group, ...]
    hash_tokens: int
    """Tokens per hash of a request."""
    slices: int = 1
    """Parts into which the layers of the only group are divided."""

    def __str__(self) -> str:
        groups = ", ".join(str(group) for group in self.groups)
        return groups if self.slices == 1 else f"{groups} in {self.slices} slices"

    @property
    def stored_groups(self) -> tuple[Group, ...]:
        """The groups of the store: each slice of the layers is one, with keys of its own.

        A hit needs the blocks of all of them. The first slice has vLLM's keys.
        """
        if self.slices == 1:
            return self.groups
        (group,) = self.groups
        edges = [len(group.layers) * at // self.slices for at in range(self.slices + 1)]
        return tuple(
            replace(group, layers=group.layers[start:end]) for start, end in pairwise(edges)
        )


def read_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, slices: int = 1) -> Layout:
    """Read the engine's groups, and check that their blocks depend on tokens alone.

    Raises
    ------
    GroupError
        If they do not, or cannot be divided into slices; the text names the remedy.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise GroupError("slipstream needs prefix caching; leave out --no-enable-prefix-caching")
    if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
        raise GroupError(
            "slipstream cannot share caches whose tokens are spread over ranks (decode or prefill "
            "context parallelism); leave out --decode-context-parallel-size and "
            f"--prefill-context-parallel-size, or {INSTEAD}"
        )
    specs = kv_cache_config.kv_cache_groups
    if not specs:
        raise GroupError("this model has no KV cache, so there is nothing for slipstream to share")
    kinds = [kind_of(group.kv_cache_spec) for group in specs]
    refused = [f"group {n} ({kind})" for n, kind in enumerate(kinds) if isinstance(kind, str)]
    if refused:
        raise GroupError(
            f"slipstream cannot share caches of {'; '.join(refused)}: their blocks do not stand "
            f"for their tokens alone; {INSTEAD}"
        )
    sizes = [group.kv_cache_spec.block_size for group in specs]
    if len(sizes) == 1:
        sizes = [cache.block_size]
    # vLLM 0.33, `resolve_kv_cache_block_sizes`: the greatest common divisor unless configured.
    hash_tokens = kv_cache_config.hash_block_size or math.gcd(*sizes)
    if any(size % hash_tokens for size in sizes):
        raise GroupError(
            f"slipstream needs blocks of whole hashes, but blocks have {sizes} tokens and hashes "
            f"{hash_tokens}; leave the size of hashes to vLLM"
        )
    layout = Layout(
        tuple(
            Group(kind[0], size, kind[1], tuple(group.layer_names))
            for kind, size, group in zip(kinds, sizes, specs, strict=True)
            if not isinstance(kind, str)
        ),
        hash_tokens,
        slices,
    )
    if slices > 1 and [group.kind for group in layout.groups] != ["full"]:
        raise GroupError(
            "slipstream divides blocks by layers only if all layers are one cache group with full "
            f"attention, but this model has {', '.join(map(str, layout.groups))}; leave out "
            "`layer_slices`"
        )
    return layout


def check_in_step(vllm_config: VllmConfig, layout: Layout) -> None:
    """Check that vLLM computes a request anew whose load within its step has failed.

    vLLM 0.33 is given the missing blocks with the output of the step. It then has planned no other
    step (`Scheduler._handle_invalid_blocks`), or else keeps the token that the other step has
    generated from these blocks.

    Raises
    ------
    GroupError
        If it does not; the text names the remedy.
    """
    why = []
    if vllm_config.scheduler_config.async_scheduling:
        why.append("steps are planned before the previous one has ended (--no-async-scheduling)")
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        why.append("steps overlap (--pipeline-parallel-size 1)")
    if [group.kind for group in layout.groups] != ["full"]:
        why.append(f"the cache is not one group with full attention, but {layout}")
    if why:
        raise GroupError(
            "slipstream cannot load blocks within the step of their request: "
            f"{'; '.join(why)}; leave out `layer_load_blocks_max`"
        )


def kind_of(spec: KVCacheSpec) -> tuple[str, int] | str:
    """Return the kind of a group's layers and their attention's reach, or a text if unsupported."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        kinds = {kind_of(each) for each in spec.kv_cache_specs.values()}
        return kinds.pop() if len(kinds) == 1 else "layers of several kinds"
    name = type(spec).__name__
    if not spec.prefix_cacheable:
        return f"{name}, which vLLM itself does not keep for other requests"
    if isinstance(spec, FullAttentionSpec):
        return "full", 0
    if isinstance(spec, SlidingWindowSpec):
        # vLLM keeps the extra tokens for speculative decoding.
        return "window", spec.sliding_window + spec.extra_retained_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "chunk", spec.attention_chunk_size
    return name


def group_of(key: bytes) -> int:
    """Return the id of a key's group. Source: vLLM 0.33, `get_group_id` in `kv_cache_utils`."""
    return int.from_bytes(key[-4:], "big")


def slice_key(key: bytes, at: int) -> bytes:
    """Return the key of a slice of a block's layers, from any slice's key."""
    return key[:-4] + at.to_bytes(4, "big")


def by_group(keys: list[bytes], places: list[Any], groups: int) -> tuple[list[bytes], list[Any]]:
    """Return keys and their indexes group by group, the indexes as one list per group."""
    if groups == 1:
        return keys, [places]
    split: list[list[Any]] = [[] for _ in range(groups)]
    sorted_keys: list[list[bytes]] = [[] for _ in range(groups)]
    for key, place in zip(keys, places, strict=True):
        group = group_of(key)
        sorted_keys[group].append(key)
        split[group].append(place)
    return [key for part in sorted_keys for key in part], split
