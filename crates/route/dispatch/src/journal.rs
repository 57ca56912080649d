//! Inputs and actions of a dispatcher, recorded for tests that compare its drivers (feature `journal`).

use std::sync::{Arc, Mutex, MutexGuard};

use slipstream_base::WorkerId;
use slipstream_base::sync::lock;

use crate::Action;

/// Inputs and actions of one dispatcher, in order. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Vec<Line>>>);

/// An input that had an effect, or an action carried out by a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// An input about a request.
    Input {
        /// The driver's number of the request.
        id: u32,
        /// The input.
        input: Input,
    },
    /// The driver carried out an action.
    Action(Action),
    /// Readiness, pace or size of the fleet changed.
    FleetChanged,
}

/// An input about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// It was accepted.
    Submitted {
        /// Tokens of its prompt.
        prompt_tokens: u32,
        /// Maximum tokens of its answer.
        max_tokens: u32,
    },
    /// Its prompt is computed.
    Prefilled,
    /// Its prompt does not reach its decode rank.
    PrefillFailed,
    /// Blocks for its prompt are reserved.
    Reserved {
        /// Cached tokens of the prompt, which are not transferred.
        cached_tokens: u32,
    },
    /// Its keys and values have arrived.
    Transferred,
    /// Its first token of an attempt arrived.
    FirstToken,
    /// After a failure: its answer is to be continued.
    Resumed {
        /// Tokens of the answer that its client has.
        answered: u32,
    },
    /// Its last token arrived.
    Ended,
    /// A worker did not accept it, gave it up, or is gone.
    Failed {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker refused it permanently.
    Refused {
        /// The worker.
        worker: WorkerId,
    },
    /// Its client canceled it.
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

    /// Whether there is no line.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn push(&self, line: Line) {
        self.lock().push(line);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Line>> {
        lock(&self.0)
    }
}
