//! Switch memory: a buffer shared by the ports of a switch, and priority flow control (PFC), which
//! stops the sender of a link before its packets find no room.
//!
//! ```text
//!  upstream port ──link──► ingress (bytes by class, threshold, headroom) ──► queues of the switch
//!        ▲                    │ crosses its threshold
//!        └────── pause ◄──────┘
//! ```
//!
//! Bytes count while they wait: a packet leaves the accounts when its service starts, as everywhere
//! in this crate.

use crate::queueing::{NO_INGRESS, PAUSE_BYTES, PFC_CLASSES, Pfc, Thresholds};
use slipstream_base::width::{floor_u64, to_u32};

use crate::event::{EventKind, NetEvent};
use crate::fabric::ShardPorts;
use crate::link::serialization_ns;
use crate::net::Net;
use crate::step::{Place, Step};

/// No switch: a host's own port.
pub(crate) const NO_SWITCH: u32 = u32::MAX;

/// `seq` of a pause without a duration, and of the event at the end of a pause with one: above all
/// 16-bit durations.
pub(crate) const LASTING: u32 = 1 << 16;
pub(crate) const RUN_OUT: u32 = LASTING + 1;

/// Time of `quanta` on a link, ns.
pub(crate) fn quanta_ns(quanta: u32, bits_per_s: u64) -> u64 {
    serialization_ns(u64::from(quanta) * 512 / 8, bits_per_s)
}

/// A switch's memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// The switch.
    pub(crate) node: u32,
    pub(crate) used: u64,
    pub(crate) used_max: u64,
    pub(crate) drops: u64,
}

/// Memory of a switch in use by one incoming link.
#[derive(Clone, Debug)]
pub(crate) struct Ingress {
    /// The port at the other end.
    pub(crate) upstream: Step,
    /// Index of the shard's memories.
    memory: u32,
    link_class: u8,
    /// Bytes below the threshold, and bytes in the headroom, by class.
    held: [u64; PFC_CLASSES],
    over: [u64; PFC_CLASSES],
    /// Bit c: the link's class c is paused.
    pub(crate) off: u8,
    /// When the last pause frame was sent, ns; and when the next is due, 0: none.
    paused_at: [u64; PFC_CLASSES],
    refresh_at: [u64; PFC_CLASSES],
    pub(crate) pauses: u64,
    pub(crate) over_max: u64,
    pub(crate) drops: u64,
}

impl Ingress {
    pub(crate) fn new(upstream: Step, memory: u32, link_class: u8) -> Self {
        Ingress {
            upstream,
            memory,
            link_class,
            held: [0; PFC_CLASSES],
            over: [0; PFC_CLASSES],
            off: 0,
            paused_at: [0; PFC_CLASSES],
            refresh_at: [0; PFC_CLASSES],
            pauses: 0,
            over_max: 0,
            drops: 0,
        }
    }
}

impl Ingress {
    /// Index of the memory of its switch.
    pub(crate) fn memory(&self) -> usize {
        self.memory as usize
    }
}

/// A class of traffic as PFC counts it.
fn pfc_class(class: usize) -> usize {
    class.min(PFC_CLASSES - 1)
}

impl ShardPorts {
    /// Bytes that a queue of `memory` may hold now, by dynamic threshold; no limit without a shared
    /// buffer.
    fn threshold(&self, net: &Net, memory: u32, alpha: f64) -> u64 {
        match net.rules.shared {
            Some(shared) => {
                let free = shared
                    .bytes
                    .saturating_sub(self.memories[memory as usize].used);
                floor_u64(alpha * free as f64)
            }
            None => u64::MAX,
        }
    }

    fn xoff(&self, net: &Net, memory: u32, pfc: &Pfc) -> u64 {
        pfc.xoff_bytes
            .unwrap_or_else(|| self.threshold(net, memory, pfc.alpha))
    }

    /// Admits a packet that must wait, and counts its bytes; `false` if there is no room. `queued`
    /// is the length of its queue.
    pub(crate) fn admit(
        &mut self,
        net: &Net,
        now: u64,
        (memory, ingress): (u32, u32),
        class: usize,
        (size, queued): (u64, u64),
    ) -> bool {
        if memory == NO_SWITCH {
            return true;
        }
        let lossless = net.rules.is_lossless(class) && ingress != NO_INGRESS;
        if !lossless {
            if let Some(shared) = net.rules.shared {
                let free = shared
                    .bytes
                    .saturating_sub(self.memories[memory as usize].used);
                if queued >= self.threshold(net, memory, shared.alpha) || size > free {
                    self.memories[memory as usize].drops += 1;
                    return false;
                }
            }
            self.take_memory(memory, size);
            return true;
        }
        let Some(pfc) = &net.rules.pfc else {
            unreachable!("a class is lossless by PFC")
        };
        let c = pfc_class(class);
        if let Some(thresholds) = &pfc.by_priority {
            return self.admit_by_priority(net, now, (memory, ingress), (c, thresholds[c]), size);
        }
        let xoff = self.xoff(net, memory, pfc);
        // With α above 1 the threshold may exceed the free bytes.
        let free = net.rules.shared.map_or(u64::MAX, |shared| {
            shared
                .bytes
                .saturating_sub(self.memories[memory as usize].used)
        });
        let at = &mut self.ingresses[ingress as usize];
        if at.over[c] == 0 && at.held[c] + size <= xoff && size <= free {
            at.held[c] += size;
            self.take_memory(memory, size);
            return true;
        }
        if at.off >> c & 1 == 1 {
            self.pause_again(net, now, ingress, c);
        }
        let at = &mut self.ingresses[ingress as usize];
        if at.over[c] + size > net.rules.headroom[at.link_class as usize] {
            at.drops += 1;
            self.memories[memory as usize].drops += 1;
            return false;
        }
        at.over[c] += size;
        at.over_max = at.over_max.max(at.over[c]);
        if at.off >> c & 1 == 0 {
            at.off |= 1 << c;
            at.pauses += 1;
            self.tally.pauses += 1;
            self.signal_upstream(net, now, ingress, c, true);
            self.refresh_later(net, now, pfc, (ingress, c));
        }
        true
    }

    /// As [`ShardPorts::admit`], by thresholds on all bytes of a priority behind a link.
    fn admit_by_priority(
        &mut self,
        net: &Net,
        now: u64,
        (memory, ingress): (u32, u32),
        (c, rule): (usize, Thresholds),
        size: u64,
    ) -> bool {
        let at = &mut self.ingresses[ingress as usize];
        if at.held[c] + size > rule.capacity_bytes {
            at.drops += 1;
            self.memories[memory as usize].drops += 1;
            return false;
        }
        at.held[c] += size;
        let pause = at.held[c] >= rule.xoff_bytes && at.off >> c & 1 == 0;
        if pause {
            at.off |= 1 << c;
            at.pauses += 1;
            self.tally.pauses += 1;
            self.signal_upstream(net, now, ingress, c, true);
        }
        self.take_memory(memory, size);
        true
    }

    /// Handles a packet of a paused class: if the pause has expired, it is sent again.
    #[cold]
    fn pause_again(&mut self, net: &Net, now: u64, ingress: u32, class: usize) {
        let at = &self.ingresses[ingress as usize];
        let rate = net.classes[at.link_class as usize].bits_per_s;
        let quanta = net.rules.pfc.and_then(|pfc| pfc.quanta);
        if quanta.is_some_and(|q| at.paused_at[class] + quanta_ns(q.into(), rate) <= now) {
            self.tally.pause_refreshes += 1;
            self.signal_upstream(net, now, ingress, class, true);
        }
    }

    /// Schedules the next frame of a pause, if it is refreshed.
    fn refresh_later(&mut self, net: &Net, now: u64, pfc: &Pfc, (ingress, class): (u32, usize)) {
        if pfc.quanta.is_none() || pfc.refresh == 0 {
            return;
        }
        let at = &mut self.ingresses[ingress as usize];
        let rate = net.classes[at.link_class as usize].bits_per_s;
        let due = now + quanta_ns(pfc.refresh.into(), rate).max(1);
        at.refresh_at[class] = due;
        let me = Step::new(to_u32(self.shard), Place::Ingress, ingress as usize);
        self.schedule(due, EventKind::Timer, me.0, to_u32(class));
    }

    /// Handles a scheduled refresh.
    pub(crate) fn on_refresh(&mut self, net: &Net, now: u64, event: NetEvent) {
        let (ingress, class) = (to_u32(Step(event.what).index()), event.seq as usize);
        let at = &self.ingresses[ingress as usize];
        let Some(pfc) = net.rules.pfc else { return };
        // The pause may have ended, and another started, since this was scheduled.
        if at.off >> class & 1 == 1 && at.refresh_at[class] == now {
            self.tally.pause_refreshes += 1;
            self.signal_upstream(net, now, ingress, class, true);
            self.refresh_later(net, now, &pfc, (ingress, class));
        }
    }

    fn take_memory(&mut self, memory: u32, size: u64) {
        let memory = &mut self.memories[memory as usize];
        memory.used += size;
        memory.used_max = memory.used_max.max(memory.used);
    }

    /// Frees the bytes of a packet that waited and is now in service.
    pub(crate) fn release(
        &mut self,
        net: &Net,
        now: u64,
        (memory, ingress): (u32, u32),
        class: usize,
        size: u64,
    ) {
        if memory == NO_SWITCH {
            return;
        }
        if !net.rules.is_lossless(class) || ingress == NO_INGRESS {
            self.memories[memory as usize].used -= size;
            return;
        }
        let c = pfc_class(class);
        let at = &mut self.ingresses[ingress as usize];
        if let Some(thresholds) = net.rules.pfc.as_ref().and_then(|p| p.by_priority.as_ref()) {
            at.held[c] -= size;
            self.memories[memory as usize].used -= size;
            if at.off >> c & 1 == 1 && at.held[c] <= thresholds[c].xon_bytes {
                at.off &= !(1 << c);
                self.signal_upstream(net, now, ingress, c, false);
            }
            return;
        }
        // The headroom is freed first, so that it is available for the next pause.
        let from_over = at.over[c].min(size);
        at.over[c] -= from_over;
        at.held[c] -= size - from_over;
        self.memories[memory as usize].used -= size - from_over;
        let at = &self.ingresses[ingress as usize];
        if at.off >> c & 1 == 1 && at.over[c] == 0 {
            let Some(pfc) = &net.rules.pfc else { return };
            let (held, xoff) = (at.held[c], self.xoff(net, memory, pfc));
            // With no bytes left, no later release would revoke the pause.
            if held == 0 || held.saturating_add(pfc.xon_gap_bytes) <= xoff {
                self.ingresses[ingress as usize].off &= !(1 << c);
                self.signal_upstream(net, now, ingress, c, false);
            }
        }
    }

    /// Sends a pause frame, or its revocation, to the port at the other end of a link. It takes the
    /// link's delay and its own serialization; it does not wait behind data.
    fn signal_upstream(&mut self, net: &Net, now: u64, ingress: u32, class: usize, pause: bool) {
        let at = &mut self.ingresses[ingress as usize];
        let link = net.classes[at.link_class as usize];
        let time = now + serialization_ns(PAUSE_BYTES, link.bits_per_s) + link.delay_ns;
        let quanta = if pause {
            at.paused_at[class] = now;
            let quanta = net.rules.pfc.and_then(|pfc| pfc.quanta);
            quanta.map_or(LASTING, u32::from)
        } else {
            0
        };
        let upstream = at.upstream;
        let mut event = NetEvent::local(EventKind::Pause, time, upstream.0, quanta);
        event.meta |= to_u32(class);
        self.deliver_local(upstream, time, event);
    }
}
