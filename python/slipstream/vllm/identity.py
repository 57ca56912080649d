"""What an engine tells a peer of itself; which has to be the same on both sides."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from slipstream.vllm.blocks import Blocks
    from slipstream.vllm.groups import Layout


FORMAT_VERSION = "1"
"""Of the bytes of a block in a store: layers one after the other, each as it lies in its cache."""


def hash_seed(algorithm: str) -> str:
    """Return what the engine's first block is hashed with.

    Source: vLLM 0.33, `resolve_none_hash_seed` in `vllm/v1/core/kv_cache_utils.py`: the
    environment's seed, else a fixed one for SHA-256 and a random one, which no other process can
    know, for the rest.
    """
    given = os.environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    return "vLLM's own" if algorithm.startswith("sha256") else f"random ({uuid.uuid4()})"


def identity_of(
    vllm_config: VllmConfig, layout: Layout, blocks: Blocks, model_id: str
) -> dict[str, str]:
    """Return everything that decides what the bytes under a key are."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    return {
        "format": FORMAT_VERSION,
        "model": model_id or vllm_config.model_config.model,
        "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": hash_seed(str(cache.prefix_caching_hash_algo)),
        "groups": str(layout),
        "layout": blocks.layout,
        "block_bytes": str(blocks.block_bytes),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "rank": str(parallel.rank),
    }
