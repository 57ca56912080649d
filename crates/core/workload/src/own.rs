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

use serde::{Deserialize, Serialize};

use crate::form::ModelName;
use crate::prompt::{Content, Role, Segment};
use crate::request::TURNS_MAX;
use crate::turn::{Turn, TurnPrompt, check_ms};

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
    pub(crate) prompt: Option<Vec<SegmentLine>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) add: Option<Vec<SegmentLine>>,
    pub(crate) output_length: u32,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) delay: f64,
    #[serde(default, skip_serializing_if = "is_normal")]
    pub(crate) priority: i32,
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub(crate) ignore_eos: bool,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(
    untagged,
    expecting = "a segment of `add` or `prompt` is [NAME, TOKENS] or [NAME, TOKENS, \"system\"], where NAME and TOKENS are \
                 whole numbers and the third is \"system\", \"user\" or \"assistant\""
)]
pub(crate) enum SegmentLine {
    Said(u64, u32, Speaker),
    Plain(u64, u32),
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Speaker {
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
    pub(crate) fn of(segment: &Segment) -> SegmentLine {
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
