//! Starts `slipstream serve` on a free port, and speaks HTTP with it byte by byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Time limit, longer than any operation here; a test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running server; killed when dropped.
pub(crate) struct Server {
    child: Child,
    address: SocketAddr,
}

/// Modelled time without waiting, passes of a known length, two workers.
pub(crate) const FAST: &[&str] = &[
    "--speedup=0",
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=1000000",
    "--set=engine.num_gpu_blocks=1024",
    "--set=engine.max_model_len=4096",
];

/// [`FAST`] with passes of an hour: requests stay in flight.
pub(crate) const FROZEN: &[&str] = &[
    "--speedup=1",
    "--set=model.name=test-model",
    "--set=pool.main.workers=1",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=3600000000000",
    "--set=engine.num_gpu_blocks=1024",
    "--set=engine.max_model_len=4096",
];

/// Overrides of [`FAST`]: an answer larger than any socket buffer fits.
pub(crate) const LONG: &[&str] = &[
    "--set=model.preset=llama-3.1-8b",
    "--set=engine.max_model_len=131072",
    "--set=engine.num_gpu_blocks=10000",
];

impl Server {
    pub(crate) fn start(args: &[&[&str]]) -> Server {
        let mut command = slipstream();
        command.arg("serve").args(args.concat());
        Server::spawn(command)
    }

    /// Starts a command that serves HTTP.
    pub(crate) fn spawn(mut command: Command) -> Server {
        command.arg("--listen=127.0.0.1:0");
        Server::spawn_as_it_is(command)
    }

    /// As [`Server::spawn`], with the address that the command has.
    pub(crate) fn spawn_as_it_is(mut command: Command) -> Server {
        command.stderr(Stdio::inherit());
        Server::spawn_with_stderr(command)
    }

    pub(crate) fn spawn_with_stderr(mut command: Command) -> Server {
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped"))
            .read_line(&mut line)
            .expect("the server prints its address");
        let address = line
            .trim()
            .strip_prefix("listening on http://")
            .unwrap_or_else(|| panic!("the address comes first, not {line:?}"))
            .parse()
            .expect("an address");
        Server { child, address }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn connect(&self) -> Client {
        Client::connect(self.address)
    }

    /// One request on a separate connection.
    pub(crate) fn send(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        self.connect().send(method, path, &[], body)
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.send("POST", path, body.as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.send("GET", path, b"")
    }

    /// Value of a series, if `name` has labels; otherwise of the metric, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let value = self.try_metric(name);
        value.unwrap_or_else(|| panic!("no metric {name}"))
    }

    /// [`Server::metric`]; `None` while the metric has no value.
    pub(crate) fn try_metric(&self, name: &str) -> Option<f64> {
        let text = self.get("/metrics").text();
        let values = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let plain = series.split('{').next()?;
            (series == name || plain == name).then(|| value.parse::<f64>().expect("a number"))
        });
        let values: Vec<f64> = values.collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// Polls `/metrics` until `reached` holds for `name`.
    pub(crate) fn await_metric(&self, name: &str, reached: impl Fn(f64) -> bool) {
        let start = std::time::Instant::now();
        loop {
            let value = self.try_metric(name);
            if value.is_some_and(&reached) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{name} is still {value:?}");
            std::thread::yield_now();
        }
    }

    /// Checks that the server still answers others: after each violation.
    pub(crate) fn assert_alive(&self) {
        let answer = self.post(
            "/v1/completions",
            r#"{"prompt":"hello","max_tokens":3,"ignore_eos":true}"#,
        );
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["usage"]["completion_tokens"], 3);
    }

    /// Kills it without a clean shutdown.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([signal, &id]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Requests a shutdown, and waits until it has ended.
    pub(crate) fn terminate(mut self) -> std::process::ExitStatus {
        let id = self.child.id().to_string();
        let killed = Command::new("kill")
            .args(["-TERM", &id])
            .status()
            .expect("kill runs");
        assert!(killed.success());
        self.child.wait().expect("the server ends")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn slipstream() -> Command {
    Command::new(env!("CARGO_BIN_EXE_slipstream"))
}

/// A command's stderr, and its exit status.
pub(crate) fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let output = slipstream()
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the binary runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// An HTTP connection.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client(BufReader::new(stream))
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.0
            .get_mut()
            .write_all(bytes)
            .expect("the server takes the request");
    }

    pub(crate) fn shutdown_write(&self) {
        self.0.get_ref().shutdown(Shutdown::Write).unwrap();
    }

    pub(crate) fn write_head(&mut self, method: &str, path: &str, headers: &[&str], len: usize) {
        let content = format!("Content-Type: application/json\r\nContent-Length: {len}");
        let mut lines = vec!["Host: test"];
        lines.extend_from_slice(headers);
        if method == "POST" {
            lines.push(&content);
        }
        let head = format!("{method} {path} HTTP/1.1\r\n{}\r\n\r\n", lines.join("\r\n"));
        self.write(head.as_bytes());
    }

    pub(crate) fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[&str],
        body: &[u8],
    ) -> Answer {
        self.write_head(method, path, headers, body.len());
        self.write(body);
        self.answer()
    }

    /// Reads the status line and the headers.
    pub(crate) fn head(&mut self) -> Answer {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        let status = line
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .unwrap_or_else(|| panic!("a status line, not {line:?}"));
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).expect("a header");
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                break;
            };
            headers.push((name.to_lowercase(), value.to_owned()));
        }
        Answer {
            status,
            headers,
            body: Vec::new(),
        }
    }

    /// Reads a whole answer.
    pub(crate) fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        if let Some(len) = answer.header("content-length") {
            let mut body = vec![0; len.parse().expect("a length")];
            self.0.read_exact(&mut body).expect("the whole body");
            answer.body = body;
        } else if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk() {
                answer.body.extend_from_slice(&chunk);
            }
        }
        answer
    }

    /// The next chunk of a chunked body; `None` at its end.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let mut size = String::new();
        self.0.read_line(&mut size).expect("a chunk size");
        let size = usize::from_str_radix(size.trim(), 16)
            .unwrap_or_else(|_| panic!("a chunk size, not {size:?}"));
        let mut chunk = vec![0; size + 2];
        self.0.read_exact(&mut chunk).expect("a chunk");
        chunk.truncate(size);
        (size > 0).then_some(chunk)
    }

    /// Whether the server has closed the connection, or written bytes without a request, so far.
    pub(crate) fn is_stale(&self) -> bool {
        let stream = self.0.get_ref();
        stream.set_nonblocking(true).unwrap();
        let stale = stream.peek(&mut [0]).is_ok();
        stream.set_nonblocking(false).unwrap();
        stale
    }

    /// Whether the server has closed the connection: nothing is left to read.
    pub(crate) fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.0.read(&mut byte), Ok(0) | Err(_))
    }
}

/// An HTTP answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// The text of a completion that is not streamed.
    pub(crate) fn said(&self) -> String {
        let text = &self.json()["choices"][0]["text"];
        text.as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }

    pub(crate) fn error(&self) -> String {
        self.json()["error"]["message"]
            .as_str()
            .expect("an error message")
            .to_owned()
    }

    /// Payloads of the events of a stream, `[DONE]` included.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "));
        events.map(str::to_owned).collect()
    }
}
