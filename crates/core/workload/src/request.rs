//! One request of a workload.

use slipstream_base::{RequestId, SimTime};
#[cfg(doc)]
use slipstream_config::workload_file::Workload;

use crate::prompt::PromptSource;

/// Limit of a session's turns; a request's number has 12 bits for them.
pub const TURNS_MAX: u32 = 1 << 12;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Number of the session, from 0 in order of arrival.
    pub session: u64,
    /// Turn of the session, from 0.
    pub turn: u32,
    /// Planned turns of the session.
    pub turns: u32,
    /// Due time, after the run's start; compressed by the time scale. For a later turn: known when
    /// the previous answer is complete.
    pub due: SimTime,
    /// The prompt.
    pub prompt: PromptSource,
    /// Limit of tokens to generate (exact, if `ignore_eos`), at least 1.
    pub output_len: u32,
    /// Generate `output_len` tokens whatever the natural length is.
    pub ignore_eos: bool,
    /// Priority in engines that schedule by priority: lower goes first.
    pub priority: i32,
    /// Its LoRA adapter ([`adapter_id`](slipstream_base::adapter_id)); 0: the model itself.
    pub adapter: u64,
    /// Images in its prompt.
    pub images: Images,
    /// Its model, as an index into [`Workload::served_models`]; 0 if there is one.
    pub model: u32,
    /// Index of its class in the workload.
    pub class: u32,
}

/// Images in a prompt, one after the other. None of them is in another session's prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Images {
    /// Their number.
    pub count: u32,
    /// The first one's first token in the prompt.
    pub offset: u32,
    /// Tokens of each.
    pub tokens: u32,
}

impl Request {
    /// The request's number: the same in every run of the workload.
    pub fn id(&self) -> RequestId {
        RequestId(self.session << 12 | u64::from(self.turn))
    }

    /// The request's name in reports: `session.turn`.
    pub fn name(&self) -> String {
        format!("{}.{}", self.session, self.turn)
    }

    /// Whether another turn follows.
    pub fn has_next(&self) -> bool {
        self.turn + 1 < self.turns
    }
}
