//! Decisions from an order of loads are those of a look at every load.

use std::sync::Arc;

use proptest::prelude::*;
use slipstream_base::{BlockHash, KvDelta, KvOp, Prompt, RankId, SimTime, Tail, WorkerId};
use slipstream_config::cluster::{RouterConfig, RouterPolicy};
use slipstream_router::{ActiveSequence, CachedBlocks, Fleet, RouteRequest, Router, TargetConfig};

/// A fleet with its router and the sequences that it routed.
struct Side {
    fleet: Arc<Fleet>,
    router: Router,
    active: Vec<ActiveSequence>,
}

impl Side {
    fn new(workers: u32, block_size: u32, config: &RouterConfig, ordered: bool) -> Side {
        let target = |worker| TargetConfig {
            rank: RankId {
                worker: WorkerId(worker),
                dp_rank: 0,
            },
            kv_blocks: 1_000,
            prefix_caching: true,
        };
        let targets = (0..workers).map(target).collect();
        let fleet = Arc::new(Fleet::new(config.clone(), block_size, targets).unwrap());
        (0..workers).for_each(|worker| fleet.set_ready(WorkerId(worker), true));
        let mut router = Router::new(Arc::clone(&fleet), 0);
        if ordered {
            router.keep_order();
        }
        Side {
            fleet,
            router,
            active: Vec::new(),
        }
    }
}

/// Hits by number of worker, as a driver answers that owns the engines.
struct Asked(Vec<u32>);

impl CachedBlocks for Asked {
    fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        self.0[target].min(blocks.len() as u32)
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A prompt of this family and length. `None`: hits come from the index; else from the driver.
    Route {
        family: u64,
        len: u32,
        exclude: Option<u32>,
        session: Option<u64>,
        asked: Option<Vec<(u32, u32)>>,
    },
    First(prop::sample::Index),
    End(prop::sample::Index),
    Ready(u32, bool),
    Store {
        worker: u32,
        family: u64,
        blocks: u32,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let asked = prop::collection::vec((0..80u32, 0..12u32), 0..4);
    let route = (
        0..6u64,
        prop_oneof![Just(64u32), Just(256), 1..400u32],
        prop::option::weighted(0.1, 0..80u32),
        prop::option::weighted(0.1, 0..3u64),
        prop::option::of(asked),
    );
    prop_oneof![
        8 => route.prop_map(|(family, len, exclude, session, asked)| Op::Route {
            family, len, exclude, session, asked
        }),
        4 => any::<prop::sample::Index>().prop_map(Op::First),
        4 => any::<prop::sample::Index>().prop_map(Op::End),
        1 => (0..80u32, any::<bool>()).prop_map(|(worker, ready)| Op::Ready(worker, ready)),
        2 => (0..80u32, 0..6u64, 1..12u32).prop_map(|(worker, family, blocks)| Op::Store {
            worker, family, blocks
        }),
    ]
}

fn chain(family: u64, blocks: u32) -> Vec<BlockHash> {
    let mut parent = BlockHash(family);
    let child = |n| {
        parent = parent.child_of_id(family, n);
        parent
    };
    (0..u64::from(blocks)).map(child).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn an_order_of_loads_changes_no_decision(
        workers in prop_oneof![Just(31u32), 32..70u32],
        block_size in prop_oneof![Just(16u32), Just(48)],
        policy in prop_oneof![
            4 => Just(RouterPolicy::Kv),
            1 => Just(RouterPolicy::LeastRequests),
            1 => Just(RouterPolicy::LeastTokens),
            1 => Just(RouterPolicy::PowerOfTwo),
        ],
        prefill_weight in prop::sample::select(vec![0.0, 1e-3, 0.3, 0.7, 1.0, 1.0 / 3.0, 3.0, 1e17]),
        temperature in prop::sample::select(vec![0.0, 0.0, 0.0, 0.5]),
        affinity_ttl_s in prop::sample::select(vec![0.0, 60.0]),
        ops in prop::collection::vec(op(), 1..300),
    ) {
        let config = RouterConfig {
            policy,
            prefill_weight,
            temperature,
            affinity_ttl_s,
            ..RouterConfig::default()
        };
        let mut plain = Side::new(workers, block_size, &config, false);
        let mut ordered = Side::new(workers, block_size, &config, true);
        let mut sequences = vec![0; workers as usize];
        for op in ops {
            let mut results = Vec::new();
            for side in [&mut plain, &mut ordered] {
                match &op {
                    Op::Route { family, len, exclude, session, asked } => {
                        let blocks = chain(*family, len / block_size).into();
                        let tail = Tail::Opaque { id: *family };
                        let prompt = Prompt::from_parts(*len, block_size, blocks, tail).unwrap();
                        let exclude: Vec<WorkerId> = exclude.map(WorkerId).into_iter().collect();
                        let request = RouteRequest {
                            prompt: &prompt,
                            max_tokens: 16,
                            session: *session,
                            direct: None,
                            only: None,
                            exclude: &exclude,
                        };
                        let routed = match asked {
                            None => side.router.route(SimTime(0), &request, None),
                            Some(hits) => {
                                let mut asked = Asked(vec![0; workers as usize]);
                                for &(worker, hits) in hits {
                                    asked.0[(worker % workers) as usize] = hits;
                                }
                                side.router.route_by(SimTime(0), &request, &asked)
                            }
                        };
                        results.push(routed.map(|routed| {
                            side.active.push(routed.active);
                            (routed.target, routed.hit_blocks)
                        }));
                    }
                    Op::First(at) if !side.active.is_empty() => {
                        let at = at.index(side.active.len());
                        side.active[at].on_first_token();
                    }
                    Op::End(at) if !side.active.is_empty() => {
                        drop(side.active.swap_remove(at.index(side.active.len())));
                    }
                    Op::First(_) | Op::End(_) => {}
                    Op::Ready(worker, ready) => {
                        side.fleet.set_ready(WorkerId(worker % workers), *ready);
                    }
                    Op::Store { worker, family, blocks } => {
                        let worker = worker % workers;
                        let stored = chain(*family, *blocks);
                        let parents = std::iter::once(&BlockHash(0)).chain(&stored);
                        let op = |(&hash, &parent)| KvOp::Stored { hash, parent };
                        side.fleet.on_kv(&KvDelta {
                            rank: RankId { worker: WorkerId(worker), dp_rank: 0 },
                            sequence: sequences[worker as usize],
                            ops: stored.iter().zip(parents).map(op).collect(),
                        });
                    }
                }
            }
            if let Op::Store { worker, .. } = &op {
                sequences[(worker % workers) as usize] += 1;
            }
            if let [one, other] = &results[..] {
                prop_assert_eq!(one, other);
            }
        }
        prop_assert_eq!(plain.fleet.loads(), ordered.fleet.loads());
    }
}
