"""Whose blocks mean the same: by what a model contains, and not by its name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import BLOCK, Rig
from safetensors.torch import save_file
from slipstream.options import OptionError, Options, read_options
from slipstream.vllm import SlipstreamConnector, content
from slipstream.vllm.content import content_of, is_private
from slipstream.vllm.open import other_folders
from test_transfers import OURS, settle, wait_saved
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.engine.core import EngineCore

CONFIG = {"model_type": "llama", "hidden_size": 64, "rope_theta": 10000.0}


def model_folder(folder: Path, seed: int = 7) -> Path:
    folder.mkdir(exist_ok=True)
    drawn = torch.Generator().manual_seed(seed)
    tensors = {"a": torch.randn(300, 64, generator=drawn), "b": torch.ones(64)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def vllm_config(folder: Path | str, **changes: Any) -> Any:
    """As much of vLLM's configuration as decides what a model is."""
    model = {
        "model": str(folder),
        "revision": None,
        "tokenizer": str(folder),
        "tokenizer_revision": None,
        "skip_tokenizer_init": False,
        "trust_remote_code": False,
        "quantization": None,
        "hf_overrides": {},
        "hf_config": SimpleNamespace(),
    }
    load = {"load_format": "auto", "download_dir": None}
    config = {"speculative_config": None, "lora_config": None, "cache_config": SimpleNamespace()}
    for name, value in changes.items():
        next(part for part in (model, load, config) if name in part)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model), load_config=SimpleNamespace(**load), **config
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.mark.parametrize("weights", ["full", "sampled"])
def test_weights_are_what_their_files_contain(tmp_path: Path, model: Path, weights: str) -> None:
    options = Options(weights=weights)

    def of(folder: Path, **changes: Any) -> tuple[str, str]:
        found = content_of(vllm_config(folder, **changes), options)
        assert found.reasons == []
        return found.weights, found.config

    before = of(model)
    assert before[0].startswith(f"{weights} ")
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert of(copy) == before, "the same weights in another place"
    # What does not decide what is computed.
    (copy / "config.json").write_text(
        json.dumps(CONFIG | {"transformers_version": "9"}, sort_keys=True, indent=1)
    )
    (copy / "generation_config.json").write_text("{}")
    (copy / "training_args.bin").write_text("x")
    assert of(copy) == before
    # What does.
    (copy / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    assert of(copy)[0] != before[0]
    (copy / "config.json").write_text(json.dumps(CONFIG))
    assert of(copy) == before
    model_folder(copy, seed=8)
    assert of(copy)[0] != before[0]
    (model / "tokenizer.json").write_text("{}")
    assert of(model) != before and of(model)[0] == before[0]
    assert of(model, skip_tokenizer_init=True)[1] != of(model)[1]
    assert of(model, quantization="fp8")[1] != of(model)[1]
    assert of(model, hf_overrides={"rope_theta": 1.0})[1] != of(model)[1]
    draft = SimpleNamespace(method="draft_model", draft_model_config=vllm_config(copy).model_config)
    assert of(model, speculative_config=draft)[0] != of(model)[0]


def test_only_files_that_vllm_loads_count(model: Path) -> None:
    def of(**changes: Any) -> str:
        return content_of(vllm_config(model, **changes), Options()).weights

    before = of()
    (model / "pytorch_model.bin").write_text("other weights")
    assert of() == before
    (model / "extra.safetensors").write_text("more")
    assert of() != before
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of() == before, "the index does not name it"
    assert of(load_format="npcache") != before
    (model / "consolidated.safetensors").write_text("mistral's form")
    assert of() != before and of(load_format="safetensors") == before


def test_one_row_of_an_embedding_is_seen_by_the_full_digest(tmp_path: Path) -> None:
    """A fine-tune of new tokens alone."""
    folder, tensors = tmp_path / "m", {"embed": torch.zeros(4096, 512)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    before = content_of(vllm_config(folder), Options()).weights
    tensors["embed"][777, 5] = 1.0
    save_file(tensors, folder / "model.safetensors")
    assert content_of(vllm_config(folder), Options()).weights != before


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "nobody/no-such-model"}, "nobody/no-such-model were not found"),
        ({"load_format": "dummy"}, "load format dummy are not stored in files"),
        ({"load_format": "pt"}, "has no weights of load format pt"),
        ({"lora_config": SimpleNamespace()}, "LoRA adapter"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, "scales of the KV cache"),
        ({"hf_config": SimpleNamespace(text_model_id="other/model")}, "text_model_id"),
    ],
)
def test_what_cannot_be_identified_is_nobody_elses(
    model: Path, changes: dict[str, Any], text: str
) -> None:
    config = vllm_config(model, **changes)
    first, second = (content_of(config, Options()) for _ in range(2))
    assert first.weights != second.weights, "not even a later start's"
    assert is_private({"weights": first.weights})
    assert text in "; ".join(first.reasons)
    # Unless the user vouches for it.
    vouched = [content_of(config, Options(model_id="m")) for _ in range(2)]
    assert vouched[0].weights == vouched[1].weights and vouched[0].model == "m"
    assert not is_private({"weights": vouched[0].weights})


def test_a_name_does_not_hide_other_weights(model: Path) -> None:
    before = content_of(vllm_config(model), Options(model_id="m"))
    model_folder(model, seed=8)
    assert content_of(vllm_config(model), Options(model_id="m")) != before
    # Unless that is what was asked for.
    trusting = read_options({"model_id": "m", "weights": "model_id"})
    trusted = content_of(vllm_config(model), trusting)
    model_folder(model, seed=9)
    assert content_of(vllm_config(model), trusting) == trusted
    with pytest.raises(OptionError, match="`weights` is 'model_id', which needs a `model_id`"):
        read_options({"weights": "model_id"})
    with pytest.raises(OptionError, match="takes one of full, sampled, model_id"):
        read_options({"weights": "trust"})


def worker(rig: Rig) -> SlipstreamConnector:
    """One more worker half, with what the engine's configuration says now."""
    made = SlipstreamConnector(rig.config, KVConnectorRole.WORKER, rig.kv_cache_config)
    made.register_kv_caches(rig.worker.caches)
    return made


def test_an_engine_of_unknown_weights_neither_shares_nor_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"host_bytes": 1 << 22, "disk_dir": f"{tmp_path}/d", "listen": [f"unix://{tmp_path}/s"]}
    rig = Rig(num_blocks=64, extra=extra, **OURS)
    prompt = rig.tokens(BLOCK * 20 + 3)
    rig.add(prompt, max_tokens=1)
    rig.drain()
    wait_saved(rig)
    settle(rig)
    rig.scheduler.reset_prefix_cache()
    rig.add(prompt, max_tokens=1)
    rig.drain()
    assert rig.worker.computed_blocks == 20, "host memory has them"
    assert caplog.text.count("`disk_dir`, `listen` are not used") == 1
    assert "set `model_id`" in caplog.text
    rig.close()
    assert not (tmp_path / "d").exists() and not (tmp_path / "s").exists()


def test_files_are_read_only_where_blocks_are_shared(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    digest = content.digest_files
    monkeypatch.setattr(
        content, "digest_files", lambda *a, **k: (read.append(a), digest(*a, **k))[1]
    )
    content.content_if_shared(vllm_config(model), Options(host_bytes=1 << 30))
    assert not read
    content.content_if_shared(vllm_config(model), Options(disk_dir="/d"))
    assert len(read) == 1


def test_engines_with_other_weights_of_one_name_have_other_folders(
    tmp_path: Path, model: Path
) -> None:
    rig = Rig(num_blocks=64, extra={"host_bytes": 1 << 22, "model_id": "m"}, **OURS)
    rig.config.kv_transfer_config.kv_connector_extra_config["disk_dir"] = str(tmp_path / "d")
    monkeypatched = rig.config.model_config.model
    rig.config.model_config.model = str(model)
    try:
        first = worker(rig)
        model_folder(model, seed=8)
        second = worker(rig)
        differing = {
            name for name in first.identity if first.identity[name] != second.identity[name]
        }
        assert differing == {"weights"}
        assert len([path for path in (tmp_path / "d").iterdir() if path.is_dir()]) == 2
        first.shutdown()
        second.shutdown()
    finally:
        rig.config.model_config.model = monkeypatched
    rig.close()


def test_each_rank_tidies_up_after_its_part_of_the_ranks(tmp_path: Path) -> None:
    digests = ["0" * 16, "1" * 16, "2" * 16]
    names = [f"{digests[0]}-0", f"{digests[0]}-1", f"{digests[1]}-3", digests[2]]
    for name in (*names, "not-ours"):
        (tmp_path / name).mkdir()

    def found(own: str, rank: int, ranks: int) -> list[str]:
        return [Path(path).name for path in other_folders(str(tmp_path / own), rank, ranks)]

    own = f"{digests[0]}-0"
    assert found(own, 0, 1) == sorted(set(names) - {own})
    assert found(own, 0, 2) == [digests[2]]
    assert found(f"{digests[0]}-1", 1, 2) == [f"{digests[1]}-3"]


class FakeEngine:
    """What `EngineCore`'s methods see of their engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.model_executor = self

    def collective_rpc(self, method: str, *_: Any) -> None:
        self.calls.append(method)
        if method == "fails":
            raise RuntimeError(method)

    def pause_scheduler(self, **_: Any) -> None:
        self.calls.append("pause")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def add_lora(self, request: Any) -> None:
        self.calls.append("add_lora")


def test_changes_of_the_weights_of_a_running_engine_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "d"
    extra = {"host_bytes": 1 << 22, "model_id": "m", "disk_dir": str(disk)}
    rig = Rig(num_blocks=64, extra=extra, **OURS)
    prompt = rig.tokens(BLOCK * 20 + 3)

    def run() -> int:
        """Blocks that were computed of the prompt."""
        assert rig.scheduler.reset_prefix_cache()
        before = rig.worker.computed_blocks
        rig.add(prompt, max_tokens=1)
        rig.drain()
        wait_saved(rig)
        settle(rig)
        return int(rig.worker.computed_blocks - before)

    assert run() == 20 and run() == 0
    engine: Any = FakeEngine()
    call = EngineCore.collective_rpc
    for harmless in ("profile", "init_weight_transfer_engine", "compute_weight_checksums"):
        call(engine, harmless)
    EngineCore.sleep(engine, 1)
    assert run() == 0
    while len(list(disk.glob("*/blocks/*.kv"))) < 20:
        rig.step()
    for change in (
        lambda: call(engine, "update_weights", None, (), {"update_info": {}}),
        lambda: call(engine, "load_new_weights_of_my_framework"),
        lambda: call(engine, lambda worker: worker),
        lambda: EngineCore.sleep(engine, level=2),
    ):
        change()
        assert run() == 20, "nothing of before is used"
        assert run() == 0, "host memory goes on"
    with pytest.raises(RuntimeError, match="fails"):
        call(engine, "fails")
    assert run() == 20, "half an update is one"
    assert caplog.text.count("may have changed the weights") == 1
    assert engine.calls[-1] == "fails"
    assert len(list(disk.glob("*/blocks/*.kv"))) == 20
    rig.close()
    # What the disk holds is of the weights of the start, for who has them.
    again = Rig(num_blocks=64, extra=extra, **OURS)
    again.add(again.tokens(BLOCK), max_tokens=1)
    again.drain()
    settle(again)
    assert len(again.connector.scheduler.stored[0]) >= 20
    again.close()


def test_an_adapter_that_changes_under_one_path_is_noticed(tmp_path: Path) -> None:
    rig = Rig(num_blocks=64, extra={"host_bytes": 1 << 22, "model_id": "m"}, **OURS)
    engine: Any = FakeEngine()
    seen: list[str] = []
    rig.connector.scheduler.reset = (  # type: ignore[method-assign]
        lambda **_: seen.append("reset")
    )

    def load(name: str, in_place: bool = False) -> int:
        request = SimpleNamespace(lora_name=name, lora_path=str(tmp_path), load_inplace=in_place)
        EngineCore.add_lora(engine, request)
        return len(seen)

    (tmp_path / "adapter_model.safetensors").write_text("a")
    assert load("one") == 0 and load("one") == 0 and load("two") == 0
    assert load("one", in_place=True) == 1
    (tmp_path / "adapter_model.safetensors").write_text("other")
    assert load("one") == 2 and load("one") == 2
    rig.close()
