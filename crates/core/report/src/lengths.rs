//! Lengths of answers: whether an engine and its twin did the same work.

use std::collections::BTreeMap;
use std::path::Path;

use crate::drag::{self, DragError};
use crate::table::{counted, grouped};

/// Share of the twin's tokens that an engine may leave out, or add, and still do the same work. A client that ends one
/// token early on 1 in 100 moves no figure by more than that.
const TOKENS_SHARE_MAX: f64 = 0.01;

/// Lengths of the answers of an engine and of its twin, of requests that both answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerLengths {
    /// Requests that both answered.
    requests: u64,
    /// Those with fewer tokens from the engine.
    shorter: u64,
    /// Those with more.
    longer: u64,
    /// Tokens that the engine left out, in answers that are too short.
    tokens_missing: u64,
    /// Tokens beyond the twin's, in answers that are too long.
    tokens_extra: u64,
    /// Tokens of the engine, and of the twin.
    engine_tokens: u64,
    twin_tokens: u64,
}

impl AnswerLengths {
    /// Compares tokens of answers by request.
    pub fn of(engine: &BTreeMap<String, u32>, twin: &BTreeMap<String, u32>) -> AnswerLengths {
        let mut lengths = AnswerLengths::default();
        for (id, &asked) in twin {
            let Some(&answered) = engine.get(id) else {
                continue; // it failed, which the report shows
            };
            let (asked, answered) = (u64::from(asked), u64::from(answered));
            lengths.requests += 1;
            lengths.engine_tokens += answered;
            lengths.twin_tokens += asked;
            lengths.shorter += u64::from(answered < asked);
            lengths.longer += u64::from(answered > asked);
            lengths.tokens_missing += asked.saturating_sub(answered);
            lengths.tokens_extra += answered.saturating_sub(asked);
        }
        lengths
    }

    /// As JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "requests": self.requests,
            "shorter": self.shorter,
            "longer": self.longer,
            "tokens_missing": self.tokens_missing,
            "tokens_extra": self.tokens_extra,
            "engine_tokens": self.engine_tokens,
            "twin_tokens": self.twin_tokens,
        })
    }

    /// Whether both sides did the same work.
    pub fn is_same(&self) -> bool {
        let off = self.tokens_missing.max(self.tokens_extra) as f64;
        off <= TOKENS_SHARE_MAX * self.twin_tokens as f64
    }

    /// Why the figures of both sides are not compared.
    pub fn refusal(&self) -> Option<String> {
        if self.is_same() {
            return None;
        }
        let (count, what) = if self.tokens_missing >= self.tokens_extra {
            (self.shorter, "fewer")
        } else {
            (self.longer, "more")
        };
        Some(format!(
            "error: not compared: the engine answered {} of {} with {what} tokens than asked ({} tokens instead of {}), \
             so its latencies and rates are those of other work than the twin's; {}",
            grouped(count),
            counted(self.requests, "request"),
            grouped(self.engine_tokens),
            grouped(self.twin_tokens),
            "use an engine that honors `ignore_eos`, keep `--isl` plus `--osl` within its context, or lower `--osl` below \
             the length of its answers; `--json` and `--keep DIR` have both reports"
        ))
    }
}

/// Tokens of each whole answer in a file of drag records, by request.
///
/// # Errors
/// As [`drag::read`].
pub fn read(path: &Path) -> Result<BTreeMap<String, u32>, DragError> {
    let mut lengths = BTreeMap::new();
    for record in drag::read(path)? {
        let record = record?;
        if let Some(osl) = record.osl.filter(|_| record.status == "ok") {
            lengths.insert(record.id, osl);
        }
    }
    Ok(lengths)
}
