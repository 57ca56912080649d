//! Files that get their names only when they are complete.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use slipstream_os::files::is_input;

/// Links that are followed at most, as by Linux.
const LINKS_MAX: usize = 40;

/// A file that gets its name only when it is complete. It is `NAME.partial` before, so that the
/// remains of a full disk or a killed process are recognizable. Anything but a regular file (a
/// pipe, a device, an open file as `/dev/stdout`) is written directly. A link stays, and its target is
/// written; a file that exists keeps its permissions. An input of the process is never replaced.
#[derive(Debug)]
pub struct Partial {
    /// The open file, and its final name; `None` if it is written directly.
    rename: Option<(PathBuf, PathBuf)>,
}

impl Partial {
    /// Creates the file that will become `path`.
    ///
    /// # Errors
    /// If it cannot be created, or `path` is an input.
    pub fn create(path: &Path) -> io::Result<(File, Partial)> {
        let special = std::fs::metadata(path).is_ok_and(|meta| !meta.is_file());
        let target = target_of(path)?;
        let Some(path) = target.filter(|_| !special) else {
            return Ok((File::create(path)?, Partial { rename: None }));
        };
        refuse_input(&path)?;
        let mut name = path.as_os_str().to_owned();
        name.push(".partial");
        let partial = PathBuf::from(name);
        refuse_input(&partial)?; // the remains of an earlier run
        let file = File::create(&partial)?;
        if let Ok(about) = std::fs::metadata(&path) {
            file.set_permissions(about.permissions())?;
        }
        let rename = Some((partial, path));
        Ok((file, Partial { rename }))
    }

    /// Removes the incomplete file.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn discard(mut self) -> io::Result<()> {
        match self.rename.take() {
            Some((partial, _)) => std::fs::remove_file(partial),
            None => Ok(()),
        }
    }

    /// Gives the complete file its name.
    ///
    /// # Errors
    /// If it cannot be renamed, or would replace an input.
    pub fn complete(&mut self) -> io::Result<()> {
        match self.rename.take() {
            Some((from, to)) => {
                refuse_input(&to)?; // read since it was created
                std::fs::rename(from, to)
            }
            None => Ok(()),
        }
    }
}

/// Writes `text` to the file `path`, which gets its name only when it is complete.
///
/// # Errors
/// If it cannot be written; `path.partial` has the written part.
pub fn save_text(path: &Path, text: &str) -> io::Result<()> {
    let (mut file, mut partial) = Partial::create(path)?;
    file.write_all(text.as_bytes())?;
    partial.complete()
}

fn refuse_input(path: &Path) -> io::Result<()> {
    if is_input(path) {
        let text = "it is an input of this run; name another file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}

/// Where the links at `path` lead to; `None`: to a file that this process has open, such as `/dev/stdout`.
fn target_of(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let is_open = |of: PathBuf| of.starts_with("/proc") && of.ends_with("fd");
        if std::fs::canonicalize(folder).is_ok_and(is_open) {
            return Ok(None);
        }
        match path.read_link() {
            Ok(to) => path = folder.join(to),
            Err(_) => return Ok(Some(path)),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "its links do not end",
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn content(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn links_stay_and_permissions_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("runs")).unwrap();
        std::fs::write(at("runs/1.html"), "old").unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        std::fs::set_permissions(at("runs/1.html"), PermissionsExt::from_mode(0o600)).unwrap();
        symlink("runs/1.html", at("latest")).unwrap();
        symlink("latest", at("again")).unwrap();
        save_text(&at("again"), "new").unwrap();
        assert!(at("again").is_symlink() && at("latest").is_symlink());
        assert_eq!(
            (content(&at("runs/1.html")), mode(&at("runs/1.html"))),
            ("new".into(), 0o600)
        );
        symlink("runs/2.html", at("next")).unwrap(); // of a file that is not there yet
        save_text(&at("next"), "2").unwrap();
        assert_eq!(content(&at("runs/2.html")), "2");
        symlink("b", at("a")).unwrap();
        symlink("a", at("b")).unwrap();
        save_text(&at("a"), "x").unwrap_err();
        assert_eq!(
            std::fs::read_dir(dir.path().join("runs")).unwrap().count(),
            2
        );
    }

    #[test]
    fn an_open_file_is_written_and_not_replaced() {
        use std::os::fd::AsRawFd as _;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = File::create(&path).unwrap();
        let name = dir.path().join("link");
        symlink(format!("/proc/self/fd/{}", file.as_raw_fd()), &name).unwrap();
        save_text(&name, "text").unwrap();
        assert!(name.is_symlink());
        assert_eq!(content(&path), "text");
        assert_eq!(file.metadata().unwrap().len(), 4, "the same file");
    }
}
