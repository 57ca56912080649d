//! What all shards serve: one model behind one fleet.

use std::sync::Arc;
use std::time::Duration;

use slipstream_base::BlockHash;
use slipstream_recorder::RecorderHandle;
use slipstream_router::Fleets;
use subtle::ConstantTimeEq;

use crate::text::TextModel;

/// What is served, and within which limits. Immutable once the frontend runs.
pub struct Service {
    /// Name that clients send as `model`.
    pub model: String,
    /// Text to tokens and back.
    pub text: Arc<TextModel>,
    /// What block hashes are chained from.
    pub root: BlockHash,
    /// Tokens per block of the engines.
    pub block_size: u32,
    /// Prompt plus answer at most, tokens.
    pub max_model_len: u32,
    /// KV blocks of one engine: a prompt that needs more can never run.
    pub kv_blocks: u32,
    /// Prompts keep the tokens of their full blocks, for KV events that name them.
    pub keep_tokens: bool,
    /// The workers.
    pub fleets: Fleets,
    /// Keys that clients must send; empty: none needed.
    pub api_keys: ApiKeys,
    /// Bounds on what clients may do.
    pub limits: Limits,
    /// Records requests at their end; `None`: nothing is recorded.
    pub recorder: Option<RecorderHandle>,
    /// When the server started, Unix time, s.
    pub created: u64,
    /// Locks all shards' stream tables by one mutex, to measure what it costs to share them.
    #[cfg(feature = "bench")]
    pub locked_table: bool,
    /// Seed of what requests leave open: the content of answers without `seed`, request ids.
    pub seed: u64,
}

impl Service {
    /// Prompt plus answer at most that an engine can hold, tokens.
    pub(crate) fn context_max(&self) -> u32 {
        let blocks_hold = self.kv_blocks.saturating_mul(self.block_size);
        self.max_model_len.min(blocks_hold)
    }
}

/// Bounds on what clients may do.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Request body, bytes.
    pub body_bytes_max: u64,
    /// Request head, bytes. No less than 8 KiB.
    pub header_bytes_max: u32,
    /// A request's head must arrive in this time, and its body after that.
    pub read_timeout: Duration,
    /// A client may take no data for this long.
    pub write_timeout: Duration,
    /// From a request's head to its last byte; `None`: no limit.
    pub request_timeout: Option<Duration>,
    /// Sequences under way over all shards.
    pub streams_max: u32,
    /// Unread answer per request, bytes.
    pub stream_buffer_bytes_max: u64,
    /// Time that open requests have to finish at shutdown.
    pub drain: Duration,
}

/// API keys, compared in constant time.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<String>);

impl ApiKeys {
    /// The keys that are accepted; blank ones, and comments (`# …`), are dropped.
    pub fn new(keys: impl IntoIterator<Item = String>) -> ApiKeys {
        let keys = keys.into_iter().map(|key| key.trim().to_owned());
        ApiKeys(
            keys.filter(|key| !key.is_empty() && !key.starts_with('#'))
                .collect(),
        )
    }

    /// Whether a request with this `Authorization` header may pass.
    pub(crate) fn admit(&self, authorization: Option<&[u8]>) -> bool {
        if self.0.is_empty() {
            return true;
        }
        let Some(sent) = authorization.and_then(|value| value.strip_prefix(b"Bearer ")) else {
            return false;
        };
        // All keys are looked at, so that the time does not tell which one was close.
        self.0.iter().fold(false, |found, key| {
            found | bool::from(key.as_bytes().ct_eq(sent))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_admit_only_bearers_of_one() {
        let keys = [" beta \n", "", "# gamma", "alpha"].map(str::to_owned);
        let keys = ApiKeys::new(keys);
        assert!(keys.admit(Some(b"Bearer alpha")));
        assert!(keys.admit(Some(b"Bearer beta")));
        for wrong in [
            None,
            Some(&b"Bearer "[..]),
            Some(b"Bearer # gamma"),
            Some(b"Bearer alph"),
            Some(b"Basic alpha"),
        ] {
            assert!(!keys.admit(wrong), "{wrong:?}");
        }
        assert!(ApiKeys::default().admit(None), "no keys: open to all");
    }
}
