"""The worker half: saves and loads beside the forward passes, seen by polls.

```text
  wait_for_save ── gather ──► queue ──► saver thread ── fetch, Store.put
  start_load_kv ── Store.load ··· Store.wait ──► loader thread ── scatter ──► deque ──► poll
```

The engine's thread never waits for either thread, for a transfer or for a peer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from slipstream._native import take_warnings
from slipstream.vllm.blocks import COPY_BYTES
from slipstream.vllm.groups import by_group
from slipstream.vllm.metadata import Load, SlipstreamMetadata, SlipstreamWorkerMetadata

if TYPE_CHECKING:
    import torch

    from slipstream.store import Store
    from slipstream.vllm.blocks import Blocks

logger = logging.getLogger("slipstream.vllm")

GRACE_S = 1.0
"""A store that has not ended a load so long after its deadline is not waited for."""

WAIT_S = 0.2
"""How long the loader waits for a store before it looks whether it has to end."""

TIER_MESSAGES_MAX = 4
"""Messages about single tiers that go to the scheduler in one step: two for each."""

REMEDIES = {
    "absent": "whoever held them has given them up; more host_bytes or disk_bytes keep them longer",
    "length": "their holder has another block layout; run one release and one configuration on all",
    "checksum": "look at memory and network if it happens again",
    "deadline": "disk, peer or network are slow; raise load_deadline_s, or load_blocks_min",
    "lost": "the connection to the peer ended, and is made again; see what became of the peer",
    "copy": "see the error before this",
}
"""What to do, by why blocks did not come."""


@dataclass(slots=True)
class UnderWay:
    """A load that has not ended yet."""

    load: Load
    cache: Blocks
    """Where it goes; another one after the engine has slept."""
    staging: torch.Tensor
    after: Any
    """Point of the device's stream that the blocks are free from."""
    give_up: float
    """When it is taken as failed whatever the store says, by `time.monotonic`."""
    resets: int
    """Resets before it began: what comes after another one is not to be used."""


@dataclass(slots=True)
class Ended:
    """A load that the scheduler has not been told of yet."""

    request_id: str
    failed_blocks: list[int]
    whole: bool
    """Nothing that came may be used."""
    kept: int | None = None
    """Of a load that failed in part: the tokens before the first block that did not come, where
    vLLM cannot be told of blocks (`KVConnectorTransferResults.failed_recving`)."""


class WorkerHalf:
    """Moves the blocks of one rank between its KV cache and a store."""

    def __init__(
        self,
        store: Store,
        blocks: Blocks,
        *,
        rank: int,
        load_deadline_s: float,
        saving_bytes_max: int,
        stats_interval_s: float,
        tell_tiers: bool = False,
    ) -> None:
        self._tell_tiers = tell_tiers
        self.store = store
        self.blocks = blocks
        self.rank = rank
        self._deadline_s = load_deadline_s
        self._saving_bytes_max = saving_bytes_max
        self._jobs_made = 0
        self._resets = 0
        self.under_way: dict[int, UnderWay] = {}
        self._deadlines: deque[tuple[float, int]] = deque()
        self._ended: deque[Ended] = deque()
        self._failed_blocks: set[int] = set()
        self._kept: dict[str, int] = {}
        self._saves: queue.SimpleQueue[tuple[list[bytes], torch.Tensor, Any, int] | None] = (
            queue.SimpleQueue()
        )
        self._putting = threading.Lock()
        self.saving_bytes = 0
        self.loading = 0
        self._lock = threading.Lock()
        # Tells tests that something was saved or loaded; the engine's thread never waits on it.
        self.moved = threading.Condition(self._lock)
        self._counts: Counter[str] = Counter()
        self._told: dict[str, int] = {}
        self._stats_interval_s = stats_interval_s
        self._stats_due = 0.0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._save_all, name="slipstream-save", daemon=True),
            threading.Thread(target=self._load_all, name="slipstream-load", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # The engine's thread, in the order of a step.

    def begin(self, meta: SlipstreamMetadata) -> None:
        """Do what has to come before everything else of the step."""
        if meta.reset:
            with self._lock:
                self._resets += 1
                for ended in self._ended:
                    ended.whole = True
            # Waits for the blocks that are being stored just now; resets are rare.
            with self._putting:
                self.store.reset()
        if meta.resend:
            self.store.request_snapshot()

    def load(self, loads: list[Load]) -> None:
        """Begin to load."""
        for load in loads:
            try:
                staging = self.blocks.empty([count for _, count in load.parts])
            except (RuntimeError, MemoryError) as error:
                logger.warning(
                    "slipstream: no memory to load %d blocks of request %s, which are computed: %s",
                    len(load.blocks),
                    load.request_id,
                    error,
                )
                self._count("load_failed_blocks.memory", len(load.blocks))
                with self._lock:
                    self._ended.append(Ended(load.request_id, [], whole=True))
                continue
            self._jobs_made += 1
            with self._lock:
                self.loading += 1
            job, now = self._jobs_made, self.blocks.now()
            give_up = time.monotonic() + self._deadline_s + GRACE_S
            self.under_way[job] = UnderWay(load, self.blocks, staging, now, give_up, self._resets)
            self._deadlines.append((give_up, job))
            self.store.load(
                job, load.keys, load.sources, memoryview(staging.numpy()), self._deadline_s
            )

    def save(self, keys: list[bytes], blocks: list[int]) -> None:
        """Copy blocks out of the cache, to be stored by and by."""
        # Bit by bit, so that as many are saved as there is room for.
        step = max(1, COPY_BYTES // self.blocks.block_bytes)
        for at in range(0, len(blocks), step):
            if not self._save_some(keys[at : at + step], blocks[at : at + step]):
                self._count("save_dropped_blocks", len(blocks) - at)
                return

    def _save_some(self, keys: list[bytes], blocks: list[int]) -> bool:
        keys, parts = by_group(keys, blocks, len(self.blocks.groups))
        size = self.blocks.size([len(part) for part in parts])
        if self.saving_bytes + size > self._saving_bytes_max:
            # The store is slower than the engine: a save that is dropped is a later miss.
            return False
        try:
            gathered, ready = self.blocks.gather(parts)
        # A device that has no memory left is no reason to end the engine.
        except RuntimeError as error:
            logger.warning(
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
        """Tell which loads have ended since the last call. A poll: waits for nobody."""
        results = KVConnectorTransferResults()
        if self._deadlines:
            self._give_up_late_ones()
        while self._ended:
            ended = self._ended.popleft()
            results.finished_recving.add(ended.request_id)
            if ended.kept is not None:
                self._kept[ended.request_id] = ended.kept
            if ended.whole:
                results.failed_recving.add(ended.request_id)
            else:
                self._failed_blocks.update(ended.failed_blocks)
        return results

    def failed_blocks(self) -> set[int]:
        """Tell which blocks of the loads that `results` told of did not come."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def worker_meta(self) -> SlipstreamWorkerMetadata | None:
        """Tell what the store holds now and did not before, and what came of failed loads."""
        message = self.store.take_message()
        tiers = self._take_tier_messages() if self._tell_tiers else []
        if message is None and not tiers and not self._kept:
            return None
        kept, self._kept = self._kept, {}
        return SlipstreamWorkerMetadata({self.rank: [message]} if message else {}, tiers, kept)

    def _take_tier_messages(self) -> list[tuple[str, bytes]]:
        messages: list[tuple[str, bytes]] = []
        while (
            len(messages) < TIER_MESSAGES_MAX
            and (message := self.store.take_tier_message()) is not None
        ):
            messages.append(message)
        return messages

    def counts(self) -> dict[str, int] | None:
        """Tell now and then what was counted since it was last told, if anything was."""
        now = time.monotonic()
        if now < self._stats_due:
            return None
        self._stats_due = now + self._stats_interval_s
        totals = self.store.counters()
        with self._lock:
            totals.update(self._counts)
        news = {
            name: total - self._told.get(name, 0)
            for name, total in totals.items()
            if total != self._told.get(name, 0)
        }
        self._told = totals
        return news or None

    def release(self) -> None:
        """Let go of the caches: what was loaded goes with their memory, what is loaded fails."""
        self.blocks.release()
        with self._lock:
            for ended in self._ended:
                ended.whole = True

    def close(self) -> None:
        """End the threads; what is being saved is finished, what is being loaded fails."""
        self._closing = True
        self._saves.put(None)
        self._threads[0].join()
        self.store.close()
        self._threads[1].join()

    def _give_up_late_ones(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job = self._deadlines.popleft()
            # Whoever takes a load out of the map ends it; the loader does so before it touches
            # the cache.
            under_way = self.under_way.pop(job, None)
            if under_way is not None:
                logger.warning(
                    "slipstream: the store did not end the load of request %s; it is recomputed; "
                    "please report this with the log",
                    under_way.load.request_id,
                )
                self._count("load_failed_blocks.abandoned", len(under_way.load.blocks))
                with self._lock:
                    self._ended.append(Ended(under_way.load.request_id, [], whole=True))
                    self.loading -= 1

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    # The saver's thread.

    def _save_all(self) -> None:
        while (item := self._saves.get()) is not None:
            self._store(*item)
            # The device's memory is not kept while there is nothing to do.
            del item

    def _store(self, keys: list[bytes], gathered: torch.Tensor, ready: Any, resets: int) -> None:
        size = gathered.numel()
        try:
            host = self.blocks.fetch(gathered, ready)
            stored = 0
            with self._putting:
                # Blocks from before a reset are of another model, for all one knows.
                if resets == self._resets:
                    stored = self.store.put(keys, memoryview(host.numpy()))
                else:
                    self._count("save_dropped_blocks", len(keys))
            self._count("saved_blocks", stored)
            # Where some could not be stored, as if all blocks were of one size.
            self._count("saved_bytes", size * stored // len(keys))
        # A save that fails, for whatever reason, must not end all others.
        except Exception:
            logger.exception("slipstream: %d blocks could not be stored", len(keys))
            self._count("save_failed_blocks", len(keys))
        finally:
            with self._lock:
                self.saving_bytes -= size
                self.moved.notify_all()

    # The loader's thread.

    def _load_all(self) -> None:
        while not (self._closing and not self.under_way):
            for job, failed, reason in self.store.wait(WAIT_S):
                self._end(job, set(failed), reason or "unnamed")
            for text in take_warnings():
                logger.warning("slipstream: %s", text)
            if self._closing:
                # The store was closed, and has failed what was under way.
                self.under_way.clear()

    def _end(self, job: int, failed: set[int], reason: str) -> None:
        under_way = self.under_way.pop(job, None)
        if under_way is None:
            with self._lock:
                self._counts["load_unexpected_ends"] += 1
                self.moved.notify_all()
            return
        load, blocks = under_way.load, under_way.cache
        counts = [count for _, count in load.parts]
        failed &= set(range(len(load.blocks)))
        kept = None
        if failed and not self._takes_parts():
            kept, good = self._kept_of(load, failed), []
        else:
            # Without its first block nothing of a load is of use, and the request must not ask for
            # it again: a block that is damaged for good would be asked for without end.
            good = [] if 0 in failed else [i for i in range(len(load.blocks)) if i not in failed]
        if good and under_way.resets == self._resets:
            try:
                rows = under_way.staging
                if failed:
                    counts = [len(good)]
                    rows = rows.view(len(load.blocks), -1)[good].view(-1)
                ends = list(accumulate(counts, initial=0))
                ids = [load.blocks[i] for i in good]
                parts = [ids[start:end] for start, end in pairwise(ends)]
                blocks.scatter(parts, rows, under_way.after)
            # Whatever goes wrong with a device's copy, the request is recomputed.
            except Exception:
                logger.exception("slipstream: loaded blocks could not be put into the KV cache")
                good, reason = [], "copy"
        with self._lock:
            # A reset may have come while the blocks were copied.
            if under_way.resets != self._resets:
                good, reason, kept = [], "reset", None
            elif good and blocks.is_released:
                good, reason = [], "sleep"
            lost = [block for i, block in enumerate(load.blocks) if not good or i in failed]
            self._ended.append(Ended(load.request_id, lost, whole=not good, kept=kept))
            self.loading -= 1
            self.moved.notify_all()
            self._counts["loaded_blocks"] += len(good)
            self._counts["loaded_bytes"] += blocks.size(counts) if good else 0
            if lost:
                self._counts[f"load_failed_blocks.{reason}"] += len(lost)
        if lost:
            logger.warning(
                "slipstream: %d of %d blocks of request %s did not come and are recomputed (%s)%s",
                len(lost),
                len(load.blocks),
                load.request_id,
                reason,
                f"; {REMEDIES[reason]}" if reason in REMEDIES else "",
            )

    def _takes_parts(self) -> bool:
        """Whether vLLM can go on from the first block of a load that failed.

        Of several groups it takes no blocks that failed; and what a window reads at an earlier
        block was not loaded (vLLM 0.33, `Scheduler._handle_invalid_blocks`).
        """
        only, *others = self.blocks.groups
        return not others and (only.group is None or only.group.kind == "full")

    def _kept_of(self, load: Load, failed: set[int]) -> int:
        """Return the tokens before the first block that did not come."""
        tokens, at = [], 0
        for (first, count), blocks in zip(load.parts, self.blocks.groups, strict=True):
            assert blocks.group is not None, "layers without groups take parts of loads"
            places = [first + i - at for i in failed if at <= i < at + count]
            tokens += [place * blocks.group.block_size for place in places]
            at += count
        return min(tokens)
