//! Bounds on what clients may do.

use std::time::Duration;

use slipstream_config::cluster::LiveConfig;

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

/// Files that a server opens besides connections.
const FILES_KEPT: u64 = 64;

impl Limits {
    /// Lowers `connections_max` to what a process that may have `files` open has room for. A request that is forwarded
    /// needs a connection to an engine as well (`forwards`). Returns the limit before if it was lowered: further clients
    /// would wait for a file instead of being refused.
    pub fn fit_files(&mut self, files: u64, forwards: bool) -> Option<u32> {
        let room = files.saturating_sub(FILES_KEPT.min(files / 2));
        let room = if forwards { room / 2 } else { room };
        let most = u32::try_from(room).unwrap_or(u32::MAX).max(1);
        let before = self.connections_max;
        self.connections_max = before.min(most);
        (before > most).then_some(before)
    }
}
