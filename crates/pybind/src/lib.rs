//! What slipstream's Python package does in Rust: the extension module `slipstream._native`.
//!
//! The border is crossed once per scheduler step, with everything that happened since the last
//! one ([`PyKeySet::apply`]), never once per block.
#![forbid(unsafe_code)]

pub mod keys;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};

use keys::{Change, KeyError, KeyMirror, KeySet};

impl From<KeyError> for PyErr {
    fn from(error: KeyError) -> PyErr {
        PyValueError::new_err(error.to_string())
    }
}

/// Keys that are cached now; see [`keys::KeySet`].
#[pyclass(name = "KeySet", module = "slipstream._native")]
#[derive(Default)]
pub struct PyKeySet(KeySet);

#[pymethods]
impl PyKeySet {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Takes a log of changes and empties it: a key, then the block that holds it, or that block's
    /// complement (`~block`) where it no longer does; `None` where all keys were dropped.
    fn apply(&mut self, log: &Bound<'_, PyList>) -> PyResult<()> {
        let mut entries = log.iter();
        while let Some(entry) = entries.next() {
            if entry.is_none() {
                self.0.clear();
                continue;
            }
            let key = entry.cast::<PyBytes>()?;
            let Some(block) = entries.next() else {
                return Err(PyTypeError::new_err(
                    "the log ends with a key that has no block",
                ));
            };
            let block: i64 = block.cast::<PyInt>()?.extract()?;
            let id = |b: i64| {
                u32::try_from(b).map_err(|_| {
                    PyValueError::new_err(format!("block id {b} does not fit into 32 bits"))
                })
            };
            let change = if block < 0 {
                Change::Remove(id(!block)?)
            } else {
                Change::Add(id(block)?)
            };
            self.0.change(key.as_bytes(), change)?;
        }
        log.set_slice(0, log.len(), &PyList::empty(log.py()))
    }

    /// [`PyKeySet::apply`] and [`PyKeySet::take_message`] in one call.
    fn step<'py>(
        &mut self,
        log: &Bound<'py, PyList>,
        snapshot_keys_max: usize,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.apply(log)?;
        Ok(self.take_message(log.py(), snapshot_keys_max))
    }

    fn take_message<'py>(
        &mut self,
        py: Python<'py>,
        snapshot_keys_max: usize,
    ) -> Option<Bound<'py, PyBytes>> {
        self.0
            .take_message(snapshot_keys_max)
            .map(|m| PyBytes::new(py, &m))
    }

    fn set_consumed(&mut self, consumed: bool) {
        self.0.set_consumed(consumed);
    }

    fn request_snapshot(&mut self) {
        self.0.request_snapshot();
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    /// All keys; costs O(keys), for tests and for a resync.
    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.0.iter().map(|key| PyBytes::new(py, key)).collect()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __contains__(&self, key: &[u8]) -> bool {
        self.0.contains(key)
    }
}

/// Another engine's keys, followed through its messages; see [`keys::KeyMirror`].
#[pyclass(name = "KeyMirror", module = "slipstream._native")]
#[derive(Default)]
pub struct PyKeyMirror(KeyMirror);

#[pymethods]
impl PyKeyMirror {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn apply(&mut self, message: &[u8]) -> PyResult<()> {
        Ok(self.0.apply(message)?)
    }

    #[getter]
    fn is_trusted(&self) -> bool {
        self.0.is_trusted()
    }

    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.0.iter().map(|key| PyBytes::new(py, key)).collect()
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __contains__(&self, key: &[u8]) -> bool {
        self.0.contains(key)
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyKeySet>()?;
    module.add_class::<PyKeyMirror>()
}
