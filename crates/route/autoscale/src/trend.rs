//! A line through the last values of a series.

use std::collections::VecDeque;

/// The last values of a series that has one per interval, and the line through them by ordinary least squares
/// (Draper and Smith, *Applied Regression Analysis*, chapter 1).
#[derive(Clone, Debug)]
pub struct Trend {
    /// Oldest first.
    values: VecDeque<f64>,
    capacity: usize,
}

impl Trend {
    /// Of at most `capacity` values, and at least 2.
    pub fn new(capacity: usize) -> Trend {
        Trend {
            values: VecDeque::new(),
            capacity: capacity.max(2),
        }
    }

    /// Values that it keeps at most.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Appends a value; the oldest one beyond the capacity is dropped.
    pub fn push(&mut self, value: f64) {
        if self.values.len() == self.capacity {
            self.values.pop_front();
        }
        self.values.push_back(value);
    }

    /// Value of the line at the last value, and its slope per interval; `None` for fewer than 2 values.
    pub fn line(&self) -> Option<(f64, f64)> {
        let count = self.values.len();
        if count < 2 {
            return None;
        }
        let n = count as f64;
        // Times 0, 1, …, n - 1: their mean is (n - 1) / 2, and the sum of their squared distances from it
        // n (n² - 1) / 12.
        let mean_time = (n - 1.0) / 2.0;
        let mean = self.values.iter().sum::<f64>() / n;
        let each = self.values.iter().zip(0u32..);
        let products: f64 = each
            .map(|(value, at)| (f64::from(at) - mean_time) * (value - mean))
            .sum();
        let slope = products / (n * (n * n - 1.0) / 12.0);
        Some((mean + slope * mean_time, slope))
    }

    /// Factor by which the line grows in `ahead` intervals, at least 1. 1 without a line, and for one that is not above
    /// 0 now.
    pub fn growth(&self, ahead: f64) -> f64 {
        match self.line() {
            Some((now, slope)) if now > 0.0 => ((now + slope * ahead) / now).max(1.0),
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[f64]) -> Trend {
        let mut trend = Trend::new(values.len().max(2));
        for &value in values {
            trend.push(value);
        }
        trend
    }

    #[test]
    fn lines_are_those_of_the_textbook() {
        assert_eq!(of(&[]).line(), None);
        assert_eq!(of(&[3.0]).line(), None);
        assert_eq!(of(&[3.0, 5.0]).line(), Some((5.0, 2.0)));
        // Means 1 and 3; (-1)(-2) + 0 + 1·2 = 4 over 2: slope 2, and 3 + 2 at the end.
        assert_eq!(of(&[1.0, 3.0, 5.0]).line(), Some((5.0, 2.0)));
        // Means 1.5 and 2.5; (-1.5)(-1.5) + (-0.5)(0.5) + 0.5·(-0.5) + 1.5·1.5 = 4 over 5: 0.8, and 2.5 + 1.2.
        let (now, slope) = of(&[1.0, 3.0, 2.0, 4.0]).line().unwrap();
        assert!((now - 3.7).abs() < 1e-12 && (slope - 0.8).abs() < 1e-12);
    }

    #[test]
    fn growth_is_that_of_the_line_and_no_less_than_1() {
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(close(of(&[1.0, 3.0, 2.0, 4.0]).growth(2.0), 5.3 / 3.7));
        assert_eq!(of(&[5.0, 4.0]).growth(3.0), 1.0);
        assert_eq!(of(&[4.0, 4.0]).growth(100.0), 1.0);
        assert_eq!(of(&[0.0, 0.0]).growth(1.0), 1.0);
        // The line is at 0 or below at the end, although the series is not.
        assert_eq!(of(&[9.0, 0.0, 0.0]).growth(1.0), 1.0);
        assert_eq!(of(&[7.0]).growth(1.0), 1.0);
    }

    #[test]
    fn old_values_are_dropped() {
        let mut trend = Trend::new(2);
        for value in [100.0, 1.0, 2.0] {
            trend.push(value);
        }
        assert_eq!(trend.line(), Some((2.0, 1.0)));
        assert_eq!(Trend::new(0).capacity(), 2);
    }
}
