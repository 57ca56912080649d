//! The cluster file of a running server: its `engines` are followed, and other changes are named.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread::JoinHandle;
use std::time::Duration;

use slipstream_config::cluster::{Cluster, EngineTls, EngineUrl};
use slipstream_config::doc::Settings;
use slipstream_frontend::upstream::{EngineSpec, Engines, MemberError};
use slipstream_os::files;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::keys::{KeyFiles, read_key, read_tls};

/// Interval at which the file is read. A change counts once it was read twice: an editor may be writing it.
const LOOK: Duration = Duration::from_secs(1);

/// Time that the exit of the process waits for the watcher to end.
const END: Duration = Duration::from_millis(500);

/// Reads a file that a cluster file names.
pub type ReadFile<'r> = &'r dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// The cluster file of a server. It is read again every second, and at SIGHUP: engines that are new join, and those
/// that are gone drain. Other changes are logged as ones that need a restart.
pub struct ClusterFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its text as of the start.
    pub text: String,
    /// The origin of each value as of the start.
    pub settings: Settings,
    /// Resolves its text into a checked cluster and the origin of each value. Files that it names are read by the second
    /// argument.
    pub resolve: Box<Resolve>,
}

/// See [`ClusterFile::resolve`].
pub type Resolve = dyn Fn(String, ReadFile<'_>) -> anyhow::Result<(Cluster, Settings)> + Send;

/// Watches a cluster file until it is dropped.
pub(crate) struct Reload {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread ends.
    ended: std::sync::mpsc::Receiver<()>,
}

impl Drop for Reload {
    fn drop(&mut self) {
        let _ = self.stop.send(true); // an error: the thread has ended
        // Not joined before it ends: a hung file system must not block exit.
        if self.ended.recv_timeout(END) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the cluster file is still being read; not waiting for it");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches the cluster file ended by panic");
        }
    }
}

/// Engines and their pools, as a file lists them.
type Listed = BTreeMap<String, (EngineUrl, String)>;

fn listed(cluster: &Cluster) -> Listed {
    let mut all = Listed::new();
    for pool in &cluster.pools {
        for url in pool.engines.iter().flat_map(|engines| &engines.urls) {
            all.insert(url.to_string(), (url.clone(), pool.name.clone()));
        }
    }
    all
}

/// Settings by path, without the lists of engines and their keys.
fn others(settings: &Settings) -> BTreeMap<String, Option<String>> {
    let of_engines = |path: &str| {
        let key = path.rsplit('.').next().unwrap_or_default();
        let of_pool = [
            "engines",
            "kind",
            "api_key_file",
            "ca_file",
            "cert_file",
            "key_file",
            "server_name",
            "weight",
            "mirror",
        ];
        path.starts_with("pool.") && of_pool.contains(&key)
    };
    let each = settings.iter().filter(|of| !of_engines(&of.path));
    each.map(|of| (of.path.clone(), of.value.clone())).collect()
}

struct Watcher {
    file: ClusterFile,
    engines: Arc<Engines>,
    keys: Arc<KeyFiles>,
    /// Engines that the file gave to the fleet.
    listed: Listed,
    /// As of the start.
    others: BTreeMap<String, Option<String>>,
    /// Digest of the text that was applied last.
    applied: u64,
    /// Digest of the text that was read last.
    seen: u64,
}

/// Watches `file`, which gave `started` to `engines`.
///
/// # Errors
/// The thread or its runtime cannot be made.
pub(crate) fn start(
    file: ClusterFile,
    started: &Cluster,
    engines: Arc<Engines>,
    keys: Arc<KeyFiles>,
) -> anyhow::Result<Reload> {
    // As of the text that the router started with: the file may have changed since then.
    let mut watcher = Watcher {
        engines,
        keys,
        listed: listed(started),
        others: others(&file.settings),
        applied: digest(&file.text),
        seen: digest(&file.text),
        file,
    };
    // Reading a pipe every second would take its content from whom it is for.
    let meta = watcher.file.path.metadata();
    let is_followed = !meta.is_ok_and(|of| of.file_type().is_fifo());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let hangup = {
        let _entered = runtime.enter();
        signal(SignalKind::hangup())?
    };
    let (stop, mut stopped) = watch::channel(false);
    let (end, ended) = std::sync::mpsc::channel();
    let run = move || {
        let _end: std::sync::mpsc::Sender<()> = end;
        let mut hangup = hangup;
        runtime.block_on(async move {
            loop {
                tokio::select! {
                    _ = stopped.changed() => return,
                    _ = hangup.recv() => watcher.reload(),
                    () = tokio::time::sleep(LOOK), if is_followed => watcher.look(),
                }
            }
        });
    };
    let thread = std::thread::Builder::new()
        .name("config-watch".into())
        .spawn(run)?;
    Ok(Reload {
        stop,
        thread: Some(thread),
        ended,
    })
}

/// Reads a file of a running process.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    files::reread(path, files::BYTES_MAX)
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

impl Watcher {
    fn text(&self) -> io::Result<String> {
        files::reread_text(&self.file.path, files::BYTES_MAX)
    }

    /// Applies the file if it has changed, and does not change any more.
    fn look(&mut self) {
        let Ok(text) = self.text() else {
            return; // it is being replaced
        };
        let now = digest(&text);
        let before = std::mem::replace(&mut self.seen, now);
        if now != self.applied && now == before {
            self.reload();
        }
    }

    /// Applies the file.
    fn reload(&mut self) {
        let refuse = |error: anyhow::Error| {
            tracing::warn!(
                "the cluster file was not applied, the settings in effect remain: {error:#}"
            );
        };
        let text = match self.text() {
            Ok(text) => text,
            Err(error) => return refuse(error.into()),
        };
        self.applied = digest(&text);
        match (self.file.resolve)(text, &read) {
            Ok((cluster, settings)) => self.apply(&cluster, &settings),
            Err(error) => refuse(error),
        }
    }

    fn apply(&mut self, cluster: &Cluster, settings: &Settings) {
        let refuse = |why: &str| {
            tracing::warn!(
                "the cluster file was not applied, the settings in effect remain: {why}"
            );
        };
        if !cluster.has_engines() {
            return refuse("it lists no engines any more");
        }
        let again = |path: &Path| self.keys.reread(path);
        let key = |path: &Path| read_key(path, again);
        let tls = |tls: &EngineTls| read_tls(tls, again);
        let pools = match EngineSpec::of_cluster(cluster, key, tls) {
            Ok((_, pools)) => pools,
            Err(error) => return refuse(&format!("{error:#}")),
        };
        self.engines.set_pools(pools);
        let now = listed(cluster);
        for (name, (url, pool)) in &self.listed {
            match now.get(name) {
                // It may have been removed by the admin API.
                None => _ = self.engines.drain(url, None),
                Some((_, to)) if to != pool => {
                    tracing::warn!(engine = %url, "moving it from pool `{pool}` to `{to}` needs a restart");
                }
                Some(_) => {}
            }
        }
        let mut kept = now.clone();
        for (name, (url, pool)) in &now {
            if self.listed.contains_key(name) {
                continue;
            }
            match self.engines.add(url, Some(pool), None, None) {
                Ok(_) | Err(MemberError::Listed { .. }) => {}
                Err(error) => {
                    tracing::warn!(engine = %url, "not added: {error}");
                    kept.remove(name); // tried again with the next change
                }
            }
        }
        self.listed = kept;
        self.say_restart(settings);
        tracing::info!(
            "the cluster file was applied: {} engines",
            self.engines.count()
        );
    }

    /// Names the changes since the start that need a restart.
    fn say_restart(&self, settings: &Settings) {
        let others = others(settings);
        // A pool that comes or goes is no change of its keys.
        let pool_of = |path: &str| {
            path.strip_prefix("pool.")?
                .split('.')
                .next()
                .map(str::to_owned)
        };
        let has_pool = |of: &BTreeMap<String, Option<String>>, path: &str| {
            let pool = pool_of(path);
            pool.is_none() || of.keys().any(|path| pool_of(path) == pool)
        };
        let changed = |from: &BTreeMap<String, Option<String>>, path: &str| {
            from.get(path) != others.get(path)
        };
        let both = self.others.keys().chain(others.keys());
        let paths: BTreeSet<&str> = both
            .map(String::as_str)
            .filter(|path| changed(&self.others, path))
            .filter(|path| has_pool(&self.others, path) && has_pool(&others, path))
            .collect();
        let paths: Vec<&str> = paths.into_iter().collect();
        if !paths.is_empty() {
            tracing::warn!("changes of these keys need a restart: {}", paths.join(", "));
        }
    }
}
