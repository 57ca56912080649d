//! Compares a shape with the index of its checkpoint's weights (`model.safetensors.index.json`).
//!
//! The index has the bytes of all weights together and their names, no size of each. Weights that a shape leaves out (layers of
//! multi-token prediction, encoders) are therefore estimated, and only a share of the estimates is allowed for.

use std::collections::BTreeSet;

use serde_json::Value;

use slipstream_base::width::to_u32;

use super::error::ShapeError;
use super::fields::{Object, shown};
use super::formats::Formats;
use super::model::ModelShape;
use super::python_json;
use crate::cluster::Dtype;

const FILE: &str = "model.safetensors.index.json";
/// Largest difference that norms, biases and scales explain.
const TOLERANCE: f64 = 0.03;
/// Error of the estimate of an encoder, whose blocks are of many kinds.
const MEDIA_ERROR: f64 = 0.5;
/// Most bytes of an encoder that `config.json` names without its sizes: those of OpenCLIP's ViT-bigG in 16 bits.
const MEDIA_MAX: f64 = 3.8e9;
/// Error of the estimate of layers of multi-token prediction, which may be in another format.
const MTP_ERROR: f64 = 0.5;

/// Bytes of all weights, if the index states them.
fn total_of(index: &Object) -> Result<Option<f64>, ShapeError> {
    match index.get("metadata").and_then(|of| of.get("total_size")) {
        None | Some(Value::Null) => Ok(None),
        Some(found) => match found.as_f64() {
            Some(total) if total >= 1.0 => Ok(Some(total)),
            _ => Err(ShapeError::Size(format!(
                "`total_size` of {FILE} in the same folder is {}, but must be the bytes of all weights; correct it, or \
                     remove it and the weights are not checked",
                shown(found)
            ))),
        },
    }
}

/// What the shape leaves out of the weights, and what may be missing, in words. `of_mtp` are the bytes of multi-token
/// prediction, `most` those that an encoder may have.
fn left_out(media: &Media, of_mtp: f64, scale: f64, most: f64) -> (String, &'static str) {
    let mut left_out = Vec::new();
    if of_mtp > 0.0 {
        left_out.push(format!(
            "about {} of multi-token prediction",
            gigabytes(of_mtp)
        ));
    }
    match *media {
        Media::Known(bytes) if bytes > 0.0 => {
            left_out.push(format!("about {} of an encoder", gigabytes(scale * bytes)));
        }
        Media::Named => left_out.push(format!("at most {} of an encoder", gigabytes(most))),
        Media::Known(_) | Media::Absent => {}
    }
    let without = if left_out.is_empty() {
        String::new()
    } else {
        format!(" without {}", left_out.join(" and "))
    };
    let absent = if matches!(media, Media::Absent) {
        ", some of an encoder that config.json does not describe"
    } else {
        ""
    };
    (without, absent)
}

/// Refuses a `shape` whose weights differ by more than 3 % from those that the index `text` lists; `single`: its 16-bit
/// weights are stored in 32 bits; `outer`: the whole `config.json`; `mtp`: layers of multi-token prediction that it counts.
/// Returns a note if there is no size to compare with.
pub(super) fn check(
    text: &[u8],
    shape: &ModelShape,
    single: bool,
    outer: &Object,
    mtp: u32,
) -> Result<Option<String>, ShapeError> {
    let value = python_json::parse(text).map_err(|_| ShapeError::Beside(FILE))?;
    let index = value.as_object().ok_or(ShapeError::Beside(FILE))?;
    let names = index.get("weight_map").and_then(Value::as_object);
    let weights = names
        .map(|names| Weights::of(names, shape.layers, mtp))
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
    let Some(total) = total_of(index)? else {
        return Ok(Some(format!(
            "{FILE} has no `total_size`: the size of the weights is not checked"
        )));
    };
    let formats = Formats::of(shape, shape.dtype());
    let scale = if single { 2.0 } else { 1.0 };
    let read = scale * formats.weight_bytes(shape, 1, 1);
    let of_mtp = scale * weights.mtp_bytes(shape, formats);
    let media = if weights.media {
        Media::of(outer, shape)
    } else {
        Media::Known(0.0)
    };
    // The least and the most that encoders have.
    let [least, most] = match media {
        Media::Known(bytes) => {
            [1.0 - MEDIA_ERROR, 1.0 + MEDIA_ERROR].map(|part| part * bytes * scale)
        }
        Media::Named => [0.0, MEDIA_MAX * scale],
        Media::Absent => [0.0, 0.0],
    };
    let slack = TOLERANCE * total + MTP_ERROR * of_mtp;
    let rest = total - of_mtp - read;
    if (least - slack..=most + slack).contains(&rest) {
        return Ok(None);
    }
    let (without, absent) = left_out(&media, of_mtp, scale, most);
    Err(ShapeError::Size(format!(
        "its keys give {} of weights, but {FILE} in the same folder says {}{without}{absent}; a size or a format was \
         misread, or the files are of two models",
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
    fn of(names: &Object, layers: u32, stated: u32) -> Weights {
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
        // More layers than the file counts, of which it says nothing or fewer, are layers of the model.
        let beyond = mtp.iter().filter(|layer| **layer >= layers).count();
        if beyond as u64 > u64::from(stated.min(MTP_LAYERS_MAX)) {
            found.layers = mtp.last().map(|layer| layer + 1);
        }
        found.mtp_layers = to_u32(mtp.len()).min(MTP_LAYERS_MAX);
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
const MTP_LAYERS_MAX: u32 = 8;

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

/// The encoders in `config.json`.
#[derive(Clone, Copy, Debug)]
enum Media {
    /// Estimated bytes in 16 bits.
    Known(f64),
    /// It names one, and not its sizes.
    Named,
    /// Nothing.
    Absent,
}

impl Media {
    /// The encoders of images and sound that `outer` describes.
    fn of(outer: &Object, shape: &ModelShape) -> Media {
        const NAMES: &[&str] = &["vision", "visual", "audio", "speech", "image", "img", "mm_"];
        let mut all = Media::Absent;
        for (key, value) in outer {
            let named =
                NAMES.iter().any(|name| key.contains(name)) && !key.starts_with("mm_tokens");
            let of = match value {
                Value::Object(config) if named => {
                    estimate(config, shape).map_or(Media::Named, Media::Known)
                }
                Value::String(tower) if named && key.ends_with("tower") && !tower.is_empty() => {
                    Media::Named
                }
                _ => continue,
            };
            all = match (all, of) {
                (Media::Known(one), Media::Known(other)) => Media::Known(one + other),
                (Media::Absent, of) => of,
                _ => Media::Named,
            };
        }
        all
    }
}

/// Estimated bytes of the encoder of `config`, in 16 bits; `None` if its sizes are unknown.
fn estimate(config: &Object, shape: &ModelShape) -> Option<f64> {
    let of = |keys: &[&str]| {
        keys.iter()
            .find_map(|key| config.get(*key)?.as_f64())
            .filter(|x| (1.0..=1e5).contains(x))
    };
    // Qwen2-VL: `hidden_size` is that of its output.
    let width = of(&[
        "embed_dim",
        "vt_hidden_size",
        "d_model",
        "hidden_size",
        "width",
    ])?;
    let layers = of(&[
        "depth",
        "vt_num_hidden_layers",
        "encoder_layers",
        "num_hidden_layers",
        "layers",
    ])?;
    let inner = of(&[
        "intermediate_size",
        "vt_intermediate_size",
        "encoder_ffn_dim",
    ])
    .or_else(|| Some(width * of(&["mlp_ratio"])?))
    .unwrap_or(4.0 * width);
    // Two or three matrices of an MLP, and a projector of patches of four.
    let blocks = layers * width * (4.0 * width + 2.5 * inner);
    let projector = 4.0 * width * (4.0 * width + f64::from(shape.hidden_size));
    Some((blocks + projector) * Dtype::Bf16.bytes())
}
