//! How long one step takes, term by term. Equations and symbols: `docs/step-time.md`.

use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{Attention, Gpu, Link, ModelShape};

use crate::deployment::{Formats, Framework, Parallel};
use crate::elementary;
use crate::profile::{Params, own, shared};

const NS: f64 = 1e9;
const US: f64 = 1e3;
/// Activations are 16 bits in every format of the weights.
const ACTIVATION_BYTES: f64 = 2.0;

/// All-reduces between GPUs on PCIe without peer-to-peer: latency, and share of the lane rate. Source: the settings
/// of LLMServingSim's measured servers of RTX PRO 6000 (`link_latency` 20 us, `link_bw` 16 of 64 GB/s).
const PCIE_REDUCE_US: f64 = 20.0;
const PCIE_SHARE: f64 = 0.25;

/// What kernels reach on GPUs of one generation, if they were measured one by one.
#[derive(Clone, Copy)]
struct Kernels {
    /// Of the BF16 peak: matrix products; of the memory bandwidth: their weights, and the KV cache;
    /// of the BF16 peak: attention over prompts.
    gemm_bf16: f64,
    gemm_memory: f64,
    stream_memory: f64,
    attention: f64,
    /// Time of each query head of a key-value head beyond the first, for decodes in a step with
    /// prefill, of the first one's: FlashAttention 2 no longer shares the read.
    mixed_reads: f64,
}

/// Source: LLMServingSim's kernel times of vLLM 0.19 (MIT); `docs/step-time.md` has the fit, and
/// the tests of the engine's roofline repeat it.
fn kernels(generation: &str) -> Option<Kernels> {
    let kernels = |gemm_bf16, mixed_reads| Kernels {
        gemm_bf16,
        gemm_memory: 0.85,
        stream_memory: 0.90,
        attention: 0.50,
        mixed_reads,
    };
    match generation {
        "blackwell-gddr" => Some(kernels(0.75, 0.24)),
        "ada" => Some(kernels(0.97, 0.33)),
        _ => None,
    }
}

/// Work of one step on each attention-data rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Sequences that decode one token each.
    pub decodes: f64,
    /// Tokens of context that they attend to, summed.
    pub decode_context: f64,
    /// The part of that context which is prompts: tells long prompts from long answers.
    pub decode_prompt: f64,
    /// Sequences in prefill.
    pub prefills: f64,
    /// Prompt tokens computed.
    pub prefill_tokens: f64,
    /// (Query, key) pairs that causal attention scores for them.
    pub prefill_pairs: f64,
    /// Tokens whose keys and values they read: those already cached, and their own.
    pub prefill_context: f64,
}

impl Load {
    /// `decodes` sequences that attend to `context` tokens each, of which `prompt` are their prompt.
    pub fn decode(decodes: f64, context: f64, prompt: f64) -> Load {
        Load {
            decodes,
            decode_context: decodes * context,
            decode_prompt: decodes * prompt,
            ..Load::default()
        }
    }

    /// The same step with one whole prompt of `tokens` besides.
    #[must_use]
    pub fn with_prompt(self, tokens: f64) -> Load {
        Load {
            prefills: self.prefills + 1.0,
            prefill_tokens: self.prefill_tokens + tokens,
            prefill_pairs: self.prefill_pairs + tokens * (tokens + 1.0) / 2.0,
            prefill_context: self.prefill_context + tokens,
            ..self
        }
    }
}

/// Where the time of a step goes, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// Matrix products of attention projections, dense MLPs, shared experts and the output head.
    pub dense: f64,
    /// Matrix products of routed experts.
    pub experts: f64,
    /// Attention, and element-wise kernels.
    pub attention: f64,
    /// Collectives between GPUs.
    pub collectives: f64,
    /// Kernel starts, scheduler, sampling.
    pub overhead: f64,
}

impl Terms {
    /// The whole step, ns.
    pub fn total(&self) -> f64 {
        self.dense + self.experts + self.attention + self.collectives + self.overhead
    }
}

/// Time in which collectives move bytes between GPUs, without their latency, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moved {
    /// All-reduces of GPUs that share each layer.
    pub reduces: f64,
    /// Exchanges between GPUs with different experts.
    pub exchanges: f64,
}

impl Moved {
    /// `factor` times as long.
    #[must_use]
    pub fn times(self, factor: f64) -> Moved {
        Moved {
            reduces: self.reduces * factor,
            exchanges: self.exchanges * factor,
        }
    }
}

/// The same bits on every machine, which `hypot` of the system does not promise.
fn root_of_squares(a: f64, b: f64) -> f64 {
    (a * a + b * b).sqrt()
}

/// Matrix products with one set of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Gemm {
    row_ns: f64,
    weights_ns: f64,
}

impl Gemm {
    /// Root of squares: measured kernels take 1.4 times the larger of the two at the ridge.
    fn ns(self, rows: f64) -> f64 {
        root_of_squares(self.row_ns * rows, self.weights_ns)
    }
}

/// The time of a step of one model on one kind of worker. Precomputed: a look-up costs some dozen
/// operations, whatever the load holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Physics {
    dense: [Gemm; 3],
    head: Gemm,
    experts: Option<Experts>,
    /// Sequences of a pipeline's stage per sequence of the worker.
    stage: f64,
    attention: Attending,
    /// Times as much context for decodes in a step with prefill.
    mixed_reads: f64,
    /// Times as long as alone: prompts in a step that also decodes.
    interference: f64,
    /// ns per token: element-wise kernels.
    token_ns: f64,
    /// ns per step and per token: collectives.
    collective_ns: [f64; 2],
    /// The part of the second that is bytes of all-reduces, and of exchanges of experts.
    moved_ns: Moved,
    /// ns per step and per sequence.
    overhead_ns: [f64; 2],
}

/// The time of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Attending {
    /// ns per token of context that a layer of full attention reads, all such layers.
    context_ns: f64,
    /// The same of layers with a window, and the window, tokens.
    window_ns: f64,
    window: f64,
    /// Most tokens that sparse attention reads; infinity: all.
    sparse: f64,
    /// ns per token of context whose key a sparse index reads, and per pair that the index scores, all layers.
    index_ns: f64,
    index_pair_ns: f64,
    pair_ns: f64,
    window_pair_ns: f64,
    /// ns per decode: state of linear attention.
    state_ns: f64,
    /// Elements of queries and keys of a token.
    projected: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Experts {
    /// ns of arithmetic per (token, expert) pair of all layers on one GPU.
    row_ns: f64,
    /// ns to read all experts.
    weights_ns: f64,
    /// Logarithm of the share of experts that one token leaves alone.
    untouched_ln: f64,
    per_token: f64,
    count: f64,
    tile: f64,
    /// Ranks whose tokens meet here.
    ranks: f64,
    imbalance: f64,
}

impl Experts {
    fn ns(&self, tokens: f64) -> f64 {
        self.ns_of_all(tokens * self.ranks)
    }

    /// With `tokens` on all ranks together.
    fn ns_of_all(&self, tokens: f64) -> f64 {
        // An expert is left alone by n tokens with probability untouched^n; routing that prefers some
        // experts touches fewer than uniform routing.
        let touched = 1.0 - elementary::exp(self.untouched_ln * tokens);
        // Kernels compute whole tiles: a touched expert costs rows that it has no tokens for.
        let rows = tokens * self.per_token * self.imbalance + touched * self.count * self.tile;
        root_of_squares(self.row_ns * rows, self.weights_ns * touched)
    }
}

/// A model on one kind of worker, from which the terms of a step follow.
struct Worker<'a> {
    shape: &'a ModelShape,
    gpu: &'a Gpu,
    formats: Formats,
    parallel: Parallel,
    framework: Framework,
    params: &'a Params,
    /// GPUs that share each layer.
    tp: f64,
    hidden: f64,
    layers: f64,
    expert_layers: f64,
    measured: Option<Kernels>,
    /// Shares of the peaks: arithmetic and weights of matrix products, the KV cache, attention over prompts.
    gemm_compute: f64,
    gemm_memory: f64,
    stream_memory: f64,
    attention_compute: f64,
}

impl Worker<'_> {
    fn new<'a>(
        shape: &'a ModelShape,
        gpu: &'a Gpu,
        formats: Formats,
        parallel: Parallel,
        framework: Framework,
        params: &'a Params,
    ) -> Worker<'a> {
        // Kernels that were measured on their own win over shares that explain whole steps.
        let measured = kernels(gpu.generation);
        let [gemm_compute, gemm_memory, stream_memory, attention_compute] = measured.map_or(
            [
                1.0,
                shared!(params, "gemm_memory").min(1.0),
                shared!(params, "stream_memory").min(1.0),
                shared!(params, "attention_compute").min(1.0),
            ],
            |k| {
                [
                    k.gemm_bf16 / shared!(params, "gemm_bf16"),
                    k.gemm_memory,
                    k.stream_memory,
                    k.attention,
                ]
            },
        );
        Worker {
            shape,
            gpu,
            formats,
            parallel,
            framework,
            params,
            tp: f64::from(parallel.tensor.max(1)),
            hidden: f64::from(shape.hidden_size),
            layers: f64::from(shape.layers),
            expert_layers: f64::from(shape.expert_layers()),
            measured,
            gemm_compute,
            gemm_memory,
            stream_memory,
            attention_compute,
        }
    }

    /// FLOP/s that products in `format` reach, with these shares of the peaks of BF16, FP8 and FP4.
    fn reached(&self, format: Dtype, [of_bf16, of_fp8, of_fp4]: [f64; 3]) -> f64 {
        let gpu = self.gpu;
        // A share of a peak is at most 1.
        let share = |fitted: f64| self.gemm_compute * fitted.min(1.0);
        let bf16 = gpu.bf16_flops * share(of_bf16);
        let unpacked = bf16 * shared!(self.params, "weight_only").min(1.0);
        // A format of fewer bits is never slower: kernels of more bits would run instead.
        let fp8 = |flops: f64| (flops * share(of_fp8)).max(bf16);
        match format {
            Dtype::Bf16 => bf16,
            Dtype::Fp8 | Dtype::Int8 => gpu.fp8_flops.map_or(unpacked, fp8),
            Dtype::Nvfp4 | Dtype::Mxfp4 => gpu.fp4_flops.map_or(unpacked, |flops| {
                (flops * share(of_fp4)).max(gpu.fp8_flops.map_or(bf16, fp8))
            }),
            Dtype::Int4 => unpacked,
        }
    }

    fn gemm(&self, weights: f64, format: Dtype) -> Gemm {
        let of_gemm = [
            shared!(self.params, "gemm_bf16"),
            shared!(self.params, "gemm_fp8"),
            shared!(self.params, "gemm_fp4"),
        ];
        let bandwidth = self.gpu.memory_bytes_per_s;
        Gemm {
            row_ns: 2.0 * weights / self.reached(format, of_gemm) * NS,
            weights_ns: weights * format.bytes() / (bandwidth * self.gemm_memory) * NS,
        }
    }

    /// Attention's projections, dense MLPs, and routers.
    fn dense(&self) -> [Gemm; 3] {
        let shape = self.shape;
        let mlp = shape.dense_mlp_params() as f64;
        [
            self.gemm(
                shape.attention_params_total() as f64 / self.tp,
                self.formats.attention,
            ),
            self.gemm(mlp / self.tp, self.formats.mlp),
            // Every GPU has the whole router.
            self.gemm(
                self.expert_layers * shape.router_params() as f64,
                Dtype::Bf16,
            ),
        ]
    }

    fn experts(&self) -> Option<Experts> {
        let (params, parallel) = (self.params, self.parallel);
        let of_experts = [
            shared!(params, "expert_bf16"),
            shared!(params, "expert_fp8"),
            shared!(params, "expert_fp4"),
        ];
        let format = self.formats.experts;
        let bandwidth = self.gpu.memory_bytes_per_s;
        let group = f64::from((parallel.expert_tensor * parallel.expert).max(1));
        self.shape.experts.map(|e| {
            let one = self.expert_layers * self.shape.mlp_params() as f64 / group;
            let count = f64::from(e.count);
            Experts {
                row_ns: 2.0 * one / self.reached(format, of_experts) * NS,
                weights_ns: one * count * format.bytes()
                    / (bandwidth * shared!(params, "expert_memory").min(1.0))
                    * NS,
                untouched_ln: shared!(params, "routing_skew")
                    * libm::log1p(-(f64::from(e.per_token) / count).min(1.0 - 1e-9)),
                per_token: f64::from(e.per_token),
                count,
                tile: shared!(params, "expert_tile"),
                ranks: f64::from(parallel.attention_data.max(1)),
                imbalance: 1.0
                    + if parallel.expert > 1 {
                        shared!(params, "imbalance")
                    } else {
                        0.0
                    },
            }
        })
    }

    /// Time to read `bytes` of the KV cache or of activations, ns.
    fn stream(&self, bytes: f64) -> f64 {
        bytes / (self.gpu.memory_bytes_per_s * self.stream_memory) * NS
    }

    /// Attention heads on one GPU.
    fn heads(&self) -> f64 {
        f64::from(self.shape.attention_heads) / self.tp
    }

    /// Time to score a pair of vectors of `width` in every head, ns.
    fn score(&self, width: f64) -> f64 {
        4.0 * self.heads() * width / (self.gpu.bf16_flops * self.attention_compute) * NS
    }

    fn attention(&self) -> Attending {
        let shape = self.shape;
        let full = f64::from(shape.full_attention_layers());
        let head_dim = f64::from(shape.head_dim);
        // Key-value heads are split down to one on each GPU.
        let of_head = 2.0
            * (f64::from(shape.kv_heads) / self.tp).max(1.0)
            * head_dim
            * self.formats.kv_cache.bytes();
        let mut times = Attending {
            context_ns: full * self.stream(of_head),
            window_ns: 0.0,
            window: f64::INFINITY,
            sparse: f64::INFINITY,
            index_ns: 0.0,
            index_pair_ns: 0.0,
            pair_ns: full * self.score(head_dim),
            window_pair_ns: 0.0,
            state_ns: 0.0,
            projected: (f64::from(shape.attention_heads) + f64::from(shape.kv_heads)) * head_dim,
        };
        match shape.attention {
            Attention::Full => {}
            Attention::Windowed { tokens, layers } => {
                times.window = f64::from(tokens);
                times.window_ns = f64::from(layers) * self.stream(of_head);
                times.window_pair_ns = f64::from(layers) * self.score(head_dim);
            }
            Attention::Linear {
                layers,
                value_heads,
                head_dim,
                ..
            } => {
                let width = f64::from(head_dim);
                // The state in 32 bits is read and written.
                times.state_ns = f64::from(layers)
                    * self.stream(f64::from(value_heads) / self.tp * width * width * 8.0);
            }
            Attention::Latent {
                kv_rank,
                rope_dim,
                nope_dim,
                value_dim,
                index,
                ..
            } => {
                let attention_compute = self.attention_compute;
                let [rank, rope, nope, value] =
                    [kv_rank, rope_dim, nope_dim, value_dim].map(f64::from);
                // Decodes absorb the projections: every head scores the compressed vector.
                let absorbed = 2.0 * self.heads() * (2.0 * rank + rope)
                    / (self.gpu.bf16_flops * attention_compute)
                    * NS;
                let vector = shape
                    .attention
                    .latent_bytes(self.formats.kv_cache)
                    .unwrap_or_default();
                times.context_ns = full * (self.stream(vector) + absorbed);
                // Prompts are scored with keys and values unpacked.
                times.pair_ns = full * self.score((nope + rope + value) / 2.0);
                times.projected = f64::from(shape.attention_heads) * (nope + rope);
                if let Some(index) = index {
                    times.sparse = f64::from(index.tokens);
                    // Every GPU has all heads of the index. They compute in FP8 where the GPU does.
                    let [layers, heads, width] =
                        [index.layers, index.heads, index.head_dim].map(f64::from);
                    let flops = self.gpu.fp8_flops.unwrap_or(self.gpu.bf16_flops);
                    times.index_ns = layers * self.stream(index.key_bytes() as f64);
                    times.index_pair_ns =
                        layers * 2.0 * heads * width / (flops * attention_compute) * NS;
                }
            }
        }
        times
    }

    /// Element-wise kernels, ns per token.
    fn token_ns(&self, projected: f64) -> f64 {
        let (shape, parallel) = (self.shape, self.parallel);
        let width = match shape.experts {
            None => f64::from(shape.intermediate_size) / self.tp,
            Some(e) => {
                f64::from(e.per_token) * f64::from(e.intermediate_size)
                    / f64::from(parallel.expert_tensor.max(1))
                    + f64::from(e.shared_size) / self.tp
            }
        };
        let scattered = shape.experts.map_or(0.0, |e| 2.0 * f64::from(e.per_token)) * self.hidden;
        let elements = 8.0 * self.hidden + 2.0 * projected / self.tp + 3.0 * width + scattered;
        self.layers * self.stream(elements * ACTIVATION_BYTES)
    }

    fn mixed_reads(&self) -> f64 {
        let queries = f64::from(self.shape.attention_heads) / f64::from(self.shape.kv_heads.max(1));
        match self.shape.attention {
            Attention::Latent { .. } => 1.0,
            _ => 1.0 + self.measured.map_or(0.0, |k| k.mixed_reads) * (queries - 1.0),
        }
    }

    /// ns per step and per token, and the part of the second that moves bytes.
    fn collectives(&self) -> ([f64; 2], Moved) {
        let (gpu, params, parallel) = (self.gpu, self.params, self.parallel);
        let (layers, expert_layers, hidden) = (self.layers, self.expert_layers, self.hidden);
        let (link_share, reduce_us, exchange_us) = match gpu.link {
            Link::Fabric => (
                shared!(params, "link").min(1.0),
                shared!(params, "reduce_us"),
                shared!(params, "exchange_us"),
            ),
            Link::Pcie => (PCIE_SHARE, PCIE_REDUCE_US, PCIE_REDUCE_US),
        };
        let link = gpu.link_bytes_per_s * link_share;
        let reduce_us = gpu.reduce_us.unwrap_or(reduce_us);
        let mut collective_ns = [0.0; 2];
        let mut moved_ns = Moved::default();
        if parallel.tensor > 1 {
            // After attention, and after the MLP unless experts exchange tokens instead.
            let exchanged = if parallel.attention_data > 1 && parallel.expert > 1 {
                expert_layers
            } else {
                0.0
            };
            let each = 2.0 * layers - exchanged;
            let tp = self.tp;
            collective_ns[0] += each * reduce_us * US;
            moved_ns.reduces = each * 2.0 * (tp - 1.0) / tp * ACTIVATION_BYTES * hidden / link * NS;
            collective_ns[1] += moved_ns.reduces;
        }
        if parallel.attention_data > 1 && parallel.expert > 1 {
            let reach = f64::from(parallel.expert);
            let per_token = self
                .shape
                .experts
                .map_or(0.0, |e| f64::from(e.per_token))
                .min(reach);
            // Tokens leave in 8 bits and come back in 16.
            collective_ns[0] += expert_layers * 2.0 * exchange_us * US * libm::log2(reach);
            moved_ns.exchanges = expert_layers * 3.0 * per_token * hidden / link * NS;
            collective_ns[1] += moved_ns.exchanges;
        }
        if parallel.attention_data > 1 && parallel.expert <= 1 && self.shape.experts.is_some() {
            // Every expert is divided among all ranks: each gathers the tokens of the others and scatters
            // sums back, which together is an all-reduce of all ranks' tokens.
            let ranks = f64::from(parallel.attention_data);
            collective_ns[0] += expert_layers * reduce_us * US;
            collective_ns[1] +=
                expert_layers * 2.0 * (ranks - 1.0) * ACTIVATION_BYTES * hidden / link * NS;
        }
        (collective_ns, moved_ns)
    }

    /// Kernel starts of all layers, µs per step.
    fn layer_us(&self) -> f64 {
        let (shape, formats) = (self.shape, self.formats);
        let (params, framework) = (self.params, self.framework);
        let (layers, expert_layers) = (self.layers, self.expert_layers);
        // Two products of attention and two of the MLP or of experts take activations of few bits.
        let few = |format: Dtype| match format {
            Dtype::Fp8 | Dtype::Int8 | Dtype::Nvfp4 => 2.0,
            Dtype::Bf16 | Dtype::Int4 | Dtype::Mxfp4 => 0.0,
        };
        let quantized = few(formats.attention)
            + match shape.experts {
                Some(_) => few(formats.experts),
                None => few(formats.mlp),
            };
        let (latent_layers, linear_layers) = match shape.attention {
            Attention::Latent { .. } => (layers, 0.0),
            Attention::Linear { layers, .. } => (0.0, f64::from(layers)),
            Attention::Full | Attention::Windowed { .. } => (0.0, 0.0),
        };
        let hopper = self.gpu.generation == "hopper";
        layers
            * own!(params, framework, "layer_us")
            * if hopper {
                shared!(params, "hopper")
            } else {
                1.0
            }
            + expert_layers * own!(params, framework, "expert_layer_us")
            + layers * quantized * shared!(params, "quantize_us")
            + if shape.qk_norm {
                layers * shared!(params, "norm_us")
            } else {
                0.0
            }
            + latent_layers * shared!(params, "latent_us")
            + linear_layers * shared!(params, "linear_us")
    }
}

impl Physics {
    /// The same, if the GPU whose experts have most rows has `factor` times the mean of all GPUs.
    #[must_use]
    pub fn with_expert_imbalance(mut self, factor: f64) -> Physics {
        if let Some(experts) = &mut self.experts {
            experts.imbalance = factor;
        }
        self
    }

    /// The step time of `shape` on GPUs of one kind.
    pub fn new(
        shape: &ModelShape,
        gpu: &Gpu,
        formats: Formats,
        parallel: Parallel,
        framework: Framework,
        params: &Params,
    ) -> Physics {
        let worker = Worker::new(shape, gpu, formats, parallel, framework, params);
        let attention = worker.attention();
        let (collective_ns, moved_ns) = worker.collectives();
        Physics {
            dense: worker.dense(),
            head: worker.gemm(shape.embedding_params() as f64 / worker.tp, Dtype::Bf16),
            experts: worker.experts(),
            stage: 1.0 / f64::from(parallel.pipeline.max(1)),
            mixed_reads: worker.mixed_reads(),
            // Where kernels were measured, `mixed_reads` is what fitted steps show as interference.
            interference: match worker.measured {
                Some(_) => 1.0,
                None => own!(params, framework, "interference"),
            },
            token_ns: worker.token_ns(attention.projected),
            collective_ns,
            moved_ns,
            overhead_ns: [
                worker.layer_us() * US + own!(params, framework, "step_ms") * 1e6,
                own!(params, framework, "sequence_us") * US,
            ],
            attention,
        }
    }

    /// Where the time of a step on `load` goes.
    pub fn terms(&self, load: &Load) -> Terms {
        Terms {
            attention: self.attention_ns(load),
            ..self.terms_by_count(load)
        }
    }

    /// The terms that numbers of sequences and of prompt tokens decide alone: all but attention.
    pub(crate) fn terms_by_count(&self, load: &Load) -> Terms {
        let decodes = load.decodes * self.stage;
        let tokens = decodes + load.prefill_tokens;
        Terms {
            dense: self.dense.iter().map(|gemm| gemm.ns(tokens)).sum::<f64>()
                + self.head.ns(decodes + load.prefills),
            experts: self.experts.map_or(0.0, |experts| experts.ns(tokens)),
            attention: 0.0,
            collectives: self.collective_ns[0] + self.collective_ns[1] * tokens,
            overhead: self.overhead_ns[0] + self.overhead_ns[1] * decodes,
        }
    }

    /// The part of the collectives of a step on `load` in which they move bytes.
    pub(crate) fn moved_ns(&self, load: &Load) -> Moved {
        let tokens = load.decodes * self.stage + load.prefill_tokens;
        self.moved_ns.times(tokens)
    }

    /// Time that `drafts` tokens, which sequences in decode verify, add to a step on `load`, ns. They are rows of all
    /// matrix products, the output head's too. Attention reads keys and values once for all tokens of a sequence.
    pub(crate) fn drafts_ns(&self, load: &Load, drafts: f64) -> f64 {
        let with = Load {
            prefills: load.prefills + drafts,
            prefill_tokens: load.prefill_tokens + drafts,
            ..*load
        };
        let rows = self.terms_by_count(&with).total() - self.terms_by_count(load).total();
        rows + self.token_ns * drafts
    }

    /// How much longer the experts of a step on `load` and `drafts` take if the tokens of all ranks are `all`, and not as many
    /// on each as here, ns. Negative if the others have fewer.
    pub(crate) fn experts_beside_ns(&self, load: &Load, drafts: f64, all: f64) -> f64 {
        let tokens = load.decodes * self.stage + load.prefill_tokens + drafts;
        let experts = self.experts.as_ref();
        experts.map_or(0.0, |e| e.ns_of_all(all) - e.ns(tokens))
    }

    /// Time of attention, and of element-wise kernels, ns.
    #[inline]
    pub(crate) fn attention_ns(&self, load: &Load) -> f64 {
        // A pipeline works on as many parts of a batch as it has stages, one after the other.
        let decodes = load.decodes * self.stage;
        let tokens = decodes + load.prefill_tokens;
        let context = load.decode_context * self.stage;
        let mean = if decodes > 0.0 {
            context / decodes
        } else {
            0.0
        };
        let attended = decodes * mean.min(self.attention.sparse);
        let reads = if load.prefill_tokens > 0.0 {
            self.mixed_reads
        } else {
            1.0
        };
        let read_most = self.attention.sparse * load.prefills.max(1.0);
        let scored = if load.prefill_tokens > 0.0 {
            load.prefill_pairs / load.prefill_tokens
        } else {
            0.0
        };
        self.attention.context_ns * (attended * reads + load.prefill_context.min(read_most))
            + self.attention.index_ns * context
            + self.attention.window_ns * decodes * mean.min(self.attention.window)
            + load.prefill_tokens
                * (self.attention.index_pair_ns * scored
                    + self.attention.pair_ns * scored.min(self.attention.sparse)
                    + self.attention.window_pair_ns * scored.min(self.attention.window))
            + self.attention.state_ns * decodes
            + self.token_ns * tokens
    }

    /// Times as long as alone: prompts in a step that also decodes.
    pub fn interference(&self) -> f64 {
        self.interference
    }

    /// Length of a step on `load`, ns.
    pub fn ns(&self, load: &Load) -> f64 {
        self.terms(load).total()
    }
}
