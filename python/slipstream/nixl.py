"""Finds NIXL's library, for peers at `nixl://` addresses. This module does not import it.

The `nixl` packages on PyPI contain the library and a Python module. The extension opens the
library itself. The module is not needed: it requires PyTorch and takes seconds to import.
"""

import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path

from slipstream.options import OptionError

VARIABLE = "SLIPSTREAM_NIXL_LIBRARY"
"""Selects another library than the installed package's."""

RELEASE = (1, 5)
"""The supported release. NIXL does not guarantee a stable C interface."""

INSTALL = "pip install 'slipstream[nixl]'"


def is_wanted(addresses: list[str]) -> bool:
    """Whether any of the addresses uses NIXL."""
    return any(address.startswith("nixl://") for address in addresses)


def find_library() -> str:
    """Return the path of NIXL's library with its C interface.

    Raises
    ------
    OptionError
        If there is none, or its release is unsupported; the text names the package to install.
    """
    if named := os.environ.get(VARIABLE):
        return named
    for package in packages():
        try:
            version = metadata.version(package.replace("_", "-"))
        except metadata.PackageNotFoundError:
            continue
        match = re.match(r"(\d+)\.(\d+)", version)
        if not match or (int(match[1]), int(match[2])) != RELEASE:
            known = ".".join(map(str, RELEASE))
            raise OptionError(
                f"nixl:// addresses need NIXL {known}, but {package} is {version}: {INSTALL}"
            )
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            # meson-python puts the libraries of a wheel here.
            beside = Path(spec.origin).parent.parent / f".{package}.mesonpy.libs"
            if (library := beside / "libnixl_capi.so").is_file():
                return str(library)
        raise OptionError(
            f"{package} {version} has no libnixl_capi.so: {INSTALL}, or set its path in {VARIABLE}"
        )
    raise OptionError(f"nixl:// addresses need NIXL, which is not installed: {INSTALL}")


def packages() -> list[str]:
    """Return the packages that may contain the library, the preferred one first."""
    known = ["nixl_cu13", "nixl_cu12", "nixl_rocm"]
    # A process has one CUDA version: PyTorch's, if it is loaded.
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda is not None and (own := f"nixl_cu{str(cuda).split('.')[0]}") in known:
        known.remove(own)
        known.insert(0, own)
    return known
