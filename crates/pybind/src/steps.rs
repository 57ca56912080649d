//! The message of a scheduler step to the workers, built in one call.
//!
//! A usual step of an engine under load fills a few blocks and has no other work for the
//! connector. [`FilledBlocks::build`] handles such a step. It reads the blocks that got a key
//! since the last one, and packs the keys and ids of those to save into one flat buffer. Python
//! objects are created from it in the worker, if at all. Everything rarer is built in Python.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::keys::KeyMirror;
use crate::lock;

/// Keys and ids of blocks to save, in the order in which they were filled.
#[derive(Default, PartialEq)]
struct Saves {
    /// Records: vLLM's block id in four bytes, little-endian, and the key.
    records: Vec<u8>,
    /// Size of a record, bytes; 0 while there is none.
    record_bytes: usize,
}

const ID_BYTES: usize = size_of::<u32>();

impl Saves {
    fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    fn iter(&self) -> impl ExactSizeIterator<Item = (u32, &[u8])> {
        let records = self.records.chunks_exact(self.record_bytes.max(1));
        records.map(|record| {
            let (id, key) = record
                .split_first_chunk()
                .expect("a record begins with an id");
            (u32::from_le_bytes(*id), key)
        })
    }

    fn push(&mut self, key: &[u8], block: u32, blocks_max: usize) -> PyResult<()> {
        let bytes = ID_BYTES + key.len();
        if self.record_bytes != bytes {
            if !self.is_empty() || key.is_empty() {
                return Err(PyValueError::new_err(format!(
                    "a key has {} bytes, earlier ones have {}",
                    key.len(),
                    self.record_bytes.saturating_sub(ID_BYTES)
                )));
            }
            self.record_bytes = bytes;
            self.records.reserve_exact(bytes * blocks_max);
        }
        self.records.extend_from_slice(&block.to_le_bytes());
        self.records.extend_from_slice(key);
        Ok(())
    }
}

/// The message of the scheduler half to the workers for one step.
#[pyclass(module = "slipstream._native", frozen)]
pub(crate) struct StepMetadata {
    saves: Saves,
    extras: Option<Box<Extras>>,
}

/// Fields that few steps have.
struct Extras {
    keys: Option<Py<PyBytes>>,
    loads: Py<PyList>,
    cancels: Py<PyList>,
    reset: bool,
    resend: bool,
    detach: bool,
}

impl Extras {
    fn is_empty(&self, py: Python<'_>) -> bool {
        self.keys.is_none()
            && self.loads.bind(py).is_empty()
            && self.cancels.bind(py).is_empty()
            && !self.reset
            && !self.resend
            && !self.detach
    }
}

/// The parts of [`StepMetadata`] for pickling.
type Parts<'py> = (
    Bound<'py, PyBytes>,
    usize,
    Option<Bound<'py, PyBytes>>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    bool,
    bool,
    bool,
);

#[pymethods]
impl StepMetadata {
    #[new]
    #[pyo3(signature = (
        keys=None, save_keys=Vec::new(), save_blocks=Vec::new(), loads=None, cancels=None,
        reset=false, resend=false, detach=false
    ))]
    #[allow(clippy::too_many_arguments)] // the parts of a step, each with a name
    fn new(
        py: Python<'_>,
        keys: Option<Py<PyBytes>>,
        save_keys: Vec<Bound<'_, PyBytes>>,
        save_blocks: Vec<u32>,
        loads: Option<Py<PyList>>,
        cancels: Option<Py<PyList>>,
        reset: bool,
        resend: bool,
        detach: bool,
    ) -> PyResult<StepMetadata> {
        if save_keys.len() != save_blocks.len() {
            return Err(PyValueError::new_err(format!(
                "{} keys to save, and {} blocks",
                save_keys.len(),
                save_blocks.len()
            )));
        }
        let mut saves = Saves::default();
        for (key, block) in save_keys.iter().zip(save_blocks) {
            saves.push(key.as_bytes(), block, save_keys.len())?;
        }
        let list = |list: Option<Py<PyList>>| list.unwrap_or_else(|| PyList::empty(py).unbind());
        let extras = Extras {
            keys,
            loads: list(loads),
            cancels: list(cancels),
            reset,
            resend,
            detach,
        };
        Ok(StepMetadata::with(py, saves, extras))
    }

    /// Changes in the set of cached keys; `None` without changes or followers.
    #[getter]
    fn keys(&self, py: Python<'_>) -> Option<Py<PyBytes>> {
        let extras = self.extras.as_ref()?;
        Some(extras.keys.as_ref()?.clone_ref(py))
    }

    /// Keys of the blocks that this step fills, to be stored after its forward pass.
    #[getter]
    fn save_keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.saves.iter().map(|(_, key)| PyBytes::new(py, key)))
    }

    /// Their block ids, in the same order.
    #[getter]
    fn save_blocks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.saves.iter().map(|(block, _)| block))
    }

    /// Loads to begin in this step.
    #[getter]
    fn loads(&self, py: Python<'_>) -> Py<PyList> {
        match &self.extras {
            Some(extras) => extras.loads.clone_ref(py),
            None => PyList::empty(py).unbind(),
        }
    }

    /// Requests that ended during their load.
    #[getter]
    fn cancels(&self, py: Python<'_>) -> Py<PyList> {
        match &self.extras {
            Some(extras) => extras.cancels.clone_ref(py),
            None => PyList::empty(py).unbind(),
        }
    }

    /// Drop all stored blocks first.
    #[getter]
    fn reset(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| extras.reset)
    }

    /// Publish all stored keys again: a message was lost.
    #[getter]
    fn resend(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| extras.resend)
    }

    /// Use neither disk nor peers from now on: their blocks are of other weights.
    #[getter]
    fn detach(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| extras.detach)
    }

    /// Whether no block is to be saved.
    #[getter]
    fn saves_nothing(&self) -> bool {
        self.saves.is_empty()
    }

    /// Whether the step has no other work than saving blocks.
    #[getter]
    fn only_saves(&self) -> bool {
        self.extras.is_none()
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, StepMetadata>) -> PyResult<bool> {
        let other = other.get();
        let same_rest = match (&self.extras, &other.extras) {
            (None, None) => true,
            (Some(ours), Some(theirs)) => {
                let same_keys = match (&ours.keys, &theirs.keys) {
                    (None, None) => true,
                    (Some(ours), Some(theirs)) => ours.as_bytes(py) == theirs.as_bytes(py),
                    _ => false,
                };
                same_keys
                    && ours.loads.bind(py).eq(&theirs.loads)?
                    && ours.cancels.bind(py).eq(&theirs.cancels)?
                    && (ours.reset, ours.resend, ours.detach)
                        == (theirs.reset, theirs.resend, theirs.detach)
            }
            _ => false,
        };
        Ok(same_rest && self.saves == other.saves)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let (loads, cancels) = (self.loads(py), self.cancels(py));
        Ok(format!(
            "StepMetadata(saves {} blocks, loads={}, cancels={}, reset={}, resend={}, detach={})",
            self.saves.iter().len(),
            loads.bind(py).repr()?,
            cancels.bind(py).repr()?,
            self.reset(),
            self.resend(),
            self.detach()
        ))
    }

    /// Restores an instance from the result of [`StepMetadata::__reduce__`].
    #[staticmethod]
    fn join(parts: Parts<'_>) -> PyResult<StepMetadata> {
        let (records, record_bytes, keys, loads, cancels, reset, resend, detach) = parts;
        let records = records.as_bytes();
        let fits = match record_bytes {
            0 => records.is_empty(),
            bytes => bytes > ID_BYTES && records.len().is_multiple_of(bytes),
        };
        if !fits {
            return Err(PyValueError::new_err(format!(
                "{} bytes are not a whole number of records of {record_bytes} bytes",
                records.len()
            )));
        }
        let py = loads.py();
        let saves = Saves {
            records: records.to_vec(),
            record_bytes,
        };
        let extras = Extras {
            keys: keys.map(Bound::unbind),
            loads: loads.unbind(),
            cancels: cancels.unbind(),
            reset,
            resend,
            detach,
        };
        Ok(StepMetadata::with(py, saves, extras))
    }

    /// A buffer and the rare fields: no object per saved block.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Parts<'py>,))> {
        let (py, this) = (slf.py(), slf.get());
        let parts = (
            PyBytes::new(py, &this.saves.records),
            this.saves.record_bytes,
            this.keys(py).map(|keys| keys.into_bound(py)),
            this.loads(py).into_bound(py),
            this.cancels(py).into_bound(py),
            this.reset(),
            this.resend(),
            this.detach(),
        );
        Ok((py.get_type::<StepMetadata>().getattr("join")?, (parts,)))
    }
}

impl StepMetadata {
    fn with(py: Python<'_>, saves: Saves, extras: Extras) -> StepMetadata {
        StepMetadata {
            saves,
            extras: (!extras.is_empty(py)).then(|| Box::new(extras)),
        }
    }
}

/// Blocks of a pool that got a key since the last step, and the selection of those to save.
///
/// A block is saved if it still has a key, if it is the first in the pool that holds the key's
/// content, and if some rank's store does not hold that content. A block that was given to another request
/// since has lost its key, and is not saved.
#[pyclass(module = "slipstream._native", frozen)]
pub(crate) struct FilledBlocks {
    /// Python appends each block that gets a key. It may be listed twice.
    log: Py<PyList>,
    pool: Py<PyAny>,
    /// The keys that each rank's store holds.
    stored: Py<PyList>,
    /// Tokens per block by group, if vLLM caches some partial blocks; else empty.
    tokens: Vec<u64>,
    /// Builds the steps that have other work than saving blocks.
    slow: Py<PyAny>,
    /// Whether `slow` builds the next step.
    pending: AtomicBool,
    /// Whether `slow` also builds steps that preempt requests.
    by_priority: bool,
    nothing: Py<StepMetadata>,
    seen: Mutex<Seen>,
    errors: AtomicU64,
}

impl FilledBlocks {
    /// Takes the blocks of the log.
    fn take(&self, py: Python<'_>) -> Saves {
        let log = self.log.bind(py);
        let mut saves = Saves::default();
        let count = log.len();
        if count == 0 {
            return saves;
        }
        let mut seen = lock(&self.seen);
        let result = self.read(log, &mut saves, &mut seen);
        for (block, _) in saves.iter() {
            seen.taken[block as usize / 64] = 0;
        }
        drop(seen);
        // SAFETY: `log` is a list; PyList_SetSlice with null as the new items deletes the old ones.
        let cleared = unsafe {
            pyo3::ffi::PyList_SetSlice(log.as_ptr(), 0, count.cast_signed(), std::ptr::null_mut())
        };
        let cleared = if cleared == 0 {
            Ok(())
        } else {
            Err(PyErr::fetch(py))
        };
        if let Err(error) = result.and(cleared) {
            // A block that is not saved causes a later miss, which does not justify ending the engine.
            self.errors.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "blocks of a step are not saved, because their format is unknown: {error}; \
                 use a vLLM version that docs/connector.md lists"
            );
            return Saves::default();
        }
        saves
    }

    fn read(&self, log: &Bound<'_, PyList>, saves: &mut Saves, seen: &mut Seen) -> PyResult<()> {
        let py = log.py();
        let count = log.len();
        let stored = self.stored.bind(py);
        let mirrors = Mirrors::new(stored)?;
        for at in 0..count {
            let block = log.get_item(at)?;
            let key = block.getattr(intern!(py, "_block_hash"))?;
            if key.is_none() {
                continue;
            }
            let key = key.cast_into::<PyBytes>()?;
            if !seen.is_first(py, &self.pool, &key, &block)? {
                continue;
            }
            let bytes = key.as_bytes();
            if !self.tokens.is_empty() && !self.is_full(&block, bytes)? {
                continue;
            }
            if mirrors.all_hold(bytes) {
                continue;
            }
            let id: u32 = block.getattr(intern!(py, "block_id"))?.extract()?;
            let (word, bit) = (id as usize / 64, 1 << (id % 64));
            if word >= seen.taken.len() {
                seen.taken.resize(word + 1, 0);
            }
            if seen.taken[word] & bit == 0 {
                saves.push(bytes, id, count - at)?;
                seen.taken[word] |= bit;
            }
        }
        Ok(())
    }

    /// Whether the key is of a whole block, and not of the partial block at a prompt's end: no
    /// look-up asks for those. Source: vLLM 0.33, `FullAttentionManager._cache_partial_tail_block`.
    fn is_full(&self, block: &Bound<'_, PyAny>, key: &[u8]) -> PyResult<bool> {
        let tokens = block.getattr(intern!(block.py(), "_block_hash_num_tokens"))?;
        let tokens: u64 = tokens.extract::<Option<u64>>()?.unwrap_or(0);
        let group = key
            .last_chunk::<4>()
            .and_then(|id| self.tokens.get(u32::from_be_bytes(*id) as usize))
            .ok_or_else(|| PyTypeError::new_err("the key has no cache group"))?;
        Ok(tokens.is_multiple_of(*group))
    }
}

/// State kept from step to step.
#[derive(Default)]
struct Seen {
    /// The pool's map from key to block, as of the last miss of a key in it. A flush replaces the
    /// map.
    map: Option<Py<PyDict>>,
    /// A bit per block id, set while the block is in the step under construction.
    taken: Vec<u64>,
}

impl Seen {
    /// Whether the block is the first that holds the key's content.
    fn is_first(
        &mut self,
        py: Python<'_>,
        pool: &Py<PyAny>,
        key: &Bound<'_, PyBytes>,
        block: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        if let Some(map) = &self.map
            && let Some(holder) = map.bind(py).get_item(key)?
            && holder.is(block)
        {
            return Ok(true);
        }
        let map = pool
            .bind(py)
            .getattr(intern!(py, "cached_block_hash_to_block"))?
            .getattr(intern!(py, "_cache"))?
            .cast_into::<PyDict>()?;
        self.map = Some(map.clone().unbind());
        let Some(holder) = map.get_item(key)? else {
            return Ok(false);
        };
        if holder.is(block) {
            return Ok(true);
        }
        // Blocks of one content by id; the first one in the map is the oldest.
        let Ok(holders) = holder.cast_into::<PyDict>() else {
            return Ok(false);
        };
        Ok(holders.values().get_item(0)?.is(block))
    }
}

/// The keys that each rank's store holds.
struct Mirrors<'py> {
    /// `None` if some store is empty, so that no key is in all of them.
    first: Option<PyRef<'py, KeyMirror>>,
    others: Vec<PyRef<'py, KeyMirror>>,
}

impl<'py> Mirrors<'py> {
    fn new(stored: &Bound<'py, PyList>) -> PyResult<Mirrors<'py>> {
        let mut mirrors = Mirrors {
            first: None,
            others: Vec::new(),
        };
        for at in (0..stored.len()).rev() {
            let mirror = stored
                .get_item(at)?
                .cast_into::<KeyMirror>()?
                .try_borrow()?;
            if mirror.set().is_empty() {
                mirrors.first = None;
                return Ok(mirrors);
            }
            if let Some(other) = mirrors.first.replace(mirror) {
                mirrors.others.push(other);
            }
        }
        Ok(mirrors)
    }

    fn all_hold(&self, key: &[u8]) -> bool {
        self.first
            .iter()
            .chain(&self.others)
            .all(|mirror| mirror.set().contains(key))
            && self.first.is_some()
    }
}

#[pymethods]
impl FilledBlocks {
    /// `tokens`: tokens per block of each group, if vLLM caches some partial blocks; else empty.
    #[new]
    fn new(
        py: Python<'_>,
        log: Py<PyList>,
        pool: Py<PyAny>,
        stored: Py<PyList>,
        tokens: Vec<u64>,
        slow: Py<PyAny>,
        by_priority: bool,
    ) -> PyResult<FilledBlocks> {
        if tokens.contains(&0) {
            return Err(PyValueError::new_err("a block has no tokens"));
        }
        let nothing = StepMetadata {
            saves: Saves::default(),
            extras: None,
        };
        Ok(FilledBlocks {
            log,
            pool,
            stored,
            tokens,
            slow,
            pending: AtomicBool::new(false),
            by_priority,
            nothing: Py::new(py, nothing)?,
            seen: Mutex::new(Seen::default()),
            errors: AtomicU64::new(0),
        })
    }

    /// Builds the metadata of this step for the workers.
    fn build<'py>(&self, plan: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = plan.py();
        // By priority, a request that this step has planned may be preempted.
        if self.pending.load(Ordering::Relaxed)
            || (self.by_priority
                && plan
                    .getattr(intern!(py, "preempted_req_ids"))?
                    .is_truthy()?)
        {
            return self.slow.bind(py).call1((plan,));
        }
        let saves = self.take(py);
        if saves.is_empty() {
            return Ok(self.nothing.bind(py).clone().into_any());
        }
        Ok(Bound::new(
            py,
            StepMetadata {
                saves,
                extras: None,
            },
        )?
        .into_any())
    }

    /// Same as [`FilledBlocks::build`], with all fields that a step may have.
    fn build_with(
        &self,
        py: Python<'_>,
        loads: Py<PyList>,
        cancels: Py<PyList>,
        reset: bool,
        resend: bool,
        detach: bool,
    ) -> StepMetadata {
        let extras = Extras {
            keys: None,
            loads,
            cancels,
            reset,
            resend,
            detach,
        };
        StepMetadata::with(py, self.take(py), extras)
    }

    /// Lets `slow` build all steps until this is set to false.
    #[setter]
    fn set_pending(&self, pending: bool) {
        self.pending.store(pending, Ordering::Relaxed);
    }

    /// Number of steps whose blocks could not be read.
    #[getter]
    fn errors_total(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }
}
