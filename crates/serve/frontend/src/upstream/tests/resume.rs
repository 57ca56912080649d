//! Streams of a modelled vLLM that break off anywhere, and whose clients must get the answer of one that does not.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::super::api::StreamKind;
use super::super::lax;
use super::super::resume::{Lost, Plan, plans};
use super::super::rewrite::Verdict;
use super::super::sent::{Kept, Phase, Sent, data_of, text_of};

/// Bytes of tokens: letters, parts of characters, and white space. Token 0 ends an answer.
const PIECES: [&[u8]; 12] = [
    b"",
    b"a",
    b" b",
    b"ab",
    b"E",
    b"ND",
    b"\n",
    b"\xc3",
    b"\xa9",
    b"\xe2\x82",
    b"\xac",
    b"c\xc3",
];

/// The next token of a greedy model.
fn next(ids: &[u64], seed: u64, min_left: u64) -> u64 {
    let mixed = ids.iter().fold(seed, |hash, id| {
        slipstream_base::mix::mix64(hash ^ id.wrapping_mul(0x9e37_79b9))
    });
    let odds = slipstream_base::mix::mix64(mixed);
    // Parts of a character mostly follow each other.
    let last = ids.last().map_or(0, |&id| id as usize % PIECES.len());
    let follows = match PIECES[last] {
        b"\xc3" | b"c\xc3" => Some(8),
        b"\xe2\x82" => Some(10),
        _ => None,
    };
    match follows {
        Some(follows) => follows,
        None if odds.is_multiple_of(29) && min_left == 0 => 0,
        None => [1, 2, 3, 4, 5, 6, 7, 9, 11, 1, 2, 4][(odds >> 8) as usize % 12],
    }
}

/// vLLM's text of tokens behind a prompt: the incomplete end of a character waits for its rest.
#[derive(Default)]
struct Detokenizer {
    waiting: Vec<u8>,
    /// The prompt ended within a character.
    is_broken: bool,
}

impl Detokenizer {
    fn of_prompt(ids: &[u64]) -> Detokenizer {
        let mut of_prompt = Detokenizer::default();
        for &id in ids {
            of_prompt.step(id);
        }
        Detokenizer {
            is_broken: !of_prompt.waiting.is_empty(),
            waiting: Vec::new(),
        }
    }

    fn step(&mut self, id: u64) -> String {
        self.waiting
            .extend_from_slice(PIECES[id as usize % PIECES.len()]);
        if std::mem::take(&mut self.is_broken) {
            self.waiting.clear(); // as vLLM, which begins anew with the next token
            return String::new();
        }
        match std::str::from_utf8(&self.waiting) {
            Ok(text) => {
                let text = text.to_owned();
                self.waiting.clear();
                text
            }
            // Not the beginning of a character.
            Err(error) if error.error_len().is_some() => {
                let text = String::from_utf8_lossy(&self.waiting).into_owned();
                self.waiting.clear();
                text
            }
            Err(_) => String::new(),
        }
    }
}

/// An event of an answer.
#[derive(Clone, Debug)]
struct Out {
    text: String,
    ids: Vec<u64>,
    finish: Option<&'static str>,
    stop: Value,
}

/// Settings of a request.
#[derive(Clone, Debug)]
struct Ask {
    seed: u64,
    /// Tokens per event, by turns.
    joins: Vec<usize>,
    stop: Vec<String>,
    includes: bool,
}

/// The answer of an engine. Source: vLLM 0.32, `v1/engine/detokenizer.py`.
fn generate(ask: &Ask, prompt: &[u64], max_tokens: u64, min_tokens: u64) -> Vec<Out> {
    let (mut ids, mut outs) = (prompt.to_vec(), Vec::<Out>::new());
    let mut detokenizer = Detokenizer::of_prompt(prompt);
    let (mut text, mut shown) = (String::new(), 0);
    let longest = ask.stop.iter().map(|of| of.chars().count()).max();
    let held = if ask.includes {
        0
    } else {
        longest.unwrap_or(1) - 1
    };
    let mut turn = 0;
    let mut made = 0;
    loop {
        let mut out = Out {
            text: String::new(),
            ids: Vec::new(),
            finish: None,
            stop: Value::Null,
        };
        // Nothing but the number of tokens decides how they are joined.
        let joined = ask.joins[turn % ask.joins.len()];
        turn += 1;
        while out.ids.len() < joined && out.finish.is_none() {
            let id = next(&ids, ask.seed, min_tokens.saturating_sub(made));
            made += 1;
            ids.push(id);
            out.ids.push(id);
            if id == 0 {
                out.finish = Some("stop");
                break;
            }
            let searched = text.len();
            text += &detokenizer.step(id);
            if made > min_tokens {
                // Only what new characters complete.
                let is_new = text.len() > searched;
                let ends = ask.stop.iter().filter(|_| is_new).filter_map(|stop| {
                    let before = stop.chars().count() - 1;
                    let old = text[..searched].char_indices().rev().take(before);
                    let from = old.last().map_or(searched, |(at, _)| at);
                    let at = from + text[from..].find(stop.as_str())?;
                    Some((at + stop.len(), at, stop))
                });
                if let Some((end, begin, stop)) = ends.min_by_key(|of| of.0) {
                    text.truncate(if ask.includes { end } else { begin });
                    out.finish = Some("stop");
                    out.stop = stop.as_str().into();
                    break;
                }
            }
            if made == max_tokens {
                out.finish = Some("length");
            }
        }
        let all = text.chars().count();
        let upto = if out.finish.is_some() {
            all
        } else {
            all.saturating_sub(held)
        };
        if upto > shown {
            out.text = text.chars().skip(shown).take(upto - shown).collect();
            shown = upto;
        }
        let is_last = out.finish.is_some();
        outs.push(out);
        if is_last {
            return outs;
        }
    }
}

/// The events of an answer as vLLM sends them.
fn events(kind: StreamKind, id: &str, prompt: &[u64], outs: &[Out]) -> Vec<String> {
    let event = |choices: Value, more: Value| {
        let object = match kind {
            StreamKind::Chat => "chat.completion.chunk",
            StreamKind::Completion => "text_completion",
        };
        let mut event = json!({"id": id, "object": object, "created": id.len(), "model": "m", "choices": choices});
        event
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().cloned().unwrap_or_default());
        format!("data: {event}\n\n")
    };
    let mut all = Vec::new();
    if kind == StreamKind::Chat {
        let role = json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]);
        all.push(event(role, json!({ "prompt_token_ids": prompt })));
    }
    for (at, out) in outs.iter().enumerate() {
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": out.finish, "token_ids": out.ids});
        let fields = choice.as_object_mut().unwrap();
        match kind {
            StreamKind::Chat => {
                fields.insert("delta".into(), json!({"content": out.text}));
                if out.finish.is_some() {
                    fields.insert("stop_reason".into(), out.stop.clone());
                }
            }
            StreamKind::Completion => {
                fields.insert("text".into(), out.text.clone().into());
                fields.insert("stop_reason".into(), out.stop.clone());
                if at == 0 {
                    fields.insert("prompt_token_ids".into(), json!(prompt));
                }
            }
        }
        all.push(event(json!([choice]), Value::Null));
    }
    let tokens: usize = outs.iter().map(|out| out.ids.len()).sum();
    let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": tokens, "total_tokens": prompt.len() + tokens});
    all.push(event(json!([]), json!({ "usage": usage })));
    all.push("data: [DONE]\n\n".into());
    all
}

/// An answer as clients fold it.
#[derive(Debug, Default, PartialEq)]
struct Folded {
    text: String,
    tokens: Vec<Value>,
    prompts: Vec<Value>,
    ids: Vec<Value>,
    objects: Vec<Value>,
    roles: usize,
    finish: Vec<Value>,
    stop: Vec<Value>,
    usage: Option<Value>,
    done: bool,
}

fn fold(kind: StreamKind, bytes: &[u8]) -> Folded {
    let mut folded = Folded::default();
    for data in data_of(bytes) {
        if *data == *b"[DONE]" {
            folded.done = true;
            continue;
        }
        let event: Value = serde_json::from_slice(&data).unwrap();
        let note = |list: &mut Vec<Value>, value: &Value| {
            if !list.contains(value) {
                list.push(value.clone());
            }
        };
        note(&mut folded.ids, &event["id"]);
        note(&mut folded.objects, &event["object"]);
        if event["prompt_token_ids"].is_array() {
            folded.prompts.push(event["prompt_token_ids"].clone());
        }
        if let Some(choice) = event["choices"].get(0) {
            if choice["prompt_token_ids"].is_array() {
                folded.prompts.push(choice["prompt_token_ids"].clone());
            }
            let tokens = choice["token_ids"].as_array();
            folded.tokens.extend(tokens.into_iter().flatten().cloned());
            folded.text += text_of(kind, choice).1;
            folded.roles += usize::from(choice["delta"].get("role").is_some());
            if !choice["finish_reason"].is_null() {
                folded.finish.push(choice["finish_reason"].clone());
                folded.stop.push(choice["stop_reason"].clone());
            }
            assert_eq!(
                choice.get("text").is_some(),
                kind == StreamKind::Completion,
                "{event}"
            );
        }
        folded.usage = event.get("usage").cloned().or(folded.usage);
    }
    folded
}

/// Answers the request of `plan`; `None` if it is one that continues a text.
fn answer(plan: &Plan, ask: &Ask, kind: StreamKind) -> Option<Vec<String>> {
    let body: Map<String, Value> = serde_json::from_slice(&plan.body).unwrap();
    let kind = match plan.path {
        Some("/v1/completions") => StreamKind::Completion,
        _ => kind,
    };
    let ids = |value: &Value| -> Option<Vec<u64>> {
        value.as_array()?.iter().map(Value::as_u64).collect()
    };
    let prompt = match kind {
        StreamKind::Completion => ids(&body["prompt"])?,
        StreamKind::Chat => match body.get("kv_transfer_params") {
            Some(params) => ids(&params["prompt_token_ids"])?,
            None if body.contains_key("continue_final_message") => return None,
            None => PROMPT.to_vec(),
        },
    };
    let number = |field: &str| lax::value(field, &body.get(field)?.to_string())?.as_u64();
    let limit = number("max_completion_tokens").or(number("max_tokens"));
    let outs = generate(
        ask,
        &prompt,
        limit.unwrap(),
        number("min_tokens").unwrap_or(0),
    );
    Some(events(kind, "other", &prompt, &outs))
}

const PROMPT: [u64; 3] = [1, 2, 3];

fn asks() -> impl Strategy<Value = (Ask, u64, u64)> {
    let stop = prop::collection::vec(
        prop::sample::select(vec!["END", "\n", "ab", "é", "b a", "€\n"]),
        0..3,
    );
    (
        any::<u64>(),
        prop::collection::vec(1usize..4, 1..5),
        prop::bool::ANY,
        stop,
        prop::bool::ANY,
        1u64..24,
        0u64..4,
    )
        .prop_map(|(seed, joins, is_single, stop, includes, max, min)| {
            let ask = Ask {
                seed,
                joins: if is_single { vec![1] } else { joins },
                stop: stop.into_iter().map(str::to_owned).collect(),
                includes,
            };
            (ask, max, min.min(max))
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Wherever a greedy stream is cut, and cut again, what continues by tokens folds to the undisturbed answer.
    #[test]
    fn a_cut_stream_is_that_of_one_engine(
        (ask, max, min) in asks(),
        is_chat in any::<bool>(),
        by_limit in prop::sample::select(vec!["max_tokens", "max_completion_tokens"]),
        greedy in any::<bool>(),
        second in 0usize..40,
        asks in any::<bool>(),
        way in 0usize..4,
    ) {
        let kind = if is_chat { StreamKind::Chat } else { StreamKind::Completion };
        let written = |n: u64| [json!(n), json!(n as f64), json!(n.to_string()), json!(format!("{n}.0"))][way].clone();
        let mut body = json!({"model": "m", "stream": true, "stop": ask.stop, "min_tokens": written(min), "return_token_ids": asks,
            "include_stop_str_in_output": ask.includes, "stream_options": {"include_usage": true}});
        let fields = body.as_object_mut().unwrap();
        if greedy {
            fields.insert("temperature".into(), 0.into());
        }
        if is_chat {
            fields.insert("messages".into(), json!([{"role": "user", "content": "q"}]));
            fields.insert(by_limit.into(), written(max));
        } else {
            fields.insert("prompt".into(), json!(PROMPT));
            fields.insert("max_tokens".into(), written(max));
        }
        let body = body.to_string();
        let whole = events(kind, "first", &PROMPT, &generate(&ask, &PROMPT, max, min));
        let wanted = fold(kind, whole.concat().as_bytes());
        // Up to the event before the last one with a choice.
        for cut in 0..whole.len() - 2 {
            let mut sent = whole[..cut].concat().into_bytes();
            let mut shown = sent.clone();
            let mut seams: Vec<(usize, Option<Kept>)> = Vec::new();
            let mut more = Some(second);
            loop {
                let lost = Lost { kind, body: body.as_bytes(), sent: &sent, seams: &seams, prompt: None,
                    by_tokens: true, by_params: true, model_len: None };
                let mut followed = None;
                for mut plan in plans(&lost).unwrap_or_default() {
                    let Some(new) = answer(&plan, &ask, kind) else { break };
                    let new = new.concat();
                    let fits = plan.seam.clone().is_none_or(|mut seam| seam.judge_all(new.as_bytes()) == Verdict::Fits);
                    if fits {
                        let count = new.split_inclusive("\n\n").count();
                        // A second cut comes before the last event with a choice.
                        let cut = more.take().filter(|&at| at + 2 < count);
                        let each = new
                            .split_inclusive("\n\n")
                            .take(cut.unwrap_or(count));
                        let each: String = each.collect();
                        let out = plan.rewriter.rewrite_all(each.as_bytes(), false);
                        prop_assert_eq!(plan.rewriter.refused, None);
                        shown.extend(out.shown);
                        followed = Some((plan.kept, out.kept, cut.is_some()));
                        break;
                    }
                }
                let Some((kept, out, is_cut)) = followed else {
                    // By text, or not at all: only where the tokens to come do not follow from the prompt, or all have come.
                    let read = Sent::read(kind, &sent, &seams, false).unwrap();
                    let known = read.tokens.as_ref().map_or(0, Vec::len);
                    prop_assert!(!greedy || known as u64 >= max, "{cut} {read:?}");
                    break;
                };
                seams.push((sent.len(), kept));
                sent.extend(out);
                if is_cut {
                    continue;
                }
                let mut folded = fold(kind, &shown);
                if cut == 0 {
                    folded.ids.clone_from(&wanted.ids); // there was no other
                }
                if !asks {
                    folded.tokens.clone_from(&wanted.tokens); // they are hidden
                    folded.prompts.clone_from(&wanted.prompts);
                }
                if greedy || read_phase(&sent, kind, &seams) {
                    prop_assert_eq!(&folded, &wanted, "cut {}", cut);
                    let read = Sent::read(kind, &sent, &seams, false).unwrap();
                    let undisturbed = Sent::read(kind, whole.concat().as_bytes(), &[], false).unwrap();
                    prop_assert_eq!(read.tokens, undisturbed.tokens);
                }
                break;
            }
        }
    }
}

/// Whether no token was computed again whose text the client had: true of sampled answers here, which are greedy, too.
fn read_phase(_sent: &[u8], _kind: StreamKind, seams: &[(usize, Option<Kept>)]) -> bool {
    seams.iter().all(|(_, kept)| kept.is_some())
}

#[test]
fn what_a_parser_takes_is_not_continued_as_text() {
    let body = br#"{"messages":[{"role":"user","content":"q"}],"tools":[{"type":"function"}],"max_tokens":9}"#;
    let role = r#"data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1]}"#;
    let text = |delta: &str, ids: &str| {
        format!(
            "data: {{\"id\":\"c\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"token_ids\":{ids}}}]}}"
        )
    };
    let stream = |events: &[String]| {
        let mut joined = events.join("\n\n");
        joined.push_str("\n\n");
        joined
    };
    let lost = |sent: &str, by_params| {
        plans(&Lost {
            kind: StreamKind::Chat,
            body,
            sent: sent.as_bytes(),
            seams: &[],
            prompt: None,
            by_tokens: true,
            by_params,
            model_len: None,
        })
    };
    // A parser took a token that its client has: the same answer again, without that token.
    let asks =
        br#"{"messages":[{"role":"user","content":"q"}],"max_tokens":9,"return_token_ids":true}"#;
    let taken = stream(&[role.into(), text("{}", "[4]")]);
    let of_ids = |body, sent: &str| {
        let kind = StreamKind::Chat;
        let (sent, seams, prompt) = (sent.as_bytes(), &[][..], None);
        super::super::resume::plans(&Lost {
            kind,
            body,
            sent,
            seams,
            prompt,
            by_tokens: true,
            by_params: true,
            model_len: None,
        })
    };
    let mut again = of_ids(asks, &taken).unwrap();
    assert_eq!((again.len(), &again[0].body[..]), (1, &asks[..]));
    let rewriter = &mut again[0].rewriter;
    let out = rewriter.rewrite_all(
        stream(&[
            role.into(),
            text("{}", "[4]"),
            text(r#"{"reasoning":"hm"}"#, "[5]"),
        ])
        .as_bytes(),
        false,
    );
    let shown = fold(StreamKind::Chat, &out.shown);
    assert_eq!((shown.text.as_str(), shown.tokens), ("hm", vec![json!(5)]));
    let other = rewriter.refused;
    assert_eq!(other, None);
    let mut again = of_ids(asks, &taken).unwrap();
    again[0]
        .rewriter
        .rewrite_all(stream(&[text("{}", "[6]")]).as_bytes(), false);
    assert!(again[0].rewriter.refused.is_some());
    // Of several choices the tokens are not told apart.
    let several = String::from_utf8_lossy(asks).replace("\"max", "\"n\":2.0,\"max");
    assert!(of_ids(several.as_bytes(), &taken).is_err());
    // Nothing yet: asked again, with its tools.
    let again = lost(&stream(&[role.into(), text("{}", "[4]")]), true).unwrap();
    assert_eq!(again[0].body, body);
    // Text: the engine's parser continues, with the tokens so far.
    let said = [role.into(), text(r#"{"content":"hm"}"#, "[5]")];
    let mut plans = lost(&stream(&said), true).unwrap();
    let request: Value = serde_json::from_slice(&plans[0].body).unwrap();
    assert_eq!(
        request["kv_transfer_params"]["prompt_token_ids"],
        json!([1, 5])
    );
    assert_eq!(
        (&request["max_tokens"], &request["tools"][0]["type"]),
        (&json!(8), &json!("function"))
    );
    let seam = plans[0].seam.as_ref().unwrap();
    let first = |prompt: &str| role.replace("[1]", prompt);
    let judge = |prompt: &str, delta: &str| {
        let mut seam = seam.clone();
        seam.judge_all(stream(&[first(prompt), text(delta, "[6]")]).as_bytes())
    };
    assert_eq!(judge("[1,5]", r#"{"content":" x"}"#), Verdict::Fits);
    for (prompt, delta) in [
        ("[1]", r#"{"content":" x"}"#), // an engine that does not know the field answers from the start
        ("[1,5]", "{}"),                // its parser keeps something back
        ("[1,5]", r#"{"reasoning":" x"}"#),
        ("[1,5]", r#"{"tool_calls":[{"index":0}]}"#),
    ] {
        assert!(
            matches!(judge(prompt, delta), Verdict::Differs(_)),
            "{prompt} {delta}"
        );
    }
    // An engine without that: text, up to what may be a call.
    let plain = &mut plans[1];
    assert_eq!(plain.path, Some("/v1/completions"));
    let completion = |text: &str| {
        format!(
            "data: {{\"id\":\"d\",\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"token_ids\":[6]}}]}}\n\n"
        )
    };
    let out = plain
        .rewriter
        .rewrite_all(completion(" so").as_bytes(), false);
    assert_eq!(fold(StreamKind::Chat, &out.kept).text, " so");
    let call = completion(" <tool_call>") + &completion("x");
    let out = plain.rewriter.rewrite_all(call.as_bytes(), false);
    assert!(out.kept.is_empty() && plain.rewriter.refused.is_some());
    // A call has begun, or text and reasoning whose tokens are not known.
    for event in [
        text(r#"{"tool_calls":[{"index":0}]}"#, "[6]"),
        text(r#"{"content":"x"}"#, "null"),
    ] {
        let sent = stream(&[said[0].clone(), said[1].clone(), event]);
        assert!(lost(&sent, true).is_err(), "{sent}");
    }
    // Reasoning continues through the engine's parser alone.
    let thinks = stream(&[role.into(), text(r#"{"reasoning":"hm"}"#, "[5]")]);
    assert_eq!(lost(&thinks, true).unwrap().len(), 1);
    assert!(lost(&thinks, false).is_err());
    let read = Sent::read(StreamKind::Chat, thinks.as_bytes(), &[], false).unwrap();
    assert_eq!(read.phase, Phase::Reasoning);
}
