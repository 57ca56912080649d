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

# Group: (pattern, limit per 10,000 words, phrase to use instead). A limit is twice the rate in the comments
# of quinn 0.11 (0 to 0.4, by `--tree`), and at least 1, so that a single slip does not fail a small change.
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
        1.0,
        "a noun that names the thing",
    ),
    "lies": (r"\b(?:lies|lay|lain)\b", 1.0, "is stored, is at, is between"),
    "beside": (
        r"\b(?:beside|meanwhile|for ever)\b",
        1.0,
        "next to, in addition to, while, forever",
    ),
    "goes on": (r"\b(?:goes|go|went|gone|going) on\b", 1.0, "continues"),
    "but for": (
        r"(?:\b(?:all|none|nothing|same|equal)\b[^.;:]{0,40}|, )\bbut for\b",
        1.0,
        "except",
    ),
    "What ...": (
        r"(?:\n\n|^|[.:;]\s)\s*(?-i:What|Who|Whatever)\b(?![^.]{0,80}\?)",
        1.0,
        "start with a noun or a verb",
    ),
    "one a": (
        r"\b(?:bytes|tokens|blocks|words|nodes?|one|[nµm]s|requests|entries|write|event)"
        r" an? (?:token|pass|step|block|request|second|minute|flush|frame|worker|rank|core|packet|key|client|flow)s?\b",
        1.0,
        "per",
    ),
}

# Lines where a counted word is a term of the field or part of a quotation: (path, text of the line, reason).
EXCEPTIONS = []

SKIP_PAGES = {"CHANGELOG.md"}

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|b?r(?P<h>\#*)".*?"(?P=h)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^\n]{1,9}?|[^'\\\n])'""",
    re.DOTALL,
)
WORD = re.compile(r"[^\W\d_](?:[\w'’-]*\w)?")
# Between the words of a phrase: spaces, or one line's end with the next line's indentation.
GAP = r"(?:[^\S\n]+\n?[^\S\n]*|\n[^\S\n]*)"
CODE = re.compile(r"`+[^`]*`+")
LINK = re.compile(r"\]\([^)]*\)")


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
    return CODE.sub(blank, LINK.sub(blank, fence.sub(blank, "".join(out))))


def page(text):
    """The prose of a Markdown page: no code blocks, code spans or link targets."""
    text = re.sub(r"^```.*?^```", blank, text, flags=re.DOTALL | re.MULTILINE)
    return CODE.sub(blank, LINK.sub(blank, text))


def excepted(path, line):
    return any(path.startswith(p) and words in line for p, words, _ in EXCEPTIONS)


class Count:
    """Words, and occurrences of each group, of one file or several."""

    def __init__(self):
        self.words = 0
        self.hits = {group: [] for group in GROUPS}

    def read(self, path, text, prose):
        self.words += len(WORD.findall(prose))
        prose = re.sub(r"[ \t]+$", "", prose, flags=re.MULTILINE)
        lines = text.split("\n")
        for group, (pattern, _, _) in GROUPS.items():
            for m in re.finditer(pattern.replace(" ", GAP), prose, re.IGNORECASE):
                n = prose.count("\n", 0, m.end() - 1)
                if not excepted(path, lines[n]):
                    self.hits[group].append((path, n + 1, lines[n].strip()))
        return self

    def rate(self, group):
        return 1e4 * len(self.hits[group]) / max(self.words, 1)

    def print_hits(self, groups, indent="", where=""):
        for group in groups:
            for path, line, text in self.hits[group]:
                if path.startswith(where):
                    print(f"{indent}{path}:{line}: {group}: {text}")


def total(counts):
    """The sum of several counts."""
    out = Count()
    for count in counts:
        out.words += count.words
        for group, hits in count.hits.items():
            out.hits[group] += hits
    return out


def tracked(*patterns):
    out = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [name for name in out.split("\0") if name]


def count_project(strings=False):
    """The counts of each Rust source and each page, by path."""
    rust, pages = {}, {}
    for name in sorted(tracked("*.rs")):
        text = (ROOT / name).read_text(encoding="utf-8")
        rust[name] = Count().read(name, text, comments(text, strings))
    for name in sorted(tracked("*.md")):
        if name not in SKIP_PAGES:
            text = (ROOT / name).read_text(encoding="utf-8")
            pages[name] = Count().read(name, text, page(text))
    return rust, pages


def crate(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "crates" else parts[0]


def check(rust, pages):
    """Prints each excess over a limit; whether there is one."""
    failed = False
    for name, files in (("Rust comments", rust), ("pages", pages)):
        count = total(files.values())
        for group, (_, limit, instead) in GROUPS.items():
            if count.rate(group) > limit:
                failed = True
                print(
                    f"{name}: '{group}' {count.rate(group):.1f} per 10,000 words, limit {limit}; use: {instead}"
                )
                count.print_hits([group], indent="  ")
    return failed


def table(rows):
    print(f"{'':12}{'words':>8}" + "".join(f"{g:>9}" for g in GROUPS))
    for name, count in rows:
        print(f"{name:12}{count.words:8}" + "".join(f"{count.rate(g):9.1f}" for g in GROUPS))
    print(f"{'limit':20}" + "".join(f"{limit:9.1f}" for _, limit, _ in GROUPS.values()))


def main():
    parser = argparse.ArgumentParser(description="Count phrases that make prose hard to read.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is exceeded")
    parser.add_argument(
        "--list", metavar="GROUP", choices=[*GROUPS, "all"], help="list occurrences"
    )
    parser.add_argument(
        "--in", dest="where", metavar="PATH", default="", help="with --list: paths with this prefix"
    )
    parser.add_argument(
        "--strings", action="store_true", help="string literals instead of comments"
    )
    parser.add_argument("--tree", metavar="DIR", nargs="+", help="count another Rust source tree")
    args = parser.parse_args()

    groups = [*GROUPS] if args.list == "all" else [args.list]
    if args.tree:
        paths = [path for tree in args.tree for path in sorted(Path(tree).rglob("*.rs"))]
        texts = ((str(path), path.read_text(encoding="utf-8")) for path in paths)
        tree = total(Count().read(path, text, comments(text)) for path, text in texts)
        table([("tree", tree)])
        if args.list:
            tree.print_hits(groups)
        return 0
    rust, pages = count_project(args.strings)
    if args.check:
        return 1 if check(rust, pages) else 0
    if args.list:
        total([*rust.values(), *pages.values()]).print_hits(groups, where=args.where)
        return 0
    crates = {}
    for path, count in rust.items():
        crates.setdefault(crate(path), []).append(count)
    rows = [(name, total(counts)) for name, counts in sorted(crates.items())]
    table([*rows, ("all crates", total(rust.values())), ("pages", total(pages.values()))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
