//! Responses that engines store, behind a router: requests that name one reach the engine that has it.

use std::io::Read;
use std::net::TcpListener;

use serde_json::{Value, json};

use crate::engines::{Engine, answer, front};
use crate::server::{Answer, FAST, Server};

const ROUND_ROBIN: &str = "--set=router.policy=\"round_robin\"";

/// Engines that store responses: servers of this kind, with modelled engines.
fn storing() -> [Server; 2] {
    [(); 2].map(|()| Server::start(&[FAST, &["--set=live.shards=1"]]))
}

fn router(engines: &[Server], more: &[&str]) -> Server {
    let flags: Vec<String> = engines
        .iter()
        .map(|engine| format!("--engine=http://{}", engine.address()))
        .collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Server::start(&[&flags, more, &[ROUND_ROBIN, "--set=live.shards=2"]])
}

fn create(server: &Server, previous: Option<&str>, stream: bool) -> Answer {
    let body = json!({
        "model": "test-model", "input": "Say more.", "max_output_tokens": 3,
        "previous_response_id": previous, "stream": stream,
    });
    server.post("/v1/responses", &body.to_string())
}

/// The id of the created response.
#[track_caller]
fn id_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let text = answer.text();
    let object = match text.split_once("\ndata: ") {
        None => answer.json(),
        Some((_, event)) => {
            let event: Value = serde_json::from_str(event.lines().next().unwrap()).unwrap();
            event["response"].clone()
        }
    };
    object["id"].as_str().expect("an id").to_owned()
}

fn found(server: &Server, how: &str) -> f64 {
    let series = "slipstream_engine_stored_responses_total{engine_was=\"HOW\"}";
    server.metric(&series.replace("HOW", how))
}

#[test]
fn chains_of_responses_stay_at_the_engine_that_stores_them() {
    let engines = storing();
    let server = router(&engines, &[]);
    let mut last = Vec::new();
    for stream in [false, true, false] {
        let mut id = id_of(&create(&server, None, stream));
        for _ in 0..3 {
            id = id_of(&create(&server, Some(&id), stream));
            let path = format!("/v1/responses/{id}");
            let stored = server.get(&path);
            assert_eq!(stored.status, 200, "{}", stored.text());
            assert_eq!(stored.json()["id"], *id);
        }
        last.push(id);
    }
    assert_eq!(found(&server, "known"), 18.0);
    assert_eq!(found(&server, "asked"), 0.0);
    // Both engines have some: the chains did not just happen to meet one engine.
    let here = |engine: &Server, id: &str| engine.get(&format!("/v1/responses/{id}")).status == 200;
    for engine in &engines {
        assert!(last.iter().any(|id| here(engine, id)), "{last:?}");
    }
    let path = format!("/v1/responses/{}", last[0]);
    assert_eq!(
        server.send("POST", &format!("{path}/cancel"), b"").status,
        400,
        "it is complete"
    );
    assert_eq!(server.send("DELETE", &path, b"").status, 200);
    assert_eq!(server.get(&path).status, 404);

    // A router that has not seen the answers asks the engines, once per chain.
    let other = router(&engines, &[]);
    let id = id_of(&create(&other, Some(&last[1]), false));
    id_of(&create(&other, Some(&id), false));
    id_of(&create(&other, Some(&last[1]), false));
    assert_eq!((found(&other, "asked"), found(&other, "known")), (1.0, 2.0));
    // One that none has is the engine's to refuse.
    let unknown = create(&other, Some("resp_none"), false);
    assert_eq!(unknown.status, 404, "{}", unknown.text());
    assert_eq!(found(&other, "unknown"), 1.0);
}

/// Engines that answer every request with the response `id`.
fn naming(id: &'static str) -> [Engine; 2] {
    [(); 2].map(|()| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Engine::serving("test-model", listener, move |_, stream| {
            let body = json!({"id": id, "object": "response"}).to_string();
            answer(
                stream,
                "200 OK",
                "content-type: application/json\r\n",
                body.as_bytes(),
            );
        })
    })
}

/// Those of the requests to `engines` that a test is about: their first lines.
fn lines_of(engines: &[Engine], method: &str) -> Vec<String> {
    let all = engines.iter().flat_map(Engine::seen).map(|seen| seen.line);
    all.filter(|line| line.starts_with(method)).collect()
}

#[test]
fn an_id_with_a_slash_is_one_part_of_the_path() {
    let engines = naming("resp_a/b%?");
    let server = front(&[&engines[0], &engines[1]], &[]);
    let id = id_of(&create(&server, None, false));
    assert_eq!(id, "resp_a/b%?");
    let path = "/v1/responses/resp_a%2Fb%25%3f";
    assert_eq!(server.get(path).status, 200);
    assert_eq!(lines_of(&engines, "GET "), [format!("GET {path} HTTP/1.1")]);
    assert_eq!(found(&server, "known"), 1.0);
    // A router that has to ask for it asks for the same.
    let other = front(&[&engines[0], &engines[1]], &[]);
    assert_eq!(other.get(path).status, 200);
    assert_eq!(found(&other, "asked"), 1.0);
    let asked = lines_of(&engines, "GET ");
    let escaped = "GET /v1/responses/resp%5Fa%2Fb%25%3F HTTP/1.1".replace("%5F", "_");
    assert!(asked.contains(&escaped), "{asked:?}");
}

/// A file with the API keys `one` and `two`, and the argument that names it.
fn two_keys() -> (tempfile::NamedTempFile, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "one\ntwo\n").unwrap();
    let keys = format!("--set=live.api_keys_file={}", file.path().display());
    (file, keys)
}

/// A router with these keys.
fn keyed(engines: &[Server], more: &[&str]) -> (tempfile::NamedTempFile, Server) {
    let (file, keys) = two_keys();
    let server = router(engines, &[&[keys.as_str()], more].concat());
    (file, server)
}

/// A request with an API key.
fn by(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> Answer {
    let key = format!("Authorization: Bearer {key}");
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    server
        .connect()
        .send(method, path, &[&key], body.as_bytes())
}

fn new_body(previous: Option<&str>, stream: bool) -> Value {
    json!({
        "model": "test-model", "input": "Say more.", "max_output_tokens": 3,
        "previous_response_id": previous, "stream": stream,
    })
}

/// An answer with the id that it is about replaced, to compare answers for two ids.
fn without_id(answer: &Answer, id: &str) -> (u16, String) {
    (answer.status, answer.text().replace(id, "ID"))
}

#[test]
fn a_stored_response_is_for_the_key_that_made_it() {
    let engines = storing();
    let (_keys, server) = keyed(&engines, &[]);
    for stream in [false, true] {
        let made = by(
            &server,
            "one",
            "POST",
            "/v1/responses",
            &new_body(None, stream),
        );
        let id = id_of(&made);
        let path = format!("/v1/responses/{id}");
        // Each way to name it, by the other key: as an id that there is not.
        let none = "resp_0123456789abcdef0123456789abcdef";
        for worker in ["", "X-Slipstream-Worker: 0", "X-Slipstream-Worker: 1"] {
            for (method, suffix) in [
                ("GET", ""),
                ("HEAD", ""),
                ("DELETE", ""),
                ("POST", "/cancel"),
            ] {
                let ask = |key: &str, id: &str| {
                    let path = format!("/v1/responses/{id}{suffix}");
                    let key = format!("Authorization: Bearer {key}");
                    let headers = [key.as_str(), worker];
                    let headers = &headers[..=usize::from(!worker.is_empty())];
                    let mut client = server.connect();
                    client.write_head(method, &path, headers, 0);
                    let got = if method == "HEAD" {
                        client.head()
                    } else {
                        client.answer()
                    };
                    without_id(&got, id)
                };
                let theirs = ask("two", &id);
                assert_eq!(theirs.0, 404, "{method} {worker}");
                assert_eq!(theirs, ask("two", none), "{method} {worker}");
            }
        }
        let next = by(
            &server,
            "two",
            "POST",
            "/v1/responses",
            &new_body(Some(&id), stream),
        );
        let unknown = by(
            &server,
            "two",
            "POST",
            "/v1/responses",
            &new_body(Some(none), stream),
        );
        assert_eq!(next.status, 404, "{}", next.text());
        assert_eq!(without_id(&next, &id), without_id(&unknown, none));
        assert_eq!(next.json()["error"]["param"], "previous_response_id");
        // Its own key reads, continues and deletes it, also through a worker that it names.
        assert_eq!(by(&server, "one", "GET", &path, &Value::Null).status, 200);
        let next = by(
            &server,
            "one",
            "POST",
            "/v1/responses",
            &new_body(Some(&id), stream),
        );
        assert_ne!(id_of(&next), id);
        assert_eq!(
            by(&server, "one", "DELETE", &path, &Value::Null).status,
            200
        );
        assert_eq!(by(&server, "one", "GET", &path, &Value::Null).status, 404);
    }
    // Nobody without a key.
    assert_eq!(server.get("/v1/responses/resp_1").status, 401);
    assert_eq!(found(&server, "denied"), 26.0);
    // A router that has not seen the answers does not know whose they are.
    let (_keys, other) = keyed(&engines, &[]);
    let id = id_of(&by(
        &server,
        "one",
        "POST",
        "/v1/responses",
        &new_body(None, false),
    ));
    for key in ["one", "two"] {
        let path = format!("/v1/responses/{id}");
        assert_eq!(by(&other, key, "GET", &path, &Value::Null).status, 404);
    }
    assert_eq!(
        (found(&other, "unknown"), found(&other, "asked")),
        (2.0, 0.0)
    );
}

#[test]
fn a_stored_response_has_no_other_path() {
    let engines = naming("resp_1");
    let (_file, keys) = two_keys();
    let server = front(&[&engines[0], &engines[1]], &[&keys]);
    id_of(&by(
        &server,
        "one",
        "POST",
        "/v1/responses",
        &new_body(None, false),
    ));
    let body = r#"{"model":"test-model","input":"x","previous_response_id":"resp_1"}"#;
    let wide: Vec<u8> = body.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let check = |method: &str, path: &str, body: &[u8], status: u16| {
        let headers = ["Authorization: Bearer two"];
        let got = server.connect().send(method, path, &headers, body);
        let text = String::from_utf8_lossy(body);
        assert_eq!(got.status, status, "{method} {path} {text}: {}", got.text());
    };
    for path in [
        "/v1/%72esponses/resp_1",
        "/v1%2Fresponses/resp_1",
        "/v1/responses%2Fresp_1",
        "/v1/responses/resp_1/",
        "/v1/responses/resp_1?stream=true",
        "/v1/responses/%72esp_1/input_items",
        "/v1/responses/",
        "/v1/responses",
    ] {
        check("GET", path, b"", 404);
    }
    // Parsers of engines read more than the router's: it passes on what it has understood.
    check("POST", "/v1/responses", &wide, 400);
    check(
        "POST",
        "/v1/responses",
        b"{\"previous_response_id\":\"resp_1\",\"x\":NaN}",
        400,
    );
    check("POST", "/v1/responses", b"", 400);
    let twice = br#"{"previous_response_id":"resp_1","previous_response_id":null,"input":"x"}"#;
    check("POST", "/v1/responses", twice, 400);
    check("POST", "/v1/%72esponses", body.as_bytes(), 404);
    check(
        "POST",
        "/v1/responses",
        br#"{"previous\u005fresponse_id":"resp_1"}"#,
        404,
    );
    check(
        "POST",
        "/v1/responses",
        &[b"\xEF\xBB\xBF", body.as_bytes()].concat(),
        404,
    );
    let posts = lines_of(&engines, "POST ");
    assert_eq!(
        (posts.len(), lines_of(&engines, "GET ").len()),
        (1, 0),
        "{posts:?}"
    );
}

#[test]
fn clients_choose_no_ids_of_responses() {
    let engines = storing();
    let (_keys, server) = keyed(&engines, &[]);
    let mut body = new_body(None, false);
    body["request_id"] = json!("resp_mine");
    let got = by(&server, "one", "POST", "/v1/responses", &body);
    assert_eq!(
        (got.status, &got.json()["error"]["param"]),
        (400, &json!("request_id"))
    );
    let open = router(&engines, &[]);
    assert_eq!(open.post("/v1/responses", &body.to_string()).status, 400);
    // The header, by which these engines name responses.
    let mut ids = Vec::new();
    for key in ["one", "two", "one"] {
        let key = format!("Authorization: Bearer {key}");
        let headers = [key.as_str(), "X-Request-Id: resp_mine"];
        let body = new_body(None, false).to_string();
        let got = server
            .connect()
            .send("POST", "/v1/responses", &headers, body.as_bytes());
        assert_eq!(
            got.header("x-request-id"),
            Some("resp_mine"),
            "the client's own"
        );
        ids.push(id_of(&got));
    }
    ids.sort_unstable();
    ids.dedup();
    assert!(
        ids.len() == 3 && !ids.contains(&"resp_mine".to_owned()),
        "{ids:?}"
    );
}

#[test]
fn an_id_that_an_engine_gives_to_two_keys_is_neithers() {
    let engines = naming("resp_same");
    let (_file, keys) = two_keys();
    let server = front(&[&engines[0], &engines[1]], &[&keys]);
    let read = |key: &str| by(&server, key, "GET", "/v1/responses/resp_same", &Value::Null).status;
    id_of(&by(
        &server,
        "one",
        "POST",
        "/v1/responses",
        &new_body(None, false),
    ));
    assert_eq!((read("one"), read("two")), (200, 404));
    id_of(&by(
        &server,
        "two",
        "POST",
        "/v1/responses",
        &new_body(None, false),
    ));
    assert_eq!((read("one"), read("two")), (404, 404));
}

#[test]
fn a_response_whose_engine_is_gone_is_a_typed_error() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, "secret\n").unwrap();
    let key = format!("--set=upstream.admin_key_file={}", key.display());
    let [one, two] = storing();
    let engines = [one, two];
    let server = router(&engines, &[&key, "--set=upstream.health_interval_s=0.2"]);
    let ids = [
        id_of(&create(&server, None, false)),
        id_of(&create(&server, None, true)),
    ];
    let [one, two] = engines;
    let has = |engine: &Server, id: &str| engine.get(&format!("/v1/responses/{id}")).status == 200;
    let of_two: Vec<&String> = ids.iter().filter(|id| has(&two, id)).collect();
    assert_eq!(of_two.len(), 1, "{ids:?}");
    let url = format!("http://{}", two.address());
    two.kill();
    server.await_metric(&format!("slipstream_engine_up{{engine=\"{url}\"}}"), |up| {
        up == 0.0
    });
    let got = create(&server, Some(of_two[0]), false);
    assert_eq!(got.status, 409, "{}", got.text());
    let error = &got.json()["error"];
    assert_eq!(error["code"], "response_unavailable");
    assert_eq!(error["param"], "previous_response_id");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains(&url) && message.contains("(down)"),
        "{message}"
    );
    let removed = server.connect().send(
        "DELETE",
        &format!("/admin/engines?url={url}"),
        &["Authorization: Bearer secret"],
        b"",
    );
    assert_eq!(removed.status, 202, "{}", removed.text());
    server.await_metric("slipstream_engines_removed_total", |count| count == 1.0);
    let path = format!("/v1/responses/{}", of_two[0]);
    for got in [create(&server, Some(of_two[0]), true), server.get(&path)] {
        assert_eq!(got.status, 404, "{}", got.text());
        assert_eq!(got.json()["error"]["code"], "previous_response_not_found");
        assert!(got.error().contains("left the fleet"), "{}", got.text());
    }
    assert_eq!(found(&server, "gone"), 3.0);
    // The other engine's goes on.
    let other = ids.iter().find(|id| has(&one, id)).unwrap();
    id_of(&create(&server, Some(other), false));
}

#[test]
fn a_hostile_id_asks_for_nothing_but_a_response() {
    let refusing = || {
        Engine::start(|request, stream| {
            let status = if request.line.starts_with("GET ") {
                "404 Not Found"
            } else {
                "200 OK"
            };
            answer(
                stream,
                status,
                "content-type: application/json\r\n",
                b"{\"id\":\"resp_9\",\"object\":\"response\"}",
            );
        })
    };
    let engines = [refusing(), refusing()];
    let server = front(&[&engines[0], &engines[1]], &[]);
    let body = r#"{"model":"m","input":"x","previous_response_id":"../../sleep?\r\nX: 1 \u00e9"}"#;
    let got = server.post("/v1/responses", body);
    assert_eq!(got.status, 200);
    for engine in &engines {
        let asked = engine
            .seen()
            .into_iter()
            .find(|of| of.line.starts_with("GET "));
        assert_eq!(
            asked.expect("it is asked").line,
            "GET /v1/responses/%2E%2E%2F%2E%2E%2Fsleep%3F%0D%0AX%3A%201%20%C3%A9 HTTP/1.1"
        );
    }
    // Longer than any id: not asked for.
    let body = json!({"model": "m", "input": "x", "previous_response_id": "x".repeat(5000)});
    assert_eq!(server.post("/v1/responses", &body.to_string()).status, 200);
    let asked = engines
        .iter()
        .flat_map(Engine::seen)
        .filter(|of| of.line.starts_with("GET "));
    assert_eq!(asked.count(), 2);
    assert_eq!(found(&server, "unknown"), 2.0);
}

#[test]
fn a_client_may_ask_for_few_unknown_responses_at_a_time() {
    let engine = || {
        Engine::start(|request, stream| {
            let is_question = request.header("connection") == Some("close");
            if is_question && request.line.contains("/slow") {
                let _ = stream.read(&mut [0]); // until the router gives up
            } else {
                answer(stream, "404 Not Found", "", b"{}");
            }
        })
    };
    let engines = [engine(), engine()];
    let server = front(&[&engines[0], &engines[1]], &["--set=live.shards=1"]);
    let mut asking: Vec<_> = (0..16).map(|_| server.connect()).collect();
    for (number, client) in asking.iter_mut().enumerate() {
        let path = format!("/v1/responses/slow{number}");
        client.write_head("GET", &path, &[], 0);
    }
    server.await_metric(
        "slipstream_engine_stored_responses_total{engine_was=\"refused\"}",
        |refused| refused >= 12.0,
    );
    let refused = asking.iter_mut().rev().find_map(|client| {
        let answer = client.answer();
        (answer.status == 429).then_some(answer)
    });
    assert!(refused.unwrap().error().contains("limit"));
}
