"""A server of modelled engines, for tests of programs that call an OpenAI endpoint.

>>> from slipstream.testing import serve
>>> with serve(settings={"model.name": "my-model"}) as server:
...     server.model
'my-model'

With pytest installed, this package is a plugin with the fixtures `slipstream_server` and
`slipstream_serve` (`docs/python.md`).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slipstream.errors import Error, MissingFileError
from slipstream.sources import Cluster, Value, as_text

__all__ = ["Server", "ServerError", "command", "serve"]

DRAIN_S = 1.0
"""Time for open requests at the end."""

STOP_S = 30.0
"""A server that has not ended this long after the second SIGINT is killed."""

READY_POLL_S = 0.02
"""Interval of questions whether the server is ready."""

LOG_LINES = 20
"""Last lines of the log that an error has."""


class ServerError(Error, RuntimeError):
    """A server did not start, or ended while it was used; with the end of its log."""


@dataclass(frozen=True)
class Server:
    """A running server on a free port of 127.0.0.1."""

    url: str
    """Its address, without a path: `http://127.0.0.1:PORT`."""
    model: str
    """Name of the served model."""
    pid: int
    """Its process."""

    @property
    def base_url(self) -> str:
        """What OpenAI's clients take as `base_url`; Anthropic's take `url`."""
        return f"{self.url}/v1"


def command() -> Path:
    """Return the `slipstream` command: of `SLIPSTREAM_BIN`, of this environment, or of `PATH`.

    Raises
    ------
    MissingFileError
        If there is none.
    """
    named = os.environ.get("SLIPSTREAM_BIN")
    if named:
        if not os.access(named, os.X_OK):
            raise MissingFileError(f"SLIPSTREAM_BIN is {named}, which is no executable file")
        return Path(named)
    for folder in (sysconfig.get_path("scripts"), None):
        found = shutil.which("slipstream", path=folder)
        if found:
            return Path(found)
    raise MissingFileError(
        "there is no `slipstream` command in this environment or on PATH; install the wheel, or "
        "name the command by SLIPSTREAM_BIN"
    )


@contextmanager
def serve(
    cluster: Cluster | str | os.PathLike[str] | None = None,
    *,
    settings: Mapping[str, Value] | None = None,
    speedup: float = 0,
    start_timeout_s: float = 60,
) -> Iterator[Server]:
    """Run `slipstream serve` on a free port of 127.0.0.1, and stop it at the end.

    Parameters
    ----------
    cluster
        A `Cluster`, or the path of a cluster file; default: one modelled worker.
    settings
        Keys of the cluster file, as by `--set`: `{"live.faults.error_429": 0.1}`.
    speedup
        Factor by which modelled time passes faster: 1 is the pace of the modelled GPU. 0: nothing
        waits, and an answer is there as soon as it is computed.
    start_timeout_s
        Maximum time until the server listens and its workers take requests.

    Raises
    ------
    ServerError
        If the server does not start, such as for a wrong setting, or ended before the `with` block
        did; with the end of its log.
    MissingFileError
        If there is no `slipstream` command.
    """
    binary = command()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        args = arguments(cluster, Path(folder))
        for key, value in (settings or {}).items():
            args += ["--set", f"{key}={as_text(value)}"]
        args += ["--listen", "127.0.0.1:0", f"--speedup={as_text(speedup)}"]
        # A file, because a pipe that nobody reads would stop the server once it is full.
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                [binary, "serve", *args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
            try:
                deadline = time.monotonic() + start_timeout_s
                url = listening(process, log, start_timeout_s)
                await_ready(url, process, log, deadline, start_timeout_s)
                yield Server(url, served_model(url), process.pid)
                if process.poll() is not None:
                    raise failure(f"the server ended with status {process.returncode}", log)
            finally:
                stop(process)


def arguments(cluster: Cluster | str | os.PathLike[str] | None, folder: Path) -> list[str]:
    """Return the arguments for `cluster`, whose text is written into `folder` if it has no file."""
    if cluster is None:
        return []
    if not isinstance(cluster, Cluster):
        return [os.fspath(cluster)]
    args = []
    if cluster.file is not None:
        args.append(cluster.file)
    elif cluster.text is not None:
        path = folder / "cluster.toml"
        path.write_text(cluster.text)
        args.append(os.fspath(path))
    for assignment in cluster.sets:
        args += ["--set", assignment]
    return args


def listening(process: subprocess.Popen[bytes], log: IO[bytes], timeout_s: float) -> str:
    """Wait for the line with the server's address, and return the address."""
    assert process.stdout
    deadline = time.monotonic() + timeout_s
    said = b""
    while b"\n" not in said:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([process.stdout], [], [], max(left, 0))
        if not ready:
            raise failure(f"the server does not listen after {timeout_s:g} s", log)
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise failure(f"the server ended with status {process.wait()}", log)
        said += part
    line = said.split(b"\n")[0].decode()
    if not line.startswith("listening on http"):
        raise failure(f"the command is not `slipstream serve`: it printed {line!r}", log)
    return line.removeprefix("listening on ")


def await_ready(
    url: str, process: subprocess.Popen[bytes], log: IO[bytes], deadline: float, timeout_s: float
) -> None:
    """Wait until the workers take requests."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(f"{url}/ready", timeout=10).close()
            return
        except urllib.error.HTTPError as error:
            with error:
                why = error.read().decode(errors="replace").strip()
        except OSError as error:
            why = str(error)
        if process.poll() is not None:
            raise failure(f"the server ended with status {process.returncode}", log)
        if time.monotonic() > deadline:
            raise failure(f"the server is not ready after {timeout_s:g} s: {why}", log)
        time.sleep(READY_POLL_S)


def served_model(url: str) -> str:
    """Return the name of the served model."""
    # Without a proxy, which the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/v1/models", timeout=10) as answer:
            name = json.load(answer)["data"][0]["id"]
    except urllib.error.HTTPError as error:
        # With `live.api_keys_file` only those who have a key may ask.
        if error.code != 401:
            raise
        return ""
    assert isinstance(name, str)
    return name


def failure(what: str, log: IO[bytes]) -> ServerError:
    """Return an error with the end of the log."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return ServerError("\n".join([what, *lines[-LOG_LINES:]]))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server: open requests may finish within `DRAIN_S`, and are cut off then."""
    # The second signal ends the drain.
    for wait_s in (DRAIN_S, STOP_S):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(wait_s)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()
