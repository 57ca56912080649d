//! SIGINT in the middle of long work: what is done is printed, and the exit status is 1.

use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Time limit; a test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(120);

/// CPU time of a process, clock ticks of 10 ms.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may have spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut next = || fields.next().and_then(|field| field.parse::<u64>().ok());
    next().unwrap_or(0) + next().unwrap_or(0)
}

/// Runs a command that does not end by itself, and interrupts it after `cpu_ms` of CPU time.
fn interrupted(args: &[&str], cpu_ms: u64) -> Output {
    let child = Command::new(env!("CARGO_BIN_EXE_slipstream"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let begun = Instant::now();
    while ticks(child.id()) < cpu_ms / 10 {
        assert!(begun.elapsed() < PATIENCE, "{args:?} has taken no CPU time");
        std::thread::yield_now();
    }
    end(child, args)
}

fn end(child: Child, args: &[&str]) -> Output {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("it ends");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {err}");
    assert!(err.contains("interrupted"), "{args:?}: {err}");
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_sweep_keeps_the_configurations_that_have_run() {
    let dir = tempfile::tempdir().unwrap();
    let workload = dir.path().join("w.toml");
    fs::write(
        &workload,
        "requests = 5\nisl = 100\nosl = 5\n[arrival]\nkind = \"poisson\"\nrate_per_s = 5\n",
    )
    .unwrap();
    let csv = dir.path().join("rows.csv");
    let output = interrupted(
        &[
            "sweep",
            "--workload",
            workload.to_str().unwrap(),
            "--vary=requests=5,6,1000000000",
            "--jobs=1",
            "--out",
            csv.to_str().unwrap(),
        ],
        800,
    );
    let err = text(&output.stderr);
    assert!(err.contains("2 of 3 configurations had run"), "{err}");
    let rows = fs::read_to_string(&csv).unwrap();
    assert_eq!(rows.lines().count(), 3, "a header and two rows: {rows}");
    assert!(rows.contains("\n5,") && rows.contains("\n6,"), "{rows}");
}

#[test]
fn a_plan_says_what_it_had_found() {
    let args = [
        "plan",
        "--model=llama-3.1-8b",
        "--rate=400",
        "--isl=900",
        "--osl=300",
        "--requests=150000",
        "--gpus=l40s,h100-sxm",
        "--slo=ttft=2s,itl=60ms",
        "--jobs=1",
    ];
    let output = interrupted(&args, 1500);
    let out = text(&output.stdout);
    assert!(out.starts_with("interrupted; "), "{out}");
    let output = interrupted(&[&args[..], &["--json", "--load=1,2"]].concat(), 1500);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let said = json["interrupted"].as_str().unwrap();
    assert!(said.contains("load 2") && said.contains("load 1"), "{said}");
    assert_eq!(json["answers"], serde_json::json!([]));
}

#[test]
fn a_network_run_has_the_packets_until_then() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("long.toml");
    let config = "duration = 1000000.0\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\nhost_links = false\n\
         propagation_ns = 1000\n[switch]\nport_rate = 1e9\ncapacity = 100\n[[flow]]\nflow_id = 1\n\
         flow_type = \"TCP\"\ngraph = [[0, 1]]\n\
         traffic = { size = 100000000000000, pkt_size_dist = 1250 }\n";
    fs::write(&file, config).unwrap();
    let name = file.to_str().unwrap();
    for threads in ["--threads=1", "--threads=2"] {
        let output = interrupted(&["net", "run", "--json", threads, name, name], 700);
        let err = text(&output.stderr);
        assert!(err.contains("1 further file not run"), "{err}");
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(json.to_string().contains("\"events\""), "{json}");
    }
}
