//! The stages of a request, in the order in which it passes them: the columns of a drag record.

/// A moment in the life of a request. The gap between two neighbors is a hand-over (or the work
/// between two hand-overs), and has a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Stage {
    /// The load generator meant to send it.
    Due,
    /// The frontend had read the head of the HTTP request.
    Accept,
    /// Body read and JSON checked.
    Parsed,
    /// Prompt rendered, tokenized and hashed.
    Tokenized,
    /// Worker chosen.
    Routed,
    /// Handed to the request plane.
    Dispatched,
    /// Taken by the worker.
    WorkerRecv,
    /// Left the engine's waiting queue for the first time.
    Admitted,
    /// The pass that computed the last of its prompt ended, if another worker than that which
    /// generates computed it.
    Prefilled,
    /// The prompt's keys and values began to be sent to the worker that generates, if so.
    KvSent,
    /// They had come.
    KvReceived,
    /// The pass that computed its first token began.
    FirstPassStart,
    /// That pass ended.
    FirstPassEnd,
    /// The frame with its first token reached the frontend.
    FrameRecv,
    /// The first token was rendered as SSE.
    Rendered,
    /// The first token was handed to the socket.
    Written,
    /// The client had the first token.
    ClientRecv,
    /// The client had the last token.
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

/// When a request passed each stage, ns of one clock (`CLOCK_MONOTONIC` live); `None` if it did
/// not, or if nobody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes([u64; Stage::ALL.len()]);

impl StageTimes {
    /// Notes that `stage` was passed at `ns`. The first note wins, so a retry does not move it.
    pub fn note(&mut self, stage: Stage, ns: u64) {
        let slot = &mut self.0[stage as usize];
        if *slot == 0 {
            *slot = ns;
        }
    }

    /// When `stage` was passed. A clock reading of 0 counts as absent.
    pub fn at(&self, stage: Stage) -> Option<u64> {
        Some(self.0[stage as usize]).filter(|&ns| ns != 0)
    }
}
