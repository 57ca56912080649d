//! Rates that an API key may use: requests and tokens per second, with bursts.
//!
//! A bucket is one number: the time at which it will be full again. Taking moves it on, giving back moves it back, and
//! time refills it without a thread. The clock is monotonic, so a change of the host's date changes nothing.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipstream_base::width::floor_u64;
use slipstream_planes::clock::monotonic_ns;

use crate::openai::ApiError;

/// Rates of a key as they are configured; `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct KeyRates {
    pub(crate) requests_per_s: Option<f64>,
    /// Requests at once; at least one.
    pub(crate) request_burst: Option<f64>,
    pub(crate) tokens_per_s: Option<f64>,
    /// Tokens at once.
    pub(crate) token_burst: Option<f64>,
}

/// Tokens at once, unless configured: those of this many seconds.
const TOKEN_BURST_S: f64 = 10.0;

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    ns_per_unit: f64,
    burst_ns: u64,
    /// When it is full (`CLOCK_MONOTONIC`, ns).
    full_at_ns: AtomicU64,
}

impl Bucket {
    fn new(per_s: f64, burst: f64) -> Bucket {
        let ns_per_unit = 1e9 / per_s;
        Bucket {
            ns_per_unit,
            burst_ns: floor_u64(burst * ns_per_unit),
            full_at_ns: AtomicU64::new(0),
        }
    }

    fn ns(&self, units: u64) -> u64 {
        floor_u64(units as f64 * self.ns_per_unit)
    }

    /// Takes `units` at `now_ns` if `fits` says so of the time that the bucket would need to be full again, before and
    /// after. Returns the time by which that grew, and otherwise how long it is.
    fn take(&self, now_ns: u64, units: u64, fits: impl Fn(u64, u64) -> bool) -> Result<u64, u64> {
        let ns = self.ns(units);
        let taken = self.full_at_ns.fetch_update(Relaxed, Relaxed, |full_at| {
            let from = full_at.max(now_ns);
            let to = from.saturating_add(ns);
            fits(from - now_ns, to - now_ns).then_some(to)
        });
        match taken {
            // Less than `ns` at the end of the clock's range.
            Ok(full_at) => Ok(ns.min(u64::MAX - full_at.max(now_ns))),
            Err(full_at) => Err(full_at.saturating_sub(now_ns)),
        }
    }

    /// Takes `units` if it has them all.
    ///
    /// # Errors
    /// The time until it has, ns.
    fn take_whole(&self, now_ns: u64, units: u64) -> Result<(), u64> {
        let taken = self.take(now_ns, units, |_, after| after <= self.burst_ns);
        taken.map(|_| ()).map_err(|used| {
            used.saturating_add(self.ns(units))
                .saturating_sub(self.burst_ns)
        })
    }

    /// Takes `units` if it has any, so that it may owe some. Returns the charge, ns.
    ///
    /// # Errors
    /// The time until it has one, ns.
    fn take_in_debt(&self, now_ns: u64, units: u64) -> Result<u64, u64> {
        let taken = self.take(now_ns, units, |before, _| before < self.burst_ns);
        taken.map_err(|used| {
            used.saturating_add(self.ns(1))
                .saturating_sub(self.burst_ns)
        })
    }

    /// Corrects a charge of `taken_ns`, what [`take_in_debt`](Self::take_in_debt) returned, to that of `used` units.
    fn settle(&self, now_ns: u64, taken_ns: u64, used: u64) {
        let used_ns = self.ns(used);
        let corrected = |full_at: u64| {
            Some(match used_ns.checked_sub(taken_ns) {
                Some(more) => full_at.max(now_ns).saturating_add(more),
                // Never more than was added, or a refused request would pay the debts of others.
                None => full_at.saturating_sub(taken_ns - used_ns),
            })
        };
        let _ = self.full_at_ns.fetch_update(Relaxed, Relaxed, corrected);
    }
}

/// An API key as its requests are counted.
#[derive(Debug)]
pub(crate) struct KeyUse {
    /// Name for logs and metrics; never the key.
    pub(crate) name: Box<str>,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    pub(crate) asked: AtomicU64,
    /// Answers of 429 by the rate of requests, and by that of tokens.
    pub(crate) limited: [AtomicU64; 2],
}

impl KeyUse {
    pub(crate) fn new(name: String, rates: KeyRates) -> KeyUse {
        let requests = rates.requests_per_s.map(|per_s| {
            let burst = rates.request_burst.unwrap_or(per_s);
            Bucket::new(per_s, burst.max(1.0))
        });
        let tokens = rates.tokens_per_s.map(|per_s| {
            let burst = rates.token_burst.unwrap_or(TOKEN_BURST_S * per_s);
            Bucket::new(per_s, burst)
        });
        KeyUse {
            name: name.into(),
            requests,
            tokens,
            asked: AtomicU64::new(0),
            limited: Default::default(),
        }
    }

    /// Whether tokens have to be counted.
    pub(crate) fn limits_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// A request has come.
    ///
    /// # Errors
    /// 429: it is one too many.
    pub(crate) fn admit(&self) -> Result<(), ApiError> {
        self.asked.fetch_add(1, Relaxed);
        let taken = self.requests.as_ref();
        let taken = taken.map_or(Ok(()), |bucket| bucket.take_whole(monotonic_ns(), 1));
        taken.map_err(|wait_ns| self.refuse(0, wait_ns))
    }

    /// A request for up to `tokens` is to begin. Returns its charge, for [`settle`](Self::settle).
    ///
    /// # Errors
    /// 429: earlier ones have used up the rate.
    pub(crate) fn charge(&self, tokens: u64) -> Result<u64, ApiError> {
        let taken = self.tokens.as_ref();
        let taken = taken.map_or(Ok(0), |bucket| bucket.take_in_debt(monotonic_ns(), tokens));
        taken.map_err(|wait_ns| self.refuse(1, wait_ns))
    }

    /// A request that was charged `taken_ns` has used `used` tokens.
    pub(crate) fn settle(&self, taken_ns: u64, used: u64) {
        if let Some(bucket) = &self.tokens {
            bucket.settle(monotonic_ns(), taken_ns, used);
        }
    }

    fn refuse(&self, which: usize, wait_ns: u64) -> ApiError {
        self.limited[which].fetch_add(1, Relaxed);
        let what = ["requests", "tokens"][which];
        let seconds = wait_ns.div_ceil(1_000_000_000).max(1);
        ApiError::rate_limited(what, &self.name, u32::try_from(seconds).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let bucket = Bucket::new(2.0, 3.0);
        let now = 1000 * S;
        for _ in 0..3 {
            assert_eq!(bucket.take_whole(now, 1), Ok(()));
        }
        assert_eq!(bucket.take_whole(now, 1), Err(S / 2));
        assert_eq!(bucket.take_whole(now + S / 2 - 1, 1), Err(1));
        assert_eq!(bucket.take_whole(now + S / 2, 1), Ok(()));
        // However long it rests, it holds no more than its burst.
        let later = now + 3600 * S;
        let taken = (0..10).filter(|_| bucket.take_whole(later, 1).is_ok());
        assert_eq!(taken.count(), 3);
        // A clock that goes back gives nothing, and takes nothing away for good.
        assert!(bucket.take_whole(now, 1).is_err());
        assert_eq!(bucket.take_whole(later + 2 * S, 3), Ok(()));
    }

    #[test]
    fn a_refused_charge_beyond_the_clock_pays_no_debts() {
        let bucket = Bucket::new(10.0, 100.0);
        let now = 1000 * S;
        assert_eq!(bucket.take_in_debt(now, 99), Ok(99 * S / 10));
        let taken = bucket.take_in_debt(now, u64::MAX).expect("one is left");
        assert_eq!(taken, u64::MAX - now - 99 * S / 10);
        bucket.settle(now, taken, 0);
        assert_eq!(bucket.take_in_debt(now, 1), Ok(S / 10));
        assert_eq!(bucket.take_in_debt(now, 1), Err(S / 10));
    }

    #[test]
    fn tokens_are_owed_and_settled() {
        let bucket = Bucket::new(100.0, 1000.0);
        let now = 1000 * S;
        // Longer than the burst, but served: it is paid for afterwards.
        assert_eq!(bucket.take_in_debt(now, 5000), Ok(50 * S));
        assert_eq!(bucket.take_in_debt(now, 1), Err(40 * S + S / 100));
        // It used little of that.
        bucket.settle(now, 50 * S, 500);
        assert_eq!(bucket.take_in_debt(now, 500), Ok(5 * S));
        assert!(bucket.take_in_debt(now, 1).is_err());
        assert_eq!(bucket.take_in_debt(now + S / 100, 0), Ok(0));
        bucket.settle(now, 0, 100);
        assert!(bucket.take_in_debt(now + S, 1).is_err());
        // More is given back than time has left to be repaid: no credit beyond the burst.
        let later = now + 3600 * S;
        assert_eq!(bucket.take_in_debt(later, 10), Ok(S / 10));
        bucket.settle(later + 3600 * S, S / 10, 0);
        assert_eq!(bucket.take_whole(later + 3600 * S, 1000), Ok(()));
        assert!(bucket.take_whole(later + 3600 * S, 1).is_err());
        // No number overflows.
        bucket.settle(later, 0, u64::MAX);
        assert!(bucket.take_in_debt(later, u64::MAX).is_err());
    }
}
