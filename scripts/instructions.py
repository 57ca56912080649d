"""Compares instructions per operation with those on record; called by instructions.sh."""

import json
import sys
from pathlib import Path

LIMIT = 0.03


def per_operation(low: str, high: str) -> float:
    """Instructions of an operation, from two runs of "INSTRUCTIONS OPERATIONS"."""
    (ir, ops), (ir_more, ops_more) = (map(int, part.split()) for part in (low, high))
    return (ir_more - ir) / (ops_more - ops)


def main() -> int:
    """Print the comparison; 1 if a path takes more than the limit."""
    counts, record, compiler = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    found = {}
    for line in counts.read_text().splitlines():
        path, low, high = line.split("|")
        found[path] = round(per_operation(low, high), 1)
    if "--write" in sys.argv:
        record.write_text(
            json.dumps({"compiler": compiler, "instructions": found}, indent=2) + "\n"
        )
    known = json.loads(record.read_text())
    same = known["compiler"] == compiler
    failed = []
    print(f"{'instructions per operation':<34} {'now':>9} {'record':>9} {'change':>8}")
    for path, now in found.items():
        before = known["instructions"].get(path)
        if before is None:
            failed.append(f"{path}: not on record")
            continue
        change = now / before - 1
        print(f"{path:<34} {now:>9,.1f} {before:>9,.1f} {change:>+8.1%}")
        if change > LIMIT:
            failed.append(f"{path}: {change:+.1%}, limit {LIMIT:+.0%}")
        elif change < -LIMIT:
            print("  faster: WRITE=1 scripts/instructions.sh puts it on record")
    failed += [f"{path}: not measured" for path in known["instructions"] if path not in found]
    if failed and not same:
        print(f"no verdict: the record is of {known['compiler']}, this is {compiler}")
        return 0
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
