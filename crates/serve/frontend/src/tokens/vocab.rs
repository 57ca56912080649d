//! Answers made of some of the model's tokens only.
//!
//! Modelled engines have no logits, so of `logit_bias` its ends are modelled: a bias of -100 excludes a token, and one of
//! 100 excludes all others. The engine draws its tokens as always, and those that the answer may not have are replaced
//! here, so its number of tokens and their times stay.

use std::sync::Arc;

use slipstream_base::{TokenId, mix};

use crate::openai::VocabLimits;
use crate::text::TextModel;

/// The tokens of an answer.
pub(crate) struct AnswerVocab {
    /// All that it may have, sorted; `None`: those of every answer.
    only: Option<Vec<TokenId>>,
    /// Those that it may not have, sorted.
    banned: Vec<TokenId>,
    /// Those of every answer.
    output: Arc<[TokenId]>,
    eos: TokenId,
    may_end: bool,
}

impl AnswerVocab {
    /// The tokens that `limits` leave of `text`'s.
    pub(crate) fn new(limits: &VocabLimits, text: &TextModel) -> AnswerVocab {
        let banned = limits.banned.clone();
        let lists =
            [&limits.allowed, &limits.forced].map(|list| (!list.is_empty()).then_some(list));
        let mut only = match lists {
            [None, None] => None,
            [Some(list), None] | [None, Some(list)] => Some(list.clone()),
            [Some(allowed), Some(forced)] => {
                let is_allowed = |token: &TokenId| allowed.binary_search(token).is_ok();
                let both: Vec<TokenId> = forced.iter().copied().filter(is_allowed).collect();
                // A bias cannot bring back a token that is not allowed.
                Some(if both.is_empty() {
                    allowed.clone()
                } else {
                    both
                })
            }
        };
        let eos = text.eos();
        let in_only = only.as_ref().is_none_or(|only| only.contains(&eos));
        let may_end = in_only && banned.binary_search(&eos).is_err();
        if let Some(only) = &mut only {
            only.retain(|token| *token != eos && banned.binary_search(token).is_err());
            only.dedup();
        }
        AnswerVocab {
            only,
            banned,
            output: text.output_vocab(),
            eos,
            may_end,
        }
    }

    /// Whether the answer may end by itself: it may have the end-of-sequence token.
    pub(crate) fn may_end(&self) -> bool {
        self.may_end
    }

    /// Whether no token is left for an answer.
    pub(crate) fn is_empty(&self) -> bool {
        match &self.only {
            Some(only) => only.is_empty(),
            None => !self.output.iter().any(|token| self.admits(*token)),
        }
    }

    fn admits(&self, token: TokenId) -> bool {
        match &self.only {
            Some(only) => only.binary_search(&token).is_ok(),
            None => self.banned.binary_search(&token).is_err(),
        }
    }

    /// `token` if the answer may have it, else one that follows from `seed` and `position`. The end-of-sequence token
    /// stays: it comes where the answer ends.
    pub(crate) fn token(&self, token: TokenId, seed: u64, position: u64) -> TokenId {
        const STREAM: u64 = 0x0000_766f_6361_6273; // "vocabs"
        if token == self.eos || self.admits(token) {
            return token;
        }
        let from: &[TokenId] = self.only.as_deref().unwrap_or(&self.output);
        let start = mix::index(mix::draw(seed ^ STREAM, position), from.len());
        let (head, tail) = from.split_at(start.min(from.len()));
        let mut all = tail.iter().chain(head);
        all.find(|token| self.admits(**token))
            .copied()
            .unwrap_or(token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::tests::builtin;

    proptest! {
        #[test]
        fn replaced_tokens_are_admitted(
            banned in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
            forced in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            allowed in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
            drawn in any::<prop::sample::Index>(),
            seed in any::<u64>(),
        ) {
            let text = builtin();
            let output = text.output_vocab();
            let tokens = |picks: Vec<prop::sample::Index>| {
                let mut tokens: Vec<TokenId> = picks.iter().map(|pick| *pick.get(&output)).collect();
                tokens.sort_unstable();
                tokens
            };
            let limits = VocabLimits {
                banned: tokens(banned),
                forced: tokens(forced),
                allowed: tokens(allowed),
            };
            let vocab = AnswerVocab::new(&limits, text);
            prop_assume!(!vocab.is_empty());
            let drawn = *drawn.get(&output);
            let shown = vocab.token(drawn, seed, 3);
            prop_assert!(!limits.banned.contains(&shown));
            prop_assert!(limits.allowed.is_empty() || limits.allowed.contains(&shown));
            if limits.allowed.is_empty() && !limits.forced.is_empty() {
                prop_assert!(limits.forced.contains(&shown));
            }
            prop_assert_eq!(vocab.token(drawn, seed, 3), shown);
            prop_assert_eq!(vocab.token(shown, seed, 4), shown, "admitted tokens stay");
        }
    }

    #[test]
    fn an_answer_that_may_not_end_does_not_end() {
        let text = builtin();
        let eos = vec![text.eos()];
        let word = vec![text.output_vocab()[9]];
        let limits = |banned: &[TokenId], forced: &[TokenId], allowed: &[TokenId]| VocabLimits {
            banned: banned.into(),
            forced: forced.into(),
            allowed: allowed.into(),
        };
        for (limits, may_end, is_empty) in [
            (limits(&eos, &[], &[]), false, false),
            (limits(&word, &[], &[]), true, false),
            (limits(&[], &word, &[]), false, false),
            (limits(&word, &word, &[]), false, true),
            (limits(&[], &[], &eos), true, true),
        ] {
            let vocab = AnswerVocab::new(&limits, text);
            assert_eq!(
                (vocab.may_end(), vocab.is_empty()),
                (may_end, is_empty),
                "{limits:?}"
            );
        }
    }
}
