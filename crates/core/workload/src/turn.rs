//! A turn of a session that a trace states.

use crate::prompt::Segment;

/// Longest time in a trace, ms: a century. A longer time is an error in the unit. Sums of times
/// stay within the 584 years of 64 bits of ns.
const TIME_MS_MAX: f64 = 100.0 * 365.25 * 86_400e3;

/// A turn of a session.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) prompt: TurnPrompt,
    pub(crate) output_len: u32,
    /// Delay after the previous answer, ms.
    pub(crate) delay_ms: Option<f64>,
    /// Earliest due time, ms since the trace's start.
    pub(crate) not_before_ms: Option<f64>,
    pub(crate) priority: i32,
    pub(crate) ignore_eos: bool,
    /// Its place among the models that are served.
    pub(crate) model: u32,
}

/// The prompt of a turn.
#[derive(Clone, Debug)]
pub(crate) enum TurnPrompt {
    /// This prompt.
    Whole(Vec<Segment>),
    /// The previous prompt, its answer, and this.
    Add(Vec<Segment>),
}

/// Checks that `ms` does not exceed the longest time in a trace.
pub(crate) fn check_ms(name: &str, ms: f64) -> Result<(), String> {
    if ms <= TIME_MS_MAX {
        Ok(())
    } else {
        Err(format!(
            "`{name}` is {ms:e} ms, but must be at most a century ({TIME_MS_MAX:e} ms)"
        ))
    }
}

/// As [`check_ms`], for a time that the file has as `written`.
pub(crate) fn check_time_of(name: &str, ms: f64, written: Option<&str>) -> Result<(), String> {
    let Some(written) = written.filter(|_| ms > TIME_MS_MAX) else {
        return check_ms(name, ms);
    };
    let written: String = written.chars().take(40).collect();
    Err(format!(
        "`{name}` is {written}, but must be at most a century after the first"
    ))
}
