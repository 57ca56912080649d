"""KV events of blocks outside of the device, with their tokens and parents if known.

An indexer that rebuilds chains from tokens (a router in front of several engines) needs the tokens
of each block and the block before it. A store has only keys. Their tokens are recorded when the
pool gives a filled block its key, and read when the store has published the key.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

if TYPE_CHECKING:
    from slipstream.pool import Run

RUNS_MAX = 4096
"""Maximum runs of blocks that wait to be stored. A run keeps its request's tokens in memory."""

LINKS_MAX = 1 << 16
"""Maximum blocks whose tokens are kept, the latest ones: about 0.5 kB each."""


@dataclass(slots=True, eq=False)
class Link:
    """One block of a chain."""

    parent: bytes | None
    """The hash of the block before it; `None`: it is the first of the prompt."""
    tokens: array[int]
    extra_keys: tuple[Any, ...] | None
    """Inputs of its hash in addition to tokens: adapter, images, salt."""
    lora_id: int | None
    lora_name: str | None


class Chains:
    """The tokens and parents of the latest blocks, by key."""

    def __init__(self, runs: deque[Run], hash_tokens: int) -> None:
        self._runs = runs
        self._hash_tokens = hash_tokens
        self._links: OrderedDict[bytes, Link] = OrderedDict()

    def _read_runs(self) -> None:
        while self._runs:
            request, first, end, size, group = self._runs.popleft()
            # Same rule as in `slipstream._native.Groups`.
            hashes, step = request.block_hashes, size // self._hash_tokens
            suffix = group.to_bytes(4, "big")
            lora = request.lora_request
            for at in range(first, min(end, len(hashes) // step)):
                begin = at * size
                extra_keys, _ = generate_block_hash_extra_keys(request, begin, begin + size, 0)
                self._links[hashes[(at + 1) * step - 1] + suffix] = Link(
                    hashes[at * step - 1] if at else None,
                    array("I", request.all_token_ids[begin : begin + size]),
                    extra_keys,
                    lora.adapter_id if lora else None,
                    lora.name if lora else None,
                )
        while len(self._links) > LINKS_MAX:
            self._links.popitem(last=False)

    def stored_events(
        self, keys: list[bytes], size: int, medium: str, group: int | None
    ) -> list[BlockStored]:
        """Return the events for blocks of one group, one for each run of a chain.

        Blocks whose tokens are unknown come last, in an event without tokens and parent.
        """
        self._read_runs()
        events: list[BlockStored] = []
        unknown: list[bytes] = []
        run: list[tuple[bytes, Link]] = []
        for key in in_chains(keys, self._links):
            link = self._links.get(key)
            if link is None:
                unknown.append(key)
                continue
            if run and (run[-1][0][:-4] != link.parent or run[-1][1].lora_name != link.lora_name):
                events.append(run_event(run, size, medium, group))
                run = []
            run.append((key, link))
        if run:
            events.append(run_event(run, size, medium, group))
        if unknown:
            events.append(stored_event(unknown, None, [], size, medium, group))
        return events


def in_chains(keys: list[bytes], links: OrderedDict[bytes, Link]) -> list[bytes]:
    """Return the keys with each block before its successors, if both are present."""
    there, placed, ordered = set(keys), set[bytes](), list[bytes]()
    for key in keys:
        chain: list[bytes] = []
        while key in there and key not in placed:
            placed.add(key)
            chain.append(key)
            link = links.get(key)
            if link is None or link.parent is None:
                break
            key = link.parent + key[-4:]
        ordered += reversed(chain)
    return ordered


def external(block_hash: bytes) -> Any:
    """Return a block hash in the format of vLLM's KV events."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def run_event(
    run: list[tuple[bytes, Link]], size: int, medium: str, group: int | None
) -> BlockStored:
    """Return the event for consecutive blocks."""
    first = run[0][1]
    return stored_event(
        [key for key, _ in run],
        first.parent,
        [token for _, link in run for token in link.tokens],
        size,
        medium,
        group,
        extra_keys=to_event_extra_keys([link.extra_keys for _, link in run]),
        lora_id=first.lora_id,
        lora_name=first.lora_name,
    )


def stored_event(
    keys: list[bytes],
    parent: bytes | None,
    tokens: list[int],
    size: int,
    medium: str,
    group: int | None,
    *,
    extra_keys: list[tuple[Any, ...] | None] | None = None,
    lora_id: int | None = None,
    lora_name: str | None = None,
) -> BlockStored:
    """Return the event for blocks stored outside of the device."""
    return BlockStored(
        block_hashes=[external(key[:-4]) for key in keys],
        parent_block_hash=None if parent is None else external(parent),
        token_ids=tokens,
        block_size=size,
        lora_id=lora_id,
        medium=medium,
        lora_name=lora_name,
        extra_keys=extra_keys,
        group_idx=group,
    )


def removed_event(keys: list[bytes], medium: str, group: int | None) -> BlockRemoved:
    """Return the event for blocks that are no longer stored."""
    return BlockRemoved(
        block_hashes=[external(key[:-4]) for key in keys], medium=medium, group_idx=group
    )
