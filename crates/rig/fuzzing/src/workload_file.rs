//! Workload files (TOML): either rejected with errors that name a place, or a workload that is printed as a file
//! with the same meaning.

use slipstream_config::doc::Doc;
use slipstream_config::workload_file;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    match workload_file::read(Doc::parse("workload.toml", bytes)) {
        Err(mistakes) => assert!(!mistakes.to_string().is_empty()),
        Ok((workload, settings)) => {
            let printed = settings.to_toml();
            let (again, _) = workload_file::read(Doc::parse("printed.toml", printed.as_bytes()))
                .unwrap_or_else(|mistakes| panic!("{mistakes}\n{printed}"));
            assert_eq!(again, workload, "{printed}");
        }
    }
}
