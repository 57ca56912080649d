//! A small OpenAI server on loopback with scripted faults.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) path: String,
    pub(crate) headers: String,
    pub(crate) body: serde_json::Value,
    /// Its number among all POST requests, from 0.
    pub(crate) index: usize,
}

impl Received {
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        self.headers.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name)
                .then(|| value.trim().to_owned())
        })
    }

    pub(crate) fn max_tokens(&self) -> u64 {
        self.body["max_tokens"].as_u64().unwrap()
    }

    pub(crate) fn prompt(&self) -> &str {
        self.body["prompt"].as_str().unwrap()
    }
}

/// The scripted answer.
pub(crate) enum Reply {
    /// These bytes; the connection stays open.
    Bytes(Vec<u8>),
    /// These bytes, then an orderly close.
    Close(Vec<u8>),
    /// These bytes, then a reset.
    Reset(Vec<u8>),
    /// No answer; the connection stays open until the client closes it.
    Silence,
}

pub(crate) struct Fake {
    pub(crate) address: SocketAddr,
    pub(crate) received: Arc<Mutex<Vec<Received>>>,
    /// Connections that carried at least one POST.
    pub(crate) connections: Arc<AtomicUsize>,
}

impl Fake {
    /// Starts a server whose POST requests `reply` answers. Its threads end with the process.
    pub(crate) fn start(reply: impl Fn(&Received) -> Reply + Send + Sync + 'static) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Fake {
            address: listener.local_addr().unwrap(),
            received: Arc::default(),
            connections: Arc::default(),
        };
        let reply = Arc::new(reply);
        let (received, connections) = (fake.received.clone(), fake.connections.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (reply, received) = (reply.clone(), received.clone());
                let connections = connections.clone();
                std::thread::spawn(move || serve(&stream, &*reply, &received, &connections));
            }
        });
        fake
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Bodies of all POST requests so far, as text, sorted.
    pub(crate) fn bodies(&self) -> Vec<String> {
        let mut bodies: Vec<_> = self
            .received
            .lock()
            .unwrap()
            .iter()
            .map(|r| r.body.to_string())
            .collect();
        bodies.sort();
        bodies
    }
}

fn serve(
    stream: &TcpStream,
    reply: &dyn Fn(&Received) -> Reply,
    received: &Mutex<Vec<Received>>,
    connections: &AtomicUsize,
) {
    stream.set_nodelay(true).unwrap();
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    let mut fresh = true;
    loop {
        let mut head = String::new();
        loop {
            match reader.read_line(&mut head) {
                Ok(0) | Err(_) => return,
                Ok(_) if head.ends_with("\r\n\r\n") => break,
                Ok(_) => {}
            }
        }
        let path = head.split(' ').nth(1).unwrap().to_owned();
        if head.starts_with("GET") {
            let body = match &*path {
                "/v1/models" => r#"{"object":"list","data":[{"id":"fake-model"}]}"#,
                "/metrics" => "vllm:num_preemptions_total{engine=\"0\"} 5\n",
                _ => "",
            };
            writer.write_all(&http(200, "text/plain", body)).unwrap();
            return;
        }
        if std::mem::take(&mut fresh) {
            connections.fetch_add(1, SeqCst);
        }
        let length = head
            .lines()
            .find_map(|l| {
                l.to_ascii_lowercase()
                    .strip_prefix("content-length:")
                    .map(str::trim)
                    .map(str::to_owned)
            })
            .and_then(|l| l.parse().ok())
            .unwrap();
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let request = {
            let mut all = received.lock().unwrap();
            let index = all.len();
            all.push(Received {
                path,
                headers: head,
                body: serde_json::from_slice(&body).unwrap(),
                index,
            });
            all.last().unwrap().clone()
        };
        match reply(&request) {
            Reply::Bytes(bytes) => {
                if writer.write_all(&bytes).is_err() {
                    return;
                }
            }
            Reply::Close(bytes) => {
                let _ = writer.write_all(&bytes);
                return;
            }
            Reply::Reset(bytes) => {
                let _ = writer.write_all(&bytes);
                // A linger time of 0 turns the close into a reset.
                rustix::net::sockopt::set_socket_linger(stream, Some(std::time::Duration::ZERO))
                    .unwrap();
                return;
            }
            Reply::Silence => {
                // Until the client closes.
                let _ = reader.read(&mut [0]);
                return;
            }
        }
    }
}

/// An answer with a length.
pub(crate) fn http(status: u16, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

pub(crate) const STREAM_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// One chunk.
pub(crate) fn chunk(data: &str) -> String {
    format!("{:x}\r\n{data}\r\n", data.len())
}

/// One event with text, for completions and chats alike.
pub(crate) fn token(text: &str) -> String {
    let text = serde_json::Value::from(text);
    chunk(&format!(
        "data: {{\"choices\":[{{\"text\":{text},\"delta\":{{\"content\":{text}}}}}]}}\n\n"
    ))
}

/// The end of a stream: usage, `[DONE]`, last chunk.
pub(crate) fn ending(prompt_tokens: u64, tokens: u64) -> String {
    let usage = format!(
        "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt_tokens},\
         \"completion_tokens\":{tokens},\"prompt_tokens_details\":{{\"cached_tokens\":2}}}}}}\n\n"
    );
    chunk(&usage) + &chunk("data: [DONE]\n\n") + "0\r\n\r\n"
}

/// A complete stream with the requested number of tokens.
pub(crate) fn stream(request: &Received) -> Vec<u8> {
    let mut text = String::from(STREAM_HEAD);
    for k in 0..request.max_tokens() {
        text += &token(&format!(" t{k}"));
    }
    text += &ending(10, request.max_tokens());
    text.into_bytes()
}
