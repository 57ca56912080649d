//! An answer that is sent as a whole: a small one at once, a large one as its client reads it.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::Frame;
use slipstream_base::width::to_u32;
use slipstream_base::{Stage, TokenId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::link::yield_turn;

use crate::door::body::AnswerBody;
use crate::openai::{
    ApiError, Finish, Head, TokenLogprob, UnaryRender, Usage, WholeAnswer, WholeCall,
};
use crate::text::TextModel;
use crate::tokens::reply::handle::ReplyHandle;
use crate::tokens::reply::state::ReplyState;
use crate::tokens::script::call_id;

/// Pieces in which a whole answer is rendered, bytes: some 60 µs with log probabilities.
const SLICE_BYTES: usize = 32 << 10;

/// A whole answer up to this size is sent in one piece, with its length.
const WHOLE_BYTES_MAX: usize = 64 << 10;

/// The rest of an answer will not come.
#[derive(Debug)]
struct Cut(ApiError);

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Cut {}

/// A whole answer that is complete.
struct Complete<'a> {
    state: &'a ReplyState,
    text: &'a TextModel,
}

impl WholeAnswer for Complete<'_> {
    fn head(&self) -> Head<'_> {
        self.state.shape.head()
    }

    fn choices(&self) -> usize {
        self.state.sequences.len()
    }

    fn text(&self, choice: usize) -> [&str; 2] {
        let sequence = &self.state.sequences[choice];
        [
            sequence.spec.echo.as_deref().unwrap_or_default(),
            &sequence.text,
        ]
    }

    fn calls(&self, choice: usize) -> usize {
        self.state.sequences[choice].calls().len()
    }

    fn call(&self, choice: usize, call: usize) -> (String, WholeCall<'_>) {
        let id = call_id(&self.state.shape.id, choice, to_u32(call));
        let call = &self.state.sequences[choice].calls()[call];
        let shown = WholeCall {
            name: &call.name,
            arguments: &call.arguments,
        };
        (id, shown)
    }

    fn finish(&self, choice: usize) -> Finish<'_> {
        self.state.sequences[choice].finish()
    }

    fn logprobs(&self, choice: usize) -> Option<usize> {
        let sequence = &self.state.sequences[choice];
        sequence.spec.top_logprobs?;
        Some(sequence.echoed_tokens() + sequence.logprob_tokens.len())
    }

    fn logprob(&self, choice: usize, token: usize, with_top: bool) -> Cow<'_, TokenLogprob> {
        let sequence = &self.state.sequences[choice];
        let top = sequence.spec.top_logprobs.filter(|_| with_top);
        let echoed = sequence.echoed_tokens();
        if token < echoed {
            let top = top.unwrap_or_default();
            return Cow::Owned(sequence.prompt_logprob(token, top, self.text));
        }
        let (position, token) = sequence.logprob_tokens[token - echoed];
        let (seed, position) = (sequence.spec.seed, u64::from(position));
        let top = top.unwrap_or_default();
        Cow::Owned(TokenLogprob::modelled(
            self.text, seed, position, token, top,
        ))
    }

    fn text_offset(&self, choice: usize) -> u64 {
        match &self.state.sequences[choice] {
            echoed if echoed.echoed_tokens() > 0 => 0,
            sequence => sequence.text_chars,
        }
    }

    fn prompt_logprobs(&self, choice: usize) -> Option<usize> {
        let spec = &self.state.sequences[choice].spec;
        spec.prompt_tops?;
        spec.scored_prompt.as_ref().map(|ids| ids.len())
    }

    fn prompt_logprob(&self, choice: usize, token: usize) -> TokenLogprob {
        let sequence = &self.state.sequences[choice];
        let top = sequence.spec.prompt_tops.unwrap_or_default();
        sequence.prompt_logprob(token, top, self.text)
    }

    fn token_ids(&self, choice: usize) -> Option<[&[TokenId]; 2]> {
        let sequence = &self.state.sequences[choice];
        let prompt = sequence.spec.prompt_ids.as_deref()?;
        Some([prompt, &sequence.ids])
    }

    fn usage(&self) -> Usage {
        self.state.usage()
    }
}

/// An answer that is not streamed.
pub(crate) enum Whole {
    /// All of it.
    Bytes(Vec<u8>),
    /// Too large for one piece.
    Slices(WholeBody),
}

impl Whole {
    /// The answer of `handle`, which is complete: all of it if it is small.
    pub(crate) fn of(handle: ReplyHandle) -> Whole {
        let mut body = WholeBody {
            handle,
            render: UnaryRender::default(),
            first: None,
            done: false,
            yielded: true,
        };
        let (first, done) = body.slice(WHOLE_BYTES_MAX);
        if done {
            body.delivered();
            return Whole::Bytes(first);
        }
        body.first = Some(first);
        Whole::Slices(body)
    }
}

/// A large whole answer, rendered as its client reads it.
pub(crate) struct WholeBody {
    handle: ReplyHandle,
    render: UnaryRender,
    first: Option<Vec<u8>>,
    done: bool,
    /// Other clients have had their turn since the last piece.
    yielded: bool,
}

impl WholeBody {
    /// The next piece, of about `bytes` bytes, and whether it is the last.
    fn slice(&mut self, bytes: usize) -> (Vec<u8>, bool) {
        let state = self.handle.reply().state.borrow();
        let answer = Complete {
            state: &state,
            text: &self.handle.workers().shard.service.text,
        };
        let mut out = Vec::new();
        self.done = self.render.advance(&answer, &mut out, bytes);
        (out, self.done)
    }

    fn delivered(&self) {
        let mut state = self.handle.reply().state.borrow_mut();
        state.progress.deliver();
        let now = monotonic_ns();
        state.times.note(Stage::Rendered, now);
        state.times.note(Stage::Written, now);
    }
}

impl AnswerBody for WholeBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        {
            let mut state = self.handle.reply().state.borrow_mut();
            if state.progress.is_cut() {
                let error = state.progress.error();
                let error = error.cloned().unwrap_or_else(ApiError::stopping);
                return Poll::Ready(Some(Err(io::Error::other(Cut(error)))));
            }
            state.outlet.polled_tick = self.handle.workers().replies.tick();
        }
        let piece = match self.first.take() {
            Some(first) => first,
            None if self.done => {
                self.delivered();
                return Poll::Ready(None);
            }
            None if !self.yielded => {
                self.yielded = true;
                yield_turn(cx);
                return Poll::Pending;
            }
            None => self.slice(SLICE_BYTES).0,
        };
        self.yielded = false;
        self.handle.workers().shard.metrics.flushes.add(1);
        Poll::Ready(Some(Ok(Frame::data(piece.into()))))
    }
}
