"""Runs the same TCP NewReno flows in ns-3 and in `slipstream net` and compares completion times.

Fails if a flow's times lie more than 2 % apart. See docs/netsim.md, "Against ns-3".
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 0.02
MSS = 1448
# TCP and IP headers of 20 bytes each and the two of PPP, without options.
HEADER = 42


@dataclass
class Case:
    """A network and its flows; `flows` are (bytes, start ns, path of nodes)."""

    name: str
    toml: str
    links: list[tuple[int, int, int, int]]
    queue: int
    ssthresh: int
    flows: list[tuple[int, int, list[int]]]
    hosts: dict[int, int] = field(default_factory=dict)


def dumbbell(name: str, queue: int, delay_ns: int, flows: list[tuple[int, int]]) -> Case:
    """Hosts with links of 100 Mb/s around a link of 10 Mb/s."""
    toml = (
        f"edges = [[0, 1]]\nhosts = [0, 1]\n[link]\npropagation_ns = {delay_ns}\n"
        f"[link.host]\nrate = 1e8\n[switch]\nport_rate = 1e7\ncapacity = {queue}\n"
    )
    links = [
        (0, 1, 10_000_000, delay_ns),
        (2, 0, 100_000_000, delay_ns),
        (1, 3, 100_000_000, delay_ns),
    ]
    paths = [(size, start, [2, 0, 1, 3]) for size, start in flows]
    return Case(name, toml, links, queue, 60_000, paths, {2: 0, 3: 1})


def fat_tree(name: str, queue: int, size: int, gap_ns: int, *, shared: bool = False) -> Case:
    """k = 4, two hosts an edge switch; every host sends to its like half the fabric away.

    `shared`: only the first half sends, and all take the first aggregation switch and core, so that
    four flows share a link; with data both ways the ACKs' bunching makes times a matter of chance.
    """
    rate, delay = 10_000_000_000, 1_000
    edges, aggregation, cores, first_host = 8, 8, 16, 20
    links = []
    for edge in range(edges):
        pod = edge // 2
        links += [(edge, aggregation + 2 * pod + g, rate, delay) for g in range(2)]
        links += [(first_host + 2 * edge + slot, edge, rate, delay) for slot in range(2)]
    for agg in range(8):
        g = agg % 2
        links += [(aggregation + agg, cores + 2 * g + j, rate, delay) for j in range(2)]
    flows = []
    for host in range(8 if shared else 16):
        to = (host + 8) % 16
        a, b = host // 2, to // 2
        # By slot and edge switch: the same way there and back, and the same for each direction.
        g, j = (0, 0) if shared else (host % 2, a % 2)
        path = [a, aggregation + a // 2 * 2 + g, cores + 2 * g + j, aggregation + b // 2 * 2 + g, b]
        flows.append((size, host * gap_ns, [first_host + host, *path, first_host + to]))
    toml = (
        "[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 4, hosts_per_edge = 2 }\n"
        f"[link]\npropagation_ns = {delay}\n[switch]\nport_rate = 1e10\ncapacity = {queue}\n"
    )
    hosts = {first_host + h: h for h in range(16)}
    return Case(name, toml, links, queue, 2**30, flows, hosts)


CASES = [
    dumbbell("dumbbell, one flow, no loss", 1000, 2_000_000, [(300_000, 0)]),
    dumbbell("dumbbell, one flow, a loss now and then", 60, 2_000_000, [(10_000_000, 0)]),
    dumbbell("dumbbell, one flow, longer link", 70, 5_000_000, [(20_000_000, 0)]),
    dumbbell(
        "dumbbell, two flows that lose",
        60,
        2_000_000,
        [(10_000_000, 0), (5_000_000, 1_000_000_000)],
    ),
    fat_tree("fat-tree k=4, 16 flows of 1 MiB", 2000, 1 << 20, 0),
    fat_tree("fat-tree k=4, 16 flows of 256 KiB, staggered", 2000, 1 << 18, 3_000),
    fat_tree("fat-tree k=4, 8 flows, four a link", 4000, 1 << 20, 7_000, shared=True),
]


def ours(binary: str, case: Case, folder: Path) -> dict[int, int]:
    """Completion times by flow from `slipstream net run`, ns."""
    parts = ["seed = 1\nduration = 1000.0\n", case.toml]
    for i, (size, start, path) in enumerate(case.flows):
        ends = case.hosts[path[0]], case.hosts[path[-1]]
        parts.append(
            f"[[flow]]\nflow_id = {i}\nflow_type = \"TCP\"\ngraph = [[{ends[0]}, {ends[1]}]]\n"
            f"path = {path[1:-1]}\nheader_bytes = {HEADER}\nack_bytes = {HEADER}\n"
            f"traffic = {{ size = {size}, initial_delay = {start / 1e9!r}, pkt_size_dist = {MSS}, "
            f"tcp = {{ cc_algorithm = \"NewReno\", ssthresh = {case.ssthresh} }} }}\n"
        )
    file = folder / "case.toml"
    file.write_text("".join(parts))
    run = subprocess.run(
        [binary, "net", "run", "--json", str(file)], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise SystemExit(f"{case.name}: {run.stderr}")
    flows = json.loads(run.stdout)["flows"]
    return {f["id"]: (f["delivered_ns"] or 0) - f["start_ns"] for f in flows}


def theirs(reference: str, case: Case, folder: Path) -> dict[int, int]:
    """Completion times by flow from ns-3, ns."""
    lines = [f"mss {MSS}", f"ssthresh {case.ssthresh}", f"queue {case.queue}"]
    lines += [f"link {a} {b} {rate} {delay}" for a, b, rate, delay in case.links]
    for i, (size, start, path) in enumerate(case.flows):
        lines.append(f"flow {i} {size} {start} " + " ".join(map(str, path)))
    file = folder / "case.txt"
    file.write_text("\n".join(lines) + "\n")
    run = subprocess.run([reference, str(file)], capture_output=True, text=True, check=True)
    return {int(i): int(ns) for i, ns in (line.split() for line in run.stdout.splitlines())}


def main() -> int:
    """Compares all cases; 1 if one is off."""
    binary, reference = sys.argv[1:]
    failed = False
    print(f"{'case':46} {'flows':>5} {'ns-3, ms':>10} {'here, ms':>10} {'worst':>7}")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            a = ours(binary, case, Path(folder))
            b = theirs(reference, case, Path(folder))
        worst = max((abs(a[i] - b[i]) / b[i] for i in b), default=1.0)
        if any(ns <= 0 for ns in [*a.values(), *b.values()]) or len(a) != len(case.flows):
            worst = 1.0
        off = worst > LIMIT
        failed |= off
        print(
            f"{case.name:46} {len(a):5} {max(b.values()) / 1e6:10.3f} {max(a.values()) / 1e6:10.3f} "
            f"{worst:7.2%}{'  OFF' if off else ''}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
