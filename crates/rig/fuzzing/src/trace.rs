//! Traces in each format: every request that is read is usable, and every error names its line.

use slipstream_config::workload_file::{Arrival, OnBadLine, TraceFile, Workload};
use slipstream_workload::trace::Trace;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    for on_bad_line in [OnBadLine::Stop, OnBadLine::Skip] {
        let file = TraceFile {
            path: "trace.jsonl".into(),
            on_bad_line,
            tokens_per_id: Some(16),
            ..TraceFile::default()
        };
        let workload = Workload {
            arrival: Arrival::Trace,
            ..Workload::default()
        };
        let mut trace = Trace::new(bytes, &workload, &file, 0);
        let mut last = None;
        for request in trace.by_ref() {
            match request {
                Ok(request) => last = Some(request.id()),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("trace.jsonl"), "{error}");
                    last = None;
                }
            }
        }
        let _ = last;
        if on_bad_line == OnBadLine::Stop {
            assert_eq!(trace.skipped_lines(), 0);
        }
    }
}
