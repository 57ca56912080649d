//! A request in bytes at the dispatcher.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use slipstream_base::WorkerId;
use slipstream_dispatch::{Request, Role};

use super::Upstream;
use super::pair::Prefilling;
use crate::openai::ApiError;

/// Decision of the dispatcher on a request.
#[derive(Debug)]
pub(crate) enum Decision {
    /// This worker gets it, for this part.
    Start(WorkerId, Role),
    /// No worker takes it. It is over.
    Over(ApiError),
}

/// Where decisions about a request arrive.
#[derive(Debug, Default)]
pub(crate) struct Ticket {
    decision: RefCell<Option<Decision>>,
    waker: RefCell<Option<Waker>>,
}

impl Ticket {
    pub(crate) fn set(&self, decision: Decision) {
        self.decision.replace(Some(decision));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// A request that the dispatcher owns. Dropped, it is canceled there unless it is over.
pub(super) struct Seat {
    upstream: Rc<Upstream>,
    number: u32,
    ticket: Rc<Ticket>,
    over: bool,
    /// The request to its prefill engine, for as long as that is under way. It ends with this one.
    #[allow(dead_code)] // aborted when dropped
    prefill: Option<Prefilling>,
}

impl Seat {
    /// Submits `request`.
    pub(super) fn submit(upstream: &Rc<Upstream>, request: &Request) -> Seat {
        let number = upstream.next_number();
        let ticket = Rc::new(Ticket::default());
        let seat = Seat {
            upstream: upstream.clone(),
            number,
            ticket: ticket.clone(),
            over: false,
            prefill: None,
        };
        upstream.submit(number, request, ticket);
        seat
    }

    /// The worker that gets it, and the part that it computes, once that is decided.
    ///
    /// # Errors
    /// What the client gets: no worker takes it.
    pub(super) async fn placed(&mut self) -> Result<(WorkerId, Role), ApiError> {
        let decision = poll_fn(|cx| {
            if let Some(decision) = self.ticket.decision.take() {
                return Poll::Ready(decision);
            }
            self.ticket.waker.replace(Some(cx.waker().clone()));
            Poll::Pending
        });
        match decision.await {
            Decision::Start(worker, role) => Ok((worker, role)),
            Decision::Over(error) => {
                self.over = true;
                Err(error)
            }
        }
    }

    /// The worker that is to answer it, while another one computes its prompt.
    pub(super) fn decode_worker(&self) -> Option<WorkerId> {
        self.upstream.decode_worker(self.number)
    }

    /// The answer has begun before the request to its prefill engine has ended.
    pub(super) fn keep_prefill(&mut self, prefill: Prefilling) {
        self.prefill = Some(prefill);
    }

    /// `worker` failed it: another one may get it.
    pub(super) fn failed_by(&self, worker: WorkerId) {
        self.upstream.on_not_taken(self.number, worker);
    }

    /// Its prompt is computed: another worker gets it next.
    pub(super) fn prefilled(&self) {
        self.upstream.on_prefilled(self.number);
    }

    /// Its prompt does not reach the worker that is to answer: one worker gets all of it.
    pub(super) fn prefill_failed(&self) {
        self.upstream.on_prefill_failed(self.number);
    }

    /// The first byte of its answer came.
    pub(super) fn begun(&self) {
        self.upstream.on_begun(self.number);
    }

    /// Its answer is complete.
    pub(super) fn ended(mut self) {
        self.over = true;
        self.upstream.on_ended(self.number);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.over {
            self.upstream.cancel(self.number);
        }
        self.upstream.free_number(self.number);
    }
}
