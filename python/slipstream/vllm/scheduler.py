"""The scheduler half: what is cached, what can be loaded, and what is to be saved.

Nothing here waits, or does I/O; a step costs what changed in it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from slipstream._native import KeyMirror, take_warnings
from slipstream.pool import PoolFeed
from slipstream.told import TierEvents
from slipstream.vllm.metadata import (
    NOTHING,
    Load,
    SlipstreamMetadata,
    SlipstreamWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.options import Options

logger = logging.getLogger("slipstream.vllm")

MEDIUMS = {"host": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
"""What KV events call the tiers of a store."""

HERE = ""
"""The source that is this engine's own store."""


class Peers(Protocol):
    """What other engines hold, as far as is known now. No call waits."""

    def prefix(self, hashes: list[bytes], start: int, end: int, suffix: bytes) -> tuple[str, int]:
        """Return who holds most of `hashes[start:end]` without a break, and how many."""

    def is_settled(self) -> bool:
        """Whether the keys of all peers that are connected are known."""

    def counters(self) -> dict[str, int]:
        """Return totals since the start, by metric name."""

    def close(self) -> None:
        """End all threads and connections."""


class SchedulerHalf:
    """The decisions of one engine."""

    def __init__(
        self,
        options: Options,
        *,
        block_size: int,
        ranks: int,
        events: bool,
        by_priority: bool = False,
    ) -> None:
        self.feed: PoolFeed | None = None
        self.peers: Peers | None = None
        self.stored = [KeyMirror() for _ in range(ranks)]
        """What each rank's store holds; a block can be loaded if all of them have it."""
        self.counts: Counter[str] = Counter()
        self._counts_told: dict[str, int] = {}
        self._counts_due = 0.0
        self._options = options
        self._block_size = block_size
        self._by_priority = by_priority
        # The cache group; slipstream refuses engines with more than one.
        self._suffix = (0).to_bytes(4, "big")
        self._loads: list[Load] = []
        self._sources: dict[str, dict[CacheHitSource, int]] = {}
        self._reset = False
        # Requests of which nothing came: they compute, rather than wait for another deadline.
        self._failed: set[str] = set()
        # Ranks whose keys are not known: what they tell counts from their next snapshot on.
        self._unknown = set(range(ranks))
        self._resend = False
        self._unbound_said = False
        self._events: list[KVCacheEvent] | None = [] if events else None
        self._tiers = TierEvents()

    def bind(self, pool: Any) -> None:
        """Begin to follow the pool."""
        options = self._options
        saves = options.save and options.host_bytes > 0
        self.feed = PoolFeed(
            pool,
            hooks=options.hooks,
            keys_max=options.keys_max,
            wants_new=saves,
            by_priority=self._by_priority,
        )
        self.feed.keys.set_consumed(options.follow)

    def follow(self, peers: Peers | None) -> None:
        """Look blocks up at these peers, and no longer at others."""
        self.close()
        self.peers = peers

    # Look-ups.

    def lookup(self, request: Any, computed_tokens: int) -> int | None:
        """Return how many tokens beyond `computed_tokens` can be loaded; `None`: ask again.

        Changes nothing but a count, so it may be asked any number of times.
        """
        if request.request_id in self._failed:
            return 0
        start = computed_tokens // self._block_size
        # The last token is computed in any case, for its output.
        end = (request.num_tokens - 1) // self._block_size
        here, _, there = self._find(request.block_hashes, start, end)
        blocks = here + there
        if (
            start + blocks < end
            and self.peers is not None
            and not self.peers.is_settled()
            and time.time() < request.arrival_time + self._options.lookup_wait_s
        ):
            self.counts["lookup_deferred"] += 1
            return None
        return blocks * self._block_size if blocks >= self._options.load_blocks_min else 0

    def _find(self, hashes: list[bytes], start: int, end: int) -> tuple[int, str, int]:
        """Return how many blocks are here, who has most of the rest, and how many of it."""
        here = min(mirror.prefix(hashes, start, end, self._suffix) for mirror in self.stored)
        if self.peers is None or start + here >= end:
            return here, HERE, 0
        return here, *self.peers.prefix(hashes, start + here, end, self._suffix)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Note a load into the blocks that were allocated for it."""
        if external_tokens == 0:
            return
        count = external_tokens // self._block_size
        held = blocks.blocks[0]
        # What the device caches has a hash, and comes first.
        start = next((i for i, block in enumerate(held) if block.block_hash is None), len(held))
        here, peer, _ = self._find(request.block_hashes, start, start + count)
        hashes = request.block_hashes[start : start + count]
        self._loads.append(
            Load(
                request.request_id,
                [bytes(block_hash) + self._suffix for block_hash in hashes],
                [block.block_id for block in held[start : start + count]],
                [HERE] * here + [peer] * (count - here),
            )
        )
        split = {
            CacheHitSource.HOST: here * self._block_size,
            CacheHitSource.P2P: external_tokens - here * self._block_size,
        }
        self._sources[request.request_id] = {tier: n for tier, n in split.items() if n}

    def hit_sources(self, request: Any) -> dict[CacheHitSource, int] | None:
        """Return where the tokens of the request's load come from."""
        return self._sources.pop(request.request_id, None)

    def finished(self, request: Any) -> None:
        """Forget the request."""
        self._failed.discard(request.request_id)
        self._sources.pop(request.request_id, None)

    # Once a step.

    def build(self, plan: Any = None) -> SlipstreamMetadata:
        """Return what the workers have to know of this step: O(changes)."""
        feed, step = self.feed, None
        if feed is None:
            self._say_unbound()
        else:
            computed = None
            # By priority, a request that this step has planned already may give way to another: the
            # pool has its blocks' keys, and no forward pass fills them.
            if self._by_priority and plan.preempted_req_ids and feed.wants_new:
                computed = computed_blocks(plan, self._block_size)
            step = feed.step(computed)
        if step is None and not (self._loads or self._reset or self._resend):
            return NOTHING
        meta = SlipstreamMetadata(loads=self._loads, reset=self._reset, resend=self._resend)
        self._loads, self._reset, self._resend = [], False, False
        if step is not None:
            meta.keys, keys, blocks = step
            if keys:
                meta.save_keys, meta.save_blocks = self._not_stored(keys, blocks)
        return meta

    def _say_unbound(self) -> None:
        if not self._unbound_said:
            self._unbound_said = True
            logger.warning(
                "slipstream: DEGRADED: saves no blocks and only loads them, because vLLM has not "
                "handed over its block pool; use a vLLM version that docs/connector.md lists"
            )

    def _not_stored(self, keys: list[bytes], blocks: list[int]) -> tuple[list[bytes], list[int]]:
        """Leave out what every rank's store has."""
        missing: set[int] = set()
        for mirror in self.stored:
            places = mirror.missing(keys)
            if places is None:
                return keys, blocks
            missing.update(places)
        return [keys[i] for i in sorted(missing)], [blocks[i] for i in sorted(missing)]

    def heard(self, meta: Any, failed: set[str]) -> None:
        """Take what the workers told: of their stores, and which requests got nothing."""
        self._failed |= failed
        if not isinstance(meta, SlipstreamWorkerMetadata):
            return
        for rank, messages in meta.stored.items():
            for message in messages:
                try:
                    if rank in self._unknown and not KeyMirror.read(message)[2]:
                        continue
                    self._unknown.discard(rank)
                    self.stored[rank].apply(message)
                except ValueError as error:
                    self.counts["message_errors"] += 1
                    self._unknown.add(rank)
                    self._resend = True
                    logger.warning("slipstream: rank %d has to tell its keys anew: %s", rank, error)
        if meta.tiers and self._events is not None:
            self._note_events(meta.tiers)

    def _note_events(self, messages: list[tuple[str, bytes]]) -> None:
        assert self._events is not None
        for tier, keys, gone in self._tiers.take(messages):
            self._events.append(
                removed_event(keys, MEDIUMS[tier])
                if gone
                else stored_event(keys, self._block_size, MEDIUMS[tier])
            )
        if self._tiers.error:
            self.counts["message_errors"] += 1
            self._resend = True
            logger.warning(
                "slipstream: the tiers have to tell their keys anew: %s", self._tiers.error
            )

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the KV events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget all stored blocks, here at once and in the workers with the next step."""
        self.stored = [KeyMirror() for _ in self.stored]
        self._unknown = set(range(len(self.stored)))
        # Without being asked, a store tells what it drops, which is no snapshot.
        self._reset = self._resend = True

    def new_counts(self) -> dict[str, int] | None:
        """Tell now and then what was counted since it was last told, if anything was."""
        now = time.monotonic()
        if now < self._counts_due:
            return None
        self._counts_due = now + self._options.stats_interval_s
        for text in take_warnings():
            logger.warning("slipstream: %s", text)
        totals = dict(self.counts)
        if self.peers is not None:
            totals.update(self.peers.counters())
        if self.feed is not None:
            totals["log_errors"] = self.feed.log_errors_total
            totals["save_skipped_blocks"] = self.feed.uncomputed_total
        news = {
            name: total - self._counts_told.get(name, 0)
            for name, total in totals.items()
            if total != self._counts_told.get(name, 0)
        }
        self._counts_told = totals
        return news or None

    def close(self) -> None:
        """End what the look-ups of peers run on."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None


BEHIND_BLOCKS = 4
"""How far before a step's first token the blocks may lie that vLLM gives their keys in that step:
those of tokens that were speculative before. Others are taken as not computed, which is safe."""


def computed_blocks(plan: Any, block_size: int) -> set[int]:
    """Return the blocks that are whole when the plan's forward pass is done, of what it adds to."""
    resolve = plan.kv_connector_block_state.resolve_block_ids
    cached = plan.scheduled_cached_reqs
    begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    begins |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    computed: set[int] = set()
    for name, count in plan.num_scheduled_tokens.items():
        first = max(begins[name] // block_size - BEHIND_BLOCKS, 0)
        computed.update(resolve(name)[0][first : (begins[name] + count) // block_size])
    return computed


def external(key: bytes) -> Any:
    """Return a key's block hash as vLLM's KV events name it."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return maybe_convert_block_hash(BlockHash(key[:-4]))


def stored_event(keys: list[bytes], block_size: int, medium: str) -> BlockStored:
    """Return the event for blocks stored outside the device, whose tokens are not known here."""
    return BlockStored(
        block_hashes=[external(key) for key in keys],
        parent_block_hash=None,
        token_ids=[],
        block_size=block_size,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def removed_event(keys: list[bytes], medium: str) -> BlockRemoved:
    """Return the event for blocks that are stored no longer."""
    return BlockRemoved(block_hashes=[external(key) for key in keys], medium=medium)
