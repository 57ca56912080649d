//! Cluster files (TOML): either rejected with errors that name a place, or a cluster that is printed as a file
//! with the same meaning.

use std::path::Path;

use slipstream_config::cluster;
use slipstream_config::doc::Doc;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let absent = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    match cluster::file::read(Doc::parse("cluster.toml", bytes), absent) {
        Err(mistakes) => assert!(!mistakes.to_string().is_empty()),
        Ok((cluster, settings)) => {
            let printed = settings.to_toml();
            let (again, _) =
                cluster::file::read(Doc::parse("printed.toml", printed.as_bytes()), absent)
                    .unwrap_or_else(|mistakes| panic!("{mistakes}\n{printed}"));
            assert_eq!(again, cluster, "{printed}");
        }
    }
}
