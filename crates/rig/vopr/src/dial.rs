//! Dials of worker processes to frontends.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use slipstream_planes::link::Socket;

/// A dial under way.
pub(crate) struct Dial {
    pub(crate) address: String,
    pub(crate) process: usize,
    pub(crate) instance: u64,
    pub(crate) done: Rc<RefCell<Dialed>>,
}

#[derive(Default)]
pub(crate) struct Dialed {
    pub(crate) result: Option<io::Result<Box<dyn Socket>>>,
    pub(crate) waker: Option<Waker>,
    /// The process no longer waits for it.
    pub(crate) abandoned: bool,
}

/// The process's side of a dial. A socket that it does not take closes.
pub(crate) struct DialHandle(pub(crate) Rc<RefCell<Dialed>>);

impl DialHandle {
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<io::Result<Box<dyn Socket>>> {
        let mut dialed = self.0.borrow_mut();
        if let Some(result) = dialed.result.take() {
            return Poll::Ready(result);
        }
        dialed.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for DialHandle {
    fn drop(&mut self) {
        let mut dialed = self.0.borrow_mut();
        dialed.abandoned = true;
        dialed.result = None;
    }
}

pub(crate) type Dials = Rc<RefCell<Vec<Dial>>>;
