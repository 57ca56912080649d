//! Clients of vLLM rely on these: its fields, its metrics, its routes for operators.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::engines::{Engine, chunk, front, say, text_of};
use crate::server::{FAST, Server, run};

/// [`FAST`] with one engine, so that a repeated prompt meets its cache.
const ONE: &[&str] = &["--set=pool.main.workers=1"];
const MANAGED: &[&str] = &["--set=live.management=true"];

fn complete(server: &Server, fields: Value) -> Value {
    ask(
        server,
        "/v1/completions",
        json!({"prompt": "Once upon a time"}),
        fields,
    )
}

fn chat(server: &Server, fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "How far is it?"}]);
    ask(
        server,
        "/v1/chat/completions",
        json!({"messages": messages}),
        fields,
    )
}

#[allow(clippy::needless_pass_by_value)] // reads as `json!` at every call
fn ask(server: &Server, path: &str, mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = server.post(path, &body.to_string());
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    answer.json()
}

fn cached(answer: &Value) -> u64 {
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().unwrap()
}

/// Texts of an array, of which some are null.
fn array<'a>(value: &'a Value, name: &str) -> &'a Vec<Value> {
    value[name]
        .as_array()
        .unwrap_or_else(|| panic!("no {name} in {value}"))
}

#[test]
fn an_echo_has_the_log_probabilities_of_its_prompt() {
    let server = Server::start(&[FAST, ONE]);
    let fields =
        json!({"max_tokens": 3, "ignore_eos": true, "seed": 1, "echo": true, "logprobs": 2});
    let answer = complete(&server, fields.clone());
    let choice = &answer["choices"][0];
    let (text, logprobs) = (choice["text"].as_str().unwrap(), &choice["logprobs"]);
    assert!(text.starts_with("Once upon a time"), "{text}");
    let tokens = array(logprobs, "tokens");
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(tokens.len(), prompt + 3);
    let joined: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, text);
    for (at, offset) in array(logprobs, "text_offset").iter().enumerate() {
        let rest = &text[offset.as_u64().unwrap() as usize..];
        assert!(
            rest.starts_with(tokens[at].as_str().unwrap()),
            "{at}: {rest:?}"
        );
        let (own, tops) = (
            &array(logprobs, "token_logprobs")[at],
            &array(logprobs, "top_logprobs")[at],
        );
        assert_eq!(
            (own.is_null(), tops.is_null()),
            (at == 0, at == 0),
            "{logprobs}"
        );
        if at > 0 {
            assert_eq!(&tops[tokens[at].as_str().unwrap()], own);
            assert_eq!(tops.as_object().unwrap().len(), 2);
        }
    }
    // In a stream they come with the first token, and are the same.
    let mut body = fields;
    (body["prompt"], body["stream"]) = (json!("Once upon a time"), json!(true));
    let events = server.post("/v1/completions", &body.to_string()).events();
    let events: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    for name in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        let streamed: Vec<Value> = events
            .iter()
            .flat_map(|event| array(&event["choices"][0]["logprobs"], name).clone())
            .collect();
        assert_eq!(&streamed, array(logprobs, name), "{name}");
    }
    assert_eq!(
        array(&events[0]["choices"][0]["logprobs"], "tokens").len(),
        prompt + 1
    );
    // One event with all of a long prompt would keep others waiting.
    let long = json!({
        "prompt": vec![300; 3000], "max_tokens": 1, "echo": true, "logprobs": 20, "stream": true,
    });
    let refused = server.post("/v1/completions", &long.to_string());
    let param = refused.json()["error"]["param"].clone();
    assert_eq!((refused.status, param), (400, json!("echo")));
}

/// As vLLM answers it: the engine generates one token, which is counted and not shown.
#[test]
fn an_echo_without_an_answer_scores_the_prompt() {
    let server = Server::start(&[FAST, ONE]);
    let whole = json!({"echo": true, "logprobs": 1, "max_tokens": 0, "return_token_ids": true});
    let answer = complete(&server, whole);
    let (choice, usage) = (&answer["choices"][0], &answer["usage"]);
    assert_eq!(choice["text"], "Once upon a time");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(usage["completion_tokens"], 1);
    let prompt = array(choice, "prompt_token_ids").len();
    assert_eq!(usage["prompt_tokens"], prompt);
    assert_eq!(array(choice, "token_ids").len(), 1);
    for name in ["tokens", "token_logprobs", "text_offset", "top_logprobs"] {
        assert_eq!(array(&choice["logprobs"], name).len(), prompt, "{name}");
    }
    let listed = array(choice, "prompt_logprobs");
    assert_eq!((listed.len(), &listed[0]), (prompt, &Value::Null));
    // Its scores are those of the prompt before an answer.
    let fields = json!({"echo": true, "logprobs": 1, "max_tokens": 2});
    let longer = complete(&server, fields)["choices"][0]["logprobs"].clone();
    assert_eq!(
        array(&longer, "token_logprobs")[..prompt],
        array(&choice["logprobs"], "token_logprobs")[..]
    );

    let body = json!({
        "prompt": ["One", "Two words"], "n": 2, "max_tokens": 0, "echo": true, "logprobs": 0, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let events = server.post("/v1/completions", &body.to_string()).events();
    let events: Vec<Value> = events[..events.len() - 1]
        .iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let mut texts = BTreeMap::new();
    for event in &events[..events.len() - 1] {
        let choice = &event["choices"][0];
        let text = choice["text"].as_str().unwrap().to_owned();
        let scored: String = array(&choice["logprobs"], "tokens")
            .iter()
            .map(|token| token.as_str().unwrap())
            .collect();
        assert_eq!(
            (&scored, &choice["finish_reason"]),
            (&text, &json!("length"))
        );
        let index = choice["index"].as_u64().unwrap();
        assert_eq!(texts.insert(index, text), None, "one event per choice");
    }
    let texts: Vec<String> = texts.into_values().collect();
    assert_eq!(texts, ["One", "One", "Two words", "Two words"]);
    assert_eq!(events[events.len() - 1]["usage"]["completion_tokens"], 4);

    for (path, body) in [
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 0})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0, "echo": true}),
        ),
    ] {
        let refused = server.post(path, &body.to_string());
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (400, &json!("max_tokens"))
        );
    }
}

#[test]
fn prompts_have_log_probabilities_and_are_computed_for_them() {
    let server = Server::start(&[FAST, ONE]);
    let prompt = "the ".repeat(100);
    let ask = |fields: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 1});
        ask(&server, "/v1/completions", body, fields)
    };
    ask(json!({}));
    assert!(cached(&ask(json!({}))) > 0, "the prompt is cached");
    for top in [0, 3] {
        let fields = json!({"prompt_logprobs": top, "n": 2, "return_token_ids": true});
        let answer = ask(fields);
        assert_eq!(cached(&answer), 0);
        for choice in array(&answer, "choices") {
            let ids = array(choice, "prompt_token_ids");
            let of_prompt = array(choice, "prompt_logprobs");
            assert_eq!(of_prompt.len(), ids.len());
            assert!(of_prompt[0].is_null());
            for (entry, id) in of_prompt.iter().zip(ids).skip(1) {
                assert_eq!(entry.as_object().unwrap().len(), top.max(1));
                let own = &entry[id.to_string()];
                assert_eq!(own["rank"], 1);
                assert!(own["logprob"].as_f64().unwrap() <= 0.0);
                assert!(own["decoded_token"].is_string());
            }
        }
    }
    let answer = chat(&server, json!({"prompt_logprobs": 1, "max_tokens": 2}));
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(array(&answer, "prompt_logprobs").len(), tokens);
    assert!(answer["choices"][0]["prompt_logprobs"].is_null());
    // What would not fit is refused before it is made.
    let huge = json!({"prompt": vec![300; 4000], "max_tokens": 1, "n": 100, "prompt_logprobs": 20});
    let small = Server::start(&[FAST, ONE, &["--set=live.answer_bytes_max=1000000"]]);
    let refused = small.post("/v1/completions", &huge.to_string());
    assert_eq!(
        (refused.status, refused.json()["error"]["code"].as_str()),
        (400, Some("answer_too_large"))
    );
}

#[test]
fn biases_exclude_and_force_tokens() {
    let server = Server::start(&[FAST]);
    let ids = |fields: Value| {
        let mut all = fields;
        (all["max_tokens"], all["return_token_ids"], all["seed"]) =
            (json!(40), json!(true), json!(5));
        let answer = complete(&server, all.clone());
        all["stream"] = json!(true);
        all["prompt"] = json!("Once upon a time");
        let events = server.post("/v1/completions", &all.to_string()).events();
        let streamed: Vec<Value> = events[..events.len() - 1]
            .iter()
            .map(|event| serde_json::from_str::<Value>(event).unwrap())
            .flat_map(|event| array(&event["choices"][0], "token_ids").clone())
            .collect();
        let whole = array(&answer["choices"][0], "token_ids").clone();
        assert_eq!(streamed, whole, "{all}");
        whole
            .iter()
            .map(|id| id.as_u64().unwrap())
            .collect::<Vec<u64>>()
    };
    let plain = ids(json!({"ignore_eos": true}));
    let (first, second) = (plain[0], plain[1]);
    let banned = ids(json!({"ignore_eos": true, "logit_bias": {first.to_string(): -100}}));
    assert!(!banned.contains(&first));
    let kept = plain.iter().zip(&banned).filter(|(a, b)| a == b).count();
    assert!(kept >= 38, "others stay: {plain:?} {banned:?}");
    let two = BTreeSet::from([first, second]);
    for fields in [
        json!({"logit_bias": {first.to_string(): 100, second.to_string(): 100, "9": 3}}),
        json!({"allowed_token_ids": [first, second]}),
    ] {
        let forced = ids(fields);
        assert_eq!(
            forced.len(),
            40,
            "without the end-of-sequence token no answer ends"
        );
        assert_eq!(forced.into_iter().collect::<BTreeSet<u64>>(), two);
    }
    for (fields, param) in [
        (json!({"logit_bias": {"4000000": -100}}), "logit_bias"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (
            json!({"allowed_token_ids": [9], "logit_bias": {"9": -100}}),
            "logit_bias",
        ),
    ] {
        let mut body = fields;
        body["prompt"] = json!("x");
        let refused = server.post("/v1/completions", &body.to_string());
        assert_eq!(refused.status, 400, "{body}");
        assert_eq!(refused.json()["error"]["param"], param);
    }
}

#[test]
fn an_answer_continues_the_last_message() {
    let server = Server::start(&[FAST, ONE]);
    let messages = json!([
        {"role": "user", "content": "Count the miles"}, {"role": "assistant", "content": "It is far"},
    ]);
    let ask = |continues: bool| {
        let fields = json!({
            "messages": messages, "add_generation_prompt": false, "continue_final_message": continues,
            "echo": true, "return_token_ids": true, "max_tokens": 5, "ignore_eos": true,
        });
        chat(&server, fields)
    };
    let (open, closed) = (ask(true), ask(false));
    let ids = |answer: &Value| array(answer, "prompt_token_ids").clone();
    // The open message has no end; all before it is the same.
    let len = ids(&open).len();
    assert!(len < ids(&closed).len());
    assert_eq!(ids(&open)[..], ids(&closed)[..len]);
    let content = open["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with("It is far "), "{content}");
    let body = json!({"messages": messages, "add_generation_prompt": false, "continue_final_message": true});
    let tokenized = server.post("/tokenize", &body.to_string()).json();
    assert_eq!(&ids(&open), array(&tokenized, "tokens"));
}

/// The engine that is lost is a script, the one that continues is a modelled one: it takes what the router sends.
#[test]
fn a_modelled_engine_continues_the_chat_of_another() {
    let lost = Engine::serving(
        "test-model",
        std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
        |request, stream| {
            if request.json()["messages"].as_array().unwrap().len() > 1 {
                return; // it does not take the rest
            }
            say(
                stream,
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            );
            let delta = |text: &str| {
                format!(
                    "data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\
                     \"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
                )
            };
            chunk(stream, &delta("It is"));
            chunk(stream, &delta(" far"));
        },
    );
    let modelled = Server::start(&[FAST, ONE]);
    let second = format!("--engine=http://{}", modelled.address());
    let router = front(&[&lost], &[&second]);
    let body = json!({
        "model": "test-model", "messages": [{"role": "user", "content": "How far is it?"}],
        "max_tokens": 6, "ignore_eos": true, "stream": true,
    });
    let answer = router.post("/v1/chat/completions", &body.to_string());
    let events = answer.events();
    let text = text_of(&events);
    assert!(text.starts_with("It is far "), "{events:?}");
    assert_eq!(
        router.metric("slipstream_engine_streams_resumed_total"),
        1.0
    );
    let continued = modelled.metric("vllm:generation_tokens_total");
    assert!((1.0..6.0).contains(&continued), "{continued}");
}

#[test]
fn images_count_as_tokens() {
    let server = Server::start(&[FAST, ONE, &["--set=model.image_tokens=300"]]);
    let ask = |parts: Value| {
        chat(
            &server,
            json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}),
        )
    };
    let image = |name: &str| json!({"type": "image_url", "image_url": {"url": format!("https://a.example/{name}.png")}});
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let none = tokens(&ask(json!([])));
    assert_eq!(tokens(&ask(json!([image("cat")]))), none + 300);
    let text = json!({"type": "text", "text": "What is it?"});
    let alone = tokens(&ask(json!([text])));
    // A line break separates the two.
    assert_eq!(tokens(&ask(json!([image("cat"), text]))), alone + 301);
    let again = ask(json!([image("cat"), text]));
    assert!(cached(&again) >= 288, "an equal image is cached: {again}");
    assert!(
        cached(&ask(json!([image("dog"), text]))) < 100,
        "another one is not"
    );
    let body = json!({"messages": [{"role": "user", "content": vec![image("cat"); 20]}]});
    let refused = server.post("/v1/chat/completions", &body.to_string());
    assert_eq!(refused.status, 400);
    assert!(
        refused.error().contains("20 images have 6000 tokens"),
        "{}",
        refused.error()
    );
    let without = Server::start(&[FAST]);
    let body = json!({"messages": [{"role": "user", "content": [image("cat")]}]});
    let refused = without.post("/v1/chat/completions", &body.to_string());
    assert_eq!(refused.json()["error"]["param"], "messages.0.content");
    assert!(
        refused.error().contains("model.image_tokens"),
        "{}",
        refused.error()
    );
}

/// The other two APIs have their own forms for them.
#[test]
fn images_of_messages_and_responses_count_as_in_chats() {
    let server = Server::start(&[FAST, ONE, &["--set=model.image_tokens=300"]]);
    let text = "What is it?";
    let block = |source: Value| json!({"type": "image", "source": source});
    let cat = block(json!({"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}));
    let dog = block(json!({"type": "url", "url": "https://a.example/dog.png"}));
    let input = |answer: &Value| {
        let cached = answer["usage"]["cache_read_input_tokens"].as_u64();
        answer["usage"]["input_tokens"].as_u64().unwrap() + cached.unwrap_or(0)
    };
    let message = |content: Value| {
        let messages = json!([{"role": "user", "content": content}]);
        ask(
            &server,
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 1}),
            json!({}),
        )
    };
    let said = json!({"type": "text", "text": text});
    let alone = input(&message(json!([said])));
    // A line break separates the two.
    assert_eq!(input(&message(json!([cat, said]))), alone + 301);
    assert_eq!(input(&message(json!([dog, said, cat]))), alone + 602);
    let again = message(json!([cat, said]));
    let found = again["usage"]["cache_read_input_tokens"].as_u64();
    assert!(found >= Some(288), "an equal image is cached: {again}");
    // The same as the chat with the data as an address.
    let url = json!({"url": "data:image/png;base64,aGVsbG8="});
    let parts = json!([{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]);
    let as_chat = json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 1});
    let as_chat = ask(&server, "/v1/chat/completions", as_chat, json!({}));
    assert!(cached(&as_chat) >= 288, "{as_chat}");
    let count = json!({"messages": [{"role": "user", "content": [cat, said]}]});
    let count = ask(&server, "/v1/messages/count_tokens", count, json!({}));
    assert_eq!(count["input_tokens"], alone + 301);

    // A screenshot that a tool returned, as agents that use a computer send it.
    let call = json!([{"type": "tool_use", "id": "t", "name": "look", "input": {}}]);
    let round = |result: Value| {
        let result = json!([{"type": "tool_result", "tool_use_id": "t", "content": result}]);
        let messages = json!([
            {"role": "user", "content": "x"}, {"role": "assistant", "content": call},
            {"role": "user", "content": result},
        ]);
        ask(
            &server,
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 1}),
            json!({}),
        )
    };
    let without = input(&round(json!([said])));
    assert!(input(&round(json!([said, cat]))) >= without + 300);

    let respond = |content: Value| {
        let body = json!({"input": [{"role": "user", "content": content}], "max_output_tokens": 1});
        ask(&server, "/v1/responses", body, json!({}))
    };
    let asked = json!({"type": "input_text", "text": text});
    let picture = |url: &str| json!({"type": "input_image", "image_url": url, "detail": "auto"});
    let total = |answer: &Value| answer["usage"]["input_tokens"].as_u64().unwrap();
    let alone = total(&respond(json!([asked])));
    let first = respond(json!([picture("https://a.example/dog.png"), asked]));
    assert_eq!(total(&first), alone + 301);
    // Later responses see it, from the cache.
    let body =
        json!({"input": "And now?", "previous_response_id": first["id"], "max_output_tokens": 1});
    let next = ask(&server, "/v1/responses", body, json!({}));
    let found = next["usage"]["input_tokens_details"]["cached_tokens"].as_u64();
    assert!(total(&next) > alone + 301 && found >= Some(288), "{next}");

    for (source, param) in [
        (json!({"type": "base64", "media_type": "image/png"}), "data"),
        (
            json!({"type": "base64", "media_type": "text/html", "data": "eA=="}),
            "media_type",
        ),
        (json!({"type": "url", "url": "file:///etc/passwd"}), "url"),
        (json!({"type": "file", "file_id": "f"}), "type"),
    ] {
        let messages = json!([{"role": "user", "content": [block(source)]}]);
        let body = json!({"messages": messages, "max_tokens": 1}).to_string();
        let refused = server.post("/v1/messages", &body);
        let field = format!("`messages.0.content.0.source.{param}`");
        let message = refused.json()["error"]["message"].clone();
        assert_eq!(refused.status, 400);
        assert!(message.as_str().unwrap().starts_with(&field), "{message}");
    }
    let plain = Server::start(&[FAST]);
    let body =
        json!({"input": [{"role": "user", "content": [picture("https://a.example/x.png")]}]});
    let refused = plain.post("/v1/responses", &body.to_string());
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("input.0.content"))
    );
}

/// With an admin key, clients' keys open none of the operators' routes. Without one, a server that has keys does not start
/// with such routes.
#[test]
fn operators_need_the_admin_key() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let keys = format!("--set=live.api_keys_file={}", file("keys", "client\n"));
    let admin = format!("--set=live.admin_key_file={}", file("admin", "operator\n"));
    let (code, _, stderr) = run(&["serve", "--listen=127.0.0.1:0", MANAGED[0], &keys]);
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("live.admin_key_file"), "{stderr}");

    let server = Server::start(&[FAST, ONE, MANAGED, &[&keys, &admin]]);
    let body = r#"{"lora_name":"sql","lora_path":"/adapters/sql"}"#;
    for (path, body) in [
        ("/v1/load_lora_adapter", body),
        ("/reset_prefix_cache", ""),
        ("/sleep", ""),
        ("/wake_up", ""),
    ] {
        for (key, status) in [("client", 401), ("operator", 200)] {
            let key = format!("Authorization: Bearer {key}");
            let answer = server
                .connect()
                .send("POST", path, &[&key], body.as_bytes());
            assert_eq!(answer.status, status, "{path} {key}");
        }
    }
}

#[test]
fn adapters_come_and_go() {
    let plain = Server::start(&[FAST]);
    let body = r#"{"lora_name":"sql","lora_path":"/adapters/sql"}"#;
    for path in [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
    ] {
        assert_eq!(
            plain.post(path, body).status,
            404,
            "{path} without live.management"
        );
    }
    assert_eq!(plain.get("/is_sleeping").status, 404);

    let adapters = ["--set=model.lora_adapters=[\"base-sql\"]"];
    let server = Server::start(&[FAST, ONE, MANAGED, &adapters]);
    assert_eq!(server.post("/v1/load_lora_adapter", body).status, 200);
    for (body, param) in [
        (body, "lora_name"),
        (
            r#"{"lora_name":"test-model","lora_path":"/a"}"#,
            "lora_name",
        ),
        (r#"{"lora_name":"","lora_path":"/a"}"#, "lora_name"),
        (r#"{"lora_name":"new"}"#, "lora_path"),
        (r#"{"lora_name":"new","lora_path":""}"#, "lora_path"),
        (r#"{"lora_name":"new","lora_path":[]}"#, "lora_path"),
        (r#"{"lora_name":[],"lora_path":"/a"}"#, "lora_name"),
        (
            r#"{"lora_name":"sql","lora_path":"/a","load_inplace":[]}"#,
            "load_inplace",
        ),
    ] {
        let refused = server.post("/v1/load_lora_adapter", body);
        assert_eq!(refused.json()["error"]["param"], param, "{body}");
        assert_eq!(refused.status, 400);
    }
    let models = server.get("/v1/models").json();
    let listed: Vec<_> = array(&models, "data")
        .iter()
        .map(|model| (model["id"].as_str().unwrap(), model["parent"].as_str()))
        .collect();
    let base = Some("test-model");
    assert_eq!(
        listed,
        [("test-model", None), ("base-sql", base), ("sql", base)]
    );
    let sql = server.get("/v1/models/sql").json();
    assert_eq!(
        (&sql["parent"], &sql["root"]),
        (&json!("test-model"), &json!("/adapters/sql"))
    );
    let empty = server.post("/v1/unload_lora_adapter", r#"{"lora_name":""}"#);
    assert_eq!(empty.status, 400, "{}", empty.text());

    // Each has a cache of its own.
    let prompt = "the ".repeat(100);
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1});
        ask(&server, "/v1/completions", body, json!({}))
    };
    for model in ["test-model", "sql", "base-sql"] {
        let first = ask(model);
        assert_eq!(first["model"], model);
        assert_eq!(cached(&first), 0, "{model}");
        assert!(cached(&ask(model)) > 0, "{model}");
    }
    assert_eq!(server.post("/v1/unload_lora_adapter", body).status, 200);
    assert_eq!(server.post("/v1/unload_lora_adapter", body).status, 404);
    let gone = server.post("/v1/completions", r#"{"model":"sql","prompt":"x"}"#);
    assert_eq!(gone.status, 404);
    assert!(gone.error().contains("`base-sql`"), "{}", gone.error());
    // vLLM's keys of blocks have name and path: the same adapter finds its blocks, another of the name does not.
    assert_eq!(server.post("/v1/load_lora_adapter", body).status, 200);
    assert!(cached(&ask("sql")) > 0);
    let other = r#"{"lora_name":"sql","lora_path":"/adapters/sql-2","load_inplace":true}"#;
    assert_eq!(server.post("/v1/load_lora_adapter", other).status, 200);
    assert_eq!(
        server.get("/v1/models/sql").json()["root"],
        "/adapters/sql-2"
    );
    assert_eq!(cached(&ask("sql")), 0);
    assert!(cached(&ask("base-sql")) > 0, "others keep theirs");
    // In place of nothing it is loaded, too.
    let new = r#"{"lora_name":"new","lora_path":"/adapters/new","load_inplace":true}"#;
    assert_eq!(server.post("/v1/load_lora_adapter", new).status, 200);
    assert_eq!(ask("new")["model"], "new");
}

#[test]
fn adapters_with_open_requests_are_in_the_metrics() {
    let frozen = ["--set=model.lora_adapters=[\"a\",\"b\"]"];
    let server = Server::start(&[crate::server::FROZEN, &frozen]);
    let info = |waiting: &str| {
        format!(
            "vllm:lora_requests_info{{max_lora=\"1024\",waiting_lora_adapters=\"{waiting}\",\
             running_lora_adapters=\"\"}}"
        )
    };
    let body = r#"{"model":"a","prompt":"x","max_tokens":5}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    server.await_metric(&info("a"), |value| value > 1e9);
    drop(client);
    server.await_metric(&info(""), |value| value > 1e9);
}

/// Requests that wait for sleeping engines are open streams, end in time, and hold no exit up.
#[test]
fn requests_that_wait_for_sleeping_engines_have_limits() {
    let limits = [
        "--set=live.request_timeout_s=0.5",
        "--set=live.streams_max=2",
    ];
    let server = Server::start(&[FAST, ONE, MANAGED, &limits]);
    assert_eq!(server.post("/sleep", "").status, 200);
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    assert_eq!(server.post("/v1/completions", &body).status, 504);
    let ask = || server.post("/v1/completions", &body).status;
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        let mut statuses: Vec<u16> = asked.into_iter().map(|of| of.join().unwrap()).collect();
        statuses.sort_unstable();
        assert_eq!(statuses[5], 504, "{statuses:?}");
        assert!(statuses[0] < 504, "two streams may be open: {statuses:?}");
    });

    let server = Server::start(&[FAST, ONE, MANAGED, &["--set=live.streams_max=1"]]);
    assert_eq!(server.post("/sleep", "").status, 200);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    while server.get("/ready").status == 200 {
        std::thread::yield_now(); // no stream is left once it waits
    }
    assert!(server.terminate().success());
    let answer = client.answer();
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "stopping");
}

#[test]
fn asleep_requests_wait_and_the_cache_is_lost() {
    let server = Server::start(&[FAST, ONE, MANAGED]);
    let prompt = "the ".repeat(100);
    let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
    let hit = || cached(&server.post("/v1/completions", &body).json());
    assert_eq!(hit(), 0);
    assert!(hit() > 0);
    assert_eq!(
        server.post("/reset_prefix_cache", "").json(),
        json!({"success": true})
    );
    assert_eq!(hit(), 0);
    assert!(hit() > 0);

    let sleeping = || {
        server.get("/is_sleeping").json()["is_sleeping"]
            .as_bool()
            .unwrap()
    };
    let state = |state: &str| {
        let name = format!(
            "vllm:engine_sleep_state{{model_name=\"test-model\",engine=\"0\",sleep_state=\"{state}\"}}"
        );
        server.metric(&name)
    };
    assert!(!sleeping());
    assert_eq!((state("awake"), state("weights_offloaded")), (1.0, 0.0));
    assert_eq!(server.post("/sleep?level=3", "").status, 400);
    let answer = server.post("/sleep?level=1&mode=wait", "");
    assert_eq!(answer.json(), json!({"status": "sleeping", "level": 1}));
    assert!(sleeping());
    assert_eq!(
        (
            state("awake"),
            state("weights_offloaded"),
            state("discard_all")
        ),
        (0.0, 1.0, 0.0)
    );
    let before = server.metric("slipstream_http_requests_total");
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(hit);
        // Its request has arrived, and the questions of this thread are answered meanwhile.
        server.await_metric("slipstream_http_requests_total", |requests| {
            requests > before + 2.0
        });
        assert_eq!(server.metric("vllm:num_requests_running"), 0.0);
        assert_eq!(server.post("/wake_up?tags=other", "").status, 400);
        let answer = server.post("/wake_up?tags=weights", "");
        assert_eq!(
            answer.json(),
            json!({"status": "sleeping", "tags": ["weights"]})
        );
        assert!(sleeping() && !waiting.is_finished());
        let answer = server.post("/wake_up?tags=kv_cache", "");
        assert_eq!(answer.json()["status"], "awake");
        waiting.join().unwrap()
    });
    assert_eq!(waiting, 0, "sleep drops the cache");
    assert!(!sleeping());
    assert_eq!(state("awake"), 1.0);
}

/// Families of vLLM 0.32 by `/metrics` of a server with its default options, with their types and labels
/// (`vllm/v1/metrics/loggers.py`), and whether ours has them.
const FAMILIES: &[(&str, &str, &[&str], bool)] = &[
    ("vllm:num_requests_running", "gauge", &[], true),
    ("vllm:num_requests_waiting", "gauge", &[], true),
    (
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        &["reason"],
        true,
    ),
    ("vllm:engine_sleep_state", "gauge", &["sleep_state"], true),
    ("vllm:kv_cache_usage_perc", "gauge", &[], true),
    ("vllm:prefix_cache_queries", "counter", &[], true),
    ("vllm:prefix_cache_hits", "counter", &[], true),
    ("vllm:external_prefix_cache_queries", "counter", &[], true),
    ("vllm:external_prefix_cache_hits", "counter", &[], true),
    ("vllm:mm_cache_queries", "counter", &[], true),
    ("vllm:mm_cache_hits", "counter", &[], true),
    ("vllm:num_preemptions", "counter", &[], true),
    ("vllm:prompt_tokens", "counter", &[], true),
    ("vllm:prompt_tokens_by_source", "counter", &["source"], true),
    ("vllm:prompt_tokens_cached", "counter", &[], true),
    (
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        &["source"],
        false,
    ),
    ("vllm:generation_tokens", "counter", &[], true),
    (
        "vllm:request_success",
        "counter",
        &["finished_reason"],
        true,
    ),
    ("vllm:admission_rejections", "counter", &["reason"], false),
    ("vllm:request_prompt_tokens", "histogram", &["le"], true),
    ("vllm:request_generation_tokens", "histogram", &["le"], true),
    ("vllm:iteration_tokens_total", "histogram", &["le"], true),
    (
        "vllm:request_max_num_generation_tokens",
        "histogram",
        &["le"],
        true,
    ),
    ("vllm:request_params_n", "histogram", &["le"], true),
    ("vllm:request_params_max_tokens", "histogram", &["le"], true),
    (
        "vllm:time_to_first_token_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:request_queue_time_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:request_inference_time_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:request_prefill_time_seconds",
        "histogram",
        &["le"],
        true,
    ),
    (
        "vllm:request_decode_time_seconds",
        "histogram",
        &["le"],
        true,
    ),
    ("vllm:request_num_preemptions", "histogram", &["le"], true),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        &["le"],
        true,
    ),
];

#[test]
fn dashboards_of_vllm_find_their_metrics() {
    let server = Server::start(&[FAST, ONE]);
    let answer = complete(
        &server,
        json!({"max_tokens": 4, "ignore_eos": true, "n": 2}),
    );
    let prompt = answer["usage"]["prompt_tokens"].as_f64().unwrap();
    let text = server.get("/metrics").text();
    let types: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    for (name, kind, labels, ours) in FAMILIES {
        // In Prometheus's text format the family of a counter has the name of its samples.
        let family = match *kind {
            "counter" => format!("{name}_total"),
            _ => (*name).to_owned(),
        };
        assert_eq!(types.get(&*family), ours.then_some(kind), "{name}");
        if !ours {
            continue;
        }
        let suffix = match *kind {
            "counter" => "_total",
            "histogram" => "_bucket",
            _ => "",
        };
        let series = format!("{name}{suffix}{{");
        let sample = text.lines().find(|line| line.starts_with(&series));
        let sample = sample.unwrap_or_else(|| panic!("no sample of {series}"));
        for label in labels.iter().chain(&["model_name", "engine"]) {
            assert!(
                sample.contains(&format!("{label}=\"")),
                "{label} in {sample}"
            );
        }
        assert!(sample.contains("model_name=\"test-model\""), "{sample}");
    }
    assert!(types.contains_key("vllm:cache_config_info"));
    // Known numbers of the one request: two choices of four tokens.
    for (name, value) in [
        ("vllm:request_params_n_sum", 2.0),
        ("vllm:request_params_n_count", 1.0),
        ("vllm:request_params_max_tokens_sum", 8.0),
        ("vllm:request_max_num_generation_tokens_sum", 4.0),
        ("vllm:request_queue_time_seconds_count", 2.0),
        ("vllm:request_decode_time_seconds_count", 2.0),
        ("vllm:request_inference_time_seconds_count", 2.0),
        ("vllm:request_prefill_time_seconds_count", 2.0),
        ("vllm:request_time_per_output_token_seconds_count", 2.0),
        ("vllm:prompt_tokens_by_source_total", prompt),
    ] {
        server.await_metric(name, |seen| (seen - value).abs() < 1e-9);
    }
    // Every token was computed in some step: the prompts' (of two choices, as far as not shared), and all that were
    // generated.
    let computed = server.metric("vllm:iteration_tokens_total_sum");
    assert!(
        (8.0 + prompt..=8.0 + 2.0 * prompt).contains(&computed),
        "{computed}"
    );
    let steps = server.metric("vllm:iteration_tokens_total_count");
    assert_eq!(steps, server.metric("slipstream_rank_passes_total"));
    // Phases of a request: none is longer than all of it.
    let sum = |name: &str| server.metric(&format!("vllm:{name}_seconds_sum"));
    let whole = sum("request_inference_time");
    assert!(sum("request_prefill_time") <= whole);
    assert!(whole <= 2.0 * sum("e2e_request_latency"));
}
