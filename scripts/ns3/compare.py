"""Runs the same TCP flows in ns-3 and in `slipstream net` and compares completion times.

Fixed cases of NewReno fail if a flow's times are more than 2 % apart. Pools of random networks are
drawn with several seeds, which follow from the commit. They fail, for each congestion control, if
the 95 % interval of the difference of mean completion times excludes all within 5 %, or if the
Kolmogorov-Smirnov test tells the distributions of slowdowns apart. See docs/netsim.md, "Against
ns-3".

Environment: NS3_SEEDS (numbers, separated by commas), NS3_RUNS (networks per kind and seed),
NS3_CONTROLS (such as `NewReno,BBR`), NS3_SACK (1: SACK and proportional rate reduction in both, in
the pools only; RACK, which ns-3 lacks, is off).
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from os import cpu_count
from pathlib import Path

# Of a single flow in the fixed cases.
LIMIT = 0.02
# Of the mean of a pool.
LIMIT_MEAN = 0.05
# Two-sided critical value of the two-sample test at 5 %, large samples: sqrt(-ln(0.05 / 2) / 2).
KS_5_PERCENT = 1.358
# Random networks of each kind, congestion control and seed.
RUNS = int(os.environ.get("NS3_RUNS", "5"))
# Seeds that are drawn from the commit, and resampled sets of networks for an interval.
SEEDS = 3
RESAMPLES = 2_000
SACK = os.environ.get("NS3_SACK", "0") == "1"
MSS = 1448
# TCP and IP headers of 20 bytes each and the two of PPP, without options.
HEADER = 42
PACKET = MSS + HEADER
NO_MARK = 2**32 - 1


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
    control: str = "NewReno"
    window: int = 2
    mark: int = NO_MARK
    seed: int = 1
    sack: bool = False


def dumbbell(name: str, queue: int, delay_ns: int, flows: list[tuple[int, int]]) -> Case:
    """Make hosts with links of 100 Mb/s around a link of 10 Mb/s."""
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
    """Make a fat-tree of k = 4 with two hosts an edge switch; each sends half the fabric away.

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
        '[topology]\ncategory = "FatTree"\nfat_tree = { k = 4, hosts_per_edge = 2 }\n'
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


@dataclass
class Graph:
    """Switches 0 to `nodes` - 1 with equal links, and the nodes that have a host."""

    nodes: int
    edges: list[tuple[int, int]]
    hosts: list[int]
    # Ends of the flows, by node, in the order in which sizes are drawn.
    pairs: list[tuple[int, int]]

    def path(self, src: int, dst: int) -> list[int]:
        """Return the switches of the shortest path."""
        way, seen = [[src]], {src}
        for nodes in way:
            if nodes[-1] == dst:
                return nodes
            for a, b in self.edges:
                for here, there in ((a, b), (b, a)):
                    if here == nodes[-1] and there not in seen:
                        seen.add(there)
                        way.append([*nodes, there])
        raise ValueError(f"no path from {src} to {dst}")


def random_dumbbell(rng: random.Random) -> Graph:
    """Put pairs of hosts on either side of a link, some senders one or two links further off."""
    nodes, edges, pairs = 2, [(0, 1)], []
    for _ in range(rng.randint(2, 6)):
        at = 0
        for _ in range(rng.randint(1, 3)):
            edges.append((nodes, at))
            at, nodes = nodes, nodes + 1
        edges.append((1, nodes))
        pairs.append((at, nodes))
        nodes += 1
    return Graph(nodes, edges, [node for pair in pairs for node in pair], pairs)


def random_parking_lot(rng: random.Random) -> Graph:
    """Lay links in a row: flows over all of them, and flows over one each."""
    row = rng.randint(3, 5)
    nodes, edges, pairs = row, [(i, i + 1) for i in range(row - 1)], []
    spans = [(0, row - 1)] * rng.randint(1, 2)
    spans += [(i, i + 1) for i in range(row - 1) for _ in range(rng.randint(1, 2))]
    for first, last in spans:
        edges += [(nodes, first), (last, nodes + 1)]
        pairs.append((nodes, nodes + 1))
        nodes += 2
    return Graph(nodes, edges, [node for pair in pairs for node in pair], pairs)


def random_incast(rng: random.Random) -> Graph:
    """Put several senders and one receiver around one switch."""
    senders = rng.randint(3, 8)
    edges = [(0, i + 1) for i in range(senders + 1)]
    pairs = [(i + 2, 1) for i in range(senders)]
    return Graph(senders + 2, edges, list(range(1, senders + 2)), pairs)


KINDS = {"dumbbell": random_dumbbell, "parking lot": random_parking_lot, "incast": random_incast}
CONTROLS = os.environ.get("NS3_CONTROLS", "NewReno,CUBIC,DCTCP,BBR").split(",")


def seeds() -> list[int]:
    """Return the seeds of the pools: those of NS3_SEEDS, or some drawn from the commit's hash."""
    given = os.environ.get("NS3_SEEDS")
    if given:
        return [int(seed) for seed in given.split(",")]
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = git.stdout.strip() or "no commit"
    draws = [hashlib.sha256(f"{commit} {i}".encode()).digest() for i in range(SEEDS)]
    return [int.from_bytes(draw[:4], "big") for draw in draws]


def random_case(seed: int, kind: str, control: str, number: int) -> Case:
    """Draw a network with flows from a seed and its number."""
    rng = random.Random(f"{seed} {kind} {control} {number}")
    graph = KINDS[kind](rng)
    rate = rng.choice([10_000_000, 20_000_000, 50_000_000])
    delay_ns = rng.randint(200_000, 3_000_000)
    hops = max(len(graph.path(*pair)) + 1 for pair in graph.pairs)
    # Bandwidth-delay product of the longest path, packets.
    product = 2 * hops * delay_ns * rate / 8e9 / PACKET
    sharing = len(graph.pairs)
    window, mark, ssthresh = 2, NO_MARK, 2**30
    queue = max(20, round(product * rng.uniform(0.5, 2)))
    if control == "DCTCP":
        # RFC 8257 section 4.4 asks for K above a seventh of the product; nothing is lost.
        mark = max(5, round(product * rng.uniform(0.2, 0.6)))
        queue = 10_000
    elif control == "BBR":
        # Start-up holds 2/ln 2 products in flight for each flow.
        window, queue = 10, round(3 * sharing * max(product, 20))
    else:
        # Around the threshold at which the flows together fill link and queue; every third network
        # has none, and slow start ends in many losses.
        ssthresh = round((product + queue) / sharing * rng.uniform(0.3, 1.0)) * MSS
        ssthresh = 2**30 if number % 3 == 2 else max(ssthresh, 2 * MSS)
    toml = (
        f"seed = {number}\nedges = {[list(e) for e in graph.edges]}\nhosts = {graph.hosts}\n"
        f"[link]\npropagation_ns = {delay_ns}\n[link.host]\nrate = {10 * rate}\n"
        f"[switch]\nport_rate = {rate}\ncapacity = {queue}\n"
    )
    if mark != NO_MARK:
        toml += f'drop = "ECN_THRESHOLD"\necn_threshold = {mark}\n'
    links = [(a, b, rate, delay_ns) for a, b in graph.edges]
    host = {node: graph.nodes + i for i, node in enumerate(graph.hosts)}
    links += [(host[node], node, 10 * rate, delay_ns) for node in graph.hosts]
    seconds = rng.uniform(2, 5)
    flows = []
    for src, dst in graph.pairs:
        # All flows of an incast start together; the others within the first second.
        start = 0 if kind == "incast" else rng.randint(0, 1_000_000_000)
        size = round(rate / 8 * seconds / sharing * rng.uniform(0.5, 1.5))
        flows.append((size, start, [host[src], *graph.path(src, dst), host[dst]]))
    hosts = {at: node for node, at in host.items()}
    name = f"{control}, {kind} {number}"
    return Case(
        name, toml, links, queue, ssthresh, flows, hosts, control, window, mark, number + 1, SACK
    )


def ours(binary: str, case: Case, folder: Path) -> tuple[dict[int, int], int]:
    """Run `slipstream net`: completion times by flow, ns, and the packets dropped or marked."""
    parts = ["duration = 1000.0\n", case.toml]
    for i, (size, start, path) in enumerate(case.flows):
        ends = case.hosts[path[0]], case.hosts[path[-1]]
        parts.append(
            f'[[flow]]\nflow_id = {i}\nflow_type = "TCP"\ngraph = [[{ends[0]}, {ends[1]}]]\n'
            f"path = {path[1:-1]}\nheader_bytes = {HEADER}\nack_bytes = {HEADER}\n"
            f"traffic = {{ size = {size}, initial_delay = {start / 1e9!r}, pkt_size_dist = {MSS}, "
            f'tcp = {{ cc_algorithm = "{case.control}", ssthresh = {case.ssthresh}, '
            f"initial_window = {case.window}, sack = {str(case.sack).lower()}, rack = false }} }}\n"
        )
    file = folder / "case.toml"
    file.write_text("".join(parts))
    run = subprocess.run(
        [binary, "net", "run", "--json", str(file)], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise SystemExit(f"{case.name}: {run.stderr}")
    result = json.loads(run.stdout)
    signals = sum(result["totals"][name] for name in ("data_drops", "control_drops", "marks"))
    times = {f["id"]: (f["delivered_ns"] or 0) - f["start_ns"] for f in result["flows"]}
    return times, signals


def theirs(reference: str, case: Case, folder: Path) -> tuple[dict[int, int], int] | None:
    """Run ns-3: completion times by flow, ns, and the packets dropped or marked.

    None if an assert of ns-3 ended it.
    """
    lines = [
        f"control {case.control}",
        f"mss {MSS}",
        f"window {case.window}",
        f"ssthresh {case.ssthresh}",
        f"queue {case.queue}",
        f"mark {case.mark}",
        f"seed {case.seed}",
        f"sack {int(case.sack)}",
    ]
    lines += [f"link {a} {b} {rate} {delay}" for a, b, rate, delay in case.links]
    for i, (size, start, path) in enumerate(case.flows):
        lines.append(f"flow {i} {size} {start} " + " ".join(map(str, path)))
    file = folder / "case.txt"
    file.write_text("\n".join(lines) + "\n")
    run = subprocess.run([reference, str(file)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return None
    words = [line.split() for line in run.stdout.splitlines()]
    times = {int(name): int(ns) for name, ns in words if name.isdigit()}
    return times, sum(int(n) for name, n in words if name in ("drops", "marks"))


def both(
    binary: str, reference: str, case: Case
) -> tuple[dict[int, int], dict[int, int], tuple[int, int]] | None:
    """Run both: completion times here and in ns-3, packets dropped or marked in ns-3 and here.

    None if ns-3 did not run it. Fails if a flow did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        a, signals_a = ours(binary, case, Path(folder))
        result = theirs(reference, case, Path(folder))
    if result is None:
        return None
    b, signals_b = result
    if any(ns <= 0 for ns in [*a.values(), *b.values()]) or not len(a) == len(b) == len(case.flows):
        raise SystemExit(f"{case.name}: a flow did not end: here {a}, in ns-3 {b}")
    return a, b, (signals_b, signals_a)


def ideal(case: Case, flow: int) -> float:
    """Return the time of a flow at the rate of its slowest link, ns."""
    size, _, path = case.flows[flow]
    rate = {frozenset(link[:2]): link[2] for link in case.links}
    slowest = min(rate[frozenset(ends)] for ends in pairwise(path))
    return (size + -(-size // MSS) * HEADER) * 8e9 / slowest


def kolmogorov_smirnov(a: list[float], b: list[float]) -> float:
    """Return the largest distance between two samples' distributions."""
    return max(
        abs(sum(x <= at for x in a) / len(a) - sum(x <= at for x in b) / len(b)) for at in [*a, *b]
    )


def compare_fixed(pool: ThreadPoolExecutor, binary: str, reference: str) -> bool:
    """Compare the fixed cases; true if one is off."""
    failed = False
    print(f"{'case':46} {'flows':>5} {'ns-3, ms':>10} {'here, ms':>10} {'worst':>7}")
    runs = pool.map(lambda case: both(binary, reference, case), CASES)
    for case, run in zip(CASES, runs, strict=True):
        if run is None:
            print(f"{case.name:46} ns-3 ended with an assert  OFF")
            failed = True
            continue
        a, b, _ = run
        worst = max(abs(a[i] - b[i]) / b[i] for i in b)
        off = worst > LIMIT
        failed |= off
        print(
            f"{case.name:46} {len(a):5} {max(b.values()) / 1e6:10.3f} "
            f"{max(a.values()) / 1e6:10.3f} {worst:7.2%}{'  OFF' if off else ''}"
        )
    return failed


@dataclass
class Pool:
    """Networks that both simulated."""

    # Completion times here and in ns-3, and slowdowns here and in ns-3, by flow.
    values: tuple[list[float], ...] = field(default_factory=lambda: ([], [], [], []))
    # Sums of completion times here and in ns-3, by network.
    sums: list[tuple[float, float]] = field(default_factory=list)
    # Packets dropped or marked in ns-3 and here.
    signals: tuple[int, int] = (0, 0)
    # Networks that an assert of ns-3 ended.
    asserts: int = 0

    def add(self, case: Case, run: tuple | None) -> None:
        """Add a network."""
        if run is None:
            self.asserts += 1
            return
        a, b, more = run
        self.signals = self.signals[0] + more[0], self.signals[1] + more[1]
        self.sums.append((sum(a.values()), sum(b.values())))
        for i in b:
            time = ideal(case, i)
            for to, x in zip(self.values, (a[i], b[i], a[i] / time, b[i] / time), strict=True):
                to.append(x)

    def merge(self, other: "Pool") -> None:
        """Add all networks of another pool."""
        for to, of in zip(self.values, other.values, strict=True):
            to.extend(of)
        self.sums += other.sums
        self.signals = (
            self.signals[0] + other.signals[0],
            self.signals[1] + other.signals[1],
        )
        self.asserts += other.asserts

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the difference of means, networks resampled."""
        rng = random.Random(1)
        ratios = []
        for _ in range(RESAMPLES):
            drawn = rng.choices(self.sums, k=len(self.sums))
            ratios.append(sum(a for a, _ in drawn) / sum(b for _, b in drawn) - 1)
        ratios.sort()
        return ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40]


def compare_pools(pool: ThreadPoolExecutor, binary: str, reference: str) -> bool:
    """Compare the random networks; true if a congestion control is off."""
    failed = False
    drawn = seeds()
    print(f"\nseeds {', '.join(map(str, drawn))}; {RUNS} networks of each kind and seed")
    print(
        f"{'pool':22} {'runs':>4} {'asserts':>7} {'flows':>5} {'drops, marks':>14} {'ns-3, ms':>9} "
        f"{'here, ms':>9} {'mean':>7} {'95 % interval':>17} {'median':>7} {'worst':>8} "
        f"{'K-S':>6} {'5 %':>6}"
    )
    for control in CONTROLS:
        total = Pool()
        for kind in KINDS:
            one = Pool()
            cases = [random_case(seed, kind, control, i) for seed in drawn for i in range(RUNS)]
            runs = pool.map(lambda case: both(binary, reference, case), cases)
            for case, run in zip(cases, runs, strict=True):
                one.add(case, run)
            total.merge(one)
            pool_row(f"{control}, {kind}", one)
        failed |= pool_row(f"{control}, all", total, check=True)
    return failed


def pool_row(name: str, pool: Pool, *, check: bool = False) -> bool:
    """Print a pool's row; true if it is checked and off."""
    a, b, slow_a, slow_b = pool.values
    count = len(a)
    if count == 0:
        print(f"{name:22} {pool.asserts} asserts of ns-3, no results")
        return check
    mean_a, mean_b = sum(a) / count, sum(b) / count
    apart = sorted(abs(x - y) / y for x, y in zip(a, b, strict=True))
    distance = kolmogorov_smirnov(slow_a, slow_b)
    critical = KS_5_PERCENT * sqrt(2 / count)
    low, high = pool.interval()
    off = check and (low > LIMIT_MEAN or high < -LIMIT_MEAN or distance > critical)
    print(
        f"{name:22} {len(pool.sums):4} {pool.asserts:7} {count:5} {pool.signals[0]:7,} "
        f"{pool.signals[1]:6,} {mean_b / 1e6:9.1f} {mean_a / 1e6:9.1f} {mean_a / mean_b - 1:+7.2%} "
        f"{low:+8.2%} {high:+8.2%} {apart[count // 2]:7.2%} {apart[-1]:8.2%} {distance:6.3f} "
        f"{critical:6.3f}{'  OFF' if off else ''}",
        flush=True,
    )
    return off


def main() -> int:
    """Compare all cases; 1 if one is off."""
    binary, reference = sys.argv[1:]
    with ThreadPoolExecutor(cpu_count()) as pool:
        failed = compare_fixed(pool, binary, reference)
        failed |= compare_pools(pool, binary, reference)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
