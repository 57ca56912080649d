//! Clients: a request, and the check of its answer, token by token.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use slipstream_base::mix;
use slipstream_base::width::to_usize;
use slipstream_engine::{OutputModel, natural_len};
use slipstream_frontend::sim::{SimError, SimShard};
use slipstream_frontend::text::TextModel;

use crate::plan::ClientPlan;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a status that is no 200.
    Refused(SimError),
    /// Every choice is complete.
    Finished,
    /// With an error in mid-stream, or with a choice that was aborted.
    Lost(String),
    /// Its client went away.
    Cancelled,
    /// Its frontend was killed.
    Dropped,
}

/// A client, and its answer so far.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) plan: ClientPlan,
    pub(crate) sent: bool,
    /// Each end that the client saw; more than one is a failure.
    pub(crate) outcomes: Vec<Outcome>,
    pub(crate) choices: Vec<Choice>,
    /// The first thing that was wrong.
    pub(crate) wrong: Option<String>,
    pub(crate) tokens: u64,
    /// The tokens that the answer says were used: of the prompt, cached ones of it, of the answer.
    pub(crate) usage: Option<[u64; 3]>,
}

/// One choice so far.
#[derive(Debug)]
pub(crate) struct Choice {
    seed: u64,
    /// Whole tokens that came, and bytes of the next one.
    tokens: u32,
    bytes: usize,
    /// Visible tokens of a complete answer, and how it ends.
    len: u32,
    reason: &'static str,
    ended: Option<String>,
}

/// Shared by all clients.
pub(crate) struct Answers {
    pub(crate) text: Arc<TextModel>,
    pub(crate) output: OutputModel,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: Vec<EventChoice<'a>>,
    #[serde(borrow, default)]
    error: Option<EventError<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<UsageDetails>,
}

#[derive(Deserialize)]
struct UsageDetails {
    cached_tokens: u64,
}

#[derive(Deserialize)]
struct EventChoice<'a> {
    index: usize,
    #[serde(borrow)]
    text: std::borrow::Cow<'a, str>,
    #[serde(default)]
    finish_reason: Option<&'a str>,
}

#[derive(Deserialize)]
struct EventError<'a> {
    #[serde(borrow, default)]
    message: std::borrow::Cow<'a, str>,
    #[serde(borrow, default)]
    code: Option<std::borrow::Cow<'a, str>>,
}

impl Record {
    pub(crate) fn new(plan: &ClientPlan, answers: &Answers) -> Record {
        let choices = (0..u64::from(plan.choices)).map(|index| {
            let seed = match index {
                0 => plan.seed,
                index => mix::draw(plan.seed, index),
            };
            let natural = natural_len(&answers.output.lengths, seed);
            let stops = !plan.ignore_eos && natural <= plan.max_tokens;
            Choice {
                seed,
                tokens: 0,
                bytes: 0,
                // The end-of-sequence token has no text.
                len: if stops { natural - 1 } else { plan.max_tokens },
                reason: if stops { "stop" } else { "length" },
                ended: None,
            }
        });
        Record {
            plan: plan.clone(),
            sent: false,
            outcomes: Vec::new(),
            choices: choices.collect(),
            wrong: None,
            tokens: 0,
            usage: None,
        }
    }

    /// Whether it has seen no token.
    pub(crate) fn is_empty(&self) -> bool {
        self.choices
            .iter()
            .all(|choice| choice.tokens == 0 && choice.bytes == 0)
    }

    fn fail(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    fn on_error(&mut self, error: &EventError<'_>) {
        let code = error.code.as_deref().unwrap_or("no code");
        self.outcomes
            .push(Outcome::Lost(format!("{code}: {}", error.message)));
    }

    fn on_choice(&mut self, event: &EventChoice<'_>, answers: &Answers) {
        let Some(choice) = self.choices.get_mut(event.index) else {
            return self.fail(format!("choice {} was not asked for", event.index));
        };
        if let (Some(reason), false) = (&choice.ended, event.text.is_empty()) {
            let what = format!("choice {} goes on after its end ({reason})", event.index);
            return self.fail(what);
        }
        let mut rest = event.text.as_bytes();
        while !rest.is_empty() {
            if choice.tokens >= choice.len {
                let what = format!("choice {} has more than {} tokens", event.index, choice.len);
                return self.fail(what);
            }
            let token = answers.output.token(choice.seed, choice.tokens);
            let expected = &answers.text.token_bytes(token)[choice.bytes..];
            let count = expected.len().min(rest.len());
            if expected[..count] != rest[..count] {
                let what = format!(
                    "choice {}: token {} is not that of its seed: {:?}",
                    event.index,
                    choice.tokens,
                    String::from_utf8_lossy(rest)
                );
                return self.fail(what);
            }
            rest = &rest[count..];
            if count == expected.len() {
                choice.tokens += 1;
                choice.bytes = 0;
                self.tokens += 1;
            } else {
                choice.bytes += count;
            }
        }
        let Some(reason) = event.finish_reason else {
            return;
        };
        if let Some(before) = &choice.ended {
            let what = format!("choice {} ends twice: {before}, {reason}", event.index);
            return self.fail(what);
        }
        choice.ended = Some(reason.to_owned());
        let complete = choice.tokens == choice.len && choice.bytes == 0;
        if reason == "length" || reason == "stop" {
            if !complete || reason != choice.reason {
                let what = format!(
                    "choice {} ends with {reason} after {} tokens, not with {} after {}",
                    event.index, choice.tokens, choice.reason, choice.len
                );
                self.fail(what);
            }
        } else if reason != "abort" {
            let what = format!("choice {} ends with {reason}", event.index);
            self.fail(what);
        }
    }

    /// The answer is over.
    fn on_end(&mut self) {
        if !self.outcomes.is_empty() {
            return; // an error came before
        }
        let ended: Vec<_> = self
            .choices
            .iter()
            .map(|choice| choice.ended.clone())
            .collect();
        if ended.contains(&None) {
            return self.fail("the answer is over, and a choice has no end".into());
        }
        let aborted = ended.iter().flatten().any(|reason| reason == "abort");
        self.outcomes.push(if aborted {
            Outcome::Lost("abort".into())
        } else {
            Outcome::Finished
        });
    }

    fn on_json(&mut self, json: &[u8], answers: &Answers) {
        let event: Event<'_> = match serde_json::from_slice(json) {
            Ok(event) => event,
            Err(error) => {
                let what = format!("no JSON: {error}: {}", String::from_utf8_lossy(json));
                return self.fail(what);
            }
        };
        if let Some(error) = &event.error {
            self.on_error(error);
        }
        for choice in &event.choices {
            self.on_choice(choice, answers);
        }
        if let Some(usage) = &event.usage {
            let cached = usage.prompt_tokens_details.as_ref();
            let cached = cached.map_or(0, |details| details.cached_tokens);
            self.usage = Some([usage.prompt_tokens, cached, usage.completion_tokens]);
        }
    }
}

/// The words of a prompt of about so many tokens; those of one group begin alike.
fn prompt(plan: &ClientPlan) -> String {
    const WORDS: [&str; 8] = [
        "one", "two", "three", "four", "five", "six", "seven", "eight",
    ];
    let mut prompt = String::new();
    let shared = plan.prompt_tokens * 3 / 4;
    for at in 0..plan.prompt_tokens {
        let seed = if at < shared { plan.group } else { plan.seed };
        let word = to_usize(mix::draw(seed, u64::from(at))) % WORDS.len();
        prompt.push(' ');
        prompt.push_str(WORDS[word]);
    }
    prompt
}

pub(crate) fn body(plan: &ClientPlan) -> Bytes {
    let ClientPlan {
        max_tokens,
        choices,
        seed,
        stream,
        ignore_eos,
        ..
    } = plan;
    let usage = if *stream {
        ",\"stream_options\":{\"include_usage\":true}"
    } else {
        ""
    };
    format!(
        "{{\"prompt\":\"{}\",\"max_tokens\":{max_tokens},\"n\":{choices},\"seed\":{seed},\
         \"stream\":{stream},\"ignore_eos\":{ignore_eos}{usage}}}",
        prompt(plan)
    )
    .into()
}

/// Sends the request and reads its answer.
pub(crate) async fn run(shard: SimShard, record: Rc<RefCell<Record>>, answers: Rc<Answers>) {
    let plan = record.borrow().plan.clone();
    record.borrow_mut().sent = true;
    let mut answer = match shard.post(body(&plan), plan.session).await {
        Ok(answer) => answer,
        Err(error) => {
            record.borrow_mut().outcomes.push(Outcome::Refused(error));
            return;
        }
    };
    let mut unread: Vec<u8> = Vec::new();
    let mut done = 0;
    while let Some(piece) = answer.next().await {
        match piece {
            Ok(bytes) => unread.extend_from_slice(&bytes),
            Err(error) => {
                let mut record = record.borrow_mut();
                record.outcomes.push(Outcome::Lost(format!("cut: {error}")));
                return;
            }
        }
        if plan.stream {
            let mut record = record.borrow_mut();
            while let Some(end) = unread.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = unread.drain(..end + 2).collect();
                let data = event[..end]
                    .strip_prefix(b"data: ")
                    .unwrap_or(&event[..end]);
                if done > 0 {
                    record.fail("an event follows [DONE]".into());
                }
                if data == b"[DONE]" {
                    done += 1;
                } else {
                    record.on_json(data, &answers);
                }
            }
        }
        if plan.pause_ms > 0 {
            tokio::time::sleep(Duration::from_millis(plan.pause_ms)).await;
        }
    }
    let mut record = record.borrow_mut();
    if plan.stream {
        if !unread.is_empty() {
            record.fail("half an event is left".into());
        }
        if done == 0 && record.outcomes.is_empty() {
            record.fail("a stream without [DONE]".into());
        }
    } else {
        record.on_json(&unread, &answers);
    }
    record.on_end();
}
