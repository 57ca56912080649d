//! The stages of a request, in the order in which it passes them: the columns of a drag record.

/// A point in the life of a request. The interval between two neighboring stages has a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Stage {
    /// The load generator's due time.
    Due,
    /// The frontend read the head of the HTTP request.
    Accept,
    /// The body was read, and its JSON checked.
    Parsed,
    /// The prompt was rendered, tokenized and hashed.
    Tokenized,
    /// The worker was chosen.
    Routed,
    /// Submitted to the request plane.
    Dispatched,
    /// Received by the worker.
    WorkerRecv,
    /// Left the engine's waiting queue for the first time.
    Admitted,
    /// End of the step that computed the last of its prompt, if another worker than the one that
    /// generates computed it (disaggregated prefill).
    Prefilled,
    /// Start of the KV transfer to the worker that generates, if there is one.
    KvSent,
    /// End of that transfer.
    KvReceived,
    /// Start of the step that computed its first token.
    FirstPassStart,
    /// End of that step.
    FirstPassEnd,
    /// The frame with its first token reached the frontend.
    FrameRecv,
    /// The first token was rendered as SSE.
    Rendered,
    /// The first token was written to the socket.
    Written,
    /// The client received the first token.
    ClientRecv,
    /// The client received the last token.
    LastClientRecv,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Stage; 18] = [
        Stage::Due,
        Stage::Accept,
        Stage::Parsed,
        Stage::Tokenized,
        Stage::Routed,
        Stage::Dispatched,
        Stage::WorkerRecv,
        Stage::Admitted,
        Stage::Prefilled,
        Stage::KvSent,
        Stage::KvReceived,
        Stage::FirstPassStart,
        Stage::FirstPassEnd,
        Stage::FrameRecv,
        Stage::Rendered,
        Stage::Written,
        Stage::ClientRecv,
        Stage::LastClientRecv,
    ];

    /// Name of the column: `first_pass_start`.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Due => "due",
            Stage::Accept => "accept",
            Stage::Parsed => "parsed",
            Stage::Tokenized => "tokenized",
            Stage::Routed => "routed",
            Stage::Dispatched => "dispatched",
            Stage::WorkerRecv => "worker_recv",
            Stage::Admitted => "admitted",
            Stage::Prefilled => "prefilled",
            Stage::KvSent => "kv_sent",
            Stage::KvReceived => "kv_received",
            Stage::FirstPassStart => "first_pass_start",
            Stage::FirstPassEnd => "first_pass_end",
            Stage::FrameRecv => "frame_recv",
            Stage::Rendered => "rendered",
            Stage::Written => "written",
            Stage::ClientRecv => "client_recv",
            Stage::LastClientRecv => "last_client_recv",
        }
    }
}

/// When a request reached each stage, ns of one clock (`CLOCK_MONOTONIC` live); `None` if it did
/// not, or if the stage was not recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes([u64; Stage::ALL.len()]);

impl StageTimes {
    /// Records that `stage` was reached at `ns`. The first record wins, so a retry does not move
    /// it.
    pub fn note(&mut self, stage: Stage, ns: u64) {
        let slot = &mut self.0[stage as usize];
        if *slot == 0 {
            *slot = ns;
        }
    }

    /// When `stage` was reached. A clock reading of 0 counts as absent.
    pub fn at(&self, stage: Stage) -> Option<u64> {
        Some(self.0[stage as usize]).filter(|&ns| ns != 0)
    }
}
