//! Requests that come back: an engine of the router is the router itself, or forwards to it.
//!
//! Requests to engines have a `Via` with a name of this process (RFC 9110, section 7.6.3).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use hyper::header::{HeaderMap, VIA};

static NAME: LazyLock<String> = LazyLock::new(|| {
    // Seeded by the system's randomness.
    format!(
        "slipstream-{:016x}",
        RandomState::new().build_hasher().finish()
    )
});

static LINE: LazyLock<String> = LazyLock::new(|| format!("via: 1.1 {}\r\n", *NAME));

/// The header line of requests to engines.
pub(super) fn line() -> &'static [u8] {
    LINE.as_bytes()
}

/// Whether a request was sent by this process.
pub(super) fn is_own(headers: &HeaderMap) -> bool {
    let has_name = |value: &[u8]| memchr::memmem::find(value, NAME.as_bytes()).is_some();
    headers
        .get_all(VIA)
        .iter()
        .any(|value| has_name(value.as_bytes()))
}
