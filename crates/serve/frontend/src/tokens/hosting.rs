//! Engines whose work this thread runs: with few streams, one wake-up per step instead of two
//! ([`slipstream_planes::host`]).

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::host::{Host, Lent, Turn};

use crate::door::alarm::Alarm;
use crate::tokens::workers::{Transport, Workers};

impl Workers {
    /// Runs the work of engine thread `thread` whenever it lends it, for as long as the shard runs.
    pub(crate) async fn host(self: Rc<Workers>, thread: usize) {
        let Transport::Rings(port) = &self.transport else {
            return;
        };
        let mut host = Host::open(port.host(thread));
        let mut lent = poll_fn(|cx| host.poll_lent(cx)).await;
        let mut alarm = Alarm::new();
        loop {
            poll_fn(|cx| poll_turns(&mut lent, &mut alarm, cx)).await;
            lent = poll_fn(|cx| host.poll_lent(cx)).await;
        }
    }
}

/// Gives the work its turns until it leaves.
fn poll_turns(lent: &mut Lent, alarm: &mut Alarm, cx: &mut Context<'_>) -> Poll<()> {
    let Turn::Until(at_ns) = lent.turn(cx.waker()) else {
        return Poll::Ready(());
    };
    if at_ns > monotonic_ns() {
        ready!(alarm.poll_until(at_ns, cx));
    }
    // It is due: behind what waits for the thread.
    cx.waker().wake_by_ref();
    Poll::Pending
}
