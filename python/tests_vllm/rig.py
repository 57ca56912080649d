"""vLLM's real scheduler on a CPU: the engine's loop with made-up tokens in place of a model."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

BLOCK = 16
"""Tokens per block."""

# A tiny model's shape; nothing of it is ever computed.
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


class Rig:
    """One engine's scheduler, stepped by hand; with `worker`, its connector's worker half, too.

    With a worker, a model is made up whose KV is a function of the tokens: a block's bytes repeat
    its hash. Before each step all blocks that a real model would read are compared with that.
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
        long_prefill_tokens: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self._made = 0
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(MODEL))
            model = ModelConfig(
                model=folder, tokenizer=None, skip_tokenizer_init=True, max_model_len=131072
            )
            cache = CacheConfig(
                block_size=BLOCK,
                enable_prefix_caching=True,
                prefix_caching_hash_algo="sha256_cbor",
            )
            transfer = None
            if connector is not None:
                transfer = KVTransferConfig(
                    kv_connector=connector,
                    kv_connector_module_path=module,
                    kv_role="kv_both",
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
                    async_scheduling=False,
                    policy=scheduling,
                    long_prefill_token_threshold=long_prefill_tokens,
                ),
                device_config=DeviceConfig("cpu"),
                kv_transfer_config=transfer,
                kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
                if kv_events
                else None,
            )
        cache.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.float16
        )
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer.0", "layer.1"], spec)],
        )
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=log_stats,
        )
        self.worker = Worker(self) if worker else None
        if self.worker is not None:
            # As EngineCore does at its start.
            told = self.worker.connector.get_handshake_metadata()
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})

    @property
    def pool(self) -> Any:
        """The engine's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def connector(self) -> Any:
        """The scheduler half of the connector."""
        return self.scheduler.connector

    def add(self, tokens: list[int], *, max_tokens: int, priority: int = 0) -> str:
        """Let a request arrive; returns its id."""
        self._made += 1
        name = f"r{self._made}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
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

    def output(self, plan: Any, connector_output: Any = None) -> ModelRunnerOutput:
        """Make up what a model would have said to the plan."""
        names = list(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [self.rng.randrange(1, 32000)]
                if requests[name].num_computed_tokens >= requests[name].num_tokens
                else []
                for name in names
            ],
            kv_connector_output=connector_output,
        )

    def step(self) -> Any:
        """Run one step; returns its plan."""
        plan = self.scheduler.schedule()
        told = self.worker.run(plan) if self.worker is not None else None
        self.scheduler.update_from_output(plan, self.output(plan, told))
        return plan

    def close(self) -> None:
        """End the connector's threads."""
        if self.worker is not None:
            self.worker.connector.shutdown()
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


class Worker:
    """The worker half of the connector in vLLM's own hands, around a made-up model."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.connector = KVConnectorFactory.create_connector(
            rig.config, KVConnectorRole.WORKER, rig.kv_cache_config
        )
        blocks = rig.kv_cache_config.num_blocks
        # Keys and values, tokens, heads, head size.
        self.caches = {
            f"layer.{n}": torch.zeros((blocks, 2, BLOCK, 4, 16), dtype=torch.float16)
            for n in range(2)
        }
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.active = ActiveKVConnector(rig.config, self.caches)
        self.computed_blocks = 0

    def run(self, plan: Any) -> Any:
        """Do what a worker does in a step; returns what it tells the scheduler's connector."""
        self.active.pre_forward(plan)
        self.forward(plan)
        self.active.finish_forward()
        return self.active.post_forward(plan.finished_req_ids)

    def forward(self, plan: Any) -> None:
        """Read the blocks that are computed, and fill those that this step computes."""
        for name, count in plan.num_scheduled_tokens.items():
            request = self.rig.scheduler.requests[name]
            ids = self.rig.scheduler.kv_cache_manager.get_block_ids(name)[0]
            # The scheduler counts a step's tokens as computed when it has planned it.
            end = request.num_computed_tokens
            first, last = (end - count) // BLOCK, end // BLOCK
            for i in range(first):
                found = self.read(ids[i])
                assert found == pattern(request.block_hashes[i]), (
                    f"{name} reads other tokens' KV in block {i} of {last}"
                )
            for i in range(first, last):
                self.write(ids[i], pattern(request.block_hashes[i]))
                self.computed_blocks += 1

    def read(self, block: int) -> bytes:
        """The bytes of a block, of all layers."""
        return b"".join(c[block].numpy().tobytes() for c in self.caches.values())

    def write(self, block: int, data: bytes) -> None:
        """Fill a block of all layers."""
        size = len(data) // len(self.caches)
        for n, cache in enumerate(self.caches.values()):
            part = torch.frombuffer(bytearray(data[n * size : (n + 1) * size]), dtype=cache.dtype)
            cache[block] = part.view(cache.shape[1:])


def pattern(block_hash: bytes) -> bytes:
    """What the made-up model computes for a block: 8 KiB, another in each layer."""
    # The exponent's bits are cleared, so that no two bytes make a NaN, which is unlike itself.
    half = bytes(b & 0x3B for b in block_hash) * 128
    return half[:4096] + half[::-1][:4096]
