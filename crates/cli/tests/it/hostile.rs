//! A hostile server for every command that reads from a server: none of its control characters reach stdout or
//! stderr, and lines have a limit.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use slipstream_base::text::acts;

use crate::server::slipstream;

const PATIENCE: Duration = Duration::from_secs(30);

/// Answers after which a client that runs for ever has said what it has to say.
const ANSWERS: usize = 4;

/// Longest line that is shown: an error with the beginning of an answer.
const LINE_BYTES_MAX: usize = 8 << 10;

/// The title of a window, a clear screen, a carriage return, C1, an override of direction, and a mark to be found.
fn poison() -> String {
    let long = "z".repeat(100_000);
    format!("\u{1b}]0;owned\u{7}\u{1b}[2J\r\n\u{9b}31m\u{202e}\u{7f}\0\u{8}{long}")
}

/// How the server answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// Status 500 with a text that is not UTF-8.
    Text,
    /// Status 400 with OpenAI's error, Kubernetes' status and etcd's.
    Json,
    /// Status 200, and poison in every string of the document that the path has.
    Document,
    /// Bytes that are not HTTP.
    Bytes,
    /// Headers and a reason with all bytes that HTTP permits.
    Head,
    /// A greeting before the first request, in NATS's protocol.
    Greeting,
}

/// Modes for clients that speak first.
const HTTP: &[Mode] = &[
    Mode::Text,
    Mode::Json,
    Mode::Document,
    Mode::Bytes,
    Mode::Head,
];
/// Modes for clients that speak as others here do.
const FEW: &[Mode] = &[Mode::Text, Mode::Json, Mode::Document];
/// Modes for clients that wait for a greeting.
const GREETED: &[Mode] = &[Mode::Greeting];

struct Hostile {
    address: SocketAddr,
    /// One message for each answer.
    answers: Receiver<()>,
}

impl Hostile {
    fn start(mode: Mode) -> Hostile {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (answered, answers) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answered = answered.clone();
                std::thread::spawn(move || {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    converse(mode, stream, &answered);
                });
            }
        });
        Hostile { address, answers }
    }
}

fn converse(mode: Mode, mut stream: TcpStream, answered: &Sender<()>) {
    let poison = poison();
    let raw = [poison.as_bytes(), b"\xff\xfe\x80\r\n"].concat();
    if mode == Mode::Greeting {
        let info = json!({"server_id": poison, "version": poison, "proto": 1, "max_payload": 1_000_000, "headers": true});
        let _ = write!(
            stream,
            "INFO {info}\r\n-ERR 'owned \u{1b}[2J\u{9b}\u{202e}'\r\n"
        );
        let _ = stream.write_all(&raw);
        let _ = answered.send(());
        let _ = stream.read(&mut [0; 1024]);
        return;
    }
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut path = String::new();
    if reader.read_line(&mut path).is_err() || path.is_empty() {
        return;
    }
    let mut length = 0;
    let mut line = String::new();
    while reader.read_line(&mut line).is_ok_and(|read| read > 2) {
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        line.clear();
    }
    let _ = reader.read_exact(&mut vec![0; length]);
    let path = path.split(' ').nth(1).unwrap_or_default().to_owned();
    let answer = |status: &str, kind: &str, body: &[u8]| {
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        [head.as_bytes(), body].concat()
    };
    let bytes = match mode {
        Mode::Text => answer("500 Internal Server Error", "text/plain", &raw),
        Mode::Json => {
            let error = json!({
                "error": {"message": poison, "type": poison, "code": poison, "param": poison},
                "message": poison, "detail": poison, "reason": poison, "kind": "Status", "code": 9,
            });
            answer(
                "400 Bad Request",
                "application/json",
                error.to_string().as_bytes(),
            )
        }
        Mode::Document => {
            let (kind, body) = document(&path, &poison);
            answer("200 OK", kind, body.as_bytes())
        }
        Mode::Bytes | Mode::Greeting => raw,
        Mode::Head => {
            let reason = b"owned\xc2\x9b31m\xe2\x80\xae\x9b";
            let mut bytes = b"HTTP/1.1 302 ".to_vec();
            bytes.extend_from_slice(reason);
            for name in [
                "location",
                "content-type",
                "server",
                "x-request-id",
                "retry-after",
            ] {
                bytes.extend_from_slice(format!("\r\n{name}: ").as_bytes());
                bytes.extend_from_slice(reason);
            }
            bytes.extend_from_slice(b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            bytes
        }
    };
    let _ = stream.write_all(&bytes);
    let _ = answered.send(());
}

/// The document of a path, with poison in its strings.
fn document(path: &str, poison: &str) -> (&'static str, String) {
    let json = |value: Value| ("application/json", value.to_string());
    match path.split('?').next().unwrap_or_default() {
        "/v1/models" => json(json!({"object": "list", "data": [
            {"id": poison, "root": poison, "owned_by": poison, "parent": poison, "max_model_len": 4096},
            {"id": format!("b{poison}"), "root": poison, "owned_by": "vllm", "max_model_len": 8192},
        ]})),
        "/version" => json(json!({"version": poison})),
        "/metrics" => {
            let label: String = poison
                .replace('\\', "\\\\")
                .replace('\n', "\\n")
                .replace('"', "\\\"");
            let info = "vllm:cache_config_info";
            let text = format!(
                "# HELP {info} {}\n# TYPE {info} gauge\n{info}{{block_size=\"{label}\",engine=\"{label}\",\
                 num_gpu_blocks=\"{label}\",cache_dtype=\"{label}\"}} 1\nvllm:num_requests_running{{engine=\"{label}\",\
                 model_name=\"{label}\"}} 0\nowned\u{1b}[2J{{\u{1b}=\"{label}\"}} \u{1b}\n",
                poison.replace('\n', " ")
            );
            ("text/plain", text)
        }
        "/ui.json" => json(json!({
            "totals": {"requests": 1}, "model": poison, "policy": poison, "version": poison,
            "engines": [{"name": poison, "state": poison, "role": poison, "model": poison, "last_failure": poison}],
            "workers": [{"name": poison, "pool": poison, "role": poison, "state": poison}],
            "pools": [{"name": poison, "role": poison}],
        })),
        "/health" => json(json!({"status": poison, "engines": [
            {"url": poison, "state": poison, "role": poison, "last_failure": poison, "models": [poison]},
        ]})),
        "/v1/completions" | "/v1/chat/completions" => (
            "text/event-stream",
            format!(
                "data: {}\n\ndata: {}\n\ndata: {poison}\n\n: {poison}\n\n",
                json!({"id": poison, "model": poison, "choices": [{"text": poison, "finish_reason": poison}]}),
                json!({"error": {"message": poison, "type": poison, "code": poison}}),
            ),
        ),
        "/tokenize" => json(
            json!({"count": 1, "max_model_len": poison, "tokens": [1], "token_strs": [poison]}),
        ),
        _ => json(json!({
            "message": poison, "error": poison, "kind": poison, "token": poison,
            "metadata": {"resourceVersion": poison},
            "items": [{"metadata": {"name": poison}, "addressType": poison,
                       "ports": [{"name": poison, "port": 1}],
                       "endpoints": [{"addresses": [poison], "conditions": {"ready": true}}]}],
            "header": {"revision": poison, "cluster_id": poison}, "kvs": [{"key": poison, "value": poison}],
            "ID": poison, "TTL": poison, "server_info": {"model_path": poison}, "model_path": poison,
        })),
    }
}

/// A client: a command, in which `{}` is the server's address.
struct Client {
    name: &'static str,
    args: &'static [&'static str],
    /// Whether it runs until it is stopped.
    stays: bool,
    modes: &'static [Mode],
}

const fn once(name: &'static str, args: &'static [&'static str]) -> Client {
    Client {
        name,
        args,
        stays: false,
        modes: HTTP,
    }
}

const fn alike(name: &'static str, args: &'static [&'static str]) -> Client {
    Client {
        modes: FEW,
        ..once(name, args)
    }
}

const fn stays(name: &'static str, args: &'static [&'static str]) -> Client {
    Client {
        name,
        args,
        stays: true,
        modes: FEW,
    }
}

const fn greeted(name: &'static str, args: &'static [&'static str]) -> Client {
    Client {
        modes: GREETED,
        ..stays(name, args)
    }
}

const CLIENTS: &[Client] = &[
    once("bench", &["bench", "http://{}", "--requests=3"]),
    once(
        "bench, whole answers",
        &[
            "bench",
            "http://{}",
            "--requests=2",
            "--no-stream",
            "--model=m",
        ],
    ),
    once(
        "bench, JSON",
        &[
            "bench",
            "http://{}",
            "--requests=2",
            "--model=m",
            "--endpoint=chat",
            "--json",
        ],
    ),
    once("describe", &["describe", "http://{}", "--timeout=2s"]),
    once(
        "describe, JSON",
        &["describe", "http://{}", "--timeout=2s", "--json"],
    ),
    once("top", &["top", "http://{}", "--once", "--interval=1ms"]),
    once("top, JSON", &["top", "http://{}", "--json"]),
    alike(
        "tokenizer check",
        &["tokenizer", "check", "http://{}", "--timeout=2s"],
    ),
    alike("calibrate", &["calibrate", "--engine=http://{}"]),
    alike("drag", &["drag", "--engine=http://{}", "--requests=2"]),
    alike(
        "events cached",
        &["events", "cached", "http://{}", "--timeout=2s"],
    ),
    greeted(
        "events tail, ZeroMQ",
        &["events", "tail", "--bus=zmq", "--endpoint=tcp://{}"],
    ),
    greeted(
        "events tail, NATS",
        &["events", "tail", "--bus=nats", "--url=nats://{}"],
    ),
    stays(
        "the router",
        &["serve", "--engine=http://{}", "--listen=127.0.0.1:0"],
    ),
    stays(
        "the frontend, etcd",
        &[
            "frontend",
            "--discovery=etcd://{}/a",
            "--listen=127.0.0.1:0",
        ],
    ),
    greeted(
        "the frontend, NATS",
        &[
            "frontend",
            "--discovery=nats://{}/a",
            "--listen=127.0.0.1:0",
        ],
    ),
    stays("the worker, etcd", &["worker", "--discovery=etcd://{}/a"]),
    greeted("the worker, NATS", &["worker", "--discovery=nats://{}/a"]),
    stays(
        "endpoint slices",
        &[
            "serve",
            "--listen=127.0.0.1:0",
            "--set=pool.a.endpoint_slices=app=x",
            "--set=upstream.kubernetes_namespace=a",
            "--set=upstream.kubernetes_url=http://{}",
        ],
    ),
    stays(
        "autoscale's webhook",
        &[
            "serve",
            "--listen=127.0.0.1:0",
            "--set=autoscale.policy=queue",
            "--set=autoscale.interval_s=0.1",
            "--set=live.autoscale.webhook=http://{}/scale",
        ],
    ),
    greeted(
        "KV events' bus",
        &[
            "serve",
            "--listen=127.0.0.1:0",
            "--set=live.events.bus=nats",
            "--set=live.events.nats_url=nats://{}",
        ],
    ),
    stays(
        "spans",
        &[
            "serve",
            "--listen=127.0.0.1:0",
            "--set=live.otlp_endpoint=http://{}",
        ],
    ),
];

/// A child that is ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a client prints.
fn output(client: &Client, mode: Mode) -> [Vec<u8>; 2] {
    let server = Hostile::start(mode);
    let address = server.address.to_string();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| File::create(dir.path().join(name)).unwrap();
    let args = client.args.iter().map(|arg| arg.replace("{}", &address));
    let child = slipstream()
        .args(args)
        .env("RUST_LOG", "info")
        .stdin(Stdio::null())
        .stdout(file("stdout"))
        .stderr(file("stderr"))
        .spawn()
        .unwrap();
    let mut child = Running(child);
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let begun = Instant::now();
    let (mut answers, mut stopped) = (0, false);
    while child.0.try_wait().unwrap().is_none() {
        let limit = PATIENCE.saturating_sub(begun.elapsed());
        assert!(
            !limit.is_zero(),
            "{} under {mode:?} does not end",
            client.name
        );
        if ["spans", "the router"].contains(&client.name) {
            ask(&read("stdout"));
        }
        let pause = match answers {
            0 => 50,
            _ if mode == Mode::Greeting => 2000,
            _ => 300,
        };
        let pause = Duration::from_millis(pause);
        let answered = server.answers.recv_timeout(pause).is_ok();
        answers += usize::from(answered);
        // A client may also try once, and then wait.
        if client.stays && !stopped && (answers >= ANSWERS || answers > 0 && !answered) {
            let id = child.0.id().to_string();
            let _ = Command::new("kill").args(["-TERM", &id]).status();
            stopped = true;
        }
    }
    [read("stdout"), read("stderr")]
}

/// Sends a request to the server that says `listening on` in `stdout`.
fn ask(stdout: &[u8]) {
    let text = String::from_utf8_lossy(stdout);
    let Some(address) = text.trim().strip_prefix("listening on http://") else {
        return;
    };
    let Ok(mut stream) = TcpStream::connect(address) else {
        return;
    };
    let body = r#"{"prompt":"a","max_tokens":1}"#;
    let _ = write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n\
         traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Why `bytes` is no text of ours. `data`: the values of a document may be long.
fn problem(bytes: &[u8], data: bool) -> Option<String> {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Some(format!("not UTF-8: {:?}", String::from_utf8_lossy(bytes)));
    };
    for line in text.lines() {
        if let Some(bad) = line.chars().find(|c| acts(*c) && *c != '\t') {
            return Some(format!("{bad:?} in {line:.400?}"));
        }
        if !data && line.len() > LINE_BYTES_MAX {
            return Some(format!("{} bytes in a line: {line:.200}", line.len()));
        }
    }
    text.contains('\r').then(|| "a carriage return".to_owned())
}

#[test]
fn what_a_hostile_server_says_reaches_no_terminal() {
    let cases: Vec<_> = CLIENTS
        .iter()
        .flat_map(|client| client.modes.iter().map(move |mode| (client, mode)))
        .collect();
    let next = AtomicUsize::new(0);
    let results = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((client, mode)) = cases.get(next.fetch_add(1, Relaxed)) {
                    let printed = output(client, **mode);
                    results.lock().unwrap().push((*client, **mode, printed));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let mut wrong = Vec::new();
    for (client, mode, [stdout, stderr]) in &results {
        for (name, bytes) in [("stdout", stdout), ("stderr", stderr)] {
            let data =
                name == "stdout" && (client.name.contains("JSON") || client.name == "describe");
            wrong.extend(
                problem(bytes, data).map(|of| format!("{}, {mode:?}, {name}: {of}", client.name)),
            );
        }
    }
    // The test would show nothing if no client showed what the server says.
    let showing: BTreeSet<_> = results
        .iter()
        .filter(|(_, _, printed)| {
            let shows = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).contains("owned");
            printed.iter().any(shows)
        })
        .map(|(client, _, _)| client.name)
        .collect();
    assert!(2 * showing.len() > CLIENTS.len(), "{showing:?}");
    if std::env::var_os("SLIPSTREAM_SHOW").is_some() {
        for (client, mode, [stdout, stderr]) in &results {
            let text =
                |bytes: &[u8]| format!("{:.700}", String::from_utf8_lossy(bytes).into_owned());
            eprintln!(
                "== {} {mode:?}\n{}{}",
                client.name,
                text(stdout),
                text(stderr)
            );
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
