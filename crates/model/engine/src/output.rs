//! Results of a pass.

use slipstream_base::width::to_u32;
use slipstream_base::{FinishReason, ForwardPassMetrics, KvDelta, RequestId, SimTime, TokenId};

/// Results of one pass. A driver keeps one and hands it in again and again: its vectors are
/// cleared, never shrunk, so that a steady pass allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct PassOutput {
    /// When the pass began.
    pub start: SimTime,
    /// When it ended, by the model: the time of every token in it.
    pub end: SimTime,
    /// Output tokens of the pass.
    pub token_count: u32,
    /// Sequences that got them. As many as `token_count`, unless one got several.
    pub sequence_count: u32,
    /// Those tokens, by sequence; empty if the engine does not list them
    /// ([`Engine::list_tokens`](crate::Engine::list_tokens)).
    pub tokens: StepTokens,
    /// Sequences whose first token came in this pass, in the same order.
    pub first: Vec<FirstToken>,
    /// Sequences whose last token came in this pass, in the same order.
    pub finished: Vec<Finished>,
    /// How the KV cache changed since the last delta. Publish it unless `ops` is empty: an empty
    /// delta takes no number.
    pub kv: KvDelta,
    /// Work of the pass.
    pub fpm: ForwardPassMetrics,
    /// When sequences joined the waiting queue between the begin and the end of the pass, in order.
    /// Those of them that were aborted before its end are left out.
    pub arrived: Vec<SimTime>,
}

impl PassOutput {
    /// Empties it, apart from its times and its record.
    pub fn clear(&mut self) {
        self.token_count = 0;
        self.sequence_count = 0;
        self.tokens.clear();
        self.first.clear();
        self.finished.clear();
        self.kv.ops.clear();
        self.arrived.clear();
    }
}

/// The output tokens of a step, by sequence, in the order in which the engine ran the sequences.
///
/// A sequence that is listed got at least one token. It gets several if the engine drafts tokens and
/// verifies them in one step (speculative decoding). 16 bytes per sequence with one token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    entries: Vec<TokenEntry>,
    /// Tokens of the entries with several, in order.
    several: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TokenEntry {
    id: RequestId,
    /// Its token, unless there are several.
    token: TokenId,
    /// Tokens in [`StepTokens::several`]; 0 for one token.
    several: u32,
}

impl StepTokens {
    /// Adds a sequence with one token.
    #[inline]
    pub fn push(&mut self, id: RequestId, token: TokenId) {
        self.entries.push(TokenEntry {
            id,
            token,
            several: 0,
        });
    }

    /// Adds a sequence with `tokens`. Adds nothing if there are none.
    pub fn push_all(&mut self, id: RequestId, tokens: &[TokenId]) {
        match *tokens {
            [] => {}
            [token] => self.push(id, token),
            [token, ..] => {
                self.several.extend_from_slice(tokens);
                self.entries.push(TokenEntry {
                    id,
                    token,
                    several: to_u32(tokens.len()),
                });
            }
        }
    }

    /// Each sequence and its tokens, at least one.
    #[inline]
    pub fn iter(&self) -> StepTokensIter<'_> {
        StepTokensIter {
            entries: self.entries.iter(),
            several: &self.several,
        }
    }

    /// Sequences listed.
    pub fn sequences(&self) -> usize {
        self.entries.len()
    }

    /// Tokens listed, counted sequence by sequence; [`PassOutput::token_count`] has them at no cost.
    pub fn count(&self) -> usize {
        self.iter().map(|(_, tokens)| tokens.len()).sum()
    }

    /// Whether nothing is listed.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Empties the list, and keeps its memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.several.clear();
    }
}

impl<'a> IntoIterator for &'a StepTokens {
    type Item = (RequestId, &'a [TokenId]);
    type IntoIter = StepTokensIter<'a>;

    fn into_iter(self) -> StepTokensIter<'a> {
        self.iter()
    }
}

/// See [`StepTokens::iter`].
#[derive(Clone, Debug)]
pub struct StepTokensIter<'a> {
    entries: std::slice::Iter<'a, TokenEntry>,
    several: &'a [TokenId],
}

impl<'a> Iterator for StepTokensIter<'a> {
    type Item = (RequestId, &'a [TokenId]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.entries.next()?;
        if entry.several == 0 {
            return Some((entry.id, std::slice::from_ref(&entry.token)));
        }
        let (tokens, rest) = self.several.split_at(entry.several as usize);
        self.several = rest;
        Some((entry.id, tokens))
    }
}

/// A sequence has its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstToken {
    /// Whose.
    pub id: RequestId,
    /// Prompt tokens found in the KV cache when it was first admitted (the prefix hit).
    pub cached_tokens: u32,
    /// Those of them that were not on the GPU.
    pub lower: LowerHits,
    /// When it was added.
    pub arrived: SimTime,
    /// When it left the waiting queue for the first time.
    pub admitted: SimTime,
    /// When the pass that computed the token began; it ended at [`PassOutput::end`].
    pub first_pass_start: SimTime,
}

/// Prompt tokens found below the GPU, at first admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LowerHits {
    /// In host memory.
    pub host_tokens: u32,
    /// On the disk below it.
    pub disk_tokens: u32,
    /// At another engine.
    pub peer_tokens: u32,
}

/// A sequence has ended. It is no longer known to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Whose.
    pub id: RequestId,
    /// Why. Never `Abort`: who aborts knows.
    pub reason: FinishReason,
    /// Tokens that it took.
    pub usage: Usage,
}

/// Tokens of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that were found in the KV cache at first admission.
    pub cached_tokens: u32,
    /// Tokens generated, the end-of-sequence token included.
    pub output_tokens: u32,
    /// Times that it was preempted (and computed again).
    pub preemptions: u32,
}

/// An engine's state in numbers; counters run since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences in the running queue.
    pub running: u32,
    /// Sequences in the waiting queue, preempted ones included.
    pub waiting: u32,
    /// Blocks held by sequences.
    pub used_blocks: u32,
    /// Blocks that can be allocated; those that cache something are evicted for it.
    pub free_blocks: u32,
    /// All blocks.
    pub total_blocks: u32,
    /// Distinct blocks that can be hit.
    pub cached_blocks: u32,
    /// Prompt tokens looked up at first admissions (counter).
    pub prefix_query_tokens: u64,
    /// Those of them that were found (counter).
    pub prefix_hit_tokens: u64,
    /// Prompt tokens behind those, which were looked up in host memory; 0 without such a tier (counter).
    pub host_query_tokens: u64,
    /// Those of them that were found (counter).
    pub host_hit_tokens: u64,
    /// Those that were found on the disk below it instead (counter).
    pub disk_hit_tokens: u64,
    /// Those that another engine had, and that came from it (counter).
    pub peer_hit_tokens: u64,
    /// Preemptions (counter).
    pub preemptions: u64,
    /// Drafts that were verified: one per sequence and pass with drafted tokens (counter).
    pub drafts: u64,
    /// Tokens of those drafts (counter).
    pub draft_tokens: u64,
    /// Those of them that were accepted (counter).
    pub accepted_tokens: u64,
    /// Passes begun (counter).
    pub passes: u64,
    /// Those of them whose length the model of step times had to extrapolate (counter).
    pub extrapolated_passes: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Any mixture of one and several tokens comes out as it went in, also from a list that was
        /// used before.
        #[test]
        fn step_tokens_keep_order_and_count(
            steps in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<TokenId>(), 0..5), 0..8), 1..4),
        ) {
            let mut listed = StepTokens::default();
            for step in &steps {
                listed.clear();
                let mut expected = Vec::new();
                for (id, tokens) in (0..).map(RequestId).zip(step) {
                    listed.push_all(id, tokens);
                    if !tokens.is_empty() {
                        expected.push((id, tokens.as_slice()));
                    }
                }
                prop_assert_eq!(listed.iter().collect::<Vec<_>>(), &expected[..]);
                prop_assert_eq!(listed.sequences(), expected.len());
                prop_assert_eq!(listed.count(), step.iter().map(Vec::len).sum::<usize>());
                prop_assert_eq!(listed.is_empty(), expected.is_empty());
            }
        }
    }
}
