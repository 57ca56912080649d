#!/usr/bin/env python3
"""Memory of a server per idle connection.

    scripts/idle-connections.py BINARY [CONNECTIONS]
    scripts/idle-connections.py --write-cases FOLDER    bytes sent and awaited, for vm/idle.sh

Starts `slipstream serve`, opens CONNECTIONS (20,000) to it on loopback, and prints the growth of
its resident memory per connection, for connections that were silent so far and for those that had
a request, one after the other or all at once: HTTP/1.1 and HTTP/2. Addresses 127.0.0.2 and up are
the clients', so that ports suffice.
"""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

PATH = b"/v1/models"
ONCE = b"GET " + PATH + b" HTTP/1.1\r\nHost: x\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PORTS = 20_000
"""Connections per address of a client."""


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Make a frame of HTTP/2 (RFC 9113, section 4.1)."""
    head = len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + body


def literal(name: bytes, value: bytes) -> bytes:
    """Make a header without compression (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


SETTINGS = frame(4, 0, 0)
HEADERS = b"".join(
    literal(name, value)
    for name, value in (
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", PATH),
        (b":authority", b"x"),
    )
)
CASES = {
    "HTTP/1.1, silent": (b"", b""),
    "HTTP/1.1, after a request": (ONCE, b'"object":"list"'),
    "HTTP/1.1, after requests at once": (ONCE, b'"object":"list"'),
    "HTTP/2, silent": (PREFACE + SETTINGS, b"\0\0\0\x04\x01"),
    # HEADERS with END_STREAM and END_HEADERS on stream 1.
    "HTTP/2, after a request": (
        PREFACE + SETTINGS + frame(4, 1, 0) + frame(1, 5, 1, HEADERS),
        b'"object":"list"',
    ),
}


def resident(process: int) -> int:
    """Resident memory, bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def connect(address: tuple[str, int], number: int) -> socket.socket:
    """Connect from one of the clients' addresses."""
    connection = socket.socket()
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
    connection.bind((f"127.0.0.{2 + number // PORTS}", 0))
    connection.settimeout(30)
    connection.connect(address)
    return connection


def await_answer(connection: socket.socket, expected: bytes) -> None:
    """Read until the answer has these bytes."""
    got = b""
    while expected not in got:
        piece = connection.recv(65536)
        assert piece, f"the server closed a connection: {got}"
        got += piece


def measure(binary: str, count: int, case: str) -> float:
    """Bytes per connection."""
    sent, expected = CASES[case]
    at_once = case.endswith("at once")
    connections, warm = [], []
    command = [binary, "serve", "--listen=127.0.0.1:0", "--speedup=0", "--set=model.name=m"]
    limits = ["--set=live.read_timeout_s=3600", "--set=live.idle_timeout_s=3600"]
    with subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True) as server:
        try:
            host, port = server.stdout.readline().split("//")[1].strip().split(":")
            address = (host, int(port))
            warm.extend(connect(address, number) for number in range(64))
            for connection in warm:
                connection.sendall(ONCE)
                connection.recv(65536)
            before = resident(server.pid)
            for number in range(count):
                connections.append(connect(address, number))
                if not at_once:
                    connections[-1].sendall(sent)
                    await_answer(connections[-1], expected)
            if at_once:
                for connection in connections:
                    connection.sendall(sent)
                for connection in connections:
                    await_answer(connection, expected)
            time.sleep(3)  # idle connections give back their buffers
            return (resident(server.pid) - before) / count
        finally:
            server.terminate()
            for connection in connections + warm:
                connection.close()


FILES = {
    "request": "HTTP/1.1, after a request",
    "silent": "HTTP/1.1, silent",
    "request2": "HTTP/2, after a request",
    "silent2": "HTTP/2, silent",
}
"""Names of cases in files."""


def write_cases(folder: Path) -> None:
    """Write what each case sends and awaits."""
    for name, case in FILES.items():
        for suffix, content in zip(("sent", "expected"), CASES[case], strict=True):
            (folder / f"{name}.{suffix}").write_bytes(content)


def main() -> None:
    """Measure each case."""
    if sys.argv[1] == "--write-cases":
        return write_cases(Path(sys.argv[2]))
    binary, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < count + 1024:
        sys.exit(
            f"only {hard} open files are allowed: raise the limit, pass fewer connections, "
            "or run scripts/vm/idle.sh"
        )
    print(f"{count} connections, {os.cpu_count()} CPUs")
    for case in CASES:
        print(f"{case}: {measure(binary, count, case) / 1024:.2f} KiB per connection", flush=True)


if __name__ == "__main__":
    main()
