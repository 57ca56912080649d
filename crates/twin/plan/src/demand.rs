//! The needs of a workload's requests, independent of the cluster.

use std::collections::{HashMap, HashSet};

use slipstream_base::{BlockHash, SimTime};
use slipstream_config::workload_file::Workload;
use slipstream_workload::prompt::answer_name;
use slipstream_workload::schedule::Shard;
use slipstream_workload::{Schedule, SourceError};

/// A request's need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Due time, if answers took no time.
    pub due: SimTime,
    /// Prompt tokens.
    pub input: u32,
    /// Of those, the most that any cache could hold; below `input`.
    pub cached: u32,
    /// Prompt tokens that repeat the begin of an earlier prompt, or the turn before.
    pub repeated: u32,
    /// Answer tokens.
    pub output: u32,
    /// Index of its class in the workload.
    pub class: u32,
}

/// The requests of a workload, in order of their due times.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// Shape `[requests]`.
    pub needs: Vec<Need>,
    /// Whether requests begin as others end, so that due times mean nothing.
    pub closed: bool,
    /// Whether requests may be due later than `due` says, as a session's turns are.
    pub follows: bool,
    /// Whether answers may be shorter than `output`, without `ignore_eos`.
    pub ends_early: bool,
}

/// Tokens per block when prefixes are compared: larger blocks than an engine's take less memory.
const BLOCK: u32 = 256;

/// Limit of requests that are read: beyond it, run times are hours.
pub const REQUESTS_MAX: usize = 20_000_000;

impl Demand {
    /// Reads a workload to its end, with answers that take no time.
    ///
    /// # Errors
    /// [`SourceError`] if a trace is absent, empty or malformed.
    pub fn of(workload: &Workload) -> Result<Demand, SourceError> {
        let mut seen: HashSet<BlockHash> = HashSet::new();
        // Prompt and answer of each session's last turn, which the next one repeats.
        let mut turns: HashMap<u64, u32> = HashMap::new();
        let mut demand = Demand::default();
        let closed = walk(workload, |request| {
            let input = request.prompt.tokens();
            let mut hits = 0;
            if let Ok(prompt) =
                request
                    .prompt
                    .to_blocks(BLOCK, BlockHash::default(), answer_name(request.id()))
            {
                let mut leading = true;
                for &block in prompt.blocks() {
                    leading &= !seen.insert(block);
                    hits += u32::from(leading);
                }
            }
            demand.follows |= request.has_next();
            demand.ends_early |= !request.ignore_eos;
            let before = if request.has_next() {
                turns.insert(request.session, input.saturating_add(request.output_len))
            } else {
                turns.remove(&request.session)
            };
            let repeated = (hits * BLOCK).max(before.unwrap_or(0));
            // Engines compare smaller blocks, and find up to one of ours more.
            let cached = repeated + BLOCK - 1;
            demand.needs.push(Need {
                due: request.due,
                input,
                cached: cached.min(input.saturating_sub(1)),
                repeated: repeated.min(input),
                output: request.output_len,
                class: request.class,
            });
            demand.needs.len() < REQUESTS_MAX
        })?;
        demand.closed = closed;
        Ok(demand)
    }

    /// From the first due time to the last, s.
    pub fn duration_s(&self) -> f64 {
        match (self.needs.first(), self.needs.last()) {
            (Some(first), Some(last)) => last.due.since(first.due) as f64 / 1e9,
            _ => 0.0,
        }
    }

    /// Mean prompt and answer, tokens.
    pub fn mean_lengths(&self) -> [f64; 2] {
        let count = self.needs.len().max(1) as f64;
        let sum = |of: fn(&Need) -> u32| self.needs.iter().map(|n| f64::from(of(n))).sum::<f64>();
        [sum(|n| n.input) / count, sum(|n| n.output) / count]
    }

    /// Share of the prompt tokens that repeat the begin of an earlier prompt, in blocks of 256 tokens, or
    /// the turn before.
    pub fn repeated_share(&self) -> f64 {
        let sum = |of: fn(&Need) -> u32| self.needs.iter().map(|n| f64::from(of(n))).sum::<f64>();
        sum(|n| n.repeated) / sum(|n| n.input).max(1.0)
    }

    /// Requests per class. Shape `[classes]`, at least 1.
    pub fn by_class(&self) -> Vec<u64> {
        count_classes(self.needs.iter().map(|need| need.class))
    }

    /// Start of the busiest part of `length_s`, s: the one with the highest sum of `weight`; the
    /// earliest of equal ones. Parts begin with a request.
    pub fn busiest(&self, length_s: f64, weight: impl Fn(&Need) -> f64) -> f64 {
        let length = SimTime::from_secs_f64(length_s).0;
        let (mut sum, mut most, mut best) = (0.0, f64::NEG_INFINITY, SimTime::ZERO);
        let mut end = 0;
        let last = self.needs.last().map_or(SimTime::ZERO, |need| need.due);
        for (at, first) in self.needs.iter().enumerate() {
            // Beyond this the part would be shorter.
            if at > 0 && first.due + length > last + 1 {
                break;
            }
            while let Some(need) = self.needs.get(end)
                && need.due < first.due + length
            {
                sum += weight(need);
                end += 1;
            }
            // Sums of other parts differ by rounding: a tie must not move by it.
            if sum > most * (1.0 + 1e-9) || most == f64::NEG_INFINITY {
                (most, best) = (sum, first.due);
            }
            sum -= weight(first);
        }
        best.as_secs_f64()
    }
}

/// Requests of a workload per class, without their prompts' blocks. Shape `[classes]`, at least 1.
///
/// # Errors
/// As [`Demand::of`].
pub fn count(workload: &Workload) -> Result<Vec<u64>, SourceError> {
    let mut classes = Vec::new();
    walk(workload, |request| {
        classes.push(request.class);
        classes.len() < REQUESTS_MAX
    })?;
    Ok(count_classes(classes.into_iter()))
}

fn count_classes(classes: impl Iterator<Item = u32>) -> Vec<u64> {
    let mut counts = vec![0];
    for class in classes {
        let at = class as usize;
        if at >= counts.len() {
            counts.resize(at + 1, 0);
        }
        counts[at] += 1;
    }
    counts
}

/// Passes every request to `each` until it returns false; answers take no time. Returns whether the
/// workload is a closed loop.
fn walk(
    workload: &Workload,
    mut each: impl FnMut(&slipstream_workload::Request) -> bool,
) -> Result<bool, SourceError> {
    let mut schedule = Schedule::open(workload, 0, Shard::WHOLE)?;
    let closed = schedule.is_closed();
    let mut now = SimTime::ZERO;
    // A closed loop that ends by its duration never gets there if answers take no time.
    let endless = closed && workload.requests.is_none() && workload.duration_s.is_some();
    if endless {
        return Ok(closed);
    }
    while let Some(due) = schedule.next_due(now)? {
        now = now.max(due);
        while let Some(request) = schedule.pop(now)? {
            let goes_on = each(&request);
            schedule.on_done(&request, request.output_len, request.due);
            if !goes_on {
                return Ok(closed);
            }
        }
    }
    Ok(closed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_config::doc::Doc;
    use slipstream_config::workload_file;

    fn workload(text: &str) -> Workload {
        let doc = Doc::parse("w.toml", text.as_bytes());
        workload_file::read(doc).unwrap().0
    }

    #[test]
    fn later_turns_may_be_cached_and_others_are_not() {
        let w = workload(
            "requests = 40\nisl = 3000\nosl = 100\n[arrival]\nkind = \"poisson\"\nrate_per_s = 2\n\
             [session]\nturns = 2\nuser_tokens = 50\n",
        );
        let demand = Demand::of(&w).unwrap();
        assert_eq!(demand.needs.len(), 40);
        assert_eq!(demand.by_class(), [40]);
        let (first, later): (Vec<&Need>, Vec<&Need>) =
            demand.needs.iter().partition(|n| n.input == 3000);
        assert_eq!((first.len(), later.len()), (20, 20));
        assert!(first.iter().all(|n| n.cached < BLOCK), "nothing is shared");
        // Of 20 prompts of 3,000 tokens and 20 of 3,150, each of the latter repeats 3,100.
        let repeated = f64::from(20 * 3100) / f64::from(20 * (3000 + 3150));
        assert!((demand.repeated_share() - repeated).abs() < 1e-9);
        assert!(later.iter().all(|n| n.input == 3150 && n.cached >= 3100));
        assert_eq!(count(&w).unwrap(), [40]);
    }

    #[test]
    fn the_busiest_part_is_found() {
        let need = |s: u64, input| Need {
            due: SimTime(s * 1_000_000_000),
            input,
            cached: 0,
            repeated: 0,
            output: 1,
            class: 0,
        };
        let demand = Demand {
            needs: (0..100)
                .map(|s| need(s, if (40..60).contains(&s) { 10 } else { 1 }))
                .collect(),
            ..Demand::default()
        };
        assert_eq!(demand.duration_s(), 99.0);
        let at = demand.busiest(20.0, |n| f64::from(n.input));
        assert_eq!(at, 40.0);
        assert_eq!(demand.busiest(1000.0, |n| f64::from(n.input)), 0.0);
        assert_eq!(Demand::default().busiest(1.0, |_| 1.0), 0.0);
    }
}
