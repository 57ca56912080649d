//! The access log of a server, which SIGHUP opens anew.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Context;
use slipstream_frontend::{AccessLog, AccessTarget, Flusher};
use tokio::signal::unix::{SignalKind, signal};

/// Of this process's log.
static FLUSHER: OnceLock<Flusher> = OnceLock::new();

/// Writes the lines of requests that have ended, in a fraction of a second, before the process exits.
pub fn flush() {
    if let Some(flusher) = FLUSHER.get() {
        flusher.flush(Duration::from_millis(500));
    }
}

/// Opens `path` (`-`: standard output), and starts the thread that writes it.
///
/// # Errors
/// It cannot be opened, or a thread cannot be started.
pub fn start(path: &Path) -> anyhow::Result<AccessLog> {
    let target = if path.ends_with("-") {
        AccessTarget::Stdout
    } else {
        AccessTarget::File(path.to_owned())
    };
    let log = AccessLog::start(target).with_context(|| {
        format!(
            "opening the access log (live.access_log) {}; a FIFO needs a reader first",
            path.display()
        )
    })?;
    let _ = FLUSHER.set(log.flusher()); // a process has one log
    let reopener = log.reopener();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let mut hangup = {
        let _entered = runtime.enter();
        signal(SignalKind::hangup())?
    };
    // For as long as the process runs: without it the signal would end the process.
    std::thread::Builder::new()
        .name("access-reopen".into())
        .spawn(move || {
            runtime.block_on(async {
                while hangup.recv().await.is_some() {
                    reopener.reopen();
                }
            });
        })?;
    Ok(log)
}
