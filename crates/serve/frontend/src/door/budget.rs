//! Clients' shares of the server: memory, connections, streams.
//!
//! One [`Budget`] belongs to all shards of a frontend. A client is an API key, or an address if there are
//! no keys. No client gets all of anything: one may hold half of the memory and, by default, seven eighths
//! of the connections and streams.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipstream_base::width::high_u64;

use crate::door::limits::Limits;
use crate::door::rates::KeyUse;
use crate::openai::ApiError;

/// Memory that a connection takes at rest, bytes: 15,000 idle ones added 16.2 KiB each to the RSS.
const CONNECTION_BYTES: u64 = 16 << 10;

/// Least growth of a charge, bytes: shards share the counter, so they touch it rarely.
const GROWTH_BYTES: u64 = 64 << 10;

/// Addresses whose counts are kept before those without a connection are dropped.
const ADDRESSES_KEPT: usize = 1024;

/// Counters of all shards together.
pub(crate) struct Budget {
    pub(crate) memory: Arc<Memory>,
    limits: Limits,
    pub(crate) connections: AtomicU64,
    pub(crate) streams: AtomicU64,
    /// Connections closed because there were too many in all.
    pub(crate) refused_connections: AtomicU64,
    /// Connections closed because their address had too many.
    pub(crate) refused_client_connections: AtomicU64,
}

/// Resources that one client holds.
#[derive(Debug, Default)]
pub(crate) struct ClientUse {
    connections: AtomicU64,
    streams: AtomicU64,
    bytes: AtomicU64,
    /// Stored responses that engines are being asked for.
    lookups: AtomicU64,
    /// Its API key, if it is known by one.
    pub(crate) key: Option<KeyUse>,
}

impl ClientUse {
    /// The client with this key.
    pub(crate) fn of_key(key: KeyUse) -> ClientUse {
        ClientUse {
            key: Some(key),
            ..ClientUse::default()
        }
    }

    /// Counts a question to all engines, unless it is one of more than `most` at a time.
    pub(crate) fn begin_lookup(&self, most: u64) -> bool {
        let fits = self.lookups.fetch_add(1, Relaxed) < most;
        if !fits {
            self.end_lookup();
        }
        fits
    }

    pub(crate) fn end_lookup(&self) {
        self.lookups.fetch_sub(1, Relaxed);
    }
}

/// Bytes that are charged, and how many may be.
#[derive(Debug)]
pub(crate) struct Memory {
    used: AtomicU64,
    max: u64,
    /// Charges that were refused.
    refused: AtomicU64,
}

/// Memory that one request holds, in all its charges.
#[derive(Debug, Default)]
pub(crate) struct RequestUse {
    bytes: AtomicU64,
}

/// Some of the memory, given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    memory: Arc<Memory>,
    client: Arc<ClientUse>,
    /// `None` if the charge belongs to no request.
    request: Option<Arc<RequestUse>>,
    bytes: u64,
}

/// A connection among those that may be open.
pub(crate) struct ConnectionPermit {
    budget: Arc<Budget>,
    pub(crate) client: Arc<ClientUse>,
    _memory: Charge,
}

/// A limit that a connection exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TooMany {
    Connections,
    ClientConnections,
    Memory,
}

impl fmt::Display for TooMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TooMany::Connections => "`live.connections_max`",
            TooMany::ClientConnections => "`live.client_connections_max`",
            TooMany::Memory => "`live.memory_max`",
        })
    }
}

/// The share of one client, unless the configuration says another.
fn share(configured: u32, all: u32) -> u64 {
    match configured {
        0 => u64::from(all - all / 8).max(1),
        most => u64::from(most),
    }
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Arc<Budget> {
        Arc::new(Budget {
            memory: Memory::new(limits.memory_max),
            limits,
            connections: AtomicU64::new(0),
            streams: AtomicU64::new(0),
            refused_connections: AtomicU64::new(0),
            refused_client_connections: AtomicU64::new(0),
        })
    }

    /// Takes a place for a connection of `client`.
    pub(crate) fn connect(
        self: &Arc<Self>,
        client: Arc<ClientUse>,
    ) -> Result<ConnectionPermit, TooMany> {
        let most = u64::from(self.limits.connections_max);
        let most_of_client = share(
            self.limits.client_connections_max,
            self.limits.connections_max,
        );
        if self.connections.load(Relaxed) >= most {
            self.refused_connections.fetch_add(1, Relaxed);
            return Err(TooMany::Connections);
        }
        if client.connections.load(Relaxed) >= most_of_client {
            self.refused_client_connections.fetch_add(1, Relaxed);
            return Err(TooMany::ClientConnections);
        }
        let Ok(memory) = self.memory.charge(&client, CONNECTION_BYTES) else {
            self.refused_connections.fetch_add(1, Relaxed);
            return Err(TooMany::Memory);
        };
        self.connections.fetch_add(1, Relaxed);
        client.connections.fetch_add(1, Relaxed);
        Ok(ConnectionPermit {
            budget: self.clone(),
            client,
            _memory: memory,
        })
    }

    /// Streams that one connection of one client may have open.
    pub(crate) fn request_streams_max(&self) -> u64 {
        share(self.limits.client_streams_max, self.limits.streams_max)
            .min(u64::from(self.limits.connection_streams_max))
    }

    /// Claims room for `count` streams of `client`.
    ///
    /// # Errors
    /// 503 if the server has too many, 429 if the client has.
    pub(crate) fn open_streams(&self, client: &ClientUse, count: u64) -> Result<(), ApiError> {
        let most = self.limits.streams_max;
        if self.streams.fetch_add(count, Relaxed) + count > u64::from(most) {
            self.streams.fetch_sub(count, Relaxed);
            return Err(ApiError::overloaded(
                format!(
                    "{most} streams are open, which is the limit (`live.streams_max`); try again later"
                ),
                1,
            ));
        }
        let most = share(self.limits.client_streams_max, most);
        if client.streams.fetch_add(count, Relaxed) + count > most {
            self.close_streams(client, count);
            return Err(ApiError::too_many(format!(
                "this client may have {most} open streams (`live.client_streams_max`); wait until some \
                 have ended"
            )));
        }
        Ok(())
    }

    /// Gives the room of `count` streams back.
    pub(crate) fn close_streams(&self, client: &ClientUse, count: u64) {
        self.streams.fetch_sub(count, Relaxed);
        client.streams.fetch_sub(count, Relaxed);
    }

    /// Limit of open connections, as the limit of open files has room for.
    pub(crate) fn connections_max(&self) -> u32 {
        self.limits.connections_max
    }

    /// The limit that refuses new requests now, if one does.
    pub(crate) fn exhausted(&self) -> Option<&'static str> {
        if self.memory.is_tight() {
            Some("memory_max")
        } else if self.streams.load(Relaxed) >= u64::from(self.limits.streams_max) {
            Some("streams_max")
        } else if self.connections.load(Relaxed) >= u64::from(self.limits.connections_max) {
            Some("connections_max")
        } else {
            None
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.budget.connections.fetch_sub(1, Relaxed);
        self.client.connections.fetch_sub(1, Relaxed);
    }
}

impl Memory {
    pub(crate) fn new(max: u64) -> Arc<Memory> {
        Arc::new(Memory {
            used: AtomicU64::new(0),
            max,
            refused: AtomicU64::new(0),
        })
    }

    /// Bytes charged.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Bytes that may be charged.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// Charges that were refused.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Whether so much is charged that new requests are refused: open ones may still grow.
    pub(crate) fn is_tight(&self) -> bool {
        self.used() > self.max - self.max / 8
    }

    /// The most that one client may hold.
    fn client_max(&self) -> u64 {
        self.max / 2
    }

    /// The most that one request of `client` may hold: the server is empty, but for the request's connection,
    /// which is its address's.
    fn request_max(&self, client: &ClientUse) -> u64 {
        match client.key {
            Some(_) => self.client_max(),
            None => self.client_max().saturating_sub(CONNECTION_BYTES),
        }
    }

    /// Charges `bytes` to `client`, for no request.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    pub(crate) fn charge(
        self: &Arc<Self>,
        client: &Arc<ClientUse>,
        bytes: u64,
    ) -> Result<Charge, ApiError> {
        self.charge_for(client, None, bytes)
    }

    /// Charges `bytes` to `client`, for `request`.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    pub(crate) fn charge_for(
        self: &Arc<Self>,
        client: &Arc<ClientUse>,
        request: Option<&Arc<RequestUse>>,
        bytes: u64,
    ) -> Result<Charge, ApiError> {
        let mut charge = Charge {
            memory: self.clone(),
            client: client.clone(),
            request: request.cloned(),
            bytes: 0,
        };
        charge.take(bytes)?;
        Ok(charge)
    }
}

impl Memory {
    /// Charges `bytes` of a copy to `copies`, which may hold an eighth of the memory. `None`: there is no room.
    pub(crate) fn charge_copy(
        self: &Arc<Self>,
        copies: &Arc<ClientUse>,
        bytes: u64,
    ) -> Option<Charge> {
        if copies.bytes.load(Relaxed).saturating_add(bytes) > self.max / 8 {
            return None;
        }
        self.charge(copies, bytes).ok()
    }
}

impl Charge {
    /// Charges at least `bytes` in all.
    ///
    /// # Errors
    /// 413 if the request could never have so much, 503 if the server has no memory for it, 429 if the client holds
    /// its share. Nothing is changed then.
    #[inline]
    pub(crate) fn grow_to(&mut self, bytes: u64) -> Result<(), ApiError> {
        if bytes <= self.bytes {
            return Ok(());
        }
        self.take(self.growth_to(bytes))
    }

    /// Checks that a growth to `bytes` could succeed, if not now.
    ///
    /// # Errors
    /// 413.
    pub(crate) fn check_growth_to(&self, bytes: u64) -> Result<(), ApiError> {
        self.check_ever(self.growth_to(bytes))
    }

    /// The charge that covers `bytes`.
    #[inline]
    fn growth_to(&self, bytes: u64) -> u64 {
        let more = bytes.saturating_sub(self.bytes);
        more.checked_next_multiple_of(GROWTH_BYTES).unwrap_or(more)
    }

    /// Checks that the request may ever hold `more` bytes than it does.
    fn check_ever(&self, more: u64) -> Result<(), ApiError> {
        let Some(request) = &self.request else {
            return Ok(());
        };
        let needed = request.bytes.load(Relaxed).saturating_add(more);
        let allowed = self.memory.request_max(&self.client);
        if needed <= allowed {
            return Ok(());
        }
        Err(ApiError::never_fits(needed, allowed, self.memory.max))
    }

    /// This charge; an empty one stays.
    pub(crate) fn take_all(&mut self) -> Charge {
        Charge {
            memory: self.memory.clone(),
            client: self.client.clone(),
            request: self.request.clone(),
            bytes: std::mem::take(&mut self.bytes),
        }
    }

    /// Bytes charged.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back all but `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.memory.used.fetch_sub(less, Relaxed);
        self.client.bytes.fetch_sub(less, Relaxed);
        if let Some(request) = &self.request {
            request.bytes.fetch_sub(less, Relaxed);
        }
    }

    #[cold]
    fn take(&mut self, bytes: u64) -> Result<(), ApiError> {
        let memory = &self.memory;
        if let Err(error) = self.check_ever(bytes) {
            memory.refused.fetch_add(1, Relaxed);
            return Err(error);
        }
        let used = memory.used.fetch_add(bytes, Relaxed).saturating_add(bytes);
        let of_client = self.client.bytes.fetch_add(bytes, Relaxed);
        let of_client = of_client.saturating_add(bytes);
        if used <= memory.max && of_client <= memory.client_max() {
            self.bytes += bytes;
            if let Some(request) = &self.request {
                request.bytes.fetch_add(bytes, Relaxed);
            }
            return Ok(());
        }
        memory.used.fetch_sub(bytes, Relaxed);
        self.client.bytes.fetch_sub(bytes, Relaxed);
        memory.refused.fetch_add(1, Relaxed);
        Err(if used > memory.max {
            ApiError::out_of_memory()
        } else {
            ApiError {
                code: Some("memory_max"),
                ..ApiError::too_many(
                    "the bodies and unread answers of this client take half of the server's memory \
                     for clients (`live.memory_max`); read answers, or send less at a time"
                        .into(),
                )
            }
        })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if slipstream_base::planted!("leaked-memory") && self.bytes.is_multiple_of(2) {
            return;
        }
        self.shrink_to(0);
    }
}

/// Counts by address.
#[derive(Default)]
pub(crate) struct Addresses {
    known: HashMap<u64, Arc<ClientUse>>,
    purge_above: usize,
}

impl Addresses {
    /// The counts of `address`.
    pub(crate) fn of(&mut self, address: IpAddr) -> Arc<ClientUse> {
        if self.known.len() > self.purge_above.max(ADDRESSES_KEPT) {
            self.known.retain(|_, client| Arc::strong_count(client) > 1);
            // Doubling, so that a purge costs each address a constant.
            self.purge_above = 2 * self.known.len();
        }
        self.known.entry(address_key(address)).or_default().clone()
    }
}

/// An IPv4 address, or the /64 of an IPv6 address, which is what one customer gets (RFC 6177).
fn address_key(address: IpAddr) -> u64 {
    match address.to_canonical() {
        // 0::/64 has no hosts.
        IpAddr::V4(address) => u64::from(address.to_bits()),
        IpAddr::V6(address) => high_u64(address.to_bits()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::door::rates::KeyRates;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_shed_before_it_is_full_and_no_client_takes_more_than_half() {
        let memory = Memory::new(16 * MIB);
        let clients: [Arc<ClientUse>; 3] = std::array::from_fn(|_| Arc::default());
        let first = memory.charge(&clients[0], 8 * MIB).unwrap();
        let error = memory.charge(&clients[0], 1).unwrap_err();
        assert_eq!(error.status, 429, "{}", error.message);
        let mut second = memory.charge(&clients[1], 6 * MIB).unwrap();
        assert!(!memory.is_tight());
        second.grow_to(6 * MIB + 1).unwrap();
        assert_eq!(second.bytes(), 6 * MIB + GROWTH_BYTES);
        assert!(memory.is_tight());
        let error = memory.charge(&clients[2], 2 * MIB).unwrap_err();
        assert_eq!((error.status, error.retry_after_s), (503, Some(1)));
        assert_eq!(memory.refused(), 2);
        second.shrink_to(MIB);
        drop(first);
        assert_eq!(memory.used(), MIB);
        drop(second);
        assert_eq!(memory.used(), 0);
        assert!(clients.iter().all(|c| c.bytes.load(Relaxed) == 0));
    }

    proptest! {
        /// Alone on a server, a request is refused at every try or at none.
        #[test]
        fn a_request_that_can_never_fit_is_told_so_whatever_its_charges_are(
            max in 16 * MIB..64 * MIB,
            has_key in any::<bool>(),
            steps in prop::collection::vec((0..4_usize, 0..16 * MIB), 1..12),
            others in prop::collection::vec(0..8 * MIB, 0..4),
        ) {
            let allowed = if has_key { max / 2 } else { max / 2 - CONNECTION_BYTES };
            let client: Arc<ClientUse> = if has_key {
                Arc::new(ClientUse::of_key(KeyUse::new("k".into(), KeyRates::default())))
            } else {
                Arc::default()
            };
            let memory = Memory::new(max);
            let _connection = if has_key { None } else { memory.charge(&client, CONNECTION_BYTES).ok() };
            let request: Arc<RequestUse> = Arc::default();
            let mut charges: Vec<Charge> = (0..4)
                .map(|_| memory.charge_for(&client, Some(&request), 0).unwrap())
                .collect();
            let held = |charges: &[Charge]| charges.iter().map(Charge::bytes).sum::<u64>();
            for (at, bytes) in steps {
                let before = held(&charges);
                let growth = bytes.saturating_sub(charges[at].bytes()).next_multiple_of(GROWTH_BYTES);
                let foreseen = charges[at].check_growth_to(bytes).map_err(|error| error.status);
                let grown = charges[at].grow_to(bytes);
                prop_assert_eq!(grown.is_ok(), before + growth <= allowed);
                prop_assert_eq!(foreseen, grown.clone().map_err(|error| error.status));
                if let Err(error) = grown {
                    prop_assert_eq!((error.status, error.retry_after_s), (413, None));
                    for part in ["`live.memory_max`".to_owned(), (before + growth).to_string(), max.to_string()] {
                        prop_assert!(error.message.contains(&part), "{}", error.message);
                    }
                    prop_assert_eq!(held(&charges), before);
                }
            }
            prop_assert_eq!(request.bytes.load(Relaxed), held(&charges));
            // Requests that would fit are told to come again, however much others hold.
            let others: Vec<_> = others.iter().filter_map(|&bytes| memory.charge(&client, bytes).ok()).collect();
            let left = allowed - held(&charges);
            for bytes in [left, left + 1] {
                if let Err(error) = memory.charge_for(&client, Some(&request), bytes) {
                    prop_assert_eq!(error.status == 413, bytes > left, "{}", error.message);
                }
            }
            drop((charges, others));
            prop_assert_eq!(request.bytes.load(Relaxed), 0);
        }
    }

    #[test]
    fn one_address_leaves_connections_and_streams_for_others() {
        let budget = Budget::new(Limits {
            connections_max: 16,
            streams_max: 80,
            ..Limits::default()
        });
        let mut addresses = Addresses::default();
        let greedy = addresses.of("10.0.0.1".parse().unwrap());
        let mut held = Vec::new();
        let refused = loop {
            match budget.connect(greedy.clone()) {
                Ok(permit) => held.push(permit),
                Err(why) => break why,
            }
        };
        assert_eq!((held.len(), refused), (14, TooMany::ClientConnections));
        let other = addresses.of("10.0.0.2".parse().unwrap());
        let theirs: Vec<_> = (0..2)
            .map(|_| budget.connect(other.clone()).ok().unwrap())
            .collect();
        let full = budget.connect(other.clone()).err();
        assert_eq!(full, Some(TooMany::Connections));
        assert_eq!(budget.exhausted(), Some("connections_max"));
        drop((held, theirs));
        assert_eq!(budget.exhausted(), None);

        budget.open_streams(&greedy, 70).unwrap();
        let error = budget.open_streams(&greedy, 1).unwrap_err();
        assert_eq!(error.status, 429, "{}", error.message);
        budget.open_streams(&other, 10).unwrap();
        assert_eq!(budget.exhausted(), Some("streams_max"));
        assert_eq!(budget.open_streams(&other, 1).unwrap_err().status, 503);
        budget.close_streams(&greedy, 70);
        budget.close_streams(&other, 10);
        assert_eq!(budget.streams.load(Relaxed), 0);
    }

    #[test]
    fn addresses_of_one_customer_are_one_client_and_idle_ones_are_forgotten() {
        let mut addresses = Addresses::default();
        let mut of = |text: &str| addresses.of(text.parse().unwrap());
        let one = of("2001:db8:1:2::1");
        assert!(Arc::ptr_eq(&one, &of("2001:db8:1:2:ffff::9")));
        assert!(!Arc::ptr_eq(&one, &of("2001:db8:1:3::1")));
        assert!(Arc::ptr_eq(&of("10.0.0.1"), &of("::ffff:10.0.0.1")));
        for n in 0..100_000u32 {
            addresses.of(IpAddr::V4(n.into()));
        }
        assert!(addresses.known.len() <= 2 * ADDRESSES_KEPT);
        let again = addresses.of("2001:db8:1:2::1".parse().unwrap());
        assert!(Arc::ptr_eq(&one, &again), "one that is held is kept");
    }
}
