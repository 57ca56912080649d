//! The role of an engine.

/// The part of a request that an engine computes, and so the role of a pool of engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Prefill and decode in the same engine.
    #[default]
    Both,
    /// Prefill only; the KV cache is transferred to a decode engine.
    Prefill,
    /// Decode only.
    Decode,
}

impl Role {
    /// Its name in a cluster file.
    pub fn name(self) -> &'static str {
        match self {
            Role::Both => "both",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}
