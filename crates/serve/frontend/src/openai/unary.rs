//! Answers that are sent whole.
//!
//! An answer may have hundreds of megabytes, so it is rendered piece by piece: a caller takes as much as
//! its client reads, and other clients have their turn between two pieces.

use std::borrow::Cow;

use super::{CompletionApi, Finish, Head, LogprobsPiece, TokenLogprob, Usage};
use crate::json::{self, Out};

/// Bytes of a choice's text that are escaped in one go.
const TEXT_BYTES: usize = 16 << 10;

/// Ids of tokens that are written in one go.
const IDS: usize = 4 << 10;

/// The arrays of a completion's `logprobs`, as each begins.
const COMPLETION_ARRAYS: [&[u8]; 4] = [
    b"{\"text_offset\":[",
    b"],\"token_logprobs\":[",
    b"],\"tokens\":[",
    b"],\"top_logprobs\":[",
];
/// The array of a chat's.
const CHAT_ARRAYS: [&[u8]; 1] = [b"{\"content\":["];

/// A call of a tool, in a whole answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeCall<'a> {
    /// Name of the function.
    pub name: &'a str,
    /// Its arguments, JSON.
    pub arguments: &'a str,
}

/// A whole answer, as [`UnaryRender`] reads it. It does not change while it is rendered.
pub trait WholeAnswer {
    /// Fields that do not depend on a choice.
    fn head(&self) -> Head<'_>;
    /// Number of choices.
    fn choices(&self) -> usize;
    /// Text of a choice: the prompt's if it is repeated, and the answer's.
    fn text(&self, choice: usize) -> [&str; 2];
    /// Calls of tools of a choice; without any it has text.
    fn calls(&self, _choice: usize) -> usize {
        0
    }
    /// Id and content of a call, which [`calls`](Self::calls) counts.
    fn call(&self, _choice: usize, _call: usize) -> (String, WholeCall<'_>) {
        unreachable!("no choice has calls")
    }
    /// Why a choice ended.
    fn finish(&self, choice: usize) -> Finish<'_>;
    /// Number of tokens with log probabilities; `None` if the client did not ask for any.
    fn logprobs(&self, choice: usize) -> Option<usize>;
    /// Log probability of a token, with its alternatives if `with_top`.
    fn logprob(&self, choice: usize, token: usize, with_top: bool) -> Cow<'_, TokenLogprob>;
    /// Where the first of these tokens starts in the choice's text, characters.
    fn text_offset(&self, choice: usize) -> u64;
    /// Ids of the prompt's tokens for a choice and of those that were generated, if the client asked for them.
    fn token_ids(&self, _choice: usize) -> Option<[&[u32]; 2]> {
        None
    }
    /// Number of tokens of a choice's prompt, if the client asked for their log probabilities.
    fn prompt_logprobs(&self, _choice: usize) -> Option<usize> {
        None
    }
    /// Log probability of a token of a choice's prompt, with its alternatives.
    fn prompt_logprob(&self, _choice: usize, _token: usize) -> TokenLogprob {
        unreachable!("no prompt has log probabilities")
    }
    /// Token counts.
    fn usage(&self) -> Usage;
}

/// Renders a `chat.completion` or `text_completion` with its choices in order of their index.
#[derive(Clone, Debug, Default)]
pub struct UnaryRender {
    next: Place,
    choice: usize,
    /// Where the next token starts in the choice's text, characters.
    offset: u64,
}

fn arrays(kind: CompletionApi) -> &'static [&'static [u8]] {
    match kind {
        CompletionApi::Chat => &CHAT_ARRAYS,
        CompletionApi::Completion => &COMPLETION_ARRAYS,
    }
}

/// The piece that is rendered next.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Place {
    #[default]
    Head,
    Open,
    /// This part of the choice's text from this byte on.
    Text(usize, usize),
    /// A call of a tool.
    Call(usize),
    /// The beginning of an array of log probabilities.
    Array(usize),
    /// A token in such an array.
    Entry(usize, usize),
    Close,
    /// Ids of tokens from this one on: of the choice's prompt, of the choice, of a chat's prompt.
    Ids(usize, usize),
    EndChoice,
    /// The log probability of this token of the choice's prompt.
    Prompt(usize),
    ClosedChoice,
    Tail,
    /// After the ids of a chat's prompt.
    TailPrompt,
    Usage,
    Done,
}

impl UnaryRender {
    /// Appends pieces until `out` has `bytes_max` bytes or more: at most one piece more. Returns whether
    /// the answer is complete.
    pub fn advance(
        &mut self,
        answer: &impl WholeAnswer,
        out: &mut Vec<u8>,
        bytes_max: usize,
    ) -> bool {
        while self.next != Place::Done && out.len() < bytes_max {
            self.next = self.piece(answer, out);
        }
        self.next == Place::Done
    }

    fn piece(&mut self, answer: &impl WholeAnswer, out: &mut Vec<u8>) -> Place {
        let head = answer.head();
        match self.next {
            Place::Head => {
                head.render(out, false);
                out.put(b"\"choices\":[");
                Place::Open
            }
            Place::Open if self.choice == answer.choices() => Place::Tail,
            Place::Open => self.open(answer, out),
            Place::Text(part, from) => self.text(answer, part, from, out),
            Place::Call(at) => self.call(answer, at, out),
            Place::Array(array) => {
                self.offset = answer.text_offset(self.choice);
                out.put(arrays(head.kind)[array]);
                Place::Entry(array, 0)
            }
            Place::Entry(array, at) => {
                if at < answer.logprobs(self.choice).unwrap_or_default() {
                    self.entry(answer, array, at, out);
                    Place::Entry(array, at + 1)
                } else if array + 1 < arrays(head.kind).len() {
                    Place::Array(array + 1)
                } else {
                    out.put(b"]}");
                    Place::Close
                }
            }
            Place::Close => {
                out.put(b",");
                answer.finish(self.choice).render(out);
                match (answer.token_ids(self.choice), head.kind) {
                    (None, _) => Place::EndChoice,
                    (Some(_), CompletionApi::Completion) => Place::Ids(0, 0),
                    (Some(_), CompletionApi::Chat) => Place::Ids(1, 0),
                }
            }
            Place::Ids(list, from) => self.ids(answer, list, from, out),
            // A chat has those of its prompt once, behind the choices.
            Place::EndChoice if head.kind == CompletionApi::Completion => {
                match answer.prompt_logprobs(self.choice) {
                    Some(_) => Place::Prompt(0),
                    None => Place::ClosedChoice,
                }
            }
            Place::EndChoice => Place::ClosedChoice,
            Place::Prompt(at) => self.prompt(answer, at, out),
            Place::TailPrompt => match (answer.prompt_logprobs(0), head.kind) {
                (Some(_), CompletionApi::Chat) => Place::Prompt(0),
                _ => Place::Usage,
            },
            Place::ClosedChoice => {
                out.put(b"}");
                self.choice += 1;
                Place::Open
            }
            Place::Tail => {
                out.put(b"]");
                match (answer.token_ids(0), head.kind) {
                    (Some(_), CompletionApi::Chat) => Place::Ids(2, 0),
                    _ => Place::TailPrompt,
                }
            }
            Place::Usage => {
                out.put(b",\"usage\":");
                answer.usage().render(out);
                out.put(b"}");
                Place::Done
            }
            Place::Done => Place::Done,
        }
    }

    /// The beginning of a choice.
    fn open(&self, answer: &impl WholeAnswer, out: &mut Vec<u8>) -> Place {
        if self.choice > 0 {
            out.put(b",");
        }
        out.put(b"{\"index\":");
        json::integer(out, self.choice as u64);
        if answer.calls(self.choice) > 0 {
            out.put(
                b",\"message\":{\"role\":\"assistant\",\"content\":null,\"refusal\":null,\
                  \"tool_calls\":[",
            );
            return Place::Call(0);
        }
        out.put(match answer.head().kind {
            CompletionApi::Chat => {
                b",\"message\":{\"role\":\"assistant\",\"content\":\"".as_slice()
            }
            CompletionApi::Completion => b",\"text\":\"",
        });
        Place::Text(0, 0)
    }

    fn call(&self, answer: &impl WholeAnswer, at: usize, out: &mut Vec<u8>) -> Place {
        if at == answer.calls(self.choice) {
            out.put(b"]},\"logprobs\":");
            return self.after_text(answer, out);
        }
        if at > 0 {
            out.put(b",");
        }
        let (id, call) = answer.call(self.choice, at);
        out.put(b"{\"id\":");
        json::string(out, &id);
        out.put(b",\"type\":\"function\",\"function\":{\"name\":");
        json::string(out, call.name);
        out.put(b",\"arguments\":");
        json::string(out, call.arguments);
        out.put(b"}}");
        Place::Call(at + 1)
    }

    /// The log probability of a token of the prompt, which a chat has once.
    fn prompt(&self, answer: &impl WholeAnswer, at: usize, out: &mut Vec<u8>) -> Place {
        let (choice, next) = match answer.head().kind {
            CompletionApi::Chat => (0, Place::Usage),
            CompletionApi::Completion => (self.choice, Place::ClosedChoice),
        };
        out.put(if at == 0 {
            b",\"prompt_logprobs\":[".as_slice()
        } else {
            b","
        });
        answer.prompt_logprob(choice, at).render_in_prompt(out);
        if at + 1 < answer.prompt_logprobs(choice).unwrap_or_default() {
            return Place::Prompt(at + 1);
        }
        out.put(b"]");
        next
    }

    fn text(
        &self,
        answer: &impl WholeAnswer,
        part: usize,
        from: usize,
        out: &mut Vec<u8>,
    ) -> Place {
        let text = answer.text(self.choice)[part];
        let mut to = text.len().min(from + TEXT_BYTES);
        while !text.is_char_boundary(to) {
            to += 1;
        }
        json::escape(out, &text[from..to]);
        if to < text.len() {
            return Place::Text(part, to);
        }
        if part == 0 {
            return Place::Text(1, 0);
        }
        out.put(match answer.head().kind {
            CompletionApi::Chat => b"\",\"refusal\":null},\"logprobs\":".as_slice(),
            CompletionApi::Completion => b"\",\"logprobs\":",
        });
        self.after_text(answer, out)
    }

    fn ids(&self, answer: &impl WholeAnswer, list: usize, from: usize, out: &mut Vec<u8>) -> Place {
        let choice = if list == 2 { 0 } else { self.choice };
        let all = answer.token_ids(choice).unwrap_or_default()[list % 2];
        if from == 0 {
            out.put(if list == 1 {
                b",\"token_ids\":[".as_slice()
            } else {
                b",\"prompt_token_ids\":["
            });
        }
        let to = all.len().min(from + IDS);
        for (at, &id) in (from..).zip(&all[from..to]) {
            if at > 0 {
                out.put(b",");
            }
            json::integer(out, u64::from(id));
        }
        if to < all.len() {
            return Place::Ids(list, to);
        }
        out.put(b"]");
        match list {
            0 => Place::Ids(1, 0),
            1 => Place::EndChoice,
            _ => Place::TailPrompt,
        }
    }

    /// The value of `"logprobs"`.
    fn after_text(&self, answer: &impl WholeAnswer, out: &mut Vec<u8>) -> Place {
        if answer.logprobs(self.choice).is_some() {
            Place::Array(0)
        } else {
            out.put(b"null");
            Place::Close
        }
    }

    fn entry(&mut self, answer: &impl WholeAnswer, array: usize, at: usize, out: &mut Vec<u8>) {
        if at > 0 {
            out.put(b",");
        }
        let kind = answer.head().kind;
        let with_top = kind == CompletionApi::Chat || array == 3;
        let token = answer.logprob(self.choice, at, with_top);
        match (kind, array) {
            (CompletionApi::Chat, _) => token.render_in_chat(out),
            (CompletionApi::Completion, 0) => {
                json::integer(out, self.offset);
                self.offset += token.chars();
            }
            (CompletionApi::Completion, 1) => token.put_logprob(out),
            (CompletionApi::Completion, 2) => json::string(out, &token.text),
            (CompletionApi::Completion, _) => token.render_tops(out),
        }
    }
}

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

struct Choices<'a> {
    head: &'a Head<'a>,
    choices: &'a [UnaryChoice<'a>],
    usage: &'a Usage,
}

impl WholeAnswer for Choices<'_> {
    fn head(&self) -> Head<'_> {
        *self.head
    }

    fn choices(&self) -> usize {
        self.choices.len()
    }

    fn text(&self, choice: usize) -> [&str; 2] {
        ["", self.choices[choice].text]
    }

    fn finish(&self, choice: usize) -> Finish<'_> {
        self.choices[choice].finish
    }

    fn logprobs(&self, choice: usize) -> Option<usize> {
        self.choices[choice]
            .logprobs
            .map(|piece| piece.tokens.len())
    }

    fn logprob(&self, choice: usize, token: usize, _with_top: bool) -> Cow<'_, TokenLogprob> {
        let piece = self.choices[choice].logprobs;
        Cow::Borrowed(&piece.expect("it has some").tokens[token])
    }

    fn text_offset(&self, choice: usize) -> u64 {
        self.choices[choice]
            .logprobs
            .map_or(0, |piece| piece.text_offset)
    }

    fn usage(&self) -> Usage {
        *self.usage
    }
}

/// Renders a `chat.completion` or `text_completion` with `choices` in one go.
pub fn render_unary(
    head: &Head<'_>,
    choices: &[UnaryChoice<'_>],
    usage: &Usage,
    out: &mut impl Out,
) {
    let answer = Choices {
        head,
        choices,
        usage,
    };
    let mut bytes = Vec::new();
    UnaryRender::default().advance(&answer, &mut bytes, usize::MAX);
    out.put(&bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tests::builtin;

    /// Pieces of any size make the same answer, and none is much longer than was asked for.
    #[test]
    fn an_answer_in_pieces_is_the_answer_in_one() {
        let long = "\u{1f600}\"\\\n".repeat(20_000);
        for (kind, top) in [
            (CompletionApi::Chat, 3),
            (CompletionApi::Completion, 3),
            (CompletionApi::Completion, 0),
        ] {
            let tokens = (0..40).map(|at| TokenLogprob::modelled(builtin(), 7, at, 300, top));
            let piece = LogprobsPiece {
                tokens: tokens.collect(),
                text_offset: 5,
            };
            let choice = |text, logprobs| UnaryChoice {
                text,
                finish: Finish::Length,
                logprobs,
            };
            let choices = [
                choice("", None),
                choice(&long, Some(&piece)),
                choice("end", Some(&piece)),
            ];
            let answer = Choices {
                head: &Head {
                    kind,
                    id: "1",
                    created: 2,
                    model: "m",
                    include_usage: false,
                },
                choices: &choices,
                usage: &Usage::default(),
            };
            let mut whole = Vec::new();
            assert!(UnaryRender::default().advance(&answer, &mut whole, usize::MAX));
            let json: serde_json::Value = serde_json::from_slice(&whole).unwrap();
            assert_eq!(json["choices"].as_array().map(Vec::len), Some(3));
            for bytes_max in [1, 100, 10_000] {
                let mut render = UnaryRender::default();
                let mut all = Vec::new();
                loop {
                    let mut piece = Vec::new();
                    let done = render.advance(&answer, &mut piece, bytes_max);
                    assert!(piece.len() < bytes_max + 6 * TEXT_BYTES, "{}", piece.len());
                    all.extend(piece);
                    if done {
                        break;
                    }
                }
                assert_eq!(all, whole, "{kind:?} {bytes_max}");
            }
        }
    }
}
