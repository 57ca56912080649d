"""Tables of other libraries as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream import _native
from slipstream.errors import ArgumentTypeError, QuestionError
from slipstream.sources import check_text


def csv_of(table: Any) -> tuple[str, str]:
    """Return a name for errors, and the table as CSV."""
    if isinstance(table, str | os.PathLike):
        path = os.fspath(table)
        check_text(path, "table")
        return path, _native.read_text(path, "")
    columns = columns_of(table)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise QuestionError(f"the columns have different lengths: {lengths}")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(map(cell, values) for values in columns.values()), strict=True))
    return "the table", text.getvalue()


def cell(value: Any) -> Any:
    """Return a cell; absent numbers of pandas are NaN."""
    return "" if value is None or value != value else value


def column(name: object, values: Any) -> list[Any]:
    """Return the values of a column."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise ArgumentTypeError(f"the column {name!r} is {values!r}, but must be a list")
    return list(values)


def columns_of(table: Any) -> dict[str, list[Any]]:
    if isinstance(table, Mapping):
        return {str(name): column(name, values) for name, values in table.items()}
    if hasattr(table, "to_pydict"):  # pyarrow
        return columns_of(table.to_pydict())
    if hasattr(table, "get_columns"):  # polars
        return {series.name: series.to_list() for series in table.get_columns()}
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # pandas
        return columns_of(table.to_dict("list"))
    if hasattr(table, "to_dict"):  # a table of this package
        return columns_of(table.to_dict())
    raise ArgumentTypeError(
        f"a {type(table).__name__} is no table; use a path, a dict of columns, or a DataFrame"
    )
