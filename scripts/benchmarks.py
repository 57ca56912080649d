#!/usr/bin/env python3
"""Write the tables of docs/benchmarks.md that come from data under benches/.

benchmarks.py           rewrites the tables
benchmarks.py --check   exits 1 if a table is not that of the data

A result is benches/results/DATE-MACHINE-BENCH.json:

    {"bench": "live", "date": "2026-01-31", "machine": "...", "commit": "...",
     "command": "make bench-live", "columns": ["what", "requests/s"],
     "rows": [["c=1, 128/32", 7986]]}

The newest result of a bench is shown between `<!-- bench: NAME -->` and `<!-- bench end -->`; older
ones stay as history. The bench `instructions` is benches/instructions.json, the record that
`make bench-instructions` compares with.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
FIELDS = {"bench": str, "date": str, "machine": str, "commit": str, "command": str}
PLACE = re.compile(r"(<!-- bench: ([\w-]+) -->\n).*?(<!-- bench end -->)", re.DOTALL)


def read_results(folder):
    """Return the newest result of each bench, by name."""
    newest = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for field, kind in FIELDS.items():
            if not isinstance(result.get(field), kind) or not result[field]:
                raise SystemExit(f"{path}: `{field}` is missing; write a text")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
            raise SystemExit(f"{path}: `date` is {result['date']!r}; write YYYY-MM-DD")
        width = len(result.get("columns", []))
        if not width or any(len(row) != width for row in result.get("rows", [[]])):
            raise SystemExit(f"{path}: each of `rows` needs a value for each of `columns`")
        known = newest.get(result["bench"])
        if known is None or result["date"] >= known["date"]:
            newest[result["bench"]] = result
    return newest


def instructions(path):
    """Return the record of instruction counts as a result."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return {
        "note": f"`make bench-instructions`, callgrind, {record['compiler']}.",
        "columns": ["path", "instructions per operation"],
        "rows": [[name, count] for name, count in record["instructions"].items()],
    }


def shown(value):
    """Return a cell's text."""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return str(value).replace("|", "\\|")


def table(result):
    """Return a result as Markdown."""
    note = result.get("note") or (
        f"`{result['command']}`, {result['machine']}, {result['date']}, commit {result['commit']}."
    )
    rows = [result["columns"], ["---"] * len(result["columns"]), *result["rows"]]
    lines = ["| " + " | ".join(shown(cell) for cell in row) + " |" for row in rows]
    return f"{note}\n\n" + "\n".join(lines) + "\n"


def main():
    """Rewrite or check the page."""
    results = read_results(ROOT / "benches/results")
    results["instructions"] = instructions(ROOT / "benches/instructions.json")
    before = PAGE.read_text(encoding="utf-8")
    places = {found[1] for found in PLACE.findall(before)}
    if missing := places - results.keys():
        raise SystemExit(f"docs/benchmarks.md shows {sorted(missing)}: benches/ has no such result")
    if hidden := results.keys() - places:
        raise SystemExit(f"docs/benchmarks.md has no `<!-- bench: NAME -->` for {sorted(hidden)}")
    after = PLACE.sub(lambda at: f"{at[1]}{table(results[at[2]])}{at[3]}", before)
    if "--check" in sys.argv:
        if before != after:
            print("docs/benchmarks.md differs from benches/; run scripts/benchmarks.py")
            return 1
        return 0
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
