//! Workload files (TOML): either rejected with errors that name a place, or a workload that is printed as a file
//! with the same meaning.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run workload_file`; the corpus is kept under
//! `fuzz/corpus/workload_file`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slipstream_config::doc::Doc;
use slipstream_config::workload_file;

fuzz_target!(|bytes: &[u8]| {
    match workload_file::read(Doc::parse("workload.toml", bytes)) {
        Err(diagnostics) => assert!(!diagnostics.to_string().is_empty()),
        Ok((workload, settings)) => {
            let printed = settings.to_toml();
            let (again, _) = workload_file::read(Doc::parse("printed.toml", printed.as_bytes()))
                .unwrap_or_else(|diagnostics| panic!("{diagnostics}\n{printed}"));
            assert_eq!(again, workload, "{printed}");
        }
    }
});
