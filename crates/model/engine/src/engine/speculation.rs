//! Speculative decoding: passes that verify drafted tokens.

use slipstream_base::mix::{draw, mix64, unit};
use slipstream_base::width::to_u32;
use slipstream_base::{RequestId, TokenId};
use slipstream_config::cluster::SpeculationConfig;

use super::Engine;
use super::sequence::{RunningSequence, stops_at};
use crate::output::PassOutput;

/// The length of drafts, how often their tokens are accepted, and counters.
#[derive(Default)]
pub(super) struct Speculation {
    /// Tokens of a draft; 0: nothing is drafted.
    pub(super) drafts: u32,
    /// Tokens for which blocks are taken in advance, because the drafter writes keys and values for them.
    /// Source: vLLM, `num_lookahead_tokens` of `VllmConfig`.
    lookahead: u32,
    /// Share of drafts in which each token is accepted. Shape `[drafts]`.
    acceptance: Vec<f64>,
    /// Counters of `Stats`.
    pub(super) verified: u64,
    pub(super) draft_tokens: u64,
    pub(super) accepted_tokens: u64,
    /// Scratch: tokens of one sequence.
    tokens: Vec<TokenId>,
}

/// The part of a sequence that its next tokens depend on.
pub(super) struct Answered {
    pub(super) seed: u64,
    pub(super) slot: u32,
    /// Tokens so far.
    pub(super) outputs: u32,
    /// Tokens at which it ends.
    pub(super) end_outputs: u32,
    pub(super) natural_end: bool,
    /// Has stop tokens to look for.
    pub(super) stops: bool,
}

impl Speculation {
    pub(super) fn new(config: Option<&SpeculationConfig>) -> Speculation {
        let Some(config) = config else {
            return Speculation::default();
        };
        let drafts = config.tokens();
        Speculation {
            drafts,
            lookahead: if config.method.has_kv_cache() {
                drafts
            } else {
                0
            },
            acceptance: config.acceptance.clone(),
            ..Speculation::default()
        }
    }

    /// Tokens that a sequence has blocks for in a pass that computes it up to `target`.
    #[inline]
    pub(super) fn slots(&self, target: u32, max_len: u32) -> u32 {
        // An engine that drafts nothing never computes as many.
        (target + self.lookahead).min(max_len)
    }

    /// How many of `drafts` tokens are accepted behind `outputs` tokens of the answer with this `seed`. One draw decides
    /// for all positions: the first `n` are accepted with the share of position `n`.
    fn accepted(&self, seed: u64, outputs: u32, drafts: u32) -> u32 {
        // A stream of its own: acceptance must not be correlated with tokens.
        let stream = mix64(seed ^ 0x6163_6365_7074_6564); // "accepted"
        let at = unit(draw(stream, u64::from(outputs)));
        let shares = self.acceptance.iter().take(drafts as usize);
        to_u32(shares.take_while(|&&share| at < share).count())
    }
}

impl Engine {
    /// Ends a pass that verified drafted tokens of a running sequence. Returns the tokens that it got, and whether it ends.
    ///
    /// Source: vLLM, `Scheduler.update_from_output`: rejected tokens are computed again, and the pass that comes next,
    /// which was scheduled as if all were accepted, keeps its number of tokens.
    pub(super) fn verify(&mut self, r: &mut RunningSequence, out: &mut PassOutput) -> (u32, bool) {
        debug_assert!(r.decoding, "a first token is not drafted");
        let drafts = r.computed - r.len;
        let answered = Answered {
            seed: r.seed,
            slot: r.slot,
            outputs: r.len - r.prompt_len,
            end_outputs: r.end_len - r.prompt_len,
            natural_end: r.natural_end,
            stops: r.stops,
        };
        let (tokens, stops) = self.answer(r.id, &answered, drafts, out);
        let rejected = drafts + 1 - tokens;
        r.computed -= rejected;
        if let Some(next) = self.next.as_mut().filter(|_| r.scheduled > 0) {
            let context = r.computed + r.scheduled;
            next.load.decode_context -= u64::from(rejected);
            next.contexts.remove(context + rejected);
            next.contexts.add(context);
        }
        self.cache_full(r.slot, r.computed);
        r.len += tokens;
        let ends = stops || r.len == r.end_len;
        if ends {
            self.finish(r, stops, out);
        }
        (tokens, ends)
    }

    /// The tokens that a sequence gets: one, and those of its `drafts` that are accepted, up to its end. Lists them if they
    /// are listed. Returns how many, and whether the last one is a stop token.
    pub(super) fn answer(
        &mut self,
        id: RequestId,
        of: &Answered,
        drafts: u32,
        out: &mut PassOutput,
    ) -> (u32, bool) {
        let mut count = 1;
        if drafts > 0 {
            let accepted = self.speculation.accepted(of.seed, of.outputs, drafts);
            self.speculation.verified += 1;
            self.speculation.draft_tokens += u64::from(drafts);
            self.speculation.accepted_tokens += u64::from(accepted);
            count += accepted;
        }
        count = count.min(of.end_outputs - of.outputs);
        if !self.lists_tokens && !of.stops {
            return (count, false);
        }
        let mut tokens = std::mem::take(&mut self.speculation.tokens);
        tokens.clear();
        let mut stops = false;
        for position in of.outputs..of.outputs + count {
            let token = if of.natural_end && position + 1 == of.end_outputs {
                self.output.eos
            } else {
                self.output.token(of.seed, position)
            };
            tokens.push(token);
            if of.stops && stops_at(&self.sequences[of.slot], position, token) {
                stops = true;
                break;
            }
        }
        count = to_u32(tokens.len());
        if self.lists_tokens {
            out.tokens.push_all(id, &tokens);
        }
        self.speculation.tokens = tokens;
        (count, stops)
    }
}
