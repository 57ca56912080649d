//! Facts from answers in the forms that engines give, and from servers that are none.

use std::time::Duration;

use serde_json::json;
use slipstream_base::EngineKind;
use slipstream_probe::facts::Endpoint;
use slipstream_probe::{
    Answer, AskError, Client, EngineFacts, FetchError, KvEventSource, Outcome, Parallel, ask,
    facts, load,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Facts of an engine whose endpoints give `bodies`; the others answer with 404.
fn learn(bodies: &[(Endpoint, String)]) -> EngineFacts {
    let answers: Vec<_> = Endpoint::ALL
        .into_iter()
        .map(|endpoint| {
            let found = bodies.iter().find(|(of, _)| *of == endpoint);
            let (status, body) = found.map_or((404, ""), |(_, body)| (200, body));
            let body = body.to_owned().into();
            (endpoint, Ok(Answer { status, body }))
        })
        .collect();
    facts::learn("http://gpu1:8000", "gpu1", &answers)
}

fn model(owner: &str) -> String {
    json!({"object": "list", "data": [
        {"id": "base", "object": "model", "owned_by": owner, "root": "org/Base", "parent": null,
         "max_model_len": 4096},
        {"id": "adapter", "object": "model", "owned_by": owner, "root": "/lora", "parent": "base",
         "max_model_len": null},
    ]})
    .to_string()
}

/// The labels of `vllm:cache_config_info` in vLLM 0.32, with two data-parallel ranks.
fn vllm_metrics() -> String {
    let rank = |engine: u32, blocks: u32| {
        format!(
            "vllm:cache_config_info{{block_size=\"32\",cache_dtype=\"auto\",\
             calculate_kv_scales=\"False\",enable_prefix_caching=\"True\",engine=\"{engine}\",\
             gpu_memory_utilization=\"0.92\",kv_cache_dtype_skip_layers=\"[]\",\
             num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\",sliding_window=\"None\"}} 1.0\n"
        )
    };
    format!(
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
         # TYPE vllm:cache_config_info gauge\n{}{}\
         vllm:num_requests_running{{engine=\"0\",model_name=\"base\"}} 0.0\n",
        rank(0, 5000),
        rank(1, 4000)
    )
}

#[test]
fn vllm_is_read_from_its_metrics() {
    let sources = json!({
        "1": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5558",
              "replay_endpoint": "tcp://0.0.0.0:5568", "buffer_steps": 10000, "topic": "kv"},
        "0": {"publisher": "zmq", "endpoint": "tcp://10.0.0.7:5557", "replay_endpoint": null},
        "3": {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5560"},
        "4": {"publisher": "zmq", "endpoint": "tcp://*:5561", "enable_kv_cache_events": false},
        "2": {"publisher": "null", "endpoint": "tcp://*:5559"},
    });
    let facts = learn(&[
        (Endpoint::Models, model("vllm")),
        (Endpoint::Version, json!({"version": "0.32.0"}).to_string()),
        (Endpoint::Metrics, vllm_metrics()),
        (Endpoint::KvEventSources, sources.to_string()),
    ]);
    assert_eq!(
        (facts.kind, facts.version.as_deref()),
        (EngineKind::Vllm, Some("0.32.0"))
    );
    assert_eq!((facts.block_size, facts.kv_blocks), (Some(32), Some(4000)));
    assert_eq!(
        (facts.prefix_caching, facts.kv_cache_dtype.as_deref()),
        (Some(true), Some("auto"))
    );
    assert_eq!(facts.gpu_memory_utilization, Some(0.92));
    assert_eq!(
        (facts.parallel.data, facts.parallel.tensor),
        (Some(2), None)
    );
    assert_eq!(facts.max_model_len, Some(4096));
    assert_eq!(facts.base_model().unwrap().id, "base");
    assert_eq!(facts.models[1].parent.as_deref(), Some("base"));
    let source = |rank, endpoint: &str, replay: Option<&str>, topic: &str| KvEventSource {
        rank,
        endpoint: endpoint.into(),
        replay_endpoint: replay.map(str::to_owned),
        topic: topic.into(),
    };
    // A wildcard is reached at the engine's host, and a loopback address from there only.
    let expected = [
        source(0, "tcp://10.0.0.7:5557", None, ""),
        source(1, "tcp://gpu1:5558", Some("tcp://gpu1:5568"), "kv"),
    ];
    assert_eq!(facts.kv_events, expected);
    let not_found = facts
        .asked
        .iter()
        .filter(|a| a.outcome == Outcome::Status(404))
        .count();
    assert_eq!((facts.asked.len(), not_found), (8, 4));
}

#[test]
fn vllm_in_development_mode_says_more() {
    let parallel = json!({"tensor_parallel_size": 4, "pipeline_parallel_size": 2,
        "data_parallel_size": 2, "enable_expert_parallel": true});
    let info = json!({"vllm_config": {
        "parallel_config": parallel,
        "scheduler_config": {"max_num_seqs": 128, "max_num_batched_tokens": 2048,
                             "enable_chunked_prefill": true, "async_scheduling": false},
        "model_config": {"max_model_len": 2048, "dtype": "torch.bfloat16", "quantization": "fp8"},
        "cache_config": {"block_size": 16, "num_gpu_blocks": 77, "enable_prefix_caching": false},
    }, "vllm_env": {}, "system_env": {}});
    let facts = learn(&[
        (Endpoint::ServerInfo, info.to_string()),
        (Endpoint::Models, model("vllm")),
    ]);
    let expected = Parallel {
        tensor: Some(4),
        pipeline: Some(2),
        data: Some(2),
        expert: Some(8),
    };
    assert_eq!((facts.kind, facts.parallel), (EngineKind::Vllm, expected));
    assert_eq!(
        (facts.max_num_seqs, facts.max_num_batched_tokens),
        (Some(128), Some(2048))
    );
    assert_eq!((facts.block_size, facts.kv_blocks), (Some(16), Some(77)));
    assert_eq!(
        (facts.prefix_caching, facts.chunked_prefill),
        (Some(false), Some(true))
    );
    // vLLM's CPU backend schedules synchronously.
    assert_eq!(facts.async_scheduling, Some(false));
    assert_eq!(
        (facts.dtype.as_deref(), facts.quantization.as_deref()),
        (Some("bfloat16"), Some("fp8"))
    );
    assert_eq!(facts.max_model_len, Some(2048));

    // Earlier versions print the configuration.
    let text = "model='org/Base', speculative_config=None, dtype=torch.float16, max_seq_len=8192, \
        tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, quantization=None, \
        enable_chunked_prefill=True, compilation_config={'level': 3}";
    let info = json!({"vllm_config": text});
    let facts = learn(&[
        (Endpoint::ServerInfo, info.to_string()),
        (Endpoint::Models, model("vllm")),
    ]);
    assert_eq!(
        (facts.parallel.tensor, facts.parallel.pipeline),
        (Some(2), Some(1))
    );
    assert_eq!(
        (facts.dtype.as_deref(), facts.quantization),
        (Some("float16"), None)
    );
    assert_eq!(
        (facts.max_model_len, facts.chunked_prefill),
        (Some(8192), Some(true))
    );
}

#[test]
fn sglang_is_read_from_its_server_info() {
    let events = r#"{"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv-events"}"#;
    let info = json!({
        "model_path": "org/Base", "tokenizer_path": "org/Base", "page_size": 16, "tp_size": 2,
        "pp_size": 1, "dp_size": 2, "ep_size": 1, "mem_fraction_static": 0.85,
        "disable_radix_cache": false, "kv_cache_dtype": "auto", "context_length": 8192,
        "chunked_prefill_size": 4096, "max_running_requests": null, "quantization": null,
        "dtype": "auto", "kv_events_config": events, "version": "0.5.9",
        "internal_states": [{"max_total_num_tokens": 160_000, "max_running_requests": 48}],
    });
    for (endpoint, at_top) in [
        (Endpoint::ServerInfo, false),
        (Endpoint::GetServerInfo, true),
    ] {
        let mut info = info.clone();
        if at_top {
            info["max_total_num_tokens"] = json!(160_000);
            info["internal_states"] = json!(null);
            info["max_running_requests"] = json!(48);
        }
        let facts = learn(&[
            (Endpoint::Models, model("sglang")),
            (endpoint, info.to_string()),
        ]);
        assert_eq!(
            (facts.kind, facts.version.as_deref()),
            (EngineKind::Sglang, Some("0.5.9"))
        );
        assert_eq!(
            (facts.block_size, facts.kv_blocks),
            (Some(16), Some(10_000))
        );
        assert_eq!(
            (facts.prefix_caching, facts.max_num_seqs),
            (Some(true), Some(48))
        );
        assert_eq!(
            (facts.parallel.tensor, facts.parallel.data),
            (Some(2), Some(2))
        );
        assert_eq!(facts.max_model_len, Some(8192));
        // Each rank's port is one above the rank's before it.
        let endpoints: Vec<&str> = facts.kv_events.iter().map(|s| &*s.endpoint).collect();
        assert_eq!(endpoints, ["tcp://gpu1:5557", "tcp://gpu1:5558"]);
    }
}

#[test]
fn llama_cpp_is_read_from_its_properties() {
    let props = json!({"default_generation_settings": {"id": 0, "n_ctx": 2048}, "total_slots": 4,
        "model_path": "/models/m.gguf", "build_info": "b6200-abc", "chat_template": "…"});
    let facts = learn(&[
        (Endpoint::Models, model("llamacpp")),
        (Endpoint::Props, props.to_string()),
    ]);
    assert_eq!(
        (facts.kind, facts.version.as_deref()),
        (EngineKind::LlamaCpp, Some("b6200-abc"))
    );
    assert_eq!(
        (facts.max_num_seqs, facts.max_model_len),
        (Some(4), Some(2048))
    );
    assert_eq!((facts.block_size, facts.kv_blocks), (None, None));
}

/// Slipstream's metrics include some under vLLM's names.
#[test]
fn an_owner_counts_more_than_metrics() {
    let metrics = "vllm:num_requests_running 1\n\
        vllm:cache_config_info{worker=\"w0\",engine=\"0\",num_gpu_blocks=\"512\"} 1\n\
        vllm:cache_config_info{worker=\"w1\",engine=\"0\",num_gpu_blocks=\"512\"} 1\n\
        slipstream_frames_total 7\n";
    let facts = learn(&[
        (Endpoint::Metrics, metrics.into()),
        (Endpoint::Models, model("slipstream")),
    ]);
    assert_eq!(
        (facts.kind, facts.kv_blocks, facts.parallel.data),
        (EngineKind::Slipstream, Some(512), Some(1))
    );
    assert_eq!((facts.workers, facts.kv_blocks_max), (Some(2), None));
    // A router before vLLM that passes its metrics on.
    let facts = learn(&[
        (Endpoint::Metrics, vllm_metrics()),
        (Endpoint::Models, model("someone")),
    ]);
    assert_eq!(facts.kind, EngineKind::Vllm);
    let facts = learn(&[(Endpoint::Models, model("someone"))]);
    assert_eq!(facts.kind, EngineKind::OpenAi);
}

/// Speculation, adapters and unequal ranks, in each engine's form.
#[test]
fn features_and_unequal_ranks_are_facts() {
    let of = |info: serde_json::Value| learn(&[(Endpoint::ServerInfo, info.to_string())]);
    let features = |facts: &EngineFacts| {
        let of = (facts.speculation.clone(), facts.speculative_tokens);
        (of.0, of.1, facts.max_loras)
    };
    let vllm = |more: serde_json::Value| of(json!({"vllm_config": more}));
    let all = vllm(
        json!({"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
        "lora_config": {"max_loras": 4}}),
    );
    assert_eq!(features(&all), (Some("eagle3".into()), Some(3), Some(4)));
    let none = vllm(json!({"speculative_config": null, "lora_config": null}));
    assert_eq!(features(&none), (None, None, None));
    let text = |text: &str| features(&of(json!({"vllm_config": text})));
    let found = text(
        "model='m', speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2), dtype=torch.bfloat16",
    );
    assert_eq!(found, (Some("mtp".into()), Some(2), None));
    assert_eq!(
        text("model='m', speculative_config=None, lora_config=None"),
        (None, None, None)
    );
    let sglang = of(json!({"page_size": 16, "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": 4, "enable_lora": true, "max_loras_per_batch": 8,
        "internal_states": [{"max_total_num_tokens": 400_000}, {"max_total_num_tokens": 320_000}]}));
    assert_eq!(features(&sglang), (Some("EAGLE".into()), Some(4), Some(8)));
    assert_eq!(
        (sglang.kv_blocks, sglang.kv_blocks_max),
        (Some(20_000), Some(25_000))
    );
    let ranks = learn(&[(Endpoint::Metrics, vllm_metrics())]);
    assert_eq!(
        (ranks.kv_blocks, ranks.kv_blocks_max),
        (Some(4000), Some(5000))
    );
    assert_eq!(ranks.workers, None);
}

#[test]
fn answers_of_another_form_are_reported_and_not_believed() {
    let facts = learn(&[
        (
            Endpoint::Models,
            json!({"data": [{"id": "m", "max_model_len": -5}]}).to_string(),
        ),
        (Endpoint::Version, "\"1\"".into()),
        (Endpoint::Metrics, "<html></html>".into()),
        (Endpoint::ServerInfo, "[1]".into()),
        (Endpoint::Props, "{".into()),
        (Endpoint::KvEventSources, json!({"zero": {}}).to_string()),
    ]);
    let unreadable = |o: &Outcome| matches!(o, Outcome::Unreadable(_));
    let found: Vec<_> = facts
        .asked
        .iter()
        .filter(|a| unreadable(&a.outcome))
        .map(|a| a.path)
        .collect();
    let expected = [
        "/version",
        "/metrics",
        "/server_info?config_format=json",
        "/props",
        "/kv_event_sources",
    ];
    assert_eq!(found, expected);
    assert_eq!(
        (facts.max_model_len, facts.kind),
        (None, EngineKind::OpenAi)
    );
    // Numbers that cannot be right are not facts.
    let metrics = "vllm:cache_config_info{block_size=\"0\",num_gpu_blocks=\"None\"} 1\n";
    let facts = learn(&[(Endpoint::Metrics, metrics.into())]);
    assert_eq!((facts.block_size, facts.kv_blocks), (None, None));
}

/// Serves `answer` to every request on a free port; returns the URL.
async fn serve(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = std::sync::Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if stream.read(&mut byte).await.unwrap_or(0) == 0 {
                        return;
                    }
                    head.push(byte[0]);
                }
                let bytes = answer(&String::from_utf8_lossy(&head));
                let _ = stream.write_all(&bytes).await;
                let hang = bytes.is_empty();
                if hang {
                    std::future::pending::<()>().await;
                }
            });
        }
    });
    url
}

fn ok(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn an_engine_is_asked_with_its_key() {
    let url = serve(|head| match head {
        _ if !head.contains("authorization: Bearer sk-1\r\n") => {
            b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n".to_vec()
        }
        _ if head.starts_with("GET /v1/models ") => ok(&model("vllm")),
        _ if head.starts_with("GET /metrics ") => ok(&vllm_metrics()),
        _ => b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec(),
    })
    .await;
    let facts = ask(&url, Some("sk-1"), SOON).await.unwrap();
    assert_eq!((facts.kind, facts.block_size), (EngineKind::Vllm, Some(32)));
    let client = Client::new(&url, Some("sk-1"), None).unwrap();
    assert_eq!(load::load(&client, SOON).await.unwrap().running, Some(0));
    let error = ask(&url, Some("sk-2"), SOON).await.unwrap_err();
    assert!(
        matches!(error, AskError::Refused { status: 401, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_server_that_is_no_engine_is_refused_with_what_it_said() {
    let web = serve(|_| ok("<html>hello</html>")).await;
    let error = ask(&web, None, SOON).await.unwrap_err().to_string();
    for part in ["/v1/models", "not JSON", "/metrics"] {
        assert!(error.contains(part), "{error}");
    }
    // A port that nothing listens on.
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let error = ask(&url, None, SOON).await.unwrap_err();
    assert!(matches!(error, AskError::Unreachable { .. }), "{error}");
    let ssh = serve(|_| b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()).await;
    let error = ask(&ssh, None, SOON).await.unwrap_err();
    assert!(matches!(error, AskError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn silence_and_endless_bodies_are_bounded() {
    let silent = serve(|_| Vec::new()).await;
    let client = Client::new(&silent, None, None).unwrap();
    let error = client
        .get("/metrics", Duration::from_millis(50))
        .await
        .unwrap_err();
    assert!(matches!(error, FetchError::Timeout { .. }), "{error}");
    let endless = serve(|_| {
        let mut out = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
        for _ in 0..10 {
            out.extend_from_slice(b"100000\r\n");
            out.resize(out.len() + (1 << 20), b'a');
            out.extend_from_slice(b"\r\n");
        }
        out
    })
    .await;
    let client = Client::new(&endless, None, None).unwrap();
    let error = client.get("/metrics", SOON).await.unwrap_err();
    assert!(matches!(error, FetchError::TooLong { .. }), "{error}");
    let cut = serve(|_| b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec()).await;
    let client = Client::new(&cut, None, None).unwrap();
    let error = client.get("/metrics", SOON).await.unwrap_err();
    assert!(matches!(error, FetchError::Answer { .. }), "{error}");
}
