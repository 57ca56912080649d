"""llama.cpp by the server of `llama-cpp-python`, with a model of random weights.

Skips without that package and `gguf`: `pip install "llama-cpp-python[server]" gguf`. The server has
no `/health`, `/props` or `/metrics`, so the router learns its models, and takes it for an OpenAI
server of unknown kind.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import free_port, post, router

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("starlette_context", reason="llama-cpp-python has no [server]")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")

START_S = 300
HIDDEN, INNER, LAYERS, HEADS = 64, 128, 2, 2
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 12}
COMPLETION = GREEDY | {"prompt": "a b c"}
CHAT = GREEDY | {"messages": [{"role": "user", "content": "a b"}]}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_model(path: Path) -> None:
    """A Llama of random weights, whose tokens are bytes and letters."""
    import numpy  # comes with gguf

    drawn = numpy.random.default_rng(7)
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    tokens += [f"\u2581{letter}".encode() for letter in "abcdefghijklmnopqrstuvwxyz"]
    kinds = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    kinds += (len(tokens) - len(kinds)) * [gguf.TokenType.NORMAL]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(2048)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(HIDDEN // HEADS)
    out.add_vocab_size(len(tokens))
    out.add_file_type(gguf.LlamaFileType.ALL_F32)
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_types(kinds)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = drawn.standard_normal((rows, columns)) * 2 / columns**0.5
        out.add_tensor(f"{name}.weight", values.astype(numpy.float32))

    def norm(name: str) -> None:
        out.add_tensor(f"{name}.weight", numpy.ones(HIDDEN, numpy.float32))

    matrix("token_embd", len(tokens), HIDDEN)
    matrix("output", len(tokens), HIDDEN)
    norm("output_norm")
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(at + name, HIDDEN, HIDDEN)
        matrix(at + "ffn_gate", INNER, HIDDEN)
        matrix(at + "ffn_up", INNER, HIDDEN)
        matrix(at + "ffn_down", HIDDEN, INNER)
        norm(at + "attn_norm")
        norm(at + "ffn_norm")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server."""
    folder = tmp_path_factory.mktemp("llamacpp")
    write_model(folder / "tiny.gguf")
    port = free_port()
    command = [sys.executable, "-m", "llama_cpp.server", f"--model={folder}/tiny.gguf"]
    command += ["--host=127.0.0.1", f"--port={port}", "--n_ctx=2048", "--model_alias=tiny"]
    command += ["--n_threads=1"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def events(url: str, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without what differs between two equal ones."""
    request = urllib.request.Request(
        url + path,
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = [part.strip() for part in answer.read().decode().split("\n") if part.strip()]
    assert found[-1] == "data: [DONE]", found[-1]
    parsed = [json.loads(event.removeprefix("data: ")) for event in found[:-1]]
    return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in parsed]


def test_answers_are_those_of_the_engine(engine: str) -> None:
    with router([engine]) as front:
        with urllib.request.urlopen(f"{front}/health", timeout=30) as answer:
            (seen,) = json.load(answer)["engines"]
        assert (seen["state"], seen["kind"], seen["models"]) == ("up", "openai", ["tiny"])
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            direct, through = post(engine, path, body), post(front, path, body)
            assert through["choices"] == direct["choices"]
            assert through["usage"] == direct["usage"]
            assert through["usage"]["completion_tokens"] > 1
            streamed = events(front, path, body)
            assert streamed == events(engine, path, body)
            assert len(streamed) > 2
