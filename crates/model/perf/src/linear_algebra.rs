//! Symmetric positive definite systems.

use thiserror::Error;

/// A system of equations that has no solution in floating point.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the fit has no finite solution; check ttft_ms, tpot_ms and the sizes for extreme values")]
pub struct FitError;

/// Solves `A x = b` for symmetric positive definite `a` (row-major, `n` by `n`, lower triangle
/// read) by Cholesky's method. Both are overwritten; `b` becomes `x`. `false` if `a` is not
/// positive definite.
pub(crate) fn solve(a: &mut [f64], b: &mut [f64]) -> bool {
    let n = b.len();
    debug_assert_eq!(a.len(), n * n);
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        let (above, rest) = a.split_at_mut(start * n);
        // Each row above is read once for the whole block.
        for j in 0..start {
            let other = &above[j * n..=j * n + j];
            for row in rest.chunks_exact_mut(n).take(end - start) {
                row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
            }
        }
        for i in start..end {
            let (above, rest) = a.split_at_mut(i * n);
            let row = &mut rest[..n];
            for j in start..i {
                let other = &above[j * n..=j * n + j];
                row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
            }
            let rest = row[i] - dot(&row[..i], &row[..i]);
            if rest.is_nan() || rest <= 0.0 {
                return false;
            }
            row[i] = rest.sqrt();
        }
    }
    for i in 0..n {
        let row = &a[i * n..i * n + i];
        let dot: f64 = row.iter().zip(&b[..i]).map(|(x, y)| x * y).sum();
        b[i] = (b[i] - dot) / a[i * n + i];
    }
    for i in (0..n).rev() {
        b[i] /= a[i * n + i];
        let x = b[i];
        for (j, value) in b[..i].iter_mut().enumerate() {
            *value -= a[i * n + j] * x;
        }
    }
    true
}

/// Rows that are eliminated together.
const BLOCK: usize = 16;

/// Sum of products, in eight interleaved sums: the compiler may not reorder one.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (x, y) in a.iter().zip(b) {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x * y;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_system_is_solved_and_an_indefinite_one_refused() {
        // A = [[4, 2, 0], [2, 5, 3], [0, 3, 6]], x = [1, -2, 3].
        let mut a = vec![4.0, 0.0, 0.0, 2.0, 5.0, 0.0, 0.0, 3.0, 6.0];
        let mut b = vec![0.0, 1.0, 12.0];
        assert!(solve(&mut a, &mut b));
        for (found, expected) in b.iter().zip([1.0, -2.0, 3.0]) {
            assert!((found - expected).abs() < 1e-12, "{b:?}");
        }
        assert!(!solve(&mut [1.0, 0.0, 2.0, 1.0], &mut [1.0, 1.0]));
    }

    #[test]
    fn systems_larger_than_a_block_are_solved() {
        for n in [BLOCK - 1, BLOCK, 3 * BLOCK + 5] {
            // Diagonally dominant, so positive definite.
            let at = |i: usize, j: usize| {
                if i == j {
                    2.0 * n as f64
                } else {
                    1.0 / (1.0 + i.abs_diff(j) as f64)
                }
            };
            let mut a: Vec<f64> = (0..n * n).map(|k| at(k / n, k % n)).collect();
            let expected: Vec<f64> = (0..n).map(|i| i as f64 - 3.0).collect();
            let mut b: Vec<f64> = (0..n)
                .map(|i| (0..n).map(|j| at(i, j) * expected[j]).sum())
                .collect();
            assert!(solve(&mut a, &mut b));
            for (found, expected) in b.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() < 1e-9,
                    "{n}: {found} for {expected}"
                );
            }
        }
    }
}
