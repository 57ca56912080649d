"""`SlipstreamConnector`: both halves of a vLLM KV connector, as vLLM calls them.

The scheduler half (`slipstream.vllm.scheduler`) follows the block pool change by change, so
the cost of a step depends on its changes, not on the number of cached blocks. The worker half
(`slipstream.vllm.worker`) saves and loads blocks concurrently with the forward passes.

Source of the interface: vLLM 0.33, `vllm/distributed/kv_transfer/kv_connector/v1/base.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from slipstream._native import KeyMirror
from slipstream.limited import LimitedLog
from slipstream.options import of_engine, read_options
from slipstream.vllm.blocks import Blocks
from slipstream.vllm.content import content_if_shared, warn_if_private
from slipstream.vllm.disagg import Server
from slipstream.vllm.groups import check_in_step, read_groups
from slipstream.vllm.identity import identity_of
from slipstream.vllm.metadata import (
    SlipstreamHandshake,
    SlipstreamMetadata,
    SlipstreamWorkerMetadata,
)
from slipstream.vllm.open import open_peers, open_store
from slipstream.vllm.scheduler import SchedulerHalf
from slipstream.vllm.stats import SlipstreamPromMetrics, SlipstreamStats
from slipstream.vllm.updates import unwatch_weights, watch_weights
from slipstream.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from slipstream.pool import FilledFeed, PoolFeed

logger = logging.getLogger("slipstream.vllm")


def nothing_to_wait_for(layer_name: str) -> None:
    """Do nothing: no forward pass uses blocks that are being loaded."""


def nothing_to_save(layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
    """Do nothing: whole blocks are saved, after the forward pass."""


BY_LAYER = {"layer_slices": 1, "layer_load_blocks_max": 0}
"""Options that need calls between the layers of a pass, and the values that need none."""


class SlipstreamConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves blocks to host memory and disk, and loads them from there or from other engines.

    Its options in `kv_connector_extra_config`: `slipstream.options.Options`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes a connector where one is configured"
        parallel = vllm_config.parallel_config
        options = read_options(transfer.kv_connector_extra_config)
        if not transfer.is_kv_producer:
            options = replace(options, save=False)
        self.options = of_engine(options, parallel.data_parallel_index, parallel.world_size)
        # vLLM draws it once and passes it to all processes of an engine.
        self._engine = f"{transfer.engine_id}, {parallel.data_parallel_index}"
        self._layout = read_groups(vllm_config, kv_cache_config, self.options.layer_slices)
        self._parallel = vllm_config.parallel_config
        if self.options.layer_load_blocks_max:
            check_in_step(vllm_config, self._layout)
        # The layers of a draft model, and those of a half of the batch, run more than once in a
        # step: only its end tells that they are done.
        self._saves_by_layer = (
            self._layout.slices > 1
            and vllm_config.speculative_config is None
            and not getattr(parallel, "use_ubatching", False)
        )
        # Called for each layer of each pass: as functions they cost less than as methods.
        if not self.options.layer_load_blocks_max:
            setattr(self, "wait_for_layer_load", nothing_to_wait_for)  # noqa: B010  it is a method
        if not self._saves_by_layer:
            setattr(self, "save_kv_layer", nothing_to_save)  # noqa: B010  it is a method
        self._scheduler: SchedulerHalf | None = None
        # Whether the weights have changed in this life; the workers are notified in the next step.
        self._is_detached = False
        self._worker: WorkerHalf | None = None
        self._caches: dict[str, torch.Tensor] = {}
        self._mirror = KeyMirror()
        self.mirror_errors_total = 0
        self._limited = LimitedLog(logger)
        self._told: dict[str, int] = {}
        if role is not KVConnectorRole.SCHEDULER:
            return
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                "slipstream: a block that cannot be loaded fails its request; set "
                '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
            )
        events = vllm_config.kv_events_config
        self._scheduler = SchedulerHalf(
            self.options,
            layout=self._layout,
            ranks=self._parallel.world_size,
            events=events is not None and events.enable_kv_cache_events,
            by_priority=vllm_config.scheduler_config.policy == "priority",
            loads=transfer.is_kv_consumer,
            tensor_parallel=parallel.tensor_parallel_size,
        )
        watch_weights(self.weights_changed)

    # Scheduler half.

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half, in the process that has it."""
        if self._scheduler is None:
            raise RuntimeError("slipstream: this is the worker half")
        return self._scheduler

    @property
    def feed(self) -> FilledFeed | PoolFeed:
        """The pool's keys in the scheduler half."""
        feed = self.scheduler.feed
        if feed is None:
            raise RuntimeError("slipstream: no block pool was bound yet")
        return feed

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Start to follow the pool."""
        self.scheduler.bind(gpu_block_pool)
        # Called in every step: with this assignment vLLM calls the Rust method directly.
        setattr(self, "build_connector_meta", self.scheduler.build)  # noqa: B010  it is a method

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Apply the keys of the workers' stores, and follow the peers of this layout."""
        self.scheduler.apply_stored(
            {
                int(each.identity["rank"]): each.stored
                for each in metadata.values()
                if isinstance(each, SlipstreamHandshake) and each.stored
            }
        )
        reported = sorted(
            (each.identity for each in metadata.values() if isinstance(each, SlipstreamHandshake)),
            key=lambda identity: int(identity["rank"]),
        )
        ranks = [int(identity["rank"]) for identity in reported]
        if ranks != list(range(self._parallel.world_size)):
            if self.options.peers or self.options.peers_dir:
                logger.warning(
                    "slipstream: peer sharing disabled: only ranks %s of %d reported their KV "
                    "layout",
                    ranks,
                    self._parallel.world_size,
                )
            return
        if not self._is_detached:
            address = next(
                each.address
                for each in metadata.values()
                if isinstance(each, SlipstreamHandshake) and each.identity is reported[0]
            )
            if address:
                self.scheduler.server = Server(
                    self._engine,
                    address,
                    self._parallel.tensor_parallel_size,
                    self._layout.hash_tokens,
                )
            self.scheduler.follow(open_peers(self.options, reported, self._engine))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Call `set_xfer_handshake_metadata`, also if ranks share the layers."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the device's cache, asynchronously."""
        tokens = self.scheduler.lookup(request, num_computed_tokens)
        if not tokens:
            return tokens, False
        return tokens, not self.scheduler.loads_in_step(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the load, if there is one."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        """Return the sources of the tokens of a load."""
        sources = self.scheduler.hit_sources(request)
        if sources is None:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the changes since the last step: O(changes)."""
        return self._scheduler.build(scheduler_output)  # type: ignore[union-attr]  # its own half

    def update_connector_output(self, connector_output: Any) -> None:
        """Apply the workers' messages."""
        self.scheduler.apply(
            connector_output.kv_connector_worker_meta,
            connector_output.failed_recving,
            connector_output.finished_recving or frozenset(),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Free the blocks at once: saved data was copied when it was computed."""
        self.scheduler.finished(request)
        return False, self.scheduler.offered(request, block_ids)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Call `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether a whole forward pass may not be one CUDA graph, which skips calls by layer."""
        # Invalid options are reported where the connector is made.
        return any(extra_config.get(name, off) != off for name, off in BY_LAYER.items())

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not saved is a miss."""
        return False

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the KV events of the host's tiers."""
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """Drop all stored blocks; loads in progress are recomputed."""
        self.scheduler.reset()
        return True

    def weights_changed(self, cause: str) -> None:
        """Drop all stored blocks, and detach disk and peers: their blocks are of other weights."""
        if not self._is_detached:
            self._is_detached = True
            logger.warning(
                "slipstream: %s may have changed the weights: stored blocks are dropped, and "
                "neither disk nor peers are used until the engine is started again",
                cause,
            )
        self.scheduler.server = None
        self.scheduler.follow(None)
        self.scheduler.reset(detach=True)

    # Worker half.

    @property
    def worker(self) -> WorkerHalf:
        """The worker half, in the process that has it."""
        if self._worker is None:
            raise RuntimeError("slipstream: no KV caches were registered yet")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the store for blocks with the layout of these caches."""
        self._caches = kv_caches
        blocks = self._blocks()
        rank = self._parallel.rank
        content = content_if_shared(self._vllm_config, self.options)
        self.identity = identity_of(self._vllm_config, self._layout, blocks, content)
        if rank == 0:
            warn_if_private(content, self.options, self.identity)
        events = self._vllm_config.kv_events_config
        publish_tiers = rank == 0 and events is not None and events.enable_kv_cache_events
        store = open_store(
            self.options, self.identity, blocks.group_bytes, rank, publish_tiers, self._engine
        )
        if store is None:
            return
        self._worker = WorkerHalf(
            store,
            blocks,
            rank=rank,
            slices=self._layout.slices,
            load_deadline_s=self.options.load_deadline_s,
            saving_bytes_max=self.options.saving_bytes_max,
            loading_bytes_max=self.options.loading_bytes_max,
            stats_interval_s=self.options.stats_interval_s,
            publish_tiers=publish_tiers,
        )

    def get_handshake_metadata(self) -> SlipstreamHandshake:
        """Return this rank's identity, its address for peers, and the keys that it holds."""
        if self._worker is None:
            return SlipstreamHandshake("", self.identity)
        return SlipstreamHandshake(
            self._worker.store.address(), self.identity, self._worker.first_keys()
        )

    def unregister_kv_caches(self) -> None:
        """Release the caches before the engine sleeps."""
        if self._worker is not None:
            self._worker.release()

    def restore_kv_caches(self) -> None:
        """Use the caches again after the engine slept."""
        if self._worker is not None:
            self._worker.blocks = self._blocks()

    def _blocks(self) -> Blocks:
        return Blocks(self._caches, self._kv_cache_config.num_blocks, self._layout.stored_groups)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Apply the scheduler's keys and the urgent parts of the metadata."""
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, SlipstreamMetadata) or connector_metadata.only_saves:
            return
        if self._worker is not None and (connector_metadata.reset or connector_metadata.resend):
            self._worker.begin(connector_metadata)
        if connector_metadata.keys:
            try:
                self._mirror.apply(connector_metadata.keys)
            except ValueError as error:
                self.mirror_errors_total += 1
                self._limited.warning(
                    "mirror", "slipstream: a worker lost track of the cached keys: %s", error
                )

    @property
    def mirror(self) -> KeyMirror:
        """The scheduler's keys in the worker half."""
        return self._mirror

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        meta = self._connector_metadata
        if isinstance(meta, SlipstreamMetadata) and not meta.only_saves:
            if meta.loads:
                self.worker.load(meta.loads)
            if meta.cancels:
                self.worker.cancel(meta.cancels)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for the layer's part of the blocks that are loaded within this step."""
        if self._worker is not None and self._worker.in_step:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy the layer's slice of the step's blocks, if this was its last layer."""
        if self._worker is not None:
            meta = self._connector_metadata
            if isinstance(meta, SlipstreamMetadata):
                self._worker.layer_computed(layer_name, meta)

    def wait_for_save(self) -> None:
        """Copy the blocks that this step has filled; another thread stores them."""
        meta = self._connector_metadata
        if self._worker is None or not isinstance(meta, SlipstreamMetadata):
            return
        if not meta.saves_nothing or self._worker.in_step:
            self._worker.end_step(meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report finished loads; a poll."""
        if self._worker is None:
            return KVConnectorTransferResults()
        return self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report finished loads, for a vLLM version without failed requests."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report missing blocks of requests that got others."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> SlipstreamWorkerMetadata | None:
        """Report new keys of the store."""
        return self._worker.worker_meta() if self._worker is not None else None

    # Both.

    def get_kv_connector_stats(self) -> SlipstreamStats | None:
        """Report the counters."""
        if self._worker is not None:
            counts = self._worker.counts()
        elif self._scheduler is not None:
            counts = self._scheduler.new_counts()
        else:
            counts = None
        return SlipstreamStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SlipstreamStats | None:
        """Create the counters in the process that logs them."""
        return SlipstreamStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SlipstreamPromMetrics:
        """Create the counters for Prometheus."""
        return SlipstreamPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop all threads."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            unwatch_weights(self.weights_changed)
            self._scheduler.close()
