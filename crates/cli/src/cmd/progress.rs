//! The progress line of a question on a terminal.

use std::io::Write;
use std::sync::Arc;

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

/// Removes the line.
pub(crate) fn clear(shows: bool) {
    if shows {
        err!("\r\x1b[K");
    }
}
