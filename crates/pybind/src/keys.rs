//! Sets of cached keys, as [`slipstream_kvindex`] has them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};
use slipstream_kvindex::{Change, KeyError, KeyMessage, Knowledge, digest};

fn to_python(error: KeyError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A number that is larger in each later life of a cache.
pub(crate) fn life() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_nanos() as u64)
}

/// Keys that are cached now; see [`slipstream_kvindex::KeySet`].
#[pyclass(module = "slipstream._native")]
pub(crate) struct KeySet(slipstream_kvindex::KeySet);

/// A log of changes as [`KeySet::apply`] takes it.
///
/// Entries come in twos: a key and the id of the block that holds it now, or that id's complement
/// (`~id`) where it no longer does. `None` alone says that all keys were dropped.
struct Log<'a, 'py>(&'a Bound<'py, PyList>);

/// One change of a log; `None` where all keys were dropped.
type Logged<'py> = Option<(Bound<'py, PyBytes>, Change)>;

impl<'py> Log<'_, 'py> {
    fn read(&self) -> PyResult<Vec<Logged<'py>>> {
        let mut changes = Vec::with_capacity(self.0.len() / 2);
        let mut at = 0;
        while at < self.0.len() {
            let entry = self.0.get_item(at)?;
            at += 1;
            if entry.is_none() {
                changes.push(None);
                continue;
            }
            if at == self.0.len() {
                return Err(PyTypeError::new_err(
                    "the log ends with a key that has no block",
                ));
            }
            let key = entry.cast_into::<PyBytes>()?;
            let block: i64 = self.0.get_item(at)?.cast::<PyInt>()?.extract()?;
            at += 1;
            let (id, gone) = if block < 0 {
                (!block, true)
            } else {
                (block, false)
            };
            let id = u32::try_from(id).map_err(|_| {
                PyValueError::new_err(format!("block id {id} does not fit into 32 bits"))
            })?;
            changes.push(Some((
                key,
                if gone {
                    Change::Remove(id)
                } else {
                    Change::Add(id)
                },
            )));
        }
        Ok(changes)
    }

    fn clear(&self) -> PyResult<()> {
        self.0
            .set_slice(0, self.0.len(), &PyList::empty(self.0.py()))
    }
}

/// Hashes what is a hash already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("digests are hashed as one number");
    }

    fn write_u64(&mut self, digest: u64) {
        self.0 = digest;
    }
}

/// What a step brought: the message for who follows, and the new keys with their blocks.
type Step<'py> = (
    Option<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<u32>,
);

/// Changes that are looked up together: as many as a core's misses in flight, about.
const TOGETHER: usize = 32;

impl KeySet {
    /// Takes changes in their order. `note` hears of each before it is taken, with the key's
    /// digest and whether the key is held.
    fn take<'py>(
        &mut self,
        changes: &[Logged<'py>],
        mut note: impl FnMut(&Logged<'py>, u64, bool),
    ) -> PyResult<()> {
        for changes in changes.chunks(TOGETHER) {
            // The look-ups do not depend on each other, so their cache misses overlap; what is
            // changed afterwards is in the cache then.
            for (key, _) in changes.iter().flatten() {
                std::hint::black_box(self.0.contains(key.as_bytes()));
            }
            for change in changes {
                let Some((key, what)) = change else {
                    note(change, 0, false);
                    self.0.clear();
                    continue;
                };
                let key = key.as_bytes();
                let held = matches!(what, Change::Add(_)) && self.0.contains(key);
                note(change, digest(key).0, held);
                self.0.change(key, *what).map_err(to_python)?;
            }
        }
        Ok(())
    }
}

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
        let log = Log(log);
        self.take(&log.read()?, |_, _, _| {})?;
        log.clear()
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
        let (log, py) = (Log(log), log.py());
        let changes = log.read()?;
        let (mut keys, mut blocks) = (Vec::new(), Vec::new());
        // By digest: where in `keys` a new key is.
        let mut new: HashMap<u64, usize, BuildHasherDefault<AsItIs>> = HashMap::default();
        self.take(&changes, |change, digest, held| match change {
            None => {
                new.clear();
                keys.clear();
                blocks.clear();
            }
            Some((key, Change::Add(block))) if !held => {
                new.insert(digest, keys.len());
                keys.push(Some(key.clone()));
                blocks.push(*block);
            }
            Some((_, Change::Remove(block))) => {
                if let Some(&at) = new.get(&digest)
                    && blocks[at] == *block
                {
                    keys[at] = None;
                }
            }
            Some((_, Change::Add(_))) => {}
        })?;
        log.clear()?;
        let (keys, blocks) = keys
            .into_iter()
            .zip(blocks)
            .filter_map(|(key, block)| Some((key?, block)))
            .unzip();
        Ok((self.take_message(py, keys_max), keys, blocks))
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

    /// Places of the keys that are not held; `None` if no key is.
    fn missing(&self, keys: &Bound<'_, PyList>) -> PyResult<Option<Vec<usize>>> {
        let mut missing = Vec::new();
        if self.0.keys().is_empty() {
            return Ok(None);
        }
        for (at, key) in keys.iter().enumerate() {
            if !self.0.keys().contains(key.cast::<PyBytes>()?.as_bytes()) {
                missing.push(at);
            }
        }
        Ok((missing.len() < keys.len()).then_some(missing))
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
