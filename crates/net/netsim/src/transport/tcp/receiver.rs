//! The receiver of a TCP flow: order, and acknowledgments.

use slipstream_base::width::low_u32;

use crate::event::{CE, EventKind, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::net::{Net, Rows};
use crate::transport::{Received, ReceiverState};

#[derive(Clone, Debug)]
pub(crate) struct TcpReceiver {
    /// All bytes below have arrived.
    pub(super) next: u64,
    /// Ranges beyond `next`: disjoint, ascending.
    pub(super) beyond: Vec<(u64, u64)>,
    row: u32,
    rows: u32,
    header: u32,
    ack_bytes: u32,
    pub(crate) flow: u32,
    /// Bytes that complete the flow; `u64::MAX`: not known here.
    total: u64,
    pub(crate) received: Received,
}

impl TcpReceiver {
    pub(crate) fn new(
        flow: u32,
        row: u32,
        rows: u32,
        header: u32,
        ack_bytes: u32,
        total: u64,
    ) -> Self {
        TcpReceiver {
            next: 0,
            beyond: Vec::new(),
            row,
            rows,
            header,
            ack_bytes,
            flow,
            total,
            received: Received::default(),
        }
    }

    /// Reads a word of each cache line that a packet needs.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        self.next ^ self.received.packets ^ self.received.done_at
    }

    /// Handles a packet and answers it. True if it completes the flow.
    #[inline]
    pub(crate) fn on_data(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        let from = widen(event.seq, self.next);
        let size = u64::from(event.size() - self.header);
        let to = from + size;
        self.received.note(now, size);
        if from <= self.next {
            self.next = self.next.max(to);
            if !self.beyond.is_empty() {
                self.absorb();
            }
        } else {
            self.keep(from, to);
        }
        // The mark of each packet is echoed on its own ACK (RFC 8257 section 3.2 without delayed
        // ACKs); senders react once per window.
        let echo = event.meta & CE;
        let row = if self.rows > 1 {
            self.row + low_u32(self.received.packets % u64::from(self.rows))
        } else {
            self.row
        };
        let ack = NetEvent::packet(
            EventKind::Ack,
            row,
            low_u32(self.next),
            self.ack_bytes,
            echo,
        );
        fabric.emit(net, now, ack);
        let done = self.received.done_at == 0 && self.next >= self.total;
        if done {
            self.received.done_at = now;
        }
        done
    }

    fn absorb(&mut self) {
        let reached = self.beyond.partition_point(|&(from, _)| from <= self.next);
        for &(_, to) in &self.beyond[..reached] {
            self.next = self.next.max(to);
        }
        self.beyond.drain(..reached);
    }

    #[cold]
    fn keep(&mut self, from: u64, to: u64) {
        // The ranges that touch [from, to] are merged with it.
        let a = self.beyond.partition_point(|&(_, end)| end < from);
        let b = self.beyond.partition_point(|&(start, _)| start <= to);
        let (mut from, mut to) = (from, to);
        for &(start, end) in &self.beyond[a..b] {
            from = from.min(start);
            to = to.max(end);
        }
        self.beyond.splice(a..b, [(from, to)]);
    }
}

impl ReceiverState for TcpReceiver {
    fn reroute(&mut self, rows: Rows) {
        (self.row, self.rows) = (rows.first, rows.count);
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn in_order(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_out_of_order_merge() {
        let mut r = TcpReceiver::new(0, 0, 1, 0, 40, 100);
        for (from, to) in [(20, 30), (50, 60), (30, 40), (45, 50), (10, 15)] {
            r.keep(from, to);
        }
        assert_eq!(r.beyond, [(10, 15), (20, 40), (45, 60)]);
        r.next = 12;
        r.absorb();
        assert_eq!((r.next, r.beyond.len()), (15, 2));
        r.next = 45;
        r.absorb();
        assert_eq!((r.next, r.beyond.len()), (60, 0));
    }
}
