//! Locks that outlive a panic.
//!
//! A thread that panics while it holds a lock of the standard library poisons it. Code that holds a lock does not
//! panic, or leaves what the lock guards whole, and one failed request must not end all others: poison is ignored.

use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, poisoned or not.
#[inline]
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// The guard or the value, poisoned or not: of read and write locks, waits and unwrapped mutexes.
#[inline]
pub fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_under_a_lock_does_not_take_the_state_away() {
        let mutex = Mutex::new(1);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            *lock(&mutex) = 2;
            let _held = lock(&mutex);
            panic!("under the lock");
        }));
        assert!(panicked.is_err() && mutex.is_poisoned());
        assert_eq!(*lock(&mutex), 2);
        assert_eq!(unpoisoned(mutex.into_inner()), 2);
    }
}
