//! What a thread of the frontend has, whatever answers its requests.

use std::cell::Cell;
use std::sync::Arc;

use slipstream_base::mix;
use slipstream_metrics::Registry;
use slipstream_planes::clock::monotonic_ns;

use crate::door::budget::Budget;
use crate::door::connection::Client;
use crate::door::helpers::Helpers;
use crate::door::meter::Meter;
use crate::door::metrics::ShardMetrics;
use crate::door::service::Service;
use crate::openai::ApiError;

/// State of one frontend thread.
pub(crate) struct Shard {
    pub(crate) index: u8,
    pub(crate) service: Arc<Service>,
    pub(crate) metrics: Arc<ShardMetrics>,
    pub(crate) registry: Arc<Registry>,
    /// Resources of clients of all shards.
    pub(crate) budget: Arc<Budget>,
    pub(crate) helpers: Arc<Helpers>,
    pub(crate) meter: Meter,
    /// The server shuts down.
    pub(crate) draining: Cell<bool>,
    requests: Cell<u64>,
    /// Answers of 5xx.
    log: LogPace,
}

/// State that shards share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) service: Arc<Service>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) helpers: Arc<Helpers>,
}

/// Lets one line of a kind into the log per second, so that clients cannot fill a disk.
#[derive(Default)]
pub(crate) struct LogPace {
    /// When a line was last written, ns, and how many were not since.
    last: Cell<(u64, u64)>,
}

impl LogPace {
    /// Whether a line may be written at `now_ns`. Then: how many were not since the last.
    pub(crate) fn allows(&self, now_ns: u64) -> Option<u64> {
        const PAUSE_NS: u64 = 1_000_000_000;
        let (last, suppressed) = self.last.get();
        if last != 0 && now_ns < last + PAUSE_NS {
            self.last.set((last, suppressed + 1));
            return None;
        }
        self.last.set((now_ns, 0));
        Some(suppressed)
    }
}

impl Shard {
    pub(crate) fn new(index: u8, shared: Shared, metrics: Arc<ShardMetrics>) -> Shard {
        let Shared {
            service,
            registry,
            budget,
            helpers,
        } = shared;
        Shard {
            index,
            meter: Meter::new(metrics.clone()),
            metrics,
            registry,
            budget,
            helpers,
            draining: Cell::new(false),
            requests: Cell::new(0),
            log: LogPace::default(),
            service,
        }
    }

    /// A number for a new request: unlike any other of this run, and of other runs by their seed.
    pub(crate) fn next_request_number(&self) -> u64 {
        let number = self.requests.get();
        self.requests.set(number + 1);
        mix::draw(self.service.seed ^ (u64::from(self.index) << 56), number)
    }

    /// Whether an answer of 5xx may be logged: one per second. Then: the number of others since the last.
    pub(crate) fn log_allowed(&self) -> Option<u64> {
        self.log.allows(monotonic_ns())
    }

    /// Claims room for `count` sequences of `client`.
    ///
    /// # Errors
    /// 503 or 429 with the limit that it would exceed.
    pub(crate) fn open_streams(&self, client: &Client, count: usize) -> Result<(), ApiError> {
        let count = count as u64;
        let most = u64::from(self.service.limits.connection_streams_max);
        if client.streams_of_connection() + count > most {
            return Err(ApiError::too_many(format!(
                "this connection has {} open streams, and the limit is {most} \
                 (`live.connection_streams_max`); wait until some have ended, or use another connection",
                client.streams_of_connection()
            )));
        }
        self.budget.open_streams(client.counts(), count)?;
        client.add_streams(count);
        self.metrics.streams_open.add(count);
        Ok(())
    }

    /// Gives back the room of `count` sequences.
    pub(crate) fn on_streams_closed(&self, client: &Client, count: usize) {
        let count = count as u64;
        self.budget.close_streams(client.counts(), count);
        client.remove_streams(count);
        self.metrics.streams_open.sub(count);
    }
}
