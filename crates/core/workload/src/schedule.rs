//! Due times of requests, including follow-up turns and closed loops. The driver passes `now`.

use slipstream_base::SimTime;
use slipstream_base::width;
use slipstream_config::workload_file::{Arrival, Workload};

use crate::later::Later;
use crate::source::{Request, Source, SourceError};

/// The requests of a workload as they come due.
///
/// A driver calls [`next_due`](Self::next_due), waits until then, takes due requests with
/// [`pop`](Self::pop), and reports each end with [`on_done`](Self::on_done) or
/// [`on_failed`](Self::on_failed). Memory grows with the open sessions.
#[derive(Debug)]
pub struct Schedule {
    source: Source,
    shard: Shard,
    /// The first request of the next session.
    next_session: Option<Request>,
    exhausted: bool,
    /// Later turns whose due time is known, in the order in which they are handed out. With a lag that
    /// depends on the prompt, first turns that others may overtake, too.
    follow_ups: Later,
    /// Closed loop: number of sessions that may begin.
    slots: Option<u64>,
    /// Closed loop: no session begins after this time.
    closes: SimTime,
    /// Open loop: sessions begin in this part of the workload, which the schedule shifts to 0.
    window: std::ops::Range<SimTime>,
    /// Requests in flight.
    in_flight: u64,
    abandoned: u64,
    /// The shortest of `lags`.
    lag: Lag,
    /// By model; empty: all have the same.
    lags: Vec<Lag>,
}

/// Time from a request's due time until it is handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lag {
    /// Of each request, ns.
    pub request_ns: u64,
    /// Of each token of its prompt, ns: short prompts overtake long ones.
    pub prompt_token_ns: f64,
}

impl Lag {
    /// The shortest: of each part the least.
    fn least(lags: &[Lag]) -> Lag {
        let requests = lags.iter().map(|lag| lag.request_ns);
        let tokens = lags.iter().map(|lag| lag.prompt_token_ns);
        Lag {
            request_ns: requests.min().unwrap_or(0),
            prompt_token_ns: tokens.reduce(f64::min).unwrap_or(0.0),
        }
    }

    /// When `request` is handed out.
    fn release(&self, request: &Request) -> SimTime {
        let tokens = f64::from(request.prompt.tokens());
        let prompt_ns = width::round_u64(self.prompt_token_ns * tokens);
        let lag_ns = self.request_ns.saturating_add(prompt_ns);
        SimTime(request.due.0.saturating_add(lag_ns))
    }
}

/// First turns that are read ahead at most, to find those that overtake others.
const READ_AHEAD_MAX: usize = 1 << 14;

/// The sessions of one driver, if several share a workload: those whose number modulo `count` is
/// `index`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 0.
    pub index: u32,
    /// At least 1.
    pub count: u32,
}

impl Shard {
    /// All sessions.
    pub const WHOLE: Shard = Shard { index: 0, count: 1 };

    /// This shard's part of `total` equal items.
    pub fn part_of(self, total: u64) -> u64 {
        let (index, count) = (u64::from(self.index), u64::from(self.count));
        total / count + u64::from(index < total % count)
    }
}

impl Schedule {
    /// Schedules one shard of a workload. `salt` as in [`Source::open`].
    ///
    /// # Errors
    /// [`SourceError`] if a trace cannot be opened.
    pub fn open(workload: &Workload, salt: u64, shard: Shard) -> Result<Schedule, SourceError> {
        let slots = match workload.arrival {
            Arrival::Closed { concurrency } => Some(shard.part_of(u64::from(concurrency))),
            _ => None,
        };
        let closes = workload.duration_s.map_or(SimTime::MAX, |s| {
            SimTime::from_secs_f64(s / workload.time_scale)
        });
        let window = match (slots, workload.window_s) {
            (None, Some((from_s, length_s))) => {
                let from = SimTime::from_secs_f64(from_s);
                from..from + SimTime::from_secs_f64(length_s).0
            }
            _ => SimTime::ZERO..SimTime::MAX,
        };
        Ok(Schedule {
            window,
            source: Source::open(workload, salt)?,
            shard,
            next_session: None,
            exhausted: false,
            follow_ups: Later::default(),
            slots,
            closes,
            in_flight: 0,
            abandoned: 0,
            lag: Lag::default(),
            lags: Vec::new(),
        })
    }

    /// Hands requests out `lag` after they are due, if arrivals do not depend on answers. Their due
    /// times stay as they are. More than 16,384 requests that overtake each other keep the order in which
    /// they are due beyond that number.
    #[must_use]
    pub fn with_lag(mut self, lag: Lag) -> Schedule {
        if !self.is_closed() {
            self.lag = lag;
        }
        self
    }

    /// [`with_lag`](Self::with_lag), one for each model.
    #[must_use]
    pub fn with_lags(mut self, lags: &[Lag]) -> Schedule {
        self = self.with_lag(Lag::least(lags));
        if !self.is_closed() && lags.iter().any(|lag| *lag != self.lag) {
            self.lags = lags.to_vec();
        }
        self
    }

    /// When `request` is handed out.
    fn release(&self, request: &Request) -> SimTime {
        let of_model = self.lags.get(request.model as usize);
        of_model.unwrap_or(&self.lag).release(request)
    }

    /// Whether first turns may overtake others.
    fn reorders(&self) -> bool {
        self.lag.prompt_token_ns > 0.0 || !self.lags.is_empty()
    }

    /// Reads first turns until no later one can be handed out before the first of those.
    fn read_ahead(&mut self) -> Result<(), SourceError> {
        while self.follow_ups.len() < READ_AHEAD_MAX
            && let Some(due) = self.peek_session(SimTime::ZERO)?
        {
            let earliest = SimTime(due.0.saturating_add(self.lag.request_ns));
            if self.follow_ups.first().is_some_and(|at| at <= earliest) {
                break;
            }
            let request = self.next_session.take().expect("peek_session saw one");
            let release = self.release(&request);
            self.follow_ups.push(release, request);
        }
        Ok(())
    }

    /// When the next request is due. `None` if that depends on a request in flight, or if there are
    /// no more ([`is_over`](Self::is_over)).
    ///
    /// # Errors
    /// [`SourceError`] if the trace fails; no session begins after that.
    pub fn next_due(&mut self, now: SimTime) -> Result<Option<SimTime>, SourceError> {
        if self.reorders() {
            self.read_ahead()?;
            // Beyond the limit of reading ahead, a request may be late.
            let due = self.follow_ups.first().map(|release| release.max(now));
            return due.map(check_due).transpose();
        }
        let lag_ns = self.lag.request_ns;
        let session = self.peek_session(SimTime(now.0.saturating_sub(lag_ns)))?;
        let session = session.map(|due| SimTime(due.0.saturating_add(lag_ns)));
        let due = match (session, self.follow_ups.first()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        due.map(check_due).transpose()
    }

    /// Adds a request that is not of the workload: it is due at `request.due`, and no other follows from it.
    pub fn push(&mut self, request: Request) {
        self.follow_ups.push(request.due, request);
    }

    /// Takes a request that is due at `now`, the earliest first.
    ///
    /// # Errors
    /// As [`next_due`](Self::next_due).
    pub fn pop(&mut self, now: SimTime) -> Result<Option<Request>, SourceError> {
        if self.reorders() {
            self.read_ahead()?;
            if self.follow_ups.first().is_none_or(|at| at > now) {
                return Ok(None);
            }
            self.in_flight += 1;
            return Ok(self.follow_ups.pop());
        }
        let lag_ns = self.lag.request_ns;
        let session = match now.0.checked_sub(lag_ns).map(SimTime) {
            None => None,
            Some(now) => self.peek_session(now)?.filter(|due| *due <= now),
        };
        let follow_up = self.follow_ups.first().filter(|&at| at <= now);
        let request = match (session, follow_up) {
            (session, Some(at))
                if session.is_none_or(|due| at.0 <= due.0.saturating_add(lag_ns)) =>
            {
                self.follow_ups.pop().expect("there is a first")
            }
            (Some(due), _) => {
                let mut request = self.next_session.take().expect("peek_session saw one");
                request.due = due;
                if let Some(slots) = &mut self.slots {
                    *slots -= 1;
                }
                request
            }
            (None, _) => return Ok(None),
        };
        self.in_flight += 1;
        Ok(Some(request))
    }

    /// Reports that a request was answered with `answer_tokens` tokens, the last one at `now`.
    /// Returns whether the session continues.
    pub fn on_done(&mut self, request: &Request, answer_tokens: u32, now: SimTime) -> bool {
        self.in_flight -= 1;
        // The source counts time from the start of the workload, not from that of the window.
        let shift = self.window.start;
        let next = self.source.follow_up(request, answer_tokens, now + shift.0);
        if let Some(mut next) = next {
            next.due = SimTime(next.due.0 - shift.0);
            let release = self.release(&next);
            self.follow_ups.push(release, next);
            true
        } else {
            self.end_session();
            false
        }
    }

    /// Reports that a request failed. Its session ends, because the next turn needs the answer.
    pub fn on_failed(&mut self, request: &Request) {
        self.in_flight -= 1;
        self.abandoned += u64::from(request.turns - request.turn - 1);
        self.source.forget(request.session);
        self.end_session();
    }

    /// Begins no more sessions and drops pending later turns; those in flight may end.
    pub fn stop(&mut self) {
        self.exhausted = true;
        self.next_session = None;
        for request in self.follow_ups.take_all() {
            // Those that were read ahead begin sessions.
            if request.turn > 0 {
                self.abandoned += u64::from(request.turns - request.turn);
            }
        }
    }

    /// Whether every request has ended and no more will come.
    pub fn is_over(&self) -> bool {
        self.exhausted
            && self.next_session.is_none()
            && self.follow_ups.is_empty()
            && self.in_flight == 0
    }

    /// Whether sessions begin as others end.
    pub fn is_closed(&self) -> bool {
        self.slots.is_some()
    }

    /// Whether requests may follow from the answers to others.
    ///
    /// # Errors
    /// [`SourceError`] if the trace fails at its first line.
    pub fn may_follow_up(&mut self) -> Result<bool, SourceError> {
        // The first line decides this for a trace.
        self.peek_session(SimTime::ZERO)?;
        Ok(self.source.may_follow_up())
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Later turns that were never due, because an earlier one failed or the run was stopped.
    pub fn abandoned(&self) -> u64 {
        self.abandoned
    }

    /// Lines of the trace skipped as bad so far.
    pub fn skipped_lines(&self) -> u64 {
        self.source.skipped_lines()
    }

    fn end_session(&mut self) {
        if let Some(slots) = &mut self.slots {
            *slots += 1;
        }
    }

    /// When the next session begins, if it may.
    fn peek_session(&mut self, now: SimTime) -> Result<Option<SimTime>, SourceError> {
        if self.slots.is_some() && now >= self.closes {
            self.exhausted = true;
            self.next_session = None;
        }
        while self.next_session.is_none() && !self.exhausted {
            match self.source.next() {
                None => self.exhausted = true,
                Some(Err(error)) => {
                    self.exhausted = true;
                    return Err(error);
                }
                Some(Ok(request)) if self.slots.is_none() && request.due < self.window.start => {
                    self.source.forget(request.session);
                }
                // Times saturate at the end of a schedule without a window, where they are an error.
                Some(Ok(request))
                    if self.slots.is_none()
                        && request.due >= self.window.end
                        && self.window.end < SimTime::MAX =>
                {
                    self.exhausted = true;
                }
                Some(Ok(mut request)) => {
                    request.due = SimTime(request.due.0 - self.window.start.0);
                    if request.session % u64::from(self.shard.count) == u64::from(self.shard.index)
                    {
                        self.next_session = Some(request);
                    } else {
                        self.source.forget(request.session);
                    }
                }
            }
        }
        let Some(request) = &self.next_session else {
            return Ok(None);
        };
        Ok(match self.slots {
            None => Some(request.due),
            Some(0) => None,
            // A slot is free: due now.
            Some(_) => Some(now),
        })
    }
}

/// Times are 64 bits of ns, 584 years, and saturate at that end.
fn check_due(due: SimTime) -> Result<SimTime, SourceError> {
    const CENTURY_S: f64 = 100.0 * 365.25 * 86_400.0;
    let due_s = due.as_secs_f64();
    if due_s > CENTURY_S {
        return Err(SourceError::Late { due_s });
    }
    Ok(due)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use slipstream_config::workload_file::{Class, Content, Dist, SessionShape};

    fn workload(arrival: Arrival, requests: u64, turns: f64) -> Workload {
        let session = SessionShape {
            turns: Dist::Exact(turns),
            think_time_s: Dist::Exact(1.0),
            ..SessionShape::default()
        };
        Workload {
            seed: 1,
            requests: Some(requests),
            duration_s: None,
            time_scale: 1.0,
            window_s: None,
            served_models: Vec::new(),
            arrival,
            content: Content::Generated(vec![Class {
                session,
                ..Class::default()
            }]),
        }
    }

    /// Runs a schedule against a server that answers each request after `service_ns`, and returns
    /// `(name, due, in flight when taken)` of each.
    fn drive(workload: &Workload, shard: Shard, service_ns: u64) -> Vec<(String, u64, u64)> {
        let mut schedule = Schedule::open(workload, 0, shard).unwrap();
        let mut served: BTreeMap<(SimTime, u64), Request> = BTreeMap::new();
        let (mut now, mut log) = (SimTime::ZERO, Vec::new());
        while !schedule.is_over() {
            while let Some(request) = schedule.pop(now).unwrap() {
                log.push((request.name(), request.due.0, schedule.in_flight()));
                served.insert((now + service_ns, request.id().0), request);
            }
            let due = schedule.next_due(now).unwrap();
            let done = served.keys().next().map(|k| k.0);
            let Some(next) = due.into_iter().chain(done).min() else {
                break;
            };
            now = next;
            while let Some(entry) = served.first_entry().filter(|e| e.key().0 <= now) {
                let request = entry.remove();
                schedule.on_done(&request, request.output_len, now);
            }
        }
        assert!(schedule.is_over());
        log
    }

    #[test]
    fn a_closed_loop_keeps_its_concurrency() {
        let log = drive(
            &workload(Arrival::Closed { concurrency: 3 }, 10, 1.0),
            Shard::WHOLE,
            100,
        );
        assert_eq!(log.len(), 10);
        let due: Vec<u64> = log.iter().map(|l| l.1).collect();
        assert_eq!(due, [0, 0, 0, 100, 100, 100, 200, 200, 200, 300]);
        assert!(log.iter().all(|l| l.2 <= 3));
    }

    #[test]
    fn a_request_of_the_next_century_is_an_error() {
        let check = |w: &Workload| {
            let mut schedule = Schedule::open(w, 0, Shard::WHOLE).unwrap();
            let first = schedule.pop(SimTime::ZERO).unwrap().unwrap();
            schedule.on_done(&first, 1, SimTime(5));
            let error = schedule.next_due(SimTime(5)).unwrap_err().to_string();
            assert!(error.contains("more than a century"), "{error}");
        };
        let slow = Arrival::Constant { rate_per_s: 1e-300 };
        check(&workload(slow, 3, 1.0));
        let constant = Arrival::Constant { rate_per_s: 1.0 };
        let mut stretched = workload(constant, 3, 1.0);
        stretched.time_scale = 1e-300;
        check(&stretched);
        // Think times, too.
        let mut thoughtful = workload(Arrival::Closed { concurrency: 1 }, 2, 2.0);
        thoughtful.time_scale = 1e-20;
        check(&thoughtful);
    }

    #[test]
    fn a_window_has_its_sessions_and_begins_at_zero() {
        let mut w = workload(Arrival::Constant { rate_per_s: 10.0 }, 20, 2.0);
        let whole = drive(&w, Shard::WHOLE, 100_000_000);
        w.window_s = Some((0.2, 0.3));
        let part = drive(&w, Shard::WHOLE, 100_000_000);
        let shifted: Vec<(String, u64)> = whole
            .into_iter()
            .filter(|(name, ..)| ["2.", "3.", "4."].iter().any(|of| name.starts_with(of)))
            .map(|(name, due, _)| (name, due - 200_000_000))
            .collect();
        assert_eq!(shifted.len(), 6, "two turns each");
        let part: Vec<(String, u64)> = part.into_iter().map(|l| (l.0, l.1)).collect();
        assert_eq!(part, shifted);
        // Sessions of a closed loop begin when others end, at no time of their own.
        let mut closed = workload(Arrival::Closed { concurrency: 1 }, 4, 2.0);
        let whole = drive(&closed, Shard::WHOLE, 100);
        closed.window_s = Some((100.0, 1.0));
        assert_eq!(drive(&closed, Shard::WHOLE, 100), whole);
    }

    /// Drives `w` with `lag`, and returns name, due time and time of being handed out of each request, ms.
    fn handed_out(w: &Workload, lag: Lag, service_ns: u64) -> Vec<(String, u64, u64)> {
        let mut schedule = Schedule::open(w, 0, Shard::WHOLE).unwrap().with_lag(lag);
        let mut served: BTreeMap<(SimTime, u64), Request> = BTreeMap::new();
        let mut log = Vec::new();
        loop {
            let now = log.last().map_or(0, |(_, _, at): &(String, u64, u64)| *at);
            let due = schedule.next_due(SimTime(now)).unwrap();
            let done = served.keys().next().map(|k| k.0);
            let Some(next) = due.into_iter().chain(done).min() else {
                break;
            };
            if done.is_some_and(|done| done <= next) {
                let ((at, _), request) = served.pop_first().unwrap();
                schedule.on_done(&request, request.output_len, at);
                continue;
            }
            while let Some(request) = schedule.pop(next).unwrap() {
                log.push((request.name(), request.due.0, next.0));
                served.insert((next + service_ns, request.id().0), request);
            }
        }
        assert!(schedule.is_over());
        log
    }

    #[test]
    fn each_request_is_handed_out_after_the_lag_of_its_prompt_and_short_ones_overtake() {
        let mut w = workload(Arrival::Constant { rate_per_s: 1000.0 }, 400, 2.0);
        let Content::Generated(classes) = &mut w.content else {
            unreachable!()
        };
        classes[0].isl = Dist::Uniform {
            min: 100.0,
            max: 5_000.0,
        };
        let lag = Lag {
            request_ns: 2_000_000,
            prompt_token_ns: 10_000.0,
        };
        // The prompts, from a schedule without a lag.
        let mut tokens = BTreeMap::new();
        let mut plain = Schedule::open(&w, 0, Shard::WHOLE).unwrap();
        let mut now = SimTime::ZERO;
        while let Some(due) = plain.next_due(now).unwrap() {
            now = due;
            while let Some(request) = plain.pop(now).unwrap() {
                tokens.insert(request.name(), request.prompt.tokens());
                plain.on_done(&request, request.output_len, now);
            }
        }
        let log = handed_out(&w, lag, 30_000_000);
        assert_eq!(log.len(), 400);
        for (name, due, at) in &log {
            assert_eq!(
                at - due,
                2_000_000 + 10_000 * u64::from(tokens[name]),
                "{name}"
            );
        }
        assert!(log.is_sorted_by_key(|(_, _, at)| *at));
        let overtaken = log.windows(2).filter(|pair| pair[1].1 < pair[0].1).count();
        assert!(overtaken > 50, "{overtaken}");
        // The part per request alone moves all requests by the same time.
        let constant = Lag {
            prompt_token_ns: 0.0,
            ..lag
        };
        for (_, due, at) in handed_out(&w, constant, 30_000_000) {
            assert_eq!(at - due, 2_000_000);
        }
    }

    #[test]
    fn an_endless_burst_is_read_ahead_up_to_a_limit() {
        let mut w = workload(Arrival::Constant { rate_per_s: 1e300 }, 1, 1.0);
        w.requests = Some(u64::MAX);
        let lag = Lag {
            request_ns: 0,
            prompt_token_ns: 1000.0,
        };
        let mut schedule = Schedule::open(&w, 0, Shard::WHOLE).unwrap().with_lag(lag);
        let mut now = SimTime::ZERO;
        for _ in 0..100 {
            let due = schedule.next_due(now).unwrap().unwrap();
            assert!(due >= now);
            now = due;
            assert!(schedule.pop(now).unwrap().is_some());
        }
        assert!(schedule.follow_ups.len() <= READ_AHEAD_MAX);
    }

    #[test]
    fn an_open_loop_does_not_wait_for_answers() {
        let w = workload(Arrival::Constant { rate_per_s: 10.0 }, 5, 1.0);
        let log = drive(&w, Shard::WHOLE, 1_000_000_000_000);
        let due: Vec<u64> = log.iter().map(|l| l.1 / 1_000_000).collect();
        assert_eq!(due, [0, 100, 200, 300, 400]);
        assert_eq!(log[4].2, 5);
    }

    #[test]
    fn a_turn_waits_for_the_answer_and_the_think_time() {
        let w = workload(Arrival::Closed { concurrency: 1 }, 4, 2.0);
        let log = drive(&w, Shard::WHOLE, 500_000_000);
        let seen: Vec<(&str, u64)> = log.iter().map(|l| (&*l.0, l.1 / 1_000_000)).collect();
        // The slot belongs to the session: session 1 begins when session 0 has ended.
        assert_eq!(
            seen,
            [("0.0", 0), ("0.1", 1_500), ("1.0", 2_000), ("1.1", 3_500)]
        );
    }

    #[test]
    fn shards_part_the_sessions_and_the_slots() {
        let w = workload(Arrival::Closed { concurrency: 5 }, 12, 2.0);
        let mut names = Vec::new();
        for index in 0..2 {
            let log = drive(&w, Shard { index, count: 2 }, 10);
            assert!(log.iter().all(|l| l.2 <= 3 - u64::from(index)));
            names.extend(log.into_iter().map(|l| l.0));
        }
        names.sort();
        let mut whole: Vec<_> = drive(&w, Shard::WHOLE, 10)
            .into_iter()
            .map(|l| l.0)
            .collect();
        whole.sort();
        assert_eq!(names, whole);
    }

    #[test]
    fn a_failure_ends_the_session_and_counts_its_turns() {
        let w = workload(Arrival::Closed { concurrency: 1 }, 8, 4.0);
        let mut schedule = Schedule::open(&w, 0, Shard::WHOLE).unwrap();
        let first = schedule.pop(SimTime(0)).unwrap().unwrap();
        assert_eq!(schedule.pop(SimTime(0)).unwrap(), None);
        schedule.on_failed(&first);
        assert_eq!(schedule.abandoned(), 3);
        assert_eq!(schedule.pop(SimTime(0)).unwrap().unwrap().name(), "1.0");
    }

    #[test]
    fn a_closed_loop_ends_with_its_duration() {
        let mut w = workload(Arrival::Closed { concurrency: 1 }, 1_000, 1.0);
        w.duration_s = Some(1.0);
        let log = drive(&w, Shard::WHOLE, 300_000_000);
        assert_eq!(log.len(), 4); // at 0, 0.3, 0.6 and 0.9 s
    }

    #[test]
    fn stopping_drops_what_waits() {
        let w = workload(Arrival::Closed { concurrency: 1 }, 8, 4.0);
        let mut schedule = Schedule::open(&w, 0, Shard::WHOLE).unwrap();
        let first = schedule.pop(SimTime(0)).unwrap().unwrap();
        assert!(schedule.on_done(&first, 1, SimTime(1)));
        schedule.stop();
        assert!(schedule.is_over());
        assert_eq!(schedule.abandoned(), 3);
    }
}
