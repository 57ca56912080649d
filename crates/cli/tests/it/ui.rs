//! `/ui` and its figures, on a running server.

use std::process::Command;

use serde_json::Value;

use crate::server::{FAST, Server, slipstream};

fn figures(server: &Server) -> Value {
    let answer = server.get("/ui.json");
    assert_eq!(answer.status, 200, "{}", answer.text());
    serde_json::from_str(&answer.text()).expect("the figures are JSON")
}

const PROMPT: &str = r#"{"model":"test-model","prompt":"one two three","max_tokens":5}"#;

#[test]
fn the_figures_follow_the_requests() {
    let server = Server::start(&[FAST]);
    let before = figures(&server);
    assert_eq!(before["workers"].as_array().unwrap().len(), 2);
    assert_eq!(before["workers"][1]["name"], "w1");
    assert_eq!(before["workers"][1]["ready"], true);
    assert_eq!(before["totals"]["requests"], 0.0);
    for _ in 0..3 {
        assert_eq!(server.post("/v1/completions", PROMPT).status, 200);
    }
    assert_eq!(server.post("/v1/completions", "{").status, 400);
    let after = figures(&server);
    assert_eq!(after["totals"]["requests"], 3.0, "{after}");
    assert_eq!(after["totals"]["generation_tokens"], 15.0);
    assert_eq!(after["errors"]["rejected: invalid"], 1.0, "{after}");
    let ttft = after["ttft"]["counts"].as_array().unwrap();
    assert_eq!(ttft.last().unwrap(), 3.0);
    assert_eq!(
        after["ttft"]["bounds"].as_array().unwrap().len(),
        ttft.len()
    );
    assert_eq!(server.post("/ui", "").status, 405);
}

/// Every browser asks for an icon, and nobody remembers the page's path.
#[test]
fn a_browser_finds_the_page_and_causes_no_error() {
    let engine = Server::start(&[FAST]);
    let mut command = slipstream();
    command
        .args(["serve", "--engine", &format!("http://{}", engine.address())])
        .env("SLIPSTREAM_API_KEYS", "secret-of-the-test");
    for server in [Server::start(&[FAST]), Server::spawn(command)] {
        for (path, to) in [("/", "ui"), ("/ui/", "../ui")] {
            let answer = server.get(path);
            assert_eq!(answer.status, 302, "{path}");
            assert_eq!(answer.header("location"), Some(to), "{path}");
        }
        assert_eq!(server.get("/favicon.ico").status, 204);
        assert_eq!(server.post("/favicon.ico", "").status, 405);
        let shown = figures(&server);
        assert_eq!(shown["totals"]["errors"], 1.0, "the POST alone: {shown}");
    }
}

/// As `/metrics`: no key, and nothing of a prompt.
#[test]
fn the_page_needs_no_key_and_names_no_source() {
    let mut command = slipstream();
    command
        .arg("serve")
        .args(FAST)
        .env("SLIPSTREAM_API_KEYS", "secret-of-the-test");
    let server = Server::spawn(command);
    assert_eq!(server.get("/v1/models").status, 401);
    let page = server.get("/ui");
    assert_eq!(page.status, 200);
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'"), "{policy}");
    let text = server.get("/ui.json").text();
    assert!(!text.contains("secret-of-the-test"), "{text}");
}

#[test]
fn a_router_shows_its_engines() {
    let engine = Server::start(&[FAST]);
    let url = format!("http://{}", engine.address());
    let mut command = slipstream();
    // Nothing listens at the second one.
    command.args(["serve", "--engine", &url, "--engine", "http://127.0.0.1:9"]);
    let router = Server::spawn(command);
    let begun = std::time::Instant::now();
    while figures(&router)["engines"][0]["ready"] != true {
        assert!(begun.elapsed().as_secs() < 30, "the engine is not found");
        std::thread::yield_now();
    }
    assert_eq!(router.post("/v1/completions", PROMPT).status, 200);
    let shown = figures(&router);
    assert_eq!(shown["engines"][0]["name"], url.as_str());
    assert_eq!(shown["engines"][0]["requests"], 1.0, "{shown}");
    assert_eq!(shown["engines"][1]["ready"], false);
    assert_eq!(shown["workers"], serde_json::json!([]));
    assert_eq!(
        shown["ttft"]["counts"].as_array().unwrap().last().unwrap(),
        1.0
    );
}

/// The same prompt twice: the router expects what it routed there before, without KV events.
#[test]
fn a_router_counts_the_hits_that_it_expects() {
    let engine = Server::start(&[FAST]);
    let mut command = slipstream();
    command.args(["serve", "--engine", &format!("http://{}", engine.address())]);
    let router = Server::spawn(command);
    let begun = std::time::Instant::now();
    while figures(&router)["engines"][0]["ready"] != true {
        assert!(begun.elapsed().as_secs() < 30, "the engine is not found");
        std::thread::yield_now();
    }
    let prompt = format!(
        r#"{{"model":"test-model","prompt":"{}","max_tokens":5}}"#,
        "one two three ".repeat(100)
    );
    let count = |field: &str| figures(&router)["totals"][field].as_f64().unwrap();
    assert_eq!(router.post("/v1/completions", &prompt).status, 200);
    let first = count("prompt_blocks");
    assert!(first > 10.0, "{first}");
    assert_eq!(count("hit_blocks"), 0.0);
    assert_eq!(router.post("/v1/completions", &prompt).status, 200);
    assert_eq!(count("prompt_blocks"), 2.0 * first);
    let hits = count("hit_blocks");
    assert!(hits > 0.9 * first && hits <= first, "{hits} of {first}");
    assert_eq!(figures(&router)["engines"][0]["hit_blocks"], hits);
    assert_eq!(
        router.metric("slipstream_engine_prefix_hit_blocks_total"),
        hits
    );
    // A request without a prompt has no blocks.
    assert_eq!(router.get("/v1/models").status, 200);
    assert_eq!(count("prompt_blocks"), 2.0 * first);
}

/// The page's script runs, polls and shows the fleet. Skipped without Chromium.
#[test]
fn the_page_works_in_a_browser() {
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let Some(browser) = browsers.into_iter().find(|name| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    }) else {
        eprintln!("skipped: no Chromium (Debian: apt-get install chromium)");
        return;
    };
    let server = Server::start(&[FAST]);
    assert_eq!(server.post("/v1/completions", PROMPT).status, 200);
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
        ])
        .arg(format!("--user-data-dir={}", dir.path().display()))
        // The page's own clock: two polls.
        .args(["--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("http://{}/ui", server.address()))
        .output()
        .unwrap();
    let [dom, log] =
        [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    if !output.status.success() || dom.is_empty() {
        eprintln!("skipped: the browser does not start here: {log}");
        return;
    }
    assert!(!log.contains("CONSOLE"), "{log}");
    assert_eq!(dom.matches("<li class=\"up\">").count(), 2, "{dom}");
    assert!(dom.contains("test-model, 2 of 2 workers ready"), "{dom}");
    assert_eq!(dom.matches("<figure>").count(), 6, "{dom}");
}
