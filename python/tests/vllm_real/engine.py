"""Several lives of a real vLLM engine on a CPU, one after the other: its answers to prompts.

engine.py PLAN.json OUT.json

The plan: `prompts` (token ids), and `lives`. A life has `weights` (a folder), `model` (where the
engine finds a copy of it), `connector` (`kv_connector_extra_config` or null) and `reload` (a folder
whose weights replace those of the running engine after a first pass, or null).
"""

import gc
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

TOKENS = 12
"""Of each answer."""


def answer(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Answer all prompts greedily; returns tokens by prompt, and how many came from a cache."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": sum(output.num_cached_tokens or 0 for output in outputs),
    }


def live(life: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Start an engine, let it answer, and end it."""
    shutil.rmtree(life["model"], ignore_errors=True)
    shutil.copytree(life["weights"], life["model"])
    transfer = None
    if life["connector"] is not None:
        transfer = {
            "kv_connector": "SlipstreamConnector",
            "kv_connector_module_path": "slipstream.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": life["connector"],
        }
    llm = LLM(
        model=life["model"],
        kv_transfer_config=transfer,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=4,
        num_gpu_blocks_override=512,
        disable_log_stats=True,
    )
    # The scheduler knows the disk's blocks after the first steps.
    answer(llm, [prompts[0][:5]])
    said = [answer(llm, prompts)]
    if life["reload"]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": life["reload"]})
        for _ in range(2):
            # The device's own cache is the caller's to reset.
            if not llm.reset_prefix_cache():
                raise RuntimeError("requests hold blocks of the device's cache")
            said.append(answer(llm, prompts))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return said


def main() -> None:
    """Run the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    said = [live(life, plan["prompts"]) for life in plan["lives"]]
    Path(sys.argv[2]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
