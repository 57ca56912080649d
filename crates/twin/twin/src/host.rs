//! The frontend's processors.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slipstream_base::SimTime;
use slipstream_base::width::round_u64;
use slipstream_config::cluster::{Cluster, HostConfig, HostMode};

/// The frontend's processors, if they are modelled.
pub(crate) fn of_cluster(cluster: &Cluster) -> Option<(Box<dyn Host>, Costs)> {
    match cluster.host.mode {
        HostMode::None | HostMode::Threads => None,
        HostMode::Ideal => Some((
            Box::new(Ideal::new(cluster.host.cpus)),
            Costs::new(&cluster.host),
        )),
    }
}

/// A model of the processors for the frontend's work.
pub(crate) trait Host: Send {
    /// Adds work of `ns` at `now`, which never decreases. Returns when it is done.
    fn run(&mut self, now: SimTime, ns: u64) -> SimTime;
}

/// Equal cores and one queue: work waits for the first free core, in order of arrival, and keeps it
/// until done.
pub(crate) struct Ideal {
    free_at: BinaryHeap<Reverse<SimTime>>,
}

impl Ideal {
    pub(crate) fn new(cpus: u32) -> Ideal {
        Ideal {
            free_at: (0..cpus).map(|_| Reverse(SimTime::ZERO)).collect(),
        }
    }
}

impl Host for Ideal {
    fn run(&mut self, now: SimTime, ns: u64) -> SimTime {
        if ns == 0 {
            return now; // no work, no wait
        }
        let mut first = self.free_at.peek_mut().expect("at least one core");
        let done = first.0.max(now) + ns;
        *first = Reverse(done);
        done
    }
}

/// Duration of the frontend's work, ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    parse: f64,
    tokenize: f64,
    route: f64,
    dispatch: f64,
    frame: f64,
    token: f64,
}

impl Costs {
    pub(crate) fn new(host: &HostConfig) -> Costs {
        Costs {
            parse: host.parse_us * 1e3,
            tokenize: host.tokenize_token_ns,
            route: host.route_us * 1e3,
            dispatch: host.dispatch_us * 1e3,
            frame: host.frame_us * 1e3,
            token: host.token_ns,
        }
    }

    /// Work for a prompt of `tokens`: read, tokenize, and choose its worker, as one piece. Also the
    /// times before its end at which the prompt was read, and tokenized.
    pub(crate) fn request(&self, tokens: u32) -> (u64, u64, u64) {
        let tokenize = self.tokenize * f64::from(tokens);
        let whole = self.parse + tokenize + self.route;
        (
            round_u64(whole),
            round_u64(tokenize + self.route),
            round_u64(self.route),
        )
    }

    /// The same work in its parts: read it, tokenize it, choose its worker.
    pub(crate) fn stages(&self, tokens: u32) -> (u64, u64, u64) {
        (
            round_u64(self.parse),
            round_u64(self.tokenize * f64::from(tokens)),
            round_u64(self.route),
        )
    }

    pub(crate) fn dispatch(&self) -> u64 {
        round_u64(self.dispatch)
    }

    /// Work to read a frame of `tokens` and write it to clients.
    pub(crate) fn frame(&self, tokens: u32) -> u64 {
        round_u64(self.frame + self.token * f64::from(tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_the_first_core_that_is_free() {
        let mut host = Ideal::new(2);
        let mut run = |now, ns| host.run(SimTime(now), ns).0;
        assert_eq!(run(0, 10), 10);
        assert_eq!(run(0, 4), 4);
        assert_eq!(run(1, 3), 7, "behind the one of 4");
        assert_eq!(run(8, 1), 9);
        assert_eq!(run(8, 5), 14, "at 9");
    }
}
