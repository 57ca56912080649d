//! Pages of metrics that engines serve.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run metrics_page`; the corpus is kept under
//! `fuzz/corpus/metrics_page`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slipstream_probe::load;
use slipstream_probe::prometheus::Samples;

fuzz_target!(|text: &str| {
    if let Some(load) = load::read(text) {
        let _ = format!("{load:?}");
    }
    let _ = Samples::parse(text);
});
