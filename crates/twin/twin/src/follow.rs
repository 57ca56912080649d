//! A run that is fed while it advances: the twin of a fleet whose requests become known one after the other.

use std::io;
use std::path::Path;

use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::{Arrival, Class, Content, Workload};
use slipstream_workload::Request;

use crate::run::{Options, Sink, TwinError};
use crate::sim::Sim;

/// A cluster in virtual time that advances as far as its requests are known.
///
/// Requests that arrive at one worker each are computed as by [`simulate`](crate::simulate), whatever the steps are in
/// which time advances. The router's policy is not asked: each request names its worker.
pub struct Follower<'a> {
    sim: Sim<'a>,
    to: SimTime,
}

/// A request that arrived before the time that was reached already. It is not part of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request arrived at {due}, and the run has reached {reached}")]
pub struct LateRequest {
    /// Its arrival.
    pub due: SimTime,
    /// The time that was reached.
    pub reached: SimTime,
}

impl<'a> Follower<'a> {
    /// An idle cluster at time 0. `read` reads the files that it refers to. Of `options`, `time_max`, `threads` and
    /// `retries` have no effect.
    ///
    /// # Errors
    /// [`TwinError`].
    pub fn new(
        cluster: &'a Cluster,
        options: &'a Options,
        read: impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Follower<'a>, TwinError> {
        let nothing = Workload {
            seed: 0,
            requests: Some(0),
            duration_s: None,
            time_scale: 1.0,
            window_s: None,
            served_models: Vec::new(),
            arrival: Arrival::Constant { rate_per_s: 1.0 },
            content: Content::Generated(vec![Class::default()]),
        };
        let sim = Sim::new(cluster, &nothing, options, &read)?;
        sim.promise_single_writer();
        Ok(Follower {
            sim,
            to: SimTime::ZERO,
        })
    }

    /// Adds a request that arrives at `request.due` and is computed by `worker`. `request.id()` must differ from
    /// those of other requests under way, and its turn must be the last.
    ///
    /// # Errors
    /// It is late.
    pub fn push(&mut self, request: Request, worker: WorkerId) -> Result<(), LateRequest> {
        if request.due < self.to {
            return Err(LateRequest {
                due: request.due,
                reached: self.to,
            });
        }
        self.sim.push(request, worker);
        Ok(())
    }

    /// Advances to `to`: all requests that arrive before it have been pushed. Returns why the run cannot continue, if
    /// it cannot.
    ///
    /// # Errors
    /// [`TwinError`].
    pub fn advance(
        &mut self,
        to: SimTime,
        sink: &mut dyn Sink,
    ) -> Result<Option<String>, TwinError> {
        self.to = self.to.max(to);
        self.sim.set_horizon(self.to);
        while let Some(next) = self.sim.next_time()?.filter(|next| *next < self.to) {
            if let Some(cut) = self.sim.step(next, sink)? {
                return Ok(Some(cut));
            }
        }
        Ok(None)
    }

    /// The time that was reached.
    pub fn reached(&self) -> SimTime {
        self.to
    }

    /// Requests that were pushed and have not ended.
    pub fn open(&self) -> usize {
        self.sim.pinned()
    }
}
