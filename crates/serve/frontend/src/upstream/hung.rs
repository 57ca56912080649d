//! Requests at an engine that has stopped answering health checks, such as one whose GPU hangs.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use slipstream_base::WorkerId;
use slipstream_base::width::nanos;
use slipstream_planes::clock::monotonic_ns;

use super::engines::{Engine, Engines};
use super::failure::Failure;

/// Interval at which a waiting request checks its engine's health.
const LOOK: Duration = Duration::from_millis(250);

impl Engine {
    /// Whether health checks found the engine down, and a request there got no part of an answer since `last_ns`. An engine whose
    /// streams continue is slow to answer health checks, but not hung.
    pub(super) fn is_hung(&self, last_ns: u64, now_ns: u64, health_timeout: Duration) -> bool {
        let since_ns = self.hung_since_ns.load(Relaxed);
        since_ns > last_ns && now_ns.saturating_sub(last_ns) >= nanos(health_timeout)
    }
}

impl Engines {
    /// Whether an engine besides `engine` takes requests of the workers `only`.
    pub(super) fn others_take(&self, engine: &Engine, only: Option<&[WorkerId]>) -> bool {
        let fleet = &self.fleets.serve;
        let mut targets = fleet.targets().iter().enumerate();
        targets.any(|(at, target)| {
            let worker = target.rank.worker;
            worker != engine.spec.worker
                && only.is_none_or(|only| only.contains(&worker))
                && fleet.is_ready(at)
        })
    }

    /// Returns the outcome of `attempt` at `engine`. The attempt and its connection are dropped after `limit`, or if the
    /// engine hangs while another engine of `only` takes requests.
    ///
    /// # Errors
    /// The attempt's errors, [`Failure::FirstByteTimeout`] and [`Failure::Hung`].
    pub(super) async fn answered<T>(
        &self,
        engine: &Engine,
        only: Option<&[WorkerId]>,
        limit: Duration,
        attempt: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let (begun, begun_ns) = (Instant::now(), monotonic_ns());
        let mut attempt = pin!(attempt);
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            if let Ok(outcome) = tokio::time::timeout(left.min(LOOK), &mut attempt).await {
                return outcome;
            }
            if left <= LOOK {
                return Err(Failure::FirstByteTimeout(limit));
            }
            let now_ns = monotonic_ns();
            if engine.is_hung(begun_ns, now_ns, self.settings.health_timeout)
                && self.others_take(engine, only)
            {
                return Err(Failure::Hung);
            }
        }
    }
}
