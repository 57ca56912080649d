//! Files of secret keys, with a warning if every user can read one.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::files;

/// The text of a file of keys. Warns if every user of this host may read the file.
///
/// # Errors
/// Those of [`files::read_text`].
pub fn read(path: &Path) -> io::Result<String> {
    let text = files::read_text(path)?;
    warn_if_open(path);
    Ok(text)
}

/// Warns if every user of this host may read the file.
pub fn warn_if_open(path: &Path) {
    let mode = std::fs::metadata(path).map_or(0, |file| file.permissions().mode());
    if is_open(mode) {
        let file = path.display();
        tracing::warn!(
            "every user of this host can read the keys in {file} (mode {:04o}): chmod o= {file}",
            mode & 0o7777
        );
    }
}

/// Whether others than the file's owner and group may read it.
fn is_open(mode: u32) -> bool {
    mode & 0o004 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_owner_and_group_are_closed() {
        for (mode, open) in [(0o100_600, false), (0o100_640, false), (0o100_644, true)] {
            assert_eq!(is_open(mode), open, "{mode:o}");
        }
    }
}
