#!/usr/bin/env python3
"""Prepare the folder that mdbook makes the site of.

book.py FOLDER    write the pages of docs/, and README and its neighbours as pages of the same site

README is the start page. Links between pages lead to pages of the site; links to what the site does not have become
plain text.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benches/results/README.md": "benchmark-results.md",
}
TITLES = {
    "architecture.md": "Architecture",
    "contributing.md": "Contributing",
    "changelog.md": "Changelog",
    "security.md": "Security",
    "benchmark-results.md": "Results of benchmarks",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def target(link, folder):
    """Return where a link of a document in `folder` leads on the site, or `None`."""
    if re.match(r"[a-z]+:", link) or link.startswith("#"):
        return link
    path, _, anchor = link.partition("#")
    found = (folder / path).resolve()
    name = str(found.relative_to(ROOT)) if found.is_relative_to(ROOT) else ""
    anchor = f"#{anchor}" if anchor else ""
    if name == "docs/SUMMARY.md":
        # The list of pages is beside each of them.
        return PROJECT["README.md"] + anchor
    if name in PROJECT:
        return PROJECT[name] + anchor
    if name.startswith("docs/"):
        return name.removeprefix("docs/") + anchor
    if name == "examples" or name.startswith("examples/"):
        # `make docs` puts them next to the pages.
        return f"../{name}"
    return None


def page(text, folder):
    """Return a document with the links of the site, without marks of tests."""
    text = re.sub(r"^<!-- setup\n(?:.*\n)*?-->\n", "", text, flags=re.M)
    text = re.sub(r"^<!-- .* -->\n", "", text, flags=re.M)

    def link(match):
        leads = target(match[3], folder)
        return f"{match[1]}[{match[2]}]({leads})" if leads else match[2]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    # Code keeps what looks like a link.
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def main():
    """Write the folder."""
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path in folder.glob("*.md"):
        path.write_text(page(path.read_text(encoding="utf-8"), ROOT / "docs"), encoding="utf-8")
    for name, written in PROJECT.items():
        source = ROOT / name
        text = page(source.read_text(encoding="utf-8"), source.parent)
        (folder / written).write_text(text, encoding="utf-8")
    summary = folder / "SUMMARY.md"
    lines = [f"- [{title}]({written})" for written, title in TITLES.items()]
    text = summary.read_text(encoding="utf-8").rstrip("\n")
    summary.write_text("\n".join([text, "", "# Project", "", *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
