#!/usr/bin/env python3
"""Measures the structure of the Rust code: sizes of files, functions, structs, and knots of files.

  scripts/house.py            the table
  scripts/house.py --list N   also the N worst of each row

Only production code counts: not `tests/`, `benches/` and modules under `#[cfg(test)]`. A knot is a
set of files of one crate that import each other, directly or in a circle. Lines of files count
as they lie, comments included; lines of code are those that are neither blank nor comments.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_FUNCTION = 70
MANY_FIELDS = 30


def blanked(text: str) -> str:
    """`text` with the insides of comments, strings and characters as spaces; lines stay."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\'\\\n])\'', re.S
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def end_of_block(text: str, opening: int) -> int:
    """Find the position after the brace that closes the one at `opening`."""
    depth = 0
    for match in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return opening + match.end()
    return len(text)


def production(text: str) -> str:
    """`text` without comments, strings, and items under `#[cfg(test)]`."""
    text = blanked(text)
    while match := re.search(r"#\[cfg\((?:test|all\(test\b[^\]]*)\)\]", text):
        rest = re.compile(r"[;{]").search(text, match.end())
        if not rest:
            return text[: match.start()]
        end = rest.end() if rest[0] == ";" else end_of_block(text, rest.start())
        text = text[: match.start()] + text[end:]
    return text


def sources() -> Iterator[tuple[Path, Path]]:
    """Each production file, with the root of its crate."""
    for manifest in sorted(ROOT.glob("crates/**/Cargo.toml")):
        crate = manifest.parent
        inner = {other.parent for other in crate.glob("*/Cargo.toml")}
        for path in sorted((crate / "src").rglob("*.rs")):
            if (
                path.stem not in ("tests", "test")
                and "tests" not in path.parts
                and not inner & set(path.parents)
            ):
                yield crate, path


def module(crate: Path, path: Path) -> tuple[str, ...]:
    """Give the path of a file's module in its crate."""
    parts = list(path.relative_to(crate / "src").with_suffix("").parts)
    return tuple(parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts)


def used(text: str) -> Iterator[str]:
    """Paths that `text` names, those of `use` trees spelled out."""

    def spelled(prefix: str, tree: str) -> Iterator[str]:
        depth, start, parts = 0, 0, []
        for at, char in enumerate(tree + ","):
            if char == "," and depth == 0:
                parts.append(tree[start:at].strip())
                start = at + 1
            depth += {"{": 1, "}": -1}.get(char, 0)
        for part in filter(None, parts):
            head, brace, inside = part.partition("{")
            if brace:
                yield from spelled(prefix + head, inside.rpartition("}")[0])
            else:
                yield prefix + head.split(" as ")[0].strip()

    uses = re.compile(r"\buse\s+([^;]+);")
    for match in uses.finditer(text):
        yield from spelled("", re.sub(r"\s+", " ", match[1]))
    yield from re.findall(r"\b(?:crate|super|self)(?:::\w+)+", uses.sub(" ", text))
    yield from re.findall(r"(?<![:\w])[a-z_]\w*(?:::\w+)+", uses.sub(" ", text))


def resolve(
    path: str, here: tuple[str, ...], modules: set[tuple[str, ...]]
) -> tuple[str, ...] | None:
    """Find the module of the crate that `path` leads to from `here`."""
    parts = path.replace(" ", "").split("::")
    at: tuple[str, ...]
    if parts[0] == "crate":
        at, parts = (), parts[1:]
    elif parts[0] in ("super", "self"):
        at = here
        while parts and parts[0] in ("super", "self"):
            at = at[:-1] if parts[0] == "super" else at
            parts = parts[1:]
    elif (*here, parts[0]) in modules:
        at = here
    else:
        return None
    while parts and (*at, parts[0]) in modules:
        at, parts = (*at, parts[0]), parts[1:]
    return at


def knots(edges: dict[str, set[str]]) -> list[list[str]]:
    """Find sets of two or more names that reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in index:
            visit(name)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", type=int, default=0, metavar="N", help="also the N worst of each row"
    )
    shown = parser.parse_args().list
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    structs: list[tuple[int, str]] = []
    by_crate: dict[Path, dict[tuple[str, ...], str]] = {}
    crate_lines: dict[str, int] = {}
    for crate, path in sources():
        text = production(path.read_text())
        name = str(path.relative_to(ROOT / "crates"))
        lines = len(text.rstrip().splitlines())
        files.append((lines, name))
        crate_lines[crate.name] = crate_lines.get(crate.name, 0) + sum(
            1 for line in text.splitlines() if line.strip()
        )
        by_crate.setdefault(crate, {})[module(crate, path)] = text
        for match in re.finditer(r"\bfn\s+(\w+)", text):
            opening = re.compile(r"[;{]").search(text, match.end())
            # A `;` within the brackets of an array's type is not the end of a declaration.
            while (
                opening
                and opening[0] == ";"
                and text[: opening.start()].count("[", match.end())
                > text[: opening.start()].count("]", match.end())
            ):
                opening = re.compile(r"[;{]").search(text, opening.end())
            if opening and opening[0] == "{":
                body = text[match.start() : end_of_block(text, opening.start())]
                functions.append((body.count("\n") + 1, f"{name} {match[1]}"))
        for match in re.finditer(r"\bstruct\s+(\w+)[^;{(]*\{", text):
            body = text[match.end() : end_of_block(text, match.end() - 1) - 1]
            depth, flat = 0, ""
            for char in body:
                depth -= char in "})]>"
                flat += char if depth == 0 else ""
                depth += char in "{([<"
            structs.append((len(re.findall(r"\b\w+\s*:", flat)), f"{name} {match[1]}"))
    tied: list[tuple[int, str]] = []
    for crate, texts in by_crate.items():
        modules = set(texts)
        edges: dict[str, set[str]] = {}
        for here, text in texts.items():
            label = "::".join(here) or "crate"
            edges[label] = set()
            for path in used(text):
                to = resolve(path, here, modules)
                # A file may name its own children: it declares them.
                if to is not None and to != here and to[: len(here)] != here:
                    edges[label].add("::".join(to) or "crate")
        for names in knots(edges):
            tied.append((len(names), f"{crate.name}: {' '.join(names)}"))
    long = [row for row in functions if row[0] > LONG_FUNCTION]
    wide = [row for row in structs if row[0] >= MANY_FIELDS]
    rows = [
        ("longest file", max(files)[0], files),
        ("files above 1,200 lines", sum(lines > 1200 for lines, _ in files), files),
        ("largest knot", max(tied, default=(0, ""))[0], tied),
        (
            f"functions above {LONG_FUNCTION} lines",
            f"{100 * len(long) / len(functions):.2f} %",
            functions,
        ),
        ("longest function", max(functions)[0], functions),
        (f"structs of {MANY_FIELDS} fields or more", len(wide), structs),
        ("lines of code in `cli`", crate_lines["cli"], []),
        ("lines of code in all", sum(crate_lines.values()), []),
    ]
    print("| measured | now |\n| --- | --- |")
    for name, value, _ in rows:
        print(f"| {name} | {value:,} |" if isinstance(value, int) else f"| {name} | {value} |")
    if shown:
        for name, _, worst in rows[:6]:
            print(f"\n{name}:")
            for size, what in sorted(worst, reverse=True)[:shown]:
                print(f"  {size:>6}  {what}")


if __name__ == "__main__":
    main()
