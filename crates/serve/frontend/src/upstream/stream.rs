//! Events of a stream between engine and client: keeps what a continuation needs, adapts the continuation's events, and
//! hides token ids. No I/O.

use bytes::{Bytes, BytesMut};
use slipstream_base::width::to_usize;

use super::api::{Api, StreamKind};
use super::ends::{self, Judgment, StreamEnd};
use super::event::{EditBuffer, EventData, NULL, places_in};
use super::reported::Reported;
use super::rewrite::Rewriter;
use super::sent::Kept;
use super::sse::{self, Scanner};
use super::token_ids::TokenIds;

/// An event longer than this is not read: it takes some 6 ms of a shard. It is passed on in pieces, and its stream cannot
/// continue elsewhere.
pub(super) const EVENT_BYTES_MAX: usize = 1 << 20;

/// Fate of an event that is too long to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LongEvent {
    /// It is passed on in pieces.
    Relay,
    /// None of it is, and the stream must continue without it.
    Suppress,
}

/// The end of a stream's body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyEnd {
    /// Bytes that were held back; the end follows.
    Piece(Bytes),
    Complete,
    /// All of the answer has arrived, but not its last events.
    Finished,
    /// Part of the answer is missing, for this reason.
    Incomplete(&'static str),
}

/// Offset in the part that the client has, at which a continuation begins, and the tokens kept, if known.
pub(super) type Seam = (usize, Option<Kept>);

/// The part of a stream that the client has.
#[derive(Clone, Debug, Default)]
pub(super) struct SentPart {
    /// Its events, with token ids if engines sent some.
    pub(super) bytes: Vec<u8>,
    /// Offsets in `bytes` at which other engines continued, each with the tokens before it, or `None` if unknown.
    pub(super) seams: Vec<Seam>,
}

/// A stream of server-sent events.
#[derive(Default)]
pub(super) struct EventStream {
    /// The beginning of an event whose end has not come.
    held: BytesMut,
    /// Knows where events end.
    scanner: Scanner,
    /// The part that was sent on, as long as another engine could continue it.
    sent: Option<Vec<u8>>,
    /// Why `sent` is not kept.
    not_kept: &'static str,
    /// Its progress towards its end.
    end: StreamEnd,
    /// An error of the engine, after the events already passed on.
    reported: Option<Reported>,
    /// Set while the client has the beginning of an event without its end: the scanner as it was behind that beginning.
    partial: Option<Scanner>,
    /// Set once another engine continues it.
    rewriter: Option<Rewriter>,
    /// Offsets in `sent` at which continuations begin, each with the tokens kept, if known.
    seams: Vec<Seam>,
    /// The last bytes have a part of the answer, not only comments.
    has_progress: bool,
    /// Set if events have token ids that the client did not request.
    ids: Option<TokenIds>,
    /// Set when an event is too long.
    long: Option<LongEvent>,
}

impl EventStream {
    /// A stream whose end is judged by `end`. `keeps`: another engine may continue it. `ids`: set if token ids are hidden.
    pub(super) fn new(end: StreamEnd, keeps: bool, ids: Option<TokenIds>) -> EventStream {
        EventStream {
            end,
            sent: keeps.then(Vec::new),
            not_kept: "requests of this kind do not continue",
            ids,
            ..EventStream::default()
        }
    }

    /// Progress towards the end.
    pub(super) fn end(&self) -> &StreamEnd {
        &self.end
    }

    /// Whether the last bytes have a part of the answer, not only comments.
    pub(super) fn has_progress(&self) -> bool {
        self.has_progress
    }

    /// Whether the client has the beginning of an event or of a line ending.
    pub(super) fn is_within_event(&self) -> bool {
        self.partial.is_some() || self.scanner.is_after_cr()
    }

    /// Bytes that are kept for a continuation; `None` if the stream does not continue.
    pub(super) fn kept_bytes(&self) -> Option<usize> {
        let sent = self.sent.as_ref()?;
        let prompt = self.prompt().map_or(0, |ids| 4 * ids.len());
        Some(sent.len() + prompt)
    }

    /// Ids of the prompt, if the router requested them.
    pub(super) fn prompt(&self) -> Option<&[u32]> {
        self.ids.as_ref()?.prompt()
    }

    /// Takes the error that the engine reported behind the events passed on.
    pub(super) fn take_reported(&mut self) -> Option<Reported> {
        self.reported.take()
    }

    /// Takes the part that the client has, and where continuations begin in it.
    pub(super) fn take_sent(&mut self) -> Option<SentPart> {
        Some(SentPart {
            bytes: self.sent.take()?,
            seams: std::mem::take(&mut self.seams),
        })
    }

    /// Takes the part that the client has, until another engine continues the stream. The beginning of an event is dropped.
    ///
    /// # Errors
    /// The reason why the stream does not continue.
    pub(super) fn take_for_continuation(&mut self) -> Result<SentPart, &'static str> {
        self.held.clear();
        self.take_sent().ok_or(self.not_kept)
    }

    /// Another engine continues the stream behind the part `sent`. `kept`: tokens of the answer in its prompt, if known.
    pub(super) fn continue_with(&mut self, rewriter: Rewriter, kept: Option<Kept>, sent: SentPart) {
        self.rewriter = Some(rewriter).filter(|of| !of.is_idle());
        (self.sent, self.seams) = (Some(sent.bytes), sent.seams);
        self.scanner = Scanner::default();
        if let Some(sent) = &self.sent {
            self.seams.push((sent.len(), kept));
        }
        if let Some(ids) = &mut self.ids {
            ids.begin_anew();
        }
    }

    /// Whether the client has nothing of an answer, but perhaps comments: another engine may give it all.
    pub(super) fn may_restart(&self) -> bool {
        self.end.api() != Api::Other && !self.end.has_answer() && self.partial.is_none()
    }

    /// Another engine gives the answer from its beginning.
    pub(super) fn restart(&mut self) {
        self.held.clear();
        self.scanner = Scanner::default();
        self.end = self.end.anew();
        if let Some(ids) = &mut self.ids {
            ids.begin_anew();
        }
    }

    /// The part of `data` for the client now. Empty: nothing yet.
    pub(super) fn pass(&mut self, data: Bytes, sent_max: usize) -> Bytes {
        let whole = if self.held.is_empty() && self.scanner.takes_whole(&data) {
            data // nearly always
        } else {
            match self.scanner.feed(&data) {
                end if self.held.is_empty() && end == data.len() => data,
                end @ 1.. => {
                    let mut data = data;
                    self.held.extend_from_slice(&data.split_to(end));
                    let whole = self.held.split();
                    self.held.extend_from_slice(&data);
                    whole.freeze()
                }
                0 => {
                    self.has_progress = self.scanner.is_in_field();
                    self.held.extend_from_slice(&data);
                    if self.held.len() <= EVENT_BYTES_MAX {
                        return Bytes::new();
                    }
                    return self.pass_unread();
                }
            }
        };
        self.take(whole, sent_max)
    }

    /// The beginning of an event that is too long to be read. It may have ids that its client must not get, or be the event of
    /// another request than the client's: then nothing of it passes.
    #[cold]
    fn pass_unread(&mut self) -> Bytes {
        let held = self.held.split().freeze();
        if self.ids.is_some() || self.rewriter.is_some() {
            self.long = Some(LongEvent::Suppress);
            return Bytes::new();
        }
        if self.partial.is_none() {
            self.long = Some(LongEvent::Relay);
        }
        self.forget("an event was too long");
        self.end.begin();
        self.partial = Some(self.scanner);
        held
    }

    /// Takes the fate of an event that was too long, if there was one.
    pub(super) fn take_long(&mut self) -> Option<LongEvent> {
        self.long.take()
    }

    /// The engine has ended the body.
    pub(super) fn on_end(&mut self, sent_max: usize) -> BodyEnd {
        let held = self.held.split();
        if self.end.api() == Api::Other {
            return if held.is_empty() {
                BodyEnd::Complete
            } else {
                BodyEnd::Piece(held.freeze())
            };
        }
        if self.partial.is_none() && ends::is_complete(&held) {
            let mut whole = held;
            whole.extend_from_slice(b"\n\n"); // which the engine left out
            return BodyEnd::Piece(self.take(whole.freeze(), sent_max));
        }
        match self.on_loss() {
            BodyEnd::Finished if self.end.is_refused() => BodyEnd::Complete,
            end => end,
        }
    }

    /// The engine is lost.
    pub(super) fn on_loss(&self) -> BodyEnd {
        if self.end.is_over() {
            BodyEnd::Complete
        } else if self.end.api() != Api::Other && self.end.is_finished() {
            BodyEnd::Finished
        } else {
            BodyEnd::Incomplete(self.end.missing())
        }
    }

    /// The part of whole events for the client.
    fn take(&mut self, whole: Bytes, sent_max: usize) -> Bytes {
        if let Some(scanner) = self.partial.take() {
            return self.take_behind(scanner, whole, sent_max);
        }
        if self.rewriter.is_some() || !self.end.is_plain(&whole) {
            return self.read(&whole, sent_max);
        }
        self.has_progress = self.end.api() != Api::Other || sse::have_content(&whole);
        let Some(ids) = &mut self.ids else {
            self.keep(&whole, sent_max);
            return whole;
        };
        if let Some(shown) = ids.hide_known(&whole) {
            self.keep(&whole, sent_max);
            return shown;
        }
        if TokenIds::is_without(&whole) {
            self.keep(&whole, sent_max);
            return whole;
        }
        self.read(&whole, sent_max)
    }

    /// The part of whole events for the client, behind the end of an event whose beginning it has. `scanner` knows where
    /// that one ends: its rest may be a blank line, which looks like no event.
    #[cold]
    fn take_behind(&mut self, mut scanner: Scanner, whole: Bytes, sent_max: usize) -> Bytes {
        let end = scanner.end_of_event(&whole);
        let behind = whole.slice(end..);
        let shown = if behind.is_empty() {
            Bytes::new()
        } else {
            self.take(behind, sent_max)
        };
        self.has_progress = true;
        if end + shown.len() == whole.len() {
            return whole;
        }
        [&whole[..end], &shown].concat().into()
    }

    /// The part of whole events for the client. Each event is read once: its end is judged, it is adapted to the stream, and
    /// ids are hidden.
    #[cold]
    fn read(&mut self, whole: &Bytes, sent_max: usize) -> Bytes {
        let (mut kept, mut shown) = (EditBuffer::of(whole), EditBuffer::of(whole));
        let mut end = whole.len();
        self.has_progress = false;
        for event in sse::events(whole) {
            let text = event.text();
            let data = EventData::read(&text);
            match self.end.judge(&event, data.as_ref()) {
                Judgment::Continues => self.has_progress |= event.has_content(),
                Judgment::Foreign => {}
                Judgment::IsOver => {
                    end = event.start;
                    break;
                }
                Judgment::Failed(reported) => {
                    let is_relayed = self.end.relays(&reported);
                    self.has_progress |= is_relayed;
                    self.reported.get_or_insert(reported);
                    if !is_relayed {
                        end = event.start;
                        break;
                    }
                }
            }
            let Some(data) = data else {
                continue;
            };
            if let Some(rewriter) = &mut self.rewriter {
                if let Some(ids) = &mut self.ids {
                    ids.take_prompt(&data);
                }
                let new = rewriter.rewrite(&text, &data, self.ids.is_some());
                kept.replace(event.start..event.end, &new.kept);
                shown.replace(event.start..event.end, &new.shown);
                if rewriter.refused.is_some() {
                    end = event.end;
                    break;
                }
            } else if let Some(ids) = &mut self.ids {
                ids.take_prompt(&data);
                let places = |all| places_in(whole, &event, data.places(&text, all));
                let (of_prompt, all) = (places(false), places(true));
                if let [only] = &all[..]
                    && of_prompt.is_empty()
                {
                    ids.learn(whole, only);
                }
                for place in of_prompt {
                    kept.replace(place, NULL);
                }
                if ids.is_for_ids(&data) {
                    shown.replace(event.start..event.end, b"");
                    continue;
                }
                for place in all {
                    shown.replace(place, NULL);
                }
            }
        }
        match kept.upto(end) {
            Some(kept) => self.keep(&kept, sent_max),
            None => self.keep(&whole[..end], sent_max),
        }
        shown
            .upto(end)
            .map_or_else(|| whole.slice(..end), Bytes::from)
    }

    /// Keeps a part of the answer for its continuation.
    fn keep(&mut self, part: &[u8], sent_max: usize) {
        if let Some(sent) = &mut self.sent {
            if sent.len() + part.len() > sent_max {
                self.forget("the answer is longer than `upstream.resume_bytes_max`");
            } else {
                sent.extend_from_slice(part);
            }
        }
    }

    /// Why the continuation must not go on, if so.
    pub(super) fn refusal_reason(&mut self) -> Option<&'static str> {
        self.rewriter.as_mut()?.refused.take()
    }

    /// The stream does not continue, for this reason.
    pub(super) fn forget(&mut self, why: &'static str) {
        self.sent = None;
        self.not_kept = why;
    }
}

/// Passes `count` events of chats to clients, for `slipstream-hotpaths`. With `hides_ids` each has the id of its token,
/// which its client did not ask for.
#[doc(hidden)]
pub fn relay_events(count: u64, hides_ids: bool) -> u64 {
    const STREAM: u64 = 1_000;
    let event = |n: u64| {
        let ids = if hides_ids {
            format!(",\"token_ids\":[{}]", n * n * n)
        } else {
            String::new()
        };
        let text = format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1764300000,\
             \"model\":\"meta-llama/Llama-3.1-8B\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word{n}\"}},\
             \"logprobs\":null,\"finish_reason\":null{ids}}}]}}\n\n"
        );
        Bytes::from(text)
    };
    let pieces: Vec<Bytes> = (0..64).map(event).collect();
    let mut sum = 0;
    for stream in 0..count.div_ceil(STREAM) {
        let mut events = EventStream {
            end: StreamEnd::new(Api::Chat, 1),
            sent: Some(Vec::new()),
            ids: hides_ids.then(|| TokenIds::new(StreamKind::Chat)),
            ..EventStream::default()
        };
        for piece in pieces
            .iter()
            .cycle()
            .take(to_usize(STREAM.min(count - stream * STREAM)))
        {
            sum += events
                .pass(std::hint::black_box(piece.clone()), usize::MAX)
                .len();
        }
    }
    std::hint::black_box(sum);
    count
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::sse::tests::streams;
    use super::*;

    proptest! {
        #[test]
        fn events_are_passed_on_whole_and_unchanged(
            stream in streams(),
            cuts in prop::collection::vec(1usize..20, 1..9),
        ) {
            let mut relay = EventStream { sent: Some(Vec::new()), ..EventStream::default() };
            let (mut passed, mut cuts) = (Vec::new(), cuts.iter().cycle());
            let mut rest = &stream[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                passed.extend_from_slice(&relay.pass(Bytes::copy_from_slice(piece), 1 << 20));
                rest = after;
            }
            prop_assert_eq!(relay.sent.unwrap(), &passed[..]);
            passed.extend_from_slice(&relay.held);
            prop_assert_eq!(&passed, &stream);
        }
    }

    /// How a scripted engine ends its stream.
    #[derive(Clone, Copy, Debug)]
    enum Ending {
        /// Finish reasons, then `[DONE]`.
        Done,
        /// The blank line behind `[DONE]` is left out.
        DoneUnended,
        /// Finish reasons, and no more.
        Finished,
        /// `[DONE]` without finish reasons.
        DoneAlone,
        Nothing,
        /// An error of the engine, then `[DONE]`.
        Error(&'static str),
        /// A refusal of the request, then `[DONE]`.
        Refused(&'static str),
        /// Finish reasons, `[DONE]`, and events behind it.
        Trailing,
    }

    const ERRORS: &[&str] = &[
        r#"data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": null, "code": 500}}"#,
        r#"data: {"error":{"object":"error","message":"busy","type":"SERVICE_UNAVAILABLE","param":null,"code":503}}"#,
        r#"data: {"object":"error","message":"gone","type":"internal_error","code":"500"}"#,
        "data: {\"error\":\ndata: {\"message\":\"two lines\",\"code\":null}}",
        "event: error\ndata: {\"error\":{\"type\":\"overloaded_error\"},\"type\":\"error\"}",
        "event: error\ndata: gone",
        r#"data: {"error":"Request failed during generation","error_type":"generation"}"#,
        r#"error: {"code":500,"message":"of llama.cpp"}"#,
        r#"data: {"error":{"message":"EngineCore encountered an issue. See stack trace","type":"BadRequestError","code":400}}"#,
        r#"data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":"error"}]}"#,
        r#"data: {"id":"a","choices":[{"index":0,"text":"","finish_reason": "abort"}]}"#,
        r#"data: {"choices":[{"index":0,"text":"x","finish_reason":null}],"error":{"code":500,"message":"beside a choice"}}"#,
        "data: Internal Server Error",
        "Internal Server Error",
        "<html>502 Bad Gateway</html>",
        r#"{"error":{"message":"without a field","code":500}}"#,
        r#"data: {"id":"a","choices":[{"index":0,"tedata: {"error":{"message":"lost","code":502}}"#,
        r#"data: {"id":"a","choices":["#,
        r#"data: {"detail":"Internal error"}"#,
        r#"data: {"errors":[{"message":"x"}]}"#,
        r#"data: [{"error":"in a list"}]"#,
        r#"data: {"error":{"message":"bad upstream","type":"invalid_response_error"}}"#,
        r#"data: {"error":{"message":"upstream","type":"upstream_error","code":400}}"#,
        r#"data: {"error":{"message":"timeout","code":408}}"#,
        r#"data: {"error":{"message":"closed","code":"499"}}"#,
    ];
    const REFUSALS: &[&str] = &[
        r#"data: {"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#,
        r#"data: {"error":{"message":"slow down","type":"rate_limit_error","code":429}}"#,
        r#"data: {"error":{"message":"no","type":"invalid_request_error","param":"x","code":null}}"#,
        r#"data: {"error":{"message":"no","type":"invalid_request_error","code":"invalid_response_format"}}"#,
        r#"data: {"error":"inputs tokens + max_new_tokens","error_type":"validation"}"#,
    ];

    fn endings() -> impl Strategy<Value = Ending> {
        prop_oneof![
            Just(Ending::Done),
            Just(Ending::DoneUnended),
            Just(Ending::Finished),
            Just(Ending::DoneAlone),
            Just(Ending::Nothing),
            Just(Ending::Trailing),
            prop::sample::select(ERRORS).prop_map(Ending::Error),
            prop::sample::select(REFUSALS).prop_map(Ending::Refused),
        ]
    }

    /// A scripted engine: the texts of its choices, its way to write events, its end, and where it is cut.
    #[derive(Clone, Debug)]
    struct Script {
        choices: u64,
        texts: Vec<String>,
        line: &'static str,
        /// Lines around the data of each event: comments, ids, waiting times, names, white space in the JSON.
        style: Vec<usize>,
        ending: Ending,
        chunks: Vec<usize>,
        /// The connection breaks behind this share of the stream, of 1,000; more: it does not.
        cut: usize,
    }

    fn scripts() -> impl Strategy<Value = Script> {
        let texts = prop::collection::vec(
            r#"[a-z "\\{}:,\[\]]{0,12}|"error"|\[DONE\]|finish_reason":|data: "#,
            0..8,
        );
        let line = prop::sample::select(&["\n", "\r\n", "\r"][..]);
        let style = prop::collection::vec(0usize..7, 1..6);
        let chunks = prop::collection::vec(prop_oneof![1usize..4, 1usize..400], 1..7);
        (
            1u64..4,
            texts,
            line,
            style,
            endings(),
            chunks,
            0usize..2_000,
        )
            .prop_map(
                |(choices, texts, line, style, ending, chunks, cut)| Script {
                    choices,
                    texts,
                    line,
                    style,
                    ending,
                    chunks,
                    cut,
                },
            )
    }

    impl Script {
        /// One event with `data`, in one of several ways.
        fn event(&self, number: usize, lines: &str) -> String {
            let (before, after) = match self.style[number % self.style.len()] {
                1 => (": keep-alive\n", ""),
                2 => ("id: 7\nretry: 100\n", ""),
                3 => ("", ": behind\n"),
                4 => (": a\n\n: b\n\n\n", ""),
                5 => ("event: message\n", ""),
                _ => ("", ""),
            };
            // An error names its event itself.
            let before = if lines.starts_with("event:") {
                ""
            } else {
                before
            };
            format!("{before}{lines}\n{after}\n").replace('\n', self.line)
        }

        fn choice(&self, number: usize, index: u64, text: &str, reason: Option<&str>) -> String {
            let choice = serde_json::json!({"index": index, "text": text, "logprobs": null, "finish_reason": reason});
            let json = serde_json::json!({"id": "a", "object": "text_completion", "created": 1, "choices": [choice]});
            let data = match self.style[(number + 1) % self.style.len()] {
                0 => serde_json::to_string_pretty(&json)
                    .unwrap()
                    .replace('\n', "\ndata: "),
                1 => json.to_string().replace(":null", ": null"),
                _ => json.to_string(),
            };
            self.event(number, &format!("data: {data}"))
        }

        /// Its events, and how many of them belong to the answer.
        fn events(&self) -> (Vec<String>, usize) {
            let mut all = Vec::new();
            for (number, text) in self.texts.iter().enumerate() {
                all.push(self.choice(number, number as u64 % self.choices, text, None));
            }
            let ends = matches!(
                self.ending,
                Ending::Done | Ending::DoneUnended | Ending::Finished | Ending::Trailing
            );
            for index in (0..self.choices).filter(|_| ends) {
                all.push(self.choice(
                    index as usize,
                    index,
                    "",
                    Some(["stop", "length"][index as usize % 2]),
                ));
            }
            let done = format!("data: [DONE]{0}{0}", self.line);
            let mut answer = all.len();
            match self.ending {
                Ending::Done | Ending::DoneAlone => all.push(done),
                Ending::DoneUnended => all.push(format!("data: [DONE]{}", self.line)),
                Ending::Trailing => {
                    all.push(done);
                    answer = all.len();
                    all.push(self.choice(0, 0, "behind", None));
                    return (all, answer);
                }
                Ending::Error(lines) => {
                    all.push(self.event(0, lines));
                    all.push(done);
                    return (all, answer);
                }
                Ending::Refused(lines) => {
                    all.push(self.event(0, lines));
                    all.push(done);
                }
                Ending::Finished | Ending::Nothing => {}
            }
            answer = all.len();
            (all, answer)
        }
    }

    /// Data of the events of `bytes` as a client reads them.
    fn data(bytes: &[u8]) -> Vec<Vec<u8>> {
        let all = super::super::sse::events(bytes);
        all.filter(|event| event.is_whole && !event.data.is_empty())
            .map(|event| event.data.into_owned())
            .collect()
    }

    proptest! {
        /// For every way of writing, and every cut: the client has the whole events of the answer, and
        /// the end is that of the answer, not that of the connection.
        #[test]
        fn streams_end_as_their_events_say(script in scripts()) {
            let (events, answer) = script.events();
            let stream = events.concat().into_bytes();
            let is_cut = script.cut <= 1_000;
            let length = if is_cut { stream.len() * script.cut / 1_000 } else { stream.len() };
            let mut relay = EventStream {
                end: StreamEnd::new(Api::Completions, script.choices),
                ..EventStream::default()
            };
            let mut passed = Vec::new();
            let mut chunks = script.chunks.iter().cycle();
            let mut rest = &stream[..length];
            while !rest.is_empty() && relay.reported.is_none() && !relay.end.is_over() {
                let (piece, after) = rest.split_at(rest.len().min(*chunks.next().unwrap()));
                passed.extend_from_slice(&relay.pass(Bytes::copy_from_slice(piece), 1 << 20));
                rest = after;
            }
            // The rest is not read once the engine has reported an error.
            let mut end = BodyEnd::Complete;
            if relay.reported.is_none() {
                end = if is_cut { relay.on_loss() } else { relay.on_end(1 << 20) };
            }
            if let BodyEnd::Piece(piece) = end {
                passed.extend_from_slice(&piece);
                end = relay.on_end(1 << 20);
            }
            // The oracle: events that end before the cut, one by one.
            let mut at = 0;
            let whole = events.iter().take_while(|event| {
                at += event.len();
                // Of CR LF the CR ends the event.
                let ends_early = event.ends_with("\r\n") && at == length + 1;
                at <= length || ends_early
            });
            let whole = whole.count().min(if is_cut && matches!(script.ending, Ending::DoneUnended) {
                events.len() - 1
            } else {
                events.len()
            });
            // `[DONE]` of an empty answer.
            let is_empty = matches!(script.ending, Ending::DoneAlone) && script.texts.is_empty();
            if is_empty {
                prop_assert_eq!(data(&passed), Vec::<Vec<u8>>::new());
                prop_assert!(relay.reported.is_some() || whole == 0);
                return Ok(());
            }
            let expected = data(events[..whole.min(answer)].concat().as_bytes());
            let expected = match script.ending {
                Ending::DoneUnended if whole == events.len() => {
                    [expected, vec![b"[DONE]".to_vec()]].concat()
                }
                _ => expected,
            };
            prop_assert_eq!(data(&passed), expected);
            let texts = script.texts.len();
            let finished = whole.saturating_sub(texts) as u64 >= script.choices;
            let done = whole == events.len();
            if let Ending::Error(_) = script.ending {
                prop_assert_eq!(relay.reported.is_some(), whole > answer);
                if whole > answer {
                    prop_assert!(!relay.reported.unwrap().is_clients);
                } else {
                    prop_assert!(matches!(end, BodyEnd::Incomplete(_)), "{:?}", end);
                }
                return Ok(());
            }
            prop_assert_eq!(&relay.reported, &None);
            let expected = match script.ending {
                Ending::Trailing if whole >= answer => BodyEnd::Complete,
                Ending::Done | Ending::DoneUnended | Ending::DoneAlone | Ending::Refused(_) if done => BodyEnd::Complete,
                Ending::Refused(_) if whole > texts && is_cut => BodyEnd::Finished,
                Ending::Refused(_) if whole > texts => BodyEnd::Complete,
                Ending::Done | Ending::DoneUnended | Ending::Finished | Ending::Trailing if finished => BodyEnd::Finished,
                _ => BodyEnd::Incomplete(relay.end.missing()),
            };
            prop_assert_eq!(end, expected);
        }
    }

    #[test]
    fn only_parts_of_an_answer_are_progress() {
        for api in [Api::Completions, Api::Responses, Api::Messages, Api::Other] {
            let mut events = EventStream {
                end: StreamEnd::new(api, 1),
                ..EventStream::default()
            };
            let part = match api {
                Api::Responses => "data: {\"type\":\"response.created\",\"x\":[{\"y\":0",
                Api::Messages => "data: {\"type\":\"message_start\",\"x\":[{\"y\":0",
                _ => "data: {\"choices\":[{\"index\":0",
            };
            for (piece, is_progress) in [
                (": ka\n\n", false),
                (": k", false),
                ("a\n", false),
                ("\n", false),
                (part, true),
                ("}]}\n\n", true),
                ("event: ping\ndata: {\"type\": \"ping\"}\n\n", false),
                ("data:\n\n", false),
                ("data: {\"type\":\"x\"}\n\n", api == Api::Other),
                (": ka\n\n: ka\n\n", false),
            ] {
                events.pass(Bytes::from_static(piece.as_bytes()), 1 << 20);
                assert_eq!(events.has_progress, is_progress, "{api:?} {piece:?}");
            }
        }
    }

    #[test]
    fn a_long_event_is_passed_on_in_pieces() {
        let mut events = EventStream {
            sent: Some(Vec::new()),
            ..EventStream::default()
        };
        let out = events.pass(Bytes::from(vec![b'a'; EVENT_BYTES_MAX + 1]), usize::MAX);
        assert_eq!(out.len(), EVENT_BYTES_MAX + 1);
        assert!(events.sent.is_none() && !events.not_kept.is_empty());
        // Its end is no event.
        let mut events = EventStream {
            end: StreamEnd::new(Api::Completions, 1),
            ..EventStream::default()
        };
        let begin = [b"data: {\"x\":\"", &vec![b'a'; EVENT_BYTES_MAX][..]].concat();
        assert_eq!(
            events.pass(begin.clone().into(), usize::MAX).len(),
            begin.len()
        );
        let end = b"aa\"}\n\ndata: {\"choices\":[]}\n\n";
        assert_eq!(
            events.pass(Bytes::from_static(end), usize::MAX).len(),
            end.len()
        );
        assert!(events.reported.is_none());
        let mut events = EventStream {
            sent: Some(Vec::new()),
            ..EventStream::default()
        };
        assert_eq!(events.pass(Bytes::from_static(b"data: 1\n\n"), 8).len(), 9);
        assert!(events.sent.is_none());
    }

    #[test]
    fn the_event_behind_a_long_one_is_read_wherever_a_piece_begins() {
        for line in ["\n", "\r\n", "\r"] {
            let end = format!("\"}}{line}: c{line}{line}");
            let behind = format!("data: {{\"error\":{{\"code\":500}}}}{line}{line}");
            for at in 0..end.len() {
                let mut events = EventStream {
                    end: StreamEnd::new(Api::Completions, 1),
                    ..EventStream::default()
                };
                let begin = ["data: {\"x\":\"", &"a".repeat(EVENT_BYTES_MAX), &end[..at]];
                events.pass(begin.concat().into(), usize::MAX);
                events.pass(format!("{}{behind}", &end[at..]).into(), usize::MAX);
                assert!(events.take_reported().is_some(), "{line:?} {at}");
            }
        }
    }

    fn chat(ids: bool) -> EventStream {
        let ids = ids.then(|| TokenIds::new(StreamKind::Chat));
        EventStream::new(StreamEnd::new(Api::Chat, 1), true, ids)
    }

    proptest! {
        /// However many lists of ids an event has, wherever, and however its engine writes it, its client gets none.
        #[test]
        fn ids_are_hidden_however_many_there_are(
            lists in prop_oneof![40 => 0usize..40, 1 => 8_000usize..20_000],
            prompts in 0usize..3,
            place in 0usize..4,
            space in prop::sample::select(&["", " ", "\ndata: ", "\ndata:\t"][..]),
            line in prop::sample::select(&["\n", "\r\n", "\r"][..]),
            comment in any::<bool>(),
            mark in any::<bool>(),
        ) {
            let list = format!("\"token_ids\":{space}[{space}1{space},{space}22]{space},");
            let escaped = list.replace("token_ids", "token\\u005fids");
            let lists = list.repeat(lists) + &escaped;
            let prompts = format!("\"prompt_token_ids\"{space}:[7,{space}8],").repeat(prompts);
            let at = |wanted: usize| if place == wanted { &*lists } else { "" };
            let event = format!(
                "{{{}{prompts}\"choices\":[{{{}\"delta\":{{{}\"content\":\"\\\"token_ids\\\":[1]\"}}}},{space}\
                 {{{}\"index\":1}}],{space}\"x\":[[1]]}}",
                at(0), at(1), at(2), at(3),
            );
            let before = [if mark { "\u{feff}" } else { "" }, if comment { ": c\nid: 7\n" } else { "" }].concat();
            let wanted = format!("{before}data: {event}\n\n");
            let hide = |text: &str| {
                // By another way: regular in the texts made here.
                let text = text.replace(&format!("[{space}1{space},{space}22]"), "null");
                text.replace(&format!("[7,{space}8]"), "null").replace('\n', line)
            };
            let mut stream = chat(true);
            let text = wanted.replace('\n', line);
            prop_assume!(text.len() <= EVENT_BYTES_MAX);
            let out = stream.pass(Bytes::from(text), usize::MAX);
            prop_assert_eq!(String::from_utf8_lossy(&out), hide(&wanted));
            let is_prompt = !prompts.is_empty();
            prop_assert_eq!(stream.prompt(), is_prompt.then_some(&[7, 8][..]));
            // What is kept for a continuation has them.
            let sent = stream.take_for_continuation().unwrap().bytes;
            prop_assert!(!String::from_utf8_lossy(&sent).contains("[7,"));
            prop_assert_eq!(String::from_utf8_lossy(&sent).matches("22]").count(), lists.matches("22]").count());
        }
    }

    /// Also in an event that is like those before, which is not read otherwise.
    #[test]
    fn ids_under_an_escaped_key_are_hidden() {
        let mut stream = chat(true);
        let event = |key: &str| {
            format!(
                "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"a\"}},\"logprobs\":null,\
                 \"finish_reason\":null,\"{key}\":[5]}}]}}\n\n"
            )
        };
        for key in [
            "token_ids",
            "token_ids",
            "\\u0074oken_ids",
            "token\\u005fids",
        ] {
            let out = stream.pass(Bytes::from(event(key)), usize::MAX);
            let out = String::from_utf8_lossy(&out);
            assert!(out.contains("\"a\"") && !out.contains("[5]"), "{out}");
        }
    }

    /// What follows a list of ids in other events, and nothing before it.
    #[test]
    fn the_rest_of_an_event_alone_is_no_event() {
        let mut stream = chat(true);
        let rest = "]}]}\n\n";
        let event = format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"a\"}},\"logprobs\":null,\
             \"finish_reason\":null,\"token_ids\":[5{rest}"
        );
        for text in [event.as_str(), &event, rest, &event] {
            let out = stream.pass(Bytes::from(text.to_owned()), usize::MAX);
            assert!(!String::from_utf8_lossy(&out).contains("[5]"));
        }
    }

    #[test]
    fn an_event_that_cannot_be_read_as_one_answer_is_the_engines_fault() {
        let choices = |count: usize| {
            format!(
                "data: {{\"choices\":[{}{{}}]}}\n\n",
                "{},".repeat(count - 1)
            )
        };
        for (event, fails) in [
            (choices(1024), false),
            (choices(1025), true),
            (choices(300_000), true),
            ("data: {\"choices\":[],\"choices\":[{}]}\n\n".into(), true),
            (
                "data: {\"id\":1,\"id\":2,\"choices\":[{}]}\n\n".into(),
                false,
            ),
            ("data: {\"choices\":7}\n\n".into(), false),
            (
                "data: {\"choices\":[7,null,{\"delta\":[]}]}\n\n".into(),
                false,
            ),
        ] {
            let mut stream = chat(false);
            let out = stream.pass(Bytes::from(event.clone()), usize::MAX);
            assert_eq!(stream.take_reported().is_some(), fails, "{event:.60}");
            assert_eq!(out.is_empty(), fails);
        }
    }

    #[test]
    fn of_a_long_event_with_ids_nothing_passes() {
        let begin = [
            b"data: {\"prompt_token_ids\":[",
            &b"100,".repeat(EVENT_BYTES_MAX / 4)[..],
        ]
        .concat();
        for hides in [false, true] {
            let mut stream = chat(hides);
            let out = stream.pass(begin.clone().into(), usize::MAX);
            let wanted = if hides {
                LongEvent::Suppress
            } else {
                LongEvent::Relay
            };
            assert_eq!((out.is_empty(), stream.take_long()), (hides, Some(wanted)));
            assert_eq!(
                stream.take_for_continuation().is_ok(),
                hides,
                "the same answer may come without ids"
            );
        }
    }
}
