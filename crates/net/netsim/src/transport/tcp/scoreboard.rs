//! The scoreboard of a sender: which segments have arrived, are lost, or are under way.
//!
//! RFC 6675 keeps the SACKed ranges and derives the rest from them; RFC 8985 also needs when each segment was sent.
//! So there is an entry per unacknowledged segment, which is at most a window of them. Retransmissions repeat a segment
//! as it was sent first.
//!
//! Work per ACK, apart from a logarithm for each range: each segment arrives once, and is judged once per transmission.
//! An original is judged in the order of bytes from [`Scoreboard::judged`] on, a retransmission in the order of time, so
//! neither needs a search.

use std::collections::VecDeque;

use crate::transport::congestion::Sent;

/// SACKed ranges, or segments, beyond a hole that show its loss (RFC 6675 section 2: DupThresh).
const DUPLICATES: usize = 3;

/// A segment that is not acknowledged yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) end: u64,
    /// When it was sent last, ns.
    pub(super) sent_at: u64,
    pub(super) size: u32,
    /// It arrived, according to an option.
    sacked: bool,
    /// It counts as lost, and its retransmission was not sent.
    lost: bool,
    pub(super) resent: bool,
}

/// A transmission: when, and the end of its segment. The order decides between those of one moment (RFC 8985 section
/// 6.1: `RACK_sent_after`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Transmission {
    pub(super) at: u64,
    pub(super) end: u64,
}

/// What an ACK reports as delivered for the first time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivered {
    pub(super) bytes: u64,
    /// The segment among them that was sent last, and whether that was a retransmission.
    pub(super) newest: Option<(Transmission, bool)>,
    /// As `newest`, of those that were sent once.
    pub(super) newest_original: Option<Transmission>,
    /// When the first of them was sent, if all were sent once: the beginning of a measured round trip. (A segment may
    /// have waited for a retransmission, if the ACK with its range was lost.)
    pub(super) measured_from: Option<u64>,
    /// A segment arrived after one beyond it, though it was sent once (RFC 8985 section 6.2 step 4).
    pub(super) reordered: bool,
    /// The state of the rate sampler when `newest` was sent.
    pub(super) sample: Option<Sent>,
}

/// Time limit of [`Scoreboard::judge_by_time`]: what was sent before `newest` is lost after `wait_ns`.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeLimit {
    pub(super) newest: Transmission,
    /// Round trip and reordering window.
    pub(super) wait_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    /// In the order of bytes.
    segments: VecDeque<Segment>,
    /// By segment: the rate sampler's state when it was sent. Empty unless the congestion control has one.
    samples: VecDeque<Sent>,
    /// SACKed ranges: disjoint, ascending.
    ranges: Vec<(u64, u64)>,
    sacked_segments: usize,
    /// RFC 6675's pipe: bytes that are neither SACKed nor lost, each counted once.
    in_flight: u64,
    lost_bytes: u64,
    /// Originals that end here or below are judged.
    judged: u64,
    /// Ends of lost segments, to be sent again in this order. Those that arrived since are skipped.
    lost: VecDeque<u64>,
    /// Retransmissions in the order of time.
    resent: VecDeque<Transmission>,
    /// The highest byte that arrived (RFC 8985: RACK.fack).
    highest: u64,
}

impl Scoreboard {
    /// Bytes in flight (RFC 6675: pipe).
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Bytes that count as lost and were not sent again.
    pub(super) fn lost_bytes(&self) -> u64 {
        self.lost_bytes
    }

    pub(super) fn sacked_segments(&self) -> usize {
        self.sacked_segments
    }

    /// Unacknowledged segments.
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn segment(&self, index: usize) -> &Segment {
        &self.segments[index]
    }

    /// The last segment that has not arrived.
    pub(super) fn last_outstanding(&self) -> Option<usize> {
        self.segments.iter().rposition(|s| !s.sacked)
    }

    /// Whether all that arrived is acknowledged in order, and nothing was sent again, so no loss can be known.
    #[inline]
    pub(super) fn is_in_order(&self) -> bool {
        self.ranges.is_empty() && self.resent.is_empty() && self.lost_bytes == 0
    }

    /// Frees the memory of a flow that is over.
    pub(super) fn release(&mut self) {
        debug_assert!(self.segments.is_empty() && self.in_flight == 0 && self.lost_bytes == 0);
        *self = Scoreboard::default();
    }

    /// Records a new segment up to `end`.
    #[inline]
    pub(super) fn push(&mut self, now: u64, end: u64, size: u32, sample: Option<Sent>) {
        self.in_flight += u64::from(size);
        self.segments.push_back(Segment {
            end,
            sent_at: now,
            size,
            sacked: false,
            lost: false,
            resent: false,
        });
        self.samples.extend(sample);
    }

    /// Handles an ACK of all bytes below `ack` and of `blocks`.
    pub(super) fn on_ack(&mut self, ack: u64, blocks: &mut [(u64, u64)]) -> Delivered {
        let mut delivered = Delivered::default();
        while let Some(segment) = self.segments.front()
            && segment.end <= ack
        {
            if segment.sacked {
                self.sacked_segments -= 1;
            } else {
                self.deliver(0, &mut delivered);
            }
            self.segments.pop_front();
            self.samples.pop_front();
        }
        if !self.ranges.is_empty() {
            let below = self.ranges.partition_point(|&(_, to)| to <= ack);
            self.ranges.drain(..below);
            if let Some(first) = self.ranges.first_mut() {
                first.0 = first.0.max(ack);
            }
        }
        // In the order of bytes, or those beyond would make the others appear reordered.
        blocks.sort_unstable();
        for &mut (from, to) in blocks {
            self.sack(from.max(ack), to, &mut delivered);
        }
        delivered
    }

    /// Marks the segments of [from, to) that are not in a range yet.
    fn sack(&mut self, from: u64, to: u64, delivered: &mut Delivered) {
        if from >= to || self.segments.back().is_none_or(|last| last.end < to) {
            return;
        }
        // The ranges that touch [from, to].
        let a = self.ranges.partition_point(|&(_, end)| end < from);
        let b = a + self.ranges[a..].partition_point(|&(start, _)| start <= to);
        let (mut at, mut merged) = (from, (from, to));
        for i in a..b {
            let (start, end) = self.ranges[i];
            self.sack_gap(at, start, delivered);
            at = at.max(end);
            merged = (merged.0.min(start), merged.1.max(end));
        }
        self.sack_gap(at, to, delivered);
        if b == a + 1 {
            self.ranges[a] = merged;
        } else {
            self.ranges.splice(a..b, [merged]);
        }
    }

    /// Marks the segments of [from, to), none of which is marked.
    fn sack_gap(&mut self, from: u64, to: u64, delivered: &mut Delivered) {
        if from >= to {
            return;
        }
        let mut index = self.segments.partition_point(|s| s.end <= from);
        while let Some(segment) = self.segments.get(index)
            && segment.end <= to
        {
            self.deliver(index, delivered);
            self.segments[index].sacked = true;
            self.sacked_segments += 1;
            index += 1;
        }
    }

    /// A segment that has not arrived before does.
    #[inline]
    fn deliver(&mut self, index: usize, delivered: &mut Delivered) {
        let segment = &mut self.segments[index];
        let size = u64::from(segment.size);
        if std::mem::take(&mut segment.lost) {
            self.lost_bytes -= size;
        } else {
            self.in_flight -= size;
        }
        let sent = Transmission {
            at: segment.sent_at,
            end: segment.end,
        };
        delivered.measured_from = match delivered.measured_from {
            _ if segment.resent => None,
            None if delivered.bytes == 0 => Some(sent.at),
            first => first.map(|first| first.min(sent.at)),
        };
        delivered.bytes += size;
        if !segment.resent {
            delivered.newest_original = delivered.newest_original.max(Some(sent));
            delivered.reordered |= sent.end < self.highest;
        }
        self.highest = self.highest.max(sent.end);
        if delivered.newest.is_none_or(|(newest, _)| newest < sent) {
            delivered.newest = Some((sent, segment.resent));
            delivered.sample = self.samples.get(index).copied();
        }
    }

    fn lose(&mut self, index: usize) {
        let segment = &mut self.segments[index];
        segment.lost = true;
        self.in_flight -= u64::from(segment.size);
        self.lost_bytes += u64::from(segment.size);
    }

    /// The first original that is not judged yet.
    fn first_unjudged(&self) -> usize {
        self.segments.partition_point(|s| s.end <= self.judged)
    }

    /// Marks originals as lost by what arrived beyond them (RFC 6675 section 4: IsLost): three ranges, or more than two
    /// segments of `mss` bytes. With three segments of any size, the first one is lost (section 5: DupAcks). Returns
    /// the bytes marked.
    pub(super) fn judge_by_count(&mut self, mss: u64) -> u64 {
        // Without RACK, only the timer detects the loss of a retransmission.
        self.resent.clear();
        let (mut bytes, mut limit) = (0, 0);
        for (i, &(from, to)) in self.ranges.iter().rev().enumerate() {
            bytes += to - from;
            if i + 1 >= DUPLICATES || bytes > (DUPLICATES as u64 - 1) * mss {
                limit = from;
                break;
            }
        }
        if self.sacked_segments >= DUPLICATES
            && let Some(first) = self.segments.front()
        {
            limit = limit.max(first.end);
        }
        let before = self.lost_bytes;
        let mut index = self.first_unjudged();
        while let Some(&segment) = self.segments.get(index)
            && segment.end <= limit
        {
            if !segment.sacked && !segment.lost && !segment.resent {
                self.lose(index);
                self.lost.push_back(segment.end);
            }
            self.judged = segment.end;
            index += 1;
        }
        self.lost_bytes - before
    }

    /// Marks segments as lost that were sent before `limit.newest`, and so long ago that they should have arrived (RFC
    /// 8985 section 6.2 step 5). Returns the bytes marked, and the time until the next one is lost.
    pub(super) fn judge_by_time(&mut self, now: u64, limit: TimeLimit) -> (u64, Option<u64>) {
        let before = self.lost_bytes;
        // Time left; `None` if it was sent after what arrived.
        let left = |sent: Transmission| {
            (sent < limit.newest).then(|| (sent.at + limit.wait_ns).saturating_sub(now))
        };
        let mut wait = None::<u64>;
        let mut index = self.first_unjudged();
        while let Some(&segment) = self.segments.get(index) {
            if !segment.sacked && !segment.lost && !segment.resent {
                let sent = Transmission {
                    at: segment.sent_at,
                    end: segment.end,
                };
                match left(sent) {
                    Some(0) => {
                        self.lose(index);
                        self.lost.push_back(segment.end);
                    }
                    Some(left) => {
                        wait = Some(left);
                        break;
                    }
                    None => break,
                }
            }
            self.judged = segment.end;
            index += 1;
        }
        while let Some(&sent) = self.resent.front() {
            let index = self.segments.partition_point(|s| s.end < sent.end);
            let is_current = self
                .segments
                .get(index)
                .is_some_and(|s| s.end == sent.end && s.sent_at == sent.at && !s.sacked && !s.lost);
            if is_current {
                match left(sent) {
                    Some(0) => {
                        self.lose(index);
                        // The oldest bytes are needed first.
                        self.lost.push_front(sent.end);
                    }
                    Some(left) => {
                        wait = Some(wait.map_or(left, |wait| wait.min(left)));
                        break;
                    }
                    None => break,
                }
            }
            self.resent.pop_front();
        }
        (self.lost_bytes - before, wait)
    }

    /// After a timeout, marks as lost what has not arrived, if it was sent at or before `until`, and the first segment
    /// in any case (RFC 8985 section 6.3).
    pub(super) fn lose_all(&mut self, until: u64) {
        self.lost.clear();
        for index in 0..self.segments.len() {
            let segment = self.segments[index];
            if segment.sacked || index > 0 && !segment.lost && segment.sent_at > until {
                continue;
            }
            if !segment.lost {
                self.lose(index);
            }
            self.lost.push_back(segment.end);
        }
    }

    /// The lost segment to be sent again next.
    pub(super) fn next_lost(&mut self) -> Option<usize> {
        if self.lost_bytes == 0 {
            self.lost.clear();
            return None;
        }
        while let Some(&end) = self.lost.front() {
            let index = self.segments.partition_point(|s| s.end < end);
            if self
                .segments
                .get(index)
                .is_some_and(|s| s.end == end && s.lost)
            {
                return Some(index);
            }
            self.lost.pop_front();
        }
        debug_assert!(false, "lost segments are in the queue");
        None
    }

    /// Records a retransmission.
    pub(super) fn resend(&mut self, now: u64, index: usize, sample: Option<Sent>) {
        let segment = &mut self.segments[index];
        if std::mem::take(&mut segment.lost) {
            self.lost_bytes -= u64::from(segment.size);
            self.in_flight += u64::from(segment.size);
        }
        segment.resent = true;
        segment.sent_at = now;
        self.resent.push_back(Transmission {
            at: now,
            end: segment.end,
        });
        if let Some(sample) = sample {
            self.samples[index] = sample;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MSS: u64 = 1_000;

    /// Ten segments, sent 1 ns apart.
    fn ten() -> Scoreboard {
        let mut board = Scoreboard::default();
        for i in 1..=10 {
            board.push(i, i * MSS, 1_000, None);
        }
        board
    }

    fn segments(from: u64, to: u64) -> (u64, u64) {
        ((from - 1) * MSS, to * MSS)
    }

    /// RFC 6675 section 4, by hand. Segments 1 and 4 of ten are lost.
    #[test]
    fn the_pipe_follows_rfc_6675() {
        let mut board = ten();
        assert_eq!(board.in_flight(), 10 * MSS);
        // 2 arrives, then 3: SetPipe leaves out SACKed bytes. One range of two segments shows no loss.
        for to in [2, 3] {
            let delivered = board.on_ack(0, &mut [segments(2, to)]);
            assert_eq!(delivered.bytes, MSS);
            assert_eq!(board.judge_by_count(MSS), 0);
        }
        assert_eq!(board.in_flight(), 8 * MSS);
        // 5 arrives: more than (DupThresh - 1) * SMSS bytes beyond 1, but not beyond 4.
        board.on_ack(0, &mut [segments(5, 5), segments(2, 3)]);
        assert_eq!(board.judge_by_count(MSS), MSS);
        assert_eq!((board.in_flight(), board.lost_bytes()), (6 * MSS, MSS));
        // The retransmission is in the pipe again.
        let first = board.next_lost().expect("lost");
        assert_eq!(board.segment(first).end, MSS);
        board.resend(20, first, None);
        assert_eq!((board.in_flight(), board.next_lost()), (7 * MSS, None));
        // 6 and 7 arrive: three segments beyond 4.
        board.on_ack(0, &mut [segments(5, 6), segments(2, 3)]);
        assert_eq!(board.judge_by_count(MSS), 0);
        board.on_ack(0, &mut [segments(5, 7), segments(2, 3)]);
        assert_eq!(board.judge_by_count(MSS), MSS);
        assert_eq!(board.in_flight(), 4 * MSS);
        // The retransmission of 1 arrives, and acknowledges 2 and 3.
        let delivered = board.on_ack(3 * MSS, &mut [segments(5, 7)]);
        assert_eq!(
            (delivered.bytes, delivered.newest.map(|n| n.1)),
            (MSS, Some(true))
        );
        assert_eq!((board.in_flight(), board.lost_bytes()), (3 * MSS, MSS));
        // A D-SACKed or old range changes nothing.
        assert_eq!(board.on_ack(3 * MSS, &mut [segments(1, 2)]).bytes, 0);
        // 4 arrives without having been sent again, and 8 to 10 do.
        let delivered = board.on_ack(10 * MSS, &mut []);
        assert_eq!((delivered.bytes, delivered.reordered), (4 * MSS, true));
        assert_eq!(
            (board.in_flight(), board.lost_bytes(), board.len()),
            (0, 0, 0)
        );
        board.release();
    }

    /// RFC 6675 section 4: three ranges of short segments show a loss too.
    #[test]
    fn three_ranges_or_short_segments_show_a_loss() {
        let mut board = Scoreboard::default();
        for i in 1..=8 {
            board.push(0, i * 100, 100, None);
        }
        board.on_ack(0, &mut [(100, 200), (300, 400)]);
        assert_eq!(board.judge_by_count(MSS), 0);
        board.on_ack(0, &mut [(500, 600)]);
        assert_eq!(board.judge_by_count(MSS), 100, "the first hole only");
    }

    /// RFC 8985 section 6.2: by time, also of retransmissions.
    #[test]
    fn a_segment_is_lost_when_a_later_one_arrived_and_the_window_passed() {
        let limit = |at, end: u64, wait_ns| TimeLimit {
            newest: Transmission { at, end: end * MSS },
            wait_ns,
        };
        let mut board = ten();
        board.on_ack(0, &mut [segments(3, 3)]);
        // 1 and 2 were sent before 3, at 1 and 2 ns; 4 after it.
        assert_eq!(board.judge_by_time(97, limit(3, 3, 97)), (0, Some(1)));
        assert_eq!(board.judge_by_time(98, limit(3, 3, 97)), (MSS, Some(1)));
        assert_eq!(board.judge_by_time(99, limit(3, 3, 97)), (MSS, None));
        assert_eq!((board.in_flight(), board.lost_bytes()), (7 * MSS, 2 * MSS));
        // Both are sent again, at 100 and 101 ns; the second arrives, so the first copy was lost.
        for now in [100, 101] {
            let index = board.next_lost().expect("lost");
            board.resend(now, index, None);
        }
        let delivered = board.on_ack(0, &mut [segments(2, 3)]);
        let newest = Transmission {
            at: 101,
            end: 2 * MSS,
        };
        assert_eq!(delivered.newest, Some((newest, true)));
        assert_eq!(delivered.newest_original, None);
        // 4 to 10 were sent before it too.
        assert_eq!(board.judge_by_time(197, limit(101, 2, 97)), (8 * MSS, None));
        let first = board.next_lost().expect("lost");
        assert_eq!(board.segment(first).end, MSS, "the oldest first");
    }

    /// A naive scoreboard: the definitions of RFC 6675, by segment.
    #[derive(Clone, Default)]
    struct Naive {
        una: usize,
        sacked: Vec<bool>,
        lost: Vec<bool>,
        resent: Vec<bool>,
    }

    impl Naive {
        fn is_lost(&self, at: usize) -> bool {
            let beyond = &self.sacked[at + 1..];
            let bytes = beyond.iter().filter(|s| **s).count() as u64 * MSS;
            let ranges = (0..beyond.len())
                .filter(|&i| beyond[i] && (i == 0 || !beyond[i - 1]))
                .count();
            ranges >= 3 || bytes > 2 * MSS
        }

        fn judge(&mut self) {
            for at in self.una..self.sacked.len() {
                if !self.sacked[at] && !self.resent[at] && self.is_lost(at) {
                    self.lost[at] = true;
                }
            }
        }

        fn sum(&self, of: impl Fn(&Self, usize) -> bool) -> u64 {
            (self.una..self.sacked.len())
                .filter(|&i| of(self, i))
                .count() as u64
                * MSS
        }
    }

    proptest! {
        /// Any order of sends, arrivals, ACKs with up to four ranges and retransmissions.
        #[test]
        fn it_equals_the_definitions(steps in prop::collection::vec((0u8..4, any::<u16>(), any::<u16>()), 1..200)) {
            let (mut board, mut naive, mut now) = (Scoreboard::default(), Naive::default(), 0);
            for (what, a, b) in steps {
                now += 1;
                let outstanding = naive.sacked.len() - naive.una;
                match what {
                    0 => {
                        for _ in 0..=a % 4 {
                            naive.sacked.push(false);
                            naive.lost.push(false);
                            naive.resent.push(false);
                            board.push(now, naive.sacked.len() as u64 * MSS, 1_000, None);
                        }
                    }
                    1 | 2 if outstanding > 0 => {
                        // A segment arrives; ranges as a receiver has them, four of them at most.
                        let at = naive.una + usize::from(a) % outstanding;
                        naive.sacked[at] = true;
                        naive.lost[at] = false;
                        while naive.sacked.get(naive.una) == Some(&true) {
                            naive.una += 1;
                        }
                        let mut ranges: Vec<(u64, u64)> = Vec::new();
                        for i in naive.una..naive.sacked.len() {
                            let (from, to) = (i as u64 * MSS, (i as u64 + 1) * MSS);
                            match ranges.last_mut() {
                                Some(last) if naive.sacked[i] && last.1 == from => last.1 = to,
                                _ if naive.sacked[i] => ranges.push((from, to)),
                                _ => {}
                            }
                        }
                        // That of the segment first, then others.
                        let own = ranges.iter().position(|r| r.0 <= at as u64 * MSS && at as u64 * MSS < r.1);
                        let mut sent: Vec<_> = own.map(|i| ranges.swap_remove(i)).into_iter().collect();
                        sent.extend(ranges.into_iter().skip(usize::from(b) % 3).take(3));
                        let delivered = board.on_ack(naive.una as u64 * MSS, &mut sent);
                        prop_assert!(delivered.bytes <= MSS);
                        board.judge_by_count(MSS);
                        naive.judge();
                        // Counting duplicates marks the first segment lost behind three SACKed ones: of whole segments, as the definition does.
                    }
                    3 => {
                        if let Some(index) = board.next_lost() {
                            let at = usize::try_from(board.segment(index).end / MSS).expect("small") - 1;
                            prop_assert!(naive.lost[at]);
                            board.resend(now, index, None);
                            (naive.lost[at], naive.resent[at]) = (false, true);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(board.lost_bytes(), naive.sum(|n, i| n.lost[i]));
                prop_assert_eq!(board.in_flight(), naive.sum(|n, i| !n.sacked[i] && !n.lost[i]));
                prop_assert_eq!(board.sacked_segments() as u64 * MSS, naive.sum(|n, i| n.sacked[i]));
                if now % 64 == 0 {
                    board.lose_all(now);
                    for i in naive.una..naive.sacked.len() {
                        naive.lost[i] = !naive.sacked[i];
                    }
                }
            }
        }
    }
}
