//! The expected error of a run, from the held-out error of the profile that its step times follow.

use std::io;
use std::path::Path;

use slipstream_config::cluster::Cluster;
use slipstream_engine::timing;
use slipstream_perf::error_bars;
use slipstream_report::run::ExpectedError;

use crate::{Outcome, TwinError};

impl Outcome {
    /// How far latencies of each pool with calibrated step times are expected to be off, at the run's
    /// mean lengths and concurrency. Empty if no pool has a profile.
    ///
    /// # Errors
    /// If a profile cannot be read.
    pub fn expected_errors(
        &self,
        cluster: &Cluster,
        read: impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Vec<ExpectedError>, TwinError> {
        let duration_s = self.totals.duration_s().max(1e-9);
        let mut errors = Vec::new();
        for pool in &cluster.pools {
            let model = &pool.model.name;
            let own = self.models.iter().find(|of| of.name == *model);
            let totals = own.map_or(&self.totals, |model| &model.totals);
            let ended = totals.requests.succeeded.max(1) as f64;
            let tokens = totals.tokens();
            let e2e_ms = totals.latencies().e2e_ms.map_or(0.0, |p| p.mean);
            // Little's law.
            let in_flight = ended / duration_s * e2e_ms / 1e3;
            let serve = (cluster.pools_of(model))
                .filter(|pool| pool.role != slipstream_base::Role::Prefill);
            let ranks: u64 = serve
                .map(|pool| u64::from(pool.workers) * u64::from(pool.engine.data_parallel_size))
                .sum();
            let Some(mut deployment) = timing::deployment(&pool.engine, &pool.model.shape) else {
                continue;
            };
            deployment.isl = (tokens.input as f64 / ended).max(1.0);
            deployment.osl = (tokens.output as f64 / ended).max(1.0);
            deployment.batch =
                (in_flight / ranks.max(1) as f64).clamp(1.0, f64::from(pool.engine.max_num_seqs));
            let profile = timing::profile(&pool.engine, |path| read(path)).map_err(|source| {
                TwinError::Timing {
                    pool: pool.name.clone(),
                    source,
                }
            })?;
            let bars = error_bars(&deployment, &profile);
            // The profile's steps are those of all layers together.
            deployment.parallel.pipeline = pool.engine.pipeline_parallel_size();
            if pool.engine.data_parallel_barrier {
                deployment.parallel.attention_data = 1; // waits for other ranks are modelled
            }
            let words = bars.distances.iter().map(|distance| distance.name());
            let assumed = slipstream_perf::not_modelled(&deployment);
            errors.push(ExpectedError {
                pool: pool.name.clone(),
                region: words.collect::<Vec<_>>().join("; "),
                tpot: bars.tpot,
                ttft: bars.ttft,
                not_modelled: assumed,
            });
        }
        Ok(errors)
    }
}
