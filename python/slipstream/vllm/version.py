"""Which vLLM versions the connector runs on."""

import re
from importlib import metadata

OLDEST = (0, 32)
NEWEST = (0, 33)
"""Releases that `make test-vllm` has passed on, both ends included."""


def check_version(version: str | None = None) -> None:
    """Check the installed vLLM, or the `version` given.

    Raises
    ------
    ImportError
        If vLLM is missing or untested; the text says what to install.
    """
    wanted = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    if version is None:
        try:
            version = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            raise ImportError(
                f"slipstream.vllm needs vLLM, which is not installed: pip install '{wanted}'"
            ) from None
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        raise ImportError(
            f"slipstream.vllm was not tested with vLLM {version}: pip install '{wanted}'"
        )
