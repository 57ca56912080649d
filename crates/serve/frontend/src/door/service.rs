//! The service of all shards: one model behind one fleet.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slipstream_base::BlockHash;
use slipstream_metrics::{Collector, Family};
use slipstream_recorder::RecorderHandle;
use slipstream_router::Fleets;
use subtle::ConstantTimeEq;

use crate::door::access::AccessLog;
use crate::door::budget::ClientUse;
use crate::door::faults::Faults;
use crate::door::limits::Limits;
use crate::door::management::Management;
use crate::door::otlp::SpanExporter;
use crate::door::rates::{KeyRates, KeyUse};
use crate::door::shadow::ShadowFeed;
use crate::text::TextModel;

/// The served model and the limits. Immutable once the frontend runs.
pub struct Service {
    /// Name that clients send as `model`.
    pub model: String,
    /// Text to tokens and back.
    pub text: Arc<TextModel>,
    /// Root of block hashes.
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
    /// The key of admin paths: `/admin/faults`, and the routes of `management`, which take API keys without it.
    pub admin_key: ApiKeys,
    /// Browser pages that may use the API.
    pub origins: Origins,
    /// Bounds on what clients may do.
    pub limits: Limits,
    /// State that operators change by vLLM's routes: adapters, the prefix cache, sleep.
    pub management: Arc<Management>,
    /// Tokens of an image in a chat; 0: the model takes none.
    pub image_tokens: u32,
    /// Errors and broken streams by rate.
    pub faults: Arc<Faults>,
    /// Records requests at their end; `None`: nothing is recorded.
    pub recorder: Option<RecorderHandle>,
    /// A twin of the real engines that gets their requests.
    pub shadow: Option<ShadowFeed>,
    /// Has a line per request; `None`: there is none.
    pub access: Option<AccessLog>,
    /// Exports spans of sampled requests; `None`: there are none.
    pub spans: Option<SpanExporter>,
    /// Share of requests without a trace that begin one which is sampled, 0 to 1.
    pub trace_sample: f64,
    /// When the server started, Unix time, s.
    pub created: u64,
    /// Shards write tokens to sockets themselves where they can. Off only to compare. Usually on.
    pub direct_writes: bool,
    /// Seed of what requests leave open: the content of answers without `seed`, request ids.
    pub seed: u64,
}

impl Service {
    /// A service of `model` by the workers of `fleets`: no keys, the default [`Limits`], no limit of a prompt's
    /// length, no log and no record.
    pub fn new(model: &str, text: Arc<TextModel>, fleets: Fleets) -> Service {
        Service {
            model: model.to_owned(),
            text,
            root: BlockHash::root(model, "", ""),
            block_size: fleets.serve.block_size(),
            max_model_len: u32::MAX,
            kv_blocks: u32::MAX,
            keep_tokens: false,
            fleets,
            api_keys: ApiKeys::default(),
            admin_key: ApiKeys::default(),
            origins: Origins::default(),
            limits: Limits::default(),
            management: Arc::default(),
            image_tokens: 0,
            faults: Arc::default(),
            recorder: None,
            shadow: None,
            access: None,
            spans: None,
            trace_sample: 0.0,
            created: 0,
            direct_writes: true,
            seed: 1,
        }
    }

    /// Prompt plus answer at most that an engine can hold, tokens.
    pub(crate) fn context_max(&self) -> u32 {
        let blocks_hold = self.kv_blocks.saturating_mul(self.block_size);
        self.max_model_len.min(blocks_hold)
    }
}

/// API keys, compared in constant time. Cheap to clone.
#[derive(Clone, Default)]
pub struct ApiKeys(Arc<Keys>);

/// Keys are found by a hash with a secret seed, so that ten thousand cost as much as one, and its time reveals nothing.
#[derive(Default)]
struct Keys {
    hasher: RandomState,
    /// Numbers of the keys with a hash.
    by_hash: HashMap<u64, Vec<usize>>,
    all: Vec<(String, Arc<ClientUse>)>,
}

/// Access to the API.
pub(crate) enum Admission {
    /// Everyone: there are no keys.
    Open,
    /// The owner of a key.
    Key(Arc<ClientUse>),
    Refused,
}

impl Keys {
    fn find(&self, key: &[u8]) -> Option<usize> {
        let hash = self.hasher.hash_one(key);
        let same = |&&at: &&usize| bool::from(self.all[at].0.as_bytes().ct_eq(key));
        self.by_hash.get(&hash)?.iter().find(same).copied()
    }

    fn add(&mut self, key: String, use_of: KeyUse) {
        let hash = self.hasher.hash_one(key.as_bytes());
        self.by_hash.entry(hash).or_default().push(self.all.len());
        self.all.push((key, Arc::new(ClientUse::of_key(use_of))));
    }
}

/// The text of a line of keys; `None`: it is blank or a comment.
fn key_line(line: &str) -> Option<&str> {
    let line = line.trim().trim_start_matches('\u{feff}').trim_start();
    (!line.is_empty() && !line.starts_with('#')).then_some(line)
}

impl ApiKeys {
    /// The keys that are accepted; blank ones, and comments (`# …`), are dropped.
    pub fn new(keys: impl IntoIterator<Item = String>) -> ApiKeys {
        ApiKeys::default().with(keys)
    }

    /// These keys, and `more` without limits.
    #[must_use]
    pub fn with(self, more: impl IntoIterator<Item = String>) -> ApiKeys {
        let mut keys = Arc::into_inner(self.0).unwrap_or_default();
        for key in more {
            if let Some(key) = key_line(&key)
                && keys.find(key.as_bytes()).is_none()
            {
                let name = format!("key-{}", keys.all.len() + 1);
                keys.add(key.to_owned(), KeyUse::new(name, KeyRates::default()));
            }
        }
        ApiKeys(Arc::new(keys))
    }

    /// The keys of a file: one per line, with its name and limits after it, such as
    /// `sk-1 name=web requests_per_s=5 request_burst=20 tokens_per_s=2000 token_burst=50000`.
    ///
    /// # Errors
    /// The number of the line, and its fault; never the key.
    pub fn parse(text: &str) -> Result<ApiKeys, String> {
        let mut keys = Keys::default();
        let mut names = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let Some(line) = key_line(line) else {
                continue;
            };
            let mut words = line.split_ascii_whitespace();
            let key = words.next().unwrap_or_default();
            let fault = |fault: String| format!("line {number}: {fault}");
            if let Some((field, _)) = key.split_once('=')
                && FIELDS.contains(&field)
            {
                return Err(fault(format!(
                    "it begins with `{field}`; write the key first, then its name and limits"
                )));
            }
            if keys.find(key.as_bytes()).is_some() {
                return Err(fault("the key is listed before; list each once".into()));
            }
            let (name, rates) = options(words).map_err(fault)?;
            let name = name.unwrap_or_else(|| format!("key-{}", keys.all.len() + 1));
            if let Some(before) = names.insert(name.clone(), number) {
                return Err(fault(format!(
                    "the name `{name}` is that of the key in line {before}; give each a name of its own"
                )));
            }
            keys.add(key.to_owned(), KeyUse::new(name, rates));
        }
        Ok(ApiKeys(Arc::new(keys)))
    }

    /// Whether there are none, so that the API is open to all.
    pub fn is_empty(&self) -> bool {
        self.0.all.is_empty()
    }

    /// Counts of the keys, by name.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.clone(), ApiKeys::clone, KEY_FAMILIES)
    }

    fn used(&self) -> impl Iterator<Item = &KeyUse> {
        let keys = self.0.all.iter();
        keys.filter_map(|(_, client)| client.key.as_ref())
            .filter(|key| key.asked.load(Relaxed) > 0)
    }

    /// Whether a request with this `Authorization` header may pass.
    pub(crate) fn admit(&self, authorization: Option<&[u8]>) -> Admission {
        if self.is_empty() {
            return Admission::Open;
        }
        let sent = authorization.and_then(bearer_token);
        match sent.and_then(|sent| self.0.find(sent)) {
            Some(at) => Admission::Key(self.0.all[at].1.clone()),
            None => Admission::Refused,
        }
    }
}

/// Fields that may follow a key.
const FIELDS: [&str; 5] = [
    "name",
    "requests_per_s",
    "request_burst",
    "tokens_per_s",
    "token_burst",
];

/// Name and limits behind a key.
fn options<'a>(words: impl Iterator<Item = &'a str>) -> Result<(Option<String>, KeyRates), String> {
    const KNOWN: &str = "name, requests_per_s, request_burst, tokens_per_s and token_burst";
    let (mut name, mut rates) = (None, KeyRates::default());
    let mut seen = Vec::new();
    for word in words {
        let Some((field, value)) = word.split_once('=') else {
            // It may be a part of a key.
            return Err(format!(
                "a word behind the key is not FIELD=VALUE; fields are {KNOWN}, and keys have no spaces"
            ));
        };
        if seen.contains(&field) {
            return Err(format!("`{field}` is given twice"));
        }
        seen.push(field);
        if field == "name" {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if value.is_empty() || value.len() > 64 || !value.chars().all(plain) {
                return Err("a name has 1 to 64 letters, digits, `-`, `_` and `.`".into());
            }
            name = Some(value.to_owned());
            continue;
        }
        let (slot, least) = match field {
            "requests_per_s" => (&mut rates.requests_per_s, 1e-6),
            "request_burst" => (&mut rates.request_burst, 1.0),
            "tokens_per_s" => (&mut rates.tokens_per_s, 1e-6),
            "token_burst" => (&mut rates.token_burst, 1.0),
            _ => return Err(format!("there is no field `{field}`; fields are {KNOWN}")),
        };
        let number = value.parse().ok().filter(|n| (least..=1e9).contains(n));
        *slot = Some(number.ok_or(format!("`{field}` is a number from {least} to 1e9"))?);
    }
    for (rate, burst, what) in [
        (rates.requests_per_s, rates.request_burst, "request"),
        (rates.tokens_per_s, rates.token_burst, "token"),
    ] {
        if rate.is_none() && burst.is_some() {
            return Err(format!("`{what}_burst` needs `{what}s_per_s`"));
        }
    }
    Ok((name, rates))
}

/// Counts of API keys that were used.
const KEY_FAMILIES: &[Family<ApiKeys>] = &[
    Family::counter(
        "slipstream_key_requests",
        "Requests of an API key that costs something, also those that were refused",
        |of, samples| {
            for key in of.used() {
                samples.add(&[("key", &key.name)], key.asked.load(Relaxed));
            }
        },
    ),
    Family::counter(
        "slipstream_key_limited",
        "Requests of an API key that were refused because of its rate",
        |of, samples| {
            for key in of.used() {
                for (rate, count) in ["requests", "tokens"].iter().zip(&key.limited) {
                    samples.add(&[("key", &key.name), ("rate", rate)], count.load(Relaxed));
                }
            }
        },
    ),
];

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

    #[test]
    fn connections_and_those_to_engines_fit_the_open_files() {
        let mut files = 1;
        while files < 1 << 24 {
            for forwards in [false, true] {
                let mut limits = Limits::default();
                let before = limits.fit_files(files, forwards);
                let most = u64::from(limits.connections_max);
                assert!(most >= 1 && (files < 4 || most * (1 + u64::from(forwards)) < files));
                assert_eq!(before.is_some(), limits.connections_max < 65_536);
            }
            files = files * 3 / 2 + 1;
        }
    }

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
    fn keys_of_a_file_have_names_and_limits() {
        let text = "# team keys\n\nalpha\n beta  name=web requests_per_s=0.5 tokens_per_s=100 token_burst=1000\n";
        let keys = ApiKeys::parse(text).unwrap().with(["gamma".to_owned()]);
        let name = |key: &str| match keys.admit(Some(format!("Bearer {key}").as_bytes())) {
            Admission::Key(client) => client.key.as_ref().unwrap().name.to_string(),
            _ => panic!("{key}"),
        };
        assert_eq!(
            [name("alpha"), name("beta"), name("gamma")],
            ["key-1", "web", "key-3"]
        );
        assert!(!admits(&keys, Some(b"Bearer beta  name=web")));
        for (line, part) in [
            ("sk-secret sk-more", "FIELD=VALUE"),
            ("sk-secret requests_per_s=0", "requests_per_s"),
            ("sk-secret requests_per_s=NaN", "requests_per_s"),
            ("sk-secret tokens_per_s=-1", "tokens_per_s"),
            ("sk-secret token_burst=5", "needs `tokens_per_s`"),
            ("sk-secret rps=5", "no field `rps`"),
            ("sk-secret name=a/b", "letters"),
            ("alpha", "listed before"),
            ("sk-secret name=key-1", "in line 1"),
        ] {
            let error = ApiKeys::parse(&format!("alpha\n{line}\n"))
                .err()
                .expect(line);
            assert!(
                error.starts_with("line 2: ") && error.contains(part),
                "{error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn ten_thousand_keys_are_told_apart() {
        let keys: Vec<String> = (0..10_000).map(|n| format!("sk-{n}")).collect();
        let text: Vec<String> = keys
            .iter()
            .map(|key| format!("{key} requests_per_s=1"))
            .collect();
        let parsed = ApiKeys::parse(&text.join("\n")).unwrap();
        for (at, key) in keys.iter().enumerate() {
            let Admission::Key(client) = parsed.admit(Some(format!("Bearer {key}").as_bytes()))
            else {
                panic!("{key}");
            };
            assert_eq!(
                *client.key.as_ref().unwrap().name,
                format!("key-{}", at + 1)
            );
        }
        assert!(!admits(&parsed, Some(b"Bearer sk-10000")));
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
