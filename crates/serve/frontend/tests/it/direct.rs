//! Answers that shards write past the tasks of their connections: the bytes that a client reads are those that it
//! reads by the task, in any order of clients, frames and slow reads. The test plays the engine and the clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use slipstream_base::{FinishReason, TokenId, WorkerId};
use slipstream_config::cluster::file;
use slipstream_config::doc::Doc;
use slipstream_dispatch::{Dispatcher, Rules};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{Bound, Frontend, Limits, Service, ShardPlane, WorkerTransport};
use slipstream_planes::{
    End, FirstPass, Flushed, Plane, PlaneLimits, Prologue, StreamAddr, ThreadPort, ToWorker, Usage,
};
use slipstream_router::{Fleets, Router};

/// Longer than anything here takes; what takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

const CLUSTER: &str = r#"
[model]
preset = "llama-3.1-8b"
name = "m"
[pool.main]
workers = 1
[engine]
num_gpu_blocks = 20000
max_model_len = 131072
"#;

/// Made once: it takes a while.
fn text() -> Arc<TextModel> {
    static TEXT: OnceLock<Arc<TextModel>> = OnceLock::new();
    TEXT.get_or_init(|| Arc::new(TextModel::builtin())).clone()
}

/// A frontend, and the engine thread that the test plays.
struct Stage {
    frontend: Option<Frontend>,
    port: ThreadPort,
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(frontend) = self.frontend.take() {
            frontend.shutdown();
        }
    }
}

fn stage(direct_writes: bool) -> Stage {
    let doc = Doc::parse("cluster.toml", CLUSTER.as_bytes());
    let cluster = file::read(doc, |path: &Path| std::fs::read(path))
        .unwrap_or_else(|e| panic!("{e}"))
        .0;
    let fleets = Fleets::of_cluster(&cluster).unwrap();
    fleets.set_ready(WorkerId(0), true);
    let plane = Plane::new(1, 1, PlaneLimits::default());
    let planes = vec![ShardPlane {
        transport: WorkerTransport::Rings(plane.shards.into_iter().next().unwrap()),
        dispatcher: Dispatcher::new(
            Rules::of_cluster(&cluster),
            Router::new(fleets.serve.clone(), 0),
            None,
        ),
        kv_network: None,
    }];
    let service = Service {
        max_model_len: 131_072,
        kv_blocks: 20_000,
        limits: Limits {
            stream_buffer_bytes_max: 64 << 20,
            drain: Duration::ZERO,
            ..Limits::default()
        },
        direct_writes,
        ..Service::new("m", text(), fleets)
    };
    let bound = Bound::bind("127.0.0.1:0").unwrap();
    let registry = slipstream_metrics::Registry::default();
    let mut frontend = Frontend::start(bound, service, planes, registry).unwrap();
    frontend.open().unwrap();
    Stage {
        frontend: Some(frontend),
        port: plane.threads.into_iter().next().unwrap(),
    }
}

impl Stage {
    fn connect(&self) -> Client {
        let address = self.frontend.as_ref().unwrap().address();
        Client::of(TcpStream::connect(address).unwrap())
    }

    /// The next message of the shard.
    fn receive(&mut self) -> ToWorker {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(message) = self.port.receive() {
                return message;
            }
            assert!(Instant::now() < deadline, "the shard sends nothing");
            std::thread::yield_now();
        }
    }

    fn started(&mut self) -> StreamAddr {
        match self.receive() {
            ToWorker::Start(start) => start.addr,
            other => panic!("{other:?} is no start"),
        }
    }

    /// Sends a frame with `tokens` of each of `streams`, one entry each, as one step gives them.
    fn step(&mut self, streams: &[(StreamAddr, &[TokenId])], first: bool) {
        let frame = self.port.frame(0).unwrap();
        let pass = FirstPass {
            start_ns: 1,
            end_ns: 2,
        };
        for (addr, tokens) in streams {
            if first {
                frame.push_prologue(addr.stream, &Prologue::default());
            }
            frame.push_tokens(addr.stream, tokens, first.then_some(pass));
        }
        self.flush();
    }

    fn end(&mut self, addr: StreamAddr, last: &[TokenId]) {
        let frame = self.port.frame(0).unwrap();
        frame.push_tokens(addr.stream, last, None);
        let end = End {
            reason: FinishReason::Length,
            usage: Usage::default(),
        };
        frame.push_end(addr.stream, &end);
        self.flush();
    }

    /// Sends the open frame, once there is room for it.
    fn flush(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.port.flush(0, false) == Flushed::Full {
            assert!(Instant::now() < deadline, "the shard takes no frames");
            std::thread::yield_now();
        }
    }

    fn metric(&self, name: &str) -> u64 {
        let mut client = self.connect();
        client.write("GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n");
        let mut all = String::new();
        client.socket.read_to_string(&mut all).unwrap();
        let value = all
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}_total ")));
        value
            .unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .unwrap()
    }

    fn direct_writes(&self) -> u64 {
        self.metric("slipstream_direct_writes")
    }
}

struct Client {
    socket: TcpStream,
    unread: Vec<u8>,
}

impl Client {
    fn of(socket: TcpStream) -> Client {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Client {
            socket,
            unread: Vec::new(),
        }
    }

    fn write(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).unwrap();
    }

    fn ask(&mut self, max_tokens: usize, n: u32) {
        self.ask_by("HTTP/1.1", max_tokens, n);
    }

    fn ask_by(&mut self, version: &str, max_tokens: usize, n: u32) {
        let body = format!(
            "{{\"model\":\"m\",\"prompt\":\"a word\",\"max_tokens\":{max_tokens},\"n\":{n},\"stream\":true,\
             \"ignore_eos\":true,\"stream_options\":{{\"include_usage\":true}}}}"
        );
        let length = body.len();
        self.write(&format!(
            "POST /v1/completions {version}\r\nhost: t\r\ncontent-type: application/json\r\nx-request-id: r\r\n\
             content-length: {length}\r\n\r\n{body}"
        ));
    }

    fn read_some(&mut self) {
        let mut piece = [0; 1 << 14];
        let count = self.socket.read(&mut piece).expect("bytes in time");
        assert!(count > 0, "the server closed the connection");
        self.unread.extend_from_slice(&piece[..count]);
    }

    /// All bytes up to `end`, and it.
    fn until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut looked = 0;
        loop {
            let tail = &self.unread[looked..];
            if let Some(at) = tail.windows(end.len()).position(|part| part == end) {
                let rest = self.unread.split_off(looked + at + end.len());
                return std::mem::replace(&mut self.unread, rest);
            }
            looked = (self.unread.len() + 1).saturating_sub(end.len());
            self.read_some();
        }
    }

    fn head(&mut self) -> String {
        String::from_utf8(self.until(b"\r\n\r\n")).unwrap()
    }

    /// The next chunk as it is on the wire, and its data; `None` of the last one's.
    fn chunk(&mut self) -> (Vec<u8>, Option<Vec<u8>>) {
        let mut raw = self.until(b"\r\n");
        let size = std::str::from_utf8(&raw).unwrap().trim_end();
        let size = usize::from_str_radix(size, 16).expect("the size of a chunk");
        while self.unread.len() < size + 2 {
            self.read_some();
        }
        let rest = self.unread.split_off(size + 2);
        let data = std::mem::replace(&mut self.unread, rest);
        assert_eq!(&data[size..], b"\r\n", "a chunk ends where it says");
        raw.extend_from_slice(&data);
        (raw, (size > 0).then(|| data[..size].to_vec()))
    }

    /// The rest of the answer: its data.
    fn rest(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let (_, Some(data)) = self.chunk() {
            all.extend_from_slice(&data);
        }
        all
    }
}

/// Texts of the events of a completion with one choice.
fn shown(data: &[u8]) -> String {
    let text = std::str::from_utf8(data).unwrap();
    let events = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    events
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|event| Some(event["choices"][0]["text"].as_str()?.to_owned()))
        .collect()
}

fn words(words: &str) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    text().encode(words, false, &mut tokens);
    tokens
}

/// Digits of times differ between runs.
fn without_times(bytes: &[u8]) -> String {
    let text = std::str::from_utf8(bytes).unwrap();
    let mut parts = text.split("\"created\":");
    let mut out = parts.next().unwrap().to_owned();
    for part in parts {
        out += "\"created\":T";
        out += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    out
}

/// Everything that a client of two choices reads, byte by byte, one step at a time; and how often the shard wrote.
fn read_step_by_step(direct_writes: bool) -> (Vec<String>, u64) {
    let mut stage = stage(direct_writes);
    let mut client = stage.connect();
    client.ask(16, 2);
    let streams = [stage.started(), stage.started()];
    let mut read = vec![];
    let head = client.head();
    let lines = head.lines().filter(|line| !line.starts_with("date: "));
    read.push(lines.collect::<Vec<_>>().join("\n"));
    // Characters of several tokens among them.
    let all = words(" the quick \u{1f9ed}\u{1f9ed} fox jumps over\n\"it\"");
    let mut both = |stage: &mut Stage, steps: &[&[TokenId]], first: bool| {
        let entries: Vec<_> = streams.into_iter().zip(steps.iter().copied()).collect();
        stage.step(&entries, first);
        let (raw, _) = client.chunk();
        read.push(without_times(&raw));
    };
    both(&mut stage, &[&all[..1], &all[..1]], true);
    for at in 1..all.len().min(12) {
        both(&mut stage, &[&all[at..=at], &all[at..=at]], false);
    }
    both(&mut stage, &[&all[..2]], false);
    stage.end(streams[0], &all[..1]);
    let (raw, _) = client.chunk();
    read.push(without_times(&raw));
    stage.end(streams[1], &all[1..3]);
    loop {
        let (raw, data) = client.chunk();
        read.push(without_times(&raw));
        if data.is_none() {
            return (read, stage.direct_writes());
        }
    }
}

#[test]
fn the_bytes_are_those_that_go_by_the_task() {
    let (by_task, none) = read_step_by_step(false);
    let (direct, writes) = read_step_by_step(true);
    assert_eq!(direct, by_task);
    assert_eq!(none, 0);
    assert!(
        writes >= 10,
        "only {writes} pieces were written by the shard"
    );
}

#[test]
fn a_frame_for_many_clients_reaches_each_and_connections_serve_further_requests() {
    const CLIENTS: usize = 100;
    let mut stage = stage(true);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| stage.connect()).collect();
    let all = words(" the quick brown fox jumps over the lazy dog");
    for round in 1..=2 {
        let mut streams = Vec::new();
        let mut texts = vec![Vec::new(); CLIENTS];
        for client in &mut clients {
            client.ask(all.len(), 1);
            streams.push(stage.started());
        }
        for (at, token) in all[..all.len() - 1].iter().enumerate() {
            let one = std::slice::from_ref(token);
            let entries: Vec<_> = streams.iter().map(|&stream| (stream, one)).collect();
            stage.step(&entries, at == 0);
            // A client that has read all before is one that the shard may write to.
            for (client, text) in clients.iter_mut().zip(&mut texts) {
                if at == 0 {
                    assert!(client.head().starts_with("HTTP/1.1 200"), "round {round}");
                }
                text.extend(client.chunk().1.unwrap());
            }
        }
        for &stream in &streams {
            stage.end(stream, &all[all.len() - 1..]);
        }
        for (client, mut text) in clients.iter_mut().zip(texts) {
            text.extend(client.rest());
            assert_eq!(shown(&text), " the quick brown fox jumps over the lazy dog");
            assert!(text.ends_with(b"data: [DONE]\n\n"));
        }
        assert!(stage.direct_writes() >= round * CLIENTS as u64);
    }
}

/// A client whose window is small, so that its socket is soon full.
fn slow_client(stage: &Stage) -> Client {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let address = stage.frontend.as_ref().unwrap().address();
    socket.connect(&address.into()).unwrap();
    Client::of(socket.into())
}

#[test]
fn a_slow_reader_gets_everything_in_order() {
    const STEPS: usize = 3000;
    let mut stage = stage(true);
    let mut client = slow_client(&stage);
    client.ask(2 * 16 * STEPS, 1);
    let stream = stage.started();
    let step: Vec<TokenId> = words(&" the quick brown fox".repeat(4));
    let token_by_token: Vec<_> = step.iter().map(std::slice::from_ref).collect();
    stage.step(&[(stream, token_by_token[0])], true);
    assert!(client.head().starts_with("HTTP/1.1 200"));
    let mut expected = words_shown(&step[..1]);
    let mut all = client.chunk().1.unwrap();
    // The shard writes this one: the client has read all before.
    stage.step(&[(stream, token_by_token[0])], false);
    expected += &words_shown(&step[..1]);
    all.extend(client.chunk().1.unwrap());
    for at in 0..STEPS {
        let entries: Vec<_> = token_by_token.iter().map(|one| (stream, *one)).collect();
        stage.step(&entries, false);
        expected += &words_shown(&step);
        if at % 100 == 99 {
            // Now and then it reads a little.
            all.extend(client.chunk().1.unwrap());
        }
    }
    stage.end(stream, &step[..1]);
    expected += &words_shown(&step[..1]);
    all.extend(client.rest());
    assert!(shown(&all) == expected, "text is lost or out of order");
    assert!(all.ends_with(b"data: [DONE]\n\n"));
    assert!(stage.direct_writes() > 0);
    assert!(
        stage.metric("slipstream_streams_paused") > 0,
        "it was never behind"
    );
}

fn words_shown(tokens: &[TokenId]) -> String {
    text().decode(tokens)
}

#[test]
fn a_client_that_leaves_is_noticed() {
    let mut stage = stage(true);
    let mut client = stage.connect();
    client.ask(1000, 1);
    let stream = stage.started();
    let all = words(" the quick brown fox");
    for at in 0..3 {
        stage.step(&[(stream, &all[at..=at])], at == 0);
        if at == 0 {
            client.head();
        }
        client.chunk();
    }
    assert!(stage.direct_writes() > 0);
    drop(client);
    match stage.receive() {
        ToWorker::Kill { addr, .. } => assert_eq!(addr, stream),
        other => panic!("{other:?} is no kill"),
    }
}

#[test]
fn a_request_behind_a_stream_is_answered_after_it() {
    let mut stage = stage(true);
    let mut client = stage.connect();
    let all = words(" the quick brown fox");
    client.ask(4, 1);
    client.ask(4, 1);
    for _ in 0..2 {
        let stream = stage.started();
        for at in 0..3 {
            stage.step(&[(stream, &all[at..=at])], at == 0);
            if at == 0 {
                assert!(client.head().starts_with("HTTP/1.1 200"));
            }
            client.chunk();
        }
        stage.end(stream, &all[3..4]);
        let rest = client.rest();
        assert_eq!(shown(&rest), words_shown(&all[3..4]));
    }
    assert!(stage.direct_writes() > 0);
}

#[test]
fn http_1_0_has_no_chunks_and_goes_by_the_task() {
    let mut stage = stage(true);
    let mut client = stage.connect();
    let all = words(" the quick brown fox");
    client.ask_by("HTTP/1.0", 4, 1);
    let stream = stage.started();
    for at in 0..3 {
        stage.step(&[(stream, &all[at..=at])], at == 0);
    }
    stage.end(stream, &all[3..4]);
    let head = client.head();
    assert!(!head.contains("chunked"), "{head}");
    let mut rest = std::mem::take(&mut client.unread);
    client.socket.read_to_end(&mut rest).unwrap();
    assert_eq!(shown(&rest), words_shown(&all[..4]));
    assert_eq!(stage.direct_writes(), 0);
}
