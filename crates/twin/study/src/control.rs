//! Interruption and progress of a question that is being answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Receives a line that says how far an answer is.
type Line = dyn Fn(&str) + Send + Sync;

/// Ends an answer early, and receives its progress.
#[derive(Clone, Default)]
pub struct Control {
    /// Set by the asker: every run in progress ends, and the answer is what was done, or [`Interrupted`].
    pub interrupted: Arc<AtomicBool>,
    /// Called now and then, from any thread.
    pub progress: Option<Arc<Line>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("interrupted", &self.interrupted)
            .finish_non_exhaustive()
    }
}

impl Control {
    /// Whether the answer is no longer wanted.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }

    /// Shows a line, if progress is wanted.
    pub fn show(&self, line: impl FnOnce() -> String) {
        if let Some(progress) = &self.progress {
            progress(&line());
        }
    }

    /// # Errors
    /// [`Interrupted`], if it was.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.is_interrupted() {
            return Err(Interrupted.into());
        }
        Ok(())
    }
}

/// The asker ended the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}
