"""Real `vllm serve` on CPUs, and `slipstream serve` in front of them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 128, 256, 2, 4, 2, 32
START_S = 900
"""An engine answers within this time, also on a busy machine."""


def slipstream() -> str:
    return os.environ["SLIPSTREAM_BIN"]


def make_model(folder: Path, *, vocabulary: int | None = None) -> Path:
    """Write a small Llama with random weights; returns its folder.

    It has the built-in tokenizer, or none and `vocabulary` tokens.
    """
    import torch
    from safetensors.torch import save_file  # other engines need neither

    folder.mkdir(parents=True, exist_ok=True)
    if vocabulary is None:
        subprocess.run(
            [slipstream(), "tokenizer", "export", folder], check=True, stdout=subprocess.DEVNULL
        )
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        ids = list(tokenizer["model"]["vocab"].values())
        ids += [added["id"] for added in tokenizer["added_tokens"]]
        vocabulary = (max(ids) + 64) // 64 * 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Any:
        # So large that attention is far from uniform: an answer depends on all of its prompt.
        return torch.randn(rows, columns, generator=drawn) * 2 / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, HIDDEN, generator=drawn),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(vocabulary, HIDDEN),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {f"{at}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    return folder


def free_port() -> int:
    """A port outside the range that systems choose from: an engine binds it half a minute later."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class Engine:
    """A `vllm serve`, in a process group of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        events: bool = False,
        development: bool = False,
        transfer: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        port: int | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        environment = os.environ | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if development:
            # It then reports its limits.
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        environment |= variables or {}
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(model),
            f"--port={self.port}",
            "--host=127.0.0.1",
            "--served-model-name=tiny",
            "--enforce-eager",
            "--dtype=float32",
            "--block-size=32",
            "--max-model-len=2048",
            "--max-num-seqs=16",
            "--num-gpu-blocks-override=512",
            *flags,
        ]
        if events:
            ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
            told = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
            told |= {name: f"tcp://*:{port}" for name, port in ports.items()}
            command += [f"--kv-events-config={json.dumps(told)}", "--enable-prompt-tokens-details"]
        if transfer is not None:
            command.append(f"--kv-transfer-config={json.dumps(transfer)}")
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )

    def kill(self) -> None:
        """`kill -9` of the server and the processes that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def await_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"no answer in {START_S} s: {self.log.read_text()[-4000:]}")


@contextmanager
def ready(engines: list[Engine]) -> Iterator[None]:
    """Wait until all engines answer; they are killed at the end."""
    try:
        for engine in engines:
            engine.await_ready()
        yield
    finally:
        for engine in engines:
            engine.kill()


@contextmanager
def router(urls: list[str], *flags: str, prefill: list[str] | None = None) -> Iterator[str]:
    """`slipstream serve` in front of `urls`; yields its address. `prefill` compute prompts."""
    engines = [f"--engine={url}" for url in urls]
    if prefill is not None:
        pools = {"answers": (urls, "decode"), "prompts": (prefill, "prefill")}
        engines = [
            f"--set=pool.{name}.{key}={json.dumps(value)}"
            for name, (some, role) in pools.items()
            for key, value in (("engines", some), ("role", role))
        ]
    process = subprocess.Popen(
        [slipstream(), "serve", "--listen=127.0.0.1:0", *engines, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        yield line.removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(timeout=60)


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read()
        return dict(json.loads(text)) if text else {}


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of the series of `name` with `labels`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.split("{")[0].split(" ")[0] == name and all(label in line for label in wanted)
    ]
    assert values, f"no series of {name}"
    return sum(values)
