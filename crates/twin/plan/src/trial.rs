//! One simulation, ended as soon as it can no longer attain.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use slipstream_base::slo::Shown;
use slipstream_base::{SimTime, width};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_report::Objectives;
use slipstream_twin::{Options, Outcome, Progress, RequestRecord, Sink, TwinError};
use slipstream_workload::Request;

use crate::search::TrialResult;

/// Parts of a run for the confidence interval.
pub const PARTS: usize = 20;

/// Events between two looks at whether a run can still attain: most runs of a search miss soon.
const LOOK_EVENTS: u64 = 32;

/// Requirements of a run.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Objectives of the requests.
    pub objectives: &'a Objectives,
    /// Share of the requests of each class that must meet them.
    pub target: f64,
    /// Requests per class; `None`: those that the run sends. Shape `[classes]`.
    pub expected: Option<&'a [u64]>,
    /// Misses of each class beyond which the run is stopped ([`stop_at`]); `None`: it runs to its end. Shape `[classes]`.
    pub stop_at: Option<&'a [u64]>,
    /// Factor on the duration of steps, above 0.
    pub slower: f64,
    /// Length of the workload, s, for the parts of the interval.
    pub length_s: f64,
    /// Ends the run if it is set; its answer is then worthless.
    pub interrupted: Option<&'a AtomicBool>,
}

/// A run's answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Whether it attains, and how far.
    pub measured: TrialResult,
    /// Requests of each class, and those that met their objectives. Shape `[classes]`.
    pub by_class: Vec<(u64, u64)>,
    /// Each objective's name, requests that have it, and those that met it.
    pub by_objective: Vec<(&'static str, u64, u64)>,
    /// Requests of the class with the lowest share, and those of them that met their objectives, in
    /// consecutive parts of equal length. Shape [`PARTS`], or empty if only the totals are known.
    pub parts: Vec<(u64, u64)>,
    /// The simulation's own outcome. Incomplete if the run was stopped.
    pub outcome: Outcome,
}

/// Counts requests as they end.
struct Judge<'a> {
    question: &'a Question<'a>,
    ended: Vec<(u64, u64)>,
    /// Requests of each class under way whose first token was too late. Shape `[classes]`.
    late: Vec<u64>,
    by_objective: Vec<(&'static str, u64, u64)>,
    /// Shape `[classes][PARTS]`.
    parts: Vec<[(u64, u64); PARTS]>,
    stopped: bool,
    /// Requests under way when it was stopped.
    under_way: u64,
}

/// Misses of each class that runs may have together, given each one's requests per class. Shares are rounded down, so each run
/// alone may have fewer; and one with few requests may have those of all. Shape `[classes]`.
pub fn stop_at<'a>(runs: impl IntoIterator<Item = &'a [u64]>, target: f64) -> Vec<u64> {
    let mut all: Vec<u64> = Vec::new();
    for run in runs {
        all.resize(all.len().max(run.len()), 0);
        for (sum, requests) in all.iter_mut().zip(run) {
            *sum = sum.saturating_add(*requests);
        }
    }
    all.into_iter().map(|all| allowed(all, target)).collect()
}

/// Requests of `expected` that may miss their objectives.
pub(crate) fn allowed(expected: u64, target: f64) -> u64 {
    let needed = width::floor_u64((target * expected as f64 - 1e-9).ceil());
    expected.saturating_sub(needed)
}

impl Judge<'_> {
    /// Whether a first token at `first` is too late for a request's objectives.
    fn is_late(&self, request: &Request, first: SimTime) -> bool {
        let slo = self.question.objectives.of_class(request.class);
        let limit = slo.and_then(|slo| slo.limit_ns("ttft"));
        limit.is_some_and(|limit| first.since(request.due) > limit)
    }
}

impl Sink for Judge<'_> {
    fn on_first(&mut self, request: &Request, now: SimTime) {
        if self.is_late(request, now) {
            let at = request.class as usize;
            self.late.resize(self.late.len().max(at + 1), 0);
            self.late[at] += 1;
        }
    }

    fn on_request(&mut self, record: &RequestRecord<'_>) {
        let objectives = self.question.objectives;
        let class = record.request.class;
        let due = record.request.due;
        let after_first = record.last.since(record.first);
        let gap = after_first
            .checked_div(u64::from(record.output_tokens.saturating_sub(1)))
            .unwrap_or(0);
        let shown = Shown {
            ttft: record.first.since(due),
            itl: gap,
            // Not recorded: the run's own totals decide about it, at its end.
            itl_max: 0,
            tpot: gap,
            e2e: record.last.since(due),
        };
        let failed = record.error.is_some();
        let met = !failed && objectives.are_met(class, &shown);
        let at = class as usize;
        if at >= self.ended.len() {
            self.ended.resize(at + 1, (0, 0));
            self.parts.resize(at + 1, [(0, 0); PARTS]);
        }
        self.ended[at].0 += 1;
        self.ended[at].1 += u64::from(met);
        if self.is_late(record.request, record.first)
            && let Some(late) = self.late.get_mut(at)
        {
            *late = late.saturating_sub(1);
        }
        for (name, held) in objectives
            .of_class(class)
            .into_iter()
            .flat_map(|slo| slo.each_met(&shown))
        {
            let known = self.by_objective.iter().position(|each| each.0 == name);
            let each = known.unwrap_or_else(|| {
                self.by_objective.push((name, 0, 0));
                self.by_objective.len() - 1
            });
            self.by_objective[each].1 += 1;
            self.by_objective[each].2 += u64::from(held && !failed);
        }
        let place = due.as_secs_f64() / self.question.length_s.max(1e-9);
        let part = width::to_usize(width::floor_u64(place * PARTS as f64)).min(PARTS - 1);
        self.parts[at][part].0 += 1;
        self.parts[at][part].1 += u64::from(met);
    }

    fn on_progress(&mut self, progress: Progress) -> bool {
        let late = |at: usize| self.late.get(at).copied().unwrap_or(0);
        let stop_at = self.question.stop_at.unwrap_or_default();
        let mut each = self.ended.iter().zip(stop_at).enumerate();
        let over = each.any(|(at, (&(all, met), allowed))| all - met + late(at) > *allowed);
        if over && !self.stopped {
            self.stopped = true;
            // What comes late has missed.
            for (class, late) in self.ended.iter_mut().zip(&self.late) {
                class.0 += late;
            }
            let late = self.late.iter().sum();
            self.under_way = (progress.in_flight as u64).saturating_sub(late);
        }
        let interrupted = self.question.interrupted;
        !self.stopped && !interrupted.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// Simulates `workload` on `cluster`, on one thread, and judges it.
///
/// # Errors
/// [`TwinError`] if the run cannot start, or its trace fails.
pub fn run(
    cluster: &Cluster,
    workload: &Workload,
    question: &Question<'_>,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Answer, TwinError> {
    let objectives = question.objectives;
    let options = Options {
        slo: objectives.clone(),
        each_token: objectives.read_longest_gap(),
        speedup: 1.0 / question.slower,
        progress_events: if question.stop_at.is_some() {
            LOOK_EVENTS
        } else {
            1 << 12
        },
        ..Options::default()
    };
    let mut judge = Judge::new(question);
    let outcome = slipstream_twin::simulate(cluster, workload, &options, read, &mut judge)?;
    judge.count_longest_gaps(&outcome);
    Ok(judge.answer(outcome))
}

impl<'a> Judge<'a> {
    fn new(question: &'a Question<'a>) -> Judge<'a> {
        Judge {
            question,
            ended: vec![(0, 0)],
            late: vec![0],
            by_objective: Vec::new(),
            parts: vec![[(0, 0); PARTS]],
            stopped: false,
            under_way: 0,
        }
    }

    /// The longest gap is not in the records: only the totals have it. They cover all classes.
    fn count_longest_gaps(&mut self, outcome: &Outcome) {
        let objectives = self.question.objectives;
        if !objectives.read_longest_gap() || self.stopped {
            return;
        }
        let reports = outcome.totals.class_reports(objectives);
        if let Some(goodput) = outcome.totals.goodput(objectives)
            && reports.is_empty()
        {
            self.ended[0].1 = goodput.met;
        }
        for (class, report) in self.ended.iter_mut().zip(&reports) {
            class.1 = report
                .goodput
                .as_ref()
                .map_or(class.1, |goodput| goodput.met);
        }
    }

    /// Requests of each class, and those that met their objectives. Requests that never ended, or were never sent because an
    /// earlier turn failed, count as missed, unless the run was stopped.
    fn by_class(&self) -> Vec<(u64, u64)> {
        let expected = self.question.expected.unwrap_or_default();
        let of = |at: usize| {
            let (sent, met) = self.ended.get(at).copied().unwrap_or_default();
            let all = expected.get(at).copied().filter(|_| !self.stopped);
            (all.unwrap_or(0).max(sent), met)
        };
        (0..expected.len().max(self.ended.len())).map(of).collect()
    }

    /// Consecutive parts of a class, for the interval.
    fn parts_of(&self, class: usize, requests: u64) -> Vec<(u64, u64)> {
        if self.question.objectives.read_longest_gap() {
            return Vec::new();
        }
        let mut parts = self.parts.get(class).copied().unwrap_or_default();
        // Requests that never ended are missed ones of the last part.
        let sent = self.ended.get(class).map_or(0, |class| class.0);
        parts[PARTS - 1].0 += requests - sent;
        parts.to_vec()
    }

    fn answer(self, outcome: Outcome) -> Answer {
        let target = self.question.target;
        let by_class = self.by_class();
        let share_of = |class: &(u64, u64)| class.1 as f64 / class.0.max(1) as f64;
        let lowest = (0..by_class.len())
            .filter(|&at| by_class[at].0 > 0)
            .min_by(|&a, &b| share_of(&by_class[a]).total_cmp(&share_of(&by_class[b])));
        let complete = !self.stopped && outcome.cut.is_none();
        let few = |&(all, met): &(u64, u64)| all - met <= allowed(all, target);
        let ended: u64 = self.ended.iter().map(|class| class.0).sum();
        Answer {
            measured: TrialResult {
                attains: complete && by_class.iter().all(few),
                complete,
                by_class: by_class.clone(),
                share: lowest.map_or(0.0, |at| share_of(&by_class[at])),
                judged: lowest.map_or(0, |at| by_class[at].0),
                digest: outcome.digest,
                requests: ended + self.under_way,
            },
            parts: lowest.map_or_else(Vec::new, |at| self.parts_of(at, by_class[at].0)),
            by_class,
            by_objective: self.by_objective,
            outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_config::cluster::file;
    use slipstream_config::doc::Doc;
    use slipstream_config::workload_file;

    use super::*;

    #[test]
    fn seeds_may_have_misses_together_that_none_may_have_alone() {
        let of = |runs: &[&[u64]]| stop_at(runs.iter().copied(), 0.99);
        assert_eq!(of(&[&[60, 200]]), [0, 2]);
        assert_eq!(of(&[&[60, 200], &[60, 200], &[60, 200]]), [1, 6]);
        // Runs of unequal lengths: each may have the misses of all, and a class may be absent in one.
        assert_eq!(of(&[&[20], &[900, 100], &[80, 0]]), [10, 1]);
        assert_eq!(of(&[&[u64::MAX], &[u64::MAX]]), of(&[&[u64::MAX]]));
        assert_eq!(of(&[]), [0; 0]);
    }

    /// The answer for two L4 with a small model; `stop_at`: as the question's.
    fn answer(workload: &str, slo: &str, stop_at: Option<&[u64]>) -> Answer {
        let mut doc = Doc::empty();
        for set in [
            "model.preset=llama-3.1-8b",
            "engine.timing.gpu=l4",
            "engine.timing.dtype=fp8",
            "engine.max_num_seqs=8",
            "pool.main.workers=2",
        ] {
            doc.set(set);
        }
        let none = |_: &Path| Err(io::Error::from(io::ErrorKind::NotFound));
        let (cluster, _) = file::read(doc, none).unwrap();
        let (workload, _) = workload_file::read(Doc::parse("w.toml", workload.as_bytes())).unwrap();
        let objectives = Objectives::from(slo.parse::<slipstream_base::Slo>().unwrap());
        let question = Question {
            objectives: &objectives,
            target: 0.9,
            expected: Some(&[40]),
            stop_at,
            slower: 1.0,
            length_s: 1.0,
            interrupted: None,
        };
        run(&cluster, &workload, &question, none).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 8, ..ProptestConfig::default() })]

        /// A run that was stopped would have had as many misses at its end, and others run to theirs.
        #[test]
        fn stopped_runs_would_have_missed(
            rate in 0.5f64..8.0,
            isl in prop::sample::select(vec![100, 1000, 4000]),
            osl in prop::sample::select(vec![1, 20, 120]),
            slo in prop::sample::select(vec!["ttft=400ms", "ttft=2s,itl=60ms", "e2e=5s", "ttft=1s,e2e=3s", "tpot=50ms"]),
            turns in 1u32..3,
        ) {
            let workload = format!(
                "requests = 40\nisl = {isl}\nosl = {osl}\n[arrival]\nkind = \"poisson\"\nrate_per_s = {rate}\n\
                 [session]\nturns = {turns}\n"
            );
            let stop_at = stop_at([[40].as_slice()], 0.9);
            let (stopped, whole) =
                (answer(&workload, slo, Some(&stop_at)).measured, answer(&workload, slo, None).measured);
            let misses = |of: &TrialResult| of.by_class[0].0 - of.by_class[0].1;
            prop_assert!(whole.complete);
            if stopped.complete {
                prop_assert_eq!(stopped, whole);
            } else {
                prop_assert!(misses(&stopped) > stop_at[0] && misses(&whole) >= misses(&stopped));
                prop_assert!(!whole.attains && stopped.requests <= 40);
            }
        }
    }

    #[test]
    fn late_first_tokens_stop_a_run_before_any_answer_ends() {
        let workload = "requests = 40\nisl = 4000\nosl = 2000\n[arrival]\nkind = \"constant\"\nrate_per_s = 4\n";
        let measured = answer(workload, "ttft=10ms", Some(&[4])).measured;
        assert_eq!((measured.complete, measured.share), (false, 0.0));
        let (all, met) = measured.by_class[0];
        assert!((5..8).contains(&all) && met == 0, "{measured:?}");
    }

    #[test]
    fn the_share_of_misses_is_rounded_down() {
        assert_eq!(allowed(100, 0.99), 1);
        assert_eq!(allowed(99, 0.99), 0);
        assert_eq!(allowed(199, 0.99), 1);
        assert_eq!(allowed(1, 0.99), 0);
        assert_eq!(allowed(1000, 1.0), 0);
        assert_eq!(allowed(0, 0.99), 0);
        assert_eq!(allowed(10, 0.0), 10);
    }
}
