"""Slipstream's Python side; the vLLM connector is in `slipstream.vllm`.

Nothing outside of `slipstream.vllm` imports vLLM.
"""

from slipstream._native import KeyMirror, KeySet

__all__ = ["KeyMirror", "KeySet"]
