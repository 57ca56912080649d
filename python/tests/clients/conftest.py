"""A real `slipstream serve` for the clients."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

_path = Path(__file__).parent.parent / "base" / "conftest.py"
_spec = importlib.util.spec_from_file_location("serving", _path)
assert _spec and _spec.loader
serving = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(serving)

binary = serving.binary


@pytest.fixture(scope="session")
def server(binary: Path) -> Iterator:
    """A server without modelled waits."""
    with serving.running(binary, *serving.FAST) as server:
        yield server


@pytest.fixture
def client(server) -> openai.OpenAI:
    """An official client of `server`."""
    return server.client()


@pytest.fixture(scope="session")
def model(server) -> str:
    """The served model's name."""
    return server.client().models.list().data[0].id
