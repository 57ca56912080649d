//! `slipstream net run` and `net init`, flag by flag.

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

/// Runs the file with these flags; returns its JSON.
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
fn a_run_prints_a_table_or_json_and_totals_omits_flows() {
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
fn the_first_file_runs_and_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.toml").to_str().unwrap().to_owned();
    let (code, out, err) = run(&["net", "init", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains(&format!("slipstream net run {file}")), "{out}");
    let (code, text, _) = run(&["net", "run", &file]);
    assert_eq!(code, Some(0));
    assert!(
        text.contains("128 TCP DCTCP; 128 delivered completely"),
        "{text}"
    );
    let (code, _, err) = run(&["net", "init", &file]);
    assert_ne!(code, Some(0));
    assert!(err.contains("exists") && err.contains("--force"), "{err}");
    assert_eq!(run(&["net", "init", "--force", &file]).0, Some(0));
    // A fat-tree with fewer hosts than the textbook's.
    let few = std::fs::read_to_string(&file).unwrap();
    let few = write(
        dir.path(),
        "b.toml",
        &few.replace(", hosts_per_edge = 4", ""),
    );
    let (_, text, _) = run(&["net", "run", &few]);
    let hosts = "32 hosts (1 per edge switch; the textbook has 4, 128 in all)";
    assert!(text.contains(hosts), "{text}");
}

#[test]
fn threads_and_spinning_change_only_the_cost() {
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
fn set_overrides_keys_and_another_seed_gives_other_flows() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    // At half the rate, the bytes take twice the time.
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
fn every_output_file_contains_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let path = |name: &str| dir.path().join(name);
    let flag = |name: &str, file: &str| format!("--{name}={}", path(file).display());
    let report = json(
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
    let ports = report["ports"].as_array().unwrap();
    assert_eq!(switches.len(), 1 + ports.len());
    let at = |name: &str| switches[0].iter().position(|c| c == name).unwrap();
    for (row, port) in switches[1..].iter().zip(ports) {
        assert_eq!(row[at("packets")], port["packets"].to_string());
        assert_eq!(row[at("bytes")], port["bytes"].to_string());
    }
    // After 50 us five of ten packets have left: 6,250 bytes wait or are in transmission.
    let series = read(&path("out/deep/series.csv"));
    assert_eq!(series[1][0], "0.00005");
    assert_eq!(series[1][3], "6250");
    let flows = read(&path("flows.csv"));
    assert_eq!(flows.len(), 3);
    let at = |name: &str| flows[0].iter().position(|c| c == name).unwrap();
    assert_eq!(flows[1][at("delivered_ns")], "101000");
    assert_eq!(flows[1][at("acked_ns")], "", "it is not acknowledged");
    assert_eq!(flows[2][at("bytes_acked")], "12500");
    let html = std::fs::read_to_string(path("run.html")).unwrap();
    assert!(html.contains(report["digest"].as_str().unwrap()) && html.contains("<svg"));
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(path("run.json")).unwrap()).unwrap();
    let spans = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X");
    assert_eq!(spans.count(), 2);
    // `log_path` is the default folder.
    let logged = write(
        dir.path(),
        "logged.toml",
        &format!("log_path = {:?}\n{TWO}", path("logs").to_str().unwrap()),
    );
    json(&logged, &[]);
    assert_eq!(read(&path("logs/sources.csv")), sources);
}

#[test]
fn invalid_flags_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let taken = write(dir.path(), "taken", "a file, not a folder");
    let below = format!("{taken}/below");
    for (flags, part) in [
        (vec!["--threads=0"], "1 to 256"),
        (vec!["--threads=257"], "1 to 256"),
        (vec!["--threads=many"], "it is not a number"),
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
fn a_bad_file_does_not_stop_the_others() {
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
fn progress_is_shown_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let quiet = run(&["net", "run", &file]);
    let shown = run(&["net", "run", "--progress", &file]);
    assert!(quiet.2.is_empty(), "{}", quiet.2);
    // The line is cleared at the end.
    assert!(shown.2.ends_with("\r\x1b[K"), "{:?}", shown.2);
}

/// Every output is checked before the run: an hour of simulated time, which would take minutes, is
/// refused at once.
#[test]
fn outputs_that_cannot_be_written_are_refused_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let long = TWO.replace("duration = 1.0", "duration = 1e6").replace(
        "size = 12500, arr_dist = 0.0",
        "duration = 1e6, arr_dist = 2e-5",
    );
    let file = write(dir.path(), "long.toml", &long);
    let taken = write(dir.path(), "taken", "a file, not a folder");
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    let (below, none) = (format!("{taken}/below"), path("none/deep.csv"));
    let folder = path("folder");
    let mut cases = vec![
        (vec!["--html", &below], "writing"),
        (vec!["--html", &none], "No such file"),
        (vec!["--html", &folder], "it is a folder"),
        (vec!["--perfetto", &below], "writing"),
        (vec!["--flows", &none], "No such file"),
        (vec!["--csv", &below], "creating"),
        (vec!["--csv", &taken], "is not a folder"),
        (vec!["--html", &file], "an input of this run"),
    ];
    let page = path("page.html");
    cases.push((vec!["--html", &page, "--perfetto", &page], "two outputs"));
    let (sources, sources_folder) = (path("tables/sources.csv"), path("tables"));
    cases.push((
        vec!["--flows", &sources, "--csv", &sources_folder],
        "two outputs",
    ));
    let parquet = path("flows.parquet");
    if cfg!(not(feature = "parquet")) {
        cases.push((vec!["--flows", &parquet], "--features parquet"));
    }
    for (flags, part) in cases {
        let mut args = vec!["net", "run", &file];
        args.extend(&flags);
        let (code, out, err) = run(&args);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{flags:?}: {err}");
        assert!(err.contains(part), "{flags:?}: {err}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".partial"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    // One file for several runs would contain only the last one.
    let (code, _, err) = run(&["net", "run", &file, &file, "--html", &page]);
    assert_eq!(code, Some(2));
    assert!(err.contains("run them one at a time"), "{err}");
}

/// An output that fails at the end (on a full disk) costs only that file.
#[test]
fn an_output_that_fails_at_the_end_does_not_affect_the_others() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: there is no /dev/full");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (page, tables, flows) = (path("page.html"), path("tables"), path("flows.csv"));
    for (flags, json) in [
        (["--html", "/dev/full", "--flows", &flows], false),
        (["--flows", "/dev/full", "--html", &page], true),
    ] {
        let mut args = vec!["net", "run", &file, "--csv", &tables];
        args.extend(flags);
        if json {
            args.push("--json");
        }
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(1), "{err}");
        assert!(
            err.contains("/dev/full") && err.contains("No space"),
            "{err}"
        );
        let digest = if json {
            let value: Value = serde_json::from_str(&out).unwrap();
            value["digest"].as_str().unwrap().to_owned()
        } else {
            "digest".to_owned()
        };
        assert!(out.contains(&digest), "{out}");
        assert_eq!(read(&dir.path().join("tables/sources.csv")).len(), 3);
    }
    assert_eq!(read(Path::new(&flows)).len(), 3);
    assert!(std::fs::read_to_string(&page).unwrap().contains("<svg"));
}

#[test]
fn a_summary_that_cannot_be_printed_ends_the_run_with_1() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: there is no /dev/full");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "two.toml", TWO);
    let flows = dir.path().join("flows.csv");
    for form in [&["--json"][..], &[]] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_slipstream"))
            .args(["net", "run", &file, "--flows"])
            .arg(&flows)
            .args(form)
            .stdout(
                std::fs::File::options()
                    .write(true)
                    .open("/dev/full")
                    .unwrap(),
            )
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert!(err.contains("stdout") && err.contains("No space"), "{err}");
        assert_eq!(read(&flows).len(), 3);
    }
}

#[test]
fn tables_can_be_discarded_and_stdout_is_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let logged = format!("log_path = \"logs\"\n{TWO}");
    let file = write(dir.path(), "two.toml", &logged);
    let (code, _, err) = run(&["net", "run", &file, "--csv", "/dev/null"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(!dir.path().join("logs").exists());
    let (code, _, err) = run(&["net", "run", &file, "--csv", &file]);
    assert_eq!(code, Some(2));
    assert!(err.contains("is not a folder"), "{err}");
    for flag in ["--flows", "--html", "--perfetto", "--csv"] {
        let (code, out, err) = run(&["net", "run", &file, flag, "-"]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.contains(flag) && err.contains("stdout"), "{err}");
    }
    assert!(!Path::new("-").exists());
}

/// A number of two flows is reported with the lines of both. Dependencies on a flow of an invalid
/// list are not reported in addition.
#[test]
fn errors_of_a_list_report_its_lines_only() {
    let dir = tempfile::tempdir().unwrap();
    let network = TREE.split("[[flow]]").next().unwrap();
    let list = "[[flow_list]]\nfile = \"flows.csv\"\nclass = 0\n";
    let next = "[[flow]]\nflow_id = 900\nflow_type = \"TCP\"\ngraph = [[0, 8]]\nstarts_after = 7\n\
        traffic = { size = 1250 }\n";
    let file = write(dir.path(), "listed.toml", &format!("{network}{list}{next}"));
    let errors = |rows: &str| {
        write(
            dir.path(),
            "flows.csv",
            &format!("src,dst,bytes,id\n{rows}"),
        );
        let (code, _, err) = run(&["net", "run", &file]);
        assert_eq!(code, Some(2), "{err}");
        err
    };
    let twice = errors("0,8,5,7\n1,8,5,3\n2,8,5,7\n");
    assert!(
        twice.contains("flows.csv:4: the flow number 7 is also that of")
            && twice.contains("flows.csv:2"),
        "{twice}"
    );
    let table = errors("0,8,5,7\n1,8,5,900\n");
    assert!(
        table.contains("flows.csv:3") && table.contains("the flow number 900"),
        "{table}"
    );
    let broken = errors("0,x,5,7\n");
    assert!(broken.contains("flows.csv:2: `dst` is `x`"), "{broken}");
    assert!(!broken.contains("does not exist"), "{broken}");
    assert!(!broken.contains("no traffic"), "{broken}");
    // Without the error, the predecessor exists.
    write(dir.path(), "flows.csv", "src,dst,bytes,id\n0,8,5,7\n");
    assert_eq!(json(&file, &[])["flows"].as_array().unwrap().len(), 2);
}

/// Hosts 0 and 8 of a fat-tree whose edge switches have two hosts each.
const TREE: &str = "seed = 1\nduration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 4, \
    hosts_per_edge = 2 }\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 1e9\n[[flow]]\n\
    flow_type = \"PacketDistribution\"\ngraph = [[0, 8]]\ntraffic = { size = 1250, arr_dist = 0.0, \
    pkt_size_dist = 1250 }\n";

#[test]
fn the_dialect_is_reported_and_can_be_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), "tree.toml", TREE);
    let hops = |flags: &[&str]| {
        let mut args = vec!["net", "run", "--json", &file];
        args.extend(flags);
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        let value: Value = serde_json::from_str(&out).unwrap();
        let hops = value["totals"]["packet_hops"].as_u64().unwrap();
        (value["dialect"].as_str().unwrap().to_owned(), hops, err)
    };
    // In Days the two hosts share a switch.
    let (dialect, count, err) = hops(&["--dialect=days"]);
    assert_eq!((dialect.as_str(), count, err.as_str()), ("days", 2, ""));
    let (dialect, count, err) = hops(&["--dialect=slipstream"]);
    assert_eq!(
        (dialect.as_str(), count, err.as_str()),
        ("slipstream", 6, "")
    );
    // The dialect is ambiguous: a note reports the choice, and how to change it.
    let (dialect, count, err) = hops(&[]);
    assert_eq!((dialect.as_str(), count), ("slipstream", 6));
    assert!(
        err.starts_with("note: ") && err.contains("dialect = \"days\""),
        "{err}"
    );
    let (code, text, _) = run(&["net", "run", &file, "--dialect", "days"]);
    assert_eq!(code, Some(0));
    assert!(
        text.contains("dialect        days: set explicitly"),
        "{text}"
    );
    let (code, _, err) = run(&["net", "run", &file, "--dialect", "ns3"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("days"), "{err}");
}

#[test]
fn flows_are_read_from_a_list_next_to_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let toml = TREE.split("[[flow]]").next().unwrap().to_owned()
        + "[[flow_list]]\nfile = \"flows.csv\"\nclass = 0\n";
    let file = write(dir.path(), "listed.toml", &toml);
    let row = |i: u32| format!("{},{},{}\n", i % 16, (i + 1 + i / 16 % 15) % 16, 100 + i);
    let rows = (0..5_000).map(row).collect::<Vec<_>>().concat();
    write(dir.path(), "flows.csv", &format!("src,dst,bytes\n{rows}"));
    let result = json(&file, &[]);
    let flows = result["flows"].as_array().unwrap();
    assert_eq!(flows.len(), 5_000);
    let bytes: u64 = flows.iter().map(|f| f["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes, (0..5_000).map(|i| 100 + i).sum::<u64>());
    write(dir.path(), "flows.csv", "src,dst,bytes\n0,99,5\n");
    let (code, _, err) = run(&["net", "run", &file]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("flows.csv:2: `dst`") && err.contains("host 99"),
        "{err}"
    );
    std::fs::remove_file(dir.path().join("flows.csv")).unwrap();
    let (code, _, err) = run(&["net", "run", &file]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("flows.csv") && err.contains("No such file"),
        "{err}"
    );
}
