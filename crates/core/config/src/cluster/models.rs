//! Descriptions of a cluster's models, as they were read.

use super::{Cluster, ModelConfig, PoolConfig, TimingConfig};
use crate::preset::Formats;

impl ModelConfig {
    /// A line about the model as its checkpoint is, and the notes about how its files were read.
    pub fn lines(&self) -> Vec<String> {
        let formats = Formats {
            kv_cache: self.shape.kv_cache,
            ..Formats::of(&self.shape, self.shape.dtype())
        };
        self.lines_in(formats)
    }

    fn lines_in(&self, formats: Formats) -> Vec<String> {
        let mut lines = vec![formats.line(&self.name, &self.shape)];
        let notes = self.notes.iter();
        lines.extend(notes.map(|note| format!("note: {}: {note}", self.name)));
        lines
    }
}

impl PoolConfig {
    /// Formats of the weights as the engines of this pool hold them.
    pub(super) fn formats(&self) -> Formats {
        let shape = &self.model.shape;
        match &self.engine.timing {
            TimingConfig::Roofline { dtype, .. } => Formats::uniform(shape, *dtype),
            TimingConfig::Calibrated { dtype, .. } => Formats::of(shape, *dtype),
            _ => Formats::of(shape, shape.dtype()),
        }
    }
}

impl Cluster {
    /// A line for each model and format of its modelled engines, and for each model whose files were read, with the notes
    /// about the reading. Commands print the lines before they begin: a model that was misread shows there first.
    pub fn model_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for pool in &self.pools {
            let model = &pool.model;
            // Real engines know their model; the default here says nothing of it.
            if pool.engines.is_some() && model.config.is_none() {
                continue;
            }
            let formats = Formats {
                kv_cache: pool.engine.kv_cache_dtype,
                ..pool.formats()
            };
            for line in model.lines_in(formats) {
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines
    }
}
