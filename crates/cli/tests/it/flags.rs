//! A flag wins over a file, for every flag of every command. The commands' own `--help` lists the flags, so a new one
//! fails here until it is in a table below.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::server::{run, slipstream};

/// Where the key is that a flag overrides.
#[derive(Clone, Copy, PartialEq)]
enum In {
    /// The cluster file, which also the environment overrides.
    Cluster,
    /// The workload file.
    Workload,
    /// The workload file, which replays a trace.
    Trace,
    /// Any other file of the command.
    File,
}

/// A flag, and a key of a file that says something else.
struct Case {
    command: &'static str,
    flag: &'static str,
    /// Another value of the flag, and the one that must win.
    values: [&'static str; 2],
    /// Assignment in the file, as a line of TOML.
    key: &'static str,
    of: In,
}

const fn case(
    command: &'static str,
    flag: &'static str,
    values: [&'static str; 2],
    of: In,
    key: &'static str,
) -> Case {
    Case {
        command,
        flag,
        values,
        key,
        of,
    }
}

/// Flags that a key of a file corresponds to.
fn overlaps() -> Vec<Case> {
    use In::{Cluster, File, Trace, Workload};
    let mut all = vec![
        case(
            "serve",
            "listen",
            ["127.0.0.1:1", "127.0.0.1:2"],
            Cluster,
            "live.listen = '127.0.0.1:1'",
        ),
        case(
            "serve",
            "speedup",
            ["7.0", "3.0"],
            Cluster,
            "live.speedup = 7.0",
        ),
        case(
            "serve",
            "engine",
            ["http://a:1", "http://b:2"],
            Cluster,
            "pool.engines.engines = ['http://a:1']",
        ),
        case(
            "frontend",
            "listen",
            ["127.0.0.1:1", "127.0.0.1:2"],
            Cluster,
            "live.listen = '127.0.0.1:1'",
        ),
        case(
            "worker",
            "speedup",
            ["7.0", "3.0"],
            Cluster,
            "live.speedup = 7.0",
        ),
        case(
            "simulate",
            "speedup",
            ["7.0", "3.0"],
            Cluster,
            "live.speedup = 7.0",
        ),
        case("net run", "set", ["seed=5", "seed=6"], File, "seed = 5"),
        case(
            "plan",
            "model",
            ["qwen3-8b", "llama-3.1-8b"],
            Cluster,
            "model.preset = 'qwen3-8b'",
        ),
        case(
            "plan",
            "gpus",
            ["h200-sxm", "b200-sxm"],
            Cluster,
            "engine.timing.gpu = 'h200-sxm'",
        ),
        case(
            "plan",
            "tensor-parallel",
            ["2", "1"],
            Cluster,
            "engine.tensor_parallel_size = 2",
        ),
        case(
            "plan",
            "pipeline-parallel",
            ["2", "1"],
            Cluster,
            "engine.pipeline_parallel_size = 2",
        ),
        case(
            "plan",
            "data-parallel",
            ["2", "1"],
            Cluster,
            "engine.data_parallel_size = 2",
        ),
        case(
            "plan",
            "host-memory",
            ["8", "0"],
            Cluster,
            "engine.host_tier.gib = 8",
        ),
        case(
            "plan",
            "speculation",
            ["3", "0"],
            Cluster,
            "engine.speculation.num_speculative_tokens = 3",
        ),
        case(
            "plan",
            "precision",
            ["fp8", "bf16"],
            Cluster,
            "engine.timing.dtype = 'fp8'",
        ),
        case(
            "plan",
            "kv-cache-dtype",
            ["fp8", "bf16"],
            Cluster,
            "engine.kv_cache_dtype = 'fp8'",
        ),
        case(
            "plan",
            "max-num-seqs",
            ["1", "64"],
            Cluster,
            "engine.max_num_seqs = 1",
        ),
        case(
            "plan",
            "max-num-batched-tokens",
            ["512", "2048"],
            Cluster,
            "engine.max_num_batched_tokens = 512",
        ),
        case(
            "plan",
            "policies",
            ["random", "kv"],
            Cluster,
            "router.policy = 'random'",
        ),
        case(
            "plan",
            "prefill-weights",
            ["2", "1"],
            Cluster,
            "router.prefill_weight = 2",
        ),
        case(
            "plan",
            "temperatures",
            ["2", "0"],
            Cluster,
            "router.temperature = 2",
        ),
    ];
    let values = ["engine.max_model_len=32", "engine.max_model_len=4096"];
    all.push(case(
        "plan",
        "set",
        values,
        Cluster,
        "engine.max_model_len = 32",
    ));
    for command in [
        "serve",
        "frontend",
        "worker",
        "simulate",
        "sweep",
        "drag",
        "calibrate",
    ] {
        let values = ["engine.max_model_len=2048", "engine.max_model_len=4096"];
        all.push(case(
            command,
            "set",
            values,
            Cluster,
            "engine.max_model_len = 2048",
        ));
    }
    for command in ["simulate", "sweep", "plan", "bench"] {
        all.extend([
            case(command, "requests", ["5", "7"], Workload, "requests = 5"),
            case(
                command,
                "duration",
                ["1s", "2s"],
                Workload,
                "duration_s = 1",
            ),
            case(
                command,
                "time-scale",
                ["4", "2"],
                Workload,
                "time_scale = 4",
            ),
            case(command, "seed", ["5", "6"], Workload, "seed = 5"),
            case(
                command,
                "slo",
                ["ttft=1ms", "ttft=1s"],
                Workload,
                "slo = 'ttft=1ms'",
            ),
            case(
                command,
                "on-bad-line",
                ["stop", "skip"],
                Trace,
                "trace.on_bad_line = 'stop'",
            ),
            case(
                command,
                "trace-columns",
                ["arrival=at,isl=out,osl=in", "arrival=at,isl=in,osl=out"],
                Trace,
                "trace.columns = 'arrival=at,isl=out,osl=in'",
            ),
            case(
                command,
                "trace-unit",
                ["s", "ms"],
                Trace,
                "trace.unit = 's'",
            ),
        ]);
        all.push(case(
            command,
            "workload-set",
            ["seed=5", "seed=6"],
            Workload,
            "seed = 5",
        ));
    }
    all.extend([
        case("drag", "requests", ["1", "2"], Workload, "requests = 1"),
        case(
            "trace convert",
            "requests",
            ["5", "7"],
            Workload,
            "requests = 5",
        ),
        case("trace convert", "seed", ["5", "6"], Workload, "seed = 5"),
        case(
            "trace convert",
            "tokens-per-id",
            ["8", "16"],
            Trace,
            "trace.tokens_per_id = 8",
        ),
        case(
            "trace convert",
            "on-bad-line",
            ["stop", "skip"],
            Trace,
            "trace.on_bad_line = 'stop'",
        ),
        case(
            "trace convert",
            "trace-columns",
            ["arrival=at,isl=out,osl=in", "arrival=at,isl=in,osl=out"],
            Trace,
            "trace.columns = 'arrival=at,isl=out,osl=in'",
        ),
        case(
            "trace convert",
            "trace-unit",
            ["s", "ms"],
            Trace,
            "trace.unit = 's'",
        ),
    ]);
    all
}

/// Flags that contradict a workload file as a whole, and are refused.
const REFUSED: [(&str, [&str; 2]); 5] = [
    ("trace", ["--trace", "t.jsonl"]),
    ("concurrency", ["--concurrency", "2"]),
    ("rate", ["--rate", "2"]),
    ("isl", ["--isl", "2"]),
    ("osl", ["--osl", "2"]),
];
/// Commands with the flags of [`REFUSED`].
const LOADED: [&str; 5] = ["simulate", "sweep", "plan", "bench", "drag"];

/// Flags that no key of a file of theirs corresponds to.
const OWN: &[(&str, &str)] = &[
    ("demo", "short trace requests speedup out"),
    ("init", "model gpu rate isl osl workers dir force"),
    ("net init", "force"),
    (
        "serve",
        "print-config record record-bytes-max shadow shadow-ratio host port model served-model-name",
    ),
    (
        "frontend",
        "print-config plane-host record record-bytes-max",
    ),
    (
        "frontend",
        "discovery lease peer-deadline plane-cert plane-key plane-ca",
    ),
    ("worker", "print-config pool index links metrics"),
    (
        "worker",
        "discovery lease peer-deadline plane-cert plane-key plane-ca",
    ),
    (
        "simulate",
        "print-config workload max-sim-time threads retries no-jump no-api-time",
    ),
    (
        "simulate",
        "label json out drag passes series perfetto html quiet",
    ),
    (
        "sweep",
        "print-config workload vary max-sim-time seeds jobs on attain tolerance out html front quiet price prices",
    ),
    (
        "plan",
        "workload cluster attain load headroom serving autoscale-min expert-parallel max-gpus price prices",
    ),
    ("plan", "seeds quick jobs on json write emit html quiet"),
    ("predict", "profile models out"),
    (
        "calibrate",
        "print-config from-points only engine requests metrics fpm dry-run max-duration max-concurrency",
    ),
    (
        "calibrate",
        "max-prompt timeout model api-key prompt-form token-ids seed shared keep out report",
    ),
    (
        "drag",
        "print-config speedup print-speedup json keep engine token-ids compare workload",
    ),
    // As `requests`: `the_flags_of_a_workload_are_passed_on` has them all.
    (
        "drag",
        "duration time-scale seed on-bad-line trace-columns trace-unit workload-set",
    ),
    ("sched sim", "json trace-row trace-file"),
    (
        "sched bench",
        "mechanism rounds warmup linger-us load-pct load-mechanism message-threads workers work-us",
    ),
    ("sched bench", "duration-ms seed json"),
    ("sched doctor", "json"),
    (
        "bench",
        "workload print-config endpoint prompt-form token-ids model api-key header no-stream warmup timeout",
    ),
    (
        "bench",
        "connect-timeout retries max-in-flight threads wait-ready label json out drag series html trace-stages",
    ),
    (
        "bench",
        "server-pid no-metrics quiet sweep attain sweep-steps",
    ),
    (
        "trace stats",
        "block-size tokens-per-id window requests on-bad-line trace-columns trace-unit",
    ),
    ("trace convert", "out to"),
    ("tokenizer export", "force"),
    (
        "tokenizer check",
        "tokenizer api-key ca-file cert-file key-file server-name timeout",
    ),
    ("presets", "json"),
    (
        "describe",
        "api-key ca-file cert-file key-file server-name timeout json",
    ),
    (
        "top",
        "once json interval api-key ca-file cert-file key-file server-name",
    ),
    (
        "events tail",
        "bus endpoint ranks topic replay-from url subject count json quiet",
    ),
    (
        "events cached",
        "api-key ca-file cert-file key-file server-name block-size timeout",
    ),
    (
        "net run",
        "dialect json totals threads spin csv html perfetto flows progress",
    ),
    ("doctor", "json"),
];

/// Flags of every command, from its `--help`.
fn flags(command: &[String], all: &mut BTreeSet<(String, String)>) {
    let help = slipstream().args(command).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let name = command.join(" ");
    let mut commands = false;
    for line in help.lines() {
        if !line.starts_with(' ') {
            commands = line == "Commands:";
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let first = line.trim_start();
        let long = match first.split_once(", ") {
            Some((short, long)) if short.len() == 2 && short.starts_with('-') => long,
            _ => first,
        };
        if commands && indent == 2 {
            let sub = first.split(' ').next().unwrap();
            if sub != "help" {
                flags(&[command, &[sub.to_owned()]].concat(), all);
            }
        } else if indent <= 6
            && let Some(flag) = long.strip_prefix("--")
        {
            let flag = flag.split([' ', '[']).next().unwrap();
            if flag != "help" && flag != "version" {
                all.insert((name.clone(), flag.to_owned()));
            }
        }
    }
}

#[test]
fn every_flag_is_in_a_table() {
    let mut found = BTreeSet::new();
    flags(&[], &mut found);
    let mut known = BTreeSet::new();
    let mut twice = Vec::new();
    let mut add = |command: &str, flag: &str| {
        if !known.insert((command.to_owned(), flag.to_owned())) {
            twice.push(format!("{command} --{flag}"));
        }
    };
    for case in overlaps() {
        add(case.command, case.flag);
    }
    for command in LOADED {
        for (flag, _) in REFUSED {
            add(command, flag);
        }
    }
    for (command, names) in OWN {
        for flag in names.split(' ') {
            add(command, flag);
        }
    }
    let absent: Vec<_> = found.difference(&known).collect();
    let gone: Vec<_> = known.difference(&found).collect();
    assert!(
        absent.is_empty() && gone.is_empty() && twice.is_empty(),
        "in no table: {absent:?}; no flags: {gone:?}; twice: {twice:?}"
    );
}

const WORKLOAD: &str = "isl = { kind = 'uniform', min = 16, max = 64 }\nosl = 4\narrival = { kind = 'constant', rate_per_s = 2 }\n";
const TRACE: &str = "at,in,out\n0,40,4\n1,50,5\nx,1,1\n2,60,6\n";
const NETWORK: &str = "duration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 4 }\n[switch]\n\
    port_rate = 1e10\n[[flow_set]]\nflow_type = \"TCP\"\nflow_count = 2\n\
    traffic = { size_dist = \"WebSearch\" }\n";

/// The workload file; `file`: it has the key.
fn load_file(case: &Case, file: bool, trace: &str) -> String {
    let key = if file && case.of != In::Cluster {
        case.key
    } else {
        ""
    };
    if case.of != In::Trace {
        let ends = match case.flag {
            "requests" if file => "",
            "duration" => "requests = 100\n",
            _ => "requests = 6\n",
        };
        return format!("{ends}{key}\n{WORKLOAD}");
    }
    let mut load = format!("trace.file = '{trace}'\n{key}\n");
    for (flag, own) in [
        ("on-bad-line", "on_bad_line = 'skip'"),
        ("trace-columns", "columns = 'arrival=at,isl=in,osl=out'"),
        ("trace-unit", "unit = 's'"),
    ] {
        if case.flag != flag {
            load = format!("{load}trace.{own}\n");
        }
    }
    load
}

/// Exit status and figures of a command; `file`: its file has the key; `variable`: so has the environment.
fn answer(case: &Case, value: Option<&str>, file: bool, variable: bool) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let key = |of: In| if file && case.of == of { case.key } else { "" };
    let of_cluster = case.of == In::Cluster;
    let mut base = match case.flag {
        "speculation" => "engine.speculation.method = 'mtp'\nengine.speculation.acceptance = 0.7\n",
        "host-memory" => "engine.host_tier.bytes_per_s = 25e9\n",
        _ => "",
    }
    .to_owned();
    if of_cluster && case.command == "plan" && case.flag != "model" {
        base.push_str("model.preset = 'llama-3.1-8b'\n");
    }
    let cluster = write("cluster.toml", &format!("{base}{}\n", key(In::Cluster)));
    let trace = write("t.csv", TRACE);
    let load = write("load.toml", &load_file(case, file, &trace));
    let network = write("net.toml", &format!("{}\n{NETWORK}", key(In::File)));
    let mut command = slipstream();
    let csv = dir.path().join("out.csv").display().to_string();
    let args: &[&str] = match case.command {
        "serve" | "frontend" | "worker" => &[&cluster, "--print-config"],
        "simulate" | "drag" if case.flag == "set" => &[&cluster, "--print-config"],
        "simulate" => &[&cluster, "--workload", &load, "--json"],
        "sweep" if case.flag == "set" => &[
            &cluster,
            "--workload",
            &load,
            "--vary",
            "pool.main.workers=1",
            "--print-config",
        ],
        "sweep" => &[
            &cluster,
            "--workload",
            &load,
            "--vary",
            "pool.main.workers=1",
            "--out",
            &csv,
        ],
        "drag" => &[&cluster, "--workload", &load, "--speedup", "1000", "--json"],
        "calibrate" => &[&cluster, "--print-config", "--requests", "requests.csv"],
        "bench" => &["--workload", &load, "--print-config"],
        "trace convert" if case.flag == "tokens-per-id" => &[&load, "--to", "mooncake"],
        "trace convert" => &[&load],
        "net run" => &[&network, "--json", "--totals"],
        "plan" => &[
            &load,
            "--cluster",
            &cluster,
            "--quick",
            "--json",
            "--serving",
            "aggregated",
        ],
        other => panic!("no command {other}"),
    };
    command.args(case.command.split(' ')).args(args);
    if case.command == "plan" {
        for (flag, value) in [
            ("model", "llama-3.1-8b"),
            ("slo", "ttft=9s"),
            ("seeds", "1"),
            ("tensor-parallel", "1"),
            ("precision", "fp8"),
            ("policies", "kv"),
            ("max-num-seqs", "64"),
            ("max-num-batched-tokens", "2048"),
            ("max-gpus", "4"),
        ] {
            if case.flag != flag {
                command.arg(format!("--{flag}={value}"));
            }
        }
    } else if ["sweep", "simulate"].contains(&case.command) && case.flag != "slo" {
        command.arg("--slo=ttft=9s");
    }
    if let Some(value) = value {
        command.arg(format!("--{}={value}", case.flag));
    }
    if variable {
        let (path, value) = case.key.split_once('=').unwrap();
        let name = path.trim().to_uppercase().replace('.', "__");
        command.env(format!("SLIPSTREAM_{name}"), value.trim());
    }
    let output = command.stdin(Stdio::null()).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stdout = std::fs::read_to_string(Path::new(&csv)).unwrap_or(stdout);
    let status = output.status.code();
    let text = if stdout.is_empty() || status == Some(2) {
        String::from_utf8(output.stderr).unwrap()
    } else {
        figures(&stdout)
    };
    (
        status,
        text.replace(&dir.path().display().to_string(), "DIR"),
    )
}

/// The first lines in which two texts differ.
fn difference(one: &str, other: &str) -> String {
    let mut pairs = one.lines().zip(other.lines());
    let found = pairs.find(|(one, other)| one != other);
    found.map_or_else(
        || format!("{one:.300}\n{other:.300}"),
        |(one, other)| format!("{one}\n{other}"),
    )
}

/// The output without what differs from run to run, and without comments.
fn figures(text: &str) -> String {
    let Ok(mut json) = serde_json::from_str::<Value>(text) else {
        let lines = text
            .lines()
            .map(|line| line.split("  # ").next().unwrap().trim());
        return lines
            .filter(|line| !line.is_empty())
            .collect::<Vec<_>>()
            .join("\n");
    };
    for (of, key) in [
        ("", "client"),
        ("", "assumed"),
        ("", "not_searched"),
        ("", "host"),
        ("", "gaps"),
        ("", "cost"),
        ("/simulation", "wall_s"),
        ("/twin/simulation", "wall_s"),
    ] {
        if let Some(of) = json.pointer_mut(of).and_then(Value::as_object_mut) {
            of.remove(key);
        }
    }
    match json.pointer("/live/requests") {
        Some(live) => format!("{live} {}", json["twin"]["requests"]),
        None => format!("{json:#}"),
    }
}

#[test]
fn a_flag_wins_over_a_file_and_over_the_environment() {
    let cases = overlaps();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let wrong = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(case) = cases.get(at) else { break };
                    if let Err(problem) = check(case) {
                        wrong.lock().unwrap().push(problem);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(
        wrong.is_empty(),
        "{} of {}\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n\n")
    );
}

fn check(case: &Case) -> Result<(), String> {
    let named = format!("{} --{}", case.command, case.flag);
    let [other, winner] = case.values.map(Some);
    let alone = answer(case, winner, false, false);
    if alone.0 == Some(2) {
        return Err(format!("{named}: {}", alone.1));
    }
    if alone == answer(case, other, false, false) {
        return Err(format!("{named}: no effect: {:.300}", alone.1));
    }
    let over = answer(case, winner, true, false);
    if alone != over {
        return Err(format!(
            "{named}: the file wins: {}",
            difference(&alone.1, &over.1)
        ));
    }
    if case.of == In::Cluster {
        let over = answer(case, winner, false, true);
        if alone != over {
            return Err(format!(
                "{named}: a variable wins: {}",
                difference(&alone.1, &over.1)
            ));
        }
    }
    Ok(())
}

#[test]
fn flags_that_contradict_a_workload_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let load = dir.path().join("load.toml");
    std::fs::write(&load, format!("requests = 2\n{WORKLOAD}")).unwrap();
    for command in LOADED {
        for (flag, values) in REFUSED {
            let mut asked = slipstream();
            asked.arg(command).arg("--workload").arg(&load).args(values);
            match command {
                "sweep" => asked.arg("--vary=pool.main.workers=1"),
                "bench" => asked.arg("--print-config"),
                _ => &mut asked,
            };
            let output = asked.output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{command} --{flag}");
            assert!(said.contains(&format!("--{flag}")), "{said}");
        }
    }
}

/// A flag's mistake is named by the flag, not by the key of the cluster file that it sets.
#[test]
fn mistakes_name_the_flag_that_was_typed() {
    let check = |args: &[&str], flag: &str, words: &[&str]| {
        let (code, _, err) = run(args);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(err.contains(flag), "{args:?}: {err}");
        assert!(!err.contains("--set"), "{args:?}: {err}");
        for word in words {
            assert!(err.contains(word), "{args:?}: {err}");
        }
    };
    let plan = ["plan", "--rate=4", "--slo=ttft=1s"];
    let kin = ["llama-3.1-70b", "llama-3.3-70b"];
    check(
        &[&plan[..], &["--model=llama3-70b"]].concat(),
        "--model",
        &kin,
    );
    let price = ["GPU=PRICE", "h100-sxm=2.5"];
    check(
        &[&plan[..], &["--price=h100-sxm"]].concat(),
        "--price h100-sxm",
        &price,
    );
    check(&["plan", "--slo=ttft=1s", "--rate", "-3"], "--rate", &[]);
    check(&["serve", "--listen", "8000"], "--listen", &[]);
    check(&["serve", "--host", "a b"], "--host", &[]);
    check(
        &["serve", "--engine", "localhost:8001"],
        "--engine",
        &["http://localhost:8001"],
    );
    check(&["serve", "--speedup", "-1"], "--speedup", &[]);
    check(&["serve", "--model", "llama3-70b"], "--model", &kin);
    check(
        &["init", "--model", "llama3-70b", "--dir=x"],
        "llama3-70b",
        &kin,
    );
    let dir = tempfile::tempdir().unwrap();
    let table = dir.path().join("workload.toml");
    std::fs::write(
        &table,
        "requests = 5\nisl = 3\n[arrival]\nkind = \"poisson\"\n",
    )
    .unwrap();
    check(
        &["predict", table.to_str().unwrap()],
        "workload.toml",
        &["model_path"],
    );
}
