"""KV events and forward-pass metrics, as vLLM's consumers read and vLLM's engines write them.

`msgspec` structs declared as vLLM's decode what the server publishes over ZeroMQ, and
`slipstream events tail` reads what those structs encode. Source of the names: vLLM 0.33,
`vllm/distributed/kv_events.py`; Dynamo 1.6, `forward_pass_metrics.py`. vLLM's own classes are used
in `python/tests/vllm/test_kv_events.py`, Dynamo's below if `ai-dynamo` is installed.
"""

import json
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

PATIENCE_MS = 60_000
"""Maximum wait for an expected message."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM declares it."""


class BlockStored(KVCacheEvent):
    """As vLLM declares it."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    """As vLLM declares it."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """As vLLM declares it."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As vLLM declares it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, omit_defaults=True):
    """A batch as a map, which earlier versions of Slipstream published."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """vLLM's earlier declaration: positional."""


class OldBlockStored(OldEvent, tag="BlockStored"):
    """vLLM's earlier declaration."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldBlockRemoved(OldEvent, tag="BlockRemoved"):
    """vLLM's earlier declaration."""

    block_hashes: list[int]


class OldAllBlocksCleared(OldEvent, tag="AllBlocksCleared"):
    """vLLM's earlier declaration."""


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's earlier declaration."""

    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]
    data_parallel_rank: int | None = None


class Scheduled(msgspec.Struct, forbid_unknown_fields=True):
    """`scheduled_requests` of forward-pass metrics."""

    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    sum_prefill_kv_tokens: int
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float


class Queued(msgspec.Struct, forbid_unknown_fields=True):
    """`queued_requests` of forward-pass metrics."""

    num_prefill_requests: int
    sum_prefill_tokens: int
    var_prefill_length: float
    num_decode_requests: int
    sum_decode_kv_tokens: int
    var_decode_kv_tokens: float


class ForwardPassMetrics(msgspec.Struct, forbid_unknown_fields=True):
    """Forward-pass metrics, version 1. Every field must be there."""

    version: int
    worker_id: str
    dp_rank: int
    counter_id: int
    wall_time: float
    scheduled_requests: Scheduled
    queued_requests: Queued


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    """A ZeroMQ context that discards unsent messages at its end."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def free_ports(count: int) -> list[int]:
    """Ports that were free at the time of the call."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def heard(socket: zmq.Socket, do) -> list[bytes]:
    """Calls `do` until `socket` receives a message: a subscription takes time to arrive."""
    for _ in range(PATIENCE_MS // 200):
        do()
        if socket.poll(200):
            return socket.recv_multipart()
    raise AssertionError("nothing was heard")


def test_msgspec_decodes_what_the_server_publishes(start, context):
    fpm_port, kv_port, replay_port = free_ports(3)
    sets = {
        "live.events.bus": "zmq",
        "live.events.fpm_endpoint": f"tcp://127.0.0.1:{fpm_port}",
        "live.events.kv_endpoint": f"tcp://127.0.0.1:{kv_port}",
        "live.events.replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        "engine.block_size": "16",
    }
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    with start("--speedup", "0", *flags) as server:
        client = server.client()
        model = client.models.list().data[0].id
        numbers = iter(range(10**6))

        def ask() -> None:
            words = " ".join(f"{next(numbers)} sheep" for _ in range(40))
            client.completions.create(model=model, prompt=words, max_tokens=40)

        fpm = context.socket(zmq.SUB)
        fpm.connect(f"tcp://127.0.0.1:{fpm_port}")
        fpm.subscribe("slipstream.fpm.")
        topic, sequence, payload = heard(fpm, ask)
        assert topic == b"slipstream.fpm.w0.0"
        metrics = msgspec.msgpack.decode(payload, type=ForwardPassMetrics)
        assert int.from_bytes(sequence, "big") == metrics.counter_id
        assert (metrics.version, metrics.worker_id, metrics.dp_rank) == (1, "w0", 0)
        passes = [metrics]
        while not (passes[-1].scheduled_requests.num_decode_requests and len(passes) > 100):
            if not fpm.poll(0):
                ask()
            assert fpm.poll(PATIENCE_MS)
            payload = fpm.recv_multipart()[2]
            passes.append(msgspec.msgpack.decode(payload, type=ForwardPassMetrics))
        first = passes[0].counter_id
        assert [each.counter_id for each in passes] == list(range(first, first + len(passes)))
        assert any(each.scheduled_requests.sum_prefill_tokens > 0 for each in passes)
        assert any(each.wall_time > 0 for each in passes)

        kv = context.socket(zmq.SUB)
        kv.connect(f"tcp://127.0.0.1:{kv_port}")
        kv.subscribe("")
        topic, sequence, payload = heard(kv, ask)
        assert topic == b""
        last = int.from_bytes(sequence, "big")
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.data_parallel_rank == 0

        # Everything from the first batch on, as a consumer that missed it requests it.
        replay = context.socket(zmq.DEALER)
        replay.connect(f"tcp://127.0.0.1:{replay_port}")
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while True:
            assert replay.poll(PATIENCE_MS)
            empty, topic, sequence, payload = replay.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert payload == b""
                break
            assert int.from_bytes(sequence, "big") == len(batches)
            batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))
            assert msgspec.msgpack.encode(batches[-1]) == payload
        assert len(batches) > last
        stored = [event for batch in batches for event in batch.events]
        assert all(isinstance(event, BlockStored) for event in stored)
        known = set()
        for event in stored:
            assert event.parent_block_hash is None or event.parent_block_hash in known
            known.update(event.block_hashes)
            assert (event.block_size, event.medium) == (16, "GPU")
            assert len(event.token_ids) == 16 * len(event.block_hashes)
        # The first event is of the first prompt, and names its tokens.
        words = " ".join(f"{n} sheep" for n in range(40))
        request = urllib.request.Request(
            f"{server.url}/tokenize",
            json.dumps({"prompt": words}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            tokens = json.load(answer)["tokens"]
        first = stored[0]
        assert first.parent_block_hash is None
        assert first.token_ids == tokens[: len(first.token_ids)]
        assert len(first.token_ids) == len(tokens) // 16 * 16
        # Blocks of the answer follow those of the prompt.
        assert any(event.parent_block_hash == first.block_hashes[-1] for event in stored[1:])


def test_dynamos_own_class_decodes_forward_pass_metrics_to_the_same_bytes(start, context):
    reason = "pip install --no-deps ai-dynamo==1.6.1"
    dynamo = pytest.importorskip("dynamo.common.forward_pass_metrics", reason=reason)
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    sets = {
        "live.events.bus": "zmq",
        "live.events.fpm_endpoint": endpoint,
        "live.events.kv": "false",
    }
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    with start("--speedup", "0", *flags) as server:
        client = server.client()
        model = client.models.list().data[0].id

        def ask() -> None:
            client.completions.create(model=model, prompt="sheep " * 40, max_tokens=40)

        fpm = context.socket(zmq.SUB)
        fpm.connect(endpoint)
        fpm.subscribe("")
        payloads = [heard(fpm, ask)[2]]
        # A pass, and the heartbeat of an idle rank.
        idle = False
        while not idle:
            assert fpm.poll(PATIENCE_MS)
            payloads.append(fpm.recv_multipart()[2])
            idle = dynamo.decode(payloads[-1]).wall_time == 0
        for payload in payloads:
            metrics = dynamo.decode(payload)
            assert metrics is not None, "Dynamo skips what it cannot read"
            assert dynamo.encode(metrics) == payload
        assert metrics.scheduled_requests == dynamo.ScheduledRequestMetrics()


@contextmanager
def tail(binary: Path, *args: str) -> Iterator[subprocess.Popen]:
    """A running `slipstream events tail`."""
    process = subprocess.Popen(
        [binary, "events", "tail", "--json", *args], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2**64 - 1],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": None,
    "lora_name": None,
}
OLD = OldBatch(
    1.5,
    [
        OldBlockStored([1, 2**64 - 1], None, list(range(32)), 16, None),
        OldBlockRemoved([1]),
        OldAllBlocksCleared(),
    ],
    3,
)
EVENTS = [
    BlockStored([1, 2**64 - 1], None, list(range(32)), 16, None, "GPU", None, [None, ("x", 1)]),
    BlockRemoved([b"\x01" * 32], "CPU"),
    AllBlocksCleared(),
]
NEW, MAP = KVEventBatch(1.5, EVENTS, 3), MapBatch(1.5, EVENTS, 3)


@pytest.mark.parametrize(("batch", "medium"), [(OLD, None), (NEW, "GPU"), (MAP, "GPU")])
def test_the_tail_reads_what_msgspec_encodes(binary, context, batch, medium):
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    message = [b"kv@pod@model", (7).to_bytes(8, "big"), msgspec.msgpack.encode(batch)]
    with tail(binary, "--endpoint", f"tcp://127.0.0.1:{port}", "--count", "1") as process:
        poller = zmq.Poller()
        poller.register(process.stdout, zmq.POLLIN)
        for _ in range(PATIENCE_MS // 50):
            publisher.send_multipart(message)
            if poller.poll(50):
                break
        line = json.loads(process.stdout.readline())
        assert process.wait(30) == 0
    assert (line["topic"], line["sequence"]) == ("kv@pod@model", 7)
    event = line["event"]
    assert (event["ts"], event["data_parallel_rank"]) == (1.5, 3)
    stored, removed, cleared = event["events"]
    keys = {} if medium is None else {"extra_keys": [None, ["x", 1]]}
    assert stored == {**STORED, "medium": medium, **keys}
    assert removed["type"] == "BlockRemoved"
    assert removed["block_hashes"] == ([1] if medium is None else [[1] * 32])
    assert cleared == {"type": "AllBlocksCleared"}


def test_the_tail_says_what_it_cannot_read(binary, context):
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    bad = [b"t", (0).to_bytes(8, "big"), msgspec.msgpack.encode([1.5, [["BlockStolen", 1]]])]
    good = [b"t", (1).to_bytes(8, "big"), msgspec.msgpack.encode(OLD)]
    process = subprocess.Popen(
        [binary, "events", "tail", "--endpoint", f"tcp://127.0.0.1:{port}", "--count", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        poller = zmq.Poller()
        poller.register(process.stdout, zmq.POLLIN)
        for _ in range(PATIENCE_MS // 50):
            publisher.send_multipart(bad)
            publisher.send_multipart(good)
            if poller.poll(50):
                break
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "stored 2 blocks of 16 (32 tokens); removed 1 block; cleared all blocks" in out
    # Two messages in a row: one of them is the bad one, whichever was heard first.
    assert "unknown KV event type `BlockStolen`" in out
    assert "unreadable" in errors


def test_a_publisher_that_is_not_there_is_an_error_with_a_hint(binary):
    (port,) = free_ports(1)
    command = [binary, "events", "tail", "--endpoint", f"tcp://127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"tcp://127.0.0.1:{port}" in done.stderr
    assert "live.events.bus" in done.stderr


@contextmanager
def ready(line_begins: str, *command: str | Path) -> Iterator[str]:
    """A running process that has printed a line with this prefix; returns the rest of that line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        readable, _, _ = select.select([process.stdout], [], [], 60)
        line = process.stdout.readline() if readable else ""
        assert line.startswith(line_begins), f"{command[1]}: {line!r}"
        yield line.removeprefix(line_begins).strip()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_signal_right_after_the_ready_line_ends_a_process_in_order(binary, tmp_path):
    worker = (binary, "worker", "--discovery", tmp_path)
    for _ in range(10):
        with ready("running ", *worker):
            pass  # `ready` interrupts at once, and checks the exit status


def test_a_worker_process_names_the_tokens_that_a_frontend_process_read(binary, context, tmp_path):
    fpm_port, kv_port = free_ports(2)
    shared = (
        *("--discovery", tmp_path),
        *("--set", "live.events.bus=zmq"),
        *("--set", f"live.events.fpm_endpoint=tcp://127.0.0.1:{fpm_port}"),
        *("--set", f"live.events.kv_endpoint=tcp://127.0.0.1:{kv_port}"),
    )
    frontend = (binary, "frontend", "--listen", "127.0.0.1:0", *shared)
    worker = (binary, "worker", "--speedup", "0", *shared)
    with ready("listening on ", *frontend) as url, ready("running ", *worker) as workers:
        assert workers == "w0"
        kv = context.socket(zmq.SUB)
        kv.connect(f"tcp://127.0.0.1:{kv_port}")
        kv.subscribe("")
        numbers = iter(range(10**6))

        def ask() -> None:
            prompt = " ".join(f"{next(numbers)} goats" for _ in range(40))
            body = json.dumps({"model": "qwen3-8b", "prompt": prompt, "max_tokens": 2}).encode()
            head = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, head)
            try:
                urllib.request.urlopen(request, timeout=30).read()
            except urllib.error.HTTPError as error:
                assert error.code == 503, "the worker may not have called home yet"

        payload = heard(kv, ask)[2]
        (stored, *_) = msgspec.msgpack.decode(payload, type=KVEventBatch).events
        assert stored.parent_block_hash is None
        assert len(stored.token_ids) == stored.block_size * len(stored.block_hashes) > 0


def test_the_tail_hears_a_server_over_nats(binary, start):
    program = Path(sys.executable).parent / "nats-server"
    if not program.exists():
        pytest.skip(f"no {program}")
    (port,) = free_ports(1)
    url = f"nats://127.0.0.1:{port}"
    nats = subprocess.Popen(
        [program, "--addr", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        sets = ("--set", "live.events.bus=nats", "--set", f"live.events.nats_url={url}")
        with start("--speedup", "0", *sets) as server:
            client = server.client()
            model = client.models.list().data[0].id
            subject = "slipstream.*.w0.0"
            args = ("--bus", "nats", "--url", url, "--subject", subject, "--count", "50")
            # The NATS server takes some time to listen.
            for _ in range(PATIENCE_MS // 50):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                select.select([], [], [], 0.05)
            with tail(binary, *args) as process:
                poller = select.poll()
                poller.register(process.stdout, select.POLLIN)
                for n in range(PATIENCE_MS // 50):
                    client.completions.create(model=model, prompt=f"{n} cows" * 20, max_tokens=8)
                    if poller.poll(50):
                        break
                for n in range(20):
                    client.completions.create(model=model, prompt=f"{n} hens" * 20, max_tokens=8)
                lines = [json.loads(line) for line in process.stdout]
                assert process.wait(30) == 0
        assert len(lines) == 50
        fpm = [line["event"]["counter_id"] for line in lines if ".fpm." in line["topic"]]
        assert fpm == list(range(fpm[0], fpm[0] + len(fpm)))
        kv = [line["sequence"] for line in lines if ".kv." in line["topic"]]
        assert kv == list(range(kv[0], kv[0] + len(kv)))
    finally:
        nats.kill()
        nats.wait()
