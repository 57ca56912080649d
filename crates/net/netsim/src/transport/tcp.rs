//! TCP: cumulative ACKs, one per packet; NewReno recovery; one lazy timer per flow.

mod rack;
mod receiver;
mod scoreboard;
mod selective;

use slipstream_base::width::{low_u32, to_u32};

use crate::event::{CE, ECT, EventKind, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};
use crate::step::Step;
use crate::transport::congestion::{AckInfo, Control, Recovery, Window};
use crate::transport::rtt::RttEstimator;
use crate::transport::{Paced, SendCount, SenderState};

pub(crate) use receiver::TcpReceiver;
use selective::Selective;

/// Duplicate ACKs that indicate a loss (RFC 5681 section 3.2).
const DUPLICATES: u32 = 3;
/// `seq` of a timer event that releases the next paced packet.
const PACE: u32 = 1;

#[derive(Debug)]
pub(crate) struct TcpSender {
    pub(crate) w: Window,
    una: u64,
    nxt: u64,
    /// End of all data sent so far.
    max: u64,
    /// Bytes that the application has submitted.
    limit: u64,
    row: u32,
    rows: u32,
    me: Step,
    header: u32,
    flags: u32,
    duplicates: u32,
    recovering: bool,
    /// A partial ACK has arrived in this recovery.
    partial: bool,
    started: bool,
    /// Whether segments shorter than the MSS are avoided while more data waits (sender silly window
    /// avoidance).
    whole_segments: bool,
    /// BBR: whether packets are paced, and when the next pacing event fires (0: none is scheduled).
    paced: bool,
    pace_at: u64,
    /// RFC 6582's `recover`, plus one; 0 before the first loss.
    recover: u64,
    rtt: RttEstimator,
    /// When the timer expires (`u64::MAX`: off), and when its event fires (0: none is scheduled).
    deadline: u64,
    timer_at: u64,
    /// Further marks are ignored until this byte is acknowledged.
    mark_end: u64,
    pub(crate) control: Control,
    app: Option<Box<Paced>>,
    tick_at: u64,
    /// Recovery with SACK; `None`: by duplicate ACKs and go-back-N.
    selective: Option<Box<Selective>>,
    pub(crate) count: SendCount,
    pub(crate) flow: u32,
    pub(crate) start: u64,
    /// When the last byte was acknowledged; 0: not yet.
    pub(crate) end: u64,
}

/// Properties of a sender when it is created.
#[derive(Debug)]
pub(crate) struct TcpSetup {
    pub(crate) flow: u32,
    pub(crate) me: Step,
    pub(crate) row: u32,
    pub(crate) rows: u32,
    pub(crate) mss: u32,
    pub(crate) header: u32,
    pub(crate) ecn: bool,
    pub(crate) initial_window: u32,
    pub(crate) ssthresh: u64,
    pub(crate) rto_min_ns: u64,
    /// Timeout before the first measurement, ns.
    pub(crate) rto_initial_ns: u64,
    pub(crate) sws_avoidance: bool,
    pub(crate) sack: bool,
    pub(crate) rack: bool,
    pub(crate) control: Control,
    /// All data at once, or in chunks.
    pub(crate) bytes: Option<u64>,
    pub(crate) app: Option<Paced>,
}

impl TcpSender {
    pub(crate) fn new(s: TcpSetup) -> Self {
        let mss = u64::from(s.mss);
        TcpSender {
            w: Window {
                cwnd: mss * u64::from(s.initial_window),
                ssthresh: s.ssthresh,
                mss,
            },
            una: 0,
            nxt: 0,
            max: 0,
            limit: if s.app.is_some() {
                0
            } else {
                s.bytes.unwrap_or(0)
            },
            row: s.row,
            rows: s.rows,
            me: s.me,
            header: s.header,
            flags: if s.ecn { ECT } else { 0 },
            duplicates: 0,
            recovering: false,
            partial: false,
            started: false,
            whole_segments: s.sws_avoidance,
            paced: matches!(s.control, Control::Bbr(_)),
            pace_at: 0,
            recover: 0,
            rtt: RttEstimator::new(s.rto_min_ns, s.rto_initial_ns),
            deadline: u64::MAX,
            timer_at: 0,
            mark_end: 0,
            control: s.control,
            app: s.app.map(Box::new),
            tick_at: 0,
            selective: s.sack.then(|| Box::new(Selective::new(s.rack))),
            count: SendCount::default(),
            flow: s.flow,
            start: 0,
            end: 0,
        }
    }

    /// Reads a word of each cache line that an ACK needs.
    #[inline]
    pub(crate) fn touch(&self) -> u64 {
        self.w.cwnd ^ self.rtt.touch() ^ self.deadline ^ self.count.packets
    }

    /// Starts the flow. True if it is complete at once (no bytes).
    pub(crate) fn on_start(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool {
        self.started = true;
        self.start = now;
        if let Some(app) = &mut self.app {
            app.begin(now);
        }
        self.send_any(now, fabric, net);
        self.check_end(now)
    }

    /// Sends what window and data allow.
    fn send_any(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        if let Some(mut selective) = self.selective.take() {
            self.send_selective(now, &mut selective, fabric, net);
            self.selective = Some(selective);
        } else {
            self.send(now, fabric, net);
        }
    }

    /// Handles an ACK. True if it completes the flow.
    pub(crate) fn on_ack(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) -> bool {
        self.count.acks += 1;
        if self.selective.is_some() {
            return self.on_selective_ack(now, event, fabric, net);
        }
        let ack = widen(event.seq, self.una);
        let marked = event.has(CE);
        if ack > self.una {
            self.on_new_ack(now, ack, marked, fabric, net);
        } else if ack == self.una && self.nxt > self.una {
            self.on_duplicate(now, fabric, net);
        }
        self.send(now, fabric, net);
        self.check_end(now)
    }

    fn on_new_ack(&mut self, now: u64, ack: u64, marked: bool, fabric: &mut ShardPorts, net: &Net) {
        let acked = ack - self.una;
        let flight = self.nxt - self.una;
        let mut restart_timer = true;
        self.rtt.on_ack(now, ack);
        self.una = ack;
        // After a timeout, an ACK may cover data sent before it.
        self.nxt = self.nxt.max(ack);
        self.duplicates = 0;
        if let Control::Bbr(bbr) = &mut self.control {
            let recovery = if !bbr.recovering {
                Recovery::Nothing
            } else if ack + 1 >= self.recover {
                Recovery::Done
            } else if self.recovering {
                Recovery::Partly
            } else {
                // After a timeout, the missing segments are unknown.
                Recovery::Nothing
            };
            let counts = (acked, ack, self.nxt - ack);
            bbr.on_ack(now, counts, &mut self.w, recovery, ack >= self.recover);
            self.recovering &= recovery != Recovery::Done;
            if recovery == Recovery::Partly {
                // RFC 6582 section 4: a flow that keeps its rate can repair losses one by one.
                restart_timer =
                    !std::mem::replace(&mut self.partial, true) || bbr.repairs_singly(&self.w);
                self.retransmit(now, fabric, net);
            }
        } else if self.recovering {
            if ack < self.recover - 1 {
                // RFC 6582 section 3.2 step 3, partial ACK: the next hole is retransmitted. The
                // window is reduced by the acknowledged bytes, then increased by one segment.
                self.retransmit(now, fabric, net);
                restart_timer = !std::mem::replace(&mut self.partial, true);
                self.w.cwnd = self.w.cwnd.saturating_sub(acked).max(self.w.mss);
                if acked >= self.w.mss {
                    self.w.cwnd += self.w.mss;
                }
            } else {
                self.recovering = false;
                self.w.cwnd = self.w.ssthresh;
            }
        } else {
            let info = AckInfo {
                now,
                acked,
                srtt: self.rtt.srtt,
                una: self.una,
                nxt: self.nxt,
                marked,
                flight,
            };
            self.control.on_ack(&mut self.w, info);
            if marked && ack > self.mark_end {
                self.mark_end = self.nxt;
                self.control
                    .on_congestion_mark(&mut self.w, self.nxt - self.una);
            }
        }
        if self.nxt == self.una {
            self.deadline = u64::MAX;
        } else if restart_timer {
            // RFC 6582 section 3.2 step 3: only the first partial ACK restarts the timer. So many
            // holes end in a timeout instead of one round trip each.
            self.deadline = now + self.rtt.rto;
        }
    }

    fn on_duplicate(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        self.duplicates += 1;
        let flight = self.nxt - self.una;
        if let Control::Bbr(bbr) = &mut self.control {
            bbr.on_duplicate(now, flight, &mut self.w);
        }
        if self.recovering {
            if !self.paced {
                self.w.cwnd += self.w.mss;
            }
        } else if self.duplicates == DUPLICATES && self.una >= self.recover {
            self.control.on_loss(&mut self.w, flight);
            if let Control::Bbr(bbr) = &mut self.control {
                bbr.on_loss(flight, &mut self.w);
            } else {
                self.w.cwnd = self.w.ssthresh + u64::from(DUPLICATES) * self.w.mss;
            }
            self.recovering = true;
            self.partial = false;
            self.recover = self.max + 1;
            self.count.fast_retransmits += 1;
            self.retransmit(now, fabric, net);
            self.deadline = now + self.rtt.rto;
        }
    }

    /// Handles the timer event. ACKs move only the deadline, so an early event is rescheduled.
    pub(crate) fn on_timer(
        &mut self,
        now: u64,
        event: NetEvent,
        fabric: &mut ShardPorts,
        net: &Net,
    ) {
        if self.selective.is_some() {
            self.on_selective_timer(now, event, fabric, net);
            return;
        }
        if event.seq == PACE {
            self.pace_at = 0;
            self.send(now, fabric, net);
            return;
        }
        if now != self.timer_at {
            return;
        }
        self.timer_at = 0;
        if self.deadline == u64::MAX {
            return;
        }
        if self.deadline > now {
            self.arm(fabric);
            return;
        }
        self.count.timeouts += 1;
        let flight = self.nxt - self.una;
        let repeated = self.rtt.back_off(self.una);
        self.control.on_timeout(&mut self.w, flight, repeated);
        self.w.cwnd = self.w.mss;
        // RFC 6582 section 3.2 step 4, and go-back-N: all data in flight counts as lost.
        self.recover = self.max + 1;
        self.recovering = false;
        self.duplicates = 0;
        self.nxt = self.una;
        self.deadline = u64::MAX;
        self.send(now, fabric, net);
    }

    /// Submits the data that the application has.
    pub(crate) fn on_tick(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool {
        if now == self.tick_at {
            self.tick_at = 0;
            self.send_any(now, fabric, net);
        }
        self.check_end(now)
    }

    /// Sends as much as window and data allow. Each segment is min(MSS, data left), and waits for
    /// an ACK if the window has no room for it (RFC 9293 section 3.8.6.2.1, sender's silly window
    /// avoidance, conditions 1 and 2). There is no Nagle delay: the last chunk of the application
    /// does not wait for more.
    #[inline]
    fn send(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        if self.app.is_some() {
            self.take_from_app(now);
            if self.nxt == self.una {
                self.control.on_idle_end(now);
            }
        }
        loop {
            let mut flight = self.nxt - self.una;
            if self.paced
                && let Control::Bbr(bbr) = &self.control
            {
                flight = bbr.in_flight(flight);
            }
            // At least one segment, or an idle sender would wait forever for an ACK.
            let room = self.w.cwnd.max(self.w.mss).saturating_sub(flight);
            let mut size = self.w.mss.min(self.limit - self.nxt);
            if size > room {
                size = if self.whole_segments { 0 } else { room };
            }
            if size == 0 || self.paced && self.must_wait(now, fabric) {
                break;
            }
            self.emit(now, self.nxt, to_u32(size), fabric, net);
            self.nxt += size;
            self.max = self.max.max(self.nxt);
        }
        if self.nxt > self.una {
            if self.deadline == u64::MAX {
                self.deadline = now + self.rtt.rto;
            }
            self.arm(fabric);
        }
        self.await_app(fabric);
    }

    /// Schedules the application's next data if all of the last is sent.
    #[inline]
    fn await_app(&mut self, fabric: &mut ShardPorts) {
        if let Some(app) = &self.app
            && self.nxt == self.limit
            && !app.is_over()
            && self.tick_at == 0
        {
            self.tick_at = app.next;
            fabric.schedule(app.next, EventKind::Tick, self.me.0, 0);
        }
    }

    /// Pacing: true if the next packet is not due yet; then an event is scheduled.
    #[cold]
    fn must_wait(&mut self, now: u64, fabric: &mut ShardPorts) -> bool {
        let Control::Bbr(bbr) = &self.control else {
            return false;
        };
        let due = bbr.next_send;
        if due > now && self.pace_at == 0 {
            self.pace_at = due;
            fabric.schedule(due, EventKind::Timer, self.me.0, PACE);
        }
        due > now
    }

    #[cold]
    fn retransmit(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        let size = self.w.mss.min(self.max - self.una);
        self.rtt.forget();
        self.emit(now, self.una, to_u32(size), fabric, net);
    }

    #[inline]
    fn emit(&mut self, now: u64, at: u64, size: u32, fabric: &mut ShardPorts, net: &Net) {
        let retransmission = at < self.max;
        if retransmission {
            self.count.retransmitted += 1;
            self.rtt.forget();
        } else {
            self.rtt.on_sent(now, at + u64::from(size));
        }
        if let Control::Bbr(bbr) = &mut self.control {
            let flight = self.nxt - self.una;
            let size = u64::from(size);
            bbr.on_sent(now, at + size, size, flight, &self.w);
        }
        self.put(now, at, size, fabric, net);
    }

    /// Counts a packet and submits it.
    #[inline]
    fn put(&mut self, now: u64, at: u64, size: u32, fabric: &mut ShardPorts, net: &Net) {
        self.count.packets += 1;
        self.count.bytes += u64::from(size);
        self.count.time_sum = self.count.time_sum.wrapping_add(now);
        let row = if self.rows > 1 {
            // Spraying: packets take the flow's paths in turn.
            self.row + low_u32(self.count.packets % u64::from(self.rows))
        } else {
            self.row
        };
        let event = NetEvent::packet(
            EventKind::Data,
            row,
            low_u32(at),
            size + self.header,
            self.flags,
        );
        fabric.emit(net, now, event);
    }

    fn arm(&mut self, fabric: &mut ShardPorts) {
        self.arm_until(self.deadline, fabric);
    }

    #[inline]
    fn arm_until(&mut self, deadline: u64, fabric: &mut ShardPorts) {
        if self.timer_at == 0 || deadline < self.timer_at {
            self.timer_at = deadline;
            fabric.schedule(deadline, EventKind::Timer, self.me.0, 0);
        }
    }

    #[inline]
    fn take_from_app(&mut self, now: u64) {
        if let Some(app) = &mut self.app
            && self.started
        {
            while let Some(size) = app.take(now) {
                self.limit += size;
            }
        }
    }

    #[inline]
    fn check_end(&mut self, now: u64) -> bool {
        let done = self.una == self.limit
            && self.end == 0
            && self.started
            && self.app.as_ref().is_none_or(|a| a.is_over());
        if done {
            self.end = now;
        }
        done
    }
}

impl SenderState for TcpSender {
    fn reroute(&mut self, rows: Rows) {
        (self.row, self.rows) = (rows.first, rows.count);
    }

    fn count(&self) -> &SendCount {
        &self.count
    }

    fn report(&self, result: &mut FlowResult) {
        result.start_ns = self.start;
        result.acked_ns = (self.end != 0).then_some(self.end);
        result.bytes = self.limit;
        result.bytes_acked = self.una;
        result.timer_ns = (self.deadline != u64::MAX).then_some(self.deadline);
        result.cwnd = self.w.cwnd;
        result.ssthresh = self.w.ssthresh;
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;
    use crate::{Execution, Simulation};

    /// BBR's deliveries are never more than what the receiver got, on a path that keeps the order.
    #[test]
    fn no_delivery_is_credited_that_did_not_arrive() {
        let mut credited = 0;
        for (i, (loss, capacity)) in [
            (0.0, 43),
            (0.0, 9),
            (0.01, 1_000),
            (0.05, 60),
            (0.001, 171),
            (0.0, 43),
        ]
        .into_iter()
        .enumerate()
        {
            // Chunks of an application: segments of different sizes.
            for demand in [
                "size = 50_000_000",
                "duration = 9.0, arr_dist = { type = \"Exp\", lambda = 2000.0 }, \
                 pkt_size_dist = { type = \"DiscreteUniform\", low = 100, high = 1500 }",
            ] {
                let toml = format!(
                    "seed = {i}\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\nhost_links = true\n\
                     propagation_ns = 10_000_000\nhost = {{ rate = 1e9, propagation_ns = 0 }}\n\
                     [switch]\nport_rate = 2e7\ncapacity = {capacity}\nloss = {loss}\n[[flow]]\n\
                     graph = [[0, 1]]\ntraffic = {{ {demand}, tcp = {{ cc_algorithm = \"BBR\", \
                     rto_min = 0.05, sack = {} }} }}\n",
                    i % 2 == 0
                );
                let config = crate::config::read(Doc::parse("t.toml", toml.as_bytes()))
                    .unwrap_or_else(|e| panic!("{e}"));
                for tenths in [2, 5, 9, 14, 22, 40] {
                    let mut scenario = config.scenario.clone();
                    scenario.duration_ns = tenths * 100_000_000;
                    let execution = Execution::default();
                    let mut simulation = Simulation::new(scenario, execution).expect("valid");
                    simulation.run(execution, u64::MAX, &mut |_, _| ());
                    let (sender, receiver) = simulation.first_tcp_flow();
                    let Control::Bbr(bbr) = &sender.control else {
                        panic!("not BBR");
                    };
                    let beyond: u64 = receiver.beyond.iter().map(|(from, to)| to - from).sum();
                    let got = receiver.next + beyond;
                    assert!(
                        bbr.delivered() <= got,
                        "{} > {got}: {toml}",
                        bbr.delivered()
                    );
                    assert!(bbr.delivered() >= sender.una);
                    credited += bbr.delivered() - sender.una;
                }
            }
        }
        assert!(credited > 0, "no run ended in a recovery");
    }
}
