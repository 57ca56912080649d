//! Rates and delays of links.

use slipstream_base::width::to_u64;

/// Rate and delay of the links of one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Rate, bits/s; from 1 to 10^15.
    pub bits_per_s: u64,
    /// Propagation delay, ns.
    pub delay_ns: u64,
}

/// Links by tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Between hosts and their switches; `None`: not modeled, a host sends directly at its switch.
    pub host: Option<Link>,
    /// Between switches.
    pub edge: Link,
    /// To and from core switches; global links of a dragonfly.
    pub core: Link,
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
