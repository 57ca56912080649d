use std::sync::Arc;

use slipstream_cpusched::config::Experiment;
use slipstream_cpusched::machine::{CpuMask, Machine};
use slipstream_cpusched::rtapp;
use slipstream_cpusched::workload::{Op, Span};

const GOOD: &str = r#"
[machine]
llcs = 2
cpus_per_llc = 4
[run]
duration_ms = 10
loads_pct = [50]
[workload]
kind = "schbench"
cpus_per_message_thread = 4
work_us = 100
mechanism = "pipe"
"#;

fn parse(text: &str) -> Result<usize, String> {
    Experiment::parse(text, |f| Err(format!("no file {f}")))
        .map(|e| e.plans.len())
        .map_err(|e| e.to_string())
}

fn check_refused(from: &str, to: &str, part: &str) {
    assert!(GOOD.contains(from), "the case changes something");
    let error = parse(&GOOD.replace(from, to)).unwrap_err();
    assert!(error.contains(part), "{error}");
}

#[test]
fn one_run_a_policy_and_load() {
    assert_eq!(parse(GOOD), Ok(4));
    assert_eq!(
        parse(&GOOD.replace("[50]", "[50, 60]\npolicies = [\"eevdf\"]")),
        Ok(2)
    );
    assert_eq!(
        parse(&GOOD.replace("[run]", "[costs]\nwake_idle_us = [1, 2, 3]\n[run]")),
        Ok(12)
    );
}

#[test]
fn wrong_values_are_named_with_their_bounds() {
    check_refused(
        "cpus_per_llc = 4",
        "cpus_per_llc = 65",
        "`machine.cpus_per_llc` is 65",
    );
    check_refused(
        "cpus_per_llc = 4",
        "cpus_per_llc = 0",
        "`machine.cpus_per_llc` is 0",
    );
    check_refused("llcs = 2", "llcs = 0", "`machine.llcs`");
    check_refused(
        "duration_ms = 10",
        "duration_ms = 0",
        "`run.duration_ms` is 0",
    );
    check_refused(
        "loads_pct = [50]",
        "loads_pct = [0]",
        "`run.loads_pct` has 0",
    );
    check_refused("loads_pct = [50]", "", "`run.loads_pct` belongs to");
    check_refused(
        "duration_ms = 10",
        "duration_ms = 10\nlength = 3",
        "unknown field `length`",
    );
    check_refused("\"pipe\"", "\"smoke\"", "smoke");
    check_refused("work_us = 100", "work_us = 0", "`workload.work_us`");
    check_refused(
        "[run]",
        "[costs]\nidle_after_us = [1]\nidle_exit_us = [1]\n[run]",
        "starting at 0",
    );
}

#[test]
fn all_mistakes_are_reported_together() {
    let error = parse(
        &GOOD
            .replace("llcs = 2", "llcs = 0")
            .replace("_ms = 10", "_ms = 0"),
    )
    .unwrap_err();
    assert_eq!(error.lines().count(), 2, "{error}");
}

const MACHINE: Machine = Machine {
    llcs: 1,
    cpus_per_llc: 4,
    threads_per_core: 1,
};

#[test]
fn rtapp_file_becomes_scripts() {
    let w = rtapp::parse(
        r#"{"tasks": {
            "periodic": {"instance": 2, "run": 1000, "timer": {"ref": "t", "period": 10000}},
            "pair": {"priority": 5, "cpus": [3], "phases": {
                "a": {"loop": 3, "run0": 10, "lock": "m", "unlock": "m"},
                "b": {"resume": "other"}}},
            "other": {"loop": 2, "suspend": "other", "run": 5}},
          "global": {"duration": 1}}"#,
        MACHINE,
    )
    .unwrap();
    let lengths: Vec<usize> = w.tasks.iter().map(|t| t.script.len()).collect();
    assert_eq!((w.groups.len(), w.locks, w.channels), (3, 1, 1));
    assert_eq!(lengths, [2, 2, 10, 5], "periodic twice, pair, other");
    // However many instances a file asks for, its steps are in memory once.
    assert!(Arc::ptr_eq(&w.tasks[0].script, &w.tasks[1].script));
    assert_eq!(
        w.tasks[2].script[0],
        Op::Run(Span::Fixed(10_000)),
        "events keep their order"
    );
    let pair = w.tasks.iter().find(|t| t.script.len() == 10).unwrap();
    assert_eq!((pair.mask.clone(), pair.weight), (CpuMask::of([3]), 33));
}

#[test]
fn rtapp_mistakes_name_their_place() {
    for (text, part) in [
        ("[]", "must be an object"),
        ("{}", "tasks: missing"),
        (
            r#"{"tasks": {"a": {"run": -1}}}"#,
            "tasks.a.run: must be a whole number",
        ),
        (
            r#"{"tasks": {"a": {"fork": "b"}}}"#,
            "tasks.a.fork: unknown",
        ),
        (
            r#"{"tasks": {"a": {"run": 1, "cpus": [9]}}}"#,
            "a list of CPUs of 0 to 3",
        ),
        (
            r#"{"tasks": {"a": {"run": 1, "run": 1}}}"#,
            "key `run` twice",
        ),
        (r#"{"tasks": {"a": {}}}"#, "tasks.a: does nothing"),
        (
            r#"{"tasks": {"a": {"run": 1, "loop": 0}}}"#,
            "tasks.a.loop: must be -1",
        ),
        (r#"{"tasks": {"a": {"run": 1, "loop": 1000000}}}"#, "use -1"),
    ] {
        let error = rtapp::parse(text, MACHINE).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
