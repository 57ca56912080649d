//! NATS: a real server, from PATH or from the Python tests' environment.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

use slipstream_config::cluster::{EventBus, EventsConfig};
use slipstream_events::nats::NatsSubscriber;
use slipstream_events::{FpmMessage, KvEventBatch};
use slipstream_planes::EventSink;

use super::{config, in_time, pass, runtime, start, stores, wait_until};

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server's program, if there is one.
fn program() -> Option<PathBuf> {
    let venv = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../.venv/bin/nats-server"
    );
    let candidates = [PathBuf::from("nats-server"), PathBuf::from(venv)];
    let found = candidates.into_iter().find(|program| {
        let version = Command::new(program).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        eprintln!(
            "skipped: no nats-server in PATH or .venv/bin; scripts/pytest.sh installs one there"
        );
    }
    found
}

fn serve(program: &PathBuf, port: u16) -> Server {
    let child = Command::new(program)
        .args(["--addr", "127.0.0.1", "--port", &port.to_string()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server(child);
    wait_until("a NATS server that listens", || {
        std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    server
}

/// A port that is free now: the server must come back at the same one.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn events_arrive_under_their_subjects() {
    let Some(program) = program() else { return };
    let port = free_port();
    let _server = serve(&program, port);
    let config = EventsConfig {
        nats_url: format!("nats://127.0.0.1:{port}"),
        subject_prefix: "test.one".into(),
        ..config(EventBus::Nats)
    };
    runtime().block_on(async {
        let mut fpm = NatsSubscriber::connect(&config.nats_url, "test.one.fpm.*.*")
            .await
            .unwrap();
        let mut kv = NatsSubscriber::connect(&config.nats_url, "test.one.kv.w1.0")
            .await
            .unwrap();
        for fresh in [false, true] {
            let (plane, mut publisher) = start(&config, fresh);
            for counter in 0..1000 {
                publisher.on_fpm(&pass(0, counter));
                publisher.on_kv(&stores(1, counter, 1));
                publisher.flush();
            }
            for counter in 0..1000 {
                let event = in_time("a pass", fpm.recv()).await.unwrap();
                assert_eq!(event.topic, "test.one.fpm.w0.0");
                assert_eq!(
                    FpmMessage::decode(&event.payload).unwrap().counter_id,
                    counter
                );
                let event = in_time("a KV batch", kv.recv()).await.unwrap();
                assert_eq!(event.sequence, Some(counter));
                assert_eq!(
                    KvEventBatch::decode(&event.payload).unwrap().events.len(),
                    1
                );
            }
            assert_eq!(plane.counts().bus().refused.load(Ordering::Relaxed), 0);
        }
    });
}

#[test]
fn a_server_that_goes_away_and_returns_costs_counted_drops_and_no_memory() {
    let Some(program) = program() else { return };
    let port = free_port();
    let server = serve(&program, port);
    let config = EventsConfig {
        nats_url: format!("nats://127.0.0.1:{port}"),
        queue_bytes_max: 128 << 10,
        ..config(EventBus::Nats)
    };
    let (plane, mut publisher) = start(&config, false);
    let counts = plane.counts();
    let connected = || counts.bus().subscribers.load(Ordering::Relaxed) == 1;
    wait_until("connected", connected);
    drop(server);
    wait_until("disconnected", || !connected());
    // Without a reader, the client's own queue fills, then ours, which drops and counts.
    let mut counter = 0;
    wait_until("events dropped", || {
        for _ in 0..100 {
            publisher.on_fpm(&pass(0, counter));
            counter += 1;
        }
        publisher.flush();
        counts.queues()[0].1 > 5000
    });
    let [(queued, dropped), _] = counts.queues();
    let sent = counts.bus().fpm_sent.load(Ordering::Relaxed);
    let held = queued - dropped - sent;
    // 128 KiB of events of some 450 bytes, the client's 1,024, and the batch in hand.
    assert!(
        held < 128 * 1024 / 400 + 1024 + 200,
        "{held} events are held"
    );

    let _server = serve(&program, port);
    runtime().block_on(async {
        let mut subscriber = NatsSubscriber::connect(&config.nats_url, "slipstream.fpm.>")
            .await
            .unwrap();
        wait_until("connected again", connected);
        let first_new = counter;
        let mut previous = None;
        while previous < Some(first_new) {
            publisher.on_fpm(&pass(0, counter));
            publisher.flush();
            counter += 1;
            let event = in_time("events again", subscriber.recv()).await.unwrap();
            let fpm = FpmMessage::decode(&event.payload).unwrap();
            assert!(previous.is_none_or(|p| p < fpm.counter_id), "in order");
            previous = Some(fpm.counter_id);
        }
    });
    assert!(counts.bus().disconnects.load(Ordering::Relaxed) >= 1);
}

#[test]
fn a_server_that_never_comes_keeps_nobody_from_starting_and_stopping() {
    let config = EventsConfig {
        nats_url: format!("nats://127.0.0.1:{}", free_port()),
        ..config(EventBus::Nats)
    };
    let (plane, mut publisher) = start(&config, false);
    for counter in 0..10_000 {
        publisher.on_fpm(&pass(0, counter));
        publisher.flush();
    }
    let counts = plane.counts();
    drop(plane);
    // Every event is accounted for: dropped, given up, or passed to a client that is now closed.
    let [(queued, dropped), _] = counts.queues();
    let bus = counts.bus();
    let sent = bus.fpm_sent.load(Ordering::Relaxed);
    let refused = bus.refused.load(Ordering::Relaxed);
    assert_eq!(queued, 10_000);
    assert!(dropped + refused + sent <= queued && refused > 0);
}
