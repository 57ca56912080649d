"""The worker half: saves and loads concurrently with the forward passes, polled by the engine.

```text
  wait_for_save ── gather ──► queue ──► saver thread ── fetch, Store.put
  start_load_kv ── Store.load ··· Store.wait ──► loader thread ── scatter ──► deque ──► poll
```

Loads are split into parts, as staging memory is freed; several loads take turns. The engine's
thread never waits for another thread, a transfer or a peer, with one exception: loads within a
step (`Load.in_step`), for which the forward pass waits layer by layer.

If the layers are divided into slices, `save_kv_layer` saves a slice's part of the step's blocks
once the pass has computed the slice's last layer.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from slipstream._native import KeyMirror, take_warnings
from slipstream.limited import LimitedLog
from slipstream.vllm.blocks import COPY_BYTES, ReleasedError
from slipstream.vllm.groups import by_group, group_of, slice_key
from slipstream.vllm.metadata import Load, SlipstreamMetadata, SlipstreamWorkerMetadata
from slipstream.vllm.staging import Place, Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from slipstream.store import Store
    from slipstream.vllm.blocks import Blocks

logger = logging.getLogger("slipstream.vllm")

GRACE_S = 1.0
"""Maximum time to wait for a store after the deadline of a load that it has not ended."""

WAIT_S = 0.2
"""Interval at which the loader checks whether it must stop."""

PARTS_AT_ONCE = 2
"""Maximum parts of one load in the store at a time: one is read while the other is copied, and a
large load leaves room for others."""

TIER_MESSAGES_MAX = 4
"""Maximum messages about single tiers to the scheduler per step: two for each."""

FIRST_KEYS_S = 2.0
"""Longest time in which a store reports the keys that it holds at its start; others come later."""

REMEDIES = {
    "absent": "their holder has evicted them; raise host_bytes or disk_bytes to keep them longer",
    "length": "their holder has another block layout; run one release and one configuration on all",
    "checksum": "check memory and network if it happens again",
    "deadline": "disk, peer or network are slow; raise load_deadline_s, or load_blocks_min",
    "lost": "the connection to the peer ended, and is retried; check the state of the peer",
    "copy": "see the error before this",
    "internal": "see the error before this, and please report it",
    "refused": "see the error before this, and please report it",
}
"""Remedies, by the reason for missing blocks."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """A load that has not ended yet."""

    load: Load
    cache: Blocks
    """Its destination; another one after the engine has slept."""
    after: Any
    """Point of the device's stream after which the blocks are free."""
    deadline: float
    """Deadline for the store, by `time.monotonic`."""
    resets: int
    """Number of resets before it began: after another reset its result is not used."""
    groups: list[int]
    """Index in `load.blocks` of the end of each group's blocks."""
    begun: int = 0
    """Blocks that were requested from the store, or are no longer wanted."""
    parts: int = 0
    """Parts that have not ended."""
    failed: set[int] = field(default_factory=set)
    reason: str = ""
    is_canceled: bool = False
    is_late: bool = False
    """Whether the parts in progress are no longer waited for."""
    has_ended: bool = False
    missing: list[int] = field(default_factory=list)
    """Of a load within a step: the blocks of each group that are not in the cache yet."""

    def counts(self, start: int, end: int) -> list[int]:
        """Return the number of these blocks in each group."""
        edges = pairwise([0, *self.groups])
        return [max(0, min(end, high) - max(start, low)) for low, high in edges]


@dataclass(slots=True)
class Part:
    """Blocks of a load that are requested from the store together."""

    of: UnderWay
    start: int
    end: int
    place: Place
    is_copied: bool = False
    """Whether the loader is processing it."""


@dataclass(slots=True)
class Ended:
    """A finished load that was not yet reported to the scheduler."""

    request_id: str
    failed_blocks: list[int]
    whole: bool
    """Whether none of its data may be used."""
    kept: int | None = None
    """Of a failed load: the tokens before the first missing block, if vLLM cannot be given
    the blocks (`KVConnectorTransferResults.failed_recving`)."""
    in_step: bool = False
    """Whether vLLM has not waited for it: it is given the missing blocks, and no end."""

    def void(self) -> None:
        """Mark all of its data as unusable."""
        self.whole, self.kept = True, 0


@dataclass(slots=True)
class StepSaves:
    """The blocks that a step saves slice by slice, while its forward pass runs."""

    keys: list[bytes]
    blocks: list[int]
    pending: list[set[str]]
    """The layers of each slice that the pass has not computed."""
    saved: list[bool]
    """By slice."""


class WorkerHalf:
    """Moves the blocks of one rank between its KV cache and a store."""

    def __init__(
        self,
        store: Store,
        blocks: Blocks,
        *,
        rank: int,
        slices: int = 1,
        load_deadline_s: float,
        saving_bytes_max: int,
        loading_bytes_max: int,
        stats_interval_s: float,
        publish_tiers: bool = False,
    ) -> None:
        self._publish_tiers = publish_tiers
        self._limited = LimitedLog(logger)
        self.store = store
        self.blocks = blocks
        self.rank = rank
        self._slices = slices
        # The place of each layer in the store's groups.
        self._place_of = {
            name: at
            for at, each in enumerate(blocks.groups)
            if each.group is not None
            for name in each.group.layers
        }
        self._step: StepSaves | None = None
        # Loads of this step for which its forward pass waits, and the blocks that did not come.
        self.in_step: list[UnderWay] = []
        self.lost_in_step: set[int] = set()
        self._deadline_s = load_deadline_s
        self._saving_bytes_max = saving_bytes_max
        self._resets = 0
        # The lock guards all state of loads below.
        self._parts_made = 0
        self._parts: dict[int, Part] = {}
        self._under_way: dict[str, UnderWay] = {}
        # Loads with blocks to request from the store; the next one in turn is first.
        self._turns: deque[UnderWay] = deque()
        self._deadlines: deque[UnderWay] = deque()
        self.staging = Staging(blocks, loading_bytes_max)
        self._ended: deque[Ended] = deque()
        self._failed_blocks: set[int] = set()
        self._kept: dict[str, int] = {}
        self._uncached: list[int] = []
        self._saves: queue.SimpleQueue[tuple[list[bytes], torch.Tensor, Any, int] | None] = (
            queue.SimpleQueue()
        )
        self._putting = threading.Lock()
        self.saving_bytes = 0
        self.loading = 0
        self._lock = threading.Lock()
        # Notifies tests of saves and loads; the engine's thread never waits on it.
        self.moved = threading.Condition(self._lock)
        # Notifies the engine's thread of progress of loads within a step.
        self._came = threading.Condition(self._lock)
        # Notifies the stager that memory is short, or that it must stop.
        self._short = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        self._stats_interval_s = stats_interval_s
        self._stats_due = 0.0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._save_all, name="slipstream-save", daemon=True),
            threading.Thread(target=self._load_all, name="slipstream-load", daemon=True),
            threading.Thread(target=self._stage_all, name="slipstream-stage", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # The engine's thread, in the order of a step.

    def begin(self, meta: SlipstreamMetadata) -> None:
        """Do the work that precedes everything else in the step."""
        if meta.reset:
            with self._lock:
                self._resets += 1
                for ended in self._ended:
                    ended.void()
            # Waits for the put in progress; resets are rare.
            with self._putting:
                if meta.detach:
                    self.store.detach()
                else:
                    self.store.reset()
        if meta.resend:
            self.store.request_snapshot()

    def load(self, loads: list[Load]) -> None:
        """Start to load."""
        now = time.monotonic()
        for load in loads:
            groups = list(accumulate(count for _, count in load.parts))
            begun = UnderWay(
                load, self.blocks, self.blocks.now(), now + self._deadline_s, self._resets, groups
            )
            with self._lock:
                self.loading += 1
                self._under_way[load.request_id] = begun
                if load.in_step:
                    begun.missing = begun.counts(0, len(load.keys))
                    self.in_step.append(begun)
                if not load.keys:
                    # The scheduler half has no use for the blocks that vLLM has allocated.
                    begun.is_late = True
                    begun.reason = "layout"
                    self._skip_rest(begun)
                    self._end_if_done(begun)
                    continue
                self._turns.append(begun)
                self._deadlines.append(begun)
        self._stage()

    def cancel(self, names: list[str]) -> None:
        """Request nothing more for these requests' loads, which are no longer wanted."""
        with self._lock:
            for name in names:
                under_way = self._under_way.get(name)
                if under_way is not None:
                    # Later writes of the store go into staging memory, not into the cache.
                    under_way.is_canceled = under_way.is_late = True
                    self._skip_rest(under_way)
                    self._end_if_done(under_way)

    def _skip_rest(self, under_way: UnderWay) -> None:
        """Request nothing more for a load."""
        count = len(under_way.load.blocks)
        under_way.failed.update(range(under_way.begun, count))
        under_way.begun = count
        if under_way in self._turns:
            self._turns.remove(under_way)

    def _stage(self) -> None:
        """Request as many parts from the store as there is memory for. Never waits."""
        while True:
            with self._lock:
                part = self._next_part()
                if part is None:
                    return
                self._parts_made += 1
                number = self._parts_made
                self._parts[number] = part
            load, deadline = part.of.load, part.of.deadline
            try:
                self.store.load(
                    number,
                    load.keys[part.start : part.end],
                    load.sources[part.start : part.end],
                    memoryview(part.place.bytes.numpy()),
                    max(0.0, deadline - time.monotonic()),
                )
            # An error for one load must not affect the others.
            except Exception:
                logger.exception("slipstream: the store refused a load")
                self._end(number, set(range(part.end - part.start)), "refused")

    def _next_part(self) -> Part | None:
        """Take the next part of the load in turn; `None`: there is none, or no memory for it."""
        while self._turns:
            under_way = self._turns[0]
            start, end = under_way.begun, len(under_way.load.blocks)
            size = 0
            for group, high in enumerate(under_way.groups):
                at = max(start, 0 if group == 0 else under_way.groups[group - 1])
                each = under_way.cache.group_bytes[group]
                room = (self.staging.slab_bytes - size) // each
                if high > at and room < high - at:
                    end = at + room
                    size += room * each
                    break
                size += max(0, high - at) * each
                if size and under_way.load.in_step:
                    # The first layers do not wait for the data of the others.
                    end = high
                    break
            try:
                place = self.staging.take(size)
            except (RuntimeError, MemoryError) as error:
                self._no_memory(under_way, error)
                continue
            if place is None:
                self._short.notify()
                return None
            self._turns.popleft()
            under_way.begun = end
            under_way.parts += 1
            if end < len(under_way.load.blocks) and under_way.parts < PARTS_AT_ONCE:
                self._turns.append(under_way)
            return Part(under_way, start, end, place)
        return None

    def _no_memory(self, under_way: UnderWay, error: Exception) -> None:
        self._limited.warning(
            "no memory to load",
            "slipstream: no memory to load %d blocks of request %s, which are computed; lower "
            "`loading_bytes_max` or `host_bytes`: %s",
            len(under_way.load.blocks) - under_way.begun,
            under_way.load.request_id,
            error,
        )
        under_way.reason = "memory"
        self._skip_rest(under_way)
        self._end_if_done(under_way)

    def wait_for_layer(self, layer: str) -> None:
        """Wait for the blocks of this step's loads that a layer reads, or for their failure."""
        at = self._place_of.get(layer)
        if at is None:
            self._wait(lambda load: load.has_ended)
        else:
            self._wait(lambda load: load.has_ended or not load.missing[at])

    def _wait(self, is_done: Callable[[UnderWay], bool]) -> None:
        """Wait for loads within this step, until their deadlines at the latest."""
        for load in self.in_step:
            with self._lock:
                self._came.wait_for(
                    lambda load=load: is_done(load) or bool(load.failed),  # type: ignore[misc]
                    max(0.0, load.deadline - time.monotonic()),
                )
                if not load.has_ended and (load.failed or not is_done(load)):
                    # Its blocks are computed from the next step on, so nothing may be written to
                    # them any more. A part that is being copied ends soon.
                    load.is_late = True
                    load.reason = load.reason or "deadline"
                    self._skip_rest(load)
                    self._end_if_done(load)
                    self._came.wait_for(lambda load=load: load.has_ended)  # type: ignore[misc]
                if load.failed or load.is_late:
                    self.lost_in_step.update(load.load.blocks)

    def layer_computed(self, layer: str, meta: SlipstreamMetadata) -> None:
        """Save the slice of this layer once the pass has computed all layers of the slice."""
        if meta.saves_nothing:
            return
        step = self._step or self._begin_saves(meta)
        at = self._place_of.get(layer)
        if at is None:
            return
        step.pending[at].discard(layer)
        if not step.pending[at] and not step.saved[at]:
            self._save_slice(step, at)

    def _begin_saves(self, meta: SlipstreamMetadata) -> StepSaves:
        keys, blocks = meta.save_keys, meta.save_blocks
        # There is room for all slices of a block, or for none.
        room = max(0, self._saving_bytes_max - self.saving_bytes) // sum(self.blocks.group_bytes)
        if room < len(blocks):
            self._count("save_dropped_blocks", len(blocks) - room)
            del keys[room:], blocks[room:]
        pending: list[set[str]] = [set() for _ in range(self._slices)]
        for name, at in self._place_of.items():
            pending[at].add(name)
        self._step = StepSaves(keys, blocks, pending, [False] * self._slices)
        return self._step

    def end_step(self, meta: SlipstreamMetadata) -> None:
        """Save what the step has filled, and end the loads within the step."""
        if self.in_step:
            self._wait(lambda load: load.has_ended)
        if not meta.saves_nothing:
            if self._slices > 1:
                step = self._step or self._begin_saves(meta)
                for at in range(self._slices):
                    if not step.saved[at]:
                        self._save_slice(step, at)
            else:
                self.save(*self._without_lost(meta.save_keys, meta.save_blocks))
        self._step = None
        if self.in_step:
            self.in_step.clear()
            self.lost_in_step.clear()

    def _save_slice(self, step: StepSaves, at: int) -> None:
        """Save a slice of the step's blocks."""
        step.saved[at] = True
        step.keys, step.blocks = self._without_lost(step.keys, step.blocks)
        keys = [slice_key(key, at) for key in step.keys]
        saved = self.save(keys, step.blocks, at)
        # Blocks of which a slice is missing are of no use.
        del step.keys[saved:], step.blocks[saved:]

    def _without_lost(self, keys: list[bytes], blocks: list[int]) -> tuple[list[bytes], list[int]]:
        """Omit blocks that a load within this step was to fill, and has not."""
        if not self.lost_in_step:
            return keys, blocks
        good = [i for i, block in enumerate(blocks) if block not in self.lost_in_step]
        return [keys[i] for i in good], [blocks[i] for i in good]

    def save(self, keys: list[bytes], blocks: list[int], at_slice: int | None = None) -> int:
        """Copy blocks out of the cache, to be stored later; returns how many."""
        # In steps, so that as many blocks are saved as there is room for.
        step = max(1, COPY_BYTES // self.blocks.block_bytes)
        for at in range(0, len(blocks), step):
            if not self._save_some(keys[at : at + step], blocks[at : at + step], at_slice):
                self._count("save_dropped_blocks", len(blocks) - at)
                return at
        return len(blocks)

    def _save_some(self, keys: list[bytes], blocks: list[int], at_slice: int | None) -> bool:
        parts: list[list[int]]
        if at_slice is None:
            keys, parts = by_group(keys, blocks, len(self.blocks.groups))
        else:
            parts = [blocks if at == at_slice else [] for at in range(self._slices)]
        size = self.blocks.size([len(part) for part in parts])
        if at_slice is None and self.saving_bytes + size > self._saving_bytes_max:
            # The store is slower than the engine: a dropped save is a later miss.
            return False
        try:
            gathered, ready = self.blocks.gather(parts)
        # A device without free memory does not justify ending the engine.
        except RuntimeError as error:
            self._limited.warning(
                "not saved",
                "slipstream: blocks are not saved; if the device has no memory left, lower "
                "`saving_bytes_max` or --gpu-memory-utilization: %s",
                error,
            )
            return False
        with self._lock:
            self.saving_bytes += size
        self._saves.put((keys, gathered, ready, self._resets))
        return True

    def results(self) -> KVConnectorTransferResults:
        """Report the loads that have ended since the last call. A poll: never waits."""
        deadlines = self._deadlines
        if deadlines and deadlines[0].deadline <= time.monotonic() - GRACE_S:
            self._give_up_late_ones()
        results = KVConnectorTransferResults()
        while self._ended:
            ended = self._ended.popleft()
            if ended.in_step:
                self._failed_blocks.update(ended.failed_blocks)
                self._uncached += ended.failed_blocks
                continue
            results.finished_recving.add(ended.request_id)
            if ended.kept is not None:
                self._kept[ended.request_id] = ended.kept
            if ended.whole:
                results.failed_recving.add(ended.request_id)
            else:
                self._failed_blocks.update(ended.failed_blocks)
        return results

    def failed_blocks(self) -> set[int]:
        """Report the missing blocks of the loads in `results`."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def worker_meta(self) -> SlipstreamWorkerMetadata | None:
        """Report new keys of the store, and the results of failed loads."""
        message = self.store.take_message()
        tiers = self._take_tier_messages() if self._publish_tiers else []
        if message is None and not tiers and not self._kept and not self._uncached:
            return None
        kept, self._kept = self._kept, {}
        lost, self._uncached = self._uncached, []
        stored = {self.rank: [message]} if message else {}
        return SlipstreamWorkerMetadata(stored, tiers, kept, lost)

    def first_keys(self) -> list[bytes]:
        """Take the messages with the keys that the store holds at its start.

        Without them the first requests would miss the disk: later messages reach the scheduler with
        the output of a step, so nothing is known before the first step has ended.
        """
        messages: list[bytes] = []
        deadline = time.monotonic() + FIRST_KEYS_S
        while time.monotonic() < deadline:
            if (message := self.store.take_message()) is None:
                # A message that is being written, which takes a moment.
                time.sleep(0.001)
                continue
            messages.append(message)
            if KeyMirror.ends(message):
                break
        return messages

    def _take_tier_messages(self) -> list[tuple[str, bytes]]:
        messages: list[tuple[str, bytes]] = []
        while (
            len(messages) < TIER_MESSAGES_MAX
            and (message := self.store.take_tier_message()) is not None
        ):
            messages.append(message)
        return messages

    def counts(self) -> dict[str, int] | None:
        """Report the counts since the last report at intervals, if there are any."""
        now = time.monotonic()
        if now < self._stats_due:
            return None
        self._stats_due = now + self._stats_interval_s
        totals = self.store.counters()
        with self._lock:
            totals.update(self._counts)
        news = {
            name: total - self._reported.get(name, 0)
            for name, total in totals.items()
            if total != self._reported.get(name, 0)
        }
        self._reported = totals
        return news or None

    def release(self) -> None:
        """Release the caches: loaded blocks are lost with their memory, loads in progress fail."""
        self.blocks.release()
        with self._lock:
            for ended in self._ended:
                ended.void()

    def close(self) -> None:
        """Stop the threads; saves in progress are finished, loads in progress fail."""
        with self._lock:
            self._closing = True
            for under_way in list(self._under_way.values()):
                under_way.reason = under_way.reason or "closed"
                self._skip_rest(under_way)
                self._end_if_done(under_way)
            self._short.notify()
        self._saves.put(None)
        self._threads[0].join()
        self.store.close()
        self._threads[1].join()
        self._threads[2].join()
        self._limited.flush(now=math.inf)

    def _give_up_late_ones(self) -> None:
        late = time.monotonic() - GRACE_S
        while self._deadlines and self._deadlines[0].deadline <= late:
            under_way = self._deadlines.popleft()
            with self._lock:
                if under_way.has_ended:
                    continue
                # It waits for the store, or for memory of loads that the store does not end.
                self._limited.warning(
                    "abandoned",
                    "slipstream: the store did not end the load of request %s; it is recomputed; "
                    "please report this with the log",
                    under_way.load.request_id,
                )
                under_way.is_late = True
                under_way.reason = "abandoned"
                self._skip_rest(under_way)
                self._end_if_done(under_way)

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    # The saver's thread.

    def _save_all(self) -> None:
        while (item := self._saves.get()) is not None:
            self._store(*item)
            # Free the device's memory while the thread is idle.
            del item

    def _store(self, keys: list[bytes], gathered: torch.Tensor, ready: Any, resets: int) -> None:
        size = gathered.numel()
        try:
            host = self.blocks.fetch(gathered, ready)
            stored = 0
            with self._putting:
                # Blocks from before a reset may be of another model.
                if resets == self._resets:
                    stored = self.store.put(keys, memoryview(host.numpy()))
                else:
                    self._count("save_dropped_blocks", len(keys))
            if self._slices == 1 or group_of(keys[0]) == self._slices - 1:
                self._count("saved_blocks", stored)
            # If some could not be stored: an approximation for blocks of different sizes.
            self._count("saved_bytes", size * stored // len(keys))
        # One failed save must not end all others.
        except Exception:
            logger.exception("slipstream: %d blocks could not be stored", len(keys))
            self._count("save_failed_blocks", len(keys))
        finally:
            with self._lock:
                self.saving_bytes -= size
                self.moved.notify_all()

    # The stager's thread.

    def _stage_all(self) -> None:
        """Allocate memory for loads, which may take long, outside of the engine's thread."""
        while True:
            with self._lock:
                self._short.wait_for(
                    lambda: self._closing or (bool(self._turns) and self.staging.can_grow())
                )
                if self._closing:
                    return
            try:
                slab = self.staging.make_slab()
            except (RuntimeError, MemoryError) as error:
                with self._lock:
                    # Memory of another part may suffice; without any there is nothing to wait for.
                    self.staging.grow_no_more()
                    if not self.staging.slabs:
                        for under_way in list(self._turns):
                            self._no_memory(under_way, error)
                        self.staging.grow_again()
                continue
            with self._lock:
                self.staging.slabs.append(slab)
            self._stage()

    # The loader's thread.

    def _load_all(self) -> None:
        while not (self._closing and not self._parts):
            for number, failed, reason in self.store.wait(WAIT_S):
                try:
                    self._end(number, set(failed), reason or "unnamed")
                # One failed load must not end all others.
                except Exception:
                    logger.exception("slipstream: a load could not be ended; it is recomputed")
                    self._end_anyhow(number)
            for text in take_warnings():
                logger.warning("slipstream: %s", text)
            self._limited.flush()
            if self._closing:
                # The store was closed, and has failed all loads in progress.
                with self._lock:
                    self._parts.clear()

    def _end(self, number: int, failed: set[int], reason: str) -> None:
        """Copy the arrived blocks of a part into the cache, and end its load with the last one."""
        with self._lock:
            part = self._parts.get(number)
            if part is None or part.is_copied:
                self._counts["load_unexpected_ends"] += 1
                self.moved.notify_all()
                return
            part.is_copied = True
            under_way = part.of
            wanted = not under_way.is_late and under_way.resets == self._resets
            if under_way.has_ended and not under_way.is_canceled:
                self._counts["load_unexpected_ends"] += 1
        failed = {part.start + i for i in failed if i < part.end - part.start}
        good = [i for i in range(part.start, part.end) if i not in failed]
        stores = not self._takes_parts()
        if wanted and (good or stores):
            try:
                if good:
                    self._scatter(part, good)
                if stores:
                    self._store_what_came(part, failed)
            # After any error of a device's copy, the request is recomputed.
            except Exception as error:
                reason = "sleep" if isinstance(error, ReleasedError) else "copy"
                if reason == "copy":
                    logger.exception("slipstream: loaded blocks could not be put into the KV cache")
                failed = set(range(part.start, part.end))
        with self._lock:
            self._let_go(number, part)
            if not wanted:
                self._skip_rest(under_way)
            if failed:
                under_way.failed |= failed
                under_way.reason = under_way.reason or reason
                # Blocks after a missing one are of no use.
                if self._takes_parts() or under_way.load.in_step:
                    self._skip_rest(under_way)
            if under_way.missing:
                if wanted:
                    came = under_way.counts(part.start, part.end)
                    for group, count in enumerate(came):
                        under_way.missing[group] -= count
                self._came.notify_all()
            if under_way.begun < len(under_way.load.blocks) and under_way not in self._turns:
                self._turns.append(under_way)
            self._end_if_done(under_way)
        self._stage()

    def _end_anyhow(self, number: int) -> None:
        """Fail the load of a part whose completion raised an error."""
        with self._lock:
            part = self._parts.get(number)
            if part is None:
                return
            self._let_go(number, part)
            part.of.reason, part.of.is_late = "internal", True
            self._skip_rest(part.of)
            self._end_if_done(part.of)
        self._stage()

    def _let_go(self, number: int, part: Part) -> None:
        del self._parts[number]
        part.of.parts -= 1
        self.staging.give_back(part.place)

    def _scatter(self, part: Part, good: list[int]) -> None:
        """Copy the arrived blocks of a part into the cache."""
        under_way, rows = part.of, part.place.bytes
        counts = under_way.counts(part.start, part.end)
        blocks: list[list[int]] = []
        kept: list[torch.Tensor] = []
        first, begin = part.start, 0
        wanted = set(good)
        for count, size in zip(counts, under_way.cache.group_bytes, strict=True):
            here = [i for i in range(first, first + count) if i in wanted]
            end = begin + count * size
            group_rows = rows[begin:end]
            if len(here) < count:
                places = [i - first for i in here]
                group_rows = group_rows.view(count, size)[places].view(-1)
            kept.append(group_rows)
            blocks.append([under_way.load.blocks[i] for i in here])
            first, begin = first + count, end
        if len(good) < part.end - part.start:
            rows = torch.cat(kept)
        under_way.cache.scatter(blocks, rows, under_way.after)

    def _store_what_came(self, part: Part, failed: set[int]) -> None:
        """Store the blocks that peers sent for a failed load: the next load requests the rest.

        Called for the load's last part, while its blocks are the request's: vLLM gives them away
        after the report that the load has failed.
        """
        under_way, load = part.of, part.of.load
        with self._lock:
            if under_way.parts > 1 or under_way.begun < len(load.blocks):
                return
            lost = under_way.failed | failed
            if not lost or self._closing:
                return
        came = [i for i, source in enumerate(load.sources) if source and i not in lost]
        if not came:
            return
        counts = under_way.counts(0, len(load.blocks))
        ends = list(accumulate(counts, initial=0))
        blocks = [
            [load.blocks[i] for i in came if start <= i < end] for start, end in pairwise(ends)
        ]
        gathered, ready = under_way.cache.gather(blocks)
        with self._lock:
            self.saving_bytes += gathered.numel()
        self._store([load.keys[i] for i in came], gathered, ready, under_way.resets)

    def _end_if_done(self, under_way: UnderWay) -> None:
        """Report a load whose parts have all ended, or whose last parts are not waited for."""
        if under_way.has_ended or under_way.begun < len(under_way.load.blocks):
            return
        if under_way.parts and not under_way.is_late:
            return
        # A part that is being copied accesses the cache, and is waited for.
        if any(part.of is under_way and part.is_copied for part in self._parts.values()):
            return
        under_way.has_ended = True
        load, reason = under_way.load, under_way.reason
        self.loading -= 1
        if self._under_way.get(load.request_id) is under_way:
            del self._under_way[load.request_id]
        if under_way.is_canceled:
            self._ended.append(Ended(load.request_id, [], whole=False))
            self._counts["load_canceled_blocks"] += len(under_way.failed)
            self.moved.notify_all()
            return
        failed = under_way.failed
        if under_way.is_late:
            # Later ends of the store do not count.
            failed = set(range(len(load.blocks)))
        # Without its first block a load is of no use, and the request must not ask for it again:
        # it would ask for a permanently damaged block forever.
        good = 0 if 0 in failed else len(load.blocks) - len(failed)
        kept = 0
        if failed and load.in_step:
            good = 0
        elif failed and not self._takes_parts():
            kept, good = self._kept_of(load, failed), 0
        # A reset may have happened while the blocks were copied.
        if under_way.resets != self._resets:
            good, kept, reason = 0, 0, "reset"
        elif (good or kept) and under_way.cache.is_released:
            good, kept, reason = 0, 0, "sleep"
        lost = [block for i, block in enumerate(load.blocks) if not good or i in failed]
        if self._slices > 1:
            # Each block is once in every slice.
            lost = sorted(set(lost))
        if load.in_step:
            self._ended.append(Ended(load.request_id, lost, whole=False, in_step=True))
            self._came.notify_all()
        else:
            # Every failed rank reports its kept tokens, because the minimum counts.
            self._ended.append(
                Ended(load.request_id, lost, whole=not good, kept=None if good else kept)
            )
        self._counts["loaded_blocks"] += good // self._slices
        if good:
            counts = under_way.counts(0, len(load.blocks))
            counts[0] -= len(failed)
            self._counts["loaded_bytes"] += under_way.cache.size(counts)
        if lost:
            self._counts[f"load_failed_blocks.{reason}"] += len(lost)
            self._limited.warning(
                f"did not come: {reason}",
                "slipstream: %d of %d blocks of request %s did not come and are recomputed (%s)%s",
                len(lost),
                len(load.blocks) // self._slices,
                load.request_id,
                reason,
                f"; {REMEDIES[reason]}" if reason in REMEDIES else "",
            )
        self.moved.notify_all()

    def _takes_parts(self) -> bool:
        """Whether vLLM can continue from the first block of a failed load.

        With several groups it accepts no failed blocks; and the blocks that a window reads before
        an earlier block were not loaded (vLLM 0.33, `Scheduler._handle_invalid_blocks`).
        """
        only, *others = self.blocks.groups
        return not others and (only.group is None or only.group.kind == "full")

    def _kept_of(self, load: Load, failed: set[int]) -> int:
        """Return the tokens before the first missing block."""
        tokens, at = [], 0
        for (first, count), blocks in zip(load.parts, self.blocks.groups, strict=True):
            assert blocks.group is not None, "layers without groups take parts of loads"
            places = [first + i - at for i in failed if at <= i < at + count]
            tokens += [place * blocks.group.block_size for place in places]
            at += count
        return min(tokens)
