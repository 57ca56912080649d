//! Why a model's files are refused.

use std::borrow::Cow;

use thiserror::Error;

/// Why a model's files were refused. Correct the files, or choose a preset.
#[derive(Debug, Error)]
pub enum ShapeError {
    /// Not JSON.
    #[error("not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON, but not an object.
    #[error("not a JSON object")]
    NoObject,
    /// A file next to `config.json` is not a JSON object.
    #[error("{0} in the same folder is not a JSON object")]
    Beside(&'static str),
    /// A field is missing.
    #[error("`{0}` is missing")]
    Missing(Cow<'static, str>),
    /// A field is invalid.
    #[error("`{field}` is {found}, but must be {must}")]
    Range {
        /// The field.
        field: Cow<'static, str>,
        /// Its value.
        found: String,
        /// The valid values.
        must: &'static str,
    },
    /// A property that [`ModelShape`](super::ModelShape) cannot express.
    #[error("`{field}`: {what} is not modelled")]
    Unsupported {
        /// The field.
        field: Cow<'static, str>,
        /// The unsupported property.
        what: Cow<'static, str>,
    },
    /// Keys that were not read and may bear on size, compute or cache.
    #[error(
        "{keys} may change size, compute or cache, but is unknown for `{of}`; if it changes none of them, remove it from a \
         copy of the file"
    )]
    Unread {
        /// The keys with their values.
        keys: String,
        /// The `model_type`.
        of: String,
    },
    /// The weights of the index have another size than the shape.
    #[error("{0}")]
    Size(String),
}
