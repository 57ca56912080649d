//! Cluster files (TOML): either rejected with errors that name a place, or a cluster that is printed as a file
//! with the same meaning.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run cluster_file`; the corpus is kept under
//! `fuzz/corpus/cluster_file`.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use slipstream_config::cluster;
use slipstream_config::doc::Doc;

fuzz_target!(|bytes: &[u8]| {
    let absent = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    match cluster::file::read(Doc::parse("cluster.toml", bytes), absent) {
        Err(diagnostics) => assert!(!diagnostics.to_string().is_empty()),
        Ok((cluster, settings)) => {
            let printed = settings.to_toml();
            let (again, _) =
                cluster::file::read(Doc::parse("printed.toml", printed.as_bytes()), absent)
                    .unwrap_or_else(|diagnostics| panic!("{diagnostics}\n{printed}"));
            assert_eq!(again, cluster, "{printed}");
        }
    }
});
