//! The progress line of a question on a terminal, and its end by a signal.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slipstream_study::Control;

/// Shows progress on stderr, if `shows`.
pub(crate) fn control(shows: bool) -> Control {
    let mut control = Control::default();
    if shows {
        control.progress = Some(Arc::new(|line: &str| {
            let mut stderr = std::io::stderr().lock();
            // A closed terminal must not end the work.
            let _ = write!(stderr, "\r\x1b[K{line}");
            let _ = stderr.flush();
        }));
    }
    control
}

/// As [`control`]; SIGINT and SIGTERM end the work, so that what is done can be printed.
pub(crate) fn interruptible(shows: bool) -> anyhow::Result<Control> {
    Ok(Control {
        interrupted: interrupted()?,
        ..control(shows)
    })
}

/// Removes the line.
pub(crate) fn clear(shows: bool) {
    if shows {
        err!("\r\x1b[K");
    }
}

/// A flag that SIGINT and SIGTERM set. A second signal ends the process.
pub(crate) fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    // Installed before this returns: a signal during the first run must not end the process.
    let signals = super::serve::Signals::install()?;
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            signals.wait_and(|| set.store(true, Ordering::Relaxed));
        })?;
    Ok(flag)
}
