//! Slipstream's own trace format: one session per line, with all its turns.
//!
//! ```json
//! {"timestamp": 12.5, "turns": [
//!   {"add": [[77, 1536, "system"], [90, 200]], "output_length": 128},
//!   {"add": [[91, 64]], "output_length": 40, "delay": 1500.0, "priority": -1}]}
//! ```
//!
//! `timestamp` and `delay` are ms. A segment is the name of a text, its tokens, and its speaker
//! (default `user`). `add` follows the previous prompt and its answer; `prompt` replaces both.
//! Since a line holds a whole session, any number of turns is read as a stream. Since texts keep
//! their names, a trace made from a workload requests the same blocks as the workload.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use slipstream_base::SimTime;

use crate::form::ModelName;
use crate::prompt::{Content, Role, Segment};
use crate::source::{Request, Source, TURNS_MAX};
use crate::trace::{Turn, TurnPrompt, check_ms};

#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct SessionLine {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) timestamp: Option<f64>,
    /// The model of all its turns.
    #[serde(default, skip_serializing)]
    pub(crate) model: Option<ModelName>,
    pub(crate) turns: Vec<TurnLine>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TurnLine {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prompt: Option<Vec<SegmentLine>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    add: Option<Vec<SegmentLine>>,
    output_length: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    delay: f64,
    #[serde(default, skip_serializing_if = "is_normal")]
    priority: i32,
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    ignore_eos: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum SegmentLine {
    Said(u64, u32, Speaker),
    Plain(u64, u32),
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Speaker {
    System,
    User,
    Assistant,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(delay: &f64) -> bool {
    *delay == 0.0
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_normal(priority: &i32) -> bool {
    *priority == 0
}

fn yes() -> bool {
    true
}

impl SegmentLine {
    fn of(segment: &Segment) -> SegmentLine {
        let (name, tokens) = (segment.name(), segment.tokens);
        match segment.role {
            Role::User => SegmentLine::Plain(name, tokens),
            Role::System => SegmentLine::Said(name, tokens, Speaker::System),
            Role::Assistant => SegmentLine::Said(name, tokens, Speaker::Assistant),
        }
    }

    fn segment(self) -> Segment {
        let (name, tokens, role) = match self {
            SegmentLine::Plain(name, tokens) | SegmentLine::Said(name, tokens, Speaker::User) => {
                (name, tokens, Role::User)
            }
            SegmentLine::Said(name, tokens, Speaker::System) => (name, tokens, Role::System),
            SegmentLine::Said(name, tokens, Speaker::Assistant) => (name, tokens, Role::Assistant),
        };
        Segment {
            content: Content::Text(name),
            tokens,
            role,
        }
    }
}

impl SessionLine {
    /// The session's turns, which are for `model`, or its error.
    pub(crate) fn turns(&self, model: u32) -> Result<Vec<Turn>, String> {
        if self.turns.is_empty() || self.turns.len() > TURNS_MAX as usize {
            return Err(format!(
                "`turns` has {} turns; a session has 1 to {TURNS_MAX}",
                self.turns.len()
            ));
        }
        let turn = |(index, line): (usize, &TurnLine)| {
            let wrong = |what: &str| format!("turn {index}: {what}");
            let segments = |lines: &[SegmentLine]| -> Vec<Segment> {
                lines.iter().map(|line| line.segment()).collect()
            };
            let prompt = match (&line.prompt, &line.add) {
                (Some(whole), None) => TurnPrompt::Whole(segments(whole)),
                (None, Some(add)) if index == 0 => TurnPrompt::Whole(segments(add)),
                (None, Some(add)) => TurnPrompt::Add(segments(add)),
                _ => return Err(wrong("set one of `prompt` and `add`")),
            };
            let (TurnPrompt::Whole(parts) | TurnPrompt::Add(parts)) = &prompt;
            let tokens = parts.iter().map(|s| u64::from(s.tokens)).sum::<u64>();
            if tokens == 0 || tokens > u64::from(u32::MAX) {
                return Err(wrong("a prompt has 1 to 4,294,967,295 tokens"));
            }
            if line.output_length == 0 {
                return Err(wrong(
                    "`output_length` is 0; an answer has at least one token",
                ));
            }
            if line.delay < 0.0 {
                return Err(wrong("`delay` is negative"));
            }
            if let Err(message) = check_ms("delay", line.delay) {
                return Err(wrong(&message));
            }
            Ok(Turn {
                prompt,
                output_len: line.output_length,
                delay_ms: Some(line.delay),
                not_before_ms: None,
                priority: line.priority,
                ignore_eos: line.ignore_eos,
                model,
            })
        };
        self.turns.iter().enumerate().map(turn).collect()
    }
}

/// Writes the session that begins with `first` as a line. `source` generated it; answers count at
/// full length. `scale` is the time scale that due times were divided by.
///
/// Returns the number of turns.
///
/// # Errors
/// If `out` fails.
pub fn write_session(
    out: &mut impl Write,
    source: &Source,
    first: Request,
    scale: f64,
) -> io::Result<u64> {
    let ms = |at: SimTime| at.as_secs_f64() * 1e3 * scale;
    let mut line = SessionLine {
        timestamp: Some(ms(first.due)),
        model: None,
        turns: Vec::new(),
    };
    let mut delay = 0.0;
    let mut before: Option<Vec<Segment>> = None;
    let mut next = Some(first);
    while let Some(request) = next {
        let segments = request.prompt.segments();
        let lines = |segments: &[Segment]| segments.iter().map(SegmentLine::of).collect();
        // The previous prompt and its answer are known when the session is read.
        let kept = before.as_ref().map_or(0, |before| before.len() + 1);
        let goes_on = before.as_ref().is_none_or(|before| {
            segments.starts_with(before)
                && matches!(segments.get(before.len()), Some(s) if matches!(s.content, Content::Answer(_)))
        });
        line.turns.push(TurnLine {
            prompt: (!goes_on).then(|| lines(segments)),
            add: goes_on.then(|| lines(&segments[kept..])),
            output_length: request.output_len,
            delay,
            priority: request.priority,
            ignore_eos: request.ignore_eos,
        });
        next = source.follow_up(&request, request.output_len, SimTime::ZERO);
        delay = next.as_ref().map_or(0.0, |next| ms(next.due));
        before = Some(segments.to_vec());
    }
    serde_json::to_writer(&mut *out, &line)?;
    out.write_all(b"\n")?;
    Ok(line.turns.len() as u64)
}
