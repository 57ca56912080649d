//! Numbers of workers that `slipstream serve` publishes: metrics, a file, a webhook on loopback.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};

use serde_json::Value;

use crate::engines::{EVENTS, Engine, PATIENCE, STREAM, answer, chunk, front, say, text_event};
use crate::planes::{begin, completion};
use crate::server::{FROZEN, Server, run};

/// Decisions that a test waits for at most, ten per second.
const DECISIONS_MAX: usize = 600;

/// A request to the receiver: its head, and its body.
struct Post {
    head: String,
    body: Value,
}

fn read_post(stream: &TcpStream) -> Option<Post> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        head.push_str(&lower);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Post {
        head,
        body: serde_json::from_slice(&body).expect("JSON"),
    })
}

/// A receiver that answers each POST with the next of `statuses`, and the rest with the last one.
fn receiver(statuses: &'static [&'static str]) -> (SocketAddr, Receiver<Post>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, posts) = mpsc::channel();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let Some(post) = read_post(&stream) else {
                continue;
            };
            let status = statuses[number.min(statuses.len() - 1)];
            answer(&mut stream, status, "", b"{}");
            if sender.send(post).is_err() {
                return; // the test is over
            }
        }
    });
    (address, posts)
}

/// Two workers, of which requests that never end keep one busy: 16 of 8 slots need 4 workers at half of their capacity.
#[test]
fn the_numbers_are_metrics_a_file_and_posts() {
    let folder = tempfile::tempdir().unwrap();
    let (file, token) = (
        folder.path().join("desired.json"),
        folder.path().join("token"),
    );
    std::fs::write(&token, "secret\n").unwrap();
    let (address, posts) = receiver(&["500 Internal Server Error", "204 No Content"]);
    let flags = [
        "--set=pool.main.workers=6".to_owned(),
        "--set=engine.max_num_seqs=8".into(),
        "--set=autoscale.policy=utilization".into(),
        "--set=autoscale.target=0.5".into(),
        "--set=autoscale.interval_s=0.1".into(),
        "--set=autoscale.cooldown_s=0".into(),
        format!("--set=live.autoscale.file={:?}", file.display().to_string()),
        format!("--set=live.autoscale.webhook=http://{address}/scale"),
        format!(
            "--set=live.autoscale.webhook_token_file={:?}",
            token.display().to_string()
        ),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Server::start(&[FROZEN, &flags]);
    let post = || posts.recv_timeout(PATIENCE).expect("a decision");
    let first = post();
    assert!(
        first.head.starts_with("post /scale http/1.1\r\n"),
        "{}",
        first.head
    );
    assert!(
        first.head.contains("authorization: bearer secret\r\n"),
        "{}",
        first.head
    );
    assert_eq!(first.body["schema"], 1);
    let pool_of = |document: &Value| document["pools"][0].clone();
    let pool = |post: &Post| pool_of(&post.body);
    assert_eq!(pool(&first)["pool"], "main");
    // The first was refused: a further try, or a newer number. Idle, one worker is enough, although six run.
    let await_desired = |wanted: u64| {
        let decisions = std::iter::repeat_with(|| pool(&post())).take(DECISIONS_MAX);
        let mut reached = decisions.filter(|of| of["desired"] == wanted);
        reached.next().expect("the number is wanted")
    };
    let last = await_desired(1);
    assert_eq!(
        (&last["ready"], &last["policy"]),
        (&6.into(), &"utilization".into())
    );
    server.await_metric("slipstream_autoscale_desired_workers{pool=\"main\"}", |n| {
        n == 1.0
    });

    let open: Vec<_> = (0..16)
        .map(|n| begin(&server, &completion(&format!("number {n}"), 3, true)))
        .collect();
    let last = await_desired(4);
    let load = last["waiting"].as_u64().unwrap() + last["running"].as_u64().unwrap();
    assert_eq!(load, 16, "{last}");
    server.await_metric("slipstream_autoscale_desired_workers{pool=\"main\"}", |n| {
        n == 4.0
    });
    // Written by a thread of its own, and whole whenever it is read.
    let written = || -> Value {
        let text = std::fs::read_to_string(&file).expect("it was written before");
        serde_json::from_str(&text).expect("whole JSON")
    };
    server.await_metric(
        "slipstream_autoscale_outputs_total{output=\"file\",outcome=\"delivered\"}",
        |n| n >= 1.0,
    );
    let mut reads = std::iter::repeat_with(|| {
        std::thread::yield_now();
        pool_of(&written())
    });
    let start = std::time::Instant::now();
    let is_late = || start.elapsed() > PATIENCE;
    assert!(reads.any(|of| of["desired"] == 4 || is_late()) && !is_late());
    let of = |outcome: &str| {
        server.metric(&format!(
            "slipstream_autoscale_outputs_total{{output=\"webhook\",outcome=\"{outcome}\"}}"
        ))
    };
    assert!(of("delivered") >= 1.0);
    let unhappy = of("failed") + server.metric("slipstream_autoscale_webhook_retries_total");
    assert!(unhappy >= 1.0, "the first was answered with 500");
    drop(open);
}

/// A receiver that takes a connection and never answers holds nothing up but itself.
#[test]
fn a_receiver_that_hangs_delays_neither_decisions_nor_requests() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let webhook = format!(
        "--set=live.autoscale.webhook=http://{}",
        silent.local_addr().unwrap()
    );
    let server = Server::start(&[
        crate::server::FAST,
        &[
            "--set=autoscale.policy=queue",
            "--set=autoscale.interval_s=0.1",
            "--set=live.autoscale.webhook_timeout_s=60",
            &webhook,
        ],
    ]);
    let held = silent.accept().expect("the first number");
    server.await_metric("slipstream_autoscale_decisions_total{pool=\"main\"}", |n| {
        n >= 3.0
    });
    server.assert_alive();
    let delivered = "slipstream_autoscale_outputs_total{output=\"webhook\",outcome=\"delivered\"}";
    assert_eq!(server.metric(delivered), 0.0);
    drop(held);
    assert!(
        server.terminate().success(),
        "it ends although a POST is under way"
    );
}

#[test]
fn settings_that_cannot_be_followed_are_refused_at_the_start() {
    for (flags, parts) in [
        (
            &["--set=autoscale.policy=slo"][..],
            &["pool `main`", "`autoscale.ttft_s = 1`"][..],
        ),
        (
            &[
                "--engine=http://127.0.0.1:9",
                "--set=autoscale.policy=queue",
                "--set=autoscale.workers_max=8",
                "--set=upstream.engines_max=3",
            ],
            &["`upstream.engines_max` is 3", "8 engines"],
        ),
        (
            &["--set=autoscale.policy=custom"],
            &["pool `main`", "Python"],
        ),
        (
            &["--set=live.autoscale.file=/tmp/desired.json"],
            &["`[live.autoscale]`", "no pool has `autoscale.policy`"],
        ),
        (
            &[
                "--set=autoscale.policy=queue",
                "--set=live.autoscale.file=/no/such/folder/desired.json",
            ],
            &["`live.autoscale.file`", "/no/such/folder/desired.json"],
        ),
        (
            &[
                "--set=autoscale.policy=queue",
                "--set=live.autoscale.webhook=http://127.0.0.1:9",
                "--set=live.autoscale.webhook_token_file=/no/token",
            ],
            &["/no/token", "webhook_token_file"],
        ),
    ] {
        let (code, _, err) = run(&[&["serve", "--listen=127.0.0.1:0"], flags].concat());
        assert_eq!(code, Some(2), "{flags:?}: {err}");
        for part in parts {
            assert!(err.contains(part), "{flags:?}: {err}");
        }
    }
}

/// Flags of a deployment that publishes ten times per second, to `receiver`.
fn publishing(receiver: SocketAddr) -> Vec<String> {
    vec![
        "--set=autoscale.policy=utilization".into(),
        "--set=autoscale.target=0.5".into(),
        "--set=autoscale.interval_s=0.1".into(),
        "--set=autoscale.cooldown_s=0".into(),
        format!("--set=live.autoscale.webhook=http://{receiver}"),
    ]
}

/// Waits for a document in which `pool` satisfies `reached`.
fn await_pool(posts: &Receiver<Post>, pool: &str, reached: impl Fn(&Value) -> bool) {
    let mut last = Value::Null;
    for _ in 0..DECISIONS_MAX {
        let post = posts.recv_timeout(PATIENCE).expect("a decision");
        let pools = post.body["pools"].as_array().unwrap();
        let own = pools.iter().find(|of| of["pool"] == pool);
        if own.is_some_and(&reached) {
            return;
        }
        last = post.body;
    }
    panic!("pool {pool} does not get there: {last}");
}

/// Engines behind HTTP: the number may be above that of those which are there.
#[test]
fn the_load_of_real_engines_is_that_of_their_requests() {
    let hold = |_: &crate::engines::Seen, stream: &mut TcpStream| {
        say(stream, EVENTS);
        chunk(stream, &text_event("a", "one"));
        let _ = stream.read(&mut [0]); // until its client leaves
    };
    let engines = [Engine::start(hold), Engine::start(hold)];
    let (address, posts) = receiver(&["204 No Content"]);
    let mut flags = publishing(address);
    flags.push("--set=autoscale.workers_max=8".into());
    flags.push("--set=engine.max_num_seqs=2".into());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = front(&[&engines[0], &engines[1]], &flags);
    await_pool(&posts, "engines", |of| {
        of["ready"] == 2 && of["desired"] == 1
    });
    // 2 at a time per engine, of which half are wanted: 5 requests need 5 engines.
    let open: Vec<_> = (0..5)
        .map(|_| {
            let mut client = begin(&server, STREAM);
            assert_eq!(client.head().status, 200);
            client
        })
        .collect();
    await_pool(&posts, "engines", |of| {
        let load = of["waiting"].as_u64().unwrap() + of["running"].as_u64().unwrap();
        load == 5 && of["running"] == 4 && of["desired"] == 5
    });
    drop(open);
    await_pool(&posts, "engines", |of| {
        of["running"] == 0 && of["desired"] == 1
    });
}

/// Prompts that a prefill worker computes are its load, and not that of the decode workers.
#[test]
fn each_pool_has_the_load_of_its_own_workers() {
    let (address, posts) = receiver(&["204 No Content"]);
    let flags = publishing(address);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let pools = [
        "--speedup=1",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=3600000000000",
        "--set=engine.num_gpu_blocks=1024",
        "--set=engine.max_model_len=4096",
        "--set=engine.max_num_seqs=2",
        "--set=pool.p.role=prefill",
        "--set=pool.p.workers=4",
        "--set=pool.d.role=decode",
        "--set=pool.d.workers=3",
    ];
    let server = Server::start(&[&pools, &flags]);
    let open: Vec<_> = (0..3)
        .map(|n| begin(&server, &completion(&format!("number {n}"), 3, true)))
        .collect();
    await_pool(&posts, "p", |of| {
        let load = of["waiting"].as_u64().unwrap() + of["running"].as_u64().unwrap();
        load == 3 && of["desired"] == 3 && of["ready"] == 4
    });
    await_pool(&posts, "d", |of| {
        of["running"] == 0 && of["desired"] == 1 && of["ready"] == 3
    });
    drop(open);
}
