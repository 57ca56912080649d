//! Output to stdout; the only module that writes there.

use std::fmt;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;

use slipstream_base::text::{brief_lines, foreign_json};

/// `eprint!` that does not end the process if stderr has been closed: a server outlives what collects its log.
macro_rules! err {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = write!(std::io::stderr(), $($text)*);
    }};
}

/// `eprintln!` that survives a closed stderr, and escapes foreign text so that it cannot control the terminal.
macro_rules! errln {
    ($($text:tt)*) => {
        crate::out::say(format_args!($($text)*))
    };
}

/// Longest line of a message or of a log's field, characters: a server may have written most of it.
pub(crate) const LINE_CHARS_MAX: usize = 4096;

/// Prints a message to stderr.
pub(crate) fn say(message: fmt::Arguments<'_>) {
    let message = message.to_string();
    let _ = writeln!(io::stderr(), "{}", brief_lines(&message, LINE_CHARS_MAX));
}

/// Describes models on stderr as they were read, before anything else runs.
pub(crate) fn model_lines(lines: &[String]) {
    for line in lines {
        errln!("{line}");
    }
}

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

/// Names a server's page to people, and its address on stdout: scripts read the port that was chosen for port 0.
///
/// # Errors
/// As [`print()`].
pub(crate) fn listening(address: SocketAddr) -> io::Result<()> {
    errln!("page: http://{address}/ui");
    print(&format!("listening on http://{address}\n"))
}

/// [`print()`] of JSON, which has text of servers or files in it.
///
/// # Errors
/// As [`print()`].
pub(crate) fn print_json(json: &str) -> io::Result<()> {
    print(&foreign_json(json))
}

/// Writes the output of `write` to stdout, piece by piece, and flushes it.
///
/// # Errors
/// If stdout cannot be written; see [`is_broken_pipe`].
pub(crate) fn stream(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut stdout = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    write(&mut stdout)
        .and_then(|()| stdout.flush())
        .map_err(|error| io::Error::new(error.kind(), format!("writing to stdout: {error}")))
}

/// Checks before long work that files can be written at its end.
///
/// # Errors
/// If a folder is absent, is read-only, or is at the place of a file; if two flags name one file; if a file was read as an
/// input, or is called `-`.
pub(crate) fn check_writable<'a>(
    files: impl IntoIterator<Item = (&'static str, Option<&'a Path>)>,
) -> anyhow::Result<()> {
    let mut named: Vec<(&str, &Path)> = Vec::new();
    for (flag, path) in files {
        let Some(path) = path else { continue };
        anyhow::ensure!(
            path != Path::new("-"),
            "--{flag} -: stdout has the figures; name a file"
        );
        let is_file = std::fs::metadata(path).map_or(true, |about| about.is_file());
        if is_file && let Some((other, _)) = named.iter().find(|(_, other)| *other == path) {
            anyhow::bail!(
                "--{other} and --{flag} name the same file, {}; name two",
                path.display()
            );
        }
        named.push((flag, path));
        anyhow::ensure!(
            !slipstream_os::files::is_input(path),
            "--{flag} {}: that is an input of this run; name another file",
            path.display()
        );
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        anyhow::ensure!(
            !slipstream_os::files::is_named_fifo(path),
            "--{flag} {}: that is a FIFO, and writing would wait for its reader; name a file, or >(COMMAND)",
            path.display()
        );
        anyhow::ensure!(
            !path.is_dir(),
            "--{flag} {}: that is a folder; name a file",
            path.display()
        );
        let about = std::fs::metadata(folder);
        anyhow::ensure!(
            about.as_ref().is_ok_and(std::fs::Metadata::is_dir),
            "--{flag} {}: there is no folder {}; create it first",
            path.display(),
            folder.display()
        );
        anyhow::ensure!(
            about.is_ok_and(|about| !about.permissions().readonly()),
            "--{flag} {}: {} is read-only; name a file elsewhere",
            path.display(),
            folder.display()
        );
    }
    Ok(())
}

/// Writes `text` to a file; returns an error message on failure.
pub(crate) fn save(path: &Path, text: &str) -> Option<String> {
    let error = slipstream_report::partial::save_text(path, text).err()?;
    Some(incomplete(path, &error.into()))
}

/// Error message for an incomplete file, with the path of the written part.
pub(crate) fn incomplete(path: &Path, error: &anyhow::Error) -> String {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let kept = if partial.exists() {
        format!("; {} has the written part", partial.display())
    } else {
        String::new()
    };
    format!(
        "{}: {error:#}{kept}; the figures are complete",
        path.display()
    )
}

/// Prints the errors of files that could not be written.
pub(crate) fn complain(failures: &[String]) {
    for failure in failures {
        errln!("error: {failure}");
    }
}

/// The command line.
pub(crate) fn command_line() -> String {
    let words: Vec<_> = std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    words.join(" ")
}

pub(crate) use slipstream_study::chain;

/// Whether `error` means that the reader of stdout closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
