//! The longest hit that every attention group of a model can serve.
//!
//! Layers with one kind of attention form a *group*, whose blocks are cached under their own keys.
//! After a hit of `n` tokens a group reads the blocks that its attention still reaches: all of them
//! ([`Reach::All`]), those of a window that ends there, or those of a chunk that is not full. A hit
//! needs all of these blocks to be held.

/// How far back the attention of a group reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// To the first token.
    All,
    /// This many tokens, the token itself included. Source: vLLM 0.33,
    /// `SlidingWindowManager.get_num_skipped_tokens`.
    Window(usize),
    /// To the last multiple of this many tokens. Source: vLLM 0.33,
    /// `ChunkedLocalAttentionManager.get_num_skipped_tokens`.
    Chunk(usize),
}

/// Blocks of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block, at least 1.
    pub block_tokens: usize,
    /// Which blocks a hit needs.
    pub reach: Reach,
}

impl Group {
    /// The first block that is read after a hit of `tokens` tokens.
    pub fn first(&self, tokens: usize) -> usize {
        let skipped = match self.reach {
            Reach::All => 0,
            Reach::Window(window) => (tokens + 1).saturating_sub(window),
            Reach::Chunk(chunk) => tokens - tokens % chunk.max(1),
        };
        skipped / self.block_tokens
    }

    /// The blocks that a hit of `end` tokens needs beyond the `start` tokens that are already present.
    pub fn needed(&self, start: usize, end: usize) -> std::ops::Range<usize> {
        let first = self.first(end).max(start / self.block_tokens);
        first..(end / self.block_tokens).max(first)
    }
}

/// Groups of one model, and the alignment of hits.
#[derive(Clone, Debug)]
pub struct Groups {
    groups: Vec<Group>,
    tokens: usize,
}

impl Groups {
    /// Hits end at block boundaries of all groups.
    ///
    /// # Panics
    ///
    /// If there is no group, or a group has blocks of 0 tokens.
    pub fn new(groups: Vec<Group>) -> Groups {
        assert!(!groups.is_empty(), "a model has layers");
        assert!(groups.iter().all(|group| group.block_tokens > 0));
        let tokens = groups
            .iter()
            .fold(1, |all, group| lcm(all, group.block_tokens));
        Groups { groups, tokens }
    }

    /// The groups, by id.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Hits are multiples of this many tokens.
    pub fn hit_tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens of the longest hit up to `end` tokens, of which `start` tokens are already present; `start`
    /// if nothing can be added. `held` returns whether a group's block is held. It is called at most
    /// once per block, and only for blocks that some hit up to `end` needs.
    ///
    /// Groups that need every block are searched from the start until a block is missing. The others
    /// are searched from the end: first the first block of their reach, because its absence
    /// rules out the most.
    pub fn longest(
        &self,
        start: usize,
        end: usize,
        mut held: impl FnMut(usize, usize) -> bool,
    ) -> usize {
        let down = |tokens: usize| tokens - tokens % self.tokens;
        let mut end = down(end);
        for (id, group) in self.groups.iter().enumerate() {
            if group.reach == Reach::All && end > start {
                let blocks = group.needed(start, end);
                let run = blocks.clone().take_while(|&block| held(id, block)).count();
                if run < blocks.len() {
                    end = down((blocks.start + run) * group.block_tokens);
                }
            }
        }
        // Per group, blocks that are held without a break.
        let mut known = vec![0..0; self.groups.len()];
        let mut agreed = false;
        while !agreed && end > start {
            agreed = true;
            for (id, group) in self.groups.iter().enumerate() {
                while group.reach != Reach::All && end > start {
                    let blocks = group.needed(start, end);
                    let seen = &mut known[id];
                    let until = if seen.start < seen.end.min(blocks.end) {
                        seen.start
                    } else {
                        blocks.end
                    };
                    let mut looked = blocks.start..until;
                    let Some(missing) = looked.find(|&block| !held(id, block)) else {
                        *seen = blocks.start.min(until)..blocks.end;
                        break;
                    };
                    *seen = blocks.start..missing;
                    end = down(missing * group.block_tokens);
                    agreed = false;
                }
            }
        }
        end.max(start)
    }
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn group(block_tokens: usize, reach: Reach) -> Group {
        Group {
            block_tokens,
            reach,
        }
    }

    #[test]
    fn what_a_hit_needs_is_what_attention_still_reads() {
        // The examples of vLLM's docstrings: a window of 4 after 7 tokens skips 4; chunks of 8
        // skip 8 after 13 and after 8, and none after 7.
        let cases = [
            (Reach::Window(4), 7, 4),
            (Reach::Window(4), 3, 0),
            (Reach::Chunk(8), 13, 8),
            (Reach::Chunk(8), 8, 8),
            (Reach::Chunk(8), 7, 0),
            (Reach::All, 1_000, 0),
        ];
        for (reach, tokens, skipped) in cases {
            assert_eq!(group(1, reach).first(tokens), skipped, "{reach:?}");
        }
        let window = group(16, Reach::Window(32));
        assert_eq!(window.needed(0, 160), 8..10);
        assert_eq!(window.needed(144, 160), 9..10);
        assert_eq!(group(16, Reach::Chunk(64)).needed(0, 128), 8..8);
    }

    #[test]
    fn windows_of_which_nothing_is_held_are_skipped_in_strides() {
        let groups = Groups::new(vec![group(16, Reach::All), group(16, Reach::Window(1024))]);
        let mut asked = 0;
        let hit = groups.longest(0, 16 * 4_096, |group, _| {
            asked += usize::from(group == 1);
            group == 0
        });
        assert_eq!((hit, asked), (0, 64));
    }

    /// The expected result, by trying all hits.
    fn slowly(groups: &Groups, start: usize, end: usize, held: &HashSet<(usize, usize)>) -> usize {
        let all_held = |tokens: usize| {
            groups.groups().iter().enumerate().all(|(id, group)| {
                group
                    .needed(start, tokens)
                    .all(|block| held.contains(&(id, block)))
            })
        };
        (start + 1..=end)
            .rev()
            .find(|&tokens| tokens % groups.hit_tokens() == 0 && all_held(tokens))
            .unwrap_or(start)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 512 }))]
        #[test]
        fn the_longest_hit_is_found_and_no_block_is_looked_at_twice(
            shapes in prop::collection::vec((1usize..4, 0usize..3, 1usize..20), 1..5),
            start in 0usize..8,
            end in 0usize..60,
            holes in prop::collection::hash_set((0usize..5, 0usize..60), 0..24),
        ) {
            let groups = Groups::new(shapes.iter().map(|&(block, kind, reach)| group(block, match kind {
                0 => Reach::All,
                1 => Reach::Window(reach),
                _ => Reach::Chunk(reach),
            })).collect());
            let start = start * groups.hit_tokens();
            let held: HashSet<(usize, usize)> = (0..shapes.len())
                .flat_map(|id| (0..60).map(move |block| (id, block)))
                .filter(|place| !holes.contains(place))
                .collect();
            let mut asked = HashSet::new();
            let hit = groups.longest(start, end, |id, block| {
                assert!(asked.insert((id, block)), "group {id}, block {block} twice");
                held.contains(&(id, block))
            });
            prop_assert_eq!(hit, slowly(&groups, start, end, &held));
        }
    }
}
