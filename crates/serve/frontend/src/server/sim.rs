//! Shards under a simulator (feature `sim`): a frontend without threads and sockets.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Body;
use slipstream_base::{StageTimes, WorkerId};
use slipstream_dispatch::Dispatcher;
use slipstream_metrics::Registry;
use slipstream_planes::StreamId;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::link::Socket;

use crate::door::body::HttpBody;
use crate::door::budget::Budget;
use crate::door::connection::{Client, Connection};
use crate::door::helpers::Helpers;
use crate::door::http::RequestHead;
use crate::door::metrics::ShardMetrics;
use crate::door::service::Service;
use crate::door::shard::{Shard, Shared};
use crate::openai::{ApiError, CompletionApi};
use crate::tokens::generate;
use crate::tokens::kv_network::KvNetwork;
use crate::tokens::remote::RemoteLimits;
use crate::tokens::remote::WorkerLinks;
use crate::tokens::reply::StreamRole;
use crate::tokens::response_store::ResponseStore;
use crate::tokens::roster::Roster;
use crate::tokens::workers::{Transport, Workers};

/// State that the shards of one simulated frontend share.
pub struct SimFrontend {
    shared: Shared,
    answers: Arc<ResponseStore>,
    roster: Arc<Roster>,
    limits: RemoteLimits,
}

/// A shard that a simulator runs.
#[derive(Clone)]
pub struct SimShard {
    workers: Rc<Workers>,
}

/// State and counters of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardState {
    /// Requests that the dispatcher has.
    pub open: u64,
    /// Those of them that are queued.
    pub queued: u64,
    /// Streams in the table.
    pub streams: u64,
    /// Streams by the metric.
    pub streams_open: u64,
    /// Memory charged to clients, bytes.
    pub memory: u64,
    /// Entries of streams that are gone (counter).
    pub stale_entries: u64,
    /// Entries of workers that do not run the stream (counter).
    pub foreign_entries: u64,
    /// Requests that another worker got (counter).
    pub retries: u64,
    /// Streams that another worker continued (counter).
    pub resumed: u64,
    /// Streams that ended because their worker was lost (counter).
    pub streams_lost: u64,
    /// Tokens of prompts, those of them that were cached, and tokens of answers (counters).
    pub tokens: [u64; 3],
    /// Workers whose connections stand.
    pub seated: Vec<WorkerId>,
}

/// A refusal, or an error in mid-stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimError {
    /// HTTP status.
    pub status: u16,
    /// `error.code`.
    pub code: Option<&'static str>,
    /// `error.message`.
    pub message: String,
}

impl From<ApiError> for SimError {
    fn from(error: ApiError) -> SimError {
        SimError {
            status: error.status,
            code: error.code,
            message: error.message,
        }
    }
}

/// An answer as a client reads it.
pub struct SimAnswer {
    body: HttpBody,
    // After the body, as a connection does.
    _client: Client,
}

impl SimFrontend {
    /// A frontend that serves `service` with the workers of `roster`.
    pub fn new(service: Service, roster: Arc<Roster>, limits: RemoteLimits) -> SimFrontend {
        let answers = Arc::new(ResponseStore::new(service.limits.memory_max));
        let shared = Shared {
            budget: Budget::new(service.limits),
            service: Arc::new(service),
            registry: Arc::new(Registry::default()),
            helpers: Helpers::none(),
        };
        SimFrontend {
            shared,
            answers,
            roster,
            limits,
        }
    }

    /// Shard number `index`. Its tasks run on the `LocalSet` at hand.
    pub fn shard(
        &self,
        index: u8,
        dispatcher: Dispatcher,
        kv_network: Option<Arc<KvNetwork>>,
    ) -> SimShard {
        let links = WorkerLinks::new(WorkerLinks::simulated(self.roster.clone(), self.limits));
        let transport = Transport::Sockets(Rc::new(links));
        let metrics = Arc::new(ShardMetrics::new());
        let shard = Rc::new(Shard::new(index, self.shared.clone(), metrics));
        let workers = Workers::new(
            shard,
            self.answers.clone(),
            transport,
            dispatcher,
            kv_network,
        );
        SimShard {
            workers: Rc::new(workers),
        }
    }
}

impl SimShard {
    /// The shard's own tasks, for as long as it runs.
    pub async fn run(self) -> Infallible {
        let carry = tokio::task::spawn_local(Workers::carry(self.workers.clone()));
        let look = tokio::task::spawn_local(Workers::look_after_replies(self.workers.clone()));
        let _ = carry.await;
        let _ = look.await;
        std::future::pending().await
    }

    fn remote(&self) -> &Rc<WorkerLinks> {
        match &self.workers.transport {
            Transport::Sockets(remote) => remote,
            Transport::Rings(_) => unreachable!("a simulated shard has sockets"),
        }
    }

    /// Serves a worker process that connects by `socket`. Within the shard's `LocalSet`.
    pub fn accept(&self, socket: Box<dyn Socket>) {
        self.remote().accept(&self.workers, socket);
    }

    /// Answers `POST /v1/completions` with `body`.
    ///
    /// # Errors
    /// The refusal.
    pub async fn post(&self, body: Bytes, session: Option<u64>) -> Result<SimAnswer, SimError> {
        let (workers, shard) = (&self.workers, &self.workers.shard);
        shard.metrics.requests.add(1);
        let connection = Connection::new(Arc::default());
        let owner = connection.begin(monotonic_ns());
        let client = Client::new(owner, None);
        let head = RequestHead {
            id: "simulated".into(),
            session,
            worker: None,
            traced: false,
            resumes: true,
            client: client.clone(),
        };
        let memory = &shard.budget.memory;
        let charge = client.charge(memory, body.len() as u64)?;
        let times = StageTimes::default();
        let answered = generate::generate(
            workers,
            CompletionApi::Completion,
            head,
            body,
            charge,
            times,
        );
        Ok(SimAnswer {
            body: answered.await?.into_body(),
            _client: client,
        })
    }

    /// Requests of the dispatcher, those of them that are queued, and streams in the table.
    pub fn sizes(&self) -> (u64, u64, u64) {
        let workers = &self.workers;
        let open = workers.dispatching.open() as u64;
        (
            open,
            workers.dispatching.queued() as u64,
            workers.table.len().into(),
        )
    }

    /// No stream got more tokens than it has credit for.
    ///
    /// # Errors
    /// The stream that did, and its worker.
    pub fn check(&self) -> Result<(), (StreamId, WorkerId)> {
        let mut beyond = None;
        self.workers.table.for_each(|stream, slot| {
            let state = slot.reply.state.borrow();
            if slot.role == StreamRole::Answer && state.exceeds_credit(slot.sequence) {
                beyond = Some((stream, state.target(slot.sequence).worker));
            }
        });
        beyond.map_or(Ok(()), Err)
    }

    /// Its contents.
    pub fn state(&self) -> ShardState {
        let (workers, shard) = (&self.workers, &self.workers.shard);
        let metrics = &shard.metrics;
        ShardState {
            open: workers.dispatching.open() as u64,
            queued: workers.dispatching.queued() as u64,
            streams: workers.table.len().into(),
            streams_open: metrics.streams_open.get(),
            memory: shard.budget.memory.used(),
            stale_entries: metrics.plane.stale_entries.get(),
            foreign_entries: metrics.plane.foreign_entries.get(),
            retries: metrics.retries.get(),
            resumed: metrics.streams_resumed.get(),
            streams_lost: metrics.streams_lost.get(),
            tokens: [
                metrics.tokens.prompt.get(),
                metrics.tokens.cached.get(),
                metrics.tokens.generation.get(),
            ],
            seated: self.remote().seated(),
        }
    }
}

impl SimAnswer {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// The answer breaks off.
    pub async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            let frame = poll_fn(|cx| Pin::new(&mut self.body).poll_frame(cx)).await?;
            match frame.map(hyper::body::Frame::into_data) {
                Ok(Ok(data)) => return Some(Ok(data)),
                Ok(Err(_)) => {} // trailers
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
