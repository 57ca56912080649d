"""A real vLLM on a CPU, calibrated on one load and predicted at five others.

Prints a table: `calibrated.py [--rounds N] [--out FILE]`. Rounds are measured in turns, so that a
disturbance of the host hits a part of each load.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fleet import Engine, make_model, slipstream

QUANTITIES = [(name, at) for name in ("ttft_ms", "itl_ms", "e2e_ms") for at in ("p50", "p99")]

TARGET = 0.05
"""Error that each quantity is to be within on a quiet machine."""

CLIENT = ["--prompt-form=text", "--no-metrics", "--quiet", "--timeout=300s"]


@dataclass
class Load:
    """A workload, with what was simulated and measured of it."""

    name: str
    workload: str
    rate: float | None = None
    """Arrivals as a share of what the engine serves with eight requests at once."""
    simulated: dict[str, float] = field(default_factory=dict)
    measured: list[dict[str, float]] = field(default_factory=list)
    preemptions: float = 0.0


def loads() -> list[Load]:
    """What is predicted. The engine was calibrated with other lengths, in closed loops."""
    chat = "[[class]]\nisl = {kind = 'uniform', min = 50, max = 400}\n"
    chat += "osl = {kind = 'uniform', min = 20, max = 100}\n"
    long = "[[class]]\nisl = {kind = 'uniform', min = 600, max = 1200}\n"
    long += "osl = {kind = 'uniform', min = 10, max = 40}\n"
    shared = "[[class]]\nisl = {kind = 'uniform', min = 450, max = 700}\n"
    shared += "osl = {kind = 'uniform', min = 20, max = 60}\n"
    shared += "[[class.prefix]]\ntokens = 384\nbranches = 4\n"
    # Sixteen such answers need more blocks than the engine has.
    answers = "[[class]]\nisl = {kind = 'uniform', min = 500, max = 700}\n"
    answers += "osl = {kind = 'uniform', min = 500, max = 700}\n"
    return [
        Load("low rate", f"requests = 120\n{chat}", 0.35),
        Load("high rate", f"requests = 160\n{chat}", 0.75),
        Load("long prompts", f"requests = 110\n{long}", 0.4),
        Load("shared prefixes", f"requests = 120\n{shared}", 0.5),
        Load(
            "preemption",
            f"requests = 100\n[arrival]\nkind = 'closed'\nconcurrency = 16\n{answers}",
        ),
    ]


def run(*arguments: str) -> str:
    command = [slipstream(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def figures(report: str) -> dict[str, float]:
    latency = json.loads(report)["latency"]
    return {f"{name} {at}": latency[name][at] for name, at in QUANTITIES}


def simulate(cluster: Path, *arguments: str) -> dict[str, object]:
    return dict(json.loads(run("simulate", str(cluster), *arguments, "--json", "--quiet")))


def stolen() -> tuple[float, float]:
    """CPU time of the host so far that others took, or all of it, in ticks."""
    ticks = [float(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def pressure() -> float:
    """Time so far with a task waiting for a CPU, s."""
    line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    return float(line.rsplit("total=", 1)[1]) / 1e6


def compare(folder: Path, rounds: int, requests_share: float = 1.0) -> tuple[list[Load], str]:
    """Calibrate, simulate, then measure in turns; returns the loads and the report."""
    engine = Engine(make_model(folder / "model"), folder / "vllm.log", development=True)
    try:
        engine.await_ready()
        cluster = folder / "cluster.toml"
        limits = ["--max-concurrency=16", "--max-prompt=1500", "--max-duration=240s"]
        report = run("calibrate", "--engine", engine.url, *limits, "--out", str(cluster))
        all_loads = loads()
        for load in all_loads:
            workload = folder / f"{load.name}.toml"
            text = load.workload
            if load.rate is not None:
                # Arrivals come before the classes in the file.
                head, rest = text.split("\n", 1)
                probe = f"{head}\n[arrival]\nkind = 'closed'\nconcurrency = 8\n{rest}"
                workload.write_text(probe)
                served = simulate(cluster, "--workload", str(workload))["throughput"]
                assert isinstance(served, dict)
                rate = load.rate * float(served["requests_per_s"])
                arrival = f"[arrival]\nkind = 'poisson'\nrate_per_s = {rate:.4f}\n"
                text = f"{head}\n{arrival}{rest}"
            head, rest = text.split("\n", 1)
            count = max(int(int(head.split("= ")[1]) * requests_share), 16)
            workload.write_text(f"requests = {count}\n{rest}")
            done = simulate(cluster, "--workload", str(workload))
            load.simulated = figures(json.dumps(done))
            counts = done.get("engine")
            assert isinstance(counts, dict)
            load.preemptions = float(counts.get("preemptions") or 0.0)
        for _ in range(rounds):
            for load in all_loads:
                workload = folder / f"{load.name}.toml"
                measure = ["bench", engine.url, "--workload", str(workload), "--json", *CLIENT]
                # New texts each time: the cache has those of the last round.
                seed = len(load.measured) + 11
                load.measured.append(figures(run(*measure, f"--seed={seed}")))
        return all_loads, report
    finally:
        engine.kill()


def judged(load: Load) -> Iterator[tuple[str, float, float, float, float]]:
    """Quantity, simulated, median of the measured, error, and how far the rounds are apart."""
    for name, at in QUANTITIES:
        key = f"{name} {at}"
        values = [measured[key] for measured in load.measured]
        middle = statistics.median(values)
        apart = (max(values) - min(values)) / middle
        yield key, load.simulated[key], middle, load.simulated[key] / middle - 1, apart


def table(all_loads: list[Load], host: str) -> str:
    lines = [host, "", "| load | quantity | simulated | measured | error | rounds apart |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    inside = total = 0
    for load in all_loads:
        for key, simulated, measured, error, apart in judged(load):
            lines.append(
                f"| {load.name} | {key} | {simulated:.2f} | {measured:.2f} | {error:+.1%} | "
                f"{apart:.1%} |"
            )
            inside += abs(error) <= TARGET
            total += 1
    lines.append(f"\n{inside} of {total} within {TARGET:.0%}.")
    return "\n".join(lines)


def measure(folder: Path, rounds: int, requests_share: float = 1.0) -> tuple[list[Load], str]:
    """`compare`, and its table with the load of the host."""
    (steal, ticks), waited = stolen(), pressure()
    all_loads, report = compare(folder, rounds, requests_share)
    (steal_end, ticks_end), waited_end = stolen(), pressure()
    share = (steal_end - steal) / max(ticks_end - ticks, 1)
    seconds = (ticks_end - ticks) / 100 / max(len(list_cpus()), 1)
    host = (
        f"Host: {share:.1%} of CPU time stolen, {(waited_end - waited) / seconds:.0%} of the time"
    )
    host += " with a task waiting for a CPU."
    return all_loads, f"{report}\n{table(all_loads, host)}\n"


def list_cpus() -> list[str]:
    lines = Path("/proc/stat").read_text().splitlines()
    return [line for line in lines if line.startswith("cpu") and line[3].isdigit()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model").mkdir()
        _, text = measure(Path(folder), options.rounds)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
