//! Data-parallel ranks that share experts: they begin every step together, and each step ends with the slowest rank.
//!
//! A *wave* is a run of steps without a pause. While any rank of a group has requests, all take part in each step, those without
//! requests with a dummy batch. Once none has any, the group goes on with dummy batches up to the next step at which the ranks
//! compare notes.
//!
//! Source: vLLM 0.33, `DPEngineCoreProc.run_busy_loop` and `_has_global_unfinished_reqs`.

use std::ops::Range;

use slipstream_base::SimTime;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::Cluster;

use crate::node::Node;

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

    /// Whether all ranks of `group`, none of which is in a step, begin one at `now`.
    pub(crate) fn start(&mut self, group: u32, nodes: &[Node], now: SimTime) -> Start {
        let group = &mut self.groups[group as usize];
        let range = group.nodes.clone();
        let ranks = &nodes[range.start as usize..range.end as usize];
        if ranks.iter().any(|n| n.hangs) {
            return Start::Never; // until its worker is lost
        }
        let works = ranks.iter().any(|n| !n.engine.is_idle());
        let first = group.has_paused(now, works, ranks[0].engine.schedules_ahead());
        if first {
            group.steps = 0;
            if !works {
                return Start::Paused(range);
            }
        }
        group.steps += 1;
        group.worked = works;
        Start::Step {
            nodes: range,
            first,
        }
    }

    /// All ranks of `group` have begun their step at `now`: each ends with the slowest. Returns when. `most` tokens are of
    /// one rank, and `all` of all.
    pub(crate) fn meet(
        &mut self,
        group: u32,
        nodes: &mut [Node],
        now: SimTime,
        (most, mut all): (u64, u64),
    ) -> SimTime {
        let group = &mut self.groups[group as usize];
        let ranks = &mut nodes[group.nodes.start as usize..group.nodes.end as usize];
        if most <= GRAPH_TOKENS {
            all = most * ranks.len() as u64;
        }
        let mut end = now;
        for n in ranks.iter_mut() {
            let own = n.engine.meet(all);
            end = own.map_or(end, |own| end.max(own));
        }
        for n in ranks {
            n.engine.wait_until(end);
        }
        group.end = end;
        end
    }
}

/// The beginning of a step of a group.
pub(crate) enum Start {
    /// None begins: a rank hangs.
    Never,
    /// None begins: no rank has work.
    Paused(Range<u32>),
    /// These ranks begin it. `first`: the group had paused.
    Step { nodes: Range<u32>, first: bool },
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
