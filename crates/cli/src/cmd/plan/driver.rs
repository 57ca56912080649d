//! Runs trials on threads, and keeps what they show.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use slipstream_base::Slo;
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_plan::search::Progress;
use slipstream_plan::space::{Setting, Shape};
use slipstream_plan::trial::{self, Answer, Question};
use slipstream_plan::{Conditions, Evaluate, Measured, Trial, demand, load};
use slipstream_report::Objectives;
use slipstream_report::table::{counted, grouped};

use super::base::Base;

/// The question.
pub(super) struct Driver<'a> {
    pub(super) base: &'a Base,
    pub(super) shapes: &'a [Shape],
    /// Shape `[shapes][settings]`.
    pub(super) settings: &'a [Vec<Setting>],
    /// The parts of the workload; the last one is all of it.
    pub(super) parts: Vec<Workload>,
    pub(super) lengths_s: Vec<f64>,
    pub(super) objectives: &'a Objectives,
    pub(super) target: f64,
    pub(super) jobs: usize,
    pub(super) shows: bool,
    pub(super) began: Instant,
    /// Requests per class of a part at a load; `None` if they depend on the run.
    counts: HashMap<(usize, u64, u64), Option<Vec<u64>>>,
    /// Complete runs under the conditions of a question: for charts.
    pub(super) complete: Vec<(Trial, f64)>,
    pub(super) requests: u64,
}

impl<'a> Driver<'a> {
    #[expect(
        clippy::too_many_arguments,
        reason = "fields of one struct, given once"
    )]
    pub(super) fn new(
        base: &'a Base,
        shapes: &'a [Shape],
        settings: &'a [Vec<Setting>],
        parts: Vec<Workload>,
        lengths_s: Vec<f64>,
        objectives: &'a Objectives,
        target: f64,
        jobs: usize,
        shows: bool,
    ) -> Driver<'a> {
        Driver {
            base,
            shapes,
            settings,
            parts,
            lengths_s,
            objectives,
            target,
            jobs,
            shows,
            began: Instant::now(),
            counts: HashMap::new(),
            complete: Vec::new(),
            requests: 0,
        }
    }

    fn workload(&self, trial: &Trial) -> Workload {
        let mut workload = load::scaled(&self.parts[trial.part], trial.conditions.load);
        workload.seed = workload.seed.wrapping_add(trial.conditions.seed);
        workload
    }

    fn count(&mut self, trial: &Trial) -> anyhow::Result<Option<Vec<u64>>> {
        let conditions = &trial.conditions;
        let key = (trial.part, conditions.load.to_bits(), conditions.seed);
        if let Some(count) = self.counts.get(&key) {
            return Ok(count.clone());
        }
        let count = demand::count(&self.workload(trial))?;
        let known = count.iter().sum::<u64>() > 0;
        let count = known.then_some(count);
        self.counts.insert(key, count.clone());
        Ok(count)
    }

    /// The cluster of a trial.
    pub(super) fn cluster(&self, trial: &Trial) -> anyhow::Result<Cluster> {
        let shape = &self.shapes[trial.shape];
        let setting = &self.settings[trial.shape][trial.setting];
        let (cluster, _) = self.base.resolve(shape, setting, trial.workers)?;
        super::super::memory::check(&cluster)?;
        Ok(cluster)
    }

    /// Runs one trial.
    fn simulate(
        &self,
        trial: &Trial,
        expected: Option<&[u64]>,
        stop_early: bool,
    ) -> anyhow::Result<Answer> {
        let cluster = self.cluster(trial)?;
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
            expected,
            slower: trial.conditions.slower,
            // Compressed with the load, unless the load adds requests.
            length_s: self.lengths_s[trial.part] * self.parts[trial.part].time_scale
                / workload.time_scale,
            stop_early,
        };
        Ok(trial::run(
            &cluster,
            &workload,
            &question,
            super::super::files::read,
        )?)
    }

    /// Runs one trial to its end, for its figures.
    pub(super) fn whole(&mut self, trial: &Trial) -> anyhow::Result<Answer> {
        let expected = self.count(trial)?;
        let answer = self.simulate(trial, expected.as_deref(), false)?;
        self.requests += answer.measured.requests;
        Ok(answer)
    }

    fn show(&self, progress: &Progress, ended: usize, of: usize) {
        if !self.shows {
            return;
        }
        let seconds = self.began.elapsed().as_secs_f64();
        let left = if progress.done > 0.5 {
            let rest = (progress.expected - progress.done).max(0.0);
            format!(", about {:.0} s left", seconds / progress.done * rest)
        } else {
            String::new()
        };
        let mut stderr = std::io::stderr().lock();
        // A closed terminal must not end the search.
        let _ = write!(
            stderr,
            "\r\x1b[K{}: {ended} of {}, {} simulated, {seconds:.0} s{left}",
            progress.phase,
            counted(of as u64, "run"),
            grouped(self.requests)
        );
        let _ = stderr.flush();
    }

    /// Removes the progress line.
    pub(super) fn clear(&self) {
        if self.shows {
            eprint!("\r\x1b[K");
        }
    }
}

/// Objectives with every limit multiplied by `factor`.
fn scale(objectives: &Objectives, factor: f64) -> Objectives {
    let scaled = |slo: &Option<Slo>| slo.as_ref().map(|slo| slo.scaled(factor));
    Objectives {
        all: scaled(&objectives.all),
        classes: objectives
            .classes
            .iter()
            .map(|(name, slo)| (name.clone(), scaled(slo)))
            .collect(),
    }
}

impl Evaluate for Driver<'_> {
    type Error = anyhow::Error;

    fn run(&mut self, trials: &[Trial], progress: &Progress) -> anyhow::Result<Vec<Measured>> {
        let expected: Vec<Option<Vec<u64>>> = trials
            .iter()
            .map(|trial| self.count(trial))
            .collect::<anyhow::Result<_>>()?;
        // Of these, the share itself is shown.
        let stop_early = !matches!(progress.phase, "headroom" | "size" | "seeds");
        let next = AtomicUsize::new(0);
        let ended = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<anyhow::Result<Measured>>>> =
            trials.iter().map(|_| Mutex::new(None)).collect();
        let this = &*self;
        std::thread::scope(|scope| {
            for _ in 0..this.jobs.min(trials.len()) {
                scope.spawn(|| {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(trial) = trials.get(at) else { return };
                        let expected = expected[at].as_deref();
                        let result = this.simulate(trial, expected, stop_early);
                        let result = result.map(|answer| answer.measured);
                        *results[at].lock().expect("a result is stored whole") = Some(result);
                        let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                        this.show(progress, ended, trials.len());
                    }
                });
            }
        });
        let measured: Vec<Measured> = results
            .into_iter()
            .map(|result| {
                let result = result.into_inner().expect("a result is stored whole");
                result.expect("every trial was taken by a thread")
            })
            .collect::<anyhow::Result<_>>()?;
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
    }
}
