"""What a question is about: a cluster, and a workload or a trace.

Objects are immutable, and pickle as the text of their files.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream import _native
from slipstream.errors import ArgumentTypeError, QuestionError

__all__ = ["Cluster", "Path", "Trace", "Value", "Workload", "as_text", "duration"]

Value = bool | int | float | str | list[Any]
"""A value of a configuration key."""


def plain(value: Any) -> Any:
    """Return a scalar of numpy, pandas or polars as Python's."""
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def as_text(value: Value, name: str = "a value") -> str:
    """Write `value` as in `--set KEY=VALUE`.

    >>> as_text(True), as_text(0.5), as_text("kv"), as_text([1, 2])
    ('true', '0.5', 'kv', '[1, 2]')
    """
    value = plain(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return check_text(value, name) or ""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(quoted(each) for each in value) + "]"
    if isinstance(value, int | float):
        return str(value)
    raise ArgumentTypeError(
        f"{name}: {value!r} is no value of a key; use a number, a bool, a str or a list of these"
    )


def quoted(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str) else as_text(value)


def duration(seconds: float | None, name: str) -> dict[str, int] | None:
    """Return `seconds` in the form of a question."""
    if seconds is None:
        return None
    ns = check_number(seconds, name) * 1e9
    if not 0 <= ns < 2**63:
        raise QuestionError(f"{name} is {seconds}, but must be 0 to 9e9 seconds")
    return {"secs": int(ns // 10**9), "nanos": int(ns % 10**9)}


def check_number(value: float, name: str) -> float:
    value = plain(value)
    if isinstance(value, bool):
        raise QuestionError(f"{name} is {value!r}, but must be a number")
    if not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} is {value!r}, but must be a number")
    if not abs(value) <= sys.float_info.max:
        raise QuestionError(f"{name} must be a finite number below 1.8e308")
    return value


def check_count(value: int | None, name: str, most: int = 2**64 - 1) -> int | None:
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, bool | float):
        raise QuestionError(f"{name} is {value!r}, but must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {value!r}, but must be a whole number") from None
    if not 0 <= number <= most:
        raise QuestionError(f"{name} is {value}, but must be 0 to {most}")
    return number


def check_text(value: str | None, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(f"{name} is {value!r}, but must be a str")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise QuestionError(f"{name} is {value!r}, which is not Unicode") from None
    return value


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ArgumentTypeError(f"path is {path!r}, but must be a str or an os.PathLike of str")
    return os.fspath(path)


def check_flag(value: bool, name: str) -> bool:
    value = plain(value)
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is {value!r}, but must be True or False")
    return value


RANGES = {
    "concurrency": (1, 2**32 - 1),
    "isl": (1, 100_000_000),
    "osl": (1, 100_000_000),
    "requests": (1, 2**64 - 1),
    "seed": (0, 2**64 - 1),
    "rate": (1e-8, 1e9),
    "duration_s": (1e-9, 9e9),
    "time_scale": (1e-9, 1e9),
}
"""Least and most of each number of a workload: as the command's flags have them."""


def check_fields(of: object) -> None:
    """Check the fields of a workload or trace, and make them Python's own."""
    for name, (least, most) in RANGES.items():
        value = getattr(of, name, None)
        if value is None:
            continue
        is_whole = isinstance(least, int)
        kept = (check_count(value, name) or 0) if is_whole else check_number(value, name)
        if not least <= kept <= most:
            raise QuestionError(f"{name} is {value}, but must be {least} to {most}")
        keep(of, name, kept)
    for name in ("file", "text", "path", "on_bad_line", "columns", "unit"):
        check_text(getattr(of, name, None), name)
    sets = getattr(of, "sets", ())
    if not isinstance(sets, tuple | list):
        raise ArgumentTypeError(f"sets is {sets!r}, but must be a tuple of 'KEY=VALUE'")
    for each in sets:
        if not isinstance(each, str):
            raise ArgumentTypeError(f"sets has {each!r}, but must be a tuple of 'KEY=VALUE'")


def keep(of: object, name: str, value: object) -> None:
    """Set a field of a frozen object, if it has one."""
    if hasattr(of, name):
        object.__setattr__(of, name, value)


def assignments(assigned: tuple[object, ...], keys: dict[str, Value]) -> tuple[str, ...]:
    """Return `KEY=VALUE` of `set`'s arguments: a key and its value, or a mapping."""
    match assigned:
        case ():
            pairs: dict[str, Value] = {}
        case (dict() as pairs,):
            pass
        case (str() as key, value):
            pairs = {key: value}  # type: ignore[dict-item]
        case _:
            raise ArgumentTypeError("use set(KEY, VALUE) or set({KEY: VALUE, ...})")
    for key in pairs:
        if not isinstance(key, str):
            raise ArgumentTypeError(f"{key!r} is no key; keys are str")
    return tuple(f"{key}={as_text(value, key)}" for key, value in {**pairs, **keys}.items())


@dataclass(frozen=True)
class Cluster:
    """A cluster file with overrides (`docs/cluster-file.md`).

    >>> cluster = Cluster().set("pool.main.workers", 16).set({"router.policy": "round_robin"})
    >>> "workers = 16" in cluster.to_toml()
    True
    """

    file: str | None = None
    text: str | None = None
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file. Paths in it are relative to it.

        Raises
        ------
        ConfigError
            If a value is wrong.
        FileError
            If the file cannot be read.
        """
        path = path_text(path)
        text = _native.read_text(path, "the cluster file ")
        cluster = Cluster(os.path.abspath(path), text)
        cluster.to_toml()
        return cluster

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read a cluster from the text of a cluster file.

        >>> Cluster.parse("engine.max_num_seqs = 64").set("router.policy", "random")
        Cluster(router.policy=random)
        """
        cluster = Cluster(None, text)
        cluster.to_toml()
        return cluster

    def set(self, *assigned: object, **keys: Value) -> Cluster:
        """Return this cluster with keys changed: `set(KEY, VALUE)` or `set({KEY: VALUE})`.

        Raises
        ------
        ConfigError
            If a key or a value is wrong, with its remedy.
        """
        cluster = replace(self, sets=self.sets + assignments(assigned, keys))
        cluster.to_toml()
        return cluster

    def to_toml(self) -> str:
        """Return every value with its origin, as `--print-config` prints it."""
        return _native.cluster_toml(json.dumps(self.source()))

    def source(self) -> dict[str, Any]:
        """Return this cluster as a part of a question."""
        return {"file": self.file, "text": self.text, "sets": list(self.sets)}

    def __repr__(self) -> str:
        return f"Cluster({', '.join([*([self.file] if self.file else []), *self.sets])})"


@dataclass(frozen=True)
class Workload:
    """A workload: a file (`Workload.read`), or a simple load.

    >>> Workload(rate=10, isl=512, osl=64, requests=100, seed=1)
    Workload(rate=10, isl=512, osl=64, requests=100, seed=1)
    """

    rate: float | None = None
    concurrency: int | None = None
    isl: int | None = None
    osl: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    time_scale: float | None = None
    seed: int | None = None
    file: str | None = None
    text: str | None = None
    sets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rate is not None and self.concurrency is not None:
            raise QuestionError("rate and concurrency are two kinds of load; give one of them")
        if self.text is not None:
            given = [
                n for n in ("rate", "concurrency", "isl", "osl") if getattr(self, n) is not None
            ]
            if given:
                raise QuestionError(
                    f"{given[0]} contradicts the workload's text; change it with .set(KEY, VALUE)"
                )
        if self.sets and self.text is None and self.file is None:
            raise QuestionError(
                f"`{self.sets[0]}` in sets changes a workload file, and there is none"
            )
        self.check()

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Workload:
        """Read a workload file (`docs/workload.md`).

        Raises
        ------
        ConfigError
            If a value is wrong.
        FileError
            If the file cannot be read.
        """
        path = path_text(path)
        return Workload(file=os.path.abspath(path), text=_native.read_text(path, ""))

    @staticmethod
    def parse(text: str) -> Workload:
        """Read a workload from the text of a workload file."""
        return Workload(text=text)

    def set(self, *assigned: object, **keys: Value) -> Workload:
        """Return this workload with keys of its file changed.

        Raises
        ------
        ConfigError
            If a key or a value is wrong, with its remedy.
        """
        return replace(self, sets=self.sets + assignments(assigned, keys))

    def check(self) -> None:
        """Raise the error of a wrong value."""
        _native.workload_text(json.dumps(self.source()))

    def source(self) -> dict[str, Any]:
        """Return this workload as a part of a question."""
        return {
            "file": self.file,
            "text": self.text,
            "sets": list(self.sets),
            "rate": self.rate,
            "concurrency": self.concurrency,
            "isl": self.isl,
            "osl": self.osl,
            "requests": self.requests,
            "duration": duration(self.duration_s, "duration_s"),
            "time_scale": self.time_scale,
            "seed": self.seed,
        }

    def __repr__(self) -> str:
        given = [self.file] if self.file else []
        numbers = (
            "rate",
            "concurrency",
            "isl",
            "osl",
            "requests",
            "duration_s",
            "time_scale",
            "seed",
        )
        given += [f"{n}={getattr(self, n)!r}" for n in numbers if getattr(self, n) is not None]
        return f"Workload({', '.join([*given, *self.sets])})"


@dataclass(frozen=True)
class Trace:
    """A trace to replay: Mooncake's or Qwen-Bailian's JSONL, a CSV, a folder of `serve --record`.

    For a trace in another format, `columns` names its fields (`arrival=NAME,isl=NAME,osl=NAME`) and
    `unit` ("s", "ms", "us" or "ns") is that of its times.
    The file is read where a question is answered: each node of a Ray cluster needs it under the
    same path.
    """

    path: str
    requests: int | None = None
    duration_s: float | None = None
    time_scale: float | None = None
    rate: float | None = None
    concurrency: int | None = None
    seed: int | None = None
    on_bad_line: str | None = None
    columns: str | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.path is None:
            raise ArgumentTypeError("path is None, but must be a str")
        if self.rate is not None and self.concurrency is not None:
            raise QuestionError("rate and concurrency are two kinds of load; give one of them")
        if self.on_bad_line not in (None, "stop", "skip"):
            raise QuestionError(
                f"on_bad_line is {self.on_bad_line!r}, but must be 'stop' or 'skip'"
            )
        if self.unit not in (None, "s", "ms", "us", "ns"):
            raise QuestionError(f"unit is {self.unit!r}, but must be 's', 'ms', 'us' or 'ns'")
        _native.workload_text(json.dumps(self.source()))

    @staticmethod
    def read(path: str | os.PathLike[str], **options: Any) -> Trace:
        """Name a trace. Options are the fields, such as `requests` and `time_scale`.

        Raises
        ------
        MissingFileError
            If there is no such file.
        """
        path = os.path.abspath(path_text(path))
        if not os.path.exists(path):
            from slipstream.errors import MissingFileError

            raise MissingFileError(f"reading {path}: No such file or directory")
        return Trace(path, **options)

    def source(self) -> dict[str, Any]:
        """Return this trace as a part of a question."""
        skip = None if self.on_bad_line is None else self.on_bad_line == "skip"
        return {
            "trace": self.path,
            "requests": self.requests,
            "duration": duration(self.duration_s, "duration_s"),
            "time_scale": self.time_scale,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "seed": self.seed,
            "skip_bad_lines": skip,
            "trace_columns": self.columns,
            "trace_unit": self.unit,
        }
