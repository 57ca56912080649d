//! Wake-up latency of workers at a given load. Message threads distribute requests, which fall due as a
//! Poisson stream, to workers round robin; a worker computes and waits again. The stream does not wait
//! for the workers (open loop), so a slow scheduler increases latency and does not lower the load.

use std::hint::black_box;
use std::io;
use std::thread;

use hdrhistogram::Histogram;
use rustix::thread::clock_nanosleep_absolute;
use rustix::time::{ClockId, Timespec};
use serde::Serialize;
use slipstream_base::width::floor_u64;
use slipstream_cpusched::rng::Rng;

use crate::link::{Mechanism, Receiver, Sender, Stamp, cpu, link, now_ns};
use crate::wake::{Quantiles, histogram};

/// Parameters of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Wake-up mechanism.
    pub mechanism: Mechanism,
    /// Share of all CPUs' time that the workers' computing takes, percent.
    pub load_pct: u32,
    /// Number of CPUs that `load_pct` refers to.
    pub cpus: u32,
    /// Message threads.
    pub message_threads: u32,
    /// Workers per message thread.
    pub workers: u32,
    /// CPU time of a worker per request, us on a quiet CPU.
    pub work_us: u64,
    /// Duration, ms; requests of the first tenth are not counted.
    pub duration_ms: u64,
    /// Seed of the stream.
    pub seed: u64,
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoadResult {
    /// Wake-up mechanism.
    pub mechanism: Mechanism,
    /// Load offered, percent.
    pub load_pct: u32,
    /// From before a message thread's send to after the worker's receive, if the worker waited.
    pub wake: Quantiles,
    /// From a request's due time to its end.
    pub request: Quantiles,
    /// Requests completed per second.
    pub requests_per_s: f64,
    /// Wake-ups per second after which the worker ran on the message thread's CPU.
    pub hand_offs_per_s: f64,
    /// Requests that were not sent because a worker's queue was full.
    pub dropped: u64,
}

struct Tally {
    wake: Histogram<u64>,
    request: Histogram<u64>,
    same_cpu: u64,
}

/// Iterations of [`spin`] per microsecond.
fn calibrate() -> f64 {
    const N: u64 = 2_000_000;
    // The best of five: the others were interrupted.
    let best = (0..5)
        .map(|_| {
            let start = now_ns();
            spin(N);
            now_ns() - start
        })
        .min()
        .unwrap_or(1);
    N as f64 * 1e3 / best.max(1) as f64
}

/// Work with a fixed number of instructions, so that preemption does not shorten it.
fn spin(n: u64) {
    let mut x = 1u64;
    for i in 0..n {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i));
    }
    black_box(x);
}

/// Runs the load.
///
/// # Errors
/// If links or threads cannot be created, or a link breaks.
pub fn measure(spec: Spec) -> io::Result<LoadResult> {
    let per_us = calibrate();
    let work = floor_u64(spec.work_us as f64 * per_us);
    let start = now_ns();
    let counted_from = start + spec.duration_ms * 100_000;
    let end = start + spec.duration_ms * 1_000_000;
    let rate =
        f64::from(spec.load_pct) / 100.0 * f64::from(spec.cpus) / (spec.work_us as f64 * 1e3);
    let gap_ns = f64::from(spec.message_threads) / rate;
    let (mut messengers, mut workers) = (Vec::new(), Vec::new());
    for m in 0..spec.message_threads {
        let mut outs = Vec::new();
        for _ in 0..spec.workers {
            let (tx, rx) = link(spec.mechanism)?;
            outs.push(tx);
            let body = move || serve(rx, work, counted_from);
            workers.push(thread::Builder::new().name("worker".into()).spawn(body)?);
        }
        let seed = spec.seed ^ (u64::from(m) << 32);
        let body = move || dispatch(outs, seed, gap_ns, start, end);
        messengers.push(thread::Builder::new().name("message".into()).spawn(body)?);
    }
    let mut dropped = 0;
    for m in messengers {
        dropped += m.join().expect("a message thread does not panic")?;
    }
    let mut all = Tally {
        wake: histogram(),
        request: histogram(),
        same_cpu: 0,
    };
    for w in workers {
        let t = w.join().expect("a worker does not panic")?;
        all.wake
            .add(&t.wake)
            .expect("the histograms have the same bounds");
        all.request
            .add(&t.request)
            .expect("the histograms have the same bounds");
        all.same_cpu += t.same_cpu;
    }
    let seconds = (now_ns() - counted_from) as f64 / 1e9;
    Ok(LoadResult {
        mechanism: spec.mechanism,
        load_pct: spec.load_pct,
        wake: Quantiles::of(&all.wake),
        request: Quantiles::of(&all.request),
        requests_per_s: all.request.len() as f64 / seconds,
        hand_offs_per_s: all.same_cpu as f64 / seconds,
        dropped,
    })
}

fn serve(mut inbox: Receiver, work: u64, counted_from: u64) -> io::Result<Tally> {
    let mut t = Tally {
        wake: histogram(),
        request: histogram(),
        same_cpu: 0,
    };
    loop {
        let waiting_since = now_ns();
        let s = inbox.recv()?;
        if s == Stamp::STOP {
            return Ok(t);
        }
        let received = now_ns();
        // A message sent before the wait began woke no thread.
        if s.due_ns >= counted_from && s.at_ns > waiting_since {
            t.wake.saturating_record(received - s.at_ns);
            t.same_cpu += u64::from(cpu() == s.cpu);
        }
        spin(work);
        if s.due_ns >= counted_from {
            t.request
                .saturating_record(now_ns().saturating_sub(s.due_ns));
        }
    }
}

fn dispatch(
    mut outs: Vec<Sender>,
    seed: u64,
    gap_ns: f64,
    start: u64,
    end: u64,
) -> io::Result<u64> {
    let (mut rng, mut due, mut dropped) = (Rng::new(seed), start as f64, 0);
    for turn in 0.. {
        // libm, so that all hosts draw the same stream.
        due += -libm::log(1.0 - rng.unit()) * gap_ns;
        let due_ns = floor_u64(due);
        if due_ns >= end {
            break;
        }
        if due_ns > now_ns() {
            let until = Timespec {
                tv_sec: (due_ns / 1_000_000_000).cast_signed(),
                tv_nsec: (due_ns % 1_000_000_000).cast_signed(),
            };
            // EINTR sends a request early by the remaining time; the due time stays.
            let _ = clock_nanosleep_absolute(ClockId::Monotonic, &until);
        }
        let to = turn % outs.len();
        match outs[to].send(Stamp {
            due_ns,
            ..Stamp::here()
        }) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => dropped += 1,
            Err(e) => return Err(e),
        }
    }
    for out in &mut outs {
        out.send(Stamp::STOP)?;
    }
    Ok(dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_end_and_are_counted() {
        let spec = Spec {
            mechanism: Mechanism::Futex,
            load_pct: 20,
            cpus: 1,
            message_threads: 1,
            workers: 2,
            work_us: 100,
            duration_ms: 200,
            seed: 1,
        };
        let r = measure(spec).unwrap();
        // 2,000 per second for 0.18 s, Poisson; the bounds hold on a machine of any speed, because the
        // stream does not wait.
        assert!((250..500).contains(&r.request.count), "{r:?}");
        assert!(r.wake.count <= r.request.count && r.dropped == 0);
    }
}
