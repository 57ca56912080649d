//! Shares of requests: pools with weights, and pools that get copies whose answers are dropped.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::{Method, StatusCode};
use slipstream_base::WorkerId;
use slipstream_base::mix::{below, index, mix64};
use slipstream_base::sync::unpoisoned;
use slipstream_config::cluster::PoolTraffic;

use super::Upstream;
use super::connection::Connection;
use super::counters::CopyDrop;
use super::engines::{Engine, Engines};
use super::failure::Failure;
use super::visit::Visit;
use crate::door::budget::Charge;
use crate::wire::{self, BodyDecoder, Decoded};

/// Copies of a shard that are under way. Further ones are dropped and counted.
const COPIES_MAX: usize = 256;

/// Bytes of a copy's answer that are read at most, and in one turn of its task.
const ANSWER_BYTES_MAX: usize = 64 << 20;
const TURN_BYTES: usize = 256 << 10;

/// Time limit of a copy.
const COPY_TIME: Duration = Duration::from_secs(600);

/// The index that `draw` chooses, in proportion to `weights`. `None`: all are 0.
fn chosen(weights: &[u32], draw: u64) -> Option<usize> {
    let sum: u64 = weights.iter().copied().map(u64::from).sum();
    if sum == 0 {
        return None;
    }
    let mut left = below(draw, sum);
    weights.iter().position(|&weight| {
        let weight = u64::from(weight);
        if left < weight {
            return true;
        }
        left -= weight;
        false
    })
}

impl Engines {
    /// The share of `pool`, as of the file's last change.
    fn traffic(&self, pool: &str) -> PoolTraffic {
        let pools = self.pools.read();
        let pools = unpoisoned(pools);
        let found = pools.iter().find(|of| of.name == pool);
        found.map_or_else(PoolTraffic::default, |of| of.traffic)
    }

    /// The engines of one pool of those that serve a model (`only`; `None`: all), chosen by `draw` in proportion to
    /// the weights. `None`: no pool has a weight.
    pub(super) fn weighted(&self, only: Option<&[WorkerId]>, draw: u64) -> Option<Arc<[WorkerId]>> {
        if !self.is_weighted.load(Relaxed) {
            return None;
        }
        let members = self.members();
        let serves = |of: &&Arc<Engine>| {
            of.takes_requests()
                && !of.is_mirror()
                && only.is_none_or(|only| only.binary_search(&of.spec.worker).is_ok())
        };
        let mut pools: Vec<(&str, Vec<WorkerId>)> = Vec::new();
        for engine in members.iter().flatten().filter(serves) {
            let name = engine.spec.pool.as_str();
            match pools.iter_mut().find(|(known, _)| *known == name) {
                Some((_, workers)) => workers.push(engine.spec.worker),
                None => pools.push((name, vec![engine.spec.worker])),
            }
        }
        let weights: Vec<Option<u32>> = pools
            .iter()
            .map(|(name, _)| self.traffic(name).weight)
            .collect();
        if weights.iter().all(Option::is_none) {
            return None;
        }
        let weights: Vec<u32> = weights
            .into_iter()
            .map(|weight| weight.unwrap_or(1))
            .collect();
        // All that are left have the weight 0: better than no answer.
        let at = chosen(&weights, draw)?;
        Some(pools.swap_remove(at).1.into())
    }

    /// Engines that get a copy of a request for `model`, one per pool at most.
    pub(super) fn mirrors(&self, model: Option<&str>, draw: u64) -> Vec<Arc<Engine>> {
        if !self.has_mirrors.load(Relaxed) {
            return Vec::new();
        }
        let members = self.members();
        let mirrors = members.iter().flatten().filter(|of| of.is_mirror());
        let mut names: Vec<&str> = mirrors.map(|of| of.spec.pool.as_str()).collect();
        names.dedup();
        let mut copies = Vec::new();
        for (number, name) in names.into_iter().enumerate() {
            let draw = mix64(draw ^ number as u64);
            let share = self.traffic(name).mirror.unwrap_or(0.0);
            if (draw >> 11) as f64 / (1_u64 << 53) as f64 >= share {
                continue;
            }
            let takes = |of: &&Arc<Engine>| {
                let lists = |model: &str| of.models().iter().any(|known| known.id == model);
                of.spec.pool == name && of.takes_requests() && model.is_none_or(lists)
            };
            let ready: Vec<_> = members.iter().flatten().filter(takes).collect();
            if ready.is_empty() {
                self.traffic_counts.drop_copy(CopyDrop::NoEngine);
                continue;
            }
            let at = index(mix64(draw), ready.len());
            copies.push(ready[at].clone());
        }
        copies
    }
}

/// A copy of a request.
pub(super) struct RequestCopy {
    pub(super) method: Method,
    pub(super) target: String,
    pub(super) headers: Bytes,
    pub(super) authorization: Option<Bytes>,
    pub(super) body: Bytes,
    /// The body's memory.
    #[allow(dead_code)] // given back when dropped
    pub(super) charge: Charge,
}

impl Upstream {
    /// Sends `copy` to `engine` by a task of its own, which reads the answer and drops it.
    pub(super) fn send_copy(self: &std::rc::Rc<Self>, engine: Arc<Engine>, copy: RequestCopy) {
        let open = self.copies.get();
        if open >= COPIES_MAX {
            return self.engines.traffic_counts.drop_copy(CopyDrop::Limit);
        }
        self.copies.set(open + 1);
        let upstream = self.clone();
        tokio::task::spawn_local(async move {
            let outcome = tokio::time::timeout(COPY_TIME, upstream.copy(&engine, &copy)).await;
            let outcome = outcome.unwrap_or(Err(Failure::Stalled(COPY_TIME)));
            let at = match outcome {
                Ok(status) if status.is_success() => 0,
                Ok(_) => 1,
                Err(_) => 2,
            };
            engine.counters.copies[at].fetch_add(1, Relaxed);
            upstream.copies.set(upstream.copies.get() - 1);
        });
    }

    async fn copy(&self, engine: &Arc<Engine>, copy: &RequestCopy) -> Result<StatusCode, Failure> {
        let settings = &self.engines.settings;
        let mut visit = Visit::begin(&self.engines, engine.clone());
        let begun = tokio::time::timeout(settings.first_byte_timeout, async {
            let connection = match self.take_idle(engine) {
                Some(connection) => connection,
                None => Connection::open(engine, settings.connect_timeout).await?,
            };
            self.begin_copy(connection, engine, copy).await
        });
        let begun = begun.await;
        let begun = begun.unwrap_or(Err(Failure::FirstByteTimeout(settings.first_byte_timeout)));
        let (mut connection, head) = begun.inspect_err(|failure| visit.on_failure(failure))?;
        visit.on_first_byte(head.status, true);
        let mut decoder = BodyDecoder::new(head.framing);
        let (mut read, mut turn) = (0, 0);
        loop {
            match decoder.decode(&mut connection.buf) {
                Ok(Decoded::Data(_)) => continue,
                Ok(Decoded::End) => break,
                Ok(Decoded::NeedMore) => {}
                Err(error) => return Err(Failure::Protocol(error)),
            }
            let piece = std::future::poll_fn(|cx| connection.poll_fill(cx));
            match tokio::time::timeout(settings.idle_timeout, piece).await {
                Ok(Ok(0)) if decoder.ends_at_close() => return Ok(head.status),
                Ok(Ok(0)) => return Err(Failure::Lost("closed within its answer".into())),
                Ok(Ok(bytes)) => {
                    read += bytes;
                    turn += bytes;
                }
                Ok(Err(error)) => return Err(Failure::Lost(error.to_string())),
                Err(_) => return Err(Failure::Stalled(settings.idle_timeout)),
            }
            if read > ANSWER_BYTES_MAX {
                return Err(Failure::Lost("sent an answer without an end".into()));
            }
            if turn >= TURN_BYTES {
                turn = 0;
                tokio::task::yield_now().await; // clients go first
            }
        }
        if head.keep_alive && head.status.is_success() {
            self.keep(engine, connection);
        }
        Ok(head.status)
    }

    async fn begin_copy(
        &self,
        mut connection: Connection,
        engine: &Engine,
        copy: &RequestCopy,
    ) -> Result<(Connection, wire::ResponseHead), Failure> {
        let own = engine.authorization.as_deref();
        let head: BytesMut = wire::write_head(
            &copy.method,
            [&engine.spec.url.prefix, &copy.target],
            &engine.authority,
            own.or(copy.authorization.as_deref()),
            &copy.headers,
            copy.body.len(),
        );
        let body = [copy.body.clone(), Bytes::new()];
        connection.send(head, &body).await?;
        let head = connection.read_head(&copy.method).await?;
        Ok((connection, head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_choose_in_proportion_to_weights() {
        let weights = [90, 0, 10];
        let mut counts = [0_u32; 3];
        for draw in 0..100_000_u64 {
            counts[chosen(&weights, mix64(draw)).unwrap()] += 1;
        }
        // Six standard deviations of a binomial of 100,000 draws at 0.1.
        assert!((9_430..=10_570).contains(&counts[2]), "{counts:?}");
        assert_eq!(counts[1], 0);
        assert_eq!(chosen(&[0, 0], 7), None);
        assert_eq!(chosen(&[], 7), None);
        assert_eq!(chosen(&[0, 1], u64::MAX), Some(1));
    }
}
