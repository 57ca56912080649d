//! What a rank of an engine publishes so that others find it: `slipstream_discovery` has the
//! protocol. `docs/kvstore.md` has the file.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use slipstream_discovery::{BackendError, Folder, FolderOptions};

/// What a rank of an engine publishes about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// One for all ranks of an engine, and no other engine.
    pub engine: String,
    /// Which rank it is.
    pub rank: u32,
    /// Host, process and rank, for people.
    pub name: String,
    /// Where it listens, as [`crate::Address`] writes it; at least one.
    pub addresses: Vec<String>,
    /// The boot id of its host: `unix:` addresses are for peers with the same one.
    pub host: String,
    /// What its blocks depend on; peers whose fields differ do not share blocks with it.
    pub identity: BTreeMap<String, String>,
}

impl slipstream_discovery::Record for Record {
    /// Engine names come from outside, so the key has a digest of it.
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

/// The folder of `peers_dir`. Where its file system does not report changes, it is polled every
/// 500 ms.
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
    fn a_record_is_read_as_it_was_written_and_must_have_addresses() {
        let record = Record {
            engine: "a/../b".into(),
            rank: 3,
            name: "host, process 1".into(),
            addresses: vec!["tcp://127.0.0.1:7300".into()],
            host: "boot".into(),
            identity: [("model".to_owned(), "m".to_owned())].into(),
        };
        assert!(record.key().starts_with("kv-") && record.key().ends_with("-3"));
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
        assert!(serde_json::from_str::<Record>(&text.replace("\"rank\"", "\"x\"")).is_err());
        assert_eq!(record.check(), Ok(()));
        let with = |addresses: &[&str]| Record {
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
