//! Engines that join and leave a running `slipstream serve`, on loopback.

use std::fmt::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{LazyLock, Mutex, mpsc};

use serde_json::{Value, json};
use slipstream_frontend::text::TextModel;

use crate::engines::{
    EVENTS, Engine, PATIENCE, Publisher, STREAM, WHOLE, answer, caching, caching_at, chunk, front,
    say, say_text, stream_texts, text_event, text_of, tokenizer, took,
};
use crate::server::{Answer, Server};

const KEY: [&str; 1] = ["Authorization: Bearer opensesame"];

/// A folder with the admin key, and the flag that names it.
fn admin() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.key");
    std::fs::write(&path, "opensesame\n").unwrap();
    let flag = format!("--set=upstream.admin_key_file={}", path.display());
    (dir, flag)
}

fn ask(server: &Server, method: &str, query: &str, body: &str) -> Answer {
    let path = format!("/admin/engines{query}");
    server.connect().send(method, &path, &KEY, body.as_bytes())
}

fn add(server: &Server, engine: &Engine) -> Answer {
    let body = json!({"url": format!("http://{}", engine.address)});
    ask(server, "POST", "", &body.to_string())
}

fn listed(server: &Server) -> Vec<Value> {
    let list = ask(server, "GET", "", "").json();
    list["engines"].as_array().expect("a list").clone()
}

/// Waits until the engines in the fleet are `engines`.
fn await_members(server: &Server, engines: &[&Engine]) {
    let mut wanted: Vec<String> = engines
        .iter()
        .map(|of| format!("http://{}", of.address))
        .collect();
    wanted.sort();
    let begun = std::time::Instant::now();
    loop {
        let mut now: Vec<String> = listed(server)
            .iter()
            .map(|of| of["url"].as_str().unwrap().to_owned())
            .collect();
        now.sort();
        if now == wanted {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{now:?}, not {wanted:?}");
        std::thread::yield_now();
    }
}

/// An engine whose answer is `word`.
fn saying(word: &'static str) -> Engine {
    Engine::start(move |_, stream| say_text(stream, word))
}

#[test]
fn the_admin_api_has_a_key_of_its_own_and_is_not_there_without_one() {
    let engine = saying("x");
    let closed = front(&[&engine], &["--set=upstream.forward=[\"/admin/\"]"]);
    for method in ["GET", "POST", "DELETE"] {
        let got = ask(&closed, method, "", "{}");
        assert_eq!(got.status, 404, "{method}");
    }
    let (dir, flag) = admin();
    let users = dir.path().join("users");
    std::fs::write(&users, "user\n").unwrap();
    let users = format!("--set=live.api_keys_file={}", users.display());
    let open = front(
        &[&engine],
        &[&flag, &users, "--set=upstream.forward=[\"/admin/\"]"],
    );
    for headers in [
        &[][..],
        &["Authorization: Bearer user"],
        &["Authorization: Bearer opensesam"],
        &["Authorization: Basic opensesame"],
    ] {
        for path in ["/admin/engines", "/admin/", "/%61dmin/engines"] {
            let got = open.connect().send("GET", path, headers, b"");
            assert_eq!(got.status, 401, "{path} {headers:?}");
        }
    }
    assert_eq!(ask(&open, "GET", "", "").status, 200);
    // It opens nothing else.
    let got = open.connect().send("POST", "/v1/completions", &KEY, b"{}");
    assert_eq!(got.status, 401);
    assert!(engine.seen().is_empty(), "nothing of it reached the engine");
    // A key file without a key is not an open door.
    std::fs::write(dir.path().join("admin.key"), "\n").unwrap();
    let (code, _, error) = crate::server::run(&["serve", &engine.flag(), &flag]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("has no key"), "{error}");
}

#[test]
fn an_engine_joins_and_leaves_without_a_lost_answer() {
    let first = saying("first");
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    let second = Engine::start(move |request, stream| {
        if request.json()["stream"] != true {
            return say_text(stream, "second");
        }
        say(stream, EVENTS);
        chunk(stream, &text_event("a", "one "));
        may_go_on.lock().unwrap().recv_timeout(PATIENCE).unwrap();
        chunk(stream, &text_event("a", "two"));
        chunk(stream, "data: [DONE]\n\n");
        say(stream, b"0\r\n\r\n");
    });
    let (_dir, flag) = admin();
    let server = front(&[&first], &[&flag]);
    let added = add(&server, &second);
    assert_eq!(added.status, 201, "{}", added.text());
    assert_eq!(added.json()["worker"], 1);
    assert_eq!(add(&server, &second).status, 409);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    let named = ["x-slipstream-worker: w1"];
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &named, STREAM.len());
    client.write(STREAM.as_bytes());
    assert_eq!(client.head().status, 200);
    let mut got = client.chunk().expect("an event");

    let query = format!("?url=http://{}&drain_s=600", second.address);
    let leaving = ask(&server, "DELETE", &query, "");
    assert_eq!(leaving.status, 202, "{}", leaving.text());
    assert_eq!(leaving.json()["state"], "draining");
    for turn in 0..8 {
        let body = json!({"model": "m", "prompt": format!("prompt {turn}")}).to_string();
        assert_eq!(server.post("/v1/completions", &body).said(), "first");
    }
    assert_eq!(listed(&server).len(), 2, "an answer is on its way");
    go_on.send(()).unwrap();
    while let Some(more) = client.chunk() {
        got.extend_from_slice(&more);
    }
    let text = String::from_utf8(got).unwrap();
    let events: Vec<String> = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(str::to_owned)
        .collect();
    assert_eq!(text_of(&events), "one two");
    await_members(&server, &[&first]);
    assert_eq!(server.metric("slipstream_engines_removed_total"), 1.0);
    assert_eq!(server.metric("slipstream_engine_answers_broken_total"), 0.0);
    let body = json!({"model": "m", "prompt": "x"}).to_string();
    let gone = server
        .connect()
        .send("POST", "/v1/completions", &named, body.as_bytes());
    assert_ne!(gone.status, 200, "its slot is empty");

    // Its slot is the next one's.
    let third = saying("third");
    assert_eq!(add(&server, &third).json()["worker"], 1);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    let got = server
        .connect()
        .send("POST", "/v1/completions", &named, body.as_bytes());
    assert_eq!(got.said(), "third");
}

#[test]
fn streams_of_an_engine_that_must_go_continue_on_another_one() {
    let staying = Engine::start(|_, stream| stream_texts(stream, "b", &["two ", "three"]));
    let (hold, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let leaving = Engine::start(move |_, stream| {
        say(stream, EVENTS);
        chunk(stream, &text_event("a", "one "));
        let _ = held.lock().unwrap().recv_timeout(PATIENCE);
    });
    let (_dir, flag) = admin();
    let server = front(&[&leaving], &[&flag]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], STREAM.len());
    client.write(STREAM.as_bytes());
    assert_eq!(client.head().status, 200);
    let mut got = client.chunk().expect("an event");
    assert_eq!(add(&server, &staying).status, 201);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    let query = "?worker=0&drain_s=0";
    assert_eq!(ask(&server, "DELETE", query, "").status, 202);
    while let Some(more) = client.chunk() {
        got.extend_from_slice(&more);
    }
    let text = String::from_utf8(got).unwrap();
    let events: Vec<String> = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .map(str::to_owned)
        .collect();
    assert_eq!(text_of(&events), "one two three", "{text}");
    await_members(&server, &[&staying]);
    drop(hold);
}

#[test]
fn mistakes_in_admin_requests_are_named() {
    let engine = saying("x");
    let (_dir, flag) = admin();
    let server = front(&[&engine], &[&flag, "--set=upstream.engines_max=2"]);
    for (body, status, part) in [
        ("{}", 400, "`url`"),
        ("[]", 400, "{\"url\""),
        (r#"{"url":"gpu1"}"#, 400, "http://"),
        (r#"{"url":"http://gpu1","kind":"tgi"}"#, 400, "`sglang`"),
        (
            r#"{"url":"http://gpu1","pool":"x"}"#,
            400,
            "there is `engines`",
        ),
        (r#"{"url":"http://gpu1","api_key":"a b"}"#, 400, "`api_key`"),
        (r#"{"url":"http://gpu1","weight":1}"#, 400, "weight"),
    ] {
        let got = ask(&server, "POST", "", body);
        assert_eq!(got.status, status, "{body}");
        assert!(got.error().contains(part), "{body}: {}", got.error());
    }
    for (query, status, part) in [
        ("?worker=w7", 404, "w7"),
        ("?url=http://nowhere:1", 404, "nowhere"),
        ("?worker=w0&drain_s=-1", 400, "drain_s"),
        ("?worker=w0&drain_s=soon", 400, "drain_s"),
        ("?worker=w0&drain_s=nan", 400, "drain_s"),
        ("?worker=0&drain_s=1e400", 400, "drain_s"),
        ("?worker=w0&url=http://x", 400, "by `url` or by `worker`"),
        ("?drain_s=1", 400, "by `url` or by `worker`"),
        ("?worker=w0&worker=w1", 400, "`worker` is there twice"),
        ("?url=http://a&url=http://b", 400, "`url` is there twice"),
    ] {
        let got = ask(&server, "DELETE", query, "");
        assert_eq!(got.status, status, "{query}");
        assert!(got.error().contains(part), "{query}: {}", got.error());
    }
    let long = json!({"url": "x".repeat(70_000)}).to_string();
    assert_eq!(ask(&server, "POST", "", &long).status, 413);
    assert_eq!(ask(&server, "PUT", "", "").status, 405);
    // One slot is free; a second engine finds none.
    let body = |port: u16| json!({"url": format!("http://127.0.0.1:{port}")}).to_string();
    assert_eq!(ask(&server, "POST", "", &body(1)).status, 201);
    let full = ask(&server, "POST", "", &body(2));
    assert_eq!(full.status, 409);
    assert!(
        full.error().contains("upstream.engines_max"),
        "{}",
        full.error()
    );
    // Nobody answers at the one that was added: it takes no requests.
    assert_eq!(listed(&server)[1]["state"], "down");
    for _ in 0..4 {
        assert_eq!(server.post("/v1/completions", "{}").said(), "x");
    }
    let (code, _, error) = crate::server::run(&[
        "serve",
        "--engine=http://a",
        "--engine=http://b",
        "--set=upstream.engines_max=1",
    ]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("there are 2 engines at start"), "{error}");
}

/// Writes a cluster file at once.
fn write_file(path: &Path, pools: &[(&str, &[&Engine])], more: &str) {
    let mut text = more.to_owned();
    for (pool, engines) in pools {
        let urls: Vec<String> = engines
            .iter()
            .map(|of| format!("http://{}", of.address))
            .collect();
        writeln!(text, "[pool.{pool}]\nengines = {urls:?}").unwrap();
    }
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(new, path).unwrap();
}

#[test]
fn engines_in_a_file_that_changes_join_and_leave() {
    let engines = [saying("0"), saying("1"), saying("2")];
    let [a, b, c] = &engines;
    let (dir, flag) = admin();
    let path = dir.path().join("fleet.toml");
    write_file(&path, &[("main", &[a])], "");
    let file = path.to_str().unwrap();
    let server = Server::start(&[&[file, &flag, "--set=live.shards=1"]]);
    await_members(&server, &[a]);
    // Read by itself, and a new pool too.
    write_file(&path, &[("main", &[a]), ("more", &[b])], "");
    await_members(&server, &[a, b]);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    assert_eq!(listed(&server)[1]["pool"], "more");
    // Those that the admin API adds are not the file's to remove.
    let body = json!({"url": format!("http://{}", c.address), "pool": "main"}).to_string();
    assert_eq!(ask(&server, "POST", "", &body).status, 201);
    write_file(&path, &[("main", &[b])], "");
    server.signal("-HUP");
    // `b` has moved to another pool, which its slot's label does not follow.
    await_members(&server, &[b, c]);
    // A file that cannot be read changes nothing, and neither does one without engines.
    for text in ["[pool.main\n", "", "[pool.main]\nengines = [\"ftp://x\"]\n"] {
        std::fs::write(&path, text).unwrap();
        server.signal("-HUP");
        assert_eq!(server.get("/live").status, 200);
        await_members(&server, &[b, c]);
    }
    write_file(&path, &[("main", &[a, b])], "[router]\nseed = 7\n");
    server.signal("-HUP");
    await_members(&server, &[a, b, c]);
    server.await_metric("slipstream_engine_up", |up| up == 3.0);
}

#[test]
fn caches_of_engines_are_known_from_when_they_join_to_when_they_leave() {
    let publishers = [Publisher::start(), Publisher::start(), Publisher::start()];
    let address = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let (_folder, tokenizer) = tokenizer();
    let (_dir, flag) = admin();
    // No engine answers at start: the router tokenizes once one does.
    let later = format!("--engine=http://{address}");
    let block = "--set=engine.block_size=32";
    let flags: &[&str] = &[
        &later,
        &flag,
        &tokenizer,
        "--set=model.name=m",
        block,
        "--set=live.shards=1",
    ];
    let server = Server::start(&[flags]);
    let first = caching_at(TcpListener::bind(address).unwrap(), Some(&publishers[0]));
    server.await_metric("slipstream_engine_kv_connected", |n| n == 1.0);
    let second = caching(Some(&publishers[1]));
    assert_eq!(add(&server, &second).status, 201);
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    server.await_metric("slipstream_engine_up", |n| n == 2.0);
    let ids: Vec<u32> = (1..=100).collect();
    publishers[1].store(1, &ids);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 3.0);
    let body = json!({"model": "m", "prompt": ids}).to_string();
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    assert_eq!((took(&first), took(&second)), (0, 6));
    assert_eq!(listed(&server)[1]["cache"], "KV events");
    assert_eq!(ask(&server, "DELETE", "?worker=w1", "").status, 202);
    await_members(&server, &[&first]);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 0.0);
    // An engine in its slot begins with an empty cache, and is followed as well.
    let third = caching(Some(&publishers[2]));
    assert_eq!(add(&server, &third).json()["worker"], 1);
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    server.await_metric("slipstream_engine_up", |n| n == 2.0);
    assert_eq!(server.metric("slipstream_router_cached_blocks"), 0.0);
    publishers[0].store(1, &ids);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 3.0);
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    assert_eq!((took(&first), took(&third)), (6, 0));
}

/// An engine with `publishers`, one per rank, whose tokens are those of `tokenize`.
fn ranked(
    publishers: &[&Publisher],
    tokenize: impl Fn(&Value) -> Value + Send + Sync + 'static,
) -> Engine {
    let each = publishers.iter().enumerate().map(|(rank, of)| {
        let source =
            json!({"publisher": "zmq", "endpoint": format!("tcp://*:{}", of.port), "topic": ""});
        (rank.to_string(), source)
    });
    let sources = Value::Object(each.collect()).to_string();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Engine::serving("m", listener, move |seen, stream| {
        match seen.line.split(' ').nth(1) {
            Some("/kv_event_sources") => answer(stream, "200 OK", "", sources.as_bytes()),
            Some("/tokenize") => {
                let tokens = tokenize(&seen.json()).to_string();
                answer(stream, "200 OK", "", tokens.as_bytes());
            }
            Some("/metrics") => {
                let sample =
                    "vllm:cache_config_info{block_size=\"32\",num_gpu_blocks=\"9000\"} 1\n";
                answer(stream, "200 OK", "", sample.as_bytes());
            }
            _ if seen.line.starts_with("POST ") => answer(stream, "200 OK", "", WHOLE),
            _ => answer(stream, "404 Not Found", "", b"{}"),
        }
    })
}

/// As the router's own tokenizer does for prompts; chats are refused, as by a model without a template.
fn tokens_of(asked: &Value) -> Vec<u32> {
    static MODEL: LazyLock<TextModel> = LazyLock::new(TextModel::builtin);
    let model = &*MODEL;
    let mut tokens = Vec::new();
    if let Some(prompt) = asked["prompt"].as_str() {
        model.encode(prompt, true, &mut tokens);
        return tokens;
    }
    let turns = asked["messages"].as_array().unwrap().clone();
    let text = |turn: &Value, name: &str| turn[name].as_str().unwrap().to_owned();
    let said: Vec<(String, String)> = turns
        .iter()
        .map(|turn| (text(turn, "role"), text(turn, "content")))
        .collect();
    let messages: Vec<_> = said
        .iter()
        .map(|(role, content)| slipstream_frontend::text::Message::new(role, content))
        .collect();
    let options = slipstream_frontend::text::ChatOptions {
        add_generation_prompt: asked["add_generation_prompt"] == true,
        continue_final_message: false,
        tools: &[],
        template_kwargs: &[],
        now_unix_s: 0,
    };
    model.encode_chat(&messages, &options, &mut tokens).unwrap();
    tokens
}

#[test]
fn an_engine_that_tokenizes_otherwise_is_named_and_its_cache_guessed() {
    let publisher = Publisher::start();
    // One chat ends with another token.
    let odd = ranked(&[&publisher], |asked| {
        let mut tokens = tokens_of(asked);
        if asked["messages"]
            .as_array()
            .is_some_and(|turns| turns.len() == 4)
        {
            *tokens.last_mut().unwrap() ^= 1;
        }
        json!({ "tokens": tokens })
    });
    let (_folder, tokenizer) = tokenizer();
    let (_dir, flag) = admin();
    let server = front(&[&odd], &[&flag, &tokenizer, "--set=model.name=m"]);
    let begun = std::time::Instant::now();
    let said = loop {
        let said = listed(&server)[0]["cache"].as_str().unwrap().to_owned();
        if said.contains("tokenizes otherwise") {
            break said;
        }
        assert!(begun.elapsed() < PATIENCE, "{said}");
        std::thread::yield_now();
    };
    assert!(
        said.contains("chat: turns") && said.contains("tokenizer check"),
        "{said}"
    );
    let body = json!({"model": "m", "prompt": "Be brief. ".repeat(80)}).to_string();
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    let count =
        |of: &str| server.metric(&format!("slipstream_engine_prompts_total{{as=\"{of}\"}}"));
    assert_eq!((count("tokens"), count("text")), (0.0, 1.0));
    // One that agrees is followed, and prompts are tokens from then on.
    let other = Publisher::start();
    let same = ranked(&[&other], |asked| json!({ "tokens": tokens_of(asked) }));
    assert_eq!(add(&server, &same).status, 201);
    server.await_metric("slipstream_engine_kv_connected", |n| n == 1.0);
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    assert_eq!((count("tokens"), count("text")), (1.0, 1.0));
}

#[test]
fn ranks_of_an_engine_are_one_cache() {
    let publishers = [Publisher::start(), Publisher::start(), Publisher::start()];
    let ranks = ranked(
        &[&publishers[0], &publishers[1]],
        |asked| json!({ "tokens": tokens_of(asked) }),
    );
    let single = ranked(
        &[&publishers[2]],
        |asked| json!({ "tokens": tokens_of(asked) }),
    );
    let (_folder, tokenizer) = tokenizer();
    let (_dir, flag) = admin();
    let server = front(
        &[&single, &ranks],
        &[&flag, &tokenizer, "--set=model.name=m"],
    );
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    let prompt = |first: u32| (first..first + 100).collect::<Vec<u32>>();
    publishers[0].store(1, &prompt(1));
    publishers[1].store(1, &prompt(1));
    publishers[1].store(100, &prompt(1_000));
    server.await_metric("slipstream_router_cached_blocks", |n| n == 6.0);
    publishers[1].clear(); // of the second rank alone
    server.await_metric("slipstream_router_cached_blocks", |n| n == 3.0);
    let body = json!({"model": "m", "prompt": prompt(1)}).to_string();
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    assert_eq!((took(&single), took(&ranks)), (0, 6));
    assert_eq!(listed(&server)[1]["cache"], "KV events of 2 ranks");
}

/// The cache of an engine is followed only as long as its events tell of the prompts that it answers.
#[test]
fn an_engine_whose_events_tell_nothing_of_its_prompts_is_guessed() {
    let publishers = [Publisher::start(), Publisher::start()];
    let engines = [caching(Some(&publishers[0])), caching(Some(&publishers[1]))];
    let (_folder, tokenizer) = tokenizer();
    let (_dir, flag) = admin();
    let server = front(
        &[&engines[0], &engines[1]],
        &[&flag, &tokenizer, "--set=model.name=m"],
    );
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    assert_eq!(server.metric("slipstream_engine_kv_guessed"), 2.0);
    let prompt = |n: u32| (n * 1_000..n * 1_000 + 100).collect::<Vec<u32>>();
    // Returns the engine that took the prompt.
    let send = |ids: &[u32], headers: &[&str]| {
        let before = took(&engines[1]);
        let body = json!({"model": "m", "prompt": ids}).to_string();
        let mut client = server.connect();
        let got = client.send("POST", "/v1/completions", headers, body.as_bytes());
        assert_eq!(got.status, 200);
        usize::from(took(&engines[1]) > before)
    };
    let mut next = 0;
    // Sends new prompts, of which `tell` may tell the engine's events, until `cache` of both engines begins with `wanted`.
    let mut send_until = |wanted: &str, tell: &dyn Fn(usize, u32)| {
        let begun = std::time::Instant::now();
        loop {
            next += 1;
            let to = format!("x-slipstream-worker: w{}", next % 2);
            tell(send(&prompt(next), &[&to]), next);
            let caches: Vec<Value> = listed(&server)
                .iter()
                .map(|of| of["cache"].clone())
                .collect();
            if caches
                .iter()
                .all(|of| of.as_str().unwrap().starts_with(wanted))
            {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{caches:?}");
        }
    };
    // The first publishes nothing, the second blocks of prompts that nobody sends.
    publishers[1].store(1, &prompt(1_000_000));
    send_until("guessed: it answered", &|engine, n| {
        if engine == 1 {
            publishers[1].store(u64::from(n) * 10, &prompt(1_000_000 + n));
        }
    });
    assert_eq!(server.metric("slipstream_engine_kv_guessed"), 2.0);
    for n in 0..12 {
        let ids = prompt(2_000_000 + n);
        let engine = send(&ids, &[]);
        assert!((0..3).all(|_| send(&ids, &[]) == engine), "{n}");
    }
    send_until("KV events", &|engine, n| {
        publishers[engine].store(u64::from(n) * 10, &prompt(n));
    });
    assert_eq!(server.metric("slipstream_engine_kv_guessed"), 0.0);
}
