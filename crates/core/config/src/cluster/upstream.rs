//! Real engines behind HTTP: `engines` of a pool, and `[upstream]`.

use std::fmt;
use std::path::PathBuf;

use slipstream_base::{EngineKind, Role};

use super::DAY_S;
use crate::doc::{Table, choice, optional, path, section, value};

/// How keys and values of a prompt get from a prefill engine to the decode engine, and when the decode engine gets
/// its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvProtocol {
    /// By kind: [`KvProtocol::Sglang`] for SGLang, [`KvProtocol::Params`] for others.
    #[default]
    Auto,
    /// The answer of the prefill engine has `kv_transfer_params` for the decode engine, which is asked then.
    Params,
    /// vLLM's MooncakeConnector: both are asked at once, with a `transfer_id` of the router.
    Mooncake,
    /// SGLang: both are asked at once, with a `bootstrap_room` of the router.
    Sglang,
}

pub(super) const KV_PROTOCOLS: &[(&str, KvProtocol)] = &[
    ("auto", KvProtocol::Auto),
    ("kv_transfer_params", KvProtocol::Params),
    ("mooncake", KvProtocol::Mooncake),
    ("sglang", KvProtocol::Sglang),
];

impl KvProtocol {
    /// The protocol of an engine of `kind`.
    #[must_use]
    pub fn of_kind(self, kind: EngineKind) -> KvProtocol {
        match (self, kind) {
            (KvProtocol::Auto, EngineKind::Sglang) => KvProtocol::Sglang,
            (KvProtocol::Auto, _) => KvProtocol::Params,
            (set, _) => set,
        }
    }
}

/// Port of the bootstrap servers of prefill engines, by default: of SGLang's and of vLLM's MooncakeConnector.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// Address of an engine: `http://HOST:PORT` or `https://HOST:PORT`, with an optional path prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineUrl {
    /// `https://`: connections are encrypted, and the engine's certificate is verified.
    pub tls: bool,
    /// Host name or IP address; IPv6 without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Precedes the path of every request; empty, or begins with `/` and does not end with it.
    pub prefix: String,
}

impl EngineUrl {
    /// Parses `http://HOST[:PORT][/PREFIX]`, or the same with `https://`. The port is 80 or 443 by default.
    ///
    /// # Errors
    /// The fault, as the end of a sentence.
    pub fn parse(text: &str) -> Result<EngineUrl, String> {
        let (tls, rest) = match (text.strip_prefix("http://"), text.strip_prefix("https://")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) if text.is_empty() || text.contains("://") => {
                return Err("does not begin with http:// or https://".into());
            }
            (None, None) => {
                return Err(format!(
                    "does not begin with http:// or https://; write http://{text}"
                ));
            }
        };
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        if path.contains(['?', '#']) || authority.contains(['?', '#', '@']) {
            return Err("has a query, a fragment or a user; write http://HOST:PORT".into());
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(v6) => {
                let (host, rest) = v6.split_once(']').ok_or("has a [ without a ]")?;
                let Ok(host) = host.parse::<std::net::Ipv6Addr>() else {
                    return Err("has no IPv6 address between [ and ]".into());
                };
                (host.to_string(), rest.strip_prefix(':'))
            }
            None => match authority.split_once(':') {
                // A host has no case (RFC 3986, section 3.2.2).
                Some((host, port)) => (host.to_ascii_lowercase(), Some(port)),
                None => (authority.to_ascii_lowercase(), None),
            },
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_v6 = authority.starts_with('[');
        if host.is_empty() || !is_v6 && !host.chars().all(plain) {
            return Err("has no host name".into());
        }
        let port = match port {
            None if tls => 443,
            None => 80,
            Some(port) => match port.parse::<u16>() {
                Ok(port) if port > 0 => port,
                _ => return Err(format!("has the port `{port}`; write 1 to 65535")),
            },
        };
        if !path.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("has a path with spaces or other than ASCII".into());
        }
        Ok(EngineUrl {
            tls,
            host,
            port,
            prefix: path.trim_end_matches('/').to_owned(),
        })
    }

    /// Parses an engine's address. A client's base URL is that with `/v1`, which precedes the path of every request
    /// anyway, so it is left out.
    ///
    /// # Errors
    /// The fault, as the end of a sentence.
    pub fn parse_engine(text: &str) -> Result<EngineUrl, String> {
        let mut url = EngineUrl::parse(text)?;
        if let Some((before, _)) = url.prefix.split_once("/v1/") {
            url.prefix = before.to_owned();
            return Err(format!("has the path of an endpoint; write {url}"));
        }
        if let Some(before) = url.prefix.strip_suffix("/v1") {
            url.prefix = before.trim_end_matches('/').to_owned();
        }
        Ok(url)
    }

    /// Value of the `Host` header.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.prefix)
    }
}

/// Real engines of a pool. Each is one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpEngines {
    /// Addresses, at least one, each once.
    pub urls: Vec<EngineUrl>,
    /// The server they run.
    pub kind: EngineKind,
    /// File with the API key that they want; `None`: they get the client's `Authorization`, if the
    /// router itself needs no key.
    pub api_key_file: Option<PathBuf>,
    /// TLS towards its `https://` engines.
    pub tls: EngineTls,
    /// Its share of the requests.
    pub traffic: PoolTraffic,
    /// Names whose addresses are engines as well, looked up again every `upstream.dns_interval_s`.
    pub dns: Vec<EngineUrl>,
    /// Label of Kubernetes' EndpointSlices whose ready endpoints are engines as well.
    pub endpoint_slices: Option<String>,
    /// Name or number of their port; `None`: a slice has one.
    pub endpoint_port: Option<String>,
    /// Of prefill engines: how their keys and values get to decode engines.
    pub kv_protocol: KvProtocol,
    /// Port of their bootstrap servers, at the hosts of the engines. Default [`BOOTSTRAP_PORT`].
    pub bootstrap_port: u16,
}

/// Share of the requests that the engines of a pool get.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolTraffic {
    /// Weight among the pools that serve a model; `None`: 1, or no weights at all if no pool has one.
    pub weight: Option<u32>,
    /// Share of requests of which it gets a copy, and whose answers are dropped. It answers no client.
    pub mirror: Option<f64>,
}

/// TLS towards the engines of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTls {
    /// PEM file of the authorities that sign the engines' certificates; `None`: those of the host.
    pub ca_file: Option<PathBuf>,
    /// PEM files of the router's certificate and its key, for engines that ask for one.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Name that the engines' certificates must carry, and that is sent as SNI; `None`: the host of the URL.
    pub server_name: Option<String>,
}

/// Limit of engines in one pool.
const ENGINES_MAX: usize = 4096;

/// Limit of names in one pool.
const NAMES_MAX: usize = 64;

section! {
    keys EnginesKeys of "pool.NAME" {
        /// Real engines, such as `["http://gpu1:8000"]`, or `https://`; each is one worker. `[pool.NAME.engine]` then
        /// says what the router assumes of them: `block_size` and `num_gpu_blocks` bound what it remembers of routed
        /// prompts.
        ///
        /// An engine that does not answer gets no requests until it does; the server starts without it.
        key engines?: Vec<String> = optional()
            .check(|urls: &Vec<String>| (1..=ENGINES_MAX).contains(&urls.len()), "a list of 1 to 4,096 addresses")
            .with_description("list of addresses, 1 to 4,096")
            .with_default_text("none: modelled workers");
        /// Names whose addresses are further engines of the pool, such as `["http://engines.default.svc:8000"]`: all
        /// of their A and AAAA records, looked up again every `upstream.dns_interval_s`.
        ///
        /// A name that cannot be looked up changes nothing. `https://` needs `server_name`.
        key dns?: Vec<String> = optional()
            .check(|urls: &Vec<String>| (1..=NAMES_MAX).contains(&urls.len()), "a list of 1 to 64 addresses")
            .with_description("list of addresses, 1 to 64");
        /// The ready endpoints of Kubernetes' EndpointSlices with these labels are further engines of the pool, such
        /// as `"kubernetes.io/service-name=vllm"`. They are watched, so changes are noticed at once.
        ///
        /// The service account must list and watch endpointslices. While the API server does not answer, nothing
        /// changes.
        key endpoint_slices?: String = optional()
            .check(|text: &String| is_printable(text), "a label selector, such as \"app=vllm\"")
            .with_description("label selector");
        /// The port of the EndpointSlices that the engines listen on.
        ///
        /// Slices without it have no engines.
        key endpoint_port?: String = optional()
            .check(|text: &String| is_printable(text), "a port's name or number, as text")

            .with_description("name or number, as text; needs `endpoint_slices`").with_default_text("the only port of a slice");
        /// How decode engines find what the pool's engines computed: by the answer of the prefill engine, or by an id
        /// that both get at once, from vLLM's MooncakeConnector or SGLang
        /// ([table](engines.md#disaggregated-prefill)). "auto": "sglang" for that kind, "kv_transfer_params" for
        /// others.
        ///
        /// Another protocol than the engines': decode engines compute all prompts, or wait until a time limit of
        /// their own.
        key kv_protocol: KvProtocol = choice(KV_PROTOCOLS, KvProtocol::Auto)
            .note("needs the role \"prefill\"");
        /// Port of the prefill engines' bootstrap servers, at the host of each (`--disaggregation-bootstrap-port` of
        /// SGLang, `VLLM_MOONCAKE_BOOTSTRAP_PORT` of vLLM). Engines of one host need a pool each.
        ///
        /// Wrong: decode engines of SGLang fail all requests; prefill engines with Mooncake are down.
        key bootstrap_port: u16 = value(BOOTSTRAP_PORT).within(1..=u16::MAX)
            .note("needs the role \"prefill\"");
        /// Share of the requests for a model that the pool gets, relative to the weights of the other pools that
        /// serve it, as in the Gateway API. Requests of a session (`x-session-id`) stay in one pool. 0: none.
        ///
        /// Pools without a ready engine count as 0. Without weights all engines of a model compete for a request.
        key weight?: u32 = optional().within(0..=1_000_000)
            .with_default_text("1; no weights if no pool has one");
        /// Share of requests of which the pool gets a copy. Its answers are dropped and counted, and it answers no
        /// client.
        ///
        /// High: as many requests again, and their bodies in memory until the copy is answered.
        key mirror?: f64 = optional().within(0.0..=1.0);
        /// The server that `engines` run. "auto": found by `owned_by` of `GET /v1/models`. "openai": health is asked
        /// by `GET /v1/models`, for servers without `/health`.
        ///
        /// Wrong: health checks of a path that does not exist, so the engine stays down.
        key kind: EngineKind = choice(EngineKind::STATED, EngineKind::Auto);
        /// File with the API key of `engines`, sent as `Authorization: Bearer KEY`. Without it, engines get the
        /// client's `Authorization`, unless the router checks keys of its own.
        ///
        /// Missing: engines with `--api-key` answer 401.
        key api_key_file?: PathBuf = path();
        /// For `https://` engines: PEM file of the authorities that sign their certificates, instead of those of the
        /// host.
        ///
        /// Of another authority: the engines stay down, with the cause `certificate_untrusted`. There is no way to
        /// turn verification off.
        key ca_file?: PathBuf = path().with_default_text("the host's authorities");
        /// For `https://` engines that ask clients for a certificate: PEM file of the router's, with the intermediate
        /// ones.
        ///
        /// Missing: such engines stay down, with the cause `client_certificate`.
        key cert_file?: PathBuf = path().note("needs `key_file`");
        /// PEM file of that certificate's private key.
        key key_file?: PathBuf = path().note("needs `cert_file`");
        /// For `https://` engines: the name that their certificates must carry, and that is sent to them as SNI.
        ///
        /// Wrong: the engines stay down, with the cause `certificate_name`.
        key server_name?: String = optional()
            .check(|text: &String| is_host_name(text), "a host name or an IP address")
            .with_description("host name or IP address").with_default_text("the host of the URL");
    }
}

/// Keys of [`EngineTls`].
const TLS_KEYS: [&str; 4] = ["ca_file", "cert_file", "key_file", "server_name"];

fn is_printable(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 1024
        && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
}

fn is_host_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:".contains(c);
    !name.is_empty() && name.len() <= 253 && name.chars().all(plain)
}

/// The addresses of `engines`.
fn read_urls(t: &Table<'_>, written: &[String]) -> Vec<EngineUrl> {
    let mut urls = Vec::with_capacity(written.len());
    for text in written {
        match EngineUrl::parse_engine(text) {
            Ok(url) if urls.contains(&url) => t.error(
                "engines",
                format!("`{text}` is listed twice"),
                "list each engine once",
            ),
            Ok(url) => urls.push(url),
            Err(why) => t.error(
                "engines",
                format!("`{text}` {why}"),
                "write the engine's address, such as \"http://127.0.0.1:8001\"",
            ),
        }
    }
    urls
}

/// The names of `dns`.
fn read_names<'n>(t: &Table<'_>, names: impl Iterator<Item = &'n String>) -> Vec<EngineUrl> {
    let mut dns = Vec::new();
    for text in names {
        match EngineUrl::parse_engine(text) {
            Ok(url) if url.host.parse::<std::net::IpAddr>().is_ok() => t.error(
                "dns",
                format!("`{text}` has an address, not a name"),
                "list addresses in `engines`",
            ),
            Ok(url) => dns.push(url),
            Err(why) => t.error(
                "dns",
                format!("`{text}` {why}"),
                "write a name and its port, such as \"http://engines.default.svc:8000\"",
            ),
        }
    }
    dns
}

/// TLS to engines at these addresses and names.
fn read_pool_tls(t: &Table<'_>, urls: &[EngineUrl], dns: &[EngineUrl]) -> EngineTls {
    if urls.iter().chain(dns).any(|url| url.tls) {
        let tls = read_tls(t);
        if tls.server_name.is_none() && dns.iter().any(|url| url.tls) {
            t.error(
                "dns",
                "a name in `dns` is `https://`, and its engines are reached by address, which no certificate carries",
                "set `server_name` to the name in their certificates",
            );
        }
        tls
    } else {
        for key in TLS_KEYS {
            t.unused(key, "engines", "no engine of the pool is `https://`");
        }
        EngineTls::default()
    }
}

pub(super) fn read_engines(t: &Table<'_>, role: Role) -> Option<HttpEngines> {
    let written = EnginesKeys::engines().read(t);
    let names = EnginesKeys::dns().read(t);
    let endpoint_slices = EnginesKeys::endpoint_slices().read(t);
    let endpoint_port = EnginesKeys::endpoint_port().read(t);
    if endpoint_slices.is_none() {
        t.unused(
            "endpoint_port",
            "endpoint_slices",
            "the pool has no `endpoint_slices`",
        );
    }
    let is_listed = names.is_some() || endpoint_slices.is_some();
    let Some(written) = written.or(is_listed.then(Vec::new)) else {
        let more = [
            "kind",
            "api_key_file",
            "weight",
            "mirror",
            "kv_protocol",
            "bootstrap_port",
        ];
        for key in more.into_iter().chain(TLS_KEYS) {
            t.unused(key, "engines", "the pool has no `engines`");
        }
        return None;
    };
    let kind = EnginesKeys::kind().read(t);
    let api_key_file = EnginesKeys::api_key_file().read(t);
    let urls = read_urls(t, &written);
    let dns = read_names(t, names.iter().flatten());
    let traffic = read_traffic(t);
    t.unused("workers", "engines", "each of `engines` is one worker");
    let tls = read_pool_tls(t, &urls, &dns);
    let (kv_protocol, bootstrap_port) = if role == Role::Prefill {
        let protocol = EnginesKeys::kv_protocol().read(t);
        (protocol, EnginesKeys::bootstrap_port().read(t))
    } else {
        for key in ["kv_protocol", "bootstrap_port"] {
            t.unused(key, "role", "the pool's role is not \"prefill\"");
        }
        (KvProtocol::Auto, BOOTSTRAP_PORT)
    };
    Some(HttpEngines {
        urls,
        kind,
        api_key_file,
        tls,
        traffic,
        dns,
        endpoint_slices,
        endpoint_port,
        kv_protocol,
        bootstrap_port,
    })
}

fn read_tls(t: &Table<'_>) -> EngineTls {
    let ca_file = EnginesKeys::ca_file().read(t);
    let cert = EnginesKeys::cert_file().read(t);
    let key = EnginesKeys::key_file().read(t);
    let client = match (cert, key) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        (Some(_), None) => {
            let hint = "name the key of the certificate in `key_file`";
            t.error("cert_file", "`cert_file` is set without `key_file`", hint);
            None
        }
        (None, Some(_)) => {
            let hint = "name the certificate of the key in `cert_file`";
            t.error("key_file", "`key_file` is set without `cert_file`", hint);
            None
        }
    };
    EngineTls {
        ca_file,
        client,
        server_name: EnginesKeys::server_name().read(t),
    }
}

fn read_traffic(t: &Table<'_>) -> PoolTraffic {
    let weight = EnginesKeys::weight().read(t);
    let mirror = EnginesKeys::mirror().read(t);
    if weight.is_some() && mirror.is_some() {
        t.error(
            "mirror",
            "the pool has `weight`, so it answers clients, and `mirror`, so it does not",
            "remove one of them",
        );
    }
    PoolTraffic { weight, mirror }
}

/// Treatment of a stream whose engine is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Resume {
    /// It ends with an error event.
    Off,
    /// It continues on another engine from the text so far.
    Text,
    /// It continues from the tokens so far, which vLLM is asked to send (`return_token_ids`); on other engines from the
    /// text.
    #[default]
    Tokens,
}

pub(super) const RESUMES: &[(&str, Resume)] = &[
    ("off", Resume::Off),
    ("text", Resume::Text),
    ("tokens", Resume::Tokens),
];

section! {
    /// `[upstream]`: connections to real engines, their health, and what a lost one means.
    pub struct UpstreamConfig, keys UpstreamKeys of "upstream", read in order {
        /// Time limit of a connection attempt to an engine.
        ///
        /// Low: busy engines count as failed. High: clients wait for a dead host.
        connect_timeout_s: f64 = value(3.0).within(0.001..=DAY_S).unit("s");
        /// Time limit from a request to the first byte of its answer; then 504. An answer that is not streamed has
        /// its first byte at its end.
        ///
        /// Low: long answers that are not streamed are cut. High: a stalled engine holds its requests.
        first_byte_timeout_s: f64 = value(600.0).within(0.001..=DAY_S).unit("s");
        /// Time limit between two pieces of an answer; then the engine counts as lost for this request. Comments,
        /// blank lines, events without data and `ping` events are no pieces: they do not extend it.
        ///
        /// Low: streams are cut while an engine computes long prompts, also if it keeps the connection open by
        /// comments. High: a stalled engine holds its streams.
        idle_timeout_s: f64 = value(300.0).within(0.001..=DAY_S).unit("s");
        /// Idle connections to engines are closed after this. uvicorn, which vLLM and SGLang use, closes its side
        /// after 5 s.
        ///
        /// Above the engine's own limit: requests meet a connection that is closing, and are sent again.
        keep_alive_s: f64 = value(4.0).within(0.001..=DAY_S).unit("s");
        /// Limit of idle connections per engine and shard.
        ///
        /// Low: a connection per request.
        connections_idle_max: u32 = value(256).within(0..=65_536).unit("connections");
        /// Interval of health checks per engine.
        ///
        /// High: a stopped engine is found by failing requests first.
        health_interval_s: f64 = value(2.0).within(0.001..=DAY_S).unit("s");
        /// Time limit of a health check. A check that timed out is repeated at once, so a hung engine is down after
        /// `failures_max` times this.
        ///
        /// Low: an engine that is busy counts as failed. High: requests wait longer for a hung engine.
        health_timeout_s: f64 = value(3.0).within(0.001..=DAY_S).unit("s");
        /// Interval at which an engine's models are listed again.
        ///
        /// High: adapters that were loaded later get 404 for longer.
        models_interval_s: f64 = value(30.0).within(0.001..=DAY_S).unit("s");
        /// Failures in a row (refused or lost connections, answers of 500 and above, health checks) after which an
        /// engine gets no requests. A refused connection counts at once.
        ///
        /// Low: one bad request ejects an engine.
        failures_max: u32 = value(3).within(1..=1_000_000).unit("failures");
        /// Time without requests after that. Then one request probes the engine: if it fails, the time doubles.
        ///
        /// Low: clients of a failing engine wait for retries.
        ejection_s: f64 = value(5.0).within(0.001..=DAY_S).unit("s");
        /// Limit of that time.
        ///
        /// High: an engine that recovered stays idle.
        ejection_s_max: f64 = value(120.0).within(0.001..=DAY_S).unit("s");
        /// Engines that are worse than their peers.
        field outlier: OutlierConfig = OutlierConfig::default() => read_outlier;
        /// Factor on the median of an engine's peers above which its mean time to the first byte, or between two
        /// pieces of a stream, ejects it for `ejection_s` times its number of ejections; 0: off.
        ///
        /// Low: an engine with longer prompts is taken for a slow one.
        key outlier_latency: f64 = value(0.0).within(0.0..=1_000.0).with_description("times, 0 or 1.5 to 1,000");
        /// Share of failed requests at which an engine is ejected likewise, if its peers' median is below half of
        /// this share; 0: off.
        ///
        /// Low: a few bad requests eject an engine.
        key outlier_errors: f64 = value(0.0).within(0.0..=1.0).unit("share");
        /// Interval of the comparison, and of the latencies in `/health` and `slipstream top`.
        ///
        /// Low: few requests are compared.
        key outlier_interval_s: f64 = value(10.0).within(0.1..=DAY_S).unit("s");
        /// Minimum of an engine's requests in an interval for it to be compared; at least three engines of a pool
        /// must reach it.
        ///
        /// Low: single slow requests decide.
        key outlier_requests_min: u64 = value(20).within(1..=1_000_000).unit("requests");
        /// Share of a pool that may be out of service, for any reason, once an outlier is ejected; one engine always
        /// may.
        ///
        /// High: the others get more load, and may become outliers.
        key outlier_ejected_max: f64 = value(0.1).within(0.0..=1.0).unit("share");
        /// Further engines that are tried per request before the first byte of its answer.
        ///
        /// High: a request that ends engines meets many of them.
        retries_max: u32 = value(3).within(0..=64).unit("engines");
        /// Retries per request, on average over a shard; ten more at a time. Continued streams are not counted.
        ///
        /// High: retries add to an overload. 0: only those ten.
        retry_budget: f64 = value(0.2).within(0.0..=10.0).unit("retries per request");
        /// How a stream whose engine is lost continues on another one. "tokens": from its tokens if both engines run
        /// vLLM (`return_token_ids` is added to streaming requests that can continue), otherwise from its text.
        /// "text": from its text. `docs/engines.md` has the limits.
        ///
        /// "text": the continuation may differ from an undisturbed answer. "off": the stream ends with an error
        /// event.
        resume: Resume = choice(RESUMES, Resume::Tokens);
        /// Limit of an answer's bytes kept for its continuation.
        ///
        /// Low: long answers cannot continue.
        resume_bytes_max: u64 = value(1 << 20).within(1 << 10..=1 << 30).unit("bytes");
        /// Further paths that are forwarded to engines: exact, or a prefix if it ends with `/`. `/v1/` and the usual
        /// inference paths always are. `/v2/` has paths of Triton and KServe that load and unload models.
        ///
        /// Paths that change an engine reach one of several.
        forward: Vec<String> = value(Vec::new()).with_description("list of paths")
            .check(
                |paths: &Vec<String>| paths.iter().all(|path| is_forwarded_path(path)),
                "a list of paths that begin with `/`",
            );
        /// File with the key of the admin API, `/admin/engines`, which adds, drains and lists engines. Without it
        /// there is no such API (404).
        ///
        /// Who has the key decides where all prompts go.
        admin_key_file?: PathBuf = path();
        /// Limit of engines at a time. Slots for engines that come later are made at start; with prefill engines, as
        /// many again for those.
        ///
        /// Low: engines cannot be added. High: memory for the index, some 32 bytes per slot and block.
        engines_max: u32 = value(0).within(0..=4_096)
            .unit("engines").note("0: those at start, and 8 more if there is a cluster file or an admin key");
        /// Time that the open requests of an engine have to end once it is removed. Streams that have not continue on
        /// other engines.
        ///
        /// Low: answers continue elsewhere that could have ended. High: an engine stays for long.
        drain_timeout_s: f64 = value(600.0).within(0.0..=DAY_S).unit("s");
        /// Interval at which the names of `pool.NAME.dns` are looked up, s. The system's resolver does not report the
        /// time to live of an address.
        ///
        /// High: engines are noticed late. Low: load on the name server.
        dns_interval_s: f64 = value(5.0).within(0.001..=DAY_S);
        /// Kubernetes' API server, for `pool.NAME.endpoint_slices`.
        field kubernetes: KubernetesConfig = KubernetesConfig::default() => read_kubernetes;
        /// Kubernetes' API server, for `pool.NAME.endpoint_slices`. `http://` is for `kubectl proxy`: no token is
        /// sent.
        key kubernetes_url?: String = optional()
            .with_description("address").with_default_text("as in a pod: `KUBERNETES_SERVICE_HOST` and `_PORT`");
        /// Namespace of the EndpointSlices.
        key kubernetes_namespace?: String = optional().with_description("namespace").with_default_text("the pod's")
            .check(|text: &String| is_namespace(text), "a namespace: lower-case letters, digits and `-`");
        /// File with the bearer token, read for each request.
        ///
        /// Missing or without rights: 401 or 403, and the engines stay as they are.
        key kubernetes_token_file?: PathBuf = path().with_default_text("the pod's");
        /// PEM file of the authorities that sign the API server's certificate, which is always verified.
        key kubernetes_ca_file?: PathBuf = path().with_default_text("the pod's");
    }
}

fn is_forwarded_path(path: &str) -> bool {
    path.len() > 1 && path.starts_with('/') && !path.contains(['?', '#'])
}

fn is_namespace(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty() && name.len() <= 63 && name.chars().all(plain)
}

/// Ejection of engines that are worse than their peers (`upstream.outlier_…`). Off by default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutlierConfig {
    /// Latency over the median of the peers above which an engine is ejected; 0: off.
    pub latency: f64,
    /// Share of failed requests from which an engine is ejected, if its peers fail less than half of it; 0: off.
    pub errors: f64,
    /// Interval of the comparison, s. Default 10.
    pub interval_s: f64,
    /// Requests of an engine per interval below which it is not compared. Default 20.
    pub requests_min: u64,
    /// Share of a pool that may take no requests; one engine always. Default 0.1.
    pub ejected_max: f64,
}

impl OutlierConfig {
    /// Whether engines are compared.
    pub fn is_on(&self) -> bool {
        self.latency > 0.0 || self.errors > 0.0
    }
}

impl Default for OutlierConfig {
    fn default() -> Self {
        OutlierConfig {
            latency: UpstreamKeys::outlier_latency().default(),
            errors: UpstreamKeys::outlier_errors().default(),
            interval_s: UpstreamKeys::outlier_interval_s().default(),
            requests_min: UpstreamKeys::outlier_requests_min().default(),
            ejected_max: UpstreamKeys::outlier_ejected_max().default(),
        }
    }
}

fn read_outlier(t: &Table<'_>) -> OutlierConfig {
    let latency = UpstreamKeys::outlier_latency().read(t);
    if latency > 0.0 && latency < 1.5 {
        t.error(
            "outlier_latency",
            format!("{latency} would eject engines by noise"),
            "write at least 1.5 (times the median of its peers), or 0 to turn it off",
        );
    }
    OutlierConfig {
        latency,
        errors: UpstreamKeys::outlier_errors().read(t),
        interval_s: UpstreamKeys::outlier_interval_s().read(t),
        requests_min: UpstreamKeys::outlier_requests_min().read(t),
        ejected_max: UpstreamKeys::outlier_ejected_max().read(t),
    }
}

/// Kubernetes' API server, and how the router proves itself to it. Missing: as in a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// Its address.
    pub url: Option<EngineUrl>,
    /// Namespace of the EndpointSlices.
    pub namespace: Option<String>,
    /// File with the bearer token. Not sent to `http://`.
    pub token_file: Option<PathBuf>,
    /// PEM file of the authorities that sign its certificate.
    pub ca_file: Option<PathBuf>,
}

fn read_kubernetes(t: &Table<'_>) -> KubernetesConfig {
    let written = UpstreamKeys::kubernetes_url().read(t);
    let url = written.and_then(|text| match EngineUrl::parse(&text) {
        Ok(url) => Some(url),
        Err(why) => {
            let hint = "write the API server's address, such as \"https://10.0.0.1:6443\"";
            t.error("kubernetes_url", format!("`{text}` {why}"), hint);
            None
        }
    });
    KubernetesConfig {
        url,
        namespace: UpstreamKeys::kubernetes_namespace().read(t),
        token_file: UpstreamKeys::kubernetes_token_file().read(t),
        ca_file: UpstreamKeys::kubernetes_ca_file().read(t),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_has_one_spelling() {
        let url = |text: &str| EngineUrl::parse(text).unwrap();
        for (one, other) in [
            ("http://LocalHost:8000", "http://localhost:8000"),
            ("http://[0:0:0:0:0:0:0:1]:8000", "http://[::1]:8000"),
            ("https://GPU-1.Example", "https://gpu-1.example:443/"),
        ] {
            assert_eq!(url(one), url(other));
        }
        assert_ne!(url("http://a/X"), url("http://a/x"), "a path has case");
    }

    #[test]
    fn addresses_of_engines() {
        // As people type it first: the answer is what to type.
        let error = EngineUrl::parse("127.0.0.1:9402").unwrap_err();
        assert!(error.ends_with("write http://127.0.0.1:9402"), "{error}");
        for other in ["ftp://a:1", ""] {
            let error = EngineUrl::parse(other).unwrap_err();
            assert!(error.ends_with("https://"), "{error}");
        }
        let good = [
            ("http://gpu1:8000", "http://gpu1:8000"),
            ("http://10.0.0.1", "http://10.0.0.1:80"),
            ("http://[::1]:8001/", "http://[::1]:8001"),
            ("http://proxy:80/vllm/", "http://proxy:80/vllm"),
            ("https://gpu1", "https://gpu1:443"),
            ("https://[::1]:8443/v", "https://[::1]:8443/v"),
        ];
        for (text, shown) in good {
            assert_eq!(EngineUrl::parse(text).unwrap().to_string(), shown);
        }
        // As people copy it from a client, or from an example.
        for (text, shown) in [
            ("http://gpu1:8000/v1", "http://gpu1:8000"),
            ("http://gpu1:8000/v1/", "http://gpu1:8000"),
            ("https://proxy/vllm/v1", "https://proxy:443/vllm"),
            ("http://gpu1:8000", "http://gpu1:8000"),
            ("http://proxy/v10", "http://proxy:80/v10"),
            ("http://proxy/v1beta", "http://proxy:80/v1beta"),
        ] {
            let url = EngineUrl::parse_engine(text).unwrap();
            assert_eq!(url.to_string(), shown, "{text}");
        }
        let error = EngineUrl::parse_engine("http://gpu1:8000/v1/chat/completions").unwrap_err();
        assert!(error.ends_with("write http://gpu1:8000"), "{error}");
        for text in [
            "gpu1:8000",
            "https://",
            "HTTPS://gpu1",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:99999",
            "http://a b:1",
            "http://key@a:1",
            "http://a:1/x?y",
            "http://[::1:80",
            "http://[zz]:80",
        ] {
            assert!(EngineUrl::parse(text).is_err(), "{text}");
        }
    }
}
