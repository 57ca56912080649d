"""How answers and progress look in a notebook."""

from __future__ import annotations

import html
import itertools
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

RULE = re.compile(r"─+(  ─+)+")
"""The line below a table's header, in the command's text: a run per column, two spaces between."""

MONOSPACE = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
TABLE = f"border-collapse:collapse;white-space:nowrap;font-variant-numeric:tabular-nums;{MONOSPACE}"
CELL = "padding:0.15em 0.7em;text-align:"

FIRST_S = 0.5
"""Questions that end earlier show no progress in a notebook."""


def rich(text: str) -> str:
    """Return the command's text as HTML, its tables as tables."""
    lines, parts, plain, at = text.rstrip("\n").split("\n"), [], list[str](), 0
    while at < len(lines):
        if at + 1 < len(lines) and RULE.fullmatch(lines[at + 1]):
            spans = [match.span() for match in re.finditer("─+", lines[at + 1])]
            end = at + 2
            while end < len(lines) and lines[end] and _fits(lines[end], spans):
                end += 1
            parts += [_paragraph(plain), _table(lines[at], lines[at + 2 : end], spans)]
            plain, at = [], end
        else:
            plain.append(lines[at])
            at += 1
    return "".join([*parts, _paragraph(plain)])


def _fits(line: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a line has spaces where columns are apart."""
    gaps = itertools.pairwise(spans)
    return all(line[left[1] : right[0]].strip() == "" for left, right in gaps)


def _paragraph(lines: Sequence[str]) -> str:
    text = "\n".join(lines).strip("\n")
    style = f"{MONOSPACE};white-space:pre-wrap;margin:0.5em 0"
    return f'<pre style="{style}">{html.escape(text)}</pre>' if text else ""


def _table(header: str, rows: Sequence[str], spans: Sequence[tuple[int, int]]) -> str:
    starts = [start for start, _ in spans[1:]]
    cells = [
        [row[start:end] for start, end in zip([0, *starts], [*starts, None], strict=True)]
        for row in (header, *rows)
    ]
    # A column is aligned to the right if some of its texts begin with spaces.
    right = [
        any(row[at][:1] == " " for row in cells if row[at].strip()) for at in range(len(spans))
    ]
    return table([[cell.strip() for cell in row] for row in cells], right)


def table(rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None) -> str:
    """Return a table whose first row is the header; `right` says which columns align right."""
    aligned = right or [False] * len(rows[0])
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = "".join(
            f'<{tag} style="{CELL}{"right" if at_right else "left"}">{html.escape(cell)}</{tag}>'
            for cell, at_right in zip(row, aligned, strict=True)
        )
        lines.append(f"<tr>{cells}</tr>")
    head, body = lines[0], "".join(lines[1:])
    # Wide tables scroll: a notebook's page is as narrow as its window.
    return (
        f'<div style="overflow-x:auto"><table style="{TABLE}">'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>"
    )


def in_notebook() -> bool:
    """Return whether this is a kernel of a notebook, where stderr is not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class Line:
    """A line on stderr that is overwritten."""

    def __call__(self, line: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line."""
        self("")


class Cell:
    """One output of a notebook's cell that is replaced by each line, and emptied at the end."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.handle: Any = None

    def __call__(self, line: str) -> None:
        from IPython.display import display

        if self.handle is None:
            if time.monotonic() - self.begun < FIRST_S:
                return
            self.handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self.handle.update({"text/plain": line}, raw=True)

    def clear(self) -> None:
        """Empty the output."""
        if self.handle is not None:
            self.handle.update({"text/html": "", "text/plain": ""}, raw=True)
            self.handle = None
