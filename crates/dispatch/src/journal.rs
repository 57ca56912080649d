//! Inputs and actions of a dispatcher, recorded for tests that compare its drivers (feature `journal`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipstream_base::WorkerId;

use crate::Action;

/// Inputs and actions of one dispatcher, in order. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<Line>>>);

/// An input that had an effect, or an action that a driver has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// Something happened to a request.
    Input {
        /// The driver's number of the request.
        id: u32,
        /// What.
        input: Input,
    },
    /// The driver took an action.
    Action(Action),
    /// Readiness, pace or size of the fleet changed.
    FleetChanged,
}

/// What happened to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// It was accepted.
    Submitted {
        /// Tokens of its prompt.
        prompt_tokens: u32,
        /// Tokens of its answer at most.
        max_tokens: u32,
    },
    /// Its prompt is computed.
    Prefilled,
    /// There is room for its prompt.
    Reserved {
        /// Tokens of it that need not come.
        cached_tokens: u32,
    },
    /// Its keys and values have arrived.
    Transferred,
    /// Its first token came.
    FirstToken,
    /// Its last token came.
    Ended,
    /// A worker did not take it, gave it up, or is gone.
    Failed {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker refused it for good.
    Refused {
        /// The worker.
        worker: WorkerId,
    },
    /// Nobody wants the answer any more.
    Canceled,
}

impl Journal {
    /// All lines so far.
    pub fn lines(&self) -> Vec<Line> {
        self.lock().clone()
    }

    /// Lines so far.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether nothing has happened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn push(&self, line: Line) {
        self.lock().push(line);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Line>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
