"""Messages between the two halves in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from slipstream._native import StepMetadata


@dataclass(slots=True)
class Load:
    """Blocks of one request to load."""

    request_id: str
    keys: list[bytes]
    """One key per block, group by group in prompt order."""
    blocks: list[int]
    """Their destinations, as vLLM's block ids."""
    sources: list[str]
    """The holder of each key; the empty name is this engine."""
    parts: list[tuple[int, int]]
    """For each group of the store, the index of its first block in the prompt, and the number of
    blocks."""
    in_step: bool = False
    """Whether the forward pass of this step reads the blocks, and waits for them layer by layer."""


SlipstreamMetadata = StepMetadata
"""The message of the scheduler half to the workers in one step: keys and ids of the blocks to save
in flat buffers, and the `Load`s and cancels of the few steps that have some."""

KVConnectorMetadata.register(SlipstreamMetadata)

NOTHING = SlipstreamMetadata()
"""Shared by all empty steps; immutable."""


@dataclass
class SlipstreamWorkerMetadata(KVConnectorWorkerMetadata):
    """The message of the workers to the scheduler half in one step."""

    stored: dict[int, list[bytes]] = field(default_factory=dict)
    """By rank, in order: changes in the set of keys that its store holds."""
    tiers: list[tuple[str, bytes]] = field(default_factory=list)
    """Of rank 0, in order: changes in one of its tiers, if KV events are on."""
    kept: dict[str, int] = field(default_factory=dict)
    """By request whose load failed, if there are several groups: the tokens before the first
    missing block."""
    lost: list[int] = field(default_factory=list)
    """Blocks that loads within the step have not filled."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the messages of several ranks."""
        if not isinstance(other, SlipstreamWorkerMetadata):
            raise TypeError(f"{type(other).__name__} is not of slipstream's connector")
        stored = {rank: list(messages) for rank, messages in self.stored.items()}
        for rank, messages in other.stored.items():
            stored.setdefault(rank, []).extend(messages)
        kept = dict(self.kept)
        for name, tokens in other.kept.items():
            kept[name] = min(tokens, kept.get(name, tokens))
        return SlipstreamWorkerMetadata(
            stored, self.tiers + other.tiers, kept, self.lost + other.lost
        )


@dataclass
class SlipstreamHandshake(KVConnectorHandshakeMetadata):
    """The message of a worker's start to the scheduler half."""

    address: str
    """The address at which the rank's store listens for peers; empty if it does not."""
    identity: dict[str, str]
    """Properties that peers must share; see `slipstream.vllm.identity`."""
    stored: list[bytes] = field(default_factory=list)
    """Messages with the keys that the rank's store holds at its start, such as its disk's."""
