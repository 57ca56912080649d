//! `[live]`: settings of live servers (`serve`, `frontend`, `worker`).

use std::path::PathBuf;

use super::{DAY_S, EngineUrl};
use crate::doc::{Section, Table, choice, optional, path, section, text, value};

/// An address has 8 bits for the shard, and so has a count of shards.
const SHARDS_MAX: u32 = 255;

section! {
    /// `[live]`: settings of `serve` only.
    pub struct LiveConfig, keys LiveKeys of "live", read in order {
        /// Address to listen on; port 0 selects a free one.
        ///
        /// 0.0.0.0 makes the server reachable from other machines.
        listen: String = text("127.0.0.1:8000").with_description("\"ADDRESS:PORT\"")
            .check(
                |listen| is_listen_address(listen),
                "an address and a port, such as \"127.0.0.1:8000\" or \"[::1]:0\"",
            );
        /// Whether further processes of the same user may listen on the same address (`SO_REUSEPORT`), to replace a
        /// process without failed requests (`docs/reliability.md`).
        ///
        /// true: a second server that was started by mistake takes a part of the clients, instead of an error.
        reuse_port: bool = value(false);
        /// Divides modelled time; 0: no waiting at all.
        ///
        /// High: the CPU becomes the bottleneck, and latencies measure it instead of the model.
        speedup: f64 = value(1.0).within(0.0..=1e12);
        /// Frontend shards; 0: half of the cores, at least 1.
        ///
        /// High: shards and engine threads compete for cores.
        shards: u32 = value(0).within(0..=SHARDS_MAX).unit("threads");
        /// Engine threads; 0: one per 8 workers, at most cores - 1.
        ///
        /// Low: with many workers, passes end late at a high speed-up. High: more wake-ups.
        engine_threads: u32 = value(0).within(0..=1_024).unit("threads");
        /// File of API keys, one per line, in addition to those in `SLIPSTREAM_API_KEYS` (comma separated). A key may
        /// be followed by its name and limits; `docs/engines.md` has the format.
        api_keys_file?: PathBuf = path().with_default_text("none: no key needed");
        /// File with the key of the admin paths of modelled engines: `/admin/faults`, which shows and changes
        /// `[live.faults]`, and the routes of `live.management`. Without it there is no `/admin/faults` (404). A
        /// router uses `upstream.admin_key_file` instead.
        ///
        /// Who has the key can make all requests fail.
        admin_key_file?: PathBuf = path();
        /// File to which a JSON line is appended per request; `docs/engines.md` has the fields. SIGHUP opens it anew.
        /// Lines that cannot be written in time are dropped and counted.
        ///
        /// On: names of keys and models, paths and lengths are on the disk.
        access_log?: PathBuf = path().with_description("path, or \"-\": standard output");
        /// OpenTelemetry collector that gets a span per sampled request: OTLP over HTTP, JSON, at `/v1/traces` below
        /// this URL. `docs/engines.md` has the attributes. Spans that it does not take in time are dropped and
        /// counted.
        ///
        /// On: ids, paths and models of requests leave this process.
        key otlp_endpoint?: String = optional().with_description("URL, such as \"http://127.0.0.1:4318\"");
        /// The same, parsed.
        field otlp_endpoint: Option<EngineUrl> = None => read_otlp_endpoint;
        /// Serve vLLM's routes for operators: `/sleep`, `/wake_up`, `/is_sleeping`, `/reset_prefix_cache`, and those
        /// that load and unload LoRA adapters.
        ///
        /// On, without a key: every client can stop the server's answers. If the server has API keys,
        /// `live.admin_key_file` is required.
        management: bool = value(false);
        /// Share of requests without a `traceparent` that get one which is marked as sampled, for engines and for
        /// `live.otlp_endpoint`. With an access log all others get one that is not.
        ///
        /// High: engines, and the server itself, export many spans.
        trace_sample: f64 = value(0.0).within(0.0..=1.0);
        /// Largest request body.
        ///
        /// Low: long prompts get 413. High: a few clients can fill the memory.
        body_bytes_max: u64 = value(8 << 20).within(1 << 10..=1 << 30).unit("bytes");
        /// Largest request head; also the limit of buffered answer per connection.
        ///
        /// Low: clients behind proxies that add headers get 431. High: streams need more memory.
        header_bytes_max: u32 = value(16 << 10).within(1 << 10..=1 << 20).unit("bytes");
        /// Time limit for a request's head, and for its body after that.
        ///
        /// High: slow clients hold connections. Low: clients on slow links are disconnected.
        read_timeout_s: f64 = value(10.0).within(0.01..=DAY_S).unit("s");
        /// Limit of open streams, over all shards; further requests get 503.
        ///
        /// High: memory grows with it.
        streams_max: u32 = value(65_536).within(1..=1 << 24).unit("streams");
        /// Limit of unread answer per stream; a stream beyond it is closed.
        ///
        /// Low: clients that pause briefly are disconnected. High: slow clients can fill the memory.
        stream_buffer_bytes_max: u64 = value(4 << 20).within(4 << 10..=1 << 30).unit("bytes");
        /// A stream whose client reads nothing for this time is closed.
        ///
        /// High: dead clients hold their sequences' blocks.
        write_timeout_s: f64 = value(60.0).within(0.01..=DAY_S).unit("s");
        /// Time limit of a request; 0: none.
        ///
        /// Low: long answers are truncated.
        request_timeout_s: f64 = value(0.0).within(0.0..=DAY_S).unit("s");
        /// An HTTP/2 connection without a request, or a duplex request without a turn, is closed after this time.
        ///
        /// High: silent clients hold connections and streams. Low: clients that pause must connect again.
        idle_timeout_s: f64 = value(60.0).within(0.01..=DAY_S).unit("s");
        /// Memory for clients' bodies, answers, buffers and connections; 0: half of what the host or its control
        /// group has. New requests get 503 from seven eighths of it on, and one client may take half.
        ///
        /// Low: requests get 503 under load. High: clients can fill the memory of the host.
        memory_max: u64 = value(0).with_description("bytes, 0 or 16,777,216 to 1,125,899,906,842,624")
            .check(
                |&bytes| bytes == 0 || (16 << 20..=1 << 50).contains(&bytes),
                "0, or 16,777,216 to 1,125,899,906,842,624",
            );
        /// Limit of an answer that is not streamed, by its `n`, `max_tokens` and `logprobs`.
        ///
        /// Low: long answers with log probabilities get 400. High: one request keeps a shard busy for long.
        answer_bytes_max: u64 = value(256 << 20).within(64 << 10..=1 << 40).unit("bytes");
        /// Limit of open client connections; further ones are closed. Lowered at start, with a line in the log, to
        /// what the limit of open files has room for: half of it with engines, to which each request needs a
        /// connection.
        ///
        /// High: needs as many file descriptors, and 16 KiB of memory for each.
        connections_max: u32 = value(65_536).within(1..=1 << 24).unit("connections");
        /// Limit of open connections from one address (IPv6: one /64); 0: seven eighths of `connections_max`.
        ///
        /// Low: clients behind one proxy are closed. High: one address can take all connections.
        client_connections_max: u32 = value(0).within(0..=1 << 24).unit("connections");
        /// Limit of open streams of one client (an API key, or an address if there are no keys); 0: seven eighths of
        /// `streams_max`. Further requests get 429.
        ///
        /// High: one client can take all streams.
        client_streams_max: u32 = value(0).within(0..=1 << 24).unit("streams");
        /// Limit of open streams of one connection; further requests get 429.
        ///
        /// Low: HTTP/2 proxies need several connections.
        connection_streams_max: u32 = value(4_096).within(1..=1 << 24).unit("streams");
        /// Origins of browser pages that may use the API; empty: none.
        ///
        /// "*" without API keys opens the server to every page that a user on this network visits.
        cors_origins: String = text("").with_description("origins, comma separated, or \"*\"")
            .check(
                |origins| are_origins(origins),
                "`*`, or origins such as \"https://chat.example.org\" with commas between them",
            );
        /// Time for open requests to finish after SIGINT or SIGTERM; then they end with an error.
        ///
        /// Low: long answers are truncated at each restart. High: a restart takes this long.
        drain_timeout_s: f64 = value(30.0).within(0.0..=DAY_S).unit("s");
        /// `[live.events]`: destination of forward-pass metrics and KV events.
        field events: EventsConfig = EventsConfig::default() => |t: &Table<'_>| t.table("events", EventsConfig::read);
        /// `[live.faults]`: errors and broken streams by rate.
        field faults: FaultsConfig = FaultsConfig::default() => |t: &Table<'_>| t.table("faults", read_faults);
        /// `[live.autoscale]`: destination of the numbers of workers that `[autoscale]` wants.
        field autoscale: AutoscaleOutput = AutoscaleOutput::default()
            => |t: &Table<'_>| t.table("autoscale", read_autoscale_output);
    }
}

pub(super) fn read_live(t: &Table<'_>) -> LiveConfig {
    t.refuse(
        "tls",
        "is not supported by this version",
        "put a TLS proxy in front",
    );
    LiveConfig::read(t)
}

fn read_otlp_endpoint(t: &Table<'_>) -> Option<EngineUrl> {
    let text = LiveKeys::otlp_endpoint().read(t)?;
    let (why, hint) = match EngineUrl::parse(&text) {
        Ok(url) if url.tls => (
            "is encrypted, which is not supported".to_owned(),
            "name a collector on this host or network, such as \"http://127.0.0.1:4318\", which may send spans on with TLS",
        ),
        Ok(url) if url.prefix.ends_with("/v1/traces") => (
            "ends with /v1/traces, which is appended".to_owned(),
            "write it without that path",
        ),
        Ok(url) => return Some(url),
        Err(why) => (
            why,
            "write the collector's address, such as \"http://127.0.0.1:4318\"",
        ),
    };
    t.error("otlp_endpoint", format!("`{text}` {why}"), hint);
    None
}

/// Transport of events out of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventBus {
    /// No events.
    #[default]
    None,
    /// To subscribers inside the process.
    InProcess,
    /// ZeroMQ: the process binds, subscribers connect.
    Zmq,
    /// NATS: the process connects to a server.
    Nats,
}

const BUSES: &[(&str, EventBus)] = &[
    ("none", EventBus::None),
    ("in-process", EventBus::InProcess),
    ("zmq", EventBus::Zmq),
    ("nats", EventBus::Nats),
];

const ZMQ_MUST: &str = "a TCP endpoint, such as \"tcp://127.0.0.1:5557\" or \"tcp://*:5557\"";

section! {
    /// `[live.events]`.
    pub struct EventsConfig, keys EventsKeys of "live.events", read in order {
        /// Transport of forward-pass metrics and KV events; see `docs/events.md`.
        bus: EventBus = choice(BUSES, EventBus::None).with_description("\"none\", \"in-process\", \"zmq\", \"nats\"");
        /// Publish forward-pass metrics.
        fpm: bool = value(true).with_description("boolean");
        /// Publish KV events.
        ///
        /// On: a request keeps its tokens (4 bytes each), because events name them.
        kv: bool = value(true).with_description("boolean");
        /// ZeroMQ: forward-pass metrics of all ranks are published here; port 0 selects a free one.
        ///
        /// `*` as address makes it reachable from other machines.
        fpm_endpoint: String = text("tcp://127.0.0.1:5556").with_description("\"tcp://ADDRESS:PORT\"")
            .check(|text: &String| is_zmq_endpoint(text), ZMQ_MUST);
        /// ZeroMQ: KV events of the first rank are published here; rank n uses the port n above.
        ///
        /// If one of these ports is in use, the server does not start.
        kv_endpoint: String = text("tcp://127.0.0.1:5557").with_description("\"tcp://ADDRESS:PORT\"")
            .check(|text: &String| is_zmq_endpoint(text), ZMQ_MUST);
        /// ZeroMQ: the first rank answers requests for past KV events here; rank n at the port n above.
        replay_endpoint?: String = optional()
            .with_description("\"tcp://ADDRESS:PORT\"").with_default_text("none: past KV events are not kept")
            .check(|text: &String| is_zmq_endpoint(text), ZMQ_MUST);
        /// ZeroMQ: topic of KV events, as in vLLM.
        ///
        /// Subscribers of another topic receive nothing.
        kv_topic: String = text("").with_description("string of at most 255 bytes")
            .check(|topic| topic.len() <= 255, "at most 255 bytes");
        /// NATS: the server. It may start later, stop and return.
        nats_url: String = text("nats://127.0.0.1:4222").with_description("\"nats://HOST:PORT\"")
            .check(
                |url| url.starts_with("nats://") || url.starts_with("tls://"),
                "a server, such as \"nats://127.0.0.1:4222\"",
            );
        /// Subjects, and ZeroMQ topics of metrics, have this prefix.
        ///
        /// Two clusters with one prefix on one server are indistinguishable.
        subject_prefix: String = text("slipstream").with_description("words with dots between")
            .check(|text: &String| is_subject_prefix(text), "words of letters, digits, `-` and `_` with single dots between them");
        /// Limit of queued events, per engine thread and kind, and in ZeroMQ per subscriber; beyond it the oldest are
        /// dropped.
        ///
        /// Low: a short pause of the reader loses events. High: a stalled reader uses memory.
        queue_bytes_max: u64 = value(8 << 20).within(64 << 10..=1 << 32).unit("bytes");
        /// Batches of KV events kept per rank for replay, within eight times `queue_bytes_max`.
        ///
        /// Low: a subscriber that missed more cannot catch up. High: memory grows with it.
        replay_batches_max: u32 = value(10_000).within(0..=1 << 24).unit("batches");
        /// Minimum interval between sends; the first event after a pause is sent at once.
        ///
        /// High: events arrive late. 0: one wake-up per pass, thousands per second at high speed-ups.
        interval_ms: f64 = value(5.0).within(0.0..=1_000.0).unit("ms");
    }
}

section! {
    /// `[live.faults]`: chances of a request's faults, from 0 to 1 and 1 in all.
    pub struct FaultsConfig, keys FaultsKeys of "live.faults", read in order {
        /// Requests that get 429 instead of an answer. The rates of this table may be 1 in all; a request has one
        /// fault at most.
        error_429: f64 = value(0.0).within(0.0..=1.0).unit("chance");
        /// Requests that get 500 instead of an answer.
        error_500: f64 = value(0.0).within(0.0..=1.0).unit("chance");
        /// Requests whose stream pauses once, behind one of its first 8 pieces. Answers that are not streamed are
        /// sent as always.
        stall: f64 = value(0.0).within(0.0..=1.0).unit("chance");
        /// How long it pauses.
        ///
        /// Beyond `live.write_timeout_s` the server ends the stream.
        stall_s: f64 = value(10.0).within(0.0..=DAY_S).unit("s");
        /// Requests whose stream's connection is closed behind one of its first 8 pieces.
        cut: f64 = value(0.0).within(0.0..=1.0).unit("chance");
        /// Decides which requests have faults, by their number since the rates were set.
        seed: u64 = value(0).with_description("whole number");
    }
}

impl FaultsConfig {
    /// The chances of 429, 500, a stall and a cut.
    pub fn rates(&self) -> [f64; 4] {
        [self.error_429, self.error_500, self.stall, self.cut]
    }
}

fn read_faults(t: &Table<'_>) -> FaultsConfig {
    let config = FaultsConfig::read(t);
    t.refuse(
        "admin_key_file",
        "is now `live.admin_key_file`, the key of all admin paths of modelled engines",
        "move it there",
    );
    let sum: f64 = config.rates().iter().sum();
    if sum > 1.0 {
        t.error(
            "error_429",
            format!(
                "the rates of `[live.faults]` add up to {sum}, and a request has one fault at most"
            ),
            "lower them to 1 in all",
        );
    }
    config
}

section! {
    /// `[live.autoscale]`: where a server publishes the numbers of workers that are wanted, in addition to `/metrics`.
    pub struct AutoscaleOutput, keys OutputKeys of "live.autoscale", read by hand {
        /// JSON file with the numbers of workers that `[autoscale]` wants, replaced as a whole at each decision;
        /// docs/autoscale.md has its fields.
        file?: PathBuf = path();
        /// Address that gets the same JSON by POST at each decision, such as "http://127.0.0.1:9000/scale", or
        /// `https://`. While one is under way, only the newest waits.
        ///
        /// Any status but 2xx is a failure: the next decision is sent in any case.
        key webhook?: String = optional().with_description("URL");
        /// The same, parsed.
        field webhook: Option<EngineUrl> = None;
        /// Time limit of one POST.
        ///
        /// High: a receiver that hangs delays the next number.
        webhook_timeout_s: f64 = value(5.0).within(0.01..=60.0).unit("s");
        /// Further tries of a POST that failed, 0.2 s and then twice as long apart. A newer number ends them.
        webhook_retries_max: u32 = value(2).within(0..=10);
        /// File with a bearer token for the webhook, read for each POST.
        webhook_token_file?: PathBuf = path();
    }
}

fn read_autoscale_output(t: &Table<'_>) -> AutoscaleOutput {
    let webhook = OutputKeys::webhook().read(t).and_then(|text| {
        let parsed = EngineUrl::parse(&text);
        parsed
            .map_err(|why| {
                let hint = "write the receiver's address, such as \"http://127.0.0.1:9000/scale\"";
                t.error("webhook", format!("`{text}` {why}"), hint);
            })
            .ok()
    });
    if !t.has("webhook") {
        for key in [
            "webhook_timeout_s",
            "webhook_retries_max",
            "webhook_token_file",
        ] {
            t.unused(key, "webhook", "there is no `webhook`");
        }
    }
    let file = OutputKeys::file().read(t);
    if webhook.is_none() {
        return AutoscaleOutput {
            file,
            ..AutoscaleOutput::default()
        };
    }
    AutoscaleOutput {
        file,
        webhook,
        webhook_timeout_s: OutputKeys::webhook_timeout_s().read(t),
        webhook_retries_max: OutputKeys::webhook_retries_max().read(t),
        webhook_token_file: OutputKeys::webhook_token_file().read(t),
    }
}

/// `tcp://` and an address to listen on; `*` stands for every address.
pub(super) fn is_zmq_endpoint(text: &str) -> bool {
    let Some(address) = text.strip_prefix("tcp://") else {
        return false;
    };
    match address.strip_prefix("*:") {
        Some(port) => port.parse::<u16>().is_ok(),
        None => is_listen_address(address),
    }
}

/// A valid beginning of a NATS subject, without wildcards.
pub(super) fn is_subject_prefix(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let is_word = |word: &str| !word.is_empty() && word.chars().all(plain);
    text.len() <= 200 && text.split('.').all(is_word)
}

/// Whether `text` is `*`, or scheme, host and port of pages, without a path, as browsers send them.
pub(super) fn are_origins(text: &str) -> bool {
    let is_origin = |origin: &str| {
        let host = origin
            .strip_prefix("https://")
            .or_else(|| origin.strip_prefix("http://"));
        host.is_some_and(|host| {
            !host.is_empty() && host.bytes().all(|b| b.is_ascii_graphic() && b != b'/')
        })
    };
    text.trim().is_empty() || text.trim() == "*" || text.split(',').map(str::trim).all(is_origin)
}

/// An IP address or a host name, and a port. Names are resolved by the server.
pub(super) fn is_listen_address(text: &str) -> bool {
    if text.parse::<std::net::SocketAddr>().is_ok() {
        return true;
    }
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let is_name = host.starts_with(|c: char| c.is_ascii_alphabetic()) && host.chars().all(plain);
    is_name && port.parse::<u16>().is_ok()
}
