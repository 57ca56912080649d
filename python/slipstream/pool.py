"""Follows the keys of a block pool change by change.

vLLM offers no listener for its `BlockPool`. Blocks that a request has filled get their keys in
`cache_full_blocks`, one call per request: `FilledFeed` wraps it, which suffices for saving.
`PoolFeed` keeps an index of all keys: every key is added by `_insert_block_hash` and removed by
`_remove_cached_block_hashes`, and `reset_prefix_cache` removes all of them (vLLM 0.33,
`vllm/v1/core/block_pool.py`). This module does not import vLLM: any object with these methods is
accepted.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from types import SimpleNamespace
from typing import Any

from slipstream._native import FilledBlocks, KeyMirror, KeySet, StepMetadata

logger = logging.getLogger("slipstream.vllm")

FILLS = "fills"
HOOKS = "hooks"
EVENTS = "events"
RESYNC = "resync"
NOTHING = "nothing"

CHECK_STEPS = 256
"""Steps between comparisons of the number of keys with the pool's, which reads two numbers."""

RESYNC_STEPS = 256
"""Without hooks, all keys are compared once per this many steps. At 0.1 ms per 1,000 keys and 7 ms
per step this takes about 0.1 % of the time for 16,000 keys, and readers are at most 2 s behind."""

LATE_MAX = 64
"""Maximum keys found by a comparison that one step reports as new; 16,384 between comparisons. The
copies of this many blocks in one step are negligible compared with its forward pass."""

Log = list[bytes | int | None]
"""Changes in order: a key and the id of the block that now holds it, or that id's complement
(`~id`) if the block no longer holds it; `None` if all keys were dropped."""

NO_KEYS: tuple[list[bytes], list[int]] = ([], [])
"""Immutable."""

Step = tuple[bytes | None, list[bytes], list[int]]
"""The message for followers, if any; new keys, and the blocks that hold them."""


FILL_PARAMETERS = (
    "request",
    "blocks",
    "num_cached_blocks",
    "num_full_blocks",
    "block_size",
    "kv_cache_group_id",
    "block_mask",
)
"""The parameters of `cache_full_blocks`, in order."""

PARAMETERS = {
    "_insert_block_hash": ("block_hash_with_group_id", "block", "num_tokens"),
    "_remove_cached_block_hashes": ("block",),
}
"""The parameters of the hooked methods: callers may use their names."""


class HookError(Exception):
    """The pool cannot be followed change by change; the text gives the reason."""


def install_hooks(pool: Any, log: Log) -> None:
    """Record the pool's changes in `log`, in the format of `KeySet.apply`.

    Raises
    ------
    HookError
        If the pool lacks one of the methods, or does not allow replacing them.
    """
    try:
        insert = pool._insert_block_hash
        remove = pool._remove_cached_block_hashes
        reset = pool.reset_prefix_cache
    except AttributeError as error:
        raise HookError(str(error)) from error
    for name, method in (("_insert_block_hash", insert), ("_remove_cached_block_hashes", remove)):
        if tuple(inspect.signature(method).parameters) != PARAMETERS[name]:
            raise HookError(f"`{name}{inspect.signature(method)}` has unknown arguments")
    append = log.append

    # Called once per block on the engine's critical path: two appends, and no object that the
    # garbage collector tracks.
    def insert_and_log(
        block_hash_with_group_id: bytes, block: Any, num_tokens: int | None = None
    ) -> None:
        insert(block_hash_with_group_id, block, num_tokens)
        append(block_hash_with_group_id)
        append(block.block_id)

    def remove_and_log(block: Any) -> list[bytes]:
        removed: list[bytes] = remove(block)
        if removed:
            # The list itself is not kept: that many more objects would make the garbage collector
            # run more often.
            for key in removed:
                append(key)
                append(~block.block_id)
        return removed

    def reset_and_log(*args: Any, **kwargs: Any) -> bool:
        done: bool = reset(*args, **kwargs)
        if done:
            # Earlier entries are void, and may be many.
            log.clear()
            append(None)
        return done

    try:
        pool._insert_block_hash = insert_and_log
        pool._remove_cached_block_hashes = remove_and_log
        pool.reset_prefix_cache = reset_and_log
    except (AttributeError, TypeError) as error:
        raise HookError(str(error)) from error


Fill = Callable[[Any, list[Any], int, int, int, int, list[bool] | None], None]


def fill_method(pool: Any) -> Fill:
    """Return the pool's method that gives filled blocks their keys.

    Raises
    ------
    HookError
        If it has none with the known parameters.
    """
    try:
        method: Fill = pool.cache_full_blocks
    except AttributeError as error:
        raise HookError(str(error)) from error
    parameters = inspect.signature(method).parameters
    if tuple(parameters) != FILL_PARAMETERS:
        raise HookError(f"`cache_full_blocks` has unknown arguments: {[*parameters]}")
    return method


def set_fill_method(pool: Any, method: Fill) -> None:
    """Replace a method of the pool."""
    try:
        pool.cache_full_blocks = method
    except (AttributeError, TypeError) as error:
        raise HookError(str(error)) from error


def install_fill_hook(pool: Any, log: list[Any]) -> None:
    """Append the blocks that get a key to `log`.

    Raises
    ------
    HookError
        If the pool lacks the method, or does not allow replacing it.
    """
    cache = fill_method(pool)
    append, extend = log.append, log.extend

    # Called once per request that has filled a block, on the engine's critical path.
    def cache_and_log(
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        cache(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        if num_full_blocks - num_cached_blocks == 1:
            append(blocks[num_cached_blocks])
        else:
            extend(blocks[num_cached_blocks:num_full_blocks])

    set_fill_method(pool, cache_and_log)


def install_run_hook(pool: Any, runs: "deque[Run]") -> None:
    """Append to `runs` the tokens, with their request, of blocks that get a key.

    Raises
    ------
    HookError
        If the pool lacks the method, or does not allow replacing it.
    """
    cache = fill_method(pool)

    def cache_and_note(
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        cache(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        if num_full_blocks > num_cached_blocks:
            runs.append(
                (request, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id)
            )

    set_fill_method(pool, cache_and_note)


Run = tuple[Any, int, int, int, int]
"""A request, the first block of a run and the one after its last, their tokens, and their group."""


class FilledFeed:
    """Follows the filled blocks of a pool, which suffices for saving them, and keeps no index.

    `stored` has the keys that each rank's store holds: blocks that all of them hold are not saved
    again. `tokens` is the size of each group's blocks if vLLM caches some partial ones, else empty.
    `slow` builds the steps that have other work than saving blocks, and those that preempt requests
    `by_priority`.

    The blocks that a step saves have their content once the forward pass of that step has run. A
    key enters the pool in the step whose pass computes its block, when the output of that pass is
    taken (if steps are scheduled ahead of outputs), or when a load has ended. A block that is given
    to another request loses its key before. A block is saved if it has a key when the step has been
    planned.

    Raises
    ------
    HookError
        If the pool lacks a required method.
    """

    mode = FILLS
    reason = ""

    def __init__(
        self,
        pool: Any,
        *,
        stored: list[KeyMirror],
        tokens: Sequence[int],
        slow: Callable[[Any], StepMetadata],
        by_priority: bool = False,
        saves: bool = True,
    ) -> None:
        self_test_fills(pool)
        self._pool = pool
        self._log: list[Any] = []
        self._blocks = FilledBlocks(self._log, pool, stored, list(tokens), slow, by_priority)
        self.wants_new = saves
        self.uncomputed_total = 0
        """Blocks whose keys were dropped: one step planned and preempted their request."""
        self.build = self._blocks.build
        self.build_with = self._blocks.build_with
        if saves:
            install_fill_hook(pool, self._log)
        logger.info("slipstream: follows the blocks that are filled by a hook")

    def call_slow(self, pending: bool) -> None:
        """Let `slow` build all steps until this is set to false."""
        self._blocks.pending = pending

    def save_again(self, blocks: Iterable[Any]) -> None:
        """Save these cached blocks with the next step, unless every rank's store has them.

        The caller's request holds them, so their content stays.
        """
        self._log.extend(blocks)

    @property
    def log_errors_total(self) -> int:
        """Number of steps whose blocks could not be read."""
        return self._blocks.errors_total

    def drop_uncomputed(self, computed: Set[int]) -> None:
        """Remove the keys of the step's blocks that no pass computes from the pool.

        `computed` are the blocks that are whole once the step's forward pass is done. If vLLM
        schedules by priority, it may plan a request and preempt it in one step, and leaves the keys
        of its blocks in the pool. Another request that hits them would read other tokens' KV.
        """
        uncomputed = {block.block_id for block in self._log} - computed
        blocks = self._pool.blocks
        self.uncomputed_total += sum(blocks[n].block_hash is not None for n in uncomputed)
        self._pool.evict_blocks(uncomputed)


def cached(pool: Any) -> dict[bytes, Any]:
    """Return the pool's own map from key to block, or to blocks by id."""
    held: dict[bytes, Any] = pool.cached_block_hash_to_block._cache
    return held


def block_ids(value: Any) -> Iterable[int]:
    """Return the ids of the blocks in a value of the pool's map."""
    return value if isinstance(value, dict) else (value.block_id,)


class PoolFeed:
    """Keeps a `KeySet` equal to the keys of a pool.

    `mode` is one of: `hooks` (each change is seen), `events` (the pool's KV events are read, at 20
    times the cost), `resync` (all keys are compared periodically) or `nothing` (the pool's keys
    cannot be read). `reason` explains why no better mode is possible. `keys_max` bounds the keys of
    one message. With `wants_new`, `step` returns the new keys and their blocks.

    The blocks that `step` reports as new have their content once the forward pass of that step has
    run, for these reasons:

    - A key enters the pool in the step whose pass computes its block, or when a load has ended.
    - A block that is given to another request loses its key before. A key that is in the pool's
      map when a step has been planned therefore names a block that no earlier step has overwritten.
      Keys from events and comparisons are looked up in that map in the step that reports them.
    - A request may be planned and then preempted in one step if vLLM schedules by priority
      (`by_priority`). Its keys of that step are in the map, and no pass computes their blocks.
      The caller then passes the computed blocks to `step`, which drops the other blocks' keys from
      the pool, and does not report them. Comparisons see them too late, so in that mode no key is
      reported as new.

    Source: vLLM 0.33, `Scheduler.schedule` and `BlockPool`.
    """

    def __init__(
        self,
        pool: Any,
        *,
        hooks: bool = True,
        keys_max: int = 2048,
        wants_new: bool = False,
        by_priority: bool = False,
    ) -> None:
        self.keys = KeySet(len(pool.blocks))
        self.wants_new = wants_new
        self.uncomputed_total = 0
        """Blocks whose keys were dropped: one step planned and preempted their request."""
        self._by_priority = by_priority
        self.mode = HOOKS
        self.reason = ""
        self.resyncs_total = 0
        self.log_errors_total = 0
        self._pool = pool
        self._log: Log = []
        self._steps = 0
        self._keys_max = keys_max
        try:
            if not hooks:
                raise HookError("switched off by the configuration")
            self_test(pool)
            install_hooks(pool, self._log)
        except HookError as error:
            self.mode, self.reason = EVENTS, str(error)
        self._queue: list[Any] = []
        self._queue_read = 0
        # State of comparisons: the keys of the last one, and keys to report as new in later steps.
        self._known: set[bytes] = set()
        self._late: deque[bytes] = deque()
        try:
            self._map = pool.cached_block_hash_to_block
            cached(pool)
        except AttributeError as error:
            self._follow_nothing(f"{self.reason}; {error}")
            return
        if self.mode == EVENTS:
            if getattr(pool, "enable_kv_cache_events", False):
                # Earlier keys are in the pool's map.
                self._queue = pool.kv_event_queue
                self._queue_read = len(self._queue)
                logger.warning(
                    "slipstream: DEGRADED: reads KV events, because the block pool cannot be "
                    "hooked (%s); use a vLLM version that docs/connector.md lists",
                    self.reason,
                )
            else:
                self._compare_now_and_then(f"{self.reason}; KV events are off")
        self._resync()
        if self.mode == HOOKS:
            logger.info("slipstream: follows the block pool by hooks, %d keys", len(self.keys))

    def _compare_now_and_then(self, reason: str) -> None:
        self.mode, self.reason = RESYNC, reason
        if self._by_priority:
            self.wants_new = False
        logger.warning(
            "slipstream: DEGRADED: compares all cached keys every %d steps and %s, because the "
            "block pool cannot be followed (%s); use a vLLM version that docs/connector.md lists",
            RESYNC_STEPS,
            "saves no blocks, as with priority scheduling it cannot know which were computed"
            if self._by_priority
            else "saves blocks that late",
            reason,
        )

    def _follow_nothing(self, reason: str) -> None:
        self.mode, self.reason, self.wants_new = NOTHING, reason, False
        logger.warning(
            "slipstream: DEGRADED: saves no blocks and only loads them, because the keys of the "
            "block pool cannot be read (%s); use a vLLM version that docs/connector.md lists",
            reason,
        )

    def step(self, computed: Set[int] | None = None) -> Step | None:
        """Return the changes since the last step. `None` if there are none.

        `computed` is given if the step has preempted requests that it may have planned before:
        the blocks that are whole once its forward pass is done.
        """
        self._steps += 1
        log = self._log
        new: tuple[list[bytes], list[int]] = NO_KEYS
        if self.mode is NOTHING:
            return None
        if self.mode is HOOKS:
            if self._map is not self._pool.cached_block_hash_to_block:
                self._map = self._pool.cached_block_hash_to_block
                if None not in log:
                    self._start_over("the block pool's map was replaced unseen")
        elif self.mode == EVENTS:
            new = self._read_events()
        elif self._steps % RESYNC_STEPS == 0:
            self._compare()
        if self.mode == RESYNC and self._late:
            new = self._tell_late()
        uncomputed: Set[int] = set()
        if computed is not None and self.mode != RESYNC:
            uncomputed = self._stored_blocks(new[0]) - computed
        try:
            if not log:
                message = self.keys.take_message(self._keys_max)
            elif self.wants_new and self.mode is HOOKS:
                message, keys, blocks = self.keys.step_with_new(log, self._keys_max)
                new = keys, blocks
            else:
                message = self.keys.step(log, self._keys_max)
        except (ValueError, TypeError) as error:
            self._start_over(str(error))
            return None
        if uncomputed:
            new = self._drop(uncomputed, new)
        if self._steps % CHECK_STEPS == 0 and self.mode != RESYNC:
            held, there = len(self.keys), len(cached(self._pool))
            # Keys that were just dropped are reported in the next step.
            if held != there and not uncomputed:
                self._start_over(f"{held} keys are known of the {there} in the block pool")
        return None if message is None and not new[0] else (message, new[0], new[1])

    def _stored_blocks(self, keys: list[bytes]) -> set[int]:
        """Return the blocks that got a key in this step, or all that hold these keys."""
        if self.mode is HOOKS:
            return {entry for entry in self._log if isinstance(entry, int) and entry >= 0}
        held = cached(self._pool)
        return {block_id for key in keys for block_id in block_ids(held[key])}

    def _drop(
        self, uncomputed: Set[int], new: tuple[list[bytes], list[int]]
    ) -> tuple[list[bytes], list[int]]:
        """Remove the keys of blocks that no pass computes from the pool and from the new ones."""
        blocks = self._pool.blocks
        self.uncomputed_total += sum(blocks[n].block_hash is not None for n in uncomputed)
        self._pool.evict_blocks(uncomputed)
        good = [pair for pair in zip(*new, strict=True) if pair[1] not in uncomputed]
        return [key for key, _ in good], [block for _, block in good]

    def flush(self) -> None:
        """Update `keys` without building a message."""
        if self.mode == EVENTS:
            self._read_events()
        if self.mode == RESYNC:
            self._compare()
        self.keys.apply(self._log)

    def _start_over(self, why: str) -> None:
        self.log_errors_total += 1
        logger.warning("slipstream: %s; resynchronizing", why)
        self._resync()

    def _read_events(self) -> tuple[list[bytes], list[int]]:
        """Read the pool's KV events since the last step; return new keys and blocks.

        vLLM takes the queue between steps by replacing it with a new list, so the rest of the
        old one is read first. The pool's map shows whether another block still holds a removed key.
        """
        events = self._queue[self._queue_read :]
        if self._pool.kv_event_queue is not self._queue:
            self._queue = self._pool.kv_event_queue
            events += self._queue
        self._queue_read = len(self._queue)
        keys: list[bytes] = []
        blocks: list[int] = []
        one_block = self._pool.cached_block_hash_to_block.get_one_block
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._log.append(None)
                keys, blocks = [], []
                continue
            # Connectors add their own events, of other media, when the queue is taken.
            if kind not in ("BlockStored", "BlockRemoved") or event.medium != self._pool.medium:
                continue
            group = (event.group_idx or 0).to_bytes(4, "big")
            for block_hash in event.block_hashes:
                if not isinstance(block_hash, bytes):
                    self._compare_now_and_then(
                        f"{self.reason}; KV events have 64 bits of each hash only, start vLLM with "
                        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0"
                    )
                    self._resync()
                    return [], []
                key = block_hash + group
                block = one_block(key)
                # One holder stands for all: the event does not name the block.
                self._log += (key, 0 if block is not None else ~0)
                if kind == "BlockStored" and block is not None and self.wants_new:
                    keys.append(key)
                    blocks.append(block.block_id)
        return keys, blocks

    def _resync(self) -> None:
        """Read all keys of the pool again. Costs O(keys); a consumer gets a new snapshot."""
        self.resyncs_total += 1
        self._log.clear()
        fresh: Log = [None]
        for key, value in cached(self._pool).items():
            if self.mode == HOOKS:
                for block_id in block_ids(value):
                    fresh += (key, block_id)
            else:
                fresh += (key, 0)
        if self.mode == RESYNC:
            self._known = set(cached(self._pool))
            self._late.clear()
        self.keys.apply(fresh)

    def _compare(self) -> None:
        """Log the changes since the last comparison. Costs O(keys)."""
        self.resyncs_total += 1
        there = cached(self._pool)
        for key in self._known - there.keys():
            self._log += (key, ~0)
        # In the pool's order, which is that of prompts: a prefix is saved before its continuation.
        new = [key for key in there if key not in self._known]
        for key in new:
            self._log += (key, 0)
        self._known = set(there)
        if self.wants_new:
            self._late = deque(dict.fromkeys((*(k for k in self._late if k in there), *new)))

    def _tell_late(self) -> tuple[list[bytes], list[int]]:
        """Return keys found by a comparison that are still in the pool, and their blocks."""
        one_block = self._pool.cached_block_hash_to_block.get_one_block
        keys, blocks = [], []
        for _ in range(min(LATE_MAX, len(self._late))):
            key = self._late.popleft()
            # The key may have been removed, or be held by another block than when it was found.
            block = one_block(key)
            if block is not None:
                keys.append(key)
                blocks.append(block.block_id)
        return keys, blocks


def self_test_fills(pool: Any) -> None:
    """Check on a small pool of the same class that its filled blocks match its map.

    Raises
    ------
    HookError
        If they do not.
    """
    try:
        probe = type(pool)(num_gpu_blocks=6, enable_caching=True, hash_block_size=16)
        log: list[Any] = []
        install_fill_hook(probe, log)
        feed = FilledBlocks(log, probe, [KeyMirror()], [], None, False)
        hashes = [bytes([n]) * 32 for n in (1, 2, 3)]
        request = SimpleNamespace(block_hashes=hashes)
        blocks = probe.get_new_blocks(4)

        def fill(held: list[Any], first: int, end: int) -> None:
            probe.cache_full_blocks(
                request=request,
                blocks=held,
                num_cached_blocks=first,
                num_full_blocks=end,
                block_size=16,
                kv_cache_group_id=0,
                block_mask=None,
            )

        def check(expected: list[tuple[int, Any]], what: str) -> None:
            meta = feed.build(None)
            keys = [hashes[at] + bytes(4) for at, _ in expected]
            ids = [block.block_id for _, block in expected]
            if feed.errors_total or (meta.save_keys, meta.save_blocks) != (keys, ids):
                raise HookError(f"the self-test saw wrong blocks after {what}")
            if not set(keys) <= set(cached(probe)):
                raise HookError("the self-test's keys did not reach the pool's map")

        fill(blocks[:3], 0, 2)
        check([(0, blocks[0]), (1, blocks[1])], "two blocks were filled")
        fill([blocks[3]], 0, 1)
        check([], "a second block of one content was filled")
        fill(blocks[:3], 2, 3)
        probe.evict_blocks({blocks[2].block_id})
        check([], "an eviction")
        probe.free_blocks(blocks)
        fill(blocks[:3], 2, 3)
        probe.reset_prefix_cache()
        check([], "a flush")
    except HookError:
        raise
    # As above: any exception here means that the pool of another vLLM version is unsupported.
    except Exception as error:
        raise HookError(f"the self-test failed: {type(error).__name__}: {error}") from error


def self_test(pool: Any) -> None:
    """Check on a small pool of the same class that the hooks see the changes of its map.

    Raises
    ------
    HookError
        If they do not.
    """
    try:
        probe = type(pool)(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
        log: Log = []
        install_hooks(probe, log)
        keys = KeySet()
        first, second = (bytes([n]) * 36 for n in (1, 2))
        blocks = probe.get_new_blocks(2)

        def check(what: str) -> None:
            keys.apply(log)
            if set(keys.keys()) != set(cached(probe)):
                raise HookError(f"the self-test saw a wrong set of keys after {what}")

        probe._insert_block_hash(first, blocks[0], num_tokens=16)
        probe._insert_block_hash(first, blocks[1], num_tokens=16)
        check("two blocks of one key")
        if len(keys) != 1:
            raise HookError("the self-test's key did not reach the pool's map")
        probe._maybe_evict_cached_block(blocks[0])
        check("one of two blocks was evicted")
        probe._insert_block_hash(second, blocks[0], num_tokens=16)
        check("a second key")
        probe._maybe_evict_cached_block(blocks[1])
        check("an eviction")
        probe.free_blocks(blocks)
        probe.reset_prefix_cache()
        check("a flush")
        if len(keys) != 0:
            raise HookError("the self-test's flush was not seen")
    except HookError:
        raise
    # Any exception here means that the pool of another vLLM version is unsupported.
    except Exception as error:
        raise HookError(f"the self-test failed: {type(error).__name__}: {error}") from error
