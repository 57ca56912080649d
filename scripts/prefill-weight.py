#!/usr/bin/env python3
"""What `router.prefill_weight` does to prefix hits and latency, over workloads, sizes and loads.

Simulates each case with each weight, and prints a table for docs/routing.md: prefix hits, and
latency relative to weight 1. `TRACE=FILE` adds Mooncake's conversation trace; `--short` takes a
tenth of the requests.

    scripts/prefill-weight.py [--short] [--csv FILE]
"""

import argparse
import concurrent.futures
import csv
import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = os.environ.get("SLIPSTREAM_BIN", str(ROOT / "target/release/slipstream"))
WEIGHTS = (0.5, 1, 2, 4, 8, 16)

# Prefixes of three kinds that the examples do not have; rates are for eight workers.
SHARED = """
requests = 1000
isl = {{ kind = "lognormal", mean = {isl}, cv = 0.6, min = {least}, max = 30000 }}
osl = {{ kind = "lognormal", mean = {osl}, cv = 0.8, min = 8, max = 4000 }}
[arrival]
kind = "gamma"
rate_per_s = {rate}
cv = 2
{prefix}
"""
SYNTHETIC = {
    "none": (SHARED.format(isl=3000, least=100, osl=250, rate=10, prefix=""), 6000),
    "400 prompts of 6,000": (
        SHARED.format(
            isl=7500,
            least=6100,
            osl=250,
            rate=10,
            prefix="[[prefix]]\nbranches = 400\ntokens = 6000\nskew = 0.9",
        ),
        6000,
    ),
    "8 prompts of 1,000": (
        SHARED.format(
            isl=2500,
            least=1100,
            osl=250,
            rate=20,
            prefix="[[prefix]]\nbranches = 8\ntokens = 1000\nskew = 0.5",
        ),
        6000,
    ),
    # What crowds most easily: popular prefixes, and answers that hold their blocks for long.
    "12 prompts of 4,000, answers of 1,000": (
        SHARED.format(
            isl=4300,
            least=4050,
            osl=1000,
            rate=16,
            prefix="[[prefix]]\nbranches = 12\ntokens = 4000\nskew = 1.5",
        ),
        6000,
    ),
}


def cases(folder: Path, trace: str | None, short: bool) -> list[tuple[str, int, str, list[str]]]:
    """Name, workers, load and flags of each case."""
    made = []
    per = 10 if short else 1
    cluster = str(ROOT / "examples/cluster.toml")

    def add(name: str, workers: int, load: str, flags: list[str]) -> None:
        size = f"--set=pool.main.workers={workers}"
        made.append((name, workers, load, [cluster, size, *flags]))

    for name, count, loads in [
        ("demo", 6000, {"light": 0.5, "heavy": 1.0}),
        ("chat", 8000, {"light": 1.5, "heavy": 4.0}),
        ("mixed", 4000, {"light": 0.7, "heavy": 1.3}),
    ]:
        file = str(ROOT / f"examples/{name}.workload.toml")
        for load, scale in loads.items():
            requests = ["--requests", str(count // per), f"--time-scale={scale}"]
            long = ["--duration=2400s"] if name == "mixed" else []
            add(f"examples/{name}", 8, load, ["--workload", file, *requests, *long])
    for name, (text, count) in SYNTHETIC.items():
        file = folder / f"{len(made)}.toml"
        file.write_text(text)
        for workers in (2, 8, 32):
            for load, scale in {"light": 0.5, "heavy": 1.1}.items():
                scaled = ["--requests", str(count // per), f"--time-scale={scale * workers / 8}"]
                add(f"shared: {name}", workers, load, ["--workload", str(file), *scaled])
    if trace:
        model = ["--set=model.preset=llama-3.1-70b", "--set=engine.tensor_parallel_size=4"]
        for workers in (2, 4, 8, 16, 64):
            for load, scale in {"light": 1.0, "heavy": 3.0}.items():
                flags = [*model, "--trace", trace, f"--time-scale={scale * workers / 8}"]
                if short:
                    flags += ["--requests", "1200"]
                add("Mooncake conversation", workers, load, [*flags, "--set=engine.block_size=64"])
        flags = [*model, "--trace", trace, *(["--requests", "1200"] if short else [])]
        add("Mooncake conversation, blocks of 16", 8, "light", flags)
    return made


def figures(flags: list[str], weight: float) -> dict[str, float]:
    """Simulate a case with a weight."""
    command = [BINARY, "simulate", *flags, f"--set=router.prefill_weight={weight}"]
    command += ["--json", "--quiet", "--threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout else None
    if report is None or report["simulation"].get("cut"):
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    latency = report["latency"]
    return {
        "hits": 100 * report["tokens"]["cached"] / report["tokens"]["input"],
        "ttft": latency["ttft_ms"]["mean"],
        "ttft_p99": latency["ttft_ms"]["p99"],
        "itl": latency["itl_ms"]["mean"],
        "e2e": latency["e2e_ms"]["mean"],
    }


def main() -> None:
    """Run all, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--csv", help="write every figure to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        all_cases = cases(Path(folder), os.environ.get("TRACE"), args.short)
        jobs = [(case, weight) for case in all_cases for weight in WEIGHTS]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda job: figures(job[0][3], job[1]), jobs))
    by_job = {(case[:3], weight): r for (case, weight), r in zip(jobs, results, strict=True)}
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["workload", "workers", "load", "weight", *results[0]])
            for (case, weight), r in zip(jobs, results, strict=True):
                rows.writerow([*case[:3], weight, *r.values()])
    hits_at = f"hits, %, at weight {' / '.join(f'{w:g}' for w in WEIGHTS)}"
    columns = ["workload", "workers", "load", hits_at, "mean TTFT", "p99 TTFT", "mean E2E"]
    print("|", " | ".join(columns), "|")
    print("| --- " * len(columns) + "|")
    for case in all_cases:
        one = by_job[case[:3], 1]
        of = [by_job[case[:3], weight] for weight in WEIGHTS]
        hits = " / ".join(f"{r['hits']:.1f}" for r in of)
        ratios = [
            " / ".join(f"{r[key] / one[key]:.2f}" for r in of)
            for key in ("ttft", "ttft_p99", "e2e")
        ]
        print("|", " | ".join([case[0], str(case[1]), case[2], hits, *ratios]), "|")
    print()
    for key in ("ttft", "ttft_p99", "itl", "e2e"):
        means = []
        for weight in WEIGHTS:
            product = 1.0
            for case in all_cases:
                product *= by_job[case[:3], weight][key] / by_job[case[:3], 1][key]
            means.append(f"{product ** (1 / len(all_cases)):.3f}")
        print(f"geometric mean of {key}, relative to weight 1: {' / '.join(means)}")


if __name__ == "__main__":
    main()
