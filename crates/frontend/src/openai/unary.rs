//! Answers that are sent whole.

use super::json::{self, Out};
use super::{Finish, Head, Kind, LogprobsPiece, Usage};

/// One choice of a whole answer.
#[derive(Clone, Debug)]
pub struct UnaryChoice<'a> {
    /// Its text.
    pub text: &'a str,
    /// Why it ended.
    pub finish: Finish<'a>,
    /// Log probabilities of its tokens, if asked for.
    pub logprobs: Option<&'a LogprobsPiece>,
}

/// Renders a `chat.completion` or `text_completion` with `choices` in order of their index.
pub fn render_unary(
    head: &Head<'_>,
    choices: &[UnaryChoice<'_>],
    usage: &Usage,
    out: &mut impl Out,
) {
    out.reserve(512 + choices.iter().map(|c| c.text.len() + 128).sum::<usize>());
    head.render(out, false);
    out.put(b"\"choices\":[");
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            out.put(b",");
        }
        out.put(b"{\"index\":");
        json::integer(out, index as u64);
        out.put(match head.kind {
            Kind::Chat => b",\"message\":{\"role\":\"assistant\",\"content\":\"".as_slice(),
            Kind::Completion => b",\"text\":\"",
        });
        json::escape(out, choice.text);
        out.put(match head.kind {
            Kind::Chat => b"\",\"refusal\":null},\"logprobs\":".as_slice(),
            Kind::Completion => b"\",\"logprobs\":",
        });
        match choice.logprobs {
            Some(logprobs) => logprobs.render(head.kind, out),
            None => out.put(b"null"),
        }
        out.put(b",");
        choice.finish.render(out);
        out.put(b"}");
    }
    out.put(b"],\"usage\":");
    usage.render(out);
    out.put(b"}");
}
