"""Detects changes of a running engine's weights, as in reinforcement learning.

vLLM does not notify connectors. The calls that can change weights pass through few methods of its
`EngineCore`, in the process of the scheduler half; these are wrapped. A remote call that is not
known to preserve the weights counts as one that changes them: frameworks add their own calls.
Source: vLLM 0.33, `vllm/v1/engine/core.py`, `vllm/v1/worker/gpu_worker.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("slipstream.vllm")

HARMLESS = frozenset(
    {
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_cache_block_size_bytes",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of workers that preserve the weights."""

DISCARDING_LEVEL = 2
"""From this level on, a sleeping engine discards its weights, and gets others when it wakes."""

Changed = Callable[[str], None]

_watchers: list[weakref.WeakMethod[Changed]] = []


def watch_weights(changed: Changed) -> None:
    """Call a method after the weights of this process's engine may have changed.

    The method gets the cause, on the engine's thread, between two steps. Its object is not kept
    alive.
    """
    _watchers.append(weakref.WeakMethod(changed))
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError as error:
        logger.warning("slipstream: DEGRADED: does not notice when weights change: %s", error)
        return
    adapters: dict[tuple[str, str], object] = {}

    def of_call(method: Any, *_: Any, **__: Any) -> str | None:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        return None if method in HARMLESS else f"the call of `{name}` on all workers"

    def of_sleep(level: int = 1, *_: Any, **__: Any) -> str | None:
        return f"sleep at level {level}" if level >= DISCARDING_LEVEL else None

    def of_adapter(request: Any, *_: Any, **__: Any) -> str | None:
        key = (request.lora_name, request.lora_path)
        stamp = stamp_of(request.lora_path)
        is_same = adapters.setdefault(key, stamp) == stamp
        adapters[key] = stamp
        if is_same and not request.load_inplace:
            return None
        return f"loading the adapter {request.lora_name} once more"

    missing = [
        name
        for name, cause in (
            ("collective_rpc", of_call),
            ("sleep", of_sleep),
            ("add_lora", of_adapter),
        )
        if not wrap(EngineCore, name, cause)
    ]
    if missing:
        logger.warning(
            "slipstream: DEGRADED: does not notice when weights change, as this vLLM has no "
            "EngineCore.%s; after an update, restart the engine or use no `disk_dir` and no peers",
            ", ".join(missing),
        )


def unwatch_weights(changed: Changed) -> None:
    """Remove a method from the watchers."""
    method = weakref.WeakMethod(changed)
    if method in _watchers:
        _watchers.remove(method)


def stamp_of(path: str) -> object:
    """Return a value that changes when the files of an adapter do."""
    files = []
    if os.path.isdir(path):
        for file in sorted(Path(path).iterdir()):
            stat = file.stat()
            files.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return files


def wrap(owner: type, name: str, cause: Callable[..., str | None]) -> bool:
    """Make a method notify the watchers; once for all of them. `False`: there is no such method."""
    method = getattr(owner, name, None)
    if method is None:
        return False
    if hasattr(method, "slipstream_watched"):
        return True

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = None
        try:
            done = cause(*args, **kwargs)
        # A call of another form is still made, and counts as a change.
        except (TypeError, AttributeError, OSError):
            done = f"a call of `{name}`"
        try:
            return method(self, *args, **kwargs)
        finally:
            # Also after a failed call, which may have changed some weights.
            if done:
                tell_watchers(done)

    watched.slipstream_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)
    return True


def tell_watchers(cause: str) -> None:
    """Notify the watchers of a change."""
    for watcher in list(_watchers):
        changed = watcher()
        if changed is None:
            _watchers.remove(watcher)
        else:
            changed(cause)
