//! Requests by the time at which they are handed out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slipstream_base::SimTime;
use slipstream_base::width::to_u32;

use crate::request::Request;

/// Requests in the order of their times, and of their numbers at equal times. The order is kept apart from the
/// requests, which stay in place.
#[derive(Debug, Default)]
pub(crate) struct Later {
    order: BinaryHeap<Reverse<(SimTime, u64, u32)>>,
    /// By the last part of an entry of `order`.
    requests: Vec<Option<Request>>,
    free: Vec<u32>,
}

impl Later {
    pub(crate) fn push(&mut self, at: SimTime, request: Request) {
        let id = request.id().0;
        let slot = if let Some(slot) = self.free.pop() {
            self.requests[slot as usize] = Some(request);
            slot
        } else {
            self.requests.push(Some(request));
            to_u32(self.requests.len()) - 1
        };
        self.order.push(Reverse((at, id, slot)));
    }

    /// Time of the first.
    #[inline]
    pub(crate) fn first(&self) -> Option<SimTime> {
        self.order.peek().map(|Reverse((at, ..))| *at)
    }

    /// Takes the first.
    pub(crate) fn pop(&mut self) -> Option<Request> {
        let Reverse((_, _, slot)) = self.order.pop()?;
        self.free.push(slot);
        self.requests[slot as usize].take()
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Takes all, in no particular order.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = Request> {
        std::mem::take(self).requests.into_iter().flatten()
    }
}
