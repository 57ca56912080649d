"""Charts of answers as Plotly figures."""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream._optional import load

if TYPE_CHECKING:
    import plotly.graph_objects as go

POINTS_MAX = 400
"""Points of a distribution, so that a notebook with a long run stays small."""

SHARES = {"min": 0.0, "p50": 50.0, "p75": 75.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
NAMES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end-to-end latency",
}


def empty() -> go.Figure:
    """Return a figure without data, which is drawn wherever the notebook is shown.

    In a kernel Plotly writes its own type alone, which nbconvert does not draw: HTML is added. A
    renderer that the user has chosen stays.
    """
    go = load("plotly.graph_objects", "plot()")
    renderers = load("plotly.io", "plot()").renderers
    if renderers.default == "plotly_mimetype" and "PLOTLY_RENDERER" not in os.environ:
        renderers.default = "plotly_mimetype+notebook"
    return go.Figure()


def latency(
    name: str, summary: Mapping[str, Any], columns: Mapping[str, list[Any]] | None
) -> go.Figure:
    """Draw a latency's distribution: of each class by its requests, or of all by percentiles."""
    figure = empty()
    classes = [entry["name"] for entry in summary.get("classes") or []]
    for label, values in _values(name, columns, classes).items():
        x, y = _distribution(values)
        figure.add_scatter(x=x, y=y, name=label, mode="lines")
    found = summary["latency"].get(f"{name}_ms") or {}
    known = {key: found[key] for key in SHARES if found.get(key) is not None}
    if not figure.data and known:
        shares = [SHARES[key] for key in known]
        figure.add_scatter(x=list(known.values()), y=shares, name="all", mode="lines+markers")
    elif not figure.data:
        # No request succeeded, or none had two tokens.
        figure.add_annotation(text=f"{NAMES[name]}: no request has one", showarrow=False)
    slo = (summary.get("goodput") or {}).get("slo") or ""
    for bound_ms in sorted(objectives(slo, name)):
        figure.add_vline(x=bound_ms, line_dash="dot", annotation_text=f"objective {bound_ms:g} ms")
    figure.update_layout(
        title=f"{NAMES[name].capitalize()} of {summary['label']}, {summary['workload']}",
        xaxis_title=f"{NAMES[name]}, ms",
        yaxis_title="requests at most this slow, %"
        if name != "itl"
        else "gaps at most this long, %",
        hovermode="x unified",
        showlegend=len(figure.data) > 1,
    )
    figure.update_xaxes(rangemode="tozero")
    return figure


def _values(
    name: str, columns: Mapping[str, list[Any]] | None, classes: Sequence[str]
) -> dict[str, list[float]]:
    if columns is None or f"{name}_ms" not in columns:
        return {}
    found: dict[str, list[float]] = {}
    for value, number in zip(columns[f"{name}_ms"], columns["class"], strict=True):
        if value is not None:
            label = classes[number] if number < len(classes) else "all"
            found.setdefault(label, []).append(value)
    return found


def _distribution(values: list[float]) -> tuple[list[float], list[float]]:
    values = sorted(values)
    last = len(values) - 1
    count = min(len(values), POINTS_MAX)
    at = [round(n * last / max(count - 1, 1)) for n in range(count)]
    shares = [100.0 * bisect.bisect_right(values, values[n]) / len(values) for n in at]
    return [values[n] for n in at], shares


def objectives(slo: str, name: str) -> set[float]:
    """Return the bounds of a latency in the text of objectives, ms."""
    found = re.findall(rf"\b{name}=([\d.]+)(us|ms|s|m)\b", slo)
    return {round(float(value) * SECONDS[unit] * 1e3, 9) for value, unit in found}


def front(columns: Mapping[str, list[Any]]) -> go.Figure:
    """Draw the configurations of a sweep, with the Pareto front."""
    # The varied keys come before `front`.
    keys = list(columns)[: list(columns).index("front")]
    figure = empty()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows.sort(key=lambda row: row["gpu_hours"])
    for name, is_front, mode in (
        ("others", False, "markers"),
        ("Pareto front", True, "lines+markers"),
    ):
        shown = [row for row in rows if bool(row["front"]) == is_front]
        figure.add_scatter(
            x=[row["gpu_hours"] for row in shown],
            y=[row["goodput_per_s"] for row in shown],
            name=name,
            mode=mode,
            text=[_hover(row, keys) for row in shown],
            hovertemplate="%{text}<extra></extra>",
        )
    figure.update_layout(
        title="Goodput and GPU time of each configuration",
        xaxis_title="GPU-hours",
        yaxis_title="goodput, requests/s",
    )
    figure.update_xaxes(rangemode="tozero")
    return figure


def _hover(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    lines = [f"{key} = {row[key]}" for key in keys]
    lines.append(f"goodput {row['goodput_per_s']:.3g} requests/s, {row['gpu_hours']:.3g} GPU-hours")
    if row.get("attained") is not None:
        lines.append(f"attained {100 * row['attained']:.2f} %")
    if row.get("ttft_ms_p99") is not None:
        lines.append(f"TTFT p99 {row['ttft_ms_p99']:.4g} ms")
    if row.get("cost_per_hour") is not None:
        lines.append(f"{row['cost_per_hour']:.2f} per hour")
    return "<br>".join(lines)


def costs(summary: Mapping[str, Any]) -> go.Figure:
    """Draw the cost of a plan's answers and of the shapes beside them, cheapest first."""
    priced = summary["cost"] == "price"
    key, unit = ("cost_per_hour", "cost per hour") if priced else ("gpus", "GPUs")
    figure = empty()
    several = len(summary["answers"]) > 1
    for answer in summary["answers"]:
        rows = [answer["answer"], *answer["others"]] if answer["found"] else []
        figure.add_bar(
            x=[row[key] for row in rows],
            y=[row["name"] for row in rows],
            name=f"load {answer['load']:g}",
            orientation="h",
            text=[f"attained {100 * row['attained']:.2f} %" for row in rows],
            hovertext=[
                f"{row['gpus']} GPUs, {row['max_num_seqs']} seqs, "
                f"{row['max_num_batched_tokens']} tokens, {row['policy']}"
                for row in rows
            ],
            opacity=1.0,
        )
        if not several:
            # The answer, and the shapes that it was preferred to.
            figure.data[0].marker.opacity = [1.0, *[0.5] * (len(rows) - 1)]
    found = [answer["answer"]["name"] for answer in summary["answers"] if answer["found"]]
    figure.update_layout(
        title=f"Answer: {', '.join(dict.fromkeys(found))}" if found else "Nothing attains",
        xaxis_title=unit,
        showlegend=several,
    )
    names = {row for bar in figure.data for row in bar.y}
    figure.update_layout(height=180 + 35 * max(len(names), 1))
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure
