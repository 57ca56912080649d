"""The use of `slipstream` that `mypy --strict` accepts; a test checks that it does."""

import subprocess
import sys
from pathlib import Path

import pytest
import slipstream as ss


def use() -> float:
    cluster: ss.Cluster = ss.Cluster().set("pool.main.workers", 2)
    result: ss.Result = ss.simulate(cluster, ss.Workload(rate=1.0, requests=5), slo="ttft=1s")
    swept: ss.Sweep = ss.sweep(
        cluster, ss.Workload(rate=1), {"load": [0.5, 1], "router.policy": "kv"}
    )
    latencies: list[float] = result.requests.column("ttft_ms")
    result.plot("ttft").show()
    page: ss.Page = result.page
    version: str = ss.__version__
    page.save("page.html")
    return len(swept) + len(version) + sum(latencies)


def test_its_use_is_typed() -> None:
    pytest.importorskip("mypy")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", __file__],
        capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
