//! Reads of peers' blocks by NIXL: those in flight, and their destinations.
//!
//! The messages are those of shared memory: the peer pins the requested blocks, and this side reads
//! and releases them. But a read cannot be cancelled. It may end after the deadline of its
//! transfer, when the destinations belong to the caller again. So reads go to *slots*, staging
//! memory of this side, and a slot is reused only after its read has ended. From there blocks are
//! copied to their destinations, and verified during the copy.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use slipstream_base::SimTime;
use slipstream_base::width::{to_u32, to_usize};

use super::conn::{Conn, Piece, Scheme};
use super::run::{CloseReason, Run, TURN_BYTES, destination_of};
use super::{FetchError, PeerId};
use crate::arena::Arena;
use crate::copy::copy_hashed;
use crate::nixl::{NixlError, OneSided, ReadState, Span, Ticket};
use crate::region::{Lease, Region};
use crate::wire::{Answer, FrameKind, Introduction, frame};
use crate::{checksum, clock};

/// Size of a slot, and so of the longest read. Large enough that the cost per read is small, small
/// enough that one is verified while others are in flight.
const SLOT_BYTES: usize = 1 << 20;
/// A peer may use this fraction of the slots, so that a peer that hangs leaves some to others.
const SHARE: usize = 4;
/// Interval at which the thread polls reads in flight and progresses those of peers, after it has
/// spun. Short reads end within it, and a stuck one does not occupy a core.
const PAUSE_NS: u64 = 20_000;
/// How long the end of the transport waits for reads to end.
const ENDING_NS: u64 = 100_000_000;

/// State of the reads of peers' memory.
pub(super) struct Pulls {
    // Dropped in this order: the engine ends before the memory that it reads into or exports.
    engine: Box<dyn OneSided>,
    slots: Vec<Lease>,
    slots_per_peer: usize,
    reads: Vec<Read>,
    /// Requests with blocks left to read, in round-robin order.
    turns: VecDeque<u64>,
    requests: HashMap<u64, Pull>,
    partners: HashMap<Arc<str>, Partner>,
    introduction: Introduction,
    /// When a read last started or ended, and whether peers may be reading.
    last_change: SimTime,
    read_by_peers: bool,
    _served: Option<Arc<Arena>>,
}

/// A peer that can be read from, by the name of its agent.
#[derive(Default)]
struct Partner {
    /// Connections; two if each side has made one.
    connections: u32,
    reads: usize,
    /// Slots of failed reads. Their last bytes may still arrive, so they are not reused until NIXL
    /// has unloaded the peer.
    quarantined: Vec<Lease>,
}

/// A request that the peer has answered.
struct Pull {
    peer: PeerId,
    agent: Arc<str>,
    chunks: VecDeque<Chunk>,
    /// Missing bytes of each block, and its checksum.
    blocks: Vec<(usize, u64)>,
    reads: usize,
}

/// A block, or a part of it that fits into a slot.
struct Chunk {
    block: usize,
    /// Offset in the block.
    inside: usize,
    /// Address at the peer.
    from: usize,
    bytes: usize,
}

struct Read {
    ticket: Ticket,
    slot: Lease,
    agent: Arc<str>,
    peer: PeerId,
    request: u64,
    chunks: Vec<Chunk>,
}

/// The address of a peer's blocks, and the name of its agent.
pub(super) struct RemoteMemory {
    agent: Arc<str>,
    base: u64,
    bytes: u64,
}

/// The outcome of one round.
#[derive(Default)]
struct RoundOutcome {
    /// Requests whose blocks the peer may unpin.
    complete: Vec<(PeerId, u64)>,
    /// Connections through which reads fail, and why.
    lost: Vec<(PeerId, String)>,
}

impl Pulls {
    /// `staging` is memory that `engine` may write to, and `served` memory that it exports.
    pub(super) fn new(
        mut engine: Box<dyn OneSided>,
        staging: &Arc<Region>,
        served: Option<Arc<Arena>>,
    ) -> Result<Pulls, NixlError> {
        let slots: Vec<Lease> = (0..staging.len() / SLOT_BYTES)
            .map(|at| staging.lease(at * SLOT_BYTES, SLOT_BYTES))
            .collect::<Result<_, _>>()
            .expect("the region is new");
        let introduction = Introduction {
            base: served
                .as_ref()
                .map_or(0, |arena| arena.base().as_ptr() as u64),
            bytes: served.as_ref().map_or(0, |arena| arena.len() as u64),
            agent: engine.introduction()?,
        };
        Ok(Pulls {
            engine,
            slots_per_peer: (slots.len() / SHARE).max(1),
            slots,
            reads: Vec::new(),
            turns: VecDeque::new(),
            requests: HashMap::new(),
            partners: HashMap::new(),
            introduction,
            last_change: SimTime::ZERO,
            read_by_peers: false,
            _served: served,
        })
    }

    /// Bytes of staging memory for `asked`: whole slots, and at least one per peer.
    pub(super) fn staging_bytes(asked: usize) -> usize {
        (asked / SLOT_BYTES).max(SHARE) * SLOT_BYTES
    }

    pub(super) fn introduction(&self) -> &Introduction {
        &self.introduction
    }

    /// Time until the next poll; `None` if nothing is in flight.
    pub(super) fn pause_ns(&self, now: SimTime, spin_ns: u64) -> Option<u64> {
        let pause = if now.since(self.last_change) < spin_ns {
            0
        } else {
            PAUSE_NS
        };
        (!self.reads.is_empty() || self.read_by_peers).then_some(pause)
    }

    /// A peer may read the blocks that this side has pinned for it.
    pub(super) fn on_pinned(&mut self, now: SimTime) {
        self.last_change = now;
    }

    /// Lets the backend do work that belongs to no transfer, such as ending connections.
    pub(super) fn progress(&mut self) {
        self.engine.progress();
    }

    /// Adds a connection to the peer with this metadata.
    pub(super) fn add_peer(&mut self, theirs: &Introduction) -> Result<RemoteMemory, NixlError> {
        let agent: Arc<str> = self.engine.load_peer(&theirs.agent)?.into();
        let partner = self.partners.entry(Arc::clone(&agent)).or_default();
        partner.connections += 1;
        Ok(RemoteMemory {
            agent,
            base: theirs.base,
            bytes: theirs.bytes,
        })
    }

    /// Handles the end of a connection. Its reads continue until they end by themselves.
    pub(super) fn remove_connection(&mut self, peer: PeerId, remote: &RemoteMemory) {
        self.requests.retain(|_, pull| pull.peer != peer);
        if let Some(partner) = self.partners.get_mut(&remote.agent) {
            partner.connections -= 1;
        }
        self.unload_if_unused(&remote.agent);
    }

    /// Unloads a peer from NIXL if it has no connections and reads.
    fn unload_if_unused(&mut self, agent: &Arc<str>) {
        let Some(partner) = self.partners.get_mut(agent) else {
            return;
        };
        if partner.connections == 0 && partner.reads == 0 {
            self.engine.unload_peer(agent);
            self.slots.append(&mut partner.quarantined);
            self.partners.remove(agent);
        }
    }

    /// Ends a request that has no reads in flight or left.
    fn end_if_complete(&mut self, request: u64, outcome: &mut RoundOutcome) {
        let complete = |pull: &Pull| pull.chunks.is_empty() && pull.reads == 0;
        if self.requests.get(&request).is_some_and(complete)
            && let Some(pull) = self.requests.remove(&request)
        {
            outcome.complete.push((pull.peer, request));
        }
    }

    /// Posts one read of a request, if a slot is free. Returns whether it did.
    fn post(&mut self, request: u64) -> Result<bool, NixlError> {
        let Some(pull) = self.requests.get_mut(&request) else {
            return Ok(false);
        };
        let partner = self
            .partners
            .get_mut(&pull.agent)
            .expect("a pull has a partner");
        let room = partner.reads + partner.quarantined.len() < self.slots_per_peer;
        let Some(mut slot) = self.slots.pop_if(|_| room) else {
            return Ok(false);
        };
        let to = slot.bytes_mut().as_mut_ptr() as usize;
        let (mut chunks, mut spans, mut filled) = (Vec::new(), Vec::new(), 0);
        while let Some(chunk) = pull.chunks.front()
            && filled + chunk.bytes <= SLOT_BYTES
        {
            let chunk = pull.chunks.pop_front().expect("front() returned Some");
            spans.push(Span {
                to: to + filled,
                from: chunk.from,
                bytes: chunk.bytes,
            });
            filled += chunk.bytes;
            chunks.push(chunk);
        }
        // SAFETY: the slot is staging memory, which is registered (`new`). Its lease is not
        // accessed until the read has ended: it moves to `reads`, or below to the quarantine.
        match unsafe { self.engine.read(&pull.agent, &spans) } {
            Ok(ticket) => {
                partner.reads += 1;
                pull.reads += 1;
                self.reads.push(Read {
                    ticket,
                    slot,
                    agent: Arc::clone(&pull.agent),
                    peer: pull.peer,
                    request,
                    chunks,
                });
                Ok(true)
            }
            Err(error) => {
                partner.quarantined.push(slot);
                Err(error)
            }
        }
    }
}

impl Drop for Pulls {
    /// Waits briefly for reads in flight, which are mostly memory copies. NIXL is safe without it,
    /// but logs a warning.
    fn drop(&mut self) {
        let until = clock::now() + ENDING_NS;
        while !self.reads.is_empty() && clock::now() < until {
            let engine = &mut self.engine;
            self.reads
                .retain(|read| engine.poll(read.ticket) == ReadState::InFlight);
            std::thread::yield_now();
        }
    }
}

impl Run {
    /// Starts to read blocks that a peer has pinned.
    pub(super) fn begin_pull(
        &mut self,
        conn: &mut Conn,
        request: u64,
        answers: Vec<Answer>,
    ) -> Result<(), CloseReason> {
        let mut chunks = VecDeque::new();
        let mut blocks = Vec::with_capacity(answers.len());
        for (block, answer) in answers.into_iter().enumerate() {
            let outcome = match answer {
                Answer::Here {
                    checksum: sum,
                    offset,
                    len,
                } => {
                    let there = conn.remote.as_ref().is_some_and(|remote| {
                        let end = offset.checked_add(u64::from(len));
                        end.is_some_and(|end| end <= remote.bytes)
                    });
                    let wanted = destination_of(&mut self.transfers, request, to_u32(block))
                        .map(|destination| destination.len());
                    if !there || wanted.is_some_and(|wanted| wanted != to_usize(len)) {
                        return Err(CloseReason::Text(
                            "its blocks are outside of its memory, or differ from the requested length"
                                .into(),
                        ));
                    }
                    let remote = conn
                        .remote
                        .as_ref()
                        .expect("a pull's connection has remote memory");
                    let from = to_usize(remote.base + offset);
                    chunks.extend((0..to_usize(len)).step_by(SLOT_BYTES).map(|inside| Chunk {
                        block,
                        inside,
                        from: from + inside,
                        bytes: (to_usize(len) - inside).min(SLOT_BYTES),
                    }));
                    blocks.push((to_usize(len), sum));
                    // An empty block needs no read.
                    if len > 0 {
                        continue;
                    }
                    Ok(())
                }
                Answer::Absent => Err(FetchError::Absent),
                Answer::Length(_) => Err(FetchError::Length),
            };
            blocks.resize(block + 1, (0, 0));
            self.settle(request, block, outcome);
        }
        self.finish_if_settled(request);
        let (Some(pulls), Some(remote)) = (&mut self.pulls, &conn.remote) else {
            return Ok(());
        };
        if pulls.requests.contains_key(&request) {
            return Err(CloseReason::Text("it answers a request twice".into()));
        }
        let pull = Pull {
            peer: conn.peer,
            agent: Arc::clone(&remote.agent),
            chunks,
            blocks,
            reads: 0,
        };
        pulls.requests.insert(request, pull);
        pulls.turns.push_back(request);
        Ok(())
    }

    /// Takes completed reads, and posts more.
    pub(super) fn pull_some(&mut self) {
        let Some(mut pulls) = self.pulls.take() else {
            return;
        };
        let mut outcome = RoundOutcome::default();
        self.pull_some_of(&mut pulls, &mut outcome);
        // Restored before connections are ended, which needs the pulls.
        self.pulls = Some(pulls);
        for (peer, request) in outcome.complete {
            self.with_conn(peer, |_, conn| {
                conn.push(release(request));
                Ok(())
            });
        }
        for (peer, why) in outcome.lost {
            self.with_conn(peer, |_, _| Err(CloseReason::Text(why)));
        }
    }

    fn pull_some_of(&mut self, pulls: &mut Pulls, outcome: &mut RoundOutcome) {
        let pinned = |conn: &Conn| conn.scheme == Scheme::Pull && !conn.pins.is_empty();
        pulls.read_by_peers = self.conns.iter().flatten().any(pinned);
        if pulls.read_by_peers {
            pulls.engine.progress();
            if pulls.reads.is_empty() {
                // The reader may be waiting for this CPU.
                std::thread::yield_now();
            }
        }
        let (mut at, mut turn, mut worked) = (0, 0, false);
        while at < pulls.reads.len() && turn < TURN_BYTES {
            if self.end_read(pulls, at, outcome) {
                worked = true;
                turn += SLOT_BYTES;
            } else {
                at += 1;
            }
        }
        // One try per request, so that one that waits for a slot does not block others.
        for _ in 0..pulls.turns.len() {
            let Some(request) = pulls.turns.pop_front() else {
                break;
            };
            if !self.transfers.contains_key(&request)
                && let Some(pull) = pulls.requests.get_mut(&request)
            {
                pull.chunks.clear(); // the transfer has ended
            }
            while let Some(pull) = pulls.requests.get(&request)
                && !pull.chunks.is_empty()
            {
                let peer = pull.peer;
                match pulls.post(request) {
                    Ok(true) => {
                        worked = true;
                        // On one host a read has often ended already. Its bytes are then still in a
                        // cache, and the next read reuses its slot.
                        let last = pulls.reads.len() - 1;
                        if turn < TURN_BYTES && self.end_read(pulls, last, outcome) {
                            turn += SLOT_BYTES;
                        }
                    }
                    Ok(false) => break,
                    Err(error) => {
                        outcome.lost.push((peer, error.to_string()));
                        break;
                    }
                }
            }
            let has_more = |pull: &Pull| !pull.chunks.is_empty();
            if pulls.requests.get(&request).is_some_and(has_more) {
                pulls.turns.push_back(request);
            } else {
                pulls.end_if_complete(request, outcome);
            }
        }
        if worked {
            pulls.last_change = clock::now();
        }
    }

    /// Handles the read at `at` if it has ended. Returns whether it has.
    fn end_read(&mut self, pulls: &mut Pulls, at: usize, outcome: &mut RoundOutcome) -> bool {
        let reading = pulls.engine.poll(pulls.reads[at].ticket);
        if reading == ReadState::InFlight {
            return false;
        }
        let read = pulls.reads.swap_remove(at);
        let partner = pulls
            .partners
            .get_mut(&read.agent)
            .expect("a read has a partner");
        partner.reads -= 1;
        if reading == ReadState::Done {
            self.take_read(pulls, &read);
            pulls.slots.push(read.slot);
        } else {
            partner.quarantined.push(read.slot);
            let why = "a read of its memory by NIXL failed".into();
            outcome.lost.push((read.peer, why));
        }
        pulls.unload_if_unused(&read.agent);
        pulls.end_if_complete(read.request, outcome);
        true
    }

    /// Copies the bytes of a read to their destinations.
    fn take_read(&mut self, pulls: &mut Pulls, read: &Read) {
        let Some(pull) = pulls.requests.get_mut(&read.request) else {
            return;
        };
        pull.reads -= 1;
        // The peer pins a block only until the deadline.
        let in_time = |deadline| clock::now() <= deadline;
        let verify = self.shared.options.verify;
        let mut from = 0;
        for chunk in &read.chunks {
            let bytes = &read.slot.bytes()[from..from + chunk.bytes];
            from += chunk.bytes;
            let deadline = self.transfers.get(&read.request).map(|t| t.deadline);
            let (Some(deadline), Some(destination)) = (
                deadline,
                destination_of(&mut self.transfers, read.request, to_u32(chunk.block)),
            ) else {
                continue;
            };
            let whole = chunk.bytes == destination.len();
            let to = &mut destination[chunk.inside..chunk.inside + chunk.bytes];
            let hashed = if verify && whole {
                // SAFETY: two slices of one length, to which this thread has exclusive access.
                Some(unsafe { copy_hashed(bytes.as_ptr(), to.as_mut_ptr(), bytes.len()) })
            } else {
                to.copy_from_slice(bytes);
                None
            };
            let (left, sum) = &mut pull.blocks[chunk.block];
            *left -= chunk.bytes;
            if *left == 0 {
                let right = || hashed.unwrap_or_else(|| checksum(destination)) == *sum;
                let outcome = if verify && !right() {
                    Err(FetchError::Checksum)
                } else if !in_time(deadline) {
                    Err(FetchError::Deadline)
                } else {
                    Ok(())
                };
                self.settle(read.request, chunk.block, outcome);
            }
        }
        self.finish_if_settled(read.request);
    }
}

/// Lets a peer unpin the blocks of a request.
pub(super) fn release(request: u64) -> Piece {
    Piece::Bytes(frame(FrameKind::Release, &request.to_le_bytes()))
}
