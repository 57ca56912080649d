//! How GPUs divide a model: tensors, stages, ranks and experts.

use super::{EngineKeys, TimingConfig};
use crate::doc::{Origin, Table};
use crate::preset::ModelShape;

/// Pipeline parallelism: each stage has some of the layers, and passes them on to the next.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineConfig {
    /// Layers of each stage, in order. At least two stages.
    pub layers: Vec<u32>,
    /// Time to send one token's activations to the next stage, ns.
    pub send_ns_per_token: f64,
    /// Time from the end of a stage until the first of its bytes arrives, ns.
    pub latency_ns: f64,
}

impl PipelineConfig {
    /// Number of stages.
    pub fn stages(&self) -> u32 {
        u32::try_from(self.layers.len()).unwrap_or(u32::MAX)
    }
}

/// How GPUs divide the model.
pub(super) struct Parallel {
    pub(super) tensor: u32,
    /// Whether `tensor` divides the model evenly.
    pub(super) splits: bool,
    /// Layers of each stage of the pipeline; one without.
    pub(super) stages: Vec<u32>,
    pub(super) data: u32,
    /// Whether ranks begin every step together.
    pub(super) barrier: bool,
    pub(super) experts: bool,
    pub(super) imbalance: Option<f64>,
}

impl Parallel {
    /// Of something that all layers together have in equal parts, the part of the stage with the most layers.
    pub(super) fn of_stage(&self, bytes: u64) -> u64 {
        let most = self.stages.iter().copied().max().unwrap_or(1);
        let all: u32 = self.stages.iter().sum();
        (bytes * u64::from(most)).div_ceil(u64::from(all.max(1)))
    }
}

/// Layers of each of `stages` stages.
///
/// Source: vLLM, `get_pp_indices` in `vllm/distributed/utils.py`: what is left of an equal division goes to the stages
/// before the last one, from the back.
pub(in crate::cluster) fn layers_of_stages(layers: u32, stages: u32) -> Vec<u32> {
    let left = layers % stages;
    (0..stages)
        .map(|stage| layers / stages + u32::from(stage + left + 1 >= stages && stage + 1 < stages))
        .collect()
}

/// Whether `tensor` GPUs can share the model.
fn check_split(t: &Table<'_>, shape: &ModelShape, tensor: u32) -> bool {
    let splits = shape.divides_into(tensor);
    if !splits {
        let fitting: Vec<String> = (1..=64)
            .filter(|&tp| shape.divides_into(tp))
            .map(|tp: u32| tp.to_string())
            .collect();
        t.error(
            "tensor_parallel_size",
            format!(
                "`tensor_parallel_size` is {tensor}, but {} has {} attention heads, {} \
                 key-value heads and an MLP width of {}, which do not all split evenly",
                shape.name,
                shape.attention_heads,
                shape.kv_heads,
                shape.mlp_width(),
            ),
            format!("one of {}", fitting.join(", ")),
        );
    }
    splits
}

pub(super) fn read_parallel(t: &Table<'_>, shape: &ModelShape, timing: &TimingConfig) -> Parallel {
    let tensor = EngineKeys::tensor_parallel_size().read(t);
    let splits = check_split(t, shape, tensor);
    let stages: u32 = EngineKeys::pipeline_parallel_size().read(t);
    if stages > shape.layers {
        t.error(
            "pipeline_parallel_size",
            format!(
                "`pipeline_parallel_size` is {stages}, but {} has {} layers",
                shape.name, shape.layers
            ),
            format!("set it to {} or less", shape.layers),
        );
    }
    let data = EngineKeys::data_parallel_size().read(t);
    let mixture = shape.experts.is_some();
    let calibrated = matches!(timing, TimingConfig::Calibrated { .. });
    let experts = EngineKeys::enable_expert_parallel().read(t);
    if experts && !(mixture && calibrated) {
        let reason = if mixture {
            "only `timing.kind` \"calibrated\" knows the exchange of tokens between experts"
                .to_owned()
        } else {
            format!("{} has no experts", shape.name)
        };
        t.error(
            "enable_expert_parallel",
            format!("`enable_expert_parallel` is true, but {reason}"),
            "set it to false",
        );
    }
    if !experts {
        t.unused(
            "expert_imbalance",
            "enable_expert_parallel",
            "`enable_expert_parallel` is false",
        );
    }
    let imbalance = EngineKeys::expert_imbalance().read(t);
    let barrier = read_barrier(t, shape, data, stages);
    // Such times are those of one deployment, as it is.
    let stated = !matches!(timing, TimingConfig::Roofline { .. });
    if data > 1 && mixture && !calibrated && !(barrier && stated) {
        t.error(
            "data_parallel_size",
            format!(
                "`data_parallel_size` is {data}, but {} is a mixture of experts: its ranks \
                 share the experts and meet in every step, which only `timing.kind` \"calibrated\" models",
                shape.name
            ),
            "use that kind, or set it to 1 with more `workers` (each with all experts)",
        );
    }
    Parallel {
        tensor,
        splits,
        stages: layers_of_stages(shape.layers, stages),
        data,
        barrier,
        experts,
        imbalance,
    }
}

fn read_barrier(t: &Table<'_>, shape: &ModelShape, data: u32, stages: u32) -> bool {
    let key = "data_parallel_barrier";
    let barrier = EngineKeys::data_parallel_barrier().read(t);
    if data == 1 {
        return false; // one rank waits for no other
    }
    let reason = if shape.experts.is_none() {
        format!(
            "the ranks of {}, which has no experts, never meet",
            shape.name
        )
    } else if stages > 1 {
        format!(
            "`pipeline_parallel_size` is {stages}, and pipelines whose ranks meet are not modelled"
        )
    } else {
        return barrier;
    };
    if barrier {
        t.error(
            key,
            format!("`{key}` is true, but {reason}"),
            "set it to false",
        );
    }
    false
}

/// Bytes of an activation between two stages: 16 bits.
const ACTIVATION_BYTES: f64 = 2.0;

pub(super) fn read_pipeline(
    t: &Table<'_>,
    shape: &ModelShape,
    timing: &TimingConfig,
    parallel: &Parallel,
    drafts: bool,
) -> Option<PipelineConfig> {
    let stages = parallel.stages.len();
    if stages == 1 {
        for key in ["pipeline_link_bytes_per_s", "pipeline_latency_us"] {
            t.unused(
                key,
                "pipeline_parallel_size",
                "`pipeline_parallel_size` is 1",
            );
        }
        return None;
    }
    let link = EngineKeys::pipeline_link_bytes_per_s().field(t);
    let link = match timing {
        TimingConfig::Roofline { gpu, .. } | TimingConfig::Calibrated { gpu, .. } => {
            let origin = Origin::Derived(format!("link of {}", gpu.name));
            Some(link.or_from(origin, gpu.link_bytes_per_s))
        }
        _ => link.optional(),
    };
    let latency_us = EngineKeys::pipeline_latency_us().read(t);
    if drafts {
        t.error(
            "pipeline_parallel_size",
            format!("`pipeline_parallel_size` is {stages}, and pipelines that verify drafts are not modelled"),
            "set it to 1, or remove [engine.speculation]",
        );
    }
    let bytes = f64::from(shape.hidden_size) * ACTIVATION_BYTES;
    Some(PipelineConfig {
        layers: parallel.stages.clone(),
        send_ns_per_token: link.map_or(0.0, |bytes_per_s| bytes / bytes_per_s * 1e9),
        latency_ns: latency_us * 1e3,
    })
}
