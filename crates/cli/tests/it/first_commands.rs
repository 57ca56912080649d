//! The commands that a new user types first.

use std::path::Path;
use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slipstream"))
        .args(args)
        .env("NO_COLOR", "1")
        .output()
        .expect("the binary starts")
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Names of the subcommands, as `--help` lists them.
fn subcommands() -> Vec<String> {
    let help = out(&run(&["--help"]));
    let list = help.split("Commands:\n").nth(1).unwrap();
    let lines = list.lines().take_while(|line| !line.is_empty());
    lines
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .filter(|name| name != "help")
        .collect()
}

#[test]
fn without_arguments_the_first_commands_are_named() {
    let output = run(&[]);
    assert!(output.status.success());
    let known = subcommands();
    assert!(known.len() > 20, "{known:?}");
    let text = out(&output);
    let mut named = 0;
    for rest in text.split("slipstream ").skip(1) {
        let word = rest.split([' ', '`', '\n']).next().unwrap();
        if word.starts_with("--") || word == "sizes" {
            continue;
        }
        assert!(
            known.iter().any(|name| name == word),
            "`slipstream {word}` does not exist"
        );
        named += 1;
    }
    assert!(named >= 6, "{text}");
}

#[test]
fn the_files_of_init_run() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().join("new");
    let flags = [
        "init",
        "--model=llama-3.1-8b",
        "--rate=20",
        "--dir",
        here.to_str().unwrap(),
    ];
    let output = run(&flags);
    assert!(output.status.success(), "{}", err(&output));
    let [cluster, workload] =
        ["cluster.toml", "workload.toml"].map(|name| here.join(name).display().to_string());
    let simulated = run(&[
        "simulate",
        &cluster,
        "-w",
        &workload,
        "--requests=40",
        "--json",
        "--quiet",
    ]);
    assert!(simulated.status.success(), "{}", err(&simulated));
    let report: serde_json::Value = serde_json::from_slice(&simulated.stdout).unwrap();
    assert_eq!(report["model"], "llama-3.1-8b");
    assert_eq!(report["requests"]["succeeded"], 40, "{report}");

    // A second run keeps the files, which may have been changed.
    std::fs::write(&workload, "requests = 7\n").unwrap();
    let again = run(&flags);
    assert_eq!(again.status.code(), Some(2));
    assert!(err(&again).contains("--force"), "{}", err(&again));
    assert_eq!(
        std::fs::read_to_string(&workload).unwrap(),
        "requests = 7\n"
    );
    let forced = run(&[&flags[..], &["--force"]].concat());
    assert!(forced.status.success(), "{}", err(&forced));
    assert!(
        std::fs::read_to_string(&workload)
            .unwrap()
            .contains("rate_per_s = 20")
    );
}

#[test]
fn init_names_what_is_near() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().to_str().unwrap();
    let output = run(&["init", "--gpu=h100", "--dir", here]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        err(&output).contains("did you mean h100-sxm"),
        "{}",
        err(&output)
    );
    assert_eq!(
        std::fs::read_dir(here).unwrap().count(),
        0,
        "nothing was written"
    );
}

#[test]
fn each_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let output = run(&["man", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", err(&output));
    for name in subcommands() {
        let page = dir.path().join(format!("slipstream-{name}.1"));
        let text = std::fs::read_to_string(&page).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(text.contains(".SH SYNOPSIS"), "{name}: {text}");
    }
    let file = dir.path().join("slipstream.1").display().to_string();
    let refused = run(&["man", &file]);
    assert_eq!(refused.status.code(), Some(2), "a file is no folder");
    assert!(err(&refused).contains(&file), "{}", err(&refused));
}

/// Bash parses the script, and completes the names of commands with it.
#[test]
fn bash_completes_commands() {
    let script = out(&run(&["completions", "bash"]));
    let ask = "COMP_WORDS=(slipstream sim); COMP_CWORD=1; _slipstream slipstream sim slipstream; echo \"${COMPREPLY[@]}\"";
    let answer = Command::new("bash")
        .args(["-c", &format!("{script}\n{ask}")])
        .output();
    let Ok(answer) = answer else {
        eprintln!("skipped: no bash");
        return;
    };
    assert_eq!(out(&answer).trim(), "simulate", "{}", err(&answer));
}

/// Names of presets follow the flags that take them.
#[test]
fn bash_completes_presets() {
    let script = out(&run(&["completions", "bash"]));
    for (words, expected) in [
        ("slipstream init --model phi-", "phi-4"),
        ("slipstream init --gpu h100-p", "h100-pcie"),
        ("slipstream plan --gpus mi300", "mi300x"),
    ] {
        let last = words.split(' ').next_back().unwrap();
        let before = words.split(' ').rev().nth(1).unwrap();
        let at = words.split(' ').count() - 1;
        let ask = format!(
            "COMP_WORDS=({words}); COMP_CWORD={at}; _slipstream slipstream {last} {before}; echo \"${{COMPREPLY[@]}}\""
        );
        let answer = Command::new("bash")
            .args(["-c", &format!("{script}\n{ask}")])
            .output();
        let Ok(answer) = answer else {
            eprintln!("skipped: no bash");
            return;
        };
        assert_eq!(out(&answer).trim(), expected, "{words}: {}", err(&answer));
    }
}

/// Both halves and all files, and success if all requests were answered, however busy this host is.
#[test]
fn the_demo_runs_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path().to_str().unwrap();
    let output = run(&["demo", "--requests=8", "--speedup=20", "--out", here]);
    let (text, log) = (out(&output), err(&output));
    assert_eq!(output.status.code(), Some(0), "{log}");
    let at = |words: &str| {
        text.find(words)
            .unwrap_or_else(|| panic!("{words}: {text}"))
    };
    assert!(at("Simulated, in") < at("better by") && at("better by") < at("Live, over HTTP"));
    assert!(at("Live, over HTTP") < at("How far to trust this half"));
    assert!(at("\nShown: ") < at("\nPages: ") && at("\nPages: ") < at("\nNext: "));
    for policy in ["kv", "round_robin"] {
        for name in [
            format!("{policy}.json"),
            format!("{policy}.simulated.json"),
            format!("{policy}.twin.json"),
            format!("{policy}.html"),
        ] {
            assert!(Path::new(here).join(&name).exists(), "{name}");
        }
        let report =
            std::fs::read_to_string(Path::new(here).join(format!("{policy}.json"))).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["requests"]["succeeded"], 8, "{report}");
    }
}
