"""Answers: figures, tables in Arrow's layout, and charts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import _charts, _display, _native
from slipstream._optional import load
from slipstream.errors import QuestionError

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    import polars
    import pyarrow

__all__ = ["Page", "Plan", "Result", "Sweep", "Table"]


class Table:
    """A table that libraries of Arrow read without a copy: `polars.DataFrame(table)`.

    >>> import slipstream as ss
    >>> table = ss.simulate(ss.Cluster(), ss.Workload(rate=5, requests=20)).requests
    >>> len(table), table.column("status")[0]
    (20, 'ok')
    """

    def __init__(self, native: _native.Table) -> None:
        self._native = native

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._native.num_rows

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, in order."""
        return self._native.column_names

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._native.nbytes

    def column(self, name: str) -> list[Any]:
        """Return a column as a list, with `None` for values that are absent.

        Raises
        ------
        KeyError
            If there is no such column.
        """
        return self._native.column(name)

    def to_dict(self) -> dict[str, list[Any]]:
        """Return all columns as lists."""
        return {name: self.column(name) for name in self.column_names}

    def __len__(self) -> int:
        return self.num_rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._native.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self._native.__arrow_c_schema__()

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame, which shares this memory. Takes polars."""
        frame: polars.DataFrame = load("polars", "to_polars()").DataFrame(self)
        return frame

    def to_arrow(self) -> pyarrow.Table:
        """Return a pyarrow Table, which shares this memory. Takes pyarrow."""
        frame: pyarrow.Table = load("pyarrow", "to_arrow()").table(self)
        return frame

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame. Takes pandas."""
        frame: pandas.DataFrame = load("pandas", "to_pandas()").DataFrame(self.to_dict())
        return frame

    def __repr__(self) -> str:
        return f"Table({self.num_rows:,} rows: {', '.join(self.column_names)})"

    def _repr_html_(self) -> str:
        names = self.column_names
        shown = min(self.num_rows, 20)
        columns = [self.column(name)[:shown] for name in names] if self.num_rows <= 10_000 else []
        rows = [[_cell(cell) for cell in row] for row in zip(*columns, strict=True)]
        right = [all(not isinstance(cell, str) for cell in column) for column in columns]
        more = f"the first {shown} of " if rows and shown < self.num_rows else ""
        return f"<p>{more}{self.num_rows:,} rows</p>{_display.table([names, *rows], right)}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page, for a browser."""

    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Page({len(self.html):,} bytes; save(path) writes it)"


class _Printed:
    """An answer whose `str` is the text of the command."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _display.rich(self.text)


@dataclass(frozen=True)
class Result(_Printed):
    """The result of `simulate`. `print(result)` prints the command's table."""

    json: str
    text: str
    notes: tuple[str, ...]
    page: Page
    table: Table | None

    def summary(self) -> dict[str, Any]:
        """Return all figures, as `slipstream simulate --json` (`docs/results.md`)."""
        figures: dict[str, Any] = json.loads(self.json)
        return figures

    @property
    def requests(self) -> Table:
        """One row per request.

        Raises
        ------
        QuestionError
            If they were not kept (`simulate(..., requests=False)`).
        """
        if self.table is None:
            raise QuestionError("requests were not kept; call simulate(..., requests=True)")
        return self.table

    @property
    def digest(self) -> str:
        """Digest of every request's times, target and hits: equal if two runs were."""
        digest: str = self.summary()["simulation"]["digest"]
        return digest

    def plot(self, latency: str = "ttft") -> go.Figure:
        """Return a Plotly figure of a latency's distribution: `ttft`, `itl`, `tpot` or `e2e`.

        Takes plotly. `itl` has percentiles only.
        """
        if latency not in _charts.NAMES:
            raise QuestionError(f"no chart `{latency}`; one of {', '.join(_charts.NAMES)}")
        columns = None
        if self.table is not None and f"{latency}_ms" in self.table.column_names:
            columns = {name: self.table.column(name) for name in (f"{latency}_ms", "class")}
        return _charts.latency(latency, self.summary(), columns)

    def __repr__(self) -> str:
        sent = self.summary()["requests"]["sent"]
        return f"Result({sent:,} requests, digest {self.digest})"


@dataclass(frozen=True)
class Sweep(_Printed):
    """The result of `sweep`, a row per configuration; `str(result)` is the command's table."""

    table: Table
    text: str
    front_text: str
    notes: tuple[str, ...]
    page: Page

    def front(self) -> list[dict[str, Any]]:
        """Return the configurations on the Pareto front, each as a dict of its figures."""
        columns = self.table.to_dict()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [row for row in rows if row["front"]]

    def __len__(self) -> int:
        return len(self.table)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame. Takes polars."""
        return self.table.to_polars()

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame. Takes pandas."""
        return self.table.to_pandas()

    def plot(self) -> go.Figure:
        """Return a Plotly figure of all configurations, with the Pareto front. Takes plotly."""
        return _charts.front(self.table.to_dict())

    def __repr__(self) -> str:
        return f"Sweep({len(self):,} configurations)"


@dataclass(frozen=True)
class Plan(_Printed):
    """The result of `plan`. `print(result)` prints the command's tables."""

    found: bool
    json: str
    text: str
    cluster_toml: str | None
    notes: tuple[str, ...]
    page: Page

    def summary(self) -> dict[str, Any]:
        """Return all figures, as `slipstream plan --json` (`docs/plan.md`)."""
        figures: dict[str, Any] = json.loads(self.json)
        return figures

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The answer of each load."""
        answers: list[dict[str, Any]] = self.summary()["answers"]
        return answers

    def cluster(self) -> Any:
        """Return the (first) answer as a `Cluster`.

        Raises
        ------
        QuestionError
            If nothing attains the objectives.
        """
        from slipstream.sources import Cluster

        if self.cluster_toml is None:
            raise QuestionError("nothing attains the objectives; print the plan for the reason")
        return Cluster.parse(self.cluster_toml)

    def plot(self) -> go.Figure:
        """Return a Plotly figure of the cost of the answer and of other shapes. Takes plotly."""
        return _charts.costs(self.summary())

    def __repr__(self) -> str:
        return f"Plan({self.text.splitlines()[0]})"
