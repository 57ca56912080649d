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
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| io::Error::new(error.kind(), format!("writing to stdout: {error}")))
}

/// Writes to stdout what `write` produces, piece by piece, and flushes it.
///
/// # Errors
/// If stdout cannot be written; see [`is_broken_pipe`].
pub(crate) fn stream(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut stdout = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    write(&mut stdout)
        .and_then(|()| stdout.flush())
        .map_err(|error| io::Error::new(error.kind(), format!("writing to stdout: {error}")))
}

/// Writes `text` to a file of its own; what went wrong, in words, if it could not be written.
pub(crate) fn save(path: &Path, text: &str) -> Option<String> {
    let error = slipstream_report::record::save_text(path, text).err()?;
    Some(incomplete(path, &error.into()))
}

/// That a file could not be written to its end, and where what was written is.
pub(crate) fn incomplete(path: &Path, error: &anyhow::Error) -> String {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let kept = if partial.exists() {
        format!("; {} holds what could be written", partial.display())
    } else {
        String::new()
    };
    format!(
        "{}: {error:#}{kept}; the figures are complete",
        path.display()
    )
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

/// An error with its causes, each said once: many an error's own text ends with its cause's.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Whether `error` says that the reader of our output went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || anyhow::anyhow!("no such file");
        let error = cause()
            .context("reading x: no such file")
            .context("starting");
        assert_eq!(chain(&error), "starting: reading x: no such file");
        assert_eq!(
            chain(&cause().context("reading x")),
            "reading x: no such file"
        );
    }
}
