//! The engines of the cluster, and the times of the sequences on each.

use std::ops::{Deref, DerefMut, Index, IndexMut};
use std::sync::Arc;

use slipstream_base::width::to_u32;
use slipstream_base::{RankId, SimTime, WorkerId};
use slipstream_dispatch::Role;
use slipstream_engine::{DecodeRun, Engine, PassOutput};
use slipstream_report::Totals;

use crate::flight::{Flight, Flights};
use crate::pace::Pace;

/// State of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Idle.
    Idle,
    /// Work was added, or a pass has ended; a pass begins at this time.
    Awake,
    /// In a pass.
    InPass,
    /// In a run of jumped decode passes; the next pass begins at its end.
    Jumped,
    /// Decode passes are planned; the next pass begins at the end of the last one.
    Planned,
}

/// The engines of a run by number, and those of them that begin a pass at the present time.
pub(crate) struct Nodes {
    list: Vec<Node>,
    awake: Vec<u32>,
}

impl Nodes {
    pub(crate) fn new(list: Vec<Node>) -> Nodes {
        Nodes {
            list,
            awake: Vec::new(),
        }
    }

    /// Wakes an engine that has work, or capacity for waiting requests.
    pub(crate) fn wake(&mut self, node: u32) {
        let n = &mut self[node];
        if n.phase == Phase::Idle && !n.engine.is_idle() {
            n.phase = Phase::Awake;
            self.awake.push(node);
        }
    }

    /// `node` begins a pass at the present time.
    pub(crate) fn note_awake(&mut self, node: u32) {
        self.awake.push(node);
    }

    /// Takes those that begin a pass now, in the order in which they were noted.
    pub(crate) fn take_awake(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.awake)
    }

    /// Gives back the memory of what [`take_awake`](Self::take_awake) returned.
    pub(crate) fn reuse_awake(&mut self, awake: Vec<u32>) {
        self.awake = awake;
    }

    /// The ranks of `worker`.
    pub(crate) fn of_worker(&self, worker: WorkerId) -> impl Iterator<Item = &Node> {
        self.list.iter().filter(move |n| n.rank.worker == worker)
    }

    /// The numbers of the ranks of `worker`.
    pub(crate) fn numbers_of(&self, worker: WorkerId) -> Vec<u32> {
        let numbers = (0..).zip(&self.list);
        let numbers = numbers.filter(|(_, n)| n.rank.worker == worker);
        numbers.map(|(node, _)| node).collect()
    }

    /// Whether no rank of `worker` has a request or a pass under way.
    pub(crate) fn are_idle(&self, worker: WorkerId) -> bool {
        self.of_worker(worker)
            .all(|n| n.engine.is_idle() && !n.engine.in_pass())
    }

    pub(crate) fn into_list(self) -> Vec<Node> {
        self.list
    }
}

impl Deref for Nodes {
    type Target = [Node];
    fn deref(&self) -> &[Node] {
        &self.list
    }
}

impl DerefMut for Nodes {
    fn deref_mut(&mut self) -> &mut [Node] {
        &mut self.list
    }
}

impl Index<u32> for Nodes {
    type Output = Node;
    fn index(&self, node: u32) -> &Node {
        &self.list[node as usize]
    }
}

impl IndexMut<u32> for Nodes {
    fn index_mut(&mut self, node: u32) -> &mut Node {
        &mut self.list[node as usize]
    }
}

/// Passes that are planned at once, at most.
const PLANNED_MAX: u32 = 32;
/// For fewer, a plan costs more than it saves.
const PLANNED_MIN: u32 = 4;

pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) rank: RankId,
    pub(crate) role: Role,
    pub(crate) phase: Phase,
    /// Number of times that its worker was lost.
    pub(crate) life: u32,
    /// Whether passes do not end, because of a fault.
    pub(crate) hangs: bool,
    /// Factor on its passes, if a fault can change it.
    pub(crate) pace: Option<Arc<Pace>>,
    /// When the clients have (or will have) the last of its frames: frames arrive in order.
    pub(crate) frames_end: SimTime,
    gaps: Gaps,
    preemptions: u64,
    /// Length of the last pass, ns.
    pass_ns: u64,
    /// Passes since the last request reached it.
    passes: u32,
    /// Passes between two requests, as a running mean, times 4.
    passes_x4: u32,
    /// Additional data for a sink that records passes.
    pub(crate) watch: Option<Box<Watch>>,
}

/// Data of a pass that its output does not contain.
#[derive(Clone, Copy, Default)]
pub(crate) struct Watched {
    /// Blocks that sequences held while it ran.
    pub(crate) used_blocks: u32,
    /// Sequences preempted for it.
    pub(crate) preempted: u32,
}

/// Data for a sink that records passes.
#[derive(Default)]
pub(crate) struct Watch {
    /// The pass under way; without one, the next one so far.
    pass: Watched,
    /// Gaps between its sequences' tokens and the previous ones, ns, with counts.
    pub(crate) gaps: Vec<(u64, u32)>,
}

/// Gaps between tokens, counted without processing each token. Tokens of one sequence in one step are
/// one event with one gap before it, as vLLM measures inter-token latency.
///
/// Normally every sequence with a token gets the next one in the next pass: then all gaps of a pass
/// are the time since the end of the previous pass, and one count is enough. After a preemption,
/// tokens are processed one by one until all sequences are in step again.
struct Gaps {
    /// End of the last pass.
    last_end: SimTime,
    /// Sequences that got a token in it and continue.
    live: u32,
    /// Sequences that have a token and continue. Equal to `live` while all are in step.
    started: u32,
    /// Whether tokens are processed one by one, because sequences are not in step.
    broken: bool,
    /// Whether the sequence that was preempted last is missing from the next pass on: with
    /// asynchronous scheduling the pass under way has it still.
    breaks_next: bool,
    /// Time of the preemption; every sequence with a token then had its last one at this time.
    broke_at: SimTime,
    /// Whether every token is processed in any case.
    always: bool,
    /// Of `started`, those of each class; empty if the objectives name no class.
    of_class: Vec<u32>,
}

impl Gaps {
    fn new(always: bool, classes: usize) -> Gaps {
        Gaps {
            last_end: SimTime::ZERO,
            live: 0,
            started: 0,
            broken: false,
            breaks_next: false,
            broke_at: SimTime::ZERO,
            always,
            of_class: vec![0; classes],
        }
    }

    /// Counts that each sequence in step got a token `ns` after its last.
    fn record(&self, ns: u64, count: u32, totals: &mut Totals) {
        totals.itl.record_n(ns, count.into());
        for (class, &count) in (0..).zip(&self.of_class) {
            if count > 0 {
                totals.on_class_gaps(class, ns, count.into());
            }
        }
    }

    /// Counts that each sequence in step got a token at each of `ends`.
    fn record_each(&mut self, ends: &[SimTime], totals: &mut Totals) {
        let befores = std::iter::once(&self.last_end).chain(ends);
        let gaps = ends
            .iter()
            .zip(befores)
            .map(|(end, before)| end.since(*before));
        totals.itl.record_each(gaps.clone(), self.live.into());
        for (class, &count) in (0..).zip(&self.of_class) {
            if count > 0 {
                totals.on_class_gaps_each(class, gaps.clone(), count.into());
            }
        }
        self.last_end = ends.last().copied().unwrap_or(self.last_end);
    }
}

impl Node {
    pub(crate) fn new(
        mut engine: Engine,
        rank: RankId,
        role: Role,
        pace: Option<Arc<Pace>>,
        each_token: bool,
        classes: usize,
    ) -> Node {
        let each_token = each_token || engine.may_leave_out();
        engine.list_tokens(each_token);
        Node {
            engine,
            rank,
            role,
            phase: Phase::Idle,
            life: 0,
            hangs: false,
            pace,
            frames_end: SimTime::ZERO,
            gaps: Gaps::new(each_token, classes),
            preemptions: 0,
            pass_ns: 0,
            passes: 0,
            passes_x4: 0,
            watch: None,
        }
    }

    /// Begins a pass at `now`, if there is work. Returns its end.
    pub(crate) fn begin(&mut self, now: SimTime) -> Option<SimTime> {
        let end = self.engine.begin_pass(now);
        self.began(now, end);
        end
    }

    /// Begins a pass at `now` with the other ranks of its group. `first`: the group had paused.
    pub(crate) fn begin_in_step(&mut self, now: SimTime, first: bool) {
        let end = self.engine.begin_in_step(now, first);
        self.began(now, Some(end));
    }

    fn began(&mut self, now: SimTime, end: Option<SimTime>) {
        self.phase = match end {
            Some(end) => {
                self.pass_ns = end.since(now);
                Phase::InPass
            }
            None => Phase::Idle,
        };
        let stats = self.engine.stats();
        let preemptions = stats.preemptions;
        if let Some(watch) = &mut self.watch {
            watch.pass.used_blocks = stats.used_blocks;
            // All that ran may be preempted, and no pass begin.
            watch.pass.preempted += to_u32(preemptions - self.preemptions);
        }
        self.gaps.breaks_next = false;
        if preemptions != self.preemptions {
            self.preemptions = preemptions;
            self.gaps.breaks_next = self.engine.schedules_ahead();
            if !self.gaps.broken {
                self.gaps.broken = true;
                self.gaps.broke_at = self.gaps.last_end;
                self.engine.list_tokens(true);
            }
        }
    }

    /// Jumps over decode passes from `now` on that end before `until`. Returns the end of the last
    /// one.
    pub(crate) fn jump(
        &mut self,
        now: SimTime,
        until: SimTime,
        run: &mut DecodeRun,
        totals: &mut Totals,
    ) -> Option<SimTime> {
        if self.gaps.broken || self.gaps.always || self.gaps.live == 0 || now != self.gaps.last_end
        {
            return None;
        }
        // An attempt costs as much as a pass, so it is not made if it would cover few passes.
        if until.since(now) < 2 * self.pass_ns {
            return None;
        }
        let passes = self.engine.decode_run(now, until, u32::MAX, run);
        if passes == 0 {
            return None;
        }
        assert_eq!(
            run.sequences(),
            self.gaps.live,
            "in a run of decode passes every sequence gets a token in each"
        );
        let mut before = now;
        for &end in &run.ends {
            self.gaps.record(end.since(before), self.gaps.live, totals);
            before = end;
        }
        self.gaps.last_end = before;
        self.phase = Phase::Jumped;
        Some(before)
    }

    /// Plans decode passes from `now` on. Returns the end of the last one.
    pub(crate) fn plan(&mut self, now: SimTime) -> Option<SimTime> {
        if self.gaps.broken || self.gaps.always || self.gaps.live == 0 || now != self.gaps.last_end
        {
            return None;
        }
        // A request that comes makes the rest of a plan worthless: half of the usual time, or as long as none came.
        let most = self.passes.max(self.passes_x4 / 8).min(PLANNED_MAX);
        if most < PLANNED_MIN {
            return None;
        }
        let end = self.engine.plan_run(now, most)?;
        self.phase = Phase::Planned;
        Some(end)
    }

    /// Runs the planned passes that end by `now`. Returns how many.
    pub(crate) fn run_planned(
        &mut self,
        now: SimTime,
        run: &mut DecodeRun,
        totals: &mut Totals,
    ) -> u32 {
        let passes = self.engine.run_planned(now, run);
        if passes > 0 {
            self.gaps.record_each(&run.ends, totals);
        }
        self.passes = self.passes.saturating_add(passes);
        passes
    }

    /// A request reaches the engine.
    pub(crate) fn on_request(&mut self) {
        let passes = self.passes.min(2 * PLANNED_MAX);
        self.passes_x4 = self.passes_x4 - self.passes_x4 / 4 + passes;
        self.passes = 0;
    }

    /// When the client of `flight`, which this node answers, had its last token.
    pub(crate) fn last_token(&self, flight: &Flight) -> SimTime {
        if self.gaps.broken || self.gaps.always {
            flight.last.max(self.gaps.broke_at)
        } else {
            self.gaps.last_end
        }
    }

    /// Removes all state, because its worker is lost.
    pub(crate) fn crash(&mut self) {
        self.engine.restart();
        self.hangs = false;
        self.leave_sequences();
    }

    /// From now on no pass ends.
    pub(crate) fn hang(&mut self) {
        self.hangs = true;
        self.phase = Phase::InPass;
    }

    /// All of its sequences are gone: their tokens and passes under way count no more.
    pub(crate) fn leave_sequences(&mut self) {
        self.engine.list_tokens(self.gaps.always);
        self.life += 1;
        if !self.hangs {
            self.phase = Phase::Idle;
        }
        self.gaps = Gaps::new(self.gaps.always, self.gaps.of_class.len());
    }

    /// Ends the pass that ends now. Its output is to be [recorded](Self::record_output).
    pub(crate) fn finish(&mut self, out: &mut PassOutput) -> Watched {
        self.engine.finish_pass(out);
        self.passes = self.passes.saturating_add(1);
        self.phase = Phase::Awake;
        let watch = self.watch.as_mut();
        watch.map_or_else(Watched::default, |watch| std::mem::take(&mut watch.pass))
    }

    /// Counts the gaps before tokens that are the first here and not the first of their request.
    fn record_resumed(
        &mut self,
        now: SimTime,
        out: &PassOutput,
        flights: &mut Flights,
        totals: &mut Totals,
    ) {
        for first in &out.first {
            let flight = flights.get_mut(first.id);
            if !flight.is_resumed() {
                continue;
            }
            let gap = now.since(flight.last);
            totals.itl.record(gap);
            if !self.gaps.of_class.is_empty() {
                totals.on_class_gaps(flight.request.class, gap, 1);
            }
            if let Some(watch) = &mut self.watch {
                watch.gaps.push((gap, 1));
            }
            flight.gap_max = flight.gap_max.max(gap);
        }
    }

    /// Delivers the tokens of a pass to their clients: counts the gaps before them. The caller
    /// records first tokens and ends after this.
    pub(crate) fn record_output(
        &mut self,
        now: SimTime,
        out: &PassOutput,
        flights: &mut Flights,
        totals: &mut Totals,
    ) {
        if let Some(watch) = &mut self.watch {
            watch.gaps.clear();
        }
        if self.role != Role::Prefill {
            self.record_resumed(now, out, flights, totals);
        }
        let gaps = &mut self.gaps;
        let first = to_u32(out.first.len());
        let going_on = out.sequence_count - first;
        if gaps.broken || gaps.always {
            let mut firsts = out.first.iter().peekable();
            for (id, _) in &out.tokens {
                let flight = flights.get_mut(id);
                if firsts.next_if(|f| f.id == id).is_none() {
                    // While all were in step no token times were recorded.
                    let gap = now.since(flight.last.max(gaps.broke_at));
                    totals.itl.record(gap);
                    if !gaps.of_class.is_empty() {
                        totals.on_class_gaps(flight.request.class, gap, 1);
                    }
                    if let Some(watch) = &mut self.watch {
                        watch.gaps.push((gap, 1));
                    }
                    flight.gap_max = flight.gap_max.max(gap);
                }
                // The answer's client gets none from a node that computes prompts.
                if self.role != Role::Prefill {
                    flight.last = now;
                }
            }
        } else {
            // A pass whose budget ends before its decodes do leaves some out: tokens are processed
            // one by one then (`each_token`).
            debug_assert_eq!(going_on, gaps.live, "every sequence got a token");
            gaps.record(now.since(gaps.last_end), going_on, totals);
            if let (Some(watch), 1..) = (&mut self.watch, going_on) {
                watch.gaps.push((now.since(gaps.last_end), going_on));
            }
        }
        if !gaps.of_class.is_empty() {
            for first in &out.first {
                gaps.of_class[flights.get_mut(first.id).request.class as usize] += 1;
            }
            for done in &out.finished {
                gaps.of_class[flights.get_mut(done.id).request.class as usize] -= 1;
            }
        }
        gaps.started += first;
        let finished = to_u32(out.finished.len());
        gaps.started -= finished;
        gaps.last_end = now;
        gaps.live = out.sequence_count - finished;
        if gaps.broken && !gaps.breaks_next && gaps.started == gaps.live {
            gaps.broken = false;
            self.engine.list_tokens(gaps.always);
        }
    }
}
