//! [`slipstream_kvstore::Store`] for Python; see `slipstream.store.Store`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use slipstream_base::width::floor_u64;
use slipstream_kvstore::store::LoadRequest;
use slipstream_kvstore::{
    Medium, MemoryOptions, MemoryTier, Nixl, NixlOptions, PeerOptions, Region, Setting, StoreError,
    StoreOptions, TierError, open_lower,
};

use crate::peers::{addresses, discovery, profile};

/// Memory of a Python object that exposes its bytes.
struct Buffer {
    base: *mut u8,
    len: usize,
    /// Pins the memory.
    _owner: PyBuffer<u8>,
}

// SAFETY: the memory stays valid while the buffer object lives, in any thread. The users of buffers
// state who may access the bytes, and when.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new(owner: PyBuffer<u8>, write: bool) -> PyResult<Buffer> {
        if !owner.is_c_contiguous() {
            return Err(PyValueError::new_err("the buffer is not contiguous"));
        }
        if write && owner.readonly() {
            return Err(PyValueError::new_err("the buffer cannot be written to"));
        }
        Ok(Buffer {
            base: owner.buf_ptr().cast(),
            len: owner.len_bytes(),
            _owner: owner,
        })
    }

    /// # Safety
    ///
    /// No code writes to these bytes while the slice lives.
    unsafe fn bytes(&self) -> &[u8] {
        let base = NonNull::new(self.base).unwrap_or(NonNull::dangling());
        // SAFETY: the buffer, which lives as long as `self`; the caller's promise.
        unsafe { std::slice::from_raw_parts(base.as_ptr(), self.len) }
    }

    fn into_region(self) -> Arc<Region> {
        let base = NonNull::new(self.base).unwrap_or(NonNull::dangling());
        // SAFETY: the buffer is the region's owner, and stays valid and initialized while it
        // lives; `slipstream.store.Store`: the caller accesses it only after the end of its load.
        unsafe { Region::from_raw(base, self.len, Box::new(self)) }
    }
}

/// Block size in bytes, one for all groups or one per group.
#[derive(FromPyObject)]
enum BlockBytes {
    One(usize),
    Groups(Vec<usize>),
}

/// Keyword arguments of [`Store::new`].
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct StoreConfig {
    block_bytes: BlockBytes,
    host_bytes: usize,
    /// Maximum time for which [`Store::close`] writes blocks that wait for the disk.
    #[pyo3(default = 30.0)]
    close_s: f64,
    /// 0: blocks of any age are served.
    #[pyo3(default)]
    ttl_s: f64,
    #[pyo3(default = 2048)]
    keys_max: usize,
    /// The properties that blocks depend on; `None`: no peers.
    #[pyo3(default)]
    identity: Option<BTreeMap<String, String>>,
    #[pyo3(default)]
    name: String,
    #[pyo3(default)]
    listen: Vec<String>,
    #[pyo3(default)]
    peers: Vec<String>,
    /// Names of the peers in the `sources` of loads, if not their addresses.
    #[pyo3(default)]
    peer_names: Option<Vec<String>>,
    /// Whether [`Store::take_tier_message`] has messages.
    #[pyo3(default)]
    publish_tiers: bool,
    /// NIXL's library, required for `nixl:` addresses.
    #[pyo3(default)]
    nixl: Option<PathBuf>,
    /// The place where other engines discover this store, and it discovers them.
    #[pyo3(default)]
    peers_dir: Option<PathBuf>,
    /// The same for all ranks of this engine, and different for every other engine.
    #[pyo3(default)]
    engine: String,
}

const FIELDS: [&str; 14] = [
    "block_bytes",
    "host_bytes",
    "close_s",
    "ttl_s",
    "keys_max",
    "identity",
    "name",
    "listen",
    "peers",
    "peer_names",
    "publish_tiers",
    "nixl",
    "peers_dir",
    "engine",
];

/// A setting of a tier below memory.
#[derive(FromPyObject)]
enum LowerSetting {
    Count(u64),
    Path(PathBuf),
    Paths(Vec<PathBuf>),
}

impl From<LowerSetting> for Setting {
    fn from(value: LowerSetting) -> Setting {
        match value {
            LowerSetting::Count(count) => Setting::Count(count),
            LowerSetting::Path(path) => Setting::Path(path),
            LowerSetting::Paths(paths) => Setting::Paths(paths),
        }
    }
}

impl StoreConfig {
    /// Reads the arguments; those that are not its own are settings of tiers below memory.
    fn of(
        arguments: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(StoreConfig, BTreeMap<String, Setting>)> {
        let Some(arguments) = arguments else {
            return Err(PyTypeError::new_err(
                "block_bytes and host_bytes are missing",
            ));
        };
        let mut lower = BTreeMap::new();
        for (name, value) in arguments {
            let name: String = name.extract()?;
            if !FIELDS.contains(&name.as_str())
                && let Some(value) = value.extract::<Option<LowerSetting>>()?
            {
                lower.insert(name, value.into());
            }
        }
        Ok((arguments.extract()?, lower))
    }

    fn options(self, lower: BTreeMap<String, Setting>) -> PyResult<StoreOptions> {
        let peers = self.peers()?;
        let ttl_ns = Some(floor_u64(self.ttl_s * 1e9)).filter(|ns| *ns > 0);
        let block_bytes = match self.block_bytes {
            BlockBytes::One(bytes) => vec![bytes],
            BlockBytes::Groups(groups) => groups,
        };
        let memory = MemoryTier::new(MemoryOptions {
            bytes: self.host_bytes,
            block_bytes: block_bytes.iter().copied().max().unwrap_or(0),
            ttl_ns,
        });
        let mut options = StoreOptions::new(memory.map_err(|error| to_python(error.into()))?);
        options.lower = open_lower(lower, ttl_ns).map_err(|error| to_python(error.into()))?;
        options.block_bytes = block_bytes;
        options.close_max = seconds(self.close_s);
        options.keys_max = self.keys_max;
        options.publish_tiers = self.publish_tiers;
        options.peers = peers;
        Ok(options)
    }

    fn peers(&self) -> PyResult<Option<PeerOptions>> {
        let Some(identity) = &self.identity else {
            return Ok(None);
        };
        if self.listen.is_empty() && self.peers.is_empty() && self.peers_dir.is_none() {
            return Ok(None);
        }
        let names = self.peer_names.as_ref().unwrap_or(&self.peers);
        if names.len() != self.peers.len() {
            return Err(PyValueError::new_err("each peer needs one name"));
        }
        let nixl = self.nixl.as_deref();
        Ok(Some(PeerOptions {
            name: self.name.clone(),
            profile: profile(identity)?,
            listen: addresses(&self.listen)?,
            peers: names.iter().cloned().zip(addresses(&self.peers)?).collect(),
            nixl: nixl.map_or(Nixl::Off, |library| Nixl::On(NixlOptions::new(library))),
            discovery: discovery(
                self.peers_dir.clone(),
                &self.engine,
                identity,
                nixl.is_some(),
            ),
        }))
    }
}

/// The store of one rank; see [`slipstream_kvstore::store`] and `slipstream.store.Store`.
#[pyclass(module = "slipstream._native")]
pub(crate) struct Store {
    store: slipstream_kvstore::Store,
}

#[pymethods]
impl Store {
    /// Takes the fields of `StoreConfig` and settings of tiers below memory as keyword arguments.
    #[new]
    #[pyo3(signature = (**arguments))]
    fn new(arguments: Option<&Bound<'_, PyDict>>) -> PyResult<Store> {
        let (config, lower) = StoreConfig::of(arguments)?;
        let options = config.options(lower)?;
        let store = slipstream_kvstore::Store::start(options).map_err(to_python)?;
        Ok(Store { store })
    }

    fn put(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyBytes>>,
        data: PyBuffer<u8>,
    ) -> PyResult<usize> {
        let keys = owned(&keys);
        let data = Buffer::new(data, false)?;
        let put = || {
            // SAFETY: `slipstream.store.Store`: no code writes to `data` until this returns.
            self.store.put(keys, unsafe { data.bytes() })
        };
        py.detach(put).map_err(to_python)
    }

    fn load(
        &self,
        job: u64,
        keys: Vec<Bound<'_, PyBytes>>,
        sources: Vec<String>,
        into: PyBuffer<u8>,
        deadline_s: f64,
    ) -> PyResult<()> {
        let request = LoadRequest {
            job,
            keys: owned(&keys),
            sources,
            into: Buffer::new(into, true)?.into_region(),
            deadline: seconds(deadline_s),
        };
        self.store.load(request).map_err(to_python)
    }

    fn wait(&self, py: Python<'_>, timeout_s: f64) -> Vec<(u64, Vec<u32>, &'static str)> {
        // Buffers are dropped here, because dropping a Python object waits for the interpreter.
        let ended = py.detach(|| self.store.wait(seconds(timeout_s)));
        let ended = ended.into_iter();
        ended.map(|end| (end.job, end.failed, end.reason)).collect()
    }

    fn take_message<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let message = self.store.take_message()?;
        Some(PyBytes::new(py, &message))
    }

    fn take_tier_message<'py>(
        &self,
        py: Python<'py>,
    ) -> Option<(&'static str, Bound<'py, PyBytes>)> {
        let (medium, message) = self.store.take_tier_message()?;
        Some((Medium::name(medium), PyBytes::new(py, &message)))
    }

    fn request_snapshot(&self) {
        self.store.request_snapshot();
    }

    /// Totals by metric.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, counts) = (self.store.stats(), PyDict::new(py));
        for (medium, tier) in stats.tiers {
            for (metric, count) in [
                ("hit_blocks", tier.hits_total),
                ("evicted_blocks", tier.evicted_total),
                ("expired_blocks", tier.expired_total),
                ("corrupt_blocks", tier.corrupt_total),
                ("store_failed_blocks", tier.failed_total),
            ] {
                counts.set_item(format!("{metric}.{}", Medium::name(medium)), count)?;
            }
        }
        counts.set_item("disk_dropped_blocks", stats.dropped_blocks)?;
        counts.set_item("message_errors", stats.unpublished_keys)?;
        let Some(peers) = stats.peers else {
            return Ok(counts);
        };
        let transport = peers.transport;
        for (metric, count) in [
            ("hit_blocks.peer", transport.fetched_blocks_total),
            ("fetched_bytes", transport.fetched_bytes_total),
            ("served_blocks", transport.served_blocks_total),
            ("served_bytes", transport.served_bytes_total),
            ("peer_refused", transport.refused_total),
            ("peer_malformed", transport.malformed_total),
            ("peer_message_errors", transport.key_errors_total),
        ] {
            counts.set_item(metric, count)?;
        }
        Ok(counts)
    }

    fn reset(&self) {
        self.store.reset();
    }

    fn detach(&self) -> PyResult<()> {
        self.store.detach().map_err(to_python)
    }

    fn address(&self) -> String {
        let address = self.store.address();
        address.map_or_else(String::new, |address| address.to_string())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.store.close());
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}

fn owned(keys: &[Bound<'_, PyBytes>]) -> Vec<Box<[u8]>> {
    keys.iter().map(|key| key.as_bytes().into()).collect()
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
}

/// The text of an error and of its causes.
pub(crate) fn with_source(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}

pub(crate) fn to_python(error: StoreError) -> PyErr {
    let text = with_source(&error);
    match error {
        StoreError::NoBlockBytes
        | StoreError::NoGroup { .. }
        | StoreError::Buffer { .. }
        | StoreError::Sources { .. }
        | StoreError::Unreachable { .. } => PyValueError::new_err(text),
        StoreError::Tier(TierError::Setting { .. }) => PyTypeError::new_err(text),
        StoreError::Thread(_) => PyRuntimeError::new_err(text),
        StoreError::Tier(_) | StoreError::Transport(_) | StoreError::Discovery(_) => {
            PyOSError::new_err(text)
        }
    }
}
