"""Questions on a Ray of two nodes on this machine (`scripts/test-ray.sh`)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import slipstream as ss
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[3]
STORE_BYTES = 80 << 20
"""Object store of a node, near Ray's minimum."""


def node(nodes: Cluster) -> Any:
    return nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)


@pytest.fixture(scope="module")
def connected() -> Iterator[Cluster]:
    """Two nodes beside a head without CPUs: every task runs on one of the two."""
    cluster = Cluster()
    cluster.add_node(num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False)
    try:
        cluster.workers = [node(cluster), node(cluster)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


WORKLOAD = ss.Workload(rate=20, isl=256, osl=32, requests=200, seed=5)
VARY: dict[str, Any] = {"pool.main.workers": range(1, 7), "load": [0.5, 1, 2]}
PLAN: dict[str, Any] = {
    "slo": "ttft=1s,itl=30ms",
    "model": "llama-3.1-8b",
    "gpus": ["h100-sxm", "l40s"],
    "prices": {"h100-sxm": 2.5, "l40s": 0.9},
    "tensor_parallel": [1, 2],
    "max_num_seqs": [256, 64],
    "max_num_batched_tokens": [8192],
    "max_gpus": 8,
}


def test_a_sweep_is_that_of_one_machine(connected: Cluster) -> None:
    here = ss.sweep(ss.Cluster(), WORKLOAD, VARY, slo="ttft=300ms", seeds=2)
    lines: list[str] = []
    there = ss.sweep(
        ss.Cluster(), WORKLOAD, VARY, slo="ttft=300ms", seeds=2, on="ray", progress=lines.append
    )
    assert there.table.to_dict() == here.table.to_dict()
    assert there.text == here.text
    assert any("slices of configurations ended" in line for line in lines)


def test_a_plan_is_that_of_one_machine(connected: Cluster) -> None:
    here = ss.plan(WORKLOAD, **PLAN)
    there = ss.plan(WORKLOAD, **PLAN, on="ray")
    assert there.summary() == here.summary()
    assert there.text == here.text


def test_an_error_is_that_of_one_machine(connected: Cluster, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 5}\n')
    texts = []
    for on in (None, "ray"):
        with pytest.raises(ss.WorkloadError) as raised:
            ss.sweep(ss.Cluster(), ss.Trace.read(trace), VARY, on=on)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_the_command_runs_on_it(connected: Cluster, tmp_path: Path) -> None:
    binary = os.environ["SLIPSTREAM_BIN"]
    environment = {**os.environ, "RAY_ADDRESS": connected.address}
    flags = ["--rate", "20", "--isl", "256", "--osl", "32", "--requests", "200"]
    sweep = ["sweep", "examples/cluster.toml", *flags, "--vary", "pool.main.workers=1..4"]
    plan = [
        "plan",
        *flags,
        "--slo",
        "ttft=1s",
        "--tensor-parallel",
        "1",
        "--max-gpus",
        "4",
        "--json",
    ]
    plan += ["--model", "llama-3.1-8b", "--serving", "aggregated"]
    for asked in (sweep, plan):
        runs = [
            subprocess.run(
                [binary, *asked, *on], capture_output=True, text=True, timeout=300, cwd=ROOT,
                env=environment,
            )
            for on in ([], ["--on", "ray"])
        ]  # fmt: skip
        assert runs[1].returncode == runs[0].returncode == 0, runs[1].stderr
        assert runs[1].stdout == runs[0].stdout
    refused = subprocess.run(
        [binary, *sweep, "--on", "ray"], capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**environment, "SLIPSTREAM_PYTHON": "/usr/bin/env"},
    )  # fmt: skip
    assert refused.returncode == 2
    assert "SLIPSTREAM_PYTHON" in refused.stderr


def test_a_node_that_is_killed_costs_no_row(connected: Cluster) -> None:
    slow = ss.Workload(rate=20, isl=256, osl=32, requests=4000, seed=5)
    here = ss.sweep(ss.Cluster(), slow, VARY)
    killed = threading.Event()
    lines: list[str] = []

    def kill(line: str) -> None:
        lines.append(line)
        if "slices of" in line and not killed.is_set():
            killed.set()
            connected.remove_node(connected.workers[0], allow_graceful=False)

    there = ss.sweep(ss.Cluster(), slow, VARY, on="ray", progress=kill)
    assert killed.is_set()
    # Tasks are retried at once; the head lists the node until its health checks have failed.
    deadline = time.monotonic() + 60
    while alive() > 2 and time.monotonic() < deadline:
        pass
    assert alive() == 2, "the head and one node"
    assert there.table.to_dict() == here.table.to_dict()


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def test_ray_that_cannot_be_reached_is_named() -> None:
    # A process of its own: this one is connected.
    code = (
        "import slipstream as ss\n"
        "try:\n"
        "    ss.sweep(ss.Cluster(), ss.Workload(rate=1), {'load': [1]}, on='ray://127.0.0.1:1')\n"
        "except ss.RemoteError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert "connecting to ray://127.0.0.1:1" in ran.stdout, ran.stderr
