//! Shares of requests: pools with weights, pools that get copies, and pools whose engines a name lists.

use std::net::TcpListener;
use std::sync::{Mutex, mpsc};

use crate::engines::{Engine, PATIENCE, STREAM, answer, say_text, stream_texts, text_of};
use crate::server::Server;

/// Answers with its name.
fn named(name: &'static str) -> Engine {
    Engine::start(move |request, stream| {
        if request
            .body
            .windows(13)
            .any(|part| part == b"\"stream\":true")
        {
            stream_texts(stream, "a", &[name]);
        } else {
            say_text(stream, name);
        }
    })
}

fn pool(name: &str, engines: &[&Engine], more: &str) -> Vec<String> {
    let urls: Vec<String> = engines
        .iter()
        .map(|engine| format!("\"http://{}\"", engine.address))
        .collect();
    let mut flags = vec![format!("--set=pool.{name}.engines=[{}]", urls.join(","))];
    if !more.is_empty() {
        flags.push(format!("--set=pool.{name}.{more}"));
    }
    flags
}

fn front(pools: &[Vec<String>], more: &[&str]) -> Server {
    let flags: Vec<&str> = pools.iter().flatten().map(String::as_str).collect();
    Server::start(&[&flags, more, &["--set=live.shards=1"]])
}

const BODY: &str = r#"{"model":"m", "prompt":"caf\u00e9","max_tokens":2}"#;

#[test]
fn pools_get_requests_in_proportion_to_their_weights() {
    const REQUESTS: usize = 200;
    let engines = [named("a"), named("b"), named("c")];
    let pools = [
        pool("a", &[&engines[0]], "weight=3"),
        pool("b", &[&engines[1]], ""),
        pool("c", &[&engines[2]], "weight=0"),
    ];
    let server = front(&pools, &[]);
    for _ in 0..REQUESTS {
        assert_eq!(server.post("/v1/completions", BODY).status, 200);
    }
    let counts = engines.each_ref().map(|engine| engine.seen().len());
    assert_eq!(counts[0] + counts[1], REQUESTS, "{counts:?}");
    // Six standard deviations of a binomial of 200 draws at 1/4.
    assert!((14..=86).contains(&counts[1]), "{counts:?}");
    // A session stays in its pool.
    let header = ["X-Session-Id: s-7"];
    let mut answers: Vec<String> = (0..20)
        .map(|_| {
            let mut client = server.connect();
            client
                .send("POST", "/v1/completions", &header, BODY.as_bytes())
                .said()
        })
        .collect();
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
}

#[test]
fn a_pool_that_fails_costs_no_answer() {
    let bad = Engine::start(|_, _| {});
    let good = named("good");
    let pools = [
        pool("a", &[&bad], "weight=1000"),
        pool("b", &[&good], "weight=1"),
    ];
    let server = front(
        &pools,
        &[
            "--set=upstream.failures_max=1000",
            "--set=upstream.retry_budget=1",
        ],
    );
    for _ in 0..6 {
        let got = server.post("/v1/completions", BODY);
        assert_eq!((got.status, got.said()), (200, "good".into()));
    }
    assert!(!bad.seen().is_empty(), "it is asked first");
    assert!(server.metric("slipstream_pool_fallbacks_total") >= 1.0);
    // Without an engine that is up, the pool has no weight.
    drop(bad);
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", BODY).said(), "good");
    }
}

#[test]
fn weights_of_a_changed_file_hold_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fleet.toml");
    let (a, b) = (named("a"), named("b"));
    let write = |weights: [u32; 2]| {
        let pool = |name: &str, engine: &Engine, weight: u32| {
            let url = format!("http://{}", engine.address);
            format!("[pool.{name}]\nengines = [\"{url}\"]\nweight = {weight}\n")
        };
        let text = pool("a", &a, weights[0]) + &pool("b", &b, weights[1]);
        std::fs::write(&path, text).unwrap();
    };
    write([1, 0]);
    let server = Server::start(&[&[path.to_str().unwrap()]]);
    for _ in 0..10 {
        assert_eq!(server.post("/v1/completions", BODY).said(), "a");
    }
    write([0, 1]);
    server.signal("-HUP");
    let begun = std::time::Instant::now();
    while server.post("/v1/completions", BODY).said() == "a" {
        assert!(begun.elapsed() < PATIENCE, "the file is not applied");
    }
    for _ in 0..10 {
        assert_eq!(server.post("/v1/completions", BODY).said(), "b");
    }
}

#[test]
fn a_mirror_gets_copies_and_answers_no_client() {
    let serving = named("serving");
    let mirror = named("mirror");
    let broken = Engine::serving(
        "m",
        TcpListener::bind("127.0.0.1:0").unwrap(),
        |_, stream| {
            answer(stream, "500 Broken", "", b"{}");
        },
    );
    let other = Engine::serving(
        "other",
        TcpListener::bind("127.0.0.1:0").unwrap(),
        |_, _| {},
    );
    let pools = [
        pool("a", &[&serving], ""),
        pool("m", &[&mirror], "mirror=1.0"),
        pool("n", &[&broken], "mirror=1.0"),
        pool("o", &[&other], "mirror=1.0"),
    ];
    let server = front(&pools, &[]);
    server.await_metric("slipstream_engine_up", |up| up == 4.0);
    for body in [BODY, STREAM, BODY] {
        let got = server.connect().send(
            "POST",
            "/v1/completions?a=b",
            &["X-Custom: 1", "Authorization: Bearer theirs"],
            body.as_bytes(),
        );
        assert_eq!(got.status, 200);
        if body == STREAM {
            assert_eq!(text_of(&got.events()), "serving");
        } else {
            assert_eq!(got.said(), "serving");
        }
    }
    let count = |engine: &Engine, outcome: &str| {
        let url = format!("http://{}", engine.address);
        format!("slipstream_engine_mirrored_total{{engine=\"{url}\",outcome=\"{outcome}\"}}")
    };
    server.await_metric(&count(&mirror, "answered"), |count| count == 3.0);
    server.await_metric(&count(&broken, "error_status"), |count| count == 3.0);
    // Copies do not wait for each other.
    let mut copies = mirror.seen();
    copies.sort_by_key(|copy| copy.body.len());
    for (copy, sent) in copies.iter().zip([BODY, BODY, STREAM]) {
        assert_eq!(copy.line, "POST /v1/completions?a=b HTTP/1.1");
        assert_eq!(copy.body, sent.as_bytes(), "byte for byte");
        assert_eq!(copy.header("x-custom"), Some("1"));
        assert_eq!(copy.header("authorization"), Some("Bearer theirs"));
    }
    // It does not serve this model.
    assert!(other.seen().is_empty());
    let no_engine = "slipstream_mirror_dropped_total{reason=\"no_engine\"}";
    assert_eq!(server.metric(no_engine), 3.0);
    assert!(!server.get("/v1/models").text().contains("other"));
    // Questions are not copied, nor is what has effects besides its answer, and a client cannot name a mirror.
    assert_eq!(server.get("/v1/other").status, 200);
    for (method, path) in [
        ("POST", "/tokenize"),
        ("POST", "/v1/files"),
        ("POST", "/v1/files?purpose=batch"),
        ("POST", "/v1/%66iles"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/b-1/cancel"),
        ("POST", "/v1/fine_tuning/jobs"),
        ("POST", "/v1/vector_stores"),
        ("POST", "/v1/some/later/path"),
        ("PUT", "/v1/completions"),
        ("DELETE", "/v1/files/f-1"),
    ] {
        let got = server.connect().send(method, path, &[], BODY.as_bytes());
        assert_eq!(got.status, 200, "{method} {path}");
    }
    assert_eq!(server.post("/v1/embeddings", BODY).status, 200);
    server.await_metric(&count(&mirror, "answered"), |count| count == 4.0);
    let copied = mirror.seen().into_iter().filter(|of| {
        let line = &of.line;
        !line.starts_with("POST /v1/completions?") && !line.starts_with("POST /v1/embeddings ")
    });
    let copied: Vec<String> = copied.map(|of| of.line).collect();
    assert!(copied.is_empty(), "{copied:?}");
    let named = ["X-Slipstream-Worker: w1"];
    let got = server
        .connect()
        .send("POST", "/v1/completions", &named, BODY.as_bytes());
    assert_eq!(got.status, 503, "{}", got.text());
    drop(serving);
    server.await_metric("slipstream_engine_up", |up| up == 3.0);
    assert_eq!(server.post("/v1/completions", BODY).status, 503);
    assert_eq!(
        server.get("/health").status,
        503,
        "no engine answers clients"
    );
}

/// A server in front of an engine, and of a mirror that never answers while `hold` exists.
struct Mirrored {
    /// Before the engines, which end once it is dropped.
    hold: mpsc::Sender<()>,
    server: Server,
    _serving: Engine,
    silent: Engine,
}

impl Mirrored {
    fn start(more: &[&str]) -> Mirrored {
        let serving = named("serving");
        let (hold, held) = mpsc::channel();
        let held = Mutex::new(held);
        let silent = Engine::start(move |_, _| {
            let _ = held.lock().unwrap().recv();
        });
        let pools = [
            pool("a", &[&serving], ""),
            pool("m", &[&silent], "mirror=1.0"),
        ];
        let server = front(&pools, more);
        server.await_metric("slipstream_engine_up", |up| up == 2.0);
        Mirrored {
            hold,
            server,
            _serving: serving,
            silent,
        }
    }
}

#[test]
fn a_mirror_that_never_answers_delays_no_client() {
    let fleet = Mirrored::start(&[]);
    for _ in 0..5 {
        assert_eq!(fleet.server.post("/v1/completions", BODY).said(), "serving");
    }
    let url = format!("http://{}", fleet.silent.address);
    fleet.server.await_metric(
        &format!("slipstream_engine_in_flight{{engine=\"{url}\"}}"),
        |of| of == 5.0,
    );
    assert!(
        fleet.server.terminate().success(),
        "copies do not hold an exit up"
    );
    drop(fleet.hold);
}

/// Copies are charged to no client, and are dropped before they hold an eighth of the memory.
#[test]
fn a_mirror_that_never_answers_takes_no_clients_memory() {
    let fleet = Mirrored::start(&["--set=live.memory_max=33554432"]);
    let body = format!(
        "{{\"model\":\"m\",\"prompt\":\"{}\"}}",
        "a ".repeat(500_000)
    );
    for _ in 0..40 {
        assert_eq!(
            fleet.server.post("/v1/completions", &body).said(),
            "serving"
        );
    }
    let dropped = "slipstream_mirror_dropped_total{reason=\"memory\"}";
    assert_eq!(fleet.server.metric(dropped), 36.0, "4 of 1 MB are held");
    drop(fleet.hold);
    assert!(fleet.server.terminate().success());
}

#[test]
fn engines_of_a_name_are_found_at_the_start() {
    let engine = named("here");
    let name = format!(
        "--set=pool.a.dns=[\"http://localhost:{}\"]",
        engine.address.port()
    );
    // A label has 63 characters at most, so no name server is asked.
    let none = format!("--set=pool.b.dns=[\"http://{}:1\"]", "x".repeat(64));
    let server = Server::start(&[&[&name, &none, "--set=upstream.dns_interval_s=0.05"]]);
    let url = format!("http://{}", engine.address);
    server.await_metric(&format!("slipstream_engine_up{{engine=\"{url}\"}}"), |up| {
        up == 1.0
    });
    assert_eq!(server.post("/v1/completions", BODY).said(), "here");
    let engines = server.get("/health").json()["engines"].clone();
    let found = engines
        .as_array()
        .unwrap()
        .iter()
        .find(|of| of["url"] == *url);
    assert_eq!(found.unwrap()["pool"], "a");
    assert!(server.terminate().success());
}
