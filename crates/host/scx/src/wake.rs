//! Latency of waking a thread.

use std::io;
use std::thread;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::link::{Mechanism, Stamp, cpu, link, now_ns};

/// Parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Wake-up mechanism.
    pub mechanism: Mechanism,
    /// Wake-ups measured.
    pub rounds: u32,
    /// Wake-ups before the measurement, in which a scheduler may learn.
    pub warmup: u32,
    /// The waker computes this long after each wake-up before it waits, us. A scheduler that
    /// follows the sync hint then keeps the wakee waiting.
    pub linger_us: u64,
}

/// A distribution of durations, us.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Samples.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// Largest.
    pub max_us: f64,
}

impl Quantiles {
    /// The quantiles of a histogram of ns.
    pub fn of(h: &Histogram<u64>) -> Quantiles {
        let us = |ns: u64| ns as f64 / 1e3;
        Quantiles {
            count: h.len(),
            mean_us: h.mean() / 1e3,
            p50_us: us(h.value_at_quantile(0.5)),
            p99_us: us(h.value_at_quantile(0.99)),
            p99_9_us: us(h.value_at_quantile(0.999)),
            max_us: us(h.max()),
        }
    }
}

pub(crate) fn histogram() -> Histogram<u64> {
    // Three digits from 1 ns to 100 s; longer times count as 100 s.
    Histogram::new_with_bounds(1, 100_000_000_000, 3).expect("the bounds and digits are allowed")
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WakeResult {
    /// Wake-up mechanism.
    pub mechanism: Mechanism,
    /// CPU time of the waker after each wake-up, us.
    pub linger_us: u64,
    /// From before the waker's send to after the wakee's receive.
    pub latency: Quantiles,
    /// Wake-ups after which the wakee ran on its waker's CPU.
    pub same_cpu: u64,
    /// The same per second.
    pub hand_offs_per_s: f64,
}

/// Two threads: one wakes the other, computes for a while, and waits for the answer.
///
/// # Errors
/// If a link cannot be created or breaks.
pub fn measure(spec: Spec) -> io::Result<WakeResult> {
    let (mut ask, mut asked) = link(spec.mechanism)?;
    let (mut answer, mut answered) = link(spec.mechanism)?;
    let wakee = thread::Builder::new().name("wakee".into()).spawn(move || {
        let (mut latency, mut same_cpu, mut seen, mut began) = (histogram(), 0u64, 0u32, 0);
        loop {
            let s = asked.recv()?;
            if s == Stamp::STOP {
                return Ok((latency, same_cpu, now_ns() - began));
            }
            let took = now_ns().saturating_sub(s.at_ns);
            if seen == spec.warmup {
                began = now_ns();
            }
            if seen >= spec.warmup {
                latency.saturating_record(took);
                same_cpu += u64::from(cpu() == s.cpu);
            }
            seen += 1;
            answer.send(Stamp::here())?;
        }
    })?;
    let waker = thread::Builder::new().name("waker".into()).spawn(move || {
        for _ in 0..spec.warmup + spec.rounds {
            ask.send(Stamp::here())?;
            let until = now_ns() + spec.linger_us * 1_000;
            while spec.linger_us > 0 && now_ns() < until {
                std::hint::spin_loop();
            }
            answered.recv()?;
        }
        ask.send(Stamp::STOP)
    })?;
    waker.join().expect("the waker does not panic")?;
    let (latency, same_cpu, took_ns): (Histogram<u64>, u64, u64) = wakee
        .join()
        .expect("the wakee does not panic")
        .map_err(|e: io::Error| e)?;
    Ok(WakeResult {
        mechanism: spec.mechanism,
        linger_us: spec.linger_us,
        latency: Quantiles::of(&latency),
        same_cpu,
        hand_offs_per_s: same_cpu as f64 * 1e9 / took_ns.max(1) as f64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_after_the_warm_up_are_counted() {
        let spec = Spec {
            mechanism: Mechanism::Pipe,
            rounds: 50,
            warmup: 7,
            linger_us: 0,
        };
        let r = measure(spec).unwrap();
        assert_eq!(r.latency.count, 50);
        assert!(r.same_cpu <= 50 && r.latency.p50_us > 0.0 && r.latency.max_us >= r.latency.p99_us);
    }
}
