//! Cost of tokens and requests in text and JSON.
//!
//! `cargo bench -p slipstream-frontend --bench openai`
//!
//! `SLIPSTREAM_TOKENIZER=DIR` adds the encoding of prompts by the `tokenizer.json` in a directory, by
//! ours and by the `tokenizers` library.

#![allow(missing_docs)] // criterion's macros make items without

use std::hint::black_box;

use bytes::BytesMut;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::{TokenId, mix};
use slipstream_frontend::openai::{
    CompletionApi, Finish, Head, SseRender, UnaryChoice, Usage, parse_chat, parse_completion,
    render_unary,
};
use slipstream_frontend::text::{ChatOptions, Message, StopMatcher, TextModel};

const HEAD: Head<'static> = Head {
    kind: CompletionApi::Chat,
    id: "chatcmpl-0123456789abcdef",
    created: 1_700_000_000,
    model: "qwen3-32b",
    include_usage: false,
};

fn answer(model: &TextModel, len: u64) -> Vec<TokenId> {
    let vocab = model.output_vocab();
    (0..len)
        .map(|at| vocab[mix::below(mix::draw(1, at), vocab.len() as u64) as usize])
        .collect()
}

/// One event per token, as a stream of an answer renders them: 1,024 tokens, then the buffer goes.
fn sse(criterion: &mut Criterion, model: &TextModel) {
    let render = SseRender::new(&HEAD, 0);
    let tokens = answer(model, 1024);
    let mut group = criterion.benchmark_group("sse");
    group.throughput(Throughput::Elements(tokens.len() as u64));
    let mut out = BytesMut::with_capacity(512 << 10);
    group.bench_function("escaped token, 1024", |b| {
        b.iter(|| {
            out.clear();
            for &token in &tokens {
                let json = model.token_json(token).expect("words are whole characters");
                render.escaped(json, &mut out);
            }
            black_box(out.len())
        });
    });
    group.bench_function("text, 1024", |b| {
        b.iter(|| {
            out.clear();
            for &token in &tokens {
                let text = std::str::from_utf8(model.token_bytes(token)).expect("words are text");
                render.text(text, &mut out);
            }
            black_box(out.len())
        });
    });
    group.bench_function("stop strings, 1024", |b| {
        let stops = ["\n\nUser:", "<|end|>", "zzz", " the end of the"];
        b.iter(|| {
            out.clear();
            let mut matcher = StopMatcher::new(&stops, false);
            let mut shown = String::new();
            for &token in &tokens {
                let text = std::str::from_utf8(model.token_bytes(token)).expect("words are text");
                shown.clear();
                matcher.push(text, &mut shown);
                render.text(&shown, &mut out);
            }
            black_box(out.len())
        });
    });
    group.finish();
    criterion.bench_function("sse/open a stream", |b| {
        b.iter(|| SseRender::new(black_box(&HEAD), 0));
    });
    let text = model.decode(&tokens);
    criterion.bench_function("whole answer of 1024 tokens", |b| {
        let choices = [UnaryChoice {
            text: &text,
            finish: Finish::Length,
            logprobs: None,
        }];
        b.iter(|| {
            let mut out = Vec::new();
            render_unary(&HEAD, &choices, &Usage::default(), &mut out);
            out
        });
    });
}

fn requests(criterion: &mut Criterion, model: &TextModel) {
    let said = model.decode(&answer(model, 256));
    let turns: Vec<_> = ["user", "assistant", "user", "assistant"]
        .map(|role| serde_json::json!({"role": role, "content": said}))
        .into();
    let chat = serde_json::json!({
        "model": "qwen3-32b", "messages": turns, "stream": true, "max_tokens": 1024,
        "temperature": 0.7, "stream_options": {"include_usage": true},
    })
    .to_string();
    let mut group = criterion.benchmark_group("request of 1024 tokens");
    group.throughput(Throughput::Bytes(chat.len() as u64));
    group.bench_function("parse, chat", |b| {
        b.iter(|| parse_chat(black_box(chat.as_bytes())).expect("it is well formed"));
    });
    group.bench_function("parse, chat with escapes", |b| {
        let escaped = chat.replace(" s", "\\ns");
        b.iter(|| parse_chat(black_box(escaped.as_bytes())).expect("it is well formed"));
    });
    let ids = serde_json::json!({"model": "qwen3-32b", "prompt": answer(model, 1024)}).to_string();
    group.bench_function("parse, token ids", |b| {
        b.iter(|| parse_completion(black_box(ids.as_bytes())).expect("it is well formed"));
    });
    let messages: Vec<Message<'_>> = ["user", "assistant", "user", "assistant"]
        .map(|role| Message::new(role, &said))
        .into();
    let options = ChatOptions {
        add_generation_prompt: true,
        continue_final_message: false,
        tools: &[],
        template_kwargs: &[],
        now_unix_s: 0,
    };
    let mut tokens = Vec::with_capacity(2048);
    group.bench_function("tokenize, chat", |b| {
        b.iter(|| {
            tokens.clear();
            model
                .encode_chat(&messages, &options, &mut tokens)
                .expect("the built-in template takes all");
            black_box(tokens.len())
        });
    });
    group.finish();
}

/// English prose and a document full of code and punctuation.
fn encode(criterion: &mut Criterion, model: &TextModel) {
    let mut group = criterion.benchmark_group("encode");
    for (name, text) in [
        ("words", model.decode(&answer(model, 16 << 10))),
        (
            "document",
            include_str!("../../../../docs/openai-api.md").repeat(8),
        ),
    ] {
        group.throughput(Throughput::Bytes(text.len() as u64));
        let mut tokens = Vec::new();
        group.bench_function(name, |b| {
            b.iter(|| {
                tokens.clear();
                model.encode(black_box(&text), false, &mut tokens);
                black_box(tokens.len())
            });
        });
    }
    group.finish();
}

fn benches(criterion: &mut Criterion) {
    let model = TextModel::builtin();
    sse(criterion, &model);
    requests(criterion, &model);
    encode(criterion, &model);
}

/// Prompts of the `tokenizer.json` that the environment names. Each prompt begins elsewhere in the text,
/// so that no encoder has seen it as a whole; its words come again, as in real traffic.
fn prompts(criterion: &mut Criterion) {
    let Some(dir) = std::env::var_os("SLIPSTREAM_TOKENIZER") else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    let model = TextModel::load(&dir).expect("SLIPSTREAM_TOKENIZER names a tokenizer's directory");
    let library =
        tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).expect("it was read before");
    let words: Vec<&str> = include_str!("../src/tokens/dispatching.rs")
        .split_whitespace()
        .collect();
    let text = |from: usize, len: usize| -> String {
        let words = words.iter().cycle().skip(from % words.len()).take(len);
        words.copied().collect::<Vec<_>>().join(" ")
    };
    let special = model.decode(&[model.eos()]);
    let turns: String = (0..20)
        .map(|turn| text(turn * 97, 100) + &special)
        .collect();
    let mut out = Vec::new();
    let mut group = criterion.benchmark_group("prompts");
    for len in [120, 2_500] {
        let mut at = 0;
        let mut prompt = || {
            at += 1;
            text(at, len)
        };
        out.clear();
        model.encode(&prompt(), true, &mut out);
        let tokens = out.len();
        group.bench_function(format!("{len} words, {tokens} tokens"), |b| {
            b.iter_batched_ref(
                &mut prompt,
                |prompt| {
                    out.clear();
                    model.encode(prompt, true, &mut out);
                },
                BatchSize::SmallInput,
            );
        });
        group.bench_function(format!("{len} words by the library"), |b| {
            b.iter_batched_ref(
                &mut prompt,
                |prompt| library.encode_fast(prompt.as_str(), true).unwrap(),
                BatchSize::SmallInput,
            );
        });
    }
    let mut at = 0;
    group.bench_function(
        "the next turn of a chat: 20 turns before, 120 new words",
        |b| {
            b.iter_batched_ref(
                || {
                    at += 1;
                    turns.clone() + &text(at, 120)
                },
                |prompt| {
                    out.clear();
                    model.encode(prompt, true, &mut out);
                },
                BatchSize::SmallInput,
            );
        },
    );
    group.finish();
}

criterion_group!(all, benches, prompts);
criterion_main!(all);
