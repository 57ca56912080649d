"""`slipstream.testing`: servers for the tests of others."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import openai
import pytest
import slipstream as ss
from slipstream.testing import ServerError, command, serve

ROOT = Path(__file__).parents[3]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ask(server, **fields):
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=30)
    return client.completions.create(model=server.model, prompt="Hello", max_tokens=3, **fields)


def test_a_server_serves_and_ends_with_its_block():
    with serve(settings={"model.name": "mine", "pool.main.workers": 2}) as server:
        assert (server.model, ask(server).usage.completion_tokens) == ("mine", 3)
        assert is_running(server.pid)
    assert not is_running(server.pid)


def test_a_server_takes_requests_from_the_start():
    with serve(settings={"engine.startup_s": 1}, speedup=1) as server:
        assert ask(server).usage.completion_tokens == 3


def test_an_open_stream_does_not_hold_up_the_end():
    with serve(speedup=1) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        stream = client.completions.create(
            model=server.model, prompt="Hello", max_tokens=8000, stream=True
        )
        next(iter(stream))
    left = 0
    with contextlib.suppress(openai.OpenAIError, OSError):
        left = sum(1 for _ in stream)
    assert left < 7000  # it was cut off, not awaited


def test_servers_run_side_by_side_and_end_with_an_exception():
    with serve() as first, pytest.raises(KeyError), serve() as second:
        assert first.url != second.url
        assert ask(first).usage == ask(second).usage
        raise KeyError
    assert not is_running(first.pid) and not is_running(second.pid)


def test_clusters_are_those_of_the_simulator(tmp_path):
    text = '[model]\npreset = "llama-3.1-8b"\n'
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    parsed = ss.Cluster.parse(text)
    for cluster in (file, str(file), ss.Cluster.read(file), parsed):
        with serve(cluster) as server:
            assert server.model == "llama-3.1-8b"
    with serve(parsed.set("model.name", "b"), settings={"live.management": True}) as server:
        assert server.model == "b"
        with urllib.request.urlopen(f"{server.url}/is_sleeping") as answer:
            assert answer.read() == b'{"is_sleeping":false}'


def test_faults_by_rate_reach_the_client():
    with (
        serve(settings={"live.faults.error_429": 1}) as server,
        pytest.raises(openai.RateLimitError, match="a fault by rate"),
    ):
        ask(server)


def test_a_wrong_setting_is_the_text_of_the_error():
    with (
        pytest.raises(ServerError, match=r"pool\.main\.workers"),
        serve(settings={"pool.main.workers": -1}),
    ):
        pytest.fail("it has not started")
    with pytest.raises(ServerError, match="no-such-file"), serve("no-such-file.toml"):
        pytest.fail("it has not started")


def test_a_server_that_ends_is_an_error():
    with pytest.raises(ServerError, match="status -9"), serve() as server:
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def test_a_server_needs_a_command(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_BIN", str(tmp_path / "none"))
    with pytest.raises(ss.MissingFileError, match="SLIPSTREAM_BIN is"):
        command()
    monkeypatch.delenv("SLIPSTREAM_BIN")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ss.MissingFileError, match="install the wheel"):
        command()
    # Another program of this name.
    other = tmp_path / "slipstream"
    other.write_text("#!/bin/sh\necho other\n")
    other.chmod(0o755)
    with pytest.raises(ServerError, match="it printed 'other'"), serve():
        pytest.fail("it has not started")


def test_the_example_of_the_docs_passes_with_the_plugin(tmp_path):
    page = (ROOT / "docs" / "python.md").read_text()
    section = page.split("## In tests of your programs")[1].split("\n## ")[0]
    example = section.split("```python\n")[1].split("```")[0]
    assert "def test_" in example
    (tmp_path / "test_agent.py").write_text(textwrap.dedent(example))
    # Named, because an environment that was made before has no entry point for it.
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p",
         "slipstream.pytest_plugin", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_package_is_a_plugin_of_pytest():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["slipstream"]
    assert module == "slipstream.pytest_plugin"
    assert hasattr(__import__(module, fromlist=["x"]), "slipstream_server")
