//! Connections to the same rank of other engines, and their reconnection.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipstream_base::sync::lock;
use slipstream_base::width::nanos;
use slipstream_kvindex::PeerIndex;

use super::StoreError;
use crate::handshake::Profile;
use crate::tier::Tier;
use crate::tier::memory::MemoryTier;
use crate::transport::{
    Address, BlockEndpoint, BlockTransport, Completion, EndpointOptions, Nixl, PeerId,
    TransportEvent, TransportStats,
};

/// Delay before an unreachable peer is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// Delay for a peer with incompatible blocks: a setting has to change first.
const RETRY_REFUSED: Duration = Duration::from_secs(30);
/// Events taken from the transport at a time.
const EVENTS_MAX: usize = 256;
/// Maximum number of connections made by peers.
const OTHERS_MAX: usize = 256;
/// Maximum number of discovered peers, in addition to listed ones.
const DISCOVERED_MAX: usize = 256;

/// How the links of a rank are set up.
#[derive(Clone, Debug, Default)]
pub struct PeerOptions {
    /// The name of this side in messages of peers.
    pub name: String,
    /// The properties that its blocks depend on.
    pub profile: Profile,
    /// Where to listen. Empty: it only connects to others.
    pub listen: Vec<Address>,
    /// Peers to connect to: a name, the same on all ranks of this engine, and the address of this
    /// rank's peer.
    pub peers: Vec<(String, Address)>,
    /// How `nixl:` addresses are used.
    pub nixl: Nixl,
    /// How other engines are discovered.
    pub discovery: Option<super::PeerDiscovery>,
}

/// Connections to listed and discovered peers.
pub struct PeerLinks {
    pub(super) endpoint: BlockEndpoint,
    links: Mutex<Vec<Link>>,
    /// Whether discovery has listed the peers that were there at the start.
    is_synced: AtomicBool,
    found: AtomicU64,
    left: AtomicU64,
}

struct Link {
    /// The same on all ranks of this engine.
    name: Arc<str>,
    /// At least one; when one fails, the next is tried.
    addresses: Vec<Address>,
    next: usize,
    origin: Origin,
    peer: Option<PeerId>,
    state: State,
    retry_at: Instant,
    /// The last failure, so that it is logged once.
    failure: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Listed,
    Discovered,
    /// Its record was removed: no reconnection.
    Leaving,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not tried yet, or the first attempt since the last connection is in progress.
    Connecting,
    Up,
    Down,
}

impl Link {
    fn new(name: Arc<str>, addresses: Vec<Address>, origin: Origin) -> Link {
        Link {
            name,
            addresses,
            next: 0,
            origin,
            peer: None,
            state: State::Connecting,
            retry_at: Instant::now(),
            failure: String::new(),
        }
    }
}

/// The tiers whose blocks peers may fetch.
pub(super) struct Served {
    pub(super) memory: Arc<MemoryTier>,
    pub(super) lower: Vec<Arc<dyn Tier>>,
}

impl PeerLinks {
    /// Listens and connects. `serves` are the tiers whose blocks peers may fetch, `index_keys` the
    /// maximum number of peers' keys.
    pub(super) fn start(
        options: PeerOptions,
        serves: Option<Served>,
        index_keys: Option<usize>,
    ) -> Result<(PeerLinks, Option<Arc<PeerIndex>>), StoreError> {
        let is_discovering = options.discovery.is_some();
        let mut endpoint = EndpointOptions::new(&options.name, options.profile);
        // Peers cannot connect to a side that does not listen.
        let others = if options.listen.is_empty() {
            0
        } else {
            OTHERS_MAX
        };
        let discovered = if is_discovering { DISCOVERED_MAX } else { 0 };
        endpoint.peers_max = options.peers.len() + others + discovered;
        endpoint.listen = options.listen;
        if let Some(Served { memory, lower }) = serves {
            (endpoint.serves, endpoint.lower) = (Some(memory), lower);
        }
        endpoint.nixl = options.nixl;
        let silence_ns = nanos(endpoint.silence_max);
        let index = index_keys
            .map(|keys| Arc::new(PeerIndex::new(endpoint.peers_max, keys, 2 * silence_ns)));
        endpoint.index.clone_from(&index);
        let listed = options.peers.into_iter();
        let listed = listed.map(|(name, at)| Link::new(name.into(), vec![at], Origin::Listed));
        let links = PeerLinks {
            links: Mutex::new(listed.collect()),
            endpoint: BlockEndpoint::start(endpoint)?,
            is_synced: AtomicBool::new(!is_discovering),
            found: AtomicU64::new(0),
            left: AtomicU64::new(0),
        };
        Ok((links, index))
    }

    /// Adds a discovered engine, or updates its addresses.
    pub(super) fn add_discovered(&self, name: &str, addresses: Vec<Address>) {
        let mut links = lock(&self.links);
        if let Some(link) = links.iter_mut().find(|link| *link.name == *name) {
            // It has come back, perhaps at another address.
            link.origin = Origin::Discovered;
            (link.addresses, link.next) = (addresses, 0);
            link.retry_at = Instant::now();
            return;
        }
        let is_listed = |link: &Link| {
            link.origin == Origin::Listed && link.addresses.iter().any(|at| addresses.contains(at))
        };
        if links.iter().any(is_listed) {
            return;
        }
        let discovered = links.iter().filter(|link| link.origin != Origin::Listed);
        if discovered.count() == DISCOVERED_MAX {
            tracing::warn!(
                "ignoring peer {name}: limit of {DISCOVERED_MAX} discovered peers reached"
            );
            return;
        }
        self.found.fetch_add(1, Ordering::Relaxed);
        links.push(Link::new(name.into(), addresses, Origin::Discovered));
    }

    /// Handles the removal of an engine's record. A connection that is up is used until it ends.
    pub(super) fn remove_discovered(&self, name: &str) {
        let mut links = lock(&self.links);
        let Some(at) = links.iter().position(|link| *link.name == *name) else {
            return;
        };
        if links[at].origin == Origin::Listed {
            return;
        }
        links[at].origin = Origin::Leaving;
        if links[at].peer.is_none() {
            links.swap_remove(at);
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reports that discovery has listed the peers that were there at the start.
    pub(super) fn set_synced(&self) {
        self.is_synced.store(true, Ordering::Release);
    }

    /// Handles events, and connects to unconnected peers. Returns whether there was an event.
    pub(super) fn poll(&self, mut on_done: impl FnMut(Completion)) -> bool {
        let mut events = Vec::new();
        self.endpoint.poll(EVENTS_MAX, &mut events);
        let busy = !events.is_empty();
        let now = Instant::now();
        for event in events {
            match event {
                TransportEvent::Done(done) => on_done(done),
                TransportEvent::Up { peer, name } => self.on_up(peer, &name),
                TransportEvent::Down { peer, why, refused } => {
                    self.on_down(peer, why, refused, now);
                }
            }
        }
        for link in lock(&self.links).iter_mut() {
            if link.peer.is_none() && now >= link.retry_at {
                link.retry_at = now + RETRY;
                let address = &link.addresses[link.next % link.addresses.len()];
                link.peer = self.endpoint.connect(address).ok();
            }
        }
        busy
    }

    fn on_up(&self, peer: PeerId, name: &str) {
        let mut links = lock(&self.links);
        // Connections that the other side made have no link.
        let Some(link) = links.iter_mut().find(|link| link.peer == Some(peer)) else {
            return;
        };
        link.state = State::Up;
        link.failure.clear();
        tracing::info!("connected to peer {} ({name})", link.name);
    }

    fn on_down(&self, peer: PeerId, why: String, refused: bool, now: Instant) {
        let mut links = lock(&self.links);
        let Some(at) = links.iter().position(|link| link.peer == Some(peer)) else {
            return;
        };
        let link = &mut links[at];
        link.state = State::Down;
        link.peer = None;
        link.retry_at = now + if refused { RETRY_REFUSED } else { RETRY };
        link.next += 1;
        if link.failure != why {
            tracing::warn!("peer {} unavailable: {why}", link.name);
            link.failure = why;
        }
        if link.origin == Origin::Leaving {
            links.swap_remove(at);
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends all connections, and with them all fetches.
    pub(super) fn disconnect(&self) {
        for link in lock(&self.links).iter() {
            if let Some(peer) = link.peer {
                self.endpoint.disconnect(peer);
            }
        }
    }

    /// The connection to the peer of that name, if it is up.
    pub(super) fn peer(&self, name: &str) -> Option<PeerId> {
        let links = lock(&self.links);
        let link = links.iter().find(|link| *link.name == *name)?;
        link.peer.filter(|_| link.state == State::Up)
    }

    /// The peers whose connections are up, and their slots in the index.
    pub(super) fn connected(&self) -> Vec<(Arc<str>, usize)> {
        let connected = |link: &Link| {
            let peer = link.peer.filter(|_| link.state == State::Up)?;
            Some((Arc::clone(&link.name), peer.slot as usize))
        };
        lock(&self.links).iter().filter_map(connected).collect()
    }

    /// Whether each peer is connected or unreachable.
    pub(super) fn is_settled(&self) -> bool {
        let links = lock(&self.links);
        self.is_synced.load(Ordering::Acquire)
            && links.iter().all(|link| link.state != State::Connecting)
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[Address] {
        self.endpoint.addresses()
    }

    /// Counters.
    pub fn stats(&self) -> PeerStats {
        PeerStats {
            transport: self.endpoint.stats(),
            found_total: self.found.load(Ordering::Relaxed),
            left_total: self.left.load(Ordering::Relaxed),
        }
    }
}

/// Counters of the links of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerStats {
    /// Counters of the transport.
    pub transport: TransportStats,
    /// Discovered engines.
    pub found_total: u64,
    /// Discovered engines that left.
    pub left_total: u64,
}
