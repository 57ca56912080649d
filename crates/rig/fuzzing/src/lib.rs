//! Checks of the decoders of external input: no bytes make them panic, and what they accept keeps their promises.
//!
//! `make fuzz` runs each under libFuzzer (`fuzz/fuzz_targets`), and the tests of this crate run them on the recorded
//! inputs (`fuzz/corpus`) and on damaged copies. docs/reliability.md lists the promises.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

pub mod cluster_file;
pub mod event_message;
pub mod flow_list;
pub mod http_body;
pub mod metrics_page;
pub mod network_file;
pub mod record;
pub mod rt_app;
pub mod trace;
pub mod wire;
pub mod workload_file;

pub use slipstream_events::fuzz::check_zmtp as zmtp;
pub use slipstream_frontend::upstream::fuzz::check as engine_answer;
pub use slipstream_kvindex::fuzz::check as key_message;
pub use slipstream_kvstore::fuzz::{check as kv_wire, check_block_file as block_file};

/// Checks one input, and panics if a promise does not hold.
pub type Check = fn(&[u8]);

/// All targets by name: of their file in `fuzz/fuzz_targets`, and of their folder in `fuzz/corpus`.
pub const TARGETS: [(&str, Check); 16] = [
    ("block_file", block_file),
    ("cluster_file", cluster_file::check),
    ("engine_answer", engine_answer),
    ("event_message", event_message::check),
    ("flow_list", flow_list::check),
    ("http_body", http_body::check),
    ("key_message", key_message),
    ("kv_wire", kv_wire),
    ("metrics_page", metrics_page::check),
    ("network_file", network_file::check),
    ("record", record::check),
    ("rt_app", rt_app::check),
    ("trace", trace::check),
    ("wire", wire::check),
    ("workload_file", workload_file::check),
    ("zmtp", zmtp),
];
