//! Bodies of `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, with vLLM's fields.
//!
//! Source: vLLM, `vllm/entrypoints/serve/lora/protocol.py`.

use super::ApiError;
use super::members::{boolean, missing, read_members, text};

/// A path of an adapter at most, bytes. Source: Linux's `PATH_MAX`.
const PATH_BYTES_MAX: usize = 4096;

/// A request to load or unload an adapter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AdapterRequest {
    /// Its name. Not empty.
    pub(crate) name: String,
    /// Where it is stored. Nothing is read from there; adapters of one name and different paths share no cached
    /// block.
    pub(crate) path: Option<String>,
    /// Replace the adapter of this name if there is one.
    pub(crate) in_place: bool,
}

/// Parses a body.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault: broken JSON, a field of a wrong type, a name that is missing or empty.
pub(crate) fn parse_adapter(body: &[u8]) -> Result<AdapterRequest, ApiError> {
    let mut name = None;
    let mut path = None;
    let mut in_place = false;
    read_members(
        body,
        |known| {
            matches!(
                known,
                "lora_name" | "lora_path" | "load_inplace" | "is_3d_lora_weight"
            )
        },
        |field, value| {
            match field {
                "lora_name" => name = Some(text(field, value)?.into_owned()),
                "lora_path" => path = Some(text(field, value)?.into_owned()),
                "load_inplace" => in_place = boolean(field, &value)?,
                // The form of its weights, which no modelled engine reads.
                _ => {
                    boolean(field, &value)?;
                }
            }
            Ok(())
        },
    )?;
    let name = name.ok_or_else(|| missing("lora_name"))?;
    if name.is_empty() {
        return Err(ApiError::invalid(
            "lora_name",
            "`lora_name` is empty; send the adapter's name",
        ));
    }
    if path
        .as_ref()
        .is_some_and(|path| path.len() > PATH_BYTES_MAX)
    {
        return Err(ApiError::invalid(
            "lora_path",
            format!("`lora_path` is longer than {PATH_BYTES_MAX} bytes; shorten it"),
        ));
    }
    Ok(AdapterRequest {
        name,
        path,
        in_place,
    })
}
