//! Counters of a run.

use slipstream_base::SimTime;
use slipstream_base::mix::mix64;
use slipstream_report::run::EngineCounts;
use slipstream_report::{Answered, Failed, Objectives, Timeline, Totals};
use slipstream_workload::Schedule;

use crate::node::Node;
use crate::outcome::{KvTransfers, Outcome, Resumes};
use crate::run::{Failure, RequestRecord};

/// Sums, so that parts of a run can be counted separately.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) totals: Totals,
    pub(crate) passes: u64,
    pub(crate) jumped: u64,
    pub(crate) kv_transfers: KvTransfers,
    pub(crate) resumes: Resumes,
    digest: u64,
    pub(crate) ended_at: SimTime,
}

impl Tally {
    /// Counts a request that was answered, or failed.
    pub(crate) fn note(&mut self, record: &RequestRecord<'_>, gap_max: u64, slo: &Objectives) {
        let mut timeline = Timeline::new(record.request.due.0);
        (timeline.first, timeline.last) = (record.first.0, record.last.0);
        timeline.gap_max = gap_max;
        let worker = record
            .rank
            .map_or(u64::MAX, |rank| u64::from(rank.worker.0));
        let mut hash = 0;
        for word in [
            record.request.id().0,
            record.first.0,
            record.last.0,
            worker,
            u64::from(record.cached_tokens) << 32 | u64::from(record.output_tokens),
        ] {
            hash = mix64(hash ^ word);
        }
        // A sum, so that the order of simultaneous ends does not matter.
        self.digest = self.digest.wrapping_add(hash);
        let class = record.request.class;
        match record.error {
            Some(Failure { kind, message }) => {
                let failed = Failed {
                    kind,
                    example: message,
                    class,
                };
                self.totals
                    .on_failed(&timeline, &failed, record.last.0, slo);
            }
            None => self.totals.on_answered(
                &Answered {
                    timeline,
                    input_tokens: record.input_tokens.into(),
                    output_tokens: record.output_tokens.into(),
                    cached_tokens: Some(record.cached_tokens.into()),
                    events: record.output_tokens.into(),
                    streamed: true,
                    class,
                },
                slo,
            ),
        }
    }

    pub(crate) fn add(&mut self, other: &Tally) {
        self.totals.add(&other.totals);
        self.passes += other.passes;
        self.jumped += other.jumped;
        self.kv_transfers.bytes += other.kv_transfers.bytes;
        self.kv_transfers.times.add(&other.kv_transfers.times);
        self.resumes.times.add(&other.resumes.times);
        self.resumes.tokens += other.resumes.tokens;
        self.digest = self.digest.wrapping_add(other.digest);
        self.ended_at = self.ended_at.max(other.ended_at);
    }

    pub(crate) fn into_outcome(
        mut self,
        nodes: impl Iterator<Item = Node>,
        under_way: u64,
        schedule: &Schedule,
        cut: Option<String>,
    ) -> Outcome {
        let (mut preemptions, mut query_tokens, mut hit_tokens) = (0, 0, 0);
        let (mut host_hit_tokens, mut disk_hit_tokens) = (None, None);
        let mut drafts = [0, 0, 0];
        let mut extrapolated = 0;
        for node in nodes {
            let stats = node.engine.stats();
            extrapolated += stats.extrapolated_passes;
            preemptions += stats.preemptions;
            query_tokens += stats.prefix_query_tokens;
            hit_tokens += stats.prefix_hit_tokens;
            if node.engine.has_host_tier() {
                *host_hit_tokens.get_or_insert(0.0) += stats.host_hit_tokens as f64;
            }
            let of_node = [stats.drafts, stats.draft_tokens, stats.accepted_tokens];
            for (sum, count) in drafts.iter_mut().zip(of_node) {
                *sum += count;
            }
            if node.engine.disk().is_some() {
                *disk_hit_tokens.get_or_insert(0.0) += stats.disk_hit_tokens as f64;
            }
        }
        let [drafts, draft_tokens, accepted_tokens] =
            drafts.map(|count: u64| (drafts[0] > 0).then_some(count as f64));
        self.totals.requests.abandoned = schedule.abandoned();
        self.totals.requests.unfinished = under_way;
        self.totals.requests.sent += under_way;
        self.totals.requests.skipped_lines = schedule.skipped_lines();
        Outcome {
            totals: self.totals,
            engine: EngineCounts {
                preemptions: Some(preemptions as f64),
                prefix_query_tokens: Some(query_tokens as f64),
                prefix_hit_tokens: Some(hit_tokens as f64),
                host_hit_tokens,
                disk_hit_tokens,
                drafts,
                draft_tokens,
                accepted_tokens,
                prefix_hit_blocks: None,
                ..EngineCounts::default()
            },
            ended_at: self.ended_at,
            scaling: None,
            passes: self.passes,
            jumped: self.jumped,
            extrapolated,
            kv_transfers: self.kv_transfers,
            resumes: self.resumes,
            models: Vec::new(),
            shares: Vec::new(),
            digest: self.digest,
            cut,
        }
    }
}
