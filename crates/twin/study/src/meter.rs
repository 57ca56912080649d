//! How far a number of runs is, and the time to go.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use slipstream_base::sync::lock;
use slipstream_report::table::{counted, number};
use slipstream_twin::{Progress, Sink};

use crate::control::Control;

/// Shortest time between two lines.
const PAUSE: Duration = Duration::from_millis(200);

/// Progress of several runs, of which some are under way at a time.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    control: &'a Control,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// How far each run is, 0 to 1.
    shares: Vec<f64>,
    ended: usize,
    last: Option<Instant>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(control: &'a Control, runs: usize) -> Meter<'a> {
        Meter {
            control,
            began: Instant::now(),
            state: Mutex::new(State {
                shares: vec![0.0; runs],
                ended: 0,
                last: None,
            }),
        }
    }

    /// The receiver of run `at`'s progress. `requests`: the number of its requests, if it is known.
    pub(crate) fn run(&self, at: usize, requests: Option<u64>) -> Watched<'_> {
        Watched {
            meter: self,
            at,
            requests,
        }
    }

    /// Run `at` has ended.
    pub(crate) fn ended(&self, at: usize) {
        let mut state = lock(&self.state);
        state.ended += 1;
        state.shares[at] = 1.0;
        state.last = Some(Instant::now());
        self.control
            .show(|| line(&state, self.began.elapsed().as_secs_f64()));
    }

    fn at(&self, at: usize, share: f64) {
        if self.control.progress.is_none() {
            return;
        }
        let mut state = lock(&self.state);
        state.shares[at] = share;
        if state.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            state.last = Some(Instant::now());
            self.control
                .show(|| line(&state, self.began.elapsed().as_secs_f64()));
        }
    }
}

fn line(state: &State, seconds: f64) -> String {
    let (done, runs) = (state.shares.iter().sum::<f64>(), state.shares.len());
    let share = done / runs.max(1) as f64;
    // An early estimate would be meaningless.
    let left = if share > 0.02 && state.ended < runs {
        format!(", about {} s left", number(seconds * (1.0 - share) / share))
    } else {
        String::new()
    };
    format!(
        "{} of {} ended, {seconds:.0} s{left}",
        state.ended,
        counted(runs as u64, "run")
    )
}

/// The progress of one run; ends the run if it is interrupted.
#[derive(Debug)]
pub(crate) struct Watched<'a> {
    meter: &'a Meter<'a>,
    at: usize,
    requests: Option<u64>,
}

impl Sink for Watched<'_> {
    fn wants_requests(&self) -> bool {
        false
    }

    fn on_progress(&mut self, progress: Progress) -> bool {
        if let Some(requests) = self.requests {
            let share = progress.ended as f64 / requests.max(1) as f64;
            self.meter.at(self.at, share.min(1.0));
        } else {
            self.meter.at(self.at, 0.0);
        }
        !self.meter.control.is_interrupted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_counts_runs_and_the_time_to_go() {
        let mut state = State {
            shares: vec![1.0, 0.5, 0.0, 0.0],
            ended: 1,
            last: None,
        };
        assert_eq!(
            line(&state, 6.0),
            "1 of 4 runs ended, 6 s, about 10.0 s left"
        );
        state.shares = vec![0.01, 0.0, 0.0, 0.0];
        state.ended = 0;
        assert_eq!(
            line(&state, 6.0),
            "0 of 4 runs ended, 6 s",
            "too early to tell"
        );
        state.shares = vec![1.0; 4];
        state.ended = 4;
        assert_eq!(line(&state, 7.0), "4 of 4 runs ended, 7 s");
    }

    #[test]
    fn a_run_ends_once_it_is_interrupted() {
        let control = Control::default();
        let meter = Meter::new(&control, 1);
        let progress = Progress {
            now: slipstream_base::SimTime::ZERO,
            ended: 1,
            in_flight: 1,
        };
        assert!(meter.run(0, Some(2)).on_progress(progress));
        control
            .interrupted
            .store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(!meter.run(0, None).on_progress(progress));
    }
}
