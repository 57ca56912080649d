//! The one place that writes to stdout.

use std::io::{self, Write};

/// Writes `text` to stdout and flushes it.
///
/// # Errors
/// If stdout cannot be written; see [`is_broken_pipe`].
#[allow(dead_code)] // used by the subcommands that print data
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Whether `error` says that the reader of our output went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
