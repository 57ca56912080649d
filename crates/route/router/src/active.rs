//! Load of live sequences: requests, tokens to prefill, and distinct blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, Prompt, Tail};

use crate::fleet::Fleet;

/// The charge of a sequence that was routed and has not ended. Dropping it takes back the whole
/// charge, however the request ended.
#[must_use = "dropping it ends the sequence's charge"]
pub struct ActiveSequence {
    fleet: Arc<Fleet>,
    target: u32,
    /// Full blocks of the prompt.
    chain: Arc<[BlockHash]>,
    /// 1 if the prompt ends in a partial block, which is never shared.
    private_blocks: u64,
    /// Charged until the first token; 0 after.
    prefill_tokens: u64,
    prompt_tokens: u64,
    decoding: bool,
    /// Whether the prompt's tokens are known, so that events name its blocks.
    known: bool,
}

impl ActiveSequence {
    /// Charges `prompt` to `target`, which has `hit_blocks` of it cached.
    pub(crate) fn charge(
        fleet: &Arc<Fleet>,
        target: usize,
        prompt: &Prompt,
        hit_blocks: u32,
    ) -> ActiveSequence {
        let hit_tokens = u64::from(hit_blocks) * u64::from(prompt.block_size());
        let sequence = ActiveSequence {
            fleet: Arc::clone(fleet),
            target: to_u32(target),
            chain: prompt.shared_blocks(),
            private_blocks: u64::from(!prompt.len().is_multiple_of(prompt.block_size())),
            prefill_tokens: u64::from(prompt.len()) - hit_tokens,
            prompt_tokens: u64::from(prompt.len()),
            decoding: false,
            known: matches!(prompt.tail(), Tail::Tokens(_)),
        };
        let fresh = lock(&fleet.active[target]).insert(&sequence.chain);
        let load = &fleet.loads[target];
        add(&load.requests, 1);
        add(&load.routed, 1);
        add(&load.prefill_tokens, sequence.prefill_tokens);
        add(&load.active_blocks, fresh + sequence.private_blocks);
        fleet.on_load(target);
        sequence
    }

    /// The first token arrived: the prompt is computed. Further calls do nothing.
    pub fn on_first_token(&mut self) {
        if !self.decoding {
            self.decoding = true;
            self.discharge_prefill();
            add(
                &self.fleet.loads[self.target as usize].decode_tokens,
                self.prompt_tokens,
            );
            self.fleet.on_load(self.target as usize);
        }
    }

    /// The target has the prompt's blocks now: its KV events are checked against that
    /// ([`Fleet::testimony`]).
    pub fn on_computed(&self) {
        if self.known {
            self.fleet.on_answered(self.target as usize, &self.chain);
        }
    }

    /// Prompt tokens that are still charged as prefill.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// Full blocks of the prompt.
    pub fn prompt_blocks(&self) -> u64 {
        self.chain.len() as u64
    }

    /// Leading blocks of the prompt that the target was expected to reuse. Meaningful until the first token.
    pub fn hit_blocks(&self) -> u64 {
        let hit_tokens = self.prompt_tokens - self.prefill_tokens;
        hit_tokens / u64::from(self.fleet.block_size())
    }

    fn discharge_prefill(&mut self) {
        let load = &self.fleet.loads[self.target as usize];
        let tokens = std::mem::take(&mut self.prefill_tokens);
        sub(&load.prefill_tokens, tokens);
        add(&load.prefill_tokens_done, tokens);
    }
}

impl Drop for ActiveSequence {
    fn drop(&mut self) {
        if self.decoding {
            let load = &self.fleet.loads[self.target as usize];
            sub(&load.decode_tokens, self.prompt_tokens);
        } else {
            self.discharge_prefill();
        }
        let freed = self.private_blocks
            + lock(&self.fleet.active[self.target as usize]).remove(&self.chain);
        let load = &self.fleet.loads[self.target as usize];
        if slipstream_base::planted!("leaked-load") && !self.decoding {
            return;
        }
        sub(&load.requests, 1);
        sub(&load.active_blocks, freed);
        add(&load.blocks_freed, freed);
        self.fleet.on_load(self.target as usize);
    }
}

// Relaxed: a load is a hint to other threads. The thread that owns the sequence takes each charge
// back, so the sums are right in any order.
fn add(cell: &AtomicU64, n: u64) {
    cell.fetch_add(n, Ordering::Relaxed);
}

fn sub(cell: &AtomicU64, n: u64) {
    cell.fetch_sub(n, Ordering::Relaxed);
}

/// The distinct blocks of the live prompts of one target.
///
/// Hashes are chained, so two prompts that share a block share all before it: live prompts form a
/// tree. It is kept as *runs*, stretches of blocks that the same sequences pass through, found by
/// the hash of their first block. A prompt then costs one map access for each run on its path and a
/// binary search where it leaves a run, instead of one access per block.
#[derive(Debug, Default)]
pub(crate) struct ActiveBlocks {
    runs: HashMap<BlockHash, Run>,
    /// Live sequences.
    sequences: u64,
    /// Distinct blocks over all runs.
    blocks: u64,
}

/// Blocks `start..end` of `chain`.
#[derive(Debug)]
struct Run {
    chain: Arc<[BlockHash]>,
    start: u32,
    end: u32,
    /// Live sequences that pass through; never 0.
    sequences: u32,
}

impl ActiveBlocks {
    /// Adds a sequence with these blocks. Returns how many of them no live sequence had.
    pub(crate) fn insert(&mut self, chain: &Arc<[BlockHash]>) -> u64 {
        self.sequences += 1;
        let fresh = self.enter_runs(chain);
        self.blocks += fresh;
        fresh
    }

    fn enter_runs(&mut self, chain: &Arc<[BlockHash]>) -> u64 {
        let mut at = 0;
        while at < chain.len() {
            let Some(run) = self.runs.get_mut(&chain[at]) else {
                let fresh = Run {
                    chain: Arc::clone(chain),
                    start: to_u32(at),
                    end: to_u32(chain.len()),
                    sequences: 1,
                };
                self.runs.insert(chain[at], fresh);
                return (chain.len() - at) as u64;
            };
            let shared = run.shared_with(&chain[at..]);
            let rest = run.split_off(shared);
            run.sequences += 1;
            if let Some(rest) = rest {
                self.runs.insert(rest.blocks()[0], rest);
            }
            at += shared;
        }
        0
    }

    /// Removes a sequence that was added with these blocks. Returns how many of them no live
    /// sequence has any more.
    pub(crate) fn remove(&mut self, chain: &[BlockHash]) -> u64 {
        self.sequences -= 1;
        let mut freed = self.leave_runs(chain);
        if self.sequences == 0 {
            // No sequence is left, so no block is, even after hash collisions.
            self.runs.clear();
            freed = self.blocks;
        }
        self.blocks -= freed;
        freed
    }

    fn leave_runs(&mut self, chain: &[BlockHash]) -> u64 {
        let mut at = 0;
        let mut freed = 0;
        while at < chain.len() {
            // A run of a live sequence is in the map, unless the hashes of two prompts collide,
            // which a client can provoke. The count is then wrong until the target has been idle.
            let Some(run) = self.runs.get_mut(&chain[at]) else {
                break;
            };
            let len = run.blocks().len();
            run.sequences -= 1;
            if run.sequences == 0 {
                self.runs.remove(&chain[at]);
                freed += len as u64;
            }
            at += len;
        }
        freed
    }
}

impl Run {
    fn blocks(&self) -> &[BlockHash] {
        &self.chain[self.start as usize..self.end as usize]
    }

    /// How many leading blocks of `path` are this run's; at least 1, as the first was found by its
    /// hash.
    fn shared_with(&self, path: &[BlockHash]) -> usize {
        let both = self.blocks().len().min(path.len());
        let ours = &self.blocks()[..both];
        if ours[both - 1] == path[both - 1] {
            return both;
        }
        let (mut equal, mut differ) = (1, both);
        while differ - equal > 0 {
            let middle = equal + (differ - equal) / 2;
            if ours[middle] == path[middle] {
                equal = middle + 1;
            } else {
                differ = middle;
            }
        }
        equal
    }

    /// Keeps the first `at` blocks; the rest, if any, as a run of its own.
    fn split_off(&mut self, at: usize) -> Option<Run> {
        let middle = self.start + to_u32(at);
        (middle < self.end).then(|| Run {
            chain: Arc::clone(&self.chain),
            start: middle,
            end: std::mem::replace(&mut self.end, middle),
            sequences: self.sequences,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_base::mix::draw;

    use super::*;

    /// A chain that follows `path`: element `(length, branch)` adds `length` blocks of a branch.
    fn chain(path: &[(u8, u8)]) -> Arc<[BlockHash]> {
        let mut parent = 0;
        path.iter()
            .flat_map(|&(length, branch)| (0..length).map(move |_| branch))
            .map(|branch| {
                parent = draw(parent, branch.into());
                BlockHash(parent)
            })
            .collect()
    }

    /// The blocks of `live`, each counted once.
    fn distinct(live: &[Arc<[BlockHash]>]) -> u64 {
        let blocks: std::collections::BTreeSet<_> =
            live.iter().flat_map(|chain| chain.iter()).collect();
        blocks.len() as u64
    }

    #[test]
    fn blocks_in_common_count_once() {
        let mut active = ActiveBlocks::default();
        let long = chain(&[(100, 0)]);
        let forked = chain(&[(60, 0), (30, 1)]);
        let start = chain(&[(10, 0)]);
        assert_eq!(active.insert(&long), 100);
        assert_eq!(active.insert(&forked), 30);
        assert_eq!(active.insert(&start), 0);
        assert_eq!(active.insert(&long), 0);
        assert_eq!(active.remove(&long), 0);
        assert_eq!(active.remove(&long), 40, "the other two keep the first 60");
        assert_eq!(active.remove(&forked), 80);
        assert_eq!(active.remove(&start), 10);
        assert!(active.runs.is_empty());
    }

    #[test]
    fn an_empty_chain_weighs_nothing() {
        let mut active = ActiveBlocks::default();
        assert_eq!(active.insert(&chain(&[])), 0);
        assert_eq!(active.remove(&chain(&[])), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn counts_what_a_set_counts(
            // Few branches, so that prompts share much; ends come in any order.
            steps in prop::collection::vec(
                (prop::collection::vec((0u8..12, 0u8..2), 0..5), any::<prop::sample::Index>(), any::<bool>()),
                1..60,
            ),
        ) {
            let mut active = ActiveBlocks::default();
            let mut live: Vec<Arc<[BlockHash]>> = Vec::new();
            let mut blocks = 0;
            for (path, which, ends) in steps {
                if ends && !live.is_empty() {
                    let ended = live.swap_remove(which.index(live.len()));
                    blocks -= active.remove(&ended);
                } else {
                    live.push(chain(&path));
                    blocks += active.insert(live.last().unwrap());
                }
                prop_assert_eq!(blocks, distinct(&live));
            }
            for ended in live {
                blocks -= active.remove(&ended);
            }
            prop_assert_eq!(blocks, 0);
            prop_assert!(active.runs.is_empty());
        }

        /// Hashes that were not chained, as after a collision: counts are wrong, but only until the
        /// target is idle.
        #[test]
        fn colliding_hashes_do_no_lasting_harm(
            chains in prop::collection::vec(prop::collection::vec(0u64..6, 0..8), 1..20),
        ) {
            let mut active = ActiveBlocks::default();
            let chains: Vec<Arc<[BlockHash]>> = chains
                .into_iter()
                .map(|chain| chain.into_iter().map(BlockHash).collect())
                .collect();
            let charged: u64 = chains.iter().map(|chain| active.insert(chain)).sum();
            let freed: u64 = chains.iter().map(|chain| active.remove(chain)).sum();
            prop_assert_eq!(charged, freed);
            prop_assert!(active.runs.is_empty());
        }
    }
}
