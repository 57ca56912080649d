"""What the two halves tell each other in a step."""

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
    """Blocks of one request that are to be loaded."""

    request_id: str
    keys: list[bytes]
    """One key a block, group by group in prompt order."""
    blocks: list[int]
    """Where they go, as vLLM's block ids."""
    sources: list[str]
    """Who is said to hold each key; the empty name is this engine."""
    parts: list[tuple[int, int]]
    """For each group, the place of its first block in the prompt, and how many there are."""


SlipstreamMetadata = StepMetadata
"""What the scheduler half tells the workers in one step: keys and ids of the blocks to save in flat
buffers, and the `Load`s and cancels of the few steps that have some."""

KVConnectorMetadata.register(SlipstreamMetadata)

NOTHING = SlipstreamMetadata()
"""Shared by all steps that have nothing to tell; it cannot be changed."""


@dataclass
class SlipstreamWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers tell the scheduler half in one step."""

    stored: dict[int, list[bytes]] = field(default_factory=dict)
    """By rank, in order: what changed in the set of keys that its store holds."""
    tiers: list[tuple[str, bytes]] = field(default_factory=list)
    """Of rank 0, in order: what changed in one of its tiers, where KV events are on."""
    kept: dict[str, int] = field(default_factory=dict)
    """By request whose load failed, where layers are of several groups: the tokens before the
    first block that did not come."""

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
        return SlipstreamWorkerMetadata(stored, self.tiers + other.tiers, kept)


@dataclass
class SlipstreamHandshake(KVConnectorHandshakeMetadata):
    """What a worker's start tells the scheduler half."""

    address: str
    """Where the rank's store listens for peers; empty if it does not."""
    identity: dict[str, str]
    """What a peer must have in common; see `slipstream.vllm.identity`."""
