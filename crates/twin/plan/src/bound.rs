//! Limits that follow from step times alone: how many requests can meet their objectives on an idle
//! cluster, and how much work there is.
//!
//! Both are optimistic: they assume that every prefix is cached, that no request waits, and that
//! batches are as large as they may be. A shape that fails them fails in a simulation too.

use slipstream_base::slo::{Shown, Slo};
use slipstream_base::width;
use slipstream_config::cluster::{EngineConfig, SpeculationConfig};
use slipstream_engine::timing::{StepLoad, StepTime};
use slipstream_report::Objectives;

use crate::demand::{Demand, Need};

/// The most that an idle cluster of a shape can reach.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ideal {
    /// Share of requests that can meet their objectives, of the class with the lowest one.
    pub share: f64,
    /// Each objective's name, with the share of requests that can meet it.
    pub by_objective: Vec<(&'static str, f64)>,
    /// Share of requests that are longer than the KV cache, or than the model's context.
    pub too_long: f64,
    /// The TTFT that the target share of requests can reach, s; longer ones are refused or late.
    pub ttft_s: f64,
}

/// Most tokens that a step gives a sequence: more than one if the engine verifies drafts.
pub fn tokens_per_step(engine: &EngineConfig) -> u32 {
    let drafted = engine
        .speculation
        .as_ref()
        .map_or(0, SpeculationConfig::tokens);
    1 + drafted
}

/// The part of a step that the largest stage of a pipeline takes; 1 without one.
pub fn largest_stage(engine: &EngineConfig) -> f64 {
    engine.pipeline.as_ref().map_or(1.0, |stages| {
        let most = stages.layers.iter().copied().max().unwrap_or(1);
        f64::from(most) / f64::from(stages.layers.iter().sum::<u32>().max(1))
    })
}

/// Latencies of a request that is alone on an idle worker, with every prefix that any request had
/// before in its cache. Each step gives it `per_step` tokens ([`tokens_per_step`]).
pub fn alone(need: &Need, timing: &mut dyn StepTime, per_step: u32) -> Shown {
    let mut prefill = StepLoad::default();
    prefill.add_prefill(need.cached, need.input - need.cached);
    let ttft = timing.step_ns(&prefill);
    let mut decode = StepLoad::default();
    decode.add_decode(need.input, need.input + need.output / 2);
    let gap = if need.output > 1 {
        timing.step_ns(&decode)
    } else {
        0
    };
    let rest = u64::from(need.output.saturating_sub(1));
    let steps = rest.div_ceil(u64::from(per_step));
    // Tokens of one step come at once: the mean gap is shorter than a step.
    let mean = (gap * steps).checked_div(rest).unwrap_or(0);
    Shown {
        ttft,
        itl: mean,
        itl_max: gap,
        tpot: mean,
        e2e: ttft + gap * steps,
    }
}

/// Highest share that an idle cluster can reach for `demand`, and the TTFT that `target` of the requests reach.
pub fn ideal(
    demand: &Demand,
    objectives: &Objectives,
    engine: &EngineConfig,
    timing: &mut dyn StepTime,
    target: f64,
) -> Ideal {
    let per_step = tokens_per_step(engine);
    let stage = largest_stage(engine);
    let classes = demand.by_class().len();
    let mut met = vec![(0u64, 0u64); classes];
    let mut each: Vec<(&'static str, u64, u64)> = Vec::new();
    let mut too_long = 0u64;
    let mut ttfts = Vec::with_capacity(demand.needs.len());
    for need in &demand.needs {
        let class = &mut met[need.class as usize];
        class.0 += 1;
        let whole = u64::from(need.input) + u64::from(need.output);
        if whole > u64::from(engine.max_model_len) {
            too_long += 1;
            ttfts.push(u64::MAX);
            continue;
        }
        let mut shown = alone(need, timing, per_step);
        if stage < 1.0 {
            // Chunks of a prompt follow each other through the stages.
            let ttft = width::round_u64(shown.ttft as f64 * stage);
            shown.e2e -= shown.ttft - ttft;
            shown.ttft = ttft;
        }
        if demand.ends_early {
            shown.e2e = shown.ttft;
        }
        ttfts.push(shown.ttft);
        class.1 += u64::from(objectives.are_met(need.class, &shown));
        for (name, held) in objectives
            .of_class(need.class)
            .into_iter()
            .flat_map(|slo| slo.each_met(&shown))
        {
            let at = each.iter().position(|(known, ..)| *known == name);
            let at = at.unwrap_or_else(|| {
                each.push((name, 0, 0));
                each.len() - 1
            });
            each[at].1 += 1;
            each[at].2 += u64::from(held);
        }
    }
    ttfts.sort_unstable();
    let rank = width::to_usize(width::floor_u64((target * ttfts.len() as f64).ceil()));
    let share = |part: u64, all: u64| part as f64 / all.max(1) as f64;
    let judged = met.iter().filter(|class| class.0 > 0);
    Ideal {
        share: judged
            .map(|&(all, met)| share(met, all))
            .fold(1.0, f64::min),
        by_objective: each
            .into_iter()
            .map(|(name, all, met)| (name, share(met, all)))
            .collect(),
        too_long: share(too_long, demand.needs.len() as u64),
        ttft_s: ttfts
            .get(rank.saturating_sub(1))
            .map_or(0.0, |&ns| ns as f64 / 1e9),
    }
}

/// GPU time of a workload, in seconds of one rank, or of one worker ([`Work::of_ranks`]).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// If each worker computes prompts and answers, in the same steps.
    pub mixed_s: f64,
    /// Of prompts alone.
    pub prefill_s: f64,
    /// Of answers alone.
    pub decode_s: f64,
}

impl Work {
    /// The same work in seconds of a worker of `ranks` ranks, each of which computes steps of its own: no division of the
    /// requests among them is better than an equal one.
    pub fn of_ranks(self, ranks: u32) -> Work {
        let ranks = f64::from(ranks.max(1));
        Work {
            mixed_s: self.mixed_s / ranks,
            prefill_s: self.prefill_s / ranks,
            decode_s: self.decode_s / ranks,
        }
    }

    /// The same work in seconds of a pipeline whose largest stage takes this `part` of a step ([`largest_stage`]): a step
    /// may begin when the one before it has left that stage.
    pub fn of_stage(self, part: f64) -> Work {
        Work {
            mixed_s: self.mixed_s * part,
            prefill_s: self.prefill_s * part,
            decode_s: self.decode_s * part,
        }
    }
}

/// The least work of `demand`: with batches of up to `seqs_max` sequences and `tokens_max` tokens per
/// step, of which no step takes longer than `gap_s` (a limit on the mean gap between tokens) for each of the
/// `per_step` tokens that it gives a sequence.
pub fn work(
    demand: &Demand,
    timing: &mut dyn StepTime,
    seqs_max: u32,
    tokens_max: u32,
    gap_s: Option<f64>,
    per_step: u32,
) -> Work {
    let gap_s = gap_s.map(|gap_s| gap_s * f64::from(per_step));
    let (mut computed, mut read, mut attention) = (0.0, 0.0, 0.0);
    let (mut prompts, mut answers, mut context, mut inputs) = (0.0, 0.0, 0.0, 0.0);
    for need in &demand.needs {
        let chunk = f64::from(need.input - need.cached);
        let cached = f64::from(need.cached);
        computed += chunk;
        read += cached + chunk;
        attention += scored(chunk, cached);
        prompts += 1.0;
        let output = f64::from(need.output.saturating_sub(1));
        // Steps, of which each gives one token unless drafts are verified.
        let steps = output / f64::from(per_step);
        answers += steps;
        context += steps * (f64::from(need.input) + output / 2.0);
        inputs += steps * f64::from(need.input);
    }
    if prompts == 0.0 {
        return Work::default();
    }
    let prefill = |tokens: f64| StepLoad {
        prefill_tokens: width::round_u64(tokens),
        prefill_sequences: width::floor_u32((prompts / computed * tokens).ceil()),
        prefill_context: width::round_u64(read / computed * tokens),
        prefill_attention: width::round_u64(attention / computed * tokens),
        ..StepLoad::default()
    };
    let budget = f64::from(tokens_max);
    let prefill_s =
        timing.step_ns(&prefill(budget.min(computed))) as f64 / 1e9 * (computed / budget).max(1.0);
    if answers == 0.0 {
        return Work {
            mixed_s: prefill_s,
            prefill_s,
            decode_s: 0.0,
        };
    }
    let decode = |sequences: f64| StepLoad {
        decode_sequences: width::floor_u32(sequences),
        decode_context: width::round_u64(context / answers * sequences),
        decode_prompt: width::round_u64(inputs / answers * sequences),
        ..StepLoad::default()
    };
    // Prompt tokens that come with each token of an answer.
    let ratio = computed / answers;
    let (mut mixed, mut apart) = (f64::INFINITY, f64::INFINITY);
    let mut sequences = 1.0;
    // Batches that grow by less than what is taken as certain, and the largest.
    let seqs_max = f64::from(seqs_max);
    while sequences <= seqs_max {
        let step = decode(sequences);
        let step_s = timing.step_ns(&step) as f64 / 1e9;
        if sequences > 1.0 && gap_s.is_some_and(|limit| step_s > limit) {
            break;
        }
        apart = apart.min(step_s / sequences);
        let tokens = ratio * sequences;
        if sequences == 1.0 || tokens + sequences <= budget {
            let both = StepLoad {
                decode_sequences: step.decode_sequences,
                decode_context: step.decode_context,
                decode_prompt: step.decode_prompt,
                ..prefill(tokens)
            };
            mixed = mixed.min(timing.step_ns(&both) as f64 / 1e9 / sequences);
        }
        sequences = if sequences < seqs_max {
            (sequences * 1.25).ceil().min(seqs_max)
        } else {
            f64::INFINITY
        };
    }
    let decode_s = apart * answers;
    Work {
        // Steps of one kind are possible in a worker of both kinds, too.
        mixed_s: (mixed * answers).min(prefill_s + decode_s),
        prefill_s,
        decode_s,
    }
}

/// Share of the work that is taken as certain: batches of a simulation may be up to a quarter larger than those that
/// [`work`] tries, or have better mixes than the mean.
const CERTAIN: f64 = 0.8;

/// Workers that `work_s` seconds of work need at least, if the `share` of it must be done within
/// `time_s` (Little's law: the mean number of busy workers is the rate of work).
pub fn workers_min(work_s: f64, time_s: f64, share: f64) -> u32 {
    if time_s <= 0.0 {
        return 1;
    }
    let least = (CERTAIN * share * work_s / time_s).ceil();
    width::floor_u32(least).max(1)
}

/// The share of the work that has to be done in time if `target` of the requests meet their objectives. Step times rise with what
/// [`work`] counts, so the work has at least the share of whichever count is the most unequal: attention's in long prompts.
pub fn share_in_time(demand: &Demand, target: f64) -> f64 {
    let chunk = |need: &Need| f64::from(need.input - need.cached);
    let gaps = |need: &Need| f64::from(need.output.saturating_sub(1));
    let share = |count: &dyn Fn(&Need) -> f64| {
        let mut all: Vec<f64> = demand.needs.iter().map(count).collect();
        all.sort_unstable_by(f64::total_cmp);
        let in_time = width::to_usize(width::floor_u64(target * all.len() as f64));
        let (part, whole): (f64, f64) = (all[..in_time].iter().sum(), all.iter().sum());
        if whole == 0.0 { 1.0 } else { part / whole }
    };
    [
        share(&chunk),
        share(&|need| f64::from(need.input)),
        share(&|need| scored(chunk(need), f64::from(need.cached))),
        share(&gaps),
        share(&|need| gaps(need) * f64::from(need.input)),
        share(&|need| gaps(need) * (f64::from(need.input) + gaps(need) / 2.0)),
    ]
    .into_iter()
    .fold(1.0, f64::min)
}

/// Pairs of tokens that attention scores for a `chunk` of a prompt after `cached` tokens.
fn scored(chunk: f64, cached: f64) -> f64 {
    chunk * cached + chunk * (chunk + 1.0) / 2.0
}

/// The time in which requests that meet their objectives are done: from the first due time to the
/// latest end that the objectives allow. Infinite if they allow any, for closed loops and sessions, which wait, and for
/// answers that may be shorter, whose work is not known.
pub fn time_s(demand: &Demand, objectives: &Objectives) -> f64 {
    let end = |need: &Need| {
        let latest = latest_ns(objectives.of_class(need.class)?, need.output)?;
        Some(need.due.0.saturating_add(latest))
    };
    let ends: Option<Vec<u64>> = demand.needs.iter().map(end).collect();
    match ends {
        Some(ends) if !(demand.closed || demand.follows || demand.ends_early) => {
            let first = demand.needs.iter().map(|need| need.due.0).min();
            let last = ends.into_iter().max();
            last.zip(first)
                .map_or(0.0, |(last, first)| (last - first) as f64 / 1e9)
        }
        _ => f64::INFINITY,
    }
}

/// The latest end of a request of `output` tokens that meets `slo`, ns after its due time; `None`: there is none. Gaps
/// between events are no shorter than between tokens.
fn latest_ns(slo: &Slo, output: u32) -> Option<u64> {
    let gaps = u64::from(output.saturating_sub(1));
    let gap = ["itl", "itl_max", "tpot"]
        .into_iter()
        .filter_map(|name| slo.limit_ns(name))
        .min();
    let rest = match gap {
        Some(gap) => Some(gap.saturating_mul(gaps)),
        None => (gaps == 0).then_some(0),
    };
    let by_parts = slo
        .limit_ns("ttft")
        .zip(rest)
        .map(|(ttft, rest)| ttft.saturating_add(rest));
    let whole = slo.limit_ns("e2e");
    [by_parts, whole].into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use slipstream_base::SimTime;
    use slipstream_config::cluster::PipelineConfig;
    use slipstream_engine::timing::Constant;

    fn demand(count: u64, input: u32, output: u32) -> Demand {
        Demand {
            needs: (0..count)
                .map(|n| Need {
                    due: SimTime(n * 1_000_000_000),
                    input,
                    cached: 0,
                    repeated: 0,
                    output,
                    class: 0,
                })
                .collect(),
            ..Demand::default()
        }
    }

    #[test]
    fn constant_steps_have_known_bounds() {
        let mut timing = Constant {
            step_ns: 10_000_000,
        };
        let objectives =
            |text: &str| Objectives::from(text.parse::<slipstream_base::Slo>().unwrap());
        let engine = EngineConfig::default();
        let all = demand(101, 1000, 11);
        let check =
            |slo: &str, timing: &mut Constant| ideal(&all, &objectives(slo), &engine, timing, 0.99);
        let met = check("ttft=10ms,tpot=10ms,e2e=110ms", &mut timing);
        assert_eq!((met.share, met.too_long, met.ttft_s), (1.0, 0.0, 0.01));
        let late = check("ttft=9ms,tpot=10ms", &mut timing);
        assert_eq!(late.share, 0.0);
        assert_eq!(late.by_objective, [("ttft", 0.0), ("tpot", 1.0)]);
        assert_eq!(check("e2e=109ms", &mut timing).share, 0.0);
        let short = EngineConfig {
            max_model_len: 1010,
            ..EngineConfig::default()
        };
        let refused = ideal(&all, &objectives("e2e=1h"), &short, &mut timing, 0.99);
        assert_eq!((refused.share, refused.too_long), (0.0, 1.0));

        // 101 answers of 10 further tokens, 64 sequences per step of 10 ms, and 1000 prompt tokens
        // with each answer: 100 tokens of prompt per token, so that 64 do not fit 2,000 tokens.
        let w = work(&all, &mut timing, 64, 2000, None, 1);
        assert!((w.decode_s - 1010.0 / 64.0 * 0.01).abs() < 1e-9, "{w:?}");
        assert!(
            (w.prefill_s - 101_000.0 / 2000.0 * 0.01).abs() < 1e-9,
            "{w:?}"
        );
        // 19 sequences with 1,900 prompt tokens fit.
        assert!((w.mixed_s - 1010.0 / 19.0 * 0.01).abs() < 1e-9, "{w:?}");
        // Nothing but single sequences is within 5 ms.
        let slow = work(&all, &mut timing, 64, 2000, Some(0.005), 1);
        assert!((slow.decode_s - 10.1).abs() < 1e-9, "{slow:?}");
        // From the first due time to the latest end of the last.
        let time = |slo: &str| time_s(&all, &objectives(slo));
        assert_eq!(time("ttft=5s,itl=20ms"), 105.2);
        assert_eq!(time("ttft=5s,tpot=20ms,itl=30ms"), 105.2);
        assert_eq!(time("ttft=5s,itl=20ms,e2e=3s"), 103.0);
        // A request that may begin at any time, or take any time between tokens, may end at any time.
        assert_eq!(time("itl=20ms"), f64::INFINITY);
        assert_eq!(time("ttft=5s"), f64::INFINITY);
        let mut one = demand(2, 1000, 1);
        assert_eq!(time_s(&one, &objectives("ttft=5s")), 6.0);
        one.closed = true;
        assert_eq!(time_s(&one, &objectives("ttft=5s")), f64::INFINITY);
        // The next turn of a session comes after its answer, and an answer may end early.
        for change in [
            |d: &mut Demand| d.follows = true,
            |d: &mut Demand| d.ends_early = true,
        ] {
            let mut open = demand(2, 1000, 1);
            change(&mut open);
            assert_eq!(time_s(&open, &objectives("ttft=5s")), f64::INFINITY);
        }
        let mut short = demand(2, 1000, 11);
        assert_eq!(
            ideal(&short, &objectives("e2e=50ms"), &engine, &mut timing, 0.99).share,
            0.0
        );
        short.ends_early = true;
        assert_eq!(
            ideal(&short, &objectives("e2e=50ms"), &engine, &mut timing, 0.99).share,
            1.0
        );
        // Nine short answers, and one as long as they are together; it reads more of its own.
        let mut skewed = demand(10, 1000, 11);
        skewed.needs[3].output = 91;
        assert_eq!(share_in_time(&skewed, 1.0), 1.0);
        let (nine, one) = (90.0 * 1005.0, 90.0 * 1045.0);
        assert_eq!(share_in_time(&skewed, 0.9), nine / (nine + one));
        // Of ten further tokens four come at a time: three steps, and a quarter of the work.
        assert_eq!(alone(&all.needs[0], &mut timing, 4).e2e, 40_000_000);
        // Their mean gap is shorter than a step.
        let drafted = alone(&all.needs[0], &mut timing, 4);
        assert_eq!((drafted.itl, drafted.itl_max), (3_000_000, 10_000_000));
        let drafted = work(&all, &mut timing, 64, 2000, None, 4);
        assert!(
            (drafted.decode_s - 252.5 / 64.0 * 0.01).abs() < 1e-9,
            "{drafted:?}"
        );
        let four = w.of_ranks(4);
        assert!(
            (four.decode_s - 1010.0 / 64.0 * 0.01 / 4.0).abs() < 1e-9,
            "{four:?}"
        );
        assert_eq!(w.of_ranks(1), w);

        // Three and five layers: a token takes a whole step, and a step begins when the one before it has left the five.
        let stages = EngineConfig {
            pipeline: Some(PipelineConfig {
                layers: vec![3, 5],
                send_ns_per_token: 0.0,
                latency_ns: 0.0,
            }),
            ..EngineConfig::default()
        };
        let part = largest_stage(&stages);
        assert_eq!(
            (part, w.of_stage(part).prefill_s),
            (0.625, w.prefill_s * 0.625)
        );
        let through = |slo: &str, timing: &mut Constant| {
            ideal(&all, &objectives(slo), &stages, timing, 0.99).share
        };
        assert_eq!(through("ttft=7ms,tpot=10ms,e2e=107ms", &mut timing), 1.0);
        assert_eq!(through("tpot=9ms", &mut timing), 0.0);
        assert_eq!(through("ttft=6ms", &mut timing), 0.0);
    }

    proptest! {
        /// The requests that take the least time have at least this share, whatever tokens, attention and context take.
        #[test]
        fn no_requests_in_time_have_less_of_the_work(
            needs in prop::collection::vec((1u32..20_000, 0u32..20_000, 1u32..3000), 1..40),
            [token, read, score, step, context] in prop::array::uniform5(prop_oneof![Just(0.0), 1e-6..1.0]),
            target in prop::sample::select(vec![0.5, 0.9, 0.95, 0.99, 1.0]),
        ) {
            let mut demand = demand(needs.len() as u64, 1, 1);
            for (need, (input, cached, output)) in demand.needs.iter_mut().zip(needs) {
                (need.input, need.cached, need.output) = (input, cached % input, output);
            }
            let mut each: Vec<f64> = demand
                .needs
                .iter()
                .map(|need| {
                    let (input, cached) = (f64::from(need.input), f64::from(need.cached));
                    let (chunk, gaps) = (input - cached, f64::from(need.output - 1));
                    // The position of each token of the prompt, and of the answer.
                    let pairs: f64 = (need.cached..need.input).map(|at| f64::from(at + 1)).sum();
                    token * chunk + read * input + score * pairs + step * gaps + context * gaps * (input + gaps / 2.0)
                })
                .collect();
            each.sort_by(f64::total_cmp);
            let in_time = each.len() - width::to_usize(crate::trial::allowed(each.len() as u64, target));
            let (least, all): (f64, f64) = (each[..in_time].iter().sum(), each.iter().sum());
            prop_assert!(least >= share_in_time(&demand, target) * all * (1.0 - 1e-9));
        }
    }

    #[test]
    fn workers_follow_from_work_and_time() {
        assert_eq!(workers_min(1000.0, 100.0, 1.0), 8);
        assert_eq!(workers_min(1000.0, f64::INFINITY, 1.0), 1);
        assert_eq!(workers_min(0.0, 100.0, 1.0), 1);
        assert_eq!(workers_min(10.0, 0.0, 1.0), 1);
    }
}
