//! A shape as the search sees it: cost, bounds of its size, and settings as points on axes.

use slipstream_base::width;

/// A setting as the index of its value on each axis of settings. Splits of prefill and decode workers are `SPLIT`.
pub type AxisPoint = [usize; 4];

/// The axis of splits: those of one prefill worker more or less have indices that differ by 1.
pub(super) const SPLIT: usize = 3;

/// A shape, as far as the search needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Cost of one worker per hour, above 0.
    pub cost: f64,
    /// Fewest workers that form a cluster: 2 if prefill and decode have workers of their own.
    pub workers_least: u32,
    /// Sizes below this cannot attain.
    pub workers_min: u32,
    /// Sizes above this are not tried.
    pub workers_max: u32,
    /// The number of its settings that are tried in all combinations, at least 1; 0 is the base.
    pub settings: usize,
    /// Its settings as places on the axes: those, and then others that are tried only next to good ones.
    pub places: Vec<AxisPoint>,
    /// Shapes of one kind compete for a place of their own in the table, such as GPUs of one preset.
    pub kind: usize,
    /// Whether prefill and decode have workers of their own: of equally cheap shapes, one without is
    /// preferred.
    pub apart: bool,
    /// Whether workers keep KV blocks in host memory: likewise, one without is preferred.
    pub hosts_kv: bool,
}

impl Candidate {
    /// Order of preference among equally cheap shapes, the first one being the simplest.
    pub(super) fn simplicity(&self) -> (bool, bool) {
        (self.apart, self.hosts_kv)
    }

    /// Settings that differ from one in one value; of the splits that are not tried in all combinations, the next ones.
    pub(super) fn neighbors(&self, of: usize) -> Vec<usize> {
        let is_near = |&other: &usize| match self.only_change(of, other) {
            Some(SPLIT) if of.max(other) >= self.settings => self.is_next_split(of, other),
            axis => axis.is_some(),
        };
        (0..self.places.len()).filter(is_near).collect()
    }

    /// Settings that differ from one in a prefill worker more or less.
    pub(super) fn next_splits(&self, of: usize) -> Vec<usize> {
        let is_next = |&other: &usize| {
            self.only_change(of, other) == Some(SPLIT) && self.is_next_split(of, other)
        };
        (0..self.places.len()).filter(is_next).collect()
    }

    pub(super) fn is_next_split(&self, a: usize, b: usize) -> bool {
        self.places[a][SPLIT].abs_diff(self.places[b][SPLIT]) == 1
    }

    /// The settings that are tried in all combinations, and those with the split of this one.
    pub(super) fn with_split_of(&self, setting: usize) -> Vec<usize> {
        let split = self.places[setting][SPLIT];
        (0..self.places.len())
            .filter(|&other| other < self.settings || self.places[other][SPLIT] == split)
            .collect()
    }

    /// The axis on which two settings differ; `None` unless it is one.
    pub(super) fn only_change(&self, a: usize, b: usize) -> Option<usize> {
        let (a, b) = (self.places[a], self.places[b]);
        let mut axes = (0..a.len()).filter(|&axis| a[axis] != b[axis]);
        axes.next().filter(|_| axes.next().is_none())
    }

    /// Cost of `workers` workers.
    pub fn cost_of(&self, workers: u32) -> f64 {
        self.cost * f64::from(workers)
    }

    /// The size that costs `cost`, if there is one.
    pub(super) fn size_for(&self, cost: f64) -> Option<u32> {
        let workers = (cost / self.cost).round();
        let same = (self.cost * workers - cost).abs() <= cost * 1e-9;
        let fits =
            workers >= f64::from(self.workers_min.max(1)) && workers <= f64::from(self.workers_max);
        (same && fits).then(|| width::floor_u32(workers))
    }

    /// The largest size that costs less than `cost`; `None` if even the smallest does not.
    pub(super) fn cheaper_than(&self, cost: f64) -> Option<u32> {
        let mut workers = width::floor_u32((cost / self.cost).ceil());
        // Sums of prices are not exact: equal cost is not less.
        while workers > 0 && self.cost_of(workers) >= cost * (1.0 - 1e-9) {
            workers -= 1;
        }
        let workers = workers.min(self.workers_max);
        (workers >= self.workers_min.max(1)).then_some(workers)
    }
}

/// Configurations that a search without bounds and bisection simulates to prove an answer that costs
/// `cost`: every shape, setting and size that costs no more, each on the whole workload. With workers
/// of two kinds (`apart`), every split. Shape of `apart`: `[shapes]`.
pub fn grid(shapes: &[Candidate], apart: &[bool], cost: f64) -> u64 {
    shapes
        .iter()
        .zip(apart)
        .map(|(shape, &apart)| {
            let most = (cost * (1.0 + 1e-9) / shape.cost).floor();
            let most = width::floor_u64(most).min(u64::from(shape.workers_max));
            let sizes = if apart {
                // 1 + 2 + … splits; factors on the share are not counted again.
                most * most.saturating_sub(1) / 2
            } else {
                most
            };
            let settings = shape.settings as u64;
            sizes
                * if apart {
                    settings.div_ceil(3)
                } else {
                    settings
                }
        })
        .sum()
}
