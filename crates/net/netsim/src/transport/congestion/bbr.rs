//! BBR, version 1: a model of the path (bottleneck rate and minimum round-trip time) sets pacing
//! and window (Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 2016;
//! draft-cardwell-iccrg-bbr-congestion-control-00, called "the draft" below).
//!
//! Losses do not change the model. During recovery, the window follows section 4.2.3.4 of the
//! draft. Delivery rates are measured as in draft-cheng-iccrg-delivery-rate-estimation-00; a
//! duplicate ACK counts as one delivered segment. After a timeout no duplicate ACK counts until
//! data that is sent for the first time is acknowledged.

use std::collections::VecDeque;

use slipstream_base::mix;
use slipstream_base::width::{floor_u64, to_usize};

use super::{Algorithm, Window};
use crate::scenario::Congestion;

pub(super) const ALGORITHM: Algorithm =
    Algorithm::new(&["BBR", "TCPBBR"], "TCP BBR", &[], |_| Congestion::Bbr);

/// 2/ln 2, the smallest gain that doubles the rate per round (the draft, section 4.3.1.1).
const HIGH_GAIN: f64 = 2.885_39;
/// Gains of a cycle of probing (section 4.3.3: one up, one down, six level).
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
/// Window over the bandwidth-delay product while probing for bandwidth (section 4.2.3.2).
const CWND_GAIN: f64 = 2.0;
/// Length of the bandwidth filter, rounds (section 4.1.1.3: BtlBwFilterLen).
const FILTER_ROUNDS: u64 = 10;
/// Lifetime of the minimum round-trip time, ns (section 4.1.2: RTpropFilterLen, 10 s).
const RTT_LIFE_NS: u64 = 10_000_000_000;
/// Minimum time with a small window to measure it again, ns (section 4.3.4: 200 ms).
const PROBE_RTT_NS: u64 = 200_000_000;
/// Minimum window, segments (section 4.2.3.1: BBRMinPipeCwnd).
const WINDOW_MIN: u64 = 4;
/// The pipe is full if the rate grew by less than a quarter in this many rounds (section 4.3.2.1).
const FULL_ROUNDS: u32 = 3;

/// Losses that are repaired one per round trip while new data is sent at the full rate. If there
/// are more, the timer ends the recovery, and all data is sent again, which repairs them at once.
const REPAIRS_MAX: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Startup,
    Drain,
    ProbeBandwidth,
    ProbeRtt,
}

/// State of recovery at an ACK of new data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recovery {
    /// No missing segment is known.
    Nothing,
    /// The retransmission arrived, and the next segment is missing too.
    Partly,
    /// All missing segments have arrived.
    Done,
}

/// With SACK: how an ACK changes the recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Same,
    Begins,
    Ends,
}

/// With SACK: what an ACK, or a timer that shows losses, reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivery {
    /// Bytes that arrived, each counted once.
    pub(crate) bytes: u64,
    /// State of the sampler when the last sent of them was sent.
    pub(crate) sample: Option<Sent>,
    /// Bytes in flight before and after.
    pub(crate) before: u64,
    pub(crate) in_flight: u64,
    /// Bytes that were found to be lost.
    pub(crate) lost: u64,
    pub(crate) phase: Phase,
}

/// A packet in flight, for the delivery rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    end: u64,
    at: u64,
    /// Send time of the first packet of this flight.
    first_at: u64,
    delivered: u64,
    delivered_at: u64,
}

/// Whether start-up has filled the pipe (section 4.3.2.1).
#[derive(Clone, Debug, Default)]
struct Pipe {
    /// The rate that the next rounds must exceed by a quarter, bits/s.
    rate: f64,
    /// Rounds that did not.
    rounds: u32,
    is_full: bool,
}

/// A phase with a small window, to measure the round-trip time (section 4.3.4).
#[derive(Clone, Debug, Default)]
struct ProbeRtt {
    /// Its earliest end; 0: the window is not small yet.
    end: u64,
    /// A round has passed with the small window.
    round_over: bool,
    /// The window before; 0: not in this phase.
    window_before: u64,
}

/// The model and its state.
#[derive(Clone, Debug)]
pub(crate) struct Bbr {
    state: State,
    sent: VecDeque<Sent>,
    first_at: u64,
    delivered: u64,
    delivered_at: u64,
    /// Bytes delivered according to duplicate ACKs, not yet acknowledged. Always `delivered` less
    /// the acknowledged bytes.
    credited: u64,
    /// Bytes in flight when the loss was detected, and those of them that are known to be lost and
    /// have not been retransmitted.
    flight_at_loss: u64,
    missing: u64,
    /// Shortest segment since no data was in flight, bytes: what a duplicate ACK stands for.
    shortest: u64,
    /// From a timeout until data that was first sent after it is acknowledged. Duplicate ACKs may
    /// then stem from copies of data that had arrived.
    collapsed: bool,
    /// The sender has SACK.
    selective: bool,
    /// Recent maxima of (round, bits/s), in falling order.
    rates: VecDeque<(u64, f64)>,
    round: u64,
    round_end: u64,
    round_start: bool,
    /// Minimum round-trip time, ns (0: none yet), and when it was measured.
    rtt_min: u64,
    rtt_at: u64,
    pipe: Pipe,
    pacing_gain: f64,
    cycle: usize,
    cycle_at: u64,
    probe_rtt: ProbeRtt,
    /// In recovery.
    pub(crate) recovering: bool,
    /// The first round of recovery: one packet is sent per delivered packet (packet_conservation).
    conserving: bool,
    /// A loss was detected since the last ACK of new data.
    lost: bool,
    /// The window before recovery (prior_cwnd).
    prior: u64,
    seed: u64,
    /// When the next packet may be sent.
    pub(crate) next_send: u64,
    /// Bits/s.
    pub(crate) pacing_rate: f64,
    /// The initial window, bytes.
    window_first: u64,
}

impl Bbr {
    pub(crate) fn new(seed: u64) -> Self {
        Bbr {
            state: State::Startup,
            sent: VecDeque::new(),
            first_at: 0,
            delivered: 0,
            delivered_at: 0,
            credited: 0,
            flight_at_loss: 0,
            missing: 0,
            shortest: u64::MAX,
            collapsed: false,
            selective: false,
            rates: VecDeque::new(),
            round: 0,
            round_end: 0,
            round_start: false,
            rtt_min: 0,
            rtt_at: 0,
            pipe: Pipe::default(),
            pacing_gain: HIGH_GAIN,
            cycle: 2,
            cycle_at: 0,
            probe_rtt: ProbeRtt::default(),
            recovering: false,
            conserving: false,
            lost: false,
            prior: 0,
            seed,
            next_send: 0,
            pacing_rate: 0.0,
            window_first: 0,
        }
    }

    /// Bottleneck rate, bits/s.
    pub(crate) fn rate(&self) -> f64 {
        self.rates.front().map_or(0.0, |r| r.1)
    }

    /// Bytes that ACKs of both kinds have reported.
    #[cfg(test)]
    pub(crate) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// `gain` times the bandwidth-delay product, bytes; `None` before the first measurement.
    fn product(&self, gain: f64) -> Option<f64> {
        (self.rtt_min > 0 && self.rate() > 0.0)
            .then(|| gain * self.rate() * self.rtt_min as f64 / 8e9)
    }

    /// BBRInflight: the bytes in flight at `gain`, with three quanta for aggregation (section
    /// 4.2.3.2); `None` before the first measurement.
    fn inflight(&self, gain: f64, w: &Window) -> Option<u64> {
        let product = self.product(gain)?;
        Some(floor_u64(product) + 3 * self.quantum(w))
    }

    /// Records `size` bytes of data up to `end`, sent while `flight` were in flight. The rate is
    /// one of delivered data, so pacing does not count headers either.
    pub(crate) fn on_sent(&mut self, now: u64, end: u64, size: u64, flight: u64, w: &Window) {
        if flight == 0 {
            self.first_at = now;
            self.delivered_at = now;
            self.shortest = u64::MAX;
        }
        self.shortest = self.shortest.min(size);
        if self.sent.back().is_none_or(|s| s.end < end) {
            self.sent.push_back(Sent {
                end,
                at: now,
                first_at: self.first_at,
                delivered: self.delivered,
                delivered_at: self.delivered_at,
            });
        }
        self.pace(now, size, w);
    }

    /// Sets when the packet after one of `size` bytes may be sent.
    fn pace(&mut self, now: u64, size: u64, w: &Window) {
        if self.pacing_rate == 0.0 {
            // The draft, section 4.2.1: before a sample, the round trip is assumed to take 1 ms.
            self.window_first = w.cwnd;
            self.pacing_rate = HIGH_GAIN * w.cwnd as f64 * 8.0 / 1e-3;
        }
        let gap = floor_u64((size as f64 * 8e9 / self.pacing_rate).ceil());
        self.next_send = self.next_send.max(now) + gap;
    }

    /// With SACK: records a transmission of `size` bytes up to `end`, while `in_flight` bytes were. Returns what its
    /// delivery needs.
    pub(crate) fn on_segment(
        &mut self,
        now: u64,
        end: u64,
        size: u64,
        in_flight: u64,
        w: &Window,
    ) -> Sent {
        if in_flight == 0 {
            self.first_at = now;
            self.delivered_at = now;
        }
        self.pace(now, size, w);
        Sent {
            end,
            at: now,
            first_at: self.first_at,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
        }
    }

    /// With SACK: takes an ACK; sets rate and window.
    pub(crate) fn on_delivery(&mut self, now: u64, d: Delivery, w: &mut Window) {
        self.selective = true;
        self.round_start = false;
        if d.bytes > 0 {
            self.delivered += d.bytes;
            self.delivered_at = now;
        }
        if let Some(sent) = d.sample {
            self.first_at = sent.at;
            self.measure(now, sent);
        }
        self.lost |= d.lost > 0;
        let round_start = self.round_start;
        self.move_on(now, d.in_flight, d.before, w);
        self.set_pacing();
        match d.phase {
            Phase::Begins => {
                // Section 4.2.3.4: for one round, a packet is sent per delivered packet.
                self.save_window(w);
                self.conserving = true;
                self.round_end = self.delivered;
                w.cwnd = d.in_flight + d.bytes.max(w.mss);
            }
            Phase::Ends => {
                (self.recovering, self.conserving) = (false, false);
                w.cwnd = w.cwnd.max(self.prior);
                self.set_window(0, w);
            }
            Phase::Same if self.recovering => {
                self.conserving &= !round_start;
                w.cwnd = w.cwnd.saturating_sub(d.lost).max(w.mss);
                if self.conserving {
                    w.cwnd = w.cwnd.max(d.in_flight + d.bytes);
                } else {
                    self.set_window(d.bytes, w);
                }
            }
            Phase::Same => self.set_window(d.bytes, w),
        }
    }

    /// With SACK: handles a timeout; the caller sets the window to one segment.
    pub(crate) fn on_selective_timeout(&mut self, w: &Window) {
        self.save_window(w);
        self.conserving = false;
    }

    /// The part of `sent` unacknowledged bytes that is still in flight. After a timeout, data that
    /// duplicate ACKs reported is sent again, so it counts.
    pub(crate) fn in_flight(&self, sent: u64) -> u64 {
        if self.collapsed {
            sent
        } else {
            sent.saturating_sub(self.credited + self.missing)
        }
    }

    /// Handles a duplicate ACK: a packet has been delivered. `sent` bytes are unacknowledged.
    pub(crate) fn on_duplicate(&mut self, now: u64, sent: u64, w: &mut Window) {
        if self.collapsed {
            // RFC 5681 section 3.1: one segment until the retransmission is acknowledged. Counting
            // copies as deliveries would send ever more of them.
            return;
        }
        // The first unacknowledged segment is missing.
        let most = sent.saturating_sub(w.mss).saturating_sub(self.credited);
        let segment = self.shortest.min(most);
        self.delivered += segment;
        self.credited += segment;
        self.delivered_at = now;
        if self.conserving {
            w.cwnd = w.cwnd.max(self.in_flight(sent) + w.mss);
        } else if self.recovering {
            self.set_window(segment, w);
        }
    }

    /// Handles a loss shown by duplicate ACKs. Its retransmission may be sent, and then one packet
    /// per delivered packet, for one round trip (section 4.2.3.4).
    pub(crate) fn on_loss(&mut self, sent: u64, w: &mut Window) {
        self.save_window(w);
        self.conserving = true;
        self.lost = true;
        self.flight_at_loss = sent;
        self.missing = 0;
        // packets_in_flight without the lost packet, plus the packet that caused this ACK.
        w.cwnd = self.in_flight(sent).saturating_sub(w.mss) + w.mss;
    }

    /// Handles a timeout: all data in flight counts as lost; the caller sets the window to one
    /// segment.
    pub(crate) fn on_timeout(&mut self, w: &Window) {
        self.save_window(w);
        self.conserving = false;
        self.collapsed = true;
        self.missing = 0;
        self.sent.clear();
    }

    /// Whether the losses can be repaired one per round trip. (A probing phase at 1.25 loses fewer,
    /// start-up more.)
    pub(crate) fn repairs_singly(&self, w: &Window) -> bool {
        self.missing <= REPAIRS_MAX * w.mss
    }

    /// BBRSaveCwnd.
    fn save_window(&mut self, w: &Window) {
        self.prior = if self.recovering || self.state == State::ProbeRtt {
            self.prior.max(w.cwnd).max(self.probe_rtt.window_before)
        } else {
            w.cwnd
        };
        self.recovering = true;
    }

    /// Handles an ACK of `acked` new bytes up to `una`, with `sent` bytes left unacknowledged; sets
    /// rate and window. `first_sent`: it covers data that had not been sent before the last loss.
    pub(crate) fn on_ack(
        &mut self,
        now: u64,
        (acked, una, sent): (u64, u64, u64),
        w: &mut Window,
        recovery: Recovery,
        first_sent: bool,
    ) {
        // The segment that caused this ACK is new; duplicate ACKs may have counted the others.
        self.missing = match recovery {
            // All packets of the flight have been answered, as the retransmission went out after
            // them. Two of the missing ones are not in the result: this ACK's, and the next, which is
            // retransmitted now.
            Recovery::Partly if self.conserving => self
                .flight_at_loss
                .saturating_sub(self.credited + 2 * w.mss),
            Recovery::Partly => self.missing.saturating_sub(w.mss),
            Recovery::Nothing | Recovery::Done => 0,
        };
        let known = self.credited.min(acked.saturating_sub(w.mss));
        self.credited -= known;
        self.delivered += acked - known;
        self.delivered_at = now;
        let flight = self.in_flight(sent);
        let mut newest = None;
        while let Some(sent) = self.sent.front()
            && sent.end <= una
        {
            newest = self.sent.pop_front();
        }
        if let Some(sent) = newest {
            self.first_at = sent.at;
            self.measure(now, sent);
        }
        self.collapsed &= !first_sent;
        debug_assert_eq!(self.delivered, una + self.credited, "each byte counts once");
        self.move_on(now, flight, flight + acked - known, w);
        self.set_pacing();
        match recovery {
            Recovery::Nothing => self.set_window(acked, w),
            Recovery::Partly => {
                // The retransmission is acknowledged after one round trip, which ends the round of
                // conservation; packets_lost is one.
                self.conserving = false;
                w.cwnd = w.cwnd.saturating_sub(w.mss).max(w.mss);
                self.set_window(acked - known, w);
            }
            Recovery::Done => {
                (self.recovering, self.conserving) = (false, false);
                // BBRRestoreCwnd.
                w.cwnd = w.cwnd.max(self.prior);
                self.set_window(0, w);
            }
        }
    }

    /// Section 4.1: updates the round, the rate and the round-trip time from a packet.
    fn measure(&mut self, now: u64, sent: Sent) {
        self.round_start = sent.delivered >= self.round_end;
        if self.round_start {
            self.round_end = self.delivered;
        }
        if self.collapsed {
            // Karn's algorithm: the sender cannot know which copy arrived, nor when the data beyond a
            // hole did. The filter keeps its rates meanwhile.
            return;
        }
        self.round += u64::from(self.round_start);
        let interval = (now - sent.delivered_at).max(sent.at - sent.first_at);
        let bytes = self.delivered - sent.delivered;
        if interval > 0 && bytes > 0 {
            let rate = bytes as f64 * 8e9 / interval as f64;
            while self.rates.back().is_some_and(|r| r.1 <= rate) {
                self.rates.pop_back();
            }
            self.rates.push_back((self.round, rate));
            while self.rates[0].0 + FILTER_ROUNDS <= self.round {
                self.rates.pop_front();
            }
        }
        let rtt = now - sent.at;
        if self.rtt_min == 0 {
            // Section 4.2.1: the initial window over the round trip, which a handshake would have
            // measured.
            let rate = HIGH_GAIN * self.window_first as f64 * 8e9 / rtt.max(1) as f64;
            self.pacing_rate = self.pacing_rate.min(rate);
        }
        let stale = now > self.rtt_at + RTT_LIFE_NS;
        if self.rtt_min == 0 || rtt <= self.rtt_min || stale {
            if stale && self.rtt_min > 0 && rtt > self.rtt_min && self.state != State::ProbeRtt {
                // Section 4.3.4: no round trip as short for long, so the queue must be drained to
                // measure it.
                self.state = State::ProbeRtt;
                self.pacing_gain = 1.0;
                self.probe_rtt.end = 0;
            }
            self.rtt_min = rtt.max(1);
            self.rtt_at = now;
        }
    }

    /// Section 4.3: the state machine. `before` and `flight` are the bytes in flight before and
    /// after this ACK.
    fn move_on(&mut self, now: u64, flight: u64, before: u64, w: &mut Window) {
        if self.state == State::Startup && self.round_start {
            self.round_start = false;
            let rate = self.rate();
            if rate >= self.pipe.rate * 1.25 {
                self.pipe.rate = rate;
                self.pipe.rounds = 0;
            } else {
                self.pipe.rounds += 1;
                self.pipe.is_full = self.pipe.rounds >= FULL_ROUNDS;
            }
            if self.pipe.is_full {
                self.state = State::Drain;
                self.pacing_gain = 1.0 / HIGH_GAIN;
            }
        }
        let lost = std::mem::take(&mut self.lost);
        match self.state {
            State::Drain if self.inflight(1.0, w).is_some_and(|most| flight <= most) => {
                self.probe_bandwidth(now);
            }
            State::ProbeBandwidth => {
                // Section 4.3.3.2: BBRIsNextCyclePhase.
                let gain = CYCLE[self.cycle];
                let long = now - self.cycle_at > self.rtt_min;
                let next = if gain > 1.0 {
                    long && (lost || self.inflight(gain, w).is_some_and(|most| before >= most))
                } else if gain < 1.0 {
                    long || self.inflight(1.0, w).is_some_and(|most| before <= most)
                } else {
                    long
                };
                if next {
                    self.cycle = (self.cycle + 1) % CYCLE.len();
                    self.cycle_at = now;
                    self.pacing_gain = CYCLE[self.cycle];
                }
            }
            State::ProbeRtt => {
                let least = WINDOW_MIN * w.mss;
                if self.probe_rtt.end == 0 {
                    if self.probe_rtt.window_before == 0 {
                        self.probe_rtt.window_before = if self.recovering {
                            w.cwnd.max(self.prior)
                        } else {
                            w.cwnd
                        };
                    }
                    w.cwnd = w.cwnd.min(least);
                    if flight <= least {
                        self.probe_rtt.end = now + PROBE_RTT_NS;
                        self.probe_rtt.round_over = false;
                        self.round_end = self.delivered;
                        self.round_start = false;
                    }
                } else {
                    self.probe_rtt.round_over |= self.round_start;
                    if self.probe_rtt.round_over && now >= self.probe_rtt.end {
                        self.rtt_at = now;
                        w.cwnd = w.cwnd.max(self.probe_rtt.window_before);
                        self.probe_rtt.window_before = 0;
                        if self.pipe.is_full {
                            self.probe_bandwidth(now);
                        } else {
                            self.state = State::Startup;
                            self.pacing_gain = HIGH_GAIN;
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// Section 4.3.3.1: a cycle begins at any phase but the one that drains.
    fn probe_bandwidth(&mut self, now: u64) {
        self.state = State::ProbeBandwidth;
        let phase = 1 + to_usize(mix::below(mix::draw(self.seed, self.round), 7));
        self.cycle = if phase == 1 { 0 } else { phase };
        self.cycle_at = now;
        self.pacing_gain = CYCLE[self.cycle];
    }

    fn set_pacing(&mut self) {
        let mut gain = self.pacing_gain;
        if self.recovering && self.pipe.is_full && !self.selective {
            // Without SACK, a round trip repairs one loss. Probing would cause more of them.
            gain = gain.min(1.0);
        }
        let rate = gain * self.rate();
        // Section 4.2.1: during start-up, an early low sample must not slow the flow down.
        if rate > 0.0 && (self.pipe.is_full || rate > self.pacing_rate) {
            self.pacing_rate = rate;
        }
    }

    /// Section 4.2.3: the window approaches the gain times the product, with three quanta for
    /// aggregation.
    fn set_window(&mut self, acked: u64, w: &mut Window) {
        if self.state == State::ProbeRtt {
            w.cwnd = w.cwnd.min(WINDOW_MIN * w.mss);
            return;
        }
        let gain = if self.pipe.is_full {
            CWND_GAIN
        } else {
            HIGH_GAIN
        };
        w.cwnd = match self.inflight(gain, w) {
            Some(target) if self.pipe.is_full => (w.cwnd + acked).min(target),
            Some(target) if w.cwnd >= target => w.cwnd,
            _ => w.cwnd + acked,
        }
        .max(WINDOW_MIN * w.mss);
    }

    /// Section 4.2.2: bytes sent at once.
    fn quantum(&self, w: &Window) -> u64 {
        if self.pacing_rate < 1.2e6 {
            w.mss
        } else if self.pacing_rate < 24e6 {
            2 * w.mss
        } else {
            floor_u64(self.pacing_rate * 1e-3 / 8.0).min(65_536)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single flow on a pipe of 1 segment per ms and a round trip of 20 ms, ACK by ACK.
    #[test]
    fn it_finds_rate_and_round_trip_time() {
        const MSS: u64 = 1_000;
        let mut w = Window {
            cwnd: 10 * MSS,
            ssthresh: u64::MAX,
            mss: MSS,
        };
        let mut b = Bbr::new(1);
        let (mut nxt, mut una, mut free_at) = (0, 0, 0u64);
        let mut acks: VecDeque<(u64, u64)> = VecDeque::new();
        let mut now = 0;
        while now < 3_000_000_000 {
            // The next event: an ACK arrives, or pacing releases a packet.
            let can_send = nxt - una < w.cwnd;
            let ack_at = acks.front().map_or(u64::MAX, |a| a.0);
            if can_send && b.next_send.max(now) <= ack_at {
                now = b.next_send.max(now);
                b.on_sent(now, nxt + MSS, MSS, nxt - una, &w);
                nxt += MSS;
                free_at = free_at.max(now) + 1_000_000;
                acks.push_back((free_at + 19_000_000, nxt));
            } else {
                let (at, upto) = acks.pop_front().expect("something is in flight");
                now = at;
                let acked = upto - una;
                una = upto;
                b.on_ack(
                    now,
                    (acked, una, nxt - una),
                    &mut w,
                    Recovery::Nothing,
                    true,
                );
            }
        }
        // 1,000 bytes per ms: 8 Mb/s; one segment and 19 ms.
        assert!((b.rate() - 8e6).abs() < 0.1e6, "{}", b.rate());
        assert_eq!(b.rtt_min, 20_000_000);
        assert_eq!(b.state, State::ProbeBandwidth);
        // Twice the product of 20 segments, and three quanta of two segments.
        assert!((44..=48).contains(&(w.cwnd / MSS)), "{}", w.cwnd);
        // Nearly the capacity of the pipe.
        assert!(una > 2_900 * MSS, "{una}");
    }

    #[test]
    fn a_round_of_recovery_sends_what_is_delivered() {
        const MSS: u64 = 1_000;
        let mut w = Window {
            cwnd: 40 * MSS,
            ssthresh: u64::MAX,
            mss: MSS,
        };
        let mut b = Bbr::new(1);
        // Twenty segments are sent; the first and the eleventh are lost.
        let (mut una, mut nxt) = (0, 20 * MSS);
        for end in 1..=20 {
            b.on_sent(end, end * MSS, MSS, (end - 1) * MSS, &w);
        }
        for _ in 0..3 {
            b.on_duplicate(1_000, nxt - una, &mut w);
        }
        b.on_loss(nxt - una, &mut w);
        // Sixteen are in flight, and the retransmission makes seventeen.
        assert_eq!(w.cwnd, 17 * MSS);
        assert_eq!(b.in_flight(nxt - una), 17 * MSS);
        // Fifteen more arrive: each releases one new segment.
        for _ in 0..15 {
            b.on_duplicate(1_000, nxt - una, &mut w);
            assert_eq!(w.cwnd - b.in_flight(nxt - una), MSS);
            nxt += MSS;
        }
        assert_eq!(w.cwnd, 17 * MSS);
        // The retransmission: ten are acknowledged, nine of which duplicate ACKs had counted. The
        // window loses a segment for the next hole, and grows by the new one.
        una = 10 * MSS;
        let acked = (10 * MSS, una, nxt - una);
        b.on_ack(2_000, acked, &mut w, Recovery::Partly, false);
        assert_eq!(w.cwnd, 17 * MSS);
        b.on_duplicate(2_000, nxt - una, &mut w);
        assert_eq!(w.cwnd, 18 * MSS, "no longer conserving");
        // Recovery is complete: the window is restored.
        una = nxt;
        b.on_ack(3_000, (25 * MSS, una, 0), &mut w, Recovery::Done, false);
        assert_eq!(w.cwnd, 40 * MSS);
        // After a timeout too, and a second one does not overwrite the saved window.
        b.on_timeout(&w);
        w.cwnd = MSS;
        b.on_timeout(&w);
        una += MSS;
        b.on_ack(9_000, (MSS, una, 0), &mut w, Recovery::Done, false);
        assert_eq!(w.cwnd, 40 * MSS);
    }
}
