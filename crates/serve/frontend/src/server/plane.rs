//! What answers the requests of a shard: modelled workers, or real engines.

use std::rc::Rc;
use std::sync::Arc;

use slipstream_dispatch::Dispatcher;
use slipstream_planes::ring::ShardPort;
use tokio::task::JoinHandle;

use crate::door::shard::Shard;
use crate::tokens::kv_network::KvNetwork;
use crate::tokens::remote::{RemotePlane, WorkerLinks};
use crate::tokens::response_store::ResponseStore;
use crate::tokens::workers::{Transport, Workers};
use crate::upstream::{Engines, Upstream};

/// How a shard reaches workers.
pub enum WorkerTransport {
    /// Rings to and from the engine threads of this process.
    Rings(ShardPort),
    /// Connections from worker processes.
    Sockets(RemotePlane),
    /// HTTP to real engines.
    Engines(Arc<Engines>),
}

/// A shard's ends of what it shares with others.
pub struct ShardPlane {
    /// To workers and back.
    pub transport: WorkerTransport,
    /// Decides where its requests run.
    pub dispatcher: Dispatcher,
    /// With workers that compute prompts for others: the network between them.
    pub kv_network: Option<Arc<KvNetwork>>,
}

/// [`ShardPlane`] at work: the owner of a shard's dispatcher.
#[derive(Clone)]
pub(crate) enum Plane {
    Workers(Rc<Workers>),
    Engines(Rc<Upstream>),
}

impl Plane {
    pub(crate) fn new(shard: Rc<Shard>, answers: Arc<ResponseStore>, ends: ShardPlane) -> Plane {
        let ShardPlane {
            transport,
            dispatcher,
            kv_network,
        } = ends;
        let transport = match transport {
            WorkerTransport::Rings(port) => Transport::Rings(port),
            WorkerTransport::Sockets(plane) => Transport::Sockets(Rc::new(WorkerLinks::new(plane))),
            WorkerTransport::Engines(engines) => {
                let upstream = Upstream::new(shard, engines, dispatcher);
                return Plane::Engines(Rc::new(upstream));
            }
        };
        let workers = Workers::new(shard, answers, transport, dispatcher, kv_network);
        Plane::Workers(Rc::new(workers))
    }

    pub(crate) fn shard(&self) -> &Rc<Shard> {
        match self {
            Plane::Workers(workers) => &workers.shard,
            Plane::Engines(upstream) => upstream.shard(),
        }
    }

    /// Starts the tasks that run for as long as the shard.
    pub(crate) fn start_tasks(&self) -> Vec<JoinHandle<()>> {
        let meter = &self.shard().meter;
        match self {
            Plane::Workers(workers) => {
                let mut tasks = vec![
                    meter.spawn(Workers::drain(workers.clone())),
                    meter.spawn(Workers::carry(workers.clone())),
                    meter.spawn(Workers::look_after_replies(workers.clone())),
                ];
                for thread in 0..workers.engine_threads() {
                    tasks.push(meter.spawn(Workers::host(workers.clone(), thread)));
                }
                tasks
            }
            Plane::Engines(upstream) => vec![
                meter.spawn(Upstream::sweep(upstream.clone())),
                meter.spawn(Upstream::carry(upstream.clone())),
            ],
        }
    }

    /// The server stops: open requests end with an error. Returns how many there were.
    pub(crate) fn end_all(&self) -> u64 {
        let cut = match self {
            Plane::Workers(workers) => workers.end_all(),
            Plane::Engines(upstream) => upstream.stop(),
        };
        self.shard().metrics.streams_cut_stop.add(cut);
        cut
    }
}
