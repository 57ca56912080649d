//! `slipstream sched doctor`: checks whether Slipstream's scheduler can run on this host.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use slipstream_scx::doctor::{self, Check, Places, Verdict};

use crate::out;

/// Flags of `slipstream sched doctor`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the checks; exits with 1 if the scheduler cannot run, or would break something.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let places = Places {
        sysfs: Path::new("/sys"),
        procfs: Path::new("/proc"),
    };
    let checks = doctor::examine(places);
    let (can_run, breaks) = (doctor::can_run(&checks), doctor::breaks(&checks));
    if args.json {
        let all = serde_json::json!({ "can_run": can_run, "breaks": breaks, "checks": checks });
        out::print(&format!("{all:#}\n"))?;
    } else {
        let mut text = lines(&checks);
        text += if can_run && breaks {
            "Slipstream's scheduler can run here, but `slipstream sched run` refuses because it would break something\n"
        } else if can_run {
            "Slipstream's scheduler can run here: `slipstream sched run`\n"
        } else {
            "Slipstream's scheduler cannot run here; `slipstream sched sim` and `bench` can\n"
        };
        out::print(&text)?;
    }
    Ok(if can_run && !breaks {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// One line per check, and one for its remedy.
pub(crate) fn lines(checks: &[Check]) -> String {
    let mut text = String::new();
    for c in checks {
        let mark = match c.verdict {
            Verdict::Ok => "ok     ",
            Verdict::Note => "note   ",
            Verdict::Breaks => "breaks ",
            Verdict::Missing => "missing",
        };
        let _ = writeln!(text, "{mark}  {}: {}", c.what, c.found);
        if !c.remedy.is_empty() {
            let _ = writeln!(text, "         {}", c.remedy);
        }
    }
    text
}
