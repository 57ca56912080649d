//! Real engines: they answer in bytes, over HTTP.
//!
//! ```text
//!   client ─► hyper ─► forward ─ peek ─ dispatcher ─► connection ─► engine
//!          ◄───────────── relay ◄──── decoder ◄───────┘
//! ```
//!
//! * `engines`: what all shards know of the engines: health, models, counters. `spec`, `settings`: their configuration. `members`: how they come and go;
//!   `admin`: the API for that. `visit`: a request at an engine; `failure`: why one failed.
//! * [`health`]: the thread that asks them. `hung`: requests at engines that stopped answering it. `catalog`: their models, merged.
//! * `forward`: reads a client's request. `paths`: what is forwarded, and what may be sent twice. `exchange`: the request as engines get it.
//!   `body_fields`, `continuity`: the fields of its body. `obtain`: finds an engine that answers, with retries. `converse`: one request at one engine, up to the first bytes of its answer; `turn`: the work before other tasks get a turn.
//! * `dispatching`: drives the dispatcher. `seat`: a request there. `relay`: the rest of the answer. `stream`: its events. `resume`: how a stream continues on another engine, after what its
//!   client has (`sent`); `resumption`: who continues it; `rewrite`: the events of that. `token_ids`: hides the tokens that this takes.
//! * `disagg`: the two requests of a prompt that another engine computes. `pair`: both at once.
//! * `api`: APIs by path. `sse`: server-sent events as browsers read them. `event`: the data of one, read once for all who need it. `ends`: whether an answer is complete, by its own words; `reported`: errors within it; `closing`: the last events
//!   of one whose engine was lost just before them.
//! * `peek`: what routing reads of a body. `tokens`: its prompt, tokenized. `connection`: HTTP/1.1 towards an engine.
//! * `stored`: finds the engine that stores the answer that a request names; `stored_answers`: the known ones.
//! * `traffic`: pools with weights, and pools that get copies of requests.
//! * `loops`: requests that come back to this process. `counters`: counters per engine; `retired`: of those that left; `metrics`: the page. `record`: what a request leaves in the record.
//!
//! An answer is read by the task that writes it to the client: a client that does not read stops the
//! engine's socket, and one that disconnects drops the connection to the engine in the same poll.

mod admin;
mod api;
mod body;
mod body_fields;
mod catalog;
mod closing;
mod connection;
mod continuity;
mod converse;
mod counters;
mod disagg;
mod dispatching;
mod ends;
mod engines;
mod event;
mod exchange;
mod failure;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod health;
mod hung;
mod lax;
mod loops;
mod members;
mod metrics;
mod obtain;
mod outlier;
mod pair;
mod paths;
mod peek;
mod record;
mod relay;
mod reported;
mod resume;
mod resumption;
mod retired;
mod rewrite;
mod seat;
mod sent;
mod settings;
mod spec;
mod sse;
mod stored;
mod stored_answers;
mod stream;
#[cfg(test)]
mod tests;
mod token_ids;
mod tokens;
mod traffic;
mod turn;
mod visit;

#[doc(hidden)]
pub use stream::relay_events;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use slipstream_base::WorkerId;
use slipstream_base::width::{nanos, to_u32};
use slipstream_dispatch::Dispatcher;
use slipstream_planes::clock::monotonic_ns;

pub use engines::Engines;
pub use members::{Member, MemberError};
pub use metrics::collector;
pub use spec::{EngineSpec, PoolSpec};

pub(crate) use forward::handle;

use connection::Connection;
use dispatching::Dispatching;
use engines::{Engine, Members};
use relay::Relay;

use crate::door::shard::Shard;
use crate::openai::ApiError;

/// A shard's side of the engines.
pub(crate) struct Upstream {
    shard: Rc<Shard>,
    dispatching: Dispatching,
    pub(crate) engines: Arc<Engines>,
    /// The engines by worker, as of this [`Engines::generation`].
    members: RefCell<(u64, Members)>,
    /// Idle connections by worker, oldest first.
    idle: Box<[RefCell<VecDeque<Connection>>]>,
    /// Numbers of requests in the dispatcher that are free.
    free: RefCell<Vec<u32>>,
    numbers: Cell<u32>,
    /// Retries that may be made.
    budget: Cell<f64>,
    /// The server stops: streams end now.
    stopping: Cell<bool>,
    /// Wakes the requests that wait for the first byte of an answer when the server stops.
    stop: tokio::sync::Notify,
    /// Number of these requests.
    waiting: Cell<u64>,
    /// Stored answers that are being looked up.
    lookups: stored::Lookups,
    /// Streams whose continuations may be planned at a time: all streams of a lost engine continue, and the helper threads
    /// refuse work when too much waits for them.
    planning: tokio::sync::Semaphore,
    /// Copies that are under way.
    copies: Cell<usize>,
    /// Answers on their way, to be ended when they are overdue.
    watched: RefCell<Vec<Weak<RefCell<Relay>>>>,
}

/// Retries that may be made at a time without earlier requests.
const RETRIES_AT_ONCE: f64 = 10.0;

/// Continuations that a shard plans at a time.
const PLANS_AT_ONCE: usize = 32;

/// Answers that are looked at before other tasks have a turn.
const RELAYS_PER_TURN: usize = 1024;

/// Interval at which idle connections are looked at.
const SWEEP: Duration = Duration::from_millis(500);

impl Upstream {
    pub(crate) fn new(shard: Rc<Shard>, engines: Arc<Engines>, dispatcher: Dispatcher) -> Upstream {
        Upstream {
            shard,
            dispatching: Dispatching::new(dispatcher),
            idle: engines
                .members()
                .iter()
                .map(|_| RefCell::default())
                .collect(),
            members: RefCell::new((engines.generation(), engines.members())),
            engines,
            free: RefCell::default(),
            numbers: Cell::new(0),
            budget: Cell::new(RETRIES_AT_ONCE),
            stopping: Cell::new(false),
            stop: tokio::sync::Notify::new(),
            waiting: Cell::new(0),
            lookups: stored::Lookups::default(),
            planning: tokio::sync::Semaphore::new(PLANS_AT_ONCE),
            copies: Cell::new(0),
            watched: RefCell::default(),
        }
    }

    pub(crate) fn shard(&self) -> &Rc<Shard> {
        &self.shard
    }

    /// The engine that is `worker`; `None`: it was removed.
    fn engine(&self, worker: WorkerId) -> Option<Arc<Engine>> {
        let generation = self.engines.generation();
        let mut members = self.members.borrow_mut();
        if members.0 != generation {
            *members = (generation, self.engines.members());
        }
        members.1.get(worker.index())?.clone()
    }

    /// Ends `relay` when it is overdue.
    fn look_after(&self, relay: &Rc<RefCell<Relay>>) {
        self.watched.borrow_mut().push(Rc::downgrade(relay));
    }

    /// Ends answers that are overdue, some at a time.
    async fn end_overdue(&self) {
        let mut at = 0;
        loop {
            let some: Vec<Rc<RefCell<Relay>>> = {
                let mut watched = self.watched.borrow_mut();
                let end = (at + RELAYS_PER_TURN).min(watched.len());
                let mut some = Vec::with_capacity(end - at);
                for index in (at..end).rev() {
                    match watched[index].upgrade() {
                        Some(relay) => some.push(relay),
                        None => drop(watched.swap_remove(index)),
                    }
                }
                at += some.len();
                some
            };
            if some.is_empty() {
                let is_end = at >= self.watched.borrow().len();
                if is_end {
                    return;
                }
                continue; // all of them had ended, and later ones took their places
            }
            let now = monotonic_ns();
            for relay in some {
                relay.borrow_mut().check(now);
            }
            tokio::task::yield_now().await;
        }
    }

    /// Closes connections that were idle for too long, and ends overdue answers, for as long as the shard runs.
    pub(crate) async fn sweep(self: Rc<Upstream>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            self.end_overdue().await;
            let keep_ns = nanos(self.engines.settings.keep_alive);
            let now = monotonic_ns();
            for (slot, idle) in self.idle.iter().enumerate() {
                let engine = self.engine(WorkerId(to_u32(slot))).map(|engine| engine.id);
                let mut idle = idle.borrow_mut();
                idle.retain(|connection| Some(connection.engine_id) == engine);
                while idle
                    .front()
                    .is_some_and(|connection| connection.idle_since_ns + keep_ns <= now)
                {
                    idle.pop_front();
                }
            }
        }
    }

    /// An idle connection to `engine` that is still open.
    fn take_idle(&self, engine: &Engine) -> Option<Connection> {
        let keep_ns = nanos(self.engines.settings.keep_alive);
        let now = monotonic_ns();
        let mut idle = self.idle[engine.spec.worker.index()].borrow_mut();
        // The youngest first: the others may then be closed.
        while let Some(connection) = idle.pop_back() {
            let is_its = connection.engine_id == engine.id; // not of one that had its slot
            if is_its && connection.idle_since_ns + keep_ns > now && connection.is_open() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection whose answer was complete.
    fn keep(&self, engine: &Engine, mut connection: Connection) {
        if !connection.rest(monotonic_ns()) {
            return; // bytes without a request
        }
        let mut idle = self.idle[engine.spec.worker.index()].borrow_mut();
        if idle.len() < self.engines.settings.connections_idle_max {
            idle.push_back(connection);
        }
    }

    fn next_number(&self) -> u32 {
        self.free.borrow_mut().pop().unwrap_or_else(|| {
            let number = self.numbers.get();
            self.numbers.set(number + 1);
            number
        })
    }

    fn free_number(&self, number: u32) {
        self.free.borrow_mut().push(number);
    }

    /// A request was accepted: it earns a share of a retry.
    fn earn(&self) {
        let earned = self.budget.get() + self.engines.settings.retry_budget;
        self.budget.set(earned.min(RETRIES_AT_ONCE));
    }

    /// Takes a retry from the budget.
    fn spend(&self) -> bool {
        let left = self.budget.get() - 1.0;
        if left >= 0.0 {
            self.budget.set(left);
        }
        left >= 0.0
    }

    /// The server stops: every request ends now. Returns how many there are.
    pub(crate) fn stop(&self) -> u64 {
        self.stopping.set(true);
        self.stop.notify_waiters();
        let watched = self.watched.borrow();
        let relays = watched.iter().filter_map(Weak::upgrade);
        let cut = relays.filter(|relay| relay.borrow_mut().stop()).count();
        self.waiting.get() + cut as u64
    }

    /// Waits for `work`, which ends with an error when the server stops.
    ///
    /// # Errors
    /// Those of `work`, and 503.
    async fn until_stop<T>(
        &self,
        work: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let _waiting = Waiting::begin(&self.waiting);
        let stop = self.stop.notified(); // from here on, not from its first poll
        if self.stopping.get() {
            return Err(ApiError::stopping());
        }
        tokio::select! {
            biased;
            () = stop => Err(ApiError::stopping()),
            outcome = work => outcome,
        }
    }
}

/// A request that waits for the first byte of an answer.
struct Waiting<'a>(&'a Cell<u64>);

impl<'a> Waiting<'a> {
    fn begin(count: &'a Cell<u64>) -> Waiting<'a> {
        count.set(count.get() + 1);
        Waiting(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
