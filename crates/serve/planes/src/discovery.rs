//! The records by which frontend and worker processes find each other; `slipstream_discovery`
//! has the protocol.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipstream_discovery::FolderOptions;
pub use slipstream_discovery::{Backend, LEASE_MAX, Place, Session, SessionError, SessionEvent};

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcessRole {
    /// It serves clients; workers connect to it.
    Frontend,
    /// It runs engines.
    Worker,
}

impl ProcessRole {
    fn name(self) -> &'static str {
        match self {
            ProcessRole::Frontend => "frontend",
            ProcessRole::Worker => "worker",
        }
    }
}

/// The record that a process publishes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessRecord {
    /// Its role.
    pub role: ProcessRole,
    /// Drawn at its start: another run is another instance.
    pub instance: u64,
    /// Host and process, for people.
    pub name: String,
    /// Fingerprint of its cluster file.
    pub fingerprint: u64,
    /// Frontends: the address of each shard for workers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<String>,
    /// Workers: the ids that it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<u32>,
    /// Frontends: what a worker has to send to run workers of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SeatKey>,
}

/// Shows a frontend that a process can read the discovery directory. Drawn by each run of a frontend.
///
/// Without TLS it crosses the network in the clear: who can read the traffic can read the prompts, too.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SeatKey([u8; 16]);

impl SeatKey {
    /// Draws one from the system's generator.
    ///
    /// # Errors
    ///
    /// If the system has none.
    pub fn draw() -> io::Result<SeatKey> {
        let mut key = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        Ok(SeatKey(key))
    }

    /// Its bytes, as [`crate::wire::Hello`] has them.
    pub fn bytes(&self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Debug for SeatKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SeatKey(..)") // not into logs
    }
}

impl From<SeatKey> for String {
    fn from(key: SeatKey) -> String {
        format!("{:032x}", u128::from_be_bytes(key.0))
    }
}

impl TryFrom<String> for SeatKey {
    type Error = &'static str;

    fn try_from(text: String) -> Result<SeatKey, &'static str> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(&text, 16).ok().filter(|_| digits);
        let number = number.ok_or("a key has 32 hexadecimal digits")?;
        Ok(SeatKey(number.to_be_bytes()))
    }
}

impl slipstream_discovery::Record for ProcessRecord {
    fn key(&self) -> String {
        format!("{}-{:016x}", self.role.name(), self.instance)
    }
}

/// Opens the place of `--discovery`. If a folder's file system does not report changes, it is polled every 200 ms.
///
/// # Errors
///
/// [`SessionError`] if a file of its address cannot be used, or the process has no file descriptor left.
pub fn backend(place: &Place) -> Result<Box<dyn Backend>, SessionError> {
    let options = |directory: &Path| FolderOptions {
        poll: Duration::from_millis(200),
        hint: "check that every process can read and write it, or name another with --discovery",
        // Records of frontends have keys.
        is_private: true,
        ..FolderOptions::new(directory)
    };
    Ok(place.open(options)?)
}

#[cfg(test)]
mod tests {
    use slipstream_discovery::Record as _;

    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_nothing_else_is() {
        let record = ProcessRecord {
            role: ProcessRole::Frontend,
            instance: 0xa,
            name: "host:1".into(),
            fingerprint: 7,
            shards: vec!["127.0.0.1:1".into()],
            workers: vec![],
            key: Some(SeatKey::draw().unwrap()),
        };
        assert_ne!(record.key, Some(SeatKey::draw().unwrap()));
        assert!(!format!("{record:?}").contains(&String::from(record.key.clone().unwrap())));
        assert_eq!(record.key(), "frontend-000000000000000a");
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(
            serde_json::from_str::<ProcessRecord>(&text).unwrap(),
            record
        );
        let more = text.replace("\"fingerprint\":7", "\"fingerprint\":7,\"x\":2");
        assert!(serde_json::from_str::<ProcessRecord>(&more).is_err());
        for bad in ["", "0", "+123456789012345678901234567890ab", "xyz"] {
            assert!(SeatKey::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
