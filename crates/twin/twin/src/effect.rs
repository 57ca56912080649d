//! The effect of each kind of fault on a worker.

use slipstream_config::cluster::Fault;

/// The effect of a fault on its worker while it is active. A crash also takes the worker's state.
pub(crate) struct Effect {
    pub(crate) takes_requests: bool,
    /// Factor on the times of its steps; `None` if no such fault changes them.
    pub(crate) pace: Option<f64>,
    /// Share that is left of its interface's rate.
    pub(crate) link_share: f64,
    /// Share of its KV events that is lost.
    pub(crate) kv_loss: f64,
    /// Additional delay of its KV events, ms.
    pub(crate) kv_delay_ms: f64,
}

impl Effect {
    pub(crate) const NONE: Effect = Effect {
        takes_requests: true,
        pace: None,
        link_share: 1.0,
        kv_loss: 0.0,
        kv_delay_ms: 0.0,
    };

    pub(crate) fn of(fault: Fault) -> Effect {
        match fault {
            Fault::Crash | Fault::Drain => Effect {
                takes_requests: false,
                ..Effect::NONE
            },
            Fault::Slow { factor } => Effect {
                pace: Some(factor),
                ..Effect::NONE
            },
            Fault::Link { share } => Effect {
                link_share: share,
                ..Effect::NONE
            },
            Fault::KvLoss { share } => Effect {
                kv_loss: share,
                ..Effect::NONE
            },
            Fault::KvLate { delay_ms } => Effect {
                kv_delay_ms: delay_ms,
                ..Effect::NONE
            },
            // These have states of their own.
            Fault::Gpu { .. }
            | Fault::Uplink { .. }
            | Fault::Frontend
            | Fault::Partition { .. }
            | Fault::Upgrade { .. } => Effect::NONE,
        }
    }

    /// Whether it may keep KV events from the router.
    pub(crate) fn hits_kv(fault: Fault) -> bool {
        matches!(
            fault,
            Fault::KvLoss { .. } | Fault::KvLate { .. } | Fault::Partition { .. }
        )
    }
}
