//! The trace of a request: its stage times, and where it ran.

use slipstream_base::{Stage, StageTimes};

use crate::tokens::reply::sequence::Sequence;

/// Data of a traced request at its end, in addition to stage times.
pub(crate) struct Trace {
    /// Tokens per block of the engines, at least 1.
    pub(crate) block_size: u32,
    /// JSON array of the candidates' scores, as the router saw them.
    pub(crate) scores: String,
}

/// The trace as JSON: stage times by name (ns of `CLOCK_MONOTONIC`), where it ran, what it hit.
pub(super) fn trace_json(times: &StageTimes, first: &Sequence, trace: Option<&Trace>) -> String {
    use std::fmt::Write;
    let mut json = String::from("{\"stages\":{");
    let mut comma = "";
    for stage in Stage::ALL {
        if let Some(ns) = times.at(stage) {
            let _ = write!(json, "{comma}\"{}\":{ns}", stage.name());
            comma = ",";
        }
    }
    let _ = write!(
        json,
        "}},\"worker\":{},\"dp_rank\":{},\"cached_tokens\":{},\"preemptions\":{}",
        first.spec.target.worker.0, first.spec.target.dp_rank, first.cached, first.preemptions
    );
    if let Some(prefilled) = first.prefilled {
        let _ = write!(
            json,
            ",\"prefill_worker\":{},\"prefill_dp_rank\":{}",
            prefilled.worker.0, prefilled.dp_rank
        );
    }
    if let Some(trace) = trace {
        let _ = write!(json, ",\"hit_blocks\":{}", first.cached / trace.block_size);
    }
    if let Some(trace) = trace.filter(|t| !t.scores.is_empty()) {
        let _ = write!(json, ",\"scores\":{}", trace.scores);
    }
    json.push('}');
    json
}
