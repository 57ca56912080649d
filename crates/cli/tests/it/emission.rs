//! `plan --emit`: scripts that start vLLM, values of the Helm chart, and templates of one's own.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::server::run;

/// A question that is answered at once.
const QUESTION: &[&str] = &[
    "plan",
    "--model=llama-3.1-8b",
    "--rate=20",
    "--isl=800",
    "--osl=20",
    "--requests=60",
    "--seeds=1",
    "--quick",
    "--quiet",
    "--json",
    "--gpus=l40s",
    "--precision=fp8",
    "--tensor-parallel=1",
    "--max-num-seqs=128",
    "--max-num-batched-tokens=4096",
    "--policies=kv",
    "--slo=ttft=2s,itl=90ms",
    "--attain=90%",
];

const AGGREGATED: &[&str] = &["--serving=aggregated"];
const DISAGGREGATED: &[&str] = &["--serving=disaggregated"];

/// Writes the answer's files to `dir`. Returns the answer as JSON.
fn emit(target: &str, dir: &Path, more: &[&str]) -> Value {
    let emit = ["--emit", target, dir.to_str().unwrap()];
    let (code, out, err) = run(&[QUESTION, &emit, more].concat());
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("wrote "), "{err}");
    serde_json::from_str(&out).unwrap()
}

/// A folder with stubs of `names`, which print their arguments, one per line.
fn stubs(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in names {
        let path = dir.path().join(name);
        let print =
            "#!/bin/sh\nprintf '%s\\n' \"$(basename \"$0\")\" \"$@\"\n[ -t 0 ] || cat >/dev/null\n";
        std::fs::write(&path, print).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).unwrap();
    }
    dir
}

/// Runs a script with `variables` alone, and stubs instead of the programs that it starts.
fn script(path: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let stubs = stubs(&["vllm", "slipstream", "helm", "kubectl"]);
    let output = Command::new(path)
        .args(args)
        .env_clear()
        .env("PATH", format!("{}:/usr/bin:/bin", stubs.path().display()))
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let [out, err] =
        [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    (output.status.code(), out, err)
}

/// The value behind `flag` in a stub's output.
fn value<'a>(printed: &'a str, flag: &str) -> Option<&'a str> {
    let mut lines = printed.lines();
    lines.find(|line| *line == flag)?;
    lines.next()
}

#[test]
fn engines_start_with_the_answers_settings() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("new");
    let plan = emit("vllm", &dir, AGGREGATED);
    let answer = &plan["answers"][0]["answer"];
    let engine = dir.join("engine.sh");
    let (code, out, err) = script(&engine, &["main", "--seed", "7"], &[("MODEL", "/m/a b")]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.starts_with("vllm\nserve\n/m/a b\n"), "{out}");
    assert_eq!(value(&out, "--max-num-seqs"), Some("128"));
    let tensor = answer["tensor_parallel_size"].to_string();
    assert_eq!(value(&out, "--tensor-parallel-size"), Some(tensor.as_str()));
    // The preset has 16 bits.
    assert_eq!(value(&out, "--quantization"), Some("fp8"));
    assert_eq!(value(&out, "--seed"), Some("7"), "further flags");
    let events = value(&out, "--kv-events-config").unwrap();
    let events: Value = serde_json::from_str(events).unwrap();
    assert_eq!(events["publisher"], "zmq");

    // Nothing is guessed.
    let (code, _, err) = script(&engine, &["main"], &[]);
    assert_eq!(code.map(|code| code > 0), Some(true));
    assert!(err.contains("MODEL: the model"), "{err}");
    let (code, _, err) = script(&engine, &["other"], &[("MODEL", "m")]);
    assert_eq!(code, Some(2));
    assert!(err.contains("main"), "{err}");
}

#[test]
fn keys_of_the_engine_become_flags_or_notes() {
    let top = tempfile::tempdir().unwrap();
    let more = [
        "--serving=aggregated",
        "--set=engine.num_gpu_blocks=4000",
        "--set=engine.async_scheduling=false",
        "--set=engine.max_num_active_seqs=100",
    ];
    emit("vllm", top.path(), &more);
    let (code, out, err) = script(&top.path().join("engine.sh"), &["main"], &[("MODEL", "m")]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(value(&out, "--num-gpu-blocks-override"), Some("4000"));
    assert!(out.contains("\n--no-async-scheduling\n"), "{out}");
    let readme = std::fs::read_to_string(top.path().join("README.md")).unwrap();
    assert!(
        readme.contains("engine.max_num_active_seqs has no flag"),
        "{readme}"
    );
    assert!(!readme.contains("engine.timing"), "{readme}");
}

#[test]
fn the_router_starts_with_the_engines_that_are_named() {
    let top = tempfile::tempdir().unwrap();
    let plan = emit("vllm", top.path(), AGGREGATED);
    let workers = plan["answers"][0]["answer"]["workers"].as_u64().unwrap();
    let router = top.path().join("router.sh");
    let (code, _, err) = script(&router, &[], &[]);
    assert_eq!(code.map(|code| code > 0), Some(true));
    assert!(err.contains("ENGINES_MAIN"), "{err}");
    let urls: Vec<String> = (0..=workers)
        .map(|at| format!("http://127.0.0.1:{}", 1 + at))
        .collect();
    let variables = [
        ("ENGINES_MAIN", &*urls.join(",")),
        ("MODEL", "/models/a"),
        ("TOKENIZER", "/models/a"),
    ];
    let (code, out, err) = script(&router, &["--print-config"], &variables);
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("not "), "one too many: {err}");
    let mut args: Vec<&str> = out.lines().skip(1).collect();
    // The tokenizer is not there.
    let at = args
        .iter()
        .position(|arg| arg.starts_with("model.tokenizer="))
        .unwrap();
    args.drain(at - 1..=at);
    let config = top.path().join("router.toml");
    args[1] = config.to_str().unwrap();
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{args:?}: {err}");
    assert!(out.contains("policy = \"kv\""), "{out}");
    assert!(out.contains("\"http://127.0.0.1:1\""), "{out}");
}

#[test]
fn pools_hand_over_prompts_by_the_documented_connector() {
    let top = tempfile::tempdir().unwrap();
    emit("vllm", top.path(), DISAGGREGATED);
    let engine = top.path().join("engine.sh");
    for pool in ["prefill", "decode"] {
        let host = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1");
        let (code, out, err) = script(&engine, &[pool], &[("MODEL", "m"), host]);
        assert_eq!(code, Some(0), "{err}");
        let connector = value(&out, "--kv-transfer-config").unwrap();
        let connector: Value = serde_json::from_str(connector).unwrap();
        assert_eq!(connector["kv_connector"], "NixlConnector");
        let (code, _, err) = script(&engine, &[pool], &[("MODEL", "m")]);
        assert_eq!(code.map(|code| code > 0), Some(true));
        assert!(err.contains("VLLM_NIXL_SIDE_CHANNEL_HOST"), "{err}");
    }
}

/// What Helm and the router say of the files. Parts that take `helm` are skipped without it.
#[test]
fn the_chart_takes_the_values() {
    let chart = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../packaging/helm/slipstream"
    );
    let helm = std::env::var("HELM").unwrap_or_else(|_| "helm".into());
    let has_helm = Command::new(&helm).arg("version").output().is_ok();
    if !has_helm {
        eprintln!("skipped in part: helm is not installed (or set HELM)");
    }
    for serving in [AGGREGATED, DISAGGREGATED] {
        let top = tempfile::tempdir().unwrap();
        emit("helm", top.path(), serving);
        let values = top.path().join("values.yaml");
        let install = top.path().join("install.sh");
        let all = [
            ("CHART", chart),
            ("SLIPSTREAM_IMAGE", "r/slipstream"),
            ("VLLM_IMAGE", "vllm/vllm-openai:v0.33.0"),
            ("MODEL", "/models/m"),
        ];
        let (code, out, err) = script(&install, &[], &all);
        assert_eq!(code, Some(0), "{err}");
        assert!(out.contains("helm\nupgrade\n"), "{out}");
        for missing in 0..all.len() {
            let mut some = all.to_vec();
            let (name, _) = some.remove(missing);
            let (code, out, err) = script(&install, &[], &some);
            assert_eq!(code.map(|code| code > 0), Some(true), "{name}");
            assert!(err.contains(name) && out.is_empty(), "{err}{out}");
        }
        let odd = [all[0], all[1], all[2], ("MODEL", "m\" evil: true")];
        let (code, out, err) = script(&install, &[], &odd);
        assert_eq!(code, Some(2), "{out}");
        assert!(err.contains("MODEL has characters"), "{err}");
        if !has_helm {
            continue;
        }
        for command in ["lint", "template"] {
            let name: &[&str] = if command == "template" {
                &["slipstream", "--kube-version=1.30.0"]
            } else {
                &[]
            };
            let output = Command::new(&helm)
                .arg(command)
                .args(name)
                .arg(chart)
                .args(["--values", values.to_str().unwrap()])
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "helm {command}: {error}{text}");
            if command == "template" {
                let config = cluster_file(&text);
                let file = top.path().join("cluster.toml");
                std::fs::write(&file, &config).unwrap();
                let (code, _, err) = run(&["serve", file.to_str().unwrap(), "--print-config"]);
                assert_eq!(code, Some(0), "{err}{config}");
            }
        }
    }
}

/// The router's cluster file in the chart's output.
fn cluster_file(rendered: &str) -> String {
    let (_, after) = rendered
        .split_once("  cluster.toml: |\n")
        .expect("a cluster file");
    let lines = after
        .lines()
        .take_while(|line| line.is_empty() || line.starts_with("    "));
    lines
        .map(|line| line.get(4..).unwrap_or_default().to_owned() + "\n")
        .collect()
}

#[test]
fn a_folder_of_templates_is_a_target() {
    let top = tempfile::tempdir().unwrap();
    let [templates, out] = ["templates", "out"].map(|name| top.path().join(name));
    std::fs::create_dir(&templates).unwrap();
    let write = |text: &str| std::fs::write(templates.join("job.txt.jinja"), text).unwrap();
    write("{% for pool in pools %}\n{{ pool.name }} {{ pool.workers }} {{ gpu }}\n{% endfor %}\n");
    std::fs::write(templates.join("notes"), "not a template").unwrap();
    let target = templates.to_str().unwrap();
    let plan = emit(target, &out, AGGREGATED);
    let workers = &plan["answers"][0]["answer"]["workers"];
    let job = std::fs::read_to_string(out.join("job.txt")).unwrap();
    assert_eq!(job, format!("main {workers} l40s\n"));
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);

    // Found before the search; names that the context lacks, after it.
    let refused = |dir: &str, code: i32, says: &str| {
        let dir = top.path().join(dir);
        let emit = ["--emit", target, dir.to_str().unwrap()];
        let (status, out, err) = run(&[QUESTION, &emit, AGGREGATED].concat());
        assert_eq!(status, Some(code), "{err}");
        assert!(err.contains("job.txt.jinja") && err.contains(says), "{err}");
        assert_eq!(
            out.is_empty(),
            code == 2,
            "the answer is printed if there is one"
        );
        assert!(!dir.exists());
    };
    write("a\n{% for %}");
    refused("a", 2, "job.txt.jinja:2");
    write("a\n{{ nothing_like_it }}");
    refused("b", 1, "job.txt.jinja:2");
}

#[test]
fn files_that_are_there_stay() {
    let top = tempfile::tempdir().unwrap();
    let dir = top.path().join("full");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("engine.sh"), "mine").unwrap();
    let dir = dir.to_str().unwrap();
    let missing = top.path().join("no/folder");
    for (emit, says) in [
        (["vllm", dir], "is not empty"),
        (["vllm", missing.to_str().unwrap()], "there is no folder"),
        (["compose", "x"], "targets are vllm, helm"),
        ([dir, "x"], "no template"),
    ] {
        let emit = [&["--emit"][..], &emit].concat();
        let (code, out, err) = run(&[QUESTION, AGGREGATED, &emit].concat());
        assert_eq!(code, Some(2), "{err}");
        assert!(out.is_empty() && err.contains(says), "{err}");
    }
    assert_eq!(
        std::fs::read_to_string(format!("{dir}/engine.sh")).unwrap(),
        "mine"
    );
}
