//! Flags for discovery and connections between frontend and worker processes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use slipstream_base::BlockHash;
use slipstream_config::cluster::{Cluster, EventBus};
use slipstream_planes::discovery::Place;
use slipstream_planes::tls::{Tls, TlsFiles};

/// Flags that frontends and workers share.
#[derive(clap::Args)]
pub(crate) struct PlaneArgs {
    #[arg(long, value_name = "PLACE", env = "SLIPSTREAM_DISCOVERY", value_parser = Place::parse, help = place_help())]
    discovery: Option<Place>,
    /// Discovery lease, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    lease: f64,
    /// Timeout of a silent peer, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    peer_deadline: f64,
    /// Encrypt connections between processes: certificate of this process (PEM); a frontend's must
    /// be valid for `slipstream`
    #[arg(long, value_name = "FILE", requires_all = ["plane_key", "plane_ca"])]
    plane_cert: Option<PathBuf>,
    /// Key of --plane-cert (PEM)
    #[arg(long, value_name = "FILE", requires = "plane_cert")]
    plane_key: Option<PathBuf>,
    /// CA certificate for the peers' certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "plane_cert")]
    plane_ca: Option<PathBuf>,
}

fn place_help() -> String {
    format!(
        "Discovery directory; share it to join several hosts. Or {} [default: slipstream-UID in the directory for \
         temporary files]",
        Place::FORMS
    )
}

impl PlaneArgs {
    pub(crate) fn lease(&self) -> anyhow::Result<Duration> {
        let lease = positive("--lease", self.lease)?;
        // Other processes ignore a record with a longer one.
        let max = slipstream_planes::discovery::LEASE_MAX;
        anyhow::ensure!(
            lease <= max,
            "--lease is {} s; the limit is {} s",
            self.lease,
            max.as_secs()
        );
        Ok(lease)
    }

    pub(crate) fn peer_deadline(&self) -> anyhow::Result<Duration> {
        positive("--peer-deadline", self.peer_deadline)
    }

    /// TLS by the three flags, or none.
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

    pub(crate) fn discovery(&self) -> anyhow::Result<Place> {
        match &self.discovery {
            Some(place) => Ok(place.clone()),
            None => default_directory().map(Place::Folder),
        }
    }
}

fn positive(flag: &str, seconds: f64) -> anyhow::Result<Duration> {
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    // With less, processes on a busy host would lose each other.
    anyhow::ensure!(
        duration >= Duration::from_millis(10),
        "{flag} is {seconds}; use 0.01 s or more"
    );
    Ok(duration)
}

/// A directory of this user only: a process with write access can direct workers to a frontend of
/// its own.
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
        "{} is writable by other users; remove it, or use another with --discovery",
        directory.display()
    );
    Ok(directory)
}

/// A random number for this run.
pub(crate) fn instance() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Seeded by the system's generator (documentation of `RandomState`).
    let hasher = std::collections::hash_map::RandomState::new().build_hasher();
    hasher.finish()
}

/// Host and process, for logs.
pub(crate) fn process_name() -> String {
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy().into_owned();
    format!("{host}:{}", std::process::id())
}

/// Digest of the settings on which frontends and workers must agree: the model, all pools and their
/// engines, and whether KV events include tokens (frontends then send tokens too). Both are of one
/// release, so the values' debug text is sufficient.
pub(crate) fn fingerprint(cluster: &Cluster) -> u64 {
    let events = &cluster.live.events;
    let names_tokens = events.bus != EventBus::None && events.kv;
    let text = format!("{:?} {:?} {names_tokens}", cluster.model, cluster.pools);
    BlockHash::root(&cluster.model.name, "", &text).0
}
