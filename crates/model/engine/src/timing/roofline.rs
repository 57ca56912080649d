//! Step times from a model's shape and a GPU's peaks.
//!
//! Every part of a pass is bound by arithmetic, by memory or by a link; the equations, symbols and
//! sources stand in `docs/step-time.md`, with how far the result is off from reference tables.

use slipstream_base::width::round_u64;
use slipstream_config::cluster::Dtype;
use slipstream_config::preset::{Gpu, Link, ModelShape};

use super::{Moved, StepLoad, StepTime};

// Shares of the peaks that kernels reach, fitted to measured kernels of vLLM 0.19 (LLMServingSim's
// profiles, MIT: Llama-3.1-8B and Qwen3-32B, TP1 and TP2, 1 to 2,048 tokens, on an RTX PRO 6000
// and an RTX 4090; the test `efficiencies_are_what_the_kernel_profiles_say` repeats the fit).
// Nothing here is fitted to the reference table that the roofline is checked against.

/// Matrix products, of the tensor peak, on GPUs without a figure of their own ([`Gpu::gemm_compute`]): mean error 4.8 %
/// over 608 layers, with [`GEMM_MEMORY`].
const GEMM_COMPUTE: f64 = 0.75;
/// Weights streamed by matrix products, of the memory bandwidth.
const GEMM_MEMORY: f64 = 0.85;
/// KV cache streamed by decode attention, of the memory bandwidth: 0.85 to 0.96 from 64 sequences of
/// 2,048 tokens on, in the same profiles. Also used for element-wise kernels.
const STREAM_MEMORY: f64 = 0.90;
/// Prefill attention, of the 16-bit tensor peak: 0.38 to 0.60, median 0.50, for chunks of 1,024 and 2,048 tokens
/// that attend to 2,048 and more, in the same profiles (RTX PRO 6000).
const ATTENTION_COMPUTE: f64 = 0.50;

/// Kernels of a layer that cost their start and little else when the batch is small, ns: two norms
/// (2.4 µs each), rotary embedding (2.7), activation (2.7), attention (8.4), of the same profiles at
/// one token.
const LAYER_FIXED_NS: f64 = 18_600.0;
/// The norms of query and key, ns.
const QK_NORM_FIXED_NS: f64 = 2_000.0;
/// Embedding (3 µs) and sampling of one sequence (25 µs), ns.
const PASS_FIXED_NS: f64 = 28_000.0;

/// Latency of an all-reduce, ns: base and per step of the ring, which takes `2 (n - 1)` steps.
/// Source: NCCL, `src/tuning/cost_model.cc`, `baseLatencies` and `hwLatencies`, ring with protocol LL.
const ALL_REDUCE_BASE_NS: f64 = 6_600.0;
const FABRIC_STEP_NS: f64 = 600.0;
const PCIE_STEP_NS: f64 = 1_000.0;
/// Bandwidth that NCCL expects of a link: 20.6 of 25 GB/s per NVLink of Hopper (20.0 of Ampere, 40.1 of 50 of
/// Blackwell), 12 of 16 GB/s of PCIe 3.0 x16. Source: NCCL, `src/graph/topo.h`.
const FABRIC_BANDWIDTH: f64 = 0.82;
const PCIE_BANDWIDTH: f64 = 0.75;

/// Activations are 16 bits in every format of the weights.
const ACTIVATION_BYTES: f64 = 2.0;
const NS: f64 = 1e9;

/// A roofline of one model on one GPU type. All fields are per pass and GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    dense: Gemm,
    head: Gemm,
    experts: Option<ExpertGemm>,
    /// ns per (query, key) pair of prefill.
    attention_pair_ns: f64,
    /// ns per token of context read.
    context_ns: f64,
    /// Times as much for decodes in a pass with prefill.
    mixed_reads: f64,
    /// ns of element-wise work per token.
    elementwise_ns: f64,
    /// ns of sampling per sequence.
    sampling_ns: f64,
    /// ns per token of all-reduced activations.
    all_reduce_ns: f64,
    /// ns of all-reduces in an empty pass.
    all_reduce_fixed_ns: f64,
    fixed_ns: f64,
}

/// Matrix products with one set of weights.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Gemm {
    /// ns of arithmetic per row.
    row_ns: f64,
    /// ns to stream the weights.
    weights_ns: f64,
}

impl Gemm {
    /// Root of squares: the larger of the two far from the ridge, and 1.4 times either at it, as
    /// measured kernels do. (A plain maximum is 20 to 30 % too fast around the ridge.)
    fn ns(self, rows: f64) -> f64 {
        let compute = self.row_ns * rows;
        (compute * compute + self.weights_ns * self.weights_ns).sqrt()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct ExpertGemm {
    /// Row cost of one token in its experts; weights of all experts.
    gemm: Gemm,
    /// Share of the experts of a layer that one token leaves alone: `1 - per_token / count`.
    untouched: f64,
}

impl ExpertGemm {
    fn ns(self, tokens: u64) -> f64 {
        // Uniform routing: an expert is left alone by n tokens with probability untouched^n.
        let touched = 1.0 - power(self.untouched, tokens);
        Gemm {
            weights_ns: self.gemm.weights_ns * touched,
            ..self.gemm
        }
        .ns(tokens as f64)
    }
}

/// `base^exponent` by squaring; the same bits on every machine, which `powi` does not promise.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

/// Where the time of a pass goes, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Breakdown {
    /// Matrix products of attention projections, MLP and output head.
    pub gemm: f64,
    /// Matrix products of experts.
    pub experts: f64,
    /// Attention.
    pub attention: f64,
    /// Norms, rotary embedding, activation, sampling.
    pub elementwise: f64,
    /// All-reduces of the tensor-parallel group.
    pub all_reduce: f64,
    /// Kernel starts.
    pub fixed: f64,
}

impl Breakdown {
    /// The whole pass, ns.
    pub fn total(&self) -> f64 {
        self.gemm + self.experts + self.attention + self.elementwise + self.all_reduce + self.fixed
    }
}

impl Roofline {
    /// A roofline of `shape` on `tensor_parallel` GPUs (at least 1), with weights in `dtype` and keys
    /// and values in `kv_dtype`.
    pub fn new(
        shape: &ModelShape,
        gpu: &Gpu,
        tensor_parallel: u32,
        dtype: Dtype,
        kv_dtype: Dtype,
    ) -> Roofline {
        let tp = f64::from(tensor_parallel.max(1));
        let layers = f64::from(shape.layers);
        let hidden = f64::from(shape.hidden_size);
        let peak = match dtype {
            Dtype::Bf16 => gpu.bf16_flops,
            _ => gpu.fp8_flops.unwrap_or(gpu.bf16_flops),
        };
        let of_compute = gpu.gemm_compute.unwrap_or(GEMM_COMPUTE);
        let heads = f64::from(shape.attention_heads) / f64::from(shape.kv_heads.max(1));
        let gemm = |params: f64, rows_of: f64, peak: f64, bytes: f64| Gemm {
            row_ns: 2.0 * rows_of / (peak * of_compute) * NS,
            weights_ns: params * bytes / (gpu.memory_bytes_per_s * GEMM_MEMORY) * NS,
        };
        let stream = |bytes: f64| bytes / (gpu.memory_bytes_per_s * STREAM_MEMORY) * NS;

        let mut dense = layers * shape.attention_params() as f64 / tp;
        // Every GPU has the whole router.
        dense += layers * shape.router_params() as f64;
        let mlp = layers * shape.mlp_params() as f64 / tp;
        let experts = shape.experts.map(|e| ExpertGemm {
            gemm: gemm(
                mlp * f64::from(e.count),
                mlp * f64::from(e.per_token),
                peak,
                dtype.bytes(),
            ),
            untouched: 1.0 - f64::from(e.per_token) / f64::from(e.count),
        });
        if experts.is_none() {
            dense += mlp;
        }
        let head = shape.embedding_params() as f64 / tp;

        // Elements that element-wise kernels move per token and layer: two norms with residual
        // (read two, write two each), rotary embedding and norm of query and key (read and write),
        // activation (read two, write one), experts' outputs scattered and gathered.
        let qk = f64::from(shape.attention_heads + shape.kv_heads) * f64::from(shape.head_dim) / tp;
        let (width, copies) = match shape.experts {
            None => (f64::from(shape.intermediate_size), 0.0),
            Some(e) => {
                let per_token = f64::from(e.per_token);
                (per_token * f64::from(e.intermediate_size), 2.0 * per_token)
            }
        };
        let elements = 8.0 * hidden
            + if shape.qk_norm { 4.0 } else { 2.0 } * qk
            + 3.0 * width / tp
            + copies * hidden;

        // Output of attention and of the MLP, in each layer, and the embedding.
        let reduces = 2.0 * layers + 1.0;
        let (step_ns, share) = match gpu.link {
            Link::Fabric => (FABRIC_STEP_NS, FABRIC_BANDWIDTH),
            Link::Pcie => (PCIE_STEP_NS, PCIE_BANDWIDTH),
        };
        let ring = if tp > 1.0 { 2.0 * (tp - 1.0) } else { 0.0 };
        let latency = if tp > 1.0 {
            ALL_REDUCE_BASE_NS + ring * step_ns
        } else {
            0.0
        };
        let link = ring / tp * hidden * ACTIVATION_BYTES / (gpu.link_bytes_per_s * share) * NS;

        let pair_flops =
            4.0 * f64::from(shape.attention_heads) / tp * f64::from(shape.head_dim) * layers;
        let kv_bytes = shape.kv_bytes_per_token_per_gpu(tensor_parallel, kv_dtype) as f64;
        let qk_norm_ns = if shape.qk_norm { QK_NORM_FIXED_NS } else { 0.0 };
        Roofline {
            dense: gemm(dense, dense, peak, dtype.bytes()),
            // FP8 checkpoints keep the head in 16 bits.
            head: gemm(head, head, gpu.bf16_flops, Dtype::Bf16.bytes()),
            experts,
            attention_pair_ns: pair_flops / (gpu.bf16_flops * ATTENTION_COMPUTE) * NS,
            context_ns: stream(kv_bytes),
            mixed_reads: 1.0 + gpu.reads_per_head * (heads - 1.0),
            elementwise_ns: stream(layers * elements * ACTIVATION_BYTES),
            // Logits are read in 16 bits, written and read in 32.
            sampling_ns: stream(f64::from(shape.vocab_size) * 10.0),
            all_reduce_ns: reduces * link,
            all_reduce_fixed_ns: reduces * latency,
            fixed_ns: PASS_FIXED_NS + layers * (LAYER_FIXED_NS + qk_norm_ns),
        }
    }

    /// Where the time of a pass on `load` goes.
    pub fn breakdown(&self, load: &StepLoad) -> Breakdown {
        let tokens = load.tokens() as f64;
        // vLLM computes logits for one token of each sequence, and for those that it verifies.
        let sequences = f64::from(load.sequences()) + load.draft_tokens as f64;
        let reads = if load.prefill_tokens > 0 {
            self.mixed_reads
        } else {
            1.0
        };
        let context = load.prefill_context as f64 + reads * load.decode_context as f64;
        Breakdown {
            gemm: self.dense.ns(tokens) + self.head.ns(sequences),
            experts: self
                .experts
                .map_or(0.0, |experts| experts.ns(load.tokens())),
            attention: self.attention_pair_ns * load.prefill_attention as f64
                + self.context_ns * context,
            elementwise: self.elementwise_ns * tokens + self.sampling_ns * sequences,
            all_reduce: self.all_reduce_fixed_ns + self.all_reduce_ns * tokens,
            fixed: self.fixed_ns,
        }
    }
}

impl StepTime for Roofline {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        round_u64(self.breakdown(load).total())
    }

    fn moved_ns(&self, load: &StepLoad) -> Option<Moved> {
        Some(Moved {
            reduces: self.all_reduce_ns * load.tokens() as f64,
            exchanges: 0.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    use proptest::prelude::*;
    use slipstream_config::preset;

    use super::*;

    fn roofline(model: &str, gpu: &str, tp: u32, dtype: Dtype) -> Roofline {
        Roofline::new(
            preset::model(model).unwrap(),
            preset::gpu(gpu).unwrap(),
            tp,
            dtype,
            Dtype::Bf16,
        )
    }

    fn load(prefill: u32, decode: u32, context: u32) -> StepLoad {
        let mut load = StepLoad::default();
        if prefill > 0 {
            load.add_prefill(0, prefill);
        }
        (0..decode).for_each(|_| load.add_decode(context, context));
        load
    }

    /// Rows of a table against the roofline: (name, reference ms, roofline ms).
    fn against_reference() -> Vec<(String, f64, f64)> {
        let text = include_str!("reference.csv");
        let mut reader = csv::ReaderBuilder::new()
            .comment(Some(b'#'))
            .from_reader(text.as_bytes());
        reader
            .deserialize::<(String, String, u32, u32, u32, u32, f64)>()
            .map(|row| {
                let (model, gpu, tp, prefill, decode, context, step_ms) = row.unwrap();
                let load = load(prefill, decode, context);
                let ms = roofline(&model, &gpu, tp, Dtype::Bf16).step_ns(&load) as f64 / 1e6;
                let what = match (prefill, decode) {
                    (p, 0) => format!("prefill {p}"),
                    (0, d) => format!("decode {d} at {context}"),
                    (p, d) => format!("prefill {p} + decode {d} at {context}"),
                };
                (format!("{model} | {gpu} | {tp} | {what}"), step_ms, ms)
            })
            .collect()
    }

    #[test]
    fn steps_agree_with_the_reference_table_within_30_percent() {
        let rows = against_reference();
        assert_eq!(rows.len(), 32);
        for (name, reference, ms) in rows {
            let error = ms / reference - 1.0;
            assert!(
                error.abs() < 0.30,
                "{name}: {ms:.2} ms, reference {reference} ({error:+.0})"
            );
        }
    }

    #[test]
    fn the_error_table_of_the_document_is_up_to_date() {
        const MARK: &str = "<!-- errors: ";
        let mut table = String::from(
            "| model | GPU | TP | step | reference, ms | roofline, ms | error |\n\
             | --- | --- | --- | --- | --- | --- | --- |\n",
        );
        let rows = against_reference();
        for (name, reference, ms) in &rows {
            let error = 100.0 * (ms / reference - 1.0);
            writeln!(table, "| {name} | {reference} | {ms:.2} | {error:+.0} % |").unwrap();
        }
        let errors: Vec<f64> = rows
            .iter()
            .map(|(_, r, ms)| (ms / r - 1.0).abs() * 100.0)
            .collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let most = errors.iter().copied().fold(0.0, f64::max);
        writeln!(
            table,
            "\nMean absolute error {mean:.1} %, largest {most:.1} %."
        )
        .unwrap();

        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/step-time.md");
        let found = std::fs::read_to_string(&path).expect("docs/step-time.md");
        let start = found.find(MARK).expect("the mark")
            + found[found.find(MARK).unwrap()..].find('\n').unwrap()
            + 1;
        let end = found[start..]
            .find("<!-- end of errors -->")
            .expect("the end mark")
            + start;
        if std::env::var_os("SLIPSTREAM_WRITE_DOCS").is_some() {
            let text = format!("{}\n{table}\n{}", &found[..start], &found[end..]);
            std::fs::write(&path, text).unwrap();
            return;
        }
        assert!(
            found[start..end].trim() == table.trim(),
            "docs/step-time.md is stale; run SLIPSTREAM_WRITE_DOCS=1 cargo test -p slipstream-engine roofline"
        );
    }

    /// Folder of measured kernels, if this machine has it.
    fn kernel_profiles() -> Option<PathBuf> {
        let data = std::env::var_os("SLIPSTREAM_DATA").map_or(
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/data"),
            PathBuf::from,
        );
        let folder = data.join("accuracy/kernel_profiles");
        if !folder.is_dir() {
            eprintln!("skipped: no {}", folder.display());
            return None;
        }
        Some(folder)
    }

    /// (layer, tokens) -> µs of one of the profiles.
    fn profile(path: &Path) -> BTreeMap<(String, u32), f64> {
        csv::Reader::from_path(path)
            .unwrap()
            .deserialize::<(String, u32, f64)>()
            .map(|row| {
                row.map(|(layer, tokens, us)| ((layer, tokens), us))
                    .unwrap()
            })
            .collect()
    }

    #[test]
    fn efficiencies_are_what_the_kernel_profiles_say() {
        let Some(folder) = kernel_profiles() else {
            return;
        };
        type Profiles = &'static [(&'static str, &'static str, f64)];
        const PRO: Profiles = &[
            (
                "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1",
                "llama-3.1-8b",
                1.0,
            ),
            (
                "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp2",
                "llama-3.1-8b",
                2.0,
            ),
            ("RTXPRO6000/Qwen/Qwen3-32B/bf16/tp1", "qwen3-32b", 1.0),
            ("RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2", "qwen3-32b", 2.0),
        ];
        const GEFORCE: Profiles = &[(
            "RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
            "llama-3.1-8b",
            1.0,
        )];
        let cases = [
            ("rtx-pro-6000", PRO, GEMM_COMPUTE, 0.049),
            (
                "rtx-4090",
                GEFORCE,
                preset::gpu("rtx-4090").unwrap().gemm_compute.unwrap(),
                0.034,
            ),
        ];
        for (gpu, profiles, of_compute, error_max) in cases {
            let gpu = preset::gpu(gpu).unwrap();
            // All matrix products of a layer, of every profiled number of tokens:
            // ns of arithmetic and of memory at the peaks, and as measured.
            let mut points = Vec::new();
            for (path, model, tp) in profiles {
                let times = profile(&folder.join(path).join("dense.csv"));
                let shape = preset::model(model).unwrap();
                let weights = (shape.attention_params() + shape.mlp_params()) as f64 / tp;
                for ((_, tokens), _) in times.iter().filter(|((layer, _), _)| layer == "qkv_proj") {
                    let us: f64 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
                        .iter()
                        .map(|layer| times[&((*layer).to_owned(), *tokens)])
                        .sum();
                    points.push((
                        2.0 * weights * f64::from(*tokens) / gpu.bf16_flops * NS,
                        2.0 * weights / gpu.memory_bytes_per_s * NS,
                        us * 1e3,
                    ));
                }
            }
            let error = |compute: f64, memory: f64| {
                let sum: f64 = points
                    .iter()
                    .map(|&(row_ns, weights_ns, ns)| {
                        let gemm = Gemm {
                            row_ns: row_ns / compute,
                            weights_ns: weights_ns / memory,
                        };
                        (gemm.ns(1.0) / ns - 1.0).abs()
                    })
                    .sum();
                sum / points.len() as f64
            };
            assert!(points.len() >= 100, "{} points", points.len());
            let ours = error(of_compute, GEMM_MEMORY);
            assert!(ours < error_max, "{}: mean error {ours:.3}", gpu.name);
            let grid = || (60..=100).step_by(5).map(|p| f64::from(p) / 100.0);
            let best = grid()
                .flat_map(|c| grid().map(move |m| (c, m)))
                .map(|(c, m)| error(c, m))
                .fold(f64::MAX, f64::min);
            assert!(
                ours < best + 0.01,
                "{}: {ours:.3} against {best:.3}",
                gpu.name
            );
        }
        // Cost of a layer at one token, without its matrix products.
        let path = folder.join("RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1");
        let times = profile(&path.join("dense.csv"));
        let at_one = |layer: &str| times[&(layer.to_owned(), 1)];
        let attention = csv::Reader::from_path(path.join("attention.csv"))
            .unwrap()
            .deserialize::<(u32, u32, u32, u32, f64)>()
            .map(Result::unwrap)
            .find(|row| (row.0, row.1, row.2, row.3) == (0, 0, 1, 16))
            .map(|row| row.4)
            .unwrap();
        let layer = 2.0 * at_one("layernorm") + at_one("rotary_emb") + at_one("act_fn") + attention;
        assert!(
            (layer * 1e3 / LAYER_FIXED_NS - 1.0).abs() < 0.02,
            "{layer} us"
        );
    }

    #[test]
    fn attention_reaches_what_the_kernel_profiles_say() {
        let Some(folder) = kernel_profiles() else {
            return;
        };
        let gpu = preset::gpu("rtx-pro-6000").unwrap();
        let (mut compute, mut memory) = (Vec::new(), Vec::new());
        for (path, model) in [
            ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
            ("Qwen/Qwen3-32B", "qwen3-32b"),
        ] {
            let shape = preset::model(model).unwrap();
            let layers = f64::from(shape.layers);
            let pair_flops = 4.0 * f64::from(shape.attention_heads) * f64::from(shape.head_dim);
            let token_bytes = shape.kv_bytes_per_token_per_gpu(1, Dtype::Bf16) as f64 / layers;
            let path = folder
                .join("RTXPRO6000")
                .join(path)
                .join("bf16/tp1/attention.csv");
            for row in csv::Reader::from_path(path).unwrap().deserialize() {
                let (chunk, cached, decodes, context, us): (u32, u32, u32, u32, f64) = row.unwrap();
                let mut work = StepLoad::default();
                if decodes == 0 && chunk >= 1024 && chunk + cached >= 2048 {
                    work.add_prefill(cached, chunk);
                    let flops = pair_flops * work.prefill_attention as f64;
                    compute.push(flops / (us * 1e-6) / gpu.bf16_flops);
                } else if chunk == 0 && decodes >= 64 && context >= 2048 {
                    let bytes = token_bytes * f64::from(decodes) * f64::from(context);
                    memory.push(bytes / (us * 1e-6) / gpu.memory_bytes_per_s);
                }
            }
        }
        for (name, mut found, (low, high), factor) in [
            ("compute", compute, (0.37, 0.61), ATTENTION_COMPUTE),
            ("memory", memory, (0.84, 0.97), STREAM_MEMORY),
        ] {
            found.sort_by(f64::total_cmp);
            assert!(found.len() >= 10, "{name}: {} points", found.len());
            assert!(
                found[0] > low && found[found.len() - 1] < high,
                "{name}: {found:?}"
            );
            let median = found[found.len() / 2];
            assert!(
                (median / factor - 1.0).abs() < 0.05,
                "{name}: median {median}"
            );
        }
    }

    #[test]
    fn decodes_beside_prefill_read_what_the_kernel_profiles_say() {
        let Some(folder) = kernel_profiles() else {
            return;
        };
        const PRO: &[(&str, f64)] = &[
            ("RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1", 4.0),
            ("RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp2", 4.0),
            ("RTXPRO6000/Qwen/Qwen3-32B/bf16/tp1", 8.0),
            ("RTXPRO6000/Qwen/Qwen3-32B/bf16/tp2", 8.0),
            ("RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16/tp1", 8.0),
            ("RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16/tp2", 8.0),
        ];
        const GEFORCE: &[(&str, f64)] = &[("RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1", 4.0)];
        for (profiles, gpu, count) in [(PRO, "rtx-pro-6000", 45_360), (GEFORCE, "rtx-4090", 2_304)]
        {
            let factor = preset::gpu(gpu).unwrap().reads_per_head;
            let mut found = Vec::new();
            for (path, heads) in profiles {
                let times: BTreeMap<[u32; 4], f64> =
                    csv::Reader::from_path(folder.join(path).join("attention.csv"))
                        .unwrap()
                        .deserialize::<(u32, u32, u32, u32, f64)>()
                        .map(Result::unwrap)
                        .map(|(chunk, cached, decodes, context, us)| {
                            ([chunk, cached, decodes, context], us)
                        })
                        .collect();
                for (&[chunk, cached, decodes, context], us) in &times {
                    if chunk < 16 || decodes < 16 || context < 512 {
                        continue;
                    }
                    let alone = [[chunk, cached, 0, 0], [0, 0, decodes, context]];
                    if let [Some(prefill), Some(decode)] = alone.map(|key| times.get(&key)) {
                        found.push(((us - prefill) / decode - 1.0) / (heads - 1.0));
                    }
                }
            }
            assert_eq!(found.len(), count);
            found.sort_by(f64::total_cmp);
            let median = found[count / 2];
            assert!((median - factor).abs() < 0.005, "{factor}: median {median}");
        }
    }

    #[test]
    fn a_prefill_makes_decodes_read_more_where_flash_attention_2_runs() {
        let attention = |gpu: &str, prefill: u32, decode: u32| {
            roofline("qwen3-32b", gpu, 1, Dtype::Bf16)
                .breakdown(&load(prefill, decode, 2048))
                .attention
        };
        // 64 query heads, 8 of keys and values: 1 + 0.24 * 7 = 2.68 times as much.
        for (gpu, times) in [
            ("rtx-pro-6000", 2.68),
            ("a100-sxm-40gb", 2.68),
            ("h100-sxm", 1.0),
        ] {
            let beside = attention(gpu, 512, 64) - attention(gpu, 512, 0);
            let found = beside / attention(gpu, 0, 64);
            assert!((found - times).abs() < 1e-9, "{gpu}: {found}");
        }
    }

    #[test]
    fn expert_weights_are_read_as_experts_are_touched() {
        let moe = roofline("qwen3-30b-a3b", "h100-sxm", 1, Dtype::Bf16);
        let experts = |tokens| moe.breakdown(&load(0, tokens, 1)).experts;
        let all = moe.experts.unwrap().gemm.weights_ns;
        // One token touches 8 of 128; many touch all.
        assert!((experts(1) / all - 8.0 / 128.0).abs() < 1e-3);
        // 1 - (1 - 8/128)^16 = 0.644
        assert!((experts(16) / all - 0.644).abs() < 0.01);
        assert!(experts(256) / all > 0.999);
        // Arithmetic is of the chosen experts alone: a dense model of all would be 16 times slower.
        let prefill =
            |model| roofline(model, "h100-sxm", 1, Dtype::Bf16).step_ns(&load(8192, 0, 0));
        assert!(prefill("qwen3-30b-a3b") < prefill("qwen3-32b") / 4);
        let plain = roofline("qwen3-32b", "h100-sxm", 1, Dtype::Bf16).breakdown(&load(64, 0, 0));
        assert_eq!(plain.experts, 0.0);
    }

    #[test]
    fn parts_answer_to_what_drives_them() {
        let one = roofline("llama-3.1-8b", "h100-sxm", 1, Dtype::Bf16);
        let eight = roofline("llama-3.1-8b", "h100-sxm", 8, Dtype::Bf16);
        let work = load(1024, 64, 2048);
        let (one, eight) = (one.breakdown(&work), eight.breakdown(&work));
        assert_eq!(one.all_reduce, 0.0);
        assert!(eight.all_reduce > 0.0);
        assert!(
            (one.attention / eight.attention - 8.0).abs() < 1e-9,
            "heads are split"
        );
        assert!(
            (one.gemm / eight.gemm - 8.0).abs() < 1e-9,
            "weights are split"
        );
        assert!(eight.elementwise > one.elementwise / 8.0, "norms are not");
        let fp8 = roofline("llama-3.1-8b", "h100-sxm", 1, Dtype::Fp8).breakdown(&work);
        assert!(fp8.gemm < 0.6 * one.gemm);
        // PCIe makes all-reduces dear.
        let pcie = roofline("llama-3.1-8b", "l40s", 8, Dtype::Bf16).breakdown(&work);
        assert!(pcie.all_reduce > 8.0 * eight.all_reduce);
    }

    #[test]
    fn power_by_squaring() {
        assert_eq!(power(0.5, 0), 1.0);
        assert_eq!(power(0.5, 10), 1.0 / 1024.0);
        assert_eq!(power(0.999, u64::MAX), 0.0);
    }

    proptest! {
        /// More work never takes less time.
        #[test]
        fn time_rises_with_work(
            prefills in prop::collection::vec((0u32..40_000, 1u32..8192), 0..4),
            decodes in prop::collection::vec(1u32..40_000, 0..8),
            extra in (0u32..40_000, 1u32..8192),
            model in prop::sample::select(preset::MODELS.to_vec()),
            gpu in prop::sample::select(preset::GPUS.to_vec()),
            tp in 1u32..=16,
        ) {
            let mut roofline = Roofline::new(&model, &gpu, tp, Dtype::Bf16, Dtype::Bf16);
            let mut load = StepLoad::default();
            for &(context, chunk) in &prefills {
                load.add_prefill(context, chunk);
            }
            for &context in &decodes {
                load.add_decode(context, context);
            }
            let before = roofline.step_ns(&load);
            let mut more_decode = load;
            more_decode.add_decode(extra.1, extra.1);
            let mut more_prefill = load;
            more_prefill.add_prefill(extra.0, extra.1);
            prop_assert!(before > 0);
            prop_assert!(roofline.step_ns(&more_decode) >= before);
            prop_assert!(roofline.step_ns(&more_prefill) > before);
            prop_assert!(roofline.step_ns(&more_prefill) < 3_600_000_000_000);
        }
    }
}
