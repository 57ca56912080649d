//! A stream is judged by its events, however its bytes arrive.

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::api::{Api, StreamKind};
use super::super::ends::StreamEnd;
use super::super::rewrite::Rewriter;
use super::super::sent::Sent;
use super::super::sse;
use super::super::stream::{BodyEnd, EVENT_BYTES_MAX, EventStream};
use super::super::token_ids::TokenIds;

/// Effect of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// It continues the answer.
    Continues,
    /// A choice ends.
    Finishes,
    /// It is the last event.
    Ends,
    /// The engine reports its failure.
    Fails,
}

/// Members behind the finish reason of an event, which close its choice and its list; `N` stands for digits.
const ENDS: &[(&str, Effect)] = &[
    ("}]}", Effect::Continues),
    (r#"}],"usage":null}"#, Effect::Continues),
    (r#","stop_reason":null}]}"#, Effect::Continues),
    (
        r#","stop_reason":null,"token_ids":null}]}"#,
        Effect::Continues,
    ),
    (r#","token_ids":[N]}]}"#, Effect::Continues),
    (
        r#","token_ids":[N,N]}],"prompt_token_ids":[N]}"#,
        Effect::Continues,
    ),
    (r#"}],"error":null}"#, Effect::Continues),
    (r#"}],"error":false}"#, Effect::Continues),
    (r#"}],"error":{"code":5N}}"#, Effect::Fails),
    (r#"}],"error":"dead"}"#, Effect::Fails),
    (r#"}],"error":N}"#, Effect::Fails),
    (r#","token_ids":[N]}],"error":"x"}"#, Effect::Fails),
    (r#"}],"\u0065rror":"dead"}"#, Effect::Fails),
    (r#","x":1}],"error":[N]}"#, Effect::Fails),
];

/// Texts, some with what looks like something else, or bytes that are not UTF-8.
const TEXTS: &[&[u8]] = &[
    b"",
    b" a",
    b" word",
    "\u{e9}\u{4e2d}".as_bytes(),
    b"\xff",
    b"\xe4\xb8",
    b"\\\"error\\\":1",
    b"\\n\\n",
    b"\\u00e9",
    b"\\\"finish_reason\\\":\\\"stop\\\"",
];

/// Events near the end of a stream.
const LAST: &[(&str, Effect)] = &[
    (
        r#"{"choices":[{"index":0,"text":"","delta":{},"finish_reason":"stop"}]}"#,
        Effect::Finishes,
    ),
    ("[DONE]", Effect::Ends),
    (r#"{"error":{"message":"died","code":500}}"#, Effect::Fails),
    (r#"{"detail":"died"}"#, Effect::Fails),
    ("not JSON", Effect::Fails),
];

/// An event of a chat or a completion.
#[derive(Clone)]
struct Written {
    data: Vec<u8>,
    effect: Effect,
}

impl std::fmt::Debug for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:?} {:.400}",
            self.effect,
            self.data.escape_ascii().to_string()
        )
    }
}

fn choice(is_chat: bool, text: usize, end: usize, number: u32, pad: usize) -> Written {
    let (end, effect) = ENDS[end];
    let mut data = br#"{"id":"a","created":1,"choices":[{"index":0,"#.to_vec();
    data.extend_from_slice(if is_chat {
        br#""delta":{"content":""#
    } else {
        br#""text":""#
    });
    data.extend_from_slice(TEXTS[text]);
    data.resize(data.len() + pad, b'x');
    data.extend_from_slice(if is_chat { b"\"}" } else { b"\"" });
    data.extend_from_slice(br#","logprobs":null,"finish_reason":null"#);
    data.extend_from_slice(end.replace('N', &number.to_string()).as_bytes());
    Written { data, effect }
}

fn events() -> impl Strategy<Value = (bool, Vec<Written>)> {
    let of = |is_chat: bool| {
        let text = 0..TEXTS.len();
        // Most events end alike.
        let end = prop_oneof![12 => 0..5usize, 3 => 5..8usize, 2 => 8..ENDS.len()];
        let plain = (text, end, prop_oneof![0u32..10, 0u32..1_000_000])
            .prop_map(move |(text, end, number)| choice(is_chat, text, end, number, 0));
        let long = (0..TEXTS.len(), 0usize..100).prop_map(move |(text, more)| {
            choice(is_chat, text, 0, 0, EVENT_BYTES_MAX + 70_000 + more)
        });
        let last = prop::sample::select(LAST).prop_map(|(data, effect)| Written {
            data: data.as_bytes().to_vec(),
            effect,
        });
        prop::collection::vec(prop_oneof![80 => plain, 1 => long, 8 => last], 1..14)
    };
    any::<bool>().prop_flat_map(move |is_chat| (Just(is_chat), of(is_chat)))
}

/// What became of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Data of the events that its client has.
    pub(super) shown: Vec<Vec<u8>>,
    pub(super) reports: usize,
    pub(super) end: Option<BodyEnd>,
}

/// Passes `pieces` on as a relay does.
pub(super) fn relayed(mut stream: EventStream, pieces: &[&[u8]]) -> Outcome {
    let (mut shown, mut reports, mut failed) = (Vec::new(), 0, false);
    for piece in pieces {
        let has_choices = stream.end().api().has_choices();
        if failed || has_choices && stream.end().is_over() {
            break;
        }
        shown.extend_from_slice(&stream.pass(Bytes::copy_from_slice(piece), usize::MAX));
        let reported = stream.take_reported();
        reports += usize::from(reported.is_some());
        failed |= reported.is_some_and(|of| !stream.end().relays(&of));
    }
    let mut end = (reports == 0).then(|| stream.on_end(usize::MAX));
    if let Some(BodyEnd::Piece(piece)) = end {
        shown.extend_from_slice(&piece);
        end = Some(stream.on_end(usize::MAX));
    }
    Outcome {
        shown: data_of(&shown),
        reports,
        end,
    }
}

/// Data of the events of `text`, as its client reads them.
fn data_of(text: &[u8]) -> Vec<Vec<u8>> {
    let all = sse::events(text).filter(|event| event.is_whole);
    all.map(|event| event.data.into_owned()).collect()
}

/// `text` in pieces of the lengths `cuts` in turn, with long ones in a long event.
pub(super) fn pieces<'a>(text: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let (mut all, mut rest, mut cuts) = (Vec::new(), text, cuts.iter().cycle());
    while !rest.is_empty() {
        let boring = rest
            .iter()
            .take(60_000)
            .take_while(|&&byte| byte == b'x')
            .count();
        let cut = if boring > 100 {
            boring
        } else {
            *cuts.next().unwrap()
        };
        let (piece, after) = rest.split_at(cut.min(rest.len()));
        all.push(piece);
        rest = after;
    }
    all
}

/// Pieces of an event each, of at most 60,000 bytes.
fn one_by_one(events: &[Vec<u8>]) -> Vec<&[u8]> {
    events
        .iter()
        .flat_map(|event| event.chunks(60_000))
        .collect()
}

proptest! {
    /// In whatever pieces: the client has the events before the engine's failure, or up to the last event, and the
    /// failure counts once.
    #[test]
    fn events_are_judged_alike_in_any_pieces(
        (is_chat, events) in events(),
        line in prop::sample::select(&["\n", "\r\n", "\r"][..]),
        comments in any::<bool>(),
        cuts in prop::collection::vec(1usize..400, 1..6),
        small in prop::collection::vec(1usize..9, 1..4),
        hides in any::<bool>(),
    ) {
        let framed = |data: &[u8]| {
            let before = if comments { format!(": c{line}") } else { String::new() };
            [before.as_bytes(), b"data: ", data, line.as_bytes(), line.as_bytes()].concat()
        };
        let written: Vec<Vec<u8>> = events.iter().map(|of| framed(&of.data)).collect();
        let text = written.concat();
        let has_long = events.iter().any(|of| of.data.len() > EVENT_BYTES_MAX);
        let (api, kind) = if is_chat { (Api::Chat, StreamKind::Chat) } else { (Api::Completions, StreamKind::Completion) };
        let hides = hides && !has_long;
        let stream = || EventStream::new(StreamEnd::new(api, 1), true, hides.then(|| TokenIds::new(kind)));
        let first = relayed(stream(), &one_by_one(&written));
        let others = [pieces(&text, &cuts), pieces(&text, &small), pieces(&text, &[59_999])];
        for pieces in others {
            let again = relayed(stream(), &pieces);
            prop_assert_eq!((again.reports, &again.end), (first.reports, &first.end));
            prop_assert!(again.shown == first.shown, "{} and {} events", again.shown.len(), first.shown.len());
        }
        let last = events.iter().position(|of| matches!(of.effect, Effect::Fails | Effect::Ends));
        // `[DONE]` alone is no answer.
        let fails = last.is_some_and(|last| last == 0 || events[last].effect == Effect::Fails);
        prop_assert_eq!(first.reports, usize::from(fails));
        let answer = last.map_or(events.len(), |last| last + usize::from(!fails));
        if !hides {
            let wanted: Vec<_> = events[..answer].iter().map(|of| of.data.clone()).collect();
            prop_assert!(first.shown == wanted, "{} events", first.shown.len());
        }
        let finishes = events[..answer].iter().any(|of| of.effect == Effect::Finishes);
        if !fails {
            let wanted = match (last, finishes) {
                (Some(_), _) => BodyEnd::Complete,
                (None, true) => BodyEnd::Finished,
                (None, false) => BodyEnd::Incomplete("its stream ended without finish reason and `[DONE]`"),
            };
            prop_assert_eq!(first.end, Some(wanted));
        }
    }

    /// A response that fails is a failure of its engine once, by whichever events, and in whichever pieces.
    #[test]
    fn a_failed_response_is_counted_once(
        before in 0usize..4,
        reports in prop::collection::vec(prop::sample::select(&[
            "event: error\ndata: {\"type\":\"error\",\"code\":\"server_error\",\"message\":\"died\"}\n\n",
            "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"server_error\"}}}\n\n",
            "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{}}\n\n",
            "data: {\"error\":{\"message\":\"died\"}}\n\n",
            "event: response.output_text.delta\ndata: {\"delta\":\"a\"}\n\n",
        ][..]), 0..5),
        cuts in prop::collection::vec(1usize..200, 1..6),
        messages in any::<bool>(),
    ) {
        // Before any part of an answer, or in the way of another API, it is no event for the client.
        let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n";
        let text = delta.repeat(before) + &reports.concat();
        let api = if messages { Api::Messages } else { Api::Responses };
        let stream = EventStream::new(StreamEnd::new(api, 1), false, None);
        let outcome = relayed(stream, &pieces(text.as_bytes(), &cuts));
        let failed = reports.iter().position(|of| !of.contains("delta\""));
        prop_assert_eq!(outcome.reports, usize::from(failed.is_some()));
        let is_begun = |at: usize| !messages && (before > 0 || at > 0);
        let shown = match failed {
            Some(at) if !is_begun(at) || reports[at].starts_with("data:") => delta.repeat(before) + &reports[..at].concat(),
            _ => text,
        };
        prop_assert_eq!(outcome.shown, data_of(shown.as_bytes()));
    }

    /// Ids that the router alone requested stay hidden behind a continuation, wherever they are.
    #[test]
    fn ids_are_hidden_behind_a_continuation(
        places in prop::collection::vec(0usize..7, 0..5),
        is_chat in any::<bool>(),
        choices in 0usize..3,
        says in any::<bool>(),
        continues in any::<bool>(),
    ) {
        let mut event = json!({"id": "a", "choices": vec![
            json!({"index": 0, "finish_reason": null, "logprobs": null}); choices]});
        for choice in event["choices"].as_array_mut().unwrap() {
            let text = if says { "word" } else { "" };
            if is_chat {
                choice["delta"] = if says { json!({"content": text}) } else { json!({}) };
            } else {
                choice["text"] = text.into();
            }
        }
        for place in places {
            let (parent, name) = [
                ("", "token_ids"),
                ("", "prompt_token_ids"),
                ("/choices/0", "token_ids"),
                ("/choices/1", "token_ids"),
                ("/choices/0", "prompt_token_ids"),
                ("/choices/0/delta", "token_ids"),
                ("/choices/1/delta", "token_ids"),
            ][place];
            if let Some(Value::Object(parent)) = event.pointer_mut(parent) {
                parent.insert(name.into(), json!([7, 8]));
            }
        }
        let kind = if is_chat { StreamKind::Chat } else { StreamKind::Completion };
        let api = if is_chat { Api::Chat } else { Api::Completions };
        let mut stream = EventStream::new(StreamEnd::new(api, 1), true, Some(TokenIds::new(kind)));
        if continues {
            let sent = stream.take_for_continuation().unwrap();
            stream.continue_with(Rewriter::new(kind, &Sent::default(), 0), None, sent);
        }
        let out = stream.pass(format!("data: {event}\n\n").into(), usize::MAX);
        prop_assert!(!String::from_utf8_lossy(&out).contains("[7,8]"), "{:?}", out);
    }
}
