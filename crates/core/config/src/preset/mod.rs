//! Real models and GPUs by name, with the numbers that determine step times and KV cache sizes.
//!
//! `slipstream presets` lists them; `[model] preset` and `[engine.timing] gpu` select them.

mod class;
mod error;
mod fields;
mod files;
mod formats;
mod gpu;
mod index;
mod kept;
mod keys;
mod layers;
mod model;
mod models;
mod names;
mod python_json;
mod quantization;
mod read;

pub use error::ShapeError;
pub use files::ModelFiles;
pub use formats::Formats;
pub use gpu::{GPUS, Gpu, Link, board_power_w, gpu};
pub use model::{Attention, Experts, ModelShape, SparseIndex};
pub use models::{MODELS, model, model_names};
pub use names::find_model;
pub use read::ReadModel;
