"""`SlipstreamConnector`: both halves of a vLLM KV connector.

The scheduler half follows the block pool change by change (`slipstream.pool`), so that a step
costs what changed in it, however many blocks are cached. The worker half follows the scheduler's
messages. Neither moves blocks yet: look-ups answer that nothing can be loaded.

Source of the interface: vLLM 0.33, `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from slipstream._native import KeyMirror
from slipstream.pool import PoolFeed

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("slipstream.vllm")

OPTIONS = {"follow": bool, "hooks": bool, "snapshot_keys_max": int}
"""Keys of `kv_connector_extra_config`, with their types."""


@dataclass
class SlipstreamMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed here
    """What the scheduler half tells the workers in one step."""

    keys: bytes | None = None
    """What changed in the set of cached keys; `None` if nothing did or nobody follows."""


NOTHING = SlipstreamMetadata()
"""Shared by all steps that have nothing to tell; never changed."""


class SlipstreamConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Follows vLLM's block pool at a cost per step that does not know how big the cache is.

    `kv_connector_extra_config`: `follow` (default false) sends the changes to the workers;
    `hooks` (default true) may be set to false to compare all keys now and then instead;
    `snapshot_keys_max` (default 2048) bounds the keys of a snapshot sent in one step.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._feed: PoolFeed | None = None
        self._mirror = KeyMirror()
        self.mirror_errors_total = 0

    # Scheduler half.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Begin to follow the pool."""
        self._feed = PoolFeed(
            gpu_block_pool,
            hooks=self._options["hooks"],
            snapshot_keys_max=self._options["snapshot_keys_max"],
        )
        self._feed.keys.set_consumed(self._options["follow"])

    @property
    def feed(self) -> PoolFeed:
        """The pool's keys, as the scheduler half knows them."""
        if self._feed is None:
            raise RuntimeError("slipstream: no block pool was bound; this is the worker half")
        return self._feed

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer that nothing beyond the local cache can be loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded, so there is nothing to note."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what changed since the last step: O(changes)."""
        feed = self._feed
        message = feed.step() if feed is not None else None
        return NOTHING if message is None else SlipstreamMetadata(message)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go at once: nothing is being sent from them."""
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the blocks go at once: nothing is being sent from them."""
        return False, None

    # Worker half.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Follow the scheduler's keys."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, SlipstreamMetadata) and connector_metadata.keys:
            try:
                self._mirror.apply(connector_metadata.keys)
            except ValueError as error:
                self.mirror_errors_total += 1
                logger.warning("slipstream: a worker no longer knows what is cached: %s", error)

    @property
    def mirror(self) -> KeyMirror:
        """The scheduler's keys, as the worker half knows them."""
        return self._mirror

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """Check `kv_connector_extra_config` and fill in the defaults.

    Raises
    ------
    ValueError
        If an option is unknown or of the wrong kind; all such options are named.
    """
    wrong = [f"`{name}` is unknown" for name in given if name not in OPTIONS]
    wrong += [
        f"`{name}` is {given[name]!r}, but takes {kind.__name__}"
        for name, kind in OPTIONS.items()
        # `True` is an int to Python, but not to whoever wrote the configuration.
        if name in given and type(given[name]) is not kind
    ]
    if type(given.get("snapshot_keys_max")) is int and given["snapshot_keys_max"] < 1:
        wrong.append("`snapshot_keys_max` is below 1")
    if wrong:
        raise ValueError(
            f"kv_connector_extra_config: {'; '.join(wrong)}; known are {', '.join(OPTIONS)}"
        )
    return {"follow": False, "hooks": True, "snapshot_keys_max": 2048} | given
