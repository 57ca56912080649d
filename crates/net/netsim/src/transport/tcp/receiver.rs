//! The receiver of a TCP flow: order, and acknowledgments.

use slipstream_base::width::low_u32;

use crate::event::{CE, EventKind, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::net::{Net, Rows};
use crate::sack::{BLOCKS_MAX, SackOption};
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
    /// `None`: a plain ACK per packet.
    policy: Option<Box<AckPolicy>>,
    pub(crate) received: Received,
}

/// ACKs with options.
#[derive(Clone, Debug, Default)]
pub(crate) struct AckPolicy {
    /// A byte of each range that was reported lately, the latest first.
    recent: [u64; BLOCKS_MAX],
}

impl AckPolicy {
    /// The option of an ACK for the segment at `from`. RFC 2018 section 4: its range first, then those reported last,
    /// so that each is repeated if an ACK is lost. `duplicate`: the segment had arrived; its range is not repeated.
    fn option(&mut self, r: &Ranges<'_>, from: u64, duplicate: bool) -> SackOption {
        let mut option = SackOption {
            ack: low_u32(r.next),
            duplicate,
            ..SackOption::default()
        };
        let (mut recent, mut count) = ([0; BLOCKS_MAX], 0);
        let mut firsts = [u64::MAX; BLOCKS_MAX];
        // The segment's own range counts as reported last.
        for byte in [from].into_iter().chain(self.recent) {
            if byte < r.next || count == BLOCKS_MAX {
                continue;
            }
            let index = r.beyond.partition_point(|&(_, end)| end <= byte);
            let Some(&(start, end)) = r.beyond.get(index).filter(|range| range.0 <= byte) else {
                continue;
            };
            if firsts[..count].contains(&start) {
                continue;
            }
            firsts[count] = start;
            recent[count] = byte;
            option.blocks[count] = (low_u32(start), low_u32(end));
            count += 1;
        }
        self.recent = recent;
        option
    }
}

/// What has arrived.
struct Ranges<'a> {
    next: u64,
    beyond: &'a [(u64, u64)],
}

impl TcpReceiver {
    pub(crate) fn new(
        flow: u32,
        row: u32,
        rows: u32,
        header: u32,
        ack_bytes: u32,
        total: u64,
        policy: Option<Box<AckPolicy>>,
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
            policy,
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
        // Before the ranges change.
        let duplicate = self.policy.is_some() && self.has(from, to);
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
        let (mut kind, mut seq) = (EventKind::Ack, low_u32(self.next));
        if let Some(policy) = &mut self.policy
            && (duplicate || !self.beyond.is_empty())
        {
            let ranges = Ranges {
                next: self.next,
                beyond: &self.beyond,
            };
            kind = EventKind::Sack;
            seq = fabric.sacks.put(policy.option(&ranges, from, duplicate));
        }
        let ack = NetEvent::packet(kind, row, seq, self.ack_bytes, echo);
        fabric.emit(net, now, ack);
        let done = self.received.done_at == 0 && self.next >= self.total;
        if done {
            self.received.done_at = now;
        }
        done
    }

    /// Whether the bytes of [from, to) had arrived.
    #[inline]
    fn has(&self, from: u64, to: u64) -> bool {
        if to <= self.next || self.beyond.is_empty() {
            return to <= self.next;
        }
        let index = self.beyond.partition_point(|&(_, end)| end < to);
        self.beyond.get(index).is_some_and(|range| range.0 <= from)
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
        let mut r = TcpReceiver::new(0, 0, 1, 0, 40, 100, None);
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

    /// RFC 2018 section 4: the latest range first, then those reported before; RFC 2883 for duplicates.
    #[test]
    fn options_begin_with_the_latest_range() {
        let mut r = TcpReceiver::new(0, 0, 1, 0, 40, 1_000, None);
        let mut policy = AckPolicy::default();
        let mut arrive = |from, to| {
            let duplicate = r.has(from, to);
            if from <= r.next {
                r.next = r.next.max(to);
                r.absorb();
            } else {
                r.keep(from, to);
            }
            let ranges = Ranges {
                next: r.next,
                beyond: &r.beyond,
            };
            let option = policy.option(&ranges, from, duplicate);
            (option.ack, option.blocks, option.duplicate)
        };
        let none = (0, 0);
        assert_eq!(arrive(10, 20), (0, [(10, 20), none, none, none], false));
        assert_eq!(arrive(30, 40), (0, [(30, 40), (10, 20), none, none], false));
        assert_eq!(
            arrive(50, 60),
            (0, [(50, 60), (30, 40), (10, 20), none], false)
        );
        assert_eq!(arrive(20, 30), (0, [(10, 40), (50, 60), none, none], false));
        assert_eq!(arrive(20, 30), (0, [(10, 40), (50, 60), none, none], true));
        for from in [70, 90, 110] {
            arrive(from, from + 10);
        }
        assert_eq!(
            arrive(130, 140).1,
            [(130, 140), (110, 120), (90, 100), (70, 80)]
        );
        assert_eq!(
            arrive(0, 10),
            (40, [(130, 140), (110, 120), (90, 100), (70, 80)], false)
        );
        assert!(arrive(0, 10).2);
    }
}
