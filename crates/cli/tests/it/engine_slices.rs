//! Engines that Kubernetes lists, from an API server that answers by a script.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::engines::{Engine, PATIENCE, answer, chunk, say, say_text};
use crate::server::{Server, run};

/// A slice with one endpoint.
fn slice(name: &str, engine: &Engine, ready: bool) -> Value {
    json!({
        "metadata": {"name": name}, "addressType": "IPv4",
        "ports": [{"name": "http", "port": engine.address.port()}, {"name": "metrics", "port": 1}],
        "endpoints": [{"addresses": [engine.address.ip().to_string()], "conditions": {"ready": ready}}],
    })
}

/// The answer to the next request.
enum Reply {
    Status(&'static str),
    /// A list of this version.
    List(&'static str, Vec<Value>),
    /// Events of a watch, which then ends or stays open.
    Watch(Vec<Value>, bool),
}

fn event(kind: &str, version: &str, mut object: Value) -> Value {
    object["metadata"]["resourceVersion"] = version.into();
    json!({"type": kind, "object": object})
}

/// An API server: what it was asked, and what it answers next.
struct Api {
    address: SocketAddr,
    asked: Receiver<String>,
    replies: Sender<Reply>,
}

impl Api {
    fn start() -> Api {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (ask, asked) = channel();
        let (replies, next) = channel::<Reply>();
        let next = Arc::new(Mutex::new(next));
        std::thread::spawn(move || {
            let mut open = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let mut head = String::new();
                while reader.read_line(&mut head).is_ok_and(|read| read > 2) {}
                if ask.send(head).is_err() {
                    return;
                }
                let Ok(reply) = next.lock().unwrap().recv() else {
                    return;
                };
                match reply {
                    Reply::Status(status) => answer(&mut stream, status, "", b"{}"),
                    Reply::List(version, items) => {
                        let list =
                            json!({"metadata": {"resourceVersion": version}, "items": items});
                        answer(&mut stream, "200 OK", "", list.to_string().as_bytes());
                    }
                    Reply::Watch(events, stays) => {
                        say(
                            &mut stream,
                            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
                        );
                        let lines: Vec<String> = events.iter().map(Value::to_string).collect();
                        let text = lines.join("\n") + "\n";
                        // Cut anywhere.
                        for piece in text.as_bytes().chunks(50) {
                            chunk(&mut stream, std::str::from_utf8(piece).unwrap());
                        }
                        if stays {
                            open.push(stream);
                        } else {
                            say(&mut stream, b"0\r\n\r\n");
                        }
                    }
                }
            }
        });
        Api {
            address,
            asked,
            replies,
        }
    }

    /// The path of the next request, and `reply` to it.
    #[track_caller]
    fn reply(&self, reply: Reply) -> String {
        self.replies.send(reply).unwrap();
        let head = self.asked.recv_timeout(PATIENCE).expect("a request");
        assert!(
            !head.to_lowercase().contains("authorization"),
            "over plain text: {head}"
        );
        head.split(' ').nth(1).expect("a path").to_owned()
    }

    fn router(&self) -> Server {
        Server::start(&[&[
            "--set=pool.a.endpoint_slices=\"app=vllm,tier in (gpu)\"",
            "--set=pool.a.endpoint_port=\"http\"",
            "--set=upstream.kubernetes_namespace=\"serving\"",
            "--set=upstream.drain_timeout_s=0.01",
            &format!("--set=upstream.kubernetes_url=\"http://{}\"", self.address),
        ]])
    }
}

fn saying(word: &'static str) -> Engine {
    Engine::start(move |_, stream| say_text(stream, word))
}

/// Waits until requests are answered by exactly these engines.
#[track_caller]
fn await_engines(server: &Server, engines: &[&Engine]) {
    let mut expected: Vec<String> = engines
        .iter()
        .map(|engine| format!("http://{}", engine.address))
        .collect();
    expected.sort();
    let begun = std::time::Instant::now();
    loop {
        let list = server.get("/health").json()["engines"].clone();
        let mut up: Vec<String> = list
            .as_array()
            .unwrap()
            .iter()
            .filter(|of| of["state"] == "up")
            .map(|of| of["url"].as_str().unwrap().to_owned())
            .collect();
        up.sort();
        if up == expected {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{list}, not {expected:?}");
        std::thread::yield_now();
    }
}

const LIST: &str = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices?labelSelector=app%3Dvllm%2Ctier%20in%20%28gpu%29";

fn watch_from(version: &str) -> String {
    format!("{LIST}&watch=1&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion={version}")
}

#[test]
fn engines_follow_endpoint_slices_through_lists_watches_and_expired_versions() {
    let api = Api::start();
    let (a, b, c) = (saying("a"), saying("b"), saying("c"));
    let server = api.router();
    let listed = vec![slice("s1", &a, true), slice("s2", &b, false)];
    assert_eq!(api.reply(Reply::List("10", listed)), LIST);
    // The watch ends in time: the next one continues from the bookmark, without a list.
    let bookmark = json!({"kind": "EndpointSlice", "metadata": {}});
    let events = vec![
        event("ADDED", "11", slice("s3", &c, true)),
        event("BOOKMARK", "15", bookmark),
    ];
    assert_eq!(api.reply(Reply::Watch(events, false)), watch_from("10"));
    let events = vec![event("MODIFIED", "16", slice("s2", &b, true))];
    assert_eq!(api.reply(Reply::Watch(events, false)), watch_from("15"));
    // As the server says it in a watch, and as a status: both mean a new list.
    let expired =
        json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}});
    assert_eq!(
        api.reply(Reply::Watch(vec![expired], false)),
        watch_from("16")
    );
    let listed = vec![slice("s2", &b, true), slice("s3", &c, true)];
    assert_eq!(api.reply(Reply::List("30", listed)), LIST);
    assert_eq!(api.reply(Reply::Status("410 Gone")), watch_from("30"));
    let listed = vec![slice("s2", &b, true), slice("s3", &c, true)];
    assert_eq!(api.reply(Reply::List("40", listed)), LIST);
    let events = vec![event("DELETED", "41", slice("s3", &c, true))];
    assert_eq!(api.reply(Reply::Watch(events, true)), watch_from("40"));
    await_engines(&server, &[&b]);
    let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
    assert_eq!((got.status, got.said()), (200, "b".into()));
    assert!(
        server.terminate().success(),
        "an open watch does not hold an exit up"
    );
}

#[test]
fn engines_stay_while_the_api_server_fails() {
    let api = Api::start();
    let a = saying("a");
    let server = api.router();
    assert_eq!(api.reply(Reply::Status("403 Forbidden")), LIST);
    assert_eq!(
        api.reply(Reply::List("1", vec![slice("s", &a, true)])),
        LIST
    );
    assert_eq!(api.reply(Reply::Status("500 Broken")), watch_from("1"));
    await_engines(&server, &[&a]);
    // All are gone, as the server has it after a fault: that is not believed.
    let events = vec![event("DELETED", "2", slice("s", &a, true))];
    assert_eq!(api.reply(Reply::Watch(events, false)), watch_from("1"));
    assert_eq!(api.reply(Reply::Watch(Vec::new(), true)), watch_from("2"));
    await_engines(&server, &[&a]);
    assert_eq!(
        server.post("/v1/completions", "{\"model\":\"m\"}").said(),
        "a"
    );
}

#[test]
fn without_an_api_server_the_remedy_is_named() {
    let (code, _, errors) = run(&[
        "serve",
        "--listen=127.0.0.1:0",
        "--set=pool.a.endpoint_slices=\"app=x\"",
    ]);
    assert_ne!(code, Some(0));
    assert!(errors.contains("kubernetes_url"), "{errors}");
    let (code, _, errors) = run(&["serve", "--set=pool.a.endpoint_port=\"http\""]);
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("endpoint_slices"), "{errors}");
}
