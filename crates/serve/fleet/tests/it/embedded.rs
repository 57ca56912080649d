//! Tests the example `two_engines`, a program that embeds a router.

#[path = "../../examples/two_engines.rs"]
mod two_engines;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

/// Time limit, longer than any operation here.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads a request, and returns its path.
fn request(stream: &mut BufReader<&TcpStream>) -> Option<String> {
    let (mut path, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if path.is_none() {
            path = Some(line.split(' ').nth(1)?.to_owned());
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok()?;
        }
        if line.is_empty() {
            stream.read_exact(&mut vec![0; length]).ok()?;
            return path;
        }
    }
}

/// An engine that serves the model `m`. It reports each completion to `came`, and answers once another one has come to an
/// engine of `both`. It ends with the process.
fn engine(text: &'static str, came: mpsc::Sender<&'static str>, both: Arc<Barrier>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let converse = move |stream: &TcpStream| {
        let mut reader = BufReader::new(stream);
        while let Some(path) = request(&mut reader) {
            let (status, body) = match &*path {
                "/health" => ("200 OK", String::new()),
                "/v1/models" => (
                    "200 OK",
                    r#"{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"vllm"}]}"#.into(),
                ),
                "/v1/completions" => (
                    "200 OK",
                    {
                        came.send(text).unwrap();
                        both.wait();
                        format!(
                        r#"{{"id":"1","object":"text_completion","created":1,"model":"m","choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":"length"}}],"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}}}"#
                        )
                    },
                ),
                _ => ("404 Not Found", String::new()),
            };
            let head = format!(
                "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            if (&*stream).write_all(head.as_bytes()).is_err() {
                return;
            }
        }
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let converse = converse.clone();
            std::thread::spawn(move || converse(&stream));
        }
    });
    address
}

/// Sends a completion of a prompt of its own, and returns the answer with its head.
fn complete(router: SocketAddr, number: u32) -> String {
    let body = format!(r#"{{"model":"m","prompt":"{number} a","max_tokens":1}}"#);
    let mut stream = TcpStream::connect(router).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_program_routes_to_two_engines_and_stops() {
    let (came, arrivals) = mpsc::channel();
    let both = Arc::new(Barrier::new(2));
    let engine = |text| engine(text, came.clone(), both.clone());
    let urls = [engine("first"), engine("second")].map(|address| format!("http://{address}"));
    let router = two_engines::serve("127.0.0.1:0", &urls).unwrap();
    assert_eq!(router.summary(), "serving 2 engines (2 ready)");
    let to = router.address();
    // The second is sent while the first is under way, so it goes to the idle engine.
    let mut texts = BTreeSet::new();
    let clients = [0, 1].map(|number| {
        let client = std::thread::spawn(move || complete(to, number));
        texts.insert(
            arrivals
                .recv_timeout(PATIENCE)
                .expect("it reaches an engine"),
        );
        client
    });
    assert_eq!(texts, BTreeSet::from(["first", "second"]));
    let answers = clients.map(|client| client.join().unwrap());
    for (answer, text) in answers.iter().zip(&texts) {
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(
            answers.iter().any(|answer| answer.contains(text)),
            "{answers:?}"
        );
    }
    let address = router.address();
    router.shutdown();
    assert!(TcpStream::connect(address).is_err(), "nothing listens");
}

#[test]
fn a_file_that_no_router_can_follow_is_refused_with_the_key() {
    let refused = |keys: &str| {
        let text = format!("{keys}\n[pool.main]\nengines = [\"http://127.0.0.1:1\"]\n");
        let doc = slipstream_config::doc::Doc::parse("c.toml", text.as_bytes());
        let (cluster, _) =
            slipstream_config::cluster::file::read(doc, |path| std::fs::read(path)).unwrap();
        let bound = slipstream_fleet::Bound::bind("127.0.0.1:0").unwrap();
        let options = slipstream_fleet::RouterOptions::default();
        let error = slipstream_fleet::RouterServer::start(&cluster, bound, options).err();
        format!(
            "{:#}",
            error.unwrap_or_else(|| panic!("{keys} is accepted"))
        )
    };
    for (keys, named) in [
        ("[live.faults]\nerror_500 = 0.5", "live.faults"),
        (
            "[live]\nadmin_key_file = \"/dev/null/none\"",
            "live.admin_key_file",
        ),
        (
            "[live]\napi_keys_file = \"/dev/null/none\"",
            "live.api_keys_file",
        ),
        (
            "[upstream]\nadmin_key_file = \"/dev/null/none\"",
            "admin_key_file",
        ),
        (
            "[upstream]\nengines_max = 1\n[autoscale]\npolicy = \"queue\"\nworkers_max = 4",
            "upstream.engines_max",
        ),
    ] {
        let said = refused(keys);
        assert!(said.contains(named), "{keys}: {said}");
    }
}

#[test]
fn a_cluster_without_engines_is_refused() {
    let bound = slipstream_fleet::Bound::bind("127.0.0.1:0").unwrap();
    let options = slipstream_fleet::RouterOptions::default();
    let cluster = slipstream_config::cluster::Cluster::default();
    let error = slipstream_fleet::RouterServer::start(&cluster, bound, options).err();
    let said = format!("{:#}", error.expect("there is nothing to route to"));
    assert!(said.contains("pool.NAME.engines"), "{said}");
}
