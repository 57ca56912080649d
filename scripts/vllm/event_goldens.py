"""Write the bytes that vLLM's KV events and Dynamo's forward-pass metrics have on the wire.

scripts/vllm/event_goldens.py

Encodes a few messages with the classes of the two packages, and writes them as hexadecimal text to
crates/serve/events/tests/it/golden/. The Rust tests compare their own encoding with it and read it back
(crates/serve/events/tests/it/golden.rs), and python/tests/vllm/test_kv_events.py checks that the file is
still what the installed vLLM encodes.

Needs an environment with vLLM (scripts/vllm/env.sh) and `pip install --no-deps ai-dynamo==1.6.1`.
"""

from importlib import metadata
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parents[2] / "crates/serve/events/tests/it/golden"


def kv_batches() -> dict[str, bytes]:
    """Batches by name, as vLLM's publisher encodes them."""
    from vllm.distributed.kv_events import (
        MEDIUM_GPU,
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        KVEventBatch,
    )

    def stored(hashes, parent, tokens, extra_keys):
        # As `BlockPool` and `KVCacheManager.take_events` fill it for a model with one group.
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=2,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=None,
            extra_keys=extra_keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def removed(block_hash):
        return BlockRemoved(block_hashes=[block_hash], medium=MEDIUM_GPU, group_idx=0)

    def batch(rank, *events):
        # The publisher sets the rank.
        return KVEventBatch(ts=1763800000.25, events=list(events), data_parallel_rank=rank)

    full = BlockStored(
        block_hashes=[b"\x01" * 32, 7],
        parent_block_hash=b"\x02" * 32,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        lora_id=3,
        medium="STORAGE",
        lora_name="adapter",
        extra_keys=[("adapter", ("image", 128), ("image", -1)), ("salt", b"\x03" * 32)],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=4096,
        locality="REMOTE",
        ownership="disk",
        session_id="session-1",
        lookahead_token_ids=[[3], [5]],
    )
    gone = BlockRemoved(
        block_hashes=[b"\x01" * 32, 7],
        medium=None,
        group_idx=1,
        locality="LOCAL",
        ownership="disk",
    )
    batches = {
        "prompt": batch(0, stored([1, 2**64 - 1], None, [5, 127, 128, 151935], [None, None])),
        "answer": batch(3, stored([2**63], 200, [65535, 65536], [None])),
        "salt": batch(0, stored([1, 2], None, [5, 6, 7, 8], [("0000000000000032",), None])),
        "long": batch(
            0, stored(list(range(1, 41)), None, list(range(80)), [None] * 40), removed(2**32)
        ),
        "evicted": batch(1, removed(1), removed(70000), stored([9], 8, [0, 1], [None])),
        "cleared": batch(0, AllBlocksCleared()),
        "none": batch(65535),
        "fields": batch(0, full, gone),
    }
    return {name: msgspec.msgpack.encode(batch) for name, batch in batches.items()}


def passes() -> dict[str, bytes]:
    """Forward-pass metrics by name, as Dynamo's publisher encodes them."""
    from dynamo.common.forward_pass_metrics import (
        ForwardPassMetrics,
        QueuedRequestMetrics,
        ScheduledRequestMetrics,
        encode,
    )

    full = ForwardPassMetrics(
        worker_id="w7",
        dp_rank=3,
        counter_id=2**40,
        wall_time=0.0125,
        scheduled_requests=ScheduledRequestMetrics(
            num_prefill_requests=2,
            sum_prefill_tokens=8192,
            var_prefill_length=1024.5,
            sum_prefill_kv_tokens=70000,
            num_decode_requests=255,
            sum_decode_kv_tokens=2**33,
            var_decode_kv_tokens=0.0,
        ),
        queued_requests=QueuedRequestMetrics(
            num_prefill_requests=1,
            sum_prefill_tokens=128,
            var_prefill_length=0.0,
            num_decode_requests=3,
            sum_decode_kv_tokens=4096,
            var_decode_kv_tokens=2.25,
        ),
    )
    heartbeat = ForwardPassMetrics(worker_id="w7", counter_id=9)
    return {"pass": encode(full), "heartbeat": encode(heartbeat)}


def text(head: str, messages: dict[str, bytes]) -> str:
    """Messages as lines of name and hexadecimal bytes."""
    lines = [f"{name} {message.hex()}\n" for name, message in messages.items()]
    return f"# {head} Made by scripts/vllm/event_goldens.py.\n{''.join(lines)}"


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    vllm, dynamo = metadata.version("vllm"), metadata.version("ai-dynamo")
    head = f"KV event batches as vLLM {vllm} encodes them."
    (FOLDER / "vllm_kv_events.txt").write_text(text(head, kv_batches()))
    head = f"Forward-pass metrics as Dynamo {dynamo} encodes them."
    (FOLDER / "dynamo_fpm.txt").write_text(text(head, passes()))


if __name__ == "__main__":
    main()
