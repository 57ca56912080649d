//! Log probabilities: modelled, since a modelled engine has no logits.
//!
//! The token that was generated is always the most likely one, with a probability drawn uniformly
//! from [1/2, 1); alternative *r* (from 2) gets `(1 − p₁)/2^(r−1)`, so that all stay below 1 in sum.
//! Both the draws and the alternatives follow from (seed, position) alone: the same request with the
//! same seed has the same log probabilities. They say nothing about any real model; they have the
//! shape, the order and the size that clients parse.

use slipstream_base::TokenId;
use slipstream_base::mix;

use super::CompletionApi;
use crate::json::{self, Out};
use crate::text::TextModel;

/// A token, and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its text; bytes that are no UTF-8 are replaced by U+FFFD.
    pub text: String,
    /// Its bytes.
    pub bytes: Box<[u8]>,
    /// Its id.
    pub id: TokenId,
    /// Natural logarithm of its probability; `None` for the first token of a prompt.
    pub logprob: Option<f64>,
    /// The likeliest tokens at this place, best first. Shape `[top]`, as asked for.
    pub top: Vec<TokenLogprob>,
}

impl TokenLogprob {
    /// The modelled log probability of `token`, generated at `position` of the choice with `seed`,
    /// with the `top` likeliest tokens (itself the first of them).
    pub fn modelled(
        model: &TextModel,
        seed: u64,
        position: u64,
        token: TokenId,
        top: u32,
    ) -> TokenLogprob {
        // A stream of draws of its own, so that the answer's tokens and these are independent.
        const STREAM: u64 = 0x6c6f_6770_726f_6273; // "logprobs"
        let seed = mix::draw(seed ^ STREAM, position);
        let p_first = 0.5 + 0.5 * mix::unit(mix::draw(seed, 0));
        let mut chosen = TokenLogprob::new(model, token, libm::log(p_first));
        if top == 0 {
            return chosen;
        }
        let mut tokens = vec![token];
        chosen.top.push(chosen.clone());
        let vocab = model.output_vocab();
        let mut p = 1.0 - p_first;
        let mut start = mix::index(mix::draw(seed, 1), vocab.len());
        while chosen.top.len() < top as usize && tokens.len() < vocab.len() {
            // Neighbors in the vocabulary from a drawn start: distinct without a search.
            let other = vocab[start % vocab.len()];
            start += 1;
            if tokens.contains(&other) {
                continue;
            }
            tokens.push(other);
            p /= 2.0;
            chosen
                .top
                .push(TokenLogprob::new(model, other, libm::log(p)));
        }
        chosen
    }

    /// The modelled log probability of a token of a prompt, at `position` from its begin. It follows from the two.
    pub fn of_prompt(model: &TextModel, position: u64, token: TokenId, top: u32) -> TokenLogprob {
        const STREAM: u64 = 0x0070_726f_6d70_7473; // "prompts"
        if position == 0 {
            return TokenLogprob {
                logprob: None,
                ..TokenLogprob::new(model, token, 0.0)
            };
        }
        let seed = STREAM ^ u64::from(token);
        TokenLogprob::modelled(model, seed, position, token, top)
    }

    fn new(model: &TextModel, token: TokenId, logprob: f64) -> TokenLogprob {
        let bytes = model.token_bytes(token);
        let logprob = Some(logprob);
        TokenLogprob {
            id: token,
            text: String::from_utf8_lossy(bytes).into_owned(),
            bytes: bytes.into(),
            logprob,
            top: Vec::new(),
        }
    }

    /// Characters of its text.
    pub(super) fn chars(&self) -> u64 {
        self.text.chars().count() as u64
    }

    /// Appends an entry of a chat's `content`.
    pub(super) fn render_in_chat(&self, out: &mut impl Out) {
        out.put(b"{");
        self.render_fields(out);
        out.put(b",\"top_logprobs\":[");
        separated(out, &self.top, |out, other| {
            out.put(b"{");
            other.render_fields(out);
            out.put(b"}");
        });
        out.put(b"]}");
    }

    /// Appends an entry of `prompt_logprobs`: by token id, as vLLM has it.
    pub(super) fn render_in_prompt(&self, out: &mut impl Out) {
        if self.logprob.is_none() {
            return out.put(b"null");
        }
        let only = std::slice::from_ref(self);
        let shown = if self.top.is_empty() { only } else { &self.top };
        out.put(b"{");
        let mut rank = 0;
        separated(out, shown, |out, token| {
            rank += 1;
            out.put(b"\"");
            json::integer(out, u64::from(token.id));
            out.put(b"\":{\"logprob\":");
            token.put_logprob(out);
            out.put(b",\"rank\":");
            json::integer(out, rank);
            out.put(b",\"decoded_token\":");
            json::string(out, &token.text);
            out.put(b"}");
        });
        out.put(b"}");
    }

    /// Appends the log probability.
    pub(super) fn put_logprob(&self, out: &mut impl Out) {
        match self.logprob {
            Some(logprob) => json::float(out, logprob),
            None => out.put(b"null"),
        }
    }

    /// Appends an entry of a completion's `top_logprobs`.
    pub(super) fn render_tops(&self, out: &mut impl Out) {
        if self.logprob.is_none() {
            return out.put(b"null");
        }
        out.put(b"{");
        separated(out, &self.top, |out, other| {
            json::string(out, &other.text);
            out.put(b":");
            other.put_logprob(out);
        });
        out.put(b"}");
    }

    /// Appends `"token":…,"logprob":…,"bytes":[…]`.
    fn render_fields(&self, out: &mut impl Out) {
        out.put(b"\"token\":");
        json::string(out, &self.text);
        out.put(b",\"logprob\":");
        self.put_logprob(out);
        out.put(b",\"bytes\":[");
        for (at, byte) in self.bytes.iter().enumerate() {
            if at > 0 {
                out.put(b",");
            }
            json::integer(out, u64::from(*byte));
        }
        out.put(b"]");
    }
}

/// The log probabilities of some tokens of a choice: of one event, or of a whole answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogprobsPiece {
    /// One entry a token.
    pub tokens: Vec<TokenLogprob>,
    /// Completions: where the first of the tokens starts in the choice's text, characters.
    pub text_offset: u64,
}

impl LogprobsPiece {
    /// Appends the `logprobs` object in the shape of the endpoint.
    pub(super) fn render(&self, kind: CompletionApi, out: &mut impl Out) {
        match kind {
            CompletionApi::Chat => self.render_chat(out),
            CompletionApi::Completion => self.render_completion(out),
        }
    }

    fn render_chat(&self, out: &mut impl Out) {
        out.put(b"{\"content\":[");
        separated(out, &self.tokens, |out, token| token.render_in_chat(out));
        out.put(b"]}");
    }

    fn render_completion(&self, out: &mut impl Out) {
        out.put(b"{\"text_offset\":[");
        let mut offset = self.text_offset;
        separated(out, &self.tokens, |out, token| {
            json::integer(out, offset);
            offset += token.chars();
        });
        out.put(b"],\"token_logprobs\":[");
        separated(out, &self.tokens, |out, t| t.put_logprob(out));
        out.put(b"],\"tokens\":[");
        separated(out, &self.tokens, |out, t| json::string(out, &t.text));
        out.put(b"],\"top_logprobs\":[");
        separated(out, &self.tokens, |out, token| token.render_tops(out));
        out.put(b"]}");
    }
}

fn separated<O: Out, T>(out: &mut O, items: &[T], mut each: impl FnMut(&mut O, &T)) {
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.put(b",");
        }
        each(out, item);
    }
}
