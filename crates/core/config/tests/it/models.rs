//! Configurations of published models against their published sizes.
//!
//! `models.json` has the fields of each with `source`, the public file that was read for them: a copy of `config.json`, or
//! the defaults of the model's class in Transformers. `published` is where the number of parameters was read. A model
//! without `published` must only be readable. 65 models are read, 55 of them with a published
//! number (10: only in the name of the model); 16 are refused.

use serde_json::Value;
use slipstream_config::preset::{Formats, ModelFiles, ReadModel};

/// A published model.
pub(crate) struct Published {
    pub(crate) name: String,
    pub(crate) config: Value,
    /// Part of the reason why it is refused; `None`: it is read.
    pub(crate) refused: Option<String>,
    /// Published parameters of what is served, billions, if a source was read.
    billions: Option<f64>,
    /// Published size of its weights, GB, if stated.
    gb: Option<f64>,
}

/// All of `models.json`.
pub(crate) fn published() -> Vec<Published> {
    let all: Value =
        serde_json::from_str(&include_str!("models.json").replace("Infinity", "\"Infinity\""))
            .expect("models.json is JSON");
    let all = all.as_array().expect("a list");
    all.iter()
        .map(|model| Published {
            name: model["name"].as_str().expect("a name").to_owned(),
            config: model["config"].clone(),
            refused: model["refused"].as_str().map(str::to_owned),
            billions: model["billions"].as_f64(),
            gb: model["gb"][0].as_f64(),
        })
        .collect()
}

/// Reads `config` as the only file of a model.
pub(crate) fn read(config: &Value) -> Result<ReadModel, String> {
    let files = ModelFiles {
        config: serde_json::to_vec(config).expect("it is JSON"),
        ..ModelFiles::default()
    };
    files.read("x").map_err(|error| error.to_string())
}

#[test]
fn sizes_are_within_two_percent_of_the_published_ones() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for model in published() {
        let name = &model.name;
        match (read(&model.config), &model.refused) {
            (Err(error), Some(part)) if error.contains(part) => {}
            (Err(error), None) => wrong.push(format!("{name}: {error}")),
            (found, Some(part)) => wrong.push(format!("{name}: {found:?} instead of {part}")),
            (Ok(read), None) => {
                let shape = read.shape;
                let billions = shape.params() as f64 / 1e9;
                if let Some(published) = model.billions {
                    count += 1;
                    if (billions / published - 1.0).abs() > 0.02 {
                        wrong.push(format!("{name}: {billions} billion, published {published}"));
                    }
                }
                let formats = Formats::of(&shape, shape.dtype());
                let bytes = formats.weight_bytes(&shape, 1, 1) / 1e9;
                if let Some(gb) = model.gb
                    && (bytes / gb - 1.0).abs() > 0.02
                {
                    wrong.push(format!("{name}: {bytes} GB, published {gb}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count >= 50, "{count} models have a published size");
}
