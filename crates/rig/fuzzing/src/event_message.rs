//! MessagePack of engines: KV events that are applied to a view of bounded size, and forward-pass metrics.

use slipstream_events::KvEventBatch;
use slipstream_probe::{KvMirror, MirrorOptions};

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    slipstream_events::fuzz::check_messages(bytes);
    let Ok(batch) = KvEventBatch::decode(bytes) else {
        return;
    };
    let mut mirror = KvMirror::new(MirrorOptions {
        model: "m".into(),
        block_size: 4,
        blocks_max: 64,
    });
    let mut ops = Vec::new();
    for _ in 0..2 {
        let reading = mirror.apply(&batch, &mut ops);
        assert!(reading.unreadable <= reading.events && reading.views_lost <= reading.unreadable);
        assert!(mirror.held() <= 64);
    }
    mirror.clear(&mut ops);
    assert_eq!((mirror.held(), mirror.our_blocks()), (0, 0));
}
