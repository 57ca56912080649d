"""What a KV connector costs per scheduler step, on vLLM's real scheduler and a CPU.

    make bench-vllm

Sweeps the number of cached blocks with 32 decoding requests of fixed length, times `schedule()`,
`update_from_output()` and `build_connector_meta()` for several connectors, fits the slope of the
last one over cache size, and draws it. Times are wall and thread CPU, p50 over the steps.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests_vllm"))

from rig import BLOCK, Rig
from slipstream.pool import cached
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

SIZES = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 192_000, 256_000)
"""Cached blocks: nine bins."""

REQUESTS = 32
STEP_MS = 7.0
"""The decode step and cache size that the published report extrapolates to."""
REPORT_BLOCKS = 13_000


class NoOp(KVConnectorBase_V1, SupportsHMA):
    """Answers no to everything: what the connector interface itself costs."""

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


OURS = {"connector": "SlipstreamConnector", "module": "slipstream.vllm"}
SETUPS: dict[str, dict[str, Any]] = {
    "none": {},
    "no-op": {"connector": "NoOp", "module": "kv_steps"},
    "slipstream": {**OURS},
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

    def p50(self) -> float:
        return statistics.median(self.wall) if self.wall else 0.0

    def p50_cpu(self) -> float:
        return statistics.median(self.cpu) if self.cpu else 0.0


def fill(rig: Rig, blocks: int) -> None:
    """Cache so many blocks with requests that end at once."""
    while (missing := blocks - len(cached(rig.pool))) > 0:
        rig.add(rig.tokens(BLOCK * min(missing, 2000)), max_tokens=1)
        rig.drain()


def make(setup: dict[str, Any], num_blocks: int) -> Rig:
    """Build the engine, the walk gated as the set-up says."""
    arguments = dict(setup)
    os.environ["SLIPSTREAM_BENCH_WALK"] = arguments.pop("env", "0")
    return Rig(num_blocks=num_blocks, **arguments)


def measure(rig: Rig, steps: int) -> dict[str, Clock]:
    """Time decode steps of the same 32 requests, made new for each size."""
    for _ in range(REQUESTS):
        rig.add(rig.tokens(BLOCK * 8), max_tokens=steps + 80)
    for _ in range(40):
        rig.step()
    clocks = {name: Clock() for name in ("schedule", "update", "meta")}
    scheduler, connector = rig.scheduler, rig.connector
    if connector is not None:
        plain = connector.build_connector_meta
        connector.build_connector_meta = clocks["meta"].wrap(plain)
    schedule = clocks["schedule"].wrap(scheduler.schedule)
    update = clocks["update"].wrap(scheduler.update_from_output)
    gc.collect()
    for _ in range(steps):
        plan = schedule()
        assert len(plan.num_scheduled_tokens) == REQUESTS, "all requests decode in every step"
        update(plan, rig.output(plan))
    if connector is not None:
        connector.build_connector_meta = plain
    for name in list(scheduler.requests):
        rig.abort(name)
    rig.step()
    return clocks


def slope(points: list[tuple[int, float]]) -> float:
    """Least-squares slope, µs per 1,000 blocks."""
    if len(points) < 2:
        return float("nan")
    return statistics.linear_regression([n / 1000 for n, _ in points], [t for _, t in points])[0]


def churn(name: str, setup: dict[str, Any], steps: int, blocks: int) -> None:
    """Prefill 8,176 unseen tokens a step with a full pool: 511 keys in, 511 out."""
    rig = make(setup, blocks)
    fill(rig, blocks - 100)
    clock, meta = Clock(), Clock()
    schedule = clock.wrap(rig.scheduler.schedule)
    if rig.connector is not None:
        rig.connector.build_connector_meta = meta.wrap(rig.connector.build_connector_meta)
    for i in range(steps + 5):
        rig.add(rig.tokens(BLOCK * 511), max_tokens=1)
        plan = schedule()
        rig.scheduler.update_from_output(plan, rig.output(plan))
        if i == 4:
            clock.wall.clear(), clock.cpu.clear(), meta.wall.clear(), meta.cpu.clear()
    print(f"| {name} | {clock.p50():.0f} | {clock.p50_cpu():.0f} | {meta.p50():.1f} |", flush=True)


def poll(polls: int) -> None:
    """Time the worker half's whole step with nothing to do: metadata, load, results."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    rig = Rig(num_blocks=64, **OURS)
    worker = KVConnectorFactory.create_connector(
        rig.config, KVConnectorRole.WORKER, rig.kv_cache_config
    )
    meta = rig.step().kv_connector_metadata
    worker.bind_connector_metadata(meta)
    for name, call in {
        "start_load_kv": lambda: worker.start_load_kv(None),
        "get_transfer_results": lambda: worker.get_transfer_results(set()),
    }.items():
        clock = Clock()
        timed = clock.wrap(call)
        for _ in range(polls):
            timed()
        p99 = statistics.quantiles(clock.wall, n=100)[98]
        print(f"| {name} | {clock.p50():.2f} | {p99:.2f} |", flush=True)


def draw(results: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Draw `build_connector_meta` over cache size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for name, points in results.items():
        axes.plot([n for n, _ in points], [t for _, t in points], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(6, color="gray", linestyle=":", label="mark: 6 µs")
    axes.set_xlabel("cached blocks")
    axes.set_ylabel("build_connector_meta, µs (wall, p50)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run what the arguments ask for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="timed steps per size")
    parser.add_argument("--max-blocks", type=int, default=SIZES[-1])
    parser.add_argument("--setups", default=";".join(SETUPS), help="names, separated by semicolons")
    parser.add_argument("--only", choices=["sweep", "churn", "poll"])
    parser.add_argument("--plot", type=Path, help="draw to this PNG file")
    args = parser.parse_args()
    sizes = [n for n in SIZES if n <= args.max_blocks]
    wanted = args.setups.split(";")
    if unknown := set(wanted) - set(SETUPS):
        parser.error(f"no such set-up: {', '.join(unknown)}; known: {'; '.join(SETUPS)}")
    chosen = {name: SETUPS[name] for name in wanted}
    results: dict[str, list[tuple[int, float]]] = {}
    if args.only in (None, "sweep"):
        print("µs, p50; wall / thread CPU\n")
        print("| scheduler with | cached blocks | schedule() | update, wall | meta |")
        print("|---|---|---|---|---|")
    for name, setup in chosen.items() if args.only in (None, "sweep") else ():
        try:
            rig = make(setup, sizes[-1] + 4000)
        except (ImportError, RuntimeError, AssertionError, ValueError, AttributeError) as error:
            print(f"| {name} | left out: {type(error).__name__}: {str(error)[:80]} | | | |")
            continue
        for size in sizes:
            fill(rig, size)
            clocks = measure(rig, args.steps)
            s, u, m = clocks["schedule"], clocks["update"], clocks["meta"]
            blocks = len(cached(rig.pool))
            if rig.connector is not None:
                results.setdefault(name, []).append((blocks, m.p50()))
            print(
                f"| {name} | {blocks} | {s.p50():.0f} / {s.p50_cpu():.0f} | {u.p50():.0f} "
                f"| {m.p50():.2f} / {m.p50_cpu():.2f} |",
                flush=True,
            )
        del rig
        gc.collect()
    if results:
        print("\n| connector | slope, µs per 1,000 blocks | at 13k blocks, % of a 7 ms step |")
        print("|---|---|---|")
        for name, points in results.items():
            near = min(points, key=lambda p: abs(p[0] - REPORT_BLOCKS))
            at = near[1] + slope(points) * (REPORT_BLOCKS - near[0]) / 1000
            print(f"| {name} | {slope(points):.4f} | {at / (STEP_MS * 1e3) * 100:.2f} |")
        if args.plot:
            draw(results, args.plot)
    if args.only in (None, "churn"):
        print("\n| churn, full pool of 20,000 | schedule() wall | CPU | meta wall |")
        print("|---|---|---|---|")
        for name in ("none", "no-op", "slipstream", "slipstream, followed", "walk"):
            churn(name, SETUPS[name], 60, 20_000)
    if args.only in (None, "poll"):
        print("\n| worker half, idle, µs | p50 | p99 |\n|---|---|---|")
        poll(20_000)


if __name__ == "__main__":
    # The factory imports the connectors above by this name.
    sys.modules["kv_steps"] = sys.modules["__main__"]
    main()
