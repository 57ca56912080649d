//! What an engine thread drives.

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{EngineRequest, ForwardPassMetrics, KvDelta, RequestId, SimTime};
use slipstream_engine::{PassOutput, Reserved, Stats};
use slipstream_planes::{Part, RefusalReason};

/// The engine of one rank, as an engine thread drives it. It computes in steps, and a step gives any
/// number of tokens per sequence.
///
/// ```text
/// start, kill, receive, release     at any moment, also during a step
/// begin_step ─► its end ─► finish_step ─► PassOutput          one step at a time
/// ```
///
/// The thread owns sockets, rings, clocks and deadlines. A backend gets the time, waits for nothing, and
/// is called by one thread. Modelled time runs `live.speedup` times as fast as the clock.
///
/// An implementation is a file of its own and one line where the workers are made (`WorkerSpec::ranks`).
pub trait Backend: Send {
    /// Takes a request into the waiting queue; `part` says what of it is done here. `now` may lie within
    /// the step under way.
    ///
    /// # Errors
    /// [`Refused`]. Nothing has changed then.
    fn start(&mut self, now: SimTime, request: EngineRequest, part: Part) -> Result<(), Refused>;

    /// Drops a request, also in the middle of a step, and frees its blocks at once: also those that
    /// are held for another worker. Returns how often it was preempted; `None` if it is not known (any
    /// more). No later output names it.
    fn kill(&mut self, id: RequestId) -> Option<u32>;

    /// The prompt of a [`Part::Decode`] has come into the blocks reserved for it. False if no such
    /// request waits for it.
    fn receive(&mut self, id: RequestId) -> bool;

    /// Frees the blocks of a [`Part::Prefill`] that is computed. False if none are held for it.
    fn release(&mut self, id: RequestId) -> bool;

    /// Begins a step at `now`, and returns when it ends; `None` if there is nothing to do until a
    /// request is started, killed, received or released. Requests whose blocks were reserved for a prompt
    /// that comes from elsewhere go to `reserved`, also if no step begins.
    ///
    /// # Errors
    /// [`Dead`].
    fn begin_step(
        &mut self,
        now: SimTime,
        reserved: &mut Vec<Reserved>,
    ) -> Result<Option<SimTime>, Dead>;

    /// Ends the step under way, at the time that [`begin_step`](Backend::begin_step) returned. Replaces
    /// what is in `out`, `token_count` and `sequence_count` included. `out.first` and `out.finished` name sequences in the order of `out.tokens`, and
    /// none that are not in it.
    ///
    /// # Errors
    /// [`Dead`].
    fn finish_step(&mut self, out: &mut PassOutput) -> Result<(), Dead>;

    /// Whether it has nothing to do: no request runs or waits.
    fn is_idle(&self) -> bool;

    /// What it does, in numbers. Called several times per step.
    fn stats(&self) -> Stats;

    /// Tokens that a sequence may have, prompt and answer together.
    fn max_len(&self) -> u32;

    /// Fills `out` for a rank that is idle.
    fn heartbeat(&mut self, out: &mut ForwardPassMetrics);

    /// Fills `out` with what changed in the KV cache since the last delta. False if nothing did.
    fn take_kv(&mut self, out: &mut KvDelta) -> bool;

    /// Fills `out` with everything that the KV cache holds.
    fn kv_snapshot(&self, out: &mut KvDelta);

    /// Whether the tokens of stored blocks are to be kept for
    /// [`take_stored_blocks`](Backend::take_stored_blocks). Called before the first request, if at all.
    fn note_stored_blocks(&mut self, on: bool) {
        let _ = on;
    }

    /// Fills `out` with the blocks that the last delta stores.
    fn take_stored_blocks(&mut self, out: &mut StoredBlocks) {
        out.clear();
    }
}

/// Why a backend does not take a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// For the program; says whether another worker may take it.
    pub reason: RefusalReason,
    /// For people: what, with the numbers, and what to change.
    pub message: String,
}

/// A backend can compute nothing any more. Its streams end with an error, those without a token are
/// retried on another worker, and its worker takes no requests from now on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Dead(pub String);
