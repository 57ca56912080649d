//! Loss recovery with SACK: RFC 2018 and 6675, RACK-TLP (RFC 8985), and proportional rate reduction (RFC 9937).
//!
//! Design. A sender without options repairs one loss per round trip, and goes back N after a timeout (the parent
//! module, as in Days). With SACK:
//!
//! - The [`Scoreboard`] counts the bytes in flight, and the congestion window limits those instead of the range of
//!   unacknowledged bytes. So new data is also sent in a recovery.
//! - Losses are found by the number of ranges beyond a hole (RFC 6675), or with RACK by time, which finds lost
//!   retransmissions too and tolerates reordering.
//! - Lost segments are sent first, then new ones. There is no other rule: RFC 6675's guesses (its NextSeg rules 3 and 4)
//!   are for tails, which RACK's probe covers.
//! - A recovery has one reduction of the window, spread over it by the rate at which data is delivered. BBR has its own
//!   rule, and takes the rate of delivered packets, SACKed ones included.
//! - After a timeout everything that has not arrived counts as lost, and slow start sends it.
//!
//! One event serves three timers: retransmission timeout, reordering, and probe. Memory is one entry per segment in
//! flight and is freed with the flow; nothing is allocated per packet.

use slipstream_base::width::to_u32;

use super::rack::Rack;
use super::scoreboard::{Delivered, Scoreboard};
use super::{PACE, TcpSender};
use crate::event::{CE, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::net::Net;
use crate::sack::{BLOCKS_MAX, SackOption};
use crate::transport::congestion::{AckInfo, Control, Delivery, Phase, Window};

/// State of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    /// Losses were found by ACKs.
    Recovery,
    /// After a timeout.
    Loss,
}

/// A timer besides the retransmission timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Early {
    /// A segment is lost unless it arrives by then.
    Reordering,
    Probe,
}

/// Proportional rate reduction (RFC 9937 section 6), bytes since the start of the recovery.
#[derive(Clone, Copy, Debug, Default)]
struct Reduction {
    /// In flight at the start (RecoverFS).
    flight: u64,
    delivered: u64,
    sent: u64,
}

impl Reduction {
    /// Sets the window so that it allows what this ACK lets be sent. `safe`: the ACK acknowledges data in order and
    /// shows no further loss. Otherwise no more is sent than was delivered, so that a path which loses retransmissions
    /// too is not kept full.
    fn limit(&mut self, delivered: u64, in_flight: u64, safe: bool, w: &mut Window) {
        self.delivered += delivered;
        let mut room = if in_flight > w.ssthresh {
            let share = u128::from(self.delivered) * u128::from(w.ssthresh);
            let share = share.div_ceil(u128::from(self.flight.max(1)));
            u64::try_from(share)
                .unwrap_or(u64::MAX)
                .saturating_sub(self.sent)
        } else {
            let most = self.delivered.saturating_sub(self.sent).max(delivered);
            let most = if safe { most + w.mss } else { most };
            most.min(w.ssthresh - in_flight)
        };
        if self.sent == 0 {
            // The first retransmission is always sent.
            room = room.max(w.mss);
        }
        w.cwnd = in_flight + room;
    }
}

/// Recovery state of a sender with SACK.
#[derive(Debug)]
pub(super) struct Selective {
    pub(super) board: Scoreboard,
    /// `None`: RFC 6675's rules only.
    rack: Option<Rack>,
    mode: Mode,
    /// The recovery is over when all bytes below are acknowledged (RecoveryPoint).
    recover: u64,
    reduction: Reduction,
    /// When the early timer expires (`u64::MAX`: off).
    early_at: u64,
    early: Early,
}

impl Selective {
    pub(super) fn new(rack: bool) -> Self {
        Selective {
            board: Scoreboard::default(),
            rack: rack.then(Rack::new),
            mode: Mode::Open,
            recover: 0,
            reduction: Reduction::default(),
            early_at: u64::MAX,
            early: Early::Probe,
        }
    }

    /// Marks losses. Returns the bytes marked.
    fn judge(&mut self, now: u64, mss: u64, srtt: u64) -> u64 {
        if self.board.is_in_order() {
            if self.early == Early::Reordering {
                self.early_at = u64::MAX;
            }
            return 0;
        }
        let Some(rack) = &self.rack else {
            return self.board.judge_by_count(mss);
        };
        let recovering = self.mode != Mode::Open;
        let limit = rack.limit(recovering, self.board.sacked_segments(), srtt);
        let (lost, wait) = limit.map_or((0, None), |limit| self.board.judge_by_time(now, limit));
        match wait {
            Some(wait) => (self.early, self.early_at) = (Early::Reordering, now + wait),
            None if self.early == Early::Reordering => self.early_at = u64::MAX,
            None => {}
        }
        lost
    }
}

/// An ACK as a sender with SACK reads it.
struct Ack {
    to: u64,
    blocks: [(u64, u64); BLOCKS_MAX],
    count: usize,
    duplicate: bool,
    has_option: bool,
}

impl Ack {
    fn read(event: NetEvent, una: u64, fabric: &mut ShardPorts) -> Ack {
        let mut ack = Ack {
            to: 0,
            blocks: [(0, 0); BLOCKS_MAX],
            count: 0,
            duplicate: false,
            has_option: event.is_sack(),
        };
        if !event.is_sack() {
            ack.to = widen(event.seq, una);
            return ack;
        }
        let SackOption {
            ack: to,
            blocks,
            duplicate,
        } = fabric.sacks.take(event.seq);
        ack.to = widen(to, una);
        ack.duplicate = duplicate;
        for (from, to) in blocks {
            if from != to {
                ack.blocks[ack.count] = (widen(from, una), widen(to, una));
                ack.count += 1;
            }
        }
        ack
    }
}

impl TcpSender {
    /// Handles an ACK with SACK. True if it completes the flow.
    pub(super) fn on_selective_ack(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        let Some(mut s) = self.selective.take() else {
            return false;
        };
        let mut ack = Ack::read(event, self.una, fabric);
        let flight = self.nxt - self.una;
        let acked = ack.to.saturating_sub(self.una);
        self.una = self.una.max(ack.to);
        let before = s.board.in_flight();
        let delivered = s.board.on_ack(self.una, &mut ack.blocks[..ack.count]);
        if let Some(at) = delivered.measured_from {
            self.rtt.sample(now - at);
        } else if acked > 0 {
            self.rtt.on_unmeasured();
        }
        let mut repaired = false;
        if let Some(rack) = &mut s.rack {
            rack.on_delivery(now, &delivered);
            if ack.duplicate {
                rack.on_duplicate(self.una, self.nxt);
            }
            repaired = rack.probe_repaired(ack.to, ack.duplicate, acked == 0 && !ack.has_option);
        }
        let lost = if delivered.bytes > 0 {
            s.judge(now, self.w.mss, self.rtt.srtt)
        } else {
            0
        };
        let mode = s.mode;
        let phase = self.step_mode(now, &mut s, lost > 0);
        if repaired && mode == Mode::Open && s.mode == Mode::Open {
            // RFC 8985 section 7.4.2: the probe was the retransmission; only the reaction is left.
            self.control.on_loss(&mut self.w, flight);
            if !self.paced {
                self.w.cwnd = self.w.ssthresh;
            }
        }
        self.adjust_window(
            now,
            &mut s,
            &delivered,
            AckChange {
                acked,
                flight,
                before,
                lost,
                phase,
                mode,
                marked: event.has(CE),
            },
        );
        if self.nxt == self.una {
            self.deadline = u64::MAX;
            s.early_at = u64::MAX;
        } else if acked > 0 || phase == Phase::Begins {
            self.deadline = now + self.rtt.rto;
        }
        if delivered.bytes > 0 {
            self.set_probe(now, &mut s);
        }
        self.send_selective(now, &mut s, fabric, net);
        let done = self.check_end(now);
        if done {
            s.board.release();
        }
        self.selective = Some(s);
        done
    }

    /// Begins and ends recoveries.
    fn step_mode(&mut self, now: u64, s: &mut Selective, lost: bool) -> Phase {
        let mut phase = Phase::Same;
        if s.mode != Mode::Open && self.una >= s.recover {
            if s.mode == Mode::Recovery && !self.paced {
                self.w.cwnd = self.w.ssthresh;
            }
            s.mode = Mode::Open;
            if let Some(rack) = &mut s.rack {
                rack.on_recovered();
            }
            phase = Phase::Ends;
        }
        // What is lost in a recovery is sent again within it.
        if s.mode == Mode::Open && (lost || s.board.lost_bytes() > 0) {
            let flight = self.nxt - self.una;
            self.control.on_loss(&mut self.w, flight);
            s.mode = Mode::Recovery;
            s.recover = self.nxt;
            s.reduction = Reduction::default();
            if let Some(rack) = &mut s.rack {
                rack.forget_probe();
            }
            self.count.fast_retransmits += 1;
            self.deadline = now + self.rtt.rto;
            phase = Phase::Begins;
        }
        phase
    }

    /// The reaction of window and congestion control to an ACK.
    fn adjust_window(
        &mut self,
        now: u64,
        s: &mut Selective,
        delivered: &Delivered,
        ack: AckChange,
    ) {
        if let Control::Bbr(bbr) = &mut self.control {
            // An ACK that returns sooner than possible is one of the original, with another state of the sampler.
            let early = delivered.newest.is_some_and(|(sent, resent)| {
                resent
                    && s.rack
                        .as_ref()
                        .is_some_and(|rack| now - sent.at < rack.rtt_min())
            });
            let delivery = Delivery {
                bytes: delivered.bytes,
                sample: delivered.sample.filter(|_| !early),
                before: ack.before,
                in_flight: s.board.in_flight(),
                lost: ack.lost,
                phase: ack.phase,
            };
            bbr.on_delivery(now, delivery, &mut self.w);
            return;
        }
        match s.mode {
            Mode::Recovery => {
                if ack.phase == Phase::Begins {
                    s.reduction.flight = ack.before;
                }
                let safe = ack.acked > 0 && ack.lost == 0;
                s.reduction
                    .limit(delivered.bytes, s.board.in_flight(), safe, &mut self.w);
            }
            // The ACK that ends a recovery sets the window to the threshold.
            Mode::Open if ack.mode == Mode::Recovery => {}
            Mode::Open | Mode::Loss => {
                if ack.acked > 0 {
                    let info = AckInfo {
                        now,
                        acked: ack.acked,
                        srtt: self.rtt.srtt,
                        una: self.una,
                        nxt: self.nxt,
                        marked: ack.marked,
                        flight: ack.flight,
                    };
                    self.control.on_ack(&mut self.w, info);
                }
                if ack.marked && self.una > self.mark_end && s.mode == Mode::Open {
                    self.mark_end = self.nxt;
                    self.control
                        .on_congestion_mark(&mut self.w, self.nxt - self.una);
                }
            }
        }
    }

    /// RFC 8985 section 7.2: schedules a probe, unless a recovery is under way.
    fn set_probe(&self, now: u64, s: &mut Selective) {
        if s.early == Early::Reordering && s.early_at != u64::MAX {
            return;
        }
        s.early_at = u64::MAX;
        let Some(rack) = s
            .rack
            .as_ref()
            .filter(|_| s.mode == Mode::Open && self.nxt > self.una)
        else {
            return;
        };
        if let Some(wait) = rack.probe_timeout(self.rtt.srtt, s.board.len() == 1, 0)
            && now + wait < self.deadline
        {
            (s.early, s.early_at) = (Early::Probe, now + wait);
        }
    }

    /// Sends lost segments, then new ones, as far as the window allows.
    pub(super) fn send_selective(
        &mut self,
        now: u64,
        s: &mut Selective,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        if self.app.is_some() {
            self.take_from_app(now);
            if self.nxt == self.una {
                self.control.on_idle_end(now);
            }
        }
        let mut is_new = false;
        loop {
            let in_flight = s.board.in_flight();
            // At least one segment, or an idle sender would wait forever for an ACK.
            let room = self.w.cwnd.max(self.w.mss).saturating_sub(in_flight);
            let lost = s.board.next_lost();
            let next = match lost {
                Some(index) => u64::from(s.board.segment(index).size),
                None => self.w.mss.min(self.limit - self.nxt),
            };
            let size = if next <= room {
                next
            } else if lost.is_some() || self.whole_segments || s.mode != Mode::Open {
                // A recovery has room for a few bytes after each ACK.
                0
            } else {
                room
            };
            if size == 0 || self.paced && self.must_wait(now, fabric) {
                break;
            }
            s.reduction.sent += size;
            if let Some(index) = lost {
                self.resend(now, s, index, fabric, net);
            } else {
                self.send_new(now, s, size, fabric, net);
                is_new = true;
            }
        }
        if self.nxt > self.una {
            if self.deadline == u64::MAX {
                self.deadline = now + self.rtt.rto;
            }
            if is_new {
                self.set_probe(now, s);
            }
            self.arm_until(self.deadline.min(s.early_at), fabric);
        }
        self.await_app(fabric);
    }

    fn send_new(
        &mut self,
        now: u64,
        s: &mut Selective,
        size: u64,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        let sample = match &mut self.control {
            Control::Bbr(bbr) => {
                Some(bbr.on_segment(now, self.nxt + size, size, s.board.in_flight(), &self.w))
            }
            _ => None,
        };
        s.board.push(now, self.nxt + size, to_u32(size), sample);
        self.put(now, self.nxt, to_u32(size), fabric, net);
        self.nxt += size;
        self.max = self.nxt;
    }

    fn resend(
        &mut self,
        now: u64,
        s: &mut Selective,
        index: usize,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        let segment = *s.board.segment(index);
        let sample = match &mut self.control {
            Control::Bbr(bbr) => Some(bbr.on_segment(
                now,
                segment.end,
                u64::from(segment.size),
                s.board.in_flight(),
                &self.w,
            )),
            _ => None,
        };
        s.board.resend(now, index, sample);
        self.count.retransmitted += 1;
        self.put(
            now,
            segment.end - u64::from(segment.size),
            segment.size,
            fabric,
            net,
        );
    }

    /// Handles the timer event.
    pub(super) fn on_selective_timer(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        let Some(mut s) = self.selective.take() else {
            return;
        };
        if event.seq == PACE {
            self.pace_at = 0;
            self.send_selective(now, &mut s, fabric, net);
        } else if now == self.timer_at {
            self.timer_at = 0;
            if self.nxt > self.una {
                self.on_due(now, &mut s, fabric, net);
            }
        }
        self.selective = Some(s);
    }

    fn on_due(&mut self, now: u64, s: &mut Selective, fabric: &mut ShardPorts, net: &Net) {
        if s.early_at <= now {
            s.early_at = u64::MAX;
            if s.early == Early::Probe {
                self.send_probe(now, s, fabric, net);
            } else {
                let before = s.board.in_flight();
                let lost = s.judge(now, self.w.mss, self.rtt.srtt);
                let mode = s.mode;
                let phase = self.step_mode(now, s, lost > 0);
                let change = AckChange {
                    acked: 0,
                    flight: self.nxt - self.una,
                    before,
                    lost,
                    phase,
                    mode,
                    marked: false,
                };
                self.adjust_window(now, s, &Delivered::default(), change);
            }
        } else if self.deadline <= now {
            self.on_selective_timeout(now, s);
        }
        self.send_selective(now, s, fabric, net);
    }

    /// RFC 8985 section 7.3: new data, or else the last segment again.
    fn send_probe(&mut self, now: u64, s: &mut Selective, fabric: &mut ShardPorts, net: &Net) {
        let size = self.w.mss.min(self.limit - self.nxt);
        let resent = size == 0;
        if resent {
            let Some(index) = s.board.last_outstanding() else {
                return;
            };
            self.resend(now, s, index, fabric, net);
        } else {
            self.send_new(now, s, size, fabric, net);
        }
        if let Some(rack) = &mut s.rack {
            rack.on_probe(self.nxt, resent);
        }
        self.deadline = now + self.rtt.rto;
    }

    /// The retransmission timer expired.
    fn on_selective_timeout(&mut self, now: u64, s: &mut Selective) {
        self.count.timeouts += 1;
        // Without what was lost before: a timeout after another would else restore the threshold of the first.
        let flight = s.board.in_flight();
        let repeated = self.rtt.back_off(self.una);
        match &mut self.control {
            Control::Bbr(bbr) => bbr.on_selective_timeout(&self.w),
            control => control.on_timeout(&mut self.w, flight, repeated),
        }
        let until = match &s.rack {
            Some(rack) => rack
                .limit(true, s.board.sacked_segments(), self.rtt.srtt)
                .map_or(now, |limit| now.saturating_sub(limit.wait_ns)),
            None => now,
        };
        s.board.lose_all(until);
        // One segment goes out, beside those that may still arrive.
        self.w.cwnd = s.board.in_flight() + self.w.mss;
        s.mode = Mode::Loss;
        s.recover = self.nxt;
        s.early_at = u64::MAX;
        if let Some(rack) = &mut s.rack {
            rack.forget_probe();
        }
        self.deadline = u64::MAX;
    }
}

/// What an ACK changed, for the window.
#[derive(Clone, Copy, Debug)]
struct AckChange {
    /// Newly acknowledged in order, bytes.
    acked: u64,
    /// Unacknowledged, and in flight, before it.
    flight: u64,
    before: u64,
    /// Newly marked as lost.
    lost: u64,
    phase: Phase,
    /// The mode before it.
    mode: Mode,
    marked: bool,
}
