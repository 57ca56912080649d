//! TTFT and TPOT of a closed loop: the steps' times, queues, and the profile's corrections.

use crate::deployment::{Deployment, Parallel, Refusal, Serving};
use crate::memory::sequences_max;
use crate::physics::{Load, Physics};
use crate::profile::{Distance, Params, Profile, own, shared};
use crate::residual;

/// Expected TTFT and TPOT of a deployment.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Mean time to first token, ms: expected, and the band that 80 % of measurements fall in.
    pub ttft_ms: f64,
    /// Lower end of the band.
    pub ttft_low_ms: f64,
    /// Upper end of the band.
    pub ttft_high_ms: f64,
    /// Mean time per output token after the first, ms.
    pub tpot_ms: f64,
    /// Lower end of the band.
    pub tpot_low_ms: f64,
    /// Upper end of the band.
    pub tpot_high_ms: f64,
    /// Distances from the deployments that the profile was fitted to: each part that was never
    /// measured, or the single word for a deployment of measured parts. Never empty.
    pub distances: Vec<Distance>,
    /// More requests are under way than the KV cache or the prefill workers take.
    pub saturated: bool,
}

/// TTFT and TPOT by physics alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Physical {
    pub(crate) tpot_ms: f64,
    pub(crate) ttft_ms: f64,
    pub(crate) saturated: bool,
}

pub(crate) fn physical(d: &Deployment, params: &Params) -> Physical {
    let physics = |parallel: Parallel| {
        Physics::new(&d.shape, &d.gpu, d.formats, parallel, d.framework, params)
    };
    let decoder = physics(d.parallel);
    let ranks = f64::from(d.parallel.attention_data);
    let context = d.isl + d.osl / 2.0;
    let api = own!(params, d.framework, "api_ms") * 1e6
        + own!(params, d.framework, "api_prompt_token_us") * 1e3 * d.isl;
    let per_request = own!(params, d.framework, "api_sequence_ms") * 1e6;
    match d.serving {
        Serving::Aggregated => {
            let room = sequences_max(d);
            let running = d.batch.min(room);
            let load = Load::decode(running, context, d.isl);
            let step = decoder.ns(&load);
            let prompt = decoder.ns(&load.with_prompt(d.isl)) - step;
            // Each answer sees the prompts of all others once.
            let others = decoder.interference() * (running - 1.0).max(0.0) / d.osl * prompt;
            let tpot = step + others;
            let life = d.osl * tpot;
            let busy = (running * prompt / (life + prompt)).min(0.97);
            let service = prompt + step / 2.0;
            let queue = own!(params, d.framework, "queue") * busy / (1.0 - busy) * service / 2.0
                + own!(params, d.framework, "burst") * running * prompt * 0.1;
            let no_room = (d.batch - running).max(0.0) / running.max(1.0) * life;
            let fixed = api + per_request * d.batch * ranks;
            let ttft =
                fixed + prompt + own!(params, d.framework, "lag_steps") * step + queue + no_room;
            Physical {
                tpot_ms: tpot / 1e6,
                ttft_ms: ttft / 1e6,
                saturated: d.batch > room,
            }
        }
        Serving::Disaggregated {
            prefill_workers,
            prefill,
            decode_workers,
        } => {
            let prefiller = physics(prefill);
            let prompt = prefiller.ns(&Load::default().with_prompt(d.isl));
            let under_way = d.batch * f64::from(decode_workers) * ranks;
            let places = f64::from(prefill_workers) * f64::from(prefill.attention_data);
            let most = places / prompt;
            // Requests per ns: what the loop offers, and what prefill workers take, rounded where they meet.
            let rate = |tpot: f64| {
                let offered = under_way / (prompt + d.osl * tpot);
                let both = libm::pow(offered, -4.0) + libm::pow(most, -4.0);
                (offered, libm::pow(both, -0.25))
            };
            let first = decoder.ns(&Load::decode(d.batch, context, d.isl));
            let (_, taken) = rate(first);
            let ranks_all = f64::from(decode_workers) * ranks;
            let running = (taken * d.osl * first / ranks_all).clamp(1.0_f64.min(d.batch), d.batch);
            let step = decoder.ns(&Load::decode(running, context, d.isl));
            let (offered, taken) = rate(step);
            let waits = (under_way / taken - d.osl * step - prompt).max(0.0);
            let fixed = api + shared!(params, "split_api_ms") * 1e6 + per_request * d.batch;
            let computed = prompt * shared!(params, "split_prefill");
            let queue = waits * shared!(params, "split_queue")
                + shared!(params, "split_burst") * 0.1 * under_way * prompt / places;
            let ttft = fixed + computed + queue;
            Physical {
                tpot_ms: step * shared!(params, "split_decode") / 1e6,
                ttft_ms: ttft / 1e6,
                saturated: offered > most,
            }
        }
    }
}

/// The widest band of all that apply, TPOT and TTFT: its ends may come from different distances.
fn widest_band(distances: &[Distance], saturated: bool, profile: &Profile) -> [[f64; 2]; 2] {
    let mut band = [[0.0_f64; 2]; 2];
    for distance in distances {
        let of = profile.bands[&(*distance, saturated)];
        for (widest, [low, high]) in band.iter_mut().zip(of) {
            *widest = [widest[0].min(low), widest[1].max(high)];
        }
    }
    band
}

/// How far estimates of a deployment are expected to be off, from held-out measured ones.
#[derive(Clone, Debug, PartialEq)]
pub struct ErrorBars {
    /// Distances from the deployments that the profile was fitted to; never empty.
    pub distances: Vec<Distance>,
    /// Ends of the band that holds 80 % of measurements, as factors on an estimated TPOT.
    pub tpot: [f64; 2],
    /// The same of TTFT.
    pub ttft: [f64; 2],
}

/// What step times of `d` leave out, in words for a reader of its results.
pub fn not_modelled(d: &Deployment) -> Vec<String> {
    let mut parts = Vec::new();
    if d.parallel.attention_data > 1 && d.shape.experts.is_some() {
        parts.push(
            "waits of a rank for the longest of the others (each step meets as much work on them as on its own)"
                .to_owned(),
        );
    }
    if d.parallel.pipeline > 1 {
        parts.push(
            "stages that take longer than their share of the layers, as one with the output head does".to_owned(),
        );
    }
    parts
}

/// The expected error of estimates for `d`, at its load.
pub fn error_bars(d: &Deployment, profile: &Profile) -> ErrorBars {
    let distances = residual::Features::of(d).distances(profile);
    let saturated = physical(d, &profile.params).saturated;
    let [tpot, ttft] = widest_band(&distances, saturated, profile).map(|ends| ends.map(libm::exp));
    ErrorBars {
        distances,
        tpot,
        ttft,
    }
}

/// `d` as workers that compute prompts and answers alike.
pub(crate) fn aggregated(d: &Deployment) -> Deployment {
    Deployment {
        serving: Serving::Aggregated,
        ..d.clone()
    }
}

/// Estimates TTFT and TPOT of `d` from `profile`.
///
/// # Errors
/// [`Refusal::NotFinite`] if a time is zero, infinite or not a number.
pub fn predict(d: &Deployment, profile: &Profile) -> Result<Estimate, Refusal> {
    let physical = physical(d, &profile.params);
    let features = residual::Features::of(d);
    let distances = features.distances(profile);
    let [tpot, ttft] = [0, 1].map(|target| {
        let physical = [physical.tpot_ms, physical.ttft_ms][target];
        physical * libm::exp(features.residual(profile, target))
    });
    let band = widest_band(&distances, physical.saturated, profile);
    let ends = |time: f64, [low, high]: [f64; 2]| [time * libm::exp(low), time * libm::exp(high)];
    let [tpot_low_ms, tpot_high_ms] = ends(tpot, band[0]);
    let [ttft_low_ms, ttft_high_ms] = ends(ttft, band[1]);
    let times = [
        tpot,
        tpot_low_ms,
        tpot_high_ms,
        ttft,
        ttft_low_ms,
        ttft_high_ms,
    ];
    if !times.iter().all(|time| time.is_finite() && *time > 0.0) {
        return Err(Refusal::NotFinite);
    }
    Ok(Estimate {
        ttft_ms: ttft,
        ttft_low_ms,
        ttft_high_ms,
        tpot_ms: tpot,
        tpot_low_ms,
        tpot_high_ms,
        distances,
        saturated: physical.saturated,
    })
}
