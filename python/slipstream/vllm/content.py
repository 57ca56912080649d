"""Identifies a model by its content, on this host and on others: equal content, equal blocks.

A name or a path does not identify the weights behind it. Their content does: the digest of the
files that vLLM has loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream._native import digest_files
from slipstream.options import SHARING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

    from slipstream.options import Options

logger = logging.getLogger("slipstream.vllm")

UNKNOWN = "unknown ("
"""Prefix of `Content.weights` if the weights are unidentified."""

VOUCHED = "as model_id says"
"""Value of `Content.weights` if only the user's `model_id` identifies them."""

SAFETENSORS = ("*.safetensors",)
MISTRAL = ("consolidated*.safetensors",)
TORCH = ("*.bin", "*.pt")
PATTERNS = {
    "auto": MISTRAL + SAFETENSORS + TORCH,
    "hf": SAFETENSORS + TORCH,
    "safetensors": SAFETENSORS,
    "fastsafetensors": SAFETENSORS,
    "instanttensor": SAFETENSORS,
    "runai_streamer": SAFETENSORS,
    "runai_streamer_sharded": SAFETENSORS,
    "sharded_state": SAFETENSORS,
    "bitsandbytes": SAFETENSORS + TORCH,
    "mistral": MISTRAL,
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""Files of weights by `--load-format`: those of the first pattern with a match.

Source: vLLM 0.33, `DefaultModelLoader._prepare_weights`.
"""

NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
"""Source: vLLM 0.33, `filter_files_not_needed_for_inference`."""

INDICES = ("consolidated.safetensors.index.json", "model.safetensors.index.json")
"""Indexes that list the files of a folder that are parts of the model."""

CONFIGS = (
    "config.json",
    "params.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that determine how the weights compute, and how images and sounds are preprocessed."""

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)

OF_THE_TOOL = {"_name_or_path", "transformers_version"}
"""Entries of a configuration that name the software that wrote it."""

REMEDY = "set `model_id` to a name that changes whenever they do"


class UnidentifiedError(Exception):
    """The weights cannot be identified; the text gives the reason."""


@dataclass(frozen=True)
class Content:
    """Inputs of the bytes of blocks besides their tokens and layout."""

    model: str
    """`model_id`."""
    weights: str
    config: str
    reasons: list[str] = field(default_factory=list)
    """Why the weights, or parts added to them, are unknown."""


def is_private(identity: dict[str, str]) -> bool:
    """Whether no other engine can verify that its blocks are equal: not even a later start."""
    return identity.get("weights", "").startswith(UNKNOWN)


def content_of(vllm_config: VllmConfig, options: Options) -> Content:
    """Identify the model that an engine serves.

    Reads its files: all bytes, unless they were read before and have not changed since, or samples
    of each tensor (`Options.weights`).
    """
    missing: list[str] = []
    parts: list[str] = []
    models = [vllm_config.model_config]
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    # Its layers are in the blocks, too. Without its own model it is part of the target's.
    if draft is not None and draft.model != vllm_config.model_config.model:
        models.append(draft)
    if options.weights != "model_id":
        for model in models:
            try:
                parts.append(digest_of(model, vllm_config.load_config, options.weights))
            except (UnidentifiedError, OSError) as error:
                missing.append(str(error))
    reasons = missing + doubts(vllm_config)
    config = digest_json(
        {
            "overrides": overrides_of(vllm_config.model_config),
            "quantization": str(vllm_config.model_config.quantization),
            "tokenizer": tokenizer_of(vllm_config.model_config, vllm_config.load_config),
            "draft": str(getattr(speculative, "method", None)),
        }
    )
    if reasons and not options.model_id:
        weights = f"{UNKNOWN}{uuid.uuid4()})"
    elif missing or not parts:
        weights = VOUCHED
    else:
        weights = f"{options.weights} {' '.join(parts)}"
    return Content(options.model_id, weights, config, reasons)


def unidentified(reason: str, options: Options) -> Content:
    """Return the content of a model of which only the `model_id` is known."""
    weights = VOUCHED if options.model_id else f"{UNKNOWN}{uuid.uuid4()})"
    return Content(options.model_id, weights, "", [reason])


def content_if_shared(vllm_config: VllmConfig, options: Options) -> Content:
    """Identify the model if blocks leave this life of the engine; otherwise read no file."""
    if any(getattr(options, name) for name in SHARING):
        return content_of(vllm_config, options)
    return unidentified("blocks stay in host memory", options)


def doubts(vllm_config: VllmConfig) -> list[str]:
    """Return the reasons for which blocks of the same weights and tokens may differ."""
    found = []
    if vllm_config.lora_config is not None:
        found.append("a LoRA adapter's name and path may come to mean another adapter")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        found.append("the scales of the KV cache depend on the first requests")
    config = vllm_config.model_config.hf_config
    for name in ("text_model_id", "audio_model_id", "timm_model_ids"):
        if getattr(config, name, None):
            found.append(f"the model loads weights of other models ({name})")
    return found


def digest_of(model: Any, load_config: Any, depth: str) -> str:
    """Return the digest of a model's files.

    Raises
    ------
    UnidentifiedError
        If its weights are in no local files, or these files are unknown.
    OSError
        If they cannot be read.
    """
    weights, configs = files_of(model, load_config)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "slipstream/weights")
    size, begun = sum(path.stat().st_size for path in weights), time.monotonic()
    digest = digest_files([str(path) for path in weights], full=depth == "full", cache=str(cache))
    if (spent := time.monotonic() - begun) > 1.0:
        logger.info(
            "slipstream: identified %.1f GB of weights in %.1f s (`weights`: %s)",
            size / 1e9,
            spent,
            depth,
        )
    text = hashlib.sha256(digest.encode())
    for path in configs:
        text.update(f"{path.name} {digest_config(path)}\n".encode())
    return text.hexdigest()[:32]


def files_of(model: Any, load_config: Any) -> tuple[list[Path], list[Path]]:
    """Return the files with a model's weights, and those that determine how they compute."""
    if stored := getattr(model, "model_weights", ""):
        raise UnidentifiedError(f"the weights are not on a local disk ({stored})")
    if os.path.isfile(model.model):
        file = Path(model.model)
        return [file], existing(file.parent, CONFIGS)
    load_format = str(load_config.load_format)
    if load_format not in PATTERNS:
        raise UnidentifiedError(f"weights of load format {load_format} are not stored in files")
    folder = folder_of(model.model, model.revision, load_config)
    for pattern in PATTERNS[load_format]:
        if weights := weight_files(folder, pattern):
            break
    else:
        raise UnidentifiedError(f"{folder} has no weights of load format {load_format}")
    configs = existing(folder, CONFIGS)
    if model.trust_remote_code:
        configs += sorted(folder.glob("*.py"))
    return weights, configs


def folder_of(model: str, revision: str | None, load_config: Any) -> Path:
    """Return the folder from which vLLM has loaded a model: a local one, or a hub's snapshot."""
    if os.path.isdir(model):
        return Path(model)
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnidentifiedError(f"{model} is a ModelScope name; serve its local folder")
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            model, revision=revision, cache_dir=load_config.download_dir, local_files_only=True
        )
    # Any error of the hub's library: without a folder there is nothing to read.
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise UnidentifiedError(f"the files of {model} were not found ({text})") from error
    return Path(folder)


def weight_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of weights that match."""
    files = [path for path in sorted(folder.glob(pattern)) if path.name not in NOT_WEIGHTS]
    if pattern.endswith(".safetensors"):
        # A folder may have the same weights in two formats; the index names one.
        index = folder / INDICES[0 if pattern in MISTRAL else 1]
        if index.is_file():
            named = set(json.loads(index.read_text())["weight_map"].values())
            files = [path for path in files if path.name in named] or files
    return files


def existing(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the existing files of these names."""
    return [folder / name for name in names if (folder / name).is_file()]


def digest_config(path: Path) -> str:
    """Return the digest of a file; of JSON, the digest of its value and not of its formatting."""
    data = path.read_bytes()
    if path.suffix == ".json":
        try:
            value = json.loads(data)
        except ValueError:
            return hashlib.sha256(data).hexdigest()
        if isinstance(value, dict):
            value = {name: entry for name, entry in value.items() if name not in OF_THE_TOOL}
        return digest_json(value)
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    """Return the digest of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def overrides_of(model: Any) -> Any:
    """Return the changes of a model's configuration by the command line."""
    overrides = model.hf_overrides
    if callable(overrides):
        # The effect of a callable shows in its result only.
        config = model.hf_config.to_dict()
        overrides = {name: value for name, value in config.items() if name not in OF_THE_TOOL}
    multimodal = getattr(model, "multimodal_config", None)
    return [overrides, getattr(multimodal, "mm_processor_kwargs", None)]


def tokenizer_of(model: Any, load_config: Any) -> str:
    """Return the digest of a model's tokenizer; its name, if its files are not found."""
    if model.skip_tokenizer_init or not model.tokenizer:
        return "none"
    try:
        folder = folder_of(str(model.tokenizer), model.tokenizer_revision, load_config)
        files = existing(folder, TOKENIZER)
        return digest_json([(path.name, digest_config(path)) for path in files])
    except (UnidentifiedError, OSError):
        return str(model.tokenizer)


def warn_if_private(content: Content, options: Options, identity: dict[str, str]) -> None:
    """Log the options that are without effect because the model is not identified."""
    if not is_private(identity):
        return
    given = [name for name in SHARING if getattr(options, name)]
    if given:
        logger.warning(
            "slipstream: %s not used, and blocks are kept in host memory only: weights cannot be "
            "identified, so another start or another engine could take them for its own (%s); %s",
            f"`{'`, `'.join(given)}` {'are' if len(given) > 1 else 'is'}",
            "; ".join(content.reasons),
            REMEDY,
        )
