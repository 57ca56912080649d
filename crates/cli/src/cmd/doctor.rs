//! `slipstream doctor`: checks this host for missing features and performance problems.

use std::path::Path;
use std::process::ExitCode;

use slipstream_os::checks::{Check, Verdict, can_run};
use slipstream_scx::doctor::{self as sched, Places};

use crate::cmd::sched::doctor::lines;
use crate::out;

/// Flags of `slipstream doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the checks; exits with 1 if `slipstream serve` cannot run.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut checks = slipstream_os::doctor::examine();
    checks.push(scheduler());
    let can_serve = can_run(&checks);
    if args.json {
        let all = serde_json::json!({ "can_serve": can_serve, "checks": checks });
        out::print(&format!("{all:#}\n"))?;
    } else {
        let verdict = if can_serve {
            "slipstream can serve here: `slipstream serve`\n"
        } else {
            "slipstream cannot serve here; fix the checks marked missing\n"
        };
        out::print(&(lines(&checks) + verdict))?;
    }
    Ok(ExitCode::from(u8::from(!can_serve)))
}

/// Sums up the checks of `slipstream sched doctor`, which has them one by one.
fn scheduler() -> Check {
    const WHAT: &str = "Slipstream's CPU scheduler";
    let checks = sched::examine(Places {
        sysfs: Path::new("/sys"),
        procfs: Path::new("/proc"),
    });
    let missing: Vec<_> = checks
        .iter()
        .filter(|c| c.verdict == Verdict::Missing)
        .map(|c| c.what)
        .collect();
    if missing.is_empty() {
        return Check::ok(WHAT, "can run");
    }
    Check::new(
        WHAT,
        Verdict::Note,
        format!("cannot run ({})", missing.join(", ")),
        "optional; `slipstream sched doctor` lists the missing features",
    )
}
