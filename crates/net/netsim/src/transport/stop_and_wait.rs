//! Stop and wait: one packet at a time, retransmitted on a timeout. A test transport, which shows
//! that a transport is a file and a line of [`super::PROTOCOLS`].

use slipstream_base::width::{floor_u64, low_u32, to_u32};
use slipstream_config::doc::Table;

use super::{
    EndSetup, Protocol, Received, Receiver, ReceiverState, SendCount, Sender, SenderState,
};
use crate::event::{EventKind, NetEvent, widen};
use crate::fabric::ShardPorts;
use crate::flow::FlowResult;
use crate::net::{Net, Rows};

pub(super) const PROTOCOL: Protocol = Protocol {
    word: "StopAndWait",
    label: "stop and wait",
    sprays: false,
    read: |t| {
        let retry_s = t.table("stop_and_wait", |t: &Table<'_>| {
            t.get::<f64>("rto").within(1e-6..=100.0).or(0.001)
        });
        [retry_s * 1e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    },
    sender: |setup, parameters| {
        Box::new(Source {
            setup: *setup,
            retry_ns: floor_u64(parameters[0]),
            una: 0,
            start: 0,
            end: None,
            count: SendCount::default(),
        })
    },
    receiver: |setup, _| {
        Box::new(Sink {
            setup: *setup,
            next: 0,
            received: Received::default(),
        })
    },
};

#[derive(Debug)]
struct Source {
    setup: EndSetup,
    retry_ns: u64,
    una: u64,
    start: u64,
    end: Option<u64>,
    count: SendCount,
}

impl Source {
    fn send(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) {
        let s = &self.setup;
        let size = to_u32(u64::from(s.packet_bytes).min(s.total - self.una));
        self.count.packets += 1;
        self.count.bytes += u64::from(size);
        self.count.time_sum = self.count.time_sum.wrapping_add(now);
        let wire = size + s.header_bytes;
        let packet = NetEvent::packet(EventKind::Data, s.rows.first, low_u32(self.una), wire, 0);
        fabric.emit(net, now, packet);
        fabric.schedule(
            now + self.retry_ns,
            EventKind::Timer,
            s.me.0,
            low_u32(self.una),
        );
    }
}

impl SenderState for Source {
    fn reroute(&mut self, rows: Rows) {
        self.setup.rows = rows;
    }

    fn count(&self) -> &SendCount {
        &self.count
    }

    fn report(&self, result: &mut FlowResult) {
        result.start_ns = self.start;
        result.acked_ns = self.end;
        result.bytes = self.setup.total;
        result.bytes_acked = self.una;
    }
}

impl Sender for Source {
    fn flow(&self) -> u32 {
        self.setup.flow
    }

    fn on_start(&mut self, now: u64, fabric: &mut ShardPorts, net: &Net) -> bool {
        self.start = now;
        self.send(now, fabric, net);
        false
    }

    fn on_packet(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool {
        self.count.acks += 1;
        let acked = widen(event.seq, self.una);
        if acked <= self.una {
            return false;
        }
        self.una = acked;
        if self.una < self.setup.total {
            self.send(now, fabric, net);
            return false;
        }
        self.end = Some(now);
        true
    }

    fn on_timer(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool {
        // The timer of a packet that has been answered is void.
        if self.end.is_none() && event.seq == low_u32(self.una) {
            self.count.retransmitted += 1;
            self.count.timeouts += 1;
            self.send(now, fabric, net);
        }
        false
    }
}

#[derive(Debug)]
struct Sink {
    setup: EndSetup,
    next: u64,
    received: Received,
}

impl ReceiverState for Sink {
    fn reroute(&mut self, rows: Rows) {
        self.setup.rows = rows;
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn in_order(&self) -> u64 {
        self.next
    }
}

impl Receiver for Sink {
    fn flow(&self) -> u32 {
        self.setup.flow
    }

    fn on_data(&mut self, now: u64, event: NetEvent, fabric: &mut ShardPorts, net: &Net) -> bool {
        let s = &self.setup;
        let size = u64::from(event.size() - s.header_bytes);
        self.received.note(now, size);
        if widen(event.seq, self.next) == self.next {
            self.next += size;
        }
        let answer = NetEvent::packet(
            EventKind::Ack,
            s.rows.first,
            low_u32(self.next),
            s.answer_bytes,
            0,
        );
        fabric.emit(net, now, answer);
        let done = self.received.done_at == 0 && self.next == s.total;
        if done {
            self.received.done_at = now;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use crate::{Execution, RunResult, Simulation, config, output};

    /// 10,000 bytes over a link of 1 Gb/s and 1 ms, then a TCP flow that depends on them.
    fn run(switch: &str, threads: u32) -> (config::Config, RunResult) {
        let toml = format!(
            "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 10.0\n[link]\nhost_links = false\n\
             propagation_ns = 1000000\n[switch]\nport_rate = 1e9\n{switch}\n[[flow]]\nflow_id = 1\n\
             flow_type = \"StopAndWait\"\ngraph = [[0, 1]]\ntraffic = {{ size = 10_000, \
             pkt_size_dist = 1250, stop_and_wait = {{ rto = 0.01 }} }}\n[[flow]]\nflow_id = 2\n\
             flow_type = \"TCP\"\ngraph = [[0, 1]]\nstarts_after = 1\ntraffic = {{ size = 1250 }}\n"
        );
        let config = config::read(Doc::parse("t.toml", toml.as_bytes())).unwrap();
        let execution = Execution {
            threads,
            ..Execution::default()
        };
        let mut simulation = Simulation::new(config.scenario.clone(), execution).unwrap();
        simulation.run(execution, u64::MAX, &mut |_, _| ());
        let result = simulation.result();
        (config, result)
    }

    #[test]
    fn an_added_transport_is_read_run_and_named() {
        let (config, result) = run("", 1);
        // Eight packets of 10 us and 1 ms, and an ACK of 320 ns and 1 ms for each.
        assert_eq!(
            result.flows[0].delivered_ns,
            Some(8 * 2_010_320 - 1_000_320)
        );
        assert_eq!(result.flows[0].acked_ns, Some(8 * 2_010_320));
        assert_eq!(result.flows[1].start_ns, 8 * 2_010_320);
        let text = output::text("t", &config, &result, &output::Cost::default());
        assert!(text.contains("1 TCP NewReno, 1 stop and wait"), "{text}");
    }

    #[test]
    fn an_added_transport_recovers_from_losses() {
        let (_, result) = run("loss = 0.3", 1);
        let f = &result.flows[0];
        assert!(
            f.timeouts > 0 && f.retransmitted == u64::from(f.timeouts),
            "{f:?}"
        );
        assert_eq!(f.bytes_acked, 10_000);
        assert_eq!(result.digest, run("loss = 0.3", 2).1.digest);
    }
}
