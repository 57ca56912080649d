"""A model that computes: its answers do not depend on stored blocks of other weights."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BLOCK = 32
"""Tokens per block; vLLM's attention on CPUs takes multiples of 32."""

PROMPT_BLOCKS = 6
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 128, 256, 2, 4, 2, 32, 512
END_S = 1800
"""Maximum time for all engines of a test, also on a busy machine."""


def make_model(folder: Path, seed: int) -> Path:
    """Write a small Llama with random weights; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    drawn = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # So large that attention is far from uniform, and a block's content affects the answer.
        return torch.randn(rows, columns, generator=drawn) * 2 / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=drawn),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
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


def prompts() -> list[list[int]]:
    drawn = random.Random(5)
    return [drawn.choices(range(3, VOCABULARY), k=PROMPT_BLOCKS * BLOCK + 5) for _ in range(6)]


@dataclass
class Life:
    """One life of an engine: the source of its weights, and the place they are copied to first."""

    weights: Path
    model: Path
    connector: dict[str, Any] | None = None
    reload: Path | None = None


def run(folder: Path, *lives: Life) -> tuple[list[list[dict[str, Any]]], str]:
    """Run engines one after the other; returns what each answered in each pass, and the log."""
    plan, out = folder / "plan.json", folder / "out.json"
    told = {"prompts": prompts(), "lives": [asdict(life) for life in lives]}
    plan.write_text(json.dumps(told, default=str))
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "2",
    }
    script = Path(__file__).with_name("engine.py")
    done = subprocess.run(
        [sys.executable, script, plan, out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return json.loads(out.read_text()), log


def test_weights_that_change_under_one_path_are_another_model(tmp_path: Path) -> None:
    seven, eight = make_model(tmp_path / "seven", 7), make_model(tmp_path / "eight", 8)
    model, disk = tmp_path / "model", tmp_path / "disk"
    connector = {"host_bytes": 1 << 26, "disk_dir": str(disk)}
    passes, _ = run(
        tmp_path,
        Life(seven, model, connector),
        Life(seven, model, connector),
        # The same files in another place are the same model.
        Life(seven, tmp_path / "copy", connector),
        # Other weights in the first place; alone, and with what the first ones have left.
        Life(eight, model),
        Life(eight, model, connector),
    )
    first, again, copied, own, changed = (only for (only,) in passes)
    blocks = PROMPT_BLOCKS * len(prompts())
    assert first["cached"] == 0
    assert again["tokens"] == copied["tokens"] == first["tokens"]
    # A clean end has written all stored blocks.
    assert again["cached"] == copied["cached"] == blocks * BLOCK
    assert own["tokens"] != first["tokens"]
    assert changed["cached"] == 0
    assert changed["tokens"] == own["tokens"]
    folders = [path for path in disk.iterdir() if path.is_dir()]
    assert len(folders) == 2
    assert all(len(list(folder.glob("blocks/*.kv"))) >= blocks for folder in folders)


def test_weights_that_change_in_a_running_engine_leave_the_disk_to_the_old_ones(
    tmp_path: Path,
) -> None:
    seven, eight = make_model(tmp_path / "seven", 7), make_model(tmp_path / "eight", 8)
    model, disk = tmp_path / "model", tmp_path / "disk"
    connector = {"host_bytes": 1 << 26, "disk_dir": str(disk)}
    ((own,), (before, after, last), (again,)), log = run(
        tmp_path,
        Life(eight, model),
        Life(seven, model, connector, reload=eight),
        Life(seven, model, connector),
    )
    assert "may have changed the weights" in log
    assert after["cached"] == 0 and after["tokens"] == own["tokens"] != before["tokens"]
    # Host memory continues, with the new weights.
    assert last["cached"] > 0 and last["tokens"] == own["tokens"]
    # Blocks on disk are of the old weights only.
    assert again["tokens"] == before["tokens"]
