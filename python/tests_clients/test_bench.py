"""Load tools against a server: `vllm bench serve`, from the package that `VLLM_BIN` names."""

import json
import os
import shutil
import subprocess

import pytest

VLLM = os.environ.get("VLLM_BIN") or shutil.which("vllm")
REQUESTS = 12


@pytest.mark.skipif(not VLLM, reason="VLLM_BIN names no `vllm`, and PATH has none")
@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_vllm_bench_serve(server, binary, model, tmp_path, backend):
    tokenizer = tmp_path / "tokenizer"
    subprocess.run(
        [binary, "tokenizer", "export", tokenizer], check=True, stdout=subprocess.DEVNULL
    )
    endpoint = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    command = [VLLM, "bench", "serve", "--backend", backend, "--base-url", server.url]
    command += ["--endpoint", endpoint, "--model", model, "--tokenizer", tokenizer]
    command += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"]
    command += ["--num-prompts", str(REQUESTS), "--ignore-eos", "--save-result", "--save-detailed"]
    command += ["--result-dir", tmp_path, "--result-filename", "result.json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
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
