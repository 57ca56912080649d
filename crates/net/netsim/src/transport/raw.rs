//! Plain packet sources, without acknowledgments.

use slipstream_base::width::{low_u32, to_u32};

use crate::event::{ECT, EventKind, NetEvent};
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};
use crate::step::Step;
use crate::transport::{Paced, Received, ReceiverState, SendCount, SenderState};

#[derive(Clone, Debug)]
pub(crate) struct RawSender {
    pub(crate) flow: u32,
    me: Step,
    row: u32,
    rows: u32,
    header: u32,
    ecn: bool,
    packet_bytes: u64,
    app: Paced,
    sent: u64,
    pub(crate) count: SendCount,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl RawSender {
    pub(crate) fn new(
        flow: u32,
        me: Step,
        (row, rows): (u32, u32),
        header: u32,
        packet_bytes: u32,
        app: Paced,
    ) -> Self {
        RawSender {
            flow,
            me,
            row,
            rows,
            header,
            ecn: false,
            packet_bytes: u64::from(packet_bytes),
            app,
            sent: 0,
            count: SendCount::default(),
            start: 0,
            end: 0,
        }
    }

    /// Handles the start and each due packet. True when the last one has been sent.
    pub(crate) fn on_due(
        &mut self,
        now: u64,
        first: bool,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        if first {
            self.start = now;
            self.app.begin(now);
        }
        while let Some(mut piece) = self.app.take(now) {
            while piece > 0 {
                let size = piece.min(self.packet_bytes);
                piece -= size;
                let row = self.row + low_u32(self.count.packets % u64::from(self.rows));
                let flags = if self.ecn { ECT } else { 0 };
                let wire = to_u32(size) + self.header;
                let event = NetEvent::packet(EventKind::Data, row, low_u32(self.sent), wire, flags);
                self.sent += size;
                self.count.packets += 1;
                self.count.bytes += size;
                self.count.time_sum = self.count.time_sum.wrapping_add(now);
                fabric.emit(net, now, event);
            }
        }
        if self.app.is_over() {
            self.end = now;
            return true;
        }
        fabric.schedule(self.app.next, EventKind::Tick, self.me.0, 0);
        false
    }
}

#[derive(Clone, Debug)]
pub(crate) struct RawReceiver {
    pub(crate) flow: u32,
    header: u32,
    total: u64,
    pub(crate) received: Received,
}

impl RawReceiver {
    pub(crate) fn new(flow: u32, header: u32, total: u64) -> Self {
        RawReceiver {
            flow,
            header,
            total,
            received: Received::default(),
        }
    }

    /// Handles a packet. True if all bytes have arrived, which lost ones never do.
    pub(crate) fn on_data(&mut self, now: u64, event: NetEvent) -> bool {
        self.received
            .note(now, u64::from(event.size() - self.header));
        let done = self.received.done_at == 0 && self.received.bytes >= self.total;
        if done {
            self.received.done_at = now;
        }
        done
    }
}

impl SenderState for RawSender {
    fn reroute(&mut self, rows: Rows) {
        (self.row, self.rows) = (rows.first, rows.count);
    }

    fn count(&self) -> &SendCount {
        &self.count
    }

    fn report(&self, result: &mut FlowResult) {
        result.start_ns = self.start;
        result.bytes = self.count.bytes;
    }
}

impl ReceiverState for RawReceiver {
    fn reroute(&mut self, _rows: Rows) {
        // A raw receiver sends no answers.
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn in_order(&self) -> u64 {
        self.received.bytes
    }
}
