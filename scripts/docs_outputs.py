#!/usr/bin/env python3
"""Run the code blocks of the documents, and check or rewrite the outputs that they show.

docs_outputs.py --check [PAGE...]    compare; exits 1 with each difference (default)
docs_outputs.py --write [PAGE...]    rewrite the outputs that differ

Without a page: README and every page of docs/. SLIPSTREAM_BIN names the binary (default: target/release/slipstream),
SLIPSTREAM_DATA a folder with data that is not in the tree (default: ../shared/data).

The line before a block says what happens to it:

  <!-- run -->              sh: by bash; python: by an interpreter that the page's blocks share; toml: a cluster file,
                            read by `slipstream serve --print-config`
  <!-- run, needs NAME -->  the same; skipped with a message without the file NAME in SLIPSTREAM_DATA or the Python module NAME
  <!-- run pytest -->       a module of tests
  <!-- run background: TEXT -->  until the end of the page or `<!-- stop -->`; the next block begins once its output has TEXT
  <!-- file NAME -->        is written to a file of this name, for later blocks
  <!-- output -->           the output of the block before it. `…` stands for anything, on a line of its own for any lines.
                            Figures that depend on the machine are not compared
  <!-- output live -->      the same of a live run: no figure is compared
  <!-- not run: REASON -->  is left alone
  <!-- shown -->            no code: a format or a log

Commands between `<!-- setup` and `-->` run unseen. A page's blocks share a folder, with the tree's `examples`.
Addresses (127.0.0.1 and gpu1, gpu2, … with a port) become free ports of 127.0.0.1. `vllm serve` is played by modelled
engines. Pages of TUTORIALS have no block without a mark, and NOT_RUN_MAX at most that do not run.
"""

import argparse
import contextlib
import difflib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(os.environ.get("SLIPSTREAM_BIN") or ROOT / "target/release/slipstream")
TUTORIALS = [
    "README.md",
    "docs/first-cluster.md",
    "docs/plan.md",
    "docs/engines.md",
    "docs/python.md",
]
NOT_RUN_MAX = 5
BLOCK_S = 240
READY_S = 60
SKIP_LINE = "…"
# Spans whose numbers depend on the machine, or on the moment.
MACHINE = [
    re.compile(pattern)
    for pattern in (
        r"^simulator .*",
        r"simulated [\d,.]+ (s|min|h) in .* requests a CPU second",
        r"peak RSS [\d.,]+ [KMG]iB",
        # Of `net run`.
        r"[\d.]+ ns of CPU each; .*",
        r"^  took .*",
    )
]
# A figure in a line or a table of a live run, or the dash in place of one.
LIVE = re.compile(r"(?<![\w.])\s*(?:[\d.,]*\d×?|-)(?=\s|$|%|;|\))\s*")
ADDRESS = re.compile(r"\b(127\.0\.0\.1|gpu\d+):(\d{4,5})\b")
PORT = re.compile(r"(?<=--port )(\d{4,5})\b")
VLLM = """#!/bin/bash
# Plays `vllm serve MODEL --port N [other flags]` by modelled engines.
model=$2 port=8000
while [ $# -gt 0 ]; do [ "$1" = --port ] && port=$2; shift; done
exec slipstream serve --listen "127.0.0.1:$port" --set "model.name=$model"
"""


@dataclass
class Block:
    """A marked block: what is done with it, its language, its lines, and where these begin."""

    mark: str
    language: str
    lines: list[str]
    at: int


def blocks(page):
    """Return the blocks of a page, those without a mark included, and the setups."""
    found, mark, lines, at = [], "", page.split("\n"), 0
    while at < len(lines):
        line = lines[at]
        if line == "<!-- setup":
            end = lines.index("-->", at)
            found.append(Block("setup", "sh", lines[at + 1 : end], at + 1))
            at = end
        elif match := re.fullmatch(r"<!-- (.*) -->", line):
            mark = match[1]
            if mark == "stop":
                found.append(Block(mark, "", [], at))
                mark = ""
        elif match := re.fullmatch(r"( *)```(\w*).*", line):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].strip() == "```")
            found.append(Block(mark, match[2], lines[at + 1 : end], at + 1))
            at, mark = end, ""
        elif line:
            mark = ""
        at += 1
    return found


def masked(text, live):
    """Replace numbers that depend on the machine: in a live run all, with the spaces around them."""
    lines = text.split("\n")
    if live:
        return [re.sub(r"([ ─])\1+", r"\1", LIVE.sub("#", line)) for line in lines]
    for pattern in MACHINE:
        lines = [
            pattern.sub(lambda span: re.sub(r"[\d.,]*\d", "#", span[0]), line) for line in lines
        ]
    return lines


def covers(shown, actual):
    """Return whether an actual line has the parts of a shown one, in order; all of it without `…`."""
    if SKIP_LINE not in shown:
        return shown.rstrip() == actual.rstrip()
    pattern = ".*".join(re.escape(part) for part in shown.split(SKIP_LINE))
    return re.fullmatch(pattern, actual.rstrip()) is not None


def compare(shown, actual, live=False):
    """Return the lines that the output should show: `shown` itself if they agree, `None` if it cannot be told.

    Lines around a line `…` are found by their first word if they have changed.
    """
    if live and SKIP_LINE not in "".join(shown):
        # All figures of one run, or none of it.
        return (
            shown if masked("\n".join(shown), live) == masked("\n".join(actual), live) else actual
        )
    shown_masked = masked("\n".join(shown), live)
    actual_masked = masked("\n".join(actual), live)
    right, at, skips = [], 0, False
    for line, plain in zip(shown, shown_masked, strict=True):
        if line.strip() == SKIP_LINE:
            right.append(line)
            skips = True
            continue
        rest = range(at, len(actual) if skips else min(at + 1, len(actual)))
        same = [n for n in rest if covers(plain, actual_masked[n])]
        first = line.split(" ")[0]
        like = [n for n in rest if first and SKIP_LINE not in first and actual[n].startswith(first)]
        if same:
            right.append(line)
            at = same[0] + 1
        elif like and SKIP_LINE not in line:
            right.append(actual[like[0]])
            at = like[0] + 1
        else:
            return otherwise(shown, shown_masked, actual, actual_masked)
        skips = False
    if at < len(actual) and not skips:
        return otherwise(shown, shown_masked, actual, actual_masked)
    return right


def otherwise(shown, shown_masked, actual, actual_masked):
    """Return the actual output, with the shown figures of a machine; `None` if lines are left out."""
    if SKIP_LINE in "".join(shown):
        return None
    kept = dict(zip(shown_masked, shown, strict=True))
    return [kept.get(key, line) for key, line in zip(actual_masked, actual, strict=True)]


class Interpreter:
    """Python that the blocks of a page share."""

    DRIVER = (
        "import json, sys, contextlib, io, traceback\n"
        "scope = {'__name__': '__main__'}\n"
        "for line in sys.stdin:\n"
        "    out, code = io.StringIO(), 0\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        try: exec(compile(json.loads(line), 'block', 'exec'), scope)\n"
        "        except BaseException: code = 1; traceback.print_exc(file=out)\n"
        "    print(json.dumps([code, out.getvalue()]), flush=True)\n"
    )

    def __init__(self, folder, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.DRIVER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, text):
        """Run a block; returns its exit status and output."""
        self.process.stdin.write(json.dumps(text) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        """End it."""
        self.process.stdin.close()
        self.process.wait(10)


@dataclass
class Run:
    """A page that runs: its folder, its environment, and what runs in the background."""

    folder: Path
    ports: dict = field(default_factory=dict)
    background: list = field(default_factory=list)
    interpreter: Interpreter | None = None

    def __post_init__(self):
        tools = self.folder / ".tools"
        tools.mkdir()
        (tools / "slipstream").symlink_to(BINARY.resolve())
        # A link to an interpreter would leave its virtual environment.
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tools / "python").chmod(0o755)
        (tools / "vllm").write_text(VLLM, encoding="utf-8")
        (tools / "vllm").chmod(0o755)
        (self.folder / "examples").symlink_to(ROOT / "examples")
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "python"),
            "NO_COLOR": "1",
            "HOME": str(self.folder),
            "SLIPSTREAM_DISCOVERY": str(self.folder / ".discovery"),
            "RUST_LOG": "error",
            "SLIPSTREAM_BIN": str(BINARY.resolve()),
            "SLIPSTREAM_LIVE__LISTEN": f"127.0.0.1:{self.port('127.0.0.1', '8000')}",
        }

    def port(self, host, number):
        """Return the free port that an address of the page stands for."""
        if (host, number) not in self.ports:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                self.ports[host, number] = str(found.getsockname()[1])
        return self.ports[host, number]

    def mapped(self, text):
        """Replace the page's addresses."""
        text = ADDRESS.sub(lambda found: f"127.0.0.1:{self.port(found[1], found[2])}", text)
        return PORT.sub(lambda found: self.port("127.0.0.1", found[1]), text)

    def unmapped(self, text):
        """Put the page's addresses back."""
        for (host, number), port in self.ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"{host}:{number}")
        return text.replace(f"{self.folder}/", "")

    def shell(self, script, **arguments):
        """Start bash in the page's folder."""
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **arguments,
        )

    def start(self, script, ready):
        """Run until the end of the page; returns an error if it is not ready."""
        process = self.shell(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.background.append(process)
        seen, is_ready, said = threading.Event(), [False], []

        def read():
            for line in process.stdout:
                said.append(line)
                if ready in line and not is_ready[0]:
                    is_ready[0] = True
                    seen.set()
            seen.set()

        threading.Thread(target=read, daemon=True).start()
        seen.wait(READY_S)
        return self.unmapped("".join(said)), None if is_ready[
            0
        ] else f"no `{ready}` within {READY_S} s"

    def run(self, block):
        """Run a block; returns its output and an error or `None`."""
        text = self.mapped("\n".join(block.lines))
        if block.mark.startswith("run background: "):
            return self.start(text, block.mark.removeprefix("run background: "))
        if block.mark.startswith("file "):
            (self.folder / block.mark.removeprefix("file ")).write_text(f"{text}\n")
            return "", None
        if block.language == "python" and block.mark == "run pytest":
            (self.folder / "test_page.py").write_text(text)
            text = "python -m pytest -q -p no:cacheprovider test_page.py"
        elif block.language == "python":
            self.interpreter = self.interpreter or Interpreter(self.folder, self.environment)
            code, said = self.interpreter.run(text)
            return said, f"an exception:\n{said}" if code else None
        elif block.language == "toml":
            (self.folder / "page.toml").write_text(text)
            text = "slipstream serve page.toml --print-config"
        # Files, not pipes: a server that the block leaves behind would keep a pipe open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.shell(text, stdout=out, stderr=err)
            # What it leaves behind ends with the page.
            self.background.append(process)
            limit = READY_S if block.mark == "setup" else BLOCK_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
            out.seek(0)
            err.seek(0)
            said, errors = self.unmapped(out.read()), err.read()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            return said, f"not ended after {limit} s:\n{said}{errors}"
        code = process.returncode
        return said, f"exit {code}:\n{said}{errors}" if code else None

    def stop(self):
        """End what runs in the background."""
        for process in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.background.clear()

    def close(self):
        """End all that runs."""
        self.stop()
        if self.interpreter:
            self.interpreter.close()


def missing(mark):
    """Return what a block needs and this machine lacks."""
    if ", needs " not in mark:
        return None
    name = mark.split(", needs ")[1]
    if "." not in name:
        return None if importlib.util.find_spec(name) else name
    data = Path(os.environ.get("SLIPSTREAM_DATA") or ROOT / "../shared/data")
    return None if any(data.rglob(name)) else name


def run_page(path, name, write):
    """Run a page's blocks; returns problems, how many blocks ran, and how many are not run."""
    page = path.read_text(encoding="utf-8")
    problems, ran, changes, not_run = [], 0, [], 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        said, failed = "", False
        try:
            for block in blocks(page):
                where = f"{name}:{block.at}"
                if block.mark.startswith("not run: "):
                    not_run += 1
                elif block.mark == "stop":
                    run.stop()
                elif block.mark.split(" ")[0].rstrip(",") in ("run", "setup", "file"):
                    if lacking := missing(block.mark):
                        print(f"skipped: {where}: no {lacking}", file=sys.stderr)
                        failed = True
                        continue
                    link(run.folder, block.mark)
                    said, error = run.run(block)
                    ran += 1
                    failed = error is not None
                    if error:
                        problems.append(f"{where}: {error}")
                elif block.mark in ("output", "output live") and not failed:
                    actual = said.rstrip("\n").split("\n")
                    right = compare(block.lines, actual, "live" in block.mark)
                    if right != block.lines:
                        changes.append((block, right))
                        problems.append(difference(where, block.lines, right or actual))
                elif block.mark not in ("output", "output live", "shown") and name in TUTORIALS:
                    problems.append(f"{where}: no mark before the block (scripts/docs_outputs.py)")
        finally:
            run.close()
    if write:
        lines = page.split("\n")
        for block, right in reversed(changes):
            if right is not None:
                lines[block.at : block.at + len(block.lines)] = right
        path.write_text("\n".join(lines), encoding="utf-8")
    return problems, ran, not_run


def link(folder, mark):
    """Put the data that a block needs into its folder."""
    name = mark.partition(", needs ")[2]
    if "." in name and not (folder / name).exists():
        data = Path(os.environ.get("SLIPSTREAM_DATA") or ROOT / "../shared/data")
        (folder / name).symlink_to(next(data.rglob(name)).resolve())


def difference(where, shown, actual):
    """Describe how an output differs."""
    lines = difflib.unified_diff(shown, actual, "shown", "printed", lineterm="", n=0)
    return "\n".join([f"{where}: the output differs (scripts/docs_outputs.py --write):", *lines])


def main():
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare (default)")
    parser.add_argument("--write", action="store_true", help="rewrite outputs that differ")
    parser.add_argument("page", nargs="*")
    arguments = parser.parse_args()
    names = arguments.page or [
        "README.md",
        *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
    ]
    if not shutil.which("bash") or not shutil.which("curl"):
        print("skipped: no bash or no curl", file=sys.stderr)
        return 0
    if not BINARY.exists():
        print(f"{BINARY} does not exist: make build, or set SLIPSTREAM_BIN", file=sys.stderr)
        return 2
    # Servers of a page end with the script, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    problems, ran, not_run = [], 0, 0
    for name in names:
        begun = time.monotonic()
        found, runs, left = run_page(ROOT / name, name, arguments.write)
        problems += found
        ran += runs
        not_run += left if name in TUTORIALS else 0
        if runs:
            print(f"{name}: {runs} blocks in {time.monotonic() - begun:.1f} s", file=sys.stderr)
    if not_run > NOT_RUN_MAX:
        problems.append(f"{not_run} blocks are marked as not run; at most {NOT_RUN_MAX} may be")
    print("\n\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
