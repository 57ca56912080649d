//! Records of the discovery directory: either rejected, or written as they were read.

use slipstream_discovery::Record;
use slipstream_kvstore::discovery::PeerRecord;
use slipstream_planes::discovery;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    if let Ok(record) = serde_json::from_slice::<discovery::ProcessRecord>(bytes) {
        is_written_as_read(&record);
    }
    if let Ok(record) = serde_json::from_slice::<PeerRecord>(bytes) {
        is_written_as_read(&record);
    }
}

fn is_written_as_read<R: Record + std::fmt::Debug>(record: &R) {
    if let Err(why) = record.check() {
        assert!(!why.is_empty());
    }
    let key = record.key();
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    assert!(!key.is_empty() && key.chars().all(plain), "{key}");
    let text = serde_json::to_string(record).expect("a record is JSON");
    let again: R = serde_json::from_str(&text).expect("a record that we wrote");
    assert!(&again == record, "{text}");
}
