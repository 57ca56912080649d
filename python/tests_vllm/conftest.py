"""What all tests of the connector have in common."""

import pytest
from slipstream._native import take_warnings


@pytest.fixture(autouse=True)
def no_warnings_of_before() -> None:
    """Each test has its own window of warnings of which only the first few are logged."""
    take_warnings(ahead_s=1e6)
