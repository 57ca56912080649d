//! A request at an engine, whose success or failure counts for the engine.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hyper::StatusCode;
use slipstream_planes::clock::monotonic_ns;

use super::engines::{Engine, Engines};
use super::failure::Failure;

/// A request at an engine. Its end is counted when it is dropped.
pub(super) struct Visit {
    engines: Arc<Engines>,
    engine: Arc<Engine>,
    /// It decides whether the engine takes more.
    is_probe: bool,
    judged: bool,
    failed: bool,
    begun_ns: u64,
    /// Time of the first byte; 0: none yet.
    first_ns: u64,
    /// Number of pieces of the answer, and the time of the last one.
    pieces: Cell<(u64, u64)>,
}

impl Visit {
    /// A request is about to be sent to `engine`.
    pub(super) fn begin(engines: &Arc<Engines>, engine: Arc<Engine>) -> Visit {
        engine.counters.requests.fetch_add(1, Relaxed);
        engine.counters.in_flight.fetch_add(1, Relaxed);
        Visit {
            is_probe: engines.on_start(&engine),
            engines: engines.clone(),
            engine,
            judged: false,
            failed: false,
            begun_ns: monotonic_ns(),
            first_ns: 0,
            pieces: Cell::new((0, 0)),
        }
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The first byte of the answer has arrived, and with `is_complete` the rest too. The beginning of a stream proves
    /// little, because engines report errors within streams.
    pub(super) fn on_first_byte(&mut self, status: StatusCode, is_complete: bool) {
        let engine = &self.engine;
        self.first_ns = monotonic_ns();
        let took = self.first_ns.saturating_sub(self.begun_ns);
        engine.counters.on_answer(status, took);
        if Engines::is_failure(status) {
            let failure = Failure::Status(status.as_u16());
            self.engines.on_failure(engine, &failure, self.is_probe);
        } else if is_complete || self.is_probe {
            self.engines.on_success(engine, self.is_probe);
        }
        self.judged = true;
    }

    /// A piece of the answer has arrived.
    #[inline]
    pub(super) fn on_piece(&self, now_ns: u64) {
        self.pieces.set((self.pieces.get().0 + 1, now_ns));
    }

    /// The complete answer has arrived.
    pub(super) fn on_end(&self) {
        if !self.failed {
            self.engines.on_success(&self.engine, false);
        }
    }

    /// The engine has failed this request.
    pub(super) fn on_failure(&mut self, failure: &Failure) {
        let engine = &self.engine;
        self.engines.on_failure(engine, failure, self.is_probe);
        if !failure.is_health() && !failure.is_tls() {
            // A failed check does not ask for another one, or a lost engine would be asked all the time.
            engine.check_now.notify_one();
        }
        self.judged = true;
        self.failed = true;
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let engine = &self.engine;
        engine.counters.in_flight.fetch_sub(1, Relaxed);
        let (pieces, last_ns) = self.pieces.get();
        if pieces > 1 && self.first_ns > 0 {
            let took_ns = last_ns.saturating_sub(self.first_ns);
            engine.counters.on_stream(pieces - 1, took_ns);
        }
        if self.is_probe && !self.judged {
            self.engines.on_probe_dropped(engine);
        }
    }
}
