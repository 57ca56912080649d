"""Errors of `slipstream`, with the texts of the command's."""

import builtins

__all__ = [
    "ArgumentTypeError",
    "ConfigError",
    "Error",
    "FileError",
    "InterruptedRunError",
    "MissingFileError",
    "MissingPackageError",
    "QuestionError",
    "RemoteError",
    "WorkloadError",
]


class Error(Exception):
    """A question that could not be answered; the base of the others."""


class ConfigError(Error, ValueError):
    """A value of a cluster file, workload file or file of prices is wrong."""


class WorkloadError(Error, ValueError):
    """A workload or a trace failed while it was read."""


class QuestionError(Error, ValueError):
    """An argument is wrong, or arguments contradict each other."""


class ArgumentTypeError(QuestionError, TypeError):
    """An argument has a wrong type."""


class FileError(Error, builtins.OSError):
    """A file could not be read."""


class MissingFileError(Error, builtins.FileNotFoundError):
    """A file does not exist."""


class MissingPackageError(Error, builtins.ImportError):
    """A function needs a package that is not installed."""


class RemoteError(Error, RuntimeError):
    """Tasks on a Ray cluster failed, or it could not be reached."""


class InterruptedRunError(Error, RuntimeError):
    """A run ended because it was interrupted."""
