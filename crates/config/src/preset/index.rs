//! Compares a shape with the index of its checkpoint's weights (`model.safetensors.index.json`).
//!
//! The index has the bytes of all weights together and their names, no size of each. Weights that a shape leaves out (layers of
//! multi-token prediction, encoders) are therefore estimated, and only a share of the estimates is allowed for.

use std::collections::BTreeSet;

use serde_json::Value;

use super::fields::Object;
use super::formats::Formats;
use super::model::ModelShape;
use super::python_json;
use super::read::ShapeError;
use crate::cluster::Dtype;

const FILE: &str = "model.safetensors.index.json";
/// Largest difference that norms, biases and scales explain.
const TOLERANCE: f64 = 0.03;
/// Error of the estimate of an encoder, whose blocks are of many kinds.
const MEDIA_ERROR: f64 = 0.5;
/// Error of the estimate of layers of multi-token prediction, which may be in another format.
const MTP_ERROR: f64 = 0.5;

/// Refuses a `shape` whose weights differ by more than 3 % from those that the index `text` lists; `single`: its 16-bit
/// weights are stored in 32 bits; `outer`: the whole `config.json`. Returns a note if there is no size to compare with.
pub(super) fn check(
    text: &[u8],
    shape: &ModelShape,
    single: bool,
    outer: &Object,
) -> Result<Option<String>, ShapeError> {
    let value = python_json::parse(text).map_err(|_| ShapeError::Beside(FILE))?;
    let index = value.as_object().ok_or(ShapeError::Beside(FILE))?;
    let names = index.get("weight_map").and_then(Value::as_object);
    let weights = names
        .map(|names| Weights::of(names, shape.layers))
        .unwrap_or_default();
    if let Some(layers) = weights.layers
        && layers != shape.layers
    {
        return Err(ShapeError::Size(format!(
            "`num_hidden_layers` is {}, but {FILE} in the same folder has weights of {layers} layers; both must be of \
             one model",
            shape.layers
        )));
    }
    let total = index
        .get("metadata")
        .and_then(|of| of.get("total_size"))
        .and_then(Value::as_f64);
    let Some(total) = total.filter(|total| *total > 0.0) else {
        return Ok(Some(format!(
            "{FILE} has no `total_size`: the size of the weights is not checked"
        )));
    };
    let formats = Formats::of(shape, shape.dtype());
    let scale = if single { 2.0 } else { 1.0 };
    let read = scale * formats.weight_bytes(shape, 1, 1);
    let mtp = scale * weights.mtp_bytes(shape, formats);
    let media = if weights.media {
        media_bytes(outer, shape).map(|bytes| scale * bytes)
    } else {
        Some(0.0)
    };
    let slack = TOLERANCE * total + MTP_ERROR * mtp + MEDIA_ERROR * media.unwrap_or(0.0);
    let difference = total - mtp - media.unwrap_or(0.0) - read;
    // An encoder of unknown size may be as large as it likes.
    if difference.abs() <= slack || media.is_none() && difference > 0.0 {
        return Ok(None);
    }
    let mut left_out = Vec::new();
    if mtp > 0.0 {
        left_out.push(format!(
            "about {} of multi-token prediction",
            gigabytes(mtp)
        ));
    }
    if let Some(media) = media.filter(|media| *media > 0.0) {
        left_out.push(format!("about {} of an encoder", gigabytes(media)));
    }
    let without = if left_out.is_empty() {
        String::new()
    } else {
        format!(" without {}", left_out.join(" and "))
    };
    Err(ShapeError::Size(format!(
        "its keys give {} of weights, but {FILE} in the same folder says {}{without}; a size or a format was misread, or \
         the files are of two models",
        gigabytes(read),
        gigabytes(total),
    )))
}

/// Whether the weights that the index `text` lists have an output head of their own; `None`: they have no embedding either.
pub(super) fn has_head(text: &[u8]) -> Option<bool> {
    let value = python_json::parse(text).ok()?;
    let names = value.get("weight_map")?.as_object()?;
    let has = |parts: &[&str]| {
        names.keys().any(|name| {
            name.split('.')
                .rev()
                .nth(1)
                .is_some_and(|part| parts.contains(&part))
        })
    };
    let head = has(&["lm_head", "output"]);
    (head || has(&["embed_tokens", "tok_embeddings", "word_embeddings", "wte"])).then_some(head)
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

/// Facts from the names of an index.
#[derive(Debug, Default)]
struct Weights {
    /// Layers of the language model; `None`: names of another style.
    layers: Option<u32>,
    /// Layers of multi-token prediction.
    mtp_layers: u32,
    /// Copies of an embedding among them.
    mtp_embeddings: u32,
    /// There are weights of an encoder.
    media: bool,
}

impl Weights {
    fn of(names: &Object, layers: u32) -> Weights {
        let mut found = Weights::default();
        let mut mtp = BTreeSet::new();
        for name in names.keys() {
            if is_encoder(name) {
                found.media = true;
                continue;
            }
            let layer = number_after(name, "layers.");
            let of_mtp = name.split('.').any(|part| part.starts_with("mtp"));
            if of_mtp || layer.is_some_and(|layer| layer >= layers) {
                mtp.extend(layer);
                let copy = [
                    "embed_tokens.weight",
                    "shared_head.head.weight",
                    "lm_head.weight",
                ];
                found.mtp_embeddings += u32::from(copy.iter().any(|ending| name.ends_with(ending)));
            } else if let Some(layer) = layer {
                found.layers = Some(found.layers.unwrap_or(0).max(layer + 1));
            }
        }
        // More layers than the file counts, by so many that they cannot be for prediction, are layers of the model.
        let most = mtp.iter().filter(|layer| **layer >= layers).count();
        if most > MTP_LAYERS_MAX {
            found.layers = mtp.last().map(|layer| layer + 1);
        }
        found.mtp_layers = u32::try_from(mtp.len()).unwrap_or(u32::MAX);
        found
    }

    fn mtp_bytes(&self, shape: &ModelShape, formats: Formats) -> f64 {
        if self.mtp_layers == 0 {
            return 0.0;
        }
        let layers = f64::from(shape.layers.max(1));
        let mlps = match shape.experts {
            None => shape.dense_mlp_params() as f64 / layers * shape.bytes_of(formats.mlp),
            Some(e) => {
                let shared = 3.0 * f64::from(shape.hidden_size) * f64::from(e.shared_size);
                let routed = f64::from(e.count) * shape.mlp_params() as f64;
                shared * shape.bytes_of(formats.mlp) + routed * shape.bytes_of(formats.experts)
            }
        };
        let attention =
            shape.attention_params_total() as f64 / layers * shape.bytes_of(formats.attention);
        let hidden = f64::from(shape.hidden_size);
        let sixteen = Dtype::Bf16.bytes();
        f64::from(self.mtp_layers) * (attention + mlps + 2.0 * hidden * hidden * sixteen)
            + f64::from(self.mtp_embeddings) * shape.embedding_params() as f64 * sixteen
    }
}

/// Most layers that models have for multi-token prediction.
const MTP_LAYERS_MAX: usize = 8;

/// The number after `word` in a name such as `model.layers.12.mlp.gate.weight`.
fn number_after(name: &str, word: &str) -> Option<u32> {
    let rest = name.split(word).nth(1)?;
    rest.split('.').next()?.parse().ok()
}

/// Whether `name` is of a weight or a module of an encoder of images, video or sound, or between it and the language
/// model.
pub(super) fn is_encoder(name: &str) -> bool {
    const PARTS: &[&str] = &[
        "vision",
        "visual",
        "projector",
        "image_newline",
        "image_encoder",
        "image_embed",
        "audio",
        "speech",
        "resampler",
        "merger",
        "patch_embed",
        "aligner",
        "multi_modal",
        "img_processor",
        "embed_vision",
        "view_sep",
        "view_seperator",
    ];
    const WORDS: &[&str] = &[
        "vit",
        "mm",
        "sam_model",
        "connector",
        "vpm",
        "apm",
        "mlp1",
        "tower",
    ];
    let lower = name.to_ascii_lowercase();
    PARTS.iter().any(|part| lower.contains(part))
        || lower
            .split(['.', ':', '*', '\\'])
            .any(|part| WORDS.contains(&part))
}

/// Estimated bytes of the encoder of images that `outer` describes, in 16 bits; `None` if its sizes are unknown.
fn media_bytes(outer: &Object, shape: &ModelShape) -> Option<f64> {
    if outer.keys().any(|key| key.contains("audio")) {
        return None;
    }
    let config = outer.get("vision_config")?.as_object()?;
    let of = |keys: &[&str]| {
        keys.iter()
            .find_map(|key| config.get(*key)?.as_f64())
            .filter(|x| (1.0..=1e5).contains(x))
    };
    // Qwen2-VL: `hidden_size` is that of its output.
    let width = of(&["embed_dim", "vt_hidden_size", "hidden_size", "width"])?;
    let layers = of(&[
        "depth",
        "vt_num_hidden_layers",
        "num_hidden_layers",
        "layers",
    ])?;
    let inner = of(&["intermediate_size", "vt_intermediate_size"])
        .or_else(|| Some(width * of(&["mlp_ratio"])?))
        .unwrap_or(4.0 * width);
    // Two or three matrices of an MLP, and a projector of patches of four.
    let blocks = layers * width * (4.0 * width + 2.5 * inner);
    let projector = 4.0 * width * (4.0 * width + f64::from(shape.hidden_size));
    Some((blocks + projector) * Dtype::Bf16.bytes())
}
