"""KV events that `slipstream` publishes, against vLLM's own classes, publisher and scheduler."""

import importlib.util
import json
import select
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from rig import BLOCK, Rig
from served import PATIENCE_S, binary_under_test, serving
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

TREE = Path(__file__).parents[3]


def goldens() -> ModuleType:
    """The script that writes the bytes which the Rust tests compare with."""
    path = TREE / "scripts/vllm/event_goldens.py"
    spec = importlib.util.spec_from_file_location("event_goldens", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """ZeroMQ, with nothing left behind."""
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request; returns its answer."""
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return dict(json.load(answer))


def received(subscriber: zmq.Socket[bytes], do: Callable[[], Any]) -> list[bytes]:
    """Call `do` until `subscriber` gets a message: a subscription takes a moment to arrive."""
    for _ in range(int(PATIENCE_S * 5)):
        do()
        if subscriber.poll(200):
            return subscriber.recv_multipart()
    raise AssertionError("no message came")


def test_the_goldens_of_the_rust_tests_are_this_vllms_bytes() -> None:
    script = goldens()
    lines = (script.FOLDER / "vllm_kv_events.txt").read_text().splitlines()
    written = dict(line.split(" ") for line in lines if not line.startswith("#"))
    assert written == {name: batch.hex() for name, batch in script.kv_batches().items()}


def test_the_goldens_set_the_fields_that_vllms_scheduler_sets() -> None:
    script = goldens()
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    golden = {name: decode(batch) for name, batch in script.kv_batches().items()}
    rig = Rig(num_blocks=10, kv_events=True)
    batches: list[KVEventBatch] = []
    rig.scheduler.kv_event_publisher.publish = batches.append
    for _ in range(3):  # the third prompt evicts blocks of the first
        rig.add(rig.tokens(4 * BLOCK), max_tokens=2)
        rig.drain()
    rig.scheduler.reset_prefix_cache()
    rig.step()
    rig.close()
    events = [event for batch in batches for event in batch.events]
    kinds = {type(event): event for event in events}
    assert set(kinds) == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert all(len(e.block_hashes) == 1 for e in events if isinstance(e, BlockRemoved))
    differ = {"block_hashes", "token_ids", "block_size", "extra_keys"}

    def fields(event: Any) -> dict[str, Any]:
        given = msgspec.structs.asdict(event)
        return {name: value for name, value in given.items() if name not in differ}

    stored = golden["prompt"].events[0]
    assert fields(stored) == fields(kinds[BlockStored])
    assert kinds[BlockStored].extra_keys == [None] * len(kinds[BlockStored].block_hashes)
    assert fields(golden["evicted"].events[0]) == fields(kinds[BlockRemoved])


def test_vllms_classes_decode_what_the_server_publishes_to_the_same_bytes(
    context: zmq.Context[Any],
) -> None:
    port, replay_port = free_port(), free_port()
    sets = (
        *("--set", "live.events.bus=zmq", "--set", "live.events.fpm=false"),
        *("--set", f"live.events.kv_endpoint=tcp://127.0.0.1:{port}"),
        *("--set", f"live.events.replay_endpoint=tcp://127.0.0.1:{replay_port}"),
        *("--set", "engine.block_size=16", "--set", "engine.num_gpu_blocks=64"),
    )
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    with serving(*sets) as url:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
            model = json.load(answer)["data"][0]["id"]
        numbers = iter(range(10**6))

        def ask() -> None:
            prompt = " ".join(f"{next(numbers)} sheep" for _ in range(100))
            body = {"model": model, "prompt": prompt, "max_tokens": 40}
            post(f"{url}/v1/completions", {**body, "cache_salt": f"salt {next(numbers)}"})
            post(f"{url}/v1/completions", body)

        subscriber = context.socket(zmq.SUB)
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        subscriber.subscribe("")
        topic, sequence, _ = received(subscriber, ask)
        assert (topic, len(sequence)) == (b"", 8)
        for _ in range(10):  # more than the cache holds
            ask()
        replay = context.socket(zmq.DEALER)
        replay.connect(f"tcp://127.0.0.1:{replay_port}")
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        payloads = []
        while True:
            assert replay.poll(PATIENCE_S * 1e3)
            empty, topic, sequence, payload = replay.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if sequence == ZmqEventPublisher.END_SEQ:
                assert payload == b""
                break
            assert int.from_bytes(sequence, "big") == len(payloads)
            payloads.append(payload)
    events: list[Any] = []
    for payload in payloads:
        batch = decode(payload)
        assert encode(batch) == payload
        assert batch.data_parallel_rank == 0
        events += batch.events
    assert {type(event) for event in events} == {BlockStored, BlockRemoved}
    held: set[int] = set()
    salts = set()
    for event in events:
        if isinstance(event, BlockRemoved):
            held.difference_update(event.block_hashes)
            continue
        assert len(event.token_ids) == 16 * len(event.block_hashes)
        assert event.parent_block_hash is None or event.parent_block_hash in held
        held.update(event.block_hashes)
        assert len(event.extra_keys) == len(event.block_hashes)
        if event.parent_block_hash is None:
            salts.add(event.extra_keys[0])
        assert all(keys is None for keys in event.extra_keys[1:])
    assert None in salts and len(salts) > 10, "each salt has a chain of its own"


def test_the_tail_reads_vllms_own_publisher_and_its_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    binary = binary_under_test()
    # It binds addresses with a wildcard alone, which would be reachable from other hosts.
    monkeypatch.setattr(ZmqEventPublisher, "_is_bind_endpoint", staticmethod(lambda _: True))
    port, replay_port = free_port(), free_port()
    publisher = ZmqEventPublisher(
        data_parallel_rank=0,
        endpoint=f"tcp://127.0.0.1:{port}",
        replay_endpoint=f"tcp://127.0.0.1:{replay_port}",
        topic="kv@pod",
    )
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    encoded = goldens().kv_batches()
    batches = [decode(batch) for batch in encoded.values()]

    def tail(*args: str) -> list[str]:
        return [str(binary), "events", "tail", "--json", *args]

    live = tail("--endpoint", f"tcp://127.0.0.1:{port}", "--count", "1")
    process = subprocess.Popen(live, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        for _ in range(int(PATIENCE_S * 20)):
            publisher.publish(batches[0])
            if select.select([process.stdout], [], [], 0.05)[0]:
                break
        line = json.loads(process.stdout.readline())
        assert process.wait(30) == 0
        assert line["topic"] == "kv@pod"
        assert line["event"]["events"][0]["token_ids"] == batches[0].events[0].token_ids
        for batch in batches:
            publisher.publish(batch)
        for _ in range(int(PATIENCE_S * 1e3)):
            if publisher._buffer and publisher._buffer[-1][1] == encoded["fields"]:
                break
            threading.Event().wait(0.001)
        past = tail("--endpoint", f"tcp://127.0.0.1:{replay_port}", "--replay-from", "0")
        done = subprocess.run(past, capture_output=True, text=True, timeout=60, check=True)
    finally:
        process.kill()
        publisher.shutdown()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["sequence"] for line in lines] == list(range(len(lines)))
    assert [line["topic"] for line in lines] == ["kv@pod"] * len(lines)
    stored = lines[-1]["event"]["events"][0]
    assert stored["session_id"] == "session-1"
    assert stored["extra_keys"][0] == ["adapter", ["image", 128], ["image", -1]]
