"""A real `slipstream serve` for every test that requests one."""

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

START_S = 60.0
"""Maximum time until a server listens, also with a slow debug build."""

FAST = ("--speedup", "0")
"""Speed-up 0: no wait for modelled time."""


@dataclass
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, key: str = "none") -> openai.OpenAI:
        """An official client that does not retry, so that tests see the first answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="session")
def binary() -> Path:
    """The binary under test."""
    path = os.environ.get("SLIPSTREAM_BIN")
    assert path, "SLIPSTREAM_BIN is not set; run scripts/pytest.sh"
    return Path(path)


@contextmanager
def running(binary: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Run `slipstream serve` on a free port, and stop it by a signal."""
    process = subprocess.Popen(
        [binary, "serve", "--listen", "127.0.0.1:0", *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        assert line.startswith("listening on http://"), f"not listening after {START_S} s: {line!r}"
        yield Server(line.removeprefix("listening on ").strip(), process)
        assert process.poll() is None, "the server died while it was tested"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert code == 0, "an interrupted server has done its work"


@pytest.fixture(scope="session")
def server(binary: Path) -> Iterator[Server]:
    """A server without modelled waits, for all tests that do not change its state."""
    with running(binary, *FAST) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """An official client of `server`."""
    return server.client()


@pytest.fixture(scope="session")
def model(server: Server) -> str:
    """The served model's name."""
    return server.client().models.list().data[0].id


@pytest.fixture(scope="session")
def start(binary: Path) -> Callable:
    """Starts a separate server: `with start("--set", ...) as server`."""
    return lambda *args, **kwargs: running(binary, *args, **kwargs)
