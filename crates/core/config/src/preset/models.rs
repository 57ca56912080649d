//! Presets of models: those of `models.json`, each with the fields of its published `config.json`.
//!
//! An entry has the preset's name, the repository that publishes the file (`source`), and the fields that the reader of
//! such files needs. `billions` is the number of weights that the model's card states; a test compares it. `same` lists other
//! repositories whose files have the same sizes. A new entry needs no other change.

use std::sync::{LazyLock, OnceLock};

use serde_json::Value;

use super::files::ModelFiles;
use super::model::ModelShape;

struct Preset {
    name: &'static str,
    source: &'static str,
    /// Names of other repositories with the same sizes, without owner.
    same: Vec<&'static str>,
    config: &'static Value,
    /// Read when it is first used: a run needs few of them.
    shape: OnceLock<ModelShape>,
}

static FILE: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("models.json")).expect("models.json is JSON")
});

static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
    let entries = FILE.as_array().expect("models.json is a list");
    entries.iter().map(Preset::of).collect()
});

/// All models: those of `models.json`, in its order.
pub static MODELS: LazyLock<Vec<ModelShape>> = LazyLock::new(|| {
    PRESETS
        .iter()
        .map(|preset| preset.shape().clone())
        .collect()
});

impl Preset {
    fn of(entry: &'static Value) -> Preset {
        let text = |key: &str| {
            let text = entry[key].as_str();
            text.unwrap_or_else(|| panic!("models.json: {entry} has no `{key}`"))
        };
        let same = entry["same"].as_array().into_iter().flatten();
        Preset {
            name: text("name"),
            source: text("source"),
            same: same.filter_map(Value::as_str).collect(),
            config: &entry["config"],
            shape: OnceLock::new(),
        }
    }

    fn shape(&self) -> &ModelShape {
        self.shape.get_or_init(|| {
            let files = ModelFiles {
                config: self.config.to_string().into(),
                ..ModelFiles::default()
            };
            let read = files.read(self.name);
            let read = read.unwrap_or_else(|error| panic!("models.json: {}: {error}", self.name));
            ModelShape {
                source: self.source.into(),
                // A repository's name may state another format for all weights (`find_model`).
                mlps: None,
                ..read.shape
            }
        })
    }
}

fn find(is: impl Fn(&Preset) -> bool) -> Option<&'static ModelShape> {
    let preset = PRESETS.iter().find(|preset| is(preset))?;
    Some(preset.shape())
}

/// The model with this name: a preset's name, or the id of its Hugging Face repository in any case.
pub fn model(name: &str) -> Option<&'static ModelShape> {
    find(|preset| preset.name == name || preset.source.eq_ignore_ascii_case(name))
}

/// Names of all models, in their order.
pub fn model_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// The model whose sizes the repository called `short` has, without owner and in lower case.
pub(super) fn model_of_same_sizes(short: &str) -> Option<&'static ModelShape> {
    find(|preset| preset.same.contains(&short))
}

/// The model whose repository has a name that `is` accepts.
pub(super) fn model_of_source(is: impl Fn(&str) -> bool) -> Option<&'static ModelShape> {
    find(|preset| is(preset.source))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1 % covers norms, biases and rounding.
    #[test]
    fn parameter_counts_match_the_model_cards() {
        for (entry, shape) in FILE.as_array().unwrap().iter().zip(MODELS.iter()) {
            let billions = entry["billions"].as_f64().expect("a preset without a card");
            let params = shape.params() as f64 / 1e9;
            assert!(
                (params / billions - 1.0).abs() < 0.01,
                "{}: {params} against {billions}",
                shape.name
            );
        }
        let active = model("qwen3-30b-a3b").unwrap().active_params() as f64 / 1e9;
        assert!((active - 3.3).abs() < 0.1, "A3B: {active}");
    }

    #[test]
    fn names_of_models_and_of_repositories_are_unique() {
        let mut names: Vec<&str> = Vec::new();
        for preset in PRESETS.iter() {
            names.push(preset.name);
            names.push(preset.source);
            names.extend(&preset.same);
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
