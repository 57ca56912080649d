//! Content and natural length of answers, as pure functions of a request's seed.

use std::sync::Arc;

use slipstream_base::TokenId;
use slipstream_base::mix::{below, draw, mix64, unit};
use slipstream_base::width::{floor_u32, to_usize};
use slipstream_config::cluster::OutputLen;

use crate::error::EngineError;

/// How an engine makes up the answers of a model that it does not run.
#[derive(Clone, Debug)]
pub struct OutputModel {
    /// Tokens that answers are made of, drawn uniformly. At least one, `eos` not among them.
    /// Shared, so that a thousand engines hold one copy.
    pub vocab: Arc<[TokenId]>,
    /// Tokens that answers may begin with, if not all of `vocab` may: a chat template that trims
    /// the history would bring a first token with a space in front back as another one, and the
    /// next turn would miss the blocks of the answer. At least one, `eos` not among them.
    pub first_vocab: Option<Arc<[TokenId]>>,
    /// Ends an answer that comes to its natural end: the last token of such an answer, counted
    /// among its output tokens, as vLLM does.
    pub eos: TokenId,
    /// Natural lengths, the end-of-sequence token included.
    pub lengths: OutputLen,
}

impl OutputModel {
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        for vocab in [Some(&self.vocab), self.first_vocab.as_ref()]
            .into_iter()
            .flatten()
        {
            if vocab.is_empty() {
                return Err(EngineError::EmptyVocab);
            }
            if vocab.contains(&self.eos) {
                return Err(EngineError::EosInVocab { eos: self.eos });
            }
        }
        Ok(())
    }

    /// Output token number `position` (from 0) of a request with this `seed`, unless it is the
    /// end-of-sequence token.
    ///
    /// A pure function, so no engine stores what it generated.
    #[inline]
    pub fn token(&self, seed: u64, position: u32) -> TokenId {
        match &self.first_vocab {
            Some(first) if position == 0 => output_token(first, seed, 0),
            _ => output_token(&self.vocab, seed, position),
        }
    }
}

/// Draw number `position` of the answer of a request with this `seed` from `vocab`, which must not
/// be empty. [`OutputModel::token`] says which vocabulary is drawn from.
#[inline]
pub fn output_token(vocab: &[TokenId], seed: u64, position: u32) -> TokenId {
    vocab[to_usize(below(draw(seed, u64::from(position)), vocab.len() as u64))]
}

/// Natural length of the answer of a request with this `seed`, tokens, at least 1, the
/// end-of-sequence token included.
///
/// The log-normal has the stated mean `m` and coefficient of variation `c`:
/// `sigma^2 = ln(1 + c^2)`, `mu = ln(m) - sigma^2 / 2` (method of moments). The normal deviate is
/// Box and Muller's ("A note on the generation of random normal deviates", 1958). `libm`, so that
/// every machine draws the same length; square roots are rounded correctly on each.
pub fn natural_len(lengths: &OutputLen, seed: u64) -> u32 {
    match *lengths {
        OutputLen::Constant(tokens) => tokens.max(1),
        OutputLen::LogNormal { mean, cv } => {
            // A stream of its own: the length must not be correlated with the first tokens.
            let stream = mix64(seed ^ 0x6c65_6e67_7468_7321); // "lengths!"
            // 1 - u is in (0, 1], so the logarithm is finite.
            let radius = (-2.0 * libm::log(1.0 - unit(draw(stream, 0)))).sqrt();
            let angle = std::f64::consts::TAU * unit(draw(stream, 1));
            let normal = radius * libm::cos(angle);
            let variance = libm::log(1.0 + cv * cv);
            let mu = libm::log(mean) - variance / 2.0;
            let tokens = libm::round(libm::exp(mu + variance.sqrt() * normal));
            // NaN and negative numbers go to 0 here, hence the lower bound.
            floor_u32(tokens).max(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_stated_mean_and_spread() {
        let lengths = OutputLen::LogNormal {
            mean: 256.0,
            cv: 0.7,
        };
        let n = 20_000;
        let drawn: Vec<f64> = (0..n)
            .map(|s| f64::from(natural_len(&lengths, s)))
            .collect();
        let mean = drawn.iter().sum::<f64>() / n as f64;
        let variance = drawn.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n as f64;
        // Standard error of the mean is 256 * 0.7 / sqrt(20,000) = 1.3; four of them.
        assert!((mean - 256.0).abs() < 5.1, "mean {mean}");
        // The cv of a sample of a log-normal spreads more (its fourth moment is large).
        let cv = variance.sqrt() / mean;
        assert!((cv - 0.7).abs() < 0.05, "cv {cv}");
    }

    #[test]
    fn lengths_are_the_same_on_every_machine() {
        let lengths = OutputLen::default();
        let drawn: Vec<u32> = (0..6).map(|seed| natural_len(&lengths, seed)).collect();
        // Worked out apart from this code, with another language's ln, exp and cos.
        assert_eq!(drawn, [110, 244, 325, 245, 171, 273]);
    }

    #[test]
    fn odd_lengths_are_at_least_one_token() {
        assert_eq!(natural_len(&OutputLen::Constant(0), 1), 1);
        let nan = OutputLen::LogNormal {
            mean: -1.0,
            cv: 0.5,
        };
        assert_eq!(natural_len(&nan, 1), 1);
    }

    #[test]
    fn tokens_are_drawn_from_the_whole_vocabulary() {
        let vocab = [10, 20, 30, 40];
        let drawn: Vec<TokenId> = (0..64).map(|p| output_token(&vocab, 5, p)).collect();
        assert!(vocab.iter().all(|t| drawn.contains(t)));
        assert_eq!(drawn[17], output_token(&vocab, 5, 17));
    }

    #[test]
    fn the_first_token_has_a_vocabulary_of_its_own() {
        let model = OutputModel {
            vocab: (0..100).collect(),
            first_vocab: Some((200..300).collect()),
            eos: 7_000,
            lengths: OutputLen::default(),
        };
        for seed in 0..64 {
            assert!(model.token(seed, 0) >= 200);
            assert!((1..64).all(|p| model.token(seed, p) < 100));
        }
        let stray = OutputModel {
            eos: 250,
            ..model.clone()
        };
        assert_eq!(stray.check(), Err(EngineError::EosInVocab { eos: 250 }));
        let none = OutputModel {
            first_vocab: Some([].into()),
            ..model
        };
        assert_eq!(none.check(), Err(EngineError::EmptyVocab));
    }
}
