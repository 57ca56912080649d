//! Pages of metrics that engines serve.

use slipstream_probe::load;
use slipstream_probe::prometheus::Samples;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Some(load) = load::read(text) {
        let _ = format!("{load:?}");
    }
    let _ = Samples::parse(text);
}
