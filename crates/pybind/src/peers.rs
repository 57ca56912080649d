//! Connections to other engines, kept up; and what those engines hold.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use slipstream_base::BlockHash;
use slipstream_kvindex::{PeerIndex, Reach, digest};
use slipstream_kvstore::{
    Address, Completion, Endpoint, EndpointOptions, Event, MemoryTier, Nixl, PeerId, Profile, Tier,
    Transport, clock,
};

use crate::groups::{Groups, all_hold};
use crate::keys::KeyMirror;
use crate::lock;
use crate::meeting::{Meeting, attend};
use crate::store::in_full;

/// A peer that could not be reached is tried again after this.
const RETRY: Duration = Duration::from_millis(500);
/// One whose blocks mean something else: somebody has to change a setting first.
const RETRY_REFUSED: Duration = Duration::from_secs(30);
/// Events taken from the transport in one go.
const EVENTS_MAX: usize = 256;
/// How often the index is fed and connections are looked at.
const PAUSE: Duration = Duration::from_millis(5);
/// Keys of forgotten peers that are swept from the index in one go.
const SWEEP_MAX: usize = 8_192;
/// Peers that a look-up compares in all groups, of those that hold most of one.
const CANDIDATES: usize = 4;
/// Connections beside those that this side makes.
const OTHERS_MAX: usize = 256;
/// Peers that are found in a folder, beside those of the list.
const FOUND_MAX: usize = 256;

/// Connections to the peers of a list, made again when they end, and to those found in a folder.
pub(crate) struct Links {
    pub(crate) endpoint: Endpoint,
    list: Mutex<Vec<Link>>,
    /// The folder, if there is one, was looked at.
    looked: AtomicBool,
    found: AtomicU64,
    left: AtomicU64,
}

struct Link {
    /// The same on all ranks of this engine.
    name: Arc<str>,
    /// At least one; another is tried when one fails.
    addresses: Vec<Address>,
    next: usize,
    /// Not made again when it ends: its engine has left the folder. `None`: of the list.
    leaving: Option<bool>,
    peer: Option<PeerId>,
    state: State,
    retry_at: Instant,
    /// What was last said of it, so that it is said once.
    said: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not tried yet, or under way for the first time since it stood.
    Hoped,
    Up,
    Down,
}

impl Link {
    fn new(name: Arc<str>, addresses: Vec<Address>, leaving: Option<bool>) -> Link {
        Link {
            name,
            addresses,
            next: 0,
            leaving,
            peer: None,
            state: State::Hoped,
            retry_at: Instant::now(),
            said: String::new(),
        }
    }
}

/// Reads the `slipstream.identity` of this side.
pub(crate) fn profile(given: &Bound<'_, PyDict>) -> PyResult<Profile> {
    let text = |name: &str| -> PyResult<String> {
        let value = given.get_item(name)?;
        value.map_or(Ok(String::new()), |value| value.extract())
    };
    let number = |name: &str| -> PyResult<u32> {
        let value = text(name)?;
        value.parse().map_err(|_| {
            PyValueError::new_err(format!(
                "`{name}` of the identity is `{value}`, not a number"
            ))
        })
    };
    let (tp, pp, rank) = (
        number("tensor_parallel")?,
        number("pipeline_parallel")?,
        number("rank")?,
    );
    Ok(Profile {
        model: text("model")?,
        weights: text("weights")?,
        config: text("config")?,
        hash_algo: text("hash_algorithm")?,
        hash_seed: text("hash_seed")?,
        block_size: number("block_size")?,
        block_bytes: number("block_bytes")?.into(),
        groups: text("groups")?,
        layout: format!("{} (format {})", text("layout")?, text("format")?),
        dtype: format!("{}, cache {}", text("dtype")?, text("kv_cache_dtype")?),
        tp: (tp, rank % tp.max(1)),
        pp: (pp, rank / tp.max(1)),
    })
}

fn parse(addresses: &[String]) -> PyResult<Vec<Address>> {
    let parse = |text: &String| match text.parse() {
        Ok(address) => Ok(address),
        Err(error) => Err(PyValueError::new_err(format!("{error}"))),
    };
    addresses.iter().map(parse).collect()
}

/// What a store gives to peers: its memory, and what lies below that.
pub(crate) struct Served {
    pub(crate) memory: Arc<MemoryTier>,
    pub(crate) deeper: Option<Arc<dyn Tier>>,
}

/// Whom a side connects to.
pub(crate) struct Contacts {
    pub(crate) listen: Vec<String>,
    /// Addresses of one rank each.
    pub(crate) peers: Vec<String>,
    /// What all ranks of this engine call these peers.
    pub(crate) names: Vec<String>,
    /// Others are found in a folder.
    pub(crate) meets: bool,
}

impl Links {
    pub(crate) fn start(
        profile: Profile,
        name: &str,
        contacts: Contacts,
        serves: Option<Served>,
        index_keys: Option<usize>,
        nixl: Nixl,
    ) -> PyResult<(Links, Option<Arc<PeerIndex>>)> {
        let Contacts {
            listen,
            peers,
            names,
            meets,
        } = contacts;
        if names.len() != peers.len() {
            return Err(PyValueError::new_err("one name a peer"));
        }
        let mut options = EndpointOptions::new(name, profile);
        options.listen = parse(&listen)?;
        if let Some(Served { memory, deeper }) = serves {
            (options.serves, options.deeper) = (Some(memory), deeper);
        }
        options.nixl = nixl;
        // Who listens nowhere is not connected to.
        let others = if listen.is_empty() { 0 } else { OTHERS_MAX };
        let found = if meets { FOUND_MAX } else { 0 };
        options.peers_max = peers.len() + others + found;
        let silence_ns = options.silence_max.as_nanos() as u64;
        let index = index_keys
            .map(|keys| Arc::new(PeerIndex::new(options.peers_max, keys, 2 * silence_ns)));
        options.index.clone_from(&index);
        let links = parse(&peers)?.into_iter().zip(names);
        let links = links.map(|(address, name)| Link::new(name.into(), vec![address], None));
        let list = Mutex::new(links.collect());
        let endpoint =
            Endpoint::start(options).map_err(|error| PyOSError::new_err(in_full(&error)))?;
        let links = Links {
            endpoint,
            list,
            looked: AtomicBool::new(!meets),
            found: AtomicU64::new(0),
            left: AtomicU64::new(0),
        };
        Ok((links, index))
    }

    /// An engine was found at these addresses.
    pub(crate) fn join(&self, name: &str, addresses: Vec<Address>) {
        let mut links = lock(&self.list);
        if let Some(link) = links.iter_mut().find(|link| *link.name == *name) {
            // It has come back, perhaps elsewhere.
            link.leaving = Some(false);
            (link.addresses, link.next) = (addresses, 0);
            link.retry_at = Instant::now();
            return;
        }
        // One that the list has, too, is connected to once.
        let listed = |link: &Link| link.addresses.iter().any(|at| addresses.contains(at));
        if links
            .iter()
            .any(|link| link.leaving.is_none() && listed(link))
        {
            return;
        }
        if links.iter().filter(|link| link.leaving.is_some()).count() == FOUND_MAX {
            tracing::warn!("no blocks of peer {name}: {FOUND_MAX} were found before it");
            return;
        }
        self.found.fetch_add(1, Ordering::Relaxed);
        links.push(Link::new(name.into(), addresses, Some(false)));
    }

    /// An engine is no longer found. A connection that stands is used until it ends.
    pub(crate) fn leave(&self, name: &str) {
        let mut links = lock(&self.list);
        let Some(at) = links.iter().position(|link| *link.name == *name) else {
            return;
        };
        if links[at].leaving.is_none() {
            return;
        }
        links[at].leaving = Some(true);
        if links[at].peer.is_none() {
            links.swap_remove(at);
            self.left.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whoever is in the folder is known.
    pub(crate) fn looked(&self) {
        self.looked.store(true, Ordering::Release);
    }

    /// Takes what happened, and connects to who is not connected. Returns whether anything did.
    pub(crate) fn poll(&self, mut on_done: impl FnMut(Completion)) -> bool {
        let mut events = Vec::new();
        self.endpoint.poll(EVENTS_MAX, &mut events);
        let busy = !events.is_empty();
        let now = Instant::now();
        for event in events {
            let (peer, up) = match event {
                Event::Done(done) => {
                    on_done(done);
                    continue;
                }
                Event::Up { peer, name } => (peer, Ok(name)),
                Event::Down { peer, why, refused } => (peer, Err((why, refused))),
            };
            let mut links = lock(&self.list);
            // Connections that the other side made are not in the list.
            let Some(at) = links.iter().position(|link| link.peer == Some(peer)) else {
                continue;
            };
            let link = &mut links[at];
            match up {
                Ok(name) => {
                    link.state = State::Up;
                    link.said.clear();
                    tracing::info!("peer {} is {name}", link.name);
                }
                Err((why, refused)) => {
                    link.state = State::Down;
                    link.peer = None;
                    link.retry_at = now + if refused { RETRY_REFUSED } else { RETRY };
                    link.next += 1;
                    if link.said != why {
                        tracing::warn!("no blocks of peer {}: {why}", link.name);
                        link.said = why;
                    }
                    if link.leaving == Some(true) {
                        links.swap_remove(at);
                        self.left.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        for link in lock(&self.list).iter_mut() {
            if link.peer.is_none() && now >= link.retry_at {
                link.retry_at = now + RETRY;
                let address = &link.addresses[link.next % link.addresses.len()];
                link.peer = self.endpoint.connect(address).ok();
            }
        }
        busy
    }

    /// Ends all connections, and with them all fetches.
    pub(crate) fn disconnect(&self) {
        for link in lock(&self.list).iter() {
            if let Some(peer) = link.peer {
                self.endpoint.disconnect(peer);
            }
        }
    }

    /// The connection to the peer of that name, if it stands.
    pub(crate) fn peer(&self, name: &str) -> Option<PeerId> {
        let links = lock(&self.list);
        let link = links.iter().find(|link| *link.name == *name)?;
        link.peer.filter(|_| link.state == State::Up)
    }

    /// The peers whose connections stand, and their slots.
    fn standing(&self) -> Vec<(Arc<str>, usize)> {
        let standing = |link: &Link| {
            let peer = link.peer.filter(|_| link.state == State::Up)?;
            Some((Arc::clone(&link.name), peer.slot as usize))
        };
        lock(&self.list).iter().filter_map(standing).collect()
    }

    fn is_settled(&self) -> bool {
        let links = lock(&self.list);
        self.looked.load(Ordering::Acquire) && links.iter().all(|link| link.state != State::Hoped)
    }

    pub(crate) fn count_found(&self, counts: &Bound<'_, PyDict>) -> PyResult<()> {
        counts.set_item("peers_found", self.found.load(Ordering::Relaxed))?;
        counts.set_item("peers_left", self.left.load(Ordering::Relaxed))
    }

    pub(crate) fn count(&self, counts: &Bound<'_, PyDict>) -> PyResult<()> {
        let stats = self.endpoint.stats();
        for (metric, count) in [
            ("hit_blocks.peer", stats.fetched_blocks_total),
            ("fetched_bytes", stats.fetched_bytes_total),
            ("served_blocks", stats.served_blocks_total),
            ("served_bytes", stats.served_bytes_total),
            ("peer_refused", stats.refused_total),
            ("peer_malformed", stats.malformed_total),
            ("peer_message_errors", stats.key_errors_total),
        ] {
            counts.set_item(metric, count)?;
        }
        Ok(())
    }
}

/// Where engines meet, from Python's arguments.
pub(crate) fn meeting(
    folder: Option<PathBuf>,
    engine: &str,
    identity: &Bound<'_, PyDict>,
    nixl: bool,
) -> PyResult<Option<Meeting>> {
    let Some(folder) = folder else {
        return Ok(None);
    };
    let identity: BTreeMap<String, String> = identity.extract()?;
    let rank = identity.get("rank").and_then(|rank| rank.parse().ok());
    Ok(Some(Meeting {
        folder,
        engine: engine.to_owned(),
        rank: rank.unwrap_or(0),
        identity,
        nixl,
    }))
}

struct Followed {
    /// By rank of this engine and its peers alike.
    ranks: Vec<Rank>,
    stop: AtomicBool,
}

/// The same rank of all peers.
struct Rank {
    links: Links,
    index: Arc<PeerIndex>,
}

/// A peer that may have what a look-up asks for.
struct Candidate {
    /// What all its ranks go by.
    name: Arc<str>,
    /// For each rank, where its index has this peer.
    slots: Vec<usize>,
    /// Blocks of the first group that follow those that are here, on every rank.
    blocks: usize,
}

impl Followed {
    /// The peers all of whose ranks are connected, by how many of `keys` all their ranks hold
    /// without a break.
    fn candidates(&self, keys: &[BlockHash]) -> Vec<Candidate> {
        let mut found = Vec::new();
        let mut overlaps = Vec::new();
        for (rank, Rank { links, index }) in self.ranks.iter().enumerate() {
            overlaps.resize(index.peers(), 0);
            index.overlap(keys, &mut overlaps);
            let standing = links.standing();
            if rank == 0 {
                found.extend(standing.into_iter().map(|(name, slot)| Candidate {
                    name,
                    slots: vec![slot],
                    blocks: overlaps[slot] as usize,
                }));
                continue;
            }
            found.retain_mut(|candidate| {
                let slot = standing.iter().find(|(name, _)| *name == candidate.name);
                slot.is_some_and(|&(_, slot)| {
                    candidate.slots.push(slot);
                    candidate.blocks = candidate.blocks.min(overlaps[slot] as usize);
                    true
                })
            });
        }
        found.sort_by_key(|candidate| std::cmp::Reverse(candidate.blocks)); // ties stay in order
        found
    }
}

/// What other engines hold; see `slipstream.vllm.scheduler.Peers`.
#[pyclass(module = "slipstream._native")]
pub(crate) struct Peers {
    followed: Arc<Followed>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[pymethods]
impl Peers {
    /// Follows the engines whose ranks are at these addresses: `peers[rank][engine]`; `keys_max`
    /// keys of all of them together for each rank.
    #[new]
    #[pyo3(signature = (
        *, identities, names, peers, keys_max, peers_dir=None, engine="", nixl=false
    ))]
    fn new(
        identities: Vec<Bound<'_, PyDict>>,
        names: Vec<String>,
        peers: Vec<Vec<String>>,
        keys_max: usize,
        peers_dir: Option<PathBuf>,
        engine: &str,
        nixl: bool,
    ) -> PyResult<Peers> {
        let engines = peers.first().map_or(0, Vec::len);
        if identities.len() != peers.len()
            || names.len() != peers.len()
            || peers.is_empty()
            || peers.iter().any(|rank| rank.len() != engines)
        {
            return Err(PyValueError::new_err(
                "one identity, name and address of each peer for every rank",
            ));
        }
        let called = peers[0].clone();
        let (mut ranks, mut meetings) = (Vec::new(), Vec::new());
        for ((identity, name), peers) in identities.iter().zip(&names).zip(peers) {
            let profile = profile(identity)?;
            let meeting = meeting(peers_dir.clone(), engine, identity, nixl)?;
            let contacts = Contacts {
                listen: Vec::new(),
                peers,
                names: called.clone(),
                meets: meeting.is_some(),
            };
            let keys_max = Some(keys_max);
            let (links, index) = Links::start(profile, name, contacts, None, keys_max, Nixl::Keys)?;
            let index = index.expect("an index was asked for");
            ranks.push(Rank { links, index });
            meetings.extend(meeting);
        }
        let followed = Arc::new(Followed {
            ranks,
            stop: AtomicBool::new(false),
        });
        let mine = Arc::clone(&followed);
        let thread = std::thread::Builder::new()
            .name("kv-peers".into())
            .spawn(move || {
                while !mine.stop.load(Ordering::Acquire) {
                    for rank in &mine.ranks {
                        rank.links.poll(|_| {});
                        while rank.index.tick(clock::now(), SWEEP_MAX) {}
                    }
                    std::thread::park_timeout(PAUSE);
                }
            })?;
        let mut threads = vec![thread];
        if !meetings.is_empty() {
            let mine = Arc::clone(&followed);
            let thread = std::thread::Builder::new().name("kv-meet".into());
            threads.push(thread.spawn(move || {
                let links = mine.ranks.iter().map(|rank| &rank.links);
                let sides: Vec<_> = meetings.iter().zip(links).collect();
                attend(None, &sides, || mine.stop.load(Ordering::Acquire));
            })?);
        }
        Ok(Peers {
            followed,
            threads: Mutex::new(threads),
        })
    }

    /// Who holds most of `hashes[start:end]`, each with `suffix`, without a break on every rank,
    /// and how many.
    fn prefix(
        &self,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
        suffix: &[u8],
    ) -> PyResult<(String, usize)> {
        let (mut digests, mut key) = (Vec::new(), Vec::new());
        for at in start..end.min(hashes.len()) {
            let hash = hashes.get_item(at)?;
            key.clear();
            key.extend_from_slice(hash.cast::<PyBytes>()?.as_bytes());
            key.extend_from_slice(suffix);
            digests.push(digest(&key));
        }
        let candidates = self.followed.candidates(&digests);
        let best = candidates.first().filter(|best| best.blocks > 0);
        Ok(best.map_or((String::new(), 0), |best| {
            (best.name.to_string(), best.blocks)
        }))
    }

    /// Which peer adds most to what this engine's ranks have, `stored`, and tokens of the hit
    /// with it: each block that the hit needs is on each rank here or there. `found` tokens and
    /// nobody where no peer adds to `found`, which is the hit with this engine's own blocks.
    #[allow(clippy::too_many_arguments)]
    fn longest(
        &self,
        groups: &Groups,
        stored: Vec<PyRef<'_, KeyMirror>>,
        hashes: &Bound<'_, PyList>,
        start: usize,
        end: usize,
        found: usize,
    ) -> PyResult<(String, usize)> {
        let followed = &self.followed;
        if stored.len() != followed.ranks.len() {
            return Err(PyValueError::new_err(format!(
                "{} ranks here and {} of the peers",
                stored.len(),
                followed.ranks.len()
            )));
        }
        let shapes = groups.shapes.groups();
        let end = groups.end(hashes, end);
        // A group that needs every block says who is worth a closer look.
        let leader = shapes.iter().position(|group| group.reach == Reach::All);
        let mut keys = groups.keys(hashes);
        let (mut own, mut digests) = (start, Vec::new());
        if let Some(leader) = leader {
            let mut leading = true;
            for block in shapes[leader].needed(start, end) {
                let Some(key) = keys.get(leader, block) else {
                    break;
                };
                leading = leading && all_hold(&stored, key);
                if leading {
                    own = (block + 1) * shapes[leader].block_tokens;
                } else {
                    digests.push(digest(key));
                }
            }
        }
        let (mut best, mut longest) = (None, found);
        for candidate in followed.candidates(&digests).into_iter().take(CANDIDATES) {
            if let Some(leader) = leader {
                let reach = own + candidate.blocks.min(digests.len()) * shapes[leader].block_tokens;
                if reach <= longest {
                    break; // nor does one of those that follow, which have less
                }
                if shapes.len() == 1 {
                    (best, longest) = (Some(candidate.name), reach);
                    break;
                }
            }
            let hit = groups.shapes.longest(start, end, |group, block| {
                let Some(key) = keys.get(group, block) else {
                    return false;
                };
                let digest = digest(key);
                let mut ranks = stored.iter().zip(&followed.ranks).zip(&candidate.slots);
                ranks.all(|((own, there), &slot)| {
                    own.set().contains(key) || there.index.holds(slot, digest)
                })
            });
            if hit > longest {
                (best, longest) = (Some(candidate.name), hit);
            }
        }
        if let Some(error) = keys.error {
            return Err(error);
        }
        let name = best.map_or_else(String::new, |name| name.to_string());
        Ok((name, longest))
    }

    /// Whether each peer's keys are known, or it cannot be reached.
    fn is_settled(&self) -> bool {
        let mut ranks = self.followed.ranks.iter();
        ranks.all(|rank| rank.links.is_settled() && !rank.index.awaits_snapshot())
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        let (mut refused, mut errors) = (0, 0);
        for rank in &self.followed.ranks {
            let stats = rank.links.endpoint.stats();
            refused += stats.refused_total;
            errors += stats.key_errors_total;
        }
        counts.set_item("peer_refused", refused)?;
        counts.set_item("peer_message_errors", errors)?;
        self.followed.ranks[0].links.count_found(&counts)?;
        Ok(counts)
    }

    fn close(&self, py: Python<'_>) {
        self.followed.stop.store(true, Ordering::Release);
        py.detach(|| {
            for thread in lock(&self.threads).drain(..) {
                thread.thread().unpark();
                let _ = thread.join();
            }
        });
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}
