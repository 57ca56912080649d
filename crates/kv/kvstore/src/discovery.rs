//! The record that a rank of an engine publishes so that other engines find it. The protocol is in
//! `slipstream_discovery`, the file format in `docs/kvstore.md`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use slipstream_discovery::{BackendError, Folder, FolderOptions};

/// The record that a rank of an engine publishes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerRecord {
    /// Shared by all ranks of one engine, and by no other engine.
    pub engine: String,
    /// The rank within the engine.
    pub rank: u32,
    /// Host, process and rank, for people.
    pub name: String,
    /// Listening addresses, as [`crate::Address`] writes them; at least one.
    pub addresses: Vec<String>,
    /// The boot id of its host: `unix:` addresses are for peers with the same one.
    pub host: String,
    /// The properties that its blocks depend on. Peers whose fields differ share no blocks with it.
    pub identity: BTreeMap<String, String>,
}

impl slipstream_discovery::Record for PeerRecord {
    /// The key holds a digest of the engine's name, which may contain any character.
    fn key(&self) -> String {
        let digest = crate::checksum(self.engine.as_bytes());
        format!("kv-{digest:016x}-{}", self.rank)
    }

    fn check(&self) -> Result<(), String> {
        for address in &self.addresses {
            if let Err(error) = address.parse::<crate::Address>() {
                return Err(error.to_string());
            }
        }
        if self.addresses.is_empty() {
            return Err("`addresses` is empty".into());
        }
        Ok(())
    }
}

/// The backend for the folder `peers_dir`. If its file system does not report changes, it is polled
/// every 500 ms.
///
/// # Errors
///
/// [`BackendError`] if the process has no file descriptor left.
pub fn folder(path: &Path) -> Result<Folder, BackendError> {
    Folder::new(FolderOptions {
        hint: "check that every engine can read and write it, or name another as peers_dir",
        ..FolderOptions::new(path)
    })
}

#[cfg(test)]
mod tests {
    use slipstream_discovery::Record as _;

    use super::*;

    #[test]
    fn a_record_survives_a_round_trip_and_must_have_addresses() {
        let record = PeerRecord {
            engine: "a/../b".into(),
            rank: 3,
            name: "host, process 1".into(),
            addresses: vec!["tcp://127.0.0.1:7300".into()],
            host: "boot".into(),
            identity: [("model".to_owned(), "m".to_owned())].into(),
        };
        assert!(record.key().starts_with("kv-") && record.key().ends_with("-3"));
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<PeerRecord>(&text).unwrap(), record);
        assert!(serde_json::from_str::<PeerRecord>(&text.replace("\"rank\"", "\"x\"")).is_err());
        assert_eq!(record.check(), Ok(()));
        let with = |addresses: &[&str]| PeerRecord {
            addresses: addresses.iter().map(ToString::to_string).collect(),
            ..record.clone()
        };
        assert_eq!(with(&[]).check(), Err("`addresses` is empty".into()));
        let error = with(&["tcp://127.0.0.1:1", "http://x"])
            .check()
            .unwrap_err();
        assert!(error.contains("http://x"), "{error}");
    }
}
