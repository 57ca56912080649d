//! Terms of a step of one running engine, fitted to its observed times.
//!
//! ```text
//!  step = base + prefill_token·p + prefill_pair·a + decode·D + context·C         (ns)
//!  time of a request outside of steps = api
//! ```
//!
//! An [`Observation`] is a time and the work that was done in it: one step, or many. [`fit`] solves for the
//! terms by least squares on relative errors, with weights that fall off for outliers and no negative term.
//! [`refine`] starts there and follows any model of the observed times, such as a simulation with queues.
//! [`jackknife`] states how sure each term is.

use thiserror::Error;

use crate::linear_algebra::solve;

/// Number of terms.
pub const COUNT: usize = 6;

/// Names of the terms in the order of [`Terms`], with what each multiplies.
pub const NAMES: [(&str, &str); COUNT] = [
    ("base_ns", "steps"),
    ("per_prefill_token_ns", "prompt tokens computed"),
    ("per_prefill_pair_ns", "(query, key) pairs of prompts"),
    ("per_decode_token_ns", "sequences in decode"),
    ("per_context_token_ns", "tokens of context in decode"),
    ("api_ns", "requests, outside of steps"),
];

/// A value for each term, ns.
pub type Terms = [f64; COUNT];

/// A time, and the work in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// How much of each term, in the order of [`NAMES`].
    pub work: [f64; COUNT],
    /// The time, s; above 0.
    pub seconds: f64,
    /// The part of the data that it is left out with, from 0.
    pub part: usize,
}

impl Observation {
    /// The time by `terms`, s.
    pub fn predicted(&self, terms: &Terms) -> f64 {
        dot(&self.work, terms) / 1e9
    }
}

/// Why terms cannot be fitted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ObservedError {
    /// Fewer observations than terms.
    #[error("{0} observations are too few for {COUNT} terms; record for longer")]
    Few(usize),
    /// No solution.
    #[error(
        "the observed times determine no terms; record loads that differ in length and concurrency"
    )]
    Singular,
}

fn dot(a: &[f64; COUNT], b: &[f64; COUNT]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Middle of `values` in size; 0 if there are none.
fn median(values: &mut [f64]) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// Spread of errors by their median: outliers, such as times when the host was busy with something else,
/// do not count. The floor is the resolution at which spread no longer matters.
fn spread(errors: impl Iterator<Item = f64>) -> f64 {
    const LEAST: f64 = 1e-3;
    let mut sizes: Vec<f64> = errors.map(f64::abs).collect();
    // A normal distribution's standard deviation over its median absolute value.
    (1.4826 * median(&mut sizes)).max(LEAST)
}

/// Weight of an error of `size` standard deviations (Cauchy).
fn weight(size: f64) -> f64 {
    1.0 / (1.0 + (size / 2.0).powi(2))
}

/// Fits the terms. Those that the data would make negative, or do not have, are 0.
///
/// # Errors
/// [`ObservedError`].
pub fn fit(observations: &[Observation]) -> Result<Terms, ObservedError> {
    if observations.len() <= COUNT {
        return Err(ObservedError::Few(observations.len()));
    }
    let mut weights = vec![1.0; observations.len()];
    let mut terms = [0.0; COUNT];
    for _ in 0..12 {
        terms = not_negative(observations, &weights)?;
        let errors = |o: &Observation| o.predicted(&terms) / o.seconds - 1.0;
        let spread = spread(observations.iter().map(errors));
        for (w, o) in weights.iter_mut().zip(observations) {
            *w = weight(errors(o) / spread);
        }
    }
    Ok(terms)
}

/// Least squares on relative errors over the terms that come out positive.
fn not_negative(observations: &[Observation], weights: &[f64]) -> Result<Terms, ObservedError> {
    let mut matrix = [[0.0; COUNT]; COUNT];
    let mut right = [0.0; COUNT];
    for (o, w) in observations.iter().zip(weights) {
        // Each row divided by its time: the error is relative.
        let row = o.work.map(|work| work / (o.seconds * 1e9));
        for i in 0..COUNT {
            right[i] += w * row[i];
            for j in 0..COUNT {
                matrix[i][j] += w * row[i] * row[j];
            }
        }
    }
    let mut used: Vec<usize> = (0..COUNT).filter(|&i| matrix[i][i] > 0.0).collect();
    loop {
        if used.is_empty() {
            return Err(ObservedError::Singular);
        }
        let n = used.len();
        // Columns of unit length, so that a ridge is the same share of each.
        let scale: Vec<f64> = used.iter().map(|&i| matrix[i][i].sqrt()).collect();
        const RIDGE: f64 = 1e-9;
        let mut a = vec![0.0; n * n];
        let mut b = vec![0.0; n];
        for (row, &i) in used.iter().enumerate() {
            b[row] = right[i] / scale[row];
            for (column, &j) in used.iter().enumerate() {
                a[row * n + column] = matrix[i][j] / (scale[row] * scale[column]);
            }
            a[row * n + row] += RIDGE;
        }
        if !solve(&mut a, &mut b) || b.iter().any(|x| !x.is_finite()) {
            return Err(ObservedError::Singular);
        }
        let worst = (0..n).min_by(|&i, &j| b[i].total_cmp(&b[j]));
        if let Some(at) = worst.filter(|&at| b[at] < 0.0) {
            used.remove(at);
            continue;
        }
        let mut terms = [0.0; COUNT];
        for (at, &i) in used.iter().enumerate() {
            terms[i] = b[at] / scale[at];
        }
        return Ok(terms);
    }
}

/// Slopes of the times that `model` predicts, by what has moved: `predicted` are those at `here`, and each part is changed by
/// `change` to both sides. None if the model has no answer.
fn slopes(
    predicted: &[f64],
    here: &[f64],
    change: f64,
    model: &mut dyn FnMut(&[f64]) -> Option<Vec<f64>>,
) -> Option<Vec<Vec<f64>>> {
    (0..here.len())
        .map(|j| {
            // Both sides: a jump on one of them is halved.
            let mut sides = [-change, change].map(|step| {
                let mut moved = here.to_vec();
                moved[j] += step;
                model(&moved)
            });
            let (low, high) = (sides[0].take()?, sides[1].take()?);
            let each = predicted.iter().zip(low.iter().zip(&high));
            // A jump is on one side only: the flatter side is the slope.
            let flatter = each.map(|(p, (l, h))| {
                let (left, right) = ((p - l) / change, (h - p) / change);
                if left.abs() < right.abs() {
                    left
                } else {
                    right
                }
            });
            Some(flatter.collect())
        })
        .collect()
}

/// Normal equations (matrix, right side) by slopes. `of` has the measurements that count: their places, their errors over
/// the spread of their kind, and that spread.
fn equations(
    slopes: &[Vec<f64>],
    of: impl Iterator<Item = (usize, f64, f64)>,
) -> (Vec<f64>, Vec<f64>) {
    let n = slopes.len();
    let mut matrix = vec![0.0; n * n];
    let mut right = vec![0.0; n];
    for (i, size, spread) in of {
        let w = weight(size);
        for j in 0..n {
            let x = slopes[j][i] / spread;
            right[j] -= w * x * size;
            for k in 0..n {
                matrix[j * n + k] += w * x * slopes[k][i] / spread;
            }
        }
    }
    (matrix, right)
}

/// Moves `start` until `model` predicts `measured` best. `model` gives the logarithms of times for terms,
/// or nothing if it has no answer; `uses` chooses the times that count. Times of one kind are spread alike,
/// `kind` numbers them. Terms that are 0 stay 0.
pub fn refine(
    start: &Terms,
    measured: &[f64],
    kind: &[usize],
    uses: &[bool],
    model: &mut dyn FnMut(&Terms) -> Option<Vec<f64>>,
) -> Terms {
    /// Standard deviation of the logarithm of a term around its start.
    const PRIOR: f64 = 0.7;
    /// Largest and least change of a term by which slopes are taken. Times of a simulation jump where a
    /// request just misses a step: close to the solution, a smaller change meets fewer jumps.
    const STEPS: [f64; 2] = [0.02, 0.0005];
    let free: Vec<usize> = (0..COUNT).filter(|&i| start[i] > 0.0).collect();
    let n = free.len();
    let at = |moved: &[f64]| {
        let mut terms = *start;
        for (&i, x) in free.iter().zip(moved) {
            terms[i] *= libm::exp(*x);
        }
        terms
    };
    let chosen: Vec<usize> = (0..measured.len()).filter(|&i| uses[i]).collect();
    let kinds = kind.iter().max().map_or(0, |most| most + 1);
    let Some(mut predicted) = model(start) else {
        return *start;
    };
    let mut here = vec![0.0; n];
    let mut change = STEPS[0];
    for _ in 0..24 {
        let error = |predicted: &[f64], i: usize| predicted[i] - measured[i];
        let spreads: Vec<f64> = (0..kinds)
            .map(|k| {
                let of_kind = chosen.iter().filter(|&&i| kind[i] == k);
                spread(of_kind.map(|&i| error(&predicted, i)))
            })
            .collect();
        let size = |predicted: &[f64], i: usize| error(predicted, i) / spreads[kind[i]];
        // Cauchy's cost, whose slope is that of the weights below.
        let cost = |predicted: &[f64], moved: &[f64]| {
            let data = chosen
                .iter()
                .map(|&i| 2.0 * libm::log1p((size(predicted, i) / 2.0).powi(2)));
            let held = moved.iter().map(|x| 0.5 * (x / PRIOR).powi(2));
            data.sum::<f64>() + held.sum::<f64>()
        };
        let slopes = slopes(&predicted, &here, change, &mut |moved| model(&at(moved)));
        let Some(slopes) = slopes else { break };
        let sized = chosen
            .iter()
            .map(|&i| (i, size(&predicted, i), spreads[kind[i]]));
        let (mut matrix, mut right) = equations(&slopes, sized);
        for j in 0..n {
            matrix[j * n + j] += PRIOR.powi(-2);
            right[j] -= here[j] * PRIOR.powi(-2);
        }
        let cost_here = cost(&predicted, &here);
        let mut damping = 1e-3;
        let mut better = false;
        for _ in 0..5 {
            let (mut a, mut step) = (matrix.clone(), right.clone());
            for j in 0..n {
                a[j * n + j] *= 1.0 + damping;
            }
            if !solve(&mut a, &mut step) {
                break;
            }
            let there: Vec<f64> = here
                .iter()
                .zip(&step)
                .map(|(x, s)| x + s.clamp(-0.5, 0.5))
                .collect();
            if let Some(found) = model(&at(&there)) {
                let cost_there = cost(&found, &there);
                if cost_there < cost_here {
                    better = cost_here - cost_there > 1e-4 * cost_here;
                    (here, predicted) = (there, found);
                    break;
                }
            }
            damping = damping.max(1e-2) * 10.0;
        }
        if !better {
            if change <= STEPS[1] {
                break;
            }
            change /= 4.0;
        }
    }
    at(&here)
}

/// Standard error of each term as a share of it, from fits that each left one part of the data out
/// (Tukey's jackknife). Infinite for a term of 0 that another fit has, 0 for one that none has.
pub fn jackknife(terms: &Terms, without: &[Terms]) -> Terms {
    let n = without.len() as f64;
    let mut errors = [f64::INFINITY; COUNT];
    for (i, error) in errors.iter_mut().enumerate() {
        let mean = without.iter().map(|t| t[i]).sum::<f64>() / n;
        let squares: f64 = without.iter().map(|t| (t[i] - mean).powi(2)).sum();
        let size = ((n - 1.0) / n * squares).sqrt();
        if size == 0.0 {
            *error = 0.0;
        } else if terms[i] > 0.0 {
            *error = size / terms[i];
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: Terms = [4e6, 3e4, 2.0, 2e5, 50.0, 6e6];

    /// Steps and requests of many kinds, by a linear congruential generator.
    fn observations(terms: &Terms) -> Vec<Observation> {
        let mut state = 1_u64;
        let mut draw = |most: f64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as f64 / (1_u64 << 31) as f64 * most
        };
        (0..400)
            .map(|i| {
                let (prompt, decodes) = (draw(1000.0).floor(), draw(16.0).floor());
                let alone = i % 4 == 0;
                let work = [
                    1.0,
                    prompt,
                    prompt * (prompt + 1.0) / 2.0,
                    if alone { 0.0 } else { decodes },
                    if alone { 0.0 } else { decodes * draw(800.0) },
                    if alone { 1.0 } else { 0.0 },
                ];
                let seconds = dot(&work, terms) / 1e9;
                Observation {
                    work,
                    seconds,
                    part: i % 5,
                }
            })
            .collect()
    }

    #[test]
    fn known_terms_come_back_with_outliers_among_the_times() {
        let mut observations = observations(&TRUE);
        // One in ten was interrupted for as long again, and more.
        for o in observations.iter_mut().step_by(10) {
            o.seconds *= 2.5;
        }
        let found = fit(&observations).unwrap();
        for (i, (found, expected)) in found.iter().zip(TRUE).enumerate() {
            assert!(
                (found / expected - 1.0).abs() < 0.01,
                "{i}: {found} {expected}"
            );
        }
    }

    #[test]
    fn a_term_that_costs_nothing_is_0_and_never_negative() {
        let mut terms = TRUE;
        terms[2] = 0.0;
        terms[4] = 0.0;
        let found = fit(&observations(&terms)).unwrap();
        assert!(found.iter().all(|x| *x >= 0.0), "{found:?}");
        assert!(found[2] < 0.01 && found[4] < 0.1, "{found:?}");
        assert!((found[0] / TRUE[0] - 1.0).abs() < 0.01);
    }

    #[test]
    fn too_little_is_refused() {
        let observations = observations(&TRUE);
        assert_eq!(fit(&observations[..6]), Err(ObservedError::Few(6)));
        let nothing = Observation {
            work: [0.0; COUNT],
            seconds: 1.0,
            part: 0,
        };
        assert_eq!(fit(&[nothing; 20]), Err(ObservedError::Singular));
    }

    /// Where all steps are alike, the jackknife knows that the terms are not.
    #[test]
    fn the_jackknife_tells_terms_that_the_data_holds_from_those_that_it_does_not() {
        let exact = observations(&TRUE);
        let without = |all: &[Observation]| -> Vec<Terms> {
            (0..5)
                .map(|part| {
                    let kept: Vec<Observation> =
                        all.iter().filter(|o| o.part != part).copied().collect();
                    fit(&kept).unwrap()
                })
                .collect()
        };
        let sure = jackknife(&fit(&exact).unwrap(), &without(&exact));
        assert!(sure.iter().all(|e| *e < 0.01), "{sure:?}");
        // The same with noise of 10 %, drawn apart for each.
        let mut noisy = exact;
        for (i, o) in noisy.iter_mut().enumerate() {
            o.seconds *= 1.0 + 0.1 * ((i * 7919 % 200) as f64 / 100.0 - 1.0);
        }
        let unsure = jackknife(&fit(&noisy).unwrap(), &without(&noisy));
        assert!(unsure.iter().any(|e| *e > 0.01), "{unsure:?}");
    }

    #[test]
    fn refining_follows_a_model_that_is_not_a_sum() {
        let rows = observations(&TRUE);
        let mut model = |terms: &Terms| {
            let times = rows.iter().map(|o| libm::log(o.predicted(terms).powf(1.1)));
            Some(times.collect::<Vec<f64>>())
        };
        let measured = model(&TRUE).unwrap();
        let mut start = TRUE;
        for (i, x) in start.iter_mut().enumerate() {
            *x *= if i % 2 == 0 { 1.3 } else { 0.75 };
        }
        let kinds = vec![0; measured.len()];
        let found = refine(
            &start,
            &measured,
            &kinds,
            &vec![true; measured.len()],
            &mut model,
        );
        for (found, expected) in found.iter().zip(TRUE) {
            assert!((found / expected - 1.0).abs() < 0.01, "{found} {expected}");
        }
    }
}
