//! How processes find each other: each publishes an entry that vanishes unless it is renewed, and
//! watches the entries of others.
//!
//! - [`Backend`]: put, renew, delete and watch entries that are held by leases. [`Folder`] is the
//!   backend for a folder that all processes can read and write, [`Etcd`] that for etcd, [`Nats`] that for
//!   NATS. A [`Place`] names one of them.
//! - [`Session`]: drives a backend on a thread of its own, and turns entries into typed [`Record`]s.
//!
//! Backends of servers, and TLS with them, come with the feature `servers`: KV stores use folders only.
//!
//! The thread is the point: a file system may block a caller for as long as it likes (NFS whose
//! server is away), so no thread that serves connections touches it. Stopping a session takes
//! a bounded time even if the backend never returns.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

#[cfg(feature = "servers")]
mod access;
#[cfg(feature = "servers")]
mod etcd;
mod folder;
#[cfg(feature = "servers")]
mod nats;
mod notify;
#[cfg(all(test, feature = "servers"))]
mod server_tests;
mod session;

use std::io;
#[cfg(feature = "servers")]
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipstream_base::SimTime;

#[cfg(feature = "servers")]
pub use access::Access;
#[cfg(feature = "servers")]
pub use etcd::{Etcd, EtcdOptions};
pub use folder::{Folder, FolderOptions, LEASE_MAX};
#[cfg(feature = "servers")]
pub use nats::{Nats, NatsOptions};
pub use session::{Record, Session, SessionError, SessionEvent};

/// Longest value of an entry, bytes. The record of a frontend with 256 shards takes 6 KiB.
pub const VALUE_BYTES_MAX: usize = 256 << 10;

/// Stores entries under keys, each for as long as its owner renews it.
///
/// One thread drives a backend and passes the time in: `now` is of any clock that does not run
/// backwards. Calls may block for as long as the medium does.
///
/// In etcd `put` is a lease grant and a put under it, `renew` a keep-alive, `delete` a revocation, and
/// `poll` takes what a watch of the prefix has delivered; the server judges the leases.
pub trait Backend: Send {
    /// Publishes an entry, or replaces it. It is deleted unless it is renewed within `lease`.
    ///
    /// # Errors
    ///
    /// [`BackendError`]; a retry may help.
    fn put(
        &mut self,
        now: SimTime,
        key: &str,
        value: &str,
        lease: Duration,
    ) -> Result<(), BackendError>;

    /// Renews the lease of an entry that this process has put, and puts it again if it is gone.
    ///
    /// # Errors
    ///
    /// [`BackendError`]; the entry stays until its lease ends.
    fn renew(&mut self, now: SimTime, key: &str) -> Result<(), BackendError>;

    /// Deletes an entry of this process.
    ///
    /// # Errors
    ///
    /// [`BackendError`]; then its lease ends it.
    fn delete(&mut self, key: &str) -> Result<(), BackendError>;

    /// Appends changes since the last call; the first call reports every entry as put. Returns when
    /// it has to be called again at the latest.
    ///
    /// # Errors
    ///
    /// [`BackendError`]; entries that were reported stay valid until it succeeds.
    fn poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError>;

    /// Waits until there may be changes, the waker is called, or the time is up.
    fn wait(&mut self, timeout: Duration);

    /// Ends a [`Backend::wait`] early, from any thread.
    fn waker(&self) -> Waker;
}

impl Backend for Box<dyn Backend> {
    fn put(
        &mut self,
        now: SimTime,
        key: &str,
        value: &str,
        lease: Duration,
    ) -> Result<(), BackendError> {
        (**self).put(now, key, value, lease)
    }

    fn renew(&mut self, now: SimTime, key: &str) -> Result<(), BackendError> {
        (**self).renew(now, key)
    }

    fn delete(&mut self, key: &str) -> Result<(), BackendError> {
        (**self).delete(key)
    }

    fn poll(&mut self, now: SimTime, changes: &mut Vec<Change>) -> Result<SimTime, BackendError> {
        (**self).poll(now, changes)
    }

    fn wait(&mut self, timeout: Duration) {
        (**self).wait(timeout);
    }

    fn waker(&self) -> Waker {
        (**self).waker()
    }
}

/// Where entries are.
#[cfg(feature = "servers")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A folder.
    Folder(PathBuf),
    /// Servers of etcd.
    Etcd(EtcdOptions),
    /// A bucket of NATS.
    Nats(NatsOptions),
}

#[cfg(feature = "servers")]
impl Place {
    /// The forms of a place, for the help of an option.
    pub const FORMS: &str = "etcd://HOST:PORT,HOST:PORT/PREFIX, or nats://HOST:PORT/BUCKET; etcds:// and tls:// are with TLS";

    /// `etcd://…` or `etcds://…` as [`EtcdOptions::parse`] reads it, `nats://…` or `tls://…` as [`NatsOptions::parse`]
    /// does; anything else without `://` is a folder.
    ///
    /// # Errors
    /// The fault of an address, as the end of a sentence.
    pub fn parse(text: &str) -> Result<Place, String> {
        if text.starts_with("etcd://") || text.starts_with("etcds://") {
            return EtcdOptions::parse(text).map(Place::Etcd);
        }
        if text.starts_with("nats://") || text.starts_with("tls://") {
            return NatsOptions::parse(text).map(Place::Nats);
        }
        // Such as `http://HOST:2379`: a folder of that name would join no one.
        if text.contains("://") {
            return Err(
                "is an address of something else; write etcd://HOST:PORT/PREFIX for etcd, \
                 nats://HOST:PORT/BUCKET for NATS, or the path of a folder"
                    .into(),
            );
        }
        Ok(Place::Folder(text.into()))
    }

    /// Its backend. Errors of a folder give the advice of `options`.
    ///
    /// # Errors
    /// [`BackendError`] if a file of its address cannot be used, or the process has no file descriptor left.
    pub fn open(
        &self,
        options: impl FnOnce(&Path) -> FolderOptions,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(match self {
            Place::Folder(folder) => Box::new(Folder::new(options(folder))?),
            Place::Etcd(options) => Box::new(Etcd::new(options.clone())?),
            Place::Nats(options) => Box::new(Nats::new(options.clone())?),
        })
    }
}

/// Keys are names of files that need no quoting anywhere.
fn is_key(key: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    !key.is_empty() && key.len() <= 128 && key.bytes().all(fits)
}

/// Ends a wait; see [`Backend::waker`].
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// A change of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was put, perhaps again.
    Put {
        /// Its key.
        key: String,
        /// Its value: JSON.
        value: String,
    },
    /// It was deleted, or its lease ended.
    Deleted {
        /// Its key.
        key: String,
    },
    /// Something that is no entry; reported once. An entry under that key stays as it was.
    Invalid {
        /// Where it is.
        name: String,
        /// Why it is invalid.
        reason: String,
    },
}

/// A backend cannot do its work now. A retry may help.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {operation} failed: {source}; {hint}")]
pub struct BackendError {
    /// The folder, or a file in it; or the servers.
    pub place: String,
    /// The operation that failed.
    pub operation: &'static str,
    /// Advice for the user.
    pub hint: &'static str,
    /// The error of the system.
    pub source: io::Error,
}
