"""The description of an engine for its peers; most fields must be the same on both sides."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from slipstream.vllm.blocks import Blocks
    from slipstream.vllm.content import Content
    from slipstream.vllm.groups import Layout


FORMAT_VERSION = "1"
"""Format of a block's bytes in a store: layers one after the other, each in its cache's order."""

RANDOM = "random ("
"""Prefix of a seed that vLLM draws; `PYTHONHASHSEED=random` is the seed `random`."""


def hash_seed(algorithm: str) -> str:
    """Return the seed of the engine's first block hash.

    Source: vLLM 0.33, `resolve_none_hash_seed` in `vllm/v1/core/kv_cache_utils.py`: the
    environment's seed, else a fixed one for SHA-256. Other algorithms get a random one, which is
    known to this process alone.
    """
    given = os.environ.get("PYTHONHASHSEED")
    if given is not None:
        return given
    return "vLLM's own" if algorithm.startswith("sha256") else f"{RANDOM}{uuid.uuid4()})"


def is_random(seed: str) -> bool:
    """Whether a `hash_seed` of this module is known to one process alone."""
    return seed.startswith(RANDOM)


def positions_of(model: ModelConfig) -> str:
    """Return a name for the position encoding of the keys in a block.

    `--hf-overrides` may change it. `--max-model-len` changes it for models whose encoding depends
    on the maximum length (vLLM 0.33, `phi3_long_rope_scaled_rope.py`).
    """
    config = model.hf_text_config
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    rope = {name: getattr(config, name, None) for name in names}
    text = json.dumps(rope, sort_keys=True, default=str)
    if "longrope" in text:
        text += f", at most {model.max_model_len}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def identity_of(
    vllm_config: VllmConfig, layout: Layout, blocks: Blocks, content: Content
) -> dict[str, str]:
    """Return all inputs of the bytes under a key."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "format": FORMAT_VERSION,
        "model": content.model,
        "weights": content.weights,
        "config": content.config,
        "dtype": f"{dtype}, weights {model.quantization}" if model.quantization else dtype,
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_seed": hash_seed(str(cache.prefix_caching_hash_algo)),
        "groups": str(layout),
        "layout": f"{blocks.layout}, positions {positions_of(model)}",
        # Engines that divide blocks differently differ in their groups.
        "block_bytes": str(sum(blocks.group_bytes) if layout.slices > 1 else blocks.block_bytes),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "rank": str(parallel.rank),
    }
