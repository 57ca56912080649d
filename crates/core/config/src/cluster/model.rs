//! `[model]`: the served model; `[pool.NAME.model]` overrides it for a pool.

use std::io;
use std::path::{Path, PathBuf};

use crate::doc::{Origin, Table, optional, path, section, suggestion, text, value};
use crate::preset::{self, ModelFiles, ModelShape};

/// Fits on one default GPU with space for its KV cache.
const PRESET: &str = "qwen3-8b";

section! {
    /// `[model]`: the model, and its tokenizer.
    pub struct ModelConfig, keys ModelKeys of "model", read by hand {
        /// The model, for its shape; `slipstream presets` lists them.
        ///
        /// The shape of another model gives wrong step times and a wrong KV cache size.
        preset: String = text(PRESET).with_description("string");
        /// Model name in requests.
        ///
        /// Requests with another name get 404.
        key name?: String = optional().check(|name: &String| !name.is_empty(), "a name")
            .with_description("string").with_default_text("the preset's name, or the folder of `config`");
        /// Model name in requests. Default: the preset's name.
        field name: String = PRESET.into();
        /// Further names of the model in requests: the same weights and prefix cache under another name.
        ///
        /// Only for modelled engines. Answers carry `name`.
        aliases: Vec<String> = value(Vec::new()).with_description("names")
            .check(
                |names: &Vec<String>| {
                    let fits = |name: &String| !name.is_empty() && name.len() <= 256;
                    names.len() <= 64 && names.iter().all(fits)
                },
                "up to 64 names of 1 to 256 bytes",
            );
        /// A Hugging Face style `config.json`, or its folder; overrides the preset's shape.
        ///
        /// Read with the quantization files and the index of the weights in its folder; unknown keys that may matter
        /// are refused by name (docs/step-time.md). Formats other than the checkpoint's are refused, except FP8 for
        /// 16 bits.
        config?: PathBuf = path();
        /// Folder with `tokenizer.json` and, for chat, a template.
        ///
        /// A tokenizer other than the real deployment's gives other prompt lengths.
        tokenizer?: PathBuf = path().with_default_text("the built-in tokenizer");
        /// LoRA adapters that are served from the start: model names with a prefix cache of their own.
        ///
        /// An adapter changes no step time but by `engine.lora`: the cost of its products is not modelled.
        lora_adapters: Vec<String> = value(Vec::new()).with_description("names")
            .check(
                |names: &Vec<String>| {
                    let fits = |name: &String| !name.is_empty() && name.len() <= 256;
                    names.len() <= 1024 && names.iter().all(fits)
                },
                "up to 1,024 names of 1 to 256 bytes",
            );
        /// Tokens of an image in a chat; 0: chats with images are refused.
        ///
        /// One number for images of any size. Live, the time of an image encoder is not modelled; `engine.encoder` is
        /// for simulation.
        image_tokens: u32 = value(0).within(0..=65_536).unit("tokens");
        /// The shape of `config` or `preset`.
        field shape: ModelShape = preset::model(PRESET).expect("it is a preset").clone();
        /// Notes for the user about how `config` was read.
        field notes: Vec<String> = Vec::new();
    }
}

pub(super) fn read_model(
    t: &Table<'_>,
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> ModelConfig {
    let default = ModelConfig::default();
    let preset = ModelKeys::preset().read(t);
    let config = ModelKeys::config().read(t);
    let known = preset::find_model(&preset);
    if known.is_none() && config.is_none() {
        let names: Vec<&str> = preset::model_names().collect();
        t.error(
            "preset",
            format!("`model.preset` is \"{preset}\", which is not a preset"),
            {
                let names = suggestion(&preset, &names);
                let end = if names.ends_with('?') { "" } else { ";" };
                format!("{names}{end} `model.config` takes the config.json of any other model")
            },
        );
    }
    let name = match &config {
        None => ModelKeys::name()
            .field(t)
            .or_from(Origin::Preset(preset.clone()), preset.clone()),
        Some(path) => {
            // The default name is that of the model's folder: `models/my-model/config.json`.
            let is_file = path.extension().is_some_and(|ending| ending == "json");
            let folder = if is_file {
                path.parent()
            } else {
                Some(&**path)
            };
            let folder = folder.and_then(Path::file_name);
            let name = folder.map_or("model".into(), |f| f.to_string_lossy().into_owned());
            ModelKeys::name()
                .field(t)
                .or_from(Origin::Derived("folder of model.config".into()), name)
        }
    };
    let mut shape = known.unwrap_or(default.shape);
    let mut notes = Vec::new();
    if let Some(path) = &config {
        let read = ModelFiles::load(path, load)
            .map_err(|e| e.to_string())
            .and_then(|files| files.read(&name).map_err(|e| chain(&e)));
        match read {
            Ok(read) => (shape, notes) = (read.shape, read.notes),
            Err(error) => t.error(
                "config",
                format!("`model.config`: {}: {error}", path.display()),
                "set the path of a model's `config.json`, or use a `preset`",
            ),
        }
    }
    ModelConfig {
        preset,
        name,
        config,
        tokenizer: ModelKeys::tokenizer().read(t),
        aliases: ModelKeys::aliases().read(t),
        lora_adapters: ModelKeys::lora_adapters().read(t),
        image_tokens: ModelKeys::image_tokens().read(t),
        shape,
        notes,
    }
}

/// The error and its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// `[pool.NAME.model]` over `[model]`, which is `inherited`.
pub(super) fn read_pool_model(
    t: &Table<'_>,
    base: &Table<'_>,
    inherited: &ModelConfig,
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> ModelConfig {
    if !t.has("model") {
        return inherited.clone();
    }
    let own = t.base("model");
    if own.has("preset") && !own.has("config") && base.has("config") {
        own.error(
            "preset",
            "`preset` has no effect: `model.config`, which every pool starts from, overrides the preset's shape",
            "move `config` to the pools that it is for, or set it here, too",
        );
    }
    t.table_over("model", base, |t| read_model(t, load))
}
