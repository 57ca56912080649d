//! The load generator against a correct server, and against a faulty one.

mod fake;

use std::fmt::Write as _;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use fake::{Fake, Received, Reply, STREAM_HEAD, chunk, ending, http, stream, token};
use proptest::prelude::*;
use slipstream_base::Stage;
use slipstream_bench::answer::Answer;
use slipstream_bench::http::Parser;
use slipstream_bench::{BenchError, Config, Endpoint, Outcome, PromptForm, Target, run};
use slipstream_config::workload_file::{
    Arrival, Class, Content, Dist, OnBadLine, SessionShape, TraceFile, Workload,
};
use slipstream_report::{DragReader, DragRecord, Objectives, RunReport};
use slipstream_workload::Vocabulary;

fn workload(arrival: Arrival, requests: u64, isl: f64, osl: f64) -> Workload {
    Workload {
        seed: 1,
        requests: Some(requests),
        arrival,
        content: Content::Generated(vec![Class {
            isl: Dist::Exact(isl),
            osl: Dist::Exact(osl),
            ..Class::default()
        }]),
        ..Workload::default()
    }
}

fn closed(concurrency: u32, requests: u64) -> Workload {
    workload(Arrival::Closed { concurrency }, requests, 10.0, 5.0)
}

fn config(fake: &Fake, workload: Workload) -> Config {
    Config {
        target: Target::resolve(&fake.url()).unwrap(),
        endpoint: Endpoint::Completions,
        form: PromptForm::Text,
        stream: true,
        model: None,
        api_key: None,
        headers: Vec::new(),
        workload,
        workload_name: "test".into(),
        vocabulary: Vocabulary::english(),
        token_ids: 10..20,
        slo: Objectives::default(),
        warmup: 0,
        timeout: Duration::from_secs(30),
        connect_timeout: Duration::from_secs(5),
        threads: 1,
        in_flight_max: 100,
        retries: 0,
        drag: None,
        series: false,
        trace_stages: false,
        server_pids: Vec::new(),
        scrape_metrics: false,
        label: "test".into(),
        wait_ready: Duration::ZERO,
        catch_interrupt: false,
    }
}

fn bench(config: Config) -> RunReport {
    run(config, &mut |_| {}).map(|o: Outcome| o.report).unwrap()
}

/// One request against `reply`: the category that its failure is counted in, and the example.
fn check_failure(reply: impl Fn(&Received) -> Reply + Send + Sync + 'static) -> (String, String) {
    let fake = Fake::start(reply);
    let report = bench(config(&fake, closed(1, 1)));
    assert_eq!((report.requests.sent, report.requests.failed), (1, 1));
    let (kind, error) = report.errors.into_iter().next().unwrap();
    (kind, error.example)
}

#[test]
fn a_closed_loop_counts_right_and_keeps_its_connections() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let report = bench(config(&fake, closed(4, 40)));
    assert_eq!((report.requests.sent, report.requests.succeeded), (40, 40));
    assert_eq!((report.tokens.output, report.tokens.events), (200, 200));
    assert_eq!((report.tokens.input, report.tokens.cached), (400, Some(80)));
    assert_eq!(report.latency.ttft_ms.unwrap().count, 40);
    assert_eq!(report.latency.itl_ms.unwrap().count, 160);
    assert_eq!(report.latency.tpot_ms.unwrap().count, 40);
    assert_eq!(report.model, "fake-model");
    assert!(report.throughput.output_tokens_per_s > 0.0);
    assert!(report.client.unwrap().cpu_s > 0.0);
    assert!(fake.connections.load(SeqCst) <= 4);
}

#[test]
fn requests_are_as_the_workload_says() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let mut config = config(&fake, closed(1, 3));
    config.api_key = Some("secret".into());
    config.headers = vec!["x-tenant: a".into()];
    bench(config);
    for request in fake.received.lock().unwrap().iter() {
        assert_eq!(request.path, "/v1/completions");
        assert_eq!(request.prompt().split_ascii_whitespace().count(), 10);
        assert_eq!(request.header("authorization").unwrap(), "Bearer secret");
        assert_eq!(request.header("x-tenant").unwrap(), "a");
        assert_eq!(
            request.header("x-request-id").unwrap(),
            format!("bench-{}.0", request.index)
        );
        assert_eq!(request.body["ignore_eos"], true);
    }
}

#[test]
fn threads_and_repetitions_send_the_same_bytes() {
    let bodies = |threads| {
        let fake = Fake::start(|r| Reply::Bytes(stream(r)));
        let mut config = config(&fake, closed(6, 30));
        config.threads = threads;
        assert_eq!(bench(config).requests.succeeded, 30);
        fake.bodies()
    };
    let one = bodies(1);
    assert_eq!(one, bodies(1));
    assert_eq!(one, bodies(3));
}

#[test]
fn an_open_loop_sends_without_waiting_for_answers() {
    // The server answers only when all five have arrived; a closed loop would hang.
    let count = Arc::new((Mutex::new(0), Condvar::new()));
    let fake = Fake::start(move |r| {
        let (arrived, all) = &*count;
        *arrived.lock().unwrap() += 1;
        all.notify_all();
        drop(all.wait_while(arrived.lock().unwrap(), |n| *n < 5).unwrap());
        Reply::Bytes(stream(r))
    });
    let ms = vec![0.0, 1.0, 2.0, 2.0, 3.5];
    let report = bench(config(
        &fake,
        workload(Arrival::Timestamps { ms }, 5, 10.0, 5.0),
    ));
    assert_eq!(report.requests.succeeded, 5);
}

#[test]
fn waiting_for_a_slow_server_counts_from_when_a_request_was_due() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let drag = tempfile::NamedTempFile::new().unwrap();
    // All are due at once, but only one may be in flight: the wait must show.
    let arrival = Arrival::Timestamps { ms: vec![0.0; 4] };
    let mut config = config(&fake, workload(arrival, 4, 10.0, 5.0));
    config.in_flight_max = 1;
    config.drag = Some(drag.path().into());
    bench(config);
    let rows = drag_rows(&drag);
    assert!(
        rows.iter()
            .all(|r| r.times.at(Stage::Due) == rows[0].times.at(Stage::Due))
    );
    for pair in rows.windows(2) {
        assert!(pair[1].times.at(Stage::ClientRecv) >= pair[0].times.at(Stage::LastClientRecv));
    }
}

fn drag_rows(file: &tempfile::NamedTempFile) -> Vec<DragRecord> {
    DragReader::new(std::fs::File::open(file.path()).unwrap())
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

#[test]
fn drag_records_hold_the_client_and_the_traced_stages() {
    let fake = Fake::start(|r| {
        assert_eq!(r.header("x-slipstream-trace").unwrap(), "1");
        let trace = ": slipstream-trace {\"stages\":{\"accept\":7,\"routed\":9},\"worker\":3,\"hit_blocks\":4,\"preemptions\":1}\n\n";
        let text = STREAM_HEAD.to_owned() + &chunk(trace) + &token(" a") + &ending(10, 1);
        Reply::Bytes(text.into_bytes())
    });
    let drag = tempfile::NamedTempFile::new().unwrap();
    let mut config = config(&fake, closed(2, 6));
    config.drag = Some(drag.path().into());
    config.trace_stages = true;
    bench(config);
    let rows = drag_rows(&drag);
    assert_eq!(rows.len(), 6);
    for row in rows {
        let at = |stage| row.times.at(stage).unwrap();
        assert!(at(Stage::Due) <= at(Stage::ClientRecv));
        assert!(at(Stage::ClientRecv) <= at(Stage::LastClientRecv));
        assert_eq!((at(Stage::Accept), at(Stage::Routed)), (7, 9));
        assert_eq!(
            (row.worker, row.hit_blocks[0], row.preemptions),
            (Some(3), Some(4), Some(1))
        );
        assert_eq!((row.isl, row.osl, &*row.status), (Some(10), Some(1), "ok"));
    }
}

#[test]
fn a_session_repeats_what_was_answered() {
    let fake = Fake::start(|r| {
        let text =
            STREAM_HEAD.to_owned() + &token(&format!(" \"said {}\"\n", r.index)) + &ending(10, 5);
        Reply::Bytes(text.into_bytes())
    });
    let mut workload = closed(1, 3);
    let Content::Generated(classes) = &mut workload.content else {
        unreachable!()
    };
    classes[0].session = SessionShape {
        turns: Dist::Exact(3.0),
        user_tokens: Dist::Exact(2.0),
        ..SessionShape::default()
    };
    let report = bench(config(&fake, workload));
    assert_eq!(report.requests.succeeded, 3);
    let received = fake.received.lock().unwrap();
    for k in 0..2 {
        let grown = format!("{} \"said {k}\"\n", received[k].prompt());
        let next = received[k + 1].prompt();
        assert!(
            next.starts_with(&grown),
            "{next:?} does not begin with {grown:?}"
        );
        assert_eq!(next[grown.len()..].split_ascii_whitespace().count(), 2);
        assert_eq!(received[k + 1].header("x-session-id").unwrap(), "0");
    }
}

#[test]
fn a_failed_turn_abandons_its_session() {
    let fake = Fake::start(|_| Reply::Bytes(http(500, "application/json", "{}")));
    let mut workload = closed(1, 4);
    let Content::Generated(classes) = &mut workload.content else {
        unreachable!()
    };
    classes[0].session.turns = Dist::Exact(4.0);
    let report = bench(config(&fake, workload));
    assert_eq!((report.requests.failed, report.requests.abandoned), (1, 3));
}

#[test]
fn warm_up_is_apart_and_has_other_texts() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let mut config = config(&fake, closed(2, 5));
    config.warmup = 3;
    let report = bench(config);
    assert_eq!((report.requests.sent, report.requests.warmup), (5, 3));
    assert_eq!(report.latency.ttft_ms.unwrap().count, 5);
    let mut bodies = fake.bodies();
    assert_eq!(bodies.len(), 8);
    bodies.dedup();
    assert_eq!(bodies.len(), 8);
}

#[test]
fn chats_and_whole_answers() {
    let fake = Fake::start(|r| {
        if r.path.ends_with("/chat/completions") {
            assert_eq!(r.body["messages"][0]["role"], "user");
            return Reply::Bytes(stream(r));
        }
        assert!(r.body.get("stream").is_none());
        let body =
            r#"{"choices":[{"text":" a b"}],"usage":{"prompt_tokens":10,"completion_tokens":2}}"#;
        Reply::Bytes(http(200, "application/json", body))
    });
    let chat = Config {
        endpoint: Endpoint::Chat,
        ..config(&fake, closed(1, 2))
    };
    assert_eq!(bench(chat).tokens.output, 10);
    let whole = Config {
        stream: false,
        ..config(&fake, closed(1, 2))
    };
    let report = bench(whole);
    assert_eq!((report.requests.succeeded, report.tokens.output), (2, 4));
    assert_eq!(report.latency.ttft_ms.unwrap().count, 2);
    assert_eq!(
        (report.latency.itl_ms, report.latency.tpot_ms),
        (None, None)
    );
}

#[test]
fn errors_are_counted_by_kind() {
    let begun = || STREAM_HEAD.to_owned() + &token(" a");
    let text = |s: String| s.into_bytes();
    let (kind, example) = check_failure(move |_| {
        let error = "data: {\"error\":{\"message\":\"worker w-3 is gone\"}}\n\n";
        Reply::Bytes(text(
            begun() + &chunk(error) + &chunk("data: [DONE]\n\n") + "0\r\n\r\n",
        ))
    });
    assert_eq!(
        (&*kind, &*example),
        ("error in the answer", "worker w-3 is gone")
    );
    let (kind, _) = check_failure(move |_| Reply::Reset(text(begun())));
    assert_eq!(kind, "connection reset");
    let (kind, _) = check_failure(move |_| Reply::Close(text(begun())));
    assert_eq!(kind, "closed in mid-answer");
    let (kind, example) = check_failure(move |_| Reply::Bytes(text(begun() + "0\r\n\r\n")));
    assert_eq!(
        (&*kind, &*example),
        ("no [DONE]", "the stream ended after 1 events")
    );
    let (kind, _) =
        check_failure(move |_| Reply::Bytes(http(200, "application/json", "{\"choices\":[]}")));
    assert_eq!(kind, "not a stream");
    let (kind, _) = check_failure(move |_| Reply::Close(b"220 smtp ready\r\n".to_vec()));
    assert_eq!(kind, "not HTTP");
    let (kind, _) = check_failure(move |_| {
        Reply::Bytes(text(
            STREAM_HEAD.to_owned() + &chunk("data: [DONE]\n\n") + "0\r\n\r\n",
        ))
    });
    assert_eq!(kind, "empty answer");
    let (kind, example) = check_failure(move |_| {
        let body = "{\"error\":{\"message\":\"all workers are busy\"}}";
        let head = "HTTP/1.1 503 X\r\nretry-after: 2\r\ncontent-length: 44\r\n\r\n";
        Reply::Bytes(text(head.to_owned() + body))
    });
    assert_eq!(
        (&*kind, &*example),
        ("http 503", "all workers are busy (retry after 2 s)")
    );
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let fake = Fake::start(|_| Reply::Silence);
    let report = bench(Config {
        timeout: Duration::from_millis(30),
        ..config(&fake, closed(1, 2))
    });
    assert_eq!(
        (report.requests.failed, report.errors["timeout"].count),
        (2, 2)
    );
}

#[test]
fn a_busy_server_is_asked_again_when_it_says() {
    let fake = Fake::start(|r| {
        if r.index == 0 {
            return Reply::Bytes(
                b"HTTP/1.1 503 X\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n".to_vec(),
            );
        }
        Reply::Bytes(stream(r))
    });
    let report = bench(Config {
        retries: 1,
        ..config(&fake, closed(1, 2))
    });
    assert_eq!((report.requests.succeeded, report.requests.retries), (2, 1));
}

#[test]
fn a_kept_connection_that_the_server_closed_fails_nobody() {
    let fake = Fake::start(|r| Reply::Close(stream(r)));
    let report = bench(config(&fake, closed(1, 5)));
    assert_eq!((report.requests.succeeded, report.requests.failed), (5, 0));
}

#[test]
fn failures_do_not_spoil_their_neighbors() {
    let fake = Fake::start(|r| match r.index % 4 {
        0 => Reply::Reset(Vec::new()),
        1 => Reply::Bytes(http(
            400,
            "application/json",
            "{\"error\":{\"message\":\"no\"}}",
        )),
        _ => Reply::Bytes(stream(r)),
    });
    let report = bench(config(&fake, closed(8, 80)));
    assert_eq!(report.requests.sent, 80);
    assert_eq!(report.requests.succeeded + report.requests.failed, 80);
    assert_eq!(report.tokens.output, report.requests.succeeded * 5);
    assert!(
        report.errors.contains_key("http 400") && report.errors.contains_key("connection reset")
    );
}

#[test]
fn engines_counters_are_read_around_the_run() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let report = bench(Config {
        scrape_metrics: true,
        ..config(&fake, closed(1, 1))
    });
    assert_eq!(report.engine.unwrap().preemptions, Some(0.0)); // 5 before and after
}

#[test]
fn goodput_counts_requests_within_all_objectives() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let with = |slo: &str| {
        let report = bench(Config {
            slo: Objectives::from(slo.parse::<slipstream_base::Slo>().unwrap()),
            ..config(&fake, closed(1, 4))
        });
        report.goodput.unwrap().met
    };
    assert_eq!(with("ttft=1h,e2e=1h"), 4);
    assert_eq!(with("ttft=1h,e2e=0ns"), 0);
}

#[test]
fn what_cannot_be_run_is_said() {
    let fake = Fake::start(|_| Reply::Silence);
    let refused = |config: Config| run(config, &mut |_| {}).unwrap_err().to_string();
    // A port that was just free.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let target = Target::resolve(&format!("http://{free}")).unwrap();
    let error = refused(Config {
        target,
        ..config(&fake, closed(1, 1))
    });
    assert!(error.contains("is the server running?"), "{error}");
    let error = refused(Config {
        endpoint: Endpoint::Chat,
        form: PromptForm::Tokens,
        ..config(&fake, closed(1, 1))
    });
    assert!(error.contains("completions"), "{error}");
    let error = refused(Config {
        server_pids: vec![u32::MAX],
        ..config(&fake, closed(1, 1))
    });
    assert!(error.contains("--server-pid"), "{error}");
}

#[test]
fn images_are_not_sent_as_text() {
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    let images = Workload {
        content: Content::Generated(vec![Class {
            images: Dist::Exact(1.0),
            ..Class::default()
        }]),
        ..Workload::default()
    };
    let error = run(config(&fake, images), &mut |_| {}).unwrap_err();
    assert!(
        error.to_string().contains("`images_per_request`"),
        "{error}"
    );
}

#[test]
fn a_trace_that_breaks_off_ends_the_run_with_its_line() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let good = r#"{"timestamp": 0, "input_length": 6, "output_length": 2, "hash_ids": [1]}"#;
    std::io::Write::write_all(
        &mut file,
        format!("{good}\n{good}\n{}", &good[..30]).as_bytes(),
    )
    .unwrap();
    let fake = Fake::start(|r| Reply::Bytes(stream(r)));
    for threads in [1, 2] {
        let trace = |on_bad_line| Workload {
            arrival: Arrival::Trace,
            content: Content::Trace(TraceFile {
                path: file.path().into(),
                on_bad_line,
                ..TraceFile::default()
            }),
            ..Workload::default()
        };
        let stop = Config {
            threads,
            ..config(&fake, trace(OnBadLine::Stop))
        };
        let error = run(stop, &mut |_| {}).unwrap_err();
        assert!(
            matches!(error, BenchError::Source(_)) && error.to_string().contains("line 3"),
            "{error}"
        );
        let report = bench(Config {
            threads,
            ..config(&fake, trace(OnBadLine::Skip))
        });
        assert_eq!(
            (report.requests.succeeded, report.requests.skipped_lines),
            (2, 1)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// The number of events does not depend on chunk sizes or on where the network splits them.
    #[test]
    fn cuts_make_no_difference(
        chunks in prop::collection::vec(1usize..200, 1..20),
        reads in prop::collection::vec(1usize..300, 1..20),
        tokens in 0u64..12,
    ) {
        let mut events = String::from(": slipstream-trace {\"worker\":1}\n\n");
        for k in 0..tokens {
            write!(events, "data: {{\"choices\":[{{\"text\":\" t{k}\"}}]}}\n\n").unwrap();
        }
        events += "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4}}\n\n";
        events += "data: [DONE]\n\n";
        let mut wire = STREAM_HEAD.to_owned();
        let (mut rest, mut sizes) = (&events[..], chunks.iter().cycle());
        while !rest.is_empty() {
            let (now, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            wire += &chunk(now);
            rest = after;
        }
        wire += "0\r\n\r\n";
        let (mut parser, mut answer) = (Parser::default(), Answer::new(true));
        let (mut rest, mut sizes) = (wire.as_bytes(), reads.iter().cycle());
        while !rest.is_empty() {
            let (now, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            let used = parser.feed(now, |_, body| answer.feed_stream(body)).unwrap();
            prop_assert_eq!(used, now.len());
            rest = after;
        }
        answer.end_stream();
        prop_assert!(parser.is_complete() && answer.done && answer.error.is_none());
        prop_assert_eq!((answer.events, answer.usage.unwrap().completion_tokens), (tokens, 4));
        let mut text = String::new();
        (0..tokens).for_each(|k| write!(text, " t{k}").unwrap());
        prop_assert_eq!(answer.take_text(), text);
    }
}
