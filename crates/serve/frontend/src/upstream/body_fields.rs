//! The fields of a client's body that forwarding needs, without the body.

use super::peek::Peek;

/// A body up to this is read on the shard's thread, some 0.3 ms of work; a longer one by a helper thread.
pub(super) const READ_BYTES: usize = 64 << 10;

/// The read part of a body.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools)] // each is a field of the body
pub(super) struct BodyFields {
    pub(super) model: Option<String>,
    pub(super) stream: bool,
    pub(super) return_token_ids: Option<bool>,
    pub(super) max_tokens: Option<u32>,
    pub(super) n: Option<u32>,
    pub(super) has_odd_n: bool,
    pub(super) priority: Option<i32>,
    pub(super) previous_response_id: Option<String>,
    pub(super) has_two_previous: bool,
    pub(super) chooses_id: bool,
    pub(super) has_prompt: bool,
    /// Prompts of a completion.
    pub(super) prompts: u32,
    /// As of [`Peek`].
    pub(super) hinders: bool,
    pub(super) has_tools: bool,
    pub(super) has_media: bool,
    /// One engine must compute prompt and answer.
    pub(super) whole: bool,
}

impl BodyFields {
    /// Number of choices of its answer; `None` if engines may count otherwise.
    pub(super) fn choices(&self) -> Option<u64> {
        let each = u64::from(self.n.unwrap_or(1).max(1));
        (!self.has_odd_n).then(|| each * u64::from(self.prompts))
    }

    pub(super) fn of(seen: Peek<'_>) -> BodyFields {
        BodyFields {
            stream: seen.stream,
            return_token_ids: seen.return_token_ids,
            max_tokens: seen.max_tokens,
            n: seen.n,
            has_odd_n: seen.has_odd_n,
            priority: seen.priority,
            previous_response_id: seen.previous_response_id.clone(),
            has_two_previous: seen.has_two_previous,
            chooses_id: seen.chooses_id,
            has_prompt: seen.has_prompt(),
            prompts: seen.prompts(),
            hinders: seen.hinders,
            has_tools: seen.has_tools,
            has_media: seen.has_media,
            whole: seen.stays_whole(),
            model: seen.model,
        }
    }
}
