"""Fixtures of pytest: a server of modelled engines (`docs/python.md`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slipstream.testing import Server


@pytest.fixture(scope="session")
def slipstream_serve() -> Callable[..., AbstractContextManager[Server]]:
    """Return `slipstream.testing.serve`, for servers with settings of their own."""
    from slipstream.testing import serve

    return serve


@pytest.fixture(scope="session")
def slipstream_server(
    slipstream_serve: Callable[..., AbstractContextManager[Server]],
) -> Iterator[Server]:
    """Yield one server with the default cluster, without modelled waits, for all tests."""
    with slipstream_serve() as server:
        yield server
