//! Address of a packet's next hop: a port or an endpoint.

use slipstream_base::width::to_u32;

/// The next hop of a packet: a port or an endpoint of a shard, in 32 bits.
///
/// Shard in bits 24..32, [`Place`] in 20..24, index within the shard in 0..20.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step(pub(crate) u32);

/// Kind of port or endpoint of a [`Step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Fifo,
    Scheduled,
    TcpSender,
    TcpReceiver,
    QpSender,
    QpReceiver,
    NdpSender,
    NdpReceiver,
    RawSender,
    RawReceiver,
    Host,
    None,
    Trim,
    Ingress,
    OtherSender,
    OtherReceiver,
}

const PLACES: [Place; 16] = [
    Place::Fifo,
    Place::Scheduled,
    Place::TcpSender,
    Place::TcpReceiver,
    Place::QpSender,
    Place::QpReceiver,
    Place::NdpSender,
    Place::NdpReceiver,
    Place::RawSender,
    Place::RawReceiver,
    Place::Host,
    Place::None,
    Place::Trim,
    Place::Ingress,
    Place::OtherSender,
    Place::OtherReceiver,
];

/// Shards that a [`Step`] can represent.
pub(crate) const SHARDS_MAX: u32 = 256;
/// Ports or endpoints of one kind per shard.
pub(crate) const INDEX_MAX: usize = 1 << 20;

impl Step {
    pub(crate) const NONE: Step = Step(11 << 20);

    pub(crate) fn new(shard: u32, place: Place, index: usize) -> Step {
        assert!(shard < SHARDS_MAX && index < INDEX_MAX, "{shard} {index}");
        Step(shard << 24 | (place as u32) << 20 | to_u32(index))
    }

    #[inline]
    pub(crate) fn shard(self) -> usize {
        (self.0 >> 24) as usize
    }

    #[inline]
    pub(crate) fn place(self) -> Place {
        PLACES[(self.0 >> 20 & 15) as usize]
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        (self.0 & 0xf_ffff) as usize
    }
}
