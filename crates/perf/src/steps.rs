//! Steps of one rank for an engine: physics, and the residual at the step's number of sequences.

use std::sync::Arc;

use crate::deployment::{Deployment, Framework};
use crate::physics::{Load, Physics};
use crate::predict::aggregated;
use crate::profile::{Profile, own};
use crate::residual::Features;

/// Batch sizes with a residual of their own; larger ones have that of the last.
const BATCHES: usize = 1024;
/// Lengths at which the residual is taken: a step does not know those of its requests.
const ISL: f64 = 2048.0;
const OSL: f64 = 1024.0;

/// How long the steps of one rank take. Everything that does not depend on the load is precomputed:
/// a look-up costs some dozen operations.
#[derive(Clone, Debug, PartialEq)]
pub struct StepModel {
    physics: Physics,
    /// Measured over physical time, by the number of sequences that decode.
    factors: Arc<[f64]>,
    /// Time from the arrival of a request at the server to the engine, and of its first token back, ns.
    api_ns: f64,
}

impl StepModel {
    /// The steps of the ranks of `deployment`; its lengths and batch size are not used.
    pub fn new(deployment: &Deployment, profile: &Profile) -> StepModel {
        let mut d = aggregated(deployment);
        (d.isl, d.osl) = (ISL, OSL);
        // The residual is smooth in the logarithm of the batch size.
        let mut at = |quarter: u32| {
            d.batch = libm::exp2(f64::from(quarter) / 4.0);
            Features::of(&d).residual(profile, 0)
        };
        let quarters = 4 * BATCHES.ilog2();
        let grid: Vec<f64> = (0..=quarters).map(&mut at).collect();
        let factors = (0..=BATCHES).map(|batch| {
            let place = 4.0 * libm::log2(batch.max(1) as f64);
            let low = (place as usize).min(grid.len() - 2);
            let share = place - low as f64;
            libm::exp(grid[low] + share * (grid[low + 1] - grid[low]))
        });
        let factors = factors.collect();
        StepModel {
            physics: Physics::new(
                &d.shape,
                &d.gpu,
                d.formats,
                d.parallel,
                d.framework,
                &profile.params,
            ),
            factors,
            api_ns: 0.0,
        }
        .with_api_of(d.framework, profile)
    }

    /// The lag of tokens behind steps counts with the time before the engine: a step of one sequence for
    /// each step beyond the first, which the engine runs itself.
    fn with_api_of(mut self, framework: Framework, profile: &Profile) -> StepModel {
        let lag = own!(profile.params, framework, "lag_steps") - 1.0;
        let step = self.ns(&Load::decode(1.0, ISL + OSL / 2.0));
        self.api_ns = own!(profile.params, framework, "api_ms") * 1e6 + lag.max(0.0) * step;
        self
    }

    /// Length of a step on `load`, ns.
    pub fn ns(&self, load: &Load) -> f64 {
        let batch = (load.decodes as usize).min(BATCHES);
        self.physics.ns(load) * self.factors[batch]
    }

    /// Time of a request outside of the engine's steps, up to its first token: HTTP, tokenizer, the hop to
    /// the engine's process, and tokens that are one or more steps behind, ns.
    pub fn api_ns(&self) -> f64 {
        self.api_ns
    }
}
