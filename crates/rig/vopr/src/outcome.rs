//! What a schedule came to: counts, or the invariant that did not hold.

/// Counts of a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Events: deliveries, rounds of engine threads, requests, faults and their ends.
    pub events: u64,
    /// Polls of the tasks of a process.
    pub polls: u64,
    /// Time that passed, ns.
    pub virtual_ns: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests that ended with an error after their head.
    pub lost: u64,
    /// Requests whose client went away, or whose frontend was killed.
    pub cancelled: u64,
    /// Tokens that clients read.
    pub tokens: u64,
    /// Requests that another worker got.
    pub retries: u64,
    /// Streams that another worker continued.
    pub resumed: u64,
    /// Entries of streams that were gone.
    pub stale: u64,
    /// Digest of all that happened: the same for the same plan.
    pub digest: u64,
}

impl Stats {
    /// Adds another schedule's counts.
    pub fn add(&mut self, other: &Stats) {
        self.events += other.events;
        self.polls += other.polls;
        self.virtual_ns += other.virtual_ns;
        self.finished += other.finished;
        self.refused += other.refused;
        self.lost += other.lost;
        self.cancelled += other.cancelled;
        self.tokens += other.tokens;
        self.retries += other.retries;
        self.resumed += other.resumed;
        self.stale += other.stale;
        self.digest ^= other.digest;
    }
}

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Number of the event after which it was seen.
    pub step: u64,
    /// The time, ns since the start.
    pub at_ns: u64,
    /// The invariant.
    pub what: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (step, us) = (self.step, self.at_ns / 1000);
        write!(f, "step {step}, {us} us: {}", self.what)
    }
}
