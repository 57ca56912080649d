//! Symmetric positive definite systems.

/// Solves `A x = b` for symmetric positive definite `a` (row-major, `n` by `n`, lower triangle
/// read) by Cholesky's method. Both are overwritten; `b` becomes `x`. `false` if `a` is not
/// positive definite.
pub(crate) fn solve(a: &mut [f64], b: &mut [f64]) -> bool {
    let n = b.len();
    debug_assert_eq!(a.len(), n * n);
    for i in 0..n {
        let (above, rest) = a.split_at_mut(i * n);
        let row = &mut rest[..n];
        for j in 0..i {
            let other = &above[j * n..j * n + j];
            let dot: f64 = row[..j].iter().zip(other).map(|(x, y)| x * y).sum();
            row[j] = (row[j] - dot) / above[j * n + j];
        }
        let square: f64 = row[..i].iter().map(|x| x * x).sum();
        let rest = row[i] - square;
        if rest.is_nan() || rest <= 0.0 {
            return false;
        }
        row[i] = rest.sqrt();
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
}
