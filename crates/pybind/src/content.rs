//! Digests of files, for the identity of a model: [`slipstream_kvstore::content`].

use std::path::PathBuf;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use slipstream_kvstore::content::{Depth, digest};

use crate::store::with_source;

/// A digest of the contents of files, independent of their names and order. With `full`, every byte is
/// hashed, and the digests are cached in the folder `cache`; otherwise samples are hashed.
#[pyfunction]
#[pyo3(signature = (paths, *, full, cache=None))]
pub(crate) fn digest_files(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    full: bool,
    cache: Option<PathBuf>,
) -> PyResult<String> {
    let depth = if full { Depth::Full } else { Depth::Sampled };
    py.detach(|| digest(&paths, depth, cache.as_deref()))
        .map_err(|error| PyOSError::new_err(with_source(&error)))
}
