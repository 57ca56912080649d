//! The built-in transport, as its callers see it.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use rustix::event::{EventfdFlags, eventfd};
use slipstream_base::SimTime;
use slipstream_kvindex::PeerIndex;

use super::conn::Scheme;
use super::pull::Pulls;
use super::run::Run;
use super::{
    Address, Completion, Event, Fetch, FetchError, PeerId, SubmitError, TransferId, Transport,
    TransportError, TransportStats,
};
use crate::clock;
use crate::handshake::{Hello, Profile};
use crate::nixl::{Agent, NixlError, NixlOptions};
use crate::region::{Lease, Region};
use crate::tier::Tier;
use crate::tier::memory::MemoryTier;
use crate::wire::{BODY_BYTES_MAX, Get, Wanted};

/// How an endpoint is set up.
#[derive(Clone)]
pub struct EndpointOptions {
    /// What peers call this side in messages, such as host and port.
    pub name: String,
    /// What blocks depend on; see [`Profile`].
    pub profile: Profile,
    /// Where to listen; port 0 takes a free one. A file in a `unix:` address's place is replaced
    /// if no process listens there.
    pub listen: Vec<Address>,
    /// Blocks to give to peers.
    pub serves: Option<Arc<MemoryTier>>,
    /// Tiers with blocks that `serves` no longer holds, such as a disk, the fastest first. A block
    /// that a peer asks for is put back into `serves`, on a thread of its own.
    pub lower: Vec<Arc<dyn Tier>>,
    /// Where peers' messages about keys go; their slots are its peers.
    pub index: Option<Arc<PeerIndex>>,
    /// Whether blocks that came are compared with their checksum. Byte counts always are.
    pub verify: bool,
    /// Connections there may be.
    pub peers_max: usize,
    /// Transfers there may be, from submission to the poll that returns them.
    pub transfers_max: usize,
    /// A peer that is not heard for so long is cut off; pings go out four times as often.
    pub silence_max: Duration,
    /// How long a peer's request may hold blocks in their places, whatever deadline it names.
    pub serve_max: Duration,
    /// How long the thread looks for what is likely to come soon before it sleeps: an answer that is
    /// due, or another event after two that came as close to each other. It saves what waking up
    /// takes (some 5 to 50 µs each time), costs at most so much CPU time for each event, and is left
    /// off where it was in vain. Zero: the thread sleeps at once.
    pub spin: Duration,
    /// Whether blocks may be read by NIXL, from and by peers at `nixl:` addresses.
    pub nixl: Nixl,
}

/// What an endpoint has to do with NIXL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Nixl {
    /// Nothing; `nixl:` addresses are refused.
    #[default]
    Off,
    /// It may connect to `nixl:` addresses to follow keys. Blocks are not fetched: they are
    /// [`FetchError::Lost`].
    Keys,
    /// It moves blocks.
    On(NixlOptions),
}

impl EndpointOptions {
    /// Serves nothing and listens nowhere; 64 peers, 1,024 transfers, silence of 5 s, 50 µs of looking
    /// for more.
    pub fn new(name: &str, profile: Profile) -> EndpointOptions {
        EndpointOptions {
            name: name.to_owned(),
            profile,
            listen: Vec::new(),
            serves: None,
            lower: Vec::new(),
            index: None,
            verify: true,
            peers_max: 64,
            transfers_max: 1_024,
            silence_max: Duration::from_secs(5),
            serve_max: Duration::from_secs(30),
            spin: Duration::from_micros(50),
            nixl: Nixl::Off,
        }
    }
}

/// Shared memory, TCP and NIXL, on one thread of its own.
pub struct Endpoint {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    /// Files of `unix:` addresses, removed in the end.
    files: Vec<PathBuf>,
    thread: Option<JoinHandle<()>>,
    fetcher: Option<JoinHandle<()>>,
}

/// What callers and the thread share. Queues are lock-free; the thread holds no lock while it works.
pub(super) struct Shared {
    pub(super) options: EndpointOptions,
    pub(super) commands: ArrayQueue<Command>,
    pub(super) done: ArrayQueue<Completion>,
    peer_events: ArrayQueue<Event>,
    /// Submitted and not yet polled.
    in_flight: AtomicUsize,
    next_transfer: AtomicU64,
    pub(super) free_slots: ArrayQueue<u32>,
    pub(super) generations: Box<[AtomicU32]>,
    pub(super) wake: OwnedFd,
    pub(super) sleeping: AtomicBool,
    pub(super) stop: AtomicBool,
    pub(super) snapshot_wanted: AtomicBool,
    /// Peers get no more blocks.
    pub(super) is_mute: AtomicBool,
    pub(super) counters: Counters,
}

/// The parts of [`TransportStats`].
#[derive(Default)]
pub(super) struct Counters {
    pub(super) fetched_blocks: AtomicU64,
    pub(super) fetched_bytes: AtomicU64,
    pub(super) failed: [AtomicU64; 5],
    pub(super) served_blocks: AtomicU64,
    pub(super) served_bytes: AtomicU64,
    pub(super) absent: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) key_messages: AtomicU64,
    pub(super) key_errors: AtomicU64,
    pub(super) key_stale: AtomicU64,
    pub(super) slow_peers: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// What the thread is asked to do.
pub(super) enum Command {
    Connect(PeerId, Address),
    Disconnect(PeerId),
    Fetch(Transfer, Vec<u8>),
    Publish(Arc<[u8]>),
    Resync(PeerId),
    /// A peer's request, whose blocks are in memory now as far as they could be found.
    Found(PeerId, Get),
}

/// A peer's request for blocks of which some are in lower tiers.
pub(super) struct Find {
    pub(super) peer: PeerId,
    pub(super) get: Get,
    pub(super) due: SimTime,
}

/// Requests that may wait for the disk; those beyond are answered with what memory holds.
const FINDS_MAX: usize = 256;

/// Blocks under way.
pub(super) struct Transfer {
    pub(super) id: u64,
    pub(super) peer: PeerId,
    /// Where each block goes; taken when it is settled.
    pub(super) places: Vec<Option<Lease>>,
    pub(super) failed: Vec<(u32, FetchError)>,
    pub(super) bytes: u64,
    pub(super) began: SimTime,
    pub(super) deadline: SimTime,
}

impl Endpoint {
    /// Listens, and starts the thread.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn start(options: EndpointOptions) -> Result<Endpoint, TransportError> {
        let pulls = match &options.nixl {
            Nixl::On(nixl) => Some(start_nixl(nixl, options.serves.as_deref())?),
            Nixl::Off | Nixl::Keys => None,
        };
        Endpoint::start_with(options, pulls)
    }

    pub(super) fn start_with(
        options: EndpointOptions,
        pulls: Option<Pulls>,
    ) -> Result<Endpoint, TransportError> {
        let needs = |address: &&Address| matches!(address, Address::Nixl(_)) && pulls.is_none();
        if let Some(address) = options.listen.iter().find(needs) {
            let address = address.to_string();
            return Err(TransportError::NoNixl { address });
        }
        let mut listeners = Vec::new();
        let mut addresses = Vec::new();
        let mut files = Vec::new();
        for address in &options.listen {
            let (fd, bound) = listen(address)?;
            if let Address::Unix(path) = &bound {
                files.push(path.clone());
            }
            listeners.push(fd);
            addresses.push(bound);
        }
        let peers = options.peers_max.clamp(1, 1 << 16);
        let free_slots = ArrayQueue::new(peers);
        for slot in 0..peers as u32 {
            free_slots.push(slot).expect("as many as there is room for");
        }
        if let Some(index) = &options.index {
            assert!(index.peers() >= peers, "a place in the index for each peer");
        }
        let transfers_max = options.transfers_max.max(1);
        let shared = Arc::new(Shared {
            // In addition to transfers: connects, disconnects and messages about keys.
            commands: ArrayQueue::new(transfers_max + 2 * peers + 64),
            done: ArrayQueue::new(transfers_max),
            peer_events: ArrayQueue::new(4 * peers + 64),
            in_flight: AtomicUsize::new(0),
            next_transfer: AtomicU64::new(1),
            free_slots,
            generations: (0..peers).map(|_| AtomicU32::new(0)).collect(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(std::io::Error::from)?,
            sleeping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            snapshot_wanted: AtomicBool::new(false),
            is_mute: AtomicBool::new(false),
            counters: Counters::default(),
            options,
        });
        let mut fetcher = None;
        let mut finds = None;
        let options = &shared.options;
        if let (Some(memory), false) = (&options.serves, options.lower.is_empty()) {
            let (memory, lower) = (Arc::clone(memory), options.lower.clone());
            let (sender, receiver) = sync_channel(FINDS_MAX);
            let shared = Arc::clone(&shared);
            let find = move || promote(&receiver, &memory, &lower, &shared);
            let thread = std::thread::Builder::new().name("kv-promote".into());
            fetcher = Some(thread.spawn(find)?);
            finds = Some(sender);
        }
        let run = Run::new(Arc::clone(&shared), listeners, finds, pulls)?;
        let thread = std::thread::Builder::new()
            .name("kv-transport".into())
            .spawn(move || run.run())?;
        Ok(Endpoint {
            shared,
            addresses,
            files,
            thread: Some(thread),
            fetcher,
        })
    }

    /// Where it listens, with the ports that were taken.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Sends all peers a message about keys, of a [`slipstream_kvindex::KeySet`]. `false` if the
    /// thread is far behind and the message was dropped: then a snapshot is wanted.
    pub fn publish(&self, message: Vec<u8>) -> bool {
        let sent = message.len() <= BODY_BYTES_MAX
            && self.shared.command(Command::Publish(message.into()));
        if !sent {
            self.shared.snapshot_wanted.store(true, Ordering::Release);
        }
        sent
    }

    /// Whether some peer needs a snapshot since this was asked last: call
    /// [`slipstream_kvindex::KeySet::request_snapshot`] then.
    pub fn take_snapshot_wanted(&self) -> bool {
        self.shared.snapshot_wanted.load(Ordering::Acquire)
            && self.shared.snapshot_wanted.swap(false, Ordering::AcqRel)
    }

    /// Gives no more blocks to peers, which find all of them absent from now on. To be called before
    /// the memory it serves is cleared to hold something else.
    pub fn stop_serving(&self) {
        self.shared.is_mute.store(true, Ordering::SeqCst);
    }

    /// Asks a peer for a snapshot of its keys.
    pub fn request_snapshot(&self, peer: PeerId) {
        self.shared.command(Command::Resync(peer));
    }
}

impl Shared {
    fn command(&self, command: Command) -> bool {
        if self.commands.push(command).is_err() {
            return false;
        }
        self.wake();
        true
    }

    fn wake(&self) {
        // Pairs with the store before the thread looks at its commands for the last time: either
        // it sees the command, or this sees that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // It fails only where the count is full, which wakes as well.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn peer_event(&self, event: Event) {
        // A caller that never polls: what it does not know of old connections it need not know.
        drop(self.peer_events.force_push(event));
    }
}

impl Transport for Endpoint {
    fn connect(&self, address: &Address) -> Result<PeerId, SubmitError> {
        let shared = &*self.shared;
        let max = shared.generations.len();
        let slot = shared.free_slots.pop().ok_or(SubmitError::Peers { max })?;
        let generation = shared.generations[slot as usize].load(Ordering::Acquire);
        let peer = PeerId { slot, generation };
        if !shared.command(Command::Connect(peer, address.clone())) {
            let _ = shared.free_slots.push(slot);
            let max = shared.commands.capacity();
            return Err(SubmitError::Full { max });
        }
        Ok(peer)
    }

    fn disconnect(&self, peer: PeerId) {
        self.shared.command(Command::Disconnect(peer));
    }

    fn fetch(
        &self,
        peer: PeerId,
        region: &Arc<Region>,
        blocks: &[Fetch<'_>],
        deadline: Duration,
    ) -> Result<TransferId, SubmitError> {
        let shared = &*self.shared;
        let key_bytes = blocks
            .iter()
            .map(|block| block.key.len())
            .max()
            .unwrap_or(0);
        let bytes = blocks.len().saturating_mul(6 + key_bytes);
        let longest = blocks.iter().map(|block| block.len).max().unwrap_or(0);
        if key_bytes > usize::from(u16::MAX)
            || bytes > BODY_BYTES_MAX - 64
            || u32::try_from(longest).is_err()
        {
            return Err(SubmitError::TooLarge {
                blocks: blocks.len(),
                key_bytes,
            });
        }
        let mut places = Vec::with_capacity(blocks.len());
        for block in blocks {
            places.push(Some(region.lease(block.at, block.len)?));
        }
        let max = shared.done.capacity();
        // Each transfer has room for its completion before it begins.
        let reserved = shared
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now < max).then_some(now + 1)
            });
        if reserved.is_err() {
            return Err(SubmitError::Full { max });
        }
        let id = shared.next_transfer.fetch_add(1, Ordering::Relaxed);
        let began = clock::now();
        let deadline_ns = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let get = Get {
            request: id,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
            blocks: blocks
                .iter()
                .map(|block| Wanted {
                    key: block.key.into(),
                    len: block.len as u32,
                })
                .collect(),
        };
        let transfer = Transfer {
            id,
            peer,
            places,
            failed: Vec::new(),
            bytes: 0,
            began,
            deadline: began + deadline_ns,
        };
        if !shared.command(Command::Fetch(transfer, get.frame())) {
            shared.in_flight.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::Full { max });
        }
        Ok(TransferId(id))
    }

    fn poll(&self, max: usize, out: &mut Vec<Event>) -> usize {
        let shared = &*self.shared;
        let before = out.len();
        // Counted before the completions are taken: those of a connection are in their queue before
        // its end is reported, so that they come first.
        let peer_events = shared.peer_events.len();
        while out.len() - before < max
            && let Some(done) = shared.done.pop()
        {
            shared.in_flight.fetch_sub(1, Ordering::AcqRel);
            out.push(Event::Done(done));
        }
        let room = max - (out.len() - before);
        out.extend((0..peer_events.min(room)).map_while(|_| shared.peer_events.pop()));
        out.len() - before
    }

    fn stats(&self) -> TransportStats {
        let counters = &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransportStats {
            fetched_blocks_total: get(&counters.fetched_blocks),
            fetched_bytes_total: get(&counters.fetched_bytes),
            failed_total: std::array::from_fn(|at| get(&counters.failed[at])),
            served_blocks_total: get(&counters.served_blocks),
            served_bytes_total: get(&counters.served_bytes),
            absent_total: get(&counters.absent),
            refused_total: get(&counters.refused),
            malformed_total: get(&counters.malformed),
            key_messages_total: get(&counters.key_messages),
            key_errors_total: get(&counters.key_errors),
            key_stale_total: get(&counters.key_stale),
            slow_peers_total: get(&counters.slow_peers),
        }
    }
}

impl Drop for Endpoint {
    /// Ends the thread. Transfers under way end with it, and are not reported.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        // The second one ends with the first, which has its queue.
        for thread in [self.thread.take(), self.fetcher.take()]
            .into_iter()
            .flatten()
        {
            let _ = thread.join();
        }
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Puts blocks that peers ask for back into memory, until the transport's thread has ended.
fn promote(finds: &Receiver<Find>, memory: &MemoryTier, lower: &[Arc<dyn Tier>], shared: &Shared) {
    let mut block = Vec::new();
    while let Ok(Find { peer, get, due }) = finds.recv() {
        for wanted in &get.blocks {
            let now = clock::now();
            if now > due {
                break; // the requester has given up
            }
            let (key, len) = (&wanted.key, wanted.len as usize);
            let holds = |tier: &&Arc<dyn Tier>| tier.len_of(now, key) == Some(len);
            if memory.len_of(now, key).is_some() {
                continue;
            }
            let Some(tier) = lower.iter().find(holds) else {
                continue;
            };
            block.resize(len, 0);
            let epoch = memory.epoch();
            // After the epoch: what is cleared once this endpoint is mute stays so.
            if shared.is_mute.load(Ordering::SeqCst) {
                break;
            }
            // A block that cannot be read or finds no room is absent, and counted by its tier.
            if let Ok(true) = tier.get(now, key, &mut block)
                && let Err(error) = memory.put_in(epoch, now, key, &block)
            {
                tracing::warn!("a block that a peer asked for stays on disk: {error}");
            }
        }
        // A full queue empties soon, unless the transport ends.
        let mut found = Command::Found(peer, get);
        while clock::now() <= due && !shared.stop.load(Ordering::Acquire) {
            match shared.commands.push(found) {
                Ok(()) => {
                    shared.wake();
                    break;
                }
                Err(back) => found = back,
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

fn listen(address: &Address) -> Result<(OwnedFd, Address), TransportError> {
    let failed = |what| {
        let address = address.to_string();
        move |source| TransportError::Listen {
            address,
            what,
            source,
        }
    };
    match address {
        Address::Tcp(at) | Address::Nixl(at) => {
            let listener = TcpListener::bind(at).map_err(failed("listening"))?;
            listener
                .set_nonblocking(true)
                .map_err(failed("listening"))?;
            let bound = listener.local_addr().map_err(failed("listening"))?;
            let bound = match address {
                Address::Nixl(_) => Address::Nixl(bound),
                _ => Address::Tcp(bound),
            };
            Ok((listener.into(), bound))
        }
        Address::Unix(path) => {
            if std::os::unix::net::UnixStream::connect(path).is_err() {
                // Of a process that was killed: nothing listens there.
                let _ = std::fs::remove_file(path);
            }
            let listener = UnixListener::bind(path).map_err(failed("listening"))?;
            listener
                .set_nonblocking(true)
                .map_err(failed("listening"))?;
            Ok((listener.into(), address.clone()))
        }
    }
}

/// An agent that reads into memory of its own and gives `serves` away: all memory that it will ever
/// know of, registered once.
fn start_nixl(options: &NixlOptions, serves: Option<&MemoryTier>) -> Result<Pulls, NixlError> {
    static AGENTS: AtomicU64 = AtomicU64::new(0);
    let name = format!(
        "slipstream-{}-{}-{}",
        std::process::id(),
        clock::unix_ns(),
        AGENTS.fetch_add(1, Ordering::Relaxed)
    );
    let mut agent = Agent::new(options, &name)?;
    let staging = Region::new(Pulls::staging_bytes(options.staging_bytes));
    let served = serves.map(|tier| Arc::clone(tier.arena()));
    // SAFETY: `Pulls` keeps both where they are until the agent is dropped.
    unsafe {
        agent.register(staging.base(), staging.len())?;
        if let Some(arena) = &served {
            agent.register(arena.base(), arena.len())?;
        }
    }
    Pulls::new(Box::new(agent), &staging, served)
}

pub(super) fn hello(options: &EndpointOptions, way: Scheme) -> Hello {
    let bytes = match &options.serves {
        Some(tier) if way == Scheme::Map => tier.arena().len() as u64,
        _ => 0,
    };
    let transport = way.name();
    Hello::new(
        &options.name,
        clock::unix_ns(),
        bytes,
        &options.profile,
        transport,
    )
}
