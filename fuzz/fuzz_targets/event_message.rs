//! MessagePack of engines: KV events that are applied to a view of bounded size, and forward-pass metrics.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run event_message`; the corpus is kept under
//! `fuzz/corpus/event_message`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slipstream_events::KvEventBatch;
use slipstream_probe::{KvMirror, MirrorOptions};

fuzz_target!(|bytes: &[u8]| {
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
        mirror.apply(&batch, &mut ops);
        assert!(mirror.held() <= 64);
    }
    mirror.clear(&mut ops);
    assert_eq!((mirror.held(), mirror.our_blocks()), (0, 0));
});
