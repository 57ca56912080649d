//! Compares the search with exhaustive enumeration, on candidates of known capacity.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;

/// Candidates of known capacity: `workers` attain if their capacities add up to the load.
struct CapacityModel {
    /// Requests per second of one worker. Shape `[shapes][settings]`.
    capacity: Vec<Vec<f64>>,
    /// Factor on it on parts, whose caches are cold. Shape `[shapes]`, or empty.
    cold: Vec<f64>,
    /// Sizes whose shares on the whole workload do not follow from their capacity.
    chances: Vec<Chance>,
    /// The first setting that gives the same cluster, of a setting and workers.
    same: fn(usize, u32) -> usize,
    load: f64,
    /// Requests that are simulated for the whole workload, and those that are judged.
    requests: u64,
    judged: u64,
    parts: Vec<f64>,
    runs: Vec<Trial>,
}

/// Shares of a size on the whole workload. A run is stopped at the misses that it may have.
#[derive(Clone)]
struct Chance {
    shape: usize,
    /// `None`: every setting.
    setting: Option<usize>,
    workers: u32,
    /// By seed; the last one is that of all further seeds.
    shares: Vec<f64>,
    /// The misses come first, so that the share of a stopped run is far too low.
    burst: bool,
}

const TARGET: f64 = 0.99;

impl CapacityModel {
    /// Candidates of these capacities under a load of 8.5 requests per second.
    fn new(capacity: Vec<Vec<f64>>) -> CapacityModel {
        CapacityModel {
            capacity,
            cold: Vec::new(),
            chances: Vec::new(),
            same: |setting, _| setting,
            load: 8.5,
            requests: 16_000,
            judged: 1_000_000,
            parts: vec![1.0 / 16.0, 0.25, 1.0],
            runs: Vec::new(),
        }
    }

    /// The share of a trial that ran to its end or was stopped, and whether it ran to its end.
    fn share(&self, of: &Trial) -> (f64, bool) {
        let is_part = of.part + 1 < self.parts.len();
        let chance = self.chances.iter().find(|each| {
            (each.shape, each.workers) == (of.shape, of.workers)
                && each.setting.is_none_or(|setting| setting == of.setting)
        });
        if let Some(chance) = chance.filter(|_| !is_part) {
            let seed = width::to_usize(of.conditions.seed).min(chance.shares.len() - 1);
            let share = chance.shares[seed];
            let misses = self.judged - width::floor_u64(self.judged as f64 * share + 1e-3);
            let complete = misses <= allowed(self.judged.saturating_mul(of.spare), TARGET);
            return match (complete, chance.burst) {
                (false, true) => (0.67, false),
                _ => (share, complete),
            };
        }
        let cold = self.cold.get(of.shape).filter(|_| is_part).unwrap_or(&1.0);
        let capacity = self.capacity[of.shape][of.setting] * f64::from(of.workers) * cold;
        let enough = capacity / (self.load * of.conditions.load * of.conditions.slower);
        (TARGET * enough.min(1.0), true)
    }
}

impl Evaluate for CapacityModel {
    type Error = std::convert::Infallible;

    fn same(&self, _: usize, setting: usize, workers: u32) -> usize {
        (self.same)(setting, workers)
    }

    fn run(&mut self, trials: &[Trial], _: &Progress) -> Result<Vec<TrialResult>, Self::Error> {
        self.runs.extend(trials);
        let measure = |t: &Trial| {
            let (share, complete) = self.share(t);
            // A run that was stopped has one miss more than it may have.
            let allowed = allowed(self.judged.saturating_mul(t.spare), TARGET);
            let judged = if complete {
                self.judged
            } else {
                width::floor_u64((allowed + 1) as f64 / (1.0 - share))
            };
            let met = width::floor_u64(judged as f64 * share + 1e-3);
            TrialResult {
                attains: complete && share >= TARGET,
                complete,
                by_class: vec![(judged, met)],
                share,
                judged,
                digest: mix64(share.to_bits() ^ u64::from(t.workers)) ^ t.setting as u64,
                requests: (self.parts[t.part] * self.requests as f64) as u64,
            }
        };
        Ok(trials.iter().map(measure).collect())
    }
}

/// Shares of a size of the first shape, by seed.
fn chance(workers: u32, shares: &[f64]) -> Chance {
    Chance {
        shape: 0,
        setting: None,
        workers,
        shares: shares.to_vec(),
        burst: false,
    }
}

fn candidates(costs: &[f64], settings: usize) -> Vec<Candidate> {
    let of = |(at, &cost): (usize, &f64)| Candidate {
        cost,
        workers_least: 1,
        workers_min: 1,
        workers_max: 2000,
        settings,
        places: (0..settings).map(|at| [at, 0, 0, 0]).collect(),
        kind: at % 2,
        apart: false,
        hosts_kv: false,
    };
    costs.iter().enumerate().map(of).collect()
}

/// The lowest cost over every candidate and size.
fn exhaustive(known: &CapacityModel, shapes: &[Candidate], load: f64) -> f64 {
    let mut least = f64::INFINITY;
    for (shape, of) in shapes.iter().enumerate() {
        for capacity in &known.capacity[shape] {
            let workers = (1..=of.workers_max)
                .find(|&n| capacity * f64::from(n) / (known.load * load) >= 1.0);
            least = workers.map_or(least, |n| least.min(of.cost_of(n)));
        }
    }
    least
}

/// Checks the search against every combination. `shapes`: cost and capacity of a worker of each;
/// `factors`: on the capacity, of each setting; `cold`: of each shape on parts.
fn is_the_cheapest(
    shapes: &[(u32, f64)],
    factors: &[f64],
    load: f64,
    cold: &[f64],
) -> Result<(), TestCaseError> {
    let costs: Vec<f64> = shapes.iter().map(|shape| f64::from(shape.0)).collect();
    let space = candidates(&costs, factors.len());
    let capacity = shapes
        .iter()
        .enumerate()
        // Settings differ in what they are worth to each shape.
        .map(|(at, shape)| {
            let n = factors.len();
            (0..n).map(|s| shape.1 * factors[(s + at) % n]).collect()
        })
        .collect();
    let parts = vec![1.0 / 16.0, 0.25, 1.0];
    let mut known = CapacityModel {
        cold: cold.to_vec(),
        load,
        parts: parts.clone(),
        ..CapacityModel::new(capacity)
    };
    let find = |known: &mut CapacityModel, load: f64, others: &[Choice]| {
        let plain = Conditions {
            load,
            ..Conditions::PLAIN
        };
        let mut search = Search::new(&space, TARGET, &parts, 2, plain, 1, known);
        search.find(others).unwrap()
    };
    let best = find(&mut known, 1.0, &[]).unwrap();
    let least = exhaustive(&known, &space, 1.0);
    prop_assert!(
        (best.cost - least).abs() < 1e-9,
        "{:?}, but {}",
        best,
        least
    );
    // The same trials again, in the same order.
    let runs = std::mem::take(&mut known.runs);
    let again = find(&mut known, 1.0, &[]).unwrap();
    prop_assert_eq!(again, best);
    prop_assert_eq!(&known.runs, &runs);
    // A higher load is never cheaper.
    let more = find(&mut known, 2.0, &[]).unwrap();
    prop_assert!(more.cost >= best.cost);
    // An answer to a question that differs a little changes nothing but the way.
    for (load, near, cost) in [(1.0, more, best.cost), (2.0, best, more.cost)] {
        let again = find(&mut known, load, &[near]).unwrap();
        prop_assert!((again.cost - cost).abs() < 1e-9, "{again:?}, but {cost}");
    }
    Ok(())
}

#[test]
fn one_worker_of_a_better_setting_is_found() {
    // Two workers of the last shape cost more than 1.5 times two of the others; with its second
    // setting one is enough.
    let shapes = [
        (9, 0.5),
        (9, 3.333_567_522_326_223),
        (9, 0.5),
        (14, 4.750_883_507_357_231),
    ];
    let factors = [0.8, 1.073_760_463_239_000_3, 0.8, 0.8];
    is_the_cheapest(&shapes, &factors, 4.794_902_976_332_167, &[]).unwrap();
}

proptest! {
    #[test]
    fn the_answer_is_that_of_every_combination(
        shapes in prop::collection::vec((1u32..40, 0.5f64..8.0), 1..8),
        factors in prop::collection::vec(0.8f64..1.2, 1..9),
        load in 1.0f64..300.0,
    ) {
        is_the_cheapest(&shapes, &factors, load, &[])?;
    }

    #[test]
    fn the_answer_does_not_depend_on_cold_parts(
        shapes in prop::collection::vec((1u32..40, 0.5f64..8.0), 1..8),
        cold in prop::collection::vec(0.02f64..1.0, 8),
        load in 1.0f64..300.0,
    ) {
        is_the_cheapest(&shapes, &[1.0], load, &cold)?;
    }

    #[test]
    fn sizes_are_the_smallest_that_attain(need in 1u32..500, min in 1u32..20, start in 1u32..600, near: bool) {
        let mut sizing = Sizing::new(min, 500, start, near, TARGET);
        let mut trials = 0;
        while let Some(workers) = sizing.next {
            prop_assert!((min..=500).contains(&workers));
            let share = TARGET * f64::from(workers) / f64::from(need);
            sizing.take(workers, &TrialResult { attains: workers >= need, complete: true, by_class: Vec::new(), share: share.min(1.0), judged: 1, digest: 0, requests: 1 });
            trials += 1;
            prop_assert!(trials <= 30);
        }
        prop_assert_eq!(sizing.attains, Some(need.max(min)));
    }
}

/// The answer with the base settings of `capacity`: shape, setting and size.
fn found(costs: &[f64], workers_max: u32, mut known: CapacityModel) -> Option<(usize, usize, u32)> {
    let mut space = candidates(costs, known.capacity[0].len());
    for shape in &mut space {
        shape.workers_max = workers_max;
    }
    let parts = known.parts.clone();
    let main = parts.len() - 1;
    let mut search = Search::new(
        &space,
        TARGET,
        &parts,
        main,
        Conditions::PLAIN,
        1,
        &mut known,
    );
    let best = search.find(&[]).unwrap()?;
    Some((best.shape, best.setting, best.workers))
}

/// The second shape lives on its cache, and fails utterly without.
#[test]
fn parts_exclude_nothing() {
    let known = CapacityModel {
        cold: vec![0.9, 0.05],
        ..CapacityModel::new(vec![vec![4.0], vec![9.0]])
    };
    assert_eq!(found(&[2.0, 5.0], 2000, known), Some((1, 0, 1)));
}

/// Only a split that is not tried in all combinations attains, two prefill workers from the balance. There is no answer without.
#[test]
fn splits_further_from_the_balance_are_found() {
    for (first, answer) in [(3.0, (1, 3, 2)), (0.1, (1, 3, 2))] {
        let mut space = candidates(&[9.0, 4.0], 4);
        space[0].workers_max = 5;
        space[1].workers_max = 2;
        for shape in &mut space {
            shape.settings = 1;
            shape.places = [3, 2, 4, 5].map(|split| [0, 0, 0, split]).to_vec();
        }
        let parts = vec![1.0 / 16.0, 0.25, 1.0];
        let mut known = CapacityModel {
            parts: parts.clone(),
            ..CapacityModel::new(vec![vec![first; 4], vec![1.0, 0.9, 2.0, 5.0]])
        };
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        assert_eq!((best.shape, best.setting, best.workers), answer, "{first}");
    }
}

#[test]
fn settings_that_give_one_cluster_run_once() {
    let mut known = CapacityModel {
        same: |setting, _| setting.min(2),
        ..CapacityModel::new(vec![vec![4.0, 4.1, 4.2, 4.2, 4.2], vec![9.0; 5]])
    };
    let space = candidates(&[2.0, 5.0], 5);
    let parts = known.parts.clone();
    let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
    let best = search.find(&[]).unwrap().unwrap();
    assert_eq!((best.shape, best.workers), (1, 1));
    let mut keys: Vec<_> = known
        .runs
        .iter()
        .map(|t| {
            (
                t.shape,
                t.setting.min(2),
                t.workers,
                t.part,
                t.conditions.key(),
            )
        })
        .collect();
    let runs = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), runs, "{:?}", known.runs);
}

/// No setting attains on a part at any size; many do on the whole workload.
#[test]
fn a_part_on_which_nothing_attains_takes_few_runs() {
    let mut known = CapacityModel {
        cold: vec![1e-4, 1e-4],
        ..CapacityModel::new(vec![vec![4.0; 40], vec![3.0; 40]])
    };
    let space = candidates(&[2.0, 2.0], 40);
    let parts = known.parts.clone();
    let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
    let best = search.find(&[]).unwrap().unwrap();
    assert_eq!((best.shape, best.workers), (0, 3));
    let on_parts = known.runs.iter().filter(|trial| trial.part < 2).count();
    assert!(on_parts < 300, "{on_parts}");
}

/// With the base, no size of the second shape up to the limit attains.
#[test]
fn a_shape_that_needs_another_setting_at_any_size_is_found() {
    let known = CapacityModel::new(vec![vec![9.0, 9.0], vec![1.0, 5.0]]);
    assert_eq!(found(&[10.0, 2.0], 3, known), Some((1, 1, 2)));
}

/// Nine workers attain and ten do not, as where requests are routed by chance.
#[test]
fn fewer_workers_are_tried_where_one_more_misses_by_chance() {
    let mut known = CapacityModel {
        chances: vec![chance(10, &[TARGET * 0.999])],
        parts: vec![1.0],
        ..CapacityModel::new(vec![vec![1.0]])
    };
    let mut space = candidates(&[1.0], 1);
    space[0].workers_min = 5;
    let whole = [1.0];
    let mut search = Search::new(&space, TARGET, &whole, 0, Conditions::PLAIN, 1, &mut known);
    let at_11 = Choice {
        shape: 0,
        setting: 0,
        workers: 11,
        cost: 11.0,
        share: TARGET,
    };
    search
        .run(&[search.trial(0, 0, 10), search.trial(0, 0, 11)])
        .unwrap();
    let best = search.fewer(Some(at_11), search.last_stage()).unwrap();
    let best = best.unwrap();
    assert_eq!(best.workers, 9);
}

/// The first seed misses in a burst at nine workers, so that its run is stopped there with a low share. All three seeds
/// together attain.
#[test]
fn a_size_is_not_given_up_for_a_burst_of_the_first_seed() {
    let mut known = CapacityModel {
        chances: vec![Chance {
            burst: true,
            ..chance(9, &[0.985, 0.999])
        }],
        ..CapacityModel::new(vec![vec![1.0]])
    };
    let space = candidates(&[1.0], 1);
    let parts = known.parts.clone();
    let main = parts.len() - 1;
    let mut search = Search::new(
        &space,
        TARGET,
        &parts,
        main,
        Conditions::PLAIN,
        3,
        &mut known,
    );
    search
        .run(&[search.trial(0, 0, 9), search.trial(0, 0, 10)])
        .unwrap();
    let at_10 = Choice {
        shape: 0,
        setting: 0,
        workers: 10,
        cost: 10.0,
        share: TARGET,
    };
    let stage = search.last_stage();
    let best = search.confirm(at_10, stage).unwrap().unwrap();
    assert_eq!(best.workers, 9);
}

/// The first seed misses in a burst at nine workers; all three seeds together attain.
#[test]
fn fewer_workers_are_tried_beyond_a_burst_of_the_first_seed() {
    let mut known = CapacityModel {
        chances: vec![Chance {
            burst: true,
            ..chance(9, &[0.986, 0.999])
        }],
        ..CapacityModel::new(vec![vec![1.0]])
    };
    assert_eq!(fewer_than_ten(&mut known, 1).workers, 9);
}

/// Of 60 requests none may miss, and a run is stopped at its first miss. With one miss, ten workers miss by chance; with two they do not.
#[test]
fn fewer_workers_are_tried_where_one_more_has_a_single_miss() {
    for (misses, workers) in [(1.0, 9), (2.0, 11)] {
        let mut known = CapacityModel {
            chances: vec![Chance {
                burst: true,
                ..chance(10, &[1.0 - misses / 60.0])
            }],
            judged: 60,
            ..CapacityModel::new(vec![vec![1.0]])
        };
        let space = candidates(&[1.0], 1);
        let parts = known.parts.clone();
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        search
            .run(&[search.trial(0, 0, 10), search.trial(0, 0, 11)])
            .unwrap();
        let at_11 = Choice {
            shape: 0,
            setting: 0,
            workers: 11,
            cost: 11.0,
            share: TARGET,
        };
        let stage = search.last_stage();
        let best = search.fewer(Some(at_11), stage).unwrap().unwrap();
        assert_eq!(best.workers, workers);
    }
}

/// The size found by [`Search::fewer`] with three seeds, from ten workers of the first setting, after ten workers of every setting
/// ran.
fn fewer_than_ten(known: &mut CapacityModel, settings: usize) -> Choice {
    let space = candidates(&[1.0], settings);
    let parts = known.parts.clone();
    let main = parts.len() - 1;
    let mut search = Search::new(&space, TARGET, &parts, main, Conditions::PLAIN, 3, known);
    let at_ten: Vec<Trial> = (0..settings)
        .map(|setting| search.trial(0, setting, 10))
        .collect();
    search.run(&at_ten).unwrap();
    let of_ten = Choice {
        shape: 0,
        setting: 0,
        workers: 10,
        cost: 10.0,
        share: TARGET,
    };
    let stage = search.last_stage();
    search.fewer(Some(of_ten), stage).unwrap().unwrap()
}

proptest! {
    /// At ten workers some settings give one cluster; at nine each gives its own, as splits do that round to the same workers.
    #[test]
    fn fewer_workers_are_tried_with_every_setting_of_a_cluster(
        same in prop::sample::select(vec![
            (|setting, workers| if workers == 10 { 0 } else { setting }) as fn(usize, u32) -> usize,
            |setting, workers| if workers == 10 { setting & !1 } else { setting },
            |setting, workers| if workers == 10 { setting.min(1) } else { setting },
            |setting, _| setting,
        ]),
        attains in prop::collection::vec(any::<bool>(), 4),
    ) {
        let chances = attains.iter().enumerate().map(|(setting, &attains)| Chance {
            setting: Some(setting),
            ..chance(9, &[if attains { 0.995 } else { 0.97 }])
        });
        let mut known = CapacityModel {
            same,
            chances: chances.collect(),
            ..CapacityModel::new(vec![vec![0.85; 4]])
        };
        let workers = if attains.contains(&true) { 9 } else { 10 };
        prop_assert_eq!(fewer_than_ten(&mut known, 4).workers, workers);
    }

    /// Shares of splits fall on both sides of the best one. They are those of three seeds together; the first seed has better or worse
    /// luck than the others, or its misses at its beginning.
    #[test]
    fn the_best_split_over_all_seeds_is_found(
        best in 0usize..7,
        luck in prop::collection::vec(-0.004f64..0.004, 7),
        burst in prop::collection::vec(any::<bool>(), 7),
    ) {
        let mut space = candidates(&[1.0], 7);
        space[0].settings = 1;
        // The first is the balance, and three lie on each side of it.
        let splits = [3, 0, 1, 2, 4, 5, 6];
        space[0].places = splits.map(|split| [0, 0, 0, split]).to_vec();
        let chances = splits.iter().enumerate().map(|(setting, split)| {
            let share = 0.9925 - 0.003 * splits[best].abs_diff(*split) as f64;
            Chance {
                setting: Some(setting),
                burst: burst[setting],
                ..chance(9, &[share + luck[setting], share - luck[setting] / 2.0])
            }
        });
        let mut known = CapacityModel {
            chances: chances.collect(),
            ..CapacityModel::new(vec![vec![0.85; 7]])
        };
        let parts = known.parts.clone();
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 3, &mut known);
        let found = search.find(&[]).unwrap().unwrap();
        prop_assert_eq!((found.setting, found.workers), (best, 9), "{:?}", found);
    }
}

/// Four settings of two values on each of two axes. Runs end at the misses that they may have, and up to there a value of the first
/// axis has no effect unless the second one changes, too.
struct StoppedRuns;

impl Evaluate for StoppedRuns {
    type Error = std::convert::Infallible;

    fn run(&mut self, trials: &[Trial], _: &Progress) -> Result<Vec<TrialResult>, Self::Error> {
        let measure = |of: &Trial| {
            let share = match of.workers {
                0..3 => 0.5,
                3 => [0.92, 0.92, 0.96, 0.995][of.setting],
                _ => 1.0,
            };
            let complete = share >= TARGET;
            TrialResult {
                attains: complete,
                complete,
                by_class: vec![(1_000_000, width::floor_u64(1e6 * share))],
                share,
                judged: 100,
                digest: if complete {
                    of.setting as u64
                } else {
                    share.to_bits()
                },
                requests: 100,
            }
        };
        Ok(trials.iter().map(measure).collect())
    }
}

#[test]
fn a_value_that_had_no_effect_until_a_run_was_stopped_is_combined_with_others() {
    let mut space = candidates(&[1.0], 4);
    space[0].places = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]].to_vec();
    let parts = [1.0 / 16.0, 1.0];
    let mut runs = StoppedRuns;
    let mut search = Search::new(&space, TARGET, &parts, 1, Conditions::PLAIN, 1, &mut runs);
    let best = search.find(&[]).unwrap().unwrap();
    assert_eq!((best.setting, best.workers), (3, 3));
}

/// With the base, the first shape needs four workers and is promising beside the third, until the second one is found to need one
/// worker with its second setting. So does the first, which is cheaper.
#[test]
fn shapes_that_a_better_setting_of_another_one_leaves_behind_are_tried() {
    let known = CapacityModel::new(vec![vec![2.2, 9.0], vec![1.1, 9.0], vec![2.9, 2.9]]);
    assert_eq!(found(&[5.0, 9.5, 6.0], 4, known), Some((0, 1, 1)));
}

/// The base setting of the second shape needs two workers, which cost far more than the first shape; its second
/// setting needs one.
#[test]
fn a_setting_that_saves_one_worker_of_two_is_found() {
    let mut space = candidates(&[25.0, 19.0], 2);
    space[1].kind = space[0].kind;
    let parts = vec![1.0 / 16.0, 0.25, 1.0];
    let mut known = CapacityModel {
        load: 6.7,
        requests: 16_000,
        parts: parts.clone(),
        ..CapacityModel::new(vec![vec![8.0, 8.0], vec![5.7, 7.4]])
    };
    let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
    let best = search.find(&[]).unwrap().unwrap();
    assert_eq!((best.shape, best.setting, best.workers), (1, 1, 1));
}

/// Capacity tells the headroom; a split shape comes first, and has the most.
#[test]
fn of_equal_cost_the_simpler_and_then_the_one_with_more_headroom_is_chosen() {
    let answer = |capacity: [f64; 4], apart: [bool; 4]| {
        let mut space = candidates(&[2.0, 1.0, 2.0, 2.0], 1);
        for (shape, apart) in space.iter_mut().zip(apart) {
            shape.apart = apart;
            shape.workers_min = if apart { 2 } else { 1 };
        }
        let parts = vec![0.25, 1.0];
        let mut known = CapacityModel {
            load: 16.0,
            requests: 1000,
            parts: parts.clone(),
            ..CapacityModel::new(capacity.iter().map(|&each| vec![each]).collect())
        };
        let mut search = Search::new(&space, TARGET, &parts, 1, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        (best.shape, best.workers, best.cost)
    };
    // 2 workers for 4.0 each, except the second, which takes 4.
    let split_first = [true, false, false, false];
    assert_eq!(answer([20.0, 4.1, 8.5, 11.0], split_first), (3, 2, 4.0));
    assert_eq!(answer([20.0, 6.1, 8.5, 8.6], split_first), (1, 3, 3.0));
    assert_eq!(answer([20.0, 5.2, 8.5, 8.6], split_first), (1, 4, 4.0));
    // Nothing is simpler.
    assert_eq!(answer([9.0, 4.1, 11.0, 8.6], [true; 4]), (2, 2, 4.0));
}

/// A changed condition keeps the shape and setting of the first answer, unless another is cheaper.
#[test]
fn of_equal_cost_the_preferred_one_stays() {
    let space = candidates(&[2.0, 1.0, 2.0], 2);
    let answer = |capacity: [[f64; 2]; 3], preferred: (usize, usize)| {
        let parts = vec![0.25, 1.0];
        let mut known = CapacityModel {
            load: 16.0,
            requests: 1000,
            parts: parts.clone(),
            ..CapacityModel::new(capacity.iter().map(|each| each.to_vec()).collect())
        };
        let mut search = Search::new(&space, TARGET, &parts, 1, Conditions::PLAIN, 3, &mut known)
            .preferring(preferred.0, preferred.1);
        let best = search.find(&[]).unwrap().unwrap();
        (best.shape, best.setting, best.workers, best.cost)
    };
    // 4.0 each: 2 workers, 4 workers, 2 workers.
    let equal = [[11.0, 8.5], [5.2, 4.1], [9.0, 8.1]];
    for shape in 0..3 {
        for setting in 0..2 {
            let workers = if shape == 1 { 4 } else { 2 };
            assert_eq!(
                answer(equal, (shape, setting)),
                (shape, setting, workers, 4.0)
            );
        }
    }
    // Another is cheaper, or the preferred setting does not attain.
    let cheaper = [[11.0, 8.5], [6.1, 4.1], [9.0, 8.1]];
    assert_eq!(answer(cheaper, (0, 1)), (1, 0, 3, 3.0));
    let weak = [[11.0, 7.9], [4.1, 3.0], [9.0, 8.1]];
    assert_eq!(answer(weak, (0, 1)), (0, 0, 2, 4.0));
}

#[test]
fn what_no_size_attains_ends_soon() {
    let mut sizing = Sizing::new(1, 100_000, 1, false, TARGET);
    let mut trials = 0;
    while let Some(workers) = sizing.next {
        let share = 0.9 - 0.5 / f64::from(workers);
        sizing.take(
            workers,
            &TrialResult {
                attains: false,
                complete: true,
                by_class: Vec::new(),
                share,
                judged: 1,
                digest: 0,
                requests: 1,
            },
        );
        trials += 1;
    }
    assert_eq!(sizing.attains, None);
    assert!(trials < 16, "{trials}");
    assert_eq!(Sizing::new(5, 4, 5, false, TARGET).next, None);
}

#[test]
fn a_large_space_takes_a_twentieth_of_its_grid() {
    let costs = [8.0, 4.0, 16.0, 2.0, 3.0, 6.0];
    let space = candidates(&costs, 27);
    let capacity = (0..6u32)
        .map(|shape| {
            (0..27u32)
                .map(|s| costs[shape as usize] * (0.9 + f64::from((s * 7 + shape) % 27) / 100.0))
                .collect()
        })
        .collect();
    let parts = vec![1.0 / 16.0, 0.25, 1.0];
    let mut known = CapacityModel {
        load: 200.0,
        requests: 10_000,
        parts: parts.clone(),
        ..CapacityModel::new(capacity)
    };
    let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
    let best = search.find(&[]).unwrap().unwrap();
    let simulated = search.requests;
    let grid = grid(&space, &[false; 6], best.cost) * 10_000;
    assert_eq!(best.cost, exhaustive(&known, &space, 1.0));
    assert!(simulated * 20 <= grid, "{simulated} of {grid}");
}

#[test]
fn the_load_at_which_an_answer_fails_is_found() {
    let space = candidates(&[1.0], 1);
    for (capacity, low, high) in [
        (10.0, 1.0, 1.02),
        (12.5, 1.24, 1.26),
        (1000.0, 4.0, f64::NAN),
    ] {
        let mut known = CapacityModel {
            load: 10.0,
            requests: 100,
            parts: vec![1.0],
            ..CapacityModel::new(vec![vec![capacity]])
        };
        let mut search = Search::new(&space, TARGET, &[1.0], 0, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        let (attains, fails) = search.headroom(&best).unwrap();
        assert!((attains - low).abs() < 1e-6, "{capacity}: {attains}");
        assert!(
            fails.is_none_or(|fails| (fails - high).abs() < 1e-6),
            "{capacity}: {fails:?}"
        );
        assert_eq!(fails.is_none(), high.is_nan());
    }
}

#[test]
fn grids_count_sizes_and_splits() {
    let space = candidates(&[2.0, 2.0], 3);
    // 5 sizes of 3 settings; 1 + 2 + 3 + 4 splits of 1.
    assert_eq!(grid(&space, &[false, true], 10.0), 15 + 10);
}
