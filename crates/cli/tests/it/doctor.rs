//! `slipstream doctor` under restricted limits, and a server under such limits.

use std::process::{Command, Output};

use crate::server::{FAST, Server};

fn doctor(before: &str) -> (Output, serde_json::Value) {
    let output = Command::new("sh")
        .args(["-c", &format!("{before} exec \"$0\" doctor --json")])
        .arg(env!("CARGO_BIN_EXE_slipstream"))
        .output()
        .unwrap();
    let json = serde_json::from_slice(&output.stdout).unwrap();
    (output, json)
}

fn verdict<'a>(json: &'a serde_json::Value, what: &str) -> &'a str {
    let checks = json["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["what"] == what);
    found.unwrap_or_else(|| panic!("{what} in {json:#}"))["verdict"]
        .as_str()
        .unwrap()
}

#[test]
fn a_host_that_runs_tests_can_serve() {
    let (output, json) = doctor("");
    assert_eq!(json["can_serve"], true, "{json:#}");
    assert_eq!(output.status.code(), Some(0));
    assert_ne!(verdict(&json, "loopback"), "missing");
}

#[test]
fn too_few_open_files_are_missing_and_said_with_the_remedy() {
    let (output, json) = doctor("ulimit -n 100;");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(json["can_serve"], false);
    assert_eq!(verdict(&json, "open files"), "missing");
    let text = json.to_string();
    assert!(text.contains("100 at most"), "{text}");
    assert!(text.contains("ulimit -Hn"), "{text}");
}

#[test]
fn a_server_takes_the_open_files_that_it_may_have() {
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -Sn 64; exec \"$0\" serve \"$@\""])
        .arg(env!("CARGO_BIN_EXE_slipstream"))
        .args(FAST);
    let server = Server::spawn(command);
    let mut clients: Vec<_> = (0..100).map(|_| server.connect()).collect();
    for client in &mut clients {
        assert_eq!(client.send("GET", "/live", &[], b"").status, 200);
    }
}

#[test]
fn a_lowered_limit_of_connections_is_said_and_shown() {
    for (files, wanted) in [(3_000, None), (9_000, None), (9_000, Some(1_000))] {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut command = Command::new("sh");
        let script = format!(
            "ulimit -n {files}; exec \"$0\" serve \"$@\" 2>{}",
            log.display()
        );
        command
            .args(["-c", &script])
            .arg(env!("CARGO_BIN_EXE_slipstream"))
            .args(FAST);
        if let Some(connections) = wanted {
            command.arg(format!("--set=live.connections_max={connections}"));
        }
        let server = Server::spawn(command);
        let holds = server.metric("slipstream_connections_max");
        let text = std::fs::read_to_string(&log).unwrap();
        let said = text.contains("WARN")
            && text.contains(&format!(
                "`live.connections_max` is {holds} instead of 65536"
            ));
        assert_eq!(said, wanted.is_none(), "{text}");
        assert!(holds <= f64::from(files), "{holds} of {files}");
    }
}
