//! The tokens of a pass, written into the open frames of the shards that their streams belong to.

use slipstream_base::width::to_u32;
use slipstream_base::{FinishReason, Role, TokenId};
use slipstream_engine::{Finished, FirstToken, PassOutput};
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::{End, FirstPass, PassFrame, Prologue, StreamAddr, ThreadPort, Usage};

use crate::held::HeldTokens;
use crate::inputs::Inputs;
use crate::live::{LiveStream, LiveTable};
use crate::rank::Rank;
use crate::stats::ThreadStats;
use crate::timeline::Timeline;

/// Where a pass's tokens go.
pub(crate) struct Streams<'a> {
    pub(crate) live: &'a mut LiveTable,
    pub(crate) held: &'a mut HeldTokens,
    pub(crate) inputs: &'a mut Inputs,
    pub(crate) turned: &'a mut Vec<StreamAddr>,
    pub(crate) port: &'a mut ThreadPort,
    pub(crate) stats: &'a ThreadStats,
}

/// Writes a pass's tokens into the open frames of their shards, in the order of the pass. Returns how
/// many of them are of prompts that were computed for others, and go nowhere.
pub(crate) fn fan_out(
    out: &PassOutput,
    rank: &Rank,
    pass: FirstPass,
    streams: &mut Streams<'_>,
) -> u64 {
    let Streams {
        live,
        held,
        inputs,
        turned,
        port,
        stats,
    } = streams;
    // Both are in the order of `tokens`, so one look ahead each does.
    let mut first = out.first.iter().peekable();
    let mut finished = out.finished.iter().peekable();
    let mut prompts = 0;
    for (id, tokens) in &out.tokens {
        let addr = StreamAddr::from(id);
        let began = first.next_if(|first| first.id == id);
        let done = finished.next_if(|done| done.id == id);
        let (Some(stream), Some(frame)) = (live.get_mut(addr), port.frame(addr.shard)) else {
            debug_assert!(false, "an engine computed {addr}, which is not live");
            continue;
        };
        if stream.role == Role::Prefill {
            // It ends with its first token, which is computed again where the answer is generated.
            debug_assert!(
                began.is_some() && done.is_some(),
                "{addr} is a prompt alone"
            );
            prompts += tokens.len() as u64;
            end_prompt(began, stream, rank, addr, pass, frame);
            continue;
        }
        if stream.is_duplex
            && let Some(duplex) = inputs.get_mut(addr)
        {
            duplex.on_tokens(tokens);
            if let Some(began) = began {
                duplex.on_cached(began.cached_tokens);
            }
        }
        // Later turns of a stream have a prologue each in the engine, and none here.
        let began = began.filter(|_| stream.completion_tokens == 0);
        if let Some(began) = began {
            begin_answer(began, stream, rank, addr, frame);
        }
        let first = began.map(|_| pass);
        let count = to_u32(tokens.len());
        stream.completion_tokens += count;
        let extra = u32::from(slipstream_base::planted!("credit-off-by-one"));
        if stream.credit_tokens.saturating_add(extra) >= count {
            frame.push_tokens(addr.stream, tokens, first);
            if stream.credit_tokens != NO_LIMIT {
                stream.credit_tokens = stream.credit_tokens.saturating_sub(count);
            }
        } else {
            hold_back(tokens, first, stream, addr, held, stats, frame);
        }
        let Some(done) = done else {
            continue;
        };
        count_finished(rank, done.reason);
        let mut end = end_of(done);
        if stream.is_duplex
            && let Some(duplex) = inputs.get_mut(addr)
        {
            if !duplex.on_answered(done.reason, done.usage.preemptions) {
                frame.push_turn(addr.stream, &end);
                turned.push(addr);
                continue;
            }
            end = duplex.end();
            inputs.remove(addr);
        }
        if held.is_empty() || !held.end(addr, end) {
            frame.push_end(addr.stream, &end);
            if slipstream_base::planted!("double-end") {
                frame.push_end(addr.stream, &end);
            }
        }
        live.remove(addr);
    }
    debug_assert!(first.peek().is_none() && finished.peek().is_none());
    prompts
}

/// A prompt is computed for another worker.
#[cold]
fn end_prompt(
    began: Option<&FirstToken>,
    stream: &LiveStream,
    rank: &Rank,
    addr: StreamAddr,
    pass: FirstPass,
    frame: &mut PassFrame,
) {
    if let Some(began) = began {
        let prologue = prologue(began, stream.recv_ns, &rank.timeline);
        frame.push_prologue(addr.stream, &prologue);
    }
    let tokens = u64::from(stream.prompt_tokens);
    rank.stats.prompt_tokens.add(tokens);
    frame.push_computed(addr.stream, pass);
}

/// A stream has its first token.
fn begin_answer(
    began: &FirstToken,
    stream: &mut LiveStream,
    rank: &Rank,
    addr: StreamAddr,
    frame: &mut PassFrame,
) {
    stream.cached_tokens = began.cached_tokens;
    if stream.role == Role::Both {
        let tokens = u64::from(stream.prompt_tokens);
        rank.stats.prompt_tokens.add(tokens);
    }
    let prologue = prologue(began, stream.recv_ns, &rank.timeline);
    frame.push_prologue(addr.stream, &prologue);
}

/// Sends as many of a step's tokens as there is credit for, and keeps the others.
#[cold]
fn hold_back(
    tokens: &[TokenId],
    first: Option<FirstPass>,
    stream: &mut LiveStream,
    addr: StreamAddr,
    held: &mut HeldTokens,
    stats: &ThreadStats,
    frame: &mut PassFrame,
) {
    let (sent, kept) = tokens.split_at(stream.credit_tokens as usize);
    frame.push_tokens(addr.stream, sent, first);
    stream.credit_tokens = 0;
    if held.push(addr, kept, first.filter(|_| sent.is_empty())) {
        stats.paused.add(1);
    }
}

fn count_finished(rank: &Rank, reason: FinishReason) {
    match reason {
        FinishReason::Stop => rank.stats.finished_stop.add(1),
        FinishReason::Length => rank.stats.finished_length.add(1),
        FinishReason::Abort => rank.stats.finished_abort.add(1),
    }
}

fn prologue(began: &FirstToken, recv_ns: u64, timeline: &Timeline) -> Prologue {
    let recv = (recv_ns != 0).then_some(recv_ns);
    Prologue {
        hit_tokens: began.cached_tokens,
        worker_recv_ns: recv,
        // A rank that catches up may admit a request in a pass that, by the model, began before
        // the request came.
        admitted_ns: recv.map(|recv| timeline.wall_ns(began.admitted).max(recv)),
    }
}

fn end_of(done: &Finished) -> End {
    End {
        reason: done.reason,
        usage: Usage {
            prompt_tokens: done.usage.prompt_tokens,
            completion_tokens: done.usage.output_tokens,
            cached_tokens: done.usage.cached_tokens,
            preemptions: done.usage.preemptions,
        },
    }
}
