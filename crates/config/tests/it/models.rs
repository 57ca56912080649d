//! Configurations of published models against their published sizes.
//!
//! `models.json` has the fields of each with their source: the defaults of the model's class in Transformers, a public copy
//! of the file, or the repository of the model.

use serde_json::Value;
use slipstream_config::preset::{Formats, ModelFiles, ReadModel};

/// A published model.
pub(crate) struct Published {
    pub(crate) name: String,
    pub(crate) config: Value,
    /// Part of the reason why it is refused; `None`: it is read.
    pub(crate) refused: Option<String>,
    /// Published parameters of what is served, billions.
    billions: f64,
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
            billions: model["billions"].as_f64().unwrap_or(0.0),
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
                count += 1;
                let shape = read.shape;
                let billions = shape.params() as f64 / 1e9;
                if (billions / model.billions - 1.0).abs() > 0.02 {
                    wrong.push(format!(
                        "{name}: {billions} billion, published {}",
                        model.billions
                    ));
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
    assert!(count >= 60, "{count} models were read");
}
