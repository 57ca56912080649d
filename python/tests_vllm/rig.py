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
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
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
    """One engine's scheduler, stepped by hand."""

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
                ),
                device_config=DeviceConfig("cpu"),
                kv_transfer_config=transfer,
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
            log_stats=False,
        )

    @property
    def pool(self) -> Any:
        """The engine's block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def connector(self) -> Any:
        """The scheduler half of the connector."""
        return self.scheduler.connector

    def add(self, tokens: list[int], *, max_tokens: int) -> str:
        """Let a request arrive; returns its id."""
        self._made += 1
        name = f"r{self._made}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        self.scheduler.add_request(Request(name, tokens, params, None, block_hasher=self._hasher))
        return name

    def tokens(self, count: int) -> list[int]:
        """Tokens that no other request has."""
        return [self.rng.randrange(1, 32000) for _ in range(count)]

    def abort(self, name: str) -> None:
        """Abort a request, as a client that hangs up does."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def output(self, plan: Any) -> ModelRunnerOutput:
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
        )

    def step(self) -> Any:
        """Run one step; returns its plan."""
        plan = self.scheduler.schedule()
        self.scheduler.update_from_output(plan, self.output(plan))
        return plan

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
