//! Frontends and workers as separate processes: discovery, restarts, kills, stops, and misbehaving
//! peers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::server::{Client, FAST, FROZEN, Server, slipstream};

const PATIENCE: Duration = Duration::from_secs(30);

/// A peer times out after a second, and so does a lease.
const IMPATIENT: &[&str] = &["--peer-deadline=1", "--lease=1"];

/// A pass takes 20 ms.
const STEADY: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=20000000",
    "--set=engine.num_gpu_blocks=1024",
    "--set=engine.max_model_len=4096",
    "--set=live.shards=2",
];

/// Settings of frontends for [`FAST`] and [`FROZEN`]: all except the speed-up.
fn of_frontend<'a>(args: &'a [&'a str]) -> Vec<&'a str> {
    let speed = |arg: &&&str| !arg.starts_with("--speedup");
    args.iter().filter(speed).copied().collect()
}

pub(crate) fn frontend(dir: &Path, args: &[&[&str]]) -> Server {
    frontend_with(dir, args, &["--set=live.shards=2"])
}

fn frontend_with(dir: &Path, args: &[&[&str]], more: &[&str]) -> Server {
    Server::spawn(frontend_command(dir, args, more))
}

pub(crate) fn frontend_command(dir: &Path, args: &[&[&str]], more: &[&str]) -> Command {
    let mut command = slipstream();
    command
        .arg("frontend")
        .args(more)
        .args(of_frontend(&args.concat()))
        .arg("--discovery")
        .arg(dir);
    command
}

/// A worker process; killed when dropped.
pub(crate) struct Worker(Child);

impl Worker {
    pub(crate) fn start(dir: &Path, args: &[&[&str]]) -> Worker {
        let mut command = slipstream();
        command.arg("worker").args(args.concat());
        Worker::spawn(dir, command)
    }

    fn spawn(dir: &Path, mut command: Command) -> Worker {
        let mut child = command
            .arg("--discovery")
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped"))
            .read_line(&mut line)
            .expect("the worker says what it runs");
        assert!(line.starts_with("running w"), "{line}");
        Worker(child)
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.0.id().to_string();
        let status = std::process::Command::new("kill")
            .args([signal, &id])
            .status();
        assert!(status.expect("kill runs").success());
    }

    pub(crate) fn kill(mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }

    pub(crate) fn terminate(mut self) -> ExitStatus {
        self.signal("-TERM");
        self.0.wait().expect("it ends")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn await_ready(server: &Server, ranks: usize) {
    server.await_metric("slipstream_router_ready", |ready| ready == ranks as f64);
}

pub(crate) fn await_true(what: &str, reached: impl Fn() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

const LONG_PROMPT: &str = "one two three four five six seven eight nine ten one two three four \
     five six seven eight nine ten one two three four five six seven eight nine ten";

pub(crate) fn completion(prompt: &str, max_tokens: u32, stream: bool) -> String {
    format!(
        r#"{{"prompt":"{prompt}","max_tokens":{max_tokens},"ignore_eos":true,"stream":{stream},"seed":7}}"#
    )
}

/// Sends a request without waiting for its answer.
pub(crate) fn begin(server: &Server, body: &str) -> Client {
    begin_at(server, body, &[])
}

pub(crate) fn begin_at(server: &Server, body: &str, headers: &[&str]) -> Client {
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", headers, body.len());
    client.write(body.as_bytes());
    client
}

/// The rest of a stream.
pub(crate) fn rest(client: &mut Client) -> String {
    let mut rest = String::new();
    while let Some(chunk) = client.chunk() {
        rest += std::str::from_utf8(&chunk).unwrap();
    }
    rest
}

/// Whether `GET path` is answered with `part`.
fn answers(port: u16, path: &str, part: &str) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
        return false;
    };
    let mut answer = String::new();
    let request = format!("GET {path} HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n");
    let asked = stream.write_all(request.as_bytes());
    asked.is_ok() && stream.read_to_string(&mut answer).is_ok() && answer.contains(part)
}

/// A real etcd; killed when dropped. `None`, with a message: it is not installed.
struct EtcdServer {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl EtcdServer {
    fn start() -> Option<EtcdServer> {
        let free = || {
            TcpListener::bind("127.0.0.1:0")
                .unwrap()
                .local_addr()
                .unwrap()
                .port()
        };
        let (port, dir) = (free(), tempfile::tempdir().unwrap());
        let (client, peer) = (
            format!("http://127.0.0.1:{port}"),
            format!("http://127.0.0.1:{}", free()),
        );
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(dir.path().join("data"))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            eprintln!("skipped: no etcd (apt-get install etcd-server)");
            return None;
        };
        let server = EtcdServer {
            child,
            port,
            _dir: dir,
        };
        await_true("etcd answers", || answers(port, "/health", "\"true\""));
        Some(server)
    }

    fn place(&self) -> String {
        format!("etcd://127.0.0.1:{}/test", self.port)
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A real NATS; killed when dropped. `None`, with a message: it is not installed.
struct NatsServer {
    child: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl NatsServer {
    fn start() -> Option<NatsServer> {
        let free = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let (port, health, dir) = (free(), free(), tempfile::tempdir().unwrap());
        let child = Command::new("nats-server")
            .args(["--addr", "127.0.0.1", "--jetstream"])
            .args(["--port", &port.to_string()])
            .args(["--http_port", &health.to_string()])
            .arg("--store_dir")
            .arg(dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            eprintln!("skipped: no nats-server (apt-get install nats-server)");
            return None;
        };
        let server = NatsServer {
            child,
            port,
            _dir: dir,
        };
        // JetStream begins after the server.
        await_true("NATS answers", || answers(health, "/healthz", "\"ok\""));
        Some(server)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn check_found_at<S>(server: S, place: &str) {
    let place = Path::new(place);
    let lease: &[&str] = &["--lease=1"];
    let frontend = frontend(place, &[FAST, lease]);
    let first = Worker::start(place, &[FAST, lease, &["--pool=main", "--index=0"]]);
    let _second = Worker::start(place, &[FAST, lease, &["--pool=main", "--index=1"]]);
    await_ready(&frontend, 2);
    let body = completion(LONG_PROMPT, 5, false);
    assert_eq!(frontend.post("/v1/completions", &body).status, 200);
    // One that ends takes its record away; one that is started anew is found.
    assert!(first.terminate().success());
    await_ready(&frontend, 1);
    let _third = Worker::start(place, &[FAST, lease, &["--pool=main", "--index=0"]]);
    await_ready(&frontend, 2);
    // Requests need no server.
    drop(server);
    for _ in 0..4 {
        assert_eq!(frontend.post("/v1/completions", &body).status, 200);
    }
}

#[test]
fn processes_find_each_other_by_etcd() {
    if let Some(etcd) = EtcdServer::start() {
        let place = etcd.place();
        check_found_at(etcd, &place);
    }
}

#[test]
fn processes_find_each_other_by_nats() {
    if let Some(nats) = NatsServer::start() {
        let place = format!("nats://127.0.0.1:{}/test", nats.port);
        check_found_at(nats, &place);
    }
}

#[test]
fn an_etcd_that_is_not_there_is_a_clear_error() {
    let run = |place: &str| {
        let arg = format!("--discovery={place}");
        crate::server::run(&[
            "worker",
            "--pool=main",
            "--index=0",
            "--set=pool.main.workers=1",
            &arg,
        ])
    };
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let (code, _, errors) = run(&format!("etcd://127.0.0.1:{port}"));
    assert_ne!(code, Some(0), "{errors}");
    assert!(
        errors.contains("publishing failed") && errors.contains("--discovery"),
        "{errors}"
    );
    let (code, _, errors) = run("etcd://a:b");
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("HOST:PORT"), "{errors}");
}

#[test]
fn two_frontends_and_two_workers_find_each_other_and_route_by_cache() {
    let dir = tempfile::tempdir().unwrap();
    let one = frontend(dir.path(), &[FAST]);
    let first = Worker::start(dir.path(), &[FAST, &["--pool=main", "--index=0"]]);
    await_ready(&one, 1);
    let second = Worker::start(dir.path(), &[FAST, &["--pool=main", "--index=1"]]);
    let other = frontend(dir.path(), &[FAST]);
    await_ready(&one, 2);
    await_ready(&other, 2);
    let body = completion(LONG_PROMPT, 5, false);
    let answer = one.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.json()["choices"][0]["text"].clone();
    // The other frontend has the blocks by the same deltas, and sends the prompt there.
    other.await_metric("slipstream_router_cached_blocks", |blocks| blocks >= 1.0);
    for _ in 0..4 {
        let answer = other.post("/v1/completions", &body);
        let json = answer.json();
        assert_eq!(json["choices"][0]["text"], text, "same seed, same answer");
        let cached = &json["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64().unwrap() >= 16, "{json}");
    }
    assert_eq!(other.metric("slipstream_router_kv_gaps_total"), 0.0);
    // A frontend that joins later gets the cache state from snapshots.
    let late = frontend(dir.path(), &[FAST]);
    await_ready(&late, 2);
    late.await_metric("slipstream_router_cached_blocks", |blocks| blocks >= 1.0);
    assert!(first.terminate().success());
    await_ready(&one, 1);
    assert_eq!(one.post("/v1/completions", &body).status, 200);
    assert!(other.terminate().success());
    assert!(second.terminate().success());
    await_ready(&one, 0);
    assert_eq!(one.post("/v1/completions", &body).status, 503);
    drop((one, late));
}

#[test]
fn a_worker_that_is_killed_ends_what_had_begun_and_the_rest_goes_elsewhere_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[STEADY, &["--set=router.policy=direct"]]);
    let victim = Worker::start(dir.path(), &[STEADY, &["--pool=main", "--index=0"]]);
    await_ready(&server, 1);
    let to_victim: &[&str] = &["x-slipstream-worker: 0"];
    let body = completion(LONG_PROMPT, 4000, true);
    let mut begun = begin_at(&server, &body, to_victim);
    assert_eq!(begun.head().status, 200);
    assert!(begun.chunk().is_some(), "mid-stream");
    victim.kill();
    let text = rest(&mut begun);
    assert!(text.contains("\"error\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(server.metric("slipstream_streams_lost_total"), 1.0);
    await_ready(&server, 0);
    // Its slot is free again: another process takes it, and gets requests.
    let successor = Worker::start(dir.path(), &[STEADY, &["--pool=main", "--index=0"]]);
    await_ready(&server, 1);
    let answer = begin_at(&server, &completion("a", 3, false), to_victim).answer();
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(successor.terminate().success());
}

#[test]
fn a_stream_that_has_sent_nothing_is_finished_by_another_worker() {
    let dir = tempfile::tempdir().unwrap();
    let both: &[&str] = &[
        "--set=pool.main.workers=2",
        "--set=router.policy=round_robin",
    ];
    let server = frontend(dir.path(), &[FROZEN, both]);
    // Worker 0 never ends a pass; worker 1 joins later and does.
    let frozen = Worker::start(dir.path(), &[FROZEN, both, &["--pool=main", "--index=0"]]);
    await_ready(&server, 1);
    let mut waiting: Vec<Client> = (0..20)
        .map(|_| begin(&server, &completion(LONG_PROMPT, 5, false)))
        .collect();
    let mut stream = begin(&server, &completion(LONG_PROMPT, 5, true));
    assert_eq!(stream.head().status, 200);
    server.await_metric("slipstream_streams_open", |open| open == 21.0);
    let fast = of_frontend(FROZEN);
    let fast = Worker::start(
        dir.path(),
        &[&fast, both, &["--pool=main", "--index=1", "--speedup=0"]],
    );
    await_ready(&server, 2);
    frozen.kill();
    for client in &mut waiting {
        let answer = client.answer();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["usage"]["completion_tokens"], 5);
    }
    let text = rest(&mut stream);
    assert!(!text.contains("error"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(server.metric("slipstream_streams_retried_total"), 21.0);
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    drop(fast);
}

#[test]
fn a_client_or_a_frontend_that_goes_away_frees_its_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let one = frontend(dir.path(), &[FROZEN, IMPATIENT]);
    let other = frontend(dir.path(), &[FROZEN, IMPATIENT]);
    let worker = Worker::start(dir.path(), &[FROZEN, IMPATIENT]);
    await_ready(&one, 1);
    await_ready(&other, 1);
    let body = completion(LONG_PROMPT, 100, true);
    let mut client = begin(&one, &body);
    assert_eq!(client.head().status, 200);
    other.await_metric("vllm:num_requests_running", |running| running == 1.0);
    drop(client);
    // The current pass takes an hour.
    other.await_metric("vllm:num_requests_running", |running| running == 0.0);
    other.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    let mut client = begin(&one, &body);
    assert_eq!(client.head().status, 200);
    other.await_metric("vllm:num_requests_waiting", |waiting| waiting == 1.0);
    one.kill();
    other.await_metric("vllm:num_requests_waiting", |waiting| waiting == 0.0);
    await_ready(&other, 1);
    drop(worker);
}

#[test]
fn a_worker_that_is_stopped_is_given_up_and_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[STEADY, IMPATIENT]);
    let worker = Worker::start(dir.path(), &[STEADY, IMPATIENT]);
    await_ready(&server, 2);
    let mut client = begin(&server, &completion(LONG_PROMPT, 4000, true));
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some(), "mid-stream");
    worker.signal("-STOP");
    let text = rest(&mut client);
    assert!(
        text.contains("\"error\"") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
    assert!(server.metric("slipstream_plane_silent_total") >= 1.0);
    await_ready(&server, 0);
    worker.signal("-CONT");
    await_ready(&server, 2);
    let answer = server.post("/v1/completions", &completion("a", 3, false));
    assert_eq!(answer.status, 200, "{}", answer.text());
    // Its earlier work was cancelled, since its clients are gone.
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
}

#[test]
fn two_processes_with_one_worker_do_not_share_it() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FAST]);
    let first = Worker::start(dir.path(), &[FAST]);
    await_ready(&server, 2);
    let second = Worker::start(dir.path(), &[FAST, &["--pool=main", "--index=1"]]);
    server.await_metric("slipstream_plane_rejected_total", |rejected| {
        rejected >= 2.0
    });
    assert_eq!(server.metric("slipstream_router_ready"), 2.0);
    assert_eq!(server.metric("slipstream_plane_connections_open"), 2.0);
    // The second takes over as soon as the first releases the lease.
    first.kill();
    await_ready(&server, 1);
    assert_eq!(
        server
            .post("/v1/completions", &completion("a", 3, false))
            .status,
        200
    );
    assert!(second.terminate().success());
}

/// Addresses of the shards of the frontends in `dir`.
fn plane_addresses(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let whole = path.extension().is_some_and(|ext| ext == "json");
        if stem.starts_with("frontend-") && whole {
            let text = std::fs::read(&path).unwrap();
            let entry: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let shards = entry["record"]["shards"].as_array().unwrap();
            found.extend(shards.iter().map(|s| s.as_str().unwrap().to_owned()));
        }
    }
    found
}

#[test]
fn strangers_on_the_plane_are_cut_off_and_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FAST, IMPATIENT]);
    let worker = Worker::start(dir.path(), &[FAST, IMPATIENT]);
    await_ready(&server, 2);
    let address = plane_addresses(dir.path()).remove(0);
    let talk = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The connection may be closed before everything was sent.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    };
    let http = talk(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
    let text = String::from_utf8_lossy(&http).into_owned();
    assert!(text.contains("version"), "the error is reported: {text}");
    talk(&[0xff; 64]);
    talk(&[0, 0, 0, 0, 9, 1, 0, 0]); // another version
    talk(&[255, 255, 255, 255, 1, 1, 0, 0]); // four gigabytes of hello
    talk(&[0, 0, 0, 0, 1, 16, 0, 0]); // a request before its greeting
    talk(&[]); // sends nothing at all: disconnected after the deadline
    assert!(server.metric("slipstream_plane_malformed_total") >= 5.0);
    assert!(server.metric("slipstream_plane_rejected_total") >= 6.0);
    server.assert_alive();
    drop(worker);
}

#[test]
fn records_that_are_stale_or_cut_short_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let old = frontend(dir.path(), &[FAST]);
    await_true("the record is there", || {
        !plane_addresses(dir.path()).is_empty()
    });
    old.kill(); // its record stays
    std::fs::write(
        dir.path().join("frontend-00000000000000aa.json"),
        b"{\"role\":\"fro",
    )
    .unwrap();
    let worker = Worker::start(dir.path(), &[FAST, IMPATIENT]);
    let server = frontend(dir.path(), &[FAST, IMPATIENT]);
    await_ready(&server, 2);
    server.assert_alive();
    drop(worker);
}

#[test]
fn a_fifo_or_a_link_among_the_records_stops_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("frontend-00000000000000aa.json");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let link = dir.path().join("frontend-00000000000000bb.json");
    std::os::unix::fs::symlink("/dev/zero", link).unwrap();
    let worker = Worker::start(dir.path(), &[FAST, IMPATIENT]);
    let server = frontend(dir.path(), &[FAST, IMPATIENT]);
    await_ready(&server, 2);
    server.assert_alive();
    assert!(worker.terminate().success());
    assert!(server.terminate().success());
}

#[test]
fn a_worker_of_another_cluster_is_not_dialed() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FAST]);
    let stranger = Worker::start(dir.path(), &[FAST, &["--set=engine.block_size=32"]]);
    let ours = Worker::start(dir.path(), &[FAST]);
    await_ready(&server, 2);
    assert_eq!(server.metric("slipstream_plane_connections_total"), 2.0);
    drop((stranger, ours));
}

#[test]
fn open_streams_finish_when_either_side_is_asked_to_end() {
    for end_worker in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let server = frontend(dir.path(), &[STEADY]);
        let worker = Worker::start(dir.path(), &[STEADY]);
        await_ready(&server, 2);
        // An idle keep-alive connection does not delay the shutdown.
        let mut idle = server.connect();
        assert_eq!(idle.send("GET", "/live", &[], b"").status, 200);
        let mut client = begin(&server, &completion("a", 30, true));
        assert_eq!(client.head().status, 200);
        assert!(client.chunk().is_some());
        let check = |client: &mut Client| {
            let text = rest(client);
            assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
            assert!(!text.contains("error"), "{text}");
        };
        if end_worker {
            assert!(worker.terminate().success());
            check(&mut client);
        } else {
            assert!(server.terminate().success());
            check(&mut client);
        }
    }
}

/// An authority, a certificate it signed, and the flags that name them; `None` without openssl.
fn certificates(dir: &Path) -> Option<Vec<String>> {
    let openssl = |args: &str| {
        let status = std::process::Command::new("openssl")
            .args(args.split_whitespace())
            .current_dir(dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        status.is_ok_and(|status| status.success())
    };
    let ca = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 \
              -subj /CN=authority -keyout ca.key -out ca.pem";
    let request = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=process \
                   -addext subjectAltName=DNS:slipstream -keyout process.key -out process.csr";
    let sign = "x509 -req -in process.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
                -copy_extensions copyall -out process.pem";
    if ![ca, request, sign].iter().all(|args| openssl(args)) {
        eprintln!("skipped: openssl made no certificates");
        return None;
    }
    let flag = |flag: &str, file: &str| format!("{flag}={}", dir.join(file).display());
    Some(vec![
        flag("--plane-cert", "process.pem"),
        flag("--plane-key", "process.key"),
        flag("--plane-ca", "ca.pem"),
    ])
}

#[test]
fn over_tls_only_who_proves_to_belong_to_the_cluster_is_served() {
    let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (Some(flags), Some(others)) = (certificates(ours.path()), certificates(theirs.path()))
    else {
        return;
    };
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let others: Vec<&str> = others.iter().map(String::as_str).collect();
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FAST, &flags]);
    let index = |index: &'static str| ["--pool=main", index];
    let plain = Worker::start(dir.path(), &[FAST, &index("--index=0")]);
    let stranger = Worker::start(dir.path(), &[FAST, &index("--index=1"), &others]);
    server.await_metric("slipstream_plane_rejected_total", |rejected| {
        rejected >= 4.0
    });
    assert_eq!(server.metric("slipstream_router_ready"), 0.0);
    assert_eq!(server.metric("slipstream_plane_connections_total"), 0.0);
    let worker = Worker::start(dir.path(), &[FAST, &flags]);
    await_ready(&server, 2);
    // Answers longer than a TLS record, and many of them.
    let mut streams: Vec<Client> = (0..20)
        .map(|_| begin(&server, &completion(LONG_PROMPT, 2000, true)))
        .collect();
    for stream in &mut streams {
        assert_eq!(stream.head().status, 200);
        let text = rest(stream);
        assert!(text.ends_with("data: [DONE]\n\n"));
        assert!(!text.contains("\"error\""), "{text}");
    }
    drop((plain, stranger, worker));
}

/// A proxy between a worker and a shard that cuts connections after a number of bytes in one
/// direction.
struct Cutter {
    address: String,
    shared: Arc<CutterShared>,
}

struct CutterShared {
    /// Bytes until new connections are cut; negative: in the direction from shard to worker.
    cut: AtomicI64,
    connections: AtomicU64,
    /// Both sockets of the newest connection.
    last: Mutex<Vec<TcpStream>>,
}

impl Cutter {
    fn start(shard: String) -> Cutter {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(CutterShared {
            cut: AtomicI64::new(i64::MAX),
            connections: AtomicU64::new(0),
            last: Mutex::default(),
        });
        let ours = shared.clone();
        std::thread::spawn(move || {
            for worker in listener.incoming().map_while(Result::ok) {
                let Ok(shard) = TcpStream::connect(&shard) else {
                    return; // the test is over
                };
                ours.forward(&worker, &shard);
            }
        });
        Cutter { address, shared }
    }

    /// Cuts the current connection, and later ones after `cut` bytes.
    fn cut(&self, cut: i64) {
        self.shared.cut.store(cut, SeqCst);
        for socket in self.shared.last.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl CutterShared {
    fn forward(&self, worker: &TcpStream, shard: &TcpStream) {
        let clone = |socket: &TcpStream| socket.try_clone().unwrap();
        *self.last.lock().unwrap() = vec![clone(worker), clone(shard)];
        let cut = self.cut.load(SeqCst);
        let (up, down) = if cut >= 0 {
            (cut, i64::MAX)
        } else {
            (i64::MAX, -cut)
        };
        for (from, to, limit) in [(worker, shard, up), (shard, worker, down)] {
            let (mut from, mut to) = (clone(from), clone(to));
            std::thread::spawn(move || {
                let mut left = limit;
                let mut bytes = [0; 4096];
                while left > 0 {
                    let room = bytes.len().min(left as usize);
                    let Ok(read @ 1..) = from.read(&mut bytes[..room]) else {
                        break;
                    };
                    if to.write_all(&bytes[..read]).is_err() {
                        break;
                    }
                    left -= read as i64;
                }
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        self.connections.fetch_add(1, SeqCst);
    }
}

#[test]
fn a_connection_cut_at_any_byte_is_made_again_and_streams_end_once() {
    let hidden = tempfile::tempdir().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let one_shard: &[&str] = &["--set=live.shards=1", "--lease=600"];
    let server = frontend_with(hidden.path(), &[FAST], one_shard);
    // The frontend's record, with the proxy's address in it, in the worker's discovery directory.
    await_true("the record is there", || {
        !plane_addresses(hidden.path()).is_empty()
    });
    let shard = plane_addresses(hidden.path()).remove(0);
    let cutter = Cutter::start(shard.clone());
    for entry in std::fs::read_dir(hidden.path()).unwrap() {
        let entry = entry.unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap();
        let text = text.replace(&shard, &cutter.address);
        std::fs::write(dir.path().join(entry.file_name()), text).unwrap();
    }
    let worker = Worker::start(dir.path(), &[FAST]);
    await_ready(&server, 2);
    // A hello of about 60 bytes, then passes of about 300; in the other direction, a welcome of
    // about 30 and requests of about 120. (Cuts at every byte: `planes::link`.)
    let cuts = (2..14).map(|n| n * 31).chain((2..14).map(|n| -n * 17));
    let cuts = cuts.chain([600, 900, 1500, 2500, -500, -900]);
    let mut whole = 0;
    for cut in cuts {
        cutter.cut(cut);
        let before = cutter.shared.connections.load(SeqCst);
        let mut streams: Vec<Client> = (0..3)
            .map(|_| begin(&server, &completion(LONG_PROMPT, 10, true)))
            .collect();
        await_true("it is dialed again", || {
            cutter.shared.connections.load(SeqCst) > before
        });
        if cut >= 200 || (-1000..=-100).contains(&cut) {
            // The greeting and the first snapshots pass: only the streams are cut.
            await_ready(&server, 2);
        }
        streams.extend((0..3).map(|_| begin(&server, &completion(LONG_PROMPT, 10, true))));
        for stream in &mut streams {
            let head = stream.head();
            if head.status != 200 {
                assert_eq!(head.status, 503, "cut at {cut}");
                continue;
            }
            let text = rest(stream);
            assert!(text.ends_with("data: [DONE]\n\n"), "{cut}: {text}");
            assert_eq!(text.matches("[DONE]").count(), 1);
            whole += u32::from(!text.contains("error"));
        }
    }
    assert!(whole > 0, "some streams come before the cut");
    cutter.cut(i64::MAX);
    await_ready(&server, 2);
    server.assert_alive();
    assert_eq!(server.metric("slipstream_streams_open"), 0.0);
    drop(worker);
}

#[test]
fn a_frontend_out_of_descriptors_goes_on_when_it_has_some_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("sh");
    let flags = of_frontend(FAST).join(" ");
    command.args([
        "-c",
        &format!(
            "ulimit -n 40; exec {} frontend --set=live.shards=2 {flags} --discovery {} \"$@\"",
            slipstream().get_program().to_str().unwrap(),
            dir.path().display()
        ),
        "sh",
    ]);
    let server = Server::spawn(command);
    let worker = Worker::start(dir.path(), &[FAST]);
    await_ready(&server, 2);
    let shards = plane_addresses(dir.path());
    let flood: Vec<TcpStream> = (0..60)
        .filter_map(|n| TcpStream::connect(&shards[n % 2]).ok())
        .collect();
    assert!(flood.len() > 40);
    drop(flood);
    server.assert_alive();
    // The workers' connections were not closed for it.
    assert_eq!(server.metric("slipstream_plane_connections_open"), 2.0);
    drop(worker);
}

#[test]
fn a_worker_out_of_descriptors_serves_whom_it_reached_and_others_when_it_has_some_again() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FAST, IMPATIENT]);
    let mut command = Command::new("sh");
    command.args([
        "-c",
        &format!(
            "ulimit -n 40; RUST_LOG=error exec {} worker --links 100 {} {} \"$@\"",
            slipstream().get_program().to_str().unwrap(),
            FAST.join(" "),
            IMPATIENT.join(" "),
        ),
        "sh",
    ]);
    let worker = Worker::spawn(dir.path(), command);
    await_ready(&server, 2);
    // More shards than it has descriptors for: this one never completes, and takes no request.
    let wide = frontend_with(dir.path(), &[FAST, IMPATIENT], &["--set=live.shards=64"]);
    wide.await_metric("slipstream_plane_connections_open", |open| open >= 20.0);
    for _ in 0..10 {
        server.assert_alive();
    }
    assert_eq!(wide.metric("slipstream_router_ready"), 0.0);
    assert_eq!(server.metric("slipstream_plane_connections_open"), 2.0);
    wide.kill();
    let later = frontend(dir.path(), &[FAST, IMPATIENT]);
    await_ready(&later, 2);
    later.assert_alive();
    server.assert_alive();
    assert_eq!(server.metric("slipstream_plane_lost_total"), 0.0);
    drop(worker);
}

/// Other processes ignore records with a longer lease, so the cluster would never form.
#[test]
fn a_lease_beyond_the_limit_is_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let folder = format!("--discovery={}", dir.path().display());
    let args = ["frontend", &folder, "--listen=127.0.0.1:0", "--lease=86401"];
    let (code, _, stderr) = crate::server::run(&args);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("86400 s"), "{stderr}");
}
