//! The time of day, for clients to read.

/// Unix time, s. For `created` and for templates that write a date; nothing is measured with it.
pub(crate) fn now_unix_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
