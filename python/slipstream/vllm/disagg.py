"""vLLM's protocol of disaggregated prefill: `kv_transfer_params` of requests and answers.

A proxy sends a prompt to a prefill engine with `do_remote_decode`, and passes the parameters of its
answer to a decode engine, where they have `do_remote_prefill`. Blocks are found by their keys, as
all blocks of peers are; the parameters state how many there are, so that the decode engine can wait
for them instead of computing what is on its way.

Source: vLLM 0.33, `kv_connector/v1/nixl/pull_scheduler.py` (`request_finished`), whose names of
fields are used where the meaning is the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Statuses of requests whose prompt is computed."""


def params_of(request: Any, part: str) -> dict[str, Any] | None:
    """Return the request's `kv_transfer_params` if they ask for `part`."""
    params: dict[str, Any] | None = getattr(request, "kv_transfer_params", None)
    return params if params and params.get(part) else None


@dataclass(frozen=True)
class Server:
    """The engine, as the decode engines name it."""

    engine: str
    address: str
    """Where its first rank serves blocks, as `Store.address` returns it."""
    tensor_parallel: int
    hash_tokens: int
    """Tokens per block hash."""

    def offer(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Return the parameters for the decode engine; `None` if it would find no block."""
        if request.status.name not in FINISHED:
            return None
        # The token that the prefill engine generated is not computed.
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        blocks = min(tokens // self.hash_tokens, len(request.block_hashes))
        if blocks == 0:
            return None
        scheme, _, rest = self.address.partition("://")
        host, _, port = rest.rpartition(":")
        has_port = scheme != "unix" and port.isdecimal()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": request.request_id,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_host": host if has_port else self.address,
            "remote_port": int(port) if has_port else 0,
            "remote_num_tokens": blocks * self.hash_tokens,
            "remote_block_key": request.block_hashes[blocks - 1].hex(),
            "tp_size": self.tensor_parallel,
        }


class RemotePrompts:
    """Prompts that other engines have computed, and whose blocks are on their way."""

    def __init__(
        self, *, hash_tokens: int, tensor_parallel: int, wait_s: float, counts: Counter[str]
    ) -> None:
        self._hash_tokens = hash_tokens
        self._tensor_parallel = tensor_parallel
        self._wait_s = wait_s
        self._counts = counts
        # By request: tokens that are to arrive, the end of the wait (`time.monotonic`), and whether
        # they had arrived at the last look-up.
        self._waiting: dict[str, tuple[int, float, bool]] = {}

    def waits(self, request: Any, found: int, end: int, *, has_peers: bool) -> bool:
        """Whether the request waits for blocks beyond `found` tokens, of which `end` are usable."""
        params = params_of(request, "do_remote_prefill")
        if params is None:
            return False
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            tokens, unusable = self._expected(params, request.block_hashes)
            if unusable is None and not has_peers:
                unusable = "no_peers"
            if unusable is not None:
                # It is looked up and computed like any other request.
                params["do_remote_prefill"] = False
                self._counts[f"remote_prefills.{unusable}"] += 1
                return False
            waiting = tokens, time.monotonic() + self._wait_s, False
        tokens, until, _ = waiting
        arrived = found >= min(tokens, end)
        self._waiting[request.request_id] = tokens, until, arrived
        return not arrived and time.monotonic() < until

    def _expected(
        self, params: Mapping[str, Any], hashes: Sequence[bytes]
    ) -> tuple[int, str | None]:
        """Return the tokens that the prefill engine keeps, or why they cannot be used."""
        tokens, key = params.get("remote_num_tokens"), params.get("remote_block_key")
        if type(tokens) is not int or not isinstance(key, str):
            return 0, "foreign"  # of another connector
        if params.get("tp_size") != self._tensor_parallel:
            return 0, "parallelism"
        last = tokens // self._hash_tokens - 1
        if not 0 <= last < len(hashes) or hashes[last].hex() != key:
            return 0, "keys"
        return tokens, None

    def placed(self, request: Any) -> None:
        """Count the end of the wait: the request has got its blocks."""
        waiting = self._waiting.pop(request.request_id, None)
        if waiting is None:
            return
        # A preempted request does not wait again.
        request.kv_transfer_params["do_remote_prefill"] = False
        outcome = "arrived" if waiting[2] else "late"
        self._counts[f"remote_prefills.{outcome}"] += 1

    def finished(self, request: Any) -> None:
        """Remove the request."""
        self._waiting.pop(request.request_id, None)
