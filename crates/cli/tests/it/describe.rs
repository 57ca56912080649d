//! Descriptions of running servers.

use serde_json::{Value, json};

use crate::server::{FAST, Server, run, slipstream};

#[test]
fn a_running_server_is_described_and_simulated() {
    let server = Server::start(&[FAST]);
    let url = format!("http://{}", server.address());
    let (code, text, err) = run(&["describe", &url]);
    assert_eq!(code, Some(0), "{err}");
    let file: toml::Table = toml::from_str(&text).unwrap();
    assert_eq!(file["model"]["name"].as_str(), Some("test-model"));
    let engine = &file["pool"]["main"]["engine"];
    assert_eq!(engine["num_gpu_blocks"].as_integer(), Some(1024));
    assert_eq!(engine["max_model_len"].as_integer(), Some(4096));
    assert!(
        text.contains("# gpu: engines do not report theirs"),
        "{text}"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.toml");
    std::fs::write(&path, &text).unwrap();
    let load = ["--requests=10", "--isl=100", "--osl=5", "--json", "--quiet"];
    let (code, out, err) = run(&[&["simulate", path.to_str().unwrap()], &load[..]].concat());
    assert_eq!(code, Some(0), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&report["model"], &report["requests"]["succeeded"]),
        (&json!("test-model"), &json!(10))
    );
    // `serve` takes it too.
    let mut command = slipstream();
    command.arg("serve").arg(&path).arg("--speedup=0");
    let again = Server::spawn(command);
    assert_eq!(
        again.get("/v1/models").json()["data"][0]["id"],
        "test-model"
    );

    let (code, out, _) = run(&["describe", "--json", &url]);
    let facts: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &facts[0]["kind"]), (Some(0), &json!("slipstream")));
}

#[test]
fn what_is_no_engine_is_an_error_with_what_was_asked() {
    let (code, out, err) = run(&["describe", "http://127.0.0.1:9", "--timeout=5s"]);
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(
        err.contains("http://127.0.0.1:9") && err.contains("running"),
        "{err}"
    );
    let (code, _, err) = run(&["describe", "gpu1:8000"]);
    assert!(code == Some(2) && err.contains("such as http://"), "{err}");
    let server = Server::start(&[FAST]);
    let url = format!("http://{}", server.address());
    let (code, _, err) = run(&["events", "cached", &url]);
    assert!(
        code == Some(2) && err.contains("--kv-events-config"),
        "{err}"
    );
}
