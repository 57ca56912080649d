"""The engine model's steps against those of vLLM's own schedulers.

Random workloads go through vLLM's `Scheduler` and `AsyncScheduler`. Each step is written down:
which requests were scheduled, in which order, with how many tokens computed before and now, which
were preempted, which finished and how, and the state of queues and blocks after it. The file with
all of that is kept: the engine replays it in `cargo test`
(`vllm::steps_are_those_of_vllms_scheduler`), where no vLLM is needed. Other
files are of pipelines, of LoRA and of images. The test here checks that the vLLM that is installed
still does what the files say; `SLIPSTREAM_WRITE_STEPS=1` writes them anew.

A step's text has five parts, separated by `|`:

- the requests scheduled: those of the step that begins, and with `AsyncScheduler` after a `;` those
  of the step after it. `ID` alone computes one token behind those of its last step, `ID:BEFORE+NOW`
  anything else. Of two plans, the first lists only requests that the second did not preempt. With a
  pipeline, those of each step that is scheduled until the oldest one's tokens are awaited;
- the requests preempted;
- the requests that ended: id, `S` (stop) or `L` (length), output tokens;
- running and waiting requests, free blocks, distinct cached blocks; with images room for their
  encoded tokens, with that of images that no request needs, and the images and tokens encoded;
- the order of both queues, the blocks of each running request, and the events of the KV cache: of
  each hash its number in order of appearance and that of its parent (`+3<2`), or its removal
  (`-3`). Kept as a checksum (FNV-1a), in whole with `STEPS_FULL=1`.

`STEPS_SEED` and `STEPS_COUNT` choose other workloads than those of the file, `STEPS_SIZE` how many
times the requests, `STEPS_VARIANT` what engines have (`VARIANTS`), and `STEPS_OUT` where they are
written: `SLIPSTREAM_STEPS=FILE cargo test -p slipstream-engine vllm` replays them.
"""

import functools
import json
import os
import random
import tempfile
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import MODEL
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

KEPT = Path(__file__).parents[3] / "crates/model/engine/tests/it/vllm_steps.jsonl"
"""A workload per line, with what vLLM did."""

KEPT_PIPELINES = KEPT.with_name("vllm_pipeline_steps.jsonl")
"""The same, of layers on several stages."""

KEPT_LORA = KEPT.with_name("vllm_lora_steps.jsonl")
"""The same, with a limit of LoRA adapters per step."""

KEPT_IMAGES = KEPT.with_name("vllm_image_steps.jsonl")
"""The same, of prompts with images, which an encoder computes."""

KEPT_DRAFTS = KEPT.with_name("vllm_draft_steps.jsonl")
"""The same, of steps that verify drafts."""

KEPT_MIXED = KEPT.with_name("vllm_mixed_steps.jsonl")
"""The same, with a limit of LoRA adapters beside images, stages or drafts."""

VARIANTS = {
    "plain": KEPT,
    "pipelines": KEPT_PIPELINES,
    "lora": KEPT_LORA,
    "images": KEPT_IMAGES,
    "drafts": KEPT_DRAFTS,
    "mixed": KEPT_MIXED,
}
"""What an engine has, and the file of workloads."""

SEED, COUNT = 7, 44
"""Of the workloads in each file."""

WORD, EOS = 1000, 7
"""The one word of every answer, so that prompts can repeat answers, and the token that ends one."""

FAMILIES = (
    "plain",
    "shared",
    "tight",
    "priority",
    "storm",
    "ends",
    "whole",
    "uncached",
    "same",
    "long",
    "eager",
)

IMAGE, APART = 100_000_000, 100_000
"""The first token of image 0, and between those of two images."""

Run = list[int]
"""Tokens of a prompt: the first, how many, and how much each is above the one before."""


def spell(runs: list[Run]) -> list[int]:
    """Write out the tokens of a prompt."""
    return [first + i * step for first, count, step in runs for i in range(count)]


def images_of(runs: list[Run]) -> list[list[int]]:
    """Find the images of a prompt: first token, number of tokens, and id."""
    images, offset = [], 0
    for first, count, _ in runs:
        if first >= IMAGE:
            images.append([offset, count, (first - IMAGE) // APART])
        offset += count
    return images


@functools.cache
def model_of(max_model_len: int) -> ModelConfig:
    """Make a model of which only the lengths matter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        return ModelConfig(
            model=folder,
            tokenizer=None,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
        )


class Cache:
    """The events of the KV cache, with numbers for hashes, and without copies of a block."""

    def __init__(self) -> None:
        self._copies: Counter[Any] = Counter()
        self._numbers: dict[Any, int] = {}
        self._text: list[str] = []

    def publish(self, batch: Any) -> None:
        """Take events in, as the scheduler's publisher."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    self._copies[block] += 1
                    if self._copies[block] == 1:
                        number = self._numbers.setdefault(block, len(self._numbers))
                        above = "" if parent is None else self._numbers[parent]
                        self._text.append(f"+{number}<{above}")
                    parent = block
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    self._copies[block] -= 1
                    if self._copies[block] == 0:
                        self._text.append(f"-{self._numbers[block]}")
            else:
                raise TypeError(event)

    def take(self) -> str:
        """Return what happened since the last call."""
        text = " ".join(self._text)
        self._text.clear()
        return text


def lora_of(number: int) -> LoRARequest | None:
    """Make the LoRA adapter of this number; 0 is the model itself."""
    name = f"adapter-{number}"
    return LoRARequest(name, number, f"/{name}") if number else None


def checksum(text: str) -> str:
    """Hash a text with FNV-1a, 32 bits."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"#{value:08x}"


class Drafter:
    """What the scheduler asks of a `SpeculativeConfig`, which would load a model."""

    num_speculative_tokens_per_batch_size = None
    disable_eagle_block_drop = False
    max_num_new_slots_for_drafting = 0

    def __init__(self, tokens: int, has_blocks: bool) -> None:
        self.num_speculative_tokens = tokens
        self._has_blocks = has_blocks

    def uses_draft_model(self) -> bool:
        """Whether drafts take blocks of the cache in advance."""
        return self._has_blocks

    def use_eagle(self) -> bool:
        """Whether a prompt's hashes cover a token more, which is not modelled."""
        return False

    use_eagle_block_drop = needs_eagle_block_drop = use_dspark = use_dflash = use_eagle


class Engine:
    """One of vLLM's schedulers with nothing behind it, and what it did in each step."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.natural = config["natural"]
        self.is_async = config["async"]
        self.stages = config.get("stages")
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        init_none_hash(sha256_cbor)
        cache = CacheConfig(
            block_size=config["block_size"],
            enable_prefix_caching=config["caching"],
            prefix_caching_hash_algo="sha256_cbor",
        )
        # Block 0 is vLLM's null block, which is never allocated.
        cache.num_gpu_blocks = config["num_gpu_blocks"] + 1
        vllm = VllmConfig(
            model_config=model_of(config["max_model_len"]),
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=config["max_num_seqs"],
                max_num_active_seqs=config["max_num_active_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_num_scheduled_tokens=config["max_num_scheduled_tokens"],
                max_model_len=config["max_model_len"],
                is_encoder_decoder=False,
                enable_chunked_prefill=config["chunked"],
                long_prefill_token_threshold=config["long_prefill"],
                long_prefill_token_threshold_adaptive=config["adaptive"],
                scheduler_reserve_full_isl=config["reserve_full"],
                async_scheduling=config["async"],
                policy=config["policy"],
            ),
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        # The CPU's platform does not schedule asynchronously by itself.
        vllm.scheduler_config.async_scheduling = self.is_async
        if self.stages:
            # Not in the arguments, which asks for as many GPUs, and for kernels: the second model
            # runner is the one that schedules asynchronously with a pipeline.
            vllm.parallel_config.pipeline_parallel_size = self.stages
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(self.is_async))
        if "max_loras" in config:
            # Not in `VllmConfig(...)`, which asks whether the model has adapters.
            vllm.lora_config = LoRAConfig(max_loras=config["max_loras"])
        self.drafts = config.get("drafts")
        if self.drafts:
            drafted, _, has_blocks = self.drafts
            vllm.speculative_config = Drafter(drafted, has_blocks)
            # The second model runner leaves drafts out that no request can use.
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        self.depth = vllm.max_concurrent_batches
        size = config["block_size"]
        spec = FullAttentionSpec(block_size=size, num_kv_heads=4, head_size=16, dtype=torch.float16)
        layout = KVCacheConfig(
            num_blocks=cache.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["0"], spec)],
        )
        self._hasher = get_request_block_hasher(size, sha256_cbor)
        self.scheduler = (AsyncScheduler if config["async"] else Scheduler)(
            vllm_config=vllm,
            kv_cache_config=layout,
            structured_output_manager=StructuredOutputManager(vllm),
            block_size=size,
            hash_block_size=size,
            log_stats=False,
        )
        if self.drafts:
            # Drafts whose length depends on the batch, and is the same for all. With a fixed one
            # vLLM pads a waiting request that has one token to compute by a draft that is
            # rejected, which is not modelled.
            lookup = [self.drafts[0]] * (config["max_num_seqs"] + 1)
            self.scheduler.dynamic_sd_lookup = lookup
        self.encoder = config.get("encoder")
        self._encoded = [0, 0]
        if self.encoder:
            # As the scheduler of a model that takes images has them.
            budget, room, whole = self.encoder
            self.scheduler.max_num_encoder_input_tokens = budget
            self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=room)
            self.scheduler.scheduler_config.disable_chunked_mm_input = whole
        self._events = Cache()
        self.scheduler.kv_event_publisher = self._events
        self._queue: deque[tuple[Any, set[str]]] = deque()
        self._last: dict[str, int] = {}
        self._arrivals = 0

    def add(self, request: dict[str, Any]) -> None:
        """Let a request arrive."""
        params = SamplingParams(
            max_tokens=request["max_tokens"],
            min_tokens=request["min_tokens"],
            ignore_eos=request["ignore_eos"],
        )
        params.update_from_generation_config({}, eos_token_id=EOS)
        self._arrivals += 1
        made = Request(
            str(request["id"]),
            spell(request["prompt"]),
            params,
            None,
            # Ties of priority are broken by time of arrival.
            arrival_time=float(self._arrivals),
            priority=request["priority"],
            lora_request=lora_of(request.get("adapter", 0)),
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=f"image-{image}",
                    mm_position=PlaceholderRange(offset=offset, length=length),
                )
                for offset, length, image in request.get("images", [])
            ],
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(made)

    def abort(self, name: int) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(str(name), RequestStatus.FINISHED_ABORTED)

    def words(self, request: Any, drafted: int) -> list[int]:
        """Choose the next tokens of an answer, some of which were drafted."""
        accepted = min(drafted, self.drafts[1]) if self.drafts else 0
        return [self.word(request, further) for further in range(accepted + 1)]

    def word(self, request: Any, further: int) -> int:
        """Choose a token of an answer, as a sampler with logits would."""
        outputs = request.num_output_tokens + 1 + further
        ends = outputs > request.sampling_params.min_tokens and outputs >= self.natural
        return EOS if ends and not request.sampling_params.ignore_eos else WORD

    def step(self, abort: int | None = None) -> str | None:
        """Run a step, in whose middle a request may be aborted; what happened, or nothing.

        As `EngineCore.step` does, and with asynchronous scheduling or a pipeline
        `step_with_batch_queue`: a step is scheduled while there are fewer than `depth`, then the
        oldest one's tokens arrive.
        """
        plans: list[list[tuple[str, int, int]]] = []
        preempted: set[str] = set()
        ended: list[str] = []
        while True:
            if self.scheduler.has_requests():
                plan = self.scheduler.schedule()
                preempted |= plan.preempted_req_ids or set()
                for name, inputs in plan.scheduled_encoder_inputs.items():
                    request = self.scheduler.requests[name]
                    tokens = (request.get_num_encoder_embeds(i) for i in inputs)
                    self._encoded[0] += len(inputs)
                    self._encoded[1] += sum(tokens)
                requests = self.scheduler.requests
                counts = plan.num_scheduled_tokens
                # The scheduler counts a step's tokens as computed when it has planned it.
                ends = {name: requests[name].num_computed_tokens for name in counts}
                if self.stages:
                    again = plan.preempted_req_ids or set()
                    plans = [[part for part in old if part[0] not in again] for old in plans]
                plans.append([(name, ends[name] - n, n) for name, n in counts.items()])
                sampled = {name for name in counts if not requests[name].is_prefill_chunk}
                self._queue.appendleft((plan, sampled))
                if len(self._queue) < self.depth and (counts or self.scheduler.has_requests()):
                    continue
            elif not self._queue:
                assert not preempted, "a preempted request left the step empty"
                return None
            plan, sampled = self._queue.pop()
            if abort is not None and plan.num_scheduled_tokens:
                self.abort(abort)
            ended += self._finish(plan, sampled)
            if plan.num_scheduled_tokens:
                break
        return "|".join(
            (
                self._scheduled(plans, set() if self.stages else preempted),
                " ".join(map(str, sorted(int(name) for name in preempted))),
                " ".join(ended),
                *self._state(),
            )
        )

    def _scheduled(self, plans: list[list[tuple[str, int, int]]], preempted: set[str]) -> str:
        texts = []
        for place, plan in enumerate(plans):
            last = place + 1 == len(plans)
            names = []
            for name, before, count in plan:
                plain = count == 1 and self._last.get(name) == before
                if last or name not in preempted:
                    names.append(name if plain else f"{name}:{before}+{count}")
                    self._last[name] = before + count
            if plan:
                texts.append(" ".join(names))
        return ";".join(texts)

    def _finish(self, plan: Any, sampled: set[str]) -> list[str]:
        """Apply the tokens of a step; the requests that they ended."""
        requests = self.scheduler.requests
        names = list(plan.num_scheduled_tokens)
        alive = {name: requests[name] for name in names if name in requests}

        def drafted(name: str) -> int:
            return len(plan.scheduled_spec_decode_tokens.get(name, ()))

        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                (self.words(alive[name], drafted(name)) if name in alive else [WORD])
                if name in sampled
                else []
                for name in names
            ],
        )
        ended = []
        for of_client in self.scheduler.update_from_output(plan, output).values():
            for each in of_client.outputs:
                if each.finish_reason is not None:
                    request = alive[each.request_id]
                    reason = {"stop": "S", "length": "L"}[str(each.finish_reason)]
                    ended.append(f"{each.request_id}:{reason}{request.num_output_tokens}")
        if self.drafts and not self.is_async:
            # As `EngineCore.post_step` does.
            drafts = [[WORD] * self.drafts[0] for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        return sorted(ended)

    def _state(self) -> tuple[str, str]:
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        numbers = [
            len(running),
            len(waiting),
            pool.get_num_free_blocks(),
            len(pool.cached_block_hash_to_block._cache),
        ]
        if self.encoder:
            encoder = self.scheduler.encoder_cache_manager
            numbers += [encoder.num_free_slots, encoder.num_freeable_slots, *self._encoded]
        blocks = ((r.request_id, len(manager.get_block_ids(r.request_id)[0])) for r in running)
        whole = ";".join(
            (
                " ".join(f"{name}/{count}" for name, count in blocks),
                " ".join(r.request_id for r in waiting),
                self._events.take(),
            )
        )
        return (
            " ".join(map(str, numbers)),
            whole if os.environ.get("STEPS_FULL") else checksum(whole),
        )


def workload(seed: int, index: int, times: int, variant: str) -> dict[str, Any]:
    """Make a workload and run it through vLLM."""
    rng = random.Random(seed * 1_000_003 + index)
    of_adapters = random.Random(index)
    of_images = random.Random(seed * 7_000_003 + index)
    family = FAMILIES[index % len(FAMILIES)]
    size = rng.choice([4, 8, 16, 16, 32, 64])
    by_priority = family in ("priority", "storm") or (
        family in ("ends", "same", "long", "eager") and rng.random() < 0.5
    )
    length = rng.choice([8, 12, 20]) * size
    # From a pool that one sequence fills up to one that is never full.
    shares = {"plain": 6.0, "tight": 1.2, "priority": 1.6, "storm": 1.2, "eager": 1.4}
    share = shares.get(family, 2.0)
    config: dict[str, Any] = {
        "block_size": size,
        "num_gpu_blocks": max(int(length / size * share), length // size),
        "max_num_seqs": rng.choice([3, 5, 8, 16]),
        "max_num_batched_tokens": rng.choice([32, 64, 200]),
        "max_model_len": length,
        "caching": family != "uncached",
        "chunked": family != "whole",
        "policy": "priority" if by_priority else "fcfs",
        "natural": rng.randrange(3, 40),
        "async": index // len(FAMILIES) % 2 == 1,
        "long_prefill": 0,
        "adaptive": False,
        "max_num_active_seqs": None,
        "max_num_scheduled_tokens": None,
        "reserve_full": family != "eager",
    }
    if family == "long" or (family in ("eager", "same") and rng.random() < 0.4):
        config["long_prefill"] = min(rng.choice([5, size, 2 * size, 40]), length)
        config["adaptive"] = rng.random() < 0.3
        config["chunked"] = rng.random() < 0.8
    if rng.random() < 0.2:
        config["max_num_active_seqs"] = rng.randrange(1, config["max_num_seqs"] + 1)
    if rng.random() < 0.2:
        config["max_num_scheduled_tokens"] = rng.choice([5, 20, 32])
    if not config["chunked"]:
        config["max_num_batched_tokens"] = length
        config["max_num_scheduled_tokens"] = None
    # Each family meets each of the three, with and without asynchronous scheduling.
    besides = ("images", "pipelines", "drafts")[index % 3] if variant == "mixed" else variant
    if besides == "pipelines":
        config["stages"] = 2 + index % 3
    if variant in ("lora", "mixed"):
        config["max_loras"] = 1 + index % 3
    if besides == "drafts":
        drafted = 1 + index % 5
        config["drafts"] = [drafted, index // 5 % (drafted + 1), index % 2 == 0]
    if besides == "images":
        # Of each image its size.
        sizes = [of_images.randrange(1, length // 5) for _ in range(6)]
        config["encoder"] = [
            int(max(sizes) * of_images.choice([1, 1.5, 4])),
            int(max(sizes) * of_images.choice([1, 1.5, 3, 6])),
            of_images.random() < 0.3,
        ]
        keys = ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill")
        if max(sizes) > min(config[key] for key in keys if config[key]):
            # vLLM refuses such models: their largest image would never run.
            config["encoder"][2] = False
    engine = Engine(config)
    live: list[int] = []
    talks: list[list[Run]] = []
    events: list[list[Any]] = []
    made, requests = 0, rng.randrange(10, 24) * times
    gap = rng.choice([0.15, 0.4, 0.8])
    idle = 0
    while idle < 2:
        while made < requests and rng.random() > gap:
            own: Run = [10_000 * (made + 1), rng.randrange(1, length // 3), 1]
            prompt: list[Run] = [own]
            if talks and rng.random() < 0.3:
                prompt = [*rng.choice(talks), own]
            elif rng.random() < 0.5:
                prompt = [[100 * rng.randrange(3), size * rng.randrange(1, 5), 1], own]
            if len(spell(prompt)) >= length:
                prompt = [own]
            if family == "same" and talks and rng.random() < 0.7:
                prompt = talks[-1][:-1]
            if besides == "images" and of_images.random() < 0.7:
                chosen = of_images.choices(range(6), k=of_images.randrange(1, 4))
                runs = [[IMAGE + APART * image, sizes[image], 1] for image in chosen]
                place = of_images.randrange(len(prompt) + 1)
                with_images = [*prompt[:place], *runs, *prompt[place:]]
                if len(spell(with_images)) < length:
                    prompt = with_images
            request = {
                "id": made,
                "prompt": prompt,
                "max_tokens": rng.choice([1, 4, 20, 40, length]),
                "min_tokens": 0,
                "ignore_eos": True,
                "priority": rng.randrange(-2, 3) if by_priority else 0,
            }
            if variant in ("lora", "mixed"):
                request["adapter"] = of_adapters.choice([0, 0, 1, 2, 3, 4, 5])
            if besides == "images":
                request["images"] = images_of(prompt)
            if family == "ends":
                request["ignore_eos"] = rng.random() < 0.3
                request["min_tokens"] = rng.choice([0, 0, 10])
                request["max_tokens"] = max(request["max_tokens"], request["min_tokens"])
            # What a later turn would repeat: some of the answer.
            talks.append([*prompt, [WORD, rng.randrange(1, 2 * size), 0]])
            engine.add(request)
            events.append(["add", request])
            live.append(made)
            made += 1
        unfinished = [n for n in live if str(n) in engine.scheduler.requests]
        abort = rng.choice(unfinished) if unfinished and rng.random() < 0.02 else None
        if abort is not None and rng.random() < 0.5:
            engine.abort(abort)
            events.append(["abort", abort])
            abort = None
        happened = engine.step(abort)
        if happened is None:
            assert abort is None or not engine.scheduler.has_unfinished_requests()
            idle = idle + 1 if made == requests else 0
            continue
        step = ["step", happened] if abort is None else ["step_abort", [happened, abort]]
        events.append(step)
    assert not engine.scheduler.has_unfinished_requests()
    return {"name": f"{family}-{seed}-{index}", **config, "events": events}


def file_of(seed: int, count: int, times: int = 1, variant: str = "plain") -> str:
    """Run workloads; what they did, a line each."""
    lines = (workload(seed, index, times, variant) for index in range(count))
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_steps_kept_are_those_of_this_vllm(variant: str) -> None:
    file = VARIANTS[variant]
    text = file_of(SEED, COUNT, variant=variant)
    if os.environ.get("SLIPSTREAM_WRITE_STEPS"):
        file.write_text(text)
    for made, kept in zip(text.splitlines(), file.read_text().splitlines(), strict=True):
        name = json.loads(made)["name"]
        assert json.loads(made) == json.loads(kept), f"{name} is scheduled otherwise"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_workloads_kept_are_hard_enough(variant: str) -> None:
    preempted = aborted = 0
    for line in VARIANTS[variant].read_text().splitlines():
        for kind, what in json.loads(line)["events"]:
            preempted += kind == "step" and bool(what.split("|")[1])
            aborted += kind in ("abort", "step_abort")
    assert preempted >= 100, preempted
    assert aborted >= 20, aborted


@pytest.mark.skipif("STEPS_OUT" not in os.environ, reason="STEPS_OUT names no file")
def test_other_workloads_are_written() -> None:
    defaults = {"SEED": 1, "COUNT": 100, "SIZE": 2}
    chosen = (int(os.environ.get(f"STEPS_{name}", value)) for name, value in defaults.items())
    text = file_of(*chosen, variant=os.environ.get("STEPS_VARIANT", "plain"))
    Path(os.environ["STEPS_OUT"]).write_text(text)
