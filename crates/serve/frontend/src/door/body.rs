//! Body of any answer: all of it, or pieces as a handler makes them.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use crate::door::access::AnswerEnd;
use crate::door::budget::Charge;
use crate::door::connection::Owner;
use crate::door::faults::Breaking;

/// Pieces in which an answer that is there as a whole is handed to its connection, bytes.
const PIECE_BYTES: usize = 64 << 10;

/// An answer in pieces.
pub(crate) trait AnswerBody {
    /// The next piece; `None` at the end.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>>;

    /// Whether no piece follows.
    fn is_end_stream(&self) -> bool {
        false
    }

    /// Bytes that follow, as far as they are known.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }

    /// From now on, pieces may be written to the client's socket past hyper, as chunks of HTTP/1.1.
    fn allow_direct(&self) {}
}

/// Body of any answer.
pub(crate) struct HttpBody {
    content: Content,
    /// A fault by rate, if the stream has one.
    breaking: Option<Box<Breaking>>,
    /// The request that it answers, which ends with it.
    owner: Option<Rc<Owner>>,
    /// Memory of a large one.
    #[allow(dead_code)] // given back when dropped
    memory: Option<Charge>,
}

enum Content {
    /// All of it; `None` once it was taken.
    Whole(Option<Bytes>),
    /// A large answer, as it is rendered.
    Slices(Box<dyn AnswerBody>),
    /// Events as they come.
    Events(Box<dyn AnswerBody>),
    /// As an engine sends it.
    Relay(Box<dyn AnswerBody>),
}

impl Content {
    fn poll_frame(
        &mut self,
        owner: Option<&Owner>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self {
            Content::Whole(rest) => {
                let Some(mut bytes) = rest.take() else {
                    return Poll::Ready(None);
                };
                // In pieces, so that a client that reads a long one slowly is seen to read.
                if bytes.len() > PIECE_BYTES {
                    *rest = Some(bytes.split_off(PIECE_BYTES));
                }
                if let Some(owner) = owner {
                    owner.progress();
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Content::Slices(body) => body.poll_frame(cx),
            Content::Events(body) | Content::Relay(body) => {
                let polled = body.poll_frame(cx);
                if let (Poll::Ready(Some(Ok(_))), Some(owner)) = (&polled, owner) {
                    owner.account().note_piece();
                }
                polled
            }
        }
    }
}

impl HttpBody {
    fn new(content: Content) -> HttpBody {
        HttpBody {
            content,
            breaking: None,
            owner: None,
            memory: None,
        }
    }

    /// All of it, and its memory; empty if `None`.
    pub(crate) fn whole(bytes: Option<Bytes>, memory: Option<Charge>) -> HttpBody {
        HttpBody {
            memory,
            ..HttpBody::new(Content::Whole(bytes))
        }
    }

    /// A large answer, as it is rendered.
    pub(crate) fn slices(body: impl AnswerBody + 'static) -> HttpBody {
        HttpBody::new(Content::Slices(Box::new(body)))
    }

    /// Events as they come.
    pub(crate) fn events(body: impl AnswerBody + 'static) -> HttpBody {
        HttpBody::new(Content::Events(Box::new(body)))
    }

    /// An engine's answer.
    pub(crate) fn relay(body: impl AnswerBody + 'static) -> HttpBody {
        HttpBody::new(Content::Relay(Box::new(body)))
    }

    /// Whether all of it is there.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.content, Content::Whole(_))
    }

    /// Whether it is events of this server.
    pub(crate) fn is_events(&self) -> bool {
        matches!(self.content, Content::Events(_))
    }

    /// Has the stream stall or break as `breaking` says.
    pub(crate) fn break_by(&mut self, breaking: Option<Breaking>) {
        self.breaking = breaking.map(Box::new);
    }

    /// Events may be written to the client's socket past hyper, unless they have a fault.
    pub(crate) fn allow_direct(&self) {
        if let (Content::Events(body), None) = (&self.content, &self.breaking) {
            body.allow_direct();
        }
    }

    /// The request that it answers, which ends with it.
    pub(crate) fn belongs_to(&mut self, owner: Rc<Owner>) {
        self.owner = Some(owner);
    }
}

impl HttpBody {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(breaking) = &mut self.breaking {
            std::task::ready!(breaking.poll_ready(cx));
            let piece = std::task::ready!(self.content.poll_frame(self.owner.as_deref(), cx));
            if let Some(Ok(_)) = &piece {
                breaking.pass()?;
            }
            return Poll::Ready(piece);
        }
        self.content.poll_frame(self.owner.as_deref(), cx)
    }
}

impl Body for HttpBody {
    type Data = Bytes;
    /// The rest of an answer will not come.
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let polled = this.poll_piece(cx);
        if let (Poll::Ready(piece), Some(owner)) = (&polled, &this.owner) {
            match piece {
                Some(Err(_)) => owner.account().note_end(AnswerEnd::Broken),
                None => owner.account().note_end(AnswerEnd::Complete),
                // It may not be polled again.
                Some(Ok(_)) if this.is_end_stream() => {
                    owner.account().note_end(AnswerEnd::Complete);
                }
                Some(Ok(_)) => {}
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.is_none(),
            Content::Slices(body) | Content::Events(body) | Content::Relay(body) => {
                body.is_end_stream()
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Content::Slices(body) | Content::Events(body) | Content::Relay(body) => {
                body.size_hint()
            }
        }
    }
}
