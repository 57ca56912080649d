//! KV blocks that another engine has.

use std::sync::Arc;

use slipstream_base::{BlockHash, RequestId, SimTime};
use slipstream_config::cluster::{EngineConfig, HostTierConfig};
use slipstream_engine::{FoundAtPeer, PeerBlocks, PeerLoad};

use crate::rig::{Rig, request, small, tokens_of};

/// Another engine that has this many blocks of any prompt.
struct Peer(u32);

impl PeerBlocks for Peer {
    fn find(&self, _now: SimTime, blocks: &[BlockHash], have: u32) -> Option<FoundAtPeer> {
        let blocks = self.0.min(blocks.len() as u32);
        (blocks > have).then_some(FoundAtPeer { peer: 7, blocks })
    }
}

fn with_peer(config: &EngineConfig, blocks: u32) -> Rig {
    let mut rig = Rig::new(config);
    rig.engine.set_peers(Arc::new(Peer(blocks)));
    rig
}

fn loads(rig: &mut Rig) -> Vec<PeerLoad> {
    let mut loads = Vec::new();
    rig.engine.take_peer_loads(&mut loads);
    rig.engine.audit();
    loads
}

#[test]
fn a_prompt_waits_for_its_blocks_and_computes_the_rest() {
    // Nine tokens have two blocks that can be hit; the other engine has both, and sends some.
    for (sent, work) in [
        (2, (0, 0, 0, 1, 9)),
        (1, (1, 5, 4, 0, 0)),
        (0, (1, 9, 0, 0, 0)),
    ] {
        let mut rig = with_peer(&small(6), 5);
        rig.add_len(0, 9, 1);
        assert!(!rig.step(), "nothing can run");
        assert_eq!(rig.engine.stats().used_blocks, 3);
        let begun = loads(&mut rig);
        let load = &begun[0];
        assert_eq!((begun.len(), load.peer, load.have), (1, 7, 0));
        assert_eq!(load.blocks, request(0, &tokens_of(0, 9), 1).prompt.blocks());
        assert_eq!(load.not_before, SimTime(0));
        assert!(rig.engine.receive_from_peer(load.load, sent));
        assert!(!rig.engine.receive_from_peer(load.load, sent), "once");
        assert!(rig.step());
        assert_eq!(rig.work(), work);
        assert_eq!(rig.finished[&0].1.cached_tokens, 4 * sent);
        assert_eq!(rig.engine.stats().peer_hit_tokens, u64::from(4 * sent));
        assert_eq!(rig.engine.stats().used_blocks, 0);
    }
}

#[test]
fn other_requests_run_meanwhile() {
    let mut rig = with_peer(&small(12), 1);
    rig.add_len(0, 9, 1);
    rig.add_len(1, 3, 2); // too short for a hit
    assert!(rig.step());
    assert_eq!(rig.ids(), [1]);
    let load = loads(&mut rig)[0].load;
    assert!(rig.engine.receive_from_peer(load, 1));
    rig.run_until_idle();
    assert_eq!(rig.finished[&0].1.cached_tokens, 4);
}

#[test]
fn blocks_that_came_can_be_hit() {
    let mut rig = with_peer(&small(12), 2);
    let prompt = tokens_of(0, 9);
    rig.add(request(0, &prompt, 1)).unwrap();
    assert!(!rig.step());
    let load = loads(&mut rig)[0].load;
    assert!(rig.engine.receive_from_peer(load, 2));
    rig.run_until_idle();
    rig.add(request(1, &prompt, 1)).unwrap();
    rig.run_until_idle();
    assert_eq!(loads(&mut rig), []);
    let stats = rig.engine.stats();
    assert_eq!((stats.peer_hit_tokens, stats.prefix_hit_tokens), (8, 8));
    // And they are sent to others.
    assert_eq!(
        rig.engine.sends(request(2, &prompt, 1).prompt.blocks(), 1),
        1
    );
}

#[test]
fn its_own_blocks_are_loaded_at_the_same_time() {
    let mut rig = with_peer(
        &EngineConfig {
            host_tier: Some(HostTierConfig {
                blocks: 100,
                load_ns_per_block: 2_000_000,
                latency_ns: 500_000,
            }),
            ..small(6)
        },
        0,
    );
    rig.add_len(0, 5, 1);
    rig.run_until_idle();
    rig.add_len(1, 22, 1);
    rig.run_until_idle();
    rig.engine.set_peers(Arc::new(Peer(2)));
    // Five tokens of the first one's, and four more: one block is in host memory, and the next at the other engine.
    let mut prompt = tokens_of(0, 5);
    prompt.extend(tokens_of(3, 4));
    rig.add(request(2, &prompt, 1)).unwrap();
    assert!(
        !rig.step(),
        "the load is the driver's to end, and no pass polls for it"
    );
    let begun = loads(&mut rig);
    assert_eq!((begun[0].have, begun[0].blocks.len()), (1, 2));
    assert_eq!(begun[0].not_before, rig.now + 2_500_000);
    assert!(rig.engine.receive_from_peer(begun[0].load, 1));
    rig.run_until_idle();
    assert_eq!(rig.finished[&2].1.cached_tokens, 8);
    let stats = rig.engine.stats();
    assert_eq!((stats.host_hit_tokens, stats.peer_hit_tokens), (4, 4));
}

#[test]
fn a_request_that_is_aborted_meanwhile_leaves_nothing() {
    let mut rig = with_peer(&small(6), 2);
    rig.add_len(0, 9, 1);
    assert!(!rig.step());
    let load = loads(&mut rig)[0].load;
    assert!(rig.engine.abort(RequestId(0)));
    rig.engine.audit();
    assert_eq!(rig.engine.stats().used_blocks, 0);
    assert!(!rig.engine.receive_from_peer(load, 2));
    // So does a restart.
    rig.add_len(1, 9, 1);
    assert!(!rig.step());
    let load = loads(&mut rig)[0].load;
    rig.engine.restart();
    assert!(!rig.engine.receive_from_peer(load, 2));
    assert!(rig.engine.is_idle());
}
