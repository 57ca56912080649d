//! State that operators change while a server of modelled engines runs, by vLLM's routes: LoRA adapters, the prefix
//! cache, sleep.
//!
//! The routes exist only with `live.management`: a client that uses them affects all others. State is that of one
//! frontend process, shared by its shards; it costs a request two loads.
//!
//! No worker takes part. The blocks of a prompt descend from a root, so another root is another cache: every adapter has
//! its own, and a reset of the prefix cache changes all of them. Blocks of before the reset stay in the engines until
//! others need their room.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use slipstream_base::BlockHash;
use slipstream_base::sync::unpoisoned;
use slipstream_metrics::Samples;
use tokio::sync::Notify;

use crate::door::clock::now_unix_s;

/// Adapters at most, loaded at once.
const ADAPTERS_MAX: usize = 1024;
/// Bytes of an adapter's name at most.
const NAME_BYTES_MAX: usize = 256;

/// See the module's text.
#[derive(Default)]
pub struct Management {
    served: bool,
    /// Further names of the model.
    pub(crate) aliases: Vec<String>,
    /// Publishers of KV events, by rank, as vLLM's `/kv_event_sources` names them: JSON. Empty if none is published.
    pub kv_event_sources: OnceLock<String>,
    adapters: RwLock<BTreeMap<String, Arc<Adapter>>>,
    /// Whether an adapter was ever there: others need no lock.
    has_adapters: AtomicU64,
    /// Times that the prefix cache was reset.
    resets: AtomicU64,
    /// Prompts that share no block so far.
    unshared: AtomicU64,
    /// The parts that sleep, of [`WEIGHTS`] and [`KV_CACHE`], and the level.
    asleep: AtomicU64,
    woken: Notify,
}

pub(crate) const WEIGHTS: u64 = 1;
pub(crate) const KV_CACHE: u64 = 2;
/// The level of the sleep is in the bits from this one on.
const LEVEL: u32 = 8;

/// A LoRA adapter: a model's name with a prefix cache of its own. Engines limit and load it by `[engine.lora]`.
#[derive(Debug)]
pub(crate) struct Adapter {
    pub(crate) name: String,
    /// Where its weights would be. Another path is another cache, as in vLLM (`_gen_lora_extra_hash_keys`): an adapter
    /// that is loaded again from the same path finds its blocks.
    pub(crate) path: String,
    /// Those of an adapter that is replaced in place go on.
    open: Arc<OpenRequests>,
}

/// Open requests of an adapter.
#[derive(Debug, Default)]
struct OpenRequests {
    waiting: AtomicU64,
    running: AtomicU64,
}

/// A request that uses an adapter, for as long as it is open.
#[derive(Debug)]
pub(crate) struct AdapterUse {
    adapter: Arc<Adapter>,
    runs: bool,
}

impl AdapterUse {
    /// A request that waits for its first token.
    pub(crate) fn new(adapter: Arc<Adapter>) -> AdapterUse {
        adapter.open.waiting.fetch_add(1, Relaxed);
        AdapterUse {
            adapter,
            runs: false,
        }
    }

    /// Its first token is here.
    pub(crate) fn run(&mut self) {
        if !self.runs {
            self.runs = true;
            self.adapter.open.waiting.fetch_sub(1, Relaxed);
            self.adapter.open.running.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for AdapterUse {
    fn drop(&mut self) {
        let count = if self.runs {
            &self.adapter.open.running
        } else {
            &self.adapter.open.waiting
        };
        count.fetch_sub(1, Relaxed);
    }
}

impl fmt::Debug for Management {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Management({} adapters)", self.read().len())
    }
}

impl Management {
    /// With the routes if they are to be `served`, and `adapters` of the served `model`.
    ///
    /// # Errors
    /// The fault of a name.
    pub fn new(served: bool, adapters: &[String], model: &str) -> Result<Management, NameError> {
        let management = Management {
            served,
            ..Management::default()
        };
        for name in adapters {
            management.load(name, name, model, false)?;
        }
        Ok(management)
    }

    /// As [`new`](Self::new), with further names of the model.
    #[must_use]
    pub fn with_aliases(mut self, aliases: Vec<String>) -> Management {
        self.aliases = aliases;
        self
    }

    /// Whether the routes exist.
    pub(crate) fn is_served(&self) -> bool {
        self.served
    }

    // A panic elsewhere leaves the map whole: each change is one insertion or removal.
    /// Empties the prefix cache: prompts share no blocks with those before.
    pub(crate) fn reset(&self) {
        self.resets.fetch_add(1, Relaxed);
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Arc<Adapter>>> {
        unpoisoned(self.adapters.read())
    }

    /// Forgets an adapter. False if there is none of that name.
    pub(crate) fn unload(&self, name: &str) -> bool {
        self.write().remove(name).is_some()
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<String, Arc<Adapter>>> {
        unpoisoned(self.adapters.write())
    }

    /// The adapter of this name.
    pub(crate) fn adapter(&self, name: &str) -> Option<Arc<Adapter>> {
        if self.has_adapters.load(Relaxed) == 0 {
            return None;
        }
        self.read().get(name).cloned()
    }

    /// All adapters, by name.
    pub(crate) fn adapters(&self) -> Vec<Arc<Adapter>> {
        self.read().values().cloned().collect()
    }

    /// Loads an adapter of `model`, `in_place` of one that has the name.
    pub(crate) fn load(
        &self,
        name: &str,
        path: &str,
        model: &str,
        in_place: bool,
    ) -> Result<(), NameError> {
        let mut adapters = self.write();
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(char::is_control) {
            return Err(NameError::Form(name.to_owned()));
        }
        if name == model {
            return Err(NameError::Model(name.to_owned()));
        }
        let open = match adapters.get(name) {
            None if adapters.len() >= ADAPTERS_MAX => return Err(NameError::TooMany),
            None => Arc::default(),
            Some(_) if !in_place => return Err(NameError::Loaded(name.to_owned())),
            Some(replaced) => replaced.open.clone(),
        };
        self.has_adapters.fetch_add(1, Relaxed);
        let adapter = Adapter {
            name: name.to_owned(),
            path: path.to_owned(),
            open,
        };
        adapters.insert(name.to_owned(), Arc::new(adapter));
        Ok(())
    }

    /// Root of the blocks of a prompt for `adapter`, or `model` itself, whose `own` root it is without others, with
    /// the client's `salt`.
    pub(crate) fn root(
        &self,
        model: &str,
        own: BlockHash,
        adapter: Option<&Adapter>,
        salt: Option<&str>,
    ) -> BlockHash {
        let resets = self.resets.load(Relaxed);
        if let (None, None, 0) = (adapter, salt, resets) {
            return own;
        }
        // No name has control characters; a path, which may have them, is last.
        let cache = match (adapter, resets) {
            (None, 0) => String::new(),
            (None, resets) => format!("\u{0}{resets}"),
            (Some(Adapter { name, path, .. }), 0) if name == path => name.clone(),
            (Some(Adapter { name, path, .. }), resets) => {
                format!("{name}\u{0}{resets}\u{0}{path}")
            }
        };
        BlockHash::root(model, &cache, salt.unwrap_or_default())
    }

    /// Root of the blocks of a prompt that shares none.
    pub(crate) fn unshared_root(&self, model: &str) -> BlockHash {
        let number = self.unshared.fetch_add(1, Relaxed);
        let salt = format!("{} {number}", std::process::id());
        BlockHash::root(model, "\u{0}unshared", &salt)
    }

    pub(crate) fn is_sleeping(&self) -> bool {
        self.asleep.load(Relaxed) & (WEIGHTS | KV_CACHE) != 0
    }

    /// Waits until the engines are awake, or `stops` is true after [`Self::look_again`].
    pub(crate) async fn awake(&self, stops: impl Fn() -> bool) {
        let waits = || self.is_sleeping() && !stops();
        while waits() {
            let mut woken = pin!(self.woken.notified());
            woken.as_mut().enable();
            if waits() {
                woken.await;
            }
        }
    }

    /// Those who wait for the engines look again.
    pub(crate) fn look_again(&self) {
        self.woken.notify_waiters();
    }

    pub(crate) fn sleep(&self, level: u64) {
        self.asleep
            .store(WEIGHTS | KV_CACHE | level << LEVEL, Relaxed);
        // Level 0 keeps the cache.
        if level > 0 {
            self.resets.fetch_add(1, Relaxed);
        }
    }

    /// Wakes `parts`. Returns whether all are awake.
    pub(crate) fn wake(&self, parts: u64) -> bool {
        let before = self.asleep.fetch_and(!parts, Relaxed);
        if before & !parts & (WEIGHTS | KV_CACHE) != 0 {
            return false;
        }
        self.asleep.store(0, Relaxed);
        self.woken.notify_waiters();
        true
    }

    /// Adds the states of sleep, with `labels`: 1 for that in which the engines are.
    pub(crate) fn sleep_states(&self, labels: &[(&str, &str)], samples: &mut Samples<'_>) {
        let level = self.asleep.load(Relaxed) >> LEVEL;
        for (state, holds) in [
            ("awake", !self.is_sleeping()),
            ("weights_offloaded", level == 1),
            ("discard_all", level == 2),
        ] {
            let mut labels = labels.to_vec();
            labels.push(("sleep_state", state));
            samples.add_integer(&labels, holds.into());
        }
    }

    /// Whether there may be adapters, or ever were some.
    pub(crate) fn shows_adapters(&self) -> bool {
        self.has_adapters.load(Relaxed) != 0 || self.served
    }

    /// Adds the names of adapters with open requests.
    pub(crate) fn open_adapters(&self, samples: &mut Samples<'_>) {
        let adapters = self.adapters();
        let names = |count: fn(&Adapter) -> &AtomicU64| {
            let used = adapters
                .iter()
                .filter(|adapter| count(adapter).load(Relaxed) > 0);
            let names: Vec<&str> = used.map(|adapter| adapter.name.as_str()).collect();
            names.join(",")
        };
        let labels = [
            ("max_lora", &*ADAPTERS_MAX.to_string()),
            (
                "waiting_lora_adapters",
                &names(|adapter| &adapter.open.waiting),
            ),
            (
                "running_lora_adapters",
                &names(|adapter| &adapter.open.running),
            ),
        ];
        samples.add_real(&labels, now_unix_s() as f64);
    }
}

/// A name that no adapter can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Its length or a character.
    #[error(
        "the adapter's name {0:?} must have 1 to {NAME_BYTES_MAX} bytes and no control character"
    )]
    Form(String),
    /// The model has it.
    #[error("`{0}` is the served model; choose another name for the adapter")]
    Model(String),
    /// Another adapter has it.
    #[error(
        "the adapter `{0}` is loaded already; send `\"load_inplace\": true` to replace it, unload it first, or choose \
         another name"
    )]
    Loaded(String),
    /// There is no room.
    #[error("{ADAPTERS_MAX} adapters are loaded, and no more may be; unload one")]
    TooMany,
}
