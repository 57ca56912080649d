//! Data-parallel ranks that share experts: they begin every step together, and each step ends with the slowest rank.
//!
//! A *wave* is a run of steps without a pause. While any rank of a group has requests, all take part in each step, those without
//! requests with a dummy batch. Once none has any, the group goes on with dummy batches up to the next step at which the ranks
//! compare notes.
//!
//! Source: vLLM 0.33, `DPEngineCoreProc.run_busy_loop` and `_has_global_unfinished_reqs`.

use std::cmp::Reverse;
use std::ops::Range;

use slipstream_base::SimTime;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::Cluster;
use slipstream_dispatch::Role;

use crate::node::Phase;
use crate::run::Sink;
use crate::sim::Sim;

/// Steps between those at which the ranks compare whether any has requests; the first of a wave is one, too.
/// Source: vLLM, `ParallelConfig.dp_sync_interval`.
const SYNC_STEPS: u32 = 16;

/// Most tokens of a rank for which vLLM runs a CUDA graph. All ranks are padded to the largest then.
/// Source: vLLM, `_synchronize_dp_ranks` in `vllm/v1/worker/dp_utils.py`; default of `max_cudagraph_capture_size`.
const GRAPH_TOKENS: u64 = 512;

/// The groups of ranks that begin steps together: one per worker of such a pool.
pub(crate) struct Lockstep {
    groups: Vec<Group>,
    /// Of each node, its group, if it has one.
    of_node: Vec<Option<u32>>,
}

struct Group {
    nodes: Range<u32>,
    /// Steps of the wave that have begun; 0 between waves.
    steps: u32,
    /// Whether a rank had requests when the last of them began.
    worked: bool,
    /// End of the last of them.
    end: SimTime,
}

impl Lockstep {
    /// The groups of `cluster`; `None` if it has none.
    pub(crate) fn new(cluster: &Cluster) -> Option<Box<Lockstep>> {
        let mut all = Lockstep {
            groups: Vec::new(),
            of_node: Vec::new(),
        };
        for (_, pool) in cluster.workers() {
            let first = to_u32(all.of_node.len());
            let nodes = first..first + pool.engine.data_parallel_size;
            let group = pool.engine.data_parallel_barrier.then(|| {
                all.groups.push(Group {
                    nodes: nodes.clone(),
                    steps: 0,
                    worked: false,
                    end: SimTime::ZERO,
                });
                to_u32(all.groups.len()) - 1
            });
            all.of_node.extend(nodes.map(|_| group));
        }
        (!all.groups.is_empty()).then(|| Box::new(all))
    }

    /// The group of `node`.
    pub(crate) fn group_of(&self, node: u32) -> Option<u32> {
        self.of_node[node as usize]
    }
}

impl Group {
    /// Whether no wave goes on at `now`. `works`: a rank has requests; `ahead`: passes are scheduled one in advance, so that
    /// the ranks compared what they had when the last step began.
    fn has_paused(&self, now: SimTime, works: bool, ahead: bool) -> bool {
        // A worker that was lost ended the wave.
        if self.steps == 0 || self.end != now {
            return true;
        }
        let compared = self.steps == 1 || self.steps.is_multiple_of(SYNC_STEPS);
        compared && !(if ahead { self.worked } else { works })
    }
}

impl Sim<'_> {
    /// Begins a step of all ranks of `group`, none of which is in one.
    pub(crate) fn begin_together(&mut self, group: u32, sink: &mut dyn Sink) {
        let Some(lockstep) = &mut self.lockstep else {
            return;
        };
        let state = &mut lockstep.groups[group as usize];
        let nodes = state.nodes.clone();
        let ranks = &self.nodes[nodes.start as usize..nodes.end as usize];
        if ranks.iter().any(|n| n.hangs) {
            return; // until its worker is lost
        }
        let works = ranks.iter().any(|n| !n.engine.is_idle());
        let first = state.has_paused(self.now, works, ranks[0].engine.schedules_ahead());
        if first {
            state.steps = 0;
        }
        if first && !works {
            for node in nodes {
                self.nodes[node as usize].phase = Phase::Idle;
                self.publish_idle(node);
            }
            return;
        }
        state.steps += 1;
        state.worked = works;
        let mut end = self.now;
        let (mut most, mut all) = (0, 0);
        for node in nodes.clone() {
            self.nodes[node as usize].begin_in_step(self.now, first);
            self.began(node, sink);
            let tokens = self.nodes[node as usize].engine.tokens_in_step();
            (most, all) = (most.max(tokens), all + tokens);
        }
        if most <= GRAPH_TOKENS {
            all = most * u64::from(nodes.end - nodes.start);
        }
        for node in nodes.clone() {
            let own = self.nodes[node as usize].engine.meet(all);
            end = own.map_or(end, |own| end.max(own));
        }
        if let Some(lockstep) = &mut self.lockstep {
            lockstep.groups[group as usize].end = end;
        }
        for node in nodes {
            let n = &mut self.nodes[node as usize];
            n.engine.wait_until(end);
            let (life, role) = (n.life, n.role);
            self.push_role_end(node, end, life, role);
        }
    }

    fn push_role_end(&mut self, node: u32, end: SimTime, life: u32, role: Role) {
        let end = Reverse((end, self.sequence, node, life));
        if role == Role::Prefill {
            self.prefill_ends.push(end);
        } else {
            self.ends.push(end);
        }
        self.sequence += 1;
    }
}
