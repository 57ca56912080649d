"""The documents show what their commands print; `make docs-test` runs every page."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
QUICK = ["docs/first-cluster.md", "docs/netsim.md", "docs/twin.md"]


@pytest.fixture(scope="module")
def outputs() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("docs_outputs", ROOT / "scripts/docs_outputs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", QUICK)
def test_a_page_shows_what_its_commands_print(binary: Path, page: str) -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts/docs_outputs.py", "--check", page],
        env={**os.environ, "SLIPSTREAM_BIN": str(binary)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{page}: " in ran.stderr, "blocks ran"


def test_marked_blocks_are_found(outputs: ModuleType) -> None:
    page = (
        "text\n```sh\nno\n```\n<!-- run -->\n```sh\na\nb\n```\n"
        "<!-- output -->\n```text\nx … y\n```\n"
        "<!-- run background: up -->\n```sh\nc\n```\n<!-- setup\nd\n-->\n<!-- stop -->\n"
        "<!-- run -->\nmore text\n```toml\ne\n```\n"
    )
    found = [(block.mark, block.language, block.lines, block.at) for block in outputs.blocks(page)]
    assert found == [
        ("", "sh", ["no"], 2),
        ("run", "sh", ["a", "b"], 6),
        ("output", "text", ["x … y"], 11),
        ("run background: up", "sh", ["c"], 15),
        ("setup", "sh", ["d"], 18),
        ("stop", "", [], 20),
        ("", "toml", ["e"], 24),
    ]


def test_each_block_of_the_tutorials_says_how_it_runs(outputs: ModuleType) -> None:
    pages = {name: outputs.blocks((ROOT / name).read_text("utf-8")) for name in outputs.TUTORIALS}
    unmarked = [f"{name}:{b.at}" for name, found in pages.items() for b in found if not b.mark]
    assert not unmarked, "no mark before the block (scripts/docs_outputs.py)"
    known = re.compile(
        r"(run|run, needs \S+|run pytest|run background: .+|file \S+|output|output live|shown|stop|"
        r"setup|not run: .{10,})"
    )
    marks = [block.mark for found in pages.values() for block in found]
    assert [mark for mark in marks if not known.fullmatch(mark)] == []
    assert sum(mark.startswith("not run: ") for mark in marks) <= outputs.NOT_RUN_MAX
    assert sum(mark.startswith("run") for mark in marks) > 30


SIMULATOR = "simulator 0.01 CPU-s, 1 µs per request"


@pytest.mark.parametrize(
    ("shown", "printed", "right"),
    [
        # Without a mark of left-out text, all lines count.
        ("1 a\n2 b", "1 a\n2 b", "1 a\n2 b"),
        ("1 a", "1 a\n2 b", "1 a\n2 b"),
        ("1 a\n2 b\n3 c", "1 a", "1 a"),
        ("2 b\n1 a", "1 a\n2 b", "1 a\n2 b"),
        # Left-out lines and parts of lines.
        ("1 a\n…", "1 a\n2 b\n3 c", "1 a\n…"),
        ("…\n3 c", "1 a\n2 b\n3 c", "…\n3 c"),
        ("1 a\n…\n3 …", "1 a\n2 b\n3 c", "1 a\n…\n3 …"),
        ("1 …z\n…", "1 a\n2 b", None),
        ("…\n3 c", "3 c\n4 d", None),
        # A changed line is known by its first word.
        ("1 a\n…\n3 old", "1 a\n2 b\n3 c", "1 a\n…\n3 c"),
        ("1 a\n…\n4 d", "1 a\n2 b\n3 c", None),
        # Figures of a machine are neither compared nor rewritten.
        (f"{SIMULATOR}\n1 a", "simulator 2.5 CPU-s, 37 µs per request\n1 a", f"{SIMULATOR}\n1 a"),
        (f"{SIMULATOR}\n1 a", "simulator 2.5 CPU-s, 37 µs per request\n1 b", f"{SIMULATOR}\n1 b"),
        (f"{SIMULATOR}\n1 a", "simulator 2.5 CPU-s\n1 a", "simulator 2.5 CPU-s\n1 a"),
    ],
)
def test_outputs_are_compared_line_by_line(
    outputs: ModuleType, shown: str, printed: str, right: str | None
) -> None:
    expected = None if right is None else right.split("\n")
    assert outputs.compare(shown.split("\n"), printed.split("\n")) == expected


def test_a_wrong_page_is_found_and_written(
    outputs: ModuleType, binary: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    text = "<!-- run -->\n```sh\necho 7\n```\n\n<!-- output -->\n```text\n8\n```\n"
    page.write_text(f"{text}\n<!-- run -->\n```sh\nexit 3\n```\n", encoding="utf-8")
    problems, ran, _ = outputs.run_page(page, "page.md", write=True)
    assert ran == 2
    assert problems[0].startswith("page.md:7: the output differs")
    assert problems[1].startswith("page.md:12: exit 3")
    assert page.read_text(encoding="utf-8").startswith(text.replace("8", "7"))
    unmarked = "```sh\nfalse\n```\n<!-- not run: reason -->\n```sh\nfalse\n```\n"
    page.write_text(unmarked, encoding="utf-8")
    problems, ran, not_run = outputs.run_page(page, "README.md", write=False)
    assert (len(problems), ran, not_run) == (1, 0, 1), problems


def test_the_site_has_all_that_its_pages_link_to(tmp_path: Path) -> None:
    folder = tmp_path / "book"
    subprocess.run([sys.executable, ROOT / "scripts/book.py", folder], check=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert set(pages) >= {"index.md", "architecture.md", "plan.md", "SUMMARY.md"}
    links = 0
    for name, page in pages.items():
        prose = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            if "://" in link or link.startswith(("#", "mailto:")):
                continue
            links += 1
            assert (folder / link.partition("#")[0]).exists(), f"{name}: {link}"
    assert links > 200
    assert "make demo" in pages["index.md"]
    assert "<!-- " not in pages["index.md"] + pages["engines.md"]
    # Code is as it was.
    source = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```$", source, re.M | re.S)
    assert blocks == re.findall(r"^```.*?^```$", pages["engines.md"], re.M | re.S)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("10 of 10 answered in 3.07 s", "10 of 10 answered in 12,345 s", True),
        ("TTFT       36.9     -", "TTFT  1,036  12.5", True),
        ("TTFT p50, ms  7.16  10.6   1.48", "TTFT p50, ms  7  9      -", True),
        ("────  ──────", "──────  ───", True),
        ("hits 69.7 % (124 blocks)", "hits 9 % (1,024 blocks)", True),
        ("hits 69.7 %", "hits 69.7 % (124 blocks)", False),
        ("TTFT p50  1", "TTFT p99  1", False),
        ("TTFT  1", "ITL  1", False),
    ],
)
def test_a_live_output_is_compared_without_figures(
    outputs: ModuleType, shown: str, printed: str, same: bool
) -> None:
    right = outputs.compare([shown], [printed], live=True)
    assert right == ([shown] if same else [printed])
