#!/usr/bin/env python3
"""Write the tables of docs/ that come from data under benches/.

benchmarks.py           rewrites the tables
benchmarks.py --check   exits 1 if a table differs from its data, or a page of figures is too long

A result is benches/results/MACHINE/NAME.json, next to the machine's machine.toml. A page of docs/
shows it between `<!-- bench: MACHINE/NAME -->` and `<!-- bench end -->`; benches/results/README.md
describes the fields. The name `instructions` is benches/instructions.json, the record that
`make bench-instructions` compares with.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/results"
FIELDS = ("command", "regime", "time", "rounds", "date", "commit")
MACHINE = {"cpu": str, "cores": int, "kernel": str, "dates": str, "version": str}
PLACE = re.compile(r"(<!-- bench: ([\w/-]+) -->\n).*?(<!-- bench end -->)", re.DOTALL)
WORDS_MAX = 1500


def read_machines():
    """Return the names of the machines, after a check of their descriptions."""
    names = set()
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        path = folder / "machine.toml"
        if not path.exists():
            raise SystemExit(f"{path} is missing; write {', '.join(MACHINE)}")
        with path.open("rb") as file:
            machine = tomllib.load(file)
        for field, kind in MACHINE.items():
            if not isinstance(machine.get(field), kind):
                raise SystemExit(f"{path}: `{field}` is missing or not of type {kind.__name__}")
        names.add(folder.name)
    return names


def read_results(machines):
    """Return each result, by `MACHINE/NAME`."""
    results = {}
    for path in sorted(RESULTS.rglob("*.json")):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        machine = name.rpartition("/")[0]
        if machine not in machines:
            raise SystemExit(f"{path}: move it to a folder of benches/results/, one per machine")
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SystemExit(f"{path}: {error}") from None
        for field in FIELDS:
            if not isinstance(result.get(field), str) or not result[field]:
                raise SystemExit(f"{path}: `{field}` is missing; write a text")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]):
            raise SystemExit(f"{path}: `date` is {result['date']!r}; write YYYY-MM-DD")
        columns = result.get("columns", [])
        if not columns or any(len(row) != len(columns) for row in result.get("rows", [[]])):
            raise SystemExit(f"{path}: each of `rows` needs a value for each of `columns`")
        if unknown := [name for name in result.get("shown", []) if name not in columns]:
            raise SystemExit(f"{path}: `shown` names {unknown}, which `columns` does not have")
        results[name] = {**result, "machine": machine}
    return results


def instructions(path):
    """Return the record of instruction counts as a result."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return {
        "note": f"`make bench-instructions`, callgrind, {record['compiler']}.",
        "columns": ["path", "instructions per operation"],
        "rows": [[name, count] for name, count in record["instructions"].items()],
    }


def cell(value):
    """Return a cell's text."""
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return str(value).replace("|", "\\|")


def table(result):
    """Return a result as Markdown."""
    note = result.get("note") or (
        f"`{result['command']}` on {result['machine']}: {result['regime']}. "
        f"Time: {result['time']}. Rounds: {result['rounds']}."
    )
    shown = result.get("shown", result["columns"])
    at = [result["columns"].index(name) for name in shown]
    rows = [[row[i] for i in at] for row in result["rows"]]
    rows = [shown, ["---"] * len(shown), *rows]
    lines = ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return f"{note}\n\n" + "\n".join(lines) + "\n"


def main():
    """Rewrite or check the pages."""
    results = read_results(read_machines())
    results["instructions"] = instructions(ROOT / "benches/instructions.json")
    hidden = set(results)
    status = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        places = {found[1] for found in PLACE.findall(before)}
        name = page.relative_to(ROOT)
        if missing := places - results.keys():
            raise SystemExit(f"{name} shows {sorted(missing)}: benches/ has no such result")
        hidden -= places
        after = PLACE.sub(lambda at: f"{at[1]}{table(results[at[2]])}{at[3]}", before)
        words = len(after.split())
        if page.name.startswith("benchmarks") and words > WORDS_MAX:
            print(f"{name} has {words} words, tables included; at most {WORDS_MAX}")
            status = 1
        if before == after:
            continue
        if "--check" in sys.argv:
            print(f"{name} differs from benches/; run scripts/benchmarks.py")
            status = 1
        else:
            page.write_text(after, encoding="utf-8")
    if hidden:
        raise SystemExit(f"no page of docs/ has `<!-- bench: NAME -->` for {sorted(hidden)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
