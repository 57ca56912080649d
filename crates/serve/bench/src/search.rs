//! The search for the highest load that attains objectives.

/// Ratio of a missed load to an attained one below which they count as one: runs differ by more.
const CLOSE: f64 = 1.05;

/// Largest factor on the stated load, either way.
const FACTOR_MAX: f64 = 1024.0;

/// A search over factors on a load, of which higher ones attain less: doubling or halving until one attains and one
/// misses, then the geometric mean of both.
#[derive(Clone, Debug)]
pub struct LoadSearch {
    steps_left: u32,
    attained: Option<f64>,
    missed: Option<f64>,
}

impl LoadSearch {
    /// A search of up to `steps` runs.
    pub fn new(steps: u32) -> LoadSearch {
        LoadSearch {
            steps_left: steps,
            attained: None,
            missed: None,
        }
    }

    /// The next factor to run; `None` at the end.
    pub fn next_load(&self) -> Option<f64> {
        if self.steps_left == 0 {
            return None;
        }
        let next = match (self.attained, self.missed) {
            (None, None) => 1.0,
            (Some(attained), None) => attained * 2.0,
            (None, Some(missed)) => missed / 2.0,
            (Some(attained), Some(missed)) if missed / attained <= CLOSE => return None,
            (Some(attained), Some(missed)) => libm::sqrt(attained * missed),
        };
        (1.0 / FACTOR_MAX..=FACTOR_MAX)
            .contains(&next)
            .then_some(next)
    }

    /// The result at `load`, which [`next_load`](Self::next_load) returned.
    pub fn note(&mut self, load: f64, attains: bool) {
        self.steps_left = self.steps_left.saturating_sub(1);
        if attains {
            self.attained = Some(load);
        } else {
            self.missed = Some(load);
        }
    }

    /// The highest load that attained.
    pub fn highest(&self) -> Option<f64> {
        self.attained
    }

    /// The lowest load that missed.
    pub fn lowest_missed(&self) -> Option<f64> {
        self.missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thresholds over the range, with a step of less than what counts as one.
    #[test]
    fn the_search_finds_any_threshold_from_below() {
        let mut threshold = 1.01 / FACTOR_MAX;
        while threshold < FACTOR_MAX * 0.99 {
            let (mut search, mut runs) = (LoadSearch::new(100), 0);
            while let Some(load) = search.next_load() {
                search.note(load, load <= threshold);
                runs += 1;
            }
            let highest = search.highest().unwrap();
            assert!(
                highest <= threshold && threshold < highest * CLOSE,
                "{threshold}"
            );
            assert!(runs <= 16, "{threshold}: {runs} runs");
            threshold *= 1.037;
        }
    }

    #[test]
    fn a_search_ends() {
        let runs = |steps, attains| {
            let (mut search, mut runs) = (LoadSearch::new(steps), 0);
            while let Some(load) = search.next_load() {
                search.note(load, attains);
                runs += 1;
            }
            runs
        };
        assert_eq!(
            (runs(100, true), runs(100, false)),
            (11, 11),
            "1 to 1,024 times"
        );
        assert_eq!((runs(3, true), runs(3, false)), (3, 3));
    }
}
