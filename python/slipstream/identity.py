"""What two engines must have in common before one takes a block of the other.

A block's key says which tokens it is of, under the hash function and seed of the engine that made
it; it says nothing of the model, nor of how the bytes lie. This module does not import vLLM.
"""

from collections.abc import Mapping

FORMAT_VERSION = "1"
"""Of the bytes of a block in a store: layers one after the other, each as it lies in its cache."""


class IdentityError(ValueError):
    """Two engines cannot share blocks; the text names what differs, with both values."""


REMEDIES = {
    "format": "run one release of slipstream on both",
    "model": "serve the same model on both",
    "dtype": "give both the same --dtype and --kv-cache-dtype",
    "kv_cache_dtype": "give both the same --kv-cache-dtype",
    "block_size": "give both the same --block-size",
    "hash_algorithm": "give both the same --prefix-caching-hash-algo",
    "hash_seed": "start both with the same PYTHONHASHSEED",
    "layout": "give both the same attention backend and VLLM_KV_CACHE_LAYOUT",
    "tensor_parallel": "give both the same --tensor-parallel-size",
    "pipeline_parallel": "give both the same --pipeline-parallel-size",
}


def check_identity(ours: Mapping[str, str], theirs: Mapping[str, str], peer: str) -> None:
    """Check that blocks of `peer` can be used here.

    Raises
    ------
    IdentityError
        If anything differs or is missing on one side; all differences are named.
    """
    wrong = [
        f"{name} is {ours.get(name, 'not given')!r} here and {theirs.get(name, 'not given')!r} "
        f"there ({REMEDIES.get(name, 'start both alike')})"
        for name in sorted(set(ours) | set(theirs))
        if ours.get(name) != theirs.get(name)
    ]
    if wrong:
        raise IdentityError(f"peer {peer} cannot share blocks: {'; '.join(wrong)}")
