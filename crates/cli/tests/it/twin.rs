//! `slipstream simulate`, and that it agrees with the live cluster.

use serde_json::Value;

use crate::server::{Server, run};

/// Two workers with little memory, so that what was cached is evicted too.
const SMALL: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=1000000",
    "--set=engine.num_gpu_blocks=220",
    "--set=engine.max_model_len=3000",
    "--set=router.policy=round_robin",
];

const WORKLOAD: &str = r#"
seed = 5
requests = 120
[arrival]
kind = "closed"
concurrency = 1
[[class]]
isl = { kind = "uniform", min = 350, max = 700 }
osl = { kind = "uniform", min = 1, max = 90 }
[[class.prefix]]
tokens = 330
branches = 3
[class.session]
turns = 4
user_tokens = 50
"#;

/// Same workload, same cluster: the same hits, block for block, though one side sends words over
/// HTTP and the other knows texts by number.
#[test]
fn the_twin_hits_what_the_live_cluster_hits() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, WORKLOAD).unwrap();
    let file = file.to_str().unwrap();

    let server = Server::start(&[SMALL, &["--speedup=0"]]);
    let url = format!("http://{}", server.address());
    let live = run(&["bench", &url, "--workload", file, "--json", "--quiet"]);
    assert_eq!(live.0, Some(0), "{live:?}");
    let mut args = vec!["simulate", "--workload", file, "--json", "--quiet"];
    args.extend(SMALL);
    let twin = run(&args);
    assert_eq!(twin.0, Some(0), "{twin:?}");

    let live: Value = serde_json::from_str(&live.1).unwrap();
    let twin: Value = serde_json::from_str(&twin.1).unwrap();
    let count = |run: &Value, key: &str| run["tokens"][key].as_u64().unwrap();
    for key in ["input", "output", "cached"] {
        assert_eq!(count(&live, key), count(&twin, key), "{key}");
    }
    assert_eq!(live["requests"]["succeeded"], 120);
    let cached = count(&twin, "cached");
    assert!(
        cached > 0 && cached < count(&twin, "input") * 3 / 4,
        "some are hit and some are evicted: {cached}"
    );
}

#[test]
fn a_run_is_repeated_by_its_seed() {
    let digest = |seed: &str| {
        let mut args = vec!["simulate", "--rate=50", "--requests=200", "--quiet", seed];
        args.extend(SMALL);
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        out.split("digest ").nth(1).unwrap().to_owned()
    };
    assert_eq!(digest("--seed=1"), digest("--seed=1"));
    assert_ne!(digest("--seed=1"), digest("--seed=2"));
}

#[test]
fn what_cannot_be_served_says_so() {
    let (code, out, err) = run(&[
        "simulate",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=1000000000",
        "--rate=1000",
        "--requests=3000",
        "--max-sim-time=2s",
        "--quiet",
    ]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("reached its limit of 2"), "{err}");
    assert!(out.contains("requests answered"), "{out}");
    let (code, _, err) = run(&["simulate", "--trace=/no/such/trace"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("/no/such/trace"), "{err}");
}
