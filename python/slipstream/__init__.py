"""Simulate, sweep and plan clusters that serve large language models.

>>> import slipstream as ss
>>> cluster = ss.Cluster().set("pool.main.workers", 4)
>>> result = ss.simulate(cluster, ss.Workload(rate=20, requests=200), slo="ttft=1s,itl=50ms")
>>> result.summary()["requests"]["succeeded"]
200

The reference is `docs/python.md`. The vLLM connector is in `slipstream.vllm`; nothing outside of it
imports vLLM, and nothing here imports polars, pandas, pyarrow, plotly or ray before it is used.
"""

from typing import TYPE_CHECKING

from slipstream._native import KeyMirror, KeySet
from slipstream.api import PoolState, plan, predict, simulate, sweep
from slipstream.errors import (
    ConfigError,
    Error,
    FileError,
    InterruptedRunError,
    MissingFileError,
    MissingPackageError,
    QuestionError,
    RemoteError,
    WorkloadError,
)
from slipstream.results import Page, Plan, Result, Sweep, Table
from slipstream.sources import Cluster, Trace, Workload

__all__ = [
    "Cluster",
    "ConfigError",
    "Error",
    "FileError",
    "InterruptedRunError",
    "KeyMirror",
    "KeySet",
    "MissingFileError",
    "MissingPackageError",
    "Page",
    "Plan",
    "PoolState",
    "QuestionError",
    "RemoteError",
    "Result",
    "Sweep",
    "Table",
    "Trace",
    "Workload",
    "WorkloadError",
    "plan",
    "predict",
    "simulate",
    "sweep",
]

__version__: str

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        # Read at its first use: `importlib.metadata` imports much of the standard library.
        if name == "__version__":
            from importlib import metadata

            return metadata.version("slipstream")
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
