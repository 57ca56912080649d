//! `[kv]`: the transfer of KV blocks from a prefill worker to a decode worker.

use crate::doc::{choice, section};

/// The initiator of the KV transfer of a prompt that another engine computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandOver {
    /// The decode worker fetches it when the prompt is computed and blocks are free.
    #[default]
    Pull,
    /// The prefill worker sends it when computed; the decode worker reserved blocks before.
    Push,
}

const HAND_OVERS: &[(&str, HandOver)] = &[("pull", HandOver::Pull), ("push", HandOver::Push)];

section! {
    /// `[kv]`.
    pub struct KvConfig, keys KvKeys of "kv", read in order {
        /// With prefill pools: `pull`: the decode worker fetches the KV of a computed prompt when blocks are free.
        /// `push`: it reserves blocks first, and the prefill worker sends. Real engines: always `pull`.
        ///
        /// pull: the prefill worker's blocks stay occupied until the decode worker has free ones. push: the decode
        /// worker's blocks are reserved while the prompt waits.
        hand_over: HandOver = choice(HAND_OVERS, HandOver::Pull);
    }
}
