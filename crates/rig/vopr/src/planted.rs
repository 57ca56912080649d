//! Deliberate bugs that the simulator has to find (feature `planted`).

/// A deliberate bug.
pub struct Planted {
    /// Its name at the place where it is planted.
    pub name: &'static str,
    /// Its effect.
    pub what: &'static str,
}

const fn bug(name: &'static str, what: &'static str) -> Planted {
    Planted { name, what }
}

/// All of them.
pub const ALL: &[Planted] = &[
    bug(
        "lost-retry",
        "dispatch: a request without a token is not retried on another worker",
    ),
    bug(
        "lost-kill",
        "dispatch: a worker gets no notice that a request was cancelled",
    ),
    bug(
        "lost-release",
        "dispatch: a prefill worker gets no notice that a prompt has arrived",
    ),
    bug(
        "stale-attempt",
        "dispatch: steps of an attempt that is over are carried out",
    ),
    bug(
        "leaked-load",
        "router: the load of a request that ends without a token stays",
    ),
    bug(
        "stale-tombstone",
        "planes: the tombstone of a worker that is back stays",
    ),
    bug(
        "late-frame",
        "planes: a slot keeps its generation, so that late frames find the next stream",
    ),
    bug(
        "deaf-link",
        "planes: a peer that says nothing is not found out",
    ),
    bug(
        "short-write",
        "planes: what a socket did not take is taken as sent",
    ),
    bug("kept-seat", "frontend: a lost connection keeps its seat"),
    bug(
        "two-holders",
        "frontend: a second process gets the seat of a worker",
    ),
    bug(
        "lost-resync",
        "frontend: a gap in KV deltas leads to no snapshot",
    ),
    bug(
        "lost-worker-unseen",
        "frontend: streams of a lost connection stay",
    ),
    bug(
        "lost-end",
        "frontend: the end of a stream does not reach the dispatcher",
    ),
    bug(
        "resume-behind",
        "frontend: a continued stream repeats its last token",
    ),
    bug("lost-credit", "frontend: some credit is not granted"),
    bug(
        "double-credit",
        "frontend: credit that was granted is granted again",
    ),
    bug(
        "leaked-quota",
        "frontend: streams that were closed still count",
    ),
    bug(
        "leaked-memory",
        "frontend: memory of some requests stays charged",
    ),
    bug(
        "credit-off-by-one",
        "worker: one token more than there is credit for is sent",
    ),
    bug(
        "kept-orphans",
        "worker: streams of a lost connection continue",
    ),
    bug(
        "ignored-release",
        "worker: the blocks of a prompt that was fetched stay held",
    ),
    bug("double-end", "worker: a stream ends twice"),
    bug("unkilled", "worker: a cancelled stream stays in its engine"),
    bug(
        "lost-token",
        "worker: a token that waits for credit is lost",
    ),
    bug(
        "lost-held-end",
        "worker: the end behind tokens that wait for credit is lost",
    ),
    bug(
        "second-dialer",
        "worker: a record that comes back starts a second dialer next to the open connection",
    ),
    bug("leaked-link", "worker: a failed dial keeps its link"),
    bug(
        "unarmed-bell",
        "worker: a connection that has just sent KV deltas is not woken for the next ones",
    ),
    bug(
        "lost-snapshot",
        "worker: lost KV deltas lead to no snapshot",
    ),
    bug(
        "forgotten-token",
        "engine: a preempted sequence computes its last token again",
    ),
    bug(
        "leaked-block",
        "engine: a block of a sequence that ended is not freed",
    ),
];
