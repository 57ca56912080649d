"""README and the pages claim nothing that the command, its keys or the tables deny."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
PAGES["README.md"] = README

OF_OTHERS = {
    "vLLM": "--disaggregation-bootstrap-port --prefix-caching-hash-algo --enable-dbo --load-format "
    "--no-async-scheduling --trust-remote-code --hf-overrides --quantization --enable-lora "
    "--max-model-len --disaggregation-mode --trust-request-chat-template --kv-offloading-size",
    "vllm bench": "--backend",
    "llama.cpp": "--interrupt_requests",
    "helm": "--set-file",
    "cargo": "--package --features",
    "etcd": "--client-cert-auth",
    "the scheduler's loader": "--ignore-cpu-max --seconds",
    "slipstream-kvbench": "--part --scale --spin-us --nixl --strict",
}
"""Flags of other programs that pages name alone."""

FEATURES = {
    "tensor": ("--tensor-parallel", "engine.tensor_parallel_size"),
    "pipeline": ("--pipeline-parallel", "engine.pipeline_parallel_size"),
    "data parallel": ("--data-parallel", "engine.data_parallel_size"),
    "expert": ("--expert-parallel", "engine.enable_expert_parallel"),
    "speculati": ("--speculation", "engine.speculation.method"),
    "host memory": ("--host-memory", "engine.host_tier.bytes_per_s"),
    "disk": (None, "engine.disk_tier.bytes_per_s"),
    "peer": (None, "engine.peer_tier.latency_us"),
    "LoRA": (None, "engine.lora.max_loras"),
    "autoscal": ("--autoscale-min", "autoscale.policy"),
}
"""A word: the flag of `plan` that searches it, and a key of the cluster file that simulates it."""


@pytest.fixture(scope="module")
def commands(binary: Path) -> dict[tuple[str, ...], set[str]]:
    """Every command with its flags, from `--help`."""
    found: dict[tuple[str, ...], set[str]] = {}

    def read(*command: str) -> None:
        text = subprocess.run(
            [binary, *command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        found[command] = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
        if below := re.search(r"^Commands:\n((?:  .*\n)+)", text, re.M):
            for name in re.findall(r"^  ([a-z][\w-]*)", below[1], re.M):
                if name != "help":
                    read(*command, name)

    read()
    assert len(found) > 30
    return found


@cache
def keys() -> set[str]:
    """Every key of docs/cluster-file.md, which is generated from the code."""
    found, section = set(), ""
    for line in PAGES["cluster-file.md"].splitlines():
        if match := re.match(r"## `\[(.*)\]`", line):
            section = match[1]
        elif line.startswith("## "):
            section = ""
        elif section and (match := re.match(r"\| `(\w+)` \|", line)):
            found.add(f"{section}.{match[1]}")
    assert len(found) > 200
    return found


def code(page: str) -> list[str]:
    """The code of a page: inline, and lines of blocks."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))
    blocks = re.findall(r"```\w*\n(.*?)```", page, re.S)
    return inline + [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def uses(line: str, commands: dict[tuple[str, ...], set[str]]) -> list[tuple[str, list[str]]]:
    """The commands of a line, each with what is wrong about it."""
    found = []
    for match in re.finditer(r"(?:^|[|;&(]\s*|\$ )slipstream\s+([^|;&#]*)", line):
        words = match[1].split()
        command: tuple[str, ...] = ()
        while len(words) > len(command) and (*command, words[len(command)]) in commands:
            command = (*command, words[len(command)])
        # Its options are those of the loader, a program of its own.
        if command == ("sched", "run"):
            continue
        flags = [re.match(r"--[a-z][\w-]*", word) for word in words[len(command) :]]
        wrong = [flag[0] for flag in flags if flag and flag[0] not in commands[command]]
        if not command and words and re.fullmatch(r"[a-z-]+", words[0]) and words[0][0] != "-":
            wrong.append(words[0])
        found.append((match[0], wrong))
    return found


def test_commands_and_flags_of_the_pages_exist(commands: dict[tuple[str, ...], set[str]]) -> None:
    ours = set().union(*commands.values())
    others = set(" ".join(OF_OTHERS.values()).split())
    assert not others & ours, "a flag of ours is in the list of others"
    wrong, named, checked = [], set(), 0
    for name, page in PAGES.items():
        for line in code(page):
            for use, missing in uses(line, commands):
                checked += 1
                wrong += [f"{name}: {flag} in `{use}`" for flag in missing]
            if alone := re.fullmatch(r"(--[a-z][\w-]*)(?:[ =].*)?", line):
                named.add(alone[1])
                if alone[1] not in ours | others:
                    wrong.append(f"{name}: no command has {alone[1]}")
    assert not wrong, "\n".join(wrong)
    assert checked > 100
    assert others <= named, f"no page names {others - named}"


def test_a_wrong_flag_is_found(commands: dict[tuple[str, ...], set[str]]) -> None:
    assert uses("slipstream plan t.jsonl --slo x --glo=y", commands)[0][1] == ["--glo"]
    assert uses("a | slipstream bench compare a b --rate 3", commands)[0][1] == ["--rate"]
    assert uses("slipstream plann", commands)[0][1] == ["plann"]
    assert uses("slipstream serve --set a=b --listen 127.0.0.1:0", commands)[0][1] == []


def test_commands_of_the_parts_table_exist(commands: dict[tuple[str, ...], set[str]]) -> None:
    parts = README.partition("## Parts")[2].partition("\n## ")[0]
    rows = [row.split("|")[2] for row in parts.splitlines() if row.startswith("| ")][1:]
    names = [name for row in rows for name in re.findall(r"`([a-z]+(?: [a-z]+)?)(?: --\w+)?`", row)]
    assert len(names) > 10
    names.remove("import slipstream")
    assert [name for name in names if tuple(name.split()) not in commands] == []
    # Every command that runs, serves, loads or finds something is in a row, or is a tool of these.
    tools = {"demo", "init", "calibrate", "trace", "tokenizer", "presets", "describe", "top"}
    tools |= {"events", "doctor", "completions", "man"}
    above = {command[0] for command in commands if command}
    assert above - {name.split()[0] for name in names} == tools


def test_keys_of_the_pages_exist() -> None:
    sections = {key.partition(".")[0] for key in keys()}
    # Fields of results, and a value of the Helm chart, look the same.
    fields = re.findall(r"`([a-z_.]+)`", PAGES["results.md"])
    others = {f"engine{name}" if name[0] == "." else name for name in fields} | {"router.config"}
    wrong = []
    for name, page in PAGES.items():
        inline = re.sub(r"```.*?```", "", page, flags=re.S)
        for text in set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", inline)) - others:
            # Of a pool, `pool.NAME.key`; of tables, any key below them.
            if text.partition(".")[0] not in sections - {"pool", "share", "gpu", "link", "event"}:
                continue
            if text.endswith((".toml", ".md", ".rs", ".py", ".gz", ".json", ".jsonl", ".sh")):
                continue
            if text not in keys() and not any(key.startswith(f"{text}.") for key in keys()):
                wrong.append(f"{name}: {text}")
    assert not wrong, "\n".join(wrong)


def clauses(text: str) -> list[str]:
    """Sentences, and their parts between semicolons, on one line each."""
    return re.split(r"(?<=[.;:|])\s", re.sub(r"\s+", " ", text))


def denied(clause: str, commands: dict[tuple[str, ...], set[str]]) -> list[str]:
    """What the command's flags and keys say against a clause."""
    wrong = []
    plan = commands["plan",]
    for word, (flag, key) in FEATURES.items():
        if word not in clause:
            continue
        assert key in keys(), key
        searched = flag is not None and flag in plan
        if "not searched" in clause and searched:
            wrong.append(f"`plan {flag}` searches it: {clause}")
        if re.search(r"`plan` searches", clause) and not searched:
            wrong.append(f"`plan` has no flag for {word}: {clause}")
        if re.search(r"[Nn]ot (modelled|simulated)", clause):
            wrong.append(f"`{key}` simulates it: {clause}")
    return wrong


def test_what_the_readme_says_of_features_is_true(
    commands: dict[tuple[str, ...], set[str]],
) -> None:
    wrong = [text for clause in clauses(README) for text in denied(clause, commands)]
    assert not wrong, "\n".join(wrong)
    assert "`plan` searches" in README
    # Each rule finds what it is for.
    for false in (
        "Not modelled in simulate and plan: pipeline parallelism, KV tiers on disk and at peers",
        "`plan` searches disk tiers",
        "host memory is simulated, but not searched",
    ):
        assert denied(false, commands), false


def test_versions_of_the_readme_are_the_ones_supported() -> None:
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rust = cargo["workspace"]["package"]["rust-version"]
    assert set(re.findall(r"Rust (\d+\.\d+)", README)) == {rust}
    assert set(re.findall(r"Python (\d+\.\d+)", README)) == {
        python["project"]["requires-python"][2:]
    }
    assert python["project"]["version"] == cargo["workspace"]["package"]["version"]
    connector = next(line for line in README.splitlines() if "`SlipstreamConnector`" in line)
    versions = re.search(r"vLLM (\d+\.\d+) and (\d+\.\d+)", connector)
    assert versions
    # The module needs vLLM to be imported.
    source = (ROOT / "python/slipstream/vllm/version.py").read_text(encoding="utf-8")
    bounds = re.findall(r"^(?:OLDEST|NEWEST) = \((\d+), (\d+)\)", source, re.M)
    assert versions.groups() == tuple(".".join(bound) for bound in bounds)


def test_figures_of_the_readme_are_on_their_pages() -> None:
    table = README.partition("| figure | value | page |")[2].partition("\n\n")[0]
    rows = [
        row.split("|") for row in table.splitlines() if row.startswith("| ") and "---" not in row
    ]
    assert len(rows) == 3
    for _, figure, value, page, _ in rows:
        link = re.search(r"\]\(docs/([\w-]+\.md)(?:#([\w-]+))?\)", page)
        assert link
        text = PAGES[link[1]]
        if link[2]:
            below = re.split(r"^#+ ", text, flags=re.M)
            title = next(part for part in below if anchor(part.partition("\n")[0]) == link[2])
            text = title
        numbers = re.findall(r"\d[\d,.]*\d|\d", value.replace("64 and 256", ""))
        missing = [number for number in numbers if number not in text]
        assert not missing, f"{figure.strip()}: {missing} is not in {link[0]}"


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    kept = "".join(c for c in heading.strip().lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


@pytest.mark.parametrize("term", ["TTFT", "TPOT", "ITL", "prefill", "decode"])
def test_terms_of_the_readme_are_explained_where_they_first_occur(term: str) -> None:
    text = re.sub(r"<!--.*?-->|\]\(.*?\)", "", README, flags=re.S)
    first = re.search(rf"\b{term}\b", text)
    assert first
    around = text[first.start() - 2 : first.end() + 2]
    explained = rf"(\(|, ){term}\)|{term} \("
    assert re.search(explained, around), text[first.start() - 60 : first.end() + 20]


NOUNS = {
    "pipeline": "pipeline parallelism|pipelines",
    "tensor": "tensor parallelism",
    "data parallel": "data parallelism",
    "expert": "expert parallelism",
    "speculati": "speculation|speculative decoding",
    "host memory": "host memory(?: for KV blocks)?",
    "disk": "(?:KV )?tiers? on disk|disk tiers?",
    "peer": "peer tiers?",
    "autoscal": "autoscaling",
}
"""How pages name each of FEATURES as a whole."""


def absent(page: str) -> list[str]:
    """Sentences that say a feature is not there, though a key simulates it."""
    assert NOUNS.keys() <= FEATURES.keys()
    found, text = [], re.sub(r"\s+", " ", page)
    for noun in NOUNS.values():
        listed = rf"(?:{noun})(?:(?:, | and |, and )[\w ]+)* (?:is|are) not (?:modelled|simulated)"
        headed = rf"not (?:modelled|simulated)(?: in [\w`, ]+)?: (?:[\w ]+, )*(?:{noun})[,.;]"
        for pattern in (listed, headed):
            found += [match[0] for match in re.finditer(pattern, text, re.I)]
    return found


def test_no_page_denies_a_feature_that_is_there() -> None:
    wrong = [f"{name}: {text}" for name, page in PAGES.items() for text in absent(page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "false"),
    [
        ("- Pipeline parallelism and CUDA graphs are not modelled. Tokens", True),
        ("Not modelled in simulate and plan: pipeline parallelism, KV tiers on disk", True),
        ("Not modelled: swaps, speculation, and others.", True),
        ("host memory for KV blocks is not simulated", True),
        ("CUDA graphs are not modelled (stages of a pipeline are).", False),
        ("Not modelled: drafts in a pipeline (refused), uneven stages", False),
        ("Pipeline parallelism is modelled. The network is not simulated.", False),
    ],
)
def test_denials_are_found(text: str, false: bool) -> None:
    assert bool(absent(text)) == false
