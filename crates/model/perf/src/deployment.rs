//! A deployment under load: model, GPU, formats, parallel sizes, requests; and why a row of a table is not one.

pub use slipstream_config::cluster::Framework;
pub use slipstream_config::preset::Formats;
use slipstream_config::preset::{Gpu, ModelShape};
use thiserror::Error;

/// How the GPUs of one worker share the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// GPUs that share each layer's attention.
    pub tensor: u32,
    /// Stages of a pipeline.
    pub pipeline: u32,
    /// Ranks with attention of their own, which meet at the experts of every layer.
    pub attention_data: u32,
    /// GPUs that share each expert.
    pub expert_tensor: u32,
    /// Groups of GPUs between which the experts are divided.
    pub expert: u32,
}

impl Parallel {
    /// One GPU.
    pub const ONE: Parallel = Parallel {
        tensor: 1,
        pipeline: 1,
        attention_data: 1,
        expert_tensor: 1,
        expert: 1,
    };

    /// GPUs of a worker.
    pub fn gpus(&self) -> u64 {
        u64::from(self.tensor) * u64::from(self.pipeline) * u64::from(self.attention_data)
    }
}

/// Which workers compute prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Serving {
    /// Each worker computes prompts and answers.
    Aggregated,
    /// Prefill workers compute prompts, decode workers generate.
    Disaggregated {
        /// Prefill workers.
        prefill_workers: u32,
        /// How the GPUs of each share the model.
        prefill: Parallel,
        /// Decode workers.
        decode_workers: u32,
    },
}

/// A deployment under a closed loop of equal requests.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// The model.
    pub shape: ModelShape,
    /// The GPU.
    pub gpu: Gpu,
    /// The framework.
    pub framework: Framework,
    /// Its version or image, if stated; versions differ in kernels and overheads.
    pub version: String,
    /// Formats of weights and KV cache.
    pub formats: Formats,
    /// Word for the formats together: `bf16`, `fp8`, `fp4`, `int4`, `int8`.
    pub precision: &'static str,
    /// The workers that generate.
    pub parallel: Parallel,
    /// Which workers compute prompts.
    pub serving: Serving,
    /// Input tokens of a request.
    pub isl: f64,
    /// Output tokens of a request.
    pub osl: f64,
    /// Requests under way on each attention-data rank of each worker that generates.
    pub batch: f64,
    /// Values that the row left open, as assumed.
    pub assumed: Vec<String>,
}

/// Why a row is not answered.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// A column that is needed is empty or absent.
    #[error("missing: {0}")]
    Missing(&'static str),
    /// A number is unusable.
    #[error("invalid: {column} is \"{found}\", but must be {must}")]
    Invalid {
        /// The column.
        column: &'static str,
        /// Its value in the row.
        found: String,
        /// A description of valid values.
        must: String,
    },
    /// No preset or `config.json` of this model.
    #[error("unknown model: {0}")]
    Model(String),
    /// No GPU of this name.
    #[error("unknown GPU: {0}")]
    Gpu(String),
    /// Not a framework that was calibrated.
    #[error("unknown framework: {0}")]
    Framework(String),
    /// A number format that is not modelled.
    #[error("unknown precision: {0}")]
    Precision(String),
    /// Parallel sizes that contradict each other or the model.
    #[error("impossible sizes: {0}")]
    Sizes(String),
    /// Requests longer than the model's context.
    #[error(
        "too long: isl + osl is {tokens} tokens, but {model} has a context of {limit} tokens; for a \
         longer one, give a config.json with another max_position_embeddings in --models"
    )]
    Context {
        /// Input and output tokens of a request.
        tokens: u64,
        /// The model's `max_position_embeddings`.
        limit: u32,
        /// Name of the model.
        model: String,
    },
    /// Weights, or the KV cache of a single request, are larger than the GPUs' memory.
    #[error("does not fit: {0}")]
    Memory(String),
    /// An estimate is infinite or not a number.
    #[error("no estimate: the load is beyond the range of the model")]
    NotFinite,
}

impl Deployment {
    /// `agg` or `disagg`.
    pub fn mode(&self) -> &'static str {
        match self.serving {
            Serving::Aggregated => "agg",
            Serving::Disaggregated { .. } => "disagg",
        }
    }

    /// Key of models of equal sizes, whatever they are called.
    pub fn family(&self) -> String {
        let s = &self.shape;
        let experts = s.experts.map_or(0, |e| e.count);
        format!(
            "L{}h{}H{}E{experts}",
            s.layers, s.hidden_size, s.attention_heads
        )
    }
}
