"""`SlipstreamTier`: slipstream's store as a tier of vLLM's own offloading.

vLLM's `OffloadingConnector` copies between the device and a pool in host memory by itself, for
caches of any kind of layers; this tier is behind that pool. In `kv_connector_extra_config`:

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": N, "secondary_tiers": [
        {"type": "SlipstreamTier", "module_path": "slipstream.vllm.tier", "disk_dir": "..."}]}

Source of the interface: vLLM 0.33, `vllm/v1/kv_offload/tiering/base.py`.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from slipstream._native import MEDIUMS, KeyMirror, take_warnings
from slipstream.limited import LimitedLog
from slipstream.options import Options, of_engine, read_options
from slipstream.published import TierEvents
from slipstream.vllm.content import Content, content_if_shared, unidentified, warn_if_private
from slipstream.vllm.identity import FORMAT_VERSION, hash_seed, positions_of
from slipstream.vllm.open import open_peers, open_store
from slipstream.vllm.updates import unwatch_weights, watch_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slipstream.store import Store

logger = logging.getLogger("slipstream.vllm")

OWNER = "slipstream"
"""The owner of the tiers, in KV events."""

WAIT_S = 0.2
"""Interval at which the waiting thread checks whether it must stop."""


@dataclass(slots=True)
class Job:
    """A transfer of vLLM's that has not ended."""

    job_id: int
    keys: list[OffloadKey]
    begun: float
    unended: int
    updates: int
    """Number of weight changes before it began: after another change its result is not used."""
    failed: set[int] = field(default_factory=set)


class SlipstreamTier(SecondaryTierManager):
    """Host memory, disk and other engines behind vLLM's pool in host memory.

    Takes the options of `slipstream.options.Options` that apply to a store. vLLM's methods are
    called on the engine's thread; none waits except `drain_jobs`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        parallel = offloading_spec.config.parallel
        self._options = of_engine(
            read_options({"host_bytes": 1 << 30} | options),
            parallel.data_parallel_index,
            parallel.world_size,
        )
        self._pool = primary_kv_view.cast("B")
        content, positions = content_of_caller(self._options)
        identity = identity_of_spec(offloading_spec, self.block_size_bytes, content, positions)
        warn_if_private(content, self._options, identity)
        events = offloading_spec.kv_events_config.enable_kv_cache_events
        engine = str(uuid.uuid4())
        store = open_store(self._options, identity, self.block_size_bytes, 0, events, engine)
        if store is None:
            raise ValueError("slipstream: a tier needs `host_bytes` above 0")
        self.store: Store = store
        self._peers = open_peers(self._options, [identity], engine)
        self.held = KeyMirror()
        """The keys of the store, as of the last step."""
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._tiers = TierEvents()
        # Transfers of single chunks by the store's numbers: the job, and the key's index in it.
        self._parts: dict[int, tuple[Job, int]] = {}
        self._parts_made = 0
        self._jobs: set[int] = set()
        self._results: deque[JobResult] = deque()
        self._putting = threading.Lock()
        self._stores: queue.SimpleQueue[tuple[Job, list[int]] | None] = queue.SimpleQueue()
        self._ended = threading.Condition()
        self._updates = 0
        self._limited = LimitedLog(logger)
        self._closing = False
        self._threads = [
            threading.Thread(target=self._store_all, name="slipstream-store", daemon=True),
            threading.Thread(target=self._wait_all, name="slipstream-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        watch_weights(self.weights_changed)

    def weights_changed(self, cause: str) -> None:
        """Drop all chunks, and detach disk and peers: their blocks are of other weights."""
        if self._updates == 0:
            logger.warning(
                "slipstream: %s may have changed the weights: the tier's chunks are dropped, and "
                "neither disk nor peers are used until the engine is started again",
                cause,
            )
        with self._ended:
            self._updates += 1
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()
        with self._putting:
            self.store.detach()
        self.held = KeyMirror()
        self.store.request_snapshot()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the store or a peer is known to have the chunk."""
        return LookupResult.MISS if self._source(key) is None else LookupResult.HIT

    def _source(self, key: OffloadKey) -> str | None:
        if key in self.held:
            return ""
        if self._peers is None:
            return None
        peer, count = self._peers.prefix([key], 0, 1, b"")
        return peer if count else None

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store chunks of the pool, asynchronously."""
        job, chunks = self._begin(job_metadata)
        self._stores.put((job, chunks))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks into the pool, asynchronously."""
        job, chunks = self._begin(job_metadata)
        size = self.block_size_bytes
        for place, (key, chunk) in enumerate(zip(job.keys, chunks, strict=True)):
            with self._ended:
                self._parts_made += 1
                part = self._parts_made
                self._parts[part] = (job, place)
            self.store.load(
                part,
                [key],
                [self._source(key) or ""],
                self._pool[chunk * size : (chunk + 1) * size],
                self._options.load_deadline_s,
            )

    def _begin(self, submitted: TransferJob) -> tuple[Job, list[int]]:
        keys = list(submitted.keys)
        job = Job(submitted.job_id, keys, time.monotonic(), len(keys), self._updates)
        with self._ended:
            self._jobs.add(job.job_id)
        return job, [int(chunk) for chunk in submitted.chunk_ids]

    def _end(self, job: Job) -> None:
        if job.updates != self._updates:
            job.failed.update(range(len(job.keys)))
        good = [key for place, key in enumerate(job.keys) if place not in job.failed]
        result = JobResult(
            job.job_id,
            not job.failed,
            good if job.failed else None,
            time.monotonic() - job.begun,
            len(good) * self.block_size_bytes,
        )
        with self._ended:
            self._jobs.discard(job.job_id)
            self._results.append(result)
            self._ended.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the transfers that ended since the last call; a poll."""
        self._learn()
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def has_pending_work(self) -> bool:
        """Whether transfers are in progress."""
        return bool(self._jobs or self._results)

    def _learn(self) -> None:
        """Apply the store's messages about its keys."""
        while (message := self.store.take_message()) is not None:
            try:
                self.held.apply(message)
            except ValueError as error:
                logger.warning("slipstream: requesting a snapshot of the store's keys: %s", error)
                self.store.request_snapshot()
        if self._events is not None:
            self._note_events()

    def _note_events(self) -> None:
        messages = iter(self.store.take_tier_message, None)
        for tier, keys, gone in self._tiers.take(messages):
            if self._events is not None:
                self._events.append(
                    OffloadingEvent(
                        [OffloadKey(key) for key in keys],
                        getattr(Medium, MEDIUMS[tier]),
                        removed=gone,
                        # The pool before this tier is host memory as well.
                        ownership=OWNER,
                        removal_expected=True,
                    )
                )
        if self._tiers.error:
            error = self._tiers.error
            logger.warning("slipstream: requesting a snapshot of the tiers' keys: %s", error)
            self.store.request_snapshot()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the stored and removed chunks."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return an empty context."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until nothing accesses vLLM's pool; loads end at their deadline."""
        with self._ended:
            self._ended.wait_for(lambda: not self._jobs)

    def shutdown(self) -> None:
        """Stop all threads."""
        if self._closing:
            return
        self._closing = True
        unwatch_weights(self.weights_changed)
        self._stores.put(None)
        self._threads[0].join()
        self.store.close()
        self._threads[1].join()
        if self._peers is not None:
            self._peers.close()

    # Threads.

    def _store_all(self) -> None:
        size = self.block_size_bytes
        while (item := self._stores.get()) is not None:
            job, chunks = item
            for place, (key, chunk) in enumerate(zip(job.keys, chunks, strict=True)):
                try:
                    with self._putting:
                        if job.updates == self._updates:
                            self.store.put([key], self._pool[chunk * size : (chunk + 1) * size])
                except (OSError, ValueError) as error:
                    self._limited.warning(
                        "store", "slipstream: a chunk could not be stored: %s", error
                    )
                    job.failed.add(place)
            self._end(job)

    def _wait_all(self) -> None:
        while True:
            for part, failed, reason in self.store.wait(WAIT_S):
                with self._ended:
                    job, place = self._parts.pop(part, (None, 0))
                if job is None:
                    continue
                if failed:
                    job.failed.add(place)
                    self._limited.warning(
                        reason, "slipstream: a chunk was not loaded (%s); recomputed", reason
                    )
                job.unended -= 1
                if job.unended == 0:
                    self._end(job)
            for text in take_warnings():
                logger.warning("slipstream: %s", text)
            self._limited.flush()
            if self._closing and not self._parts:
                return


def content_of_caller(options: Options) -> tuple[Content, str]:
    """Identify the model of the engine that creates a tier, and its position encoding.

    vLLM passes a tier only the model's name, which may be a path, and no revision. The engine's
    configuration is an argument of the connector that is being created.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        config: Any = frame.f_locals.get("vllm_config")
        if type(config).__name__ == "VllmConfig":
            return content_if_shared(config, options), positions_of(config.model_config)
    return unidentified("vLLM has not given its configuration", options), ""


def identity_of_spec(
    spec: Any, chunk_bytes: int, content: Content, positions: str
) -> dict[str, str]:
    """Return all inputs of the bytes under a key."""
    config = spec.config
    groups = [f"{group.tokens_per_block}x{len(group.layer_names)}" for group in config.groups]
    return {
        "format": f"tier {FORMAT_VERSION}",
        "model": content.model,
        "weights": content.weights,
        "config": content.config,
        "dtype": str(config.model.dtype),
        "kv_cache_dtype": str(config.model.dtype),
        "block_size": str(config.cache.tokens_per_hash),
        "block_bytes": str(chunk_bytes),
        # vLLM does not pass the hash function to a tier; keys of another one are never requested.
        "hash_algorithm": "vLLM's",
        "hash_seed": hash_seed("sha256"),
        "layout": f"chunks of {spec.blocks_per_chunk} blocks, {' '.join(groups)}, "
        f"positions {positions}",
        "tensor_parallel": str(config.parallel.tp_size),
        "pipeline_parallel": str(config.parallel.pp_size),
        "rank": "0",
    }
