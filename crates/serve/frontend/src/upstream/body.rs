//! An engine's answer as the body of a response.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::relay::Relay;
use crate::door::body::AnswerBody;

impl AnswerBody for Rc<RefCell<Relay>> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Pin::new(&mut *self.borrow_mut()).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.borrow().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.borrow().size_hint()
    }
}
