//! What all shards serve: one model behind one fleet.

use std::sync::Arc;
use std::time::Duration;

use slipstream_base::BlockHash;
use slipstream_config::cluster::LiveConfig;
use slipstream_recorder::RecorderHandle;
use slipstream_router::Fleets;
use subtle::ConstantTimeEq;

use crate::budget::ClientUse;
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
    /// Browser pages that may use the API.
    pub origins: Origins,
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
    /// A connection without a request, and a duplex request without a turn, is closed after this time.
    pub idle_timeout: Duration,
    /// Memory for clients' bodies, answers, buffers and connections, bytes.
    pub memory_max: u64,
    /// Answer that is not streamed, bytes.
    pub answer_bytes_max: u64,
    /// Open connections.
    pub connections_max: u32,
    /// Open connections of one address; 0: seven eighths of all.
    pub client_connections_max: u32,
    /// Open streams of one client; 0: seven eighths of all.
    pub client_streams_max: u32,
    /// Open streams of one connection.
    pub connection_streams_max: u32,
}

impl Default for Limits {
    /// Those of an empty cluster file, with 1 GiB of memory.
    fn default() -> Self {
        let live = LiveConfig::default();
        Limits {
            memory_max: 1 << 30,
            ..Limits::of(&live)
        }
    }
}

impl Limits {
    /// The limits that `live` names.
    pub fn of(live: &LiveConfig) -> Limits {
        let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or(Duration::MAX);
        Limits {
            body_bytes_max: live.body_bytes_max,
            header_bytes_max: live.header_bytes_max,
            read_timeout: seconds(live.read_timeout_s),
            write_timeout: seconds(live.write_timeout_s),
            request_timeout: (live.request_timeout_s > 0.0)
                .then(|| seconds(live.request_timeout_s)),
            streams_max: live.streams_max,
            stream_buffer_bytes_max: live.stream_buffer_bytes_max,
            drain: seconds(live.drain_timeout_s),
            idle_timeout: seconds(live.idle_timeout_s),
            memory_max: live.memory_max,
            answer_bytes_max: live.answer_bytes_max,
            connections_max: live.connections_max,
            client_connections_max: live.client_connections_max,
            client_streams_max: live.client_streams_max,
            connection_streams_max: live.connection_streams_max,
        }
    }
}

/// API keys, compared in constant time.
#[derive(Clone, Default)]
pub struct ApiKeys(Vec<(String, Arc<ClientUse>)>);

/// Who may use the API.
pub(crate) enum Admission {
    /// Everyone: there are no keys.
    Open,
    /// The owner of a key.
    Key(Arc<ClientUse>),
    Refused,
}

impl ApiKeys {
    /// The keys that are accepted; blank ones, and comments (`# …`), are dropped.
    pub fn new(keys: impl IntoIterator<Item = String>) -> ApiKeys {
        let keys = keys.into_iter();
        let keys = keys.map(|key| key.trim().trim_start_matches('\u{feff}').to_owned());
        let keys = keys.filter(|key| !key.is_empty() && !key.starts_with('#'));
        ApiKeys(keys.map(|key| (key, Arc::default())).collect())
    }

    /// Whether there are none, so that the API is open to all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a request with this `Authorization` header may pass.
    pub(crate) fn admit(&self, authorization: Option<&[u8]>) -> Admission {
        if self.0.is_empty() {
            return Admission::Open;
        }
        let Some(sent) = authorization.and_then(bearer_token) else {
            return Admission::Refused;
        };
        // All keys are looked at, so that the time does not tell which one was close.
        let mut found = Admission::Refused;
        for (key, client) in &self.0 {
            if bool::from(key.as_bytes().ct_eq(sent)) {
                found = Admission::Key(client.clone());
            }
        }
        found
    }
}

/// The token of a header `Bearer TOKEN`. The scheme ignores case, and one or more spaces follow it (RFC 9110,
/// sections 11.1 and 11.4).
fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer";
    let (scheme, token) = value.split_at_checked(SCHEME.len())?;
    let spaces = token.iter().take_while(|&&byte| byte == b' ').count();
    (scheme.eq_ignore_ascii_case(SCHEME) && spaces > 0).then(|| &token[spaces..])
}

/// Origins of browser pages that may use the API (CORS).
#[derive(Clone, Debug, Default)]
pub struct Origins(Vec<String>);

impl Origins {
    /// From `live.cors_origins`: `*`, or origins with commas between them.
    pub fn new(list: &str) -> Origins {
        let origins = list.split(',').map(str::trim);
        Origins(
            origins
                .filter(|origin| !origin.is_empty())
                .map(str::to_owned)
                .collect(),
        )
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether pages of `origin` may use the API.
    pub(crate) fn admit(&self, origin: &[u8]) -> bool {
        let same = |allowed: &String| allowed == "*" || allowed.as_bytes() == origin;
        self.0.iter().any(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(keys: &ApiKeys, authorization: Option<&[u8]>) -> bool {
        !matches!(keys.admit(authorization), Admission::Refused)
    }

    #[test]
    fn keys_admit_only_bearers_of_one() {
        let keys = [" beta \n", "", "# gamma", "alpha", "\u{feff}delta"].map(str::to_owned);
        let keys = ApiKeys::new(keys);
        for right in [
            "Bearer alpha",
            "bearer beta",
            "BEARER  alpha",
            "Bearer delta",
        ] {
            assert!(admits(&keys, Some(right.as_bytes())), "{right}");
        }
        for wrong in [
            None,
            Some(&b"Bearer "[..]),
            Some(b"Beareralpha"),
            Some(b"alpha"),
            Some(b"Bearer # gamma"),
            Some(b"Bearer alph"),
            Some(b"Basic alpha"),
        ] {
            assert!(!admits(&keys, wrong), "{wrong:?}");
        }
        assert!(admits(&ApiKeys::default(), None), "no keys: open to all");
        let comments = ApiKeys::new(["# alpha".to_owned(), " ".to_owned()]);
        assert!(comments.is_empty());
    }

    #[test]
    fn origins_are_compared_as_a_whole() {
        let origins = Origins::new("https://a.example, http://localhost:3000,");
        assert!(origins.admit(b"http://localhost:3000"));
        for wrong in ["https://a.example.evil.example", "https://a", "null", ""] {
            assert!(!origins.admit(wrong.as_bytes()), "{wrong}");
        }
        assert!(Origins::new("*").admit(b"https://any.example"));
        assert!(Origins::new("").is_empty());
    }
}
