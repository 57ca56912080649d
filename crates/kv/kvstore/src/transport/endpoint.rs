//! The built-in transport: its interface and set-up.

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
use slipstream_base::width::to_u32;
use slipstream_kvindex::PeerIndex;

use super::conn::Scheme;
use super::pull::Pulls;
use super::run::Run;
use super::{
    Address, BlockTransport, Completion, Fetch, FetchError, PeerId, SubmitError, TransferId,
    TransportError, TransportEvent, TransportStats,
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
    /// The name of this side in messages of peers, such as host and port.
    pub name: String,
    /// The properties that blocks depend on; see [`Profile`].
    pub profile: Profile,
    /// Where to listen; port 0 picks a free one. The file of a `unix:` address is replaced if no
    /// process listens there.
    pub listen: Vec<Address>,
    /// Blocks to serve to peers.
    pub serves: Option<Arc<MemoryTier>>,
    /// Tiers with blocks that `serves` no longer holds, such as a disk, the fastest first. A
    /// requested block is put back into `serves`, on a separate thread.
    pub lower: Vec<Arc<dyn Tier>>,
    /// The index that peers' messages about keys update; its slots are this endpoint's peers.
    pub index: Option<Arc<PeerIndex>>,
    /// Whether the checksums of received blocks are verified. Lengths always are.
    pub verify: bool,
    /// Maximum number of connections.
    pub peers_max: usize,
    /// Maximum number of transfers, from submission to the poll that returns them.
    pub transfers_max: usize,
    /// A peer that sends nothing for this long is disconnected; pings are sent four times as often.
    pub silence_max: Duration,
    /// Maximum time that a peer's request may pin blocks, whatever its deadline.
    pub serve_max: Duration,
    /// How long the thread polls before it sleeps, if an event is likely soon: an answer is due, or
    /// the last two events came within this time. Polling saves the wake-up latency (some 5 to 50
    /// µs each). It costs at most this much CPU time per event, and is skipped where it was in
    /// vain. Zero: the thread sleeps at once.
    pub spin: Duration,
    /// Whether NIXL may move blocks, from and to peers at `nixl:` addresses.
    pub nixl: Nixl,
}

/// How an endpoint uses NIXL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Nixl {
    /// Not at all; `nixl:` addresses are refused.
    #[default]
    Off,
    /// It may connect to `nixl:` addresses to follow keys. Fetches fail with [`FetchError::Lost`].
    Keys,
    /// It moves blocks.
    On(NixlOptions),
}

impl EndpointOptions {
    /// Serves nothing and listens nowhere. Limits: 64 peers, 1,024 transfers, 5 s of silence, 50 µs
    /// of spinning.
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

/// The transport through shared memory, TCP and NIXL, on one thread.
pub struct BlockEndpoint {
    shared: Arc<Shared>,
    addresses: Vec<Address>,
    /// Files of `unix:` addresses, removed at the end.
    files: Vec<PathBuf>,
    thread: Option<JoinHandle<()>>,
    fetcher: Option<JoinHandle<()>>,
}

/// State that callers and the thread share. Queues are lock-free; the thread holds no lock while it
/// works.
pub(super) struct Shared {
    pub(super) options: EndpointOptions,
    pub(super) commands: ArrayQueue<Command>,
    pub(super) done: ArrayQueue<Completion>,
    peer_events: ArrayQueue<TransportEvent>,
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
    pub(super) is_serving_stopped: AtomicBool,
    pub(super) counters: Counters,
}

/// The counters of [`TransportStats`].
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

/// A command for the thread.
pub(super) enum Command {
    Connect(PeerId, Address),
    Disconnect(PeerId),
    Fetch(Transfer, Vec<u8>),
    Publish(Arc<[u8]>),
    Resync(PeerId),
    /// A peer's request, whose blocks have been put into memory if a tier had them.
    Promoted(PeerId, Get),
}

/// A peer's request for blocks of which some are in lower tiers.
pub(super) struct Promotion {
    pub(super) peer: PeerId,
    pub(super) get: Get,
    pub(super) due: SimTime,
}

/// Maximum number of requests that wait for the disk; those beyond get the blocks in memory only.
const PROMOTIONS_MAX: usize = 256;

/// A transfer in flight.
pub(super) struct Transfer {
    pub(super) id: u64,
    pub(super) peer: PeerId,
    /// The destination of each block; taken when the block is settled.
    pub(super) destinations: Vec<Option<Lease>>,
    pub(super) failed: Vec<(u32, FetchError)>,
    pub(super) bytes: u64,
    pub(super) started: SimTime,
    pub(super) deadline: SimTime,
}

impl BlockEndpoint {
    /// Listens, and starts the thread.
    ///
    /// # Errors
    ///
    /// [`TransportError`].
    pub fn start(options: EndpointOptions) -> Result<BlockEndpoint, TransportError> {
        let pulls = match &options.nixl {
            Nixl::On(nixl) => Some(start_nixl(nixl, options.serves.as_deref())?),
            Nixl::Off | Nixl::Keys => None,
        };
        BlockEndpoint::start_with(options, pulls)
    }

    pub(super) fn start_with(
        options: EndpointOptions,
        pulls: Option<Pulls>,
    ) -> Result<BlockEndpoint, TransportError> {
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
        for slot in 0..to_u32(peers) {
            free_slots
                .push(slot)
                .expect("the queue has room for all slots");
        }
        if let Some(index) = &options.index {
            assert!(index.peers() >= peers, "the index has a slot for each peer");
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
            is_serving_stopped: AtomicBool::new(false),
            counters: Counters::default(),
            options,
        });
        let mut fetcher = None;
        let mut promotions = None;
        let options = &shared.options;
        if let (Some(memory), false) = (&options.serves, options.lower.is_empty()) {
            let (memory, lower) = (Arc::clone(memory), options.lower.clone());
            let (sender, receiver) = sync_channel(PROMOTIONS_MAX);
            let shared = Arc::clone(&shared);
            let find = move || promote(&receiver, &memory, &lower, &shared);
            let thread = std::thread::Builder::new().name("kv-promote".into());
            fetcher = Some(thread.spawn(find)?);
            promotions = Some(sender);
        }
        let run = Run::new(Arc::clone(&shared), listeners, promotions, pulls)?;
        let thread = std::thread::Builder::new()
            .name("kv-transport".into())
            .spawn(move || run.run())?;
        Ok(BlockEndpoint {
            shared,
            addresses,
            files,
            thread: Some(thread),
            fetcher,
        })
    }

    /// The addresses where it listens, with the actual ports.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Sends a message about keys, from a [`slipstream_kvindex::KeySet`], to all peers. `false` if
    /// the thread is too far behind and the message was dropped: a snapshot is needed then.
    pub fn publish(&self, message: Vec<u8>) -> bool {
        let sent = message.len() <= BODY_BYTES_MAX
            && self.shared.command(Command::Publish(message.into()));
        if !sent {
            self.shared.snapshot_wanted.store(true, Ordering::Release);
        }
        sent
    }

    /// Whether a peer has needed a snapshot since the last call. If so, call
    /// [`slipstream_kvindex::KeySet::request_snapshot`].
    pub fn take_snapshot_wanted(&self) -> bool {
        self.shared.snapshot_wanted.load(Ordering::Acquire)
            && self.shared.snapshot_wanted.swap(false, Ordering::AcqRel)
    }

    /// Stops serving: peers find all blocks absent from now on. Call it before the served memory is
    /// cleared for incompatible blocks.
    pub fn stop_serving(&self) {
        self.shared.is_serving_stopped.store(true, Ordering::SeqCst);
    }

    /// Requests a snapshot of a peer's keys.
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
        // Pairs with the store before the thread's last check of its commands: either it sees the
        // command, or this sees that it sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // Fails only if the counter is at its maximum, which wakes the thread as well.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn peer_event(&self, event: TransportEvent) {
        // If the caller never polls, the oldest events are dropped.
        drop(self.peer_events.force_push(event));
    }
}

impl BlockTransport for BlockEndpoint {
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
        let mut destinations = Vec::with_capacity(blocks.len());
        for block in blocks {
            destinations.push(Some(region.lease(block.at, block.len)?));
        }
        let max = shared.done.capacity();
        // Each transfer reserves room for its completion before it starts.
        let reserved = shared
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                (now < max).then_some(now + 1)
            });
        if reserved.is_err() {
            return Err(SubmitError::Full { max });
        }
        let id = shared.next_transfer.fetch_add(1, Ordering::Relaxed);
        let started = clock::now();
        let deadline_ns = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let get = Get {
            request: id,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
            blocks: blocks
                .iter()
                .map(|block| Wanted {
                    key: block.key.into(),
                    len: to_u32(block.len),
                })
                .collect(),
        };
        let transfer = Transfer {
            id,
            peer,
            destinations,
            failed: Vec::new(),
            bytes: 0,
            started,
            deadline: started + deadline_ns,
        };
        if !shared.command(Command::Fetch(transfer, get.frame())) {
            shared.in_flight.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::Full { max });
        }
        Ok(TransferId(id))
    }

    fn poll(&self, max: usize, out: &mut Vec<TransportEvent>) -> usize {
        let shared = &*self.shared;
        let before = out.len();
        // Counted before the completions are taken. The completions of a connection are queued
        // before its end is reported, so they are returned first.
        let peer_events = shared.peer_events.len();
        while out.len() - before < max
            && let Some(done) = shared.done.pop()
        {
            shared.in_flight.fetch_sub(1, Ordering::AcqRel);
            out.push(TransportEvent::Done(done));
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

impl Drop for BlockEndpoint {
    /// Ends the thread. Transfers in flight end with it, and are not reported.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        // The second thread ends with the first, which owns its queue.
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

/// Puts requested blocks back into memory, until the transport's thread has ended.
fn promote(
    promotions: &Receiver<Promotion>,
    memory: &MemoryTier,
    lower: &[Arc<dyn Tier>],
    shared: &Shared,
) {
    let mut block = Vec::new();
    while let Ok(Promotion { peer, get, due }) = promotions.recv() {
        for wanted in &get.blocks {
            let now = clock::now();
            if now > due {
                break; // past the requester's deadline
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
            // Checked after the epoch was read, so that no block enters memory that is cleared
            // after `stop_serving`.
            if shared.is_serving_stopped.load(Ordering::SeqCst) {
                break;
            }
            // A block that cannot be read or finds no room is absent, and its tier counts it.
            if let Ok(true) = tier.get(now, key, &mut block)
                && let Err(error) = memory.put_in(epoch, now, key, &block)
            {
                tracing::warn!("a requested block stays on disk: {error}");
            }
        }
        // A full queue empties soon, unless the transport ends.
        let mut found = Command::Promoted(peer, get);
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
                // Left by a killed process: nothing listens there.
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

/// Creates an agent that reads into its own staging memory and exports `serves`. Both are
/// registered once.
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
    // SAFETY: `Pulls` keeps both alive and in place until the agent is dropped.
    unsafe {
        agent.register(staging.base(), staging.len())?;
        if let Some(arena) = &served {
            agent.register(arena.base(), arena.len())?;
        }
    }
    Pulls::new(Box::new(agent), &staging, served)
}

pub(super) fn hello(options: &EndpointOptions, scheme: Scheme) -> Hello {
    let bytes = match &options.serves {
        Some(tier) if scheme == Scheme::Map => tier.arena().len() as u64,
        _ => 0,
    };
    let transport = scheme.name();
    Hello::new(
        &options.name,
        clock::unix_ns(),
        bytes,
        &options.profile,
        transport,
    )
}
