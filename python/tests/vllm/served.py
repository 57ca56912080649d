"""A real `slipstream serve`, where the binary has been built."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE_S = 60.0
"""Longest wait for anything that should come."""


def binary_under_test() -> Path:
    """The newest binary of the tree, or that which SLIPSTREAM_BIN names. Skips if there is none."""
    named = os.environ.get("SLIPSTREAM_BIN")
    if named:
        return Path(named)
    target = Path(__file__).parents[3] / "target"
    built = [
        path for path in target.glob("*/slipstream") if path.parent.name in ("debug", "release")
    ]
    if not built:
        pytest.skip("no slipstream binary: `make build`, or name one by SLIPSTREAM_BIN")
    return max(built, key=lambda path: path.stat().st_mtime)


@contextmanager
def serving(*args: str) -> Iterator[str]:
    """Run `slipstream serve`, whose engines take no time; gives its URL."""
    command = [binary_under_test(), "serve", "--listen", "127.0.0.1:0", "--speedup", "0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if ready else ""
        assert line.startswith("listening on "), line
        yield line.removeprefix("listening on ").strip()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
