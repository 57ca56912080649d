"""Shapes read from a `config.json`, against the classes of the installed `transformers`."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DEFAULTS = ["gemma", "gemma2", "gemma3_text", "cohere", "cohere2"]
"""Classes whose files leave out what their defaults say."""

WEIGHTS = [
    *DEFAULTS,
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "solar_open",
]
"""Classes that are built, without memory, to count their parameters."""

ELSEWHERE = {
    "AXK1",
    "baichuan",
    "bailing_moe",
    "bailing_moe_v2",
    "internlm2",
    "kimi_k2",
    "mimo",
    "solar",
    "yi",
}
"""Their classes come with the checkpoints, or in vLLM."""

REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def cluster(config: dict[str, Any], folder: Path) -> str:
    """The cluster's values for a model of `config`: memory of its weights, blocks, context."""
    path = folder / "config.json"
    path.write_text(json.dumps(config, default=str))
    sets = [f"--set=model.config={path}", "--set=engine.timing.gpu=b300-sxm", "--print-config"]
    command = [os.environ["SLIPSTREAM_BIN"], "simulate", *sets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return "\n".join(line for line in lines if re.match("(num_gpu_blocks|max_model_len) =", line))


def whole(model_type: str) -> tuple[Any, dict[str, Any]]:
    config = transformers.AutoConfig.for_model(model_type)
    return config, config.to_dict() | {"model_type": model_type}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_file_that_leaves_defaults_out_is_the_file_with_them(
    model_type: str, tmp_path: Path
) -> None:
    _, full = whole(model_type)
    short = {name: full[name] for name in REQUIRED} | {"model_type": model_type}
    # Files of these models state them; only Gemma 3's do not.
    stated = ["num_key_value_heads", "sliding_window"]
    if model_type != "gemma3_text":
        stated += ["vocab_size", "max_position_embeddings"]
    short |= {name: full[name] for name in stated if full.get(name) is not None}
    assert "tie_word_embeddings" not in short and "layer_types" not in short
    assert cluster(short, tmp_path) == cluster(full, tmp_path)


@pytest.mark.parametrize("model_type", WEIGHTS)
def test_weights_are_those_of_the_class(model_type: str, tmp_path: Path) -> None:
    config, full = whole(model_type)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # Tied embeddings are one parameter.
    gigabytes = sum(parameter.numel() for parameter in model.parameters()) * 2 / 1e9
    found = re.search(r"- ([0-9.]+) GB of weights", cluster(full, tmp_path))
    assert found, full
    assert float(found[1]) == pytest.approx(gigabytes, rel=0.01, abs=0.06)


def test_every_known_type_is_one_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    source = Path(__file__).parents[3] / "crates/core/config/src/preset/class.rs"
    classes = source.read_text().partition("const REFUSED")[0]
    rows = re.findall(r"types: &\[(.*?)\]", classes, re.DOTALL)
    types = {name for row in rows for name in re.findall(r'"([A-Za-z0-9_]+)"', row)}
    assert len(types) > 50
    assert types - set(CONFIG_MAPPING_NAMES) == ELSEWHERE
