//! Counters that one thread writes and others read.
//!
//! Adding is a load and a store: it takes no locked instruction, and needs none with one writer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter or gauge that one thread writes and others read.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds `n`. Only the owning thread may call it: two writers would lose counts.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Subtracts `n`; for gauges.
    #[inline]
    pub fn sub(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_sub(n), Relaxed);
    }

    /// Sets it to `n`; for gauges.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Returns the value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Powers of two from 1 to 2^(`N` - 1), as bounds of a histogram.
pub const fn powers_of_two<const N: usize>() -> [u64; N] {
    let mut bounds = [0; N];
    let mut i = 0;
    while i < N {
        bounds[i] = 1 << i;
        i += 1;
    }
    bounds
}

/// A histogram over fixed bounds, written by one thread.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [u64],
    /// One count per bound, and one for values above the last bound.
    counts: Box<[Count]>,
    sum: Count,
}

impl Histogram {
    /// An empty histogram with these upper bounds, which ascend.
    pub fn new(bounds: &'static [u64]) -> Histogram {
        Histogram {
            bounds,
            counts: (0..=bounds.len()).map(|_| Count::default()).collect(),
            sum: Count::default(),
        }
    }

    /// Records `value`, in the unit of the bounds. A value equal to a bound counts in that bound's bucket.
    #[inline]
    pub fn observe(&self, value: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        self.counts[bucket].add(1);
        self.sum.add(value);
    }

    /// Number of observed values.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(Count::get).sum()
    }

    /// Sum of the observed values.
    pub fn sum(&self) -> u64 {
        self.sum.get()
    }
}

/// Sum of histograms with the same bounds, for a page of metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct MergedHistogram {
    /// Sum of the values.
    pub sum: f64,
    /// Number of values.
    pub count: u64,
    /// Upper bound and count of each bucket; the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
}

impl MergedHistogram {
    /// Merges `histograms`, whose unit is `per_unit` times smaller than the page's. (Dividing gives the nearest float to
    /// 0.001, multiplying by 1e-9 a neighbor.)
    pub fn of<'h>(
        histograms: impl IntoIterator<Item = &'h Histogram>,
        per_unit: f64,
    ) -> MergedHistogram {
        let mut merged = MergedHistogram {
            sum: 0.0,
            count: 0,
            buckets: vec![(f64::INFINITY, 0)],
        };
        for histogram in histograms {
            if merged.buckets.len() == 1 {
                let bounds = histogram
                    .bounds
                    .iter()
                    .map(|&bound| bound as f64 / per_unit);
                let bounds = bounds.chain([f64::INFINITY]);
                merged.buckets = bounds.map(|bound| (bound, 0)).collect();
            }
            for (bucket, count) in merged.buckets.iter_mut().zip(&histogram.counts) {
                bucket.1 += count.get();
            }
            merged.sum += histogram.sum() as f64 / per_unit;
        }
        merged.count = merged.buckets.iter().map(|bucket| bucket.1).sum();
        merged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static BOUNDS: [u64; 3] = [1, 10, 100];

    #[test]
    fn values_are_counted_up_to_their_bound_and_the_rest_up_to_infinity() {
        let one = Histogram::new(&BOUNDS);
        for value in [0, 1, 2, 10, 11, 100, 101] {
            one.observe(value);
        }
        let other = Histogram::new(&BOUNDS);
        other.observe(1 << 60);
        let merged = MergedHistogram::of([&one, &other], 10.0);
        let expected = [(0.1, 2), (1.0, 2), (10.0, 2), (f64::INFINITY, 2)];
        assert_eq!(merged.buckets, expected);
        assert_eq!(merged.count, one.count() + other.count());
        assert_eq!(one.sum(), 225);
    }

    #[test]
    fn a_histogram_without_parts_still_ends_at_infinity() {
        let none = MergedHistogram::of([], 1.0);
        assert_eq!(
            (none.count, &none.buckets[..]),
            (0, &[(f64::INFINITY, 0)][..])
        );
        assert_eq!(powers_of_two::<4>(), [1, 2, 4, 8]);
    }
}
