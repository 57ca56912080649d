//! `--emit TARGET DIR`: files that deploy an answer, in a folder that has none.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use slipstream_study::templates::{RenderedFile, Templates};

/// Templates and the folder for their files.
pub(crate) struct Emission {
    templates: Templates,
    folder: PathBuf,
}

impl Emission {
    /// Checks `--emit TARGET DIR` before long work. `answers`: how many are asked for.
    ///
    /// # Errors
    /// If there is no such target, a template is not valid, or the folder has files.
    pub(crate) fn prepare(flag: Option<&[String]>, answers: usize) -> anyhow::Result<Option<Self>> {
        let Some([target, folder]) = flag else {
            return Ok(None);
        };
        ensure!(
            answers == 1,
            "--emit writes one answer, but --load asks for {answers}; run them one by one"
        );
        let emission = Emission {
            templates: Templates::load(target)?,
            folder: folder.into(),
        };
        emission.check_folder()?;
        Ok(Some(emission))
    }

    fn check_folder(&self) -> anyhow::Result<()> {
        let folder = &self.folder;
        let shown = folder.display();
        match std::fs::read_dir(folder) {
            Ok(mut entries) => {
                ensure!(
                    entries.next().is_none(),
                    "--emit: {shown} is not empty; name a new folder, or empty this one"
                );
                let about = std::fs::metadata(folder)?;
                ensure!(
                    !about.permissions().readonly(),
                    "--emit: {shown} is read-only; name another folder"
                );
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let parent = folder.parent().filter(|of| *of != Path::new(""));
                let parent = parent.unwrap_or(Path::new("."));
                ensure!(
                    parent.is_dir(),
                    "--emit: there is no folder {}; create it first",
                    parent.display()
                );
            }
            Err(error) => return Err(error).with_context(|| format!("--emit: {shown}")),
        }
        Ok(())
    }

    /// Writes the files for `deployment`, and names them on stderr. Returns what went wrong; the figures are not affected.
    pub(crate) fn write(
        &self,
        deployment: &anyhow::Result<Option<serde_json::Value>>,
    ) -> Option<String> {
        let deployment = match deployment {
            Ok(None) => return None, // nothing attains
            Ok(Some(deployment)) => deployment,
            Err(error) => return Some(format!("{error:#}")),
        };
        let written = self
            .templates
            .render(deployment)
            .and_then(|files| self.save(&files));
        match written {
            Err(error) => Some(format!("--emit: {error:#}; the figures are complete")),
            Ok(names) => {
                errln!("wrote {} in {}", names.join(", "), self.folder.display());
                None
            }
        }
    }

    /// Creates `files`, and replaces none: the folder may have got some since it was checked.
    fn save(&self, files: &[RenderedFile]) -> anyhow::Result<Vec<String>> {
        if !self.folder.is_dir() {
            let made = std::fs::create_dir(&self.folder);
            made.with_context(|| self.folder.display().to_string())?;
        }
        for file in files {
            let path = self.folder.join(&file.name);
            let mode = if file.is_script { 0o777 } else { 0o666 };
            let created = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&path);
            created
                .and_then(|mut of| of.write_all(file.text.as_bytes()))
                .with_context(|| path.display().to_string())?;
        }
        Ok(files.iter().map(|file| file.name.clone()).collect())
    }
}
