//! How frontend and worker processes find each other.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use slipstream_base::BlockHash;
use slipstream_config::cluster::{Cluster, EventBus};
use slipstream_planes::tls::{Tls, TlsFiles};

/// Flags that frontends and workers share.
#[derive(clap::Args)]
pub(crate) struct PlaneArgs {
    /// Directory in which processes find each other; share it to join several hosts
    /// [default: slipstream-UID in the directory for temporary files]
    #[arg(long, value_name = "DIR", env = "SLIPSTREAM_DISCOVERY")]
    discovery: Option<PathBuf>,
    /// A process that does not renew its record for so long is forgotten, s
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    lease: f64,
    /// A peer that is silent for so long is cut off, s
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    peer_deadline: f64,
    /// Encrypt connections between processes: certificate of this one (PEM); a frontend's must
    /// name `slipstream`
    #[arg(long, value_name = "FILE", requires_all = ["plane_key", "plane_ca"])]
    plane_cert: Option<PathBuf>,
    /// Key of --plane-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "plane_cert")]
    plane_key: Option<PathBuf>,
    /// Authority that must have signed the peers' certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "plane_cert")]
    plane_ca: Option<PathBuf>,
}

impl PlaneArgs {
    pub(crate) fn lease(&self) -> anyhow::Result<Duration> {
        positive("--lease", self.lease)
    }

    pub(crate) fn peer_deadline(&self) -> anyhow::Result<Duration> {
        positive("--peer-deadline", self.peer_deadline)
    }

    /// TLS as asked for by the three flags, or none.
    pub(crate) fn tls(&self) -> anyhow::Result<Option<Tls>> {
        let (Some(cert), Some(key), Some(ca)) = (&self.plane_cert, &self.plane_key, &self.plane_ca)
        else {
            return Ok(None);
        };
        let files = TlsFiles {
            cert: cert.clone(),
            key: key.clone(),
            ca: ca.clone(),
        };
        Ok(Some(Tls::load(&files)?))
    }

    pub(crate) fn directory(&self) -> anyhow::Result<PathBuf> {
        match &self.discovery {
            Some(directory) => Ok(directory.clone()),
            None => default_directory(),
        }
    }
}

fn positive(flag: &str, seconds: f64) -> anyhow::Result<Duration> {
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    // Below that, processes on a busy host would lose each other for nothing.
    anyhow::ensure!(
        duration >= Duration::from_millis(10),
        "{flag} is {seconds}; give 0.01 s or more"
    );
    Ok(duration)
}

/// A directory of this user alone: who can write there can send workers to a frontend of their own.
fn default_directory() -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let user = rustix::process::getuid();
    let directory = std::env::temp_dir().join(format!("slipstream-{}", user.as_raw()));
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(&directory)
        .with_context(|| format!("making the discovery directory {}", directory.display()))?;
    let found = std::fs::symlink_metadata(&directory)
        .with_context(|| format!("looking at the discovery directory {}", directory.display()))?;
    anyhow::ensure!(
        found.is_dir() && found.uid() == user.as_raw() && found.mode() & 0o022 == 0,
        "{} can be written by others; remove it, or name another with --discovery",
        directory.display()
    );
    Ok(directory)
}

/// A number for this run, unlike those of other runs.
pub(crate) fn instance() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Keyed by the system's generator (documentation of `RandomState`).
    let hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.finish()
}

/// Host and process, for people.
pub(crate) fn process_name() -> String {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy().into_owned();
    format!("{host}:{}", std::process::id())
}

/// What frontends and workers must agree on, as one number: the model, all of the pools and their
/// engines, and whether KV events with tokens are published, for which frontends send tokens along.
/// Processes of one release are compared, so the values' debug text will do.
pub(crate) fn fingerprint(cluster: &Cluster) -> u64 {
    let events = &cluster.live.events;
    let names_tokens = events.bus != EventBus::None && events.kv;
    let text = format!("{:?} {:?} {names_tokens}", cluster.model, cluster.pools);
    BlockHash::root(&cluster.model.name, "", &text).0
}
