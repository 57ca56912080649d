"""Fixtures of all tests of the connector."""

import pytest
from slipstream._native import take_warnings


@pytest.fixture(autouse=True)
def no_warnings_of_before() -> None:
    """Resets the rate limit of warnings for each test."""
    take_warnings(ahead_s=1e6)
