//! Read-only data that all shards share: the path table and the links' arithmetic.

use crate::link::{LinkClass, serialization_ns};
use crate::step::Step;
use slipstream_base::width::to_u32;

use crate::failure::OutageMap;
use crate::queueing::{Discipline, NO_INGRESS, Rules, Trim};

/// The rows of a flow in one direction, one per path: `first` and the following. A packet names its row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rows {
    pub(crate) first: u32,
    pub(crate) count: u32,
}

/// A change of a flow's paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reroute {
    pub(crate) at_ns: u64,
    pub(crate) flow: u32,
    /// Both directions.
    pub(crate) rows: [Rows; 2],
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

impl Net {
    /// Whether the packet of `size` that arrives at `now` over the link before `steps[at]` was on
    /// the link during an outage.
    #[cold]
    pub(crate) fn is_lost_before(&self, at: usize, now: u64, size: u32) -> bool {
        let Some(outages) = self.outages.get(&self.steps[at - 1].0) else {
            return false;
        };
        let LinkClass {
            bits_per_s,
            delay_ns,
        } = self.classes[outages.class as usize];
        let sent = now.saturating_sub(delay_ns + serialization_ns(u64::from(size), bits_per_s));
        outages
            .spans
            .iter()
            .any(|&(from, to)| from < now && to > sent)
    }
}
