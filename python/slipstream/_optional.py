"""Packages that some functions need and the others do not."""

import importlib
from typing import Any

from slipstream.errors import MissingPackageError


def load(module: str, by: str) -> Any:
    """Return a module that the function `by` needs.

    Raises
    ------
    MissingPackageError
        If its package is not installed; the text names it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is installed reports its own missing dependencies.
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingPackageError(
            f"{by} needs {package}, which is not installed: pip install {package}"
        ) from None
