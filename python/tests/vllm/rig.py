"""vLLM's real scheduler on a CPU: the engine's loop with generated tokens instead of a model."""

import copy
import json
import math
import random
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

BLOCK = 16
"""Tokens per block."""

# A tiny model's shape; it is never computed.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Shape:
    """A group of layers in vLLM's configuration."""

    kind: str = "full"
    reach: int = 0
    block: int = BLOCK
    heads: int = 4
    layers: int = 2
    padded: int | None = None
    """Bytes of a layer's block in the cache, if they are more than it uses."""

    def spec(self) -> KVCacheSpec:
        """The group as vLLM's configuration has it."""
        given: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": self.heads,
            "head_size": 16,
            "dtype": torch.float16,
            "page_size_padded": self.padded,
        }
        match self.kind:
            case "full":
                return FullAttentionSpec(**given)
            case "window":
                return SlidingWindowSpec(sliding_window=self.reach, **given)
            case "chunk":
                return ChunkedLocalAttentionSpec(attention_chunk_size=self.reach, **given)
        raise ValueError(self.kind)

    def first(self, tokens: int) -> int:
        """The first block that a token at this position reads."""
        match self.kind:
            case "window":
                return max(tokens - self.reach + 1, 0) // self.block
            case "chunk":
                return tokens // self.reach * self.reach // self.block
        return 0

    @property
    def page(self) -> int:
        """Bytes of a layer's block."""
        return 2 * self.block * self.heads * 16 * 2


class Rig:
    """One engine's scheduler, stepped by hand; with `worker`, also its connector's worker half.

    With a worker, the KV of a simulated model is a function of the tokens: a block's bytes repeat
    its hash. Before each step all blocks that a real model would read are compared with that.

    With `async_scheduling`, vLLM's default, each step is planned before the previous one has run:
    a step of the rig plans, then runs the earlier plan and takes its output.

    `shapes` are the groups of layers. With `tp` and `pp` there are several ranks, each with a
    worker half; ranks of one stage of `pp` have the same layers. The workers' outputs reach the
    scheduler through vLLM's own `KVOutputAggregator`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        connector: str | None = None,
        module: str | None = None,
        extra: dict[str, Any] | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        seed: int = 0,
        worker: bool = False,
        kv_events: bool = False,
        policy: str = "recompute",
        log_stats: bool = False,
        scheduling: str = "fcfs",
        async_scheduling: bool = False,
        long_prefill_tokens: int = 0,
        shapes: tuple[Shape, ...] = (Shape(),),
        tp: int = 1,
        pp: int = 1,
        role: str = "kv_both",
    ) -> None:
        self.shapes, self.tp, self.pp = shapes, tp, pp
        self.by_layer = bool({"layer_slices", "layer_load_blocks_max"} & (extra or {}).keys())
        self.rng = random.Random(seed)
        self._made = 0
        self.is_async = async_scheduling
        self._planned: tuple[Any, dict[str, Planned]] | None = None
        self.handed_over: dict[str, dict[str, Any] | None] = {}
        """`kv_transfer_params` of answers, by request."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(
                model=folder, tokenizer=None, skip_tokenizer_init=True, max_model_len=131072
            )
            blocks = [shape.block for shape in shapes]
            cache = CacheConfig(
                block_size=min(blocks),
                enable_prefix_caching=True,
                prefix_caching_hash_algo="sha256_cbor",
            )
            transfer = None
            if connector is not None:
                transfer = KVTransferConfig(
                    kv_connector=connector,
                    kv_connector_module_path=module,
                    kv_role=role,
                    kv_connector_extra_config=extra or {},
                    kv_load_failure_policy=policy,
                )
            self.config = VllmConfig(
                model_config=model,
                cache_config=cache,
                scheduler_config=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=131072,
                    is_encoder_decoder=False,
                    enable_chunked_prefill=True,
                    async_scheduling=async_scheduling,
                    policy=scheduling,
                    long_prefill_token_threshold=long_prefill_tokens,
                ),
                device_config=DeviceConfig("cpu"),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=tp,
                    pipeline_parallel_size=pp,
                    distributed_executor_backend="mp" if tp * pp > 1 else None,
                ),
                kv_transfer_config=transfer,
                kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
                if kv_events
                else None,
            )
        cache.num_gpu_blocks = num_blocks
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"{g}.{n}" for n in range(shape.layers)], shape.spec())
                for g, shape in enumerate(shapes)
            ],
        )
        # As in vLLM's `resolve_kv_cache_block_sizes`.
        self.hash_block, self.hit_block = math.gcd(*blocks), math.lcm(*blocks)
        self.kv_cache_config.hash_block_size = self.hash_block
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(self.hash_block, sha256_cbor)
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.hit_block,
            hash_block_size=self.hash_block,
            log_stats=log_stats,
        )
        self.workers = [Worker(self, rank) for rank in range(tp * pp)] if worker else []
        self.worker = self.workers[0] if worker else None
        if worker:
            # As in the start of EngineCore and the executor.
            told = {
                (each.rank // tp, each.rank % tp): each.connector.get_handshake_metadata()
                for each in self.workers
            }
            self.connector.set_xfer_handshake_metadata_pp_aware(told)
        if tp * pp > 1:
            self._aggregator = KVOutputAggregator.from_connector(self.connector, tp * pp)

    @property
    def pool(self) -> Any:
        """The engine's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def page(self) -> int:
        """Bytes of a layer's block in the first group."""
        return self.shapes[0].page

    @property
    def connector(self) -> Any:
        """The scheduler half of the connector."""
        return self.scheduler.connector

    def add(
        self,
        tokens: list[int],
        *,
        max_tokens: int,
        priority: int = 0,
        transfer: dict[str, Any] | None = None,
    ) -> str:
        """Let a request arrive; returns its id."""
        self._made += 1
        name = f"r{self._made}"
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
        )
        params.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(
            Request(name, tokens, params, None, priority=priority, block_hasher=self._hasher)
        )
        return name

    def tokens(self, count: int) -> list[int]:
        """Tokens that no other request has."""
        return self.rng.choices(range(1, 32000), k=count)

    def abort(self, name: str) -> None:
        """Abort a request, as a client that hangs up does."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def look(self, plan: Any) -> "dict[str, Planned]":
        """Record the scheduler's state of a plan's requests just after planning."""
        return {
            name: Planned(
                request := self.scheduler.requests[name],
                self.scheduler.kv_cache_manager.get_block_ids(name),
                # A step's tokens count as computed when it is planned.
                request.num_computed_tokens,
                not request.is_prefill_chunk,
            )
            for name in plan.num_scheduled_tokens
        }

    def output(
        self, plan: Any, connector_output: Any = None, planned: "dict[str, Planned] | None" = None
    ) -> ModelRunnerOutput:
        """Generate a model's output for the plan."""
        planned = planned if planned is not None else self.look(plan)
        return ModelRunnerOutput(
            req_ids=list(planned),
            req_id_to_index={name: i for i, name in enumerate(planned)},
            sampled_token_ids=[
                [self.rng.randrange(1, 32000)] if each.samples else [] for each in planned.values()
            ],
            kv_connector_output=connector_output,
        )

    def step(self) -> Any:
        """Run one step; returns its plan."""
        plan = self.scheduler.schedule()
        planned = self.look(plan)
        if self.is_async:
            before, self._planned = self._planned, (plan, planned)
            if before is not None:
                self._note(self.scheduler.update_from_output(before[0], self.output_of(*before)))
        else:
            self._note(self.scheduler.update_from_output(plan, self.output_of(plan, planned)))
        return plan

    def _note(self, outputs: Any) -> None:
        for each in outputs.values():
            for output in each.outputs:
                if output.finish_reason is not None:
                    self.handed_over[output.request_id] = output.kv_transfer_params

    def output_of(self, plan: Any, planned: "dict[str, Planned]") -> ModelRunnerOutput:
        """Run the workers; return their aggregated output, as the executor does."""
        output = self.output(plan, planned=planned)
        if len(self.workers) == 1:
            return replace(output, kv_connector_output=self.workers[0].run(plan, planned))
        if not self.workers:
            return output
        outputs = [
            replace(output, kv_connector_output=worker.run(plan, planned))
            for worker in self.workers
        ]
        # The last stage's first rank returns the model's output (`MultiprocExecutor.output_rank`).
        return self._aggregator.aggregate(outputs, self.tp * (self.pp - 1))

    def close(self) -> None:
        """End the connector's threads."""
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()

    def drain(self, steps_max: int = 10_000) -> None:
        """Step until no request is left.

        Raises
        ------
        RuntimeError
            If some are left after `steps_max` steps: the engine is stuck.
        """
        for _ in range(steps_max):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise RuntimeError(f"requests are left after {steps_max} steps")


@dataclass(frozen=True)
class Planned:
    """A request of a plan, as it was when the plan was made."""

    request: Request
    tables: tuple[list[int], ...]
    """Its block ids, by group."""
    end: int
    """Its tokens whose KV is there once the plan has run."""
    samples: bool


class Worker:
    """The worker half of one rank in vLLM's own hands, around a made-up model."""

    def __init__(self, rig: Rig, rank: int = 0) -> None:
        self.rig = rig
        self.rank = rank
        config = copy.copy(rig.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        # Each stage has its part of each group's layers; the last one may have none of a group.
        stage, kv_cache_config = rank // rig.tp, copy.copy(rig.kv_cache_config)
        kv_cache_config.kv_cache_groups = [
            KVCacheGroupSpec(group.layer_names[stage :: rig.pp], group.kv_cache_spec)
            for group in kv_cache_config.kv_cache_groups
        ]
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        # By group and layer; the layers of several groups share memory.
        self.layers: list[dict[str, torch.Tensor]] = []
        count, memory = kv_cache_config.num_blocks, {}
        for shape, group in zip(rig.shapes, kv_cache_config.kv_cache_groups, strict=True):
            size = shape.padded or shape.page
            self.layers.append({})
            for n, name in enumerate(group.layer_names):
                raw = memory.setdefault((n, size), torch.zeros((count, size), dtype=torch.uint8))
                pages = raw[:, : shape.page].view(torch.float16)
                # Keys and values, tokens, heads, head size.
                self.layers[-1][name] = pages.unflatten(1, (2, shape.block, shape.heads, 16))
        self.caches = {name: cache for layers in self.layers for name, cache in layers.items()}
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.active = ActiveKVConnector(config, self.caches)
        self.computed_blocks = 0
        """Of the first group."""
        self.lost_reads = 0
        """Reads of blocks that a load within the step has not filled: vLLM drops the output."""
        self.read_blocks = [0] * len(rig.shapes)
        """By group."""

    def run(self, plan: Any, planned: dict[str, Planned] | None = None) -> Any:
        """Do what a worker does in a step; returns what it tells the scheduler's connector."""
        planned = planned if planned is not None else self.rig.look(plan)
        self.active.pre_forward(plan)
        if self.rig.by_layer:
            self.forward_by_layer(plan, planned)
        else:
            self.forward(plan, planned)
        self.active.finish_forward()
        return self.active.post_forward(plan.finished_req_ids)

    def forward(self, plan: Any, planned: dict[str, Planned]) -> None:
        """Read the blocks that are computed, and fill those that this step computes."""
        for name, count in plan.num_scheduled_tokens.items():
            request, end = planned[name].request, planned[name].end
            begin = end - count
            groups = enumerate(zip(self.rig.shapes, planned[name].tables, strict=True))
            for group, (shape, ids) in groups:
                first, last = begin // shape.block, end // shape.block
                if request.is_finished():
                    # Its end was not known yet when this was planned. Nobody else may have its
                    # blocks before this has run, and what is beyond its last token is of no use.
                    for i in range(first, last):
                        known = (i + 1) * shape.block <= request.num_tokens
                        useless = bytes([1]) * shape.page * len(self.layers[group])
                        data = self.block(request, group, i) if known else useless
                        self.write(ids[i], data, group)
                    continue
                for i in range(shape.first(begin), first):
                    assert ids[i] != 0, f"{name} reads the null block as block {i} of {group}"
                    self.read_blocks[group] += 1
                    assert self.read(ids[i], group) == self.block(request, group, i), (
                        f"{name} reads other tokens' KV in block {i} of {last} of group {group} "
                        f"on rank {self.rank}"
                    )
                for i in range(first, last):
                    assert ids[i] != 0, f"{name} writes to the null block"
                    self.write(ids[i], self.block(request, group, i), group)
                    self.computed_blocks += group == 0

    def forward_by_layer(self, plan: Any, planned: dict[str, Planned]) -> None:
        """As `forward`, for one group, with the calls that vLLM's attention layers make."""
        for layer, cache in self.layers[0].items():
            self.connector.wait_for_layer_load(layer)
            for name, count in plan.num_scheduled_tokens.items():
                request, end = planned[name].request, planned[name].end
                (ids,) = planned[name].tables
                first, last = (end - count) // BLOCK, end // BLOCK
                for i in range(first if not request.is_finished() else 0):
                    if ids[i] in self.connector.worker.lost_in_step:
                        self.lost_reads += 1
                        continue
                    wanted = pattern(request.block_hashes[i], layer, self.rank, self.rig.page)
                    assert cache[ids[i]].numpy().tobytes() == wanted, (
                        f"{name} reads other tokens' KV in block {i} of {last} of layer {layer}"
                    )
                for i in range(first, last):
                    # A finished request's tokens may be unknown, and nobody reads them.
                    known = (i + 1) * BLOCK <= request.num_tokens
                    data = (
                        pattern(request.block_hashes[i], layer, self.rank, self.rig.page)
                        if known
                        else bytes([1]) * self.rig.page
                    )
                    part = torch.frombuffer(bytearray(data), dtype=cache.dtype)
                    cache[ids[i]] = part.view(cache.shape[1:])
                    self.computed_blocks += layer == "0.0"
            self.connector.save_kv_layer(layer, cache, None)

    def block(self, request: Any, group: int, at: int) -> bytes:
        """What a block of a request has to be on this rank."""
        hashes = self.rig.shapes[group].block // self.rig.hash_block
        return self.pattern(request.block_hashes[(at + 1) * hashes - 1], group)

    def pattern(self, block_hash: bytes, group: int = 0) -> bytes:
        """What the made-up model computes for a block on this rank."""
        page = self.rig.shapes[group].page
        return b"".join(pattern(block_hash, name, self.rank, page) for name in self.layers[group])

    def read(self, block: int, group: int = 0) -> bytes:
        """The bytes of a block, of all layers of a group."""
        return b"".join(c[block].numpy().tobytes() for c in self.layers[group].values())

    def write(self, block: int, data: bytes, group: int = 0) -> None:
        """Fill a block of all layers of a group."""
        page = self.rig.shapes[group].page
        for n, cache in enumerate(self.layers[group].values()):
            part = torch.frombuffer(bytearray(data[n * page : (n + 1) * page]), dtype=cache.dtype)
            cache[block] = part.view(cache.shape[1:])


def pattern(block_hash: bytes, layer: str, rank: int, size: int) -> bytes:
    """What the made-up model computes for a block in one layer on one rank."""
    turn = zlib.crc32(f"{layer} {rank}".encode())
    mask = turn.to_bytes(4, "big") * 8
    # The exponent's bits are cleared, so that no two bytes make a NaN, which is unlike itself.
    part = bytes((b ^ m) & 0x3B for b, m in zip(block_hash, mask, strict=True))
    return (part * (size // len(part) + 1))[:size]
