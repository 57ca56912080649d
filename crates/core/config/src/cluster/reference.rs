//! Documentation of every key of the cluster file. `docs/cluster-file.md` is generated from it, and
//! a test checks that it has exactly the keys that [`super::file`] reads, with their defaults.

use std::fmt::Write as _;

/// A key of the cluster file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Path, such as `engine.block_size`. `NAME` stands for a pool's name.
    pub path: &'static str,
    /// Type, unit and bounds.
    pub value: &'static str,
    /// Default as TOML, or in words in parentheses.
    pub default: &'static str,
    /// Its meaning.
    pub meaning: &'static str,
    /// Effect of a value that is too low or too high (or wrong).
    pub pitfall: &'static str,
}

const fn key(
    path: &'static str,
    value: &'static str,
    default: &'static str,
    meaning: &'static str,
    pitfall: &'static str,
) -> Key {
    Key {
        path,
        value,
        default,
        meaning,
        pitfall,
    }
}

/// All keys, section by section.
pub const KEYS: &[Key] = &[
    key(
        "model.preset",
        "string",
        "\"qwen3-8b\"",
        "The model, for its shape; `slipstream presets` lists them.",
        "The shape of another model gives wrong step times and a wrong KV cache size.",
    ),
    key(
        "model.name",
        "string",
        "(the preset's name, or the folder of `config`)",
        "Model name in requests.",
        "Requests with another name get 404.",
    ),
    key(
        "model.config",
        "path",
        "(none)",
        "A Hugging Face style `config.json`, or its folder; overrides the preset's shape.",
        "Read with the quantization files and the index of the weights in its folder; unknown keys that may \
         matter are refused by name (docs/step-time.md). Formats other than the checkpoint's are refused, \
         except FP8 for 16 bits.",
    ),
    key(
        "model.tokenizer",
        "path",
        "(the built-in tokenizer)",
        "Folder with `tokenizer.json` and, for chat, a template.",
        "A tokenizer other than the real deployment's gives other prompt lengths.",
    ),
    key(
        "model.lora_adapters",
        "names",
        "[]",
        "LoRA adapters that are served from the start: model names with a prefix cache of their own.",
        "An adapter changes no step time but by `engine.lora`: the cost of its products is not modelled.",
    ),
    key(
        "model.image_tokens",
        "tokens, 0 to 65,536",
        "0",
        "Tokens of an image in a chat; 0: chats with images are refused.",
        "One number for images of any size. Live, the time of an image encoder is not modelled; `engine.encoder` is for simulation.",
    ),
    key(
        "engine.block_size",
        "tokens, 1 to 1,024",
        "16",
        "Tokens per KV block: the unit of allocation and of prefix reuse. The same in all pools.",
        "High: prompts shorter than a block share nothing, and each sequence wastes half a block on \
         average. Low: more hashes and events per request.",
    ),
    key(
        "engine.num_gpu_blocks",
        "blocks, 1 to 16,777,216",
        "(GPU memory x utilization - weights - buffers of sampling; 16,384 unless `timing` has a `gpu`)",
        "KV blocks per rank.",
        "Low: preemptions, and long prompts are refused. High: a cache larger than the GPU's memory.",
    ),
    key(
        "engine.max_num_seqs",
        "sequences, 1 to 65,536",
        "256",
        "Limit of sequences per pass.",
        "Low: requests wait although the GPU has capacity. High: every token takes longer, and blocks run \
         out (preemptions).",
    ),
    key(
        "engine.max_num_batched_tokens",
        "tokens, 1 to 16,777,216",
        "8192",
        "Token budget per pass, over prefill and decode. At least `max_num_seqs`; at least \
         `max_model_len` if chunked prefill is off.",
        "Low: prefill takes more passes (TTFT). High: passes with prefill delay decodes (ITL).",
    ),
    key(
        "engine.max_model_len",
        "tokens, 1 to the model's",
        "(the model's limit, or the KV cache's capacity if smaller)",
        "Limit of prompt plus answer.",
        "Low: requests are refused. High: one request may take the whole cache.",
    ),
    key(
        "engine.enable_prefix_caching",
        "true or false",
        "true",
        "Reuse cached blocks by hash.",
        "false: every prompt is computed completely, and KV-aware routing finds no hits.",
    ),
    key(
        "engine.enable_chunked_prefill",
        "true or false",
        "true",
        "Split a prompt over passes if the budget is short.",
        "false: a prompt waits until one pass can hold all of it.",
    ),
    key(
        "engine.scheduling_policy",
        "\"fcfs\" or \"priority\"",
        "\"fcfs\"",
        "Order of the waiting queue: arrival, or the request's `priority` (lower first).",
        "\"priority\": steady urgent load starves the rest.",
    ),
    key(
        "engine.async_scheduling",
        "true or false",
        "true",
        "Schedule each pass when the one before it begins, without its tokens, as vLLM does by default.",
        "true: a request that ends keeps its slot and blocks for one more pass, and one that arrives waits \
         one pass longer. false: vLLM's synchronous scheduler; `timing` must then contain the host's time \
         between passes.",
    ),
    key(
        "engine.long_prefill_token_threshold",
        "tokens, 0 to `max_model_len`",
        "0",
        "Limit of one sequence's tokens in a pass while the engine has other sequences; 0: no limit.",
        "Low: long prompts take more passes. High: they keep short ones waiting.",
    ),
    key(
        "engine.long_prefill_token_threshold_adaptive",
        "true or false",
        "false",
        "Raise that limit to `max_num_batched_tokens` divided by the number of sequences.",
        "No effect if `long_prefill_token_threshold` is 0.",
    ),
    key(
        "engine.max_num_active_seqs",
        "sequences, 1 to `max_num_seqs`",
        "(`max_num_seqs`)",
        "Limit of running sequences.",
        "Low: requests wait although the GPU has capacity.",
    ),
    key(
        "engine.max_num_scheduled_tokens",
        "tokens, 1 to 16,777,216",
        "(`max_num_batched_tokens`)",
        "Limit of the tokens that a pass schedules. At least `max_model_len` if chunked prefill is off.",
        "Low: prefill takes more passes (TTFT), and fewer sequences decode per pass than run.",
    ),
    key(
        "engine.scheduler_reserve_full_isl",
        "true or false",
        "true",
        "Admit a request only if blocks for its whole prompt are free, not for its first chunk alone.",
        "false: long prompts preempt each other when the cache is full.",
    ),
    key(
        "engine.tensor_parallel_size",
        "GPUs, 1 to 1,024",
        "1",
        "GPUs that share one replica of the model. Must split its attention heads and MLPs evenly, and \
         its key-value heads evenly or repeat them evenly.",
        "Low: the weights do not fit. High: time goes into all-reduces.",
    ),
    key(
        "engine.pipeline_parallel_size",
        "stages, 1 to the model's layers",
        "1",
        "Stages that the layers are divided into, each on `tensor_parallel_size` GPUs of its own. As many batches are under way, and \
         one more with `async_scheduling` (`docs/engine-model.md`).",
        "High: stages wait for each other, and each request for all of them.",
    ),
    key(
        "engine.pipeline_link_bytes_per_s",
        "bytes per second, 1e6 to 1e13",
        "(the link of `engine.timing.gpu`; without one, sends take no time)",
        "Rate at which a stage sends activations to the next one: 2 bytes x hidden size per token.",
        "Low: prompts wait between stages. Set it if stages are in different machines.",
    ),
    key(
        "engine.pipeline_latency_us",
        "µs, 0 to 1,000,000",
        "0.0",
        "Time of a send besides its bytes.",
        "High: every token waits for it at each stage but the last.",
    ),
    key(
        "engine.data_parallel_size",
        "ranks, 1 to 1,024",
        "1",
        "Ranks per worker, each with its own scheduler and KV cache. Ranks of a mixture divide the experts \
         between them; each step is taken to meet as many tokens on the other ranks as on its own, unless `data_parallel_barrier` is set.",
        "High: cached prefixes are spread over many ranks. A mixture needs `timing.kind` \"calibrated\", or `data_parallel_barrier`.",
    ),
    key(
        "engine.data_parallel_barrier",
        "true or false",
        "false",
        "The ranks of a worker begin every step together and end it with the slowest one, as vLLM's do with a mixture of experts; a rank \
         without requests runs a dummy batch (`docs/engine-model.md`). For simulation only. Needs a \
         mixture; no effect with one rank.",
        "true: one rank's long prompt delays the tokens of all. Runs take longer, as steps are not jumped over.",
    ),
    key(
        "engine.enable_expert_parallel",
        "true or false",
        "false",
        "Give each GPU of a worker whole experts, instead of a part of every expert.",
        "true: tokens are exchanged between GPUs; the busiest GPU sets the pace.",
    ),
    key(
        "engine.expert_imbalance",
        "1 to 1,024",
        "(the profile's: 1.29)",
        "Rows that the experts of the busiest GPU compute, over the mean of all GPUs: 1 / `balancedness`, which vLLM logs with \
         `eplb_config.log_balancedness`. Needs `enable_expert_parallel`.",
        "High: every step waits for that GPU. 1: experts that are loaded equally.",
    ),
    key(
        "engine.gpu_memory_utilization",
        "share, 0.01 to 1",
        "0.9",
        "Share of a GPU's memory for weights and KV cache.",
        "High: on a real GPU, out of memory, since activations need the rest. Low: fewer blocks.",
    ),
    key(
        "engine.kv_cache_dtype",
        "\"auto\", \"bf16\" or \"fp8\"",
        "\"auto\"",
        "Format of keys and values, used for the default of `num_gpu_blocks`, memory reads of the roofline, and KV \
         transfers. \"auto\", as in vLLM: \"bf16\", also for FP8 weights, unless the checkpoint contains scales \
         for an FP8 cache (`kv_cache_scheme`, `kv_cache_quant_algo`).",
        "\"fp8\": twice the blocks; the loss of quality is not modelled.",
    ),
    key(
        "engine.startup_s",
        "s, 0 to 86,400",
        "0.0",
        "Time from a worker's start until it takes requests.",
        "High: the wait is in real time at `speedup` 1.",
    ),
    key(
        "engine.lora.max_loras",
        "0 to 1,024",
        "0",
        "LoRA adapters that a step may use, and that fit the GPUs (`docs/engine-model.md`). 0: any number, which take no time.",
        "Low: requests of other adapters wait, and adapters are copied again and again.",
    ),
    key(
        "engine.lora.max_cpu_loras",
        "`max_loras` to 65,536",
        "(`max_loras`)",
        "Adapters that fit host memory, those on the GPUs included.",
        "Low: adapters are loaded again and again.",
    ),
    key(
        "engine.lora.load_ms",
        "ms, 0 to 1,000,000",
        "0.0",
        "Time to load an adapter that host memory lacks. The step that needs it waits.",
        "High: every request in the step waits.",
    ),
    key(
        "engine.lora.activate_ms",
        "ms, 0 to 1,000,000",
        "0.0",
        "Time to copy an adapter from host memory to the GPUs. The step that needs it waits.",
        "As `load_ms`.",
    ),
    key(
        "engine.encoder.enabled",
        "true or false",
        "false",
        "Model the encoder of images, which runs on the engine's GPUs within the steps that need its outputs \
         (`docs/engine-model.md`). For simulation only; `images_per_request` of workload files makes images.",
        "false: an image takes the time of its tokens alone.",
    ),
    key(
        "engine.encoder.token_us",
        "µs, 0 to 1,000,000; needed unless `parameters` is set",
        "(from `parameters`)",
        "Time of the encoder per token that an image takes in the prompt.",
        "High: every request in a step waits for the images of one.",
    ),
    key(
        "engine.encoder.parameters",
        "1,000 to 1e13",
        "(none)",
        "Parameters of the encoder, such as 0.675e9. Each is two operations per patch, divided by `flops_share` of the GPU's BF16 peak and by \
         `tensor_parallel_size`. Attention between patches is left out.",
        "Large images take longer than that: measure `token_us`.",
    ),
    key(
        "engine.encoder.patches_per_token",
        "1 to 1,024",
        "4.0",
        "Patches of an image per token in the prompt: 4 if 2 x 2 are merged.",
        "As `parameters`.",
    ),
    key(
        "engine.encoder.flops_share",
        "share, 0.01 to 1",
        "0.5",
        "Share of the GPU's peak that the encoder reaches. The default is an assumption, not a measurement.",
        "As `parameters`.",
    ),
    key(
        "engine.encoder.input_us",
        "µs, 0 to 1e9",
        "0.0",
        "Time of each image besides its tokens.",
        "High: small images cost as much as large ones.",
    ),
    key(
        "engine.encoder.max_num_encoder_input_tokens",
        "tokens, 1 to 16,777,216",
        "(`max_num_batched_tokens`)",
        "Tokens of images that a step may encode. A larger image is refused.",
        "Low: prompts wait before their images. High: a step with many images delays all decodes.",
    ),
    key(
        "engine.encoder.encoder_cache_size",
        "tokens, 1 to 16,777,216",
        "(`max_num_batched_tokens`)",
        "Tokens of encoded images that are kept for prompts that need them, now or later. A larger image is refused.",
        "Low: prompts wait before their images, and images that come again are encoded again.",
    ),
    key(
        "engine.encoder.disable_chunked_mm_input",
        "true or false",
        "false",
        "Do not divide the tokens of an image between two steps, if they fit one.",
        "true: steps before images are left short.",
    ),
    key(
        "engine.host_tier.gib",
        "GiB, 0 to 1,000,000",
        "0.0",
        "Host memory per rank for KV blocks. Each block that the GPUs cache is copied to it; prompts load from it what the \
         GPUs evicted (`docs/engine-model.md`). 0: none.",
        "High: on a real host, memory that the engine and the page cache lack.",
    ),
    key(
        "engine.host_tier.bytes_per_s",
        "bytes per second per GPU, 1e6 to 1e13; needed if `gib` is not 0",
        "(none)",
        "Rate at which one GPU loads its part of the blocks. Loads of a rank take turns.",
        "Low: loading a prefix takes longer than computing it.",
    ),
    key(
        "engine.host_tier.latency_us",
        "µs, 0 to 1,000,000",
        "0.0",
        "Time from the decision to load until the first byte moves.",
        "High: short prefixes are not worth their load.",
    ),
    key(
        "engine.disk_tier.gib",
        "GiB, 0 to 1,000,000",
        "0.0",
        "Disk per rank for KV blocks, below `engine.host_tier`, which it needs. Blocks that host memory evicts are written to it \
         (`docs/engine-model.md`). 0: none.",
        "High: on a real host, writes wear the disk.",
    ),
    key(
        "engine.disk_tier.bytes_per_s",
        "bytes per second, 1e6 to 1e13; needed if `gib` is not 0",
        "(none)",
        "Rate at which a rank reads blocks from its disk into host memory.",
        "Low: loading a prefix takes longer than computing it.",
    ),
    key(
        "engine.disk_tier.write_bytes_per_s",
        "bytes per second, 1e6 to 1e13",
        "(`bytes_per_s`)",
        "Rate at which a rank writes blocks to its disk.",
        "Low: blocks that host memory evicts meanwhile are dropped.",
    ),
    key(
        "engine.disk_tier.latency_us",
        "µs, 0 to 1,000,000",
        "0.0",
        "Time from the decision to read until the first byte moves.",
        "High: short prefixes are not worth their load.",
    ),
    key(
        "engine.peer_tier.enabled",
        "true or false",
        "false",
        "Ranks of a pool fetch blocks that they lack from another one that has them, over the network (`docs/twin.md`); simulation \
         only.",
        "On: with a slow network, fetching a prefix takes longer than computing it.",
    ),
    key(
        "engine.peer_tier.latency_us",
        "µs, 0 to 1,000,000",
        "0.0",
        "Time from the decision to fetch until the other rank begins to send.",
        "High: short prefixes are not worth their transfer, and blocks may be gone by then.",
    ),
    key(
        "engine.speculation.num_speculative_tokens",
        "0 to 32",
        "0",
        "Tokens of a draft, which a step verifies together with the one before them. 0: no speculative decoding.",
        "High: steps verify tokens that are rejected.",
    ),
    key(
        "engine.speculation.method",
        "\"eagle\", \"mtp\", \"draft_model\" or \"ngram\"; needed if `num_speculative_tokens` is not 0",
        "(none)",
        "The drafter, by vLLM's name. All but \"ngram\" take KV blocks for their drafts in advance.",
        "The weights and the KV cache of a draft model take memory that is not counted: set `num_gpu_blocks`.",
    ),
    key(
        "engine.speculation.acceptance",
        "list of shares, 0 to 1, one per token of a draft or of longer ones, none larger than the one before it; needed as `method`",
        "(none)",
        "Share of drafts in which each token is accepted: what vLLM logs as `Per-position acceptance rate`. Drawn per request \
         from its seed.",
        "It depends on the model, the drafter, the text and the temperature: measure it on your traffic.",
    ),
    key(
        "engine.speculation.draft_us",
        "µs, 0 to 1,000,000",
        "0.0",
        "Time of drafting, added to each step.",
        "High: speculation pays in large drafts only.",
    ),
    key(
        "engine.speculation.draft_share",
        "0 to 10",
        "0.0",
        "The same as a share of the step's time.",
        "As above.",
    ),
    key(
        "engine.output_len.kind",
        "\"constant\" or \"lognormal\"",
        "\"lognormal\"",
        "Distribution of natural answer lengths, drawn from a request's seed. Not used if a request \
         sets `ignore_eos`.",
        "\"constant\" makes equal requests end together, unlike real ones.",
    ),
    key(
        "engine.output_len.tokens",
        "tokens, 1 to 16,777,216; needed for \"constant\"",
        "(none)",
        "The length.",
        "Above the requests' `max_tokens`, it has no effect.",
    ),
    key(
        "engine.output_len.mean",
        "tokens, 1 to 16,777,216",
        "256.0",
        "Mean of the lognormal.",
        "Above the requests' `max_tokens`, it has little effect.",
    ),
    key(
        "engine.output_len.cv",
        "0 to 10",
        "0.7",
        "Standard deviation over mean of the lognormal.",
        "High: a few answers run to `max_tokens`, most are very short.",
    ),
    key(
        "engine.timing.kind",
        "\"calibrated\", \"constant\", \"linear\", \"roofline\" or \"table\"",
        "\"calibrated\"",
        "Model of a pass's duration; `docs/step-time.md` has the equations.",
        "A key that the chosen kind does not use is an error, unless the kind is set in a higher \
         layer (`--set engine.timing.kind=constant` over a file with a GPU).",
    ),
    key(
        "engine.timing.step_ns",
        "ns, 0 to 3,600,000,000,000; needed for \"constant\"",
        "(none)",
        "Duration of every pass.",
        "0: passes take no time.",
    ),
    key(
        "engine.timing.base_ns",
        "ns, at least 0; needed for \"linear\"",
        "(none)",
        "Fixed cost of a pass.",
        "Low: small batches are too fast.",
    ),
    key(
        "engine.timing.per_prefill_token_ns",
        "ns, at least 0",
        "0.0",
        "Cost per prompt token.",
        "0: prefill is free, and prefix reuse gains nothing.",
    ),
    key(
        "engine.timing.per_prefill_pair_ns",
        "ns, at least 0",
        "0.0",
        "Cost per (query, key) pair of causal attention over prompts: n·(n+1)/2 for a prompt of n tokens.",
        "0: a long prompt costs no more per token than a short one.",
    ),
    key(
        "engine.timing.per_decode_token_ns",
        "ns, at least 0",
        "0.0",
        "Cost per decoding sequence.",
        "0: larger batches cost nothing.",
    ),
    key(
        "engine.timing.per_sequence_ns",
        "ns, at least 0",
        "0.0",
        "Cost per sequence in the pass, prefill or decode.",
        "0: larger batches cost nothing.",
    ),
    key(
        "engine.timing.per_context_token_ns",
        "ns, at least 0",
        "0.0",
        "Cost per token of context in decode.",
        "0: long contexts decode as fast as short ones.",
    ),
    key(
        "engine.timing.api_ns",
        "ns, at least 0; for \"linear\"",
        "0.0",
        "Time of a request outside of passes: HTTP, tokenizer, hops between processes. Simulated only: a live \
         server has its own.",
        "Low: TTFT without load is too short.",
    ),
    key(
        "engine.timing.api_prompt_token_ns",
        "ns, at least 0; for \"linear\"",
        "0.0",
        "The same per token of the prompt, those found in the cache included: parsing and tokenizing. Simulated \
         only.",
        "Low: TTFT of long prompts is too short where their prefixes are cached.",
    ),
    key(
        "engine.timing.gpu",
        "string",
        "\"h100-sxm\"",
        "The GPU: a preset (`slipstream presets` lists them) or the NAME of a `[gpu.NAME]`. Its memory also \
         sets the default of `num_gpu_blocks`.",
        "A PCIe GPU with a high `tensor_parallel_size` spends most of a pass in all-reduces.",
    ),
    key(
        "engine.timing.dtype",
        "\"bf16\", \"fp8\", \"int8\", \"int4\", \"nvfp4\" or \"mxfp4\"; for \"roofline\" the first two",
        "\"bf16\"",
        "Format of the weights. Default: the checkpoint's. `docs/step-time.md` says which parts of a checkpoint have \
         it. The KV cache has its own (`kv_cache_dtype`).",
        "\"bf16\" for a checkpoint of fewer bits is rejected. A format that the GPU has no units for is unpacked \
         to 16 bits (\"calibrated\") or rejected (\"roofline\").",
    ),
    key(
        "engine.timing.framework",
        "\"vllm\", \"sglang\" or \"trtllm\"",
        "\"vllm\"",
        "Framework whose overheads per layer, step, sequence and request apply. The scheduler stays vLLM's.",
        "Another framework's steps differ by a tenth to a third.",
    ),
    key(
        "engine.timing.profile",
        "path",
        "(the built-in profile)",
        "Profile from `slipstream calibrate`.",
        "A profile of other hosts or versions: times are off as by the error of its report.",
    ),
    key(
        "engine.timing.path",
        "path; needed for \"table\"",
        "(none)",
        "CSV grid of measured passes; `docs/step-time.md` has the format.",
        "Beyond its last points the table is extrapolated linearly.",
    ),
    key(
        "gpu.NAME.like",
        "string",
        "(none)",
        "Preset whose numbers apply where this table has none, and whose kernels the GPU is taken to have.",
        "Without it the overheads of a generation that was not measured apply.",
    ),
    key(
        "gpu.NAME.bf16_flops",
        "FLOP/s, dense; needed without `like`",
        "(that of `like`)",
        "Peak of BF16 matrix products.",
        "A figure \"with sparsity\" is twice the dense one: prefill comes out twice as fast.",
    ),
    key(
        "gpu.NAME.fp8_flops",
        "FLOP/s, dense",
        "(that of `like`)",
        "Peak of FP8 matrix products; without it FP8 weights are unpacked.",
        "As `bf16_flops`.",
    ),
    key(
        "gpu.NAME.fp4_flops",
        "FLOP/s, dense",
        "(that of `like`)",
        "Peak of FP4 matrix products; without it FP4 weights are unpacked.",
        "As `bf16_flops`.",
    ),
    key(
        "gpu.NAME.memory_bytes",
        "bytes; needed without `like`",
        "(that of `like`)",
        "Memory that programs can use, as the driver reports it.",
        "High: more KV blocks than fit.",
    ),
    key(
        "gpu.NAME.memory_bytes_per_s",
        "bytes/s; needed without `like`",
        "(that of `like`)",
        "Memory bandwidth.",
        "High: decode comes out too fast.",
    ),
    key(
        "gpu.NAME.link",
        "string",
        "(that of `like`; otherwise 32e9 bytes/s of PCIe)",
        "NAME of the `[link.NAME]` that joins the GPUs of a worker.",
        "Used with `tensor_parallel_size` above 1 only.",
    ),
    key(
        "link.NAME.kind",
        "\"fabric\" or \"pcie\"",
        "\"pcie\"",
        "NVLink, Infinity Fabric and the like; or PCI Express.",
        "Sets the latency of an all-reduce and the share of the bandwidth that it reaches.",
    ),
    key(
        "link.NAME.bytes_per_s",
        "bytes/s; needed",
        "(none)",
        "Bandwidth of one GPU in one direction.",
        "Data sheets state both directions together, twice this.",
    ),
    key(
        "link.NAME.reduce_us",
        "us",
        "(the profile's for that kind)",
        "Latency of a small all-reduce.",
        "High: decode with a large `tensor_parallel_size` is slow.",
    ),
    key(
        "pool.NAME.role",
        "\"both\", \"prefill\" or \"decode\"",
        "\"both\"",
        "Role of its engines: whole requests; only prompts, followed by a KV transfer; or answers \
         to such prompts. A decode worker computes a prompt itself if `router.remote_prefill_…` says so. With `engines`: [disaggregated prefill](engines.md#disaggregated-prefill), \
         for every kind but \"llamacpp\".",
        "Prefill pools need a pool of another role, decode pools need a prefill pool.",
    ),
    key(
        "pool.NAME.workers",
        "workers, 1 to 65,535 (all pools together as well)",
        "1",
        "Number of equal workers in this pool.",
        "High: cached prefixes are spread over many workers, and each worker needs memory for its block pool.",
    ),
    key(
        "pool.NAME.engine",
        "table",
        "(as in `[engine]`)",
        "Any key of `[engine]`, for this pool only: `[pool.big.engine]`, \
         `[pool.big.engine.timing]`.",
        "A pool's own key overrides `[engine]`. A flag or variable for a key of `[engine]` that the pool has is refused, as \
         it would have no effect there: set `pool.NAME.engine.…`.",
    ),
    key(
        "pool.NAME.model",
        "table",
        "(as in `[model]`)",
        "Any key of `[model]`, for this pool only: `[pool.big.model]`. Pools may serve several models, each by its `name`; a \
         request goes to the pools of its model ([several models](twin.md#several-models)).",
        "For simulation: live, a server has one model. A name is one model: pools with the same `name` need the same model.",
    ),
    key(
        "pool.NAME.engines",
        "list of addresses, 1 to 4,096",
        "(none: modelled workers)",
        "Real engines, such as `[\"http://gpu1:8000\"]`, or `https://`; each is one worker. `[pool.NAME.engine]` then says what the \
         router assumes of them: `block_size` and `num_gpu_blocks` bound what it remembers of routed prompts.",
        "An engine that does not answer gets no requests until it does; the server starts without it.",
    ),
    key(
        "pool.NAME.dns",
        "list of addresses, 1 to 64",
        "(none)",
        "Names whose addresses are further engines of the pool, such as `[\"http://engines.default.svc:8000\"]`: all of their A and \
         AAAA records, looked up again every `upstream.dns_interval_s`.",
        "A name that cannot be looked up changes nothing. `https://` needs `server_name`.",
    ),
    key(
        "pool.NAME.endpoint_slices",
        "label selector",
        "(none)",
        "The ready endpoints of Kubernetes' EndpointSlices with these labels are further engines of the pool, such as \
         `\"kubernetes.io/service-name=vllm\"`. They are watched, so changes are noticed at once.",
        "The service account must list and watch endpointslices. While the API server does not answer, nothing changes.",
    ),
    key(
        "pool.NAME.endpoint_port",
        "name or number, as text; needs `endpoint_slices`",
        "(the only port of a slice)",
        "The port of the EndpointSlices that the engines listen on.",
        "Slices without it have no engines.",
    ),
    key(
        "pool.NAME.kv_protocol",
        "\"auto\", \"kv_transfer_params\", \"mooncake\" or \"sglang\"; needs the role \"prefill\"",
        "\"auto\"",
        "How decode engines find what the pool's engines computed: by the answer of the prefill engine, or by an id that both get at \
         once, from vLLM's MooncakeConnector or SGLang ([table](engines.md#disaggregated-prefill)). \"auto\": \"sglang\" for that kind, \
         \"kv_transfer_params\" for others.",
        "Another protocol than the engines': decode engines compute all prompts, or wait until a time limit of their own.",
    ),
    key(
        "pool.NAME.bootstrap_port",
        "1 to 65,535; needs the role \"prefill\"",
        "8998",
        "Port of the prefill engines' bootstrap servers, at the host of each (`--disaggregation-bootstrap-port` of SGLang, \
         `VLLM_MOONCAKE_BOOTSTRAP_PORT` of vLLM). Engines of one host need a pool each.",
        "Wrong: decode engines of SGLang fail all requests; prefill engines with Mooncake are down.",
    ),
    key(
        "pool.NAME.weight",
        "0 to 1,000,000",
        "(1; no weights if no pool has one)",
        "Share of the requests for a model that the pool gets, relative to the weights of the other pools that serve it, as in the \
         Gateway API. Requests of a session (`x-session-id`) stay in one pool. 0: none.",
        "Pools without a ready engine count as 0. Without weights all engines of a model compete for a request.",
    ),
    key(
        "pool.NAME.mirror",
        "0 to 1",
        "(none)",
        "Share of requests of which the pool gets a copy. Its answers are dropped and counted, and it answers no client.",
        "High: as many requests again, and their bodies in memory until the copy is answered.",
    ),
    key(
        "pool.NAME.kind",
        "\"auto\", \"vllm\", \"sglang\", \"llamacpp\" or \"openai\"",
        "\"auto\"",
        "The server that `engines` run. \"auto\": found by `owned_by` of `GET /v1/models`. \"openai\": health is asked by \
         `GET /v1/models`, for servers without `/health`.",
        "Wrong: health checks of a path that does not exist, so the engine stays down.",
    ),
    key(
        "pool.NAME.api_key_file",
        "path",
        "(none)",
        "File with the API key of `engines`, sent as `Authorization: Bearer KEY`. Without it, engines get the client's \
         `Authorization`, unless the router checks keys of its own.",
        "Missing: engines with `--api-key` answer 401.",
    ),
    key(
        "pool.NAME.ca_file",
        "path",
        "(the host's authorities)",
        "For `https://` engines: PEM file of the authorities that sign their certificates, instead of those of the host.",
        "Of another authority: the engines stay down, with the cause `certificate_untrusted`. There is no way to turn \
         verification off.",
    ),
    key(
        "pool.NAME.cert_file",
        "path; needs `key_file`",
        "(none)",
        "For `https://` engines that ask clients for a certificate: PEM file of the router's, with the intermediate ones.",
        "Missing: such engines stay down, with the cause `client_certificate`.",
    ),
    key(
        "pool.NAME.key_file",
        "path; needs `cert_file`",
        "(none)",
        "PEM file of that certificate's private key.",
        "",
    ),
    key(
        "pool.NAME.server_name",
        "host name or IP address",
        "(the host of the URL)",
        "For `https://` engines: the name that their certificates must carry, and that is sent to them as SNI.",
        "Wrong: the engines stay down, with the cause `certificate_name`.",
    ),
    key(
        "share.NAME.pools",
        "list of pools, 2 or more",
        "(required)",
        "Pools that share GPUs: worker i of each is on the same ones. One of their models is awake there, and the others sleep \
         ([rules](twin.md#shared-gpus)).",
        "Their workers need equal GPUs, as many each, and models of different names. GPUs and prices count them once.",
    ),
    key(
        "share.NAME.level",
        "1 or 2",
        "1",
        "vLLM's sleep levels: 1 keeps the weights of a model that sleeps in host memory, 2 drops them. Both drop its KV cache.",
        "1: the host needs memory for the weights of all models, which is not checked. 2: weights come from the disk.",
    ),
    key(
        "share.NAME.wake_bytes_per_s",
        "bytes/s, 1e6 to 1e15",
        "(required)",
        "Rate at which weights come back to each GPU. A worker wakes in `wake_ms` plus its weights per GPU over this rate.",
        "High: swaps look free. Level 1 has the rate of the GPU's link to the host, level 2 that of the disk.",
    ),
    key(
        "share.NAME.sleep_bytes_per_s",
        "bytes/s, 1e6 to 1e15; level 1",
        "(`wake_bytes_per_s`)",
        "Rate at which weights leave each GPU for host memory. A worker falls asleep in `sleep_ms` plus its weights per GPU over this \
         rate; with level 2 in `sleep_ms`.",
        "As of `wake_bytes_per_s`.",
    ),
    key(
        "share.NAME.wake_ms",
        "ms, 0 to 86,400,000",
        "0.0",
        "Time to wake up besides the weights: allocations, the engine's loop, a first step that is slower.",
        "Low: the first token after a swap is too early.",
    ),
    key(
        "share.NAME.sleep_ms",
        "ms, 0 to 86,400,000",
        "0.0",
        "Time to fall asleep besides the weights.",
        "As of `wake_ms`.",
    ),
    key(
        "share.NAME.turn_ms",
        "ms, 1 to 86,400,000",
        "5000.0",
        "Time that a model which has work stays awake while requests for another one wait. Then it admits no more, finishes what \
         runs, and sleeps.",
        "Low: most of the time goes to swaps. High: requests for the other models wait long.",
    ),
    key(
        "router.policy",
        "\"round_robin\", \"random\", \"power_of_two\", \"least_requests\", \"least_tokens\", \"kv\" or \"direct\"",
        "\"kv\"",
        "Routing policy. `direct`: the client names the worker (`x-slipstream-worker`).",
        "Policies that ignore prefixes spread a conversation over all workers.",
    ),
    key(
        "router.prefill_weight",
        "0 to 1,000,000",
        "4.0",
        "Weight of blocks left to prefill against active blocks in the cost of `kv`.",
        "Low: only load counts. High: popular prefixes overload one worker.",
    ),
    key(
        "router.temperature",
        "0 to 1,000,000",
        "0.0",
        "`kv`: 0 selects the cheapest worker; above 0, a softmax over normalized costs.",
        "High: almost random.",
    ),
    key(
        "router.kv_events",
        "true or false",
        "true",
        "Follow the engines' KV events; false: an approximate index of routed prompts.",
        "false: evictions are not visible until `approximate_ttl_s`.",
    ),
    key(
        "router.approximate_ttl_s",
        "s, 0.001 to 31,622,400",
        "120.0",
        "Time that the approximate index counts a block as cached.",
        "High: predicted hits that were evicted. Low: predicted misses that would hit.",
    ),
    key(
        "router.affinity_ttl_s",
        "s, 0 to 31,622,400",
        "0.0",
        "Keep a session (`x-session-id`) on its worker for this long after its last request; 0: no \
         affinity.",
        "High: long-lived sessions cannot leave a busy worker.",
    ),
    key(
        "router.busy_kv_share",
        "share, 0.01 to 1,000,000",
        "1.0",
        "A worker whose active blocks exceed this share of its cache is busy; if all are busy: 503. 1 or \
         more: never.",
        "Low: requests are refused although they could wait.",
    ),
    key(
        "router.busy_prefill_tokens",
        "tokens",
        "0",
        "A worker with more prompt tokens to prefill is busy; if all are busy: 503. 0: never.",
        "Low: one long prompt makes a worker busy.",
    ),
    key(
        "router.queue_max",
        "requests, 0 to 1,048,576",
        "0",
        "Limit of requests that wait in the frontend, first come first served, while every ready worker is busy. \
         Further ones get 503.",
        "High: under overload every request waits. Low: bursts are refused.",
    ),
    key(
        "router.resumes_max",
        "count, 0 to 255",
        "3",
        "Times that another worker continues an answer whose worker is lost after its first token: the prompt and the \
         tokens so far become its prompt. A request with `x-slipstream-resume: off` is excepted. For modelled engines; \
         `upstream.resume` is that of real ones.",
        "High: a request that makes its workers fail reaches as many. 0: the stream ends with an error event.",
    ),
    key(
        "router.view_interval_ms",
        "ms, 0 to 3,600,000",
        "0.0",
        "Interval between refreshes of the router's view of loads. Decisions use the view of the previous \
         interval plus the router's own routing since, so it is up to two intervals old, as between routers \
         that exchange loads. 0: always the current loads.",
        "High: requests go to workers that are no longer idle.",
    ),
    key(
        "router.kv_lag_ms",
        "ms, 0 to 3,600,000",
        "0.0",
        "Simulation only: delay from the end of a pass until the router's index has its blocks.",
        "Low: the router finds hits that are not yet visible to a live router.",
    ),
    key(
        "router.remote_prefill_tokens_min",
        "tokens",
        "0",
        "With prefill pools: a prompt with fewer tokens to compute, after reuse, is computed by its decode worker.",
        "High: long prompts delay decodes. Low: short prompts pay for a KV transfer.",
    ),
    key(
        "router.remote_prefill_queue_max",
        "tokens",
        "0",
        "With prefill pools: if the chosen prefill rank already has more prompt tokens to compute, the prompt is computed by its decode worker. 0: never.",
        "Low: prefill pools are idle while decodes are delayed.",
    ),
    key(
        "router.seed",
        "integer, 0 to 2^63 - 1",
        "0",
        "Seed of random policies.",
        "",
    ),
    key(
        "network.mode",
        "\"none\", \"flows\" or \"packets\"",
        "\"none\"",
        "`flows`: transfers between workers share links fairly (`docs/twin.md`). Live, KV transfers take the modelled time. `packets`: those that meet others are simulated packet by packet; simulation only.",
        "\"none\": KV transfers take no time.",
    ),
    key(
        "network.nic_bits_per_s",
        "bits/s, 1e3 to 1e16",
        "400000000000.0",
        "Each network interface of a worker, in each direction; a GPU has its own unless `nics_per_host` is set. The default is a DGX H100's.",
        "",
    ),
    key(
        "network.gpus_per_host",
        "GPUs, 0 to 1,024; for \"flows\" and \"packets\"",
        "0",
        "GPUs of a host; 0: those of one worker. Workers fill hosts in order. Collectives of a worker with more GPUs use the network, and transfers between workers of one host do not. Simulation only.",
        "Low: steps of workers on several hosts take longer, and beside KV transfers even more.",
    ),
    key(
        "network.nics_per_host",
        "a divisor of `gpus_per_host`, or 0",
        "0",
        "Network interfaces of a host, shared evenly by its GPUs; 0: one per GPU.",
        "",
    ),
    key(
        "network.host_bits_per_s",
        "bits/s, 1e3 to 1e16",
        "3600000000000.0",
        "Rate between GPUs of one host, per GPU in each direction. The default is NVLink of an H100.",
        "",
    ),
    key(
        "network.frontend_bits_per_s",
        "bits/s, 1e3 to 1e16",
        "100000000000.0",
        "The frontend's interface in each direction.",
        "",
    ),
    key(
        "network.hop_latency_us",
        "us, 0 to 1,000,000",
        "1.0",
        "Latency per link; two links to a worker under the same switch, four to others.",
        "",
    ),
    key(
        "network.workers_per_leaf",
        "workers",
        "0",
        "Workers under one leaf switch; 0: all of them.",
        "",
    ),
    key(
        "network.uplink_bits_per_s",
        "bits/s, 1e3 to 1e16, or 0",
        "0.0",
        "Total rate of a leaf switch's links to the spine, in each direction; 0: no limit.",
        "Low: KV transfers between leaves slow each other down.",
    ),
    key(
        "network.spines",
        "switches, 1 to 64",
        "1",
        "Spine switches. A leaf switch has a link to each, of an equal part of `uplink_bits_per_s`. `flows`: as one link. `packets`: each connection takes one of them, by a hash.",
        "High: transfers whose connections share a link take longer.",
    ),
    key(
        "network.reroute_ms",
        "ms, 0 to 1,000,000; for \"packets\"",
        "0.0",
        "From the failure or repair of a link until connections take other paths.",
        "High: packets are lost for longer.",
    ),
    key(
        "network.background",
        "path; for \"packets\"",
        "(none)",
        "File of `slipstream net run` whose flows share the network, relative to the cluster file. Its host `n` is the network interface `n`, counted over the GPUs of all workers; the last one is the frontend's.",
        "",
    ),
    key(
        "network.messages",
        "true or false",
        "false",
        "Simulation only: whether requests and answers use the network too, between frontend and workers.",
        "true: every pass is an event, so the simulation takes longer.",
    ),
    key(
        "network.request_token_bytes",
        "bytes, 0 to 4,096",
        "4",
        "Bytes per prompt token in a request.",
        "",
    ),
    key(
        "network.answer_token_bytes",
        "bytes, 0 to 65,536",
        "8",
        "Bytes per answer token in a worker's frame.",
        "",
    ),
    key(
        "network.packet_bytes",
        "bytes, 256 to 65,000; for \"packets\"",
        "4096",
        "Payload of a packet.",
        "High: fewer events, and coarser queues.",
    ),
    key(
        "host.mode",
        "\"none\", \"ideal\" or \"threads\"",
        "\"none\"",
        "`ideal`: the frontend's work waits for a free core and takes the time below. `threads`: it is done by threads, as that \
         of the engines, and a CPU scheduler runs them. Simulation only.",
        "\"none\": TTFT excludes the frontend's time.",
    ),
    key(
        "host.cpus",
        "cores, 1 to 4,096; for \"threads\" to 1,024",
        "4",
        "Cores of the frontend; with \"threads\" CPUs of the host, on which the engines' threads run too.",
        "Low: requests and tokens wait for each other.",
    ),
    key(
        "host.parse_us",
        "us",
        "26.0",
        "Read and check a request. The defaults of this table are measurements of Slipstream's own frontend.",
        "",
    ),
    key(
        "host.tokenize_token_ns",
        "ns",
        "115.0",
        "Tokenize and hash, per prompt token.",
        "",
    ),
    key("host.route_us", "us", "17.0", "Choose a worker.", ""),
    key(
        "host.dispatch_us",
        "us",
        "3.0",
        "Submit a request to its worker.",
        "",
    ),
    key(
        "host.frame_us",
        "us",
        "6.0",
        "Read a worker's frame of tokens (one per pass) and write it to clients.",
        "",
    ),
    key("host.token_ns", "ns", "190.0", "Render, per token.", ""),
    key(
        "host.scheduler",
        "\"eevdf\" or \"slipstream\"; for \"threads\", as all below",
        "\"eevdf\"",
        "The host's CPU scheduler: a model of Linux's own, or the program of `slipstream sched run`. A process simulates \
         one host with the second at a time: further runs of a sweep wait.",
        "",
    ),
    key(
        "host.llcs",
        "caches, 1 to 256",
        "1",
        "Last-level caches, of `host.cpus` / `host.llcs` CPUs each (1 to 64).",
        "",
    ),
    key(
        "host.frontends",
        "threads, 1 to 1,024",
        "1",
        "API servers of one thread each. Requests and engines are divided among them.",
        "Low: requests and tokens wait for the thread, even on idle CPUs.",
    ),
    key(
        "host.tokenizers",
        "threads, 0 to 1,024",
        "0",
        "Threads that tokenize prompts for the API servers (woken by futex, which answer by eventfd). 0: API servers \
         tokenize themselves.",
        "0: tokens wait behind long prompts.",
    ),
    key(
        "host.detokenizers",
        "threads, 0 to 1,024",
        "0",
        "Threads that render and write tokens. 0: API servers do.",
        "",
    ),
    key(
        "host.background",
        "threads, 0 to 1,024",
        "0",
        "Threads of other programs on the host, which compute without a pause.",
        "",
    ),
    key(
        "host.step_us",
        "us",
        "0.0",
        "Work of an engine's thread per step: with `engine.async_scheduling` for the next step while one runs, else before \
         each step. At 0 step times contain it.",
        "High without asynchronous scheduling: it counts twice where step times contain it.",
    ),
    key(
        "host.connector_us",
        "us",
        "0.0",
        "Work of a thread at the end of each KV transfer.",
        "",
    ),
    key(
        "host.wake_by",
        "\"pipe\", \"unix\", \"tcp\", \"epoll\", \"eventfd\" or \"futex\"",
        "\"unix\"",
        "How API servers and engines wake each other. The first four tell the CPU scheduler that the waker is about to wait.",
        "",
    ),
    key(
        "host.wake_idle_us",
        "us",
        "(idle states of an Intel server)",
        "Time to wake an idle CPU; measured by `slipstream sched run --wake-idle-us auto`. The default is 3 to 134 us, by the \
         time for which the CPU idled.",
        "",
    ),
    key(
        "kv.hand_over",
        "\"pull\" or \"push\"",
        "\"pull\"",
        "With prefill pools: `pull`: the decode worker fetches the KV of a computed prompt when blocks are free. `push`: it reserves blocks first, and the prefill worker sends. Real engines: always `pull`.",
        "pull: the prefill worker's blocks stay occupied until the decode worker has free ones. push: the decode worker's blocks are reserved while the prompt waits.",
    ),
    key(
        "autoscale.policy",
        "\"none\", \"utilization\", \"queue\", \"slo\", \"predictive\" or \"custom\"",
        "\"none\"",
        "How many of a pool's workers run. Of every pool, unless `pool.NAME.autoscale` has its own. utilization: requests that \
         wait or run, over `max_num_seqs` of all workers; queue: requests that wait, per worker; slo: mean TTFT of the last \
         interval over its objective; predictive: as utilization, at the load that the trend of the arrival rate leads to; \
         custom: a Python function (docs/python.md). Simulated, new workers take requests after `engine.startup_s`, with an \
         empty cache; workers to stop take no new requests and end theirs. `serve` starts and stops none: it publishes the \
         number (docs/autoscale.md).",
        "",
    ),
    key(
        "autoscale.target",
        "0.01 to 1,000,000",
        "(0.8; queue: 4)",
        "The value to keep. utilization, predictive: workers are added and removed in proportion. queue, slo: added in proportion, \
         doubled at most; removed one by one while the value is below half of it. Differences within 10 % change nothing.",
        "Low: more workers than needed. High: requests wait until new workers have started.",
    ),
    key(
        "autoscale.interval_s",
        "s, 0.1 to 86,400",
        "15.0",
        "Time between decisions. Default: Kubernetes' autoscaler's.",
        "High: late decisions.",
    ),
    key(
        "autoscale.cooldown_s",
        "s, 0 to 86,400",
        "300.0",
        "Time after any change without a removal; a removal follows the highest recommendation in it. Default: Kubernetes' \
         autoscaler's window.",
        "Low: workers stop between bursts, and their caches are lost.",
    ),
    key(
        "autoscale.workers_min",
        "1 to `workers_max`",
        "1",
        "Fewest workers that run.",
        "",
    ),
    key(
        "autoscale.workers_max",
        "1 to `pool.NAME.workers`; with `engines`: 1 to 4,096, and needed",
        "(`pool.NAME.workers`)",
        "Most workers that run.",
        "Low: requests wait under load.",
    ),
    key(
        "autoscale.workers_start",
        "`workers_min` to `workers_max`",
        "(`workers_min`)",
        "Workers that run at the start. Simulation only: a server starts from the workers that it has.",
        "",
    ),
    key(
        "autoscale.trend_s",
        "s, 2 to 1,000 intervals",
        "(8 intervals)",
        "predictive: time over which a line is fitted to the arrival rate, by least squares.",
        "Low: noise is taken for a trend. High: a new trend is noticed late.",
    ),
    key(
        "autoscale.lookahead_s",
        "s, 0 to 86,400",
        "(`engine.startup_s` and one interval)",
        "predictive: how far ahead the line is read.",
        "Low: workers are ready after the load that needs them. High: they wait for it.",
    ),
    key(
        "autoscale.ttft_s",
        "s, 0.001 to 86,400",
        "(none)",
        "slo: the objective of TTFT in `serve`, which needs it. Simulated, objectives are those of `--slo` or of the classes; \
         requests without one have this.",
        "",
    ),
    key(
        "event.kind",
        "\"crash\", \"drain\", \"slow\", \"link\", \"uplink\", \"gpu\", \"kv_loss\", \"kv_late\", \"frontend\", \"partition\" or \"upgrade\"; needed",
        "(none)",
        "`[[event]]`: a fault (`docs/twin.md` has the rules). Of a worker: crash: it stops and loses its state; drain: it takes no new requests; slow: its passes take `factor` times as long; link: its interface has `share` of its rate; gpu: its passes do not end, until it is lost `detect_s` later; kv_loss, kv_late: its KV events do not reach the router, or `delay_ms` later. Of others: uplink: the link between `leaf` and `spine` is down; frontend: it stops, and loses its streams; partition: `workers` and all others, the frontend included, do not reach each other; upgrade: the workers of `pool` drain and restart, one after another. Simulation only.",
        "",
    ),
    key(
        "event.at_s",
        "s, 0 to 31,622,400; needed",
        "(none)",
        "When.",
        "",
    ),
    key(
        "event.until_s",
        "s, above `at_s`",
        "(none: it never ends; gpu: the worker restarts at once)",
        "End of the fault. A crashed worker restarts then, and is ready `startup_s` later.",
        "",
    ),
    key(
        "event.worker",
        "number; needed for faults of a worker",
        "(none)",
        "The worker, numbered over all pools in file order from 0.",
        "",
    ),
    key(
        "event.workers",
        "numbers; needed for \"partition\"",
        "(none)",
        "The workers on one side. The frontend and all other workers are on the other.",
        "",
    ),
    key(
        "event.pool",
        "name of a pool; for \"upgrade\"",
        "(none: all pools)",
        "The pool whose workers are replaced.",
        "",
    ),
    key(
        "event.factor",
        "0.001 to 1,000,000; needed for \"slow\"",
        "(none)",
        "Factor on the duration of its passes.",
        "",
    ),
    key(
        "event.share",
        "0 to 1; needed for \"link\"; for \"kv_loss\" 1.0 if not set",
        "(none)",
        "link: remaining share of its interface's rate; 0: it is down. kv_loss: share of its KV events that is lost.",
        "",
    ),
    key(
        "event.leaf",
        "number; needed for \"uplink\"",
        "(none)",
        "The leaf switch whose link is down: that of worker `leaf * network.workers_per_leaf`.",
        "",
    ),
    key(
        "event.spine",
        "number below `network.spines`; for \"uplink\"",
        "0",
        "The spine switch at the other end of the link.",
        "",
    ),
    key(
        "event.delay_ms",
        "ms, 0 to 3,600,000; needed for \"kv_late\"",
        "(none)",
        "Additional delay of its KV events.",
        "",
    ),
    key(
        "event.detect_s",
        "s, 0 to 31,622,400; for \"gpu\"",
        "0.0",
        "From the loss of the GPU until the worker ends. Until then its requests stand still, and it gets new ones.",
        "High: as with a collective that waits for its own timeout.",
    ),
    key(
        "event.peer_deadline_s",
        "s, 0 to 31,622,400; for \"partition\"",
        "5.0",
        "Silence after which the frontend counts a worker as lost: `--peer-deadline` of live processes.",
        "Low: short partitions make prompts be computed again. High: streams stand still for longer.",
    ),
    key(
        "event.drain_timeout_s",
        "s, 0 to 31,622,400; for \"upgrade\"",
        "(`live.drain_timeout_s`)",
        "Time for a worker's open requests to end. Then they continue on other workers.",
        "",
    ),
    key(
        "live.listen",
        "\"ADDRESS:PORT\"",
        "\"127.0.0.1:8000\"",
        "Address to listen on; port 0 selects a free one.",
        "0.0.0.0 makes the server reachable from other machines.",
    ),
    key(
        "live.reuse_port",
        "true or false",
        "false",
        "Whether further processes of the same user may listen on the same address (`SO_REUSEPORT`), to replace a process \
         without failed requests (`docs/reliability.md`).",
        "true: a second server that was started by mistake takes a part of the clients, instead of an error.",
    ),
    key(
        "live.speedup",
        "0 to 1e12",
        "1.0",
        "Divides modelled time; 0: no waiting at all.",
        "High: the CPU becomes the bottleneck, and latencies measure it instead of the model.",
    ),
    key(
        "live.shards",
        "threads, 0 to 255",
        "0",
        "Frontend shards; 0: half of the cores, at least 1.",
        "High: shards and engine threads compete for cores.",
    ),
    key(
        "live.engine_threads",
        "threads, 0 to 1,024",
        "0",
        "Engine threads; 0: one per 8 workers, at most cores - 1.",
        "Low: with many workers, passes end late at a high speed-up. High: more wake-ups.",
    ),
    key(
        "live.api_keys_file",
        "path",
        "(none: no key needed)",
        "File of API keys, one per line, in addition to those in `SLIPSTREAM_API_KEYS` (comma separated). A key may be \
         followed by its name and limits; `docs/engines.md` has the format.",
        "",
    ),
    key(
        "live.admin_key_file",
        "path",
        "(none)",
        "File with the key of the admin paths of modelled engines: `/admin/faults`, which shows and changes \
         `[live.faults]`, and the routes of `live.management`. Without it there is no `/admin/faults` (404). \
         A router uses `upstream.admin_key_file` instead.",
        "Who has the key can make all requests fail.",
    ),
    key(
        "live.access_log",
        "path, or \"-\": standard output",
        "(none)",
        "File to which a JSON line is appended per request; `docs/engines.md` has the fields. SIGHUP opens it anew. Lines \
         that cannot be written in time are dropped and counted.",
        "On: names of keys and models, paths and lengths are on the disk.",
    ),
    key(
        "live.otlp_endpoint",
        "URL, such as \"http://127.0.0.1:4318\"",
        "(none)",
        "OpenTelemetry collector that gets a span per sampled request: OTLP over HTTP, JSON, at `/v1/traces` below this URL. \
         `docs/engines.md` has the attributes. Spans that it does not take in time are dropped and counted.",
        "On: ids, paths and models of requests leave this process.",
    ),
    key(
        "live.management",
        "true or false",
        "false",
        "Serve vLLM's routes for operators: `/sleep`, `/wake_up`, `/is_sleeping`, `/reset_prefix_cache`, and those that load and unload \
         LoRA adapters.",
        "On, without a key: every client can stop the server's answers. If the server has API keys, `live.admin_key_file` is required.",
    ),
    key(
        "live.trace_sample",
        "0 to 1",
        "0.0",
        "Share of requests without a `traceparent` that get one which is marked as sampled, for engines and for \
         `live.otlp_endpoint`. With an access log all others get one that is not.",
        "High: engines, and the server itself, export many spans.",
    ),
    key(
        "live.body_bytes_max",
        "bytes, 1,024 to 1,073,741,824",
        "8388608",
        "Largest request body.",
        "Low: long prompts get 413. High: a few clients can fill the memory.",
    ),
    key(
        "live.header_bytes_max",
        "bytes, 1,024 to 1,048,576",
        "16384",
        "Largest request head; also the limit of buffered answer per connection.",
        "Low: clients behind proxies that add headers get 431. High: streams need more memory.",
    ),
    key(
        "live.read_timeout_s",
        "s, 0.01 to 86,400",
        "10.0",
        "Time limit for a request's head, and for its body after that.",
        "High: slow clients hold connections. Low: clients on slow links are disconnected.",
    ),
    key(
        "live.streams_max",
        "streams, 1 to 16,777,216",
        "65536",
        "Limit of open streams, over all shards; further requests get 503.",
        "High: memory grows with it.",
    ),
    key(
        "live.stream_buffer_bytes_max",
        "bytes, 4,096 to 1,073,741,824",
        "4194304",
        "Limit of unread answer per stream; a stream beyond it is closed.",
        "Low: clients that pause briefly are disconnected. High: slow clients can fill the memory.",
    ),
    key(
        "live.write_timeout_s",
        "s, 0.01 to 86,400",
        "60.0",
        "A stream whose client reads nothing for this time is closed.",
        "High: dead clients hold their sequences' blocks.",
    ),
    key(
        "live.request_timeout_s",
        "s, 0 to 86,400",
        "0.0",
        "Time limit of a request; 0: none.",
        "Low: long answers are truncated.",
    ),
    key(
        "live.idle_timeout_s",
        "s, 0.01 to 86,400",
        "60.0",
        "An HTTP/2 connection without a request, or a duplex request without a turn, is closed after this time.",
        "High: silent clients hold connections and streams. Low: clients that pause must connect again.",
    ),
    key(
        "live.memory_max",
        "bytes, 0 or 16,777,216 to 1,125,899,906,842,624",
        "0",
        "Memory for clients' bodies, answers, buffers and connections; 0: half of what the host or its control group has. \
         New requests get 503 from seven eighths of it on, and one client may take half.",
        "Low: requests get 503 under load. High: clients can fill the memory of the host.",
    ),
    key(
        "live.answer_bytes_max",
        "bytes, 65,536 to 1,099,511,627,776",
        "268435456",
        "Limit of an answer that is not streamed, by its `n`, `max_tokens` and `logprobs`.",
        "Low: long answers with log probabilities get 400. High: one request keeps a shard busy for long.",
    ),
    key(
        "live.connections_max",
        "connections, 1 to 16,777,216",
        "65536",
        "Limit of open client connections; further ones are closed. Lowered at start, with a line in the log, to what the limit of open files has room for: half of it with engines, to which each request needs a connection.",
        "High: needs as many file descriptors, and 16 KiB of memory for each.",
    ),
    key(
        "live.client_connections_max",
        "connections, 0 to 16,777,216",
        "0",
        "Limit of open connections from one address (IPv6: one /64); 0: seven eighths of `connections_max`.",
        "Low: clients behind one proxy are closed. High: one address can take all connections.",
    ),
    key(
        "live.client_streams_max",
        "streams, 0 to 16,777,216",
        "0",
        "Limit of open streams of one client (an API key, or an address if there are no keys); 0: seven eighths of \
         `streams_max`. Further requests get 429.",
        "High: one client can take all streams.",
    ),
    key(
        "live.connection_streams_max",
        "streams, 1 to 16,777,216",
        "4096",
        "Limit of open streams of one connection; further requests get 429.",
        "Low: HTTP/2 proxies need several connections.",
    ),
    key(
        "live.cors_origins",
        "origins, comma separated, or \"*\"",
        "\"\"",
        "Origins of browser pages that may use the API; empty: none.",
        "\"*\" without API keys opens the server to every page that a user on this network visits.",
    ),
    key(
        "live.drain_timeout_s",
        "s, 0 to 86,400",
        "30.0",
        "Time for open requests to finish after SIGINT or SIGTERM; then they end with an error.",
        "Low: long answers are truncated at each restart. High: a restart takes this long.",
    ),
    key(
        "live.events.bus",
        "\"none\", \"in-process\", \"zmq\", \"nats\"",
        "\"none\"",
        "Transport of forward-pass metrics and KV events; see `docs/events.md`.",
        "",
    ),
    key(
        "live.events.fpm",
        "boolean",
        "true",
        "Publish forward-pass metrics.",
        "",
    ),
    key(
        "live.events.kv",
        "boolean",
        "true",
        "Publish KV events.",
        "On: a request keeps its tokens (4 bytes each), because events name them.",
    ),
    key(
        "live.events.fpm_endpoint",
        "\"tcp://ADDRESS:PORT\"",
        "\"tcp://127.0.0.1:5556\"",
        "ZeroMQ: forward-pass metrics of all ranks are published here; port 0 selects a free one.",
        "`*` as address makes it reachable from other machines.",
    ),
    key(
        "live.events.kv_endpoint",
        "\"tcp://ADDRESS:PORT\"",
        "\"tcp://127.0.0.1:5557\"",
        "ZeroMQ: KV events of the first rank are published here; rank n uses the port n above.",
        "If one of these ports is in use, the server does not start.",
    ),
    key(
        "live.events.replay_endpoint",
        "\"tcp://ADDRESS:PORT\"",
        "(none: past KV events are not kept)",
        "ZeroMQ: the first rank answers requests for past KV events here; rank n at the port n above.",
        "",
    ),
    key(
        "live.events.kv_topic",
        "string of at most 255 bytes",
        "\"\"",
        "ZeroMQ: topic of KV events, as in vLLM.",
        "Subscribers of another topic receive nothing.",
    ),
    key(
        "live.events.nats_url",
        "\"nats://HOST:PORT\"",
        "\"nats://127.0.0.1:4222\"",
        "NATS: the server. It may start later, stop and return.",
        "",
    ),
    key(
        "live.events.subject_prefix",
        "words with dots between",
        "\"slipstream\"",
        "Subjects, and ZeroMQ topics of metrics, have this prefix.",
        "Two clusters with one prefix on one server are indistinguishable.",
    ),
    key(
        "live.events.queue_bytes_max",
        "bytes, 65,536 to 4,294,967,296",
        "8388608",
        "Limit of queued events, per engine thread and kind, and in ZeroMQ per subscriber; beyond it the oldest are dropped.",
        "Low: a short pause of the reader loses events. High: a stalled reader uses memory.",
    ),
    key(
        "live.events.replay_batches_max",
        "batches, 0 to 16,777,216",
        "10000",
        "Batches of KV events kept per rank for replay, within eight times `queue_bytes_max`.",
        "Low: a subscriber that missed more cannot catch up. High: memory grows with it.",
    ),
    key(
        "live.events.interval_ms",
        "ms, 0 to 1,000",
        "5.0",
        "Minimum interval between sends; the first event after a pause is sent at once.",
        "High: events arrive late. 0: one wake-up per pass, thousands per second at high speed-ups.",
    ),
    key(
        "live.faults.error_429",
        "chance, 0 to 1",
        "0.0",
        "Requests that get 429 instead of an answer. The rates of this table may be 1 in all; a request has one fault at most.",
        "",
    ),
    key(
        "live.faults.error_500",
        "chance, 0 to 1",
        "0.0",
        "Requests that get 500 instead of an answer.",
        "",
    ),
    key(
        "live.faults.stall",
        "chance, 0 to 1",
        "0.0",
        "Requests whose stream pauses once, behind one of its first 8 pieces. Answers that are not streamed are sent as always.",
        "",
    ),
    key(
        "live.faults.stall_s",
        "s, 0 to 86,400",
        "10.0",
        "How long it pauses.",
        "Beyond `live.write_timeout_s` the server ends the stream.",
    ),
    key(
        "live.faults.cut",
        "chance, 0 to 1",
        "0.0",
        "Requests whose stream's connection is closed behind one of its first 8 pieces.",
        "",
    ),
    key(
        "live.faults.seed",
        "whole number",
        "0",
        "Decides which requests have faults, by their number since the rates were set.",
        "",
    ),
    key(
        "live.autoscale.file",
        "path",
        "(none)",
        "JSON file with the numbers of workers that `[autoscale]` wants, replaced as a whole at each decision; docs/autoscale.md \
         has its fields.",
        "",
    ),
    key(
        "live.autoscale.webhook",
        "URL",
        "(none)",
        "Address that gets the same JSON by POST at each decision, such as \"http://127.0.0.1:9000/scale\", or `https://`. While \
         one is under way, only the newest waits.",
        "Any status but 2xx is a failure: the next decision is sent in any case.",
    ),
    key(
        "live.autoscale.webhook_timeout_s",
        "s, 0.01 to 60",
        "5.0",
        "Time limit of one POST.",
        "High: a receiver that hangs delays the next number.",
    ),
    key(
        "live.autoscale.webhook_retries_max",
        "0 to 10",
        "2",
        "Further tries of a POST that failed, 0.2 s and then twice as long apart. A newer number ends them.",
        "",
    ),
    key(
        "live.autoscale.webhook_token_file",
        "path",
        "(none)",
        "File with a bearer token for the webhook, read for each POST.",
        "",
    ),
    key(
        "upstream.connect_timeout_s",
        "s, 0.001 to 86,400",
        "3.0",
        "Time limit of a connection attempt to an engine.",
        "Low: busy engines count as failed. High: clients wait for a dead host.",
    ),
    key(
        "upstream.first_byte_timeout_s",
        "s, 0.001 to 86,400",
        "600.0",
        "Time limit from a request to the first byte of its answer; then 504. An answer that is not streamed has its first byte at its end.",
        "Low: long answers that are not streamed are cut. High: a stalled engine holds its requests.",
    ),
    key(
        "upstream.idle_timeout_s",
        "s, 0.001 to 86,400",
        "300.0",
        "Time limit between two pieces of an answer; then the engine counts as lost for this request. Comments, blank lines, events without data and `ping` events are no pieces: they do not extend it.",
        "Low: streams are cut while an engine computes long prompts, also if it keeps the connection open by comments. High: a stalled engine holds its streams.",
    ),
    key(
        "upstream.keep_alive_s",
        "s, 0.001 to 86,400",
        "4.0",
        "Idle connections to engines are closed after this. uvicorn, which vLLM and SGLang use, closes its side after 5 s.",
        "Above the engine's own limit: requests meet a connection that is closing, and are sent again.",
    ),
    key(
        "upstream.connections_idle_max",
        "connections, 0 to 65,536",
        "256",
        "Limit of idle connections per engine and shard.",
        "Low: a connection per request.",
    ),
    key(
        "upstream.health_interval_s",
        "s, 0.001 to 86,400",
        "2.0",
        "Interval of health checks per engine.",
        "High: a stopped engine is found by failing requests first.",
    ),
    key(
        "upstream.health_timeout_s",
        "s, 0.001 to 86,400",
        "3.0",
        "Time limit of a health check. A check that timed out is repeated at once, so a hung engine is down after `failures_max` times this.",
        "Low: an engine that is busy counts as failed. High: requests wait longer for a hung engine.",
    ),
    key(
        "upstream.models_interval_s",
        "s, 0.001 to 86,400",
        "30.0",
        "Interval at which an engine's models are listed again.",
        "High: adapters that were loaded later get 404 for longer.",
    ),
    key(
        "upstream.failures_max",
        "failures, 1 to 1,000,000",
        "3",
        "Failures in a row (refused or lost connections, answers of 500 and above, health checks) after which an engine gets no requests. A refused connection counts at once.",
        "Low: one bad request ejects an engine.",
    ),
    key(
        "upstream.ejection_s",
        "s, 0.001 to 86,400",
        "5.0",
        "Time without requests after that. Then one request probes the engine: if it fails, the time doubles.",
        "Low: clients of a failing engine wait for retries.",
    ),
    key(
        "upstream.ejection_s_max",
        "s, 0.001 to 86,400",
        "120.0",
        "Limit of that time.",
        "High: an engine that recovered stays idle.",
    ),
    key(
        "upstream.outlier_latency",
        "times, 0 or 1.5 to 1,000",
        "0.0",
        "Factor on the median of an engine's peers above which its mean time to the first byte, or between two pieces of a stream, ejects it for `ejection_s` times its number of ejections; 0: off.",
        "Low: an engine with longer prompts is taken for a slow one.",
    ),
    key(
        "upstream.outlier_errors",
        "share, 0 to 1",
        "0.0",
        "Share of failed requests at which an engine is ejected likewise, if its peers' median is below half of this share; 0: off.",
        "Low: a few bad requests eject an engine.",
    ),
    key(
        "upstream.outlier_interval_s",
        "s, 0.1 to 86,400",
        "10.0",
        "Interval of the comparison, and of the latencies in `/health` and `slipstream top`.",
        "Low: few requests are compared.",
    ),
    key(
        "upstream.outlier_requests_min",
        "requests, 1 to 1,000,000",
        "20",
        "Minimum of an engine's requests in an interval for it to be compared; at least three engines of a pool must reach it.",
        "Low: single slow requests decide.",
    ),
    key(
        "upstream.outlier_ejected_max",
        "share, 0 to 1",
        "0.1",
        "Share of a pool that may be out of service, for any reason, once an outlier is ejected; one engine always may.",
        "High: the others get more load, and may become outliers.",
    ),
    key(
        "upstream.retries_max",
        "engines, 0 to 64",
        "3",
        "Further engines that are tried per request before the first byte of its answer.",
        "High: a request that ends engines meets many of them.",
    ),
    key(
        "upstream.retry_budget",
        "retries per request, 0 to 10",
        "0.2",
        "Retries per request, on average over a shard; ten more at a time. Continued streams are not counted.",
        "High: retries add to an overload. 0: only those ten.",
    ),
    key(
        "upstream.resume",
        "\"off\", \"text\" or \"tokens\"",
        "\"tokens\"",
        "How a stream whose engine is lost continues on another one. \"tokens\": from its tokens if both engines run vLLM (`return_token_ids` is added to streaming requests that can continue), otherwise from its text. \"text\": from its text. `docs/engines.md` has the limits.",
        "\"text\": the continuation may differ from an undisturbed answer. \"off\": the stream ends with an error event.",
    ),
    key(
        "upstream.resume_bytes_max",
        "bytes, 1,024 to 1,073,741,824",
        "1048576",
        "Limit of an answer's bytes kept for its continuation.",
        "Low: long answers cannot continue.",
    ),
    key(
        "upstream.forward",
        "list of paths",
        "[]",
        "Further paths that are forwarded to engines: exact, or a prefix if it ends with `/`. `/v1/` and the usual inference paths always are. `/v2/` has paths of Triton and KServe that load and unload models.",
        "Paths that change an engine reach one of several.",
    ),
    key(
        "upstream.admin_key_file",
        "path",
        "(none)",
        "File with the key of the admin API, `/admin/engines`, which adds, drains and lists engines. Without it there is no such API (404).",
        "Who has the key decides where all prompts go.",
    ),
    key(
        "upstream.engines_max",
        "engines, 0 to 4,096; 0: those at start, and 8 more if there is a cluster file or an admin key",
        "0",
        "Limit of engines at a time. Slots for engines that come later are made at start; with prefill engines, as many again for those.",
        "Low: engines cannot be added. High: memory for the index, some 32 bytes per slot and block.",
    ),
    key(
        "upstream.drain_timeout_s",
        "s, 0 to 86,400",
        "600.0",
        "Time that the open requests of an engine have to end once it is removed. Streams that have not continue on other engines.",
        "Low: answers continue elsewhere that could have ended. High: an engine stays for long.",
    ),
    key(
        "upstream.dns_interval_s",
        "0.001 to 86,400",
        "5.0",
        "Interval at which the names of `pool.NAME.dns` are looked up, s. The system's resolver does not report the time to live \
         of an address.",
        "High: engines are noticed late. Low: load on the name server.",
    ),
    key(
        "upstream.kubernetes_url",
        "address",
        "(as in a pod: `KUBERNETES_SERVICE_HOST` and `_PORT`)",
        "Kubernetes' API server, for `pool.NAME.endpoint_slices`. `http://` is for `kubectl proxy`: no token is sent.",
        "",
    ),
    key(
        "upstream.kubernetes_namespace",
        "namespace",
        "(the pod's)",
        "Namespace of the EndpointSlices.",
        "",
    ),
    key(
        "upstream.kubernetes_token_file",
        "path",
        "(the pod's)",
        "File with the bearer token, read for each request.",
        "Missing or without rights: 401 or 403, and the engines stay as they are.",
    ),
    key(
        "upstream.kubernetes_ca_file",
        "path",
        "(the pod's)",
        "PEM file of the authorities that sign the API server's certificate, which is always verified.",
        "",
    ),
];

/// `docs/cluster-file.md`.
pub fn markdown() -> String {
    let mut out = String::from(INTRODUCTION);
    let mut section = "";
    for key in KEYS {
        let (table, name) = key.path.rsplit_once('.').expect("every key is in a table");
        if table != section {
            section = table;
            write!(
                out,
                "\n## `[{table}]`\n\n| key | value | default | meaning | when it is off |\n\
                 | --- | --- | --- | --- | --- |\n"
            )
            .expect("a String takes all");
        }
        let default = match key.default.strip_prefix('(') {
            Some(words) => words.trim_end_matches(')').to_owned(),
            None => format!("`{}`", key.default),
        };
        writeln!(
            out,
            "| `{name}` | {} | {default} | {} | {} |",
            key.value, key.meaning, key.pitfall
        )
        .expect("a String takes all");
    }
    out.push_str(CLOSING);
    out
}

const INTRODUCTION: &str = "\
# The cluster file

<!-- Made from crates/core/config/src/cluster/reference.rs: `SLIPSTREAM_WRITE_DOCS=1 cargo test -p slipstream-config reference`. -->

One TOML file describes a cluster. Every key has a default; an empty file is one worker. Unknown
keys are errors, and all mistakes are reported together, each with its line and a remedy:

```text
error: cluster.toml:4:14: `engine.block_size` is 0, but must be 1 to 1024
error: cluster.toml:7:1: unknown key `engine.max_nmu_seqs`
hint: did you mean `max_num_seqs`?
```

```toml
[model]
preset = \"qwen3-32b\"

[engine]
tensor_parallel_size = 2
max_num_seqs = 128

[engine.timing]
gpu = \"h100-sxm\"

[pool.main]
workers = 8

[router]
policy = \"kv\"
```

**Layers.** A flag `--set engine.max_num_seqs=64` wins over the environment, the environment over
the file, the file over the default. A variable is named after the path, with two underscores for
each dot: `SLIPSTREAM_ENGINE__MAX_NUM_SEQS=64`. Values of flags and variables are TOML; quotes
around strings may be left out.

**Pools.** `[engine]` is where every pool starts from; `[pool.NAME.engine]` changes keys for one
pool, and wins over `[engine]` in all layers; so does `[pool.NAME.model]` over `[model]`. A file without a pool has one,
named `main`.

**Paths** in a file start from the folder of that file, those in flags and variables from the
working directory.

**`--print-config`** prints every effective value as TOML with a comment that says where it came
from; the output is a cluster file of the same cluster.

`[host]`, `[share.NAME]` and `[[event]]` are for the twin alone: a live cluster has its own. `[autoscale]` starts and stops workers in the twin; `serve`
publishes its numbers for a deployment to follow. `[network]` says, live too, how
long keys and values take from worker to worker; all else crosses the network that there is. `[prices]` and
`[power]` belong in a file of their own (`--prices FILE` of `slipstream plan` and `sweep`), and are refused here.
";

const CLOSING: &str = "
## How `num_gpu_blocks` follows from a GPU

With a `gpu` in `[engine.timing]`, and the key not given, per rank:

```text
weights   = bytes of attention, dense MLPs and embeddings / tensor_parallel_size
            + bytes of experts / (tensor_parallel_size x data_parallel_size)     (embeddings: 16 bits)
                                         (with a pipeline: both x layers of its largest stage / layers)
per_token = 2 x layers x ceil(kv_heads / tensor_parallel_size) x head_dim x bytes of kv_cache_dtype
sampling  = 24 x max_num_seqs x vocabulary
blocks    = floor((gpu_memory x gpu_memory_utilization - weights - sampling) / (per_token x block_size))
```

`layers` are those that see the whole context; those with a window or a linear state are not counted
beside them, which is too little for contexts up to the window. Where none sees everything
(Mistral-7B-v0.1, Phi-3) all are counted: exact up to the window, too much for longer contexts.

`sampling` is what vLLM's profiling pass holds to sample `max_num_seqs` tokens, in bytes per logit: 2
for the head's output, 4 for its copy in float32, 4 and 8 for that copy sorted and its indices, 4 for
probabilities, 1 each for the masks of top-k and top-p. vLLM takes off what it measures besides:
activations of the layers, the sort's working space, libraries, CUDA graphs. Without these the number
is high, most on small GPUs (llama-3.1-8b on an RTX 4090: 2,804, vLLM 2,593); give `num_gpu_blocks` from
vLLM's log to match a deployment. Then `sampling` is not counted.
";

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use super::*;
    use crate::cluster::file;
    use crate::doc::Doc;

    /// Every key that the parser reads, over all kinds, with its default if that is a constant.
    fn keys_read() -> BTreeMap<String, Option<String>> {
        let table = "\n[engine.timing]\nkind = \"table\"\npath = \"t.csv\"\n";
        let linear = "\n[engine.timing]\nkind = \"linear\"\nbase_ns = 1\n";
        let constant = "[engine.timing]\nkind = \"constant\"\nstep_ns = 1\n[engine.output_len]\nkind = \"constant\"\ntokens = 1";
        let mut keys = BTreeMap::new();
        let event = "[[event]]\nkind = \"slow\"\nat_s = 1\nworker = 0\nfactor = 2\n\
                     [[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0.5\n\
                     [[event]]\nkind = \"gpu\"\nat_s = 1\nworker = 0\n\
                     [[event]]\nkind = \"kv_late\"\nat_s = 1\nworker = 0\ndelay_ms = 5\n\
                     [[event]]\nkind = \"partition\"\nat_s = 1\nworkers = [0]\n\
                     [[event]]\nkind = \"upgrade\"\nat_s = 1\n";
        let pipeline = "[engine]\npipeline_parallel_size = 2\n[engine.lora]\nmax_loras = 1\n";
        let experts = "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 8\n\
                       enable_expert_parallel = true\n";
        let packets = "[network]\nmode = \"packets\"\n[host]\nmode = \"threads\"\n";
        let hosts = "[network]\nmode = \"flows\"\nworkers_per_leaf = 1\nuplink_bits_per_s = 1e11\ngpus_per_host = 8\n\
                     [[event]]\nkind = \"uplink\"\nat_s = 1\nleaf = 0\n";
        let engines = "[pool.main]\nengines = [\"http://a:1\"]\n";
        let gpu = "[link.l]\nbytes_per_s = 1e9\n[gpu.g]\nlike = \"h100-sxm\"\nlink = \"l\"\n";
        let prefill = "[pool.main]\nengines = [\"http://a:1\"]\nrole = \"prefill\"\n[pool.d]\nengines = [\"http://b:1\"]\n";
        let tls = "[pool.main]\nengines = [\"https://a\"]\n";
        let tables = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n\
                         [engine.disk_tier]\ngib = 1\nbytes_per_s = 1e9\n\
                         [engine.peer_tier]\nenabled = true\n\
                         [engine.speculation]\nnum_speculative_tokens = 1\nmethod = \"mtp\"\nacceptance = [0.5]\n";
        let encoder = "[engine.encoder]\nenabled = true\nparameters = 1e9\n";
        let share = "[pool.main]\n[pool.d]\n[pool.d.model]\nname = \"d\"\n[share.s]\npools = [\"main\", \"d\"]\n\
                     wake_bytes_per_s = 1e9\n";
        let autoscale = "[autoscale]\npolicy = \"predictive\"\n";
        let by_slo = "[autoscale]\npolicy = \"slo\"\n[live.autoscale]\nwebhook = \"http://a:1\"\n";
        for text in [
            "", table, linear, constant, event, engines, tls, gpu, autoscale, by_slo, tables,
            prefill, packets, hosts, pipeline, experts, encoder, share,
        ] {
            let doc = Doc::parse("", text.as_bytes());
            let (_, settings) = file::read(doc, |_: &Path| Ok(Vec::new())).expect(text);
            let of_other = |path: &str| path.starts_with("pool.d.");
            for setting in settings.iter().filter(|of| !of_other(&of.path)) {
                let path = setting.path.replace("pool.main.engine.", "engine.");
                let path = path.replace("pool.main.autoscale.", "autoscale.");
                let path = path
                    .replace("gpu.g.", "gpu.NAME.")
                    .replace("link.l.", "link.NAME.")
                    .replace("share.s.", "share.NAME.")
                    .replace("event[0]", "event")
                    .replace("event[1]", "event")
                    .replace("event[2]", "event")
                    .replace("event[3]", "event")
                    .replace("event[4]", "event")
                    .replace("event[5]", "event");
                let default = setting
                    .value
                    .clone()
                    .filter(|_| setting.origin.to_string() == "default");
                let entry = keys
                    .entry(path.replace("pool.main", "pool.NAME"))
                    .or_insert(None);
                *entry = entry.take().or(default);
            }
        }
        keys
    }

    #[test]
    fn every_key_is_described_and_every_description_is_of_a_key() {
        let described: BTreeSet<&str> = KEYS.iter().map(|k| k.path).collect();
        assert_eq!(described.len(), KEYS.len(), "a key twice");
        let keys = keys_read();
        let mut read: BTreeSet<&str> = keys.keys().map(String::as_str).collect();
        read.insert("pool.NAME.engine"); // tables, described separately
        read.insert("pool.NAME.model");
        assert_eq!(described, read);
    }

    #[test]
    fn defaults_are_described_as_they_are() {
        let keys = keys_read();
        for key in KEYS.iter().filter(|key| !key.default.starts_with('(')) {
            assert_eq!(keys[key.path].as_deref(), Some(key.default), "{}", key.path);
        }
    }

    #[test]
    fn the_document_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/cluster-file.md");
        if std::env::var_os("SLIPSTREAM_WRITE_DOCS").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, markdown()).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == markdown(),
            "docs/cluster-file.md is stale; run SLIPSTREAM_WRITE_DOCS=1 cargo test -p slipstream-config reference"
        );
    }
}
