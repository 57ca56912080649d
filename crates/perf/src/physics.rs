//! How long one step takes, term by term. Equations and symbols: `docs/step-time.md`.

use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{Attention, Gpu, ModelShape};

use crate::deployment::{Formats, Framework, Parallel, generation};
use crate::profile::Params;

const NS: f64 = 1e9;
const US: f64 = 1e3;
/// Activations are 16 bits in every format of the weights.
const ACTIVATION_BYTES: f64 = 2.0;

/// Work of one step on each attention-data rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Sequences that decode one token each.
    pub decodes: f64,
    /// Tokens of context that they attend to, summed.
    pub decode_context: f64,
    /// Sequences in prefill.
    pub prefills: f64,
    /// Prompt tokens computed.
    pub prefill_tokens: f64,
    /// (Query, key) pairs that causal attention scores for them.
    pub prefill_pairs: f64,
}

impl Load {
    /// `decodes` sequences that attend to `context` tokens each.
    pub fn decode(decodes: f64, context: f64) -> Load {
        Load {
            decodes,
            decode_context: decodes * context,
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

/// Matrix products with one set of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Gemm {
    row_ns: f64,
    weights_ns: f64,
}

impl Gemm {
    /// Root of squares: measured kernels take 1.4 times the larger of the two at the ridge.
    fn ns(self, rows: f64) -> f64 {
        (self.row_ns * rows).hypot(self.weights_ns)
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
    /// ns per token of context that a layer of full attention reads, all such layers.
    context_ns: f64,
    /// The same of layers with a window, and the window, tokens.
    window_ns: f64,
    window: f64,
    /// Most tokens that sparse attention reads; infinity: all.
    sparse: f64,
    /// ns per token of context beyond those, which an index reads.
    index_ns: f64,
    pair_ns: f64,
    window_pair_ns: f64,
    /// ns per token: element-wise kernels.
    token_ns: f64,
    /// ns per decode: state of linear attention.
    state_ns: f64,
    /// ns per step and per token: collectives.
    collective_ns: [f64; 2],
    /// ns per step and per sequence.
    overhead_ns: [f64; 2],
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
        let tokens = tokens * self.ranks;
        // Uniform routing: an expert is left alone by n tokens with probability untouched^n.
        let touched = 1.0 - libm::exp(self.untouched_ln * tokens);
        // Kernels compute whole tiles: a touched expert costs rows that it has no tokens for.
        let rows = tokens * self.per_token * self.imbalance + touched * self.count * self.tile;
        (self.row_ns * rows).hypot(self.weights_ns * touched)
    }
}

impl Physics {
    /// The step time of `shape` on GPUs of one kind.
    pub fn new(
        shape: &ModelShape,
        gpu: &Gpu,
        formats: Formats,
        parallel: Parallel,
        framework: Framework,
        params: &Params,
    ) -> Physics {
        let p = |name: &str| params.shared(name);
        let own = |name| params.own(framework, name);
        let tp = f64::from(parallel.tensor.max(1));
        let hidden = f64::from(shape.hidden_size);
        let layers = f64::from(shape.layers);
        let expert_layers = f64::from(shape.expert_layers());
        let bandwidth = gpu.memory_bytes_per_s;

        // FLOP/s that products in `format` reach.
        let reached = |format: Dtype, kind: &str| {
            let share = |bits: &str| params.shared(&format!("{kind}_{bits}"));
            let unpacked = gpu.bf16_flops * share("bf16") * p("weight_only");
            match format {
                Dtype::Bf16 => gpu.bf16_flops * share("bf16"),
                Dtype::Fp8 | Dtype::Int8 => gpu.fp8_flops.map_or(unpacked, |f| f * share("fp8")),
                Dtype::Nvfp4 | Dtype::Mxfp4 => gpu.fp4_flops.map_or(unpacked, |f| f * share("fp4")),
                Dtype::Int4 => unpacked,
            }
        };
        let gemm = |params: f64, format: Dtype| Gemm {
            row_ns: 2.0 * params / reached(format, "gemm") * NS,
            weights_ns: params * format.bytes() / (bandwidth * p("gemm_memory")) * NS,
        };
        let shared = shape.dense_mlp_params() as f64;
        let dense = [
            gemm(
                shape.attention_params_total() as f64 / tp,
                formats.attention,
            ),
            gemm(shared / tp, formats.mlp),
            // Every GPU has the whole router.
            gemm(expert_layers * shape.router_params() as f64, Dtype::Bf16),
        ];
        let head = gemm(shape.embedding_params() as f64 / tp, Dtype::Bf16);

        let group = f64::from((parallel.expert_tensor * parallel.expert).max(1));
        let experts = shape.experts.map(|e| {
            let one = expert_layers * shape.mlp_params() as f64 / group;
            let count = f64::from(e.count);
            Experts {
                row_ns: 2.0 * one / reached(formats.experts, "expert") * NS,
                weights_ns: one * count * formats.experts.bytes()
                    / (bandwidth * p("expert_memory"))
                    * NS,
                untouched_ln: libm::log1p(-(f64::from(e.per_token) / count).min(1.0 - 1e-9)),
                per_token: f64::from(e.per_token),
                count,
                tile: p("expert_tile"),
                ranks: f64::from(parallel.attention_data.max(1)),
                imbalance: 1.0
                    + if parallel.expert > 1 {
                        p("imbalance")
                    } else {
                        0.0
                    },
            }
        });

        let stream = |bytes: f64| bytes / (bandwidth * p("stream_memory")) * NS;
        let heads = f64::from(shape.attention_heads) / tp;
        let full = f64::from(shape.full_attention_layers());
        let kv = formats.kv_cache.bytes();
        let score =
            |width: f64| 4.0 * heads * width / (gpu.bf16_flops * p("attention_compute")) * NS;
        // Key-value heads are split down to one on each GPU.
        let of_head =
            2.0 * (f64::from(shape.kv_heads) / tp).max(1.0) * f64::from(shape.head_dim) * kv;
        let (mut window_ns, mut window, mut window_pair_ns) = (0.0, f64::INFINITY, 0.0);
        let (mut sparse, mut index_ns, mut state_ns) = (f64::INFINITY, 0.0, 0.0);
        let mut context_ns = full * stream(of_head);
        let mut pair_ns = full * score(f64::from(shape.head_dim));
        let mut projected = (f64::from(shape.attention_heads) + f64::from(shape.kv_heads))
            * f64::from(shape.head_dim);
        let (mut latent_layers, mut linear_layers) = (0.0, 0.0);
        match shape.attention {
            Attention::Full => {}
            Attention::Windowed { tokens, layers } => {
                window = f64::from(tokens);
                window_ns = f64::from(layers) * stream(of_head);
                window_pair_ns = f64::from(layers) * score(f64::from(shape.head_dim));
            }
            Attention::Linear {
                layers,
                value_heads,
                head_dim,
                ..
            } => {
                linear_layers = f64::from(layers);
                let width = f64::from(head_dim);
                // The state in 32 bits is read and written.
                state_ns =
                    linear_layers * stream(f64::from(value_heads) / tp * width * width * 8.0);
            }
            Attention::Latent {
                kv_rank,
                rope_dim,
                nope_dim,
                value_dim,
                sparse_tokens,
                ..
            } => {
                latent_layers = layers;
                let [rank, rope, nope, value] =
                    [kv_rank, rope_dim, nope_dim, value_dim].map(f64::from);
                // Decodes absorb the projections: every head scores the compressed vector.
                let absorbed = 2.0 * heads * (2.0 * rank + rope)
                    / (gpu.bf16_flops * p("attention_compute"))
                    * NS;
                context_ns = full * (stream((rank + rope) * kv) + absorbed);
                // Prompts are scored with keys and values unpacked.
                pair_ns = full * score((nope + rope + value) / 2.0);
                projected = f64::from(shape.attention_heads) * (nope + rope);
                if sparse_tokens > 0 {
                    sparse = f64::from(sparse_tokens);
                    // An index of 128 bytes per token and layer.
                    index_ns = full * stream(128.0);
                }
            }
        }

        let width = match shape.experts {
            None => f64::from(shape.intermediate_size) / tp,
            Some(e) => {
                f64::from(e.per_token) * f64::from(e.intermediate_size)
                    / f64::from(parallel.expert_tensor.max(1))
                    + f64::from(e.shared_size) / tp
            }
        };
        let scattered = shape.experts.map_or(0.0, |e| 2.0 * f64::from(e.per_token)) * hidden;
        let elements = 8.0 * hidden + 2.0 * projected / tp + 3.0 * width + scattered;
        let token_ns = layers * stream(elements * ACTIVATION_BYTES);

        let link = gpu.link_bytes_per_s * p("link");
        let mut collective_ns = [0.0; 2];
        if parallel.tensor > 1 {
            // After attention, and after the MLP unless experts exchange tokens instead.
            let each = layers
                * if parallel.attention_data > 1 {
                    1.0
                } else {
                    2.0
                };
            collective_ns[0] += each * p("reduce_us") * US;
            collective_ns[1] +=
                each * 2.0 * (tp - 1.0) / tp * ACTIVATION_BYTES * hidden / link * NS;
        }
        if parallel.attention_data > 1 && parallel.expert > 1 {
            let reach = f64::from(parallel.expert);
            let per_token = shape
                .experts
                .map_or(0.0, |e| f64::from(e.per_token))
                .min(reach);
            // Tokens leave in 8 bits and come back in 16.
            collective_ns[0] += expert_layers * 2.0 * p("exchange_us") * US * libm::log2(reach);
            collective_ns[1] += expert_layers * 3.0 * per_token * hidden / link * NS;
        }

        let hopper = generation(gpu.name) == "hopper";
        let layer_us = layers * own("layer_us") * if hopper { p("hopper") } else { 1.0 }
            + expert_layers * own("expert_layer_us")
            + latent_layers * p("latent_us")
            + linear_layers * p("linear_us");
        Physics {
            dense,
            head,
            experts,
            stage: 1.0 / f64::from(parallel.pipeline.max(1)),
            context_ns,
            window_ns,
            window,
            sparse,
            index_ns,
            pair_ns,
            window_pair_ns,
            token_ns,
            state_ns,
            collective_ns,
            overhead_ns: [
                layer_us * US + own("step_ms") * 1e6,
                own("sequence_us") * US,
            ],
        }
    }

    /// Where the time of a step on `load` goes.
    pub fn terms(&self, load: &Load) -> Terms {
        // A pipeline works on as many parts of a batch as it has stages, one after the other.
        let decodes = load.decodes * self.stage;
        let tokens = decodes + load.prefill_tokens;
        let context = load.decode_context * self.stage;
        let mean = if decodes > 0.0 {
            context / decodes
        } else {
            0.0
        };
        let attended = decodes * mean.min(self.sparse);
        let scored = if load.prefill_tokens > 0.0 {
            load.prefill_pairs / load.prefill_tokens
        } else {
            0.0
        };
        Terms {
            dense: self.dense.iter().map(|gemm| gemm.ns(tokens)).sum::<f64>()
                + self.head.ns(decodes + load.prefills),
            experts: self.experts.map_or(0.0, |experts| experts.ns(tokens)),
            attention: self.context_ns * attended
                + self.index_ns * context
                + self.window_ns * decodes * mean.min(self.window)
                + load.prefill_tokens
                    * (self.pair_ns * scored.min(self.sparse)
                        + self.window_pair_ns * scored.min(self.window))
                + self.state_ns * decodes
                + self.token_ns * tokens,
            collectives: self.collective_ns[0] + self.collective_ns[1] * tokens,
            overhead: self.overhead_ns[0] + self.overhead_ns[1] * decodes,
        }
    }

    /// Length of a step on `load`, ns.
    pub fn ns(&self, load: &Load) -> f64 {
        self.terms(load).total()
    }
}
