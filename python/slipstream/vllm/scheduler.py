"""The scheduler half: cached, loadable and unsaved blocks.

Nothing here waits, or does I/O; the cost of a step depends on its changes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from slipstream._native import MEDIUMS, Groups, KeyMirror, take_warnings
from slipstream.limited import LimitedLog
from slipstream.pool import FilledFeed, HookError, PoolFeed, Run, install_run_hook
from slipstream.published import TierEvents
from slipstream.vllm.chains import RUNS_MAX, Chains, removed_event
from slipstream.vllm.disagg import RemotePrompts, params_of
from slipstream.vllm.groups import by_group, group_of, slice_key
from slipstream.vllm.metadata import (
    NOTHING,
    Load,
    SlipstreamMetadata,
    SlipstreamWorkerMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from slipstream.options import Options
    from slipstream.vllm.disagg import Server
    from slipstream.vllm.groups import Layout

logger = logging.getLogger("slipstream.vllm")

HERE = ""
"""The source that is this engine's own store."""


@dataclass(slots=True, eq=False)
class Loading:
    """A load that has not ended on every rank."""

    request: Any
    start: int
    """Tokens that were already cached."""
    end: int
    """Tokens of the hit."""
    kept: int | None = None
    """Of a load that failed on some rank: the tokens known to have arrived on all ranks."""


class Peers(Protocol):
    """The known blocks of other engines. No call waits."""

    def longest(
        self,
        groups: Groups,
        stored: list[KeyMirror],
        hashes: list[bytes],
        start: int,
        end: int,
        found: int,
    ) -> tuple[str, int]:
        """Return the peer that adds most to `stored`, and tokens of the hit up to `end` with it.

        An empty name and `found`, which is the hit without peers, if no peer adds to it.
        """

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
        layout: Layout,
        ranks: int,
        events: bool,
        by_priority: bool = False,
        loads: bool = True,
        tensor_parallel: int = 1,
    ) -> None:
        self.feed: FilledFeed | PoolFeed | None = None
        self.build: Callable[[Any], SlipstreamMetadata] = self._build
        """Returns the metadata of a step for the workers: O(changes)."""
        self.peers: Peers | None = None
        self.stored = [KeyMirror() for _ in range(ranks)]
        """The keys of each rank's store; a block can be loaded if all of them have it. The list is
        shared with Rust, and is never replaced."""
        self.counts: Counter[str] = Counter()
        self._counts_reported: dict[str, int] = {}
        self._counts_due = 0.0
        self._limited = LimitedLog(logger)
        self._options = options
        self._layout = layout
        self._by_priority = by_priority
        self._does_load = loads
        self.server: Server | None = None
        """This engine as a prefill engine; `None` if no other engine can load its blocks."""
        self._remote = RemotePrompts(
            hash_tokens=layout.hash_tokens,
            tensor_parallel=tensor_parallel,
            wait_s=options.remote_wait_s,
            counts=self.counts,
        )
        self._groups = Groups([group.shape() for group in layout.stored_groups], layout.hash_tokens)
        # If blocks are longer than hashes, vLLM caches some partial blocks.
        self._has_tails = any(group.block_size > layout.hash_tokens for group in layout.groups)
        self._pool: Any = None
        # vLLM's null block, which replaces blocks that are no longer needed.
        self._null_block = 0
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        self._sources: dict[str, dict[CacheHitSource, int]] = {}
        self._reset = self._detach = False
        self._loading: dict[str, Loading] = {}
        # Maximum tokens to load for a request whose load has failed. First the tokens that arrived,
        # if vLLM did not keep them. Then 0, so that it computes instead of waiting again.
        self._limits: dict[str, int] = {}
        # Requests whose load has failed and that are to be deferred once, and those deferred in
        # this step.
        self._aside: set[str] = set()
        self._stepped_aside: set[str] = set()
        # Requests that wait for peers whose keys are unknown: the number of cached tokens at the
        # look-up, and the end of the wait, by `time.monotonic`.
        self._deferred: dict[str, tuple[int, float]] = {}
        # Number of cached tokens when a hit was found, by request.
        self._hit_starts: dict[str, int] = {}
        # Ranks whose keys are unknown: their messages count from the next snapshot on.
        self._unknown = set(range(ranks))
        self._resend = False
        self._unbound_logged = False
        self._events: list[KVCacheEvent] | None = [] if events else None
        self._tiers = TierEvents()
        self._runs: deque[Run] = deque(maxlen=RUNS_MAX)
        self._chains = Chains(self._runs, layout.hash_tokens)

    def bind(self, pool: Any) -> None:
        """Start to follow the pool."""
        self._pool = pool
        null_block = getattr(pool, "null_block", None)
        self._null_block = getattr(null_block, "block_id", self._null_block)
        options = self._options
        saves = options.save and options.host_bytes > 0
        self.feed, self.build = None, self._build
        if options.hooks and not options.follow:
            try:
                self.feed = FilledFeed(
                    pool,
                    stored=self.stored,
                    tokens=[group.block_size for group in self._layout.groups]
                    if self._has_tails
                    else [],
                    slow=self._build,
                    by_priority=self._by_priority and saves,
                    saves=saves,
                )
                self.build = self.feed.build
                self._call_build()
            except HookError as error:
                logger.info("slipstream: keeps an index of all cached keys: %s", error)
        if self.feed is None:
            self.feed = PoolFeed(
                pool,
                hooks=options.hooks,
                keys_max=options.keys_max,
                wants_new=saves,
                by_priority=self._by_priority,
            )
            self.feed.keys.set_consumed(options.follow)
        if self._events is not None and saves:
            try:
                install_run_hook(pool, self._runs)
            except HookError as error:
                logger.warning(
                    "slipstream: KV events of blocks outside of the device are without tokens: %s",
                    error,
                )

    def _call_build(self) -> None:
        """Let this half build the next step: it has other work than saving blocks."""
        if isinstance(self.feed, FilledFeed):
            self.feed.call_slow(True)

    def follow(self, peers: Peers | None) -> None:
        """Look blocks up at these peers, and no longer at earlier ones."""
        self.close()
        self.peers = peers

    # Look-ups.

    def lookup(self, request: Any, computed_tokens: int) -> int | None:
        """Return the tokens beyond `computed_tokens` that can be loaded; `None`: ask again.

        Changes nothing that another look-up in the same step would see, so it may be called any
        number of times.

        A request whose load has failed is deferred by a step. vLLM 0.33 has given its blocks away,
        but keeps it before the requests that hold some (`Scheduler.kv_holding_waiting`). If there
        were no room for it now, those would never receive the end of their own loads.
        """
        if not self._does_load:
            return 0
        if request.request_id in self._aside:
            self._stepped_aside.add(request.request_id)
            self._call_build()
            return None
        peers = self.peers
        deferred = self._deferred.get(request.request_id)
        if (
            deferred is not None
            and peers is not None
            and deferred[0] == computed_tokens
            and time.monotonic() < deferred[1]
            and not peers.is_settled()
        ):
            return None
        groups = self._groups
        # The last token is always computed, for its output.
        end = min(request.num_tokens - 1, self._limits.get(request.request_id, request.num_tokens))
        _, _, found = self._find(request.block_hashes, computed_tokens, end)
        if found + groups.hit_tokens <= end and peers is not None and not peers.is_settled():
            waited_s = time.time() - request.arrival_time
            # On another host's clock, or after a clock was set back, it may be in the future.
            if 0 <= waited_s < self._options.lookup_wait_s:
                until = time.monotonic() + self._options.lookup_wait_s - waited_s
                self.counts["lookup_deferred"] += deferred is None
                self._deferred[request.request_id] = computed_tokens, until
                return None
        if deferred is not None:
            del self._deferred[request.request_id]
        whole = end - end % groups.hit_tokens
        if self._remote.waits(request, found, whole, has_peers=peers is not None):
            return None
        tokens = found - computed_tokens
        if tokens < self._options.load_blocks_min * groups.hit_tokens:
            return 0
        self._hit_starts[request.request_id] = computed_tokens
        return tokens

    def loads_in_step(self, tokens: int) -> bool:
        """Whether a hit of so many tokens is loaded by the step that computes its request."""
        return 0 < tokens <= self._options.layer_load_blocks_max * self._groups.hit_tokens

    def _find(self, hashes: list[bytes], start: int, end: int) -> tuple[int, str, int]:
        """Return the local hit, the peer that adds the most, and the hit with it; in tokens."""
        here = self._groups.longest(self.stored, hashes, start, end)
        if self.peers is None or here + self._groups.hit_tokens > end:
            return here, HERE, here
        return here, *self.peers.longest(self._groups, self.stored, hashes, start, end, here)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Record a load into the blocks that were allocated for it."""
        start = self._hit_starts.pop(request.request_id, None)
        self._remote.placed(request)
        if params_of(request, "do_remote_decode") is not None:
            self._save_cached(blocks)
        if external_tokens == 0:
            return
        if start is None:
            self._fail_load(request, blocks, external_tokens, "has asked for no hit")
            return
        end = start + external_tokens
        hashes = request.block_hashes
        found, peer, _ = self._find(hashes, start, end)
        keys, parts, here = self._groups.plan(self.stored, hashes, start, end)
        # Every slice of a block's layers has the same destination.
        into = self._places(blocks.blocks * self._layout.slices, parts)
        if into is None or len(into) != len(keys):
            why = "has allocated other blocks than a hit needs"
            self._fail_load(request, blocks, external_tokens, why)
            return
        in_step = self.loads_in_step(external_tokens)
        sources = [HERE if own else peer for own in here]
        self._loads.append(Load(request.request_id, keys, into, sources, parts, in_step))
        # A load within a step has ended, or has failed and was reported, when the step ends.
        if not in_step:
            self._loading[request.request_id] = Loading(request, start, end)
        split = {CacheHitSource.HOST: found - start, CacheHitSource.P2P: end - found}
        self._sources[request.request_id] = {tier: n for tier, n in split.items() if n}
        self._call_build()

    def _save_cached(self, blocks: Any) -> None:
        """Save the blocks that the device has cached, and the store no longer has.

        The decode engine needs all blocks of the prompt, not only those that this step computes.
        """
        # By priority, blocks that a step saves and does not compute would lose their keys.
        if isinstance(self.feed, FilledFeed) and self.feed.wants_new and not self._by_priority:
            for held in blocks.blocks:
                self.feed.save_again(block for block in held if block.block_hash is not None)

    def offered(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters with which a decode engine finds the blocks of a request."""
        if params_of(request, "do_remote_decode") is None:
            return None
        server = self.server
        saves = self.feed is not None and self.feed.wants_new
        offer = server.offer(request, block_ids) if server is not None and saves else None
        self.counts[f"remote_decodes.{'offered' if offer else 'not_offered'}"] += 1
        return offer

    def _places(self, blocks: Any, parts: list[tuple[int, int]]) -> list[int] | None:
        """Return the destination blocks of a load; `None` if they do not match its hit."""
        if len(blocks) != len(parts):
            return None
        into: list[int] = []
        for held, (first, count) in zip(blocks, parts, strict=True):
            into += [block.block_id for block in held[first : first + count]]
        return None if self._null_block in into else into

    def _fail_load(self, request: Any, blocks: Any, tokens: int, why: str) -> None:
        """Let vLLM compute a hit: it waits for a load, which the workers fail at once."""
        self._limited.warning(
            "blocks",
            "slipstream: %d tokens of request %s are computed, as vLLM %s (%s); use a vLLM version "
            "that docs/connector.md lists",
            tokens,
            request.request_id,
            why,
            self._layout,
        )
        parts = [(0, 0)] * len(self._layout.stored_groups)
        in_step = self.loads_in_step(tokens)
        # vLLM has to be given the blocks of a request that runs in this step.
        lost = [block.block_id for held in blocks.blocks for block in held] if in_step else []
        self._loads.append(Load(request.request_id, [], lost, [], parts, in_step))
        if not in_step:
            # A load within the step is counted by the workers.
            self.counts["load_failed_blocks.layout"] += tokens // self._layout.groups[0].block_size
            self._loading[request.request_id] = Loading(request, tokens, tokens)
        self._call_build()

    def hit_sources(self, request: Any) -> dict[CacheHitSource, int] | None:
        """Return the sources of the tokens of the request's load."""
        return self._sources.pop(request.request_id, None)

    def finished(self, request: Any) -> None:
        """Remove the request; its load is no longer wanted."""
        name = request.request_id
        if self._loading.pop(name, None) is not None:
            self._cancels.append(name)
            self._call_build()
        self._limits.pop(name, None)
        self._aside.discard(name)
        self._sources.pop(name, None)
        self._deferred.pop(name, None)
        self._remote.finished(request)
        self._hit_starts.pop(name, None)

    # Once a step.

    def _build(self, plan: Any = None) -> SlipstreamMetadata:
        """Build any step; `build` calls this for steps with other work than saving blocks."""
        feed = self.feed
        if self._stepped_aside:
            self._aside -= self._stepped_aside
            self._stepped_aside.clear()
        computed = None
        # By priority, a request that this step has planned may be preempted: the
        # pool has its blocks' keys, and no forward pass fills them.
        if (
            feed is not None
            and self._by_priority
            and feed.wants_new
            and plan is not None
            and plan.preempted_req_ids
        ):
            computed = computed_blocks(plan, self._layout)
        loads, cancels, reset, resend = self._loads, self._cancels, self._reset, self._resend
        detach, self._detach = self._detach, False
        self._loads, self._cancels, self._reset, self._resend = [], [], False, False
        if isinstance(feed, FilledFeed):
            if computed is not None:
                feed.drop_uncomputed(computed)
            feed.call_slow(False)
            return feed.build_with(loads, cancels, reset, resend, detach)
        step = None
        if feed is None:
            self._say_unbound()
        else:
            step = feed.step(computed)
        if step is None:
            if not (loads or cancels or reset or resend):
                return NOTHING
            step = None, [], []
        message, keys, blocks = step
        if keys and self._has_tails:
            keys, blocks = self._whole(keys, blocks)
        if keys:
            keys, blocks = self._not_stored(keys, blocks)
        return SlipstreamMetadata(message, keys, blocks, loads, cancels, reset, resend, detach)

    def _say_unbound(self) -> None:
        if not self._unbound_logged:
            self._unbound_logged = True
            logger.warning(
                "slipstream: DEGRADED: saves no blocks and only loads them, because vLLM has not "
                "provided its block pool; use a vLLM version that docs/connector.md lists"
            )

    def _whole(self, keys: list[bytes], blocks: list[int]) -> tuple[list[bytes], list[int]]:
        """Omit partial blocks at the end of a prompt: no look-up here asks for them.

        Source: vLLM 0.33, `FullAttentionManager._cache_partial_tail_block`.
        """
        good = []
        for at, (key, block_id) in enumerate(zip(keys, blocks, strict=True)):
            block = self._pool.blocks[block_id]
            size = self._layout.groups[group_of(key)].block_size
            if block.block_hash == key and (block.block_hash_num_tokens or 0) % size == 0:
                good.append(at)
        return [keys[at] for at in good], [blocks[at] for at in good]

    def _not_stored(self, keys: list[bytes], blocks: list[int]) -> tuple[list[bytes], list[int]]:
        """Omit blocks that every rank's store has."""
        missing: set[int] = set()
        for mirror in self.stored:
            places = mirror.missing(keys)
            if places is None:
                return keys, blocks
            missing.update(places)
        return [keys[i] for i in sorted(missing)], [blocks[i] for i in sorted(missing)]

    def apply(self, meta: Any, failed: Set[str], finished: Set[str] = frozenset()) -> None:
        """Apply the workers' messages: their stores' keys, and the finished and failed loads."""
        if isinstance(meta, SlipstreamWorkerMetadata):
            self.apply_stored(meta.stored)
            if meta.tiers and self._events is not None:
                self._note_events(meta.tiers)
            if meta.lost:
                # vLLM 0.33 leaves their keys in the pool, and computes them when there is room:
                # another request must not find them before.
                self._pool.evict_blocks(set(meta.lost))
            for name, tokens in meta.kept.items():
                loading = self._loading.get(name)
                if loading is not None:
                    loading.kept = tokens if loading.kept is None else min(loading.kept, tokens)
        for name in failed:
            # Messages about a finished request are ignored.
            if (loading := self._loading.get(name)) is not None:
                self._failed(name, loading)
        for name in (*failed, *finished):
            self._loading.pop(name, None)

    def _failed(self, name: str, loading: Loading) -> None:
        """Continue with the arrived part of a failed load, if it is usable."""
        kept = loading.kept or 0
        whole = kept - kept % self._groups.hit_tokens
        # A group with a window has only the blocks that the hit reads, as vLLM frees those before.
        # The arrived part is usable if it reads none of the freed ones.
        if (
            whole
            and whole >= loading.start
            and all(
                group.first_read(whole) == group.first_read(loading.end)
                for group in self._layout.groups
            )
        ):
            # vLLM 0.33 has set this to 0 for a request that was reported as failed
            # (`Scheduler._handle_failed_recving`); it keeps the blocks of this many tokens and
            # computes the rest (`_update_waiting_for_remote_kv`).
            loading.request.num_computed_tokens = whole
            return
        self._limits[name] = 0 if name in self._limits else kept
        self._aside.add(name)

    def apply_stored(self, stored: dict[int, list[bytes]]) -> None:
        """Apply messages about the keys of the ranks' stores."""
        for rank, messages in stored.items():
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
                    self._call_build()
                    self._limited.warning(
                        f"keys of {rank}",
                        "slipstream: requesting a snapshot of the keys of rank %d: %s",
                        rank,
                        error,
                    )

    def _note_events(self, messages: list[tuple[str, bytes]]) -> None:
        assert self._events is not None
        groups = self._layout.groups
        last = self._layout.slices - 1
        for tier, keys, gone in self._tiers.take(messages):
            if last:
                # A block is stored with the last slice of its layers.
                keys = [slice_key(key, 0) for key in keys if group_of(key) == last]
            for group, some in enumerate(by_group(keys, keys, len(groups))[1]):
                if not some:
                    continue
                # With one group, events need not name it.
                number = group if len(groups) > 1 else None
                if gone:
                    self._events.append(removed_event(some, MEDIUMS[tier], number))
                else:
                    size = groups[group].block_size
                    self._events += self._chains.stored_events(some, size, MEDIUMS[tier], number)
        if self._tiers.error:
            self.counts["message_errors"] += 1
            self._resend = True
            self._call_build()
            self._limited.warning(
                "tiers",
                "slipstream: requesting a snapshot of the tiers' keys: %s",
                self._tiers.error,
            )

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the KV events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def reset(self, *, detach: bool = False) -> None:
        """Drop all stored blocks, here at once and in the workers with the next step.

        With `detach` the workers use neither disk nor peers from then on.
        """
        self._detach |= detach
        self.stored[:] = [KeyMirror() for _ in self.stored]
        self._unknown = set(range(len(self.stored)))
        # Without a request, a store publishes the drops as changes, which are no snapshot.
        self._reset = self._resend = True
        self._call_build()

    def new_counts(self) -> dict[str, int] | None:
        """Return the counts since the last report at intervals, if there are any."""
        now = time.monotonic()
        if now < self._counts_due:
            return None
        self._counts_due = now + self._options.stats_interval_s
        for text in take_warnings():
            logger.warning("slipstream: %s", text)
        self._limited.flush()
        totals = dict(self.counts)
        if self.peers is not None:
            totals.update(self.peers.counters())
        if self.feed is not None:
            totals["log_errors"] = self.feed.log_errors_total
            totals["save_skipped_blocks"] = self.feed.uncomputed_total
        news = {
            name: total - self._counts_reported.get(name, 0)
            for name, total in totals.items()
            if total != self._counts_reported.get(name, 0)
        }
        self._counts_reported = totals
        return news or None

    def close(self) -> None:
        """Close the index of peers."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None


BEHIND_BLOCKS = 4
"""Maximum distance from a step's first token to the blocks that vLLM gives their keys in that step:
those of tokens that were speculative before. Others count as not computed, which is safe."""


def computed_blocks(plan: Any, layout: Layout) -> set[int]:
    """Return the blocks changed by the plan that are whole when its forward pass is done."""
    resolve = plan.kv_connector_block_state.resolve_block_ids
    cached = plan.scheduled_cached_reqs
    begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    begins |= {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    computed: set[int] = set()
    for name, count in plan.num_scheduled_tokens.items():
        for group, ids in zip(layout.groups, resolve(name), strict=True):
            first = max(begins[name] // group.block_size - BEHIND_BLOCKS, 0)
            computed.update(ids[first : (begins[name] + count) // group.block_size])
    return computed
