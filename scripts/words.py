#!/usr/bin/env python3
"""Count phrases that make prose hard to read, per 10,000 words.

Reads Rust comments (`//`, `///`, `//!`, `/* */`) and the Markdown pages, and compares each count with a
limit. Text in backquotes and code blocks is not counted.

    scripts/words.py                  table per crate and for the pages
    scripts/words.py --list GROUP     every occurrence of one group, as file:line
    scripts/words.py --check          exit 1 and name the occurrences if a limit is exceeded
    scripts/words.py --tree DIR       count the Rust comments below another source tree
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Group: (pattern, limit per 10,000 words, phrase to use instead). A limit is twice what the comments of
# quinn 0.11 hold (`--tree`), rounded up to 1 where quinn has none: one slip per 10,000 words may wait
# for the next change of that file.
GROUPS = {
    "nobody": (
        r"\b(?:nobody|no one|somebody|someone|whoever|whomever)\b",
        1.0,
        "name the process, thread or caller",
    ),
    "tell": (
        r"\b(?:tells?|told|telling|hears?|heard|hearing)\b",
        1.0,
        "publish, report, receive, distinguish",
    ),
    "what is": (
        r"\b(?:what|who) (?:is|are|was|were|came|comes|has|had|went|goes|did|does)\b",
        1.5,
        "a noun that names the thing",
    ),
    "lies": (r"\b(?:lies|lay|lain)\b", 1.0, "is stored, is at, is between"),
    "beside": (r"\b(?:besides?|meanwhile|for ever)\b", 1.0, "next to, in the same run, while, forever"),
    "goes on": (r"\b(?:goes|go|went|gone|going) on\b", 1.0, "continues"),
    "but for": (r"(?:\b(?:all|none|nothing|same|equal)\b[^.;:]{0,40}|, )\bbut for\b", 1.0, "except"),
    "What ...": (
        r"(?:\n\n|^|[.:;]\s)\s*(?-i:What|Who|Whatever)\b(?![^.]{0,80}\?)",
        1.0,
        "start with a noun or a verb",
    ),
    "one a": (
        r"\b(?:bytes|tokens|blocks|words|nodes?|once|twice|one|times|[nµm]s|requests|entries|write|event)"
        r" an? (?:token|pass|step|block|request|second|minute|flush|frame|worker|rank|core|packet|key|client|flow)s?\b",
        1.0,
        "per",
    ),
}

# Lines where a counted word is a term of the field or part of a quotation: (path, text of the line, reason).
EXCEPTIONS = []

# Crates and pages that were not rewritten yet. `--check` leaves them out; remove a name with its rewrite.
PENDING = {
    "engine", "netsim", "planes", "worker", "frontend", "kvstore", "pybind", "cpusched", "scx", "kvindex",
    "des", "dispatch", "flows", "twin", "fuzz",
    "docs/netsim.md", "docs/benchmarks-net.md", "docs/sched.md", "docs/connector.md", "docs/kvstore.md",
    "docs/kv-keys.md", "docs/step-time.md", "docs/live-path.md",
}  # fmt: skip

SKIP_PAGES = {"CHANGELOG.md"}

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|b?r(?P<h>\#*)".*?"(?P=h)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n]{1,9}?|[^'\\\n])'""",
    re.DOTALL,
)
WORD = re.compile(r"[^\W\d_](?:[\w'’-]*\w)?")
# Between the words of a phrase: spaces, or one line's end with the next line's indentation.
GAP = r"(?:[^\S\n]+\n?[^\S\n]*|\n[^\S\n]*)"
CODE = re.compile(r"`+[^`]*`+")


def blank(match):
    """Replaces text by spaces, so that places stay as they are."""
    return re.sub(r"[^\n]", " ", match.group(0))


def comments(text, strings=False):
    """The comments of a Rust source (or its string literals of two words or more), everything else as spaces."""
    out, at = [], 0
    for m in TOKEN.finditer(text):
        if (m["comment"] is None) != strings or (strings and " " not in m.group(0)):
            continue
        out.append(re.sub(r"[^\n]", " ", text[at : m.start()]))
        out.append(m.group(0) if strings else re.sub(r"^(/+!?|/\*+!?)|\*/$", blank, m["comment"]))
        at = m.end()
    out.append(re.sub(r"[^\n]", " ", text[at:]))
    fence = re.compile(r"^\s*```.*?^\s*```", re.DOTALL | re.MULTILINE)
    return CODE.sub(blank, fence.sub(blank, "".join(out)))


def page(text):
    """The prose of a Markdown page: no code blocks, code spans or link targets."""
    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", blank, text)
    return CODE.sub(blank, text)


def excepted(path, line):
    return any(path.startswith(p) and words in line for p, words, _ in EXCEPTIONS)


class Count:
    """Words and occurrences of each group in one place (a crate, the pages)."""

    def __init__(self):
        self.words = 0
        self.hits = {group: [] for group in GROUPS}

    def add(self, path, text, prose):
        self.words += len(WORD.findall(prose))
        prose = re.sub(r"[ \t]+$", "", prose, flags=re.MULTILINE)
        lines = text.split("\n")
        for group, (pattern, _, _) in GROUPS.items():
            for m in re.finditer(pattern.replace(" ", GAP), prose, re.IGNORECASE):
                n = prose.count("\n", 0, m.end() - 1)
                if not excepted(path, lines[n]):
                    self.hits[group].append((path, n + 1, lines[n].strip()))

    def rate(self, group):
        return 1e4 * len(self.hits[group]) / max(self.words, 1)


def tracked(*patterns):
    out = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [name for name in out.split("\0") if name]


def count_project(strings=False):
    """Counts per crate, and of the pages."""
    places = {}
    for name in sorted(tracked("*.rs")):
        parts = name.split("/")
        place = parts[1] if parts[0] == "crates" else parts[0]
        text = (ROOT / name).read_text(encoding="utf-8")
        places.setdefault(place, Count()).add(name, text, comments(text, strings))
    pages = places["pages"] = Count()
    for name in sorted(tracked("*.md")):
        if name not in SKIP_PAGES:
            text = (ROOT / name).read_text(encoding="utf-8")
            pages.add(name, text, page(text))
    return places


def total(places):
    rust = Count()
    for place, count in places.items():
        if place != "pages":
            rust.words += count.words
            for group, hits in count.hits.items():
                rust.hits[group] += hits
    return rust


def table(rows):
    print(f"{'':12}{'words':>8}" + "".join(f"{g:>9}" for g in GROUPS))
    for name, count in rows:
        print(f"{name:12}{count.words:8}" + "".join(f"{count.rate(g):9.1f}" for g in GROUPS))
    print(f"{'limit':20}" + "".join(f"{limit:9.1f}" for _, limit, _ in GROUPS.values()))


def main():
    parser = argparse.ArgumentParser(description="Count phrases that make prose hard to read.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is exceeded")
    parser.add_argument("--list", metavar="GROUP", choices=[*GROUPS, "all"], help="list occurrences")
    parser.add_argument("--in", dest="where", metavar="PATH", default="", help="with --list: paths with this prefix")
    parser.add_argument("--strings", action="store_true", help="string literals instead of comments")
    parser.add_argument("--tree", metavar="DIR", nargs="+", help="count another Rust source tree")
    args = parser.parse_args()

    if args.tree:
        count = Count()
        for tree in args.tree:
            for path in sorted(Path(tree).rglob("*.rs")):
                text = path.read_text(encoding="utf-8")
                count.add(str(path), text, comments(text))
        table([("tree", count)])
        if args.list:
            for group in GROUPS if args.list == "all" else [args.list]:
                for path, line, text in count.hits[group]:
                    print(f"{path}:{line}: {group}: {text}")
        return 0

    places = count_project(args.strings)
    rust = total(places)
    if args.list:
        for group in GROUPS if args.list == "all" else [args.list]:
            for path, line, text in rust.hits[group] + places["pages"].hits[group]:
                if path.startswith(args.where):
                    print(f"{path}:{line}: {group}: {text}")
        return 0
    if not args.check:
        table([*places.items(), ("all crates", rust)])
        return 0
    excess = 0
    for name, count in (("Rust comments", rust), ("pages", places["pages"])):
        for group, (_, limit, instead) in GROUPS.items():
            if count.rate(group) > limit:
                excess += 1
                print(f"{name}: '{group}' {count.rate(group):.1f} per 10,000 words, limit {limit}; use: {instead}")
                for path, line, text in count.hits[group]:
                    print(f"  {path}:{line}: {text}")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
