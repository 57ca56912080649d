//! Hashes of prompts that begin like earlier ones.

use std::collections::HashMap;
use std::sync::Arc;

use slipstream_base::mix::mix64;
use slipstream_base::request::PromptError;
use slipstream_base::{BlockHash, Prompt};

use crate::prompt::{Begun, BlockEnd, Content, Role, Segment, answer_name, hash_segments};
use crate::request::Request;

/// Blocks that are kept at most, 8 bytes each; beyond, all are forgotten.
const BLOCKS_MAX: usize = 1 << 20;

/// Makes [blocks](crate::prompt::PromptSource::to_blocks) of prompts, the same ones, and keeps beginnings that other
/// prompts will have: a shared prefix, and a turn that another one follows. Only what comes behind them is hashed.
#[derive(Debug, Default)]
pub struct PromptHasher {
    /// By the digest of their segments.
    kept: HashMap<u64, Kept>,
    /// Blocks in them.
    blocks: usize,
}

/// Hashes of the first segments of a prompt.
#[derive(Debug)]
struct Kept {
    blocks: Arc<[BlockHash]>,
    end: BlockEnd,
}

impl PromptHasher {
    /// The prompt of `request` in blocks of `block_size`, chained from `root`.
    ///
    /// # Errors
    /// [`PromptError`] if it is empty or `block_size` is 0.
    pub fn prompt(
        &mut self,
        request: &Request,
        block_size: u32,
        root: BlockHash,
    ) -> Result<Prompt, PromptError> {
        if block_size == 0 {
            return Err(PromptError::BlockSize);
        }
        let (source, id) = (&request.prompt, answer_name(request.id()));
        let segments = source.segments();
        let first = if request.turn > 0 {
            // Behind the turn before are its answer and the user's text.
            segments.len().saturating_sub(2)
        } else {
            let shared = |segment: &&Segment| segment.role == Role::System;
            segments.iter().take_while(shared).count()
        };
        if first == 0 && !request.has_next() {
            return source.to_blocks(block_size, root, id);
        }
        let before = digest(root, block_size, &segments[..first]);
        let kept = if request.turn > 0 {
            self.take(before)
        } else {
            self.prefix(before, &segments[..first], block_size, root)
        };
        let begun = match &kept {
            Some(Kept { blocks, end }) => Begun {
                segments: first,
                root,
                blocks,
                end: *end,
            },
            None => Begun::at(root),
        };
        let (prompt, end) = source.hash(&begun, block_size, id)?;
        if request.has_next() {
            let blocks = prompt.shared_blocks();
            self.keep(digest(root, block_size, segments), Kept { blocks, end });
        }
        Ok(prompt)
    }

    /// A prefix that prompts share; none if it is empty.
    fn prefix(
        &mut self,
        digest: u64,
        segments: &[Segment],
        block_size: u32,
        root: BlockHash,
    ) -> Option<Kept> {
        if segments.is_empty() {
            return None;
        }
        if !self.kept.contains_key(&digest) {
            let mut blocks = Vec::new();
            let begin = Begun::at(root).end;
            let end = hash_segments(segments, root, begin, block_size, &mut blocks);
            let blocks = blocks.into();
            self.keep(digest, Kept { blocks, end });
        }
        let kept = self.kept.get(&digest)?;
        Some(Kept {
            blocks: kept.blocks.clone(),
            end: kept.end,
        })
    }

    fn take(&mut self, digest: u64) -> Option<Kept> {
        let kept = self.kept.remove(&digest)?;
        self.blocks -= kept.blocks.len();
        Some(kept)
    }

    fn keep(&mut self, digest: u64, kept: Kept) {
        if self.blocks > BLOCKS_MAX {
            self.kept.clear();
            self.blocks = 0;
        }
        self.blocks += kept.blocks.len();
        let before = self.kept.insert(digest, kept);
        self.blocks -= before.map_or(0, |kept| kept.blocks.len());
    }
}

/// A number that stands for `segments` in blocks of `block_size`, chained from `root`.
fn digest(root: BlockHash, block_size: u32, segments: &[Segment]) -> u64 {
    let mut digest = mix64(root.0 ^ u64::from(block_size));
    for segment in segments {
        let is_answer = matches!(segment.content, Content::Answer(_));
        digest = mix64(digest ^ segment.name());
        digest = mix64(digest ^ (u64::from(segment.tokens) << 1 | u64::from(is_answer)));
    }
    digest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_base::{RequestId, SimTime};

    use super::*;
    use crate::prompt::PromptSource;
    use crate::request::Images;

    fn segment(content: Content, tokens: u32, role: Role) -> Segment {
        Segment {
            content,
            tokens,
            role,
        }
    }

    proptest! {
        /// Sessions that share prefixes, turn by turn, in any order between them.
        #[test]
        fn prompts_are_hashed_as_by_themselves(
            sessions in prop::collection::vec(
                (0u64..3, 0u64..3, prop::collection::vec((0u32..40, 1u32..40), 1..5)),
                1..8,
            ),
            order in prop::collection::vec(0usize..8, 0..40),
            shared in (0u32..70, 0u32..40),
            block_size in 1u32..20,
        ) {
            let mut hasher = PromptHasher::default();
            let mut open: Vec<(u32, Vec<Segment>)> = vec![(0, Vec::new()); sessions.len()];
            for session in order {
                let Some((a, b, turns)) = sessions.get(session) else { continue };
                let (turn, segments) = &mut open[session];
                let Some(&(user, answer)) = turns.get(*turn as usize) else { continue };
                if *turn == 0 {
                    segments.push(segment(Content::Text(*a), shared.0, Role::System));
                    segments.push(segment(Content::Text(10 + b), shared.1, Role::System));
                }
                let text = 100 + 10 * session as u64 + u64::from(*turn);
                segments.push(segment(Content::Text(text), user, Role::User));
                let request = Request {
                    session: session as u64,
                    turn: *turn,
                    turns: turns.len() as u32,
                    due: SimTime::ZERO,
                    prompt: PromptSource::new(segments.iter().copied()),
                    output_len: answer,
                    ignore_eos: true,
                    priority: 0,
                    adapter: 0,
                    class: 0,
                    images: Images::default(),
                    model: 0,
                };
                let root = BlockHash(7 + a % 2);
                let by_itself = request.prompt.to_blocks(block_size, root, answer_name(request.id()));
                prop_assert_eq!(hasher.prompt(&request, block_size, root), by_itself);
                let id = RequestId(request.id().0);
                segments.push(segment(Content::Answer(id), answer, Role::Assistant));
                *turn += 1;
            }
            let kept: usize = hasher.kept.values().map(|kept| kept.blocks.len()).sum();
            prop_assert_eq!(hasher.blocks, kept);
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut hasher = PromptHasher::default();
        for session in 0..11 {
            let own = segment(Content::Text(session), 1 << 17, Role::User);
            let request = Request {
                session,
                turn: 0,
                turns: 2,
                due: SimTime::ZERO,
                prompt: PromptSource::new([own]),
                output_len: 1,
                ignore_eos: true,
                priority: 0,
                adapter: 0,
                class: 0,
                images: Images::default(),
                model: 0,
            };
            hasher.prompt(&request, 1, BlockHash(0)).unwrap();
            assert!(hasher.blocks <= BLOCKS_MAX + (1 << 17));
        }
    }
}
