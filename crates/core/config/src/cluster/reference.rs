//! Documentation of keys that are declared elsewhere.

use crate::doc::Row;

/// A key of the cluster file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
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
pub(super) const KEYS: &[Key] = &[
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
];

/// The rows of the tables whose paths begin so.
pub(super) fn rows(of: &[&str]) -> Vec<Row> {
    let table = |key: &&Key| key.path.rsplit_once('.').map_or("", |(table, _)| table);
    let keys = of
        .iter()
        .flat_map(|of| KEYS.iter().filter(move |key| table(key) == *of));
    keys.map(|key| Row {
        path: key.path.into(),
        value: key.value.into(),
        default: (!key.default.starts_with('(')).then(|| key.default.into()),
        otherwise: key
            .default
            .strip_prefix('(')
            .map(|words| words.trim_end_matches(')')),
        meaning: key.meaning.into(),
        pitfall: key.pitfall.into(),
    })
    .collect()
}
