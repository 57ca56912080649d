#!/usr/bin/env python3
"""CPU time for which one request holds up a frontend thread.

    scripts/longest-polls.py BINARY

Sends requests that are expensive to read or to answer to `slipstream serve` with one shard, each to
a server of its own, and prints the longest time that its shard worked on one thing
(`slipstream_shard_poll_max_seconds`, CPU time). Exits with 1 if one took more than 10 ms, which is
the limit of docs/reliability.md for release builds.

Then it puts the router in front of engines whose streams are expensive to read: every size of event
and chunk, and every line ending.
"""

import http.client
import json
import re
import socket
import subprocess
import sys
import threading

LIMIT_S = 0.010
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(count: int) -> dict:
    """Make a conversation of many short messages."""
    return {"messages": [{"role": "user", "content": "a" * 50}] * count}


def choices(**fields: object) -> dict:
    """Make a request for the most choices."""
    return {"prompt": "hello", "n": 128, "max_tokens": 400, **fields}


TOKENS = list(range(300, 1324))
CASES: dict[str, tuple[str, object]] = {
    "a short prompt": (COMPLETIONS, {"prompt": "hello", "max_tokens": 4}),
    "80,000 messages": (CHAT, chat(80_000)),
    "80,000 items after a stored response": (
        "/v1/responses",
        {"input": chat(80_000)["messages"], "previous_response_id": "resp_none"},
    ),
    "350,000 unknown fields": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, **{f"f{number}": [1, 2] for number in range(350_000)}},
    ),
    "metadata with 300,000 keys": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 1, "metadata": {f"k{n}": [[1]] for n in range(300_000)}},
    ),
    "60,000 tools": (
        CHAT,
        {
            **chat(1),
            "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(60_000)],
        },
    ),
    "1,500,000 tokens": (COMPLETIONS, {"prompt": list(range(1, 1000)) * 1500}),
    "JSON that breaks off after 7 MB": (COMPLETIONS, b'{"prompt":[' + b"1," * 3_500_000),
    "/tokenize of 3 MB": ("/tokenize", {"prompt": "ab " * 1_000_000}),
    "/detokenize of 1,400,000 tokens": ("/detokenize", {"tokens": list(range(1, 1000)) * 1400}),
    "an image of 7 MB": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:," + "A" * 7_000_000}}
                    ],
                }
            ]
        },
    ),
    "128 choices": (COMPLETIONS, choices(ignore_eos=True)),
    "128 choices of 1,024 allowed tokens": (COMPLETIONS, choices(allowed_token_ids=TOKENS)),
    "the same, streamed with 20 log probabilities": (
        COMPLETIONS,
        choices(allowed_token_ids=TOKENS, logprobs=20, stream=True),
    ),
    "128 choices without 1,024 tokens": (
        COMPLETIONS,
        choices(ignore_eos=True, logit_bias={str(token): -100 for token in TOKENS}),
    ),
    "128 choices that repeat 30,000 tokens": (
        COMPLETIONS,
        choices(prompt=[300] * 30_000, max_tokens=2, echo=True),
    ),
    "log probabilities of 30,000 tokens of a prompt": (
        COMPLETIONS,
        {"prompt": [300] * 30_000, "max_tokens": 2, "prompt_logprobs": 20},
    ),
    "128 choices that fit a pattern": (
        COMPLETIONS,
        choices(structured_outputs={"regex": "(a|b|c){1,50}"}),
    ),
}


def measure(binary: str, path: str, body: object) -> tuple[float, int, int]:
    """Return the longest poll in s, the body's size in bytes and the status of the answer."""
    command = [binary, "serve", "--listen=127.0.0.1:0", "--speedup=100", "--set=live.shards=1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            address = next(
                found for line in server.stdout if (found := re.search(r"//(\S+)", line))
            )

            def send(method: str, path: str, data: bytes = b"") -> tuple[int, bytes]:
                connection = http.client.HTTPConnection(address[1], timeout=120)
                connection.request(method, path, data, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                whole = answer.read()
                connection.close()
                return answer.status, whole

            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            status, _ = [send("POST", path, data) for _ in range(3)][-1]
            page = send("GET", "/metrics")[1].decode()
            longest = re.findall(r"^slipstream_shard_poll_max_seconds\S* (\S+)", page, re.MULTILINE)
            return max(map(float, longest)), len(data), status
        finally:
            server.terminate()


STREAM_BYTES = 900_000


def event(size: int, line: str) -> bytes:
    """Make an event of some bytes that ends with two of the line ending."""
    choice = {"index": 0, "text": "a" * max(size - 90, 1), "finish_reason": None}
    data = json.dumps({"id": "c", "created": 1, "choices": [choice]})
    return f"data: {data}{line}{line}".encode()


def streams() -> dict[str, tuple[bytes, int]]:
    """Name each stream of a hostile engine, with its chunk size."""
    found: dict[str, tuple[bytes, int]] = {}
    for name, line in {"LF": "\n", "CR LF": "\r\n", "CR": "\r"}.items():
        for size in (45, 300, 4_000, STREAM_BYTES):
            count = STREAM_BYTES // size
            for chunk in (1, 16, 100, 1_400, STREAM_BYTES):
                stream = event(size, line) * count
                found[f"{count:,} events of {size:,} B, {name}, chunks of {chunk:,} B"] = (
                    stream[: 200_000 if chunk == 1 else None],
                    chunk,
                )
        found[f"60,000 comments, {name}"] = (f": keep-alive{line}".encode() * 60_000, 13)
        found[f"60,000 comments within an event, {name}"] = (
            f"id: 1{line}".encode() + f": keep-alive{line}".encode() * 60_000,
            STREAM_BYTES,
        )
        found[f"an event of 100,000 lines, {name}"] = (f"data: 1{line}".encode() * 100_000, 1_400)
    found["no line ending"] = (b"a" * 4_000_000, 4_096)
    found["only line endings"] = (b"\r\n\n\r" * 200_000, 4_096)
    many = b'{"error":' * 100_000
    found["errors within errors"] = (b"data: " + many + b"\n\n", 4_096)
    opened, lists = b'"token_ids":[' * 70_000, b'"token_ids":[1],' * 60_000
    found["70,000 lists of ids in one"] = (b'data: {"choices":[' + opened + b"]\n\n", 4_096)
    found["60,000 lists of ids"] = (b'data: {"choices":[{' + lists + b'"x":1}]}\n\n', 4_096)
    members = b",".join(b'"m%d":0' % number for number in range(80_000))
    found["an event of 80,000 members"] = (b"data: {" + members + b"}\n\n", 4_096)
    found["a choice of 80,000 members"] = (b'data: {"choices":[{' + members + b"}]}\n\n", 4_096)
    found["a delta of 70,000 members"] = (
        b'data: {"choices":[{"delta":{' + members[:-100_000].rsplit(b",", 1)[0] + b"}}]}\n\n",
        4_096,
    )
    found["an error of 80,000 members"] = (b'data: {"error":{' + members + b"}}\n\n", 4_096)
    usage = b"[]," * 250_000
    found["250,000 lists in the usage"] = (
        b'data: {"choices":[],"usage":{"x":[' + usage + b"[]]}}\n\n",
        4_096,
    )
    found["200,000 ids of a prompt"] = (
        b'data: {"choices":[],"prompt_token_ids":[' + b"1234," * 200_000 + b"1]}\n\n",
        4_096,
    )
    ends = (
        b'data: {"choices":[{"index":%d,"finish_reason":"stop"}]}\n\n' % n for n in range(60_000)
    )
    found["the ends of 60,000 choices"] = (b"".join(ends), 4_096)
    found["300,000 choices"] = (b'data: {"choices":[' + b"{}," * 300_000 + b"{}]}\n\n", 4_096)
    return found


def serve_stream(listener: socket.socket, stream: bytes, chunk: int) -> None:
    """Answer as an engine whose every stream is this one."""
    pieces = range(0, len(stream), chunk)
    framed = b"".join(
        b"%x\r\n%s\r\n" % (len(stream[at : at + chunk]), stream[at : at + chunk]) for at in pieces
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n"
    models = b'{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}'

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            request = b"".join(iter(lines.readline, b"\r\n"))
            if request.startswith(b"GET"):
                body = models if b"/v1/models" in request else b""
                json_head = head % b"application/json" + b"Content-Length: %d\r\n\r\n" % len(body)
                connection.sendall(json_head + body)
                return
            length = re.search(rb"(?i)content-length: (\d+)", request)
            lines.read(int(length[1]) if length else 0)
            events = head % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"
            connection.sendall(events + framed + b"0\r\n\r\n")

    def attend(connection: socket.socket) -> None:
        try:
            answer(connection)
        except OSError:
            pass  # the router has hung up

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=attend, args=(connection,), daemon=True).start()


def measure_engine(binary: str, stream: bytes, chunk: int) -> tuple[float, int]:
    """Return the longest poll in s in front of such an engine, and the answer's size in bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = threading.Thread(target=serve_stream, args=(listener, stream, chunk), daemon=True)
        engine.start()
        port = listener.getsockname()[1]
        command = [
            binary,
            "serve",
            "--listen=127.0.0.1:0",
            f"--engine=http://127.0.0.1:{port}",
            "--set=live.shards=1",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            try:
                address = next(
                    found
                    for line in server.stdout
                    if (found := re.search(r"listening on http://(\S+)", line))
                )
                body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 4, "stream": True})
                size = 0
                for _ in range(2):
                    connection = http.client.HTTPConnection(address[1], timeout=120)
                    kind = {"Content-Type": "application/json"}
                    connection.request("POST", COMPLETIONS, body.encode(), kind)
                    size = len(connection.getresponse().read())
                    connection.close()
                connection = http.client.HTTPConnection(address[1], timeout=120)
                connection.request("GET", "/metrics")
                page = connection.getresponse().read().decode()
                name = r"^slipstream_shard_poll_max_seconds\S* (\S+)"
                return max(map(float, re.findall(name, page, re.MULTILINE))), size
            finally:
                server.terminate()


def main() -> int:
    """Measure each case."""
    binary = sys.argv[1]
    worst = 0.0
    print("| Request | Body, bytes | Status | Longest poll, ms |\n| --- | --- | --- | --- |")
    for name, (path, body) in CASES.items():
        longest_s, size, status = measure(binary, path, body)
        print(f"| {name} | {size:,} | {status} | {longest_s * 1e3:.2f} |", flush=True)
        worst = max(worst, longest_s)
    print("\n| Stream of an engine | Answer, bytes | Longest poll, ms |\n| --- | --- | --- |")
    for name, (stream, chunk) in streams().items():
        longest_s, size = measure_engine(binary, stream, chunk)
        print(f"| {name} | {size:,} | {longest_s * 1e3:.2f} |", flush=True)
        worst = max(worst, longest_s)
    return int(worst > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
