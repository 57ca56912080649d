//! `slipstream sched doctor`: can our scheduler run here?

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

/// Prints what was found; exit 1 when our scheduler cannot run, or would break something.
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
            "our scheduler can run here, but `slipstream sched run` refuses because of what it would break\n"
        } else if can_run {
            "our scheduler can run here: `slipstream sched run`\n"
        } else {
            "our scheduler cannot run here; `slipstream sched sim` and `bench` can\n"
        };
        out::print(&text)?;
    }
    Ok(if can_run && !breaks {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(1)
    })
}

/// A line a check, and one for what to do.
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
