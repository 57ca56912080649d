//! The files of a checkpoint.

use std::io;
use std::path::Path;

/// The files of a checkpoint that its shape is read from.
///
/// vLLM reads the same ones: a `config.json` alone does not state the format of every checkpoint.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// `config.json`.
    pub config: Vec<u8>,
    /// `hf_quant_config.json`: formats of `ModelOpt`, which counts if `config.json` has no `quantization_config`.
    pub hf_quant_config: Option<Vec<u8>>,
    /// `quantize_config.json` or `quant_config.json` by its name: formats of GPTQ or AWQ, which count in the same case.
    pub quantize_config: Option<(&'static str, Vec<u8>)>,
    /// `model.safetensors.index.json`: the names of the weights and their total size, to check the shape with.
    pub index: Option<Vec<u8>>,
}

impl ModelFiles {
    /// Loads `config`, the path of a `config.json` or of its folder, and the files next to it, with `load`.
    ///
    /// # Errors
    /// If `config` cannot be read, or one next to it exists and cannot be read.
    pub fn load(
        config: &Path,
        load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
    ) -> io::Result<ModelFiles> {
        let (config, bytes) = match load(config) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                let inside = config.join("config.json");
                let bytes = load(&inside)?;
                (inside, bytes)
            }
            other => (config.to_owned(), other?),
        };
        let mut files = ModelFiles {
            config: bytes,
            ..ModelFiles::default()
        };
        let mut beside = |name: &str| {
            let path = config.with_file_name(name);
            // Nobody named this file: a FIFO of its name must not be waited for.
            let read = match path.metadata() {
                Ok(found) if !found.is_file() => Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "not a regular file; remove it, or replace it by the checkpoint's",
                )),
                _ => load(&path),
            };
            match read {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(io::Error::new(
                    error.kind(),
                    format!("{name} in the same folder: {error}"),
                )),
            }
        };
        files.hf_quant_config = beside("hf_quant_config.json")?;
        for name in ["quantize_config.json", "quant_config.json"] {
            if files.quantize_config.is_none() {
                files.quantize_config = beside(name)?.map(|bytes| (name, bytes));
            }
        }
        files.index = beside("model.safetensors.index.json")?;
        Ok(files)
    }
}
