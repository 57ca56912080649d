//! Sets of cached keys; wraps [`slipstream_kvindex`].

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};
use slipstream_base::width::nanos;
use slipstream_kvindex::{Change, KeyError, KeyMessage, Knowledge, digest};

use crate::lock;

fn to_python(error: KeyError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A number that is larger in each later life of a cache.
pub(crate) fn life() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, nanos)
}

/// The currently cached keys; see [`slipstream_kvindex::KeySet`].
///
/// A step with many changes (a prefill of 8,192 tokens adds and removes 1,000 keys) is applied by a
/// thread of the set, so that the scheduler pays for the copy alone. Calls for tests and
/// diagnosis wait for it. Calls of a step do not wait, and return the message in a later step.
#[pyclass(module = "slipstream._native")]
pub(crate) struct KeySet {
    inner: Arc<Inner>,
    thread: Option<(Sender<Batch>, JoinHandle<()>)>,
}

struct Inner {
    set: Mutex<slipstream_kvindex::KeySet>,
    /// Batches that the thread has not applied yet.
    waiting: Mutex<usize>,
    taken: Condvar,
    error: Mutex<Option<KeyError>>,
    /// Whether the thread must be woken.
    asleep: AtomicBool,
}

/// Changes in order, without Python objects.
#[derive(Default)]
struct Batch {
    /// The keys, one after the other.
    bytes: Vec<u8>,
    /// Length of each key and its change; `None` if all keys were dropped.
    changes: Vec<(usize, Option<Change>)>,
}

/// Maximum changes that a step applies itself: they cost as much as submitting them to the thread, about 5 µs.
const INLINE_MAX: usize = 64;
/// Interval at which the thread polls for changes while there have been recent ones. A wake-up per batch
/// would, on a busy machine, take the core of the waking thread.
const LOOK: Duration = Duration::from_millis(1);
/// After this many polls in vain the thread sleeps.
const IDLE_MAX: u32 = 1_000;
/// Changes looked up together: about as many as a core keeps misses in flight.
const TOGETHER: usize = 32;

impl Batch {
    fn apply(&self, set: &mut slipstream_kvindex::KeySet) -> Result<(), KeyError> {
        let mut rest = &self.bytes[..];
        for changes in self.changes.chunks(TOGETHER) {
            // The look-ups do not depend on each other, so their cache misses overlap; the entries
            // changed afterwards are then in the cache.
            let mut ahead = rest;
            for &(bytes, _) in changes {
                let (key, after) = ahead.split_at(bytes);
                std::hint::black_box(set.contains(key));
                ahead = after;
            }
            for &(bytes, change) in changes {
                let (key, after) = rest.split_at(bytes);
                rest = after;
                match change {
                    None => set.clear(),
                    Some(change) => set.change(key, change)?,
                }
            }
        }
        Ok(())
    }
}

/// Parses a log of changes for [`KeySet::apply`], and passes each change to `note`.
///
/// Entries come in pairs: a key and the id of the block that now holds it, or that id's complement
/// (`~id`) if the block no longer holds it. A `None` entry means that all keys were dropped.
fn read<'py>(
    log: &Bound<'py, PyList>,
    mut note: impl FnMut(Option<(&Bound<'py, PyBytes>, Change)>),
) -> PyResult<Batch> {
    let len = log.len();
    let mut batch = Batch {
        bytes: Vec::with_capacity(18 * len),
        changes: Vec::with_capacity(len / 2),
    };
    let mut at = 0;
    while at < len {
        let entry = log.get_item(at)?;
        at += 1;
        if entry.is_none() {
            batch.changes.push((0, None));
            note(None);
            continue;
        }
        if at == len {
            return Err(PyTypeError::new_err(
                "the log ends with a key without a block id",
            ));
        }
        let key = entry.cast_into::<PyBytes>()?;
        let block: i64 = log.get_item(at)?.cast::<PyInt>()?.extract()?;
        at += 1;
        let (id, gone) = if block < 0 {
            (!block, true)
        } else {
            (block, false)
        };
        let id = u32::try_from(id).map_err(|_| {
            PyValueError::new_err(format!("block id {id} does not fit into 32 bits"))
        })?;
        let change = if gone {
            Change::Remove(id)
        } else {
            Change::Add(id)
        };
        note(Some((&key, change)));
        batch.bytes.extend_from_slice(key.as_bytes());
        batch.changes.push((key.as_bytes().len(), Some(change)));
    }
    Ok(batch)
}

fn empty(log: &Bound<'_, PyList>) -> PyResult<()> {
    log.set_slice(0, log.len(), &PyList::empty(log.py()))
}

/// A hasher for keys that are hashes already.
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

/// Result of a step: the message for followers, and the new keys with their blocks.
type Step<'py> = (
    Option<Bound<'py, PyBytes>>,
    Vec<Bound<'py, PyBytes>>,
    Vec<u32>,
);

impl KeySet {
    /// Applies the changes, in the caller or in the thread.
    fn take(&mut self, batch: Batch) -> PyResult<()> {
        let inner = &self.inner;
        if let Some(error) = lock(&inner.error).take() {
            return Err(to_python(error));
        }
        let mut waiting = lock(&inner.waiting);
        if batch.changes.len() <= INLINE_MAX && *waiting == 0 {
            drop(waiting);
            return batch.apply(&mut lock(&inner.set)).map_err(to_python);
        }
        *waiting += 1;
        drop(waiting);
        if self.thread.is_none() {
            let (sender, batches) = std::sync::mpsc::channel::<Batch>();
            let inner = Arc::clone(inner);
            let work = move || {
                let mut idle = 0;
                loop {
                    match batches.try_recv() {
                        Ok(batch) => {
                            if let Err(error) = batch.apply(&mut lock(&inner.set)) {
                                *lock(&inner.error) = Some(error);
                            }
                            *lock(&inner.waiting) -= 1;
                            inner.taken.notify_all();
                            idle = 0;
                        }
                        Err(TryRecvError::Empty) if idle < IDLE_MAX => {
                            idle += 1;
                            std::thread::park_timeout(LOOK);
                        }
                        Err(TryRecvError::Empty) => {
                            inner.asleep.store(true, Ordering::SeqCst);
                            if inner.asleep.load(Ordering::SeqCst) && *lock(&inner.waiting) == 0 {
                                std::thread::park();
                            }
                            inner.asleep.store(false, Ordering::SeqCst);
                            idle = 0;
                        }
                        Err(TryRecvError::Disconnected) => return,
                    }
                }
            };
            let thread = std::thread::Builder::new()
                .name("kv-keys".into())
                .spawn(work)?;
            self.thread = Some((sender, thread));
        }
        let (sender, _) = self.thread.as_ref().expect("it was made above");
        sender
            .send(batch)
            .expect("the thread lives as long as its sender");
        Ok(())
    }

    /// Waits until the thread has applied everything.
    fn settled<T: Send>(
        &self,
        py: Python<'_>,
        then: impl FnOnce(&mut slipstream_kvindex::KeySet) -> T + Send,
    ) -> T {
        let inner = &self.inner;
        if let Some((_, thread)) = &self.thread {
            thread.thread().unpark();
        }
        py.detach(|| {
            let waiting = lock(&inner.waiting);
            drop(inner.taken.wait_while(waiting, |waiting| *waiting > 0));
            then(&mut lock(&inner.set))
        })
    }
}

impl Drop for KeySet {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.thread.take() {
            drop(sender);
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[pymethods]
impl KeySet {
    /// A set with capacity for `keys` keys.
    #[new]
    #[pyo3(signature = (keys=0))]
    fn new(keys: usize) -> Self {
        let inner = Inner {
            set: Mutex::new(slipstream_kvindex::KeySet::new(keys, life())),
            waiting: Mutex::new(0),
            taken: Condvar::new(),
            error: Mutex::new(None),
            asleep: AtomicBool::new(false),
        };
        KeySet {
            inner: Arc::new(inner),
            thread: None,
        }
    }

    /// Applies a log of changes and empties it. An error may be of an earlier log; changes before the
    /// rejected one are applied.
    fn apply(&mut self, log: &Bound<'_, PyList>) -> PyResult<()> {
        let batch = read(log, |_| {})?;
        empty(log)?;
        self.take(batch)
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

    /// [`KeySet::step`]; returns also the keys that the log added, with their blocks at its end. A key that
    /// another block already held may be among them, and one whose block changed may be missing.
    fn step_with_new<'py>(
        &mut self,
        log: &Bound<'py, PyList>,
        keys_max: usize,
    ) -> PyResult<Step<'py>> {
        let (mut keys, mut blocks): (Vec<Option<Bound<'_, PyBytes>>>, Vec<u32>) = (
            Vec::with_capacity(log.len() / 2),
            Vec::with_capacity(log.len() / 2),
        );
        // By digest: index in `keys` of a new key.
        let mut new: HashMap<u64, usize, BuildHasherDefault<AsItIs>> =
            HashMap::with_capacity_and_hasher(log.len() / 2, BuildHasherDefault::default());
        let small = log.len() <= 2 * INLINE_MAX && *lock(&self.inner.waiting) == 0;
        let mut held = small.then(|| lock(&self.inner.set));
        let batch = read(log, |change| {
            let Some((key, change)) = change else {
                held = None; // earlier keys are void from here on
                new.clear();
                keys.clear();
                blocks.clear();
                return;
            };
            let digest = digest(key.as_bytes()).0;
            match (change, new.get(&digest).copied()) {
                (Change::Add(_), Some(at)) if keys[at].is_some() => {}
                (Change::Add(block), _) => {
                    if !held
                        .as_ref()
                        .is_some_and(|held| held.contains(key.as_bytes()))
                    {
                        new.insert(digest, keys.len());
                        keys.push(Some(key.clone()));
                        blocks.push(block);
                    }
                }
                (Change::Remove(block), Some(at)) if blocks[at] == block => keys[at] = None,
                (Change::Remove(_), _) => {}
            }
        })?;
        drop(held);
        empty(log)?;
        self.take(batch)?;
        let new = keys
            .into_iter()
            .zip(blocks)
            .filter_map(|(key, block)| Some((key?, block)));
        let (keys, blocks) = new.unzip();
        Ok((self.take_message(log.py(), keys_max), keys, blocks))
    }

    /// The next message for followers. While the thread works, there is none until later.
    fn take_message<'py>(
        &mut self,
        py: Python<'py>,
        keys_max: usize,
    ) -> Option<Bound<'py, PyBytes>> {
        let message = self.inner.set.try_lock().ok()?.message(keys_max)?;
        Some(PyBytes::new(py, &message))
    }

    fn set_consumed(&self, py: Python<'_>, consumed: bool) {
        self.settled(py, |set| set.set_consumed(consumed));
    }

    fn request_snapshot(&self, py: Python<'_>) {
        self.settled(py, slipstream_kvindex::KeySet::request_snapshot);
    }

    /// All keys; costs O(keys), for tests.
    fn keys<'py>(&self, py: Python<'py>) -> Vec<Bound<'py, PyBytes>> {
        let keys = self.settled(py, |set| set.iter().map(<[u8]>::to_vec).collect::<Vec<_>>());
        keys.iter().map(|key| PyBytes::new(py, key)).collect()
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.settled(py, |set| set.len())
    }

    fn __contains__(&self, py: Python<'_>, key: &[u8]) -> bool {
        self.settled(py, |set| set.contains(key))
    }
}

/// The keys of another engine, built from its messages; see [`slipstream_kvindex::KeyMirror`].
#[pyclass(module = "slipstream._native")]
#[derive(Default)]
pub(crate) struct KeyMirror(slipstream_kvindex::KeyMirror);

impl KeyMirror {
    pub(crate) fn set(&self) -> &slipstream_kvindex::KeySet {
        self.0.keys()
    }
}

#[pymethods]
impl KeyMirror {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Applies one message. A repeated message is ignored.
    fn apply(&mut self, message: &[u8]) -> PyResult<()> {
        match self.0.apply(message) {
            Err(error) if error.loses_trust() => Err(to_python(error)),
            _ => Ok(()),
        }
    }

    /// The keys that a message adds and removes, whether it begins a snapshot, and whether it makes all
    /// keys known.
    #[staticmethod]
    #[allow(clippy::type_complexity)]
    fn read<'py>(
        py: Python<'py>,
        message: &[u8],
    ) -> PyResult<(
        Vec<Bound<'py, PyBytes>>,
        Vec<Bound<'py, PyBytes>>,
        bool,
        bool,
    )> {
        let message = KeyMessage::read(message).map_err(to_python)?;
        let bytes = |key| PyBytes::new(py, key);
        Ok((
            message.added().map(bytes).collect(),
            message.removed().map(bytes).collect(),
            message.begins,
            message.ends,
        ))
    }

    /// Whether a snapshot of all keys is complete with this message.
    #[staticmethod]
    fn ends(message: &[u8]) -> PyResult<bool> {
        Ok(KeyMessage::read(message).map_err(to_python)?.ends)
    }

    /// Whether all keys are known.
    #[getter]
    fn is_trusted(&self) -> bool {
        self.0.knowledge() == Knowledge::All
    }

    /// Indexes of the keys that are not held; `None` if no key is held.
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
