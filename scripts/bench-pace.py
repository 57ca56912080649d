#!/usr/bin/env python3
"""CPU time per token at a real pace: `slipstream serve` beside the least that a server can do.

The least is `scripts/live-floor.c`: one thread, one epoll, one send per token and client, of the
bytes that `slipstream serve` sent. Both get the same load, in turns.

  scripts/bench-pace.py [--streams 1,64,256] [--rounds 3] [--step-ms 12] [--tokens 256]

SLIPSTREAM_BIN names the binary (default: target/release/slipstream), CC the C compiler.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
BINARY = os.environ.get("SLIPSTREAM_BIN") or ROOT / "target/release/slipstream"
ISL = 32


@contextmanager
def running(command):
    """Run a server, which prints its address, and stop it."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline().strip()
        if not line.startswith("listening on http://"):
            sys.exit(f"error: {command[0]} did not start: {line!r}")
        yield process.pid, line.removeprefix("listening on ")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def serve(step_ms, streams):
    """Return the command of a server whose steps take `step_ms`."""
    return [
        BINARY, "serve", "--listen=127.0.0.1:0", "--speedup=1",
        "--set=engine.timing.kind=constant", f"--set=engine.timing.step_ns={round(step_ms * 1e6)}",
        f"--set=engine.max_num_seqs={max(streams, 64)}",
    ]  # fmt: skip


def cpu_ns(pid):
    """CPU time of all threads, user and system, ns."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks.iterdir())


def load(url, streams, tokens, requests, out):
    """Load the server with `streams` requests at a time."""
    command = [
        BINARY, "bench", url, f"--concurrency={streams}", f"--isl={ISL}", f"--osl={tokens}",
        f"--requests={requests}", "--quiet", f"--out={out}",
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: the load failed: {done.stderr or done.stdout}")
    return json.loads(Path(out).read_text())


def captured(url, tokens):
    """Return an answer as bytes: head and first token, one token, and all from the last one on."""
    host, port = url.removeprefix("http://").split(":")
    model = "qwen3-8b"
    body = json.dumps({
        "model": model, "prompt": "word " * ISL, "stream": True,
        "max_tokens": tokens, "ignore_eos": True, "stream_options": {"include_usage": True},
    })  # fmt: skip
    with socket.create_connection((host, int(port))) as s:
        s.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            part = s.recv(1 << 16)
            if not part:
                sys.exit("error: the server closed the connection")
            answer += part
    head, rest = answer.split(b"\r\n\r\n", 1)
    text = b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        text += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    # A busy host sends several in one chunk; at a real pace each has its own.
    events = [event + b"\n\n" for event in text.split(b"\n\n")[:-1]]
    middle = sorted(events[1 : tokens - 1], key=len)[(tokens - 2) // 2]
    tail = chunk(b"".join(events[tokens - 1 :])) + b"0\r\n\r\n"
    return head + b"\r\n\r\n" + chunk(events[0]), chunk(middle), tail


def chunk(data):
    """Return `data` as a chunk of HTTP/1.1."""
    return b"%X\r\n%s\r\n" % (len(data), data)


def main():
    """Print a row per number of streams."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        floor = Path(folder, "live-floor")
        source = ROOT / "scripts/live-floor.c"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", floor, source], check=True)
        with running(serve(1, 1)) as (_, url):
            parts = captured(url, args.tokens)
        files = [Path(folder, name) for name in ("head", "chunk", "tail")]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(part)
        size = len(parts[1])
        print(f"steps of {args.step_ms:g} ms, {args.tokens} tokens per answer, {size} bytes each")
        print(f"CPU time per token, µs; medians of {args.rounds} rounds")
        print(f"{'streams':>8} {'floor':>8} {'serve':>8}  ratio")
        for streams in map(int, args.streams.split(",")):
            commands = {
                "floor": [floor, round(args.step_ms * 1000), args.tokens - 1, *files],
                "serve": serve(args.step_ms, streams),
            }
            found = {name: [] for name in commands}
            for _ in range(args.rounds):
                for name, command in commands.items():
                    with running(command) as (pid, url):
                        out = Path(folder, "bench.json")
                        load(url, streams, args.tokens, streams, out)  # connections, caches
                        requests = 2 * streams
                        before = cpu_ns(pid)
                        load(url, streams, args.tokens, requests, out)
                        found[name].append((cpu_ns(pid) - before) / 1e3 / (requests * args.tokens))
            low, ours = (statistics.median(found[name]) for name in commands)
            print(f"{streams:>8} {low:>8.2f} {ours:>8.2f}  {ours / low:.2f}", flush=True)


if __name__ == "__main__":
    main()
