//! `--on`: parts of a question on a Ray cluster.
//!
//! Ray's interface is Python. This starts the Python of the environment (`SLIPSTREAM_PYTHON`, else `python3`) with
//! `slipstream._ray` of our package, and talks with it in lines of JSON: the question, then answers. The question,
//! its figures and its output are this program's; the other process only runs slices of it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_study::plan::{Batch, Elsewhere, TrialResult};
use slipstream_study::sweep::Row;

/// A check of `--on`, before anything runs.
pub(crate) fn address(text: &str) -> Result<String, String> {
    if text == "ray" || text.strip_prefix("ray://").is_some_and(|at| !at.is_empty()) {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "`{text}` is no place; write ray or ray://HOST:PORT"
        ))
    }
}

/// A connection to a Ray cluster, through a process that ends with it.
pub(crate) struct Ray {
    python: String,
    process: Mutex<Process>,
}

struct Process {
    child: Child,
    /// Closed first: the process then ends by itself.
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Ray {
    /// Starts the process for `question`; `count`: configurations of a sweep. `shows`: whether it shows progress.
    pub(crate) fn start(
        on: &str,
        question: &str,
        count: Option<usize>,
        shows: bool,
    ) -> anyhow::Result<Ray> {
        let python = std::env::var("SLIPSTREAM_PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let mut child = Command::new(&python)
            .args(["-m", "slipstream._ray"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| {
                format!("--on {on}: starting {python}; name a Python by SLIPSTREAM_PYTHON")
            })?;
        let stdin = child.stdin.take().context("stdin is a pipe")?;
        let stdout = child.stdout.take().context("stdout is a pipe")?;
        let ray = Ray {
            python,
            process: Mutex::new(Process {
                child,
                stdin: Some(stdin),
                stdout: BufReader::new(stdout),
            }),
        };
        let mut asked = json!({"on": on, "question": question, "shows": shows});
        if let Some(count) = count {
            asked["count"] = count.into();
        }
        ray.say(&asked.to_string())?;
        Ok(ray)
    }

    /// Rows of all configurations of a sweep.
    pub(crate) fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut rows = Vec::new();
        for slice in self.read_field("rows")?.as_array().into_iter().flatten() {
            let text = slice.as_str().unwrap_or_default();
            rows.extend(serde_json::from_str::<Vec<Row>>(text)?);
        }
        Ok(rows)
    }

    /// Writes a line. A process that has ended is noticed by its answer, which has the reason.
    fn say(&self, line: &str) -> anyhow::Result<()> {
        let mut process = lock(&self.process);
        let stdin = process.stdin.as_mut().context("stdin is open")?;
        let written = stdin
            .write_all(line.as_bytes())
            .and_then(|()| stdin.write_all(b"\n"))
            .and_then(|()| stdin.flush());
        match written {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The field `name` of the next answer.
    fn read_field(&self, name: &str) -> anyhow::Result<Value> {
        let mut process = lock(&self.process);
        let mut line = String::new();
        process.stdout.read_line(&mut line)?;
        if line.is_empty() {
            let status = process.child.wait()?;
            bail!(
                "{} -m slipstream._ray ended ({status}); it needs the packages slipstream and ray (name another \
                 Python by SLIPSTREAM_PYTHON)",
                self.python
            );
        }
        let mut answer: Value =
            serde_json::from_str(&line).with_context(|| format!("an answer of {}", self.python))?;
        if let Some(error) = answer["error"].as_str() {
            bail!("{error}");
        }
        Ok(answer[name].take())
    }
}

impl Elsewhere for Ray {
    fn measure(&self, batch: &Batch, _: &str) -> anyhow::Result<Vec<TrialResult>> {
        self.say(&serde_json::to_string(batch)?)?;
        Ok(serde_json::from_value(self.read_field("results")?)?)
    }
}

impl Drop for Ray {
    fn drop(&mut self) {
        let process = unpoisoned(self.process.get_mut());
        drop(process.stdin.take());
        // It ends when its input does.
        let _ = process.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rays_are_places() {
        assert!(address("ray").is_ok() && address("ray://host:10001").is_ok());
        for wrong in ["", "ray://", "rays", "http://host:1"] {
            assert!(address(wrong).unwrap_err().contains("ray://HOST:PORT"));
        }
    }
}
