//! Spans of requests, as a collector gets them: a scripted one, on loopback.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde_json::{Value, json};

use crate::engines::{Engine, PATIENCE, answer, front, stream_texts};
use crate::server::{FAST, Server};

/// A collector that answers each batch by a script, from its number.
struct CollectorServer {
    address: std::net::SocketAddr,
    batches: Arc<Mutex<Vec<Value>>>,
    over: Arc<AtomicBool>,
}

impl CollectorServer {
    fn start(script: impl Fn(usize, &mut TcpStream) + Send + 'static) -> CollectorServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (batches, over): (Arc<Mutex<Vec<Value>>>, Arc<AtomicBool>) = Default::default();
        let (seen, is_over) = (batches.clone(), over.clone());
        std::thread::spawn(move || {
            let number = AtomicUsize::new(0);
            for stream in listener.incoming() {
                if is_over.load(Relaxed) {
                    return;
                }
                let mut stream = stream.unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                if let Some(batch) = read_batch(&stream) {
                    seen.lock().unwrap().push(batch);
                    script(number.fetch_add(1, Relaxed), &mut stream);
                }
            }
        });
        CollectorServer {
            address,
            batches,
            over,
        }
    }

    /// One that takes everything.
    fn taking() -> CollectorServer {
        CollectorServer::start(|_, stream| answer(stream, "200 OK", "", b"{}"))
    }

    fn flag(&self) -> String {
        format!("--set=live.otlp_endpoint=\"http://{}\"", self.address)
    }

    fn spans(&self) -> Vec<Value> {
        let batches = self.batches.lock().unwrap();
        let spans = batches.iter().flat_map(|batch| {
            let spans = &batch["resourceSpans"][0]["scopeSpans"][0]["spans"];
            spans.as_array().expect("spans").clone()
        });
        spans.collect()
    }

    /// The spans once there are `count`.
    fn await_spans(&self, count: usize) -> Vec<Value> {
        let begun = Instant::now();
        loop {
            let spans = self.spans();
            if spans.len() >= count {
                return spans;
            }
            assert!(begun.elapsed() < PATIENCE, "{count} spans in {spans:?}");
            std::thread::yield_now();
        }
    }
}

impl Drop for CollectorServer {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

fn read_batch(stream: &TcpStream) -> Option<Value> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    assert_eq!(line, "POST /v1/traces HTTP/1.1\r\n");
    let (mut length, mut is_json) = (0, false);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim_end().to_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        is_json |= header == "content-type: application/json";
    }
    assert!(is_json, "a batch says its type");
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(serde_json::from_slice(&body).expect("JSON"))
}

/// The value of an attribute.
fn attribute(span: &Value, key: &str) -> Option<Value> {
    let all = span["attributes"].as_array().expect("attributes");
    let mut found = all.iter().filter(|of| of["key"] == key);
    let value = found.next()?["value"].clone();
    assert!(found.next().is_none(), "{key} is there twice");
    let of_kind = value.as_object().expect("a value").values().next();
    of_kind.cloned()
}

fn time(value: &Value) -> u64 {
    value.as_str().expect("a string").parse().expect("ns")
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const STREAM: &str = r#"{"model":"m","prompt":"Once","max_tokens":9,"stream":true}"#;

fn post(server: &Server, headers: &[&str]) -> u16 {
    let mut client = server.connect();
    let got = client.send("POST", "/v1/completions", headers, STREAM.as_bytes());
    got.status
}

#[test]
fn a_sampled_request_has_one_span_between_its_client_and_its_engine() {
    let collector = CollectorServer::taking();
    // One of them is busy, so the other gets the request as well.
    let busy = Engine::start(|_, stream| answer(stream, "503 Busy", "", b"{}"));
    let good = Engine::start(|_, stream| stream_texts(stream, "a", &["one", "two"]));
    let policy = "--set=router.policy=\"round_robin\"";
    let server = front(&[&busy, &good], &[&collector.flag(), policy]);
    let sampled = format!("traceparent: 00-{TRACE}-00f067aa0ba902b7-01");
    let state = "tracestate: vendor=1";
    let id = "X-Request-Id: mine";
    for _ in 0..2 {
        assert_eq!(post(&server, &[&sampled, state, id]), 200);
    }
    let spans = collector.await_spans(2);
    let attempts = spans
        .iter()
        .map(|span| attribute(span, "slipstream.attempts").unwrap());
    let attempts: Vec<usize> = attempts
        .map(|of| of.as_str().unwrap().parse().unwrap())
        .collect();
    assert!(
        attempts.contains(&2),
        "one came to the busy engine first: {attempts:?}"
    );
    let got = good.seen().len() + busy.seen().len();
    assert_eq!(attempts.iter().sum::<usize>(), got, "{attempts:?}");
    for span in &spans {
        assert_eq!(span["traceId"], TRACE);
        assert_eq!(span["parentSpanId"], "00f067aa0ba902b7");
        assert_eq!(
            (&span["kind"], &span["name"]),
            (&json!(2), &json!("POST /v1/completions"))
        );
        assert_eq!(
            attribute(span, "http.response.status_code"),
            Some(json!("200"))
        );
        assert_eq!(
            attribute(span, "slipstream.request_id"),
            Some(json!("mine"))
        );
        assert_eq!(attribute(span, "slipstream.end"), Some(json!("complete")));
        assert_eq!(attribute(span, "gen_ai.request.model"), Some(json!("m")));
        let url = format!("http://{}", good.address);
        assert_eq!(attribute(span, "slipstream.engine"), Some(json!(url)));
        assert_eq!(attribute(span, "error.type"), None);
        let (begun, ended) = (
            time(&span["startTimeUnixNano"]),
            time(&span["endTimeUnixNano"]),
        );
        let first = &span["events"][0];
        assert_eq!(first["name"], "first_token");
        let first = time(&first["timeUnixNano"]);
        assert!(begun <= first && first <= ended, "{begun} {first} {ended}");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.unwrap().as_nanos() as u64;
        assert!(now - ended < PATIENCE.as_nanos() as u64, "wall-clock time");
    }
    // The engines' spans are children of the router's, in the client's trace.
    let ids: Vec<String> = spans
        .iter()
        .map(|span| format!("00-{TRACE}-{}-01", span["spanId"].as_str().unwrap()))
        .collect();
    let seen = good.seen();
    for request in seen.iter().chain(&busy.seen()) {
        let parent = request.header("traceparent").unwrap().to_owned();
        assert!(ids.contains(&parent), "{parent}: {ids:?}");
        assert_eq!(request.header("tracestate"), Some("vendor=1"));
    }
    assert_ne!(ids[0], ids[1]);
    server.await_metric("slipstream_trace_spans_exported_total", |count| {
        count == 2.0
    });
    let resource = collector.batches.lock().unwrap()[0]["resourceSpans"][0]["resource"].clone();
    assert_eq!(
        attribute(&resource, "service.name"),
        Some(json!("slipstream"))
    );
}

#[test]
fn a_request_that_is_not_sampled_has_no_span() {
    let collector = CollectorServer::taking();
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["one"]));
    let server = front(
        &[&engine],
        &[&collector.flag(), "--set=live.trace_sample=1.0"],
    );
    let unsampled = format!("00-{TRACE}-00f067aa0ba902b7-00");
    let header = format!("traceparent: {unsampled}");
    assert_eq!(post(&server, &[&header]), 200);
    assert_eq!(server.get("/health").status, 200);
    // One without a trace begins one, by `trace_sample`: the last, so that the others would be there.
    assert_eq!(post(&server, &[]), 200);
    let spans = collector.await_spans(1);
    assert_eq!(spans.len(), 1, "{spans:?}");
    assert_eq!(spans[0]["parentSpanId"], Value::Null);
    let root = format!(
        "00-{}-{}-01",
        spans[0]["traceId"].as_str().unwrap(),
        spans[0]["spanId"].as_str().unwrap()
    );
    let seen = engine.seen();
    assert_eq!(seen[0].header("traceparent"), Some(&*unsampled));
    assert_eq!(seen[1].header("traceparent"), Some(&*root));
}

/// Regression by design: nothing waits for a collector.
#[test]
fn a_collector_that_never_answers_delays_no_request() {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let collector = CollectorServer::start(move |_, _| {
        let _ = held.recv(); // until the test ends
    });
    let flags = [collector.flag(), "--set=live.shards=1".to_owned()];
    let server = Server::start(&[FAST, &[&flags[0], &flags[1]]]);
    let header = format!("traceparent: 00-{TRACE}-00f067aa0ba902b7-01");
    // More than may wait (4,096), and those that are being sent (512), also if that is given up.
    const REQUESTS: usize = 6_000;
    let mut client = server.connect();
    for _ in 0..REQUESTS {
        let got = client.send("GET", "/v1/models", &[&header], b"");
        assert_eq!(got.status, 200);
    }
    let dropped = server.metric("slipstream_trace_spans_dropped_total{reason=\"queue\"}");
    assert!(dropped > 0.0, "all of {REQUESTS} wait");
    assert_eq!(server.metric("slipstream_trace_spans_exported_total"), 0.0);
    // Nor does it hold the exit up for longer than its limit.
    let begun = Instant::now();
    assert!(server.terminate().success());
    assert!(begun.elapsed() < PATIENCE);
    drop(hold);
}

#[test]
fn a_batch_is_sent_again_if_the_collector_asks_for_it() {
    let collector = CollectorServer::start(|number, stream| match number {
        0 => answer(stream, "503 Busy", "retry-after: 0\r\n", b""),
        1 => answer(stream, "200 OK", "", b"{\"partialSuccess\":{}}"),
        2 => answer(stream, "400 Bad", "", b"no"),
        _ => answer(
            stream,
            "200 OK",
            "",
            br#"{"partialSuccess":{"rejectedSpans":"1"}}"#,
        ),
    });
    let server = Server::start(&[FAST, &[&collector.flag(), "--set=live.trace_sample=1"]]);
    let dropped =
        |reason: &str| format!("slipstream_trace_spans_dropped_total{{reason=\"{reason}\"}}");
    for (done, name) in [
        (1.0, "slipstream_trace_spans_exported_total".to_owned()),
        (1.0, dropped("send")),
        (1.0, dropped("rejected")),
    ] {
        assert_eq!(server.get("/v1/models").status, 200);
        server.await_metric(&name, |count| count == done);
    }
    let spans = collector.spans();
    assert_eq!(spans.len(), 4);
    assert_eq!(spans[0], spans[1], "the same batch");
    assert_eq!(server.metric("slipstream_trace_spans_exported_total"), 1.0);
}

#[test]
fn an_endpoint_that_cannot_be_used_is_refused() {
    for (url, hint) in [
        ("https://a:4318", "encrypted"),
        ("a:4318", "http://"),
        ("http://a:4318/v1/traces", "appended"),
    ] {
        let flag = format!("--set=live.otlp_endpoint=\"{url}\"");
        let (code, _, errors) = crate::server::run(&["serve", "--listen=127.0.0.1:0", &flag]);
        assert_eq!(code, Some(2), "{errors}");
        assert!(
            errors.contains("otlp_endpoint") && errors.contains(hint),
            "{errors}"
        );
    }
}
