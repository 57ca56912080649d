//! The one place that writes to stdout.

use std::io::{self, Write};
use std::path::Path;

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

/// Writes `text` to a file of its own; what went wrong, in words, if it could not be written.
pub(crate) fn save(path: &Path, text: &str) -> Option<String> {
    let error = std::fs::write(path, text).err()?;
    Some(format!("{}: {error}", path.display()))
}

/// Tells of files that could not be written.
pub(crate) fn complain(failures: &[String]) {
    for failure in failures {
        eprintln!("error: {failure}");
    }
}

/// What was typed.
pub(crate) fn command_line() -> String {
    let words: Vec<_> = std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    words.join(" ")
}

/// Whether `error` says that the reader of our output went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
