//! Runs trials on threads, and keeps what they show.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_plan::search::Progress;
use slipstream_plan::trial::{self, Answer, Question};
use slipstream_plan::{Conditions, Evaluate, Trial, TrialResult, demand, load, space};
use slipstream_report::Objectives;
use slipstream_report::table::{counted, grouped};

use super::Plan;
use super::base::Base;
use super::ready::{Factors, Ready, scale};
use crate::control::Control;
use crate::{files, memory};

/// Trials of one step of a search, as data: another process with the same question runs them
/// ([`super::Plan::measure`]). Factors travel as the bits of their numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Bits of the factors on load, objectives and steps that the search is for.
    factors: [u64; 3],
    trials: Vec<Spec>,
}

/// A trial of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Spec {
    shape: usize,
    setting: usize,
    workers: u32,
    part: usize,
    /// Factors on load, objectives and steps.
    factors: [u64; 3],
    seed: u64,
    counts: Counts,
}

/// Requests of a trial, if they do not depend on the run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Counts {
    /// Per class.
    expected: Option<Vec<u64>>,
    /// Misses of each class beyond which the run is stopped; `None`: it runs to its end.
    stop_at: Option<Vec<u64>>,
}

impl Batch {
    /// Factors that the search is for.
    pub(super) fn factors(&self) -> Factors {
        let [load, slo, slower] = self.factors.map(f64::from_bits);
        Factors { load, slo, slower }
    }
}

impl Spec {
    fn of(trial: &Trial, counts: Counts) -> Spec {
        let conditions = &trial.conditions;
        Spec {
            shape: trial.shape,
            setting: trial.setting,
            workers: trial.workers,
            part: trial.part,
            factors: [conditions.load, conditions.slo, conditions.slower].map(f64::to_bits),
            seed: conditions.seed,
            counts,
        }
    }

    fn trial(&self) -> Trial {
        let [load, slo, slower] = self.factors.map(f64::from_bits);
        Trial {
            shape: self.shape,
            setting: self.setting,
            workers: self.workers,
            part: self.part,
            conditions: Conditions {
                load,
                slo,
                slower,
                seed: self.seed,
            },
            // What it stands for travels as numbers.
            spare: 1,
        }
    }
}

/// The result of a trial, as data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Result {
    attains: bool,
    complete: bool,
    by_class: Vec<(u64, u64)>,
    /// Bits of the share.
    share: u64,
    judged: u64,
    digest: u64,
    requests: u64,
}

impl From<TrialResult> for Result {
    fn from(measured: TrialResult) -> Result {
        Result {
            attains: measured.attains,
            complete: measured.complete,
            by_class: measured.by_class,
            share: measured.share.to_bits(),
            judged: measured.judged,
            digest: measured.digest,
            requests: measured.requests,
        }
    }
}

impl From<Result> for TrialResult {
    fn from(result: Result) -> TrialResult {
        TrialResult {
            attains: result.attains,
            complete: result.complete,
            by_class: result.by_class,
            share: f64::from_bits(result.share),
            judged: result.judged,
            digest: result.digest,
            requests: result.requests,
        }
    }
}

/// Runs trials in other processes.
pub trait Elsewhere: Sync {
    /// Results in the order of the batch's trials. `said`: the progress of the search.
    ///
    /// # Errors
    /// If a trial cannot run, or no process is left to run it.
    fn measure(&self, batch: &Batch, said: &str) -> anyhow::Result<Vec<Result>>;
}

/// The question.
pub(super) struct Driver<'a> {
    base: &'a Base,
    pub(super) ready: &'a Ready,
    objectives: &'a Objectives,
    target: f64,
    /// Seeds of the question.
    seeds: u64,
    /// Factors that the search is for.
    factors: Factors,
    means: Means<'a>,
    began: Instant,
    /// Requests per class of a part at a load; `None` if they depend on the run.
    requests_of: HashMap<(usize, u64, u64), Option<Vec<u64>>>,
    /// Whether runs of other sizes and loads are to be complete, for charts.
    charts: bool,
    /// Complete runs under the conditions of a question: for charts.
    complete: Vec<(Trial, f64)>,
    /// Runs that attain, by shape: the search has simulated the rows of its table already. Shape `[shapes]`.
    figures: Vec<Vec<(Trial, Answer)>>,
    requests: u64,
}

/// Limit of runs of one shape whose figures are kept: those with the fewest workers.
const FIGURES_MAX: usize = 4;

/// The result of a run, with its figures if it may be a row of the table.
type Run = (TrialResult, Option<Answer>);

/// What runs trials.
#[derive(Clone, Copy)]
pub(super) struct Means<'a> {
    /// Threads.
    pub(super) jobs: usize,
    pub(super) control: &'a Control,
    /// Other processes instead of threads.
    pub(super) elsewhere: Option<&'a dyn Elsewhere>,
}

impl<'a> Driver<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        ready: &'a Ready,
        factors: Factors,
        means: Means<'a>,
    ) -> Driver<'a> {
        Driver {
            base: &plan.base,
            ready,
            objectives: &plan.asked.objectives,
            target: plan.args.attain,
            seeds: plan.seeds(),
            factors,
            means,
            began: Instant::now(),
            requests_of: HashMap::new(),
            charts: plan.charts,
            complete: Vec::new(),
            figures: vec![Vec::new(); ready.shapes.len()],
            requests: 0,
        }
    }

    fn workload(&self, trial: &Trial) -> Workload {
        let mut workload = load::scaled(&self.ready.parts[trial.part], trial.conditions.load);
        workload.seed = workload.seed.wrapping_add(trial.conditions.seed);
        workload
    }

    /// The requests of a trial, and those that may miss: of all seeds that are judged together. `stop_early`: whether it is stopped
    /// beyond them.
    fn counts(&mut self, trial: &Trial, stop_early: bool) -> anyhow::Result<Counts> {
        let expected = self.count(trial)?;
        let mut runs = vec![expected.clone().unwrap_or_default()];
        if trial.spare > 1 && stop_early && expected.is_some() {
            runs.clear();
            for number in 0..trial.spare {
                let conditions = Conditions {
                    seed: number % self.seeds,
                    ..trial.conditions
                };
                let other = Trial {
                    conditions,
                    ..*trial
                };
                runs.extend(self.count(&other)?);
            }
        }
        let stop_at = trial::stop_at(runs.iter().map(Vec::as_slice), self.target);
        Ok(Counts {
            stop_at: (stop_early && expected.is_some()).then_some(stop_at),
            expected,
        })
    }

    /// Requests per class; `None` if they depend on the run.
    fn count(&mut self, trial: &Trial) -> anyhow::Result<Option<Vec<u64>>> {
        let conditions = &trial.conditions;
        let key = (trial.part, conditions.load.to_bits(), conditions.seed);
        if let Some(count) = self.requests_of.get(&key) {
            return Ok(count.clone());
        }
        let count = demand::count(&self.workload(trial))?;
        let known = count.iter().sum::<u64>() > 0;
        let count = known.then_some(count);
        self.requests_of.insert(key, count.clone());
        Ok(count)
    }

    /// The cluster of a trial.
    pub(super) fn cluster(&self, trial: &Trial) -> anyhow::Result<Cluster> {
        let shape = &self.ready.shapes[trial.shape];
        let setting = &self.ready.settings[trial.shape][trial.setting];
        let (cluster, _) = self.base.resolve(shape, setting, trial.workers)?;
        memory::check(&cluster)?;
        Ok(cluster)
    }

    /// Runs one trial.
    fn simulate(&self, trial: &Trial, counts: &Counts) -> anyhow::Result<Answer> {
        let cluster = self.cluster(trial)?;
        self.simulate_on(&cluster, trial, counts)
    }

    /// Runs one trial on a cluster of its own.
    fn simulate_on(
        &self,
        cluster: &Cluster,
        trial: &Trial,
        counts: &Counts,
    ) -> anyhow::Result<Answer> {
        let scaled;
        let objectives = if trial.conditions.slo == 1.0 {
            self.objectives
        } else {
            scaled = scale(self.objectives, trial.conditions.slo);
            &scaled
        };
        let workload = self.workload(trial);
        let question = Question {
            objectives,
            target: self.target,
            expected: counts.expected.as_deref(),
            stop_at: counts.stop_at.as_deref(),
            slower: trial.conditions.slower,
            // Compressed with the load, unless the load adds requests.
            length_s: self.ready.lengths_s[trial.part] * self.ready.parts[trial.part].time_scale
                / workload.time_scale,
            interrupted: Some(&self.means.control.interrupted),
        };
        let answer = trial::run(cluster, &workload, &question, files::read)?;
        self.means.control.check()?;
        Ok(answer)
    }

    /// Loads and shares of the complete runs of a choice with the first seed.
    pub(super) fn shares_by_load(&self, of: &slipstream_plan::Choice) -> Vec<(f64, f64)> {
        let is_of = |trial: &Trial| {
            (trial.shape, trial.setting, trial.workers) == (of.shape, of.setting, of.workers)
                && trial.conditions.seed == 0
        };
        let runs = self.complete.iter().filter(|(trial, _)| is_of(trial));
        runs.map(|(trial, share)| (trial.conditions.load, *share))
            .collect()
    }

    /// The trial that gives the same run, whatever misses it may have.
    fn same_run(&self, trial: &Trial) -> Trial {
        Trial {
            setting: self.same(trial.shape, trial.setting, trial.workers),
            spare: 1,
            ..*trial
        }
    }

    /// Whether a run of the search may be a row of its table.
    fn may_be_row(&self, trial: &Trial, answer: &Answer) -> bool {
        trial.conditions.seed == 0 && trial.part >= self.ready.main && answer.measured.attains
    }

    fn keep(&mut self, trial: &Trial, answer: Answer) {
        let trial = self.same_run(trial);
        let kept = &mut self.figures[trial.shape];
        if kept.iter().any(|(other, _)| *other == trial) {
            return;
        }
        let at = kept.partition_point(|(other, _)| other.workers <= trial.workers);
        kept.insert(at, (trial, answer));
        kept.truncate(FIGURES_MAX);
    }

    /// The kept runs, all of which attain, and the share of their requests that did.
    pub(super) fn attained(&self) -> impl Iterator<Item = (Trial, f64)> {
        let kept = self.figures.iter().flatten();
        kept.map(|(trial, answer)| (*trial, answer.measured.share))
    }

    /// Runs one trial to its end, for its figures, unless the search did.
    pub(super) fn whole(&mut self, trial: &Trial) -> anyhow::Result<Answer> {
        let run = self.same_run(trial);
        let mut kept = self.figures[trial.shape].iter();
        if let Some((_, answer)) = kept.find(|(other, _)| *other == run) {
            return Ok(answer.clone());
        }
        let counts = self.counts(trial, false)?;
        let answer = self.simulate(trial, &counts)?;
        self.requests += answer.measured.requests;
        Ok(answer)
    }

    /// Runs one trial to its end on a cluster whose workers start and stop by the load, of which at least `workers_min` run.
    pub(super) fn scaled(&mut self, trial: &Trial, workers_min: u32) -> anyhow::Result<Answer> {
        let shape = &self.ready.shapes[trial.shape];
        let setting = &self.ready.settings[trial.shape][trial.setting];
        let (cluster, _) =
            self.base
                .resolve_scaled(shape, setting, Some(workers_min), trial.workers)?;
        memory::check(&cluster)?;
        let counts = self.counts(trial, false)?;
        let answer = self.simulate_on(&cluster, trial, &counts)?;
        self.requests += answer.measured.requests;
        Ok(answer)
    }

    /// How far the search is.
    fn said(&self, progress: &Progress, ended: usize, of: usize) -> String {
        let seconds = self.began.elapsed().as_secs_f64();
        let left = if progress.done > 0.5 {
            let rest = (progress.expected - progress.done).max(0.0);
            format!(", about {:.0} s left", seconds / progress.done * rest)
        } else {
            String::new()
        };
        format!(
            "{}: {ended} of {}, {} simulated, {seconds:.0} s{left}",
            progress.phase,
            counted(of as u64, "run"),
            grouped(self.requests)
        )
    }

    /// Runs the trials of a batch on threads.
    pub(super) fn measure(&self, batch: &Batch) -> anyhow::Result<Vec<Result>> {
        let ready = self.ready;
        for spec in &batch.trials {
            anyhow::ensure!(
                ready
                    .settings
                    .get(spec.shape)
                    .is_some_and(|settings| spec.setting < settings.len())
                    && spec.part < ready.parts.len(),
                "a trial of another question: {spec:?}"
            );
        }
        let trials: Vec<Trial> = batch.trials.iter().map(Spec::trial).collect();
        let counts: Vec<Counts> = batch.trials.iter().map(|s| s.counts.clone()).collect();
        let runs = self.on_threads(&trials, &counts, None)?;
        let results = runs.into_iter().map(|(measured, _)| Result::from(measured));
        Ok(results.collect())
    }

    fn on_threads(
        &self,
        trials: &[Trial],
        counts: &[Counts],
        progress: Option<&Progress>,
    ) -> anyhow::Result<Vec<Run>> {
        let next = AtomicUsize::new(0);
        let ended = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<anyhow::Result<Run>>>> =
            trials.iter().map(|_| Mutex::new(None)).collect();
        std::thread::scope(|scope| {
            for _ in 0..self.means.jobs.min(trials.len()) {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(trial) = trials.get(at) else { return };
                        if self.means.control.is_interrupted() {
                            return;
                        }
                        let result = self.simulate(trial, &counts[at]);
                        let result = result.map(|answer| {
                            let measured = answer.measured.clone();
                            (
                                measured,
                                Some(answer).filter(|of| self.may_be_row(trial, of)),
                            )
                        });
                        *results[at].lock().expect("a result is stored whole") = Some(result);
                        let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                        if let Some(progress) = progress {
                            self.means
                                .control
                                .show(|| self.said(progress, ended, trials.len()));
                        }
                    }
                });
            }
        });
        self.means.control.check()?;
        results
            .into_iter()
            .map(|result| {
                let result = result.into_inner().expect("a result is stored whole");
                result.expect("every trial was taken by a thread")
            })
            .collect()
    }
}

impl Evaluate for Driver<'_> {
    type Error = anyhow::Error;

    fn same(&self, shape: usize, setting: usize, workers: u32) -> usize {
        let (of, settings) = (&self.ready.shapes[shape], &self.ready.settings[shape]);
        space::same(of, settings, setting, workers, self.ready.ranks[shape])
    }

    fn run(&mut self, trials: &[Trial], progress: &Progress) -> anyhow::Result<Vec<TrialResult>> {
        // Charts show the shares of these.
        let stop_early = !(self.charts && matches!(progress.phase, "headroom" | "size"));
        let counts: Vec<Counts> = trials
            .iter()
            .map(|trial| self.counts(trial, stop_early))
            .collect::<anyhow::Result<_>>()?;
        let measured = match self.means.elsewhere {
            None => {
                let runs = self.on_threads(trials, &counts, Some(progress))?;
                let mut measured = Vec::with_capacity(runs.len());
                for (trial, (each, answer)) in trials.iter().zip(runs) {
                    measured.push(each);
                    if let Some(answer) = answer {
                        self.keep(trial, answer);
                    }
                }
                measured
            }
            Some(elsewhere) => {
                let batch = Batch {
                    factors: self.factors.bits(),
                    trials: trials
                        .iter()
                        .zip(counts)
                        .map(|(trial, counts)| Spec::of(trial, counts))
                        .collect(),
                };
                let results = elsewhere.measure(&batch, &self.said(progress, 0, trials.len()))?;
                self.means.control.check()?;
                anyhow::ensure!(
                    results.len() == trials.len(),
                    "{} for {}",
                    counted(results.len() as u64, "result"),
                    counted(trials.len() as u64, "trial")
                );
                results.into_iter().map(TrialResult::from).collect()
            }
        };
        for (trial, measured) in trials.iter().zip(&measured) {
            self.requests += measured.requests;
            if !stop_early {
                self.complete.push((*trial, measured.share));
            }
        }
        Ok(measured)
    }
}

/// A trial on the part with index `part`.
pub(super) fn trial(of: &slipstream_plan::Choice, part: usize, conditions: Conditions) -> Trial {
    Trial {
        shape: of.shape,
        setting: of.setting,
        workers: of.workers,
        part,
        conditions,
        spare: 1,
    }
}
