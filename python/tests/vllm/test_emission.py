"""`plan --emit`: vLLM's own parser takes the flags, and reads the answer's settings in them."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

QUESTION = [
    "plan",
    "--model=llama-3.1-8b",
    "--rate=20",
    "--isl=800",
    "--osl=20",
    "--requests=60",
    "--seeds=1",
    "--quick",
    "--quiet",
    "--json",
    "--gpus=l40s",
    "--slo=ttft=2s,itl=90ms",
    "--attain=90%",
]

CASES = {
    "plain": ["--serving=aggregated", "--precision=bf16"],
    "quantized": ["--serving=aggregated", "--precision=fp8", "--kv-cache-dtype=fp8"],
    "parallel": ["--serving=aggregated", "--tensor-parallel=2", "--pipeline-parallel=2"],
    "disaggregated": ["--serving=disaggregated", "--tensor-parallel=1"],
    "host memory": [
        "--serving=aggregated",
        "--host-memory=64",
        "--set=engine.host_tier.bytes_per_s=25e9",
    ],
    "switches": [
        "--serving=aggregated",
        "--policies=round_robin",
        "--set=engine.enable_prefix_caching=false",
        "--set=engine.scheduling_policy=priority",
        "--set=engine.long_prefill_token_threshold=512",
        "--set=engine.async_scheduling=false",
        "--set=engine.num_gpu_blocks=4000",
    ],
    "drafts": [
        "--serving=aggregated",
        "--set=engine.speculation.num_speculative_tokens=3",
        "--set=engine.speculation.method=eagle",
        "--set=engine.speculation.acceptance=[0.7,0.5,0.4]",
    ],
}


def emit(target: str, folder: Path, flags: list[str]) -> Any:
    """Writes the files of an answer, and returns the answer."""
    command = [os.environ["SLIPSTREAM_BIN"], *QUESTION, *flags, "--emit", target, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["answers"][0]["answer"]


def parse(args: list[str]) -> Any:
    """What `vllm serve` reads in `args`."""
    parser = make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(args))


def check(engine: Any, answer: Any, case: str) -> None:
    assert engine.tensor_parallel_size == answer["tensor_parallel_size"]
    assert engine.max_num_seqs == answer["max_num_seqs"]
    assert engine.max_num_batched_tokens == answer["max_num_batched_tokens"]
    if case == "quantized":
        assert engine.quantization == "fp8"
        assert engine.kv_cache_dtype == "fp8"
    if case == "parallel":
        assert engine.pipeline_parallel_size == 2
    if case == "host memory":
        assert engine.kv_offloading_size == 64
    if case == "disaggregated":
        assert engine.kv_transfer_config.kv_connector == "NixlConnector"
    if case == "switches":
        assert engine.enable_prefix_caching is False
        assert engine.async_scheduling is False
        assert engine.scheduling_policy == "priority"
        assert engine.num_gpu_blocks_override == 4000
        assert engine.long_prefill_token_threshold == 512
        assert engine.kv_events_config is None
    if case == "drafts":
        assert engine.speculative_config["num_speculative_tokens"] == 3
        assert engine.speculative_config["model"] == "/d"
    if case != "switches":
        assert engine.kv_events_config.enable_kv_cache_events


VARIABLES = {"MODEL": "/m", "DRAFT_MODEL": "/d", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}


@pytest.mark.parametrize("case", CASES)
def test_the_parser_takes_the_script(case: str, tmp_path: Path) -> None:
    answer = emit("vllm", tmp_path / "out", CASES[case])
    stub = tmp_path / "vllm"
    stub.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for pool in ("prefill", "decode") if case == "disaggregated" else ("main",):
        command = [str(tmp_path / "out" / "engine.sh"), pool]
        done = subprocess.run(
            command, env=path | VARIABLES, capture_output=True, text=True, check=True
        )
        serve, *args = done.stdout.split("\0")[:-1]
        assert serve == "serve"
        assert args[0] == "/m"
        check(parse(args), answer, case)


@pytest.mark.parametrize("case", CASES)
def test_the_parser_takes_the_manifest(case: str, tmp_path: Path) -> None:
    answer = emit("helm", tmp_path / "out", CASES[case])
    parts = yaml.safe_load_all((tmp_path / "out" / "vllm.yaml").read_text())
    deployments = [part for part in parts if part["kind"] == "Deployment"]
    assert sum(part["spec"]["replicas"] for part in deployments) == answer["workers"]
    for part in deployments:
        (container,) = part["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["vllm", "serve"]
        args = container["args"]
        for name, value in VARIABLES.items():
            args = [arg.replace(f"$({name})", value) for arg in args]
        assert not any("$(" in arg for arg in args), args
        check(parse(args), answer, case)
