//! Numbers of workers that `slipstream serve` publishes: metrics, a file, a webhook on loopback.

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};

use serde_json::Value;

use crate::engines::{PATIENCE, answer};
use crate::planes::{begin, completion};
use crate::server::{FROZEN, Server, run};

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
    let pool = |post: &Post| post.body["pools"][0].clone();
    assert_eq!(pool(&first)["pool"], "main");
    // The first was refused: a further try, or a newer number. Idle, one worker is enough, although six run.
    let mut last = pool(&post());
    while last["desired"] != 1 {
        last = pool(&post());
    }
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
    while last["desired"] != 4 {
        last = pool(&post());
    }
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
    while written()["pools"][0]["desired"] != 4 {
        std::thread::yield_now();
    }
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
