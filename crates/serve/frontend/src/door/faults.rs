//! Errors and broken streams by rate, for clients that are to be tested against them (`[live.faults]`).
//!
//! A request draws its fault from the seed and its number among the requests that arrive while faults are on. So
//! one client that sends its requests in turn meets the same faults in every run with a seed. Off, a request
//! costs one load.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use serde_json::json;
use slipstream_base::mix;
use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::FaultsConfig;
use tokio::time::Sleep;

use crate::openai::ApiError;

/// A stream breaks behind one of its first pieces.
const PIECES_MAX: u64 = 8;

/// A fault of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// 429 instead of an answer.
    TooMany,
    /// 500 instead of an answer.
    Internal,
    /// A stream that pauses behind so many pieces.
    Stall(u32, Duration),
    /// A stream whose connection is closed behind so many pieces.
    Cut(u32),
}

/// Names of the faults, as metrics and the admin API have them.
pub(crate) const FAULTS: [&str; 4] = ["429", "500", "stall", "cut"];

/// Rates of faults, and how many there were. All shards share it.
#[derive(Default)]
pub struct Faults {
    on: AtomicBool,
    rates: Mutex<FaultsConfig>,
    requests: AtomicU64,
    counts: [AtomicU64; FAULTS.len()],
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults")
            .field("rates", &self.rates())
            .finish_non_exhaustive()
    }
}

impl Faults {
    /// Faults with the rates of `config`, which owners of the admin key may change.
    pub fn new(config: FaultsConfig) -> Faults {
        let faults = Faults::default();
        faults.set(config);
        faults
    }

    fn lock(&self) -> MutexGuard<'_, FaultsConfig> {
        lock(&self.rates)
    }

    /// A copy: a guard within a longer expression would outlive the change that it is for.
    pub(crate) fn rates(&self) -> FaultsConfig {
        self.lock().clone()
    }

    /// New rates. Numbers of requests begin again.
    pub(crate) fn set(&self, config: FaultsConfig) {
        let on = config.rates().iter().any(|&rate| rate > 0.0);
        let mut rates = self.lock();
        *rates = config;
        self.requests.store(0, Relaxed);
        self.on.store(on, Relaxed);
    }

    /// The fault of a request that has just arrived.
    pub(crate) fn draw(&self) -> Option<Fault> {
        if !self.on.load(Relaxed) {
            return None;
        }
        let rates = self.lock();
        let number = self.requests.fetch_add(1, Relaxed);
        fault(&rates, number)
    }

    /// Counts a fault that a client gets.
    pub(crate) fn count(&self, fault: Fault) {
        let at = match fault {
            Fault::TooMany => 0,
            Fault::Internal => 1,
            Fault::Stall(..) => 2,
            Fault::Cut(_) => 3,
        };
        self.counts[at].fetch_add(1, Relaxed);
    }

    /// How many of each of [`FAULTS`] clients got.
    pub(crate) fn counts(&self) -> [u64; FAULTS.len()] {
        std::array::from_fn(|at| self.counts[at].load(Relaxed))
    }

    pub(crate) fn json(&self) -> Vec<u8> {
        let rates = self.rates();
        let counts = FAULTS.into_iter().zip(self.counts());
        let counts: serde_json::Map<_, _> = counts
            .map(|(name, count)| (name.into(), count.into()))
            .collect();
        json!({
            "error_429": rates.error_429,
            "error_500": rates.error_500,
            "stall": rates.stall,
            "stall_s": rates.stall_s,
            "cut": rates.cut,
            "seed": rates.seed,
            "injected": counts,
        })
        .to_string()
        .into_bytes()
    }
}

/// The fault of request `number`: at most one, each with its rate.
fn fault(rates: &FaultsConfig, number: u64) -> Option<Fault> {
    let drawn = mix::draw(mix::mix64(rates.seed), number);
    let mut point = mix::unit(drawn);
    let piece = 1 + to_u32(mix::below(mix::draw(drawn, 1), PIECES_MAX));
    let stall = Duration::from_secs_f64(rates.stall_s);
    let faults = [
        Fault::TooMany,
        Fault::Internal,
        Fault::Stall(piece, stall),
        Fault::Cut(piece),
    ];
    for (fault, rate) in faults.into_iter().zip(rates.rates()) {
        if point < rate {
            return Some(fault);
        }
        point -= rate;
    }
    None
}

/// The error that a fault is, if it is one.
pub(crate) fn error(fault: Fault) -> Option<ApiError> {
    const MESSAGE: &str = "a fault by rate, as `[live.faults]` or `/admin/faults` set it";
    let error = match fault {
        Fault::TooMany => ApiError::too_many(MESSAGE.into()),
        Fault::Internal => ApiError::failed(500, MESSAGE.into()),
        Fault::Stall(..) | Fault::Cut(_) => return None,
    };
    Some(ApiError {
        code: Some("injected_fault"),
        ..error
    })
}

/// A stream that is to stall or to break.
pub(crate) struct Breaking {
    left: u32,
    stall: Option<Duration>,
    sleep: Option<Pin<Box<Sleep>>>,
    fault: Fault,
    faults: Arc<Faults>,
}

impl Breaking {
    /// `None` if the fault is none of a stream's.
    pub(crate) fn new(fault: Fault, faults: &Arc<Faults>) -> Option<Breaking> {
        let (left, stall) = match fault {
            Fault::Stall(left, stall) => (left, Some(stall)),
            Fault::Cut(left) => (left, None),
            Fault::TooMany | Fault::Internal => return None,
        };
        Some(Breaking {
            left,
            stall,
            sleep: None,
            fault,
            faults: faults.clone(),
        })
    }

    /// Ready when the next piece may be asked for.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let (0, Some(stall)) = (self.left, self.stall) {
            let sleep = self.sleep.get_or_insert_with(|| {
                self.faults.count(self.fault);
                Box::pin(tokio::time::sleep(stall))
            });
            std::task::ready!(sleep.as_mut().poll(cx));
            self.stall = None; // once
            self.left = u32::MAX;
        }
        Poll::Ready(())
    }

    /// A piece came.
    ///
    /// # Errors
    /// The stream breaks instead. One that ends before has no fault, and counts as none.
    pub(crate) fn pass(&mut self) -> io::Result<()> {
        if self.left == 0 {
            self.faults.count(self.fault);
            return Err(io::Error::other("the stream breaks: a fault by rate"));
        }
        self.left -= 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates() -> FaultsConfig {
        FaultsConfig {
            error_429: 0.1,
            error_500: 0.2,
            stall: 0.05,
            cut: 0.15,
            seed: 3,
            ..FaultsConfig::default()
        }
    }

    #[test]
    fn faults_follow_from_the_seed_and_have_their_rates() {
        let faults = Faults::new(rates());
        let first: Vec<Option<Fault>> = (0..20_000).map(|_| faults.draw()).collect();
        faults.set(rates());
        assert!(
            first.iter().all(|fault| *fault == faults.draw()),
            "repeated"
        );
        faults.set(FaultsConfig { seed: 4, ..rates() });
        assert!(
            first.iter().any(|fault| *fault != faults.draw()),
            "another seed"
        );
        for fault in first.into_iter().flatten() {
            faults.count(fault);
        }
        for (count, rate) in faults.counts().into_iter().zip(rates().rates()) {
            // Five standard deviations of a binomial count.
            let (n, mean) = (20_000.0, 20_000.0 * rate);
            let deviation = (n * rate * (1.0 - rate)).sqrt();
            assert!(
                (count as f64 - mean).abs() < 5.0 * deviation,
                "{count} of {mean}"
            );
        }
        faults.set(FaultsConfig::default());
        assert_eq!(faults.draw(), None);
        let all = FaultsConfig {
            cut: 1.0,
            ..FaultsConfig::default()
        };
        assert!((0..1000).all(|number| matches!(fault(&all, number), Some(Fault::Cut(1..=8)))));
    }
}
