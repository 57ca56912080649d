//! `slipstream net run`, flag by flag.

use std::path::Path;

use serde_json::Value;

use crate::server::run;

/// Two hosts, a link of 1 Gb/s; ten packets of 1,250 bytes, and ten more 1 ms later.
const TWO: &str = r#"
seed = 7
duration = 1.0
edges = [[0, 1]]
hosts = [0, 1]
report_interval = 5e-5
[link]
host_links = false
propagation_ns = 1000
[switch]
port_rate = 1e9
capacity = 100
[[flow]]
flow_id = 3
flow_type = "PacketDistribution"
graph = [[0, 1]]
traffic = { size = 12500, arr_dist = 0.0, pkt_size_dist = 1250 }
[[flow]]
flow_id = 4
flow_type = "TCP"
graph = [[1, 0]]
traffic = { initial_delay = 0.001, size = 12500, pkt_size_dist = 1250 }
"#;

fn write(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Runs with these flags beside the file; its JSON.
fn json(file: &str, more: &[&str]) -> Value {
    let mut args = vec!["net", "run", "--json", file];
    args.extend(more);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

fn read(path: &Path) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let row = |line: &str| line.split(',').map(str::to_owned).collect();
    text.lines().map(row).collect()
}

#[test]
fn a_run_prints_a_table_or_json_and_totals_leaves_flows_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let (code, text, err) = run(&["net", "run", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let full = json(&file, &[]);
    let digest = full["digest"].as_str().unwrap();
    assert!(text.contains(digest), "{text}");
    assert_eq!(full["seed"], 7);
    assert_eq!(full["flows"].as_array().unwrap().len(), 2);
    // 8 · 1,250 bytes at 1 Gb/s take 10 us; the last of ten arrives 1 us after 100.
    assert_eq!(full["flows"][0]["delivered_ns"], 101_000);
    let totals = json(&file, &["--totals"]);
    assert_eq!(totals["totals"], full["totals"]);
    assert!(totals.get("flows").is_none() && totals.get("ports").is_none());
}

#[test]
fn threads_and_spinning_change_the_cost_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let toml = "seed = 1\nduration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 4, \
        hosts_per_edge = 2 }\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 1e11\n\
        [[flow_set]]\nflow_type = \"TCP\"\nflow_count = 16\npairing = \"SwitchOffsetHalf\"\n\
        traffic = { size = 50000 }\n";
    let file = write(dir.path(), "tree.toml", toml);
    let mut one = json(&file, &["--threads=1"]);
    assert_eq!(one["cost"]["threads"], 1);
    let mut more = json(&file, &["--threads=3", "--spin=0"]);
    assert_eq!(more["cost"]["threads"], 3);
    for run in [&mut one, &mut more] {
        run.as_object_mut().unwrap().remove("cost");
    }
    assert_eq!(one, more);
}

#[test]
fn set_overrides_keys_and_another_seed_makes_other_flows() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    // Half the rate: the bytes take twice the time.
    let slow = json(&file, &["--set=switch.port_rate=5e8"]);
    assert_eq!(slow["flows"][0]["delivered_ns"], 201_000);
    let sets = "duration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 4 }\n[switch]\n\
        port_rate = 1e10\n[[flow_set]]\nflow_type = \"TCP\"\nflow_count = 8\n\
        traffic = { size_dist = \"WebSearch\" }\n";
    let file = write(dir.path(), "sets.toml", sets);
    let run = |seed: &str| json(&file, &["--totals", &format!("--set=seed={seed}")]);
    let (a, again, b) = (run("1"), run("1"), run("2"));
    assert_eq!(a["digest"], again["digest"]);
    assert_ne!(a["digest"], b["digest"]);
    assert_eq!((&a["seed"], &b["seed"]), (&Value::from(1), &Value::from(2)));
}

#[test]
fn every_output_file_holds_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let path = |name: &str| dir.path().join(name);
    let flag = |name: &str, file: &str| format!("--{name}={}", path(file).display());
    let told = json(
        &file,
        &[
            &flag("csv", "out/deep"),
            &flag("html", "run.html"),
            &flag("perfetto", "run.json"),
            &flag("flows", "flows.csv"),
        ],
    );
    let sources = read(&path("out/deep/sources.csv"));
    let columns = "id,flow_id,start_time,end_time,sent_packets,packet_sizes,ack_bytes";
    assert_eq!(sources[0].join(","), columns);
    assert_eq!(sources[1][1..], ["3", "0", "0.000101", "10", "12500", "0"]);
    let sinks = read(&path("out/deep/sinks.csv"));
    assert_eq!(sinks.len(), 3);
    assert_eq!(
        (&*sinks[1][1], &*sinks[1][4], &*sinks[1][5]),
        ("3", "10", "12500")
    );
    let switches = read(&path("out/deep/switches.csv"));
    let ports = told["ports"].as_array().unwrap();
    assert_eq!(switches.len(), 1 + ports.len());
    let at = |name: &str| switches[0].iter().position(|c| c == name).unwrap();
    for (row, port) in switches[1..].iter().zip(ports) {
        assert_eq!(row[at("packets")], port["packets"].to_string());
        assert_eq!(row[at("bytes")], port["bytes"].to_string());
    }
    // After 50 us five of ten packets have left: 6,250 bytes wait or are being sent.
    let series = read(&path("out/deep/series.csv"));
    assert_eq!(series[1][0], "0.00005");
    assert_eq!(series[1][3], "6250");
    let flows = read(&path("flows.csv"));
    assert_eq!(flows.len(), 3);
    let at = |name: &str| flows[0].iter().position(|c| c == name).unwrap();
    assert_eq!(flows[1][at("delivered_ns")], "101000");
    assert_eq!(flows[1][at("acked_ns")], "", "nothing answers it");
    assert_eq!(flows[2][at("bytes_acked")], "12500");
    let html = std::fs::read_to_string(path("run.html")).unwrap();
    assert!(html.contains(told["digest"].as_str().unwrap()) && html.contains("<svg"));
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(path("run.json")).unwrap()).unwrap();
    let spans = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X");
    assert_eq!(spans.count(), 2);
    // `log_path` names the folder where no flag does.
    let logged = write(
        dir.path(),
        "logged.toml",
        &format!("log_path = {:?}\n{TWO}", path("logs").to_str().unwrap()),
    );
    json(&logged, &[]);
    assert_eq!(read(&path("logs/sources.csv")), sources);
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let taken = write(dir.path(), "taken", "a file, not a folder");
    let below = format!("{taken}/below");
    for (flags, part) in [
        (vec!["--threads=0"], "1..=256"),
        (vec!["--threads=257"], "1..=256"),
        (vec!["--threads=many"], "invalid digit"),
        (vec!["--spin=-1"], "--spin"),
        (vec!["--totals"], "--json"),
        (vec!["--set=switch.prot_rate=1e9"], "prot_rate"),
        (vec!["--set=switch.port_rate=fast"], "port_rate"),
        (vec!["--set=nonsense"], "nonsense"),
        (vec!["--csv", &below], "creating"),
        (vec!["--html", &below], "writing"),
        (vec!["--perfetto", &below], "writing"),
        (vec!["--flows", &below], "writing"),
        (vec!["--bogus"], "--bogus"),
    ] {
        let mut args = vec!["net", "run", &file];
        args.extend(&flags);
        let (code, out, err) = run(&args);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{flags:?}: {err}");
        assert!(err.contains(part), "{flags:?}: {err}");
    }
    let (code, _, err) = run(&["net", "run"]);
    assert_eq!(code, Some(2), "{err}");
}

#[test]
fn a_bad_file_does_not_keep_the_others_from_running() {
    let dir = tempfile::tempdir().unwrap();
    let good = write(dir.path(), "two.toml", TWO);
    let bad = write(dir.path(), "bad.toml", "duration = \"long\"\n");
    let none = dir.path().join("none.toml");
    let (code, out, err) = run(&["net", "run", "--json", &bad, none.to_str().unwrap(), &good]);
    assert_eq!(code, Some(2));
    assert_eq!(out.lines().count(), 1, "{out}");
    assert!(
        err.contains("bad.toml:1") && err.contains("duration"),
        "{err}"
    );
    assert!(err.contains("none.toml"), "{err}");
}

#[test]
fn a_deadlock_ends_the_run_with_1() {
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/net/pfc-deadlock.toml"
    );
    let (code, _, err) = run(&["net", "run", "--json", "--totals", example]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("PFC deadlock"), "{err}");
}

#[test]
fn progress_is_shown_where_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let quiet = run(&["net", "run", &file]);
    let shown = run(&["net", "run", "--progress", &file]);
    assert!(quiet.2.is_empty(), "{}", quiet.2);
    // The line is cleared at the end.
    assert!(shown.2.ends_with("\r\x1b[K"), "{:?}", shown.2);
}
