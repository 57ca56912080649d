//! Scalable TCP (Kelly, "Scalable TCP: improving performance in highspeed wide area networks", ACM
//! CCR 33(2), 2003, section 3): plus a hundredth of a segment per ACK, minus an eighth after a
//! loss. A test algorithm, which shows that a congestion control is a file and a line of
//! [`super::ALGORITHMS`].

use slipstream_base::width::floor_u64;

use super::{AckInfo, Algorithm, CongestionControl, OtherCongestion, Window};
use crate::scenario::Congestion;

const LABEL: &str = "TCP Scalable";

pub(super) const ALGORITHM: Algorithm =
    Algorithm::new(&["Scalable"], LABEL, &["increase", "decrease"], |t| {
        let increase = t.get("increase").within(1e-6..=1.0).or(0.01);
        let decrease = t.get("decrease").within(1e-3..=0.99).or(0.125);
        let parameters = [increase, decrease, 0.0, 0.0];
        Congestion::Other(OtherCongestion::new(LABEL, parameters, |[a, b, ..]| {
            Box::new(Scalable { a, b, part: 0.0 })
        }))
    });

#[derive(Debug)]
struct Scalable {
    a: f64,
    b: f64,
    /// The window's fraction of a byte.
    part: f64,
}

impl CongestionControl for Scalable {
    fn on_ack(&mut self, w: &mut Window, ack: AckInfo) {
        if w.cwnd < w.ssthresh {
            w.cwnd = (w.cwnd + ack.acked.min(w.mss)).min(w.ssthresh);
            return;
        }
        let grown = self.part + self.a * ack.acked as f64;
        w.cwnd += floor_u64(grown);
        self.part = grown.fract();
    }

    fn on_loss(&mut self, w: &mut Window, flight: u64) {
        let left = floor_u64(flight as f64 * (1.0 - self.b));
        w.ssthresh = left.max(2 * w.mss);
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use crate::{Execution, RunResult, Simulation, config, output};

    fn run(more: &str) -> (config::Config, RunResult) {
        let toml = format!(
            "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 100.0\n[link]\nhost_links = false\n\
             propagation_ns = 1000000\n[switch]\nport_rate = 1e9\n[[flow]]\nflow_type = \"TCP\"\n\
             graph = [[0, 1]]\ntraffic = {{ size = 1_000_000, pkt_size_dist = 1000, tcp = {{ \
             cc_algorithm = \"Scalable\", ssthresh = 1, initial_window = 100{more} }} }}\n"
        );
        let config = config::read(Doc::parse("t.toml", toml.as_bytes())).unwrap();
        let scenario = config.scenario.clone();
        let mut simulation = Simulation::new(scenario, Execution::default()).unwrap();
        simulation.run(Execution::default(), u64::MAX, &mut |_, _| ());
        let result = simulation.result();
        (config, result)
    }

    #[test]
    fn an_added_congestion_control_is_read_run_and_named() {
        let (config, result) = run("");
        // A hundredth of each of the million bytes, added to the initial window of 100,000.
        assert_eq!(result.flows[0].cwnd, 110_000);
        let text = output::text("t", &config, &result, &output::Cost::default());
        assert!(text.contains("1 TCP Scalable"), "{text}");
        let (_, result) = run(", increase = 0.02");
        assert_eq!(result.flows[0].cwnd, 120_000);
    }
}
