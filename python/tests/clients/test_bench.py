"""Load tools against a server: `vllm bench serve`, GuideLLM and AIPerf.

They come from the packages that `VLLM_BIN`, `GUIDELLM_BIN` and `AIPERF_BIN` name, or that PATH has.
"""

import json
import os
import shutil
import subprocess

import pytest

VLLM = os.environ.get("VLLM_BIN") or shutil.which("vllm")
GUIDELLM = os.environ.get("GUIDELLM_BIN") or shutil.which("guidellm")
AIPERF = os.environ.get("AIPERF_BIN") or shutil.which("aiperf")
REQUESTS = 12
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def tokenizer(binary, tmp_path_factory):
    """The built-in tokenizer as files, so that tools count the tokens that the server counts."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    command = [binary, "tokenizer", "export", tokenizer]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return tokenizer


def run(command, variables=OFFLINE):
    """Runs a tool to its end."""
    environment = {**os.environ, **variables}
    ran = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


@pytest.mark.skipif(
    not GUIDELLM,
    reason="GUIDELLM_BIN names no `guidellm`, and PATH has none; it is 6 GB with its dependencies",
)
def test_guidellm(server, tokenizer, tmp_path):
    report = tmp_path / "report.json"
    command = [GUIDELLM, "run", "--backend", f"kind=openai_http,target={server.url}"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}", "--disable-progress"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    run([*command, "--output", f"kind=json,path={report}"])
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    tokens = metrics["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (8, 8)
    first = metrics["time_to_first_token_ms"]["successful"]
    assert first["count"] == REQUESTS
    assert first["min"] > 0


@pytest.mark.skipif(not AIPERF, reason="AIPERF_BIN names no `aiperf`, and PATH has none")
def test_aiperf(server, model, tokenizer, tmp_path):
    command = [AIPERF, "profile", "--model", model, "--url", server.url, "--ui", "none"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer]
    command += ["--request-count", str(REQUESTS), "--concurrency", "2"]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    command += ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", tmp_path]
    # Offline it takes no folder for a tokenizer.
    run(command, {})
    (export,) = tmp_path.rglob("profile_export_aiperf.json")
    result = json.loads(export.read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert not result.get("error_summary")
    # A word of the answer is a token, also for the tool's own count.
    lengths = result["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (8, 8)
    assert result["time_to_first_token"]["min"] > 0


@pytest.mark.skipif(not VLLM, reason="VLLM_BIN names no `vllm`, and PATH has none")
@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_vllm_bench_serve(server, model, tokenizer, tmp_path, backend):
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    command = [VLLM, "bench", "serve", "--backend", backend, "--base-url", server.url]
    command += ["--endpoint", endpoint, "--model", model, "--tokenizer", tokenizer]
    command += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"]
    command += ["--num-prompts", str(REQUESTS), "--ignore-eos", "--save-result", "--save-detailed"]
    command += ["--result-dir", tmp_path, "--result-filename", "result.json"]
    run(command)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS
    assert result["failed"] == 0
    assert result["output_lens"] == [8] * REQUESTS
    assert result["total_output_tokens"] == 8 * REQUESTS
    if backend == "vllm":
        assert result["total_input_tokens"] == 32 * REQUESTS
    assert not any(result["errors"])
    # An event per token: the first one, and the gaps between them. A chat begins with an event for
    # the role, which the tool counts as the first token, as of vLLM itself.
    gaps_each = 8 if backend == "openai-chat" else 7
    assert [len(gaps) for gaps in result["itls"]] == [gaps_each] * REQUESTS
