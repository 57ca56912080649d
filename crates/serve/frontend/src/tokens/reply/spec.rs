//! What a request asks of its answer: fields that all events share, and how each sequence becomes text.

use std::rc::Rc;

use slipstream_base::{RankId, TokenId};
use slipstream_recorder::RecordedRequest;

use crate::openai::{CompletionApi, Head};
use crate::text::StopMatcher;
use crate::tokens::script::SharedScript;
use crate::tokens::vocab::AnswerVocab;

/// Fields that the events of a reply repeat. Constant but for `prompt_tokens`, which grows with the turns of a duplex
/// request.
pub(crate) struct Shape {
    pub(crate) kind: CompletionApi,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Rc<str>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// Every event carries the counts of its choice so far.
    pub(crate) running_usage: bool,
    /// Tokens of all prompts, each counted once.
    pub(crate) prompt_tokens: u64,
    /// Sequences per prompt.
    pub(crate) choices_per_prompt: u32,
}

impl Shape {
    pub(crate) fn head(&self) -> Head<'_> {
        Head {
            kind: self.kind,
            id: &self.id,
            created: self.created,
            model: &self.model,
            include_usage: self.include_usage,
        }
    }
}

/// How one sequence's tokens become text.
pub(crate) struct SequenceSpec {
    pub(crate) target: RankId,
    /// Tokens of its prompt.
    pub(crate) prompt_tokens: u32,
    /// Tokens that were asked for at most.
    pub(crate) max_tokens: u32,
    pub(crate) seed: u64,
    /// Number of alternatives per token; `None`: no log probabilities.
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) stop: Option<StopMatcher>,
    /// The stop strings that the matcher counts.
    pub(crate) stops: Rc<[String]>,
    /// The sequence runs to `max_tokens`.
    pub(crate) ignores_eos: bool,
    /// Before this many tokens no stop string ends the sequence.
    pub(crate) min_tokens: u32,
    /// Nothing is before the next token's text in its event ([`shows_each_token`](Self::shows_each_token)).
    pub(crate) plain: bool,
    /// Completions with `echo`: the prompt's text, which the first token's event begins with.
    pub(crate) echo: Option<Rc<str>>,
    /// The echo has log probabilities.
    pub(crate) scores_echo: bool,
    /// The answer shows the echo only: its one token is counted, and not shown.
    pub(crate) echo_only: bool,
    pub(crate) stop_token_ids: Rc<[TokenId]>,
    /// Ids of the prompt's tokens, if the answer has them and those of its own.
    pub(crate) prompt_ids: Option<Rc<[TokenId]>>,
    /// Ids of the prompt's tokens, if the answer has their log probabilities: by `prompt_logprobs`, or as an
    /// echo's.
    pub(crate) scored_prompt: Option<Rc<[TokenId]>>,
    /// Number of alternatives per token of `prompt_logprobs`; `None`: there are none.
    pub(crate) prompt_tops: Option<u32>,
    /// Tokens of the answer, if they are limited: the engine's are replaced by these.
    pub(crate) vocab: Option<Rc<AnswerVocab>>,
    /// The answer, if it is decided already: its tokens are shown in place of the engine's.
    pub(crate) script: SharedScript,
    /// Its line in the record as far as it is known at the start, if there is a record.
    pub(crate) recorded: Option<Box<RecordedRequest>>,
}

impl SequenceSpec {
    /// Whether an event needs nothing but its token's text, once an echo is shown.
    pub(crate) fn shows_each_token(&self) -> bool {
        self.stops.is_empty()
            && self.top_logprobs.is_none()
            && self.prompt_ids.is_none()
            && self.vocab.is_none()
            && self.script.is_none()
    }
}
