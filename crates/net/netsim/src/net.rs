//! Read-only data that all shards share: the path table and the links' arithmetic.

use slipstream_base::width::{to_u32, to_u64};

use crate::buffer::{NO_INGRESS, Rules};
use crate::failure::OutageMap;
use crate::scheduled::Discipline;
use crate::trim::Trim;

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

/// Rate and delay of a kind of link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinkClass {
    pub(crate) bits_per_s: u64,
    pub(crate) delay_ns: u64,
}

/// Transmission time of `bytes` on a link: ⌈8·bytes·10⁹ / rate⌉ ns.
pub(crate) fn serialization_ns(bytes: u64, bits_per_s: u64) -> u64 {
    to_u64((u128::from(bytes) * 8_000_000_000).div_ceil(u128::from(bits_per_s)))
}

/// The path table and link arithmetic, shared by all shards.
pub(crate) struct Net {
    /// Row r's steps are `steps[r * stride..]`, ended by its endpoint.
    pub(crate) steps: Vec<Step>,
    pub(crate) stride: usize,
    /// Serialization time of a size on a class of link: `serialization[class * sizes + size]`, ns.
    pub(crate) serialization: Vec<u64>,
    pub(crate) sizes: usize,
    pub(crate) classes: Vec<LinkClass>,
    /// Traffic class of each row.
    pub(crate) row_class: Vec<u8>,
    /// Discipline of scheduled ports.
    pub(crate) discipline: Discipline,
    /// Links that fail; empty in most runs.
    pub(crate) outages: OutageMap,
    /// Rules of trimming ports.
    pub(crate) trim: Trim,
    /// Shared buffers and PFC.
    pub(crate) rules: Rules,
    /// The ingress through which a packet comes to the port at the same index of `steps`; empty
    /// without shared buffers and PFC.
    pub(crate) ingress: Vec<u32>,
    /// By row: the row of the reverse path over the same links, and its ports. Empty if packets are
    /// never returned.
    pub(crate) back: Vec<(u32, u32)>,
}

impl Net {
    pub(crate) fn new(
        stride: usize,
        size_max: u32,
        classes: Vec<LinkClass>,
        discipline: Discipline,
    ) -> Self {
        let sizes = size_max as usize + 1;
        let serialization = classes
            .iter()
            .flat_map(|c| (0..sizes as u64).map(|b| serialization_ns(b, c.bits_per_s)))
            .collect();
        Net {
            steps: Vec::new(),
            stride,
            serialization,
            sizes,
            classes,
            row_class: Vec::new(),
            discipline,
            outages: OutageMap::new(),
            trim: Trim::default(),
            rules: Rules::default(),
            ingress: Vec::new(),
            back: Vec::new(),
        }
    }

    #[inline]
    pub(crate) fn serialization(&self, class: u16, size: u32) -> u64 {
        self.serialization[class as usize * self.sizes + size as usize]
    }

    /// The ingress of the packet at `steps[at]`.
    #[inline]
    pub(crate) fn ingress_at(&self, at: usize) -> u32 {
        self.ingress.get(at).copied().unwrap_or(NO_INGRESS)
    }

    pub(crate) fn add_row(&mut self, steps: &[Step]) -> u32 {
        let row = self.steps.len() / self.stride;
        debug_assert!(steps.len() <= self.stride);
        self.steps.extend_from_slice(steps);
        self.steps.resize((row + 1) * self.stride, Step::NONE);
        to_u32(row)
    }
}
