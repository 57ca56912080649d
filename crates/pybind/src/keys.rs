//! Sets of cached keys, as [`slipstream_kvindex`] has them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};
use slipstream_kvindex::{Change, KeyError, KeyMessage, Knowledge};

fn to_python(error: KeyError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A number that is larger in each later life of a cache.
fn life() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_nanos() as u64)
}

/// Keys that are cached now; see [`slipstream_kvindex::KeySet`].
#[pyclass(module = "slipstream._native")]
pub(crate) struct KeySet(slipstream_kvindex::KeySet);

/// One entry of a log of changes.
enum Logged<'py> {
    Cleared,
    Changed(Bound<'py, PyBytes>, Change),
}

/// Reads a log entry by entry: a key, then the block that holds it, or that block's complement
/// (`~block`) where it no longer does; `None` where all keys were dropped.
fn read_log<'py>(log: &Bound<'py, PyList>) -> impl Iterator<Item = PyResult<Logged<'py>>> {
    let mut entries = log.iter();
    let mut next = move || -> PyResult<Option<Logged<'py>>> {
        let Some(entry) = entries.next() else {
            return Ok(None);
        };
        if entry.is_none() {
            return Ok(Some(Logged::Cleared));
        }
        let key = entry.cast_into::<PyBytes>()?;
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
        Ok(Some(Logged::Changed(key, change)))
    };
    std::iter::from_fn(move || next().transpose())
}

fn empty(log: &Bound<'_, PyList>) -> PyResult<()> {
    log.set_slice(0, log.len(), &PyList::empty(log.py()))
}

/// What a step brought: the message for who follows, and the new keys with their blocks.
type Step<'py> = (
    Option<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<u32>,
);

#[pymethods]
impl KeySet {
    /// A set for `keys` keys without growing.
    #[new]
    #[pyo3(signature = (keys=0))]
    fn new(keys: usize) -> Self {
        KeySet(slipstream_kvindex::KeySet::new(keys, life()))
    }

    /// Takes a log of changes and empties it. Up to an entry that is refused, changes are taken.
    fn apply(&mut self, log: &Bound<'_, PyList>) -> PyResult<()> {
        for entry in read_log(log) {
            match entry? {
                Logged::Cleared => self.0.clear(),
                Logged::Changed(key, change) => {
                    self.0.change(key.as_bytes(), change).map_err(to_python)?;
                }
            }
        }
        empty(log)
    }

    /// [`KeySet::apply`] and [`KeySet::take_message`] in one call.
    fn step<'py>(
        &mut self,
        log: &Bound<'py, PyList>,
        keys_max: usize,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.apply(log)?;
        Ok(self.take_message(log.py(), keys_max))
    }

    /// [`KeySet::step`], and which keys the log added and where they are at its end. A key that
    /// was there before is not new in another block; one whose block changed within the log may
    /// be left out.
    fn step_with_new<'py>(
        &mut self,
        log: &Bound<'py, PyList>,
        keys_max: usize,
    ) -> PyResult<Step<'py>> {
        // `None`: new, but in no block that is known for certain.
        let mut new: HashMap<&[u8], Option<u32>> = HashMap::new();
        let entries = read_log(log).collect::<PyResult<Vec<_>>>()?;
        for entry in &entries {
            let Logged::Changed(key, change) = entry else {
                self.0.clear();
                new.clear();
                continue;
            };
            let key = key.as_bytes();
            if let Change::Add(block) = *change {
                if !self.0.contains(key) {
                    new.insert(key, Some(block));
                }
            } else if let (Change::Remove(gone), Entry::Occupied(mut at)) =
                (*change, new.entry(key))
                && *at.get() == Some(gone)
            {
                at.insert(None);
            }
            self.0.change(key, *change).map_err(to_python)?;
        }
        let (mut keys, mut blocks) = (Vec::new(), Vec::new());
        // By the log, so that the order is that of the prompts.
        for entry in &entries {
            if let Logged::Changed(key, Change::Add(block)) = entry
                && new.get(key.as_bytes()) == Some(&Some(*block))
            {
                new.remove(key.as_bytes());
                keys.push(key.clone());
                blocks.push(*block);
            }
        }
        empty(log)?;
        Ok((self.take_message(log.py(), keys_max), keys, blocks))
    }

    fn take_message<'py>(
        &mut self,
        py: Python<'py>,
        keys_max: usize,
    ) -> Option<Bound<'py, PyBytes>> {
        self.0
            .message(keys_max)
            .map(|message| PyBytes::new(py, &message))
    }

    fn set_consumed(&mut self, consumed: bool) {
        self.0.set_consumed(consumed);
    }

    fn request_snapshot(&mut self) {
        self.0.request_snapshot();
    }

    /// All keys; costs O(keys), for tests.
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

/// Somebody else's keys, followed through messages; see [`slipstream_kvindex::KeyMirror`].
#[pyclass(module = "slipstream._native")]
#[derive(Default)]
pub(crate) struct KeyMirror(slipstream_kvindex::KeyMirror);

#[pymethods]
impl KeyMirror {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Takes one message. A message that came before is ignored.
    fn apply(&mut self, message: &[u8]) -> PyResult<()> {
        match self.0.apply(message) {
            Err(error) if error.loses_trust() => Err(to_python(error)),
            _ => Ok(()),
        }
    }

    /// The keys that a message adds and removes, and whether it begins a snapshot.
    #[staticmethod]
    #[allow(clippy::type_complexity)]
    fn read<'py>(
        py: Python<'py>,
        message: &[u8],
    ) -> PyResult<(Vec<Bound<'py, PyBytes>>, Vec<Bound<'py, PyBytes>>, bool)> {
        let message = KeyMessage::read(message).map_err(to_python)?;
        let bytes = |key| PyBytes::new(py, key);
        Ok((
            message.added().map(bytes).collect(),
            message.removed().map(bytes).collect(),
            message.begins,
        ))
    }

    /// Whether all keys are known.
    #[getter]
    fn is_trusted(&self) -> bool {
        self.0.knowledge() == Knowledge::All
    }

    /// How many of `hashes[start:end]`, each with `suffix`, are held without a break.
    fn prefix(
        &self,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
        suffix: &[u8],
    ) -> PyResult<usize> {
        let mut key = Vec::new();
        let end = end.min(hashes.len());
        for at in start..end {
            let hash = hashes.get_item(at)?;
            key.clear();
            key.extend_from_slice(hash.cast::<PyBytes>()?.as_bytes());
            key.extend_from_slice(suffix);
            if !self.0.keys().contains(&key) {
                return Ok(at - start);
            }
        }
        Ok(end.saturating_sub(start))
    }

    /// Places of the keys that are not held.
    fn missing(&self, keys: &Bound<'_, PyList>) -> PyResult<Vec<usize>> {
        let mut missing = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            if !self.0.keys().contains(key.cast::<PyBytes>()?.as_bytes()) {
                missing.push(at);
            }
        }
        Ok(missing)
    }

    /// All keys; costs O(keys), for tests.
    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        self.0
            .keys()
            .iter()
            .map(|key| PyBytes::new(py, key))
            .collect()
    }

    fn __len__(&self) -> usize {
        self.0.keys().len()
    }

    fn __contains__(&self, key: &[u8]) -> bool {
        self.0.keys().contains(key)
    }
}
