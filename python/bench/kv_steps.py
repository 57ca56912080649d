"""Measures the cost of a KV connector per scheduler step, on vLLM's real scheduler and a CPU.

    scripts/run.sh bench-vllm

Sweeps the number of cached blocks with 32 decoding requests, times `schedule()`,
`update_from_output()` and `build_connector_meta()` for several connectors, fits the slope of the
last one over cache size, and draws it. The requests' prompts differ in length by one token each, so
that two of them fill a block in every step, as in an engine under load; with `--lockstep` all fill
one in the same step, and nothing changes in 15 of 16. Every set-up has an engine of its own. Each
size is measured in rounds that visit all of them in turn, each time in another order, so that a
busy machine slows them alike. Times are p50 over the steps of all rounds, wall and thread CPU;
ratios are medians over rounds of what one round measured.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "vllm"))

from rig import BLOCK, Rig
from slipstream.pool import cached
from slipstream.vllm.metadata import Load, SlipstreamMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

SIZES = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 192_000, 256_000)
"""Cached blocks: nine bins."""

IDLE_SIZES = (16_000, 64_000)
"""Of steps in which nothing changes, two bins."""

REQUESTS = 32
STEP_MS = 7.0
"""The decode step and cache size that the published report extrapolates to."""
REPORT_BLOCKS = 13_000


class NoOp(KVConnectorBase_V1, SupportsHMA):
    """Reports no hit and no work: the cost of the connector interface itself."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.meta = KVConnectorMetadata()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.meta

    def request_finished_all_groups(self, request: Any, ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, name: str, layer: Any, meta: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class Walk(NoOp):
    """Copies the set of cached keys every step and compares it with the last copy.

    `SLIPSTREAM_BENCH_WALK=0` gates the walk off, which makes it `NoOp`.
    """

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool
        self.last: set[bytes] = set()
        self.on = os.environ.get("SLIPSTREAM_BENCH_WALK", "1") != "0"

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.on:
            now = set(cached(self.pool).keys())
            self.added, self.removed = now - self.last, self.last - now
            self.last = now
        return self.meta


class Defer(NoOp):
    """Defers every request: the cost of vLLM's own repeated visits."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[None, bool]:
        return None, False


class Unsettled:
    """Peers whose keys are never known."""

    def longest(self, *args: Any) -> tuple[str, int]:
        return "", args[-1]

    def is_settled(self) -> bool:
        return False

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


OURS = {"connector": "SlipstreamConnector", "module": "slipstream.vllm"}
SETUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "no-op": {"connector": "NoOp", "module": "kv_steps"},
    "slipstream": {**OURS},
    "slipstream, no saves": {**OURS, "extra": {"save": False}},
    "slipstream, followed": {**OURS, "extra": {"follow": True}},
    "NixlConnector": {"connector": "NixlConnector"},
    "MooncakeConnector": {"connector": "MooncakeConnector"},
    "walk": {"connector": "Walk", "module": "kv_steps", "env": "1"},
    "walk, gated off": {"connector": "Walk", "module": "kv_steps", "env": "0"},
}


class Clock:
    """Wall and thread CPU time of calls, in µs."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def wrap(self, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            result = function(*args)
            self.wall.append((time.perf_counter_ns() - wall) / 1e3)
            self.cpu.append((time.thread_time_ns() - cpu) / 1e3)
            return result

        return timed

    def add(self, other: "Clock") -> None:
        self.wall += other.wall
        self.cpu += other.cpu

    def p99(self) -> float:
        return statistics.quantiles(self.wall, n=100)[98]

    def p99_cpu(self) -> float:
        return statistics.quantiles(self.cpu, n=100)[98]

    def p50(self) -> float:
        return statistics.median(self.wall) if self.wall else 0.0

    def p50_cpu(self) -> float:
        return statistics.median(self.cpu) if self.cpu else 0.0


def fill(rig: Rig, blocks: int) -> None:
    """Cache `blocks` blocks with requests that end at once."""
    while (missing := blocks - len(cached(rig.pool))) > 0:
        rig.add(rig.tokens(BLOCK * min(missing, 2000)), max_tokens=1)
        rig.drain()


def make(setup: dict[str, Any], num_blocks: int) -> Rig:
    """Build the engine, with the walk gated by the set-up."""
    arguments = dict(setup)
    os.environ["SLIPSTREAM_BENCH_WALK"] = arguments.pop("env", "0")
    return Rig(num_blocks=num_blocks, **arguments)


def measure(rig: Rig, steps: int, lockstep: bool) -> dict[str, Clock]:
    """Time decode steps of 32 requests, created again for each round."""
    for n in range(REQUESTS):
        phase = 0 if lockstep else n % BLOCK
        rig.add(rig.tokens(BLOCK * 8 + phase), max_tokens=steps + 30)
    for _ in range(10):
        rig.step()
    before = len(cached(rig.pool))
    clocks = {name: Clock() for name in ("schedule", "update", "meta")}
    scheduler, connector = rig.scheduler, rig.connector
    if connector is not None:
        plain = connector.build_connector_meta
        connector.build_connector_meta = clocks["meta"].wrap(plain)
    schedule = clocks["schedule"].wrap(scheduler.schedule)
    update = clocks["update"].wrap(scheduler.update_from_output)
    for _ in range(steps):
        plan = schedule()
        assert len(plan.num_scheduled_tokens) == REQUESTS, "all requests decode in every step"
        update(plan, rig.output(plan))
    if connector is not None:
        connector.build_connector_meta = plain
    filled = len(cached(rig.pool)) - before
    assert lockstep or filled == steps * REQUESTS // BLOCK, f"{filled} blocks in {steps} steps"
    for name in list(scheduler.requests):
        rig.abort(name)
    rig.step()
    return clocks


def slope(points: list[tuple[int, float]]) -> float:
    """Least-squares slope, µs per 1,000 blocks."""
    if len(points) < 2:
        return float("nan")
    return statistics.linear_regression([n / 1000 for n, _ in points], [t for _, t in points])[0]


def churn(chosen: dict[str, dict[str, Any]], steps: int, rounds: int, blocks: int) -> None:
    """Prefill 8,176 unseen tokens per step with a full pool: 511 keys in, 511 out."""
    rigs = {name: make(setup, blocks) for name, setup in chosen.items()}
    taken: Rounds = {name: [] for name in rigs}
    for rig in rigs.values():
        fill(rig, blocks - 100)
    gc.collect()
    gc.freeze()
    # The first round fills the pool.
    for round_ in range(rounds + 1):
        for name in in_turn(list(rigs), round_):
            rig, clocks = rigs[name], {"schedule": Clock(), "meta": Clock()}
            schedule = clocks["schedule"].wrap(rig.scheduler.schedule)
            if rig.connector is not None:
                plain = rig.connector.build_connector_meta
                rig.connector.build_connector_meta = clocks["meta"].wrap(plain)
            for _ in range(steps):
                rig.add(rig.tokens(BLOCK * 511), max_tokens=1)
                plan = schedule()
                rig.scheduler.update_from_output(plan, rig.output(plan))
            if rig.connector is not None:
                rig.connector.build_connector_meta = plain
            if round_ > 0:
                taken[name].append(clocks)
    for name in rigs:
        whole, meta = joined(taken[name], "schedule"), joined(taken[name], "meta")
        over, over_cpu = (
            (ratio(taken, name, "none", "schedule", cpu=cpu) - 1) * 100 for cpu in (False, True)
        )
        print(
            f"| {name} | {whole.p50():.0f} | {whole.p50_cpu():.0f} | {over:+.0f} / {over_cpu:+.0f} "
            f"| {meta.p50():.1f} |",
            flush=True,
        )


def poll(polls: int) -> None:
    """Time the worker half's calls without work, and with loads that end continuously."""
    extra = {"host_bytes": 64 << 20, "stats_interval_s": 1e9}
    rig = Rig(num_blocks=600, worker=True, extra=extra, **OURS)
    worker = rig.worker.connector
    half = worker.worker
    keys = [i.to_bytes(36, "big") for i in range(512)]
    data = half.blocks.empty([len(keys)])
    half.store.put(keys, memoryview(data.numpy()))
    # Idle, as in a step without changes.
    worker.bind_connector_metadata(rig.scheduler.schedule().kv_connector_metadata)
    for name, call in {
        "start_load_kv, idle": lambda: worker.start_load_kv(None),
        "wait_for_save, idle": worker.wait_for_save,
        "get_transfer_results, idle": lambda: worker.get_transfer_results(set()),
    }.items():
        clock = Clock()
        timed = clock.wrap(call)
        for _ in range(polls):
            timed()
        say_poll(name, clock)
    # Busy: up to four loads of 16 blocks, a poll every 250 µs with 50 µs of work between.
    poll_clock, load_clock = Clock(), Clock()
    results = poll_clock.wrap(lambda: worker.get_transfer_results(set()))
    start = load_clock.wrap(lambda: worker.start_load_kv(None))
    ended = begun = 0
    while len(poll_clock.wall) < polls // 4:
        if half.loading < 4:
            first = (begun * 16) % 496
            blocks = list(range(first, first + 16))
            load = Load(f"r{begun}", keys[first : first + 16], blocks, [""] * 16, [(0, 16)])
            worker.bind_connector_metadata(SlipstreamMetadata(loads=[load]))
            start()
            begun += 1
        ended += len(results().finished_recving)
        until = time.perf_counter_ns() + 50_000
        while time.perf_counter_ns() < until:
            pass
        time.sleep(200e-6)
    say_poll("start_load_kv, a load of 16 blocks", load_clock)
    say_poll(f"get_transfer_results, busy ({ended} loads ended)", poll_clock)
    rig.close()


def deferred(requests: int, steps: int, rounds: int) -> None:
    """Time steps in which many requests wait for a peer whose keys are unknown."""
    rigs = {
        "puts off, no more": Rig(num_blocks=600, connector="Defer", module="kv_steps"),
        "slipstream": Rig(num_blocks=600, extra={"lookup_wait_s": 3600}, **OURS),
    }
    rigs["slipstream"].connector.scheduler.follow(Unsettled())
    for rig in rigs.values():
        for _ in range(requests):
            rig.add(rig.tokens(BLOCK * 8), max_tokens=1)
    taken: Rounds = {name: [] for name in rigs}
    # In the first round every request is looked up once.
    for round_ in range(rounds + 1):
        for name in in_turn(list(rigs), round_):
            rig, clock = rigs[name], Clock()
            schedule = clock.wrap(rig.scheduler.schedule)
            for _ in range(steps):
                plan = schedule()
                assert not plan.num_scheduled_tokens
                rig.scheduler.update_from_output(plan, rig.output(plan))
            if round_ > 0:
                taken[name].append({"schedule": clock})
    base = "puts off, no more"
    for name in rigs:
        clock = joined(taken[name], "schedule")
        over = (ratio(taken, name, base, "schedule") - 1) * 100
        print(f"| {name} | {clock.p50() / 1e3:.1f} | {clock.p50_cpu() / 1e3:.1f} | {over:+.0f} |")


def say_poll(name: str, clock: Clock) -> None:
    """Print one row."""
    print(
        f"| {name} | {clock.p50():.2f} | {clock.p99():.2f} "
        f"| {clock.p50_cpu():.2f} | {clock.p99_cpu():.2f} |",
        flush=True,
    )


def resync(keys: int) -> None:
    """Time the steps of a snapshot of `keys` keys."""
    from slipstream import KeyMirror, KeySet

    held, mirror = KeySet(keys), KeyMirror()
    held.apply([x for i in range(keys) for x in (i.to_bytes(36, "big"), i)])
    held.set_consumed(True)
    clock = Clock()
    take = clock.wrap(lambda: held.step([], 2048))
    while message := take():
        mirror.apply(message)
    assert len(mirror) == keys
    print(f"\nA snapshot of {keys} keys takes {len(clock.wall) - 1} steps, of at most ", end="")
    print(f"{max(clock.wall):.0f} µs wall, {max(clock.cpu):.0f} µs CPU each.")


def draw(
    results: "Points",
    steps: "Points",
    path: Path,
) -> None:
    """Draw `build_connector_meta` over cache size, and each bin's step time against none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    for name, points in results.items():
        left.plot([n for n, _ in points], [t for _, t in points], marker="o", label=name)
    left.set_xscale("log")
    left.set_yscale("log")
    if "no-op" in results:
        target = [4 * t for _, t in results["no-op"]]
        sizes = [n for n, _ in results["no-op"]]
        left.plot(sizes, target, color="gray", linestyle=":", label="target: 4 times the no-op")
    left.set_xlabel("cached blocks")
    left.set_ylabel("build_connector_meta, µs (wall, p50)")
    left.grid(visible=True, which="major", alpha=0.3)
    left.legend(fontsize=8)
    shown = [name for name in steps if name not in ("none", "walk, gated off")]
    width = 0.8 / max(1, len(shown))
    for k, name in enumerate(shown):
        over = [t - base for (_, t), (_, base) in zip(steps[name], steps["none"], strict=True)]
        right.bar([i + k * width for i in range(len(over))], over, width, label=name)
    right.set_yscale("symlog", linthresh=10)
    right.set_xticks([i + 0.4 for i in range(len(steps["none"]))])
    right.set_xticklabels([f"{n // 1000}k" for n, _ in steps["none"]])
    right.set_xlabel("cached blocks")
    right.set_ylabel("schedule() + update_from_output() over no connector, µs (CPU)")
    right.grid(visible=True, axis="y", alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the selected parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="timed steps per round and size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-blocks", type=int, default=SIZES[-1])
    parser.add_argument("--setups", default=";".join(SETUPS), help="names, separated by semicolons")
    parser.add_argument("--only", choices=["sweep", "churn", "deferred", "poll"])
    parser.add_argument("--lockstep", action="store_true", help="all requests fill blocks at once")
    parser.add_argument("--plot", type=Path, help="draw to this PNG file")
    args = parser.parse_args()
    sizes = [n for n in SIZES if n <= args.max_blocks]
    wanted = args.setups.split(";")
    if unknown := set(wanted) - set(SETUPS):
        parser.error(f"no such set-up: {', '.join(unknown)}; known: {'; '.join(SETUPS)}")
    if args.only in (None, "sweep"):
        sweep({name: SETUPS[name] for name in wanted}, sizes, args)
    if args.only is None and not args.lockstep:
        print()
        idle = {**vars(args), "lockstep": True, "plot": None}
        names = [name for name in wanted if not name.startswith("walk")]
        some = [n for n in sizes if n in IDLE_SIZES] or sizes[-1:]
        sweep({name: SETUPS[name] for name in names}, some, argparse.Namespace(**idle))
    if args.only in (None, "churn"):
        print(
            "\n| churn, full pool of 20,000 | schedule(), µs | CPU | over, %, wall / CPU | meta |"
        )
        print("|---|---|---|---|---|")
        names = (
            "none",
            "no-op",
            "slipstream, no saves",
            "slipstream",
            "slipstream, followed",
            "NixlConnector",
            "MooncakeConnector",
            "walk",
        )
        churn({name: SETUPS[name] for name in names}, 15, args.rounds, 20_000)
    if args.only in (None, "deferred"):
        print("\n| 10,000 requests that wait for a peer's keys | schedule(), ms | CPU | over, % |")
        print("|---|---|---|---|")
        deferred(10_000, 5, args.rounds)
    if args.only in (None, "poll"):
        print("\n| worker half, µs | p50 | p99 | CPU p50 | CPU p99 |\n|---|---|---|---|---|")
        poll(20_000)
        resync(64_000)


Points = dict[str, list[tuple[int, float]]]
"""By set-up: cached blocks and a time, in µs."""

Cells = dict[str, list[str]]
"""By set-up: a table's cells, one for each number of cached blocks."""


def print_table(title: str, counts: list[int], cells: Cells) -> None:
    """Print one table: a row for each set-up, a column for each number of cached blocks."""
    print(f"\n{title}, at so many cached blocks:\n")
    print(f"| scheduler with | {' | '.join(f'{n / 1000:.1f}k' for n in counts)} |")
    print("|---" * (len(counts) + 1) + "|")
    for name, row in cells.items():
        print(f"| {name} | {' | '.join(row)} |", flush=True)


Rounds = dict[str, list[dict[str, Clock]]]
"""By set-up, for each round: the measured times."""


def joined(rounds: list[dict[str, Clock]], part: str) -> Clock:
    """Return all times of one part."""
    clock = Clock()
    for each in rounds:
        clock.add(each[part])
    return clock


def ratio(rounds: Rounds, name: str, base: str, *parts: str, cpu: bool = True) -> float:
    """Return the ratio of these parts' times to another set-up's: median over rounds."""

    def taken(each: dict[str, Clock]) -> float:
        return sum(each[part].p50_cpu() if cpu else each[part].p50() for part in parts)

    pairs = zip(rounds[name], rounds[base], strict=True)
    return statistics.median(taken(ours) / taken(theirs) for ours, theirs in pairs)


def in_turn(names: list[str], round_: int) -> list[str]:
    """Return the set-ups in the order of this round: each comes first once."""
    first = round_ % len(names)
    return names[first:] + names[:first]


def sweep(chosen: dict[str, dict[str, Any]], sizes: list[int], args: Any) -> None:
    """Measure decode steps at all sizes; print and draw."""
    rigs: dict[str, Rig] = {}
    for name, setup in chosen.items():
        try:
            rigs[name] = make(setup, sizes[-1] + 6000)
        except (ImportError, RuntimeError, AssertionError, ValueError, AttributeError) as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:80]}")
    base = "no-op" if "no-op" in rigs else next(iter(rigs))
    kind = "all in one step of 16" if args.lockstep else "two in every step"
    results: Points = {}
    walls: Points = {}
    steps: Points = {}
    # For each table, the set-up's cells by size.
    metas: Cells = {}
    times: Cells = {}
    wholes: Cells = {}
    counts: list[int] = []
    for size in sizes:
        rounds: Rounds = {name: [] for name in rigs}
        for rig in rigs.values():
            fill(rig, size)
        gc.collect()
        gc.freeze()
        for round_ in range(args.rounds):
            for name in in_turn(list(rigs), round_):
                rounds[name].append(measure(rigs[name], args.steps, args.lockstep))
        for name, rig in rigs.items():
            s, u, m = (joined(rounds[name], part) for part in ("schedule", "update", "meta"))
            blocks = len(cached(rig.pool))
            steps.setdefault(name, []).append((blocks, s.p50_cpu() + u.p50_cpu()))
            over = [(ratio(rounds, name, base, part) - 1) * 100 for part in ("schedule", "update")]
            wholes.setdefault(name, []).append(
                f"{s.p50_cpu():.0f} ({over[0]:+.1f}), {u.p50_cpu():.0f} ({over[1]:+.1f})"
            )
            if rig.connector is not None:
                results.setdefault(name, []).append((blocks, m.p50_cpu()))
                walls.setdefault(name, []).append((blocks, m.p50()))
                metas.setdefault(name, []).append(f"{m.p50():.2f} / {m.p50_cpu():.2f}")
                ratios = [ratio(rounds, name, base, "meta", cpu=cpu) for cpu in (False, True)]
                times.setdefault(name, []).append(f"{ratios[0]:.1f} / {ratios[1]:.1f}")
        counts.append(blocks)
        print(f"measured at {blocks} blocks", file=sys.stderr)
    kind = "all in one step of 16" if args.lockstep else "two in every step"
    print(f"\n{REQUESTS} decoding requests, which fill a block of {BLOCK} tokens each: {kind}.")
    print_table("build_connector_meta, µs p50, wall / CPU", counts, metas)
    print_table(f"build_connector_meta, times the {base} connector's, wall / CPU", counts, times)
    print_table(
        f"schedule(), update_from_output(), µs CPU p50 (over the {base} connector, %)",
        counts,
        wholes,
    )
    if len(sizes) > 1:
        print("\n| connector | slope, µs per 1,000 blocks, wall / CPU | at 13k, CPU | of 7 ms, % |")
        print("|---|---|---|---|")
        for name, points in results.items():
            near = min(points, key=lambda p: abs(p[0] - REPORT_BLOCKS))
            at = near[1] + slope(points) * (REPORT_BLOCKS - near[0]) / 1000
            wall = slope(walls[name])
            share = at / (STEP_MS * 1e3) * 100
            print(f"| {name} | {wall:.4f} / {slope(points):.4f} | {at:.1f} | {share:.2f} |")
    if args.plot:
        draw(walls, steps, args.plot)


if __name__ == "__main__":
    # The factory imports the connectors above by this name.
    sys.modules["kv_steps"] = sys.modules["__main__"]
    main()
