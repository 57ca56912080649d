//! Checks of a host: what each found, and its remedy.

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As required.
    Ok,
    /// Works, with a restriction.
    Note,
    /// Our scheduler would end a guarantee that the host relies on; `sched run` refuses to start
    /// unless this check is ignored.
    Breaks,
    /// A required feature is missing.
    Missing,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject of the check.
    pub what: &'static str,
    /// Its result.
    pub verdict: Verdict,
    /// The host's state.
    pub found: String,
    /// The remedy; empty if none is needed.
    pub remedy: String,
}

impl Check {
    /// A check with a remedy.
    pub fn new(
        what: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        remedy: &str,
    ) -> Check {
        Check {
            what,
            verdict,
            found: found.into(),
            remedy: remedy.to_owned(),
        }
    }

    /// A check that found everything as required.
    pub fn ok(what: &'static str, found: impl Into<String>) -> Check {
        Check::new(what, Verdict::Ok, found, "")
    }
}

/// Whether no required feature is missing.
pub fn can_run(checks: &[Check]) -> bool {
    checks.iter().all(|c| c.verdict != Verdict::Missing)
}

/// Whether our scheduler would end a guarantee that the host relies on.
pub fn breaks(checks: &[Check]) -> bool {
    checks.iter().any(|c| c.verdict == Verdict::Breaks)
}
