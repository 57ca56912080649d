//! The interface that an engine thread drives.

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{EngineRequest, ForwardPassMetrics, KvDelta, RequestId, Role, SimTime};
use slipstream_engine::{PassOutput, Reserved, Stats};
use slipstream_planes::RefusalReason;

/// The engine of one rank, driven by an engine thread. It computes in steps, and a step returns any
/// number of tokens per sequence.
///
/// ```text
/// start, kill, receive, release     at any moment, also during a step
/// begin_step ─► its end ─► finish_step ─► PassOutput          one step at a time
/// ```
///
/// The thread owns sockets, rings, clocks and deadlines. A backend gets the time as an argument, never
/// waits, and is called by one thread. Modelled time runs `live.speedup` times as fast as the clock.
///
/// A new implementation is a file and one line where workers are created (`WorkerSpec::ranks`).
pub trait Backend: Send {
    /// Adds a request to the waiting queue; `role` is the part of it to compute here. `now` may be within
    /// the current step.
    ///
    /// # Errors
    /// [`Refused`]. The state is unchanged then.
    fn start(&mut self, now: SimTime, request: EngineRequest, role: Role) -> Result<(), Refused>;

    /// Drops a request, also in the middle of a step, and frees its blocks at once, including those
    /// held for another worker. Returns its number of preemptions; `None` if the request is unknown.
    /// No later output names it.
    fn kill(&mut self, id: RequestId) -> Option<u32>;

    /// The prompt of a [`Role::Decode`] has arrived in the blocks reserved for it. False if no such
    /// request waits for it.
    fn receive(&mut self, id: RequestId) -> bool;

    /// Frees the blocks of a computed [`Role::Prefill`]. False if none are held for it.
    fn release(&mut self, id: RequestId) -> bool;

    /// Begins a step at `now`, and returns its end; `None` if there is nothing to do until a
    /// request is started, killed, received or released. Requests whose blocks were reserved for a prompt
    /// from another worker are added to `reserved`, also if no step begins.
    ///
    /// # Errors
    /// [`Dead`].
    fn begin_step(
        &mut self,
        now: SimTime,
        reserved: &mut Vec<Reserved>,
    ) -> Result<Option<SimTime>, Dead>;

    /// Ends the current step, at the time that [`begin_step`](Backend::begin_step) returned. Replaces
    /// the contents of `out`, including `token_count` and `sequence_count`. `out.first` and `out.finished`
    /// name sequences in the order of `out.tokens`, and no others.
    ///
    /// # Errors
    /// [`Dead`].
    fn finish_step(&mut self, out: &mut PassOutput) -> Result<(), Dead>;

    /// Whether it has nothing to do: no request runs or waits.
    fn is_idle(&self) -> bool;

    /// Its current counters. Called several times per step.
    fn stats(&self) -> Stats;

    /// Maximum tokens of a sequence, prompt and answer together.
    fn max_len(&self) -> u32;

    /// Fills `out` for a rank that is idle.
    fn heartbeat(&mut self, out: &mut ForwardPassMetrics);

    /// Fills `out` with the changes of the KV cache since the last delta. False if there are none.
    fn take_kv(&mut self, out: &mut KvDelta) -> bool;

    /// Fills `out` with the whole contents of the KV cache.
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

/// Why a backend refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// The reason, as a code; determines whether another worker may accept it.
    pub reason: RefusalReason,
    /// For people: the error with its numbers, and the remedy.
    pub message: String,
}

/// A backend can compute nothing any more. Its streams end with an error, streams without a token are
/// retried on another worker, and its worker accepts no requests from now on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Dead(pub String);
