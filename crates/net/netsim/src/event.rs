//! The 16-byte event. A packet *is* its event: no other memory is used for it.

use slipstream_base::width::{low_u32, to_u32};
use slipstream_des::Timed;

/// Kinds of events. Packets first, then events local to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EventKind {
    /// Payload in flight to a receiver.
    Data = 0,
    /// Acknowledgment; `seq` is cumulative.
    Ack = 1,
    /// RoCE: the receiver expects `seq` (go-back-N).
    Nack = 2,
    /// DCQCN congestion notification.
    Cnp = 3,
    /// NDP: permission to send one more packet.
    Pull = 4,
    /// NDP: a header that a full switch sends back to its sender.
    Return = 5,
    /// Acknowledgment with a SACK option; `seq` is the option's index in its shard's store.
    Sack = 6,
    /// Start of the flow of endpoint `what`.
    Start = 8,
    /// A timer of endpoint `what`; `seq` identifies it.
    Timer = 9,
    /// The application of endpoint `what` has data.
    Tick = 10,
    /// Scheduled port `what` is free.
    Wake = 11,
    /// PFC: pause class `size` of scheduled port `what` for `seq` quanta, or resume it (0).
    Pause = 12,
    /// Time to sample queues.
    Sample = 13,
}

const KINDS: [EventKind; 16] = [
    EventKind::Data,
    EventKind::Ack,
    EventKind::Nack,
    EventKind::Cnp,
    EventKind::Pull,
    EventKind::Return,
    EventKind::Sack,
    EventKind::Sack,
    EventKind::Start,
    EventKind::Timer,
    EventKind::Tick,
    EventKind::Wake,
    EventKind::Pause,
    EventKind::Sample,
    EventKind::Sample,
    EventKind::Sample,
];

/// Congestion experienced (data), or its echo (ACK).
pub(crate) const CE: u32 = 1 << 28;
/// ECN-capable transport: queues mark instead of dropping.
pub(crate) const ECT: u32 = 1 << 29;

/// A queue may trim the packet to its header.
pub(crate) const TRIMMABLE: u32 = 1 << 30;
/// The packet is trimmed to its header.
pub(crate) const TRIMMED: u32 = 1 << 31;

const HOP: u32 = 1 << 16;
/// Longest path, in ports.
pub(crate) const HOPS_MAX: usize = 250;
/// Largest packet on the wire, bytes.
pub(crate) const SIZE_MAX: u32 = 65_535;

/// `meta`: size in bits 0..16, hop in 16..24, kind in 24..28, flags in 28..32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetEvent {
    /// Low 32 bits of the time, ns.
    pub(crate) t: u32,
    /// Packet: its row of the path table. Other events: an endpoint (as a [`crate::step::Step`]) or
    /// a port.
    pub(crate) what: u32,
    /// Low 32 bits of a byte or packet number.
    pub(crate) seq: u32,
    pub(crate) meta: u32,
}

impl Timed for NetEvent {
    #[inline]
    fn time_low(&self) -> u32 {
        self.t
    }
}

impl NetEvent {
    /// A packet at the first port of `row`. Scheduling sets its time.
    #[inline]
    pub(crate) fn packet(kind: EventKind, row: u32, seq: u32, size: u32, flags: u32) -> NetEvent {
        NetEvent {
            t: 0,
            what: row,
            seq,
            meta: size | (kind as u32) << 24 | flags,
        }
    }

    /// An event that is not a packet.
    pub(crate) fn local(kind: EventKind, time: u64, what: u32, seq: u32) -> NetEvent {
        NetEvent {
            t: low_u32(time),
            what,
            seq,
            meta: (kind as u32) << 24,
        }
    }

    #[inline]
    pub(crate) fn kind(self) -> EventKind {
        KINDS[(self.meta >> 24 & 15) as usize]
    }

    /// Whether this is an acknowledgment with a SACK option.
    #[inline]
    pub(crate) fn is_sack(self) -> bool {
        self.meta >> 24 & 15 == EventKind::Sack as u32
    }

    #[inline]
    pub(crate) fn is_packet(self) -> bool {
        self.meta & (8 << 24) == 0
    }

    /// Bytes on the wire.
    #[inline]
    pub(crate) fn size(self) -> u32 {
        self.meta & 0xffff
    }

    #[inline]
    pub(crate) fn hop(self) -> usize {
        (self.meta >> 16 & 0xff) as usize
    }

    #[inline]
    pub(crate) fn next_hop(&mut self) {
        self.meta += HOP;
    }

    /// Turns a packet around: it continues at `hop` of `row`.
    pub(crate) fn turn(&mut self, row: u32, hop: usize) {
        let kept = self.meta & !(0xff << 16 | 0xf << 24);
        self.meta = kept | to_u32(hop) << 16 | (EventKind::Return as u32) << 24;
        self.what = row;
    }

    /// Trims a packet to a header of `bytes`.
    #[inline]
    pub(crate) fn trim(&mut self, bytes: u32) {
        self.meta = self.meta & !0xffff | bytes | TRIMMED;
    }

    #[inline]
    pub(crate) fn has(self, flag: u32) -> bool {
        self.meta & flag != 0
    }
}

/// The 64-bit number nearest to `near` whose low half is `low`.
#[inline]
pub(crate) fn widen(low: u32, near: u64) -> u64 {
    let ahead = low.wrapping_sub(low_u32(near)).cast_signed();
    near.wrapping_add_signed(i64::from(ahead))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_sixteen_bytes() {
        assert_eq!(size_of::<NetEvent>(), 16);
    }

    #[test]
    fn numbers_widen_across_the_wrap() {
        assert_eq!(widen(5, (1 << 32) - 3), (1 << 32) + 5);
        assert_eq!(widen(u32::MAX, 1 << 32), (1 << 32) - 1);
        assert_eq!(widen(0, 0), 0);
    }
}
